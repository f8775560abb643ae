/* carry.c — what was lost of a gradient is late instead: its sender adds it to the next one.
 *
 * After a GRADIENT phase senders learn what arrived (masks.c). A sender keeps, as its residual, what
 * it sent in vain, and sends u = g + share * residual the next time: error feedback, as in compressed
 * gradient descent (Stich, Cordonnier & Jaggi 2018), where the compressor is the network.
 *
 * An owner knows the history of losses, and so how many gradients a packet holds, its mass: 1, and
 * 1 + share * (mass before) after a loss. It divides the sum by the mass that came, so that a mean
 * stays a mean however much is late (a sum divided by N would swell and shrink with the losses, by
 * sqrt(2p / (N (1-p))) of itself). With estimator `zero` it divides by N: then, with share 1, every
 * gradient counts 1/N in the end. Nothing more is sent than a bit per packet.
 *
 * Gradients late by a step serve as well as fresh ones where noise between batches outweighs what a
 * step changes, the long flat part of training; while a model moves fast they are wrong.
 */
#include "lossynet/engine.h"

#include <stdlib.h>

void lossynet_carry_open(struct lossynet *net) {
    size_t local = (size_t)net->local;
    NET_TAKE(net, net->carry.residual, local * net->layout.elements);
    NET_TAKE(net, net->carry.mass, lossynet_arrived_packets(net));
    NET_TAKE(net, net->carry.added, local);
    net->carry.share = 1;
}

void lossynet_carry_close(struct lossynet *net) {
    free(net->carry.residual);
    free(net->carry.mass);
    free(net->carry.added);
}

void lossynet_carry_share(struct lossynet *net, double share) {
    net->carry.share = (float)share;
}

/* Adds worker v's residual in buckets that are not sent yet, up to `bucket`. */
void lossynet_carry_add(struct lossynet *net, int v, float *vector, int bucket) {
    if (!net->carry.residual) return;
    const struct lossynet_layout *layout = &net->layout;
    const size_t *start = layout->shard_element;
    const size_t from = start[(size_t)net->carry.added[v] * net->workers];
    const size_t to = start[(size_t)(bucket + 1) * net->workers];
    const float *residual = net->carry.residual + (size_t)v * layout->elements;
    const float share = net->carry.share;
    for (size_t e = from; e < to; e++) vector[e] += share * residual[e];
    if (net->carry.added[v] <= bucket) net->carry.added[v] = bucket + 1;
}

void lossynet_carry_rest(struct lossynet *net, float *const *vectors) {
    if (!net->carry.residual) return;
#pragma omp parallel for num_threads(net->threads) schedule(static)
    for (int v = 0; v < net->local; v++)
        lossynet_carry_add(net, v, vectors[v], net->layout.buckets - 1);
}

/* What local worker v has sent in vain. */
static void keep(const struct lossynet *net, int v, const float *vector) {
    const struct lossynet_layout *layout = &net->layout;
    const uint8_t *bits = lossynet_delivered(net, net->first + v);
    float *residual = net->carry.residual + (size_t)v * layout->elements;
    for (int shard = 0; shard < layout->buckets * net->workers; shard++) {
        size_t first = layout->shard_packet[shard], offset, count;
        for (size_t p = first; p < layout->shard_packet[shard + 1]; p++) {
            lossynet_packet_span(layout, shard / net->workers, shard % net->workers, p - first,
                                 &offset, &count);
            if (bits[p / 8] >> p % 8 & 1)
                memset(residual + offset, 0, count * sizeof *residual);
            else
                memcpy(residual + offset, vector + offset, count * sizeof *residual);
        }
    }
}

void lossynet_carry_keep(struct lossynet *net, float *const *vectors) {
    const float share = net->carry.share;
    lossynet_round_others(net, vectors, true); /* what was sent, wherever the owner lives */
#pragma omp parallel for num_threads(net->threads) schedule(static)
    for (int v = 0; v < net->local; v++) {
        keep(net, v, vectors[v]);
        net->carry.added[v] = 0;
        size_t n = lossynet_layout_owner_packets(&net->layout, net->first + v);
        float *mass = lossynet_carry_mass(net, v);
        const uint8_t *arrived = lossynet_arrived(net, v, 0);
        for (size_t i = 0; i < n * (size_t)net->workers; i++)
            mass[i] = arrived[i] ? 0 : 1 + share * mass[i];
    }
}
