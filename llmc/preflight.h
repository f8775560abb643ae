/* preflight.h — --preflight: a minute on the nodes of a run, before days on them.
 *
 *     preflight.c         the mode: gathers, prints a table by node and a line for what is wrong
 *     preflight_host.c    what a rank sees: program, data, memory, GPU, disk
 *     preflight_judge.c   what is wrong, and with which node
 *
 * Every rank looks at its host, then all send test datagrams to all others, over the link that
 * training will use (lossynet/probe.c). What is measured counts only when it shows twice.
 */
#ifndef LLMC_PREFLIGHT_H
#define LLMC_PREFLIGHT_H

#include <stdbool.h>

#include "llmc/checksum.h"
#include "llmc/options.h"
#include "lossynet/lossynet.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The mode. Collective. 0: all is well; -1: something was found and told. */
int preflight(const struct options *options, const struct lossynet_world *world);

/* ---- what a rank sees (preflight_host.c) ---- */

struct preflight_rank { /* travels between ranks as it is; texts end with 0 */
    char host[64];
    char program[CHECKSUM_TEXT_BYTES];
    char data[CHECKSUM_TEXT_BYTES]; /* of samples of all files that the run reads; "": none named */
    char device[112], driver[32];   /* driver "": none */
    char wrong[240];                /* found by the rank itself; "": nothing */
    bool on_device;
    double memory_free, memory_needed; /* bytes: of the host in all; by this rank */
    double device_free, device_needed;
    double disk_free, disk_needed; /* of --out, for all ranks; needed 0: no --out */
    double lockable;               /* bytes of memory that may be pinned */
    double gflops;                 /* of a large matrix product */
    double clock; /* seconds since 1970, read when all ranks are at the same place */
};

/* What a rank needs, from arithmetic alone. */
struct preflight_needs {
    double host, device, disk; /* bytes; host: without a device; disk: of all ranks */
    double beside_device;      /* of the host, with one */
    bool half;                 /* bfloat16 on the device */
};

/* 0, or -1 after reporting. */
int preflight_needs(const struct options *options, const struct lossynet_world *world,
                    struct preflight_needs *out);

/* Takes `device_needed` of the device's memory, if there is one; preflight_release gives it back,
 * when all ranks of the host have taken theirs. `marker`: a file that rank 0 has made in --out, or
 * NULL. */
void preflight_look(const struct options *options, const struct lossynet_world *world,
                    const struct preflight_needs *needs, const char *marker,
                    struct preflight_rank *out);
void preflight_release(void);

/* ---- what is wrong (preflight_judge.c) ---- */

enum { PREFLIGHT_FINDINGS = 64 };

struct preflight_findings {
    int count; /* may be larger than what is kept */
    struct preflight_finding {
        int kind, a, b; /* the same in two measurements: the same fault */
        char text[400]; /* "node X: ..." */
    } list[PREFLIGHT_FINDINGS];
};

/* Of a rank, with the ranks of other nodes; where there is one node only, with all others. */
struct preflight_traffic {
    double in, out;           /* 10^9 bit/s, from and to the peer with which it was best */
    double lost_in, lost_out; /* share, likewise */
};

struct preflight_nodes {
    int ranks, nodes;
    const int *node;          /* [ranks], 0, 1, ... in order of their first ranks */
    const char *const *names; /* [nodes] */
};

void preflight_traffic(const struct preflight_nodes *n, const struct lossynet_path *paths,
                       struct preflight_traffic *out /* [ranks] */);

/* Adds what the paths (lossynet_probe) tell. */
void preflight_judge_network(const struct preflight_nodes *n, const struct lossynet_path *paths,
                             struct preflight_findings *out);

/* Adds what the ranks told. pinned: the link takes memory that may be pinned. */
void preflight_judge_hosts(const struct preflight_nodes *n, const struct preflight_rank *rank,
                           bool pinned, struct preflight_findings *out);

/* Keeps of `out` what is in `again`, too. */
void preflight_confirm(struct preflight_findings *out, const struct preflight_findings *again);

#ifdef __cplusplus
}
#endif
#endif
