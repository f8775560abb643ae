/* rank_state.c — see rank_state.h. */
#include "llmc/comm/rank_state.h"

struct state_owner state_of_owner(const struct data_parallel *d, const struct worker *w) {
    const size_t P = d->layout->count;
    if (d->placement.steps_alone) return (struct state_owner){{0, P, 0}, 1, P};
    return (struct state_owner){.ranges = (size_t)d->layout->buckets, .elements = w->owned};
}

size_t state_take(const struct data_parallel *d, const struct worker *w, const struct range *range,
                  size_t ranges, const char *const array[ARRAYS]) {
    const struct state_owner mine = state_of_owner(d, w);
    const struct range *own = mine.all.count ? &mine.all : w->range;
    struct range here, there;
    size_t taken = 0;
    for (size_t k = 0; k < ranges; k++) {
        for (size_t i = 0; ranges_next(own, mine.ranges, range[k], &i, &here, &there);) {
            for (int a = 0; a < ARRAYS; a++)
                if (array[a])
                    d->be->upload(worker_array(w, (enum array)a) + here.state,
                                  array[a] + there.state * sizeof(float),
                                  here.count * sizeof(float));
            taken += here.count;
        }
    }
    return taken;
}
