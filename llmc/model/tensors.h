/* tensors.h — the parameters of a model as a list of tensors, under Hugging Face's names. */
#ifndef LLMC_MODEL_TENSORS_H
#define LLMC_MODEL_TENSORS_H

#include <stddef.h>

#include "llmc/model/config.h"

/* One parameter of the model. The caller decides where its data lies. */
struct named_tensor {
    char name[96]; /* Hugging Face's */
    int shape[2];  /* matrices (out, in); vectors (length) with shape[1] = 1 */
    int dims;      /* 2 or 1 */
    int shard;     /* number of the shard that contains it, from 0 on */
    float *data;   /* shape[0] * shape[1] float32, row-major; the caller's memory */
};

enum { MODEL_TENSORS_PER_LAYER = 9 };

/* Number of tensors of a checked config: those of layers, the embedding, the last norm, and lm_head
 * unless it is tied. */
size_t model_tensor_count(const struct llama_config *config);

/* Fills tensors[model_tensor_count(config)] with names and shapes, data = NULL, shard = 0, in
 * the order
 *     model.embed_tokens.weight                                      (V, C)
 *     model.layers.%d.input_layernorm.weight                         (C)
 *     model.layers.%d.self_attn.{q,k,v}_proj.weight                  (H*D, C), (K*D, C), (K*D, C)
 *     model.layers.%d.self_attn.o_proj.weight                        (C, H*D)
 *     model.layers.%d.post_attention_layernorm.weight                (C)
 *     model.layers.%d.mlp.{gate,up}_proj.weight, mlp.down_proj.weight   (F, C), (F, C), (C, F)
 *     model.norm.weight                                              (C)
 *     lm_head.weight, unless tied                                    (V, C) */
void model_tensors(const struct llama_config *config, struct named_tensor *tensors);

/* The number of elements of a tensor. */
size_t model_tensor_elements(const struct named_tensor *tensor);

#endif
