/* attention_choice.h — --attention: chooses the kernels of attention, the same on all ranks. */
#ifndef LLMC_COMM_ATTENTION_CHOICE_H
#define LLMC_COMM_ATTENTION_CHOICE_H

#include "llmc/backend/backend.h"
#include "llmc/options/options.h"
#include "llmc/model/config.h"
#include "lossynet/lossynet.h"

/* Sets be->attention_choice for training with B sequences of T tokens. An earlier choice of the ranks
 * stays: one from an earlier view, or from the checkpoint of --resume with the same device and
 * library. Otherwise each rank tries cuDNN on random numbers of the run's shape. cuDNN is chosen
 * only if, on all ranks, its results differ from our own kernels' by no more than rounding to
 * bfloat16 explains, and a second call gives the same bits. So a wrong graph or a wrong library is
 * never used in training. --attention auto tries it only on a device that it suits (`from` of struct
 * attention_choice), and where `room` says that the run with its working memory fits on every rank.
 * No clock decides, so that two runs choose alike. With --attention own the function does nothing.
 * tell: prints the choice and the reason to the terminal. Collective; call it before the run
 * allocates its memory. Returns 0, or -1 after reporting that cuDNN was required and a rank cannot
 * use it. */
int attention_choose(const struct options *o, const struct llama_config *c, int B, int T, bool room,
                     const struct backend *be, const struct lossynet_world *world, bool tell);

#endif
