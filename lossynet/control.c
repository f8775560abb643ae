/* control.c — small messages that always arrive, and the counters summed with them. */
#include "lossynet/engine.h"

#include <string.h>

lossynet_status lossynet_all_gather(struct lossynet *net, const void *mine, void *all,
                                    size_t bytes) {
    size_t part = bytes * (size_t)net->local;
    memcpy((char *)all + part * (size_t)net->world.rank, mine, part);
    if (!net->link) return LOSSYNET_OK;
    for (int r = 0; r <= net->world.ranks; r++) net->gather_offset[r] = part * (size_t)r;
    return lossynet_gather(net, all, net->gather_offset);
}

void lossynet_network_counters(struct lossynet *net, uint64_t *events) {
    memset(events, 0, LOSSYNET_EVENTS * sizeof *events);
    if (!net->link) return;
    lossynet_engine_enter(net);
    const struct lossynet_rejected *r = &net->rejected;
    events[LOSSYNET_LATE] = r->late;
    events[LOSSYNET_DUPLICATE] = r->duplicate;
    events[LOSSYNET_REJECTED] =
        r->truncated + r->foreign + r->version + r->corrupt + r->invalid + r->not_finite;
    if (net->link->overruns) events[LOSSYNET_OVERRUN] = net->link->overruns(net->link);
    events[LOSSYNET_STRAGGLER] = net->stragglers;
    lossynet_engine_leave(net);
}

lossynet_status lossynet_step_counters(struct lossynet *net, uint64_t step,
                                       struct lossynet_counters *out) {
    struct lossynet_counters *all = net->gathered, *mine = net->counters[step % 2];
    uint64_t now[LOSSYNET_EVENTS];
    lossynet_network_counters(net, now); /* of the rank: its first worker tells them */
    for (int e = 0; e < LOSSYNET_EVENTS; e++) {
        mine->network[e] = now[e] - net->reported[e];
        net->reported[e] = now[e];
    }
    mine->network[LOSSYNET_PACE] = net->link ? (uint64_t)(net->engine->pace.rate * 8e-3) : 0;
    lossynet_status status = lossynet_all_gather(net, mine, all, sizeof *all);
    *out = (struct lossynet_counters){0};
    for (int w = 0; status == LOSSYNET_OK && w < net->workers; w++) {
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
