/* backend_cpu.h — the CPU backend's instances, one per instruction set it was compiled for.
 * Training takes backend_cpu() (backend.h); tests go through all that this machine can run. */
#ifndef LLMC_BACKEND_CPU_BACKEND_CPU_H
#define LLMC_BACKEND_CPU_BACKEND_CPU_H

#include <stdbool.h>

#include "llmc/backend/backend.h"

/* The i-th instance, best first, among those this machine can run; NULL after the last.
 * *isa (if not NULL) gets its name, the one TRAIN_LLAMA2_ISA takes. */
const struct backend *backend_cpu_instance(enum dtype dtype, int i, const char **isa);

/* Whether this machine has instructions that multiply bfloat16: then training in it is several
 * times as fast as in float32, otherwise slower. */
bool backend_cpu_multiplies_bf16(void);

#endif
