/* cuda_emu.h — runs the project's CUDA kernel sources on a CPU, so that they are tested where there
 * is neither a GPU nor a CUDA toolkit. For tests only.
 *
 * The sources in llmc/backend/cuda are compiled by g++ with -DCUDA_EMULATION and see this file
 * instead of the toolkit's headers. A kernel is an ordinary function. Every CUDA thread of a block
 * is a fiber, blocks run one after the other, all on the calling thread. A fiber runs until it
 * meets a barrier or a warp collective (shuffle, ballot, reduction, ldmatrix, mma), so a missing
 * barrier is not hidden by luck: the first warp runs to its end before the second begins.
 * cuda_emu_order() changes the order.
 *
 *   cuda_emu.h     types, keywords, built-in variables and functions of device code, launch()
 *   cuda_emu.cpp   the scheduler; never compiled with -fsanitize=thread itself, see there
 *   ptx_emu.h      the PTX instructions of llmc/backend/cuda/ptx.cuh, as the ISA defines them
 *   host_emu.h     memory, streams and events of the runtime API
 *   streams_emu.h  when work on a stream runs: as late, or as early, as it may
 *
 * What it finds: wrong results in any order of threads; reads of shared memory that nobody wrote
 * (it is NaN when a block starts); deadlocks, collectives whose lanes do not agree, threads of one
 * block at different barriers, misaligned or misplaced ldmatrix and cp.async, copies that nobody
 * waited for; with the address sanitizer, accesses outside global, dynamic and static shared
 * memory; with the thread sanitizer, data races inside and between blocks, by line; streams that do
 * not wait for each other where they must. What it cannot find: bank conflicts, coalescing,
 * occupancy, wrong operands of real asm statements.
 */
#ifndef CUDA_EMU_H
#define CUDA_EMU_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

/* ---- keywords ----------------------------------------------------------------------------- */

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
/* Shared variables are static at block scope. As thread_local they lie in the executable's TLS
 * segment, which the emulation fills with NaN before each block, and restores after the launch. The
 * address sanitizer puts red zones only around plain statics. */
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static
#else
#define __shared__ thread_local
#endif

/* ---- vector types ------------------------------------------------------------------------- */

struct alignas(8) uint2 {
    unsigned x, y;
};
struct uint3 {
    unsigned x, y, z;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

/* ---- bfloat16: the upper half of a float32, rounded to nearest even ------------------------ */

struct __nv_bfloat16 {
    uint16_t bits;
};

static inline float __bfloat162float(__nv_bfloat16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline __nv_bfloat16 __float2bfloat16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (f != f) return __nv_bfloat16{0x7fff};
    return __nv_bfloat16{(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

/* ---- the runtime (cuda_emu.cpp) ------------------------------------------------------------ */

enum cuda_emu_order { CUDA_EMU_FORWARD, CUDA_EMU_REVERSE, CUDA_EMU_RANDOM };
/* Sets the order of blocks, warps and lanes in the launches that follow. Forward at the start. */
void cuda_emu_order(enum cuda_emu_order order, uint64_t seed);

namespace cuda_emu {

enum operation { SHUFFLE, BALLOT, SYNCWARP, LDMATRIX, MMA };

/* One warp collective under way, with the inputs and outputs of its lanes. */
struct group {
    uint32_t mask, arrived, left;
    enum operation operation;
    uint32_t in[32][12], out[32][16];
};

struct copy { /* one cp.async; source NULL writes zeros */
    void *destination;
    const void *source;
    int commit_group;
};

struct thread {
    uint3 index;
    int lane, warp, state;
    const char *where; /* what it waits in */
    void *stack_pointer, *stack, *tsan, *asan_stack;
    int commits, copies;
    int barriers, warp_barriers; /* so far */
    struct copy queue[64];
};

extern struct thread *current;
extern uint3 block_index;
extern dim3 block_size, grid_size;

[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char *format, ...);
void run(void (*kernel)(void *), void *arguments, dim3 grid, dim3 block, size_t shared_bytes);
void *dynamic_shared(void);
bool is_shared(const void *p);
void sync_block(const char *where);
void fence(void);

/* Joins a collective: passes `words_in` words and waits for all lanes of the mask; the last one
 * runs `finish`. Then it receives `words_out` words: the input of lane `source`, or, if that is
 * negative, this lane's output. */
void meet(uint32_t mask, enum operation operation, const uint32_t *in, int words_in,
          void (*finish)(struct group *), int source, uint32_t *out, int words_out,
          const char *where);
void finish_ballot(struct group *g);

template <typename... P, size_t... I, typename Tuple>
static void call(void (*kernel)(P...), Tuple &arguments, std::index_sequence<I...>) {
    kernel(std::get<I>(arguments)...);
}

} // namespace cuda_emu

#include "dev/emulation/streams_emu.h"

struct ptx_kernel;
namespace cuda_emu {
/* In programs with dev/emulation/ptx: the kernel as nvcc compiled it, and a launch of it. */
const struct ptx_kernel *find_ptx(void *kernel) __attribute__((weak));
void run_ptx(const struct ptx_kernel *kernel, const std::string &params, dim3 grid, dim3 block,
             size_t shared_bytes) __attribute__((weak));

/* Adds a parameter to those before, aligned to its size as a device's compiler does. */
template <typename T> static void add_param(std::string *params, const T &x) {
    params->resize((params->size() + alignof(T) - 1) / alignof(T) * alignof(T));
    params->append((const char *)&x, sizeof x);
}
} // namespace cuda_emu

/* As in llmc/backend/cuda/common.cuh. Every thread gets its own copy of the arguments. */
template <typename... P, typename... A>
static void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, A... arguments) {
    typedef std::tuple<std::decay_t<P>...> tuple;
    typedef std::pair<void (*)(P...), tuple> call;
    call all(kernel, tuple(arguments...));
    if (cuda_emu::find_ptx) {
        std::string params;
        std::apply([&](const auto &...x) { (cuda_emu::add_param(&params, x), ...); }, all.second);
        const struct ptx_kernel *ptx = cuda_emu::find_ptx((void *)kernel);
        return cuda_emu::enqueue(stream, [ptx, params, grid, block, shared_bytes] {
            cuda_emu::run_ptx(ptx, params, grid, block, shared_bytes);
        });
    }
    cuda_emu::enqueue(stream, [all, grid, block, shared_bytes]() mutable {
        cuda_emu::run(
            [](void *p) {
                tuple own = ((call *)p)->second;
                cuda_emu::call(((call *)p)->first, own, std::index_sequence_for<P...>());
            },
            &all, cuda_emu::begin_kernel((const void *)all.first, grid), block, shared_bytes);
    });
}

/* As in common.cuh. The library computes when it is called, and so the call is work of the stream.
 * The host waits for it, since a call says whether it fails. */
template <typename F> static void launch_library(cudaStream_t stream, const F &call) {
    cuda_emu::enqueue(stream, [stream, call] { call(stream); });
    if (!cuda_emu::records(stream)) cuda_emu::wait_for(stream);
}

/* ---- built-in variables and functions ------------------------------------------------------- */

#define threadIdx ((const uint3 &)cuda_emu::current->index)
#define blockIdx ((const uint3 &)cuda_emu::block_index)
#define blockDim ((const dim3 &)cuda_emu::block_size)
#define gridDim ((const dim3 &)cuda_emu::grid_size)
#define warpSize 32

#define CUDA_EMU_TEXT_(x) #x
#define CUDA_EMU_TEXT(x) CUDA_EMU_TEXT_(x)
#define __syncthreads() cuda_emu::sync_block(__FILE__ ":" CUDA_EMU_TEXT(__LINE__))

static inline void __syncwarp(uint32_t mask = 0xffffffffu) {
    cuda_emu::meet(mask, cuda_emu::SYNCWARP, NULL, 0, NULL, 0, NULL, 0, "__syncwarp");
}

template <typename T> static inline T cuda_emu_shuffle(uint32_t mask, T value, int source) {
    static_assert(sizeof(T) % 4 == 0 && sizeof(T) <= 16, "shuffles move words");
    uint32_t in[sizeof(T) / 4], out[sizeof(T) / 4];
    memcpy(in, &value, sizeof(T));
    if (source < 0 || source > 31 || !(mask >> source & 1))
        cuda_emu::fail("shuffle from lane %d, which is not in mask %08x", source, mask);
    cuda_emu::meet(mask, cuda_emu::SHUFFLE, in, sizeof(T) / 4, NULL, source, out, sizeof(T) / 4,
                   "__shfl_sync");
    memcpy(&value, out, sizeof(T));
    return value;
}

template <typename T> static inline T __shfl_sync(uint32_t mask, T value, int source) {
    return cuda_emu_shuffle(mask, value, source & 31);
}
template <typename T> static inline T __shfl_xor_sync(uint32_t mask, T value, int lanes) {
    return cuda_emu_shuffle(mask, value, cuda_emu::current->lane ^ lanes);
}
static inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
    uint32_t in = predicate != 0, out;
    cuda_emu::meet(mask, cuda_emu::BALLOT, &in, 1, cuda_emu::finish_ballot, -1, &out, 1,
                   "__ballot_sync");
    return out;
}

template <typename T> static inline T atomicAdd(T *p, T value) {
    static_assert(std::is_integral<T>::value, "sums of floats would depend on the order");
    return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
}
template <typename T> static inline void __stcs(T *p, T value) {
    *p = value;
}
template <typename T> static inline T min(T a, T b) {
    return b < a ? b : a;
}
template <typename T> static inline T max(T a, T b) {
    return a < b ? b : a;
}
static inline float rsqrtf(float x) {
    return 1.0f / sqrtf(x);
}
/* As inexact as the programming guide allows, and 0 where the guide says so: 2^126 < y. Only for
 * positive numbers. */
static inline float __fdividef(float x, float y) {
    return y > 0x1p126f ? 0 : nextafterf(nextafterf(x / y, 0), 0);
}

#include "dev/emulation/host_emu.h"
#endif
