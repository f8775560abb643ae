/* worker.h — one data-parallel replica: its vectors, and the copies of them that a network reads.
 *
 * All vectors lie in the backend's memory. Where the network reads the host's (several ranks, each
 * with a GPU), parameters and gradients have a copy there that does not move (pinned), and travel
 * beside the computing:
 *
 *     worker_send      device -> host, on the copy-out stream, after what was computed before
 *     worker_receive   host -> device, on the copy-in stream, before whatever is computed next
 *
 * Elsewhere the copies are the vectors themselves, and these functions do nothing. What is sent and
 * received when is in staging.h.
 */
#ifndef LLMC_WORKER_H
#define LLMC_WORKER_H

#include <stdbool.h>
#include <stddef.h>

#include "llmc/backend.h"
#include "llmc/layout.h"
#include "llmc/options.h"

#ifdef __cplusplus
extern "C" {
#endif

struct worker {
    int id;                        /* 0 ... N-1 */
    float *params, *grads, *m, *v; /* the backend's */
    float *net_params, *net_grads; /* what the network reads and writes */
};

/* `count` parameters and as many gradients, moments for `owned`; without training parameters alone.
 * staged: the network reads the host's memory. The caller releases it, also after a failure.
 * 0, or -1 after reporting. */
int worker_allocate(struct worker *w, const struct backend *be, size_t count, size_t owned,
                    bool training, bool staged);
void worker_release(struct worker *w, const struct backend *be);

/* The same parameters (count, the host's) where the backend and where the network reads them. */
void worker_initialise(struct worker *w, const struct backend *be, const float *params,
                       size_t count);

/* `net` is net_params or net_grads. Elements offset ... offset + count - 1, as they are after the
 * operations called so far, leave for the host; see `send` and `sent` of backend.h. */
void worker_send(const struct worker *w, const struct backend *be, float *net, size_t offset,
                 size_t count);
/* Operations called from now on find what the network left there; see `receive` of backend.h. */
void worker_receive(const struct worker *w, const struct backend *be, float *net, size_t offset,
                    size_t count);

/* ---- AdamW ---- */

/* Algorithms whose workers step on their own keep moments for all parameters, not the owned alone. */
bool worker_steps_alone(const struct options *options);

/* What a gradient of this norm is multiplied with, as torch.nn.utils.clip_grad_norm_ has it. */
double worker_clip(const struct options *options, double norm);

struct worker_step {
    int step; /* from 0 */
    double learning_rate, gradient_scale;
};

/* Steps `count` parameters from `offset`; their moments start at element `state` of m and v. */
void worker_update(const struct worker *w, const struct backend *be, const struct layout *layout,
                   const struct options *options, const struct worker_step *step, size_t state,
                   size_t offset, size_t count);

/* ---- moving ---- */

/* worker_send or worker_receive */
typedef void (*worker_mover)(const struct worker *w, const struct backend *be, float *net,
                             size_t offset, size_t count);

#ifdef __cplusplus
}
#endif
#endif
