/* snapshot.h — copies tensors into one block of memory, which is written while training goes on.
 *
 * The same code describes them twice: first to measure, then to copy.
 *
 *     snapshot_measure(&s);
 *     describe(&s);                    snapshot_add returns NULL: nothing to fill yet
 *     if (snapshot_allocate(&s)) ...
 *     describe(&s);                    snapshot_add returns where the tensor's data goes
 *
 * The block is kept for the next time.
 */
#ifndef LLMC_CHECKPOINT_SNAPSHOT_H
#define LLMC_CHECKPOINT_SNAPSHOT_H

#include <stdbool.h>
#include <stddef.h>

#include "llmc/checkpoint/safetensors.h"

struct snapshot {                      /* starts as zeros */
    struct safetensors_tensor *tensor; /* [count]; their names are in the block, too */
    size_t count;
    char *block;
    size_t used, bytes;
    bool measuring;
};

/* Allocates such a block, in large pages if the system has them, because the first copy touches
 * all of it. Release it with free(). Returns NULL if out of memory. */
void *snapshot_block(size_t bytes);

void snapshot_measure(struct snapshot *s);
int snapshot_allocate(struct snapshot *s); /* 0, or -1 after reporting */

/* Adds a tensor of safetensors' dtype F32, I64 or U8. Vectors have 0 columns. Returns where its
 * data goes, aligned to 64 bytes, or NULL while measuring. */
void *snapshot_add(struct snapshot *s, const char *dtype, size_t rows, size_t columns,
                   const char *format, ...) __attribute__((format(printf, 5, 6)));

/* Writes all tensors as a safetensors file, and syncs it. Returns 0, or -1 after reporting. */
int snapshot_write(const struct snapshot *s, const char *path);

void snapshot_release(struct snapshot *s);

#endif
