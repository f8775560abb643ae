/* threads.h — how many CPU threads a rank uses, and how they wait for each other. */
#ifndef LLMC_THREADS_H
#define LLMC_THREADS_H

#ifdef __cplusplus
extern "C" {
#endif

/* Call first in main. GCC's OpenMP lets a thread that waits spin for milliseconds, which on cores
 * shared with anything else (other ranks, other users) makes small operations up to 50 times
 * slower. How long is read from the environment before main, so this sets it and starts the program
 * over; a setting of the user's is left alone. Returns when there is nothing (left) to do. */
void threads_wait_briefly(char **argv);

/* Sets OpenMP's number of threads: `wanted`, or with 0 this rank's share of the cores it may use.
 * local_ranks: ranks on this host. Operations inside a worker's thread stay on it. */
void threads_choose(int wanted, int local_ranks);

#ifdef __cplusplus
}
#endif
#endif
