/* crc32c.c — CRC32C (Castagnoli; RFC 3720, appendix B.4) of datagrams.
 *
 * Since 2008 x86-64 has an instruction for it (SSE 4.2). It takes 8 bytes, and its result is there
 * after 3 cycles, but one can start in each cycle. So three lanes are summed side by side, and joined
 * with a product without carries (PCLMUL). Other processors use a table and go byte by byte.
 */
#include "lossynet/base/base.h"

#include <string.h>

static uint32_t table[256];

__attribute__((constructor)) static void fill_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
        table[i] = crc;
    }
}

uint32_t ln_crc32c_plain(uint32_t crc, const void *data, size_t bytes) {
    const uint8_t *p = data;
    crc = ~crc;
    for (size_t i = 0; i < bytes; i++) crc = crc >> 8 ^ table[(crc ^ p[i]) & 255];
    return ~crc;
}

#ifdef __x86_64__
#include <nmmintrin.h>
#include <wmmintrin.h>

enum { LANE = 256 }; /* bytes of one of three lanes */

/* What moves a sum over one lane, and over two: x^(8 LANE - 33) and x^(16 LANE - 33) in Castagnoli's field,
 * the highest bit being the lowest power. */
static const uint32_t power[2] = {0xb9e02b86, 0xdd7e3b0c};

/* The sum followed by as many zeros as `by` stands for. The product of two polynomials has 63
 * coefficients; the instruction reduces it, and multiplies it by x^33. */
__attribute__((target("sse4.2,pclmul"))) static uint64_t move(uint64_t sum, uint32_t by) {
    const __m128i product =
        _mm_clmulepi64_si128(_mm_cvtsi64_si128((int64_t)sum), _mm_cvtsi32_si128((int32_t)by), 0);
    return _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

__attribute__((target("sse4.2,pclmul"))) static uint64_t add_lanes(uint64_t sum, const uint8_t *p) {
    uint64_t second = 0, third = 0;
    for (int i = 0; i < LANE; i += 8) {
        uint64_t word[3];
        for (int lane = 0; lane < 3; lane++) memcpy(&word[lane], p + lane * LANE + i, sizeof *word);
        sum = _mm_crc32_u64(sum, word[0]);
        second = _mm_crc32_u64(second, word[1]);
        third = _mm_crc32_u64(third, word[2]);
    }
    return move(sum, power[1]) ^ move(second, power[0]) ^ third;
}

__attribute__((target("sse4.2"))) static uint32_t crc32c_sse42(uint32_t crc, const void *data,
                                                               size_t bytes) {
    const uint8_t *p = data;
    uint64_t sum = (uint32_t)~crc;
    if (__builtin_cpu_supports("pclmul"))
        for (; bytes >= 3 * LANE; bytes -= 3 * LANE, p += 3 * LANE) sum = add_lanes(sum, p);
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, sizeof word);
        sum = _mm_crc32_u64(sum, word);
    }
    for (; bytes > 0; bytes--, p++) sum = _mm_crc32_u8((uint32_t)sum, *p);
    return ~(uint32_t)sum;
}

uint32_t ln_crc32c(uint32_t crc, const void *data, size_t bytes) {
    return __builtin_cpu_supports("sse4.2") ? crc32c_sse42(crc, data, bytes)
                                            : ln_crc32c_plain(crc, data, bytes);
}
#else
uint32_t ln_crc32c(uint32_t crc, const void *data, size_t bytes) {
    return ln_crc32c_plain(crc, data, bytes);
}
#endif
