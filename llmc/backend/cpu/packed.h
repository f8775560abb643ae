/* packed.h — products of bfloat16 matrices with float32 sums, for the bf16 CPU backend. Included
 * by backend_cpu.c only.
 *
 *     C (M, N) = A (M, K) B (N, K)^T
 *
 * Both operands are first copied into the order that the instructions read ("packed"). A caller
 * that uses an operand several times packs it once. Three implementations have the functions below;
 * the instruction set of the compilation decides which one is used:
 *
 *     AMX           packed_tiles.h   tiles of 16 rows of 64 bytes
 *     AVX512_BF16   packed_tiles.h   the same order, two products and two sums per lane
 *     neither       packed_wide.h    operands widened to float32, for the BLAS library
 *
 * An operand has `outer` rows (M or N) and `depth` columns (K). Weights and intermediate sums are
 * float32, and are rounded to bfloat16 when they are packed. A part of a packed operand can be
 * read: from a row that is a multiple of PACK_ROWS on, and its first columns or those from a
 * multiple of PACK_DEPTH on.
 * Each sum over K has an order that follows from K alone. Nothing fails; sizes are positive.
 */
#ifndef LLMC_BACKEND_CPU_PACKED_H
#define LLMC_BACKEND_CPU_PACKED_H

#include <stdbool.h>
#include <stddef.h>

#include "llmc/backend/cpu/element.h"
#include "llmc/backend/cpu/vector_math.h"

enum { PACK_ROWS = 32, PACK_DEPTH = 32 };

/* The matrix from which an operand is packed. columns: it is stored (depth, outer), else (outer,
 * depth). ld: elements from one stored row to the next. */
struct source {
    const void *data;
    size_t ld;
    bool floats, columns;
};

struct packed {
    char *data;
    size_t stride; /* bytes from a block of rows to the next */
};

enum side { LEFT, RIGHT }; /* operand A or B */

/* The result C, in float32 (with `add`, the product is added to it) or in bfloat16. */
struct target {
    float *floats;
    element *elements;
    size_t ld;
    bool add;
};

#ifdef __AVX512BF16__
#include "llmc/backend/cpu/packed_tiles.h"
#else
#include "llmc/backend/cpu/packed_wide.h"
#endif

/* size_t packed_bytes(int outer, int depth): memory for an operand, a multiple of 64.
 * struct packed packed_at(void *memory, int depth): an operand there, aligned to 64, to be filled.
 * struct packed packed_part(struct packed p, int row, int column): the part that begins there.
 * void pack(struct packed to, enum side side, struct source from, int outer, int depth)
 * void product(struct target c, int M, int N, int K, struct packed a, struct packed b): on the
 *     calling thread
 * void narrow_row(element *to, const float *from, int n, float scale): to = scale from, rounded
 * void pack_exponentials(struct packed rows_to, struct packed columns_to, float *x, size_t ld,
 *                        int rows, int columns, const float *offset, float *sum):
 *     e = exp(x - offset) of x (rows, columns), which may be overwritten, with an offset for each
 *     column. As a left operand to rows_to (outer: rows) and to columns_to (outer: columns). The
 *     sums of e's columns are added to `sum`. */

/* ---- working memory ------------------------------------------------------------------------ */

/* Cuts working memory into pieces. With memory NULL it only counts. */
struct cutter {
    char *memory;
    size_t used;
};

static char *cut(struct cutter *c, size_t bytes) {
    char *piece = c->memory ? c->memory + c->used : NULL;
    c->used += (bytes + 63) / 64 * 64;
    return piece;
}

static struct packed cut_packed(struct cutter *c, int outer, int depth) {
    return packed_at(cut(c, packed_bytes(outer, depth)), depth);
}

static float *cut_floats(struct cutter *c, size_t rows, size_t ld) {
    return (float *)cut(c, rows * ld * sizeof(float));
}

#endif
