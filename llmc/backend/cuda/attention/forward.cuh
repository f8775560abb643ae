/* forward.cuh — causal flash attention, forward, bfloat16, on tensor cores.
 *
 * Dao 2023, "FlashAttention-2", algorithm 1: a block holds 128 queries of one head and walks over
 * the keys, 64 at a time, up to the causal limit. Per row it keeps the largest logit so far, the
 * sum of exponentials, and the unnormalised output; when the largest grows, the others shrink by
 * 2^(old - new). Logits are in base 2: log2(e) / sqrt(D) is one factor inside the exponent.
 *
 *   keys     |K0    |K1    |K2 ..    copies overlap with products: V(i) with S = Q K(i)^T and
 *   values       |V0    |V1    |V2   softmax, K(i+1) with O += P V(i)
 *
 * The softmax stands before the barrier that ends the first product, so that the compiler does not
 * interleave it with the second: with D = 128 there are not enough registers for that. The other
 * block on the SM fills the gaps.
 *
 * A block needs 128 + 64 + 64 rows of shared memory. Each of its 128 threads may have up to 255
 * registers, which permits two blocks (8 warps) per SM. D = 128: 68 KiB, so two blocks on sm_80
 * (163 KiB) and sm_90 (227 KiB), one on sm_86 and sm_89 (99 KiB). D = 64: 36 KiB, two everywhere.
 * For D <= 64 the queries stay in registers. For larger D there is no room for them beside the
 * output (128 registers) and the logits (64).
 */
#ifndef LLMC_BACKEND_CUDA_ATTENTION_FORWARD_H
#define LLMC_BACKEND_CUDA_ATTENTION_FORWARD_H

#include "llmc/backend/cuda/attention/tile.cuh"

enum { FORWARD_KEYS = 64 };

struct online_softmax { /* of this thread's rows, by fragment and half */
    float largest[2][2];
    float sum[2][2]; /* over this thread's columns */
};

/* Turns logits S into weights P = 2^(factor (S - largest)), and rescales `out`, the sum over the
 * earlier keys. */
template <int HD>
__device__ __forceinline__ void
online_softmax_step(struct online_softmax *state, struct tile_weights<FORWARD_KEYS> *weights,
                    const float s[2][FORWARD_KEYS / 8][4], float out[2][HD / 8][4], float factor) {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float largest = state->largest[m][half], sum = 0;
#pragma unroll
            for (int n = 0; n < FORWARD_KEYS / 8; n++)
                largest = fmaxf(largest, fmaxf(s[m][n][half * 2], s[m][n][half * 2 + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            const float shrink = exp2_approx((state->largest[m][half] - largest) * factor);
            state->largest[m][half] = largest;
#pragma unroll
            for (int n = 0; n < HD / 8; n++) {
                out[m][n][half * 2] *= shrink;
                out[m][n][half * 2 + 1] *= shrink;
            }
            largest *= -factor;
#pragma unroll
            for (int n = 0; n < FORWARD_KEYS / 8; n++) {
                const float even = exp2_approx(fmaf(s[m][n][half * 2], factor, largest));
                const float odd = exp2_approx(fmaf(s[m][n][half * 2 + 1], factor, largest));
                sum += even + odd;
                tile_weights_put(weights, m, n, half, even, odd);
            }
            state->sum[m][half] = state->sum[m][half] * shrink + sum;
        }
}

/* Completes the sums of rows: normaliser = 1 / sum, log_sum_exp (T) = the natural logarithm of the
 * sum of exp(logit), in float32. */
__device__ __forceinline__ void online_softmax_end(struct online_softmax *state,
                                                   float normaliser[2][2], float *log_sum_exp,
                                                   int first, int T, float scale) {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = state->sum[m][half];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            normaliser[m][half] = 1.0f / sum;
            int row = first + tile_row(m, half * 2);
            if (threadIdx.x % 4 == 0 && row < T)
                log_sum_exp[row] = state->largest[m][half] * scale + logf(sum);
        }
}

template <int HD>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2)
    attention_forward_kernel(bfloat16 *out, float *log_sum_exp, const bfloat16 *qkv,
                             const struct attention_call call) {
    constexpr int LD = tile_layout<HD>::LD;
    bfloat16 *queries = (bfloat16 *)dynamic_shared();
    bfloat16 *keys = queries + BLOCK_ROWS * LD, *values = keys + FORWARD_KEYS * LD;

    int rank, head;
    attention_place(call.order, &rank, &head);
    const int b = head / call.H, h = head % call.H, T = call.T;
    const int first = (call.order.tiles - 1 - rank) * BLOCK_ROWS;
    const int last = min(T, first + BLOCK_ROWS); /* no row of the block sees keys from here on */
    const int warp_first = first + tile_warp_row();
    const bfloat16 *own = qkv + b * T * call.row + tile_begin<HD>(call.row);
    const bfloat16 *k = own + (call.H + h / call.group) * call.D; /* the next keys */

    struct online_softmax state;
    float o[2][HD / 8][4];
    struct tile_kept<HD <= 64 ? HD / 16 : 0> kept;
    tile_fill<HD>(o, 0);
#pragma unroll
    for (int i = 0; i < 4; i++)
        state.largest[i / 2][i % 2] = -INFINITY, state.sum[i / 2][i % 2] = 0;

    tile_load<HD, BLOCK_ROWS>(queries, own + first * call.row + h * call.D, call.row, T - first,
                              call.D);
    tile_load<HD, FORWARD_KEYS>(keys, k, call.row, T, call.D);
    cp_async_commit();
    for (int key = 0; key < last; key += FORWARD_KEYS) {
        const bool useful = key < warp_first + WARP_ROWS; /* some row of the warp sees some key */
        cp_async_wait<0>();
        __syncthreads(); /* everybody's part of the keys is here, everybody is done with `values` */
        tile_load<HD, FORWARD_KEYS>(values, k + call.values, call.row, T - key, call.D);
        cp_async_commit();
        if (key == 0) tile_keep<HD>(&kept, tile_warp<HD>(queries));
        struct tile_weights<FORWARD_KEYS> weights;
        if (useful) {
            float s[2][FORWARD_KEYS / 8][4];
            tile_fill<FORWARD_KEYS>(s, 0);
            tile_multiply_rows<HD, FORWARD_KEYS>(s, kept, tile_warp<HD>(queries), keys);
            if (key + FORWARD_KEYS > warp_first + 1) /* some row does not see some key */
                tile_mask<FORWARD_KEYS, true>(s, warp_first - key, -INFINITY);
            online_softmax_step<HD>(&state, &weights, s, o, call.factor);
        }
        cp_async_wait<0>();
        __syncthreads(); /* the values are here, everybody is done with `keys` */
        k += FORWARD_KEYS * call.row;
        if (key + FORWARD_KEYS < last) {
            tile_load<HD, FORWARD_KEYS>(keys, k, call.row, T - key - FORWARD_KEYS, call.D);
            cp_async_commit();
        }
        if (useful) tile_multiply_weights<HD>(o, weights, values);
    }

    float normaliser[2][2];
    online_softmax_end(&state, normaliser, log_sum_exp + (size_t)head * T, warp_first, T,
                       call.scale);
    tile_store<HD>(out + b * T * call.out_row + h * call.D, call.out_row, warp_first, T, call.D, o,
                   normaliser, tile_warp<HD>(queries));
}

template <int HD>
void attention_forward_launch(bfloat16 *out, float *log_sum_exp, const bfloat16 *qkv, int B, int T,
                              int H, int K, int D, cudaStream_t stream) {
    const size_t smem = (BLOCK_ROWS + 2 * FORWARD_KEYS) * tile_layout<HD>::LD * sizeof(bfloat16);
    const struct attention_call call = attention_call_make(B, T, H, K, D, true);
    launch(attention_forward_kernel<HD>, call.order.tiles * call.order.heads, ATTENTION_THREADS,
           smem, stream, out, log_sum_exp, qkv, call);
}

#endif
