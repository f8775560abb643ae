/* util.cuh — converts arrays from one type of number to another. */
#ifndef LLMC_BACKEND_CUDA_UTIL_H
#define LLMC_BACKEND_CUDA_UTIL_H

#include "llmc/backend/cuda/common.cuh"

/* ---- kernels ------------------------------------------------------------------------------- */

template <typename To, typename From, int W>
__global__ void __launch_bounds__(256)
    convert_kernel(To *__restrict__ to, const From *__restrict__ from, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (i + W <= n) {
        float x[W];
        load(x, from + i);
        store(to + i, x);
        return;
    }
    for (; i < n; i++) to[i] = from_float<To>(to_float(from[i]));
}

/* ---- launchers ----------------------------------------------------------------------------- */

/* to (n) = from (n), rounded to nearest even where To is narrower. */
template <typename To, typename From>
void cuda_convert(To *to, const From *from, size_t n, cudaStream_t stream) {
    if (n == 0) return;
    bool vectors = are_aligned(to, from);
    launch(vectors ? convert_kernel<To, From, 8> : convert_kernel<To, From, 1>,
           ceil_div(n, vectors ? 256 * 8 : 256), 256, 0, stream, to, from, n);
}

#endif
