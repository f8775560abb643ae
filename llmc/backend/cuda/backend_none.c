/* backend_none.c — backend_cuda.h in a program built without CUDA. */
#include "llmc/backend/cuda/backend_cuda.h"

#include <stdio.h>

const bool backend_cuda_built = false;

const struct backend *backend_cuda(enum dtype dtype, int local_rank, char *why, size_t why_size) {
    (void)dtype;
    (void)local_rank;
    snprintf(why, why_size, "this program was built without CUDA (no nvcc was found)");
    return NULL;
}
