/* common.cuh — what every kernel family needs: the working types, 16-byte loads and stores,
 * launches, error checks, and reductions over a warp and a block.
 *
 * The same sources are compiled by nvcc for a GPU and, with -DCUDA_EMULATION, by g++ for tests (see
 * dev/emulation/cuda_emu.h). A family's header has its kernels first, then its launchers. A
 * launcher is named cuda_<operation> after the member of `struct backend` (llmc/backend/backend.h)
 * that it implements. It takes the arguments of that member in the same order, and a stream.
 * Pointers are into device memory. It only queues work. T is float or bfloat16.
 */
#ifndef LLMC_BACKEND_CUDA_COMMON_H
#define LLMC_BACKEND_CUDA_COMMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef CUDA_EMULATION
#include "dev/emulation/cuda_emu.h"
#else
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#endif

typedef __nv_bfloat16 bfloat16;

/* ---- errors and launches ------------------------------------------------------------------ */

#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)

/* An error here is a fault of the program or of the device, so the program ends after one line.
 * (streams.cu) */
void cuda_check(cudaError_t error, const char *call, const char *file, int line);
/* Call these before and after a launch. */
void cuda_launching(const void *kernel);
void cuda_launched(const void *kernel);

static inline void cuda_check_workspace(size_t got, size_t needed) {
    if (got >= needed) return;
    fprintf(stderr, "workspace of %zu bytes, %zu are needed\n", got, needed);
    exit(1);
}

/* Returns `items`, which a kernel counts up to `most` only. */
static inline uint32_t cuda_items(const char *operation, size_t items, size_t most) {
    if (items <= most) return (uint32_t)items;
    fprintf(stderr, "%s: %zu items, expected at most %zu on a GPU (a smaller --batch has fewer)\n",
            operation, items, most);
    exit(1);
}

#ifndef CUDA_EMULATION
/* Launches kernel<<<grid, block, shared_bytes, stream>>>(arguments...). A kernel must ask for more
 * than 48 KiB of shared memory through an attribute. It then also asks the SM for as much of its
 * cache as possible, so that several blocks fit. The 48 KiB include a kernel's static shared
 * memory, which test_nvcc.py holds below 16 KiB. */
template <typename... P, typename... A>
static void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, A... arguments) {
    if (shared_bytes > 32 << 10) {
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        (int)shared_bytes));
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
    }
    cuda_launching((const void *)kernel);
    kernel<<<grid, block, shared_bytes, stream>>>(arguments...);
    cuda_launched((const void *)kernel);
}

/* Calls a library, which gives its work to the stream. */
template <typename F> static void launch_library(cudaStream_t stream, const F &call) {
    call(stream);
}
#endif

/* The block's dynamic shared memory, aligned to 128 bytes. */
__device__ __forceinline__ void *dynamic_shared(void) {
#ifdef CUDA_EMULATION
    return cuda_emu::dynamic_shared();
#else
    extern __shared__ __align__(128) unsigned char dynamic_shared_memory[];
    return dynamic_shared_memory;
#endif
}

__host__ __device__ static inline size_t ceil_div(size_t a, size_t b) {
    return (a + b - 1) / b;
}

#define LOG2_E 1.4426950408889634f

/* ---- numbers in memory --------------------------------------------------------------------- */

__device__ __forceinline__ float to_float(float x) {
    return x;
}
__device__ __forceinline__ float to_float(bfloat16 x) {
    return __bfloat162float(x);
}

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <> __device__ __forceinline__ bfloat16 from_float<bfloat16>(float x) {
    return __float2bfloat16(x); /* to nearest, ties to even */
}

/* Two numbers as bfloat16 in one register, `low` in the lower half. */
__device__ __forceinline__ uint32_t pack_bfloat16(float low, float high) {
    bfloat16 both[2] = {from_float<bfloat16>(low), from_float<bfloat16>(high)};
    uint32_t word;
    memcpy(&word, both, 4);
    return word;
}

template <int bytes> struct word;
template <> struct word<2> { typedef uint16_t type; };
template <> struct word<4> { typedef uint32_t type; };
template <> struct word<8> { typedef uint2 type; };
template <> struct word<16> { typedef uint4 type; };

/* How many T the widest access, 16 bytes, moves. */
template <typename T> constexpr int wide = 16 / sizeof(T);

template <typename... P> static inline bool are_aligned(const P *...p) { /* to 16 bytes */
    return (((uintptr_t)p | ...) & 15) == 0;
}

/* Threads of a block that works on one row of `items` items: whole warps, at most `most`. */
static inline unsigned row_threads(size_t items, unsigned most) {
    size_t threads = ceil_div(items, 32) * 32;
    return threads < most ? (unsigned)threads : most;
}

/* N neighbouring numbers as they are in memory, in as few registers as possible. */
template <typename T, int N> struct packed {
    static constexpr int bytes = N * sizeof(T) < 16 ? N * sizeof(T) : 16,
                         words = N * sizeof(T) / bytes;
    typename word<bytes>::type raw[words];
};

template <int N, typename T>
__device__ __forceinline__ void unpack(float (&x)[N], const struct packed<T, N> &from) {
    T value[N];
    memcpy(value, from.raw, sizeof value);
#pragma unroll
    for (int k = 0; k < N; k++) x[k] = to_float(value[k]);
}

template <int N, typename T>
__device__ __forceinline__ void pack(struct packed<T, N> *to, const float (&x)[N]) {
    T value[N];
#pragma unroll
    for (int k = 0; k < N; k++) value[k] = from_float<T>(x[k]);
    memcpy(to->raw, value, sizeof value);
}

/* Loads N * sizeof(T) bytes in one access, or in several of 16 bytes if that is more. p must be
 * aligned to the size of an access. */
template <int N, typename T>
__device__ __forceinline__ void load_packed(struct packed<T, N> *to, const T *p) {
    typedef typename word<packed<T, N>::bytes>::type access;
#pragma unroll
    for (int i = 0; i < packed<T, N>::words; i++) to->raw[i] = ((const access *)p)[i];
}

template <int N, typename T>
__device__ __forceinline__ void store_packed(T *p, const struct packed<T, N> &from) {
    typedef typename word<packed<T, N>::bytes>::type access;
#pragma unroll
    for (int i = 0; i < packed<T, N>::words; i++) ((access *)p)[i] = from.raw[i];
}

template <int N, typename T> __device__ __forceinline__ void load(float (&x)[N], const T *p) {
    struct packed<T, N> raw;
    load_packed(&raw, p);
    unpack(x, raw);
}

template <int N, typename T> __device__ __forceinline__ void store(T *p, const float (&x)[N]) {
    struct packed<T, N> from;
    pack(&from, x);
    store_packed(p, from);
}

/* ---- reductions, always in the same order ---------------------------------------------------- */

struct sum {
    template <typename T> __device__ T operator()(T a, T b) const {
        return a + b;
    }
};
struct maximum {
    __device__ float operator()(float a, float b) const {
        return fmaxf(a, b);
    }
};

/* Reduces over the warp; every lane gets the result. */
template <typename Operation, typename T> __device__ __forceinline__ T warp_reduce(T x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
        x = Operation()(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}

/* Reduces over the block, which has whole warps. All threads must call it; all get the result. */
template <typename Operation, typename T> __device__ __forceinline__ T block_reduce(T x) {
    __shared__ T part[32];
    int warps = blockDim.x / 32;
    x = warp_reduce<Operation>(x);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    x = part[0];
    for (int i = 1; i < warps; i++) x = Operation()(x, part[i]);
    __syncthreads(); /* `part` is the next call's */
    return x;
}

#endif
