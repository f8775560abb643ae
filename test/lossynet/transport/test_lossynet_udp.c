/* test_lossynet_udp.c — tests several ranks in one process over real UDP sockets on loopback.
 *
 * Each rank is a thread with its own comm and socket. A hook on arriving datagrams drops, repeats,
 * reorders and damages exactly chosen ones:
 *   - The scenario of test_lossynet.h gives the bits of one rank with eight workers, whatever
 *     happens to control datagrams, and even if the network is cut for a while.
 *   - Lost, late, repeated and damaged packets are counted as such, and no others are.
 *   - Every other rank names a rank that stays silent, within the time-out. Takes 30 s.
 *
 * With sanitizers, which are slow, wire types meet four ranks alone.
 */
#include "test_lossynet_threads.h"

#include "lossynet/link/udp_socket.h"

#include <poll.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { FEWEST = 4 };
#else
enum { FEWEST = 2 };
#endif

/* ---- hooks ---- */

static int type_of(const uint8_t *datagram) {
    return wire_type(datagram);
}

static bool is_data(const uint8_t *datagram, size_t bytes) {
    return bytes >= WIRE_HEADER_BYTES && type_of(datagram) == WIRE_DATA;
}

/* The network between ranks drops a quarter of the control datagrams, and repeats and reorders
 * others. */
static int rough(int rank, int peer, const uint8_t *datagram, size_t bytes) {
    if (is_data(datagram, bytes)) return 1;
    int n = atomic_fetch_add(&post.seen[rank][peer], 1);
    switch (random_bits(3, (uint64_t)(rank * RANKS + peer), (uint64_t)n) % 16) {
    case 0:
    case 1:
    case 2:
    case 3:
        return 0;
    case 4:
        return 2;
    case 5:
        return -1;
    default:
        return 1;
    }
}

/* ---- checksum ---- */

static void test_checksum(void **state) {
    (void)state;
    assert_int_equal(ln_crc32c(0, "123456789", 9), 0xe3069283); /* RFC 3720's check value */
    uint8_t bytes[1700]; /* more than two times three lanes (crc32c.c) */
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)random_bits(1, i, 0);
    for (size_t n = 0; n < sizeof bytes; n++) {
        uint32_t whole = ln_crc32c(0, bytes, n);
        assert_int_equal(whole, ln_crc32c_plain(0, bytes, n));
        assert_int_equal(whole, ln_crc32c(ln_crc32c(0, bytes, n / 3), bytes + n / 3, n - n / 3));
    }
}

/* ---- the same bits ---- */

static void same_bits_as(uint64_t want, struct lossynet_settings settings, int ranks,
                         int (*hook)(int, int, const uint8_t *, size_t)) {
    settings.link = LOSSYNET_LINK_UDP;
    struct rank rank[RANKS];
    run_ranks(ranks, &settings, ln_link_udp_open, run_scenario, rank, hook);
    for (int r = 0; r < ranks; r++) {
        assert_int_equal(rank[r].status, LOSSYNET_OK);
        assert_true(rank[r].digest == want);
        assert_int_equal(rank[r].overruns, 0);
    }
}

static void same_bits_with(struct lossynet_settings settings, int ranks,
                           int (*hook)(int, int, const uint8_t *, size_t)) {
    same_bits_as(digest_alone(&settings), settings, ranks, hook);
}

static void same_bits(const char *model, double p, lossynet_estimator estimator, int ranks,
                      int (*hook)(int, int, const uint8_t *, size_t)) {
    same_bits_with(scenario_settings(model, p, estimator), ranks, hook);
}

static void test_same_bits(void **state) {
    (void)state;
    same_bits("bernoulli", 0, LOSSYNET_MEAN, 2, NULL);
    same_bits("bernoulli", 0.2, LOSSYNET_ZERO, 4, NULL);
    same_bits("bernoulli", 1, LOSSYNET_BALANCED, 2, NULL);
    same_bits("burst:7", 0.3, LOSSYNET_BALANCED, 4, NULL);
}

static void test_same_bits_rounded(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0.2, LOSSYNET_MEAN);
    for (int wire = LOSSYNET_BF16; wire <= LOSSYNET_INT4; wire++) {
        settings.wire_dtype = (lossynet_wire_dtype)wire;
        for (int ranks = FEWEST; ranks <= 4; ranks *= 2) same_bits_with(settings, ranks, NULL);
    }
}

/* Vectors of bfloat16 against vectors of float32 with the same gradients. */
static void test_same_bits_of_bf16(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0.2, LOSSYNET_MEAN);
    for (int wire = LOSSYNET_BF16; wire <= LOSSYNET_INT8; wire++) {
        settings.wire_dtype = (lossynet_wire_dtype)wire;
        settings.vector_dtype = LOSSYNET_FLOAT32;
        scenario_kind = SCENARIO_ROUNDED;
        const uint64_t want = digest_alone(&settings);
        settings.vector_dtype = LOSSYNET_BF16;
        scenario_kind = SCENARIO_BF16;
        if (FEWEST == 2) same_bits_as(want, settings, 2, NULL);
        same_bits_as(want, settings, 4, rough);
    }
    scenario_kind = SCENARIO_ANY;
}

/* Packets are shared out among threads, each with a socket of its own; rounds send some again. */
static void test_same_bits_on_threads(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0.2, LOSSYNET_MEAN);
    settings.retransmission_rounds[LOSSYNET_GRADIENT] = 2;
    settings.retransmission_rounds[LOSSYNET_PARAMETER] = 1;
    static const int threads[] = {2, 5};
    for (int i = 0; i < 2; i++) {
        settings.network.threads = threads[i];
        settings.wire_dtype = LOSSYNET_FLOAT32;
        same_bits_with(settings, FEWEST, rough);
        settings.wire_dtype = LOSSYNET_INT6;
        same_bits_with(settings, 4, rough);
    }
}

static void test_rough_network(void **state) {
    (void)state;
    same_bits("bernoulli", 0, LOSSYNET_MEAN, 2, rough);
    same_bits("bernoulli", 0.2, LOSSYNET_MEAN, 4, rough);
}

/* Datagrams of one type never arrive at rank 0 in the first 40 of them. */
static int never_type;
static int never(int rank, int peer, const uint8_t *datagram, size_t bytes) {
    (void)peer;
    if (bytes < WIRE_HEADER_BYTES || type_of(datagram) != never_type || rank != 0) return 1;
    return atomic_fetch_add(&post.total, 1) >= 10;
}

static void test_each_control_datagram_lost(void **state) {
    (void)state;
    for (never_type = WIRE_DONE; never_type < WIRE_TYPES; never_type++)
        same_bits("bernoulli", 0.2, LOSSYNET_MEAN, 2, never);
}

/* ---- exactly chosen packets ---- */

enum { SMALL_ELEMENTS = 2 * 16 * 50 }; /* per owner of two: 50 packets of 64 bytes */
static const size_t small_elements = SMALL_ELEMENTS;

static struct lossynet_settings small_settings(void) {
    struct lossynet_settings settings = simple_settings(2, &small_elements, 1, 0);
    settings.link = LOSSYNET_LINK_UDP;
    settings.network.peer_timeout = 2;
    return settings;
}

static float poison; /* what rank 1 sends as its element 0 */

static void run_steps(struct rank *rank, struct lossynet_comm *comm) {
    float **x = take_vectors(1, SMALL_ELEMENTS);
    for (uint64_t step = 0; step < 3 && !rank->status; step++) {
        for (size_t e = 0; e < SMALL_ELEMENTS; e++) x[0][e] = (float)rank->rank;
        if (rank->rank == 1 && step == 0) x[0][0] = poison;
        rank->status = lossynet_step_begin(comm, step);
        if (!rank->status) rank->status = lossynet_reduce(comm, x, false);
        if (!rank->status) rank->status = lossynet_broadcast(comm, x, false);
        struct lossynet_counters c = {0};
        if (!rank->status) rank->status = lossynet_step_counters(comm, step, &c);
        for (int phase = 0; phase < 2; phase++) {
            rank->counters.expected[phase] += c.expected[phase];
            rank->counters.arrived[phase] += c.arrived[phase];
        }
        for (int e = 0; e < LOSSYNET_EVENTS; e++) rank->counters.network[e] += c.network[e];
        for (size_t e = 0; e < SMALL_ELEMENTS && !rank->status; e++)
            assert_true(x[0][e] == 0 || x[0][e] == 0.5f || x[0][e] == 1);
    }
    free_vectors(x);
}

static void steps_within(double peer_timeout, int (*hook)(int, int, const uint8_t *, size_t),
                         struct lossynet_counters *counters) {
    struct lossynet_settings settings = small_settings();
    struct rank rank[RANKS];
    settings.network.peer_timeout = peer_timeout;
    run_ranks(2, &settings, ln_link_udp_open, run_steps, rank, hook);
    for (int r = 0; r < 2; r++) assert_int_equal(rank[r].status, LOSSYNET_OK);
    assert_memory_equal(&rank[0].counters, &rank[1].counters, sizeof rank[0].counters);
    *counters = rank[0].counters;
    assert_int_equal(counters->expected[0], 3 * 100);
    assert_int_equal(counters->expected[1], 3 * 100);
}

static void steps_with(int (*hook)(int, int, const uint8_t *, size_t),
                       struct lossynet_counters *counters) {
    steps_within(2, hook, counters);
}

/* What happens to DATA number `chosen` that rank 0 sees. */
static int chosen, chosen_fate;
static int fate(int rank, int peer, const uint8_t *datagram, size_t bytes) {
    (void)peer;
    if (rank != 0 || !is_data(datagram, bytes)) return 1;
    if (atomic_fetch_add(&post.total, 1) != chosen) return 1;
    if (chosen_fate == 3) ((uint8_t *)datagram)[WIRE_HEADER_BYTES + 5] ^= 16; /* one bit */
    return chosen_fate == 3 ? 1 : chosen_fate;
}

static void test_chosen_packets(void **state) {
    (void)state;
    struct lossynet_counters c;
    const int packets[] = {0, 7, 49, 50, 99, 149, 299};
    for (size_t i = 0; i < sizeof packets / sizeof *packets; i++) {
        chosen = packets[i];
        int phase = chosen / 50 % 2;
        for (chosen_fate = -1; chosen_fate <= 3; chosen_fate++) {
            if (chosen_fate == 1) continue;
            steps_with(fate, &c);
            bool lost = chosen_fate == 0 || chosen_fate == 3;
            assert_int_equal(c.arrived[phase], 300 - lost);
            assert_int_equal(c.arrived[!phase], 300);
            assert_int_equal(c.network[LOSSYNET_DUPLICATE], chosen_fate == 2);
            assert_int_equal(c.network[LOSSYNET_REJECTED], chosen_fate == 3);
            assert_int_equal(c.network[LOSSYNET_LATE], 0);
        }
    }
}

/* All DATA towards rank 0 is lost: owners keep their own, nobody waits for ever. */
static int no_data(int rank, int peer, const uint8_t *datagram, size_t bytes) {
    (void)peer;
    return rank != 0 || !is_data(datagram, bytes);
}

static void test_all_data_lost(void **state) {
    (void)state;
    struct lossynet_counters c;
    capture_begin();
    steps_with(no_data, &c);
    const char *said = capture_end(); /* the steps may end before a rank is sure */
    assert_true(*said == 0 ||
                strstr(said, "to rank 0 has come, and other datagrams of their size"));
    assert_int_equal(c.arrived[0], 150);
    assert_int_equal(c.arrived[1], 150);
}

static void test_not_finite(void **state) {
    (void)state;
    struct lossynet_counters c;
    const float poisons[] = {NAN, 1e38f}; /* the second is finite, but its square is not */
    for (int i = 0; i < 2; i++) {
        poison = poisons[i];
        steps_with(NULL, &c);
        poison = 0;
        assert_int_equal(c.arrived[0], 299);
        assert_int_equal(c.network[LOSSYNET_REJECTED], 1);
    }
}

/* ---- the socket ---- */

static void send_to_itself(struct udp_address *a) {
    struct udp_socket s;
    assert_int_equal(udp_socket_open(&s, a, (const int[2]){0, 0}), LOSSYNET_OK);
    static const uint8_t payload[64];
    struct ln_datagram d[LOSSYNET_BATCH];
    for (int i = 0; i < LOSSYNET_BATCH; i++) /* sizes that segmentation can and cannot join */
        d[i] = (struct ln_datagram){
            .header = {(uint8_t)i}, .payload = payload, .length = (size_t)(i % 7 == 6 ? i : 64)};
    assert_int_equal(udp_send(&s, a, d, LOSSYNET_BATCH), LOSSYNET_OK);
    uint8_t *bytes;
    size_t count;
    struct udp_address *from;
    for (int seen = 0; seen < LOSSYNET_BATCH; seen++) {
        struct pollfd poll_in = {.fd = s.fd, .events = POLLIN};
        if (udp_empty(&s)) assert_int_equal(poll(&poll_in, 1, 1000), 1);
        assert_true(udp_receive(&s, &bytes, &count, &from));
        assert_int_equal(count, WIRE_HEADER_BYTES + d[seen].length);
        assert_int_equal(bytes[0], seen);
        assert_true(udp_address_equal(from, a));
    }
    assert_true(udp_empty(&s) && !udp_receive(&s, &bytes, &count, &from));
    assert_int_equal(udp_overruns(&s), 0);
    udp_socket_close(&s);
}

static void test_socket(void **state) {
    (void)state;
    struct udp_interface lo;
    assert_int_equal(udp_choose("lo", true, &lo), LOSSYNET_OK);
    send_to_itself(&lo.address);
    capture_begin();
    lossynet_status status = udp_choose("nosuch0", true, &lo);
    char expected[100] = "an IP address on ";
    gethostname(expected + strlen(expected), 65);
    assert_message(capture_end(), expected);
    assert_int_equal(status, LOSSYNET_LINK);
}

static void test_socket_over_ipv6(void **state) {
    (void)state;
    struct udp_address six = {.v6 = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT}};
    int fd = socket(AF_INET6, SOCK_DGRAM, 0), refused = bind(fd, &six.any, sizeof six.v6);
    if (fd >= 0) close(fd);
    if (refused) skip(); /* no IPv6 here */
    send_to_itself(&six);
}

/* Pacing lets a burst through at once and the rest at its rate. */
static void test_pace(void **state) {
    (void)state;
    struct ln_pacing pacing = {.rate = 10e6, .burst = 100e3, .tokens = 100e3, .filled = ln_now()};
    double start = ln_now();
    for (int sent = 0; sent < 60;) {
        double wait = ln_pacing_wait(&pacing, 10000);
        if (wait > 0)
            nanosleep(&(struct timespec){.tv_nsec = (long)(wait * 1e9)}, NULL);
        else
            sent++;
    }
    assert_in_range((uintmax_t)((ln_now() - start) * 1e3), 49, 1000); /* 50 ms for 500 kB */
}

/* ---- hostile datagrams ---- */

/* Some of what arrives has bits flipped: anywhere, or with a checksum that fits (a peer gone mad).
 * No memory is touched that should not be, and the run ends, well or with LOSSYNET_LINK. */
static bool mad;
static int damage(int rank, int peer, const uint8_t *datagram, size_t bytes) {
    uint64_t n = (uint64_t)atomic_fetch_add(&post.total, 1);
    uint64_t bits = random_bits(9, (uint64_t)(rank * RANKS + peer), n);
    uint8_t *d = (uint8_t *)datagram;
    if (bytes < WIRE_HEADER_BYTES || bits % 8) return 1;
    for (uint64_t i = 0; i <= (bits >> 8 & 3); i++) {
        uint64_t at = random_bits(10, n, i) % (8 * (mad ? WIRE_SEQUENCE_AT : bytes));
        if (!mad || at / 8 >= 8) d[at / 8] ^= (uint8_t)(1u << at % 8);
    }
    if (mad) {
        wire_put(d + WIRE_CHECKSUM_AT, 0, 4);
        wire_put(d + WIRE_CHECKSUM_AT, ln_crc32c(0, d, bytes), 4);
    }
    return 1;
}

static void test_damaged(void **state) {
    (void)state;
    struct lossynet_counters c;
    mad = false;
    steps_with(damage, &c);
    assert_true(c.network[LOSSYNET_REJECTED] > 0 && c.arrived[0] < 300 &&
                c.network[LOSSYNET_DUPLICATE] == 0);
}

static void run_mad(struct rank *rank, struct lossynet_comm *comm) {
    float **x = take_vectors(2, SMALL_ELEMENTS);
    for (uint64_t step = 0; step < 20 && !rank->status; step++) {
        rank->status = lossynet_step_begin(comm, step);
        if (!rank->status) rank->status = lossynet_reduce(comm, x, false);
        if (!rank->status) rank->status = lossynet_broadcast(comm, x, false);
        if (!rank->status) rank->status = lossynet_gather_fresh(comm, x, x[1]);
    }
    free_vectors(x);
}

static void test_mad_peer(void **state) {
    (void)state;
    struct lossynet_settings settings = small_settings();
    struct rank rank[RANKS];
    mad = true;
    settings.network.peer_timeout = 0.5;
    for (int seed = 0; seed < 10; seed++) {
        capture_begin();
        run_ranks(2, &settings, ln_link_udp_open, run_mad, rank, damage);
        capture_end();
        for (int r = 0; r < 2; r++)
            assert_true(rank[r].status == LOSSYNET_OK || rank[r].status == LOSSYNET_LINK ||
                        rank[r].status == LOSSYNET_INVALID); /* while they greet each other */
    }
}

/* ---- silence ---- */

/* Rank 0 hears nothing for 3 s from the first packet of step 1 on: it ends the phase at its
 * deadline and goes on; what is sent to it meanwhile is lost, also its parameters, for which it
 * does not hear that they are welcome; and nothing after that. */
static _Atomic double deaf_from;
static int deaf(int rank, int peer, const uint8_t *datagram, size_t bytes) {
    (void)peer;
    if (rank != 0) return 1;
    if (deaf_from == 0 && is_data(datagram, bytes) && wire_get(datagram + 12, 4) == 1)
        deaf_from = ln_now();
    return deaf_from == 0 || ln_now() - deaf_from > 3;
}

static void test_straggler(void **state) {
    (void)state;
    struct lossynet_counters c;
    deaf_from = 0;
    steps_within(6, deaf, &c);
    assert_true(c.network[LOSSYNET_STRAGGLER] >= 1);
    assert_int_equal(c.arrived[0], 250);
    assert_true(c.arrived[1] >= 200);
}

static int cut(int rank, int peer, const uint8_t *datagram, size_t bytes) {
    (void)rank, (void)peer;
    if (is_data(datagram, bytes) && wire_get(datagram + 12, 4) == 1) atomic_store(&post.cut, true);
    return !atomic_load(&post.cut);
}

/* Nothing arrives any more in step 1: each rank names the other, within the time-out. */
static void test_dead_peer(void **state) {
    (void)state;
    struct lossynet_settings settings = small_settings();
    struct rank rank[RANKS];
    capture_begin();
    run_ranks(2, &settings, ln_link_udp_open, run_steps, rank, cut);
    const char *text = capture_end();
    assert_non_null(strstr(text, "rank 0, step 1, peer rank 1 "));
    assert_non_null(strstr(text, "rank 1, step 1, peer rank 0 "));
    /* Where the first has closed its socket before the other noticed, that hears of it so. */
    const char *silence = strstr(text, " was not heard for ");
    assert_non_null(silence);
    assert_true(atof(silence + strlen(" was not heard for ")) >= 2);
    for (int r = 0; r < 2; r++) {
        assert_int_equal(rank[r].status, LOSSYNET_LINK);
        assert_true(rank[r].seconds < 60); /* also on a busy machine */
    }
}

/* In step 1 rank 0 is cut off, from rank 1 a moment later, so that it needs rank 2 alone. Meanwhile rank 1
 * relays nothing. */
static _Atomic double cut_at;
static int cut_off(int rank, int peer, const uint8_t *datagram, size_t bytes) {
    if (wire_get(datagram + 8, 2) + wire_get(datagram + 10, 2) != (uint64_t)(rank + peer)) return 0;
    if (cut_at == 0 && is_data(datagram, bytes) && wire_get(datagram + 12, 4) == 1)
        cut_at = ln_now();
    if ((rank != 0 && peer != 0) || cut_at == 0) return 1;
    return rank != 2 && peer != 2 && ln_now() - cut_at < 0.1;
}

static bool missed[3][3]; /* by a rank, of another */
static void run_cut_off(struct rank *rank, struct lossynet_comm *comm) {
    float **x = take_vectors(1, SMALL_ELEMENTS);
    for (uint64_t step = 0; step < 3 && !rank->status; step++) {
        rank->status = lossynet_step_begin(comm, step);
        if (!rank->status) rank->status = lossynet_reduce(comm, x, false);
    }
    assert_true(lossynet_has_failed(comm, missed[rank->rank]));
    free_vectors(x);
}

static void count_message(void *context, const char *message) {
    (void)message;
    atomic_fetch_add((_Atomic int *)context, 1);
}

/* Who gives up one rank knows which others it would not hear either, also where it did not need
 * them. */
static void test_who_is_cut_off(void **state) {
    (void)state;
    struct lossynet_settings settings = small_settings();
    struct rank rank[RANKS];
    settings.workers = 3;
    settings.network.peer_timeout = 1.5;
    _Atomic int messages = 0; /* also those of the transports' own threads */
    settings.log = count_message;
    settings.log_context = &messages;
    cut_at = 0;
    capture_begin();
    run_ranks(3, &settings, ln_link_udp_open, run_cut_off, rank, cut_off);
    assert_string_equal(capture_end(), "");
    assert_true(messages >= 3);
    for (int r = 0; r < 3; r++) assert_int_equal(rank[r].status, LOSSYNET_LINK);
    assert_true(missed[0][1] && missed[0][2]);
    assert_true(missed[2][0] && !missed[2][1]);
}

static int cut_for_a_while(int rank, int peer, const uint8_t *datagram, size_t bytes) {
    if (cut(rank, peer, datagram, bytes)) cut_at = ln_now();
    return ln_now() - cut_at > 0.4 || !atomic_load(&post.cut);
}

/* The network comes back before the time-out: the run goes on, and only what was sent meanwhile is
 * lost. */
static void test_cut_and_back(void **state) {
    (void)state;
    struct lossynet_counters c;
    cut_at = ln_now();
    steps_with(cut_for_a_while, &c);
    assert_true(c.arrived[0] + c.arrived[1] > 400);
}

/* A rank that comes late loses nothing. */
static void come_late(struct rank *rank, struct lossynet_comm *comm) {
    if (rank->rank == 1) nanosleep(&(struct timespec){.tv_sec = 2}, NULL);
    run_steps(rank, comm);
}

static void test_late_rank(void **state) {
    (void)state;
    struct lossynet_settings settings = small_settings();
    struct rank rank[RANKS];
    settings.network.peer_timeout = 1; /* the link answers while its caller sleeps */
    run_ranks(2, &settings, ln_link_udp_open, come_late, rank, NULL);
    for (int r = 0; r < 2; r++) {
        assert_int_equal(rank[r].status, LOSSYNET_OK);
        assert_int_equal(rank[r].counters.arrived[0], 300);
        assert_int_equal(rank[r].counters.arrived[1], 300);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits_rounded),
        cmocka_unit_test(test_checksum),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_same_bits_of_bf16),
        cmocka_unit_test(test_same_bits_on_threads),
        cmocka_unit_test(test_rough_network),
        cmocka_unit_test(test_each_control_datagram_lost),
        cmocka_unit_test(test_chosen_packets),
        cmocka_unit_test(test_all_data_lost),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_socket),
        cmocka_unit_test(test_socket_over_ipv6),
        cmocka_unit_test(test_pace),
        cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_mad_peer),
        cmocka_unit_test(test_straggler),
        cmocka_unit_test(test_dead_peer),
        cmocka_unit_test(test_who_is_cut_off),
        cmocka_unit_test(test_cut_and_back),
        cmocka_unit_test(test_late_rank),
    };
    return cmocka_run_group_tests_name("lossynet over UDP", tests, NULL, NULL);
}
