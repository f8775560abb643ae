/* test_model_emulated.c — test_model.c on the emulated device (dev/emulation). */
#define EMULATED
#include "test/llmc/test_model.c"
