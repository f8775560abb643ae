/* host_vector.h — a vector of a backend's memory where the host can read and write it, for reading
 * and writing checkpoints and for initial values. */
#ifndef LLMC_HOST_VECTOR_H
#define LLMC_HOST_VECTOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

#include "llmc/backend.h"
#include "llmc/report.h"

/* `count` float32: `vector` itself, or on a device new memory of the host's, with `filled` filled
 * from it. Give it back with host_vector_end. NULL after reporting. */
static inline float *host_vector(const struct backend *be, float *vector, size_t count,
                                 bool filled) {
    if (!be->on_device) return vector;
    float *host = (float *)malloc(count * sizeof *host);
    if (!host) report_out_of_memory("the model in the host's memory", (double)count * sizeof *host);
    if (host && filled) be->download(host, vector, count * sizeof *host);
    return host;
}

static inline void host_vector_end(const struct backend *be, float *host) {
    if (be->on_device) free(host);
}

#endif
