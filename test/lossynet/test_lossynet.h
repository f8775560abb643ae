/* test_lossynet.h — what the tests of lossynet share: nets of all workers in one process, random
 * numbers, captured messages, and a scenario whose digest must not depend on the number of ranks.
 */
#ifndef TEST_LOSSYNET_H
#define TEST_LOSSYNET_H

#include <math.h>
#include <pthread.h>
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
#include "lossynet/lossynet_trainer.h"

static const struct lossynet_world alone = {
    .rank = 0, .ranks = 1, .local_rank = 0, .local_ranks = 1};

static inline void assert_close(double got, double want, double bound) {
    if (!(fabs(got - want) <= bound)) fail_msg("%.17g, expected %.17g within %g", got, want, bound);
}

/* ---- random numbers: counted, so that tests never depend on their order ---- */

static inline uint64_t random_bits(uint64_t seed, uint64_t a, uint64_t b) {
    return ln_mix(ln_mix(ln_mix(seed) ^ a) ^ b);
}

/* Uniform with mean 0 and variance 1. */
static inline double random_unit(uint64_t seed, uint64_t a, uint64_t b) {
    return ((double)(random_bits(seed, a, b) >> 11) * 0x1p-53 - 0.5) * sqrt(12);
}

/* To bfloat16, worked out in float64: to nearest, in the middle to even. For normal numbers. */
static inline float as_bf16(float x) {
    int exponent;
    if (x == 0) return x;
    frexp((double)x, &exponent);
    return (float)ldexp(nearbyint(ldexp((double)x, 8 - exponent)), exponent - 8);
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

/* Each kind of step is among them; later steps would repeat them. */
enum { SCENARIO_WORKERS = 8, SCENARIO_BUCKETS = 4, SCENARIO_STEPS = 9 };
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
    settings.network.peer_timeout =
        60; /* a busy machine may keep a rank from running for seconds */
    return settings;
}

/* What phases are given. All but the first give the same digest, with gradients that bfloat16 can
 * hold. */
static enum {
    SCENARIO_ANY,     /* vectors of float32 */
    SCENARIO_ROUNDED, /* the same */
    SCENARIO_APART,   /* the same, and what owners hold lies apart */
    SCENARIO_BF16,    /* vectors of bfloat16 */
} scenario_kind;

struct scenario { /* of a rank; vectors [local][elements] */
    struct lossynet_comm *comm;
    int first, local;
    size_t elements;
    float **gradient, **parameter; /* float32, with what owners hold */
    /* What phases are given where that lies apart: of the dtype that settings name */
    float **given_gradient, **given_parameter, **before, **averages, **values;
};

static inline bool scenario_is_apart(void) {
    return scenario_kind >= SCENARIO_APART;
}

static inline void *given_element(float *vector, size_t e) {
    return scenario_kind == SCENARIO_BF16 ? (void *)((uint16_t *)vector + e) : (void *)(vector + e);
}

static inline float given_value(float *vector, size_t e) {
    return scenario_kind == SCENARIO_BF16 ? ln_bf16_widen(*(uint16_t *)given_element(vector, e))
                                          : vector[e];
}

static inline size_t given_bytes(size_t n) {
    return n * (scenario_kind == SCENARIO_BF16 ? sizeof(uint16_t) : sizeof(float));
}

/* Local worker v has its shards at averages[v] and values[v], in order of buckets; NULL: no memory. */
static inline lossynet_status shards_apart(struct lossynet_comm *comm, float *const *averages,
                                           float *const *values) {
    const int buckets = comm->partition.buckets, shards = comm->workers.local * buckets;
    struct lossynet_shard *shard = calloc((size_t)shards, sizeof *shard);
    for (int i = 0; i < shards; i++) {
        const int v = i / buckets, b = i % buckets;
        const size_t owner = (size_t)(comm->workers.first + v),
                     at = comm->partition.owner_element[owner * (size_t)(buckets + 1) + (size_t)b];
        shard[i].average = averages[v] + at;
        shard[i].value = values ? values[v] + at : NULL;
    }
    const lossynet_status status = lossynet_shards(comm, shard);
    free(shard);
    return status;
}

/* Copies what local worker v owns between its vector and memory where it lies apart. */
static inline void scenario_owned(const struct scenario *s, int v, float *vector, float *apart,
                                  bool out) {
    for (int b = 0; b < SCENARIO_BUCKETS; b++) {
        size_t offset, count;
        lossynet_shard(s->comm, s->first + v, b, &offset, &count);
        memcpy(out ? apart : vector + offset, out ? vector + offset : apart, count * sizeof *apart);
        apart += count;
    }
}

/* Own shards of the vectors given to the PARAMETER phase, which it neither reads nor writes. */
enum { SCENARIO_UNTOUCHED = 0xff }; /* NaN */

static inline void scenario_open(struct scenario *s) {
    s->gradient = take_vectors(s->local, s->elements);
    s->parameter = take_vectors(s->local, s->elements);
    s->given_gradient = take_vectors(s->local, s->elements);
    s->given_parameter = take_vectors(s->local, s->elements);
    s->before = take_vectors(s->local, s->elements);
    s->averages = take_vectors(s->local, s->elements);
    s->values = take_vectors(s->local, s->elements);
    if (!scenario_is_apart()) return;
    assert_int_equal(shards_apart(s->comm, s->averages, s->values), LOSSYNET_OK);
    for (int v = 0; v < s->local; v++) {
        for (int b = 0; b < SCENARIO_BUCKETS; b++) {
            size_t offset, count;
            lossynet_shard(s->comm, s->first + v, b, &offset, &count);
            memset(given_element(s->given_parameter[v], offset), SCENARIO_UNTOUCHED,
                   given_bytes(count));
        }
    }
}

static inline void scenario_close(struct scenario *s) {
    free_vectors(s->values);
    free_vectors(s->averages);
    free_vectors(s->before);
    free_vectors(s->given_parameter);
    free_vectors(s->given_gradient);
    free_vectors(s->parameter);
    free_vectors(s->gradient);
}

/* Whether all of local worker v's shards in the vectors given to a phase are as they were. */
static inline bool scenario_untouched(const struct scenario *s, int v) {
    for (int b = 0; b < SCENARIO_BUCKETS; b++) {
        size_t offset, count;
        lossynet_shard(s->comm, s->first + v, b, &offset, &count);
        const uint8_t *parameter = (uint8_t *)given_element(s->given_parameter[v], offset);
        for (size_t i = 0; i < given_bytes(count); i++)
            if (parameter[i] != SCENARIO_UNTOUCHED) return false;
        if (memcmp(given_element(s->given_gradient[v], offset), given_element(s->before[v], offset),
                   given_bytes(count)))
            return false;
    }
    return true;
}

static inline void scenario_give_gradients(const struct scenario *s) {
    for (int v = 0; v < s->local; v++) {
        for (size_t e = 0; e < s->elements; e++) {
            const uint16_t upper = ln_bf16_narrow(s->gradient[v][e]);
            void *to = given_element(s->given_gradient[v], e);
            if (scenario_kind == SCENARIO_BF16)
                *(uint16_t *)to = upper;
            else
                *(float *)to = s->gradient[v][e];
        }
        memcpy(s->before[v], s->given_gradient[v], given_bytes(s->elements));
    }
}

/* Says that buckets are final, on a thread of its own, as a device's runtime does. */
static inline void *scenario_ready(void *scenario) {
    const struct scenario *s = (const struct scenario *)scenario;
    for (int b = 0; b < SCENARIO_BUCKETS; b++)
        for (int v = 0; v < s->local; v++) lossynet_bucket_ready(s->comm, s->first + v, b);
    return NULL;
}

/* Where what owners hold lies apart: in every other step bucket by bucket, of which what has come by
 * then is averaged meanwhile. */
static inline lossynet_status scenario_reduce(const struct scenario *s, uint64_t step,
                                              bool lossless) {
    if (!scenario_is_apart()) return lossynet_reduce(s->comm, s->gradient, lossless);
    lossynet_status status = LOSSYNET_OK;
    scenario_give_gradients(s);
    if (step % 2) status = lossynet_reduce_begin(s->comm, s->given_gradient, lossless);
    /* Packets of other ranks may have come, but nothing is ready here. */
    if (step % 2) assert_false(lossynet_reduce_arrived(s->comm, s->given_gradient, lossless, 0));
    pthread_t runtime;
    if (step % 2) assert_int_equal(pthread_create(&runtime, NULL, scenario_ready, (void *)s), 0);
    for (int b = 0, tries = 0; step % 2 && b < SCENARIO_BUCKETS && tries < 1000; tries++)
        b += lossynet_reduce_arrived(s->comm, s->given_gradient, lossless, b);
    if (step % 2) pthread_join(runtime, NULL);
    if (!status) status = lossynet_reduce(s->comm, s->given_gradient, lossless);
    for (int v = 0; v < s->local; v++) scenario_owned(s, v, s->gradient[v], s->averages[v], false);
    return status;
}

static inline lossynet_status scenario_broadcast(const struct scenario *s, bool lossless) {
    if (!scenario_is_apart()) return lossynet_broadcast(s->comm, s->parameter, lossless);
    for (int v = 0; v < s->local; v++) scenario_owned(s, v, s->parameter[v], s->values[v], true);
    lossynet_status status = lossynet_broadcast(s->comm, s->given_parameter, lossless);
    for (int v = 0; v < s->local; v++) {
        if (!scenario_untouched(s, v)) status = LOSSYNET_INVALID;
        for (size_t e = 0; e < s->elements; e++)
            s->parameter[v][e] = given_value(s->given_parameter[v], e);
        scenario_owned(s, v, s->parameter[v], s->values[v], false);
    }
    return status;
}

static inline void scenario_register(const struct scenario *s, float **ahead) {
    float **gradient = scenario_is_apart() ? s->given_gradient : s->gradient;
    float **parameter = scenario_is_apart() ? s->given_parameter : s->parameter;
    for (int v = 0; v < s->local; v++)
        if (!lossynet_register(s->comm, gradient[v], s->elements) ||
            !lossynet_register(s->comm, parameter[v], s->elements) ||
            !lossynet_register(s->comm, ahead[v], s->elements))
            break;
}

static inline uint64_t scenario_run(struct lossynet_comm *comm, int rank, int local) {
    size_t elements = 0;
    for (int b = 0; b < SCENARIO_BUCKETS; b++) elements += scenario_elements[b];
    struct scenario s = {.comm = comm, .first = rank * local, .local = local, .elements = elements};
    scenario_open(&s);
    float **gradient = s.gradient, **parameter = s.parameter;
    float **vectors = scenario_is_apart() ? s.given_parameter : parameter;
    float **ahead = take_vectors(local, elements);
    float *fresh = (float *)calloc(elements, sizeof *fresh);
    uint64_t *mine = (uint64_t *)calloc((size_t)local, sizeof *mine);
    uint64_t all[SCENARIO_WORKERS], digest = 0xcbf29ce484222325u;
    lossynet_status status = LOSSYNET_OK;

    scenario_register(&s, ahead);
    for (uint64_t step = 0; step < SCENARIO_STEPS && !status; step++) {
        bool lossless = step == 5;
        status = lossynet_step_begin(comm, step);
        for (int v = 0; v < local; v++)
            for (size_t e = 0; e < elements; e++) { /* its own data, and where its replica stands */
                gradient[v][e] = (float)random_unit(step, (uint64_t)(rank * local + v), e) +
                                 0.01f * parameter[v][e];
                if (scenario_kind != SCENARIO_ANY)
                    gradient[v][e] = ln_bf16_widen(ln_bf16_narrow(gradient[v][e]));
            }
        if (!status) status = scenario_reduce(&s, step, lossless);
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
        if (!status) status = scenario_broadcast(&s, lossless);
        /* rps-like; not with int4, which rounds in place what workers of this rank would send, and
         * keeps less of it than of parameters */
        const bool averages = step == 7 && scenario_kind == SCENARIO_ANY &&
                              comm->partition.dtype[0] == comm->partition.dtype[1];
        if (averages && !status) status = lossynet_reduce(comm, parameter, false);
        if (averages && !status) status = lossynet_reduce(comm, parameter, false);
        struct lossynet_drift drift;
        struct lossynet_counters counters;
        if (!status) status = lossynet_drift_measure(comm, vectors, &drift);
        if (!status) status = lossynet_step_counters(comm, step, &counters);
        if (!status) status = lossynet_gather_fresh(comm, vectors, fresh);
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
    free_vectors(ahead);
    scenario_close(&s);
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

static inline void keep_why(void *why, const char *message) {
    snprintf((char *)why, 256, "%s", message);
}

/* Whether a loss model can be opened; if not, `why` gets the message. */
static inline lossynet_status loss_check(const struct lossynet_loss_settings *settings,
                                         char why[256]) {
    struct ln_loss loss;
    const struct ln_log_target target = {keep_why, why}, *before = ln_log_use(&target);
    const lossynet_status status = ln_loss_open(&loss, settings, 8);
    ln_log_use(before);
    ln_loss_close(&loss);
    return status;
}

#endif
