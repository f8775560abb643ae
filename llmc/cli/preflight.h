/* preflight.h — --preflight: checks the nodes of a run in a minute, before the run takes days.
 *
 *     preflight.c           the mode: gathers results; prints a table by node, a line per fault
 *     preflight_host.c      examines a rank's host: program, data, memory, GPU, disk
 *     preflight_verdict.c   finds the node or path that is bad
 *
 * Every rank examines its host. Then all ranks send test datagrams to all others, over the link
 * that training will use (lossynet/transport/probe.c). A measured fault counts only if a second
 * measurement confirms it.
 */
#ifndef LLMC_CLI_PREFLIGHT_H
#define LLMC_CLI_PREFLIGHT_H

#include <stdbool.h>

#include "llmc/checkpoint/checksum.h"
#include "llmc/log/error.h"
#include "llmc/options/options.h"
#include "lossynet/lossynet_trainer.h"

/* Runs the mode. Collective. Returns 0 if nothing was found, or -1 after printing the findings. */
int preflight(const struct options *options, const struct lossynet_world *world);

/* ---- a rank's host (preflight_host.c) ---- */

struct preflight_rank { /* ranks exchange its bytes; texts end with a zero byte */
    char host[64];
    char program[CHECKSUM_TEXT_BYTES];
    char data[CHECKSUM_TEXT_BYTES]; /* of what ranks compare at the start (common_facts.h) */
    char device[112], driver[32];   /* driver "": none */
    char wrong[LOG_BYTES];          /* a fault that the rank itself found; "": none */
    bool on_device;
    double memory_free, memory_needed; /* bytes: free on the host; needed by this rank */
    double device_free, device_needed;
    double disk_free, disk_needed; /* in --out, for all ranks; needed 0: no --out */
    double lockable;               /* bytes of memory that may be pinned */
    double gflops;                 /* speed of a large matrix product */
    double clock; /* seconds since 1970, read by all ranks at about the same time */
};

/* Memory and disk space that a rank needs, by arithmetic. */
struct preflight_needs {
    double host, device, disk; /* bytes; host: without a device; disk: for all ranks */
    double beside_device;      /* bytes of host memory, with a device */
    bool bf16;                 /* on the device */
};

/* Returns 0, or -1 after reporting. */
int preflight_needs(const struct options *options, const struct lossynet_world *world,
                    struct preflight_needs *out);

/* Examines the host. Allocates `device_needed` of the device's memory, if there is one.
 * preflight_release frees it; call it after all ranks of the host have allocated theirs.
 * `marker`: a file that rank 0 has created in --out, or NULL. */
void preflight_look(const struct options *options, const struct lossynet_world *world,
                    const struct preflight_needs *needs, const char *marker,
                    struct preflight_rank *out);
void preflight_release(void);

/* ---- faults (preflight_verdict.c) ---- */

enum { PREFLIGHT_FINDINGS = 64 };

struct preflight_findings {
    int count; /* of all findings; may be larger than the list */
    struct preflight_finding {
        int kind, a, b; /* equal in two measurements if it is the same fault */
        char text[400]; /* "node X: ..." */
    } list[PREFLIGHT_FINDINGS];
};

/* Traffic of a rank with the ranks of other nodes, or, if there is one node only, with all other
 * ranks. */
struct preflight_traffic {
    double in, out;           /* 10^9 bit/s, from and to the best peer */
    double lost_in, lost_out; /* share lost, from and to the best peer */
};

struct preflight_nodes {
    int ranks, nodes;
    const int *node;          /* [ranks]: nodes are numbered in order of their first ranks */
    const char *const *names; /* [nodes] */
};

void preflight_traffic(const struct preflight_nodes *n, const struct lossynet_path *paths,
                       struct preflight_traffic *out /* [ranks] */);

/* Adds the faults that the paths (lossynet_probe) show. */
void preflight_verdict_network(const struct preflight_nodes *n, const struct lossynet_path *paths,
                               struct preflight_findings *out);

/* Adds the faults that the ranks' reports show. pinned: the link needs pinned memory. */
void preflight_verdict_hosts(const struct preflight_nodes *n, const struct preflight_rank *rank,
                             bool pinned, struct preflight_findings *out);

/* Keeps only those findings of `out` that are also in `again`. */
void preflight_confirm(struct preflight_findings *out, const struct preflight_findings *again);

#endif
