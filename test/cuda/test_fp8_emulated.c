/* test_fp8_emulated.c — tests products of 8-bit numbers (--dtype fp8, llmc/backend/cuda/fp8.cuh)
 * on the emulated device: products give the same bits as in bfloat16 if 8 bits can represent the
 * numbers exactly, rounding follows the formats' definition, and some products stay in bfloat16.
 * */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/backend/cuda/backend_cuda.h"
#include "llmc/util/bf16.h"
#include "llmc/util/random.h"

static const struct backend *backend_of(enum dtype dtype) {
    char why[256];
    const struct backend *be = backend_cuda(dtype, 0, why, sizeof why);
    assert_non_null(be);
    return be;
}

static tensor *to_device(const struct backend *be, const float *x, size_t n) {
    float *wide = (float *)be->allocate(n * sizeof *wide);
    tensor *to = be->allocate(n * be->element_bytes);
    be->upload(wide, x, n * sizeof *wide);
    be->convert(to, wide, n);
    be->release(wide);
    return to;
}

struct products {
    int N, I, O;
    uint16_t *out, *dx; /* bfloat16, (N, O), (N, I) */
    float *dw;          /* (O, I) */
};

/* All three, dx and dw added to what is there: twice the product. */
static void multiply(enum dtype dtype, struct products *p, const float *x, const float *w,
                     const float *dout) {
    const struct backend *be = backend_of(dtype);
    const size_t N = (size_t)p->N, I = (size_t)p->I, O = (size_t)p->O;
    tensor *dx = to_device(be, x, N * I), *dy = to_device(be, dout, N * O);
    tensor *dw = be->allocate(O * I * 4), *y = to_device(be, dout, N * O);
    tensor *a = to_device(be, x, N * I), *b = to_device(be, w, O * I);
    be->matmul_forward(y, a, b, p->N, p->I, p->O);
    for (int i = 0; i < 2; i++) {
        be->matmul_backward_input(dx, dy, b, p->N, p->I, p->O, i > 0);
        be->matmul_backward_weight(dw, dy, a, p->N, p->I, p->O, i > 0);
    }
    p->out = (uint16_t *)malloc(N * O * 2), p->dx = (uint16_t *)malloc(N * I * 2);
    p->dw = (float *)malloc(O * I * 4);
    be->download(p->out, y, N * O * 2);
    be->download(p->dx, dx, N * I * 2);
    be->download(p->dw, dw, O * I * 4);
    tensor *all[] = {dx, dy, dw, y, a, b};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) be->release(all[i]);
}

static void forget(struct products *p) {
    free(p->out), free(p->dx), free(p->dw);
}

/* Whole numbers from -most to most */
static float *numbers(size_t n, int most, uint64_t seed) {
    float *x = (float *)calloc(n, sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = (float)((int)(random_bits(seed, i) % (uint64_t)(2 * most + 1)) - most);
    return x;
}

static bool same_bits(int N, int I, int O, int most) {
    struct products half = {N, I, O, NULL, NULL, NULL}, eight = half;
    float *x = numbers((size_t)N * I, most, 1), *w = numbers((size_t)O * I, most, 2);
    float *dout = numbers((size_t)N * O, most < 4 ? most : 4, 3);
    multiply(DTYPE_BF16, &half, x, w, dout);
    multiply(DTYPE_E4M3, &eight, x, w, dout);
    const bool same = !memcmp(half.out, eight.out, (size_t)N * O * 2) &&
                      !memcmp(half.dx, eight.dx, (size_t)N * I * 2) &&
                      !memcmp(half.dw, eight.dw, (size_t)O * I * 4);
    forget(&half), forget(&eight);
    free(x), free(w), free(dout);
    return same;
}

/* Of whole numbers up to 16 (up to 4 in E5M2), which 8 bits hold, at every scale of the same
 * power. */
static void test_numbers_that_8_bits_hold(void **state) {
    (void)state;
    const int shapes[][3] = {{16, 16, 16}, {48, 80, 112}, {64, 128, 192}, {144, 16, 272}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int most = 1; most <= 16; most += 5)
            assert_true(same_bits(shapes[i][0], shapes[i][1], shapes[i][2], most));
}

/* A product with a side that 16 does not divide is one of bfloat16, also of numbers that 8 bits
 * do not hold. */
static void test_other_shapes_stay_in_bf16(void **state) {
    (void)state;
    assert_true(same_bits(17, 32, 32, 200));
    assert_true(same_bits(32, 24, 32, 200));
    assert_true(same_bits(32, 32, 40, 200));
    assert_false(same_bits(32, 32, 32, 200));
}

/* The nearest number of the format to x times a power of two, divided by it again. */
static double rounded(double x, double largest, int mantissa, int least, double most) {
    int power = 0;
    while (ldexp(largest, power) > most) power--;
    while (ldexp(largest, power + 1) <= most) power++;
    const double y = ldexp(x, power);
    int exponent = y == 0 ? least : ilogb(y);
    if (exponent < least) exponent = least;
    const double step = ldexp(1, exponent - mantissa);
    return ldexp(nearbyint(y / step) * step, -power);
}

enum { SIDE = 64, COUNT = SIDE * SIDE };

/* Numbers of many magnitudes, times one, are the rounded numbers. */
static void check_rounding(double largest, uint64_t seed) {
    static float x[COUNT], one[COUNT];
    struct products p = {SIDE, SIDE, SIDE, NULL, NULL, NULL};
    double found = 0;
    for (int i = 0; i < COUNT; i++) {
        const double u = random_uniform(seed, (uint64_t)i) - 0.5;
        const double v = largest * u * exp2(-24 * random_uniform(seed + 1, (uint64_t)i));
        x[i] = from_bf16(to_bf16((float)v));
        one[i] = i % (SIDE + 1) == 0;
        found = fmax(found, fabs((double)x[i]));
    }
    multiply(DTYPE_E4M3, &p, x, one, x);
    for (int i = 0; i < COUNT; i++) {
        const double forward = rounded(x[i], found, 3, -6, 448);
        const double backward = rounded(x[i], found, 2, -14, 57344);
        assert_true(from_bf16(p.out[i]) == (float)forward);
        assert_true(from_bf16(p.dx[i]) == 2 * (float)backward); /* x + x */
    }
    forget(&p);
}

static void test_rounds_to_the_nearest(void **state) {
    (void)state;
    const double sizes[] = {1, 1.7, 1.76, 447, 1e-20, 1e20};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) check_rounding(sizes[i], 2 * i + 9);
}

static void test_what_is_not_finite_stays_so(void **state) {
    (void)state;
    static float x[COUNT], one[COUNT];
    for (int k = 0; k < 2; k++) {
        struct products p = {SIDE, SIDE, SIDE, NULL, NULL, NULL};
        for (int i = 0; i < COUNT; i++) x[i] = 1, one[i] = i % (SIDE + 1) == 0;
        x[5] = k ? NAN : -INFINITY;
        multiply(DTYPE_E4M3, &p, x, one, one);
        assert_true(isnan(from_bf16(p.out[5])) && isnan(p.dw[5]));
        forget(&p);
    }
}

static void test_zeros(void **state) {
    (void)state;
    assert_true(same_bits(16, 16, 16, 0));
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_numbers_that_8_bits_hold),
                                       cmocka_unit_test(test_other_shapes_stay_in_bf16),
                                       cmocka_unit_test(test_rounds_to_the_nearest),
                                       cmocka_unit_test(test_what_is_not_finite_stays_so),
                                       cmocka_unit_test(test_zeros)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
