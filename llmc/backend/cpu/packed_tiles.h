/* packed_tiles.h — packed.h with bfloat16 instructions. A packed operand consists of tiles of
 * 1 KiB, 16 rows of `outer` by 32 columns of `depth`, with a row of tiles for every 16 rows:
 *
 *     left     16 rows, each of 32 columns
 *     right    16 pairs of columns, each of 16 rows: (row 0, column 0), (row 0, column 1), (row 1,
 *              column 0), ...
 *
 * TDPBF16PS reads its operands in this order. So does VDPBF16PS: it broadcasts a pair of A and
 * multiplies it with 16 pairs of B (Intel 64 and IA-32 Architectures Software Developer's Manual,
 * volume 2). A right tile is a left tile with rows and columns of 32-bit pairs exchanged. Elements
 * outside of the operand are 0.
 */
#ifndef LLMC_BACKEND_CPU_PACKED_TILES_H
#define LLMC_BACKEND_CPU_PACKED_TILES_H

#include <immintrin.h>

enum {
    TILE_ROWS = 16,
    TILE_BYTES = 1024,
    BLOCK = 2 * TILE_ROWS, /* rows and columns of C that are computed at once */
    BLOCK_STEPS = 12, /* tiles of depth at once, when C is float32: they stay in the L1 cache */
};

static inline int pack_steps(int depth) {
    return ceil_div(depth, PACK_DEPTH);
}

static inline size_t packed_bytes(int outer, int depth) {
    return (size_t)ceil_div(outer, PACK_ROWS) * 2 * pack_steps(depth) * TILE_BYTES;
}

static inline struct packed packed_at(void *memory, int depth) {
    return (struct packed){(char *)memory, (size_t)pack_steps(depth) * TILE_BYTES};
}

static inline struct packed packed_part(struct packed p, int row, int column) {
    p.data += (size_t)(row / TILE_ROWS) * p.stride + (size_t)(column / PACK_DEPTH) * TILE_BYTES;
    return p;
}

/* ---- packing ------------------------------------------------------------------------------ */

static inline __mmask16 first_lanes(int n) {
    return n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1);
}

static inline __m512i round_pairs(__m512 low, __m512 high) {
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/* Loads the first n of 32 columns of a row. */
static inline __m512i load_row(const char *row, bool floats, int n) {
    const __mmask16 low = first_lanes(n), high = first_lanes(n - 16);
    if (floats)
        return round_pairs(_mm512_maskz_loadu_ps(low, row), _mm512_maskz_loadu_ps(high, row + 64));
    return _mm512_maskz_loadu_epi16((__mmask32)low | (__mmask32)high << 16, row);
}

/* Loads the first n of 16 elements of two stored rows, interleaved. */
static inline __m512i load_pairs(const char *row, const char *next, bool floats, int n) {
    const __m512i turns =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __mmask16 lanes = first_lanes(n), lanes_next = next ? lanes : 0;
    __m512i both;
    if (floats)
        both =
            round_pairs(_mm512_maskz_loadu_ps(lanes, row), _mm512_maskz_loadu_ps(lanes_next, next));
    else
        both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi16(lanes, row)),
                                  _mm256_maskz_loadu_epi16(lanes_next, next), 1);
    return _mm512_permutexvar_epi16(turns, both);
}

static inline void narrow_row(element *to, const float *from, int n, float scale) {
    const __m512 factor = _mm512_set1_ps(scale);
    for (int i = 0; i < n; i += 32) {
        const __mmask16 low = first_lanes(n - i), high = first_lanes(n - i - 16);
        const __m512 x = _mm512_mul_ps(factor, _mm512_maskz_loadu_ps(low, from + i));
        const __m512 y = _mm512_mul_ps(factor, _mm512_maskz_loadu_ps(high, from + i + 16));
        _mm512_mask_storeu_epi16(to + i, (__mmask32)low | (__mmask32)high << 16, round_pairs(x, y));
    }
}

/* Exchanges rows and columns of 16 x 16 pairs. */
static inline void transpose_pairs(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

/* Packs one tile, whose first element is at `from`; only `rows` by `columns` elements exist. */
static inline __attribute__((always_inline)) void pack_tile(char *to, bool right, const char *from,
                                                            size_t stride, bool floats,
                                                            bool stored_columns, int rows,
                                                            int columns) {
    __m512i r[16];
    for (int i = 0; i < 16; i++) {
        r[i] = _mm512_setzero_si512();
        if (!stored_columns && i < rows) r[i] = load_row(from + i * stride, floats, columns);
        if (stored_columns && 2 * i < columns) {
            const char *row = from + 2 * i * stride;
            r[i] = load_pairs(row, 2 * i + 1 < columns ? row + stride : NULL, floats, rows);
        }
    }
    if (stored_columns != right) transpose_pairs(r);
    for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * 64, r[i]);
}

static inline __attribute__((always_inline)) void pack_as(struct packed to, bool right, bool floats,
                                                          bool columns, struct source from,
                                                          int outer, int depth) {
    const size_t bytes = floats ? sizeof(float) : sizeof(element), stride = from.ld * bytes;
    for (int row = 0; row < outer; row += TILE_ROWS) {
        char *tile = packed_part(to, row, 0).data;
        for (int column = 0; column < depth; column += PACK_DEPTH, tile += TILE_BYTES) {
            const char *first = (const char *)from.data + (columns ? column * stride + row * bytes
                                                                   : row * stride + column * bytes);
            if (outer - row >= TILE_ROWS && depth - column >= PACK_DEPTH)
                pack_tile(tile, right, first, stride, floats, columns, TILE_ROWS, PACK_DEPTH);
            else
                pack_tile(tile, right, first, stride, floats, columns, outer - row, depth - column);
        }
    }
}

static void pack(struct packed to, enum side side, struct source from, int outer, int depth) {
    switch ((side == RIGHT) * 4 + from.floats * 2 + from.columns) {
    case 0:
        pack_as(to, false, false, false, from, outer, depth);
        break;
    case 1:
        pack_as(to, false, false, true, from, outer, depth);
        break;
    case 2:
        pack_as(to, false, true, false, from, outer, depth);
        break;
    case 3:
        pack_as(to, false, true, true, from, outer, depth);
        break;
    case 4:
        pack_as(to, true, false, false, from, outer, depth);
        break;
    case 5:
        pack_as(to, true, false, true, from, outer, depth);
        break;
    case 6:
        pack_as(to, true, true, false, from, outer, depth);
        break;
    default:
        pack_as(to, true, true, true, from, outer, depth);
        break;
    }
}

/* fast_exp of vector_math.h */
static inline __m512 exp_lanes(__m512 x) {
    const __m512 round = _mm512_set1_ps(12582912.0f);
    x = _mm512_max_ps(_mm512_set1_ps(-87.3f), x); /* NaN stays */
    const __m512 n = _mm512_sub_ps(_mm512_fmadd_ps(x, _mm512_set1_ps(1.44269504f), round), round);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

/* The number (of 32 columns) of the i-th of the 16 pairs that unpacking takes from the lower halves
 * of its lanes. Pairs from the upper halves are 4 columns further. */
static inline int unpacked_column(int i) {
    return i / 4 * 8 + i % 4;
}

/* Computes a block of 32 by 32 of pack_exponentials. Adds the sums of the columns to sum[2]. */
static inline void exponential_block(char *rows_to, size_t rows_stride, char *columns_to,
                                     size_t columns_stride, const float *x, size_t ld,
                                     const __m512 offset[2], __m512 sum[2], int rows, __mmask16 low,
                                     __mmask16 high) {
    __m512i even[16], odd[16], before = _mm512_setzero_si512();
    for (int i = 0; i < PACK_DEPTH; i++) {
        __m512i both = _mm512_setzero_si512();
        if (i < rows) {
            const __m512 e = _mm512_maskz_mov_ps(
                low, exp_lanes(_mm512_sub_ps(_mm512_maskz_loadu_ps(low, x + i * ld), offset[0])));
            const __m512 f = _mm512_maskz_mov_ps(
                high,
                exp_lanes(_mm512_sub_ps(_mm512_maskz_loadu_ps(high, x + i * ld + 16), offset[1])));
            sum[0] = _mm512_add_ps(sum[0], e);
            sum[1] = _mm512_add_ps(sum[1], f);
            both = round_pairs(e, f);
        }
        _mm512_store_si512(rows_to + i / TILE_ROWS * rows_stride + i % TILE_ROWS * 64, both);
        if (i % 2) {
            even[i / 2] = _mm512_unpacklo_epi16(before, both);
            odd[i / 2] = _mm512_unpackhi_epi16(before, both);
        }
        before = both;
    }
    transpose_pairs(even);
    transpose_pairs(odd);
    for (int i = 0; i < 16; i++) {
        const int column = unpacked_column(i), next = column + 4;
        _mm512_store_si512(
            columns_to + column / TILE_ROWS * columns_stride + column % TILE_ROWS * 64, even[i]);
        _mm512_store_si512(columns_to + next / TILE_ROWS * columns_stride + next % TILE_ROWS * 64,
                           odd[i]);
    }
}

static void pack_exponentials(struct packed rows_to, struct packed columns_to, float *x, size_t ld,
                              int rows, int columns, const float *offset, float *sum) {
    for (int column = 0; column < columns; column += PACK_DEPTH) {
        const __mmask16 low = first_lanes(columns - column),
                        high = first_lanes(columns - column - 16);
        const __m512 offsets[2] = {_mm512_maskz_loadu_ps(low, offset + column),
                                   _mm512_maskz_loadu_ps(high, offset + column + 16)};
        __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int row = 0; row < rows; row += PACK_DEPTH) {
            char *right = packed_part(rows_to, row, column).data;
            char *down = packed_part(columns_to, column, row).data;
            const float *from = x + row * ld + column;
            if (rows - row >= PACK_DEPTH && columns - column >= PACK_DEPTH)
                exponential_block(right, rows_to.stride, down, columns_to.stride, from, ld, offsets,
                                  sums, PACK_DEPTH, 0xffff, 0xffff);
            else
                exponential_block(right, rows_to.stride, down, columns_to.stride, from, ld, offsets,
                                  sums, rows - row, low, high);
        }
        for (int half = 0; half < 2; half++) {
            const __mmask16 lanes = half ? high : low;
            float *to = sum + column + 16 * half;
            _mm512_mask_storeu_ps(to, lanes,
                                  _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, to), sums[half]));
        }
    }
}

/* ---- products ----------------------------------------------------------------------------- */

#ifdef __AMX_BF16__

/* Configures all eight tile registers with 16 rows of 64 bytes. */
static void product_begin(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes_per_row[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) shape = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shape.bytes_per_row[i] = 64;
        shape.rows[i] = TILE_ROWS;
    }
    _tile_loadconfig(&shape);
}

static void product_end(void) {
    _tile_release();
}

/* Computes up to two by two tiles of C from `steps` tiles of depth. */
static inline __attribute__((always_inline)) void block_as(float *c, size_t ld, bool add, int down,
                                                           int across, struct packed a,
                                                           struct packed b, int steps) {
    const size_t row = ld * sizeof(float);
    float *below = c + TILE_ROWS * ld;
    const char *a1 = a.data + a.stride, *b1 = b.data + b.stride;
    if (add) {
        _tile_loadd(0, c, row);
        if (across == 2) _tile_loadd(1, c + TILE_ROWS, row);
        if (down == 2) _tile_loadd(2, below, row);
        if (down == 2 && across == 2) _tile_loadd(3, below + TILE_ROWS, row);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (size_t at = 0; at < (size_t)steps * TILE_BYTES; at += TILE_BYTES) {
        _tile_loadd(4, a.data + at, 64);
        _tile_loadd(6, b.data + at, 64);
        if (down == 2) _tile_loadd(5, a1 + at, 64);
        if (across == 2) _tile_loadd(7, b1 + at, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (down == 2) _tile_dpbf16ps(2, 5, 6);
        if (across == 2) _tile_dpbf16ps(1, 4, 7);
        if (down == 2 && across == 2) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, row);
    if (across == 2) _tile_stored(1, c + TILE_ROWS, row);
    if (down == 2) _tile_stored(2, below, row);
    if (down == 2 && across == 2) _tile_stored(3, below + TILE_ROWS, row);
}

static inline void block(float *c, size_t ld, bool add, int down, int across, struct packed a,
                         struct packed b, int steps) {
    if (down == 2 && across == 2)
        block_as(c, ld, add, 2, 2, a, b, steps);
    else if (down == 2)
        block_as(c, ld, add, 2, 1, a, b, steps);
    else if (across == 2)
        block_as(c, ld, add, 1, 2, a, b, steps);
    else
        block_as(c, ld, add, 1, 1, a, b, steps);
}

#define PRODUCT_NAME "bf16 products by AMX"

#else

static void product_begin(void) {}
static void product_end(void) {}

/* Multiplies eight rows of a tile of A with one or two tiles of B. */
static inline __attribute__((always_inline)) void
rows_as(float *c, size_t ld, bool add, int across, const char *a, struct packed b, int steps) {
    enum { ROWS = 8 };
    __m512 sum[ROWS][2];
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < across; j++)
            sum[i][j] = add ? _mm512_loadu_ps(c + i * ld + j * 16) : _mm512_setzero_ps();
    for (int step = 0; step < steps; step++, a += TILE_BYTES, b.data += TILE_BYTES) {
        for (int pair = 0; pair < 16; pair++) {
            const __m512bh b0 = (__m512bh)_mm512_load_si512(b.data + pair * 64);
            const __m512bh b1 =
                across == 2 ? (__m512bh)_mm512_load_si512(b.data + b.stride + pair * 64) : b0;
            for (int i = 0; i < ROWS; i++) {
                int32_t both;
                memcpy(&both, a + i * 64 + pair * 4, sizeof both);
                const __m512bh left = (__m512bh)_mm512_set1_epi32(both);
                sum[i][0] = _mm512_dpbf16_ps(sum[i][0], left, b0);
                if (across == 2) sum[i][1] = _mm512_dpbf16_ps(sum[i][1], left, b1);
            }
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < across; j++) _mm512_storeu_ps(c + i * ld + j * 16, sum[i][j]);
}

static inline void block(float *c, size_t ld, bool add, int down, int across, struct packed a,
                         struct packed b, int steps) {
    for (int row = 0; row < down * TILE_ROWS; row += 8) {
        const char *rows = a.data + row / TILE_ROWS * a.stride + row % TILE_ROWS * 64;
        if (across == 2)
            rows_as(c + row * ld, ld, add, 2, rows, b, steps);
        else
            rows_as(c + row * ld, ld, add, 1, rows, b, steps);
    }
}

#define PRODUCT_NAME "bf16 products by AVX512_BF16"

#endif

/* Copies or adds a block that was computed apart to its place in C. */
static inline void block_floats(float *c, size_t ld, bool add, const float *from, int rows,
                                int columns) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++)
            c[i * ld + j] = (add ? c[i * ld + j] : 0) + from[i * BLOCK + j];
}

static inline void block_elements(element *c, size_t ld, bool add, const float *from, int rows,
                                  int columns) {
    const __mmask16 low = first_lanes(columns), high = first_lanes(columns - 16);
    const __mmask32 lanes = (__mmask32)low | (__mmask32)high << 16;
    for (int i = 0; i < rows; i++) {
        __m512 x = _mm512_load_ps(from + i * BLOCK), y = _mm512_load_ps(from + i * BLOCK + 16);
        if (add) {
            const __m512i old = _mm512_maskz_loadu_epi16(lanes, c + i * ld);
            const __m256i first = _mm512_castsi512_si256(old),
                          second = _mm512_extracti64x4_epi64(old, 1);
            x = _mm512_add_ps(x, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(first), 16));
            y = _mm512_add_ps(y, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
        }
        _mm512_mask_storeu_epi16(c + i * ld, lanes, round_pairs(x, y));
    }
}

static void product(struct target c, int M, int N, int K, struct packed a, struct packed b) {
    float apart[BLOCK * BLOCK] __attribute__((aligned(64)));
    const int all = pack_steps(K), most = c.floats ? BLOCK_STEPS : all;
    product_begin();
    for (int step = 0; step < all; step += most) {
        const int steps = min_int(most, all - step);
        const bool add = c.add || step > 0;
        for (int n = 0; n < N; n += BLOCK) {
            const int columns = min_int(BLOCK, N - n), across = ceil_div(columns, TILE_ROWS);
            const struct packed right = packed_part(b, n, step * PACK_DEPTH);
            for (int m = 0; m < M; m += BLOCK) {
                const int rows = min_int(BLOCK, M - m), down = ceil_div(rows, TILE_ROWS);
                const struct packed left = packed_part(a, m, step * PACK_DEPTH);
                const size_t at = m * c.ld + n;
                if (c.floats && rows % TILE_ROWS == 0 && columns % TILE_ROWS == 0) {
                    block(c.floats + at, c.ld, add, down, across, left, right, steps);
                    continue;
                }
                block(apart, BLOCK, false, down, across, left, right, steps);
                if (c.floats)
                    block_floats(c.floats + at, c.ld, add, apart, rows, columns);
                else
                    block_elements(c.elements + at, c.ld, c.add, apart, rows, columns);
            }
        }
    }
    product_end();
}

#endif
