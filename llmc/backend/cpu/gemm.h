/* gemm.h — matrix products for the CPU backend, by a BLAS library.
 *
 * The library is oneDNN (its sgemm) on x86-64 (GEMM_ONEDNN), and OpenBLAS elsewhere. With
 * GEMM_PLAIN there are plain loops, for machines that have neither. The library always runs on one
 * thread; gemm_parallel cuts the output into tiles and gives each to one thread. The tiles follow
 * from the shape alone, and the sum over K is never split between threads, so that the bits of the
 * result do not depend on the number of threads.
 *
 * Thread-safe. If the library fails, as without memory, the program ends after one line. Sizes are
 * positive. Matrices are row-major:
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

/* Instructions that the library may use: those of a level of the x86-64 psABI, or all that the
 * processor has. */
enum gemm_level { GEMM_X86_64_V2, GEMM_X86_64_V3, GEMM_X86_64_V4, GEMM_ALL };

/* Limits oneDNN (dnnl_set_max_cpu_isa, as its environment variable ONEDNN_MAX_CPU_ISA); to be called
 * at most once, before the first product. Plain loops use the lowest level anyway. OpenBLAS is not
 * limited: it chose its kernels when it was loaded (OPENBLAS_CORETYPE). Returns 0, or -1 without a
 * message if oneDNN refuses. */
int gemm_limit(enum gemm_level level);

/* Computes on the calling thread. */
void gemm(bool transpose_a, bool transpose_b, int M, int N, int K, const float *A, int lda,
          const float *B, int ldb, float beta, float *C, int ldc);

/* Computes on all threads, or inside a parallel region on the calling thread, with the same
 * bits. */
void gemm_parallel(bool transpose_a, bool transpose_b, int M, int N, int K, const float *A, int lda,
                   const float *B, int ldb, float beta, float *C, int ldc);

/* The row length for a scratch matrix of `columns` columns. If rows lie a multiple of 512 bytes
 * apart, they use the same few cache sets, and the library runs at two thirds of its speed. */
static inline int gemm_leading_dimension(int columns) {
    int padded = (columns + 15) / 16 * 16;
    return padded % 128 == 0 ? padded + 16 : padded;
}

/* Matrices with such rows are copied to a better row length before they are read along columns. */
static inline bool gemm_is_slow(int leading_dimension) {
    return leading_dimension % 128 == 0;
}

#endif
