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

lossynet_status lossynet_step_counters(struct lossynet *net, struct lossynet_counters *out) {
    struct lossynet_counters *all = net->gathered;
    lossynet_status status = lossynet_all_gather(net, net->counters, all, sizeof *all);
    *out = (struct lossynet_counters){0};
    for (int w = 0; status == LOSSYNET_OK && w < net->workers; w++) {
        for (int phase = 0; phase < 2; phase++) {
            out->expected[phase] += all[w].expected[phase];
            out->arrived[phase] += all[w].arrived[phase];
            out->bytes[phase] += all[w].bytes[phase];
        }
    }
    return status;
}
