/* kernels_backend.cu — the kernels of llmc/backend/cuda behind `struct backend`, and nothing else:
 * no library, one stream, matrix products by a plain loop. Tests drive the kernels through it,
 * under emulation (g++ -DCUDA_EMULATION) and on a GPU (nvcc). Every operation waits for its end.
 */
#include "test/cuda/kernels_backend.h"

#include "llmc/backend/cuda/adamw.cuh"
#include "llmc/backend/cuda/classifier.cuh"
#include "llmc/backend/cuda/embedding.cuh"
#include "llmc/backend/cuda/exchange.cuh"
#include "llmc/backend/cuda/muon.cuh"
#include "llmc/backend/cuda/norm.cuh"
#include "llmc/backend/cuda/rmsnorm.cuh"
#include "llmc/backend/cuda/rope.cuh"
#include "llmc/backend/cuda/swiglu.cuh"
#include "llmc/backend/cuda/util.cuh"
#include "llmc/backend/cuda/weighted_sum.cuh"
#ifndef WITHOUT_ATTENTION /* which takes most of the time to compile */
#include "llmc/backend/cuda/attention/attention.cuh"
#endif

void cuda_check(cudaError_t error, const char *call, const char *file, int line) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, call, cudaGetErrorString(error));
    exit(1);
}

/* ---- memory -------------------------------------------------------------------------------- */

static void *allocate(size_t bytes) {
    void *p = NULL;
    if (cudaMalloc(&p, bytes ? bytes : 1) != cudaSuccess) return NULL;
    CUDA_CHECK(cudaMemset(p, 0, bytes));
    return p;
}

static void release(void *p) {
    CUDA_CHECK(cudaFree(p));
}

static void copy(void *to, const void *from, size_t bytes) {
    CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
}

static void clear(void *p, size_t bytes) {
    CUDA_CHECK(cudaMemset(p, 0, bytes));
}

static void finish(void) {
    CUDA_CHECK(cudaDeviceSynchronize());
}

/* Working memory of one call, NaN at the start. */
struct workspace {
    size_t bytes;
    void *memory;
    explicit workspace(size_t bytes_) : bytes(bytes_), memory(allocate(bytes_)) {
        CUDA_CHECK(cudaMemset(memory, 0xff, bytes));
    }
    ~workspace() {
        release(memory);
    }
};

/* ---- matrix products: out[m, n] (+)= sum over i of a[m, i] b[i, n] --------------------------- */

template <typename T, typename O>
__global__ void matmul_kernel(O *out, const T *a, size_t a_row, size_t a_column, const T *b,
                              size_t b_row, size_t b_column, int M, int N, int I, bool accumulate) {
    size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (size_t)M * N) return;
    size_t m = at / N, n = at % N;
    double total = accumulate ? to_float(out[at]) : 0;
    for (int i = 0; i < I; i++)
        total += to_float(a[m * a_row + i * a_column]) * to_float(b[i * b_row + n * b_column]);
    out[at] = from_float<O>((float)total);
}

template <typename T, typename O = T>
static void matmul(tensor *out, const tensor *a, size_t a_row, size_t a_column, const tensor *b,
                   size_t b_row, size_t b_column, int M, int N, int I, bool accumulate) {
    launch(matmul_kernel<T, O>, ceil_div((size_t)M * N, 128), 128, 0, 0, (O *)out, (const T *)a,
           a_row, a_column, (const T *)b, b_row, b_column, M, N, I, accumulate);
    finish();
}

/* ---- operations ------------------------------------------------------------------------------ */

template <typename T> struct operations {
    static void embedding_forward(tensor *out, const int32_t *tokens, const tensor *table, int N,
                                  int C) {
        cuda_embedding_forward((T *)out, tokens, (const T *)table, N, C, 0);
        finish();
    }
    static void embedding_backward(float *dtable, const int32_t *tokens, const tensor *dout, int N,
                                   int C, int V, bool accumulate) {
        workspace w(cuda_embedding_backward_workspace(N, C, V));
        cuda_embedding_backward(dtable, tokens, (const T *)dout, N, C, V, accumulate, w.memory,
                                w.bytes, 0);
        finish();
    }
    static void rmsnorm_forward(tensor *out, float *rstd, const tensor *x, const tensor *w, int N,
                                int C, float eps) {
        cuda_rmsnorm_forward((T *)out, rstd, (const T *)x, (const T *)w, N, C, eps, 0);
        finish();
    }
    static void residual_rmsnorm_forward(tensor *sum, tensor *out, float *rstd, const tensor *x,
                                         const tensor *y, const tensor *w, int N, int C,
                                         float eps) {
        cuda_residual_rmsnorm_forward((T *)sum, (T *)out, rstd, (const T *)x, (const T *)y,
                                      (const T *)w, N, C, eps, 0);
        finish();
    }
    static void rmsnorm_backward(tensor *dx, float *dw, const tensor *dout, const tensor *x,
                                 const tensor *w, const float *rstd, int N, int C,
                                 bool accumulate) {
        workspace work(cuda_rmsnorm_backward_workspace(N, C));
        cuda_rmsnorm_backward((T *)dx, dw, (const T *)dout, (const T *)x, (const T *)w, rstd, N, C,
                              accumulate, work.memory, work.bytes, 0);
        finish();
    }
    static void matmul_forward(tensor *out, const tensor *x, const tensor *w, int N, int I, int O) {
        matmul<T>(out, x, I, 1, w, 1, I, N, O, I, false);
    }
    static void matmul_backward_input(tensor *dx, const tensor *dout, const tensor *w, int N, int I,
                                      int O, bool accumulate) {
        matmul<T>(dx, dout, O, 1, w, I, 1, N, I, O, accumulate);
    }
    static void matmul_backward_weight(float *dw, const tensor *dout, const tensor *x, int N, int I,
                                       int O, bool accumulate) {
        matmul<T, float>(dw, dout, 1, O, x, I, 1, O, I, N, accumulate);
    }
    static void rope(tensor *qkv, const float *cosine, const float *sine, int B, int T_, int H,
                     int K, int D, bool backward) {
        cuda_rope((T *)qkv, cosine, sine, B, T_, H, K, D, backward, 0);
        finish();
    }
    static void swiglu_forward(tensor *out, const tensor *gate_up, int N, int F) {
        cuda_swiglu_forward((T *)out, (const T *)gate_up, N, F, 0);
        finish();
    }
    static void swiglu_backward(tensor *dgate_up, const tensor *dout, const tensor *gate_up, int N,
                                int F) {
        cuda_swiglu_backward((T *)dgate_up, (const T *)dout, (const T *)gate_up, N, F, 0);
        finish();
    }
    /* Rows of logits are padded so that they begin at multiples of 16 bytes, except in odd
     * chunks. */
    static void classifier(float *losses, tensor *dx, float *dw, const tensor *x, const tensor *w,
                           const int32_t *targets, int N, int C, int V, float scale,
                           bool accumulate) {
        enum { CHUNK = 37 };
        bool gradient = dx != NULL;
        for (int n = 0; n < N; n += CHUNK) {
            int rows = N - n < CHUNK ? N - n : CHUNK, stride = n / CHUNK % 2 ? V : (V + 7) / 8 * 8;
            workspace chunk((size_t)rows * stride * sizeof(T)), dense((size_t)rows * V * sizeof(T));
            const T *input = (const T *)x + (size_t)n * C;
            matmul<T>(dense.memory, input, C, 1, w, 1, C, rows, V, C, false);
            restride(chunk.memory, stride, dense.memory, V, rows, V);
            cuda_classifier_chunk(losses + n, (T *)chunk.memory, targets + n, rows, V, stride,
                                  scale, gradient, 0);
            finish();
            check_untouched(chunk.memory, stride, rows, V);
            if (!gradient) continue;
            restride(dense.memory, V, chunk.memory, stride, rows, V);
            matmul<T>((T *)dx + (size_t)n * C, dense.memory, V, 1, w, C, 1, rows, C, V, false);
            matmul<T, float>(dw, dense.memory, 1, V, input, C, 1, V, C, rows, accumulate || n > 0);
        }
    }
    /* What is between the rows has all bits set, as at the start. */
    static void check_untouched(const void *chunk, size_t stride, int rows, int V) {
        uint16_t between[8 * sizeof(T) / 2];
        size_t bytes = (stride - V) * sizeof(T);
        for (int r = 0; r < rows; r++) {
            copy(between, (const T *)chunk + r * stride + V, bytes);
            for (size_t i = 0; i < bytes / 2; i++) {
                if (between[i] == 0xffff) continue;
                fprintf(stderr, "classifier: wrote between rows %d and %d\n", r, r + 1);
                exit(1);
            }
        }
    }
    static void restride(void *to, size_t to_stride, const void *from, size_t from_stride, int rows,
                         int V) {
        for (int r = 0; r < rows; r++)
            copy((T *)to + r * to_stride, (const T *)from + r * from_stride, V * sizeof(T));
    }
#ifndef WITHOUT_ATTENTION
    static void attention_forward(tensor *out, float *log_sum_exp, const tensor *qkv, int B, int T_,
                                  int H, int K, int D) {
        cuda_attention_forward((T *)out, log_sum_exp, (const T *)qkv, B, T_, H, K, D, 0);
        finish();
    }
    static void attention_backward(tensor *dqkv, const tensor *dout, const tensor *out,
                                   const tensor *qkv, const float *log_sum_exp, int B, int T_,
                                   int H, int K, int D) {
        workspace w(cuda_attention_backward_workspace(B, T_, H, K, D));
        cuda_attention_backward((T *)dqkv, (const T *)dout, (const T *)out, (const T *)qkv,
                                log_sum_exp, B, T_, H, K, D, w.memory, w.bytes, 0);
        finish();
    }
    static void attention_continue(tensor *out, const tensor *qkv, int first, int rows, int H,
                                   int K, int D) {
        cuda_attention_continue((T *)out, (const T *)qkv, first, rows, H, K, D, 0);
        finish();
    }
#endif
    static void adamw(tensor *param, float *master, float *m, float *v, float *ahead,
                      const float *gradient, size_t n, const struct adamw_settings *settings,
                      int step, float learning_rate, float weight_decay, float gradient_scale) {
        cuda_adamw((T *)param, master, m, v, ahead, gradient, n, settings, step, learning_rate,
                   weight_decay, gradient_scale, 0);
        finish();
    }
    static void adamw_parts(const struct adamw_part *part, int count,
                            const struct adamw_settings *settings, int step, float learning_rate,
                            float gradient_scale) {
        workspace jobs((size_t)count * sizeof(struct adamw_job));
        uint32_t blocks = 0;
        int used = 0;
        for (int i = 0; i < count; i++) {
            struct adamw_job job;
            if (part[i].n == 0) continue;
            blocks += adamw_job_of(&job, &part[i], blocks, learning_rate);
            copy((struct adamw_job *)jobs.memory + used++, &job, sizeof job);
        }
        cuda_adamw_parts<T>((const struct adamw_job *)jobs.memory, used, blocks, settings, step,
                            learning_rate, gradient_scale, 0);
        finish();
    }
    static void product(void *out, bool is_float32, const T *a, const T *b, bool transpose_a,
                        bool transpose_b, int M, int N, int K) {
        const size_t a_row = transpose_a ? 1 : K, a_column = transpose_a ? M : 1;
        const size_t b_row = transpose_b ? 1 : N, b_column = transpose_b ? K : 1;
        if (is_float32)
            matmul<T, float>(out, a, a_row, a_column, b, b_row, b_column, M, N, K, false);
        else
            matmul<T>(out, a, a_row, a_column, b, b_row, b_column, M, N, K, false);
    }
    static void muon(tensor *param, float *master, float *m, float *ahead, const float *gradient,
                     int rows, int cols, const struct muon_settings *settings, float learning_rate,
                     float weight_decay, float gradient_scale) {
        const struct muon_matrix k = {rows,         cols,           learning_rate,
                                      weight_decay, gradient_scale, *settings};
        workspace memory(muon_workspace<T>::bytes(rows, cols)), list(sizeof(struct norm_vector));
        const muon_workspace<T> w(rows, cols, memory.memory);
        const struct norm_vector u = {w.u, w.n};
        copy(list.memory, &u, sizeof u);
        const struct norm_vector *vector = (const struct norm_vector *)list.memory;
        if (param == (tensor *)master)
            cuda_muon(master, master, m, ahead, gradient, &k, w, vector, product, 0);
        else
            cuda_muon((T *)param, master, m, ahead, gradient, &k, w, vector, product, 0);
        finish();
    }
    static void convert(tensor *to, const float *from, size_t n) {
        cuda_convert((T *)to, from, n, 0);
        finish();
    }
    static void sums_of_squares(double *out, const float *const *x, const size_t *n, int count) {
        workspace vectors((size_t)count * sizeof(struct norm_vector));
        size_t longest = 0;
        for (int i = 0; i < count; i++) {
            const struct norm_vector one = {x[i], n[i]};
            copy((struct norm_vector *)vectors.memory + i, &one, sizeof one);
            if (n[i] > longest) longest = n[i];
        }
        workspace w(cuda_sums_of_squares_workspace(count, longest)), result(count * sizeof *out);
        cuda_sums_of_squares((double *)result.memory, (const struct norm_vector *)vectors.memory,
                             count, longest, w.memory, w.bytes, 0);
        copy(out, result.memory, result.bytes);
    }
    static double sum_of_squares(const float *x, size_t n) {
        double sum;
        sums_of_squares(&sum, &x, &n, 1);
        return sum;
    }
    static void weighted_sum(float *out, const float *const *sender, const float *weight, int N,
                             size_t n, size_t packet) {
        workspace weights(ceil_div(n, packet) * N * sizeof(float)), senders(N * sizeof *sender);
        copy(weights.memory, weight, weights.bytes);
        copy(senders.memory, sender, senders.bytes);
        cuda_weighted_sum(out, sender, (const float *const *)senders.memory,
                          (const float *)weights.memory, N, n, packet, 0);
        finish();
    }
    static void exchange_round(const struct backend_exchange *e, float *const *vector, int bits,
                               const uint64_t *key, bool narrow) {
        const size_t V = (size_t)e->workers;
        workspace vectors(V * sizeof *vector), keys(V * sizeof *key);
        copy(vectors.memory, vector, vectors.bytes);
        if (key) copy(keys.memory, key, keys.bytes);
        cuda_exchange_round(e, (float *const *)vectors.memory, bits,
                            key ? (const uint64_t *)keys.memory : NULL, narrow, 0);
        finish();
    }
    static void exchange_average(const struct backend_exchange *e, float *const *vector,
                                 const float *weight) {
        const size_t V = (size_t)e->workers, senders = (size_t)e->owners * (size_t)e->groups;
        workspace vectors(V * sizeof *vector), from(senders * sizeof *vector);
        workspace weights((size_t)e->packets * (size_t)e->groups * sizeof *weight);
        copy(vectors.memory, vector, vectors.bytes);
        for (size_t i = 0; i < senders; i++)
            copy((float **)from.memory + i, vector + e->partner[i], sizeof *vector);
        copy(weights.memory, weight, weights.bytes);
        cuda_exchange_average(e, (float *const *)vectors.memory, (const float *const *)from.memory,
                              (const float *)weights.memory, 0);
        finish();
    }
    static void exchange_copy(const struct backend_exchange *e, float *const *vector,
                              const float *const *ahead, const uint8_t *arrived, int bits) {
        const size_t V = (size_t)e->workers;
        workspace vectors(V * sizeof *vector), from(V * sizeof *vector);
        workspace marks(V * e->packets);
        copy(vectors.memory, vector, vectors.bytes);
        if (ahead) copy(from.memory, ahead, from.bytes);
        copy(marks.memory, arrived, marks.bytes);
        cuda_exchange_copy(e, (float *const *)vectors.memory,
                           ahead ? (const float *const *)from.memory : NULL,
                           (const uint8_t *)marks.memory, bits, 0);
        finish();
    }
    static void gather(float *out, float *const *vector, int count, const size_t *element,
                       const int32_t *of, size_t n) {
        const size_t all = of ? n : (size_t)count * n;
        workspace elements(n * sizeof *element), values(all * sizeof *out);
        workspace vectors((size_t)count * sizeof *vector), from(n * sizeof *of);
        copy(elements.memory, element, elements.bytes);
        copy(vectors.memory, vector, vectors.bytes);
        if (of) copy(from.memory, of, from.bytes);
        cuda_gather((float *)values.memory, (float *const *)vectors.memory,
                    (const size_t *)elements.memory, of ? (const int32_t *)from.memory : NULL, n,
                    all, 0);
        copy(out, values.memory, values.bytes);
    }
    static struct backend table(const char *name) {
        struct backend b = {};
        b.name = name;
        b.details = "the kernels alone";
        b.element_bytes = b.weight_bytes = sizeof(T);
        b.allocate = allocate, b.release = release, b.copy = copy, b.clear = clear;
        b.upload = copy, b.download = copy, b.convert = convert;
        b.embedding_forward = embedding_forward, b.embedding_backward = embedding_backward;
        b.rmsnorm_forward = rmsnorm_forward;
        b.residual_rmsnorm_forward = residual_rmsnorm_forward;
        b.rmsnorm_backward = rmsnorm_backward;
        b.matmul_forward = matmul_forward;
        b.matmul_backward_input = matmul_backward_input;
        b.matmul_backward_weight = matmul_backward_weight;
        b.rope = rope;
        b.swiglu_forward = swiglu_forward, b.swiglu_backward = swiglu_backward;
        b.classifier = classifier;
#ifndef WITHOUT_ATTENTION
        b.attention_forward = attention_forward, b.attention_backward = attention_backward;
        b.attention_continue = attention_continue;
#endif
        b.adamw = adamw, b.adamw_parts = adamw_parts, b.muon = muon,
        b.sum_of_squares = sum_of_squares, b.sums_of_squares = sums_of_squares;
        b.weighted_sum = weighted_sum;
        b.exchange_round = exchange_round, b.exchange_average = exchange_average;
        b.exchange_copy = exchange_copy, b.gather = gather;
        return b;
    }
};

extern "C" const struct backend *kernels_backend(bool half) {
    static const struct backend backends[] = {operations<float>::table("kernels, float32"),
                                              operations<bfloat16>::table("kernels, bfloat16")};
    return &backends[half];
}

#ifdef CUDA_EMULATION
extern "C" void kernels_order(enum kernels_order order, uint64_t seed) {
    cuda_emu_order((enum cuda_emu_order)order, seed);
}
#endif
