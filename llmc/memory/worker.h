/* worker.h — one data-parallel replica: its vectors, and the copies of them that the network reads.
 *
 * All vectors lie in the backend's memory. If the network reads host memory (several ranks, each
 * with a GPU), parameters and gradients also have a copy in pinned host memory; otherwise the copies
 * are the vectors themselves. comm/port.h says when what is copied.
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

struct worker {
    int id;                    /* 0 ... N-1 */
    int group, members;        /* the first worker of its group, and how many it has (--group) */
    const struct range *range; /* [buckets]: its shards */
    struct ranges squares;     /* those of which v has elements (param_layout_squares); allocated */
    float *params, *grads, *m, *v; /* in the backend's memory; params with masters: comm_params */
    /* The copies that the network reads and writes, whose elements have `copy_bytes` bytes: float32, or
     * bfloat16 (uint16_t). */
    float *comm_params, *comm_grads;
    int copy_bytes;
    struct gradient_place gradient; /* first: grads */
    /* Where buckets of the gradient are copied to. first: comm_grads; or slots in memory that a
     * group shares, from which they are added up into comm_grads (comm/port_shared.c). */
    struct gradient_place comm_gradient;
    /* Float32 values and averaged gradient of the worker's shards, in the order of m, in the
     * backend's memory. NULL: both lie in params and grads. */
    float *master, *average;
    /* With copies in bfloat16, the network's copies of these two, in the host's pinned memory. */
    float *comm_master, *comm_average;
    size_t owned; /* elements of its arrays of owned elements */
    unsigned own; /* bit a: the worker has allocated array a (arrays.h), and no other uses it */
    /* The values of the worker's shards extrapolated ahead of the model, and the copy that the
     * network broadcasts (lossynet's lead.c), in the order of m. NULL: not needed. */
    float *ahead, *comm_ahead;
};

/* The elements of the arrays of a worker whose shards have `owned` elements, each with a second
 * moment. */
struct array_sizes worker_sizes(const struct param_layout *layout,
                                const struct placement *placement, size_t owned);

/* Allocates the worker's arrays, except those that the caller has set; v has the elements of
 * w->squares. The caller releases it, also after a failure. Returns 0, or -1 after reporting. */
int worker_allocate(struct worker *w, const struct backend *be, const struct param_layout *layout,
                    const struct placement *placement, size_t owned);
void worker_release(struct worker *w, const struct backend *be);

/* An array of the worker's own that is float32. */
float *worker_array(const struct worker *w, enum array array);

/* Copies parameters (count, in host memory) to the backend's vector and to the network's copy. */
void worker_initialise(struct worker *w, const struct backend *be, const float *params,
                       size_t count);

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

/* Where a range of a worker's shards is: in an array of owned elements, or else in a whole vector. */
static inline float *worker_shard(float *owned, float *whole, const struct range *range) {
    return owned ? owned + range->state : whole + range->offset;
}

/* Where the backend's memory has the values and the averaged gradient of a range of w's shards. */
static inline float *worker_values(const struct worker *w, const struct range *range) {
    return worker_shard(w->master, w->params, range);
}

static inline float *worker_averaged(const struct worker *w, const struct range *range) {
    return worker_shard(w->average, w->grads, range);
}

/* Updates by AdamW that wait for other workers', since a device makes many as fast as one. */
struct worker_updates {
    const struct backend *be;
    const struct options *options;
    struct worker_step step; /* theirs */
    struct adamw_part part[512];
    int parts;
};

/* Runs the optimizer on ranges of parameters, and their elements of m, v and `ahead`: now, or at
 * the latest in worker_updates_end. With Muon the range has whole rows of matrices, which have no v. */
void worker_update(struct worker_updates *u, const struct worker *w,
                   const struct param_layout *layout, const struct worker_step *step,
                   const struct range *range, int ranges);
void worker_updates_end(struct worker_updates *u);

#endif
