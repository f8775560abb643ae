/* weighted_sum.cuh — the masked average over workers, packet by packet (lossynet's estimators). */
#ifndef LLMC_BACKEND_CUDA_WEIGHTED_SUM_H
#define LLMC_BACKEND_CUDA_WEIGHTED_SUM_H

#include "llmc/backend/cuda/common.cuh"

enum { SENDERS_AHEAD = 4 };

/* A float32 that is rounded to bfloat16 when it is read. */
struct float_to_round {
    float value;
};

__device__ __forceinline__ float to_float(struct float_to_round x) {
    return to_float(from_float<bfloat16>(x.value));
}

/* ---- kernels ------------------------------------------------------------------------------- */

/* Adds W elements of each sender, times its weight, in order of the senders. SENDERS_AHEAD loads
 * are under way at a time. A sender of weight 0 is not read; all threads of a block have the same
 * weights. */
template <int W, typename T>
__device__ __forceinline__ void sum_senders(float (&total)[W], const T *const *__restrict__ sender,
                                            const float *__restrict__ weight, int N, size_t j) {
    for (int i = 0; i < N; i += SENDERS_AHEAD) {
        const T *from[SENDERS_AHEAD];
        bool there[SENDERS_AHEAD];
        float w[SENDERS_AHEAD], x[SENDERS_AHEAD][W] = {};
#pragma unroll
        for (int a = 0; a < SENDERS_AHEAD; a++) {
            w[a] = i + a < N ? weight[i + a] : 0;
            from[a] = i + a < N ? sender[i + a] : NULL;
            there[a] = w[a] != 0;
        }
#pragma unroll
        for (int a = 0; a < SENDERS_AHEAD; a++)
            if (there[a]) load(x[a], from[a] + j);
#pragma unroll
        for (int a = 0; a < SENDERS_AHEAD; a++)
#pragma unroll
            for (int k = 0; k < W; k++)
                if (there[a]) total[k] = fmaf(w[a], x[a][k], total[k]);
    }
}

/* Part `part` of packet p: each thread of the block sums W elements. */
template <typename To, typename T, int W>
__device__ __forceinline__ void sum_part(To *out, const T *const *__restrict__ sender,
                                         const float *__restrict__ weight, int N, size_t n,
                                         size_t packet, size_t p, uint32_t part) {
    size_t begin = p * packet, end = begin + packet < n ? begin + packet : n;
    size_t j = begin + ((size_t)part * blockDim.x + threadIdx.x) * W;
    weight += p * N;
    if (j + W <= end) {
        float total[W] = {};
        sum_senders(total, sender, weight, N, j);
        if constexpr (W * sizeof(To) == 16) { /* the compiler splits a plain store into four */
            struct packed<To, W> whole;
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
        out[j] = from_float<To>(total[0]);
    }
}

/* A packet has `parts` parts, all packets together have `all`. A block sums part i, part i +
 * gridDim.x, and so on. out may be one of the senders. */
template <typename To, typename T, int W>
__global__ void __launch_bounds__(256)
    weighted_sum_kernel(To *out, const T *const *__restrict__ sender,
                        const float *__restrict__ weight, int N, size_t n, size_t packet,
                        uint32_t parts, uint32_t all) {
    for (uint32_t i = blockIdx.x; i < all; i += gridDim.x)
        sum_part<To, T, W>(out, sender, weight, N, n, packet, i / parts, i % parts);
}

/* ---- launchers ----------------------------------------------------------------------------- */

/* `sender` (N) and `weight` (ceil(n / packet), N) are in device memory; `on_host` is a copy of
 * `sender` on the host. Its addresses are those of memory that the device can access. blocks:
 * launches at most so many; 0: one for each part. */
template <typename To, typename T>
void cuda_weighted_sum(To *out, const T *const *on_host, const T *const *sender,
                       const float *weight, int N, size_t n, size_t packet, cudaStream_t stream,
                       unsigned blocks = 0) {
    if (n == 0) return;
    bool vectors = packet % wide<T> == 0 && are_aligned(out);
    for (int i = 0; i < N; i++) vectors = vectors && are_aligned(on_host[i]);
    size_t items = ceil_div(packet < n ? packet : n, vectors ? wide<T> : 1);
    unsigned threads = row_threads(items, 256);
    const uint32_t parts = (uint32_t)ceil_div(items, threads);
    const uint32_t all = (uint32_t)(ceil_div(n, packet) * parts);
    launch(vectors ? weighted_sum_kernel<To, T, wide<T>> : weighted_sum_kernel<To, T, 1>,
           blocks && blocks < all ? blocks : all, threads, 0, stream, out, sender, weight, N, n,
           packet, parts, all);
}

#endif
