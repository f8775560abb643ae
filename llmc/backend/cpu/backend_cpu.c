/* backend_cpu.c — the operations of backend.h on the CPU, in float32 or bfloat16.
 *
 * Compiled once per instruction set and working type, with -DISA=name and -DBACKEND_DTYPE=float32
 * or bf16; select.c picks one. Products are in matmul.h (float32: the BLAS library's)
 * or matmul_bf16.h; the rest are plain loops, which the compiler vectorises, shared among
 * OpenMP's threads. Attention and the classifier have a header for each working type.
 *
 * In bfloat16, activations and their gradients are stored in two bytes and every operation
 * calculates in float32. There is no second copy of the weights: products round the float32
 * parameters to bfloat16 when they pack them into the order that the instructions read.
 *
 * Every sum has an order that follows from the shape alone: threads share rows only if each row has
 * its own output, and sums over rows are first made in blocks of a fixed size.
 */
#include "llmc/backend/backend.h"
#include "llmc/backend/cpu/element.h"
#include "llmc/backend/cpu/scratch.h"
#include "llmc/backend/cpu/vector_math.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifdef ELEMENT_BF16
#include "llmc/backend/cpu/attention_bf16.h"
#include "llmc/backend/cpu/classifier_bf16.h"
#include "llmc/backend/cpu/matmul_bf16.h"
#else
#include "llmc/backend/cpu/attention.h"
#include "llmc/backend/cpu/classifier.h"
#include "llmc/backend/cpu/matmul.h"
#endif

/* ---- memory ------------------------------------------------------------------------------- */

/* calloc gets large blocks from the kernel, which zeroes pages when they are first touched: by the
 * thread that uses them, on its NUMA node. The address from calloc is stored right before ours. */
static void *cpu_allocate(size_t bytes) {
    const size_t huge = (size_t)2 << 20;
    size_t alignment = bytes >= 2 * huge ? huge : 64;
    if (bytes > SIZE_MAX - 2 * huge) return NULL;
    char *block = calloc(1, bytes + alignment + sizeof(void *));
    if (!block) return NULL;
    uintptr_t start = ((uintptr_t)block + sizeof(void *) + alignment - 1) / alignment * alignment;
    memcpy((char *)start - sizeof(void *), &block, sizeof block);
    if (alignment == huge) madvise((void *)start, bytes / huge * huge, MADV_HUGEPAGE);
    return (void *)start;
}

static void cpu_release(void *memory) {
    if (!memory) return;
    void *block;
    memcpy(&block, (char *)memory - sizeof block, sizeof block);
    free(block);
}

enum { MEMORY_BLOCK = 1 << 20 };

static void cpu_copy(void *to, const void *from, size_t bytes) {
    PARALLEL_FOR
    for (size_t i = 0; i < bytes; i += MEMORY_BLOCK)
        memcpy((char *)to + i, (const char *)from + i, min_size(bytes - i, MEMORY_BLOCK));
}

static void cpu_clear(void *memory, size_t bytes) {
    PARALLEL_FOR
    for (size_t i = 0; i < bytes; i += MEMORY_BLOCK)
        memset((char *)memory + i, 0, min_size(bytes - i, MEMORY_BLOCK));
}

static size_t cpu_memory_free(void) {
    return 0;
}

static void cpu_convert(weight *to, const float *from, size_t n) {
    cpu_copy(to, from, n * sizeof(float));
}

/* ---- embedding ---------------------------------------------------------------------------- */

static void embedding_forward(tensor *out, const int32_t *tokens, const weight *table, int N,
                              int C) {
    PARALLEL_FOR
    for (int n = 0; n < N; n++) {
        element *to = (element *)out + (size_t)n * C;
        const float *from = (const float *)table + (size_t)tokens[n] * C;
#pragma omp simd
        for (int i = 0; i < C; i++) to[i] = narrow(from[i]);
    }
}

/* A token may occur many times, so threads share columns, and each reads all rows in order. */
static void embedding_backward(float *dtable, const int32_t *tokens, const tensor *dout_, int N,
                               int C, int V, bool accumulate) {
    enum { COLUMNS = 64 };
    const element *dout = (const element *)dout_;
    if (!accumulate) cpu_clear(dtable, (size_t)V * C * sizeof(float));
    PARALLEL_FOR
    for (int first = 0; first < C; first += COLUMNS) {
        int columns = min_int(COLUMNS, C - first);
        for (int n = 0; n < N; n++) {
            float *to = dtable + (size_t)tokens[n] * C + first;
            const element *from = dout + (size_t)n * C + first;
#pragma omp simd
            for (int i = 0; i < columns; i++) to[i] += widen(from[i]);
        }
    }
}

/* ---- RMSNorm ------------------------------------------------------------------------------ */

/* Adds long rows in pieces, so that the rounding error of the sum does not grow. */
static float row_squares(const element *x, int C) {
    enum { PIECE = sizeof(element) == sizeof(float) ? 4096 : 1024 };
    float sum = 0;
    for (int first = 0; first < C; first += PIECE) {
        const int end = min_int(first + PIECE, C);
        float piece = 0;
#pragma omp simd reduction(+ : piece)
        for (int i = first; i < end; i++) piece += widen(x[i]) * widen(x[i]);
        sum += piece;
    }
    return sum;
}

static void rmsnorm_row(element *out, float *rstd, const element *x, const float *w, int C,
                        float eps) {
    const float sum = row_squares(x, C);
    float r = 1.0f / sqrtf(sum / (float)C + eps);
    *rstd = r;
#pragma omp simd
    for (int i = 0; i < C; i++) out[i] = narrow(widen(x[i]) * r * w[i]);
}

static void rmsnorm_forward(tensor *out, float *rstd, const tensor *x, const weight *w, int N,
                            int C, float eps) {
    PARALLEL_FOR
    for (int n = 0; n < N; n++)
        rmsnorm_row((element *)out + (size_t)n * C, rstd + n, (const element *)x + (size_t)n * C,
                    (const float *)w, C, eps);
}

static void residual_rmsnorm_forward(tensor *sum, tensor *out, float *rstd, const tensor *x,
                                     const tensor *y, const weight *w, int N, int C, float eps) {
    PARALLEL_FOR
    for (int n = 0; n < N; n++) {
        element *s = (element *)sum + (size_t)n * C;
        const element *a = (const element *)x + (size_t)n * C;
        const element *b = (const element *)y + (size_t)n * C;
#pragma omp simd
        for (int i = 0; i < C; i++) s[i] = narrow(widen(a[i]) + widen(b[i]));
        rmsnorm_row((element *)out + (size_t)n * C, rstd + n, s, (const float *)w, C, eps);
    }
}

/* With y = x rstd: dw = sum of dout y, dx = rstd (dout w - y mean(dout w y)). */
static void rmsnorm_backward_rows(element *dx, float *dw, const element *dout, const element *x,
                                  const float *w, const float *rstd, int rows, int C) {
    for (int i = 0; i < C; i++) dw[i] = 0;
    for (int n = 0; n < rows; n++) {
        element *dx_row = dx + (size_t)n * C;
        const element *d = dout + (size_t)n * C, *x_row = x + (size_t)n * C;
        float r = rstd[n], dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int i = 0; i < C; i++) {
            float dy = widen(d[i]) * widen(x_row[i]);
            dw[i] += dy * r;
            dot += dy * w[i];
        }
        float mean = dot * r * r * r / (float)C;
#pragma omp simd
        for (int i = 0; i < C; i++) {
            float change = r * widen(d[i]) * w[i] - mean * widen(x_row[i]);
            dx_row[i] = narrow(widen(dx_row[i]) + change);
        }
    }
}

static void rmsnorm_backward(tensor *dx, float *dw, const tensor *dout, const tensor *x,
                             const weight *w, const float *rstd, int N, int C, bool accumulate) {
    enum { BLOCKS = 64 };
    int rows = ceil_div(N, BLOCKS), blocks = ceil_div(N, rows);
    size_t stride = ((size_t)C + 15) / 16 * 16;
    float *part = (float *)cpu_scratch(SCRATCH_OPERATION, blocks * stride * sizeof(float));
    PARALLEL_FOR
    for (int b = 0; b < blocks; b++) {
        int first = b * rows;
        size_t at = (size_t)first * C;
        rmsnorm_backward_rows((element *)dx + at, part + b * stride, (const element *)dout + at,
                              (const element *)x + at, (const float *)w, rstd + first,
                              min_int(rows, N - first), C);
    }
    if (!accumulate) memset(dw, 0, (size_t)C * sizeof(float));
    for (int b = 0; b < blocks; b++) {
#pragma omp simd
        for (int i = 0; i < C; i++) dw[i] += part[b * stride + i];
    }
}

/* ---- rotary embedding --------------------------------------------------------------------- */

static void rope(tensor *qkv, const float *cosine, const float *sine, int B, int T, int H, int K,
                 int D, bool backward) {
    int half = D / 2;
    float sign = backward ? -1.0f : 1.0f;
    PARALLEL_FOR
    for (int n = 0; n < B * T; n++) {
        const float *c = cosine + (size_t)(n % T) * half, *s = sine + (size_t)(n % T) * half;
        for (int h = 0; h < H + K; h++) {
            element *low = (element *)qkv + ((size_t)n * (H + 2 * K) + h) * D, *high = low + half;
#pragma omp simd simdlen(8) /* no remainder for halves of 24 and 32 */
            for (int i = 0; i < half; i++) {
                float a = widen(low[i]), b = widen(high[i]), turn = sign * s[i];
                low[i] = narrow(a * c[i] - b * turn);
                high[i] = narrow(b * c[i] + a * turn);
            }
        }
    }
}

/* ---- SwiGLU ------------------------------------------------------------------------------- */

static void swiglu_forward(tensor *out, const tensor *gate_up, int N, int F) {
    PARALLEL_FOR
    for (int n = 0; n < N; n++) {
        element *o = (element *)out + (size_t)n * F;
        const element *gate = (const element *)gate_up + (size_t)n * 2 * F, *up = gate + F;
#pragma omp simd
        for (int i = 0; i < F; i++) {
            float g = widen(gate[i]);
            o[i] = narrow(g * sigmoid(g) * widen(up[i]));
        }
    }
}

static void swiglu_backward(tensor *dgate_up, const tensor *dout, const tensor *gate_up, int N,
                            int F) {
    PARALLEL_FOR
    for (int n = 0; n < N; n++) {
        const element *d = (const element *)dout + (size_t)n * F;
        const element *gate = (const element *)gate_up + (size_t)n * 2 * F, *up = gate + F;
        element *dgate = (element *)dgate_up + (size_t)n * 2 * F, *dup = dgate + F;
#pragma omp simd
        for (int i = 0; i < F; i++) {
            float g = widen(gate[i]), s = sigmoid(g), silu = g * s;
            float dsilu = widen(d[i]) * widen(up[i]);
            dup[i] = narrow(widen(d[i]) * silu);
            dgate[i] = narrow(dsilu * (s + silu * (1.0f - s)));
        }
    }
}

/* ---- optimiser ---------------------------------------------------------------------------- */

static void adamw_block(float *param, float *master, float *m, float *v, float *ahead,
                        const float *gradient, size_t n, const struct adamw_settings *settings,
                        float decay, float rate, float root, float gradient_scale) {
    float beta1 = settings->beta1, beta2 = settings->beta2, eps = settings->eps;
    const float lead = settings->lead;
    if (ahead) memcpy(ahead, master, n * sizeof *ahead);
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float g = gradient[i] * gradient_scale;
        m[i] = beta1 * m[i] + (1.0f - beta1) * g;
        v[i] = beta2 * v[i] + (1.0f - beta2) * g * g;
        master[i] = master[i] * decay - rate * m[i] / (sqrtf(v[i]) * root + eps);
    }
#pragma omp simd
    for (size_t i = 0; i < (ahead ? n : 0); i++)
        ahead[i] = master[i] + lead * (master[i] - ahead[i]);
    if (param != master) memcpy(param, master, n * sizeof(float));
}

/* Same formula as PyTorch: p -= lr wd p, then p -= lr m^ / (sqrt(v^) + eps) with the moments' bias
 * corrections m^ = m / (1 - beta1^step), v^ = v / (1 - beta2^step). */
static void adamw(weight *param, float *master, float *m, float *v, float *ahead,
                  const float *gradient, size_t n, const struct adamw_settings *settings, int step,
                  float learning_rate, float weight_decay, float gradient_scale) {
    enum { BLOCK = 16384 };
    float decay = (float)(1.0 - (double)learning_rate * weight_decay);
    float rate = (float)(learning_rate / (1.0 - pow(settings->beta1, step)));
    float root = (float)(1.0 / sqrt(1.0 - pow(settings->beta2, step)));
    PARALLEL_FOR
    for (size_t i = 0; i < n; i += BLOCK)
        adamw_block((float *)param + i, master + i, m + i, v + i, ahead ? ahead + i : NULL,
                    gradient + i, min_size(BLOCK, n - i), settings, decay, rate, root,
                    gradient_scale);
}

static double sum_of_squares(const float *x, size_t n) {
    enum { PARTS = 1024, LEAST = 16384 };
    double part[PARTS];
    size_t block = (n + PARTS - 1) / PARTS;
    if (block < LEAST) block = LEAST;
    int parts = (int)((n + block - 1) / block);
    PARALLEL_FOR
    for (int p = 0; p < parts; p++) {
        size_t first = p * block, count = min_size(block, n - first);
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (size_t i = 0; i < count; i++) sum += (double)x[first + i] * x[first + i];
        part[p] = sum;
    }
    double sum = 0;
    for (int p = 0; p < parts; p++) sum += part[p];
    return sum;
}

static void sums_of_squares(double *out, const float *const *x, const size_t *n, int count) {
    for (int i = 0; i < count; i++) out[i] = sum_of_squares(x[i], n[i]);
}

#include "llmc/backend/cpu/muon_cpu.h"

/* ---- masked average ----------------------------------------------------------------------- */

/* The sum is computed in other memory and stored at the end, since out may be one of the
 * senders. */
static void weighted_sum_block(float *out, const float *const *sender, const float *weight, int N,
                               size_t first, size_t n) {
    enum { BLOCK = 1024 };
    float sum[BLOCK];
    for (size_t at = first; at < first + n; at += BLOCK) {
        size_t count = min_size(BLOCK, first + n - at);
        memset(sum, 0, count * sizeof(float));
        for (int i = 0; i < N; i++) {
            float w = weight[i];
            if (w == 0) continue;
            const float *x = sender[i] + at;
#pragma omp simd
            for (size_t j = 0; j < count; j++) sum[j] += w * x[j];
        }
        memcpy(out + at, sum, count * sizeof(float));
    }
}

static void weighted_sum(float *out, const float *const *sender, const float *weight, int N,
                         size_t n, size_t packet) {
    PARALLEL_FOR
    for (size_t first = 0; first < n; first += packet)
        weighted_sum_block(out, sender, weight + first / packet * N, N, first,
                           min_size(packet, n - first));
}

/* ---- the backend -------------------------------------------------------------------------- */

#if defined(__AVX512F__)
#define ISA_TEXT "AVX-512"
#elif defined(__AVX2__)
#define ISA_TEXT "AVX2"
#elif defined(__SSE4_2__)
#define ISA_TEXT "SSE4.2"
#elif defined(__ARM_NEON)
#define ISA_TEXT "NEON"
#else
#define ISA_TEXT "generic"
#endif

#define NAME_(isa, dtype) backend_cpu_##dtype##_##isa
#define NAME(isa, dtype) NAME_(isa, dtype)
#define BACKEND NAME(ISA, BACKEND_DTYPE)

extern const struct backend BACKEND;
const struct backend BACKEND = {
    .name = "cpu",
    .details = ISA_TEXT ", " MATMUL_NAME,
    .device = "",
    .element_bytes = sizeof(element),
    .weight_bytes = sizeof(float),
    .on_device = false,
    .allocate = cpu_allocate,
    .release = cpu_release,
    .copy = cpu_copy,
    .clear = cpu_clear,
    .upload = cpu_copy,
    .download = cpu_copy,
    .memory_free = cpu_memory_free,
    .convert = cpu_convert,
    .embedding_forward = embedding_forward,
    .embedding_backward = embedding_backward,
    .rmsnorm_forward = rmsnorm_forward,
    .residual_rmsnorm_forward = residual_rmsnorm_forward,
    .rmsnorm_backward = rmsnorm_backward,
    .matmul_forward = matmul_forward,
    .matmul_backward_input = matmul_backward_input,
    .matmul_backward_weight = matmul_backward_weight,
    .rope = rope,
    .attention_forward = attention_forward,
    .attention_backward = attention_backward,
    .attention_continue = attention_continue,
    .swiglu_forward = swiglu_forward,
    .swiglu_backward = swiglu_backward,
    .classifier = classifier,
    .adamw = adamw,
    .muon = muon,
    .sum_of_squares = sum_of_squares,
    .sums_of_squares = sums_of_squares,
    .weighted_sum = weighted_sum,
};
