/* tensors.c — see tensors.h. */
#include "llmc/model/tensors.h"

#include <stdio.h>

size_t model_tensor_count(const struct llama_config *config) {
    return (size_t)config->layers * MODEL_TENSORS_PER_LAYER + 2 + (config->tied ? 0 : 1);
}

size_t model_tensor_elements(const struct named_tensor *tensor) {
    return (size_t)tensor->shape[0] * (size_t)tensor->shape[1];
}

static void set(struct named_tensor *tensor, int layer, const char *name, int rows, int columns) {
    if (layer < 0)
        snprintf(tensor->name, sizeof tensor->name, "%s.weight", name);
    else
        snprintf(tensor->name, sizeof tensor->name, "model.layers.%d.%s.weight", layer, name);
    tensor->dims = columns ? 2 : 1;
    tensor->shape[0] = rows;
    tensor->shape[1] = columns ? columns : 1;
    tensor->shard = 0;
    tensor->data = NULL;
}

void model_tensors(const struct llama_config *c, struct named_tensor *t) {
    int C = c->width, F = c->hidden, query = c->heads * c->head_size,
        key = c->kv_heads * c->head_size;
    set(t++, -1, "model.embed_tokens", c->vocabulary, C);
    for (int l = 0; l < c->layers; l++) {
        set(t++, l, "input_layernorm", C, 0);
        set(t++, l, "self_attn.q_proj", query, C);
        set(t++, l, "self_attn.k_proj", key, C);
        set(t++, l, "self_attn.v_proj", key, C);
        set(t++, l, "self_attn.o_proj", C, query);
        set(t++, l, "post_attention_layernorm", C, 0);
        set(t++, l, "mlp.gate_proj", F, C);
        set(t++, l, "mlp.up_proj", F, C);
        set(t++, l, "mlp.down_proj", C, F);
    }
    set(t++, -1, "model.norm", C, 0);
    if (!c->tied) set(t++, -1, "lm_head", c->vocabulary, C);
}
