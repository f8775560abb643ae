/* backend.h — the operations that a Llama needs, as one struct of functions.
 *
 * train_llama2.cu uses this interface alone. A backend carries the operations out:
 *
 *     cpu    float32 or bfloat16 (cpu/)
 *     cuda   bfloat16 or float32 on an NVIDIA GPU (cuda/)
 *
 * A C++ compiler also compiles the cuda backend's sources against an emulation of the device
 * (dev/emulation), which takes cuda's place in test programs.
 *
 * Conventions, for every operation of every backend
 *   N      rows (tokens), usually B*T; B sequences of T tokens, row index b*T + t
 *   C      model width; V vocabulary; F width of the feed-forward layer
 *   H, K   query heads, key/value heads (H % K == 0); D head size
 *   All matrices are row-major and dense. Weights have Hugging Face's layout: (out, in).
 *   `tensor` is an array in the backend's working type (float32 or bfloat16); `float` arrays are
 *   float32 on every backend. Sums are accumulated in float32 or wider.
 *   `weight` is an array of parameters in use. If `weight_bytes` is the size of the working type,
 *   `convert` or `adamw` has rounded them. If it is the size of float32, they are the float32
 *   parameters themselves, and operations round those that they multiply when they read them.
 *   Gradients of weights are float32 and take `accumulate`: false overwrites, true adds
 *   (micro-batches, tied embeddings), so that no sum over tokens is ever rounded to the working
 *   type. Gradients of inputs overwrite unless said otherwise.
 *   Arrays lie in the backend's memory, unless the comment says "host". If `on_device` is true,
 *   this is not host memory: only upload, download and the operations may access it. Operations run
 *   in the order of their calls, and may still run when a call returns. Operations that return or
 *   write something for the host wait until it is complete.
 *   Output never overlaps input unless said otherwise.
 *   Determinism: the same arguments give the same bits, whatever the number of threads.
 *   Thread safety: several OpenMP threads may call operations at once. On the CPU, an operation
 *   inside a parallel region runs on the calling thread, and one outside uses all threads. On a
 *   device they take turns.
 *   Errors: the caller is responsible for the arguments. Only `allocate` can fail; it returns NULL.
 *   If an operation cannot allocate its working memory, or a device fails, the program ends after
 *   one line.
 */
#ifndef LLMC_BACKEND_BACKEND_H
#define LLMC_BACKEND_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef void tensor; /* array in the backend's working type, see above */
typedef void weight; /* array of parameters in use, see above */

enum dtype { DTYPE_FLOAT32, DTYPE_BF16 };

struct adamw_settings {
    float beta1, beta2, eps;
    float lead; /* in steps, of `ahead` */
};

/* Arrays of n elements for adamw. */
struct adamw_part {
    weight *param;
    float *master, *m, *v, *ahead;
    const float *gradient;
    size_t n;
    float weight_decay;
};

struct muon_settings {
    float momentum;
    float lead; /* in steps, of `ahead` */
};

/* A packet of a vector: elements that one worker owns, and which arrive together or not at all. */
struct backend_packet {
    size_t element; /* the first one, in the vector */
    size_t owned;   /* the same, counted among the elements that the owner owns */
    uint32_t count;
    int32_t owner;
};

/* The packets that the workers of a device exchange. packet and takes are in the backend's memory. */
struct backend_exchange {
    const struct backend_packet *packet; /* [packets] */
    const uint8_t *takes;      /* [workers][owners]: 1: the worker sends the owner its packets, and
                             receives them. 0 for the owner itself */
    const int32_t *partner;    /* [owners][groups], the host's: see exchange_average */
    uint32_t packets, longest; /* longest: elements of the longest packet */
    int workers, owners, groups;
};

/* BACKEND_SETS: the most sets (sets_begin). Then the marks of d2h_mark: for buckets, and for losses of each
 * set (llmc/model/activations.h). */
enum { BACKEND_SETS = 8, BACKEND_MARKS = 256, BACKEND_LOSS_MARKS = 2, BACKEND_PASS_KEY = 64 };
enum { BACKEND_ALL_MARKS = BACKEND_MARKS + BACKEND_SETS * BACKEND_LOSS_MARKS };

/* Which kernels compute attention: the backend's own, or a library's. Their bits differ, so all
 * ranks, also after --resume, must use the same choice. */
struct attention_choice {
    /* The caller has chosen. Before that, the library may fail, and then computes nothing. */
    int32_t made;
    int32_t library; /* version of the library for the shape below (cuDNN: 91900); 0: own kernels */
    int32_t B, T, H, K, D;
    int32_t
        from; /* the tokens of a sequence from which on the library's suit this device; 0: none */
    const char *failed; /* why the library failed since attention_open; "": it has not */
};

/* A handle with which another process can open a device's memory; it may be sent there. */
struct backend_shared {
    unsigned char handle[128];
};

struct backend {
    const char *name;     /* "cpu", "cuda" */
    const char *details;  /* one line for the log: instruction set or device, GEMM library */
    const char *device;   /* equal for two ranks only if they share it; "" if not on_device */
    size_t element_bytes; /* of the working type */
    size_t weight_bytes;  /* of parameters in use: of the working type, or of float32 */
    bool on_device;       /* the host cannot access memory from `allocate` */
    /* NULL if there is no choice. The caller may change all but the shape between operations. */
    struct attention_choice *attention_choice;
    /* Prepares a library's attention for a shape, with its working memory, and sets the shape of
     * attention_choice. Returns the library's version, or 0: `failed` has the reason in one line.
     * attention_close frees everything. */
    int (*attention_open)(int B, int T, int H, int K, int D);
    void (*attention_close)(void);

    /* ---- memory ---- */
    void *(*allocate)(size_t bytes); /* aligned to 64 bytes, zeroed; NULL if out of memory */
    void (*release)(void *memory);   /* NULL is fine */
    void (*copy)(void *to, const void *from, size_t bytes); /* both in the backend's memory */
    void (*clear)(void *memory, size_t bytes);
    void (*upload)(void *to, const void *host, size_t bytes); /* on return, host may be reused */
    void (*download)(void *host, const void *from, size_t bytes);
    size_t (*memory_free)(void); /* bytes that can be allocated now; 0: unknown */
    /* to (n) = from (n) as parameters in use: rounded to nearest if these have fewer bits */
    void (*convert)(weight *to, const float *from, size_t n);

    /* ---- copies while operations compute; NULL if not on_device ----
     * They copy between the device and pinned memory, which is host memory that the device can
     * access.
     *
     * d2h_async copies `from` to `host`, after the operations called so far. Until d2h_wait has
     * returned, or d2h_on_complete has called back, the caller must not change `from`, and `host`
     * is not complete. d2h_on_complete calls call(context) on a separate thread as soon as all
     * copies called so far are complete, in the order of these calls; `call` must not use the
     * backend. d2h_wait waits for all copies. It also waits for the operations called before a
     * d2h_async of 0 bytes. d2h_mark sets a mark after the copies called so far; d2h_wait_mark
     * waits for the copies before the last d2h_mark of the same number, which is less than
     * BACKEND_ALL_MARKS.
     * With d2h_order_mark the host does not wait for them, but operations called later do, so that
     * these may change the memory that was copied.
     *
     * h2d_async copies `host` to `to` before any operation that is called later. The copy may
     * begin while earlier operations still run, so `to` must not be used by operations called
     * since the host last waited (d2h_wait, download, sum_of_squares). The caller must not change
     * `host` until it has waited for a later operation. h2d_wait waits for these copies.
     * h2d_convert_async copies n float32 in the same way, and rounds them as `convert` does.
     * peer_async copies from open_shared's memory in the same way. d2h_round_async copies n float32 like d2h_async,
     * and rounds them to bfloat16 (uint16_t, the upper half of a float32), to nearest even. `round`
     * rounds in place to the same values. */
    void *(*allocate_pinned)(size_t bytes); /* NULL if out of memory; not zeroed */
    void (*release_pinned)(void *memory);   /* NULL is fine */
    /* Pins existing host memory that begins at a page. Returns false if the system refuses. Call
     * unpin before the memory is freed. */
    bool (*pin)(void *memory, size_t bytes);
    void (*unpin)(void *memory);
    void (*d2h_async)(void *host, const void *from, size_t bytes);
    void (*d2h_on_complete)(void (*call)(void *context), void *context);
    void (*d2h_wait)(void);
    void (*d2h_mark)(int mark);
    void (*d2h_wait_mark)(int mark);
    void (*d2h_order_mark)(int mark);
    void (*h2d_async)(void *to, const void *host, size_t bytes);
    void (*h2d_wait)(void);
    void (*peer_async)(void *to, const void *from, size_t bytes);
    void (*h2d_convert_async)(weight *to, const float *host, size_t n);
    void (*d2h_round_async)(uint16_t *host, const float *from, size_t n);
    void (*round)(float *x, size_t n);
    /* Lets operations of other processes on this host read memory from `allocate`: `share` gives
     * the handle. open_shared returns an address for operations, or NULL if this device cannot
     * reach the other. Call close_shared before the process that shares the memory releases it. */
    bool (*share)(const void *memory, struct backend_shared *out);
    const void *(*open_shared)(const struct backend_shared *shared);
    void (*close_shared)(const void *memory);
    /* ---- sets: several passes at once; NULL if not on_device ----
     * Between sets_begin(n), n <= BACKEND_SETS, and sets_end: the operations that this thread calls
     * after use_set(s), s < n, run in the order of their calls, but beside those of other sets, whose
     * results they must not use. They run after all that was called before sets_begin, and before all
     * that is called after sets_end. (Other threads, and all other calls, use set 0.) */
    void (*sets_begin)(int sets);
    void (*use_set)(int set);
    void (*sets_end)(void);
    /* ---- passes that repeat; NULL if not on_device ----
     * pass_begin(number, key, bytes), number >= 0, bytes <= BACKEND_PASS_KEY: if a pass with this number and this
     * key, compared as bytes, was called twice before, its operations are queued again, all at once,
     * and the result is true. Otherwise the caller calls them, and then pass_end(number). The key has all
     * that their arguments depend on. They may be operations of the model and `convert`, and the
     * contents of memory may differ each time. */
    bool (*pass_begin)(int number, const void *key, size_t bytes);
    void (*pass_end)(int number);

    /* ---- embedding ---- */
    /* out (N, C) = table (V, C)[tokens (N)] */
    void (*embedding_forward)(tensor *out, const int32_t *tokens, const weight *table, int N,
                              int C);
    /* adds the rows of dout (N, C) to rows tokens (N) of dtable (V, C), in order of N */
    void (*embedding_backward)(float *dtable, const int32_t *tokens, const tensor *dout, int N,
                               int C, int V, bool accumulate);

    /* ---- RMSNorm (Zhang & Sennrich 2019): out = x rstd w, rstd = 1/sqrt(mean(x^2) + eps) ---- */
    void (*rmsnorm_forward)(tensor *out /* (N, C) */, float *rstd /* (N) */,
                            const tensor *x /* (N, C) */, const weight *w /* (C) */, int N, int C,
                            float eps);
    /* sum (N, C) = x + y, out = rmsnorm(sum): the residual connection and the norm that follows it.
     * sum may be x itself. */
    void (*residual_rmsnorm_forward)(tensor *sum, tensor *out, float *rstd, const tensor *x,
                                     const tensor *y, const weight *w, int N, int C, float eps);
    /* dx (N, C) is ADDED to (it already holds the residual branch's gradient); dw (C). */
    void (*rmsnorm_backward)(tensor *dx, float *dw, const tensor *dout, const tensor *x,
                             const weight *w, const float *rstd, int N, int C, bool accumulate);

    /* ---- matrix products: out (N, O) = x (N, I) w^T, w (O, I) ---- */
    void (*matmul_forward)(tensor *out, const tensor *x, const weight *w, int N, int I, int O);
    /* dx (N, I) = dout (N, O) w, or += with accumulate */
    void (*matmul_backward_input)(tensor *dx, const tensor *dout, const weight *w, int N, int I,
                                  int O, bool accumulate);
    /* dw (O, I) = dout^T (O, N) x (N, I) */
    void (*matmul_backward_weight)(float *dw, const tensor *dout, const tensor *x, int N, int I,
                                   int O, bool accumulate);

    /* ---- rotary embedding, Hugging Face's half-split layout, in place ----
     * qkv (B*T, (H+2K)*D): per row H query heads, K key heads, K value heads (unchanged).
     * cosine, sine (T, D/2). Element i < D/2 pairs with i + D/2. `backward` rotates back. */
    void (*rope)(tensor *qkv, const float *cosine, const float *sine, int B, int T, int H, int K,
                 int D, bool backward);

    /* ---- causal grouped-query attention, scale 1/sqrt(D) ----
     * out (B*T, H*D); log_sum_exp (B, H, T) is kept for backward, but the T x T matrix is not. */
    void (*attention_forward)(tensor *out, float *log_sum_exp, const tensor *qkv, int B, int T,
                              int H, int K, int D);
    void (*attention_backward)(tensor *dqkv, const tensor *dout, const tensor *out,
                               const tensor *qkv, const float *log_sum_exp, int B, int T, int H,
                               int K, int D);
    /* Computes rows first ... first+T-1 of one sequence; earlier calls computed the rows before.
     * qkv (first+T, (H+2K)D) has all rows, out (T, H*D) the new ones. This is for generation,
     * where T is mostly 1; nothing is kept for backward. NULL: generation computes all rows
     * every time. */
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
    void (*classifier)(float *losses, tensor *dx, float *dw, const tensor *x, const weight *w,
                       const int32_t *targets, int N, int C, int V, float scale, bool accumulate);

    /* ---- optimiser ---- */
    /* AdamW (Loshchilov & Hutter 2019), n elements; step counts from 1. The gradient is multiplied
     * by gradient_scale (clipping). param gets master's new values as parameters in use; on every
     * backend it may be master itself: then there is no second copy to write. */
    /* ahead (n, float32), unless NULL, gets master + lead * (master - master before). */
    void (*adamw)(weight *param, float *master, float *m, float *v, float *ahead,
                  const float *gradient, size_t n, const struct adamw_settings *settings, int step,
                  float learning_rate, float weight_decay, float gradient_scale);
    /* The same for all parts, none of which overlaps another. NULL: one after another is as fast */
    void (*adamw_parts)(const struct adamw_part *part, int count,
                        const struct adamw_settings *settings, int step, float learning_rate,
                        float gradient_scale);
    /* Muon (Jordan 2024) of a matrix (rows, cols): m = momentum m + (1 - momentum) gradient, and
     * master = (1 - learning_rate weight_decay) master - rate O, where O has singular values near 1,
     * and the singular vectors of (1 - momentum) gradient + momentum m, Nesterov's step (muon.h).
     * Otherwise as adamw. A device that computes in bfloat16 multiplies in it */
    void (*muon)(weight *param, float *master, float *m, float *ahead, const float *gradient,
                 int rows, int cols, const struct muon_settings *settings, float learning_rate,
                 float weight_decay, float gradient_scale);
    /* the sum of squares in double, in an order that depends on n alone */
    double (*sum_of_squares)(const float *x, size_t n);
    /* out[i] (host) = sum_of_squares of x[i] (n[i]), i < count; the host waits only once */
    void (*sums_of_squares)(double *out, const float *const *x, const size_t *n, int count);

    /* ---- for lossynet; `weight` and the list of senders are the host's ----
     * out[j] = sum over i of weight[j / packet][i] * sender[i][j], j < n, in order of i.
     * weight (ceil(n / packet), N); weight 0 means "did not arrive": sender[i] is then not read.
     * out may be one of the senders. */
    void (*weighted_sum)(float *out, const float *const *sender, const float *weight, int N,
                         size_t n, size_t packet);
    /* The same with `out` in pinned memory, and senders in pinned memory or on a device, which may
     * be another process's (open_shared). It does not wait for the operations called so far, and
     * `out` is complete on return. NULL if not on_device */
    void (*weighted_sum_pinned)(float *out, const float *const *sender, const float *weight, int N,
                                size_t n, size_t packet);
    /* the same with senders in bfloat16; the second writes bfloat16, rounded once */
    void (*weighted_sum_pinned_bf16)(float *out, const uint16_t *const *sender, const float *weight,
                                     int N, size_t n, size_t packet);
    void (*rounded_sum_pinned_bf16)(uint16_t *out, const uint16_t *const *sender,
                                    const float *weight, int N, size_t n, size_t packet);
    /* the same with senders in float32, which are rounded to bfloat16 before they are added */
    void (*rounded_sum_pinned)(uint16_t *out, const float *const *sender, const float *weight,
                               int N, size_t n, size_t packet);
    /* Between these two calls, the functions above whose `out` is pinned only queue their work: the
     * second waits for all of it. The lists of senders and weights may be reused at once. */
    void (*pinned_sums_begin)(void);
    void (*pinned_sums_end)(void);

    /* ---- the exchange between workers of one device; NULL if not on_device ----
     * Each call does the work of a phase for all packets and all workers. Results have the same bits
     * as lossynet's on a CPU, but for those of a NaN. vector[v]: of worker v. The lists of vectors,
     * keys, weights and marks are the host's.
     *
     * exchange_round: rounds, in vector[v], the packets that v takes: with 16 `bits` to bfloat16, to
     * nearest even; with 8, 6 or 4 in blocks of 32, from the packet's first element on, to integers
     * with a scale. The block that begins with element e is rounded at random with the numbers of
     * key[v] + e, or to nearest if key is NULL. `narrow`: before that, rounds these packets and
     * those that v owns to bfloat16
     * exchange_average: packet k of vector[owner] = sum over g < groups of weight[k * groups + g] *
     * that of vector[partner[owner * groups + g]], in order of g. Weight 0: not read
     * exchange_copy: packet k of vector[v], if v takes it and arrived[v * packets + k] is not 0, is
     * the owner's, rounded as above to nearest; with 32 bits it is not rounded. ahead[o]: where the
     * elements that o owns lie one after another; NULL: in vector[o]
     * gather: out[v * n + i] (host) = vector[v][element[i]], i < n, v < count. `of` not NULL: out[i]
     * = vector[of[i]][element[i]], i < n. element and `of` are the host's */
    void (*exchange_round)(const struct backend_exchange *e, float *const *vector, int bits,
                           const uint64_t *key, bool narrow);
    void (*exchange_average)(const struct backend_exchange *e, float *const *vector,
                             const float *weight);
    void (*exchange_copy)(const struct backend_exchange *e, float *const *vector,
                          const float *const *ahead, const uint8_t *arrived, int bits);
    void (*gather)(float *out, float *const *vector, int count, const size_t *element,
                   const int32_t *of, size_t n);
};

/* The CPU backend in this working type, built for the best instruction set that this machine has, or
 * for that which the environment variable TRAIN_LLAMA2_ISA names. NULL, with a message, if this
 * machine has not what it names: a program asks before anything else, and not again. */
const struct backend *backend_cpu(enum dtype dtype);

#ifdef __cplusplus
}
#endif
#endif
