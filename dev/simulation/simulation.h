/* simulation.h — runs several ranks in one thread, with a clock and a network that a test controls.
 *
 * Every thread of the program under test is a fiber: the ranks, and the threads that lossynet
 * starts itself. One fiber runs at a time. It yields wherever a thread could sleep: at a mutex, a
 * condition, a link's wait, a barrier. A seed decides which fiber runs next. When all fibers sleep,
 * the clock moves to the time when the first one wakes. It also moves at each switch of fibers, and
 * by 4 microseconds over the number of ranks whenever it is read. So a run is a function of its
 * input, minutes of silence take milliseconds, and every deadlock or endless exchange is found.
 *
 * The compiler includes threads.h before every source of lossynet (-include). It replaces pthreads,
 * the clock and random numbers by the functions below.
 */
#ifndef SIMULATION_H
#define SIMULATION_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

/* ---- replacements for pthreads and the clock ---- */

ssize_t simulated_getrandom(void *bytes, size_t count, unsigned flags);
int simulated_clock_gettime(clockid_t clock, struct timespec *t);
int simulated_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                     void *argument);
int simulated_join(pthread_t thread, void **result);
int simulated_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes);
int simulated_mutex_lock(pthread_mutex_t *mutex);
int simulated_mutex_trylock(pthread_mutex_t *mutex);
int simulated_mutex_unlock(pthread_mutex_t *mutex);
int simulated_mutex_destroy(pthread_mutex_t *mutex);
int simulated_cond_init(pthread_cond_t *condition, const pthread_condattr_t *attributes);
int simulated_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex);
int simulated_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex,
                             const struct timespec *until);
int simulated_cond_signal(pthread_cond_t *condition); /* wakes all waiters; POSIX allows this */
int simulated_cond_destroy(pthread_cond_t *condition);

/* Included after these declarations, because headers of lossynet have functions that read the
 * clock. */
#include "lossynet/link/link.h"

/* ---- the run ---- */

struct simulation_settings {
    int ranks;
    uint64_t seed;          /* of the schedule */
    double longest_seconds; /* limit of simulated time; beyond it the program aborts */
    uint64_t most_switches; /* limit of switches between fibers; beyond it the program aborts */
    size_t payload_most;    /* largest payload of a datagram, bytes */
    int receive_queue;      /* datagrams that a rank's receive queue holds */
    double latency;         /* seconds, in one direction */

    /* Called for each datagram and receiver. It calls simulation_deliver once for each copy that
     * shall arrive, now or later, changed or not. bytes is a copy that it may change. */
    void (*carry)(int sender, int receiver, uint8_t *bytes, size_t count);
};

/* Runs rank(0) ... rank(ranks - 1), each in a fiber, until all have returned. If there is a
 * deadlock or no end, it prints a message and aborts. */
void simulation_run(const struct simulation_settings *settings, void (*rank)(int rank));

double simulation_now(void);                    /* seconds; a run begins at 1 */
void simulation_sleep(double seconds);          /* lets this fiber sleep */
void simulation_stop(int rank, double seconds); /* stops all fibers of a rank for this time */
uint64_t simulation_switches(int rank);         /* how often a fiber of this rank has run so far */

/* Sends a copy of a datagram to `receiver`. It arrives after the latency and `delay` seconds, and
 * the receiver sees it as coming from `peer`. */
void simulation_deliver(int receiver, int peer, const uint8_t *bytes, size_t count, double delay);

uint64_t simulation_random(void);     /* from the schedule's seed */
bool simulation_chance(double share); /* true with this probability */
/* Aborts the program if `done` is false, and says what has failed. */
void simulation_require(bool done, const char *what);

lossynet_status simulation_share(void *context, const struct lossynet_world *world, void *all,
                                 size_t bytes);
lossynet_status simulation_link_open(const struct ln_link_settings *settings, struct ln_link **out);

#endif
