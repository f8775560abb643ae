/* test_model_emulated.c — test_model.c on the emulated device (dev/emulation). Takes 30 s. */
#define EMULATED
#include "test/llmc/test_model.c"
