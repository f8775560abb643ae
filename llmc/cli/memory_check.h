/* memory_check.h — whether a run fits the memory of its hosts, before it takes any.
 *
 * The kernel kills a process that takes too much, without a word. So the ranks tell each other what
 * each will need (memory_plan.h), and the sum over the ranks that share a host or a control group
 * is compared with what that has available.
 */
#ifndef LLMC_MEMORY_CHECK_H
#define LLMC_MEMORY_CHECK_H

#include "llmc/cli/memory_plan.h"
#include "llmc/cli/options.h"
#include "llmc/util/host_memory.h"
#include "lossynet/lossynet.h"

#ifdef __cplusplus
extern "C" {
#endif

struct memory_demand { /* of a rank; travels between ranks as it is */
    char host[64];
    double needed; /* bytes that it will take */
    int32_t limits;
    struct host_memory_limit limit[HOST_MEMORY_LIMITS];
};

struct memory_check {
    char host[64];
    char limit[104];          /* what has so little: "the host", a control group */
    double needed, available; /* bytes; of all ranks that share it */
    int ranks;                /* that share it */
    bool fits;
};

/* Finds the host or control group with the least room. */
void memory_check_find(const struct memory_demand *all, int ranks, struct memory_check *out);

/* The same, of all ranks. Collective; all ranks get the same. run: what this rank will need.
 * Returns 0, or -1 after reporting. */
int memory_check_measure(const struct options *options, const struct lossynet_world *world,
                         const struct llama_config *config, const struct memory_plan_settings *run,
                         struct memory_check *out);

/* The same for a run that is about to begin. Where memory is lacking, rank 0 prints the plan
 * (unless --quiet) and reports in one line. Returns 0, or -1 where memory is lacking or after
 * reporting. */
int memory_check(const struct options *options, const struct lossynet_world *world,
                 const struct llama_config *config, const struct memory_plan_settings *run);

#ifdef __cplusplus
}
#endif
#endif
