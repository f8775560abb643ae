/* wire.h — the datagram that travels between ranks.
 *
 *      0                   1                   2                   3
 *      0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
 *     +---------------+---------------+---------------+---+---+-------+
 *   0 |      'L'      |      'N'      |    version    | e | k | type  |
 *     +---------------+---------------+---------------+---+---+-------+
 *   4 |                              run                              |
 *     +-------------------------------+-------------------------------+
 *   8 |            sender             |           receiver            |
 *     +-------------------------------+-------------------------------+
 *  12 |                             index                             |
 *     +-----------------------+---------------------------------------+
 *  16 |        bucket         |                packet                 |
 *     +-----------------------+---------------------------------------+
 *  20 |                           sequence                            |
 *     +---------------------------------------------------------------+
 *  24 |                           checksum                            |
 *     +---------------------------------------------------------------+
 *  28 |                          payload ...                          |
 *     +---------------------------------------------------------------+
 *
 * Every number is little-endian, and so are the payload's elements. All machines that this program
 * runs on use this order, so that a payload of float32 is copied and never converted.
 *
 *   version   WIRE_VERSION, below
 *   type, k, e         share one byte: its low four bits, the next two, and the high two
 *   e         DATA: the elements. 0 is float32 (IEEE 754), 1 is bfloat16, the upper half of a
 *             float32, and 2 is blocks with a scale (partition/elements.c); a run uses one of them
 *             for all.
 *             DONE of kind GRADIENT: 1 if the sender has no gradient in this step. Others: 0.
 *   type      DATA     one packet of a shard: its elements, without gaps.
 *             DONE     the sender has sent all its packets of this phase to the receiver, `packet`
 *                      in number. It is repeated until it is acknowledged. Payload: the sender's
 *                      state (below).
 *             STATE    opens windows and phases. Payload: the sender's state. packet: the number of
 *                      the last PROBE, which it answers; 0 if it may have overtaken DATA, in a
 *                      network with traffic classes.
 *             PROBE    asks for a STATE. Payload: the sender's state. packet: the number of the
 *                      question, or 0. sequence: the DATA sent so far; if the PROBE may overtake
 *                      DATA, only the DATA that were acknowledged.
 *             MESSAGE  fragment `packet` of a small message that must arrive. Payload: its bytes.
 *             ACK      kind GRADIENT, PARAMETER: acknowledges a DONE. Other kinds: acknowledges all
 *                      fragments of a message before `packet`, and those for which the payload's
 *                      last 8 bytes have a bit; bit i is fragment packet + i. Payload: the sender's
 *                      state, and for a message these 8 bytes.
 *             LEAVE    the sender is done with this run. It now sends LEAVE in place of STATE, with the
 *                      same fields. Without encryption it is believed only if the sender is silent
 *                      from then on. Answered by LEFT.
 *             ABORT    the sender has failed. packet: 1 + the rank that it does not hear, or 0 if
 *                      it has failed for another reason. Without encryption it is believed only
 *                      if two ranks say so, or if the sender is silent from then on. Answered by
 *                      LEFT.
 *             ASK      kind GRADIENT: asks the receiver for its acknowledgement of the sender's
 *                      packets of this phase, from its byte `packet` on. Payload: the sender's
 *                      state.
 *             TELL     answers ASK, with the next bytes of the acknowledgement (transport/exchange/ask.c).
 *             TEST     sent by a link while it opens, and by probe.c. No checksum. Ignored later.
 *   k         kind: says what `index` counts. 0: GRADIENT phases. 1: PARAMETER phases. 2: MESSAGE
 *             rounds in which all ranks wait for all. 3: MESSAGE rounds that go on without late
 *             ranks. All ranks go through the numbers of a kind in order, from 0 on; a late rank
 *             leaves some out.
 *   index     the number of the phase, or of the round. DATA: the low 24 bits of this number; the
 *             upper 8 bits say how many gradients were added up in the packet, if lost gradients
 *             are sent again and the owner cannot know it (algorithm/unconfirmed.c), else 0.
 *   run       the low half of a random number that is the same on all ranks of a run. It tells runs
 *             apart that share a network.
 *   sender, receiver   DATA: workers. Other types: ranks.
 *             A rank that gets a datagram for another rank sends it on as it is (transport/peer/detour.c).
 *   bucket, packet     share one number. DATA: bucket * 2^20 + packet. The packet is counted within
 *             the shard of (bucket, owner). The owner is the receiver in a GRADIENT phase and the
 *             sender in a PARAMETER phase. Other types: packet has all 32 bits, without a bucket.
 *   sequence  DATA: counts the DATA from rank to rank since the start, and wraps around. MESSAGE:
 *             the sender's clock in microseconds. ACK: the sequence of the MESSAGE that it answers,
 *             or 0.
 *   checksum  CRC32C (RFC 3720, appendix B.4) of the header, with 0 in this field, and the payload.
 *
 * The state of a rank towards another rank is nine numbers of 4 bytes:
 *    0  open[GRADIENT], open[PARAMETER]: phases that the rank has opened. It takes DATA of the last
 *       of them, whose index is open - 1, unless that phase is over
 *    8  finished[GRADIENT], finished[PARAMETER]: phases that the rank has sent completely, or given
 *       up. Packets of them that have not come, and are not on their way, are lost
 *   16  MESSAGE rounds of kind 2 that are complete here
 *   20  credit: all DATA with sequences before this were received or given up
 *   24  DATA that have arrived
 *   28  MESSAGE rounds of kind 3 that are complete here
 *   32  MESSAGE rounds of kind 2 that have begun here
 */
#ifndef LOSSYNET_WIRE_H
#define LOSSYNET_WIRE_H

#include <stddef.h>
#include <stdint.h>

enum {
    WIRE_MAGIC = 0x4e4c, /* 'L' 'N' */
    WIRE_VERSION = 10,
    WIRE_HEADER_BYTES = 28,
    WIRE_STATE_BYTES = 36,
    WIRE_WORKERS = 65534, /* most workers */
    WIRE_PACKET_BITS = 20,
    WIRE_PACKETS = 1 << WIRE_PACKET_BITS, /* most packets of a shard */
    WIRE_BUCKETS = 1 << 12,               /* most buckets */
    WIRE_INDICES = 1 << 24,
};

enum {
    WIRE_DATA = 1,
    WIRE_DONE,
    WIRE_STATE,
    WIRE_PROBE,
    WIRE_MESSAGE,
    WIRE_ACK,
    WIRE_LEAVE,
    WIRE_ABORT,
    WIRE_LEFT,
    WIRE_TEST,
    WIRE_ASK,
    WIRE_TELL,
    WIRE_TYPES,
};

/* kinds, after LOSSYNET_GRADIENT and LOSSYNET_PARAMETER */
enum { WIRE_MESSAGES = 2, WIRE_PULSES, WIRE_KINDS };

enum { WIRE_FLOAT32, WIRE_BF16, WIRE_BLOCKS }; /* elements */
enum { WIRE_IDLE = 1 };                        /* the same field in DONE */

enum { WIRE_RUN_AT = 4, WIRE_SEQUENCE_AT = 20, WIRE_CHECKSUM_AT = 24 };

struct wire_header {
    uint16_t magic;
    uint8_t version, type, kind, elements;
    uint32_t run;
    uint16_t sender, receiver;
    uint32_t index; /* DATA: modulo WIRE_INDICES */
    uint8_t gradients;
    uint32_t bucket, packet;
    uint32_t sequence, checksum;
    size_t length; /* bytes of the payload: the rest of the datagram, not a field of the header */
};

static inline void wire_put(uint8_t *to, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) to[i] = (uint8_t)(value >> (8 * i));
}

static inline uint64_t wire_get(const uint8_t *from, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) value |= (uint64_t)from[i] << (8 * i);
    return value;
}

static inline int wire_type(const uint8_t *datagram) {
    return datagram[3] & 15;
}

static inline void wire_encode(uint8_t *to, const struct wire_header *header) {
    const int data = header->type == WIRE_DATA;
    const uint32_t place = data ? header->bucket << WIRE_PACKET_BITS : 0;
    const uint32_t index = header->index % WIRE_INDICES | (uint32_t)header->gradients << 24;
    wire_put(to, header->magic, 2);
    to[2] = header->version;
    to[3] = (uint8_t)(header->elements << 6 | header->kind << 4 | header->type);
    wire_put(to + WIRE_RUN_AT, header->run, 4);
    wire_put(to + 8, header->sender, 2);
    wire_put(to + 10, header->receiver, 2);
    wire_put(to + 12, data ? index : header->index, 4);
    wire_put(to + 16, place | header->packet, 4);
    wire_put(to + WIRE_SEQUENCE_AT, header->sequence, 4);
    wire_put(to + WIRE_CHECKSUM_AT, header->checksum, 4);
}

/* Reads the header of a datagram of `bytes` bytes, at least WIRE_HEADER_BYTES. Checks no field. */
static inline void wire_decode(struct wire_header *header, const uint8_t *from, size_t bytes) {
    uint32_t place = (uint32_t)wire_get(from + 16, 4);
    *header = (struct wire_header){
        .magic = (uint16_t)wire_get(from, 2),
        .version = from[2],
        .type = (uint8_t)wire_type(from),
        .kind = from[3] >> 4 & 3,
        .elements = from[3] >> 6,
        .run = (uint32_t)wire_get(from + WIRE_RUN_AT, 4),
        .sender = (uint16_t)wire_get(from + 8, 2),
        .receiver = (uint16_t)wire_get(from + 10, 2),
        .index = (uint32_t)wire_get(from + 12, 4),
        .packet = place,
        .sequence = (uint32_t)wire_get(from + WIRE_SEQUENCE_AT, 4),
        .checksum = (uint32_t)wire_get(from + WIRE_CHECKSUM_AT, 4),
        .length = bytes - WIRE_HEADER_BYTES,
    };
    if (header->type != WIRE_DATA) return;
    header->gradients = (uint8_t)(header->index >> 24);
    header->index %= WIRE_INDICES;
    header->bucket = place >> WIRE_PACKET_BITS;
    header->packet = place % WIRE_PACKETS;
}

#endif
