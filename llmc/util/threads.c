/* threads.c — see threads.h. */
#include "llmc/util/threads.h"

#include <omp.h>
#include <stdlib.h>
#include <unistd.h>

void threads_wait_briefly(char **argv) {
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    setenv("GOMP_SPINCOUNT", "1000", 1); /* spins: enough if a barrier opens soon */
    execv("/proc/self/exe", argv);
    /* Without /proc the program cannot start again. Then it is slower on shared cores, but its
     * results are correct. */
}

void threads_choose(int wanted, int local_ranks) {
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    int threads = omp_get_max_threads();
    /* If a launcher has bound each rank to its own cores, the rank uses them all. Otherwise the
     * ranks of the host share all cores. */
    if (omp_get_num_procs() >= online) threads /= local_ranks;
    if (wanted) threads = wanted;
    omp_set_num_threads(threads > 1 ? threads : 1);
    omp_set_max_active_levels(1);
}
