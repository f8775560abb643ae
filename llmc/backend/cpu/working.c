/* working.c — see working.h. The formulas follow the calls of cpu_scratch in classifier.h,
 * attention.h, gemm.c and, for bf16, in classifier_bf16.h, attention_bf16.h and matmul_bf16.h;
 * test/system/test_memory.py compares them with the memory that a run takes. */
#include "llmc/backend/cpu/working.h"

#include "llmc/backend/cpu/gemm.h"

enum { FLOAT = sizeof(float), PACKED_DEPTH_MOST = 2048, PACKED_ROWS_MOST = 128 };

static void raise(struct cpu_working *w, enum cpu_scratch_slot slot, size_t bytes) {
    const size_t huge = (size_t)2 << 20;
    const size_t whole = bytes < huge ? bytes : (bytes + huge - 1) / huge * huge;
    if (whole > w->slot[slot]) w->slot[slot] = whole;
}

static size_t divide_up(size_t a, size_t b) {
    return (a + b - 1) / b;
}

/* An operand of the bf16 backend: blocks of 32 rows and 32 columns. */
static size_t packed(const struct cpu_working *w, size_t rows, size_t columns) {
    return divide_up(rows, 32) * 32 * divide_up(columns, 32) * 32 * (size_t)w->packed;
}

static void working_classifier_bf16(struct cpu_working *w, int N, int C, int V, bool backward) {
    const size_t chunk = divide_up((size_t)N, divide_up((size_t)N, CLASSIFIER_CHUNK_BF16));
    const size_t width = (size_t)C, tile = (size_t)cpu_working_tile_bf16(C);
    const size_t tiles = divide_up((size_t)V, tile);
    const size_t segments = divide_up(tiles, divide_up(tiles, CLASSIFIER_SEGMENTS));
    const size_t sums = ((backward ? segments * width : 0) + tiles + 2 * segments + 3) * chunk;
    const size_t e = backward ? packed(w, (size_t)V, chunk) : 0;
    raise(w, SCRATCH_OPERATION, sums * FLOAT + packed(w, chunk, width) + e);
    raise(w, SCRATCH_TASK,
          packed(w, tile, width) + packed(w, width, tile) + packed(w, CLASSIFIER_ROWS, tile) +
              CLASSIFIER_ROWS * tile * FLOAT);
    if (backward) raise(w, SCRATCH_TASK, chunk * width * FLOAT + packed(w, width, chunk));
}

void cpu_working_classifier(struct cpu_working *w, int N, int C, int V, bool backward) {
    const size_t chunk = divide_up((size_t)N, divide_up((size_t)N, CLASSIFIER_CHUNK));
    const size_t tiles = divide_up((size_t)V, CLASSIFIER_TILE), width = (size_t)C;
    const size_t segments = divide_up(tiles, divide_up(tiles, CLASSIFIER_SEGMENTS));
    const size_t ld = (size_t)gemm_leading_dimension((int)chunk);
    const size_t ld_c = gemm_is_slow(C) ? (size_t)gemm_leading_dimension(C) : width;
    const size_t copy = gemm_is_slow(C) ? CLASSIFIER_TILE * ld_c : 0;
    const size_t sums = ((backward ? segments * width : 0) + tiles + 2 * segments + 3) * chunk;
    if (w->packed) {
        working_classifier_bf16(w, N, C, V, backward);
        return;
    }
    raise(w, SCRATCH_OPERATION, (sums + (backward ? (size_t)V * ld : 0)) * FLOAT);
    raise(w, SCRATCH_TASK,
          (copy + (backward ? 0 : CLASSIFIER_TILE * (CLASSIFIER_ROWS_MOST + 16))) * FLOAT);
    if (backward) raise(w, SCRATCH_TASK, chunk * ld_c * FLOAT);
}

void cpu_working_attention(struct cpu_working *w, int T, int D, bool backward) {
    const size_t ld = (size_t)gemm_leading_dimension(D), keys = (size_t)gemm_leading_dimension(T);
    const size_t head = (size_t)T * ld, block = QUERY_ROWS * ld, rows = QUERY_ROWS * keys;
    const size_t floats = backward ? 4 * head + 3 * block + 2 * rows : 2 * head + 2 * block + rows;
    if (w->packed) {
        const size_t all = packed(w, (size_t)T, (size_t)D), part = packed(w, QUERY_ROWS, (size_t)D);
        const size_t p = packed(w, QUERY_ROWS, (size_t)T);
        raise(w, SCRATCH_TASK,
              backward ? 3 * all + 4 * part + 3 * p + (2 * rows + 2 * head + block) * FLOAT
                       : 2 * all + part + p + (rows + block) * FLOAT);
        return;
    }
    raise(w, SCRATCH_TASK, floats * FLOAT);
}

/* In float32, forward reads the weight (O, I) by rows; backward reads it, and the input (N, I), by
 * columns. In bf16 the right operand of a product is packed as a whole, and the left one by
 * tiles. */
void cpu_working_matmul(struct cpu_working *w, int N, int I, int O, bool backward) {
    const size_t longest = (size_t)(O > N ? O : N),
                 depth = longest < PACKED_DEPTH_MOST ? longest : PACKED_DEPTH_MOST;
    if (w->packed) {
        const size_t deepest = (size_t)(I > O ? I : O);
        raise(w, SCRATCH_GEMM, packed(w, (size_t)O, (size_t)I));
        raise(w, SCRATCH_TASK, packed(w, PACKED_ROWS_MOST, deepest));
        if (backward) raise(w, SCRATCH_GEMM, packed(w, (size_t)I, depth));
        return;
    }
    if (!backward) return;
    if (gemm_is_slow(I))
        raise(w, SCRATCH_GEMM, longest * (size_t)gemm_leading_dimension(I) * FLOAT);
    if (gemm_is_slow(O))
        raise(w, SCRATCH_GEMM_TILE,
              GEMM_DEPTH * (size_t)gemm_leading_dimension(O < GEMM_ROWS_MOST ? O : GEMM_ROWS_MOST) *
                  FLOAT);
}

void cpu_working_muon(struct cpu_working *w, int rows, int cols) {
    const size_t n = (size_t)rows * (size_t)cols, side = (size_t)(rows < cols ? rows : cols);
    raise(w, SCRATCH_OPERATION, 2 * (n + side * side) * FLOAT);
}

double cpu_working_bytes(const struct cpu_working *w, int callers, int threads) {
    return (double)callers * (double)(w->slot[SCRATCH_OPERATION] + w->slot[SCRATCH_GEMM]) +
           (double)threads * (double)(w->slot[SCRATCH_TASK] + w->slot[SCRATCH_GEMM_TILE]);
}
