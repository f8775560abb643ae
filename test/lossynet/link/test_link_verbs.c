/* test_link_verbs.c — tests verbs.c alone: four ranks, each on its own RDMA port.
 *
 * It is made for the virtual machine of dev/testbed/rdma_vm, where test_verbs.py runs it. That
 * machine has devices rxe0 to rxe3, on a network that loses nothing. On other machines, only tests
 * that need no device run.
 *
 * Four threads open the links, because opening is collective. After that, one thread uses all four.
 */
#include "test/lossynet/test_lossynet.h"

#include <arpa/inet.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <pthread.h>
#include <sys/socket.h>

enum { RANKS = 4 };

/* ---- ranks are threads ---- */

static struct {
    pthread_barrier_t barrier;
    uint8_t *all;
} meeting;

static lossynet_status share(void *context, const struct lossynet_world *world, void *all,
                             size_t bytes) {
    (void)context;
    size_t at = (size_t)world->rank * bytes;
    if (pthread_barrier_wait(&meeting.barrier) == PTHREAD_BARRIER_SERIAL_THREAD)
        meeting.all = calloc((size_t)world->ranks, bytes);
    pthread_barrier_wait(&meeting.barrier);
    memcpy(meeting.all + at, (uint8_t *)all + at, bytes);
    pthread_barrier_wait(&meeting.barrier);
    memcpy(all, meeting.all, (size_t)world->ranks * bytes);
    if (pthread_barrier_wait(&meeting.barrier) == PTHREAD_BARRIER_SERIAL_THREAD) free(meeting.all);
    return LOSSYNET_OK;
}

/* ---- what needs no device ---- */

#ifdef LOSSYNET_VERBS
#include "lossynet/link/verbs.h"

static void assert_nonsense_is_refused(void) {
    static const char *const wrong[] = {
        "",          ":1",     "rxe0:",     "rxe0:0", "rxe0:1:",  "rxe0:1x",   "rxe0:x",
        "rxe0:1:-1", "rxe0:9", "rxe0:1:99", ",rxe0",  "rxe0:256", "rxe0:1:1:1"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct verbs_port port;
        capture_begin();
        lossynet_status status = verbs_port_open(wrong[i], 0, &port);
        const char *said = capture_end();
        if (status != LOSSYNET_LINK) fail_msg("\"%s\" was taken", wrong[i]);
        assert_message(said, "expected DEVICE[:PORT[:GID_INDEX]]");
    }
}
#endif

static void test_open_without_a_port(void **state) {
    (void)state;
    struct ln_link *link = (struct ln_link *)&meeting;
    struct ln_link_settings settings = {
        .world = {.rank = 0, .ranks = 1, .local_rank = 0, .local_ranks = 1, .share = share},
        .network.interface = "nowhere0:1",
    };
    pthread_barrier_init(&meeting.barrier, NULL, 1);
    capture_begin();
    lossynet_status status = ln_link_verbs_open(&settings, &link);
    const char *said = capture_end();
    pthread_barrier_destroy(&meeting.barrier);
    assert_int_equal(status, LOSSYNET_LINK);
    assert_null(link);
#ifdef LOSSYNET_VERBS
    assert_message(said, "interface nowhere0:1: expected DEVICE[:PORT[:GID_INDEX]]");
    assert_message(said, ln_link_verbs_available() ? "ACTIVE" : "RDMA ports here: ");
    assert_nonsense_is_refused();
#else
    assert_false(ln_link_verbs_available());
    assert_message(said, "built without RDMA");
#endif
}

#ifdef LOSSYNET_VERBS
/* ---- four ranks ---- */

static const char INTERFACES[] = "rxe0,rxe1:1,rxe2,rxe3:1:1";

static struct rank {
    struct ln_link_settings settings;
    struct ln_link *link;
    lossynet_status status;
    pthread_t thread;
} ranks[RANKS];

static void *open_one(void *argument) {
    struct rank *rank = argument;
    rank->status = ln_link_verbs_open(&rank->settings, &rank->link);
    return NULL;
}

/* Settings may differ from the usual in one rank: `odd` is its interface. */
static void open_all(size_t payload_bytes, const char *odd) {
    pthread_barrier_init(&meeting.barrier, NULL, RANKS);
    for (int r = 0; r < RANKS; r++) {
        ranks[r].settings = (struct ln_link_settings){
            .world =
                {.rank = r, .ranks = RANKS, .local_rank = r, .local_ranks = RANKS, .share = share},
            .run = 0x1234567890abcdefu,
            .payload_bytes = payload_bytes,
            .network.interface = odd && r == 2 ? odd : INTERFACES,
            .network.dscp = 1,
        };
        pthread_create(&ranks[r].thread, NULL, open_one, &ranks[r]);
    }
    for (int r = 0; r < RANKS; r++) pthread_join(ranks[r].thread, NULL);
    pthread_barrier_destroy(&meeting.barrier);
}

static void close_all(void) {
    for (int r = 0; r < RANKS; r++) ranks[r].link->close(ranks[r].link);
}

/* ---- datagrams ---- */

/* A header that says what is in the payload, and a payload that follows from it. */
static struct ln_datagram make(uint8_t *payload, size_t length, uint32_t number) {
    struct ln_datagram d = {.payload = payload, .length = length};
    for (int i = 0; i < WIRE_HEADER_BYTES; i++) d.header[i] = (uint8_t)(number + (uint32_t)i);
    wire_put(d.header, number, 4);
    for (size_t i = 0; i < length; i++) payload[i] = (uint8_t)random_bits(number, i, length);
    return d;
}

static void assert_arrived(const struct ln_arrival *a, int peer, size_t length, uint32_t number) {
    static uint8_t payload[4096];
    assert_int_equal(a->peer, peer);
    assert_int_equal(a->count, WIRE_HEADER_BYTES + length);
    struct ln_datagram d = make(payload, length, number);
    assert_memory_equal(a->bytes, d.header, WIRE_HEADER_BYTES);
    assert_memory_equal(a->bytes + WIRE_HEADER_BYTES, payload, length);
}

/* Takes what comes within so many seconds, or one batch; the last arrivals stay in place. */
static int take(int rank, struct ln_arrival *arrivals, double seconds) {
    struct ln_link *link = ranks[rank].link;
    for (double end = ln_now() + seconds;;) {
        int n = link->receive(link, arrivals);
        if (n > 0 || ln_now() >= end) return n;
        link->wait(link, end - ln_now());
    }
}

/* How many come until nothing has for a while. */
static int drain(int rank) {
    struct ln_arrival arrivals[LOSSYNET_BATCH];
    int count = 0;
    for (int n; (n = take(rank, arrivals, 0.1)) > 0;) count += n;
    return count;
}

/* Most cases share these links: to open some takes its time where all is emulated. */
static int open_shared(void **state) {
    (void)state;
    open_all(0, NULL);
    for (int r = 0; r < RANKS; r++)
        if (ranks[r].status != LOSSYNET_OK) return -1;
    return 0;
}

static int close_shared(void **state) {
    (void)state;
    close_all();
    return 0;
}

static void assert_delivers(int from, int to, uint8_t *payload, size_t length) {
    static uint32_t number;
    struct ln_arrival arrivals[LOSSYNET_BATCH];
    struct ln_datagram d = make(payload, length, ++number);
    struct ln_link *link = ranks[from].link;
    assert_int_equal(link->send(link, to, &d, 1), LOSSYNET_OK);
    assert_int_equal(take(to, arrivals, 5), 1);
    assert_arrived(&arrivals[0], from, length, number);
}

/* ---- links that are open ---- */

static void test_all_sizes(void **state) {
    (void)state;
    struct ln_link *link = ranks[0].link;
    assert_string_equal(link->name, "verbs");
    assert_false(link->features.reliable);
    assert_int_equal(link->features.payload_most, 4096 - WIRE_HEADER_BYTES);
    assert_true(link->features.receive_queue >= 4096);
    assert_true(link->memory_bytes > (size_t)link->features.receive_queue * 4096);
    assert_true(link->memory_bytes <= ln_link_verbs_memory(RANKS, 0));
    static uint8_t payload[2 * 4096], registered[2 * 4096];
    for (int r = 0; r < RANKS; r++)
        assert_true(ranks[r].link->register_memory(ranks[r].link, registered, 2 * 4096));
    static uint8_t parts[8 * 4096]; /* 1, 3 and 6 are registered, not in this order */
    static const int part[] = {3, 6, 1};
    for (int i = 0; i < 3; i++)
        assert_true(link->register_memory(link, parts + part[i] * 4096, 4096));
    for (int i = 0; i < 8; i++) {
        assert_delivers(0, 1, parts + i * 4096, 4096 - WIRE_HEADER_BYTES);
        assert_delivers(0, 2, parts + i * 4096 - i * 100, 1000);
    }
    for (size_t length = 0; length <= link->features.payload_most; length += length < 16 ? 1 : 331)
        for (int pair = 0; pair < RANKS * RANKS; pair++) {
            int from = pair / RANKS, to = pair % RANKS;
            if (from == to || (length > 4 && pair % 5 != 1)) continue;
            assert_delivers(from, to, payload, length);
            assert_delivers(from, to, registered + length % 7, length);
        }
    for (int r = 1; r < RANKS; r++) {
        assert_delivers(0, r, payload, link->features.payload_most);
        assert_delivers(r, 0, registered, link->features.payload_most);
        assert_delivers(0, r, registered + 2 * 4096 - link->features.payload_most,
                        link->features.payload_most);
    }
    for (int r = 0; r < RANKS; r++) assert_int_equal(drain(r), 0);
}

/* Full batches, to all; memory is used again as soon as send returns, registered memory once it has
 * settled. */
static void test_batches(void **state) {
    (void)state;
    enum { ROUNDS = 12, LENGTH = 1000 };
    static uint8_t payload[LOSSYNET_BATCH][LENGTH];
    struct ln_datagram batch[LOSSYNET_BATCH];
    struct ln_arrival arrivals[LOSSYNET_BATCH];
    struct ln_link *link = ranks[3].link;
    for (int in_place = 0; in_place < 2; in_place++) {
        if (in_place) assert_true(link->register_memory(link, payload, sizeof payload));
        uint32_t sent = 0, got[RANKS] = {0};
        for (int round = 0; round < ROUNDS; round++)
            for (int to = 0; to < 3; to++) {
                for (int i = 0; i < LOSSYNET_BATCH; i++)
                    batch[i] = make(payload[i], LENGTH, sent / 3 + (uint32_t)i);
                assert_int_equal(link->send(link, to, batch, LOSSYNET_BATCH), LOSSYNET_OK);
                sent += LOSSYNET_BATCH;
                if (in_place) link->settle(link);
                memset(payload, 0, sizeof payload);
                memset(batch, 0, sizeof batch);
            }
        for (int to = 0; to < 3; to++) {
            for (int n; got[to] < sent / 3; got[to] += (uint32_t)n) {
                n = take(to, arrivals, 30);
                assert_true(n > 0);
                for (int i = 0; i < n; i++) {
                    uint32_t number = (uint32_t)wire_get(arrivals[i].bytes, 4);
                    assert_true(number < sent);
                    assert_arrived(&arrivals[i], 3, LENGTH, number);
                }
            }
            assert_int_equal(drain(to), 0);
        }
    }
}

static void test_larger_than_the_path(void **state) {
    (void)state;
    static uint8_t payload[8192];
    struct ln_link *link = ranks[0].link;
    struct ln_datagram batch[2] = {make(payload, 64, 1), make(payload, 64, 2)};
    batch[1].length = link->features.payload_most + 4;
    capture_begin();
    lossynet_status status = link->send(link, 1, batch, 2);
    assert_message(capture_end(), "a payload of 4072 bytes: expected at most 4068");
    assert_int_equal(status, LOSSYNET_INVALID);
    assert_int_equal(drain(1), 0); /* nothing of the batch was sent */
    assert_delivers(0, 1, payload, link->features.payload_most);
}

/* The class of the next datagram that an interface sees: its IP header's DSCP. */
static int class_seen(int watch) {
    uint8_t packet[256];
    for (;;) {
        ssize_t bytes = recv(watch, packet, sizeof packet, 0);
        if (bytes < 0) return -1;
        if (bytes > 24 && packet[9] == IPPROTO_UDP && wire_get(packet + 22, 2) == htons(4791))
            return packet[1] >> 2;
    }
}

static void test_traffic_class(void **state) {
    (void)state;
    static uint8_t payload[64];
    struct ln_arrival arrivals[LOSSYNET_BATCH];
    struct ln_link *link = ranks[0].link;
    int watch = socket(AF_PACKET, SOCK_DGRAM, htons(ETH_P_IP));
    struct sockaddr_ll v3 = {.sll_family = AF_PACKET,
                             .sll_protocol = htons(ETH_P_IP),
                             .sll_ifindex = (int)if_nametoindex("v3")};
    assert_int_equal(bind(watch, (struct sockaddr *)&v3, sizeof v3), 0);
    setsockopt(watch, SOL_SOCKET, SO_RCVTIMEO, &(struct timeval){.tv_sec = 5},
               sizeof(struct timeval));
    for (int i = 0; i < 2; i++) {
        struct ln_datagram d = make(payload, 64, (uint32_t)i);
        d.bulk = i % 2;
        assert_int_equal(link->send(link, 3, &d, 1), LOSSYNET_OK);
        assert_int_equal(take(3, arrivals, 5), 1);
        assert_arrived(&arrivals[0], 0, 64, (uint32_t)i);
        assert_int_equal(class_seen(watch), i % 2);
    }
    close(watch);
}

/* A queue pair that is none of ours, and knows the qkey; one that does not. */
static void test_strangers(void **state) {
    (void)state;
    static struct verbs_queue stranger;
    static uint8_t payload[256];
    struct ln_arrival arrivals[LOSSYNET_BATCH];
    uint32_t right = (uint32_t)ln_mix(ranks[0].settings.run) & 0x7fffffff;
    for (int knows = 0; knows < 2; knows++) {
        memset(&stranger, 0, sizeof stranger);
        assert_int_equal(verbs_port_open("rxe1", 0, &stranger.port), LOSSYNET_OK);
        assert_int_equal(verbs_queue_open(&stranger, knows ? right : right ^ 1), LOSSYNET_OK);
        struct ibv_ah_attr attr = {.is_global = 1,
                                   .port_num = 1,
                                   .grh = {.sgid_index = (uint8_t)stranger.port.gid_index,
                                           .dgid = {{[10] = 0xff, [11] = 0xff, 10, 9, 8, 1}},
                                           .hop_limit = 64}};
        struct ln_datagram d = make(payload, sizeof payload, 77);
        struct ibv_ah *ah = ibv_create_ah(stranger.pd, &attr);
        assert_non_null(ah);
        for (uint32_t qpn = 2; qpn < 64; qpn++) /* it has to guess this too */
            assert_int_equal(
                verbs_queue_send(&stranger, &(struct verbs_address){ah, qpn, ah}, &d, 1),
                LOSSYNET_OK);
        verbs_queue_flush(&stranger);
        int n = take(0, arrivals, knows ? 5 : 0.3);
        assert_int_equal(n, knows);
        if (knows) assert_arrived(&arrivals[0], -1, sizeof payload, 77);
        ibv_destroy_ah(ah);
        verbs_queue_close(&stranger);
        verbs_port_close(&stranger.port);
    }
    assert_delivers(1, 0, payload, 16);
}

/* Waits until rank 0's device has taken all datagrams that are on their way. */
static void wait_until_quiet(void) {
    char before[32] = "", now[32];
    for (int looks = 0; looks < 30; looks++) {
        FILE *file = fopen("/sys/class/infiniband/rxe0/ports/1/hw_counters/rcvd_pkts", "r");
        assert_non_null(file);
        assert_non_null(fgets(now, sizeof now, file));
        fclose(file);
        if (strcmp(now, before) == 0) return;
        strcpy(before, now);
        nanosleep(&(struct timespec){.tv_nsec = 500000000}, NULL);
    }
}

/* A rank that does not look loses what does not fit, and nothing else. */
static void test_overrun(void **state) {
    (void)state;
    enum { MORE = 640 };
    static uint8_t payload[LOSSYNET_BATCH];
    struct ln_datagram batch[LOSSYNET_BATCH];
    struct ln_link *link = ranks[1].link;
    int queue = ranks[0].link->features.receive_queue, sent = 0;
    for (int i = 0; i < LOSSYNET_BATCH; i++) batch[i] = make(payload, 8, (uint32_t)i);
    assert_int_equal(drain(0), 0); /* and all its buffers are posted */
    for (; sent < queue + MORE; sent += LOSSYNET_BATCH)
        assert_int_equal(link->send(link, 0, batch, LOSSYNET_BATCH), LOSSYNET_OK);
    wait_until_quiet();
    int got = drain(0);
    if (got < queue || got >= sent) fail_msg("%d of %d arrived, room was for %d", got, sent, queue);
    assert_int_equal(ranks[0].link->overruns(ranks[0].link), 0); /* Soft-RoCE does not count them */
    for (int i = 0; i < 3; i++) assert_delivers(1, 0, payload, 8);
    assert_delivers(0, 1, payload, 8);
}

static void *wake_later(void *link) {
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    ((struct ln_link *)link)->wake(link);
    return NULL;
}

static void test_wait(void **state) {
    (void)state;
    static uint8_t payload[64];
    struct ln_arrival arrivals[LOSSYNET_BATCH];
    struct ln_link *link = ranks[0].link, *other = ranks[1].link;
    double start = ln_now();
    int waits = 0;
    for (; ln_now() < start + 0.05; waits++) link->wait(link, 0.05);
    assert_true(waits < 5); /* it may end early for what was received before */

    link->wake(link); /* before the wait */
    start = ln_now();
    link->wait(link, 20);
    pthread_t thread;
    pthread_create(&thread, NULL, wake_later, link);
    link->wait(link, 20);
    pthread_join(thread, NULL);
    struct ln_datagram d = make(payload, sizeof payload, 5);
    for (int i = 0; i < 3; i++) { /* it has come when the wait begins */
        other->send(other, 0, &d, 1);
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
        link->wait(link, 20);
        assert_true(take(0, arrivals, 5) > 0);
    }
    for (int i = 0; i < 100; i++) { /* whenever it comes: before, during or after the wait */
        other->send(other, 0, &d, 1);
        while (link->receive(link, arrivals) == 0) link->wait(link, 20);
        assert_arrived(&arrivals[0], 1, sizeof payload, 5);
    }
    assert_true(ln_now() - start < 20);
}

/* Of datagrams that are sent now one arrives soon, after older ones. */
static void assert_comes_back(int from, int to) {
    static uint8_t payload[16];
    struct ln_arrival arrivals[LOSSYNET_BATCH];
    struct ln_datagram d = make(payload, sizeof payload, 99);
    bool came = false;
    for (double end = ln_now() + 20; !came && ln_now() < end;) {
        assert_int_equal(ranks[from].link->send(ranks[from].link, to, &d, 1), LOSSYNET_OK);
        int n = take(to, arrivals, 0.1);
        for (int i = 0; i < n; i++) came |= wire_get(arrivals[i].bytes, 4) == 99;
    }
    assert_true(came);
}

/* The cable is pulled, and put back. Senders never wait long, and all goes on. */
static void test_network_cut(void **state) {
    (void)state;
    static uint8_t payload[64];
    struct ln_datagram batch[LOSSYNET_BATCH];
    struct ln_link *link = ranks[1].link;
    link->register_memory(link, payload, sizeof payload);
    assert_delivers(1, 0, payload, 8);
    for (int i = 0; i < LOSSYNET_BATCH; i++) batch[i] = make(payload, 64, 7);
    if (system("ip link set b1 down")) fail_msg("no cable to pull");
    capture_begin();
    double start = ln_now();
    for (int i = 0; i < 100; i++) /* many times what its queue holds */
        assert_int_equal(link->send(link, 0, batch, LOSSYNET_BATCH), LOSSYNET_OK);
    for (int i = 0; i < 10; i++) link->wait(link, 0.01);
    double took = ln_now() - start;
    assert_message(capture_end(), "rank 1, RDMA port rxe1:1: the device reports: port error");
    assert_true(took < 5);
    if (system("ip link set b1 up")) fail_msg("the cable does not go back");
    assert_comes_back(1, 0);
    assert_comes_back(0, 1);
}

/* ---- links that do not open as wished ---- */

static void test_packets_larger_than_the_path(void **state) {
    (void)state;
    capture_begin();
    open_all(4072, NULL);
    const char *said = capture_end();
    for (int r = 0; r < RANKS; r++) {
        assert_int_equal(ranks[r].status, LOSSYNET_INVALID);
        assert_null(ranks[r].link);
    }
    assert_non_null(strstr(said, "packets of 4072 bytes: expected at most 4068"));
}

/* One rank that fails does not leave the others waiting. */
static void test_one_rank_without_a_port(void **state) {
    (void)state;
    capture_begin();
    open_all(0, "rxe7");
    const char *said = capture_end();
    for (int r = 0; r < RANKS; r++) assert_int_equal(ranks[r].status, LOSSYNET_LINK);
    assert_non_null(strstr(said, "interface rxe7: expected"));
    assert_non_null(strstr(said, "rank 0: rank 2 has no RDMA port: see its message"));
    int lines = 0;
    for (const char *c = said; *c; c++) lines += *c == '\n';
    assert_int_equal(lines, RANKS);
}

#endif

/* test_verbs.py looks for these, and conftest.py for cmocka_unit_test. */
#define IN_THE_GUEST cmocka_unit_test

int main(void) {
    static const struct CMUnitTest portable[] = {
        cmocka_unit_test(test_open_without_a_port),
    };
    int failed = cmocka_run_group_tests_name("without a device", portable, NULL, NULL);
#ifdef LOSSYNET_VERBS
    static const struct CMUnitTest open[] = {
        IN_THE_GUEST(test_all_sizes),
        IN_THE_GUEST(test_batches),
        IN_THE_GUEST(test_larger_than_the_path),
        IN_THE_GUEST(test_traffic_class),
        IN_THE_GUEST(test_strangers),
        IN_THE_GUEST(test_overrun),
        IN_THE_GUEST(test_wait),
        IN_THE_GUEST(test_network_cut),
    };
    static const struct CMUnitTest opening[] = {
        IN_THE_GUEST(test_packets_larger_than_the_path),
        IN_THE_GUEST(test_one_rank_without_a_port),
    };
    struct verbs_port port;
    capture_begin();
    bool there = verbs_port_open("rxe3", 0, &port) == LOSSYNET_OK;
    capture_end();
    if (there) verbs_port_close(&port);
    if (there) failed += cmocka_run_group_tests_name("opening", opening, NULL, NULL);
    if (there) failed += cmocka_run_group_tests_name("open", open, open_shared, close_shared);
    if (!there) fprintf(stderr, "no RDMA devices here: test_verbs.py runs the rest in a guest\n");
#endif
    return failed;
}
