/* stats.c — small all-gathers that always arrive, and the counters that they sum up.
 *
 * A gather costs an exchange with every rank, however few bytes it carries. So gathers whose result
 * is not needed at once are put aside, and the next gather carries them. Rank r's part of such an
 * exchange is what its workers gave to the first gather put aside, then to the second, and so on.
 */
#include "lossynet/algorithm/algorithm.h"

#include <stdlib.h>
#include <string.h>

/* ---- gathers ---- */

void ln_aside_open(struct lossynet_comm *comm) {
    struct ln_aside *aside = &comm->stats.aside;
    aside->room = sizeof(struct lossynet_counters) + sizeof(struct ln_ages) +
                  (size_t)comm->drift.samples * (sizeof(float) + ln_has_blocks(&comm->partition)) +
                  sizeof(uint64_t) /* not_finite.c */ + LOSSYNET_ASIDE_BYTES;
    if (comm->world.ranks == 1) return;
    COMM_TAKE(comm, aside->mine, aside->room * (size_t)comm->workers.local);
    COMM_TAKE(comm, aside->together, aside->room * (size_t)comm->workers.count);
    COMM_TAKE(comm, aside->came, (size_t)comm->world.ranks);
}

void ln_aside_close(struct lossynet_comm *comm) {
    free(comm->stats.aside.mine);
    free(comm->stats.aside.together);
    free(comm->stats.aside.came);
}

/* Sets the offsets for parts of `part` bytes from each rank. */
static void offsets(struct lossynet_comm *comm, size_t part) {
    for (int r = 0; r <= comm->world.ranks; r++) comm->stats.gather_offset[r] = part * (size_t)r;
}

/* Gathers parts of `part` bytes, in place. What owners have to tell senders goes with them, if there
 * is room. */
static lossynet_status gather(struct lossynet_comm *comm, void *all, size_t part) {
    const struct ln_acks *acks = &comm->arrivals.acks;
    if (acks->due && part <= acks->room) return ln_arrivals_gather(comm, all, part);
    lossynet_status status = ln_arrivals_settle(comm);
    if (status) return status;
    offsets(comm, part);
    return ln_transport_gather(comm->transport, all, comm->stats.gather_offset);
}

/* Exchanges everything that was put aside. In a pulse, the parts of late ranks keep their old
 * values. */
static lossynet_status exchange_aside(struct lossynet_comm *comm, bool pulse) {
    struct ln_aside *aside = &comm->stats.aside;
    const size_t part = aside->bytes;
    const int count = aside->count;
    aside->count = 0;
    aside->bytes = 0;
    if (!count) return LOSSYNET_OK;
    memcpy(aside->together + part * (size_t)comm->world.rank, aside->mine, part);
    lossynet_status status;
    if (pulse) {
        offsets(comm, part);
        status = ln_transport_pulse(comm->transport, aside->together, comm->stats.gather_offset,
                                    aside->came);
    } else {
        status = gather(comm, aside->together, part);
    }
    for (int r = 0; status == LOSSYNET_OK && r < comm->world.ranks; r++) {
        const char *from = aside->together + part * (size_t)r;
        if (pulse && !aside->came[r]) continue;
        for (int i = 0; i < count; i++) {
            const size_t bytes = aside->item[i].bytes;
            memcpy((char *)aside->item[i].all + bytes * (size_t)r, from, bytes);
            from += bytes;
        }
    }
    return status;
}

/* Whether there is room to put another `part` bytes of this rank aside. */
static bool fits(const struct lossynet_comm *comm, size_t part) {
    const struct ln_aside *aside = &comm->stats.aside;
    return aside->count < LOSSYNET_ASIDE_MOST &&
           aside->bytes + part <= aside->room * (size_t)comm->workers.local;
}

lossynet_status ln_aside_gather(struct lossynet_comm *comm) {
    return exchange_aside(comm, false);
}

lossynet_status lossynet_all_gather_later(struct lossynet_comm *comm, const void *mine, void *all,
                                          size_t bytes) {
    struct ln_aside *aside = &comm->stats.aside;
    const size_t part = bytes * (size_t)comm->workers.local;
    if (!comm->transport || !fits(comm, part)) return lossynet_all_gather(comm, mine, all, bytes);
    memcpy(aside->mine + aside->bytes, mine, part);
    aside->item[aside->count++] = (struct ln_aside_item){all, part};
    aside->bytes += part;
    return LOSSYNET_OK;
}

lossynet_status lossynet_all_gather(struct lossynet_comm *comm, const void *mine, void *all,
                                    size_t bytes) {
    const size_t part = bytes * (size_t)comm->workers.local;
    if (comm->stats.aside.count && fits(comm, part)) {
        lossynet_status status = lossynet_all_gather_later(comm, mine, all, bytes);
        return status ? status : ln_aside_gather(comm);
    }
    lossynet_status status = ln_aside_gather(comm);
    if (status) return status;
    memcpy((char *)all + part * (size_t)comm->world.rank, mine, part);
    return comm->transport ? gather(comm, all, part) : LOSSYNET_OK;
}

lossynet_status lossynet_swap(struct lossynet_comm *comm, const void *out, const size_t *out_offset,
                              void *in, const size_t *in_offset) {
    const size_t rank = (size_t)comm->world.rank, own = out_offset[rank + 1] - out_offset[rank];
    if (own) memcpy((char *)in + in_offset[rank], (const char *)out + out_offset[rank], own);
    if (!comm->transport) return LOSSYNET_OK;
    return ln_transport_swap(comm->transport, out, out_offset, in, in_offset);
}

lossynet_status lossynet_pulse(struct lossynet_comm *comm, const void *mine, void *all,
                               size_t bytes) {
    const size_t part = bytes * (size_t)comm->workers.local;
    lossynet_status status = ln_not_finite_tell(comm);
    if (status || !comm->steps.skips)
        return status ? status : lossynet_all_gather(comm, mine, all, bytes);
    if (!fits(comm, part)) {
        ln_log_at(&comm->resources.log,
                  "a pulse of %zu bytes for each worker: expected at most %d beside the report",
                  bytes, LOSSYNET_ASIDE_BYTES);
        return LOSSYNET_INVALID;
    }
    status = lossynet_all_gather_later(comm, mine, all, bytes);
    return status ? status : exchange_aside(comm, true);
}

/* ---- counters ---- */

static lossynet_status counters_begin(struct lossynet_comm *comm, uint64_t step) {
    const int which = comm->steps.step == step ? comm->steps.current : !comm->steps.current;
    struct lossynet_counters *mine = comm->stats.counters[which];
    uint64_t now[LOSSYNET_EVENTS] = {0};
    if (comm->transport) ln_transport_counters(comm->transport, now);
    /* Network events belong to the rank; its first worker reports them. */
    for (int e = 0; e < LOSSYNET_EVENTS; e++) {
        mine->network[e] = now[e] - comm->stats.reported[e];
        comm->stats.reported[e] = now[e];
    }
    mine->network[LOSSYNET_PACE] = now[LOSSYNET_PACE];
    /* So the counters of a late rank stay 0: those it sent last belong to an earlier step. */
    memset(comm->stats.gathered, 0, (size_t)comm->workers.count * sizeof *mine);
    return lossynet_all_gather_later(comm, mine, comm->stats.gathered, sizeof *mine);
}

static void counters_end(const struct lossynet_comm *comm, struct lossynet_counters *out) {
    const struct lossynet_counters *all = comm->stats.gathered;
    *out = (struct lossynet_counters){0};
    for (int w = 0; w < comm->workers.count; w++) {
        for (int phase = 0; phase < 2; phase++) {
            out->expected[phase] += all[w].expected[phase];
            out->arrived[phase] += all[w].arrived[phase];
            out->bytes[phase] += all[w].bytes[phase];
            out->resent[phase] += all[w].resent[phase];
        }
        for (int e = 0; e < LOSSYNET_EVENTS; e++) out->network[e] += all[w].network[e];
    }
}

lossynet_status lossynet_step_counters(struct lossynet_comm *comm, uint64_t step,
                                       struct lossynet_counters *out) {
    lossynet_status status = counters_begin(comm, step);
    if (!status) status = ln_aside_gather(comm);
    *out = (struct lossynet_counters){0};
    if (!status) counters_end(comm, out);
    return status;
}

lossynet_status lossynet_step_buckets(struct lossynet_comm *comm, uint64_t step,
                                      struct lossynet_bucket *out) {
    const size_t buckets = (size_t)comm->partition.buckets;
    const int which = comm->steps.step == step ? comm->steps.current : !comm->steps.current;
    struct lossynet_bucket *all = malloc((size_t)comm->workers.count * buckets * sizeof *all);
    if (!all) {
        ln_log_at(&comm->resources.log, "no memory for the counts of %zu buckets", buckets);
        return LOSSYNET_NO_MEMORY;
    }
    const lossynet_status status =
        lossynet_all_gather(comm, comm->stats.buckets[which], all, buckets * sizeof *all);
    memset(out, 0, buckets * sizeof *out);
    for (size_t i = 0; !status && i < (size_t)comm->workers.count * buckets; i++)
        for (int phase = 0; phase < 2; phase++) {
            out[i % buckets].expected[phase] += all[i].expected[phase];
            out[i % buckets].arrived[phase] += all[i].arrived[phase];
            out[i % buckets].resent[phase] += all[i].resent[phase];
        }
    free(all);
    return status;
}

lossynet_status lossynet_lost_between(struct lossynet_comm *comm, float *lost) {
    const size_t workers = (size_t)comm->workers.count, local = (size_t)comm->workers.local;
    float *mine = lost + (size_t)comm->workers.first * workers;
    lossynet_status status = ln_aside_gather(comm);
    for (size_t i = 0; i < local * workers; i++) {
        const struct ln_total *total = &comm->arrivals.total[i];
        mine[i] =
            total->expected ? 1 - (float)((double)total->arrived / (double)total->expected) : 0;
    }
    if (status || !comm->transport) return status;
    return gather(comm, lost, local * workers * sizeof *lost);
}

/* ---- the report of a step ---- */

lossynet_status lossynet_report_begin(struct lossynet_comm *comm, uint64_t step,
                                      float *const *vectors) {
    lossynet_status status = ln_drift_begin(comm, vectors);
    return status ? status : counters_begin(comm, step);
}

lossynet_status lossynet_report_end(struct lossynet_comm *comm, struct lossynet_counters *counters,
                                    struct lossynet_drift *drift) {
    lossynet_status status = ln_aside_gather(comm);
    if (status) return status;
    counters_end(comm, counters);
    ln_drift_end(comm, drift);
    return LOSSYNET_OK;
}

lossynet_status lossynet_drift_measure(struct lossynet_comm *comm, float *const *vectors,
                                       struct lossynet_drift *out) {
    lossynet_status status = ln_drift_begin(comm, vectors);
    if (!status) status = ln_aside_gather(comm);
    *out = (struct lossynet_drift){0};
    if (!status) ln_drift_end(comm, out);
    return status;
}
