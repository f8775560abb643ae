/* validate.h — checks the command line as a whole: finds options that contradict each other, or do
 * not fit the program, its model or the number of ranks.
 */
#ifndef LLMC_CLI_VALIDATE_H
#define LLMC_CLI_VALIDATE_H

#include "llmc/model/config.h"
#include "llmc/options/options.h"
#include "lossynet/lossynet.h"

/* Parses and checks the command line, and resolves `--resume auto`: all ranks take the checkpoint
 * that rank 0 finds. With --meet, views_open resolves it. Collective; all ranks get the same
 * result: 0, or the exit code after one line on one rank's stderr. The exit code is 2, or 1 if
 * files are wrong. The line names a rank whose command line is wrong or differs from rank 0's,
 * because that rank would leave the others waiting, or train something else. `revision` is the
 * program's, and must be the same on all ranks. */
int validate_command_line(int argc, char **argv, const struct lossynet_world *world,
                          const char *revision, struct options *options);

/* Sets group_size to what --group means among these ranks. Returns 0, or -1 after reporting. */
int validate_group(struct options *options, const struct lossynet_world *world);

/* Checks a parsed command line, as far as one rank can. Returns 0, or the exit code after
 * reporting. */
int validate_options(const struct options *options, int ranks);

/* Of a preset, where neither options nor data say it. */
enum { VALIDATE_VOCABULARY = 32000 };

/* The model's shape in a plan, which needs no data. A preset has the option's vocabulary, or else that of
 * --train if its files are here, or VALIDATE_VOCABULARY. Returns 0, or -1 after reporting. */
int validate_planned_config(const struct options *options, struct llama_config *out);

/* The number of tokens of a sequence, for a model with a context of `positions` tokens. */
int validate_sequence_length(const struct options *options, int positions);

/* MAJOR.MINOR.PATCH. MINOR changes when an option, a field of the log or a file format does. */
#define TRAIN_LLAMA2_VERSION "0.1.0"

/* --help, --version: prints the answer. Returns the exit code. */
int validate_answer(const struct options *options, const char *revision);

#endif
