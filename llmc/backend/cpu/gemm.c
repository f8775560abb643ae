/* gemm.c — see gemm.h. Tile sizes were chosen by measurement (one and two threads, Zen 3,
 * oneDNN 2.6); its kernels work on 48 columns at a time with AVX-512 and 24 with AVX2. */
#include "llmc/backend/cpu/gemm.h"
#include "llmc/backend/cpu/working.h"

#include <omp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef GEMM_ONEDNN
#include <oneapi/dnnl/dnnl.h>
#elif !defined(GEMM_PLAIN)
#include <cblas.h>
#include <pthread.h>
#endif

#if !defined(GEMM_ONEDNN) && !defined(GEMM_PLAIN)
static pthread_once_t openblas_once = PTHREAD_ONCE_INIT;
static void openblas_start(void) {
    openblas_set_num_threads(1);
}
#endif

int gemm_limit(enum gemm_level level) {
#ifdef GEMM_ONEDNN
    static const dnnl_cpu_isa_t most[] = {
        [GEMM_X86_64_V2] = dnnl_cpu_isa_sse41,
        [GEMM_X86_64_V3] = dnnl_cpu_isa_avx2,
        [GEMM_X86_64_V4] = dnnl_cpu_isa_avx512_core,
        [GEMM_ALL] = (dnnl_cpu_isa_t)0}; // all, under other names in oneDNN 2 and 3
    return dnnl_set_max_cpu_isa(most[level]) == dnnl_success ? 0 : -1;
#else
    (void)level;
    return 0;
#endif
}

#ifdef GEMM_PLAIN
/* Computes one row of C, in the order of k. B (N, K) is read along its columns, which is slow, but
 * rare. */
static void gemm_row(bool transpose_b, int N, int K, const float *a, size_t step_a, const float *B,
                     int ldb, float beta, float *c) {
    for (int j = 0; j < N; j++) c[j] = beta == 0 ? 0 : beta * c[j];
    for (int j = 0; transpose_b && j < N; j++) {
        const float *b = B + (size_t)j * ldb;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int k = 0; k < K; k++) sum += a[k * step_a] * b[k];
        c[j] += sum;
    }
    for (int k = 0; !transpose_b && k < K; k++) {
        const float x = a[k * step_a], *b = B + (size_t)k * ldb;
#pragma omp simd
        for (int j = 0; j < N; j++) c[j] += x * b[j];
    }
}
#endif

void gemm(bool transpose_a, bool transpose_b, int M, int N, int K, const float *A, int lda,
          const float *B, int ldb, float beta, float *C, int ldc) {
#ifdef GEMM_PLAIN
    for (int i = 0; i < M; i++) {
        gemm_row(transpose_b, N, K, A + (transpose_a ? (size_t)i : (size_t)i * lda),
                 transpose_a ? (size_t)lda : 1, B, ldb, beta, C + (size_t)i * ldc);
    }
#elif defined(GEMM_ONEDNN)
    /* oneDNN asks OpenMP how many threads it may use. This setting belongs to the calling thread
     * alone. */
    int threads = omp_get_max_threads();
    if (threads > 1) omp_set_num_threads(1);
    if (dnnl_sgemm(transpose_a ? 'T' : 'N', transpose_b ? 'T' : 'N', M, N, K, 1.0f, A, lda, B, ldb,
                   beta, C, ldc) != dnnl_success) {
        fprintf(stderr, "cpu backend: oneDNN failed at a product %d x %d x %d (out of memory?)\n",
                M, N, K);
        abort();
    }
    if (threads > 1) omp_set_num_threads(threads);
#else
    pthread_once(&openblas_once, openblas_start);
    cblas_sgemm(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans,
                transpose_b ? CblasTrans : CblasNoTrans, M, N, K, 1.0f, A, lda, B, ldb, beta, C,
                ldc);
#endif
}

static int round_up(int value, int multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

static int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}

static int clamp(long value, int low, int high) {
    return value < low ? low : value > high ? high : (int)value;
}

static void copy_rows(float *to, int ld_to, const float *from, int ld_from, int rows, int columns) {
    for (int i = 0; i < rows; i++)
        memcpy(to + (size_t)i * ld_to, from + (size_t)i * ld_from, (size_t)columns * sizeof(float));
}

enum {
    TILE_COLUMNS = 1152,
    TILE_ROWS_LEAST = 72,
    TILE_WORK = 16000000, /* multiplications in a tile: a third of a millisecond */
};

/* Chooses a multiple of four tiles, so that a few threads finish at the same time. */
static void choose_tiles(int M, int N, int K, int *tile_m, int *tile_n) {
    *tile_n = round_up(ceil_div(N, ceil_div(N, TILE_COLUMNS)), 48);
    int rows = clamp(TILE_WORK / ((long)*tile_n * K), TILE_ROWS_LEAST, GEMM_ROWS_MOST);
    *tile_m = round_up(ceil_div(M, round_up(ceil_div(M, rows), 4)), 8);
}

/* Computes one tile if A (K, M) is read along columns with a slow row length: copies A in
 * pieces. */
static void gemm_copying_a(bool transpose_b, int M, int N, int K, const float *A, int lda,
                           const float *B, int ldb, float beta, float *C, int ldc) {
    int ld = gemm_leading_dimension(M);
    float *copy = (float *)cpu_scratch(SCRATCH_GEMM_TILE, (size_t)GEMM_DEPTH * ld * sizeof(float));
    for (int k = 0; k < K; k += GEMM_DEPTH) {
        int depth = K - k < GEMM_DEPTH ? K - k : GEMM_DEPTH;
        copy_rows(copy, ld, A + (size_t)k * lda, lda, depth, M);
        gemm(true, transpose_b, M, N, depth, copy, ld,
             B + (transpose_b ? (size_t)k : (size_t)k * ldb), ldb, k ? 1.0f : beta, C, ldc);
    }
}

void gemm_parallel(bool transpose_a, bool transpose_b, int M, int N, int K, const float *A, int lda,
                   const float *B, int ldb, float beta, float *C, int ldc) {
    int tile_m, tile_n;
    choose_tiles(M, N, K, &tile_m, &tile_n);
    int tiles_m = ceil_div(M, tile_m), tiles_n = ceil_div(N, tile_n);

    /* If B is read along columns with a slow row length, it is copied once for all tiles. */
    if (!transpose_b && gemm_is_slow(ldb)) {
        int ld = gemm_leading_dimension(N), rows = 64;
        float *copy = (float *)cpu_scratch(SCRATCH_GEMM, (size_t)K * ld * sizeof(float));
#pragma omp parallel for schedule(static) if (!omp_in_parallel())
        for (int k = 0; k < K; k += rows)
            copy_rows(copy + (size_t)k * ld, ld, B + (size_t)k * ldb, ldb,
                      k + rows < K ? rows : K - k, N);
        B = copy;
        ldb = ld;
    }

#pragma omp parallel for collapse(2) schedule(dynamic) if (!omp_in_parallel())
    for (int i = 0; i < tiles_m; i++) {
        for (int j = 0; j < tiles_n; j++) {
            int m = i * tile_m, n = j * tile_n;
            int Mt = M - m < tile_m ? M - m : tile_m, Nt = N - n < tile_n ? N - n : tile_n;
            if (Mt <= 0 || Nt <= 0) continue;
            float *c = C + (size_t)m * ldc + n;
            const float *b = B + (transpose_b ? (size_t)n * ldb : (size_t)n);
            if (!transpose_a || !gemm_is_slow(lda)) {
                const float *a = A + (transpose_a ? (size_t)m : (size_t)m * lda);
                gemm(transpose_a, transpose_b, Mt, Nt, K, a, lda, b, ldb, beta, c, ldc);
                continue;
            }
            gemm_copying_a(transpose_b, Mt, Nt, K, A + m, lda, b, ldb, beta, c, ldc);
        }
    }
}
