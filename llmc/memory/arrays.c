/* arrays.c — see arrays.h. */
#include "llmc/memory/arrays.h"

#include <assert.h>

#include "llmc/log/error.h"

#define PARAMETERS "a worker's parameters (--dry-run tells what a run needs)"
#define OWNED "what a worker owns of the parameters"
#define AHEAD "the values that a worker broadcasts (--plain does without)"

const struct array_row array_rows[ARRAYS] = {
    [ARRAY_PARAMS] = {PARAMETERS, LINE_PARAMETERS, SPACE_BACKEND, EXTENT_WHOLE, TYPE_FLOAT32,
                      .per = PER_REPLICA},
    [ARRAY_MASTER] = {OWNED, LINE_PARAMETERS, SPACE_BACKEND, EXTENT_OWNED, TYPE_FLOAT32,
                      .per = PER_WORKER},
    [ARRAY_WEIGHTS] = {"weights in use", LINE_WEIGHTS, SPACE_BACKEND, EXTENT_WHOLE, TYPE_BF16,
                       .per = PER_SET},
    [ARRAY_GRADS] = {"a worker's gradient", LINE_GRADIENTS, SPACE_BACKEND, EXTENT_SLOTS,
                     TYPE_FLOAT32, .per = PER_GRADIENT},
    [ARRAY_APART] = {"a member's gradient", LINE_GRADIENTS, SPACE_BACKEND, EXTENT_WHOLE,
                     TYPE_FLOAT32, .per = PER_SET},
    [ARRAY_AVERAGE] = {"an averaged gradient", LINE_GRADIENTS, SPACE_BACKEND, EXTENT_OWNED,
                       TYPE_FLOAT32, .per = PER_WORKER},
    [ARRAY_M] = {"optimizer state", LINE_OPTIMIZER, SPACE_BACKEND, EXTENT_OWNED, TYPE_FLOAT32,
                 .per = PER_WORKER, .saved = "m", .follows = true},
    [ARRAY_V] = {"optimizer state", LINE_OPTIMIZER, SPACE_BACKEND, EXTENT_SQUARES, TYPE_FLOAT32,
                 .per = PER_WORKER, .saved = "v", .follows = true},
    [ARRAY_AHEAD] = {AHEAD, LINE_AHEAD, SPACE_BACKEND, EXTENT_OWNED, TYPE_FLOAT32,
                     .per = PER_WORKER, .saved = "ahead"},
    [ARRAY_MODEL] = {"the model put together", LINE_MODEL, SPACE_BACKEND, EXTENT_MODEL,
                     TYPE_FLOAT32, .per = PER_RANK},
    [ARRAY_COMM_PARAMS] = {PARAMETERS, LINE_COPIES, SPACE_PINNED, EXTENT_WHOLE, TYPE_COPY,
                           .per = PER_GROUP},
    [ARRAY_COMM_GRADS] = {"a worker's gradient", LINE_COPIES, SPACE_PINNED, EXTENT_WHOLE, TYPE_COPY,
                          .per = PER_GRADIENT},
    [ARRAY_COMM_SLOTS] = {"a worker's gradient", LINE_COPIES, SPACE_GROUP, EXTENT_COPY_SLOTS,
                          TYPE_COPY, .per = PER_WORKER},
    [ARRAY_COMM_SUMS] = {"the sums of a group", LINE_COPIES, SPACE_GROUP, EXTENT_WHOLE, TYPE_COPY,
                         .per = PER_GROUP},
    [ARRAY_COMM_MASTER] = {OWNED, LINE_COPIES, SPACE_PINNED, EXTENT_OWNED, TYPE_FLOAT32,
                           .per = PER_WORKER},
    [ARRAY_COMM_AVERAGE] = {"an averaged gradient", LINE_COPIES, SPACE_PINNED, EXTENT_OWNED,
                            TYPE_FLOAT32, .per = PER_WORKER},
    [ARRAY_COMM_AHEAD] = {AHEAD, LINE_COPIES, SPACE_PINNED, EXTENT_OWNED, TYPE_FLOAT32,
                          .per = PER_WORKER},
};

int array_following(enum array array) {
    int count = 0;
    for (int a = 0; a < (int)array; a++) count += array_rows[a].follows;
    return count;
}

int arrays_that_follow(void) {
    return array_following(ARRAYS);
}

static double elements(enum array array, const struct placement *p, const struct array_sizes *s) {
    switch (array_rows[array].extent) {
    case EXTENT_OWNED:
        return p->steps_alone ? s->whole : s->owned;
    case EXTENT_SQUARES:
        return p->steps_alone ? s->whole : s->squares;
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

double array_bytes(enum array array, const struct placement *p, const struct array_sizes *s) {
    const enum array_type type = array_rows[array].type;
    const bool narrow = type == TYPE_BF16 || (type == TYPE_COPY && p->copy_bytes == 2);
    return (narrow ? 2 : 4) * elements(array, p, s);
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

double array_line_bytes(enum array_line line, const struct placement *p,
                        const struct array_sizes *s) {
    double bytes = 0;
    for (int a = 0; a < ARRAYS; a++)
        if (array_rows[a].line == line && p->has[a])
            bytes += array_bytes((enum array)a, p, s) * copies(array_rows[a].per, s);
    return bytes;
}

void *array_allocate(enum array array, const struct backend *be, const struct placement *p,
                     const struct array_sizes *s) {
    const double bytes = array_bytes(array, p, s);
    assert(p->has[array] && array_rows[array].space != SPACE_GROUP);
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
