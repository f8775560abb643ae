/* staging.c — see staging.h. */
#include "llmc/staging.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/report.h"

/* Gradients leave from the device from now on; false: they do not. */
static bool register_gradient(const struct staging *s, const struct worker *w) {
    struct lossynet_device_memory memory = {-1, 0};
    memory.dmabuf =
        s->be->export_memory(w->grads, s->layout->count * sizeof(float), &memory.offset);
    bool done = lossynet_register_device(s->net, w->id, w->net_grads, w->grads, &memory);
    if (memory.dmabuf >= 0) close(memory.dmabuf);
    return done;
}

int staging_open(struct staging *s) {
    s->notice = (struct staging_notice *)calloc((size_t)s->local, sizeof *s->notice);
    if (!s->notice) return report_out_of_memory("the list of workers", 0);
    for (int w = 0; w < s->local; w++) {
        const struct staging_notice notice = {s->net, s->worker[w].id, s->layout->buckets, 0,
                                              false};
        s->notice[w] = notice;
    }
    bool in_place = true, direct = s->gpu_direct && s->staged;
    if (s->gpu_direct && !s->staged && s->worker[0].id == 0)
        report("note: --gpu-direct: expected several processes with a GPU each: nothing to do");
    for (int w = 0; w < s->local; w++) {
        const struct worker *k = &s->worker[w];
        in_place = in_place && lossynet_register(s->net, k->net_params) &&
                   (!k->net_grads || lossynet_register(s->net, k->net_grads));
        direct = direct && k->grads && register_gradient(s, k);
        s->notice[w].direct = direct;
    }
    s->sends = direct ? "in place, gradients by the GPU" : in_place ? "in place" : "copied";
    return 0;
}

void staging_close(struct staging *s) {
    free(s->notice);
    memset(s, 0, sizeof *s);
}

/* Called once per bucket, in their order, on a thread of the device's. */
static void gradient_sent(void *context) {
    struct staging_notice *n = (struct staging_notice *)context;
    lossynet_bucket_ready(n->net, n->worker, n->next);
    n->next = (n->next + 1) % n->buckets;
}

/* What this rank's owners average is all that is read in the host's memory. */
static void send_owned(const struct staging *s, const struct worker *w, int bucket) {
    s->be->send(w->net_grads, w->grads, 0);
    for (int owner = 0; owner < s->local; owner++) {
        size_t offset, count;
        lossynet_shard(s->net, s->worker[owner].id, bucket, &offset, &count);
        worker_send(w, s->be, w->net_grads, offset, count);
    }
}

void staging_gradient_done(const struct staging *s, const struct worker *w, int bucket) {
    if (s->notice[w - s->worker].direct)
        send_owned(s, w, bucket);
    else
        worker_send(w, s->be, w->net_grads, layout_bucket_offset(s->layout, bucket),
                    s->layout->bucket_elements[bucket]);
    if (!s->overlap) return;
    if (s->staged)
        s->be->when_sent(gradient_sent, &s->notice[w - s->worker]);
    else
        lossynet_bucket_ready(s->net, w->id, bucket);
}

void staging_gradients_sent(const struct staging *s) {
    if (s->staged) s->be->sent();
}

lossynet_status staging_parameters_needed(const struct staging *s, const struct worker *w,
                                          int bucket, double *waited) {
    const size_t offset = layout_bucket_offset(s->layout, bucket);
    const size_t count = s->layout->bucket_elements[bucket];
    double slept = 0;
    lossynet_status status =
        s->overlap ? lossynet_bucket_wait(s->net, bucket, &slept) : LOSSYNET_OK;
    if (s->arriving) worker_receive(w, s->be, w->net_params, offset, count);
    if (s->weights)
        s->be->convert((char *)s->weights + offset * s->be->element_bytes, w->params + offset,
                       count);
    *waited += slept;
    return status;
}

static void move(const struct staging *s, worker_mover mover, float *const *vectors, bool shards) {
    for (int w = 0; w < s->local && s->staged; w++) {
        size_t offset = 0, count = s->layout->count;
        if (!shards) mover(&s->worker[w], s->be, vectors[w], 0, count);
        for (int b = 0; b < s->layout->buckets && shards; b++) {
            lossynet_shard(s->net, s->worker[w].id, b, &offset, &count);
            mover(&s->worker[w], s->be, vectors[w], offset, count);
        }
    }
}

void staging_send(const struct staging *s, float *const *vectors, bool shards) {
    move(s, worker_send, vectors, shards);
    if (s->staged) s->be->sent();
}

void staging_receive(const struct staging *s, float *const *vectors, bool shards) {
    move(s, worker_receive, vectors, shards);
}

void staging_start(const struct staging *s, float *const *params) {
    staging_send(s, params, false);
    lossynet_start(s->net, params);
    staging_receive(s, params, false);
}

void staging_broadcast(struct staging *s) {
    s->arriving = s->staged;
}

void staging_finish(struct staging *s, float *const *params) {
    if (s->arriving) move(s, worker_receive, params, false);
    s->arriving = false;
}
