/* evaluate.h — perplexity of a model and of its replicas. How a model computes losses is the caller's
 * function. */
#ifndef LLMC_RUN_EVALUATE_H
#define LLMC_RUN_EVALUATE_H

#include "llmc/comm/data_parallel.h"
#include "llmc/data/dataloader.h"
#include "llmc/log/metrics.h"
#include "llmc/model/activations.h"

struct evaluate_model {
    struct data_parallel *dp;
    struct activations *activations; /* [sets] */
    int B;                           /* sequences that the activations have room for */
    /* The losses (B, T), in the host's memory, of the tokens in e->host_tokens and
     * e->host_targets. */
    const float *(*losses)(void *context, const weight *weights, struct activations *e, int B,
                           int T);
    void *context;
};

/* The perplexity is exp of the mean loss over all tokens that the validation windows score, at most
 * --eval-sequences windows. Worker i mod N evaluates window i, once with the model and, unless they
 * are equal, once with its own replica. Collective. Returns 0; -1 after reporting; or, about a second
 * after a signal asked any rank to stop (stop_signal.h), EVALUATE_STOPPED, and *out is not set. */
enum { EVALUATE_STOPPED = 1 };
int evaluate_perplexity(const struct evaluate_model *m, struct dataloader *val, int steps_done,
                        struct eval_metrics *out);

#endif
