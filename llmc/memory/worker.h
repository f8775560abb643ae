/* worker.h — one data-parallel replica: its vectors, and the copies of them that the network reads.
 *
 * All vectors lie in the backend's memory. If the network reads host memory (several ranks, each
 * with a GPU), parameters and gradients also have a copy in pinned host memory, which is updated
 * while the GPU computes:
 *
 *     device -> host   on the copy-out stream, after all operations called before
 *     host -> device   on the copy-in stream, before all operations called later
 *
 * Otherwise the copies are the vectors themselves, and worker_move does nothing.
 * bucket_pipeline.h says what is sent and received when.
 *
 * placement.h says which vectors there are, and arrays.h has them as a table.
 */
#ifndef LLMC_MEMORY_WORKER_H
#define LLMC_MEMORY_WORKER_H

#include <stdbool.h>
#include <stddef.h>

#include "llmc/backend/backend.h"
#include "llmc/memory/arrays.h"
#include "llmc/model/param_layout.h"
#include "llmc/model/ranges.h"
#include "llmc/options/options.h"

#ifdef __cplusplus
extern "C" {
#endif

struct worker_part {
    float *first;
    size_t bytes;
};

struct worker {
    int id;                    /* 0 ... N-1 */
    int group, members;        /* the first worker of its group, and how many it has (group.h) */
    const struct range *range; /* [buckets]: its shards */
    float *params, *grads, *m, *v; /* in the backend's memory; params with masters: comm_params */
    /* The copies that the network reads and writes. With `copies_bf16` they hold bfloat16 (uint16_t), and
     * lossynet reads them as such. */
    float *comm_params, *comm_grads;
    bool copies_bf16;
    struct gradient_place gradient; /* first: grads */
    /* Where buckets of the gradient are copied to. first: comm_grads; or slots in memory that a
     * group shares, from which they are added up into comm_grads (group.h). */
    struct gradient_place comm_gradient;
    /* The parts of comm_grads that are in memory; NULL: all. The group owns this list. */
    const struct worker_part *part;
    int parts;
    /* Float32 values and averaged gradient of the worker's shards, in the order of m and v, in the
     * backend's memory. NULL: both lie in params and grads. */
    float *master, *average;
    /* With `copies_bf16`, the network's copies of these two, in the host's pinned memory. */
    float *comm_master, *comm_average;
    size_t owned;    /* elements of its arrays of owned elements */
    weight *weights; /* with masters: the replica in use, P elements; the caller's memory */
    unsigned own;    /* bit a: the worker has allocated array a (arrays.h) */
    /* Another worker or the group (group.h) owns the memory of params and grads (shares), and of
     * their copies (shares_comm). */
    bool shares, shares_comm;
    /* Devices of other processes read `grads` in place. It is freed only when the process ends,
     * since they may still have it open. */
    bool mapped;
    /* The values of the worker's shards extrapolated ahead of the model, and the copy that the
     * network broadcasts (lossynet's lead.c), in the order of m and v. NULL: not needed. */
    float *ahead, *comm_ahead;
    /* The residual, on a device: gradients that were lost, in bfloat16. NULL: lossynet keeps it, or
     * there is none. */
    uint16_t *residual;
    float carried; /* the share of the residual that is added to the next gradient (--carry) */
};

/* The elements of the arrays of a worker whose shards have `owned` elements. */
struct array_sizes worker_sizes(const struct param_layout *layout,
                                const struct placement *placement, size_t owned);

/* Allocates the worker's arrays, except those that it shares (shares, shares_comm). The caller
 * releases it, also after a failure. Returns 0, or -1 after reporting. */
int worker_allocate(struct worker *w, const struct backend *be, const struct param_layout *layout,
                    const struct placement *placement, size_t owned);
void worker_release(struct worker *w, const struct backend *be);

/* An array of the worker's own that is float32. */
float *worker_array(const struct worker *w, enum array array);

/* Copies parameters (count, in host memory) to the backend's vector and to the network's copy. */
void worker_initialise(struct worker *w, const struct backend *be, const float *params,
                       size_t count);

/* Copies a range of elements to an array from the one that it is a copy of, or whose copy it is: see
 * d2h_async and h2d_async in backend.h.
 *
 *     ARRAY_COMM_PARAMS  from the replica; with masters the range is one of the worker's shards, and comes
 *                        from masters; with `copies_bf16` from the weights in use, and comm_master
 *                        from masters
 *     ARRAY_PARAMS       the replica; with masters, the weights in use
 *     ARRAY_COMM_GRADS, ARRAY_GRADS
 *     ARRAY_AVERAGE      with masters: the average of one of the worker's shards
 *     ARRAY_COMM_AHEAD   elements `state` ... of `ahead` */
void worker_move(const struct worker *w, const struct backend *be, enum array to,
                 struct range range);

/* Element `offset` of a copy that the network reads. */
static inline float *worker_comm_element(const struct worker *w, float *comm_vector,
                                         size_t offset) {
    return w->copies_bf16 ? (float *)((uint16_t *)comm_vector + offset) : comm_vector + offset;
}

/* ---- AdamW and Muon ---- */

/* Whether each worker runs AdamW on all parameters (rps, naive), and so keeps all moments. */
bool worker_steps_alone(const struct options *options);

/* The factor that clips a gradient of this norm, as in torch.nn.utils.clip_grad_norm_. */
double worker_clip(const struct options *options, double norm);

struct worker_step {
    int step; /* from 0 */
    double learning_rate, gradient_scale;
    double lead;     /* not 0: `ahead` is written, too */
    weight *weights; /* not NULL: a vector of P parameters in use, which is written, too */
};

/* Where the backend's memory has the values and the averaged gradient of a range of w's shards. */
static inline float *worker_values(const struct worker *w, const struct range *range) {
    return w->master ? w->master + range->state : w->params + range->offset;
}

static inline float *worker_averaged(const struct worker *w, const struct range *range) {
    return w->average ? w->average + range->state : w->grads + range->offset;
}

/* Runs the optimizer on ranges of parameters, and their elements of m, v and `ahead`. With Muon the range
 * has whole rows of matrices, whose v stays 0. */
void worker_update(const struct worker *w, const struct backend *be,
                   const struct param_layout *layout, const struct options *options,
                   const struct worker_step *step, const struct range *range, int ranges);

#ifdef __cplusplus
}
#endif
#endif
