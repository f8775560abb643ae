/* host_emu.h — the part of the CUDA runtime API that the backend calls, on the host's own memory.
 *
 * There is one device, and its memory is the host's. streams_emu.h decides when work on a stream
 * runs. Device memory is filled with NaN when it is allocated, so that nobody relies on zeros.
 * Included by cuda_emu.h.
 */
#ifndef CUDA_EMU_HOST_H
#define CUDA_EMU_HOST_H

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum {
    cudaStreamNonBlocking = 1,
    cudaEventDisableTiming = 2,
    cudaHostAllocDefault = 0,
    cudaHostRegisterDefault = 0
};

static inline const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorInvalidValue:
        return "invalid argument";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorIllegalAddress:
        return "an illegal memory access was encountered";
    default:
        return "not ready";
    }
}
static inline cudaError_t cudaGetLastError(void) {
    return cudaSuccess;
}
static inline cudaError_t cudaDeviceSynchronize(void) {
    cuda_emu::wait_for(NULL);
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
    cudaDeviceSynchronize();
    free(p);
    return cudaSuccess;
}
template <typename T>
static inline cudaError_t cudaHostAlloc(T **p, size_t bytes, unsigned /* flags */) {
    if (getenv("EMULATED_FAULT")) return cudaErrorIllegalAddress; /* of earlier work */
    cudaError_t error = cudaMalloc(p, bytes);
    if (error == cudaSuccess) cuda_emu::pinned_add(*p, bytes);
    return error;
}
static inline cudaError_t cudaFreeHost(void *p) {
    cudaDeviceSynchronize();
    cuda_emu::pinned_remove(p);
    return cudaFree(p);
}
static inline cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned /* flags */) {
    return cuda_emu::pinned_register(p, bytes) ? cudaSuccess : cudaErrorInvalidValue;
}
static inline cudaError_t cudaHostUnregister(void *p) {
    cudaDeviceSynchronize();
    cuda_emu::pinned_remove(p);
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
    cudaDeviceSynchronize();
    cuda_emu::begin_work();
    memmove(to, from, bytes);
    return cudaSuccess;
}
/* EMULATED_PAGEABLE=1: copies read pageable memory later, too. */
static inline bool cuda_emu_reads_pageable(void) {
    return getenv("EMULATED_PAGEABLE") != NULL;
}
static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes,
                                          cudaMemcpyKind kind, cudaStream_t stream) {
    const bool pinned = cuda_emu::is_pinned(from);
    if (kind == cudaMemcpyHostToDevice && pinned) cuda_emu::count_upload(bytes);
    if (kind == cudaMemcpyHostToDevice && stream && !pinned && !cuda_emu_reads_pageable()) {
        std::string kept((const char *)from, bytes);
        cuda_emu::enqueue(stream, [to, kept] { memcpy(to, kept.data(), kept.size()); });
    } else {
        cuda_emu::enqueue(stream, [to, from, bytes] { memmove(to, from, bytes); });
    }
    return cudaSuccess;
}
static inline cudaError_t cudaMemsetAsync(void *p, int byte, size_t bytes, cudaStream_t stream) {
    cuda_emu::enqueue(stream, [p, byte, bytes] { memset(p, byte, bytes); });
    return cudaSuccess;
}
static inline cudaError_t cudaMemset(void *p, int byte, size_t bytes) {
    return cudaMemsetAsync(p, byte, bytes, NULL);
}

/* ---- streams and events --------------------------------------------------------------------- */

static inline cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5; /* lower numbers come first */
    return cudaSuccess;
}
static inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned /* flags */,
                                                       int priority) {
    if (priority > 0 || priority < -5) return cudaErrorInvalidValue;
    *stream = cuda_emu::stream_new();
    return cudaSuccess;
}
static inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    cuda_emu::wait_for(stream);
    return cudaSuccess;
}
static inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                              unsigned /* flags */ = 0) {
    cuda_emu::event_wait(stream, event);
    return cudaSuccess;
}
static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned /* flags */) {
    *event = cuda_emu::event_new();
    return cudaSuccess;
}
static inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    cuda_emu::event_record(event, stream);
    return cudaSuccess;
}
static inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    cuda_emu::event_finish(event);
    return cudaSuccess;
}
/* A host function may not call CUDA. */
static inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*call)(void *),
                                             void *argument) {
    cuda_emu::enqueue(stream, [call, argument] { call(argument); });
    return cudaSuccess;
}

/* ---- graphs: what a stream is given is kept, and queued as one piece of work, in its order ---- */

enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
typedef std::vector<std::function<void()>> *cudaGraph_t, *cudaGraphExec_t;

static inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    cuda_emu::record_begin(stream);
    return cudaSuccess;
}
static inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    *graph = cuda_emu::record_end(stream);
    return *graph ? cudaSuccess : cudaErrorInvalidValue;
}
static inline cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph,
                                                        unsigned long long /* flags */) {
    *made = new std::vector<std::function<void()>>(*graph);
    return cudaSuccess;
}
static inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
static inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    cuda_emu::wait_for(NULL);
    delete graph;
    return cudaSuccess;
}
static inline cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    cuda_emu::enqueue(stream, [graph] {
        for (const std::function<void()> &work : *graph) work();
    });
    return cudaSuccess;
}

#endif
