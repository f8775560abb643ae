/* element.h — the working type of the CPU backend: what tensors consist of, and its way to
 * float32 and back. Included by backend_cpu.c only, which is compiled once for each. */
#ifndef LLMC_BACKEND_CPU_ELEMENT_H
#define LLMC_BACKEND_CPU_ELEMENT_H

#include <stdint.h>
#include <string.h>

/* -DBACKEND_DTYPE=bf16 */
#define ELEMENT_IS_bf16 1
#define ELEMENT_IS_float32 0
#define ELEMENT_IS_(dtype) ELEMENT_IS_##dtype
#define ELEMENT_IS(dtype) ELEMENT_IS_(dtype)
#if ELEMENT_IS(BACKEND_DTYPE)
#define ELEMENT_BF16
#endif

/* The upper half of a float32. To nearest even; NaN stays NaN. */
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

#ifdef ELEMENT_BF16
typedef uint16_t element;
static inline float widen(element x) {
    return from_bf16(x);
}
static inline element narrow(float x) {
    return to_bf16(x);
}
#else
typedef float element;
static inline float widen(element x) {
    return x;
}
static inline element narrow(float x) {
    return x;
}
#endif

#endif
