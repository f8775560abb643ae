/* preflight.c — see preflight.h. */
#include "llmc/cli/preflight.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/util/file.h"
#include "llmc/comm/common_facts.h"
#include "llmc/comm/settings.h"
#include "llmc/log/error.h"

static const double PAIRINGS_SECONDS =
    24; /* of all pairings of a measurement; there may be two measurements */
static const double PAIRING_MOST = 0.5; /* of one pairing */

struct flight {
    const struct options *options;
    struct lossynet_world world;
    struct preflight_rank *rank;
    int *node;          /* [ranks] */
    const char **names; /* [nodes] */
    int nodes;
    struct lossynet_path *paths; /* [ranks * ranks] */
    struct preflight_traffic *traffic;
    char marker[FILE_PATH_BYTES]; /* the file that rank 0 creates in --out; "": none */
    double seconds;               /* of a pairing */
    const char *link;
};

static void flight_release(struct flight *f) {
    free(f->traffic);
    free(f->paths);
    free(f->names);
    free(f->node);
    free(f->rank);
}

static int flight_allocate(struct flight *f) {
    const size_t ranks = (size_t)f->world.ranks;
    f->rank = calloc(ranks, sizeof *f->rank);
    f->node = calloc(ranks, sizeof *f->node);
    f->names = calloc(ranks, sizeof *f->names);
    f->paths = calloc(ranks * ranks, sizeof *f->paths);
    f->traffic = calloc(ranks, sizeof *f->traffic);
    if (f->rank && f->node && f->names && f->paths && f->traffic) return 0;
    return log_out_of_memory("the list of ranks", (double)(ranks * ranks * sizeof *f->paths));
}

static int exchange_results(struct flight *f) {
    return lossynet_bootstrap_gather(&f->world, f->rank, sizeof *f->rank) ? -1 : 0;
}

/* Hosts are distinguished by their names. */
static void number_nodes(struct flight *f) {
    for (int r = 0; r < f->world.ranks; r++) {
        int node = 0;
        while (node < f->nodes && strcmp(f->names[node], f->rank[r].host)) node++;
        if (node == f->nodes) f->names[f->nodes++] = f->rank[r].host;
        f->node[r] = node;
    }
}

/* Rank 0 creates a file in --out, and the other ranks look for it. */
static int leave_marker(struct flight *f) {
    const char *out = f->options->out;
    if (!out || file_join(f->marker, out, ".preflight")) return out ? -1 : 0;
    if (f->world.rank > 0) return 0;
    if (file_make_directory(out)) return -1;
    const int descriptor = open(f->marker, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (descriptor < 0 || close(descriptor)) return log_error("cannot write to --out '%s'", out);
    return 0;
}

/* Examines each rank's host, and collects the results of all ranks. */
static int look(struct flight *f) {
    struct preflight_rank *mine = &f->rank[f->world.rank];
    const struct backend *be;
    double disk;
    gethostname(mine->host, sizeof mine->host - 1);
    if (preflight_choose(f->options, &f->world, &be, &disk) || leave_marker(f) ||
        exchange_results(f))
        return -1;
    number_nodes(f);
    preflight_look(f->options, &f->world, be, disk, *f->marker ? f->marker : NULL, mine);
    if (exchange_results(f)) return -1; /* all have looked for the file */
    if (f->world.rank == 0 && *f->marker) unlink(f->marker);
    return 0;
}

static int measure(struct flight *f, const struct preflight_nodes *n,
                   struct preflight_findings *out) {
    const size_t elements = 1;
    const struct param_layout one = {.buckets = 1, .bucket_elements = (size_t *)&elements};
    const struct lossynet_settings settings =
        comm_settings(f->options, &one, f->world.ranks, f->world.ranks, false);
    if (lossynet_probe(&f->world, &settings, f->node, f->seconds, f->paths, &f->link)) return -1;
    preflight_verdict_network(n, f->paths, out);
    return 0;
}

/* ---- the table ---- */

/* Which columns the table has. */
struct columns {
    bool disk, network;
};

static void print_heading(const struct columns *c) {
    printf("%-20s %5s", "", "");
    if (c->disk) printf(" %17s", "disk of --out, GB");
    printf(" %8s", "GFLOP/s");
    if (c->network) printf(" %15s", "Gbit/s");
    printf("\n%-20s %5s", "node", "ranks");
    if (c->disk) printf(" %8s %8s", "needed", "free");
    printf(" %8s", "per rank");
    if (c->network) printf(" %7s %7s %7s", "in", "out", "lost");
    printf("\n");
}

/* Prints the worst value of a node's ranks in each column. Loss is over all packets that
 * arrived. */
static void print_node(const struct flight *f, int node, const struct columns *c) {
    const struct preflight_rank *first = NULL;
    double in = INFINITY, out = INFINITY, gflops = INFINITY;
    double sent = 0, arrived = 0;
    int ranks = 0;
    for (int r = 0; r < f->world.ranks; r++) {
        const struct preflight_rank *k = &f->rank[r];
        if (f->node[r] != node) continue;
        if (!first) first = k;
        ranks++;
        in = fmin(in, f->traffic[r].in);
        out = fmin(out, f->traffic[r].out);
        gflops = fmin(gflops, k->gflops);
        for (int s = 0; s < f->world.ranks; s++) {
            const struct lossynet_path *p = &f->paths[s * f->world.ranks + r];
            if (f->nodes > 1 && f->node[s] == node) continue;
            sent += (double)p->sent;
            arrived += (double)p->arrived;
        }
    }
    if (!first) return; /* every node has a rank */
    printf("%-20.20s %5d", first->host, ranks);
    if (c->disk) printf(" %8.3f %8.1f", first->disk_needed / 1e9, first->disk_free / 1e9);
    printf(" %8.0f", gflops);
    if (c->network)
        printf(" %7.2f %7.2f %6.2f%%", in, out, sent > 0 ? 100 * fmax(0, 1 - arrived / sent) : 0);
    printf("\n");
}

static void print_table(const struct flight *f) {
    const struct preflight_rank *first = &f->rank[0];
    const int ranks = f->world.ranks;
    const struct columns c = {first->disk_needed > 0, ranks > 1};
    printf("pre-flight of %d rank%s on %d node%s", ranks, ranks > 1 ? "s" : "", f->nodes,
           f->nodes > 1 ? "s" : "");
    if (ranks > 1)
        printf(", %d pairings of %.2f s over %s (rates: with the best %s)", ranks - 1, f->seconds,
               f->link, f->nodes > 1 ? "rank of other nodes" : "other rank");
    printf("\n%s\n\n", first->device);
    print_heading(&c);
    for (int node = 0; node < f->nodes; node++) print_node(f, node, &c);
    printf("\n");
}

static void print_findings(const struct flight *f, const struct preflight_findings *found) {
    const int kept = found->count < PREFLIGHT_FINDINGS ? found->count : PREFLIGHT_FINDINGS;
    fflush(stdout);
    log_rank = -1; /* lines that name nodes */
    for (int i = 0; i < kept; i++) log_error("%s", found->list[i].text);
    if (found->count > kept) log_error("and %d findings more", found->count - kept);
    if (!found->count)
        printf("all is well: %d node%s, %d rank%s\n", f->nodes, f->nodes > 1 ? "s" : "",
               f->world.ranks, f->world.ranks > 1 ? "s" : "");
}

static int fly(struct flight *f, struct preflight_findings *found) {
    if (flight_allocate(f) || look(f)) return -1;
    const struct preflight_nodes n = {f->world.ranks, f->nodes, f->node, f->names};
    const double seconds = PAIRINGS_SECONDS / f->world.ranks;
    f->seconds = seconds < PAIRING_MOST ? seconds : PAIRING_MOST;
    if (measure(f, &n, found)) return -1;
    if (found->count) {
        struct preflight_findings again;
        again.count = 0;
        if (measure(f, &n, &again)) return -1;
        preflight_confirm(found, &again);
    }
    preflight_traffic(&n, f->paths, f->traffic);
    preflight_verdict_hosts(&n, f->rank, found);
    return 0;
}

int preflight(const struct options *o, const struct lossynet_world *world) {
    struct flight f;
    static struct preflight_findings found;
    memset(&f, 0, sizeof f);
    f.options = o;
    f.world = *world;
    int failed = common_threads(world, o->threads) ? -1 : fly(&f, &found);
    if (!failed) {
        if (world->rank == 0) {
            print_table(&f);
            print_findings(&f, &found);
        }
        failed = found.count > 0 ? -1 : 0;
    }
    flight_release(&f);
    return failed;
}
