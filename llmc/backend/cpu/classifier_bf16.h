/* classifier_bf16.h — logits, softmax, cross-entropy and their gradients on the CPU in bfloat16.
 * Included by backend_cpu.c only.
 *
 * The algorithm is that of classifier.h: tiles of logits become e = exp(logit - offset) while they
 * are in the cache, e times w is added to dx at once, and dw = e^T (x scale exp(offset - max) /
 * sum) waits for the sums. Logits and sums are float32. e is rounded to bfloat16 when a product
 * reads it, and is kept rounded for dw. A task computes a segment of the vocabulary. It rounds and
 * packs each of its tiles of w once for all tokens of the chunk, in two orders: one for the logits,
 * one for dx. */
#ifndef LLMC_BACKEND_CPU_CLASSIFIER_BF16_H
#define LLMC_BACKEND_CPU_CLASSIFIER_BF16_H

#include "llmc/backend/cpu/vector_math.h"
#include "llmc/backend/cpu/packed.h"
#include "llmc/backend/cpu/softmax.h"
#include "llmc/backend/cpu/working.h"

struct classifier {
    int C, V;
    int tile, tiles, segments, tiles_per_segment;
    int parts; /* a segment's work is cut for so many threads; results do not depend on it */
    bool backward;
    const float *w;
    /* of the chunk */
    int n;                 /* tokens */
    const element *x;      /* (n, C) */
    const int32_t *target; /* (n) */
    struct packed tokens;  /* x (n, C) */
    struct packed e;       /* (V, n) */
    float *offset;         /* (tiles, n): e = exp(logit - offset) */
    float *segment_offset; /* (segments, n): the offset that sum and dx refer to */
    float *sum;            /* (segments, n) */
    float *dx;             /* (segments, n, C): e w */
    float *target_logit;   /* (n) */
    float *max, *factor;   /* (n): scale * softmax = factor exp(logit - max) */
};

static int classifier_words(const struct classifier *c, int tile) {
    return min_int(c->tile, c->V - tile * c->tile);
}

/* Working memory of a task: a tile of w in both orders, a tile of logits and of e by tokens. */
struct classifier_memory {
    struct packed words, columns, by_token;
    float *logits;
};

static size_t classifier_task_place(struct classifier_memory *m, const struct classifier *c,
                                    char *memory) {
    struct cutter from = {memory, 0};
    m->words = cut_packed(&from, c->tile, c->C);
    m->columns = cut_packed(&from, c->C, c->tile);
    m->by_token = cut_packed(&from, CLASSIFIER_ROWS, c->tile);
    m->logits = cut_floats(&from, (size_t)c->tile, CLASSIFIER_ROWS);
    return from.used;
}

/* Computes a tile of words for tokens first .. first + n - 1 of the chunk. `starts`: it is the
 * first tile of its segment. */
static void classifier_forward_block(const struct classifier *c, const struct classifier_memory *m,
                                     int segment, int tile, bool starts, int first, int n) {
    const int C = c->C, ld = CLASSIFIER_ROWS, word = tile * c->tile;
    const int words = classifier_words(c, tile);
    float *e = m->logits, *offset = c->segment_offset + (size_t)segment * c->n + first;
    float *sum = c->sum + (size_t)segment * c->n + first;
    float *dx = c->backward ? c->dx + ((size_t)segment * c->n + first) * C : NULL;
    product((struct target){.floats = e, .ld = (size_t)ld}, words, n, C, m->words,
            packed_part(c->tokens, first, 0));
    for (int j = 0; j < n; j++) {
        int target = c->target[first + j] - word;
        if (target >= 0 && target < words) c->target_logit[first + j] = e[(size_t)target * ld + j];
    }
    for (int j = 0; j < n && starts; j++) sum[j] = 0;
    classifier_raise_offset(e, words, ld, n, starts, offset, sum, dx, C);
    if (!c->backward) {
        classifier_exp(e, words, ld, n, offset, sum);
        return;
    }
    memcpy(c->offset + (size_t)tile * c->n + first, offset, (size_t)n * sizeof(float));
    pack_exponentials(packed_part(c->e, word, first), m->by_token, e, (size_t)ld, words, n, offset,
                      sum);
    product((struct target){.floats = dx, .ld = (size_t)C, .add = !starts}, n, C, words,
            m->by_token, m->columns);
}

/* Computes one segment of the vocabulary for a part of the chunk's tokens. */
static void classifier_forward_task(const struct classifier *c, int segment, int part) {
    const int first_tile = segment * c->tiles_per_segment;
    const int last_tile = min_int(first_tile + c->tiles_per_segment, c->tiles);
    const int blocks = ceil_div(c->n, CLASSIFIER_ROWS), some = ceil_div(blocks, c->parts);
    const int end = min_int((part + 1) * some * CLASSIFIER_ROWS, c->n);
    struct classifier_memory m;
    const size_t bytes = classifier_task_place(&m, c, NULL);
    classifier_task_place(&m, c, (char *)cpu_scratch(SCRATCH_TASK, bytes));
    for (int tile = first_tile; tile < last_tile; tile++) {
        const float *rows = c->w + (size_t)tile * c->tile * c->C;
        struct source w = {rows, (size_t)c->C, true, false};
        pack(m.words, LEFT, w, classifier_words(c, tile), c->C);
        w.columns = true;
        if (c->backward) pack(m.columns, RIGHT, w, c->C, classifier_words(c, tile));
        for (int row = part * some * CLASSIFIER_ROWS; row < end; row += CLASSIFIER_ROWS)
            classifier_forward_block(c, &m, segment, tile, tile == first_tile, row,
                                     min_int(CLASSIFIER_ROWS, end - row));
    }
}

/* Combines the segments of one token into its loss and its dx. */
static void classifier_combine(const struct classifier *c, int j, float scale, float *loss,
                               element *dx) {
    double total;
    const float max =
        classifier_total(c->segment_offset + j, c->sum + j, c->segments, c->n, &total);
    c->max[j] = max;
    c->factor[j] = (float)(scale / total);
    *loss = (float)(max - c->target_logit[j] + log(total));
    if (!c->backward) return;
    const float *target = c->w + (size_t)c->target[j] * c->C;
    float *sum = c->dx + (size_t)j * c->C; /* dx of the first segment */
    float factor = c->factor[j] * expf(c->segment_offset[j] - max);
#pragma omp simd
    for (int i = 0; i < c->C; i++) sum[i] = factor * sum[i] - scale * widen(narrow(target[i]));
    for (int s = 1; s < c->segments; s++) {
        size_t at = (size_t)s * c->n + j;
        const float *part = c->dx + at * c->C;
        factor = c->factor[j] * expf(c->segment_offset[at] - max);
#pragma omp simd
        for (int i = 0; i < c->C; i++) sum[i] += factor * part[i];
    }
#pragma omp simd
    for (int i = 0; i < c->C; i++) dx[i] = narrow(sum[i]);
}

/* Packs x (n, C) times factor exp(offset - max); `scaled` is scratch. */
static void classifier_pack_scaled(const struct classifier *c, const float *offset, float *scaled,
                                   struct packed to) {
    for (int j = 0; j < c->n; j++) {
        const float factor = c->factor[j] * expf(offset[j] - c->max[j]);
        const element *x = c->x + (size_t)j * c->C;
        float *row = scaled + (size_t)j * c->C;
#pragma omp simd
        for (int i = 0; i < c->C; i++) row[i] = factor * widen(x[i]);
    }
    pack(to, RIGHT, (struct source){scaled, (size_t)c->C, true, true}, c->C, c->n);
}

/* Computes dw of a part of a segment's tiles. Offsets seldom change from tile to tile. */
static void classifier_weight_task(const struct classifier *c, int segment, int part, float scale,
                                   bool accumulate, float *dw) {
    const int C = c->C, some = ceil_div(c->tiles_per_segment, c->parts);
    const int first = segment * c->tiles_per_segment, begin = first + part * some;
    const int end = min_int(min_int(begin + some, first + c->tiles_per_segment), c->tiles);
    const size_t floats = ((size_t)c->n * C * sizeof(float) + 63) / 64 * 64;
    char *scratch = (char *)cpu_scratch(SCRATCH_TASK, floats + packed_bytes(C, c->n));
    const struct packed right = packed_at(scratch + floats, c->n);
    for (int tile = begin; tile < end; tile++) {
        const int word = tile * c->tile, words = classifier_words(c, tile);
        const float *offset = c->offset + (size_t)tile * c->n;
        if (tile == begin || memcmp(offset, offset - c->n, (size_t)c->n * sizeof(float)) != 0)
            classifier_pack_scaled(c, offset, (float *)scratch, right);
        product((struct target){dw + (size_t)word * C, NULL, (size_t)C, accumulate}, words, C, c->n,
                packed_part(c->e, word, 0), right);
        for (int j = 0; j < c->n; j++) {
            const int target = c->target[j];
            if (target < word || target >= word + words) continue;
            const element *x = c->x + (size_t)j * C;
            float *row = dw + (size_t)target * C;
#pragma omp simd
            for (int i = 0; i < C; i++) row[i] -= scale * widen(x[i]);
        }
    }
}

/* Lays out the working memory for chunks of up to n tokens. With memory NULL it only counts. */
static size_t classifier_place(struct classifier *c, int n, char *memory) {
    const size_t segments = (size_t)c->segments, tokens = (size_t)n;
    struct cutter from = {memory, 0};
    c->tokens = cut_packed(&from, n, c->C);
    if (c->backward) {
        c->e = cut_packed(&from, c->V, n);
        c->dx = cut_floats(&from, segments * tokens, (size_t)c->C);
    }
    c->offset = cut_floats(&from, (size_t)c->tiles, tokens);
    c->segment_offset = cut_floats(&from, segments, tokens);
    c->sum = cut_floats(&from, segments, tokens);
    c->target_logit = cut_floats(&from, 1, tokens);
    c->max = cut_floats(&from, 1, tokens);
    c->factor = cut_floats(&from, 1, tokens);
    return from.used;
}

static void classifier(float *losses, tensor *dx_, float *dw, const tensor *x_, const weight *w,
                       const int32_t *targets, int N, int C, int V, float scale, bool accumulate) {
    element *dx = (element *)dx_;
    struct classifier c = {.C = C, .V = V, .backward = dx != NULL, .w = (const float *)w};
    c.tile = cpu_working_tile_bf16(C);
    c.tiles = ceil_div(V, c.tile);
    c.tiles_per_segment = ceil_div(c.tiles, CLASSIFIER_SEGMENTS);
    c.segments = ceil_div(c.tiles, c.tiles_per_segment);
    c.parts = omp_in_parallel() ? 1 : ceil_div(2 * omp_get_max_threads(), c.segments);
    int chunk = ceil_div(N, ceil_div(N, CLASSIFIER_CHUNK_BF16));
    char *memory = (char *)cpu_scratch(SCRATCH_OPERATION, classifier_place(&c, chunk, NULL));
    classifier_place(&c, chunk, memory);
    for (int first = 0; first < N; first += chunk) {
        c.n = min_int(chunk, N - first);
        c.x = (const element *)x_ + (size_t)first * C;
        c.target = targets + first;
        PARALLEL_FOR
        for (int row = 0; row < c.n; row += PACK_ROWS)
            pack(packed_part(c.tokens, row, 0), RIGHT,
                 (struct source){c.x + (size_t)row * C, (size_t)C, false, false},
                 min_int(PACK_ROWS, c.n - row), C);
        PARALLEL_FOR_DYNAMIC
        for (int task = 0; task < c.segments * c.parts; task++)
            classifier_forward_task(&c, task / c.parts, task % c.parts);
        PARALLEL_FOR
        for (int j = 0; j < c.n; j++)
            classifier_combine(&c, j, scale, losses + first + j,
                               dx ? dx + (size_t)(first + j) * C : NULL);
        if (!c.backward) continue;
        PARALLEL_FOR_DYNAMIC
        for (int task = 0; task < c.segments * c.parts; task++)
            classifier_weight_task(&c, task / c.parts, task % c.parts, scale,
                                   accumulate || first > 0, dw);
    }
}

#endif
