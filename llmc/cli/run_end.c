/* run_end.c — see run_end.h. */
#include "llmc/cli/run_end.h"

#include <stdio.h>

#include "llmc/log/error.h"

int run_end_not_finite(const struct run_end *end, const struct step_metrics *r) {
    if (async_writer_finish(end->saver)) return -1;
    const char *checkpoint = async_writer_last(end->saver);
    progress_end(end->progress);
    metrics_log_step(end->log, r);
    metrics_log_end(end->log, &end->at->record, "not finite", NULL, checkpoint);
    return end->dp->world.rank > 0
               ? -1
               : metrics_report_not_finite(r, checkpoint, data_parallel_odd_worker(end->dp));
}

int run_end_report(const struct run_end *end, bool stopped, const struct eval_metrics *eval) {
    const int step = end->at->step;
    if (async_writer_finish(end->saver) || data_parallel_log_links(end->dp, end->log, step) ||
        data_parallel_log_late(end->dp, end->log, step))
        return -1;
    const char *checkpoint = async_writer_last(end->saver);
    progress_end(end->progress);
    if (end->progress->on && stopped) printf("stopped by a signal after %d steps\n", step);
    if (end->progress->on && *checkpoint) printf("model in %s\n", checkpoint);
    const bool lost = async_writer_has_failed(end->saver);
    const char *status = lost ? "not saved" : stopped ? "stopped" : "complete";
    metrics_log_end(end->log, &end->at->record, status, eval, checkpoint);
    if (!lost) return 0;
    if (end->dp->world.rank > 0) return -1;
    return *checkpoint ? log_error("step %d could not be saved, see above: the newest checkpoint "
                                   "is '%s'",
                                   step, checkpoint)
                       : log_error("no checkpoint could be written to '%s', see above",
                                   end->dp->options->out);
}
