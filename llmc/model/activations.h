/* activations.h — the memory of one forward and backward pass besides parameters and gradients.
 *
 * One block of memory, cut into arrays. Shapes are for B sequences of T tokens, N = B*T rows; see
 * backend.h for the letters.
 *
 * Every layer keeps the arrays that its backward pass reads. To save memory, all layers can share
 * some of the arrays, and backward computes these again (the trainer's recompute_layer):
 *
 *     none        everything is kept; only the attention matrix is computed twice
 *     norms       shared: attention_norm, mlp_norm, swiglu: no product is computed again
 *     attention   shared: qkv and attention too
 *     block       shared: all but residual
 */
#ifndef LLMC_MODEL_ACTIVATIONS_H
#define LLMC_MODEL_ACTIVATIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "llmc/backend/backend.h"
#include "llmc/model/config.h"

/* Each value includes the recomputation of the value before it. */
enum recompute {
    RECOMPUTE_NONE,
    RECOMPUTE_NORMS,
    RECOMPUTE_ATTENTION,
    RECOMPUTE_BLOCK,
    RECOMPUTE_AUTO
};
extern const char *const recompute_names[]; /* ends with NULL */

struct layer_activations {
    tensor *residual;       /* (N, C) the residual stream before the layer */
    tensor *attention_norm; /* (N, C) */
    float *attention_rstd;  /* (N) */
    tensor *qkv;            /* (N, (H+2K)D), rotated */
    tensor *attention;      /* (N, HD) */
    float *log_sum_exp;     /* (B, H, T) */
    tensor *middle;         /* (N, C) the residual stream between attention and feed-forward */
    tensor *mlp_norm;       /* (N, C) */
    float *mlp_rstd;        /* (N) */
    tensor *gate_up;        /* (N, 2F) */
    tensor *swiglu;         /* (N, F) */
};

/* Copies of the losses of passes, on the host. On a device they are pinned. */
struct loss_copies {
    float *copy; /* (BACKEND_LOSS_MARKS, N) */
    int set;     /* whose marks it uses (backend.h); 0 unless the caller sets it */
    /* Passes so far, which begin at 0 again after 2^32; at most BACKEND_LOSS_MARKS are sent and not
     * read. */
    uint32_t sent, read;
};

struct activations {
    int B, T; /* the largest pass that there is room for */
    /* Number of earlier tokens of the sequence (B = 1), whose keys and values the layers hold; 0
     * except in generation. */
    int past;
    enum recompute recompute;
    void *memory, *cache;            /* cache: activations_add_cache's, or NULL */
    struct layer_activations *layer; /* [L]; without training all share one set of arrays */
    tensor *last, *last_norm;        /* (N, C) */
    float *last_rstd, *losses;       /* (N) */
    tensor *projected;               /* (N, C) what a block adds to the residual stream */
    int32_t *tokens, *targets;       /* (N) */
    /* On the host, for activations_send. Without a device they are the arrays above. */
    int32_t *host_tokens, *host_targets;
    struct loss_copies host_losses; /* of activations_send_losses */
    float *cosine, *sine;           /* (T, D/2): rotary angles t * theta^(-2i/D) */
    /* for training */
    tensor *dresidual, *dnorm; /* (N, C) */
    tensor *dqkv;              /* (N, (H+2K)D) */
    tensor *dattention;        /* (N, HD) */
    tensor *dgate_up;          /* (N, 2F) */
    tensor *dswiglu;           /* (N, F) */
};

/* training: with room for a backward pass. The caller releases it. Returns 0, or -1 after
 * reporting. */
int activations_allocate(struct activations *a, const struct llama_config *config,
                         const struct backend *be, int B, int T, bool training,
                         enum recompute recompute);

/* Gives each layer its own keys and values, so that a pass without training can continue a
 * sequence of earlier passes. Does nothing if the backend has no attention_continue (backend.h).
 * Returns 0, or -1 after reporting. */
int activations_add_cache(struct activations *a, const struct llama_config *config,
                          const struct backend *be);

/* Whether each layer keeps its keys and values after a pass, so that a later pass can continue
 * the sequence. */
bool activations_remember(const struct activations *a, const struct llama_config *config,
                          const struct backend *be);

void activations_release(struct activations *a, const struct backend *be);

/* The bytes that activations_allocate would take, for elements of `element_bytes`. */
size_t activations_bytes(const struct llama_config *config, size_t element_bytes, int B, int T,
                         bool training, enum recompute recompute);

/* Call before a pass over n rows: copies the host's tokens and targets to the backend. */
void activations_send(struct activations *a, const struct backend *be, int n);

/* Call after the classifier: begins to copy the losses of the n rows to the host. On a device, the
 * host does not wait. */
void activations_send_losses(struct activations *a, const struct backend *be, int n);

/* Waits for the earliest pass whose losses were sent and not read, and returns them, in host
 * memory. They stay until BACKEND_LOSS_MARKS more are sent. */
const float *activations_read_losses(struct activations *a, const struct backend *be);

/* Both. All losses that were sent before must have been read. */
const float *activations_losses(struct activations *a, const struct backend *be, int n);

/* Mean of the first n losses, in double. */
static inline double mean_loss(const float *losses, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += losses[i];
    return sum / n;
}

#endif
