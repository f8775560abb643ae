/* host_emu.h — the part of the CUDA runtime API that the backend calls, on the host's own memory.
 *
 * There is one device, its memory is the host's, and everything has happened when a call returns:
 * streams and events are only names. Device memory is filled with NaN when it is allocated, so that
 * nobody relies on zeros. Included by cuda_emu.h.
 */
#ifndef CUDA_EMU_HOST_H
#define CUDA_EMU_HOST_H

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorNotReady = 600
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaHostAllocDefault = 0 };
typedef struct cuda_emu_event *cudaEvent_t;

static inline const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorInvalidValue:
        return "invalid argument";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    default:
        return "not ready";
    }
}
static inline cudaError_t cudaGetLastError(void) {
    return cudaSuccess;
}
static inline cudaError_t cudaPeekAtLastError(void) {
    return cudaSuccess;
}
static inline cudaError_t cudaDeviceSynchronize(void) {
    return cudaSuccess;
}
static inline cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return cudaSuccess;
}
static inline cudaError_t cudaSetDevice(int device) {
    return device == 0 ? cudaSuccess : cudaErrorInvalidValue;
}

/* ---- memory -------------------------------------------------------------------------------- */

template <typename T> static inline cudaError_t cudaMalloc(T **p, size_t bytes) {
    *p = NULL;
    if (bytes > (size_t)1 << 46) return cudaErrorMemoryAllocation;
    *p = (T *)aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!*p && bytes) return cudaErrorMemoryAllocation;
    memset((void *)*p, 0xff, bytes);
    return cudaSuccess;
}
static inline cudaError_t cudaFree(void *p) {
    free(p);
    return cudaSuccess;
}
template <typename T> static inline cudaError_t cudaMallocHost(T **p, size_t bytes) {
    return cudaMalloc(p, bytes);
}
template <typename T>
static inline cudaError_t cudaHostAlloc(T **p, size_t bytes, unsigned /* flags */) {
    return cudaMalloc(p, bytes);
}
static inline cudaError_t cudaFreeHost(void *p) {
    return cudaFree(p);
}
static inline cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
    memmove(to, from, bytes);
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes,
                                          cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy(to, from, bytes, kind);
}
static inline cudaError_t cudaMemset(void *p, int byte, size_t bytes) {
    memset(p, byte, bytes);
    return cudaSuccess;
}
static inline cudaError_t cudaMemsetAsync(void *p, int byte, size_t bytes, cudaStream_t) {
    return cudaMemset(p, byte, bytes);
}

/* ---- streams and events --------------------------------------------------------------------- */

static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned /* flags */) {
    *stream = NULL;
    return cudaSuccess;
}
static inline cudaError_t cudaStreamDestroy(cudaStream_t) {
    return cudaSuccess;
}
static inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
    return cudaSuccess;
}
static inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned /* flags */ = 0) {
    return cudaSuccess;
}
static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned /* flags */) {
    *event = NULL;
    return cudaSuccess;
}
static inline cudaError_t cudaEventDestroy(cudaEvent_t) {
    return cudaSuccess;
}
static inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t = NULL) {
    return cudaSuccess;
}
static inline cudaError_t cudaEventSynchronize(cudaEvent_t) {
    return cudaSuccess;
}
static inline cudaError_t cudaEventQuery(cudaEvent_t) {
    return cudaSuccess;
}

#endif
