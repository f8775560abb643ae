/* attention_bf16.h — causal grouped-query attention on the CPU in bfloat16. Included by
 * backend_cpu.c only.
 *
 * The work is divided as in attention.h: a task is one sequence and one key/value head, and
 * multiplies QUERY_ROWS queries at a time with all keys up to the causal limit. A task packs keys
 * and values once. Logits, probabilities and their gradients are float32 until a product reads
 * them. The scale 1/sqrt(D) is applied to the logits and to the sums dq and dk, so that it causes
 * no rounding to bfloat16. */
#ifndef LLMC_BACKEND_CPU_ATTENTION_BF16_H
#define LLMC_BACKEND_CPU_ATTENTION_BF16_H

#include "llmc/backend/cpu/packed.h"
#include "llmc/backend/cpu/softmax.h"
#include "llmc/backend/cpu/working.h"

static void narrow_rows(element *to, size_t ld_to, const float *from, size_t ld, int rows, int D,
                        float scale) {
    for (int i = 0; i < rows; i++) narrow_row(to + i * ld_to, from + i * ld, D, scale);
}

/* These loops process rows of logits and their gradients in full vectors. Elements between
 * `visible` and the next multiple of 16 exist, but have no meaning. */
enum { SOFTMAX_LANES = 16 };

/* Replaces x (keys), the products of a query with keys, by exp(scale x - max). Elements from
 * `visible` on are masked and become 0. Returns the sum; *maximum gets max. */
static float softmax_row(float *x, int visible, int keys, float scale, float *maximum) {
    float lane[SOFTMAX_LANES], sum[SOFTMAX_LANES] = {0}, max = x[0], total = 0;
    const int end = ceil_div(visible, SOFTMAX_LANES) * SOFTMAX_LANES;
    for (int j = visible; j < end; j++) x[j] = -INFINITY;
    for (int l = 0; l < SOFTMAX_LANES; l++) lane[l] = max;
    for (int j = 0; j < end; j += SOFTMAX_LANES)
#pragma omp simd
        for (int l = 0; l < SOFTMAX_LANES; l++) lane[l] = x[j + l] > lane[l] ? x[j + l] : lane[l];
    for (int l = 0; l < SOFTMAX_LANES; l++) max = lane[l] > max ? lane[l] : max;
    max *= scale;
    for (int j = 0; j < end; j += SOFTMAX_LANES)
#pragma omp simd
        for (int l = 0; l < SOFTMAX_LANES; l++) {
            x[j + l] = fast_exp(x[j + l] * scale - max);
            sum[l] += x[j + l];
        }
    for (int l = 0; l < SOFTMAX_LANES; l++) total += sum[l];
    for (int j = visible; j < keys; j++) x[j] = 0;
    *maximum = max;
    return total;
}

/* Replaces p, the products of a query with keys, by probabilities; and dp, the gradients of
 * probabilities, by those of the logits: p = exp(scale p - log_sum_exp), dlogit = p (dp - delta),
 * delta = out . dout */
static void softmax_row_backward(float *p, float *dp, int visible, int keys, float scale,
                                 float log_sum_exp, float delta) {
    const int end = ceil_div(visible, SOFTMAX_LANES) * SOFTMAX_LANES;
    for (int j = 0; j < end; j += SOFTMAX_LANES)
#pragma omp simd
        for (int l = 0; l < SOFTMAX_LANES; l++) {
            p[j + l] = fast_exp(p[j + l] * scale - log_sum_exp);
            dp[j + l] = p[j + l] * (dp[j + l] - delta);
        }
    for (int j = visible; j < keys; j++) p[j] = dp[j] = 0;
}

struct attention {
    int T, H, K, D;
    size_t width, out_width; /* of a row of qkv, of out */
    size_t ld_keys, ld;      /* of logits, of sums of D columns */
    float scale;
};

static struct attention attention_of(int T, int H, int K, int D) {
    return (struct attention){T,
                              H,
                              K,
                              D,
                              (size_t)(H + 2 * K) * D,
                              (size_t)H * D,
                              (size_t)ceil_div(T, 16) * 16,
                              (size_t)ceil_div(D, 16) * 16,
                              1.0f / sqrtf((float)D)};
}

struct attention_forward_memory {
    struct packed k, v, q, p;
    float *logits, *out;
};

static size_t attention_forward_place(struct attention_forward_memory *m, const struct attention *a,
                                      char *memory) {
    struct cutter c = {memory, 0};
    m->k = cut_packed(&c, a->T, a->D);
    m->v = cut_packed(&c, a->D, a->T);
    m->q = cut_packed(&c, QUERY_ROWS, a->D);
    m->p = cut_packed(&c, QUERY_ROWS, a->T);
    m->logits = cut_floats(&c, QUERY_ROWS, a->ld_keys);
    m->out = cut_floats(&c, QUERY_ROWS, a->ld);
    return c.used;
}

/* Computes one sequence and one key/value head; arguments point to this sequence's first row. */
static void attention_forward_task(element *out, float *log_sum_exp, const element *qkv,
                                   const struct attention *a, int kv) {
    const int T = a->T, H = a->H, D = a->D, group = H / a->K;
    struct attention_forward_memory m;
    const size_t bytes = attention_forward_place(&m, a, NULL);
    attention_forward_place(&m, a, (char *)cpu_scratch(SCRATCH_TASK, bytes));
    const struct source k = {qkv + (size_t)(H + kv) * D, a->width, false, false};
    const struct source v = {qkv + (size_t)(H + a->K + kv) * D, a->width, false, true};
    pack(m.k, RIGHT, k, T, D);
    pack(m.v, RIGHT, v, D, T);
    for (int h = kv * group; h < (kv + 1) * group; h++) {
        for (int first = 0; first < T; first += QUERY_ROWS) {
            const int rows = min_int(QUERY_ROWS, T - first), keys = first + rows;
            const struct source q = {qkv + first * a->width + (size_t)h * D, a->width, false,
                                     false};
            element *to = out + first * a->out_width + (size_t)h * D;
            float sum[QUERY_ROWS];
            pack(m.q, LEFT, q, rows, D);
            product((struct target){.floats = m.logits, .ld = a->ld_keys}, rows, keys, D, m.q, m.k);
            for (int i = 0; i < rows; i++) {
                float max, *row = m.logits + i * a->ld_keys;
                sum[i] = softmax_row(row, first + i + 1, keys, a->scale, &max);
                log_sum_exp[(size_t)h * T + first + i] = max + logf(sum[i]);
            }
            pack(m.p, LEFT, (struct source){m.logits, a->ld_keys, true, false}, rows, keys);
            product((struct target){.floats = m.out, .ld = a->ld}, rows, D, keys, m.p, m.v);
            for (int i = 0; i < rows; i++)
                narrow_row(to + i * a->out_width, m.out + i * a->ld, D, 1.0f / sum[i]);
        }
    }
}

static void attention_forward(tensor *out, float *log_sum_exp, const tensor *qkv, int B, int T,
                              int H, int K, int D) {
    const struct attention a = attention_of(T, H, K, D);
    PARALLEL_FOR_DYNAMIC
    for (int task = 0; task < B * K; task++) {
        size_t b = (size_t)(task / K), rows = b * T;
        attention_forward_task((element *)out + rows * a.out_width, log_sum_exp + b * H * T,
                               (const element *)qkv + rows * a.width, &a, task % K);
    }
}

/* Computes one query with the keys 0 ... position, which are read in place. p (position + 1) and
 * sum (D) are scratch. */
static void attention_one_row(element *out, const element *query, const element *keys,
                              const element *values, size_t width, int position, int D, float *p,
                              float *sum) {
    float scale = 1.0f / sqrtf((float)D), max;
    for (int j = 0; j <= position; j++) {
        const element *key = keys + (size_t)j * width;
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int d = 0; d < D; d++) dot += widen(query[d]) * widen(key[d]);
        p[j] = dot * scale;
    }
    float inverse = 1.0f / attention_softmax(p, position + 1, position + 1, &max);
    for (int d = 0; d < D; d++) sum[d] = 0;
    for (int j = 0; j <= position; j++) {
        const element *value = values + (size_t)j * width;
        float share = p[j] * inverse;
#pragma omp simd
        for (int d = 0; d < D; d++) sum[d] += share * widen(value[d]);
    }
    for (int d = 0; d < D; d++) out[d] = narrow(sum[d]);
}

static void attention_continue(tensor *out, const tensor *qkv, int first, int T, int H, int K,
                               int D) {
    size_t width = (size_t)(H + 2 * K) * D;
    PARALLEL_FOR_DYNAMIC
    for (int task = 0; task < T * H; task++) {
        int position = first + task / H, h = task % H, kv = h / (H / K);
        const element *rows = (const element *)qkv;
        float *p = (float *)cpu_scratch(SCRATCH_TASK, ((size_t)position + 1 + D) * sizeof(float));
        attention_one_row((element *)out + (size_t)task * D,
                          rows + position * width + (size_t)h * D, rows + (size_t)(H + kv) * D,
                          rows + (size_t)(H + K + kv) * D, width, position, D, p, p + position + 1);
    }
}

struct attention_backward_memory {
    struct packed k, v, keys; /* k and v for the logits and dp, k once more for dq */
    struct packed q, dout;    /* of the block, for the logits and dp */
    struct packed queries, douts, p, dp, dlogits; /* for dk, dv, dq */
    float *logits, *dlogit, *dk, *dv, *dq;
};

static size_t attention_backward_place(struct attention_backward_memory *m,
                                       const struct attention *a, char *memory) {
    struct cutter c = {memory, 0};
    m->k = cut_packed(&c, a->T, a->D);
    m->v = cut_packed(&c, a->T, a->D);
    m->keys = cut_packed(&c, a->D, a->T);
    m->q = cut_packed(&c, QUERY_ROWS, a->D);
    m->dout = cut_packed(&c, QUERY_ROWS, a->D);
    m->queries = cut_packed(&c, a->D, QUERY_ROWS);
    m->douts = cut_packed(&c, a->D, QUERY_ROWS);
    m->p = cut_packed(&c, a->T, QUERY_ROWS);
    m->dp = cut_packed(&c, a->T, QUERY_ROWS);
    m->dlogits = cut_packed(&c, QUERY_ROWS, a->T);
    m->logits = cut_floats(&c, QUERY_ROWS, a->ld_keys);
    m->dlogit = cut_floats(&c, QUERY_ROWS, a->ld_keys);
    m->dk = cut_floats(&c, a->T, a->ld);
    m->dv = cut_floats(&c, a->T, a->ld);
    m->dq = cut_floats(&c, QUERY_ROWS, a->ld);
    return c.used;
}

/* Computes dq of rows first ... first + rows - 1 of head h, and their contributions to dk and
 * dv. */
static void attention_backward_block(element *dqkv, const element *dout, const element *out,
                                     const element *qkv, const float *log_sum_exp,
                                     const struct attention *a,
                                     const struct attention_backward_memory *m, int h, int first,
                                     int rows, bool add) {
    const int D = a->D, keys = first + rows;
    const size_t at = first * a->out_width + (size_t)h * D;
    struct source q = {qkv + first * a->width + (size_t)h * D, a->width, false, false};
    struct source o = {dout + at, a->out_width, false, false};
    struct source p = {m->logits, a->ld_keys, true, true};
    struct source dp = {m->dlogit, a->ld_keys, true, true};
    pack(m->q, LEFT, q, rows, D);
    pack(m->dout, LEFT, o, rows, D);
    q.columns = o.columns = true;
    pack(m->queries, RIGHT, q, D, rows);
    pack(m->douts, RIGHT, o, D, rows);
    product((struct target){.floats = m->logits, .ld = a->ld_keys}, rows, keys, D, m->q, m->k);
    product((struct target){.floats = m->dlogit, .ld = a->ld_keys}, rows, keys, D, m->dout, m->v);
    for (int i = 0; i < rows; i++) {
        const element *x = dout + at + i * a->out_width, *y = out + at + i * a->out_width;
        float delta = 0;
#pragma omp simd reduction(+ : delta)
        for (int d = 0; d < D; d++) delta += widen(x[d]) * widen(y[d]);
        softmax_row_backward(m->logits + i * a->ld_keys, m->dlogit + i * a->ld_keys, first + i + 1,
                             keys, a->scale, log_sum_exp[i], delta);
    }
    pack(m->p, LEFT, p, keys, rows);
    pack(m->dp, LEFT, dp, keys, rows);
    dp.columns = false;
    pack(m->dlogits, LEFT, dp, rows, keys);
    product((struct target){.floats = m->dv, .ld = a->ld, .add = add}, keys, D, rows, m->p,
            m->douts);
    product((struct target){.floats = m->dk, .ld = a->ld, .add = add}, keys, D, rows, m->dp,
            m->queries);
    product((struct target){.floats = m->dq, .ld = a->ld}, rows, D, keys, m->dlogits, m->keys);
    narrow_rows(dqkv + first * a->width + (size_t)h * D, a->width, m->dq, a->ld, rows, D, a->scale);
}

static void attention_backward_task(element *dqkv, const element *dout, const element *out,
                                    const element *qkv, const float *log_sum_exp,
                                    const struct attention *a, int kv) {
    const int T = a->T, H = a->H, D = a->D, group = H / a->K;
    struct attention_backward_memory m;
    const size_t bytes = attention_backward_place(&m, a, NULL);
    attention_backward_place(&m, a, (char *)cpu_scratch(SCRATCH_TASK, bytes));
    struct source k = {qkv + (size_t)(H + kv) * D, a->width, false, false};
    const struct source v = {qkv + (size_t)(H + a->K + kv) * D, a->width, false, false};
    pack(m.k, RIGHT, k, T, D);
    pack(m.v, RIGHT, v, T, D);
    k.columns = true;
    pack(m.keys, RIGHT, k, D, T);
    bool add = false; /* the last block has all keys: it comes first and overwrites dk and dv */
    for (int h = kv * group; h < (kv + 1) * group; h++) {
        for (int first = (T - 1) / QUERY_ROWS * QUERY_ROWS; first >= 0; first -= QUERY_ROWS) {
            attention_backward_block(dqkv, dout, out, qkv, log_sum_exp + (size_t)h * T + first, a,
                                     &m, h, first, min_int(QUERY_ROWS, T - first), add);
            add = true;
        }
    }
    narrow_rows(dqkv + (size_t)(H + kv) * D, a->width, m.dk, a->ld, T, D, a->scale);
    narrow_rows(dqkv + (size_t)(H + a->K + kv) * D, a->width, m.dv, a->ld, T, D, 1);
}

static void attention_backward(tensor *dqkv, const tensor *dout, const tensor *out,
                               const tensor *qkv, const float *log_sum_exp, int B, int T, int H,
                               int K, int D) {
    const struct attention a = attention_of(T, H, K, D);
    PARALLEL_FOR_DYNAMIC
    for (int task = 0; task < B * K; task++) {
        size_t b = (size_t)(task / K), rows = b * T;
        attention_backward_task(
            (element *)dqkv + rows * a.width, (const element *)dout + rows * a.out_width,
            (const element *)out + rows * a.out_width, (const element *)qkv + rows * a.width,
            log_sum_exp + b * H * T, &a, task % K);
    }
}

#endif
