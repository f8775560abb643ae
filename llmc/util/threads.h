/* threads.h — sets how many CPU threads a rank uses, and how they wait for each other. */
#ifndef LLMC_UTIL_THREADS_H
#define LLMC_UTIL_THREADS_H

#ifdef __cplusplus
extern "C" {
#endif

/* Call this first in main. In GCC's OpenMP a waiting thread spins for milliseconds. On cores
 * that are shared with other ranks or users, this makes small operations up to 50 times slower.
 * OpenMP reads the spin time from the environment before main, so this function sets it and
 * starts the program again. It does not change a setting of the user. It returns if there is
 * nothing to do. */
void threads_wait_briefly(char **argv);

/* Sets OpenMP's number of threads to `wanted`, or, if that is 0, to this rank's share of the
 * cores that it may use. local_ranks: number of ranks on this host. Operations that a worker's
 * thread calls do not start further threads. */
void threads_choose(int wanted, int local_ranks);

#ifdef __cplusplus
}
#endif
#endif
