/* backend_cpu_select.c — picks the instance of the CPU backend that suits this machine.
 *
 * backend_cpu.c is compiled once per instruction set (see Makefile); this file, compiled for the
 * least of them, asks the processor. TRAIN_LLAMA2_ISA=x86_64_v2 (or _v3, _v4) takes a lesser one,
 * for tests; the GEMM library chooses its own kernels. */
#include "llmc/backend_cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct instance {
    const char *isa;
    const struct backend *backend;
    bool (*supported)(void);
};

#ifdef __x86_64__
extern const struct backend backend_cpu_x86_64_v2, backend_cpu_x86_64_v3, backend_cpu_x86_64_v4;

/* The levels of the x86-64 psABI, as far as compilers can ask for their parts. */
static bool supported_v2(void) {
    return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("ssse3") &&
           __builtin_cpu_supports("popcnt");
}

static bool supported_v3(void) {
    return supported_v2() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

static bool supported_v4(void) {
    return supported_v3() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static const struct instance instances[] = {
    {"x86_64_v4", &backend_cpu_x86_64_v4, supported_v4},
    {"x86_64_v3", &backend_cpu_x86_64_v3, supported_v3},
    {"x86_64_v2", &backend_cpu_x86_64_v2, supported_v2},
};
#else
extern const struct backend backend_cpu_generic;

static bool supported_always(void) {
    return true;
}

static const struct instance instances[] = {
    {"generic", &backend_cpu_generic, supported_always},
};
#endif

const struct backend *backend_cpu_instance(int i, const char **isa) {
    for (size_t j = 0; j < sizeof instances / sizeof *instances; j++) {
        if (!instances[j].supported() || i-- > 0) continue;
        if (isa) *isa = instances[j].isa;
        return instances[j].backend;
    }
    return NULL;
}

const struct backend *backend_cpu(void) {
    const char *wanted = getenv("TRAIN_LLAMA2_ISA"), *isa = NULL;
    if (wanted && *wanted) {
        const struct backend *backend;
        for (int i = 0; (backend = backend_cpu_instance(i, &isa)) != NULL; i++)
            if (strcmp(isa, wanted) == 0) return backend;
        fprintf(stderr,
                "TRAIN_LLAMA2_ISA=%s: not built or not supported by this machine; "
                "taking the best it supports\n",
                wanted);
    }
    const struct backend *best = backend_cpu_instance(0, NULL);
    /* Even a machine below the least level gets that one: it was the least asked of it. */
    return best ? best : instances[sizeof instances / sizeof *instances - 1].backend;
}
