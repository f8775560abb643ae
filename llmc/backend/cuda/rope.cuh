/* rope.cuh — rotary embedding (Su et al. 2021) in Hugging Face's half-split layout, in place. */
#ifndef LLMC_BACKEND_CUDA_ROPE_H
#define LLMC_BACKEND_CUDA_ROPE_H

#include "llmc/backend/cuda/common.cuh"

/* ---- kernels ------------------------------------------------------------------------------- */

/* qkv (rows, H+2K heads, D); the first `turned` = H+K heads of each row are rotated. A thread
 * rotates W pairs: W elements of a head's lower half and their partners in the upper half. `items`
 * = rows * turned * D/2 / W. */
template <typename T, int W>
__global__ void __launch_bounds__(256)
    rope_kernel(T *qkv, const float *__restrict__ cosine, const float *__restrict__ sine,
                int length, int turned, int heads, int D, uint32_t items, float direction) {
    uint32_t item = blockIdx.x * blockDim.x + threadIdx.x;
    if (item >= items) return;
    uint32_t per_head = D / 2 / W, head = item / per_head, row = head / turned;
    int i = item % per_head * W;
    T *low = qkv + ((size_t)row * heads + head % turned) * D + i, *high = low + D / 2;
    size_t angle = (size_t)(row % length) * (D / 2) + i;
    float a[W], b[W], c[W], s[W];
    load(a, low);
    load(b, high);
    load(c, cosine + angle);
    load(s, sine + angle);
#pragma unroll
    for (int k = 0; k < W; k++) {
        float turn = s[k] * direction, x = a[k];
        a[k] = x * c[k] - b[k] * turn;
        b[k] = x * turn + b[k] * c[k];
    }
    store(low, a);
    store(high, b);
}

/* ---- launchers ----------------------------------------------------------------------------- */

/* qkv (B*T, (H+2K)*D), cosine and sine (T, D/2). */
template <typename T>
void cuda_rope(T *qkv, const float *cosine, const float *sine, int B, int length, int H, int K,
               int D, bool backward, cudaStream_t stream) {
    bool vectors = D / 2 % wide<T> == 0 && are_aligned(qkv, cosine, sine);
    uint32_t items = cuda_items(
        "rope", (size_t)B * length * (H + K) * (D / 2 / (vectors ? wide<T> : 1)), UINT32_MAX);
    launch(vectors ? rope_kernel<T, wide<T>> : rope_kernel<T, 1>, ceil_div(items, 256), 256, 0,
           stream, qkv, cosine, sine, length, H + K, H + 2 * K, D, items, backward ? -1.0f : 1.0f);
}

#endif
