/* gpu_check.c — what a GPU does with a whole model: called by gpu_check.sh, which says why.
 *
 *   gpu_check parity                     loss and gradients on the GPU beside the CPU's
 *   gpu_check speed PRESET LAYERS BATCH SEQ STEPS
 *                                        training steps: tokens per second, memory, share of the
 *                                        peak; LAYERS 0: as many as the memory holds
 *
 * Lines that begin with | are rows of the table. Exits with 1 when something is wrong.
 */
#include "dev/bench/gpu/gpu_model.h"

/* ---- parity ------------------------------------------------------------------------------- */

/* The worst relative error of a tensor's gradient. */
static double worst_gradient(const struct param_layout *l, const float *a, const float *b) {
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
    if (!be) return log_error("%s", why);
    if (config_preset(preset, &c)) return -1;
    c.vocabulary = 1000;
    if (bench_open(&cpu, backend_cpu(DTYPE_FLOAT32), &c, B, T, RECOMPUTE_NONE, false)) return -1;
    if (bench_open(&gpu, be, &c, B, T, RECOMPUTE_NONE, false)) return -1;
    const double expected = bench_forward_backward(&cpu), got = bench_forward_backward(&gpu);
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

static int speed(const char *preset, int layers, int B, int T, int steps) {
    struct trained x;
    if (train_a_while(preset, layers, B, T, steps, &x)) return -1;
    const bool good =
        isfinite(x.last_loss) && x.last_loss < x.first_loss && x.used_bytes < x.estimated_bytes;
    printf("| %s%s, %d of %d layers, %d x %d, recompute %s | %.0f tokens/s, %.1f ms a step, %.1f "
           "TFLOP/s, %.2f GB used of %.2f estimated, loss %.3f to %.3f | %s |\n",
           preset, x.layers < x.of_layers ? "-shaped" : "", x.layers, x.of_layers, B, T,
           recompute_names[x.recompute], (double)B * T / x.seconds, 1e3 * x.seconds,
           x.flops / x.seconds / 1e12, x.used_bytes / 1e9, x.estimated_bytes / 1e9, x.first_loss,
           x.last_loss, good ? "ok" : "WRONG");
    return good ? 0 : -1;
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "parity")) return parity() ? 1 : 0;
    if (argc == 7 && !strcmp(argv[1], "speed"))
        return speed(argv[2], atoi(argv[3]), atoi(argv[4]), atoi(argv[5]), atoi(argv[6])) ? 1 : 0;
    fprintf(stderr, "usage: gpu_check parity | gpu_check speed PRESET LAYERS BATCH SEQ STEPS\n");
    return 2;
}
