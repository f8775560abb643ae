/* omp.h — replaces OpenMP's header in builds without OpenMP: every parallel region runs in the
 * thread that reaches it. */
#ifndef SIMULATION_OMP_H
#define SIMULATION_OMP_H

static inline int omp_get_max_threads(void) {
    return 1;
}

static inline int omp_get_num_threads(void) {
    return 1;
}

static inline int omp_get_num_procs(void) {
    return 1;
}

static inline int omp_get_thread_num(void) {
    return 0;
}

#endif
