/* host_memory.c — see host_memory.h.
 *
 * Pages that the kernel can drop at any time (files that were read or written) count as available,
 * though a control group's usage includes them.
 */
#include "llmc/util/host_memory.h"

#include <ctype.h>
#include <linux/mempolicy.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "llmc/util/control_groups.h"

enum { PATH_BYTES = 1024 };
static const double NO_LIMIT = 1e18; /* version 1 writes a number near 2^63 if there is no limit */

/* The names of the files and fields of a version of control groups. */
struct version {
    const char *limit, *usage, *inactive, *active, *slab;
};

static const struct version versions[] = {
    {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file",
     NULL},
    {"memory.max", "memory.current", "inactive_file", "active_file", "slab_reclaimable"},
};

/* The number after `name` at the beginning of a line of ROOT/DIRECTORY/FILE; -1: there is none. */
static double number_in(const char *directory, const char *file, const char *name) {
    char path[PATH_BYTES + 64], line[256];
    double value = -1;
    snprintf(path, sizeof path, "%s/%s", directory, file);
    FILE *stream = fopen(path, "re");
    if (!stream) return -1;
    while (value < 0 && fgets(line, sizeof line, stream))
        if (!strncmp(line, name, strlen(name))) sscanf(line + strlen(name), " %lf", &value);
    fclose(stream);
    return value;
}

static double least(double a, double b) {
    return a < b ? a : b;
}

static double at_least_zero(double x) {
    return x > 0 ? x : 0;
}

/* FNV-1a */
static uint64_t hash(uint64_t seed, const void *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        seed = (seed ^ ((const unsigned char *)bytes)[i]) * 1099511628211u;
    return seed;
}

/* A number that is the same in all containers of a host, and different on each host. */
static uint64_t host_id(const char *root) {
    char path[PATH_BYTES], text[64] = "";
    snprintf(path, sizeof path, "%.512s/proc/sys/kernel/random/boot_id", root);
    FILE *file = fopen(path, "re");
    if (file && !fgets(text, sizeof text, file)) text[0] = 0;
    if (file) fclose(file);
    return hash(14695981039346656037u, text, strlen(text));
}

/* Swap space that a group may use; free: the free swap space of the host. */
static double group_swap(const char *directory, double limit, double free) {
    const double most = number_in(directory, "memory.swap.max", ""); /* "max": no number */
    const double used = number_in(directory, "memory.swap.current", "");
    const double both = number_in(directory, "memory.memsw.limit_in_bytes", "");
    if (most >= 0 && used >= 0) free = least(free, at_least_zero(most - used));
    if (both >= 0) free = least(free, at_least_zero(both - limit));
    return free;
}

/* Reads the limit of one group; returns false when it has none. */
static bool read_group(const struct version *v, const char *directory, const char *name,
                       double swap, uint64_t host, struct host_memory_limit *out) {
    const double limit = number_in(directory, v->limit, "");
    const double used = number_in(directory, v->usage, "");
    struct stat status;
    if (limit < 0 || limit >= NO_LIMIT || used < 0 || stat(directory, &status)) return false;
    double kept = used;
    const char *const droppable[] = {v->inactive, v->active, v->slab};
    for (int i = 0; i < 3 && droppable[i]; i++)
        kept -= at_least_zero(number_in(directory, "memory.stat", droppable[i]));
    out->available =
        at_least_zero(limit - at_least_zero(kept)) + group_swap(directory, limit, swap);
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
    const double available = 1024 * number_in(proc, "meminfo", "MemAvailable:");
    const double swap = at_least_zero(1024 * number_in(proc, "meminfo", "SwapFree:"));
    memset(limit, 0, HOST_MEMORY_LIMITS * sizeof *limit);
    if (available < 0) return 0;
    limit[0].id = host_id(root);
    limit[0].available = available + swap;
    snprintf(limit[0].name, sizeof limit[0].name, "the host");
    struct found found = {limit, 1, swap};
    control_groups_visit(root, "memory", visit, &found);
    return found.count;
}

int host_memory_node_of(const char *root, const char *address) {
    char path[PATH_BYTES], lower[32] = "";
    int node = -1;
    for (size_t i = 0; address[i] && i < sizeof lower - 1; i++)
        lower[i] = (char)tolower((unsigned char)address[i]);
    snprintf(path, sizeof path, "%.512s/sys/bus/pci/devices/%s/numa_node", root, lower);
    FILE *file = fopen(path, "re");
    if (!file) return -1;
    if (fscanf(file, "%d", &node) != 1) node = -1;
    fclose(file);
    return node;
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
