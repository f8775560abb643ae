/* simulation.h — several ranks in one thread, on a clock and a network that a test controls.
 *
 * Every thread of the program under test is a fiber: the ranks, and the threads that lossynet
 * starts itself. One fiber runs at a time; it gives way where a thread could sleep: at a mutex, a
 * condition, a link's wait, a barrier. Which fiber goes on is drawn from a seed. The clock moves
 * when all sleep, to the first that is due, and by 4 microseconds over the number of ranks whenever
 * it is read. So a run is a function of its input, minutes of silence take milliseconds, and a
 * deadlock or an endless exchange is seen for certain.
 *
 * threads.h, included by the compiler before every source of lossynet (-include), replaces
 * pthreads, the clock and random numbers by what is declared here.
 */
#ifndef SIMULATION_H
#define SIMULATION_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

/* ---- in the place of pthreads and the clock ---- */

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
int simulated_cond_signal(pthread_cond_t *condition); /* wakes all, as it may */
int simulated_cond_destroy(pthread_cond_t *condition);

/* After these: headers of lossynet have functions that read the clock. */
#include "lossynet/link/link.h"

/* ---- the run ---- */

struct simulation_settings {
    int ranks;
    uint64_t seed;          /* of the schedule */
    double longest_seconds; /* simulated; a run that takes longer aborts the program */
    uint64_t most_switches; /* between fibers; the same */
    bool multicast;         /* the links offer it */
    size_t payload_most;
    int receive_queue;
    double latency; /* seconds */

    /* Called for each datagram and receiver: calls simulation_deliver as often as it shall arrive,
     * now or later, changed or not. bytes is a copy that may be written. */
    void (*carry)(int sender, int receiver, uint8_t *bytes, size_t count);
};

/* Runs rank(0) ... rank(ranks - 1), each in a fiber, until all have returned. Whatever
 * cannot go on or does not end says so and aborts. */
void simulation_run(const struct simulation_settings *settings, void (*rank)(int rank));

double simulation_now(void);                    /* seconds, from 1 on */
void simulation_sleep(double seconds);          /* this fiber */
void simulation_stop(int rank, double seconds); /* none of a rank's fibers runs for so long */

/* Puts a copy of a datagram on its way to `receiver`, there after `delay` seconds and known there
 * as coming from `peer`. */
void simulation_deliver(int receiver, int peer, const uint8_t *bytes, size_t count, double delay);

uint64_t simulation_random(void);     /* of the schedule's seed */
bool simulation_chance(double share); /* true with this probability */
/* Ends the program where a call that must not fail has failed. */
void simulation_require(bool done, const char *what);

lossynet_status simulation_share(void *context, const struct lossynet_world *world, void *all,
                                 size_t bytes);
lossynet_status simulation_link_open(const struct lossynet_link_settings *settings,
                                     struct lossynet_link **out);

#endif
