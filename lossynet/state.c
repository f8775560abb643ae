/* state.c — what a net remembers from step to step, as bytes, so that a run can be resumed.
 *
 *     of a worker     how much of its gradients arrived (`ht`), how many of its parameter packets
 *                     did, the age of each packet, and where the bursts of its links stand
 *                     and, where losses are carried, what it sent in vain and their masses
 *     of all          the changes of the drift sample, the same on every rank
 *
 * Nothing else is remembered: injected loss is a pure function of the step (loss.c; bursts too,
 * but for chains that never decide), masks and counters live for one step.
 *
 * A worker's state does not depend on the rank it lives in, so a run may be resumed with the
 * workers spread over other processes. It does depend on shards and packets: bytes that come from a
 * net cut in another way are recognised by their first number and refused.
 */
#include "lossynet/internal.h"

#include <string.h>

enum { STATE_VERSION = 1 };

struct worker_state {
    uint64_t fingerprint;
    struct lossynet_history history;
    struct lossynet_total total;
    /* uint64_t chain[2][workers]; uint32_t age[packets];
     * carry: float residual[elements], mass[workers][its packets] */
};

struct common_state {
    uint64_t fingerprint;
    uint64_t measured;
    /* float fresh[samples], change[RING][samples] */
};

/* Of how vectors are cut, and whose state it is. */
static uint64_t fingerprint(const struct lossynet *net, int worker) {
    const struct lossynet_layout *layout = &net->layout;
    uint64_t hash = lossynet_mix(STATE_VERSION);
    for (int i = 0; i <= layout->buckets * net->workers; i++) {
        hash = lossynet_mix(hash ^ layout->shard_element[i]);
        hash = lossynet_mix(hash ^ layout->shard_packet[i]);
    }
    hash = lossynet_mix(hash ^ (uint64_t)net->workers);
    hash = lossynet_mix(hash ^ layout->packet_elements);
    hash = lossynet_mix(hash ^ (uint64_t)(int64_t)worker);
    if (worker != LOSSYNET_ALL_WORKERS) return hash;
    /* which elements are sampled (drift.c) */
    hash = lossynet_mix(hash ^ (uint64_t)net->drift.samples);
    return lossynet_mix(hash ^ net->loss.seed);
}

static size_t drift_floats(const struct lossynet *net) {
    return (size_t)net->drift.samples * (1 + LOSSYNET_RING);
}

static size_t chain_words(const struct lossynet *net) { /* of a worker, both phases */
    return 2 * (size_t)net->workers;
}

static size_t mass_bytes(const struct lossynet *net, int worker) {
    return lossynet_layout_owner_packets(&net->layout, worker) * (size_t)net->workers *
           sizeof(float);
}

static size_t residual_bytes(const struct lossynet *net) {
    return net->layout.elements * sizeof(float);
}

size_t lossynet_state_bytes(const struct lossynet *net, int worker) {
    if (worker == LOSSYNET_ALL_WORKERS)
        return sizeof(struct common_state) + drift_floats(net) * sizeof(float);
    return sizeof(struct worker_state) + chain_words(net) * sizeof(uint64_t) +
           net->layout.packets * sizeof(uint32_t) +
           (net->carry.residual ? residual_bytes(net) + mass_bytes(net, worker) : 0);
}

static void save_common(const struct lossynet *net, char *out) {
    const struct lossynet_drift_state *drift = &net->drift;
    struct common_state state = {fingerprint(net, LOSSYNET_ALL_WORKERS), drift->measured};
    size_t n = (size_t)drift->samples;
    memcpy(out, &state, sizeof state);
    out += sizeof state;
    if (n == 0) return;
    memcpy(out, drift->fresh, n * sizeof(float));
    memcpy(out + n * sizeof(float), drift->change, n * LOSSYNET_RING * sizeof(float));
}

static void save_worker(const struct lossynet *net, int v, char *out) {
    struct worker_state state = {fingerprint(net, net->first + v), net->history[v], net->totals[v]};
    memcpy(out, &state, sizeof state);
    out += sizeof state;
    for (int phase = 0; phase < 2; phase++, out += (size_t)net->workers * sizeof(uint64_t)) {
        const uint64_t *chain = lossynet_chain(net, (lossynet_phase)phase, v, 0);
        if (chain)
            memcpy(out, chain, (size_t)net->workers * sizeof *chain);
        else
            memset(out, 0, (size_t)net->workers * sizeof *chain);
    }
    memcpy(out, net->age + (size_t)v * net->layout.packets, net->layout.packets * sizeof *net->age);
    if (!net->carry.residual) return;
    out += net->layout.packets * sizeof *net->age;
    memcpy(out, net->carry.residual + (size_t)v * net->layout.elements, residual_bytes(net));
    memcpy(out + residual_bytes(net), lossynet_carry_mass(net, v), mass_bytes(net, net->first + v));
}

void lossynet_state_save(const struct lossynet *net, int worker, void *out) {
    if (worker == LOSSYNET_ALL_WORKERS)
        save_common(net, (char *)out);
    else
        save_worker(net, worker - net->first, (char *)out);
}

static bool load_common(struct lossynet *net, const char *bytes) {
    struct lossynet_drift_state *drift = &net->drift;
    struct common_state state;
    size_t n = (size_t)drift->samples;
    memcpy(&state, bytes, sizeof state);
    if (state.fingerprint != fingerprint(net, LOSSYNET_ALL_WORKERS)) return false;
    drift->measured = state.measured;
    bytes += sizeof state;
    if (n == 0) return true;
    memcpy(drift->fresh, bytes, n * sizeof(float));
    memcpy(drift->change, bytes + n * sizeof(float), n * LOSSYNET_RING * sizeof(float));
    return true;
}

/* A worker's own packets never age, and counting relies on it. */
static bool own_packets_are_fresh(const struct lossynet *net, int worker, const char *ages) {
    const struct lossynet_layout *layout = &net->layout;
    for (int b = 0; b < layout->buckets; b++) {
        const size_t *packet = layout->shard_packet + (size_t)b * net->workers + worker;
        for (size_t p = packet[0]; p < packet[1]; p++) {
            uint32_t age;
            memcpy(&age, ages + p * sizeof age, sizeof age);
            if (age) return false;
        }
    }
    return true;
}

static bool load_worker(struct lossynet *net, int v, const char *bytes) {
    struct worker_state state;
    const char *chains = bytes + sizeof state, *ages = chains + chain_words(net) * sizeof(uint64_t);
    memcpy(&state, bytes, sizeof state);
    if (state.fingerprint != fingerprint(net, net->first + v)) return false;
    if (!own_packets_are_fresh(net, net->first + v, ages)) return false;
    net->history[v] = state.history;
    net->totals[v] = state.total;
    for (int phase = 0; phase < 2; phase++, chains += (size_t)net->workers * sizeof(uint64_t)) {
        uint64_t *chain = lossynet_chain(net, (lossynet_phase)phase, v, 0);
        if (chain) memcpy(chain, chains, (size_t)net->workers * sizeof *chain);
    }
    memcpy(net->age + (size_t)v * net->layout.packets, ages,
           net->layout.packets * sizeof *net->age);
    if (!net->carry.residual) return true;
    ages += net->layout.packets * sizeof *net->age;
    memcpy(net->carry.residual + (size_t)v * net->layout.elements, ages, residual_bytes(net));
    memcpy(lossynet_carry_mass(net, v), ages + residual_bytes(net),
           mass_bytes(net, net->first + v));
    return true;
}

bool lossynet_state_load(struct lossynet *net, int worker, const void *bytes, size_t count) {
    if (count != lossynet_state_bytes(net, worker)) return false;
    if (worker == LOSSYNET_ALL_WORKERS) return load_common(net, (const char *)bytes);
    return load_worker(net, worker - net->first, (const char *)bytes);
}
