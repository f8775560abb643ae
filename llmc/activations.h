/* activations.h — what one forward and backward pass needs beside parameters and gradients.
 *
 * One block of memory, cut into arrays. Shapes are for B sequences of T tokens, N = B*T rows; see
 * backend.h for the letters.
 *
 * Every layer keeps what its backward pass reads, or, to save memory, lets all layers share some
 * arrays, which backward then computes again (the trainer's recompute_layer):
 *
 *     none        everything is kept; only the attention matrix is computed twice
 *     attention   shared: attention_norm, qkv, attention
 *     block       shared: all but residual
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

enum recompute { RECOMPUTE_NONE, RECOMPUTE_ATTENTION, RECOMPUTE_BLOCK, RECOMPUTE_AUTO };
extern const char *const recompute_names[]; /* ends with NULL */

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
    enum recompute recompute;
    void *memory, *cache;            /* cache: activations_add_cache's, or NULL */
    struct layer_activations *layer; /* [L]; without training all share one set of arrays */
    tensor *last, *last_norm;        /* (N, C) */
    float *last_rstd, *losses;       /* (N) */
    tensor *projected;               /* (N, C)   into the stream, before it is added */
    int32_t *tokens, *targets;       /* (N) */
    /* The same for the host to write and read; on a device see activations_send and _losses. */
    int32_t *host_tokens, *host_targets;
    float *host_losses;
    float *cosine, *sine; /* (T, D/2): rotary angles t * theta^(-2i/D) */
    /* for training */
    tensor *dresidual, *dnorm; /* (N, C) */
    tensor *dqkv;              /* (N, (H+2K)D) */
    tensor *dattention;        /* (N, HD) */
    tensor *dgate_up;          /* (N, 2F) */
    tensor *dswiglu;           /* (N, F) */
};

/* training: with room for a backward pass. The caller releases it. 0, or -1 after reporting. */
int activations_allocate(struct activations *a, const struct llama_config *config,
                         const struct backend *be, int B, int T, bool training,
                         enum recompute recompute);

/* Gives each layer keys and values of its own, for a pass without training that goes on behind
 * tokens of earlier passes, if the backend has attention_continue (backend.h). 0, or -1 after
 * reporting. */
int activations_add_cache(struct activations *a, const struct llama_config *config,
                          const struct backend *be);

/* Whether each layer's keys and values outlive a pass, and a pass can go on behind them. */
bool activations_remember(const struct activations *a, const struct llama_config *config,
                          const struct backend *be);

void activations_release(struct activations *a, const struct backend *be);

/* The bytes that activations_allocate would take, for elements of `element_bytes`. */
size_t activations_bytes(const struct llama_config *config, size_t element_bytes, int B, int T,
                         bool training, enum recompute recompute);

/* Before a pass over n rows: the host's tokens and targets to the backend. */
void activations_send(struct activations *a, const struct backend *be, int n);

/* After the classifier: the losses (n) of the rows, for the host. */
const float *activations_losses(struct activations *a, const struct backend *be, int n);

#ifdef __cplusplus
}
#endif
#endif
