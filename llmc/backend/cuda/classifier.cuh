/* classifier.cuh — softmax, cross-entropy and their gradient on a chunk of logits, in place.
 *
 * The caller computes the matrix products around it: it makes the logits of a chunk of tokens,
 * calls this, and multiplies the result, so that the logits of all tokens never exist at once. One
 * block reads a row of V logits once. It computes maximum and sum of exponentials in one pass
 * (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"), and keeps the row in
 * shared memory for the gradient. What is beyond CLASSIFIER_KEPT bytes is read again, from L2.
 */
#ifndef LLMC_BACKEND_CUDA_CLASSIFIER_H
#define LLMC_BACKEND_CUDA_CLASSIFIER_H

#include "llmc/backend/cuda/common.cuh"
#include "llmc/backend/cuda/ptx.cuh"

enum { CLASSIFIER_THREADS = 512, CLASSIFIER_KEPT = 96 << 10 }; /* sm_86 and sm_89 have 99 KiB */
enum { CLASSIFIER_AHEAD = 2 };                                 /* loads of a thread under way */

/* ---- kernels ------------------------------------------------------------------------------- */

/* Loads W logits from v on. Those past V become -infinity, which changes neither a maximum nor a
 * sum of exponentials. */
template <int W, typename T>
__device__ __forceinline__ void load_logits(float (&x)[W], const T *row, int v, int V) {
    if (v + W <= V) {
        load(x, row + v);
    } else {
#pragma unroll
        for (int k = 0; k < W; k++) x[k] = v + k < V ? to_float(row[v + k]) : -INFINITY;
    }
}

/* e^x in two instructions, where expf takes eight. A row of logits needs two exponentials for each
 * element; with expf they, and not memory, are the limit. The relative error is 2^-22, and |x|
 * 2^-24 in addition. */
__device__ __forceinline__ float exp_of(float x) {
    return exp2_approx(x * LOG2_E);
}

/* Adds W logits to *total, the sum of exp(logit - *high), where *high is the highest so far. */
template <int W>
__device__ __forceinline__ void add_exponentials(float *high, float *total, const float (&x)[W]) {
    float before = *high;
#pragma unroll
    for (int k = 0; k < W; k++) *high = fmaxf(*high, x[k]);
    if (*high == -INFINITY) return;
    *total *= exp_of(before - *high);
#pragma unroll
    for (int k = 0; k < W; k++) *total += exp_of(x[k] - *high);
}

template <int W, typename T>
__device__ __forceinline__ void store_gradient(T *row, float (&x)[W], int v, int V, int target,
                                               float highest, float total, float scale) {
    float factor = scale / total;
#pragma unroll
    for (int k = 0; k < W; k++) x[k] = factor * exp_of(x[k] - highest);
    if (v <= target && target < v + W)
#pragma unroll
        for (int k = 0; k < W; k++) x[k] -= v + k == target ? scale : 0.0f;
    if (v + W <= V) {
        store(row + v, x);
    } else {
#pragma unroll
        for (int k = 0; k < W; k++)
            if (v + k < V) row[v + k] = from_float<T>(x[k]);
    }
}

/* One block per row. Shared memory: the first `kept` logits, a multiple of W. */
template <typename T, int W>
__global__ void __launch_bounds__(CLASSIFIER_THREADS)
    classifier_kernel(float *__restrict__ losses, T *logits, const int32_t *__restrict__ targets,
                      int V, int stride, int kept, float scale, bool gradient) {
    T *row = logits + (size_t)blockIdx.x * stride, *copy = (T *)dynamic_shared();
    int target = targets[blockIdx.x], first = threadIdx.x * W, step = blockDim.x * W;
    float x[W], high = -INFINITY, total = 0;
    float wanted = to_float(row[target]); /* before anyone writes the gradient over it */
    int v = first;
    for (; v + (CLASSIFIER_AHEAD - 1) * step + W <= V; v += CLASSIFIER_AHEAD * step) {
        struct packed<T, W> ahead[CLASSIFIER_AHEAD];
#pragma unroll
        for (int a = 0; a < CLASSIFIER_AHEAD; a++) load_packed(&ahead[a], row + v + a * step);
#pragma unroll
        for (int a = 0; a < CLASSIFIER_AHEAD; a++) {
            unpack(x, ahead[a]);
            if (v + a * step < kept) store_packed(copy + v + a * step, ahead[a]);
            add_exponentials(&high, &total, x);
        }
    }
    for (; v < V; v += step) { /* the last ones */
        load_logits(x, row, v, V);
        if (v < kept) store(copy + v, x); /* only this thread reads it */
        add_exponentials(&high, &total, x);
    }
    float highest = block_reduce<maximum>(high);
    total = block_reduce<sum>(high == -INFINITY ? 0.0f : total * exp_of(high - highest));
    if (threadIdx.x == 0) losses[blockIdx.x] = highest - wanted + logf(total);
    if (!gradient) return;
    for (v = first; v < V; v += step) {
        if (v < kept)
            load(x, copy + v);
        else
            load_logits(x, row, v, V);
        store_gradient(row, x, v, V, target, highest, total, scale);
    }
}

/* ---- launchers ----------------------------------------------------------------------------- */

/* losses (rows) = -log softmax(logits)[target]. logits (rows, V), rows `stride` elements apart, are
 * replaced by the gradient of scale * sum(losses) if `gradient` is true; elements from V on are
 * neither read nor written. targets (rows) in [0, V). Accesses of 16 bytes need a `stride` that is
 * a multiple of wide<T>. */
template <typename T>
void cuda_classifier_chunk(float *losses, T *logits, const int32_t *targets, int rows, int V,
                           int stride, float scale, bool gradient, cudaStream_t stream) {
    constexpr int W = wide<T>;
    bool vectors = stride % W == 0 && are_aligned(logits);
    size_t kept = gradient ? min(ceil_div(V, W) * W, CLASSIFIER_KEPT / sizeof(T)) : 0;
    launch(vectors ? classifier_kernel<T, W> : classifier_kernel<T, 1>, rows,
           row_threads(ceil_div(V, vectors ? W : 1), CLASSIFIER_THREADS), kept * sizeof(T), stream,
           losses, logits, targets, V, stride, (int)kept, scale, gradient);
}

#endif
