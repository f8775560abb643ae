/* drift.c — how far the replicas are apart, measured, and how far they should be.
 *
 * Let theta be the owners' current values (fresh), D_t the change of one element in step t, with
 * variance sigma^2 and correlation rho_k between changes k steps apart. A worker that does not own
 * the element last received it A steps ago (its age).
 *
 * Age. Each step it arrives with probability 1 - p, independently: P(A = k) = (1-p) p^k, so
 *     E A       = p/(1-p)
 *     E (A-k)+  = p^k E A        (memoryless: beyond k, what is left of A is distributed like A)
 *
 * Owner to worker. The worker lacks the last A changes. The variance of a sum of m of them is
 *     sigma^2 [m + 2 sum_{k>=1} (m-k)+ rho_k]
 * and its mean over m = A gives
 *     E|theta_i - theta|^2 = sigma^2 p/(1-p) C(p),        C(p) = 1 + 2 sum_k rho_k p^k
 *
 * Worker to worker. Neither owns it: they differ by the |A - B| changes that one has and the other
 * lacks. For i.i.d. geometric ages P(|A-B| >= m) = 2 p^m / (1+p), m >= 1, which is memoryless too:
 *     E|A-B| = 2p/(1-p^2),     E(|A-B|-k)+ = p^k E|A-B|,  hence the same C(p).
 * One of them owns it: as above, owner to worker. Of the N(N-1)/2 pairs, N-1 contain the owner, a
 * fraction 2/N:
 *     E|theta_i - theta_j|^2 = sigma^2 [(1-2/N) 2p/(1-p^2) + (2/N) p/(1-p)] C(p)
 *
 * Outages of whole steps, 1/(1-s) of them on average (loss.c), make P(A = k) = p (1-s) s^(k-1) for
 * k > 0: all is memoryless again, with s where a further step was p,
 *     E A = p/(1-s),    E|A-B| = 2p/(1-s) (1 - p/(1+s)),    C(s)
 * and s = p gives the above. Loss rates that differ from link to link are not modelled: p is then the
 * mean over all links, and what is expected is too low (both grow faster than p); over a link that
 * is down for good ages and drift grow without bound.
 *
 * C = 1 for independent steps, (1+bp)/(1-bp) for rho_k = b^k, (1+p)/(1-p) for steps that all point
 * the same way, the upper bound. Nothing depends on time: a drift/sigma^2 that grows is a bug. The
 * paper (Weintraub, Banner & Orda 2025) prints 2p/(1+p) sigma^2, which charges a missed broadcast
 * one step only.
 *
 * Measured on a sample of elements, one from each of `samples` equal runs of the vector, scaled to
 * the whole. All workers' values of the sample are gathered, so every rank computes the same
 * numbers in the same order, bit for bit. sigma^2 and rho are those of the step just made: changes are
 * differences of successive calls' fresh values, and sums over the sample of products of this change
 * with itself and with earlier ones give the variance (mean square: the formulas hold with a common
 * trend in sigma^2 and rho) and the correlations. No average over time: what a replica lacks is
 * mostly the last change or two, and while a model learns sigma^2 falls by percents per step.
 *
 * Where what is sent is rounded (elements.c), theta stands for the owner's values rounded, which is
 * what replicas get, so the sample is rounded before anything is made of it. Two replicas that both
 * received a packet, or one that did and the owner, then differ by nothing, and the difference to a
 * stale one is still the sum of the last A changes, now of rounded values: the formulas hold as they
 * are, with the sigma^2 and rho of these. (Where steps are smaller than the 2^-9 that rounding keeps,
 * sigma^2 is larger than that of the owner's values: few elements change, and those by much.)
 */
#include "lossynet/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- formulas ---- */

/* C(s) */
static double correlation_factor(double s, const double *rho, int lags) {
    double sum = 0, power = 1;
    for (int k = 0; k < lags; k++) sum += rho[k] * (power *= s);
    return 1 + 2 * sum;
}

/* A packet is stale with probability p, and once it is, goes on to be with s. */
static double owner_drift(double p, double s, double sigma2, const double *rho, int lags) {
    if (p >= 1) return INFINITY;
    return p / (1 - s) * sigma2 * correlation_factor(s, rho, lags);
}

static double pair_drift(int workers, double p, double s, double sigma2, const double *rho,
                         int lags) {
    if (workers < 2) return 0;
    if (p >= 1) return INFINITY;
    double with_owner = 2.0 / workers, age = p / (1 - s);
    double bracket = (1 - with_owner) * 2 * age * (1 - p / (1 + s)) + with_owner * age;
    return sigma2 * bracket * correlation_factor(s, rho, lags);
}

double lossynet_drift_owner(double p, double sigma2, const double *rho, int lags) {
    return owner_drift(p, p, sigma2, rho, lags);
}

double lossynet_drift_pair(int workers, double p, double sigma2, const double *rho, int lags) {
    return pair_drift(workers, p, p, sigma2, rho, lags);
}

double lossynet_drift_paper(double p, double sigma2) {
    return 2 * p / (1 + p) * sigma2;
}

/* ---- the sample ---- */

static void choose(struct lossynet *net) {
    struct lossynet_drift_state *drift = &net->drift;
    uint64_t key = lossynet_mix(net->loss.seed ^ 0x6472696674u /* "drift" */);
    double stride = (double)net->layout.elements / drift->samples;
    size_t shard = 0; /* elements come in ascending order */
    for (int i = 0; i < drift->samples; i++) {
        size_t low = (size_t)(i * stride), high = (size_t)((i + 1) * stride);
        if (high > net->layout.elements) high = net->layout.elements;
        size_t width = high > low ? high - low : 1;
        size_t element = low + (size_t)(lossynet_mix(key + (uint64_t)i) % width);
        drift->element[i] = element < net->layout.elements ? element : net->layout.elements - 1;
        while (net->layout.shard_element[shard + 1] <= drift->element[i]) shard++;
        drift->owner[i] = (int)(shard % (size_t)net->workers);
    }
}

void lossynet_drift_open(struct lossynet *net, int samples) {
    struct lossynet_drift_state *drift = &net->drift;
    if (net->workers == 1) samples = 0;
    if ((size_t)samples > net->layout.elements) samples = (int)net->layout.elements;
    drift->samples = samples;
    if (samples == 0) return;
    size_t n = (size_t)samples;
    NET_TAKE(net, drift->element, n);
    NET_TAKE(net, drift->owner, n);
    NET_TAKE(net, drift->mine, n * (size_t)net->local);
    NET_TAKE(net, drift->values, n * (size_t)net->workers);
    NET_TAKE(net, drift->fresh, n);
    NET_TAKE(net, drift->change, n * LOSSYNET_RING);
    NET_TAKE(net, drift->ages, (size_t)net->local);
    if (!net->measuring && !net->out_of_memory) choose(net);
}

void lossynet_drift_close(struct lossynet *net) {
    free(net->drift.element);
    free(net->drift.owner);
    free(net->drift.mine);
    free(net->drift.values);
    free(net->drift.fresh);
    free(net->drift.change);
    free(net->drift.ages);
    net->drift = (struct lossynet_drift_state){0};
}

/* ---- measuring ---- */

static lossynet_status gather_values(struct lossynet *net, float *const *vectors) {
    struct lossynet_drift_state *drift = &net->drift;
    size_t n = (size_t)drift->samples;
#pragma omp parallel for num_threads(net->threads) schedule(static)
    for (int v = 0; v < net->local; v++) {
        float *mine = drift->mine + (size_t)v * n;
        if (net->memory.gather) {
            net->memory.gather(mine, vectors[v], drift->element, n);
            continue;
        }
        for (size_t i = 0; i < n; i++) mine[i] = vectors[v][drift->element[i]];
    }
    if (lossynet_rounds(&net->layout)) lossynet_round(drift->mine, drift->mine, n * net->local);
    return lossynet_all_gather(net, drift->mine, drift->values, n * sizeof(float));
}

/* Squared distances of sampled values, summed over the sample. */
static void measure_distances(const struct lossynet *net, double *pair, double *owner) {
    const struct lossynet_drift_state *drift = &net->drift;
    size_t n = (size_t)drift->samples;
    int workers = net->workers;
    *pair = *owner = 0;
    for (size_t i = 0; i < n; i++) {
        /* Relative to the fresh value, to keep the digits: sum over pairs of (x_i - x_j)^2
         * = N sum x^2 - (sum x)^2, and there are N(N-1)/2 pairs. */
        double fresh = drift->values[(size_t)drift->owner[i] * n + i], sum = 0, squares = 0;
        for (int w = 0; w < workers; w++) {
            double x = (double)drift->values[(size_t)w * n + i] - fresh;
            sum += x;
            squares += x * x;
        }
        *owner += squares / (workers - 1);
        *pair += 2 * (squares - sum * sum / workers) / (workers - 1);
    }
}

/* Takes in this call's change of the fresh values. covariance[k]: sum over the sample of its product
 * with the change k calls ago, 0 where there is none. The first call only has a value, no change. */
static void measure_changes(struct lossynet *net, double covariance[LOSSYNET_RING]) {
    struct lossynet_drift_state *drift = &net->drift;
    size_t n = (size_t)drift->samples;
    uint64_t changes = drift->measured++; /* that this call completes */
    float *now = drift->change + changes % LOSSYNET_RING * n;
    for (size_t i = 0; i < n; i++) {
        float fresh = drift->values[(size_t)drift->owner[i] * n + i];
        now[i] = fresh - drift->fresh[i];
        drift->fresh[i] = fresh;
    }
    for (uint64_t lag = 0; lag < LOSSYNET_RING; lag++) {
        const float *then = drift->change + (changes - lag) % LOSSYNET_RING * n;
        covariance[lag] = 0;
        for (size_t i = 0; lag < changes && i < n; i++) {
            covariance[lag] += (double)now[i] * (double)then[i];
        }
    }
}

/* Of all workers together. */
static lossynet_status gather_ages(struct lossynet *net, struct lossynet_ages *total,
                                   double share[LOSSYNET_AGES]) {
    struct lossynet_ages *all = net->gathered, *mine = net->drift.ages;
    size_t packets = net->layout.packets;
#pragma omp parallel for num_threads(net->threads) schedule(static)
    for (int v = 0; v < net->local; v++) {
        const uint32_t *age = net->age + (size_t)v * packets;
        struct lossynet_ages a = {.expected = net->totals[v].expected,
                                  .arrived = net->totals[v].arrived};
        for (size_t p = 0; p < packets; p++) {
            a.sum += age[p];
            if (age[p] > a.largest) a.largest = age[p];
            a.aged[age[p] < LOSSYNET_AGES ? age[p] : LOSSYNET_AGES - 1]++;
        }
        a.packets = packets - lossynet_layout_owner_packets(&net->layout, net->first + v);
        a.aged[0] -= (uint32_t)(packets - a.packets); /* its own are never stale */
        mine[v] = a;
    }
    lossynet_status status = lossynet_all_gather(net, mine, all, sizeof *all);
    *total = (struct lossynet_ages){0};
    for (int w = 0; status == LOSSYNET_OK && w < net->workers; w++) {
        total->sum += all[w].sum;
        total->packets += all[w].packets;
        total->expected += all[w].expected;
        total->arrived += all[w].arrived;
        if (all[w].largest > total->largest) total->largest = all[w].largest;
        for (int k = 0; k < LOSSYNET_AGES; k++) share[k] += all[w].aged[k];
    }
    for (int k = 0; total->packets && k < LOSSYNET_AGES; k++) share[k] /= (double)total->packets;
    return status;
}

lossynet_status lossynet_drift_measure(struct lossynet *net, float *const *vectors,
                                       struct lossynet_drift *out) {
    struct lossynet_drift_state *drift = &net->drift;
    *out = (struct lossynet_drift){0};
    if (drift->samples == 0) return LOSSYNET_OK;
    lossynet_status status = gather_values(net, vectors);
    if (status) return status;
    struct lossynet_ages ages;
    status = gather_ages(net, &ages, out->age_share);
    if (status) return status;

    double scale = (double)net->layout.elements / drift->samples;
    measure_distances(net, &out->pair, &out->owner);
    out->pair *= scale;
    out->owner *= scale;
    double covariance[LOSSYNET_RING];
    measure_changes(net, covariance);
    out->sigma2 = scale * covariance[0];
    for (int k = 0; k < LOSSYNET_LAGS; k++)
        if (covariance[0] > 0) out->rho[k] = covariance[k + 1] / covariance[0];

    double p = ages.expected ? 1 - (double)ages.arrived / (double)ages.expected : 0;
    double s = net->loss.model == LOSS_OUTAGE ? 1 - 1 / net->loss.mean_run : p;
    out->expected_pair = pair_drift(net->workers, p, s, out->sigma2, out->rho, LOSSYNET_LAGS);
    out->expected_owner = owner_drift(p, s, out->sigma2, out->rho, LOSSYNET_LAGS);
    out->paper_pair = lossynet_drift_paper(p, out->sigma2);
    out->mean_age = ages.packets ? (double)ages.sum / (double)ages.packets : 0;
    out->max_age = ages.largest;
    return LOSSYNET_OK;
}
