/* tile.cuh — the parts that attention kernels on tensor cores share: tiles in shared memory, their
 * products in registers, and the order in which blocks take work.
 *
 * A block is 4 warps. A warp owns 32 whole rows (two m16 fragments) of the result, so that the
 * softmax of a row stays within the warp. Both kinds of products run on mma.sync m16n8k16, bfloat16
 * in, float32 out (PTX ISA, "Matrix fragments for mma.m16n8k16"):
 *
 *   tile_multiply_rows      acc (32, N)  += X (32, HD) Y^T,  X and Y (N, HD) in shared memory
 *   tile_multiply_weights   acc (32, HD) += P (32, N) Y,     P in registers, Y (N, HD) in shared
 *
 * A warp has 32 rows, so that each fragment of Y that it reads from shared memory feeds two
 * products. A fragment is 512 bytes, which take 4 clocks of an SM's shared memory. An m16n8k16 is
 * 2048 multiplications, of which an SM does 1024 (A100) or 2048 (H100) per clock. Four warps with
 * 16 rows each would read for 16 clocks and multiply for 16 (A100) or 8 (H100). With 32 rows they
 * read for 16 and multiply for 32 or 16. The accumulator of the first product has the layout of the
 * left operand of the second, so P stays in registers between them.
 *
 * Tiles are row-major, and each row is 16 bytes longer than its HD elements. An odd number of
 * 16-byte chunks per row puts the eight rows of an 8x8 matrix in eight different groups of banks
 * (no conflicts in ldmatrix). Unlike a swizzle, it leaves every address at a constant distance from
 * one base.
 *
 * HD is the head size D rounded up to a size with an instance; columns D to HD are zero in shared
 * memory and are not stored. Rows past the sequence's end are zero too.
 */
#ifndef LLMC_BACKEND_CUDA_ATTENTION_TILE_H
#define LLMC_BACKEND_CUDA_ATTENTION_TILE_H

#include "llmc/backend/cuda/common.cuh"
#include "llmc/backend/cuda/ptx.cuh"

enum { ATTENTION_THREADS = 128, WARP_ROWS = 32, BLOCK_ROWS = ATTENTION_THREADS / 32 * WARP_ROWS };

/* The bytes of L2 cache that a section of heads may use, see attention_order. A100 has 2 x 20 MB,
 * H100 50 MB. Under emulation they are so few that small shapes have several sections. */
#ifdef CUDA_EMULATION
enum { L2_BYTES = 64 << 10 };
#else
enum { L2_BYTES = 16 << 20 };
#endif

template <int HD> struct tile_layout {
    enum { LD = HD + 8 }; /* elements from one row to the next */
};

/* ---- shared memory ------------------------------------------------------------------------- */

/* How the threads of a block share the copy of a tile: LANES threads copy a row side by side, and
 * STEP rows at a time. LANES is the largest power of two that divides the 16-byte chunks of a
 * row. */
template <int HD> struct tile_copy {
    enum { CHUNKS = HD / 8, LANES = CHUNKS & -CHUNKS, STEP = ATTENTION_THREADS / LANES };
};

/* Where this thread begins to copy, in elements from the first of the tile in its matrix. */
template <int HD> __device__ __forceinline__ ptrdiff_t tile_begin(ptrdiff_t stride) {
    return (ptrdiff_t)(threadIdx.x / tile_copy<HD>::LANES) * stride +
           threadIdx.x % tile_copy<HD>::LANES * 8;
}

/* Starts to copy ROWS rows of D elements from a matrix; `rows` of them exist, the others become
 * zero. `from` is the first row's address plus tile_begin. D % 8 == 0; `from` and `stride` (in
 * elements) are multiples of 16 bytes. The caller commits and waits. */
template <int HD, int ROWS>
__device__ __forceinline__ void tile_load(bfloat16 *tile, const bfloat16 *from, ptrdiff_t stride,
                                          int rows, int D) {
    constexpr int LANES = tile_copy<HD>::LANES, STEP = tile_copy<HD>::STEP;
    const int row = threadIdx.x / LANES, column = threadIdx.x % LANES * 8;
    tile += row * tile_layout<HD>::LD + column;
#pragma unroll
    for (int r = 0; r < ROWS; r += STEP) {
        if (STEP > ROWS && row >= ROWS) break;
#pragma unroll
        for (int c = 0; c < HD; c += LANES * 8)
            cp_async16(tile + r * tile_layout<HD>::LD + c, from + c,
                       r < rows - row && c < D - column);
        from += STEP * stride;
    }
}

/* Starts to copy N floats; N % 4 == 0, and both addresses are multiples of 16 bytes. */
template <int N> __device__ __forceinline__ void vector_load(float *to, const float *from) {
    if (threadIdx.x < N / 4) cp_async16(to + threadIdx.x * 4, from + threadIdx.x * 4, true);
}

/* Writes acc (32, HD), each row times its factor, as rows `first` and on of a matrix of T rows.
 * `rows` is shared memory for 32 rows that only this warp uses; it permits stores of 16 bytes. */
template <int HD>
__device__ __forceinline__ void tile_store(bfloat16 *to, ptrdiff_t stride, int first, int T, int D,
                                           const float acc[2][HD / 8][4],
                                           const float (&factor)[2][2], bfloat16 *rows) {
    constexpr int LD = tile_layout<HD>::LD, CHUNKS = HD / 8;
    const int lane = threadIdx.x % 32;
    __syncwarp(); /* the rows may still be read */
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < CHUNKS; n++) {
                bfloat16 *at = rows + (m * 16 + half * 8 + lane / 4) * LD + n * 8 + lane % 4 * 2;
                const float *value = acc[m][n] + half * 2, f = factor[m][half];
                *(uint32_t *)at = pack_bfloat16(value[0] * f, value[1] * f);
            }
    __syncwarp();
#pragma unroll
    for (int start = 0; start < WARP_ROWS * CHUNKS; start += 32) {
        int i = start + lane, row = i / CHUNKS, column = i % CHUNKS * 8;
        if (first + row < T && column < D)
            *(uint4 *)(to + (first + row) * stride + column) =
                *(const uint4 *)(rows + row * LD + column);
    }
}

/* ---- products ------------------------------------------------------------------------------ */

/* Loads a left operand of 16 rows and 16 columns. */
template <int HD>
__device__ __forceinline__ void fragment_load(uint32_t a[4], const bfloat16 *tile) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(a, tile + lane % 16 * tile_layout<HD>::LD + lane / 16 * 8);
}

/* acc += X Y^T for one step of 16 along HD; y points to Y's first column of that step. */
template <int HD, int N>
__device__ __forceinline__ void tile_multiply_step(float acc[2][N / 8][4], const uint32_t a[2][4],
                                                   const bfloat16 *y) {
    constexpr int LD = tile_layout<HD>::LD;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N / 8; n += 2) {
        uint32_t b[4];
        ldmatrix_x4(b, y + (n * 8 + lane / 16 * 8 + lane % 8) * LD + lane / 8 % 2 * 8);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            mma_m16n8k16(acc[m][n], a[m], b, acc[m][n]);
            mma_m16n8k16(acc[m][n + 1], a[m], b + 2, acc[m][n + 1]);
        }
    }
}

/* The first STEPS steps of a warp's rows of a left operand, kept in registers for many products. */
template <int STEPS> struct tile_kept { uint32_t step[STEPS ? STEPS : 1][2][4]; };

template <int HD, int STEPS>
__device__ __forceinline__ void tile_keep(struct tile_kept<STEPS> *kept, const bfloat16 *x) {
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int m = 0; m < 2; m++)
            fragment_load<HD>(kept->step[i][m], x + m * 16 * tile_layout<HD>::LD + i * 16);
}

/* Steps that are not kept are read from x. */
template <int HD, int N, int STEPS>
__device__ __forceinline__ void tile_multiply_rows(float acc[2][N / 8][4],
                                                   const struct tile_kept<STEPS> &kept,
                                                   const bfloat16 *x, const bfloat16 *y) {
#pragma unroll
    for (int i = 0; i < STEPS; i++) tile_multiply_step<HD, N>(acc, kept.step[i], y + i * 16);
#pragma unroll 4 /* with more loads at once the compiler runs out of registers */
    for (int k = STEPS * 16; k < HD; k += 16) {
        uint32_t a[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++) fragment_load<HD>(a[m], x + m * 16 * tile_layout<HD>::LD + k);
        tile_multiply_step<HD, N>(acc, a, y + k);
    }
}

/* An accumulator (32, N) as the left operand of the next product, rounded to bfloat16. */
template <int N> struct tile_weights {
    uint32_t word[N / 16][2][4]; /* per step of 16 columns and m16 fragment, as mma takes them */
};

/* Puts in the pair of columns 2t, 2t+1 (t = lane % 4) of fragment n, in its rows of `half`. */
template <int N>
__device__ __forceinline__ void tile_weights_put(struct tile_weights<N> *weights, int m, int n,
                                                 int half, float even, float odd) {
    weights->word[n / 2][m][n % 2 * 2 + half] = pack_bfloat16(even, odd);
}

template <int N>
__device__ __forceinline__ void tile_weights_make(struct tile_weights<N> *weights,
                                                  const float acc[2][N / 8][4]) {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                tile_weights_put(weights, m, n, half, acc[m][n][half * 2], acc[m][n][half * 2 + 1]);
}

template <int HD, int N>
__device__ __forceinline__ void tile_multiply_weights(float acc[2][HD / 8][4],
                                                      const struct tile_weights<N> &weights,
                                                      const bfloat16 *y) {
    constexpr int LD = tile_layout<HD>::LD;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
#pragma unroll
        for (int n = 0; n < HD / 8; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, y + (k * 16 + lane % 16) * LD + n * 8 + lane / 16 * 8);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma_m16n8k16(acc[m][n], weights.word[k][m], b, acc[m][n]);
                mma_m16n8k16(acc[m][n + 1], weights.word[k][m], b + 2, acc[m][n + 1]);
            }
        }
    }
}

template <int N> __device__ __forceinline__ void tile_fill(float acc[2][N / 8][4], float value) {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[m][n][i] = value;
}

/* The warp's first row in the block. tile_warp_row is for branches: it is taken from lane 0, so
 * that the compiler knows that all lanes have the same value and keeps them together. tile_warp is
 * for addresses: it is taken from threadIdx, which needs no register between uses. */
__device__ __forceinline__ int tile_warp_row(void) {
    return __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0) * WARP_ROWS;
}

template <int HD> __device__ __forceinline__ bfloat16 *tile_warp(bfloat16 *tile) {
    return tile + threadIdx.x / 32 * WARP_ROWS * tile_layout<HD>::LD;
}

/* Row and column in its tile of element i of an accumulator's fragment m (rows), n (columns). */
__device__ __forceinline__ int tile_row(int m, int i) {
    return m * 16 + i / 2 * 8 + threadIdx.x % 32 / 4;
}

__device__ __forceinline__ int tile_column(int n, int i) {
    return n * 8 + threadIdx.x % 4 * 2 + i % 2;
}

/* Writes `value` where a query does not see a key. Rows are queries and columns are keys
 * (ROWS_ARE_QUERIES), or the other way round. `ahead` is the place of the first row in the sequence
 * minus that of the first column. */
template <int N, bool ROWS_ARE_QUERIES>
__device__ __forceinline__ void tile_mask(float acc[2][N / 8][4], int ahead, float value) {
    ahead += tile_row(0, 0) - tile_column(0, 0);
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int step = (n * 8 + i % 2) - (m * 16 + i / 2 * 8);
                if (ROWS_ARE_QUERIES ? step > ahead : step < ahead) acc[m][n][i] = value;
            }
}

/* ---- calls and the order of work ----------------------------------------------------------- */

/* Blocks start in the order of their index. Heads are taken in sections, whose keys and values fit
 * the L2 cache together. In a section the tiles with the most work come first, for all its heads,
 * so that no long block starts when the others are done. Heads of one group are neighbours. */
struct attention_order {
    int tiles, heads, section; /* tiles per head; heads (B times H or K); heads per section */
};

/* The arguments of a kernel. The host computes them once. They take no registers, since kernels
 * read them from constant memory. */
struct attention_call {
    int T, H, K, D, group;  /* group = H / K */
    int padded;             /* T rounded up to whole tiles */
    ptrdiff_t row, out_row; /* elements from one token to the next in qkv, in out */
    ptrdiff_t values;       /* elements from a key to its value */
    float scale, factor;    /* of logits: 1 / sqrt(D), and the same in base 2 */
    struct attention_order order;
};

/* The size of a section follows from what its blocks read repeatedly: the keys and values of whole
 * groups (`per_query_head`), or the queries and output gradients of whole groups. */
static inline struct attention_call attention_call_make(int B, int T, int H, int K, int D,
                                                        bool per_query_head) {
    struct attention_call call = {};
    call.T = T, call.H = H, call.K = K, call.D = D, call.group = H / K;
    call.row = (ptrdiff_t)(H + 2 * K) * D, call.out_row = (ptrdiff_t)H * D;
    call.values = (ptrdiff_t)K * D;
    call.scale = 1 / sqrtf((float)D), call.factor = call.scale * LOG2_E;
    call.order.tiles = (T + BLOCK_ROWS - 1) / BLOCK_ROWS;
    call.padded = call.order.tiles * BLOCK_ROWS;
    call.order.heads = B * (per_query_head ? H : K);
    const size_t bytes = (size_t)T * D * 2 * sizeof(bfloat16); /* keys and values of one head */
    const size_t groups = L2_BYTES / (per_query_head ? bytes : bytes * call.group) + 1;
    const size_t section = groups * (per_query_head ? call.group : 1);
    call.order.section = (int)(section < (size_t)call.order.heads ? section : call.order.heads);
    return call;
}

/* Finds this block's tile and head. *rank counts tiles from the one with the most work. */
__device__ __forceinline__ void attention_place(const struct attention_order &order, int *rank,
                                                int *head) {
    int section = blockIdx.x / (order.section * order.tiles), first = section * order.section;
    int rest = blockIdx.x - first * order.tiles;
    int width = min(order.section, order.heads - first);
    *rank = rest / width;
    *head = first + rest % width;
}

#endif
