/* backward.cuh — causal flash attention, backward, bfloat16, on tensor cores.
 *
 * Dao 2023, "FlashAttention-2", algorithm 2, without its atomic sums. With P = softmax(Q K^T /
 * sqrt(D)) computed again from log_sum_exp, and delta = rowsum(dO * O):
 *
 *   dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ = dS K / sqrt(D)
 *                                                                dK = dS^T Q / sqrt(D)
 *
 * Each result has one owner, which sums in a fixed order: a block owns 128 rows of the result and
 * walks over the rows that they meet, 32 at a time. P and dS stay in registers. Three kernels:
 *
 *   prepare     log_sum_exp in base 2 and delta, padded to whole tiles (a padded query's P is 0)
 *   <QUERIES>   rows are queries: walks over the keys up to the causal limit; dQ
 *   <KEYS>      rows are keys: walks over the queries from the causal limit on, for each query
 *               head of the group in turn; everything is the transpose of <QUERIES>; dK, dV or both
 *
 * dK and dV of 32 rows take 128 registers for D = 64, and 256 for D = 128. Above 64 each has its
 * own launch. With the launch for dQ that is 8 products, where the minimum is 5 (up to D = 64 it is
 * 7). With 16 rows per warp it would be 7, but each would read twice as much from shared memory
 * (see tile.cuh). To reach 5, blocks would have to sum dQ together: with atomics, whose order
 * changes from run to run, or in turn.
 *
 * In both kernels "own" are the block's rows and "met" the ones it walks over:
 *
 *               own_x  own_y  met_x  met_y     S = own_x met_x^T       dx += dS met_x
 *   <QUERIES>   Q      dO     K      V         dP = own_y met_y^T      dy += P  met_y
 *   <KEYS>      K      V      Q      dO
 *
 *   met_x   |0     |1        |2        two stages: needed for S first and for dx last
 *   met_y      |0        |1            one stage: copied during S, used up before the next S
 *
 * A block with dx needs 2 x 128 + 3 x 32 rows of shared memory (dV alone 128 less). Each of its 128
 * threads may have up to 255 registers, which permits two blocks (8 warps) per SM. D = 128: 94 KiB,
 * so two blocks on sm_90 (227 KiB), one on sm_80 (163 KiB), sm_86 and sm_89 (99 KiB). D = 64: 50
 * KiB, two on sm_80 and sm_90.
 */
#ifndef LLMC_BACKEND_CUDA_ATTENTION_BACKWARD_H
#define LLMC_BACKEND_CUDA_ATTENTION_BACKWARD_H

#include "llmc/backend/cuda/attention/tile.cuh"

enum { MET_ROWS = 32 };

/* ---- prepare ------------------------------------------------------------------------------- */

/* Computes base2 and delta (B*H, padded). Eight lanes work on a query, so a warp has four. */
static __global__ void __launch_bounds__(ATTENTION_THREADS)
    attention_prepare_kernel(float *base2, float *delta, const bfloat16 *dout, const bfloat16 *out,
                             const float *log_sum_exp, const struct attention_call call, int rows) {
    const int lane = threadIdx.x % 8;
    const int row = blockIdx.x * (ATTENTION_THREADS / 8) + threadIdx.x / 8;
    const int head = row / call.padded, t = row % call.padded;
    const bool inside = row < rows && t < call.T;
    float sum = 0;
    if (inside) {
        const size_t at = (head / call.H * call.T + t) * call.out_row + head % call.H * call.D;
        for (int d = lane * 8; d < call.D; d += 64) {
            float x[8], y[8];
            load(x, out + at + d);
            load(y, dout + at + d);
#pragma unroll
            for (int i = 0; i < 8; i++) sum = fmaf(x[i], y[i], sum);
        }
    }
#pragma unroll
    for (int lanes = 4; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (lane != 0 || row >= rows) return;
    base2[row] = inside ? log_sum_exp[(size_t)head * call.T + t] * LOG2_E : INFINITY;
    delta[row] = sum;
}

/* ---- gradients ----------------------------------------------------------------------------- */

enum attention_rows { QUERIES, KEYS };

template <int HD, bool DX> struct backward_layout {
    enum {
        LD = tile_layout<HD>::LD,
        OWN = BLOCK_ROWS * LD, /* elements of each part, in the order in which they lie */
        MET = MET_ROWS * LD,
        TILES = (DX ? 2 : 1) * OWN + 3 * MET,
        BYTES = TILES * 2 + 3 * MET_ROWS * 4
    };
};

/* How many steps of own_x and own_y, of 16 columns each, a warp keeps in registers over the whole
 * walk, so that it does not load them again for each S and dP. It keeps as many as fit beside the
 * sums. A step takes 8 registers. */
template <int HD, bool DX, bool DY> struct backward_kept {
    enum {
        STEPS = HD / 16,
        ALL = DX && (HD <= 48 || (HD <= 64 && !DY)),
        X = ALL        ? STEPS
            : !DX      ? (STEPS < 6 ? STEPS : 6)
            : HD <= 96 ? 2
                       : 0,
        Y = ALL ? STEPS : 0
    };
};

/* Every query has one number. Returns that of the query of element i of fragments m and n: from
 * `own`, by row, if the block's rows are queries, else from `met`, by column. */
template <enum attention_rows ROWS>
__device__ __forceinline__ float per_query(const float own[2][2], const float *met, int m, int n,
                                           int i) {
    return ROWS == QUERIES ? own[m][i / 2] : met[tile_column(n, i)];
}

/* S becomes P = 2^(factor S - base2). */
template <enum attention_rows ROWS>
__device__ __forceinline__ void backward_weights(float s[2][MET_ROWS / 8][4], const float own[2][2],
                                                 const float *met, float factor) {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < MET_ROWS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[m][n][i] =
                    exp2_approx(fmaf(s[m][n][i], factor, -per_query<ROWS>(own, met, m, n, i)));
}

/* dS = P * (dO V^T - delta), with own_y and met_y as in the table above. */
template <int HD, enum attention_rows ROWS, int KEPT>
__device__ __forceinline__ void
backward_logits(struct tile_weights<MET_ROWS> *ds, const float p[2][MET_ROWS / 8][4],
                const struct tile_kept<KEPT> &kept, const bfloat16 *own_y, const bfloat16 *met_y,
                const float own_delta[2][2], const float *met_delta) {
    float dp[2][MET_ROWS / 8][4];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < MET_ROWS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                dp[m][n][i] = -per_query<ROWS>(own_delta, met_delta, m, n, i);
    tile_multiply_rows<HD, MET_ROWS>(dp, kept, own_y, met_y);
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < MET_ROWS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) dp[m][n][i] *= p[m][n][i];
    tile_weights_make(ds, dp);
}

template <int HD, enum attention_rows ROWS, bool DX, bool DY>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2)
    attention_backward_kernel(bfloat16 *dqkv, const bfloat16 *dout, const bfloat16 *qkv,
                              const float *base2, const float *delta,
                              const struct attention_call call) {
    typedef backward_layout<HD, DX> layout;
    typedef backward_kept<HD, DX, DY> kept;
    bfloat16 *own_x = (bfloat16 *)dynamic_shared(), *own_y = own_x + layout::OWN;
    bfloat16 *met_y = own_x + layout::TILES - layout::MET, *met_x = met_y - 2 * layout::MET;
    float *met_delta = (float *)(own_x + layout::TILES), *met_base2 = met_delta + MET_ROWS;
    constexpr bool Q = ROWS == QUERIES;

    /* The block's rows; its query head (for KEYS the group's first) and key head; where they lie */
    int rank, head;
    attention_place(call.order, &rank, &head);
    const int b = head / (Q ? call.H : call.K), T = call.T, D = call.D;
    const int h = Q ? head % call.H : head % call.K * call.group, k = call.H + h / call.group;
    const int first = (Q ? call.order.tiles - 1 - rank : rank) * BLOCK_ROWS;
    const int begin = Q ? 0 : first, end = Q ? min(T, first + BLOCK_ROWS) : T; /* of the rows met */
    const int steps = (end - begin + MET_ROWS - 1) / MET_ROWS * (Q ? 1 : call.group);
    const int warp_first = first + tile_warp_row();
    const ptrdiff_t sequence = b * T * call.row, at_out = b * T * call.out_row + h * D;
    const ptrdiff_t at_x = sequence + (Q ? h : k) * D, at_v = sequence + k * D + call.values;
    const size_t statistics = (size_t)(b * call.H + h) * call.padded;
    const ptrdiff_t y_row = Q ? call.row : call.out_row; /* of met_y */

    float dx[2][DX ? HD / 8 : 1][4], dy[2][DY ? HD / 8 : 1][4], own_base2[2][2], own_delta[2][2];
    if constexpr (DX) tile_fill<HD>(dx, 0);
    if constexpr (DY) tile_fill<HD>(dy, 0);
    if constexpr (Q)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const size_t row = statistics + warp_first + tile_row(i / 2, i % 2 * 2);
            own_base2[i / 2][i % 2] = base2[row];
            own_delta[i / 2][i % 2] = delta[row];
        }

    const ptrdiff_t begin_qkv = tile_begin<HD>(call.row), begin_out = tile_begin<HD>(call.out_row);
    tile_load<HD, BLOCK_ROWS>(own_x, qkv + at_x + first * call.row + begin_qkv, call.row, T - first,
                              D);
    if constexpr (DX)
        tile_load<HD, BLOCK_ROWS>(own_y,
                                  Q ? dout + at_out + first * call.out_row + begin_out
                                    : qkv + at_v + first * call.row + begin_qkv,
                                  Q ? call.out_row : call.row, T - first, D);

    /* The next rows to be met; each load moves these pointers on. */
    const bfloat16 *next_x = qkv + sequence + (Q ? k : h) * D + begin * call.row + begin_qkv;
    const bfloat16 *next_y =
        (Q ? qkv + at_v + begin_qkv : dout + at_out + begin_out) + begin * y_row;
    const float *next_base2 = base2 + statistics + begin, *next_delta = delta + statistics + begin;
    const auto load_x = [&](int at, int stage) {
        tile_load<HD, MET_ROWS>(met_x + stage * layout::MET, next_x, call.row, T - at, D);
        if constexpr (!Q) vector_load<MET_ROWS>(met_base2 + stage * MET_ROWS, next_base2);
        cp_async_commit();
        next_x += MET_ROWS * call.row, next_base2 += MET_ROWS;
        if (!Q && at + MET_ROWS >= end) { /* the group's next head */
            next_x += D - (at + MET_ROWS - begin) * call.row;
            next_base2 += call.padded - (at + MET_ROWS - begin);
        }
    };
    const auto load_y = [&](int at) {
        tile_load<HD, MET_ROWS>(met_y, next_y, y_row, T - at, D);
        if constexpr (!Q) vector_load<MET_ROWS>(met_delta, next_delta);
        cp_async_commit();
        next_y += MET_ROWS * y_row, next_delta += MET_ROWS;
        if (!Q && at + MET_ROWS >= end) {
            next_y += D - (at + MET_ROWS - begin) * y_row;
            next_delta += call.padded - (at + MET_ROWS - begin);
        }
    };

    load_x(begin, 0);
    struct tile_kept<kept::X> kept_x;
    struct tile_kept<kept::Y> kept_y;
    if constexpr (kept::X > 0) {
        cp_async_wait<0>();
        __syncthreads(); /* the block's own rows are here */
        tile_keep<HD>(&kept_x, tile_warp<HD>(own_x));
        tile_keep<HD>(&kept_y, tile_warp<HD>(own_y));
    }
    for (int i = 0, at = begin; i < steps; i++) {
        const bfloat16 *x = met_x + i % 2 * layout::MET;
        const int next = at + MET_ROWS < end ? at + MET_ROWS : begin;
        /* some query of the warp's tiles sees some key; some query does not see some key */
        const bool useful = Q ? at < warp_first + WARP_ROWS : at + MET_ROWS > warp_first;
        const bool diagonal = Q ? at + MET_ROWS > warp_first + 1 : at < warp_first + WARP_ROWS - 1;
        float p[2][MET_ROWS / 8][4];
        cp_async_wait<0>();
        __syncthreads(); /* x is here; everybody is done with the last y */
        load_y(at);
        if (useful) {
            tile_fill<MET_ROWS>(p, 0);
            tile_multiply_rows<HD, MET_ROWS>(p, kept_x, tile_warp<HD>(own_x), x);
            backward_weights<ROWS>(p, own_base2, met_base2 + i % 2 * MET_ROWS, call.factor);
            if (diagonal) tile_mask<MET_ROWS, Q>(p, warp_first - at, 0);
        }
        cp_async_wait<0>();
        __syncthreads(); /* y is here; everybody is done with the x before this one */
        if (i + 1 < steps) load_x(next, (i + 1) % 2);
        if (useful) {
            struct tile_weights<MET_ROWS> weights;
            if constexpr (DY) {
                tile_weights_make(&weights, p);
                tile_multiply_weights<HD>(dy, weights, met_y);
            }
            if constexpr (DX) {
                backward_logits<HD, ROWS>(&weights, p, kept_y, tile_warp<HD>(own_y), met_y,
                                          own_delta, met_delta);
                tile_multiply_weights<HD>(dx, weights, x);
            }
        }
        at = next;
    }

    if constexpr (DX)
        tile_store<HD>(dqkv + at_x, call.row, warp_first, T, D, dx,
                       {{call.scale, call.scale}, {call.scale, call.scale}}, tile_warp<HD>(own_x));
    if constexpr (DY)
        tile_store<HD>(dqkv + at_v, call.row, warp_first, T, D, dy, {{1, 1}, {1, 1}},
                       tile_warp<HD>(DX ? own_y : own_x));
}

/* ---- launchers ----------------------------------------------------------------------------- */

template <int HD, enum attention_rows ROWS, bool DX, bool DY>
void attention_backward_part(bfloat16 *dqkv, const bfloat16 *dout, const bfloat16 *qkv,
                             const float *base2, const float *delta,
                             const struct attention_call &call, cudaStream_t stream) {
    launch(attention_backward_kernel<HD, ROWS, DX, DY>, call.order.tiles * call.order.heads,
           ATTENTION_THREADS, backward_layout<HD, DX>::BYTES, stream, dqkv, dout, qkv, base2, delta,
           call);
}

static inline size_t attention_backward_bytes(int B, int T, int H) {
    return ceil_div(T, BLOCK_ROWS) * BLOCK_ROWS * B * H * 2 * sizeof(float);
}

template <int HD>
void attention_backward_launch(bfloat16 *dqkv, const bfloat16 *dout, const bfloat16 *out,
                               const bfloat16 *qkv, const float *log_sum_exp, int B, int T, int H,
                               int K, int D, float *workspace, cudaStream_t stream) {
    const struct attention_call queries = attention_call_make(B, T, H, K, D, true);
    const struct attention_call keys = attention_call_make(B, T, H, K, D, false);
    const int rows = B * H * queries.padded;
    float *base2 = workspace, *delta = base2 + rows;
    launch(attention_prepare_kernel, ceil_div(rows, ATTENTION_THREADS / 8), ATTENTION_THREADS, 0,
           stream, base2, delta, dout, out, log_sum_exp, queries, rows);
    attention_backward_part<HD, QUERIES, true, false>(dqkv, dout, qkv, base2, delta, queries,
                                                      stream);
    if constexpr (HD <= 64) {
        attention_backward_part<HD, KEYS, true, true>(dqkv, dout, qkv, base2, delta, keys, stream);
    } else {
        attention_backward_part<HD, KEYS, true, false>(dqkv, dout, qkv, base2, delta, keys, stream);
        attention_backward_part<HD, KEYS, false, true>(dqkv, dout, qkv, base2, delta, keys, stream);
    }
}

#endif
