/* checksum.c — see checksum.h. */
#include "llmc/checkpoint/checksum.h"

#include <stdio.h>
#include <xxhash.h>

#include "llmc/util/file.h"

void checksum_bytes(const void *data, size_t bytes, char text[CHECKSUM_TEXT_BYTES]) {
    XXH128_hash_t hash = XXH3_128bits(data, bytes);
    snprintf(text, CHECKSUM_TEXT_BYTES, "%016llx%016llx", (unsigned long long)hash.high64,
             (unsigned long long)hash.low64);
}

int checksum_file(const char *path, char text[CHECKSUM_TEXT_BYTES], uint64_t *bytes) {
    struct file_map map;
    if (file_map(path, &map)) return -1;
    checksum_bytes(map.data ? map.data : "", map.bytes, text);
    if (bytes) *bytes = map.bytes;
    return file_unmap(&map);
}
