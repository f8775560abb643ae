/* test_operators.c — every operation of llmc/backend.h on every backend this machine can run,
 * against float64 (operators_reference.h), finite differences, and itself on other numbers of
 * threads.
 *
 * An error is the norm of the difference over the norm of the reference. Inputs are rounded to the
 * backend's type first, so that only the operation's own rounding is measured. Behind every array
 * stands a canary, checked when the array is freed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>
#include <omp.h>

#include "llmc/backend_cpu.h"
#include "test/operators_reference.h"

static const struct backend *backend;

#define LENGTH(array) ((int)(sizeof(array) / sizeof(array)[0]))

/* ---- arrays ------------------------------------------------------------------------------- */

/* The same numbers twice: in float64 for the reference, in the backend's memory. */
struct array {
    size_t n;
    double *reference;
    float *value;
};

enum { CANARY = 64 };
static const float canary = 1.2345e30f;

static uint64_t random_state;

static double random_uniform(void) { /* xorshift64*, -1 .. 1 */
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (double)(int64_t)(random_state * 0x2545F4914F6CDD1D) / 9.3e18;
}

/* The value is NaN: outputs are to be written, not added to. */
static struct array array_empty(size_t n) {
    struct array a = {n, (double *)calloc(n + 1, sizeof(double)), NULL};
    a.value = (float *)backend->allocate((n + CANARY) * sizeof(float));
    assert_non_null(a.reference);
    assert_non_null(a.value);
    assert_int_equal((uintptr_t)a.value % 64, 0);
    for (size_t i = 0; i < n; i++) a.value[i] = NAN;
    for (int i = 0; i < CANARY; i++) a.value[n + i] = canary;
    return a;
}

static struct array array_random(size_t n, double size) {
    struct array a = array_empty(n);
    for (size_t i = 0; i < n; i++) a.reference[i] = a.value[i] = (float)(size * random_uniform());
    return a;
}

static struct array array_filled(size_t n, bool random) {
    return random ? array_random(n, 1) : array_empty(n);
}

static void array_add_reference(struct array *a, const struct array *b) {
    for (size_t i = 0; i < a->n; i++) a->reference[i] += b->reference[i];
}

static void array_free(struct array *a) {
    for (int i = 0; i < CANARY; i++) assert_true(a->value[a->n + i] == canary);
    backend->release(a->value);
    free(a->reference);
}

#define assert_close(a, tolerance) assert_close_at(a, #a, tolerance, __LINE__)
static void assert_close_at(const struct array *a, const char *name, double tolerance, int line) {
    double sum = 0, square = 0;
    for (size_t i = 0; i < a->n; i++) {
        double d = a->value[i] - a->reference[i];
        sum += d * d;
        square += a->reference[i] * a->reference[i];
    }
    if (sqrt(sum) <= tolerance * sqrt(square)) return; /* NaN does not get past here */
    fail_msg("line %d: %s is off by %.3g of its norm %.3g, allowed %.3g", line, name,
             sqrt(sum / square), sqrt(square), tolerance);
}

static int32_t *random_tokens(int N, int V) {
    int32_t *tokens = (int32_t *)malloc(sizeof(int32_t) * N);
    assert_non_null(tokens);
    for (int n = 0; n < N; n++) tokens[n] = (int32_t)(fabs(random_uniform()) * V) % V;
    tokens[0] = V - 1;
    return tokens;
}

/* ---- finite differences ------------------------------------------------------------------- */

/* What a loss needs: an operation's inputs, and what its output is weighted with. */
struct problem {
    int N, C, O, B, T, H, K, D;
    const int32_t *targets;
    struct array *x, *w, *dout;
    double *out;
};

/* A backend's gradient of loss = sum(dout * forward(x)) against the central difference of the
 * float64 forward along random directions. */
static void assert_gradient(double (*loss)(const struct problem *), struct problem *problem,
                            size_t outputs, struct array *x, const struct array *gradient) {
    double *direction = (double *)malloc(sizeof(double) * x->n);
    double *saved = (double *)malloc(sizeof(double) * x->n);
    problem->out = (double *)malloc(sizeof(double) * outputs);
    memcpy(saved, x->reference, sizeof(double) * x->n);
    for (int trial = 0; trial < 3; trial++) {
        const double h = 1e-5;
        double slope = 0, square = 0, ends[2];
        for (size_t i = 0; i < x->n; i++) {
            direction[i] = random_uniform();
            slope += direction[i] * gradient->value[i];
            square += gradient->value[i] * (double)gradient->value[i];
        }
        for (int side = 0; side < 2; side++) {
            for (size_t i = 0; i < x->n; i++)
                x->reference[i] = saved[i] + (side ? -h : h) * direction[i];
            ends[side] = loss(problem);
        }
        double difference = (ends[0] - ends[1]) / (2 * h);
        if (!(fabs(difference - slope) <= 1e-5 * sqrt(square) + 1e-8))
            fail_msg("gradient along a direction: %.9g, finite difference %.9g", slope, difference);
    }
    memcpy(x->reference, saved, sizeof(double) * x->n);
    free(problem->out);
    free(direction);
    free(saved);
}

static double dot(const double *a, const struct array *b) {
    double sum = 0;
    for (size_t i = 0; i < b->n; i++) sum += a[i] * b->reference[i];
    return sum;
}

static double rmsnorm_loss(const struct problem *p) {
    reference_rmsnorm(p->out, NULL, p->x->reference, p->w->reference, p->N, p->C, 1e-5);
    return dot(p->out, p->dout);
}

static double matmul_loss(const struct problem *p) {
    reference_matmul(p->out, p->x->reference, p->w->reference, p->N, p->C, p->O);
    return dot(p->out, p->dout);
}

static double attention_loss(const struct problem *p) {
    reference_attention(p->out, NULL, p->x->reference, p->B, p->T, p->H, p->K, p->D);
    return dot(p->out, p->dout);
}

static double swiglu_loss(const struct problem *p) {
    reference_swiglu(p->out, p->x->reference, p->N, p->C);
    return dot(p->out, p->dout);
}

enum { CLASSIFIER_SCALE_INVERSE = 8 };

static double classifier_loss(const struct problem *p) {
    reference_classifier(p->out, NULL, NULL, p->x->reference, p->w->reference, p->targets, p->N,
                         p->C, p->O, 1);
    double sum = 0;
    for (int n = 0; n < p->N; n++) sum += p->out[n];
    return sum / CLASSIFIER_SCALE_INVERSE;
}

/* ---- operations --------------------------------------------------------------------------- */

static void test_memory(void **state) {
    (void)state;
    size_t sizes[] = {1, 63, 4096, 5000001, 33554432 + 3};
    for (int i = 0; i < LENGTH(sizes); i++) {
        size_t n = sizes[i];
        unsigned char *a = (unsigned char *)backend->allocate(n);
        unsigned char *b = (unsigned char *)backend->allocate(n);
        assert_true(a && b && (uintptr_t)a % 64 == 0 && (uintptr_t)b % 64 == 0);
        for (size_t j = 0; j < n; j++)
            if (a[j]) fail_msg("allocate(%zu): byte %zu is not zero", n, j);
        for (size_t j = 0; j < n; j++) a[j] = (unsigned char)(j * 7 + j / 251);
        backend->copy(b, a, n);
        assert_memory_equal(a, b, n);
        backend->clear(b, n);
        for (size_t j = 0; j < n; j++)
            if (b[j]) fail_msg("clear(%zu): byte %zu is not zero", n, j);
        backend->release(a);
        backend->release(b);
    }
    backend->release(NULL);
    assert_null(backend->allocate(SIZE_MAX - 100));
}

static void test_embedding(void **state) {
    (void)state;
    int shapes[][3] = {{1, 1, 1}, {3, 5, 2}, {77, 288, 97}, {200, 100, 32003}, {64, 130, 11}};
    for (int s = 0; s < LENGTH(shapes); s++) {
        int N = shapes[s][0], C = shapes[s][1], V = shapes[s][2];
        int32_t *tokens = random_tokens(N, V);
        struct array table = array_random((size_t)V * C, 1), out = array_empty((size_t)N * C);
        struct array dout = array_random(out.n, 1);
        backend->embedding_forward(out.value, tokens, table.value, N, C);
        for (int i = 0; i < N * C; i++)
            out.reference[i] = table.reference[(size_t)tokens[i / C] * C + i % C];
        assert_close(&out, 0);
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            struct array dtable = array_filled(table.n, accumulate);
            for (int i = 0; i < N * C; i++)
                dtable.reference[(size_t)tokens[i / C] * C + i % C] += dout.reference[i];
            backend->embedding_backward(dtable.value, tokens, dout.value, N, C, V, accumulate);
            assert_close(&dtable, 2e-7);
            array_free(&dtable);
        }
        array_free(&table), array_free(&out), array_free(&dout);
        free(tokens);
    }
}

static void check_rmsnorm_backward(int N, int C, struct array *x, struct array *w,
                                   const struct array *rstd, bool accumulate) {
    struct array dout = array_random(x->n, 1);
    struct array dx = array_random(x->n, 1), dw = array_filled(C, accumulate);
    struct array dx0 = array_empty(x->n), dw0 = array_empty(C);
    reference_rmsnorm_backward(dx0.reference, dw0.reference, dout.reference, x->reference,
                               w->reference, rstd->reference, N, C);
    array_add_reference(&dx, &dx0);
    array_add_reference(&dw, &dw0);
    backend->rmsnorm_backward(dx.value, dw.value, dout.value, x->value, w->value, rstd->value, N, C,
                              accumulate);
    assert_close(&dx, 5e-7);
    assert_close(&dw, 2e-6);
    if (!accumulate) {
        memset(dx0.value, 0, sizeof(float) * dx0.n);
        backend->rmsnorm_backward(dx0.value, dw.value, dout.value, x->value, w->value, rstd->value,
                                  N, C, false);
        struct problem p = {.N = N, .C = C, .x = x, .w = w, .dout = &dout};
        if (C > 1) assert_gradient(rmsnorm_loss, &p, x->n, x, &dx0); /* C = 1: dx is nearly 0 */
        assert_gradient(rmsnorm_loss, &p, x->n, w, &dw);
    }
    array_free(&dout), array_free(&dx), array_free(&dw), array_free(&dx0), array_free(&dw0);
}

static void test_rmsnorm(void **state) {
    (void)state;
    int shapes[][2] = {{1, 1}, {1, 7}, {2, 64}, {65, 288}, {129, 97}, {300, 512}, {3, 4096}};
    for (int s = 0; s < LENGTH(shapes); s++) {
        int N = shapes[s][0], C = shapes[s][1];
        size_t n = (size_t)N * C;
        struct array x = array_random(n, 2), y = array_random(n, 2), w = array_random(C, 1);
        struct array out = array_empty(n), rstd = array_empty(N), sum = array_empty(n);
        reference_rmsnorm(out.reference, rstd.reference, x.reference, w.reference, N, C, 1e-5);
        backend->rmsnorm_forward(out.value, rstd.value, x.value, w.value, N, C, 1e-5f);
        assert_close(&out, 1e-6);
        assert_close(&rstd, 1e-6);
        for (int accumulate = 0; accumulate < 2; accumulate++)
            check_rmsnorm_backward(N, C, &x, &w, &rstd, accumulate);

        for (size_t i = 0; i < n; i++) sum.reference[i] = (float)(x.value[i] + y.value[i]);
        reference_rmsnorm(out.reference, rstd.reference, sum.reference, w.reference, N, C, 1e-5);
        for (int in_place = 0; in_place < 2; in_place++) {
            if (in_place) memcpy(sum.value, x.value, n * sizeof(float));
            backend->residual_rmsnorm_forward(sum.value, out.value, rstd.value,
                                              in_place ? sum.value : x.value, y.value, w.value, N,
                                              C, 1e-5f);
            assert_close(&sum, 0);
            assert_close(&out, 1e-6);
            assert_close(&rstd, 1e-6);
        }
        array_free(&x), array_free(&y), array_free(&w);
        array_free(&out), array_free(&rstd), array_free(&sum);
    }
}

static void check_matmul(int N, int I, int O) {
    struct array x = array_random((size_t)N * I, 1), w = array_random((size_t)O * I, 1);
    struct array out = array_empty((size_t)N * O), dout = array_random(out.n, 1);
    struct array dx0 = array_empty(x.n), dw0 = array_empty(w.n);
    reference_matmul(out.reference, x.reference, w.reference, N, I, O);
    backend->matmul_forward(out.value, x.value, w.value, N, I, O);
    assert_close(&out, 1e-6);
    reference_matmul_backward(dx0.reference, dw0.reference, dout.reference, x.reference,
                              w.reference, N, I, O);
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        struct array dx = array_filled(x.n, accumulate), dw = array_filled(w.n, accumulate);
        array_add_reference(&dx, &dx0);
        array_add_reference(&dw, &dw0);
        backend->matmul_backward_input(dx.value, dout.value, w.value, N, I, O, accumulate);
        backend->matmul_backward_weight(dw.value, dout.value, x.value, N, I, O, accumulate);
        assert_close(&dx, 1e-6);
        assert_close(&dw, 1e-6);
        if (!accumulate && (long)N * I * O < 4000000) {
            struct problem p = {.N = N, .C = I, .O = O, .x = &x, .w = &w, .dout = &dout};
            assert_gradient(matmul_loss, &p, out.n, &x, &dx);
            assert_gradient(matmul_loss, &p, out.n, &w, &dw);
        }
        array_free(&dx), array_free(&dw);
    }
    array_free(&x), array_free(&w), array_free(&out), array_free(&dout);
    array_free(&dx0), array_free(&dw0);
}

static void test_matmul(void **state) {
    (void)state;
    /* Powers of two among them: rows that far apart take another path. */
    int shapes[][3] = {{1, 1, 1},       {1, 288, 97},   {97, 1, 5},     {5, 31, 1},
                       {64, 48, 300},   {130, 288, 77}, {33, 512, 128}, {257, 128, 256},
                       {600, 16, 1024}, {3, 384, 640}};
    for (int s = 0; s < LENGTH(shapes); s++) check_matmul(shapes[s][0], shapes[s][1], shapes[s][2]);
}

struct attention_shape {
    int B, T, H, K, D;
};

static const struct attention_shape attention_shapes[] = {
    {1, 1, 1, 1, 2},   {2, 1, 4, 2, 6},    {1, 5, 2, 2, 6},    {3, 17, 4, 1, 12},
    {2, 64, 2, 2, 48}, {1, 65, 6, 3, 48},  {2, 100, 8, 4, 64}, {1, 130, 2, 1, 128},
    {2, 33, 8, 8, 8},  {1, 256, 3, 3, 48},
};

static void test_rope(void **state) {
    (void)state;
    for (int s = 0; s < LENGTH(attention_shapes); s++) {
        struct attention_shape a = attention_shapes[s];
        struct array qkv = array_random((size_t)a.B * a.T * (a.H + 2 * a.K) * a.D, 1);
        struct array cosine = array_empty((size_t)a.T * a.D / 2), sine = array_empty(cosine.n);
        for (size_t i = 0; i < cosine.n; i++) {
            double angle = 3 * random_uniform();
            cosine.reference[i] = cosine.value[i] = (float)cos(angle);
            sine.reference[i] = sine.value[i] = (float)sin(angle);
        }
        for (int backward = 0; backward < 2; backward++) { /* there, and back again */
            backend->rope(qkv.value, cosine.value, sine.value, a.B, a.T, a.H, a.K, a.D, backward);
            reference_rope(qkv.reference, cosine.reference, sine.reference, a.B, a.T, a.H, a.K, a.D,
                           backward);
            assert_close(&qkv, 2e-7);
        }
        array_free(&qkv), array_free(&cosine), array_free(&sine);
    }
}

static void check_attention(struct attention_shape a, double size, double tolerance,
                            bool differences) {
    size_t rows = (size_t)a.B * a.T, n = rows * a.H * a.D;
    struct array qkv = array_random(rows * (a.H + 2 * a.K) * a.D, size), out = array_empty(n);
    struct array log_sum_exp = array_empty(rows * a.H), dout = array_random(n, 1);
    struct array dqkv = array_empty(qkv.n);
    reference_attention(out.reference, log_sum_exp.reference, qkv.reference, a.B, a.T, a.H, a.K,
                        a.D);
    backend->attention_forward(out.value, log_sum_exp.value, qkv.value, a.B, a.T, a.H, a.K, a.D);
    assert_close(&out, tolerance);
    assert_close(&log_sum_exp, tolerance);
    reference_attention_backward(dqkv.reference, dout.reference, qkv.reference, a.B, a.T, a.H, a.K,
                                 a.D);
    backend->attention_backward(dqkv.value, dout.value, out.value, qkv.value, log_sum_exp.value,
                                a.B, a.T, a.H, a.K, a.D);
    assert_close(&dqkv, 2 * tolerance);
    struct problem p = {.B = a.B, .T = a.T, .H = a.H, .K = a.K, .D = a.D, .x = &qkv, .dout = &dout};
    if (differences) assert_gradient(attention_loss, &p, n, &qkv, &dqkv);
    array_free(&qkv), array_free(&out), array_free(&log_sum_exp);
    array_free(&dout), array_free(&dqkv);
}

static void test_attention(void **state) {
    (void)state;
    for (int s = 0; s < LENGTH(attention_shapes); s++)
        check_attention(attention_shapes[s], 1, 1e-6, true);
}

/* Logits in the hundreds: exp overflows unless the maximum is taken off. The error is that of the
 * logits, whose float32 rounding is 1e-5 there. */
static void test_attention_large_logits(void **state) {
    (void)state;
    check_attention((struct attention_shape){1, 70, 2, 1, 48}, 12, 1e-4, false);
}

static void test_swiglu(void **state) {
    (void)state;
    int shapes[][2] = {{1, 1}, {1, 33}, {7, 97}, {130, 768}, {2, 1376}};
    for (int s = 0; s < LENGTH(shapes); s++) {
        int N = shapes[s][0], F = shapes[s][1];
        size_t n = (size_t)N * F;
        struct array gate_up = array_random(2 * n, s == 2 ? 120 : 4), out = array_empty(n);
        struct array dout = array_random(n, 1), dgate_up = array_empty(2 * n);
        reference_swiglu(out.reference, gate_up.reference, N, F);
        backend->swiglu_forward(out.value, gate_up.value, N, F);
        assert_close(&out, 5e-7);
        reference_swiglu_backward(dgate_up.reference, dout.reference, gate_up.reference, N, F);
        backend->swiglu_backward(dgate_up.value, dout.value, gate_up.value, N, F);
        assert_close(&dgate_up, 5e-7);
        struct problem p = {.N = N, .C = F, .x = &gate_up, .dout = &dout};
        assert_gradient(swiglu_loss, &p, n, &gate_up, &dgate_up);
        array_free(&gate_up), array_free(&out), array_free(&dout), array_free(&dgate_up);
    }
}

static void check_classifier(int N, int C, int V, double size, double tolerance, bool differences) {
    const float scale = 1.0f / CLASSIFIER_SCALE_INVERSE;
    int32_t *targets = random_tokens(N, V);
    struct array x = array_random((size_t)N * C, size), w = array_random((size_t)V * C, size);
    struct array losses = array_empty(N), dx = array_empty(x.n), dw0 = array_empty(w.n);
    reference_classifier(losses.reference, dx.reference, dw0.reference, x.reference, w.reference,
                         targets, N, C, V, scale);
    backend->classifier(losses.value, NULL, NULL, x.value, w.value, targets, N, C, V, scale, false);
    assert_close(&losses, tolerance);
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        struct array dw = array_filled(w.n, accumulate);
        array_add_reference(&dw, &dw0);
        for (int n = 0; n < N; n++) losses.value[n] = NAN;
        for (size_t i = 0; i < dx.n; i++) dx.value[i] = NAN;
        backend->classifier(losses.value, dx.value, dw.value, x.value, w.value, targets, N, C, V,
                            scale, accumulate);
        assert_close(&losses, tolerance);
        assert_close(&dx, tolerance);
        assert_close(&dw, tolerance);
        struct problem p = {.N = N, .C = C, .O = V, .targets = targets, .x = &x, .w = &w};
        if (differences && !accumulate) {
            assert_gradient(classifier_loss, &p, N, &x, &dx);
            assert_gradient(classifier_loss, &p, N, &w, &dw);
        }
        array_free(&dw);
    }
    array_free(&x), array_free(&w), array_free(&losses), array_free(&dx), array_free(&dw0);
    free(targets);
}

static void test_classifier(void **state) {
    (void)state;
    check_classifier(1, 1, 2, 1, 1e-6, true);
    check_classifier(1, 64, 97, 1, 1e-6, true);
    check_classifier(37, 48, 97, 1, 1e-6, true);
    check_classifier(140, 128, 600, 0.3, 1e-6, true);
    check_classifier(3, 6, 32003, 1, 1e-6, true);
    check_classifier(1100, 12, 530, 1, 1e-6, true);
    check_classifier(300, 16, 9000, 1, 1e-6, false);
}

/* Logits up to a few hundred, in the second case rising and falling over the vocabulary: a running
 * maximum has to follow. */
static void test_classifier_large_logits(void **state) {
    (void)state;
    check_classifier(30, 64, 3000, 5, 1e-5, false);
    int N = 2, V = 20000;
    struct array x = array_empty(N), w = array_empty(V), losses = array_empty(N);
    struct array dx = array_empty(N), dw = array_empty(V);
    int32_t targets[] = {0, 19999};
    for (int n = 0; n < N; n++) x.reference[n] = x.value[n] = n ? -1 : 1;
    for (int v = 0; v < V; v++) w.reference[v] = w.value[v] = (float)(v - 10000) / 32;
    reference_classifier(losses.reference, dx.reference, dw.reference, x.reference, w.reference,
                         targets, N, 1, V, 1);
    backend->classifier(losses.value, dx.value, dw.value, x.value, w.value, targets, N, 1, V, 1,
                        false);
    assert_close(&losses, 1e-6);
    assert_close(&dx, 1e-6);
    assert_close(&dw, 1e-6);
    array_free(&x), array_free(&w), array_free(&losses), array_free(&dx), array_free(&dw);
}

static void check_adamw(size_t n, bool in_place) {
    /* betas that float32 holds exactly, so that 1 - beta has no rounding of its own */
    struct adamw_settings settings = {0.875f, 0.9375f, 1e-8f};
    struct array master = array_random(n, 1), m = array_random(n, 0), v = array_random(n, 0);
    struct array param = array_empty(n), gradient = array_random(n, 3);
    float *target = in_place ? master.value : param.value;
    for (int step = 1; step <= 4; step++) {
        reference_adamw(master.reference, m.reference, v.reference, gradient.reference, n,
                        settings.beta1, settings.beta2, settings.eps, step, 0.01f, 0.1f, 0.5f);
        backend->adamw(target, master.value, m.value, v.value, gradient.value, n, &settings, step,
                       0.01f, 0.1f, 0.5f);
        for (size_t i = 0; i < n; i++)
            gradient.reference[i] = gradient.value[i] = (float)random_uniform();
    }
    assert_close(&master, 5e-7);
    assert_close(&m, 1e-6);
    assert_close(&v, 1e-6);
    assert_memory_equal(target, master.value, n * sizeof(float));
    array_free(&master), array_free(&m), array_free(&v), array_free(&param), array_free(&gradient);
}

static void test_adamw(void **state) {
    (void)state;
    size_t sizes[] = {1, 31, 1000, 50001};
    for (int s = 0; s < LENGTH(sizes); s++) {
        check_adamw(sizes[s], false);
        check_adamw(sizes[s], true);
    }
}

static void test_sum_of_squares(void **state) {
    (void)state;
    size_t sizes[] = {0, 1, 17, 16384, 16385, 1000003, 20000001};
    for (int s = 0; s < LENGTH(sizes); s++) {
        struct array x = array_random(sizes[s], 1);
        double sum = 0, got = backend->sum_of_squares(x.value, x.n);
        for (size_t i = 0; i < x.n; i++) sum += x.reference[i] * x.reference[i];
        if (!(fabs(got - sum) <= 1e-12 * sum)) fail_msg("%zu: %.17g, not %.17g", x.n, got, sum);
        array_free(&x);
    }
}

/* `aliased`: the sender that is also the output, -1 for none. */
static void check_weighted_sum(size_t n, size_t packet, int aliased) {
    enum { SENDERS = 5 };
    size_t packets = (n + packet - 1) / packet;
    struct array sender[SENDERS], out = array_empty(n);
    const float *senders[SENDERS];
    float *weight = (float *)malloc(sizeof(float) * packets * SENDERS);
    for (size_t i = 0; i < packets * SENDERS; i++)
        weight[i] = random_uniform() < -0.3 ? 0 : (float)random_uniform();
    if (packets > 2) memset(weight + SENDERS, 0, sizeof(float) * SENDERS); /* nothing arrived */
    for (int i = 0; i < SENDERS; i++) {
        sender[i] = array_random(n, 1);
        senders[i] = sender[i].value;
        for (size_t j = 0; j < n; j++) {
            float w = weight[j / packet * SENDERS + i];
            out.reference[j] += w * sender[i].reference[j];
            if (w == 0) sender[i].value[j] = NAN; /* did not arrive: not to be read */
        }
    }
    float *target = aliased < 0 ? out.value : sender[aliased].value;
    backend->weighted_sum(target, senders, weight, SENDERS, n, packet);
    memmove(out.value, target, n * sizeof(float));
    assert_close(&out, 1e-6);
    for (int i = 0; i < SENDERS; i++) array_free(&sender[i]);
    array_free(&out);
    free(weight);
}

static void test_weighted_sum(void **state) {
    (void)state;
    size_t shapes[][2] = {{1, 1}, {10, 3}, {1000, 1024}, {100003, 1024}, {50000, 5000}, {4096, 7}};
    for (int s = 0; s < LENGTH(shapes); s++)
        for (int aliased = -1; aliased < 5; aliased++)
            check_weighted_sum(shapes[s][0], shapes[s][1], aliased);
}

/* ---- same bits ---------------------------------------------------------------------------- */

/* Shapes that make several tiles, blocks, chunks and segments. */
enum { B = 5, T = 150, H = 4, K = 2, D = 32, C = H * D, F = 150, V = 3000, N = B * T };
enum { WIDTH = (H + 2 * K) * D, ELEMENTS = 200003, PACKET = 1000 };

struct inputs {
    struct array x, y, w, norm, big, m, v, table, qkv, out, log_sum_exp, dout, gate_up, angle,
        weight;
    int32_t *tokens;
};

static struct inputs inputs_new(void) {
    struct inputs in = {
        .x = array_random((size_t)N * C, 1),
        .y = array_random((size_t)N * C, 1),
        .w = array_random((size_t)F * C, 1),
        .norm = array_random(C, 1),
        .big = array_random(2 * ELEMENTS, 1),
        .m = array_random(ELEMENTS, 1),
        .v = array_random(ELEMENTS, 0),
        .table = array_random((size_t)V * C, 1),
        .qkv = array_random((size_t)N * WIDTH, 1),
        .out = array_empty((size_t)N * C),
        .log_sum_exp = array_empty((size_t)N * H),
        .dout = array_random((size_t)N * C, 1),
        .gate_up = array_random((size_t)N * 2 * F, 3),
        .angle = array_random(T * D, 1),
        .weight = array_random(2 * (ELEMENTS / PACKET + 1), 1),
        .tokens = random_tokens(N, V),
    };
    backend->attention_forward(in.out.value, in.log_sum_exp.value, in.qkv.value, B, T, H, K, D);
    return in;
}

static void inputs_free(struct inputs *in) {
    struct array *all[] = {&in->x,    &in->y,     &in->w,           &in->norm,    &in->big,
                           &in->m,    &in->v,     &in->table,       &in->qkv,     &in->out,
                           &in->dout, &in->angle, &in->log_sum_exp, &in->gate_up, &in->weight};
    for (int i = 0; i < LENGTH(all); i++) array_free(all[i]);
    free(in->tokens);
}

enum { OUTPUTS = 30 };
struct outputs {
    int count;
    size_t bytes[OUTPUTS];
    void *memory[OUTPUTS];
    const char *name[OUTPUTS];
};

static void *output(struct outputs *o, const char *name, size_t elements, const float *start) {
    int i = o->count++;
    o->name[i] = name;
    o->bytes[i] = elements * sizeof(float);
    o->memory[i] = backend->allocate(o->bytes[i]);
    if (start) memcpy(o->memory[i], start, o->bytes[i]);
    return o->memory[i];
}

/* Every operation once. No assertions: this also runs inside a parallel region. */
static void run_everything(const struct inputs *in, struct outputs *o) {
    const struct backend *b = backend;
    float *rstd = (float *)output(o, "rstd", N, NULL);
    float *x = in->x.value, *y = in->y.value, *norm = in->norm.value;
    b->embedding_forward(output(o, "embedding_forward", N * C, NULL), in->tokens, in->table.value,
                         N, C);
    b->embedding_backward(output(o, "embedding_backward", V * C, NULL), in->tokens, x, N, C, V,
                          false);
    b->rmsnorm_forward(output(o, "rmsnorm_forward", N * C, NULL), rstd, x, norm, N, C, 1e-5f);
    void *dx = output(o, "rmsnorm_backward: dx", N * C, y);
    b->rmsnorm_backward(dx, output(o, "rmsnorm_backward: dw", C, NULL), in->dout.value, x, norm,
                        rstd, N, C, false);
    void *sum = output(o, "residual_rmsnorm_forward: sum", N * C, NULL);
    b->residual_rmsnorm_forward(sum, output(o, "residual_rmsnorm_forward: out", N * C, NULL), rstd,
                                x, y, norm, N, C, 1e-5f);
    b->matmul_forward(output(o, "matmul_forward", N * F, NULL), x, in->w.value, N, C, F);
    b->matmul_backward_input(output(o, "matmul_backward_input", N * F, NULL), x, in->table.value, N,
                             F, C, false);
    b->matmul_backward_weight(output(o, "matmul_backward_weight", C * C, NULL), x, y, N, C, C,
                              false);
    b->rope(output(o, "rope", N * WIDTH, in->qkv.value), in->angle.value,
            in->angle.value + T * D / 2, B, T, H, K, D, false);
    float *log_sum_exp = (float *)output(o, "attention_forward: log_sum_exp", N * H, NULL);
    b->attention_forward(output(o, "attention_forward: out", N * C, NULL), log_sum_exp,
                         in->qkv.value, B, T, H, K, D);
    b->attention_backward(output(o, "attention_backward", N * WIDTH, NULL), in->dout.value,
                          in->out.value, in->qkv.value, in->log_sum_exp.value, B, T, H, K, D);
    b->swiglu_forward(output(o, "swiglu_forward", N * F, NULL), in->gate_up.value, N, F);
    b->swiglu_backward(output(o, "swiglu_backward", N * 2 * F, NULL), in->gate_up.value,
                       in->gate_up.value, N, F);
    float *losses = (float *)output(o, "classifier: losses", N, NULL);
    dx = output(o, "classifier: dx", N * C, NULL);
    b->classifier(losses, dx, output(o, "classifier: dw", V * C, NULL), x, in->table.value,
                  in->tokens, N, C, V, 0.5f, false);
    struct adamw_settings settings = {0.9f, 0.95f, 1e-8f};
    float *p = (float *)output(o, "adamw: parameters", ELEMENTS, in->big.value);
    float *m = (float *)output(o, "adamw: m", ELEMENTS, in->m.value);
    float *v = (float *)output(o, "adamw: v", ELEMENTS, in->v.value);
    b->adamw(p, p, m, v, in->big.value + ELEMENTS, ELEMENTS, &settings, 3, 0.01f, 0.1f, 0.7f);
    double squares = b->sum_of_squares(in->big.value, 2 * ELEMENTS);
    memcpy(output(o, "sum_of_squares", 2, NULL), &squares, sizeof squares);
    const float *sender[] = {in->big.value, in->big.value + ELEMENTS};
    b->weighted_sum((float *)output(o, "weighted_sum", ELEMENTS, NULL), sender, in->weight.value, 2,
                    ELEMENTS, PACKET);
}

static void assert_same_bits(const struct outputs *a, const struct outputs *b, const char *where,
                             int threads) {
    assert_int_equal(a->count, b->count);
    for (int i = 0; i < a->count; i++)
        if (memcmp(a->memory[i], b->memory[i], a->bytes[i]) != 0)
            fail_msg("%s: other bits %s %d threads", a->name[i], where, threads);
}

static void outputs_free(struct outputs *o) {
    for (int i = 0; i < o->count; i++) backend->release(o->memory[i]);
    o->count = 0;
}

static void test_same_bits_on_any_number_of_threads(void **state) {
    (void)state;
    enum { MOST = 4 };
    int before = omp_get_max_threads();
    struct inputs in = inputs_new();
    struct outputs expected = {0}, got[MOST] = {{0}};
    omp_set_num_threads(1);
    run_everything(&in, &expected);
    for (int threads = 1; threads <= MOST; threads++) {
        omp_set_num_threads(threads);
        run_everything(&in, &got[0]);
        assert_same_bits(&expected, &got[0], "on", threads);
        outputs_free(&got[0]);
#pragma omp parallel num_threads(threads)
        run_everything(&in, &got[omp_get_thread_num()]);
        for (int i = 0; i < threads; i++) {
            assert_same_bits(&expected, &got[i], "inside a parallel region of", threads);
            outputs_free(&got[i]);
        }
    }
    outputs_free(&expected);
    inputs_free(&in);
    omp_set_num_threads(before);
}

/* The same where the program allows nested regions; and a caller's setting is left as it was. */
static void test_inside_a_parallel_region_that_may_nest(void **state) {
    (void)state;
    struct inputs in = inputs_new();
    struct outputs o[3] = {{0}};
    int levels = omp_get_max_active_levels(), threads[2];
    omp_set_max_active_levels(4);
    run_everything(&in, &o[2]);
#pragma omp parallel num_threads(2)
    {
        int i = omp_get_thread_num();
        omp_set_num_threads(3);
        run_everything(&in, &o[i]);
        threads[i] = omp_get_max_threads();
    }
    omp_set_max_active_levels(levels);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(threads[i], 3);
        assert_same_bits(&o[2], &o[i], "nested, on", 2);
    }
    for (int i = 0; i < 3; i++) outputs_free(&o[i]);
    inputs_free(&in);
}

/* Shards start anywhere: an element's result must not depend on its place in a vector. */
static void test_same_bits_at_any_alignment(void **state) {
    (void)state;
    enum { COUNT = 3001, SHIFTS = 17, ALL = COUNT + SHIFTS };
    struct array x = array_random(ALL, 1), y = array_random(ALL, 1), out = array_empty(ALL);
    struct array m = array_random(ALL, 1), v = array_random(ALL, 0);
    struct array p = array_random(ALL, 1), expected = array_empty(ALL);
    float weight[] = {0.3f, 0.7f};
    const float *sender[] = {x.value, y.value};
    backend->weighted_sum(expected.value, sender, weight, 2, ALL, ALL);
    for (int shift = 0; shift < SHIFTS; shift++) {
        const float *shifted[] = {x.value + shift, y.value + shift};
        backend->weighted_sum(out.value, shifted, weight, 2, COUNT, COUNT);
        assert_memory_equal(out.value, expected.value + shift, sizeof(float) * COUNT);
    }
    struct adamw_settings settings = {0.9f, 0.95f, 1e-8f};
    for (int shift = -1; shift < SHIFTS; shift++) { /* -1: all at once, to compare with */
        float *parameters = shift < 0 ? expected.value : p.value;
        int first = shift < 0 ? 0 : shift, count = shift < 0 ? ALL : COUNT;
        for (int i = 0; i < ALL; i++) {
            parameters[i] = (float)x.reference[i];
            m.value[i] = (float)m.reference[i];
            v.value[i] = (float)v.reference[i];
        }
        backend->adamw(parameters + first, parameters + first, m.value + first, v.value + first,
                       y.value + first, count, &settings, 2, 0.01f, 0.1f, 1);
        assert_memory_equal(parameters + first, expected.value + first, sizeof(float) * COUNT);
    }
    double squares = backend->sum_of_squares(x.value, COUNT);
    for (int shift = 1; shift < SHIFTS; shift++) {
        memmove(p.value + shift, x.value, sizeof(float) * COUNT);
        assert_true(backend->sum_of_squares(p.value + shift, COUNT) == squares);
    }
    array_free(&x), array_free(&y), array_free(&out), array_free(&m), array_free(&v);
    array_free(&p), array_free(&expected);
}

static int setup(void **state) {
    (void)state;
    random_state = 88172645463325252u; /* each test the same, alone or not */
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_memory, setup),
        cmocka_unit_test_setup(test_embedding, setup),
        cmocka_unit_test_setup(test_rmsnorm, setup),
        cmocka_unit_test_setup(test_matmul, setup),
        cmocka_unit_test_setup(test_rope, setup),
        cmocka_unit_test_setup(test_attention, setup),
        cmocka_unit_test_setup(test_attention_large_logits, setup),
        cmocka_unit_test_setup(test_swiglu, setup),
        cmocka_unit_test_setup(test_classifier, setup),
        cmocka_unit_test_setup(test_classifier_large_logits, setup),
        cmocka_unit_test_setup(test_adamw, setup),
        cmocka_unit_test_setup(test_sum_of_squares, setup),
        cmocka_unit_test_setup(test_weighted_sum, setup),
        cmocka_unit_test_setup(test_same_bits_on_any_number_of_threads, setup),
        cmocka_unit_test_setup(test_inside_a_parallel_region_that_may_nest, setup),
        cmocka_unit_test_setup(test_same_bits_at_any_alignment, setup),
    };
    int failures = 0;
    const char *isa;
    for (int i = 0; (backend = backend_cpu_instance(i, &isa)) != NULL; i++) {
        printf("# %s %s: %s\n", backend->name, isa, backend->details);
        fflush(stdout);
        failures += cmocka_run_group_tests_name(isa, tests, NULL, NULL);
    }
    return failures ? 1 : 0;
}
