/* ranges.h — ranges of consecutive elements of the parameter vector. Owners keep values for the
 * ranges that they own, one after another; checkpoints and handovers walk the same ranges. */
#ifndef LLMC_MODEL_RANGES_H
#define LLMC_MODEL_RANGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

#include "llmc/log/error.h"

struct range {
    size_t offset, count; /* elements of the vector */
    size_t state;         /* where its values start in an array that has one range after another */
};

struct ranges { /* a list that grows; the owner frees `range` */
    struct range *range;
    size_t count, room;
    size_t elements; /* of all of them */
};

/* Adds a range, unless it is empty. Returns 0, or -1 after reporting. */
static inline int ranges_add(struct ranges *list, struct range range) {
    if (!range.count) return 0;
    if (list->count == list->room) {
        const size_t room = 2 * list->room + 64, bytes = room * sizeof range;
        struct range *larger = (struct range *)realloc(list->range, bytes);
        if (!larger) return log_out_of_memory("a list of ranges", (double)bytes);
        list->range = larger;
        list->room = room;
    }
    list->range[list->count++] = range;
    list->elements += range.count;
    return 0;
}

/* What two ranges have in common; count is 0 if that is nothing. Its state is a's. */
static inline struct range range_common(struct range a, struct range b) {
    const size_t from = a.offset > b.offset ? a.offset : b.offset;
    const size_t a_end = a.offset + a.count, b_end = b.offset + b.count;
    const size_t end = a_end < b_end ? a_end : b_end;
    struct range common = {from, end > from ? end - from : 0, a.state + (from - a.offset)};
    return common;
}

/* Finds what `range` has in common with the ranges of an ascending list, one after another: *listed has
 * the list's state, *own that of `range`. *next starts at 0; then it is 1 + the place in the list of what was
 * found. Returns false if there is no more. */
static inline bool ranges_next(const struct range *list, size_t ranges, struct range range,
                               size_t *next, struct range *listed, struct range *own) {
    size_t low = *next, high = ranges;
    while (low < high) { /* the first range that ends after the start of `range` */
        const size_t middle = (low + high) / 2;
        if (list[middle].offset + list[middle].count > range.offset)
            high = middle;
        else
            low = middle + 1;
    }
    if (low == ranges || list[low].offset >= range.offset + range.count) return false;
    *listed = range_common(list[low], range);
    *own = range_common(range, list[low]);
    *next = low + 1;
    return true;
}

#endif
