/* runs.h — runs of consecutive elements of the parameter vector. Owners keep values for the runs
 * that they own, one run after another; checkpoints and handovers walk the same runs. */
#ifndef LLMC_MODEL_RUNS_H
#define LLMC_MODEL_RUNS_H

#include <stdbool.h>
#include <stddef.h>

struct run {
    size_t offset, count; /* elements of the vector */
    size_t state;         /* where its values start in an array that has one run after another */
};

/* What two runs have in common; count is 0 if that is nothing. Its state is a's. */
static inline struct run run_common(struct run a, struct run b) {
    const size_t from = a.offset > b.offset ? a.offset : b.offset;
    const size_t a_end = a.offset + a.count, b_end = b.offset + b.count;
    const size_t end = a_end < b_end ? a_end : b_end;
    struct run common = {from, end > from ? end - from : 0, a.state + (from - a.offset)};
    return common;
}

/* Finds what `run` has in common with the runs of an ascending list, one after another: *listed has the
 * list's state, *own that of `run`. *next starts at 0; then it is 1 + the place in the list of what was
 * found. Returns false if there is no more. */
static inline bool runs_next(const struct run *list, size_t runs, struct run run, size_t *next,
                             struct run *listed, struct run *own) {
    size_t low = *next, high = runs;
    while (low < high) { /* the first run that ends after the start of `run` */
        const size_t middle = (low + high) / 2;
        if (list[middle].offset + list[middle].count > run.offset)
            high = middle;
        else
            low = middle + 1;
    }
    if (low == runs || list[low].offset >= run.offset + run.count) return false;
    *listed = run_common(list[low], run);
    *own = run_common(run, list[low]);
    *next = low + 1;
    return true;
}

#endif
