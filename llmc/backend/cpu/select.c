/* select.c — chooses the best instance of the CPU backend that this machine can run.
 *
 * backend_cpu.c is compiled once per working type and instruction set (see Makefile). This file is
 * compiled for the lowest instruction set, and asks the processor for its features. For tests,
 * TRAIN_LLAMA2_ISA=x86_64_v2 (or another name below) selects a lower one; the GEMM library chooses
 * its own kernels. */
#include "llmc/backend/cpu/backend_cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

struct instance {
    const char *isa;
    const struct backend *float32, *bf16; /* NULL: not built, since the next is as good */
    bool (*supported)(void);
    bool multiplies_bf16;
};

#ifdef __x86_64__
extern const struct backend backend_cpu_float32_x86_64_v2, backend_cpu_float32_x86_64_v3,
    backend_cpu_float32_x86_64_v4;
extern const struct backend backend_cpu_bf16_x86_64_v2, backend_cpu_bf16_x86_64_v3,
    backend_cpu_bf16_x86_64_v4, backend_cpu_bf16_x86_64_avx512bf16, backend_cpu_bf16_x86_64_amx;

/* The levels of the x86-64 psABI, as far as compilers can test for their features. */
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

/* AVX512_BF16: CPUID leaf 7, subleaf 1, EAX bit 5 (Intel SDM, volume 2, CPUID). */
static bool supported_avx512bf16(void) {
    unsigned a, b, c, d;
    return supported_v4() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

/* AMX_TILE and AMX_BF16: CPUID leaf 7, EDX bits 24 and 22. A process must ask Linux for the tile
 * registers (Documentation/arch/x86/xstate.rst). If Linux refuses, the next instance is taken. */
static bool supported_amx(void) {
    enum { ASK_FOR_STATE = 0x1023 /* ARCH_REQ_XCOMP_PERM */, TILE_DATA = 18 };
    unsigned a, b, c, d;
    if (!supported_avx512bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return (d >> 22 & 1) && (d >> 24 & 1) && !syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA);
}

static const struct instance instances[] = {
    {"x86_64_amx", NULL, &backend_cpu_bf16_x86_64_amx, supported_amx, true},
    {"x86_64_avx512bf16", NULL, &backend_cpu_bf16_x86_64_avx512bf16, supported_avx512bf16, true},
    {"x86_64_v4", &backend_cpu_float32_x86_64_v4, &backend_cpu_bf16_x86_64_v4, supported_v4, false},
    {"x86_64_v3", &backend_cpu_float32_x86_64_v3, &backend_cpu_bf16_x86_64_v3, supported_v3, false},
    {"x86_64_v2", &backend_cpu_float32_x86_64_v2, &backend_cpu_bf16_x86_64_v2, supported_v2, false},
};
#else
extern const struct backend backend_cpu_float32_generic, backend_cpu_bf16_generic;

static bool supported_always(void) {
    return true;
}

static const struct instance instances[] = {
    {"generic", &backend_cpu_float32_generic, &backend_cpu_bf16_generic, supported_always, false},
};
#endif

enum { INSTANCES = sizeof instances / sizeof *instances };

static const struct backend *backend_of(const struct instance *instance, enum dtype dtype) {
    return dtype == DTYPE_BF16 ? instance->bf16 : instance->float32;
}

const struct backend *backend_cpu_instance(enum dtype dtype, int i, const char **isa) {
    for (int j = 0; j < INSTANCES; j++) {
        const struct backend *backend = backend_of(&instances[j], dtype);
        if (!backend || !instances[j].supported() || i-- > 0) continue;
        if (isa) *isa = instances[j].isa;
        return backend;
    }
    return NULL;
}

const struct backend *backend_cpu(enum dtype dtype) {
    const char *wanted = getenv("TRAIN_LLAMA2_ISA"), *isa = NULL;
    if (wanted && *wanted) {
        const struct backend *backend;
        for (int i = 0; (backend = backend_cpu_instance(dtype, i, &isa)) != NULL; i++)
            if (strcmp(isa, wanted) == 0) return backend;
        fprintf(stderr,
                "TRAIN_LLAMA2_ISA=%s: not built or not supported by this machine; "
                "taking the best it supports\n",
                wanted);
    }
    const struct backend *best = backend_cpu_instance(dtype, 0, NULL);
    /* A machine below the lowest level gets that instance, since there is no lower one. */
    return best ? best : backend_of(&instances[INSTANCES - 1], dtype);
}

bool backend_cpu_multiplies_bf16(void) {
    for (int j = 0; j < INSTANCES; j++)
        if (instances[j].multiplies_bf16 && instances[j].supported()) return true;
    return false;
}
