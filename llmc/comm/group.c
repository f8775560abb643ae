/* group.c — see group.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "llmc/comm/group.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "llmc/log/error.h"

/* Bytes of a vector that the group's ranks share, or of its first elements. */
static size_t shared_bytes(const struct group *g, size_t elements) {
    return elements * (g->placement->copies_bf16 ? sizeof(uint16_t) : sizeof(float));
}

/* The bytes that a member gives: its gradient, and the first member also the replica. */
static size_t vectors_of(const struct group *g, int place) {
    const struct placement *p = g->placement;
    const struct array_sizes sizes = worker_sizes(g->layout, p, 0);
    const enum array params = p->staged ? ARRAY_COMM_PARAMS : ARRAY_PARAMS;
    const enum array grads = p->copy_slots ? ARRAY_COMM_SLOTS
                             : p->staged   ? ARRAY_COMM_GRADS
                                           : ARRAY_GRADS;
    double bytes = place == 0 ? array_bytes(params, p, &sizes) : 0;
    if (p->trains && !g->peers.mapped) bytes += array_bytes(grads, p, &sizes);
    return (size_t)bytes;
}

static int no_pinned(const struct group *g, size_t bytes) {
    return log_error("--group %d: no %.1f GB of pinned memory (ulimit -l tells how much a process "
                     "may lock)",
                     g->size, (double)bytes / 1e9);
}

/* Pins all memory that the group shares, since a GPU copies from it and adds it up. */
static int pin(struct group *g) {
    for (int i = 0; i < g->size; i++) {
        const size_t bytes = vectors_of(g, i);
        if (bytes && !g->be->pin(shared_memory_of(g->host, i), bytes)) return no_pinned(g, bytes);
        g->pinned = i + 1;
    }
    return 0;
}

/* ---- slots: a member's sums ---- */

/* Notes the pages of bytes from ... to - 1 of the sums. Calls go in ascending order of bytes. */
static void note_part(struct group_slots *s, size_t from, size_t to) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t begin = from / page * page, end = (to + page - 1) / page * page;
    struct worker_part *last = s->parts ? &s->part[s->parts - 1] : NULL;
    const size_t noted = last ? (size_t)((char *)last->first - (char *)s->sum) + last->bytes : 0;
    if (last && begin <= noted) {
        if (end > noted) last->bytes += end - noted;
        return;
    }
    s->part[s->parts++] = (struct worker_part){(float *)((char *)s->sum + begin), end - begin};
}

/* Reserves addresses for a whole vector, and pins pages only for the parts that this member sends
 * or averages. */
static int open_sums(struct group *g, int place) {
    struct group_slots *s = &g->slots;
    const int buckets = g->layout->buckets;
    const struct array_sizes sizes = worker_sizes(g->layout, g->placement, 0);
    s->bytes = (size_t)array_bytes(ARRAY_COMM_SUMS, g->placement, &sizes);
    void *sum = mmap(NULL, s->bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (sum != MAP_FAILED) s->sum = (float *)sum;
    s->part = calloc((size_t)buckets * (size_t)g->workers, sizeof *s->part);
    if (!s->sum || !s->part) return log_out_of_memory("the sums of a group", (double)s->bytes);
    for (int b = 0; b < buckets; b++) {
        for (int owner = 0; owner < g->workers; owner++) {
            size_t offset, count;
            if (!lossynet_is_partner_of(g->comm, g->first + place, owner)) continue;
            lossynet_shard(g->comm, owner, b, &offset, &count);
            if (count) note_part(s, shared_bytes(g, offset), shared_bytes(g, offset + count));
        }
    }
    for (int i = 0; i < s->parts; i++) {
        if (!g->be->pin(s->part[i].first, s->part[i].bytes)) return no_pinned(g, s->part[i].bytes);
        s->pinned = i + 1;
    }
    return 0;
}

static void close_sums(struct group *g) {
    struct group_slots *s = &g->slots;
    for (int i = 0; i < s->pinned; i++) g->be->unpin(s->part[i].first);
    if (s->sum) munmap(s->sum, s->bytes);
    free(s->part);
}

/* ---- peers: devices that read each other's memory ---- */

static void close_peers(const struct group *g, int place, const void **peer) {
    for (int i = 0; i < g->size; i++) {
        if (i != place && peer[i]) g->be->close_shared(peer[i]);
        peer[i] = NULL;
    }
}

/* Sets *all: whether `mine` is true for all workers. Returns 0, or -1 after reporting. */
static int true_of_all(const struct group *g, bool mine, bool *all) {
    bool *told = malloc((size_t)g->workers * sizeof *told);
    if (!told) return log_out_of_memory("the list of devices", 0);
    const int failed = lossynet_all_gather(g->comm, &mine, told, sizeof mine) ? -1 : 0;
    *all = !failed;
    for (int i = 0; i < g->workers && *all; i++) *all = told[i];
    free(told);
    return failed;
}

/* Opens the memory `mine` of all members, in `peer`. *done: this worked in all groups; otherwise
 * every rank has closed what it had opened. Returns 0, or -1 after reporting. */
static int open_peers(const struct group *g, int id, const void *mine, const void **peer,
                      bool *done) {
    const int place = id - g->first;
    struct backend_shared told = {{0}};
    struct backend_shared *all = calloc((size_t)g->workers, sizeof told);
    if (!all) return log_out_of_memory("the list of devices", 0);
    bool can = mine && g->be->share(mine, &told);
    int failed = lossynet_all_gather(g->comm, &told, all, sizeof told) ? -1 : 0;
    for (int i = 0; i < g->size && !failed; i++) {
        const void *memory = i == place ? mine : g->be->open_shared(&all[id - place + i]);
        peer[i] = memory;
        can = can && memory;
    }
    free(all);
    if (!failed) failed = true_of_all(g, can, done);
    if (failed || !*done) close_peers(g, place, peer);
    return failed;
}

/* Finds out whether members can read each other's memory, with a small block. */
static int try_peers(struct group *g, int id) {
    enum { BYTES = 2 << 20 }; /* CUDA shares whole blocks of this size, even for a part of one */
    bool closed;
    g->peers.grads = calloc((size_t)g->size, sizeof *g->peers.grads);
    g->peers.replica = calloc((size_t)g->size, sizeof *g->peers.replica);
    if (!g->peers.grads || !g->peers.replica)
        return log_out_of_memory("the list of a group's workers", 0);
    void *little = g->be->allocate(BYTES);
    const int failed = open_peers(g, id, little, g->peers.grads, &g->peers.mapped);
    close_peers(g, id - g->first, g->peers.grads);
    if (failed || true_of_all(g, true, &closed)) return -1;
    g->be->release(little); /* no rank has it open any more */
    return 0;
}

int group_open_peers(struct group *g, const struct worker *w) {
    bool done;
    if (!g->peers.mapped) return 0;
    if (open_peers(g, w->id, w->gradient.first, g->peers.grads, &done)) return -1;
    if (done && w->weights && open_peers(g, w->id, w->weights, g->peers.replica, &done)) return -1;
    return done ? 0
                : log_error("--group %d: the GPU of worker %d cannot read the memory of another "
                            "one's, which it could at first",
                            g->size, w->id);
}

/* ---- open and close ---- */

int group_open(struct group *g, const struct lossynet_world *world, int local, bool shares,
               double timeout) {
    g->slots.count = g->placement->copy_slots;
    if (!shares) return 0;
    const size_t P = g->layout->count;
    g->sum.ones = malloc((size_t)g->size * sizeof *g->sum.ones);
    g->sum.members = malloc((size_t)g->size * sizeof *g->sum.members);
    if (!g->sum.ones || !g->sum.members)
        return log_out_of_memory("the list of a group's workers", 0);
    for (int i = 0; i < g->size; i++) g->sum.ones[i] = 1;
    if (local == 1) {
        if (g->slots.count && try_peers(g, world->rank)) return -1;
        const size_t bytes = vectors_of(g, world->rank - g->first);
        if (shared_memory_open(world, g->first, g->size, bytes, timeout, &g->host)) return -1;
        if (!g->placement->staged) return 0;
        return pin(g) || (g->slots.count && open_sums(g, world->rank - g->first)) ? -1 : 0;
    }
    if (!g->placement->trains) return 0;
    g->apart = calloc((size_t)g->sets, sizeof *g->apart);
    for (int e = 0; g->apart && e < g->sets; e++) {
        g->apart[e] = (float *)g->be->allocate(P * sizeof(float));
        if (!g->apart[e]) return log_out_of_memory("a member's gradient", 4.0 * (double)P);
    }
    return g->apart ? 0 : log_out_of_memory("the list of gradients", 0);
}

void group_close(struct group *g) {
    close_sums(g);
    free(g->peers.grads), free(g->peers.replica);
    for (int e = 0; g->apart && e < g->sets; e++) g->be->release(g->apart[e]);
    free(g->apart);
    free(g->sum.ones);
    free(g->sum.members);
    for (int i = 0; i < g->pinned; i++)
        if (vectors_of(g, i)) g->be->unpin(shared_memory_of(g->host, i));
    shared_memory_close(g->host);
    memset(g, 0, sizeof *g);
}

/* The place of the copy of a member's gradient. */
static struct gradient_place copy_of(const struct group *g, int member) {
    const size_t before = member == 0 ? shared_bytes(g, g->layout->count) : 0;
    const struct gradient_place place = {
        (float *)((char *)shared_memory_of(g->host, member) + before), g->slots.count,
        param_layout_gradient_slot(g->layout)};
    return place;
}

void group_share_vectors(const struct group *g, struct worker *worker, int i) {
    struct worker *w = &worker[i];
    lossynet_group(g->comm, w->id, &w->group, &w->members);
    const struct worker *first = g->host ? w : &worker[i - (w->id - w->group)];
    if (g->host) {
        w->shares = !g->placement->staged, w->shares_comm = true;
        w->comm_params = (float *)shared_memory_of(g->host, 0);
        w->mapped = g->peers.mapped;
        if (g->placement->trains && !g->peers.mapped)
            w->comm_gradient = copy_of(g, w->id - w->group);
        w->comm_grads = g->slots.sum ? g->slots.sum : w->comm_gradient.first;
        w->part = g->slots.part, w->parts = g->slots.parts;
        if (w->shares) w->params = w->comm_params, w->grads = w->comm_grads;
    } else if (w != first) {
        w->shares = w->shares_comm = true;
        w->params = first->params, w->comm_params = first->comm_params;
        w->grads = first->grads, w->comm_grads = first->comm_grads;
    }
}

void group_work(const struct group *g, struct worker *worker, int local,
                void (*work)(void *context, struct worker *w, int set), void *context) {
    const bool in_turn = g->sets == 1 || g->be->on_device;
    for (int w = 0; w < local && in_turn; w++) work(context, &worker[w], 0);
    if (in_turn) return;
#pragma omp parallel for schedule(dynamic) num_threads(g->sets)
    for (int first = 0; first < local; first += g->size)
        for (int w = first; w < first + g->size && w < local; w++)
            work(context, &worker[w], omp_get_thread_num());
}

struct passes {
    bool (*pass)(void *context, struct worker *w, int set);
    void *context;
};

static void all_passes(void *context, struct worker *w, int set) {
    const struct passes *p = context;
    while (p->pass(p->context, w, set)) {
    }
}

/* The worker that a set computes after worker w: the next one of its group, or of its next group. */
static int next_of_set(const struct group *g, int w) {
    return (w + 1) % g->size ? w + 1 : w + 1 + (g->sets - 1) * g->size;
}

void group_passes(const struct group *g, struct worker *worker, int local,
                  bool (*pass)(void *context, struct worker *w, int set), void *context) {
    struct passes all = {pass, context};
    int at[BACKEND_SETS]; /* the worker that each set computes */
    if (!g->be->on_device) return group_work(g, worker, local, all_passes, &all);
    for (int set = 0; set < g->sets; set++) at[set] = set * g->size;
    g->be->sets_begin(g->sets);
    for (bool more = true; more;) {
        more = false;
        for (int set = 0; set < g->sets; set++) {
            if (at[set] >= local) continue;
            g->be->use_set(set);
            if (!pass(context, &worker[at[set]], set)) at[set] = next_of_set(g, at[set]);
            more = true;
        }
    }
    g->be->sets_end();
}

struct gradient_place group_gradient(const struct group *g, const struct worker *w, int set) {
    struct gradient_place place = w->gradient;
    if (g->apart && w->id > w->group) place.first = g->apart[set];
    return place;
}

/* to = the sum of n elements of `count` vectors, in order. to may be one of them. */
static void add(const struct group *g, float *to, const float *const *from, int count, size_t n) {
    const bool pinned =
        g->host && g->placement->staged; /* else vectors are in the backend's memory */
    if (!n) return;
    if (g->placement->copies_bf16 && g->peers.mapped)
        g->be->rounded_sum_pinned((uint16_t *)to, from, g->sum.ones, count, n, n);
    else if (g->placement->copies_bf16)
        g->be->rounded_sum_pinned_bf16((uint16_t *)to, (const uint16_t *const *)from, g->sum.ones,
                                       count, n, n);
    else
        (pinned ? g->be->weighted_sum_pinned : g->be->weighted_sum)(to, from, g->sum.ones, count, n,
                                                                    n);
}

bool group_gradient_done(const struct group *g, const struct worker *w, int set, int bucket) {
    if (!g->apart) return true;
    const size_t offset = param_layout_bucket_offset(g->layout, bucket);
    if (g->placement->rounds_to_bf16)
        g->be->round(group_gradient(g, w, set).first + offset, g->layout->bucket_elements[bucket]);
    if (w->id > w->group) {
        const float *const from[] = {w->grads + offset, g->apart[set] + offset};
        add(g, w->grads + offset, from, 2, g->layout->bucket_elements[bucket]);
    }
    return w->id == w->group + w->members - 1;
}

/* Adds up the part of a bucket that w sends or averages. */
static void add_bucket(const struct group *g, const struct worker *w, int bucket) {
    if (g->placement->staged) g->be->pinned_sums_begin();
    for (int owner = 0; owner < g->workers; owner++) {
        size_t offset, count;
        if (!lossynet_is_partner_of(g->comm, w->id, owner)) continue;
        lossynet_shard(g->comm, owner, bucket, &offset, &count);
        if (!count) continue;
        const size_t at = param_layout_gradient_at(
            g->layout, g->peers.mapped ? &w->gradient : &w->comm_gradient, offset);
        for (int i = 0; i < g->size; i++)
            g->sum.members[i] =
                g->peers.mapped
                    ? (const float *)g->peers.grads[i] + at
                    : (const float *)((const char *)copy_of(g, i).first + shared_bytes(g, at));
        add(g, (float *)((char *)w->comm_grads + shared_bytes(g, offset)), g->sum.members, g->size,
            count);
    }
    if (g->placement->staged) g->be->pinned_sums_end();
    if (g->early) lossynet_bucket_ready(g->comm, w->id, bucket);
}

void group_add_bucket(struct group *g, const struct worker *w, int bucket) {
    struct group_slots *s = &g->slots;
    if (!s->count || !g->host || s->failed) return;
    g->be->d2h_wait_mark(bucket);
    s->failed = shared_memory_wait(g->host, g->comm) != 0;
    if (!s->failed) add_bucket(g, w, bucket);
    s->added = bucket + 1;
}

void group_move_partners(const struct group *g, const struct worker *w, enum array to) {
    for (int b = 0; b < g->layout->buckets; b++) {
        for (int owner = 0; owner < g->workers; owner++) {
            struct range range = {0};
            if (!lossynet_is_partner_of(g->comm, w->id, owner)) continue;
            lossynet_shard(g->comm, owner, b, &range.offset, &range.count);
            if (to == ARRAY_RESIDUAL) /* adds it to the group's sum in the host's memory */
                g->be->add_residual(w->comm_grads + range.offset, w->residual + range.offset,
                                    w->carried, range.count);
            else
                worker_move(w, g->be, to, range);
        }
    }
}

/* Adds up the part that w sends or averages, or what of it is not yet added. */
static int add_buckets(struct group *g, const struct worker *w) {
    const int buckets = g->layout->buckets;
    for (int b = g->slots.added; b < buckets && g->slots.count; b++) group_add_bucket(g, w, b);
    g->slots.added = 0;
    if (g->slots.count) return g->slots.failed ? -1 : 0;
    if (shared_memory_wait(g->host, g->comm)) return -1;
    for (int b = 0; b < buckets; b++) add_bucket(g, w, b);
    return 0;
}

int group_average(struct group *g, const struct worker *w) {
    if (!g->host) return 0;
    if (add_buckets(g, w)) return -1;
    if (!g->placement->staged || !g->placement->residual) return 0;
    /* The device keeps what is lost of the sum, so it is copied there, too. */
    group_move_partners(g, w, ARRAY_RESIDUAL);
    g->be->d2h_async(w->comm_grads, w->grads, 0); /* see d2h_wait */
    g->be->d2h_wait();
    group_move_partners(g, w, ARRAY_GRADS);
    return 0;
}

int group_wait(const struct group *g) {
    return g->host ? shared_memory_wait(g->host, g->comm) : 0;
}

/* Member i copies elements begin_of_part(g, count, i) ... begin_of_part(g, count, i + 1) - 1 from the
 * host. Parts begin at multiples of 128 elements, so that copies are aligned. */
static size_t begin_of_part(const struct group *g, size_t count, int i) {
    const size_t part = (count / (size_t)g->size + 127) / 128 * 128;
    return i == g->size || part * (size_t)i > count ? count : part * (size_t)i;
}

int group_receive(const struct group *g, const struct worker *w, size_t offset, size_t count) {
    const int place = w->id - w->group;
    if (!g->peers.mapped || !w->weights) {
        worker_move(w, g->be, ARRAY_PARAMS, (struct range){offset, count, 0});
        return 0;
    }
    const size_t own = begin_of_part(g, count, place);
    worker_move(w, g->be, ARRAY_PARAMS,
                (struct range){offset + own, begin_of_part(g, count, place + 1) - own, 0});
    g->be->h2d_wait();
    if (group_wait(g)) return -1;
    for (int i = 0; i < g->size; i++) {
        const size_t begin = begin_of_part(g, count, i), end = begin_of_part(g, count, i + 1);
        const size_t at = (offset + begin) * g->be->weight_bytes;
        if (i != place && begin < end)
            g->be->peer_async((char *)w->weights + at, (const char *)g->peers.replica[i] + at,
                              (end - begin) * g->be->weight_bytes);
    }
    return 0;
}
