/* norm.cuh — sum of squares, for the global norm of the gradient. It adds in double, in an order
 * that depends only on the number of elements. */
#ifndef LLMC_BACKEND_CUDA_NORM_H
#define LLMC_BACKEND_CUDA_NORM_H

#include "llmc/backend/cuda/common.cuh"

enum { NORM_THREADS = 256, NORM_RUN = 4, NORM_PARTS = 1024 };

/* ---- kernels ------------------------------------------------------------------------------- */

struct norm_vector {
    const float *x;
    size_t n;
};

__host__ __device__ static inline unsigned norm_parts(size_t n) {
    const size_t parts = ceil_div(n, NORM_THREADS * NORM_RUN);
    return parts < 1 ? 1 : parts < NORM_PARTS ? (unsigned)parts : (unsigned)NORM_PARTS;
}

/* part (gridDim.y, gridDim.x): the blocks of row y sum vector[y]; its norm_parts() first ones do, the
 * others have nothing to do. A run is NORM_RUN neighbouring elements. Thread t of a vector's threads
 * sums the runs t, t + threads, ..., whether it reads a run in one access or not. */
static __global__ void __launch_bounds__(NORM_THREADS)
    sum_of_squares_kernel(double *__restrict__ part, const struct norm_vector *vector) {
    const float *__restrict__ x = vector[blockIdx.y].x;
    const size_t n = vector[blockIdx.y].n;
    const unsigned parts = norm_parts(n);
    if (blockIdx.x >= parts) return;
    const bool vectors = ((uintptr_t)x & 15) == 0;
    size_t step = (size_t)parts * blockDim.x * NORM_RUN;
    double total = 0;
#pragma unroll 4
    for (size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * NORM_RUN; i < n; i += step) {
        float v[NORM_RUN];
        if (vectors && i + NORM_RUN <= n) {
            load(v, x + i);
        } else {
#pragma unroll
            for (int k = 0; k < NORM_RUN; k++) v[k] = i + k < n ? x[i + k] : 0;
        }
#pragma unroll
        for (int k = 0; k < NORM_RUN; k++) total += (double)v[k] * v[k];
    }
    total = block_reduce<sum>(total);
    if (threadIdx.x == 0) part[blockIdx.y * gridDim.x + blockIdx.x] = total;
}

/* result[i] = the sum of the parts of vector i, of which there is room for `row`; a block each */
static __global__ void __launch_bounds__(NORM_THREADS)
    sum_of_parts_kernel(double *__restrict__ result, const double *__restrict__ part,
                        const struct norm_vector *vector, unsigned row) {
    const unsigned parts = norm_parts(vector[blockIdx.x].n);
    double total = 0;
    for (unsigned i = threadIdx.x; i < parts; i += blockDim.x) total += part[blockIdx.x * row + i];
    total = block_reduce<sum>(total);
    if (threadIdx.x == 0) result[blockIdx.x] = total;
}

/* ---- launchers ----------------------------------------------------------------------------- */

/* longest: elements of the longest vector */
static inline size_t cuda_sums_of_squares_workspace(int count, size_t longest) {
    return (size_t)count * norm_parts(longest) * sizeof(double);
}

/* result (count) = the sums, in device memory, as is `vector`. The workspace is aligned to 8 bytes. */
static inline void cuda_sums_of_squares(double *result, const struct norm_vector *vector, int count,
                                        size_t longest, void *workspace, size_t workspace_bytes,
                                        cudaStream_t stream) {
    cuda_check_workspace(workspace_bytes, cuda_sums_of_squares_workspace(count, longest));
    double *part = (double *)workspace;
    const unsigned row = norm_parts(longest);
    launch(sum_of_squares_kernel, dim3(row, (unsigned)count), dim3(NORM_THREADS), 0, stream, part,
           vector);
    launch(sum_of_parts_kernel, dim3((unsigned)count), dim3(NORM_THREADS), 0, stream, result,
           (const double *)part, vector, row);
}

#endif
