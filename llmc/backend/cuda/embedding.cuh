/* embedding.cuh — looks up rows of a table by token, and computes the table's gradient.
 *
 * Backward sorts the tokens first, so that each row of the table is summed by one block, in order
 * of n and in float32: no atomics, the same bits every time. The place of a token in the sorted
 * list is the number of tokens that come before it. To count them takes N^2 comparisons, which is
 * still only a few microseconds at N = 8192, since the list fits in L1.
 */
#ifndef LLMC_BACKEND_CUDA_EMBEDDING_H
#define LLMC_BACKEND_CUDA_EMBEDDING_H

#include "llmc/backend/cuda/common.cuh"

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

/* One block per row of dtable (V, C). Four rows of dout are under way at a time. */
template <typename T, typename G, int W>
__global__ void __launch_bounds__(256)
    embedding_backward_kernel(G *__restrict__ dtable, const int32_t *__restrict__ first,
                              const int32_t *__restrict__ row, const T *__restrict__ dout, int C,
                              bool accumulate) {
    enum { AHEAD = 4 };
    int begin = first[blockIdx.x], end = first[blockIdx.x + 1];
    if (accumulate && begin == end) return;
    G *to = dtable + (size_t)blockIdx.x * C;
    for (int i = threadIdx.x * W; i < C; i += blockDim.x * W) {
        float total[W] = {};
        if (accumulate) load(total, to + i);
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

static inline size_t cuda_embedding_backward_workspace(int N, int V) {
    return (2 * (size_t)N + V + 1) * sizeof(int32_t);
}

/* The gradient's type G may differ from T. The workspace is aligned to 4 bytes. */
template <typename T, typename G>
void cuda_embedding_backward(G *dtable, const int32_t *tokens, const T *dout, int N, int C, int V,
                             bool accumulate, void *workspace, size_t workspace_bytes,
                             cudaStream_t stream) {
    cuda_check_workspace(workspace_bytes, cuda_embedding_backward_workspace(N, V));
    int32_t *sorted = (int32_t *)workspace, *row = sorted + N, *first = row + N;
    launch(embedding_sort_kernel, ceil_div(N, 8), 256, 0, stream, sorted, row, tokens, N);
    launch(embedding_runs_kernel, ceil_div(V + 1, 256), 256, 0, stream, first,
           (const int32_t *)sorted, N, V);
    bool vectors = C % wide<T> == 0 && are_aligned(dtable, dout);
    launch(vectors ? embedding_backward_kernel<T, G, wide<T>> : embedding_backward_kernel<T, G, 1>,
           V, row_threads(vectors ? C / wide<T> : C, 256), 0, stream, dtable,
           (const int32_t *)first, (const int32_t *)row, dout, C, accumulate);
}

#endif
