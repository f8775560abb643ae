/* stop_signal.c — see stop_signal.h. */
#include "llmc/util/stop_signal.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

enum { END, START, NOTE }; /* what a signal does: see stop_signal_note and stop_signal_note_start */
enum { START_SECONDS = 10 };

static sigset_t waited_for;
static atomic_int mode;
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

/* Waits for a signal. During a start that one has asked to stop, it looks every 0.1 s whether steps have
 * begun, and returns 0 then and after each look. */
static int next_signal(void) {
    const struct timespec look = {0, 100 * 1000 * 1000};
    const bool starts = atomic_load(&mode) == START && atomic_load(&seen);
    const int number = sigtimedwait(&waited_for, NULL, starts ? &look : NULL);
    return number < 0 ? 0 : number;
}

/* `timeout -s INT` sends SIGINT twice within a moment, so a second one counts only a second
 * later. */
static void *wait_for_signals(void *unused) {
    time_t first = 0;
    (void)unused;
    for (;;) {
        const int number = next_signal(), does = atomic_load(&mode);
        const time_t now = time(NULL);
        if (!number && does == START && atomic_load(&seen) && now > first + START_SECONDS)
            end_by(atomic_load(&seen));
        if (!number) continue;
        if (!atomic_load(&seen)) first = now;
        const bool typed = number == SIGINT || number == SIGQUIT;
        if (does == END || (typed && now > first + 1)) end_by(number);
        atomic_store(&seen, number);
    }
    return NULL;
}

/* SIGPIPE comes to the thread that wrote, whose stack is its own then, unlike in oneDNN. A closed
 * connection is no reason to stop. What is printed after the first SIGPIPE is lost. */
static void note_closed_output(int number) {
    const int error = errno;
    struct pollfd output[2] = {{STDOUT_FILENO, 0, 0}, {STDERR_FILENO, 0, 0}};
    const bool closed =
        poll(output, 2, 0) > 0 && ((output[0].revents | output[1].revents) & (POLLERR | POLLHUP));
    if (closed && atomic_load(&mode) == END) end_by(number);
    if (closed) atomic_store(&seen, number), signal(SIGPIPE, SIG_IGN);
    errno = error;
}

static bool is_ignored(int number) {
    struct sigaction action;
    return !sigaction(number, NULL, &action) && action.sa_handler == SIG_IGN;
}

/* What the caller ignores, as found before libraries are initialised: UCX, which Open MPI 5 brings, handles
 * SIGHUP from then on. */
static const int unless_ignored[] = {SIGINT, SIGHUP, SIGQUIT};
enum { UNLESS_IGNORED = sizeof unless_ignored / sizeof *unless_ignored };
static bool ignored[UNLESS_IGNORED];

static void find_ignored(void) {
    for (int i = 0; i < UNLESS_IGNORED; i++) ignored[i] = is_ignored(unless_ignored[i]);
}

__attribute__((section(".preinit_array"),
               used)) static void (*const before_libraries)(void) = find_ignored;

void stop_signal_ignore_again(void) {
    for (int i = 0; i < UNLESS_IGNORED; i++)
        if (ignored[i]) signal(unless_ignored[i], SIG_IGN);
}

void stop_signal_open(void) {
    static const int always[] = {SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, SIGALRM, SIGVTALRM, SIGPWR};
    struct sigaction pipe = {.sa_handler = note_closed_output, .sa_flags = SA_RESTART};
    pthread_t thread;
    sigemptyset(&waited_for);
    for (size_t i = 0; i < sizeof always / sizeof *always; i++) sigaddset(&waited_for, always[i]);
    for (int i = 0; i < UNLESS_IGNORED; i++)
        if (!ignored[i]) sigaddset(&waited_for, unless_ignored[i]);
    signal(SIGXFSZ, SIG_IGN);
    if (!is_ignored(SIGPIPE)) sigaction(SIGPIPE, &pipe, NULL);
    pthread_sigmask(SIG_BLOCK, &waited_for, NULL);
    if (pthread_create(&thread, NULL, wait_for_signals, NULL))
        pthread_sigmask(SIG_UNBLOCK, &waited_for, NULL);
    else
        pthread_detach(thread);
}

static void set_mode(int wanted) {
    if (atomic_load(&mode) == END || wanted == END) atomic_store(&seen, 0);
    atomic_store(&mode, wanted);
}

void stop_signal_note(bool on) {
    set_mode(on ? NOTE : END);
}

void stop_signal_note_start(void) {
    if (atomic_load(&mode) == END) set_mode(START);
}

int stop_signal_seen(void) {
    return atomic_load(&seen);
}
