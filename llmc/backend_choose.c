/* backend_choose.c — see backend_choose.h. */
#include "llmc/backend_choose.h"
#include "llmc/backend_cuda.h"
#include "llmc/report.h"

#include <stdio.h>

/* The CPU always can. */
static int choose_cpu(const struct options *o, struct estimate_settings *run,
                      struct backend_choice *out) {
    run->device = false;
    run->dtype = DTYPE_FLOAT32;
    run->recompute = o->recompute == RECOMPUTE_AUTO ? RECOMPUTE_NONE : (enum recompute)o->recompute;
    out->backend = backend_cpu();
    out->recompute = run->recompute;
    return 0;
}

/* Whether the run fits the GPU's free memory, with as little recomputation as that takes. */
static bool fits(const struct options *o, const struct llama_config *c,
                 struct estimate_settings *run, const struct backend *be, char *why, size_t size) {
    const double available = (double)be->memory_free();
    double total;
    bool enough;
    if (o->recompute == RECOMPUTE_AUTO) {
        enough = estimate_choose_recompute(c, run, available, &total);
    } else {
        run->recompute = (enum recompute)o->recompute;
        total = estimate_run(c, run).total_bytes;
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

int backend_choose(const struct options *o, const struct llama_config *c,
                   struct estimate_settings *run, int local_rank, bool tell,
                   struct backend_choice *out) {
    char why[400];
    if (o->device == DEVICE_CPU) return choose_cpu(o, run, out);
    run->device = true;
    run->dtype = o->dtype == OPTION_DTYPE_FLOAT32 ? DTYPE_FLOAT32 : DTYPE_BF16;
    out->backend = backend_cuda(run->dtype, local_rank, why, sizeof why);
    if (out->backend && fits(o, c, run, out->backend, why, sizeof why)) {
        out->recompute = run->recompute;
        if (tell && o->recompute == RECOMPUTE_AUTO && run->recompute != RECOMPUTE_NONE)
            printf("to save memory: --recompute %s\n", recompute_names[run->recompute]);
        return 0;
    }
    if (o->device == DEVICE_CUDA) return report("--device cuda: %s", why);
    if (o->dtype == OPTION_DTYPE_BF16) return report("--dtype bf16 takes a GPU: %s", why);
    if (tell && backend_cuda_built) printf("computing on the CPU: %s\n", why);
    return choose_cpu(o, run, out);
}
