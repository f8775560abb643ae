/* adamw.cuh — AdamW (Loshchilov & Hutter 2019) on float32 master weights, as PyTorch does it.
 *
 * Parameters in the working type are the master weights rounded to nearest: nothing is random, and
 * nothing is lost, since the next step starts from the master weights again.
 */
#ifndef LLMC_BACKEND_CUDA_ADAMW_H
#define LLMC_BACKEND_CUDA_ADAMW_H

#include <math.h>

#include "llmc/backend/backend.h"
#include "llmc/backend/cuda/common.cuh"

struct adamw_constants {
    float beta1, beta2, eps;
    float lead;           /* steps by which `ahead` is ahead of the master weights */
    float decay;          /* 1 - learning rate * weight decay */
    float rate, root;     /* learning rate / (1 - beta1^step), 1 / sqrt(1 - beta2^step) */
    float gradient_scale; /* clipping */
};

/* ---- kernels ------------------------------------------------------------------------------- */

/* Updates W elements. fmaf() is written out where a compiler could fuse a product and a sum in one
 * instance of the kernel and not in another, so that an element has the same bits in both. */
template <int W>
__device__ __forceinline__ void adamw_update(float (&p)[W], float (&m)[W], float (&v)[W],
                                             const float (&gradient)[W],
                                             const struct adamw_constants &c) {
#pragma unroll
    for (int k = 0; k < W; k++) {
        float g = gradient[k] * c.gradient_scale;
        m[k] = fmaf(c.beta1, m[k], (1.0f - c.beta1) * g);
        v[k] = fmaf(c.beta2, v[k], (1.0f - c.beta2) * g * g);
        p[k] = fmaf(p[k], c.decay, -(c.rate * m[k] / fmaf(sqrtf(v[k]), c.root, c.eps)));
    }
}

template <int W>
__device__ __forceinline__ void adamw_ahead(float (&ahead)[W], const float (&before)[W],
                                            const float (&p)[W], float lead) {
#pragma unroll
    for (int k = 0; k < W; k++) ahead[k] = fmaf(lead, p[k] - before[k], p[k]);
}

/* A thread updates the W elements from i on. param may be master; ahead may be NULL. */
template <typename T, typename G, int W>
__device__ __forceinline__ void
adamw_vector(size_t i, T *param, float *master, float *__restrict__ m, float *__restrict__ v,
             float *__restrict__ ahead, const G *__restrict__ gradient, size_t n,
             const struct adamw_constants &constants) {
    if (i + W <= n) {
        float p[W], first[W], second[W], g[W], before[W];
        load(before, master + i);
        load(p, master + i);
        load(first, m + i);
        load(second, v + i);
        load(g, gradient + i);
        adamw_update(p, first, second, g, constants);
        store(master + i, p);
        store(m + i, first);
        store(v + i, second);
        if (ahead) {
            adamw_ahead(before, before, p, constants.lead);
            store(ahead + i, before);
        }
        if ((void *)param != (void *)master) store(param + i, p);
        return;
    }
    for (; i < n; i++) { /* the last few */
        float p[1] = {master[i]}, first[1] = {m[i]}, second[1] = {v[i]};
        float g[1] = {to_float(gradient[i])}, before[1] = {p[0]};
        adamw_update(p, first, second, g, constants);
        if (ahead) {
            adamw_ahead(before, before, p, constants.lead);
            ahead[i] = before[0];
        }
        master[i] = p[0], m[i] = first[0], v[i] = second[0];
        if ((void *)param != (void *)master) param[i] = from_float<T>(p[0]);
    }
}

template <typename T, typename G, int W>
__global__ void __launch_bounds__(256)
    adamw_kernel(T *param, float *master, float *__restrict__ m, float *__restrict__ v,
                 float *__restrict__ ahead, const G *__restrict__ gradient, size_t n,
                 struct adamw_constants constants) {
    adamw_vector<T, G, W>(((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W, param, master, m, v,
                          ahead, gradient, n, constants);
}

/* Small parts, of which each has the blocks from `first` on. */
struct adamw_job {
    struct adamw_part part;
    uint32_t first;
    bool wide; /* a thread updates 4 elements, otherwise 1 */
    float decay;
};

template <typename T>
__global__ void __launch_bounds__(256, 4)
    adamw_parts_kernel(const struct adamw_job *__restrict__ job, int jobs,
                       struct adamw_constants constants) {
    int low = 0, high = jobs; /* the last job with first <= blockIdx.x */
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (job[middle].first <= blockIdx.x)
            low = middle;
        else
            high = middle;
    }
    const struct adamw_job &j = job[low];
    const struct adamw_part &p = j.part;
    const size_t thread = (size_t)(blockIdx.x - j.first) * blockDim.x + threadIdx.x;
    const struct adamw_constants c = {
        constants.beta1, constants.beta2, constants.eps,  constants.lead,
        j.decay,         constants.rate,  constants.root, constants.gradient_scale};
    if (j.wide)
        adamw_vector<T, float, 4>(thread * 4, (T *)p.param, p.master, p.m, p.v, p.ahead, p.gradient,
                                  p.n, c);
    else
        adamw_vector<T, float, 1>(thread, (T *)p.param, p.master, p.m, p.v, p.ahead, p.gradient,
                                  p.n, c);
}

/* ---- launchers ----------------------------------------------------------------------------- */

static inline float adamw_decay(float learning_rate, float weight_decay) {
    return (float)(1.0 - (double)learning_rate * weight_decay);
}

static inline struct adamw_constants adamw_constants_of(const struct adamw_settings *settings,
                                                        int step, float learning_rate,
                                                        float weight_decay, float gradient_scale) {
    double bias1 = 1.0 - pow(settings->beta1, step), bias2 = 1.0 - pow(settings->beta2, step);
    struct adamw_constants constants = {settings->beta1,
                                        settings->beta2,
                                        settings->eps,
                                        settings->lead,
                                        adamw_decay(learning_rate, weight_decay),
                                        (float)(learning_rate / bias1),
                                        (float)(1.0 / sqrt(bias2)),
                                        gradient_scale};
    return constants;
}

/* The gradient is float32 or T. Arrays may begin anywhere; accesses have 16 bytes only if all
 * arrays are aligned. */
template <typename T, typename G>
void cuda_adamw(T *param, float *master, float *m, float *v, float *ahead, const G *gradient,
                size_t n, const struct adamw_settings *settings, int step, float learning_rate,
                float weight_decay, float gradient_scale, cudaStream_t stream) {
    if (n == 0) return;
    const struct adamw_constants constants =
        adamw_constants_of(settings, step, learning_rate, weight_decay, gradient_scale);
    bool vectors = are_aligned(param, master, m, v, gradient) && (!ahead || are_aligned(ahead));
    launch(vectors ? adamw_kernel<T, G, 4> : adamw_kernel<T, G, 1>,
           ceil_div(n, vectors ? 256 * 4 : 256), 256, 0, stream, param, master, m, v, ahead,
           gradient, n, constants);
}

/* Prepares a job behind jobs of so many blocks. Returns its number of blocks. */
static inline uint32_t adamw_job_of(struct adamw_job *job, const struct adamw_part *part,
                                    uint32_t blocks, float learning_rate) {
    const bool wide =
        are_aligned((const float *)part->param, part->master, part->m, part->v, part->gradient) &&
        (!part->ahead || are_aligned(part->ahead));
    *job = {*part, blocks, wide, adamw_decay(learning_rate, part->weight_decay)};
    return (uint32_t)ceil_div(part->n, wide ? 256 * 4 : 256);
}

/* job (jobs): the device's, with `blocks` blocks in all */
template <typename T>
void cuda_adamw_parts(const struct adamw_job *job, int jobs, uint32_t blocks,
                      const struct adamw_settings *settings, int step, float learning_rate,
                      float gradient_scale, cudaStream_t stream) {
    launch(adamw_parts_kernel<T>, blocks, 256, 0, stream, job, jobs,
           adamw_constants_of(settings, step, learning_rate, 0, gradient_scale));
}

#endif
