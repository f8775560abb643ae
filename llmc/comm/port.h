/* port.h — the port of a rank: how its workers' vectors get to where the network reads them, and back,
 * while workers compute. It has four verbs, in the order of a step:
 *
 *     gradient out   backward has finished a bucket of the gradient, then all of them
 *     average in     the owners have averaged: their shards get to where the optimizer reads them
 *     values out     the owners have updated: their shards get to where the network reads them
 *     replica in     forward needs a bucket, or the broadcast has ended: what has arrived gets to where
 *                    forward reads it
 *
 * port_open chooses one of three ways to do these, by placement.h:
 *
 *     in place   (port_staged.c) on the CPU, and for workers that share one device and process: nothing is copied
 *     staged     several ranks with a device each: the network reads copies in the host's memory, and
 *                buckets are copied while the device computes. With slots, backward waits for the copy
 *                of a bucket before it writes to the bucket's slot again
 *     shared     (port_shared.c) either of them, where the ranks of a group share the replica or its
 *                copies: each adds up the part of their gradients that it sends or averages
 */
#ifndef LLMC_COMM_PORT_H
#define LLMC_COMM_PORT_H

#include "llmc/backend/backend.h"
#include "llmc/memory/worker.h"
#include "llmc/model/param_layout.h"
#include "lossynet/lossynet_trainer.h"

struct port;
struct shared;

/* what: ARRAY_PARAMS or ARRAY_GRADS; `values_out` also takes ARRAY_AHEAD (--lead). Functions that return
 * a number return 0, or -1 after reporting. NULL: there is nothing to do. */
struct port_verbs {
    /* A bucket of the gradient of w's group is finished, as far as this rank computes it. The bucket is
     * sent, if phases overlap. */
    void (*gradient_out)(const struct port *p, const struct worker *w, int bucket);
    /* All of backward is called: returns when the gradient is where the network reads it. Meanwhile it
     * averages the buckets of which all packets have arrived. */
    int (*gradients_out)(const struct port *p, float *const *vectors, bool lossless);
    void (*average_in)(const struct port *p, enum array what);
    /* EXTENT_OWNED: the owners' shards. EXTENT_WHOLE: all elements, where replicas are float32. */
    void (*values_out)(const struct port *p, enum array what, enum array_extent extent);
    /* w: whose bucket forward needs; NULL: all local workers. */
    int (*replica_in)(const struct port *p, enum array what, const struct worker *w,
                      struct range range);
};

/* Workers of a group share a replica (--group), and their gradients are added up without loss, before
 * packets are sent to other groups: in order of workers, so that the sum has the same bits wherever the
 * members run. Each member computes the gradient of 1/G of its loss, so the sum is the group's mean.
 *
 * If a rank has whole groups, the first member computes into the group's vector, the others into separate
 * ones, and a finished bucket is added to the group's. If it has one member, port_shared.c adds up. */
struct port_groups {
    int first, size; /* first worker of the first local worker's group; members of a group */
    int workers;     /* N */
    int sets; /* of activations, for groups that are computed at once: each by a thread of the CPU, or in a
                 stream of a device; 1: workers take turns, and each uses all of it */
    float **apart; /* [sets], of P elements: gradients of members other than the first, or NULL */
};

/* Forward and backward passes of a worker in a step, with a set of activations. */
struct bucket_hooks {
    struct port *port;
    const struct worker *worker;
    const weight *params;           /* that operations read */
    struct gradient_place gradient; /* where to compute it */
    int set;
    int sent;         /* buckets of the gradient that are on the host, where phases overlap */
    bool first, last; /* of the step's micro-batches */
    double waited;    /* seconds that the worker waited for parameters */
    lossynet_status status;
};
/* Where all workers are on one device, the passes of a worker differ in the contents of memory alone, and are
 * repeated (backend.h, pass_begin). Call port_pass_begin when a pass's set, first and last are known. True: its
 * operations are queued. False: the caller calls them, and then port_pass_end. */
bool port_pass_begin(const struct bucket_hooks *hooks);
void port_pass_end(const struct bucket_hooks *hooks);
/* The model calls these, so that the network works while it computes: before a bucket's parameters are
 * first read, and as soon as a bucket's gradient is final. NULL: nothing. */
void bucket_needed(struct bucket_hooks *hooks, int bucket);
void bucket_done(struct bucket_hooks *hooks, int bucket);

struct port {
    /* set by the caller */
    const struct backend *be;
    const struct param_layout *layout;
    struct lossynet_comm *comm;
    const struct placement *placement;
    struct worker *worker; /* [local] */
    int local;
    bool overlap; /* both phases proceed while workers compute */
    /* set by the port */
    struct port_verbs verbs;
    struct shared *shared; /* what ranks of a group share, or NULL */
    const char *sends;     /* "copied", "in place" (lossynet_register) */
    /* [sets of activations]: the parameters that operations read, if they are not float32; otherwise NULL.
     * With masters (worker.h) they are the replica, and buckets are rounded when they are received. */
    weight *weights[BACKEND_SETS];
    int missing; /* buckets of local replicas that have not come in since the last broadcast */
    struct bucket_hooks *hooks; /* [local], of passes */
    struct port_groups groups;
};

/* Chooses the way, and opens the memory that ranks share. timeout: seconds without a sign of life of a
 * rank (--peer-timeout). Collective. Returns 0, or -1 after reporting; the caller closes it in both
 * cases. */
int port_open(struct port *p, const struct lossynet_world *world, double timeout);
/* Call for each local worker before worker_allocate: sets its group and the vectors that it shares. */
void port_share_vectors(const struct port *p, int worker);
/* Call when workers are allocated. Collective. Returns 0, or -1 after reporting. */
int port_connect(struct port *p);
/* Call when workers are released. */
void port_close(struct port *p);

/* Calls work(context, worker, set) for each of the local workers, with the number of a set of
 * activations: threads with sets of their own take whole groups, else workers take turns. */
void port_work(const struct port *p, void (*work)(void *context, struct worker *w, int set),
               void *context);
/* The same with pass(context, worker, set), which makes one of a worker's passes and returns whether there
 * are more. On a device each set takes whole groups, and sets take turns: they compute at once. */
void port_passes(const struct port *p, bool (*pass)(void *context, struct worker *w, int set),
                 void *context);

/* Call before the first step: replicas go out. */
void port_start(const struct port *p);
/* Call before a broadcast that overlaps with forward, or when the replica was overwritten: replicas come
 * in bucket by bucket, as forward needs them, or all at once by port_finish. */
void port_expect(struct port *p);
/* The broadcast has ended: what has not come in yet does. Returns 0, or -1 after reporting. */
int port_finish(struct port *p);
/* Values of all local workers go out. The broadcast has ended: all of all local workers comes in. */
void port_values_out(const struct port *p, enum array what, enum array_extent extent);
int port_replica_in(const struct port *p, enum array what);
/* Waits for the ranks that share a replica. Returns 0, or -1 after reporting. */
int port_wait(const struct port *p);

/* ---- port_staged.c: in place, and staged ---- */

extern const struct port_verbs port_in_place, port_staged;

struct range port_bucket(const struct port *p, int bucket);
/* Whether w is the first on this rank of those that share its vectors. */
bool port_is_first(const struct port *p, const struct worker *w);
/* Copies a bucket of w's gradient to where its rank gives it away. */
void port_copy_gradient(const struct port *p, const struct worker *w, int bucket);
/* Marks the copy of a bucket: it can be waited for, and with slots backward waits for its slot. */
void port_mark_gradient(const struct port *p, const struct worker *w, int bucket);
/* Copies a shard between the device and the network's copy: the average, the values, or values ahead. */
void port_copy_shard(const struct port *p, const struct worker *w, enum array what,
                     struct range shard, bool in);
/* Copies elements of the replica to where forward reads them, if they lie elsewhere. */
void port_read_replica(const struct port *p, const struct worker *w, struct range range);

/* ---- port_shared.c: ranks that share ---- */

/* Replaces verbs by those of ranks that share. */
int shared_open(struct port *p, const struct lossynet_world *world, double timeout);
void shared_close(struct port *p);
void shared_lend(const struct port *p, struct worker *w);
/* Registers what is in memory of the gradient that w sends (lossynet_register). */
bool shared_register(const struct port *p, const struct worker *w);
/* Where devices can read each other's memory, opens the gradients and replicas of the other members. */
int shared_connect(const struct port *p, struct worker *w);
/* Whether they read it. */
bool shared_reads_peers(const struct port *p);

#endif
