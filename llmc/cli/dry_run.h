/* dry_run.h — the arithmetic of a run: memory, traffic, time on the link, drift. */
#ifndef LLMC_DRY_RUN_H
#define LLMC_DRY_RUN_H

#include "llmc/cli/options.h"
#include "lossynet/lossynet.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --dry-run: prints on rank 0 what a cluster with one worker per rank needs, and what the run, as
 * it was started, needs of the hosts it was started on. Collective. 0, or -1 after reporting. */
int dry_run(const struct options *options, const struct lossynet_world *world);

#ifdef __cplusplus
}
#endif
#endif
