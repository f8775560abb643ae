/* element.h — the working type of the CPU backend (the type of tensor elements), and its conversion
 * to float32 and back. Included by backend_cpu.c only, which is compiled once for each type. */
#ifndef LLMC_BACKEND_CPU_ELEMENT_H
#define LLMC_BACKEND_CPU_ELEMENT_H

#include "llmc/util/bf16.h"

/* -DBACKEND_DTYPE=bf16 */
#define ELEMENT_IS_bf16 1
#define ELEMENT_IS_float32 0
#define ELEMENT_IS_(dtype) ELEMENT_IS_##dtype
#define ELEMENT_IS(dtype) ELEMENT_IS_(dtype)
#if ELEMENT_IS(BACKEND_DTYPE)
#define ELEMENT_BF16
#endif

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
