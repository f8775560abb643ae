/* processors.c — see processors.h. */
#include "llmc/util/processors.h"

#include <omp.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/util/file.h"

/* ---- control groups ---------------------------------------------------------------------- */

/* Two numbers of a file, or of two files. A word such as "max" is no number. */
static bool read_numbers(const char *folder, const char *name, int count, double *numbers) {
    char path[FILE_PATH_BYTES + 32];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "re");
    if (!file) return false;
    const int found = count == 2 ? fscanf(file, "%lf %lf", &numbers[0], &numbers[1])
                                 : fscanf(file, "%lf", &numbers[0]);
    fclose(file);
    return found == count;
}

static double quota_of_folder(const char *folder) {
    double n[2];
    const bool found = read_numbers(folder, "cpu.max", 2, n) ||
                       (read_numbers(folder, "cpu.cfs_quota_us", 1, &n[0]) &&
                        read_numbers(folder, "cpu.cfs_period_us", 1, &n[1]));
    return found && n[0] > 0 && n[1] > 0 ? n[0] / n[1] : 0;
}

static double least(double a, double b) {
    return a > 0 && (a < b || !(b > 0)) ? a : b;
}

/* The least quota of a group and of those around it. Inside a container the path may be the one outside; its folders
 * are missing then, and the hierarchy's root is the container's own group. */
static double quota_of_group(const char *hierarchy, const char *group) {
    char folder[FILE_PATH_BYTES];
    double quota = 0;
    const size_t root = strlen(hierarchy);
    if (snprintf(folder, sizeof folder, "%s%s", hierarchy, group) >= (int)sizeof folder) return 0;
    for (size_t length = strlen(folder); length >= root; length--) {
        if (folder[length] != '/' && folder[length] != 0) continue;
        folder[length] = 0;
        quota = least(quota_of_folder(folder), quota);
    }
    return quota;
}

static bool names_cpu(const char *controllers) {
    for (const char *at = controllers; (at = strstr(at, "cpu")); at += 3)
        if ((at == controllers || at[-1] == ',') && (at[3] == ',' || !at[3])) return true;
    return false;
}

/* A line of /proc/self/cgroup: NUMBER:CONTROLLERS:GROUP; version 2 has no controllers. */
double processors_quota(const char *root) {
    static const char *const hierarchies[] = {"", "/unified", "/cpu", "/cpu,cpuacct",
                                              "/cpuacct,cpu"}; /* the first two are of version 2 */
    char path[FILE_PATH_BYTES], line[FILE_PATH_BYTES];
    double quota = 0;
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) {
        char *controllers = strchr(line, ':'),
             *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        group[strcspn(group, "\n")] = 0;
        const bool second = !controllers[1];
        if (!second && !names_cpu(controllers + 1)) continue;
        for (int i = second ? 0 : 2; i < (second ? 2 : 5); i++) {
            snprintf(path, sizeof path, "%.2000s/sys/fs/cgroup%s", root, hierarchies[i]);
            quota = least(quota_of_group(path, group), quota);
        }
    }
    if (file) fclose(file);
    return quota;
}

/* ---- shares ------------------------------------------------------------------------------ */

static void find_machine(uint64_t machine[2]) {
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file && fread(machine, 1, 2 * sizeof *machine, file) == 0) machine[0] = 0;
    if (file) fclose(file);
}

void processors_find(struct processors *own) {
    cpu_set_t *set = CPU_ALLOC(PROCESSORS_MOST);
    const size_t bytes = CPU_ALLOC_SIZE(PROCESSORS_MOST);
    memset(own, 0, sizeof *own);
    find_machine(own->machine);
    own->quota = processors_quota("");
    own->allowed = omp_get_num_procs();
    CPU_ZERO_S(bytes, set);
    if (set && !sched_getaffinity(0, bytes, set)) memcpy(own->set, set, sizeof own->set);
    CPU_FREE(set);
}

static bool overlap(const struct processors *a, const struct processors *b) {
    for (int i = 0; i < PROCESSORS_MOST / 64; i++)
        if (a->set[i] & b->set[i]) return true;
    return false;
}

int processors_share(const struct processors *ranks, int count, int self) {
    const struct processors *own = &ranks[self];
    int together = 0, sharing = 0;
    for (int r = 0; r < count; r++) {
        if (memcmp(ranks[r].machine, own->machine, sizeof own->machine)) continue;
        together++;
        sharing += r == self || overlap(&ranks[r], own);
    }
    int share = own->allowed / sharing;
    if (own->quota > 0 && own->quota / together < share) share = (int)(own->quota / together);
    return share > 1 ? share : 1;
}
