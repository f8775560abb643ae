/* schedule.h — the learning rate of a step: linear warm-up to the peak, and one of four courses.
 *
 *     cosine     down to a fraction of the peak (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5)
 *     linear     the same in a straight line
 *     wsd        warm-up, stable, decay: stays at the peak, and falls in the last share of the steps
 *                (Hu et al. 2024, "MiniCPM", arXiv:2404.06395, section 4)
 *     constant   stays at the peak
 *
 * Rates of wsd and constant do not depend on the number of steps until the decay begins. So a run
 * can be continued beyond its --steps from a checkpoint that was saved before.
 */
#ifndef LLMC_MODEL_SCHEDULE_H
#define LLMC_MODEL_SCHEDULE_H

#include <math.h>

/* In the order of schedule_names and decay_names (options.h). */
enum schedule_kind { SCHEDULE_COSINE, SCHEDULE_WSD, SCHEDULE_LINEAR, SCHEDULE_CONSTANT };
enum schedule_decay { SCHEDULE_DECAY_SQRT, SCHEDULE_DECAY_LINEAR };

struct schedule {
    int kind, steps, warmup;
    double peak, final_fraction; /* the last step has peak * final_fraction, unless constant */
    double decay;                /* wsd: share of the steps that decay, 0 ... 1 */
    int decay_shape;             /* wsd */
};

/* The first step of the decay of wsd. The decay cannot begin before the warm-up has ended. */
static inline int schedule_decay_begins(const struct schedule *s) {
    const int begins = s->steps - (int)lround(s->decay * s->steps);
    return begins > s->warmup ? begins : s->warmup;
}

/* What is left of the peak above the final rate, from 1 to 0. n of the N steps of the decay are
 * done. "1-sqrt" is 1 - sqrt(n / N): Hägele et al. 2024, arXiv:2405.18392, section 3.2. */
static inline double schedule_decayed(const struct schedule *s, int step) {
    const int begins = schedule_decay_begins(s);
    const double progress = step < begins ? 0 : (double)(step - begins + 1) / (s->steps - begins);
    return 1 - (s->decay_shape == SCHEDULE_DECAY_SQRT ? sqrt(progress) : progress);
}

/* Learning rate of step 0 ... steps-1. Warm-up reaches the peak in step warmup-1. A warm-up that is
 * longer than the training ends with it. */
static inline double schedule_learning_rate(const struct schedule *s, int step) {
    const double pi = 3.14159265358979323846;
    if (step < s->warmup) return s->peak * (step + 1) / s->warmup;
    const int length = s->steps - 1 - s->warmup;
    const double progress = length > 0 ? (double)(step - s->warmup) / length : 0;
    const double left = s->kind == SCHEDULE_COSINE   ? 0.5 * (1 + cos(pi * progress))
                        : s->kind == SCHEDULE_WSD    ? schedule_decayed(s, step)
                        : s->kind == SCHEDULE_LINEAR ? 1 - progress
                                                     : 1;
    return s->peak * (s->final_fraction + (1 - s->final_fraction) * left);
}

#endif
