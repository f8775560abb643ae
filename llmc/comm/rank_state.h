/* rank_state.h — the one form in which the state of a rank leaves it: into a checkpoint, and to other
 * ranks when ranks die or join. It is that of its workers, and says where it belongs, so that any
 * number of ranks can take it:
 *
 *     state                              type     in a checkpoint     to other ranks
 *     ranges of which a worker is the    I64      worker.W.owned      yes; elements go to who owns
 *       owner (with rps and naive:                                      them from now on
 *       everything)
 *     parameters                         F32      in the model        owned ones, or the freshest copy
 *     arrays that follow their           F32      worker.W.m, .v      yes; of an owner that is gone
 *       elements (memory/arrays.h)                                      0 and a mean square
 *     what owners sent ahead of them     F32      worker.W.ahead      no: replicas start as the model
 *     ranges in which a replica is       I64,     worker.W.stale,     no
 *       stale, and its values there        F32      .replica
 *     what lossynet remembers            U8       network,            no: ages at 0, residuals and
 *                                                 worker.W.network      history are gone
 *
 * saved_state.c reads and writes the checkpoint's form, handover.c the messages. */
#ifndef LLMC_COMM_RANK_STATE_H
#define LLMC_COMM_RANK_STATE_H

#include "llmc/comm/data_parallel.h"

/* The ranges of which a worker has an array that follows its elements: with rps and naive everything, else
 * its shards, but v only where there are second moments. It stays the worker's. */
struct ranges state_of_owner(const struct data_parallel *d, const struct worker *w,
                             enum array array);

/* Copies to an array of a local worker what it owns of these ranges, which ascend. values: of the ranges,
 * each of whose first is at its `state`: float32, not necessarily aligned. Returns the number of
 * elements. */
size_t state_take(const struct data_parallel *d, const struct worker *w, enum array array,
                  const struct range *range, size_t ranges, const char *values);

#endif
