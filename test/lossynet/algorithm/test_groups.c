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

/* ---- what is refused ---- */

static void refused(int group, int workers, int ranks, const char *why) {
    size_t elements = ELEMENTS;
    struct lossynet_settings settings = simple_settings(workers, &elements, 1, 0);
    const struct lossynet_world world = {.ranks = ranks, .local_ranks = ranks};
    settings.group = group;
    capture_begin();
    const size_t bytes = lossynet_memory_needed(&world, &settings);
    const char *said = capture_end();
    assert_int_equal(bytes, 0);
    assert_message(said, why);
}

static void test_refusals(void **state) {
    (void)state;
    refused(7, WORKERS, 1, "group 7: expected a number that divides the 6 workers");
    refused(4, WORKERS, 1, "group 4: expected a number that divides the 6 workers");
    refused(-1, WORKERS, 1, "group -1: expected a number that divides the 6 workers");
    refused(4, 8, 4, "group 4: expected one worker in each rank, or whole groups, got 2");
    refused(3, WORKERS, 3, "group 3: expected one worker in each rank");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_owners_average_their_partners),
        cmocka_unit_test(test_partners_receive_what_owners_send),
        cmocka_unit_test(test_traffic),
        cmocka_unit_test(test_retransmission),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests_name("groups", tests, NULL, NULL);
}
