/* metrics.h — writes the numbers of a step, an evaluation and a run: as JSON to the log, as text to
 * the terminal. README.md of this folder explains every field. */
#ifndef LLMC_LOG_METRICS_H
#define LLMC_LOG_METRICS_H

#include <stdbool.h>
#include <stdint.h>

#include "llmc/log/jsonl.h"

enum { METRICS_EVENTS = 7, METRICS_AGES = 8 };

struct step_metrics {
    int step;         /* 0, 1, ... */
    double loss;      /* mean over workers */
    double grad_norm; /* of the averaged gradient, before clipping */
    double learning_rate;
    double tokens, seconds, communication_seconds;
    /* packets between workers, by phase (gradient, parameter) */
    double expected[2], arrived[2];
    double resent[2];                          /* in retransmission rounds */
    double drift, drift_expected, drift_paper; /* NaN: not defined for this algorithm */
    double lead, lag; /* of the broadcast; of the mean replica behind the model; both in steps */
    double mean_age;
    int64_t max_age;
    double age_share[METRICS_AGES];   /* share of packets by age; the last: this age and older */
    uint64_t network[METRICS_EVENTS]; /* counters, indexed by enum lossynet_event */
};

struct eval_metrics {
    int step;                          /* steps done */
    double val_loss, replica_val_loss; /* mean negative log-likelihood, natural logarithm */
    int64_t tokens;
    double tokens_per_word, tokens_per_byte; /* 0: the token files do not say */
};

/* Sums over a run's steps. The caller starts with zeros. */
struct run_metrics {
    int steps;
    struct step_metrics sum;
};

void metrics_add(struct run_metrics *run, const struct step_metrics *step);

int metrics_log_step(struct jsonl *log, const struct step_metrics *step);

struct metrics_traffic { /* by phase */
    int rounds[2];       /* in which lost packets are sent again, as they are at the end */
    double bytes[2];     /* of an element on the wire */
};
/* Prints what happened to packets: the shares that were lost in the end and sent again, the bytes
 * beside those of plain bf16, and values that are very old. */
void metrics_print_traffic(const struct run_metrics *run, const struct metrics_traffic *traffic);
/* status: "complete", or the reason why not. eval: the last one, or NULL. checkpoint: "" if
 * there is none. */
int metrics_log_end(struct jsonl *log, const struct run_metrics *run, const char *status,
                    const struct metrics_traffic *traffic, const struct eval_metrics *eval,
                    const char *checkpoint);

/* Writes a line of text, which the model wrote after `step` steps, to the terminal and to the
 * log. */
int metrics_sample(struct progress *progress, struct jsonl *log, int step, const char *text);

/* Prints a line of at most 79 columns. losses: include the shares of lost packets. */
void metrics_show_step(struct progress *progress, const struct step_metrics *step, bool losses);
/* Writes an evaluation to the terminal and to the log. */
int metrics_eval(struct progress *progress, struct jsonl *log, const struct eval_metrics *eval);
/* Prints loss, perplexity and number of tokens to stdout. */
void metrics_print_eval(const struct eval_metrics *eval);

#endif
