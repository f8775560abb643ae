/* shards.h — the tensors of a model directory, in one safetensors file or in several.
 *
 *     model.safetensors               the whole model; or
 *     model.safetensors.index.json    {"weight_map": {"lm_head.weight": "model-00002-of-00002...",
 *                                     ...}, ...} and the files it names, which lie beside it
 *
 * as Hugging Face's save_pretrained writes them; the former wins when both are there. Files are
 * mapped: what nobody copies is not read.
 */
#ifndef LLMC_SHARDS_H
#define LLMC_SHARDS_H

#include <stddef.h>

#include "llmc/safetensors.h"

#ifdef __cplusplus
extern "C" {
#endif

struct shards;

/* Opens and checks every file. *shards belongs to the caller, who closes it. Returns 0, or -1 after
 * reporting; *shards is then NULL. */
int shards_open(const char *directory, struct shards **shards);
void shards_close(struct shards *shards); /* NULL is fine */

/* The files. */
size_t shards_count(const struct shards *shards);
const struct safetensors *shards_file(const struct shards *shards, size_t i);
const char *shards_path(const struct shards *shards, size_t i);

/* The file that has the tensor of that name; the only file when there is one; NULL after reporting
 * that the index does not name the tensor. */
const struct safetensors *shards_of(const struct shards *shards, const char *name);

#ifdef __cplusplus
}
#endif
#endif
