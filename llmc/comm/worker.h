/* worker.h — one data-parallel replica: its vectors, and the copies of them that the network reads.
 *
 * All vectors lie in the backend's memory. If the network reads host memory (several ranks, each
 * with a GPU), parameters and gradients also have a copy in pinned host memory, which is updated
 * while the GPU computes:
 *
 *     worker_send      device -> host, on the copy-out stream, after what was computed before
 *     worker_receive   host -> device, on the copy-in stream, before whatever is computed next
 *
 * Otherwise the copies are the vectors themselves, and these functions do nothing.
 * bucket_pipeline.h says what is sent and received when.
 *
 * A GPU that computes in bfloat16 then needs float32 only of what its worker owns (memory_plan.h says
 * when; ZeRO, Rajbhandari et al. 2020, stage 1, with the gradient partitioned as in stage 2):
 *
 *     parameters   the replica is the weights in use; its float32 copy is the network's, in the host's
 *                  memory, from which buckets are rounded as they come. With --wire-dtype bf16, int8
 *                  and int4 the network's copies of parameters and gradients are bfloat16, too
 *                  (`half`), and gradients are rounded on the GPU
 *     what it owns master values, which AdamW steps on, and the averaged gradient
 *     gradient     where a step has one micro-batch, of a few buckets (`gradient.slots`): a slot is
 *                  written again when its bucket is on the host
 */
#ifndef LLMC_COMM_WORKER_H
#define LLMC_COMM_WORKER_H

#include <stdbool.h>
#include <stddef.h>

#include "llmc/backend/backend.h"
#include "llmc/model/param_layout.h"
#include "llmc/cli/options.h"

#ifdef __cplusplus
extern "C" {
#endif

struct worker_part {
    float *first;
    size_t bytes;
};

struct worker {
    int id;             /* 0 ... N-1 */
    int group, members; /* the first worker of its group, and how many it has (group.h) */
    float *params, *grads, *m, *v; /* in the backend's memory; params with masters: comm_params */
    /* The copies that the network reads and writes. With `half` they hold bfloat16 (uint16_t), as
     * lossynet's vectors do then. */
    float *comm_params, *comm_grads;
    bool half;
    struct gradient_place gradient; /* first: grads */
    /* Where buckets of the gradient are copied to. first: comm_grads; or slots in memory that a group
     * shares, from which it adds them up into comm_grads (group.h). */
    struct gradient_place comm_gradient;
    /* The parts of comm_grads that are in memory; NULL: all. Not its own. */
    const struct worker_part *part;
    int parts;
    /* Of what the worker owns, in the order of m and v, in the backend's memory: the float32 values,
     * and the averaged gradient. NULL: both lie in params and grads. */
    float *master, *average;
    /* With `half`, the network's copies of these two, in pinned memory of the host's. */
    float *comm_master, *comm_average;
    size_t owned;    /* elements of each */
    weight *weights; /* with masters: the replica in use, P; not its own */
    /* These are not its own, but another worker's or its group's (group.h): params and grads; the
     * copies. */
    bool shares, shares_comm;
    /* Other processes' devices read `grads` where it is. It is released with the process, since they may
     * still have it open. */
    bool peers;
    /* What the worker owns, ahead of its own values, and the copy that the network broadcasts
     * (lossynet's lead.c). Elements are in the order of m and v. NULL: not needed. */
    float *ahead, *comm_ahead;
    /* What was lost of its gradients, on a device; NULL: lossynet has it, or nothing is carried. */
    float *residual;
    float carried; /* the share of it that joins the next gradient (--carry) */
};

struct worker_needs {
    size_t owned;  /* elements of what the worker owns */
    bool training; /* else only parameters are needed */
    bool staged;   /* the network reads host memory */
    bool masters;  /* float32 only of what it owns is in the backend's memory */
    bool half;     /* and the network's copies are bfloat16 */
    bool leads;    /* values ahead of what it owns */
    float carried; /* not 0: a residual, of which so much joins the next gradient */
    int slots;     /* of the gradient (param_layout.h) */
};

/* Allocates the vectors of which it is not told (shares, shares_comm) that they are another's. The
 * caller releases it, also after a failure. Returns 0, or -1 after reporting. */
int worker_allocate(struct worker *w, const struct backend *be, const struct param_layout *layout,
                    const struct worker_needs *needs);
void worker_release(struct worker *w, const struct backend *be);

/* Copies a bucket's gradient, `count` elements from `offset`, to comm_gradient. */
void worker_send_gradient(const struct worker *w, const struct backend *be,
                          const struct param_layout *layout, size_t offset, size_t count);

/* Copies parameters (count, in host memory) to the backend's vector and to the network's copy. */
void worker_initialise(struct worker *w, const struct backend *be, const float *params,
                       size_t count);

/* Copies elements offset ... offset + count - 1 to the host, as the operations called so far
 * leave them; see d2h_async in backend.h. comm_vector: comm_params or comm_grads. */
void worker_send(const struct worker *w, const struct backend *be, float *comm_vector,
                 size_t offset, size_t count);
/* Of a worker with masters: copies these to comm_params (with `half` the weights in use that they
 * are rounded to, and these to comm_master), or the averages from comm_grads (comm_average), `count`
 * elements at `offset` of the vector and `state` of what it owns. */
void worker_send_masters(const struct worker *w, const struct backend *be, size_t offset,
                         size_t state, size_t count);
void worker_receive_averages(const struct worker *w, const struct backend *be, size_t offset,
                             size_t state, size_t count);
/* Copies all of `ahead` to the host in the same way. */
void worker_send_ahead(const struct worker *w, const struct backend *be, size_t owned);
/* Copies what the network wrote to the device, before any operation called later; see h2d_async
 * in backend.h. */
void worker_receive(const struct worker *w, const struct backend *be, float *comm_vector,
                    size_t offset, size_t count);

/* Element `offset` of a copy that the network reads. */
static inline float *worker_comm_element(const struct worker *w, float *comm_vector,
                                         size_t offset) {
    return w->half ? (float *)((uint16_t *)comm_vector + offset) : comm_vector + offset;
}

/* ---- AdamW ---- */

/* Whether each worker runs AdamW on all parameters (rps, naive), and so keeps moments of all. */
bool worker_steps_alone(const struct options *options);

/* The factor that clips a gradient of this norm, as in torch.nn.utils.clip_grad_norm_. */
double worker_clip(const struct options *options, double norm);

struct worker_step {
    int step; /* from 0 */
    double learning_rate, gradient_scale;
    double lead;     /* not 0: `ahead` is written, too */
    weight *weights; /* not NULL: the parameters in use, all of a vector's, are written, too */
};

/* Runs AdamW on `count` parameters from `offset`. Their moments start at element `state` of m
 * and v, and what is ahead of them at the same element of `ahead`. */
void worker_update(const struct worker *w, const struct backend *be,
                   const struct param_layout *layout, const struct options *options,
                   const struct worker_step *step, size_t state, size_t offset, size_t count);

/* ---- moving ---- */

/* worker_send or worker_receive */
typedef void (*worker_mover)(const struct worker *w, const struct backend *be, float *comm_vector,
                             size_t offset, size_t count);

/* worker_send_masters or worker_receive_averages */
typedef void (*worker_owned_mover)(const struct worker *w, const struct backend *be, size_t offset,
                                   size_t state, size_t count);

#ifdef __cplusplus
}
#endif
#endif
