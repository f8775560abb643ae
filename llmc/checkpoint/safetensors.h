/* safetensors.h — reads and writes safetensors files.
 *
 *     8 bytes   length of the header, little-endian
 *     header    JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
 *     data      the tensors, little-endian, row-major; offsets count from here
 *
 * Format: https://huggingface.co/docs/safetensors. Files may come from untrusted sources, so
 * opening a file checks everything: the header's length against the file's, that offsets are in
 * range and cover the data without overlap or gap, and each tensor's bytes against its shape and
 * dtype. A file that opens without error can be read without further checks.
 */
#ifndef LLMC_CHECKPOINT_SAFETENSORS_H
#define LLMC_CHECKPOINT_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SAFETENSORS_DIMS = 8,                /* largest number of dimensions that we accept */
    SAFETENSORS_HEADER_BYTES = 100000000 /* longest header, as in the reference implementation */
};

struct safetensors; /* an open file */

/* One tensor of an open file; valid until safetensors_close. */
struct safetensors_view {
    const char *name;
    const char *dtype; /* as the file has it: "F32", "BF16", "F16", "I32", ... */
    int dims;
    int64_t shape[SAFETENSORS_DIMS];
    size_t elements; /* product of shape; 1 for a scalar */
    size_t bytes;
    const void *data; /* in the mapped file; not necessarily aligned */
};

/* Opens, maps and checks a file. *file belongs to the caller, who closes it. Returns 0, or -1 after
 * reporting; *file is then NULL. Any number of threads may read an open file. */
int safetensors_open(const char *path, struct safetensors **file);

/* Frees and unmaps. NULL is fine. */
void safetensors_close(struct safetensors *file);

/* The tensors, in the order of their data. */
size_t safetensors_count(const struct safetensors *file);
const struct safetensors_view *safetensors_at(const struct safetensors *file, size_t i);

/* The tensor of that name, or NULL, which is not reported, since absence may be fine. */
const struct safetensors_view *safetensors_find(const struct safetensors *file, const char *name);

/* Copies the tensor of that name to out, float32, row-major, with all threads of OpenMP. It must be
 * there with exactly this shape and hold finite numbers, F32, BF16 or F16 (converted exactly). Returns 0, or -1
 * after reporting. */
int safetensors_copy_float(const struct safetensors *file, const char *name, const int64_t *shape,
                           int dims, float *out);

/* Whether somebody has cut the file off while it was open, which is reported (file.h): what was read through
 * views may be zeros. */
bool safetensors_is_lost(const struct safetensors *file);

/* A tensor to write; the caller owns all memory. */
struct safetensors_tensor {
    const char *name; /* UTF-8, unique in the file */
    int dims;
    int64_t shape[SAFETENSORS_DIMS];
    const void *data;
    const char *dtype; /* NULL: "F32"; or another that the reader above knows */
};

/* Writes a file of tensors and syncs it to disk. format: "pt" for transformers, which requires it in the
 * metadata; or NULL: no metadata. The data goes from the caller's memory to the file without a copy. On an
 * error the file may be left incomplete: write under a temporary name and rename, as
 * hf_model_commit does. Returns 0, or -1 after reporting. */
int safetensors_write(const char *path, const struct safetensors_tensor *tensors, size_t count,
                      const char *format);

#endif
