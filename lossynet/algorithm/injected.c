/* injected.c — decides by injected loss which packets of a phase or round arrive.
 */
#include "lossynet/algorithm/algorithm.h"

/* Which packets a sender of this rank sends again in this round and injected loss lets through. */
static void retransmitted(const struct lossynet_comm *comm, lossynet_phase phase, int sender,
                          int receiver, size_t n, uint8_t *mask) {
    const struct ln_way way = ln_way_of(comm, phase, sender, receiver);
    ln_way_mask(comm, phase, &way, sender, receiver, n, mask);
    const uint8_t *acked = comm->arrivals.acked[phase] +
                           ln_tx(comm, phase, sender - comm->workers.first, receiver, &n);
    for (size_t k = 0; k < n; k++) mask[k] &= !acked[k];
}

void ln_injected(const struct lossynet_comm *comm, lossynet_phase phase, int sender, int receiver,
                 size_t n, bool lossless, uint8_t *mask) {
    if (n == 0) return; /* no partner */
    if (lossless) {
        memset(mask, 1, n);
        return;
    }
    if (comm->steps.round > 0) {
        retransmitted(comm, phase, sender, receiver, n, mask);
        return;
    }
    uint64_t *chain = NULL; /* kept for links from local workers; saves computing (loss_model.c) */
    if (comm->arrivals.chain && ln_is_local(comm, sender))
        chain = comm->arrivals.chain +
                ((size_t)phase * comm->workers.local + sender - comm->workers.first) *
                    comm->workers.count +
                receiver;
    ln_names_mask(comm, &comm->loss, phase, sender, receiver, n, chain, mask);
}
