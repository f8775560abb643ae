/* exchange.cuh — copies of packets between workers that share a device, as they are or rounded to
 * bfloat16 as on a wire, what was lost of gradients, and single elements for the host. (The average
 * of packets is in weighted_sum.cuh.) */
#ifndef LLMC_BACKEND_CUDA_EXCHANGE_H
#define LLMC_BACKEND_CUDA_EXCHANGE_H

#include "llmc/backend/cuda/common.cuh"

enum { EXCHANGE_THREADS = 256 };

/* Blocks of a launch, at most. Under emulation so few that small vectors need more than one
 * round. */
#ifdef CUDA_EMULATION
static const size_t EXCHANGE_BLOCKS = 16;
#else
static const size_t EXCHANGE_BLOCKS = 1 << 16;
#endif

/* To bfloat16, to nearest even; NaN stays NaN. The bits of lossynet's CPU code (elements.c), for
 * NaN too, of which the hardware's conversion has only one. */
static __device__ inline float rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t even = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
    bits = (x != x ? quiet : even) & 0xffff0000;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* A block for each packet, as far as the grid goes; W elements in one access. */
template <int W, bool rounds>
__global__ void __launch_bounds__(EXCHANGE_THREADS)
    masked_copy_kernel(float *to, const float *from, const uint8_t *arrived, size_t n,
                       size_t packet, size_t packets) {
    for (size_t k = blockIdx.x; k < packets; k += gridDim.x) {
        if (!arrived[k]) continue;
        const size_t end = (k + 1) * packet < n ? (k + 1) * packet : n;
        size_t i = k * packet + threadIdx.x * W;
        for (; i + W <= end; i += blockDim.x * W) {
            float x[W];
            load(x, from + i);
            if (rounds)
                for (int j = 0; j < W; j++) x[j] = rounded(x[j]);
            store(to + i, x);
        }
        for (; i < end; i++) to[i] = rounds ? rounded(from[i]) : from[i]; /* the last few: one's */
    }
}

/* The same grid: 0 where a packet arrived, and what was sent elsewhere. */
template <int W, bool rounds>
__global__ void __launch_bounds__(EXCHANGE_THREADS)
    keep_lost_kernel(float *residual, const float *vector, const uint8_t *arrived, size_t n,
                     size_t packet, size_t packets) {
    for (size_t k = blockIdx.x; k < packets; k += gridDim.x) {
        const bool lost = !arrived[k];
        const size_t end = (k + 1) * packet < n ? (k + 1) * packet : n;
        size_t i = k * packet + threadIdx.x * W;
        for (; i + W <= end; i += blockDim.x * W) {
            float x[W] = {};
            if (lost) load(x, vector + i);
            if (rounds)
                for (int j = 0; j < W; j++) x[j] = rounded(x[j]);
            store(residual + i, x);
        }
        for (; i < end; i++) /* the last few: one's */
            residual[i] = !lost ? 0 : rounds ? rounded(vector[i]) : vector[i];
    }
}

/* The intrinsics keep the compiler from contracting product and sum. */
static __device__ inline float plus_share(float x, float share, float residual) {
#ifdef CUDA_EMULATION
    const volatile float product = share * residual;
    return x + product;
#else
    return __fadd_rn(x, __fmul_rn(share, residual));
#endif
}

template <int W>
__global__ void __launch_bounds__(EXCHANGE_THREADS)
    add_residual_kernel(float *vector, const float *residual, float share, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (i + W <= n) {
        float x[W], y[W];
        load(x, vector + i);
        load(y, residual + i);
        for (int j = 0; j < W; j++) x[j] = plus_share(x[j], share, y[j]);
        store(vector + i, x);
        return;
    }
    for (; i < n; i++) vector[i] = plus_share(vector[i], share, residual[i]);
}

template <int W>
__global__ void __launch_bounds__(EXCHANGE_THREADS) round_kernel(float *x, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (i + W <= n) {
        float y[W];
        load(y, x + i);
        for (int j = 0; j < W; j++) y[j] = rounded(y[j]);
        store(x + i, y);
        return;
    }
    for (; i < n; i++) x[i] = rounded(x[i]);
}

static __global__ void gather_kernel(float *out, const float *vector, const size_t *element,
                                     size_t n) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = vector[element[i]];
}

typedef void (*packet_kernel)(float *to, const float *from, const uint8_t *arrived, size_t n,
                              size_t packet, size_t packets);

/* A kernel that moves some packets of `from` to `to`: `by_vector` where alignment lets it. */
static inline void launch_by_packet(packet_kernel by_vector, packet_kernel by_element, float *to,
                                    const float *from, const uint8_t *arrived, size_t n,
                                    size_t packet, cudaStream_t stream) {
    const size_t packets = ceil_div(n, packet);
    const bool vectors = packet % wide<float> == 0 && are_aligned(to, from);
    launch(vectors ? by_vector : by_element,
           dim3((unsigned)(packets < EXCHANGE_BLOCKS ? packets : EXCHANGE_BLOCKS)),
           dim3(EXCHANGE_THREADS), 0, stream, to, from, arrived, n, packet, packets);
}

template <bool rounds>
static inline void launch_masked_copy(float *to, const float *from, const uint8_t *arrived,
                                      size_t n, size_t packet, cudaStream_t stream) {
    launch_by_packet(masked_copy_kernel<wide<float>, rounds>, masked_copy_kernel<1, rounds>, to,
                     from, arrived, n, packet, stream);
}

/* to[j] = from[j] for j < n where arrived[j / packet] is not 0 */
static inline void cuda_masked_copy(float *to, const float *from, const uint8_t *arrived, size_t n,
                                    size_t packet, cudaStream_t stream) {
    launch_masked_copy<false>(to, from, arrived, n, packet, stream);
}

/* The same of from[j] rounded to bfloat16; to may be from. */
static inline void cuda_masked_round(float *to, const float *from, const uint8_t *arrived, size_t n,
                                     size_t packet, cudaStream_t stream) {
    launch_masked_copy<true>(to, from, arrived, n, packet, stream);
}

/* residual[j] = 0 for j < n where arrived[j / packet] is not 0, and elsewhere vector[j] */
template <bool rounds>
static inline void launch_keep_lost(float *residual, const float *vector, const uint8_t *arrived,
                                    size_t n, size_t packet, cudaStream_t stream) {
    launch_by_packet(keep_lost_kernel<wide<float>, rounds>, keep_lost_kernel<1, rounds>, residual,
                     vector, arrived, n, packet, stream);
}

static inline void cuda_keep_lost(float *residual, const float *vector, const uint8_t *arrived,
                                  size_t n, size_t packet, bool rounds, cudaStream_t stream) {
    (rounds ? launch_keep_lost<true> : launch_keep_lost<false>)(residual, vector, arrived, n,
                                                                packet, stream);
}

/* vector[j] += share * residual[j], j < n */
static inline void cuda_add_residual(float *vector, const float *residual, float share, size_t n,
                                     cudaStream_t stream) {
    if (n == 0) return;
    const bool vectors = are_aligned(vector, residual);
    const size_t block = EXCHANGE_THREADS * (vectors ? wide<float> : 1);
    launch(vectors ? add_residual_kernel<wide<float>> : add_residual_kernel<1>,
           dim3((unsigned)ceil_div(n, block)), dim3(EXCHANGE_THREADS), 0, stream, vector, residual,
           share, n);
}

/* x (n) = x, rounded to bfloat16 */
static inline void cuda_round(float *x, size_t n, cudaStream_t stream) {
    if (n == 0) return;
    const bool vectors = are_aligned(x);
    const size_t block = EXCHANGE_THREADS * (vectors ? wide<float> : 1);
    launch(vectors ? round_kernel<wide<float>> : round_kernel<1>,
           dim3((unsigned)ceil_div(n, block)), dim3(EXCHANGE_THREADS), 0, stream, x, n);
}

/* out[i] = vector[element[i]], i < n */
static inline void cuda_gather(float *out, const float *vector, const size_t *element, size_t n,
                               cudaStream_t stream) {
    launch(gather_kernel, dim3((unsigned)ceil_div(n, EXCHANGE_THREADS)), dim3(EXCHANGE_THREADS), 0,
           stream, out, vector, element, n);
}

#endif
