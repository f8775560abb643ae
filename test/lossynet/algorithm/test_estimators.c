/* test_estimators.c — compares the estimators with their closed forms, by Monte Carlo over
 * arrival masks with lossynet_reduce itself.
 *
 * The results show the weights directly: packets have 16 elements, there are N <= 16 workers, and
 * in each packet worker i's vector is 1 at place i and 0 elsewhere. So the reduced packet contains
 * w_0 ... w_{N-1}. Place 15 (if N < 16) has a gradient that differs between workers.
 *
 * Expected values: S ~ binomial(N-1, q), and by symmetry every moment of the weights is a sum over
 * S. If DESIGN gives a closed form, it is compared as well. Tolerances are five standard errors,
 * from the exact variance (for the mean) and the fourth moment (for the variance). Seeds are
 * fixed.
 */
#include "test/lossynet/test_lossynet.h"

enum { PLACES = 16, PACKETS = 2048, STEPS = 50 };

static double gradient_of(int worker) {
    return 1.0 + 0.7 * worker - 0.05 * worker * worker; /* everybody's own data */
}

/* ---- exact moments ---- */

struct moments {                           /* of own and of one other worker's weight */
    double own, other;                     /* E */
    double own2, other2, cross, own_other; /* E w_o^2, w_i^2, w_i w_j, w_o w_i */
    double own4, other4;                   /* E (w - E w)^4 */
};

static double binomial(int n, int k, double q) {
    return exp(lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) + k * log(q) +
               (n - k) * log1p(-q));
}

/* The weights of the owner and of those who arrived, when s others did. */
static void weights(lossynet_estimator estimator, int workers, int s, double *own, double *other) {
    *own = *other = 1.0 / workers;
    if (estimator == LOSSYNET_MEAN) *own = *other = 1.0 / (1 + s);
    if (estimator == LOSSYNET_BALANCED && s == 0) *own = 1;
    if (estimator == LOSSYNET_BALANCED && s > 0) *other = (workers - 1.0) / ((double)workers * s);
}

static struct moments exact(lossynet_estimator estimator, int workers, double p) {
    struct moments m = {0};
    int others = workers - 1;
    double own, other;
    for (int s = 0; s <= others; s++) {
        double chance = binomial(others, s, 1 - p);
        double one = (double)s / others; /* P(a given other arrived | s) */
        double two = others > 1 ? one * (s - 1) / (others - 1) : 0;
        weights(estimator, workers, s, &own, &other);
        m.own += chance * own;
        m.own2 += chance * own * own;
        m.other += chance * one * other;
        m.other2 += chance * one * other * other;
        m.own_other += chance * one * own * other;
        m.cross += chance * two * other * other;
    }
    for (int s = 0; s <= others; s++) {
        double chance = binomial(others, s, 1 - p), one = (double)s / others;
        weights(estimator, workers, s, &own, &other);
        m.own4 += chance * pow(own - m.own, 4);
        m.other4 += chance * (one * pow(other - m.other, 4) + (1 - one) * pow(m.other, 4));
    }
    return m;
}

/* E and Var of sum_i w_i g_i for this owner. */
static void exact_estimate(const struct moments *m, int workers, int owner, double *mean,
                           double *variance) {
    double first = 0, second = 0;
    for (int i = 0; i < workers; i++) {
        double gi = gradient_of(i);
        first += gi * (i == owner ? m->own : m->other);
        for (int j = 0; j < workers; j++) {
            double e = i == j ? (i == owner ? m->own2 : m->other2)
                              : (i == owner || j == owner ? m->own_other : m->cross);
            second += gi * gradient_of(j) * e;
        }
    }
    *mean = first;
    *variance = second - first * first;
}

/* ---- samples ---- */

struct sample {
    double n, sum, sum2, sum4; /* of deviations from the exact mean */
};

static void add(struct sample *sample, double deviation) {
    double d2 = deviation * deviation;
    sample->n++;
    sample->sum += deviation;
    sample->sum2 += d2;
    sample->sum4 += d2 * d2;
}

/* fourth: exact central moment, 0 if unknown */
static void compare(const char *what, const char *estimator, int workers, double p,
                    const struct sample *sample, double mean, double variance, double fourth) {
    double rounding = 1e-6 * (fabs(mean) + 1e-3);
    double mean_error = fabs(sample->sum / sample->n);
    double mean_bound = 5 * sqrt(fmax(variance, 0) / sample->n) + rounding;
    double second = sample->sum2 / sample->n;
    fourth = fmax(fourth, sample->sum4 / sample->n); /* a rare event may not be in the sample */
    double spread_error = fabs(second - variance);
    double spread_bound = 5 * sqrt(fmax(fourth - second * second, 0) / sample->n) +
                          2e-6 * fabs(variance) + rounding * rounding;
    if (!(mean_error <= mean_bound) || !(spread_error <= spread_bound))
        fail_msg("%s, %s, N %d, p %g: mean off by %g (bound %g), variance %g, expected %g (bound "
                 "%g)",
                 estimator, what, workers, p, mean_error, mean_bound, second, variance,
                 spread_bound);
}

static void fill(float **vectors, int workers, size_t elements) {
    for (int i = 0; i < workers; i++)
        for (size_t e = 0; e < elements; e++) {
            int place = (int)(e % PLACES);
            vectors[i][e] = place < workers ? (float)(place == i) : 0;
            if (place == PLACES - 1 && workers < PLACES) vectors[i][e] = (float)gradient_of(i);
        }
}

/* ---- Monte Carlo ---- */

struct outcome {
    struct sample own, other, estimate; /* estimate: packets of owner 0 */
};

static struct outcome simulate(lossynet_estimator estimator, int workers, double p,
                               const struct moments *m, double estimate) {
    size_t elements = PACKETS * PLACES;
    struct lossynet_settings settings = simple_settings(workers, &elements, 1, p);
    settings.estimator = estimator;
    settings.loss.rate[LOSSYNET_PARAMETER] = 0.9; /* not the phase under test */
    struct lossynet_comm *comm = open_alone(&settings);
    float **vectors = take_vectors(workers, elements);
    struct outcome out = {0};
    for (uint64_t step = 0; step < STEPS; step++) {
        fill(vectors, workers, elements);
        lossynet_step_begin(comm, step);
        assert_int_equal(lossynet_reduce(comm, vectors, false), LOSSYNET_OK);
        for (int o = 0; o < workers; o++) {
            size_t offset, count;
            lossynet_shard(comm, o, 0, &offset, &count);
            for (size_t e = offset; e < offset + count; e += PLACES) {
                add(&out.own, vectors[o][e + (size_t)o] - m->own);
                add(&out.other, vectors[o][e + (size_t)((o + 1) % workers)] - m->other);
                if (o == 0 && workers < PLACES)
                    add(&out.estimate, vectors[o][e + PLACES - 1] - estimate);
            }
        }
    }
    free_vectors(vectors);
    lossynet_close(comm);
    return out;
}

static const int sizes[] = {2, 3, 8, 16};
static const double rates[] = {0.05, 0.1, 0.4, 0.8};

static void moments_match(lossynet_estimator estimator) {
    const char *name = lossynet_estimator_name(estimator);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (size_t j = 0; j < sizeof rates / sizeof *rates; j++) {
            int n = sizes[i];
            double p = rates[j], mean, variance;
            struct moments m = exact(estimator, n, p);
            exact_estimate(&m, n, 0, &mean, &variance);
            struct outcome out = simulate(estimator, n, p, &m, mean);
            compare("owner's weight", name, n, p, &out.own, m.own, m.own2 - m.own * m.own, m.own4);
            compare("another's weight", name, n, p, &out.other, m.other,
                    m.other2 - m.other * m.other, m.other4);
            if (n < PLACES) compare("estimate", name, n, p, &out.estimate, mean, variance, 0);
            if (p == 0.1 && n == 8)
                print_message("%-9s N 8, p 0.1: E[w_o] %.5f (exact %.5f), E[w_i] %.5f (%.5f), "
                              "Var[w_o] %.3e (%.3e), Var[w_i] %.3e (%.3e)\n",
                              name, m.own + out.own.sum / out.own.n, m.own,
                              m.other + out.other.sum / out.other.n, m.other,
                              out.own.sum2 / out.own.n, m.own2 - m.own * m.own,
                              out.other.sum2 / out.other.n, m.other2 - m.other * m.other);
        }
    }
}

static void test_mean(void **state) {
    (void)state;
    moments_match(LOSSYNET_MEAN);
}

static void test_balanced(void **state) {
    (void)state;
    moments_match(LOSSYNET_BALANCED);
}

static void test_zero(void **state) {
    (void)state;
    moments_match(LOSSYNET_ZERO);
}

/* The sums over S are the closed forms that DESIGN and gradient.c state. */
static void test_closed_forms(void **state) {
    (void)state;
    for (int n = 2; n <= 64; n += 7) {
        for (double p = 0.05; p < 1; p += 0.15) {
            double q = 1 - p, tiny = 1e-10;
            struct moments mean = exact(LOSSYNET_MEAN, n, p);
            assert_close(mean.own, (1 - pow(p, n)) / (n * q), tiny);
            assert_close(mean.other, (1 - mean.own) / (n - 1), tiny);
            struct moments balanced = exact(LOSSYNET_BALANCED, n, p);
            assert_close(balanced.own, 1.0 / n + (n - 1.0) / n * pow(p, n - 1), tiny);
            assert_close(balanced.other, (1 - balanced.own) / (n - 1), tiny);
            struct moments zero = exact(LOSSYNET_ZERO, n, p);
            assert_close(zero.other, q / n, tiny);
            assert_close(zero.other2 - zero.other * zero.other, p * q / (n * n), tiny);
        }
    }
}

/* The Monte Carlo is sharp enough to tell the estimators apart: each one's samples are rejected
 * by any other's expectation. */
static void test_sharpness(void **state) {
    (void)state;
    int n = 8;
    double p = 0.1;
    for (int truth = LOSSYNET_MEAN; truth <= LOSSYNET_ZERO; truth++) {
        for (int claim = LOSSYNET_MEAN; claim <= LOSSYNET_ZERO; claim++) {
            struct moments a = exact((lossynet_estimator)truth, n, p);
            struct moments b = exact((lossynet_estimator)claim, n, p);
            double samples = (double)PACKETS * STEPS;
            double own_variance = a.own2 - a.own * a.own, variance = a.other2 - a.other * a.other;
            bool own = fabs(a.own - b.own) > 10 * sqrt(fmax(own_variance, 0) / samples) + 1e-5;
            bool other = fabs(a.other - b.other) > 10 * sqrt(variance / samples) + 1e-5;
            double spread = b.other2 - b.other * b.other;
            bool wider = fabs(variance - spread) > 0.05 * variance;
            assert_int_equal(own || other || wider, truth != claim);
        }
    }
}

/* ---- exact cases ---- */

/* Nothing lost: the plain average in order of workers, bit for bit, whatever the estimator, by loss
 * rate 0 as by `lossless`. */
static void test_nothing_lost(void **state) {
    (void)state;
    const size_t elements[3] = {1000, 7, 333};
    size_t all = 1340;
    for (int estimator = LOSSYNET_MEAN; estimator <= LOSSYNET_ZERO; estimator++) {
        for (int n = 1; n <= 13; n += 3) {
            for (int lossless = 0; lossless < 2; lossless++) {
                struct lossynet_settings settings =
                    simple_settings(n, elements, 3, lossless ? 0.7 : 0);
                settings.estimator = (lossynet_estimator)estimator;
                struct lossynet_comm *comm = open_alone(&settings);
                float **x = take_vectors(n, all), **before = take_vectors(n, all);
                for (uint64_t step = 0; step < 3; step++) {
                    for (int v = 0; v < n; v++)
                        for (size_t e = 0; e < all; e++)
                            x[v][e] = before[v][e] = (float)random_unit(step, (uint64_t)v, e);
                    lossynet_step_begin(comm, step);
                    assert_int_equal(lossynet_reduce(comm, x, lossless), LOSSYNET_OK);
                    for (int v = 0; v < n; v++) {
                        for (int b = 0; b < 3; b++) {
                            size_t offset, count;
                            lossynet_shard(comm, v, b, &offset, &count);
                            for (size_t e = offset; e < offset + count; e++) {
                                float sum = 0;
                                for (int s = 0; s < n; s++) sum += (float)(1.0 / n) * before[s][e];
                                if (n == 1) sum = before[0][e];
                                assert_memory_equal(&x[v][e], &sum, sizeof sum);
                                before[v][e] = sum;
                            }
                        }
                        assert_memory_equal(x[v], before[v], all * sizeof(float)); /* rest as is */
                    }
                }
                free_vectors(x);
                free_vectors(before);
                lossynet_close(comm);
            }
        }
    }
}

/* Everything lost: the owner's own gradient for `mean` and `balanced`, 1/N of it for `zero`. */
static void test_everything_lost(void **state) {
    (void)state;
    size_t elements = 999;
    for (int estimator = LOSSYNET_MEAN; estimator <= LOSSYNET_ZERO; estimator++) {
        struct lossynet_settings settings = simple_settings(4, &elements, 1, 1);
        settings.estimator = (lossynet_estimator)estimator;
        struct lossynet_comm *comm = open_alone(&settings);
        float **x = take_vectors(4, elements), own = estimator <= LOSSYNET_BALANCED ? 1 : 0.25f;
        for (uint64_t step = 0; step < 3; step++) {
            for (int v = 0; v < 4; v++)
                for (size_t e = 0; e < elements; e++) x[v][e] = (float)(v + 1);
            lossynet_step_begin(comm, step);
            assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
            for (int v = 0; v < 4; v++) {
                size_t offset, count;
                lossynet_shard(comm, v, 0, &offset, &count);
                for (size_t e = offset; e < offset + count; e++)
                    assert_true(x[v][e] == own * (float)(v + 1));
            }
        }
        free_vectors(x);
        lossynet_close(comm);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_closed_forms),
        cmocka_unit_test(test_sharpness),
        cmocka_unit_test(test_mean),
        cmocka_unit_test(test_balanced),
        cmocka_unit_test(test_zero),
        cmocka_unit_test(test_nothing_lost),
        cmocka_unit_test(test_everything_lost),
    };
    return cmocka_run_group_tests_name("estimators", tests, NULL, NULL);
}
