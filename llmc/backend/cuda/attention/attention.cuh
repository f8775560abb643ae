/* attention.cuh — causal grouped-query attention, forward and backward (llmc/backend/backend.h has
 * the layout of rows). Which path a call takes:
 *
 *   bfloat16, D a multiple of 8 up to 128   tensor cores: forward.cuh, backward.cuh,
 *                                           with D rounded up to 16, 32, 48, 64, 96 or 128
 *   bfloat16 else, float32                  plain.cuh, D up to 256
 *   behind tokens of earlier calls          the same: a token at a time, bound by reading the keys
 *   D above 256                             refused, see cuda_attention_takes
 *
 * Any T; H a multiple of K; B*H*T (T rounded up to 128) below 2^31. All pointers aligned to 16
 * bytes. The same arguments give the same bits: every sum has one owner and one order, there are no
 * atomic operations.
 *
 * Rounding in bfloat16: logits, softmax and sums are float32; P and dS are rounded to bfloat16 as
 * operands of the second product, results when they are stored.
 *
 * What sm_90's own instructions would change (they are not used yet): wgmma reads its right
 * operand, and its left if need be, from shared memory by itself, so ldmatrix, its registers and
 * the bound of 32 rows to a warp go; 64 rows and up to 256 columns are one instruction that runs on
 * while the warps go on, so the softmax of one tile hides behind the products of the next. It wants
 * tiles with a 128-byte swizzle instead of longer rows (tile_layout), filled by bulk tensor copies
 * that one warp issues and an mbarrier counts, with most registers handed to the warps that
 * multiply (setmaxnreg). There dK and dV of 64 keys fit one warp group, and dQ can go through
 * shared memory to a sum in global memory that blocks add to by turns: 5 products, and still one
 * order. The split into tile, forward and backward stays; so does this path, for sm_80 to sm_89 and
 * for the emulation.
 */
#ifndef LLMC_BACKEND_CUDA_ATTENTION_ATTENTION_H
#define LLMC_BACKEND_CUDA_ATTENTION_ATTENTION_H

#include "llmc/backend/cuda/attention/backward.cuh"
#include "llmc/backend/cuda/attention/forward.cuh"
#include "llmc/backend/cuda/attention/plain.cuh"

static inline bool cuda_attention_takes(int D) {
    return D >= 1 && D <= PLAIN_MOST;
}

static inline void cuda_attention_check(int D) {
    if (cuda_attention_takes(D)) return;
    fprintf(stderr, "attention: head size %d, expected 1 to %d\n", D, PLAIN_MOST);
    exit(1);
}

/* Calls FUNCTION<HD>(arguments), HD the least instance that holds D. */
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
    cuda_attention_check(D);
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
    cuda_attention_check(D);
    if (rows > 0) plain_continue_launch(out, qkv, first, rows, H, K, D, stream);
}

/* Bytes of device memory that backward works in, aligned to 16. */
static inline size_t cuda_attention_backward_workspace(int B, int T_, int H, int K, int D) {
    (void)K, (void)D;
    return attention_backward_bytes(B, T_, H);
}

/* dqkv (B*T, (H+2K)*D) is overwritten. */
template <typename T>
void cuda_attention_backward(T *dqkv, const T *dout, const T *out, const T *qkv,
                             const float *log_sum_exp, int B, int T_, int H, int K, int D,
                             void *workspace, size_t workspace_bytes, cudaStream_t stream) {
    cuda_attention_check(D);
    cuda_check_workspace(workspace_bytes, cuda_attention_backward_workspace(B, T_, H, K, D));
    float *floats = (float *)workspace;
    if constexpr (sizeof(T) == 2)
        if (D % 8 == 0 && D <= 128)
            return ATTENTION_INSTANCE(D, attention_backward_launch, dqkv, dout, out, qkv,
                                      log_sum_exp, B, T_, H, K, D, floats, stream);
    plain_backward_launch(dqkv, dout, out, qkv, log_sum_exp, B, T_, H, K, D, floats, stream);
}

#endif
