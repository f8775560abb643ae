/* parameter.c — the PARAMETER phase: every owner sends its shards to all workers.
 *
 * A packet that arrives overwrites the worker's elements. Elements that do not arrive stay as they
 * were, and their packet ages by one step. Owners send values, never differences. So one arrival
 * makes up for all earlier losses, and this bounds the drift (drift.c). Owners may send values that
 * are ahead of their own, so that replicas do not lag behind the model on average (lead.c). A
 * packet is fresh at a worker when its age is 0. An owner's own packets never age. Lost packets may
 * be sent again (retransmit.c).
 *
 * Within a rank, packets that arrive are copied from the owner's vector (elements.c); packets next
 * to one another are one copy. Copies read shards of their owner and write shards of others, so the
 * order of workers does not matter. In vectors that the host cannot access, all packets are copied
 * by one call, after the last round of retransmission.
 */
#include "lossynet/algorithm/calls.h"

#include <stdlib.h>
#include <string.h>

/* ---- where owners have their shards ---- */

lossynet_status lossynet_shards(struct lossynet_comm *comm, const struct lossynet_shard *shard) {
    LN_EXPECT(NULL, comm, LN_NO_COMM);
    const size_t shards = (size_t)comm->workers.local * (size_t)comm->partition.buckets;
    bool complete = shard && shards > 0;
    for (size_t i = 0; complete && i < shards; i++) complete = shard[i].average && shard[i].value;
    const struct ln_log_target *log = &comm->resources.log;
    if (!complete)
        return ln_fail_at(log, LOSSYNET_INVALID,
                          "shards apart: expected memory for both averages and values");
    if (comm->resources.memory.copy)
        return ln_fail_at(log, LOSSYNET_INVALID,
                          "shards apart: expected vectors in the host's memory");
    if (!comm->resources.shard) comm->resources.shard = malloc(shards * sizeof *shard);
    if (!comm->resources.shard)
        return ln_fail_at(log, LOSSYNET_NO_MEMORY, "out of memory for the list of %zu shards",
                          shards);
    memcpy(comm->resources.shard, shard, shards * sizeof *shard);
    return LOSSYNET_OK;
}

/* ---- copies within the rank ---- */

/* Copies the owner's packets whose mask[k] is set to local worker `to`, and notes that they
 * arrived. mask is in order of (bucket, packet). */
static void copy_arrived(const struct lossynet_comm *comm, float *const *vectors, int owner, int to,
                         const uint8_t *mask) {
    const struct ln_partition *partition = &comm->partition;
    const int v = owner - comm->workers.first;
    size_t n;
    uint8_t *arrived = ln_arrived(comm, LOSSYNET_PARAMETER, to - comm->workers.first, owner, &n);
    for (size_t k = 0; k < n; k++) arrived[k] |= mask[k];
    for (int b = 0; b < partition->buckets && !comm->resources.memory.broadcast; b++) {
        size_t start, count, packets = ln_shard_packets(partition, b, owner);
        ln_shard_span(partition, owner, b, &start, &count);
        const float *source = ln_sent(comm, comm->lead.ahead, vectors[v], v, b);
        for (size_t k = 0; k < packets;) {
            size_t run = k;
            while (run < packets && mask[run]) run++;
            if (run > k) {
                size_t from = k * partition->packet_elements,
                       until = run * partition->packet_elements;
                if (until > count) until = count;
                const struct ln_rounding r =
                    ln_rounding_of(comm, LOSSYNET_PARAMETER, owner, start + from);
                void *elements = ln_element(comm, vectors[to - comm->workers.first], start + from);
                if (comm->resources.bf16)
                    ln_elements_narrow(&r, (uint16_t *)elements, source + from, until - from);
                else
                    ln_elements_copy(&r, (float *)elements, source + from, until - from);
            }
            k = run + 1;
        }
        mask += packets;
    }
}

/* ---- the phase ---- */

/* Copies packets between workers of the rank. The outer loop is over owners: all receivers read one
 * owner's shards while these are in the cache. */
static void copy_local(const struct lossynet_comm *comm, float *const *vectors, bool lossless) {
#pragma omp parallel for collapse(2) schedule(static) num_threads(                                 \
    comm->resources.memory.broadcast ? ln_threads_for_marks(comm) : ln_threads_for_workers(comm))
    for (int s = 0; s < comm->workers.local; s++) {
        for (int v = 0; v < comm->workers.local; v++) {
            int owner = comm->workers.first + s, to = comm->workers.first + v;
            if (s == v || !ln_is_partner(&comm->partition, to, owner)) continue;
            size_t n = ln_partition_owner_packets(&comm->partition, owner);
            uint8_t *mask = ln_scratch(comm);
            ln_injected(comm, LOSSYNET_PARAMETER, owner, to, n, lossless, mask);
            copy_arrived(comm, vectors, owner, to, mask);
        }
    }
}

/* Sends the packets for the first time, or in a round of retransmission. */
static void send(struct lossynet_comm *comm, float *const *vectors, bool lossless) {
    if (comm->transport) {
        ln_exchange_send(comm, LOSSYNET_PARAMETER, vectors, lossless);
        ln_transport_receive_begin(comm->transport, LOSSYNET_PARAMETER);
        ln_exchange_ready_all(comm, LOSSYNET_PARAMETER);
    }
    copy_local(comm, vectors, lossless);
}

/* Makes the rounds of retransmission. */
static lossynet_status retransmit(struct lossynet_comm *comm, float *const *vectors) {
    lossynet_status status = LOSSYNET_OK;
    const int rounds = ln_retransmission_rounds(comm, LOSSYNET_PARAMETER);
    for (comm->steps.round = 1; comm->steps.round <= rounds && !status; comm->steps.round++) {
        if (comm->transport) status = ln_transport_end(comm->transport, LOSSYNET_PARAMETER);
        if (comm->steps.round == 1) ln_rounds_count(comm, LOSSYNET_PARAMETER);
        if (!status) status = ln_retransmission_ask(comm, LOSSYNET_PARAMETER);
        if (!status) send(comm, vectors, false);
    }
    comm->steps.round = 0;
    return status;
}

/* Copies what has arrived in vectors that the host cannot access. */
static void copy_there(const struct lossynet_comm *comm, float *const *vectors) {
    const struct lossynet_memory *memory = &comm->resources.memory;
    memory->broadcast(memory->context, vectors, comm->lead.ahead,
                      comm->arrivals.arrived[LOSSYNET_PARAMETER],
                      ln_wire_bits(comm, LOSSYNET_PARAMETER));
}

static int rounds_of(const struct lossynet_comm *comm, bool lossless) {
    return lossless ? 0 : ln_retransmission_rounds(comm, LOSSYNET_PARAMETER);
}

/* repaired: rounds were made, and what had arrived before them is counted. */
static lossynet_status end(struct lossynet_comm *comm, bool repaired) {
    if (!comm->steps.broadcasting) return LOSSYNET_OK;
    comm->steps.broadcasting = false;
    lossynet_status status = LOSSYNET_OK;
    if (comm->transport) status = ln_transport_end(comm->transport, LOSSYNET_PARAMETER);
    if (status) return status;
    if (!repaired) ln_rounds_count(comm, LOSSYNET_PARAMETER);
#pragma omp parallel for num_threads(ln_threads_for_marks(comm)) schedule(static)
    for (int v = 0; v < comm->workers.local; v++) {
        ln_arrivals_age(comm, v, 1);
        ln_arrivals_count(comm, LOSSYNET_PARAMETER, v);
    }
    comm->steps.unmeasured = true;
    ln_rule_receive(comm);
    return ln_arrivals_trace(comm, LOSSYNET_PARAMETER, comm->steps.broadcast_step);
}

/* Sends, and decides what arrives within the rank. vectors NULL: only decides. */
static lossynet_status begin(struct lossynet_comm *comm, float *const *vectors, bool lossless) {
    lossynet_status status = lossynet_broadcast_end(comm);
    if (status || comm->workers.count == 1) return status;
    status = ln_acknowledge_settle(comm);
    if (status) return status;
    comm->steps.broadcast_step = comm->steps.step;
    comm->steps.of_broadcast = comm->steps.current;
    status = ln_drift_settle(comm);
    if (status) return status;
    ln_arrivals_clear(comm, LOSSYNET_PARAMETER);
    ln_rounds_choose(comm);
    send(comm, vectors, lossless);
    comm->steps.broadcasting = vectors != NULL;
    return rounds_of(comm, lossless) ? retransmit(comm, vectors) : LOSSYNET_OK;
}

lossynet_status lossynet_broadcast_prepare(struct lossynet_comm *comm, bool lossless) {
    LN_EXPECT(NULL, comm, LN_NO_COMM);
    /* What was measured of the last broadcast decides how this one is sent (drift.c). */
    if (!comm->resources.memory.broadcast || comm->steps.unmeasured) return LOSSYNET_OK;
    const lossynet_status status = begin(comm, NULL, lossless);
    comm->steps.prepared = !status && comm->workers.count > 1;
    return status;
}

lossynet_status lossynet_broadcast_begin(struct lossynet_comm *comm, float *const *vectors,
                                         bool lossless) {
    lossynet_status status = ln_phase_check(comm, vectors, __func__);
    if (status) return status;
    COMM_EXPECT(comm, !comm->steps.reducing, "expected lossynet_reduce before it");
    if (comm->steps.prepared)
        comm->steps.broadcasting = true;
    else
        status = begin(comm, vectors, lossless);
    comm->steps.prepared = false;
    if (status || comm->workers.count == 1) return status;
    if (comm->resources.memory.broadcast) copy_there(comm, vectors);
    comm->averaging.rule.vectors = vectors;
    const bool repaired = rounds_of(comm, lossless) > 0;
    const bool waits = repaired || comm->averaging.rule.functions.receive;
    return waits ? end(comm, repaired) : LOSSYNET_OK;
}

lossynet_status lossynet_bucket_wait(struct lossynet_comm *comm, int bucket, double *waited) {
    COMM_EXPECT(comm, COMM_BUCKET(comm, bucket));
    if (waited) *waited = 0;
    if (!comm->steps.broadcasting || !comm->transport ||
        ln_transport_bucket_is_over(comm->transport, LOSSYNET_PARAMETER, bucket))
        return LOSSYNET_OK;
    double start = ln_now();
    lossynet_status status = ln_transport_wait_bucket(comm->transport, LOSSYNET_PARAMETER, bucket);
    if (waited) *waited = ln_now() - start;
    return status;
}

lossynet_status lossynet_broadcast_end(struct lossynet_comm *comm) {
    LN_EXPECT(NULL, comm, LN_NO_COMM);
    return end(comm, false);
}

lossynet_status lossynet_broadcast(struct lossynet_comm *comm, float *const *vectors,
                                   bool lossless) {
    lossynet_status status = lossynet_broadcast_begin(comm, vectors, lossless);
    return status ? status : lossynet_broadcast_end(comm);
}

/* ---- fresh elements ---- */

/* First element of a packet. */
static size_t packet_element(const struct ln_partition *partition, size_t packet) {
    if (packet >= partition->packets) return partition->elements;
    const size_t shard = ln_last_until(partition->shard_packet,
                                       (size_t)partition->buckets * partition->workers, packet);
    return partition->shard_element[shard] +
           (packet - partition->shard_packet[shard]) * partition->packet_elements;
}

bool lossynet_next_fresh(const struct lossynet_comm *comm, int worker, size_t *cursor,
                         size_t *offset, size_t *count) {
    /* Packets are numbered in order of their elements and without gaps. So a run of fresh packets
     * is a run of elements. */
    const uint32_t *age = lossynet_ages(comm, worker);
    COMM_DEMAND(comm, cursor && offset && count, LN_NO_OUTPUT);
    const struct ln_partition *partition = &comm->partition;
    size_t first = *cursor;
    while (first < partition->packets && age[first]) first++;
    size_t last = first;
    while (last < partition->packets && !age[last]) last++;
    *cursor = last;
    if (first == last) return false;
    *offset = packet_element(partition, first);
    *count = packet_element(partition, last) - *offset;
    return true;
}

/* ---- the model ---- */

size_t lossynet_packet_elements(const struct lossynet_comm *comm) {
    LN_DEMAND(NULL, comm, LN_NO_COMM);
    return comm->partition.packet_elements;
}

const uint32_t *lossynet_ages(const struct lossynet_comm *comm, int worker) {
    COMM_DEMAND(comm, COMM_LOCAL(comm, worker));
    return comm->arrivals.age + (size_t)(worker - comm->workers.first) * comm->partition.packets;
}

/* `fresh` holds only this bucket's elements. */
static lossynet_status gather_bucket(struct lossynet_comm *comm, float *const *vectors, int bucket,
                                     float *fresh) {
    const struct ln_partition *partition = &comm->partition;
    const size_t *start = partition->shard_element + (size_t)bucket * comm->workers.count;
#pragma omp parallel for num_threads(ln_threads_for_workers(comm)) schedule(static)
    for (int v = 0; v < comm->workers.local; v++) {
        size_t offset, count;
        ln_shard_span(partition, comm->workers.first + v, bucket, &offset, &count);
        const float *owned = ln_shard_of(comm, vectors[v], v, bucket).value;
        float *to = fresh + (offset - start[0]);
        if (comm->resources.memory.copy)
            comm->resources.memory.copy(to, owned, count * sizeof *to);
        else
            memcpy(to, owned, count * sizeof *to);
    }
    if (!comm->transport) return LOSSYNET_OK;
    /* The shards of a rank's workers follow one another. */
    for (int r = 0; r <= comm->world.ranks; r++)
        comm->stats.gather_offset[r] =
            (start[(size_t)r * comm->workers.local] - start[0]) * sizeof *fresh;
    return ln_transport_gather(comm->transport, fresh, comm->stats.gather_offset, NULL);
}

lossynet_status lossynet_gather_bucket(struct lossynet_comm *comm, float *const *vectors,
                                       int bucket, float *fresh) {
    lossynet_status status = ln_vectors_check(comm, vectors, __func__);
    if (status) return status;
    COMM_EXPECT(comm, COMM_BUCKET(comm, bucket));
    COMM_EXPECT(comm, fresh, LN_NO_OUTPUT);
    return gather_bucket(comm, vectors, bucket, fresh);
}

lossynet_status lossynet_gather_fresh(struct lossynet_comm *comm, float *const *vectors,
                                      float *fresh) {
    lossynet_status status = ln_vectors_check(comm, vectors, __func__);
    if (status) return status;
    COMM_EXPECT(comm, fresh, LN_NO_OUTPUT);
    const struct ln_partition *partition = &comm->partition;
    for (int v = 0; v < comm->workers.local; v++)
        COMM_EXPECT(comm, fresh != vectors[v], "expected other memory than that of a vector");
    for (int b = 0; b < partition->buckets && !status; b++)
        status = gather_bucket(comm, vectors, b,
                               fresh + partition->shard_element[(size_t)b * comm->workers.count]);
    return status;
}
