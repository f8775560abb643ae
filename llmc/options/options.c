/* options.c — the table of options and its parser. See options.h. */
#define LOSSYNET_OPTION_ROWS struct options
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
const char *const optimizer_names[] = {"adamw", "muon", NULL};
static const char *const device_names[] = {"auto", "cpu", "cuda", NULL};
static const char *const split_names[] = {"shared", "contiguous", NULL};
static const char *const keep_names[] = {"worker-batch", "global-batch", NULL};
static const char *const progress_names[] = {"auto", "on", "off", NULL};
static const char *const attention_names[] = {"own", "cudnn", "auto", NULL};
static const char *const dtype_names[] = {"auto", "float32", "bf16", NULL};

static const struct lossynet_option table[] = {
    TITLE("Model"),
    STRING(
        "model", model, EACH_RANK, "15M", "PRESET|DIR|FILE",
        "a preset (260K 1M 3M 15M 42M 110M 1.1B 7B 13B 70B), a Hugging Face Llama directory, or a "
        "config.json alone, to train a model of that shape from random parameters"),
    WHOLE("vocab-size", vocabulary, RUN, "0", 0, 1 << 20, "N",
          "size of a preset's vocabulary; 0: that of the data"),
    ONE_OF("device", device, EACH_RANK, "auto", device_names, "auto|cpu|cuda", "where to compute"),
    ONE_OF("dtype", dtype, RUN, "auto", dtype_names, "auto|float32|bf16",
           "type of activations and of the weights in use. auto: bf16 on cuda, float32 on the CPU. "
           "Master weights, gradients and sums are float32"),
    ONE_OF("recompute", recompute, NEUTRAL | EACH_RANK | IF_TRAINS, "auto", recompute_names,
           "none|norms|attention|block|auto",
           "which activations the backward pass computes again instead of keeping them, to save "
           "memory. auto: the fewest with which the run fits the device"),
    ONE_OF("attention", attention, IF_GPU | IF_TRAINS, "auto", attention_names, "own|cudnn|auto",
           "cuda in bf16: compute attention with this program's kernels or with cuDNN's, which "
           "differ in the last bits. cuDNN's need 2 bytes for each logit of a layer. auto: cuDNN's "
           "to train with sequences of 512 tokens or more on sm_90 and newer, if it is installed, "
           "agrees with our kernels, repeats its own bits, and fits the memory. The log has the "
           "choice, and a checkpoint keeps it"),
    WHOLE("threads", threads, NEUTRAL | EACH_RANK, "0", 0, 4096, "N",
          "CPU threads of this rank; 0: its share of the host's cores"),
    REAL("memory", memory, NEUTRAL | EACH_RANK, "0", 0, 1e9, "GB",
         "memory that all ranks of a host may use together. A run that needs more is refused. 0: "
         "what the host and its control groups have available"),

    TITLE("Data"),
    STRING("train", train, EACH_RANK | IF_TRAINS, NULL, "GLOB",
           "token files to train on (llm.c format)"),
    STRING("val", val, EACH_RANK, NULL, "GLOB", "token files to evaluate on"),
    ONE_OF("data-split", data_split, RESUMED | IF_TRAINS, "shared", split_names,
           "shared|contiguous",
           "shared: all workers draw from one shuffled order of all data. contiguous: each worker "
           "reads and shuffles its own 1/N of the files, so that workers see unlike data (not "
           "i.i.d.)"),
    STRING("tokenizer", tokenizer, NEUTRAL | EACH_RANK | IF_DRAWS, NULL, "FILE",
           "tokenizer.model; default: the one beside the data or the model"),

    TITLE("Optimisation"),
    WHOLE("batch", batch, IF_READS, "8", 1, 1 << 20, "N", "sequences per worker in a micro-batch"),
    WHOLE("seq", seq, IF_READS, "0", 0, 1 << 24, "N",
          "tokens per sequence; 0: the model's length, at most 1024"),
    WHOLE("micro-batches", micro_batches, RESUMED | IF_TRAINS, "1", 1, 1 << 20, "N",
          "micro-batches whose gradients a worker adds up in a step"),
    WHOLE("steps", steps, IF_TRAINS, "1000", 1, INT_MAX, "N", "training steps"),
    ONE_OF(
        "optimizer", optimizer, IF_TRAINS, "adamw", optimizer_names, "adamw|muon",
        "what updates the parameters. muon: Muon for the matrices of layers, AdamW for the rest. "
        "Each matrix then has one owner"),
    REAL("lr", lr, RESUMED | IF_TRAINS, "1e-3", 0, 1e3, "RATE", "peak learning rate"),
    REAL("lr-final", lr_final, RESUMED | IF_FALLS | IF_TRAINS, "0.1", 0, 1, "FRACTION",
         "learning rate of the last step, as a fraction of the peak; not with constant"),
    WHOLE("warmup", warmup, RESUMED | IF_TRAINS, "0", 0, INT_MAX, "N", "steps of linear warm-up"),
    ONE_OF("schedule", schedule, IF_TRAINS, "cosine", schedule_names, "cosine|wsd|linear|constant",
           "how the learning rate goes on after the warm-up. wsd (warm-up, stable, decay): it "
           "stays at the peak, and falls only in the last steps. Until then the run can be "
           "continued with more --steps"),
    REAL("decay", decay, IF_TRAINS, "-1", 0, 1, "SHARE",
         "wsd: share of --steps in which the rate falls; default: 0.2"),
    ONE_OF("decay-shape", decay_shape, IF_WSD | IF_TRAINS, "sqrt", schedule_decay_names,
           "sqrt|linear",
           "wsd: the rate falls with one minus the root of the share done, or in a line"),
    REAL("beta1", beta1, RESUMED | IF_TRAINS, "0.9", 0, 0.999999, "B",
         "AdamW: decay of the first moment"),
    REAL("beta2", beta2, RESUMED | IF_TRAINS, "0.95", 0, 0.999999, "B",
         "AdamW: decay of the second moment"),
    REAL("adam-eps", adam_eps, RESUMED | IF_TRAINS, "1e-8", 1e-30, 1, "E",
         "AdamW: epsilon, added to the root of the second moment"),
    REAL("weight-decay", weight_decay, RESUMED | IF_TRAINS, "0.1", 0, 1e3, "W",
         "AdamW: weight decay of matrices (norms have none)"),
    REAL("clip", clip, RESUMED | IF_TRAINS, "1", 0, 1e30, "NORM",
         "clip the gradient to this global norm; 0: no clipping"),
    ELSEWHERE("look-ahead"),
    SEED("seed", seed, RESUMED | IF_DRAWS, "1",
         "seed of the initial weights and of the order of the data"),

    TITLE("Loss"),
    ONE_OF("algorithm", algorithm, RESUMED | IF_TRAINS, "lossy", algorithm_names, "NAME",
           "lossy: owners average the gradients that arrive and broadcast parameters. reliable: "
           "the same, but nothing is lost. rps: average models. naive: broadcast gradients"),
    ELSEWHERE("loss-rate"),
    ELSEWHERE("loss-model"),
    ELSEWHERE("loss-at"),
    ELSEWHERE("loss-seed"),
    ELSEWHERE("estimator"),
    SWITCH("plain", plain, RUN | IF_BROADCASTS | IF_TRAINS,
           "the algorithm of the paper and nothing else, for comparisons: --lead off --carry 0 "
           "--repair 0 --wire-dtype float32. Options beside it override it"),
    STRING("rule", rule, RESUMED | IF_LOSSY | IF_TRAINS, NULL, "FILE.so",
           "a rule of your own: a shared object with functions that average what arrived, or "
           "change what "
           "is sent or received (struct lossynet_rule in lossynet.h; examples in "
           "scripts/sweeps/others). On the CPU, algorithm lossy"),
    ELSEWHERE("lead"),
    ELSEWHERE("carry"),
    ELSEWHERE("repair"),
    ELSEWHERE("repair-at"),
    ELSEWHERE("repair-budget"),

    TITLE("Network"),
    ELSEWHERE("workers"),
    STRING("group", group, RESUMED | IF_READS, "1", "G|host",
           "this many workers share one replica. They average without loss inside the group, and "
           "each sends 1/G of the group's gradient. Other groups see one worker. host: all ranks "
           "of a host"),
    ELSEWHERE("link"),
    ELSEWHERE("packet-bytes"),
    ELSEWHERE("wire-dtype"),
    ELSEWHERE("interface"),
    ELSEWHERE("port-range"),
    ELSEWHERE("link-threads"),
    ELSEWHERE("pace-gbps"),
    ELSEWHERE("loss-budget"),
    ELSEWHERE("traffic-class"),
    ELSEWHERE("peer-timeout"),
    STRING("meet", meet, SWEEPS | EACH_START, NULL, "URL",
           "etcd://HOST:PORT/RUN: ranks find each other in etcd under the name RUN, instead of by "
           "mpirun. Ranks may then die and join while the others train on (scripts/elastic.sh)"),
    WHOLE("meet-ranks", meet_ranks, SWEEPS, "1", 1, 65534, "N",
          "with --meet: training begins when this many ranks have come"),
    ONE_OF(
        "meet-keep", meet_keep, SWEEPS, "worker-batch", keep_names, "worker-batch|global-batch",
        "with --meet: what stays the same when ranks die or join: the batch of each worker, or the "
        "global batch of --meet-ranks ranks, for which workers take more or fewer micro-batches"),
    SWITCH("meet-anew", meet_anew, SWEEPS | EACH_START,
           "with --meet: begin although an earlier start of this run has not ended it. No rank of "
           "that start may still be running"),
    WHOLE("meet-process", meet_process, SWEEPS | NEUTRAL | EACH_RANK | EACH_START, "-1", 0, 65534,
          "N",
          "with --meet: the number that a launcher knows this process by (scripts/elastic.sh); it "
          "stands in the store beside the process's rank"),
    ELSEWHERE("deadline"),
    SWITCH("no-overlap", no_overlap, NEUTRAL | IF_DATAGRAMS | IF_TRAINS,
           "udp, verbs: do not exchange packets while computing"),
    ELSEWHERE("encrypt"),
    ELSEWHERE("key-file"),
    REAL("link-gbps", link_gbps, IF_RATED, "100", 1e-6, 1e6, "GBIT",
         "link speed of a worker, for --dry-run"),

    TITLE("Output"),
    ELSEWHERE("record-loss"),
    STRING("out", out, SWEEPS | IF_READS, NULL, "DIR", "directory for checkpoints and log.jsonl"),
    STRING("log", log, SWEEPS | EACH_RANK | IF_READS, NULL, "FILE",
           "log in JSON lines; default: OUT/log.jsonl"),
    SWITCH(
        "log-buckets", log_buckets, NEUTRAL | IF_TRAINS,
        "log the packets of each layer in each step: sent, lost in the end, sent again. It takes "
        "an exchange more"),
    WHOLE("save-every", save_every, NEUTRAL | IF_TRAINS, "0", 0, INT_MAX, "N",
          "steps between checkpoints; 0: only one, at the end"),
    WHOLE("keep", keep, NEUTRAL | IF_SAVES | IF_TRAINS, "3", 0, INT_MAX, "N",
          "how many of the newest checkpoints to keep; 0: all"),
    REAL("shard-size", shard_size, NEUTRAL | IF_SAVES | IF_TRAINS, "1", 1e-6, 1e6, "GB",
         "largest file of a checkpoint's model. Each file is written by another rank; a smaller "
         "model is one file"),
    STRING("resume", resume, SWEEPS | EACH_START, NULL, "DIR|auto",
           "continue from a checkpoint. auto: from the newest complete one in OUT, or from the "
           "start if there is none; if bytes of it have changed, the run ends"),
    SWITCH("overwrite", overwrite, SWEEPS | EACH_START | IF_LOGS | IF_READS,
           "replace an earlier run in OUT: remove its log and its checkpoints"),
    WHOLE("eval-every", eval_every, NEUTRAL | IF_EVALUATES | IF_TRAINS, "0", 0, INT_MAX, "N",
          "steps between evaluations; 0: only one, at the end"),
    WHOLE("eval-sequences", eval_sequences, IF_EVALUATES | IF_READS, "0", 0, INT_MAX, "N",
          "number of validation sequences to use; 0: all"),
    WHOLE("stride", stride, IF_EVALUATES | IF_READS, "0", 0, 1 << 24, "N",
          "evaluate in windows of --seq tokens that begin every N tokens. Each window scores the "
          "tokens that earlier ones did not (as Hugging Face does). 0: windows do not overlap"),
    WHOLE("sample-every", sample_every, NEUTRAL | IF_TRAINS, "0", 0, INT_MAX, "N",
          "steps between samples of text from the model; 0: none"),
    ELSEWHERE("drift-samples"),
    ONE_OF("progress", progress, SWEEPS | EACH_RANK | IF_READS, "auto", progress_names,
           "auto|on|off", "show a bar below the lines. auto: on a terminal, also under mpirun"),
    SWITCH("quiet", quiet, SWEEPS | EACH_RANK, "print only errors and warnings"),

    TITLE("Modes (training, when none is given)"),
    SWITCH("eval", eval, SWEEPS, "only compute the perplexity of --model DIR on --val"),
    STRING("generate", generate, SWEEPS, NULL, "PROMPT",
           "continue the text PROMPT with --model DIR"),
    WHOLE("tokens", tokens, SWEEPS | IF_WRITES, "200", 1, 1 << 20, "N",
          "number of tokens to generate"),
    REAL("temperature", temperature, SWEEPS | IF_SAMPLES, "0.8", 0, 100, "T",
         "temperature of sampling; 0: always the likeliest token"),
    REAL("top-p", top_p, SWEEPS | IF_SAMPLES, "0.95", 0, 1, "P",
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

const struct lossynet_option *options_entry(int i) {
    if (i >= ENTRIES) return NULL;
    return table[i].kind == LOSSYNET_OPTION_ELSEWHERE ? lossynet_option_named(table[i].name)
                                                      : &table[i];
}

/* Whether the command line has the option of this field, or of the first of its fields. */
static bool is_given(const struct options *o, const void *field) {
    const size_t offset = (size_t)((const char *)field - (const char *)o);
    const struct lossynet_option *e;
    for (int i = 0; (e = options_entry(i)) != NULL; i++)
        if (e->kind != LOSSYNET_OPTION_TITLE && e->offset == offset) return o->given[i];
    return false;
}

static void be_plain(struct options *out) {
    if (!is_given(out, &out->net.lead)) out->net.lead = LOSSYNET_LEAD_OFF;
    if (!is_given(out, &out->net.carry)) out->net.carry = 0;
    if (!is_given(out, &out->net.repair)) out->net.repair[0] = out->net.repair[1] = 0;
}

bool options_has_word(const char *text, const char *word) {
    const size_t bytes = strlen(word);
    for (; text && strlen(text) >= bytes; text++)
        if (!strncasecmp(text, word, bytes)) return true;
    return false;
}

/* How many letters must be put in, taken out or replaced to make `b` of `a`, at least; both are
 * shorter than NAME_BYTES. */
enum { NAME_BYTES = 48 };
static int distance(const char *a, const char *b) {
    int row[NAME_BYTES];
    const int length = (int)strlen(b);
    for (int j = 0; j <= length; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int corner = row[0];
        row[0] = i;
        for (int j = 1; j <= length; j++) {
            int least = corner + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < least) least = row[j] + 1;
            if (row[j - 1] + 1 < least) least = row[j - 1] + 1;
            corner = row[j];
            row[j] = least;
        }
    }
    return row[length];
}

/* Whether an option's name is one of the words of `text`, which have spaces between them. */
static bool is_word_of(const char *name, const char *text) {
    const size_t bytes = strlen(name);
    for (const char *at = text; (at = strstr(at, name)) != NULL; at++)
        if ((at == text || at[-1] == ' ') && (at[bytes] == ' ' || !at[bytes])) return true;
    return false;
}

/* The option that a user may have meant by an unknown name, which is without "--"; NULL: none is like it. */
static const char *meant_by(const char *name) {
    enum { TYPED_WRONG, SAID, WORD, WAYS };
    const char *found[WAYS] = {NULL};
    char words[NAME_BYTES];
    const struct lossynet_option *e;
    if (!*name || strlen(name) >= sizeof words) return NULL;
    for (size_t i = 0; i <= strlen(name); i++)
        words[i] = name[i] == '-' || name[i] == '_' ? ' ' : name[i];
    for (int i = 0; (e = options_entry(i)) != NULL; i++) {
        if (e->kind == LOSSYNET_OPTION_TITLE || strlen(e->name) >= NAME_BYTES) continue;
        const bool fits[WAYS] = {distance(name, e->name) <= (strlen(name) > 4 ? 2 : 1),
                                 strchr(words, ' ') && options_has_word(e->help, words),
                                 is_word_of(e->name, words)};
        for (int way = 0; way < WAYS; way++)
            if (fits[way] && !found[way]) found[way] = e->name;
    }
    for (int way = 0; way < WAYS; way++)
        if (found[way]) return found[way];
    return NULL;
}

const struct lossynet_option *options_named(const char *name) {
    const struct lossynet_option *e;
    for (int i = 0; (e = options_entry(i)) != NULL; i++)
        if (e->kind != LOSSYNET_OPTION_TITLE && !strcmp(e->name, name)) return e;
    return NULL;
}

/* Reports a word that getopt did not accept. */
static int refuse_option(const char *word) {
    const char *name = word + strspn(word, "-");
    const size_t bytes = strcspn(name, "=");
    char like[512] = "";
    for (int i = 0; i < ENTRIES && word[0] == '-' && bytes > 0; i++) {
        const struct lossynet_option *e = options_entry(i);
        const size_t used = strlen(like);
        if (e->kind == LOSSYNET_OPTION_TITLE || strncmp(e->name, name, bytes)) continue;
        if (e->kind == LOSSYNET_OPTION_FLAG && strlen(e->name) == bytes)
            return log_error("--%s: expected no value, got '%s'", e->name, name + bytes + 1);
        snprintf(like + used, sizeof like - used, " --%s", e->name);
    }
    if (*like) return log_error("%s: several options begin so:%s", word, like);
    snprintf(like, sizeof like, "%.*s", (int)(bytes < sizeof like ? bytes : 0), name);
    const char *meant = meant_by(like);
    if (meant) return log_error("%s: unknown option; did you mean --%s? (see --help)", word, meant);
    return log_error("%s: unknown option (see --help)", word);
}

/* A log and a checkpoint hold the options as JSON, which has no other text. */
static bool is_utf8(const char *value) {
    json_t *text = json_string(value);
    json_decref(text);
    return text || !json_true(); /* dev/bare/jansson.h has no values */
}

int options_parse(int argc, char **argv, struct options *out) {
    struct option longs[ENTRIES + 1];
    int count = 0;
    memset(out, 0, sizeof *out);
    memset(longs, 0, sizeof longs);
    for (int i = 0; i < ENTRIES; i++) {
        const struct lossynet_option *e = options_entry(i);
        if (e->kind == LOSSYNET_OPTION_TITLE) continue;
        lossynet_option_reset(e, out);
        longs[count].name = e->name;
        longs[count].has_arg = e->kind == LOSSYNET_OPTION_FLAG ? no_argument : required_argument;
        if (e->offset == OPTION_AT(help)) longs[count].has_arg = optional_argument;
        longs[count++].val = 256 + i;
    }
    opterr = 0;
    optind = 0; /* glibc: start again, since tests parse several times */
    for (int c; (c = getopt_long_only(argc, argv, ":", longs, NULL)) != -1;) {
        if (c == ':')
            return log_wrong_usage("%s: expected a value after it (see --help)", argv[optind - 1]);
        if (c < 256) {
            refuse_option(argv[optind - 1]);
            return 2;
        }
        const struct lossynet_option *e = options_entry(c - 256);
        if (optarg && optarg == argv[optind - 1] && !strncmp(optarg, "--", 2) &&
            options_named(optarg + 2))
            return log_wrong_usage(
                "--%s: expected a value after it, got the option %s (see --help)", e->name, optarg);
        const char *value = e->kind == LOSSYNET_OPTION_FLAG ? "1" : optarg;
        char wrong[512];
        if (e->kind == LOSSYNET_OPTION_TEXT && !is_utf8(value))
            return log_wrong_usage("--%s: expected UTF-8, since the log holds it", e->name);
        if (out->given[c - 256] && e->argument && !strcmp(e->argument, "LIST"))
            return log_wrong_usage("--%s: expected once, with a comma between entries", e->name);
        if (!lossynet_option_set(e, out, value, wrong, sizeof wrong))
            return log_wrong_usage("--%s", wrong);
        out->given[c - 256] = true;
        if (e->offset == OPTION_AT(help)) out->help_topic = optarg;
    }
    if (out->help && !out->help_topic && optind < argc) out->help_topic = argv[optind++];
    if (optind < argc)
        return log_wrong_usage("'%s': expected options only (see --help)", argv[optind]);
    if (out->plain) be_plain(out);
    if (out->net.loss_seed < 0) out->net.loss_seed = out->seed;
    if (out->net.peer_timeout < 0) out->net.peer_timeout = out->meet ? 1 : 10;
    if (out->decay >= 0 && out->schedule != SCHEDULE_WSD)
        return log_wrong_usage("--decay: expected --schedule wsd with it, got --schedule %s",
                               schedule_names[out->schedule]);
    if (out->decay < 0) out->decay = 0.2;
    if (out->net.packet_bytes % 4)
        return log_wrong_usage("--packet-bytes: expected a multiple of 4, got '%d'",
                               out->net.packet_bytes);
    if (out->net.packet_bytes && out->net.packet_bytes < 64)
        return log_wrong_usage("--packet-bytes: expected 0 or at least 64, got '%d'",
                               out->net.packet_bytes);
    return 0;
}

/* ---- options without an effect ---------------------------------------------------------- */

struct need { /* what must be so for an option with the mark to have an effect */
    unsigned mark;
    bool met;
    const char *otherwise; /* when the option has none */
};
enum { NEEDS = 17 };

static void find_needs(const struct options *o, struct need needs[NEEDS]) {
    const bool lossy = o->algorithm == ALGORITHM_LOSSY, naive = o->algorithm == ALGORITHM_NAIVE;
    const bool reliable = o->algorithm == ALGORITHM_RELIABLE;
    const struct need all[NEEDS] = {
        {IF_TRAINS, !o->eval && !o->generate, "without training"},
        {IF_READS, !o->generate, "with --generate"},
        {IF_DRAWS, !o->eval, "with --eval"},
        {IF_LOSES, !reliable, "with --algorithm reliable, which loses nothing"},
        {IF_LOSSY, lossy, "without --algorithm lossy"},
        {IF_BROADCASTS, lossy || reliable, "without --algorithm lossy or reliable"},
        {IF_ESTIMATES, lossy || naive, "without --algorithm lossy or naive"},
        {IF_DATAGRAMS, !reliable && o->net.link != LOSSYNET_LINK_MPI,
         "without --link udp or verbs"},
        {IF_WSD, o->schedule == SCHEDULE_WSD, "without --schedule wsd"},
        {IF_FALLS, o->schedule != SCHEDULE_CONSTANT, "with --schedule constant"},
        {IF_RATED, o->dry_run, "without --dry-run"},
        {IF_WRITES, o->generate != NULL, "without --generate"},
        {IF_SAMPLES, o->generate || o->sample_every, "without --generate or --sample-every"},
        {IF_EVALUATES, o->val != NULL, "without --val"},
        {IF_SAVES, o->out != NULL, "without --out"},
        {IF_LOGS, o->out || o->log, "without --out or --log"},
        {IF_GPU, o->device != DEVICE_CPU, "with --device cpu"}};
    memcpy(needs, all, sizeof all);
}

const char *options_unused(const struct options *o, int i) {
    struct need needs[NEEDS];
    find_needs(o, needs);
    for (const struct need *n = needs; n < needs + NEEDS; n++)
        if (options_entry(i)->marks & n->mark && !n->met) return n->otherwise;
    return NULL;
}

/* Prints a line if the loss model and the loss rates do not belong together. */
static void print_unused_loss(const struct options *o) {
    const char *model = o->net.loss_model, *at = o->net.loss_at;
    const bool replays = !strncmp(model, "replay:", 7),
               dropped = o->net.loss_rate[0] > 0 || o->net.loss_rate[1] > 0;
    if (o->algorithm == ALGORITHM_RELIABLE) return;
    if (replays && dropped)
        printf("note: --loss-rate: no effect with --loss-model replay, whose record says what "
               "arrives\n");
    else if (!replays && !dropped && (!at || !strcmp(at, "none")) && strcmp(model, "bernoulli"))
        printf("note: --loss-model %s: nothing is dropped with --loss-rate 0\n", model);
}

void options_print_unused(const struct options *o, FILE *to) {
    struct need needs[NEEDS];
    find_needs(o, needs);
    const bool trains = !o->eval && !o->generate;
    if (trains) print_unused_loss(o);
    for (const struct need *n = needs; n < needs + NEEDS; n++) {
        const char *before = "note: ";
        for (int i = 0; i < ENTRIES; i++) {
            if (!o->given[i] || options_unused(o, i) != n->otherwise) continue;
            fprintf(to, "%s--%s", before, table[i].name);
            before = ", ";
        }
        if (*before == ',') fprintf(to, ": no effect %s\n", n->otherwise);
    }
    if (!trains) return;
    if (o->warmup > o->steps)
        printf("--warmup %d: training ends after %d steps, before the rate has reached --lr\n",
               o->warmup, o->steps);
    else if (o->schedule == SCHEDULE_WSD && o->warmup > o->steps - lround(o->decay * o->steps))
        printf("--decay %g: the rate falls only after --warmup, in the last %d steps\n", o->decay,
               o->steps - o->warmup);
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
    const int64_t at_start =
        (int64_t)(o->net.workers ? o->net.workers : o->meet_ranks) * o->micro_batches;
    return at_start > workers ? at_start : workers;
}

/* Number i of an option, or "auto". */
static json_t *number_json(const struct lossynet_option *e, const void *place, int i) {
    const int whole = e->kind == LOSSYNET_OPTION_WHOLE ? ((const int *)place)[i] : 0;
    const double real = e->kind == LOSSYNET_OPTION_REAL ? ((const double *)place)[i] : whole;
    if (lossynet_option_is_automatic(e) && real == LOSSYNET_AUTO) return json_string("auto");
    return e->kind == LOSSYNET_OPTION_WHOLE ? json_integer(whole) : json_real(real);
}

static json_t *value_json(const struct lossynet_option *e, const void *place) {
    const char *text = e->kind == LOSSYNET_OPTION_TEXT ? *(const char *const *)place : NULL;
    switch (e->kind) {
    case LOSSYNET_OPTION_TITLE:
    case LOSSYNET_OPTION_ELSEWHERE:
        break;
    case LOSSYNET_OPTION_FLAG:
        return json_boolean(*(const bool *)place);
    case LOSSYNET_OPTION_TEXT:
        return text ? json_string(text) : json_null();
    case LOSSYNET_OPTION_CHOICE:
        return json_string(e->choices[*(const int *)place]);
    case LOSSYNET_OPTION_WHOLE64:
        return json_integer(*(const int64_t *)place);
    case LOSSYNET_OPTION_WHOLE:
    case LOSSYNET_OPTION_REAL: {
        json_t *value = number_json(e, place, 0);
        json_t *second = lossynet_option_is_pair(e) ? number_json(e, place, 1) : NULL;
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
        const struct lossynet_option *e = options_entry(i);
        if (e->kind == LOSSYNET_OPTION_TITLE || e->marks & without) continue;
        json_object_set_new(all, e->name, value_json(e, (const char *)options + e->offset));
    }
    return all;
}
