/* placement.h — where the arrays of a rank lie, in which type, and which of them there are: one pure
 * function of the backend, the ranks and the options.
 *
 *     vectors   lie in the backend's memory. If several ranks have a device each, the network reads
 *               copies in pinned host memory (`staged`)
 *     masters   a device that computes in bfloat16 then has float32 only for the shards of its
 *               worker (ZeRO, Rajbhandari et al. 2020, stage 1, with the gradient partitioned as in
 *               stage 2): master values and the averaged gradient. The replica is the weights in use
 *     half      with a wire dtype that is narrower than float32, the network's copies are bfloat16
 *     slots     with one micro-batch, only a few buckets of the gradient are in memory: a slot is
 *               written again when its bucket has been copied to the host
 *
 * arrays.h says which arrays follow from this; --dry-run, the memory check and the run read them.
 */
#ifndef LLMC_MEMORY_PLACEMENT_H
#define LLMC_MEMORY_PLACEMENT_H

#include <stdbool.h>

#include "llmc/backend/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

struct placement_run { /* what decides */
    bool device;       /* computes on a GPU */
    enum dtype dtype;  /* of weights in use and of activations */
    int ranks, workers;
    int group; /* workers that share a replica (--group); 0: 1 */
    int micro_batches, layers;
    bool evaluates;   /* no gradients, no optimizer */
    bool steps_alone; /* every worker runs AdamW on all parameters (rps, naive) */
    bool changes;     /* ranks may die and join (--meet) */
    bool carries[2];  /* --carry: on a CPU, on a device */
    bool leads;       /* owners keep values ahead of the model, which they broadcast (--lead) */
    bool gpu_direct;  /* network hardware reads gradients on the device */
    bool narrow;      /* elements of packets of gradients are narrower than float32 */
};

struct placement {
    bool trains, staged, masters, half;
    bool rounds;   /* a device rounds gradients to bfloat16 when backward finishes them, so that the
                      same values are sent wherever workers run */
    bool residual; /* lost gradients are kept beside the vectors; else lossynet keeps them */
    bool leads, steps_alone;
    bool weights;   /* operations read bfloat16 weights, beside or instead of float32 parameters */
    bool gathers;   /* there is memory in which the model is put together, of its own ... */
    bool borrows;   /* ... or that of a gradient */
    int slots;      /* of a gradient (param_layout.h); 0: the whole gradient */
    int copy_slots; /* the same in the host's memory that a group's ranks share (group.h) */
    bool shares_ranks; /* --group, and a rank has one member */
};

struct placement placement_of(const struct placement_run *run);

#ifdef __cplusplus
}
#endif
#endif
