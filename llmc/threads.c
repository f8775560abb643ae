/* threads.c — see threads.h. */
#include "llmc/threads.h"

#include <omp.h>
#include <stdlib.h>
#include <unistd.h>

void threads_wait_briefly(char **argv) {
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    setenv("GOMP_SPINCOUNT", "1000", 1); /* microseconds: a barrier that is about to open anyway */
    execv("/proc/self/exe", argv);
    /* No /proc: slower on shared cores, otherwise no harm. */
}

void threads_choose(int wanted, int local_ranks) {
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    int threads = omp_get_max_threads();
    /* A launcher may have bound each rank to cores of its own; otherwise they share all. */
    if (omp_get_num_procs() >= online) threads /= local_ranks;
    if (wanted) threads = wanted;
    omp_set_num_threads(threads > 1 ? threads : 1);
    omp_set_max_active_levels(1);
}
