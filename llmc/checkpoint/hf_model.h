/* hf_model.h — reads and writes a model as a Hugging Face directory:
 *
 *     config.json        the shape (config.h)
 *     model.safetensors  the parameters, float32, under Hugging Face's names; or for a large model
 *     model-00001-of-00003.safetensors, ..., model.safetensors.index.json   the same in shards
 *     tokenizer.model    or tokenizer.json, if there is one (tokenizer_file.h), and other files that this
 *                        program copies (carried.h)
 *     trainer.json, optimizer-*.safetensors   the rest of a training run's state (resume.h)
 *
 * LlamaForCausalLM.from_pretrained(DIR) reads what was written, and hf_model_read reads
 * what save_pretrained wrote.
 */
#ifndef LLMC_CHECKPOINT_HF_MODEL_H
#define LLMC_CHECKPOINT_HF_MODEL_H

#include <stdbool.h>
#include <stddef.h>

#include "llmc/checkpoint/carried.h"
#include "llmc/model/config.h"
#include "llmc/model/tensors.h"
#include "llmc/util/file.h"

/* Cuts a model into shards of at most `bytes` of float32: sets tensors[i].shard. A shard has
 * consecutive tensors of the list; a tensor larger than `bytes` is a shard of its own. The cut
 * depends on shapes and `bytes` alone. Returns the number of shards, which is 1 if all fit into
 * one. */
int hf_model_cut(struct named_tensor *tensors, size_t count, double bytes);

/* Bytes of the shards that a rank writes. Rank s % ranks writes shard s. */
double hf_model_bytes_of_rank(const struct llama_config *config, double shard_bytes, int rank,
                              int ranks);

/* The name of a shard's file; it is model.safetensors if there is only one shard. */
enum { HF_MODEL_NAME_BYTES = 64 };
void hf_model_shard_name(int shard, int shards, char name[HF_MODEL_NAME_BYTES]);

/* Whether a checkpoint DIR can be written as far as what is there now allows: nothing, or a checkpoint.
 * Returns 0, or -1 after reporting what is in the way. */
int hf_model_check_place(const char *directory);

/* Writes a checkpoint, in parts, since writers add their own files (async_writer.c). DIR is always either the
 * old checkpoint or the new one, and complete. `begin` creates an empty directory beside it, and
 * `partial` returns its name. Parents of DIR must exist. A directory that holds anything but an older
 * checkpoint is not touched and is an error. `write_shard` writes the tensors of a shard into
 * it; only these tensors need data. `write_rest` writes the index of the shards, if there are
 * several, what is carried (carried.h; NULL: nothing) and config.json. `commit` syncs it and renames it to DIR. `abandon`
 * removes it. The writers' own files may be trainer.json, optimizer-NNNNN-of-NNNNN.safetensors and
 * files-NNNNN-of-NNNNN.json. One writer at a time per DIR. All return 0, or -1 after reporting. */
int hf_model_begin(const char *directory);
int hf_model_partial(const char *directory, char partial[FILE_PATH_BYTES]);
int hf_model_write_shard(const char *directory, const struct named_tensor *tensors, size_t count,
                         int shard, int shards);
int hf_model_write_rest(const char *directory, const struct llama_config *config,
                        const struct named_tensor *tensors, size_t count, int shards,
                        const struct carried *carried);
int hf_model_commit(const char *directory);
void hf_model_abandon(const char *directory);

/* Removes the files of a checkpoint, and the directory. It is no error if there is none. A
 * directory that contains other files stays, and is reported. */
int hf_model_remove(const char *directory);

/* If true, a progress line on stdout shows how far the reading of a model of more than 1 GB is. */
extern bool hf_model_shows_progress;

/* Reads tensors, shaped as model_tensors(config) says, into tensors[i].data; those whose data is
 * NULL are left out. A tied table may be stored as lm_head.weight; if both are stored they must be
 * equal. The source is DIR/model.safetensors or the files of
 * DIR/model.safetensors.index.json (F32, BF16 or F16). Uses all threads. Reports a missing tensor,
 * one of another shape, and one that a model of this config does not have. config: as from
 * config_read(DIR). Returns 0, or -1 after reporting; the data is then undefined. */
int hf_model_read(const char *directory, const struct llama_config *config,
                  const struct named_tensor *tensors, size_t count);

#endif
