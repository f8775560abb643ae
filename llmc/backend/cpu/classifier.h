/* classifier.h — logits, softmax, cross-entropy and their gradients on the CPU. Included by
 * backend_cpu.c only.
 *
 * The computation is like attention: tokens are queries, and the V rows of w are both keys and
 * values. The logits of a tile (CLASSIFIER_TILE words, CLASSIFIER_ROWS tokens) become e = exp(logit
 * - offset) while they are in the cache, and e times w is added to dx at once. The offset, a
 * running maximum per token, and the sum of e are updated in the same pass (online softmax, Milakov
 * & Gimelshein 2018). Only dw has to wait for the sums: dw = e^T (x * scale exp(offset - max) /
 * sum). The factor is applied to the small x, and e does not change. e is stored transposed, a row
 * per word, so that the product for dw reads it along its rows.
 *
 * The vocabulary is cut into segments, so that all threads have work. Each segment has its own
 * offset, sum and dx; segments are combined in order. Tokens are processed in chunks, which bounds
 * the memory. */
#ifndef LLMC_BACKEND_CPU_CLASSIFIER_H
#define LLMC_BACKEND_CPU_CLASSIFIER_H

#include "llmc/backend/cpu/vector_math.h"
#include "llmc/backend/cpu/softmax.h"
#include "llmc/backend/cpu/working.h"
#include "llmc/backend/cpu/gemm.h"

struct classifier {
    int C, V, ld_c; /* ld_c: row length of copies of x and w rows */
    int tiles, segments, tiles_per_segment;
    bool backward;
    const float *w;
    /* of the chunk */
    int n, ld;             /* tokens; row length of e */
    const float *x;        /* (n, C) */
    const int32_t *target; /* (n) */
    float *e;              /* (V, ld); only with backward */
    float *offset;         /* (tiles, n): e = exp(logit - offset) */
    float *segment_offset; /* (segments, n): the offset that sum and dx refer to */
    float *sum;            /* (segments, n) */
    float *dx;             /* (segments, n, C): e w */
    float *target_logit;   /* (n) */
    float *max, *factor;   /* (n): scale * softmax = factor exp(logit - max) */
};

/* Computes one segment of the vocabulary for tokens first .. first + n - 1 of the chunk. */
static void classifier_forward_task(const struct classifier *c, int segment, int first, int n) {
    int C = c->C, ld = c->ld;
    size_t tile_floats = c->backward ? 0 : (size_t)CLASSIFIER_TILE * ld;
    size_t copy_floats = c->ld_c == C ? 0 : (size_t)CLASSIFIER_TILE * c->ld_c;
    float *scratch =
        (float *)cpu_scratch(SCRATCH_TASK, (tile_floats + copy_floats + 16) * sizeof(float));
    float *offset = c->segment_offset + (size_t)segment * c->n + first;
    float *sum = c->sum + (size_t)segment * c->n + first;
    float *dx = c->backward ? c->dx + ((size_t)segment * c->n + first) * C : NULL;
    int first_tile = segment * c->tiles_per_segment;
    int last_tile = min_int(first_tile + c->tiles_per_segment, c->tiles);
    for (int j = 0; j < n; j++) sum[j] = 0;
    for (int tile = first_tile; tile < last_tile; tile++) {
        int word = tile * CLASSIFIER_TILE, words = min_int(CLASSIFIER_TILE, c->V - word);
        const float *w = c->w + (size_t)word * C;
        float *e = c->backward ? c->e + (size_t)word * ld + first : scratch;
        gemm(false, true, words, n, C, w, C, c->x + (size_t)first * C, C, 0, e, ld);
        for (int j = 0; j < n; j++) {
            int target = c->target[first + j] - word;
            if (target >= 0 && target < words)
                c->target_logit[first + j] = e[(size_t)target * ld + j];
        }
        classifier_raise_offset(e, words, ld, n, tile == first_tile, offset, sum, dx, C);
        classifier_exp(e, words, ld, n, offset, sum);
        if (!c->backward) continue;
        memcpy(c->offset + (size_t)tile * c->n + first, offset, (size_t)n * sizeof(float));
        int ld_w = C;
        if (copy_floats) {
            float *copy = scratch + tile_floats;
            for (int i = 0; i < words; i++)
                memcpy(copy + (size_t)i * c->ld_c, w + (size_t)i * C, (size_t)C * sizeof(float));
            w = copy;
            ld_w = c->ld_c;
        }
        gemm(true, false, n, C, words, e, ld, w, ld_w, tile != first_tile, dx, C);
    }
}

/* Combines the segments of one token into its loss and its dx. */
static void classifier_combine(const struct classifier *c, int j, float scale, float *loss,
                               float *dx) {
    double total;
    const float max =
        classifier_total(c->segment_offset + j, c->sum + j, c->segments, c->n, &total);
    c->max[j] = max;
    c->factor[j] = (float)(scale / total);
    *loss = (float)(max - c->target_logit[j] + log(total));
    if (!c->backward) return;
    const float *target = c->w + (size_t)c->target[j] * c->C;
    for (int i = 0; i < c->C; i++) dx[i] = -scale * target[i];
    for (int s = 0; s < c->segments; s++) {
        size_t at = (size_t)s * c->n + j;
        float factor = c->factor[j] * expf(c->segment_offset[at] - max);
        const float *part = c->dx + at * c->C;
#pragma omp simd
        for (int i = 0; i < c->C; i++) dx[i] += factor * part[i];
    }
}

/* Computes dw of one tile. */
static void classifier_weight_task(const struct classifier *c, int tile, float scale, float beta,
                                   float *dw) {
    int C = c->C, word = tile * CLASSIFIER_TILE, words = min_int(CLASSIFIER_TILE, c->V - word);
    float *scaled = (float *)cpu_scratch(SCRATCH_TASK, (size_t)c->n * c->ld_c * sizeof(float));
    for (int j = 0; j < c->n; j++) {
        float factor = c->factor[j] * expf(c->offset[(size_t)tile * c->n + j] - c->max[j]);
        const float *x = c->x + (size_t)j * C;
        float *to = scaled + (size_t)j * c->ld_c;
#pragma omp simd
        for (int i = 0; i < C; i++) to[i] = factor * x[i];
    }
    gemm(false, false, words, C, c->n, c->e + (size_t)word * c->ld, c->ld, scaled, c->ld_c, beta,
         dw + (size_t)word * C, C);
    for (int j = 0; j < c->n; j++) {
        int target = c->target[j];
        if (target < word || target >= word + words) continue;
        const float *x = c->x + (size_t)j * C;
        float *row = dw + (size_t)target * C;
#pragma omp simd
        for (int i = 0; i < C; i++) row[i] -= scale * x[i];
    }
}

static float *take(float **from, size_t count) {
    float *taken = *from;
    *from += (count + 15) / 16 * 16;
    return taken;
}

/* Lays out the working memory for chunks of up to n tokens. */
static void classifier_start(struct classifier *c, int n) {
    size_t segments = (size_t)c->segments, tokens = (size_t)n;
    size_t e = c->backward ? (size_t)c->V * gemm_leading_dimension(n) : 0;
    size_t dx = c->backward ? segments * tokens * c->C : 0;
    size_t total = e + dx + ((size_t)c->tiles + 2 * segments + 3) * tokens + 16 * 8;
    float *memory = (float *)cpu_scratch(SCRATCH_OPERATION, total * sizeof(float));
    c->e = take(&memory, e);
    c->dx = take(&memory, dx);
    c->offset = take(&memory, (size_t)c->tiles * tokens);
    c->segment_offset = take(&memory, segments * tokens);
    c->sum = take(&memory, segments * tokens);
    c->target_logit = take(&memory, tokens);
    c->max = take(&memory, tokens);
    c->factor = take(&memory, tokens);
}

static void classifier(float *losses, tensor *dx_, float *dw, const tensor *x_, const weight *w,
                       const int32_t *targets, int N, int C, int V, float scale, bool accumulate) {
    float *dx = (float *)dx_;
    struct classifier c = {
        .C = C, .V = V, .ld_c = C, .backward = dx != NULL, .w = (const float *)w};
    int rows = CLASSIFIER_ROWS;
    if (gemm_is_slow(C)) {
        c.ld_c = gemm_leading_dimension(C);
        rows = CLASSIFIER_ROWS_MOST;
    }
    c.tiles = ceil_div(V, CLASSIFIER_TILE);
    c.tiles_per_segment = ceil_div(c.tiles, CLASSIFIER_SEGMENTS);
    c.segments = ceil_div(c.tiles, c.tiles_per_segment);
    int chunk = ceil_div(N, ceil_div(N, CLASSIFIER_CHUNK));
    classifier_start(&c, chunk);
    for (int first = 0; first < N; first += chunk) {
        c.n = min_int(chunk, N - first);
        c.ld = c.backward ? gemm_leading_dimension(c.n) : CLASSIFIER_ROWS_MOST + 16;
        c.x = (const float *)x_ + (size_t)first * C;
        c.target = targets + first;
        int blocks = ceil_div(c.n, rows);
        PARALLEL_FOR_DYNAMIC
        for (int task = 0; task < c.segments * blocks; task++) {
            int row = task % blocks * rows;
            classifier_forward_task(&c, task / blocks, row, min_int(rows, c.n - row));
        }
        PARALLEL_FOR
        for (int j = 0; j < c.n; j++)
            classifier_combine(&c, j, scale, losses + first + j,
                               dx ? dx + (size_t)(first + j) * C : NULL);
        if (!c.backward) continue;
        PARALLEL_FOR_DYNAMIC
        for (int tile = 0; tile < c.tiles; tile++)
            classifier_weight_task(&c, tile, scale, accumulate || first > 0, dw);
    }
}

#endif
