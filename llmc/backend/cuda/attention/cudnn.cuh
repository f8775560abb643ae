/* cudnn.cuh — runs cuDNN's attention as an operation of the backend (backend.h, struct
 * attention_choice), in working memory of the set's own. Callers hold a device_scope. */
#ifndef LLMC_BACKEND_CUDA_ATTENTION_CUDNN_H
#define LLMC_BACKEND_CUDA_ATTENTION_CUDNN_H

#include "llmc/backend/cuda/attention/cudnn_plan.h"
#include "llmc/backend/cuda/device.h"
#include "llmc/log/error.h"

#include <stdlib.h>

static struct {
    struct attention_choice choice;
    size_t bytes; /* of working memory */
    void *workspace[BACKEND_SETS];
} by_cudnn;

static void attention_cudnn_close(void) {
    cudnn_attention_release();
    for (void *&workspace : by_cudnn.workspace) device_release(workspace), workspace = NULL;
    by_cudnn.choice.library = 0;
}

/* The set's, or NULL if there is no memory for it. */
static void *attention_cudnn_workspace(void) {
    void **workspace = &by_cudnn.workspace[device_set()];
    if (!*workspace) *workspace = device_allocate(by_cudnn.bytes);
    if (!*workspace) cudnn_say_why("no memory for cuDNN's attention in another set");
    return *workspace;
}

static int attention_cudnn_open(int B, int T, int H, int K, int D) {
    struct attention_choice *c = &by_cudnn.choice;
    attention_cudnn_close();
    c->B = B, c->T = T, c->H = H, c->K = K, c->D = D;
    by_cudnn.bytes = cudnn_attention_plan(B, T, H, K, D, NULL);
    if (by_cudnn.bytes == 0) return 0;
    if (attention_cudnn_workspace()) return cudnn_attention_open();
    attention_cudnn_close();
    return cudnn_say_why("cuDNN needs %.3f GB to work in, and %.3f GB are free",
                         1e-9 * (double)by_cudnn.bytes, 1e-9 * (double)device_memory_free());
}

static bool attention_cudnn_takes(int B, int T, int H, int K, int D) {
    const struct attention_choice *c = &by_cudnn.choice;
    return c->library && c->B == B && c->T == T && c->H == H && c->K == K && c->D == D;
}

/* Backward, or forward if dqkv is NULL. If it fails before the choice is made, `failed` of struct
 * attention_choice says so. */
static void attention_cudnn_run(const void *qkv, const void *out, const float *log_sum_exp,
                                const void *dout, const void *dqkv) {
    void *workspace = attention_cudnn_workspace();
    if (workspace)
        launch_library(device_stream(), [=](cudaStream_t stream) {
            cudnn_attention_run(qkv, out, log_sum_exp, dout, dqkv, workspace, stream);
        });
    if (!*cudnn_why || !by_cudnn.choice.made) return;
    log_error("%s (--attention own computes without cuDNN)", cudnn_why);
    exit(1);
}

#endif
