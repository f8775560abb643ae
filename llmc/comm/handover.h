/* handover.h — what ranks keep when other ranks die or join, and how it is distributed among the
 * new set of ranks.
 *
 * A run that may change its ranks (--meet) trains in one view after the other, each with a comm of
 * its own. When a view ends, every rank of it copies its state out of the comm (handover_take). In
 * the next view, every rank receives the state of the parameters that it owns from now on
 * (handover_give):
 *
 *     parameters that a surviving rank owned   keep that owner's values and moments
 *     parameters whose owner is gone           take the freshest copy that any rank has, packet by
 *                                              packet. The first moment starts at 0, so that these
 *                                              parameters begin with small steps. The second moment
 *                                              starts at its mean over the surviving part of the
 *                                              same tensor: one number for a block of parameters
 *                                              is as good as one for each (Adam-mini, Zhang et al.
 *                                              2024)
 *     residuals (--carry)                      are lost
 *
 * Then all replicas start as the model. Each element is sent once to its new owner and once to each
 * replica, in reliable messages.
 */
#ifndef LLMC_COMM_HANDOVER_H
#define LLMC_COMM_HANDOVER_H

#include "llmc/checkpoint/resume.h"
#include "llmc/comm/data_parallel.h"

struct handover_shard { /* of the ended view */
    struct range range; /* state: where its values start in `owned`, if the rank owned it */
    int owner;
    size_t packet; /* its first, among those of all shards */
};

enum { HANDOVER_OLDEST = 254, HANDOVER_NOTHING = 255 /* this rank has no copy */ };

struct handover {              /* all in the host's memory; zeros: this rank was in no view */
    int64_t epoch;             /* of the ended view */
    int workers, first, local; /* in that view */
    int shards;
    struct handover_shard *shard; /* [shards], in the order of elements */
    size_t packet_elements;
    uint8_t *age;  /* [packets], of the freshest copy here, in steps; at most OLDEST */
    float *params; /* [P]: the shards that the rank owned, and its freshest copies of the rest */
    /* The arrays that follow their elements to a new owner (memory/arrays.h), one after another: what
     * the rank's workers had, in order of workers and buckets. */
    float *owned;
    size_t elements; /* of each of these arrays */
};

enum { HANDOVER_STEPS = 3 }; /* the log of another rank may lack at most so many steps */

struct handover_place { /* how far a rank, or the run, has come */
    struct resume_point at;
    /* The metrics of the last steps, for the rank that writes the log. Step s is in place
     * s % HANDOVER_STEPS. tokens is 0 if a place is empty. */
    struct step_metrics last[HANDOVER_STEPS];
};

struct handover_report {
    int survivors, joined; /* ranks that were in the view before; ranks that were not */
    size_t adopted;        /* packets whose owner was gone */
    double mean_age;       /* of the adopted packets, in steps */
    int max_age;
};

/* Copies the state of this rank. Call it after the last call of the comm has returned or failed,
 * and before the comm is closed. `out` holds zeros or the result of an earlier call, which is
 * replaced. Returns 0, or -1 after reporting. */
int handover_take(const struct data_parallel *d, int64_t epoch, struct handover *out);
void handover_release(struct handover *h);

/* Distributes the state that ranks bring, in a new comm that has made no step: sets parameters and
 * moments of all local workers. *place: in, how far this rank had come; out, the farthest of all
 * ranks, from which the run goes on. If report->survivors is 0, no rank brought any state, and
 * nothing was done. Collective. Returns 0, or -1 after reporting. */
int handover_give(const struct handover *h, struct data_parallel *d, struct handover_place *place,
                  struct handover_report *report);

#endif
