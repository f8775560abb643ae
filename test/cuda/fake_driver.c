/* fake_driver.c — a libcuda.so.1 without a GPU, for test_cudnn.py. With it, cuDNN makes plans for a
 * device of which it knows only the properties. cuDNN calls these functions (CUDA Driver API), and
 * loads the kernels that it has compiled. Nothing can be launched. */
#include <stddef.h>

enum { SUCCESS, INVALID_VALUE, NO_DEVICE = 100 };

#define SUCCEEDS(name)                                                                             \
    int name(void) {                                                                               \
        return SUCCESS;                                                                            \
    }
#define REFUSES(name)                                                                              \
    int name(void) {                                                                               \
        return INVALID_VALUE;                                                                      \
    }

static int something; /* what objects point to */

int cuInit(unsigned flags) {
    (void)flags;
    return NO_DEVICE;
}

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

int cuLibraryLoadData(void **library) {
    *library = &something;
    return SUCCESS;
}

int cuLibraryGetKernel(void **kernel) {
    *kernel = &something;
    return SUCCESS;
}

int cuKernelGetFunction(void **function, void *kernel) {
    *function = kernel;
    return SUCCESS;
}

int cuCtxGetCurrent(void **context) {
    *context = NULL;
    return SUCCESS;
}

int cuStreamGetCtx(void *stream, void **context) {
    (void)stream;
    *context = NULL;
    return SUCCESS;
}

int cuCtxGetLimit(size_t *value) {
    *value = 0;
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value) {
    *value = 0;
    return SUCCESS;
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks) {
    *blocks = 1;
    return SUCCESS;
}

int cuOccupancyMaxPotentialClusterSize(int *size) {
    *size = 1;
    return SUCCESS;
}

int cuGetErrorName(int status, const char **name) {
    (void)status;
    *name = "fake";
    return SUCCESS;
}

int cuGetErrorString(int status, const char **text) {
    return cuGetErrorName(status, text);
}

SUCCEEDS(cuDeviceGetCount)
SUCCEEDS(cuKernelGetAttribute)
SUCCEEDS(cuLibraryUnload)
SUCCEEDS(cuKernelSetAttribute)
SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuCtxPushCurrent)
SUCCEEDS(cuCtxPopCurrent)
SUCCEEDS(cuCtxPushCurrent_v2)
SUCCEEDS(cuCtxPopCurrent_v2)
SUCCEEDS(cuLinkDestroy)
SUCCEEDS(cuTensorMapEncodeTiled)
REFUSES(cuLibraryLoadFromFile)
REFUSES(cuLaunchKernel)
REFUSES(cuLaunchKernelEx)
REFUSES(cuLaunchCooperativeKernel)
REFUSES(cuLinkCreate)
REFUSES(cuLinkCreate_v2)
REFUSES(cuLinkAddData)
REFUSES(cuLinkAddData_v2)
REFUSES(cuLinkComplete)
