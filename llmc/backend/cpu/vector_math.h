/* vector_math.h — functions that the loops of the CPU backend share. Included by backend_cpu.c
 * only, once per instruction set. All of it is plain C that gcc and clang turn into vector
 * instructions. */
#ifndef LLMC_BACKEND_CPU_VECTOR_MATH_H
#define LLMC_BACKEND_CPU_VECTOR_MATH_H

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#define PRAGMA(text) _Pragma(#text)
/* Inside a parallel region an operation stays on the calling thread. */
#define PARALLEL_FOR PRAGMA(omp parallel for schedule(static) if (!omp_in_parallel()))
#define PARALLEL_FOR_DYNAMIC PRAGMA(omp parallel for schedule(dynamic) if (!omp_in_parallel()))

/* e^x with a relative error of 1e-7, for x < 88.3; below -87.3, the value at -87.3, 1e-38. NaN
 * stays NaN. x = n ln 2 + r, |r| <= ln 2 / 2; the polynomial is Cephes' expf (Moshier 1992). */
static inline float fast_exp(float x) {
    x = x < -87.3f ? -87.3f : x;
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, kept in the
                                        low bits */
    float shifted = x * 1.44269504f + round;
    float n = shifted - round;
    float r = x - n * 0.693359375f; /* exact: few bits */
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + ((uint32_t)127 << 23);
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

static inline float sigmoid(float x) {
    float e = fast_exp(-fabsf(x)), s = 1.0f / (1.0f + e);
    return x < 0 ? e * s : s;
}

/* The largest of n >= 1 numbers. The loop is cut into lanes by hand, because clang 14 does not
 * vectorise a maximum that handles NaN. */
static inline float vector_max(const float *x, int n) {
    enum { LANES = 32 };
    float lane[LANES], max = x[0];
    int i = 0;
    for (int l = 0; l < LANES; l++) lane[l] = max;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
    for (; i < n; i++) max = x[i] > max ? x[i] : max;
    for (int l = 0; l < LANES; l++) max = lane[l] > max ? lane[l] : max;
    return max;
}

static inline int min_int(int a, int b) {
    return a < b ? a : b;
}

static inline int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}

static inline size_t min_size(size_t a, size_t b) {
    return a < b ? a : b;
}

#endif
