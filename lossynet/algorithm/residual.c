/* residual.c — what a residual keeps of a packet, with and without acknowledgements that come late
 * (error_feedback.c, unconfirmed.c).
 */
#include "lossynet/algorithm/algorithm.h"

uint64_t ln_residual_lots(const struct lossynet_comm *comm, int v) {
    const uint64_t key = ln_mix(comm->loss.seed ^ 0x6b656570u /* "keep" */);
    return ln_lots(ln_mix(key ^ (uint64_t)(comm->workers.first + v)), comm->feedback.step);
}

LN_VECTORIZED
void ln_residual_settle(bool has_error, bool arrived, uint16_t *residual, const float *sent,
                        size_t count, uint64_t lots, size_t offset) {
    if (arrived && !has_error) memset(residual, 0, count * sizeof *residual);
    for (size_t e = 0; !arrived && !has_error && e < count; e++)
        residual[e] = ln_bf16_keep_sum(sent[e], lots, offset + e);
    for (size_t e = 0; !arrived && has_error && e < count; e++)
        residual[e] = ln_bf16_keep_sum(ln_bf16_widen(residual[e]) + sent[e], lots, offset + e);
}
