/* generate.h — text from a model: draws one token after another and shows text as soon as it is
 * whole. Does not know the trainer: the model is a function.
 */
#ifndef LLMC_GENERATE_H
#define LLMC_GENERATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "llmc/backend.h"
#include "llmc/options.h"
#include "llmc/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

struct generate_model {
    int vocabulary;
    int positions;  /* tokens that it can look at, at least 1 */
    bool remembers; /* what was fed before; without, all is fed again for every token */
    /* Feeds tokens (count) at positions first ... first+count-1 and writes the logits (vocabulary)
     * of the token that follows. What was fed at positions below `first` is still known. Returns 0,
     * or -1 after reporting. */
    int (*feed)(void *context, const int32_t *tokens, int first, int count, float *logits);
    void *context;
};

/* For `feed`: logits (V, the host's) = x (C) w^T, w (V, C), both in the backend's working type. 0, or
 * -1 after reporting. */
int generate_logits(const struct backend *be, float *logits, const tensor *x, const tensor *w,
                    int C, int V);

struct generate_settings {
    const char *prompt; /* "" begins a new document */
    int tokens;         /* at most so many; </s> ends the text earlier */
    double temperature, top_p;
    uint64_t seed; /* the same settings and seed give the same text */
};

/* Called with each part of the text, the prompt included, as it becomes known; never within a
 * character. The parts are UTF-8, ended by a zero byte. */
typedef void (*generate_show)(void *context, const char *text);

/* Continues settings->prompt. When the model has seen all the positions it can, it goes on from the
 * later half of them, which is fed anew. Returns 0, or -1 after reporting. */
int generate_text(const struct generate_model *model, const struct tokenizer *tokenizer,
                  const struct generate_settings *settings, generate_show show, void *show_context);

/* A generate_show that gathers text in a line: control characters become spaces, what has no room
 * is left out, whole characters only. Begins as {0, ""}. */
struct generate_line {
    size_t used;
    char text[512];
};
void generate_gather(void *line, const char *text);

/* ---- the two uses ---- */

/* Opens `path`, or tokenizer.model in the directory `beside` where path is NULL. A tokenizer with
 * more tokens than the model is refused. The caller closes it. Returns 0, or -1 after reporting. */
int generate_open_tokenizer(const char *path, const char *beside, int vocabulary,
                            struct tokenizer **tokenizer);

/* --generate: continues options->generate on stdout, part by part. */
int generate_to_terminal(const struct generate_model *model, const struct tokenizer *tokenizer,
                         const struct options *options);

/* --sample-every: a document's first 40 tokens, as a line. */
int generate_sample(const struct generate_model *model, const char *tokenizer,
                    const struct options *options, struct generate_line *line);

/* Whether generate_sample has a tokenizer (path or NULL): 0, or -1 after reporting. */
int generate_check_tokenizer(const char *tokenizer);

#ifdef __cplusplus
}
#endif
#endif
