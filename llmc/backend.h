/* backend.h — the operations a Llama needs, as one struct of functions.
 *
 * train_llama2.cu is written against this interface alone; a backend says how the operations are
 * carried out:
 *
 *     cpu    float32 (backend_cpu.c)
 *     cuda   bfloat16 or float32 on an NVIDIA GPU (backend_cuda.cu and cuda/)
 *
 * The cuda backend's sources are also compiled by a C++ compiler against an emulation of the device
 * (dev/cuda_emulation), and take cuda's place in test programs.
 *
 * Conventions, for every operation of every backend
 *   N      rows (tokens), usually B*T; B sequences of T tokens, row index b*T + t
 *   C      model width; V vocabulary; F width of the feed-forward layer
 *   H, K   query heads, key/value heads (H % K == 0); D head size
 *   All matrices are row-major and dense. Weights have Hugging Face's layout: (out, in).
 *   `tensor` is an array in the backend's working type (float32 on the CPU; float32 or bfloat16 on
 *   CUDA); `float` arrays are float32 on every backend. Sums are accumulated in float32 or wider.
 *   Gradients of weights are float32 and take `accumulate`: false overwrites, true adds
 *   (micro-batches, tied embeddings), so that no sum over tokens is ever rounded to the working
 *   type. Gradients of inputs overwrite unless said otherwise.
 *   Arrays lie in the backend's memory unless said "host". Where `on_device` is true that is not
 *   the host's: only upload, download and the operations may touch it. Operations follow one
 *   another in the order of their calls, but may still run when a call returns; those that return
 *   or write something for the host wait for it.
 *   Output never overlaps input unless said otherwise.
 *   Determinism: the same arguments give the same bits, whatever the number of threads.
 *   Thread safety: operations may be called from several OpenMP threads at once. On the CPU, called
 *   inside a parallel region they stay on the calling thread, called outside they use all threads;
 *   on a device they take turns.
 *   Errors: arguments are the caller's duty; only `allocate` can fail (it returns NULL). Working
 *   memory that an operation keeps for itself ends the program when there is none, and so does a
 *   device that fails, after one line.
 */
#ifndef LLMC_BACKEND_H
#define LLMC_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef void tensor; /* array in the backend's working type, see above */

enum dtype { DTYPE_FLOAT32, DTYPE_BF16 };

struct adamw_settings {
    float beta1, beta2, eps;
};

struct backend {
    const char *name;     /* "cpu", "cuda" */
    const char *details;  /* one line for the log: instruction set or device, GEMM library */
    size_t element_bytes; /* of the working type */
    bool on_device;       /* the host cannot touch what `allocate` gives */

    /* ---- memory ---- */
    void *(*allocate)(size_t bytes); /* aligned to 64 bytes, zeroed; NULL when there is none */
    void (*release)(void *memory);   /* NULL is fine */
    void (*copy)(void *to, const void *from, size_t bytes); /* both in the backend's memory */
    void (*clear)(void *memory, size_t bytes);
    void (*upload)(void *to, const void *host, size_t bytes); /* host may be reused at once */
    void (*download)(void *host, const void *from, size_t bytes);
    size_t (*memory_free)(void); /* bytes that could be allocated now; 0: not known */
    /* to (n) = from (n), rounded to the nearest value of the working type */
    void (*convert)(tensor *to, const float *from, size_t n);

    /* ---- copies beside the computing; NULL where not on_device ----
     * Of pinned memory, the host's that the device can reach. `send` copies what the operations
     * called so far leave in `from`; `from` must stay so, and `host` is not there, until `sent` has
     * returned or `when_sent` has called. That calls call(context), which may not use the backend,
     * on a thread of its own as soon as all sent so far is there, in the order of the calls.
     * `receive` copies before what is called from now on, which finds it in `to`, and perhaps before
     * the end of what was called earlier: `to` is nothing that operations use which were called
     * since the host last waited (sent, download, sum_of_squares). `host` must stay until it waits
     * for a later operation. `send` of nothing still makes `sent` wait for what was called so far. */
    void *(*allocate_pinned)(size_t bytes); /* NULL when there is none; not cleared */
    void (*release_pinned)(void *memory);   /* NULL is fine */
    void (*send)(void *host, const void *from, size_t bytes);
    void (*when_sent)(void (*call)(void *context), void *context);
    void (*sent)(void);
    void (*receive)(void *to, const void *host, size_t bytes);
    /* A file descriptor of dma-buf through which other devices reach `memory`, at *offset; the caller
     * closes it. -1: none */
    int (*export_memory)(const void *memory, size_t bytes, size_t *offset);

    /* ---- embedding ---- */
    /* out (N, C) = table (V, C)[tokens (N)] */
    void (*embedding_forward)(tensor *out, const int32_t *tokens, const tensor *table, int N,
                              int C);
    /* dtable (V, C) gets the rows of dout (N, C) added, in order of N */
    void (*embedding_backward)(float *dtable, const int32_t *tokens, const tensor *dout, int N,
                               int C, int V, bool accumulate);

    /* ---- RMSNorm (Zhang & Sennrich 2019): out = x rstd w, rstd = 1/sqrt(mean(x^2) + eps) ---- */
    void (*rmsnorm_forward)(tensor *out /* (N, C) */, float *rstd /* (N) */,
                            const tensor *x /* (N, C) */, const tensor *w /* (C) */, int N, int C,
                            float eps);
    /* sum (N, C) = x + y, out = rmsnorm(sum): the residual connection and the norm that follows it.
     * sum may be x itself. */
    void (*residual_rmsnorm_forward)(tensor *sum, tensor *out, float *rstd, const tensor *x,
                                     const tensor *y, const tensor *w, int N, int C, float eps);
    /* dx (N, C) is ADDED to (it already holds the residual branch's gradient); dw (C). */
    void (*rmsnorm_backward)(tensor *dx, float *dw, const tensor *dout, const tensor *x,
                             const tensor *w, const float *rstd, int N, int C, bool accumulate);

    /* ---- matrix products: out (N, O) = x (N, I) w^T, w (O, I) ---- */
    void (*matmul_forward)(tensor *out, const tensor *x, const tensor *w, int N, int I, int O);
    /* dx (N, I) = dout (N, O) w, or += with accumulate */
    void (*matmul_backward_input)(tensor *dx, const tensor *dout, const tensor *w, int N, int I,
                                  int O, bool accumulate);
    /* dw (O, I) = dout^T (O, N) x (N, I) */
    void (*matmul_backward_weight)(float *dw, const tensor *dout, const tensor *x, int N, int I,
                                   int O, bool accumulate);

    /* ---- rotary embedding, Hugging Face's half-split layout, in place ----
     * qkv (B*T, (H+2K)*D): per row H query heads, K key heads, K value heads (left alone).
     * cosine, sine (T, D/2). Element i < D/2 pairs with i + D/2. `backward` turns the other way. */
    void (*rope)(tensor *qkv, const float *cosine, const float *sine, int B, int T, int H, int K,
                 int D, bool backward);

    /* ---- causal grouped-query attention, scale 1/sqrt(D) ----
     * out (B*T, H*D); log_sum_exp (B, H, T) is kept for backward: the T x T matrix is not. */
    void (*attention_forward)(tensor *out, float *log_sum_exp, const tensor *qkv, int B, int T,
                              int H, int K, int D);
    void (*attention_backward)(tensor *dqkv, const tensor *dout, const tensor *out,
                               const tensor *qkv, const float *log_sum_exp, int B, int T, int H,
                               int K, int D);
    /* Rows first ... first+T-1 of one sequence, whose rows 0 ... first-1 were computed by earlier
     * calls: qkv (first+T, (H+2K)D) holds all, out (T, H*D) the new ones. For generation, where T
     * is mostly 1; nothing is kept for backward. NULL: generation computes all rows every time. */
    void (*attention_continue)(tensor *out, const tensor *qkv, int first, int T, int H, int K,
                               int D);

    /* ---- SwiGLU (Shazeer 2020): out (N, F) = silu(gate) up, gate_up (N, 2F) = [gate | up] ---- */
    void (*swiglu_forward)(tensor *out, const tensor *gate_up, int N, int F);
    void (*swiglu_backward)(tensor *dgate_up, const tensor *dout, const tensor *gate_up, int N,
                            int F);

    /* ---- classifier: logits = x w^T, softmax, cross-entropy, and their gradients, fused ----
     * Works on chunks of tokens: the N x V logits never exist at once.
     * targets (N) in [0, V). losses (N) = -log softmax(logits)[target], natural logarithm.
     * dx (N, C) and dw (V, C) are gradients of scale * sum(losses); both NULL: forward only. */
    void (*classifier)(float *losses, tensor *dx, float *dw, const tensor *x, const tensor *w,
                       const int32_t *targets, int N, int C, int V, float scale, bool accumulate);

    /* ---- optimiser ---- */
    /* AdamW (Loshchilov & Hutter 2019), n elements; step counts from 1. The gradient is used times
     * gradient_scale (clipping). param gets master's new values in the working type; it may be
     * master itself, on every backend: then there is no second copy to write. */
    void (*adamw)(tensor *param, float *master, float *m, float *v, const float *gradient, size_t n,
                  const struct adamw_settings *settings, int step, float learning_rate,
                  float weight_decay, float gradient_scale);
    /* sum of squares in double, in an order that depends on n alone */
    double (*sum_of_squares)(const float *x, size_t n);

    /* ---- for lossynet; `weight`, `arrived`, `element` and the list of senders are the host's ----
     * out[j] = sum over i of weight[j / packet][i] * sender[i][j], j < n, in order of i.
     * weight (ceil(n / packet), N); weight 0 means "did not arrive": sender[i] is then not read.
     * out may be one of the senders. */
    void (*weighted_sum)(float *out, const float *const *sender, const float *weight, int N,
                         size_t n, size_t packet);
    /* the same, out and senders in pinned memory, and out is there on return; NULL where not
     * on_device */
    void (*weighted_sum_pinned)(float *out, const float *const *sender, const float *weight, int N,
                                size_t n, size_t packet);
    /* to[j] = from[j] for j < n where arrived[j / packet] is not 0; the rest stays */
    void (*masked_copy)(float *to, const float *from, const uint8_t *arrived, size_t n,
                        size_t packet);
    /* the same of from[j] rounded to bfloat16, to nearest even; to may be from */
    void (*masked_round)(float *to, const float *from, const uint8_t *arrived, size_t n,
                         size_t packet);
    /* out[i] (host) = vector[element[i]], i < n */
    void (*gather)(float *out, const float *vector, const size_t *element, size_t n);
};

/* The CPU backend, built for the best instruction set this machine has. Never NULL. */
const struct backend *backend_cpu(void);

#ifdef __cplusplus
}
#endif
#endif
