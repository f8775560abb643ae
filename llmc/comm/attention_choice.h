/* attention_choice.h — --attention: whose kernels compute attention, the same on all ranks. */
#ifndef LLMC_COMM_ATTENTION_CHOICE_H
#define LLMC_COMM_ATTENTION_CHOICE_H

#include "llmc/backend/backend.h"
#include "llmc/cli/options.h"
#include "llmc/model/config.h"
#include "lossynet/lossynet.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sets be->attention_choice for B sequences of T tokens. What ranks chose before stays (in an
 * earlier view, or in the checkpoint of --resume, by the same device and library). Else each rank
 * tries cuDNN on random numbers of the run's shape: it is taken only where its results are the own
 * kernels' within what rounding to bfloat16 explains, and the same bits twice, on all ranks; with
 * --attention auto only if it is faster on rank 0 as well. So a wrong graph, or a wrong library,
 * never trains. Nothing happens with --attention own. tell: says on the terminal what was taken,
 * and why. Collective, before the run takes its memory. Returns 0, or -1 after reporting:
 * --attention cudnn, and cuDNN cannot. */
int attention_choose(const struct options *o, const struct llama_config *c, int B, int T,
                     const struct backend *be, const struct lossynet_world *world, bool tell);

/* Of `count` rows of D numbers (bfloat16), `row` apart: the most that one of b differs from a's, in
 * units of what rounding may do to it, 10% of its norm and 0.06 sqrt(D * share / (t + 1)) for row t
 * of T: results of attention are means over t + 1 tokens, where inputs have variance 1 and `share`
 * query heads add up. Rounding alone comes to 0.1 with heads of 48, and to 0.3 with heads of 8;
 * what is wrong comes to 6 and more. NaN counts as infinite. */
double attention_difference(const uint16_t *a, const uint16_t *b, size_t count, int T, int D,
                            size_t row, int share);

#ifdef __cplusplus
}
#endif
#endif
