/* port.c — see port.h. */
#include "llmc/comm/port.h"

#include <assert.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/log/error.h"
#include "llmc/log/jsonl.h"

/* ---- open and close ---- */

/* The gradients of members beside the first. */
static int open_groups(struct port *p, const struct lossynet_world *world) {
    struct port_groups *g = &p->groups;
    lossynet_group(p->comm, world->rank * p->local, &g->first, &g->size);
    if (p->local == 1 || g->size == 1 || !p->placement->trains) return 0;
    g->apart = calloc((size_t)g->sets, sizeof *g->apart);
    for (int e = 0; g->apart && e < g->sets; e++) {
        g->apart[e] = (float *)p->be->allocate(p->layout->count * sizeof(float));
        if (!g->apart[e])
            return log_out_of_memory("a member's gradient", 4.0 * (double)p->layout->count);
    }
    return g->apart ? 0 : log_out_of_memory("the list of gradients", 0);
}

int port_open(struct port *p, const struct lossynet_world *world, double timeout) {
    p->verbs = p->placement->has[ARRAY_COMM_PARAMS] ? port_staged : port_in_place;
    if (open_groups(p, world)) return -1;
    return p->placement->way == WAY_SHARED ? shared_open(p, world, timeout) : 0;
}

void port_share_vectors(const struct port *p, int worker) {
    struct worker *w = &p->worker[worker];
    lossynet_group(p->comm, w->id, &w->group, &w->members);
    if (p->shared) {
        shared_lend(p, w);
        return;
    }
    const struct worker *first = w - (w->id - w->group);
    w->params = first->params, w->comm_params = first->comm_params;
    w->grads = first->grads, w->comm_grads = first->comm_grads;
}

static bool register_vectors(const struct port *p, const struct worker *w) {
    const size_t P = p->layout->count, owned = lossynet_owned_elements(p->comm, w->id);
    if (w->comm_ahead && !lossynet_register(p->comm, w->comm_ahead, owned)) return false;
    if (!port_is_first(p, w)) return true;
    return lossynet_register(p->comm, w->comm_params, P) &&
           (!w->comm_grads ||
            (p->shared ? shared_register(p, w) : lossynet_register(p->comm, w->comm_grads, P)));
}

int port_connect(struct port *p) {
    bool in_place = true;
    p->hooks = calloc((size_t)p->local, sizeof *p->hooks);
    if (!p->hooks) return log_out_of_memory("the list of workers", 0);
    for (int i = 0; i < p->local && in_place; i++) in_place = register_vectors(p, &p->worker[i]);
    p->sends = in_place ? "in place" : "copied";
    const struct array_sizes sizes = worker_sizes(p->layout, p->placement, 0);
    for (int e = 0; e < p->groups.sets && p->placement->has[ARRAY_WEIGHTS]; e++) {
        p->weights[e] = array_allocate(ARRAY_WEIGHTS, p->be, p->placement, &sizes);
        if (!p->weights[e]) return -1;
    }
    return p->shared ? shared_connect(p, p->worker) : 0;
}

void port_close(struct port *p) {
    const bool may_be_read = shared_reads_peers(p); /* they may still have `weights` open */
    for (int e = 0; e < BACKEND_SETS && p->be && !may_be_read; e++)
        array_release(ARRAY_WEIGHTS, p->be, p->weights[e]);
    shared_close(p);
    for (int e = 0; p->groups.apart && e < p->groups.sets; e++) p->be->release(p->groups.apart[e]);
    free(p->groups.apart);
    free(p->hooks);
    memset(p, 0, sizeof *p);
}

/* ---- the verbs ---- */

void port_work(const struct port *p, void (*work)(void *context, struct worker *w, int set),
               void *context) {
    const struct port_groups *g = &p->groups;
    const bool in_turn = g->sets == 1 || p->be->on_device;
    for (int w = 0; w < p->local && in_turn; w++) work(context, &p->worker[w], 0);
    if (in_turn) return;
#pragma omp parallel for schedule(dynamic) num_threads(g->sets)
    for (int first = 0; first < p->local; first += g->size)
        for (int w = first; w < first + g->size && w < p->local; w++)
            work(context, &p->worker[w], omp_get_thread_num());
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
static int next_of_set(const struct port_groups *g, int w) {
    return (w + 1) % g->size ? w + 1 : w + 1 + (g->sets - 1) * g->size;
}

void port_passes(const struct port *p, bool (*pass)(void *context, struct worker *w, int set),
                 void *context) {
    struct passes all = {pass, context};
    const struct port_groups *g = &p->groups;
    int at[BACKEND_SETS]; /* the worker that each set computes */
    if (!p->be->on_device) return port_work(p, all_passes, &all);
    for (int set = 0; set < g->sets; set++) at[set] = set * g->size;
    p->be->sets_begin(g->sets);
    for (bool more = true; more;) {
        more = false;
        for (int set = 0; set < g->sets; set++) {
            if (at[set] >= p->local) continue;
            p->be->use_set(set);
            if (!pass(context, &p->worker[at[set]], set)) at[set] = next_of_set(g, at[set]);
            more = true;
        }
    }
    p->be->sets_end();
}

/* A pass calls the network or the host if ranks exchange gradients, and uploads arguments if members add
 * theirs up. */
static bool can_repeat(const struct port *p) {
    return p->be->pass_begin && !p->placement->has[ARRAY_COMM_PARAMS] && !p->overlap &&
           !p->groups.apart;
}

/* The first, the last, and all others of a worker's micro-batches differ. */
static int number_of(const struct bucket_hooks *h) {
    const int kind = h->first ? 0 : h->last ? 1 : 2;
    return kind * h->port->local + (int)(h->worker - h->port->worker);
}

bool port_pass_begin(const struct bucket_hooks *h) {
    const struct {
        const void *params, *gradient;
        int64_t set, alone;
    } key = {h->params, h->gradient.first, h->set, h->first && h->last};
    return can_repeat(h->port) && h->port->be->pass_begin(number_of(h), &key, sizeof key);
}

void port_pass_end(const struct bucket_hooks *h) {
    if (can_repeat(h->port)) h->port->be->pass_end(number_of(h));
}

void port_values_out(const struct port *p, enum array what, enum array_extent extent) {
    if (p->verbs.values_out) p->verbs.values_out(p, what, extent);
}

int port_replica_in(const struct port *p, enum array what) {
    const struct range all = {0, p->layout->count, 0};
    return p->verbs.replica_in ? p->verbs.replica_in(p, what, NULL, all) : 0;
}

void port_start(const struct port *p) {
    port_values_out(p, ARRAY_PARAMS, EXTENT_WHOLE);
    if (p->weights[0] && !p->placement->has[ARRAY_MASTER])
        p->be->convert(p->weights[0], p->worker[0].params, p->layout->count);
}

void port_expect(struct port *p) {
    if (p->verbs.replica_in) p->missing = p->local * p->layout->buckets;
}

int port_finish(struct port *p) {
    const bool complete = p->missing == 0;
    p->missing = 0;
    return complete ? 0 : port_replica_in(p, ARRAY_PARAMS);
}

/* Rounds, and adds a member's gradient to its group's. Returns whether the group's is finished, because w
 * is the last member on this rank. */
static bool add_member(const struct bucket_hooks *h, struct range bucket) {
    static const float ones[] = {1, 1};
    const struct port *p = h->port;
    const struct worker *w = h->worker;
    float *mine = h->gradient.first + bucket.offset, *sum = w->grads + bucket.offset;
    const float *const both[] = {sum, mine};
    if (p->placement->rounds_to_bf16) p->be->round(mine, bucket.count);
    if (w->id > w->group && bucket.count)
        p->be->weighted_sum(sum, both, ones, 2, bucket.count, bucket.count);
    return w->id == w->group + w->members - 1;
}

void bucket_needed(struct bucket_hooks *h, int bucket) {
    if (!h || !h->first) return;
    struct port *p = h->port;
    const struct worker *w = h->worker;
    assert(bucket >= 0 && bucket < p->layout->buckets);
    const bool last = bucket == p->layout->buckets - 1; /* of the vector, which is needed first */
    struct range r = port_bucket(p, bucket);
    if (!p->overlap && !p->verbs.replica_in) /* all have come */
        r = (struct range){0, last ? p->layout->count : 0, 0};
    /* Of a worker alone only the optimizer changes parameters, and it writes those in use, too. */
    const bool alone = p->groups.workers == 1 && !p->placement->steps_alone;
    double slept = 0;
    lossynet_status status =
        p->overlap ? lossynet_bucket_wait(p->comm, bucket, &slept) : LOSSYNET_OK;
    h->waited += slept;
    if (!status && p->missing) {
        const double start = log_seconds();
        if (p->verbs.replica_in(p, ARRAY_PARAMS, w, r)) status = LOSSYNET_LINK;
        p->missing--;
        h->waited += log_seconds() - start;
    }
    if (status)
        h->status = status;
    else if (r.count && p->weights[h->set] && !w->master && !alone)
        p->be->convert((char *)p->weights[h->set] + r.offset * p->be->weight_bytes,
                       w->params + r.offset, r.count);
}

void bucket_done(struct bucket_hooks *h, int bucket) {
    if (!h || !h->last) return;
    const struct port *p = h->port;
    assert(bucket >= 0 && bucket < p->layout->buckets);
    const bool finished = !p->groups.apart || add_member(h, port_bucket(p, bucket));
    if (finished && p->verbs.gradient_out) p->verbs.gradient_out(p, h->worker, bucket);
}
