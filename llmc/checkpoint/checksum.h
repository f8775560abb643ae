/* checksum.h — XXH3 with 128 bits (xxhash.com), to find damaged files. It detects accidents, but no
 * forgeries. `xxhsum -H2 FILE` prints the same digits. */
#ifndef LLMC_CHECKPOINT_CHECKSUM_H
#define LLMC_CHECKPOINT_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

enum { CHECKSUM_TEXT_BYTES = 33 }; /* 32 hexadecimal digits and a zero byte */

void checksum_bytes(const void *data, size_t bytes, char text[CHECKSUM_TEXT_BYTES]);

/* Computes the checksum of a whole file, and its size unless `bytes` is NULL. Returns 0, or -1 after reporting. */
int checksum_file(const char *path, char text[CHECKSUM_TEXT_BYTES], uint64_t *bytes);

#endif
