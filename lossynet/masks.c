/* masks.c — arrival masks of the GRADIENT phase back to the senders: one bit per packet, reliably.
 *
 * An owner knows which packets of each sender arrived. What it owns is cut in bits, owner by owner:
 *
 *     told[r]    to rank r: for each of its workers, for each local owner, that owner's packets
 *     heard[r]   from rank r: for each local worker, for each owner in r, that owner's packets
 *
 * and then put in order of packets for lossynet_delivered.
 */
#include "lossynet/engine.h"

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

void lossynet_masks_open(struct lossynet *net) {
    struct lossynet_masks *masks = &net->masks_returned;
    size_t ranks = (size_t)net->world.ranks, told = 0, heard = 0;
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
    NET_TAKE(net, masks->delivered, (size_t)net->local * lossynet_delivered_bytes(net));
}

/* What local owners know of the senders in rank r. */
static void write_told(const struct lossynet *net, int rank, uint8_t *to) {
    memset(to, 0, (size_t)net->local * rank_bytes(net, net->world.rank));
    for (int s = 0; s < net->local; s++) {
        for (int v = 0; v < net->local; v++) {
            const uint8_t *arrived = lossynet_arrived(net, v, rank * net->local + s);
            size_t n = lossynet_layout_owner_packets(&net->layout, net->first + v);
            for (size_t k = 0; k < n; k++) to[k / 8] |= (uint8_t)(arrived[k] << k % 8);
            to += owner_bytes(net, net->first + v);
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

lossynet_status lossynet_masks_return(struct lossynet *net) {
    struct lossynet_masks *masks = &net->masks_returned;
    if (!masks->delivered) return LOSSYNET_OK;
    for (int r = 0; r < net->world.ranks; r++)
        write_told(net, r, masks->told + masks->told_start[r]);
    int own = net->world.rank;
    memcpy(masks->heard + masks->heard_start[own], masks->told + masks->told_start[own],
           masks->told_start[own + 1] - masks->told_start[own]);
    if (net->link) {
        lossynet_status status =
            lossynet_swap(net, masks->told, masks->told_start, masks->heard, masks->heard_start);
        if (status) return status;
    }
    size_t bytes = lossynet_delivered_bytes(net);
    memset(masks->delivered, 0, (size_t)net->local * bytes);
    for (int r = 0; r < net->world.ranks; r++) {
        const uint8_t *from = masks->heard + masks->heard_start[r];
        for (int s = 0; s < net->local; s++) {
            for (int o = r * net->local; o < (r + 1) * net->local; o++) {
                place(&net->layout, o, from, masks->delivered + (size_t)s * bytes);
                from += owner_bytes(net, o);
            }
        }
    }
    return LOSSYNET_OK;
}

const uint8_t *lossynet_delivered(const struct lossynet *net, int worker) {
    const uint8_t *bits = net->masks_returned.delivered;
    return bits ? bits + (size_t)(worker - net->first) * lossynet_delivered_bytes(net) : NULL;
}
