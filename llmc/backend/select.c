/* select.c — see select.h. */
#include "llmc/backend/select.h"
#include "llmc/backend/cpu/backend_cpu.h"
#include "llmc/backend/cuda/backend_cuda.h"
#include "llmc/log/error.h"

#include <stdio.h>

/* The CPU is always available. With --dtype auto it computes in float32, so that results do not
 * depend on the processor. */
static int choose_cpu(const struct options *o, struct memory_plan_settings *run, bool explain,
                      struct backend_choice *out) {
    const bool half = o->dtype == OPTION_DTYPE_BF16;
    run->device = false;
    run->dtype = half ? DTYPE_BF16 : DTYPE_FLOAT32;
    if (explain && half && !backend_cpu_multiplies_bf16())
        printf(
            "--dtype bf16: this processor has no instructions for it (AMX, AVX512_BF16); float32 "
            "would be faster\n");
    run->recompute = o->recompute == RECOMPUTE_AUTO ? RECOMPUTE_NONE : (enum recompute)o->recompute;
    out->backend = backend_cpu(run->dtype);
    out->recompute = run->recompute;
    out->faster_in_bf16 = o->dtype == OPTION_DTYPE_AUTO && backend_cpu_multiplies_bf16();
    return 0;
}

/* Whether the run fits into the GPU's free memory, with the least recomputation that makes it
 * fit. */
static bool fits(const struct options *o, const struct llama_config *c,
                 struct memory_plan_settings *run, const struct backend *be, char *why,
                 size_t size) {
    const double available = (double)be->memory_free();
    double total;
    bool enough;
    if (o->recompute == RECOMPUTE_AUTO) {
        enough = memory_plan_choose_recompute(c, run, available, &total);
    } else {
        run->recompute = (enum recompute)o->recompute;
        total = memory_plan_of_run(c, run).total_bytes;
        enough = total <= available;
    }
    if (enough) return true;
    snprintf(why, size,
             "this run needs %.3f GB with --recompute %s, and the GPU has %.3f GB free: a smaller "
             "--batch or --seq needs less%s",
             total / 1e9, recompute_names[run->recompute], available / 1e9,
             run->recompute < RECOMPUTE_BLOCK ? ", and so does --recompute block" : "");
    return false;
}

int backend_select(const struct options *o, const struct llama_config *c,
                   struct memory_plan_settings *run, int local_rank, bool explain,
                   struct backend_choice *out) {
    char why[400];
    if (o->device == DEVICE_CPU) return choose_cpu(o, run, explain, out);
    run->device = true;
    run->dtype = o->dtype == OPTION_DTYPE_FLOAT32 ? DTYPE_FLOAT32 : DTYPE_BF16;
    out->backend = backend_cuda(run->dtype, local_rank, why, sizeof why);
    if (out->backend && fits(o, c, run, out->backend, why, sizeof why)) {
        out->recompute = run->recompute;
        out->faster_in_bf16 = false;
        if (explain && o->recompute == RECOMPUTE_AUTO && run->recompute != RECOMPUTE_NONE)
            printf("to save memory: --recompute %s\n", recompute_names[run->recompute]);
        return 0;
    }
    if (o->device == DEVICE_CUDA) return log_error("--device cuda: %s", why);
    if (explain && backend_cuda_built) printf("computing on the CPU: %s\n", why);
    return choose_cpu(o, run, explain, out);
}
