/* choices.h — multiple-choice questions, such as HellaSwag's: a context, and endings of which one is
 * right. A model answers with the ending whose tokens it finds likeliest after the context.
 *
 * A file is one of two kinds.
 *
 * JSON lines: {"context": "...", "endings": ["...", "..."], "label": 0}, where label is the index of
 * the right ending. HellaSwag's own files say "ctx" for context; fields that are not named here are
 * ignored. A space is put between context and ending. Tokens are those of lm-evaluation-harness
 * (api/model.py, _encode_pair): the ending's are what the tokens of context + ending have more than
 * those of the context alone, and white space at the end of the context counts to the ending.
 *
 * llm.c's file (its dev/data/data_common.py, write_evalfile), little-endian: 256 int32 of header with
 * [0] magic 20240522, [1] version 1, [2] number of questions; then for each question, in uint16:
 * 65535, the question's bytes with these two, its index, the label, the number of endings, and for
 * the context and each ending its number of tokens and these tokens.
 */
#ifndef LLMC_DATA_CHOICES_H
#define LLMC_DATA_CHOICES_H

#include <stdint.h>

#include "llmc/log/metrics.h"

#ifdef __cplusplus
extern "C" {
#endif

struct choices;

/* Reads `path`, which is kept and not copied, and checks it. tokenizer: a SentencePiece model, which JSON lines need; it is not
 * opened for llm.c's files. positions: the longest sequence of the model; of a context that is too
 * long, the beginning is left out. vocabulary: the model's; larger ids are refused. The caller closes
 * *choices. Returns 0, or -1 after reporting; *choices is then NULL. */
int choices_open(const char *path, const char *tokenizer, int vocabulary, int positions,
                 struct choices **choices);

void choices_close(struct choices *choices); /* NULL is fine */

int choices_questions(const struct choices *choices);
int choices_longest(const struct choices *choices);      /* tokens of a row, without the last */
int choices_most_endings(const struct choices *choices); /* of a question */
int choices_endings(const struct choices *choices, int question);

/* Writes the rows of B endings of a question, from `first` on: tokens, and the targets one place on.
 * Returns T, the length of the longest; (B, T) tokens are written, and zeros behind shorter rows, on
 * which nothing that is scored depends. */
int choices_write(const struct choices *choices, int question, int first, int B, int32_t *tokens,
                  int32_t *targets);
/* Takes the losses (B, T) of these rows: losses[e] is the sum over the tokens of ending e. */
void choices_read(const struct choices *choices, int question, int first, int B, int T,
                  const float *found, double *losses);

/* Adds a question to the result, which starts with zeros. losses[e]: the sum of the losses of the
 * tokens of ending e. */
void choices_judge(const struct choices *choices, int question, const double *losses,
                   struct choices_result *result);

#ifdef __cplusplus
}
#endif
#endif
