/* group.h — workers that share a replica (--group G): their gradients come together inside the
 * group, without loss, before packets leave for other groups.
 *
 * The members' gradients are added in order of workers, so that the sum has the same bits wherever
 * the members live. Each has computed its gradient of 1/G of its loss: the sum is the group's mean.
 * Where G does not divide N the last group is shorter, and G is there what that has.
 *
 *     a rank has whole groups     the first member computes into the group's vector, the others into
 *                                 vectors apart; a bucket is added when a member has finished it
 *     a rank has one member       the members' vectors, and one replica, lie in memory that the
 *                                 group's ranks share (on GPUs: the copies that the network reads);
 *                                 after backward each adds up what its partners own (lossynet.h),
 *                                 which is what it sends or averages. GPUs read each other's
 *                                 gradients where they are, if they can, and else share the last
 *                                 buckets of each in the host's memory; both are added up while
 *                                 backward goes on
 */
#ifndef LLMC_COMM_GROUP_H
#define LLMC_COMM_GROUP_H

#include "llmc/backend/backend.h"
#include "llmc/comm/shared_memory.h"
#include "llmc/comm/worker.h"
#include "llmc/model/param_layout.h"
#include "lossynet/lossynet.h"

#ifdef __cplusplus
extern "C" {
#endif

/* With slots, the host's memory has, of a member's gradient, the last buckets (struct gradient_place;
 * none with peers), and the sums that the member sends: of the vector `sum`, of P elements, only those
 * have pages. */
struct group_slots {
    int count; /* buckets that are shared of each gradient; 0: all */
    int added; /* buckets of this step, so far */
    bool failed;
    float *sum;
    size_t bytes; /* of its addresses */
    struct worker_part *part;
    int parts, pinned;
};

struct group {
    int first, size,
        workers; /* of the first local worker's group: its first worker, and how many it
                                 has, as many as any group here; N */
    const struct backend *be;
    const struct param_layout *layout;
    struct lossynet_comm *comm; /* says who owns what; set by the caller before group_average */
    bool shares;                /* --group: also where the last group has only one worker */
    bool training;
    int pinned;    /* so many members' memory is */
    int sets;      /* of activations, each of a thread that computes whole groups; 1: workers take
                                   turns, and each uses all threads */
    float **apart; /* [sets], of P elements; NULL: not needed */
    float *ones;   /* [size], the weights of a sum */
    const float **members;      /* [size], what is added */
    struct shared_memory *host; /* of a rank with one member; else NULL */
    bool staged;                /* vectors are on GPUs, and the network reads copies, */
    bool half;                  /* which are bfloat16 (worker.h) */
    bool rounds;                /* gradients are rounded on the device before they are added */
    bool early;         /* lossynet_reduce_begin was called: a bucket leaves when it is added */
    bool peers;         /* each member's device reads the gradients of all, in `peer` */
    const float **peer; /* [size], addresses for operations */
    struct group_slots slots;
};

/* Opens the group, of which first, size, workers, shares, be, layout, sets, staged, half, rounds
 * and slots.count are set. `local`: workers of this rank. Collective. Returns 0, or -1 after
 * reporting; the caller closes it in both cases. */
int group_open(struct group *g, const struct lossynet_world *world, int local, bool training);
void group_close(struct group *g);

/* Sets the vectors of local worker i that are not its own: the first member's, or those in memory
 * that ranks share; and says which group it is in. */
void group_share_vectors(const struct group *g, struct worker *worker, int i);

/* With peers, call when the worker of a rank with one member has its gradient: opens those of the
 * others. Collective. Returns 0, or -1 after reporting. */
int group_open_peers(struct group *g, const struct worker *w);

/* Where a member's gradient is computed, with a set of activations. */
struct gradient_place group_gradient(const struct group *g, const struct worker *w, int set);

/* Call when a bucket of that gradient is finished: adds it to the group's. Returns whether the
 * group's is finished there: w is the last member that this rank has. */
bool group_gradient_done(const struct group *g, const struct worker *w, int set, int bucket);

/* With slots, call when backward goes on after a bucket whose copy to the host was begun: waits for all
 * members' copies, and adds up what this member sends. So a member is at most one bucket ahead of
 * another, and copies into a slot after all have read it. Without slots it does nothing. */
void group_add_bucket(struct group *g, const struct worker *w, int bucket);

/* After backward of a rank with one member; else it does nothing: waits for the others, and adds up
 * what this member sends or averages. Returns 0, or -1 after reporting. */
int group_average(struct group *g, const struct worker *w);

/* After members have written to the replica that their ranks share: waits for the others. Returns
 * 0, or -1 after reporting. */
int group_wait(const struct group *g);

#ifdef __cplusplus
}
#endif
#endif
