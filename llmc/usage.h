/* usage.h — what the command line asks for as a whole: options that do not go together, or not with
 * this program, its model or the number of ranks.
 */
#ifndef LLMC_USAGE_H
#define LLMC_USAGE_H

#include "llmc/options.h"
#include "lossynet/lossynet.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The command line, parsed and checked; `--resume auto` resolved. All ranks call it and learn the
 * same: 0, or the exit code after one line on one rank's stderr: 2, or 1 when files are wrong. A
 * rank whose line is wrong, or is another than rank 0's, is named: it would leave the others
 * waiting, or train something else. `revision` is the program's, which must be the same too. */
int usage_read(int argc, char **argv, const struct lossynet_world *world, const char *revision,
               struct options *options);

/* What of a parsed command line can be checked alone. 0, or the exit code after reporting. */
int usage_check(const struct options *options, int ranks);

/* Tokens of a sequence, for a model that takes at most `positions`. */
int usage_sequence_length(const struct options *options, int positions);

void usage_version(const char *revision); /* to stdout */

#ifdef __cplusplus
}
#endif
#endif
