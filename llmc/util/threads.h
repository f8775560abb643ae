/* threads.h — sets how many CPU threads a rank uses, and how they wait for each other. */
#ifndef LLMC_UTIL_THREADS_H
#define LLMC_UTIL_THREADS_H

/* Call this first in main. In GCC's OpenMP a waiting thread spins for milliseconds. On cores
 * that are shared with other ranks or users, this makes small operations up to 50 times slower.
 * OpenMP reads the spin time from the environment before main, so this function sets it and
 * starts the program again. It does not change a setting of the user. It returns if there is
 * nothing to do. */
void threads_wait_briefly(char **argv);

/* Sets OpenMP's number of threads to `wanted`, or, if that is 0, to what OMP_NUM_THREADS says, or, if
 * it is not set, to `share` (processors.h). Operations that a worker's thread calls do not start further
 * threads. */
void threads_choose(int wanted, int share);

/* The same where ranks do not ask each other: all `local_ranks` of this host share what this rank may
 * use. */
void threads_choose_alone(int wanted, int local_ranks);

#endif
