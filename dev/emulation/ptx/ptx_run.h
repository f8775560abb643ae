/* ptx_run.h — what the C++ that translate.py makes of PTX calls: the instructions that are more
 * than an expression, as the PTX ISA defines them. The scheduler of fibers, shared memory, barriers
 * and cp.async are those of dev/emulation. */
#ifndef PTX_RUN_H
#define PTX_RUN_H

#include "dev/emulation/cuda_emu.h"
#include "dev/emulation/ptx_emu.h"

#include <algorithm>
#include <cmath>

/* A kernel as nvcc compiled it for a target, 80 or 90. `run` is one thread of it; the parameters
 * lie in `params` as the ISA lays them out. */
struct ptx_kernel {
    const char *name; /* mangled; NULL ends the table */
    int target;
    void (*run)(const char *params);
    uint32_t param_bytes, static_bytes; /* static_bytes: of shared memory */
};
extern const struct ptx_kernel ptx_kernels[]; /* translate.py writes it */

/* Where static shared memory begins, behind the dynamic part. */
extern uint32_t ptx_static_begin;
#define SHARED_STATIC(at) ((uint64_t)(ptx_static_begin + (at)))

/* ---- bits and numbers ---------------------------------------------------------------------- */

static inline float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static inline double as_double(uint64_t bits) {
    double x;
    memcpy(&x, &bits, 8);
    return x;
}
static inline uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static inline uint64_t double_bits(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return bits;
}

/* ---- arithmetic ---------------------------------------------------------------------------- */

/* .ftz: numbers below the smallest normal one are 0. */
static inline float flush(float x) {
    return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x;
}
/* .sat: NaN is 0, too. */
static inline float saturate(float x) {
    return x > 0 ? x < 1 ? x : 1 : 0;
}
/* cvt.rn.bf16.f32 */
static inline uint16_t round_bf16(float x) {
    const uint32_t bits = float_bits(x);
    if (x != x) return 0x7fff;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
/* fma.rm: towards minus infinity. */
static inline float fma_down(float a, float b, float c) {
    const double exact = (double)a * b + c;
    const float x = (float)exact;
    return (double)x > exact ? nextafterf(x, -INFINITY) : x;
}
/* div.approx: "for 2^126 < |b| < 2^128, if a is infinity, returns NaN, otherwise 0". */
static inline float divide_approx(float a, float b) {
    if (fabsf(b) > 0x1p126f && !std::isinf(b)) return std::isinf(a) ? NAN : copysignf(0, a * b);
    return a / b;
}

/* ---- bits in words: bfe.u32, bfi.b32, lop3.b32, prmt.b32, clz.b32 --------------------------- */

static inline uint32_t field(uint32_t at, uint32_t length) {
    at &= 255, length &= 255;
    const uint64_t ones = length > 31 ? 0xffffffffu : (1u << length) - 1;
    return at > 31 ? 0 : (uint32_t)(ones << at);
}
static inline uint32_t extract(uint32_t a, uint32_t at, uint32_t length) {
    return (at & 255) > 31 ? 0 : (a & field(at, length)) >> (at & 255);
}
static inline uint32_t insert(uint32_t a, uint32_t b, uint32_t at, uint32_t length) {
    return (at & 255) > 31 ? b : (b & ~field(at, length)) | (a << (at & 255) & field(at, length));
}
static inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, int table) {
    uint32_t out = 0;
    for (int i = 0; i < 8; i++)
        if (table >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return out;
}
static inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t choice = selector >> 4 * i & 15;
        const uint32_t byte = (uint32_t)(both >> 8 * (choice & 7)) & 255;
        out |= (choice & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return out;
}
static inline uint32_t count_zeros(uint32_t x) {
    return x ? (uint32_t)__builtin_clz(x) : 32;
}

/* ---- memory -------------------------------------------------------------------------------- */

static inline void aligned(const void *p, size_t bytes, const char *what) {
    if ((uintptr_t)p % bytes) cuda_emu::fail("%s of %zu bytes at %p: misaligned", what, bytes, p);
}
static inline void copy_16(void *to, const void *from, uint32_t size) {
    if (size != 0 && size != 16) cuda_emu::fail("cp.async of %u of 16 bytes: not known", size);
    aligned(to, 16, "cp.async");
    if (size) aligned(from, 16, "cp.async");
    cp_async16(to, from, size == 16);
}

/* ---- shfl.sync: the modes' source lanes, and whether they are in range ----------------------- */

enum shuffle_mode { SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_BFLY, SHUFFLE_IDX };
static inline uint32_t shuffle(enum shuffle_mode mode, uint32_t x, uint32_t b, uint32_t c,
                               uint32_t mask, bool *in_range) {
    const int lane = cuda_emu::current->lane, by = (int)(b & 31);
    const int clamp = (int)(c & 31), segment = (int)(c >> 8 & 31);
    const int most = (lane & segment) | (clamp & ~segment), least = lane & segment;
    int from = lane - by;
    if (mode == SHUFFLE_DOWN) from = lane + by;
    if (mode == SHUFFLE_BFLY) from = lane ^ by;
    if (mode == SHUFFLE_IDX) from = least | (by & ~segment);
    *in_range = mode == SHUFFLE_UP ? from >= most : from <= most;
    uint32_t out;
    cuda_emu::meet(mask, cuda_emu::SHUFFLE, &x, 1, NULL, *in_range ? from : lane, &out, 1, "shfl");
    return out;
}

/* ---- mma.m16n8k16 -------------------------------------------------------------------------- *
 * "Matrix Fragments for mma.m16n8k16 with floating point type": the row and column of element i of
 * a lane's fragment, as the manual's formulas say. Written without cuda_emu.cpp's, so that each
 * checks the other. Sums are in double, and rounded once.                                        */

static inline float upper_half(uint32_t words, int i) {
    return as_float(words >> 16 * i << 16);
}

static void finish_mma_of_ptx(struct cuda_emu::group *g) {
    double a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const int group = lane >> 2, thread = lane % 4;
        for (int i = 0; i < 8; i++) {
            const int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
            const int column = thread * 2 + (i & 1) + (i >= 4 ? 8 : 0);
            a[row][column] = upper_half(g->in[lane][i / 2], i % 2);
        }
        for (int i = 0; i < 4; i++) {
            const int row = thread * 2 + (i & 1) + (i >= 2 ? 8 : 0);
            b[row][group] = upper_half(g->in[lane][4 + i / 2], i % 2);
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        for (int i = 0; i < 4; i++) {
            const int row = (lane >> 2) + (i < 2 ? 0 : 8), column = lane % 4 * 2 + (i & 1);
            double sum = as_float(g->in[lane][6 + i]);
            for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
            g->out[lane][i] = float_bits((float)sum);
        }
    }
}

static inline void mma(uint32_t out[4], const uint32_t in[10]) {
    cuda_emu::meet(0xffffffffu, cuda_emu::MMA, in, 10, finish_mma_of_ptx, -1, out, 4, "mma");
}

#endif
