/* generate.h — generates text: draws one token after another, and shows text as soon as its
 * characters are complete. It does not depend on the trainer: the model is a function. */
#ifndef LLMC_CLI_GENERATE_H
#define LLMC_CLI_GENERATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "llmc/backend/backend.h"
#include "llmc/model/activations.h"
#include "llmc/model/param_layout.h"
#include "llmc/options/options.h"
#include "llmc/data/tokenizer.h"

struct generate_model {
    int vocabulary;
    int positions;  /* length of its context, at least 1 */
    bool remembers; /* it keeps earlier tokens; otherwise all are fed again for every new token */
    /* Feeds tokens (count) at positions first ... first+count-1, and writes the logits
     * (vocabulary) of the token that follows. The tokens at positions below `first` were fed
     * before. Returns 0, or -1 after reporting. */
    int (*feed)(void *context, const int32_t *tokens, int first, int count, float *logits);
    void *context;
};

/* For `feed`: logits (V, in host memory) = x (C) w^T with w (V, C), both in the backend's
 * working type. Returns 0, or -1 after reporting. */
int generate_logits(const struct backend *be, float *logits, const tensor *x, const tensor *w,
                    int C, int V);

/* A Llama with one sequence, as such a model. */
struct generate_llama {
    const struct backend *be;
    const struct param_layout *layout;
    const weight *weights;
    struct activations *activations; /* of one sequence, of `positions` tokens */
    int positions;
    /* Runs forward from activations->tokens (count), which follow activations->past earlier tokens,
     * to activations->last_norm. */
    void (*forward)(const struct generate_llama *g, int count);
};
struct generate_model generate_model_of(struct generate_llama *g); /* uses *g later */

struct generate_settings {
    const char *prompt; /* "": begins a new document */
    int tokens;         /* largest number of tokens; </s> ends the text earlier */
    double temperature, top_p;
    uint64_t seed; /* the same settings and seed give the same text */
};

/* Called with each part of the text, including the prompt, as soon as it is known. A part never
 * ends within a character. It is UTF-8, ended by a zero byte. */
typedef void (*generate_show)(void *context, const char *text);

/* Continues settings->prompt. When the context is full, its later half is fed again as the start
 * of a new context. Returns 0, or -1 after reporting. */
int generate_text(const struct generate_model *model, const struct tokenizer *tokenizer,
                  const struct generate_settings *settings, generate_show show, void *show_context);

/* A generate_show that collects text in one line. Control characters become spaces. Text that
 * does not fit is cut between characters. The caller starts with {0, ""}. */
struct generate_line {
    size_t used;
    char text[512];
};
void generate_gather(void *line, const char *text);

/* ---- the two uses ---- */

/* Opens `path`, or the tokenizer in the directory `beside` where path is NULL. A tokenizer with
 * more tokens than the model is refused. The caller closes it. Returns 0, or -1 after reporting. */
int generate_open_tokenizer(const char *path, const char *beside, int vocabulary,
                            struct tokenizer **tokenizer);

/* --generate: continues options->generate on stdout, part by part. */
int generate_to_terminal(struct generate_llama *model, const struct tokenizer *tokenizer,
                         const struct options *options);

/* --sample-every: writes the first 40 tokens of a new document into *line. */
int generate_sample(struct generate_llama *model, const char *tokenizer,
                    const struct options *options, struct generate_line *line);

/* Checks that generate_sample has a tokenizer (path or NULL). Returns 0, or -1 after reporting. */
int generate_check_tokenizer(const char *tokenizer);

#endif
