/* evaluate.c — see evaluate.h. */
#include "llmc/run/evaluate.h"

#include <stdlib.h>
#include <string.h>

#include "llmc/comm/data_parallel_model.h"
#include "llmc/log/error.h"

struct work {
    const struct evaluate_model *m;
    const struct dataloader *val;
    const float *fresh; /* the model */
    bool replicas;
    uint64_t windows;
};

/* Sum of the losses (B, T) without the first `skip` of each window. */
static double sum_losses(const float *losses, int B, int T, int skip) {
    double sum = 0;
    for (int b = 0; b < B; b++) sum += mean_loss(losses + b * T + skip, T - skip) * (T - skip);
    return sum;
}

static void worker_evaluates(void *context, struct worker *w, int set) {
    const struct work *work = context;
    const struct evaluate_model *m = work->m;
    struct data_parallel *d = m->dp;
    struct activations *e = &m->activations[set];
    double *sums = d->numbers.mine + 3 * (w - d->worker); /* loss: model, replica; tokens */
    memset(sums, 0, 3 * sizeof *sums);
    for (int pass = 0; pass < (work->replicas ? 2 : 1); pass++) {
        const weight *weights =
            pass ? data_parallel_replica(d, w) : data_parallel_weights(d, work->fresh);
        for (uint64_t i = (uint64_t)w->id; i < work->windows;) {
            const struct dataloader_batch b =
                dataloader_window_batch(work->val, &i, (uint64_t)d->workers, work->windows, m->B,
                                        e->host_tokens, e->host_targets);
            const float *losses = m->losses(m->context, weights, e, b.windows, b.length);
            sums[pass] += sum_losses(losses, b.windows, b.length, b.skip);
            if (!pass) sums[2] += (double)b.windows * (b.length - b.skip);
        }
    }
}

int evaluate_perplexity(const struct evaluate_model *m, const struct dataloader *val,
                        int steps_done, struct eval_metrics *out) {
    struct data_parallel *d = m->dp;
    struct work work = {.m = m,
                        .val = val,
                        .replicas = !data_parallel_replicas_are_exact(d),
                        .windows = dataloader_windows(val)};
    const uint64_t limit = (uint64_t)d->options->eval_sequences;
    double total[3] = {0, 0, 0};
    if (limit && work.windows > limit) work.windows = limit;
    if (data_parallel_model(d, &work.fresh)) return -1;
    group_work(&d->group, d->worker, d->local, worker_evaluates, &work);
    if (lossynet_all_gather(d->comm, d->numbers.mine, d->numbers.gathered, 3 * sizeof(double)))
        return -1;
    for (int i = 0; i < 3 * d->workers; i++) total[i % 3] += d->numbers.gathered[i];
    *out = (struct eval_metrics){.step = steps_done,
                                 .tokens = (int64_t)total[2],
                                 .val_loss = total[0] / total[2],
                                 .tokens_per_word = dataloader_targets_per_word(val),
                                 .tokens_per_byte = dataloader_targets_per_byte(val)};
    out->replica_val_loss = work.replicas ? total[1] / total[2] : out->val_loss;
    return 0;
}

/* The losses of a question's endings, each summed over its tokens. */
static void score_endings(const struct evaluate_model *m, const weight *weights,
                          const struct choices *choices, int question, double *losses) {
    struct activations *e = m->activations;
    const int endings = choices_endings(choices, question);
    for (int first = 0, B; first < endings; first += B) {
        B = endings - first < m->B ? endings - first : m->B;
        const int T = choices_write(choices, question, first, B, e->host_tokens, e->host_targets);
        choices_read(choices, question, first, B, T, m->losses(m->context, weights, e, B, T),
                     losses);
    }
}

int evaluate_choices(const struct evaluate_model *m, const struct choices *choices,
                     struct choices_result *out) {
    const size_t most = (size_t)choices_most_endings(choices);
    double *losses = calloc(most, sizeof *losses);
    if (!losses) return log_out_of_memory("losses", (double)(most * sizeof *losses));
    for (int q = 0; q < choices_questions(choices); q++) {
        score_endings(m, data_parallel_weights(m->dp, m->dp->worker[0].params), choices, q, losses);
        choices_judge(choices, q, losses, out);
    }
    free(losses);
    return 0;
}
