/* attention.cuh — causal grouped-query attention, forward and backward (llmc/backend/backend.h has
 * the layout of rows). Which path a call takes:
 *
 *   bfloat16, D a multiple of 8 up to 128   tensor cores: forward.cuh, backward.cuh,
 *                                           with D rounded up to 16, 32, 48, 64, 96 or 128
 *   other bfloat16, and float32             plain.cuh, D up to 256
 *   tokens behind those of earlier calls    plain.cuh: one at a time, bound by reading the keys
 *   D above 256                             refused, see cuda_attention_takes
 *
 * Any T; H a multiple of K; B*H*T (T rounded up to 128) below 2^31. All pointers aligned to 16
 * bytes. The same arguments give the same bits: every sum has one owner and one order, and there
 * are no atomic operations.
 *
 * Rounding in bfloat16: logits, softmax and sums are float32. P and dS are rounded to bfloat16 as
 * operands of the second product, and results when they are stored.
 *
 * What sm_90's own instructions would change (they are not used yet): wgmma itself reads its right
 * operand from shared memory, and its left one if wanted. ldmatrix, its registers and the limit of
 * 32 rows per warp are then not needed. One instruction computes 64 rows and up to 256 columns, and
 * warps go on meanwhile, so the softmax of one tile overlaps with the products of the next. wgmma
 * needs tiles with a 128-byte swizzle instead of longer rows (tile_layout). One warp would issue
 * bulk tensor copies that fill them, an mbarrier would count these, and most registers would go to
 * the warps that multiply (setmaxnreg). dK and dV of 64 keys would fit one warp group, and dQ could
 * go through shared memory to a sum in global memory to which blocks add in turn: 5 products, and
 * still one order. The split into tile, forward and backward would stay. So would this path, for
 * sm_80 to sm_89 and for the emulation.
 */
#ifndef LLMC_BACKEND_CUDA_ATTENTION_ATTENTION_H
#define LLMC_BACKEND_CUDA_ATTENTION_ATTENTION_H

#include "llmc/backend/cuda/attention/backward.cuh"
#include "llmc/backend/cuda/attention/forward.cuh"
#include "llmc/backend/cuda/attention/plain.cuh"

static inline bool cuda_attention_takes(int D) {
    return D >= 1 && D <= PLAIN_MOST;
}

static inline void cuda_attention_check(int B, int T, int H, int D) {
    cuda_items("attention", ceil_div(T, BLOCK_ROWS) * BLOCK_ROWS * B * H, INT32_MAX);
    if (cuda_attention_takes(D)) return;
    fprintf(stderr, "attention: head size %d, expected 1 to %d\n", D, PLAIN_MOST);
    exit(1);
}

/* Calls FUNCTION<HD>(arguments) with the smallest HD that holds D. */
#define ATTENTION_INSTANCE(D, FUNCTION, ...)                                                       \
    ((D) <= 16   ? FUNCTION<16>(__VA_ARGS__)                                                       \
     : (D) <= 32 ? FUNCTION<32>(__VA_ARGS__)                                                       \
     : (D) <= 48 ? FUNCTION<48>(__VA_ARGS__)                                                       \
     : (D) <= 64 ? FUNCTION<64>(__VA_ARGS__)                                                       \
     : (D) <= 96 ? FUNCTION<96>(__VA_ARGS__)                                                       \
                 : FUNCTION<128>(__VA_ARGS__))

/* out (B*T, H*D), log_sum_exp (B, H, T), from qkv (B*T, (H+2K)*D) */
template <typename T>
void cuda_attention_forward(T *out, float *log_sum_exp, const T *qkv, int B, int T_, int H, int K,
                            int D, cudaStream_t stream) {
    cuda_attention_check(B, T_, H, D);
    if constexpr (sizeof(T) == 2)
        if (D % 8 == 0 && D <= 128)
            return ATTENTION_INSTANCE(D, attention_forward_launch, out, log_sum_exp, qkv, B, T_, H,
                                      K, D, stream);
    plain_forward_launch(out, log_sum_exp, qkv, B, T_, H, K, D, stream);
}

/* out (rows, H*D): tokens first ... first+rows-1 of one sequence, from qkv (first+rows,
 * (H+2K)*D) */
template <typename T>
void cuda_attention_continue(T *out, const T *qkv, int first, int rows, int H, int K, int D,
                             cudaStream_t stream) {
    cuda_attention_check(1, rows, H, D);
    if (rows > 0) plain_continue_launch(out, qkv, first, rows, H, K, D, stream);
}

/* Bytes of device memory that backward works in; the workspace is aligned to 16 bytes. */
static inline size_t cuda_attention_backward_workspace(int B, int T_, int H, int K, int D) {
    (void)K, (void)D;
    return attention_backward_bytes(B, T_, H);
}

/* dqkv (B*T, (H+2K)*D) is overwritten. */
template <typename T>
void cuda_attention_backward(T *dqkv, const T *dout, const T *out, const T *qkv,
                             const float *log_sum_exp, int B, int T_, int H, int K, int D,
                             void *workspace, size_t workspace_bytes, cudaStream_t stream) {
    cuda_attention_check(B, T_, H, D);
    cuda_check_workspace(workspace_bytes, cuda_attention_backward_workspace(B, T_, H, K, D));
    float *floats = (float *)workspace;
    if constexpr (sizeof(T) == 2)
        if (D % 8 == 0 && D <= 128)
            return ATTENTION_INSTANCE(D, attention_backward_launch, dqkv, dout, out, qkv,
                                      log_sum_exp, B, T_, H, K, D, floats, stream);
    plain_backward_launch(dqkv, dout, out, qkv, log_sum_exp, B, T_, H, K, D, floats, stream);
}

#endif
