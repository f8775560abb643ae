/* stats.c — the counters of a step, its report, and the pulse.
 */
#include "lossynet/algorithm/calls.h"

#include <stdlib.h>
#include <string.h>

/* ---- counters ---- */

/* Which of the counters are those of a step; -1: none. */
static int which_of(const struct lossynet_comm *comm, uint64_t step) {
    const int now = comm->steps.current;
    return step == LN_NO_STEP                  ? -1
           : comm->stats.step[now] == step     ? now
           : comm->stats.step[1 - now] == step ? 1 - now
                                               : -1;
}

#define KNOWS(which, step)                                                                         \
    (which) >= 0, "step %llu: expected the present step, or the one before",                       \
        (unsigned long long)(step)

static lossynet_status counters_begin(struct lossynet_comm *comm, int which) {
    struct lossynet_counters *mine = comm->stats.counters[which];
    uint64_t now[LOSSYNET_EVENTS] = {0};
    struct ln_relayed relayed = {0};
    if (comm->transport) ln_transport_counters(comm->transport, now, &relayed);
    /* Network events and second hops belong to the rank; its first worker reports them. */
    for (int phase = 0; phase < 2; phase++) {
        mine->resent[phase] += relayed.packets[phase] - comm->stats.relayed.packets[phase];
        mine->bytes[phase] += relayed.bytes[phase] - comm->stats.relayed.bytes[phase];
    }
    comm->stats.relayed = relayed;
    for (int e = 0; e < LOSSYNET_EVENTS; e++) {
        mine->network[e] = now[e] - comm->stats.reported[e];
        comm->stats.reported[e] = now[e];
    }
    mine->network[LOSSYNET_PACE] = now[LOSSYNET_PACE];
    /* So the counters of a late rank stay 0: those it sent last belong to an earlier step. */
    memset(comm->stats.gathered, 0, (size_t)comm->workers.count * sizeof *mine);
    return lossynet_all_gather_later(comm, mine, comm->stats.gathered, sizeof *mine);
}

/* Adds counts, a struct of nothing but uint64_t. */
static void add(void *sum, const void *counts, size_t bytes) {
    uint64_t *to = sum;
    const uint64_t *from = counts;
    for (size_t i = 0; i < bytes / sizeof *to; i++) to[i] += from[i];
}

static void counters_end(const struct lossynet_comm *comm, struct lossynet_counters *out) {
    const struct lossynet_counters *all = comm->stats.gathered;
    *out = (struct lossynet_counters){0};
    for (int w = 0; w < comm->workers.count; w++) add(out, &all[w], sizeof *out);
}

lossynet_status lossynet_step_counters(struct lossynet_comm *comm, uint64_t step,
                                       struct lossynet_counters *out) {
    COMM_EXPECT(comm, out, LN_NO_OUTPUT);
    const int which = which_of(comm, step);
    COMM_EXPECT(comm, KNOWS(which, step));
    lossynet_status status = counters_begin(comm, which);
    if (!status) status = ln_aside_exchange(comm, false);
    *out = (struct lossynet_counters){0};
    if (!status) counters_end(comm, out);
    return status;
}

lossynet_status lossynet_step_buckets(struct lossynet_comm *comm, uint64_t step,
                                      struct lossynet_bucket *out) {
    COMM_EXPECT(comm, out, LN_NO_OUTPUT);
    const size_t buckets = (size_t)comm->partition.buckets;
    const int which = which_of(comm, step);
    COMM_EXPECT(comm, KNOWS(which, step));
    struct lossynet_bucket *all = malloc((size_t)comm->workers.count * buckets * sizeof *all);
    if (!all)
        return ln_fail_at(&comm->resources.log, LOSSYNET_NO_MEMORY,
                          "no memory for the counts of %zu buckets", buckets);
    /* As network events they belong to the rank; its first worker reports them. */
    struct lossynet_bucket *mine = comm->stats.buckets[which];
    for (int phase = 0; comm->transport && phase < 2; phase++)
        for (int b = 0; b < comm->partition.buckets; b++)
            ln_transport_late(comm->transport, (lossynet_phase)phase, b, &mine[b].late[phase]);
    const lossynet_status status = lossynet_all_gather(comm, mine, all, buckets * sizeof *all);
    memset(out, 0, buckets * sizeof *out);
    for (size_t i = 0; !status && i < (size_t)comm->workers.count * buckets; i++)
        add(&out[i % buckets], &all[i], sizeof *out);
    free(all);
    return status;
}

lossynet_status lossynet_lost_between(struct lossynet_comm *comm, float *lost) {
    COMM_EXPECT(comm, lost, LN_NO_OUTPUT);
    const size_t workers = (size_t)comm->workers.count, local = (size_t)comm->workers.local;
    float *mine = lost + (size_t)comm->workers.first * workers;
    lossynet_status status = ln_aside_exchange(comm, false);
    for (size_t i = 0; i < local * workers; i++) {
        const struct ln_total *total = &comm->arrivals.total[i];
        mine[i] =
            total->expected ? 1 - (float)((double)total->arrived / (double)total->expected) : 0;
    }
    if (status || !comm->transport) return status;
    return ln_gather(comm, lost, local * workers * sizeof *lost);
}

/* ---- the report of a step ---- */

lossynet_status lossynet_report_begin(struct lossynet_comm *comm, uint64_t step,
                                      float *const *vectors) {
    lossynet_status status = ln_vectors_check(comm, vectors, __func__);
    if (status) return status;
    const int which = which_of(comm, step);
    COMM_EXPECT(comm, KNOWS(which, step));
    status = ln_drift_begin(comm, vectors);
    comm->stats.reporting = true;
    return status ? status : counters_begin(comm, which);
}

lossynet_status lossynet_report_end(struct lossynet_comm *comm, struct lossynet_counters *counters,
                                    struct lossynet_drift *drift) {
    COMM_EXPECT(comm, comm->stats.reporting, "expected lossynet_report_begin before it");
    COMM_EXPECT(comm, counters && drift, LN_NO_OUTPUT);
    comm->stats.reporting = false;
    lossynet_status status = ln_aside_exchange(comm, false);
    if (status) return status;
    counters_end(comm, counters);
    ln_drift_end(comm, drift);
    return LOSSYNET_OK;
}

lossynet_status lossynet_drift_measure(struct lossynet_comm *comm, float *const *vectors,
                                       struct lossynet_drift *out) {
    lossynet_status status = ln_vectors_check(comm, vectors, __func__);
    if (status) return status;
    COMM_EXPECT(comm, out, LN_NO_OUTPUT);
    status = ln_drift_begin(comm, vectors);
    if (!status) status = ln_aside_exchange(comm, false);
    *out = (struct lossynet_drift){0};
    if (!status) ln_drift_end(comm, out);
    return status;
}

/* ---- the pulse ---- */

lossynet_status lossynet_pulse(struct lossynet_comm *comm, const void *mine, void *all,
                               size_t bytes) {
    COMM_EXPECT(comm, (mine && all) || !bytes, LN_NO_BYTES);
    const size_t part = bytes * (size_t)comm->workers.local;
    lossynet_status status = ln_not_finite_tell(comm);
    if (status || !comm->steps.skips)
        return status ? status : lossynet_all_gather(comm, mine, all, bytes);
    if (!ln_aside_fits(comm, part))
        return ln_fail_at(
            &comm->resources.log, LOSSYNET_INVALID,
            "a pulse of %zu bytes for each worker: expected at most %d beside the report", bytes,
            LOSSYNET_ASIDE_BYTES);
    status = lossynet_all_gather_later(comm, mine, all, bytes);
    return status ? status : ln_aside_exchange(comm, true);
}
