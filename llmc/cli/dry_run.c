/* dry_run.c — see dry_run.h. */
#include "llmc/cli/dry_run.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "llmc/backend/cuda/attention/cudnn_plan.h"
#include "llmc/memory/memory_check.h"
#include "llmc/memory/memory_plan.h"
#include "llmc/memory/step_plan.h"
#include "llmc/cli/validate.h"
#include "llmc/comm/settings.h"
#include "llmc/model/config.h"
#include "llmc/util/threads.h"

static void print_drift(int workers, double p) {
    double correlation[LOSSYNET_LAGS];
    for (int k = 0; k < LOSSYNET_LAGS; k++) correlation[k] = pow(0.9, k + 1);
    memory_plan_print_drift(p, lossynet_drift_pair(workers, p, 1, correlation, 0),
                            lossynet_drift_pair(workers, p, 1, correlation, LOSSYNET_LAGS),
                            lossynet_drift_paper(p, 1));
}

/* Prints what a rank needs of its GPU: with the most sets of activations, and with one. */
static void print_device(const struct llama_config *c, struct memory_plan_settings s) {
    const int most = memory_plan_most_sets(&s);
    for (s.sets = most; s.sets > 0; s.sets = s.sets > 1 ? 1 : 0)
        printf("  %-20s %10.3f GB  %d %s%s at a time\n",
               s.sets == most ? "on each rank's GPU" : "or",
               memory_plan_of_run(c, &s).total_bytes / 1e9, s.sets,
               s.run.group > 1 ? "group" : "worker", s.sets > 1 ? "s" : "");
}

/* Prints the memory that the ranks of this run, with their workers, need on their hosts. */
static int print_host(const struct options *o, const struct lossynet_world *world,
                      const struct llama_config *c, const struct lossynet_settings *network,
                      struct memory_plan_settings s) {
    struct memory_check found;
    const struct lossynet_world run = comm_planned_world(o, world);
    if (s.run.workers % run.ranks) return 0;
    s.network_bytes = (double)lossynet_memory_needed(&run, network);
    if (s.network_bytes == 0) return -1;
    memory_plan_place(&s, run.ranks, run.rank);
    if (memory_check_measure(o, world, c, &s, &found)) return -1;
    if (world->rank > 0) return 0;
    printf("\nMemory as started here: %d rank%s with %d worker%s%s\n", world->ranks,
           world->ranks > 1 ? "s" : "", s.run.workers / s.run.ranks,
           s.run.workers / s.run.ranks > 1 ? "s" : "", world->ranks > 1 ? " each" : "");
    printf("  %-20s %10.3f GB  %d rank%s on %s\n", "needed", found.needed / 1e9, found.ranks,
           found.ranks > 1 ? "s" : "", found.host);
    printf("  %-20s %10.3f GB  %s%s\n", "available", found.available / 1e9, found.limit,
           found.fits ? "" : ": the run would be refused");
    if (s.run.device) print_device(c, s);
    return 0;
}

int dry_run(const struct options *o, const struct lossynet_world *world) {
    struct llama_config c;
    struct param_layout layout;
    const int workers = o->net.workers ? o->net.workers : comm_planned_world(o, world).ranks;
    const struct lossynet_world cluster = {.ranks = workers, .local_ranks = 1};
    if (validate_planned_config(o, &c) || comm_layout(o, &c, workers, &layout)) return -1;
    threads_choose_alone(o->threads, world->local_ranks);
    struct memory_plan_settings settings =
        memory_plan_of_options(o, workers, validate_sequence_length(o, c.positions));
    comm_plan(o, &layout, workers, workers, &settings);
    if (o->attention == OPTION_ATTENTION_AUTO && settings.seq < CUDNN_ATTENTION_FROM)
        settings.cudnn = false;
    settings.wire.header_bytes =
        LOSSYNET_HEADER_BYTES + (o->net.encrypt ? LOSSYNET_SECURE_BYTES : 0);
    const bool bf16 = o->dtype == OPTION_DTYPE_BF16;
    settings.run.device = o->device == DEVICE_CUDA || (bf16 && o->device != DEVICE_CPU);
    if (bf16 || (settings.run.device && o->dtype == OPTION_DTYPE_AUTO))
        settings.run.dtype = DTYPE_BF16;
    const struct lossynet_settings network =
        comm_settings(o, &layout, workers, workers, settings.run.device);
    settings.network_bytes = (double)lossynet_memory_needed(&cluster, &network);
    if (settings.network_bytes == 0) return param_layout_release(&layout), -1;
    double left[2]; /* shares that stay lost */
    for (int phase = 0; phase < 2; phase++)
        lossynet_rounds_plan(&network, (lossynet_phase)phase, &settings.wire.resent[phase],
                             &left[phase]);
    if (o->recompute != RECOMPUTE_AUTO) settings.recompute = (enum recompute)o->recompute;
    if (world->rank == 0) {
        options_print_unused(o, stdout);
        if (settings.run.device)
            puts("Plan for one GPU for each worker\n");
        else
            printf("Plan for CPUs%s\n\n",
                   o->device == DEVICE_CPU ? "" : "; for GPUs such as an H100: add --device cuda");
        memory_plan_print(&c, &settings);
        if (strncmp(network.loss.model, "outage", 6) != 0) /* it supposes independent steps */
            print_drift(comm_groups(o, workers), left[LOSSYNET_PARAMETER]);
        if (settings.run.dtype == DTYPE_BF16 && settings.run.device)
            step_plan_print(&c, &settings, o->algorithm == ALGORITHM_LOSSY && !o->no_overlap);
    }
    int status = print_host(o, world, &c, &network, settings);
    param_layout_release(&layout);
    return status;
}
