/* jsonl.h — the log of a run: JSON lines for scripts; text lines and a progress bar on the
 * terminal for people. README.md of this folder documents the fields. */
#ifndef LLMC_LOG_JSONL_H
#define LLMC_LOG_JSONL_H

#include <jansson.h>
#include <stdbool.h>

double log_seconds(void); /* monotonic clock */

/* A number as JSON; null if it is not finite, since JSON has neither NaN nor infinity. */
json_t *jsonl_number(double value);

/* A float32 as the shortest decimal: 1e-05, and not 9.99999975e-06, the double of the same
 * value. */
json_t *jsonl_float(float value);

/* ---- the JSON lines ---- */
struct jsonl; /* a NULL log discards every line */

/* Creates or opens the file. step: number of steps that are done when the run begins. With 0 an
 * older file is emptied. A resumed run keeps the lines about earlier steps, and removes the
 * lines about later ones. Returns 0, or -1 after reporting. */
int jsonl_open(const char *path, int step, struct jsonl **out);
/* The same for a run: makes the directory `out_directory`, and opens `path`, or log.jsonl in that
 * directory. Either may be NULL; if both are, or on a rank other than 0, there is no log.
 * checkpoint: where the run begins, and saved: the trainer.json there; or NULL. A log that other runs
 * have written than the one which saved that checkpoint, or one which began there, is refused and stays. */
int jsonl_open_of_run(const char *path, const char *out_directory, int rank, int step,
                      const char *checkpoint, const json_t *saved, struct jsonl **out);
/* Writes one line, and takes over the reference to `event`, also if log is NULL. Returns 0, or
 * -1 if the line could not be written (for example on a full disk). The line is then missing as
 * a whole, which is reported once, and training goes on. */
int jsonl_write(struct jsonl *log, json_t *event);
/* The last step of an earlier part of the run that is in the log, or -1 if there is none. */
int jsonl_last_step(const struct jsonl *log);
/* Reports the first lines of an earlier part of the run that are missing before step `step`, where
 * the run goes on, as after a loss of power. */
void jsonl_report_gap(const struct jsonl *log, int step);
void jsonl_close(struct jsonl *log);

/* ---- the terminal ---- */
struct progress {
    bool on;  /* print anything at all */
    bool bar; /* on a terminal: draw a bar below the lines */
    int first, total, printed_at;
    double start, last;
};

/* A run from `first` to `total` steps. */
void progress_begin(struct progress *p, int first, int total, bool on, bool bar);
/* Tells that `done` of `total` steps are done. `line` describes the step in at most 79 columns.
 * It is printed about 20 times per run; the bar is drawn again at most 10 times per second. */
void progress_step(struct progress *p, int done, const char *line);
void progress_message(struct progress *p, const char *line); /* a line above the bar, at once */
void progress_end(struct progress *p);                       /* clears the bar */

#endif
