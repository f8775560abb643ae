/* streams.h — opens the streams of device.h. Internal to llmc/backend/cuda and the emulated
 * device. */
#ifndef LLMC_BACKEND_CUDA_STREAMS_H
#define LLMC_BACKEND_CUDA_STREAMS_H

#include "llmc/backend/cuda/common.cuh"

/* Opens the streams of the current device. Call it before anything else in streams.cu. */
cudaError_t streams_open(void);

#endif
