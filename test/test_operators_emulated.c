/* test_operators_emulated.c — test_operators_device.c on the emulated device (dev/cuda_emulation):
 * the CUDA backend's own sources, compiled by g++. */
#define EMULATED
#include "test/test_operators_device.c"
