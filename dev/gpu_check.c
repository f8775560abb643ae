/* gpu_check.c — what a GPU does with a whole model: called by gpu_check.sh, which says why.
 *
 *   gpu_check parity                     loss and gradients on the GPU beside the CPU's
 *   gpu_check speed PRESET LAYERS BATCH SEQ STEPS
 *                                        training steps: tokens per second, memory, share of the
 *                                        peak; LAYERS 0: as many as the memory holds
 *
 * Lines that begin with | are rows of the table. Exits with 1 when something is wrong.
 */
#define TESTING /* train_llama2.cu without main */
#pragma GCC diagnostic ignored "-Wunused-function"
#include "train_llama2.cu"

#include "llmc/random.h"

#include <time.h>

struct bench {
    const struct backend *be;
    struct layout layout;
    struct activations a;
    float *params, *grads, *m, *v;
    tensor *weights;
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
    if (layout_build(c, &x->layout)) return -1;
    if (activations_allocate(&x->a, c, be, B, T, true, recompute)) return -1;
    const size_t P = x->layout.count;
    x->params = (float *)be->allocate(P * sizeof(float));
    x->grads = (float *)be->allocate(P * sizeof(float));
    if (optimizer) {
        x->m = (float *)be->allocate(P * sizeof(float));
        x->v = (float *)be->allocate(P * sizeof(float));
    }
    x->weights = be->element_bytes < 4 ? be->allocate(P * be->element_bytes) : x->params;
    if (!x->params || !x->grads || !x->weights || (optimizer && (!x->m || !x->v)))
        return report_out_of_memory("parameters, gradients and optimizer state", 16.0 * (double)P);
    /* Span by span, so that a large model needs little memory of the host's. */
    size_t largest = 0;
    for (int s = 0; s < x->layout.spans; s++)
        if (x->layout.span[s].count > largest) largest = x->layout.span[s].count;
    float *host = (float *)malloc(largest * sizeof *host);
    if (!host) return report_out_of_memory("initial values", 4.0 * (double)largest);
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
    layout_release(&x->layout);
}

static double forward_backward(struct bench *x) {
    const int N = x->B * x->T;
    if ((void *)x->weights != (void *)x->params)
        x->be->convert(x->weights, x->params, x->layout.count);
    model_forward_backward(x->be, &x->layout, x->weights, x->grads, &x->a, x->B, x->T,
                           1.0f / (float)N, false, NULL);
    return mean_loss(activations_losses(&x->a, x->be, N), N);
}

/* ---- parity ------------------------------------------------------------------------------- */

/* The worst relative error of a tensor's gradient. */
static double worst_gradient(const struct layout *l, const float *a, const float *b) {
    double worst = 0;
    for (int s = 0; s < l->spans; s++) {
        double difference = 0, norm = 0;
        for (size_t e = l->span[s].offset; e < l->span[s].offset + l->span[s].count; e++) {
            difference += ((double)a[e] - b[e]) * ((double)a[e] - b[e]);
            norm += (double)b[e] * b[e];
        }
        double error = sqrt(difference / norm);
        if (!(error <= worst)) worst = error; /* NaN too */
    }
    return worst;
}

static int parity_of(const char *preset, int B, int T, enum dtype dtype, double loss_bound,
                     double gradient_bound) {
    struct llama_config c;
    struct bench cpu, gpu;
    char why[256];
    const struct backend *be = backend_cuda(dtype, 0, why, sizeof why);
    if (!be) return report("%s", why);
    if (config_preset(preset, &c)) return -1;
    c.vocabulary = 1000;
    if (bench_open(&cpu, backend_cpu(), &c, B, T, RECOMPUTE_NONE, false)) return -1;
    if (bench_open(&gpu, be, &c, B, T, RECOMPUTE_NONE, false)) return -1;
    const double expected = forward_backward(&cpu), got = forward_backward(&gpu);
    float *host = host_vector(be, gpu.grads, gpu.layout.count, true);
    const double loss = fabs(got - expected) / expected;
    const double gradient = worst_gradient(&cpu.layout, host, cpu.grads);
    const bool good = loss <= loss_bound && gradient <= gradient_bound;
    printf("| parity %-5s %-8s | loss off by %.1e of %.0e, worst gradient %.1e of %.0e | %s |\n",
           preset, dtype == DTYPE_BF16 ? "bf16" : "float32", loss, loss_bound, gradient,
           gradient_bound, good ? "ok" : "WRONG");
    fflush(stdout);
    host_vector_end(be, host);
    bench_close(&cpu);
    bench_close(&gpu);
    return good ? 0 : -1;
}

static int parity(void) {
    int failed = 0;
    failed |= parity_of("260K", 3, 65, DTYPE_FLOAT32, 1e-5, 1e-5);
    failed |= parity_of("15M", 2, 200, DTYPE_FLOAT32, 1e-5, 1e-5);
    failed |= parity_of("260K", 3, 65, DTYPE_BF16, 3e-3, 0.06);
    failed |= parity_of("15M", 2, 200, DTYPE_BF16, 3e-3, 0.06);
    return failed;
}

/* ---- speed -------------------------------------------------------------------------------- */

/* Multiplications and additions of a step: 6 per parameter and token in matrix products (the table of
 * the embedding is looked up, not multiplied), and those of causal attention, forward and backward. */
static double step_flops(const struct llama_config *c, int B, int T) {
    const double P =
        (double)config_parameters(c) - (c->tied ? 0 : (double)c->vocabulary * c->width);
    return 6 * P * B * T + 6.0 * c->layers * c->heads * c->head_size * (double)B * T * T;
}

static struct estimate_settings settings_of(int B, int T) {
    struct estimate_settings s;
    memset(&s, 0, sizeof s);
    s.workers = s.local = 1;
    s.batch = B;
    s.seq = T;
    s.micro_batches = 1;
    s.sharded_optimizer = s.device = true;
    s.dtype = DTYPE_BF16;
    s.packet_bytes = 4096;
    s.link_gbps = 100;
    return s;
}

static int speed(const char *preset, int layers, int B, int T, int steps) {
    struct llama_config c;
    struct bench x;
    char why[256];
    double total = 0;
    const struct backend *be = backend_cuda(DTYPE_BF16, 0, why, sizeof why);
    if (!be) return report("%s", why);
    if (config_preset(preset, &c)) return -1;
    c.vocabulary = 32000;
    struct estimate_settings s = settings_of(B, T);
    const int whole = c.layers;
    const double available = (double)be->memory_free();
    if (layers) c.layers = layers;
    while (!estimate_choose_recompute(&c, &s, available, &total) && !layers && c.layers > 1)
        c.layers--;
    if (bench_open(&x, be, &c, B, T, s.recompute, true)) return -1;
    const struct adamw_settings adamw = {0.9f, 0.95f, 1e-8f};
    double first = 0, last = 0, start = 0;
    for (int step = 0; step <= steps; step++) {
        last = forward_backward(&x);
        if (step == 0) first = last;
        const double norm = sqrt(be->sum_of_squares(x.grads, x.layout.count));
        be->adamw(x.params, x.params, x.m, x.v, x.grads, x.layout.count, &adamw, step + 1, 1e-4f,
                  0.1f, (float)(norm > 1 ? 1 / norm : 1));
        be->sum_of_squares(x.grads, 1); /* waits */
        if (step == 0) start = seconds();
    }
    const double each = (seconds() - start) / steps;
    const double used = available - (double)be->memory_free();
    const bool good = isfinite(last) && last < first && used < total;
    printf("| %s%s, %d of %d layers, %d x %d, recompute %s | %.0f tokens/s, %.1f ms a step, %.1f "
           "TFLOP/s, %.2f GB used of %.2f estimated, loss %.3f to %.3f | %s |\n",
           preset, c.layers < whole ? "-shaped" : "", c.layers, whole, B, T,
           recompute_names[s.recompute], (double)B * T / each, 1e3 * each,
           step_flops(&c, B, T) / each / 1e12, used / 1e9, total / 1e9, first, last,
           good ? "ok" : "WRONG");
    bench_close(&x);
    return good ? 0 : -1;
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "parity")) return parity() ? 1 : 0;
    if (argc == 7 && !strcmp(argv[1], "speed"))
        return speed(argv[2], atoi(argv[3]), atoi(argv[4]), atoi(argv[5]), atoi(argv[6])) ? 1 : 0;
    fprintf(stderr, "usage: gpu_check parity | gpu_check speed PRESET LAYERS BATCH SEQ STEPS\n");
    return 2;
}
