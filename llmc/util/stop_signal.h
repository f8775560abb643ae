/* stop_signal.h — receives signals that ask the program to save and to stop.
 *
 * One thread waits for SIGTERM, SIGUSR1 and SIGINT, and all other threads block them. So no signal
 * handler ever runs on a thread that computes. This matters: oneDNN's sgemm for AVX2 and AVX-512,
 * before version 3.11.2, lets the stack pointer point into the heap, and the frame of a signal
 * handler would overwrite the heap there (oneDNN issue 4845).
 */
#ifndef LLMC_UTIL_STOP_SIGNAL_H
#define LLMC_UTIL_STOP_SIGNAL_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Blocks the signals and starts the thread that waits for them. Call this in main before any other
 * thread exists, because threads inherit blocked signals. A SIGINT that is ignored (nohup, a
 * shell's background job) stays ignored. If the thread cannot be started, the signals end the
 * program, as if this function had not been called. */
void stop_signal_open(void);

/* on: from now on a signal is noted. A second SIGINT, more than a second after the first, ends the
 * program at once. Off, as at the start: a signal ends the program at once. A change of `on`
 * forgets signals that were noted before. */
void stop_signal_note(bool on);

/* Returns the number of the last signal that was noted, or 0. */
int stop_signal_seen(void);

#ifdef __cplusplus
}
#endif
#endif
