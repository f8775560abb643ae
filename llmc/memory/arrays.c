/* arrays.c — see arrays.h. */
#include "llmc/memory/arrays.h"

#include <assert.h>

#include "llmc/log/error.h"

typedef const struct placement *placement;

static bool in_float32(placement p) {
    return !p->masters;
}
static bool with_masters(placement p) {
    return p->masters;
}
static bool with_weights(placement p) {
    return p->weights;
}
static bool in_training(placement p) {
    return p->trains;
}
static bool in_groups(placement p) {
    return p->trains && !p->shares_ranks;
}
static bool with_lead(placement p) {
    return p->leads;
}
static bool with_residual(placement p) {
    return p->residual;
}
static bool when_gathered(placement p) {
    return p->gathers;
}
static bool when_staged(placement p) {
    return p->staged;
}
static bool whole_copies(placement p) {
    return p->staged && p->trains && !p->copy_slots;
}
static bool copies_in_slots(placement p) {
    return p->copy_slots > 0;
}
static bool with_half(placement p) {
    return p->half;
}
static bool copies_of_lead(placement p) {
    return p->staged && p->leads;
}

#define PARAMETERS "a worker's parameters (--dry-run tells what a run needs)"
#define OWNED "what a worker owns of the parameters"
#define AHEAD "the values that a worker broadcasts (--plain does without)"

const struct array_row array_rows[ARRAYS] = {
    [ARRAY_PARAMS] = {PARAMETERS, LINE_PARAMETERS, SPACE_BACKEND, EXTENT_WHOLE, TYPE_FLOAT32,
                      PER_REPLICA, in_float32},
    [ARRAY_MASTER] = {OWNED, LINE_PARAMETERS, SPACE_BACKEND, EXTENT_OWNED, TYPE_FLOAT32, PER_WORKER,
                      with_masters},
    [ARRAY_WEIGHTS] = {"weights in use", LINE_WEIGHTS, SPACE_BACKEND, EXTENT_WHOLE, TYPE_BF16,
                       PER_RANK, with_weights},
    [ARRAY_GRADS] = {"a worker's gradient", LINE_GRADIENTS, SPACE_BACKEND, EXTENT_SLOTS,
                     TYPE_FLOAT32, PER_GRADIENT, in_training},
    [ARRAY_APART] = {"a member's gradient", LINE_GRADIENTS, SPACE_BACKEND, EXTENT_WHOLE,
                     TYPE_FLOAT32, PER_SET, in_groups},
    [ARRAY_AVERAGE] = {"an averaged gradient", LINE_GRADIENTS, SPACE_BACKEND, EXTENT_OWNED,
                       TYPE_FLOAT32, PER_WORKER, with_masters},
    [ARRAY_M] = {"optimizer state", LINE_OPTIMIZER, SPACE_BACKEND, EXTENT_OWNED, TYPE_FLOAT32,
                 PER_WORKER, in_training},
    [ARRAY_V] = {"optimizer state", LINE_OPTIMIZER, SPACE_BACKEND, EXTENT_OWNED, TYPE_FLOAT32,
                 PER_WORKER, in_training},
    [ARRAY_AHEAD] = {AHEAD, LINE_AHEAD, SPACE_BACKEND, EXTENT_OWNED, TYPE_FLOAT32, PER_WORKER,
                     with_lead},
    [ARRAY_RESIDUAL] = {"lost gradients (--carry)", LINE_LOST, SPACE_BACKEND, EXTENT_WHOLE,
                        TYPE_FLOAT32, PER_WORKER, with_residual},
    [ARRAY_MODEL] = {"the model put together", LINE_MODEL, SPACE_BACKEND, EXTENT_MODEL,
                     TYPE_FLOAT32, PER_RANK, when_gathered},
    [ARRAY_COMM_PARAMS] = {PARAMETERS, LINE_COPIES, SPACE_PINNED, EXTENT_WHOLE, TYPE_COPY,
                           PER_GROUP, when_staged},
    [ARRAY_COMM_GRADS] = {"a worker's gradient", LINE_COPIES, SPACE_PINNED, EXTENT_WHOLE, TYPE_COPY,
                          PER_GRADIENT, whole_copies},
    [ARRAY_COMM_SLOTS] = {"a worker's gradient", LINE_COPIES, SPACE_GROUP, EXTENT_COPY_SLOTS,
                          TYPE_COPY, PER_WORKER, copies_in_slots},
    [ARRAY_COMM_SUMS] = {"the sums of a group", LINE_COPIES, SPACE_GROUP, EXTENT_WHOLE, TYPE_COPY,
                         PER_GROUP, copies_in_slots},
    [ARRAY_COMM_MASTER] = {OWNED, LINE_COPIES, SPACE_PINNED, EXTENT_OWNED, TYPE_FLOAT32, PER_WORKER,
                           with_half},
    [ARRAY_COMM_AVERAGE] = {"an averaged gradient", LINE_COPIES, SPACE_PINNED, EXTENT_OWNED,
                            TYPE_FLOAT32, PER_WORKER, with_half},
    [ARRAY_COMM_AHEAD] = {AHEAD, LINE_COPIES, SPACE_PINNED, EXTENT_OWNED, TYPE_FLOAT32, PER_WORKER,
                          copies_of_lead},
};

double array_elements(enum array array, placement p, const struct array_sizes *s) {
    switch (array_rows[array].extent) {
    case EXTENT_OWNED:
        return p->steps_alone ? s->whole : s->owned;
    case EXTENT_SLOTS:
        return s->slots;
    case EXTENT_COPY_SLOTS:
        return s->copy_slots;
    case EXTENT_MODEL:
        return s->model;
    default:
        return s->whole;
    }
}

double array_bytes(enum array array, placement p, const struct array_sizes *s) {
    const enum array_type type = array_rows[array].type;
    const bool narrow = type == TYPE_BF16 || (type == TYPE_COPY && p->half);
    return (narrow ? 2 : 4) * array_elements(array, p, s);
}

static double copies(enum array_per per, const struct array_sizes *s) {
    const double of[] = {[PER_RANK] = 1,
                         [PER_WORKER] = s->workers,
                         [PER_SET] = s->sets,
                         [PER_GRADIENT] = s->gradients,
                         [PER_REPLICA] = s->replicas,
                         [PER_GROUP] = s->groups};
    return of[per];
}

double array_line_bytes(enum array_line line, placement p, const struct array_sizes *s) {
    double bytes = 0;
    for (int a = 0; a < ARRAYS; a++)
        if (array_rows[a].line == line && array_rows[a].wanted(p))
            bytes += array_bytes((enum array)a, p, s) * copies(array_rows[a].per, s);
    return bytes;
}

void *array_allocate(enum array array, const struct backend *be, placement p,
                     const struct array_sizes *s) {
    const double bytes = array_bytes(array, p, s);
    assert(array_rows[array].wanted(p) && array_rows[array].space != SPACE_GROUP);
    const size_t words = ((size_t)bytes + 3) / 4, n = 4 * (words ? words : 1);
    void *memory =
        array_rows[array].space == SPACE_PINNED ? be->allocate_pinned(n) : be->allocate(n);
    if (!memory) log_out_of_memory(array_rows[array].name, bytes);
    return memory;
}

void array_release(enum array array, const struct backend *be, void *memory) {
    if (array_rows[array].space == SPACE_PINNED)
        be->release_pinned(memory);
    else
        be->release(memory);
}
