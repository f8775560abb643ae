/* host_memory.c — see host_memory.h.
 *
 * Pages that the kernel can drop at any time (files that were read or written) count as available,
 * though a control group's usage includes them.
 */
#include "llmc/util/host_memory.h"

#include <ctype.h>
#include <linux/mempolicy.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "llmc/util/control_groups.h"
#include "llmc/util/file.h"

enum { PATH_BYTES = 1024 };
static const double NO_LIMIT = 1e18; /* version 1 writes a number near 2^63 if there is no limit */

/* The names of the files and fields of a version of control groups. */
struct version {
    const char *limit, *usage, *inactive, *active, *slab;
};

static const struct version versions[] = {
    {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file %lf",
     "total_active_file %lf", NULL},
    {"memory.max", "memory.current", "inactive_file %lf", "active_file %lf",
     "slab_reclaimable %lf"},
};

/* FNV-1a */
static uint64_t hash(uint64_t seed, const void *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        seed = (seed ^ ((const unsigned char *)bytes)[i]) * 1099511628211u;
    return seed;
}

uint64_t host_memory_host(const char *root) {
    char path[PATH_BYTES], text[64] = "";
    snprintf(path, sizeof path, "%.512s/proc/sys/kernel/random/boot_id", root);
    FILE *file = fopen(path, "re");
    if (file && !fgets(text, sizeof text, file)) text[0] = 0;
    if (file) fclose(file);
    return hash(14695981039346656037u, text, strlen(text));
}

/* Swap space that a group may use; free: the free swap space of the host. */
static double group_swap(const char *directory, double limit, double free) {
    const double most = file_number(directory, "memory.swap.max", "%lf"); /* "max": no number */
    const double used = file_number(directory, "memory.swap.current", "%lf");
    const double both = file_number(directory, "memory.memsw.limit_in_bytes", "%lf");
    if (most >= 0 && used >= 0) free = fmin(free, fmax(0, most - used));
    if (both >= 0) free = fmin(free, fmax(0, both - limit));
    return free;
}

/* Reads the limit of one group; returns false when it has none. */
static bool read_group(const struct version *v, const char *directory, const char *name,
                       double swap, uint64_t host, struct host_memory_limit *out) {
    const double limit = file_number(directory, v->limit, "%lf");
    const double used = file_number(directory, v->usage, "%lf");
    struct stat status;
    if (limit < 0 || limit >= NO_LIMIT || used < 0 || stat(directory, &status)) return false;
    double kept = used;
    const char *const droppable[] = {v->inactive, v->active, v->slab};
    for (int i = 0; i < 3 && droppable[i]; i++)
        kept -= fmax(0, file_number(directory, "memory.stat", droppable[i]));
    out->available = fmax(0, limit - fmax(0, kept)) + group_swap(directory, limit, swap);
    out->id = hash(hash(host, &status.st_dev, sizeof status.st_dev), &status.st_ino,
                   sizeof status.st_ino);
    snprintf(out->name, sizeof out->name, "control group %.60s (at most %.2f GB)", name,
             limit / 1e9);
    return true;
}

/* Adds a limit; if the list is full, keeps the tightest ones. */
static void keep(struct host_memory_limit *limit, int *count, const struct host_memory_limit *new) {
    int place = *count;
    if (*count < HOST_MEMORY_LIMITS) {
        ++*count;
    } else {
        place = 1; /* the largest limit of a group; the host's limit, at 0, stays */
        for (int i = 2; i < HOST_MEMORY_LIMITS; i++)
            if (limit[i].available > limit[place].available) place = i;
        if (new->available >= limit[place].available) return;
    }
    limit[place] = *new;
}

struct found { /* limits so far */
    struct host_memory_limit *limit;
    int count;
    double swap; /* free swap space of the host */
};

static void visit(void *context, const char *directory, const char *group) {
    struct found *f = context;
    struct host_memory_limit new;
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++)
        if (read_group(&versions[i], directory, group, f->swap, f->limit[0].id, &new))
            keep(f->limit, &f->count, &new);
}

int host_memory_limits(const char *root, struct host_memory_limit limit[HOST_MEMORY_LIMITS]) {
    char proc[PATH_BYTES];
    snprintf(proc, sizeof proc, "%.512s/proc", root);
    const double available = 1024 * file_number(proc, "meminfo", "MemAvailable: %lf");
    const double swap = fmax(0, 1024 * file_number(proc, "meminfo", "SwapFree: %lf"));
    memset(limit, 0, HOST_MEMORY_LIMITS * sizeof *limit);
    if (available < 0) return 0;
    limit[0].id = host_memory_host(root);
    limit[0].available = available + swap;
    snprintf(limit[0].name, sizeof limit[0].name, "the host");
    struct found found = {limit, 1, swap};
    control_groups_visit(root, "memory", visit, &found);
    return found.count;
}

int host_memory_node_of(const char *root, const char *address) {
    char path[PATH_BYTES], lower[32] = "";
    for (size_t i = 0; address[i] && i < sizeof lower - 1; i++)
        lower[i] = (char)tolower((unsigned char)address[i]);
    snprintf(path, sizeof path, "%.512s/sys/bus/pci/devices/%s", root, lower);
    return (int)file_number(path, "numa_node", "%lf");
}

/* The policy of this thread before host_memory_prefer, perhaps one of numactl's. */
static _Thread_local struct {
    bool kept;
    int mode;
    unsigned long nodes[16];
} before;

bool host_memory_prefer(int node) {
    enum { WORD = 8 * sizeof(unsigned long), WORDS = 1024 / WORD };
    _Static_assert((int)WORDS == sizeof before.nodes / sizeof *before.nodes, "room for all nodes");
    unsigned long nodes[WORDS] = {0}, bits = WORDS * WORD;
    if (node >= (int)bits) return false;
    if (node < 0) {
        const int mode = before.kept ? before.mode : MPOL_DEFAULT;
        const bool named = before.kept && (mode & ~MPOL_MODE_FLAGS) != MPOL_DEFAULT;
        before.kept = false;
        return syscall(SYS_set_mempolicy, mode, named ? before.nodes : NULL, named ? bits : 0) == 0;
    }
    if (!before.kept)
        before.kept = syscall(SYS_get_mempolicy, &before.mode, before.nodes, bits, NULL, 0ul) == 0;
    nodes[node / WORD] = 1ul << node % WORD;
    return syscall(SYS_set_mempolicy, MPOL_PREFERRED, nodes, bits) == 0;
}
