/* sampler.h — draws the next token from logits: temperature and nucleus (top-p) sampling
 * (Holtzman et al. 2020). */
#ifndef LLMC_MODEL_SAMPLER_H
#define LLMC_MODEL_SAMPLER_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

struct sampler_choice {
    float p;
    int32_t token;
};

static inline int sampler_compare(const void *a, const void *b) {
    const struct sampler_choice *x = (const struct sampler_choice *)a;
    const struct sampler_choice *y = (const struct sampler_choice *)b;
    if (x->p != y->p) return x->p < y->p ? 1 : -1;
    return x->token - y->token; /* a fixed order among equal logits */
}

/* Draws a token. logits (V); scratch[V]; uniform: a random number in [0, 1). Temperature 0 takes
 * the most likely token, the first of equals. Otherwise the token is drawn from the smallest set
 * of most likely tokens whose probability is at least top_p. */
static inline int32_t sampler_draw(const float *logits, int V, double temperature, double top_p,
                                   double uniform, struct sampler_choice *scratch) {
    int best = 0;
    for (int i = 1; i < V; i++) {
        if (logits[i] > logits[best]) best = i;
    }
    if (temperature <= 0) return best;
    double sum = 0, kept = 0;
    for (int i = 0; i < V; i++) {
        scratch[i].p = (float)exp((logits[i] - logits[best]) / temperature);
        scratch[i].token = i;
        sum += scratch[i].p;
    }
    /* The tokens below this bound have less than 1 - top_p together, so the set is found without
     * them. */
    const double least = (1 - top_p) * sum / V;
    int likely = 0;
    for (int i = 0; i < V; i++) {
        if (scratch[i].p >= least) scratch[likely++] = scratch[i];
    }
    qsort(scratch, (size_t)likely, sizeof *scratch, sampler_compare);
    int count = 0;
    while (count < likely && (count == 0 || kept < top_p * sum)) kept += scratch[count++].p;
    double target = uniform * kept;
    for (int i = 0; i < count; i++) {
        target -= scratch[i].p;
        if (target < 0) return scratch[i].token;
    }
    return scratch[count - 1].token;
}

#endif
