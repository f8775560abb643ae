/* classifier.cuh — softmax, cross-entropy and their gradient on a chunk of logits, in place.
 *
 * The matrix products around it are the caller's: it makes the logits of a chunk of tokens, calls
 * this, and multiplies what comes out, so that the logits of all tokens never exist at once. One
 * block reads a row of V logits once: maximum and sum of exponentials are made in one pass (Milakov
 * & Gimelshein 2018, "Online normalizer calculation for softmax"), which leaves the row in shared
 * memory for the gradient. What a row has more than CLASSIFIER_KEPT bytes is read again, from L2.
 */
#ifndef LLMC_BACKEND_CUDA_CLASSIFIER_H
#define LLMC_BACKEND_CUDA_CLASSIFIER_H

#include "llmc/backend/cuda/common.cuh"
#include "llmc/backend/cuda/ptx.cuh"

enum { CLASSIFIER_THREADS = 512, CLASSIFIER_KEPT = 96 << 10 }; /* sm_86 and sm_89 have 99 KiB */
enum { CLASSIFIER_AHEAD = 2 };                                 /* reads of a thread under way */

/* ---- kernels ------------------------------------------------------------------------------- */

/* W logits from v on; those past V are -infinity, which no maximum and no sum of exponentials
 * notices. */
template <int W, typename T>
__device__ __forceinline__ void load_logits(float (&x)[W], const T *row, int v, int V) {
    if (v + W <= V) {
        load(x, row + v);
    } else {
#pragma unroll
        for (int k = 0; k < W; k++) x[k] = v + k < V ? to_float(row[v + k]) : -INFINITY;
    }
}

/* e^x. Two instructions in place of expf's eight, of which a row of logits takes two for each
 * element:
 * with those they and not memory were the limit. Off by 2^-22 of the result, and by |x| 2^-24. */
__device__ __forceinline__ float exp_of(float x) {
    return exp2_approx(x * LOG2_E);
}

/* Adds W logits to a sum of exponentials that is relative to the highest so far. */
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
 * replaced by the gradient of scale * sum(losses) where `gradient` is true; elements V.. of a row
 * are neither read nor written. targets (rows) in [0, V). Vectors want `stride` to be a multiple of
 * 8. */
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
