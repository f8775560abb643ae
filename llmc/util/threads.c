/* threads.c — see threads.h. */
#include "llmc/util/threads.h"

#include <limits.h>
#include <omp.h>
#include <stdlib.h>
#include <unistd.h>

#include "llmc/util/processors.h"

void threads_wait_briefly(char **argv) {
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    setenv("GOMP_SPINCOUNT", "1000", 1); /* spins: enough if a barrier opens soon */
    execv("/proc/self/exe", argv);
    /* Without /proc the program cannot start again. Then it is slower on shared cores, but its
     * results are correct. */
}

static int threads_told(void) {
    const char *text = getenv("OMP_NUM_THREADS"); /* a list has a number for each level */
    const long told = text ? strtol(text, NULL, 10) : 0;
    return told > 0 && told <= INT_MAX ? (int)told : 0;
}

void threads_choose(int wanted, int share) {
    const int told = threads_told();
    omp_set_num_threads(wanted ? wanted : told ? told : share);
    omp_set_max_active_levels(1);
}

void threads_choose_alone(int wanted, int local_ranks) {
    static struct processors own;
    processors_find(&own);
    const int share = processors_share(&own, 1, 0) / local_ranks;
    threads_choose(wanted, share > 1 ? share : 1);
}
