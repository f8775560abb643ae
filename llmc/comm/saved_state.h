/* saved_state.h — what a checkpoint has of a rank's workers and of the network: moments of the ranges
 * that a worker owns, stale ranges of its replica, and lossynet's state (the tensors of resume.h). */
#ifndef LLMC_COMM_SAVED_STATE_H
#define LLMC_COMM_SAVED_STATE_H

#include "llmc/checkpoint/resume.h"
#include "llmc/checkpoint/snapshot.h"
#include "llmc/comm/data_parallel.h"

/* Copies this rank's share of the state. Returns 0, or -1 after reporting. */
int saved_state_copy(const struct data_parallel *d, struct snapshot *out);

/* Reads the workers' state from `directory`, after verifying this rank's share of the checksums. The
 * workers' params must already be the model. Reports on the terminal and in the log (event "resume")
 * what cannot be identical. Returns 0, or -1 after reporting. */
int saved_state_load(const struct data_parallel *d, const struct run_info *facts,
                     const char *directory, const json_t *saved, struct jsonl *log);

#endif
