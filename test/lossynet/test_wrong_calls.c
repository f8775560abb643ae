/* test_wrong_calls.c — wrong calls of the public functions (lossynet.h): each logs one line that names the
 * function and what was expected, returns LOSSYNET_INVALID or ends the process, and changes nothing.
 */
#include "test_lossynet.h"

#include <sys/resource.h>
#include <sys/wait.h>

enum { WORKERS = 4, BUCKETS = 2, ELEMENTS = 300 };

#define REFUSED(call, says)                                                                        \
    do {                                                                                           \
        capture_begin();                                                                           \
        const int got = (int)(call);                                                               \
        assert_message(capture_end(), says);                                                       \
        assert_int_equal(got, LOSSYNET_INVALID);                                                   \
    } while (0)

#define ENDS(call, says)                                                                           \
    do {                                                                                           \
        capture_begin();                                                                           \
        const pid_t child = fork();                                                                \
        if (child == 0) {                                                                          \
            setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});                                        \
            (void)(call);                                                                          \
            _exit(0);                                                                              \
        }                                                                                          \
        int how = 0;                                                                               \
        waitpid(child, &how, 0);                                                                   \
        assert_message(capture_end(), says);                                                       \
        assert_true(WIFSIGNALED(how) && WTERMSIG(how) == SIGABRT);                                 \
    } while (0)

#define NO_COMM ": comm is NULL: expected one that lossynet_open has opened"
#define NO_OUTPUT ": expected memory for what is returned, got NULL"
#define NO_VECTORS ": expected a vector for each worker of this rank, got NULL"

static const size_t elements[BUCKETS] = {100, 200};

/* Of functions that return a status. `comm` has begun step 5; the one before was 4. */
static void refuse_all(struct lossynet_comm *comm, float **x, float **other) {
    float *gap[WORKERS] = {x[0], x[1], NULL, x[3]}, fresh[ELEMENTS];
    const size_t down[2] = {8, 0}, up[2] = {0, 8}, half[2] = {0, 4};
    uint64_t step = 0;
    bool idle;
    struct lossynet_counters counters;
    struct lossynet_bucket buckets[BUCKETS];
    struct lossynet_drift drift;
    struct lossynet_comm *none;
    struct lossynet_world world;
    struct lossynet_settings settings = simple_settings(WORKERS, elements, BUCKETS, 0);
    int number;

    REFUSED(lossynet_check(NULL, &settings), "lossynet_check: expected a world, settings");
    REFUSED(lossynet_open(&alone, NULL, &none), "lossynet_open: expected a world, settings");
    REFUSED(lossynet_open(&alone, &settings, NULL), "lossynet_open: expected a world, settings");
    REFUSED(lossynet_rendezvous_open(NULL, 0, 2, 1, &world), "_meet: expected an address, and");
    REFUSED(lossynet_rendezvous_listen("127.0.0.1:0", NULL, &number, &number),
            "listen: expected an");
    REFUSED(lossynet_bootstrap(NULL, NULL, NULL),
            "lossynet_bootstrap: expected memory for a world");
    REFUSED(lossynet_bootstrap_gather(&alone, NULL, 4), "_gather: expected a world, and memory");
    REFUSED(lossynet_key_proof(NULL, "", NULL), "lossynet_key_proof: expected a key file");
    REFUSED(lossynet_probe(&alone, &settings, NULL, 1, NULL, NULL),
            "lossynet_probe: expected a world");
    REFUSED(lossynet_named_set(NULL, "lead", "off"), "lossynet_named_set: expected settings of");
    REFUSED(lossynet_named_tensor(NULL, "a", 0, 1), "lossynet_named_tensor: expected settings of");

    REFUSED(lossynet_step_begin(NULL, 0), "lossynet_step_begin" NO_COMM);
    REFUSED(lossynet_step_begin(comm, UINT64_MAX), "_begin: step 18446744073709551615: expected a");
    REFUSED(lossynet_step_begin_with_majority(comm, NULL, &idle), "_with_majority" NO_OUTPUT);
    REFUSED(lossynet_step_begin_with_majority(NULL, &step, &idle), "_with_majority" NO_COMM);
    REFUSED(lossynet_reduce(NULL, x, false), "lossynet_reduce" NO_COMM);
    REFUSED(lossynet_reduce(comm, NULL, false), "lossynet_reduce" NO_VECTORS);
    REFUSED(lossynet_reduce(comm, gap, false), "lossynet_reduce" NO_VECTORS);
    REFUSED(lossynet_reduce_begin(comm, gap, false), "lossynet_reduce_begin" NO_VECTORS);
    REFUSED(lossynet_broadcast(comm, gap, false), "lossynet_broadcast_begin" NO_VECTORS);
    REFUSED(lossynet_broadcast_end(NULL), "lossynet_broadcast_end" NO_COMM);
    REFUSED(lossynet_broadcast_prepare(NULL, false), "lossynet_broadcast_prepare" NO_COMM);
    REFUSED(lossynet_bucket_wait(comm, BUCKETS, NULL), "_wait: bucket 2: expected 0 to 1");
    REFUSED(lossynet_bucket_wait(comm, -1, NULL), "_wait: bucket -1: expected 0 to 1");
    REFUSED(lossynet_bucket_ready(comm, 0, 0), "_ready: expected lossynet_reduce_begin before it");
    REFUSED(lossynet_shards(NULL, NULL), "lossynet_shards" NO_COMM);
    REFUSED(lossynet_gather_fresh(comm, gap, fresh), "lossynet_gather_fresh" NO_VECTORS);
    REFUSED(lossynet_gather_fresh(comm, x, NULL), "lossynet_gather_fresh" NO_OUTPUT);
    REFUSED(lossynet_gather_fresh(comm, x, x[1]), "_fresh: expected other memory than that of a");
    REFUSED(lossynet_gather_bucket(comm, x, 7, fresh), "_bucket: bucket 7: expected 0 to 1");
    REFUSED(lossynet_all_gather(comm, fresh, NULL, 4),
            "lossynet_all_gather: expected memory to give");
    REFUSED(lossynet_all_gather_later(comm, NULL, fresh, 4), "_later: expected memory to give");
    REFUSED(lossynet_rank_gather(NULL, fresh, fresh, 4, false), "lossynet_rank_gather" NO_COMM);
    REFUSED(lossynet_pulse(comm, NULL, fresh, 4), "lossynet_pulse: expected memory to give");
    REFUSED(lossynet_swap(comm, x[0], down, fresh, down),
            "lossynet_swap: expected ascending offsets");
    REFUSED(lossynet_swap(comm, x[0], up, fresh, half),
            "lossynet_swap: expected ascending offsets");
    REFUSED(lossynet_swap(comm, NULL, up, fresh, up), "lossynet_swap: expected ascending offsets");
    REFUSED(lossynet_step_counters(comm, 5, NULL), "lossynet_step_counters" NO_OUTPUT);
    REFUSED(lossynet_step_counters(comm, 3, &counters),
            "_counters: step 3: expected the present step");
    REFUSED(lossynet_step_buckets(comm, 6, buckets), "_buckets: step 6: expected the present step");
    REFUSED(lossynet_report_begin(comm, 0, x), "_begin: step 0: expected the present step");
    REFUSED(lossynet_report_begin(comm, 5, gap), "lossynet_report_begin" NO_VECTORS);
    REFUSED(lossynet_report_end(comm, &counters, &drift),
            "_end: expected lossynet_report_begin before");
    REFUSED(lossynet_drift_measure(comm, x, NULL), "lossynet_drift_measure" NO_OUTPUT);
    REFUSED(lossynet_lost_between(comm, NULL), "lossynet_lost_between" NO_OUTPUT);
    REFUSED(lossynet_find_not_finite(comm, gap), "lossynet_find_not_finite" NO_VECTORS);

    assert_int_equal(lossynet_reduce_begin(comm, x, false), LOSSYNET_OK);
    REFUSED(lossynet_reduce_begin(comm, x, false),
            "_begin: called twice: expected lossynet_reduce");
    REFUSED(lossynet_step_begin(comm, 6),
            "step 6: expected a number from 0 on, and lossynet_reduce");
    REFUSED(lossynet_broadcast(comm, x, false), "_begin: expected lossynet_reduce before it");
    REFUSED(lossynet_reduce(comm, other, false), "lossynet_reduce: other vectors or another");
    REFUSED(lossynet_reduce(comm, x, true), "lossynet_reduce: other vectors or another");
    REFUSED(lossynet_bucket_ready(comm, WORKERS, 0), "worker 4: expected one of this rank, 0 to 3");
    REFUSED(lossynet_bucket_ready(comm, 0, BUCKETS), "bucket 2: expected 0 to 1");
    ENDS(lossynet_reduce_arrived(comm, other, false, 0), "_arrived: other vectors or another");
}

/* Of the others. */
static void end_all(struct lossynet_comm *comm, float **x) {
    float *gap[WORKERS] = {x[0], x[1], NULL, x[3]};
    size_t offset, count, cursor = 0;
    int first;
    double share;
    struct lossynet_settings settings = simple_settings(WORKERS, elements, BUCKETS, 0);
    ENDS(lossynet_shard(comm, WORKERS, 0, &offset, &count), "_shard: worker 4: expected 0 to 3");
    ENDS(lossynet_shard(comm, 0, -1, &offset, &count), "_shard: bucket -1: expected 0 to 1");
    ENDS(lossynet_shard(comm, 0, 0, NULL, &count), "lossynet_shard" NO_OUTPUT);
    ENDS(lossynet_group(comm, -1, &first, &first), "_group: worker -1: expected 0 to 3");
    ENDS(lossynet_is_partner_of(comm, 0, 9), "_of: worker 9: expected 0 to 3");
    ENDS(lossynet_partners_of(comm, 9, NULL), "_of: worker 9: expected 0 to 3");
    ENDS(lossynet_owned_elements(comm, 9), "_elements: worker 9: expected 0 to 3");
    ENDS(lossynet_packet_places(comm, NULL), "lossynet_packet_places" NO_OUTPUT);
    ENDS(lossynet_packets(NULL), "lossynet_packets" NO_COMM);
    ENDS(lossynet_packet_bytes(NULL), "lossynet_packet_bytes" NO_COMM);
    ENDS(lossynet_packet_elements(NULL), "lossynet_packet_elements" NO_COMM);
    ENDS(lossynet_link_name(NULL), "lossynet_link_name" NO_COMM);
    ENDS(lossynet_overlaps(NULL), "lossynet_overlaps" NO_COMM);
    ENDS(lossynet_memory_bytes(NULL), "lossynet_memory_bytes" NO_COMM);
    ENDS(lossynet_memory_needed(&alone, NULL),
         "lossynet_memory_needed: expected a world, settings");
    ENDS(lossynet_register(comm, NULL, 4), "lossynet_register: expected a vector");
    ENDS(lossynet_reduce_arrived(comm, x, false, 0), "_arrived: expected lossynet_reduce_begin");
    ENDS(lossynet_round_as_sent(comm, gap), "lossynet_round_as_sent" NO_VECTORS);
    ENDS(lossynet_error_feedback_share(comm, 2), "_share: share 2: expected 0 to 1");
    ENDS(lossynet_error_feedback_share(comm, NAN), "expected 0 to 1");
    ENDS(lossynet_broadcast_ahead(comm, (const float *const *)gap, 1),
         "lead 1: expected a number, and");
    ENDS(lossynet_broadcast_ahead(comm, (const float *const *)x, NAN),
         "nan: expected a number, and");
    ENDS(lossynet_lead(NULL), "lossynet_lead" NO_COMM);
    ENDS(lossynet_rounds_now(comm, (lossynet_phase)2), "_now: phase 2: expected 0 or 1");
    ENDS(lossynet_lost_of_late(comm, (lossynet_phase)2), "_late: phase 2: expected 0 or 1");
    ENDS(lossynet_rounds_plan(&settings, LOSSYNET_GRADIENT, NULL, &share), "_plan" NO_OUTPUT);
    ENDS(lossynet_rounds_expect(1, 0.1, 0, NULL, &share), "lossynet_rounds_expect" NO_OUTPUT);
    ENDS(lossynet_is_not_finite(comm, NULL), "lossynet_is_not_finite" NO_OUTPUT);
    ENDS(lossynet_lateness(comm, NULL), "lossynet_lateness" NO_OUTPUT);
    ENDS(lossynet_has_failed(comm, NULL), "lossynet_has_failed" NO_OUTPUT);
    ENDS(lossynet_replayed(comm, 9, NULL), "_replayed: worker 9: expected 0 to 3");
    ENDS(lossynet_skips_late(NULL), "lossynet_skips_late" NO_COMM);
    ENDS(lossynet_is_awaited(NULL), "lossynet_is_awaited" NO_COMM);
    ENDS(lossynet_agreed(NULL), "lossynet_agreed" NO_COMM);
    ENDS(lossynet_turn(NULL), "lossynet_turn" NO_COMM);
    ENDS(lossynet_note_part(NULL, 0, 0), "lossynet_note_part" NO_COMM);
    ENDS(lossynet_next_fresh(comm, 0, NULL, &offset, &count), "lossynet_next_fresh" NO_OUTPUT);
    ENDS(lossynet_next_fresh(comm, 4, &cursor, &offset, &count),
         "worker 4: expected one of this rank");
    ENDS(lossynet_ages(comm, 4), "_ages: worker 4: expected one of this rank, 0 to 3");
    ENDS(lossynet_state_bytes(comm, 4), "_bytes: worker 4: expected one of this rank, 0 to 3");
    ENDS(lossynet_state_save(comm, 0, NULL), "lossynet_state_save" NO_OUTPUT);
    ENDS(lossynet_state_load(comm, 0, NULL, 4), "_load: expected bytes of lossynet_state_save");
    ENDS(lossynet_narrow_parameters(comm, NULL, x[0], 0, 1),
         "_parameters: 1 elements from 0: expected");
    ENDS(lossynet_named_open(1, NULL), "lossynet_named_open: expected the sizes of buckets");
    ENDS(lossynet_named_get(NULL, "lead"), "lossynet_named_get: expected settings of");
    ENDS(lossynet_named_rule(NULL, NULL), "lossynet_named_rule: expected settings of");
    ENDS(lossynet_named_shards(NULL, NULL), "lossynet_named_shards: expected settings of");
    ENDS(lossynet_named_settings(NULL, 1), "lossynet_named_settings: expected settings of");
    ENDS(lossynet_struct_bytes(NULL), "lossynet_struct_bytes: expected");
    ENDS(lossynet_rendezvous_lost(NULL), "lossynet_rendezvous_lost: expected a world");
}

static void test_wrong_calls(void **state) {
    (void)state;
    const struct lossynet_settings settings = simple_settings(WORKERS, elements, BUCKETS, 0);
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(WORKERS, ELEMENTS), **other = take_vectors(WORKERS, ELEMENTS);
    REFUSED(lossynet_reduce(comm, x, false),
            "lossynet_reduce: expected lossynet_step_begin before it");
    REFUSED(lossynet_broadcast(comm, x, false), "_begin: expected lossynet_step_begin before it");
    for (uint64_t step = 4; step < 6; step++)
        assert_int_equal(lossynet_step_begin(comm, step), LOSSYNET_OK);
    for (int v = 0; v < WORKERS; v++)
        for (int e = 0; e < ELEMENTS; e++) x[v][e] = (float)(v + 1);
    end_all(comm, x);
    refuse_all(comm, x, other);
    /* The phase that was begun goes on as if nothing had been. */
    assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
    assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
    for (int v = 0; v < WORKERS; v++)
        for (int e = 0; e < ELEMENTS; e++) assert_true(x[v][e] == 2.5f);
    lossynet_close(comm);
    lossynet_close(NULL);
    lossynet_named_close(NULL);
    lossynet_rendezvous_close(NULL);
    free_vectors(x);
    free_vectors(other);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_wrong_calls)};
    return cmocka_run_group_tests_name("wrong calls", tests, NULL, NULL);
}
