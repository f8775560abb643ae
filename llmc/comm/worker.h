/* worker.h — one data-parallel replica: its vectors, and the copies of them that the network reads.
 *
 * All vectors lie in the backend's memory. If the network reads host memory (several ranks, each
 * with a GPU), parameters and gradients also have a copy in pinned host memory, which is updated
 * while the GPU computes:
 *
 *     worker_send      device -> host, on the copy-out stream, after what was computed before
 *     worker_receive   host -> device, on the copy-in stream, before whatever is computed next
 *
 * Otherwise the copies are the vectors themselves, and these functions do nothing.
 * bucket_pipeline.h says what is sent and received when.
 */
#ifndef LLMC_COMM_WORKER_H
#define LLMC_COMM_WORKER_H

#include <stdbool.h>
#include <stddef.h>

#include "llmc/backend/backend.h"
#include "llmc/model/param_layout.h"
#include "llmc/cli/options.h"

#ifdef __cplusplus
extern "C" {
#endif

struct worker {
    int id;                          /* 0 ... N-1 */
    float *params, *grads, *m, *v;   /* in the backend's memory */
    float *comm_params, *comm_grads; /* the copies that the network reads and writes */
    /* These are not its own, but another worker's or its group's (group.h): params and grads; the
     * copies. */
    bool shares, shares_comm;
    /* What the worker owns, ahead of its own values, and the copy that the network broadcasts
     * (lossynet's lead.c). Elements are in the order of m and v. NULL: not needed. */
    float *ahead, *comm_ahead;
    /* What was lost of its gradients, on a device; NULL: lossynet has it, or nothing is carried. */
    float *residual;
};

/* Allocates `count` parameters and as many gradients, unless it shares them, moments for `owned`
 * elements and, with `leads`,
 * the values ahead of these, and with `carries` a residual; without training only parameters.
 * staged: the network reads host memory. The caller releases it, also after a failure. Returns 0,
 * or -1 after reporting. */
int worker_allocate(struct worker *w, const struct backend *be, size_t count, size_t owned,
                    bool training, bool staged, bool leads, bool carries);
void worker_release(struct worker *w, const struct backend *be);

/* Copies parameters (count, in host memory) to the backend's vector and to the network's copy. */
void worker_initialise(struct worker *w, const struct backend *be, const float *params,
                       size_t count);

/* Copies elements offset ... offset + count - 1 to the host, as the operations called so far
 * leave them; see d2h_async in backend.h. comm_vector: comm_params or comm_grads. */
void worker_send(const struct worker *w, const struct backend *be, float *comm_vector,
                 size_t offset, size_t count);
/* Copies all of `ahead` to the host in the same way. */
void worker_send_ahead(const struct worker *w, const struct backend *be, size_t owned);
/* Copies what the network wrote to the device, before any operation called later; see h2d_async
 * in backend.h. */
void worker_receive(const struct worker *w, const struct backend *be, float *comm_vector,
                    size_t offset, size_t count);

/* ---- AdamW ---- */

/* Whether each worker runs AdamW on all parameters (rps, naive), and so keeps moments of all. */
bool worker_steps_alone(const struct options *options);

/* The factor that clips a gradient of this norm, as in torch.nn.utils.clip_grad_norm_. */
double worker_clip(const struct options *options, double norm);

struct worker_step {
    int step; /* from 0 */
    double learning_rate, gradient_scale;
    double lead;     /* not 0: `ahead` is written, too */
    weight *weights; /* not NULL: the parameters in use, all of a vector's, are written, too */
};

/* Runs AdamW on `count` parameters from `offset`. Their moments start at element `state` of m
 * and v, and what is ahead of them at the same element of `ahead`. */
void worker_update(const struct worker *w, const struct backend *be,
                   const struct param_layout *layout, const struct options *options,
                   const struct worker_step *step, size_t state, size_t offset, size_t count);

/* ---- moving ---- */

/* worker_send or worker_receive */
typedef void (*worker_mover)(const struct worker *w, const struct backend *be, float *comm_vector,
                             size_t offset, size_t count);

#ifdef __cplusplus
}
#endif
#endif
