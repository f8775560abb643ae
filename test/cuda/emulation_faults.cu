/* emulation_faults.cu — kernels with a fault each, to see that the emulation (dev/emulation) finds
 * it: alone, or with the address or the thread sanitizer. test_cuda_emulation.py runs
 *
 *   emulation_faults NAME [forward|reverse|random]
 *
 * and knows what each must lead to. The kernels whose names begin with "right" are the same without
 * the fault. "wrong result" is printed where the numbers show it.
 */
#include "llmc/backend/cuda/ptx.cuh"

/* Warps exchange numbers through shared memory: lane t of one reads what the other wrote. */
template <bool barrier> __global__ void exchange(float *out) {
    __shared__ float value[64];
    value[threadIdx.x] = threadIdx.x;
    if (barrier) __syncthreads();
    out[threadIdx.x] = value[63 - threadIdx.x];
}

template <bool barrier> __global__ void exchange_in_warp(float *out) {
    __shared__ float value[32];
    value[threadIdx.x] = threadIdx.x;
    float same = __shfl_xor_sync(0xffffffffu, 0.0f, 1); /* orders no memory */
    if (barrier) __syncwarp();
    out[threadIdx.x] = value[31 - threadIdx.x] + same;
}

/* A second use of the same shared memory, without waiting for those who still read. */
template <bool barrier> __global__ void use_again(float *out) {
    float *value = (float *)dynamic_shared(), total = 0;
    for (int round = 0; round < 2; round++) {
        value[threadIdx.x] = round * 100 + threadIdx.x;
        __syncthreads();
        total += value[63 - threadIdx.x];
        if (barrier) __syncthreads();
    }
    out[threadIdx.x] = total - 100 - 2 * (63 - (float)threadIdx.x);
}

/* Blocks add to one number. */
template <bool atomic> __global__ void count_blocks(int *count) {
    if (threadIdx.x > 0) return;
    if (atomic)
        atomicAdd(count, 1);
    else
        *count = *count + 1;
}

template <bool wait> __global__ void copy_async(float *out, const float *in) {
    float *value = (float *)dynamic_shared();
    cp_async16(value + 4 * threadIdx.x, in + 4 * threadIdx.x, true);
    cp_async_commit();
    if (wait) cp_async_wait<0>();
    for (int i = 0; i < 4; i++) out[4 * threadIdx.x + i] = value[4 * threadIdx.x + i];
    cp_async_wait<0>();
}

__global__ void copy_forgotten(const float *in) {
    cp_async16((float *)dynamic_shared() + 4 * threadIdx.x, in + 4 * threadIdx.x, true);
    cp_async_commit();
}

__global__ void two_barriers(void) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
}

__global__ void missing_lanes(float *out) {
    if (threadIdx.x < 16)
        out[threadIdx.x] = warp_reduce<sum>(1.0f);
    else
        __syncthreads();
}

__global__ void different_collectives(float *out) {
    if (threadIdx.x < 16)
        out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
    else
        out[threadIdx.x] = (float)__ballot_sync(0xffffffffu, 1);
}

__global__ void early_exit(float *out) {
    if (threadIdx.x == 7) return;
    out[threadIdx.x] = warp_reduce<sum>(1.0f);
}

__global__ void odd_row(float *out) {
    uint32_t r[4];
    ldmatrix_x4(r, (char *)dynamic_shared() + 8);
    out[threadIdx.x] = (float)r[0];
}

__global__ void row_elsewhere(float *out, const float *in) {
    uint32_t r[4];
    ldmatrix_x4(r, in);
    out[threadIdx.x] = (float)r[0];
}

__global__ void beyond_dynamic(float *out) {
    float *value = (float *)dynamic_shared();
    value[threadIdx.x + 1] = 1;
    out[threadIdx.x] = value[threadIdx.x + 1];
}

__global__ void beyond_static(float *out, int by) {
    __shared__ float array[64];
    float *value = array; /* not seen as an index out of bounds */
    value[threadIdx.x + by] = 1;
    out[threadIdx.x] = value[threadIdx.x + by];
}

__global__ void beyond_global(float *out) {
    out[threadIdx.x + 1] = 1;
}

__global__ void misaligned(float *out) {
    float x[4] = {1, 2, 3, 4};
    if (threadIdx.x == 0) store(out + 1, x);
}

enum { THREADS = 64, SHARED = THREADS * 16 };

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "", *order = argc > 2 ? argv[2] : "forward";
    float *in = (float *)aligned_alloc(64, THREADS * 16);
    float *out = (float *)aligned_alloc(64, THREADS * 16);
    int blocks = 0;
    for (int i = 0; i < 4 * THREADS; i++) in[i] = (float)i, out[i] = 0;
    cuda_emu_order(!strcmp(order, "reverse")  ? CUDA_EMU_REVERSE
                   : !strcmp(order, "random") ? CUDA_EMU_RANDOM
                                              : CUDA_EMU_FORWARD,
                   1);
    bool reversed = false, copied = false, zero = false, known = true;
#define IS(text) (strcmp(name, text) == 0)
    if ((reversed = IS("barrier")))
        launch(exchange<false>, 1, 64, 0, 0, out);
    else if ((reversed = IS("right_barrier")))
        launch(exchange<true>, 1, 64, 0, 0, out);
    else if (IS("warp_barrier"))
        launch(exchange_in_warp<false>, 1, 32, 0, 0, out);
    else if (IS("right_warp_barrier"))
        launch(exchange_in_warp<true>, 1, 32, 0, 0, out);
    else if ((zero = IS("use_again")))
        launch(use_again<false>, 1, 64, SHARED, 0, out);
    else if ((zero = IS("right_use_again")))
        launch(use_again<true>, 1, 64, SHARED, 0, out);
    else if (IS("lost_update"))
        launch(count_blocks<false>, 4, 32, 0, 0, &blocks);
    else if (IS("right_lost_update"))
        launch(count_blocks<true>, 4, 32, 0, 0, &blocks);
    else if ((copied = IS("copy_wait")))
        launch(copy_async<false>, 1, 64, SHARED, 0, out, in);
    else if ((copied = IS("right_copy_wait")))
        launch(copy_async<true>, 1, 64, SHARED, 0, out, in);
    else if (IS("copy_forgotten"))
        launch(copy_forgotten, 1, 64, SHARED, 0, in);
    else if (IS("two_barriers"))
        launch(two_barriers, 1, 64, 0, 0);
    else if (IS("missing_lanes"))
        launch(missing_lanes, 1, 32, 0, 0, out);
    else if (IS("different_collectives"))
        launch(different_collectives, 1, 32, 0, 0, out);
    else if (IS("early_exit"))
        launch(early_exit, 1, 32, 0, 0, out);
    else if (IS("odd_row"))
        launch(odd_row, 1, 32, SHARED, 0, out);
    else if (IS("row_elsewhere"))
        launch(row_elsewhere, 1, 32, 0, 0, out, in);
    else if (IS("launch"))
        launch(two_barriers, 1, 1025, 0, 0);
    else if (IS("beyond_dynamic"))
        launch(beyond_dynamic, 1, 64, 64 * 4, 0, out);
    else if (IS("beyond_static"))
        launch(beyond_static, 1, 64, 0, 0, out, argc - 1);
    else if (IS("beyond_global"))
        launch(beyond_global, 1, 256, 0, 0, out);
    else if (IS("misaligned"))
        launch(misaligned, 1, 32, 0, 0, out);
    else
        known = false;
    if (!known) {
        fprintf(stderr, "%s: no such fault\n", name);
        return 2;
    }
    for (int i = 0; i < THREADS; i++)
        if ((reversed && out[i] != 63 - i) || (copied && out[i] != in[i]) ||
            (zero && out[i] != 0)) {
            puts("wrong result");
            break;
        }
    puts("finished");
    free(in);
    free(out);
    return 0;
}
