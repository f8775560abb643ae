/* arrivals.c — notes which packets arrived, by (receiver, sender). acknowledge.c tells their senders.
 */
#include "lossynet/algorithm/algorithm.h"

#include <omp.h>

uint8_t *ln_scratch(const struct lossynet_comm *comm) {
    return comm->arrivals.scratch +
           (size_t)omp_get_thread_num() * 2 * comm->partition.largest_owner_packets;
}

void ln_arrivals_clear(struct lossynet_comm *comm, lossynet_phase phase) {
    for (int v = 0; v < comm->workers.local; v++) {
        for (int sender = 0; sender < comm->workers.count; sender++) {
            size_t n;
            uint8_t *arrived = ln_arrived(comm, phase, v, sender, &n);
            memset(arrived, sender == comm->workers.first + v, n);
        }
    }
}

/* Counts a link's packets of a bucket, and returns how many arrived. */
static uint64_t count_bucket(const struct lossynet_comm *comm, lossynet_phase phase,
                             struct lossynet_bucket *count, int bucket, int owner,
                             const uint8_t *link) {
    const size_t *row = comm->partition.owner_packet +
                        (size_t)owner * (size_t)(comm->partition.buckets + 1) + bucket;
    uint64_t there = 0;
    for (size_t k = row[0]; k < row[1]; k++) there += link[k];
    count->expected[phase] += row[1] - row[0];
    count->arrived[phase] += there;
    return there;
}

void ln_arrivals_count(const struct lossynet_comm *comm, lossynet_phase phase, int v) {
    const struct ln_partition *partition = &comm->partition;
    const bool gradient = phase == LOSSYNET_GRADIENT;
    const int of = gradient ? comm->steps.current : comm->steps.of_broadcast;
    const int worker = comm->workers.first + v;
    struct lossynet_counters *counters = &comm->stats.counters[of][v];
    struct lossynet_bucket *buckets = comm->stats.buckets[of] + (size_t)v * partition->buckets;
    for (int other = 0; other < comm->workers.count; other++) {
        size_t n;
        const uint8_t *link = ln_arrived(comm, phase, v, other, &n);
        if (other == worker) continue;
        uint64_t there = 0;
        for (int b = 0; n > 0 && b < partition->buckets; b++)
            there += count_bucket(comm, phase, &buckets[b], b, gradient ? worker : other, link);
        struct ln_total *total = &comm->arrivals.total[(size_t)v * comm->workers.count + other];
        total->expected += n;
        total->arrived += there;
        counters->expected[phase] += n;
        counters->arrived[phase] += there;
        if (ln_is_link(comm, phase, worker, other))
            counters->bytes[phase] += partition->owner_bytes[phase][gradient ? other : worker];
        if (gradient) continue;
        comm->stats.totals[v].expected += n;
        comm->stats.totals[v].arrived += there;
    }
}

void ln_arrivals_age(const struct lossynet_comm *comm, int v, uint64_t steps) {
    const struct ln_partition *partition = &comm->partition;
    uint32_t *age = comm->arrivals.age + (size_t)v * partition->packets;
    for (int owner = 0; owner < comm->workers.count; owner++) {
        if (!ln_is_partner(partition, comm->workers.first + v, owner)) continue;
        size_t n;
        const uint8_t *arrived = ln_arrived(comm, LOSSYNET_PARAMETER, v, owner, &n);
        for (int b = 0; b < partition->buckets; b++) {
            const size_t *shard = partition->shard_packet + (size_t)b * comm->workers.count + owner;
            for (size_t p = shard[0]; p < shard[1]; p++) {
                const bool fits = age[p] < UINT32_MAX - steps;
                age[p] = *arrived++ ? 0 : fits ? age[p] + (uint32_t)steps : UINT32_MAX;
            }
        }
    }
}

lossynet_status ln_arrivals_trace(struct lossynet_comm *comm, lossynet_phase phase, uint64_t step) {
    FILE *trace = comm->arrivals.trace;
    if (!trace) return LOSSYNET_OK;
    for (int v = 0; v < comm->workers.local; v++) {
        for (int sender = 0; sender < comm->workers.count; sender++) {
            size_t n;
            const uint8_t *arrived = ln_arrived(comm, phase, v, sender, &n);
            if (sender == comm->workers.first + v || n == 0) continue;
            ln_loss_trace_link(trace, step, phase, sender, comm->workers.first + v, arrived, n);
        }
    }
    const struct ln_log_target *before = ln_log_use(&comm->resources.log);
    const lossynet_status status = ln_loss_trace_flush(trace, comm->world.rank);
    ln_log_use(before);
    return status;
}

/* ---- open and close ---- */

void ln_arrivals_open(struct lossynet_comm *comm) {
    COMM_TAKE(comm, comm->arrivals.total,
              (size_t)comm->workers.local * (size_t)comm->workers.count);
    struct ln_arrivals *a = &comm->arrivals;
    const size_t local = (size_t)comm->workers.local, workers = (size_t)comm->workers.count;
    COMM_TAKE(comm, a->arrived[LOSSYNET_GRADIENT], ln_links(comm, true));
    COMM_TAKE(comm, a->arrived[LOSSYNET_PARAMETER], ln_links(comm, false));
    COMM_TAKE(comm, a->own_start, local);
    COMM_TAKE(comm, a->age, local * comm->partition.packets);
    COMM_TAKE(comm, a->scratch,
              (size_t)comm->resources.threads * 2 * comm->partition.largest_owner_packets);
    if (comm->loss.model == LOSS_BURST || comm->loss.model == LOSS_OUTAGE)
        COMM_TAKE(comm, a->chain, 2 * local * workers);
    for (int v = 1; a->own_start && v < comm->workers.local; v++)
        a->own_start[v] =
            a->own_start[v - 1] +
            ln_partition_owner_packets(&comm->partition, comm->workers.first + v - 1) * workers;
}

void ln_arrivals_close(struct lossynet_comm *comm) {
    if (!comm->arrivals.trace) return;
    fputs(LOSSYNET_TRACE_END "\n", comm->arrivals.trace);
    fclose(comm->arrivals.trace);
}
