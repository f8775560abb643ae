/* runs.h — runs of consecutive elements of the parameter vector. Owners keep values for the runs
 * that they own, one run after another; checkpoints and handovers walk the same runs. */
#ifndef LLMC_MODEL_RUNS_H
#define LLMC_MODEL_RUNS_H

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

#endif
