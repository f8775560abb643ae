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
