/* cudnn.cuh — runs cuDNN's attention as an operation of the backend (backend.h, struct
 * attention_choice). It keeps the plans of one shape and their working memory. Callers hold a
 * device_scope. */
#ifndef LLMC_BACKEND_CUDA_ATTENTION_CUDNN_H
#define LLMC_BACKEND_CUDA_ATTENTION_CUDNN_H

#include "llmc/backend/cuda/attention/cudnn_plan.h"
#include "llmc/backend/cuda/device.h"
#include "llmc/log/error.h"

#include <stdio.h>
#include <stdlib.h>

static struct {
    struct attention_choice choice;
    struct cudnn_attention *plans;
    void *workspace[BACKEND_SETS];
} by_cudnn;

static void attention_cudnn_close(void) {
    cudnn_attention_release(by_cudnn.plans);
    for (void *&workspace : by_cudnn.workspace) device_release(workspace), workspace = NULL;
    by_cudnn.plans = NULL;
    by_cudnn.choice.library = 0;
}

/* The set's, or NULL if there is no memory for it. */
static void *attention_cudnn_workspace(void) {
    void **workspace = &by_cudnn.workspace[device_set()];
    if (!*workspace) *workspace = device_allocate(cudnn_attention_workspace(by_cudnn.plans));
    return *workspace;
}

static int attention_cudnn_open(int B, int T, int H, int K, int D, char *why, size_t why_size) {
    attention_cudnn_close();
    by_cudnn.plans = cudnn_attention_plan(B, T, H, K, D, NULL, why, why_size);
    if (!by_cudnn.plans) return 0;
    const size_t bytes = cudnn_attention_workspace(by_cudnn.plans);
    if (!attention_cudnn_workspace()) {
        snprintf(why, why_size, "cuDNN needs %.3f GB to work in, and %.3f GB are free",
                 1e-9 * (double)bytes, 1e-9 * (double)device_memory_free());
        attention_cudnn_close();
        return 0;
    }
    struct attention_choice *c = &by_cudnn.choice;
    c->B = B, c->T = T, c->H = H, c->K = K, c->D = D;
    return cudnn_attention_open(why, why_size);
}

static bool attention_cudnn_takes(int B, int T, int H, int K, int D) {
    const struct attention_choice *c = &by_cudnn.choice;
    return c->library && c->B == B && c->T == T && c->H == H && c->K == K && c->D == D;
}

/* The emulation's streams are not CUDA's, so there the whole call runs as work in the stream. */
template <typename call> static bool attention_cudnn_run(const call &run) {
#ifdef CUDA_EMULATION
    static bool done;
    done = true;
    cuda_emu::enqueue(device_stream(), [run] { done = run(); });
    if (!cuda_emu::records(device_stream())) device_synchronize();
    return done;
#else
    return run();
#endif
}

static void attention_cudnn_done(bool done, const char *why) {
    struct attention_choice *c = &by_cudnn.choice;
    if (done) return;
    if (!c->trial) {
        log_error("%s (--attention own computes without cuDNN)", why);
        exit(1);
    }
    snprintf(c->failed, sizeof c->failed, "%s", why);
}

static void attention_cudnn_forward(void *out, float *log_sum_exp, const void *qkv) {
    static char why[256];
    snprintf(why, sizeof why, "no memory for cuDNN's attention in another set");
    void *workspace = attention_cudnn_workspace();
    const bool done =
        workspace && attention_cudnn_run([=] {
            return cudnn_attention_forward(by_cudnn.plans, out, log_sum_exp, qkv, workspace,
                                           device_stream(), why, sizeof why);
        });
    attention_cudnn_done(done, why);
}

static void attention_cudnn_backward(void *dqkv, const void *dout, const void *out, const void *qkv,
                                     const float *log_sum_exp) {
    static char why[256];
    snprintf(why, sizeof why, "no memory for cuDNN's attention in another set");
    void *workspace = attention_cudnn_workspace();
    const bool done =
        workspace && attention_cudnn_run([=] {
            return cudnn_attention_backward(by_cudnn.plans, dqkv, dout, out, qkv, log_sum_exp,
                                            workspace, device_stream(), why, sizeof why);
        });
    attention_cudnn_done(done, why);
}

#endif
