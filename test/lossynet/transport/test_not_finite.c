/* test_not_finite.c — tests that all ranks learn of a worker with numbers that no receiver takes, and
 * that the step after it is as if nothing had happened.
 *
 * For each type on the wire, over a reliable link and over one that may lose, with ranks of one and of
 * two workers. The number is in what a worker sends to another rank, in what injected loss takes, in
 * what stays within a rank, or in the parameters of an owner.
 */
#include "mailboxes.h"

enum { WORKERS = 4, BUCKETS = 2, ELEMENTS = 500 + 130, STEPS = 4, BAD_STEP = 1, BAD_WORKER = 1 };
static const size_t elements[BUCKETS] = {500, 130};

static struct { /* the case that the ranks run */
    int owner;  /* of the element; in phase PARAMETER the element is BAD_WORKER's own */
    lossynet_phase phase;
    float value;
    bool told; /* by the pulse; otherwise it is found */
    bool lost; /* the packet, in all steps */
} bad;

static const float values[] = {NAN, -INFINITY, 3e19f, -0x1p64f};

static size_t element_of(const struct lossynet_comm *comm) {
    size_t offset, count;
    lossynet_shard(comm, bad.owner, 0, &offset, &count);
    assert_true(count > 3);
    return offset + 3;
}

static void assert_told(struct lossynet_comm *comm) {
    struct lossynet_not_finite got;
    assert_true(lossynet_is_not_finite(comm, &got));
    assert_int_equal(got.workers, 1);
    assert_int_equal(got.worker, BAD_WORKER);
    assert_int_equal(got.phase, bad.phase);
    const size_t at =
        element_of(comm); /* rounding spoils its block, within a rank before anybody looks */
    assert_true(got.element <= at && at < got.element + LOSSYNET_BLOCK);
    assert_true(got.element == at || ln_has_blocks(&comm->partition));
    if (got.element == at && !bad.lost)
        assert_true(isnan(bad.value)
                        ? isnan(got.value)
                        : fabsf(got.value / bad.value - 1) < 0x1p-7f || got.value == bad.value);
    assert_false(ln_is_sound(got.value));
}

static float gradient_of(int worker, size_t element) {
    return (float)(worker + 1) * (float)(1 + element % 7);
}

/* Rounded as the type does. A gradient that is always lost leaves others: 1, 3 and 4 for 1 ... 4. */
static void check_averages(const struct lossynet_comm *comm, int worker, const float *x) {
    const double mean = bad.lost && worker == bad.owner ? 8.0 / 3 : 2.5;
    size_t offset, count;
    for (int b = 0; b < BUCKETS; b++) {
        lossynet_shard(comm, worker, b, &offset, &count);
        for (size_t e = offset; e < offset + count; e++)
            assert_close(x[e], mean * (double)(1 + e % 7), 5);
    }
}

static void run_steps(struct rank *rank, struct lossynet_comm *comm) {
    const int local = comm->workers.local, first = comm->workers.first;
    float **x = take_vectors(local, ELEMENTS);
    double *mine = calloc((size_t)local, sizeof *mine), all[WORKERS];
    const size_t at = element_of(comm);
    for (uint64_t step = 0; step < STEPS; step++) {
        const bool wrong = step == BAD_STEP && BAD_WORKER / local == rank->rank;
        for (int v = 0; v < local; v++)
            for (size_t e = 0; e < ELEMENTS; e++) x[v][e] = gradient_of(first + v, e);
        if (wrong && bad.phase == LOSSYNET_GRADIENT) x[BAD_WORKER - first][at] = bad.value;
        assert_int_equal(lossynet_step_begin(comm, step), LOSSYNET_OK);
        assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
        for (int v = 0; v < local && step != BAD_STEP; v++) check_averages(comm, first + v, x[v]);
        assert_int_equal(lossynet_pulse(comm, mine, all, sizeof *mine), LOSSYNET_OK);
        struct lossynet_not_finite got;
        if (step == BAD_STEP + (bad.phase == LOSSYNET_PARAMETER)) {
            if (!bad.told) assert_false(lossynet_is_not_finite(comm, &got));
            if (!bad.told) assert_int_equal(lossynet_find_not_finite(comm, x), LOSSYNET_OK);
            assert_told(comm);
        } else {
            assert_false(lossynet_is_not_finite(comm, &got));
            if (step < BAD_STEP) assert_int_equal(lossynet_find_not_finite(comm, x), LOSSYNET_OK);
            assert_false(lossynet_is_not_finite(comm, &got));
        }
        for (int v = 0; v < local; v++) memset(x[v], 0, ELEMENTS * sizeof **x);
        if (wrong && bad.phase == LOSSYNET_PARAMETER) x[BAD_WORKER - first][at] = bad.value;
        assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
    }
    free(mine);
    free_vectors(x);
}

/* Over a link that loses nothing, and over one that might; or alone. */
static void run_case(struct lossynet_settings settings, int ranks, float value, bool told) {
    static int turn;
    struct rank rank[RANKS] = {{0}};
    settings.network.peer_timeout = 60;
    bad.value = value;
    bad.told = told;
    if (ranks > 1) {
        office_open(-1);
        run_ranks(ranks, &settings, turn++ % 2 ? mail_open : post_office_open, run_steps, rank,
                  NULL);
        office_close();
        for (int r = 0; r < ranks; r++) assert_int_equal(rank[r].status, LOSSYNET_OK);
    } else {
        struct lossynet_comm *comm = open_alone(&settings);
        run_steps(&rank[0], comm);
        lossynet_close(comm);
    }
}

static struct lossynet_settings settings_of(int wire, bool carry) {
    struct lossynet_settings settings = simple_settings(WORKERS, elements, BUCKETS, 0);
    settings.estimator = LOSSYNET_MEAN;
    settings.wire_dtype = (lossynet_wire_dtype)wire;
    settings.packet_bytes = settings.wire_dtype == LOSSYNET_INT4 ? 68 : 64;
    settings.error_feedback = carry;
    settings.acknowledge_later = true;
    return settings;
}

enum { VALUES = sizeof values / sizeof *values };

static void test_sent(void **state) {
    (void)state;
    bad.phase = LOSSYNET_GRADIENT;
    bad.owner = 3; /* in another rank than worker 1 */
    for (int wire = LOSSYNET_FLOAT32, i = 0; wire <= LOSSYNET_INT4; wire++)
        for (int carry = 0; carry < 2; carry++)
            for (int ranks = 2; ranks <= 4; ranks *= 2, i++)
                run_case(settings_of(wire, carry), ranks, values[(i + i / 4) % VALUES], true);
}

/* Injected loss takes it, and the residual does not keep it. */
static void test_lost(void **state) {
    (void)state;
    bad.phase = LOSSYNET_GRADIENT;
    bad.owner = 3;
    for (int wire = LOSSYNET_FLOAT32, i = 0; wire <= LOSSYNET_INT4; wire++)
        for (int ranks = 1; ranks <= 4; ranks *= 2, i++) {
            struct lossynet_settings settings = settings_of(wire, true);
            settings.loss.at = "1-3=1";
            bad.lost = true;
            run_case(settings, ranks, values[i % VALUES], true);
            bad.lost = false;
        }
}

static void test_within_a_rank(void **state) {
    (void)state;
    bad.phase = LOSSYNET_GRADIENT;
    bad.owner = 0;
    for (int i = 0; i < VALUES; i++)
        for (int ranks = 1; ranks <= 2; ranks++)
            run_case(settings_of(LOSSYNET_FLOAT32, i % 2), ranks, values[i], false);
    bad.owner = BAD_WORKER; /* its own */
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        run_case(settings_of(LOSSYNET_FLOAT32, true), ranks, values[ranks % 2], false);
}

static void test_parameters(void **state) {
    (void)state;
    bad.phase = LOSSYNET_PARAMETER;
    bad.owner = BAD_WORKER;
    for (int wire = LOSSYNET_FLOAT32; wire <= LOSSYNET_INT4; wire++)
        run_case(settings_of(wire, false), 2 + wire % 2 * 2, values[wire % VALUES], true);
}

/* A program that does not ask is told, once. */
static void test_not_asked(void **state) {
    (void)state;
    struct lossynet_settings settings = settings_of(LOSSYNET_FLOAT32, true);
    settings.loss.at = "1-3=1";
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(WORKERS, ELEMENTS);
    double mine[WORKERS] = {0}, all[WORKERS];
    bad.owner = 3;
    x[BAD_WORKER][element_of(comm)] = NAN;
    capture_begin();
    for (uint64_t step = 0; step < STEPS; step++) {
        assert_int_equal(lossynet_step_begin(comm, step), LOSSYNET_OK);
        assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
        assert_int_equal(lossynet_pulse(comm, mine, all, sizeof *mine), LOSSYNET_OK);
        memset(x[BAD_WORKER], 0, ELEMENTS * sizeof **x);
    }
    lossynet_close(comm);
    assert_message(capture_end(), "of the gradient of worker 1 is nan: expected finite numbers");
    free_vectors(x);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sent),          cmocka_unit_test(test_lost),
        cmocka_unit_test(test_within_a_rank), cmocka_unit_test(test_parameters),
        cmocka_unit_test(test_not_asked),
    };
    return cmocka_run_group_tests_name("numbers that are not finite", tests, NULL, NULL);
}
