/* drift.c — measures how far the replicas are apart, and computes how far they should be.
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
 * Worker to worker. If neither owns the element, they differ by the |A - B| changes that one has
 * and the other lacks. For i.i.d. geometric ages P(|A-B| >= m) = 2 p^m / (1+p), m >= 1. This is
 * memoryless, too:
 *     E|A-B| = 2p/(1-p^2),     E(|A-B|-k)+ = p^k E|A-B|,  hence the same C(p).
 * If one of them owns it, they differ as owner and worker do. Of the N(N-1)/2 pairs, N-1 contain
 * the owner, a fraction 2/N:
 *     E|theta_i - theta_j|^2 = sigma^2 [(1-2/N) 2p/(1-p^2) + (2/N) p/(1-p)] C(p)
 *
 * Outages last for whole steps, 1/(1-s) of them on average (loss_model.c). They give P(A = k) =
 * p (1-s) s^(k-1) for k > 0. This is memoryless again; the probability of another stale step is s
 * instead of p:
 *     E A = p/(1-s),    E|A-B| = 2p/(1-s) (1 - p/(1+s)),    C(s)
 * With s = p this is the above. Bursts reach from one step into the next where they are long beside
 * the n packets that a link has in a step. The state of a packet is then that of the same packet n
 * places of the chain later, so that s = p + (1-p) l^n with l = 1 - 1/(MEAN (1-p)). After R rounds,
 * each a chain of its own, a packet is stale with p^(R+1), and stays so with s^(R+1). Where rounds go
 * around outages, links share a fate (all links from a worker fail together, so that replicas lack
 * the same packets), links or tensors have rates of their own, or a file says what is lost, none of
 * this holds: nothing is expected then (NaN). What a real network loses counts as if steps were
 * independent and links alike. Over a link that is always down, ages and drift grow without bound.
 *
 * With a lead (lead.c) owners send s = theta + l D, where D is their last change. All of the above
 * then holds for s: sigma^2 and rho are those of the changes of s. Only the owner has theta instead,
 * which differs by g_t = theta_t - s_t. So a worker of age A lacks g_t and the last A changes of s:
 *     E|theta_i - theta|^2 = sigma_s^2 E A C(s) + E g_t^2 + 2 sum_(k>=0) P(A > k) E g_t D_s,(t-k)
 * For uncorrelated steps this is (p/(1-p) + l^2) sigma^2, and worker to worker the lead adds
 * 2 l (l+1) 2p/(1+p) sigma^2.
 *
 * C = 1 for independent steps, (1+bp)/(1-bp) for rho_k = b^k, and (1+p)/(1-p), the upper bound, for
 * steps that all point the same way. Nothing depends on time: if drift/sigma^2 grows, there is a
 * bug. The paper (Weintraub, Banner & Orda 2025) prints 2p/(1+p) sigma^2, which charges a missed
 * broadcast for one step only.
 *
 * Measurement. The sample has one element from each of `samples` equal runs of the vector; results
 * are scaled to the whole vector. All workers' values of the sample are gathered, so every rank
 * computes the same numbers in the same order, bit for bit. sigma^2 and rho are those of the last
 * step. A change is the difference of successive calls' fresh values. Products of this change with
 * itself and with earlier changes, summed over the sample, give the variance and the correlations.
 * (The variance is the mean square: the formulas also hold with a common trend in sigma^2 and rho.)
 * There is no average over time, because a replica mostly lacks the last change or two, and because
 * sigma^2 falls by percents per step while a model learns.
 *
 * If packets are rounded (elements.c), theta means the owner's values after rounding, which is what
 * replicas get. So the sample is rounded before it is used. Replicas that received the same packet
 * then do not differ from one another or, without a lead, from the owner. A stale replica still
 * differs by the sum of the last A changes, now of rounded values. So the formulas hold, with
 * sigma^2 and rho of rounded values. (If steps are smaller than the precision of rounding, 2^-9,
 * this sigma^2 is larger than that of the owner's values: few elements change, but by much.) With a
 * lead s is theta + l D after rounding, where D is the change before it, as owners compute it.
 */
#include "lossynet/algorithm/algorithm.h"

#include <math.h>
#include <string.h>

/* ---- formulas ---- */

/* C(s) */
static double correlation_factor(double s, const double *rho, int lags) {
    double sum = 0, power = 1;
    for (int k = 0; k < lags; k++) sum += rho[k] * (power *= s);
    return 1 + 2 * sum;
}

/* A packet is stale with probability p. A stale packet stays stale in the next step with
 * probability s. */
static double owner_drift(double p, double s, double sigma2, const double *rho, int lags) {
    if (p >= 1) return INFINITY;
    return sigma2 * (p / (1 - s) * correlation_factor(s, rho, lags));
}

/* owner: the drift between owner and worker. */
static double pair_drift(int workers, double p, double s, double sigma2, const double *rho,
                         int lags, double owner) {
    if (workers < 2) return 0;
    if (p >= 1) return INFINITY;
    const double with_owner = 2.0 / workers, unlike = 2 * p * (1 - p / (1 + s)); /* P(A != B) */
    const double others = unlike / (1 - s) * correlation_factor(s, rho, lags);
    return (1 - with_owner) * sigma2 * others + with_owner * owner;
}

double lossynet_drift_pair(int workers, double p, double sigma2, const double *rho, int lags) {
    return pair_drift(workers, p, p, sigma2, rho, lags, owner_drift(p, p, sigma2, rho, lags));
}

double lossynet_drift_paper(double p, double sigma2) {
    return 2 * p / (1 + p) * sigma2;
}

/* ---- the sample ---- */

static void choose(struct lossynet_comm *comm) {
    struct ln_drift_state *drift = &comm->drift;
    uint64_t key = ln_mix(comm->loss.seed ^ 0x6472696674u /* "drift" */);
    double stride = (double)comm->partition.elements / drift->samples;
    size_t shard = 0; /* elements come in ascending order */
    for (int i = 0; i < drift->samples; i++) {
        size_t low = (size_t)(i * stride), high = (size_t)((i + 1) * stride);
        if (high > comm->partition.elements) high = comm->partition.elements;
        size_t width = high > low ? high - low : 1;
        size_t element = low + (size_t)(ln_mix(key + (uint64_t)i) % width);
        drift->element[i] =
            element < comm->partition.elements ? element : comm->partition.elements - 1;
        while (comm->partition.shard_element[shard + 1] <= drift->element[i]) shard++;
        drift->owner[i] = (int)(shard % (size_t)comm->workers.count);
    }
}

static void take_series(struct lossynet_comm *comm, struct ln_series *series, size_t samples) {
    COMM_TAKE(comm, series->now, samples);
    COMM_TAKE(comm, series->last, samples);
    COMM_TAKE(comm, series->change, samples * LOSSYNET_RING);
}

/* The shard of an element: bucket * workers + owner. */
static size_t shard_of(const struct ln_partition *partition, size_t element) {
    return ln_last_until(partition->shard_element,
                         (size_t)partition->buckets * (size_t)partition->workers, element);
}

/* The first element of the block that an element is in. *count: elements of the block; *shard: the
 * shard that the block is in. */
static size_t block_of(const struct ln_partition *partition, size_t element, size_t *count,
                       size_t *shard) {
    *shard = shard_of(partition, element);
    const size_t start = partition->shard_element[*shard];
    const size_t block = start + (element - start) / LOSSYNET_BLOCK * LOSSYNET_BLOCK;
    const size_t left = partition->shard_element[*shard + 1] - block;
    *count = left < LOSSYNET_BLOCK ? left : LOSSYNET_BLOCK;
    return block;
}

/* Lists the elements of the blocks that samples are in. A shorter block repeats its elements. */
static void list_blocks(struct lossynet_comm *comm) {
    struct ln_drift_state *drift = &comm->drift;
    size_t count, shard, n = 0;
    for (int i = 0; i < drift->samples; i++) {
        const size_t block = block_of(&comm->partition, drift->element[i], &count, &shard);
        for (size_t e = 0; e < LOSSYNET_BLOCK; e++, n++) {
            drift->blocks.element[n] = block + e % count;
            drift->blocks.owner[n] = drift->owner[i];
        }
    }
}

void ln_drift_open(struct lossynet_comm *comm, int samples) {
    struct ln_drift_state *drift = &comm->drift;
    if (comm->partition.groups.count == 1) samples = 0;
    if ((size_t)samples > comm->partition.elements) samples = (int)comm->partition.elements;
    drift->samples = samples;
    COMM_TAKE(comm, drift->ages, (size_t)comm->workers.local);
    COMM_TAKE(comm, drift->all_ages, (size_t)comm->workers.count);
    if (samples == 0) return;
    size_t n = (size_t)samples;
    COMM_TAKE(comm, drift->element, n);
    COMM_TAKE(comm, drift->owner, n);
    COMM_TAKE(comm, drift->mine, n * (size_t)comm->workers.local);
    COMM_TAKE(comm, drift->values, n * (size_t)comm->workers.count);
    take_series(comm, &drift->fresh, n);
    take_series(comm, &drift->sent, n);
    COMM_TAKE(comm, drift->model.offset, n);
    COMM_TAKE(comm, drift->model.value, n);
    COMM_TAKE(comm, drift->model.change, n);
    if (ln_has_blocks(&comm->partition)) {
        COMM_TAKE(comm, drift->blocks.scale, n * (size_t)comm->workers.local);
        COMM_TAKE(comm, drift->blocks.scales, n * (size_t)comm->workers.count);
    }
    const bool there = ln_has_blocks(&comm->partition) && comm->resources.memory.gather;
    if (there) {
        COMM_TAKE(comm, drift->blocks.element, n * LOSSYNET_BLOCK);
        COMM_TAKE(comm, drift->blocks.owner, n * LOSSYNET_BLOCK);
        COMM_TAKE(comm, drift->blocks.value, n * LOSSYNET_BLOCK);
    }
    if (comm->resources.pool.measuring || comm->resources.pool.out_of_memory) return;
    choose(comm);
    if (there) list_blocks(comm);
}

/* ---- measuring ---- */

/* The values of a shard that local worker v owns, from an element on. */
static const float *owned_values(const struct lossynet_comm *comm, float *vector, int v,
                                 size_t shard, size_t element) {
    const int bucket = (int)(shard / (size_t)comm->workers.count);
    return ln_shard_of(comm, vector, v, bucket).value +
           (element - comm->partition.shard_element[shard]);
}

/* The scale of the block that sample i is in. Local worker v owns it. */
static uint8_t scale_of(const struct lossynet_comm *comm, float *vector, int v, size_t i) {
    size_t count, shard;
    const size_t block = block_of(&comm->partition, comm->drift.element[i], &count, &shard);
    return ln_block_scale(comm->partition.dtype[LOSSYNET_PARAMETER],
                          owned_values(comm, vector, v, shard, block), count);
}

/* The same for all samples, in vectors that the host cannot access. */
static void scales_there(const struct lossynet_comm *comm, float *const *vectors) {
    enum { BLOCK = LOSSYNET_BLOCK };
    const struct ln_drift_state *drift = &comm->drift;
    const struct lossynet_memory *memory = &comm->resources.memory;
    const size_t n = (size_t)drift->samples;
    memory->gather(memory->context, drift->blocks.value, vectors, drift->blocks.element,
                   drift->blocks.owner, n * BLOCK);
    for (size_t i = 0; i < n; i++)
        drift->blocks.scale[(size_t)drift->owner[i] * n + i] = ln_block_scale(
            comm->partition.dtype[LOSSYNET_PARAMETER], drift->blocks.value + i * BLOCK, BLOCK);
}

/* The value of sample i at local worker v. */
static float value_of(const struct lossynet_comm *comm, float *vector, int v, size_t i) {
    const size_t element = comm->drift.element[i];
    if (comm->resources.shard && comm->drift.owner[i] == comm->workers.first + v)
        return *owned_values(comm, vector, v, shard_of(&comm->partition, element), element);
    if (!comm->resources.bf16) return vector[element];
    return ln_bf16_widen(*(const uint16_t *)ln_element(comm, vector, element));
}

static lossynet_status gather_scales(struct lossynet_comm *comm, float *const *vectors) {
    struct ln_drift_state *drift = &comm->drift;
    const size_t n = (size_t)drift->samples;
    if (comm->resources.memory.gather) scales_there(comm, vectors);
    for (int v = 0; v < comm->workers.local && !comm->resources.memory.gather; v++) {
        uint8_t *scale = drift->blocks.scale + (size_t)v * n;
        for (size_t i = 0; i < n; i++)
            if (drift->owner[i] == comm->workers.first + v)
                scale[i] = scale_of(comm, vectors[v], v, i);
    }
    return lossynet_all_gather_later(comm, drift->blocks.scale, drift->blocks.scales, n);
}

static lossynet_status gather_values(struct lossynet_comm *comm, float *const *vectors) {
    struct ln_drift_state *drift = &comm->drift;
    const struct lossynet_memory *memory = &comm->resources.memory;
    size_t n = (size_t)drift->samples;
    if (memory->gather && n > 0)
        memory->gather(memory->context, drift->mine, vectors, drift->element, NULL, n);
    for (int v = 0; v < comm->workers.local && !memory->gather; v++)
        for (size_t i = 0; i < n; i++)
            drift->mine[(size_t)v * n + i] = value_of(comm, vectors[v], v, i);
    lossynet_status status =
        lossynet_all_gather_later(comm, drift->mine, drift->values, n * sizeof(float));
    return status || !drift->blocks.scale ? status : gather_scales(comm, vectors);
}

/* Stores the model's values and their change, not rounded. Then rounds the values, and those that
 * owners sent, in the same way as packets. */
static void keep_model(const struct lossynet_comm *comm) {
    const struct ln_drift_state *drift = &comm->drift;
    const size_t n = (size_t)drift->samples;
    const lossynet_wire_dtype dtype = comm->partition.dtype[LOSSYNET_PARAMETER];
    for (size_t i = 0; i < n; i++) {
        const float now = drift->values[(size_t)drift->owner[i] * n + i];
        drift->model.change[i] = drift->measured > 0 ? now - drift->model.value[i] : 0;
        drift->model.value[i] = now;
        drift->sent.now[i] = now + (float)drift->lead * drift->model.change[i];
    }
    if (drift->blocks.scales) { /* only owners' values are not yet rounded */
        for (size_t i = 0; i < n; i++) {
            const size_t own = (size_t)drift->owner[i] * n + i;
            drift->values[own] =
                ln_block_round(dtype, drift->values[own], drift->blocks.scales[own]);
            /* with the lead, the block may need a larger scale, at least for this element */
            const uint8_t alone = ln_block_scale(dtype, &drift->sent.now[i], 1);
            drift->sent.now[i] = ln_block_round(
                dtype, drift->sent.now[i],
                alone > drift->blocks.scales[own] ? alone : drift->blocks.scales[own]);
        }
    } else if (ln_has_bf16(&comm->partition)) {
        const struct ln_rounding r = {.dtype = dtype};
        ln_elements_copy(&r, drift->values, drift->values, n * (size_t)comm->workers.count);
        ln_elements_copy(&r, drift->sent.now, drift->sent.now, n);
    }
    for (size_t i = 0; i < n; i++)
        drift->fresh.now[i] = drift->values[(size_t)drift->owner[i] * n + i];
}

/* Squared distances of sampled values, summed over the sample. */
static void measure_distances(const struct lossynet_comm *comm, double *pair, double *owner) {
    const struct ln_drift_state *drift = &comm->drift;
    size_t n = (size_t)drift->samples;
    const int replicas = comm->partition.groups.count;
    *pair = *owner = 0;
    for (size_t i = 0; i < n; i++) {
        /* Relative to the fresh value, to keep the digits: sum over pairs of (x_i - x_j)^2
         * = N sum x^2 - (sum x)^2, and there are N(N-1)/2 pairs. */
        double fresh = drift->fresh.now[i], sum = 0, squares = 0;
        for (int g = 0; g < replicas; g++) {
            const size_t partner = (size_t)ln_partner(&comm->partition, drift->owner[i], g);
            double x = (double)drift->values[partner * n + i] - fresh;
            sum += x;
            squares += x * x;
        }
        *owner += squares / (replicas - 1);
        *pair += 2 * (squares - sum * sum / replicas) / (replicas - 1);
    }
}

/* Stores this call's changes, which are number `changes`, and returns them. The first call has
 * values but no changes. */
static const float *keep_changes(struct ln_series *series, uint64_t changes, size_t n) {
    float *change = series->change + changes % LOSSYNET_RING * n;
    for (size_t i = 0; i < n; i++) {
        change[i] = series->now[i] - series->last[i];
        series->last[i] = series->now[i];
    }
    return change;
}

/* products[k]: sum over the sample of x and the change k calls ago, 0 if there is none. */
static void multiply(const float *x, const struct ln_series *series, uint64_t changes, size_t n,
                     double products[LOSSYNET_RING]) {
    for (uint64_t lag = 0; lag < LOSSYNET_RING; lag++) {
        const float *then = series->change + (changes - lag) % LOSSYNET_RING * n;
        products[lag] = 0;
        for (size_t i = 0; lag < changes && i < n; i++) {
            products[lag] += (double)x[i] * (double)then[i];
        }
    }
}

static void correlations(const double covariance[LOSSYNET_RING], double rho[LOSSYNET_LAGS]) {
    for (int k = 0; k < LOSSYNET_LAGS; k++)
        rho[k] = covariance[0] > 0 ? covariance[k + 1] / covariance[0] : 0;
}

/* What the lead adds to the drift between owner and worker: of what the owner has, g, and of g with
 * the changes that the worker lacks. */
static double drift_of_offset(const struct ln_drift_state *drift, double p, double s,
                              uint64_t changes) {
    const size_t n = (size_t)drift->samples;
    double squares = 0, older = p /* P(A > k) */, products[LOSSYNET_RING], common = 0;
    for (size_t i = 0; i < n; i++) {
        drift->model.offset[i] = drift->fresh.now[i] - drift->sent.now[i];
        squares += (double)drift->model.offset[i] * (double)drift->model.offset[i];
    }
    multiply(drift->model.offset, &drift->sent, changes, n, products);
    for (int k = 0; k < LOSSYNET_RING; k++, older *= s) common += older * products[k];
    return squares + 2 * common;
}

/* The probability that a packet which is stale, as a share p of them is, stays so in the next step. */
static double stays_stale(const struct lossynet_comm *comm, double p) {
    const struct ln_partition *partition = &comm->partition;
    const double mean = comm->loss.mean_run;
    if (comm->loss.model == LOSS_OUTAGE) return 1 - 1 / mean;
    if (comm->loss.model != LOSS_BURST || p >= 1) return p;
    const int draws = 1 + ln_retransmission_rounds(comm, LOSSYNET_PARAMETER);
    const double once = pow(p, 1.0 / draws), length = fmax(-1, 1 - 1 / (mean * (1 - once)));
    double packets = 0;
    for (int w = 0; w < partition->workers; w++)
        packets += (double)ln_partition_owner_packets(partition, w) / partition->workers;
    return pow(once + (1 - once) * pow(length, round(packets)), draws);
}

/* Whether replicas grow older in a way that the formulas do not describe. */
static bool is_unlike(const struct lossynet_comm *comm) {
    const enum ln_loss_model model = comm->loss.model;
    return model == LOSS_TRACE || model == LOSS_REPLAY || comm->loss.at.count > 0 ||
           (model == LOSS_OUTAGE && (comm->loss.fate != FATE_LINK ||
                                     ln_retransmission_rounds(comm, LOSSYNET_PARAMETER) > 0));
}

/* The drift that is to be expected, from what owners sent. covariance: that of fresh values. */
static void expect(struct lossynet_comm *comm, const double covariance[LOSSYNET_RING], double p,
                   uint64_t changes, struct lossynet_drift *out) {
    struct ln_drift_state *drift = &comm->drift;
    const size_t n = (size_t)drift->samples;
    const double scale = (double)comm->partition.elements / drift->samples;
    const double s = stays_stale(comm, p);
    const float *change = keep_changes(&drift->sent, changes, n);
    double of_sent[LOSSYNET_RING], rho[LOSSYNET_LAGS], offset = 0;
    if (drift->lead != 0) drift->led_until = changes + LOSSYNET_RING;
    if (changes <= drift->led_until)
        multiply(change, &drift->sent, changes, n, of_sent);
    else /* owners sent fresh values */
        memcpy(of_sent, covariance, sizeof of_sent);
    correlations(of_sent, rho);
    if (drift->lead != 0) offset = scale * drift_of_offset(drift, p, s, changes);
    out->expected_owner = offset + owner_drift(p, s, scale * of_sent[0], rho, LOSSYNET_LAGS);
    out->expected_pair = pair_drift(comm->partition.groups.count, p, s, scale * of_sent[0], rho,
                                    LOSSYNET_LAGS, out->expected_owner);
    if (is_unlike(comm)) out->expected_owner = out->expected_pair = NAN;
}

/* How far the mean of all replicas is behind the model, along the model's last change and in units
 * of it. An owner is exact. Rounding errors of replicas are noise here, since they do not depend on
 * the change. */
static double measure_lag(const struct lossynet_comm *comm) {
    const struct ln_drift_state *drift = &comm->drift;
    const struct ln_partition *partition = &comm->partition;
    const size_t n = (size_t)drift->samples;
    const int replicas = partition->groups.count;
    double along = 0, squares = 0;
    for (size_t i = 0; i < n; i++) {
        const double model = drift->model.value[i], change = drift->model.change[i];
        double behind = 0;
        for (int g = 0; g < replicas; g++) {
            const int partner = ln_partner(partition, drift->owner[i], g);
            if (partner != drift->owner[i])
                behind += model - (double)drift->values[(size_t)partner * n + i];
        }
        along += behind / replicas * change;
        squares += change * change;
    }
    return squares > 0 ? along / squares : 0;
}

static lossynet_status gather_ages(struct lossynet_comm *comm) {
    struct ln_ages *mine = comm->drift.ages;
    size_t packets = comm->partition.packets;
#pragma omp parallel for num_threads(ln_threads_for_marks(comm)) schedule(static)
    for (int v = 0; v < comm->workers.local; v++) {
        const uint32_t *age = comm->arrivals.age + (size_t)v * packets;
        const int worker = comm->workers.first + v;
        struct ln_ages a = {.expected = comm->stats.totals[v].expected,
                            .arrived = comm->stats.totals[v].arrived};
        if (comm->feedback.late) a.late = comm->feedback.late[v];
        for (int phase = 0; phase < 2; phase++)
            if (comm->retransmission.first[phase])
                a.first[phase] = comm->retransmission.first[phase][v];
        for (size_t p = 0; p < packets; p++) {
            a.sum += age[p];
            if (age[p] > a.largest) a.largest = age[p];
            a.aged[age[p] < LOSSYNET_RING ? age[p] : LOSSYNET_RING]++;
        }
        for (int owner = 0; owner < comm->workers.count; owner++)
            if (owner != worker && ln_is_partner(&comm->partition, worker, owner))
                a.packets += ln_partition_owner_packets(&comm->partition, owner);
        a.aged[0] -= packets - a.packets; /* packets that the worker does not receive */
        mine[v] = a;
    }
    return lossynet_all_gather_later(comm, mine, comm->drift.all_ages, sizeof *mine);
}

/* Adds up the ages of all workers. */
static void sum_ages(const struct lossynet_comm *comm, struct ln_ages *total) {
    const struct ln_ages *all = comm->drift.all_ages;
    *total = (struct ln_ages){0};
    for (int w = 0; w < comm->workers.count; w++) {
        total->sum += all[w].sum;
        total->packets += all[w].packets;
        total->expected += all[w].expected;
        total->arrived += all[w].arrived;
        total->late.late += all[w].late.late;
        total->late.others += all[w].late.others;
        for (int phase = 0; phase < 2; phase++) {
            total->first[phase].expected += all[w].first[phase].expected;
            total->first[phase].arrived += all[w].first[phase].arrived;
        }
        if (all[w].largest > total->largest) total->largest = all[w].largest;
        for (int k = 0; k <= LOSSYNET_RING; k++) total->aged[k] += all[w].aged[k];
    }
}

/* Shares of packets of age 0, 1, ...; the last: this age or more. */
static void share_ages(const struct ln_ages *ages, double share[LOSSYNET_AGES]) {
    for (int k = 0; ages->packets && k <= LOSSYNET_RING; k++)
        share[k < LOSSYNET_AGES ? k : LOSSYNET_AGES - 1] +=
            (double)ages->aged[k] / (double)ages->packets;
}

/* Whether anything is measured. The lead and rounds of retransmission need it even without a
 * sample. */
static bool is_measured(const struct lossynet_comm *comm) {
    const bool *rounds = comm->retransmission.measured;
    return comm->partition.groups.count > 1 &&
           (comm->drift.samples > 0 || comm->lead.wanted || rounds[0] || rounds[1]);
}

lossynet_status ln_drift_begin(struct lossynet_comm *comm, float *const *vectors) {
    if (!is_measured(comm)) return LOSSYNET_OK;
    comm->drift.lead = comm->lead.used;
    lossynet_status status = gather_ages(comm);
    if (status || comm->drift.samples == 0) return status;
    return gather_values(comm, vectors);
}

void ln_drift_end(struct lossynet_comm *comm, struct lossynet_drift *out) {
    struct ln_drift_state *drift = &comm->drift;
    *out = (struct lossynet_drift){0};
    if (!is_measured(comm)) return;
    comm->steps.unmeasured = false;
    struct ln_ages ages;
    sum_ages(comm, &ages);
    ln_rounds_add(comm, &ages);
    share_ages(&ages, out->age_share);
    out->mean_age = ages.packets ? (double)ages.sum / (double)ages.packets : 0;
    out->max_age = ages.largest;
    out->lead = drift->lead;
    if (drift->samples == 0) {
        ln_lead_add(comm, &ages, NULL);
        return;
    }
    keep_model(comm);

    double scale = (double)comm->partition.elements / drift->samples;
    measure_distances(comm, &out->pair, &out->owner);
    out->pair *= scale;
    out->owner *= scale;
    double covariance[LOSSYNET_RING];
    const size_t n = (size_t)drift->samples;
    const uint64_t changes = drift->measured++; /* number of changes, this one included */
    multiply(keep_changes(&drift->fresh, changes, n), &drift->fresh, changes, n, covariance);
    ln_lead_add(comm, &ages, covariance);
    out->lag = measure_lag(comm);
    out->sigma2 = scale * covariance[0];
    correlations(covariance, out->rho);

    const double p = ages.expected ? 1 - (double)ages.arrived / (double)ages.expected : 0;
    expect(comm, covariance, p, changes, out);
    out->paper_pair = lossynet_drift_paper(p, out->sigma2);
}

lossynet_status ln_drift_settle(struct lossynet_comm *comm) {
    const bool *rounds = comm->retransmission.measured;
    const bool wanted = comm->lead.wanted || rounds[0] || rounds[1];
    if (!comm->steps.unmeasured || !wanted || comm->steps.skips ||
        comm->partition.groups.count == 1)
        return LOSSYNET_OK;
    struct ln_ages ages;
    lossynet_status status = gather_ages(comm);
    if (!status) status = ln_aside_exchange(comm, false);
    if (status) return status;
    comm->steps.unmeasured = false;
    sum_ages(comm, &ages);
    ln_rounds_add(comm, &ages);
    ln_lead_add(comm, &ages, NULL);
    return LOSSYNET_OK;
}
