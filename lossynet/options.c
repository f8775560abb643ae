/* options.c — the table of the network's options, the parser of a value, and the settings that values
 * stand for.
 *
 * The trainer's command line, its --help, the Python package and the library's checks read this table.
 * A line has an option's name, range, default and help text once. What `auto` means is said here, too:
 * it depends on other options and on how many ranks there are.
 */
#define LOSSYNET_OPTION_ROWS struct lossynet_options
#include "lossynet/comm.h"
#include "lossynet/lossynet_trainer.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const char *const lead_names[] = {"auto", "off", NULL};

/* ---- texts with a form of their own ----------------------------------------------------- */

static bool parse_deadline(const char *text, double *seconds) {
    char *end;
    *seconds = ln_number(text, &end);
    if (!strcmp(text, "auto") || !strcmp(text, "off")) return *seconds = 0, true;
    return end != text && !*end && isfinite(*seconds) && *seconds > 0;
}

static bool is_deadline(const char *text) {
    double seconds;
    return parse_deadline(text, &seconds);
}

static bool is_port_range(const char *text) {
    int ports[2];
    return ln_port_parse(text, ports);
}

static bool is_traffic_class(const char *text) {
    int dscp;
    return ln_dscp_parse(text, &dscp);
}

/* ---- the table -------------------------------------------------------------------------- */

static const struct lossynet_option table[] = {
    REAL("look-ahead", look_ahead, RESUMED | IF_TRAINS, "0", 0, 100, "STEPS",
         "an option of the optimizer: workers compute their gradients this many steps ahead of "
         "the model, along its last change, as with Nesterov's momentum, Lookahead "
         "(arXiv:1907.08610) and DiLoCo's outer step (arXiv:2311.08105). Algorithms lossy and "
         "reliable"),
    REAL("loss-rate", loss_rate, RESUMED | IF_LOSES | IF_TRAINS, "0", 0, 1, "P[,P]",
         "share of the packets that is dropped on purpose: of gradients, from workers to owners, "
         "and after a comma of parameters, from owners to workers. One number is for both"),
    STRING(
        "loss-model", loss_model, RESUMED | IF_LOSES | IF_TRAINS, "bernoulli", "NAME",
        "bernoulli, each packet on its own; burst:MEAN_LENGTH, runs of lost packets "
        "(Gilbert-Elliott); outage:MEAN_STEPS, a link fails for whole steps, with :sender or "
        ":receiver all links from or to a worker, with :4 one of 4 paths; trace:FILE, a file of 0 "
        "and 1 (with any --loss-rate but 0); replay:FILE, a recorded run with late ranks "
        "(scripts/late_ranks.py)"),
    STRING("loss-at", loss_at, RESUMED | IF_LOSES | IF_TRAINS, "none", "LIST",
           "links and tensors with another loss rate, separated by commas. 3=0.5: the links from "
           "and to worker 3 lose half; 2-5=1: the link from 2 to 5 loses everything; 6-*=0.15:0: "
           "all links from 6 lose 15% of the gradients and no parameters; layers.0-3=0.5, "
           "layers.2.mlp, q_proj or embed_tokens: all packets of these tensors. The last entry "
           "that stands for a packet counts"),
    SEED("loss-seed", loss_seed, RESUMED | IF_LOSES | IF_TRAINS, "-1",
         "seed that decides which packets are dropped; default: --seed"),
    ONE_OF(
        "estimator", estimator, RESUMED | IF_ESTIMATES | IF_TRAINS, "mean", ln_estimator_names,
        "mean|balanced|zero",
        "how owners average the gradients that arrive: mean (the paper's), balanced (unbiased when "
        "workers have unlike data) or zero (lost gradients count as 0)"),
    ONE_OF("lead", lead, RESUMED | IF_LOSSY | IF_TRAINS, "auto", lead_names, "auto|off",
           "auto: owners broadcast values ahead of the model, along its last change, so that "
           "replicas that miss some broadcasts do not lag behind it. How far follows from the "
           "measured loss. Algorithm lossy"),
    REAL("carry", carry, RESUMED | IF_BROADCASTS | IF_TRAINS, "auto", 0, 1, "auto|SHARE",
         "error feedback: a sender adds this share of a lost gradient to its next one. "
         "On the CPU; algorithm lossy, estimator mean or zero. auto: 1 there, else 0"),
    WHOLE(
        "repair", repair, RESUMED | IF_LOSES | IF_TRAINS, "auto", 0, LOSSYNET_ROUNDS_GIVEN,
        "auto|N[,N]",
        "rounds in which lost packets are sent again: of gradients, and after a comma of "
        "parameters. One number is for both. auto: where more than 7% is lost, until at most 1.25% "
        "of the gradients stay lost (0.25% with --carry 0), in five rounds at most, and with "
        "--wire-dtype int8 or smaller until at most 12% of the parameters do, in two. Algorithm "
        "lossy"),
    STRING("repair-at", repair_at, RESUMED | IF_LOSES | IF_TRAINS, "none", "LIST",
           "links and tensors with another number of rounds, as for --loss-at, which no budget "
           "limits: layers.0-3=2, lm_head=0:1. Algorithm lossy"),
    REAL("repair-budget", repair_budget, RESUMED | IF_LOSES | IF_TRAINS, "auto", 0, 1e3,
         "auto|SHARE",
         "send at most this share of a phase's packets again, those that have been "
         "missing longest first, once for each hop; 0: no limit. auto: a fifth, or with "
         "--wire-dtype int8 or smaller what its gradients save against bf16; no limit with a "
         "number as --repair"),
    ONE_OF("link", link, LOSSYNET_RUN, "auto", ln_link_names, "auto|mpi|udp|verbs",
           "how ranks exchange packets: mpi, udp or verbs (RDMA). auto: verbs if every rank has an "
           "active RDMA port, else udp"),
    WHOLE("packet-bytes", packet_bytes, LOSSYNET_RUN, "0", 0, 65532, "N",
          "payload of a packet in bytes, a multiple of 4; 0: as much as a datagram carries, at "
          "most 4096"),
    ONE_OF("wire-dtype", wire_dtype, RESUMED | IF_TRAINS, "auto", ln_wire_dtype_names,
           "float32|bf16|int8|int6|int4|auto",
           "type in which gradients and parameters travel; owners keep float32. bf16: half the "
           "bytes. int8: a quarter, in blocks of 32 with a scale. int6, int4: a fifth or an eighth "
           "for gradients, and int8 for parameters. auto: int6, but float32 with --plain. "
           "Algorithms lossy and reliable"),
    STRING("interface", interface, NEUTRAL | EACH_RANK | IF_DATAGRAMS, NULL, "NAME",
           "udp: network interface; default: loopback on one host, else that of the default route. "
           "verbs: DEVICE[:PORT[:GID]], or several with commas, which the ranks of a host take in "
           "turn; default: the first active port"),
    STRING_THAT(
        is_port_range, "FIRST-LAST, at least two ports from 1 to 65535", "port-range", port_range,
        NEUTRAL | EACH_RANK | IF_DATAGRAMS, NULL, "FIRST-LAST",
        "udp: a rank takes two free UDP ports of these, and with --meet one TCP port, so that a "
        "firewall can let them pass; default: any"),
    WHOLE("link-threads", link_threads, NEUTRAL | IF_DATAGRAMS, "1", 1, LOSSYNET_LINK_THREADS, "N",
          "udp, verbs: threads of a rank that send and receive, each with a socket of its own. One "
          "takes some 2 ns for each element that goes and comes as int6, 2.6 as bf16"),
    REAL("pace-gbps", pace_gbps, NEUTRAL | EACH_RANK | IF_DATAGRAMS, "0", 0, 1e6, "GBIT",
         "udp, verbs: the highest rate at which a rank sends; 0: no limit"),
    REAL("loss-budget", loss_budget, NEUTRAL | IF_DATAGRAMS, "0", 0, 0.9, "P",
         "udp, verbs: a rank sends more slowly than --pace-gbps while the network loses more "
         "than this share; 0: never"),
    STRING_THAT(
        is_traffic_class, "default, le, cs0 to cs7, af11 to af43, va, ef or a DSCP from 0 to 63",
        "traffic-class", traffic_class, NEUTRAL | IF_DATAGRAMS, "default", "NAME",
        "udp, verbs: traffic class (DSCP) of gradients and parameters: le (lower effort, RFC "
        "8622), cs0 ... cs7, af11 ... af43, va, ef, a number from 0 to 63, or default"),
    REAL("peer-timeout", peer_timeout, NEUTRAL | IF_DATAGRAMS, "-1", 0.1, 1e6, "SECONDS",
         "udp, verbs: a rank that is silent for this long is dead; default: 10, with --meet 1. A "
         "phase goes on without it after a fifth of this time, but not before 2 s"),
    STRING_THAT(
        is_deadline, "auto, off or a number of seconds above 0", "deadline", deadline,
        LOSSYNET_RUN | IF_TRAINS, "off", "auto|off|SECONDS",
        "udp, verbs: how long a step waits for late ranks after half of the ranks are done. The "
        "packets of a late rank are lost, or come in the next step with --carry 1, which is "
        "better; then it leaves out steps to catch up. auto: learnt from how late ranks are. "
        "off: wait for all. Algorithm lossy"),
    SWITCH("encrypt", encrypt, NEUTRAL | IF_DATAGRAMS,
           "udp, verbs: encrypt and authenticate every datagram"),
    STRING("key-file", key_file, NEUTRAL | EACH_RANK | IF_DATAGRAMS, NULL, "FILE",
           "with --encrypt: a secret file of 16 to 4,096 bytes. Only ranks that have it can join"),
    STRING("record-loss", record_loss, NEUTRAL | EACH_RANK | IF_TRAINS, NULL, "FILE",
           "write which packets arrived, as 0 and 1 for --loss-model trace; rank R of several "
           "writes FILE.R"),
    WHOLE("drift-samples", drift_samples, RESUMED | NEUTRAL | IF_TRAINS, "1024", 0, 1 << 24, "N",
          "number of parameters whose drift is measured; 0: none"),
    WHOLE("workers", workers, LOSSYNET_RUN, "0", 0, 65534, "N",
          "number of data-parallel replicas, a multiple of the ranks; 0: one per rank"),
};
enum { ENTRIES = sizeof table / sizeof *table };

const struct lossynet_option *lossynet_option_at(int i) {
    return i >= 0 && i < ENTRIES ? &table[i] : NULL;
}

const struct lossynet_option *lossynet_option_named(const char *name) {
    for (int i = 0; i < ENTRIES; i++)
        if (strcmp(table[i].name, name) == 0) return &table[i];
    return NULL;
}

/* ---- the parser ------------------------------------------------------------------------- */

static bool is_number(const struct lossynet_option *o) {
    return o->kind == LOSSYNET_OPTION_WHOLE || o->kind == LOSSYNET_OPTION_REAL;
}

bool lossynet_option_is_automatic(const struct lossynet_option *o) {
    return is_number(o) && !strncmp(o->argument, "auto|", 5);
}

bool lossynet_option_is_pair(const struct lossynet_option *o) {
    return is_number(o) && strstr(o->argument, "[,") != NULL;
}

/* Stores number i of an option. `checked`: in the option's range. Returns the end of the number in
 * `text`, or NULL if it is none. */
static const char *set_number(void *place, const struct lossynet_option *o, int i, const char *text,
                              bool checked) {
    const bool automatic = lossynet_option_is_automatic(o) && !strncmp(text, "auto", 4);
    const bool real = o->kind == LOSSYNET_OPTION_REAL;
    char *end = NULL;
    double number = LOSSYNET_AUTO;
    long long whole = LOSSYNET_AUTO;
    errno = 0;
    if (!automatic && real)
        number = ln_number(text, &end);
    else if (!automatic)
        whole = strtoll(text, &end, 10);
    const double value = real ? number : (double)whole;
    if (checked && !automatic &&
        (end == text || errno == ERANGE || !(value >= o->low && value <= o->high)))
        return NULL;
    if (real)
        ((double *)place)[i] = number;
    else if (o->kind == LOSSYNET_OPTION_WHOLE)
        ((int *)place)[i] = (int)whole;
    else
        *(int64_t *)place = whole;
    return automatic ? text + 4 : end;
}

static bool set_numbers(void *place, const struct lossynet_option *o, const char *text,
                        bool checked) {
    const char *end = set_number(place, o, 0, text, checked);
    if (end && lossynet_option_is_pair(o))
        end = set_number(place, o, 1, *end == ',' ? end + 1 : text, checked);
    return end && !*end;
}

static bool set_choice(void *place, const struct lossynet_option *o, const char *text) {
    for (int i = 0; o->choices[i]; i++)
        if (!strcmp(text, o->choices[i])) return *(int *)place = i, true;
    return false;
}

static bool set(void *place, const struct lossynet_option *o, const char *text, bool checked) {
    switch (o->kind) {
    case LOSSYNET_OPTION_TITLE:
    case LOSSYNET_OPTION_ELSEWHERE:
        return true;
    case LOSSYNET_OPTION_FLAG:
        *(bool *)place = *text == '1';
        return !strcmp(text, "0") || !strcmp(text, "1");
    case LOSSYNET_OPTION_TEXT:
        *(const char **)place = text;
        return !checked || (*text && (!o->fits || o->fits(text)));
    case LOSSYNET_OPTION_CHOICE:
        return set_choice(place, o, text);
    case LOSSYNET_OPTION_WHOLE:
    case LOSSYNET_OPTION_WHOLE64:
    case LOSSYNET_OPTION_REAL:
        return set_numbers(place, o, text, checked);
    }
    return false;
}

/* Says what an option takes. */
static void expect(const struct lossynet_option *o, const char *text, char *out, size_t size) {
    const char *what = o->kind == LOSSYNET_OPTION_REAL ? "a number" : "a whole number";
    if (o->kind == LOSSYNET_OPTION_TEXT || o->kind == LOSSYNET_OPTION_FLAG) {
        snprintf(out, size, "%s", o->expected ? o->expected : o->argument ? o->argument : "0 or 1");
    } else if (o->kind == LOSSYNET_OPTION_CHOICE) {
        snprintf(out, size, "%s", "one of");
        for (int i = 0; o->choices[i]; i++) {
            const size_t used = strlen(out);
            snprintf(out + used, size - used, " %s", o->choices[i]);
        }
    } else if (o->high >= INT_MAX && o->kind != LOSSYNET_OPTION_REAL &&
               strtod(text, NULL) < INT_MAX) {
        snprintf(out, size, "%s, at least %.15g", what, o->low);
    } else {
        snprintf(out, size, "%s%s from %.15g to %.15g%s",
                 lossynet_option_is_automatic(o) ? "auto or " : "", what, o->low, o->high,
                 lossynet_option_is_pair(o) ? ", or two with a comma" : "");
    }
}

bool lossynet_option_set(const struct lossynet_option *o, void *values, const char *text,
                         char *wrong, size_t size) {
    char expected[256];
    if (set((char *)values + o->offset, o, text, true)) return true;
    expect(o, text, expected, sizeof expected);
    if (o->kind == LOSSYNET_OPTION_TEXT && !*text)
        snprintf(wrong, size, "%s: expected %s, got nothing", o->name, o->argument);
    else
        snprintf(wrong, size, "%s: expected %s, got '%s'", o->name, expected, text);
    return false;
}

void lossynet_option_reset(const struct lossynet_option *o, void *values) {
    if (o->initial) set((char *)values + o->offset, o, o->initial, false);
}

/* ---- what values stand for -------------------------------------------------------------- */

/* One type, whether the network loses or not: nobody has to know the network beforehand. It costs no
 * perplexity that can be measured (partition/wire_dtypes.md), and what it saves of bf16 pays for sending
 * lost packets again. */
lossynet_wire_dtype lossynet_options_wire(const struct lossynet_options *o) {
    return o->wire_dtype == LOSSYNET_WIRE_AUTO ? LOSSYNET_INT6 : (lossynet_wire_dtype)o->wire_dtype;
}

/* Whether packets can be lost: on purpose, or by the link between so many ranks. */
static bool may_lose(const struct lossynet_options *o, int ranks) {
    return (ranks > 1 && o->link != LOSSYNET_LINK_MPI) || o->loss_rate[0] > 0 ||
           o->loss_rate[1] > 0 || strcmp(o->loss_at, "none") != 0 || strchr(o->loss_model, ':');
}

double lossynet_options_carry(const struct lossynet_options *o, int ranks) {
    const bool fits = o->estimator == LOSSYNET_MEAN || o->estimator == LOSSYNET_ZERO;
    if (o->carry >= 0) return o->carry;
    const bool small =
        lossynet_options_wire(o) >= LOSSYNET_INT8; /* rounded by so much that it counts */
    return fits && (small || may_lose(o, ranks));
}

/* Only gradients are worth sending again at full size. Small packets leave room for both phases. */
int lossynet_options_rounds(const struct lossynet_options *o, lossynet_phase phase) {
    if (o->repair[phase] != LOSSYNET_AUTO) return o->repair[phase];
    const bool small = lossynet_options_wire(o) >= LOSSYNET_INT8;
    return phase == LOSSYNET_GRADIENT || small ? LOSSYNET_ROUNDS_MEASURED : 0;
}

/* A fifth of the gradient phase is a tenth of the traffic. What smaller types save of gradients in
 * bf16 may be spent. */
static double budget_of(const struct lossynet_options *o) {
    const lossynet_wire_dtype dtype = lossynet_options_wire(o);
    if (o->repair_budget >= 0) return o->repair_budget;
    if (o->repair[0] != LOSSYNET_AUTO && o->repair[1] != LOSSYNET_AUTO) return 0;
    if (dtype < LOSSYNET_INT8) return 0.2;
    return lossynet_wire_bytes(LOSSYNET_BF16, LOSSYNET_GRADIENT) /
               lossynet_wire_bytes(dtype, LOSSYNET_GRADIENT) -
           1;
}

double lossynet_wire_bytes(lossynet_wire_dtype dtype, lossynet_phase phase) {
    static const double gradients[] = {4, 2, 33 / 32.0, 25 / 32.0, 17 / 32.0};
    const bool small = phase == LOSSYNET_PARAMETER && dtype > LOSSYNET_INT8;
    return gradients[small ? LOSSYNET_INT8 : dtype];
}

void lossynet_options_apply(const struct lossynet_options *o, int ranks,
                            struct lossynet_settings *s) {
    s->workers = o->workers ? o->workers : ranks;
    s->packet_bytes = (size_t)o->packet_bytes;
    s->wire_dtype = lossynet_options_wire(o);
    s->loss = (struct lossynet_loss_settings){
        .rate = {o->loss_rate[0], o->loss_rate[1]},
        .model = o->loss_model,
        .seed = o->loss_seed < 0 ? 1 : (uint64_t)o->loss_seed,
        .at = o->loss_at,
    };
    s->estimator = (lossynet_estimator)o->estimator;
    s->lead = o->lead == LOSSYNET_LEAD_AUTO;
    s->error_feedback = lossynet_options_carry(o, ranks) > 0;
    for (int phase = 0; phase < 2; phase++)
        s->retransmission_rounds[phase] = lossynet_options_rounds(o, (lossynet_phase)phase);
    s->repair_at = o->repair_at;
    s->retransmission_budget = budget_of(o);
    s->drift_samples = o->drift_samples;
    s->record_loss = o->record_loss;
    s->link = (lossynet_link_kind)o->link;
    s->network.interface = o->interface;
    memset(s->network.ports, 0, sizeof s->network.ports);
    if (o->port_range) ln_port_parse(o->port_range, s->network.ports);
    s->network.threads = o->link_threads;
    s->network.pace_gbps = o->pace_gbps;
    s->network.loss_budget = o->loss_budget;
    s->network.peer_timeout = o->peer_timeout < 0 ? 0 : o->peer_timeout;
    s->network.skip_late = strcmp(o->deadline, "off") != 0;
    parse_deadline(o->deadline, &s->network.deadline);
    s->network.encrypt = o->encrypt;
    s->network.key_file = o->key_file;
    ln_dscp_parse(o->traffic_class, &s->network.dscp);
}
