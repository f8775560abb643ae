/* rank_state.c — see rank_state.h. */
#include "llmc/comm/rank_state.h"

struct ranges state_of_owner(const struct data_parallel *d, const struct worker *w,
                             enum array array) {
    if (array == ARRAY_V || d->placement.steps_alone) return w->squares;
    return (struct ranges){.range = (struct range *)w->range,
                           .count = (size_t)d->layout->buckets,
                           .elements = w->owned};
}

size_t state_take(const struct data_parallel *d, const struct worker *w, enum array array,
                  const struct range *range, size_t ranges, const char *values) {
    const struct ranges mine = state_of_owner(d, w, array);
    struct range here, there;
    size_t taken = 0;
    for (size_t k = 0; k < ranges; k++) {
        for (size_t i = 0; ranges_next(mine.range, mine.count, range[k], &i, &here, &there);) {
            d->be->upload(worker_array(w, array) + here.state, values + there.state * sizeof(float),
                          here.count * sizeof(float));
            taken += here.count;
        }
    }
    return taken;
}
