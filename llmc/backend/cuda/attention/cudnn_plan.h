/* cudnn_plan.h — causal attention by NVIDIA's cuDNN, where it is installed: libcudnn.so.9 is
 * opened at run time. In bfloat16 with float32 sums, in the layouts of backend.h, so that nothing
 * is copied.
 *
 * Forward and backward are described as graphs of operations, for which cuDNN finds a fused kernel.
 * Backward is the cuDNN kernel that gives the same bits every time. It keeps all of dS in its
 * workspace, 2 B H T T bytes, and sums dQ from there; cuDNN's other kernel adds with atomics. The
 * log-sum-exp is what our kernels keep: the natural logarithm of the sum of exp(scaled logits). */
#ifndef LLMC_BACKEND_CUDA_ATTENTION_CUDNN_PLAN_H
#define LLMC_BACKEND_CUDA_ATTENTION_CUDNN_PLAN_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* 9.16.0. Older versions need device properties in another form, or compute backward wrongly unless
 * T is a multiple of 128. */
enum { CUDNN_ATTENTION_OLDEST = 91600 };

/* The tokens of a sequence from which on --attention auto takes it. Below, attention is a small part
 * of a step. */
enum { CUDNN_ATTENTION_FROM = 512 };

/* True if D is a multiple of 8 up to 128. */
static inline bool cudnn_attention_takes(int D) {
    return D % 8 == 0 && D >= 8 && D <= 128;
}

/* The bytes that backward works in, without cuDNN's alignment: dS, with T rounded up to whole
 * tiles; delta; and, if there are fewer key heads than query heads, dK and dV of all query
 * heads. */
static inline double cudnn_attention_bytes(int B, int T, int H, int K, int D) {
    const double heads = (double)B * H, queries = (T + 63) / 64 * 64, keys = (T + 127) / 128 * 128;
    return heads * (2 * queries * keys + 4.0 * T + (H == K ? 0 : 4.0 * T * D));
}

/* Returns cuDNN's version, 91900 for 9.19.0; or 0 if there is none that is new enough, which `why`
 * then says in one line. The first call opens the library. */
int cudnn_attention_open(char *why, size_t why_size);

struct cudnn_attention;

/* Makes the plans for a shape. device is NULL for the calling thread's device. Otherwise it holds a
 * device's properties as cuDNN writes them in JSON, and the plans cannot run. Returns NULL, with
 * the reason, if cuDNN has no plan. */
struct cudnn_attention *cudnn_attention_plan(int B, int T, int H, int K, int D, const char *device,
                                             char *why, size_t why_size);
void cudnn_attention_release(struct cudnn_attention *a); /* NULL is fine */
size_t cudnn_attention_workspace(const struct cudnn_attention *a);

/* These run on a stream (cudaStream_t), with a workspace aligned to 256 bytes. Shapes are as in
 * backend.h. They return false, with the reason, if cuDNN refuses. */
bool cudnn_attention_forward(struct cudnn_attention *a, void *out, float *log_sum_exp,
                             const void *qkv, void *workspace, void *stream, char *why,
                             size_t why_size);
bool cudnn_attention_backward(struct cudnn_attention *a, void *dqkv, const void *dout,
                              const void *out, const void *qkv, const float *log_sum_exp,
                              void *workspace, void *stream, char *why, size_t why_size);

#ifdef __cplusplus
}
#endif
#endif
