/* test_retransmission.c — tests packets that are sent again. A reference asks the loss model for
 * each packet and round whether it is lost. The tests compare which packets arrive, what is sent,
 * what the owners average, how much loss is left, and the drift that follows from it. With a
 * budget they check how much a worker requests, that it requests the packets that have been
 * missing longest, that no packet is left out for ever, and that only requested packets come.
 */
#include "test/lossynet/test_lossynet.h"

enum { WORKERS = 5, BUCKETS = 3, ELEMENTS = 700 + 33 + 1200, PACKETS_MOST = 64 };
static const size_t elements[BUCKETS] = {700, 33, 1200};

static struct lossynet_settings retransmission_settings(double p, int gradient, int parameter) {
    struct lossynet_settings settings = simple_settings(WORKERS, elements, BUCKETS, p);
    settings.estimator = LOSSYNET_MEAN;
    settings.retransmission_rounds[LOSSYNET_GRADIENT] = gradient;
    settings.retransmission_rounds[LOSSYNET_PARAMETER] = parameter;
    return settings;
}

/* Whether packet k of n gets through in some round up to `rounds`; *sent: how often it was sent
 * again. */
static bool gets_through(const struct lossynet_comm *comm, lossynet_phase phase, int rounds,
                         int sender, int receiver, size_t n, size_t k, uint64_t *sent) {
    uint8_t mask[PACKETS_MOST];
    assert_true(n <= sizeof mask);
    for (int round = 0; round <= rounds; round++) {
        struct ln_loss loss = comm->loss;
        if (round > 0) loss.seed = ln_mix(loss.seed + (uint64_t)round);
        if (round > 0 && loss.rate[phase] < 1) ++*sent; /* not where all links are down for ever */
        ln_loss_mask(&loss, phase, comm->steps.step, sender, receiver, n, NULL, mask);
        if (mask[k]) return true;
    }
    return false;
}

struct packet {
    int owner;
    size_t first, count, number, of_owner; /* elements; which of the owner's packets */
};

static size_t list_packets(const struct lossynet_comm *comm, struct packet *list) {
    size_t n = 0, seen[WORKERS] = {0};
    for (int b = 0; b < BUCKETS; b++) {
        for (int w = 0; w < WORKERS; w++) {
            size_t offset, count;
            lossynet_shard(comm, w, b, &offset, &count);
            for (size_t at = 0; at < count; at += 16, n++) /* of 64 bytes */
                list[n] = (struct packet){w, offset + at, count - at < 16 ? count - at : 16, n,
                                          seen[w]++};
        }
    }
    assert_int_equal(n, lossynet_packets(comm));
    return n;
}

static void against_reference(double p, int gradient, int parameter) {
    struct lossynet_settings settings = retransmission_settings(p, gradient, parameter);
    struct lossynet_comm *comm = open_alone(&settings);
    struct packet list[256];
    size_t packets = list_packets(comm, list);
    float **g = take_vectors(WORKERS, ELEMENTS), **x = take_vectors(WORKERS, ELEMENTS);
    for (uint64_t step = 0; step < 6; step++) {
        uint64_t resent[2] = {0}, arrived[2] = {0}, bytes[2] = {0};
        float before[WORKERS][ELEMENTS];
        for (int w = 0; w < WORKERS; w++) {
            for (size_t e = 0; e < ELEMENTS; e++) g[w][e] = ldexpf(1, w);
            for (size_t e = 0; e < ELEMENTS; e++) x[w][e] = (float)(step * WORKERS + (uint64_t)w);
            memcpy(before[w], x[w], sizeof before[w]);
        }
        assert_int_equal(lossynet_step_begin(comm, step), LOSSYNET_OK);
        assert_int_equal(lossynet_reduce(comm, g, false), LOSSYNET_OK);
        assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
        for (size_t i = 0; i < packets; i++) {
            const struct packet *k = &list[i];
            size_t n = ln_partition_owner_packets(&comm->partition, k->owner);
            double sum = 0, count = 0;
            for (int w = 0; w < WORKERS; w++) {
                uint64_t again[2] = {0};
                bool there = w == k->owner || gets_through(comm, LOSSYNET_GRADIENT, gradient, w,
                                                           k->owner, n, k->of_owner, &again[0]);
                bool fresh = w == k->owner || gets_through(comm, LOSSYNET_PARAMETER, parameter,
                                                           k->owner, w, n, k->of_owner, &again[1]);
                sum += there ? ldexp(1, w) : 0;
                count += there;
                float want = fresh ? before[k->owner][k->first] : before[w][k->first];
                for (size_t e = 0; e < k->count; e++) assert_true(x[w][k->first + e] == want);
                if (w == k->owner) continue;
                const bool got[2] = {there, fresh};
                for (int phase = 0; phase < 2; phase++) {
                    resent[phase] += again[phase];
                    arrived[phase] += got[phase];
                    bytes[phase] += (1 + again[phase]) * k->count * sizeof(float);
                }
            }
            for (size_t e = 0; e < k->count; e++)
                assert_close(g[k->owner][k->first + e], sum / count, 1e-5);
        }
        struct lossynet_counters counters;
        assert_int_equal(lossynet_step_counters(comm, step, &counters), LOSSYNET_OK);
        for (int phase = 0; phase < 2; phase++) {
            assert_int_equal(counters.expected[phase], packets * (WORKERS - 1));
            assert_int_equal(counters.arrived[phase], arrived[phase]);
            assert_int_equal(counters.resent[phase], resent[phase]);
            assert_int_equal(counters.bytes[phase], bytes[phase]);
        }
    }
    free_vectors(x);
    free_vectors(g);
    lossynet_close(comm);
}

static void test_reference(void **state) {
    (void)state;
    against_reference(0.4, 0, 0);
    against_reference(0.4, 0, 1);
    against_reference(0.4, 2, 0);
    against_reference(0.4, 1, 3);
    against_reference(0, 1, 1);
    against_reference(1, 1, 2);
}

/* p^(r+1) of the packets stay lost, p + ... + p^r are sent again, ages are geometric, and the drift
 * of a random walk is what the formula says of p^(r+1). */
static void test_statistics(void **state) {
    (void)state;
    enum { STEPS = 600 };
    const double p = 0.4, left = p * p * p;
    struct lossynet_settings settings = retransmission_settings(p, 2, 2);
    settings.drift_samples = ELEMENTS;
    struct lossynet_comm *comm = open_alone(&settings);
    float **g = take_vectors(WORKERS, ELEMENTS), **x = take_vectors(WORKERS, ELEMENTS);
    double expected[2] = {0}, arrived[2] = {0}, resent[2] = {0}, age = 0, drift = 0, formula = 0;
    for (uint64_t step = 0; step < STEPS; step++) {
        struct lossynet_counters counters;
        struct lossynet_drift d;
        assert_int_equal(lossynet_step_begin(comm, step), LOSSYNET_OK);
        assert_int_equal(lossynet_reduce(comm, g, false), LOSSYNET_OK);
        for (int w = 0; w < WORKERS; w++) { /* owners make a step of a random walk */
            for (int b = 0; b < BUCKETS; b++) {
                size_t offset, count;
                lossynet_shard(comm, w, b, &offset, &count);
                for (size_t e = offset; e < offset + count; e++)
                    x[w][e] += (float)random_unit(step, 3, e);
            }
        }
        assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
        assert_int_equal(lossynet_step_counters(comm, step, &counters), LOSSYNET_OK);
        assert_int_equal(lossynet_drift_measure(comm, x, &d), LOSSYNET_OK);
        for (int phase = 0; phase < 2; phase++) {
            expected[phase] += (double)counters.expected[phase];
            arrived[phase] += (double)counters.arrived[phase];
            resent[phase] += (double)counters.resent[phase];
        }
        age += d.mean_age / STEPS;
        drift += d.pair;
        formula += lossynet_drift_pair(WORKERS, left, d.sigma2, NULL, 0);
    }
    for (int phase = 0; phase < 2; phase++) {
        assert_close(1 - arrived[phase] / expected[phase], left, 0.003);
        assert_close(resent[phase] / expected[phase], p + p * p, 0.005);
    }
    assert_close(age, left / (1 - left), 0.005);
    assert_close(drift / formula, 1, 0.06);
    free_vectors(x);
    free_vectors(g);
    lossynet_close(comm);
}

/* ---- a budget ---- */

/* What one worker asked for in a phase. since[i]: for how many steps packet i had been missing
 * before round 1, 0: it was there. Adds up what was missing and asked for, by packet. */
static size_t check_asked(const uint8_t *asks, const uint32_t *since, size_t count, size_t own,
                          double budget, double *missing, double *asked) {
    size_t lost = 0, total = 0, room = (size_t)(budget * (double)(count - own));
    uint32_t youngest = UINT32_MAX, oldest = 0; /* of those asked for, of those not */
    for (size_t i = 0; i < count; i++) {
        assert_true(asks[i] <= (since[i] > 0));
        lost += since[i] > 0;
        total += asks[i];
        missing[i] += since[i] > 0;
        asked[i] += asks[i];
        if (asks[i] && since[i] < youngest) youngest = since[i];
        if (!asks[i] && since[i] > oldest) oldest = since[i];
    }
    assert_int_equal(total, lost < room ? lost : room);
    assert_true(oldest <= youngest);
    return total;
}

/* The same lots for all packets: what is asked for of what was missing differs by chance only. */
static void check_even(const double *missing, const double *asked, size_t count) {
    double all_missing = 0, all_asked = 0;
    for (size_t i = 0; i < count; i++) all_missing += missing[i], all_asked += asked[i];
    const double share = all_asked / all_missing;
    for (size_t i = 0; i < count; i++) {
        if (missing[i] == 0) continue; /* its own */
        double deviation = sqrt(share * (1 - share) * missing[i]);
        assert_close(asked[i], share * missing[i], 5 * deviation + 1);
    }
}

static void budget_of(double p, double budget, bool error_feedback) {
    enum { STEPS = 300, MOST = 4096 };
    struct lossynet_settings settings = retransmission_settings(p, 1, 1);
    settings.retransmission_budget = budget;
    settings.error_feedback = error_feedback;
    struct lossynet_comm *comm = open_alone(&settings);
    float **g = take_vectors(WORKERS, ELEMENTS), **x = take_vectors(WORKERS, ELEMENTS);
    const size_t packets = lossynet_packets(comm);
    static uint32_t late[WORKERS][MOST], age[WORKERS][MOST], since[MOST]; /* after the last step */
    static double missing[2][WORKERS][MOST], asked[2][WORKERS][MOST];
    memset(late, 0, sizeof late);
    memset(age, 0, sizeof age);
    memset(missing, 0, sizeof missing);
    memset(asked, 0, sizeof asked);
    for (uint64_t step = 0; step < STEPS; step++) {
        uint64_t resent[2] = {0};
        struct lossynet_counters counters;
        assert_int_equal(lossynet_step_begin(comm, step), LOSSYNET_OK);
        assert_int_equal(lossynet_reduce(comm, g, false), LOSSYNET_OK);
        for (int o = 0; o < WORKERS; o++) {
            size_t n = ln_partition_owner_packets(&comm->partition, o), count = n * WORKERS;
            const uint8_t *asks = comm->retransmission.asks + comm->arrivals.own_start[o];
            assert_true(count <= MOST && packets <= MOST);
            for (int w = 0; w < WORKERS; w++) {
                uint8_t mask[2][PACKETS_MOST];
                struct ln_loss again = comm->loss;
                again.seed = ln_mix(again.seed + 1);
                ln_loss_mask(&comm->loss, LOSSYNET_GRADIENT, step, w, o, n, NULL, mask[0]);
                ln_loss_mask(&again, LOSSYNET_GRADIENT, step, w, o, n, NULL, mask[1]);
                for (size_t k = 0; k < n; k++) {
                    size_t i = (size_t)w * n + k;
                    bool first = w == o || mask[0][k], there = first || (asks[i] && mask[1][k]);
                    assert_int_equal(comm->arrivals.arrived[0][comm->arrivals.own_start[o] + i],
                                     there);
                    since[i] = first ? 0 : 1 + (error_feedback ? late[o][i] : 0);
                    late[o][i] = there ? 0 : late[o][i] + 1;
                }
            }
            resent[0] += check_asked(asks, since, count, n, budget, missing[0][o], asked[0][o]);
        }
        assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
        for (int w = 0; w < WORKERS; w++) {
            const uint8_t *by_link = comm->retransmission.asks + (size_t)w * packets;
            uint8_t asks[MOST]; /* in order of packets */
            size_t own = ln_partition_owner_packets(&comm->partition, w), of_owner[WORKERS] = {0};
            struct packet list[256];
            list_packets(comm, list);
            memset(since, 0, sizeof since);
            for (size_t i = 0; i < packets; i++) {
                int o = list[i].owner;
                size_t n = ln_partition_owner_packets(&comm->partition, o), k = of_owner[o]++;
                uint64_t sent = 0;
                asks[i] = by_link[comm->partition.owner_start[o] + k];
                bool first = gets_through(comm, LOSSYNET_PARAMETER, 0, o, w, n, k, &sent);
                bool there = gets_through(comm, LOSSYNET_PARAMETER, asks[i], o, w, n, k, &sent);
                since[i] = w == o || first ? 0 : age[w][i] + 1;
                age[w][i] = w == o || there ? 0 : age[w][i] + 1;
                assert_int_equal(comm->arrivals.age[(size_t)w * packets + i], age[w][i]);
            }
            resent[1] += check_asked(asks, since, packets, own, budget, missing[1][w], asked[1][w]);
        }
        assert_int_equal(lossynet_step_counters(comm, step, &counters), LOSSYNET_OK);
        for (int phase = 0; phase < 2; phase++) {
            assert_int_equal(counters.resent[phase], resent[phase]);
            assert_true((double)resent[phase] <= budget * (double)counters.expected[phase]);
        }
    }
    for (int w = 0; w < WORKERS; w++) {
        check_even(missing[0][w], asked[0][w],
                   WORKERS * ln_partition_owner_packets(&comm->partition, w));
        check_even(missing[1][w], asked[1][w], packets);
    }
    free_vectors(x);
    free_vectors(g);
    lossynet_close(comm);
}

static void test_budget(void **state) {
    (void)state;
    budget_of(0.4, 0.2, false);
    budget_of(0.4, 0.2, true);
    budget_of(0.1, 0.2, true); /* enough for all but a few steps */
    budget_of(0.6, 0.05, true);
}

/* All rounds together stay within the budget; one that is large enough changes nothing. */
static void test_budget_of_rounds(void **state) {
    (void)state;
    struct lossynet_settings settings = retransmission_settings(0.5, 3, 3);
    struct lossynet_counters counters[3];
    const double budget[3] = {0.6, 3, 0};
    for (int i = 0; i < 3; i++) {
        settings.retransmission_budget = budget[i];
        struct lossynet_comm *comm = open_alone(&settings);
        float **x = take_vectors(WORKERS, ELEMENTS);
        assert_int_equal(lossynet_step_begin(comm, 0), LOSSYNET_OK);
        assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
        assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
        assert_int_equal(lossynet_step_counters(comm, 0, &counters[i]), LOSSYNET_OK);
        free_vectors(x);
        lossynet_close(comm);
    }
    assert_memory_equal(&counters[1], &counters[2], sizeof counters[1]);
    for (int phase = 0; phase < 2; phase++) {
        double share = (double)counters[0].resent[phase] / (double)counters[0].expected[phase];
        assert_true(share <= 0.6 && share > 0.57);
        assert_true(counters[2].resent[phase] > counters[0].resent[phase]);
        assert_true(counters[2].arrived[phase] > counters[0].arrived[phase]);
    }
}

/* Until p^(r+1) is at most 1/80 (gradients that come later), 1/400 (those that do not) or 0.1
 * (parameters), or the budget is used; none where p is at most 1/15 or, of parameters, 0.22; and at
 * most five of gradients and two of parameters. */
static void test_how_many_rounds(void **state) {
    (void)state;
    static const struct {
        double p, budget;
        int gradient, later, parameter;
    } cases[] = {{0, 0, 0, 0, 0},     {0.06, 0, 0, 0, 0},  {0.1, 0, 2, 1, 0},   {0.15, 0, 3, 2, 1},
                 {0.2, 0, 3, 2, 1},   {0.25, 0, 4, 3, 1},  {0.3, 0, 4, 3, 1},   {0.4, 0, 5, 4, 2},
                 {0.6, 0, 5, 5, 2},   {1, 0, 5, 5, 2},     {0.4, 0.2, 1, 1, 1}, {0.1, 0.2, 2, 1, 0},
                 {0.4, 0.5, 2, 2, 2}, {0.6, 0.94, 2, 2, 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(lossynet_rounds_at(LOSSYNET_GRADIENT, cases[i].p, cases[i].budget, false),
                         cases[i].gradient);
        assert_int_equal(lossynet_rounds_at(LOSSYNET_GRADIENT, cases[i].p, cases[i].budget, true),
                         cases[i].later);
        assert_int_equal(lossynet_rounds_at(LOSSYNET_PARAMETER, cases[i].p, cases[i].budget, true),
                         cases[i].parameter);
    }
}

/* Rounds that follow the measured loss bring what as many fixed rounds bring, from the first step
 * on, since the injected loss is known. A saved state has the number of the next step. */
static void test_measured_rounds(void **state) {
    (void)state;
    const int measured = LOSSYNET_ROUNDS_MEASURED;
    struct lossynet_settings settings[2] = {retransmission_settings(0.4, 5, 2),
                                            retransmission_settings(0.4, measured, measured)};
    struct lossynet_comm *comm[2] = {open_alone(&settings[0]), open_alone(&settings[1])};
    float **x = take_vectors(WORKERS, ELEMENTS);
    for (uint64_t step = 0; step < 20; step++) {
        struct lossynet_counters counters[2];
        for (int i = 0; i < 2; i++) {
            struct lossynet_drift drift;
            assert_int_equal(lossynet_step_begin(comm[i], step), LOSSYNET_OK);
            assert_int_equal(lossynet_reduce(comm[i], x, false), LOSSYNET_OK);
            assert_int_equal(lossynet_broadcast(comm[i], x, false), LOSSYNET_OK);
            assert_int_equal(lossynet_report_begin(comm[i], step, x), LOSSYNET_OK);
            assert_int_equal(lossynet_report_end(comm[i], &counters[i], &drift), LOSSYNET_OK);
        }
        assert_memory_equal(&counters[0], &counters[1], sizeof counters[0]);
    }
    const size_t bytes = lossynet_state_bytes(comm[1], LOSSYNET_ALL_WORKERS);
    char *saved = (char *)malloc(bytes);
    lossynet_state_save(comm[1], LOSSYNET_ALL_WORKERS, saved);
    settings[1].loss.rate[0] = settings[1].loss.rate[1] = 0;
    struct lossynet_comm *later = open_alone(&settings[1]);
    assert_int_equal(ln_retransmission_rounds(later, LOSSYNET_GRADIENT), 0);
    assert_true(lossynet_state_load(later, LOSSYNET_ALL_WORKERS, saved, bytes));
    assert_int_equal(ln_retransmission_rounds(later, LOSSYNET_GRADIENT), 5);
    assert_int_equal(ln_retransmission_rounds(later, LOSSYNET_PARAMETER), 2);
    lossynet_close(later);
    free(saved);
    free_vectors(x);
    for (int i = 0; i < 2; i++) lossynet_close(comm[i]);
}

/* The number for gradients after `steps` steps that lose these shares in turn. *changes: how often it was another. */
static uint32_t rounds_after(struct lossynet_comm *comm, int steps, double p, double q,
                             int *changes) {
    uint32_t *now = comm->retransmission.sums.rounds, before = *now;
    *changes = 0;
    for (int step = 0; step < steps; step++) {
        const double lost = 1e6 * (step % 2 ? q : p);
        const struct ln_ages ages = {.first = {{1000000, 1000000 - (uint64_t)lost}}};
        ln_rounds_add(comm, &ages);
        ln_rounds_choose(comm);
        *changes += *now != before;
        before = *now;
    }
    return before;
}

/* The threshold of the first round is 1/15, of the second 0.112. */
static void test_loss_near_a_threshold_changes_nothing(void **state) {
    (void)state;
    const int measured = LOSSYNET_ROUNDS_MEASURED;
    struct lossynet_settings settings = retransmission_settings(0, measured, measured);
    settings.error_feedback = true;
    struct lossynet_comm *comm = open_alone(&settings);
    int changes;
    assert_int_equal(rounds_after(comm, 200, 0.02, 0.115, &changes), 0); /* 0.0675: hovers */
    assert_int_equal(changes, 0);
    assert_int_equal(rounds_after(comm, 200, 0.08, 0.08, &changes), 1);
    assert_int_equal(changes, 1);
    assert_int_equal(rounds_after(comm, 200, 0.02, 0.115, &changes), 1);
    assert_int_equal(changes, 0);
    assert_int_equal(rounds_after(comm, 200, 0.02, 0.2, &changes), 1); /* 0.11 */
    assert_int_equal(rounds_after(comm, 200, 0.13, 0.13, &changes), 2);
    assert_int_equal(rounds_after(comm, 400, 0.05, 0.05, &changes), 0);
    assert_int_equal(changes, 2);
    lossynet_close(comm);
}

/* A step in which nothing is dropped counts as one in which all arrived at first, in both phases. */
static void test_steps_without_loss_count(void **state) {
    (void)state;
    const int measured = LOSSYNET_ROUNDS_MEASURED;
    struct lossynet_settings settings = retransmission_settings(0.4, measured, measured);
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(WORKERS, ELEMENTS);
    for (uint64_t step = 0; step < 10; step++) {
        double before[2];
        struct lossynet_drift drift;
        for (int phase = 0; phase < 2; phase++)
            before[phase] = lossynet_lost_of_late(comm, (lossynet_phase)phase);
        assert_int_equal(lossynet_step_begin(comm, step), LOSSYNET_OK);
        assert_int_equal(lossynet_reduce(comm, x, step == 9), LOSSYNET_OK);
        assert_int_equal(lossynet_broadcast(comm, x, step == 9), LOSSYNET_OK);
        assert_int_equal(lossynet_drift_measure(comm, x, &drift), LOSSYNET_OK);
        for (int phase = 0; phase < 2 && step == 9; phase++)
            assert_true(lossynet_lost_of_late(comm, (lossynet_phase)phase) < 0.95 * before[phase]);
    }
    free_vectors(x);
    lossynet_close(comm);
}

static void test_refusals(void **state) {
    (void)state;
    struct lossynet_comm *comm = NULL;
    for (int i = 0; i < 2; i++) {
        struct lossynet_settings budget = retransmission_settings(0.1, 1, 1);
        budget.retransmission_budget = i ? -0.1 : NAN;
        capture_begin();
        assert_int_equal(lossynet_open(&alone, &budget, &comm), LOSSYNET_INVALID);
        assert_message(capture_end(), "expected a share of a phase's packets, or 0 for all");
    }
    struct lossynet_settings settings = retransmission_settings(0.1, -2, 0);
    capture_begin();
    assert_int_equal(lossynet_open(&alone, &settings, &comm), LOSSYNET_INVALID);
    assert_message(capture_end(), "repair -2: expected 0 to 16, or -1");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reference),
        cmocka_unit_test(test_statistics),
        cmocka_unit_test(test_budget),
        cmocka_unit_test(test_budget_of_rounds),
        cmocka_unit_test(test_how_many_rounds),
        cmocka_unit_test(test_measured_rounds),
        cmocka_unit_test(test_loss_near_a_threshold_changes_nothing),
        cmocka_unit_test(test_steps_without_loss_count),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests_name("packets sent again", tests, NULL, NULL);
}
