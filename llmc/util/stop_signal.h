/* stop_signal.h — receives signals that ask the program to save and to stop.
 *
 *     SIGTERM            schedulers, docker, systemd, kill
 *     SIGINT, SIGQUIT    Ctrl-C and Ctrl-\ of a terminal
 *     SIGHUP             the terminal or its connection is gone
 *     SIGUSR1, SIGUSR2   warnings of Slurm (--signal), Grid Engine (-notify) and LSF
 *     SIGXCPU            a limit on processor time (ulimit -t, Grid Engine's s_cpu)
 *     SIGALRM, SIGVTALRM an alarm that was set before the program took over (alarm and exec)
 *     SIGPWR             the power of a container or machine fails
 *     SIGPIPE            nobody reads stdout or stderr any more
 *
 * One thread waits for all but SIGPIPE, and all other threads block them. So no signal handler ever runs
 * on a thread that computes. This matters: oneDNN's sgemm for AVX2 and AVX-512, before version 3.11.2,
 * lets the stack pointer point into the heap, and the frame of a signal handler would overwrite the heap
 * there (oneDNN issue 4845).
 *
 * SIGXFSZ (ulimit -f) is ignored: a file that may not grow is an error of the write.
 */
#ifndef LLMC_UTIL_STOP_SIGNAL_H
#define LLMC_UTIL_STOP_SIGNAL_H

#include <stdbool.h>

/* Ignores SIGINT, SIGHUP and SIGQUIT again if the caller ignored them and a library handles them since it was
 * loaded. Call this first in main, and before a program that is to take over (exec). */
void stop_signal_ignore_again(void);

/* Blocks the signals and starts the thread that waits for them. Call this in main before any other
 * thread exists, because threads inherit blocked signals. SIGINT, SIGHUP, SIGQUIT or SIGPIPE that is
 * ignored (nohup, a shell's background job) stays ignored. If the thread cannot be started, the signals end the
 * program, as if this function had not been called. */
void stop_signal_open(void);

/* on: from now on a signal is noted. A SIGINT or SIGQUIT more than a second after the first ends the
 * program at once. Off, as at the start: a signal ends the program at once, and signals that were noted
 * before are forgotten. */
void stop_signal_note(bool on);

/* A run begins, and will call stop_signal_note(true) when it makes steps. A signal is noted until then,
 * and ends the program if that takes longer than 10 s. Does nothing if signals are noted. */
void stop_signal_note_start(void);

/* Returns the number of the last signal that was noted, or 0. */
int stop_signal_seen(void);

#endif
