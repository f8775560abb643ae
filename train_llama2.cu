/* train_llama2.cu — pretrains Llama-2 across machines whose network is allowed to lose packets.
 *
 * Read top to bottom:
 *
 *     model        forward and backward
 *     trainer      what a run needs: backend, workers and network, data
 *     step         four verbs (forward and backward, average, update, broadcast), and the
 *                  algorithms that are made of them: lossy and reliable, rps, naive
 *     evaluation   perplexity of the model and of the replicas
 *     writing      text that the model generates
 *     training     the loop
 *     other modes  --eval, --generate, --dry-run, --preflight
 *     main
 *
 * Arithmetic is behind llmc/backend/backend.h; the workers' memory and the network are behind
 * llmc/comm/data_parallel.h; resuming, changes of ranks, the log and checkpoints are behind
 * llmc/run/training.h. This file does not depend on how they work. A function that finds an
 * error reports it in one line and returns -1. Its callers return -1, too; main sets the exit code.
 *
 * This is C11 in the subset that is C++20 too.
 */
#include "llmc/backend/backend.h"
#include "llmc/cli/dry_run.h"
#include "llmc/cli/generate.h"
#include "llmc/cli/preflight.h"
#include "llmc/cli/validate.h"
#include "llmc/comm/common_facts.h"
#include "llmc/comm/data_parallel_model.h"
#include "llmc/comm/settings.h"
#include "llmc/log/error.h"
#include "llmc/model/activations.h"
#include "llmc/run/evaluate.h"
#include "llmc/run/run_data.h"
#include "llmc/run/training.h"
#include "llmc/util/file.h"
#include "llmc/util/stop_signal.h"
#include "llmc/util/threads.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
 * while the model computes (comm/port.h); may be NULL. */
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

/* ---- trainer ---------------------------------------------------------------------------- *
 * llmc/comm/data_parallel.h has the workers of this rank, their memory, and the network. On a CPU
 * with at least as many groups of workers as threads, each thread computes whole groups with
 * activations of its own (without --group, each worker is a group). A GPU computes as many groups at
 * once as its memory has sets of activations for, at most 8. Else there is one set of these: workers
 * take turns, and each operation uses all threads. */

struct worker_result { /* of a worker's forward and backward passes */
    double loss;       /* mean over its tokens; negative: it computed no gradient */
    int passes;        /* of its micro-batches that were made; 0 when all were */
};

struct trainer {
    struct training run;       /* what survives a change of ranks (--meet) */
    struct training_view view; /* what the same ranks train: the rest is of these ranks, too */
    const struct backend *be;
    struct param_layout layout;
    struct data_parallel dp; /* the workers and the network */
    int B, T, sets;
    struct activations *activations; /* [sets] */
    const struct worker **unread; /* [sets]: whose result still lacks the losses of the set's last
                                     pass; NULL: nobody's */
    struct dataloader *train, *val;
    struct worker_result *result; /* [local] */
    const char *tokenizer;
};

/* Begins with the ranks of t->run. Collective. Returns 0, or -1 after reporting. */
static int trainer_begin(struct trainer *t) {
    t->view.run = &t->run;
    t->view.dp = &t->dp;
    t->dp.options = t->run.options;
    t->dp.layout = &t->layout;
    t->dp.world = t->run.world;
    t->dp.workers = training_workers(&t->run);
    return common_threads(&t->run.world, t->run.options->threads);
}

/* Releases all but t->run. */
static void trainer_release(struct trainer *t) {
    const struct training run = t->run;
    training_close_view(&t->view);
    data_parallel_close(&t->dp);
    for (int e = 0; t->activations && e < t->sets; e++)
        activations_release(&t->activations[e], t->be);
    free(t->activations);
    free(t->unread);
    free(t->result);
    dataloader_close(t->train);
    dataloader_close(t->val);
    param_layout_release(&t->layout);
    memset(t, 0, sizeof *t);
    t->run = run;
}

/* Chooses the backend, opens the comm and allocates all memory. Needs workers, B and T. */
static int trainer_open(struct trainer *t, const struct llama_config *c, bool training) {
    struct backend_choice choice;
    bool tell = t->dp.world.rank == 0 && !t->run.options->quiet && !t->run.options->generate &&
                views_is_first_start(t->run.views);
    if (comm_layout(t->run.options, c, t->dp.workers, &t->layout) ||
        data_parallel_choose(&t->dp, t->B, t->T, training, tell, &choice) ||
        data_parallel_open(&t->dp))
        return -1;
    t->be = choice.backend;
    t->view.facts.faster_in_bf16 = choice.faster_in_bf16;
    t->sets = data_parallel_sets(&t->dp);
    t->activations = (struct activations *)calloc((size_t)t->sets, sizeof *t->activations);
    t->unread = (const struct worker **)calloc((size_t)t->sets, sizeof *t->unread);
    t->result = (struct worker_result *)calloc((size_t)t->dp.local, sizeof *t->result);
    if (!t->activations || !t->unread || !t->result)
        return log_out_of_memory("the list of workers", 0);
    for (int e = 0; e < t->sets; e++) {
        if (activations_allocate(&t->activations[e], c, t->be, t->B, t->T, training,
                                 choice.recompute))
            return -1;
        if (t->be->on_device) t->activations[e].host_losses.set = e;
    }
    return 0;
}

/* ---- step ------------------------------------------------------------------------------- */

/* Adds the losses of the set's last pass to the result of its worker, once they are computed. */
static void read_losses(struct trainer *t, int set) {
    const struct worker *w = t->unread[set];
    double counts;
    if (!w) return;
    const int M = data_parallel_micro_batches(&t->dp, w, &counts);
    const float *losses = activations_read_losses(&t->activations[set], t->be);
    t->result[w - t->dp.worker].loss += counts * mean_loss(losses, t->B * t->T) / M;
    t->unread[set] = NULL;
}

/* Runs forward and backward of one micro-batch of a worker on its replica and its share of the data.
 * Returns whether it has more. Unless the data are split in advance (--data-split), worker w takes
 * sequences w*B ... w*B+B-1 of each N*B: the global batch is the same however it is spread. Leaves the
 * results in t->result; the losses of a set's last pass are added later: a device may still compute it. */
static bool worker_pass(void *trainer, struct worker *w, int set) {
    struct trainer *t = (struct trainer *)trainer;
    struct activations *a = &t->activations[set];
    const int B = t->B, T = t->T;
    double counts;
    const int M = data_parallel_micro_batches(&t->dp, w, &counts);
    const float scale = (float)(counts / w->members) / ((float)B * T * M);
    struct worker_result *result = &t->result[w - t->dp.worker];
    if (result->passes == 0) result->loss = data_parallel_computes(&t->dp, w) ? 0 : -1;
    if (result->loss < 0) return false;
    const int m = result->passes;
    dataloader_batch(t->train, t->run.at.sequence, m, w->id, t->dp.workers, B, a->host_tokens,
                     a->host_targets);
    activations_send(a, t->be, B * T);
    struct bucket_hooks *pass = data_parallel_pass(&t->dp, w, set, m == 0, m == M - 1);
    if (!port_pass_begin(pass)) {
        model_forward_backward(t->be, &t->layout, pass->params, &pass->gradient, a, B, T, scale,
                               m > 0, pass);
        port_pass_end(pass);
    }
    activations_send_losses(a, t->be, B * T);
    read_losses(t, set); /* of the pass before: this one is queued */
    t->unread[set] = w;
    if (!t->be->on_device) read_losses(t, set);
    result->passes = (m + 1) % M;
    return result->passes > 0;
}

/* The verbs of a step return 0, FAILED after reporting, or NOT_FINITE: the loss, the norm, or a number
 * that a worker sent is not finite. Then the parameters are still good, and the caller stops. */
enum { FAILED = -1, NOT_FINITE = 1 };

/* ---- the four verbs: forward and backward, average, update, broadcast ---- */

/* Runs forward and backward of all workers; a device may still compute on return. With overlap,
 * gradients are sent during backward. The parameters of the step before arrive during forward, and
 * that step is finished only here. */
static int forward_backward(struct trainer *t, int step) {
    if (data_parallel_begin(&t->dp, &step) || data_parallel_passes(&t->dp, worker_pass, t) ||
        dataloader_check(t->train) || training_finish_begin(&t->view))
        return FAILED;
    training_begin_record(&t->view, step);
    return 0;
}

/* Waits for the losses. The exchange of the norm carries them and other news to all ranks. */
static int tell_numbers(struct trainer *t) {
    for (int e = 0; e < t->sets; e++) read_losses(t, e);
    for (int w = 0; w < t->dp.local; w++)
        data_parallel_note_loss(&t->dp, &t->dp.worker[w], t->result[w].loss);
    if (data_parallel_tell_losses(&t->dp) || async_writer_tell(t->view.saver)) return FAILED;
    return views_tell(t->run.views, &t->dp) ? FAILED : 0;
}

/* Call after the norm was exchanged: that exchange carried all other numbers of the step, too. */
static int check_numbers(struct trainer *t) {
    t->view.record.loss = data_parallel_mean_loss(&t->dp);
    if (training_finish_end(&t->view)) return FAILED;
    return data_parallel_is_finite(&t->dp, t->view.record.loss, t->view.record.grad_norm)
               ? 0
               : NOT_FINITE;
}

/* Owners average the gradients that they receive. */
static int average_gradients(struct trainer *t) {
    if (data_parallel_average_gradients(&t->dp) || tell_numbers(t) ||
        data_parallel_gradient_norm(&t->dp, &t->view.record.grad_norm))
        return FAILED;
    return check_numbers(t);
}

static struct worker_step step_of(const struct trainer *t) {
    const struct step_metrics *r = &t->view.record;
    const struct worker_step s = {r->step, r->learning_rate, 1, 0, NULL};
    return s;
}

/* Every worker steps on its own gradient. */
static int update_replicas(struct trainer *t) {
    if (tell_numbers(t) ||
        data_parallel_update_replicas(&t->dp, step_of(t), &t->view.record.grad_norm))
        return FAILED;
    return check_numbers(t);
}

/* ---- the algorithms ---- */

/* lossy, reliable: owners average gradients, step, and broadcast parameters. */
static int step_lossy(struct trainer *t, int step) {
    int status = forward_backward(t, step);
    if (!status) status = average_gradients(t);
    if (status) return status;
    data_parallel_update_shards(&t->dp, step_of(t), t->view.record.grad_norm);
    training_note_update(&t->view);
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
    if (!status) data_parallel_update_received(&t->dp, step_of(t), t->view.record.grad_norm);
    return status;
}

/* Makes one step of all workers: `step`, or with --deadline perhaps a later one (t->view.record.step).
 * The caller checks whether its numbers are finite. Returns 0, or -1. */
static int training_step(struct trainer *t, int step) {
    const int algorithm = t->run.options->algorithm;
    const int status = algorithm == ALGORITHM_RPS     ? step_rps(t, step)
                       : algorithm == ALGORITHM_NAIVE ? step_naive(t, step)
                                                      : step_lossy(t, step);
    if (status) return status == NOT_FINITE ? 0 : -1;
    return data_parallel_ends_later(&t->dp) ? 0 : training_finish_step(&t->view);
}

/* ---- evaluation ------------------------------------------------------------------------- */

/* The losses (B, T) of the tokens in e->host_tokens and e->host_targets: what evaluate.h needs. */
static const float *losses_of(void *trainer, const weight *weights, struct activations *e, int B,
                              int T) {
    struct trainer *t = (struct trainer *)trainer;
    const struct llama_config *c = &t->layout.config;
    activations_send(e, t->be, B * T);
    model_forward(t->be, &t->layout, weights, e, B, T, NULL);
    t->be->classifier(e->losses, NULL, NULL, e->last_norm,
                      weight_at(t->be, weights, t->layout.classifier), e->targets, B * T, c->width,
                      c->vocabulary, 1, false);
    return activations_losses(e, t->be, B * T);
}

static int evaluate(struct trainer *t, int steps_done, struct eval_metrics *out) {
    const struct evaluate_model m = {&t->dp, t->activations, t->B, losses_of, t};
    struct attention_choice *attention = t->be->attention_choice;
    const int library = attention ? attention->library : 0;
    if (attention) attention->library = 0; /* our kernels, as --eval has */
    const int status = evaluate_perplexity(&m, t->val, steps_done, out);
    if (attention) attention->library = library;
    return status;
}

/* ---- writing ---------------------------------------------------------------------------- */

static void forward_tokens(const struct generate_llama *g, int count) {
    model_forward(g->be, g->layout, g->weights, g->activations, 1, count, NULL);
}

static struct generate_llama writer_of(struct trainer *t, const float *params) {
    const weight *weights = data_parallel_weights(&t->dp, params);
    const struct generate_llama g = {t->be,          &t->layout, weights,
                                     t->activations, t->T,       forward_tokens};
    return g;
}

/* --sample-every: lets the model write a line, which goes to the terminal and the log. */
static int write_sample(struct trainer *t, int steps_done) {
    const float *model_parameters;
    struct generate_line line;
    if (data_parallel_model(&t->dp, &model_parameters)) return -1;
    if (t->dp.world.rank > 0) return 0;
    struct generate_llama writer = writer_of(t, model_parameters);
    if (generate_sample(&writer, t->tokenizer, t->run.options, &line)) return -1;
    return metrics_sample(&t->view.progress, t->view.log, steps_done, line.text);
}

/* ---- training --------------------------------------------------------------------------- */

/* Opens everything that training or evaluation needs. Checks that take little time come first. */
static int prepare(struct trainer *t, bool training) {
    const struct options *o = t->run.options;
    struct llama_config *c = &t->run.config;
    if (!c->layers && config_of_model(o->model, c)) return -1;
    t->B = o->batch;
    t->T = validate_sequence_length(o, c->positions);
    if (run_data_open(o, training, t->dp.workers, t->T, c, &t->train, &t->val)) return -1;
    t->tokenizer = o->tokenizer ? o->tokenizer : dataloader_tokenizer(training ? t->train : t->val);
    if ((o->sample_every && generate_check_tokenizer(t->tokenizer)) || trainer_open(t, c, training))
        return -1;
    t->view.facts.batch = t->B, t->view.facts.seq = t->T;
    t->view.facts.data.tokens = t->train ? dataloader_tokens(t->train) : 0;
    t->view.facts.data.checksum = t->train ? dataloader_sum(t->train) : 0;
    return training_enter(&t->view);
}

enum { VIEW_ENDS = 1 }; /* train_loop returns it when ranks change */
static int train_loop(struct trainer *t) {
    struct training_view *v = &t->view;
    const struct resume_point *at = &t->run.at;
    const int steps = t->run.options->steps;
    struct eval_metrics eval;
    const struct eval_metrics *last_eval = NULL;
    struct data_parallel_news news = {0, false, false, false};
    while (at->step < steps && !news.stop) {
        struct due due;
        if (training_step(t, at->step) || training_after_step(v, &news, &due)) return -1;
        if (due.any && dataloader_check_files(t->train)) return -1;
        if (due.evaluates) {
            const int status = evaluate(t, at->step, &eval);
            if (status < 0) return -1;
            if (status == EVALUATE_STOPPED) {
                last_eval = NULL; /* that of an earlier step is not the run's */
                training_stop(v, &news, &due);
            } else {
                metrics_eval(&v->progress, v->log, &eval);
                last_eval = &eval;
            }
        }
        if (due.samples && write_sample(t, at->step)) return -1;
        if (due.saves && async_writer_save(v->saver, at)) return -1;
        if (news.ranks_change && at->step < steps && !news.stop)
            return training_finish_step(v) || async_writer_finish(v->saver) ? -1 : VIEW_ENDS;
    }
    return training_end(v, news.stop && at->step < steps, last_eval);
}

/* Trains a whole run. With --meet it consists of views: parts that the same ranks train together. */
static int train(struct trainer *t) {
    if (t->run.options->out && !t->run.options->meet) stop_signal_note_start();
    for (;;) {
        const int failed = trainer_begin(t) || training_choose(&t->view) || prepare(t, true) ||
                           training_begin(&t->view, t->tokenizer);
        const int status = failed ? -1 : train_loop(t);
        if (!status || !t->run.options->meet || training_leave(&t->view, status == VIEW_ENDS))
            return status;
        trainer_release(t);
        if (training_next_view(&t->run)) return -1;
    }
}

/* ---- other modes ------------------------------------------------------------------------ */

/* --eval: perplexity of a checkpoint. */
static int eval_mode(struct trainer *t) {
    struct eval_metrics e;
    if (trainer_begin(t) || prepare(t, false) || evaluate(t, 0, &e)) return -1;
    metrics_eval(&t->view.progress, t->view.log, &e);
    if (t->dp.world.rank == 0 && !t->run.options->quiet) metrics_print_eval(&e);
    return 0;
}

/* --generate: continues a prompt. */
static int generate_mode(struct trainer *t) {
    const struct options *o = t->run.options;
    struct tokenizer *tokenizer = NULL;
    struct llama_config c;
    if (trainer_begin(t) || config_read(o->model, &c) ||
        generate_open_tokenizer(o->tokenizer, o->model, c.vocabulary, &tokenizer))
        return -1;
    t->B = 1, t->T = c.positions;
    int failed = trainer_open(t, &c, false) || data_parallel_initialise(&t->dp) ||
                 activations_add_cache(t->activations, &c, t->be);
    if (!failed) {
        struct generate_llama writer = writer_of(t, t->dp.worker[0].params);
        failed = generate_to_terminal(&writer, tokenizer, o);
    }
    tokenizer_close(tokenizer);
    return failed ? -1 : 0;
}

/* ---- main ------------------------------------------------------------------------------- */

enum { WRONG_USE = 2 }; /* the exit code; other failures have 1 */

static int run_mode(struct trainer *t) {
    const struct options *o = t->run.options;
    if (o->dry_run) return dry_run(o, &t->run.world);
    if (o->preflight) return preflight(o, &t->run.world);
    const bool prints = o->eval || o->generate; /* stdout has the result alone */
    if (prints && t->run.world.rank == 0 && !o->quiet) options_print_unused(o, stderr);
    int failed = o->eval ? eval_mode(t) : o->generate ? generate_mode(t) : train(t);
    if (data_parallel_is_of_another_run(&t->dp)) failed = WRONG_USE;
    trainer_release(t);
    return failed;
}

static int run(struct options *o, const struct lossynet_world *launched) {
    struct trainer t;
    memset(&t, 0, sizeof t);
    int status = training_open(&t.run, o, GIT_REVISION, launched);
    const int failed = status ? 0 : run_mode(&t);
    if (failed && !views_are_complete(t.run.views)) status = failed == WRONG_USE ? WRONG_USE : 1;
    return training_close(&t.run, status);
}

#ifndef TESTING
/* The result of a mode without training is what it prints. Returns the exit code. */
static int check_printed(const struct options *o, int status) {
    const bool printed =
        o->help || o->version || o->eval || o->generate || o->dry_run || o->preflight;
    if (status || !printed || (!fflush(stdout) && !ferror(stdout))) return status;
    log_error("not all of the result could be written to stdout: expected room on its disk");
    return 1;
}

static bool main_returns;

/* A library, or a rule's function, that ends the process with code 0 before main() returns is no success. */
static void refuse_exit(void) {
    if (main_returns) return;
    log_error("exit() was called before the end: expected --rule's functions to return");
    fflush(NULL);
    _exit(1);
}

static void refuse_exit_with_zero(int code, void *unused) {
    (void)unused;
    if (code == 0) refuse_exit();
}

static int run_command_line(int argc, char **argv) {
    struct options options;
    struct lossynet_world world;
    if (lossynet_bootstrap(&argc, &argv, &world)) return 1;
    int status = validate_command_line(argc, argv, &world, GIT_REVISION, &options);
    if (!status && (options.help || options.version)) {
        if (world.rank == 0) status = validate_answer(&options, GIT_REVISION);
    } else if (!status) {
        log_muted = false;
        if (world.ranks > 1) log_rank = world.rank;
        status = run(&options, &world);
    }
    status = check_printed(&options, status);
    lossynet_shutdown(status);
    return status;
}

int main(int argc, char **argv) {
    file_hold_standard();
    stop_signal_ignore_again();
    threads_wait_briefly(argv);
    stop_signal_open();
    on_exit(refuse_exit_with_zero, NULL);
    at_quick_exit(refuse_exit);
    const int status = run_command_line(argc, argv);
    main_returns = true;
    return status;
}
#endif
