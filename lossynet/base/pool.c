/* pool.c — counts memory and allocates it by memory.c, which tests replace to make it fail. */
#include "lossynet/base/base.h"

void *ln_pool_take_from(struct ln_pool *pool, size_t count, size_t size,
                        void *(*allocate)(size_t)) {
    pool->bytes += count * size;
    if (pool->measuring || pool->out_of_memory) return NULL;
    void *memory = allocate ? allocate(count * size) : ln_memory_take(count, size);
    if (!memory) {
        pool->out_of_memory = true;
        ln_log("rank %d: no memory for %zu x %zu bytes, after %zu MB", pool->rank, count, size,
               (pool->bytes - count * size) >> 20);
    }
    return memory;
}

void *ln_pool_take(struct ln_pool *pool, size_t count, size_t size) {
    return ln_pool_take_from(pool, count, size, NULL);
}
