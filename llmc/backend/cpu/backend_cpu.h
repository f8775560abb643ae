/* backend_cpu.h — the CPU backend's instances, one for each instruction set. Training uses
 * backend_cpu() (backend.h); tests use all instances that this machine can run. */
#ifndef LLMC_BACKEND_CPU_BACKEND_CPU_H
#define LLMC_BACKEND_CPU_BACKEND_CPU_H

#include <stdbool.h>

#include "llmc/backend/backend.h"

/* The i-th instance, best first, of those that this machine can run; NULL after the last one.
 * *isa (if not NULL) gets its name, as in the environment variable TRAIN_LLAMA2_ISA. */
const struct backend *backend_cpu_instance(enum dtype dtype, int i, const char **isa);

/* Whether this machine has instructions that multiply bfloat16. Then training in bfloat16 is
 * several times as fast as in float32; otherwise it is slower. */
bool backend_cpu_multiplies_bf16(void);

#endif
