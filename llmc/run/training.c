/* training.c — see training.h. */
#include "llmc/run/training.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "llmc/checkpoint/hf_model.h"
#include "llmc/comm/data_parallel_model.h"
#include "llmc/comm/settings.h"
#include "llmc/log/error.h"

int training_open(struct training *run, struct options *o, const char *revision,
                  const struct lossynet_world *launched) {
    run->options = o;
    run->revision = revision;
    run->world = *launched;
    /* With --meet the checkpoint that it is read from may be gone when others take this rank in. */
    if (o->meet && config_of_model(o->model, &run->config)) return 1;
    const int status = views_open(o, revision, &run->views);
    if (!status && run->views) run->world = views_world(run->views);
    return status;
}

int training_close(struct training *run, int status) {
    const bool complete = run->at.step >= run->options->steps;
    views_close(run->views, status     ? VIEWS_RANK_FAILS
                            : complete ? VIEWS_RUN_COMPLETE
                                       : VIEWS_RUN_STOPS);
    out_lock_release(&run->lock);
    return status == VIEWS_COMPLETE ? 0 : status;
}

int training_workers(const struct training *run) {
    const struct options *o = run->options;
    if (o->generate) return 1;
    if (run->views) return views_workers(run->views);
    return o->net.workers ? o->net.workers : run->world.ranks;
}

/* ---- the begin of a view ---------------------------------------------------------------- */

int training_choose(struct training_view *v) {
    struct training *run = v->run;
    if (views_begin(run->views) || out_lock_take(run->options, &v->dp->world, &run->lock))
        return -1;
    v->from = views_is_first_start(run->views) ? run->options->resume : NULL;
    return v->from ? resume_open(v->from, &v->saved, &run->at) : 0;
}

int training_enter(struct training_view *v) {
    struct training *run = v->run;
    const struct options *o = run->options;
    const int rank = v->dp->world.rank;
    data_parallel_facts(v->dp, &v->facts);
    v->facts.revision = run->revision;
    memcpy(v->rounds, v->facts.loss.rounds, sizeof v->rounds);
    if (views_enter(run->views, v->dp, &run->at, run->recent, &v->continues) ||
        jsonl_open_of_run(o->log, o->out, rank, run->at.step, v->from, v->saved, &v->log))
        return -1;
    /* Ranks that go on without late ones leave out steps, and --meet writes missing lines again. */
    if (!o->meet && !lossynet_skips_late(v->dp->comm)) jsonl_report_gap(v->log, run->at.step);
    hf_model_shows_progress = run_info_draws_progress(o, rank);
    if (!v->continues && data_parallel_initialise(v->dp)) return -1;
    jsonl_write(v->log, run_info_event(&v->facts));
    return 0;
}

int training_begin(struct training_view *v, const char *tokenizer) {
    const struct training *run = v->run;
    const struct options *o = run->options;
    const int rank = v->dp->world.rank, step = run->at.step;
    if (async_writer_open(v->dp, &v->facts, tokenizer, step, v->continues, &v->saver) ||
        (v->from && !v->continues &&
         saved_state_load(v->dp, &v->facts, v->from, v->saved, v->log)) ||
        data_parallel_start(v->dp))
        return -1;
    if (views_is_first_start(run->views)) run_info_announce(&v->facts);
    progress_begin(&v->progress, step, o->steps, rank == 0 && !o->quiet,
                   run_info_draws_progress(o, rank));
    views_report(run->views, &v->progress, v->log, step, run->recent);
    return 0;
}

void training_close_view(struct training_view *v) {
    async_writer_close(v->saver);
    jsonl_close(v->log);
    json_decref(v->saved);
}

/* ---- a step ----------------------------------------------------------------------------- */

void training_begin_record(struct training_view *v, int step) {
    const struct options *o = v->run->options;
    const struct schedule schedule = options_schedule(o);
    const int micro_batches = options_micro_batches(o, v->dp->workers);
    v->record = (struct step_metrics){
        .step = step,
        .tokens = (double)micro_batches * v->facts.batch * v->facts.seq,
        .learning_rate = schedule_learning_rate(&schedule, step),
    };
}

void training_note_update(struct training_view *v) {
    v->run->recent[v->record.step % HANDOVER_STEPS] = v->record;
    v->updated = v->record.step + 1;
}

int training_finish_begin(struct training_view *v) {
    v->last = v->record;
    return data_parallel_is_unfinished(v->dp) ? data_parallel_finish_begin(v->dp, &v->last) : 0;
}

/* Says that what was lost of late has changed how often lost packets are sent again. */
static void note_rounds(struct training_view *v) {
    static const char *const what[2] = {"gradients", "parameters"};
    enum { PAUSE = 50 }; /* steps: what is lost of late may go up and down across a threshold */
    char line[128];
    for (int phase = 0; phase < 2 && v->last.step >= v->quiet_until; phase++) {
        const int rounds = lossynet_rounds_now(v->dp->comm, (lossynet_phase)phase);
        if (rounds == v->rounds[phase]) continue;
        snprintf(line, sizeof line,
                 "%6d  %.1f%% of %s lost of late: from now on %d round%s instead of %d",
                 v->last.step + 1, 100 * lossynet_lost_of_late(v->dp->comm, (lossynet_phase)phase),
                 what[phase], rounds, rounds == 1 ? "" : "s", v->rounds[phase]);
        v->rounds[phase] = rounds;
        v->quiet_until = v->last.step + PAUSE;
        progress_message(&v->progress, line);
    }
}

int training_finish_end(struct training_view *v) {
    struct training *run = v->run;
    struct step_metrics *r = &v->last;
    if (!data_parallel_is_unfinished(v->dp)) return 0;
    if (data_parallel_finish_end(v->dp, r)) return -1;
    run->recent[r->step % HANDOVER_STEPS] = *r;
    metrics_add(&run->at.record, r);
    metrics_show_step(&v->progress, r, v->dp->workers > 1);
    note_rounds(v);
    metrics_log_step(v->log, r);
    return data_parallel_log_buckets(v->dp, v->log, r->step);
}

int training_finish_step(struct training_view *v) {
    return training_finish_begin(v) || training_finish_end(v) ? -1 : 0;
}

/* Sets where the run stands after `done` steps. */
static void advance(struct training_view *v, int done) {
    const struct options *o = v->run->options;
    struct resume_point *at = &v->run->at;
    const uint64_t batches = (uint64_t)options_micro_batches(o, v->dp->workers);
    at->sequence += (uint64_t)(done - at->step) * batches * (uint64_t)o->batch;
    at->step = done;
}

/* With --deadline ranks may be at different steps, and they learn at different times that one of
 * them stops or is broken. Before they do anything together, all meet and agree on a step. */
static int meet(struct training_view *v, struct data_parallel_news *news) {
    news->step = v->run->at.step;
    if (training_finish_step(v) || data_parallel_agree(v->dp, news)) return -1;
    advance(v, news->step);
    return 0;
}

/* What is due now. A checkpoint that was not complete when ranks changed is due, too. */
static struct due due_now(const struct training_view *v, bool stop) {
    return due_after(v->run->options, v->run->at.step, stop, async_writer_is_behind(v->saver));
}

static struct metrics_traffic traffic_of(const struct training_view *v) {
    const lossynet_wire_dtype dtype = (lossynet_wire_dtype)v->run->options->net.wire_dtype;
    struct metrics_traffic t;
    for (int phase = 0; phase < 2; phase++) {
        t.rounds[phase] = lossynet_rounds_now(v->dp->comm, (lossynet_phase)phase);
        t.bytes[phase] = lossynet_wire_bytes(dtype, (lossynet_phase)phase);
    }
    return t;
}

/* Says that the run has stopped at a loss, norm or gradient that is not finite. Returns -1. checkpoint:
 * the last one, "" if there is none. */
static int report_not_finite(const struct training_view *v, const char *checkpoint,
                             const struct lossynet_not_finite *found) {
    const struct data_parallel *d = v->dp;
    const struct step_metrics *r = &v->record;
    const int odd = data_parallel_odd_worker(d);
    const bool norm = isfinite(r->loss);
    const char *last = *checkpoint ? checkpoint : "none was written";
    char what[256] = "", tensor[96];
    if (odd >= 0)
        return log_error("stopped in step %d: the loss of worker %d is %g, and that of no other "
                         "worker: expected memory, processor and GPU of its rank to work; last "
                         "good checkpoint: %s",
                         r->step, odd, r->loss, last);
    if (found->workers) {
        param_layout_name(d->layout, found->element, tensor);
        snprintf(what, sizeof what, "the %s of %sworker %d is %g in %s",
                 found->phase == LOSSYNET_PARAMETER ? "part of the parameters" : "gradient",
                 comm_group(d->options) > 1 ? "the group of " : "", found->worker, found->value,
                 tensor);
    }
    if (found->workers == 1 && d->workers > 1)
        return log_error("stopped in step %d: %s, and that of no other worker: expected memory, "
                         "processor and GPU of its rank to work; last good checkpoint: %s; if it "
                         "comes again, a lower --lr or a longer --warmup may help",
                         r->step, what, last);
    return log_error("stopped in step %d: the %s is %g%s%s%s; last good checkpoint: %s; a lower "
                     "--lr or a longer --warmup may help",
                     r->step, norm ? "gradient norm" : "loss", norm ? r->grad_norm : r->loss,
                     norm && isfinite(r->grad_norm) ? ", expected below 1.1e12" : "",
                     *what ? ", and " : "", what, last);
}

static int end_not_finite(struct training_view *v) {
    struct lossynet_not_finite found;
    if (async_writer_finish(v->saver) || data_parallel_find_not_finite(v->dp, &found)) return -1;
    const char *checkpoint = async_writer_last(v->saver);
    progress_end(&v->progress);
    metrics_log_step(v->log, &v->record);
    const struct metrics_traffic traffic = traffic_of(v);
    metrics_log_end(v->log, &v->run->at.record, "not finite", &traffic, NULL, checkpoint);
    return v->dp->world.rank > 0 ? -1 : report_not_finite(v, checkpoint, &found);
}

int training_after_step(struct training_view *v, struct data_parallel_news *news, struct due *due) {
    const bool skips = lossynet_skips_late(v->dp->comm);
    news->broken = !data_parallel_is_finite(v->dp, v->record.loss, v->record.grad_norm);
    if (news->broken && !skips) return end_not_finite(v);
    advance(v, v->record.step + 1);
    async_writer_poll(v->saver, &news->stop);
    news->ranks_change = views_end_here(v->run->views);
    *due = due_now(v, news->stop);
    if (skips &&
        (due->any || news->broken || news->ranks_change || lossynet_is_awaited(v->dp->comm))) {
        if (meet(v, news)) return -1;
        if (news->broken) return end_not_finite(v);
        *due = due_now(v, news->stop);
    }
    return due->any ? training_finish_step(v) : 0;
}

void training_stop(const struct training_view *v, struct data_parallel_news *news,
                   struct due *due) {
    news->stop = true;
    *due = due_now(v, true);
    due->samples = false;
}

/* ---- the end of a view, and of the run -------------------------------------------------- */

int training_end(struct training_view *v, bool stopped, const struct eval_metrics *eval) {
    const int step = v->run->at.step;
    if (async_writer_finish(v->saver) || data_parallel_log_links(v->dp, v->log, step) ||
        data_parallel_log_late(v->dp, v->log, step))
        return -1;
    const char *checkpoint = async_writer_last(v->saver);
    progress_end(&v->progress);
    if (v->progress.on && stopped) printf("stopped by a signal after %d steps\n", step);
    const struct metrics_traffic traffic = traffic_of(v);
    if (v->progress.on && v->dp->workers > 1 && v->run->options->algorithm == ALGORITHM_LOSSY)
        metrics_print_traffic(&v->run->at.record, &traffic);
    if (v->progress.on && *checkpoint) printf("model in %s\n", checkpoint);
    const bool lost = async_writer_has_failed(v->saver);
    const char *status = lost ? "not saved" : stopped ? "stopped" : "complete";
    metrics_log_end(v->log, &v->run->at.record, status, &traffic, eval, checkpoint);
    if (!lost) return 0;
    if (v->dp->world.rank > 0) return -1;
    return *checkpoint ? log_error("step %d could not be saved, see above: the newest checkpoint "
                                   "is '%s'",
                                   step, checkpoint)
                       : log_error("no checkpoint could be written to '%s', see above",
                                   v->run->options->out);
}

int training_leave(struct training_view *v, bool agreed) {
    struct resume_point *at = &v->run->at;
    if (v->updated > at->step) advance(v, v->updated);
    if (views_leave(v->run->views, v->dp, agreed)) return -1;
    const struct step_metrics *r = v->last.step == at->step - 1 ? &v->last : &v->record;
    if (data_parallel_is_unfinished(v->dp) && r->step == at->step - 1) /* nobody will measure it */
        metrics_add(&at->record, r);
    progress_end(&v->progress);
    return 0;
}

int training_next_view(struct training *run) {
    if (views_next(run->views)) return -1;
    run->world = views_world(run->views);
    return 0;
}
