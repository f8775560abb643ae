/* exchange.cuh — the exchange between workers that share a device. One launch does the work of a phase
 * for all packets and all workers: it rounds packets as on the network (to bfloat16 or in blocks),
 * averages them, or copies those that arrived. Other kernels round, and gather single elements for
 * the host. */
#ifndef LLMC_BACKEND_CUDA_EXCHANGE_H
#define LLMC_BACKEND_CUDA_EXCHANGE_H

#include "llmc/backend/backend.h"
#include "llmc/backend/cuda/common.cuh"
#include "llmc/backend/cuda/weighted_sum.cuh"

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

/* A CUDA block works on packets of one worker after another: item i is packet i / workers of worker
 * i % workers, so that all workers read one packet while it is in the cache. */
struct exchange_item {
    struct backend_packet packet;
    int worker;
    size_t mark; /* of the packet, in marks by (worker, packet) */
    bool takes;  /* the worker sends or receives this packet */
};

static __device__ inline size_t exchange_items(const struct backend_exchange &e) {
    return (size_t)e.packets * (size_t)e.workers;
}

static __device__ inline struct exchange_item exchange_item_of(const struct backend_exchange &e,
                                                               size_t i) {
    const size_t k = i / (size_t)e.workers, worker = i % (size_t)e.workers;
    const struct backend_packet packet = e.packet[k];
    return {packet, (int)worker, worker * e.packets + k,
            e.takes[worker * (size_t)e.owners + (size_t)packet.owner] != 0};
}

template <typename... P> static __device__ inline bool wide_accesses(const P *...p) {
    return (((uintptr_t)p | ...) & 15) == 0;
}

/* A CUDA block copies n elements; an access moves 4 if alignment permits it. to may be from. */
template <bool rounds>
static __device__ inline void copy_elements(float *to, const float *from, uint32_t n) {
    const uint32_t whole = wide_accesses(to, from) ? n / 4 * 4 : 0;
    for (uint32_t i = threadIdx.x * 4; i < whole; i += blockDim.x * 4) {
        float x[4];
        load(x, from + i);
        if (rounds)
            for (int j = 0; j < 4; j++) x[j] = rounded(x[j]);
        store(to + i, x);
    }
    for (uint32_t i = whole + threadIdx.x; i < n; i += blockDim.x)
        to[i] = rounds ? rounded(from[i]) : from[i];
}

/* ---- rounding in blocks of 32 with a scale: the bits of lossynet's elements.c ---- */

enum { BLOCK_LANES = 8, BLOCK_LEAST = 7, BLOCK_NOT_FINITE = 255 };

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

/* Eight lanes of a warp round one block: each passes four elements, from `first` on, or 0 past the
 * end. Magnitudes are in the order of their bits. */
static __device__ inline void round_in_block(float (&x)[4], uint32_t first, int bits, bool random,
                                             uint64_t key) {
    const float shift = 0x1.8p23f; /* numbers of this size have no fraction; ties to even */
    const uint32_t lot = random ? (uint32_t)mix64(key) : 0;
    uint32_t most = 0;
    for (int j = 0; j < 4; j++) most = max(most, bits_of(x[j]) & 0x7fffffff);
    for (int lanes = BLOCK_LANES / 2; lanes > 0; lanes /= 2)
        most = max(most, __shfl_xor_sync(0xffffffffu, most, lanes));
    uint32_t scale = (most + ((1u << (25 - bits)) - 1)) >> 23;
    const bool finite = scale < BLOCK_NOT_FINITE;
    if (scale < BLOCK_LEAST) scale = BLOCK_LEAST;
    const uint32_t exponent = scale - (uint32_t)(bits - 2);
    const float factor = of_bits((254 - exponent) << 23), unit = of_bits(exponent << 23);
    for (uint32_t j = 0; j < 4; j++) {
        const float scaled = x[j] * factor;
        const uint32_t number = mix32(lot + first + j) >> 16;
        const float whole =
            random ? floorf(scaled + ((float)number + 0.5f) * 0x1p-16f) : scaled + shift - shift;
        x[j] = finite ? whole * unit : of_bits(0x7fc00000);
    }
}

/* The same in blocks; the block at element j uses the key `key` + j. An access moves 4 elements if
 * alignment permits it. `narrow`: rounds to bfloat16 before. */
static __device__ inline void round_elements(float *to, const float *from, uint32_t n, int bits,
                                             bool random, uint64_t key, bool narrow) {
    const bool wide = wide_accesses(to, from);
    const uint32_t lane = threadIdx.x % 32, first = lane % BLOCK_LANES * 4;
    for (uint32_t warp = threadIdx.x - lane; warp * 4 < n; warp += blockDim.x) {
        const uint32_t i = (warp + lane) * 4;
        const bool whole = wide && i + 4 <= n;
        float x[4] = {};
        if (whole)
            load(x, from + i);
        else
            for (uint32_t j = 0; j < 4 && i + j < n; j++) x[j] = from[i + j];
        for (int j = 0; narrow && j < 4; j++) x[j] = rounded(x[j]);
        round_in_block(x, first, bits, random, key + (i - first));
        if (whole)
            store(to + i, x);
        else
            for (uint32_t j = 0; j < 4 && i + j < n; j++) to[i + j] = x[j];
    }
}

/* ---- the phases, see backend.h ---- */

enum exchange_how { EXCHANGE_AS_IS, EXCHANGE_TO_BF16, EXCHANGE_IN_BLOCKS };

template <enum exchange_how how>
__global__ void __launch_bounds__(EXCHANGE_THREADS)
    exchange_round_kernel(struct backend_exchange e, float *const *vector, int bits,
                          const uint64_t *key, bool narrow) {
    const size_t items = exchange_items(e);
    for (size_t i = blockIdx.x; i < items; i += gridDim.x) {
        const struct exchange_item it = exchange_item_of(e, i);
        if (!it.takes && !(narrow && it.worker == it.packet.owner)) continue;
        float *x = vector[it.worker] + it.packet.element;
        if (how == EXCHANGE_IN_BLOCKS && it.takes)
            round_elements(x, x, it.packet.count, bits, key != NULL,
                           key ? key[it.worker] + it.packet.element : 0, narrow);
        else
            copy_elements<true>(x, x, it.packet.count);
    }
}

template <enum exchange_how how>
__global__ void __launch_bounds__(EXCHANGE_THREADS)
    exchange_copy_kernel(struct backend_exchange e, float *const *vector, const float *const *ahead,
                         const uint8_t *arrived, int bits) {
    const size_t items = exchange_items(e);
    for (size_t i = blockIdx.x; i < items; i += gridDim.x) {
        const struct exchange_item it = exchange_item_of(e, i);
        const struct backend_packet &p = it.packet;
        if (!it.takes || !arrived[it.mark]) continue;
        const float *from = ahead ? ahead[p.owner] + p.owned : vector[p.owner] + p.element;
        float *to = vector[it.worker] + p.element;
        if (how == EXCHANGE_IN_BLOCKS)
            round_elements(to, from, p.count, bits, false, 0, false);
        else
            copy_elements<how == EXCHANGE_TO_BF16>(to, from, p.count);
    }
}

/* A CUDA block sums a part of a packet, then the next. sender (owners, groups) */
enum { EXCHANGE_PART = 4 * EXCHANGE_THREADS };

static __global__ void __launch_bounds__(EXCHANGE_THREADS)
    exchange_average_kernel(struct backend_exchange e, float *const *vector,
                            const float *const *sender, const float *weight, uint32_t parts) {
    const size_t all = (size_t)e.packets * parts;
    for (size_t i = blockIdx.x; i < all; i += gridDim.x) {
        const size_t k = i / parts;
        const struct backend_packet p = e.packet[k];
        const float *const *from = sender + (size_t)p.owner * (size_t)e.groups;
        float *to = vector[p.owner];
        const uint32_t begin = (uint32_t)(i % parts) * EXCHANGE_PART;
        const uint32_t end = min(begin + (uint32_t)EXCHANGE_PART, p.count);
        const uint32_t whole = p.element % 4 == 0 ? end / 4 * 4 : begin;
        const uint32_t j = begin + threadIdx.x * 4;
        if (j < whole) {
            float total[4] = {};
            sum_senders(total, from, weight + k * (size_t)e.groups, e.groups, p.element + j);
            store(to + p.element + j, total);
        }
        for (uint32_t r = max(whole, begin) + threadIdx.x; r < end; r += blockDim.x) {
            float total[1] = {};
            sum_senders(total, from, weight + k * (size_t)e.groups, e.groups, p.element + r);
            to[p.element + r] = total[0];
        }
    }
}

/* ---- single vectors ---- */

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

/* out[i] = vector[of[i]][element[i]], i < n; of NULL: out[v * n + i] = vector[v][element[i]], n being
 * `elements`. */
static __global__ void gather_kernel(float *out, float *const *vector, const size_t *element,
                                     const int32_t *of, size_t elements, size_t n) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = vector[of ? (size_t)of[i] : i / elements][element[i % elements]];
}

/* ---- launchers; arrays are in device memory ---- */

static inline dim3 exchange_grid(size_t items) {
    return dim3((unsigned)(items < EXCHANGE_BLOCKS ? items : EXCHANGE_BLOCKS));
}

static inline void cuda_exchange_round(const struct backend_exchange *e, float *const *vector,
                                       int bits, const uint64_t *key, bool narrow,
                                       cudaStream_t stream) {
    launch(bits == 16 ? exchange_round_kernel<EXCHANGE_TO_BF16>
                      : exchange_round_kernel<EXCHANGE_IN_BLOCKS>,
           exchange_grid((size_t)e->packets * (size_t)e->workers), dim3(EXCHANGE_THREADS), 0,
           stream, *e, vector, bits, key, narrow);
}

static inline void cuda_exchange_copy(const struct backend_exchange *e, float *const *vector,
                                      const float *const *ahead, const uint8_t *arrived, int bits,
                                      cudaStream_t stream) {
    launch(bits == 32   ? exchange_copy_kernel<EXCHANGE_AS_IS>
           : bits == 16 ? exchange_copy_kernel<EXCHANGE_TO_BF16>
                        : exchange_copy_kernel<EXCHANGE_IN_BLOCKS>,
           exchange_grid((size_t)e->packets * (size_t)e->workers), dim3(EXCHANGE_THREADS), 0,
           stream, *e, vector, ahead, arrived, bits);
}

/* sender (owners, groups): the vector of each partner */
static inline void cuda_exchange_average(const struct backend_exchange *e, float *const *vector,
                                         const float *const *sender, const float *weight,
                                         cudaStream_t stream) {
    const uint32_t parts = (uint32_t)ceil_div(e->longest, EXCHANGE_PART);
    launch(exchange_average_kernel, exchange_grid((size_t)e->packets * parts),
           dim3(EXCHANGE_THREADS), 0, stream, *e, vector, sender, weight, parts);
}

/* x (n) = x, rounded to bfloat16 */
static inline void cuda_round(float *x, size_t n, cudaStream_t stream) {
    if (n == 0) return;
    const bool vectors = are_aligned(x);
    const size_t block = EXCHANGE_THREADS * (vectors ? wide<float> : 1);
    launch(vectors ? round_kernel<wide<float>> : round_kernel<1>,
           dim3((unsigned)ceil_div(n, block)), dim3(EXCHANGE_THREADS), 0, stream, x, n);
}

/* elements: of the list; n: of `out` */
static inline void cuda_gather(float *out, float *const *vector, const size_t *element,
                               const int32_t *of, size_t elements, size_t n, cudaStream_t stream) {
    launch(gather_kernel, dim3((unsigned)ceil_div(n, EXCHANGE_THREADS)), dim3(EXCHANGE_THREADS), 0,
           stream, out, vector, element, of, elements, n);
}

#endif
