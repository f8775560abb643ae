/* dblp.c — a rule for --rule: DBLP's phases. In a critical phase all packets arrive. Else what is lost stays lost
 * (with --estimator zero it counts as zero).
 *
 * The phase is Accordion's (Agarwal et al. 2021), which DBLP takes: each tenth step the norm of the averaged
 * gradient is compared with that of ten steps before. If it has changed by half or more, the next ten steps are
 * critical. A run begins critical, and so does one that is resumed.
 */
#include "lossynet.h"

#include <math.h>

static bool reliable(void *context, lossynet_phase phase, uint64_t step, uint64_t steps,
                     double norm) {
    enum { EVERY = 10 };
    static const double ETA = 0.5;
    static double then;
    static bool tolerates;
    (void)context, (void)steps;
    if (phase != LOSSYNET_PARAMETER || (step + 1) % EVERY) return !tolerates;
    if (then > 0) tolerates = fabs(norm - then) < ETA * then;
    then = norm;
    return !tolerates;
}

const struct lossynet_rule lossynet_rule = {.size = sizeof lossynet_rule, .reliable = reliable};
