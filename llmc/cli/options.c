/* options.c — the table of options, its parser and its help text. See options.h. */
#include "llmc/cli/options.h"
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
static const char *const device_names[] = {"auto", "cpu", "cuda", NULL};
static const char *const split_names[] = {"shared", "contiguous", NULL};
static const char *const keep_names[] = {"worker-batch", "global-batch", NULL};
static const char *const progress_names[] = {"auto", "on", "off", NULL};
static const char *const attention_names[] = {"own", "cudnn", "auto", NULL};
static const char *const dtype_names[] = {"auto", "float32", "bf16", "fp8", NULL};
const char *const option_wire_dtype_names[] = {"float32", "bf16", "int8", "int4", NULL};

enum kind { GROUP, FLAG, TEXT, WHOLE, WHOLE64, REAL, CHOICE };

struct entry {
    const char *name; /* name of the option, or title of the group */
    enum kind kind;
    size_t offset; /* offset in struct options */
    const char *initial;
    double low, high;            /* WHOLE and REAL: allowed range, both ends included */
    const char *const *choices;  /* CHOICE */
    const char *argument, *help; /* for --help */
};

#define AT(field) offsetof(struct options, field)
#define TITLE(text)                                                                                \
    { text, GROUP, 0, NULL, 0, 0, NULL, NULL, NULL }
#define SWITCH(name, field, help)                                                                  \
    { name, FLAG, AT(field), NULL, 0, 0, NULL, NULL, help }
#define STRING(name, field, initial, argument, help)                                               \
    { name, TEXT, AT(field), initial, 0, 0, NULL, argument, help }
#define INTEGER(name, field, initial, low, high, help)                                             \
    { name, WHOLE, AT(field), initial, low, high, NULL, "N", help }
#define SEED(name, field, initial, help)                                                           \
    { name, WHOLE64, AT(field), initial, 0, 9007199254740992.0, NULL, "N", help }
#define NUMBER(name, field, initial, low, high, argument, help)                                    \
    { name, REAL, AT(field), initial, low, high, NULL, argument, help }
#define ONE_OF(name, field, initial, list, argument, help)                                         \
    { name, CHOICE, AT(field), initial, 0, 0, list, argument, help }

static const struct entry table[] = {
    TITLE("Model"),
    STRING("model", model, "15M", "PRESET|DIR",
           "preset (260K 1M 15M 42M 110M 1.1B 7B 13B 70B) or a Hugging Face Llama directory"),
    INTEGER("vocab-size", vocabulary, "0", 0, 65535,
            "vocabulary of a preset; 0: what the data says"),
    ONE_OF("device", device, "auto", device_names, "auto|cpu|cuda", "where to compute"),
    ONE_OF(
        "dtype", dtype, "auto", dtype_names, "auto|float32|bf16|fp8",
        "of activations and weights in use; auto: bf16 on cuda, float32 on the CPU. Master "
        "weights, gradients and sums are float32. fp8: bf16, and layers multiply numbers of 8 bits "
        "(GPUs from sm_89 on)"),
    ONE_OF("recompute", recompute, "auto", recompute_names, "none|norms|attention|block|auto",
           "what backward computes again, to save memory; auto: the least that fits the device"),
    SWITCH(
        "tune", tune,
        "cuda: time the algorithms for matrix products at the start, and take the fastest. Another "
        "run may choose others, with other bits; a checkpoint keeps the choice"),
    ONE_OF(
        "attention", attention, "own", attention_names, "own|cudnn|auto",
        "cuda in bf16: whose kernels compute attention, with other bits. cuDNN's need 2 bytes for "
        "each logit of a layer. auto: cuDNN's where it is installed, gives the results of the "
        "own, the same bits twice, and is faster; a checkpoint keeps the choice"),
    INTEGER("threads", threads, "0", 0, 4096,
            "CPU threads of this rank; 0: this rank's share of the cores"),
    NUMBER("memory", memory, "0", 0, 1e9, "GB",
           "that all ranks of a host may take of its memory; a run that needs more is refused. 0: "
           "what the host and its control groups have available"),

    TITLE("Data"),
    STRING("train", train, NULL, "GLOB", "token files to train on (llm.c format)"),
    STRING("val", val, NULL, "GLOB", "token files to evaluate on"),
    ONE_OF("data-split", data_split, "shared", split_names, "shared|contiguous",
           "shared: workers deal out one shuffled order of all data; contiguous: each has its 1/N "
           "of the files, one after the other, and shuffles that (data that is not i.i.d.)"),
    STRING("tokenizer", tokenizer, NULL, "FILE",
           "tokenizer.model; default: beside the data or the model"),

    TITLE("Optimisation"),
    INTEGER("batch", batch, "8", 1, 1 << 20, "sequences per worker and micro-batch"),
    INTEGER("seq", seq, "0", 0, 1 << 24,
            "tokens per sequence; 0: the model's length, at most 1024"),
    INTEGER("micro-batches", micro_batches, "1", 1, 1 << 20,
            "batches whose gradients a worker accumulates per step"),
    INTEGER("steps", steps, "1000", 1, INT_MAX, "training steps"),
    NUMBER("lr", lr, "1e-3", 0, 1e3, "RATE", "peak learning rate"),
    NUMBER("lr-final", lr_final, "0.1", 0, 1, "FRACTION", "of the peak, where the cosine ends"),
    INTEGER("warmup", warmup, "0", 0, INT_MAX, "steps of linear warm-up"),
    NUMBER("beta1", beta1, "0.9", 0, 0.999999, "B", "AdamW: decay of the mean"),
    NUMBER("beta2", beta2, "0.95", 0, 0.999999, "B", "AdamW: decay of the mean square"),
    NUMBER("adam-eps", adam_eps, "1e-8", 1e-30, 1, "E", "AdamW: added to the root"),
    NUMBER("weight-decay", weight_decay, "0.1", 0, 1e3, "W", "AdamW: of matrices, not of norms"),
    NUMBER("clip", clip, "1", 0, 1e30, "NORM", "global gradient norm; 0: no clipping"),
    SEED("seed", seed, "1", "of the initial weights and the order of the data"),

    TITLE("Loss"),
    ONE_OF("algorithm", algorithm, "lossy", algorithm_names, "NAME",
           "lossy: owners average gradients that arrive and broadcast parameters; "
           "reliable: the same, nothing lost; rps: average models; naive: broadcast gradients"),
    NUMBER("loss-rate", loss_rate, "0", 0, 1, "P",
           "share of packets lost, injected, in both phases"),
    NUMBER("gradient-loss-rate", gradient_loss_rate, "-1", 0, 1, "P",
           "workers to owner; default --loss-rate"),
    NUMBER("parameter-loss-rate", parameter_loss_rate, "-1", 0, 1, "P",
           "owner to workers; default --loss-rate"),
    STRING("loss-model", loss_model, "bernoulli", "NAME",
           "bernoulli, burst:MEAN_LENGTH (Gilbert-Elliott, packets), outage:MEAN_STEPS (a link is "
           "down for whole steps) or trace:FILE (0 and 1; with any --loss-rate but 0)"),
    STRING("loss-at", loss_at, "none", "LIST",
           "links that lose another share, in both phases: 3=0.5 those from and to worker 3, 2-5=1 "
           "the one from 2 to 5, several with commas; the last that names a link counts"),
    SEED("loss-seed", loss_seed, "-1", "of the lost packets; default --seed"),
    STRING("estimator", estimator, "mean", "NAME",
           "mean (the paper's), balanced (unbiased for unlike data), ht, zero"),
    STRING(
        "lead", lead, "auto", "auto|off|STEPS",
        "owners broadcast values so many steps ahead of the model, along its last change, so that "
        "replicas which miss some do not lag behind it; auto: as many as losses make replicas and "
        "carried gradients late. Algorithms lossy and reliable"),
    NUMBER("lead-extra", lead_extra, "0", 0, 100, "STEPS",
           "more than --lead auto: a look-ahead by choice, as in Nesterov's method"),
    NUMBER("carry", carry, "0", 0, 1, "SHARE",
           "of a lost gradient, added to its sender's next one. Without a lead it is for long and "
           "gentle training only. Algorithm lossy, estimator mean or zero"),
    INTEGER("repair", repair, "0", 0, 16,
            "rounds in which packets that were lost are sent again, in both phases; not with "
            "--multicast"),
    INTEGER("gradient-repair", gradient_repair, "-1", 0, 16, "workers to owner; default --repair"),
    INTEGER("parameter-repair", parameter_repair, "-1", 0, 16,
            "owner to workers; default --repair"),
    NUMBER("repair-budget", repair_budget, "0", 0, 1e3, "SHARE",
           "of a phase's packets, that are sent again at most, what has been missing longest "
           "first; 0: "
           "no limit"),
    SWITCH("robust", robust,
           "what loses least in our trials, for at most 10% more traffic: short for --lead auto "
           "--lead-extra 1 --carry 1 --gradient-repair 1 --parameter-repair 0 --repair-budget 0.2; "
           "what comes after it overrules it"),

    TITLE("Network"),
    INTEGER("workers", workers, "0", 0, 65534,
            "data-parallel replicas, a multiple of the ranks; 0: one per rank"),
    STRING(
        "group", group, "1", "G|host",
        "so many workers share a replica: they average inside the group without loss, each sends "
        "1/G of the group's gradient, and others see one worker. The last group has those that are "
        "left. host: all ranks of a host"),
    STRING("link", link, "auto", "NAME",
           "how ranks exchange packets: mpi, udp, verbs (RDMA), or auto: verbs where every rank "
           "has an "
           "active RDMA port, else udp"),
    INTEGER("packet-bytes", packet_bytes, "0", 0, 65532,
            "payload of a packet, a multiple of 4; 0: what a datagram carries, at most 4096"),
    ONE_OF("wire-dtype", wire_dtype, "float32", option_wire_dtype_names, "float32|bf16|int8|int4",
           "of gradients and parameters on their way, while owners keep float32. bf16: half the "
           "bytes, rounded to nearest. int8: a quarter, in blocks of 32 with a scale. int4: "
           "gradients an eighth, parameters as int8. Algorithms lossy and reliable"),
    STRING("interface", interface, NULL, "NAME",
           "udp: network interface; default: loopback on one host, else that of the default route. "
           "verbs: DEVICE[:PORT[:GID]], or several with commas, which the ranks of a host take in "
           "turn; "
           "default: the first active port"),
    NUMBER("pace-gbps", pace_gbps, "0", 0, 1e6, "GBIT",
           "udp, verbs: a rank sends no faster; 0: no limit"),
    NUMBER("loss-budget", loss_budget, "0", 0, 0.9, "P",
           "udp, verbs: send slower, of --pace-gbps, where the network loses more than this share; "
           "0: however much is lost"),
    STRING(
        "traffic-class", traffic_class, "default", "NAME",
        "udp, verbs: of bulk packets: le (lower effort, RFC 8622), cs0 ... cs7, af11 ... af43, va, "
        "ef, a DSCP from 0 to 63, or default"),
    NUMBER(
        "peer-timeout", peer_timeout, "-1", 0.1, 1e6, "SECONDS",
        "udp, verbs: a rank that is silent for so long is dead; default 10, with --meet 1. A phase "
        "goes on without it after a fifth of it, 2 s at least"),
    STRING("meet", meet, NULL, "URL",
           "etcd://HOST:PORT/RUN: ranks find each other in etcd, under the name RUN, instead of by "
           "mpirun. Then ranks may die and join while the others train on (scripts/elastic.sh)"),
    INTEGER("meet-ranks", meet_ranks, "1", 1, 65534,
            "with --meet: training begins when so many ranks have come"),
    ONE_OF(
        "meet-keep", meet_keep, "worker-batch", keep_names, "worker-batch|global-batch",
        "with --meet: what stays when ranks die or join: the sequences of a worker in a step, or "
        "those of all workers together, as --meet-ranks ranks have them, which then take more or "
        "fewer micro-batches"),
    SWITCH("meet-anew", meet_anew,
           "with --meet: go on although ranks of an earlier start, of which none is there any "
           "more, have not ended the run"),
    STRING("deadline", deadline, "off", "auto|off|SECONDS",
           "udp, verbs: a step waits for late ranks no longer than so many seconds after half of "
           "the ranks; what is not there then is lost (better with --carry 1: then it comes in the "
           "next step), and who is late leaves steps out. auto: as long as pays by how the ranks "
           "did before; off: all wait. Algorithm lossy"),
    SWITCH("no-overlap", no_overlap,
           "udp, verbs: compute and exchange packets in turn, not at the same time"),
    SWITCH("multicast", multicast,
           "udp, verbs: send parameters once for all ranks, where the network carries it"),
    SWITCH("encrypt", encrypt, "udp, verbs: encrypt and authenticate every datagram"),
    STRING("key-file", key_file, NULL, "FILE",
           "with --encrypt: a secret of all ranks, 16 to 4,096 bytes, without which none can join"),
    SWITCH("gpu-direct", gpu_direct,
           "verbs: the adapter reads gradients from the GPU's memory, where it can (dma-buf, "
           "nvidia-peermem); their checksum is the adapter's"),
    NUMBER("link-gbps", link_gbps, "100", 1e-6, 1e6, "GBIT",
           "link speed of a worker, for --dry-run"),

    TITLE("Output"),
    STRING("record-loss", record_loss, NULL, "FILE",
           "what arrived and what did not, as 0 and 1 for --loss-model trace; of rank R: FILE.R"),
    STRING("out", out, NULL, "DIR", "checkpoints and log.jsonl go here"),
    STRING("log", log, NULL, "FILE", "JSON lines; default OUT/log.jsonl"),
    INTEGER("save-every", save_every, "0", 0, INT_MAX,
            "steps between checkpoints; 0: only the last"),
    INTEGER("keep", keep, "3", 0, INT_MAX, "checkpoints kept of a run, the newest; 0: all"),
    NUMBER(
        "shard-size", shard_size, "1", 1e-6, 1e6, "GB",
        "the model of a checkpoint is written in files of at most this size, each by another rank; "
        "a model that is smaller is one file"),
    STRING("resume", resume, NULL, "DIR|auto",
           "go on from a checkpoint; auto: the newest whole one in OUT, or from the start"),
    SWITCH("overwrite", overwrite, "replace an earlier run: remove its log and its checkpoints"),
    INTEGER("eval-every", eval_every, "0", 0, INT_MAX,
            "steps between evaluations; 0: only the last"),
    INTEGER("eval-sequences", eval_sequences, "0", 0, INT_MAX, "validation sequences used; 0: all"),
    INTEGER("stride", stride, "0", 0, 1 << 24,
            "evaluate in windows of --seq tokens that begin every N, each scoring what those "
            "before it did not (Hugging Face's way); 0: side by side"),
    INTEGER("sample-every", sample_every, "0", 0, INT_MAX,
            "steps between lines of text that the model writes; 0: none"),
    INTEGER("drift-samples", drift_samples, "1024", 0, 1 << 24,
            "parameters watched for drift; 0: none"),
    ONE_OF("progress", progress, "auto", progress_names, "auto|on|off",
           "the bar below the lines; auto: on a terminal, under mpirun on that of mpirun"),
    SWITCH("quiet", quiet, "nothing on the terminal but errors and warnings"),

    TITLE("Modes (training, when none is given)"),
    SWITCH("eval", eval, "perplexity of --model DIR on --val, nothing else"),
    STRING("generate", generate, NULL, "PROMPT", "continue PROMPT with --model DIR"),
    INTEGER("tokens", tokens, "200", 1, 1 << 20, "tokens to generate"),
    NUMBER("temperature", temperature, "0.8", 0, 100, "T", "of sampling; 0: always the likeliest"),
    NUMBER("top-p", top_p, "0.95", 0, 1, "P", "sample from the likeliest tokens that make up P"),
    SWITCH("dry-run", dry_run,
           "memory, traffic, time on the link and expected drift; allocates nothing"),
    SWITCH("preflight", preflight,
           "a minute's check of the nodes that a run would use, over its link: names what is bad"),
    SWITCH("help", help, "this text"),
    SWITCH("version", version, "version and what this binary was built with"),
};
enum { ENTRIES = sizeof table / sizeof table[0] };

static const char *range_text(const struct entry *e, char *text, size_t size) {
    const char *what = e->kind == REAL ? "a number" : "a whole number";
    if (e->high >= INT_MAX) {
        snprintf(text, size, "%s, at least %.15g", what, e->low);
    } else {
        snprintf(text, size, "%s from %.15g to %.15g", what, e->low, e->high);
    }
    return text;
}

/* Stores `text` in the setting. `checked` is false for defaults, which may lie outside the
 * range, to mark an option that was not given. */
static int set(struct options *out, const struct entry *e, const char *text, bool checked) {
    void *place = (char *)out + e->offset;
    char *end = NULL;
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
    case WHOLE64: {
        errno = 0;
        long long value = strtoll(text, &end, 10);
        bool ok = end != text && !*end && !errno;
        if (checked && !(ok && value >= e->low && value <= e->high)) break;
        if (e->kind == WHOLE)
            *(int *)place = (int)value;
        else
            *(int64_t *)place = value;
        return 0;
    }
    case REAL: {
        double value = strtod(text, &end);
        bool ok = end != text && !*end && isfinite(value);
        if (checked && !(ok && value >= e->low && value <= e->high)) break;
        *(double *)place = value;
        return 0;
    }
    }
    return log_error("--%s: expected %s, got '%s'", e->name,
                     range_text(e, expected, sizeof expected), text);
}

/* The settings that were best in scripts/sweeps/results.md, "The lead". */
static void be_robust(struct options *out) {
    out->lead = "auto";
    out->lead_extra = 1;
    out->carry = 1;
    out->gradient_repair = 1;
    out->parameter_repair = 0;
    out->repair_budget = 0.2; /* of the gradient phase, which is half of the traffic */
}

/* Reports a word that getopt did not accept. */
static int refuse_option(const char *word) {
    const char *name = word + strspn(word, "-");
    const size_t bytes = strcspn(name, "=");
    char like[512] = "";
    for (int i = 0; i < ENTRIES && !strncmp(word, "--", 2) && bytes > 0; i++) {
        const struct entry *e = &table[i];
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
        const struct entry *e = &table[i];
        if (e->kind == GROUP) continue;
        if (e->initial) set(out, e, e->initial, false);
        longs[count].name = e->name;
        longs[count].has_arg = e->kind == FLAG ? no_argument : required_argument;
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
        if (strcmp(table[c - 256].name, "robust") == 0) be_robust(out);
    }
    if (optind < argc) {
        log_error("'%s': expected options only (see --help)", argv[optind]);
        return 2;
    }
    if (out->gradient_loss_rate < 0) out->gradient_loss_rate = out->loss_rate;
    if (out->parameter_loss_rate < 0) out->parameter_loss_rate = out->loss_rate;
    if (out->gradient_repair < 0) out->gradient_repair = out->repair;
    if (out->parameter_repair < 0) out->parameter_repair = out->repair;
    if (out->loss_seed < 0) out->loss_seed = out->seed;
    if (out->peer_timeout < 0) out->peer_timeout = out->meet ? 1 : 10;
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

int64_t options_micro_batches(const struct options *o, int workers) {
    if (o->meet_keep == KEEP_WORKER_BATCH) return (int64_t)workers * o->micro_batches;
    const int64_t at_start = (int64_t)(o->workers ? o->workers : o->meet_ranks) * o->micro_batches;
    return at_start > workers ? at_start : workers;
}

json_t *options_json(const struct options *options) {
    _Static_assert((int)ENTRIES <= (int)OPTIONS_MOST, "room for all options");
    json_t *all = json_object();
    for (int i = 0; i < ENTRIES; i++) {
        const struct entry *e = &table[i];
        const void *place = (const char *)options + e->offset;
        const char *text = e->kind == TEXT ? *(const char *const *)place : NULL;
        json_t *value = NULL;
        switch (e->kind) {
        case GROUP:
            continue;
        case FLAG:
            value = json_boolean(*(const bool *)place);
            break;
        case TEXT:
            value = text ? json_string(text) : json_null();
            break;
        case CHOICE:
            value = json_string(e->choices[*(const int *)place]);
            break;
        case WHOLE:
            value = json_integer(*(const int *)place);
            break;
        case WHOLE64:
            value = json_integer(*(const int64_t *)place);
            break;
        case REAL:
            value = json_real(*(const double *)place);
            break;
        }
        json_object_set_new(all, e->name, value);
    }
    return all;
}

/* Prints `text` in columns [indent, 80), breaking at spaces. */
static void print_wrapped(const char *text, int indent) {
    int width = 79 - indent;
    while ((int)strlen(text) > width) {
        int cut = width;
        while (cut > 0 && text[cut] != ' ') cut--;
        if (!cut) break;
        printf("%.*s\n%*s", cut, text, indent, "");
        text += cut + 1;
    }
    puts(text);
}

void options_help(void) {
    printf("Usage: train_llama2 --train GLOB [OPTION]...\n"
           "       mpirun -np R train_llama2 --train GLOB [OPTION]...\n"
           "Pretrains Llama-2 over a network that loses packets.\n");
    for (int i = 0; i < ENTRIES; i++) {
        const struct entry *e = &table[i];
        if (e->kind == GROUP) {
            printf("\n%s\n", e->name);
            continue;
        }
        char left[64], help[512];
        snprintf(left, sizeof left, "--%s%s%s", e->name, e->argument ? " " : "",
                 e->argument ? e->argument : "");
        bool show = e->initial && e->initial[0] != '-';
        snprintf(help, sizeof help, "%s%s%s%s", e->help, show ? " [" : "", show ? e->initial : "",
                 show ? "]" : "");
        printf("  %-27s ", left);
        if (strlen(left) > 27) printf("\n%30s", "");
        print_wrapped(help, 30);
    }
}
