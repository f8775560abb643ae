/* train_llama2.cu — pretrains Llama-2 across machines whose network is allowed to lose packets.
 *
 * Read top to bottom:
 *
 *     model        forward and backward
 *     trainer      workers, their replicas, and the memory they need
 *     step         the four algorithms: lossy, reliable, rps, naive
 *     evaluation   perplexity of the model and of the replicas
 *     writing      text that the model makes up
 *     training     the loop, its log and its checkpoints
 *     other modes  --eval, --generate, --dry-run (--preflight: llmc/preflight.h)
 *     main
 *
 * Arithmetic is behind llmc/backend.h, the network behind lossynet/lossynet.h; this file knows how
 * neither works. Errors: the function that sees one reports it (one line) and returns -1; callers
 * pass it up; main turns it into the exit code.
 *
 * This is C11 in the subset that nvcc accepts as C++ too.
 */
#include "llmc/activations.h"
#include "llmc/backend.h"
#include "llmc/backend_choose.h"
#include "llmc/backend_cuda.h"
#include "llmc/checkpoint.h"
#include "llmc/config.h"
#include "llmc/dataloader.h"
#include "llmc/estimate.h"
#include "llmc/file.h"
#include "llmc/generate.h"
#include "llmc/host_vector.h"
#include "llmc/layout.h"
#include "llmc/network.h"
#include "llmc/options.h"
#include "llmc/preflight.h"
#include "llmc/record.h"
#include "llmc/report.h"
#include "llmc/resume.h"
#include "llmc/runlog.h"
#include "llmc/saver.h"
#include "llmc/schedule.h"
#include "llmc/staging.h"
#include "llmc/threads.h"
#include "llmc/usage.h"
#include "llmc/worker.h"
#include "lossynet/lossynet.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef GIT_REVISION
#define GIT_REVISION "unknown"
#endif

/* ---- model ------------------------------------------------------------------------------ */

/* llmc/layout.h says where a parameter lies in the flat vector that the network averages,
 * llmc/activations.h what is kept between forward and backward. */

/* Element `offset` of a vector of parameters. */
static tensor *at(const struct backend *be, const tensor *vector, size_t offset) {
    return (char *)vector + offset * be->element_bytes;
}

/* How the model meets the network while it computes. Either may be NULL. */
struct bucket_hooks {
    void (*needed)(void *context, int bucket); /* before a bucket's parameters are first read */
    void (*done)(void *context, int bucket);   /* as soon as a bucket's gradient is final */
    void *context;
};

static void bucket_needed(const struct bucket_hooks *hooks, int bucket) {
    if (hooks && hooks->needed) hooks->needed(hooks->context, bucket);
}

static void bucket_done(const struct bucket_hooks *hooks, int bucket) {
    if (hooks && hooks->done) hooks->done(hooks->context, bucket);
}

/* From a->tokens (B, T) to a->last_norm (B, T, C), what the classifier reads. hooks: may be NULL. */
static void model_forward(const struct backend *be, const struct layout *l, const tensor *params,
                          struct activations *a, int B, int T, const struct bucket_hooks *hooks) {
    const struct llama_config *c = &l->config;
    const int N = B * T, C = c->width, F = c->hidden, H = c->heads, K = c->kv_heads;
    const int D = c->head_size, QKV = (H + 2 * K) * D;
#define W(where) at(be, params, where)
    for (int i = 0; i < c->layers; i++) {
        const struct layer_offsets *o = &l->layer[i];
        const struct layer_activations *x = &a->layer[i];
        if (i == 0) bucket_needed(hooks, l->buckets - 1);
        bucket_needed(hooks, layout_bucket_of_layer(l, i));
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

/* What forward left out of layer i's activations (activations.h, --recompute), again. */
static void recompute_layer(const struct backend *be, const struct layout *l, const tensor *params,
                            struct activations *a, int i, int B, int T) {
    const struct llama_config *c = &l->config;
    const struct layer_offsets *o = &l->layer[i];
    const struct layer_activations *x = &a->layer[i];
    const int N = B * T, C = c->width, F = c->hidden, H = c->heads, K = c->kv_heads;
    const int D = c->head_size, QKV = (H + 2 * K) * D;
    be->rmsnorm_forward(x->attention_norm, x->attention_rstd, x->residual, W(o->attention_norm), N,
                        C, c->norm_eps);
    be->matmul_forward(x->qkv, x->attention_norm, W(o->qkv), N, C, QKV);
    be->rope(x->qkv, a->cosine, a->sine, B, T, H, K, D, false);
    be->attention_forward(x->attention, x->log_sum_exp, x->qkv, B, T, H, K, D);
    if (a->recompute == RECOMPUTE_ATTENTION) return;
    be->matmul_forward(a->projected, x->attention, W(o->attention_out), N, H * D, C);
    be->residual_rmsnorm_forward(x->middle, x->mlp_norm, x->mlp_rstd, x->residual, a->projected,
                                 W(o->mlp_norm), N, C, c->norm_eps);
    be->matmul_forward(x->gate_up, x->mlp_norm, W(o->gate_up), N, C, 2 * F);
    be->swiglu_forward(x->swiglu, x->gate_up, N, F);
}

/* Forward, classifier and backward of B x T tokens. Gradients of scale * sum of the losses go to
 * `grads` (added to what is there with `accumulate`); a->losses (B*T) keeps the losses. */
static void model_forward_backward(const struct backend *be, const struct layout *l,
                                   const tensor *params, float *grads, struct activations *a, int B,
                                   int T, float scale, bool accumulate,
                                   const struct bucket_hooks *hooks) {
    const struct llama_config *c = &l->config;
    const int N = B * T, C = c->width, F = c->hidden, H = c->heads, K = c->kv_heads;
    const int D = c->head_size, QKV = (H + 2 * K) * D;
#define G(where) (grads + (where))
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
        /* The last layer's are still there. */
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
        bucket_done(hooks, layout_bucket_of_layer(l, i));
    }
    /* A tied table already holds the classifier's share. */
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
 * A rank hosts `local` of the N workers. Each worker has a replica of the parameters, a gradient,
 * and the optimizer state of what it owns (ZeRO-1): P/N elements of each moment. Only `rps` and
 * `naive`, whose workers step on their own, keep moments for all P.
 *
 * CPU threads: with at least as many local workers as threads, each thread computes whole workers;
 * with fewer, workers take turns and each operation uses all threads. Activations exist once per
 * thread that computes whole workers.
 *
 * On a GPU workers take turns, and all vectors lie in its memory. They are float32: the owner's
 * shard of `params` is the master weights. In bf16 the engine has a copy of the parameters in use,
 * made anew for every pass; gradients, and their sums over micro-batches, are float32.         */

struct trainer {
    const struct options *options;
    const struct backend *be;
    struct lossynet_world world;
    struct lossynet *net;
    struct layout layout;
    int workers, local, B, T;
    struct worker *worker;   /* [local] */
    float **params, **grads; /* [local], the workers' vectors, as lossynet takes them */
    struct staging stage;    /* how these meet the network, and the parameters in use */
    int engines;
    struct activations *engine; /* [engines] */
    enum recompute recompute;
    float *fresh; /* P: the owners' values put together; staged: in the gradient's place */
    struct dataloader *train, *val;
    double *mine, *gathered; /* [3 * local], [3 * N]: small numbers on their way */
    bool unfinished;         /* the last step's PARAMETER phase is open, `record` incomplete */
    struct step_record record;
    double finished;      /* when the last step was */
    double communicating; /* seconds since then that were spent waiting for the two phases */
    const char *tokenizer;
    struct resume_point at; /* where the run stands */
    struct resume_run run;  /* what of it is saved */
    struct saver *saver;
    struct runlog *log;
    struct progress progress;
};

static bool is_lossless(const struct trainer *t) {
    return t->options->algorithm == ALGORITHM_RELIABLE;
}

/* Every replica is the model: what is sent arrives, and as it was. */
static bool replicas_are_exact(const struct trainer *t) {
    return t->workers == 1 || (is_lossless(t) && t->options->wire_dtype == OPTION_WIRE_FLOAT32);
}

static void trainer_release(struct trainer *t) {
    saver_close(t->saver);
    free(t->run.worker);
    if (t->worker && t->fresh == t->worker[0].grads) t->fresh = NULL;
    lossynet_close(t->net); /* before what it was given */
    for (int w = 0; t->worker && w < t->local; w++) worker_release(&t->worker[w], t->be);
    for (int e = 0; t->engine && e < t->engines; e++) activations_release(&t->engine[e], t->be);
    if (t->be) t->be->release(t->fresh);
    if (t->be) t->be->release(t->stage.weights);
    staging_close(&t->stage);
    free(t->worker);
    free(t->params);
    free(t->grads);
    free(t->engine);
    free(t->mine);
    free(t->gathered);
    dataloader_close(t->train);
    dataloader_close(t->val);
    layout_release(&t->layout);
    runlog_close(t->log);
}

static int trainer_choose(struct trainer *t, bool training) {
    struct backend_choice choice;
    struct estimate_settings run = estimate_of_options(t->options, t->workers, t->T);
    run.batch = t->B;
    run.local = t->workers / t->world.ranks;
    run.evaluating = !training;
    run.staged = t->world.ranks > 1;
    bool tell = t->world.rank == 0 && !t->options->quiet && !t->options->generate;
    if (backend_choose(t->options, &t->layout.config, &run, t->world.local_rank, tell, &choice))
        return -1;
    t->be = choice.backend;
    t->recompute = choice.recompute;
    return 0;
}

/* Chooses the backend, opens the net, allocates all. Needs layout, workers, B and T. */
static int trainer_allocate(struct trainer *t, bool training) {
    const struct options *o = t->options;
    if (trainer_choose(t, training)) return -1;
    const struct lossynet_memory memory = {t->be->masked_copy, t->be->masked_round, t->be->copy,
                                           t->be->gather};
    struct lossynet_settings s = network_settings(o, &t->layout, t->workers);
    const bool staged = t->be->on_device && (t->world.ranks > 1 || s.carry);
    s.weighted_sum = staged ? t->be->weighted_sum_pinned : t->be->weighted_sum;
    if (staged) s.allocate = t->be->allocate_pinned, s.release = t->be->release_pinned;
    s.memory = t->be->on_device && !staged ? &memory : NULL;
    if (!training) s.drift_samples = 0;
    if (lossynet_open(&t->world, &s, &t->net)) return -1;
    const bool overlap =
        training && o->algorithm == ALGORITHM_LOSSY && !o->no_overlap && lossynet_overlaps(t->net);

    const size_t P = t->layout.count;
    const int threads = omp_get_max_threads();
    int failed = 0;
    t->local = t->workers / t->world.ranks;
    t->engines = t->local >= threads && !t->be->on_device ? threads : 1;
    t->worker = (struct worker *)calloc((size_t)t->local, sizeof *t->worker);
    t->params = (float **)calloc((size_t)t->local, sizeof *t->params);
    t->grads = (float **)calloc((size_t)t->local, sizeof *t->grads);
    t->engine = (struct activations *)calloc((size_t)t->engines, sizeof *t->engine);
    t->mine = (double *)calloc(3 * (size_t)t->local, sizeof *t->mine);
    t->gathered = (double *)calloc(3 * (size_t)t->workers, sizeof *t->gathered);
    if (!t->worker || !t->params || !t->grads || !t->engine || !t->mine || !t->gathered) {
        return report_out_of_memory("the list of workers", 0);
    }
    for (int w = 0; w < t->local && !failed; w++) {
        struct worker *k = &t->worker[w];
        k->id = t->world.rank * t->local + w;
        size_t owned = worker_steps_alone(o) ? P : lossynet_owned_elements(t->net, k->id);
        failed = worker_allocate(k, t->be, P, owned, training, staged);
        t->params[w] = k->net_params;
        t->grads[w] = k->net_grads;
    }
    if (t->workers > 1 && !failed) {
        if (staged && training) t->fresh = t->worker[0].grads;
        if (!t->fresh) t->fresh = (float *)t->be->allocate(P * sizeof(float));
        if (!t->fresh) failed = report_out_of_memory("the model put together", 4.0 * (double)P);
    }
    const struct staging stage = {t->be,   &t->layout, t->net,        t->worker, t->local, staged,
                                  overlap, false,      o->gpu_direct, NULL,      NULL,     NULL};
    t->stage = stage;
    failed = failed || staging_open(&t->stage);
    if (t->be->element_bytes != sizeof(float) && !failed) {
        t->stage.weights = t->be->allocate(P * t->be->element_bytes);
        if (!t->stage.weights) failed = report_out_of_memory("weights in use", 2.0 * (double)P);
    }
    for (int e = 0; e < t->engines && !failed; e++) {
        failed = activations_allocate(&t->engine[e], &t->layout.config, t->be, t->B, t->T, training,
                                      t->recompute);
    }
    return failed;
}

/* The same initial parameters for every worker: from a checkpoint, or from the seed. */
static int trainer_initialise(struct trainer *t, bool from_checkpoint) {
    int failed = 0;
    float *first = host_vector(t->be, t->worker[0].params, t->layout.count, false);
    if (!first) return -1;
    if (from_checkpoint) {
        size_t count;
        struct named_tensor *tensors = layout_tensor_list(&t->layout, first, &count);
        failed = !tensors || checkpoint_read(t->options->model, &t->layout.config, tensors, count);
        free(tensors);
    } else {
        layout_initialise(&t->layout, (uint64_t)t->options->seed, first);
    }
    for (int w = t->be->on_device ? 0 : 1; w < t->local && !failed; w++) {
        worker_initialise(&t->worker[w], t->be, first, t->layout.count);
    }
    host_vector_end(t->be, first);
    return failed ? -1 : 0;
}

/* Parameters as operations take them. */
static const tensor *in_use(const struct trainer *t, const float *params) {
    if (!t->stage.weights) return params;
    t->be->convert(t->stage.weights, params, t->layout.count);
    return t->stage.weights;
}

/* Calls work(t, worker, engine, context) for every local worker, see the note on threads above. */
typedef void (*worker_function)(struct trainer *t, struct worker *w, struct activations *engine,
                                void *context);

static void for_each_worker(struct trainer *t, worker_function work, void *context) {
    if (t->engines == 1) {
        for (int w = 0; w < t->local; w++) work(t, &t->worker[w], &t->engine[0], context);
        return;
    }
#pragma omp parallel for schedule(dynamic) num_threads(t->engines)
    for (int w = 0; w < t->local; w++) {
        work(t, &t->worker[w], &t->engine[omp_get_thread_num()], context);
    }
}

/* ---- step ------------------------------------------------------------------------------- */

struct meeting { /* of one worker with the network */
    struct trainer *t;
    struct worker *w;
    double waited;
    lossynet_status status;
};

static void parameters_needed(void *context, int bucket) {
    struct meeting *m = (struct meeting *)context;
    lossynet_status status = staging_parameters_needed(&m->t->stage, m->w, bucket, &m->waited);
    if (status) m->status = status;
}

static void gradient_done(void *context, int bucket) {
    const struct meeting *m = (const struct meeting *)context;
    staging_gradient_done(&m->t->stage, m->w, bucket);
}

/* Forward and backward of one worker on its replica and its share of the data. Unless it has a part
 * of its own, worker w takes sequences w*B ... w*B+B-1 of each N*B: the global batch is the same
 * however it is spread.
 * Leaves in t->mine: mean loss, seconds waited for parameters, whether the network failed. */
static void worker_gradient(struct trainer *t, struct worker *w, struct activations *engine,
                            void *context) {
    const int B = t->B, T = t->T, M = t->options->micro_batches;
    double *mine = t->mine + 3 * (w - t->worker);
    struct meeting meeting = {t, w, 0, LOSSYNET_OK};
    const tensor *params = t->stage.weights ? t->stage.weights : w->params;
    double loss = 0;
    (void)context;
    for (int m = 0; m < M; m++) {
        const struct bucket_hooks hooks = {m == 0 ? parameters_needed : NULL,
                                           m == M - 1 ? gradient_done : NULL, &meeting};
        dataloader_batch(t->train, t->at.sequence, m, w->id, t->workers, B, engine->host_tokens,
                         engine->host_targets);
        activations_send(engine, t->be, B * T);
        model_forward_backward(t->be, &t->layout, params, w->grads, engine, B, T,
                               1.0f / ((float)B * T * M), m > 0, &hooks);
        loss += mean_loss(activations_losses(engine, t->be, B * T), B * T) / M;
    }
    mine[0] = loss;
    mine[1] = meeting.waited;
    mine[2] = meeting.status;
}

/* Sum over all workers, in their order, of the one number each local worker left in t->mine. */
static int sum_over_workers(struct trainer *t, double *sum) {
    if (lossynet_all_gather(t->net, t->mine, t->gathered, sizeof(double))) return -1;
    *sum = 0;
    for (int w = 0; w < t->workers; w++) *sum += t->gathered[w];
    return 0;
}

/* Norm of the averaged gradient, of which each owner holds its part. */
static int averaged_norm(struct trainer *t, double *norm) {
    for (int w = 0; w < t->local; w++) {
        t->mine[w] = 0;
        for (int b = 0; b < t->layout.buckets; b++) {
            size_t offset, count;
            lossynet_shard(t->net, t->worker[w].id, b, &offset, &count);
            t->mine[w] += t->be->sum_of_squares(t->worker[w].grads + offset, count);
        }
    }
    if (sum_over_workers(t, norm)) return -1;
    *norm = sqrt(*norm);
    return 0;
}

/* The two phases, timed. */
static int reduce(struct trainer *t, float *const *vectors) {
    double start = runlog_seconds();
    if (vectors == t->params)
        staging_send(&t->stage, vectors, false);
    else
        staging_gradients_sent(&t->stage); /* they left during backward */
    lossynet_status status = lossynet_reduce(t->net, vectors, is_lossless(t));
    staging_receive(&t->stage, vectors, true);
    t->communicating += runlog_seconds() - start;
    return status ? -1 : 0;
}

static int broadcast(struct trainer *t, float *const *vectors) {
    double start = runlog_seconds();
    staging_send(&t->stage, vectors, true);
    if (t->stage.overlap) staging_broadcast(&t->stage);
    lossynet_status status = lossynet_broadcast_begin(t->net, vectors, is_lossless(t));
    if (!status && !t->stage.overlap) {
        status = lossynet_broadcast_end(t->net);
        staging_receive(&t->stage, vectors, false);
    }
    t->communicating += runlog_seconds() - start;
    return status ? -1 : 0;
}

/* lossy, reliable: gradients are averaged by the owners, who step and broadcast parameters. */
static int exchange_gradients(struct trainer *t, int step, struct step_record *r) {
    if (reduce(t, t->grads)) return -1;
    if (averaged_norm(t, &r->grad_norm)) return -1;
    if (!isfinite(r->grad_norm)) return 0; /* the caller stops; the parameters are still good */
    const struct worker_step s = {step, r->learning_rate, worker_clip(t->options, r->grad_norm)};
    for (int w = 0; w < t->local; w++) {
        struct worker *k = &t->worker[w];
        size_t state = 0;
        for (int b = 0; b < t->layout.buckets; b++) {
            size_t offset, count;
            lossynet_shard(t->net, k->id, b, &offset, &count);
            worker_update(k, t->be, &t->layout, t->options, &s, state, offset, count);
            state += count;
        }
    }
    return broadcast(t, t->params);
}

static void worker_steps(struct trainer *t, struct worker *w, struct activations *engine,
                         void *context) {
    (void)engine;
    struct worker_step s = *(const struct worker_step *)context;
    double norm = sqrt(t->be->sum_of_squares(w->grads, t->layout.count));
    t->mine[w - t->worker] = norm / t->workers;
    if (!isfinite(norm)) return;
    s.gradient_scale = worker_clip(t->options, norm);
    worker_update(w, t->be, &t->layout, t->options, &s, 0, 0, t->layout.count);
}

/* rps: every worker steps on its own gradient; owners average the models and broadcast them. */
static int exchange_models(struct trainer *t, int step, struct step_record *r) {
    struct worker_step s = {step, r->learning_rate, 1};
    for_each_worker(t, worker_steps, &s);
    if (sum_over_workers(t, &r->grad_norm)) return -1;
    if (!isfinite(r->grad_norm)) return 0;
    return reduce(t, t->params) || broadcast(t, t->params) ? -1 : 0;
}

/* naive: owners average gradients and broadcast the average; every worker steps where it received
 * one, and stands still elsewhere. */
static int exchange_averages(struct trainer *t, int step, struct step_record *r) {
    if (reduce(t, t->grads)) return -1;
    if (averaged_norm(t, &r->grad_norm)) return -1;
    if (!isfinite(r->grad_norm)) return 0;
    if (broadcast(t, t->grads)) return -1;
    const struct worker_step s = {step, r->learning_rate, worker_clip(t->options, r->grad_norm)};
    for (int w = 0; w < t->local; w++) {
        struct worker *k = &t->worker[w];
        size_t cursor = 0, offset, count;
        while (lossynet_next_fresh(t->net, k->id, &cursor, &offset, &count)) {
            worker_update(k, t->be, &t->layout, t->options, &s, offset, offset, count);
        }
    }
    staging_send(&t->stage, t->params, false); /* for drift and evaluation */
    return 0;
}

static double tokens_per_step(const struct trainer *t) {
    return (double)t->workers * t->B * t->T * t->options->micro_batches;
}

/* Packets, ages and drift of a step. */
static int account(struct trainer *t, struct step_record *r) {
    struct lossynet_counters counters;
    struct lossynet_drift drift;
    if (lossynet_drift_measure(t->net, t->params, &drift)) return -1;
    if (lossynet_step_counters(t->net, (uint64_t)r->step, &counters)) return -1;
    network_record(&counters, r);
    /* The formulas hold for `lossy`, where a packet that arrives heals a replica. */
    const bool lossy = t->options->algorithm == ALGORITHM_LOSSY;
    r->drift = drift.pair;
    r->drift_expected = lossy ? drift.expected_pair : NAN;
    r->drift_paper = lossy ? drift.paper_pair : NAN;
    r->mean_age = drift.mean_age;
    r->max_age = drift.max_age;
    memcpy(r->age_share, drift.age_share, sizeof r->age_share);
    return 0;
}

/* Ends the last step where that is still to do: closes its PARAMETER phase and records it. */
static int finish_step(struct trainer *t) {
    struct step_record *r = &t->record;
    double start = runlog_seconds();
    if (!t->unfinished) return 0;
    t->unfinished = false;
    if (lossynet_broadcast_end(t->net)) return -1;
    staging_finish(&t->stage, t->params);
    t->communicating += runlog_seconds() - start;
    if (account(t, r)) return -1;
    double now = runlog_seconds();
    r->communication_seconds = t->communicating;
    r->seconds = now - t->finished;
    t->communicating = 0;
    t->finished = now;
    record_add(&t->at.record, r);
    record_show_step(&t->progress, r, t->workers > 1);
    record_log_step(t->log, r);
    return 0;
}

/* One step of all workers. With overlap its gradients leave during backward, and its parameters
 * come during the next step's forward; it is finished only then. A loss or a norm that is not
 * finite is the caller's to look for, in t->record. */
static int training_step(struct trainer *t, int step) {
    const struct options *o = t->options;
    struct step_record *r = &t->record;
    if (!t->unfinished) t->finished = runlog_seconds();
    if (network_step_begin(t->net, o, step)) return -1;
    if (t->stage.overlap && lossynet_reduce_begin(t->net, t->grads, is_lossless(t))) return -1;
    for_each_worker(t, worker_gradient, NULL);
    t->stage.arriving = false; /* forward has received each bucket */
    double waited = 0, loss = 0;
    for (int w = 0; w < t->local; w++) {
        if (t->mine[3 * w + 2] > 0) return -1;
        waited = fmax(waited, t->mine[3 * w + 1]);
        t->mine[w] = t->mine[3 * w];
    }
    t->communicating += waited;
    if (sum_over_workers(t, &loss) || finish_step(t)) return -1;
    memset(r, 0, sizeof *r);
    r->step = step;
    r->tokens = tokens_per_step(t);
    r->learning_rate = schedule_learning_rate(step, o->steps, o->warmup, o->lr, o->lr_final);
    r->loss = loss / t->workers;
    if (!isfinite(r->loss)) return 0;
    int failed = o->algorithm == ALGORITHM_RPS     ? exchange_models(t, step, r)
                 : o->algorithm == ALGORITHM_NAIVE ? exchange_averages(t, step, r)
                                                   : exchange_gradients(t, step, r);
    if (failed) return -1;
    t->unfinished = true;
    return t->stage.overlap ? 0 : finish_step(t);
}

/* ---- evaluation ------------------------------------------------------------------------- *
 * The perplexity is exp of the mean loss over all tokens that the validation windows score.
 * Window i belongs to worker i mod N, who evaluates it once with the model ("fresh") and once with
 * its own replica.                                                                            */

struct evaluation_work {
    const float *fresh;
    bool replicas;
    uint64_t windows;
};

/* Sum of the losses of B windows of T tokens, without the first `skip` of each. */
static double evaluate_batch(struct trainer *t, const float *params, struct activations *e, int B,
                             int T, int skip) {
    const struct llama_config *c = &t->layout.config;
    const tensor *weights = in_use(t, params);
    activations_send(e, t->be, B * T);
    model_forward(t->be, &t->layout, weights, e, B, T, NULL);
    t->be->classifier(e->losses, NULL, NULL, e->last_norm, at(t->be, weights, t->layout.classifier),
                      e->targets, B * T, c->width, c->vocabulary, 1, false);
    const float *losses = activations_losses(e, t->be, B * T);
    double sum = 0;
    for (int b = 0; b < B; b++) sum += mean_loss(losses + b * T + skip, T - skip) * (T - skip);
    return sum;
}

static void worker_evaluates(struct trainer *t, struct worker *w, struct activations *e,
                             void *context) {
    struct evaluation_work *work = (struct evaluation_work *)context;
    double *sums = t->mine + 3 * (w - t->worker); /* losses: model's, replica's; tokens */
    memset(sums, 0, 3 * sizeof *sums);
    for (uint64_t i = (uint64_t)w->id; i < work->windows;) {
        int B = 0, T = 0, skip = 0; /* windows of one shape go together */
        while (B < t->B && i < work->windows) {
            int length =
                dataloader_window(t->val, i, e->host_tokens + B * T, e->host_targets + B * T);
            int context = dataloader_window_skip(t->val, i);
            if (B > 0 && (length != T || context != skip)) break;
            T = length;
            skip = context;
            B++;
            i += (uint64_t)t->workers;
        }
        sums[0] += evaluate_batch(t, work->fresh, e, B, T, skip);
        if (work->replicas) sums[1] += evaluate_batch(t, w->params, e, B, T, skip);
        sums[2] += (double)B * (T - skip);
    }
}

/* The model: every replica, where these are exact; else the owners' shards. */
static int fresh_model(void *context, const float **model) {
    struct trainer *t = (struct trainer *)context;
    *model = t->worker[0].params;
    if (replicas_are_exact(t)) return 0;
    *model = t->fresh;
    const size_t P = t->layout.count;
    float *fresh = t->stage.staged ? host_vector(t->be, t->fresh, P, false) : t->fresh;
    int failed = !fresh || lossynet_gather_fresh(t->net, t->params, fresh) ? -1 : 0;
    if (t->stage.staged && !failed) t->be->upload(t->fresh, fresh, P * sizeof(float));
    if (t->stage.staged) host_vector_end(t->be, fresh);
    return failed;
}

static int evaluate(struct trainer *t, int steps_done, struct eval_record *out) {
    struct evaluation_work work = {NULL, !replicas_are_exact(t), dataloader_windows(t->val)};
    uint64_t limit = (uint64_t)t->options->eval_sequences;
    double total[3] = {0, 0, 0};
    memset(out, 0, sizeof *out);
    if (limit && work.windows > limit) work.windows = limit;
    if (fresh_model(t, &work.fresh)) return -1;
    for_each_worker(t, worker_evaluates, &work);
    if (lossynet_all_gather(t->net, t->mine, t->gathered, 3 * sizeof(double))) return -1;
    for (int i = 0; i < 3 * t->workers; i++) total[i % 3] += t->gathered[i];
    out->step = steps_done;
    out->tokens = (int64_t)total[2];
    out->val_loss = total[0] / total[2];
    out->tokens_per_word = dataloader_targets_per_word(t->val);
    out->replica_val_loss = work.replicas ? total[1] / total[2] : out->val_loss;
    return 0;
}

/* ---- writing ---------------------------------------------------------------------------- */

struct writer {
    struct trainer *t;
    const tensor *weights; /* in_use */
};

/* Feeds tokens behind the `first` that the engine's layers hold; logits (V) of what follows. */
static int feed_model(void *context, const int32_t *tokens, int first, int count, float *logits) {
    const struct writer *w = (const struct writer *)context;
    const struct layout *l = &w->t->layout;
    const struct backend *be = w->t->be;
    struct activations *e = &w->t->engine[0];
    memcpy(e->host_tokens, tokens, (size_t)count * sizeof *tokens);
    activations_send(e, be, count);
    e->past = first;
    model_forward(be, l, w->weights, e, 1, count, NULL);
    e->past = 0;
    return generate_logits(be, logits, at(be, e->last_norm, (size_t)(count - 1) * l->config.width),
                           at(be, w->weights, l->classifier), l->config.width,
                           l->config.vocabulary);
}

static struct generate_model writing_model(struct writer *w) {
    const struct llama_config *c = &w->t->layout.config;
    const bool remembers = activations_remember(&w->t->engine[0], c, w->t->be);
    const struct generate_model model = {c->vocabulary, w->t->T, remembers, feed_model, w};
    return model;
}

/* --sample-every: a line that the model writes, on the terminal and in the log. */
static int write_sample(struct trainer *t, int steps_done) {
    const float *model_parameters;
    struct generate_line line;
    if (fresh_model(t, &model_parameters)) return -1;
    if (t->world.rank > 0) return 0;
    struct writer w = {t, in_use(t, model_parameters)};
    const struct generate_model model = writing_model(&w);
    if (generate_sample(&model, t->tokenizer, t->options, &line)) return -1;
    return record_sample(&t->progress, t->log, steps_done, line.text);
}

/* ---- training --------------------------------------------------------------------------- */

static struct run_facts run_facts(const struct trainer *t) {
    size_t moments = worker_steps_alone(t->options) ? t->layout.count : 0;
    for (int w = 0; w < t->workers; w++) {
        size_t owned = lossynet_owned_elements(t->net, w);
        if (owned > moments) moments = owned;
    }
    const struct run_facts facts = {t->options,
                                    &t->layout,
                                    GIT_REVISION,
                                    t->be->details,
                                    lossynet_link_name(t->net),
                                    t->stage.sends,
                                    t->world.rank,
                                    t->world.ranks,
                                    t->workers,
                                    t->local,
                                    omp_get_max_threads(),
                                    t->B,
                                    t->T,
                                    t->train ? dataloader_tokens(t->train) : 0,
                                    lossynet_packet_bytes(t->net),
                                    lossynet_packets(t->net),
                                    moments};
    return facts;
}

static int gather_notes(void *net, const void *mine, void *all, size_t bytes) {
    return lossynet_all_gather((struct lossynet *)net, mine, all, bytes) ? -1 : 0;
}

/* What a checkpoint holds of this run, and who writes it. */
static int open_saver(struct trainer *t) {
    const struct saver_settings settings = {&t->run, t->tokenizer, gather_notes,
                                            t->net,  fresh_model,  t};
    struct resume_net *net = &t->run.net;
    net->net = t->net;
    net->shard = lossynet_shard;
    net->next_fresh = lossynet_next_fresh;
    net->state_bytes = lossynet_state_bytes;
    net->state_save = lossynet_state_save;
    net->state_load = lossynet_state_load;
    net->all_workers = LOSSYNET_ALL_WORKERS;
    t->run.whole_moments = worker_steps_alone(t->options);
    t->run.own_replicas = t->options->algorithm == ALGORITHM_NAIVE;
    t->run.on_device = t->be->on_device;
    t->run.upload = t->be->upload;
    t->run.download = t->be->download;
    t->run.worker = (struct resume_worker *)calloc((size_t)t->local, sizeof *t->run.worker);
    if (!t->run.worker) return report_out_of_memory("the list of workers", 0);
    for (int w = 0; w < t->local; w++) {
        const struct worker *k = &t->worker[w];
        const struct resume_worker saved = {k->id, k->params, k->m, k->v};
        t->run.worker[w] = saved;
    }
    return t->options->out ? saver_open(&settings, t->at.step, &t->saver) : 0;
}

static void record_evaluation(struct trainer *t, const struct eval_record *e) {
    record_show_eval(&t->progress, e);
    record_log_eval(t->log, e);
}

/* Loss or gradient norm is NaN or infinite: nothing good can follow. */
static int stop_not_finite(struct trainer *t, const struct step_record *r) {
    if (saver_finish(t->saver)) return -1;
    const char *checkpoint = saver_last(t->saver);
    progress_end(&t->progress);
    record_log_step(t->log, r);
    record_log_end(t->log, &t->at.record, "not finite", NULL, checkpoint);
    if (t->world.rank > 0) return -1;
    return report("stopped in step %d: the %s is %g; last good checkpoint: %s; a lower --lr or a "
                  "longer --warmup may help",
                  r->step, isfinite(r->loss) ? "gradient norm" : "loss",
                  isfinite(r->loss) ? r->grad_norm : r->loss,
                  *checkpoint ? checkpoint : "none was written");
}

/* Waits for the last checkpoint and closes the account. */
static int finish(struct trainer *t, bool stopped, const struct eval_record *eval) {
    if (saver_finish(t->saver)) return -1;
    const char *checkpoint = saver_last(t->saver);
    progress_end(&t->progress);
    if (t->progress.on && stopped) printf("stopped by a signal after %d steps\n", t->at.step);
    if (t->progress.on && *checkpoint) printf("model in %s\n", checkpoint);
    record_log_end(t->log, &t->at.record, stopped ? "stopped" : "complete", eval, checkpoint);
    if (t->world.rank > 0 || !saver_has_failed(t->saver)) return 0;
    return report("no checkpoint could be written to '%s', see above", t->options->out);
}

/* Whether something is due `every` so many steps, or at the end. */
static bool is_due(const struct options *o, int done, int every) {
    return done == o->steps || (every && done % every == 0);
}

static int train_loop(struct trainer *t) {
    const struct options *o = t->options;
    struct eval_record eval;
    const struct eval_record *last_eval = NULL;
    bool stop = false, due;
    run_announce(&t->run.facts);
    progress_begin(&t->progress, t->at.step, o->steps, t->world.rank == 0 && !o->quiet);
    while (t->at.step < o->steps && !stop) {
        const int done = t->at.step + 1;
        const bool evaluates = t->val && is_due(o, done, o->eval_every);
        const bool writes = o->sample_every && is_due(o, done, o->sample_every);
        if (training_step(t, t->at.step)) return -1;
        if (!isfinite(t->record.loss) || !isfinite(t->record.grad_norm)) {
            return stop_not_finite(t, &t->record);
        }
        t->at.step = done;
        t->at.sequence += (uint64_t)o->micro_batches * t->workers * t->B;
        if (saver_poll(t->saver, done, &due, &stop)) return -1;
        const bool pauses = evaluates || writes || due || stop || done == o->steps;
        if (pauses && finish_step(t)) return -1;
        if (evaluates) {
            if (evaluate(t, done, &eval)) return -1;
            record_evaluation(t, &eval);
            last_eval = &eval;
        }
        if (writes && write_sample(t, done)) return -1;
        if (due && saver_save(t->saver, &t->at)) return -1;
    }
    return finish(t, stop && t->at.step < o->steps, last_eval);
}

/* Opens the log, if one is wanted; only rank 0 writes. */
static int open_log(struct trainer *t) {
    const struct options *o = t->options;
    char path[FILE_PATH_BYTES];
    if (t->world.rank > 0) return 0;
    if (o->out && file_make_directory(o->out)) return -1;
    if (!o->log && !o->out) return 0;
    if (!o->log && file_join(path, o->out, "log.jsonl")) return -1;
    return runlog_open(o->log ? o->log : path, t->at.step, &t->log);
}

/* Everything that training or evaluation needs, in the order in which mistakes are cheapest to
 * find, and the log's first line. */
static int prepare(struct trainer *t, bool training) {
    const struct options *o = t->options;
    struct llama_config c;
    if (config_of_model(o->model, &c)) return -1;
    t->B = o->batch;
    t->T = usage_sequence_length(o, c.positions);
    if (training && dataloader_open(o->train, DATALOADER_TRAIN, t->T, (uint64_t)o->seed, &t->train))
        return -1;
    if (training && o->data_split == DATA_CONTIGUOUS && dataloader_split(t->train, t->workers))
        return -1;
    if (o->val && dataloader_open(o->val, DATALOADER_VALIDATE, t->T, 0, &t->val)) return -1;
    if (o->val && o->stride) dataloader_set_stride(t->val, o->stride);
    const struct dataloader *data = training ? t->train : t->val;
    if (config_complete(o->model, o->vocabulary, dataloader_vocabulary(data), &c)) return -1;
    if (t->train && dataloader_check_vocabulary(t->train, c.vocabulary)) return -1;
    if (t->val && dataloader_check_vocabulary(t->val, c.vocabulary)) return -1;
    t->tokenizer = o->tokenizer ? o->tokenizer : dataloader_tokenizer(data);
    if (o->sample_every && generate_check_tokenizer(t->tokenizer)) return -1;
    if (open_log(t) || layout_build(&c, &t->layout) || trainer_allocate(t, training)) return -1;
    checkpoint_shows_progress = t->world.rank == 0 && !o->quiet;
    if (trainer_initialise(t, file_is_directory(o->model))) return -1;
    t->run.facts = run_facts(t);
    runlog_write(t->log, run_event(&t->run.facts));
    return 0;
}

static int train(struct trainer *t) {
    const char *from = t->options->resume;
    json_t *saved = NULL;
    int failed = from ? resume_open(from, &saved, &t->at) : 0;
    failed = failed || prepare(t, true) || open_saver(t) ||
             (from && resume_load(&t->run, from, saved, t->log));
    if (!failed) staging_start(&t->stage, t->params);
    json_decref(saved);
    return failed || train_loop(t) ? -1 : 0;
}

/* ---- other modes ------------------------------------------------------------------------ */

/* --eval: perplexity of a checkpoint. */
static int eval_mode(struct trainer *t) {
    struct eval_record e;
    if (prepare(t, false) || evaluate(t, 0, &e)) return -1;
    record_evaluation(t, &e);
    if (t->world.rank == 0 && !t->options->quiet) {
        printf("loss %.6f  perplexity %.4f  tokens %lld", e.val_loss, exp(e.val_loss),
               (long long)e.tokens);
        if (e.tokens_per_word > 0) printf("  word perplexity %.4f", record_word_perplexity(&e));
        printf("\n");
    }
    return 0;
}

/* --generate: continues a prompt. */
static int generate_mode(struct trainer *t) {
    const struct options *o = t->options;
    struct tokenizer *tokenizer = NULL;
    struct llama_config c;
    if (config_read(o->model, &c)) return -1;
    if (generate_open_tokenizer(o->tokenizer, o->model, c.vocabulary, &tokenizer)) return -1;
    t->B = 1;
    t->T = c.positions;
    int failed = layout_build(&c, &t->layout) || trainer_allocate(t, false) ||
                 activations_add_cache(&t->engine[0], &c, t->be) || trainer_initialise(t, true);
    if (!failed) {
        struct writer w = {t, in_use(t, t->worker[0].params)};
        const struct generate_model model = writing_model(&w);
        failed = generate_to_terminal(&model, tokenizer, o);
    }
    tokenizer_close(tokenizer);
    return failed ? -1 : 0;
}

/* ---- main ------------------------------------------------------------------------------- */

static int run(const struct options *o, const struct lossynet_world *world) {
    struct trainer t;
    memset(&t, 0, sizeof t);
    t.options = o;
    t.world = *world;
    t.workers = o->generate ? 1 : o->workers ? o->workers : world->ranks;
    if (o->dry_run) return world->rank == 0 && network_dry_run(o, t.workers) ? 1 : 0;
    if (o->preflight) return preflight(o, world) ? 1 : 0;
    threads_choose(o->threads, world->local_ranks);
    int failed = o->eval ? eval_mode(&t) : o->generate ? generate_mode(&t) : train(&t);
    trainer_release(&t);
    return failed ? 1 : 0;
}

#ifndef TESTING
int main(int argc, char **argv) {
    struct options options;
    struct lossynet_world world;
    threads_wait_briefly(argv);
    if (lossynet_bootstrap(&argc, &argv, &world)) return 1;
    int status = usage_read(argc, argv, &world, GIT_REVISION, &options);
    if (!status && world.rank == 0 && (options.help || options.version)) {
        options.help ? options_help() : usage_version(GIT_REVISION);
    }
    if (status || options.help || options.version) {
        lossynet_shutdown(0); /* not MPI_Abort: all ranks leave here */
        return status;
    }
    report_muted = false;
    if (world.ranks > 1) report_rank = world.rank;
    status = run(&options, &world);
    lossynet_shutdown(status);
    return status;
}
#endif
