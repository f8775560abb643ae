/* repair.c — what was lost in a phase is sent again, a bounded number of times.
 *
 * A round: the receivers tell the senders what they ask for again (masks.c, reliably, one bit per
 * packet); it is sent once more, and may be lost again. With loss rate p and r rounds a packet stays
 * lost with p^(r+1): what is said elsewhere of p (estimators, ages, drift) holds with p^(r+1)
 * instead. The price is p + p^2 + ... + p^r of the phase's traffic and a round trip or two per
 * round, in which nothing is computed.
 *
 * A budget bounds the price: a worker asks for no more than that share of the packets that the phase
 * has for it. It then asks for what has been missing longest: of parameters the oldest; of gradients
 * those whose sender still holds most, where losses are carried (carry.c). Among equals it draws
 * lots, so that in the end no part of the model goes without. Ages have a shorter tail then than the
 * geometric one that expected drift is reckoned with.
 *
 * A round is a phase of its own on the wire (stream_send.c), of these packets alone, with the same
 * deadlines: nothing is waited for longer than in any other phase. Injected loss draws each round's
 * losses anew, as a function of (step, round), also for bursts and traces: a round comes a round
 * trip later, when a burst of packets is over. Outages of whole steps outlast it: in the model
 * "outage" a round brings nothing.
 */
#include "lossynet/engine.h"

#include <stdlib.h>
#include <string.h>

enum { AGES = 64 }; /* that are told apart: 0 ... 62, and more */

void lossynet_repair_open(struct lossynet *net) {
    size_t packets = 0;
    if (net->repair.rounds[LOSSYNET_GRADIENT]) packets = lossynet_arrived_packets(net);
    if (net->repair.rounds[LOSSYNET_PARAMETER] &&
        packets < (size_t)net->local * net->layout.packets)
        packets = (size_t)net->local * net->layout.packets;
    if (!packets) return;
    NET_TAKE(net, net->repair.asks, packets);
    NET_TAKE(net, net->repair.asked, (size_t)net->local);
}

void lossynet_repair_close(struct lossynet *net) {
    free(net->repair.asked);
    free(net->repair.asks);
}

/* ---- asking ---- */

struct wanted {             /* the packets of a phase that are for local worker v */
    size_t count, own;      /* all; those that it has from itself */
    const uint8_t *arrived; /* GRADIENT */
    const float *mass;      /* NULL: nothing is carried */
    const uint32_t *age;    /* PARAMETER */
    uint8_t *asks;
};

static struct wanted wanted_by(const struct lossynet *net, lossynet_phase phase, int v) {
    size_t own = lossynet_layout_owner_packets(&net->layout, net->first + v);
    if (phase == LOSSYNET_GRADIENT) {
        size_t start = net->arrived_start[v];
        return (struct wanted){.count = own * (size_t)net->workers,
                               .own = own,
                               .arrived = net->arrived + start,
                               .mass = lossynet_carry_mass(net, v),
                               .asks = net->repair.asks + start};
    }
    size_t start = (size_t)v * net->layout.packets;
    return (struct wanted){.count = net->layout.packets,
                           .own = own,
                           .age = net->age + start,
                           .asks = net->repair.asks + start};
}

/* For how many steps packet i has been missing, 0: it is there. */
static size_t missing_for(const struct wanted *w, size_t i) {
    size_t steps = w->age ? w->age[i] : w->arrived[i] ? 0 : 1 + (w->mass ? (size_t)w->mass[i] : 0);
    return steps < AGES ? steps : AGES - 1;
}

/* How many packets local worker v may still ask for. */
static size_t room(const struct lossynet *net, const struct wanted *w, int v) {
    if (net->repair.budget == 0) return SIZE_MAX;
    double most = net->repair.budget * (double)(w->count - w->own);
    return most > (double)net->repair.asked[v] ? (size_t)most - net->repair.asked[v] : 0;
}

static void ask(struct lossynet *net, lossynet_phase phase, int v) {
    const struct wanted w = wanted_by(net, phase, v);
    if (net->round == 1) net->repair.asked[v] = 0;
    size_t aged[AGES] = {0}, left = room(net, &w, v), cut = AGES - 1;
    for (size_t i = 0; i < w.count; i++) aged[missing_for(&w, i)]++;
    /* All that has been missing for longer than `cut`; of what has for so long, `left`. */
    for (; cut > 0 && aged[cut] <= left; cut--) left -= aged[cut];
    size_t among = cut > 0 ? aged[cut] : 0;
    uint64_t lot = lossynet_mix(net->loss.seed ^ (uint64_t)phase << 32 ^ (uint64_t)net->round);
    lot = lossynet_mix(lot ^ net->step);
    lot = lossynet_mix(lot ^ (uint64_t)(net->first + v));
    for (size_t i = 0; i < w.count; i++) {
        size_t steps = missing_for(&w, i);
        w.asks[i] = steps > cut;
        if (steps == cut && cut > 0) { /* each with left/among (Knuth's selection sampling) */
            w.asks[i] = lossynet_mix(lot + i) % among-- < left;
            left -= w.asks[i];
        }
        net->repair.asked[v] += w.asks[i];
    }
}

/* ---- sending ---- */

void lossynet_repair_mask(const struct lossynet *net, lossynet_phase phase, int sender,
                          int receiver, size_t n, uint8_t *mask) {
    struct lossynet_loss loss = net->loss;
    if (loss.model != LOSS_OUTAGE) loss.seed = lossynet_mix(loss.seed + (uint64_t)net->round);
    lossynet_loss_mask(&loss, phase, net->step, sender, receiver, n, NULL, mask);
    lossynet_masks_keep_missing(net, phase, sender, receiver, n, mask);
}

/* What the local sender v will send to the others. */
static void count_resent(struct lossynet *net, lossynet_phase phase, int v, uint8_t *resent) {
    const struct lossynet_layout *layout = &net->layout;
    struct lossynet_counters *counters = &net->counters[net->step % 2][v];
    for (int receiver = 0; receiver < net->workers; receiver++) {
        if (receiver == net->first + v) continue;
        int owner = phase == LOSSYNET_GRADIENT ? receiver : net->first + v;
        size_t n = lossynet_layout_owner_packets(layout, owner);
        memset(resent, 1, n);
        lossynet_masks_keep_missing(net, phase, net->first + v, receiver, n, resent);
        for (int b = 0; b < layout->buckets; b++) {
            const size_t *row = layout->owner_packet + (size_t)owner * (layout->buckets + 1) + b;
            for (size_t k = row[0]; k < row[1]; k++) {
                size_t offset, count;
                if (!resent[k]) continue;
                lossynet_packet_span(layout, b, owner, k - row[0], &offset, &count);
                counters->bytes[phase] += count * layout->element_bytes;
                counters->resent[phase]++;
            }
        }
    }
}

lossynet_status lossynet_repair_ask(struct lossynet *net, lossynet_phase phase) {
#pragma omp parallel for num_threads(net->threads) schedule(static)
    for (int v = 0; v < net->local; v++) ask(net, phase, v);
    lossynet_status status = lossynet_masks_return(net, phase);
    if (status) return status;
#pragma omp parallel for num_threads(net->threads) schedule(static)
    for (int v = 0; v < net->local; v++) count_resent(net, phase, v, lossynet_thread_mask(net));
    return LOSSYNET_OK;
}
