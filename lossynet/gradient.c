/* gradient.c — the GRADIENT phase: every worker's vector reaches the owners, packet by packet or
 * not at all; each owner estimates the average of its shards from what arrived.
 *
 *     1. masks      of links within this rank: injected loss decides, nothing is copied
 *     2. exchange   packets of other ranks land in the inbox and set their masks (stream_receive.c);
 *                   what was lost may be sent again (repair.c)
 *     3. reduce     per (owner, bucket): a weight per packet and sender, then one weighted sum that
 *                   reads local vectors and the inbox in place, in order of workers
 *
 * The weights are the estimators of lossynet.h. Let q = 1 - p and let S be binomial(N-1, q):
 *
 *     mean      w = 1/(1+|S|) for the owner and for those who arrived.   E[w_o] = (1-p^N)/(N q)
 *     balanced  w_o = 1/N, w_i = (N-1)/(N |S|); w_o = 1 when S is empty.
 *               E[w_o] = 1/N + (N-1)/N p^(N-1), and by symmetry E[w_i] = (1 - E[w_o])/(N-1)
 *     ht        w_o = 1/N, w_i = 1/(N q^): E[w_i] = 1/N when q^ = q (Horvitz & Thompson 1952)
 *     zero      w = 1/N: E[w_i] = q/N
 *
 * p is one for all senders, in `ht` the mean over what an owner was sent. Where links lose unequally
 * (loss.c, `at`) no estimator makes up for it: a sender's share of the average is what it delivers of
 * its packets against what the others do, and a link that is down for good silences its sender there.
 *
 * Each weight is one correctly rounded division, or equals one, so that all four give exactly
 * (float)(1.0/N) when nothing was lost: a run at loss rate 0 is bit for bit the reliable one.
 */
#include "lossynet/engine.h"

#include <omp.h>
#include <string.h>

/* How fast `ht` forgets old loss, per step. */
static const double FORGET = 0.99;

/* ---- the sum ---- */

void lossynet_weighted_sum_plain(float *out, const float *const *sender, const float *weight,
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
            const float *x = sender[i] + start;
            for (size_t j = 0; j < end - start; j++) sum[j] += w * x[j];
        }
        memcpy(out + start, sum, (end - start) * sizeof *out);
        start = end;
    }
}

/* ---- weights ---- */

struct weights {
    float own, other;
};

/* others: how many other workers' packets arrived; inflate: 1/(1-p) for `ht` */
static struct weights estimate(lossynet_estimator estimator, int workers, int others,
                               double inflate) {
    double n = workers;
    struct weights w = {(float)(1.0 / n), (float)(1.0 / n)};
    switch (estimator) {
    case LOSSYNET_MEAN:
        w.own = w.other = (float)(1.0 / (1.0 + others));
        break;
    case LOSSYNET_BALANCED:
        if (others == 0)
            w.own = 1;
        else
            w.other = (float)((n - 1.0) / (n * others));
        break;
    case LOSSYNET_HT:
        w.other = (float)(inflate / n);
        break;
    case LOSSYNET_ZERO:
        break;
    }
    return w;
}

/* The measured 1/(1-p) of local owner v.
 *
 * It comes from steps before this one, because an estimate from this step's own arrivals is not
 * independent of its masks: E[arrived / q^] would not be 1. Only the first step has nothing else
 * (and with thousands of packets the difference is small). Old counts fade, so that it follows a
 * network that changes; with 0.99 it looks back about 100 steps. */
static double measured_inflation(const struct lossynet *net, int v, bool lossless) {
    if (lossless) return 1;
    const struct lossynet_history *history = &net->history[v];
    if (history->arrived > 0) return history->expected / history->arrived;
    const struct lossynet_counters *now = &net->counters[net->step % 2][v];
    uint64_t arrived = now->arrived[LOSSYNET_GRADIENT];
    return arrived ? (double)now->expected[LOSSYNET_GRADIENT] / (double)arrived : 1;
}

/* 1 / (the gradients in what arrived of a packet), where losses are carried (carry.c). */
static float weight_of_mass(const struct lossynet *net, const uint8_t *arrived, const float *mass,
                            size_t stride) {
    double sum = 0;
    for (size_t s = 0; s < (size_t)net->workers; s++)
        if (arrived[s * stride]) sum += 1 + (double)net->carry.share * mass[s * stride];
    return (float)(1 / sum);
}

/* weight[k * N + s] of the `count` packets whose masks start at `arrived`, `stride` apart, and so
 * their masses; NULL where nothing is carried. */
static void fill_weights(const struct lossynet *net, int owner, const uint8_t *arrived,
                         const float *mass, size_t stride, size_t count, double inflate,
                         float *weight) {
    size_t workers = (size_t)net->workers;
    for (size_t k = 0; k < count; k++, weight += workers) {
        int present = 0;
        for (size_t s = 0; s < workers; s++) present += arrived[s * stride + k];
        struct weights w = estimate(net->estimator, net->workers, present - 1, inflate);
        if (mass && net->estimator == LOSSYNET_MEAN)
            w.own = w.other = weight_of_mass(net, arrived + k, mass + k, stride);
        for (size_t s = 0; s < workers; s++) weight[s] = arrived[s * stride + k] ? w.other : 0;
        weight[owner] = w.own;
    }
}

/* ---- one shard ---- */

/* One of `parts` parts of a shard. */
static void reduce_shard(const struct lossynet *net, float *const *vectors, int v, int bucket,
                         int part, int parts, float *weight, const float **sender) {
    const struct lossynet_layout *layout = &net->layout;
    int owner = net->first + v;
    size_t row = (size_t)owner * (layout->buckets + 1) + bucket;
    size_t all = layout->owner_packet[row + 1] - layout->owner_packet[row];
    size_t from = all * (size_t)part / (size_t)parts, to = all * (size_t)(part + 1) / (size_t)parts;
    if (from == to) return;

    size_t offset, count, skip = from * layout->packet_elements;
    lossynet_shard(net, owner, bucket, &offset, &count);
    for (int s = 0; s < net->workers; s++)
        sender[s] = skip + (lossynet_is_local(net, s)
                                ? vectors[s - net->first] + offset
                                : lossynet_inbox(net, v, s) + layout->owner_element[row]);
    const float *mass = lossynet_carry_mass(net, v);
    if (mass) mass += layout->owner_packet[row] + from;
    fill_weights(net, owner, lossynet_arrived(net, v, 0) + layout->owner_packet[row] + from, mass,
                 lossynet_layout_owner_packets(layout, owner), to - from, net->inflation[v],
                 weight);
    if (to < all) count = to * layout->packet_elements;
    net->weighted_sum(vectors[v] + offset + skip, sender, weight, net->workers, count - skip,
                      layout->packet_elements);
}

/* ---- the phase ---- */

/* Masks of links within the rank: a worker's own packets are there, others' as injected loss
 * decides, in a repair round besides what is there. Those of other ranks are cleared where the phase
 * opens. */
static void fill_masks(const struct lossynet *net, bool lossless) {
#pragma omp parallel for collapse(2) num_threads(net->threads) schedule(static)
    for (int v = 0; v < net->local; v++) {
        for (int i = 0; i < net->local; i++) {
            int owner = net->first + v, s = net->first + i;
            uint8_t *arrived = lossynet_arrived(net, v, s), *mask = arrived;
            size_t n = lossynet_layout_owner_packets(&net->layout, owner);
            if (net->round > 0) mask = lossynet_thread_mask(net);
            lossynet_injected(net, LOSSYNET_GRADIENT, s, owner, n, s == owner || lossless, mask);
            for (size_t k = 0; net->round > 0 && k < n; k++) arrived[k] |= mask[k];
        }
    }
}

/* Before the next phase opens. */
static void clear_masks(const struct lossynet *net) {
    for (int v = 0; v < net->local; v++) {
        size_t n = lossynet_layout_owner_packets(&net->layout, net->first + v);
        size_t before = (size_t)net->first * n, after = (size_t)(net->first + net->local) * n;
        uint8_t *arrived = lossynet_arrived(net, v, 0);
        memset(arrived, 0, before);
        memset(arrived + after, 0, (size_t)net->workers * n - after);
    }
}

/* Counts what travelled; returns how much of it arrived in this call. */
static uint64_t count(struct lossynet *net, int v) {
    int owner = net->first + v;
    size_t n = lossynet_layout_owner_packets(&net->layout, owner);
    size_t owned = lossynet_owned_elements(net, owner);
    const uint8_t *mask = lossynet_arrived(net, v, 0);
    uint64_t arrived = 0;
    for (size_t i = 0; i < n * (size_t)net->workers; i++) arrived += mask[i];
    arrived -= n; /* its own */
    struct lossynet_counters *counters = &net->counters[net->step % 2][v];
    counters->expected[LOSSYNET_GRADIENT] += n * (uint64_t)(net->workers - 1);
    counters->arrived[LOSSYNET_GRADIENT] += arrived;
    counters->bytes[LOSSYNET_GRADIENT] +=
        (net->layout.elements - owned) * net->layout.element_bytes;
    return arrived;
}

static void remember(struct lossynet *net, int v, uint64_t arrived) {
    size_t n = lossynet_layout_owner_packets(&net->layout, net->first + v);
    struct lossynet_history *history = &net->history[v];
    history->expected = FORGET * history->expected + (double)(n * (size_t)(net->workers - 1));
    history->arrived = FORGET * history->arrived + (double)arrived;
}

lossynet_status lossynet_reduce_begin(struct lossynet *net, float *const *vectors, bool lossless) {
    if (net->workers == 1 || net->reducing) return LOSSYNET_OK;
    if (net->engine) lossynet_stream_begin(net, LOSSYNET_GRADIENT, vectors, lossless);
    net->reducing = true;
    return LOSSYNET_OK;
}

/* Counts what arrived, when the phase is over. */
static void account(struct lossynet *net, bool lossless) {
#pragma omp parallel for num_threads(net->threads) schedule(static)
    for (int v = 0; v < net->local; v++) {
        uint64_t arrived = count(net, v);
        net->inflation[v] = measured_inflation(net, v, lossless);
        if (!lossless) remember(net, v, arrived);
    }
}

/* Averages buckets first ... last, of which all that will come is there. */
static void estimate_shards(struct lossynet *net, float *const *vectors, int first, int last,
                            int parts) {
    const struct lossynet_layout *layout = &net->layout;
#pragma omp parallel num_threads(net->threads)
    {
        size_t thread = (size_t)omp_get_thread_num();
        size_t workers = (size_t)net->workers;
        float *weight = net->weights + thread * layout->largest_shard_packets * workers;
        const float **sender = net->senders + thread * workers;
#pragma omp for collapse(3) schedule(dynamic)
        for (int v = 0; v < net->local; v++)
            for (int b = first; b <= last; b++)
                for (int part = 0; part < parts; part++)
                    reduce_shard(net, vectors, v, b, part, parts, weight, sender);
    }
}

/* Averages each bucket as soon as it is over, while later ones are on their way. */
static lossynet_status estimate_arriving(struct lossynet *net, float *const *vectors) {
    int parts = (net->threads + net->local - 1) / net->local;
    for (int b = 0; b < net->layout.buckets; b++) {
        lossynet_status status = lossynet_stream_bucket(net, LOSSYNET_GRADIENT, b);
        if (status) return status;
        estimate_shards(net, vectors, b, b, parts);
    }
    return LOSSYNET_OK;
}

/* Sends again what the first sending lost. */
static lossynet_status repair(struct lossynet *net, float *const *vectors, bool lossless) {
    lossynet_status status = LOSSYNET_OK;
    int rounds = lossless ? 0 : net->repair.rounds[LOSSYNET_GRADIENT];
    for (net->round = 1; net->round <= rounds && !status; net->round++) {
        status = lossynet_repair_ask(net, LOSSYNET_GRADIENT);
        if (status) break;
        fill_masks(net, false);
        if (!net->engine) continue;
        lossynet_stream_open(net, LOSSYNET_GRADIENT, false);
        lossynet_stream_begin(net, LOSSYNET_GRADIENT, vectors, false);
        lossynet_stream_ready(net, LOSSYNET_GRADIENT);
        status = lossynet_stream_end(net, LOSSYNET_GRADIENT);
    }
    net->round = 0;
    return status;
}

lossynet_status lossynet_reduce(struct lossynet *net, float *const *vectors, bool lossless) {
    if (net->workers == 1) return LOSSYNET_OK;
    lossynet_status status = lossynet_reduce_begin(net, vectors, lossless);
    if (status) return status;
    net->reducing = false;
    lossynet_carry_rest(net, vectors);
    lossynet_round_others(net, vectors, false); /* what is not sent in datagrams */
    fill_masks(net, lossless);
    /* ht asks how much arrived; what is repaired comes after all else. */
    bool early = net->engine && net->estimator != LOSSYNET_HT &&
                 (lossless || net->repair.rounds[LOSSYNET_GRADIENT] == 0);
    if (net->engine) {
        lossynet_stream_ready(net, LOSSYNET_GRADIENT);
        /* Parameters of the last step, if any are still to leave: owners are about to change them. */
        status = lossynet_stream_drain(net);
        if (!status && early) status = estimate_arriving(net, vectors);
        if (!status) status = lossynet_stream_end(net, LOSSYNET_GRADIENT);
        if (status) return status;
    }
    status = repair(net, vectors, lossless);
    if (status) return status;
    account(net, lossless);
    if (!early) estimate_shards(net, vectors, 0, net->layout.buckets - 1, 1);
    status = lossless ? LOSSYNET_OK : lossynet_record(net, LOSSYNET_GRADIENT, net->step);
    if (!status && net->return_masks) status = lossynet_masks_return(net, LOSSYNET_GRADIENT);
    if (!status && net->carry.residual) lossynet_carry_keep(net, vectors);
    if (status || !net->engine) return status;
    clear_masks(net);
    lossynet_stream_open(net, LOSSYNET_GRADIENT, lossless);
    return LOSSYNET_OK;
}
