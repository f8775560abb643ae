/* data_parallel.h — the workers of this rank and the network between all workers: a step's average,
 * update and broadcast.
 *
 * A rank hosts `local` of the N workers. Each worker has a replica of the parameters, a gradient,
 * and the optimizer state of its shards (ZeRO-1): P/N elements of each moment. With `rps` and
 * `naive` each worker updates all P parameters and keeps moments for all of them. On a GPU all
 * vectors lie in its memory. They are float32: the owner's shard of `params` is the master weights.
 * If several ranks have GPUs that compute in bfloat16, float32 replicas are only in the host's
 * memory (worker.h). With --group workers share a replica and a gradient (port.h).
 *
 * The trainer computes gradients and calls, in each step:
 *
 *     data_parallel_begin              before forward; with overlap gradients are sent from now on
 *     data_parallel_average_gradients  or _average_models: owners average what arrives
 *     data_parallel_update_shards      or _update_received: the optimizer
 *     data_parallel_broadcast          owners send; with overlap parameters arrive during forward
 *     data_parallel_finish_begin       closes the broadcast and measures the step
 *     data_parallel_finish_end         records what ranks have measured
 */
#ifndef LLMC_COMM_DATA_PARALLEL_H
#define LLMC_COMM_DATA_PARALLEL_H

#include "llmc/backend/backend.h"
#include "llmc/comm/select.h"
#include "llmc/checkpoint/resume.h"
#include "llmc/options/options.h"
#include "llmc/comm/port.h"
#include "llmc/memory/exchange.h"
#include "llmc/memory/worker.h"
#include "llmc/log/metrics.h"
#include "llmc/memory/placement.h"
#include "llmc/model/param_layout.h"
#include "lossynet/lossynet_trainer.h"

/* What one rank tells the others, which all must know before they do something together. */
struct data_parallel_news {
    int32_t step;      /* steps done */
    bool stop;         /* a signal asks the run to stop */
    bool broken;       /* loss or norm is not finite */
    bool ranks_change; /* --meet: the view ends */
};

struct data_parallel_vectors {
    const struct backend *memory; /* where the replicas that are sent and compared lie */
    float **params, **grads;      /* [local], the workers', as lossynet takes them */
    float *model;        /* P: the owners' shards put together; N > 1. With masters, a bucket */
    const float **ahead; /* [local], values that owners broadcast instead of theirs (--lead) */
    bool sent_ahead;     /* the last broadcast sent `ahead` */
    struct exchange exchange; /* in a device's memory */
};

struct data_parallel_numbers {       /* small numbers that ranks exchange */
    double *mine, *gathered;         /* [3 * local], [3 * N] */
    struct data_parallel_news *news; /* [local + N] */
    double *losses;  /* [N], of this step; negative: the worker computed no gradient */
    double *squares; /* [N], sum of squares of each owner's averaged gradient, last known */
    double loss;     /* mean, last known */
    double norm;     /* of the last step's averaged gradient; NaN: there is none */
    bool lossless;   /* the rule of --rule wants nothing lost in this phase */
    int step;        /* that was begun */
};

struct data_parallel_time {
    double communicating; /* seconds spent waiting since the last step was finished */
    double finished;      /* when the last step was finished, or this one began after a pause */
    bool unfinished;      /* a broadcast has begun, and data_parallel_finish_end has not returned */
};

struct data_parallel {
    /* set by the caller, which owns them */
    const struct options *options;
    const struct param_layout *layout;
    struct lossynet_world world;
    int workers; /* N */
    /* set by data_parallel_choose */
    const struct backend *be;
    struct placement placement; /* where the vectors lie */
    /* set by data_parallel_open */
    struct lossynet_comm *comm;
    int local;
    struct worker *worker; /* [local] */
    struct range *range;   /* [local * buckets]: the shards of local workers */
    struct port port;      /* moves vectors while workers compute; the weights in use */
    struct data_parallel_vectors vectors;
    struct data_parallel_numbers numbers;
    struct data_parallel_time time;
};

/* Chooses the backend of the run, into d->be and *choice, and checks that hosts have enough memory.
 * batch, seq: of a micro-batch. tell: prints the reason when no GPU is used, and other choices, to
 * the terminal. Collective. Returns 0, or -1 after reporting. */
int data_parallel_choose(struct data_parallel *d, int batch, int seq, bool training, bool tell,
                         struct backend_choice *choice);

/* Opens the comm and allocates the workers' memory, as placement says: without training only the
 * parameters. Returns 0, or -1 after reporting; the caller closes it in both cases. */
int data_parallel_open(struct data_parallel *d);
void data_parallel_close(struct data_parallel *d);
/* Whether data_parallel_open failed because the record of --loss-model replay is of another run. */
bool data_parallel_is_of_another_run(const struct data_parallel *d);

/* Call before the first step of a run, new or resumed, when the replicas have their parameters.
 * Collective. Returns 0, or -1 after reporting. */
int data_parallel_start(struct data_parallel *d);

/* Whether every replica equals the model: owners send the model itself, and all of it arrives
 * without rounding. Always true with a single group. */
bool data_parallel_replicas_are_exact(const struct data_parallel *d);

/* The elements of both moments that a worker keeps, at most. */
size_t data_parallel_moments(const struct data_parallel *d);

/* With --log-buckets, writes the event "buckets" of a step that has ended, the present one or the one before.
 * Collective. Returns 0, or -1 after reporting. */
int data_parallel_log_buckets(struct data_parallel *d, struct jsonl *log, int step);

/* Writes the event "links" to rank 0's log (log is NULL on other ranks): the share of packets that
 * was lost between each two workers in `step` steps. Collective. Returns 0, or -1 after
 * reporting. */
int data_parallel_log_links(struct data_parallel *d, struct jsonl *log, int step);

/* With --deadline, writes the event "late_ranks" to the log: for each rank, the number of steps
 * that went on without it, as rank 0 saw it. Returns 0, or -1 after reporting. */
int data_parallel_log_late(struct data_parallel *d, struct jsonl *log, int step);

/* ---- passes of the model ---- */

/* The number of sets of activations: passes that are computed at once. */
static inline int data_parallel_sets(const struct data_parallel *d) {
    return d->port.groups.sets;
}

/* Calls pass(context, worker, set) for each local worker, as often as it returns true (port_passes). Returns
 * 0, or -1 after reporting that parameters did not come. */
int data_parallel_passes(struct data_parallel *d,
                         bool (*pass)(void *context, struct worker *w, int set), void *context);
/* Begins a pass of a local worker with a set of activations; first, last: of the step. */
struct bucket_hooks *data_parallel_pass(struct data_parallel *d, const struct worker *w, int set,
                                        bool first, bool last);

/* ---- a step: functions that can fail are collective, and return 0, or -1 after reporting ---- */

/* Begins step *step. With --deadline it may begin a later one, which most ranks are at, and sets
 * *step to it. */
int data_parallel_begin(struct data_parallel *d, int *step);
/* Whether a local worker computes a gradient in this step. With --deadline it is false in an idle
 * step of its rank, which was late. */
bool data_parallel_computes(const struct data_parallel *d, const struct worker *w);
/* The number of micro-batches of a local worker in a step. *counts: the weight of its gradient in
 * the mean over workers, 1 on average. If workers take different numbers of micro-batches
 * (--meet-keep), the weight is in proportion to them, so that the mean over workers is the mean
 * over the batch. */
int data_parallel_micro_batches(const struct data_parallel *d, const struct worker *w,
                                double *counts);
/* With --deadline, between steps: waits until all ranks have called it. news: in, this rank's; out,
 * the news of all ranks, and the largest number of steps of any rank, from which all go on. */
int data_parallel_agree(struct data_parallel *d, struct data_parallel_news *news);
/* The loss of a local worker in this step; negative: it computed none. */
void data_parallel_note_loss(struct data_parallel *d, const struct worker *w, double loss);
/* Tells all ranks the losses of local workers. The next exchange of the norm carries them. */
int data_parallel_tell_losses(struct data_parallel *d);
/* The mean of the losses of all workers that computed one. Call it after the norm was exchanged. */
double data_parallel_mean_loss(struct data_parallel *d);
/* Whether one can go on: the loss is finite, and so is the norm, which is below 2^40; and no worker has
 * sent numbers that are not. (Receivers refuse numbers from 2^64 on. One in the gradient of a worker
 * makes the norm at least 2^64 / N, where it is not refused.) Call it after the norm was exchanged. */
bool data_parallel_is_finite(const struct data_parallel *d, double loss, double norm);
/* Finds the worker whose gradient is not finite. Returns 0, or -1 after reporting; collective. */
int data_parallel_find_not_finite(struct data_parallel *d, struct lossynet_not_finite *found);
/* The only worker whose loss is not finite, if there are others; else -1. */
int data_parallel_odd_worker(const struct data_parallel *d);
/* Call it when all of backward is called: it averages what has come while a device computes. */
int data_parallel_average_gradients(struct data_parallel *d);
/* *norm: of the averaged gradient; it may not be finite. */
int data_parallel_gradient_norm(struct data_parallel *d, double *norm);
int data_parallel_average_models(struct data_parallel *d);
/* Every owner runs AdamW on its shards of the averaged gradient, which has this norm. */
void data_parallel_update_shards(struct data_parallel *d, struct worker_step step, double norm);
/* Every worker runs AdamW on its own gradient, but for those whose norm is not finite. *norm: the mean
 * over workers. */
int data_parallel_update_replicas(struct data_parallel *d, struct worker_step step, double *norm);
/* Every worker runs AdamW on the elements whose averaged gradient it received, and on no others. */
void data_parallel_update_received(struct data_parallel *d, struct worker_step step, double norm);
/* Owners send their shards to all workers: of the parameters (ARRAY_PARAMS), with overlap during the
 * next forward, or of the averaged gradient (ARRAY_GRADS). */
int data_parallel_broadcast(struct data_parallel *d, enum array what);
/* Whether a step ends during the next one, or when its ranks agree. */
bool data_parallel_ends_later(const struct data_parallel *d);
/* Whether a broadcast has begun, and data_parallel_finish_end has not returned. */
static inline bool data_parallel_is_unfinished(const struct data_parallel *d) {
    return d->time.unfinished;
}
/* These two end step r->step. The first waits for its broadcast and measures the step. The next
 * exchange between ranks then carries the measurements. The second writes packets, ages and drift
 * into r, and makes that exchange itself if there was none. */
int data_parallel_finish_begin(struct data_parallel *d, struct step_metrics *r);
int data_parallel_finish_end(struct data_parallel *d, struct step_metrics *r);

#endif
