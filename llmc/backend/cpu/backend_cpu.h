/* backend_cpu.h — the CPU backend's instances, one for each instruction set. Training uses
 * backend_cpu() (backend.h); tests use all instances that this machine can run. */
#ifndef LLMC_BACKEND_CPU_BACKEND_CPU_H
#define LLMC_BACKEND_CPU_BACKEND_CPU_H

#include <stdbool.h>

#include "llmc/backend/backend.h"

/* The i-th instance, best first, of those that this process may use; NULL after the last one. These
 * are all that this machine can run, or from that which the environment variable TRAIN_LLAMA2_ISA
 * names to the least; none if it names one that this machine cannot run. *isa (if not NULL) gets
 * its name, as in that variable. */
const struct backend *backend_cpu_instance(enum dtype dtype, int i, const char **isa);

/* Writes the names of the instruction sets that this process may use into names[size], best first:
 * "x86_64_v3, x86_64_v2". If TRAIN_LLAMA2_ISA is wrong, all that this machine can run. */
void backend_cpu_list(char *names, size_t size);

/* Whether this process may use instructions that multiply bfloat16. Then training in bfloat16 is
 * several times as fast as in float32; otherwise it is slower. */
bool backend_cpu_multiplies_bf16(void);

#endif
