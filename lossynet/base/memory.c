/* memory.c — allocates the host memory of the library. */
#include "lossynet/base/base.h"

#include <stdlib.h>

enum { ALIGNMENT = 64 };

void *ln_memory_take(size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > SIZE_MAX / 2) return NULL;
    bytes = (bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT;
    void *memory = aligned_alloc(ALIGNMENT, bytes);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

void *ln_memory_grow(void *old, size_t count, size_t *room, size_t size) {
    if (count < *room) return old;
    const size_t larger = *room ? 2 * *room : 1024;
    void *memory = ln_memory_take(larger, size);
    if (!memory) return NULL;
    if (old) memcpy(memory, old, count * size);
    free(old);
    *room = larger;
    return memory;
}
