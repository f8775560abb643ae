/* owned.c — keeps owners' averages of gradients and values of parameters in separate float32
 * memory.
 *
 * Vectors of bfloat16 hold what packets carry in both phases, and cannot hold float32 values. Each
 * of N workers owns 1/N of the vector. So only this part exists in float32.
 */
#include "lossynet/algorithm/algorithm.h"

lossynet_status lossynet_owned_apart(struct lossynet_comm *comm, float *const *averages,
                                     const float *const *values) {
    if (!averages || !values) {
        lossynet_log("owned parts apart: expected memory for both averages and values");
        return LOSSYNET_INVALID;
    }
    if (comm->resources.memory.copy) {
        lossynet_log("owned parts apart: expected vectors in the host's memory");
        return LOSSYNET_INVALID;
    }
    comm->resources.owned = (struct lossynet_owned){averages, values};
    return LOSSYNET_OK;
}

lossynet_status lossynet_owned_check(const struct lossynet_comm *comm) {
    if (!comm->resources.bf16 || comm->resources.owned.values) return LOSSYNET_OK;
    lossynet_log("vectors of bf16: expected lossynet_owned_apart before the first phase");
    return LOSSYNET_INVALID;
}

const float *const *lossynet_sent_values(const struct lossynet_comm *comm) {
    return comm->lead.ahead ? comm->lead.ahead : comm->resources.owned.values;
}
