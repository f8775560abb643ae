/* test_option_pairs.c — tests all pairs of options: a run with both is refused in one line that names one of
 * them, or both have their effect, or a line says which of them has none. No option is dropped in silence.
 *
 * The effect of an option is what lossynet's settings, the learning rates, the micro-batches and the rule
 * against loss become by it. Options that change none of these alone are not judged: what they do is seen in
 * the run (paths, modes, what is printed).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/cli/validate.h"
#include "llmc/comm/settings.h"
#include "llmc/options/options_table.h"
#include "test/support/capture.h"

enum { ALL = OPTIONS_MOST, WORDS = 16 };

/* A value of each option that takes one, other than its default. */
static const char *const values[][2] = {{"model", "1M"},
                                        {"vocab-size", "64"},
                                        {"device", "cpu"},
                                        {"dtype", "bf16"},
                                        {"recompute", "block"},
                                        {"attention", "auto"},
                                        {"threads", "1"},
                                        {"memory", "64"},
                                        {"train", "some.bin"},
                                        {"val", "other.bin"},
                                        {"data-split", "contiguous"},
                                        {"tokenizer", "/proc/self/exe"},
                                        {"batch", "3"},
                                        {"seq", "32"},
                                        {"micro-batches", "2"},
                                        {"steps", "500"},
                                        {"optimizer", "muon"},
                                        {"lr", "2e-3"},
                                        {"lr-final", "0.3"},
                                        {"warmup", "20"},
                                        {"schedule", "constant"},
                                        {"schedule", "wsd"},
                                        {"decay", "0.5"},
                                        {"decay-shape", "linear"},
                                        {"beta1", "0.8"},
                                        {"beta2", "0.9"},
                                        {"adam-eps", "1e-6"},
                                        {"weight-decay", "0.2"},
                                        {"clip", "2"},
                                        {"look-ahead", "1"},
                                        {"seed", "3"},
                                        {"algorithm", "reliable"},
                                        {"algorithm", "rps"},
                                        {"algorithm", "naive"},
                                        {"loss-rate", "0.1,0.3"},
                                        {"loss-model", "burst:4"},
                                        {"loss-at", "3=0.5"},
                                        {"loss-at", "layers.0-1=0.5"},
                                        {"loss-seed", "7"},
                                        {"estimator", "balanced"},
                                        {"estimator", "zero"},
                                        {"rule", "rule.so"},
                                        {"lead", "off"},
                                        {"carry", "0.5"},
                                        {"repair", "1,0"},
                                        {"repair", "2"},
                                        {"repair-at", "mlp=1"},
                                        {"repair-budget", "0.1"},
                                        {"workers", "4"},
                                        {"group", "2"},
                                        {"link", "udp"},
                                        {"link", "mpi"},
                                        {"packet-bytes", "512"},
                                        {"wire-dtype", "int4"},
                                        {"wire-dtype", "bf16"},
                                        {"wire-dtype", "auto"},
                                        {"interface", "eth7"},
                                        {"port-range", "5000-5009"},
                                        {"link-threads", "2"},
                                        {"pace-gbps", "10"},
                                        {"loss-budget", "0.1"},
                                        {"traffic-class", "le"},
                                        {"peer-timeout", "3"},
                                        {"meet", "etcd://127.0.0.1:1/run"},
                                        {"meet-ranks", "2"},
                                        {"meet-keep", "global-batch"},
                                        {"meet-process", "3"},
                                        {"deadline", "0.5"},
                                        {"key-file", "secret"},
                                        {"link-gbps", "10"},
                                        {"record-loss", "trace"},
                                        {"out", "out"},
                                        {"log", "log"},
                                        {"save-every", "5"},
                                        {"keep", "1"},
                                        {"shard-size", "2"},
                                        {"resume", "checkpoint"},
                                        {"eval-every", "5"},
                                        {"eval-sequences", "5"},
                                        {"stride", "16"},
                                        {"sample-every", "5"},
                                        {"drift-samples", "64"},
                                        {"progress", "off"},
                                        {"generate", "Once"},
                                        {"tokens", "9"},
                                        {"temperature", "0.5"},
                                        {"top-p", "0.5"}};
enum { VALUES = sizeof values / sizeof *values };

struct given { /* an option with a value, or a switch */
    int entry;
    const char *value; /* NULL: a switch */
};

struct outcome {
    bool accepted;
    bool unused[2]; /* a run says that the option has no effect */
    char *effect;   /* if accepted; or what was reported */
};

static struct given list[ALL + VALUES];
static int listed;

static int entry_named(const char *name) {
    const struct lossynet_option *e;
    for (int i = 0; (e = options_entry(i)) != NULL; i++)
        if (e->kind != LOSSYNET_OPTION_TITLE && !strcmp(e->name, name)) return i;
    return -1;
}

static void every_option_has_a_value(void **state) {
    (void)state;
    const struct lossynet_option *e;
    bool has[ALL] = {false};
    listed = 0;
    for (int v = 0; v < VALUES; v++) {
        const int entry = entry_named(values[v][0]);
        if (entry < 0) fail_msg("there is no option --%s", values[v][0]);
        has[entry] = true;
        list[listed++] = (struct given){entry, values[v][1]};
    }
    for (int i = 0; (e = options_entry(i)) != NULL; i++) {
        if (e->kind == LOSSYNET_OPTION_TITLE || has[i]) continue;
        if (e->kind != LOSSYNET_OPTION_FLAG) fail_msg("--%s has no value above: add one", e->name);
        if (strcmp(e->name, "help") != 0 && strcmp(e->name, "version") != 0)
            list[listed++] = (struct given){i, NULL};
    }
}

/* ---- effects ---------------------------------------------------------------------------- */

static void print_settings(FILE *to, const struct options *o, bool on_device) {
    size_t elements = 1;
    const struct param_layout layout = {.buckets = 1, .bucket_elements = &elements};
    const struct lossynet_settings s = comm_settings(o, &layout, o->net.workers, 2, on_device);
    const bool loses = o->algorithm != ALGORITHM_RELIABLE; /* else phases are called lossless */
    fprintf(to, "%d %zu %d %d %d\n", s.group, s.packet_bytes, s.wire_dtype, s.link,
            s.drift_samples);
    if (loses)
        fprintf(to, "%g %g %s %s %llu %d\n", s.loss.rate[0], s.loss.rate[1], s.loss.model,
                s.loss.at, (unsigned long long)s.loss.seed, s.estimator);
    if (s.retransmission_rounds[0] || s.retransmission_rounds[1])
        fprintf(to, "%d %d %g\n", s.retransmission_rounds[0], s.retransmission_rounds[1],
                s.retransmission_budget);
    if (loses) fprintf(to, "%s\n", s.repair_at);
    fprintf(to, "%d %g %d\n", s.lead, s.error_feedback ? o->net.carry : 0, s.error_feedback);
    if (s.link == LOSSYNET_LINK_MPI) return; /* struct lossynet_network has no effect */
    fprintf(to, "%s %d %d %g %g %g %d %g %d %s %d %d\n",
            s.network.interface ? s.network.interface : "", s.network.ports[0], s.network.threads,
            s.network.pace_gbps, s.network.loss_budget, s.network.peer_timeout, s.network.skip_late,
            s.network.deadline, s.network.encrypt, s.network.key_file ? s.network.key_file : "",
            s.network.dscp, o->no_overlap);
}

static char *effect_of(const struct options *o) {
    const struct schedule rates = options_schedule(o);
    char *text;
    size_t bytes;
    FILE *to = open_memstream(&text, &bytes);
    assert_non_null(to);
    print_settings(to, o, false);
    if (o->device != DEVICE_CPU && !comm_check_device(o, true)) print_settings(to, o, true);
    fprintf(to, "%d %lld %s\n", o->algorithm, (long long)o->seed, o->meet ? o->meet : "");
    fprintf(to, "%d %d %g\n", o->net.workers, comm_leads(o, o->net.workers),
            comm_leads(o, o->net.workers) ? o->net.look_ahead : 0);
    for (int i = 0; i <= 4; i++)
        fprintf(to, "%.9g ", schedule_learning_rate(&rates, i * (o->steps - 1) / 4));
    fprintf(to, "%d %d %lld %g %g\n", o->steps, o->batch, (long long)o->micro_batches,
            o->val ? o->eval_every : 0.0, o->sample_every || o->generate ? o->temperature : 0.0);
    fclose(to);
    return text;
}

/* What a run with these options does: `with` are up to two. */
static struct outcome outcome_of(const struct given *const *with, int count) {
    static char word[WORDS][64];
    const char *start[] = {"train_llama2", "--model=260K", "--train=some.bin", "--workers=8",
                           "--out=out"};
    char *argv[WORDS];
    int argc = 0;
    for (size_t i = 0; i < sizeof start / sizeof *start; i++)
        snprintf(word[argc++], sizeof *word, "%s", start[i]);
    for (int i = 0; i < count; i++)
        snprintf(word[argc++], sizeof *word, "--%s%s%s", options_entry(with[i]->entry)->name,
                 with[i]->value ? "=" : "", with[i]->value ? with[i]->value : "");
    for (int i = 0; i < argc; i++) argv[i] = word[i];
    argv[argc] = NULL;
    const struct lossynet_world world = {.ranks = 1, .local_ranks = 1};
    struct outcome out = {0};
    struct options o;
    capture_begin();
    int status = options_parse(argc, argv, &o);
    if (!status) status = validate_group(&o, &world) ? 2 : 0;
    if (!status) comm_choose_wire(&o, o.net.workers ? o.net.workers : 2);
    if (!status) status = validate_options(&o, 1);
    if (!status && o.device != DEVICE_CPU && comm_check_device(&o, true)) status = 2;
    char *said = strdup(capture_end());
    out.accepted = status == 0;
    if (status) {
        out.effect = said;
        return out;
    }
    if (*said) fail_msg("accepted, but said: %s", said);
    free(said);
    for (int i = 0; i < count; i++) out.unused[i] = options_unused(&o, with[i]->entry) != NULL;
    out.effect = effect_of(&o);
    return out;
}

/* ---- pairs ------------------------------------------------------------------------------ */

static int failures;

static void complain(const struct given *a, const struct given *b, const char *what) {
    print_error("--%s %s --%s %s: %s\n", options_entry(a->entry)->name, a->value ? a->value : "",
                options_entry(b->entry)->name, b->value ? b->value : "", what);
    failures++;
}

static bool is_named(const char *line, const struct given *g) {
    return strstr(line, options_entry(g->entry)->name) != NULL;
}

/* Whether the other option says the same: --plain turns the lead off, and without loss ranks exchange
 * packets by MPI. */
static bool is_repeated(const struct given *a, const struct given *b) {
    const char *one = options_entry(a->entry)->name, *other = options_entry(b->entry)->name;
    return (!strcmp(one, "lead") && !strcmp(other, "plain")) ||
           (!strcmp(one, "link") && !strcmp(other, "algorithm"));
}

static void check_pair(const struct given *a, const struct given *b, const struct outcome *alone_a,
                       const struct outcome *alone_b, bool judged) {
    const struct given *const both[] = {a, b};
    struct outcome out = outcome_of(both, 2);
    if (!out.accepted) {
        const char *newline = strchr(out.effect, '\n');
        const bool refused = !alone_a->accepted || !alone_b->accepted;
        if (!newline || newline[1] ||
            !(refused || is_named(out.effect, a) || is_named(out.effect, b)))
            complain(a, b, out.effect);
    } else if (judged && alone_a->accepted && alone_b->accepted) {
        const bool dropped = !strcmp(out.effect, alone_b->effect) && !is_repeated(a, b);
        if (dropped && !out.unused[0])
            complain(a, b, "the first has no effect, and nothing says so");
        if (!dropped && out.unused[0])
            complain(a, b, "the first is called unused, and has an effect");
    }
    free(out.effect);
}

static void no_option_is_dropped_in_silence(void **state) {
    (void)state;
    struct outcome alone[ALL + VALUES];
    struct outcome none = outcome_of(NULL, 0);
    bool judged[ALL + VALUES];
    int pairs = 0;
    assert_true(none.accepted);
    for (int i = 0; i < listed; i++) {
        const struct given *const one = &list[i];
        alone[i] = outcome_of(&one, 1);
        judged[i] = alone[i].accepted && strcmp(alone[i].effect, none.effect) != 0;
    }
    for (int i = 0; i < listed; i++)
        for (int j = 0; j < listed; j++) {
            if (list[i].entry == list[j].entry) continue;
            check_pair(&list[i], &list[j], &alone[i], &alone[j], judged[i]);
            pairs++;
        }
    for (int i = 0; i < listed; i++) free(alone[i].effect);
    free(none.effect);
    print_message("%d pairs of %d options and values\n", pairs, listed);
    assert_int_equal(failures, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_option_has_a_value),
                                       cmocka_unit_test(no_option_is_dropped_in_silence)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
