/* test_lossynet_state.c — tests saving and loading a comm's state: later steps give the same bits,
 * and the state of another comm is refused and changes nothing. */
#include "test/lossynet/test_lossynet.h"

enum { STEPS = 20, HALF = 9 };

struct run {
    struct lossynet_comm *comm;
    float **gradient, **parameter, **ahead;
    size_t elements;
    uint64_t digest;
};

static struct run run_open(const struct lossynet_settings *settings) {
    struct run run = {.comm = open_alone(settings), .digest = 0xcbf29ce484222325u};
    for (int b = 0; b < settings->buckets; b++) run.elements += settings->bucket_elements[b];
    run.gradient = take_vectors(settings->workers, run.elements);
    run.parameter = take_vectors(settings->workers, run.elements);
    run.ahead = take_vectors(settings->workers, run.elements);
    return run;
}

static void run_close(struct run *run) {
    free_vectors(run->gradient);
    free_vectors(run->parameter);
    free_vectors(run->ahead);
    lossynet_close(run->comm);
}

/* Steps from ... to-1; the digest takes in all that can be seen. */
static void run_steps(struct run *run, int workers, uint64_t from, uint64_t to) {
    for (uint64_t step = from; step < to; step++) {
        struct lossynet_drift drift;
        struct lossynet_counters counters;
        assert_int_equal(lossynet_step_begin(run->comm, step), LOSSYNET_OK);
        for (int w = 0; w < workers; w++)
            for (size_t e = 0; e < run->elements; e++)
                run->gradient[w][e] =
                    (float)random_unit(step, (uint64_t)w, e) + 0.01f * run->parameter[w][e];
        assert_int_equal(lossynet_reduce(run->comm, run->gradient, false), LOSSYNET_OK);
        for (int w = 0; w < workers; w++) {
            float *next = run->ahead[w];
            for (int b = 0; b < SCENARIO_BUCKETS; b++) {
                size_t offset, count;
                lossynet_shard(run->comm, w, b, &offset, &count);
                for (size_t e = offset; e < offset + count; e++) {
                    run->parameter[w][e] -= 0.1f * run->gradient[w][e];
                    *next++ = run->parameter[w][e] - 0.05f * run->gradient[w][e];
                }
            }
        }
        lossynet_broadcast_ahead(run->comm, step % 3 ? (const float *const *)run->ahead : NULL,
                                 0.5);
        assert_int_equal(lossynet_broadcast(run->comm, run->parameter, false), LOSSYNET_OK);
        assert_int_equal(lossynet_drift_measure(run->comm, run->parameter, &drift), LOSSYNET_OK);
        assert_int_equal(lossynet_step_counters(run->comm, run->comm->steps.step, &counters),
                         LOSSYNET_OK);
        for (int w = 0; w < workers; w++) {
            size_t cursor = 0, fresh[2];
            run->digest = digest_bytes(run->digest, run->parameter[w], run->elements * 4);
            while (lossynet_next_fresh(run->comm, w, &cursor, &fresh[0], &fresh[1]))
                run->digest = digest_bytes(run->digest, fresh, sizeof fresh);
        }
        run->digest = digest_bytes(run->digest, &counters, sizeof counters);
        run->digest =
            digest_bytes(run->digest, &drift.pair, offsetof(struct lossynet_drift, max_age));
        run->digest = digest_bytes(run->digest, &drift.max_age, sizeof drift.max_age);
    }
}

/* Moves the state of `from` to the comm of `to`, and where the replicas stand. */
static void move(struct run *to, const struct run *from, int workers, bool with_common) {
    for (int w = with_common ? LOSSYNET_ALL_WORKERS : 0; w < workers; w++) {
        size_t bytes = lossynet_state_bytes(from->comm, w);
        char *state = (char *)malloc(bytes + 1);
        state[bytes] = 77;
        lossynet_state_save(from->comm, w, state);
        assert_int_equal(state[bytes], 77);
        assert_true(lossynet_state_load(to->comm, w, state, bytes));
        free(state);
    }
    for (int w = 0; w < workers; w++)
        memcpy(to->parameter[w], from->parameter[w], from->elements * sizeof(float));
    to->digest = from->digest;
}

static void check_resumed_with(struct lossynet_settings settings) {
    struct run whole = run_open(&settings), resumed = run_open(&settings);
    run_steps(&whole, SCENARIO_WORKERS, 0, HALF);
    move(&resumed, &whole, SCENARIO_WORKERS, true);
    run_steps(&whole, SCENARIO_WORKERS, HALF, STEPS);
    run_steps(&resumed, SCENARIO_WORKERS, HALF, STEPS);
    assert_int_equal(resumed.digest, whole.digest);
    run_close(&resumed);
    run_close(&whole);
}

static void check_resumed(const char *model, double p, lossynet_estimator estimator) {
    struct lossynet_settings settings = scenario_settings(model, p, estimator);
    check_resumed_with(settings);
    settings.wire_dtype = LOSSYNET_BF16;
    check_resumed_with(settings);
    settings.wire_dtype = LOSSYNET_INT8;
    check_resumed_with(settings);
    settings.wire_dtype = LOSSYNET_INT4;
    settings.error_feedback = estimator == LOSSYNET_MEAN || estimator == LOSSYNET_ZERO;
    check_resumed_with(settings);
}

static void test_resumed_run_is_the_same(void **state) {
    (void)state;
    char trace[] = "/tmp/lossynet-trace-XXXXXX", model[64];
    int file = mkstemp(trace);
    assert_int_equal(write(file, "0001000000100", 13), 13);
    close(file);
    snprintf(model, sizeof model, "trace:%s", trace);
    check_resumed("bernoulli", 0.1, LOSSYNET_MEAN);
    check_resumed("bernoulli", 0.3, LOSSYNET_ZERO);
    check_resumed("burst:5", 0.2, LOSSYNET_BALANCED);
    check_resumed("burst:1", 0.5, LOSSYNET_ZERO); /* a chain that never decides (loss_model.c) */
    check_resumed("outage:3", 0.3, LOSSYNET_ZERO);
    check_resumed(model, 0.1, LOSSYNET_ZERO);
    check_resumed("bernoulli", 1, LOSSYNET_MEAN);
    unlink(trace);
}

/* The test above can fail: each part of the state matters. */
static void test_every_part_matters(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0.3, LOSSYNET_ZERO);
    for (int part = 0; part < 2; part++) {
        struct run whole = run_open(&settings), resumed = run_open(&settings);
        run_steps(&whole, SCENARIO_WORKERS, 0, HALF);
        move(&resumed, &whole, part ? 0 : SCENARIO_WORKERS, part == 1); /* workers or common only */
        for (int w = 0; part && w < SCENARIO_WORKERS; w++)
            memcpy(resumed.parameter[w], whole.parameter[w], whole.elements * sizeof(float));
        run_steps(&whole, SCENARIO_WORKERS, HALF, STEPS);
        run_steps(&resumed, SCENARIO_WORKERS, HALF, STEPS);
        assert_int_not_equal(resumed.digest, whole.digest);
        run_close(&resumed);
        run_close(&whole);
    }
}

static void test_states_of_other_nets_are_refused(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0.3, LOSSYNET_MEAN), other;
    struct run run = run_open(&settings);
    run_steps(&run, SCENARIO_WORKERS, 0, 3);
    size_t bytes = lossynet_state_bytes(run.comm, 2),
           common_bytes = lossynet_state_bytes(run.comm, LOSSYNET_ALL_WORKERS);
    char *worker = (char *)malloc(bytes), *common = (char *)malloc(common_bytes);
    lossynet_state_save(run.comm, 2, worker);
    lossynet_state_save(run.comm, LOSSYNET_ALL_WORKERS, common);

    for (int change = 0; change < 7; change++) {
        const size_t elements[SCENARIO_BUCKETS] = {5000, 40, 2, 12344};
        bool worker_fits = change >= 3 && change < 6, common_fits = false;
        other = settings;
        if (change == 0) other.workers = 4;
        if (change == 1) other.packet_bytes = 512;
        if (change == 2) other.bucket_elements = elements;
        if (change == 3) other.drift_samples = 499;
        if (change == 4) other.loss.seed++;
        if (change == 5) other.loss.rate[0] = 0, common_fits = true; /* may change on the way */
        if (change == 6) other.wire_dtype = LOSSYNET_BF16;
        struct lossynet_comm *comm = open_alone(&other);
        assert_int_equal(lossynet_state_load(comm, 2, worker, bytes), worker_fits);
        assert_int_equal(lossynet_state_load(comm, LOSSYNET_ALL_WORKERS, common, common_bytes),
                         common_fits);
        lossynet_close(comm);
    }
    struct lossynet_comm *comm = open_alone(&settings);
    assert_false(lossynet_state_load(comm, 2, worker, bytes - 1));
    assert_false(lossynet_state_load(comm, 3, worker, bytes)); /* another worker's */
    assert_false(lossynet_state_load(comm, LOSSYNET_ALL_WORKERS, worker, bytes));
    memset(worker + bytes - 4 * lossynet_packets(comm), 1, 4 * lossynet_packets(comm));
    assert_false(lossynet_state_load(comm, 2, worker, bytes)); /* own packets that aged */
    size_t cursor = 0, offset, count;
    assert_true(lossynet_next_fresh(comm, 2, &cursor, &offset, &count)); /* nothing was changed */
    assert_int_equal(count, run.elements);
    lossynet_close(comm);
    free(common);
    free(worker);
    run_close(&run);
}

/* Loads the state with each of these 4-byte words replaced, one at a time. Returns how many states are taken. */
static size_t taken_with(struct lossynet_comm *comm, int worker, size_t from, size_t to,
                         uint32_t word) {
    const size_t bytes = lossynet_state_bytes(comm, worker);
    char *saved = (char *)malloc(bytes), *changed = (char *)malloc(bytes);
    size_t taken = 0;
    lossynet_state_save(comm, worker, saved);
    for (size_t at = from; at < to; at += 4) {
        memcpy(changed, saved, bytes);
        memcpy(changed + at, &word, 4);
        taken += lossynet_state_load(comm, worker, changed, bytes);
        assert_true(lossynet_state_load(comm, worker, saved, bytes));
    }
    free(changed);
    free(saved);
    return taken;
}

/* A word of NaN is one as a float, as the upper half of a double, and as the second of two bfloat16. It is too large as a number of rounds. */
static void test_numbers_that_are_not_finite_are_refused(void **state) {
    (void)state;
    static const size_t elements[] = {60, 8};
    struct lossynet_settings settings = simple_settings(3, elements, 2, 0.2);
    settings.error_feedback = true;
    settings.drift_samples = 5;
    settings.estimator = LOSSYNET_MEAN;
    for (int phase = 0; phase < 2; phase++)
        settings.retransmission_rounds[phase] = LOSSYNET_ROUNDS_MEASURED;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(3, 68);
    struct lossynet_drift drift;
    struct lossynet_counters counters;
    for (uint64_t step = 0; step < 3; step++) {
        assert_int_equal(lossynet_step_begin(comm, step), LOSSYNET_OK);
        assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
        assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
        assert_int_equal(lossynet_report_begin(comm, step, x), LOSSYNET_OK);
        assert_int_equal(lossynet_report_end(comm, &counters, &drift), LOSSYNET_OK);
    }
    const uint32_t words[] = {0x7ff80000, 0xfff00000}; /* NaN, and minus infinity as a double */
    const size_t common = lossynet_state_bytes(comm, LOSSYNET_ALL_WORKERS), head = 16;
    const size_t doubles = sizeof comm->lead.sums / 8 + 4; /* whose lower halves may be anything */
    const size_t owned = ln_partition_owner_packets(&comm->partition, 1) * 3;
    const size_t own = lossynet_state_bytes(comm, 1);
    for (int i = 0; i < 2; i++) {
        assert_true(taken_with(comm, LOSSYNET_ALL_WORKERS, head, common, words[i]) <= doubles);
        assert_int_equal(taken_with(comm, 1, own - 2 * 68 - 4 * owned, own, words[i]), 0);
    }
    /* a mass of 2^25, which no run has: counts would take long, and for ever if it were 1e30 */
    assert_int_equal(taken_with(comm, 1, own - 4 * owned, own, 0x4c000000), 0);
    free_vectors(x);
    lossynet_close(comm);
}

static void test_one_worker(void **state) {
    (void)state;
    const size_t elements[] = {100, 7};
    struct lossynet_settings settings = simple_settings(1, elements, 2, 0.1);
    struct lossynet_comm *comm = open_alone(&settings);
    char bytes[4096];
    for (int w = LOSSYNET_ALL_WORKERS; w < 1; w++) {
        assert_in_range(lossynet_state_bytes(comm, w), 1, sizeof bytes);
        lossynet_state_save(comm, w, bytes);
        assert_true(lossynet_state_load(comm, w, bytes, lossynet_state_bytes(comm, w)));
    }
    lossynet_close(comm);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_resumed_run_is_the_same),
        cmocka_unit_test(test_every_part_matters),
        cmocka_unit_test(test_states_of_other_nets_are_refused),
        cmocka_unit_test(test_numbers_that_are_not_finite_are_refused),
        cmocka_unit_test(test_one_worker),
    };
    return cmocka_run_group_tests_name("lossynet_state", tests, NULL, NULL);
}
