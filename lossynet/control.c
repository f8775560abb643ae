/* control.c — small messages that always arrive, and the counters summed with them. */
#include "lossynet/internal.h"

#include <string.h>

lossynet_status lossynet_all_gather(struct lossynet *net, const void *mine, void *all,
                                    size_t bytes) {
    size_t part = bytes * (size_t)net->local;
    memcpy((char *)all + part * (size_t)net->world.rank, mine, part);
    if (!net->link) return LOSSYNET_OK;
    for (int r = 0; r <= net->world.ranks; r++) net->gather_offset[r] = part * (size_t)r;
    return net->link->all_gather(net->link, all, net->gather_offset);
}

void lossynet_network_counters(const struct lossynet *net, struct lossynet_counters *out) {
    *out = (struct lossynet_counters){0};
    if (!net->link || !net->link->counters) return;
    struct lossynet_link_counters link;
    net->link->counters(net->link, &link);
    const struct lossynet_rejected *r = &net->rejected;
    out->late = link.late + r->stale;
    out->duplicate = r->duplicate;
    out->rejected = link.foreign + link.corrupt + r->truncated + r->foreign + r->version +
                    r->invalid + r->not_finite;
    out->overruns = link.overruns;
    out->stragglers = net->stragglers;
}

lossynet_status lossynet_step_counters(struct lossynet *net, struct lossynet_counters *out) {
    struct lossynet_counters *all = net->gathered, *mine = net->counters, now;
    lossynet_network_counters(net, &now); /* of the rank: its first worker tells them */
    mine->late = now.late - net->reported.late;
    mine->duplicate = now.duplicate - net->reported.duplicate;
    mine->rejected = now.rejected - net->reported.rejected;
    mine->overruns = now.overruns - net->reported.overruns;
    mine->stragglers = now.stragglers - net->reported.stragglers;
    lossynet_status status = lossynet_all_gather(net, net->counters, all, sizeof *all);
    *out = (struct lossynet_counters){0};
    for (int w = 0; status == LOSSYNET_OK && w < net->workers; w++) {
        for (int phase = 0; phase < 2; phase++) {
            out->expected[phase] += all[w].expected[phase];
            out->arrived[phase] += all[w].arrived[phase];
            out->bytes[phase] += all[w].bytes[phase];
        }
        out->late += all[w].late;
        out->duplicate += all[w].duplicate;
        out->rejected += all[w].rejected;
        out->overruns += all[w].overruns;
        out->stragglers += all[w].stragglers;
    }
    return status;
}
