/* gpu_values.h — compares numbers at a model's real shapes: bfloat16, with the kernels that a run
 * uses, beside float32 on the same GPU, whose kernels are plain and whose products have other
 * algorithms. Part of gpu_check.c. The operator tests compare with float64, and so only small shapes.
 *
 * Inputs do not repeat, and are numbers that bfloat16 has, so that both compute from the same. An
 * output is compared by rows: a missing tile of a long row would hardly show in the whole array. A
 * row's error is relative to its norm, or, if its own is less, to the norm of an average row of the
 * same token: with few keys, a gradient may be a small difference of large numbers.
 */
#ifndef GPU_VALUES_H
#define GPU_VALUES_H

#include "dev/bench/gpu/gpu_model.h"
#include "llmc/util/bf16.h"

struct compared { /* an operation on both backends */
    const struct backend *bf16, *float32;
    const char *shape; /* as text */
    int wrong;         /* outputs */
};

static float *values_new(size_t n) {
    float *values = (float *)malloc((n ? n : 1) * sizeof *values);
    if (!values) {
        log_out_of_memory("what is compared", (double)n * sizeof *values);
        exit(1);
    }
    return values;
}

/* n numbers of a normal distribution with this deviation, as bfloat16 has them. */
static float *values_random(size_t n, uint64_t seed, double deviation) {
    float *values = values_new(n);
#pragma omp parallel for
    for (size_t i = 0; i < n; i++)
        values[i] = from_bf16(to_bf16((float)(deviation * random_normal(seed, i))));
    return values;
}

static void *room(const struct backend *be, size_t bytes) {
    void *memory = be->allocate(bytes);
    if (memory) return memory;
    log_out_of_memory("what is compared", (double)bytes);
    exit(1);
}

/* A copy of n values in the backend's working type. */
static void *placed(const struct backend *be, const float *values, size_t n) {
    void *memory = room(be, n * be->element_bytes);
    float *exact = (float *)room(be, n * sizeof *values);
    be->upload(exact, values, n * sizeof *values);
    be->convert(memory, exact, n);
    be->release(exact);
    return memory;
}

/* The values of an array on the device: float32, or the backend's working type. */
static float *taken(const struct backend *be, const void *memory, size_t n, bool float32) {
    float *values = values_new(n);
    if (float32 || be->element_bytes == sizeof *values) {
        be->download(values, memory, n * sizeof *values);
        return values;
    }
    uint16_t *half = (uint16_t *)((char *)values + n * sizeof *half); /* the upper half */
    be->download(half, memory, n * sizeof *half);
    for (size_t i = 0; i < n; i++) values[i] = from_bf16(half[i]);
    return values;
}

static double norm_of(const float *a, const float *b, size_t n) { /* of a - b, squared */
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        const double d = (double)a[i] - (b ? b[i] : 0);
        sum += d * d;
    }
    return sum;
}

/* Compares n / width rows of an output, of which each token has `heads`. Frees both arrays. */
static void compare(struct compared *c, const char *name, float *got, float *wanted, size_t n,
                    size_t width, size_t heads, double bound) {
    const size_t rows = n / width;
    double token = 0, worst = 0;
    size_t place = 0;
    for (size_t r = 0; r < rows; r++) {
        const float *row = wanted + r * width;
        if (r % heads == 0) token = norm_of(row, NULL, heads * width) / (double)heads;
        const double norm = fmax(fmax(norm_of(row, NULL, width), token), 1e-30);
        const double error = sqrt(norm_of(got + r * width, row, width) / norm);
        if (!(error <= worst)) worst = error, place = r; /* NaN too */
        if (isnan(error)) break;
    }
    const bool good = worst <= bound;
    printf("{\"what\": \"values\", \"name\": \"%s\", \"shape\": \"%s\", \"worst_row\": %zu, "
           "\"error\": %.3g, \"bound\": %.3g, \"good\": %s}\n",
           name, c->shape, place, isnan(worst) ? -1 : worst, bound, good ? "true" : "false");
    fflush(stdout);
    if (!good)
        log_error("%s of %s: row %zu of %zu is off by %.2g of its norm: expected at most %.2g",
                  name, c->shape, place, rows, worst, bound);
    c->wrong += !good;
    free(got), free(wanted);
}

/* ---- attention ---- */

struct attended {
    float *out, *dqkv;
};

static struct attended attend(const struct backend *be, const float *qkv, const float *dout, int B,
                              int T, int H, int K, int D) {
    const size_t N = (size_t)B * T, row = (size_t)(H + 2 * K) * D, width = (size_t)H * D;
    void *in = placed(be, qkv, N * row), *from = placed(be, dout, N * width);
    void *out = room(be, N * width * be->element_bytes);
    void *dqkv = room(be, N * row * be->element_bytes);
    float *log_sum_exp = (float *)room(be, N * H * sizeof *log_sum_exp);
    be->attention_forward(out, log_sum_exp, in, B, T, H, K, D);
    be->attention_backward(dqkv, from, out, in, log_sum_exp, B, T, H, K, D);
    const struct attended result = {taken(be, out, N * width, false),
                                    taken(be, dqkv, N * row, false)};
    be->release(in), be->release(from), be->release(out), be->release(dqkv);
    be->release(log_sum_exp);
    return result;
}

static void values_attention(struct compared *c, int B, int T, int H, int K, int D) {
    const size_t N = (size_t)B * T, row = (size_t)(H + 2 * K) * D, width = (size_t)H * D;
    float *qkv = values_random(N * row, 1, 1), *dout = values_random(N * width, 2, 1);
    const struct attended got = attend(c->bf16, qkv, dout, B, T, H, K, D);
    const struct attended wanted = attend(c->float32, qkv, dout, B, T, H, K, D);
    compare(c, "attention", got.out, wanted.out, N * width, (size_t)D, (size_t)H, 0.02);
    compare(c, "attention, backward", got.dqkv, wanted.dqkv, N * row, (size_t)D,
            (size_t)(H + 2 * K), 0.03);
    free(qkv), free(dout);
}

/* ---- products ---- */

struct multiplied {
    float *y, *dx, *dw;
};

static struct multiplied multiply_on(const struct backend *be, const float *x, const float *w,
                                     const float *dy, int N, int I, int O) {
    const size_t in = (size_t)N * I, out = (size_t)N * O, weights = (size_t)O * I;
    void *x_ = placed(be, x, in), *w_ = placed(be, w, weights), *dy_ = placed(be, dy, out);
    void *y = room(be, out * be->element_bytes), *dx = room(be, in * be->element_bytes);
    float *dw = (float *)room(be, weights * sizeof *dw);
    be->matmul_forward(y, x_, w_, N, I, O);
    be->matmul_backward_input(dx, dy_, w_, N, I, O, false);
    be->matmul_backward_weight(dw, dy_, x_, N, I, O, false);
    const struct multiplied result = {taken(be, y, out, false), taken(be, dx, in, false),
                                      taken(be, dw, weights, true)};
    be->release(x_), be->release(w_), be->release(dy_);
    be->release(y), be->release(dx), be->release(dw);
    return result;
}

static void values_product(struct compared *c, const char *name, int N, int I, int O) {
    char text[3][96];
    const size_t in = (size_t)N * I, out = (size_t)N * O, weights = (size_t)O * I;
    float *x = values_random(in, 3, 1), *w = values_random(weights, 4, 0.02);
    float *dy = values_random(out, 5, 1);
    const struct multiplied got = multiply_on(c->bf16, x, w, dy, N, I, O);
    const struct multiplied wanted = multiply_on(c->float32, x, w, dy, N, I, O);
    snprintf(text[0], sizeof text[0], "%s", name);
    snprintf(text[1], sizeof text[1], "%s, gradient of the input", name);
    snprintf(text[2], sizeof text[2], "%s, gradient of the weights", name);
    compare(c, text[0], got.y, wanted.y, out, (size_t)O, 1, 0.01);
    compare(c, text[1], got.dx, wanted.dx, in, (size_t)I, 1, 0.01);
    compare(c, text[2], got.dw, wanted.dw, weights, (size_t)I, 1, 0.002); /* float32 */
    free(x), free(w), free(dy);
}

/* ---- the classifier ---- */

struct classified {
    float *losses, *dx, *dw;
};

static struct classified classify(const struct backend *be, const float *x, const float *w, int N,
                                  int C, int V) {
    const size_t in = (size_t)N * C, weights = (size_t)V * C;
    void *x_ = placed(be, x, in), *w_ = placed(be, w, weights);
    int32_t *targets = tokens_below(be, N, V);
    void *dx = room(be, in * be->element_bytes);
    float *losses = (float *)room(be, (size_t)N * sizeof *losses);
    float *dw = (float *)room(be, weights * sizeof *dw);
    be->classifier(losses, dx, dw, x_, w_, targets, N, C, V, 1, false);
    const struct classified result = {taken(be, losses, (size_t)N, true), taken(be, dx, in, false),
                                      taken(be, dw, weights, true)};
    be->release(x_), be->release(w_), be->release(targets);
    be->release(dx), be->release(losses), be->release(dw);
    return result;
}

static void values_classifier(struct compared *c, int N, int C, int V) {
    const size_t in = (size_t)N * C, weights = (size_t)V * C;
    float *x = values_random(in, 6, 1), *w = values_random(weights, 7, 0.02);
    const struct classified got = classify(c->bf16, x, w, N, C, V);
    const struct classified wanted = classify(c->float32, x, w, N, C, V);
    compare(c, "losses of the classifier", got.losses, wanted.losses, (size_t)N, 1, 1, 0.01);
    compare(c, "classifier, gradient of the input", got.dx, wanted.dx, in, (size_t)C, 1, 0.03);
    compare(c, "classifier, gradient of the weights", got.dw, wanted.dw, weights, (size_t)C, 1,
            0.03);
    free(x), free(w);
}

/* n: B T H K D (attention), or N C F H K D V (the products of a layer, and the classifier). */
static int values_at(const struct backend *bf16, const struct backend *float32, const int *n,
                     int count) {
    char shape[96] = "";
    struct compared c = {bf16, float32, shape, 0};
    for (int i = 0, at = 0; i < count; i++)
        at += snprintf(shape + at, sizeof shape - (size_t)at, "%s%d", i ? " x " : "", n[i]);
    if (count == 5) {
        values_attention(&c, n[0], n[1], n[2], n[3], n[4]);
        return c.wrong;
    }
    const int N = n[0], C = n[1], F = n[2], H = n[3], K = n[4], D = n[5], V = n[6];
    values_product(&c, "queries, keys and values", N, C, (H + 2 * K) * D);
    values_product(&c, "out of attention", N, H * D, C);
    values_product(&c, "gate and up", N, C, 2 * F);
    values_product(&c, "down", N, F, C);
    values_classifier(&c, N, C, V);
    return c.wrong;
}

#endif
