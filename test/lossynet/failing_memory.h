/* failing_memory.h — allocations of lossynet that fail. Linked with --wrap=ln_memory_take. */
#ifndef TEST_FAILING_MEMORY_H
#define TEST_FAILING_MEMORY_H

#include <stddef.h>

/* The allocation after this many more fails; negative: none does. */
static int memory_fail_after = -1;

void *__real_ln_memory_take(size_t count, size_t size);
void *__wrap_ln_memory_take(size_t count, size_t size);

void *__wrap_ln_memory_take(size_t count, size_t size) {
    if (memory_fail_after >= 0 && memory_fail_after-- == 0) return NULL;
    return __real_ln_memory_take(count, size);
}

#endif
