/* earlier_run.h — keeps a new run from overwriting what an earlier one left.
 *
 * An earlier run is a log.jsonl that is not empty, or anything called checkpoint-N, in --out; and a
 * file that is not empty in the place of --log. An empty directory, and one with other files in it,
 * is no earlier run.
 */
#ifndef LLMC_EARLIER_RUN_H
#define LLMC_EARLIER_RUN_H

#include "llmc/cli/options.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Looks where the run would write, before anything is created there. Fine are a run that resumes
 * from a checkpoint in --out (or `auto`), and one with --overwrite. options: as parsed, --resume
 * auto not yet replaced. Returns 0, or the exit code after reporting in one line. */
int earlier_run_check(const struct options *options);

#ifdef __cplusplus
}
#endif
#endif
