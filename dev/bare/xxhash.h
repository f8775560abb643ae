/* xxhash.h — for `make BARE=1` on a machine without xxHash: no checkpoint is written or read there,
 * so nothing has a checksum. */
#ifndef BARE_XXHASH_H
#define BARE_XXHASH_H

#include <stddef.h>

typedef struct {
    unsigned long long low64, high64;
} XXH128_hash_t;

static inline XXH128_hash_t XXH3_128bits(const void *data, size_t bytes) {
    const XXH128_hash_t none = {0, 0};
    return (void)data, (void)bytes, none;
}

#endif
