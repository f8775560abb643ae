/* error_feedback.c — what was lost of a gradient is late instead: its sender adds it to the next
 * one.
 *
 * After a GRADIENT phase senders learn what arrived (arrivals.c). A sender keeps, as its residual,
 * what it sent in vain, and sends u = g + share * residual the next time: error feedback, as in
 * compressed gradient descent (Stich, Cordonnier & Jaggi 2018), where the compressor is the
 * network.
 *
 * An owner knows the history of losses, and so how many gradients a packet holds, its mass: 1, and
 * 1 + share * (mass before) after a loss. It divides the sum by the mass that came, so that a mean
 * stays a mean however much is late (a sum divided by N would swell and shrink with the losses, by
 * sqrt(2p / (N (1-p))) of itself). With estimator `zero` it divides by N: then, with share 1, every
 * gradient counts 1/N in the end. Nothing more is sent than a bit per packet.
 *
 * What rounding in blocks takes away (elements.c) is carried as well, also of packets that arrive:
 * u - Q(u) is the residual of a packet that arrived, and u of one that did not. It is no gradient
 * that is late, and does not count in the mass.
 *
 * Gradients late by a step serve as well as fresh ones where noise between batches outweighs what a
 * step changes, the long flat part of training; while a model moves fast they are wrong.
 */
#include "lossynet/algorithm/algorithm.h"

#include <stdlib.h>

void lossynet_feedback_open(struct lossynet_comm *comm, const struct lossynet_residuals *apart) {
    size_t local = (size_t)comm->workers.local;
    if (apart)
        comm->feedback.apart = *apart;
    else
        COMM_TAKE(comm, comm->feedback.residual, local * comm->partition.elements);
    COMM_TAKE(comm, comm->feedback.mass, lossynet_links(comm, true));
    COMM_TAKE(comm, comm->feedback.added, local);
    COMM_TAKE(comm, comm->feedback.late, local);
    COMM_TAKE(comm, comm->feedback.alone, (size_t)comm->workers.count);
    comm->feedback.share = 1;
}

void lossynet_feedback_close(struct lossynet_comm *comm) {
    lossynet_unconfirmed_close(comm);
    free(comm->feedback.residual);
    free(comm->feedback.mass);
    free(comm->feedback.added);
    free(comm->feedback.late);
    free(comm->feedback.alone);
}

void lossynet_error_feedback_share(struct lossynet_comm *comm, double share) {
    comm->feedback.share = (float)share;
}

/* Adds worker v's residual in buckets that are not sent yet, up to `bucket`. */
void lossynet_feedback_add(struct lossynet_comm *comm, int v, float *vector, int bucket) {
    if (!comm->feedback.residual) return;
    const struct lossynet_partition *partition = &comm->partition;
    const float *residual = comm->feedback.residual + (size_t)v * partition->elements;
    const float share = comm->feedback.share;
    const int worker = comm->workers.first + v;
    const bool instead = comm->feedback.unconfirmed.on && !lossynet_has_gradient(comm, worker);
    for (int *b = &comm->feedback.added[v]; *b <= bucket; ++*b) {
        for (int owner = 0; owner < comm->workers.count; owner++) {
            size_t offset, count;
            if (!lossynet_is_partner(partition, worker, owner)) continue;
            lossynet_shard_span(partition, owner, *b, &offset, &count);
            if (instead) memcpy(vector + offset, residual + offset, count * sizeof *vector);
            for (size_t e = offset; !instead && e < offset + count; e++)
                vector[e] += share * residual[e];
        }
    }
}

void lossynet_feedback_rest(struct lossynet_comm *comm, float *const *vectors) {
    if (!comm->feedback.residual) return;
#pragma omp parallel for num_threads(comm->resources.threads) schedule(static)
    for (int v = 0; v < comm->workers.local; v++)
        lossynet_feedback_add(comm, v, vectors[v], comm->partition.buckets - 1);
}

void lossynet_feedback_save(const struct lossynet_comm *comm, int v, void *out) {
    const struct lossynet_residuals *apart = &comm->feedback.apart;
    const size_t n = comm->partition.elements;
    if (comm->feedback.residual)
        memcpy(out, comm->feedback.residual + (size_t)v * n, n * sizeof(float));
    else
        apart->save(apart->context, comm->workers.first + v, out);
}

void lossynet_feedback_load(struct lossynet_comm *comm, int v, const void *in) {
    const struct lossynet_residuals *apart = &comm->feedback.apart;
    const size_t n = comm->partition.elements;
    if (comm->feedback.residual)
        memcpy(comm->feedback.residual + (size_t)v * n, in, n * sizeof(float));
    else
        apart->load(apart->context, comm->workers.first + v, in);
    if (comm->feedback.unconfirmed.on) lossynet_unconfirmed_load(comm, v);
}

void lossynet_feedback_settle(bool has_error, bool arrived, float *residual, const float *sent,
                              size_t count) {
    if (arrived && !has_error)
        memset(residual, 0, count * sizeof *residual);
    else if (!arrived && !has_error)
        memcpy(residual, sent, count * sizeof *residual);
    for (size_t e = 0; !arrived && has_error && e < count; e++) residual[e] += sent[e];
}

/* The same as keep, where residuals are kept apart. */
static void keep_apart(const struct lossynet_comm *comm, int v) {
    const struct lossynet_partition *partition = &comm->partition;
    const struct lossynet_residuals *apart = &comm->feedback.apart;
    for (int owner = 0; owner < comm->workers.count; owner++) {
        size_t n, offset, count;
        const uint8_t *acked = comm->arrivals.acked[LOSSYNET_GRADIENT] +
                               lossynet_tx(comm, LOSSYNET_GRADIENT, v, owner, &n);
        for (int b = 0; n > 0 && b < partition->buckets; b++) {
            lossynet_shard_span(partition, owner, b, &offset, &count);
            if (count)
                apart->keep(apart->context, comm->workers.first + v, offset, count,
                            partition->packet_elements, acked);
            acked += lossynet_shard_packets(partition, b, owner);
        }
    }
}

/* What local worker v has sent in vain. */
static void keep(const struct lossynet_comm *comm, int v, const float *vector) {
    const struct lossynet_partition *partition = &comm->partition;
    if (!comm->feedback.residual) {
        keep_apart(comm, v);
        return;
    }
    float *residual = comm->feedback.residual + (size_t)v * partition->elements;
    const bool has_error = lossynet_feedback_error(comm, v) != NULL;
    for (int owner = 0; owner < comm->workers.count; owner++) {
        size_t n;
        const uint8_t *acked = comm->arrivals.acked[LOSSYNET_GRADIENT] +
                               lossynet_tx(comm, LOSSYNET_GRADIENT, v, owner, &n);
        for (int b = 0; n > 0 && b < partition->buckets; b++) {
            const size_t packets = lossynet_shard_packets(partition, b, owner);
            for (size_t k = 0; k < packets; k++) {
                size_t offset, count;
                lossynet_packet_span(partition, b, owner, k, &offset, &count);
                lossynet_feedback_settle(has_error, *acked++, residual + offset, vector + offset,
                                         count);
            }
        }
    }
}

/* Sum of the ages, each times the weight it is added with, of what a residual of this mass holds: a
 * gradient that was lost i times is i steps old and weighs share^i. */
static double late_by(double mass, double share) {
    double late = 0, weight = 1;
    for (int lost = 1; mass > weight / 2; lost++) {
        mass -= weight;
        weight *= share;
        late += lost * weight;
    }
    return late;
}

/* How late the gradients were that local owner v has averaged. Before the masses change. What comes
 * of a worker without a gradient in this step is a step older than what comes along with one. */
static struct lossynet_lateness measure_lateness(const struct lossynet_comm *comm, int v) {
    const struct lossynet_partition *partition = &comm->partition;
    const struct lossynet_groups *groups = &partition->groups;
    const int worker = comm->workers.first + v, *partner = lossynet_partners(partition, worker);
    const size_t n = lossynet_partition_owner_packets(partition, worker);
    const float *mass = lossynet_feedback_mass(comm, v);
    const uint8_t *arrived =
        comm->arrivals.arrived[LOSSYNET_GRADIENT] + comm->arrivals.own_start[v];
    const double share = (double)comm->feedback.share;
    const double own = groups->weight[groups->of[worker]];
    struct lossynet_lateness sum = {0};
    for (size_t k = 0; k < n; k++) {
        double gradients = 0, late = 0;
        for (int g = 0; g < groups->count; g++) {
            const size_t i = (size_t)partner[g] * n + k;
            if (!arrived[i]) continue;
            const double all = groups->weight[g] * (1 + share * (double)mass[i]);
            gradients += all;
            if (mass[i] > 0) late += groups->weight[g] * late_by((double)mass[i], share);
            if (comm->feedback.alone[partner[g]]) late += all;
        }
        if (gradients == 0) continue;
        sum.late += late / gradients;
        sum.others += 1 - (arrived[(size_t)worker * n + k] ? own : 0) / gradients;
    }
    return sum;
}

void lossynet_feedback_keep(struct lossynet_comm *comm, float *const *vectors) {
    const float share = comm->feedback.share;
    /* What was sent, wherever the owner lives. Where residuals are kept apart, keep rounds to bf16. */
    if (comm->feedback.residual || lossynet_has_blocks(&comm->partition))
        lossynet_round_others(comm, LOSSYNET_GRADIENT, vectors, true);
    lossynet_without_gradient(comm, comm->feedback.alone);
#pragma omp parallel for num_threads(comm->resources.threads) schedule(static)
    for (int v = 0; v < comm->workers.local; v++) {
        if (!comm->feedback.unconfirmed.on) keep(comm, v, vectors[v]);
        comm->feedback.added[v] = 0;
        comm->feedback.late[v] = measure_lateness(comm, v);
        /* Where acknowledgements come late, packets say it themselves (unconfirmed.c): then this
         * says which to ask for first (retransmit.c). */
        for (int s = 0; s < comm->workers.count; s++) {
            if (s == comm->workers.first + v) continue; /* its own is never lost */
            size_t n, start = lossynet_rx(comm, LOSSYNET_GRADIENT, v, s, &n);
            const uint8_t *arrived = comm->arrivals.arrived[LOSSYNET_GRADIENT] + start;
            float *mass = comm->feedback.mass + start;
            for (size_t k = 0; k < n; k++) mass[k] = arrived[k] ? 0 : 1 + share * mass[k];
        }
    }
    if (comm->feedback.unconfirmed.on) lossynet_unconfirmed_keep(comm, vectors);
}
