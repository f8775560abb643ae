/* base.h — functions that every layer of lossynet uses.
 *
 * It has memory, the clock, random numbers, checksums, and log messages. wire.h in the same folder
 * draws the datagram, and types.h has the types of the public interface. This layer must not know
 * vectors, buckets, exchanges between ranks, or any other folder.
 */
#ifndef LOSSYNET_BASE_H
#define LOSSYNET_BASE_H

#include "lossynet/base/types.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A function with loops over elements, which GCC compiles for processors with AVX2, too. That is
 * without fused multiply-add, so that both give the same bits. What it calls must be LN_INLINE. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) &&                            \
    !defined(__SANITIZE_THREAD__) /* which starts after functions are chosen */
#define LN_VECTORIZED __attribute__((target_clones("avx2", "default")))
#else
#define LN_VECTORIZED
#endif
#define LN_INLINE inline __attribute__((always_inline))

/* ---- messages (log.c) ---- */

/* Where the messages of a comm go. function NULL: where those of the process go. */
struct ln_log_target {
    lossynet_log_function function;
    void *context;
};

/* Logs one line to the target that this thread uses, else to that of the process: "lossynet: ..." on
 * stderr, unless ln_log_to has set another function. */
void ln_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The same, and returns the status. */
lossynet_status ln_fail(lossynet_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
#define ln_refuse(...) ln_fail(LOSSYNET_INVALID, __VA_ARGS__)
lossynet_status ln_fail_at(const struct ln_log_target *target, lossynet_status status,
                           const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Of a wrong call of a public function (lossynet.h): logs "FUNCTION: ...". Returns LOSSYNET_INVALID, or
 * ends the process. The macros are for functions that return a status, and for the others. */
lossynet_status ln_call_wrong(const struct ln_log_target *target, bool ends, const char *function,
                              const char *format, ...) __attribute__((format(printf, 4, 5)));
#define LN_EXPECT(target, right, ...)                                                              \
    do {                                                                                           \
        if (!(right)) return ln_call_wrong(target, false, __func__, __VA_ARGS__);                  \
    } while (0)
#define LN_DEMAND(target, right, ...)                                                              \
    do {                                                                                           \
        if (!(right)) ln_call_wrong(target, true, __func__, __VA_ARGS__);                          \
    } while (0)

/* This thread's messages go to *target from now on, which must stay until then; NULL: to the
 * process's. Returns what it used before. */
const struct ln_log_target *ln_log_use(const struct ln_log_target *target);

/* Sends the messages of the process to `function` from now on. No other thread may log meanwhile. */
void ln_log_to(lossynet_log_function function, void *context);

/* ---- the meeting of ranks ---- */

/* Calls the world's `share`, which it must have (types.h). */
static inline lossynet_status ln_share(const struct lossynet_world *world, void *all,
                                       size_t bytes) {
    return world->share(world->share_context, world, all, bytes);
}

/* ---- memory (memory.c) ---- */

/* Returns zeroed memory, aligned to 64 bytes, which free() releases. Returns NULL, and logs
 * nothing, if there is none. */
void *ln_memory_take(size_t count, size_t size);
/* Makes room for one more element of an array with `count`, and returns the array. NULL: no memory.
 * */
void *ln_memory_grow(void *old, size_t count, size_t *room, size_t size);

/* The memory of an object: its bytes are counted, so that its size is known even if nothing is
 * allocated, and one call frees all of it. All zeros: an empty pool. */
struct ln_pool {
    size_t bytes;           /* counted so far */
    bool measuring;         /* only count, and allocate nothing */
    bool out_of_memory;     /* an allocation has failed; later ones are not tried */
    int rank;               /* for messages */
    struct ln_taken *taken; /* [room], what to free */
    size_t count, room;
};

/* Allocates like ln_memory_take, but returns NULL when measuring. The first failure is
 * logged, and pool->out_of_memory stays set. */
void *ln_pool_take(struct ln_pool *pool, size_t count, size_t size);
/* Does the same with the caller's functions; `allocate` need not clear the memory. NULL: ours. */
void *ln_pool_take_from(struct ln_pool *pool, size_t count, size_t size,
                        void *(*allocate)(size_t bytes), void (*release)(void *memory));
/* Frees what was taken, the last first. */
void ln_pool_close(struct ln_pool *pool);
#define POOL_TAKE(pool, pointer, count)                                                            \
    ((pointer) = ln_pool_take((pool), (count), sizeof *(pointer)))

/* ---- ports (port.c) ---- */

struct sockaddr;

/* Binds a socket of IPv4 or IPv6 to the address, which is `bytes` long and gets the port: a free one of
 * ports[0] to ports[1], or the one that it has where both are 0. Returns whether it could; errno says
 * why not. */
bool ln_port_bind(int fd, struct sockaddr *address, size_t bytes, const int ports[2]);

/* Parses FIRST-LAST: ports from 1 to 65535, at least two. Returns false for other texts. */
bool ln_port_parse(const char *text, int ports[2]);

/* ---- numbers ---- */

/* strtod() without hexadecimal numbers: of these it takes nothing. */
static inline double ln_number(const char *text, char **end) {
    const char *digits = text + strspn(text, " +-");
    if (digits[0] != '0' || (digits[1] | 32) != 'x') return strtod(text, end);
    *end = (char *)text;
    return 0;
}

/* ---- time ---- */

/* Returns the seconds since a fixed moment. This clock is never set back. */
static inline double ln_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- random numbers ---- */

/* Returns 64 well-mixed bits of x (splitmix64's finalizer, Steele, Lea & Flood 2014). */
static inline uint64_t ln_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Returns 32 well-mixed bits of x (lowbias32, Wellons 2018). */
static inline uint32_t ln_mix32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

/* Returns random bits of the operating system, different in every call (random.c). */
uint64_t ln_random(void);

/* ---- checksum (crc32c.c) ---- */

/* Returns the CRC32C of earlier bytes followed by `bytes` bytes of `data`. crc: the CRC32C of the
 * earlier bytes, 0 if there are none. The _plain function uses no special instructions. */
uint32_t ln_crc32c(uint32_t crc, const void *data, size_t bytes);
uint32_t ln_crc32c_plain(uint32_t crc, const void *data, size_t bytes);

/* ---- bfloat16 ---- */

/* bfloat16 is the upper half of a float32. Rounds to nearest, ties to even; NaN stays NaN, and the
 * largest numbers, from 0x7f7f8000 on, become infinite (IEEE 754, section 4.3.1). */
static inline uint16_t ln_bf16_narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t even = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return (uint16_t)((is_nan ? quiet : even) >> 16);
}

/* Whether one can compute with x: it is not NaN or infinite, and below 2^63 in size. Receivers refuse
 * numbers from 2^64 on (elements.c). Half of it leaves room for what rounding adds. */
static inline bool ln_is_sound(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits & 0x7fffffff) < (uint32_t)(127 + 63) << 23;
}

/* What of x a residual keeps: rounded to nearest, or 0 if x is not sound. */
static inline uint16_t ln_bf16_keep(float x) {
    return ln_is_sound(x) ? ln_bf16_narrow(x) : 0;
}

/* The same for a sum that grows over many steps, rounded up or down at random. To nearest, all that is
 * less than 2^-9 of the sum would be lost. For element e of a vector; `lots` is made for the vector and
 * the step by ln_lots. From step to step an element's random number advances by the golden ratio. So
 * errors of many steps cancel, where independent ones would add up. */
static inline uint16_t ln_bf16_keep_sum(float x, uint64_t lots, size_t e) {
    const uint32_t lot = ln_mix32((uint32_t)lots + (uint32_t)e) + (uint32_t)(lots >> 32);
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return ln_is_sound(x) ? (uint16_t)((bits + (lot >> 16)) >> 16) : 0;
}

/* key: of the vector, the same in all steps */
static inline uint64_t ln_lots(uint64_t key, uint64_t step) {
    return (uint64_t)((uint32_t)step * 0x9e3779b9u) << 32 | (uint32_t)ln_mix(key);
}

static inline float ln_bf16_widen(uint16_t upper) {
    const uint32_t bits = (uint32_t)upper << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#endif
