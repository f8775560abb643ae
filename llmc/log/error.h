/* error.h — how llmc tells a user what went wrong.
 *
 * Functions of llmc that can fail return 0, or -1 after exactly one line on stderr. The function
 * that first sees the error writes that line; callers only pass the -1 up. A line says what
 * happened, where (file, rank), which value was found, what was expected and what to do.
 */
#ifndef LLMC_LOG_ERROR_H
#define LLMC_LOG_ERROR_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Begins every line; "train_llama2" unless another program sets its own name. */
extern const char *log_program;

/* Rank that every line names if it is >= 0. It starts as -1, which suits a program of one rank. */
extern int log_rank;

/* If true, nothing is written. Used where every rank finds the same error and one rank reports
 * it. */
extern bool log_muted;

/* Writes "train_llama2: ...\n", or "train_llama2: rank R: ...\n", to stderr in one write, so
 * that lines of several ranks do not mix. The format has no newline at its end. Control
 * characters become '?', since names may come from untrusted files. A line over 1,000 bytes is
 * cut. Always returns -1. Thread-safe; does not change errno. */
int log_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The same for a command line that is wrong: 2, the exit code for that. */
#define log_wrong_usage(...) (log_error(__VA_ARGS__), 2)

/* What errno says; where a limit of the process keeps a file from growing, which, and what to do. Valid until
 * the thread's next call. */
const char *log_reason(void);

/* Reports a failed allocation: "out of memory: 12.3 MB for WHAT". Returns -1. */
int log_out_of_memory(const char *what, double bytes);

#ifdef __clang_analyzer__ /* looks at one file at a time, and would try what comes after 0, too */
#define log_error(...) (log_error(__VA_ARGS__), -1)
#define log_out_of_memory(what, bytes) (log_out_of_memory(what, bytes), -1)
#endif

#ifdef __cplusplus
}
#endif
#endif
