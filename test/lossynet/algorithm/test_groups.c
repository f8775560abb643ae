/* test_groups.c — tests groups of workers that share a replica. Each worker averages and receives
 * only the elements that its partners own. No others of the vector are touched or sent.
 */
#include "test/lossynet/test_lossynet.h"

enum { WORKERS = 6, GROUP = 3, ELEMENTS = WORKERS * 160 };

/* In its first step. */
static struct lossynet_comm *open_groups(int group, double p, int rounds) {
    size_t elements = ELEMENTS;
    struct lossynet_settings settings = simple_settings(WORKERS, &elements, 1, p);
    settings.group = group;
    settings.retransmission_rounds[0] = settings.retransmission_rounds[1] = rounds;
    struct lossynet_comm *comm = open_alone(&settings);
    lossynet_step_begin(comm, 0);
    return comm;
}

/* Worker w's element e. */
static float value(int w, size_t e) {
    return (float)random_unit(5, (uint64_t)w, e);
}

static float **fill(void) {
    float **x = take_vectors(WORKERS, ELEMENTS);
    for (int w = 0; w < WORKERS; w++)
        for (size_t e = 0; e < ELEMENTS; e++) x[w][e] = value(w, e);
    return x;
}

static int owner_at(const struct lossynet_comm *comm, size_t e) {
    for (int w = 0; w < WORKERS; w++) {
        size_t offset, count;
        lossynet_shard(comm, w, 0, &offset, &count);
        if (e >= offset && e < offset + count) return w;
    }
    fail();
    return -1;
}

static void test_owners_average_their_partners(void **state) {
    (void)state;
    struct lossynet_comm *comm = open_groups(GROUP, 0, 0);
    float **x = fill();
    assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
    for (size_t e = 0; e < ELEMENTS; e++) {
        const int owner = owner_at(comm, e);
        const int partner = owner < GROUP ? owner + GROUP : owner - GROUP;
        for (int w = 0; w < WORKERS; w++) {
            const double mean = ((double)value(owner, e) + (double)value(partner, e)) / 2;
            assert_close((double)x[w][e], w == owner ? mean : (double)value(w, e), 1e-6);
        }
    }
    free_vectors(x);
    lossynet_close(comm);
}

static void test_partners_receive_what_owners_send(void **state) {
    (void)state;
    struct lossynet_comm *comm = open_groups(GROUP, 0, 0);
    float **x = fill();
    assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
    for (size_t e = 0; e < ELEMENTS; e++) {
        const int owner = owner_at(comm, e);
        for (int w = 0; w < WORKERS; w++)
            assert_true(x[w][e] == value(w % GROUP == owner % GROUP ? owner : w, e));
    }
    free_vectors(x);
    lossynet_close(comm);
}

/* What all workers send in a step, in a phase. */
static struct lossynet_counters traffic(int group, double p, int rounds) {
    struct lossynet_counters counters;
    struct lossynet_comm *comm = open_groups(group, p, rounds);
    float **x = fill();
    assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
    assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
    assert_int_equal(lossynet_step_counters(comm, 0, &counters), LOSSYNET_OK);
    free_vectors(x);
    lossynet_close(comm);
    return counters;
}

/* A worker sends to one partner in place of five others. */
static void test_traffic(void **state) {
    (void)state;
    const struct lossynet_counters flat = traffic(1, 0.25, 0), groups = traffic(GROUP, 0.25, 0);
    for (int phase = 0; phase < 2; phase++) {
        assert_int_equal(flat.bytes[phase], (WORKERS - 1) * ELEMENTS * sizeof(float));
        assert_int_equal(groups.bytes[phase], ELEMENTS * sizeof(float));
        assert_int_equal(groups.expected[phase] * (WORKERS - 1), flat.expected[phase]);
        assert_true(groups.arrived[phase] < groups.expected[phase]);
        assert_true(groups.arrived[phase] > groups.expected[phase] / 2);
    }
    assert_int_equal(traffic(WORKERS, 0.25, 0).expected[0], 0); /* one group: nobody to send to */
}

/* Where nothing is lost, nothing is sent again, also not to who is no partner. */
static void test_retransmission(void **state) {
    (void)state;
    const struct lossynet_counters once = traffic(GROUP, 0, 0), again = traffic(GROUP, 0, 2);
    for (int phase = 0; phase < 2; phase++) {
        assert_int_equal(again.resent[phase], 0);
        assert_int_equal(again.bytes[phase], once.bytes[phase]);
    }
}

/* ---- groups of unequal sizes ---- */

static const int one_three_two[] = {1, 3, 2};

struct shape { /* six workers */
    int group;
    const int *sizes; /* or these */
    int groups, workers[3];
};

static const struct shape shapes[] = {
    {4, NULL, 2, {4, 2}}, {5, NULL, 2, {5, 1}}, {0, one_three_two, 3, {1, 3, 2}}};

enum { SHAPES = sizeof shapes / sizeof *shapes, PLACES = 16, LONG = WORKERS * PLACES * 256 };

static struct lossynet_comm *open_shape(const struct shape *s, lossynet_estimator estimator,
                                        double p) {
    size_t elements = LONG;
    struct lossynet_settings settings = simple_settings(WORKERS, &elements, 1, p);
    settings.group = s->group;
    settings.group_sizes = s->sizes;
    settings.estimator = estimator;
    return open_alone(&settings);
}

static int group_at(const struct shape *s, int worker, int *place) {
    int g = 0;
    while (worker >= s->workers[g]) worker -= s->workers[g++];
    *place = worker;
    return g;
}

/* The member at the owner's place, modulo the group's workers. */
static bool is_partner(const struct shape *s, int worker, int owner) {
    int place, owners_place;
    const int g = group_at(s, worker, &place);
    group_at(s, owner, &owners_place);
    return place == owners_place % s->workers[g];
}

static void test_partners_in_unequal_groups(void **state) {
    (void)state;
    for (const struct shape *s = shapes; s < shapes + SHAPES; s++) {
        struct lossynet_comm *comm = open_shape(s, LOSSYNET_MEAN, 0);
        float **x = take_vectors(WORKERS, LONG);
        for (int w = 0; w < WORKERS; w++) {
            int first, size, place;
            lossynet_group(comm, w, &first, &size);
            assert_int_equal(size, s->workers[group_at(s, w, &place)]);
            assert_int_equal(first, w - place);
            for (int owner = 0; owner < WORKERS; owner++)
                assert_int_equal(lossynet_is_partner_of(comm, w, owner), is_partner(s, w, owner));
            for (size_t e = 0; e < LONG; e++) x[w][e] = (float)w;
        }
        lossynet_step_begin(comm, 0);
        assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
        for (int owner = 0; owner < WORKERS; owner++) {
            size_t offset, count;
            lossynet_shard(comm, owner, 0, &offset, &count);
            for (int w = 0; w < WORKERS; w++)
                assert_true(x[w][offset] == (float)(is_partner(s, w, owner) ? owner : w));
        }
        free_vectors(x);
        lossynet_close(comm);
    }
}

/* The weight of group g in an average of the owner's group, by README.md, when the groups in the
 * set `came` arrived. */
static double weight_of(const struct shape *s, lossynet_estimator estimator, int home, int g,
                        unsigned came) {
    int sum = 0, others = 0;
    for (int i = 0; i < s->groups; i++) {
        if (!(came >> i & 1)) continue;
        sum += s->workers[i];
        others += i != home;
    }
    const double share = (double)s->workers[g] / WORKERS;
    if (!(came >> g & 1)) return 0;
    if (estimator == LOSSYNET_MEAN) return (double)s->workers[g] / sum;
    if (estimator == LOSSYNET_BALANCED && others == 0) return 1;
    if (estimator == LOSSYNET_BALANCED && g != home) return share * (s->groups - 1) / others;
    return share;
}

static double expected_weight(const struct shape *s, lossynet_estimator estimator, int home, int g,
                              double p) {
    double sum = 0;
    for (unsigned came = 0; came < 1u << s->groups; came++) {
        double chance = came >> home & 1;
        for (int i = 0; i < s->groups; i++)
            if (i != home) chance *= came >> i & 1 ? 1 - p : p;
        sum += chance * weight_of(s, estimator, home, g, came);
    }
    return sum;
}

/* Element e of a vector is 1 where e modulo 16 is its group, so that averages hold the weights. */
static void fill_places(const struct shape *s, float **x) {
    int place;
    for (int w = 0; w < WORKERS; w++)
        for (size_t e = 0; e < LONG; e++)
            x[w][e] = (float)((int)(e % PLACES) == group_at(s, w, &place));
}

/* Without loss a group counts for its workers, in all estimators with the same bits. */
static void test_the_mean_over_workers(void **state) {
    (void)state;
    for (const struct shape *s = shapes; s < shapes + SHAPES; s++) {
        for (int estimator = LOSSYNET_MEAN; estimator <= LOSSYNET_ZERO; estimator++) {
            struct lossynet_comm *comm = open_shape(s, (lossynet_estimator)estimator, 0);
            float **x = take_vectors(WORKERS, LONG);
            fill_places(s, x);
            lossynet_step_begin(comm, 0);
            assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
            for (int owner = 0; owner < WORKERS; owner++) {
                size_t offset, count;
                lossynet_shard(comm, owner, 0, &offset, &count);
                for (size_t e = offset; e < offset + count; e++) {
                    const size_t g = e % PLACES;
                    const double share = g < (size_t)s->groups ? s->workers[g] / 6.0 : 0;
                    assert_true(x[owner][e] == (float)share);
                }
            }
            free_vectors(x);
            lossynet_close(comm);
        }
    }
}

/* Sums what averages hold over steps, by the owner's group and the group whose weight it is. */
static void sum_weights(const struct shape *s, lossynet_estimator estimator, double p, int steps,
                        double sum[3][3], double *count) {
    struct lossynet_comm *comm = open_shape(s, estimator, p);
    float **x = take_vectors(WORKERS, LONG);
    for (int step = 0; step <= steps; step++) {
        fill_places(s, x);
        lossynet_step_begin(comm, (uint64_t)step);
        assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
        for (int owner = 0; owner < WORKERS && step > 0; owner++) {
            size_t offset, n;
            int place;
            const int home = group_at(s, owner, &place);
            lossynet_shard(comm, owner, 0, &offset, &n);
            for (size_t e = offset; e < offset + n; e += PLACES) {
                count[home]++;
                for (int g = 0; g < s->groups; g++) sum[home][g] += (double)x[owner][e + (size_t)g];
            }
        }
    }
    free_vectors(x);
    lossynet_close(comm);
}

static void test_weights_under_loss(void **state) {
    (void)state;
    const double p = 0.25;
    for (const struct shape *s = shapes; s < shapes + SHAPES; s++) {
        for (int i = LOSSYNET_MEAN; i <= LOSSYNET_ZERO; i++) {
            const lossynet_estimator estimator = (lossynet_estimator)i;
            double sum[3][3] = {{0}}, count[3] = {0};
            sum_weights(s, estimator, p, 20, sum, count);
            for (int home = 0; home < s->groups; home++) {
                for (int g = 0; g < s->groups; g++) {
                    const double want = expected_weight(s, estimator, home, g, p);
                    /* five standard errors: a weight lies between 0 and 1 */
                    const double bound = 5 * (2.0 / 3) / sqrt(count[home]);
                    assert_close(sum[home][g] / count[home], want, bound);
                }
            }
        }
    }
}

/* An owner sends to one member of each other group. */
static void test_traffic_of_unequal_groups(void **state) {
    (void)state;
    for (const struct shape *s = shapes; s < shapes + SHAPES; s++) {
        struct lossynet_counters counters;
        struct lossynet_comm *comm = open_shape(s, LOSSYNET_MEAN, 0.25);
        float **x = take_vectors(WORKERS, LONG);
        lossynet_step_begin(comm, 0);
        assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
        assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
        assert_int_equal(lossynet_step_counters(comm, 0, &counters), LOSSYNET_OK);
        for (int phase = 0; phase < 2; phase++) {
            assert_int_equal(counters.bytes[phase], (s->groups - 1) * LONG * sizeof(float));
            assert_int_equal(counters.expected[phase], (s->groups - 1) * LONG / PLACES);
        }
        free_vectors(x);
        lossynet_close(comm);
    }
}

/* ---- what is refused ---- */

static void refused(int group, const int *sizes, int workers, int ranks, const char *why) {
    size_t elements = ELEMENTS;
    struct lossynet_settings settings = simple_settings(workers, &elements, 1, 0);
    const struct lossynet_world world = {.ranks = ranks, .local_ranks = ranks};
    settings.group = group;
    settings.group_sizes = sizes;
    capture_begin();
    const size_t bytes = lossynet_memory_needed(&world, &settings);
    const char *said = capture_end();
    assert_int_equal(bytes, 0);
    assert_message(said, why);
}

static void test_refusals(void **state) {
    (void)state;
    static const int too_many[] = {4, 3}, none[] = {4, 0, 2};
    refused(7, NULL, WORKERS, 1, "group 7: expected at most the 6 workers");
    refused(-1, NULL, WORKERS, 1, "group -1: expected at most the 6 workers");
    refused(4, NULL, 8, 4, "group 4: expected one worker in each rank, or whole groups, got 2");
    refused(4, NULL, WORKERS, 3, "group 4: expected one worker in each rank");
    refused(0, too_many, WORKERS, 1, "group 1 of 3 workers: expected some, and 6 in all groups");
    refused(0, none, WORKERS, 1, "group 1 of 0 workers: expected some, and 6 in all groups");
    refused(0, one_three_two, WORKERS, 3,
            "groups of given sizes: expected one worker in each rank");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_owners_average_their_partners),
        cmocka_unit_test(test_partners_receive_what_owners_send),
        cmocka_unit_test(test_traffic),
        cmocka_unit_test(test_retransmission),
        cmocka_unit_test(test_partners_in_unequal_groups),
        cmocka_unit_test(test_the_mean_over_workers),
        cmocka_unit_test(test_weights_under_loss),
        cmocka_unit_test(test_traffic_of_unequal_groups),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests_name("groups", tests, NULL, NULL);
}
