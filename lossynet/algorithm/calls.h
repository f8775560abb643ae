/* calls.h — what public functions were given: see "Wrong calls" in lossynet.h. */
#ifndef LOSSYNET_ALGORITHM_CALLS_H
#define LOSSYNET_ALGORITHM_CALLS_H

#include "lossynet/algorithm/algorithm.h"

/* LN_EXPECT and LN_DEMAND of a comm that may be NULL. */
#define LN_NO_COMM "comm is NULL: expected one that lossynet_open has opened"
#define COMM_EXPECT(comm, ...)                                                                     \
    do {                                                                                           \
        LN_EXPECT(NULL, comm, LN_NO_COMM);                                                         \
        LN_EXPECT(&(comm)->resources.log, __VA_ARGS__);                                            \
    } while (0)
#define COMM_DEMAND(comm, ...)                                                                     \
    do {                                                                                           \
        LN_DEMAND(NULL, comm, LN_NO_COMM);                                                         \
        LN_DEMAND(&(comm)->resources.log, __VA_ARGS__);                                            \
    } while (0)
#define LN_NO_OUTPUT "expected memory for what is returned, got NULL"
#define LN_NO_BYTES "expected memory to give and memory to receive, got NULL"
#define LN_IN_RANGE(i, count) ((i) >= 0 && (i) < (count))
#define LN_NO_VECTORS "expected a vector for each worker of this rank, got NULL"
#define COMM_PHASE(phase) LN_IN_RANGE((int)(phase), 2), "phase %d: expected 0 or 1", (int)(phase)
#define COMM_BUCKET(comm, b)                                                                       \
    LN_IN_RANGE(b, (comm)->partition.buckets), "bucket %d: expected 0 to %d", b,                   \
        (comm)->partition.buckets - 1
#define COMM_WORKER(comm, w)                                                                       \
    LN_IN_RANGE(w, (comm)->workers.count), "worker %d: expected 0 to %d", w,                       \
        (comm)->workers.count - 1
#define COMM_LOCAL(comm, w)                                                                        \
    ln_is_local(comm, w), "worker %d: expected one of this rank, %d to %d", w,                     \
        (comm)->workers.first, (comm)->workers.first + (comm)->workers.local - 1

static inline bool ln_are_vectors(const struct lossynet_comm *comm, const float *const *vectors) {
    for (int v = 0; v < comm->workers.local; v++)
        if (!vectors || !vectors[v]) return false;
    return true;
}

/* Call it before vectors are read or written. Logs a line, which names the public function, if one is NULL, or
 * if they are bfloat16 and the program has not called lossynet_shards. The second also wants a step. */
lossynet_status ln_vectors_check(const struct lossynet_comm *comm, float *const *vectors,
                                 const char *function);
lossynet_status ln_phase_check(const struct lossynet_comm *comm, float *const *vectors,
                               const char *function);

#endif
