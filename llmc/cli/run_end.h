/* run_end.h — how a run of training ends: waits for its last checkpoint, and says it on the terminal and
 * in the log. */
#ifndef LLMC_CLI_RUN_END_H
#define LLMC_CLI_RUN_END_H

#include "llmc/comm/async_writer.h"
#include "llmc/comm/data_parallel.h"
#include "llmc/log/metrics.h"

#ifdef __cplusplus
extern "C" {
#endif

struct run_end {
    struct data_parallel *dp;
    struct async_writer *saver; /* may be NULL */
    struct jsonl *log;
    struct progress *progress;
    const struct resume_point *at; /* how far the run has come */
};

/* Ends a run that is complete or was stopped by a signal. eval: the last evaluation, or NULL.
 * Collective. Returns 0, or -1 after reporting that its last checkpoint could not be written. */
int run_end_report(const struct run_end *end, bool stopped, const struct eval_metrics *eval);

/* Ends a run whose loss or gradient norm in *r is NaN or infinite, since it cannot recover.
 * Collective. Returns -1 after reporting. */
int run_end_not_finite(const struct run_end *end, const struct step_metrics *r);

#ifdef __cplusplus
}
#endif
#endif
