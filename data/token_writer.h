/* token_writer.h — writes token files (the format stands in llmc/data/dataloader.h), in one piece
 * or in shards of a bounded number of tokens.
 *
 * A file is written as NAME.partial and renamed when everything is complete: what carries a final
 * name is whole. With shards, NAME.bin stands for NAME_000000.bin, NAME_000001.bin, ...; every
 * shard but the last has exactly as many tokens as asked for.
 */
#ifndef DATA_TOKEN_WRITER_H
#define DATA_TOKEN_WRITER_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/util/file.h"

struct token_writer {
    const char *path;       /* NULL: there is no such output */
    uint64_t shard_tokens;  /* 0: one file */
    uint64_t tokens, words; /* of all shards */
    int shards;             /* begun */
    /* the shard being written */
    char partial[FILE_PATH_BYTES];
    int descriptor;
    uint64_t shard_count, shard_words, shard_bytes;
    int vocabulary; /* above TOKENS_VOCABULARY_16: the file has 32-bit tokens */
};

/* Creates the first file. path NULL is fine: a writer that writes nothing. Shards of an earlier run
 * are refused, because a pattern that finds the new ones would find them too. path is kept, not
 * copied. Returns 0, or -1 after reporting; discard in either case when anything fails later. */
int token_writer_open(struct token_writer *w, const char *path, uint64_t shard_tokens,
                      int vocabulary);

/* Appends `first` (an id, or -1 for none) and `count` ids that stand for text_bytes of text with
 * `words` words; both are counted where the first of the ids comes to lie. */
int token_writer_write(struct token_writer *w, int first, const int32_t *ids, size_t count,
                       uint64_t words, uint64_t text_bytes);

/* Completes the last file; a total of fewer than 2 tokens is an error. hint: what helps then. */
int token_writer_finish(struct token_writer *w, const char *hint);

/* Renames all files. */
int token_writer_publish(struct token_writer *w);

/* Removes what has not been renamed. */
void token_writer_discard(struct token_writer *w);

#endif
