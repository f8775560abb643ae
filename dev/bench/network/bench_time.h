/* bench_time.h — one stopwatch for ranks that share a machine, and so its clock.
 *
 * Every round of a benchmark begins at an instant that all ranks agreed on, and ends when the last
 * rank is done. A rank that was held up on its way to the start (its MPI messages may be lost) does
 * not count against what is measured: the clock starts with the last one to begin.
 */
#ifndef BENCH_TIME_H
#define BENCH_TIME_H

#include <mpi.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/resource.h>
#include <time.h>

static inline double bench_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Waits until 10 ms after the last rank called, and returns when this rank began. Collective. */
static inline double bench_start(void) {
    double now = bench_now(), start;
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Allreduce(&now, &start, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    start += 0.01;
    struct timespec until = {(time_t)start, (long)((start - (double)(time_t)start) * 1e9)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
    return bench_now();
}

/* Ends a round: rank 0 prints how long it took, {"ms": 211.5}. Returns false on every rank if the
 * program has run for `seconds` since the last rank's `opened` and should stop. Collective. */
static inline bool bench_stop(double begun, double opened, double seconds) {
    double mine[3] = {begun, bench_now(), opened}, last[3];
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Allreduce(mine, last, 3, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (rank == 0) {
        printf("{\"ms\": %.3f}\n", 1e3 * (last[1] - last[0]));
        fflush(stdout);
    }
    return last[1] - last[2] < seconds;
}

/* CPU seconds of this process so far. */
static inline void bench_cpu(double *user, double *system) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    *user = (double)usage.ru_utime.tv_sec + 1e-6 * (double)usage.ru_utime.tv_usec;
    *system = (double)usage.ru_stime.tv_sec + 1e-6 * (double)usage.ru_stime.tv_usec;
}

#endif
