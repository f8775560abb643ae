/* repair.c — what was lost in a phase is sent again, a bounded number of times.
 *
 * A round: the receivers' masks go back to the senders (masks.c, reliably, one bit per packet), who
 * send what is missing once more; it may be lost again. With loss rate p and r rounds a packet stays
 * lost with p^(r+1): what is said elsewhere of p (estimators, ages, drift) holds with p^(r+1)
 * instead. The price is p + p^2 + ... + p^r of the phase's traffic and a round trip or two per
 * round, in which nothing is computed.
 *
 * A round is a phase of its own on the wire (stream_send.c), of the missing packets alone, with the same
 * deadlines: nothing is waited for longer than in any other phase. Injected loss draws each round's
 * losses anew, as a function of (step, round), also for bursts and traces: a round comes a round
 * trip later, when a burst of packets is over. Outages of whole steps outlast it: in the model
 * "outage" a round brings nothing.
 */
#include "lossynet/engine.h"

#include <string.h>

void lossynet_repair_mask(const struct lossynet *net, lossynet_phase phase, int sender,
                          int receiver, size_t n, uint8_t *mask) {
    struct lossynet_loss loss = net->loss;
    if (loss.model != LOSS_OUTAGE) loss.seed = lossynet_mix(loss.seed + (uint64_t)net->round);
    lossynet_loss_mask(&loss, phase, net->step, sender, receiver, n, NULL, mask);
    lossynet_masks_keep_missing(net, phase, sender, receiver, n, mask);
}

/* What the local sender v will send to the others. */
static void count_missing(struct lossynet *net, lossynet_phase phase, int v, uint8_t *missing) {
    const struct lossynet_layout *layout = &net->layout;
    struct lossynet_counters *counters = &net->counters[net->step % 2][v];
    for (int receiver = 0; receiver < net->workers; receiver++) {
        if (receiver == net->first + v) continue;
        int owner = phase == LOSSYNET_GRADIENT ? receiver : net->first + v;
        size_t n = lossynet_layout_owner_packets(layout, owner);
        memset(missing, 1, n);
        lossynet_masks_keep_missing(net, phase, net->first + v, receiver, n, missing);
        for (int b = 0; b < layout->buckets; b++) {
            const size_t *row = layout->owner_packet + (size_t)owner * (layout->buckets + 1) + b;
            for (size_t k = row[0]; k < row[1]; k++) {
                size_t offset, count;
                if (!missing[k]) continue;
                lossynet_packet_span(layout, b, owner, k - row[0], &offset, &count);
                counters->bytes[phase] += count * sizeof(float);
                counters->resent[phase]++;
            }
        }
    }
}

lossynet_status lossynet_repair_ask(struct lossynet *net, lossynet_phase phase) {
    lossynet_status status = lossynet_masks_return(net, phase);
    if (status) return status;
#pragma omp parallel for num_threads(net->threads) schedule(static)
    for (int v = 0; v < net->local; v++) count_missing(net, phase, v, lossynet_thread_mask(net));
    return LOSSYNET_OK;
}
