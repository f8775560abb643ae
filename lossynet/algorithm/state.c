/* state.c — saves and loads what a comm remembers from step to step, so that a run can be resumed.
 *
 *     of one worker    counts of packets that arrived for it, the age of each packet, and the burst
 *                      states of its links;
 *                      with error feedback also its residual and the masses of packets for it
 *     of all workers   the changes of the drift sample, the sums of the lead and of the number of
 *                      rounds, the same on every rank
 *
 * Nothing else is remembered. Injected loss is a pure function of the step (loss_model.c; also
 * bursts, except chains that never decide). Masks and counters live for one step.
 *
 * A worker's state does not depend on its rank, so a run may be resumed with the workers spread
 * over other processes. It does depend on shards and packets: their fingerprint is the first number
 * of the bytes, and bytes of a comm with other shards or packets are refused.
 */
#include "lossynet/algorithm/algorithm.h"

#include <math.h>
#include <string.h>

enum { STATE_VERSION = 1 };

struct worker_state {
    uint64_t fingerprint;
    double unused[2]; /* 0; states of version 0.1.0 have counts of an estimator that is gone */
    struct ln_total total;
    /* After it: uint64_t chain[2][workers]; uint32_t age[packets];
     * with error feedback: float residual[elements], mass[workers][its packets] */
};

struct common_state {
    uint64_t fingerprint;
    uint64_t measured;
    /* After it, what the drift sample remembers: float fresh[samples], its change[RING][samples];
     * then struct ln_lead_sums, float model[samples]; then struct ln_rounds_sums; then float
     * sent[samples], its change[RING][samples]. States of earlier versions end before one of these */
};

/* A hash of how vectors are cut, and of whose state it is. */
static uint64_t fingerprint(const struct lossynet_comm *comm, int worker) {
    const struct ln_partition *partition = &comm->partition;
    uint64_t hash = ln_mix(STATE_VERSION);
    for (int i = 0; i <= partition->buckets * comm->workers.count; i++) {
        hash = ln_mix(hash ^ partition->shard_element[i]);
        hash = ln_mix(hash ^ partition->shard_packet[i]);
    }
    hash = ln_mix(hash ^ (uint64_t)comm->workers.count);
    const uint64_t groups = ln_groups_fingerprint(&partition->groups);
    if (groups > 1) hash = ln_mix(hash ^ groups);
    hash = ln_mix(hash ^ partition->packet_elements);
    hash = ln_mix(hash ^ (uint64_t)(int64_t)worker);
    if (worker != LOSSYNET_ALL_WORKERS) return hash;
    /* which elements are sampled (drift.c) */
    hash = ln_mix(hash ^ (uint64_t)comm->drift.samples);
    return ln_mix(hash ^ comm->loss.seed);
}

static size_t drift_floats(const struct lossynet_comm *comm) {
    return (size_t)comm->drift.samples * (1 + LOSSYNET_RING);
}

static size_t chain_words(const struct lossynet_comm *comm) { /* of a worker, both phases */
    return 2 * (size_t)comm->workers.count;
}

static size_t mass_bytes(const struct lossynet_comm *comm, int worker) {
    return ln_partition_owner_packets(&comm->partition, worker) * (size_t)comm->workers.count *
           sizeof(float);
}

static size_t residual_bytes(const struct lossynet_comm *comm) {
    return comm->partition.elements * sizeof(float);
}

/* Bytes of the shared state in versions before the lead. */
static size_t early_common_bytes(const struct lossynet_comm *comm) {
    return sizeof(struct common_state) + drift_floats(comm) * sizeof(float);
}

/* Bytes of the shared state in versions that do not measure rounds. */
static size_t lead_common_bytes(const struct lossynet_comm *comm) {
    return early_common_bytes(comm) + sizeof comm->lead.sums +
           (size_t)comm->drift.samples * sizeof(float);
}

/* Bytes of the shared state in versions that do not remember what owners sent. */
static size_t rounds_common_bytes(const struct lossynet_comm *comm) {
    return lead_common_bytes(comm) + sizeof comm->retransmission.sums;
}

size_t lossynet_state_bytes(const struct lossynet_comm *comm, int worker) {
    if (worker == LOSSYNET_ALL_WORKERS)
        return rounds_common_bytes(comm) + drift_floats(comm) * sizeof(float);
    return sizeof(struct worker_state) + chain_words(comm) * sizeof(uint64_t) +
           comm->partition.packets * sizeof(uint32_t) +
           (comm->feedback.mass ? residual_bytes(comm) + mass_bytes(comm, worker) : 0);
}

static void save_series(const struct ln_series *series, size_t n, char *out) {
    memcpy(out, series->last, n * sizeof(float));
    memcpy(out + n * sizeof(float), series->change, n * LOSSYNET_RING * sizeof(float));
}

static void load_series(struct ln_series *series, size_t n, const char *bytes) {
    memcpy(series->last, bytes, n * sizeof(float));
    memcpy(series->change, bytes + n * sizeof(float), n * LOSSYNET_RING * sizeof(float));
}

static void save_common(const struct lossynet_comm *comm, char *out) {
    const struct ln_drift_state *drift = &comm->drift;
    struct common_state state = {fingerprint(comm, LOSSYNET_ALL_WORKERS), drift->measured};
    size_t n = (size_t)drift->samples;
    char *sent = out + rounds_common_bytes(comm);
    memcpy(out, &state, sizeof state);
    out += sizeof state;
    char *tail = out + drift_floats(comm) * sizeof(float);
    memcpy(tail, &comm->lead.sums, sizeof comm->lead.sums);
    memcpy(tail + sizeof comm->lead.sums + n * sizeof(float), &comm->retransmission.sums,
           sizeof comm->retransmission.sums);
    if (n == 0) return;
    save_series(&drift->fresh, n, out);
    memcpy(tail + sizeof comm->lead.sums, drift->model.value, n * sizeof(float));
    save_series(&drift->sent, n, sent);
}

static uint64_t *chain_of(const struct lossynet_comm *comm, int phase, int v) {
    uint64_t *chain = comm->arrivals.chain;
    return chain ? chain + ((size_t)phase * comm->workers.local + v) * (size_t)comm->workers.count
                 : NULL;
}

static void save_worker(const struct lossynet_comm *comm, int v, char *out) {
    struct worker_state state = {
        fingerprint(comm, comm->workers.first + v), {0}, comm->stats.totals[v]};
    memcpy(out, &state, sizeof state);
    out += sizeof state;
    for (int phase = 0; phase < 2; phase++, out += (size_t)comm->workers.count * sizeof(uint64_t)) {
        const uint64_t *chain = chain_of(comm, phase, v);
        if (chain)
            memcpy(out, chain, (size_t)comm->workers.count * sizeof *chain);
        else
            memset(out, 0, (size_t)comm->workers.count * sizeof *chain);
    }
    memcpy(out, comm->arrivals.age + (size_t)v * comm->partition.packets,
           comm->partition.packets * sizeof *comm->arrivals.age);
    if (!comm->feedback.mass) return;
    out += comm->partition.packets * sizeof *comm->arrivals.age;
    ln_feedback_save(comm, v, out);
    memcpy(out + residual_bytes(comm), ln_feedback_mass(comm, v),
           mass_bytes(comm, comm->workers.first + v));
}

void lossynet_state_save(const struct lossynet_comm *comm, int worker, void *out) {
    if (worker == LOSSYNET_ALL_WORKERS)
        save_common(comm, (char *)out);
    else
        save_worker(comm, worker - comm->workers.first, (char *)out);
}

/* Whether n floats or doubles (`wide`) are finite and, with `counts`, not negative. Bytes need not be
 * aligned. */
static bool are_sound(const char *bytes, size_t n, bool wide, bool counts) {
    for (size_t i = 0; i < n; i++) {
        double x;
        float narrow;
        if (wide)
            memcpy(&x, bytes + i * sizeof x, sizeof x);
        else
            memcpy(&narrow, bytes + i * sizeof narrow, sizeof narrow), x = (double)narrow;
        if (!isfinite(x) || (counts && x < 0)) return false;
    }
    return true;
}

static bool are_sound_rounds(const char *bytes) {
    struct ln_rounds_sums sums;
    memcpy(&sums, bytes, sizeof sums);
    for (int phase = 0; phase < 2; phase++)
        if (!(sums.lost[phase] >= 0 && sums.lost[phase] <= sums.sent[phase]) ||
            !isfinite(sums.sent[phase]) || sums.rounds[phase] > LOSSYNET_ROUNDS_MOST)
            return false;
    return true;
}

static bool load_common(struct lossynet_comm *comm, const char *bytes, size_t count) {
    const bool early = count == early_common_bytes(comm);
    struct ln_drift_state *drift = &comm->drift;
    struct common_state state;
    size_t n = (size_t)drift->samples;
    const size_t sent = rounds_common_bytes(comm); /* where what owners sent begins */
    const char *start = bytes;
    memcpy(&state, bytes, sizeof state);
    if (state.fingerprint != fingerprint(comm, LOSSYNET_ALL_WORKERS)) return false;
    bytes += sizeof state;
    const char *tail = bytes + drift_floats(comm) * sizeof(float);
    const char *model = tail + sizeof comm->lead.sums, *sums = model + n * sizeof(float);
    if (!are_sound(bytes, drift_floats(comm), false, false) ||
        (!early && (!are_sound(tail, sizeof comm->lead.sums / sizeof(double), true, false) ||
                    !are_sound(model, n, false, false))) ||
        (count >= sent && !are_sound_rounds(sums)) ||
        (count > sent && !are_sound(start + sent, drift_floats(comm), false, false)))
        return false;
    drift->measured = state.measured;
    if (!early) memcpy(&comm->lead.sums, tail, sizeof comm->lead.sums);
    if (count >= sent) memcpy(&comm->retransmission.sums, sums, sizeof comm->retransmission.sums);
    if (n == 0) return true;
    load_series(&drift->fresh, n, bytes);
    load_series(&drift->sent, n, count > sent ? start + sent : bytes);
    drift->led_until = drift->measured + LOSSYNET_RING;
    memcpy(drift->model.value, early ? bytes : model, n * sizeof(float));
    return true;
}

/* Checks that the worker's own packets have age 0. They never age, and counting relies on it. */
static bool own_packets_are_fresh(const struct lossynet_comm *comm, int worker, const char *ages) {
    const struct ln_partition *partition = &comm->partition;
    for (int b = 0; b < partition->buckets; b++) {
        const size_t *packet = partition->shard_packet + (size_t)b * comm->workers.count + worker;
        for (size_t p = packet[0]; p < packet[1]; p++) {
            uint32_t age;
            memcpy(&age, ages + p * sizeof age, sizeof age);
            if (age) return false;
        }
    }
    return true;
}

static bool load_worker(struct lossynet_comm *comm, int v, const char *bytes) {
    struct worker_state state;
    const char *chains = bytes + sizeof state,
               *ages = chains + chain_words(comm) * sizeof(uint64_t);
    memcpy(&state, bytes, sizeof state);
    if (state.fingerprint != fingerprint(comm, comm->workers.first + v)) return false;
    if (!own_packets_are_fresh(comm, comm->workers.first + v, ages)) return false;
    const char *residual = ages + comm->partition.packets * sizeof *comm->arrivals.age;
    if (comm->feedback.mass &&
        (!are_sound(residual, comm->partition.elements, false, false) ||
         !are_sound(residual + residual_bytes(comm),
                    mass_bytes(comm, comm->workers.first + v) / sizeof(float), false, true)))
        return false;
    comm->stats.totals[v] = state.total;
    for (int phase = 0; phase < 2;
         phase++, chains += (size_t)comm->workers.count * sizeof(uint64_t)) {
        uint64_t *chain = chain_of(comm, phase, v);
        if (chain) memcpy(chain, chains, (size_t)comm->workers.count * sizeof *chain);
    }
    memcpy(comm->arrivals.age + (size_t)v * comm->partition.packets, ages,
           comm->partition.packets * sizeof *comm->arrivals.age);
    if (!comm->feedback.mass) return true;
    ages += comm->partition.packets * sizeof *comm->arrivals.age;
    ln_feedback_load(comm, v, ages);
    memcpy(ln_feedback_mass(comm, v), ages + residual_bytes(comm),
           mass_bytes(comm, comm->workers.first + v));
    return true;
}

bool lossynet_state_load(struct lossynet_comm *comm, int worker, const void *bytes, size_t count) {
    if (worker == LOSSYNET_ALL_WORKERS) {
        return (count == early_common_bytes(comm) || count == lead_common_bytes(comm) ||
                count == rounds_common_bytes(comm) ||
                count == lossynet_state_bytes(comm, worker)) &&
               load_common(comm, (const char *)bytes, count);
    }
    if (count != lossynet_state_bytes(comm, worker)) return false;
    return load_worker(comm, worker - comm->workers.first, (const char *)bytes);
}
