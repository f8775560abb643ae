/* softmax.h — the loops of softmax and its gradient in attention and the classifier, for all
 * working types: logits and probabilities of a tile are float32. Included by backend_cpu.c only. */
#ifndef LLMC_BACKEND_CPU_SOFTMAX_H
#define LLMC_BACKEND_CPU_SOFTMAX_H

#include "llmc/backend/cpu/vector_math.h"

#include "llmc/backend/cpu/working.h"

/* Replaces the first `visible` of `keys` logits by exp(logit - max), and the others by 0. Returns
 * the sum; *maximum gets the max. */
static inline float attention_softmax(float *logits, int visible, int keys, float *maximum) {
    float max = vector_max(logits, visible), sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < visible; j++) {
        logits[j] = fast_exp(logits[j] - max);
        sum += logits[j];
    }
    for (int j = visible; j < keys; j++) logits[j] = 0;
    *maximum = max;
    return sum;
}

/* Replaces logits p by probabilities, and dp, the gradients of probabilities, by the gradients of
 * logits: p = exp(logit - log_sum_exp), dlogit = p (dp - delta), delta = out . dout */
static inline void attention_softmax_backward(float *p, float *dp, int visible, int keys,
                                              float log_sum_exp, float delta) {
#pragma omp simd
    for (int j = 0; j < visible; j++) {
        p[j] = fast_exp(p[j] - log_sum_exp);
        dp[j] = p[j] * (dp[j] - delta);
    }
    for (int j = visible; j < keys; j++) p[j] = dp[j] = 0;
}

/* Raises the offsets of n tokens to the maxima of the tile e (words, ld). Exponents up to 16 are
 * allowed, so after a segment's first tile this is rare. The sums so far are then scaled down: sum
 * (n) and, if it is not NULL, dx (n, C). */
static inline void classifier_raise_offset(const float *e, int words, int ld, int n, bool first,
                                           float *offset, float *sum, float *dx, int C) {
    float max[CLASSIFIER_ROWS_MOST];
    for (int j = 0; j < n; j++) max[j] = e[j];
    for (int i = 1; i < words; i++) {
        const float *row = e + (size_t)i * ld;
#pragma omp simd
        for (int j = 0; j < n; j++) max[j] = row[j] > max[j] ? row[j] : max[j];
    }
    for (int j = 0; j < n; j++) {
        if (!first && max[j] <= offset[j] + 16) continue;
        float factor = first ? 0 : expf(offset[j] - max[j]);
        offset[j] = max[j];
        sum[j] *= factor;
        if (first || !dx) continue;
        for (int i = 0; i < C; i++) dx[(size_t)j * C + i] *= factor;
    }
}

/* For one token, whose segments' offsets and sums lie n floats apart: returns the largest offset,
 * and sets *total to the sum of exp(logit - largest offset) over the vocabulary. */
static inline float classifier_total(const float *offset, const float *sum, int segments, int n,
                                     double *total) {
    float max = offset[0];
    for (int s = 1; s < segments; s++) {
        float other = offset[(size_t)s * n];
        max = other > max ? other : max;
    }
    *total = 0;
    for (int s = 0; s < segments; s++)
        *total += sum[(size_t)s * n] * exp((double)offset[(size_t)s * n] - max);
    return max;
}

/* Replaces the logits e (words, ld) by exp(e - offset), and adds the column sums to `sum`. */
static inline void classifier_exp(float *e, int words, int ld, int n, const float *offset,
                                  float *sum) {
    float tile_sum[CLASSIFIER_ROWS_MOST] = {0};
    for (int i = 0; i < words; i++) {
        float *row = e + (size_t)i * ld;
#pragma omp simd
        for (int j = 0; j < n; j++) {
            float value = fast_exp(row[j] - offset[j]);
            row[j] = value;
            tile_sum[j] += value;
        }
    }
    for (int j = 0; j < n; j++) sum[j] += tile_sum[j];
}

#endif
