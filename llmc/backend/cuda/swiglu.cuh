/* swiglu.cuh — SwiGLU (Shazeer 2020): out (N, F) = silu(gate) up, gate_up (N, 2F) = [gate | up]. */
#ifndef LLMC_BACKEND_CUDA_SWIGLU_H
#define LLMC_BACKEND_CUDA_SWIGLU_H

#include "llmc/backend/cuda/common.cuh"
#include "llmc/backend/cuda/ptx.cuh"

/* ---- kernels ------------------------------------------------------------------------------- */

/* For bfloat16 it uses two approximations, each off by at most 2 units in the last place of a
 * float; rounding to bfloat16 hides that. They take 5 instructions, where expf and a division take
 * some 25. */
template <typename T> __device__ __forceinline__ float sigmoid(float x) {
    if constexpr (sizeof(T) == 2)
        return __fdividef(1.0f, 1.0f + exp2_approx(x * -LOG2_E));
    else
        return 1.0f / (1.0f + expf(-x));
}

/* A thread computes W neighbouring elements of a row; items = N * F / W. */
template <typename T, int W>
__global__ void __launch_bounds__(256)
    swiglu_forward_kernel(T *__restrict__ out, const T *__restrict__ gate_up, int F,
                          uint32_t items) {
    uint32_t item = blockIdx.x * blockDim.x + threadIdx.x, per_row = F / W;
    if (item >= items) return;
    size_t row = item / per_row, i = item % per_row * W;
    float gate[W], up[W];
    load(gate, gate_up + row * 2 * F + i);
    load(up, gate_up + row * 2 * F + F + i);
#pragma unroll
    for (int k = 0; k < W; k++) gate[k] = gate[k] * sigmoid<T>(gate[k]) * up[k];
    store(out + row * F + i, gate);
}

/* With s = sigmoid(gate): dgate = dout up s (1 + gate (1 - s)), dup = dout gate s. */
template <typename T, int W>
__global__ void __launch_bounds__(256)
    swiglu_backward_kernel(T *__restrict__ dgate_up, const T *__restrict__ dout,
                           const T *__restrict__ gate_up, int F, uint32_t items) {
    uint32_t item = blockIdx.x * blockDim.x + threadIdx.x, per_row = F / W;
    if (item >= items) return;
    size_t row = item / per_row, i = item % per_row * W;
    float gate[W], up[W], d[W];
    load(gate, gate_up + row * 2 * F + i);
    load(up, gate_up + row * 2 * F + F + i);
    load(d, dout + row * F + i);
#pragma unroll
    for (int k = 0; k < W; k++) {
        float s = sigmoid<T>(gate[k]), dgate = d[k] * up[k] * s * (1.0f + gate[k] * (1.0f - s));
        up[k] = d[k] * gate[k] * s;
        gate[k] = dgate;
    }
    store(dgate_up + row * 2 * F + i, gate);
    store(dgate_up + row * 2 * F + F + i, up);
}

/* ---- launchers ----------------------------------------------------------------------------- */

template <typename T>
void cuda_swiglu_forward(T *out, const T *gate_up, int N, int F, cudaStream_t stream) {
    bool vectors = F % wide<T> == 0 && are_aligned(out, gate_up);
    uint32_t items = cuda_items("swiglu", (size_t)N * (F / (vectors ? wide<T> : 1)), UINT32_MAX);
    launch(vectors ? swiglu_forward_kernel<T, wide<T>> : swiglu_forward_kernel<T, 1>,
           ceil_div(items, 256), 256, 0, stream, out, gate_up, F, items);
}

template <typename T>
void cuda_swiglu_backward(T *dgate_up, const T *dout, const T *gate_up, int N, int F,
                          cudaStream_t stream) {
    bool vectors = F % wide<T> == 0 && are_aligned(dgate_up, dout, gate_up);
    uint32_t items = cuda_items("swiglu", (size_t)N * (F / (vectors ? wide<T> : 1)), UINT32_MAX);
    launch(vectors ? swiglu_backward_kernel<T, wide<T>> : swiglu_backward_kernel<T, 1>,
           ceil_div(items, 256), 256, 0, stream, dgate_up, dout, gate_up, F, items);
}

#endif
