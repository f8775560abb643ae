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

/* The bytes that backward works in, without cuDNN's alignment: dS, with T rounded up to whole
 * tiles; delta; and, if there are fewer key heads than query heads, dK and dV of all query heads.
 * 0: cuDNN does not take this D, which is no multiple of 8 up to 128. */
static inline double cudnn_attention_bytes(int B, int T, int H, int K, int D) {
    const double heads = (double)B * H, queries = (T + 63) / 64 * 64, keys = (T + 127) / 128 * 128;
    const double bytes = heads * (2 * queries * keys + 4.0 * T + (H == K ? 0 : 4.0 * T * D));
    return D % 8 == 0 && D >= 8 && D <= 128 ? bytes : 0;
}

/* What failed, in one line, "" at first. After a failure, nothing is computed until the next plan. */
extern char cudnn_why[256];
int cudnn_say_why(const char *format, ...) __attribute__((format(printf, 1, 2))); /* returns 0 */

/* Returns cuDNN's version, 91900 for 9.19.0; or 0 if there is none that is new enough. The first call
 * opens the library. */
int cudnn_attention_open(void);

/* Makes the plans for a shape, and releases those before. device is NULL for the calling thread's
 * device. Otherwise it holds a device's properties as cuDNN writes them in JSON, and the plans cannot
 * run. Returns the bytes of their workspace, or 0 if cuDNN has no plan. */
size_t cudnn_attention_plan(int B, int T, int H, int K, int D, const char *device);
void cudnn_attention_release(void); /* if there are any */

/* Runs backward, or forward if dqkv is NULL, on a stream (cudaStream_t), with a workspace aligned to
 * 256 bytes. Shapes are as in backend.h. */
void cudnn_attention_run(const void *qkv, const void *out, const void *log_sum_exp,
                         const void *dout, const void *dqkv, void *workspace, void *stream);

#ifdef __cplusplus
}
#endif
#endif
