/* product_choice.h — chooses the algorithm of a product: the place in the library's list that was
 * chosen for its shape, or the place that timing finds to be fastest. cuBLASLt (product.cu) and the
 * emulated device share this code. Internal. */
#ifndef LLMC_BACKEND_CUDA_PRODUCT_CHOICE_H
#define LLMC_BACKEND_CUDA_PRODUCT_CHOICE_H

#include "llmc/backend/cuda/device.h"

#include <string.h>

/* Seconds of a product by the algorithm in a place; INFINITY if there is none. */
typedef double (*product_seconds)(void *context, int place);

static inline bool product_choice_is_of(const struct product_choice *c, const struct product *p) {
    return c->M == p->M && c->N == p->N && c->K == p->K && c->transpose_a == p->transpose_a &&
           c->transpose_b == p->transpose_b && c->in == p->in && c->out_type == p->out_type;
}

/* A later place must be 2% faster. Times of one algorithm differ by less than that. */
static inline int product_fastest(product_seconds seconds, void *context) {
    int best = 0;
    double least = seconds(context, 0);
    for (int place = 1; place < PRODUCT_PLACES; place++) {
        const double took = seconds(context, place);
        if (took < 0.98 * least) least = took, best = place;
    }
    return best;
}

/* Returns the place that was chosen for the product's shape. If there is none, it times the shape
 * if `choices` says so and has room, and otherwise returns `otherwise`. */
static inline int product_place(struct product_choices *choices, const struct product *p,
                                int otherwise, product_seconds seconds, void *context) {
    for (int i = 0; i < choices->count; i++)
        if (product_choice_is_of(&choices->choice[i], p)) return choices->choice[i].place;
    if (!choices->times || choices->count == PRODUCT_CHOICES) return otherwise;
    const struct product_choice made = {p->M,
                                        p->N,
                                        p->K,
                                        p->transpose_a,
                                        p->transpose_b,
                                        (int32_t)p->in,
                                        (int32_t)p->out_type,
                                        product_fastest(seconds, context)};
    choices->choice[choices->count++] = made;
    return made.place;
}

#endif
