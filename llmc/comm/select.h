/* select.h — selects the backend of a run by --device and --dtype, and how much of the forward pass
 * is computed twice, by --recompute and the free memory. */
#ifndef LLMC_COMM_SELECT_H
#define LLMC_COMM_SELECT_H

#include <stdbool.h>

#include "llmc/backend/backend.h"
#include "llmc/memory/memory_plan.h"
#include "llmc/options/options.h"
#include "lossynet/lossynet.h"

struct backend_choice {
    const struct backend *backend;
    enum recompute recompute; /* not auto */
    bool faster_in_bf16;      /* bf16 would be much faster on this CPU; --dtype did not decide */
};

/* `run` is the memory plan's input, as for --dry-run; its dtype, device, recompute and sets are
 * filled in. Collective: the ranks tell each other what they found, before any of them takes memory for
 * the run. A rank takes the host's GPU number world->local_rank; ranks that share a GPU share its
 * free memory. `explain`: with --device auto, prints one line on stdout that says why the run
 * does not use a GPU, unless the program was built without CUDA; and one line if the CPU has no
 * instructions for bf16 but has to compute in it. Returns 0; or -1 on all ranks after rank 0 has
 * reported one of these errors. With --device cuda, a rank finds no GPU, or too little memory on
 * it. Or ranks would compute on different devices or with different libraries: these round sums in
 * another order, so that replicas that should be equal would differ. (CPUs may differ.) */
int backend_select(const struct options *options, const struct llama_config *config,
                   struct memory_plan_settings *run, const struct lossynet_world *world,
                   bool explain, struct backend_choice *out);

#endif
