/* products.h — the shapes of a model's matrix products. */
#ifndef LLMC_MODEL_PRODUCTS_H
#define LLMC_MODEL_PRODUCTS_H

#include "llmc/model/config.h"

enum { MODEL_PRODUCTS = 5 };

struct model_product { /* (N, I) by weights (O, I); backward has two more with the same N, I, O */
    const char *name;
    int N, I, O;
};

/* Lists the products for N tokens. The classifier's product has logits_rows tokens. */
static inline void model_products(const struct llama_config *c, int N, int logits_rows,
                                  struct model_product out[MODEL_PRODUCTS]) {
    const int C = c->width, F = c->hidden, HD = c->heads * c->head_size;
    const int QKV = HD + 2 * c->kv_heads * c->head_size;
    const struct model_product all[MODEL_PRODUCTS] = {
        {"qkv", N, C, QKV},
        {"attention out", N, HD, C},
        {"gate and up", N, C, 2 * F},
        {"down", N, F, C},
        {"classifier", logits_rows, C, c->vocabulary}};
    for (int i = 0; i < MODEL_PRODUCTS; i++) out[i] = all[i];
}

#endif
