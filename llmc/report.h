/* report.h — how llmc tells a user what went wrong.
 *
 * Functions of llmc that can fail return 0, or -1 after exactly one line on stderr. The function
 * that first sees the error writes that line; callers only pass the -1 up. A line says what
 * happened, where (file, rank), which value was found, what was expected and what to do.
 */
#ifndef LLMC_REPORT_H
#define LLMC_REPORT_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Begins every line; "train_llama2" unless another program sets its own name. */
extern const char *report_program;

/* Named in every line once it is >= 0; -1, the value at the start, suits a program of one rank. */
extern int report_rank;

/* True: nothing is written. For what every rank finds and one tells. */
extern bool report_muted;

/* Writes "train_llama2: ...\n", or "train_llama2: rank R: ...\n", to stderr in one write, so that
 * lines of several ranks do not mix. The format has no newline at its end. Control characters
 * become '?' (names come from files of strangers), a line over 1,000 bytes is cut. Always returns
 * -1. Thread-safe; errno is left as it was. */
int report(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The same for memory that was not to be had: "out of memory: 12.3 MB for WHAT". */
int report_out_of_memory(const char *what, double bytes);

#ifdef __cplusplus
}
#endif
#endif
