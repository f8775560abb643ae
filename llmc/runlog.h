/* runlog.h — what a run leaves behind: a log of JSON lines for scripts, lines and a progress bar
 * for people. The fields of the log are documented in README.md ("The log").
 */
#ifndef LLMC_RUNLOG_H
#define LLMC_RUNLOG_H

#include <jansson.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

double runlog_seconds(void); /* monotonic clock */

/* A number as JSON; null when it is not finite, since JSON has no infinity. */
json_t *runlog_number(double value);

/* A float32 as people write it: 1e-05, not the double next to it, 9.99999975e-06. */
json_t *runlog_float(float value);

/* ---- the JSON lines ---- */
struct runlog; /* NULL is a log that keeps nothing */

/* Creates the file. step: steps done when the run begins; 0 empties an older file, a resumed run's
 * keeps what it says of the steps before, and loses what came after. 0, or -1 after reporting. */
int runlog_open(const char *path, int step, struct runlog **out);
/* Writes one line; takes over the reference to `event`, also when log is NULL. 0, or -1 when the
 * line could not be written (a full disk): it is left out as a whole, which is reported once.
 * Training goes on without it. */
int runlog_write(struct runlog *log, json_t *event);
void runlog_close(struct runlog *log);

/* ---- the terminal ---- */
struct progress {
    bool on;       /* print anything at all */
    bool terminal; /* stdout is one: draw a bar */
    int first, total, printed_at;
    double start, last;
};

/* A run from `first` to `total` steps. */
void progress_begin(struct progress *p, int first, int total, bool on);
/* Says that `done` of `total` steps are done. `line` describes the step in at most 60 columns; it
 * is printed now and then (about 20 times a run), the bar is redrawn at most 10 times a second. */
void progress_step(struct progress *p, int done, const char *line);
void progress_message(struct progress *p, const char *line); /* a line above the bar, at once */
void progress_end(struct progress *p);                       /* clears the bar */

#ifdef __cplusplus
}
#endif
#endif
