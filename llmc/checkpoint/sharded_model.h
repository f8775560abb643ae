/* sharded_model.h — opens the tensors of a model directory, in one safetensors file or in several.
 *
 *     model.safetensors               the whole model; or
 *     model.safetensors.index.json    {"weight_map": {"lm_head.weight": "model-00002-of-00002...",
 *                                     ...}, ...} and the files it names, which lie beside it
 *
 * as Hugging Face's save_pretrained writes them. If both are there, model.safetensors is used.
 * Files are mapped, so tensors that nobody copies are not read.
 */
#ifndef LLMC_CHECKPOINT_SHARDED_MODEL_H
#define LLMC_CHECKPOINT_SHARDED_MODEL_H

#include <stddef.h>

#include "llmc/checkpoint/safetensors.h"

struct sharded_model;

/* Opens and checks every file. *shards belongs to the caller, who closes it. Returns 0, or -1 after
 * reporting; *shards is then NULL. */
int sharded_model_open(const char *directory, struct sharded_model **shards);
void sharded_model_close(struct sharded_model *shards); /* NULL is fine */

/* The files. */
size_t sharded_model_count(const struct sharded_model *shards);
const struct safetensors *sharded_model_file(const struct sharded_model *shards, size_t i);
const char *sharded_model_path(const struct sharded_model *shards, size_t i);

/* The file that contains the tensor of that name. If there is only one file, it is returned for
 * every name. NULL after reporting that the index does not name the tensor. */
const struct safetensors *sharded_model_of(const struct sharded_model *shards, const char *name);

#endif
