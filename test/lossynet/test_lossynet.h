/* test_lossynet.h — what the tests of lossynet share: nets of all workers in one process, random
 * numbers, captured messages, and a scenario whose digest must not depend on the number of ranks.
 */
#ifndef TEST_LOSSYNET_H
#define TEST_LOSSYNET_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "test/support/capture.h"
#include "lossynet/comm.h"
#include "lossynet/lossynet.h"

static const struct lossynet_world alone = {
    .rank = 0, .ranks = 1, .local_rank = 0, .local_ranks = 1};

static inline void assert_close(double got, double want, double bound) {
    if (!(fabs(got - want) <= bound)) fail_msg("%.17g, expected %.17g within %g", got, want, bound);
}

/* ---- random numbers: counted, so that tests never depend on their order ---- */

static inline uint64_t random_bits(uint64_t seed, uint64_t a, uint64_t b) {
    return lossynet_mix(lossynet_mix(lossynet_mix(seed) ^ a) ^ b);
}

/* Uniform with mean 0 and variance 1. */
static inline double random_unit(uint64_t seed, uint64_t a, uint64_t b) {
    return ((double)(random_bits(seed, a, b) >> 11) * 0x1p-53 - 0.5) * sqrt(12);
}

/* Sanitizers are slow and look at what code does, not at statistics. Averages over many steps then
 * take this many times fewer, and may be off by the square root as many times as far. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { FEWER_STEPS = 16, WIDER_BOUND = 4 };
#else
enum { FEWER_STEPS = 1, WIDER_BOUND = 1 };
#endif

/* ---- settings and vectors ---- */

static inline struct lossynet_settings simple_settings(int workers, const size_t *elements,
                                                       int buckets, double p) {
    return (struct lossynet_settings){
        .workers = workers,
        .buckets = buckets,
        .bucket_elements = elements,
        .packet_bytes = 64,
        .estimator = LOSSYNET_BALANCED,
        .loss = {.rate = {p, p}, .model = "bernoulli", .seed = 42},
    };
}

static inline struct lossynet_comm *open_alone(const struct lossynet_settings *settings) {
    struct lossynet_comm *comm = NULL;
    assert_int_equal(lossynet_open(&alone, settings, &comm), LOSSYNET_OK);
    assert_non_null(comm);
    return comm;
}

static inline float **take_vectors(int count, size_t elements) {
    float **vectors = (float **)calloc((size_t)count + 1, sizeof *vectors);
    for (int i = 0; i < count; i++) vectors[i] = (float *)calloc(elements + 1, sizeof(float));
    return vectors;
}

static inline void free_vectors(float **vectors) {
    for (int i = 0; vectors[i]; i++) free(vectors[i]);
    free(vectors);
}

/* ---- messages ---- */

/* One line, and it contains `expected`. */
static inline void assert_message(const char *text, const char *expected) {
    const char *end = strchr(text, '\n');
    if (!end || end[1] || !strstr(text, expected))
        fail_msg("expected one line with \"%s\", got \"%s\"", expected, text);
}

/* ---- a scenario for bit-identity ---- */

/* Each kind of step comes before the ninth; those after it repeat them. */
enum { SCENARIO_WORKERS = 8, SCENARIO_BUCKETS = 4, SCENARIO_STEPS = FEWER_STEPS > 1 ? 9 : 12 };
static const size_t scenario_elements[SCENARIO_BUCKETS] = {2500, 40, 1, 5345};

static inline uint64_t digest_bytes(uint64_t digest, const void *bytes, size_t count) {
    const unsigned char *p = (const unsigned char *)bytes;
    for (size_t i = 0; i < count; i++) digest = (digest ^ p[i]) * 0x100000001b3u; /* FNV-1a */
    return digest;
}

static inline struct lossynet_settings scenario_settings(const char *model, double p,
                                                         lossynet_estimator estimator) {
    struct lossynet_settings settings =
        simple_settings(SCENARIO_WORKERS, scenario_elements, SCENARIO_BUCKETS, p);
    settings.packet_bytes = 256;
    settings.estimator = estimator;
    settings.loss.model = model;
    settings.drift_samples = 500;
    settings.peer_timeout = 60; /* a busy machine may keep a rank from running for seconds */
    return settings;
}

/* Gradients leave from other memory than the vectors they are in (lossynet_register_device). */
static bool scenario_device;

/* `there` gets all of a gradient, which keeps only what this rank's workers own. */
static inline void scenario_leave(const struct lossynet_comm *comm, float *gradient, float *there,
                                  size_t elements, int rank, int local) {
    memcpy(there, gradient, elements * sizeof *there);
    for (size_t e = 0; e < elements; e++) gradient[e] = NAN;
    for (int owner = rank * local; owner < (rank + 1) * local; owner++) {
        for (int b = 0; b < SCENARIO_BUCKETS; b++) {
            size_t offset, count;
            lossynet_shard(comm, owner, b, &offset, &count);
            memcpy(gradient + offset, there + offset, count * sizeof *there);
        }
    }
}

static inline uint64_t scenario_run(struct lossynet_comm *comm, int rank, int local) {
    size_t elements = 0;
    for (int b = 0; b < SCENARIO_BUCKETS; b++) elements += scenario_elements[b];
    float **gradient = take_vectors(local, elements), **parameter = take_vectors(local, elements);
    float **there = take_vectors(local, elements), **ahead = take_vectors(local, elements);
    const struct lossynet_device_memory device = {-1, 0};
    bool leaves = scenario_device;
    float *fresh = (float *)calloc(elements, sizeof *fresh);
    uint64_t *mine = (uint64_t *)calloc((size_t)local, sizeof *mine);
    uint64_t all[SCENARIO_WORKERS], digest = 0xcbf29ce484222325u;
    lossynet_status status = LOSSYNET_OK;

    for (int v = 0; v < local; v++)
        if (!lossynet_register(comm, gradient[v], elements) ||
            !lossynet_register(comm, parameter[v], elements) ||
            !lossynet_register(comm, ahead[v], elements))
            break;
    for (int v = 0; v < local && leaves; v++)
        leaves = lossynet_register_device(comm, rank * local + v, gradient[v], there[v], &device);
    for (uint64_t step = 0; step < SCENARIO_STEPS && !status; step++) {
        bool lossless = step == 5;
        status = lossynet_step_begin(comm, step);
        for (int v = 0; v < local; v++)
            for (size_t e = 0; e < elements; e++) /* its own data, and where its replica stands */
                gradient[v][e] = (float)random_unit(step, (uint64_t)(rank * local + v), e) +
                                 0.01f * parameter[v][e];
        for (int v = 0; v < local && leaves; v++)
            scenario_leave(comm, gradient[v], there[v], elements, rank, local);
        if (!status) status = lossynet_reduce(comm, gradient, lossless);
        for (int v = 0; v < local; v++) {
            float *next = ahead[v];
            for (int b = 0; b < SCENARIO_BUCKETS; b++) {
                size_t offset, count;
                lossynet_shard(comm, rank * local + v, b, &offset, &count);
                for (size_t e = offset; e < offset + count; e++) {
                    parameter[v][e] -= 0.1f * gradient[v][e];
                    *next++ = parameter[v][e] - 0.05f * gradient[v][e];
                }
            }
        }
        lossynet_broadcast_ahead(comm, step % 3 ? (const float *const *)ahead : NULL, 0.5);
        if (!status) status = lossynet_broadcast(comm, parameter, lossless);
        /* rps-like; not with int4, which rounds in place what workers of this rank would send, and
         * keeps less of it than of parameters */
        const bool averages = step == 7 && comm->partition.dtype[0] == comm->partition.dtype[1];
        if (averages && !status) status = lossynet_reduce(comm, parameter, false);
        if (averages && !status) status = lossynet_reduce(comm, parameter, false);
        struct lossynet_drift drift;
        struct lossynet_counters counters;
        if (!status) status = lossynet_drift_measure(comm, parameter, &drift);
        if (!status) status = lossynet_step_counters(comm, step, &counters);
        if (!status) status = lossynet_gather_fresh(comm, parameter, fresh);
        for (int v = 0; v < local; v++) {
            mine[v] = digest_bytes(mine[v], parameter[v], elements * sizeof(float));
            size_t cursor = 0, run[2];
            while (lossynet_next_fresh(comm, rank * local + v, &cursor, &run[0], &run[1]))
                mine[v] = digest_bytes(mine[v], run, sizeof run);
        }
        if (!status) status = lossynet_all_gather(comm, mine, all, sizeof *mine);
        if (status) break;
        digest = digest_bytes(digest, all, sizeof all);
        digest = digest_bytes(digest, fresh, elements * sizeof *fresh);
        digest = digest_bytes(digest, &counters, sizeof counters);
        digest = digest_bytes(digest, &drift.pair, offsetof(struct lossynet_drift, max_age));
        digest = digest_bytes(digest, &drift.max_age, sizeof drift.max_age);
    }
    free(mine);
    free(fresh);
    free_vectors(there);
    free_vectors(ahead);
    free_vectors(parameter);
    free_vectors(gradient);
    return status ? 0 : digest;
}

/* The worker that owns an element. */
static inline int owner_of(const struct lossynet_comm *comm, size_t element) {
    for (int b = 0; b < comm->partition.buckets; b++) {
        for (int w = 0; w < comm->workers.count; w++) {
            size_t offset, count;
            lossynet_shard(comm, w, b, &offset, &count);
            if (element >= offset && element < offset + count) return w;
        }
    }
    fail_msg("element %zu has no owner", element);
    return -1;
}

#endif
