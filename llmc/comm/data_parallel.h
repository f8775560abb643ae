/* data_parallel.h — the workers of this rank and the network between all workers: a step's average,
 * update and broadcast.
 *
 * A rank hosts `local` of the N workers. Each worker has a replica of the parameters, a gradient,
 * and the optimizer state of what it owns (ZeRO-1): P/N elements of each moment. Only `rps` and
 * `naive`, whose workers step on their own, keep moments for all P. On a GPU all vectors lie in its
 * memory. They are float32: the owner's shard of `params` is the master weights. Where GPUs of
 * several ranks compute in bfloat16, float32 replicas are in the host's memory alone (worker.h). With
 * --group workers share a replica and a gradient (group.h).
 *
 * The trainer computes gradients and calls, in each step:
 *
 *     data_parallel_begin              before forward; with overlap gradients may leave from now on
 *     data_parallel_average_gradients  or _average_models: owners average what arrives
 *     data_parallel_update_shards      or _update_received: AdamW
 *     data_parallel_broadcast          owners send; with overlap parameters come during forward
 *     data_parallel_finish             closes the broadcast and measures the step
 */
#ifndef LLMC_COMM_DATA_PARALLEL_H
#define LLMC_COMM_DATA_PARALLEL_H

#include "llmc/backend/backend.h"
#include "llmc/backend/select.h"
#include "llmc/checkpoint/async_writer.h"
#include "llmc/checkpoint/resume.h"
#include "llmc/cli/options.h"
#include "llmc/comm/bucket_pipeline.h"
#include "llmc/comm/group.h"
#include "llmc/comm/worker.h"
#include "llmc/log/metrics.h"
#include "llmc/model/param_layout.h"
#include "lossynet/lossynet.h"

#ifdef __cplusplus
extern "C" {
#endif

struct data_parallel {
    /* set by the caller, who owns them */
    const struct options *options;
    const struct param_layout *layout;
    struct lossynet_world world;
    int workers;              /* N */
    const struct backend *be; /* set by data_parallel_choose, and these: */
    bool masters;             /* float32 replicas are the host's alone (worker.h) */
    int slots, group_slots;   /* of gradients (param_layout.h), and of those that a group shares */
    bool rounds, half;        /* memory_plan_rounds_gradients, memory_plan_has_half_copies */
    /* set by data_parallel_open */
    struct lossynet_comm *comm;
    int local;
    struct worker *worker; /* [local] */
    struct group group;
    float **params, **grads; /* [local], the workers' vectors, as lossynet takes them */
    const float **ahead;     /* [local], what owners broadcast ahead of their own values */
    float **averages;        /* [local], with half: what lossynet_owned_apart takes */
    const float **values;
    bool sent_ahead;                 /* the last broadcast sent `ahead` */
    bool keeps_lost;                 /* the workers have residuals (worker.h) */
    struct bucket_pipeline pipeline; /* moves buckets while workers compute; the weights in use */
    const struct backend *memory;    /* where the replicas that are sent and compared lie */
    float *model;            /* P: the owners' shards put together; N > 1. With masters, a bucket */
    bool model_is_borrowed;  /* staged: it lies in the place of the first worker's gradient */
    const float **shard;     /* [local * buckets]: the gradients of what workers own, */
    size_t *shard_count;     /* their numbers of elements, */
    double *shard_sum;       /* and the sums of their squares */
    double *mine, *gathered; /* [3 * local], [3 * N]: small numbers that are exchanged */
    double *losses;          /* [N], of this step; negative: the worker had no gradient */
    double *squares;         /* [N], of owners' parts of the averaged gradient, as last told */
    double loss;             /* mean, as last known */
    double communicating;    /* seconds spent waiting since the last step was finished */
    double finished;         /* when that was, or when this step began after a pause */
    bool unfinished; /* a broadcast has begun, and data_parallel_finish_end has not returned */
};

/* Chooses the backend of the run, into d->be and *choice, and sees whether hosts have memory enough.
 * batch, seq: of a micro-batch. tell: says on the terminal why no GPU is used. Collective. Returns 0,
 * or -1 after reporting. */
int data_parallel_choose(struct data_parallel *d, int batch, int seq, bool training, bool tell,
                         struct backend_choice *choice);

/* Opens the comm and allocates the workers' memory; without training parameters alone. Returns 0,
 * or -1 after reporting; the caller closes it in both cases. */
int data_parallel_open(struct data_parallel *d, bool training);
void data_parallel_close(struct data_parallel *d);

/* Call before the first step of a run, new or resumed: the replicas' parameters are there. Collective.
 * Returns 0, or -1 after reporting. */
int data_parallel_start(struct data_parallel *d);

/* The same initial parameters for every worker: from the checkpoint that --model names, or from the
 * seed. Returns 0, or -1 after reporting. */
int data_parallel_initialise(struct data_parallel *d);

/* Describes in *run (whose `facts` are the caller's) what a checkpoint holds of the workers and the
 * comm, and with --out opens the writer of checkpoints, which begins after so many steps; else *out
 * is NULL. The caller frees run->worker, and keeps *run as long as *out. Returns 0, or -1 after
 * reporting. */
int data_parallel_open_saver(struct data_parallel *d, const char *tokenizer, int step,
                             bool continues, struct resume_run *run, struct async_writer **out);

/* Nothing is lost by this algorithm (reliable). */
bool data_parallel_is_lossless(const struct data_parallel *d);
/* Every replica equals the model: what is sent is the model, and it arrives as it was. */
bool data_parallel_replicas_are_exact(const struct data_parallel *d);

/* *model (P elements, in the backend's memory): a replica if replicas are exact; otherwise the
 * owners' shards. With masters it is NULL, and the model is in the place of the weights in use until the
 * next step. Collective. Valid until the next step. Returns 0, or -1 after reporting. */
int data_parallel_model(struct data_parallel *d, const float **model);

/* The same, copied to the tensors, in host memory, whose data are not NULL: count of them, as
 * hf_model_tensors lists them. Ranks may want different ones. */
int data_parallel_copy_model(struct data_parallel *d, const struct named_tensor *tensors,
                             size_t count);

/* What data_parallel_model gave, in the type that operations take; float32 ones are returned as they
 * are. Until the next call, or the next step. */
const weight *data_parallel_weights(struct data_parallel *d, const float *params);

/* The same of a worker's replica. */
const weight *data_parallel_replica(struct data_parallel *d, const struct worker *w);

/* Elements of each moment that a worker keeps, at most. */
size_t data_parallel_moments(const struct data_parallel *d);

/* The sum over all workers, in their order, of the number that each local worker left in `mine`.
 * Collective. Returns 0, or -1 after reporting. */
int data_parallel_sum(struct data_parallel *d, double *sum);

/* Writes the event "links" to the log (rank 0's; NULL elsewhere): what was lost between each two
 * workers, after `step` steps. Collective. Returns 0, or -1 after reporting. */
int data_parallel_log_links(struct data_parallel *d, struct jsonl *log, int step);

/* With --deadline, writes the event "late_ranks" to the log: how many steps went on without each
 * rank, as rank 0 saw it. Returns 0, or -1 after reporting. */
int data_parallel_log_late(struct data_parallel *d, struct jsonl *log, int step);

/* ---- a step; all of these are collective and return 0, or -1 after reporting ---- */

/* Begins *step, or with --deadline the later step that most ranks are at, which is then in
 * *step. */
int data_parallel_begin(struct data_parallel *d, int *step);
/* Whether a local worker computes a gradient in this step; with --deadline not where its rank was
 * late. */
bool data_parallel_computes(const struct data_parallel *d, const struct worker *w);
/* Micro-batches of a local worker in a step. *counts: how much its gradient counts beside others',
 * 1 on average. Where workers take unlike numbers of them (--meet-keep), each counts as much as it
 * takes, so that the mean over workers is that over the batch. */
int data_parallel_micro_batches(const struct data_parallel *d, const struct worker *w,
                                double *counts);
/* Where a local worker's gradient, of 1/G of its loss (group.h), is computed with a set of
 * activations, and what to call when a bucket of it is finished: with overlap it may leave. */
struct gradient_place data_parallel_gradient(const struct data_parallel *d, const struct worker *w,
                                             int set);
void data_parallel_gradient_done(struct data_parallel *d, const struct worker *w, int set,
                                 int bucket);
/* What a rank has learnt that all must know before they do anything together. */
struct data_parallel_news {
    bool stop;         /* a signal asks to */
    bool broken;       /* loss or norm is not finite */
    bool ranks_change; /* --meet: the view ends */
};
/* With --deadline, between steps: makes all ranks meet. *step: in, so many steps this rank has
 * done; out, the most that any has, which all go on from. *news: out, what any of them knew. */
int data_parallel_meet(struct data_parallel *d, int *step, struct data_parallel_news *news);
/* Each local worker left its loss in `mine`, or a negative number where it computed none. The
 * exchange of the norm carries them. */
int data_parallel_tell_losses(struct data_parallel *d);
/* The mean of the losses of all workers that computed one, after the norm was exchanged. */
double data_parallel_mean_loss(struct data_parallel *d);
/* *norm: of the averaged gradient; it may not be finite. */
int data_parallel_average_gradients(struct data_parallel *d, double *norm);
int data_parallel_average_models(struct data_parallel *d);
/* Every owner steps on its shards of the averaged gradient of this norm. */
void data_parallel_update_shards(struct data_parallel *d, struct worker_step step, double norm);
/* Every worker steps where it received an averaged gradient, and stands still elsewhere. */
void data_parallel_update_received(struct data_parallel *d, struct worker_step step, double norm);
/* Owners send their shards of the vectors to all workers; with overlap, during the next forward. */
int data_parallel_broadcast(struct data_parallel *d, float *const *vectors);
/* Ends step r->step in two parts. The first waits for its broadcast and measures it; the next
 * exchange carries what ranks tell each other of it. The second writes packets, ages and drift into
 * r, and makes the exchange if there was none. */
int data_parallel_finish_begin(struct data_parallel *d, struct step_metrics *r);
int data_parallel_finish_end(struct data_parallel *d, struct step_metrics *r);

#ifdef __cplusplus
}
#endif
#endif
