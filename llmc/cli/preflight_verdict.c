/* preflight_verdict.c — decides which nodes are bad, from the measurements of all ranks. See
 * preflight.h.
 *
 * A path has two ends, and a slow path does not show which end is slow. So a rank is rated by its
 * best peer: a rank that is slow with every peer is slow itself. Its rating is
 * compared with the median over all ranks. Paths within a node are not compared, because their
 * speed is the processor's, which other ranks use at the same time.
 */
#include "llmc/cli/preflight.h"

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double RATE_LEAST = 0.8; /* a rank below this share of the median is slow */
static const double PATH_LEAST = 0.5; /* the same for a path; there are many paths */
static const double LOSS_MOST =
    0.005; /* a rank that loses this much more than the median is lossy */
static const double PATH_LOSS_MOST = 0.02; /* the same for a path */
static const double COMPUTE_LEAST = 0.8;   /* a GPU below this share of the median is slow */

enum kind { NETWORK, NODE, RANK, PATH, INSIDE, HOST };

static struct preflight_finding *add(struct preflight_findings *f, int kind, int a, int b) {
    static struct preflight_finding overflow;
    struct preflight_finding *new = f->count < PREFLIGHT_FINDINGS ? &f->list[f->count] : &overflow;
    f->count++;
    new->kind = kind;
    new->a = a;
    new->b = b;
    new->text[0] = 0;
    return new;
}

__attribute__((format(printf, 2, 3))) static void say(struct preflight_finding *f,
                                                      const char *format, ...) {
    const size_t used = strlen(f->text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(f->text + used, sizeof f->text - used, format, arguments);
    va_end(arguments);
}

void preflight_confirm(struct preflight_findings *out, const struct preflight_findings *again) {
    int kept = 0;
    const int count = out->count < PREFLIGHT_FINDINGS ? out->count : PREFLIGHT_FINDINGS;
    for (int i = 0; i < count; i++) {
        bool found = false;
        for (int j = 0; j < again->count && j < PREFLIGHT_FINDINGS; j++)
            found |= out->list[i].kind == again->list[j].kind &&
                     out->list[i].a == again->list[j].a && out->list[i].b == again->list[j].b;
        if (found) out->list[kept++] = out->list[i];
    }
    out->count = kept;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median of `count` numbers, `stride` doubles apart. Of two numbers in the middle, it is the
 * lower. */
static double median(const double *first, int count, size_t stride) {
    double *sorted = malloc((size_t)count * sizeof *sorted), result = *first;
    if (sorted) {
        for (int i = 0; i < count; i++) sorted[i] = first[(size_t)i * stride];
        qsort(sorted, (size_t)count, sizeof *sorted, ascending);
        result = sorted[(count - 1) / 2];
    }
    free(sorted);
    return result;
}

/* ---- network ---- */

static const struct lossynet_path *path(const struct preflight_nodes *n,
                                        const struct lossynet_path *paths, int from, int to) {
    return &paths[(size_t)from * (size_t)n->ranks + (size_t)to];
}

/* With duplicates, more packets may arrive than were sent. */
static double lost(const struct lossynet_path *p) {
    return p->sent && p->arrived < p->sent ? 1 - (double)p->arrived / (double)p->sent : 0;
}

static const struct preflight_traffic NONE = {0, 0, 1, 1};

/* Of two ranks together, which are as good as the better one. */
static struct preflight_traffic better(struct preflight_traffic a, struct preflight_traffic b) {
    return (struct preflight_traffic){fmax(a.in, b.in), fmax(a.out, b.out),
                                      fmin(a.lost_in, b.lost_in), fmin(a.lost_out, b.lost_out)};
}

void preflight_traffic(const struct preflight_nodes *n, const struct lossynet_path *paths,
                       struct preflight_traffic *out) {
    for (int r = 0; r < n->ranks; r++) {
        out[r] = NONE;
        for (int peer = 0; peer < n->ranks; peer++) {
            if (peer == r || (n->nodes > 1 && n->node[peer] == n->node[r])) continue;
            const struct lossynet_path *in = path(n, paths, peer, r), *to = path(n, paths, r, peer);
            out[r] =
                better(out[r], (struct preflight_traffic){in->gbps, to->gbps, lost(in), lost(to)});
        }
    }
}

/* Compares traffic with the median. If it is bad, adds a fault of the kind NODE or RANK, and returns it. */
static struct preflight_finding *judge(struct preflight_findings *out, int kind, int number,
                                       const char *name, const struct preflight_traffic *t,
                                       const struct preflight_traffic *usual) {
    const double in = t->in / usual->in, sent = t->out / usual->out;
    const bool slow_in = in < RATE_LEAST, slow_out = sent < RATE_LEAST;
    const struct {
        bool is;
        const char *format;
        double percent;
    } bad[] = {{slow_in,
                in > 0 ? "received %.0f%% of the median rate from every peer"
                       : "received nothing from any peer",
                100 * in},
               {slow_out,
                sent > 0 ? "sent %.0f%% of the median rate to every peer"
                         : "sent nothing that arrived at any peer",
                100 * sent},
               {t->in > 0 && t->lost_in > usual->lost_in + LOSS_MOST,
                "lost %.1f%% of what every peer sent to it", 100 * t->lost_in},
               {t->out > 0 && t->lost_out > usual->lost_out + LOSS_MOST,
                "lost %.1f%% of what it sent to every peer", 100 * t->lost_out}};
    struct preflight_finding *f = NULL;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (!bad[i].is) continue;
        if (f) say(f, "; ");
        if (!f) say(f = add(out, kind, number, 0), "%s: ", name);
        say(f, bad[i].format, bad[i].percent);
    }
    return f;
}

/* Finds bad nodes, and bad ranks of good nodes. named: [nodes]: receives which nodes are bad. */
static void judge_ends(const struct preflight_nodes *n, const struct preflight_traffic *t,
                       const struct preflight_traffic *usual, bool *named,
                       struct preflight_findings *out) {
    char name[128];
    for (int node = 0; node < n->nodes; node++) {
        struct preflight_traffic all = NONE;
        for (int r = 0; r < n->ranks; r++)
            if (n->node[r] == node) all = better(all, t[r]);
        snprintf(name, sizeof name, "node %s", n->names[node]);
        struct preflight_finding *f = judge(out, NODE, node, name, &all, usual);
        if (f) say(f, ": look at its port");
        named[node] = f;
    }
    for (int r = 0; r < n->ranks; r++) {
        if (named[n->node[r]]) continue;
        snprintf(name, sizeof name, "node %s, rank %d", n->names[n->node[r]], r);
        struct preflight_finding *f = judge(out, RANK, r, name, &t[r], usual);
        if (f) say(f, ": look at its adapter and --interface");
    }
}

/* Means over the ranks of two nodes. */
static void between(const struct preflight_nodes *n, const struct lossynet_path *paths, int from,
                    int to, double *gbps, double *lost) {
    double sent = 0, arrived = 0;
    int count = 0;
    *gbps = 0;
    for (int s = 0; s < n->ranks; s++) {
        for (int r = 0; r < n->ranks; r++) {
            if (n->node[s] != from || n->node[r] != to) continue;
            const struct lossynet_path *p = path(n, paths, s, r);
            *gbps += p->gbps;
            sent += (double)p->sent;
            arrived += (double)p->arrived;
            count++;
        }
    }
    *gbps /= count;
    *lost = sent > arrived ? 1 - arrived / sent : 0;
}

/* Finds bad paths between good ends. With two nodes, nobody can tell which end is bad, so each
 * direction is compared with the better one. */
static void judge_paths(const struct preflight_nodes *n, const struct lossynet_path *paths,
                        const bool *named, struct preflight_findings *out) {
    const size_t nodes = (size_t)n->nodes, all = nodes * nodes;
    double *rate = calloc(2 * all, sizeof *rate), *loss = rate ? rate + all : NULL;
    int count = 0;
    if (!rate) return;
    for (int i = 0; i < n->nodes; i++)
        for (int j = 0; j < n->nodes; j++)
            if (i != j) {
                between(n, paths, i, j, &rate[count], &loss[count]);
                count++;
            }
    const bool two = n->nodes == 2;
    const double usual = two ? fmax(rate[0], rate[1]) : median(rate, count, 1);
    const double usual_loss = two ? fmin(loss[0], loss[1]) : median(loss, count, 1);
    count = 0;
    for (int i = 0; i < n->nodes; i++) {
        for (int j = 0; j < n->nodes; j++) {
            if (i == j) continue;
            const double gbps = rate[count], gone = loss[count++];
            const bool slow = gbps < (two ? RATE_LEAST : PATH_LEAST) * usual;
            const bool lossy = gone > usual_loss + (two ? LOSS_MOST : PATH_LOSS_MOST);
            if (named[i] || named[j] || !(slow || lossy)) continue;
            say(add(out, PATH, i, j),
                "from node %s to node %s: %.0f%% of the %s, %.1f%% lost: look at the path between "
                "them%s",
                n->names[i], n->names[j], 100 * gbps / usual,
                two ? "other direction's rate" : "median rate", 100 * gone,
                two ? " (of two nodes, nobody can tell which end it is)" : "");
        }
    }
    free(rate);
}

static void judge_inside(const struct preflight_nodes *n, const struct lossynet_path *paths,
                         struct preflight_findings *out) {
    for (int s = 0; s < n->ranks; s++)
        for (int r = 0; r < n->ranks; r++) {
            const struct lossynet_path *p = path(n, paths, s, r);
            if (s == r || n->node[s] != n->node[r] || !p->sent || p->arrived) continue;
            say(add(out, INSIDE, s, r),
                "node %s: nothing that rank %d sent to rank %d beside it arrived: look at its "
                "firewall and at --interface",
                n->names[n->node[s]], s, r);
        }
}

void preflight_verdict_network(const struct preflight_nodes *n, const struct lossynet_path *paths,
                               struct preflight_findings *out) {
    const size_t ranks = (size_t)n->ranks,
                 stride = sizeof(struct preflight_traffic) / sizeof(double);
    struct preflight_traffic *t = malloc(ranks * sizeof *t), usual;
    bool *named = calloc((size_t)n->nodes, sizeof *named);
    if (!t || !named) goto release;
    judge_inside(n, paths, out);
    if (n->nodes < 2) goto release;
    preflight_traffic(n, paths, t);
    usual = (struct preflight_traffic){
        median(&t->in, n->ranks, stride), median(&t->out, n->ranks, stride),
        median(&t->lost_in, n->ranks, stride), median(&t->lost_out, n->ranks, stride)};
    if (usual.in <= 0) {
        say(add(out, NETWORK, 0, 0), "no datagram came from any other node at most ranks: are they "
                                     "allowed between the nodes "
                                     "(firewall), and is --interface right?");
        goto release;
    }
    if (n->nodes > 2) judge_ends(n, t, &usual, named, out);
    judge_paths(n, paths, named, out);
release:
    free(named);
    free(t);
}

/* ---- hosts ---- */

void preflight_verdict_hosts(const struct preflight_nodes *n, const struct preflight_rank *rank,
                             struct preflight_findings *out) {
    const size_t stride = sizeof *rank / sizeof(double);
    const double gflops = median(&rank->gflops, n->ranks, stride);
    for (int r = 0; r < n->ranks; r++) {
        const struct preflight_rank *k = &rank[r];
        if (k->wrong[0]) say(add(out, HOST, r, 0), "node %s, rank %d: %s", k->host, r, k->wrong);
        if (k->on_device && k->gflops < COMPUTE_LEAST * gflops)
            say(add(out, HOST, r, 0),
                "node %s, rank %d: its GPU computes at %.0f%% of the median rate: look at its "
                "clocks and temperature (nvidia-smi -q -d CLOCK,PERFORMANCE)",
                k->host, r, 100 * k->gflops / gflops);
        if (k->disk_needed > k->disk_free)
            say(add(out, HOST, r, 0),
                "node %s: checkpoints need %.1f GB in --out, and %.1f GB are free there: a smaller "
                "--keep needs less",
                k->host, k->disk_needed / 1e9, k->disk_free / 1e9);
    }
}
