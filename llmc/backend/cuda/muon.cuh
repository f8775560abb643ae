/* muon.cuh — Muon (Jordan 2024) on float32 master weights; llmc/backend/muon.h has its numbers. The
 * matrix that becomes orthogonal has the working type, and so have the operands of all products; what
 * products are added to is float32.
 */
#ifndef LLMC_BACKEND_CUDA_MUON_H
#define LLMC_BACKEND_CUDA_MUON_H

#include <math.h>

#include "llmc/backend/backend.h"
#include "llmc/backend/cuda/backend_cuda.h"
#include "llmc/backend/cuda/common.cuh"
#include "llmc/backend/cuda/norm.cuh"
#include "llmc/backend/muon.h"

/* ---- kernels ------------------------------------------------------------------------------- *
 * One element per thread. fmaf() is written out, as in adamw.cuh. */

/* m becomes the average, u the average with Nesterov's step. */
static __global__ void __launch_bounds__(256)
    muon_momentum_kernel(float *__restrict__ u, float *__restrict__ m,
                         const float *__restrict__ gradient, size_t n, float momentum,
                         float gradient_scale) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float g = (1.0f - momentum) * (gradient[i] * gradient_scale);
    const float average = fmaf(momentum, m[i], g);
    m[i] = average;
    u[i] = fmaf(momentum, average, g);
}

/* x = u over its norm */
template <typename T>
__global__ void __launch_bounds__(256)
    muon_normalise_kernel(T *__restrict__ x, const float *__restrict__ u, size_t n,
                          const double *__restrict__ squares) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = from_float<T>(u[i] * (float)(1 / (sqrt(*squares) + MUON_TINY)));
}

/* out = scale_a a + scale_b b; out may be a */
template <typename T>
__global__ void __launch_bounds__(256)
    muon_mix_kernel(T *out, const T *a, const float *__restrict__ b, size_t n, float scale_a,
                    float scale_b) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = from_float<T>(fmaf(scale_a, to_float(a[i]), scale_b * b[i]));
}

/* param may be master; ahead may be NULL */
template <typename P, typename T>
__global__ void __launch_bounds__(256)
    muon_step_kernel(P *param, float *master, float *__restrict__ ahead, const T *__restrict__ x,
                     size_t n, float rate, float decay, float lead) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float before = master[i], p = fmaf(before, decay, -(rate * to_float(x[i])));
    master[i] = p;
    if (ahead) ahead[i] = fmaf(lead, p - before, p);
    if ((void *)param != (void *)master) param[i] = from_float<P>(p);
}

/* ---- launchers ----------------------------------------------------------------------------- */

struct muon_matrix {
    int rows, cols;
    float learning_rate, weight_decay, gradient_scale;
    struct muon_settings settings;
};

/* Working memory of a matrix whose smaller side is S: u (n) and aa (S, S) float32, x (n), a and b (S, S)
 * of type T, and that of the norm. u lies at its beginning. */
template <typename T> struct muon_workspace {
    size_t n, square, norm;
    float *u, *aa;
    T *x, *a, *b;
    double *squares;

    static size_t bytes(int rows, int cols) {
        return backend_cuda_muon_bytes(rows, cols, sizeof(T)) + sizeof(double) +
               cuda_sums_of_squares_workspace(1, (size_t)rows * cols);
    }
    muon_workspace(int rows, int cols, void *memory) {
        const size_t S = rows < cols ? rows : cols;
        n = (size_t)rows * cols, square = S * S;
        norm = cuda_sums_of_squares_workspace(1, n);
        u = (float *)memory, aa = u + backend_cuda_muon_room(n);
        x = (T *)(aa + backend_cuda_muon_room(square)), a = x + backend_cuda_muon_room(n);
        b = a + backend_cuda_muon_room(square);
        squares = (double *)(b + backend_cuda_muon_room(square));
    }
};

/* vector: in the device's memory, {w.u, w.n}. product(out, out_is_float32, a, b, transpose_a, transpose_b,
 * M, N, K) computes out (M, N) = op(a) op(b) of whole arrays, as device_product does. */
template <typename P, typename T, typename Product>
void cuda_muon(P *param, float *master, float *m, float *ahead, const float *gradient,
               const struct muon_matrix *k, const muon_workspace<T> &w,
               const struct norm_vector *vector, Product product, cudaStream_t stream) {
    const bool tall = k->rows > k->cols;
    const int S = tall ? k->cols : k->rows, L = tall ? k->rows : k->cols;
    const size_t blocks = ceil_div(w.n, 256), squares = ceil_div(w.square, 256);
    launch(muon_momentum_kernel, blocks, 256, 0, stream, w.u, m, gradient, w.n,
           k->settings.momentum, k->gradient_scale);
    cuda_sums_of_squares(w.squares, vector, 1, w.n, w.squares + 1, w.norm, stream);
    launch(muon_normalise_kernel<T>, blocks, 256, 0, stream, w.x, w.u, w.n, w.squares);
    for (int step = 0; step < MUON_STEPS; step++) {
        product(w.a, false, w.x, w.x, tall, !tall, S, S, L);
        product(w.aa, true, w.a, w.a, false, false, S, S, S);
        launch(muon_mix_kernel<T>, squares, 256, 0, stream, w.b, w.a, w.aa, w.square, MUON_B,
               MUON_C);
        if (tall)
            product(w.u, true, w.x, w.b, false, false, k->rows, k->cols, S);
        else
            product(w.u, true, w.b, w.x, false, false, k->rows, k->cols, S);
        launch(muon_mix_kernel<T>, blocks, 256, 0, stream, w.x, w.x, w.u, w.n, MUON_A, 1.0f);
    }
    launch(muon_step_kernel<P, T>, blocks, 256, 0, stream, param, master, ahead, w.x, w.n,
           muon_rate(k->learning_rate, k->rows, k->cols),
           (float)(1.0 - (double)k->learning_rate * k->weight_decay), k->settings.lead);
}

#endif
