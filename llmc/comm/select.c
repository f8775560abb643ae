/* select.c — see select.h. */
#include "llmc/comm/select.h"
#include "llmc/backend/cpu/backend_cpu.h"
#include "llmc/backend/cuda/backend_cuda.h"
#include "llmc/log/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The CPU is always available. With --dtype auto it computes in float32, so that results do not
 * depend on the processor. */
static int choose_cpu(const struct options *o, struct memory_plan_settings *run, bool explain,
                      struct backend_choice *out) {
    const bool bf16 = o->dtype == OPTION_DTYPE_BF16;
    const char *isa = "";
    run->run.device = false;
    run->run.dtype = bf16 ? DTYPE_BF16 : DTYPE_FLOAT32;
    out->backend = backend_cpu_instance(run->run.dtype, 0, &isa);
    if (explain && bf16 && !backend_cpu_multiplies_bf16())
        printf("--dtype bf16: expected AMX or AVX512_BF16, which multiply it; with %s float32 "
               "would be "
               "faster\n",
               isa);
    run->recompute = o->recompute == RECOMPUTE_AUTO ? RECOMPUTE_NONE : (enum recompute)o->recompute;
    out->recompute = run->recompute;
    out->faster_in_bf16 = o->dtype == OPTION_DTYPE_AUTO && backend_cpu_multiplies_bf16();
    return 0;
}

/* The findings of a rank; ranks exchange its bytes. */
struct found {
    int32_t on_device, failed; /* failed: --device cuda, but no device that can be used */
    char host[64], device[64], details[512];
    char why[400]; /* why no GPU is used */
};

/* Whether the run fits kernels, and into the free memory of a GPU that `sharing` ranks use. Sets the least
 * recomputation with which it fits, with --attention auto whether cuDNN's working memory fits
 * beside that, and then the most sets of activations that fit. */
static bool fits(const struct options *o, const struct llama_config *c,
                 struct memory_plan_settings *run, const struct backend *be, int sharing, char *why,
                 size_t size) {
    const double available = (double)be->memory_free() / sharing;
    char part[64] = "";
    double total;
    bool enough;
    if (c->head_size > BACKEND_CUDA_MOST_HEAD) {
        snprintf(why, size, "heads have %d elements, expected at most %d on a GPU", c->head_size,
                 BACKEND_CUDA_MOST_HEAD);
        return false;
    }
    const bool may = run->cudnn && o->attention == OPTION_ATTENTION_AUTO;
    run->cudnn = run->cudnn && !may;
    run->sets = 1;
    if (o->recompute == RECOMPUTE_AUTO) {
        enough = memory_plan_choose_recompute(c, run, available, &total);
    } else {
        run->recompute = (enum recompute)o->recompute;
        total = memory_plan_of_run(c, run).total_bytes;
        enough = total <= available;
    }
    if (may) {
        run->cudnn = true;
        run->cudnn = memory_plan_of_run(c, run).total_bytes <= available;
    }
    if (enough) {
        run->sets = memory_plan_most_sets(run);
        while (run->sets > 1 && memory_plan_of_run(c, run).total_bytes > available) run->sets--;
        return true;
    }
    if (sharing > 1) snprintf(part, sizeof part, " for each of the %d ranks on it", sharing);
    snprintf(
        why, size,
        "this run needs %.3f GB with --recompute %s, and the GPU has %.3f GB free%s: a smaller "
        "--batch or --seq needs less%s",
        total / 1e9, recompute_names[run->recompute], available / 1e9, part,
        run->recompute < RECOMPUTE_BLOCK ? ", and so does --recompute block" : "");
    return false;
}

static int count_sharing(const struct found *all, const struct lossynet_world *world) {
    int sharing = 0;
    for (int r = 0; r < world->ranks; r++)
        sharing += all[r].on_device && !strcmp(all[r].device, all[world->rank].device);
    return sharing;
}

/* Opens the rank's device, and checks its free memory when all ranks have opened theirs. */
static int find_device(const struct options *o, const struct llama_config *c,
                       struct memory_plan_settings *run, const struct lossynet_world *world,
                       struct found *all, struct backend_choice *out) {
    struct found *mine = &all[world->rank];
    if (gethostname(mine->host, sizeof mine->host - 1))
        snprintf(mine->host, sizeof mine->host, "?");
    run->run.device = true;
    run->run.dtype = o->dtype == OPTION_DTYPE_FLOAT32 ? DTYPE_FLOAT32 : DTYPE_BF16;
    out->backend = o->device == DEVICE_CPU ? NULL
                                           : backend_cuda(run->run.dtype, world->local_rank,
                                                          mine->why, sizeof mine->why);
    if (out->backend) {
        mine->on_device = true;
        snprintf(mine->device, sizeof mine->device, "%s", out->backend->device);
        snprintf(mine->details, sizeof mine->details, "%s", out->backend->details);
    }
    if (lossynet_bootstrap_gather(world, all, sizeof *all)) return -1;
    if (out->backend &&
        !fits(o, c, run, out->backend, count_sharing(all, world), mine->why, sizeof mine->why))
        mine->on_device = false;
    mine->failed = o->device == DEVICE_CUDA && !mine->on_device;
    return lossynet_bootstrap_gather(world, all, sizeof *all) ? -1 : 0;
}

static int refuse_failed(const struct found *all, int ranks, int r) {
    if (ranks == 1) return log_error("--device cuda: %s", all[r].why);
    return log_error("--device cuda: rank %d on %s: %s", r, all[r].host, all[r].why);
}

static int refuse_other(const struct found *all, int r) {
    const struct found *gpu = &all[all[0].on_device ? 0 : r], *cpu = &all[all[0].on_device ? r : 0];
    if (all[0].on_device && all[r].on_device)
        return log_error(
            "rank %d on %s computes on %s; rank 0 on %s on %s: expected the same on all "
            "ranks, since results differ between them",
            r, all[r].host, all[r].details, all[0].host, all[0].details);
    return log_error(
        "rank %d on %s has a GPU for this run, %s; rank %d on %s has not%s%s: expected a "
        "GPU on all ranks, or --device cpu",
        (int)(gpu - all), gpu->host, gpu->details, (int)(cpu - all), cpu->host,
        *cpu->why ? ": " : "", cpu->why);
}

/* Returns 0 if all ranks compute on CPUs, or all on devices of the same kind. */
static int compare(const struct found *all, const struct lossynet_world *world) {
    for (int r = 0; r < world->ranks; r++)
        if (all[r].failed) return world->rank ? -1 : refuse_failed(all, world->ranks, r);
    for (int r = 1; r < world->ranks; r++)
        if (all[r].on_device != all[0].on_device ||
            (all[r].on_device && strcmp(all[r].details, all[0].details)))
            return world->rank ? -1 : refuse_other(all, r);
    return 0;
}

int backend_select(const struct options *o, const struct llama_config *c,
                   struct memory_plan_settings *run, const struct lossynet_world *world,
                   bool explain, struct backend_choice *out) {
    struct found *all = calloc((size_t)world->ranks, sizeof *all);
    if (!all) return log_out_of_memory("the list of ranks", 0);
    const struct found *mine = &all[world->rank];
    const int cpu_sets = run->sets;
    int status = find_device(o, c, run, world, all, out) || compare(all, world) ? -1 : 0;
    if (!status && mine->on_device) {
        out->recompute = run->recompute;
        out->faster_in_bf16 = false;
        if (explain && o->recompute == RECOMPUTE_AUTO && run->recompute != RECOMPUTE_NONE)
            printf("to save memory: --recompute %s\n", recompute_names[run->recompute]);
        if (explain && run->sets < memory_plan_most_sets(run))
            printf(
                "to save memory: the GPU computes %d at a time of the %d workers that it could\n",
                run->sets, memory_plan_most_sets(run));
        if (explain && world->ranks > 1 && !run->run.evaluates && run->run.dtype == DTYPE_BF16 &&
            !run->run.narrow)
            printf("note: GPUs compute in bf16, and packets are float32: --wire-dtype bf16 halves "
                   "the bytes\n      on the network and over PCIe\n");
    } else if (!status) {
        if (explain && backend_cuda_built && o->device != DEVICE_CPU)
            printf("computing on the CPU: %s\n", mine->why);
        run->sets = cpu_sets;
        status = choose_cpu(o, run, explain, out);
    }
    free(all);
    return status;
}
