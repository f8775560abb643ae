/* product.h — opens cuBLASLt for device_product (device.h). Internal to llmc/backend/cuda. */
#ifndef LLMC_BACKEND_CUDA_PRODUCT_H
#define LLMC_BACKEND_CUDA_PRODUCT_H

#include <stdbool.h>
#include <stddef.h>

bool product_open(char *why, size_t why_size); /* current device; false: `why` has the reason */
void product_library(char *text, size_t size); /* "cuBLASLt 13.0.2" */

#endif
