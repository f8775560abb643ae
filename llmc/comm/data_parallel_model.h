/* data_parallel_model.h — the model of a run: its initial values, the owners' shards put together to
 * evaluate, to save and to hand over, and the facts of the run. */
#ifndef LLMC_COMM_DATA_PARALLEL_MODEL_H
#define LLMC_COMM_DATA_PARALLEL_MODEL_H

#include "llmc/comm/data_parallel.h"

/* Gives every worker the same initial parameters: from the checkpoint that --model names, or from
 * the seed. Returns 0, or -1 after reporting. */
int data_parallel_initialise(struct data_parallel *d);

/* Sets *model (P elements, in the backend's memory) to a replica if replicas are exact, otherwise
 * to the owners' shards put together. With masters *model is NULL, and the model replaces the
 * weights in use. Collective. Valid until the next step. Returns 0, or -1 after reporting. */
int data_parallel_model(struct data_parallel *d, const float **model);

/* Copies the model to `tensors` in host memory: `count` of them, in the order of model_tensors.
 * Tensors whose data is NULL are left out; each rank may want others. Collective. Returns 0, or -1
 * after reporting. */
int data_parallel_copy_model(struct data_parallel *d, const struct named_tensor *tensors,
                             size_t count);

/* Converts the result of data_parallel_model to the type that operations read. float32 is returned
 * unchanged. Valid until the next call or the next step. */
const weight *data_parallel_weights(struct data_parallel *d, const float *params);

/* Does the same for a worker's replica. */
const weight *data_parallel_replica(struct data_parallel *d, const struct worker *w);

/* Sets what a checkpoint, the log and the terminal tell of the run, except for revision,
 * faster_in_bf16, batch, seq and data, which the caller sets. */
void data_parallel_facts(const struct data_parallel *d, struct run_info *facts);

#endif
