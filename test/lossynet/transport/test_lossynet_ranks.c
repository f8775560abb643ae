/* test_lossynet_ranks.c — tests the exchange between ranks over a link of mailboxes in memory.
 *
 * It also runs with the sanitizers. (test_same_bits.c compares bits over the same link.)
 *   - If phases begin early, and buckets are made ready and waited for one by one, the bits are
 *     those of one rank.
 *   - Owners acknowledge exactly the packets that arrived.
 *   - Ranks name a rank that has other settings or that gives up.
 *   - If a link fails at its k-th call, every rank reports it, and no memory leaks.
 */
#include "mailboxes.h"

#include "lossynet/transport/exchange/exchange.h"

/* ---- in parts ---- */

enum { PART_BUCKETS = 5, PART_ELEMENTS = 5 * 600, PART_STEPS = 8 };
static const size_t part_elements[PART_BUCKETS] = {600, 600, 600, 600, 600};

static struct lossynet_settings part_settings(double p) {
    struct lossynet_settings settings =
        simple_settings(SCENARIO_WORKERS, part_elements, PART_BUCKETS, p);
    settings.drift_samples = 100;
    return settings;
}

struct reader { /* a thread of a forward pass */
    struct lossynet_comm *comm;
    lossynet_status status;
};

static void *read_buckets(void *argument) {
    struct reader *reader = argument;
    double waited;
    for (int b = PART_BUCKETS - 1; b >= 0 && !reader->status; b--)
        reader->status = lossynet_bucket_wait(reader->comm, b, &waited);
    return NULL;
}

/* Rounds of small messages so far. */
static uint32_t exchanges_of(const struct lossynet_comm *comm) {
    return comm->transport ? comm->transport->gathers[LOSSYNET_GATHER].begun : 0;
}

/* Two threads wait for the parameters of the last step, bucket by bucket; then gradients become
 * ready one by one; the report of the last step travels
 * with the one exchange of this step. */
static void run_parts(struct rank *rank, struct lossynet_comm *comm) {
    int local = SCENARIO_WORKERS / post.ranks;
    float **gradient = take_vectors(local, PART_ELEMENTS);
    float **parameter = take_vectors(local, PART_ELEMENTS);
    uint64_t digest = 0xcbf29ce484222325u, mine[SCENARIO_WORKERS], all[SCENARIO_WORKERS];
    lossynet_status status = LOSSYNET_OK;
    for (uint64_t step = 0; step <= PART_STEPS && !status; step++) {
        struct reader reader[2] = {{comm, LOSSYNET_OK}, {comm, LOSSYNET_OK}};
        pthread_t thread[2];
        if (step < PART_STEPS) {
            status = lossynet_step_begin(comm, step);
            if (!status) status = lossynet_reduce_begin(comm, gradient, false);
        }
        for (int i = 0; i < 2; i++) pthread_create(&thread[i], NULL, read_buckets, &reader[i]);
        for (int i = 0; i < 2; i++) pthread_join(thread[i], NULL);
        if (reader[0].status || reader[1].status) status = LOSSYNET_LINK;
        for (int b = 0; b < PART_BUCKETS && !status && step < PART_STEPS; b++) {
            for (int v = 0; v < local; v++) {
                size_t from = (size_t)b * 600;
                for (size_t e = from; e < from + 600; e++)
                    gradient[v][e] =
                        (float)random_unit(step, (uint64_t)(rank->rank * local + v), e) +
                        0.01f * parameter[v][e];
                lossynet_bucket_ready(comm, rank->rank * local + v, b);
            }
            /* What has come by now; whether it has may differ from rank to rank. */
            for (int done = 0; done <= b && (b + (int)step) % 3; done++)
                if (!lossynet_reduce_arrived(comm, gradient, false, done)) break;
        }
        const uint32_t exchanges = exchanges_of(comm);
        if (step > 0 && !status) { /* the step before */
            status = lossynet_broadcast_end(comm);
            if (!status) status = lossynet_report_begin(comm, step - 1, parameter);
            for (int v = 0; v < local; v++)
                mine[v] = digest_bytes(step, parameter[v], PART_ELEMENTS * sizeof(float));
            if (!status) status = lossynet_all_gather_later(comm, mine, all, sizeof *mine);
        }
        if (step < PART_STEPS && !status) { /* the last report travels by itself */
            float norm[SCENARIO_WORKERS], norms[SCENARIO_WORKERS];
            const uint32_t before = exchanges_of(comm);
            status = lossynet_reduce(comm, gradient, false);
            const uint32_t reducing = exchanges_of(comm) - before;
            for (int v = 0; v < local; v++) norm[v] = gradient[v][0];
            if (!status) status = lossynet_all_gather(comm, norm, norms, sizeof *norm);
            const bool alone = comm->arrivals.acks.later; /* acknowledgements travel with it */
            if (comm->transport && exchanges_of(comm) - exchanges != (alone ? 1 : reducing + 1))
                status = LOSSYNET_PROTOCOL;
        }
        if (step > 0 && !status) {
            struct lossynet_counters counters;
            struct lossynet_drift drift;
            status = lossynet_report_end(comm, &counters, &drift);
            digest = digest_bytes(digest, all, sizeof all);
            digest = digest_bytes(digest, &counters, sizeof counters);
            digest = digest_bytes(digest, &drift.pair, offsetof(struct lossynet_drift, max_age));
        }
        if (step == PART_STEPS || status) break;
        for (int v = 0; v < local; v++) {
            for (int b = 0; b < PART_BUCKETS; b++) {
                size_t offset, count;
                lossynet_shard(comm, rank->rank * local + v, b, &offset, &count);
                for (size_t e = offset; e < offset + count; e++)
                    parameter[v][e] -= 0.1f * gradient[v][e];
            }
        }
        if (!status) status = lossynet_broadcast_begin(comm, parameter, false);
    }
    rank->status = status;
    rank->digest = status ? 0 : digest;
    free_vectors(parameter);
    free_vectors(gradient);
}

static void parts(int rounds, bool error_feedback, bool later) {
    struct lossynet_settings settings = part_settings(0.2);
    settings.acknowledge_later = later;
    settings.retransmission_rounds[LOSSYNET_GRADIENT] =
        settings.retransmission_rounds[LOSSYNET_PARAMETER] = rounds;
    settings.error_feedback = error_feedback;
    if (error_feedback) settings.estimator = LOSSYNET_MEAN;
    struct lossynet_comm *comm = open_alone(&settings);
    struct rank one = {.rank = 0};
    memset(&post, 0, sizeof post);
    post.ranks = 1;
    run_parts(&one, comm);
    lossynet_close(comm);
    assert_true(one.digest != 0);
    for (int ranks = 2; ranks <= RANKS; ranks *= 2)
        assert_true(digest_of(ranks, post_office_open, ranks == 4, &settings, run_parts) ==
                    one.digest);
}

static void test_parts(void **state) {
    (void)state;
    parts(0, false, false);
    parts(1, false, false);
    parts(0, true, false);
    parts(0, true, true);
}

static int sums;

static void count_sum(float *out, const float *const *sender, const float *weight, int senders,
                      size_t n, size_t packet) {
    __atomic_add_fetch(&sums, 1, __ATOMIC_RELAXED);
    ln_weighted_sum_plain(out, sender, weight, senders, n, packet);
}

static void reduce_once(struct rank *rank, struct lossynet_comm *comm) {
    int local = SCENARIO_WORKERS / post.ranks;
    float **x = take_vectors(local, PART_ELEMENTS);
    rank->status = lossynet_step_begin(comm, 0);
    if (!rank->status) rank->status = lossynet_reduce(comm, x, false);
    free_vectors(x);
}

/* A device averages a shard in one call; CPU threads share it between them. */
static void test_whole_shards(void **state) {
    (void)state;
    struct lossynet_settings settings = part_settings(0.2);
    struct lossynet_comm *comm = open_alone(&settings);
    struct rank rank[RANKS];
    int shards = 0;
    for (int w = 0; w < SCENARIO_WORKERS; w++)
        for (int b = 0; b < settings.buckets; b++) {
            size_t offset, count;
            lossynet_shard(comm, w, b, &offset, &count);
            shards += count > 0;
        }
    lossynet_close(comm);
    settings.weighted_sum = count_sum;
    for (int whole = 0; whole < 2; whole++) {
        settings.weighted_sum_whole = whole;
        sums = 0;
        office_open(-1);
        run_ranks(RANKS, &settings, post_office_open, reduce_once, rank, NULL);
        office_close();
        for (int r = 0; r < RANKS; r++) assert_int_equal(rank[r].status, LOSSYNET_OK);
        assert_true(whole ? sums == shards : sums >= shards);
    }
}

/* ---- what arrived is told to the senders ---- */

static bool loses_data; /* every seventh DATA from each peer, of the network itself */

static int lose_data(int rank, int peer, const uint8_t *datagram, size_t bytes) {
    (void)rank, (void)peer, (void)bytes;
    return wire_type(datagram) != WIRE_DATA || !loses_data ||
           wire_get(datagram + WIRE_SEQUENCE_AT, 4) % 7 != 3;
}

static void run_phases(struct rank *rank, struct lossynet_comm *comm) {
    int local = SCENARIO_WORKERS / post.ranks;
    float **x = take_vectors(local, PART_ELEMENTS);
    for (uint64_t step = 0; step < 8 && !rank->status; step++) {
        struct lossynet_counters counters;
        rank->status = lossynet_step_begin(comm, step);
        if (!rank->status) rank->status = lossynet_reduce(comm, x, false);
        if (!rank->status) rank->status = lossynet_broadcast(comm, x, false);
        if (!rank->status) rank->status = lossynet_step_counters(comm, step, &counters);
        for (int phase = 0; phase < 2; phase++) {
            rank->counters.expected[phase] += counters.expected[phase];
            rank->counters.arrived[phase] += counters.arrived[phase];
            rank->counters.resent[phase] += counters.resent[phase];
        }
    }
    rank->digest = 1;
    free_vectors(x);
}

static void run_masks(struct rank *rank, struct lossynet_comm *comm) {
    int local = SCENARIO_WORKERS / post.ranks, workers = SCENARIO_WORKERS;
    float **x = take_vectors(local, PART_ELEMENTS);
    size_t packets = lossynet_packets(comm), arrived = 0, lost = 0;
    for (uint64_t step = 0; step < 4 && !rank->status; step++) {
        /* Every worker's gradient is 1 in all elements; with estimator `zero` the average of a
         * packet tells how many arrived. */
        for (int v = 0; v < local; v++)
            for (size_t e = 0; e < PART_ELEMENTS; e++) x[v][e] = 1;
        lossynet_error_feedback_share(comm,
                                      0); /* senders are told, and gradients stay as they are */
        rank->status = lossynet_step_begin(comm, step);
        if (!rank->status) rank->status = lossynet_reduce(comm, x, false);
        struct lossynet_counters counters;
        if (!rank->status) rank->status = lossynet_step_counters(comm, step, &counters);
        for (int v = 0; v < local; v++) {
            for (int owner = 0; owner < workers; owner++) {
                size_t n, there = 0;
                const uint8_t *told = comm->arrivals.acked[LOSSYNET_GRADIENT] +
                                      ln_tx(comm, LOSSYNET_GRADIENT, v, owner, &n);
                for (size_t k = 0; k < n; k++) there += told[k];
                arrived += there;
                lost += n - there;
            }
        }
        /* All senders agree with what owners counted. */
        uint64_t mine[SCENARIO_WORKERS] = {0}, all[SCENARIO_WORKERS];
        mine[0] = arrived;
        if (!rank->status) rank->status = lossynet_all_gather(comm, mine, all, sizeof *mine);
        uint64_t sum = 0;
        for (int w = 0; w < workers; w++) sum += all[w];
        rank->counters.arrived[0] += counters.arrived[0];
        rank->counters.expected[0] += counters.expected[0];
        uint64_t own = packets * (step + 1);
        if (sum != rank->counters.arrived[0] + own) rank->status = LOSSYNET_PROTOCOL;
    }
    if (lost == 0) rank->status = LOSSYNET_PROTOCOL;
    rank->digest = 1;
    free_vectors(x);
}

/* What the network itself loses is sent again as well, within a budget where there is one. */
static void test_retransmitted(void **state) {
    (void)state;
    struct lossynet_settings settings = part_settings(0);
    double lost[2];
    for (int i = 0; i < 3; i++) {
        struct rank rank[RANKS];
        const int rounds = i > 0;
        settings.retransmission_rounds[LOSSYNET_GRADIENT] =
            settings.retransmission_rounds[LOSSYNET_PARAMETER] = rounds;
        settings.retransmission_budget = i == 2 ? 0.05 : 0;
        office_open(-1);
        loses_data = true;
        run_ranks(4, &settings, post_office_open, run_phases, rank, lose_data);
        office_close();
        for (int r = 0; r < 4; r++) assert_int_equal(rank[r].status, LOSSYNET_OK);
        for (int phase = 0; phase < 2; phase++) {
            const struct lossynet_counters *c = &rank[0].counters;
            lost[phase] = 1 - (double)c->arrived[phase] / (double)c->expected[phase];
            const double resent = (double)c->resent[phase] / (double)c->expected[phase];
            assert_true(rounds ? lost[phase] < 0.05 + settings.retransmission_budget
                               : lost[phase] > 0.08);
            assert_true((resent > 0) == (rounds > 0));
            if (i == 2) assert_true(resent <= 0.05 && resent > 0.03);
        }
    }
}

static void test_delivered(void **state) {
    (void)state;
    struct lossynet_settings settings = part_settings(0.1);
    settings.estimator = LOSSYNET_ZERO;
    settings.error_feedback = true;
    struct rank one = {.rank = 0}, rank[RANKS];
    struct lossynet_comm *comm = open_alone(&settings);
    memset(&post, 0, sizeof post);
    post.ranks = 1;
    run_masks(&one, comm);
    assert_int_equal(one.status, LOSSYNET_OK);
    /* Packet by packet: injected loss is a pure function. */
    for (int w = 0; w < SCENARIO_WORKERS; w++) {
        for (int owner = 0; owner < SCENARIO_WORKERS; owner++) {
            size_t n;
            const uint8_t *told = comm->arrivals.acked[LOSSYNET_GRADIENT] +
                                  ln_tx(comm, LOSSYNET_GRADIENT, w, owner, &n);
            uint8_t mask[256];
            assert_true(n <= sizeof mask);
            memset(mask, 1, n);
            if (w != owner)
                ln_loss_mask(&comm->loss, LOSSYNET_GRADIENT, 3, w, owner, n, NULL, mask);
            assert_memory_equal(told, mask, n);
        }
    }
    lossynet_close(comm);
    for (int i = 0; i < 2; i++) {
        office_open(-1);
        loses_data = i == 1;
        run_ranks(4, &settings, post_office_open, run_masks, rank, lose_data);
        office_close();
        for (int r = 0; r < 4; r++) assert_int_equal(rank[r].status, LOSSYNET_OK);
        if (i == 0) assert_int_equal(rank[0].counters.arrived[0], one.counters.arrived[0]);
        if (i == 1) assert_true(rank[0].counters.arrived[0] < one.counters.arrived[0]);
    }
}

/* ---- ranks that disagree, links that fail ---- */

static void refuse_each_other(const struct lossynet_settings settings[2], const char *why) {
    struct rank rank[RANKS];
    capture_begin();
    office_open(-1);
    run_ranks_with(2, settings, 1, mail_open, run_scenario, rank, NULL);
    office_close();
    assert_non_null(strstr(capture_end(), why));
    for (int r = 0; r < 2; r++) assert_int_equal(rank[r].status, LOSSYNET_INVALID);
}

static void test_other_settings(void **state) {
    (void)state;
    struct lossynet_settings settings[2];
    for (int r = 0; r < 2; r++)
        settings[r] = scenario_settings("bernoulli", r ? 0.2 : 0.1, LOSSYNET_MEAN);
    refuse_each_other(settings, "rank 1 was started with other settings than rank 0");
    settings[0] = settings[1];
    settings[1].wire_dtype = LOSSYNET_BF16;
    refuse_each_other(settings, "rank 1 was started with wire dtype bf16, rank 0 with float32: "
                                "expected the same on all ranks");
}

/* Rank 0's link breaks at each of its sends in turn: it reports LOSSYNET_LINK, and so do the others
 * when they have not heard it for the time-out. */
static void test_broken_link(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0.1, LOSSYNET_MEAN);
    settings.network.peer_timeout = 0.3;
    struct rank rank[RANKS];
    for (int sends = 0; sends < 400; sends += 1 + sends / 4) {
        capture_begin();
        office_open(sends);
        run_ranks(2, &settings, post_office_open, run_scenario, rank, NULL);
        office_close();
        capture_end();
        for (int r = 0; r < 2; r++) assert_int_equal(rank[r].status, LOSSYNET_LINK);
    }
}

/* A rank that gives up says so: the others fail at once, and say whom it misses. */
static void give_up(struct rank *rank, struct lossynet_comm *comm) {
    size_t elements = 0;
    for (int b = 0; b < SCENARIO_BUCKETS; b++) elements += scenario_elements[b];
    float **x = take_vectors(SCENARIO_WORKERS / post.ranks, elements);
    rank->status = lossynet_step_begin(comm, 0);
    if (rank->rank == 1) {
        ln_threads_enter(comm->transport);
        ln_session_fail(comm->transport, 0, "is not liked by this test");
        ln_threads_leave(comm->transport);
    }
    rank->status = lossynet_reduce(comm, x, false);
    free_vectors(x);
}

static void test_abort(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0, LOSSYNET_MEAN);
    struct rank rank[RANKS];
    capture_begin();
    office_open(-1);
    run_ranks(4, &settings, post_office_open, give_up, rank, NULL);
    office_close();
    const char *text = capture_end();
    assert_non_null(
        strstr(text, "rank 0, step 0, peer rank 1 leaves, since it does not hear this"));
    assert_non_null(strstr(text, "leaves, since it does not hear rank 0"));
    assert_null(strstr(text, "has failed"));
    for (int r = 0; r < 4; r++) {
        assert_int_equal(rank[r].status, LOSSYNET_LINK);
        assert_true(rank[r].seconds < 30); /* it was told: the time-out is 60 s */
    }
}

/* More buckets, or packets of a shard, than a datagram's header can name. */
static void too_many(int buckets, size_t elements, const char *says) {
    size_t *bucket_elements = malloc((size_t)buckets * sizeof *bucket_elements);
    for (int b = 0; b < buckets; b++) bucket_elements[b] = elements;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0, LOSSYNET_MEAN);
    settings.buckets = buckets;
    settings.bucket_elements = bucket_elements;
    settings.workers = 2;
    settings.packet_bytes = 4;
    struct rank rank[RANKS];
    capture_begin();
    office_open(-1);
    run_ranks(2, &settings, post_office_open, give_up, rank, NULL);
    office_close();
    assert_non_null(strstr(capture_end(), says));
    for (int r = 0; r < 2; r++) assert_int_equal(rank[r].status, LOSSYNET_INVALID);
    free(bucket_elements);
}

static void test_too_many(void **state) {
    (void)state;
    too_many(WIRE_BUCKETS + 1, 1, "buckets 4097: expected at most 4096, with more than one rank");
    too_many(1, 2 * (size_t)WIRE_PACKETS + 64,
             "bucket 0: 1048608 packets for one owner: expected at most 1048576");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parts),          cmocka_unit_test(test_whole_shards),
        cmocka_unit_test(test_delivered),      cmocka_unit_test(test_retransmitted),
        cmocka_unit_test(test_other_settings), cmocka_unit_test(test_broken_link),
        cmocka_unit_test(test_abort),          cmocka_unit_test(test_too_many),
    };
    return cmocka_run_group_tests_name("lossynet between ranks", tests, NULL, NULL);
}
