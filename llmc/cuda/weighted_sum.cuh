/* weighted_sum.cuh — the masked average over workers, packet by packet (lossynet's estimators). */
#ifndef LLMC_CUDA_WEIGHTED_SUM_CUH
#define LLMC_CUDA_WEIGHTED_SUM_CUH

#include "llmc/cuda/common.cuh"

/* ---- kernels ------------------------------------------------------------------------------- */

/* W elements of each sender, added up in order of the senders. A weight of 0, the same for the whole
 * block, reads nothing. */
template <int W, typename T>
__device__ __forceinline__ void sum_senders(float (&total)[W], const T *const *__restrict__ sender,
                                            const float *__restrict__ weight, int N, size_t j) {
#pragma unroll 4
    for (int i = 0; i < N; i++) {
        float x[W], w = weight[i];
        if (w == 0) continue;
        load(x, sender[i] + j);
#pragma unroll
        for (int k = 0; k < W; k++) total[k] = fmaf(w, x[k], total[k]);
    }
}

/* `blocks` blocks per packet. out may be one of the senders. */
template <typename T, int W>
__global__ void __launch_bounds__(256)
    weighted_sum_kernel(T *out, const T *const *__restrict__ sender,
                        const float *__restrict__ weight, int N, size_t n, size_t packet,
                        uint32_t blocks) {
    size_t p = blockIdx.x / blocks, begin = p * packet;
    size_t end = begin + packet < n ? begin + packet : n;
    size_t j = begin + ((size_t)(blockIdx.x % blocks) * blockDim.x + threadIdx.x) * W;
    weight += p * N;
    if (j + W <= end) {
        float total[W] = {};
        sum_senders(total, sender, weight, N, j);
        if constexpr (W * sizeof(T) == 16) { /* a plain store the compiler makes four of */
            struct packed<T, W> whole;
            pack(&whole, total);
            __stcs((uint4 *)(out + j), whole.raw[0]);
        } else {
            store(out + j, total);
        }
        return;
    }
    for (; j < end; j++) { /* the last few */
        float total[1] = {};
        sum_senders(total, sender, weight, N, j);
        out[j] = from_float<T>(total[0]);
    }
}

/* ---- launchers ----------------------------------------------------------------------------- */

/* `sender` (N) and `weight` (ceil(n / packet), N) are in device memory; `on_host` is what `sender`
 * holds, addresses of device memory. */
template <typename T>
void cuda_weighted_sum(T *out, const T *const *on_host, const T *const *sender, const float *weight,
                       int N, size_t n, size_t packet, cudaStream_t stream) {
    if (n == 0) return;
    bool vectors = packet % wide<T> == 0 && are_aligned(out);
    for (int i = 0; i < N; i++) vectors = vectors && are_aligned(on_host[i]);
    size_t items = ceil_div(packet < n ? packet : n, vectors ? wide<T> : 1);
    unsigned threads = row_threads(items, 256);
    uint32_t blocks = (uint32_t)ceil_div(items, threads);
    launch(vectors ? weighted_sum_kernel<T, wide<T>> : weighted_sum_kernel<T, 1>,
           (unsigned)(ceil_div(n, packet) * blocks), threads, 0, stream, out, sender, weight, N, n,
           packet, blocks);
}

#endif
