/* param_layout.c — see param_layout.h. */
#include "llmc/model/param_layout.h"
#include "llmc/util/random.h"
#include "llmc/log/error.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t layout_place(struct param_layout *l, size_t count, bool decay, int bucket) {
    struct span span = {l->count, count, decay, 0, 0};
    l->span[l->spans++] = span;
    l->bucket_elements[bucket] += count;
    l->count += count;
    return span.offset;
}

static size_t place_matrix(struct param_layout *l, size_t rows, size_t cols, int bucket) {
    const size_t offset = layout_place(l, rows * cols, true, bucket);
    l->span[l->spans - 1].rows = (int)rows;
    l->span[l->spans - 1].cols = (int)cols;
    return offset;
}

void param_layout_release(struct param_layout *l) {
    free(l->layer);
    free(l->span);
    free(l->bucket_elements);
    free(l->shard_elements);
    memset(l, 0, sizeof *l);
}

int param_layout_build(const struct llama_config *c, struct param_layout *l) {
    const size_t C = (size_t)c->width, F = (size_t)c->hidden, V = (size_t)c->vocabulary;
    const size_t HD = (size_t)c->heads * c->head_size, KD = (size_t)c->kv_heads * c->head_size;
    memset(l, 0, sizeof *l);
    l->config = *c;
    l->buckets = c->layers + 1 + !c->tied;
    l->layer = calloc((size_t)c->layers, sizeof *l->layer);
    l->span = calloc((size_t)c->layers * MODEL_TENSORS_PER_LAYER + 3, sizeof *l->span);
    l->bucket_elements = calloc((size_t)l->buckets, sizeof *l->bucket_elements);
    if (!l->layer || !l->span || !l->bucket_elements) {
        param_layout_release(l);
        return log_out_of_memory("the layout", 0);
    }
    int bucket = 0;
    if (!c->tied) l->classifier = layout_place(l, V * C, true, bucket++);
    l->final_norm = layout_place(l, C, false, bucket);
    for (int i = c->layers - 1; i >= 0; i--, bucket++) {
        struct layer_offsets *o = &l->layer[i];
        o->attention_norm = layout_place(l, C, false, bucket);
        o->qkv = place_matrix(l, HD, C, bucket);
        place_matrix(l, KD, C, bucket);
        place_matrix(l, KD, C, bucket);
        o->attention_out = place_matrix(l, C, HD, bucket);
        o->mlp_norm = layout_place(l, C, false, bucket);
        o->gate_up = place_matrix(l, F, C, bucket);
        place_matrix(l, F, C, bucket);
        o->down = place_matrix(l, C, F, bucket);
    }
    l->embedding = layout_place(l, V * C, true, bucket);
    if (c->tied) l->classifier = l->embedding;
    return 0;
}

int param_layout_bucket_of_layer(const struct param_layout *l, int layer) {
    return l->config.layers - 1 - layer + !l->config.tied;
}

size_t param_layout_bucket_offset(const struct param_layout *l, int bucket) {
    size_t offset = 0;
    for (int b = 0; b < bucket; b++) offset += l->bucket_elements[b];
    return offset;
}

static size_t largest(const struct param_layout *layout, int buckets) {
    size_t most = 0;
    for (int b = 0; b < buckets; b++)
        if (layout->bucket_elements[b] > most) most = layout->bucket_elements[b];
    return most;
}

size_t param_layout_largest_bucket(const struct param_layout *layout) {
    return largest(layout, layout->buckets);
}

/* The size of the largest bucket that has a slot. */
size_t param_layout_gradient_slot(const struct param_layout *layout) {
    return largest(layout, layout->buckets - (layout->config.tied ? 1 : 0));
}

size_t param_layout_gradient_elements(const struct param_layout *layout, int slots) {
    const size_t table = layout->config.tied ? layout->bucket_elements[layout->buckets - 1] : 0;
    return slots ? (size_t)slots * param_layout_gradient_slot(layout) + table : layout->count;
}

size_t param_layout_gradient_at(const struct param_layout *layout,
                                const struct gradient_place *place, size_t offset) {
    if (!place->slots) return offset;
    int bucket = 0;
    for (size_t n; offset >= (n = layout->bucket_elements[bucket]); bucket++) offset -= n;
    const bool apart = layout->config.tied && bucket == layout->buckets - 1;
    return (size_t)(apart ? place->slots : bucket % place->slots) * place->slot + offset;
}

float *param_layout_gradient(const struct param_layout *layout, const struct gradient_place *place,
                             size_t offset) {
    return place->first + param_layout_gradient_at(layout, place, offset);
}

int param_layout_squares(const struct param_layout *l, const struct range *range, size_t ranges,
                         struct ranges *out) {
    for (const struct range *r = range; r < range + ranges; r++)
        for (const struct span *s = l->span; s < l->span + l->spans; s++) {
            struct range part = range_common((struct range){s->offset, s->count, 0}, *r);
            struct range *last = out->count ? &out->range[out->count - 1] : NULL;
            part.state = out->elements;
            if (!part.count || (l->shard_elements && s->rows)) continue;
            if (last && last->offset + last->count == part.offset)
                last->count += part.count, out->elements += part.count;
            else if (ranges_add(out, part))
                return -1;
        }
    return 0;
}

/* In the order of model_tensors, which a layer's spans have, too. */
void param_layout_tensors(const struct param_layout *l, float *vector,
                          struct named_tensor *tensors) {
    const int layers = l->config.layers, before = 1 + !l->config.tied; /* spans before layers */
    struct named_tensor *t = tensors;
    model_tensors(&l->config, tensors);
    (t++)->data = vector + l->embedding;
    for (int i = layers - 1; i >= 0; i--) {
        const struct span *s = l->span + before + i * MODEL_TENSORS_PER_LAYER;
        for (int k = 0; k < MODEL_TENSORS_PER_LAYER; k++) (t++)->data = vector + s[k].offset;
    }
    (t++)->data = vector + l->final_norm;
    if (!l->config.tied) t->data = vector + l->classifier;
}

struct named_tensor *param_layout_tensor_list(const struct param_layout *l, float *vector,
                                              size_t *count) {
    *count = model_tensor_count(&l->config);
    struct named_tensor *tensors = calloc(*count, sizeof *tensors);
    if (tensors)
        param_layout_tensors(l, vector, tensors);
    else
        log_out_of_memory("the list of tensors", (double)(*count * sizeof *tensors));
    return tensors;
}

void param_layout_name(const struct param_layout *l, size_t offset, char name[96]) {
    static float vector[1]; /* for its address alone */
    size_t count;
    struct named_tensor *tensors = param_layout_tensor_list(l, vector, &count);
    snprintf(name, 96, "element %zu", offset);
    for (size_t i = 0; tensors && i < count; i++) {
        const size_t first = ((uintptr_t)tensors[i].data - (uintptr_t)vector) / sizeof *vector;
        if (offset >= first && offset - first < model_tensor_elements(&tensors[i]))
            snprintf(name, 96, "%s", tensors[i].name);
    }
    free(tensors);
}

struct named_tensor *param_layout_bucket_tensors(const struct param_layout *layout, int bucket,
                                                 float *elements, size_t *count) {
    const uintptr_t first = (uintptr_t)elements;
    const uintptr_t end = first + layout->bucket_elements[bucket] * sizeof *elements;
    const uintptr_t before = param_layout_bucket_offset(layout, bucket) * sizeof *elements;
    struct named_tensor *tensors =
        param_layout_tensor_list(layout, (float *)(first - before), count);
    for (size_t i = 0; tensors && i < *count; i++)
        if ((uintptr_t)tensors[i].data < first || (uintptr_t)tensors[i].data >= end)
            tensors[i].data = NULL;
    return tensors;
}

void param_layout_initialise(const struct param_layout *l, uint64_t seed, int bucket,
                             float *vector) {
    size_t begin = 0, end = l->count;
    if (bucket != LAYOUT_ALL) {
        begin = param_layout_bucket_offset(l, bucket);
        end = begin + l->bucket_elements[bucket];
    }
    const double residual = 0.02 / sqrt(2.0 * l->config.layers);
    const uint64_t key = random_bits(seed, 0x77656967687473u /* "weights" */);
    for (int s = 0; s < l->spans; s++) {
        struct span span = l->span[s];
        if (span.offset < begin || span.offset >= end) continue;
        double deviation = 0.02;
        for (int i = 0; i < l->config.layers; i++) {
            const struct layer_offsets *o = &l->layer[i];
            if (span.offset == o->attention_out || span.offset == o->down) deviation = residual;
        }
#pragma omp parallel for
        for (size_t e = span.offset; e < span.offset + span.count; e++) {
            vector[e - begin] = span.decay ? (float)(deviation * random_normal(key, e)) : 1;
        }
    }
}
