/* test_lossynet_receive.c — what a rank does with the datagrams it gets, good, broken and hostile.
 *
 * A net of rank 0 of 2, two workers in each; its only peer is this test, which speaks when rank 0
 * listens. Run under the address sanitizer, a read or write outside of what a datagram may touch
 * ends the test.
 */
#include "test_lossynet.h"

/* ---- the peer ---- */

enum { FEED_BYTES = 1 << 16 };
static struct {
    struct lossynet_link link;
    struct lossynet_link_settings settings;
    uint64_t sent;
    int known_as; /* the rank that the link names as the sender */
    uint8_t bytes[FEED_BYTES];
    size_t used;
} peer;

static lossynet_status peer_begin(struct lossynet_link *link, lossynet_phase phase, uint64_t step) {
    (void)link, (void)phase, (void)step;
    return LOSSYNET_OK;
}

static lossynet_status peer_send(struct lossynet_link *link, int rank,
                                 const struct lossynet_datagram *batch, int count) {
    (void)link, (void)batch;
    assert_int_equal(rank, 1);
    peer.sent += (uint64_t)count;
    return LOSSYNET_OK;
}

static lossynet_status peer_nothing(struct lossynet_link *link) {
    (void)link;
    return LOSSYNET_OK;
}

static lossynet_status peer_progress(struct lossynet_link *link) {
    (void)link;
    for (size_t at = 0; at < peer.used;) {
        size_t bytes = wire_datagram_bytes(peer.bytes + at, peer.used - at);
        /* A copy that ends where the datagram ends, so that address sanitizer sees overruns. */
        uint8_t *copy = malloc(bytes);
        memcpy(copy, peer.bytes + at, bytes);
        peer.settings.receive(peer.settings.context, peer.known_as, copy, bytes);
        free(copy);
        at += bytes;
    }
    peer.used = 0;
    return LOSSYNET_OK;
}

static lossynet_status peer_all_gather(struct lossynet_link *link, void *data,
                                       const size_t *offset) {
    (void)link;
    memcpy((char *)data + offset[1], (char *)data + offset[0], offset[1] - offset[0]);
    return LOSSYNET_OK;
}

static void peer_close(struct lossynet_link *link) {
    (void)link;
}

static lossynet_status peer_open(const struct lossynet_link_settings *settings,
                                 struct lossynet_link **out) {
    memset(&peer, 0, sizeof peer);
    peer.settings = *settings;
    peer.known_as = 1;
    peer.link = (struct lossynet_link){
        .name = "test",
        .begin = peer_begin,
        .send = peer_send,
        .flush = peer_nothing,
        .progress = peer_progress,
        .end = peer_nothing,
        .all_gather = peer_all_gather,
        .close = peer_close,
    };
    *out = &peer.link;
    return LOSSYNET_OK;
}

static const size_t peer_elements[2] = {200, 90}; /* 4 owners: chunks of 64 and of 32 */

static struct lossynet *open_peer(void) {
    struct lossynet_world world = {.rank = 0, .ranks = 2};
    struct lossynet_settings settings = simple_settings(4, peer_elements, 2, 0);
    struct lossynet *net;
    assert_int_equal(lossynet_net_open(&world, &settings, peer_open, &net), LOSSYNET_OK);
    assert_string_equal(lossynet_link_name(net), "test");
    return net;
}

static struct wire_header data_header(const struct lossynet *net, lossynet_phase phase) {
    return (struct wire_header){.magic = WIRE_MAGIC,
                                .version = WIRE_VERSION,
                                .type = WIRE_DATA,
                                .phase = (uint8_t)phase,
                                .run = net->run,
                                .step = net->step,
                                .sender = 2,
                                .receiver = 1,
                                .bucket = 0,
                                .packet = 0,
                                .length = 64};
}

/* Adds a datagram with `bytes` of payload, each float 7. */
static void feed(struct wire_header header, size_t bytes) {
    wire_encode(peer.bytes + peer.used, &header);
    float seven = 7;
    for (size_t i = 0; i < bytes; i += 4)
        memcpy(peer.bytes + peer.used + WIRE_HEADER_BYTES + i, &seven,
               bytes - i < 4 ? bytes - i : 4);
    peer.used += WIRE_HEADER_BYTES + bytes;
}

static void feed_done(const struct lossynet *net, lossynet_phase phase, uint32_t packets) {
    struct wire_header h = data_header(net, phase);
    h.type = WIRE_DONE;
    h.receiver = 0;
    h.packet = packets;
    h.length = 0;
    feed(h, 0);
}

/* ---- tests ---- */

static void test_wire(void **state) {
    (void)state;
    struct wire_header in = {
        WIRE_MAGIC,         1,          2,         1,          0,          0x1122334455667788,
        0x99aabbccddeeff00, 0x1234,     0x5678,    0x9abcdef0, 0x0fedcba9, 0x87654321,
        0x01020304,         0x05060708, 0x090a0b0c};
    struct wire_header out;
    uint8_t bytes[WIRE_HEADER_BYTES];
    wire_encode(bytes, &in);
    wire_decode(&out, bytes);
    assert_true(in.run == out.run && in.step == out.step && in.sender == out.sender &&
                in.receiver == out.receiver && in.bucket == out.bucket && in.packet == out.packet &&
                in.length == out.length && in.type == out.type && in.phase == out.phase &&
                in.version == out.version && in.magic == out.magic && in.round == out.round &&
                in.sequence == out.sequence && in.checksum == out.checksum);
    /* The layout that wire.h draws. */
    const uint8_t drawn[WIRE_HEADER_BYTES] = {
        'L',  'N',  'E',  'T',  1,    2,    1,    0,    0x88, 0x77, 0x66, 0x55, 0x44,
        0x33, 0x22, 0x11, 0x00, 0xff, 0xee, 0xdd, 0xcc, 0xbb, 0xaa, 0x99, 0x34, 0x12,
        0x78, 0x56, 0xf0, 0xde, 0xbc, 0x9a, 0xa9, 0xcb, 0xed, 0x0f, 0x21, 0x43, 0x65,
        0x87, 0x04, 0x03, 0x02, 0x01, 0x08, 0x07, 0x06, 0x05, 0x0c, 0x0b, 0x0a, 0x09};
    assert_memory_equal(bytes, drawn, sizeof drawn);
}

/* Good datagrams land where they belong, and only there. */
static void test_receive(void **state) {
    (void)state;
    struct lossynet *net = open_peer();
    float **x = take_vectors(2, 290);
    lossynet_step_begin(net, 5);

    /* Worker 2's first packet for worker 1: shard at 64; with its own 0 that averages to 7/2. */
    feed(data_header(net, LOSSYNET_GRADIENT), 64);
    feed_done(net, LOSSYNET_GRADIENT, 1);
    net->estimator = LOSSYNET_MEAN; /* over own, worker 0's (p = 0 within the rank) and 2's */
    assert_int_equal(lossynet_reduce(net, x, false), LOSSYNET_OK);
    for (size_t e = 0; e < 290; e++) {
        assert_true(x[0][e] == 0);
        assert_close(x[1][e], e >= 64 && e < 80 ? 7 / 3.0 : 0, 1e-6);
    }
    /* Two owners' 64 + 64 of bucket 0, 32 + 26 of bucket 1 (owners 2, 3 hold 72, 26), each to two
     * workers from two: all that is not lost has left. */
    assert_int_equal(peer.sent, 2 * (4 + 1 + 2 + 0) + 1);

    memset(x[1], 0, 290 * sizeof(float));
    struct wire_header h = data_header(net, LOSSYNET_PARAMETER); /* worker 2: at 128 */
    h.packet = 3;
    feed(h, 64);
    h.bucket = 1; /* at 200 + 64, the last packet of the shard: 10 elements */
    h.packet = 1;
    h.length = 40;
    feed(h, 40);
    feed_done(net, LOSSYNET_PARAMETER, 2);
    assert_int_equal(lossynet_broadcast(net, x, false), LOSSYNET_OK);
    for (size_t e = 0; e < 290; e++)
        assert_true(x[1][e] == ((e >= 176 && e < 192) || e >= 280 ? 7 : 0));
    size_t cursor = 0, offset, count, runs = 0;
    const size_t fresh[3][2] = {{0, 128}, {176, 16}, {0, 0}};
    while (lossynet_next_fresh(net, 1, &cursor, &offset, &count)) {
        if (runs < 2) {
            assert_int_equal(offset, fresh[runs][0]);
            assert_int_equal(count, fresh[runs][1]);
        }
        runs++;
    }
    assert_int_equal(runs, 4); /* and 200 ... 263, 280 ... 289 */
    free_vectors(x);
    lossynet_close(net);
}

static void test_rejected(void **state) {
    (void)state;
    struct lossynet *net = open_peer();
    float **x = take_vectors(2, 290);
    uint64_t step = 0;
    for (int phase = 0; phase < 2; phase++) {
        const struct wire_header good = data_header(net, (lossynet_phase)phase);
        struct lossynet_rejected want = {0};
        peer.known_as = phase ? -1 : 1; /* a link may not know whom a datagram came from */
        memset(&net->rejected, 0, sizeof net->rejected);
        lossynet_step_begin(net, step);
        struct wire_header h;
#define WRONG(counter, change) (h = good, change, feed(h, h.length), want.counter++)
        WRONG(foreign, h.magic ^= 1);
        WRONG(foreign, h.run ^= 1);
        WRONG(version, h.version = 1);
        WRONG(version, h.version = 0);
        WRONG(stale, h.step++);
        WRONG(stale, h.step--);
        WRONG(stale, h.phase ^= 1);
        WRONG(invalid, h.phase = 2);
        WRONG(invalid, h.zero = 1);
        WRONG(invalid, h.type = 0);
        WRONG(invalid, h.type = 3);
        WRONG(invalid, h.sender = 4);
        WRONG(invalid, h.sender = 65535);
        WRONG(invalid, h.sender = 0);   /* hosted here */
        WRONG(invalid, h.receiver = 2); /* hosted there */
        WRONG(invalid, h.receiver = 65535);
        WRONG(invalid, h.bucket = 2);
        WRONG(invalid, h.bucket = UINT32_MAX);
        WRONG(invalid, h.packet = 4);
        WRONG(invalid, h.packet = UINT32_MAX);
        WRONG(invalid, h.length = 60);
        WRONG(invalid, h.length = 68);
        WRONG(invalid, h.length = 0);
        WRONG(invalid, (h.type = WIRE_DONE, h.length = 0)); /* receiver 1 is not its first worker */
        WRONG(invalid, (h.type = WIRE_DONE, h.receiver = 0)); /* has a payload */
        feed(good, 64);
        feed(good, 64);
        want.duplicate++;
        feed_done(net, (lossynet_phase)phase, 1);
        feed_done(net, (lossynet_phase)phase, 1);
        want.duplicate++;
        h = good, h.length = 1000; /* claims more than there is: the rest of the train is dropped */
        feed(h, 64);
        want.truncated++;
        lossynet_status status =
            phase ? lossynet_broadcast(net, x, false) : lossynet_reduce(net, x, false);
        assert_int_equal(status, LOSSYNET_OK);
        assert_memory_equal(&net->rejected, &want, sizeof want);

        /* Shorter than a header, of any length, also outside a phase. */
        for (size_t bytes = 0; bytes < WIRE_HEADER_BYTES; bytes++) {
            uint8_t *cut = malloc(bytes + 1);
            memset(cut, 0xff, bytes);
            lossynet_exchange_receive(net, 1, cut, bytes);
            free(cut);
        }
        assert_int_equal(net->rejected.truncated, want.truncated + WIRE_HEADER_BYTES);
        uint8_t whole[WIRE_HEADER_BYTES + 64] = {0};
        wire_encode(whole, &good);
        lossynet_exchange_receive(net, 1, whole, sizeof whole); /* no phase is open */
        lossynet_exchange_receive(net, 0, whole, sizeof whole); /* not from that rank */
        assert_int_equal(net->rejected.stale, want.stale + 1);
        assert_int_equal(net->rejected.invalid, want.invalid + 1);
    }
    free_vectors(x);
    lossynet_close(net);
}

/* A DONE that does not match what came: a reliable link has lost something. */
static void test_done_too_early(void **state) {
    (void)state;
    struct lossynet *net = open_peer();
    float **x = take_vectors(2, 290);
    feed(data_header(net, LOSSYNET_GRADIENT), 64);
    feed_done(net, LOSSYNET_GRADIENT, 2);
    capture_begin();
    lossynet_status status = lossynet_reduce(net, x, false);
    assert_message(capture_end(), "rank 1 sent 2 packets, 1 arrived");
    assert_int_equal(status, LOSSYNET_PROTOCOL);
    free_vectors(x);
    lossynet_close(net);
}

/* Good datagrams with bits flipped, cut short and run together: nothing is written outside the
 * packet a valid header names. */
static void test_random_datagrams(void **state) {
    (void)state;
    struct lossynet *net = open_peer();
    float **x = take_vectors(2, 290);
    capture_begin(); /* DONEs that announce any number */
    for (uint64_t i = 0; i < 60000; i++) {
        lossynet_phase phase = (lossynet_phase)(i % 2);
        if (i % 64 < 2) lossynet_step_begin(net, i / 64);
        net->exchange = (struct lossynet_exchange){
            .open = true, .phase = phase, .vectors = x, .waiting = 1000000};
        net->peers[1].done = false;
        struct wire_header h = data_header(net, phase);
        h.packet = (uint32_t)(random_bits(1, i, 0) % 5);
        h.bucket = (uint32_t)(random_bits(1, i, 1) % 2);
        h.sender = (uint16_t)(random_bits(1, i, 2) % 4);
        h.receiver = (uint16_t)(random_bits(1, i, 3) % 4);
        if (i % 5 == 0) h.type = WIRE_DONE, h.length = 0;
        peer.used = 0;
        feed(h, h.length);
        for (uint64_t flips = random_bits(1, i, 4) % 4; flips > 0; flips--)
            peer.bytes[random_bits(2, i, flips) % peer.used] ^=
                (uint8_t)(1u << random_bits(3, i, flips) % 8);
        if (i % 7 == 0) peer.used = random_bits(4, i, 0) % (peer.used + 1);
        peer_progress(&peer.link);
    }
    capture_end();
    struct lossynet_rejected *r = &net->rejected;
    assert_true(r->truncated && r->foreign && r->version && r->invalid && r->stale && r->duplicate);
    free_vectors(x);
    lossynet_close(net);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_wire),
        cmocka_unit_test(test_receive),
        cmocka_unit_test(test_rejected),
        cmocka_unit_test(test_done_too_early),
        cmocka_unit_test(test_random_datagrams),
    };
    return cmocka_run_group_tests_name("lossynet, receiving", tests, NULL, NULL);
}
