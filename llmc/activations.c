/* activations.c — see activations.h. */
#include "llmc/activations.h"
#include "llmc/report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Lays the arrays out one behind the other, each at a multiple of 64 bytes. With base NULL it only
 * counts. Returns the bytes in all. */
static size_t activations_place(struct activations *a, const struct llama_config *c, size_t element,
                                bool training, char *base) {
    const size_t N = (size_t)a->B * a->T, C = (size_t)c->width, F = (size_t)c->hidden;
    const size_t HD = (size_t)c->heads * c->head_size;
    const size_t QKV = HD + 2 * (size_t)c->kv_heads * c->head_size;
    const size_t D2 = (size_t)c->head_size / 2;
    size_t used = 0;
#define PLACE(field, type, bytes)                                                                  \
    do {                                                                                           \
        if (base) (field) = (type *)(base + used);                                                 \
        used = (used + (bytes) + 63) & ~(size_t)63;                                                \
    } while (0)
    for (int l = 0; l < c->layers; l++) {
        /* Without a backward pass all layers share the first one's arrays. */
        if (!training && l > 0) {
            if (base) a->layer[l] = a->layer[0];
            continue;
        }
        PLACE(a->layer[l].residual, tensor, N * C * element);
        PLACE(a->layer[l].attention_norm, tensor, N * C * element);
        PLACE(a->layer[l].attention_rstd, float, N * sizeof(float));
        PLACE(a->layer[l].qkv, tensor, N * QKV * element);
        PLACE(a->layer[l].attention, tensor, N * HD * element);
        PLACE(a->layer[l].log_sum_exp, float, N *(size_t)c->heads * sizeof(float));
        PLACE(a->layer[l].middle, tensor, N * C * element);
        PLACE(a->layer[l].mlp_norm, tensor, N * C * element);
        PLACE(a->layer[l].mlp_rstd, float, N * sizeof(float));
        PLACE(a->layer[l].gate_up, tensor, N * 2 * F * element);
        PLACE(a->layer[l].swiglu, tensor, N * F * element);
    }
    PLACE(a->last, tensor, N * C * element);
    PLACE(a->last_norm, tensor, N * C * element);
    PLACE(a->last_rstd, float, N * sizeof(float));
    PLACE(a->losses, float, N * sizeof(float));
    PLACE(a->projected, tensor, N * C * element);
    PLACE(a->tokens, int32_t, N * sizeof(int32_t));
    PLACE(a->targets, int32_t, N * sizeof(int32_t));
    PLACE(a->cosine, float, (size_t)a->T *D2 * sizeof(float));
    PLACE(a->sine, float, (size_t)a->T *D2 * sizeof(float));
    if (training) {
        PLACE(a->dresidual, tensor, N * C * element);
        PLACE(a->dnorm, tensor, N * C * element);
        PLACE(a->dqkv, tensor, N * QKV * element);
        PLACE(a->dattention, tensor, N * HD * element);
        PLACE(a->dgate_up, tensor, N * 2 * F * element);
        PLACE(a->dswiglu, tensor, N * F * element);
    }
#undef PLACE
    return used;
}

size_t activations_bytes(const struct llama_config *config, size_t element_bytes, int B, int T,
                         bool training) {
    struct activations a;
    memset(&a, 0, sizeof a);
    a.B = B;
    a.T = T;
    return activations_place(&a, config, element_bytes, training, NULL);
}

void activations_release(struct activations *a, const struct backend *be) {
    be->release(a->memory);
    be->release(a->cache);
    free(a->layer);
    memset(a, 0, sizeof *a);
}

int activations_add_cache(struct activations *a, const struct llama_config *c,
                          const struct backend *be) {
    const size_t width = ((size_t)c->heads + 2 * (size_t)c->kv_heads) * (size_t)c->head_size;
    const size_t bytes = (size_t)a->B * a->T * width * be->element_bytes;
    a->cache = be->allocate(bytes * (size_t)c->layers);
    if (!a->cache)
        return report_out_of_memory("keys and values", (double)bytes * (double)c->layers);
    for (int l = 0; l < c->layers; l++) {
        a->layer[l].qkv = (tensor *)((char *)a->cache + bytes * (size_t)l);
    }
    return 0;
}

bool activations_remember(const struct activations *a, const struct llama_config *c,
                          const struct backend *be) {
    return be->attention_continue && (c->layers == 1 || a->layer[0].qkv != a->layer[1].qkv);
}

int activations_allocate(struct activations *a, const struct llama_config *c,
                         const struct backend *be, int B, int T, bool training) {
    memset(a, 0, sizeof *a);
    a->B = B;
    a->T = T;
    size_t bytes = activations_place(a, c, be->element_bytes, training, NULL);
    a->layer = (struct layer_activations *)calloc((size_t)c->layers, sizeof *a->layer);
    a->memory = be->allocate(bytes);
    if (!a->layer || !a->memory) {
        activations_release(a, be);
        return report_out_of_memory("activations (a smaller --batch or --seq needs less)",
                                    (double)bytes);
    }
    activations_place(a, c, be->element_bytes, training, (char *)a->memory);
    const int D2 = c->head_size / 2;
    for (int t = 0; t < T; t++) {
        for (int i = 0; i < D2; i++) {
            double angle = t * pow(c->rope_theta, -2.0 * i / c->head_size);
            a->cosine[t * D2 + i] = (float)cos(angle);
            a->sine[t * D2 + i] = (float)sin(angle);
        }
    }
    return 0;
}
