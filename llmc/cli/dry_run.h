/* dry_run.h — computes memory, traffic, time on the link and drift of a run, without running it. */
#ifndef LLMC_DRY_RUN_H
#define LLMC_DRY_RUN_H

#include "llmc/options/options.h"
#include "lossynet/lossynet.h"

/* --dry-run: prints on rank 0 what a cluster with one worker per rank needs. Also prints how much
 * memory the run needs on the hosts on which it was started. Collective. Returns 0, or -1 after
 * reporting. */
int dry_run(const struct options *options, const struct lossynet_world *world);

#endif
