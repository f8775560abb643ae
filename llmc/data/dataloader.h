/* dataloader.h — reads training and validation sequences from llm.c's token files.
 *
 * A token file: 256 int32 of header, then the tokens, everything little-endian:
 *
 *     [0..1]  20240520 and 1: tokens are uint16; 20240801 and 7: uint32 (Llama-3's vocabulary)
 *     [2]     number of tokens
 *     [3]     vocabulary size        \
 *     [4..5]  words of the text       | written by build/tokenize; 0 (unknown) in llm.c's own
 *     [6..7]  bytes of the text      /  files (words and bytes are uint64)
 *
 * Words are separated by ASCII white space. Files are mapped, never copied.
 *
 * Sampling keeps no state: sequence n of a run is a pure function of (files, T, seed, n), so that
 * any worker can fetch any sequence, and resuming needs only a count. An epoch visits every
 * window once, in an order that is a keyed permutation of (seed, epoch); each epoch also shifts
 * where windows begin. Worker w of N takes n = step * N * B + w * B + b for its batch of B.
 *
 * With a contiguous split each worker has epochs of its own, over its 1/N of the windows in the
 * order of the files. Then the workers' data is not identically distributed, as in federated
 * learning. The shared order is the usual one, and makes the workers' data i.i.d. (like PyTorch's
 * DistributedSampler). Hugging Face's Dataset.shard also calls such parts "contiguous".
 */
#ifndef LLMC_DATA_DATALOADER_H
#define LLMC_DATA_DATALOADER_H

#include <stddef.h>
#include <stdint.h>

struct dataloader;

enum dataloader_use {
    DATALOADER_TRAIN,    /* dataloader_batch: needs a file of at least T+1 tokens */
    DATALOADER_VALIDATE, /* dataloader_window: needs a file of at least 2 tokens */
};

/* Opens all files that match the glob(3) pattern, in sorted order, and checks them, including every
 * token id (with all threads of OpenMP). T: tokens per sequence. *loader belongs to the caller,
 * who closes it. Returns 0, or -1 after reporting; *loader is then NULL. */
int dataloader_open(const char *pattern, enum dataloader_use use, int T, uint64_t seed,
                    struct dataloader **loader);

void dataloader_close(struct dataloader *loader); /* NULL is fine */

/* Describes the files that match the pattern: their number of tokens, and a hash of their headers
 * and of some of their tokens. Two ranks with different data almost never get the same text. Reads
 * little of them, and checks headers only. *vocabulary becomes the vocabulary size in the headers,
 * and stays if they have none. Returns 0, or -1 after reporting. */
enum { DATALOADER_DESCRIPTION = 100 };
int dataloader_describe(const char *pattern, char text[DATALOADER_DESCRIPTION], int *vocabulary);

/* The vocabulary size in the files' headers; 0 if they have none (llm.c's own files). */
int dataloader_vocabulary(const struct dataloader *loader);

/* Tokens per word and per byte of the text, not counting the first token of each file, which
 * nothing predicts; 0 if any file does not say. */
double dataloader_targets_per_word(const struct dataloader *loader);
double dataloader_targets_per_byte(const struct dataloader *loader);

/* Checks every token id against a model's vocabulary size. Returns 0, or -1 after reporting the
 * file, the position and the id. */
int dataloader_check_vocabulary(struct dataloader *loader, int vocabulary);

/* Files must not change while they are open. Returns 0, or -1 if a reader below has found that one did, which
 * it has reported: an id that the model does not have (it is read as 0), a file that was cut off (zeros), or other
 * tokens than at the start. Of the latter, readers look at the files that they read, ten times per second. */
int dataloader_check(const struct dataloader *loader);
/* The same after looking at all files. */
int dataloader_check_files(struct dataloader *loader);

/* Path of the tokenizer.model beside the first file, or else of the tokenizer.json, or NULL if
 * there is neither. The loader owns the string. */
const char *dataloader_tokenizer(const struct dataloader *loader);

/* The path of the first file of `loader` that `other` has, too: by any name, or a copy with the same tokens.
 * NULL: none. */
const char *dataloader_shared(const struct dataloader *loader, const struct dataloader *other);

uint64_t dataloader_tokens(const struct dataloader *loader); /* in all files */
uint64_t dataloader_sum(const struct dataloader *loader); /* a checksum of them, in their order */

/* ---- training: windows of T+1 tokens, stride T, none across two files ---- */

/* Windows per epoch; 0 if every file is shorter than T+1 tokens. */
uint64_t dataloader_epoch(const struct dataloader *loader);

/* Gives each worker its own windows. Of an epoch's W windows, worker w gets those from floor(w W
 * / workers) up to, but not including, floor((w+1) W / workers). The epoch's shift may move the
 * last of them into the next worker's part by less than T tokens. With one worker nothing
 * changes. Returns 0, or -1 after reporting that there are fewer windows than workers. */
int dataloader_split(struct dataloader *loader, int workers);

/* Micro-batch m of worker `worker`: tokens and targets (B, T), which are the tokens shifted by one.
 * done: number of sequences that all workers together took in earlier steps; it is all that
 * resuming needs. Needs dataloader_epoch > 0. After dataloader_split, `workers` must be the same as
 * there. Cannot fail. Several threads may call it at once. */
void dataloader_batch(struct dataloader *loader, uint64_t done, int m, int worker, int workers,
                      int B, int32_t *tokens, int32_t *targets);

/* ---- validation: every token except a file's first is a target exactly once ----
 * Without a stride, windows lie side by side, each with T tokens and the T that follow them. */

/* Lets a window of T tokens begin every `stride` tokens (1 ... T). Each window scores only the
 * targets that no earlier window has scored, so all targets except the first T have at least T -
 * stride tokens of context. This is what Hugging Face's page on the perplexity of fixed-length
 * models computes. With stride T, the first token of a window is no target at all. Call it
 * before any other validation function. */
void dataloader_set_stride(struct dataloader *loader, int stride);

uint64_t dataloader_windows(const struct dataloader *loader);

/* Window i = 0 ... dataloader_windows - 1, in the order of the files: tokens and targets (T), of
 * which the first `length` are written. Returns the length: T, or 1 ... T for the last window of
 * a file. Cannot fail. Several threads may call it at once. */
int dataloader_window(struct dataloader *loader, uint64_t i, int32_t *tokens, int32_t *targets);

/* Number of window i's first targets that only give context and are not scored; 0 without a
 * stride. */
int dataloader_window_skip(const struct dataloader *loader, uint64_t i);

struct dataloader_batch {
    int windows, length; /* B rows of T tokens */
    int skip;            /* number of first targets of each row that are not scored */
};

/* Reads windows *i, *i + every, ... below `end`, at most `most`, as long as they have the same
 * length and skip, into tokens and targets (B, T) without gaps. Moves *i to the window after them.
 * Needs *i < end. */
struct dataloader_batch dataloader_window_batch(struct dataloader *loader, uint64_t *i,
                                                uint64_t every, uint64_t end, int most,
                                                int32_t *tokens, int32_t *targets);

/* ---- the token file format, for tools that write it ---- */

enum {
    TOKENS_MAGIC = 20240520, /* and TOKENS_VERSION: uint16 */
    TOKENS_VERSION = 1,
    TOKENS_MAGIC_32 = 20240801, /* and TOKENS_VERSION_32: uint32 */
    TOKENS_VERSION_32 = 7,
    TOKENS_HEADER_INTS = 256,
    TOKENS_HEADER_BYTES = 1024,
    TOKENS_HEADER_WORDS = 4, /* index of the header's int32 where the uint64 begins */
    TOKENS_HEADER_TEXT_BYTES = 6,
    TOKENS_VOCABULARY_16 = 65535,    /* the largest of files of uint16; id 65535 is not used */
    TOKENS_VOCABULARY_MAX = 1 << 20, /* of files of uint32: a model allows no more */
};

#endif
