/* product_choice.h — which algorithm computes a product: the place to take, and the timing of
 * places, the same for cuBLASLt (product.cu) and for the emulated device. Internal. */
#ifndef LLMC_BACKEND_CUDA_PRODUCT_CHOICE_H
#define LLMC_BACKEND_CUDA_PRODUCT_CHOICE_H

#include "llmc/backend/cuda/device.h"

#include <string.h>

/* Seconds of a product by the algorithm in a place; infinite where there is none. */
typedef double (*product_seconds)(void *context, int place);

static inline bool product_choice_is_of(const struct product_choice *c, const struct product *p) {
    return c->M == p->M && c->N == p->N && c->K == p->K && c->transpose_a == p->transpose_a &&
           c->transpose_b == p->transpose_b && c->in == p->in && c->out_type == p->out_type;
}

/* A later place has to be faster by 2%, which is more than times of the same algorithm differ. */
static inline int product_fastest(product_seconds seconds, void *context) {
    int best = 0;
    double least = seconds(context, 0);
    for (int place = 1; place < PRODUCT_PLACES; place++) {
        const double took = seconds(context, place);
        if (took < 0.98 * least) least = took, best = place;
    }
    return best;
}

/* The place of the product's shape, or `otherwise`. Times it first where it is to be timed. */
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
