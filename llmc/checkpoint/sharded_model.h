/* sharded_model.h — the tensors of a model directory, in one safetensors file or in several.
 *
 *     model.safetensors               the whole model; or
 *     model.safetensors.index.json    {"weight_map": {"lm_head.weight": "model-00002-of-00002...",
 *                                     ...}, ...} and the files it names, which lie beside it
 *
 * as Hugging Face's save_pretrained writes them; the former wins when both are there. Files are
 * mapped: what nobody copies is not read.
 */
#ifndef LLMC_CHECKPOINT_SHARDED_MODEL_H
#define LLMC_CHECKPOINT_SHARDED_MODEL_H

#include <stddef.h>

#include "llmc/checkpoint/safetensors.h"

#ifdef __cplusplus
extern "C" {
#endif

struct sharded_model;

/* Opens and checks every file. *shards belongs to the caller, who closes it. Returns 0, or -1 after
 * reporting; *shards is then NULL. */
int sharded_model_open(const char *directory, struct sharded_model **shards);
void sharded_model_close(struct sharded_model *shards); /* NULL is fine */

/* The files. */
size_t sharded_model_count(const struct sharded_model *shards);
const struct safetensors *sharded_model_file(const struct sharded_model *shards, size_t i);
const char *sharded_model_path(const struct sharded_model *shards, size_t i);

/* The file that has the tensor of that name. If there is one file only, it is that one. NULL
 * after reporting that the index does not name the tensor. */
const struct safetensors *sharded_model_of(const struct sharded_model *shards, const char *name);

#ifdef __cplusplus
}
#endif
#endif
