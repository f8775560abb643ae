/* preflight.h — --preflight: checks the nodes of a run in a minute, before the run takes days.
 *
 *     preflight.c           the mode: gathers results; prints a table by node, a line per fault
 *     preflight_host.c      examines a rank's host: its device and disk
 *     preflight_verdict.c   finds the node or path that is bad
 *
 * What a run checks at its start is checked as there: programs, options, files, devices, memory
 * (validate.c, comm/select.h, memory/memory_check.h). Then all ranks send test datagrams to all others,
 * over the link that training will use (lossynet/transport/probe.c). A measured fault counts only if a
 * second measurement confirms it.
 */
#ifndef LLMC_CLI_PREFLIGHT_H
#define LLMC_CLI_PREFLIGHT_H

#include <stdbool.h>

#include "llmc/backend/backend.h"
#include "llmc/options/options.h"
#include "lossynet/lossynet_trainer.h"

/* Runs the mode. Collective. Returns 0 if nothing was found, or -1 after printing the findings. */
int preflight(const struct options *options, const struct lossynet_world *world);

/* ---- a rank's host (preflight_host.c) ---- */

struct preflight_rank { /* ranks exchange its bytes; texts end with a zero byte */
    char host[64];
    char device[112];
    char wrong[320]; /* a fault that the rank itself found; "": none */
    bool on_device;
    double disk_free, disk_needed; /* bytes in --out, for all ranks; 0: not a host's first rank */
    double gflops;                 /* speed of a large matrix product */
};

/* Chooses what the rank computes on, and checks the memory, as a run does at its start. *disk: bytes of
 * all checkpoints. Collective. Returns 0, or -1 after reporting. */
int preflight_choose(const struct options *options, const struct lossynet_world *world,
                     const struct backend **be, double *disk);

/* Examines the host. `marker`: a file that rank 0 has created in --out, or NULL. */
void preflight_look(const struct options *options, const struct lossynet_world *world,
                    const struct backend *be, double disk, const char *marker,
                    struct preflight_rank *out);

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

/* Adds the faults that the ranks' reports show. */
void preflight_verdict_hosts(const struct preflight_nodes *n, const struct preflight_rank *rank,
                             struct preflight_findings *out);

/* Keeps only those findings of `out` that are also in `again`. */
void preflight_confirm(struct preflight_findings *out, const struct preflight_findings *again);

#endif
