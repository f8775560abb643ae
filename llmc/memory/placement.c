/* placement.c — see placement.h. */
#include "llmc/memory/placement.h"

#include <string.h>

/* Three slots: one bucket is computed, one is copied, and one is added up. */
static int slots_of(int layers) {
    return layers + 2 <= BACKEND_MARKS ? 3 : 0;
}

struct placement placement_of(const struct placement_run *r) {
    struct placement p = {0};
    const bool bf16 = r->dtype == DTYPE_BF16, owners = !r->steps_alone;
    const bool carries = r->carries[r->device], one = r->workers == r->ranks;
    p.trains = !r->evaluates;
    p.steps_alone = r->steps_alone;
    p.leads = p.trains && r->leads;
    p.staged = r->device && r->ranks > 1;
    p.shares_ranks = r->group > 1 && one;
    /* Not if ranks may change, since they hand over float32 replicas. */
    p.masters = p.staged && bf16 && one && owners && !r->changes && p.trains;
    /* In a group with --carry, gradients stay float32 until the residual was added to their sum. */
    const bool sends_bf16 = r->device && bf16 && owners && r->workers > 1 && r->narrow;
    p.rounds_to_bf16 = sends_bf16 && !(carries && r->group > 1) ? ROUNDS_ALL : ROUNDS_NOTHING;
    p.copies_bf16 = p.masters && p.rounds_to_bf16;
    p.residual = r->device && carries && p.trains;
    if (p.rounds_to_bf16 && p.residual && !r->blocks) p.rounds_to_bf16 = ROUNDS_OWN;
    p.weights = r->device && bf16;
    p.borrows = p.staged && p.trains && !p.masters;
    p.gathers = r->workers > 1 && !p.borrows;
    /* A step with several micro-batches adds them up in the whole gradient. With --carry, the
     * residual is taken from the whole gradient, too. */
    if (p.masters && r->micro_batches <= 1 && !carries) p.slots = slots_of(r->layers);
    if (p.shares_ranks && p.staged && owners && p.trains) p.copy_slots = slots_of(r->layers);
    const bool has[ARRAYS] = {[ARRAY_PARAMS] = !p.masters,
                              [ARRAY_MASTER] = p.masters,
                              [ARRAY_WEIGHTS] = p.weights,
                              [ARRAY_GRADS] = p.trains,
                              [ARRAY_APART] = p.trains && r->group > 1 && !one,
                              [ARRAY_AVERAGE] = p.masters,
                              [ARRAY_M] = p.trains,
                              [ARRAY_V] = p.trains,
                              [ARRAY_AHEAD] = p.leads,
                              [ARRAY_RESIDUAL] = p.residual,
                              [ARRAY_MODEL] = p.gathers,
                              [ARRAY_COMM_PARAMS] = p.staged,
                              [ARRAY_COMM_GRADS] = p.staged && p.trains && !p.copy_slots,
                              [ARRAY_COMM_SLOTS] = p.copy_slots > 0,
                              [ARRAY_COMM_SUMS] = p.copy_slots > 0,
                              [ARRAY_COMM_MASTER] = p.copies_bf16,
                              [ARRAY_COMM_AVERAGE] = p.copies_bf16,
                              [ARRAY_COMM_AHEAD] = p.staged && p.leads};
    memcpy(p.has, has, sizeof has);
    return p;
}
