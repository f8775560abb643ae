/* write_model.h — writes a whole model at once; training does it in parts (async_writer.c). */
#ifndef TEST_WRITE_MODEL_H
#define TEST_WRITE_MODEL_H

#include "llmc/checkpoint/hf_model.h"

/* tensors: those of model_tensors(config) with data. tokenizer: a file to copy, or NULL. Returns 0, or -1
 * after reporting; then there is no new checkpoint. */
static inline int write_whole_model(const char *directory, const struct llama_config *config,
                                    const struct named_tensor *tensors, size_t count,
                                    const char *tokenizer) {
    const char *const nothing = NULL;
    char partial[FILE_PATH_BYTES];
    struct carried *carried;
    int shards = 1, failed = 0;
    if (carried_open(&nothing, tokenizer, &carried)) return -1;
    const int begun = !hf_model_begin(directory) && !hf_model_partial(directory, partial);
    for (size_t i = 0; i < count; i++)
        if (tensors[i].shard >= shards) shards = tensors[i].shard + 1;
    for (int s = 0; s < shards && begun && !failed; s++)
        failed = hf_model_write_shard(partial, tensors, count, s, shards);
    failed =
        !begun || failed || hf_model_write_rest(partial, config, tensors, count, shards, carried);
    carried_close(carried);
    if (!failed) return hf_model_commit(directory);
    if (begun) hf_model_abandon(directory);
    return -1;
}

#endif
