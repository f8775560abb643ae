/* random.h — computes random numbers from a key and a counter. There is no state: any thread or
 * rank can compute any part of a stream, and resuming needs only the position. */
#ifndef LLMC_UTIL_RANDOM_H
#define LLMC_UTIL_RANDOM_H

#include <math.h>
#include <stdint.h>

/* The finaliser of SplitMix64 (Steele, Lea, Flood 2014). */
static inline uint64_t random_mix(uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Number `index` of the stream `key`. */
static inline uint64_t random_bits(uint64_t key, uint64_t index) {
    return random_mix(random_mix(key + 0x9e3779b97f4a7c15u) + index * 0x9e3779b97f4a7c15u);
}

static inline double random_uniform(uint64_t key, uint64_t index) { /* [0, 1) */
    return (double)(random_bits(key, index) >> 11) * 0x1p-53;
}

static inline double random_normal(uint64_t key, uint64_t index) { /* mean 0, variance 1 */
    double u = 1 - random_uniform(key, 2 * index), v = random_uniform(key, 2 * index + 1);
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v); /* Box-Muller */
}

#endif
