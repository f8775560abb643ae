/* hf_model.h — a model on disk is a Hugging Face directory:
 *
 *     config.json        the shape (config.h)
 *     model.safetensors  the parameters, float32, under Hugging Face's names
 *     tokenizer.model    the SentencePiece model, where there is one
 *     trainer.json, optimizer-*.safetensors   the rest of a training run's state (resume.h)
 *
 * so that LlamaForCausalLM.from_pretrained(DIR) reads what hf_model_write wrote, and the other
 * way round.
 */
#ifndef LLMC_CHECKPOINT_HF_MODEL_H
#define LLMC_CHECKPOINT_HF_MODEL_H

#include <stdbool.h>
#include <stddef.h>

#include "llmc/model/config.h"
#include "llmc/util/file.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One parameter of the model. The main program decides where its floats live. */
struct named_tensor {
    char name[96]; /* Hugging Face's */
    int shape[2];  /* matrices (out, in); vectors (length) with shape[1] = 1 */
    int dims;      /* 2 or 1 */
    float *data;   /* shape[0] * shape[1] float32, row-major; the caller's memory */
};

/* Number of tensors of a checked config: 9 per layer, the embedding, the last norm, and lm_head
 * unless it is tied. */
size_t hf_model_tensor_count(const struct llama_config *config);

/* Fills tensors[hf_model_tensor_count(config)] with names and shapes, data = NULL, in the order
 *     model.embed_tokens.weight                                      (V, C)
 *     model.layers.%d.input_layernorm.weight                         (C)
 *     model.layers.%d.self_attn.{q,k,v}_proj.weight                  (H*D, C), (K*D, C), (K*D, C)
 *     model.layers.%d.self_attn.o_proj.weight                        (C, H*D)
 *     model.layers.%d.post_attention_layernorm.weight                (C)
 *     model.layers.%d.mlp.{gate,up}_proj.weight, mlp.down_proj.weight   (F, C), (F, C), (C, F)
 *     model.norm.weight                                              (C)
 *     lm_head.weight, unless tied                                    (V, C) */
void hf_model_tensors(const struct llama_config *config, struct named_tensor *tensors);

/* The number of elements of a tensor. */
size_t hf_model_tensor_elements(const struct named_tensor *tensor);

/* Writes a checkpoint. tensors: those of hf_model_tensors(config), any order, data filled in.
 * tokenizer_path: copied to DIR/tokenizer.model; NULL for none. Everything is written and synced
 * under DIR.partial and then renamed, so that DIR is at every moment the old checkpoint or the new
 * one, whole. Parents of DIR must exist. An older checkpoint at DIR is replaced; a directory that
 * holds anything else is not touched and is an error. One writer at a time per DIR.
 * Returns 0, or -1 after reporting. */
int hf_model_write(const char *directory, const struct llama_config *config,
                   const struct named_tensor *tensors, size_t count, const char *tokenizer_path);

/* The same in parts, for a writer that adds its own files (async_writer.c). `begin` creates an
 * empty directory, and `partial` returns its name. `write_files` writes the model's files into
 * it. `commit` syncs it and renames it to DIR. `abandon` removes it. The writer's own files may
 * be trainer.json and optimizer-NNNNN-of-NNNNN.safetensors. Returns 0, or -1 after reporting. */
int hf_model_begin(const char *directory);
int hf_model_partial(const char *directory, char partial[FILE_PATH_BYTES]);
int hf_model_write_files(const char *directory, const struct llama_config *config,
                         const struct named_tensor *tensors, size_t count,
                         const char *tokenizer_path);
int hf_model_commit(const char *directory);
void hf_model_abandon(const char *directory);

/* Removes the files of a checkpoint, and the directory. It is no error if there is none. A
 * directory that contains other files stays, and is reported. */
int hf_model_remove(const char *directory);

/* If true, a progress line on stdout shows how far the reading of a model of more than 1 GB is. */
extern bool hf_model_shows_progress;

/* Fills tensors[i].data, shaped as hf_model_tensors(config) says, unless it is NULL, from
 * DIR/model.safetensors or the files of DIR/model.safetensors.index.json (F32, BF16 or F16), with all threads. Reports a
 * missing tensor, one of another shape, and one that a model of this config does not have. config:
 * config_read(DIR). Returns 0, or -1 after reporting; the data is then undefined. */
int hf_model_read(const char *directory, const struct llama_config *config,
                  const struct named_tensor *tensors, size_t count);

#ifdef __cplusplus
}
#endif
#endif
