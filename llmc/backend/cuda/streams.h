/* streams.h — the streams behind device.h. Internal to llmc/backend/cuda and the emulated
 * device. */
#ifndef LLMC_BACKEND_CUDA_STREAMS_H
#define LLMC_BACKEND_CUDA_STREAMS_H

#include "llmc/backend/cuda/common.cuh"

/* Of the present device, before anything else in streams.cu is called. */
cudaError_t streams_open(void);

#endif
