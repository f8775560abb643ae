/* gradient.c — the GRADIENT phase: every worker sends its vector to the owners, and each owner
 * estimates the average of its shards from the packets that arrived.
 *
 *     1. masks      for links within this rank injected loss decides; nothing is copied
 *     2. exchange   packets from other ranks go into the inbox and set their masks (exchange.c);
 *                   lost packets may be sent again (retransmit.c)
 *     3. reduce     for each (owner, bucket): a weight per packet and sender, then one weighted sum
 *                   that reads local vectors and the inbox in place, in order of workers
 *
 * The weights are the estimators of lossynet.h. Let q = 1 - p and let |S| be binomial(N-1, q):
 *
 *     mean      w = 1/(1+|S|) for the owner and the senders in S.        E[w_o] = (1-p^N)/(N q)
 *     balanced  w_o = 1/N, w_i = (N-1)/(N |S|); w_o = 1 when S is empty.
 *               E[w_o] = 1/N + (N-1)/N p^(N-1), and by symmetry E[w_i] = (1 - E[w_o])/(N-1)
 *     zero      w = 1/N: E[w_i] = q/N
 *
 * With groups of workers, N is the number of groups, and g_i is a group's mean.
 *
 * p is the same for all senders. If links lose unequally (loss_model.c, `at`), no estimator corrects
 * for it. A sender's share of the average then depends on how many of its packets arrive, compared
 * with the others. If a link is always down, its sender does not count at that owner.
 *
 * Each weight is one correctly rounded division, or equals one. So all give exactly
 * (float)(1.0/N) when nothing was lost, and a run at loss rate 0 has the same bits as a reliable
 * one.
 */
#include "lossynet/algorithm/calls.h"

#include <omp.h>
#include <string.h>

/* ---- the sum ---- */

/* The weighted sum of sender[i], or if sender is NULL of sender_bf16[i]. */
static LN_INLINE void weighted_sum(float *out, const float *const *sender,
                                   const uint16_t *const *sender_bf16, const float *weight,
                                   int senders, size_t n, size_t packet) {
    enum { BLOCK = 1024 }; /* the running sum stays in the first-level cache */
    float sum[BLOCK];
    size_t start = 0;
    while (start < n) {
        size_t k = start / packet, end = start + BLOCK;
        if (end > (k + 1) * packet) end = (k + 1) * packet;
        if (end > n) end = n;
        memset(sum, 0, sizeof sum);
        for (int i = 0; i < senders; i++) {
            float w = weight[k * (size_t)senders + i];
            if (w == 0) continue;
            if (sender) {
                const float *x = sender[i] + start;
                for (size_t j = 0; j < end - start; j++) sum[j] += w * x[j];
            } else {
                const uint16_t *x = sender_bf16[i] + start;
                for (size_t j = 0; j < end - start; j++) sum[j] += w * ln_bf16_widen(x[j]);
            }
        }
        memcpy(out + start, sum, (end - start) * sizeof *out);
        start = end;
    }
}

LN_VECTORIZED
void ln_weighted_sum_plain(float *out, const float *const *sender, const float *weight, int senders,
                           size_t n, size_t packet) {
    weighted_sum(out, sender, NULL, weight, senders, n, packet);
}

LN_VECTORIZED
void ln_weighted_sum_bf16_plain(float *out, const uint16_t *const *sender, const float *weight,
                                int senders, size_t n, size_t packet) {
    weighted_sum(out, NULL, sender, weight, senders, n, packet);
}

/* ---- weights ---- */

struct weights { /* of the owner's group, of another group */
    double own, other;
};

struct came {   /* what arrived of a packet */
    bool own;   /* the owner has a gradient itself */
    int others; /* number of other groups whose packet arrived */
};

static struct weights estimate(lossynet_estimator estimator, int groups, const struct came *came) {
    const double n = groups, all = came->own + came->others;
    struct weights w = {1.0 / n, 1.0 / n};
    switch (estimator) {
    case LOSSYNET_MEAN:
        w.own = w.other = 1.0 / all;
        break;
    case LOSSYNET_BALANCED:
        if (!came->own)
            w.other = 1.0 / all;
        else if (came->others == 0)
            w.own = 1.0 / all;
        else
            w.other = (n - 1.0) / (n * came->others);
        break;
    case LOSSYNET_ZERO:
        break;
    }
    return w;
}

/* With error feedback (error_feedback.c): 1 / (weighted number of gradients that arrived in one
 * packet of all senders). */
static double weight_of_mass(const struct lossynet_comm *comm, int owner, const uint8_t *arrived,
                             const float *mass, size_t stride) {
    double sum = 0;
    for (int g = 0; g < comm->partition.groups.count; g++) {
        const size_t s = (size_t)ln_partner(&comm->partition, owner, g) * stride;
        if (arrived[s]) sum += 1 + (double)comm->feedback.share * (double)mass[s];
    }
    return 1 / sum;
}

/* Fills weight[k * groups + g] for `count` packets of the owner. Sender s has its masks at arrived
 * + s * stride, and its masses at mass + s * stride; mass is NULL without error feedback. */
static void fill_weights(const struct lossynet_comm *comm, int owner, const uint8_t *arrived,
                         const float *mass, size_t stride, size_t count, float *weight) {
    const int groups = comm->partition.groups.count, home = owner / comm->partition.groups.size;
    for (size_t k = 0; k < count; k++, weight += groups) {
        struct came came = {.own = arrived[(size_t)owner * stride + k]};
        for (int g = 0; g < groups; g++) {
            const size_t partner = (size_t)ln_partner(&comm->partition, owner, g);
            weight[g] = arrived[partner * stride + k] ? 1 : 0;
            came.others += g != home && weight[g] > 0;
        }
        struct weights w = estimate(comm->averaging.estimator, groups, &came);
        if (mass && comm->averaging.estimator == LOSSYNET_MEAN)
            w.own = w.other = weight_of_mass(comm, owner, arrived + k, mass + k, stride);
        for (int g = 0; g < groups; g++)
            if (weight[g] > 0) weight[g] = (float)(g == home ? w.own : w.other);
    }
}

/* ---- one shard ---- */

/* Averages one of `parts` parts of a shard. */
static void reduce_shard(const struct lossynet_comm *comm, float *const *vectors, int v, int bucket,
                         int part, int parts, float *weight, union ln_senders sender) {
    const struct ln_partition *partition = &comm->partition;
    int owner = comm->workers.first + v;
    size_t row = (size_t)owner * (partition->buckets + 1) + bucket;
    size_t all = partition->owner_packet[row + 1] - partition->owner_packet[row];
    size_t from = all * (size_t)part / (size_t)parts, to = all * (size_t)(part + 1) / (size_t)parts;
    if (from == to) return;

    size_t offset, count, skip = from * partition->packet_elements;
    ln_shard_span(partition, owner, bucket, &offset, &count);
    const int groups = partition->groups.count;
    for (int g = 0; g < groups; g++) {
        const int s = ln_partner(partition, owner, g);
        const void *elements =
            ln_is_local(comm, s) ? ln_element(comm, vectors[s - comm->workers.first], offset + skip)
                                 : ln_inbox(comm, v, s, partition->owner_element[row] + skip);
        if (comm->resources.bf16)
            sender.bf16[g] = (const uint16_t *)elements;
        else
            sender.float32[g] = (const float *)elements;
    }
    const size_t n = ln_partition_owner_packets(partition, owner), /* packets of a link */
        at = partition->owner_packet[row] + from;
    const uint8_t *arrived =
        comm->arrivals.arrived[LOSSYNET_GRADIENT] + comm->arrivals.own_start[v];
    const float *mass = ln_feedback_mass(comm, v);
    fill_weights(comm, owner, arrived + at, mass ? mass + at : NULL, n, to - from, weight);
    if (to < all) count = to * partition->packet_elements;
    float *out = ln_shard_of(comm, vectors[v], v, bucket).average;
    if (comm->resources.bf16)
        comm->averaging.weighted_sum_bf16(out + skip, sender.bf16, weight, groups, count - skip,
                                          partition->packet_elements);
    else
        comm->averaging.weighted_sum(out + skip, sender.float32, weight, groups, count - skip,
                                     partition->packet_elements);
}

/* ---- the phase ---- */

/* Fills the masks of links within the rank. A worker's own packets arrive, and injected loss
 * decides for the others. A round of retransmission adds to what has arrived. Masks of links from
 * other ranks were cleared when the phase opened. */
static void fill_masks(const struct lossynet_comm *comm, bool lossless) {
    const bool first = comm->steps.round == 0;
#pragma omp parallel for collapse(2) num_threads(ln_threads_for_marks(comm)) schedule(static)
    for (int v = 0; v < comm->workers.local; v++) {
        for (int i = 0; i < comm->workers.local; i++) {
            int owner = comm->workers.first + v, s = comm->workers.first + i;
            size_t n;
            uint8_t *arrived = ln_arrived(comm, LOSSYNET_GRADIENT, v, s, &n);
            uint8_t *mask = first ? arrived : ln_scratch(comm);
            ln_injected(comm, LOSSYNET_GRADIENT, s, owner, n, s == owner || lossless, mask);
            const bool counts = comm->feedback.unconfirmed.on && s != owner;
            ln_withhold(comm, i, owner, n, mask);
            size_t all, packet = ln_tx(comm, LOSSYNET_GRADIENT, i, owner, &all);
            float *mass =
                counts ? comm->feedback.mass + (arrived - comm->arrivals.arrived[0]) : NULL;
            for (size_t k = 0; counts && k < n; k++)
                mass[k] = ln_unconfirmed_mass(comm, ln_unconfirmed_gradients(comm, i, packet + k));
            for (size_t k = 0; !first && k < n; k++) arrived[k] |= mask[k];
        }
    }
}

static lossynet_status begin(struct lossynet_comm *comm, float *const *vectors, bool lossless) {
    lossynet_status status = ln_acknowledge_settle(comm);
    if (status) return status;
    if (comm->transport) ln_exchange_send(comm, LOSSYNET_GRADIENT, vectors, lossless);
    comm->steps.reducing = true;
    comm->averaging.vectors = vectors;
    comm->averaging.lossless = lossless;
    comm->averaging.done = 0;
    return LOSSYNET_OK;
}

lossynet_status lossynet_reduce_begin(struct lossynet_comm *comm, float *const *vectors,
                                      bool lossless) {
    lossynet_status status = ln_phase_check(comm, vectors, __func__);
    if (status) return status;
    COMM_EXPECT(comm, !comm->steps.reducing, "called twice: expected lossynet_reduce between");
    return begin(comm, vectors, lossless);
}

/* Whether a call has the arguments of lossynet_reduce_begin. */
static bool goes_on(const struct lossynet_comm *comm, float *const *vectors, bool lossless) {
    const struct ln_averaging *begun = &comm->averaging;
    return lossless == begun->lossless &&
           !memcmp(vectors, begun->vectors, (size_t)comm->workers.local * sizeof *vectors);
}

#define GOES_ON                                                                                    \
    goes_on(comm, vectors, lossless),                                                              \
        "other vectors or another `lossless` than in lossynet_reduce_begin: expected the same"

lossynet_status lossynet_bucket_ready(struct lossynet_comm *comm, int worker, int bucket) {
    COMM_EXPECT(comm, comm->steps.reducing, "expected lossynet_reduce_begin before it");
    COMM_EXPECT(comm, COMM_LOCAL(comm, worker));
    COMM_EXPECT(comm, COMM_BUCKET(comm, bucket));
    if (!comm->transport) return LOSSYNET_OK;
    const int v = worker - comm->workers.first, next = ln_exchange_next(comm, v);
    COMM_EXPECT(comm, bucket == next, "bucket %d of worker %d: expected bucket %d: ascending order",
                bucket, worker, next);
    ln_feedback_add(comm, v, comm->averaging.vectors[v], bucket);
    ln_rule_send(comm, v, comm->averaging.vectors[v], bucket);
    ln_exchange_ready(comm, LOSSYNET_GRADIENT, v, bucket + 1);
    return LOSSYNET_OK;
}

/* Counts the packets when the phase is over. */
static void account(struct lossynet_comm *comm) {
#pragma omp parallel for num_threads(ln_threads_for_marks(comm)) schedule(static)
    for (int v = 0; v < comm->workers.local; v++) ln_arrivals_count(comm, LOSSYNET_GRADIENT, v);
}

/* Averages all shards in vectors that the host cannot access. */
static void estimate_there(struct lossynet_comm *comm, float *const *vectors) {
    const struct ln_partition *partition = &comm->partition;
    const struct lossynet_memory *memory = &comm->resources.memory;
#pragma omp parallel for num_threads(ln_threads_for_marks(comm)) schedule(static)
    for (int owner = 0; owner < comm->workers.count; owner++) { /* all are local */
        const size_t n = ln_partition_owner_packets(partition, owner);
        fill_weights(comm, owner,
                     comm->arrivals.arrived[LOSSYNET_GRADIENT] + comm->arrivals.own_start[owner],
                     ln_feedback_mass(comm, owner), n, n,
                     comm->averaging.weights +
                         partition->owner_start[owner] * (size_t)partition->groups.count);
    }
    memory->average(memory->context, vectors, comm->averaging.weights);
}

/* Averages buckets first ... last. No more of their packets can come. */
static void estimate_shards(struct lossynet_comm *comm, float *const *vectors, int first, int last,
                            int parts) {
    const struct ln_partition *partition = &comm->partition;
    if (comm->resources.memory.average) {
        estimate_there(comm, vectors);
        return;
    }
    if (comm->averaging.rule.functions.average) {
        for (int b = first; b <= last; b++)
            for (int v = 0; v < comm->workers.local; v++) ln_rule_average(comm, vectors, v, b);
        return;
    }
#pragma omp parallel num_threads(comm->resources.threads)
    {
        size_t thread = (size_t)omp_get_thread_num();
        const size_t groups = (size_t)partition->groups.count;
        float *weight =
            comm->averaging.weights + thread * partition->largest_shard_packets * groups;
        union ln_senders sender = comm->averaging.senders;
        if (comm->resources.bf16)
            sender.bf16 += thread * groups;
        else
            sender.float32 += thread * groups;
#pragma omp for collapse(3) schedule(dynamic)
        for (int v = 0; v < comm->workers.local; v++)
            for (int b = first; b <= last; b++)
                for (int part = 0; part < parts; part++)
                    reduce_shard(comm, vectors, v, b, part, parts, weight, sender);
    }
}

static void estimate_bucket(struct lossynet_comm *comm, float *const *vectors, int bucket) {
    int parts = comm->averaging.whole
                    ? 1
                    : (comm->resources.threads + comm->workers.local - 1) / comm->workers.local;
    estimate_shards(comm, vectors, bucket, bucket, parts);
    comm->averaging.done = bucket + 1;
}

/* Averages each bucket as soon as no more of its packets can come, while later buckets are on their
 * way. */
static lossynet_status estimate_arriving(struct lossynet_comm *comm, float *const *vectors) {
    while (comm->averaging.done < comm->partition.buckets) {
        lossynet_status status =
            ln_transport_wait_bucket(comm->transport, LOSSYNET_GRADIENT, comm->averaging.done);
        if (status) return status;
        estimate_bucket(comm, vectors, comm->averaging.done);
    }
    return LOSSYNET_OK;
}

/* Whether buckets may be averaged before the phase is over. Packets that are sent again come after
 * all others. */
static bool averages_early(const struct lossynet_comm *comm, bool lossless) {
    return comm->transport && (lossless || ln_retransmission_rounds(comm, LOSSYNET_GRADIENT) == 0);
}

bool lossynet_reduce_arrived(struct lossynet_comm *comm, float *const *vectors, bool lossless,
                             int bucket) {
    COMM_DEMAND(comm, COMM_BUCKET(comm, bucket));
    COMM_DEMAND(comm, comm->steps.reducing, "expected lossynet_reduce_begin before it");
    COMM_DEMAND(comm, ln_are_vectors(comm, (const float *const *)vectors), LN_NO_VECTORS);
    COMM_DEMAND(comm, GOES_ON);
    if (!averages_early(comm, lossless) || comm->steps.skips) return false;
    /* Workers of this rank read each other's vectors. These are rounded only in lossynet_reduce. */
    if (ln_rounds_vectors(comm) && comm->workers.local > 1) return false;
    if (bucket != comm->averaging.done) return bucket < comm->averaging.done;
    if (!ln_exchange_is_ready(comm, LOSSYNET_GRADIENT, bucket + 1)) return false;
    if (!ln_transport_close_bucket(comm->transport, LOSSYNET_GRADIENT, bucket)) return false;
    if (bucket == 0) fill_masks(comm, lossless);
    estimate_bucket(comm, vectors, bucket);
    return true;
}

/* Makes the rounds of retransmission. */
static lossynet_status retransmit(struct lossynet_comm *comm, float *const *vectors,
                                  bool lossless) {
    lossynet_status status = LOSSYNET_OK;
    int rounds = lossless ? 0 : ln_retransmission_rounds(comm, LOSSYNET_GRADIENT);
    ln_rounds_count(comm, LOSSYNET_GRADIENT);
    for (comm->steps.round = 1; comm->steps.round <= rounds && !status; comm->steps.round++) {
        status = ln_retransmission_ask(comm, LOSSYNET_GRADIENT);
        if (status) break;
        fill_masks(comm, false);
        if (!comm->transport) continue;
        ln_transport_receive_begin(comm->transport, LOSSYNET_GRADIENT);
        ln_exchange_send(comm, LOSSYNET_GRADIENT, vectors, false);
        ln_exchange_ready_all(comm, LOSSYNET_GRADIENT);
        status = ln_transport_end(comm->transport, LOSSYNET_GRADIENT);
    }
    comm->steps.round = 0;
    return status;
}

/* With one worker the average is its own vector. It is copied only to memory apart (lossynet_shards). */
static lossynet_status average_alone(struct lossynet_comm *comm, float *const *vectors) {
    if (!comm->resources.shard) return LOSSYNET_OK;
    fill_masks(comm, true);
    estimate_shards(comm, vectors, 0, comm->partition.buckets - 1, 1);
    return LOSSYNET_OK;
}

/* Tells the senders what has arrived, or has the next gather tell them. */
static lossynet_status tell_senders(struct lossynet_comm *comm, float *const *vectors) {
    struct ln_acks *acks = &comm->arrivals.acks;
    if (!comm->feedback.mass) return LOSSYNET_OK;
    if (acks->later) {
        memcpy(acks->vectors, vectors, (size_t)comm->workers.local * sizeof *vectors);
        ln_acknowledge_write(comm);
        ln_feedback_count(comm);
        return LOSSYNET_OK;
    }
    lossynet_status status = ln_acknowledge(comm, LOSSYNET_GRADIENT);
    if (status) return status;
    ln_feedback_count(comm);
    ln_feedback_keep(comm, vectors);
    return LOSSYNET_OK;
}

lossynet_status lossynet_reduce(struct lossynet_comm *comm, float *const *vectors, bool lossless) {
    lossynet_status status = ln_phase_check(comm, vectors, __func__);
    if (!status && !comm->steps.reducing) status = begin(comm, vectors, lossless);
    if (status) return status;
    COMM_EXPECT(comm, GOES_ON);
    comm->steps.reducing = false;
    if (comm->workers.count == 1) return average_alone(comm, vectors);
    ln_late_note(comm);
    ln_feedback_rest(comm, vectors);
    for (int v = 0; v < comm->workers.local; v++)
        ln_rule_send(comm, v, vectors[v], comm->partition.buckets - 1);
    if (comm->averaging.done == 0) fill_masks(comm, lossless); /* else reduce_arrived did it */
    ln_round_others(comm, LOSSYNET_GRADIENT, vectors, false);  /* packets within this rank */
    const bool early = averages_early(comm, lossless);
    if (comm->transport) {
        ln_exchange_ready_all(comm, LOSSYNET_GRADIENT);
        /* Waits until all parameters of the last step have left, because owners are about to change
         * them. */
        status = ln_transport_drain(comm->transport, LOSSYNET_PARAMETER);
        if (!status && early) status = estimate_arriving(comm, vectors);
        if (!status) status = ln_transport_end(comm->transport, LOSSYNET_GRADIENT);
        if (status) return status;
    }
    status = retransmit(comm, vectors, lossless);
    if (status) return status;
    ln_not_finite_look_at_lost(comm, vectors);
    account(comm);
    if (!early) estimate_shards(comm, vectors, 0, comm->partition.buckets - 1, 1);
    status = lossless ? LOSSYNET_OK : ln_arrivals_trace(comm, LOSSYNET_GRADIENT, comm->steps.step);
    if (!status) status = tell_senders(comm, vectors);
    if (status || !comm->transport) return status;
    ln_arrivals_clear(comm, LOSSYNET_GRADIENT);
    ln_transport_receive_begin(comm->transport, LOSSYNET_GRADIENT);
    return LOSSYNET_OK;
}
