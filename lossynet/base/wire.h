/* wire.h — the datagram: what travels between ranks, version 8.
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
 * Every number is little-endian, the payload's elements included: the order of every machine this
 * runs on, so that a payload of float32 is copied and never converted.
 *
 *   version   8
 *   type, k, e         one byte: its low four bits, two, and the high two
 *   e         DATA: the elements, 0, 1 or 3 for all of a run: 0 float32 (IEEE 754); 1 bfloat16, the
 *             upper half of a float32; 2 float32 as in 0, sent from a device's memory; 3 blocks
 *             with a scale (partition/elements.c). DONE of kind GRADIENT: 1 from a rank that has no
 *             gradient in this step. Others: 0
 *   type      DATA     one packet of a shard: elements, without a gap
 *             DONE     the sender has sent all of this phase to the receiver, `packet` DATA in all;
 *                      repeated until it is acknowledged. Payload: the sender's state (below).
 *             STATE    payload: the sender's state. Opens windows and phases. packet: that of the
 *                      last PROBE, which it answers; 0 when it may have overtaken DATA, in a
 *                      network with traffic classes.
 *             PROBE    the same; asks for a STATE. packet: a question's number, or 0. sequence:
 *                      DATA sent so far, or, when it may overtake them, as many as were
 *                      acknowledged.
 *             MESSAGE  fragment `packet` of a small message that must arrive; bytes
 *             ACK      of a DONE (kind GRADIENT, PARAMETER); or of MESSAGE (the other kinds): all
 *                      fragments before `packet`, and bit i of the payload's last 8 bytes stands
 *                      for packet + i. Payload: the sender's state, and for MESSAGE 8 bytes more.
 *             LEAVE    the sender is done with this run; ABORT: it has failed (believed of one
 *             rank only when encrypted, or when it is silent from then on). Answered by LEFT.
 *             ASK      kind GRADIENT: what the receiver acknowledges of the sender's packets of this
 *                      phase; `packet`: from which of its bytes on. Payload: the sender's state
 *             TELL     the answer, to be continued until all bytes are there (transport/ask.c)
 *             TEST     of a link's own, while it opens: no checksum, ignored later.
 *   k         kind: what `index` counts: GRADIENT phases (0), PARAMETER phases (1), MESSAGE rounds
 *             for which all ranks wait (2), and those that go on without a late rank (3). All ranks
 *             go through each kind in the same order, from 0 on; a late rank leaves some out.
 *   index     the number of the phase, or of the round. DATA: its low 24 bits; the upper 8 say how
 *             many gradients were added up in the packet, where these are lost and sent again later
 *             without their owner's knowledge (algorithm/unconfirmed.c), else 0
 *   run       low half of a random number, the same on all ranks of a run: keeps runs that share a
 *             network apart
 *   sender, receiver   DATA: workers; receiver EVERYONE (multicast): all workers of other ranks.
 *             Others: ranks.
 *   bucket, packet     one number. DATA: bucket * 2^20 + packet, the packet counted within the
 *                      shard
 *             of (bucket, owner); the owner is the receiver in phase GRADIENT and the sender in
 *             phase PARAMETER. Others: packet has all 32 bits, and there is no bucket.
 *   sequence  DATA: counts the datagrams from rank to rank, since the start; those to EVERYONE
 *             have a count of their own. Wraps around. MESSAGE: the sender's clock, microseconds;
 *             ACK: of the MESSAGE that it answers, or 0.
 *   checksum  CRC32C (RFC 3720, appendix B.4) of header, this field 0, and payload; with e = 2, of
 *             the header alone: only over links whose hardware checks payloads from end to end.
 *
 * State of a rank towards another, eleven numbers of 4 bytes:
 *    0  open[GRADIENT], open[PARAMETER]: DATA of phases before this index + 1 is welcome, unless
 *       the phase is over
 *    8  finished[GRADIENT], finished[PARAMETER]: so many phases have been sent completely, or given
 *       up. What has not come of them will not come.
 *   16  messages: so many MESSAGE rounds of kind 2 are complete here
 *   20  credit: DATA of sequences before this have been received, or given up; 24: of EVERYONE
 *   28  DATA sent to EVERYONE so far; as in PROBE
 *   32  DATA that have come, to the rank and to EVERYONE
 *   36  so many MESSAGE rounds of kind 3 are complete here
 *   40  so many MESSAGE rounds of kind 2 have begun here
 */
#ifndef LOSSYNET_WIRE_H
#define LOSSYNET_WIRE_H

#include <stddef.h>
#include <stdint.h>

enum {
    WIRE_MAGIC = 0x4e4c, /* 'L' 'N' */
    WIRE_VERSION = 8,
    WIRE_HEADER_BYTES = 28,
    WIRE_STATE_BYTES = 44,
    WIRE_WORKERS = 65534, /* most workers that fit */
    WIRE_EVERYONE = 65535,
    WIRE_PACKET_BITS = 20,
    WIRE_PACKETS = 1 << WIRE_PACKET_BITS, /* most packets of a shard, and */
    WIRE_BUCKETS = 1 << 12,               /* buckets that fit */
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

/* after LOSSYNET_GRADIENT, LOSSYNET_PARAMETER */
enum { WIRE_MESSAGES = 2, WIRE_PULSES, WIRE_KINDS };

enum { WIRE_FLOAT32, WIRE_BF16, WIRE_DEVICE_FLOAT32, WIRE_BLOCKS }; /* elements */
enum { WIRE_IDLE = 1 };                                             /* in their place in DONE */

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
    size_t length; /* of the payload, bytes: the rest of the datagram, so it need not travel */
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

/* A datagram of `bytes`, at least WIRE_HEADER_BYTES. Reads the fields, judges nothing. */
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
