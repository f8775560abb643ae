/* norm.cuh — sum of squares, for the global norm of the gradient. It adds in double, in an order
 * that depends only on the number of elements. */
#ifndef LLMC_BACKEND_CUDA_NORM_H
#define LLMC_BACKEND_CUDA_NORM_H

#include "llmc/backend/cuda/common.cuh"

enum { NORM_THREADS = 256, NORM_RUN = 4, NORM_PARTS = 1024 };

/* ---- kernels ------------------------------------------------------------------------------- */

/* part (gridDim.x) = the sums of the blocks. A run is NORM_RUN neighbouring elements. Thread t of
 * all threads sums the runs t, t + threads, ..., whether it reads a run in one access or not. */
template <typename T, bool vectors>
__global__ void __launch_bounds__(NORM_THREADS)
    sum_of_squares_kernel(double *__restrict__ part, const T *__restrict__ x, size_t n) {
    size_t step = (size_t)gridDim.x * blockDim.x * NORM_RUN;
    double total = 0;
#pragma unroll 4
    for (size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * NORM_RUN; i < n; i += step) {
        float v[NORM_RUN];
        if (vectors && i + NORM_RUN <= n) {
            load(v, x + i);
        } else {
#pragma unroll
            for (int k = 0; k < NORM_RUN; k++) v[k] = i + k < n ? to_float(x[i + k]) : 0;
        }
#pragma unroll
        for (int k = 0; k < NORM_RUN; k++) total += (double)v[k] * v[k];
    }
    total = block_reduce<sum>(total);
    if (threadIdx.x == 0) part[blockIdx.x] = total;
}

/* Runs in one block. */
static __global__ void __launch_bounds__(NORM_THREADS)
    sum_of_parts_kernel(double *__restrict__ result, const double *__restrict__ part, int parts) {
    double total = 0;
    for (int i = threadIdx.x; i < parts; i += blockDim.x) total += part[i];
    total = block_reduce<sum>(total);
    if (threadIdx.x == 0) *result = total;
}

/* ---- launchers ----------------------------------------------------------------------------- */

static inline int norm_parts(size_t n) {
    size_t parts = ceil_div(n, NORM_THREADS * NORM_RUN);
    return parts < 1 ? 1 : parts < NORM_PARTS ? (int)parts : NORM_PARTS;
}

static inline size_t cuda_sum_of_squares_workspace(size_t n) {
    return norm_parts(n) * sizeof(double);
}

/* *result = the sum, in device memory. The workspace is aligned to 8 bytes. */
template <typename T>
void cuda_sum_of_squares(double *result, const T *x, size_t n, void *workspace,
                         size_t workspace_bytes, cudaStream_t stream) {
    cuda_check_workspace(workspace_bytes, cuda_sum_of_squares_workspace(n));
    double *part = (double *)workspace;
    launch(are_aligned(x) ? sum_of_squares_kernel<T, true> : sum_of_squares_kernel<T, false>,
           norm_parts(n), NORM_THREADS, 0, stream, part, x, n);
    launch(sum_of_parts_kernel, 1, NORM_THREADS, 0, stream, result, (const double *)part,
           norm_parts(n));
}

#endif
