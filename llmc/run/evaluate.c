/* evaluate.c — see evaluate.h. */
#include "llmc/run/evaluate.h"

#include <math.h>
#include <stdlib.h>

#include "llmc/comm/data_parallel_model.h"
#include "llmc/log/error.h"
#include "llmc/log/jsonl.h"
#include "llmc/util/stop_signal.h"

struct position { /* how far a worker has come */
    int pass;     /* 0: the model, 1: its replica */
    uint64_t window;
    double loss[2], tokens; /* sums: of each pass, of the first */
};

struct work {
    const struct evaluate_model *m;
    struct dataloader *val;
    const float *fresh; /* the model */
    int passes;
    uint64_t windows;
    int batches;         /* that a worker evaluates before ranks meet again */
    struct position *at; /* [local] */
};

struct news { /* what workers tell each other after each part */
    double loss[2], tokens;
    double seconds; /* that the part took */
    int32_t stop, failed,
        unready; /* a signal asks to stop; the data have changed; windows are left */
};

/* Sum of the losses (B, T) without the first `skip` of each window. */
static double sum_losses(const float *losses, int B, int T, int skip) {
    double sum = 0;
    for (int b = 0; b < B; b++) sum += mean_loss(losses + b * T + skip, T - skip) * (T - skip);
    return sum;
}

static void evaluate_batch(const struct work *work, const struct worker *w, int set,
                           struct position *at) {
    const struct evaluate_model *m = work->m;
    struct data_parallel *d = m->dp;
    struct activations *e = &m->activations[set];
    const weight *weights =
        at->pass ? data_parallel_replica(d, w) : data_parallel_weights(d, work->fresh);
    const struct dataloader_batch b =
        dataloader_window_batch(work->val, &at->window, (uint64_t)d->workers, work->windows, m->B,
                                e->host_tokens, e->host_targets);
    const float *losses = m->losses(m->context, weights, e, b.windows, b.length);
    at->loss[at->pass] += sum_losses(losses, b.windows, b.length, b.skip);
    if (!at->pass) at->tokens += (double)b.windows * (b.length - b.skip);
}

static void worker_evaluates(void *context, struct worker *w, int set) {
    const struct work *work = context;
    struct position *at = &work->at[w - work->m->dp->worker];
    for (int batches = work->batches; at->pass < work->passes && batches > 0;) {
        if (at->window < work->windows)
            evaluate_batch(work, w, set, at), batches--;
        else
            at->pass++, at->window = (uint64_t)w->id;
    }
}

/* Sums what all workers have so far. sum->seconds: what this rank's part took; then the slowest rank's.
 * Returns 0, or -1 after reporting. */
static int gather(const struct work *work, struct news *mine, struct news *all, struct news *sum) {
    struct data_parallel *d = work->m->dp;
    for (int w = 0; w < d->local; w++) {
        const struct position *at = &work->at[w];
        mine[w] = (struct news){{at->loss[0], at->loss[1]},
                                at->tokens,
                                sum->seconds,
                                stop_signal_seen() != 0,
                                dataloader_check(work->val) != 0,
                                at->pass < work->passes};
    }
    *sum = (struct news){{0, 0}, 0, 0, 0, 0, 0};
    if (lossynet_all_gather(d->comm, mine, all, sizeof *mine)) return -1;
    for (int w = 0; w < d->workers; w++) {
        sum->loss[0] += all[w].loss[0], sum->loss[1] += all[w].loss[1];
        sum->tokens += all[w].tokens;
        sum->seconds = fmax(sum->seconds, all[w].seconds);
        sum->stop |= all[w].stop, sum->failed |= all[w].failed;
        sum->unready |= all[w].unready;
    }
    return sum->failed ? -1 : 0;
}

/* Ranks meet about once per second, and learn whether one of them was asked to stop. */
static int evaluate_parts(struct work *work, struct news *mine, struct news *all,
                          struct news *sum) {
    struct data_parallel *d = work->m->dp;
    for (int w = 0; w < d->local; w++) work->at[w].window = (uint64_t)d->worker[w].id;
    for (work->batches = 1;;) {
        const double begin = log_seconds();
        port_work(&d->port, worker_evaluates, work);
        sum->seconds = log_seconds() - begin;
        if (gather(work, mine, all, sum)) return -1;
        if (!sum->unready) return 0;
        if (sum->stop) return EVALUATE_STOPPED;
        if (sum->seconds < 0.5 && work->batches < 1 << 20) work->batches *= 2;
    }
}

/* A perplexity that is not finite is no result. Names the first worker that has it. */
static int check(const struct data_parallel *d, const struct eval_metrics *e,
                 const struct news *all) {
    int w = 0;
    if (isfinite(exp(e->val_loss)) && isfinite(exp(e->replica_val_loss))) return 0;
    while (w < d->workers - 1 && isfinite(exp(all[w].loss[0] / fmax(1, all[w].tokens))) &&
           isfinite(exp(all[w].loss[1] / fmax(1, all[w].tokens))))
        w++;
    if (d->world.rank > 0) return -1;
    return log_error("after %d steps the validation loss is %g, that of a replica %g: expected a "
                     "finite perplexity; worker %d is the first that computes it: expected a model "
                     "that has not diverged, or memory, processor and GPU of its rank to work",
                     e->step, e->val_loss, e->replica_val_loss, w);
}

int evaluate_perplexity(const struct evaluate_model *m, struct dataloader *val, int steps_done,
                        struct eval_metrics *out) {
    struct data_parallel *d = m->dp;
    struct work work = {.m = m,
                        .val = val,
                        .passes = data_parallel_replicas_are_exact(d) ? 1 : 2,
                        .windows = dataloader_windows(val)};
    const uint64_t limit = (uint64_t)d->options->eval_sequences;
    struct news *news = calloc((size_t)(d->local + d->workers), sizeof *news), sum = {0};
    work.at = calloc((size_t)d->local, sizeof *work.at);
    if (limit && work.windows > limit) work.windows = limit;
    int status = news && work.at ? 0 : log_out_of_memory("losses", 0);
    if (!status) status = data_parallel_model(d, &work.fresh);
    if (!status) status = evaluate_parts(&work, news, news + d->local, &sum);
    if (!status) status = dataloader_check_files(val);
    *out = (struct eval_metrics){.step = steps_done,
                                 .tokens = (int64_t)sum.tokens,
                                 .val_loss = sum.loss[0] / sum.tokens,
                                 .tokens_per_word = dataloader_targets_per_word(val),
                                 .tokens_per_byte = dataloader_targets_per_byte(val)};
    out->replica_val_loss = work.passes > 1 ? sum.loss[1] / sum.tokens : out->val_loss;
    if (!status) status = check(d, out, news + d->local);
    free(work.at);
    free(news);
    return status;
}
