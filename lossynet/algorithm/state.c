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
#include "lossynet/algorithm/calls.h"

#include <math.h>
#include <string.h>

enum { STATE_VERSION = 1, PARTS_MOST = 10 };

enum content {
    FINGERPRINT, /* must be equal */
    NUMBERS,     /* any uint64_t */
    FLOATS,      /* finite */
    MASSES,      /* floats from 0 to 2^24, where adding 1 changes no float any more */
    DOUBLES,     /* finite */
    ROUNDS,      /* struct ln_rounds_sums */
    AGES,        /* uint32_t, of a worker's packets */
    RESIDUAL     /* bfloat16, finite, that ln_feedback_save writes */
};

struct part {
    void *at; /* what it is a copy of; NULL: it is zeros, which are not loaded */
    size_t bytes;
    enum content content;
};

struct parts { /* the form of a state: these, one after another */
    uint64_t fingerprint;
    int count;
    struct part part[PARTS_MOST];
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
    if (partition->groups.size > 1) hash = ln_mix(hash ^ (uint64_t)partition->groups.size);
    hash = ln_mix(hash ^ partition->packet_elements);
    hash = ln_mix(hash ^ (uint64_t)(int64_t)worker);
    if (worker != LOSSYNET_ALL_WORKERS) return hash;
    /* which elements are sampled (drift.c) */
    hash = ln_mix(hash ^ (uint64_t)comm->drift.samples);
    return ln_mix(hash ^ comm->loss.seed);
}

static void add(struct parts *p, void *at, size_t bytes, enum content content) {
    p->part[p->count++] = (struct part){.at = at, .bytes = bytes, .content = content};
}

static void add_common(struct lossynet_comm *comm, struct parts *p) {
    struct ln_drift_state *drift = &comm->drift;
    const size_t sample = (size_t)drift->samples * sizeof(float), ring = LOSSYNET_RING * sample;
    add(p, &drift->measured, sizeof drift->measured, NUMBERS);
    add(p, drift->fresh.last, sample, FLOATS);
    add(p, drift->fresh.change, ring, FLOATS);
    add(p, &comm->lead.sums, sizeof comm->lead.sums, DOUBLES);
    add(p, drift->model.value, sample, FLOATS);
    add(p, &comm->retransmission.sums, sizeof comm->retransmission.sums, ROUNDS);
    add(p, drift->sent.last, sample, FLOATS);
    add(p, drift->sent.change, ring, FLOATS);
}

static void add_worker(struct lossynet_comm *comm, int v, struct parts *p) {
    const size_t workers = (size_t)comm->workers.count, packets = comm->partition.packets;
    const size_t links = ln_partition_owner_packets(&comm->partition, comm->workers.first + v);
    uint64_t *chain = comm->arrivals.chain;
    add(p, &comm->stats.totals[v], sizeof comm->stats.totals[v], NUMBERS);
    for (size_t phase = 0; phase < 2; phase++)
        add(p, chain ? chain + (phase * (size_t)comm->workers.local + (size_t)v) * workers : NULL,
            workers * sizeof *chain, NUMBERS);
    add(p, comm->arrivals.age + (size_t)v * packets, packets * sizeof(uint32_t), AGES);
    if (!comm->feedback.mass) return;
    add(p, comm->feedback.mass, comm->partition.elements * sizeof(uint16_t), RESIDUAL);
    add(p, ln_feedback_mass(comm, v), links * workers * sizeof(float), MASSES);
}

static void find_parts(const struct lossynet_comm *comm, int worker, struct parts *p) {
    struct lossynet_comm *changed = (struct lossynet_comm *)comm; /* only by lossynet_state_load */
    memset(p, 0, sizeof *p);
    p->fingerprint = fingerprint(comm, worker);
    add(p, &p->fingerprint, sizeof p->fingerprint, FINGERPRINT);
    if (worker == LOSSYNET_ALL_WORKERS)
        add_common(changed, p);
    else
        add_worker(changed, worker - comm->workers.first, p);
}

size_t lossynet_state_bytes(const struct lossynet_comm *comm, int worker) {
    if (worker != LOSSYNET_ALL_WORKERS) COMM_DEMAND(comm, COMM_LOCAL(comm, worker));
    LN_DEMAND(NULL, comm, LN_NO_COMM);
    struct parts p;
    size_t bytes = 0;
    find_parts(comm, worker, &p);
    for (int i = 0; i < p.count; i++) bytes += p.part[i].bytes;
    return bytes;
}

void lossynet_state_save(const struct lossynet_comm *comm, int worker, void *out) {
    struct parts p;
    char *to = out;
    if (worker != LOSSYNET_ALL_WORKERS) COMM_DEMAND(comm, COMM_LOCAL(comm, worker));
    COMM_DEMAND(comm, out, LN_NO_OUTPUT);
    find_parts(comm, worker, &p);
    for (int i = 0; i < p.count; to += p.part[i++].bytes) {
        const struct part *part = &p.part[i];
        if (part->content == RESIDUAL)
            ln_feedback_save(comm, worker - comm->workers.first, to);
        else if (!part->at)
            memset(to, 0, part->bytes);
        else if (part->bytes)
            memcpy(to, part->at, part->bytes);
    }
}

/* Whether all numbers of `size` bytes (2: bfloat16, 4: float, 8: double) are finite and, with
 * `masses`, in the range of these. Bytes need not be aligned. */
static bool are_sound(const struct part *part, const char *bytes, size_t size, bool masses) {
    for (size_t i = 0; i < part->bytes; i += size) {
        double x;
        float narrow;
        uint16_t half;
        if (size == sizeof half)
            memcpy(&half, bytes + i, size), x = (double)ln_bf16_widen(half);
        else if (size == sizeof narrow)
            memcpy(&narrow, bytes + i, size), x = (double)narrow;
        else
            memcpy(&x, bytes + i, size);
        if (!isfinite(x) || (masses && !(x >= 0 && x <= 1 << 24))) return false;
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

static bool is_sound(const struct lossynet_comm *comm, int worker, const struct part *part,
                     const char *bytes) {
    switch (part->content) {
    case FINGERPRINT:
        return !memcmp(bytes, part->at, part->bytes);
    case FLOATS:
    case MASSES:
        return are_sound(part, bytes, sizeof(float), part->content == MASSES);
    case DOUBLES:
        return are_sound(part, bytes, sizeof(double), false);
    case RESIDUAL:
        return are_sound(part, bytes, sizeof(uint16_t), false);
    case ROUNDS:
        return are_sound_rounds(bytes);
    case AGES:
        return own_packets_are_fresh(comm, worker, bytes);
    default:
        return true;
    }
}

static void load_part(struct lossynet_comm *comm, int worker, const struct part *part,
                      const void *bytes) {
    if (part->content == RESIDUAL)
        ln_feedback_load(comm, worker - comm->workers.first, bytes);
    else if (part->at && part->bytes)
        memcpy(part->at, bytes, part->bytes);
}

bool lossynet_state_load(struct lossynet_comm *comm, int worker, const void *bytes, size_t count) {
    struct parts p;
    const char *from = bytes;
    LN_DEMAND(NULL, bytes, "expected bytes of lossynet_state_save, got NULL");
    if (count != lossynet_state_bytes(comm, worker)) return false;
    find_parts(comm, worker, &p);
    for (int i = 0; i < p.count; from += p.part[i++].bytes)
        if (!is_sound(comm, worker, &p.part[i], from)) return false;
    from = bytes;
    for (int i = 0; i < p.count; from += p.part[i++].bytes)
        load_part(comm, worker, &p.part[i], from);
    if (worker == LOSSYNET_ALL_WORKERS)
        comm->drift.led_until = comm->drift.measured + LOSSYNET_RING;
    return true;
}
