/* test_lead.c — tests the lead of lead.c: the mean replica equals the model, however packets are
 * lost.
 *
 * The owners' values follow a random walk as in test_drift.c, with changes that follow an AR(1)
 * process (beta = 1: the change is constant). Owners broadcast values that are ahead of theirs by
 * the lead of lossynet_lead. Seeds are fixed. Takes 20 s.
 */
#include <omp.h>

#include "test/lossynet/test_lossynet.h"

enum { ELEMENTS = 4096, WARM = FEWER_STEPS > 1 ? 50 : 200, STEPS = 1000 / FEWER_STEPS, MOST = 16 };

struct walk {
    int workers;
    double p, beta, lead; /* lead < 0: measured */
    const char *model, *at;
    lossynet_wire_dtype wire_dtype;
    bool carry;
    double start; /* the owners' values before the first step are about as large */
};

struct average {
    double lag, lead, pair, expected_pair, expected_owner, owner;
    double
        gradients_behind; /* the mean gradient's point of evaluation, in steps behind the model */
};

/* The point of the model at which gradients were computed: a worker's gradient is its replica. */
static double gradients_behind(struct lossynet_comm *comm, float **x, float **g,
                               const float *change, int workers) {
    double along = 0, squares = 0;
    for (int w = 0; w < workers; w++) memcpy(g[w], x[w], ELEMENTS * sizeof(float));
    assert_int_equal(lossynet_reduce(comm, g, false), LOSSYNET_OK);
    for (int w = 0; w < workers; w++) {
        size_t offset, count;
        lossynet_shard(comm, w, 0, &offset, &count);
        for (size_t e = offset; e < offset + count; e++) {
            along += ((double)x[w][e] - (double)g[w][e]) * (double)change[e];
            squares += (double)change[e] * (double)change[e];
        }
    }
    return squares > 0 ? along / squares : 0;
}

/* One more change of every element, and what owners send of it. */
static void step_owners(const struct lossynet_comm *comm, const struct walk *k, float **x,
                        float **ahead, float *change, uint64_t step, double lead) {
    for (int w = 0; w < k->workers; w++) {
        size_t offset, count;
        lossynet_shard(comm, w, 0, &offset, &count);
        for (size_t e = offset; e < offset + count; e++) {
            const double noise = random_unit(77, step, e);
            change[e] =
                (float)(step == 0 ? noise
                                  : k->beta * change[e] + sqrt(1 - k->beta * k->beta) * noise);
            if (step == 0) x[w][e] = (float)(k->start * random_unit(78, 0, e));
            x[w][e] += change[e];
            ahead[w][e - offset] = x[w][e] + (float)lead * change[e];
        }
    }
}

static struct average average_of(const struct walk *k) {
    size_t elements = ELEMENTS;
    struct lossynet_settings settings = simple_settings(k->workers, &elements, 1, k->p);
    if (k->model) settings.loss.model = k->model;
    settings.loss.at = k->at;
    settings.drift_samples = ELEMENTS;
    settings.wire_dtype = k->wire_dtype;
    settings.lead = true;
    settings.estimator = LOSSYNET_MEAN;
    settings.error_feedback = k->carry;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(k->workers, elements), **ahead = take_vectors(k->workers, elements);
    float **g = take_vectors(k->workers, elements);
    float *change = (float *)calloc(elements, sizeof(float));
    struct average sum = {0};
    for (uint64_t step = 0; step < WARM + STEPS; step++) {
        struct lossynet_drift drift;
        lossynet_step_begin(comm, step);
        const double behind = gradients_behind(comm, x, g, change, k->workers);
        const double lead = k->lead < 0 ? lossynet_lead(comm) : k->lead;
        step_owners(comm, k, x, ahead, change, step, lead);
        lossynet_broadcast_ahead(comm, (const float *const *)ahead, lead);
        assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
        assert_int_equal(lossynet_drift_measure(comm, x, &drift), LOSSYNET_OK);
        if (step < WARM) continue;
        sum.lag += drift.lag / STEPS;
        sum.lead += drift.lead / STEPS;
        sum.pair += drift.pair / STEPS;
        sum.owner += drift.owner / STEPS;
        sum.expected_pair += drift.expected_pair / STEPS;
        sum.expected_owner += drift.expected_owner / STEPS;
        sum.gradients_behind += behind / STEPS;
    }
    free(change);
    free_vectors(g);
    free_vectors(ahead);
    free_vectors(x);
    lossynet_close(comm);
    return sum;
}

static void within(const char *what, const struct walk *k, double got, double want, double bound) {
    if (!(fabs(got - want) <= WIDER_BOUND * bound))
        fail_msg("%s, N %d, p %g, beta %g, lead %g, %s: %g, expected %g within %g", what,
                 k->workers, k->p, k->beta, k->lead, k->model ? k->model : "bernoulli", got, want,
                 bound);
}

/* ---- independent losses ---- */

/* Without a lead: of AR(1) changes, (N-1)/N sum_j p^(j+1) beta^j. With a lead l, less
 * (N-1)/N l (1-p) sum_j p^j beta^j. */
static double lag_by_hand(const struct walk *k) {
    const double others = (k->workers - 1.0) / k->workers;
    return others * (k->p - k->lead * (1 - k->p)) / (1 - k->p * k->beta);
}

static void test_lag_of_fixed_leads(void **state) {
    (void)state;
    for (int i = 0; i < 8; i++) {
        const struct walk k = {.workers = i % 2 ? 3 : 8,
                               .p = i < 4 ? 0.1 : 0.4,
                               .beta = i % 4 < 2 ? 0.9 : 0.3,
                               .lead = i % 4 == 3 ? 0 : 0.25 * i};
        const struct average a = average_of(&k);
        within("lag", &k, a.lag, lag_by_hand(&k), 0.02 * fmax(1, fabs(lag_by_hand(&k))));
        within("pair", &k, a.pair / a.expected_pair, 1, 0.02);
        within("owner", &k, a.owner / a.expected_owner, 1, 0.02);
    }
}

static void test_measured_lead(void **state) {
    (void)state;
    const double rates[3] = {0.05, 0.2, 0.4}, betas[3] = {0, 0.9, 0.5};
    for (int i = 0; i < 3; i++) {
        for (int workers = 3; workers <= 8; workers += 5) {
            const struct walk k = {.workers = workers, .p = rates[i], .beta = betas[i], .lead = -1};
            const struct average a = average_of(&k);
            const double lead = k.p / (1 - k.p);
            print_message(
                "N %d, p %.2f, AR(1) %.1f: lead %.4f of %.4f, lag %.4f, drift %.4f of the "
                "formula\n",
                workers, k.p, k.beta, a.lead, lead, a.lag, a.pair / a.expected_pair);
            within("lead", &k, a.lead, lead, 0.02 * lead);
            within("lag", &k, a.lag, 0, 0.005);
            within("pair", &k, a.pair / a.expected_pair, 1, 0.02);
            within("owner", &k, a.owner / a.expected_owner, 1, 0.02);
        }
    }
}

/* What is sent is rounded after the lead was added. In the first two walks a change is a fraction of
 * what rounding keeps; in the third a lead often makes the largest value of a block need a larger
 * scale. The drift is still what the changes of what was sent let expect. */
static void test_rounded_leads(void **state) {
    (void)state;
    const struct walk walks[] = {
        {8, 0.2, 0.9, .lead = -1, .wire_dtype = LOSSYNET_BF16, .start = 1000},
        {8, 0.4, 0.3, .lead = -1, .wire_dtype = LOSSYNET_INT8, .start = 1000},
        {8, 0.4, 0.3, .lead = 1, .wire_dtype = LOSSYNET_INT6, .start = 30},
    };
    for (size_t i = 0; i < sizeof walks / sizeof *walks; i++) {
        const struct walk *k = &walks[i];
        const struct average a = average_of(k);
        print_message("walk %zu, p %.2f: drift %.4f and %.4f of the formula\n", i, k->p,
                      a.pair / a.expected_pair, a.owner / a.expected_owner);
        within("pair", k, a.pair / a.expected_pair, 1, 0.02);
        within("owner", k, a.owner / a.expected_owner, 1, 0.02);
    }
}

/* ---- other losses ---- */

static void test_lag_of_other_losses(void **state) {
    (void)state;
    const struct walk walks[] = {
        {.workers = 8, .p = 0.2, .beta = 0.9, .lead = -1, .model = "burst:8"},
        {.workers = MOST, .p = 0.2, .beta = 0.9, .lead = -1, .model = "outage:4"},
        {.workers = MOST, .p = 0.2, .beta = 0.5, .lead = -1, .model = "outage:4"},
        {.workers = 8, .p = 0.1, .beta = 0.9, .lead = -1, .at = "3=0.5,2-1=0.7"},
        {.workers = 8, .p = 0.2, .beta = 0.9, .lead = -1, .wire_dtype = LOSSYNET_BF16},
    };
    for (size_t i = 0; i < sizeof walks / sizeof *walks; i++) {
        const struct average a = average_of(&walks[i]);
        print_message("%s %s: lead %.4f, lag %.4f\n", walks[i].model ? walks[i].model : "bernoulli",
                      walks[i].at ? walks[i].at : "", a.lead, a.lag);
        within("lag", &walks[i], a.lag, 0, 0.02);
        assert_true(a.lead > 0.1);
    }
}

/* ---- gradients ---- */

/* Where the model moves evenly, gradients are computed behind it by the mean age of replicas. Those
 * that are carried are late as well, by nearly p/(1-p): in steps in which much that is late
 * arrives, each gradient counts less. */
static void test_point_of_evaluation(void **state) {
    (void)state;
    for (int carry = 0; carry < 2; carry++) {
        struct walk k = {.workers = 8, .p = 0.2, .beta = 1, .carry = carry};
        const double late = 7.0 / 8 * 0.25 * (carry ? 2 : 1);
        struct average a = average_of(&k);
        /* what is carried is bfloat16, rounded at random */
        within("gradients behind, no lead", &k, a.gradients_behind, late, carry ? 0.08 : 0.01);
        k.lead = -1;
        a = average_of(&k);
        print_message(
            "error feedback %d: gradients behind by %.4f steps, without lead %.4f; lead %.4f\n",
            carry, a.gradients_behind, late, a.lead);
        within("gradients behind", &k, a.gradients_behind, 0, 0.02);
        within("lead", &k, a.lead, carry ? 0.47 : 0.25, 0.02);
    }
}

/* ---- edges ---- */

static void test_nothing_lost_leads_nowhere(void **state) {
    (void)state;
    const struct walk k = {.workers = 4, .p = 0, .beta = 0.9, .lead = -1};
    const struct average a = average_of(&k);
    within("lead", &k, a.lead, 0, 0);
    within("lag", &k, a.lag, 0, 0);
}

/* Ages are gathered without samples, too; correlations are then taken for 1. */
static void test_without_samples(void **state) {
    (void)state;
    size_t elements = ELEMENTS;
    struct lossynet_settings settings = simple_settings(8, &elements, 1, 0.3);
    settings.lead = true;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(8, elements);
    for (uint64_t step = 0; step < 100; step++) {
        struct lossynet_drift drift;
        lossynet_step_begin(comm, step);
        assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
        assert_int_equal(lossynet_drift_measure(comm, x, &drift), LOSSYNET_OK);
        assert_close(drift.pair, 0, 0);
        assert_true(step == 0 || drift.mean_age > 0.2);
    }
    assert_close(lossynet_lead(comm), 0.3 / 0.7, 0.02);
    free_vectors(x);
    lossynet_close(comm);
}

/* Where nothing ever arrives there is nothing to lead, and the lead stays finite. */
static void test_nothing_arrives(void **state) {
    (void)state;
    const struct walk k = {.workers = 2, .p = 1, .beta = 0.9, .lead = -1};
    const struct average a = average_of(&k);
    assert_true(a.lead >= 0 && a.lead <= 16 + 1e-9);
}

/* Workers have more than 2^32 packets together: 1,024 of them with 70B elements in packets of 1,400 have
 * 51 billion. */
static void test_many_packets(void **state) {
    (void)state;
    const size_t elements = ELEMENTS;
    struct lossynet_settings settings = simple_settings(4, &elements, 1, 0);
    settings.lead = true;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(4, elements);
    struct lossynet_drift drift;
    assert_int_equal(lossynet_step_begin(comm, 0), LOSSYNET_OK);
    assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
    assert_int_equal(ln_drift_begin(comm, x), LOSSYNET_OK);
    const uint64_t packets = 1500 * 1000 * 1000, late = packets / 10;
    for (int w = 0; w < 4; w++)
        comm->drift.all_ages[w] = (struct ln_ages){
            .packets = packets, .sum = late, .largest = 1, .aged = {packets - late, late}};
    ln_drift_end(comm, &drift);
    assert_close(drift.age_share[0], 0.9, 1e-12);
    assert_close(drift.age_share[1], 0.1, 1e-12);
    assert_close(drift.mean_age, 0.1, 1e-12);
    free_vectors(x);
    lossynet_close(comm);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lag_of_fixed_leads),
        cmocka_unit_test(test_measured_lead),
        cmocka_unit_test(test_rounded_leads),
        cmocka_unit_test(test_lag_of_other_losses),
        cmocka_unit_test(test_point_of_evaluation),
        cmocka_unit_test(test_nothing_lost_leads_nowhere),
        cmocka_unit_test(test_without_samples),
        cmocka_unit_test(test_nothing_arrives),
        cmocka_unit_test(test_many_packets),
    };
    omp_set_num_threads(1); /* the steps are many and small: two would mostly wait for each other */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
