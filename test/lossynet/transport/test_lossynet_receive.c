/* test_lossynet_receive.c — tests how a rank handles datagrams: good, broken and hostile ones.
 *
 * The comm is of rank 0 of 2, with two workers in each rank. Its only peer is this test, which
 * puts datagrams into a link that carries nothing by itself. Under the address sanitizer, a read
 * or write outside of what a datagram may touch ends the test.
 */
#include "fake_peer.h"

/* ---- tests ---- */

static void test_wire(void **state) {
    (void)state;
    struct wire_header in = {.magic = WIRE_MAGIC,
                             .version = 6,
                             .kind = 1,
                             .elements = 2,
                             .run = 0x11223344,
                             .sender = 0x1234,
                             .receiver = 0x5678,
                             .index = 0x87654321,
                             .sequence = 0x05060708,
                             .checksum = 0x090a0b0c,
                             .length = 5};
    struct wire_header out;
    uint8_t bytes[WIRE_HEADER_BYTES];
    for (in.type = WIRE_DATA; in.type < WIRE_TYPES; in.type++) {
        in.bucket = in.type == WIRE_DATA ? WIRE_BUCKETS - 1 : 0;
        in.packet = in.type == WIRE_DATA ? WIRE_PACKETS - 2 : 0xfedcba98;
        in.index = in.type == WIRE_DATA ? 0x654321 : 0x87654321;
        in.gradients = in.type == WIRE_DATA ? 0x87 : 0;
        wire_encode(bytes, &in);
        wire_decode(&out, bytes, WIRE_HEADER_BYTES + in.length);
        assert_true(in.run == out.run && in.sender == out.sender && in.receiver == out.receiver &&
                    in.bucket == out.bucket && in.packet == out.packet && in.length == out.length &&
                    in.type == out.type && in.kind == out.kind && in.elements == out.elements &&
                    in.version == out.version && in.magic == out.magic && in.index == out.index &&
                    in.sequence == out.sequence && in.checksum == out.checksum &&
                    in.gradients == out.gradients);
    }
    in.type = WIRE_DATA, in.bucket = 0x123, in.packet = 0x45678;
    in.index = 0x654321, in.gradients = 0x87;
    wire_encode(bytes, &in);
    /* The partition that wire.h draws. */
    const uint8_t drawn[WIRE_HEADER_BYTES] = {
        'L',  'N',  6,    0x91, 0x44, 0x33, 0x22, 0x11, 0x34, 0x12, 0x78, 0x56, 0x21, 0x43,
        0x65, 0x87, 0x78, 0x56, 0x34, 0x12, 0x08, 0x07, 0x06, 0x05, 0x0c, 0x0b, 0x0a, 0x09};
    assert_memory_equal(bytes, drawn, sizeof drawn);
}

/* Good datagrams land where they belong, and only there. */
static void test_receive(void **state) {
    (void)state;
    struct lossynet_comm *comm = open_peer();
    float **x = take_vectors(2, 290);
    assert_true(lossynet_memory_bytes(comm) >
                LOSSYNET_KEPT_BYTES); /* what the transport has counts */
    lossynet_step_begin(comm, 5);

    /* Worker 2's first packet for worker 1: shard at 64; with its own 0 that averages to 7/3. */
    assert_int_equal(lossynet_reduce_begin(comm, x, false), LOSSYNET_OK);
    feed(comm, data_header(comm, LOSSYNET_GRADIENT, 0), 64);
    feed_control(comm, WIRE_DONE, LOSSYNET_GRADIENT, 0, 1, 1);
    comm->averaging.estimator =
        LOSSYNET_MEAN; /* over own, worker 0's (p = 0 within the rank) and 2's */
    assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
    for (size_t e = 0; e < 290; e++) {
        assert_true(x[0][e] == 0);
        assert_close(x[1][e], e >= 64 && e < 80 ? 7 / 3.0 : 0, 1e-6);
    }

    memset(x[1], 0, 290 * sizeof(float));
    assert_int_equal(lossynet_broadcast_begin(comm, x, false), LOSSYNET_OK);
    struct wire_header h = data_header(comm, LOSSYNET_PARAMETER, 0); /* worker 2: at 128 */
    h.packet = 3;
    feed(comm, h, 64);
    h.bucket = 1; /* at 200 + 64, the last packet of the shard: 10 elements */
    h.packet = 1;
    h.length = 40;
    feed(comm, h, 40);
    feed_control(comm, WIRE_DONE, LOSSYNET_PARAMETER, 0, 2, 1);
    assert_int_equal(lossynet_broadcast_end(comm), LOSSYNET_OK);
    for (size_t e = 0; e < 290; e++)
        assert_true(x[1][e] == ((e >= 176 && e < 192) || e >= 280 ? 7 : 0));
    size_t cursor = 0, offset, count, runs = 0;
    const size_t fresh[3][2] = {{0, 128}, {176, 16}, {0, 0}};
    while (lossynet_next_fresh(comm, 1, &cursor, &offset, &count)) {
        if (runs < 2) {
            assert_int_equal(offset, fresh[runs][0]);
            assert_int_equal(count, fresh[runs][1]);
        }
        runs++;
    }
    assert_int_equal(runs, 4); /* and 200 ... 263, 280 ... 289 */
    free_vectors(x);
    lossynet_close(comm);
}

/* The same of bfloat16, of which a datagram holds twice as many: the bytes of a float 7 are 0 and
 * 7. What says that it holds float32 is refused, and so is what is not finite. */
static void test_receive_bf16(void **state) {
    (void)state;
    struct lossynet_comm *comm = open_peer_with(LOSSYNET_BF16);
    float **x = take_vectors(2, 290);
    uint8_t bytes[WIRE_HEADER_BYTES + 64] = {0};
    const uint16_t nan = 0x7fc0;
    lossynet_step_begin(comm, 5);
    assert_int_equal(lossynet_reduce_begin(comm, x, false), LOSSYNET_OK);
    struct wire_header h = data_header(comm, LOSSYNET_GRADIENT, 0);
    feed(comm, h, 64);
    h.elements = 2;
    feed(comm, h, 64);
    assert_int_equal(comm->transport->receiver.rejected.invalid, 2);
    h.elements = WIRE_BF16;
    wire_encode(bytes, &h);
    for (size_t at = 0; at < 64; at += 2) {
        memset(bytes + WIRE_HEADER_BYTES, 0, 64);
        memcpy(bytes + WIRE_HEADER_BYTES + at, &nan, sizeof nan);
        feed_bytes(comm, bytes, sizeof bytes, true, 1);
    }
    assert_int_equal(comm->transport->receiver.rejected.not_finite, 32);
    feed(comm, h, 64);
    feed_control(comm, WIRE_DONE, LOSSYNET_GRADIENT, 0, 1, 1);
    comm->averaging.estimator = LOSSYNET_MEAN;
    assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
    for (size_t e = 0; e < 290; e++)
        assert_close(x[1][e], e >= 64 && e < 96 && e % 2 ? 7 / 3.0 : 0, 1e-6);

    memset(x[1], 0, 290 * sizeof(float));
    assert_int_equal(lossynet_broadcast_begin(comm, x, false), LOSSYNET_OK);
    h = data_header(comm, LOSSYNET_PARAMETER, 0); /* worker 2: at 128 and 264, 64 and 26 elements */
    h.elements = WIRE_BF16;
    h.packet = 1;
    feed(comm, h, 64);
    h.bucket = 1, h.packet = 0;
    feed(comm, h, 64);
    feed(comm, h, 50);
    assert_int_equal(comm->transport->receiver.rejected.invalid, 4);
    feed(comm, h, 52);
    feed_control(comm, WIRE_DONE, LOSSYNET_PARAMETER, 0, 2, 1);
    assert_int_equal(lossynet_broadcast_end(comm), LOSSYNET_OK);
    for (size_t e = 0; e < 290; e++)
        assert_true(x[1][e] == (((e >= 160 && e < 192) || e >= 264) && e % 2 ? 7 : 0));
    free_vectors(x);
    lossynet_close(comm);
}

/* The same of blocks, of which a packet of 32 elements and their scale takes 33 bytes, the last of
 * a shard fewer: the payload of another length and a scale of what is not finite are refused. */
static void test_receive_blocks(void **state) {
    (void)state;
    struct lossynet_comm *comm = open_peer_with(LOSSYNET_INT8);
    float **x = take_vectors(2, 290);
    uint8_t bytes[WIRE_HEADER_BYTES + 33] = {0}, *scale = bytes + WIRE_HEADER_BYTES;
    lossynet_step_begin(comm, 5);
    assert_int_equal(lossynet_reduce_begin(comm, x, false), LOSSYNET_OK);
    struct wire_header h = data_header(comm, LOSSYNET_GRADIENT, 0);
    feed(comm, h, 33);
    h.elements = WIRE_BLOCKS;
    feed(comm, h, 32);
    feed(comm, h, 34);
    assert_int_equal(comm->transport->receiver.rejected.invalid, 3);
    wire_encode(bytes, &h);
    *scale = 255;
    feed_bytes(comm, bytes, sizeof bytes, true, 1);
    *scale = 190;
    feed_bytes(comm, bytes, sizeof bytes, true, 1);
    assert_int_equal(comm->transport->receiver.rejected.not_finite, 2);
    *scale = 133; /* units of 1 */
    for (int e = 0; e < 32; e++) scale[1 + e] = (uint8_t)(3 * e - 48);
    feed_bytes(comm, bytes, sizeof bytes, true, 1);
    feed_control(comm, WIRE_DONE, LOSSYNET_GRADIENT, 0, 1, 1);
    comm->averaging.estimator = LOSSYNET_MEAN;
    assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
    for (int e = 0; e < 290; e++)
        assert_close(x[1][e], e >= 64 && e < 96 ? (3 * (e - 64) - 48) / 3.0 : 0, 1e-5);
    free_vectors(x);
    lossynet_close(comm);
}

/* Each wrong datagram is counted as what is wrong with it, and changes nothing. */
static void test_rejected(void **state) {
    (void)state;
    struct lossynet_comm *comm = open_peer();
    float **x = take_vectors(2, 290);
    for (int kind = 0; kind < 2; kind++) {
        const struct wire_header good = data_header(comm, kind, 0);
        struct ln_rejected want = {0};
        memset(&comm->transport->receiver.rejected, 0, sizeof comm->transport->receiver.rejected);
        if (kind == 0) feed(comm, data_header(comm, 1, 0), 64), want.late++; /* not begun yet */
        comm->steps.reducing = false; /* both phases are open */
        lossynet_status status =
            kind ? lossynet_broadcast_begin(comm, x, false) : lossynet_reduce_begin(comm, x, false);
        assert_int_equal(status, LOSSYNET_OK);
        struct wire_header h;
#define WRONG(counter, change) (h = good, change, feed(comm, h, h.length), want.counter++)
        WRONG(foreign, h.magic ^= 1);
        WRONG(foreign, h.run ^= 1);
        WRONG(version, h.version = WIRE_VERSION - 1);
        WRONG(version, h.version = 0);
        WRONG(late, h.index++);
        WRONG(late, h.index--);
        WRONG(invalid, h.kind = 2);
        WRONG(invalid, h.kind = 3);
        WRONG(invalid, h.elements = WIRE_BF16);
        WRONG(invalid, h.elements = 3);
        WRONG(invalid, h.type = 0);
        WRONG(invalid, h.type = WIRE_TYPES);
        WRONG(invalid, h.type = 15);
        WRONG(invalid, h.kind = 15);
        WRONG(invalid, h.sender = 4);
        WRONG(invalid, h.sender = 65535);
        WRONG(invalid, h.sender = 0);   /* hosted here */
        WRONG(invalid, h.receiver = 2); /* hosted there */
        WRONG(invalid, h.receiver = 65535);
        WRONG(invalid, h.bucket = 2);
        WRONG(invalid, h.bucket = WIRE_BUCKETS - 1);
        WRONG(invalid, h.packet = 4);
        WRONG(invalid, h.packet = WIRE_PACKETS - 1);
        WRONG(invalid, h.length = 60);
        WRONG(invalid, h.length = 68);
        WRONG(invalid, h.length = 0);
        WRONG(invalid, (h.type = WIRE_DONE, h.sender = 1, h.receiver = 0, h.length = 0));
        WRONG(invalid, (h.type = WIRE_DONE, h.sender = 1, h.receiver = 1));
        uint8_t bytes[WIRE_HEADER_BYTES + 64] = {0};
        wire_encode(bytes, &good);
        feed_bytes(comm, bytes, sizeof bytes, false, 1);
        want.corrupt++;
        feed_bytes(comm, bytes, sizeof bytes, true, -1); /* a stranger */
        feed_bytes(comm, bytes, sizeof bytes, true, 0);
        want.foreign += 2;
        float nan = NAN;
        memcpy(bytes + WIRE_HEADER_BYTES + 60, &nan, sizeof nan);
        feed_bytes(comm, bytes, sizeof bytes, true, 1);
        want.not_finite++;
        for (size_t n = 0; n < WIRE_HEADER_BYTES; n++) feed_bytes(comm, bytes, n, true, 1);
        want.truncated += WIRE_HEADER_BYTES;
        for (size_t e = 0; e < 290; e++) assert_true(x[1][e] == 0);

        feed(comm, good, 64);
        feed(comm, good, 64);
        want.duplicate++;
        feed_control(comm, WIRE_DONE, kind, 0, 1, 1);
        feed_control(comm, WIRE_DONE, kind, 0, 1, 1); /* repeated: fine */
        feed(comm, good, 64);                         /* over */
        want.late++;
        status = kind ? lossynet_broadcast_end(comm) : lossynet_reduce(comm, x, false);
        assert_int_equal(status, LOSSYNET_OK);
        assert_memory_equal(&comm->transport->receiver.rejected, &want, sizeof want);
        for (int b = 0; b < 2; b++) { /* those of the other kind came before its phase */
            uint64_t late;
            ln_transport_late(comm->transport, (lossynet_phase)kind, b, &late);
            assert_int_equal(late, b == (int)good.bucket ? 3 + (kind == 1) : 0);
            ln_transport_late(comm->transport, (lossynet_phase)kind, b, &late);
            assert_int_equal(late, 0);
        }
        memset(x[1], 0, 290 * sizeof(float));
    }
    free_vectors(x);
    lossynet_close(comm);
}

/* What a peer tells of itself is bounded by what this rank has done: a wrong number that passes the
 * checksum is refused, or corrected by what the peer says later. */
static void test_impossible_counters(void **state) {
    (void)state;
    struct lossynet_comm *comm = open_peer();
    struct ln_transport *t = comm->transport;
    const struct ln_peer *peer = &t->peers[1];
    const uint32_t far = 1 << 20, reach = (uint32_t)(LOSSYNET_REACH * t->session.window);
    float **x = take_vectors(2, 290);
    assert_int_equal(lossynet_reduce_begin(comm, x, false), LOSSYNET_OK);

    /* Phases opened and finished, rounds of messages. */
    const int counts[] = {0, 1, 2, 3, 4, 7, 8};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        const int i = counts[c];
        uint32_t told[WIRE_STATE_BYTES / 4] = {0};
        struct ln_control before = peer->control;
        told[i] = t->gathers[LOSSYNET_GATHER].begun + 10;
        uint64_t invalid = t->receiver.rejected.invalid;
        feed_state(comm, WIRE_STATE, 0, told);
        assert_int_equal(t->receiver.rejected.invalid, invalid + 1);
        told[i] = far;
        feed_state(comm, WIRE_STATE, 0, told);
        assert_int_equal(t->receiver.rejected.invalid, invalid + 2);
        assert_memory_equal(&peer->control, &before, sizeof before);
    }
    struct wire_header h = data_header(comm, WIRE_MESSAGES, t->gathers[LOSSYNET_GATHER].begun + 1);
    h.type = WIRE_MESSAGE, h.sender = 1, h.receiver = 0;
    feed(comm, h, 4);
    assert_true(peer->message[LOSSYNET_GATHER].in_gather <= t->gathers[LOSSYNET_GATHER].begun);

    /* What it has seen of our DATA: a little too much is all of it, much too much is nothing. */
    uint32_t told[WIRE_STATE_BYTES / 4] = {0}, sent = peer->flow.sent;
    told[5] = sent + far;
    feed_state(comm, WIRE_STATE, 0, told);
    assert_true((int32_t)(peer->flow.credit - sent) <= 0);
    told[5] = sent + reach;
    feed_state(comm, WIRE_STATE, 0, told);
    assert_int_equal(peer->flow.credit, sent);

    /* What it has sent: far ahead is not believed of DATA, and a PROBE corrects what was
     * believed. */
    h = data_header(comm, LOSSYNET_GRADIENT, 0);
    h.sequence = far;
    feed(comm, h, 64);
    assert_int_equal(peer->flow.seen, 0);
    h.sequence = 0;
    feed(comm, h, 64);
    assert_int_equal(peer->flow.seen, 1);
    told[5] = 0;
    feed_state(comm, WIRE_PROBE, far, told);
    feed_state(comm, WIRE_PROBE, 5, told);
    assert_int_equal(peer->flow.seen, 5);
    feed_state(comm, WIRE_PROBE, 4, told); /* overtaken by what came before */
    assert_int_equal(peer->flow.seen, 5);
    free_vectors(x);
    lossynet_close(comm);
}

static void feed_tell(struct lossynet_comm *comm, uint32_t index, uint32_t at, size_t bytes) {
    struct wire_header h = data_header(comm, LOSSYNET_GRADIENT, index);
    h.type = WIRE_TELL, h.sender = 1, h.receiver = 0;
    h.packet = at;
    feed(comm, h, bytes);
}

/* Answers to what late ranks have of us count in their order, of the phase that was asked for. */
static void test_answers(void **state) {
    (void)state;
    struct lossynet_comm *comm = open_peer();
    struct ln_transport *t = comm->transport;
    struct ln_question *q = &t->peers[1].question;
    float **x = take_vectors(2, 290);
    uint8_t to[11] = {0}, expected[10];
    assert_int_equal(lossynet_reduce_begin(comm, x, false), LOSSYNET_OK);
    const uint32_t index = t->phase[LOSSYNET_GRADIENT].begun - 1;
    const struct {
        uint32_t index, at;
        size_t bytes, got;
        bool open;
    } told[] = {
        {index + 1, 0, 4, 0, true},                            /* of another phase */
        {index, 4, 4, 0, true},                                /* overtook the one before */
        {index, 0, 4, 4, true},     {index, 0, 4, 4, true},    /* again */
        {index, 4, 7, 4, true},                                /* too many bytes */
        {index, 4, 6, 10, false},   {index, 10, 1, 10, false}, /* nobody asks */
    };
    *q = (struct ln_question){.open = true, .to = to, .bytes = sizeof expected};
    for (size_t i = 0; i < sizeof told / sizeof *told; i++) {
        feed_tell(comm, told[i].index, told[i].at, told[i].bytes);
        assert_int_equal(q->got, told[i].got);
        assert_int_equal(q->open, told[i].open);
    }
    const float seven = 7;
    for (size_t i = 0; i < sizeof expected; i++)
        expected[i] = ((const uint8_t *)&seven)[i % sizeof seven];
    assert_memory_equal(to, expected, sizeof expected);
    assert_int_equal(to[10], 0);

    *q = (struct ln_question){.open = true, .to = to, .bytes = sizeof expected};
    feed_tell(comm, index, 0, 0); /* it is not known there */
    assert_false(q->open);
    assert_int_equal(q->got, 0);

    uint64_t invalid = t->receiver.rejected.invalid; /* nobody is late without a deadline */
    feed_control(comm, WIRE_ASK, LOSSYNET_GRADIENT, index, 0, 0);
    assert_int_equal(t->receiver.rejected.invalid, invalid + 1);
    free_vectors(x);
    lossynet_close(comm);
}

/* Odd nonces are of small PROBEs, even ones of padded ones, and 0 is none, also after 2^32. */
static void test_nonces(void **state) {
    (void)state;
    struct lossynet_comm *comm = open_peer();
    struct ln_transport *t = comm->transport;
    ln_threads_enter(t);
    t->receiver.nonces = UINT32_MAX - 2;
    for (int i = 0; i < 8; i++) {
        const uint32_t before = t->receiver.nonces, nonce = ln_path_nonce(t, i % 3 == 0);
        assert_int_equal(nonce % 2, i % 3 != 0);
        assert_true(nonce != 0 && nonce - before <= 3);
    }
    ln_threads_leave(t);
    lossynet_close(comm);
}

/* A peer that answers, and wrongly believes that we have all of its message, is not waited for. */
static void test_owed_message(void **state) {
    (void)state;
    struct lossynet_comm *comm = open_peer();
    struct ln_transport *t = comm->transport;
    uint64_t mine[2] = {0}, all[4] = {0};
    const size_t offset[3] = {0, sizeof mine, sizeof all};
    ln_threads_enter(t);
    ln_message_begin(t, LOSSYNET_GATHER, (uint8_t *)mine, offset, true, (uint8_t *)all, offset);
    t->receiver.empty = ln_now() + 100;
    assert_true(ln_message_owed(t, 1) == 0);                         /* it has not begun */
    t->peers[1].control.gathers = t->gathers[LOSSYNET_GATHER].begun; /* it says that it has */
    assert_true(ln_message_owed(t, 1) > 99);
    t->peers[1].control.gathers--;
    t->receiver.now = ln_now();
    uint32_t told[WIRE_STATE_BYTES / 4] = {[4] = t->gathers[LOSSYNET_GATHER].begun};
    ln_threads_leave(t);
    feed_state(comm, WIRE_STATE, 0, told);
    ln_threads_enter(t);
    t->receiver.empty = t->peers[1].message[LOSSYNET_GATHER].moved + 100;
    assert_close(ln_message_owed(t, 1), 100, 1e-6);
    t->receiver.back = t->receiver.empty - 1; /* this rank was stopped until then */
    assert_close(ln_message_owed(t, 1), 1, 1e-6);
    t->gathers[LOSSYNET_GATHER].open = false;
    ln_threads_leave(t);
    lossynet_close(comm);
}

/* A fragment that comes again and again is not a sign that the message goes on. */
static void test_a_repeated_fragment(void **state) {
    (void)state;
    struct lossynet_comm *comm = open_peer();
    struct ln_transport *t = comm->transport;
    const size_t one = t->session.fragment_bytes;
    uint8_t *all = calloc(2, one + 64);
    const size_t offset[3] = {0, one + 64, 2 * (one + 64)};
    ln_threads_enter(t);
    ln_message_begin(t, LOSSYNET_GATHER, all, offset, true, all, offset);
    struct wire_header h = data_header(comm, WIRE_MESSAGES, t->gathers[LOSSYNET_GATHER].begun - 1);
    const double *moved = &t->peers[1].message[LOSSYNET_GATHER].moved;
    ln_threads_leave(t);
    h.type = WIRE_MESSAGE, h.sender = 1, h.receiver = 0;
    h.packet = 1; /* the small one; the large one does not come */
    feed(comm, h, 64);
    const double first = *moved;
    for (int i = 0; i < 3; i++) feed(comm, h, 64);
    assert_true(*moved == first && t->receiver.now > first);
    ln_threads_enter(t);
    t->gathers[LOSSYNET_GATHER].open = false;
    ln_threads_leave(t);
    lossynet_close(comm);
    free(all);
}

/* Returns whether a wait in a gather ends because a part of it has another length. */
static bool ends_by_a_misfit(struct lossynet_comm *comm, struct wire_header h) {
    struct ln_transport *t = comm->transport;
    feed(comm, h, 60);
    ln_threads_enter(t);
    assert_true(t->peers[1].live.elsewhere.misfits);
    t->threads.waits = true;
    const double end = ln_now() + 0.15 * t->session.peer_timeout;
    for (double now = 0; now < end;) { /* the last turn is after the end on a busy machine, too */
        now = ln_now();
        ln_agenda_soon(t, 1);
        ln_progress_turn(t);
    }
    const bool ends = t->threads.elsewhere;
    t->threads.waits = t->threads.elsewhere = false;
    ln_threads_leave(t);
    return ends;
}

/* A peer whose part of a gather has another length is in another call, unless it has not begun the gather: then
 * somebody else sent that part. */
static void test_a_part_of_another_length(void **state) {
    (void)state;
    struct lossynet_comm *comm = open_peer();
    struct ln_transport *t = comm->transport;
    uint8_t all[2 * 64] = {0};
    const size_t offset[3] = {0, 64, 128};
    ln_threads_enter(t);
    t->session.peer_timeout = 2;
    ln_message_begin(t, LOSSYNET_GATHER, all, offset, true, all, offset);
    const uint32_t begun = t->gathers[LOSSYNET_GATHER].begun;
    ln_threads_leave(t);
    struct wire_header h = data_header(comm, WIRE_MESSAGES, begun - 1);
    h.type = WIRE_MESSAGE, h.sender = 1, h.receiver = 0;
    assert_false(ends_by_a_misfit(comm, h));
    t->peers[1].control.gathers = begun;
    capture_begin();
    assert_true(ends_by_a_misfit(comm, h));
    assert_message(capture_end(), "rank 1 has waited in another call");
    feed(comm, h, 64);
    assert_false(t->peers[1].live.elsewhere.misfits);
    ln_threads_enter(t);
    t->gathers[LOSSYNET_GATHER].open = false;
    ln_threads_leave(t);
    lossynet_close(comm);
}

/* Packets of the default size have whole vectors of elements, however large the link's room. */
static void test_default_packets(void **state) {
    (void)state;
    static const size_t want[][3] = {{4068, 4064, 4064}, {1444, 1440, 1440}, {1432, 1408, 1424}};
    struct lossynet_world world = {.rank = 0, .ranks = 2, .share = fake_exchange};
    for (int i = 0; i < 3 * 2; i++) {
        struct lossynet_settings settings = simple_settings(4, peer_elements, 2, 0);
        struct lossynet_comm *comm;
        settings.packet_bytes = 0;
        settings.wire_dtype = i % 2 ? LOSSYNET_BF16 : LOSSYNET_FLOAT32;
        fake.hear = only_rank_1;
        fake.room = want[i / 2][0];
        assert_int_equal(ln_comm_open(&world, &settings, fake_open, &comm), LOSSYNET_OK);
        assert_int_equal(lossynet_packet_bytes(comm), want[i / 2][1 + i % 2]);
        feed_control(comm, WIRE_STATE, 0, 0, 0, 0);
        lossynet_close(comm);
    }
    fake.room = 0;
}

/* Datagrams with bits flipped and cut short, but with a checksum that fits (a peer gone mad):
 * nothing is written outside the packet that a valid header names. */
static size_t full_packet(lossynet_wire_dtype wire_dtype, int phase) {
    if (wire_dtype < LOSSYNET_INT8) return 64;
    if (phase == LOSSYNET_PARAMETER || wire_dtype == LOSSYNET_INT8) return 33;
    return wire_dtype == LOSSYNET_INT6 ? 25 : 17;
}

static void random_datagrams(lossynet_wire_dtype wire_dtype) {
    struct lossynet_comm *comm = open_peer_with(wire_dtype);
    float **x = take_vectors(2, 290);
    capture_begin(); /* ABORTs */
    assert_int_equal(lossynet_reduce_begin(comm, x, false), LOSSYNET_OK);
    comm->steps.reducing = false; /* both phases are open */
    assert_int_equal(lossynet_broadcast_begin(comm, x, false), LOSSYNET_OK);
    for (uint64_t i = 0; i < 60000; i++) {
        struct wire_header h = data_header(comm, (int)(i % 2), 0);
        uint8_t bytes[WIRE_HEADER_BYTES + 64] = {0};
        size_t count = WIRE_HEADER_BYTES + full_packet(wire_dtype, (int)(i % 2));
        h.elements = wire_dtype >= LOSSYNET_INT8 ? WIRE_BLOCKS : (uint8_t)wire_dtype;
        h.packet = (uint32_t)(random_bits(1, i, 0) % 5);
        h.bucket = (uint32_t)(random_bits(1, i, 1) % 2);
        h.sender = (uint16_t)(random_bits(1, i, 2) % 4);
        h.receiver = (uint16_t)(random_bits(1, i, 3) % 4);
        if (i % 5 == 0 && i > 30000) { /* a DONE or ABORT may end it all */
            h.type = (uint8_t)(2 + random_bits(1, i, 5) % 9);
            h.sender = 1, h.receiver = 0;
        }
        wire_encode(bytes, &h);
        for (uint64_t flips = random_bits(1, i, 4) % 4; flips > 0; flips--)
            bytes[random_bits(2, i, flips) % count] ^=
                (uint8_t)(1u << random_bits(3, i, flips) % 8);
        if (i % 7 == 0) count = random_bits(4, i, 0) % (count + 1);
        feed_bytes(comm, bytes, count, i % 11 != 0, 1);
    }
    capture_end();
    struct ln_rejected *r = &comm->transport->receiver.rejected;
    assert_true(r->truncated && r->foreign && r->version && r->invalid && r->late && r->duplicate &&
                r->corrupt);
    capture_begin();
    lossynet_close(comm);
    capture_end();
    free_vectors(x);
}

static void test_random_datagrams(void **state) {
    (void)state;
    random_datagrams(LOSSYNET_FLOAT32);
    random_datagrams(LOSSYNET_BF16);
    random_datagrams(LOSSYNET_INT8);
    random_datagrams(LOSSYNET_INT6);
    random_datagrams(LOSSYNET_INT4);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_wire),
        cmocka_unit_test(test_receive),
        cmocka_unit_test(test_receive_bf16),
        cmocka_unit_test(test_receive_blocks),
        cmocka_unit_test(test_rejected),
        cmocka_unit_test(test_impossible_counters),
        cmocka_unit_test(test_answers),
        cmocka_unit_test(test_nonces),
        cmocka_unit_test(test_owed_message),
        cmocka_unit_test(test_a_repeated_fragment),
        cmocka_unit_test(test_default_packets),
        cmocka_unit_test(test_a_part_of_another_length),
        cmocka_unit_test(test_random_datagrams),
    };
    return cmocka_run_group_tests_name("lossynet, receiving", tests, NULL, NULL);
}
