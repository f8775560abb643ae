/* exchange.cuh — the exchange between workers that share a device. Kernels copy packets, unchanged
 * or rounded as on the network (to bfloat16 or in blocks), keep gradients that were lost, and
 * gather single elements for the host. (The average of packets is in weighted_sum.cuh.) */
#ifndef LLMC_BACKEND_CUDA_EXCHANGE_H
#define LLMC_BACKEND_CUDA_EXCHANGE_H

#include "llmc/backend/backend.h"
#include "llmc/backend/cuda/common.cuh"

enum { EXCHANGE_THREADS = 256 };

/* The most CUDA blocks of a launch. Under emulation they are so few that small vectors need more
 * than one round. */
#ifdef CUDA_EMULATION
static const size_t EXCHANGE_BLOCKS = 16;
#else
static const size_t EXCHANGE_BLOCKS = 1 << 16;
#endif

/* Rounds to bfloat16, to nearest even; NaN stays NaN. The bits are those of lossynet's CPU code
 * (elements.c), also for NaN. (The hardware's conversion turns all NaN into one.) */
static __device__ inline float rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t even = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
    bits = (x != x ? quiet : even) & 0xffff0000;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* A CUDA block copies packets k, k + gridDim.x, ...; an access moves W elements. */
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
        /* One thread copies the last few. */
        for (; i < end; i++) to[i] = rounds ? rounded(from[i]) : from[i];
    }
}

/* ---- rounding in blocks of 32 with a scale: the bits of lossynet's elements.c ---- */

enum { WARP_BLOCK = 32, BLOCK_LEAST = 7, BLOCK_NOT_FINITE = 255 };

static __device__ inline float of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static __device__ inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* mix64 is ln_mix (base.h), mix32 is lowbias32 (Wellons 2018). */
static __device__ inline uint64_t mix64(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static __device__ inline uint32_t mix32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

/* A warp rounds one block: each lane passes its element x, or 0 past the end. Magnitudes are in the
 * order of their bits, so that one instruction (redux.sync) finds the largest. */
static __device__ inline float rounded_in_block(float x, uint32_t lane, int bits, bool random,
                                                uint64_t key) {
    const uint32_t most = __reduce_max_sync(0xffffffffu, bits_of(x) & 0x7fffffff);
    uint32_t scale = (most + ((1u << (25 - bits)) - 1)) >> 23;
    if (scale >= BLOCK_NOT_FINITE) return of_bits(0x7fc00000);
    if (scale < BLOCK_LEAST) scale = BLOCK_LEAST;
    const uint32_t exponent = scale - (uint32_t)(bits - 2);
    const float scaled = x * of_bits((254 - exponent) << 23), unit = of_bits(exponent << 23);
    const float shift = 0x1.8p23f; /* numbers of this size have no fraction; ties to even */
    if (!random) return (scaled + shift - shift) * unit;
    const uint32_t number = mix32((uint32_t)mix64(key) + lane) >> 16;
    return floorf(scaled + ((float)number + 0.5f) * 0x1p-16f) * unit;
}

/* The same grid, with one warp per block of 32. arrived NULL: all packets arrived. `error` gets what
 * rounding takes away, unless it is NULL. */
static __global__ void __launch_bounds__(EXCHANGE_THREADS)
    round_blocks_kernel(float *to, bfloat16 *error, const float *from, const uint8_t *arrived,
                        size_t n, size_t packet, size_t packets, int bits, bool random,
                        uint64_t key) {
    const uint32_t lane = threadIdx.x % WARP_BLOCK;
    for (size_t k = blockIdx.x; k < packets; k += gridDim.x) {
        if (arrived && !arrived[k]) continue;
        const size_t end = (k + 1) * packet < n ? (k + 1) * packet : n;
        size_t block = k * packet + threadIdx.x / WARP_BLOCK * WARP_BLOCK;
        for (; block < end; block += blockDim.x) {
            const size_t i = block + lane;
            const float x = i < end ? from[i] : 0;
            const float y = rounded_in_block(x, lane, bits, random, key + block);
            if (i < end) to[i] = y;
            if (error && i < end) error[i] = from_float<bfloat16>(x - y);
        }
    }
}

/* ---- gradients that were lost ---- */

/* The same grid as in copies. The residual becomes 0 where a packet arrived, and elsewhere the
 * vector. With LOST_ADDED the residual stays where a packet arrived, and the vector is added to it
 * elsewhere. */
template <int W, enum backend_lost how>
__global__ void __launch_bounds__(EXCHANGE_THREADS)
    keep_lost_kernel(bfloat16 *residual, const float *vector, const uint8_t *arrived, size_t n,
                     size_t packet, size_t packets) {
    for (size_t k = blockIdx.x; k < packets; k += gridDim.x) {
        const bool lost = !arrived[k];
        if (how == LOST_ADDED && !lost) continue;
        const size_t end = (k + 1) * packet < n ? (k + 1) * packet : n;
        size_t i = k * packet + threadIdx.x * W;
        for (; i + W <= end; i += blockDim.x * W) {
            float x[W] = {}, before[W] = {};
            if (lost) load(x, vector + i);
            if (how == LOST_ADDED) load(before, residual + i);
            for (int j = 0; j < W && how == LOST_ADDED; j++) x[j] = before[j] + x[j];
            store(residual + i, x);
        }
        for (; i < end; i++) { /* one thread does the last few */
            const float x = lost ? vector[i] : 0;
            residual[i] = from_float<bfloat16>(how == LOST_ADDED ? to_float(residual[i]) + x : x);
        }
    }
}

/* The intrinsics keep the compiler from fusing product and sum, which would round only once. */
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
    add_residual_kernel(float *vector, const bfloat16 *residual, float share, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (i + W <= n) {
        float x[W], y[W];
        load(x, vector + i);
        load(y, residual + i);
        for (int j = 0; j < W; j++) x[j] = plus_share(x[j], share, y[j]);
        store(vector + i, x);
        return;
    }
    for (; i < n; i++) vector[i] = plus_share(vector[i], share, to_float(residual[i]));
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

template <typename To>
using packet_kernel = void (*)(To *to, const float *from, const uint8_t *arrived, size_t n,
                               size_t packet, size_t packets);

/* Launches a kernel on the packets of `from` and `to`: by_vector, which moves wide<To> elements, if
 * alignment permits it. */
template <typename To>
static inline void launch_by_packet(packet_kernel<To> by_vector, packet_kernel<To> by_element,
                                    To *to, const float *from, const uint8_t *arrived, size_t n,
                                    size_t packet, cudaStream_t stream) {
    const size_t packets = ceil_div(n, packet);
    const bool vectors = packet % wide<To> == 0 && are_aligned(to, from);
    launch(vectors ? by_vector : by_element,
           dim3((unsigned)(packets < EXCHANGE_BLOCKS ? packets : EXCHANGE_BLOCKS)),
           dim3(EXCHANGE_THREADS), 0, stream, to, from, arrived, n, packet, packets);
}

template <bool rounds>
static inline void launch_masked_copy(float *to, const float *from, const uint8_t *arrived,
                                      size_t n, size_t packet, cudaStream_t stream) {
    launch_by_packet<float>(masked_copy_kernel<wide<float>, rounds>, masked_copy_kernel<1, rounds>,
                            to, from, arrived, n, packet, stream);
}

/* to[j] = from[j] for j < n where arrived[j / packet] is not 0 */
static inline void cuda_masked_copy(float *to, const float *from, const uint8_t *arrived, size_t n,
                                    size_t packet, cudaStream_t stream) {
    launch_masked_copy<false>(to, from, arrived, n, packet, stream);
}

/* The same with from[j] rounded to bfloat16; to may be from. */
static inline void cuda_masked_round(float *to, const float *from, const uint8_t *arrived, size_t n,
                                     size_t packet, cudaStream_t stream) {
    launch_masked_copy<true>(to, from, arrived, n, packet, stream);
}

static inline void launch_round_blocks(float *to, bfloat16 *error, const float *from,
                                       const uint8_t *arrived, size_t n, size_t packet, int bits,
                                       const uint64_t *key, cudaStream_t stream) {
    if (!arrived) packet = 32 * EXCHANGE_THREADS;
    const size_t packets = ceil_div(n, packet);
    launch(round_blocks_kernel,
           dim3((unsigned)(packets < EXCHANGE_BLOCKS ? packets : EXCHANGE_BLOCKS)),
           dim3(EXCHANGE_THREADS), 0, stream, to, error, from, arrived, n, packet, packets, bits,
           key != NULL, key ? *key : 0);
}

/* The same with from[j] rounded in blocks; see backend.h. */
static inline void cuda_round_blocks(float *to, const float *from, const uint8_t *arrived, size_t n,
                                     size_t packet, int bits, const uint64_t *key,
                                     cudaStream_t stream) {
    launch_round_blocks(to, NULL, from, arrived, n, packet, bits, key, stream);
}

/* Rounds vector[j], j < n, in blocks, and computes residual[j]; see keep_error in backend.h. */
static inline void cuda_keep_error(bfloat16 *residual, float *vector, size_t n, int bits,
                                   const uint64_t *key, cudaStream_t stream) {
    launch_round_blocks(vector, residual, vector, NULL, n, 0, bits, key, stream);
}

/* Computes residual[j], j < n; see keep_lost in backend.h. */
template <enum backend_lost how>
static inline void launch_keep_lost(bfloat16 *residual, const float *vector, const uint8_t *arrived,
                                    size_t n, size_t packet, cudaStream_t stream) {
    launch_by_packet<bfloat16>(keep_lost_kernel<wide<bfloat16>, how>, keep_lost_kernel<1, how>,
                               residual, vector, arrived, n, packet, stream);
}

static inline void cuda_keep_lost(bfloat16 *residual, const float *vector, const uint8_t *arrived,
                                  size_t n, size_t packet, enum backend_lost how,
                                  cudaStream_t stream) {
    decltype(launch_keep_lost<LOST_ALONE>) *const launchers[] = {launch_keep_lost<LOST_ALONE>,
                                                                 launch_keep_lost<LOST_ADDED>};
    launchers[how](residual, vector, arrived, n, packet, stream);
}

/* vector[j] += share * residual[j], j < n */
static inline void cuda_add_residual(float *vector, const bfloat16 *residual, float share, size_t n,
                                     cudaStream_t stream) {
    if (n == 0) return;
    const bool vectors = are_aligned(vector, residual);
    const size_t block = EXCHANGE_THREADS * (vectors ? wide<bfloat16> : 1);
    launch(vectors ? add_residual_kernel<wide<bfloat16>> : add_residual_kernel<1>,
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
