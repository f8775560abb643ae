/* wire.h — the datagram: what travels between ranks, version 2.
 *
 *      0                   1                   2                   3
 *      0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
 *     +-------------------------------+-------------------------------+
 *   0 |                    magic, "LNET" as bytes                     |
 *     +---------------+---------------+---------------+---------------+
 *   4 |    version    |     type      |     phase     |       0       |
 *     +---------------+---------------+---------------+---------------+
 *   8 |                            run id                             |
 *     +                                                               +
 *  12 |                                                               |
 *     +---------------------------------------------------------------+
 *  16 |                             step                              |
 *     +                                                               +
 *  20 |                                                               |
 *     +-------------------------------+-------------------------------+
 *  24 |         sender worker         |        receiver worker        |
 *     +-------------------------------+-------------------------------+
 *  28 |                            bucket                             |
 *     +---------------------------------------------------------------+
 *  32 |                            packet                             |
 *     +---------------------------------------------------------------+
 *  36 |                            length                             |
 *     +---------------------------------------------------------------+
 *  40 |                             round                             |
 *     +---------------------------------------------------------------+
 *  44 |                           sequence                            |
 *     +---------------------------------------------------------------+
 *  48 |                           checksum                            |
 *     +---------------------------------------------------------------+
 *  52 |        payload: `length` bytes, float32 elements ...          |
 *     +---------------------------------------------------------------+
 *
 * Every number is little-endian, the payload's IEEE 754 float32 included: the order of every
 * machine this runs on, so that a payload is copied and never converted.
 *
 *   version   2
 *   type      DATA: one packet of a shard.
 *             DONE: the sending rank has sent all its packets of this phase to the receiving rank.
 *             Between links that lose datagrams (link_udp.c) also:
 *             READY: I have begun this round; answer with what you have received.
 *             CREDIT: I have received, or given up, all DATA of this round before `packet`.
 *             GATHER: fragment `packet` of the sending rank's part of an all-gather; bytes.
 *             ACK: of a DONE; or of fragments of this round, all before `packet`, and bit i of the
 *             payload (8 bytes) stands for packet + i. packet 2^32-1: all.
 *             ALIVE: I am in this round, and cannot answer what you sent yet.
 *             LEAVE: I am done with this run; round 2^32-1.
 *   phase     GRADIENT (0) or PARAMETER (1)
 *   run id    random, the same on all ranks of a run: keeps runs that share a network apart
 *   sender, receiver   DATA: workers. DONE: the first worker of either rank. Others: ranks.
 *   bucket, packet     DATA: the packet counted within the shard of (bucket, owner); the owner is
 *             the receiver in phase GRADIENT and the sender in phase PARAMETER.
 *             DONE: bucket 0; packet is the number of DATA datagrams sent.
 *   length    payload bytes. The datagram ends there, so several may stand in one buffer (MPI
 *             trains, UDP GRO). DONE: 0.
 *   round     counts what all ranks do together, phases and all-gathers, in the same order on every
 *             rank. A datagram of a later round says that its sender has finished this one.
 *   sequence  DATA: counts the datagrams from rank to rank within a round. READY: how many have
 *             been sent.
 *   checksum  CRC32C (RFC 3720, appendix B.4) of header, this field 0, and payload.
 *             round, sequence and checksum are the link's: all 0 over MPI, which has its own.
 */
#ifndef LOSSYNET_WIRE_H
#define LOSSYNET_WIRE_H

#include <stddef.h>
#include <stdint.h>

enum {
    WIRE_MAGIC = 0x54454e4c, /* 'L' 'N' 'E' 'T' */
    WIRE_VERSION = 2,
    WIRE_HEADER_BYTES = 52,
    WIRE_WORKERS = 65535, /* most workers that fit */
};

enum {
    WIRE_DATA = 1,
    WIRE_DONE,
    WIRE_READY,
    WIRE_CREDIT,
    WIRE_GATHER,
    WIRE_ACK,
    WIRE_ALIVE,
    WIRE_LEAVE,
};

enum { WIRE_ROUND_AT = 40, WIRE_SEQUENCE_AT = 44, WIRE_CHECKSUM_AT = 48 };
#define WIRE_ALL UINT32_MAX /* packet of an ACK, round of a LEAVE */

struct wire_header {
    uint32_t magic;
    uint8_t version, type, phase, zero;
    uint64_t run;
    uint64_t step;
    uint16_t sender, receiver;
    uint32_t bucket;
    uint32_t packet;
    uint32_t length;
    uint32_t round, sequence, checksum;
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
    to[6] = header->phase;
    to[7] = header->zero;
    wire_put(to + 8, header->run, 8);
    wire_put(to + 16, header->step, 8);
    wire_put(to + 24, header->sender, 2);
    wire_put(to + 26, header->receiver, 2);
    wire_put(to + 28, header->bucket, 4);
    wire_put(to + 32, header->packet, 4);
    wire_put(to + 36, header->length, 4);
    wire_put(to + WIRE_ROUND_AT, header->round, 4);
    wire_put(to + WIRE_SEQUENCE_AT, header->sequence, 4);
    wire_put(to + WIRE_CHECKSUM_AT, header->checksum, 4);
}

/* `from` has WIRE_HEADER_BYTES. Reads the fields, judges nothing. */
static inline void wire_decode(struct wire_header *header, const uint8_t *from) {
    header->magic = (uint32_t)wire_get(from, 4);
    header->version = from[4];
    header->type = from[5];
    header->phase = from[6];
    header->zero = from[7];
    header->run = wire_get(from + 8, 8);
    header->step = wire_get(from + 16, 8);
    header->sender = (uint16_t)wire_get(from + 24, 2);
    header->receiver = (uint16_t)wire_get(from + 26, 2);
    header->bucket = (uint32_t)wire_get(from + 28, 4);
    header->packet = (uint32_t)wire_get(from + 32, 4);
    header->length = (uint32_t)wire_get(from + 36, 4);
    header->round = (uint32_t)wire_get(from + WIRE_ROUND_AT, 4);
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
