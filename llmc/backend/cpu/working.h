/* working.h — how much working memory (scratch.h) the CPU operations take, for a run's memory plan,
 * and the sizes of the blocks that decide it.
 */
#ifndef LLMC_BACKEND_CPU_WORKING_H
#define LLMC_BACKEND_CPU_WORKING_H

#include <stdbool.h>
#include <stddef.h>

#include "llmc/backend/cpu/scratch.h"

enum {
    CLASSIFIER_CHUNK = 512, /* tokens whose logits exist at once: V * 2 KiB, for each caller */
    CLASSIFIER_CHUNK_BF16 = 1024, /* the same number of bytes */
    CLASSIFIER_TILE = 512,
    CLASSIFIER_ROWS = 128,
    CLASSIFIER_ROWS_MOST = 256, /* if w is copied (see gemm.h), to use each copy more */
    CLASSIFIER_SEGMENTS = 16,
    QUERY_ROWS = 64,      /* queries that attention computes at a time */
    GEMM_DEPTH = 256,     /* depth of the pieces in which A is copied: they stay in the L2 cache */
    GEMM_ROWS_MOST = 512, /* most rows of a tile */
};

/* Words of a tile in bf16. Half as many if rows are long, so that both orders fit into the L2
 * cache. */
static inline int cpu_working_tile_bf16(int C) {
    return C < 384 ? CLASSIFIER_TILE : CLASSIFIER_TILE / 2;
}

/* Bytes of each slot of one thread. The caller sets all to zero except `packed`. Each function
 * raises slots to the size that an operation of these sizes (see backend.h) needs. backward: with
 * gradients. */
struct cpu_working {
    int packed; /* float32 backend: 0; bf16: bytes of an element of a packed operand (packed.h) */
    size_t slot[SCRATCH_SLOTS];
};

void cpu_working_classifier(struct cpu_working *w, int N, int C, int V, bool backward);
void cpu_working_attention(struct cpu_working *w, int T, int D, bool backward);
void cpu_working_matmul(struct cpu_working *w, int N, int I, int O, bool backward);
void cpu_working_muon(struct cpu_working *w, int rows, int cols);

/* The total, if `callers` of `threads` threads call operations. */
double cpu_working_bytes(const struct cpu_working *w, int callers, int threads);

#endif
