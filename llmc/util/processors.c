/* processors.c — see processors.h. */
#include "llmc/util/processors.h"

#include <omp.h>
#include <sched.h>
#include <stdbool.h>
#include <string.h>

#include "llmc/util/control_groups.h"
#include "llmc/util/file.h"
#include "llmc/util/host_memory.h"

/* ---- control groups ---------------------------------------------------------------------- */

static double quota_of_folder(const char *folder) {
    double quota = file_number(folder, "cpu.max", "%lf"); /* "max": no number */
    double period = file_number(folder, "cpu.max", "%*f %lf");
    if (period < 0) {
        quota = file_number(folder, "cpu.cfs_quota_us", "%lf");
        period = file_number(folder, "cpu.cfs_period_us", "%lf");
    }
    return quota > 0 && period > 0 ? quota / period : 0;
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

void processors_find(struct processors *own) {
    memset(own, 0, sizeof *own);
    own->machine = host_memory_host("");
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
        if (ranks[r].machine != own->machine) continue;
        together++;
        sharing += r == self || overlap(&ranks[r], own);
    }
    int share = own->allowed / sharing;
    if (own->quota > 0 && own->quota / together < share) share = (int)(own->quota / together);
    return share > 1 ? share : 1;
}
