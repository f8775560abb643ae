/* stop_signal.c — see stop_signal.h. */
#include "llmc/util/stop_signal.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

static sigset_t waited_for;
static atomic_bool noting;
static atomic_int seen;

/* Ends the program as the signal does by default, so that a shell sees the right status. */
static void end_by(int number) {
    sigset_t only;
    sigemptyset(&only);
    sigaddset(&only, number);
    signal(number, SIG_DFL);
    raise(number);
    pthread_sigmask(SIG_UNBLOCK, &only, NULL);
}

/* `timeout -s INT` sends SIGINT twice within a moment, so a second one counts only a second
 * later. */
static void *wait_for_signals(void *unused) {
    time_t first = 0;
    (void)unused;
    for (int number; !sigwait(&waited_for, &number);) {
        time_t now = time(NULL);
        if (!atomic_load(&seen)) first = now;
        if (!atomic_load(&noting) || (number == SIGINT && now > first + 1)) end_by(number);
        atomic_store(&seen, number);
    }
    return NULL;
}

void stop_signal_open(void) {
    struct sigaction interrupt;
    pthread_t thread;
    sigemptyset(&waited_for);
    sigaddset(&waited_for, SIGTERM);
    sigaddset(&waited_for, SIGUSR1);
    if (!sigaction(SIGINT, NULL, &interrupt) && interrupt.sa_handler != SIG_IGN)
        sigaddset(&waited_for, SIGINT);
    pthread_sigmask(SIG_BLOCK, &waited_for, NULL);
    if (pthread_create(&thread, NULL, wait_for_signals, NULL))
        pthread_sigmask(SIG_UNBLOCK, &waited_for, NULL);
    else
        pthread_detach(thread);
}

void stop_signal_note(bool on) {
    if (atomic_load(&noting) == on) return;
    atomic_store(&seen, 0);
    atomic_store(&noting, on);
}

int stop_signal_seen(void) {
    return atomic_load(&seen);
}
