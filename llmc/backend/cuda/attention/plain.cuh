/* plain.cuh — causal attention without tensor cores. It computes float32, bfloat16 with head sizes
 * that the tensor cores' path does not take (tests and small models), and few queries behind many
 * keys (generation). It is simple, not fast.
 *
 * A warp owns one row of the result and walks over the rows that it meets, 32 at a time. Each lane
 * computes one logit from its own row. Then the lanes share the columns of the weighted sum; a lane
 * has up to PLAIN_MOST / 32 of them. In generation, where rows are few, the warps of a block share
 * the keys that one row meets, and add up their parts. Sums have a fixed order.
 */
#ifndef LLMC_BACKEND_CUDA_ATTENTION_PLAIN_H
#define LLMC_BACKEND_CUDA_ATTENTION_PLAIN_H

#include "llmc/backend/cuda/backend_cuda.h"
#include "llmc/backend/cuda/common.cuh"

enum { PLAIN_THREADS = 128, PLAIN_WARPS = PLAIN_THREADS / 32, PLAIN_MOST = BACKEND_CUDA_MOST_HEAD };

/* Copies row (D) to this warp's part of shared memory. */
template <typename T> __device__ __forceinline__ void plain_keep(float *kept, const T *row, int D) {
    for (int d = threadIdx.x % 32; d < D; d += 32) kept[d] = to_float(row[d]);
    __syncwarp();
}

template <typename T>
__device__ __forceinline__ float plain_dot(const float *kept, const T *row, int D) {
    float sum = 0;
    for (int d = 0; d < D; d++) sum = fmaf(kept[d], to_float(row[d]), sum);
    return sum;
}

/* sum += the weight of lane j times row j of `rows`, for all j < count */
template <typename T>
__device__ __forceinline__ void plain_add(float sum[PLAIN_MOST / 32], float weight, const T *rows,
                                          size_t stride, int count, int D) {
    for (int j = 0; j < count; j++) {
        float w = __shfl_sync(0xffffffffu, weight, j);
#pragma unroll
        for (int i = 0; i < PLAIN_MOST / 32; i++) {
            int d = i * 32 + threadIdx.x % 32;
            if (d < D) sum[i] = fmaf(w, to_float(rows[j * stride + d]), sum[i]);
        }
    }
}

template <typename T>
__device__ __forceinline__ void plain_write(T *to, const float sum[PLAIN_MOST / 32], float factor,
                                            int D) {
#pragma unroll
    for (int i = 0; i < PLAIN_MOST / 32; i++) {
        int d = i * 32 + threadIdx.x % 32;
        if (d < D) to[d] = from_float<T>(sum[i] * factor);
    }
}

struct plain_part { /* one query's result over some of the keys, not yet divided by `sum` */
    float largest, sum, out[PLAIN_MOST / 32];
};

/* Attends to keys and values `begin` ... `last`: the first 32 of every `step` of them. */
template <typename T>
__device__ __forceinline__ struct plain_part plain_attend(const float *query, const T *k,
                                                          const T *v, size_t stride, int begin,
                                                          int step, int last, int D, float scale) {
    const int lane = threadIdx.x % 32;
    struct plain_part part = {-INFINITY, 0, {}};
    for (int j = begin; j <= last; j += step) {
        float logit = -INFINITY;
        if (j + lane <= last) logit = plain_dot(query, k + (j + lane) * stride, D) * scale;
        float now = fmaxf(part.largest, warp_reduce<maximum>(logit));
        float shrink = expf(part.largest - now), weight = expf(logit - now);
        part.sum = part.sum * shrink + warp_reduce<struct sum>(weight);
        part.largest = now;
#pragma unroll
        for (int i = 0; i < PLAIN_MOST / 32; i++) part.out[i] *= shrink;
        plain_add(part.out, weight, v + j * stride, stride, min(32, last + 1 - j), D);
    }
    return part;
}

template <typename T>
__global__ void __launch_bounds__(PLAIN_THREADS, 4)
    plain_forward_kernel(T *out, float *log_sum_exp, const T *qkv, int B, int length, int H, int K,
                         int D, float scale) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = blockIdx.x * PLAIN_WARPS + warp; /* of (B, H, length) */
    if (row >= B * H * length) return;
    const int t = row % length, h = row / length % H, b = row / length / H;
    const size_t stride = (size_t)(H + 2 * K) * D;
    const T *q = qkv + (size_t)(b * length + t) * stride + h * D;
    const T *k = qkv + b * length * stride + (H + h / (H / K)) * D, *v = k + K * D;
    float *query = (float *)dynamic_shared() + warp * D;
    plain_keep(query, q, D);
    const struct plain_part all = plain_attend(query, k, v, stride, 0, 32, t, D, scale);
    plain_write(out + ((size_t)(b * length + t) * H + h) * D, all.out, 1 / all.sum, D);
    if (lane == 0) log_sum_exp[row] = all.largest + logf(all.sum);
}

/* The shared memory of plain_continue_kernel: the query, then the warps' parts. The compiler reads the
 * query by 16 bytes, beyond its end if 4 does not divide D, and parts are written meanwhile. */
__host__ __device__ static inline int plain_parts_at(int D) {
    return 4 * (int)ceil_div(D, 4);
}

/* One block per token and head of out (rows, H, D), whose row 0 is token `first` of qkv. */
template <typename T>
__global__ void __launch_bounds__(PLAIN_THREADS, 4)
    plain_continue_kernel(T *out, const T *qkv, int first, int H, int K, int D, float scale) {
    __shared__ float largest[PLAIN_WARPS], sum[PLAIN_WARPS];
    const int warp = threadIdx.x / 32, t = first + blockIdx.x / H, h = blockIdx.x % H;
    const size_t stride = (size_t)(H + 2 * K) * D;
    const T *q = qkv + t * stride + h * D, *k = qkv + (H + h / (H / K)) * D, *v = k + K * D;
    float *query = (float *)dynamic_shared(), *parts = query + plain_parts_at(D);
    for (int d = threadIdx.x; d < D; d += PLAIN_THREADS) query[d] = to_float(q[d]);
    __syncthreads();
    const struct plain_part part =
        plain_attend(query, k, v, stride, warp * 32, PLAIN_THREADS, t, D, scale);
    plain_write(parts + warp * D, part.out, 1, D);
    if (threadIdx.x % 32 == 0) largest[warp] = part.largest, sum[warp] = part.sum;
    __syncthreads();
    float most = largest[0], total = 0, factor[PLAIN_WARPS]; /* warp 0 always has a key */
    for (int w = 1; w < PLAIN_WARPS; w++) most = fmaxf(most, largest[w]);
#pragma unroll
    for (int w = 0; w < PLAIN_WARPS; w++) {
        factor[w] = expf(largest[w] - most);
        total = fmaf(factor[w], sum[w], total);
    }
    for (int d = threadIdx.x; d < D; d += PLAIN_THREADS) {
        float o = 0;
#pragma unroll
        for (int w = 0; w < PLAIN_WARPS; w++) o = fmaf(factor[w], parts[w * D + d], o);
        out[(size_t)blockIdx.x * D + d] = from_float<T>(o / total);
    }
}

/* Computes dq, and delta = rowsum(dO * O) for the next kernel. */
template <typename T>
__global__ void __launch_bounds__(PLAIN_THREADS, 4)
    plain_backward_queries_kernel(T *dqkv, float *delta, const T *dout, const T *out, const T *qkv,
                                  const float *log_sum_exp, int B, int length, int H, int K, int D,
                                  float scale) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = blockIdx.x * PLAIN_WARPS + warp;
    if (row >= B * H * length) return;
    const int t = row % length, h = row / length % H, b = row / length / H;
    const size_t stride = (size_t)(H + 2 * K) * D, at = (size_t)(b * length + t) * stride + h * D;
    const size_t at_out = ((size_t)(b * length + t) * H + h) * D;
    const T *k = qkv + b * length * stride + (H + h / (H / K)) * D, *v = k + K * D;
    float *query = (float *)dynamic_shared() + warp * 2 * D, *dquery = query + D;
    plain_keep(query, qkv + at, D);
    plain_keep(dquery, dout + at_out, D);
    float dot = 0, dq[PLAIN_MOST / 32] = {};
    for (int d = lane; d < D; d += 32) dot = fmaf(dquery[d], to_float(out[at_out + d]), dot);
    dot = warp_reduce<struct sum>(dot);
    if (lane == 0) delta[row] = dot;
    for (int j = 0; j <= t; j += 32) {
        float dlogit = 0;
        if (j + lane <= t) {
            float logit = plain_dot(query, k + (j + lane) * stride, D) * scale;
            float dweight = plain_dot(dquery, v + (j + lane) * stride, D);
            dlogit = expf(logit - log_sum_exp[row]) * (dweight - dot);
        }
        plain_add(dq, dlogit, k + j * stride, stride, min(32, t + 1 - j), D);
    }
    plain_write(dqkv + at, dq, scale, D);
}

template <typename T>
__global__ void __launch_bounds__(PLAIN_THREADS, 4)
    plain_backward_keys_kernel(T *dqkv, const float *delta, const T *dout, const T *qkv,
                               const float *log_sum_exp, int B, int length, int H, int K, int D,
                               float scale) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = blockIdx.x * PLAIN_WARPS + warp; /* of (B, K, length) */
    if (row >= B * K * length) return;
    const int j = row % length, kv = row / length % K, b = row / length / K;
    const size_t stride = (size_t)(H + 2 * K) * D, out_stride = (size_t)H * D;
    const size_t at_k = (size_t)(b * length + j) * stride + (H + kv) * D, at_v = at_k + K * D;
    float *key = (float *)dynamic_shared() + warp * 2 * D, *value = key + D;
    plain_keep(key, qkv + at_k, D);
    plain_keep(value, qkv + at_v, D);
    float dk[PLAIN_MOST / 32] = {}, dv[PLAIN_MOST / 32] = {};
    for (int h = kv * (H / K); h < (kv + 1) * (H / K); h++) {
        const T *q = qkv + b * length * stride + h * D;
        const T *dquery = dout + b * length * out_stride + h * D;
        const size_t statistics = (size_t)(b * H + h) * length;
        for (int t = j; t < length; t += 32) {
            float weight = 0, dlogit = 0;
            if (t + lane < length) {
                size_t at = t + lane;
                float logit = plain_dot(key, q + at * stride, D) * scale;
                weight = expf(logit - log_sum_exp[statistics + at]);
                float dweight = plain_dot(value, dquery + at * out_stride, D);
                dlogit = weight * (dweight - delta[statistics + at]);
            }
            int count = min(32, length - t);
            plain_add(dv, weight, dquery + t * out_stride, out_stride, count, D);
            plain_add(dk, dlogit, q + t * stride, stride, count, D);
        }
    }
    plain_write(dqkv + at_k, dk, scale, D);
    plain_write(dqkv + at_v, dv, 1, D);
}

template <typename T>
void plain_forward_launch(T *out, float *log_sum_exp, const T *qkv, int B, int length, int H, int K,
                          int D, cudaStream_t stream) {
    launch(plain_forward_kernel<T>, ceil_div(B * H * length, PLAIN_WARPS), PLAIN_THREADS,
           PLAIN_WARPS * D * sizeof(float), stream, out, log_sum_exp, qkv, B, length, H, K, D,
           1 / sqrtf((float)D));
}

template <typename T>
void plain_continue_launch(T *out, const T *qkv, int first, int rows, int H, int K, int D,
                           cudaStream_t stream) {
    launch(plain_continue_kernel<T>, rows * H, PLAIN_THREADS,
           (plain_parts_at(D) + PLAIN_WARPS * D) * sizeof(float), stream, out, qkv, first, H, K, D,
           1 / sqrtf((float)D));
}

template <typename T>
void plain_backward_launch(T *dqkv, const T *dout, const T *out, const T *qkv,
                           const float *log_sum_exp, int B, int length, int H, int K, int D,
                           float *workspace, cudaStream_t stream) {
    const size_t shared = PLAIN_WARPS * 2 * D * sizeof(float);
    const float scale = 1 / sqrtf((float)D);
    launch(plain_backward_queries_kernel<T>, ceil_div(B * H * length, PLAIN_WARPS), PLAIN_THREADS,
           shared, stream, dqkv, workspace, dout, out, qkv, log_sum_exp, B, length, H, K, D, scale);
    launch(plain_backward_keys_kernel<T>, ceil_div(B * K * length, PLAIN_WARPS), PLAIN_THREADS,
           shared, stream, dqkv, workspace, dout, qkv, log_sum_exp, B, length, H, K, D, scale);
}

#endif
