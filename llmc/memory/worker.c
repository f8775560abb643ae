/* worker.c — see worker.h. */
#include "llmc/memory/worker.h"

#include <assert.h>
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
    [ARRAY_COMM_PARAMS] = offsetof(struct worker, comm_params),
    [ARRAY_COMM_GRADS] = offsetof(struct worker, comm_grads),
    [ARRAY_COMM_MASTER] = offsetof(struct worker, comm_master),
    [ARRAY_COMM_AVERAGE] = offsetof(struct worker, comm_average),
    [ARRAY_COMM_AHEAD] = offsetof(struct worker, comm_ahead),
};

static void *member(const struct worker *w, int array) {
    void *memory;
    memcpy(&memory, (const char *)w + member_of[array], sizeof memory);
    return memory;
}

float *worker_array(const struct worker *w, enum array array) {
    return member(w, (int)array);
}

struct array_sizes worker_sizes(const struct param_layout *layout, const struct placement *p,
                                size_t owned) {
    const size_t model = p->has[ARRAY_MASTER] ? param_layout_largest_bucket(layout) : layout->count;
    return (struct array_sizes){.whole = (double)layout->count,
                                .owned = (double)owned,
                                .squares = (double)owned,
                                .slots = (double)param_layout_gradient_elements(layout, p->slots),
                                .copy_slots =
                                    (double)param_layout_gradient_elements(layout, p->copy_slots),
                                .model = (double)model};
}

/* Takes the array for the vector if there is none. */
static void alias(float **vector, float *array) {
    if (!*vector) *vector = array;
}

int worker_allocate(struct worker *w, const struct backend *be, const struct param_layout *layout,
                    const struct placement *p, size_t owned) {
    struct array_sizes sizes = worker_sizes(layout, p, owned);
    sizes.squares = (double)w->squares.elements;
    for (int a = 0; a < ARRAYS; a++) {
        if (!member_of[a] || member(w, a) || !p->has[a]) continue;
        void *memory = array_allocate((enum array)a, be, p, &sizes);
        if (!memory) return -1;
        memcpy((char *)w + member_of[a], &memory, sizeof memory);
        w->own |= 1u << a;
    }
    alias(&w->params, w->comm_params); /* with masters */
    alias(&w->comm_params, w->params);
    alias(&w->comm_grads, w->grads);
    alias(&w->comm_ahead, w->ahead);
    alias(&w->comm_gradient.first, w->comm_grads);
    w->copy_bytes = p->copy_bytes;
    w->owned = owned;
    w->gradient = (struct gradient_place){w->grads, p->slots, param_layout_gradient_slot(layout)};
    return 0;
}

void worker_release(struct worker *w, const struct backend *be) {
    for (int a = 0; a < ARRAYS; a++)
        if (w->own >> a & 1) array_release((enum array)a, be, member(w, a));
    free(w->squares.range);
    memset(w, 0, sizeof *w);
}

void worker_initialise(struct worker *w, const struct backend *be, const float *params,
                       size_t count) {
    be->upload(w->params, params, count * sizeof(float));
    if (w->comm_params != w->params) memcpy(w->comm_params, params, count * sizeof(float));
}

bool worker_steps_alone(const struct options *o) {
    return o->algorithm == ALGORITHM_RPS || o->algorithm == ALGORITHM_NAIVE;
}

double worker_clip(const struct options *o, double norm) {
    return o->clip > 0 && norm > o->clip ? o->clip / (norm + 1e-6) : 1;
}

enum { MUON_PERCENT = 95 }; /* Muon's momentum, Jordan's */

/* A matrix, or whole rows of it. */
static void update_matrix(const struct worker *w, const struct backend *be, const struct options *o,
                          const struct worker_step *s, weight *in_use, struct range part,
                          int cols) {
    const struct muon_settings muon = {MUON_PERCENT / 100.0f, (float)s->lead};
    assert(part.count % (size_t)cols == 0);
    be->muon(in_use, worker_values(w, &part), w->m + part.state,
             s->lead != 0 ? w->ahead + part.state : NULL, worker_averaged(w, &part),
             (int)(part.count / (size_t)cols), cols, &muon, (float)s->learning_rate,
             (float)o->weight_decay, (float)s->gradient_scale);
}

void worker_updates_end(struct worker_updates *u) {
    const struct worker_step *s = &u->step;
    const struct adamw_settings adamw = {(float)u->options->beta1, (float)u->options->beta2,
                                         (float)u->options->adam_eps, (float)s->lead};
    const float rate = (float)s->learning_rate, scale = (float)s->gradient_scale;
    if (u->be->adamw_parts && u->parts)
        u->be->adamw_parts(u->part, u->parts, &adamw, s->step + 1, rate, scale);
    for (const struct adamw_part *p = u->part; !u->be->adamw_parts && p < u->part + u->parts; p++)
        u->be->adamw(p->param, p->master, p->m, p->v, p->ahead, p->gradient, p->n, &adamw,
                     s->step + 1, rate, p->weight_decay, scale);
    u->parts = 0;
}

/* Where v has the elements of a part of a tensor. */
static float *squares_at(const struct worker *w, struct range part) {
    size_t next = 0;
    struct range here = part, own;
    ranges_next(w->squares.range, w->squares.count, part, &next, &here, &own);
    return w->v + here.state;
}

/* Weight decay differs between tensors, so the range is cut at their boundaries. */
static void update_range(struct worker_updates *u, const struct worker *w,
                         const struct param_layout *layout, struct range range) {
    const struct worker_step *s = &u->step;
    for (const struct span *span = layout->span; range.count; span++) {
        assert(span < layout->span + layout->spans);
        const struct range part = range_common(range, (struct range){span->offset, span->count, 0});
        if (!part.count) continue;
        float *params = worker_values(w, &part);
        weight *in_use = params;
        if (s->weights) in_use = (char *)s->weights + part.offset * u->be->weight_bytes;
        if (u->parts == sizeof u->part / sizeof *u->part) worker_updates_end(u);
        if (u->options->optimizer == OPTIMIZER_MUON && span->rows)
            update_matrix(w, u->be, u->options, s, in_use, part, span->cols);
        else
            u->part[u->parts++] = (struct adamw_part){
                .param = in_use,
                .master = params,
                .m = w->m + part.state,
                .v = squares_at(w, part),
                .ahead = s->lead != 0 ? w->ahead + part.state : NULL,
                .gradient = worker_averaged(w, &part),
                .n = part.count,
                .weight_decay = span->decay ? (float)u->options->weight_decay : 0};
        range.count -= part.count, range.offset += part.count, range.state += part.count;
    }
}

void worker_update(struct worker_updates *u, const struct worker *w,
                   const struct param_layout *layout, const struct worker_step *step,
                   const struct range *range, int ranges) {
    const bool same = u->step.gradient_scale == step->gradient_scale && u->step.lead == step->lead;
    if (u->parts && !same) worker_updates_end(u);
    u->step = *step;
    for (int i = 0; i < ranges; i++) update_range(u, w, layout, range[i]);
}
