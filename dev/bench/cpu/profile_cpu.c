/* profile_cpu.c — where a training step on the CPU spends its time: a table with a row per
 * operation.
 *
 *     build/dev/bench/cpu/profile_cpu [MODEL [DTYPE [BATCH [SEQ [STEPS [CLOCK]]]]]]
 *
 * MODEL: a preset, 15M. DTYPE: float32 or bf16. BATCH and SEQ: sequences and tokens, 8 and 256.
 * STEPS: 5, after one that warms up. CLOCK: `wall`, or `cpu` for the CPU time of all threads, which
 * other programs on the machine disturb less; with one thread they are the same on an idle machine.
 * OMP_NUM_THREADS and TRAIN_LLAMA2_ISA are heeded.
 *
 * Columns: milliseconds per step, share of the step, and 10^9 floating-point operations a second
 * where the operation is one of multiplications: 2 M N K per product, and attention's without what
 * the mask leaves out. The rest of the step is what no operation takes: loops of the trainer. */
#include "dev/bench/gpu/gpu_model.h"

enum operation {
    EMBEDDING_FORWARD,
    RMSNORM_FORWARD,
    MATMUL_FORWARD,
    ROPE,
    ATTENTION_FORWARD,
    SWIGLU_FORWARD,
    CLASSIFIER,
    CLEAR,
    RMSNORM_BACKWARD,
    SWIGLU_BACKWARD,
    ATTENTION_BACKWARD,
    MATMUL_BACKWARD_WEIGHT,
    MATMUL_BACKWARD_INPUT,
    EMBEDDING_BACKWARD,
    SUM_OF_SQUARES,
    ADAMW,
    OPERATIONS
};

static const char *const names[OPERATIONS] = {
    "embedding_forward",     "rmsnorm_forward",    "matmul_forward",     "rope",
    "attention_forward",     "swiglu_forward",     "classifier",         "clear",
    "rmsnorm_backward",      "swiglu_backward",    "attention_backward", "matmul_backward_weight",
    "matmul_backward_input", "embedding_backward", "sum_of_squares",     "adamw"};

static struct {
    double seconds, flops;
    int calls;
} profile[OPERATIONS];

static const struct backend *real;
static clockid_t clock_id = CLOCK_MONOTONIC;

static double clock_seconds(void) {
    struct timespec now;
    clock_gettime(clock_id, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void note(enum operation operation, double start, double flops) {
    profile[operation].seconds += clock_seconds() - start;
    profile[operation].flops += flops;
    profile[operation].calls++;
}

#define TIMED(operation, flops, call)                                                              \
    do {                                                                                           \
        const double start = clock_seconds();                                                      \
        real->call;                                                                                \
        note(operation, start, flops);                                                             \
    } while (0)

/* ---- the backend's operations, timed ------------------------------------------------------- */

static void timed_clear(void *memory, size_t bytes) {
    TIMED(CLEAR, 0, clear(memory, bytes));
}

static void timed_embedding_forward(tensor *out, const int32_t *tokens, const weight *table, int N,
                                    int C) {
    TIMED(EMBEDDING_FORWARD, 0, embedding_forward(out, tokens, table, N, C));
}

static void timed_embedding_backward(float *dtable, const int32_t *tokens, const tensor *dout,
                                     int N, int C, int V, bool accumulate) {
    TIMED(EMBEDDING_BACKWARD, 0, embedding_backward(dtable, tokens, dout, N, C, V, accumulate));
}

static void timed_rmsnorm_forward(tensor *out, float *rstd, const tensor *x, const weight *w, int N,
                                  int C, float eps) {
    TIMED(RMSNORM_FORWARD, 0, rmsnorm_forward(out, rstd, x, w, N, C, eps));
}

static void timed_residual_rmsnorm_forward(tensor *sum, tensor *out, float *rstd, const tensor *x,
                                           const tensor *y, const weight *w, int N, int C,
                                           float eps) {
    TIMED(RMSNORM_FORWARD, 0, residual_rmsnorm_forward(sum, out, rstd, x, y, w, N, C, eps));
}

static void timed_rmsnorm_backward(tensor *dx, float *dw, const tensor *dout, const tensor *x,
                                   const weight *w, const float *rstd, int N, int C,
                                   bool accumulate) {
    TIMED(RMSNORM_BACKWARD, 0, rmsnorm_backward(dx, dw, dout, x, w, rstd, N, C, accumulate));
}

static void timed_matmul_forward(tensor *out, const tensor *x, const weight *w, int N, int I,
                                 int O) {
    TIMED(MATMUL_FORWARD, 2.0 * N * I * O, matmul_forward(out, x, w, N, I, O));
}

static void timed_matmul_backward_input(tensor *dx, const tensor *dout, const weight *w, int N,
                                        int I, int O, bool accumulate) {
    TIMED(MATMUL_BACKWARD_INPUT, 2.0 * N * I * O,
          matmul_backward_input(dx, dout, w, N, I, O, accumulate));
}

static void timed_matmul_backward_weight(float *dw, const tensor *dout, const tensor *x, int N,
                                         int I, int O, bool accumulate) {
    TIMED(MATMUL_BACKWARD_WEIGHT, 2.0 * N * I * O,
          matmul_backward_weight(dw, dout, x, N, I, O, accumulate));
}

static void timed_rope(tensor *qkv, const float *cosine, const float *sine, int B, int T, int H,
                       int K, int D, bool backward) {
    TIMED(ROPE, 0, rope(qkv, cosine, sine, B, T, H, K, D, backward));
}

static void timed_attention_forward(tensor *out, float *log_sum_exp, const tensor *qkv, int B,
                                    int T, int H, int K, int D) {
    TIMED(ATTENTION_FORWARD, 2.0 * B * T * T * H * D,
          attention_forward(out, log_sum_exp, qkv, B, T, H, K, D));
}

static void timed_attention_backward(tensor *dqkv, const tensor *dout, const tensor *out,
                                     const tensor *qkv, const float *log_sum_exp, int B, int T,
                                     int H, int K, int D) {
    TIMED(ATTENTION_BACKWARD, 4.0 * B * T * T * H * D,
          attention_backward(dqkv, dout, out, qkv, log_sum_exp, B, T, H, K, D));
}

static void timed_swiglu_forward(tensor *out, const tensor *gate_up, int N, int F) {
    TIMED(SWIGLU_FORWARD, 0, swiglu_forward(out, gate_up, N, F));
}

static void timed_swiglu_backward(tensor *dgate_up, const tensor *dout, const tensor *gate_up,
                                  int N, int F) {
    TIMED(SWIGLU_BACKWARD, 0, swiglu_backward(dgate_up, dout, gate_up, N, F));
}

static void timed_classifier(float *losses, tensor *dx, float *dw, const tensor *x, const weight *w,
                             const int32_t *targets, int N, int C, int V, float scale,
                             bool accumulate) {
    TIMED(CLASSIFIER, 6.0 * N * C * V,
          classifier(losses, dx, dw, x, w, targets, N, C, V, scale, accumulate));
}

static double timed_sum_of_squares(const float *x, size_t n) {
    const double start = clock_seconds(), sum = real->sum_of_squares(x, n);
    note(SUM_OF_SQUARES, start, 0);
    return sum;
}

static void timed_sums_of_squares(double *out, const float *const *x, const size_t *n, int count) {
    const double start = clock_seconds();
    real->sums_of_squares(out, x, n, count);
    note(SUM_OF_SQUARES, start, 0);
}

static void timed_adamw(weight *param, float *master, float *m, float *v, float *ahead,
                        const float *gradient, size_t n, const struct adamw_settings *settings,
                        int step, float learning_rate, float weight_decay, float gradient_scale) {
    TIMED(ADAMW, 0,
          adamw(param, master, m, v, ahead, gradient, n, settings, step, learning_rate,
                weight_decay, gradient_scale));
}

static struct backend timed(const struct backend *be) {
    struct backend b = *be;
    real = be;
    b.clear = timed_clear;
    b.embedding_forward = timed_embedding_forward;
    b.embedding_backward = timed_embedding_backward;
    b.rmsnorm_forward = timed_rmsnorm_forward;
    b.residual_rmsnorm_forward = timed_residual_rmsnorm_forward;
    b.rmsnorm_backward = timed_rmsnorm_backward;
    b.matmul_forward = timed_matmul_forward;
    b.matmul_backward_input = timed_matmul_backward_input;
    b.matmul_backward_weight = timed_matmul_backward_weight;
    b.rope = timed_rope;
    b.attention_forward = timed_attention_forward;
    b.attention_backward = timed_attention_backward;
    b.swiglu_forward = timed_swiglu_forward;
    b.swiglu_backward = timed_swiglu_backward;
    b.classifier = timed_classifier;
    b.adamw = timed_adamw;
    b.sum_of_squares = timed_sum_of_squares;
    b.sums_of_squares = timed_sums_of_squares;
    return b;
}

/* ---- the table ----------------------------------------------------------------------------- */

static void print_row(const char *name, int calls, double seconds, double step, double flops) {
    printf("  %-24s %6d %9.2f %6.1f%%", name, calls, 1e3 * seconds, 100 * seconds / step);
    if (flops > 0) printf(" %9.0f", 1e-9 * flops / seconds);
    printf("\n");
}

static void print_profile(int steps, double step) {
    double sum = 0;
    printf("  %-24s %6s %9s %7s %9s\n", "", "calls", "ms/step", "share", "GFLOP/s");
    for (int i = 0; i < OPERATIONS; i++) {
        const double seconds = profile[i].seconds / steps;
        sum += seconds;
        if (profile[i].calls)
            print_row(names[i], profile[i].calls / steps, seconds, step, profile[i].flops / steps);
    }
    print_row("rest", 0, step - sum, step, 0);
}

int main(int argc, char **argv) {
    const char *model = argc > 1 ? argv[1] : "15M", *dtype = argc > 2 ? argv[2] : "float32";
    const int B = argc > 3 ? atoi(argv[3]) : 8, T = argc > 4 ? atoi(argv[4]) : 256;
    const int steps = argc > 5 ? atoi(argv[5]) : 5;
    struct llama_config c;
    struct bench x;
    if (argc > 6 && strcmp(argv[6], "cpu") == 0) clock_id = CLOCK_PROCESS_CPUTIME_ID;
    if (B < 1 || T < 1 || steps < 1 || config_preset(model, &c)) {
        fprintf(stderr,
                "usage: profile_cpu [MODEL [float32|bf16 [BATCH [SEQ [STEPS [wall|cpu]]]]]]\n");
        return 2;
    }
    if (!c.vocabulary) c.vocabulary = 32000;
    const struct backend *cpu =
        backend_cpu(strcmp(dtype, "bf16") == 0 ? DTYPE_BF16 : DTYPE_FLOAT32);
    if (!cpu) return 2;
    const struct backend be = timed(cpu);
    if (bench_open(&x, &be, &c, B, T, RECOMPUTE_NONE, true)) return 1;
    training_step_of(&x, 0);
    memset(profile, 0, sizeof profile);
    const double start = clock_seconds();
    for (int i = 1; i <= steps; i++) training_step_of(&x, i);
    const double step = (clock_seconds() - start) / steps;
    printf("%s, %d x %d tokens, %d threads, %s: %.1f ms of %s time, %.0f GFLOP/s\n", model, B, T,
           omp_get_max_threads(), be.details, 1e3 * step,
           clock_id == CLOCK_MONOTONIC ? "wall" : "CPU", 1e-9 * step_flops(&c, B, T) / step);
    print_profile(steps, step);
    bench_close(&x);
    return 0;
}
