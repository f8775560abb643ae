/* activations.c — see activations.h. */
#include "llmc/model/activations.h"
#include "llmc/log/error.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *const recompute_names[] = {"none", "norms", "attention", "block", "auto", NULL};

/* Places the arrays one after another, each at a multiple of 64 bytes. With base NULL it only
 * counts. Returns the total number of bytes. */
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
        /* Without a backward pass all layers share the arrays of the first one. */
        if (base && l > 0) a->layer[l] = a->layer[0];
        if (!training && l > 0) continue;
        PLACE(a->layer[l].residual, tensor, N * C * element);
        if (l > 0 && a->recompute >= RECOMPUTE_BLOCK) continue;
        PLACE(a->layer[l].middle, tensor, N * C * element);
        PLACE(a->layer[l].mlp_rstd, float, N * sizeof(float));
        PLACE(a->layer[l].gate_up, tensor, N * 2 * F * element);
        PLACE(a->layer[l].attention_rstd, float, N * sizeof(float));
        if (l > 0 && a->recompute >= RECOMPUTE_ATTENTION) continue;
        PLACE(a->layer[l].qkv, tensor, N * QKV * element);
        PLACE(a->layer[l].attention, tensor, N * HD * element);
        PLACE(a->layer[l].log_sum_exp, float, N *(size_t)c->heads * sizeof(float));
        if (l > 0 && a->recompute >= RECOMPUTE_NORMS) continue;
        PLACE(a->layer[l].attention_norm, tensor, N * C * element);
        PLACE(a->layer[l].mlp_norm, tensor, N * C * element);
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
                         bool training, enum recompute recompute) {
    struct activations a;
    memset(&a, 0, sizeof a);
    a.B = B;
    a.T = T;
    a.recompute = recompute;
    return activations_place(&a, config, element_bytes, training, NULL);
}

void activations_release(struct activations *a, const struct backend *be) {
    be->release(a->memory);
    be->release(a->cache);
    free(a->layer);
    if (be->on_device) {
        free(a->host_tokens);
        free(a->host_targets);
        be->release_pinned(a->host_losses.copy);
    } else {
        free(a->host_losses.copy);
    }
    memset(a, 0, sizeof *a);
}

int activations_add_cache(struct activations *a, const struct llama_config *c,
                          const struct backend *be) {
    const size_t width = ((size_t)c->heads + 2 * (size_t)c->kv_heads) * (size_t)c->head_size;
    const size_t bytes = (size_t)a->B * a->T * width * be->element_bytes;
    if (!be->attention_continue) return 0;
    a->cache = be->allocate(bytes * (size_t)c->layers);
    if (!a->cache) return log_out_of_memory("keys and values", (double)bytes * (double)c->layers);
    for (int l = 0; l < c->layers; l++) {
        a->layer[l].qkv = (tensor *)((char *)a->cache + bytes * (size_t)l);
    }
    return 0;
}

bool activations_remember(const struct activations *a, const struct llama_config *c,
                          const struct backend *be) {
    return be->attention_continue && (c->layers == 1 || a->layer[0].qkv != a->layer[1].qkv);
}

/* Radians that rotation i of D/2 turns per position. Llama 3's scaling: transformers,
 * modeling_rope_utils.py, _compute_llama3_parameters. */
static double rotation(const struct llama_config *c, size_t i) {
    const struct rope_scaling *s = &c->rope_scaling;
    const double plain = pow(c->rope_theta, -2.0 * (double)i / c->head_size);
    if (!s->factor) return plain;
    const double turns = s->original * plain / (2 * 3.14159265358979323846);
    const double fast = fmin(fmax((turns - s->low) / (s->high - s->low), 0), 1);
    return fast * plain + (1 - fast) * plain / s->factor;
}

/* The host computes the rotary angles. */
static int place_angles(struct activations *a, const struct llama_config *c,
                        const struct backend *be) {
    const size_t D2 = (size_t)c->head_size / 2, count = (size_t)a->T * D2;
    float *angles = malloc(2 * (count ? count : 1) * sizeof *angles);
    if (!angles) return log_out_of_memory("rotary angles", 2.0 * count * sizeof *angles);
    for (size_t i = 0; i < count; i++) {
        double angle = (double)(i / D2) * rotation(c, i % D2);
        angles[i] = (float)cos(angle);
        angles[count + i] = (float)sin(angle);
    }
    be->upload(a->cosine, angles, count * sizeof *angles);
    be->upload(a->sine, angles + count, count * sizeof *angles);
    free(angles);
    return 0;
}

static int place_on_host(struct activations *a, const struct backend *be) {
    const size_t N = (size_t)a->B * a->T;
    a->host_tokens = a->tokens;
    a->host_targets = a->targets;
    const size_t losses = BACKEND_LOSS_MARKS * N * sizeof(float);
    a->host_losses.copy = (float *)(be->on_device ? be->allocate_pinned(losses) : malloc(losses));
    if (!a->host_losses.copy) return log_out_of_memory("losses", (double)losses);
    if (!be->on_device) return 0;
    a->host_tokens = calloc(N, sizeof *a->host_tokens);
    a->host_targets = calloc(N, sizeof *a->host_targets);
    if (a->host_tokens && a->host_targets) return 0;
    return log_out_of_memory("tokens", 8.0 * (double)N);
}

int activations_allocate(struct activations *a, const struct llama_config *c,
                         const struct backend *be, int B, int T, bool training,
                         enum recompute recompute) {
    memset(a, 0, sizeof *a);
    a->B = B;
    a->T = T;
    a->recompute = recompute;
    size_t bytes = activations_place(a, c, be->element_bytes, training, NULL);
    a->layer = calloc((size_t)c->layers, sizeof *a->layer);
    a->memory = be->allocate(bytes);
    if (!a->layer || !a->memory) {
        activations_release(a, be);
        return log_out_of_memory("activations (a smaller --batch or --seq needs less)",
                                 (double)bytes);
    }
    activations_place(a, c, be->element_bytes, training, (char *)a->memory);
    if (place_on_host(a, be) || place_angles(a, c, be)) {
        activations_release(a, be);
        return -1;
    }
    return 0;
}

void activations_send(struct activations *a, const struct backend *be, int n) {
    if (!be->on_device) return;
    be->upload(a->tokens, a->host_tokens, (size_t)n * sizeof *a->tokens);
    be->upload(a->targets, a->host_targets, (size_t)n * sizeof *a->targets);
}

_Static_assert(UINT32_MAX % BACKEND_LOSS_MARKS == BACKEND_LOSS_MARKS - 1,
               "passes must use marks in turn where their number begins at 0 again");

static float *copy_of_losses(const struct activations *a, uint32_t pass) {
    return a->host_losses.copy + (size_t)(pass % BACKEND_LOSS_MARKS) * a->B * a->T;
}

static int mark_of(const struct loss_copies *losses, uint32_t pass) {
    return BACKEND_MARKS + losses->set * BACKEND_LOSS_MARKS + (int)(pass % BACKEND_LOSS_MARKS);
}

/* On a device, the next pass waits until its losses may be written. */
void activations_send_losses(struct activations *a, const struct backend *be, int n) {
    const int mark = mark_of(&a->host_losses, a->host_losses.sent);
    float *copy = copy_of_losses(a, a->host_losses.sent++);
    if (!be->on_device) {
        memcpy(copy, a->losses, (size_t)n * sizeof *copy);
        return;
    }
    be->d2h_async(copy, a->losses, (size_t)n * sizeof *copy);
    be->d2h_mark(mark);
    be->d2h_order_mark(mark);
}

const float *activations_read_losses(struct activations *a, const struct backend *be) {
    const uint32_t pass = a->host_losses.read++;
    if (be->on_device) be->d2h_wait_mark(mark_of(&a->host_losses, pass));
    return copy_of_losses(a, pass);
}

const float *activations_losses(struct activations *a, const struct backend *be, int n) {
    activations_send_losses(a, be, n);
    return activations_read_losses(a, be);
}
