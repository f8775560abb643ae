/* product.h — cuBLASLt behind device_product (device.h). Internal to llmc/backend/cuda. */
#ifndef LLMC_BACKEND_CUDA_PRODUCT_H
#define LLMC_BACKEND_CUDA_PRODUCT_H

#include <stdbool.h>
#include <stddef.h>

bool product_open(char *why, size_t why_size); /* on the present device; false: why, in one line */
void product_library(char *text, size_t size); /* "cuBLASLt 13.0.2" */

#endif
