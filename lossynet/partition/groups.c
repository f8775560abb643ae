/* groups.c — puts workers into groups, and chooses each owner's partner in every group.
 *
 *     place         0    1    2    3
 *     group 0    |  0 |  1 |  2 |  3 |
 *     group 1    |  4 |  5 |             shorter: owners 0 and 2 have the partner 4, 1 and 3 have 5
 *
 * An owner has a partner in every group, which exchanges the owner's packets for the group. For an
 * owner at place j of its group it is the member at place j modulo the size of the other group.
 * With equal groups, partners are mutual. With unequal groups, a member of a
 * shorter group is the partner of several owners, and some members of a longer group are the
 * partner of no owner in the shorter one.
 */
#include "lossynet/partition/partition.h"

#include <stdlib.h>

static int size_of(const struct ln_groups *groups, int g) {
    return groups->first[g + 1] - groups->first[g];
}

/* The size of group g, which starts at worker `first`. */
static int wanted_size(int workers, int group, const int *sizes, int g, int first) {
    const int size = sizes ? sizes[g] : group, left = workers - first;
    return size < left ? size : left;
}

static void fill(struct ln_groups *groups, int workers) {
    for (int w = 0, g = 0; w < workers; w++) {
        while (w >= groups->first[g + 1]) g++;
        groups->of[w] = g;
    }
    for (int place = 0; place < groups->largest; place++)
        for (int g = 0; g < groups->count; g++)
            groups->partner[(size_t)place * (size_t)groups->count + (size_t)g] =
                groups->first[g] + place % size_of(groups, g);
    for (int g = 0; g < groups->count; g++)
        groups->weights += groups->weight[g] = (double)size_of(groups, g) / size_of(groups, 0);
}

int ln_groups_count(int workers, int group, const int *sizes) {
    int count = 0;
    for (int first = 0; first < workers; count++)
        first += wanted_size(workers, group, sizes, count, first);
    return count;
}

lossynet_status ln_groups_open(struct ln_groups *groups, int workers, int group, const int *sizes) {
    *groups = (struct ln_groups){0};
    for (int first = 0; first < workers; groups->count++) {
        const int size = wanted_size(workers, group, sizes, groups->count, first);
        if (size > groups->largest) groups->largest = size;
        first += size;
    }
    const size_t count = (size_t)groups->count;
    groups->of = (int *)ln_memory_take((size_t)workers, sizeof(int));
    groups->first = (int *)ln_memory_take(count + 1, sizeof(int));
    groups->partner = (int *)ln_memory_take((size_t)groups->largest * count, sizeof(int));
    groups->weight = (double *)ln_memory_take(count, sizeof(double));
    if (!groups->of || !groups->first || !groups->partner || !groups->weight) {
        ln_log("no memory for the list of %d groups of %d workers", groups->count, workers);
        ln_groups_close(groups);
        return LOSSYNET_NO_MEMORY;
    }
    for (int g = 0; g < groups->count; g++)
        groups->first[g + 1] =
            groups->first[g] + wanted_size(workers, group, sizes, g, groups->first[g]);
    fill(groups, workers);
    return LOSSYNET_OK;
}

void ln_groups_close(struct ln_groups *groups) {
    free(groups->of);
    free(groups->first);
    free(groups->partner);
    free(groups->weight);
    *groups = (struct ln_groups){0};
}

uint64_t ln_groups_fingerprint(const struct ln_groups *groups) {
    const int size = size_of(groups, 0);
    uint64_t hash = (uint64_t)size;
    for (int g = 1; g < groups->count; g++)
        if (size_of(groups, g) != size)
            hash = ln_mix(hash ^ (uint64_t)g << 32 ^ (uint64_t)size_of(groups, g));
    return hash;
}
