/* staging.h — how the vectors of a rank's workers meet a network while the workers compute.
 *
 * A bucket's gradient leaves when backward has finished it, and a bucket's parameters are brought
 * to where forward reads them when it first needs them. On the CPU, and for workers that share one
 * device and process, that is a word to lossynet. Where the network reads copies in the host's
 * memory (`staged`: several ranks, each with a device), vectors move between the two as worker.h
 * says, beside the computing:
 *
 *     backward has finished a bucket     leaves for the host; lossynet hears of it once it is there
 *     all gradients are done             staging_gradients_sent waits for the last of them
 *     the owners' averages are there     staging_receive, their shards
 *     the owners have stepped            staging_send, their shards
 *     forward needs a bucket             comes from the host, if the last broadcast has not yet
 *
 * With network.c, the trainer and the pre-flight, the only place where lossynet is known.
 */
#ifndef LLMC_STAGING_H
#define LLMC_STAGING_H

#include "llmc/backend.h"
#include "llmc/layout.h"
#include "llmc/worker.h"
#include "lossynet/lossynet.h"

#ifdef __cplusplus
extern "C" {
#endif

struct staging_notice { /* of a worker's gradients that are on their way to the host */
    struct lossynet *net;
    int worker, buckets, next;
    bool direct; /* network hardware reads them where the device has them */
};

struct staging {
    const struct backend *be;
    const struct layout *layout;
    struct lossynet *net;
    struct worker *worker; /* [local] */
    int local;
    bool staged;     /* else vectors are where the network reads them, and nothing moves */
    bool overlap;    /* phases go on while workers compute */
    bool arriving;   /* parameters of the last broadcast are still to be received */
    bool gpu_direct; /* wanted: gradients leave from the device's memory */
    /* "copied", "in place", "in place, gradients by the GPU" (lossynet_register) */
    const char *sends;
    tensor *weights;               /* parameters in use, where they are not float32, else NULL */
    struct staging_notice *notice; /* [local] */
};

/* Completes a struct whose other members are set. 0, or -1 after reporting. */
int staging_open(struct staging *s);
void staging_close(struct staging *s);

/* A worker's gradient is final in this bucket: to the host, if staged, and the network, if it
 * overlaps. */
void staging_gradient_done(const struct staging *s, const struct worker *w, int bucket);
/* All of them are where the network reads them. */
void staging_gradients_sent(const struct staging *s);

/* Before a bucket of a worker's parameters is read in a step: waits for the network, receives the
 * bucket if that is to do, and writes it to `weights`. *waited: seconds, added to. */
lossynet_status staging_parameters_needed(const struct staging *s, const struct worker *w,
                                          int bucket, double *waited);

/* The owners' shards, or whole vectors, of all workers to where the network reads them, or back.
 * vectors: the workers' net_params or net_grads. staging_send waits until they are there. */
void staging_send(const struct staging *s, float *const *vectors, bool shards);
void staging_receive(const struct staging *s, float *const *vectors, bool shards);

/* Before the first step of a run, new or resumed: every replica holds the model, or what it last
 * received of it. To where the network reads them, and as it would have brought them. */
void staging_start(const struct staging *s, float *const *params);

/* Before a broadcast that overlaps: parameters are to be received by buckets
 * (staging_parameters_needed), or all at once by staging_finish. */
void staging_broadcast(struct staging *s);
/* Receives all, if that is still to do. params: the workers' net_params. */
void staging_finish(struct staging *s, float *const *params);

#ifdef __cplusplus
}
#endif
#endif
