/* backend_cpu.h — the CPU backend's instances, one per instruction set it was compiled for.
 * Training takes backend_cpu() (backend.h); tests go through all that this machine can run. */
#ifndef LLMC_BACKEND_CPU_H
#define LLMC_BACKEND_CPU_H

#include "llmc/backend.h"

/* The i-th instance, best first, among those this machine can run; NULL after the last.
 * *isa (if not NULL) gets its name, the one TRAIN_LLAMA2_ISA takes. */
const struct backend *backend_cpu_instance(int i, const char **isa);

#endif
