/* bucket_pipeline.c — see bucket_pipeline.h. */
#include "llmc/comm/bucket_pipeline.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/log/error.h"
#include "llmc/log/jsonl.h"

/* Registers the copy of a gradient, or only its parts that are in memory. */
static bool register_copy(const struct bucket_pipeline *s, const struct worker *w) {
    const size_t element = w->copies_bf16 ? sizeof(uint16_t) : sizeof(float);
    bool done = w->parts > 0 || lossynet_register(s->comm, w->comm_grads, s->layout->count);
    for (int i = 0; i < w->parts && done; i++)
        done = lossynet_register(s->comm, w->part[i].first, w->part[i].bytes / element);
    return done;
}

int pipeline_open(struct bucket_pipeline *s) {
    s->notice = calloc((size_t)s->local, sizeof *s->notice);
    if (!s->notice) return log_out_of_memory("the list of workers", 0);
    for (int w = 0; w < s->local; w++) {
        const struct pipeline_notice notice = {s->comm, s->worker[w].id, s->layout->buckets, 0};
        s->notice[w] = notice;
    }
    bool in_place = true;
    for (int w = 0; w < s->local; w++) {
        const struct worker *k = &s->worker[w];
        const size_t P = s->layout->count, owned = lossynet_owned_elements(s->comm, k->id);
        const bool own = !k->shares_comm || s->local == 1; /* else they are registered already */
        in_place = in_place && (!own || lossynet_register(s->comm, k->comm_params, P)) &&
                   (!own || !k->comm_grads || register_copy(s, k)) &&
                   (!k->comm_ahead || lossynet_register(s->comm, k->comm_ahead, owned));
    }
    s->sends = in_place ? "in place" : "copied";
    return 0;
}

void pipeline_close(struct bucket_pipeline *s) {
    free(s->notice);
    memset(s, 0, sizeof *s);
}

/* Called once per bucket, in order, on a thread of the device. */
static void gradient_sent(void *context) {
    struct pipeline_notice *n = context;
    lossynet_bucket_ready(n->comm, n->worker, n->next);
    n->next = (n->next + 1) % n->buckets;
}

/* Copies a bucket's gradient, `count` elements from `offset`, to comm_gradient. */
static void copy_gradient(const struct bucket_pipeline *s, const struct worker *w, size_t offset,
                          size_t count) {
    const float *from = param_layout_gradient(s->layout, &w->gradient, offset);
    const size_t at = param_layout_gradient_at(s->layout, &w->comm_gradient, offset);
    float *to = worker_comm_element(w, w->comm_gradient.first, at);
    if (w->copies_bf16)
        s->be->d2h_round_async((uint16_t *)to, from, count);
    else
        s->be->d2h_async(to, from, count * sizeof *from);
}

/* Then the residual is added to the group's sum. */
static bool is_of_group_of_ranks(const struct bucket_pipeline *s, const struct worker *w) {
    return s->local == 1 && w->shares_comm;
}

/* Adds what the worker lost, and rounds. Workers of this rank that share a gradient all do this before
 * one of them sends it, since its copy begins at once. */
static void add_residual_and_round(const struct bucket_pipeline *s, const struct worker *w,
                                   int bucket) {
    const size_t offset = param_layout_bucket_offset(s->layout, bucket);
    const size_t count = s->layout->bucket_elements[bucket];
    if (w->residual && !is_of_group_of_ranks(s, w))
        s->be->add_residual(w->grads + offset, w->residual + offset, w->carried, count);
    const struct range *own = &w->range[bucket];
    if (!s->placement->rounds_to_bf16 || w->copies_bf16) return;
    if (s->placement->rounds_to_bf16 == ROUNDS_OWN)
        s->be->round(w->grads + own->offset, own->count);
    else
        s->be->round(w->grads + offset, count);
}

/* Copies the gradient to the host, if staged, and sends it, if `early`. If ranks share a replica
 * (group.h), group_add_bucket or group_average sends it instead. */
static void send_gradient(const struct bucket_pipeline *s, const struct worker *w, int bucket) {
    const size_t offset = param_layout_bucket_offset(s->layout, bucket);
    const size_t count = s->layout->bucket_elements[bucket];
    if (w->mapped)
        s->be->d2h_async(w->comm_grads, w->grads, 0); /* the mark waits for what is computed */
    else if (s->placement->staged && !w->shares)
        copy_gradient(s, w, offset, count);
    if (s->placement->staged && bucket < BACKEND_MARKS) s->be->d2h_mark(bucket);
    const int next = bucket + 1 - w->gradient.slots; /* its slot goes to bucket + 1 */
    if (w->gradient.slots && next >= 0) s->be->d2h_order_mark(next);
    if (!s->early || is_of_group_of_ranks(s, w)) return;
    if (s->placement->staged)
        s->be->d2h_on_complete(gradient_sent, &s->notice[w - s->worker]);
    else
        lossynet_bucket_ready(s->comm, w->id, bucket);
}

void pipeline_gradient_done(const struct bucket_pipeline *s, const struct worker *w, int set,
                            int bucket) {
    assert(bucket >= 0 && bucket < s->layout->buckets && w >= s->worker &&
           w < s->worker + s->local);
    if (!group_gradient_done(s->group, w, set, bucket)) return;
    /* The group's gradient is finished in this bucket, and all its members send it. */
    const int members = s->group->host ? 1 : w->members;
    for (int i = 1 - members; i <= 0; i++) add_residual_and_round(s, w + i, bucket);
    for (int i = 1 - members; i <= 0; i++) send_gradient(s, w + i, bucket);
    if (bucket > 0) group_add_bucket(s->group, w, bucket - 1);
}

void pipeline_average_early(const struct bucket_pipeline *s, float *const *vectors, bool lossless) {
    struct group *group = s->group;
    int done = 0;
    if (!s->placement->staged || !s->overlap) return;
    if (group->host && (!group->slots.count || s->placement->residual)) return; /* added up later */
    for (int b = 0; b < s->layout->buckets && b < BACKEND_MARKS; b++) {
        if (!group->host)
            s->be->d2h_wait_mark(b);
        else if (b >= group->slots.added)
            group_add_bucket(group, &s->worker[0], b);
        while (done <= b && !group->slots.failed &&
               lossynet_reduce_arrived(s->comm, vectors, lossless, done))
            done++;
    }
}

void pipeline_gradients_sent(const struct bucket_pipeline *s) {
    if (s->placement->staged) s->be->d2h_wait();
}

lossynet_status pipeline_parameters_needed(const struct bucket_pipeline *s, const struct worker *w,
                                           int set, int bucket, double *waited) {
    const size_t offset = param_layout_bucket_offset(s->layout, bucket);
    const size_t count = s->layout->bucket_elements[bucket];
    double slept = 0;
    assert(bucket >= 0 && bucket < s->layout->buckets);
    lossynet_status status =
        s->overlap ? lossynet_bucket_wait(s->comm, bucket, &slept) : LOSSYNET_OK;
    if (s->overlap && s->group->host && !status) {
        const double start = log_seconds();
        if (group_wait(s->group)) status = LOSSYNET_LINK;
        slept += log_seconds() - start;
    }
    if (s->arriving && s->group->peers.mapped && !status) {
        if (group_receive(s->group, w, offset, count)) status = LOSSYNET_LINK;
    } else if (s->arriving) {
        worker_move(w, s->be, ARRAY_PARAMS, (struct range){offset, count, 0});
    }
    if (s->weights[set] && !s->current && !w->master)
        s->be->convert((char *)s->weights[set] + offset * s->be->weight_bytes, w->params + offset,
                       count);
    *waited += slept;
    return status;
}

/* Moves all elements of all workers, or their shards. */
static void move(const struct bucket_pipeline *s, enum array to, bool shards) {
    const struct range all = {0, s->layout->count, 0};
    for (int w = 0; w < s->local && s->placement->staged; w++) {
        const struct worker *k = &s->worker[w];
        if (!shards && !k->shares) worker_move(k, s->be, to, all);
        for (int b = 0; b < s->layout->buckets && shards; b++)
            worker_move(k, s->be, to, k->range[b]);
    }
}

void pipeline_send(const struct bucket_pipeline *s, enum array to, bool shards) {
    if (shards || !s->placement->masters) move(s, to, shards);
    if (s->placement->staged) s->be->d2h_wait();
}

void pipeline_receive(const struct bucket_pipeline *s, enum array to, bool shards) {
    move(s, to == ARRAY_GRADS && s->placement->masters ? ARRAY_AVERAGE : to, shards);
}

void pipeline_start(const struct bucket_pipeline *s) {
    const struct worker *w = &s->worker[0];
    if (!w->master && s->group->host && s->placement->staged)
        group_move_partners(s->group, w, ARRAY_COMM_PARAMS);
    else if (!w->master)
        pipeline_send(s, ARRAY_COMM_PARAMS, false);
    else if (w->copies_bf16)
        s->be->d2h_async(w->comm_master, w->master, w->owned * sizeof(float));
    if (s->placement->staged) s->be->d2h_wait();
}

void pipeline_broadcast(struct bucket_pipeline *s) {
    s->arriving = s->placement->staged;
}

void pipeline_finish(struct bucket_pipeline *s) {
    if (s->arriving) move(s, ARRAY_PARAMS, false);
    s->arriving = false;
}

void bucket_needed(struct bucket_hooks *h, int bucket) {
    if (!h || !h->first) return;
    const lossynet_status status =
        pipeline_parameters_needed(h->pipeline, h->worker, h->set, bucket, &h->waited);
    if (status) h->status = status;
}

void bucket_done(struct bucket_hooks *h, int bucket) {
    if (h && h->last) pipeline_gradient_done(h->pipeline, h->worker, h->set, bucket);
}
