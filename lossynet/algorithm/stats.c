/* stats.c — small messages that always arrive, and the counters summed with them. */
#include "lossynet/algorithm/algorithm.h"

#include <string.h>

lossynet_status lossynet_all_gather(struct lossynet_comm *comm, const void *mine, void *all,
                                    size_t bytes) {
    size_t part = bytes * (size_t)comm->local;
    memcpy((char *)all + part * (size_t)comm->world.rank, mine, part);
    if (!comm->transport) return LOSSYNET_OK;
    for (int r = 0; r <= comm->world.ranks; r++) comm->stats.gather_offset[r] = part * (size_t)r;
    return lossynet_transport_gather(comm->transport, all, comm->stats.gather_offset);
}

lossynet_status lossynet_step_counters(struct lossynet_comm *comm, uint64_t step,
                                       struct lossynet_counters *out) {
    struct lossynet_counters *all = comm->stats.gathered, *mine = comm->stats.counters[step % 2];
    uint64_t now[LOSSYNET_EVENTS] = {0};
    if (comm->transport) lossynet_transport_counters(comm->transport, now);
    /* Of the rank: its first worker tells them. */
    for (int e = 0; e < LOSSYNET_EVENTS; e++) {
        mine->network[e] = now[e] - comm->stats.reported[e];
        comm->stats.reported[e] = now[e];
    }
    mine->network[LOSSYNET_PACE] = now[LOSSYNET_PACE];
    lossynet_status status = lossynet_all_gather(comm, mine, all, sizeof *all);
    *out = (struct lossynet_counters){0};
    for (int w = 0; status == LOSSYNET_OK && w < comm->workers; w++) {
        for (int phase = 0; phase < 2; phase++) {
            out->expected[phase] += all[w].expected[phase];
            out->arrived[phase] += all[w].arrived[phase];
            out->bytes[phase] += all[w].bytes[phase];
            out->resent[phase] += all[w].resent[phase];
        }
        for (int e = 0; e < LOSSYNET_EVENTS; e++) out->network[e] += all[w].network[e];
    }
    return status;
}
