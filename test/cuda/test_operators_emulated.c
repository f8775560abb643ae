/* test_operators_emulated.c — test_operators_device.c on the emulated device (dev/emulation):
 * the CUDA backend's own sources, compiled by g++. Takes 30 s. */
#define EMULATED
#include "test/cuda/test_operators_device.c"
