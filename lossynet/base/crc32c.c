/* crc32c.c — CRC32C (Castagnoli; RFC 3720, appendix B.4) of datagrams.
 *
 * Since 2008 x86-64 has an instruction for it (SSE 4.2), which takes 3 cycles for 8 bytes. That is
 * no slower than the copy that follows. Other processors use a table and go byte by byte.
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

__attribute__((target("sse4.2"))) static uint32_t crc32c_sse42(uint32_t crc, const void *data,
                                                               size_t bytes) {
    const uint8_t *p = data;
    uint64_t sum = (uint32_t)~crc;
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
