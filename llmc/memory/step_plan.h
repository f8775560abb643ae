/* step_plan.h — a model of a training step on GPUs: how long it takes, by arithmetic.
 *
 * Each operation takes as long as its floating point operations or its bytes at the rate that a GPU
 * reaches, whichever it is bound by. Copies and packets run beside the computing; what is left
 * after that counts. dev/bench/gpu/notes.md has what an H100 took beside it. Several GPUs have not
 * been measured.
 */
#ifndef LLMC_MEMORY_STEP_PLAN_H
#define LLMC_MEMORY_STEP_PLAN_H

#include "llmc/memory/memory_plan.h"

/* Prints the step of a run whose workers have a GPU each, in bf16, on an H100, H200, A100 and 4090.
 * overlap: the exchange goes on while workers compute. */
void step_plan_print(const struct llama_config *config, const struct memory_plan_settings *s,
                     bool overlap);

/* Seconds of such a step, overlapped, on the GPU of that list whose name `device` contains; 0: none. */
double step_plan_seconds(const struct llama_config *config, const struct memory_plan_settings *s,
                         const char *device);

#endif
