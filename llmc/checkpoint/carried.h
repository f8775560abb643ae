/* carried.h — what checkpoints keep of the model that a run began with, because this program has no say in
 * it: files (tokenizer, chat template, generation_config.json, licence), byte for byte, and the fields of
 * config.json that it does not read, such as the ids of special tokens. It is held in memory, since the
 * source may be a checkpoint that the run removes.
 */
#ifndef LLMC_CHECKPOINT_CARRIED_H
#define LLMC_CHECKPOINT_CARRIED_H

#include <jansson.h>
#include <stdbool.h>

struct carried;

/* Whether a file of this name is carried. */
bool carried_is_file(const char *name);

/* Reads what there is in the first of `sources` that exists: a model's directory, or a config.json, which
 * has fields alone. sources ends with NULL, and may be empty. tokenizer: a file that replaces the source's, or
 * NULL. If that is another file than the source's, files that belong to a tokenizer are taken from beside it, and
 * with a new model the ids of the special tokens are the tokenizer's. The caller closes *carried. Returns
 * 0, or -1 after reporting. */
int carried_open(const char *const *sources, const char *tokenizer, struct carried **carried);
void carried_close(struct carried *carried); /* NULL is fine */

/* The fields for config_write; NULL if there are none. */
json_t *carried_fields(const struct carried *carried);

/* The name of file i = 0, 1 ..., or NULL. */
const char *carried_name(const struct carried *carried, int i);

/* Writes all files into a directory, synced to disk. Returns 0, or -1 after reporting. */
int carried_write(const struct carried *carried, const char *directory);

#endif
