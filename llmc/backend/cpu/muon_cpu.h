/* muon_cpu.h — Muon (backend.h) on the CPU: products in float32, by the BLAS library (gemm.h).
 * Included by backend_cpu.c only. */
#ifndef LLMC_BACKEND_CPU_MUON_CPU_H
#define LLMC_BACKEND_CPU_MUON_CPU_H

#include "llmc/backend/cpu/gemm.h"
#include "llmc/backend/muon.h"

/* x (rows, cols) gets its singular values near 1. y (rows, cols), a and b (S, S) are working memory, S
 * being the smaller side. */
static void muon_orthogonalise(float *x, float *y, float *a, float *b, int rows, int cols) {
    const bool tall = rows > cols;
    const int S = tall ? cols : rows, L = tall ? rows : cols;
    const size_t n = (size_t)rows * cols, square = (size_t)S * S;
    const float shrink = (float)(1 / (sqrt(sum_of_squares(x, n)) + MUON_TINY));
    PARALLEL_FOR
    for (size_t i = 0; i < n; i++) x[i] *= shrink;
    for (int step = 0; step < MUON_STEPS; step++) {
        gemm_parallel(tall, !tall, S, S, L, x, cols, x, cols, 0, a, S);
        gemm_parallel(false, false, S, S, S, a, S, a, S, 0, b, S);
        PARALLEL_FOR
        for (size_t i = 0; i < square; i++) b[i] = MUON_B * a[i] + MUON_C * b[i];
        if (tall)
            gemm_parallel(false, false, rows, cols, S, x, cols, b, S, 0, y, cols);
        else
            gemm_parallel(false, false, rows, cols, S, b, S, x, cols, 0, y, cols);
        PARALLEL_FOR
        for (size_t i = 0; i < n; i++) x[i] = MUON_A * x[i] + y[i];
    }
}

static void muon(weight *param, float *master, float *m, float *ahead, const float *gradient,
                 int rows, int cols, const struct muon_settings *settings, float learning_rate,
                 float weight_decay, float gradient_scale) {
    const size_t n = (size_t)rows * cols, side = (size_t)min_int(rows, cols);
    const float momentum = settings->momentum, lead = settings->lead;
    const float rate = muon_rate(learning_rate, rows, cols);
    const float decay = (float)(1.0 - (double)learning_rate * weight_decay);
    float *x = (float *)cpu_scratch(SCRATCH_OPERATION, 2 * (n + side * side) * sizeof(float));
    float *y = x + n, *a = y + n, *b = a + side * side;
    PARALLEL_FOR
    for (size_t i = 0; i < n; i++) {
        const float g = gradient[i] * gradient_scale;
        m[i] = momentum * m[i] + (1.0f - momentum) * g;
        x[i] = momentum * m[i] + (1.0f - momentum) * g;
    }
    muon_orthogonalise(x, y, a, b, rows, cols);
    PARALLEL_FOR
    for (size_t i = 0; i < n; i++) {
        const float before = master[i];
        master[i] = before * decay - rate * x[i];
        if (ahead) ahead[i] = master[i] + lead * (master[i] - before);
    }
    if (param != (weight *)master) cpu_copy(param, master, n * sizeof(float));
}

#endif
