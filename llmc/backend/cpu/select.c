/* select.c — chooses the best instance of the CPU backend that this machine can run.
 *
 * backend_cpu.c is compiled once per working type and instruction set (see Makefile). This file is
 * compiled for the lowest instruction set, and asks the processor for its features. The environment
 * variable TRAIN_LLAMA2_ISA=x86_64_v2 (or another name below) makes this process behave as on a
 * processor that has no more than that; the GEMM library obeys too. */
#include "llmc/backend/cpu/backend_cpu.h"
#include "llmc/backend/cpu/gemm.h"
#include "llmc/log/error.h"

#include <pthread.h>
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
    enum gemm_level gemm; /* what the GEMM library may use of it */
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
    {"x86_64_amx", NULL, &backend_cpu_bf16_x86_64_amx, supported_amx, true, GEMM_X86_64_V4},
    {"x86_64_avx512bf16", NULL, &backend_cpu_bf16_x86_64_avx512bf16, supported_avx512bf16, true,
     GEMM_X86_64_V4},
    {"x86_64_v4", &backend_cpu_float32_x86_64_v4, &backend_cpu_bf16_x86_64_v4, supported_v4, false,
     GEMM_X86_64_V4},
    {"x86_64_v3", &backend_cpu_float32_x86_64_v3, &backend_cpu_bf16_x86_64_v3, supported_v3, false,
     GEMM_X86_64_V3},
    {"x86_64_v2", &backend_cpu_float32_x86_64_v2, &backend_cpu_bf16_x86_64_v2, supported_v2, false,
     GEMM_X86_64_V2},
};
#else
extern const struct backend backend_cpu_float32_generic, backend_cpu_bf16_generic;

static bool supported_always(void) {
    return true;
}

static const struct instance instances[] = {
    {"generic", &backend_cpu_float32_generic, &backend_cpu_bf16_generic, supported_always, false,
     GEMM_ALL},
};
#endif

enum { INSTANCES = sizeof instances / sizeof *instances };

/* The instance that was taken, an index of `instances`; INSTANCES if TRAIN_LLAMA2_ISA names none that
 * this machine has. This process uses no better one. */
static int taken;
static bool gemm_refused;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static const char *wanted(void) {
    const char *name = getenv("TRAIN_LLAMA2_ISA");
    return name && *name ? name : NULL;
}

/* Must run before the first product, since a GEMM library cannot be limited later. */
static void take(void) {
    const char *name = wanted();
    for (taken = 0; taken < INSTANCES; taken++)
        if (instances[taken].supported() && (!name || !strcmp(instances[taken].isa, name))) break;
    /* A machine below the lowest level gets that instance, since there is no lower one. */
    if (taken == INSTANCES && !name) taken = INSTANCES - 1;
    if (!name || taken == INSTANCES || gemm_limit(instances[taken].gemm) == 0) return;
    gemm_refused = true;
    taken = INSTANCES;
}

static void refuse(void) {
    char names[160] = "";
    backend_cpu_list(names, sizeof names);
    if (gemm_refused)
        log_error("TRAIN_LLAMA2_ISA=%s: " GEMM_NAME
                  " cannot be limited to it; expected a oneDNN that "
                  "was built with ONEDNN_ENABLE_MAX_CPU_ISA, or a build with BLAS=none",
                  wanted());
    else
        log_error("TRAIN_LLAMA2_ISA=%s: expected an instruction set of this processor: %s",
                  wanted(), names);
}

static const struct backend *backend_of(const struct instance *instance, enum dtype dtype) {
    return dtype == DTYPE_BF16 ? instance->bf16 : instance->float32;
}

const struct backend *backend_cpu_instance(enum dtype dtype, int i, const char **isa) {
    pthread_once(&once, take);
    for (int j = taken; j < INSTANCES; j++) {
        const struct backend *backend = backend_of(&instances[j], dtype);
        if (!backend || (j > taken && !instances[j].supported()) || i-- > 0) continue;
        if (isa) *isa = instances[j].isa;
        return backend;
    }
    return NULL;
}

void backend_cpu_list(char *names, size_t size) {
    pthread_once(&once, take);
    size_t length = 0;
    *names = 0;
    for (int j = taken < INSTANCES ? taken : 0; j < INSTANCES && length < size; j++)
        if (instances[j].supported())
            length += (size_t)snprintf(names + length, size - length, "%s%s", length ? ", " : "",
                                       instances[j].isa);
}

const struct backend *backend_cpu(enum dtype dtype) {
    const struct backend *best = backend_cpu_instance(dtype, 0, NULL);
    if (!best) refuse();
    return best;
}

bool backend_cpu_multiplies_bf16(void) {
    pthread_once(&once, take);
    return taken < INSTANCES && instances[taken].multiplies_bf16;
}
