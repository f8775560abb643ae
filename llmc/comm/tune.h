/* tune.h — --tune: chooses algorithms for matrix products by timing them on rank 0. All ranks use
 * the same. */
#ifndef LLMC_COMM_TUNE_H
#define LLMC_COMM_TUNE_H

#include "llmc/backend/backend.h"
#include "llmc/options/options.h"
#include "llmc/model/config.h"
#include "lossynet/lossynet.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fills be->product_choices with the algorithms for a model's products of N tokens. Earlier choices
 * of the ranks stay: those from an earlier view, or from the checkpoint of --resume with the same
 * device and library. Rank 0 times the shapes that are new. Without --tune, or if the backend has
 * only one algorithm, the function does nothing. tell: prints the number of timed shapes. Collective; call it
 * before the run allocates its memory, since timing needs memory for the largest product. Returns
 * 0, or -1 after reporting. */
int tune_products(const struct options *o, const struct llama_config *c, int N,
                  const struct backend *be, const struct lossynet_world *world, bool tell);

#ifdef __cplusplus
}
#endif
#endif
