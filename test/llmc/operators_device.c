/* operators_device.c — tests functions for a device's memory: conversion, and the copies of packets
 * and elements that lossynet needs; see operators.h. */
#include "test/llmc/operators.h"

#include "lossynet/partition/partition.h"

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

void test_masked_copy(void **state) {
    (void)state;
    size_t shapes[][2] = {{1, 1}, {10, 3}, {1000, 1024}, {100003, 1024}, {5000, 50}, {4096, 7}};
    for (int s = 0; s < LENGTH(shapes); s++) {
        size_t n = shapes[s][0], packet = shapes[s][1];
        if (too_large(n)) continue;
        struct array to = array_random(n + packet, 1, FLOAT32); /* more than is to be copied */
        struct array from = array_random(n + packet, 1, FLOAT32);
        uint8_t *arrived = (uint8_t *)malloc((n + packet - 1) / packet);
        assert_non_null(arrived);
        for (size_t k = 0; k * packet < n; k++) arrived[k] = random_uniform() > 0;
        for (size_t j = 0; j < n; j++)
            if (arrived[j / packet]) to.reference[j] = from.reference[j];
        subject.backend->masked_copy(to.value, from.value, arrived, n, packet);
        assert_close(&to, "masked_copy", 0, 0);
        array_free(&to), array_free(&from);
        free(arrived);
    }
}

/* To bfloat16, worked out in float64: numbers between two of 8 bits go to the nearer, and in the
 * middle to the even one. From 255.5 units of the last place of the largest binade on: infinity. */
static float rounded_reference(float x) {
    int exponent;
    if (x == 0 || isinf(x)) return x;
    frexp((double)x, &exponent);
    const int last = exponent - 8 < -133 ? -133 : exponent - 8; /* below it: subnormal */
    return (float)ldexp(nearbyint(ldexp((double)x, -last)), last);
}

static const float edges[] = {
    0.0f,          -0.0f,           1.0f,        0x1.01p0f,        0x1.03p0f,     -0x1.01p0f,
    0x1.010002p0f, 0x1.00fffep0f,   0x1.fep0f,   0x1.ffp0f,        0x1.fffffep0f, 0x1p-126f,
    0x1p-133f,     0x1p-134f,       0x1.8p-133f, 0x1.000002p-134f, 0x1p-149f,     -0x1p-149f,
    0x1.fep127f,   0x1.fefffep127f, 0x1.ffp127f, 0x1.fffffep127f,  -0x1.ffp127f,  INFINITY,
    -INFINITY};

static void check_rounded(float got, float from) {
    const float want = rounded_reference(from);
    if (memcmp(&got, &want, sizeof got) != 0)
        fail_msg("masked_round: %a becomes %a, expected %a", from, got, want);
}

/* Numbers of every kind, by bits. */
static void check_masked_round_edges(void) {
    enum { EDGES = LENGTH(edges), NANS = 4 };
    const uint32_t nans[NANS] = {0x7f800001, 0x7fc00000, 0x7fffffff, 0xff80ffff};
    const uint8_t arrived[1] = {1};
    float values[EDGES + NANS];
    memcpy(values, edges, sizeof edges);
    memcpy(values + EDGES, nans, sizeof nans);
    void *device = subject.backend->allocate(sizeof values);
    assert_non_null(device);
    subject.backend->upload(device, values, sizeof values);
    subject.backend->masked_round((float *)device, (const float *)device, arrived, EDGES + NANS,
                                  EDGES + NANS);
    subject.backend->download(values, device, sizeof values);
    for (int i = 0; i < EDGES; i++) check_rounded(values[i], edges[i]);
    for (int i = EDGES; i < EDGES + NANS; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        assert_true(isnan(values[i]) && !(bits & 0xffff));
        assert_int_equal(bits >> 31, nans[i - EDGES] >> 31);
    }
    subject.backend->release(device);
}

void test_masked_round(void **state) {
    (void)state;
    check_masked_round_edges();
    size_t shapes[][2] = {{1, 1}, {10, 3}, {1000, 1024}, {100003, 1024}, {5000, 50}, {4096, 8}};
    for (int s = 0; s < LENGTH(shapes); s++) {
        size_t n = shapes[s][0], packet = shapes[s][1];
        if (too_large(n)) continue;
        struct array to = array_random(n + packet, 1, FLOAT32);
        struct array from = array_random(n + packet, 1, FLOAT32);
        uint8_t *arrived = (uint8_t *)malloc((n + packet - 1) / packet);
        assert_non_null(arrived);
        for (size_t k = 0; k * packet < n; k++) arrived[k] = random_uniform() > 0;
        for (size_t j = 0; j < n; j++)
            if (arrived[j / packet]) to.reference[j] = rounded_reference((float)from.reference[j]);
        subject.backend->masked_round(to.value, from.value, arrived, n, packet);
        assert_close(&to, "masked_round", 0, 0);
        /* In place, and what is rounded already stays. */
        memset(arrived, 1, (n + packet - 1) / packet);
        for (size_t j = 0; j < n; j++) to.reference[j] = rounded_reference((float)to.reference[j]);
        subject.backend->masked_round(to.value, to.value, arrived, n, packet);
        assert_close(&to, "masked_round in place", 0, 0);
        array_free(&to), array_free(&from);
        free(arrived);
    }
}

/* In a vector of n elements, of which the first are numbers of every kind: exact halves, the largest
 * that a block's unit allows, and blocks that are tiny, huge, or not finite. */
static void fill_blocks(float *x, size_t n) {
    static const float special[][4] = {{127, 0.5f, 1.5f, -2.5f},     {7, -0.5f, 127.5f, -7.5f},
                                       {1e-44f, -1e-40f, 1e-39f, 0}, {-0.0f, 0, -0.0f, 0},
                                       {3e38f, 1, -1e-30f, 0},       {3.39e38f, -3.39e38f, 0, 0},
                                       {INFINITY, 1, 2, 3},          {1, NAN, -INFINITY, 3}};
    for (size_t j = 0; j < n; j++) x[j] = (float)(random_uniform() * pow(2, 40 * random_uniform()));
    for (size_t b = 0; b < (size_t)LENGTH(special) && (b + 1) * 32 <= n; b++) {
        memset(x + b * 32, 0, 32 * sizeof *x);
        memcpy(x + b * 32, special[b], sizeof special[b]);
    }
}

/* To the last bit: a run does not depend on where what it sends is rounded. */
void test_round_blocks(void **state) {
    (void)state;
    const struct backend *b = subject.backend;
    const uint64_t key = 0xfedcba9876543210;
    size_t shapes[][2] = {{1, 32}, {37, 64}, {1000, 1024}, {100003, 1024}, {5000, 96}, {4096, 32}};
    for (int s = 0; s < 8 * LENGTH(shapes); s++) {
        const size_t n = shapes[s / 8][0], packet = shapes[s / 8][1];
        const bool random = s % 2, some = s / 4 % 2;
        static const lossynet_wire_dtype dtypes[] = {LOSSYNET_INT8, LOSSYNET_INT4, LOSSYNET_INT6};
        const struct ln_rounding r = {.dtype = dtypes[s / 2 % 3], .random = random, .key = key};
        if (!b->round_blocks || too_large(n)) continue;
        const size_t packets = (n + packet - 1) / packet, bytes = n * sizeof(float);
        float *from = (float *)malloc(bytes), *want = (float *)malloc(bytes);
        float *got = (float *)malloc(bytes), *there = (float *)b->allocate(2 * bytes);
        uint8_t *arrived = (uint8_t *)malloc(packets);
        assert_true(from && want && got && arrived && there);
        fill_blocks(from, n);
        for (size_t k = 0; k < packets; k++) arrived[k] = !some || random_uniform() > 0;
        ln_elements_copy(&r, want, from, n);
        b->upload(there, from, bytes);
        for (int again = 0; again < 2; again++) { /* into memory of zeros, then in place */
            float *to = again ? there : there + n;
            b->round_blocks(to, there, some ? arrived : NULL, n, packet, ln_block_bits(r.dtype),
                            random ? &key : NULL);
            b->download(got, to, bytes);
            for (size_t j = 0; j < n; j++) {
                const float other = again ? from[j] : 0;
                const float *expected = arrived[j / packet] ? &want[j] : &other;
                if (memcmp(&got[j], expected, sizeof other))
                    fail_msg("round_blocks: element %zu of %zu, %a, is %a, expected %a", j, n,
                             (double)from[j], (double)got[j], (double)*expected);
            }
        }
        b->release(there);
        free(from), free(want), free(got), free(arrived);
    }
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

static void check_lost(size_t n, size_t packet, enum backend_lost how) {
    struct array residual = array_random(n + packet, 1, BFLOAT16);
    struct array vector = array_random(n + packet, 1, FLOAT32);
    uint8_t *arrived = (uint8_t *)malloc((n + packet - 1) / packet);
    assert_non_null(arrived);
    for (size_t k = 0; k * packet < n; k++) arrived[k] = random_uniform() > 0;
    for (size_t j = 0; j < n; j++) {
        const float sent = (float)vector.reference[j], before = (float)residual.reference[j];
        const float lost = rounded_reference(how == LOST_ADDED ? before + sent : sent);
        const float kept = how == LOST_ADDED ? before : 0;
        residual.reference[j] = arrived[j / packet] ? kept : lost;
    }
    subject.backend->keep_lost(residual.value, vector.value, arrived, n, packet, how);
    assert_close(&residual, "keep_lost", 0, 0);
    for (size_t j = 0; j < n; j++) {
        const volatile float share = 0.7f * (float)residual.reference[j]; /* rounded */
        vector.reference[j] = (float)vector.reference[j] + share;
    }
    subject.backend->add_residual(vector.value, residual.value, 0.7f, n);
    assert_close(&vector, "add_residual", 0, 0);
    array_free(&residual), array_free(&vector);
    free(arrived);
}

/* The vector becomes what round_blocks makes of it; the residual is the difference, and only that is
 * rounded to bfloat16. */
static void check_error(size_t n, lossynet_wire_dtype dtype) {
    const struct backend *b = subject.backend;
    const uint64_t key = 0x123456789abcdef;
    const struct ln_rounding r = {.dtype = dtype, .random = true, .key = key};
    float *x = (float *)malloc(n * sizeof *x), *want = (float *)malloc(n * sizeof *want);
    float *got = (float *)malloc(n * sizeof *got);
    uint16_t *error = (uint16_t *)malloc(n * sizeof *error);
    assert_true(x && want && got && error);
    fill_blocks(x, n);
    ln_elements_copy(&r, want, x, n);
    float *vector = (float *)upload(x, n * sizeof *x);
    struct array residual = array_empty(n, BFLOAT16);
    b->keep_error((uint16_t *)residual.value, vector, n, ln_block_bits(dtype), &key);
    b->download(got, vector, n * sizeof *got);
    b->download(error, residual.value, n * sizeof *error);
    assert_memory_equal(got, want, n * sizeof *got);
    for (size_t j = 0; j < n; j++) {
        const float exact = x[j] - want[j], kept = ln_bf16_widen(error[j]);
        if (isnan(exact) ? !isnan(kept) : kept != rounded_reference(exact))
            fail_msg("keep_error: %a becomes %a, its residual %a", (double)x[j], (double)want[j],
                     (double)kept);
    }
    array_free(&residual);
    b->release(vector);
    free(x), free(want), free(got), free(error);
}

/* To the last bit: what a run keeps does not depend on where it is kept. */
void test_residuals(void **state) {
    (void)state;
    const size_t shapes[][2] = {{1, 1},     {10, 3},   {1000, 1024}, {100003, 1024},
                                {5000, 50}, {4096, 8}, {4100, 4}};
    const lossynet_wire_dtype dtypes[] = {LOSSYNET_INT8, LOSSYNET_INT6, LOSSYNET_INT4};
    for (int s = 0; s < LENGTH(shapes); s++) {
        if (too_large(shapes[s][0])) continue;
        check_lost(shapes[s][0], shapes[s][1], LOST_ALONE);
        check_lost(shapes[s][0], shapes[s][1], LOST_ADDED);
        check_error(shapes[s][0], dtypes[s % LENGTH(dtypes)]);
    }
}

void test_gather(void **state) {
    (void)state;
    enum { MOST = 1000, FROM = 50000 };
    struct array from = array_random(FROM, 1, FLOAT32);
    size_t element[MOST];
    float out[MOST];
    for (size_t n = 1; n <= MOST; n = n * 3 + 7) {
        for (size_t i = 0; i < n; i++) element[i] = (size_t)(fabs(random_uniform()) * (FROM - 1));
        element[0] = FROM - 1;
        subject.backend->gather(out, from.value, element, n);
        for (size_t i = 0; i < n; i++) assert_true(out[i] == (float)from.reference[element[i]]);
    }
    array_free(&from);
}
