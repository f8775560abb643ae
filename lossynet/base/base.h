/* base.h — what every layer of lossynet stands on.
 *
 * Knows memory, the clock, random numbers, checksums, and how to say something to the user. wire.h
 * beside it draws the datagram, types.h has the types of the public interface.
 * Must not know vectors, buckets, ranks that exchange anything, or any other folder.
 */
#ifndef LOSSYNET_BASE_H
#define LOSSYNET_BASE_H

#include "lossynet/base/types.h"

#include <string.h>
#include <time.h>

/* ---- messages (log.c) ---- */

/* Logs one line, "lossynet: ..." on stderr unless lossynet_log_to named another place. */
void lossynet_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* From now on every message of the process goes to `function`. Not while another thread logs. */
void lossynet_log_to(lossynet_log_function function, void *context);

/* ---- memory (memory.c) ---- */

/* Zeroed, aligned to 64 bytes, released with free(). NULL when there is none; not logged. */
void *lossynet_memory_take(size_t count, size_t size);

/* Counts what an object holds, so that its size can be told without allocating anything. */
struct lossynet_pool {
    size_t bytes;       /* taken so far */
    bool measuring;     /* count, allocate nothing */
    bool out_of_memory; /* an allocation has failed; later ones are not tried */
    int rank;           /* for messages */
};

/* As lossynet_memory_take; also NULL when measuring. A failure is logged once and kept. */
void *lossynet_pool_take(struct lossynet_pool *pool, size_t count, size_t size);
/* The same with an allocator of the caller's, which need not clear the memory; NULL: ours. */
void *lossynet_pool_take_from(struct lossynet_pool *pool, size_t count, size_t size,
                              void *(*allocate)(size_t bytes));
#define POOL_TAKE(pool, pointer, count)                                                            \
    ((pointer) = lossynet_pool_take((pool), (count), sizeof *(pointer)))

/* ---- time ---- */

/* Seconds since some moment, never set back. */
static inline double lossynet_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- random numbers ---- */

/* 64 well-mixed bits (splitmix64's finalizer, Steele, Lea & Flood 2014). */
static inline uint64_t lossynet_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* From the operating system, different in every call (random.c). */
uint64_t lossynet_random(void);

/* ---- checksum (crc32c.c) ---- */

/* CRC32C of `bytes` more bytes, after those that gave `crc`; 0 at the start. */
uint32_t lossynet_crc32c(uint32_t crc, const void *data, size_t bytes);
uint32_t lossynet_crc32c_plain(uint32_t crc, const void *data, size_t bytes);

/* ---- bfloat16 ---- */

/* bfloat16 is the upper half of a float32. Rounds to nearest, ties to even; NaN stays NaN, and the
 * largest numbers, from 0x7f7f8000 on, become infinite (IEEE 754, section 4.3.1). */
static inline uint16_t lossynet_bf16_narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t even = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return (uint16_t)((is_nan ? quiet : even) >> 16);
}

static inline float lossynet_bf16_widen(uint16_t upper) {
    const uint32_t bits = (uint32_t)upper << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#endif
