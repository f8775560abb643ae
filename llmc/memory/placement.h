/* placement.h — where the arrays of a rank lie, in which type, and which of them there are: one pure
 * function of the backend, the ranks and the options.
 *
 *     vectors   lie in the backend's memory. If several ranks have a device each, the network reads
 *               copies in pinned host memory (staged)
 *     masters   a device that computes in bfloat16 then has float32 only for the shards of its
 *               worker (ZeRO, Rajbhandari et al. 2020, stage 1, with the gradient partitioned as in
 *               stage 2): master values and the averaged gradient. The replica is the weights in use
 *     copies    are bfloat16 with masters and a wire dtype that is narrower than float32
 *     slots     with one micro-batch, only a few buckets of the gradient are in memory: a slot is
 *               written again when its bucket has been copied to the host
 *
 * arrays.h says which arrays follow from this; --dry-run, the memory check and the run read them.
 */
#ifndef LLMC_MEMORY_PLACEMENT_H
#define LLMC_MEMORY_PLACEMENT_H

#include <stdbool.h>

#include "llmc/backend/backend.h"

/* The arrays that a rank may have. arrays.h says more of each. */
enum array {
    /* in the backend's memory */
    ARRAY_PARAMS,  /* the replica, float32 */
    ARRAY_MASTER,  /* instead of it: values of the worker's shards */
    ARRAY_WEIGHTS, /* the parameters that operations read */
    ARRAY_GRADS,   /* the gradient, or its slots */
    ARRAY_APART,   /* the gradient of a group's other members */
    ARRAY_AVERAGE, /* the averaged gradient of the worker's shards */
    ARRAY_M,       /* the moments of AdamW */
    ARRAY_V,
    ARRAY_AHEAD, /* values of the worker's shards that are ahead of the model (--lead) */
    ARRAY_MODEL, /* the owners' shards put together; with masters one bucket, on the host */
    /* in the host's memory: what the network reads and writes */
    ARRAY_COMM_PARAMS,
    ARRAY_COMM_GRADS,
    ARRAY_COMM_SLOTS, /* buckets of a member's gradient, which its group's ranks read */
    ARRAY_COMM_SUMS,  /* of these: what this member sends or averages */
    ARRAY_COMM_MASTER,
    ARRAY_COMM_AVERAGE,
    ARRAY_COMM_AHEAD,
    ARRAYS
};

struct placement_run { /* what decides */
    bool device;       /* computes on a GPU */
    enum dtype dtype;  /* of weights in use and of activations */
    int ranks, workers;
    int group; /* workers that share a replica (--group); 0: 1 */
    int micro_batches, layers;
    bool evaluates;   /* no gradients, no optimizer */
    bool steps_alone; /* every worker runs AdamW on all parameters (rps, naive) */
    bool changes;     /* ranks may die and join (--meet) */
    bool leads;       /* owners keep values ahead of the model, which they broadcast (--lead) */
    bool narrow;      /* elements of packets of gradients are narrower than float32 */
};

enum way {
    WAY_IN_PLACE,
    WAY_STAGED,
    WAY_SHARED
}; /* from a rank's vectors to the network: comm/port.h */

struct placement {
    enum way way;
    bool trains, steps_alone;
    /* A device rounds gradients to bfloat16 before they are sent, so that the same values are sent
     * wherever workers run. */
    bool rounds_to_bf16;
    int copy_bytes;   /* of an element of the network's copies: 2 (bfloat16) or 4 */
    int slots;        /* of a gradient (param_layout.h); 0: the whole gradient */
    int copy_slots;   /* the same in the host's memory that a group's ranks share (port_shared.c) */
    bool has[ARRAYS]; /* which arrays there are */
};

struct placement placement_of(const struct placement_run *run);

#endif
