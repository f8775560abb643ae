/* host_vector.h — gives the host access to a vector that lies in a backend's memory. Checkpoints
 * and initial values need it. */
#ifndef LLMC_BACKEND_HOST_VECTOR_H
#define LLMC_BACKEND_HOST_VECTOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

#include "llmc/backend/backend.h"
#include "llmc/log/error.h"

/* Returns `count` float32 that the host can read and write: `vector` itself if the backend is
 * the CPU, otherwise new host memory, which is a copy of `vector` if `filled` is true. The
 * caller releases it with host_vector_end. Returns NULL after reporting. */
static inline float *host_vector(const struct backend *be, float *vector, size_t count,
                                 bool filled) {
    if (!be->on_device) return vector;
    float *host = (float *)malloc(count * sizeof *host);
    if (!host) log_out_of_memory("the model in the host's memory", (double)count * sizeof *host);
    if (host && filled) be->download(host, vector, count * sizeof *host);
    return host;
}

static inline void host_vector_end(const struct backend *be, float *host) {
    if (be->on_device) free(host);
}

#endif
