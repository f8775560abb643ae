/* group.h — workers that share a replica (--group G): their gradients are added up inside the
 * group, without loss, before packets are sent to other groups.
 *
 * The members' gradients are added in order of workers, so that the sum has the same bits wherever
 * the members run. Each member computes the gradient of 1/G of its loss, so the sum is the group's
 * mean. If G does not divide N, the last group has fewer members, and its G is their number.
 *
 *     a rank has whole groups     the first member computes into the group's vector, the others
 *                                 into separate ones; a finished bucket is added to the group's
 *     a rank has one member       the members' vectors, and one replica, lie in memory that the
 *                                 group's ranks share (on GPUs: the copies that the network reads).
 *                                 After backward each member adds up the shards of its partners
 *                                 (lossynet.h), which it sends or averages. GPUs read each other's
 *                                 gradients in place, if they can; otherwise they share the last
 *                                 buckets of each gradient in the host's memory. In both cases they
 *                                 add while backward goes on
 */
#ifndef LLMC_COMM_GROUP_H
#define LLMC_COMM_GROUP_H

#include "llmc/backend/backend.h"
#include "llmc/comm/shared_memory.h"
#include "llmc/memory/worker.h"
#include "llmc/model/param_layout.h"
#include "lossynet/lossynet.h"

#ifdef __cplusplus
extern "C" {
#endif

/* With slots, the host's memory has only the last buckets of a member's gradient (struct
 * gradient_place; none with `mapped`), and the sums that the member sends or averages: the vector
 * `sum` has addresses for P elements, but only these parts have pages. */
struct group_slots {
    int count; /* buckets of each gradient that are shared; 0: all */
    int added; /* buckets added so far in this step */
    bool failed;
    float *sum;
    size_t bytes; /* of the address range of `sum` */
    struct worker_part *part;
    int parts, pinned;
};

struct group_sum {
    float *ones;           /* [size], its weights */
    const float **members; /* [size], the vectors that are added */
};

/* Where each member's device reads what all members have. */
struct group_peers {
    bool mapped;                   /* it does: gradients and, with masters, replicas */
    const void **grads, **replica; /* [size], addresses for operations, or NULL */
};

struct group {
    /* The first worker of the first local worker's group, and the number of workers in that group,
     * which no other group of this rank exceeds; workers: N. */
    int first, size, workers;
    const struct backend *be;
    const struct param_layout *layout;
    struct lossynet_comm *comm; /* knows the owners; set by the caller before group_open */
    int pinned;                 /* number of members whose memory is pinned */
    /* Of activations: one for each thread that computes whole groups, or, on a device, for groups that
     * it computes at once (sets_begin). 1: workers take turns, and each uses all of the processor */
    int sets;
    float **apart; /* [sets], of P elements: gradients of members other than the first, or NULL */
    struct group_sum sum;
    struct shared_memory *host; /* of a rank with one member; else NULL */
    const struct placement *placement;
    bool early; /* lossynet_reduce_begin was called: a bucket is sent once it is added */
    struct group_peers peers;
    struct group_slots slots;
};

/* Opens the group. The caller has set first, size, workers, be, layout, comm, sets and placement.
 * local: workers of this rank. shares: --group; true also if the last group has only one worker.
 * timeout: seconds without a sign of life of another rank (--peer-timeout). Collective. Returns 0, or -1
 * after reporting; the caller closes it in both cases. */
int group_open(struct group *g, const struct lossynet_world *world, int local, bool shares,
               double timeout);
void group_close(struct group *g);

/* Sets the vectors that local worker i shares, which are the first member's or lie in memory that
 * ranks share. Also sets the worker's group. */
void group_share_vectors(const struct group *g, struct worker *worker, int i);

/* With `mapped`, opens the gradients and replicas of the other members. Call it when this worker's
 * are allocated. Collective. Returns 0, or -1 after reporting. */
int group_open_peers(struct group *g, const struct worker *w);

/* Calls work(context, worker, set) for each of the local workers, with the number of a set of
 * activations: threads with sets of their own take whole groups, else workers take turns. */
void group_work(const struct group *g, struct worker *worker, int local,
                void (*work)(void *context, struct worker *w, int set), void *context);

/* The same with pass(context, worker, set), which makes one of a worker's passes and returns whether there
 * are more. On a device each set takes whole groups, and sets take turns: they compute at once. */
void group_passes(const struct group *g, struct worker *worker, int local,
                  bool (*pass)(void *context, struct worker *w, int set), void *context);

/* Where to compute a member's gradient with a set of activations. */
struct gradient_place group_gradient(const struct group *g, const struct worker *w, int set);

/* Call when a bucket of that gradient is finished: adds it to the group's gradient. Returns whether
 * this bucket of the group's gradient is finished, because w is the last member on this rank. */
bool group_gradient_done(const struct group *g, const struct worker *w, int set, int bucket);

/* With slots, call when backward goes on and the copy of a bucket to the host has begun: waits for
 * the copies of all members, and adds up the part that this member sends or averages. So a member
 * is at most one bucket ahead of another, and copies into a slot after all have read it. Without
 * slots it does nothing. */
void group_add_bucket(struct group *g, const struct worker *w, int bucket);

/* Call after backward. On a rank with one member, waits for the others, and adds up the part that
 * this member sends or averages; on other ranks it does nothing. Returns 0, or -1 after
 * reporting. */
int group_average(struct group *g, const struct worker *w);

/* Call it if ranks share the copies that the network reads: moves the shards of w's partners between
 * these copies and the device (worker_move). ARRAY_RESIDUAL: adds the residual to the copies. */
void group_move_partners(const struct group *g, const struct worker *w, enum array to);

/* Call after members have written to the replica that their ranks share: waits for all of them.
 * Returns 0, or -1 after reporting. */
int group_wait(const struct group *g);

/* Copies parameters from the replica that the group's ranks share to w's device. With `mapped`, each
 * member copies a part from the host, and the other parts from the devices of the other members;
 * all members call it then. (No device changes its replica before all have read it: each waits for
 * all gradients of the group before it updates.) Returns 0, or -1 after reporting. */
int group_receive(const struct group *g, const struct worker *w, size_t offset, size_t count);

#ifdef __cplusplus
}
#endif
#endif
