/* async_writer.h — writes checkpoints while training goes on; each is complete or does not exist.
 *
 * In every step the ranks exchange how far they are with writing. When a save is due, they wait for
 * the previous one, rank 0 creates OUT/checkpoint-STEP.partial, each rank copies its state
 * (saved_state.h) and the shards of the model that it writes (hf_model.h; a small model is one shard,
 * which rank 0 writes), and a thread of each rank writes the copy. When all have written, rank 0's
 * thread adds trainer.json with all checksums, syncs, renames the directory to its final name, and
 * removes all checkpoints except the newest `keep`.
 *
 * Training waits for the copy. It waits for the disk only if a save is due before the previous one
 * has ended. A save that fails (full disk, read-only or missing directory) is reported, and
 * training goes on until the next. A killed run leaves complete checkpoints and perhaps a .partial
 * directory, which nobody reads and the next run removes.
 *
 * Signals (stop_signal.h) ask the run to save a checkpoint and to stop. The ranks tell each other, so
 * that all stop after the same step.
 *
 * Every rank calls the same functions in the same order, from one thread.
 */
#ifndef LLMC_COMM_ASYNC_WRITER_H
#define LLMC_COMM_ASYNC_WRITER_H

#include <stdbool.h>

#include "llmc/comm/saved_state.h"

struct async_writer;

/* With --out, opens the writer of a run that begins after `step` steps; without, *out is NULL. The
 * caller keeps *d and *facts until the writer is closed. tokenizer: a file to copy; NULL: the model's
 * tokenizer, if it has one. continues: ranks of an earlier view began this run (--meet), and all
 * checkpoints up to `step` belong to it. Earlier checkpoints of a resumed run count towards
 * options->keep. Collective if `continues`. From now on signals are noted. The functions below do
 * nothing if the writer is NULL. Returns 0, or -1 after reporting. */
int async_writer_open(struct data_parallel *d, const struct run_info *facts, const char *tokenizer,
                      int step, bool continues, struct async_writer **out);

/* Whether to save after the next step, although no save is due: ranks changed while a checkpoint
 * was being written, so it is missing. All ranks get the same answer, until they save. */
bool async_writer_is_behind(const struct async_writer *s);

/* Releases everything. If this rank is writing, waits for the end; no checkpoint results from
 * it. */
void async_writer_close(struct async_writer *s);

/* Call during each step, before the caller's next gather. That gather carries how far each rank is
 * with writing, and whether it has received a signal. Returns 0, or -1 if the exchange failed. */
int async_writer_tell(struct async_writer *s);

/* Call after that gather, and after the step. Sets *stop if this rank knows that one of the ranks
 * has received a signal. */
void async_writer_poll(struct async_writer *s, bool *stop);

/* Saves the run between two steps, when no phase is open. A checkpoint that cannot be written is
 * reported, and the next save tries again. Returns 0, or -1 if the exchange between ranks
 * failed. */
int async_writer_save(struct async_writer *s, const struct resume_point *at);

/* Waits until everything is written. Returns 0, or -1 if the exchange between ranks failed. */
int async_writer_finish(struct async_writer *s);

/* On rank 0: the newest checkpoint of this run that still exists; "" if there is none. */
const char *async_writer_last(const struct async_writer *s);

/* After async_writer_finish: whether the last save that was requested is not on disk. All ranks get
 * the same answer, unless somebody has removed all checkpoints. */
bool async_writer_has_failed(const struct async_writer *s);

#endif
