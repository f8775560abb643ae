/* fake_peer.h — a comm whose only peer is the test: it feeds datagrams to the comm, over a link that carries
 * nothing by itself (fake_link.h). */
#ifndef TEST_LOSSYNET_FAKE_PEER_H
#define TEST_LOSSYNET_FAKE_PEER_H

#include "fake_link.h"

#include "lossynet/transport/exchange/exchange.h"

/* Rank 1 hears that we leave, and says so: otherwise each close would wait for a second. */
static inline void only_rank_1(int peer, const uint8_t *header) {
    assert_int_equal(peer, 1);
    if (wire_type(header) == WIRE_LEAVE) fake_reply(peer, header, WIRE_LEFT);
}

static const size_t peer_elements[2] = {200, 90}; /* 4 owners: chunks of 64 and of 32 */

/* A datagram in memory of just its size, so that address sanitizer sees overruns. seal: with a
 * checksum that fits. */
static inline void feed_bytes(struct lossynet_comm *comm, const uint8_t *bytes, size_t count,
                              bool seal, int known_as) {
    uint8_t *copy = malloc(count);
    if (count) memcpy(copy, bytes, count);
    if (seal && count >= WIRE_HEADER_BYTES) {
        wire_put(copy + WIRE_CHECKSUM_AT, 0, 4);
        wire_put(copy + WIRE_CHECKSUM_AT, ln_crc32c(0, copy, count), 4);
    }
    ln_threads_enter(comm->transport);
    comm->transport->receiver.now = ln_now();
    ln_dispatch(comm->transport, known_as, copy, count);
    ln_threads_leave(comm->transport);
    free(copy);
}

enum { FEED_BYTES = 1 << 12 };

/* `bytes` of payload, each float 7. */
static inline void feed(struct lossynet_comm *comm, struct wire_header header, size_t bytes) {
    uint8_t datagram[WIRE_HEADER_BYTES + FEED_BYTES];
    const float seven = 7;
    assert_true(bytes <= FEED_BYTES);
    wire_encode(datagram, &header);
    for (size_t i = 0; i < bytes; i++)
        datagram[WIRE_HEADER_BYTES + i] = ((const uint8_t *)&seven)[i % sizeof seven];
    feed_bytes(comm, datagram, WIRE_HEADER_BYTES + bytes, true, 1);
}

static inline struct wire_header data_header(const struct lossynet_comm *comm, int kind,
                                             uint32_t index) {
    return (struct wire_header){.magic = WIRE_MAGIC,
                                .version = WIRE_VERSION,
                                .type = WIRE_DATA,
                                .kind = (uint8_t)kind,
                                .run = (uint32_t)comm->transport->session.id,
                                .sender = 2,
                                .receiver = 1,
                                .length = 64,
                                .index = index};
}

/* A control datagram of rank 1 with this state. */
static inline void feed_state(struct lossynet_comm *comm, int type, uint32_t sequence,
                              const uint32_t *told) {
    struct wire_header h = data_header(comm, 0, 0);
    uint8_t datagram[WIRE_HEADER_BYTES + WIRE_STATE_BYTES];
    h.type = (uint8_t)type;
    h.sender = 1, h.receiver = 0;
    h.packet = 0;
    h.sequence = sequence;
    wire_encode(datagram, &h);
    for (int i = 0; i < WIRE_STATE_BYTES / 4; i++)
        wire_put(datagram + WIRE_HEADER_BYTES + 4 * i, told[i], 4);
    feed_bytes(comm, datagram, sizeof datagram, true, 1);
}

/* A control datagram of rank 1, which has closed all our phases, sent `finished` of each of its own
 * and seen all our messages. When it is DONE with gradients, it has not sent those parameters yet. */
static inline void feed_control(struct lossynet_comm *comm, int type, int kind, uint32_t index,
                                uint32_t packet, uint32_t finished) {
    struct wire_header h = data_header(comm, kind, index);
    uint8_t datagram[WIRE_HEADER_BYTES + WIRE_STATE_BYTES];
    h.type = (uint8_t)type;
    h.sender = 1, h.receiver = 0;
    h.packet = packet;
    h.length = WIRE_STATE_BYTES;
    wire_encode(datagram, &h);
    uint8_t *state = datagram + WIRE_HEADER_BYTES;
    memset(state, 0, WIRE_STATE_BYTES);
    for (int phase = 0; phase < 2; phase++)
        wire_put(state + 4 * phase, comm->transport->phase[phase].begun + 2, 4);
    const bool half = type == WIRE_DONE && kind == LOSSYNET_GRADIENT;
    wire_put(state + 8, finished, 4);
    wire_put(state + 12, finished - half, 4);
    feed_bytes(comm, datagram, sizeof datagram, true, 1);
}

static inline struct lossynet_comm *open_peer_with(lossynet_wire_dtype wire_dtype) {
    struct lossynet_world world = {.rank = 0, .ranks = 2, .share = fake_exchange};
    struct lossynet_settings settings = simple_settings(4, peer_elements, 2, 0);
    settings.wire_dtype = wire_dtype;
    struct lossynet_comm *comm;
    fake.hear = only_rank_1;
    assert_int_equal(ln_comm_open(&world, &settings, fake_open, &comm), LOSSYNET_OK);
    assert_string_equal(lossynet_link_name(comm), "test");
    feed_control(comm, WIRE_STATE, 0, 0, 0, 0);
    assert_int_equal(lossynet_step_begin(comm, 0), LOSSYNET_OK);
    return comm;
}

static inline struct lossynet_comm *open_peer(void) {
    return open_peer_with(LOSSYNET_FLOAT32);
}

#endif
