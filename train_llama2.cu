/* train_llama2.cu — pretrains Llama-2 across machines whose network is allowed to lose packets.
 *
 * Read top to bottom:
 *
 *     model        forward and backward
 *     trainer      what a run needs: backend, workers and network, data
 *     step         four verbs (forward and backward, average, update, broadcast), and the
 *                  algorithms that are made of them: lossy and reliable, rps, naive
 *     evaluation   perplexity of the model and of the replicas; multiple-choice questions
 *     writing      text that the model generates
 *     training     the loop, its log and its checkpoints
 *     other modes  --eval, --eval-choices, --generate, --dry-run (--preflight: llmc/cli/preflight.h)
 *     main
 *
 * Arithmetic is behind llmc/backend/backend.h; the workers' memory and the network are behind
 * llmc/comm/data_parallel.h. This file does not depend on how they work. A function that finds an
 * error reports it in one line and returns -1. Its callers return -1, too; main sets the exit code.
 *
 * This is C11 in the subset that is C++20 too.
 */
#include "llmc/model/activations.h"
#include "llmc/backend/backend.h"
#include "llmc/backend/cuda/backend_cuda.h"
#include "llmc/checkpoint/hf_model.h"
#include "llmc/model/config.h"
#include "llmc/data/choices.h"
#include "llmc/data/dataloader.h"
#include "llmc/data/tokenizer_file.h"
#include "llmc/cli/dry_run.h"
#include "llmc/cli/due.h"
#include "llmc/util/file.h"
#include "llmc/cli/generate.h"
#include "llmc/model/param_layout.h"
#include "llmc/options/options.h"
#include "llmc/cli/out_lock.h"
#include "llmc/cli/run_data.h"
#include "llmc/cli/run_end.h"
#include "llmc/cli/preflight.h"
#include "llmc/log/metrics.h"
#include "llmc/log/error.h"
#include "llmc/checkpoint/resume.h"
#include "llmc/log/jsonl.h"
#include "llmc/comm/async_writer.h"
#include "llmc/comm/data_parallel_model.h"
#include "llmc/comm/settings.h"
#include "llmc/comm/views.h"
#include "llmc/util/stop_signal.h"
#include "llmc/util/threads.h"
#include "llmc/cli/validate.h"
#include "llmc/memory/worker.h"
#include "lossynet/lossynet_trainer.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef GIT_REVISION
#define GIT_REVISION "unknown"
#endif

/* ---- model ------------------------------------------------------------------------------ */

/* llmc/model/param_layout.h says where each parameter lies in the flat vector that the network
 * averages. llmc/model/activations.h lists what is kept between forward and backward. */

/* The address of element `offset` of a tensor, and of a vector of parameters in use. */
static tensor *at(const struct backend *be, const tensor *vector, size_t offset) {
    return (char *)vector + offset * be->element_bytes;
}

static const weight *weight_at(const struct backend *be, const weight *vector, size_t offset) {
    return (const char *)vector + offset * be->weight_bytes;
}

/* From a->tokens (B, T) to a->last_norm (B, T, C), the classifier's input. hooks: the network works
 * while the model computes (comm/bucket_pipeline.h); may be NULL. */
static void model_forward(const struct backend *be, const struct param_layout *l,
                          const weight *params, struct activations *a, int B, int T,
                          struct bucket_hooks *hooks) {
    const struct llama_config *c = &l->config;
    const int N = B * T, C = c->width, F = c->hidden, H = c->heads, K = c->kv_heads;
    const int D = c->head_size, QKV = (H + 2 * K) * D;
#define W(where) weight_at(be, params, where)
    for (int i = 0; i < c->layers; i++) {
        const struct layer_offsets *o = &l->layer[i];
        const struct layer_activations *x = &a->layer[i];
        if (i == 0) bucket_needed(hooks, l->buckets - 1);
        bucket_needed(hooks, param_layout_bucket_of_layer(l, i));
        if (i == 0) {
            be->embedding_forward(x->residual, a->tokens, W(l->embedding), N, C);
            be->rmsnorm_forward(x->attention_norm, x->attention_rstd, x->residual,
                                W(o->attention_norm), N, C, c->norm_eps);
        } else {
            be->residual_rmsnorm_forward(x->residual, x->attention_norm, x->attention_rstd,
                                         a->layer[i - 1].middle, a->projected, W(o->attention_norm),
                                         N, C, c->norm_eps);
        }
        tensor *qkv = at(be, x->qkv, (size_t)a->past * QKV);
        be->matmul_forward(qkv, x->attention_norm, W(o->qkv), N, C, QKV);
        be->rope(qkv, a->cosine + a->past * D / 2, a->sine + a->past * D / 2, B, T, H, K, D, false);
        if (a->past > 0)
            be->attention_continue(x->attention, x->qkv, a->past, T, H, K, D);
        else
            be->attention_forward(x->attention, x->log_sum_exp, qkv, B, T, H, K, D);
        be->matmul_forward(a->projected, x->attention, W(o->attention_out), N, H * D, C);
        be->residual_rmsnorm_forward(x->middle, x->mlp_norm, x->mlp_rstd, x->residual, a->projected,
                                     W(o->mlp_norm), N, C, c->norm_eps);
        be->matmul_forward(x->gate_up, x->mlp_norm, W(o->gate_up), N, C, 2 * F);
        be->swiglu_forward(x->swiglu, x->gate_up, N, F);
        be->matmul_forward(a->projected, x->swiglu, W(o->down), N, F, C);
    }
    be->residual_rmsnorm_forward(a->last, a->last_norm, a->last_rstd,
                                 a->layer[c->layers - 1].middle, a->projected, W(l->final_norm), N,
                                 C, c->norm_eps);
}

/* Computes again what forward did not keep of layer i (activations.h, --recompute). */
static void recompute_layer(const struct backend *be, const struct param_layout *l,
                            const weight *params, struct activations *a, int i, int B, int T) {
    const struct llama_config *c = &l->config;
    const struct layer_offsets *o = &l->layer[i];
    const struct layer_activations *x = &a->layer[i];
    const int N = B * T, C = c->width, F = c->hidden, H = c->heads, K = c->kv_heads;
    const int D = c->head_size, QKV = (H + 2 * K) * D;
    be->rmsnorm_forward(x->attention_norm, x->attention_rstd, x->residual, W(o->attention_norm), N,
                        C, c->norm_eps);
    if (a->recompute >= RECOMPUTE_ATTENTION) {
        be->matmul_forward(x->qkv, x->attention_norm, W(o->qkv), N, C, QKV);
        be->rope(x->qkv, a->cosine, a->sine, B, T, H, K, D, false);
        be->attention_forward(x->attention, x->log_sum_exp, x->qkv, B, T, H, K, D);
    }
    if (a->recompute >= RECOMPUTE_BLOCK) {
        be->matmul_forward(a->projected, x->attention, W(o->attention_out), N, H * D, C);
        be->residual_rmsnorm_forward(x->middle, x->mlp_norm, x->mlp_rstd, x->residual, a->projected,
                                     W(o->mlp_norm), N, C, c->norm_eps);
        be->matmul_forward(x->gate_up, x->mlp_norm, W(o->gate_up), N, C, 2 * F);
    } else {
        be->rmsnorm_forward(x->mlp_norm, x->mlp_rstd, x->middle, W(o->mlp_norm), N, C, c->norm_eps);
    }
    be->swiglu_forward(x->swiglu, x->gate_up, N, F);
}

/* Runs forward, classifier and backward of B x T tokens. Writes the gradients of scale * sum of the
 * losses to `grads`, or adds them with `accumulate`. Leaves the losses in a->losses (B*T). */
static void model_forward_backward(const struct backend *be, const struct param_layout *l,
                                   const weight *params, const struct gradient_place *grads,
                                   struct activations *a, int B, int T, float scale,
                                   bool accumulate, struct bucket_hooks *hooks) {
    const struct llama_config *c = &l->config;
    const int N = B * T, C = c->width, F = c->hidden, H = c->heads, K = c->kv_heads;
    const int D = c->head_size, QKV = (H + 2 * K) * D;
#define G(where) param_layout_gradient(l, grads, where)
    model_forward(be, l, params, a, B, T, hooks);
    if (!c->tied) bucket_needed(hooks, 0);
    be->classifier(a->losses, a->dnorm, G(l->classifier), a->last_norm, W(l->classifier),
                   a->targets, N, C, c->vocabulary, scale, accumulate);
    if (!c->tied) bucket_done(hooks, 0);
    be->clear(a->dresidual, (size_t)N * C * be->element_bytes);
    be->rmsnorm_backward(a->dresidual, G(l->final_norm), a->dnorm, a->last, W(l->final_norm),
                         a->last_rstd, N, C, accumulate);
    for (int i = c->layers - 1; i >= 0; i--) {
        const struct layer_offsets *o = &l->layer[i];
        const struct layer_activations *x = &a->layer[i];
        /* The activations of the last layer are still there. */
        if (a->recompute && i < c->layers - 1) recompute_layer(be, l, params, a, i, B, T);
        be->matmul_backward_weight(G(o->down), a->dresidual, x->swiglu, N, F, C, accumulate);
        be->matmul_backward_input(a->dswiglu, a->dresidual, W(o->down), N, F, C, false);
        be->swiglu_backward(a->dgate_up, a->dswiglu, x->gate_up, N, F);
        be->matmul_backward_weight(G(o->gate_up), a->dgate_up, x->mlp_norm, N, C, 2 * F,
                                   accumulate);
        be->matmul_backward_input(a->dnorm, a->dgate_up, W(o->gate_up), N, C, 2 * F, false);
        be->rmsnorm_backward(a->dresidual, G(o->mlp_norm), a->dnorm, x->middle, W(o->mlp_norm),
                             x->mlp_rstd, N, C, accumulate);
        be->matmul_backward_weight(G(o->attention_out), a->dresidual, x->attention, N, H * D, C,
                                   accumulate);
        be->matmul_backward_input(a->dattention, a->dresidual, W(o->attention_out), N, H * D, C,
                                  false);
        be->attention_backward(a->dqkv, a->dattention, x->attention, x->qkv, x->log_sum_exp, B, T,
                               H, K, D);
        be->rope(a->dqkv, a->cosine, a->sine, B, T, H, K, D, true);
        be->matmul_backward_weight(G(o->qkv), a->dqkv, x->attention_norm, N, C, QKV, accumulate);
        be->matmul_backward_input(a->dnorm, a->dqkv, W(o->qkv), N, C, QKV, false);
        be->rmsnorm_backward(a->dresidual, G(o->attention_norm), a->dnorm, x->residual,
                             W(o->attention_norm), x->attention_rstd, N, C, accumulate);
        bucket_done(hooks, param_layout_bucket_of_layer(l, i));
    }
    /* A tied table already holds the classifier's part of its gradient. */
    be->embedding_backward(G(l->embedding), a->tokens, a->dresidual, N, C, c->vocabulary,
                           accumulate || c->tied);
    bucket_done(hooks, l->buckets - 1);
#undef W
#undef G
}

/* Mean of the first n losses, in double. */
static double mean_loss(const float *losses, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += losses[i];
    return sum / n;
}

/* ---- trainer ---------------------------------------------------------------------------- *
 * llmc/comm/data_parallel.h has the workers of this rank, their memory, and the network. On a CPU
 * with at least as many groups of workers as threads, each thread computes whole groups with
 * activations of its own (without --group, each worker is a group). Else there is one set of these:
 * workers take turns, and each operation uses all threads. */

struct worker_result { /* of a worker's forward and backward passes */
    double loss;       /* mean over its tokens; negative: it computed no gradient */
    int unread;        /* micro-batches whose losses are not in `loss` yet */
    double waited;     /* seconds that it waited for parameters */
    lossynet_status status;
};

struct training { /* what survives a change of ranks (--meet) */
    const struct options *options;
    struct llama_config config; /* read once: the checkpoint may be gone in a later view */
    struct views *views;        /* where ranks may change; NULL without --meet */
    struct out_lock lock;       /* rank 0's, until the end of the run */
    struct resume_point at;     /* how far the run has come: steps and data */
    struct step_metrics recent[HANDOVER_STEPS]; /* handover.h */
};

struct trainer { /* the part of a run that the same ranks train */
    struct training run;
    const struct backend *be;
    struct param_layout layout;
    struct data_parallel dp; /* the workers and the network */
    int B, T, sets;
    struct activations *activations; /* [sets] */
    bool faster_in_bf16;             /* comm/select.h */
    struct dataloader *train, *val;
    struct worker_result *result;     /* [local] */
    struct step_metrics record, last; /* of this step; of the step before */
    const char *tokenizer;
    int updated;    /* steps that this rank's owners made; may be ahead of run.at */
    bool continues; /* the state came from ranks of an earlier view (--meet) */
    struct run_info facts;
    struct async_writer *saver;
    struct jsonl *log;
    struct progress progress;
};

static void trainer_release(struct trainer *t) {
    async_writer_close(t->saver);
    data_parallel_close(&t->dp);
    for (int e = 0; t->activations && e < t->sets; e++)
        activations_release(&t->activations[e], t->be);
    free(t->activations);
    free(t->result);
    dataloader_close(t->train);
    dataloader_close(t->val);
    param_layout_release(&t->layout);
    jsonl_close(t->log);
}

/* Chooses the backend, opens the comm and allocates all memory. Needs layout, workers, B and T. */
static int trainer_open(struct trainer *t, bool training) {
    struct backend_choice choice;
    bool tell = t->dp.world.rank == 0 && !t->run.options->quiet && !t->run.options->generate &&
                views_are_new(t->run.views);
    if (data_parallel_choose(&t->dp, t->B, t->T, training, tell, &choice) ||
        data_parallel_open(&t->dp))
        return -1;
    t->be = choice.backend;
    t->faster_in_bf16 = choice.faster_in_bf16;
    t->sets = t->dp.group.sets;
    t->activations = (struct activations *)calloc((size_t)t->sets, sizeof *t->activations);
    t->result = (struct worker_result *)calloc((size_t)t->dp.local, sizeof *t->result);
    if (!t->activations || !t->result) return log_out_of_memory("the list of workers", 0);
    for (int e = 0; e < t->sets; e++)
        if (activations_allocate(&t->activations[e], &t->layout.config, t->be, t->B, t->T, training,
                                 choice.recompute))
            return -1;
    return 0;
}

/* ---- step ------------------------------------------------------------------------------- */

/* Adds the losses of w's micro-batches to its result, but for those of the last `unread`. */
static void read_losses(struct trainer *t, const struct worker *w, struct activations *a,
                        int unread) {
    struct worker_result *result = &t->result[w - t->dp.worker];
    double counts;
    const int M = data_parallel_micro_batches(&t->dp, w, &counts);
    for (; result->unread > unread; result->unread--)
        result->loss += counts * mean_loss(activations_read_losses(a, t->be), t->B * t->T) / M;
}

/* Runs forward and backward of one worker on its replica and its share of the data. Unless the data
 * are split in advance (--data-split), worker w takes sequences w*B ... w*B+B-1 of each N*B: the
 * global batch is the same however it is spread. Leaves the results in t->result; the losses of
 * the last pass are added later, since on a device it is still computed. */
static void worker_gradient(void *trainer, struct worker *w, int set) {
    struct trainer *t = (struct trainer *)trainer;
    struct activations *a = &t->activations[set];
    const int B = t->B, T = t->T;
    double counts;
    const int M = data_parallel_micro_batches(&t->dp, w, &counts);
    const float scale = (float)(counts / w->members) / ((float)B * T * M);
    const struct gradient_place gradient = group_gradient(&t->dp.group, w, set);
    struct bucket_hooks hooks = {&t->dp.pipeline, w, set, false, false, 0, LOSSYNET_OK};
    const weight *params = t->dp.pipeline.weights ? t->dp.pipeline.weights : w->params;
    struct worker_result *result = &t->result[w - t->dp.worker];
    result->waited = 0, result->loss = data_parallel_computes(&t->dp, w) ? 0 : -1;
    if (result->loss < 0) return;
    for (int m = 0; m < M; m++) {
        hooks.first = m == 0, hooks.last = m == M - 1;
        dataloader_batch(t->train, t->run.at.sequence, m, w->id, t->dp.workers, B, a->host_tokens,
                         a->host_targets);
        activations_send(a, t->be, B * T);
        model_forward_backward(t->be, &t->layout, params, &gradient, a, B, T, scale, m > 0, &hooks);
        activations_send_losses(a, t->be, B * T);
        result->unread++;
        for (const struct worker *k = t->dp.worker; k < w && t->sets == 1; k++)
            read_losses(t, k, a, 0); /* this worker's first pass is queued */
        read_losses(t, w, a, t->sets == 1 ? 1 : 0);
    }
    result->waited = hooks.waited;
    result->status = hooks.status;
}

/* The verbs of a step return 0, FAILED after reporting, or NOT_FINITE: the loss or the norm in
 * t->record is not finite. Then the parameters are still good, and the caller stops. */
enum { FAILED = -1, NOT_FINITE = 1 };

/* These two end the last step, if it has not ended. The first closes its PARAMETER phase. The
 * second records the step, after ranks have exchanged what they measured. */
static int finish_step_begin(struct trainer *t) {
    t->last = t->record;
    return t->dp.time.unfinished ? data_parallel_finish_begin(&t->dp, &t->last) : 0;
}

static int finish_step_end(struct trainer *t) {
    struct step_metrics *r = &t->last;
    if (!t->dp.time.unfinished) return 0;
    if (data_parallel_finish_end(&t->dp, r)) return -1;
    t->run.recent[r->step % HANDOVER_STEPS] = *r;
    metrics_add(&t->run.at.record, r);
    metrics_show_step(&t->progress, r, t->dp.workers > 1);
    comm_note_loss(t->run.options, &t->run.at.record, &t->progress);
    metrics_log_step(t->log, r);
    return 0;
}

static int finish_step(struct trainer *t) {
    return finish_step_begin(t) || finish_step_end(t) ? -1 : 0;
}

/* ---- the four verbs: forward and backward, average, update, broadcast ---- */

/* Runs forward and backward of all workers; a device may still compute on return. With overlap,
 * gradients are sent during backward. The parameters of the step before arrive during forward, and
 * that step is finished only here. */
static int forward_backward(struct trainer *t, int step) {
    const struct options *o = t->run.options;
    struct step_metrics *r = &t->record;
    double waited = 0;
    if (data_parallel_begin(&t->dp, &step)) return FAILED;
    group_work(&t->dp.group, t->dp.worker, t->dp.local, worker_gradient, t);
    if (t->result[0].loss >= 0) t->dp.pipeline.arriving = false; /* forward received them all */
    for (int w = 0; w < t->dp.local; w++) {
        if (t->result[w].status) return FAILED;
        waited = fmax(waited, t->result[w].waited);
    }
    t->dp.time.communicating += waited;
    if (finish_step_begin(t)) return FAILED;
    memset(r, 0, sizeof *r);
    r->step = step;
    r->tokens = (double)options_micro_batches(o, t->dp.workers) * t->B * t->T;
    const struct schedule schedule = options_schedule(o);
    r->learning_rate = schedule_learning_rate(&schedule, step);
    return 0;
}

/* Waits for the losses. The exchange of the norm carries them and other news to all ranks. */
static int tell_numbers(struct trainer *t) {
    for (int w = 0; w < t->dp.local; w++) {
        if (t->sets == 1) read_losses(t, &t->dp.worker[w], t->activations, 0);
        t->dp.numbers.mine[w] = t->result[w].loss;
    }
    return data_parallel_tell_losses(&t->dp) || async_writer_tell(t->saver) ||
                   views_tell(t->run.views, &t->dp)
               ? FAILED
               : 0;
}

/* Call after the norm was exchanged: that exchange carried all other numbers of the step, too. */
static int look_at_numbers(struct trainer *t) {
    t->record.loss = data_parallel_mean_loss(&t->dp);
    if (finish_step_end(t)) return FAILED;
    return isfinite(t->record.loss) && isfinite(t->record.grad_norm) ? 0 : NOT_FINITE;
}

/* Owners average the gradients that they receive. */
static int average_gradients(struct trainer *t) {
    if (data_parallel_average_gradients(&t->dp) || tell_numbers(t) ||
        data_parallel_gradient_norm(&t->dp, &t->record.grad_norm))
        return FAILED;
    return look_at_numbers(t);
}

static struct worker_step step_of(const struct trainer *t) {
    const struct worker_step s = {.step = t->record.step,
                                  .learning_rate = t->record.learning_rate,
                                  .gradient_scale = 1,
                                  .lead = 0,
                                  .weights = NULL};
    return s;
}

/* Every worker steps on its own gradient. */
static int update_replicas(struct trainer *t) {
    if (tell_numbers(t) || data_parallel_update_replicas(&t->dp, step_of(t), &t->record.grad_norm))
        return FAILED;
    return look_at_numbers(t);
}

/* ---- the algorithms ---- */

/* lossy, reliable: owners average gradients, step, and broadcast parameters. */
static int step_lossy(struct trainer *t, int step) {
    int status = forward_backward(t, step);
    if (!status) status = average_gradients(t);
    if (status) return status;
    data_parallel_update_shards(&t->dp, step_of(t), t->record.grad_norm);
    t->run.recent[t->record.step % HANDOVER_STEPS] = t->record;
    t->updated = t->record.step + 1;
    return data_parallel_broadcast(&t->dp, ARRAY_PARAMS);
}

/* rps: every worker steps on its own gradient; owners average the models and broadcast them. */
static int step_rps(struct trainer *t, int step) {
    int status = forward_backward(t, step);
    if (!status) status = update_replicas(t);
    if (!status) status = data_parallel_average_models(&t->dp);
    return status ? status : data_parallel_broadcast(&t->dp, ARRAY_PARAMS);
}

/* naive: owners average gradients and broadcast the average; every worker steps on its copy. */
static int step_naive(struct trainer *t, int step) {
    int status = forward_backward(t, step);
    if (!status) status = average_gradients(t);
    if (!status) status = data_parallel_broadcast(&t->dp, ARRAY_GRADS);
    if (!status) data_parallel_update_received(&t->dp, step_of(t), t->record.grad_norm);
    return status;
}

/* Makes one step of all workers: `step`, or with --deadline perhaps a later one (t->record.step).
 * The caller checks whether loss and norm in t->record are finite. Returns 0, or -1. */
static int training_step(struct trainer *t, int step) {
    const int algorithm = t->run.options->algorithm;
    const int status = algorithm == ALGORITHM_RPS     ? step_rps(t, step)
                       : algorithm == ALGORITHM_NAIVE ? step_naive(t, step)
                                                      : step_lossy(t, step);
    if (status) return status == NOT_FINITE ? 0 : -1;
    return t->dp.pipeline.overlap || lossynet_skips_late(t->dp.comm) ? 0 : finish_step(t);
}

/* ---- evaluation ------------------------------------------------------------------------- *
 * The perplexity is exp of the mean loss over all tokens that the validation windows score.
 * Worker i mod N evaluates window i, once with the model ("fresh") and once with its own
 * replica.                                                                                    */

struct evaluation_work {
    struct trainer *t;
    const float *fresh;
    bool replicas;
    uint64_t windows;
};

/* The losses (B, T) of the tokens in e->host_tokens and e->host_targets. */
static const float *losses_of(struct trainer *t, const weight *weights, struct activations *e,
                              int B, int T) {
    const struct llama_config *c = &t->layout.config;
    activations_send(e, t->be, B * T);
    model_forward(t->be, &t->layout, weights, e, B, T, NULL);
    t->be->classifier(e->losses, NULL, NULL, e->last_norm,
                      weight_at(t->be, weights, t->layout.classifier), e->targets, B * T, c->width,
                      c->vocabulary, 1, false);
    return activations_losses(e, t->be, B * T);
}

/* Sum of the losses of B windows of T tokens, without the first `skip` of each. */
static double evaluate_batch(struct trainer *t, const weight *weights, struct activations *e, int B,
                             int T, int skip) {
    const float *losses = losses_of(t, weights, e, B, T);
    double sum = 0;
    for (int b = 0; b < B; b++) sum += mean_loss(losses + b * T + skip, T - skip) * (T - skip);
    return sum;
}

static void worker_evaluates(void *context, struct worker *w, int set) {
    const struct evaluation_work *work = (const struct evaluation_work *)context;
    struct trainer *t = work->t;
    struct activations *e = &t->activations[set];
    double *sums = t->dp.numbers.mine + 3 * (w - t->dp.worker); /* loss: model, replica; tokens */
    memset(sums, 0, 3 * sizeof *sums);
    for (int pass = 0; pass < (work->replicas ? 2 : 1); pass++) {
        const weight *weights =
            pass ? data_parallel_replica(&t->dp, w) : data_parallel_weights(&t->dp, work->fresh);
        for (uint64_t i = (uint64_t)w->id; i < work->windows;) {
            const struct dataloader_batch b =
                dataloader_window_batch(t->val, &i, (uint64_t)t->dp.workers, work->windows, t->B,
                                        e->host_tokens, e->host_targets);
            sums[pass] += evaluate_batch(t, weights, e, b.windows, b.length, b.skip);
            if (!pass) sums[2] += (double)b.windows * (b.length - b.skip);
        }
    }
}

static int evaluate(struct trainer *t, int steps_done, struct eval_metrics *out) {
    struct evaluation_work work = {.t = t,
                                   .fresh = NULL,
                                   .replicas = !data_parallel_replicas_are_exact(&t->dp),
                                   .windows = dataloader_windows(t->val)};
    uint64_t limit = (uint64_t)t->run.options->eval_sequences;
    double total[3] = {0, 0, 0};
    memset(out, 0, sizeof *out);
    if (limit && work.windows > limit) work.windows = limit;
    if (data_parallel_model(&t->dp, &work.fresh)) return -1;
    group_work(&t->dp.group, t->dp.worker, t->dp.local, worker_evaluates, &work);
    if (lossynet_all_gather(t->dp.comm, t->dp.numbers.mine, t->dp.numbers.gathered,
                            3 * sizeof(double)))
        return -1;
    for (int i = 0; i < 3 * t->dp.workers; i++) total[i % 3] += t->dp.numbers.gathered[i];
    out->step = steps_done;
    out->tokens = (int64_t)total[2];
    out->val_loss = total[0] / total[2];
    out->tokens_per_word = dataloader_targets_per_word(t->val);
    out->tokens_per_byte = dataloader_targets_per_byte(t->val);
    out->replica_val_loss = work.replicas ? total[1] / total[2] : out->val_loss;
    return 0;
}

/* The losses of a question's endings, each summed over its tokens. */
static void score_endings(struct trainer *t, const weight *weights, const struct choices *choices,
                          int question, double *losses) {
    struct activations *e = t->activations;
    const int endings = choices_endings(choices, question);
    for (int first = 0, B; first < endings; first += B) {
        B = endings - first < t->B ? endings - first : t->B;
        const int T = choices_write(choices, question, first, B, e->host_tokens, e->host_targets);
        choices_read(choices, question, first, B, T, losses_of(t, weights, e, B, T), losses);
    }
}

/* ---- writing ---------------------------------------------------------------------------- */

static void forward_tokens(const struct generate_llama *g, int count) {
    model_forward(g->be, g->layout, g->weights, g->activations, 1, count, NULL);
}

static struct generate_llama writer_of(struct trainer *t, const float *params) {
    const struct generate_llama g = {.be = t->be,
                                     .layout = &t->layout,
                                     .weights = data_parallel_weights(&t->dp, params),
                                     .activations = t->activations,
                                     .positions = t->T,
                                     .forward = forward_tokens};
    return g;
}

/* --sample-every: lets the model write a line, which goes to the terminal and the log. */
static int write_sample(struct trainer *t, int steps_done) {
    const float *model_parameters;
    struct generate_line line;
    if (data_parallel_model(&t->dp, &model_parameters)) return -1;
    if (t->dp.world.rank > 0) return 0;
    struct generate_llama writer = writer_of(t, model_parameters);
    const struct generate_model model = generate_model_of(&writer);
    if (generate_sample(&model, t->tokenizer, t->run.options, &line)) return -1;
    return metrics_sample(&t->progress, t->log, steps_done, line.text);
}

/* ---- training --------------------------------------------------------------------------- */

static struct run_info run_info(const struct trainer *t) {
    struct run_info facts = data_parallel_facts(&t->dp);
    facts.revision = GIT_REVISION;
    facts.faster_in_bf16 = t->faster_in_bf16;
    facts.batch = t->B, facts.seq = t->T;
    facts.train_tokens = t->train ? dataloader_tokens(t->train) : 0;
    return facts;
}

/* Sets where the run stands after `done` steps. */
static void advance(struct trainer *t, int done) {
    const uint64_t batches = (uint64_t)options_micro_batches(t->run.options, t->dp.workers);
    t->run.at.sequence += (uint64_t)(done - t->run.at.step) * batches * t->B;
    t->run.at.step = done;
}

/* With --deadline ranks may be at different steps, and they learn at different times that one of
 * them stops or is broken. Before they do anything together, all meet and agree on a step. */
static int meet(struct trainer *t, struct data_parallel_news *news) {
    news->step = t->run.at.step;
    if (finish_step(t) || data_parallel_agree(&t->dp, news)) return -1;
    advance(t, news->step);
    return 0;
}

/* What is due now. A checkpoint that was not complete when ranks changed is due, too. */
static struct due due_now(const struct trainer *t, bool stop) {
    return due_after(t->run.options, t->run.at.step, stop, async_writer_is_behind(t->saver));
}

enum { VIEW_ENDS = 1 }; /* train_loop returns it when ranks change */
static int train_loop(struct trainer *t) {
    const struct options *o = t->run.options;
    const bool skips = lossynet_skips_late(t->dp.comm);
    const struct run_end end = {&t->dp, t->saver, t->log, &t->progress, &t->run.at};
    struct eval_metrics eval;
    const struct eval_metrics *last_eval = NULL;
    struct data_parallel_news news = {0, false, false, false};
    if (views_are_new(t->run.views)) run_info_announce(&t->facts);
    progress_begin(&t->progress, t->run.at.step, o->steps, t->dp.world.rank == 0 && !o->quiet,
                   run_info_draws_progress(t->run.options, t->dp.world.rank));
    views_report(t->run.views, &t->progress, t->log, t->run.at.step, t->run.recent);
    while (t->run.at.step < o->steps && !news.stop) {
        if (training_step(t, t->run.at.step)) return -1;
        news.broken = !isfinite(t->record.loss) || !isfinite(t->record.grad_norm);
        if (news.broken && !skips) return run_end_not_finite(&end, &t->record);
        advance(t, t->record.step + 1);
        async_writer_poll(t->saver, &news.stop);
        news.ranks_change = views_end_here(t->run.views);
        struct due due = due_now(t, news.stop);
        if (skips &&
            (due.any || news.broken || news.ranks_change || lossynet_is_called(t->dp.comm))) {
            if (meet(t, &news)) return -1;
            if (news.broken) return run_end_not_finite(&end, &t->record);
            due = due_now(t, news.stop);
        }
        if (due.any && finish_step(t)) return -1;
        if (due.evaluates) {
            if (evaluate(t, t->run.at.step, &eval)) return -1;
            metrics_eval(&t->progress, t->log, &eval);
            last_eval = &eval;
        }
        if (due.samples && write_sample(t, t->run.at.step)) return -1;
        if (due.saves && async_writer_save(t->saver, &t->run.at)) return -1;
        if (news.ranks_change && t->run.at.step < o->steps && !news.stop)
            return finish_step(t) || async_writer_finish(t->saver) ? -1 : VIEW_ENDS;
    }
    return run_end_report(&end, news.stop && t->run.at.step < o->steps, last_eval);
}

/* Opens everything that training or evaluation needs, and writes the log's first line. Checks that
 * take little time come first. */
static int prepare(struct trainer *t, bool training) {
    const struct options *o = t->run.options;
    struct llama_config c = t->run.config;
    if (!c.layers && config_of_model(o->model, &c)) return -1;
    t->B = o->batch;
    t->T = validate_sequence_length(o, c.positions);
    if (run_data_open(o, training, t->dp.workers, t->T, &c, &t->train, &t->val)) return -1;
    t->run.config = c;
    t->tokenizer = o->tokenizer ? o->tokenizer : dataloader_tokenizer(training ? t->train : t->val);
    if (o->sample_every && generate_check_tokenizer(t->tokenizer)) return -1;
    if (param_layout_build(&c, &t->layout) || trainer_open(t, training) ||
        views_enter(t->run.views, &t->dp, &t->run.at, t->run.recent, &t->continues) ||
        jsonl_open_of_run(o->log, o->out, t->dp.world.rank, t->run.at.step, &t->log))
        return -1;
    hf_model_shows_progress = run_info_draws_progress(t->run.options, t->dp.world.rank);
    if (!t->continues && data_parallel_initialise(&t->dp)) return -1;
    t->facts = run_info(t);
    jsonl_write(t->log, run_info_event(&t->facts));
    return 0;
}

/* Trains a whole run or, with --meet, one view of it: the part that these ranks train together. */
static int train_in_view(struct trainer *t) {
    json_t *saved = NULL;
    int failed =
        views_begin(t->run.views) || out_lock_take(t->run.options, &t->dp.world, &t->run.lock);
    const char *from = views_are_new(t->run.views) ? t->run.options->resume : NULL;
    if (!failed && from) failed = resume_open(from, &saved, &t->run.at);
    failed = failed || prepare(t, true) ||
             async_writer_open(&t->dp, &t->facts, t->tokenizer, t->run.at.step, t->continues,
                               &t->saver) ||
             (from && !t->continues && saved_state_load(&t->dp, &t->facts, from, saved, t->log));
    if (!failed) failed = data_parallel_start(&t->dp);
    json_decref(saved);
    return failed ? -1 : train_loop(t);
}

static void begin(struct trainer *t, const struct options *o, const struct lossynet_world *world,
                  int workers) {
    t->run.options = t->dp.options = o;
    t->dp.layout = &t->layout;
    t->dp.world = *world;
    t->dp.workers = workers;
    threads_choose(o->threads, world->local_ranks);
}

/* Takes this rank from the view that is over into the next. ended: all agreed; else it failed. */
static int change_view(struct trainer *t, bool ended) {
    if (t->updated > t->run.at.step) advance(t, t->updated);
    if (views_leave(t->run.views, &t->dp, ended)) return -1;
    const struct step_metrics *r = t->last.step == t->run.at.step - 1 ? &t->last : &t->record;
    if (t->dp.time.unfinished && r->step == t->run.at.step - 1) /* nobody will measure it */
        metrics_add(&t->run.at.record, r);
    progress_end(&t->progress);
    trainer_release(t);
    const struct training run = t->run;
    memset(t, 0, sizeof *t);
    t->run = run;
    if (views_next(t->run.views)) return -1;
    const struct lossynet_world world = views_world(t->run.views);
    begin(t, t->run.options, &world, views_workers(t->run.views));
    return 0;
}

static int train(struct trainer *t) {
    int status = train_in_view(t);
    while (status && t->run.options->meet && !change_view(t, status == VIEW_ENDS))
        status = train_in_view(t);
    return status;
}

/* ---- other modes ------------------------------------------------------------------------ */

/* --eval: perplexity of a checkpoint. */
static int eval_mode(struct trainer *t) {
    struct eval_metrics e;
    if (prepare(t, false) || evaluate(t, 0, &e)) return -1;
    metrics_eval(&t->progress, t->log, &e);
    if (t->dp.world.rank == 0 && !t->run.options->quiet) metrics_print_eval(&e);
    return 0;
}

/* Makes one worker with the model's weights and room for B sequences of T tokens. */
static int open_model(struct trainer *t, const struct llama_config *c, int B, int T) {
    t->B = B, t->T = T;
    return param_layout_build(c, &t->layout) || trainer_open(t, false) ||
           data_parallel_initialise(&t->dp);
}

/* --eval-choices: multiple-choice questions. */
static int choices_mode(struct trainer *t) {
    const struct options *o = t->run.options;
    struct choices_result result = {0, 0, 0, 0};
    struct choices *choices = NULL;
    struct llama_config c;
    char tokenizer[FILE_PATH_BYTES];
    if (config_read(o->model, &c) || tokenizer_file_in(tokenizer, o->model) ||
        choices_open(o->eval_choices, o->tokenizer ? o->tokenizer : tokenizer, c.vocabulary,
                     o->seq ? o->seq : c.positions, &choices))
        return -1;
    const int most = choices_most_endings(choices);
    double *losses = (double *)calloc((size_t)most, sizeof *losses);
    int failed = losses ? 0 : log_out_of_memory("losses", 0);
    failed = failed ||
             open_model(t, &c, o->batch < most ? o->batch : most, choices_longest(choices)) ||
             jsonl_open_of_run(o->log, o->out, 0, 0, &t->log);
    for (int q = 0; q < choices_questions(choices) && !failed; q++) {
        score_endings(t, data_parallel_weights(&t->dp, t->dp.worker[0].params), choices, q, losses);
        choices_judge(choices, q, losses, &result);
    }
    failed = failed || metrics_choices(t->log, &result, o->quiet);
    free(losses);
    choices_close(choices);
    return failed ? -1 : 0;
}

/* --generate: continues a prompt. */
static int generate_mode(struct trainer *t) {
    const struct options *o = t->run.options;
    struct tokenizer *tokenizer = NULL;
    struct llama_config c;
    if (config_read(o->model, &c) ||
        generate_open_tokenizer(o->tokenizer, o->model, c.vocabulary, &tokenizer))
        return -1;
    int failed =
        open_model(t, &c, 1, c.positions) || activations_add_cache(t->activations, &c, t->be);
    if (!failed) {
        struct generate_llama writer = writer_of(t, t->dp.worker[0].params);
        const struct generate_model model = generate_model_of(&writer);
        failed = generate_to_terminal(&model, tokenizer, o);
    }
    tokenizer_close(tokenizer);
    return failed ? -1 : 0;
}

/* ---- main ------------------------------------------------------------------------------- */

static int run_mode(struct trainer *t, const struct options *o,
                    const struct lossynet_world *world) {
    const int workers = o->workers ? o->workers : world->ranks;
    if (o->dry_run) return dry_run(o, world);
    if (o->preflight) {
        const int failed = preflight(o, world);
        return views_preflight(o, GIT_REVISION, world->rank == 0) || failed ? -1 : 0;
    }
    begin(t, o, world,
          options_one_worker(o) ? 1
          : t->run.views        ? views_workers(t->run.views)
                                : workers);
    int failed = o->eval           ? eval_mode(t)
                 : o->eval_choices ? choices_mode(t)
                 : o->generate     ? generate_mode(t)
                                   : train(t);
    trainer_release(t);
    return failed;
}

static int run(struct options *o, const struct lossynet_world *launched) {
    struct trainer t;
    memset(&t, 0, sizeof t);
    /* With --meet the checkpoint that it is read from may be gone when others take this rank in. */
    int status = o->meet && config_of_model(o->model, &t.run.config) ? 1 : 0;
    if (!status) status = views_open(o, GIT_REVISION, &t.run.views);
    const struct lossynet_world world =
        t.run.views && !status ? views_world(t.run.views) : *launched;
    if (!status) status = run_mode(&t, o, &world) && !views_are_complete(t.run.views) ? 1 : 0;
    const enum views_end done = t.run.at.step >= o->steps ? VIEWS_RUN_COMPLETE : VIEWS_RUN_STOPS;
    views_close(t.run.views, status ? VIEWS_RANK_FAILS : done);
    out_lock_release(&t.run.lock);
    return status == VIEWS_COMPLETE ? 0 : status;
}

#ifndef TESTING
int main(int argc, char **argv) {
    struct options options;
    struct lossynet_world world;
    threads_wait_briefly(argv);
    stop_signal_open();
    if (lossynet_bootstrap(&argc, &argv, &world)) return 1;
    int status = validate_command_line(argc, argv, &world, GIT_REVISION, &options);
    if (!status && world.rank == 0 && options.help) status = options_help(options.help_topic);
    if (!status && world.rank == 0 && !options.help && options.version)
        validate_print_version(GIT_REVISION);
    if (status || options.help || options.version) {
        lossynet_shutdown(status);
        return status;
    }
    log_muted = false;
    if (world.ranks > 1) log_rank = world.rank;
    status = run(&options, &world);
    lossynet_shutdown(status);
    return status;
}
#endif
