/* worker.c — see worker.h. */
#include "llmc/comm/worker.h"
#include "llmc/log/error.h"

#include <string.h>

static int take(float **vector, void *(*allocate)(size_t bytes), size_t count, const char *what) {
    *vector = (float *)allocate((count ? count : 1) * sizeof(float));
    return *vector ? 0 : log_out_of_memory(what, (double)count * sizeof(float));
}

/* Allocates the copy of a vector that the network reads. */
static int take_comm(float **copy, float *vector, const struct backend *be,
                     const struct worker_needs *needs, size_t count, const char *what) {
    *copy = vector;
    if (needs->half) count = (count + 1) / 2;
    return needs->staged ? take(copy, be->allocate_pinned, count, what) : 0;
}

/* Allocates float32 values and averages for the worker's shards. */
static int take_masters(struct worker *w, const struct backend *be,
                        const struct worker_needs *needs) {
    const char *values = "what a worker owns of the parameters", *average = "an averaged gradient";
    w->half = needs->half;
    w->owned = needs->owned;
    if (take(&w->master, be->allocate, w->owned, values) ||
        take(&w->average, be->allocate, w->owned, average))
        return -1;
    w->params = w->comm_params;
    return w->half && (take(&w->comm_master, be->allocate_pinned, w->owned, values) ||
                       take(&w->comm_average, be->allocate_pinned, w->owned, average))
               ? -1
               : 0;
}

int worker_allocate(struct worker *w, const struct backend *be, const struct param_layout *layout,
                    const struct worker_needs *needs) {
    const size_t count = layout->count, owned = needs->owned;
    const bool staged = needs->staged;
    const char *parameters = "a worker's parameters (--dry-run tells what a run needs)";
    const char *gradient = "a worker's gradient";
    if (!w->shares && !needs->masters && take(&w->params, be->allocate, count, parameters))
        return -1;
    if (!w->shares_comm && take_comm(&w->comm_params, w->params, be, needs, count, parameters))
        return -1;
    if (!needs->training) return 0;
    if (needs->masters && take_masters(w, be, needs)) return -1;
    const size_t elements = param_layout_gradient_elements(layout, needs->slots);
    if (!w->shares && take(&w->grads, be->allocate, elements, gradient)) return -1;
    if (!w->shares_comm && take_comm(&w->comm_grads, w->grads, be, needs, count, gradient))
        return -1;
    const struct gradient_place place = {w->grads, needs->slots,
                                         param_layout_gradient_slot(layout)};
    w->gradient = place;
    if (!w->comm_gradient.first) w->comm_gradient.first = w->comm_grads;
    if (take(&w->m, be->allocate, owned, "optimizer state")) return -1;
    if (take(&w->v, be->allocate, owned, "optimizer state")) return -1;
    w->carried = needs->carried;
    if (w->carried > 0 && take(&w->residual, be->allocate, count, "lost gradients (--carry)"))
        return -1;
    if (!needs->leads) return 0;
    const char *ahead = "the values that a worker broadcasts (--plain does without)";
    if (take(&w->ahead, be->allocate, owned, ahead)) return -1;
    w->comm_ahead = w->ahead;
    return staged ? take(&w->comm_ahead, be->allocate_pinned, owned, ahead) : 0;
}

void worker_release(struct worker *w, const struct backend *be) {
    if (w->master) w->params = NULL; /* it is comm_params, in the host's memory */
    if (!w->shares_comm && w->comm_params != w->params) be->release_pinned(w->comm_params);
    if (!w->shares_comm && w->comm_grads != w->grads) be->release_pinned(w->comm_grads);
    if (w->comm_ahead != w->ahead) be->release_pinned(w->comm_ahead);
    be->release(w->ahead);
    be->release(w->residual);
    be->release(w->master);
    be->release(w->average);
    if (w->comm_master) be->release_pinned(w->comm_master);
    if (w->comm_average) be->release_pinned(w->comm_average);
    if (!w->shares) be->release(w->params);
    if (!w->shares && !w->peers) be->release(w->grads);
    be->release(w->m);
    be->release(w->v);
    memset(w, 0, sizeof *w);
}

void worker_initialise(struct worker *w, const struct backend *be, const float *params,
                       size_t count) {
    be->upload(w->params, params, count * sizeof(float));
    if (w->comm_params != w->params) memcpy(w->comm_params, params, count * sizeof(float));
}

static float *device_vector(const struct worker *w, const float *comm_vector) {
    return comm_vector == w->comm_params ? w->params : w->grads;
}

void worker_send(const struct worker *w, const struct backend *be, float *comm_vector,
                 size_t offset, size_t count) {
    const float *from = device_vector(w, comm_vector);
    if (from != comm_vector && count)
        be->d2h_async(comm_vector + offset, from + offset, count * sizeof(float));
}

void worker_send_masters(const struct worker *w, const struct backend *be, size_t offset,
                         size_t state, size_t count) {
    if (!count) return;
    if (w->half) {
        be->d2h_async(worker_comm_element(w, w->comm_params, offset),
                      (char *)w->weights + offset * be->weight_bytes, count * be->weight_bytes);
        be->d2h_async(w->comm_master + state, w->master + state, count * sizeof(float));
    } else {
        be->d2h_async(w->comm_params + offset, w->master + state, count * sizeof(float));
    }
}

void worker_receive_averages(const struct worker *w, const struct backend *be, size_t offset,
                             size_t state, size_t count) {
    const float *from = w->half ? w->comm_average + state : w->comm_grads + offset;
    if (count) be->h2d_async(w->average + state, from, count * sizeof(float));
}

void worker_send_gradient(const struct worker *w, const struct backend *be,
                          const struct param_layout *layout, size_t offset, size_t count) {
    const float *from = param_layout_gradient(layout, &w->gradient, offset);
    const size_t at = param_layout_gradient_at(layout, &w->comm_gradient, offset);
    float *to = worker_comm_element(w, w->comm_gradient.first, at);
    if (w->half)
        be->d2h_round_async((uint16_t *)to, from, count);
    else
        be->d2h_async(to, from, count * sizeof *from);
}

void worker_send_ahead(const struct worker *w, const struct backend *be, size_t owned) {
    if (w->comm_ahead != w->ahead && owned)
        be->d2h_async(w->comm_ahead, w->ahead, owned * sizeof(float));
}

void worker_receive(const struct worker *w, const struct backend *be, float *comm_vector,
                    size_t offset, size_t count) {
    float *to = device_vector(w, comm_vector);
    if (w->master && comm_vector == w->comm_params) {
        const float *from = worker_comm_element(w, comm_vector, offset);
        weight *replica = (char *)w->weights + offset * be->weight_bytes;
        if (count && w->half)
            be->h2d_async(replica, from, count * be->weight_bytes);
        else if (count)
            be->h2d_convert_async(replica, from, count);
        return;
    }
    if (to != comm_vector && count)
        be->h2d_async(to + offset, comm_vector + offset, count * sizeof(float));
}

bool worker_steps_alone(const struct options *o) {
    return o->algorithm == ALGORITHM_RPS || o->algorithm == ALGORITHM_NAIVE;
}

double worker_clip(const struct options *o, double norm) {
    return o->clip > 0 && norm > o->clip ? o->clip / (norm + 1e-6) : 1;
}

/* Weight decay differs between tensors, so the range is cut at their boundaries. */
void worker_update(const struct worker *w, const struct backend *be,
                   const struct param_layout *layout, const struct options *o,
                   const struct worker_step *s, size_t state, size_t offset, size_t count) {
    const struct adamw_settings adamw = {(float)o->beta1, (float)o->beta2, (float)o->adam_eps,
                                         (float)s->lead};
    const struct span *span = layout->span;
    for (size_t done = 0; done < count;) {
        while (span->offset + span->count <= offset + done) span++;
        size_t n = span->offset + span->count - (offset + done);
        if (n > count - done) n = count - done;
        float *params = w->master ? w->master + state + done : w->params + offset + done;
        const float *gradient = w->master ? w->average + state + done : w->grads + offset + done;
        weight *in_use = params;
        if (s->weights) in_use = (char *)s->weights + (offset + done) * be->weight_bytes;
        float *ahead = s->lead != 0 ? w->ahead + state + done : NULL;
        be->adamw(in_use, params, w->m + state + done, w->v + state + done, ahead, gradient, n,
                  &adamw, s->step + 1, (float)s->learning_rate,
                  span->decay ? (float)o->weight_decay : 0, (float)s->gradient_scale);
        done += n;
    }
}
