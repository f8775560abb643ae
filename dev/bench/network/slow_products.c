/* slow_products.c — makes a rank's computing time differ from step to step; used by LD_PRELOAD.
 *
 *     LD_PRELOAD=slow_products.so SLOW=PRODUCTS,MEDIAN,P99 train_llama2 ...
 *
 * Before the first of every PRODUCTS matrix products it sleeps for a lognormal time: MEDIAN seconds
 * in the median, and more than P99 times MEDIAN in one of a hundred steps. So the rank computes for
 * longer, while its thread for packets goes on. tail_pytorch.py draws the same times. With PRODUCTS
 * 0 it does not sleep, but prints at the end how many products there were. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { Z99 = 23263 }; /* in 1e-4: a standard normal number is above 2.3263 once in 100 */

typedef int (*product)(char, char, int64_t, int64_t, int64_t, float, const float *, int64_t,
                       const float *, int64_t, float, float *, int64_t);

static double uniform(uint64_t *state) { /* splitmix64, in (0, 1) */
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return ((double)((x ^ x >> 31) >> 11) + 0.5) / 9007199254740992.0;
}

static int products, made;
static double median, p99;
static uint64_t state;

__attribute__((constructor)) static void begin(void) {
    const char *slow = getenv("SLOW"), *rank = getenv("OMPI_COMM_WORLD_RANK");
    if (!slow || sscanf(slow, "%d,%lf,%lf", &products, &median, &p99) != 3) products = 0;
    state = (uint64_t)(rank ? atoi(rank) : 0) << 32;
}

__attribute__((destructor)) static void end(void) {
    if (!products && made) printf("products %d\n", made);
}

static void sleep_a_step(void) {
    if (made++ % (products ? products : 1) || !products) return;
    const double u = uniform(&state), v = uniform(&state);
    const double normal = sqrt(-2 * log(u)) * cos(2 * M_PI * v);
    const double seconds = median * exp(normal * log(p99) / (Z99 / 1e4));
    const struct timespec time = {(time_t)seconds, (long)((seconds - floor(seconds)) * 1e9)};
    nanosleep(&time, NULL);
}

int dnnl_sgemm(char transa, char transb, int64_t m, int64_t n, int64_t k, float alpha,
               const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
               int64_t ldc) {
    static product next;
    if (!next) *(void **)&next = dlsym(RTLD_NEXT, "dnnl_sgemm");
    sleep_a_step();
    return next(transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
