/* processors.c — see processors.h. */
#include "llmc/util/processors.h"

#include <omp.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/util/control_groups.h"
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

static void visit(void *context, const char *directory, const char *group) {
    double *quota = context;
    (void)group;
    *quota = least(quota_of_folder(directory), *quota);
}

double processors_quota(const char *root) {
    double quota = 0;
    control_groups_visit(root, "cpu", visit, &quota);
    return quota;
}

/* ---- shares ------------------------------------------------------------------------------ */

static void find_machine(uint64_t machine[2]) {
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file && fread(machine, 1, 2 * sizeof *machine, file) == 0) machine[0] = 0;
    if (file) fclose(file);
}

void processors_find(struct processors *own) {
    memset(own, 0, sizeof *own);
    find_machine(own->machine);
    own->quota = processors_quota("");
    own->allowed = omp_get_num_procs();
    sched_getaffinity(0, sizeof own->set, (cpu_set_t *)own->set);
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
