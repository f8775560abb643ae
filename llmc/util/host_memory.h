/* host_memory.h — finds the limits of a process's memory, and chooses the NUMA node that it takes
 * memory from. Limits are those of the host and of the process's control groups (versions 1 and 2).
 */
#ifndef LLMC_HOST_MEMORY_H
#define LLMC_HOST_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { HOST_MEMORY_LIMITS = 4 };

struct host_memory_limit { /* processes that have a limit with the same id share it */
    uint64_t id;
    double available; /* bytes that these processes could take now, including swap space */
    char name[104];   /* for messages: "the host", "control group /x (at most 8.0 GB)" */
};

/* Lists the host's limit first, then the tightest limits of control groups. root: "", or a
 * directory that has its own proc and sys (tests). Returns the number of limits; 0: nothing could
 * be read. */
int host_memory_limits(const char *root, struct host_memory_limit limit[HOST_MEMORY_LIMITS]);

/* A number that is the same in all containers of a host, and different on each host. */
uint64_t host_memory_host(const char *root);

/* The NUMA node to which a PCI device is attached; -1 if it is unknown or there is only one node.
 * address: as on the bus, "0000:17:00.0", in lower or upper case. */
int host_memory_node_of(const char *root, const char *address);

/* Sets the NUMA node of memory that the calling thread writes first from now on, if that node has
 * room. -1: as it was before the first of these calls, perhaps by numactl. Uses Linux's
 * set_mempolicy(2). Returns false if the system refuses it, as in some containers; then nothing has
 * changed. */
bool host_memory_prefer(int node);

#ifdef __cplusplus
}
#endif
#endif
