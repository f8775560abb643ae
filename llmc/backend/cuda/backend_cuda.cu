/* backend_cuda.cu — the operations of backend.h on an NVIDIA GPU, in bfloat16 and in float32.
 *
 * Compiled once per working type, with -DBACKEND_DTYPE=bf16 or float32 (by nvcc, or by g++ against
 * the emulation: dev/emulation). This file calls the kernels for each operation. What is where:
 *
 *     cuda/<family>.cuh   kernels, with launchers cuda_<operation>(); attention has a folder
 *     cuda/device.h       memory, streams (with a drawing of their waits), matrix products
 *     backend_cuda.h      how a program finds a device and gets this backend
 *
 * Every operation takes its turn (in_turn, in the table at the end) and queues its work on the compute
 * stream.
 *
 * Where numbers are rounded, in bfloat16 mode: every tensor an operation writes is rounded once,
 * from a float32 sum. Gradients of weights are float32 from the start and micro-batches add up in
 * float32; master weights and both moments are float32.
 */
#include "llmc/backend/cuda/backend_cuda.h"
#include "llmc/backend/cuda/device.h"

#include "llmc/backend/cuda/adamw.cuh"
#include "llmc/backend/cuda/muon.cuh"
#include "llmc/backend/cuda/attention/attention.cuh"
#include "llmc/backend/cuda/attention/cudnn.cuh"
#include "llmc/backend/cuda/classifier.cuh"
#include "llmc/backend/cuda/embedding.cuh"
#include "llmc/backend/cuda/exchange.cuh"
#include "llmc/backend/cuda/norm.cuh"
#include "llmc/backend/cuda/rmsnorm.cuh"
#include "llmc/backend/cuda/rope.cuh"
#include "llmc/backend/cuda/swiglu.cuh"
#include "llmc/backend/cuda/util.cuh"
#include "llmc/backend/cuda/weighted_sum.cuh"

#include "llmc/log/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DTYPE_bf16 1
#define DTYPE_float32 0
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#if JOIN(DTYPE_, BACKEND_DTYPE)
typedef __nv_bfloat16 element;
static const enum dtype working_type = DTYPE_BF16;
#else
typedef float element;
static const enum dtype working_type = DTYPE_FLOAT32;
#endif

/* ---- turns -------------------------------------------------------------------------------- */

template <auto function> struct turn;
template <typename R, typename... A, R (*function)(A...)> struct turn<function> {
    static R call(A... arguments) {
        device_scope scope;
        return function(arguments...);
    }
};

/* The operation that calls this function within a device_scope. */
template <auto function> static constexpr auto in_turn = turn<function>::call;

/* ---- memory ------------------------------------------------------------------------------- */

static void convert(tensor *to, const float *from, size_t n) {
    cuda_convert<element>((element *)to, from, n, device_stream());
}

/* Working memory that only one stream uses. */
struct stream_memory {
    char *memory;
    size_t size;
};

static char *stream_memory_of(struct stream_memory *m, size_t bytes, const char *what) {
    if (bytes > m->size) {
        device_release(m->memory);
        m->memory = (char *)device_allocate(bytes);
        m->size = m->memory ? bytes : 0;
    }
    if (!m->memory) {
        log_out_of_memory(what, (double)bytes);
        exit(1);
    }
    return m->memory;
}

/* Copies one part while it rounds another, so that little memory is needed between the two. */
static void h2d_convert_async(weight *to, const float *host, size_t n) {
    static struct stream_memory memory;
    const size_t part = BACKEND_CUDA_PART_BYTES / 2 / sizeof *host;
    float *received =
        (float *)stream_memory_of(&memory, BACKEND_CUDA_PART_BYTES, "parameters that come");
    int buffer = 0;
    for (size_t done = 0; done < n; done += part, buffer = !buffer) {
        const size_t count = n - done < part ? n - done : part;
        float *at = received + (size_t)buffer * part;
        const cudaStream_t kernels =
            device_in_upload(buffer, at, host + done, count * sizeof *received);
        cuda_convert<element>((element *)to + done, at, count, kernels);
        device_in_read(buffer);
    }
    device_in_end();
}

/* The same on the way out. */
static void d2h_round_async(uint16_t *host, const float *from, size_t n) {
    static struct stream_memory memory;
    const size_t part = BACKEND_CUDA_PART_BYTES / 2 / sizeof(bfloat16);
    bfloat16 *leaving =
        (bfloat16 *)stream_memory_of(&memory, BACKEND_CUDA_PART_BYTES, "gradients that leave");
    device_out_begin();
    int buffer = 0;
    for (size_t done = 0; done < n; done += part, buffer = !buffer) {
        const size_t count = n - done < part ? n - done : part;
        bfloat16 *at = leaving + (size_t)buffer * part;
        cuda_convert<bfloat16>(at, from + done, count, device_out_part(buffer));
        device_out_download(buffer, host + done, at, count * sizeof *leaving);
    }
}

static void round_vector(float *x, size_t n) {
    cuda_round(x, n, device_stream());
}

/* Copies arguments of an operation, at most three, from the host to device memory, one after
 * another. */
struct arguments {
    char *at;
    explicit arguments(size_t bytes)
        : at((char *)device_scratch_memory(SCRATCH_ARGUMENTS, bytes + 3 * 256)) {}
    template <typename A> const A *add(const A *host, size_t count) {
        A *place = (A *)at;
        device_upload(place, host, count * sizeof(A));
        at += (count * sizeof(A) + 255) / 256 * 256;
        return place;
    }
};

/* ---- embedding ---------------------------------------------------------------------------- */

static void embedding_forward(tensor *out, const int32_t *tokens, const tensor *table, int N,
                              int C) {
    cuda_embedding_forward<element>((element *)out, tokens, (const element *)table, N, C,
                                    device_stream());
}

static void embedding_backward(float *dtable, const int32_t *tokens, const tensor *dout, int N,
                               int C, int V, bool accumulate) {
    const size_t bytes = cuda_embedding_backward_workspace(N, C, V);
    cuda_embedding_backward<element>(dtable, tokens, (const element *)dout, N, C, V, accumulate,
                                     device_scratch_memory(SCRATCH_KERNEL, bytes), bytes,
                                     device_stream());
}

/* ---- RMSNorm ------------------------------------------------------------------------------ */

static void rmsnorm_forward(tensor *out, float *rstd, const tensor *x, const tensor *w, int N,
                            int C, float eps) {
    cuda_rmsnorm_forward<element>((element *)out, rstd, (const element *)x, (const element *)w, N,
                                  C, eps, device_stream());
}

static void residual_rmsnorm_forward(tensor *sum, tensor *out, float *rstd, const tensor *x,
                                     const tensor *y, const tensor *w, int N, int C, float eps) {
    cuda_residual_rmsnorm_forward<element>((element *)sum, (element *)out, rstd, (const element *)x,
                                           (const element *)y, (const element *)w, N, C, eps,
                                           device_stream());
}

static void rmsnorm_backward(tensor *dx, float *dw, const tensor *dout, const tensor *x,
                             const tensor *w, const float *rstd, int N, int C, bool accumulate) {
    const size_t bytes = cuda_rmsnorm_backward_workspace(N, C);
    cuda_rmsnorm_backward<element>(
        (element *)dx, dw, (const element *)dout, (const element *)x, (const element *)w, rstd, N,
        C, accumulate, device_scratch_memory(SCRATCH_KERNEL, bytes), bytes, device_stream());
}

/* ---- matrix products ---------------------------------------------------------------------- */

/* out (N, O) = x (N, I) w (O, I)^T; rows of out are `row` elements apart */
static void product_forward(element *out, size_t row, const element *x, const element *w, int N,
                            int I, int O) {
    const struct product p = {false,        true,         N,    O, I, (size_t)I, (size_t)I, row,
                              working_type, working_type, false};
    device_product(out, x, w, &p);
}

/* dx (N, I) = dout (N, O) w (O, I); rows of dout are `row` elements apart */
static void product_backward_input(element *dx, const element *dout, size_t row, const element *w,
                                   int N, int I, int O, bool accumulate) {
    const struct product p = {
        false, false, N, I, O, row, (size_t)I, (size_t)I, working_type, working_type, accumulate};
    device_product(dx, dout, w, &p);
}

/* dw (O, I), float32 = dout (N, O)^T x (N, I); rows of dout are `row` elements apart */
static void product_backward_weight(float *dw, const element *dout, size_t row, const element *x,
                                    int N, int I, int O, bool accumulate) {
    const struct product p = {
        true, false, O, I, N, row, (size_t)I, (size_t)I, working_type, DTYPE_FLOAT32, accumulate};
    device_product(dw, dout, x, &p);
}

static void matmul_forward(tensor *out, const tensor *x, const tensor *w, int N, int I, int O) {
    product_forward((element *)out, (size_t)O, (const element *)x, (const element *)w, N, I, O);
}

static void matmul_backward_input(tensor *dx, const tensor *dout, const tensor *w, int N, int I,
                                  int O, bool accumulate) {
    product_backward_input((element *)dx, (const element *)dout, (size_t)O, (const element *)w, N,
                           I, O, accumulate);
}

static void matmul_backward_weight(float *dw, const tensor *dout, const tensor *x, int N, int I,
                                   int O, bool accumulate) {
    product_backward_weight(dw, (const element *)dout, (size_t)O, (const element *)x, N, I, O,
                            accumulate);
}

/* ---- rotary embedding, attention, SwiGLU -------------------------------------------------- */

static void rope(tensor *qkv, const float *cosine, const float *sine, int B, int T, int H, int K,
                 int D, bool backward) {
    cuda_rope<element>((element *)qkv, cosine, sine, B, T, H, K, D, backward, device_stream());
}

static void attention_forward(tensor *out, float *log_sum_exp, const tensor *qkv, int B, int T,
                              int H, int K, int D) {
    if (attention_cudnn_takes(B, T, H, K, D))
        return attention_cudnn_run(qkv, out, log_sum_exp, NULL, NULL);
    cuda_attention_forward<element>((element *)out, log_sum_exp, (const element *)qkv, B, T, H, K,
                                    D, device_stream());
}

static void attention_backward(tensor *dqkv, const tensor *dout, const tensor *out,
                               const tensor *qkv, const float *log_sum_exp, int B, int T, int H,
                               int K, int D) {
    if (attention_cudnn_takes(B, T, H, K, D))
        return attention_cudnn_run(qkv, out, log_sum_exp, dout, dqkv);
    const size_t bytes = cuda_attention_backward_workspace(B, T, H, K, D);
    cuda_attention_backward<element>((element *)dqkv, (const element *)dout, (const element *)out,
                                     (const element *)qkv, log_sum_exp, B, T, H, K, D,
                                     device_scratch_memory(SCRATCH_KERNEL, bytes), bytes,
                                     device_stream());
}

static void attention_continue(tensor *out, const tensor *qkv, int first, int T, int H, int K,
                               int D) {
    cuda_attention_continue<element>((element *)out, (const element *)qkv, first, T, H, K, D,
                                     device_stream());
}

static void swiglu_forward(tensor *out, const tensor *gate_up, int N, int F) {
    cuda_swiglu_forward<element>((element *)out, (const element *)gate_up, N, F, device_stream());
}

static void swiglu_backward(tensor *dgate_up, const tensor *dout, const tensor *gate_up, int N,
                            int F) {
    cuda_swiglu_backward<element>((element *)dgate_up, (const element *)dout,
                                  (const element *)gate_up, N, F, device_stream());
}

/* ---- classifier --------------------------------------------------------------------------- */

/* Logits of backend_cuda_logits_rows() tokens exist at once, and their gradient replaces them. Rows
 * are padded to a multiple of 8 elements, so that products stay on their fast path for any
 * vocabulary. */
static void classifier(float *losses, tensor *dx_, float *dw, const tensor *x_, const tensor *w_,
                       const int32_t *targets, int N, int C, int V, float scale, bool accumulate) {
    element *dx = (element *)dx_;
    const element *x = (const element *)x_, *w = (const element *)w_;
    const size_t row = backend_cuda_logits_row(V);
    const int chunk = backend_cuda_logits_rows(N, V, sizeof *x);
    element *logits =
        (element *)device_scratch_memory(SCRATCH_LOGITS, (size_t)chunk * row * sizeof *x);
    for (int first = 0; first < N; first += chunk) {
        const int n = N - first < chunk ? N - first : chunk;
        const element *rows = x + (size_t)first * C;
        product_forward(logits, row, rows, w, n, C, V);
        cuda_classifier_chunk<element>(losses + first, logits, targets + first, n, V, (int)row,
                                       scale, dx != NULL, device_stream());
        if (!dx) continue;
        product_backward_input(dx + (size_t)first * C, logits, row, w, n, C, V, false);
        product_backward_weight(dw, logits, row, rows, n, C, V, accumulate || first > 0);
    }
}

/* ---- optimiser ---------------------------------------------------------------------------- */

static void adamw(tensor *param, float *master, float *m, float *v, float *ahead,
                  const float *gradient, size_t n, const struct adamw_settings *settings, int step,
                  float learning_rate, float weight_decay, float gradient_scale) {
    if (param == (tensor *)master) {
        cuda_adamw<float>(master, master, m, v, ahead, gradient, n, settings, step, learning_rate,
                          weight_decay, gradient_scale, device_stream());
    } else {
        cuda_adamw<element>((element *)param, master, m, v, ahead, gradient, n, settings, step,
                            learning_rate, weight_decay, gradient_scale, device_stream());
    }
}

/* Small parts together. To find its part in the list costs a block more than it saves if a part is large. */
static void adamw_parts(const struct adamw_part *part, int count,
                        const struct adamw_settings *settings, int step, float learning_rate,
                        float gradient_scale) {
    enum { MOST = 512, LARGE = 1 << 20 };
    struct adamw_job job[MOST];
    uint32_t blocks = 0;
    int jobs = 0;
    for (int i = 0; i < count; i++) {
        const struct adamw_part &p = part[i];
        if (p.n >= LARGE)
            adamw(p.param, p.master, p.m, p.v, p.ahead, p.gradient, p.n, settings, step,
                  learning_rate, p.weight_decay, gradient_scale);
        else if (p.n > 0)
            blocks += adamw_job_of(&job[jobs++], &p, blocks, learning_rate);
        if (jobs == 0 || (jobs < MOST && i < count - 1)) continue;
        arguments list((size_t)jobs * sizeof *job);
        cuda_adamw_parts<element>(list.add(job, (size_t)jobs), jobs, blocks, settings, step,
                                  learning_rate, gradient_scale, device_stream());
        jobs = 0, blocks = 0;
    }
}

/* A product of Muon's: out, float32 or of the working type, and whole arrays. */
static void muon_product(void *out, bool is_float32, const element *a, const element *b,
                         bool transpose_a, bool transpose_b, int M, int N, int K) {
    const struct product p = {transpose_a,
                              transpose_b,
                              M,
                              N,
                              K,
                              (size_t)(transpose_a ? M : K),
                              (size_t)(transpose_b ? K : N),
                              (size_t)N,
                              working_type,
                              is_float32 ? DTYPE_FLOAT32 : working_type,
                              false};
    device_product(out, a, b, &p);
}

/* The logits' memory is free now. */
static void muon(tensor *param, float *master, float *m, float *ahead, const float *gradient,
                 int rows, int cols, const struct muon_settings *settings, float learning_rate,
                 float weight_decay, float gradient_scale) {
    const struct muon_matrix k = {rows,         cols,           learning_rate,
                                  weight_decay, gradient_scale, *settings};
    const size_t bytes = muon_workspace<element>::bytes(rows, cols);
    const muon_workspace<element> w(rows, cols, device_scratch_memory(SCRATCH_LOGITS, bytes));
    const struct norm_vector u = {w.u, w.n};
    arguments list(sizeof u);
    const struct norm_vector *vector = list.add(&u, 1);
    if (param == (tensor *)master)
        cuda_muon(master, master, m, ahead, gradient, &k, w, vector, muon_product, device_stream());
    else
        cuda_muon((element *)param, master, m, ahead, gradient, &k, w, vector, muon_product,
                  device_stream());
}

/* At most NORM_MOST vectors. */
enum { NORM_MOST = 1024 };
static void some_sums_of_squares(double *out, const float *const *x, const size_t *n, int count) {
    struct norm_vector vector[NORM_MOST];
    size_t longest = 0;
    for (int i = 0; i < count; i++) {
        vector[i] = {x[i], n[i]};
        if (n[i] > longest) longest = n[i];
    }
    const size_t bytes = cuda_sums_of_squares_workspace(count, longest);
    const size_t results = (size_t)count * sizeof(double);
    double *result = (double *)device_scratch_memory(SCRATCH_KERNEL, results + bytes);
    arguments list((size_t)count * sizeof *vector);
    cuda_sums_of_squares(result, list.add(vector, (size_t)count), count, longest, result + count,
                         bytes, device_stream());
    device_download(out, result, results);
}

static void sums_of_squares(double *out, const float *const *x, const size_t *n, int count) {
    for (int i = 0; i < count; i += NORM_MOST)
        some_sums_of_squares(out + i, x + i, n + i, count - i < NORM_MOST ? count - i : NORM_MOST);
}

static double sum_of_squares(const float *x, size_t n) {
    double sum = 0;
    sums_of_squares(&sum, &x, &n, 1);
    return sum;
}

/* ---- for lossynet ------------------------------------------------------------------------- */

static void weighted_sum(float *out, const float *const *sender, const float *weight, int N,
                         size_t n, size_t packet) {
    if (n == 0) return;
    const size_t weights = (n + packet - 1) / packet * (size_t)N;
    arguments list(weights * sizeof *weight + (size_t)N * sizeof *sender);
    const float *const *senders = list.add(sender, (size_t)N);
    cuda_weighted_sum(out, sender, senders, list.add(weight, weights), N, n, packet,
                      device_stream());
}

static bool sums_together; /* pinned_sums_begin */

/* Arguments of averages on their way to the device. Copies from memory that is not pinned could make
 * the host wait for the sums before. */
static struct {
    char *memory;
    size_t size, used;
} on_their_way;

static char *room_for_arguments(size_t bytes) {
    const size_t least = 1 << 20;
    if (on_their_way.used && on_their_way.used + bytes > on_their_way.size) {
        device_average_wait(); /* what was queued has been copied then */
        on_their_way.used = 0;
    }
    if (bytes > on_their_way.size) {
        device_release_pinned(on_their_way.memory);
        on_their_way.size = bytes > least ? bytes : least;
        on_their_way.memory = (char *)device_allocate_pinned(on_their_way.size);
    }
    if (!on_their_way.memory) {
        log_out_of_memory("the weights of an average, pinned", (double)bytes);
        exit(1);
    }
    on_their_way.used += bytes;
    return on_their_way.memory + on_their_way.used - bytes;
}

static void wait_for_averages(void) {
    device_average_wait();
    on_their_way.used = 0;
}

/* The kernel reads each element once, from where the network wrote it. BLOCKS blocks are enough to
 * fill PCIe and far fewer than fit on the device, so that backward goes on beside them. */
template <typename To, typename T>
static void average_pinned(To *out, const T *const *sender, const float *weight, int N, size_t n,
                           size_t packet) {
    enum { BLOCKS = 32 };
    static struct stream_memory memory; /* addresses of senders, and weights */
    if (n == 0) return;
    const size_t weights = (n + packet - 1) / packet * (size_t)N * sizeof *weight;
    const size_t senders = ((size_t)N * sizeof *sender + 255) / 256 * 256;
    char *arguments = stream_memory_of(&memory, senders + weights, "the weights of an average");
    char *host = room_for_arguments(senders + (weights + 255) / 256 * 256);
    memcpy(host, sender, (size_t)N * sizeof *sender);
    memcpy(host + senders, weight, weights);
    device_average_upload(arguments, host, senders + weights);
    cuda_weighted_sum(out, sender, (const T *const *)arguments,
                      (const float *)(arguments + senders), N, n, packet, device_average_stream(),
                      BLOCKS);
    if (!sums_together) wait_for_averages();
}

static void pinned_sums_begin(void) {
    sums_together = true;
}

static void pinned_sums_end(void) {
    sums_together = false;
    wait_for_averages();
}

static void weighted_sum_pinned(float *out, const float *const *sender, const float *weight, int N,
                                size_t n, size_t packet) {
    average_pinned(out, sender, weight, N, n, packet);
}

static void weighted_sum_pinned_bf16(float *out, const uint16_t *const *sender, const float *weight,
                                     int N, size_t n, size_t packet) {
    average_pinned(out, (const bfloat16 *const *)sender, weight, N, n, packet);
}

static void rounded_sum_pinned_bf16(uint16_t *out, const uint16_t *const *sender,
                                    const float *weight, int N, size_t n, size_t packet) {
    average_pinned((bfloat16 *)out, (const bfloat16 *const *)sender, weight, N, n, packet);
}

static void rounded_sum_pinned(uint16_t *out, const float *const *sender, const float *weight,
                               int N, size_t n, size_t packet) {
    average_pinned((bfloat16 *)out, (const float_to_round *const *)sender, weight, N, n, packet);
}

/* ---- the exchange between workers ---- */

static size_t marks_of(const struct backend_exchange *e) {
    return (size_t)e->packets * (size_t)e->workers;
}

static void exchange_round(const struct backend_exchange *e, float *const *vector, int bits,
                           const uint64_t *key, bool narrow) {
    const size_t V = (size_t)e->workers;
    arguments list(V * (sizeof *vector + sizeof *key));
    float *const *vectors = list.add(vector, V);
    cuda_exchange_round(e, vectors, bits, key ? list.add(key, V) : NULL, narrow, device_stream());
}

static void exchange_average(const struct backend_exchange *e, float *const *vector,
                             const float *weight) {
    const size_t V = (size_t)e->workers, G = (size_t)e->groups, weights = e->packets * G;
    const size_t senders = (size_t)e->owners * G;
    const float **sender = (const float **)malloc(senders * sizeof *sender);
    if (!sender) {
        log_out_of_memory("the list of senders", (double)(senders * sizeof *sender));
        exit(1);
    }
    for (size_t i = 0; i < senders; i++) sender[i] = vector[e->partner[i]];
    arguments list((V + senders) * sizeof *sender + weights * sizeof *weight);
    float *const *vectors = list.add(vector, V);
    const float *const *from = list.add(sender, senders);
    cuda_exchange_average(e, vectors, from, list.add(weight, weights), device_stream());
    free(sender);
}

static void exchange_copy(const struct backend_exchange *e, float *const *vector,
                          const float *const *ahead, const uint8_t *arrived, int bits) {
    const size_t V = (size_t)e->workers;
    arguments list(2 * V * sizeof *vector + marks_of(e));
    float *const *vectors = list.add(vector, V);
    const float *const *from = ahead ? list.add(ahead, V) : NULL;
    cuda_exchange_copy(e, vectors, from, list.add(arrived, marks_of(e)), bits, device_stream());
}

static void gather(float *out, float *const *vector, int count, const size_t *element_,
                   const int32_t *of, size_t n) {
    if (n == 0) return;
    const size_t all = of ? n : (size_t)count * n;
    arguments list(n * (sizeof *element_ + sizeof *of) + (size_t)count * sizeof *vector +
                   all * sizeof *out);
    const size_t *elements = list.add(element_, n);
    float *const *vectors = list.add(vector, (size_t)count);
    const int32_t *from = of ? list.add(of, n) : NULL;
    float *values = (float *)list.at;
    cuda_gather(values, vectors, elements, from, n, all, device_stream());
    device_download(out, values, all * sizeof *out);
}

/* ---- the backend -------------------------------------------------------------------------- */

/* Called by backend_cuda() once the device is open. */
extern const struct backend *JOIN(backend_cuda_, BACKEND_DTYPE)(void);
const struct backend *JOIN(backend_cuda_, BACKEND_DTYPE)(void) {
    static char details[512];
    static struct backend b;
    snprintf(details, sizeof details, "%s, %s, %s", device_facts.name,
             working_type == DTYPE_BF16 ? "bf16 with float32 sums and master weights" : "float32",
             device_facts.products);
    b.name = "cuda";
    b.details = details;
    b.device = device_facts.identity;
    b.element_bytes = b.weight_bytes = sizeof(element);
    b.on_device = true;
    if (working_type == DTYPE_BF16) { /* cuDNN's is not for float32 */
        by_cudnn.choice.from = device_facts.cudnn_from;
        by_cudnn.choice.failed = cudnn_why;
        b.attention_choice = &by_cudnn.choice;
        b.attention_open = in_turn<attention_cudnn_open>;
        b.attention_close = in_turn<attention_cudnn_close>;
    }
    b.allocate = in_turn<device_allocate>;
    b.release = in_turn<device_release>;
    b.copy = in_turn<device_copy>;
    b.clear = in_turn<device_clear>;
    b.upload = in_turn<device_upload>;
    b.download = in_turn<device_download>;
    b.memory_free = in_turn<device_memory_free>;
    b.convert = in_turn<convert>;
    b.allocate_pinned = in_turn<device_allocate_pinned>;
    b.release_pinned = in_turn<device_release_pinned>;
    b.pin = in_turn<device_pin>;
    b.unpin = in_turn<device_unpin>;
    b.d2h_async = in_turn<device_d2h_async>;
    b.d2h_on_complete = in_turn<device_d2h_on_complete>;
    b.d2h_wait = in_turn<device_d2h_wait>;
    b.d2h_mark = in_turn<device_d2h_mark>;
    b.d2h_wait_mark = in_turn<device_d2h_wait_mark>;
    b.d2h_order_mark = in_turn<device_d2h_order_mark>;
    b.h2d_async = in_turn<device_h2d_async>;
    b.h2d_wait = in_turn<device_h2d_wait>;
    b.peer_async = in_turn<device_peer_async>;
    b.h2d_convert_async = in_turn<h2d_convert_async>;
    b.d2h_round_async = in_turn<d2h_round_async>;
    b.round = in_turn<round_vector>;
    b.share = in_turn<device_share>;
    b.open_shared = in_turn<device_open_shared>;
    b.close_shared = in_turn<device_close_shared>;
    b.sets_begin = in_turn<device_sets_begin>;
    b.use_set = device_use_set;
    b.sets_end = in_turn<device_sets_end>;
    b.pass_begin = in_turn<device_pass_begin>;
    b.pass_end = in_turn<device_pass_end>;
    b.embedding_forward = in_turn<embedding_forward>;
    b.embedding_backward = in_turn<embedding_backward>;
    b.rmsnorm_forward = in_turn<rmsnorm_forward>;
    b.residual_rmsnorm_forward = in_turn<residual_rmsnorm_forward>;
    b.rmsnorm_backward = in_turn<rmsnorm_backward>;
    b.matmul_forward = in_turn<matmul_forward>;
    b.matmul_backward_input = in_turn<matmul_backward_input>;
    b.matmul_backward_weight = in_turn<matmul_backward_weight>;
    b.rope = in_turn<rope>;
    b.attention_forward = in_turn<attention_forward>;
    b.attention_backward = in_turn<attention_backward>;
    b.attention_continue = in_turn<attention_continue>;
    b.swiglu_forward = in_turn<swiglu_forward>;
    b.swiglu_backward = in_turn<swiglu_backward>;
    b.classifier = in_turn<classifier>;
    b.adamw = in_turn<adamw>;
    b.adamw_parts = in_turn<adamw_parts>;
    b.muon = in_turn<muon>;
    b.sum_of_squares = in_turn<sum_of_squares>;
    b.sums_of_squares = in_turn<sums_of_squares>;
    b.weighted_sum = in_turn<weighted_sum>;
    b.weighted_sum_pinned = in_turn<weighted_sum_pinned>;
    b.weighted_sum_pinned_bf16 = in_turn<weighted_sum_pinned_bf16>;
    b.rounded_sum_pinned_bf16 = in_turn<rounded_sum_pinned_bf16>;
    b.rounded_sum_pinned = in_turn<rounded_sum_pinned>;
    b.pinned_sums_begin = pinned_sums_begin;
    b.pinned_sums_end = in_turn<pinned_sums_end>;
    b.exchange_round = in_turn<exchange_round>;
    b.exchange_average = in_turn<exchange_average>;
    b.exchange_copy = in_turn<exchange_copy>;
    b.gather = in_turn<gather>;
    return &b;
}
