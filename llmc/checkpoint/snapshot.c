/* snapshot.c — see snapshot.h. */
#include "llmc/checkpoint/snapshot.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "llmc/log/error.h"
#include "llmc/checkpoint/safetensors.h"

enum { ALIGNMENT = 64 };

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
    s->failed = false;
}

int snapshot_allocate(struct snapshot *s) {
    if (!s->failed && s->used > s->bytes) {
        free(s->block);
        s->block = (char *)snapshot_block(s->used);
        s->bytes = s->block ? s->used : 0;
        s->failed = !s->block;
    }
    if (s->failed)
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
    if (s->count == s->room) {
        size_t room = s->room ? 2 * s->room : 64;
        struct snapshot_tensor *more = realloc(s->tensor, room * sizeof *more);
        if (!more) {
            s->failed = true;
            return NULL;
        }
        s->tensor = more;
        s->room = room;
    }
    struct snapshot_tensor *t = &s->tensor[s->count++];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(t->name, sizeof t->name, format, arguments);
    va_end(arguments);
    t->dtype = dtype;
    t->dims = columns ? 2 : 1;
    t->shape[0] = (int64_t)rows;
    t->shape[1] = (int64_t)columns;
    t->offset = s->used;
    size_t bytes = rows * (columns ? columns : 1) * size_of(dtype);
    s->used += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return s->measuring ? NULL : s->block + t->offset;
}

int snapshot_write(const struct snapshot *s, const char *path) {
    struct safetensors_tensor *list = calloc(s->count + 1, sizeof *list);
    if (!list) return log_error("cannot write '%s': out of memory", path);
    for (size_t i = 0; i < s->count; i++) {
        const struct snapshot_tensor *t = &s->tensor[i];
        list[i].name = t->name;
        list[i].dtype = t->dtype;
        list[i].dims = t->dims;
        list[i].shape[0] = t->shape[0];
        list[i].shape[1] = t->shape[1];
        list[i].data = s->block + t->offset;
    }
    int status = safetensors_write(path, list, s->count, NULL);
    free(list);
    return status;
}

void snapshot_release(struct snapshot *s) {
    free(s->tensor);
    free(s->block);
    memset(s, 0, sizeof *s);
}
