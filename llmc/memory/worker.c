/* worker.c — see worker.h. */
#include "llmc/memory/worker.h"
#include <string.h>

/* Where struct worker has an array; 0: the rank or the group has it. */
static const size_t member_of[ARRAYS] = {
    [ARRAY_PARAMS] = offsetof(struct worker, params),
    [ARRAY_MASTER] = offsetof(struct worker, master),
    [ARRAY_GRADS] = offsetof(struct worker, grads),
    [ARRAY_AVERAGE] = offsetof(struct worker, average),
    [ARRAY_M] = offsetof(struct worker, m),
    [ARRAY_V] = offsetof(struct worker, v),
    [ARRAY_AHEAD] = offsetof(struct worker, ahead),
    [ARRAY_RESIDUAL] = offsetof(struct worker, residual),
    [ARRAY_COMM_PARAMS] = offsetof(struct worker, comm_params),
    [ARRAY_COMM_GRADS] = offsetof(struct worker, comm_grads),
    [ARRAY_COMM_MASTER] = offsetof(struct worker, comm_master),
    [ARRAY_COMM_AVERAGE] = offsetof(struct worker, comm_average),
    [ARRAY_COMM_AHEAD] = offsetof(struct worker, comm_ahead),
};

static float **member(struct worker *w, int array) {
    return (float **)((char *)w + member_of[array]);
}

struct array_sizes worker_sizes(const struct param_layout *layout, const struct placement *p,
                                size_t owned) {
    const size_t model = p->masters ? param_layout_largest_bucket(layout) : layout->count;
    return (struct array_sizes){.whole = (double)layout->count,
                                .owned = (double)owned,
                                .slots = (double)param_layout_gradient_elements(layout, p->slots),
                                .model = (double)model};
}

/* Takes the array for the vector if there is none. */
static void alias(float **vector, float *array) {
    if (!*vector) *vector = array;
}

int worker_allocate(struct worker *w, const struct backend *be, const struct param_layout *layout,
                    const struct placement *p, size_t owned) {
    const struct array_sizes sizes = worker_sizes(layout, p, owned);
    for (int a = 0; a < ARRAYS; a++) {
        if (!member_of[a] || *member(w, a) || !p->has[a]) continue;
        *member(w, a) = array_allocate((enum array)a, be, p, &sizes);
        if (!*member(w, a)) return -1;
        w->own |= 1u << a;
    }
    if (w->mapped) w->own &= ~(1u << ARRAY_GRADS);
    alias(&w->params, w->comm_params); /* with masters */
    alias(&w->comm_params, w->params);
    alias(&w->comm_grads, w->grads);
    alias(&w->comm_ahead, w->ahead);
    alias(&w->comm_gradient.first, w->comm_grads);
    w->copies_bf16 = p->copies_bf16;
    w->owned = owned;
    w->gradient = (struct gradient_place){w->grads, p->slots, param_layout_gradient_slot(layout)};
    return 0;
}

void worker_release(struct worker *w, const struct backend *be) {
    for (int a = 0; a < ARRAYS; a++)
        if (w->own >> a & 1) array_release((enum array)a, be, *member(w, a));
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

void worker_send_masters(const struct worker *w, const struct backend *be, struct run run) {
    if (!run.count) return;
    if (w->copies_bf16) {
        be->d2h_async(worker_comm_element(w, w->comm_params, run.offset),
                      (char *)w->weights + run.offset * be->weight_bytes,
                      run.count * be->weight_bytes);
        be->d2h_async(w->comm_master + run.state, w->master + run.state, run.count * sizeof(float));
    } else {
        be->d2h_async(w->comm_params + run.offset, w->master + run.state,
                      run.count * sizeof(float));
    }
}

void worker_receive_averages(const struct worker *w, const struct backend *be, struct run run) {
    const float *from = w->copies_bf16 ? w->comm_average + run.state : w->comm_grads + run.offset;
    if (run.count) be->h2d_async(w->average + run.state, from, run.count * sizeof(float));
}

void worker_send_ahead(const struct worker *w, const struct backend *be) {
    if (w->comm_ahead != w->ahead && w->owned)
        be->d2h_async(w->comm_ahead, w->ahead, w->owned * sizeof(float));
}

void worker_receive(const struct worker *w, const struct backend *be, float *comm_vector,
                    size_t offset, size_t count) {
    float *to = device_vector(w, comm_vector);
    if (w->master && comm_vector == w->comm_params) {
        const float *from = worker_comm_element(w, comm_vector, offset);
        weight *replica = (char *)w->weights + offset * be->weight_bytes;
        if (count && w->copies_bf16)
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
                   const struct worker_step *s, struct run run) {
    const struct adamw_settings adamw = {(float)o->beta1, (float)o->beta2, (float)o->adam_eps,
                                         (float)s->lead};
    for (const struct span *span = layout->span; run.count; span++) {
        const struct run part = run_common(run, (struct run){span->offset, span->count, 0});
        if (!part.count) continue;
        float *params = worker_values(w, &part);
        weight *in_use = params;
        if (s->weights) in_use = (char *)s->weights + part.offset * be->weight_bytes;
        be->adamw(in_use, params, w->m + part.state, w->v + part.state,
                  s->lead != 0 ? w->ahead + part.state : NULL, worker_averaged(w, &part),
                  part.count, &adamw, s->step + 1, (float)s->learning_rate,
                  span->decay ? (float)o->weight_decay : 0, (float)s->gradient_scale);
        run.count -= part.count, run.offset += part.count, run.state += part.count;
    }
}
