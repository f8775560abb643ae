/* attention.h — causal grouped-query attention on the CPU. Included by backend_cpu.c only.
 *
 * As in FlashAttention (Dao et al. 2022, 2023) the T x T matrix never exists. A task is one
 * sequence and one key/value head. It multiplies QUERY_ROWS queries at a time with all keys up to
 * the causal limit. Backward computes the probabilities again from log_sum_exp. A task first copies
 * its rows out of the wide qkv rows, and scales queries by 1/sqrt(D). So the products are logits,
 * and dS^T q is dk. One task computes the query heads of a group one after another, so that dk and
 * dv are sums in a fixed order. */
#ifndef LLMC_BACKEND_CPU_ATTENTION_H
#define LLMC_BACKEND_CPU_ATTENTION_H

#include "llmc/backend/cpu/vector_math.h"
#include "llmc/backend/cpu/softmax.h"
#include "llmc/backend/cpu/working.h"
#include "llmc/backend/cpu/gemm.h"

static void attention_copy(float *to, int ld_to, const float *from, size_t ld_from, int rows, int D,
                           float scale) {
    for (int i = 0; i < rows; i++) {
        const float *restrict source = from + (size_t)i * ld_from;
        float *restrict target = to + (size_t)i * ld_to;
        for (int d = 0; d < D; d++) target[d] = source[d] * scale;
    }
}

/* Computes one sequence and one key/value head; arguments point to this sequence's first row. */
static void attention_forward_task(float *out, float *log_sum_exp, const float *qkv, int T, int H,
                                   int K, int D, int kv) {
    size_t width = (size_t)(H + 2 * K) * D, out_width = (size_t)H * D;
    int group = H / K, ld = gemm_leading_dimension(D), ld_keys = gemm_leading_dimension(T);
    float scale = 1.0f / sqrtf((float)D);
    size_t head = (size_t)T * ld, block = (size_t)QUERY_ROWS * ld;
    float *k = (float *)cpu_scratch(
        SCRATCH_TASK, (2 * head + 2 * block + (size_t)QUERY_ROWS * ld_keys) * sizeof(float));
    float *v = k + head, *q = v + head, *o = q + block, *p = o + block;
    attention_copy(k, ld, qkv + (size_t)(H + kv) * D, width, T, D, 1);
    attention_copy(v, ld, qkv + (size_t)(H + K + kv) * D, width, T, D, 1);
    for (int h = kv * group; h < (kv + 1) * group; h++) {
        for (int first = 0; first < T; first += QUERY_ROWS) {
            int rows = min_int(QUERY_ROWS, T - first), keys = first + rows;
            float sum[QUERY_ROWS];
            attention_copy(q, ld, qkv + first * width + (size_t)h * D, width, rows, D, scale);
            gemm(false, true, rows, keys, D, q, ld, k, ld, 0, p, ld_keys);
            for (int i = 0; i < rows; i++) {
                float max;
                sum[i] = attention_softmax(p + (size_t)i * ld_keys, first + i + 1, keys, &max);
                log_sum_exp[(size_t)h * T + first + i] = max + logf(sum[i]);
            }
            gemm(false, false, rows, D, keys, p, ld_keys, v, ld, 0, o, ld);
            for (int i = 0; i < rows; i++)
                attention_copy(out + (size_t)(first + i) * out_width + (size_t)h * D,
                               (int)out_width, o + (size_t)i * ld, (size_t)ld, 1, D, 1.0f / sum[i]);
        }
    }
}

static void attention_forward(tensor *out, float *log_sum_exp, const tensor *qkv, int B, int T,
                              int H, int K, int D) {
    PARALLEL_FOR_DYNAMIC
    for (int task = 0; task < B * K; task++) {
        size_t b = (size_t)(task / K);
        attention_forward_task((float *)out + b * T * H * D, log_sum_exp + b * H * T,
                               (const float *)qkv + b * T * (H + 2 * K) * D, T, H, K, D, task % K);
    }
}

/* Computes one query with the keys 0 ... position, which are read in place. p (position + 1) is
 * scratch. */
static void attention_one_row(float *restrict out, const float *query, const float *keys,
                              const float *values, size_t width, int position, int D, float *p) {
    float scale = 1.0f / sqrtf((float)D), max;
    for (int j = 0; j <= position; j++) {
        const float *restrict key = keys + (size_t)j * width;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int d = 0; d < D; d++) sum += query[d] * key[d];
        p[j] = sum * scale;
    }
    float inverse = 1.0f / attention_softmax(p, position + 1, position + 1, &max);
    for (int d = 0; d < D; d++) out[d] = 0;
    for (int j = 0; j <= position; j++) {
        const float *restrict value = values + (size_t)j * width;
        float weight = p[j] * inverse;
#pragma omp simd
        for (int d = 0; d < D; d++) out[d] += weight * value[d];
    }
}

static void attention_continue(tensor *out, const tensor *qkv, int first, int T, int H, int K,
                               int D) {
    size_t width = (size_t)(H + 2 * K) * D;
    PARALLEL_FOR_DYNAMIC
    for (int task = 0; task < T * H; task++) {
        int position = first + task / H, h = task % H, kv = h / (H / K);
        const float *rows = (const float *)qkv;
        float *p = (float *)cpu_scratch(SCRATCH_TASK, ((size_t)position + 1) * sizeof(float));
        attention_one_row((float *)out + (size_t)task * D, rows + position * width + (size_t)h * D,
                          rows + (size_t)(H + kv) * D, rows + (size_t)(H + K + kv) * D, width,
                          position, D, p);
    }
}

static void attention_backward_task(float *dqkv, const float *dout, const float *out,
                                    const float *qkv, const float *log_sum_exp, int T, int H, int K,
                                    int D, int kv) {
    size_t width = (size_t)(H + 2 * K) * D, out_width = (size_t)H * D;
    int group = H / K, ld = gemm_leading_dimension(D), ld_keys = gemm_leading_dimension(T);
    float scale = 1.0f / sqrtf((float)D);
    size_t head = (size_t)T * ld, block = (size_t)QUERY_ROWS * ld;
    float *k = (float *)cpu_scratch(
        SCRATCH_TASK, (4 * head + 3 * block + 2 * (size_t)QUERY_ROWS * ld_keys) * sizeof(float));
    float *v = k + head, *dk = v + head, *dv = dk + head;
    float *q = dv + head, *dq = q + block, *o = dq + block;
    float *p = o + block, *dp = p + (size_t)QUERY_ROWS * ld_keys;
    attention_copy(k, ld, qkv + (size_t)(H + kv) * D, width, T, D, 1);
    attention_copy(v, ld, qkv + (size_t)(H + K + kv) * D, width, T, D, 1);
    float beta = 0; /* the last block has all keys: it comes first and overwrites dk and dv */
    for (int h = kv * group; h < (kv + 1) * group; h++) {
        for (int first = (T - 1) / QUERY_ROWS * QUERY_ROWS; first >= 0; first -= QUERY_ROWS) {
            int rows = min_int(QUERY_ROWS, T - first), keys = first + rows;
            const float *dout_rows = dout + first * out_width + (size_t)h * D;
            const float *out_rows = out + first * out_width + (size_t)h * D;
            attention_copy(q, ld, qkv + first * width + (size_t)h * D, width, rows, D, scale);
            attention_copy(o, ld, dout_rows, out_width, rows, D, 1);
            gemm(false, true, rows, keys, D, q, ld, k, ld, 0, p, ld_keys);
            gemm(false, true, rows, keys, D, o, ld, v, ld, 0, dp, ld_keys);
            for (int i = 0; i < rows; i++) {
                float delta = 0;
#pragma omp simd reduction(+ : delta)
                for (int d = 0; d < D; d++)
                    delta += o[(size_t)i * ld + d] * out_rows[i * out_width + d];
                attention_softmax_backward(p + (size_t)i * ld_keys, dp + (size_t)i * ld_keys,
                                           first + i + 1, keys,
                                           log_sum_exp[(size_t)h * T + first + i], delta);
            }
            gemm(true, false, keys, D, rows, p, ld_keys, o, ld, beta, dv, ld);
            gemm(true, false, keys, D, rows, dp, ld_keys, q, ld, beta, dk, ld);
            gemm(false, false, rows, D, keys, dp, ld_keys, k, ld, 0, dq, ld);
            attention_copy(dqkv + first * width + (size_t)h * D, (int)width, dq, (size_t)ld, rows,
                           D, scale);
            beta = 1;
        }
    }
    attention_copy(dqkv + (size_t)(H + kv) * D, (int)width, dk, (size_t)ld, T, D, 1);
    attention_copy(dqkv + (size_t)(H + K + kv) * D, (int)width, dv, (size_t)ld, T, D, 1);
}

static void attention_backward(tensor *dqkv, const tensor *dout, const tensor *out,
                               const tensor *qkv, const float *log_sum_exp, int B, int T, int H,
                               int K, int D) {
    PARALLEL_FOR_DYNAMIC
    for (int task = 0; task < B * K; task++) {
        size_t b = (size_t)(task / K), rows = b * T;
        attention_backward_task(
            (float *)dqkv + rows * (H + 2 * K) * D, (const float *)dout + rows * H * D,
            (const float *)out + rows * H * D, (const float *)qkv + rows * (H + 2 * K) * D,
            log_sum_exp + b * H * T, T, H, K, D, task % K);
    }
}

#endif
