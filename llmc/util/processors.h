/* processors.h — how many processors a rank may use, and which of them other ranks use as well. */
#ifndef LLMC_UTIL_PROCESSORS_H
#define LLMC_UTIL_PROCESSORS_H

#include <stdint.h>

enum { PROCESSORS_MOST = 8192 };

struct processors {   /* a rank tells this to others */
    uint64_t machine; /* host_memory_host: containers of one machine have the same */
    double quota;     /* limit of the control groups that the rank is in; 0: none */
    int32_t
        allowed; /* number of processors that it may run on (cpuset, taskset, mpirun --bind-to) */
    uint64_t set[PROCESSORS_MOST / 64]; /* which */
};

/* Fills *own in for this process. */
void processors_find(struct processors *own);

/* The processors that rank `self` may use without those that are other ranks' share: its allowed ones,
 * shared equally with all ranks that may run on some of them, and its quota, shared equally with all ranks
 * of the machine, rounded down. At least 1. */
int processors_share(const struct processors *ranks, int count, int self);

/* The least quota of this process's control groups and all groups around them, of both versions (cpu.max;
 * cpu.cfs_quota_us), in processors; 0: none. root: "" for the machine; tests have another. */
double processors_quota(const char *root);

#endif
