/* usage.h — what the command line asks for as a whole: options that do not go together, or not with
 * this program, its model or the number of ranks.
 */
#ifndef LLMC_USAGE_H
#define LLMC_USAGE_H

#include "llmc/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Returns 0, or the exit code after reporting: 2, or 1 when the model's own files are wrong. */
int usage_check(const struct options *options, int ranks);

/* Tokens of a sequence, for a model that takes at most `positions`. */
int usage_sequence_length(const struct options *options, int positions);

void usage_version(const char *revision); /* to stdout */

#ifdef __cplusplus
}
#endif
#endif
