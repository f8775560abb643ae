/* activations.h — what one forward and backward pass needs beside parameters and gradients.
 *
 * One block of memory, cut into arrays. Shapes are for B sequences of T tokens, N = B*T rows; see
 * backend.h for the letters. Every array keeps what backward reads: nothing is computed twice but
 * the attention matrix.
 */
#ifndef LLMC_ACTIVATIONS_H
#define LLMC_ACTIVATIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "llmc/backend.h"
#include "llmc/config.h"

#ifdef __cplusplus
extern "C" {
#endif

struct layer_activations {
    tensor *residual;       /* (N, C)   the stream as the layer finds it */
    tensor *attention_norm; /* (N, C) */
    float *attention_rstd;  /* (N) */
    tensor *qkv;            /* (N, (H+2K)D), rotated */
    tensor *attention;      /* (N, HD) */
    float *log_sum_exp;     /* (B, H, T) */
    tensor *middle;         /* (N, C)   the stream between attention and feed-forward */
    tensor *mlp_norm;       /* (N, C) */
    float *mlp_rstd;        /* (N) */
    tensor *gate_up;        /* (N, 2F) */
    tensor *swiglu;         /* (N, F) */
};

struct activations {
    int B, T; /* the largest pass it was made for */
    int past; /* tokens of earlier passes that this one goes on behind (B = 1), whose keys and
                 values the layers hold; 0 but in generation */
    void *memory, *cache;            /* cache: activations_add_cache's, or NULL */
    struct layer_activations *layer; /* [L]; without training all share one set of arrays */
    tensor *last, *last_norm;        /* (N, C) */
    float *last_rstd, *losses;       /* (N) */
    tensor *projected;               /* (N, C)   into the stream, before it is added */
    int32_t *tokens, *targets;       /* (N) */
    float *cosine, *sine;            /* (T, D/2): rotary angles t * theta^(-2i/D) */
    /* for training */
    tensor *dresidual, *dnorm; /* (N, C) */
    tensor *dqkv;              /* (N, (H+2K)D) */
    tensor *dattention;        /* (N, HD) */
    tensor *dgate_up;          /* (N, 2F) */
    tensor *dswiglu;           /* (N, F) */
};

/* training: with room for a backward pass. The caller releases it. 0, or -1 after reporting. */
int activations_allocate(struct activations *a, const struct llama_config *config,
                         const struct backend *be, int B, int T, bool training);

/* Gives each layer keys and values of its own, for a pass without training that goes on behind
 * tokens of earlier passes (backend.h, attention_continue). 0, or -1 after reporting. */
int activations_add_cache(struct activations *a, const struct llama_config *config,
                          const struct backend *be);

/* Whether each layer's keys and values outlive a pass, and a pass can go on behind them. */
bool activations_remember(const struct activations *a, const struct llama_config *config,
                          const struct backend *be);

void activations_release(struct activations *a, const struct backend *be);

/* The bytes that activations_allocate would take, for elements of `element_bytes`. */
size_t activations_bytes(const struct llama_config *config, size_t element_bytes, int B, int T,
                         bool training);

#ifdef __cplusplus
}
#endif
#endif
