/* operators_device.c — tests functions for a device's memory: conversion, and the sums and copies of
 * single vectors that lossynet needs; see operators.h. */
#include "test/llmc/operators.h"

static bool too_large(size_t elements) {
    return subject.most_work && elements > subject.most_work;
}

void test_convert(void **state) {
    (void)state;
    size_t sizes[] = {1, 7, 64, 1000, 100003};
    for (int s = 0; s < LENGTH(sizes); s++) {
        if (too_large(sizes[s])) continue;
        struct array from = array_random(sizes[s], 3, FLOAT32), to = array_empty(from.n, WEIGHT);
        struct array expected = array_empty(from.n, WEIGHT);
        float *exact = array_read(&from), *rounded;
        array_write_floats(&expected, exact);
        rounded = array_read(&expected);
        for (size_t i = 0; i < from.n; i++) to.reference[i] = rounded[i];
        free(exact), free(rounded);
        subject.backend->convert(to.value, from.value, from.n);
        assert_close(&to, "convert", 0, 0);
        array_free(&from), array_free(&to), array_free(&expected);
    }
}

float rounded_reference(float x) {
    int exponent;
    if (x == 0 || isinf(x)) return x;
    frexp((double)x, &exponent);
    const int last = exponent - 8 < -133 ? -133 : exponent - 8; /* below it: subnormal */
    return (float)ldexp(nearbyint(ldexp((double)x, -last)), last);
}

/* To the last bit, since the owner's average may be computed on any machine; out is a sender, and
 * is there on return. What did not arrive is not a number. */
void test_weighted_sum_pinned(void **state) {
    (void)state;
    enum { SENDERS = 5, OUT = 2 };
    size_t shapes[][2] = {{1, 1}, {10, 3}, {1000, 1024}, {100003, 1024}, {5000, 50}, {4096, 8}};
    for (int s = 0; s < LENGTH(shapes); s++) {
        const size_t n = shapes[s][0], packet = shapes[s][1], packets = (n + packet - 1) / packet;
        if (too_large(n)) continue;
        float *all = (float *)subject.backend->allocate_pinned(SENDERS * n * sizeof *all);
        float *weight = (float *)malloc(packets * SENDERS * sizeof *weight);
        float *want = (float *)calloc(n, sizeof *want);
        const float *sender[SENDERS];
        assert_true(all && weight && want);
        for (int i = 0; i < SENDERS; i++) sender[i] = all + (size_t)i * n;
        for (size_t k = 0; k < packets * SENDERS; k++)
            weight[k] = random_uniform() > 0 ? (float)random_uniform() : 0;
        for (size_t j = 0; j < n; j++)
            for (size_t i = 0; i < SENDERS; i++) {
                const float w = weight[j / packet * SENDERS + i];
                all[i * n + j] = w == 0 ? NAN : (float)random_uniform();
                if (w != 0) want[j] = fmaf(w, all[i * n + j], want[j]);
            }
        subject.backend->weighted_sum_pinned(all + OUT * n, sender, weight, SENDERS, n, packet);
        assert_memory_equal(all + OUT * n, want, n * sizeof *want);
        subject.backend->release_pinned(all);
        free(weight);
        free(want);
    }
}

static uint16_t upper_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* The bits of the same senders in float32; rounded, before and after they are added, too. */
void test_weighted_sum_pinned_bf16(void **state) {
    (void)state;
    enum { SENDERS = 5 };
    const struct backend *b = subject.backend;
    size_t shapes[][2] = {{1, 1}, {10, 3}, {1000, 1024}, {100003, 1024}, {5000, 50}, {4096, 8}};
    for (int s = 0; s < LENGTH(shapes); s++) {
        const size_t n = shapes[s][0], packet = shapes[s][1], packets = (n + packet - 1) / packet;
        if (too_large(n)) continue;
        float *all = (float *)b->allocate_pinned((SENDERS + 2) * n * sizeof *all);
        uint16_t *half = (uint16_t *)b->allocate_pinned((SENDERS + 1) * n * sizeof *half);
        float *weight = (float *)malloc(packets * SENDERS * sizeof *weight);
        assert_true(all && half && weight);
        float *want = all + SENDERS * n, *got = want + n;
        uint16_t *sum = half + SENDERS * n;
        const float *sender[SENDERS];
        const uint16_t *half_sender[SENDERS];
        for (int i = 0; i < SENDERS; i++)
            sender[i] = all + (size_t)i * n, half_sender[i] = half + (size_t)i * n;
        for (size_t k = 0; k < packets * SENDERS; k++)
            weight[k] = random_uniform() > 0 ? (float)random_uniform() : 0;
        for (size_t j = 0; j < SENDERS * n; j++) {
            all[j] = rounded_reference((float)random_uniform());
            half[j] = upper_half(all[j]);
        }
        /* Float32 on the device, of which the upper half is as above, and the rest rounds it down. */
        float *below = (float *)malloc(SENDERS * n * sizeof *below);
        float *device = (float *)b->allocate(SENDERS * n * sizeof *device);
        const float *device_sender[SENDERS];
        assert_true(below && device);
        for (int i = 0; i < SENDERS; i++) device_sender[i] = device + (size_t)i * n;
        for (size_t j = 0; j < SENDERS * n; j++) {
            const uint32_t bits =
                (uint32_t)half[j] << 16 | (uint32_t)(fabs(random_uniform()) * 0.4 * 65536);
            memcpy(&below[j], &bits, sizeof bits);
        }
        b->upload(device, below, SENDERS * n * sizeof *below);
        b->download(below, device, sizeof *below); /* so that it is there */
        b->weighted_sum_pinned(want, sender, weight, SENDERS, n, packet);
        b->weighted_sum_pinned_bf16(got, half_sender, weight, SENDERS, n, packet);
        assert_memory_equal(got, want, n * sizeof *want);
        b->rounded_sum_pinned_bf16(sum, half_sender, weight, SENDERS, n, packet);
        for (size_t j = 0; j < n; j++)
            assert_int_equal(sum[j], upper_half(rounded_reference(want[j])));
        memset(sum, 0, n * sizeof *sum);
        b->rounded_sum_pinned(sum, device_sender, weight, SENDERS, n, packet);
        for (size_t j = 0; j < n; j++)
            assert_int_equal(sum[j], upper_half(rounded_reference(want[j])));
        b->release(device);
        free(below);
        b->release_pinned(all), b->release_pinned(half);
        free(weight);
    }
}

/* What is rounded on its way to the host or from it, and in place. */
void test_copies_that_round(void **state) {
    (void)state;
    const struct backend *b = subject.backend;
    size_t sizes[] = {1, 7, 64, 1000, 100003};
    for (int s = 0; s < LENGTH(sizes); s++) {
        const size_t n = sizes[s];
        if (too_large(n)) continue;
        struct array x = array_random(n, 3, FLOAT32), weights = array_empty(n, WEIGHT);
        struct array converted = array_empty(n, WEIGHT);
        uint16_t *leaves = (uint16_t *)b->allocate_pinned(n * sizeof *leaves);
        float *host = (float *)b->allocate_pinned(n * sizeof *host), *rounded;
        assert_true(leaves && host);
        b->d2h_round_async(leaves, (const float *)x.value, n);
        b->d2h_async(host, x.value, n * sizeof *host);
        b->d2h_wait();
        for (size_t i = 0; i < n; i++)
            assert_int_equal(leaves[i], upper_half(rounded_reference(host[i])));
        b->h2d_convert_async(weights.value, host, n);
        b->convert(converted.value, (const float *)x.value, n);
        rounded = array_read(&converted);
        for (size_t i = 0; i < n; i++) weights.reference[i] = rounded[i];
        assert_close(&weights, "h2d_convert_async", 0, 0);
        for (size_t i = 0; i < n; i++) x.reference[i] = rounded_reference(host[i]);
        b->round((float *)x.value, n);
        assert_close(&x, "round", 0, 0);
        free(rounded);
        b->release_pinned(leaves), b->release_pinned(host);
        array_free(&x), array_free(&weights), array_free(&converted);
    }
}

void test_gather(void **state) {
    (void)state;
    enum { MOST = 1000, FROM = 20000, VECTORS = 3 };
    struct array from[VECTORS];
    float *vector[VECTORS], out[MOST * VECTORS];
    size_t element[MOST];
    int32_t of[MOST];
    if (!subject.backend->gather) return;
    for (int v = 0; v < VECTORS; v++) {
        from[v] = array_random(FROM, 1, FLOAT32);
        vector[v] = (float *)from[v].value;
    }
    for (size_t n = 1; n <= MOST; n = n * 3 + 7) {
        for (size_t i = 0; i < n; i++) {
            element[i] = (size_t)(fabs(random_uniform()) * (FROM - 1));
            of[i] = (int32_t)(fabs(random_uniform()) * VECTORS);
        }
        element[0] = FROM - 1, of[0] = VECTORS - 1;
        subject.backend->gather(out, vector, VECTORS, element, NULL, n);
        for (size_t i = 0; i < n * VECTORS; i++)
            assert_true(out[i] == (float)from[i / n].reference[element[i % n]]);
        subject.backend->gather(out, vector, VECTORS, element, of, n);
        for (size_t i = 0; i < n; i++)
            assert_true(out[i] == (float)from[of[i]].reference[element[i]]);
    }
    for (int v = 0; v < VECTORS; v++) array_free(&from[v]);
}
