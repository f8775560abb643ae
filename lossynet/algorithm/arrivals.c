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
static uint64_t count_bucket(const struct lossynet_comm *comm, lossynet_phase phase, int v,
                             int bucket, int owner, const uint8_t *link) {
    const int buckets = comm->partition.buckets;
    const int of = phase == LOSSYNET_GRADIENT ? comm->steps.current : comm->steps.of_broadcast;
    struct lossynet_bucket *count =
        &comm->stats.buckets[of][(size_t)v * (size_t)buckets + (size_t)bucket];
    const size_t *row =
        comm->partition.owner_packet + (size_t)owner * (size_t)(buckets + 1) + bucket;
    uint64_t there = 0;
    for (size_t k = row[0]; k < row[1]; k++) there += link[k];
    count->expected[phase] += row[1] - row[0];
    count->arrived[phase] += there;
    return there;
}

void ln_arrivals_count(const struct lossynet_comm *comm, lossynet_phase phase, int v,
                       uint64_t *expected, uint64_t *arrived) {
    *expected = *arrived = 0;
    for (int sender = 0; sender < comm->workers.count; sender++) {
        size_t n;
        const uint8_t *link = ln_arrived(comm, phase, v, sender, &n);
        if (sender == comm->workers.first + v) continue;
        const int owner = phase == LOSSYNET_GRADIENT ? comm->workers.first + v : sender;
        uint64_t there = 0;
        for (int b = 0; n > 0 && b < comm->partition.buckets; b++)
            there += count_bucket(comm, phase, v, b, owner, link);
        struct ln_total *total = &comm->arrivals.total[(size_t)v * comm->workers.count + sender];
        total->expected += n;
        total->arrived += there;
        *expected += n;
        *arrived += there;
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
