/* snapshot.c — see snapshot.h. */
#include "llmc/checkpoint/snapshot.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "llmc/log/error.h"

enum { ALIGNMENT = 64, NAME_BYTES = ALIGNMENT };

void *snapshot_block(size_t bytes) {
    const size_t huge = (size_t)2 << 20, alignment = bytes < huge ? ALIGNMENT : huge;
    size_t whole = (bytes + alignment - 1) / alignment * alignment;
    void *block = aligned_alloc(alignment, whole ? whole : alignment);
    if (block && alignment == huge) madvise(block, whole, MADV_HUGEPAGE);
    return block;
}

void snapshot_measure(struct snapshot *s) {
    s->count = s->used = 0;
    s->measuring = true;
}

int snapshot_allocate(struct snapshot *s) {
    struct safetensors_tensor *list = realloc(s->tensor, (s->count + 1) * sizeof *list);
    if (list) s->tensor = list;
    if (s->used > s->bytes) {
        free(s->block);
        s->block = (char *)snapshot_block(s->used);
        s->bytes = s->block ? s->used : 0;
    }
    if (!list || s->used > s->bytes)
        return log_out_of_memory("the copy that a checkpoint is written from", (double)s->used);
    s->count = s->used = 0;
    s->measuring = false;
    return 0;
}

static size_t size_of(const char *dtype) {
    return !strcmp(dtype, "I64") ? 8 : !strcmp(dtype, "F32") ? 4 : 1;
}

void *snapshot_add(struct snapshot *s, const char *dtype, size_t rows, size_t columns,
                   const char *format, ...) {
    const size_t bytes = rows * (columns ? columns : 1) * size_of(dtype);
    const size_t i = s->count++, begin = s->used;
    s->used += NAME_BYTES + (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (s->measuring) return NULL;
    char *name = s->block + begin;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(name, NAME_BYTES, format, arguments);
    va_end(arguments);
    s->tensor[i] = (struct safetensors_tensor){.name = name,
                                               .dims = columns ? 2 : 1,
                                               .shape = {(int64_t)rows, (int64_t)columns},
                                               .data = name + NAME_BYTES,
                                               .dtype = dtype};
    return name + NAME_BYTES;
}

int snapshot_write(const struct snapshot *s, const char *path) {
    return safetensors_write(path, s->tensor, s->count, NULL);
}

void snapshot_release(struct snapshot *s) {
    free(s->tensor);
    free(s->block);
    memset(s, 0, sizeof *s);
}
