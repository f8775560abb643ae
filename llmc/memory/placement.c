/* placement.c — see placement.h. */
#include "llmc/memory/placement.h"

#include <string.h>

/* Three slots: one bucket is computed, one is copied, and one is added up. */
static int slots_of(int layers) {
    return layers + 2 <= BACKEND_MARKS ? 3 : 0;
}

struct placement placement_of(const struct placement_run *r) {
    struct placement p = {.trains = !r->evaluates, .steps_alone = r->steps_alone};
    const bool bf16 = r->dtype == DTYPE_BF16, owners = !r->steps_alone;
    const bool one = r->workers == r->ranks;
    const bool staged = r->device && r->ranks > 1, shares = r->group > 1 && one;
    const bool leads = p.trains && r->leads;
    /* Not if ranks may change, since they hand over float32 replicas. */
    const bool masters = staged && bf16 && one && owners && !r->changes && p.trains;
    p.way = shares ? WAY_SHARED : staged ? WAY_STAGED : WAY_IN_PLACE;
    p.rounds_to_bf16 = r->device && bf16 && owners && r->workers > 1 && r->narrow;
    const bool narrow = masters && p.rounds_to_bf16;
    p.copy_bytes = narrow ? 2 : 4;
    /* A step with several micro-batches adds them up in the whole gradient. */
    if (masters && r->micro_batches <= 1) p.slots = slots_of(r->layers);
    if (shares && staged && owners && p.trains) p.copy_slots = slots_of(r->layers);
    const bool has[ARRAYS] = {
        [ARRAY_PARAMS] = !masters,
        [ARRAY_MASTER] = masters,
        [ARRAY_WEIGHTS] = r->device && bf16,
        [ARRAY_GRADS] = p.trains,
        [ARRAY_APART] = p.trains && r->group > 1 && !one,
        [ARRAY_AVERAGE] = masters,
        [ARRAY_M] = p.trains,
        [ARRAY_V] = p.trains,
        [ARRAY_AHEAD] = leads,
        /* A gradient's memory is free while a float32 model is put together. */
        [ARRAY_MODEL] = r->workers > 1 && !(staged && p.trains && !masters),
        [ARRAY_COMM_PARAMS] = staged,
        [ARRAY_COMM_GRADS] = staged && p.trains && !p.copy_slots,
        [ARRAY_COMM_SLOTS] = p.copy_slots > 0,
        [ARRAY_COMM_SUMS] = p.copy_slots > 0,
        [ARRAY_COMM_MASTER] = narrow,
        [ARRAY_COMM_AVERAGE] = narrow,
        [ARRAY_COMM_AHEAD] = staged && leads};
    memcpy(p.has, has, sizeof has);
    return p;
}
