/* gemm.h — matrix products for the CPU backend: the seam to the BLAS library.
 *
 * oneDNN's sgemm on x86-64 (GEMM_ONEDNN), OpenBLAS elsewhere; with GEMM_PLAIN loops, for machines
 * that have neither. The library always runs on one thread; gemm_parallel cuts the output in tiles
 * and hands each to one thread. The tiles follow from the shape alone and the sum over K is never
 * split between threads, so that the bits of the result do not depend on the number of threads.
 *
 * Thread-safe. Nothing fails; sizes are positive. Matrices are row-major:
 *   C (M, N) = beta C + op(A) op(B), op(A) (M, K), op(B) (K, N)
 * `transpose_a`: A is stored (K, M). `transpose_b`: B is stored (N, K). ld*: elements from one
 * stored row to the next. With beta = 0, C is not read.
 */
#ifndef LLMC_BACKEND_CPU_GEMM_H
#define LLMC_BACKEND_CPU_GEMM_H

#include <stdbool.h>

#ifdef GEMM_ONEDNN
#include <oneapi/dnnl/dnnl_version.h>
#define GEMM_TEXT_(a, b) "oneDNN " #a "." #b " GEMM"
#define GEMM_TEXT(a, b) GEMM_TEXT_(a, b)
#define GEMM_NAME GEMM_TEXT(DNNL_VERSION_MAJOR, DNNL_VERSION_MINOR)
#elif defined(GEMM_PLAIN)
#define GEMM_NAME "GEMM in plain loops"
#else
#define GEMM_NAME "OpenBLAS GEMM"
#endif

/* On the calling thread. */
void gemm(bool transpose_a, bool transpose_b, int M, int N, int K, const float *A, int lda,
          const float *B, int ldb, float beta, float *C, int ldc);

/* On all threads; inside a parallel region on the calling thread. Same bits either way. */
void gemm_parallel(bool transpose_a, bool transpose_b, int M, int N, int K, const float *A, int lda,
                   const float *B, int ldb, float beta, float *C, int ldc);

/* The row length to give a scratch matrix of `columns` columns: rows whose distance is a multiple
 * of 512 bytes fall into the same few cache sets, and the library then runs at two thirds. */
static inline int gemm_leading_dimension(int columns) {
    int padded = (columns + 15) / 16 * 16;
    return padded % 128 == 0 ? padded + 16 : padded;
}

/* Such matrices are copied to a better one before they are read along their columns. */
static inline bool gemm_is_slow(int leading_dimension) {
    return leading_dimension % 128 == 0;
}

#endif
