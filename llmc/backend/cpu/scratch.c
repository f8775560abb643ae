/* scratch.c — see scratch.h. */
#include "llmc/backend/cpu/scratch.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

struct scratch {
    void *memory[SCRATCH_SLOTS];
    size_t bytes[SCRATCH_SLOTS];
};

static _Thread_local struct scratch *scratch;
static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

static void scratch_free(void *argument) {
    struct scratch *s = argument;
    for (int i = 0; i < SCRATCH_SLOTS; i++) free(s->memory[i]);
    free(s);
}

static void scratch_free_this_thread(void) {
    if (scratch) scratch_free(scratch);
    scratch = NULL;
}

/* A key's destructor runs when a thread ends, but not for the main thread at exit. */
static void scratch_start(void) {
    if (pthread_key_create(&scratch_key, scratch_free) != 0) abort();
    atexit(scratch_free_this_thread);
}

static void *out_of_memory(size_t bytes) {
    fprintf(stderr,
            "cpu backend: no memory for %zu bytes of scratch: use a smaller --batch or --seq\n",
            bytes);
    abort();
}

void *cpu_scratch(enum cpu_scratch_slot slot, size_t bytes) {
    if (!scratch) {
        pthread_once(&scratch_once, scratch_start);
        scratch = calloc(1, sizeof *scratch);
        if (!scratch) return out_of_memory(sizeof *scratch);
        pthread_setspecific(scratch_key, scratch);
    }
    if (scratch->bytes[slot] < bytes) {
        const size_t huge = (size_t)2 << 20;
        size_t alignment = bytes < huge ? 64 : huge;
        size_t rounded = (bytes + alignment - 1) / alignment * alignment;
        free(scratch->memory[slot]);
        scratch->bytes[slot] = 0;
        scratch->memory[slot] = aligned_alloc(alignment, rounded);
        if (!scratch->memory[slot]) return out_of_memory(bytes);
        scratch->bytes[slot] = rounded;
        if (alignment == huge) madvise(scratch->memory[slot], rounded, MADV_HUGEPAGE);
    }
    return scratch->memory[slot];
}
