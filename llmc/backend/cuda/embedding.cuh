/* embedding.cuh — looks up rows of a table by token, and computes the table's gradient.
 *
 * Backward sorts the tokens first, so that the rows of dout that a row of the table adds up are one
 * run of the sorted list. The list is cut into windows, each of which one block sums if all of it is of one
 * token; another block sums a token's windows, and the rows before and after them: in order of n and
 * in float32, with no atomics, and so the same bits every time. (A word of real text has a thousand rows;
 * as one sum they took longer than all others together.) The place of a token in the sorted list is the
 * number of tokens that come before it. To count them takes N^2 comparisons, which is still only a few
 * microseconds at N = 8192, since the list fits in L1.
 */
#ifndef LLMC_BACKEND_CUDA_EMBEDDING_H
#define LLMC_BACKEND_CUDA_EMBEDDING_H

#include "llmc/backend/cuda/common.cuh"

enum { EMBEDDING_WINDOW = 32 };

/* ---- kernels ------------------------------------------------------------------------------- */

/* One block per row of out (N, C). */
template <typename T, int W>
__global__ void __launch_bounds__(256)
    embedding_forward_kernel(T *__restrict__ out, const int32_t *__restrict__ tokens,
                             const T *__restrict__ table, int C) {
    const T *from = table + (size_t)tokens[blockIdx.x] * C;
    T *to = out + (size_t)blockIdx.x * C;
    for (int i = threadIdx.x * W; i < C; i += blockDim.x * W) {
        float x[W];
        load(x, from + i);
        store(to + i, x);
    }
}

/* sorted (N) = the tokens, ascending. row (N) = the n that each came from, ascending among equal
 * tokens. One warp per n. */
static __global__ void __launch_bounds__(256)
    embedding_sort_kernel(int32_t *__restrict__ sorted, int32_t *__restrict__ row,
                          const int32_t *__restrict__ tokens, int N) {
    int n = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, before = 0;
    if (n >= N) return; /* the whole warp */
    int32_t token = tokens[n];
#pragma unroll 4
    for (int m = threadIdx.x % 32; m < N; m += 32)
        before += tokens[m] < token || (tokens[m] == token && m < n);
    before = warp_reduce<sum>(before);
    if (threadIdx.x % 32 == 0) {
        sorted[before] = token;
        row[before] = n;
    }
}

/* first (V + 1) = where the run of each token in `sorted` begins. */
static __global__ void __launch_bounds__(256)
    embedding_runs_kernel(int32_t *__restrict__ first, const int32_t *__restrict__ sorted, int N,
                          int V) {
    int v = blockIdx.x * blockDim.x + threadIdx.x, low = 0, high = N;
    if (v > V) return;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (sorted[middle] < v)
            low = middle + 1;
        else
            high = middle;
    }
    first[v] = low;
}

/* Adds elements i ... i+W-1 of rows row[begin ... end-1] of dout. Four are under way at a time. */
template <typename T, int W>
__device__ __forceinline__ void embedding_add(float (&total)[W], const int32_t *__restrict__ row,
                                              int begin, int end, const T *__restrict__ dout, int C,
                                              int i) {
    enum { AHEAD = 4 };
#pragma unroll 1
    for (int at = begin; at < end; at += AHEAD) {
        float x[AHEAD][W] = {};
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
            if (at + a < end) load(x[a], dout + (size_t)row[at + a] * C + i);
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
#pragma unroll
            for (int k = 0; k < W; k++) total[k] += x[a][k];
    }
}

/* windows (N / EMBEDDING_WINDOW, C) = the sums of the windows with one token. One block each. */
template <typename T, int W>
__global__ void __launch_bounds__(256)
    embedding_windows_kernel(float *__restrict__ windows, const int32_t *__restrict__ sorted,
                             const int32_t *__restrict__ row, const T *__restrict__ dout, int C) {
    const int begin = blockIdx.x * EMBEDDING_WINDOW, end = begin + EMBEDDING_WINDOW;
    if (sorted[begin] != sorted[end - 1]) return;
    for (int i = threadIdx.x * W; i < C; i += blockDim.x * W) {
        float total[W] = {};
        embedding_add(total, row, begin, end, dout, C, i);
        store(windows + (size_t)blockIdx.x * C + i, total);
    }
}

/* One block per row of dtable (V, C), or with `sorted` per place of that list: the first of a
 * token's adds to its row. */
template <typename T, typename G, int W>
__global__ void __launch_bounds__(256)
    embedding_backward_kernel(G *__restrict__ dtable, const int32_t *__restrict__ first,
                              const int32_t *__restrict__ sorted, const int32_t *__restrict__ row,
                              const float *__restrict__ windows, const T *__restrict__ dout, int C,
                              bool accumulate) {
    const int token = sorted ? sorted[blockIdx.x] : (int)blockIdx.x;
    const int begin = first[token], end = first[token + 1];
    if (sorted ? begin != (int)blockIdx.x : accumulate && begin == end) return;
    int whole = (begin + EMBEDDING_WINDOW - 1) / EMBEDDING_WINDOW, after = end / EMBEDDING_WINDOW;
    if (whole > after) whole = after; /* it begins and ends in one window */
    const bool none = whole == after;
    G *to = dtable + (size_t)token * C;
    for (int i = threadIdx.x * W; i < C; i += blockDim.x * W) {
        float total[W] = {};
        if (accumulate) load(total, to + i);
            /* Rows before the windows, the windows, rows after them. */
#pragma unroll 1
        for (int side = 0; side < 2; side++) {
            const int from = side == 0 ? begin : none ? end : after * EMBEDDING_WINDOW;
            const int until = side == 0 && !none ? whole * EMBEDDING_WINDOW : end;
            embedding_add(total, row, from, until, dout, C, i);
#pragma unroll 1
            for (int window = whole; side == 0 && window < after; window++) {
                float x[W];
                load(x, windows + (size_t)window * C + i);
#pragma unroll
                for (int k = 0; k < W; k++) total[k] += x[k];
            }
        }
        store(to + i, total);
    }
}

/* ---- launchers ----------------------------------------------------------------------------- */

template <typename T>
void cuda_embedding_forward(T *out, const int32_t *tokens, const T *table, int N, int C,
                            cudaStream_t stream) {
    bool vectors = C % wide<T> == 0 && are_aligned(out, table);
    launch(vectors ? embedding_forward_kernel<T, wide<T>> : embedding_forward_kernel<T, 1>, N,
           row_threads(vectors ? C / wide<T> : C, 256), 0, stream, out, tokens, table, C);
}

static inline size_t cuda_embedding_windows(int N, int C) {
    return (size_t)(N / EMBEDDING_WINDOW) * C * sizeof(float);
}

static inline size_t cuda_embedding_backward_workspace(int N, int C, int V) {
    return cuda_embedding_windows(N, C) + (2 * (size_t)N + V + 1) * sizeof(int32_t);
}

/* The gradient's type G may differ from T. The workspace is aligned to 16 bytes. */
template <typename T, typename G>
void cuda_embedding_backward(G *dtable, const int32_t *tokens, const T *dout, int N, int C, int V,
                             bool accumulate, void *workspace, size_t workspace_bytes,
                             cudaStream_t stream) {
    cuda_check_workspace(workspace_bytes, cuda_embedding_backward_workspace(N, C, V));
    float *windows = (float *)workspace;
    int32_t *sorted = (int32_t *)((char *)workspace + cuda_embedding_windows(N, C));
    int32_t *row = sorted + N, *first = row + N;
    launch(embedding_sort_kernel, ceil_div(N, 8), 256, 0, stream, sorted, row, tokens, N);
    launch(embedding_runs_kernel, ceil_div(V + 1, 256), 256, 0, stream, first,
           (const int32_t *)sorted, N, V);
    const bool vectors = C % wide<T> == 0 && are_aligned(dout, workspace);
    const unsigned threads = row_threads(vectors ? C / wide<T> : C, 256);
    if (N >= EMBEDDING_WINDOW)
        launch(vectors ? embedding_windows_kernel<T, wide<T>> : embedding_windows_kernel<T, 1>,
               N / EMBEDDING_WINDOW, threads, 0, stream, windows, (const int32_t *)sorted,
               (const int32_t *)row, dout, C);
    const bool wide_rows = vectors && are_aligned(dtable);
    const bool few = accumulate && N < V; /* no block for tokens that do not occur */
    launch(wide_rows ? embedding_backward_kernel<T, G, wide<T>>
                     : embedding_backward_kernel<T, G, 1>,
           few ? N : V, row_threads(wide_rows ? C / wide<T> : C, 256), 0, stream, dtable,
           (const int32_t *)first, few ? (const int32_t *)sorted : NULL, (const int32_t *)row,
           (const float *)windows, dout, C, accumulate);
}

#endif
