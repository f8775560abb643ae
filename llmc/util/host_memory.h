/* host_memory.h — what limits the memory that a process may take: the host, and the control groups
 * (versions 1 and 2) that the process belongs to; and which part of the host's memory it takes.
 */
#ifndef LLMC_HOST_MEMORY_H
#define LLMC_HOST_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { HOST_MEMORY_LIMITS = 4 };

struct host_memory_limit { /* all processes that have a limit with the same id share it */
    uint64_t id;
    double available; /* bytes that they could take now, swap space included */
    char name[104];   /* for messages: "the host", "control group /x (at most 8.0 GB)" */
};

/* The host's limit first, then the tightest of the control groups. root: "", or a directory that
 * has a proc and a sys of its own (tests). Returns how many there are; 0: nothing could be read. */
int host_memory_limits(const char *root, struct host_memory_limit limit[HOST_MEMORY_LIMITS]);

/* The NUMA node that a device of the PCI bus is attached to, -1 where it is unknown or there is one
 * node only. address: as the bus has it, "0000:17:00.0", in letters of either case. */
int host_memory_node_of(const char *root, const char *address);

/* What the calling thread writes first from now on is memory of this node, where that has room; -1:
 * of the node that the thread runs on, as at the start. Linux's set_mempolicy(2); false where it is
 * refused, as in some containers, and nothing has changed. */
bool host_memory_prefer(int node);

#ifdef __cplusplus
}
#endif
#endif
