/* masks.c — arrival masks back to the senders: one bit per packet, reliably.
 *
 * GRADIENT: an owner knows which packets of each sender arrived. PARAMETER: a worker knows which
 * packets of each owner arrived. In a repair round the bits say which are not asked for again
 * (repair.c). Both are bits of (owner, worker, packet of the owner), kept twice, as the two phases
 * see them:
 *
 *     told[r]    of rank r's workers: for each of them, for each local owner, that owner's packets
 *     heard[r]   of rank r's owners: for each local worker, for each owner in r, that owner's packets
 *
 * After GRADIENT `told` leaves and `heard` comes, which is then put in order of packets for
 * lossynet_delivered; after PARAMETER `heard` leaves and `told` comes.
 */
#include "lossynet/engine.h"

#include <stdlib.h>
#include <string.h>

static size_t owner_bytes(const struct lossynet *net, int owner) {
    return (lossynet_layout_owner_packets(&net->layout, owner) + 7) / 8;
}

static size_t rank_bytes(const struct lossynet *net, int rank) {
    size_t bytes = 0;
    for (int v = 0; v < net->local; v++) bytes += owner_bytes(net, rank * net->local + v);
    return bytes;
}

size_t lossynet_delivered_bytes(const struct lossynet *net) {
    return (net->layout.packets + 7) / 8;
}

void lossynet_masks_open(struct lossynet *net, bool gradient, bool parameter) {
    struct lossynet_masks *masks = &net->masks_returned;
    size_t ranks = (size_t)net->world.ranks, told = 0, heard = 0;
    if (!gradient && !parameter) return;
    NET_TAKE(net, masks->told_start, ranks + 1);
    NET_TAKE(net, masks->heard_start, ranks + 1);
    for (int r = 0; r < net->world.ranks; r++) {
        told += (size_t)net->local * rank_bytes(net, net->world.rank);
        heard += (size_t)net->local * rank_bytes(net, r);
        if (!masks->heard_start) continue;
        masks->told_start[r + 1] = told;
        masks->heard_start[r + 1] = heard;
    }
    NET_TAKE(net, masks->told, told);
    NET_TAKE(net, masks->heard, heard);
    if (gradient)
        NET_TAKE(net, masks->delivered, (size_t)net->local * lossynet_delivered_bytes(net));
    if (parameter) NET_TAKE(net, masks->reached, lossynet_arrived_packets(net));
}

void lossynet_masks_close(struct lossynet *net) {
    free(net->masks_returned.reached);
    free(net->masks_returned.delivered);
    free(net->masks_returned.heard);
    free(net->masks_returned.told);
    free(net->masks_returned.heard_start);
    free(net->masks_returned.told_start);
}

/* ---- the two tables, and their bits ---- */

/* PARAMETER: packets of local owner v that reached `receiver`; as lossynet_arrived. */
static uint8_t *reached_by(const struct lossynet *net, int v, int receiver) {
    size_t n = lossynet_layout_owner_packets(&net->layout, net->first + v);
    return net->masks_returned.reached + net->arrived_start[v] + (size_t)receiver * n;
}

/* Into bits, of what local owners know of the workers in `rank`. */
static void write_told(const struct lossynet *net, int rank, uint8_t *to) {
    memset(to, 0, (size_t)net->local * rank_bytes(net, net->world.rank));
    for (int s = 0; s < net->local; s++) {
        for (int v = 0; v < net->local; v++) {
            const uint8_t *arrived = lossynet_arrived(net, v, rank * net->local + s);
            const uint8_t *asks =
                net->round > 0 ? net->repair.asks + (arrived - net->arrived) : NULL;
            size_t n = lossynet_layout_owner_packets(&net->layout, net->first + v);
            for (size_t k = 0; k < n; k++)
                to[k / 8] |= (uint8_t)((asks ? !asks[k] : arrived[k]) << k % 8);
            to += owner_bytes(net, net->first + v);
        }
    }
}

static void read_told(const struct lossynet *net, int rank, const uint8_t *from) {
    for (int s = 0; s < net->local; s++) {
        for (int v = 0; v < net->local; v++) {
            uint8_t *reached = reached_by(net, v, rank * net->local + s);
            size_t n = lossynet_layout_owner_packets(&net->layout, net->first + v);
            for (size_t k = 0; k < n; k++) reached[k] = from[k / 8] >> k % 8 & 1;
            from += owner_bytes(net, net->first + v);
        }
    }
}

/* Into bits, of what local workers have of the owners in `rank`. */
static void write_heard(const struct lossynet *net, int rank, uint8_t *to) {
    const struct lossynet_layout *layout = &net->layout;
    memset(to, 0, (size_t)net->local * rank_bytes(net, rank));
    for (int s = 0; s < net->local; s++) {
        const uint32_t *age = net->age + (size_t)s * layout->packets;
        const uint8_t *asks =
            net->round > 0 ? net->repair.asks + (size_t)s * layout->packets : NULL;
        for (int o = rank * net->local; o < (rank + 1) * net->local; o++) {
            const size_t *row = layout->owner_packet + (size_t)o * (layout->buckets + 1);
            for (int b = 0; b < layout->buckets; b++) {
                size_t at = layout->shard_packet[(size_t)b * layout->workers + o];
                for (size_t k = row[b]; k < row[b + 1]; k++, at++)
                    to[k / 8] |= (uint8_t)((asks ? !asks[at] : age[at] == 0) << k % 8);
            }
            to += owner_bytes(net, o);
        }
    }
}

/* One owner's packets, in order of (bucket, packet), into a worker's bits, in order of packets. */
static void place(const struct lossynet_layout *layout, int owner, const uint8_t *bits,
                  uint8_t *to) {
    const size_t *row = layout->owner_packet + (size_t)owner * (layout->buckets + 1);
    for (int b = 0; b < layout->buckets; b++) {
        size_t at = layout->shard_packet[(size_t)b * layout->workers + owner];
        for (size_t k = row[b]; k < row[b + 1]; k++, at++)
            to[at / 8] |= (uint8_t)((bits[k / 8] >> k % 8 & 1) << at % 8);
    }
}

static void read_heard(const struct lossynet *net, int rank, const uint8_t *from) {
    size_t bytes = lossynet_delivered_bytes(net);
    for (int s = 0; s < net->local; s++) {
        uint8_t *delivered = net->masks_returned.delivered + (size_t)s * bytes;
        for (int o = rank * net->local; o < (rank + 1) * net->local; o++) {
            place(&net->layout, o, from, delivered);
            from += owner_bytes(net, o);
        }
    }
}

/* ---- telling ---- */

lossynet_status lossynet_masks_return(struct lossynet *net, lossynet_phase phase) {
    struct lossynet_masks *masks = &net->masks_returned;
    const bool gradient = phase == LOSSYNET_GRADIENT;
    uint8_t *out = gradient ? masks->told : masks->heard;
    uint8_t *in = gradient ? masks->heard : masks->told;
    const size_t *out_start = gradient ? masks->told_start : masks->heard_start;
    const size_t *in_start = gradient ? masks->heard_start : masks->told_start;
    for (int r = 0; r < net->world.ranks; r++)
        (gradient ? write_told : write_heard)(net, r, out + out_start[r]);
    int own = net->world.rank;
    memcpy(in + in_start[own], out + out_start[own], out_start[own + 1] - out_start[own]);
    if (net->link) {
        lossynet_status status = lossynet_swap(net, out, out_start, in, in_start);
        if (status) return status;
    }
    if (gradient) memset(masks->delivered, 0, (size_t)net->local * lossynet_delivered_bytes(net));
    for (int r = 0; r < net->world.ranks; r++)
        (gradient ? read_heard : read_told)(net, r, in + in_start[r]);
    return LOSSYNET_OK;
}

void lossynet_masks_keep_missing(const struct lossynet *net, lossynet_phase phase, int sender,
                                 int receiver, size_t n, uint8_t *mask) {
    const struct lossynet_layout *layout = &net->layout;
    if (phase == LOSSYNET_PARAMETER) {
        const uint8_t *reached = reached_by(net, sender - net->first, receiver);
        for (size_t k = 0; k < n; k++) mask[k] &= !reached[k];
        return;
    }
    const uint8_t *bits = lossynet_delivered(net, sender);
    for (int b = 0; b < layout->buckets; b++) {
        const size_t *packet = layout->shard_packet + (size_t)b * layout->workers + receiver;
        for (size_t p = packet[0]; p < packet[1]; p++) *mask++ &= !(bits[p / 8] >> p % 8 & 1);
    }
}

const uint8_t *lossynet_delivered(const struct lossynet *net, int worker) {
    const uint8_t *bits = net->masks_returned.delivered;
    return bits ? bits + (size_t)(worker - net->first) * lossynet_delivered_bytes(net) : NULL;
}
