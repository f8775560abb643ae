/* backend_cuda.h — how a program finds an NVIDIA GPU and gets the backend for it.
 *
 * A program built without CUDA (backend_none.c) never finds a device. In test programs the
 * emulated device of dev/emulation implements the same functions.
 */
#ifndef LLMC_BACKEND_CUDA_BACKEND_CUDA_H
#define LLMC_BACKEND_CUDA_BACKEND_CUDA_H

#include <stddef.h>

#include "llmc/backend/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

extern const bool backend_cuda_built; /* false: this program never finds a device */

/* dtype is the type of weights in use and activations.
 * Returns the backend on the host's GPU number `local_rank`, modulo the number of GPUs. The
 * first call opens it. Returns NULL if there is no usable device. `why` then says what is
 * missing, in one line without a newline: driver, device, an architecture of sm_80 or newer, or
 * memory. */
const struct backend *backend_cuda(enum dtype dtype, int local_rank, char *why, size_t why_size);

/* The largest head size that attention takes. */
enum { BACKEND_CUDA_MOST_HEAD = 256 };

/* The bytes of two buffers between a copy and the rounding before or after it (h2d_convert_async,
 * d2h_round_async). On the emulated device they are so few that small models need several parts. */
#ifdef CUDA_EMULATION
enum { BACKEND_CUDA_PART_BYTES = 1 << 16 };
#else
enum { BACKEND_CUDA_PART_BYTES = 64 << 20 };
#endif

/* Elements from one row of the classifier's logits to the next. */
static inline size_t backend_cuda_logits_row(int V) {
    return ((size_t)V + 7) / 8 * 8;
}

/* How many of N tokens have their logits in memory at once: as many as fit into 256 MiB. */
static inline int backend_cuda_logits_rows(int N, int V, size_t element_bytes) {
    size_t rows = ((size_t)256 << 20) / (backend_cuda_logits_row(V) * element_bytes);
    if (rows >= 128) rows = rows / 128 * 128;
    if (rows == 0) rows = 1;
    return rows < (size_t)N ? (int)rows : N;
}

/* Elements that an array of Muon's working memory has room for, and the bytes of these arrays for a
 * matrix (muon.cuh). */
static inline size_t backend_cuda_muon_room(size_t elements) {
    return (elements + 127) / 128 * 128;
}

static inline size_t backend_cuda_muon_bytes(int rows, int cols, size_t element_bytes) {
    const size_t S = (size_t)(rows < cols ? rows : cols);
    const size_t n = backend_cuda_muon_room((size_t)rows * (size_t)cols);
    const size_t square = backend_cuda_muon_room(S * S);
    return sizeof(float) * (n + square) + element_bytes * (n + 2 * square);
}

#ifdef __cplusplus
}
#endif
#endif
