/* threads.h — replaces pthreads, the clock and random numbers by those of simulation.h. The
 * compiler includes it before every source (-include). */
#ifndef SIMULATION_THREADS_H
#define SIMULATION_THREADS_H

#include <pthread.h>
#include <sys/random.h>
#include <time.h>

#define getrandom simulated_getrandom
#define clock_gettime simulated_clock_gettime
#define pthread_create simulated_create
#define pthread_join simulated_join
#define pthread_mutex_init simulated_mutex_init
#define pthread_mutex_lock simulated_mutex_lock
#define pthread_mutex_trylock simulated_mutex_trylock
#define pthread_mutex_unlock simulated_mutex_unlock
#define pthread_mutex_destroy simulated_mutex_destroy
#define pthread_cond_init simulated_cond_init
#define pthread_cond_wait simulated_cond_wait
#define pthread_cond_timedwait simulated_cond_timedwait
#define pthread_cond_signal simulated_cond_signal
#define pthread_cond_broadcast simulated_cond_signal
#define pthread_cond_destroy simulated_cond_destroy

/* At the end, so that functions in the headers that it includes are simulated, too. */
#include "dev/simulation/simulation.h"

#endif
