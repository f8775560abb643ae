/* elements.c — what a payload's elements are: float32 as the vectors have them, or bfloat16.
 *
 * bfloat16 is the upper half of a float32, so that widening is exact and rounding is all that a
 * packet loses: to nearest, ties to even, at most 2^-9 of an element, whose sign, exponent and seven
 * upper bits stay. An element that is infinite or NaN stays so, and the largest ones, from
 * 0x7f7f8000 on, become infinite (IEEE 754, section 4.3.1).
 *
 * Rounding depends on the element alone. So it is the same wherever it happens: at the sender of a
 * datagram (stream_send.c), in a copy within a rank (parameter.c), or in place, where what a worker
 * sends to another of its own rank is read by the owner's sum (gradient.c). Twice is as once.
 *
 * An owner's own shard is never rounded: it is the master copy of the parameters, and its own
 * gradient has not travelled.
 */
#include "lossynet/internal.h"

#include <string.h>

/* The upper half, rounded. */
static inline uint16_t narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t even = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return (uint16_t)((is_nan ? quiet : even) >> 16);
}

static inline float widen(uint16_t upper) {
    const uint32_t bits = (uint32_t)upper << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

void lossynet_round(float *to, const float *from, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = widen(narrow(from[i]));
}

void lossynet_elements_pack(uint16_t *to, const float *from, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = narrow(from[i]);
}

void lossynet_elements_unpack(const struct lossynet_layout *layout, float *to,
                              const uint8_t *payload, size_t n) {
    if (!lossynet_rounds(layout)) {
        memcpy(to, payload, n * sizeof *to);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t upper;
        memcpy(&upper, payload + i * sizeof upper, sizeof upper);
        to[i] = widen(upper);
    }
}

void lossynet_elements_copy(const struct lossynet_layout *layout, float *to, const float *from,
                            size_t n) {
    if (lossynet_rounds(layout))
        lossynet_round(to, from, n);
    else
        memcpy(to, from, n * sizeof *to);
}

bool lossynet_elements_are_finite(const struct lossynet_layout *layout, const uint8_t *payload,
                                  size_t bytes) {
    uint32_t wrong = 0;
    if (lossynet_rounds(layout)) {
        for (size_t i = 0; i < bytes; i += sizeof(uint16_t)) {
            uint16_t upper;
            memcpy(&upper, payload + i, sizeof upper);
            wrong |= (upper & 0x7f80) == 0x7f80;
        }
        return !wrong;
    }
    for (size_t i = 0; i < bytes; i += sizeof(float)) {
        uint32_t bits;
        memcpy(&bits, payload + i, sizeof bits);
        wrong |= (bits & 0x7f800000) == 0x7f800000;
    }
    return !wrong;
}

/* A worker's vector, where `owner` owns it. */
static void round_shards(const struct lossynet *net, float *vector, int owner) {
    const struct lossynet_layout *layout = &net->layout;
    uint8_t *all = lossynet_thread_mask(net);
    if (net->memory.masked_round) memset(all, 1, layout->largest_owner_packets);
    for (int b = 0; b < layout->buckets; b++) {
        size_t offset, count;
        lossynet_shard(net, owner, b, &offset, &count);
        float *shard = vector + offset;
        if (net->memory.masked_round)
            net->memory.masked_round(shard, shard, all, count, layout->packet_elements);
        else
            lossynet_round(shard, shard, count);
    }
}

void lossynet_round_others(const struct lossynet *net, float *const *vectors, bool remote) {
    const int first = remote ? 0 : net->first, owners = remote ? net->workers : net->local;
    if (!lossynet_rounds(&net->layout)) return;
#pragma omp parallel for collapse(2) num_threads(net->threads) schedule(static)
    for (int v = 0; v < net->local; v++)
        for (int i = 0; i < owners; i++)
            if (first + i != net->first + v) round_shards(net, vectors[v], first + i);
}

void lossynet_start(struct lossynet *net, float *const *vectors) {
    lossynet_round_others(net, vectors, true);
}
