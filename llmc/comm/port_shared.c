/* port_shared.c — the port of a rank with one member of a group (port.h): the members' gradients, and
 * one replica, lie in memory that the group's ranks share. On the CPU these are the vectors themselves;
 * with a device each they are the copies that the network reads.
 *
 * After backward each member adds up the shards of its partners (lossynet.h), which it sends or averages.
 * Devices read each other's gradients in place, if they can; otherwise they share the last buckets of
 * each gradient in the host's memory. In both cases they add while backward goes on.
 *
 * With slots, the host's memory has only the last buckets of a member's gradient (struct gradient_place;
 * none if devices read it in place), and the sums that the member sends or averages: the vector `sum`
 * has addresses for P elements, but only these parts have pages.
 */
#include "llmc/comm/port.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "llmc/memory/shared_memory.h"
#include "llmc/log/error.h"

struct shared {
    int place, size; /* this member, and the number of members */
    struct shared_memory *memory;
    int pinned;         /* number of members whose memory is pinned */
    float *ones;        /* [size] */
    const float **from; /* [size], the vectors that are added */
    /* [size], where a member's gradient is read: in the shared memory, or on its device. Then `peer` are
     * the devices' addresses, and `replica` too with masters; else NULL. */
    const void **gradient, **peer, **replica;
    int added; /* buckets added so far in this step */
    bool failed;
    float *sum;         /* with slots; NULL: a member's sums are in its gradient */
    size_t bytes;       /* of the address range of `sum` */
    struct range *part; /* of `sum` in bytes: what is in memory */
    int parts, pinned_parts;
};

static size_t copy_bytes(const struct port *p, size_t elements) {
    return elements * (size_t)p->placement->copy_bytes;
}

/* The bytes that a member gives: its gradient, and the first member also the replica. */
static size_t vectors_of(const struct port *p, int place) {
    const struct placement *o = p->placement;
    const struct array_sizes sizes = worker_sizes(p->layout, o, 0);
    const enum array params = o->has[ARRAY_COMM_PARAMS] ? ARRAY_COMM_PARAMS : ARRAY_PARAMS;
    const enum array grads = o->copy_slots               ? ARRAY_COMM_SLOTS
                             : o->has[ARRAY_COMM_PARAMS] ? ARRAY_COMM_GRADS
                                                         : ARRAY_GRADS;
    double bytes = place == 0 ? array_bytes(params, o, &sizes) : 0;
    if (o->trains && !p->shared->peer) bytes += array_bytes(grads, o, &sizes);
    return (size_t)bytes;
}

/* Pins memory that a GPU copies from and adds up. */
static int pin(const struct port *p, void *memory, size_t bytes) {
    if (!bytes || p->be->pin(memory, bytes)) return 0;
    return log_error("--group %d: no %.1f GB of pinned memory (ulimit -l tells how much a process "
                     "may lock)",
                     p->shared->size, (double)bytes / 1e9);
}

/* ---- slots: a member's sums ---- */

/* Notes the pages of bytes from ... to - 1 of the sums. Calls go in ascending order of bytes. */
static void note_part(struct shared *s, size_t from, size_t to) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t begin = from / page * page, end = (to + page - 1) / page * page;
    struct range *last = s->parts ? &s->part[s->parts - 1] : NULL;
    if (!last || begin > last->offset + last->count)
        s->part[s->parts++] = (struct range){begin, end - begin, 0};
    else if (end > last->offset + last->count)
        last->count = end - last->offset;
}

static char *part_of_sums(const struct shared *s, int i) {
    return (char *)s->sum + s->part[i].offset;
}

/* Goes through the shards of buckets that worker `id` sends or averages, and that are not empty. *at,
 * end: bucket times workers. */
static bool next_part(const struct port *p, int id, int *at, int end, struct range *shard) {
    const int workers = p->groups.workers;
    for (; *at < end; ++*at) {
        if (!lossynet_is_partner_of(p->comm, id, *at % workers)) continue;
        lossynet_shard(p->comm, *at % workers, *at / workers, &shard->offset, &shard->count);
        if (shard->count && ++*at) return true;
    }
    return false;
}

/* Reserves addresses for a whole vector, and pins pages only for the parts that this member sends
 * or averages. */
static int open_sums(const struct port *p, int id) {
    struct shared *s = p->shared;
    const int all = p->layout->buckets * p->groups.workers;
    const struct array_sizes sizes = worker_sizes(p->layout, p->placement, 0);
    s->bytes = (size_t)array_bytes(ARRAY_COMM_SUMS, p->placement, &sizes);
    void *sum = mmap(NULL, s->bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (sum != MAP_FAILED) s->sum = (float *)sum;
    s->part = calloc((size_t)all, sizeof *s->part);
    if (!s->sum || !s->part) return log_out_of_memory("the sums of a group", (double)s->bytes);
    struct range r = {0, 0, 0};
    for (int at = 0; next_part(p, id, &at, all, &r);)
        note_part(s, copy_bytes(p, r.offset), copy_bytes(p, r.offset + r.count));
    for (int i = 0; i < s->parts; i++) {
        if (pin(p, part_of_sums(s, i), s->part[i].count)) return -1;
        s->pinned_parts = i + 1;
    }
    return 0;
}

/* ---- peers: devices that read each other's memory ---- */

static void close_peers(const struct port *p, const void **peer) {
    for (int i = 0; peer && i < p->shared->size; i++) {
        if (i != p->shared->place && peer[i]) p->be->close_shared(peer[i]);
        peer[i] = NULL;
    }
}

/* Sets *all: whether `mine` is true for all workers. Returns 0, or -1 after reporting. */
static int true_of_all(const struct port *p, bool mine, bool *all) {
    bool *told = malloc((size_t)p->groups.workers * sizeof *told);
    if (!told) return log_out_of_memory("the list of devices", 0);
    const int failed = lossynet_all_gather(p->comm, &mine, told, sizeof mine) ? -1 : 0;
    *all = !failed;
    for (int i = 0; i < p->groups.workers && *all; i++) *all = told[i];
    free(told);
    return failed;
}

/* Opens the memory `mine` of all members, in `peer`. *done: this worked in all groups; otherwise
 * every rank has closed what it had opened. Returns 0, or -1 after reporting. */
static int open_peers(const struct port *p, const void *mine, const void **peer, bool *done) {
    const struct shared *s = p->shared;
    struct backend_shared told = {{0}};
    struct backend_shared *all = calloc((size_t)p->groups.workers, sizeof told);
    if (!all) return log_out_of_memory("the list of devices", 0);
    bool can = mine && p->be->share(mine, &told);
    int failed = lossynet_all_gather(p->comm, &told, all, sizeof told) ? -1 : 0;
    for (int i = 0; i < s->size && !failed; i++) {
        const void *memory = i == s->place ? mine : p->be->open_shared(&all[p->groups.first + i]);
        peer[i] = memory;
        can = can && memory;
    }
    free(all);
    if (!failed) failed = true_of_all(p, can, done);
    if (failed || !*done) close_peers(p, peer);
    return failed;
}

/* Finds out whether members can read each other's memory, with a small block: then sets s->peer. */
static int try_peers(const struct port *p) {
    enum { BYTES = 2 << 20 }; /* CUDA shares whole blocks of this size, even for a part of one */
    struct shared *s = p->shared;
    bool reached = false, closed;
    const void **peer = calloc(2 * (size_t)s->size, sizeof *peer); /* and for replicas */
    if (!peer) return log_out_of_memory("the list of a group's workers", 0);
    void *little = p->be->allocate(BYTES);
    const int failed = open_peers(p, little, peer, &reached);
    close_peers(p, peer);
    if (reached)
        s->peer = peer;
    else
        free(peer);
    if (failed || true_of_all(p, true, &closed)) return -1;
    p->be->release(little); /* no rank has it open any more */
    return 0;
}

bool shared_reads_peers(const struct port *p) {
    return p->shared && p->shared->peer;
}

/* A device of another process may have a gradient open until its process ends, so this one does not
 * free it before that. */
static int connect_peers(const struct port *p, struct worker *w) {
    struct shared *s = p->shared;
    bool done;
    w->own &= ~(1u << ARRAY_GRADS);
    if (open_peers(p, w->gradient.first, s->peer, &done)) return -1;
    if (p->placement->has[ARRAY_MASTER]) s->replica = s->peer + s->size;
    if (done && s->replica && open_peers(p, p->weights[0], s->replica, &done)) return -1;
    return done ? 0
                : log_error("--group %d: the GPU of worker %d cannot read the memory of another "
                            "one's, which it could at first",
                            s->size, w->id);
}

/* ---- gradient out ---- */

int port_wait(const struct port *p) {
    return p->shared ? shared_memory_wait(p->shared->memory, p->comm) : 0;
}

/* to = the sum of n elements of the members' vectors, in order. */
static void add(const struct port *p, void *to, size_t n) {
    const struct shared *s = p->shared;
    const struct backend *be = p->be;
    if (copy_bytes(p, 1) == sizeof(float))
        (be->on_device ? be->weighted_sum_pinned : be->weighted_sum)(to, s->from, s->ones, s->size,
                                                                     n, n);
    else if (s->peer)
        be->rounded_sum_pinned(to, s->from, s->ones, s->size, n, n);
    else
        be->rounded_sum_pinned_bf16(to, (const uint16_t *const *)s->from, s->ones, s->size, n, n);
}

/* Adds up the part of a bucket that w sends or averages. */
static void add_bucket(const struct port *p, const struct worker *w, int bucket) {
    const struct shared *s = p->shared;
    const struct gradient_place *read = s->peer ? &w->gradient : &w->comm_gradient;
    struct range r = {0, 0, 0};
    if (p->be->on_device) p->be->pinned_sums_begin();
    const int workers = p->groups.workers;
    for (int k = bucket * workers; next_part(p, w->id, &k, (bucket + 1) * workers, &r);) {
        const size_t at = param_layout_gradient_at(p->layout, read, r.offset);
        for (int i = 0; i < s->size; i++)
            s->from[i] = (const float *)((const char *)s->gradient[i] +
                                         (s->peer ? at * sizeof(float) : copy_bytes(p, at)));
        add(p, (char *)w->comm_grads + copy_bytes(p, r.offset), r.count);
    }
    if (p->be->on_device) p->be->pinned_sums_end();
    if (p->overlap) lossynet_bucket_ready(p->comm, w->id, bucket);
}

/* With slots, adds up a bucket whose copy to the host has begun, when all members have copied it. So a
 * member is at most one bucket ahead of another, and copies into a slot after all have read it. */
static void add_slot(const struct port *p, int bucket) {
    struct shared *s = p->shared;
    if (s->failed || bucket < s->added || !s->sum) return;
    p->be->d2h_wait_mark(bucket);
    s->failed = port_wait(p) != 0;
    if (!s->failed) add_bucket(p, p->worker, bucket);
    s->added = bucket + 1;
}

/* All that has not been added yet. */
static int add_rest(const struct port *p, float *const *vectors, bool lossless) {
    (void)vectors, (void)lossless;
    struct shared *s = p->shared;
    if (!s->sum && port_wait(p)) return -1;
    for (int b = 0; b < p->layout->buckets; b++) {
        add_slot(p, b);
        if (!s->sum) add_bucket(p, p->worker, b);
    }
    s->added = 0;
    return s->failed ? -1 : 0;
}

static void copy_gradient_out(const struct port *p, const struct worker *w, int bucket) {
    if (p->shared->peer)
        p->be->d2h_async(w->comm_grads, w->grads, 0); /* the mark waits for what is computed */
    else
        port_copy_gradient(p, w, bucket);
    port_mark_gradient(p, w, bucket);
    if (bucket > 0) add_slot(p, bucket - 1);
}

static int copy_gradients_out(const struct port *p, float *const *vectors, bool lossless) {
    struct shared *s = p->shared;
    for (int b = 0, done = 0; b < p->layout->buckets && p->overlap && s->sum; b++) {
        add_slot(p, b);
        while (done <= b && !s->failed && lossynet_reduce_arrived(p->comm, vectors, lossless, done))
            done++;
    }
    p->be->d2h_wait();
    return add_rest(p, vectors, lossless);
}

/* ---- values out ---- */

/* Of a whole replica, each member copies what it sends. */
static void copy_values_out(const struct port *p, enum array what, enum array_extent extent) {
    struct range r = {0, 0, 0};
    const int all = p->layout->buckets * p->groups.workers;
    const bool parts = extent == EXTENT_WHOLE && !p->worker->master;
    for (int at = 0; parts && next_part(p, p->worker->id, &at, all, &r);)
        port_copy_shard(p, p->worker, what, r, false);
    if (!parts) port_staged.values_out(p, what, extent);
    p->be->d2h_wait();
}

/* ---- replica in: when all members have what came for them ---- */

static int wait_for_replica(const struct port *p, enum array what, const struct worker *w,
                            struct range bucket) {
    (void)what, (void)w, (void)bucket;
    return port_wait(p);
}

/* What member i copies from the host. Parts begin at multiples of 128 elements, so that copies are
 * aligned. */
static struct range part_of(const struct shared *s, struct range r, int i) {
    const size_t part = (r.count / (size_t)s->size + 127) / 128 * 128;
    const size_t begin = part * (size_t)i < r.count ? part * (size_t)i : r.count;
    const size_t end = i + 1 < s->size && begin + part < r.count ? begin + part : r.count;
    return (struct range){r.offset + begin, end - begin, 0};
}

/* Each member copies a part from the host, and the other parts from the devices of the other members. (No
 * device changes its replica before all have read it: each waits for all gradients of the group before
 * it updates.) */
static int copy_from_peers(const struct port *p, const struct worker *w, struct range bucket) {
    const struct shared *s = p->shared;
    const size_t element = p->be->weight_bytes;
    if (part_of(s, bucket, s->place).count) port_read_replica(p, w, part_of(s, bucket, s->place));
    p->be->h2d_wait();
    if (port_wait(p)) return -1;
    for (int i = 0; i < s->size; i++) {
        const struct range r = part_of(s, bucket, i);
        if (i != s->place && r.count)
            p->be->peer_async((char *)p->weights[0] + r.offset * element,
                              (const char *)s->replica[i] + r.offset * element, r.count * element);
    }
    return 0;
}

static int copy_replica_in(const struct port *p, enum array what, const struct worker *w,
                           struct range bucket) {
    if (port_wait(p)) return -1;
    return w && p->shared->replica ? copy_from_peers(p, w, bucket)
                                   : port_staged.replica_in(p, what, w, bucket);
}

/* ---- open and close ---- */

int shared_open(struct port *p, const struct lossynet_world *world, double timeout) {
    struct shared *s = p->shared = calloc(1, sizeof *s);
    if (!s) return log_out_of_memory("the list of a group's workers", 0);
    s->place = world->rank - p->groups.first, s->size = p->groups.size;
    s->ones = malloc((size_t)s->size * sizeof *s->ones);
    s->from = malloc((size_t)s->size * sizeof *s->from);
    s->gradient = calloc((size_t)s->size, sizeof *s->gradient);
    if (!s->ones || !s->from || !s->gradient)
        return log_out_of_memory("the list of a group's workers", 0);
    for (int i = 0; i < s->size; i++) s->ones[i] = 1;
    if (p->placement->copy_slots && try_peers(p)) return -1;
    if (shared_memory_open(world, p->groups.first, s->size, vectors_of(p, s->place), timeout,
                           &s->memory))
        return -1;
    if (!p->be->on_device) {
        p->verbs = (struct port_verbs){.gradients_out = add_rest, .replica_in = wait_for_replica};
        return 0;
    }
    p->verbs = (struct port_verbs){copy_gradient_out, copy_gradients_out, port_staged.average_in,
                                   copy_values_out, copy_replica_in};
    for (int i = 0; i < s->size; i++) {
        if (pin(p, shared_memory_of(s->memory, i), vectors_of(p, i))) return -1;
        s->pinned = i + 1;
    }
    return p->placement->copy_slots ? open_sums(p, world->rank) : 0;
}

void shared_close(struct port *p) {
    struct shared *s = p->shared;
    if (!s) return;
    for (int i = 0; i < s->pinned_parts; i++) p->be->unpin(part_of_sums(s, i));
    if (s->sum) munmap(s->sum, s->bytes);
    free(s->part);
    free(s->peer), free(s->gradient), free(s->ones), free(s->from);
    for (int i = 0; i < s->pinned; i++)
        if (vectors_of(p, i)) p->be->unpin(shared_memory_of(s->memory, i));
    shared_memory_close(s->memory);
    free(s);
}

/* The copy of a member's gradient. */
static float *copy_of(const struct port *p, int member) {
    const size_t before = member == 0 ? copy_bytes(p, p->layout->count) : 0;
    return (float *)((char *)shared_memory_of(p->shared->memory, member) + before);
}

void shared_lend(const struct port *p, struct worker *w) {
    const struct shared *s = p->shared;
    w->comm_params = (float *)shared_memory_of(s->memory, 0);
    if (p->placement->trains && !s->peer)
        w->comm_gradient = (struct gradient_place){copy_of(p, s->place), p->placement->copy_slots,
                                                   param_layout_gradient_slot(p->layout)};
    w->comm_grads = s->sum ? s->sum : w->comm_gradient.first;
    if (!p->placement->has[ARRAY_COMM_PARAMS]) w->params = w->comm_params, w->grads = w->comm_grads;
}

bool shared_register(const struct port *p, const struct worker *w) {
    const struct shared *s = p->shared;
    bool done = s->parts || lossynet_register(p->comm, w->comm_grads, p->layout->count);
    for (int i = 0; i < s->parts && done; i++)
        done = lossynet_register(p->comm, (float *)part_of_sums(s, i),
                                 s->part[i].count / (size_t)w->copy_bytes);
    return done;
}

int shared_connect(const struct port *p, struct worker *w) {
    struct shared *s = p->shared;
    if (s->peer && connect_peers(p, w)) return -1;
    for (int i = 0; i < s->size; i++)
        s->gradient[i] = s->peer ? s->peer[i] : p->placement->trains ? copy_of(p, i) : NULL;
    return 0;
}
