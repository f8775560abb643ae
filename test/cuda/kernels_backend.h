/* kernels_backend.h — the CUDA kernels behind `struct backend`, see kernels_backend.cu. */
#ifndef TEST_KERNELS_BACKEND_H
#define TEST_KERNELS_BACKEND_H

#include "llmc/backend/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* With tensors of float32, or of bfloat16. Never NULL. */
const struct backend *kernels_backend(bool half);

/* Under emulation: the order of blocks, warps and lanes from now on. */
enum kernels_order { KERNELS_FORWARD, KERNELS_REVERSE, KERNELS_RANDOM };
void kernels_order(enum kernels_order order, uint64_t seed);

#ifdef __cplusplus
}
#endif
#endif
