/* test_model_emulated.c — test_model.c on the emulated device (dev/cuda_emulation). */
#define EMULATED
#include "test/test_model.c"
