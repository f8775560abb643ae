/* packed_wide.h — packed.h for processors without bfloat16 instructions: a packed operand is
 * a float32 matrix (outer, depth) of bfloat16 values, and the BLAS library multiplies. */
#ifndef LLMC_BACKEND_CPU_PACKED_WIDE_H
#define LLMC_BACKEND_CPU_PACKED_WIDE_H

#include "llmc/backend/cpu/scratch.h"
#include "llmc/backend/cpu/softmax.h"
#include "llmc/backend/cpu/gemm.h"

#define PRODUCT_NAME "bf16 products by widening, " GEMM_NAME

static inline size_t packed_bytes(int outer, int depth) {
    return ((size_t)outer * depth * sizeof(float) + 63) / 64 * 64;
}

static inline struct packed packed_at(void *memory, int depth) {
    return (struct packed){(char *)memory, (size_t)depth * sizeof(float)};
}

static inline struct packed packed_part(struct packed p, int row, int column) {
    p.data += row * p.stride + column * sizeof(float);
    return p;
}

static void narrow_row(element *to, const float *from, int n, float scale) {
#pragma omp simd
    for (int i = 0; i < n; i++) to[i] = narrow(from[i] * scale);
}

static void pack_row(float *to, const void *from, bool floats, size_t step, int depth) {
    const float *whole = (const float *)from;
    const element *half = (const element *)from;
    for (int k = 0; k < depth; k++)
        to[k] = floats ? widen(narrow(whole[k * step])) : widen(half[k * step]);
}

static void pack(struct packed to, enum side side, struct source from, int outer, int depth) {
    const size_t bytes = from.floats ? sizeof(float) : sizeof(element);
    (void)side;
    for (int row = 0; row < outer; row++) {
        const char *first = (const char *)from.data + row * bytes * (from.columns ? 1 : from.ld);
        pack_row((float *)packed_part(to, row, 0).data, first, from.floats,
                 from.columns ? from.ld : 1, depth);
    }
}

static void pack_exponentials(struct packed rows_to, struct packed columns_to, float *x, size_t ld,
                              int rows, int columns, const float *offset, float *sum) {
    classifier_exp(x, rows, (int)ld, columns, offset, sum);
    pack(rows_to, LEFT, (struct source){x, ld, true, false}, rows, columns);
    pack(columns_to, LEFT, (struct source){x, ld, true, true}, columns, rows);
}

static void product(struct target c, int M, int N, int K, struct packed a, struct packed b) {
    const int lda = (int)(a.stride / sizeof(float)), ldb = (int)(b.stride / sizeof(float));
    const float *left = (const float *)a.data, *right = (const float *)b.data;
    if (c.floats) {
        gemm(false, true, M, N, K, left, lda, right, ldb, c.add, c.floats, (int)c.ld);
        return;
    }
    float *sums = (float *)cpu_scratch(SCRATCH_GEMM_TILE, (size_t)M * N * sizeof(float));
    gemm(false, true, M, N, K, left, lda, right, ldb, 0, sums, N);
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            element *to = c.elements + i * c.ld + j;
            *to = narrow((c.add ? widen(*to) : 0) + sums[(size_t)i * N + j]);
        }
}

#endif
