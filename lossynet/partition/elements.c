/* elements.c — what a payload's elements are: float32 as the vectors have them, or bfloat16.
 *
 * bfloat16 is the upper half of a float32, so that widening is exact and rounding is all that a
 * packet loses: to nearest, ties to even, at most 2^-9 of an element, whose sign, exponent and
 * seven upper bits stay. An element that is infinite or NaN stays so, and the largest ones, from
 * 0x7f7f8000 on, become infinite (IEEE 754, section 4.3.1).
 *
 * Rounding depends on the element alone. So it is the same wherever it happens: at the sender of a
 * datagram (send.c), in a copy within a rank (parameter.c), or in place, where what a worker
 * sends to another of its own rank is read by the owner's sum (gradient.c). Twice is as once.
 *
 * An owner's own shard is never rounded: it is the master copy of the parameters, and its own
 * gradient has not travelled.
 */
#include "lossynet/partition/partition.h"

#include <string.h>

void lossynet_round(float *to, const float *from, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = lossynet_bf16_widen(lossynet_bf16_narrow(from[i]));
}

void lossynet_elements_pack(uint16_t *to, const float *from, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = lossynet_bf16_narrow(from[i]);
}

void lossynet_elements_unpack(const struct lossynet_partition *partition, float *to,
                              const uint8_t *payload, size_t n) {
    if (!lossynet_rounds(partition)) {
        memcpy(to, payload, n * sizeof *to);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t upper;
        memcpy(&upper, payload + i * sizeof upper, sizeof upper);
        to[i] = lossynet_bf16_widen(upper);
    }
}

void lossynet_elements_copy(const struct lossynet_partition *partition, float *to,
                            const float *from, size_t n) {
    if (lossynet_rounds(partition))
        lossynet_round(to, from, n);
    else
        memcpy(to, from, n * sizeof *to);
}

enum { TOO_LARGE = (127 + 64) << 23 }; /* the exponent of 2^64 */

bool lossynet_elements_are_finite(const struct lossynet_partition *partition,
                                  const uint8_t *payload, size_t bytes) {
    uint32_t wrong = 0;
    if (lossynet_rounds(partition)) {
        for (size_t i = 0; i < bytes; i += sizeof(uint16_t)) {
            uint16_t upper;
            memcpy(&upper, payload + i, sizeof upper);
            wrong |= (upper & 0x7f80) >= TOO_LARGE >> 16;
        }
        return !wrong;
    }
    for (size_t i = 0; i < bytes; i += sizeof(float)) {
        uint32_t bits;
        memcpy(&bits, payload + i, sizeof bits);
        wrong |= (bits & 0x7f800000) >= TOO_LARGE;
    }
    return !wrong;
}
