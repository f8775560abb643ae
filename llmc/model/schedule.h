/* schedule.h — the learning rate: linear warm-up, then a cosine down to a fraction of the peak. */
#ifndef LLMC_MODEL_SCHEDULE_H
#define LLMC_MODEL_SCHEDULE_H

#include <math.h>

/* Learning rate of step 0 ... steps-1. Warm-up reaches `peak` in step `warmup`-1. The last step
 * has peak * final_fraction. A warm-up that is longer than the training ends with it. */
static inline double schedule_learning_rate(int step, int steps, int warmup, double peak,
                                            double final_fraction) {
    const double pi = 3.14159265358979323846;
    if (step < warmup) return peak * (step + 1) / warmup;
    int length = steps - 1 - warmup;
    double progress = length > 0 ? (double)(step - warmup) / length : 0;
    double cosine = 0.5 * (1 + cos(pi * progress));
    return peak * (final_fraction + (1 - final_fraction) * cosine);
}

#endif
