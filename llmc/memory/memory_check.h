/* memory_check.h — checks whether a run fits the memory of its hosts, before it allocates any.
 *
 * The kernel kills a process that takes too much memory, without any message. So the ranks tell
 * each other how much they will need (memory_plan.h). For each host and control group, the sum over
 * its ranks is compared with the memory that is available there.
 */
#ifndef LLMC_MEMORY_MEMORY_CHECK_H
#define LLMC_MEMORY_MEMORY_CHECK_H

#include "llmc/memory/memory_plan.h"
#include "llmc/options/options.h"
#include "llmc/util/host_memory.h"
#include "lossynet/lossynet.h"

struct memory_demand { /* of a rank; ranks exchange its bytes */
    char host[64];
    double needed; /* bytes that it will take */
    int32_t limits;
    struct host_memory_limit limit[HOST_MEMORY_LIMITS];
};

struct memory_check {
    char host[64];
    int rank;                 /* whose limit it is */
    char limit[104];          /* what has too little memory: "the host" or a control group */
    double needed, available; /* bytes, for all ranks that share it */
    int ranks;                /* number of ranks that share it */
    bool fits;
};

/* Finds the host or control group with the least memory to spare. */
void memory_check_find(const struct memory_demand *all, int ranks, struct memory_check *out);

/* Exchanges the demands of all ranks, and does the same. Collective; all ranks get the same result.
 * run: describes what this rank will need. Returns 0, or -1 after reporting. */
int memory_check_measure(const struct options *options, const struct lossynet_world *world,
                         const struct llama_config *config, const struct memory_plan_settings *run,
                         struct memory_check *out);

/* The same for a run that is about to begin. If memory is too small, rank 0 prints the plan (unless
 * --quiet) and reports in one line, and all ranks return -1. Returns 0, or -1 also after reporting
 * another error. */
int memory_check(const struct options *options, const struct lossynet_world *world,
                 const struct llama_config *config, const struct memory_plan_settings *run);

#endif
