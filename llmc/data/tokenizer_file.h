/* tokenizer_file.h — the file of a tokenizer, beside a model or beside token files:
 *
 *     tokenizer.model   SentencePiece's, which tokenizer.h reads
 *     tokenizer.json    of Hugging Face's package tokenizers (Llama 3): data/tokenize_json.py reads
 *                       it; this program copies it into checkpoints
 */
#ifndef LLMC_DATA_TOKENIZER_FILE_H
#define LLMC_DATA_TOKENIZER_FILE_H

#include <string.h>
#include <unistd.h>

#include "llmc/util/file.h"

/* The name that a copy of the tokenizer `path` has. */
static inline const char *tokenizer_file_name(const char *path) {
    const size_t length = strlen(path);
    return length >= 5 && !strcmp(path + length - 5, ".json") ? "tokenizer.json"
                                                              : "tokenizer.model";
}

/* path = DIRECTORY/tokenizer.model or, if only that is there, DIRECTORY/tokenizer.json. Returns 0,
 * or -1 after reporting a path that is too long. */
static inline int tokenizer_file_in(char path[FILE_PATH_BYTES], const char *directory) {
    if (file_join(path, directory, "tokenizer.model")) return -1;
    if (!access(path, F_OK)) return 0;
    if (file_join(path, directory, "tokenizer.json")) return -1;
    return access(path, F_OK) ? file_join(path, directory, "tokenizer.model") : 0;
}

#endif
