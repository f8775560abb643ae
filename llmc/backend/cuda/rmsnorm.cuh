/* rmsnorm.cuh — RMSNorm (Zhang & Sennrich 2019), alone and after the residual connection, and its
 * gradients.
 *
 * Forward reads a row once: a block keeps it in shared memory until the row's norm is known.
 * Backward is one pass over fixed sets of rows; each block sums its part of dw over its own rows,
 * and a second kernel sums the parts in order. A narrow row has a warp of its own, which keeps it and its
 * part of dw in registers and waits for no other.
 */
#ifndef LLMC_BACKEND_CUDA_RMSNORM_H
#define LLMC_BACKEND_CUDA_RMSNORM_H

#include "llmc/backend/cuda/common.cuh"

enum { RMSNORM_PARTS = 384, RMSNORM_SUMMANDS = 8, RMSNORM_WARPS = 8, RMSNORM_NARROW = 4 };

/* ---- kernels ------------------------------------------------------------------------------- */

/* One block per row. With `residual` the row is x + y, rounded to T, and is also written to `sums`,
 * which may be x. Shared memory: a row of T. */
template <typename T, int W, bool residual>
__global__ void __launch_bounds__(256)
    rmsnorm_forward_kernel(T *sums, T *__restrict__ out, float *__restrict__ rstd, const T *x,
                           const T *__restrict__ y, const T *__restrict__ w, int C, float eps) {
    T *row = (T *)dynamic_shared();
    size_t at = (size_t)blockIdx.x * C;
    float squares = 0;
    for (int i = threadIdx.x * W; i < C; i += blockDim.x * W) {
        float v[W];
        load(v, x + at + i);
        if (residual) {
            float u[W];
            load(u, y + at + i);
#pragma unroll
            for (int k = 0; k < W; k++) v[k] = to_float(from_float<T>(v[k] + u[k]));
            store(sums + at + i, v);
        }
        store(row + i, v); /* only this thread reads it */
#pragma unroll
        for (int k = 0; k < W; k++) squares += v[k] * v[k];
    }
    float r = rsqrtf(block_reduce<sum>(squares) / C + eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = r;
    for (int i = threadIdx.x * W; i < C; i += blockDim.x * W) {
        float v[W], g[W];
        load(v, row + i);
        load(g, w + i);
#pragma unroll
        for (int k = 0; k < W; k++) v[k] *= r * g[k];
        store(out + at + i, v);
    }
}

/* dx += r dout w - r^3/C (dout w . x) x. Block n % gridDim.x computes row n, and sums its part (C)
 * of dw = sum over rows of dout x r. Shared memory: the part, C floats. Element k of vector i is at
 * k * vectors + i, so that a warp's accesses meet all banks. */
template <typename T, int W>
__global__ void __launch_bounds__(512)
    rmsnorm_backward_kernel(T *__restrict__ dx, float *__restrict__ parts,
                            const T *__restrict__ dout, const T *__restrict__ x,
                            const T *__restrict__ w, const float *__restrict__ rstd, int N, int C) {
    float *part = (float *)dynamic_shared();
    int vectors = C / W;
    for (int i = threadIdx.x; i < vectors; i += blockDim.x)
#pragma unroll
        for (int k = 0; k < W; k++) part[k * vectors + i] = 0;
    for (int n = blockIdx.x; n < N; n += gridDim.x) {
        size_t at = (size_t)n * C;
        float r = rstd[n], dot = 0;
        for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
            float d[W], v[W], g[W];
            load(d, dout + at + i * W);
            load(v, x + at + i * W);
            load(g, w + i * W);
#pragma unroll
            for (int k = 0; k < W; k++) dot += d[k] * g[k] * v[k];
        }
        dot = block_reduce<sum>(dot) * r * r / C;
        for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
            float d[W], v[W], g[W], o[W];
            load(d, dout + at + i * W); /* from L1 */
            load(v, x + at + i * W);
            load(g, w + i * W);
            load(o, dx + at + i * W);
#pragma unroll
            for (int k = 0; k < W; k++) {
                part[k * vectors + i] += d[k] * v[k] * r;
                o[k] += r * (d[k] * g[k] - dot * v[k]);
            }
            store(dx + at + i * W, o);
        }
    }
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        float v[W];
#pragma unroll
        for (int k = 0; k < W; k++) v[k] = part[k * vectors + i];
        store(parts + (size_t)blockIdx.x * C + i * W, v);
    }
}

/* The same with a warp per row: warp w of block b computes rows w + RMSNORM_WARPS * (b, b + gridDim.x ...).
 * A lane has every 32nd vector of a row, at most V. The warps' sums are added in order. */
template <typename T, int W, int V>
__global__ void __launch_bounds__(32 * RMSNORM_WARPS)
    rmsnorm_backward_narrow_kernel(T *__restrict__ dx, float *__restrict__ parts,
                                   const T *__restrict__ dout, const T *__restrict__ x,
                                   const T *__restrict__ w, const float *__restrict__ rstd, int N,
                                   int C) {
    float *shared = (float *)dynamic_shared(); /* (C), as above */
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, vectors = C / W;
    float part[V][W] = {};
    for (int n = blockIdx.x * RMSNORM_WARPS + warp; n < N; n += gridDim.x * RMSNORM_WARPS) {
        const size_t at = (size_t)n * C;
        const float r = rstd[n];
        struct packed<T, W> kept_d[V], kept_v[V];
        float dot = 0;
#pragma unroll
        for (int j = 0; j < V; j++) {
            const int i = lane + 32 * j;
            float d[W], v[W], g[W];
            if (i >= vectors) continue;
            load_packed(&kept_d[j], dout + at + i * W);
            load_packed(&kept_v[j], x + at + i * W);
            unpack(d, kept_d[j]), unpack(v, kept_v[j]);
            load(g, w + i * W);
#pragma unroll
            for (int k = 0; k < W; k++) dot += d[k] * g[k] * v[k];
        }
        dot = warp_reduce<sum>(dot) * r * r / C;
#pragma unroll
        for (int j = 0; j < V; j++) {
            const int i = lane + 32 * j;
            float d[W], v[W], g[W], o[W];
            if (i >= vectors) continue;
            unpack(d, kept_d[j]), unpack(v, kept_v[j]);
            load(g, w + i * W);
            load(o, dx + at + i * W);
#pragma unroll
            for (int k = 0; k < W; k++) {
                part[j][k] += d[k] * v[k] * r;
                o[k] += r * (d[k] * g[k] - dot * v[k]);
            }
            store(dx + at + i * W, o);
        }
    }
    for (int before = 0; before < RMSNORM_WARPS; before++) {
#pragma unroll
        for (int j = 0; j < V; j++) {
            const int i = lane + 32 * j;
            if (warp != before || i >= vectors) continue;
#pragma unroll
            for (int k = 0; k < W; k++) {
                if (before) part[j][k] += shared[k * vectors + i];
                shared[k * vectors + i] = part[j][k];
            }
            if (before == RMSNORM_WARPS - 1) store(parts + (size_t)blockIdx.x * C + i * W, part[j]);
        }
        __syncthreads();
    }
}

/* dw (C) = the sum of parts (count, C). A block has RMSNORM_SUMMANDS rows of 32 threads. A thread
 * sums every RMSNORM_SUMMANDS-th part of one column. */
template <typename G>
__global__ void __launch_bounds__(32 * RMSNORM_SUMMANDS)
    rmsnorm_backward_weight_kernel(G *__restrict__ dw, const float *__restrict__ parts, int count,
                                   int C, bool accumulate) {
    __shared__ float partial[RMSNORM_SUMMANDS][32];
    int lane = threadIdx.x % 32, summand = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    float total = 0;
#pragma unroll 8
    for (int p = summand; p < count; p += RMSNORM_SUMMANDS)
        if (c < C) total += parts[(size_t)p * C + c];
    partial[summand][lane] = total;
    __syncthreads();
    if (summand > 0 || c >= C) return;
    for (int k = 1; k < RMSNORM_SUMMANDS; k++) total += partial[k][lane];
    dw[c] = from_float<G>(accumulate ? to_float(dw[c]) + total : total);
}

/* ---- launchers ----------------------------------------------------------------------------- */

template <typename T>
void cuda_rmsnorm_forward(T *out, float *rstd, const T *x, const T *w, int N, int C, float eps,
                          cudaStream_t stream) {
    bool vectors = C % wide<T> == 0 && are_aligned(out, x, w);
    launch(vectors ? rmsnorm_forward_kernel<T, wide<T>, false>
                   : rmsnorm_forward_kernel<T, 1, false>,
           N, row_threads(vectors ? C / wide<T> : C, 256), C * sizeof(T), stream, (T *)NULL, out,
           rstd, x, (const T *)NULL, w, C, eps);
}

template <typename T>
void cuda_residual_rmsnorm_forward(T *sum, T *out, float *rstd, const T *x, const T *y, const T *w,
                                   int N, int C, float eps, cudaStream_t stream) {
    bool vectors = C % wide<T> == 0 && are_aligned(sum, out, x, y, w);
    launch(vectors ? rmsnorm_forward_kernel<T, wide<T>, true> : rmsnorm_forward_kernel<T, 1, true>,
           N, row_threads(vectors ? C / wide<T> : C, 256), C * sizeof(T), stream, sum, out, rstd, x,
           y, w, C, eps);
}

static inline int rmsnorm_parts(int N) {
    return N < RMSNORM_PARTS ? N : RMSNORM_PARTS;
}

static inline size_t cuda_rmsnorm_backward_workspace(int N, int C) {
    return (size_t)rmsnorm_parts(N) * C * sizeof(float);
}

/* V, the vectors of a lane in a row of so many, or 0: the row is not narrow. */
template <typename T> int rmsnorm_narrow(int C, bool vectors) {
    const size_t lane = ceil_div(C / wide<T>, 32);
    return !vectors || lane > RMSNORM_NARROW ? 0 : lane > 2 ? 4 : (int)lane;
}

/* The type G of dw may differ from T. The workspace is aligned to 16 bytes. */
template <typename T, typename G>
void cuda_rmsnorm_backward(T *dx, G *dw, const T *dout, const T *x, const T *w, const float *rstd,
                           int N, int C, bool accumulate, void *workspace, size_t workspace_bytes,
                           cudaStream_t stream) {
    cuda_check_workspace(workspace_bytes, cuda_rmsnorm_backward_workspace(N, C));
    float *parts = (float *)workspace;
    const bool vectors = C % wide<T> == 0 && are_aligned(dx, dout, x, w, workspace);
    const int narrow = rmsnorm_narrow<T>(C, vectors);
    const int count = rmsnorm_parts(narrow ? (int)ceil_div(N, RMSNORM_WARPS) : N);
    constexpr int W = wide<T>;
    launch(narrow == 1   ? rmsnorm_backward_narrow_kernel<T, W, 1>
           : narrow == 2 ? rmsnorm_backward_narrow_kernel<T, W, 2>
           : narrow == 4 ? rmsnorm_backward_narrow_kernel<T, W, 4>
           : vectors     ? rmsnorm_backward_kernel<T, W>
                         : rmsnorm_backward_kernel<T, 1>,
           count, narrow ? 32 * RMSNORM_WARPS : row_threads(vectors ? C / W : C, 512),
           C * sizeof(float), stream, dx, parts, dout, x, w, rstd, N, C);
    launch(rmsnorm_backward_weight_kernel<G>, ceil_div(C, 32), 32 * RMSNORM_SUMMANDS, 0, stream, dw,
           (const float *)parts, count, C, accumulate);
}

#endif
