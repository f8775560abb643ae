/* elements.c — encodes and decodes payloads: float32 as in the vectors, bfloat16, or blocks of
 * small integers.
 *
 * bfloat16 is the upper half of a float32. So widening is exact, and only rounding loses anything:
 * it is to nearest, ties to even, and changes an element by at most 2^-9 of itself. Sign, exponent
 * and the upper seven bits remain. Infinity and NaN stay what they are. The largest elements, from
 * 0x7f7f8000 on, become infinite (IEEE 754, section 4.3.1).
 *
 * int8, int6, int4: a packet is cut into blocks of 32 elements; the last one may be shorter. An
 * element is an integer of so many bits, from -127 to 127, -31 to 31, or -7 to 7, times its block's
 * unit. The unit is the smallest power of 2 with which the block's largest element fits. (int8 is
 * MXINT8 of the Open Compute Project's "Microscaling Formats (MX) Specification" 1.0, without
 * -128.) A payload of n elements, 33, 25 or 17 bytes for 32 of them:
 *
 *     scale[ceil(n / 32)]   one byte per block: unit = 2^(scale - 125 - bits);
 *                           255: an element of the block is not finite, and the whole block is NaN
 *     q[n]                  two's complement, one after the other without gaps, the first in the
 *                           lowest bits of the first byte; element = q * unit, exactly
 *
 * Only gradients are int6 or int4; parameters are then int8. A packet has as many elements in both
 * phases.
 *
 *   - Rounding a rounded block changes nothing: its elements are multiples of its unit, and its new
 *     unit would be the same or a smaller power of 2. So it does not matter where and how often a
 *     packet is rounded. With a float32 scale the mean square error would be half as large at best,
 *     but this property would not hold.
 *   - A packet can be decoded alone, because no block reaches into the next packet.
 *   - The unit is at most 2/127, 2/31 or 2/7 of the block's largest element. Rounding to nearest
 *     changes an element by at most half a unit. Rounding at random changes it by less than a unit
 *     and is right on average: x = (k + f) unit becomes k + 1 with probability f.
 *
 * The random numbers are a function of (seed, step, sender) and of the element's place in the
 * vector. So rounding gives the same result wherever it happens: at the sender of a datagram
 * (exchange.c), in a copy within a rank (parameter.c), or in place, if the owner's sum reads the
 * vector of a worker in its own rank (gradient.c).
 *
 * An owner's own shard is never rounded: it is the master copy of the parameters, and the owner's
 * gradient for it is not sent.
 */
#include "lossynet/partition/partition.h"

#include <math.h>
#include <string.h>

/* ---- bfloat16 ---- */

static LN_INLINE void round_bf16(float *to, const float *from, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = ln_bf16_widen(ln_bf16_narrow(from[i]));
}

static LN_INLINE void pack_bf16(uint8_t *to, const float *from, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const uint16_t upper = ln_bf16_narrow(from[i]);
        memcpy(to + i * sizeof upper, &upper, sizeof upper);
    }
}

static LN_INLINE void unpack_bf16(float *to, const uint8_t *payload, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint16_t upper;
        memcpy(&upper, payload + i * sizeof upper, sizeof upper);
        to[i] = ln_bf16_widen(upper);
    }
}

/* ---- blocks ---- */

enum { BLOCK = LOSSYNET_BLOCK, NOT_FINITE = 255 };
enum { SCALE_LEAST = 7 }; /* the smallest scale whose unit is a normal number */

int ln_block_bits(lossynet_wire_dtype dtype) {
    return dtype == LOSSYNET_INT4 ? 4 : dtype == LOSSYNET_INT6 ? 6 : 8;
}

static LN_INLINE float from_exponent(int biased) {
    const uint32_t bits = (uint32_t)biased << 23;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static LN_INLINE float unit_of(uint8_t scale, int bits) {
    return scale == NOT_FINITE ? NAN : from_exponent(scale - (bits - 2));
}

/* The exponent of the largest element; or one more if this element is above 127/128, 31/32 or 7/8
 * of the next power of 2. */
static LN_INLINE uint8_t scale_of(const float x[BLOCK], int bits) {
    uint32_t most = 0;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t size;
        memcpy(&size, &x[i], sizeof size);
        size &= 0x7fffffff;
        most = size > most ? size : most;
    }
    const uint32_t scale = (most + ((1u << (25 - bits)) - 1)) >> 23;
    if (most >= 0x7f800000 || scale > NOT_FINITE) return NOT_FINITE;
    return (uint8_t)(scale < SCALE_LEAST ? SCALE_LEAST : scale);
}

/* Adds a random number from 0 to 1 to each element, in units, and rounds down. The number lies
 * halfway between two multiples of 2^-16. So its sum with an integer is exact, multiples of the
 * unit do not change, and elements are not rounded down more often than up. */
static LN_INLINE void round_at_random(float q[BLOCK], const float x[BLOCK], float inverse,
                                      uint64_t key) {
    const uint32_t lot = (uint32_t)ln_mix(key);
    for (uint32_t i = 0; i < BLOCK; i++) {
        const uint32_t random = ln_mix32(lot + i) >> 16;
        const float up = ((float)(int32_t)random + 0.5f) * 0x1p-16f;
        const float sum = x[i] * inverse + up, cut = (float)(int32_t)sum;
        q[i] = cut - (float)(sum < cut);
    }
}

static LN_INLINE void round_to_nearest(float q[BLOCK], const float x[BLOCK], float inverse) {
    const float shift = 0x1.8p23f; /* floats of this size are integers; ties go to even */
    for (int i = 0; i < BLOCK; i++) q[i] = x[i] * inverse + shift - shift;
}

/* Rounds a block of count <= BLOCK elements to integers q. Returns its scale. */
static LN_INLINE uint8_t quantise(float q[BLOCK], const float *from, size_t count, int bits,
                                  bool random, uint64_t key) {
    float padded[BLOCK];
    const float *x = from;
    if (count < BLOCK) {
        memset(padded, 0, sizeof padded);
        x = memcpy(padded, from, count * sizeof *x);
    }
    const uint8_t scale = scale_of(x, bits);
    if (scale == NOT_FINITE) {
        memset(q, 0, BLOCK * sizeof *q);
        return scale;
    }
    const float inverse = from_exponent(254 - (scale - (bits - 2)));
    if (random)
        round_at_random(q, x, inverse, key);
    else
        round_to_nearest(q, x, inverse);
    return scale;
}

static LN_INLINE size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

/* ---- vectors of bfloat16: integers of blocks need at most 7 of its 8 significant bits ---- */

/* Widens a block of count elements. Here and below, a constant count lets compilers vectorize. */
static LN_INLINE void widen(float *to, const uint16_t *from, size_t count) {
    if (count == BLOCK)
        for (int j = 0; j < BLOCK; j++) to[j] = ln_bf16_widen(from[j]);
    else
        for (size_t j = 0; j < count; j++) to[j] = ln_bf16_widen(from[j]);
}

/* Narrows a number that bfloat16 can hold exactly. */
static LN_INLINE uint16_t upper_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static LN_INLINE void narrow(uint16_t *to, const float *from, size_t count) {
    if (count == BLOCK)
        for (int j = 0; j < BLOCK; j++) to[j] = upper_half(from[j]);
    else
        for (size_t j = 0; j < count; j++) to[j] = upper_half(from[j]);
}

static LN_INLINE void multiply(float *to, const float *q, float unit, size_t count) {
    if (count == BLOCK)
        for (int j = 0; j < BLOCK; j++) to[j] = q[j] * unit;
    else
        for (size_t j = 0; j < count; j++) to[j] = q[j] * unit;
}

static LN_INLINE void round_blocks(const struct ln_rounding *r, float *to, const float *from,
                                   size_t n) {
    const int bits = ln_block_bits(r->dtype);
    for (size_t i = 0; i < n; i += BLOCK) {
        float q[BLOCK];
        const size_t count = smaller(BLOCK, n - i);
        const uint8_t scale = quantise(q, from + i, count, bits, r->random, r->key + r->offset + i);
        multiply(to + i, q, unit_of(scale, bits), count);
    }
}

static LN_INLINE size_t bytes_of(size_t count, int bits) {
    return (count * (size_t)bits + 7) / 8;
}

typedef uint64_t four __attribute__((vector_size(BLOCK))); /* eight integers in each */

/* A mask of the first `n` of each 2 n integers of eight, of so many bits, each n in 8 n bits. */
static LN_INLINE uint64_t firsts(int n, int bits) {
    const uint64_t each = n == 4 ? 1 : n == 2 ? 0x100000001 : 0x0001000100010001;
    return ((UINT64_C(1) << n * bits) - 1) * each;
}

/* Packs a block of integers of 6 or 4 bits without gaps. */
static LN_INLINE void pack_small(uint8_t *out, const int8_t q[BLOCK], int bits) {
    four x;
    memcpy(&x, q, sizeof x);
    for (int n = 1; n <= 4; n *= 2) {
        const uint64_t mask = firsts(n, bits);
        x = (x & mask) | (x & mask << 8 * n) >> n * (8 - bits);
    }
    const uint64_t of_4[2] = {x[0] | x[1] << 32, x[2] | x[3] << 32};
    const uint64_t of_6[3] = {x[0] | x[1] << 48, x[1] >> 16 | x[2] << 32, x[2] >> 32 | x[3] << 16};
    if (bits == 4)
        memcpy(out, of_4, sizeof of_4);
    else
        memcpy(out, of_6, sizeof of_6);
}

/* Packs float32 elements `from`, or if from is NULL the elements `bf16`. bits: a constant, so that
 * compilers compute the masks. */
static LN_INLINE void pack_of(int bits, const struct ln_rounding *r, uint8_t *to, const float *from,
                              const uint16_t *bf16, size_t n) {
    uint8_t *scale = to, *out = to + (n + BLOCK - 1) / BLOCK;
    for (size_t i = 0; i < n; i += BLOCK, out += BLOCK / 8 * bits) {
        float wide[BLOCK], whole[BLOCK];
        int8_t q[BLOCK];
        const size_t count = smaller(BLOCK, n - i);
        if (!from) widen(wide, bf16 + i, count);
        *scale++ =
            quantise(whole, from ? from + i : wide, count, bits, r->random, r->key + r->offset + i);
        for (int j = 0; j < BLOCK; j++) q[j] = (int8_t)(int32_t)whole[j];
        uint8_t last[BLOCK], *block = count < BLOCK ? last : out;
        if (bits == 8)
            memcpy(block, q, BLOCK);
        else
            pack_small(block, q, bits);
        if (count < BLOCK) memcpy(out, last, bytes_of(count, bits));
    }
}

static LN_INLINE void pack_blocks(const struct ln_rounding *r, uint8_t *to, const float *from,
                                  const uint16_t *bf16, size_t n) {
    if (r->dtype == LOSSYNET_INT8) pack_of(8, r, to, from, bf16, n);
    if (r->dtype == LOSSYNET_INT6) pack_of(6, r, to, from, bf16, n);
    if (r->dtype == LOSSYNET_INT4) pack_of(4, r, to, from, bf16, n);
}

static LN_INLINE void unpack_small(int8_t q[BLOCK], const uint8_t *in, int bits) {
    uint64_t p[3] = {0};
    memcpy(p, in, (size_t)(BLOCK / 8 * bits));
    four x = {p[0], p[0] >> 32, p[1], p[1] >> 32};
    if (bits == 6) x = (four){p[0], p[0] >> 48 | p[1] << 16, p[1] >> 32 | p[2] << 32, p[2] >> 16};
    for (int n = 4; n >= 1; n /= 2) {
        const uint64_t mask = firsts(n, bits);
        x = (x & mask) | (x & mask << n * bits) << n * (8 - bits);
    }
    memcpy(q, &x, sizeof x);
    const int sign = 1 << (bits - 1);
    for (int j = 0; j < BLOCK; j++) q[j] = (int8_t)((q[j] ^ sign) - sign);
}

/* Unpacks a block of count elements. */
static LN_INLINE void unpack_block(int bits, float *to, const uint8_t *in, float unit,
                                   size_t count) {
    int8_t q[BLOCK];
    float whole[BLOCK];
    uint8_t last[BLOCK] = {0};
    if (count < BLOCK) in = memcpy(last, in, bytes_of(count, bits));
    if (bits < 8) unpack_small(q, in, bits);
    for (int j = 0; j < BLOCK; j++) whole[j] = bits < 8 ? q[j] : (int8_t)in[j];
    multiply(to, whole, unit, count);
}

/* bits: a constant. Elements go to `to`, or if to is NULL to `bf16`. */
static LN_INLINE void unpack_of(int bits, float *to, uint16_t *bf16, const uint8_t *payload,
                                size_t n) {
    const uint8_t *scale = payload, *in = payload + (n + BLOCK - 1) / BLOCK;
    for (size_t i = 0; i < n; i += BLOCK, in += BLOCK / 8 * bits) {
        float wide[BLOCK], *out = to ? to + i : wide, unit = unit_of(*scale++, bits);
        const size_t count = smaller(BLOCK, n - i);
        if (count == BLOCK)
            unpack_block(bits, out, in, unit, BLOCK);
        else
            unpack_block(bits, out, in, unit, count);
        if (!to) narrow(bf16 + i, wide, count);
    }
}

static LN_INLINE void unpack_blocks(lossynet_wire_dtype dtype, float *to, uint16_t *bf16,
                                    const uint8_t *payload, size_t n) {
    if (dtype == LOSSYNET_INT8) unpack_of(8, to, bf16, payload, n);
    if (dtype == LOSSYNET_INT6) unpack_of(6, to, bf16, payload, n);
    if (dtype == LOSSYNET_INT4) unpack_of(4, to, bf16, payload, n);
}

uint8_t ln_block_scale(lossynet_wire_dtype dtype, const float *block, size_t count) {
    float x[BLOCK] = {0};
    memcpy(x, block, count * sizeof *x);
    return scale_of(x, ln_block_bits(dtype));
}

float ln_block_round(lossynet_wire_dtype dtype, float x, uint8_t scale) {
    const int bits = ln_block_bits(dtype);
    float block[BLOCK] = {x}, q[BLOCK] = {0};
    if (scale != NOT_FINITE) round_to_nearest(q, block, from_exponent(254 - (scale - (bits - 2))));
    return q[0] * unit_of(scale, bits);
}

/* ---- all formats ---- */

size_t ln_payload_bytes(lossynet_wire_dtype dtype, size_t n) {
    if (dtype == LOSSYNET_FLOAT32) return n * sizeof(float);
    if (dtype == LOSSYNET_BF16) return n * sizeof(uint16_t);
    return (n + BLOCK - 1) / BLOCK + bytes_of(n, ln_block_bits(dtype));
}

size_t ln_payload_elements(lossynet_wire_dtype dtype, size_t bytes) {
    if (dtype < LOSSYNET_INT8) return bytes / ln_payload_bytes(dtype, 1);
    return bytes / ln_payload_bytes(dtype, BLOCK) * BLOCK;
}

size_t ln_payload_default(lossynet_wire_dtype dtype, size_t room) {
    enum { VECTOR = 8 };
    if (dtype >= LOSSYNET_INT8) return room; /* whole blocks in any case */
    const size_t whole = ln_payload_bytes(dtype, VECTOR);
    return room < whole ? room : room / whole * whole;
}

LN_VECTORIZED
void ln_elements_pack(const struct ln_rounding *r, uint8_t *to, const float *from, size_t n) {
    if (r->dtype == LOSSYNET_FLOAT32)
        memcpy(to, from, n * sizeof *from);
    else if (r->dtype == LOSSYNET_BF16)
        pack_bf16(to, from, n);
    else
        pack_blocks(r, to, from, NULL, n);
}

LN_VECTORIZED
void ln_elements_pack_bf16(const struct ln_rounding *r, uint8_t *to, const uint16_t *from,
                           size_t n) {
    if (r->dtype == LOSSYNET_BF16)
        memcpy(to, from, n * sizeof *from);
    else
        pack_blocks(r, to, NULL, from, n);
}

LN_VECTORIZED
void ln_elements_unpack(lossynet_wire_dtype dtype, float *to, const uint8_t *payload, size_t n) {
    if (dtype == LOSSYNET_FLOAT32)
        memcpy(to, payload, n * sizeof *to);
    else if (dtype == LOSSYNET_BF16)
        unpack_bf16(to, payload, n);
    else
        unpack_blocks(dtype, to, NULL, payload, n);
}

LN_VECTORIZED
void ln_elements_unpack_bf16(lossynet_wire_dtype dtype, uint16_t *to, const uint8_t *payload,
                             size_t n) {
    if (dtype == LOSSYNET_BF16)
        memcpy(to, payload, n * sizeof *to);
    else
        unpack_blocks(dtype, NULL, to, payload, n);
}

LN_VECTORIZED
void ln_elements_copy(const struct ln_rounding *r, float *to, const float *from, size_t n) {
    if (r->dtype == LOSSYNET_BF16)
        round_bf16(to, from, n);
    else if (r->dtype != LOSSYNET_FLOAT32)
        round_blocks(r, to, from, n);
    else if (to != from)
        memcpy(to, from, n * sizeof *to);
}

LN_VECTORIZED
void ln_elements_narrow(const struct ln_rounding *r, uint16_t *to, const float *from, size_t n) {
    enum { PIECE = 32 * BLOCK };
    float rounded[PIECE];
    struct ln_rounding of_piece = *r;
    for (size_t i = 0; i < n; i += PIECE, of_piece.offset += PIECE) {
        const size_t count = smaller(PIECE, n - i);
        ln_elements_copy(&of_piece, rounded, from + i, count);
        narrow(to + i, rounded, count);
    }
}

LN_VECTORIZED
void ln_elements_round_bf16(const struct ln_rounding *r, uint16_t *x, size_t n) {
    enum { PIECE = 32 * BLOCK };
    float wide[PIECE];
    struct ln_rounding of_piece = *r;
    for (size_t i = 0; i < n; i += PIECE, of_piece.offset += PIECE) {
        const size_t count = smaller(PIECE, n - i);
        widen(wide, x + i, count);
        ln_elements_narrow(&of_piece, x + i, wide, count);
    }
}

enum { TOO_LARGE = (127 + 64) << 23 }; /* the exponent of 2^64 */

LN_VECTORIZED
bool ln_elements_are_finite(lossynet_wire_dtype dtype, const uint8_t *payload, size_t n) {
    uint32_t wrong = 0;
    if (dtype == LOSSYNET_FLOAT32) {
        for (size_t i = 0; i < n; i++) {
            uint32_t bits;
            memcpy(&bits, payload + i * sizeof bits, sizeof bits);
            wrong |= (bits & 0x7f800000) >= TOO_LARGE;
        }
    } else if (dtype == LOSSYNET_BF16) {
        for (size_t i = 0; i < n; i++) {
            uint16_t upper;
            memcpy(&upper, payload + i * sizeof upper, sizeof upper);
            wrong |= (upper & 0x7f80) >= TOO_LARGE >> 16;
        }
    } else { /* a block's elements are at most 2^(bits - 1) units: less than 2^(scale - 125) */
        for (size_t i = 0; i < (n + BLOCK - 1) / BLOCK; i++)
            wrong |= payload[i] < SCALE_LEAST || payload[i] > 64 + 125;
    }
    return !wrong;
}
