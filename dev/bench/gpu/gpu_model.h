/* gpu_model.h — runs a whole model on a backend, for programs that check or time a GPU
 * (gpu_check.c, gpu_bench.c). Includes train_llama2.cu without its main. */
#ifndef GPU_MODEL_H
#define GPU_MODEL_H

#define TESTING
#pragma GCC diagnostic ignored "-Wunused-function"
#include "train_llama2.cu"

#include "llmc/backend/cuda/backend_cuda.h"
#include "llmc/comm/attention_choice.h"
#include "llmc/memory/step_plan.h"
#include "llmc/util/random.h"

#include <time.h>

struct bench {
    const struct backend *be;
    struct param_layout layout;
    struct activations a;
    float *params, *grads, *m, *v;
    weight *weights;
    bool current; /* AdamW wrote the weights: they need no conversion */
    int B, T;
};

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int bench_open(struct bench *x, const struct backend *be, const struct llama_config *c,
                      int B, int T, enum recompute recompute, bool optimizer) {
    memset(x, 0, sizeof *x);
    x->be = be;
    x->B = B;
    x->T = T;
    if (param_layout_build(c, &x->layout)) return -1;
    if (activations_allocate(&x->a, c, be, B, T, true, recompute)) return -1;
    const size_t P = x->layout.count;
    x->params = (float *)be->allocate(P * sizeof(float));
    x->grads = (float *)be->allocate(P * sizeof(float));
    if (optimizer) {
        x->m = (float *)be->allocate(P * sizeof(float));
        x->v = (float *)be->allocate(P * sizeof(float));
    }
    x->weights = be->weight_bytes < 4 ? be->allocate(P * be->weight_bytes) : x->params;
    if (!x->params || !x->grads || !x->weights || (optimizer && (!x->m || !x->v)))
        return log_out_of_memory("parameters, gradients and optimizer state", 16.0 * (double)P);
    /* Span by span, so that a large model needs little host memory. */
    size_t largest = 0;
    for (int s = 0; s < x->layout.spans; s++)
        if (x->layout.span[s].count > largest) largest = x->layout.span[s].count;
    float *host = (float *)malloc(largest * sizeof *host);
    if (!host) return log_out_of_memory("initial values", 4.0 * (double)largest);
    for (int s = 0; s < x->layout.spans; s++) {
        const struct span span = x->layout.span[s];
#pragma omp parallel for
        for (size_t e = 0; e < span.count; e++)
            host[e] = span.decay ? (float)(0.02 * random_normal(7, span.offset + e)) : 1;
        be->upload(x->params + span.offset, host, span.count * sizeof *host);
    }
    free(host);
    for (int n = 0; n < B * T; n++) {
        x->a.host_tokens[n] = (int32_t)(random_bits(1, (uint64_t)n) % (uint64_t)c->vocabulary);
        x->a.host_targets[n] = (int32_t)(random_bits(2, (uint64_t)n) % (uint64_t)c->vocabulary);
    }
    activations_send(&x->a, be, B * T);
    return 0;
}

static void bench_close(struct bench *x) {
    activations_release(&x->a, x->be);
    if ((void *)x->weights != (void *)x->params) x->be->release(x->weights);
    x->be->release(x->params);
    x->be->release(x->grads);
    x->be->release(x->m);
    x->be->release(x->v);
    param_layout_release(&x->layout);
}

static double bench_forward_backward(struct bench *x) {
    const int N = x->B * x->T;
    if ((void *)x->weights != (void *)x->params && !x->current)
        x->be->convert(x->weights, x->params, x->layout.count);
    const struct gradient_place grads = {x->grads, 0, 0};
    model_forward_backward(x->be, &x->layout, x->weights, &grads, &x->a, x->B, x->T,
                           1.0f / (float)N, false, NULL);
    return mean_loss(activations_losses(&x->a, x->be, N), N);
}

/* ---- arrays --------------------------------------------------------------------------------- */

static double spread(uint64_t i) {
    return (double)(random_bits(5, i) >> 11) / (double)(1ull << 53) * 2 - 1;
}

/* Allocates n random elements of the working type, or float32, in -size ... size. They repeat after
 * 2^16. */
static void *filled(const struct backend *be, size_t n, double size, bool float32) {
    enum { PERIOD = 1 << 16 };
    const size_t element = float32 ? sizeof(float) : be->element_bytes;
    char *memory = (char *)be->allocate(n * element);
    float *host = (float *)malloc(PERIOD * sizeof *host);
    if (!memory || !host) {
        log_out_of_memory("what is measured", (double)(n * element));
        exit(1);
    }
    for (size_t i = 0; i < PERIOD; i++) host[i] = (float)(size * spread(i));
    float *source = (float *)be->allocate(PERIOD * sizeof(float));
    be->upload(source, host, PERIOD * sizeof(float));
    for (size_t at = 0; at < n; at += PERIOD) {
        const size_t count = n - at < PERIOD ? n - at : PERIOD;
        if (float32)
            be->copy(memory + at * element, source, count * element);
        else
            be->convert(memory + at * element, source, count);
    }
    be->release(source);
    free(host);
    return memory;
}

static int32_t *tokens_below(const struct backend *be, int n, int V) {
    int32_t *host = (int32_t *)malloc((size_t)n * sizeof *host);
    int32_t *memory = (int32_t *)be->allocate((size_t)n * sizeof *memory);
    if (!host || !memory) exit(1);
    for (int i = 0; i < n; i++) host[i] = (int32_t)(random_bits(3, (uint64_t)i) % (uint64_t)V);
    be->upload(memory, host, (size_t)n * sizeof *host);
    free(host);
    return memory;
}

/* ---- arithmetic --------------------------------------------------------------------------- */

/* Multiplications and additions of causal attention in a step. Forward has 2 products of T x T x D
 * per head, of which the mask leaves half, 2 operations each. Backward counts twice as much. */
static double attention_flops(const struct llama_config *c, int B, int T) {
    return 6.0 * c->layers * c->heads * c->head_size * (double)B * T * T;
}

/* The same of a whole step: 6 per parameter and token in matrix products, and attention. The table
 * of the embedding is looked up, not multiplied, so it does not count; if it is tied, the
 * classifier multiplies it. What is computed again does not count. */
static double step_flops(const struct llama_config *c, int B, int T) {
    const double P =
        (double)config_parameters(c) - (c->tied ? 0 : (double)c->vocabulary * c->width);
    return 6 * P * B * T + attention_flops(c, B, T);
}

static struct memory_plan_settings settings_of(int B, int T) {
    struct memory_plan_settings s;
    memset(&s, 0, sizeof s);
    s.run.workers = s.run.ranks = 1;
    s.batch = B;
    s.seq = T;
    s.run.micro_batches = 1;
    s.run.device = true;
    s.run.dtype = DTYPE_BF16;
    s.wire.packet_bytes = 4096;
    s.wire.link_gbps = 100;
    return s;
}

/* A training step: forward, backward, clipping, AdamW. Returns the loss. */
static double training_step_of(struct bench *x, int step) {
    const struct adamw_settings adamw = {0.9f, 0.95f, 1e-8f, 0};
    const double loss = bench_forward_backward(x);
    const double norm = sqrt(x->be->sum_of_squares(x->grads, x->layout.count));
    x->be->adamw(x->weights, x->params, x->m, x->v, NULL, x->grads, x->layout.count, &adamw,
                 step + 1, 1e-4f, 0.1f, (float)(norm > 1 ? 1 / norm : 1));
    x->current = true;
    return loss;
}

struct trained { /* results of some training steps */
    int layers, of_layers;
    enum recompute recompute;
    double seconds;         /* per step */
    double expected;        /* the same by --dry-run; 0: it does not know this GPU */
    double flops_6n, flops; /* per step: without and with attention */
    double used_bytes, estimated_bytes, parameters;
    double first_loss, last_loss;
};

/* Times `steps` steps of a preset with `layers` layers (0: as many as the memory holds) in bf16,
 * after one that is not timed. Returns 0, or -1 after reporting. */
static int train_a_while(const char *preset, int layers, int B, int T, int steps, bool cudnn,
                         struct trained *out) {
    const struct options o = {.attention = cudnn ? OPTION_ATTENTION_CUDNN : OPTION_ATTENTION_OWN};
    const struct lossynet_world alone = {.ranks = 1, .local_ranks = 1};
    struct llama_config c;
    struct bench x;
    char why[256];
    memset(out, 0, sizeof *out);
    const struct backend *be = backend_cuda(DTYPE_BF16, 0, why, sizeof why);
    if (!be) return log_error("%s", why);
    if (config_preset(preset, &c)) return -1;
    c.vocabulary = strcmp(preset, "260K") ? 32000 : 500;
    struct memory_plan_settings s = settings_of(B, T);
    s.cudnn = cudnn;
    const double available = (double)be->memory_free();
    out->of_layers = c.layers;
    if (layers) c.layers = layers;
    while (!memory_plan_choose_recompute(&c, &s, available, &out->estimated_bytes) && !layers &&
           c.layers > 1)
        c.layers--;
    if (attention_choose(&o, &c, B, T, true, be, &alone, false)) return -1;
    if (bench_open(&x, be, &c, B, T, s.recompute, true)) return -1;
    double start = 0;
    for (int step = 0; step <= steps; step++) {
        out->last_loss = training_step_of(&x, step);
        if (step == 0) out->first_loss = out->last_loss;
        if (step == 0 || step == steps) be->sum_of_squares(x.grads, 1); /* waits */
        if (step == 0) start = seconds();
    }
    out->seconds = (seconds() - start) / steps;
    out->used_bytes = available - (double)be->memory_free();
    out->layers = c.layers;
    out->expected = step_plan_seconds(&c, &s, be->details);
    out->recompute = s.recompute;
    out->parameters = (double)x.layout.count;
    out->flops = step_flops(&c, B, T);
    out->flops_6n = out->flops - attention_flops(&c, B, T);
    bench_close(&x);
    return 0;
}

#endif
