/* ways.c — by which way a lost packet is asked for again, where a link is down.
 *
 * A link that is down loses everything, and loses it again in a round of retransmission. So a link
 * that lost everything is not asked again. A round takes another way, the cheapest first:
 *
 *     another path     of the same link, if it has several (loss_model.c): one path in each round
 *     another worker   PARAMETER: a worker that has the owner's values sends them. Owners send the
 *                      same values to all, so it costs what sending again costs
 *     a relay          GRADIENT: the sender sends the packet to another worker, which sends it on.
 *                      The second hop is counted as traffic, and against the budget
 *
 * With its questions each receiver tells all workers which senders it has heard in the phase. So
 * all know which links are up, and choose the same worker: the first one, from a place on that
 * changes from link to link and step to step, that hears the sender and is heard by the receiver. If
 * there is none, nobody sends the packet: the sender's or the receiver's own way into the network
 * may be down, and no other worker can help there.
 *
 * This is about injected loss, which decides it as a function of (seed, step, round) alone, so that
 * a run has the same bits however its workers are spread over ranks. Where nothing is down nothing
 * changes. The packets that injected loss lets through travel directly. Over a network that really
 * fails the transport takes another way by itself (transport/peer/detour.c).
 */
#include "lossynet/algorithm/algorithm.h"

#include <math.h>

static const double ENOUGH =
    1 / 400.0; /* so few may stay lost while links are down; as in rounds.c */

struct ln_way ln_way_of(const struct lossynet_comm *comm, lossynet_phase phase, int sender,
                        int receiver) {
    const struct ln_loss *loss = &comm->loss;
    const uint64_t step = comm->steps.step;
    const int workers = comm->workers.count;
    if (!ln_loss_is_down(loss, phase, step, sender, receiver, 0)) return (struct ln_way){0, -1, 1};
    if (comm->steps.round < loss->paths) return (struct ln_way){comm->steps.round, -1, 1};
    const uint64_t first = (uint64_t)sender + (uint64_t)receiver + step;
    for (int i = 0; i < workers; i++) {
        const int by = (int)((first + (uint64_t)i) % (uint64_t)workers);
        if (by == sender || by == receiver) continue;
        if (phase == LOSSYNET_PARAMETER && !ln_is_link(comm, phase, sender, by)) continue;
        if (!ln_loss_is_down(loss, phase, step, sender, by, 0) &&
            !ln_loss_is_down(loss, phase, step, by, receiver, 0))
            return (struct ln_way){0, by, phase == LOSSYNET_GRADIENT ? 2 : 1};
    }
    return (struct ln_way){0, -1, 0};
}

/* Injected loss of the present round, drawn anew for each hop. Outages last for the whole step. */
static void draw(const struct lossynet_comm *comm, lossynet_phase phase, int hop, int sender,
                 int receiver, size_t n, uint8_t *mask) {
    struct ln_loss loss = comm->loss;
    if (loss.model != LOSS_OUTAGE)
        loss.seed = ln_mix(loss.seed + ((uint64_t)hop << 32) + (uint64_t)comm->steps.round);
    ln_names_mask(comm, &loss, phase, sender, receiver, n, NULL, mask);
}

void ln_way_first_hop(const struct lossynet_comm *comm, lossynet_phase phase,
                      const struct ln_way *way, int sender, size_t n, uint8_t *mask) {
    if (phase == LOSSYNET_GRADIENT)
        draw(comm, phase, 1, sender, way->by, n, mask);
    else /* what came when it was sent for the first time */
        ln_names_mask(comm, &comm->loss, phase, sender, way->by, n, NULL, mask);
}

void ln_way_mask(const struct lossynet_comm *comm, lossynet_phase phase, const struct ln_way *way,
                 int sender, int receiver, size_t n, uint8_t *mask) {
    if (way->hops == 0) {
        memset(mask, 0, n);
    } else if (way->by >= 0) {
        uint8_t *there = ln_scratch(comm) + comm->partition.largest_owner_packets;
        draw(comm, phase, 2, way->by, receiver, n, mask);
        ln_way_first_hop(comm, phase, way, sender, n, there);
        for (size_t k = 0; k < n; k++) mask[k] &= there[k];
    } else if (way->path > 0) {
        memset(mask,
               !ln_loss_is_down(&comm->loss, phase, comm->steps.step, sender, receiver, way->path),
               n);
    } else {
        draw(comm, phase, 0, sender, receiver, n, mask);
    }
}

/* ---- what is to be expected of outages ---- */

/* Rounds 1 ... paths - 1 take another path, and the next one goes by way of others. More rounds find
 * the same links down. */
void ln_ways_expect(const struct ln_loss *loss, int workers, lossynet_phase phase, int rounds,
                    double p, double budget, double *again, double *left) {
    const double both = (1 - p) * (1 - p); /* two hops are up */
    const double reached =
        loss->fate == FATE_LINK && workers > 2 ? 1 - pow(1 - both, workers - 2) : 0;
    *again = 0;
    *left = p;
    for (int r = 1; r <= rounds && r <= loss->paths; r++) {
        const bool others = r == loss->paths;
        const int hops = others && phase == LOSSYNET_GRADIENT ? 2 : 1;
        const double room = budget > 0 ? (budget - *again) / hops : INFINITY;
        const double sent = fmin(others ? *left * reached : *left, room);
        *again += sent * hops;
        *left -= others ? sent : sent * (1 - p);
    }
}

int ln_ways_rounds(const struct ln_loss *loss, int workers, lossynet_phase phase, double p,
                   double budget) {
    double again, left, next;
    for (int rounds = 0; rounds < LOSSYNET_ROUNDS_MOST; rounds++) {
        ln_ways_expect(loss, workers, phase, rounds, p, budget, &again, &left);
        ln_ways_expect(loss, workers, phase, rounds + 1, p, budget, &again, &next);
        if (left <= ENOUGH || next >= left) return rounds;
    }
    return LOSSYNET_ROUNDS_MOST;
}
