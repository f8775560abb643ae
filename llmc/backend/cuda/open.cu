/* open.cu — backend_cuda.h: opens one device, and returns the backend for a working type on it. */
#include "llmc/backend/cuda/backend_cuda.h"
#include "llmc/backend/cuda/device.h"

extern const struct backend *backend_cuda_float32(void); /* backend_cuda.cu, compiled twice */
extern const struct backend *backend_cuda_bf16(void);

const bool backend_cuda_built = true;

const struct backend *backend_cuda(enum dtype dtype, int local_rank, char *why, size_t why_size) {
    device_scope scope;
    if (!device_open(local_rank, why, why_size)) return NULL;
    return dtype == DTYPE_FLOAT32 ? backend_cuda_float32() : backend_cuda_bf16();
}
