/* rank_state.c — see rank_state.h. */
#include "llmc/comm/rank_state.h"

void state_of_owner(const struct data_parallel *d, const struct worker *w, struct state_part *out) {
    const bool alone = d->placement.steps_alone;
    *out = (struct state_part){.whole = {0, d->layout->count, 0}};
    out->range = alone ? &out->whole : w->range;
    out->ranges = alone ? 1 : (size_t)d->layout->buckets;
    out->elements = alone ? d->layout->count : w->owned;
}

size_t state_take(const struct data_parallel *d, const struct worker *w,
                  const struct state_part *part) {
    struct state_part mine;
    struct range here, there;
    size_t taken = 0;
    state_of_owner(d, w, &mine);
    for (size_t k = 0; k < part->ranges; k++) {
        for (size_t i = 0;
             ranges_next(mine.range, mine.ranges, part->range[k], &i, &here, &there);) {
            for (int a = 0; a < ARRAYS; a++)
                if (part->array[a])
                    d->be->upload(worker_array(w, (enum array)a) + here.state,
                                  part->array[a] + there.state * sizeof(float),
                                  here.count * sizeof(float));
            taken += here.count;
        }
    }
    return taken;
}
