/* backend_choose.h — which backend a run computes on, from --device and --dtype, and how much of
 * the forward pass it computes twice, from --recompute and the memory there is. */
#ifndef LLMC_BACKEND_CHOOSE_H
#define LLMC_BACKEND_CHOOSE_H

#include <stdbool.h>

#include "llmc/backend.h"
#include "llmc/estimate.h"
#include "llmc/options.h"

#ifdef __cplusplus
extern "C" {
#endif

struct backend_choice {
    const struct backend *backend;
    enum recompute recompute; /* not auto */
};

/* `run` has what --dry-run would be given; its dtype, device and recompute are filled in. The GPU
 * is the one of the host's rank `local_rank`. `tell`: with --device auto, says in one line on
 * stdout why there is no computing on a GPU (a program built without CUDA is not expected to). 0,
 * or -1 after reporting: --device cuda, and no GPU or too little memory on it. */
int backend_choose(const struct options *options, const struct llama_config *config,
                   struct estimate_settings *run, int local_rank, bool tell,
                   struct backend_choice *out);

#ifdef __cplusplus
}
#endif
#endif
