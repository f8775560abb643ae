/* bucket_pipeline.h — moves the workers' vectors between device, host and network while workers
 * compute.
 *
 * A bucket's gradient is sent as soon as backward has finished it. A bucket's parameters are
 * brought to where forward reads them before forward first needs them. On the CPU, and for workers
 * that share one device and process, nothing is copied: the pipeline only tells lossynet. If the
 * network reads copies in host memory (`staged`: several ranks, each with a device), worker.h
 * copies between the two while the device computes:
 *
 *     backward has finished a bucket     the residual is added; the bucket is copied to the host;
 *                                        then lossynet is told
 *     all workers have copied a bucket   the owners may average it (pipeline_average_early).
 *                                        (With slots, backward waits for this copy before it writes
 *                                        to the bucket's slot again.)
 *     all gradients are finished         pipeline_gradients_sent waits for the last copy
 *     the owners have averaged           pipeline_receive copies their shards to the device
 *     the owners have updated            pipeline_send copies their shards to the host
 *     forward needs a bucket             it waits until the network has received the bucket's
 *                                        parameters; if ranks share copies (group.h), until each of
 *                                        them has; then the bucket is copied from the host, if that
 *                                        was not done yet (group_receive)
 */
#ifndef LLMC_COMM_BUCKET_PIPELINE_H
#define LLMC_COMM_BUCKET_PIPELINE_H

#include "llmc/backend/backend.h"
#include "llmc/model/param_layout.h"
#include "llmc/comm/group.h"
#include "llmc/memory/worker.h"
#include "lossynet/lossynet_trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pipeline_notice { /* tells lossynet which buckets of a worker's gradient are on the host */
    struct lossynet_comm *comm;
    int worker, buckets, next; /* next: the next bucket that will be there */
};

struct bucket_pipeline {
    const struct backend *be;
    const struct param_layout *layout;
    struct lossynet_comm *comm;
    struct worker *worker; /* [local] */
    struct group *group;   /* the workers' groups */
    int local;
    const struct placement *placement; /* staged: otherwise nothing is copied */
    bool overlap;                      /* both phases proceed while workers compute */
    bool early;                        /* the GRADIENT phase proceeds while workers compute */
    bool arriving;     /* parameters of the last broadcast are not yet on the device */
    const char *sends; /* "copied", "in place" (lossynet_register) */
    /* [sets of activations]: the parameters that operations read, if they are not float32; otherwise NULL.
     * With masters (worker.h) they are the replica, and buckets are rounded when they are received. */
    weight *weights[BACKEND_SETS];
    bool current;                   /* AdamW has written them: there is nothing to convert */
    struct pipeline_notice *notice; /* [local] */
};

/* Sets `sends` and `notice`; the caller has set the other members. Returns 0, or -1 after
 * reporting. */
int pipeline_open(struct bucket_pipeline *s);
void pipeline_close(struct bucket_pipeline *s);

/* Call it when backward is done with this bucket of the gradient that worker w computed with a set
 * of activations. When its group's gradient is finished in the bucket, it is copied to the host, if
 * staged, and sent, if `early`. */
void pipeline_gradient_done(const struct bucket_pipeline *s, const struct worker *w, int set,
                            int bucket);
/* Call it when all of backward is called: averages the buckets of which all packets have arrived,
 * while the device computes later buckets. A group adds up its last bucket here. */
void pipeline_average_early(const struct bucket_pipeline *s, float *const *vectors, bool lossless);
/* Waits until all gradients are where the network reads them. */
void pipeline_gradients_sent(const struct bucket_pipeline *s);

/* Call before a step first reads a bucket of a worker's parameters: waits for the network,
 * copies the bucket to the device if necessary, and converts it into the set's `weights`. Adds the seconds
 * of waiting to *waited. */
lossynet_status pipeline_parameters_needed(const struct bucket_pipeline *s, const struct worker *w,
                                           int set, int bucket, double *waited);

/* Copies the owners' shards, or the whole vectors of all workers, to where the network reads
 * them (send), or back (receive). to: ARRAY_COMM_PARAMS or ARRAY_COMM_GRADS; ARRAY_PARAMS or
 * ARRAY_GRADS, whose shards are averages with masters (worker_move). pipeline_send waits for the
 * copies. */
void pipeline_send(const struct bucket_pipeline *s, enum array to, bool shards);
void pipeline_receive(const struct bucket_pipeline *s, enum array to, bool shards);

/* Call before the first step: copies the replicas, or with `copies_bf16` the masters, to where the network
 * reads them. */
void pipeline_start(const struct bucket_pipeline *s);

/* Call before a broadcast that overlaps with forward. Parameters are then received bucket by
 * bucket (pipeline_parameters_needed), or all at once by pipeline_finish. */
void pipeline_broadcast(struct bucket_pipeline *s);
/* Receives all parameters that have not been received yet. */
void pipeline_finish(struct bucket_pipeline *s);

/* The model calls these in a worker's passes, so that the network works while it computes: before a
 * bucket's parameters are first read, and as soon as a bucket's gradient is final. NULL: nothing. */
struct bucket_hooks {
    const struct bucket_pipeline *pipeline;
    const struct worker *worker;
    int set;          /* number of the set of activations */
    bool first, last; /* of the step's micro-batches */
    double waited;    /* seconds that the worker waited for parameters */
    lossynet_status status;
};
void bucket_needed(struct bucket_hooks *hooks, int bucket);
void bucket_done(struct bucket_hooks *hooks, int bucket);

#ifdef __cplusplus
}
#endif
#endif
