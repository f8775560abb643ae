/* test_drift.c — compares the drift that the real broadcast causes with the formulas.
 *
 * The owners' values follow a random walk: its steps are independent, or follow an AR(1) process.
 * The variance and the correlations of the changes are known, so the formulas of drift.c predict
 * the drift without a free parameter. Measurements must be within 2%. Seeds are fixed. Takes 20 s.
 */
#include <omp.h>

#include "test/lossynet/test_lossynet.h"

/* ---- formulas ---- */

/* Of two workers one owns each element: all pairs are an owner and a worker. */
static double owner_drift(double p, double sigma2, const double *rho, int lags) {
    return lossynet_drift_pair(2, p, sigma2, rho, lags);
}

static void test_formulas(void **state) {
    (void)state;
    double none[1] = {0}, rho[LOSSYNET_LAGS];
    for (double p = 0.05; p < 0.95; p += 0.1) {
        for (int n = 2; n <= 64; n *= 2) {
            double pair = (1 - 2.0 / n) * 2 * p / (1 - p * p) + 2.0 / n * p / (1 - p);
            assert_close(lossynet_drift_pair(n, p, 3, none, 1), 3 * pair, 1e-9);
        }
        assert_close(lossynet_drift_paper(p, 3), 3 * 2 * p / (1 + p), 1e-9);
    }
    /* C(p) for rho_k = b^k */
    double p = 0.3, b = 0.8;
    for (int k = 0; k < LOSSYNET_LAGS; k++) rho[k] = pow(b, k + 1);
    assert_close(owner_drift(p, 1, rho, LOSSYNET_LAGS), p / (1 - p) * (1 + b * p) / (1 - b * p),
                 1e-9);
    /* the upper bound, for ever so many workers: 2p/(1-p)^2 */
    for (int k = 0; k < LOSSYNET_LAGS; k++) rho[k] = 1;
    assert_close(lossynet_drift_pair(1 << 30, p, 1, rho, LOSSYNET_LAGS),
                 2 * p / ((1 - p) * (1 - p)), 1e-7);
    assert_true(isinf(lossynet_drift_pair(8, 1, 1, rho, 1)));
    assert_close(lossynet_drift_pair(8, 0, 1, rho, 1), 0, 0);
    assert_close(lossynet_drift_pair(1, 0.5, 1, rho, 1), 0, 0);
}

/* The prototype's prediction as DESIGN quotes it; it had more lags than the four that are printed,
 * which matters at p = 0.4. */
static void test_design_table(void **state) {
    (void)state;
    const double rho[4] = {0.92, 0.82, 0.72, 0.62};
    const double rate[5] = {0.05, 0.1, 0.2, 0.3, 0.4};
    const double quoted[5] = {0.097, 0.215, 0.543, 1.06, 1.90};
    for (int i = 0; i < 5; i++) {
        double ours = lossynet_drift_pair(8, rate[i], 1, rho, 4);
        assert_close(ours, quoted[i], 0.02 * quoted[i]);
    }
}

/* E|A-B| and E A by summing over the ages, with a correlated walk: no algebra shared. */
static void test_formula_by_summing(void **state) {
    (void)state;
    double p = 0.4, b = 0.7, rho[LOSSYNET_LAGS], variance[200] = {0}, owner = 0, pair = 0;
    for (int k = 0; k < LOSSYNET_LAGS; k++) rho[k] = pow(b, k + 1);
    for (int m = 1; m < 200; m++) /* variance of m changes in a row */
        for (int i = 0; i < m; i++)
            for (int j = 0; j < m; j++) variance[m] += pow(b, abs(i - j));
    for (int i = 0; i < 100; i++) {
        double pi = (1 - p) * pow(p, i);
        owner += pi * variance[i];
        for (int j = 0; j < 100; j++) pair += pi * (1 - p) * pow(p, j) * variance[abs(i - j)];
    }
    int n = 5;
    assert_close(owner_drift(p, 1, rho, LOSSYNET_LAGS), owner, 1e-5);
    assert_close(lossynet_drift_pair(n, p, 1, rho, LOSSYNET_LAGS),
                 (1 - 2.0 / n) * pair + 2.0 / n * owner, 1e-5);
}

/* ---- walks ---- */

enum { ELEMENTS = 4096, WARM = FEWER_STEPS > 1 ? 50 : 100, STEPS = 2000 / FEWER_STEPS };

/* One more change of what each worker owns: AR(1) with variance 1. */
static void walk(const struct lossynet_comm *comm, float **x, float *change, int workers,
                 double beta, uint64_t step) {
    for (int w = 0; w < workers; w++) {
        size_t offset, count;
        lossynet_shard(comm, w, 0, &offset, &count);
        for (size_t e = offset; e < offset + count; e++) {
            double noise = random_unit(77, step, e);
            change[e] = step == 0 ? (float)noise
                                  : (float)(beta * change[e] + sqrt(1 - beta * beta) * noise);
            x[w][e] += change[e];
        }
    }
}

struct average {
    double pair, owner, expected_pair, expected_owner, age, sigma2;
};

static int rounds; /* of retransmission */

static struct average walk_in_groups(lossynet_wire_dtype wire_dtype, int workers, int group,
                                     double p, double beta, const char *model) {
    size_t elements = ELEMENTS;
    struct lossynet_settings settings = simple_settings(workers, &elements, 1, p);
    settings.group = group;
    settings.loss.model = model;
    settings.loss.rate[LOSSYNET_GRADIENT] = 0.77; /* must not matter */
    settings.drift_samples = ELEMENTS;
    settings.retransmission_rounds[LOSSYNET_PARAMETER] = rounds;
    settings.wire_dtype = wire_dtype;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(workers, elements), *change = (float *)calloc(elements, sizeof(float));
    struct average sum = {0};
    for (int v = 0; v < workers; v++) /* where bfloat16's last bit is 4, and a block's unit is 8 */
        for (size_t e = 0; wire_dtype != LOSSYNET_FLOAT32 && e < elements; e++)
            x[v][e] = wire_dtype == LOSSYNET_BF16 ? 1000 : 750;
    for (uint64_t step = 0; step < WARM + STEPS; step++) {
        struct lossynet_drift drift;
        walk(comm, x, change, workers, beta, step);
        lossynet_step_begin(comm, step);
        assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
        assert_int_equal(lossynet_drift_measure(comm, x, &drift), LOSSYNET_OK);
        if (step < WARM) continue;
        sum.pair += drift.pair / STEPS;
        sum.owner += drift.owner / STEPS;
        sum.expected_pair += drift.expected_pair / STEPS;
        sum.expected_owner += drift.expected_owner / STEPS;
        sum.age += drift.mean_age / STEPS;
        sum.sigma2 += drift.sigma2 / STEPS;
    }
    free(change);
    free_vectors(x);
    lossynet_close(comm);
    return sum;
}

static struct average walk_with(lossynet_wire_dtype wire_dtype, int workers, double p, double beta,
                                const char *model) {
    return walk_in_groups(wire_dtype, workers, 1, p, beta, model);
}

static struct average walk_and_measure(int workers, double p, double beta, const char *model) {
    return walk_with(LOSSYNET_FLOAT32, workers, p, beta, model);
}

static void within(const char *what, int workers, double p, double beta, double got, double want,
                   double relative) {
    if (!(fabs(got / want - 1) <= WIDER_BOUND * relative))
        fail_msg("%s, N %d, p %g, beta %g: %g, expected %g within %g%%", what, workers, p, beta,
                 got, want, 100 * relative);
}

/* Measured and expected are what the formulas say, for so many replicas. */
static void drift_is(int replicas, double p, double beta, const struct average *a, double pair,
                     double owner) {
    within("pair", replicas, p, beta, a->pair, pair, 0.02);
    within("owner", replicas, p, beta, a->owner, owner, 0.02);
    within("expected pair", replicas, p, beta, a->expected_pair, pair, 0.02);
    within("expected owner", replicas, p, beta, a->expected_owner, owner, 0.02);
    within("mean age", replicas, p, beta, a->age, p / (1 - p), 0.02);
}

static void walk_matches(int workers, double beta) {
    const double rates[4] = {0.05, 0.1, 0.2, 0.4};
    double rho[LOSSYNET_LAGS];
    for (int k = 0; k < LOSSYNET_LAGS; k++) rho[k] = pow(beta, k + 1);
    for (int i = 0; i < 4; i++) {
        double p = rates[i];
        struct average a = walk_and_measure(workers, p, beta, "bernoulli");
        double pair = lossynet_drift_pair(workers, p, ELEMENTS, rho, LOSSYNET_LAGS);
        double owner = owner_drift(p, ELEMENTS, rho, LOSSYNET_LAGS);
        print_message("N %d, AR(1) %.1f, p %.2f: pair/sigma2 %.4f, formula %.4f (%+.2f%%), with "
                      "measured sigma2 and rho %.4f; owner %.4f, formula %.4f; paper %.4f\n",
                      workers, beta, p, a.pair / ELEMENTS, pair / ELEMENTS,
                      100 * (a.pair / pair - 1), a.expected_pair / ELEMENTS, a.owner / ELEMENTS,
                      owner / ELEMENTS, lossynet_drift_paper(p, 1));
        within("sigma2", workers, p, beta, a.sigma2, ELEMENTS, 0.01);
        drift_is(workers, p, beta, &a, pair, owner);
    }
}

static void test_random_walk(void **state) {
    (void)state;
    walk_matches(8, 0);
}

static void test_correlated_walk(void **state) {
    (void)state;
    walk_matches(8, 0.9);
}

/* The owner makes up two thirds of the pairs. */
static void test_three_workers(void **state) {
    (void)state;
    walk_matches(3, 0.5);
}

/* Eight workers in groups of two: four replicas, of which each packet reaches three by itself. */
static void test_walk_in_groups(void **state) {
    (void)state;
    const int group = 2, groups = 4;
    const double p = 0.2, beta = 0.5;
    double rho[LOSSYNET_LAGS];
    for (int k = 0; k < LOSSYNET_LAGS; k++) rho[k] = pow(beta, k + 1);
    const struct average a = walk_in_groups(LOSSYNET_FLOAT32, 8, group, p, beta, "bernoulli");
    const double pair = lossynet_drift_pair(groups, p, ELEMENTS, rho, LOSSYNET_LAGS);
    const double owner = owner_drift(p, ELEMENTS, rho, LOSSYNET_LAGS);
    drift_is(groups, p, beta, &a, pair, owner);
}

/* A packet is stale with probability p and stays so with s: ages and drift as drift.c derives them,
 * E|A-B| here by summing over all pairs of ages. A link's packets share their fate, so that the
 * averages are over fewer events. */
static void walk_of_runs(const char *model, double lost, double p, double s) {
    const int n = 16;
    const double beta = 0.5;
    double pair = 0, owner = 0, variance[200] = {0};
    for (int m = 1; m < 200; m++) /* of a sum of m changes: one more, and its covariances */
        variance[m] = variance[m - 1] + 1 + 2 * beta * (1 - pow(beta, m - 1)) / (1 - beta);
    for (int i = 0; i < 200; i++) {
        double a = i == 0 ? 1 - p : p * (1 - s) * pow(s, i - 1);
        owner += a * variance[i];
        for (int j = 0; j < 200; j++)
            pair += a * (j == 0 ? 1 - p : p * (1 - s) * pow(s, j - 1)) * variance[abs(i - j)];
    }
    pair = (1 - 2.0 / n) * pair + 2.0 / n * owner;
    struct average a = walk_and_measure(n, lost, beta, model);
    print_message("%s: pair/sigma2 %.4f, by hand %.4f, expected %.4f; age %.3f of %.3f\n", model,
                  a.pair / ELEMENTS, pair, a.expected_pair / ELEMENTS, a.age, p / (1 - s));
    within("mean age", n, p, beta, a.age, p / (1 - s), 0.03);
    within("pair", n, p, beta, a.pair, ELEMENTS * pair, 0.03);
    within("owner", n, p, beta, a.owner, ELEMENTS * owner, 0.03);
    within("expected pair", n, p, beta, a.expected_pair, ELEMENTS * pair, 0.02);
    within("expected owner", n, p, beta, a.expected_owner, ELEMENTS * owner, 0.02);
}

/* Outages of whole steps; and bursts that reach into next steps, since a link has 16 packets. */
static void test_outages_and_bursts(void **state) {
    (void)state;
    const double s = 0.2 + 0.8 * pow(1 - 1 / (32 * 0.8), 16);
    walk_of_runs("outage:4", 0.2, 0.2, 1 - 1.0 / 4);
    walk_of_runs("burst:32", 0.2, 0.2, s);
    rounds = 1;
    walk_of_runs("burst:32", 0.2, 0.2 * 0.2, s * s);
    rounds = 0;
}

/* What is sent is rounded, and a step is a fraction of the last bit that is kept: most elements do
 * not change in a step, and the others by much. The formulas hold with the sigma^2 and rho of
 * rounded values, which are not those of the walk. */
static void test_rounded_walk(void **state) {
    (void)state;
    for (int i = 0; i < 5; i++) {
        const double p = i == 0 ? 0.05 : i % 3 == 1 ? 0.2 : 0.4, beta = i == 1 ? 0.9 : 0;
        const lossynet_wire_dtype wire_dtype = i < 3 ? LOSSYNET_BF16 : LOSSYNET_INT8;
        struct average a = walk_with(wire_dtype, 8, p, beta, "bernoulli");
        print_message("rounded, AR(1) %.1f, p %.2f: sigma2 %.4f of the walk's, pair/sigma2 %.4f, "
                      "expected %.4f\n",
                      beta, p, a.sigma2 / ELEMENTS, a.pair / a.sigma2, a.expected_pair / a.sigma2);
        within("pair", 8, p, beta, a.pair, a.expected_pair, 0.02);
        within("owner", 8, p, beta, a.owner, a.expected_owner, 0.02);
        assert_true(a.sigma2 > 1.5 * ELEMENTS);
    }
}

/* ---- 10,000 steps; 2,500 with sanitizers ---- */

enum { LONG_ELEMENTS = 1024, LONG_STEPS = FEWER_STEPS > 1 ? 1500 : 10000, LONG_WORKERS = 4 };

/* Mean drift of the first and of the last thousand steps. naive: changes are broadcast, and each
 * worker adds those that arrive to its own replica. */
static void long_run(bool naive, double *first, double *last) {
    size_t elements = LONG_ELEMENTS;
    struct lossynet_settings settings = simple_settings(LONG_WORKERS, &elements, 1, 0.1);
    settings.drift_samples = 512;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(LONG_WORKERS, elements), **replica = x;
    float *change = (float *)calloc(elements, sizeof(float));
    if (naive) replica = take_vectors(LONG_WORKERS, elements);
    *first = *last = 0;
    for (uint64_t step = 0; step < LONG_STEPS; step++) {
        if (naive)
            for (int v = 0; v < LONG_WORKERS; v++) memset(x[v], 0, elements * sizeof(float));
        walk(comm, x, change, LONG_WORKERS, 0, step);
        lossynet_step_begin(comm, step);
        assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
        for (int v = 0; naive && v < LONG_WORKERS; v++) {
            size_t cursor = 0, offset, count;
            while (lossynet_next_fresh(comm, v, &cursor, &offset, &count))
                for (size_t e = offset; e < offset + count; e++) replica[v][e] += x[v][e];
        }
        struct lossynet_drift drift;
        assert_int_equal(lossynet_drift_measure(comm, replica, &drift), LOSSYNET_OK);
        if (step < 1000) *first += drift.pair / 1000;
        if (step >= LONG_STEPS - 1000) *last += drift.pair / 1000;
    }
    if (naive) free_vectors(replica);
    free_vectors(x);
    free(change);
    lossynet_close(comm);
}

static void test_lossy_is_flat(void **state) {
    (void)state;
    double first, last;
    long_run(false, &first, &last);
    print_message("lossy, drift of the first 1000 steps: %.1f, the last: %.1f\n", first, last);
    within("last thousand steps", LONG_WORKERS, 0.1, 0, last, first, 0.05);
}

static void test_naive_grows(void **state) {
    (void)state;
    double first, last;
    long_run(true, &first, &last);
    print_message("naive, drift of the first 1000 steps: %.1f, the last: %.1f\n", first, last);
    /* Lost changes add up like a random walk: 2p(1-p) sigma2 per step between two who don't own it,
     * p sigma2 with the owner; the mean steps are in the middle of the thousands. */
    double per_step = LONG_ELEMENTS * (0.5 * 2 * 0.1 * 0.9 + 0.5 * 0.1);
    within("first thousand steps", LONG_WORKERS, 0.1, 0, first, 500.5 * per_step, 0.1);
    const double middle = LONG_STEPS - 499.5;
    within("last thousand steps", LONG_WORKERS, 0.1, 0, last, middle * per_step, 0.1);
}

/* ---- edges ---- */

static void test_nothing_to_measure(void **state) {
    (void)state;
    size_t elements = 100;
    struct lossynet_drift drift, zero;
    memset(&zero, 0, sizeof zero);
    for (int n = 1; n <= 2; n++) { /* one worker; no samples */
        struct lossynet_settings settings = simple_settings(n, &elements, 1, 0.5);
        settings.drift_samples = n == 1 ? 50 : 0;
        struct lossynet_comm *comm = open_alone(&settings);
        float **x = take_vectors(n, elements);
        memset(&drift, 7, sizeof drift);
        assert_int_equal(lossynet_step_begin(comm, 0), LOSSYNET_OK);
        assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
        assert_int_equal(lossynet_drift_measure(comm, x, &drift), LOSSYNET_OK);
        assert_memory_equal(&drift, &zero, offsetof(struct lossynet_drift, max_age));
        assert_int_equal(drift.max_age, 0);
        free_vectors(x);
        lossynet_close(comm);
    }
}

/* The first call has no change to measure, the second exactly one; and a lag counts from when there
 * are changes that far apart. */
static void test_first_changes(void **state) {
    (void)state;
    size_t elements = 64;
    struct lossynet_settings settings = simple_settings(2, &elements, 1, 0);
    settings.drift_samples = 64;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(2, elements), value = 1000;
    const float change[4] = {0, 2, -1, 3};
    const double sigma2[4] = {0, 4, 1, 9}, lag1[4] = {0, 0, -2, -3}, lag2[4] = {0, 0, 0, 6};
    for (uint64_t step = 0; step < 4; step++) {
        value += change[step];
        for (size_t e = 0; e < elements; e++) x[0][e] = x[1][e] = value;
        struct lossynet_drift drift;
        lossynet_step_begin(comm, step);
        lossynet_broadcast(comm, x, false);
        assert_int_equal(lossynet_drift_measure(comm, x, &drift), LOSSYNET_OK);
        assert_close(drift.sigma2, 64 * sigma2[step], 1e-6);
        assert_close(drift.rho[0] * drift.sigma2, 64 * lag1[step], 1e-6);
        assert_close(drift.rho[1] * drift.sigma2, 64 * lag2[step], 1e-6);
        assert_close(drift.rho[2], 0, 0);
        assert_close(drift.pair, 0, 0);
    }
    free_vectors(x);
    lossynet_close(comm);
}

/* More samples than elements are all elements; every element once. */
static void test_sample(void **state) {
    (void)state;
    const size_t elements[2] = {77, 1000};
    struct lossynet_settings settings = simple_settings(3, elements, 2, 0);
    settings.drift_samples = 100000;
    struct lossynet_comm *comm = open_alone(&settings);
    assert_int_equal(comm->drift.samples, 1077);
    for (size_t i = 0; i < 1077; i++) {
        assert_int_equal(comm->drift.element[i], i);
        size_t offset, count;
        lossynet_shard(comm, comm->drift.owner[i], i >= 77, &offset, &count);
        assert_true(i >= offset && i < offset + count);
    }
    lossynet_close(comm);

    settings.drift_samples = 100; /* of 1077: each in its own part, ascending */
    comm = open_alone(&settings);
    for (size_t i = 0; i < 100; i++) {
        size_t e = comm->drift.element[i];
        assert_true(e >= (size_t)((double)i * 10.77) && e < (size_t)((double)(i + 1) * 10.77));
    }
    lossynet_close(comm);
}

/* A sample of the elements estimates the drift of all. */
static void test_sample_scales(void **state) {
    (void)state;
    size_t elements = 4000;
    double pair[2] = {0}, sigma2[2] = {0};
    for (int all = 0; all < 2; all++) {
        struct lossynet_settings settings = simple_settings(4, &elements, 1, 0.2);
        settings.drift_samples = all ? 4000 : 500;
        struct lossynet_comm *comm = open_alone(&settings);
        float **x = take_vectors(4, elements), *change = (float *)calloc(elements, sizeof(float));
        for (uint64_t step = 0; step < 400; step++) {
            struct lossynet_drift drift;
            walk(comm, x, change, 4, 0, step);
            lossynet_step_begin(comm, step);
            lossynet_broadcast(comm, x, false);
            assert_int_equal(lossynet_drift_measure(comm, x, &drift), LOSSYNET_OK);
            pair[all] += drift.pair / 400;
            sigma2[all] += drift.sigma2 / 400;
        }
        free(change);
        free_vectors(x);
        lossynet_close(comm);
    }
    within("sampled pair", 4, 0.2, 0, pair[0], pair[1], 0.03);
    within("sampled sigma2", 4, 0.2, 0, sigma2[0], sigma2[1], 0.02);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formulas),
        cmocka_unit_test(test_design_table),
        cmocka_unit_test(test_formula_by_summing),
        cmocka_unit_test(test_random_walk),
        cmocka_unit_test(test_correlated_walk),
        cmocka_unit_test(test_three_workers),
        cmocka_unit_test(test_walk_in_groups),
        cmocka_unit_test(test_outages_and_bursts),
        cmocka_unit_test(test_rounded_walk),
        cmocka_unit_test(test_lossy_is_flat),
        cmocka_unit_test(test_naive_grows),
        cmocka_unit_test(test_nothing_to_measure),
        cmocka_unit_test(test_sample),
        cmocka_unit_test(test_sample_scales),
        cmocka_unit_test(test_first_changes),
    };
    omp_set_num_threads(1); /* the steps are many and small: two would mostly wait for each other */
    return cmocka_run_group_tests_name("drift", tests, NULL, NULL);
}
