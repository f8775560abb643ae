/* record.h — what is said about each step, evaluation and run: to the log as JSON and to people as
 * a line. README.md ("The log") explains every field.
 */
#ifndef LLMC_RECORD_H
#define LLMC_RECORD_H

#include <stdbool.h>
#include <stdint.h>

#include "llmc/runlog.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { RECORD_EVENTS = 6, RECORD_AGES = 8 };

struct step_record {
    int step;         /* 0, 1, ... */
    double loss;      /* mean over workers */
    double grad_norm; /* of the averaged gradient, before clipping */
    double learning_rate;
    double tokens, seconds, communication_seconds;
    /* packets that travelled between workers, by phase: gradient, parameter */
    double expected[2], arrived[2];
    double resent[2];                          /* in repair rounds */
    double drift, drift_expected, drift_paper; /* NaN: has no meaning here */
    double mean_age;
    int64_t max_age;
    double age_share[RECORD_AGES];   /* of packets aged 0, 1, ...; the last: that or more */
    uint64_t network[RECORD_EVENTS]; /* what the network did, by enum lossynet_event */
};

struct eval_record {
    int step;                          /* steps done */
    double val_loss, replica_val_loss; /* mean negative log-likelihood, natural logarithm */
    int64_t tokens;
    double tokens_per_word; /* 0: the token files don't tell */
};

/* Sums of a run's steps; start with zeros. */
struct run_record {
    int steps;
    struct step_record sum;
};

void record_add(struct run_record *run, const struct step_record *step);

/* Perplexity per word of the text, NaN when the number of words is not known. */
double record_word_perplexity(const struct eval_record *eval);

int record_log_step(struct runlog *log, const struct step_record *step);
int record_log_eval(struct runlog *log, const struct eval_record *eval);
/* status: "complete", or why not; eval: the last one, NULL for none; checkpoint: "" for none. */
int record_log_end(struct runlog *log, const struct run_record *run, const char *status,
                   const struct eval_record *eval, const char *checkpoint);

/* A line of text that the model wrote after `step` steps, to the terminal and to the log. */
int record_sample(struct progress *progress, struct runlog *log, int step, const char *text);

/* Lines of at most 79 columns. losses: with the shares of packets lost. */
void record_show_step(struct progress *progress, const struct step_record *step, bool losses);
void record_show_eval(struct progress *progress, const struct eval_record *eval);

#ifdef __cplusplus
}
#endif
#endif
