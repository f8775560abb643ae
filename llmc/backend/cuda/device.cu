/* device.cu — device.h on an NVIDIA GPU: opens the device and manages memory, with CUDA's runtime.
 * Streams are in streams.cu, products in product.cu. The runtime is linked statically and looks for
 * the driver when it is first called, so the program starts on machines that have neither driver
 * nor toolkit. */
#include "llmc/backend/cuda/device.h"
#include "llmc/backend/cuda/attention/cudnn_plan.h"
#include "llmc/backend/cuda/product.h"
#include "llmc/backend/cuda/streams.h"
#include "llmc/log/error.h"
#include "llmc/util/host_memory.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct device_facts device_facts;

static struct {
    bool open;
    int id;
    struct {
        void *memory;
        size_t bytes;
    } scratch[BACKEND_SETS][SCRATCHES];
} device;

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

#define CHECK(call) CUDA_CHECK(call)

device_scope::device_scope() {
    pthread_mutex_lock(&turn);
    static thread_local bool bound;
    if (device.open && !bound) CHECK(cudaSetDevice(device.id));
    bound = device.open;
}

device_scope::~device_scope() {
    pthread_mutex_unlock(&turn);
}

/* ---- opening ---- */

static bool refuse(char *why, size_t size, cudaError_t error) {
    int have = 0, need = 0;
    cudaDriverGetVersion(&have);
    cudaRuntimeGetVersion(&need);
    if (error == cudaErrorInsufficientDriver && !have) {
        snprintf(why, size, "no NVIDIA driver on this machine (built for CUDA %d.%d)", need / 1000,
                 need % 1000 / 10);
    } else if (error == cudaErrorInsufficientDriver) {
        snprintf(why, size, "the NVIDIA driver knows CUDA %d.%d, this program needs %d.%d",
                 have / 1000, have % 1000 / 10, need / 1000, need % 1000 / 10);
    } else if (error == cudaErrorNoDevice) {
        snprintf(why, size, "the NVIDIA driver shows no device (CUDA_VISIBLE_DEVICES?)");
    } else {
        snprintf(why, size, "CUDA: %s", cudaGetErrorString(error));
    }
    return false;
}

bool device_open(int local_rank, char *why, size_t why_size) {
    int count = 0;
    struct cudaDeviceProp properties;
    if (device.open) return true;
    /* Devices have the order of their places on the bus, as nvidia-smi and adapters have, and not
     * one of speed: ranks then find the adapter beside their GPU (CUDA C++ Programming Guide,
     * "CUDA Environment Variables"). It must be set before the first call. */
    setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 0);
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count == 0) error = cudaErrorNoDevice;
    if (error != cudaSuccess) return refuse(why, why_size, error);
    device.id = local_rank % count;
    error = cudaGetDeviceProperties(&properties, device.id);
    if (error != cudaSuccess) return refuse(why, why_size, error);
    if (properties.major < 8) {
        snprintf(why, why_size, "GPU %d, %s, is of sm_%d%d; expected sm_80 (Ampere) or newer",
                 device.id, properties.name, properties.major, properties.minor);
        return false;
    }
    error = cudaSetDevice(device.id);
    if (error == cudaSuccess) error = streams_open();
    if (error != cudaSuccess) return refuse(why, why_size, error);
    if (!product_open(why, why_size)) return false;
    snprintf(device_facts.name, sizeof device_facts.name, "%s (sm_%d%d, %d SMs, %.0f GB)",
             properties.name, properties.major, properties.minor, properties.multiProcessorCount,
             (double)properties.totalGlobalMem / 1e9);
    char address[32] = "";
    if (cudaDeviceGetPCIBusId(address, sizeof address, device.id) != cudaSuccess)
        cudaGetLastError();
    device_facts.memory_node = *address ? host_memory_node_of("", address) : -1;
    for (size_t i = 0; i < sizeof properties.uuid.bytes; i++)
        snprintf(device_facts.identity + 2 * i, 3, "%02x", (unsigned char)properties.uuid.bytes[i]);
    device_facts.cudnn_from = properties.major >= 9 ? CUDNN_ATTENTION_FROM : 0;
    product_library(device_facts.products, sizeof device_facts.products);
    device.open = true;
    return true;
}

/* ---- memory ---- */

void *device_allocate(size_t bytes) {
    void *memory = NULL;
    const cudaError_t error = cudaMalloc(&memory, bytes ? bytes : 1);
    if (error == cudaErrorMemoryAllocation ||
        error == cudaErrorInvalidValue /* an impossible size */) {
        cudaGetLastError(); /* otherwise the next launch would report this error */
        return NULL;
    }
    cuda_check(error, "cudaMalloc", __FILE__, __LINE__); /* or an error of earlier work */
    streams_clear(memory, bytes);
    return memory;
}

bool device_share(const void *memory, struct backend_shared *out) {
    static_assert(sizeof(cudaIpcMemHandle_t) <= sizeof out->handle, "a handle fits");
    const bool done =
        cudaIpcGetMemHandle((cudaIpcMemHandle_t *)out->handle, (void *)memory) == cudaSuccess;
    if (!done) cudaGetLastError(); /* otherwise the next launch would report this error */
    return done;
}

const void *device_open_shared(const struct backend_shared *shared) {
    void *memory = NULL;
    cudaIpcMemHandle_t handle;
    memcpy(&handle, shared->handle, sizeof handle);
    if (cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess)
        return memory;
    cudaGetLastError(); /* otherwise the next launch would report this error */
    return NULL;
}

void device_close_shared(const void *memory) {
    CHECK(cudaIpcCloseMemHandle((void *)memory));
}

void device_release(void *memory) {
    CHECK(cudaFree(memory)); /* waits for operations that may use it */
    if (memory) device_passes_forget();
}

size_t device_memory_free(void) {
    size_t available = 0, total = 0;
    CHECK(cudaMemGetInfo(&available, &total));
    return available;
}

void *device_scratch_memory(enum device_scratch which, size_t bytes) {
    auto *s = &device.scratch[device_set()][which];
    if (bytes > s->bytes) {
        device_release(s->memory);
        s->memory = device_allocate(bytes);
        if (!s->memory) {
            size_t available = device_memory_free();
            log_error(
                "CUDA: out of memory: an operation needs %.3f GB to work with, %.3f GB are free "
                "(a smaller --batch or --seq needs less)",
                (double)bytes / 1e9, (double)available / 1e9);
            exit(1);
        }
        s->bytes = bytes;
    }
    return s->memory;
}
