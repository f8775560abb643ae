/* handover.h — what ranks keep when other ranks die or join, and how the new set of ranks deals it
 * out.
 *
 * A run that may change its ranks (--meet) trains in one view after the other, each with a comm of
 * its own. When a view ends, every rank that was in it takes what it has out of the comm
 * (handover_take). In the next view all ranks give each other what they own from now on
 * (handover_give):
 *
 *     of parameters that a surviving rank owned   its values and its moments, as they were
 *     of parameters whose owner is gone           the freshest copy that any rank has, packet by
 *                                                 packet. The first moment starts at 0, so that
 *                                                 these parameters begin with small steps, and the
 *                                                 second at the mean of what the others have in the
 *                                                 same tensor: one number for a block of parameters
 *                                                 does as well as one for each (Adam-mini, Zhang et
 *                                                 al. 2024)
 *     carried gradients (--carry)                 are lost
 *
 * Then all replicas start as the model. Each element travels once to its new owner and once to each
 * replica, by messages that arrive.
 */
#ifndef LLMC_COMM_HANDOVER_H
#define LLMC_COMM_HANDOVER_H

#include "llmc/checkpoint/resume.h"
#include "llmc/comm/data_parallel.h"

#ifdef __cplusplus
extern "C" {
#endif

struct handover_owner {     /* of one worker of the ended view, by this rank's replicas */
    size_t *offset, *count; /* [buckets]: its shards */
    size_t packets;         /* in all of them */
    uint8_t *age;           /* [packets], steps; at most HANDOVER_OLDEST */
};

enum { HANDOVER_OLDEST = 254, HANDOVER_NOTHING = 255 /* a rank that has no copy */ };

struct handover {              /* all in the host's memory; zeros: this rank was in no view */
    int64_t epoch;             /* of the view that it is of */
    int workers, first, local; /* in that view */
    int buckets;
    size_t packet_elements;
    struct handover_owner *owner; /* [workers] */
    float *params; /* [P]: what the rank owned, and its freshest copies of the rest */
    float *m, *v;  /* of what it owned, in order of workers and buckets */
};

enum { HANDOVER_STEPS = 3 }; /* by so many steps a log that another rank wrote may be behind */

struct handover_place { /* where a rank stands, and the run */
    struct resume_point at;
    /* Of the last steps, for whoever writes the log; of step s in place s % HANDOVER_STEPS. tokens
     * is 0 where there is none. */
    struct step_metrics last[HANDOVER_STEPS];
};

struct handover_report {
    int survivors, joined; /* ranks that were in the view before; that were not */
    size_t adopted;        /* packets whose owner was gone */
    double mean_age;       /* of these, in steps */
    int max_age;
};

/* Copies what the rank has, after the last call of the comm has returned or failed, and before it
 * is closed. `out` holds zeros, or what an earlier call left, which is replaced. Returns 0, or -1
 * after reporting. */
int handover_take(const struct data_parallel *d, int64_t epoch, struct handover *out);
void handover_release(struct handover *h);

/* Deals out what ranks bring, in a new comm that has made no step: parameters and moments of all
 * local workers are set. *place: in, where this rank stood; out, where the run goes on, which is the
 * farthest that any of them was. *report as above; survivors 0: no rank brought anything, and
 * nothing has happened. Collective. Returns 0, or -1 after reporting. */
int handover_give(const struct handover *h, struct data_parallel *d, struct handover_place *place,
                  struct handover_report *report);

#ifdef __cplusplus
}
#endif
#endif
