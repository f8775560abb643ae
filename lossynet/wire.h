/* wire.h — the datagram: what travels between ranks, version 3.
 *
 *      0                   1                   2                   3
 *      0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
 *     +-------------------------------+-------------------------------+
 *   0 |                    magic, "LNET" as bytes                     |
 *     +---------------+---------------+---------------+---------------+
 *   4 |    version    |     type      |     kind      |       0       |
 *     +---------------+---------------+---------------+---------------+
 *   8 |                            run id                             |
 *     +                                                               +
 *  12 |                                                               |
 *     +---------------------------------------------------------------+
 *  16 |                             step                              |
 *     +                                                               +
 *  20 |                                                               |
 *     +-------------------------------+-------------------------------+
 *  24 |            sender             |           receiver            |
 *     +-------------------------------+-------------------------------+
 *  28 |                            bucket                             |
 *     +---------------------------------------------------------------+
 *  32 |                            packet                             |
 *     +---------------------------------------------------------------+
 *  36 |                            length                             |
 *     +---------------------------------------------------------------+
 *  40 |                             index                             |
 *     +---------------------------------------------------------------+
 *  44 |                           sequence                            |
 *     +---------------------------------------------------------------+
 *  48 |                           checksum                            |
 *     +---------------------------------------------------------------+
 *  52 |                  payload: `length` bytes ...                  |
 *     +---------------------------------------------------------------+
 *
 * Every number is little-endian, the payload's IEEE 754 float32 included: the order of every
 * machine this runs on, so that a payload is copied and never converted.
 *
 *   version   3
 *   type      DATA     one packet of a shard: float32 elements
 *             DONE     the sender has sent all of this phase to the receiver, `packet` DATA in all;
 *                      repeated until it is acknowledged. Payload: the sender's state (below).
 *             STATE    payload: the sender's state. Opens windows and phases. packet: that of the
 *                      last PROBE that it answers.
 *             PROBE    the same; asks for a STATE. packet: a question's number, or 0. sequence: DATA
 *                      sent so far; bucket: DATA sent to EVERYONE so far.
 *             MESSAGE  fragment `packet` of a small message that must arrive; bytes
 *             ACK      of a DONE (kind GRADIENT, PARAMETER); or of MESSAGE: all fragments before
 *                      `packet`, and bit i of the payload's last 8 bytes stands for packet + i.
 *                      Payload: the sender's state, and for MESSAGE 8 bytes more.
 *             LEAVE    the sender is done with this run; ABORT: it has failed. Answered by LEFT.
 *             TEST     of a link's own, while it opens: no checksum, ignored later.
 *   kind      what `index` counts: GRADIENT phases (0), PARAMETER phases (1), MESSAGE rounds (2).
 *             All ranks go through each kind in the same order, from 0 on.
 *   run id    random, the same on all ranks of a run: keeps runs that share a network apart
 *   step      for messages to people; not judged
 *   sender, receiver   DATA: workers; receiver EVERYONE (multicast): all workers of other ranks.
 *             Others: ranks.
 *   bucket, packet     DATA: the packet counted within the shard of (bucket, owner); the owner is
 *             the receiver in phase GRADIENT and the sender in phase PARAMETER.
 *   length    payload bytes. The datagram ends there, so several may stand in one buffer (MPI
 *             trains).
 *   sequence  DATA: counts the datagrams from rank to rank, since the start; those to EVERYONE
 *             have a count of their own. Wraps around.
 *   checksum  CRC32C (RFC 3720, appendix B.4) of header, this field 0, and payload.
 *
 * State of a rank towards another, seven numbers of 4 bytes:
 *    0  open[GRADIENT], open[PARAMETER]: DATA of phases before this index + 1 is welcome, unless
 *       the phase is over
 *    8  finished[GRADIENT], finished[PARAMETER]: so many phases have been sent completely, or given
 *       up. What has not come of them will not come.
 *   16  messages: so many MESSAGE rounds are complete here
 *   20  credit: DATA of sequences before this have been received, or given up; 24: of EVERYONE
 */
#ifndef LOSSYNET_WIRE_H
#define LOSSYNET_WIRE_H

#include <stddef.h>
#include <stdint.h>

enum {
    WIRE_MAGIC = 0x54454e4c, /* 'L' 'N' 'E' 'T' */
    WIRE_VERSION = 3,
    WIRE_HEADER_BYTES = 52,
    WIRE_STATE_BYTES = 28,
    WIRE_WORKERS = 65534, /* most workers that fit */
    WIRE_EVERYONE = 65535,
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
    WIRE_TYPES,
};

enum { WIRE_MESSAGES = 2, WIRE_KINDS }; /* after LOSSYNET_GRADIENT, LOSSYNET_PARAMETER */

enum { WIRE_SEQUENCE_AT = 44, WIRE_CHECKSUM_AT = 48 };

struct wire_header {
    uint32_t magic;
    uint8_t version, type, kind, zero;
    uint64_t run;
    uint64_t step;
    uint16_t sender, receiver;
    uint32_t bucket;
    uint32_t packet;
    uint32_t length;
    uint32_t index, sequence, checksum;
};

static inline void wire_put(uint8_t *to, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) to[i] = (uint8_t)(value >> (8 * i));
}

static inline uint64_t wire_get(const uint8_t *from, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) value |= (uint64_t)from[i] << (8 * i);
    return value;
}

static inline void wire_encode(uint8_t *to, const struct wire_header *header) {
    wire_put(to, header->magic, 4);
    to[4] = header->version;
    to[5] = header->type;
    to[6] = header->kind;
    to[7] = header->zero;
    wire_put(to + 8, header->run, 8);
    wire_put(to + 16, header->step, 8);
    wire_put(to + 24, header->sender, 2);
    wire_put(to + 26, header->receiver, 2);
    wire_put(to + 28, header->bucket, 4);
    wire_put(to + 32, header->packet, 4);
    wire_put(to + 36, header->length, 4);
    wire_put(to + 40, header->index, 4);
    wire_put(to + WIRE_SEQUENCE_AT, header->sequence, 4);
    wire_put(to + WIRE_CHECKSUM_AT, header->checksum, 4);
}

/* `from` has WIRE_HEADER_BYTES. Reads the fields, judges nothing. */
static inline void wire_decode(struct wire_header *header, const uint8_t *from) {
    header->magic = (uint32_t)wire_get(from, 4);
    header->version = from[4];
    header->type = from[5];
    header->kind = from[6];
    header->zero = from[7];
    header->run = wire_get(from + 8, 8);
    header->step = wire_get(from + 16, 8);
    header->sender = (uint16_t)wire_get(from + 24, 2);
    header->receiver = (uint16_t)wire_get(from + 26, 2);
    header->bucket = (uint32_t)wire_get(from + 28, 4);
    header->packet = (uint32_t)wire_get(from + 32, 4);
    header->length = (uint32_t)wire_get(from + 36, 4);
    header->index = (uint32_t)wire_get(from + 40, 4);
    header->sequence = (uint32_t)wire_get(from + WIRE_SEQUENCE_AT, 4);
    header->checksum = (uint32_t)wire_get(from + WIRE_CHECKSUM_AT, 4);
}

/* How many of `bytes` the first datagram takes: all of them when it is cut short or claims more
 * than there is, so that whoever validates it sees it whole and drops it. */
static inline size_t wire_datagram_bytes(const uint8_t *from, size_t bytes) {
    if (bytes < WIRE_HEADER_BYTES) return bytes;
    size_t length = (size_t)wire_get(from + 36, 4);
    return length > bytes - WIRE_HEADER_BYTES ? bytes : WIRE_HEADER_BYTES + length;
}

#endif
