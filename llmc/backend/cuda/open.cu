/* open.cu — backend_cuda.h: opens one device, and returns the backend for a working type on it. */
#include "llmc/backend/cuda/backend_cuda.h"
#include "llmc/backend/cuda/device.h"

#include <stdio.h>

extern const struct backend *backend_cuda_float32(bool fp8); /* backend_cuda.cu, compiled twice */
extern const struct backend *backend_cuda_bf16(bool fp8);

const bool backend_cuda_built = true;

const struct backend *backend_cuda(enum dtype dtype, int local_rank, char *why, size_t why_size) {
    device_scope scope;
    if (!device_open(local_rank, why, why_size)) return NULL;
    const bool fp8 = dtype == DTYPE_E4M3;
    if (fp8 && !device_multiplies_fp8()) {
        snprintf(why, why_size, "--dtype fp8: %s is older than sm_89, which it needs",
                 device_name());
        return NULL;
    }
    return dtype == DTYPE_FLOAT32 ? backend_cuda_float32(false) : backend_cuda_bf16(fp8);
}
