/* options.c — the table of options and its parser. See options.h. */
#include "llmc/options/options.h"
#include "llmc/options/options_table.h"
#include "llmc/model/activations.h"
#include "llmc/log/error.h"

#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const algorithm_names[] = {"lossy", "reliable", "rps", "naive", NULL};
const char *const schedule_names[] = {"cosine", "wsd", "linear", "constant", NULL};
const char *const schedule_decay_names[] = {"sqrt", "linear", NULL};
static const char *const device_names[] = {"auto", "cpu", "cuda", NULL};
static const char *const split_names[] = {"shared", "contiguous", NULL};
static const char *const estimator_names[] = {"mean", "balanced", "ht", "zero", NULL};
static const char *const link_names[] = {"auto", "mpi", "udp", "verbs", NULL};
static const char *const keep_names[] = {"worker-batch", "global-batch", NULL};
static const char *const lead_names[] = {"auto", "off", NULL};
static const char *const progress_names[] = {"auto", "on", "off", NULL};
static const char *const attention_names[] = {"own", "cudnn", "auto", NULL};
static const char *const dtype_names[] = {"auto", "float32", "bf16", "fp8", NULL};
const char *const option_wire_dtype_names[] = {"float32", "bf16", "int8", "int6",
                                               "int4",    "auto", NULL};

double option_wire_bytes(int wire_dtype, int phase) {
    static const double gradients[] = {4, 2, 33 / 32.0, 25 / 32.0, 17 / 32.0};
    /* Parameters are int8 where gradients are smaller. */
    const bool small = phase && wire_dtype > OPTION_WIRE_INT8;
    return gradients[small ? OPTION_WIRE_INT8 : wire_dtype];
}

#define AT(field) offsetof(struct options, field)
#define TITLE(text)                                                                                \
    { text, GROUP, 0, 0, NULL, 0, 0, NULL, NULL, NULL }
#define SWITCH(name, field, marks, help)                                                           \
    { name, FLAG, AT(field), marks, NULL, 0, 0, NULL, NULL, help }
#define STRING(name, field, marks, initial, argument, help)                                        \
    { name, TEXT, AT(field), marks, initial, 0, 0, NULL, argument, help }
#define INTEGER(name, field, marks, initial, low, high, help)                                      \
    { name, WHOLE, AT(field), marks, initial, low, high, NULL, "N", help }
#define SEED(name, field, marks, initial, help)                                                    \
    { name, WHOLE64, AT(field), marks, initial, 0, 9007199254740992.0, NULL, "N", help }
#define NUMBER(name, field, marks, initial, low, high, argument, help)                             \
    { name, REAL, AT(field), marks, initial, low, high, NULL, argument, help }
#define INTEGERS_OR_AUTO(name, field, marks, initial, low, high, help)                             \
    { name, WHOLE, AT(field), marks, initial, low, high, NULL, "auto|N[,N]", help }
#define NUMBER_OR_AUTO(name, field, marks, low, high, help)                                        \
    { name, REAL, AT(field), marks, "auto", low, high, NULL, "auto|SHARE", help }
#define ONE_OF(name, field, marks, initial, list, argument, help)                                  \
    { name, CHOICE, AT(field), marks, initial, 0, 0, list, argument, help }

static const struct option_entry table[] = {
    TITLE("Model"),
    STRING(
        "model", model, EACH_RANK, "15M", "PRESET|DIR|FILE",
        "a preset (260K 1M 3M 15M 42M 110M 1.1B 7B 13B 70B), a Hugging Face Llama directory, or a "
        "config.json alone, to train a model of that shape from random parameters"),
    INTEGER("vocab-size", vocabulary, RUN, "0", 0, 1 << 20,
            "size of a preset's vocabulary; 0: that of the data"),
    ONE_OF("device", device, EACH_RANK, "auto", device_names, "auto|cpu|cuda", "where to compute"),
    ONE_OF("dtype", dtype, RUN, "auto", dtype_names, "auto|float32|bf16|fp8",
           "type of activations and of the weights in use. auto: bf16 on cuda, float32 on the CPU. "
           "Master weights, gradients and sums are float32. fp8: as bf16, but layers multiply "
           "8-bit numbers (GPUs from sm_89 on)"),
    ONE_OF("recompute", recompute, NEUTRAL | EACH_RANK, "auto", recompute_names,
           "none|norms|attention|block|auto",
           "which activations the backward pass computes again instead of keeping them, to save "
           "memory. auto: the fewest with which the run fits the device"),
    SWITCH(
        "tune", tune, IF_GPU,
        "cuda: time the algorithms for matrix products at the start, and use the fastest. Results "
        "may then differ in the last bits from run to run. A checkpoint keeps the choice"),
    ONE_OF("attention", attention, IF_GPU, "own", attention_names, "own|cudnn|auto",
           "cuda in bf16: compute attention with this program's kernels or with cuDNN's, which "
           "differ in the last bits. cuDNN's need 2 bytes for each logit of a layer. auto: cuDNN's "
           "if it is installed, agrees with our kernels, repeats its own bits, and is faster. A "
           "checkpoint keeps the choice"),
    INTEGER("threads", threads, NEUTRAL | EACH_RANK, "0", 0, 4096,
            "CPU threads of this rank; 0: its share of the host's cores"),
    NUMBER("memory", memory, NEUTRAL | EACH_RANK, "0", 0, 1e9, "GB",
           "memory that all ranks of a host may use together. A run that needs more is refused. 0: "
           "what the host and its control groups have available"),

    TITLE("Data"),
    STRING("train", train, EACH_RANK, NULL, "GLOB", "token files to train on (llm.c format)"),
    STRING("val", val, EACH_RANK, NULL, "GLOB", "token files to evaluate on"),
    ONE_OF("data-split", data_split, RESUMED, "shared", split_names, "shared|contiguous",
           "shared: all workers draw from one shuffled order of all data. contiguous: each worker "
           "reads and shuffles its own 1/N of the files, so that workers see unlike data (not "
           "i.i.d.)"),
    STRING("tokenizer", tokenizer, NEUTRAL | EACH_RANK, NULL, "FILE",
           "tokenizer.model; default: the one beside the data or the model"),

    TITLE("Optimisation"),
    INTEGER("batch", batch, RUN, "8", 1, 1 << 20, "sequences per worker in a micro-batch"),
    INTEGER("seq", seq, RUN, "0", 0, 1 << 24,
            "tokens per sequence; 0: the model's length, at most 1024"),
    INTEGER("micro-batches", micro_batches, RESUMED, "1", 1, 1 << 20,
            "micro-batches whose gradients a worker adds up in a step"),
    INTEGER("steps", steps, RUN, "1000", 1, INT_MAX, "training steps"),
    NUMBER("lr", lr, RESUMED, "1e-3", 0, 1e3, "RATE", "peak learning rate"),
    NUMBER("lr-final", lr_final, RESUMED | IF_FALLS, "0.1", 0, 1, "FRACTION",
           "learning rate of the last step, as a fraction of the peak; not with constant"),
    INTEGER("warmup", warmup, RESUMED, "0", 0, INT_MAX, "steps of linear warm-up"),
    ONE_OF("schedule", schedule, RUN, "cosine", schedule_names, "cosine|wsd|linear|constant",
           "how the learning rate goes on after the warm-up. wsd (warm-up, stable, decay): it "
           "stays at the peak, and falls only in the last steps. Until then the run can be "
           "continued with more --steps"),
    NUMBER("decay", decay, RUN, "-1", 0, 1, "SHARE",
           "wsd: share of --steps in which the rate falls; default: 0.2"),
    ONE_OF("decay-shape", decay_shape, IF_WSD, "sqrt", schedule_decay_names, "sqrt|linear",
           "wsd: the rate falls with one minus the root of the share done, or in a line"),
    NUMBER("beta1", beta1, RESUMED, "0.9", 0, 0.999999, "B", "AdamW: decay of the first moment"),
    NUMBER("beta2", beta2, RESUMED, "0.95", 0, 0.999999, "B", "AdamW: decay of the second moment"),
    NUMBER("adam-eps", adam_eps, RESUMED, "1e-8", 1e-30, 1, "E",
           "AdamW: epsilon, added to the root of the second moment"),
    NUMBER("weight-decay", weight_decay, RESUMED, "0.1", 0, 1e3, "W",
           "AdamW: weight decay of matrices (norms have none)"),
    NUMBER("clip", clip, RESUMED, "1", 0, 1e30, "NORM",
           "clip the gradient to this global norm; 0: no clipping"),
    NUMBER("look-ahead", look_ahead, RESUMED, "0", 0, 100, "STEPS",
           "an option of the optimizer: workers compute their gradients this many steps ahead of "
           "the model, along its last change, as with Nesterov's momentum, Lookahead "
           "(arXiv:1907.08610) and DiLoCo's outer step (arXiv:2311.08105). Algorithms lossy and "
           "reliable"),
    SEED("seed", seed, RESUMED, "1", "seed of the initial weights and of the order of the data"),

    TITLE("Loss"),
    ONE_OF("algorithm", algorithm, RESUMED, "lossy", algorithm_names, "NAME",
           "lossy: owners average the gradients that arrive and broadcast parameters. reliable: "
           "the same, but nothing is lost. rps: average models. naive: broadcast gradients"),
    NUMBER("loss-rate", loss_rate, RESUMED | IF_LOSES, "0", 0, 1, "P[,P]",
           "share of the packets that is dropped on purpose: of gradients, from workers to owners, "
           "and after a comma of parameters, from owners to workers. One number is for both"),
    STRING(
        "loss-model", loss_model, RESUMED | IF_LOSES, "bernoulli", "NAME",
        "bernoulli; burst:MEAN_LENGTH, runs of lost packets (Gilbert-Elliott); outage:MEAN_STEPS, "
        "a link fails for whole steps, with :sender or :receiver all links from or to a worker, "
        "with "
        ":4 one of 4 paths; trace:FILE, a file of 0 and 1 (with any --loss-rate but 0)"),
    STRING("loss-at", loss_at, RESUMED | IF_LOSES, "none", "LIST",
           "links with another loss rate, in both phases, separated by commas. 3=0.5: the links "
           "from and to worker 3 lose half; 2-5=1: the link from 2 to 5 loses everything. The last "
           "entry that names a link counts"),
    SEED("loss-seed", loss_seed, RESUMED | IF_LOSES, "-1",
         "seed that decides which packets are dropped; default: --seed"),
    ONE_OF(
        "estimator", estimator, RESUMED | IF_ESTIMATES, "mean", estimator_names,
        "mean|balanced|ht|zero",
        "how owners average the gradients that arrive: mean (the paper's), balanced (unbiased when "
        "workers have unlike data), ht (Horvitz-Thompson) or zero (lost gradients count as 0)"),
    SWITCH("plain", plain, RUN | IF_LOSSY,
           "the algorithm of the paper and nothing else, for comparisons: --lead off --carry 0 "
           "--repair 0. Options beside it override it"),
    ONE_OF("lead", lead, RESUMED | IF_LOSSY, "auto", lead_names, "auto|off",
           "auto: owners broadcast values ahead of the model, along its last change, so that "
           "replicas that miss some broadcasts do not lag behind it. How far follows from the "
           "measured loss. Algorithm lossy"),
    NUMBER_OR_AUTO("carry", carry, RESUMED | IF_LOSSY, 0, 1,
                   "error feedback: a sender adds this share of a lost gradient to its next one. "
                   "Algorithm lossy, estimator mean or zero. auto: 1, but 0 with other estimators "
                   "and on GPUs, where it takes memory"),
    INTEGERS_OR_AUTO(
        "repair", repair, RESUMED | IF_LOSES, "auto", 0, 16,
        "rounds in which lost packets are sent again: of gradients, and after a comma of "
        "parameters. One number is for both. auto: where more than 7% is lost, until at most 1.25% "
        "of the gradients stay lost (0.25% with --carry 0), in five rounds at most, and with "
        "--wire-dtype int8 or smaller until at most 12% of the parameters do, in two. Algorithm "
        "lossy"),
    NUMBER_OR_AUTO("repair-budget", repair_budget, RESUMED | IF_LOSES, 0, 1e3,
                   "send at most this share of a phase's packets again, those that have been "
                   "missing longest first; 0: no limit. auto: a fifth, of smaller types as much as "
                   "gradients of bf16 take; no limit with a number as --repair"),

    TITLE("Network"),
    INTEGER("workers", workers, RUN, "0", 0, 65534,
            "number of data-parallel replicas, a multiple of the ranks; 0: one per rank"),
    STRING("group", group, RESUMED, "1", "G|host",
           "this many workers share one replica. They average without loss inside the group, and "
           "each sends 1/G of the group's gradient. Other groups see one worker. The last group "
           "may be smaller. host: all ranks of a host"),
    ONE_OF("link", link, RUN, "auto", link_names, "auto|mpi|udp|verbs",
           "how ranks exchange packets: mpi, udp or verbs (RDMA). auto: verbs if every rank has an "
           "active RDMA port, else udp"),
    INTEGER("packet-bytes", packet_bytes, RUN, "0", 0, 65532,
            "payload of a packet in bytes, a multiple of 4; 0: as much as a datagram carries, at "
            "most 4096"),
    ONE_OF(
        "wire-dtype", wire_dtype, RESUMED, "auto", option_wire_dtype_names,
        "float32|bf16|int8|int6|int4|auto",
        "type in which gradients and parameters travel; owners keep float32. bf16: half the "
        "bytes. int8: a quarter, in blocks of 32 with a scale. int6, int4: a fifth or an eighth "
        "for gradients, and int8 for parameters. auto: int8 where --loss-rate is so high that "
        "--repair auto sends packets again, which int8 pays for, and where at --link-gbps packets "
        "of bf16 would take longer than computing; int6 where more than 12% is lost; else bf16 "
        "on a GPU that computes in it, else float32. The first lines of a run say which. "
        "Algorithms lossy and reliable"),
    STRING("interface", interface, NEUTRAL | EACH_RANK | IF_DATAGRAMS, NULL, "NAME",
           "udp: network interface; default: loopback on one host, else that of the default route. "
           "verbs: DEVICE[:PORT[:GID]], or several with commas, which the ranks of a host take in "
           "turn; default: the first active port"),
    NUMBER("pace-gbps", pace_gbps, NEUTRAL | EACH_RANK | IF_DATAGRAMS, "0", 0, 1e6, "GBIT",
           "udp, verbs: the highest rate at which a rank sends; 0: no limit"),
    NUMBER("loss-budget", loss_budget, NEUTRAL | IF_DATAGRAMS, "0", 0, 0.9, "P",
           "udp, verbs: a rank sends more slowly than --pace-gbps while the network loses more "
           "than this share; 0: never"),
    STRING("traffic-class", traffic_class, NEUTRAL | IF_DATAGRAMS, "default", "NAME",
           "udp, verbs: traffic class (DSCP) of gradients and parameters: le (lower effort, RFC "
           "8622), cs0 ... cs7, af11 ... af43, va, ef, a number from 0 to 63, or default"),
    NUMBER("peer-timeout", peer_timeout, NEUTRAL | IF_DATAGRAMS, "-1", 0.1, 1e6, "SECONDS",
           "udp, verbs: a rank that is silent for this long is dead; default: 10, with --meet 1. A "
           "phase goes on without it after a fifth of this time, but not before 2 s"),
    STRING("meet", meet, SWEEPS | EACH_START, NULL, "URL",
           "etcd://HOST:PORT/RUN: ranks find each other in etcd under the name RUN, instead of by "
           "mpirun. Ranks may then die and join while the others train on (scripts/elastic.sh)"),
    INTEGER("meet-ranks", meet_ranks, SWEEPS, "1", 1, 65534,
            "with --meet: training begins when this many ranks have come"),
    ONE_OF(
        "meet-keep", meet_keep, SWEEPS, "worker-batch", keep_names, "worker-batch|global-batch",
        "with --meet: what stays the same when ranks die or join: the batch of each worker, or the "
        "global batch of --meet-ranks ranks, for which workers take more or fewer micro-batches"),
    SWITCH("meet-anew", meet_anew, SWEEPS | EACH_START,
           "with --meet: begin although an earlier start of this run has not ended it. No rank of "
           "that start may still be running"),
    STRING("deadline", deadline, RUN, "off", "auto|off|SECONDS",
           "udp, verbs: how long a step waits for late ranks after half of the ranks are done. The "
           "packets of a late rank are lost, or come in the next step with --carry 1, which is "
           "better; then it leaves out steps to catch up. auto: learnt from how late ranks are. "
           "off: wait for all. Algorithm lossy"),
    SWITCH("no-overlap", no_overlap, NEUTRAL | IF_DATAGRAMS,
           "udp, verbs: do not exchange packets while computing"),
    SWITCH("encrypt", encrypt, NEUTRAL | IF_DATAGRAMS,
           "udp, verbs: encrypt and authenticate every datagram"),
    STRING("key-file", key_file, NEUTRAL | EACH_RANK | IF_DATAGRAMS, NULL, "FILE",
           "with --encrypt: a secret file of 16 to 4,096 bytes. Only ranks that have it can join"),
    NUMBER("link-gbps", link_gbps, IF_RATED, "100", 1e-6, 1e6, "GBIT",
           "link speed of a worker, for --dry-run and --wire-dtype auto"),

    TITLE("Output"),
    STRING("record-loss", record_loss, NEUTRAL | EACH_RANK, NULL, "FILE",
           "write which packets arrived, as 0 and 1 for --loss-model trace; rank R of several "
           "writes FILE.R"),
    STRING("out", out, SWEEPS, NULL, "DIR", "directory for checkpoints and log.jsonl"),
    STRING("log", log, SWEEPS | EACH_RANK, NULL, "FILE",
           "log in JSON lines; default: OUT/log.jsonl"),
    INTEGER("save-every", save_every, NEUTRAL, "0", 0, INT_MAX,
            "steps between checkpoints; 0: only one, at the end"),
    INTEGER("keep", keep, NEUTRAL | IF_SAVES, "3", 0, INT_MAX,
            "how many of the newest checkpoints to keep; 0: all"),
    NUMBER("shard-size", shard_size, NEUTRAL | IF_SAVES, "1", 1e-6, 1e6, "GB",
           "largest file of a checkpoint's model. Each file is written by another rank; a smaller "
           "model is one file"),
    STRING("resume", resume, SWEEPS | EACH_START, NULL, "DIR|auto",
           "continue from a checkpoint. auto: from the newest undamaged one in OUT, or from the "
           "start if there is none"),
    SWITCH("overwrite", overwrite, SWEEPS | EACH_START | IF_SAVES,
           "replace an earlier run in OUT: remove its log and its checkpoints"),
    INTEGER("eval-every", eval_every, NEUTRAL | IF_EVALUATES, "0", 0, INT_MAX,
            "steps between evaluations; 0: only one, at the end"),
    INTEGER("eval-sequences", eval_sequences, IF_EVALUATES, "0", 0, INT_MAX,
            "number of validation sequences to use; 0: all"),
    INTEGER("stride", stride, IF_EVALUATES, "0", 0, 1 << 24,
            "evaluate in windows of --seq tokens that begin every N tokens. Each window scores the "
            "tokens that earlier ones did not (as Hugging Face does). 0: windows do not overlap"),
    INTEGER("sample-every", sample_every, NEUTRAL, "0", 0, INT_MAX,
            "steps between samples of text from the model; 0: none"),
    INTEGER("drift-samples", drift_samples, RESUMED | NEUTRAL, "1024", 0, 1 << 24,
            "number of parameters whose drift is measured; 0: none"),
    ONE_OF("progress", progress, SWEEPS | EACH_RANK, "auto", progress_names, "auto|on|off",
           "show a bar below the lines. auto: on a terminal, also under mpirun"),
    SWITCH("quiet", quiet, SWEEPS | EACH_RANK, "print only errors and warnings"),

    TITLE("Modes (training, when none is given)"),
    SWITCH("eval", eval, SWEEPS, "only compute the perplexity of --model DIR on --val"),
    STRING("eval-choices", eval_choices, SWEEPS, NULL, "FILE",
           "how many multiple-choice questions --model DIR answers correctly: JSON lines with "
           "context, endings and label, or llm.c's file of HellaSwag"),
    STRING("generate", generate, SWEEPS, NULL, "PROMPT",
           "continue the text PROMPT with --model DIR"),
    INTEGER("tokens", tokens, SWEEPS | IF_WRITES, "200", 1, 1 << 20,
            "number of tokens to generate"),
    NUMBER("temperature", temperature, SWEEPS | IF_SAMPLES, "0.8", 0, 100, "T",
           "temperature of sampling; 0: always the likeliest token"),
    NUMBER("top-p", top_p, SWEEPS | IF_SAMPLES, "0.95", 0, 1, "P",
           "sample from the likeliest tokens whose probabilities add up to P"),
    SWITCH("dry-run", dry_run, SWEEPS,
           "print memory, traffic, time on the link and expected drift, and allocate nothing"),
    SWITCH("preflight", preflight, SWEEPS | EACH_START,
           "check the nodes of a run over its link for a minute, and name bad ones"),
    SWITCH("help", help, SWEEPS,
           "print the options that most runs need; --help all: all options; --help WORD: those "
           "whose name or text has this word"),
    SWITCH("version", version, SWEEPS, "print the version, and what this program was built with"),
};
enum { ENTRIES = sizeof table / sizeof table[0] };

const struct option_entry *options_entry(int i) {
    return i < ENTRIES ? &table[i] : NULL;
}

static bool is_automatic(const struct option_entry *e) {
    return (e->kind == WHOLE || e->kind == REAL) && !strncmp(e->argument, "auto|", 5);
}

/* Whether the option has a number for each phase. */
static bool is_pair(const struct option_entry *e) {
    return (e->kind == WHOLE || e->kind == REAL) && strstr(e->argument, "[,") != NULL;
}

static const char *range_text(const struct option_entry *e, char *text, size_t size) {
    const char *what = e->kind == REAL ? "a number" : "a whole number";
    if (e->high >= INT_MAX) {
        snprintf(text, size, "%s, at least %.15g", what, e->low);
    } else {
        snprintf(text, size, "%s%s from %.15g to %.15g%s", is_automatic(e) ? "auto or " : "", what,
                 e->low, e->high, is_pair(e) ? ", or two with a comma" : "");
    }
    return text;
}

/* Stores number i of an option. `checked`: see set. Returns the end of the number in `text`, or NULL
 * if it is none in the option's range. */
static const char *set_number(struct options *out, const struct option_entry *e, int i,
                              const char *text, bool checked) {
    void *place = (char *)out + e->offset;
    const bool automatic = is_automatic(e) && !strncmp(text, "auto", 4);
    char *end = NULL;
    double real = OPTION_AUTO;
    long long whole = OPTION_AUTO;
    errno = 0;
    if (!automatic && e->kind == REAL)
        real = strtod(text, &end);
    else if (!automatic)
        whole = strtoll(text, &end, 10);
    const double value = e->kind == REAL ? real : (double)whole;
    if (checked && !automatic &&
        (end == text || errno == ERANGE || !(value >= e->low && value <= e->high)))
        return NULL;
    if (e->kind == REAL)
        ((double *)place)[i] = real;
    else if (e->kind == WHOLE)
        ((int *)place)[i] = (int)whole;
    else
        *(int64_t *)place = whole;
    return automatic ? text + 4 : end;
}

static bool set_numbers(struct options *out, const struct option_entry *e, const char *text,
                        bool checked) {
    const char *end = set_number(out, e, 0, text, checked);
    if (end && is_pair(e)) end = set_number(out, e, 1, *end == ',' ? end + 1 : text, checked);
    return end && !*end;
}

/* Stores `text` in the setting. `checked` is false for defaults, which may lie outside the
 * range, to mark an option that was not given. */
static int set(struct options *out, const struct option_entry *e, const char *text, bool checked) {
    void *place = (char *)out + e->offset;
    char expected[160];
    switch (e->kind) {
    case GROUP:
        return 0;
    case FLAG:
        *(bool *)place = true;
        return 0;
    case TEXT:
        if (checked && !*text)
            return log_error("--%s: expected %s, got nothing", e->name, e->argument);
        *(const char **)place = text;
        return 0;
    case CHOICE:
        for (int i = 0; e->choices[i]; i++) {
            if (!strcmp(text, e->choices[i])) return *(int *)place = i, 0;
        }
        snprintf(expected, sizeof expected, "%s", "one of");
        for (int i = 0; e->choices[i]; i++) {
            size_t used = strlen(expected);
            snprintf(expected + used, sizeof expected - used, " %s", e->choices[i]);
        }
        return log_error("--%s: expected %s, got '%s'", e->name, expected, text);
    case WHOLE:
    case WHOLE64:
    case REAL:
        if (set_numbers(out, e, text, checked)) return 0;
        return log_error("--%s: expected %s, got '%s'", e->name,
                         range_text(e, expected, sizeof expected), text);
    }
    return 0;
}

bool options_given(const struct options *o, const void *field) {
    const size_t offset = (size_t)((const char *)field - (const char *)o);
    for (int i = 0; i < ENTRIES; i++)
        if (table[i].kind != GROUP && table[i].offset == offset) return o->given[i];
    return false;
}

static void be_plain(struct options *out) {
    if (!options_given(out, &out->lead)) out->lead = OPTION_LEAD_OFF;
    if (!options_given(out, &out->carry)) out->carry = 0;
    if (!options_given(out, &out->repair)) out->repair[0] = out->repair[1] = 0;
}

/* Reports a word that getopt did not accept. */
static int refuse_option(const char *word) {
    const char *name = word + strspn(word, "-");
    const size_t bytes = strcspn(name, "=");
    char like[512] = "";
    for (int i = 0; i < ENTRIES && !strncmp(word, "--", 2) && bytes > 0; i++) {
        const struct option_entry *e = &table[i];
        const size_t used = strlen(like);
        if (e->kind == GROUP || strncmp(e->name, name, bytes)) continue;
        if (e->kind == FLAG && strlen(e->name) == bytes)
            return log_error("--%s: expected no value, got '%s'", e->name, name + bytes + 1);
        snprintf(like + used, sizeof like - used, " --%s", e->name);
    }
    if (*like) return log_error("%s: several options begin so:%s", word, like);
    return log_error("%s: unknown option (see --help)", word);
}

int options_parse(int argc, char **argv, struct options *out) {
    struct option longs[ENTRIES + 1];
    int count = 0;
    memset(out, 0, sizeof *out);
    memset(longs, 0, sizeof longs);
    for (int i = 0; i < ENTRIES; i++) {
        const struct option_entry *e = &table[i];
        if (e->kind == GROUP) continue;
        if (e->initial) set(out, e, e->initial, false);
        longs[count].name = e->name;
        longs[count].has_arg = e->kind == FLAG ? no_argument : required_argument;
        if (e->offset == AT(help)) longs[count].has_arg = optional_argument;
        longs[count++].val = 256 + i;
    }
    opterr = 0;
    optind = 0; /* glibc: start again, since tests parse several times */
    for (int c; (c = getopt_long(argc, argv, ":", longs, NULL)) != -1;) {
        if (c == ':') {
            log_error("%s: expected a value after it (see --help)", argv[optind - 1]);
            return 2;
        }
        if (c < 256) {
            refuse_option(argv[optind - 1]);
            return 2;
        }
        if (set(out, &table[c - 256], optarg, true)) return 2;
        out->given[c - 256] = true;
        if (table[c - 256].offset == AT(help)) out->help_topic = optarg;
    }
    if (out->help && !out->help_topic && optind < argc) out->help_topic = argv[optind++];
    if (optind < argc) {
        log_error("'%s': expected options only (see --help)", argv[optind]);
        return 2;
    }
    if (out->plain) be_plain(out);
    if (out->loss_seed < 0) out->loss_seed = out->seed;
    if (out->peer_timeout < 0) out->peer_timeout = out->meet ? 1 : 10;
    if (out->decay >= 0 && out->schedule != SCHEDULE_WSD) {
        log_error("--decay: expected --schedule wsd with it, got --schedule %s",
                  schedule_names[out->schedule]);
        return 2;
    }
    if (out->decay < 0) out->decay = 0.2;
    if (out->packet_bytes % 4) {
        log_error("--packet-bytes: expected a multiple of 4, got '%d'", out->packet_bytes);
        return 2;
    }
    if (out->packet_bytes && out->packet_bytes < 64) {
        log_error("--packet-bytes: expected 0 or at least 64, got '%d'", out->packet_bytes);
        return 2;
    }
    return 0;
}

/* ---- options without an effect ---------------------------------------------------------- */

static const struct {
    unsigned mark;
    const char *otherwise; /* when an option with the mark has no effect */
} needs[] = {{IF_LOSES, "with --algorithm reliable, which loses nothing"},
             {IF_LOSSY, "without --algorithm lossy"},
             {IF_ESTIMATES, "without --algorithm lossy or naive"},
             {IF_DATAGRAMS, "without --link udp or verbs"},
             {IF_WSD, "without --schedule wsd"},
             {IF_FALLS, "with --schedule constant"},
             {IF_RATED, "without --dry-run or --wire-dtype auto"},
             {IF_WRITES, "without --generate"},
             {IF_SAMPLES, "without --generate or --sample-every"},
             {IF_EVALUATES, "without --val"},
             {IF_SAVES, "without --out"},
             {IF_GPU, "with --device cpu"}};
enum { NEEDS = sizeof needs / sizeof *needs };

static bool is_met(const struct options *o, unsigned mark) {
    switch (mark) {
    case IF_LOSES:
        return o->algorithm != ALGORITHM_RELIABLE;
    case IF_LOSSY:
        return o->algorithm == ALGORITHM_LOSSY;
    case IF_ESTIMATES:
        return o->algorithm == ALGORITHM_LOSSY || o->algorithm == ALGORITHM_NAIVE;
    case IF_DATAGRAMS:
        return o->algorithm != ALGORITHM_RELIABLE && strcmp(link_names[o->link], "mpi") != 0;
    case IF_WSD:
        return o->schedule == SCHEDULE_WSD;
    case IF_FALLS:
        return o->schedule != SCHEDULE_CONSTANT;
    case IF_RATED:
        return o->dry_run || o->wire_dtype_chosen;
    case IF_WRITES:
        return o->generate != NULL;
    case IF_SAMPLES:
        return o->generate || o->sample_every;
    case IF_EVALUATES:
        return o->val != NULL;
    case IF_SAVES:
        return o->out != NULL;
    default:
        return o->device != DEVICE_CPU;
    }
}

const char *options_unused(const struct options *o, int i) {
    for (int n = 0; n < NEEDS; n++)
        if (table[i].marks & needs[n].mark && !is_met(o, needs[n].mark)) return needs[n].otherwise;
    return NULL;
}

void options_print_unused(const struct options *o) {
    for (int n = 0; n < NEEDS; n++) {
        const char *before = "note: ";
        for (int i = 0; i < ENTRIES; i++) {
            if (!o->given[i] || options_unused(o, i) != needs[n].otherwise) continue;
            printf("%s--%s", before, table[i].name);
            before = ", ";
        }
        if (*before == ',') printf(": no effect %s\n", needs[n].otherwise);
    }
}

bool options_one_worker(const struct options *o) {
    return o->generate || o->eval_choices;
}

struct schedule options_schedule(const struct options *o) {
    const struct schedule s = {.kind = o->schedule,
                               .steps = o->steps,
                               .warmup = o->warmup,
                               .peak = o->lr,
                               .final_fraction = o->lr_final,
                               .decay = o->decay,
                               .decay_shape = o->decay_shape};
    return s;
}

int64_t options_micro_batches(const struct options *o, int workers) {
    if (o->meet_keep == KEEP_WORKER_BATCH) return (int64_t)workers * o->micro_batches;
    const int64_t at_start = (int64_t)(o->workers ? o->workers : o->meet_ranks) * o->micro_batches;
    return at_start > workers ? at_start : workers;
}

/* Number i of an option, or "auto". */
static json_t *number_json(const struct option_entry *e, const void *place, int i) {
    const int whole = e->kind == WHOLE ? ((const int *)place)[i] : 0;
    const double real = e->kind == REAL ? ((const double *)place)[i] : whole;
    if (is_automatic(e) && real == OPTION_AUTO) return json_string("auto");
    return e->kind == WHOLE ? json_integer(whole) : json_real(real);
}

static json_t *value_json(const struct option_entry *e, const void *place) {
    const char *text = e->kind == TEXT ? *(const char *const *)place : NULL;
    switch (e->kind) {
    case GROUP:
        break;
    case FLAG:
        return json_boolean(*(const bool *)place);
    case TEXT:
        return text ? json_string(text) : json_null();
    case CHOICE:
        return json_string(e->choices[*(const int *)place]);
    case WHOLE64:
        return json_integer(*(const int64_t *)place);
    case WHOLE:
    case REAL: {
        json_t *value = number_json(e, place, 0);
        json_t *second = is_pair(e) ? number_json(e, place, 1) : NULL;
        if (!second || !json_equal(value, second))
            return second ? json_pack("[o,o]", value, second) : value;
        json_decref(second);
        return value;
    }
    }
    return NULL;
}

json_t *options_json(const struct options *options, unsigned without) {
    _Static_assert((int)ENTRIES <= (int)OPTIONS_MOST, "room for all options");
    json_t *all = json_object();
    for (int i = 0; i < ENTRIES; i++) {
        const struct option_entry *e = &table[i];
        if (e->kind == GROUP || e->marks & without) continue;
        json_object_set_new(all, e->name, value_json(e, (const char *)options + e->offset));
    }
    return all;
}
