/* bf16.h — converts to and from bfloat16, the upper half of a float32. */
#ifndef LLMC_UTIL_BF16_H
#define LLMC_UTIL_BF16_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Rounds to nearest even; NaN stays NaN. */
static inline uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t even = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
    return (uint16_t)((x != x ? quiet : even) >> 16);
}

static inline float from_bf16(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif
