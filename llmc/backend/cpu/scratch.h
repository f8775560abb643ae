/* scratch.h — working memory of the CPU operations: one block per thread and use, which only
 * grows, so that nothing is allocated once training is under way. Freed when its thread ends.
 *
 * A slot belongs to one nesting level; an operation that runs on the calling thread's team keeps
 * what the team shares in its own slot, apart from what each member takes. */
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

/* Returns at least `bytes`, aligned to 64, with undefined contents, valid until this thread asks
 * for the same slot again. Never returns NULL: the program ends if there is no memory (see
 * backend.h: only `allocate` reports that). */
void *cpu_scratch(enum cpu_scratch_slot slot, size_t bytes);

#endif
