/* earlier_run.h — keeps a new run from overwriting the files of an earlier one.
 *
 * Files of an earlier run are a log.jsonl that is not empty, or anything called checkpoint-N, in
 * --out; and a file --log that is not empty. An empty directory, or one with other files in it,
 * does not count as an earlier run.
 */
#ifndef LLMC_CHECKPOINT_EARLIER_RUN_H
#define LLMC_CHECKPOINT_EARLIER_RUN_H

#include "llmc/options/options.h"

/* Checks the places where the run would write, before anything is created there. A run that resumes
 * from a checkpoint in --out (or `auto`), or has --overwrite, passes. options: as parsed, with
 * --resume auto not yet replaced. Returns 0, or the exit code after reporting in one line. */
int earlier_run_check(const struct options *options);

#endif
