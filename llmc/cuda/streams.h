/* streams.h — the streams behind device.h. Internal to llmc/cuda and the emulated device. */
#ifndef LLMC_CUDA_STREAMS_H
#define LLMC_CUDA_STREAMS_H

#include "llmc/cuda/common.cuh"

/* Of the present device, before anything else in streams.cu is called. */
cudaError_t streams_open(void);

#endif
