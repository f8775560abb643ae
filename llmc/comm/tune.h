/* tune.h — --tune: which algorithms multiply, timed by rank 0, the same on all ranks. */
#ifndef LLMC_COMM_TUNE_H
#define LLMC_COMM_TUNE_H

#include "llmc/backend/backend.h"
#include "llmc/cli/options.h"
#include "llmc/model/config.h"
#include "lossynet/lossynet.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fills be->product_choices with the algorithms for a model's products of N tokens. Where ranks have
 * made choices before (in an earlier view, or in the checkpoint of --resume, by the same device and
 * library), those stay; rank 0 times the shapes that are new. Nothing happens without --tune, and on
 * a backend that has no choice. With --dtype fp8 the classifier's, which are of bfloat16, are not
 * among them. tell: says on the terminal what was timed. Collective, before the
 * run takes its memory: timing takes that of the largest product. Returns 0, or -1 after
 * reporting. */
int tune_products(const struct options *o, const struct llama_config *c, int N,
                  const struct backend *be, const struct lossynet_world *world, bool tell);

#ifdef __cplusplus
}
#endif
#endif
