/* calls.c — what public functions were given; see "Wrong calls" in lossynet.h. */
#include "lossynet/algorithm/calls.h"

lossynet_status ln_vectors_check(const struct lossynet_comm *comm, float *const *vectors,
                                 const char *function) {
    const bool right = comm && ln_are_vectors(comm, (const float *const *)vectors);
    if (!right)
        return ln_call_wrong(comm ? &comm->resources.log : NULL, false, function, "%s",
                             comm ? LN_NO_VECTORS : LN_NO_COMM);
    if (!comm->resources.bf16 || comm->resources.shard) return LOSSYNET_OK;
    return ln_fail_at(&comm->resources.log, LOSSYNET_INVALID,
                      "vectors of bf16: expected lossynet_shards before the first phase");
}

lossynet_status ln_phase_check(const struct lossynet_comm *comm, float *const *vectors,
                               const char *function) {
    const lossynet_status status = ln_vectors_check(comm, vectors, function);
    if (status || comm->stats.step[comm->steps.current] != LN_NO_STEP) return status;
    return ln_call_wrong(&comm->resources.log, false, function,
                         "expected lossynet_step_begin before it");
}
