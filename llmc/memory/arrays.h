/* arrays.h — what a rank holds of the model: one table, a row for each array.
 *
 * The table says of each array where it lies, how many elements of which type it has, how many of
 * it a rank has. Which of them a run has, says placement.h. A run allocates and releases by the table,
 * --dry-run and the memory check add it up, and checkpoints and ranks that take over from others have
 * what it says.
 */
#ifndef LLMC_MEMORY_ARRAYS_H
#define LLMC_MEMORY_ARRAYS_H

#include <stddef.h>

#include "llmc/backend/backend.h"
#include "llmc/memory/placement.h"

enum array_space { SPACE_BACKEND, SPACE_PINNED, SPACE_GROUP /* port_shared.c takes it */ };
enum array_extent {
    EXTENT_WHOLE,
    EXTENT_OWNED,
    EXTENT_SQUARES,
    EXTENT_SLOTS,
    EXTENT_COPY_SLOTS,
    EXTENT_MODEL
};
enum array_type { TYPE_FLOAT32, TYPE_BF16, TYPE_COPY /* bf16 or float32, by copy_bytes */ };
enum array_per {
    PER_RANK,
    PER_WORKER,
    PER_SET,      /* of activations */
    PER_GRADIENT, /* of a rank: members of a group on one rank share it */
    PER_REPLICA,  /* of a rank; without a device, ranks of a group share it in equal parts */
    PER_GROUP     /* ranks of a group share it in equal parts */
};
/* The lines of --dry-run, each of which adds up some arrays. */
enum array_line {
    LINE_PARAMETERS,
    LINE_WEIGHTS,
    LINE_GRADIENTS,
    LINE_OPTIMIZER,
    LINE_AHEAD,
    LINE_MODEL,
    LINE_COPIES,
    LINES
};

struct array_row {
    const char *name; /* for messages */
    enum array_line line;
    enum array_space space;
    enum array_extent extent;
    enum array_type type;
    enum array_per per;
    const char *saved; /* a checkpoint has it as the tensor worker.W.<saved>; NULL: it has not */
    bool follows;      /* its elements go to their new owner when shards are dealt out anew: when
                          other ranks take part, or resume a checkpoint */
};
extern const struct array_row array_rows[ARRAYS];

/* The number of arrays that follow their elements to a new owner, and the place of one among them. */
int arrays_that_follow(void);
int array_following(enum array array);

struct array_sizes {
    double whole, owned, squares, slots, copy_slots, model; /* elements, by extent */
    double workers, sets, gradients, replicas, groups;      /* how many of them a rank has */
};

/* The bytes of an array. */
double array_bytes(enum array array, const struct placement *placement,
                   const struct array_sizes *sizes);

/* The bytes of all arrays of a line that a rank of a run has. */
double array_line_bytes(enum array_line line, const struct placement *placement,
                        const struct array_sizes *sizes);

/* Allocates an array in the backend's or in pinned memory. Returns NULL after reporting. */
void *array_allocate(enum array array, const struct backend *be, const struct placement *placement,
                     const struct array_sizes *sizes);
void array_release(enum array array, const struct backend *be, void *memory);

#endif
