/* port_staged.c — the port of a rank whose vectors no other rank reads: in place, and staged. See port.h. */
#include "llmc/comm/port.h"

struct range port_bucket(const struct port *p, int bucket) {
    return (struct range){param_layout_bucket_offset(p->layout, bucket),
                          p->layout->bucket_elements[bucket], 0};
}

/* ---- in place ---- */

/* On a device, the exchange rounds gradients (memory/exchange.h). */
static void gradient_ready(const struct port *p, const struct worker *w, int bucket) {
    for (const struct worker *k = w + 1 - w->members; k <= w && p->overlap; k++)
        lossynet_bucket_ready(p->comm, k->id, bucket);
}

const struct port_verbs port_in_place = {.gradient_out = gradient_ready};

/* ---- staged ---- */

static void *copied_element(const struct worker *w, float *copy, size_t offset) {
    return (char *)copy + offset * (size_t)w->copy_bytes;
}

void port_copy_gradient(const struct port *p, const struct worker *w, int bucket) {
    const struct range r = port_bucket(p, bucket);
    const float *from = param_layout_gradient(p->layout, &w->gradient, r.offset);
    void *to = copied_element(w, w->comm_gradient.first,
                              param_layout_gradient_at(p->layout, &w->comm_gradient, r.offset));
    if (w->copy_bytes == sizeof *from)
        p->be->d2h_async(to, from, r.count * sizeof *from);
    else
        p->be->d2h_round_async(to, from, r.count);
}

void port_mark_gradient(const struct port *p, const struct worker *w, int bucket) {
    if (bucket < BACKEND_MARKS) p->be->d2h_mark(bucket);
    const int next = bucket + 1 - w->gradient.slots; /* its slot goes to bucket + 1 */
    if (w->gradient.slots && next >= 0) p->be->d2h_order_mark(next);
}

/* Called once per bucket, in order, on a thread of the device. */
static void gradient_sent(void *context) {
    struct bucket_hooks *h = context;
    lossynet_bucket_ready(h->port->comm, h->worker->id, h->sent++);
}

bool port_is_first(const struct port *p, const struct worker *w) {
    return w == p->worker || w->group != w[-1].group;
}

/* Workers that share a gradient all do this before one of them sends it, since its copy begins at once. */
static void round_gradients(const struct port *p, const struct worker *w, int b) {
    const struct range bucket = port_bucket(p, b);
    for (const struct worker *k = w + 1 - w->members; k <= w; k++)
        if (p->placement->rounds_to_bf16 && k->copy_bytes == sizeof(float))
            p->be->round(k->grads + bucket.offset, bucket.count);
}

static void copy_gradient_out(const struct port *p, const struct worker *w, int bucket) {
    round_gradients(p, w, bucket);
    for (const struct worker *k = w + 1 - w->members; k <= w; k++) {
        if (port_is_first(p, k)) port_copy_gradient(p, k, bucket);
        port_mark_gradient(p, k, bucket);
        if (p->overlap) p->be->d2h_on_complete(gradient_sent, &p->hooks[k - p->worker]);
    }
}

static int copy_gradients_out(const struct port *p, float *const *vectors, bool lossless) {
    for (int b = 0, done = 0; b < p->layout->buckets && b < BACKEND_MARKS && p->overlap; b++) {
        p->be->d2h_wait_mark(b);
        while (done <= b && lossynet_reduce_arrived(p->comm, vectors, lossless, done)) done++;
    }
    p->be->d2h_wait();
    return 0;
}

/* Without masters, values and averages lie in the vectors, and so do their copies. With rps and naive,
 * any vector may be averaged or broadcast. */
void port_copy_shard(const struct port *p, const struct worker *w, enum array what, struct range r,
                     bool in) {
    float *device = what == ARRAY_AHEAD    ? w->ahead + r.state
                    : what == ARRAY_PARAMS ? worker_values(w, &r)
                                           : worker_averaged(w, &r);
    float *host = what == ARRAY_AHEAD    ? w->comm_ahead + r.state
                  : what == ARRAY_PARAMS ? worker_shard(w->comm_master, w->comm_params, &r)
                                         : worker_shard(w->comm_average, w->comm_grads, &r);
    if (in)
        p->be->h2d_async(device, host, r.count * sizeof *host);
    else
        p->be->d2h_async(host, device, r.count * sizeof *host);
}

static void copy_shards(const struct port *p, enum array what, bool in) {
    for (int i = 0; i < p->local; i++)
        for (int b = 0; b < p->layout->buckets; b++) {
            const struct worker *w = &p->worker[i];
            if (!w->range[b].count) continue;
            port_copy_shard(p, w, what, w->range[b], in);
            /* The copy in bfloat16 has values apart; other owners' parts of the replica arrive. */
            if (what == ARRAY_PARAMS && w->comm_master && !in)
                p->be->d2h_async(copied_element(w, w->comm_params, w->range[b].offset),
                                 (char *)p->weights[0] + w->range[b].offset * p->be->weight_bytes,
                                 w->range[b].count * p->be->weight_bytes);
        }
}

static void copy_average_in(const struct port *p, enum array what) {
    copy_shards(p, what, true);
}

static void copy_values_out(const struct port *p, enum array what, enum array_extent extent) {
    const struct range all = {0, p->layout->count, 0};
    if (extent == EXTENT_OWNED) copy_shards(p, what, false);
    for (int i = 0; i < p->local && extent == EXTENT_WHOLE; i++)
        if (!p->worker[i].master && port_is_first(p, &p->worker[i]))
            port_copy_shard(p, &p->worker[i], what, all, false);
    p->be->d2h_wait();
}

void port_read_replica(const struct port *p, const struct worker *w, struct range r) {
    const void *copy = copied_element(w, w->comm_params, r.offset);
    char *weights = (char *)p->weights[0] + r.offset * p->be->weight_bytes;
    if (!w->master)
        p->be->h2d_async(w->params + r.offset, copy, r.count * sizeof(float));
    else if (w->copy_bytes == sizeof(float))
        p->be->h2d_convert_async(weights, copy, r.count);
    else
        p->be->h2d_async(weights, copy, r.count * p->be->weight_bytes);
}

static int copy_replica_in(const struct port *p, enum array what, const struct worker *w,
                           struct range r) {
    if (w) port_read_replica(p, w, r);
    for (const struct worker *k = p->worker; !w && k < p->worker + p->local; k++) {
        if (port_is_first(p, k) && what == ARRAY_PARAMS)
            port_read_replica(p, k, r);
        else if (port_is_first(p, k))
            port_copy_shard(p, k, what, r, true);
    }
    return 0;
}

const struct port_verbs port_staged = {copy_gradient_out, copy_gradients_out, copy_average_in,
                                       copy_values_out, copy_replica_in};
