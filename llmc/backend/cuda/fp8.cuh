/* fp8.cuh — rounds arrays to 8 bits, for use as operands of products (--dtype fp8).
 *
 * Micikevicius et al. 2022, "FP8 Formats for Deep Learning": E4M3 for weights and activations, up to
 * 448; E5M2 for gradients, up to 57344. Each array has one scale, which follows from its own
 * largest magnitude ("current scaling"), so a checkpoint need not keep a history. The scale is a
 * power of two, so that scaling rounds nothing; numbers that are too small become zero. NaN stays
 * NaN, and an infinity becomes NaN, so that a run that diverges is noticed.
 *
 * Products read both operands along their rows (cuBLASLt's only layout for 8 bits on sm_89 and
 * sm_90), so arrays are transposed on the way where that is needed. Rows and columns are multiples
 * of 16.
 */
#ifndef LLMC_BACKEND_CUDA_FP8_H
#define LLMC_BACKEND_CUDA_FP8_H

#include "llmc/backend/cuda/common.cuh"

enum { FP8_THREADS = 256, FP8_PARTS = FP8_THREADS, FP8_RUN = 8, FP8_TILE = 64 };

/* ---- kernels ------------------------------------------------------------------------------- */

/* Rounds x to nearest, ties to even. Finite numbers beyond the largest become the largest. */
template <int MANTISSA> __device__ __forceinline__ uint32_t to_fp8(float x) {
    constexpr int BIAS = MANTISSA == 3 ? 7 : 15, CUT = 23 - MANTISSA;
    constexpr float MOST = MANTISSA == 3 ? 448.0f : 57344.0f;
    /* Added to a subnormal number, it makes the last bits of the sum count that number in units of
     * the least one. */
    constexpr uint32_t MAGIC = (uint32_t)(127 + 23 + 1 - BIAS - MANTISSA) << 23;
    uint32_t bits, magnitude;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 31 << 7;
    float size = fabsf(x);
    if (!(size < INFINITY)) return sign | 0x7f;
    size = fminf(size, MOST);
    memcpy(&magnitude, &size, 4);
    if (magnitude < (uint32_t)(128 - BIAS) << 23) {
        const uint32_t magic_bits = MAGIC;
        float magic;
        memcpy(&magic, &magic_bits, 4);
        size += magic;
        memcpy(&magnitude, &size, 4);
        return sign | (magnitude - MAGIC);
    }
    magnitude += (1u << (CUT - 1)) - 1 + (magnitude >> CUT & 1);
    return sign | ((magnitude >> CUT) - ((uint32_t)(127 - BIAS) << MANTISSA));
}

/* part[block] = the largest magnitude that the block reads. n is a multiple of FP8_RUN. */
static __global__ void __launch_bounds__(FP8_THREADS)
    fp8_largest_kernel(float *__restrict__ part, const bfloat16 *__restrict__ x, size_t n) {
    const size_t step = (size_t)gridDim.x * blockDim.x * FP8_RUN;
    float largest = 0;
    for (size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * FP8_RUN; i < n; i += step) {
        float v[FP8_RUN];
        load(v, x + i);
#pragma unroll
        for (int k = 0; k < FP8_RUN; k++) largest = fmaxf(largest, fabsf(v[k]));
    }
    largest = block_reduce<maximum>(largest);
    if (threadIdx.x == 0) part[blockIdx.x] = largest;
}

/* The scale of an array: the largest power of two that keeps all its numbers within range. */
template <int MANTISSA> __device__ __forceinline__ float fp8_scale(const float *part, int parts) {
    constexpr int EXPONENT = MANTISSA == 3 ? 8 : 15; /* of the largest number, 1.75 * 2^EXPONENT */
    const float largest =
        block_reduce<maximum>((int)threadIdx.x < parts ? part[threadIdx.x] : 0.0f);
    if (!(largest > 0) || !(largest < INFINITY)) return 1;
    int exponent;
    const float fraction = frexpf(largest, &exponent); /* largest = fraction 2^exponent */
    const int up = EXPONENT + 1 - exponent - (fraction > 0.875f);
    return ldexpf(1, up < 120 ? up : 120);
}

/* to (n) = x (n) times the scale, rounded; *inverse = 1 / scale. */
template <int MANTISSA>
__global__ void __launch_bounds__(FP8_THREADS)
    fp8_round_kernel(uint8_t *__restrict__ to, float *__restrict__ inverse,
                     const float *__restrict__ part, int parts, const bfloat16 *__restrict__ x,
                     size_t n) {
    const float scale = fp8_scale<MANTISSA>(part, parts);
    const size_t step = (size_t)gridDim.x * blockDim.x * FP8_RUN;
    if (blockIdx.x == 0 && threadIdx.x == 0) *inverse = 1 / scale;
    for (size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * FP8_RUN; i < n; i += step) {
        float v[FP8_RUN];
        uint32_t four[2] = {0, 0};
        load(v, x + i);
#pragma unroll
        for (int k = 0; k < FP8_RUN; k++)
            four[k / 4] |= to_fp8<MANTISSA>(v[k] * scale) << (8 * (k % 4));
        uint2 both;
        memcpy(&both, four, sizeof both);
        *(uint2 *)(to + i) = both;
    }
}

/* The same with `to` (columns, rows) the transpose of x (rows, columns), by tiles of 64 by 64. */
template <int MANTISSA>
__global__ void __launch_bounds__(FP8_THREADS)
    fp8_transpose_kernel(uint8_t *__restrict__ to, float *__restrict__ inverse,
                         const float *__restrict__ part, int parts, const bfloat16 *__restrict__ x,
                         int rows, int columns) {
    enum { LINE = FP8_TILE + 16 };
    __shared__ uint4 tile_[FP8_TILE * LINE / 16];
    uint8_t *tile = (uint8_t *)tile_;
    const float scale = fp8_scale<MANTISSA>(part, parts);
    const int across = (int)ceil_div(columns, FP8_TILE);
    const int first_row = (int)(blockIdx.x / across) * FP8_TILE;
    const int first_column = (int)(blockIdx.x % across) * FP8_TILE;
    if (blockIdx.x == 0 && threadIdx.x == 0) *inverse = 1 / scale;
    for (int i = threadIdx.x; i < FP8_TILE * FP8_TILE / FP8_RUN; i += FP8_THREADS) {
        const int row = i / (FP8_TILE / FP8_RUN), column = i % (FP8_TILE / FP8_RUN) * FP8_RUN;
        if (first_row + row >= rows || first_column + column >= columns) continue;
        float v[FP8_RUN];
        load(v, x + (size_t)(first_row + row) * columns + first_column + column);
#pragma unroll
        for (int k = 0; k < FP8_RUN; k++)
            tile[(column + k) * LINE + row] = (uint8_t)to_fp8<MANTISSA>(v[k] * scale);
    }
    __syncthreads();
    const int column = threadIdx.x / 4, row = threadIdx.x % 4 * 16;
    if (first_column + column < columns && first_row + row < rows)
        *(uint4 *)(to + (size_t)(first_column + column) * rows + first_row + row) =
            *(const uint4 *)(tile + column * LINE + row);
}

/* ---- launchers ----------------------------------------------------------------------------- */

/* Bytes for the inverse scale and the parts that it is computed from. */
static inline size_t cuda_fp8_workspace(void) {
    return (1 + FP8_PARTS) * sizeof(float) + 12;
}

template <int MANTISSA>
void cuda_round_fp8_to(uint8_t *to, float *scale, const bfloat16 *x, int M, int K, bool transposed,
                       cudaStream_t stream) {
    const size_t n = (size_t)M * K, blocks = ceil_div(n, FP8_THREADS * FP8_RUN);
    const int parts = blocks < FP8_PARTS ? (int)blocks : FP8_PARTS;
    float *part = scale + 1;
    launch(fp8_largest_kernel, parts, FP8_THREADS, 0, stream, part, x, n);
    if (transposed)
        launch(fp8_transpose_kernel<MANTISSA>, ceil_div(M, FP8_TILE) * ceil_div(K, FP8_TILE),
               FP8_THREADS, 0, stream, to, scale, (const float *)part, parts, x, K, M);
    else
        launch(fp8_round_kernel<MANTISSA>, blocks < 1024 ? (int)blocks : 1024, FP8_THREADS, 0,
               stream, to, scale, (const float *)part, parts, x, n);
}

/* to (M, K) = x, rounded; *scale = the factor that gives x back. x is (M, K), or (K, M) if
 * `transposed`. scale points to cuda_fp8_workspace() bytes. M and K are multiples of 16; to and x
 * are aligned to 16 bytes. */
static inline void cuda_round_fp8(uint8_t *to, float *scale, const bfloat16 *x, int M, int K,
                                  bool transposed, enum dtype type, cudaStream_t stream) {
    if (type == DTYPE_E4M3)
        cuda_round_fp8_to<3>(to, scale, x, M, K, transposed, stream);
    else
        cuda_round_fp8_to<2>(to, scale, x, M, K, transposed, stream);
}

#endif
