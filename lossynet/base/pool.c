/* pool.c — counts memory and allocates it by memory.c, which tests replace to make it fail. */
#include "lossynet/base/base.h"

#include <stdlib.h>

struct ln_taken {
    void *memory;
    void (*release)(void *memory);
};

/* Notes what ln_pool_close frees. Returns whether there is memory for it. */
static bool note(struct ln_pool *pool, void *memory, void (*release)(void *)) {
    if (pool->count == pool->room) {
        const size_t room = pool->room ? 2 * pool->room : 64;
        struct ln_taken *more = realloc(pool->taken, room * sizeof *more);
        if (!more) return false;
        pool->taken = more;
        pool->room = room;
    }
    pool->taken[pool->count++] = (struct ln_taken){memory, release};
    return true;
}

void *ln_pool_take_from(struct ln_pool *pool, size_t count, size_t size, void *(*allocate)(size_t),
                        void (*release)(void *)) {
    pool->bytes += count * size;
    if (pool->measuring || pool->out_of_memory) return NULL;
    void *memory = allocate ? allocate(count * size) : ln_memory_take(count, size);
    if (memory && note(pool, memory, release ? release : free)) return memory;
    if (memory) (release ? release : free)(memory);
    pool->out_of_memory = true;
    ln_log("rank %d: no memory for %zu x %zu bytes, after %zu MB", pool->rank, count, size,
           (pool->bytes - count * size) >> 20);
    return NULL;
}

void *ln_pool_take(struct ln_pool *pool, size_t count, size_t size) {
    return ln_pool_take_from(pool, count, size, NULL, NULL);
}

void ln_pool_close(struct ln_pool *pool) {
    while (pool->count) {
        const struct ln_taken *last = &pool->taken[--pool->count];
        last->release(last->memory);
    }
    free(pool->taken);
    *pool = (struct ln_pool){0};
}
