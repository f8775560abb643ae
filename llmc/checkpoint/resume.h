/* resume.h — writes and reads a training run's state: what a checkpoint holds besides the model.
 *
 *     trainer.json                          how far the run is, its options, the version of the
 *                                           library that computes attention (0: none), and the
 *                                           size and checksum of every file, including itself
 *     optimizer-00001-of-00002.safetensors  the workers that rank 0 of 2 hosts; for each worker W:
 *         worker.W.owned    I64 (ranges, 2) offset and length of the ranges of the parameter vector
 *                                           (param_layout.h) for which W has moments
 *         worker.W.m, .v    F32 (elements)  these moments, range after range; with Muon no v of
 *                                           the layers' matrices
 *         worker.W.stale    I64 (ranges, 2) where W's replica differs from what the last broadcast
 *                                           sent, and from that rounded to --wire-dtype
 *         worker.W.replica  F32 (elements)  the replica's values there
 *         worker.W.ahead    F32 (elements)  the values that W's last broadcast sent instead of the
 *                                           values of its shards (--lead), in the order of m;
 *                                           absent if it sent the values of its shards
 *         worker.W.network  U8  (bytes)     lossynet_state_save of W
 *         network           U8  (bytes)     lossynet_state_save of all workers together (only in
 *                                           the first file)
 *
 * `start` in trainer.json numbers the starts of runs in one --out: 1 + the largest one there. It says
 * which of two checkpoints is newer, together with the step. Clocks do not: they differ between hosts
 * and may be set back.
 *
 * Data position, schedule and random numbers are functions of the step and of the options. So with
 * the same options a resumed run computes the same bits, even if the workers run in other processes
 * than before. With other options it continues as well as possible, and reports what differs:
 * moments are distributed again by offset, and replicas start as the model.
 *
 * This file has formats and rules only. comm/saved_state.h copies a rank's share of the state, and
 * comm/async_writer.h says when a checkpoint is written.
 */
#ifndef LLMC_CHECKPOINT_RESUME_H
#define LLMC_CHECKPOINT_RESUME_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "llmc/backend/backend.h"
#include "llmc/util/file.h"
#include "llmc/options/options.h"
#include "llmc/log/metrics.h"
#include "llmc/checkpoint/run_info.h"

struct resume_point {  /* how far a run is */
    int step;          /* steps done */
    uint64_t sequence; /* the next sequence of the data */
    struct run_metrics record;
};

/* ---- resuming ---- */

/* For --resume auto: the name of the newest complete checkpoint under --out, without the folder; ""
 * if there is none. Returns 0, or the exit code after reporting. */
enum { RESUME_NAME_BYTES = 64 };
int resume_newest(const struct options *options, char name[RESUME_NAME_BYTES]);

/* For --resume: stores the path of the checkpoint in options->model and options->resume. `newest`:
 * what "auto" means, which rank 0 has found; if it is "", options->resume becomes NULL. Checks names,
 * sizes and trainer.json. Returns 0, or the exit code after reporting. */
int resume_choose(struct options *options, const char *newest);

/* Whether a name is checkpoint-N, as a run names its checkpoints. */
bool resume_is_checkpoint_name(const char *name);

/* The path of the checkpoint of a step in `out`. Returns 0, or -1 after reporting a path that is too
 * long. */
int resume_checkpoint_path(const char *out, int step, char path[FILE_PATH_BYTES]);

/* Reads DIR/trainer.json. Returns 0, or -1 after reporting; the caller releases *saved. */
int resume_open(const char *directory, json_t **saved, struct resume_point *at);

/* Compares files with the checksums that trainer.json has; rank r of R takes a share of them. saved:
 * trainer.json, all of whose files count. NULL: those of the model and config.json in a directory that may be
 * of any program; without a trainer.json there is nothing to compare. Returns 0, or -1 after reporting. */
int resume_verify(const char *directory, const json_t *saved, int rank, int ranks);

/* Returns which attention the saved run used (`library` of struct attention_choice), if the same
 * backend saved it (its `details` are equal); otherwise -1. */
int resume_attention(const json_t *saved, const char *details);

/* ---- saving ---- */

/* The name of a rank's file. */
void resume_file_name(int rank, int ranks, char name[64]);

/* trainer.json without its list of files. NULL: out of memory. */
json_t *resume_describe(const struct run_info *run, const struct resume_point *at);

/* Adds a file of `directory` to a list of files, which starts as an empty JSON object. Reads the
 * whole file to compute its checksum. Returns 0, or -1 after reporting. */
int resume_list_file(json_t *list, const char *directory, const char *name);

/* Each rank writes the list of its files to DIR/files-00001-of-00002.json. When all ranks have, one
 * rank moves all lists into trainer.json. Both return 0, or -1 after reporting. */
int resume_write_list(const json_t *list, const char *directory, int rank, int ranks);
int resume_collect_lists(json_t *trainer, const char *directory, int ranks);

/* Writes DIR/trainer.json, with its own checksum. Returns 0, or -1 after reporting. */
int resume_write(json_t *trainer, const char *directory);

/* The largest `start` of the complete checkpoints under `out`; 0 if there are none. */
int resume_last_start(const char *out);

/* Lists the complete checkpoints under `out` of at most `step` steps, oldest first. The caller
 * frees the names and the list. Returns their number, which is also 0 if out of memory. */
size_t resume_list(const char *out, int step, char ***list);

#endif
