/* network.h — the network's options as lossynet takes them. With staging.h, the trainer and the
 * pre-flight, the only place where lossynet is known.
 */
#ifndef LLMC_NETWORK_H
#define LLMC_NETWORK_H

#include "llmc/layout.h"
#include "llmc/options.h"
#include "llmc/record.h"
#include "lossynet/lossynet.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Whether they make sense with so many workers: 0, or -1 after reporting. */
int network_check(const struct options *options, int workers);

/* What they say of a net, after network_check; memory and weighted_sum are the caller's to add. */
struct lossynet_settings network_settings(const struct options *options,
                                          const struct layout *layout, int workers);

/* lossynet_step_begin, with what the options say of this step. 0, or -1 after reporting. */
int network_step_begin(struct lossynet *net, const struct options *options, int step);

/* A step's packets, into its record. */
void network_record(const struct lossynet_counters *counters, struct step_record *record);

/* --dry-run: the arithmetic of a run on a cluster with one worker per rank. 0, or -1 after
 * reporting. */
int network_dry_run(const struct options *options, int workers);

#ifdef __cplusplus
}
#endif
#endif
