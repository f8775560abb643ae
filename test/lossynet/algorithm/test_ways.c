/* test_ways.c — tests rounds of retransmission where links are down: which packets arrive by way of
 * others, what is sent for it, and what is expected of it. Each test asks the loss model which links are
 * up, and works out the rest by itself.
 */
#include "test/lossynet/test_lossynet.h"

enum { WORKERS = 6, ELEMENTS = WORKERS * 5 * 16 }; /* 5 packets of 16 elements for each owner */
enum { PACKETS = 5, STEPS = 200 };

static struct lossynet_settings ways_settings(const char *model, double p, int rounds) {
    static const size_t elements = ELEMENTS;
    struct lossynet_settings settings = simple_settings(WORKERS, &elements, 1, p);
    settings.loss.model = model;
    settings.estimator = LOSSYNET_ZERO;
    settings.retransmission_rounds[0] = settings.retransmission_rounds[1] = rounds;
    return settings;
}

struct sums { /* over steps */
    uint64_t resent[2], arrived[2], expected[2];
};

/* Which senders' gradients each owner has (bit s of has[0][o]), and which owners' values each worker
 * has, after a step. All packets of a link share its fate. */
static void make_step(struct lossynet_comm *comm, float **x, uint64_t step,
                      unsigned has[2][WORKERS], struct sums *sums) {
    struct lossynet_counters counters;
    for (int w = 0; w < WORKERS; w++)
        for (size_t e = 0; e < ELEMENTS; e++) x[w][e] = ldexpf(WORKERS, w);
    assert_int_equal(lossynet_step_begin(comm, step), LOSSYNET_OK);
    assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
    for (int o = 0; o < WORKERS; o++) {
        size_t offset, count;
        lossynet_shard(comm, o, 0, &offset, &count);
        has[0][o] = (unsigned)x[o][offset];
        for (size_t e = 0; e < count; e++) assert_true(x[o][offset + e] == (float)has[0][o]);
    }
    for (int w = 0; w < WORKERS; w++)
        for (size_t e = 0; e < ELEMENTS; e++) x[w][e] = (float)w;
    assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
    for (int w = 0; w < WORKERS; w++) {
        has[1][w] = 0;
        for (int o = 0; o < WORKERS; o++) {
            size_t offset, count;
            lossynet_shard(comm, o, 0, &offset, &count);
            has[1][w] |= (unsigned)(x[w][offset] == (float)o) << o;
            for (size_t e = 0; e < count; e++) assert_true(x[w][offset + e] == x[w][offset]);
        }
    }
    assert_int_equal(lossynet_step_counters(comm, step, &counters), LOSSYNET_OK);
    for (int phase = 0; phase < 2; phase++) {
        assert_int_equal(counters.expected[phase], PACKETS * WORKERS * (WORKERS - 1));
        assert_int_equal(counters.bytes[phase],
                         64 * (counters.expected[phase] + counters.resent[phase]));
        sums->expected[phase] += counters.expected[phase];
        sums->arrived[phase] += counters.arrived[phase];
        sums->resent[phase] += counters.resent[phase];
    }
}

static bool down(const struct lossynet_comm *comm, uint64_t step, int from, int to, int path) {
    return ln_loss_is_down(&comm->loss, LOSSYNET_GRADIENT, step, from, to, path);
}

/* What a link's packets must do in a step: whether they arrive, and how often they are sent again. */
static bool arrives(const struct lossynet_comm *comm, uint64_t step, int phase, int rounds,
                    int from, int to, uint64_t *sent) {
    bool others = false;
    if (from == to || !down(comm, step, from, to, 0)) return true;
    for (int path = 1; path < comm->loss.paths && path <= rounds; path++, *sent += PACKETS)
        if (!down(comm, step, from, to, path)) return *sent += PACKETS, true;
    for (int k = 0; k < WORKERS; k++)
        others |=
            k != from && k != to && !down(comm, step, from, k, 0) && !down(comm, step, k, to, 0);
    if (rounds < comm->loss.paths || !others) return false;
    *sent += phase == LOSSYNET_GRADIENT ? 2 * PACKETS : PACKETS;
    return true;
}

static void against_reference(const char *model, double p, const char *at, int rounds) {
    struct lossynet_settings settings = ways_settings(model, p, rounds);
    settings.loss.at = at;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(WORKERS, ELEMENTS);
    for (uint64_t step = 0; step < STEPS; step++) {
        unsigned has[2][WORKERS];
        uint64_t sent[2] = {0};
        struct sums sums = {0};
        make_step(comm, x, step, has, &sums);
        for (int phase = 0; phase < 2; phase++) {
            for (int from = 0; from < WORKERS; from++)
                for (int to = 0; to < WORKERS; to++)
                    assert_int_equal(has[phase][to] >> from & 1,
                                     arrives(comm, step, phase, rounds, from, to, &sent[phase]));
            assert_int_equal(sums.resent[phase], sent[phase]);
        }
    }
    free_vectors(x);
    lossynet_close(comm);
}

static void test_reference(void **state) {
    (void)state;
    against_reference("outage:3", 0.4, NULL, 0);
    against_reference("outage:3", 0.4, NULL, 1);
    against_reference("outage:3", 0.6, NULL, 3);
    against_reference("outage:3:sender", 0.3, NULL, 2);
    against_reference("outage:3:receiver", 0.3, NULL, 2);
    for (int rounds = 1; rounds <= 4; rounds++) against_reference("outage:3:3", 0.5, NULL, rounds);
    against_reference("outage:3", 0.1, "1-2=1,2-1=1,3=0.4", 1);
    against_reference("bernoulli", 0, "1-2=1,2-1=1", 1);
    against_reference("bernoulli", 0, "4=1", 1); /* cut off entirely */
}

/* The way is the same for whoever asks, never a link that is down, and spreads over the workers. */
static void test_load(void **state) {
    (void)state;
    struct lossynet_settings settings = ways_settings("bernoulli", 0, 1);
    settings.loss.at = "1-2=1,1-3=1";
    struct lossynet_comm *comm = open_alone(&settings);
    int times[WORKERS] = {0};
    comm->steps.round = 1;
    for (comm->steps.step = 0; comm->steps.step < 300; comm->steps.step++) {
        const struct ln_way way = ln_way_of(comm, LOSSYNET_GRADIENT, 1, 2);
        assert_int_equal(way.hops, 2);
        times[way.by]++;
    }
    assert_int_equal(times[1] + times[2] + times[3], 0);
    for (int w = 0; w < WORKERS; w++)
        if (w < 1 || w > 3) assert_in_range(times[w], 40, 210);
    comm->steps.round = 0;
    lossynet_close(comm);
}

/* A budget counts each hop: of gradients that need two, half as many are asked for. */
static void test_budget(void **state) {
    (void)state;
    const double budget = 0.2; /* of 25 packets for each worker: 5 */
    struct lossynet_settings settings = ways_settings("bernoulli", 0, 1);
    settings.loss.at = "1-2=1,3-2=1";
    settings.retransmission_budget = budget;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(WORKERS, ELEMENTS);
    struct lossynet_counters c;
    for (uint64_t step = 0; step < 50; step++) {
        assert_int_equal(lossynet_step_begin(comm, step), LOSSYNET_OK);
        assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
        assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
        assert_int_equal(lossynet_step_counters(comm, step, &c), LOSSYNET_OK);
        assert_int_equal(c.resent[0], 4); /* 2 packets, 2 hops each; a third one would be 6 */
        assert_int_equal(c.resent[1], 5);
        assert_int_equal(c.expected[0] - c.arrived[0], 2 * PACKETS - 2);
        assert_int_equal(c.expected[1] - c.arrived[1], 2 * PACKETS - 5);
    }
    free_vectors(x);
    lossynet_close(comm);
}

/* What is planned is what happens, on average over many steps, and rounds are as many as bring
 * something. */
static void test_plan(void **state) {
    (void)state;
    const struct {
        const char *model;
        double p;
        int rounds;
    } cases[] = {{"outage:2", 0.2, 1}, {"outage:2", 0.001, 0},      {"outage:2:3", 0.2, 3},
                 {"outage:2", 0, 0},   {"outage:2:sender", 0.2, 0}, {"outage:2:receiver", 0.2, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct lossynet_settings settings =
            ways_settings(cases[i].model, cases[i].p, LOSSYNET_ROUNDS_MEASURED);
        double again[2], left[2];
        for (int phase = 0; phase < 2; phase++)
            assert_int_equal(
                lossynet_rounds_plan(&settings, (lossynet_phase)phase, &again[phase], &left[phase]),
                cases[i].rounds);
        if (!cases[i].rounds) continue;
        for (int phase = 0; phase < 2; phase++)
            settings.retransmission_rounds[phase] = cases[i].rounds;
        struct lossynet_comm *comm = open_alone(&settings);
        float **x = take_vectors(WORKERS, ELEMENTS);
        struct sums sums = {0};
        unsigned has[2][WORKERS];
        for (uint64_t step = 0; step < 1000; step++) make_step(comm, x, step, has, &sums);
        for (int phase = 0; phase < 2; phase++) {
            const double sent = (double)sums.expected[phase];
            assert_close((double)sums.resent[phase] / sent, again[phase], 0.08 * again[phase]);
            assert_close(1 - (double)sums.arrived[phase] / sent, left[phase],
                         0.2 * left[phase] + 1e-4);
        }
        free_vectors(x);
        lossynet_close(comm);
    }
    struct lossynet_settings settings = ways_settings("bernoulli", 0.2, LOSSYNET_ROUNDS_MEASURED);
    double again, left, want_again, want_left;
    const int rounds = lossynet_rounds_at(LOSSYNET_GRADIENT, 0.2, 0, false);
    assert_int_equal(lossynet_rounds_plan(&settings, LOSSYNET_GRADIENT, &again, &left), rounds);
    lossynet_rounds_expect(rounds, 0.2, 0, &want_again, &want_left);
    assert_true(again == want_again && left == want_left);
}

/* Drift is expected where its assumptions hold, and nowhere else. */
static void test_drift_says_what_it_knows(void **state) {
    (void)state;
    char trace[64];
    snprintf(trace, sizeof trace, "trace:/tmp/lossynet-trace-%d", (int)getpid());
    FILE *file = fopen(trace + strlen("trace:"), "w");
    assert_true(file && fputs("0010\n", file) >= 0 && fclose(file) == 0);
    const struct {
        const char *model;
        int rounds;
        bool known;
        const char *at;
    } cases[] = {{"outage:3", 0, true, NULL},
                 {"outage:3", 1, false, NULL},
                 {"outage:3:sender", 0, false, NULL},
                 {"outage:3:receiver", 0, false, NULL},
                 {trace, 0, false, NULL},
                 {"bernoulli", 0, false, "1-2=0.5"},
                 {"burst:8", 1, true, NULL},
                 {"bernoulli", 1, true, NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct lossynet_settings settings = ways_settings(cases[i].model, 0.3, cases[i].rounds);
        settings.drift_samples = 50;
        settings.loss.at = cases[i].at;
        struct lossynet_comm *comm = open_alone(&settings);
        float **x = take_vectors(WORKERS, ELEMENTS);
        struct lossynet_drift drift;
        for (uint64_t step = 0; step < 3; step++) {
            assert_int_equal(lossynet_step_begin(comm, step), LOSSYNET_OK);
            assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
            assert_int_equal(lossynet_drift_measure(comm, x, &drift), LOSSYNET_OK);
        }
        assert_int_equal(!isnan(drift.expected_pair), cases[i].known);
        assert_int_equal(!isnan(drift.expected_owner), cases[i].known);
        free_vectors(x);
        lossynet_close(comm);
    }
    unlink(trace + strlen("trace:"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reference),
        cmocka_unit_test(test_load),
        cmocka_unit_test(test_budget),
        cmocka_unit_test(test_plan),
        cmocka_unit_test(test_drift_says_what_it_knows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
