/* matmul_bf16.h — matrix products of the CPU backend in bfloat16 (packed.h). Included by
 * backend_cpu.c only.
 *
 * All threads together pack the whole of B. Then each thread takes tiles of rows of A, packs them
 * and multiplies them. Tiles follow from the shape alone. */
#ifndef LLMC_BACKEND_CPU_MATMUL_BF16_H
#define LLMC_BACKEND_CPU_MATMUL_BF16_H

#include "llmc/backend/backend.h"
#include "llmc/backend/cpu/packed.h"
#include "llmc/backend/cpu/scratch.h"

#define MATMUL_NAME PRODUCT_NAME

enum {
    MATMUL_ROWS_MOST = 128,
    MATMUL_DEPTH = 2048, /* of K at once, if C is float32: A's tile and B stay in the L2 cache */
};

/* The part of s that begins at `outer` row `row` and column `column`. */
static struct source source_part(struct source s, int row, int column) {
    const size_t bytes = s.floats ? sizeof(float) : sizeof(element);
    const size_t at = s.columns ? column * s.ld + row : row * s.ld + column;
    s.data = (const char *)s.data + at * bytes;
    return s;
}

/* The rows of a tile, so that there are about 16 tiles. */
static int matmul_rows(int M) {
    int rows = ceil_div(ceil_div(M, 16), PACK_ROWS) * PACK_ROWS;
    return min_int(rows, MATMUL_ROWS_MOST);
}

/* c (M, N) = a (M, K) b (N, K)^T */
static void matmul(struct target c, int M, int N, int K, struct source a, struct source b) {
    const int rows = matmul_rows(M), depth = c.floats ? min_int(K, MATMUL_DEPTH) : K;
    struct packed right = packed_at(cpu_scratch(SCRATCH_GEMM, packed_bytes(N, depth)), depth);
    for (int k = 0; k < K; k += depth) {
        const int some = min_int(depth, K - k);
        PARALLEL_FOR
        for (int n = 0; n < N; n += PACK_ROWS)
            pack(packed_part(right, n, 0), RIGHT, source_part(b, n, k), min_int(PACK_ROWS, N - n),
                 some);
        PARALLEL_FOR_DYNAMIC
        for (int m = 0; m < M; m += rows) {
            const int count = min_int(rows, M - m);
            struct packed left =
                packed_at(cpu_scratch(SCRATCH_TASK, packed_bytes(rows, depth)), depth);
            pack(left, LEFT, source_part(a, m, k), count, some);
            struct target to = c;
            if (c.floats) to.floats += m * c.ld;
            if (c.elements) to.elements += m * c.ld;
            to.add = c.add || k > 0;
            product(to, count, N, some, left, right);
        }
    }
}

static void matmul_forward(tensor *out, const tensor *x, const weight *w, int N, int I, int O) {
    matmul((struct target){.elements = (element *)out, .ld = (size_t)O}, N, O, I,
           (struct source){x, (size_t)I, false, false}, (struct source){w, (size_t)I, true, false});
}

static void matmul_backward_input(tensor *dx, const tensor *dout, const weight *w, int N, int I,
                                  int O, bool accumulate) {
    matmul((struct target){.elements = (element *)dx, .ld = (size_t)I, .add = accumulate}, N, I, O,
           (struct source){dout, (size_t)O, false, false},
           (struct source){w, (size_t)I, true, true});
}

static void matmul_backward_weight(float *dw, const tensor *dout, const tensor *x, int N, int I,
                                   int O, bool accumulate) {
    matmul((struct target){.floats = dw, .ld = (size_t)I, .add = accumulate}, O, I, N,
           (struct source){dout, (size_t)O, false, true},
           (struct source){x, (size_t)I, false, true});
}

#endif
