/* streams.h — opens the streams of device.h. Internal to llmc/backend/cuda and the emulated
 * device. */
#ifndef LLMC_BACKEND_CUDA_STREAMS_H
#define LLMC_BACKEND_CUDA_STREAMS_H

#include "llmc/backend/cuda/common.cuh"

/* Opens the streams of the current device. Call it before anything else in streams.cu. */
cudaError_t streams_open(void);

/* Clears new memory, and returns when it is clear: no stream that uses it waits for this. */
void streams_clear(void *memory, size_t bytes);

/* With CUDA_LAUNCHED=FILE in the environment, FILE.<process> holds the name of what was launched
 * last: a kernel's in the compiler's form, or a product. Who ends a process that hangs then learns
 * where, if CUDA_LAUNCH_BLOCKING=1 makes the host wait for each kernel. */
void streams_note(const char *name);

#endif
