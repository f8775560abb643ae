/* scratch.h — working memory of the CPU operations. There is one block per thread and slot. Blocks
 * only grow, so that after the first steps nothing is allocated. They are freed when the thread
 * ends.
 *
 * A slot belongs to one nesting level. An operation that runs on a team of threads keeps the team's
 * shared memory in one slot of its caller, and the memory of each thread in another slot. */
#ifndef LLMC_BACKEND_CPU_SCRATCH_H
#define LLMC_BACKEND_CPU_SCRATCH_H

#include <stddef.h>

enum cpu_scratch_slot {
    SCRATCH_OPERATION, /* of the thread that called the operation, shared with its team */
    SCRATCH_TASK,      /* of the thread that carries out a piece of it */
    SCRATCH_GEMM,      /* gemm_parallel: operands copied once for all tiles */
    SCRATCH_GEMM_TILE, /* gemm_parallel: operands copied per tile */
    SCRATCH_SLOTS,
};

/* Returns at least `bytes` bytes, aligned to 64, with undefined contents, valid until this thread
 * asks for the same slot again. Never returns NULL: if there is no memory, the program ends (see
 * backend.h: only `allocate` reports that). */
void *cpu_scratch(enum cpu_scratch_slot slot, size_t bytes);

#endif
