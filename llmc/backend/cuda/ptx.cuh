/* ptx.cuh — the few PTX instructions that CUDA C++ has no function for. No other kernel source
 * contains asm. Under emulation dev/emulation/ptx_emu.h takes its place.
 *
 * Source: PTX ISA, "Matrix multiply-accumulate operation using mma instruction", "ldmatrix",
 * "cp.async". sm_80 and later. All lanes of a warp must execute ldmatrix and mma together. None of
 * these instructions orders memory between threads: that takes __syncthreads or __syncwarp.
 */
#ifndef LLMC_BACKEND_CUDA_PTX_H
#define LLMC_BACKEND_CUDA_PTX_H

#include "llmc/backend/cuda/common.cuh"

#ifdef CUDA_EMULATION
#include "dev/emulation/ptx_emu.h"
#else

/* Loads four 8x8 matrices of 16-bit elements from shared memory. Lane l passes the address of row l
 * % 8 of matrix l / 8 (16 bytes, aligned to 16). It gets in r[m] elements 2 (l % 4) and 2 (l % 4) +
 * 1 of row l / 4 of matrix m. */
__device__ __forceinline__ void ldmatrix_x4(uint32_t r[4], const void *row) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* The same with transposed matrices: r[m] has rows 2 (l % 4) and 2 (l % 4) + 1 of column l / 4. */
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t r[4], const void *row) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* d (16, 8) = a (16, 16) b (16, 8) + c (16, 8), a and b bfloat16, c and d float32. With g = lane /
 * 4 and t = lane % 4:
 *   a[0] row g, columns 2t, 2t+1; a[1] row g+8, the same; a[2] and a[3] the same, columns + 8
 *   b[0] rows 2t, 2t+1 of column g; b[1] rows + 8
 *   c, d: [0] and [1] row g, columns 2t, 2t+1; [2] and [3] row g+8
 * d may be c. */
__device__ __forceinline__ void mma_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2],
                                             const float c[4]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]),
                   "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

/* Starts a copy of 16 bytes from global to shared memory, which bypasses L1. Both addresses are
 * aligned to 16 bytes. If `valid` is false, it writes zeros and reads nothing. */
__device__ __forceinline__ void cp_async16(void *destination, const void *source, bool valid) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(destination);
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(source),
                 "r"(bytes)
                 : "memory");
}

/* The copies that this thread started since the last commit become one group. */
__device__ __forceinline__ void cp_async_commit(void) {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most `pending` of this thread's groups are under way. A thread that reads what
 * another thread copied also needs a barrier. */
template <int pending> __device__ __forceinline__ void cp_async_wait(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/* 2^x, with a relative error of at most 2^-22; results below 2^-126 are 0. It is one instruction;
 * exp2f takes three more to get those small results right. */
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
#endif
