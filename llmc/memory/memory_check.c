/* memory_check.c — see memory_check.h. */
#include "llmc/memory/memory_check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/log/error.h"

static void describe(const struct options *o, const struct llama_config *config,
                     const struct memory_plan_settings *run, struct memory_demand *out) {
    const struct memory_plan plan = memory_plan_of_run(config, run);
    memset(out, 0, sizeof *out);
    if (gethostname(out->host, sizeof out->host - 1)) snprintf(out->host, sizeof out->host, "?");
    /* The program itself is in memory already. */
    out->needed = run->run.device ? plan.host_bytes : plan.total_bytes - plan.program_bytes;
    out->limits = host_memory_limits("", out->limit);
    if (o->memory > 0 && out->limits) {
        out->limits = 1;
        out->limit[0].available = 1e9 * o->memory;
        snprintf(out->limit[0].name, sizeof out->limit[0].name, "the host, by --memory,");
    }
}

/* The bytes that all ranks that share a limit need together, and the number of these ranks. */
static double sum_of_needs(const struct memory_demand *all, int ranks, uint64_t id, int *sharing) {
    double sum = 0;
    *sharing = 0;
    for (int r = 0; r < ranks; r++)
        for (int i = 0; i < all[r].limits; i++) {
            if (all[r].limit[i].id != id) continue;
            sum += all[r].needed;
            ++*sharing;
            break;
        }
    return sum;
}

void memory_check_find(const struct memory_demand *all, int ranks, struct memory_check *out) {
    double least = 0;
    memset(out, 0, sizeof *out);
    out->fits = true;
    for (int r = 0; r < ranks; r++)
        for (int i = 0; i < all[r].limits; i++) {
            const struct host_memory_limit *limit = &all[r].limit[i];
            int sharing;
            const double needed = sum_of_needs(all, ranks, limit->id, &sharing);
            if (out->ranks && limit->available - needed >= least) continue;
            least = limit->available - needed;
            snprintf(out->host, sizeof out->host, "%s", all[r].host);
            snprintf(out->limit, sizeof out->limit, "%s", limit->name);
            out->needed = needed;
            out->available = limit->available;
            out->ranks = sharing;
            out->rank = r;
            out->fits = least >= 0;
        }
}

int memory_check_measure(const struct options *o, const struct lossynet_world *world,
                         const struct llama_config *config, const struct memory_plan_settings *run,
                         struct memory_check *out) {
    struct memory_demand *all = calloc((size_t)world->ranks, sizeof *all);
    if (!all) return log_out_of_memory("the list of ranks", 0);
    describe(o, config, run, &all[world->rank]);
    int status = lossynet_bootstrap_gather(world, all, sizeof *all) ? -1 : 0;
    if (!status) memory_check_find(all, world->ranks, out);
    free(all);
    return status;
}

int memory_check(const struct options *o, const struct lossynet_world *world,
                 const struct llama_config *config, const struct memory_plan_settings *run) {
    struct memory_check found;
    if (memory_check_measure(o, world, config, run, &found)) return -1;
    if (found.fits) return 0;
    /* With --meet each rank has a terminal of its own. */
    if (world->rank > 0 && !(o->meet && world->rank == found.rank)) return -1;
    if (world->rank == 0 && !o->quiet) memory_plan_print_memory(config, run);
    fflush(stdout);
    return log_error(
        "node %s: its %d rank%s need%s %.3f GB of memory, and %s has %.3f GB available: "
        "a smaller --batch or --seq, --recompute block or fewer workers per host need "
        "less; --memory GB says that there is more",
        found.host, found.ranks, found.ranks > 1 ? "s" : "", found.ranks > 1 ? "" : "s",
        found.needed / 1e9, found.limit, found.available / 1e9);
}
