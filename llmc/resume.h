/* resume.h — a training run's state as files, and back: what a checkpoint holds beside the model.
 *
 *     trainer.json                          where the run stands, its options, and the size and
 *                                           checksum of every file, its own included
 *     optimizer-00001-of-00002.safetensors  of the workers that rank 0 of 2 hosts; of worker W:
 *         worker.W.owned    I64 (runs, 2)   offset and length of the runs of the parameter vector
 *                                           (layout.h) that W has moments of
 *         worker.W.m, .v    F32 (elements)  these moments, run after run
 *         worker.W.stale    I64 (runs, 2)   where W's replica is not the model, nor the model rounded
 *                                           to --wire-dtype
 *         worker.W.replica  F32 (elements)  what it holds there
 *         worker.W.network  U8  (bytes)     lossynet_state_save of W,
 *         network           U8  (bytes)     and of all workers together (in the first file)
 *
 * Data position, schedule and random numbers are functions of the step and of the options, so that
 * with the same options a resumed run goes on bit for bit, also with the workers spread over other
 * processes. With others it goes on as well as it can, and says what differs: moments are dealt out
 * anew by offset, replicas start as the model.
 *
 * File formats and rules only; when a checkpoint is written is saver.h.
 */
#ifndef LLMC_RESUME_H
#define LLMC_RESUME_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "llmc/file.h"
#include "llmc/layout.h"
#include "llmc/options.h"
#include "llmc/record.h"
#include "llmc/run.h"
#include "llmc/snapshot.h"

#ifdef __cplusplus
extern "C" {
#endif

struct resume_point {  /* where a run stands */
    int step;          /* steps done */
    uint64_t sequence; /* of the data: the next one */
    struct run_record record;
};

struct resume_worker { /* a local one; the memory is the trainer's */
    int id;
    float *params, *m, *v;
};

/* What is asked of the network, which llmc does not know: the functions of lossynet.h. */
struct lossynet;
struct resume_net {
    struct lossynet *net;
    void (*shard)(const struct lossynet *net, int worker, int bucket, size_t *offset,
                  size_t *count);
    bool (*next_fresh)(const struct lossynet *net, int worker, size_t *cursor, size_t *offset,
                       size_t *count);
    size_t (*state_bytes)(const struct lossynet *net, int worker);
    void (*state_save)(const struct lossynet *net, int worker, void *out);
    bool (*state_load)(struct lossynet *net, int worker, const void *bytes, size_t count);
    int all_workers; /* as their argument `worker` */
};

/* A run and its memory. Everything belongs to the trainer and outlives what is done with it. */
struct resume_run {
    struct run_facts facts;
    bool whole_moments;           /* each worker has moments of the whole vector (rps, naive) */
    bool own_replicas;            /* no replica is the model anywhere (naive) */
    struct resume_worker *worker; /* [local] */
    struct resume_net net;
    /* between the memory of the workers and the host's; from several threads at once */
    bool on_device; /* each call costs more than its bytes: few large ones */
    void (*upload)(void *to, const void *host, size_t bytes);
    void (*download)(void *host, const void *from, size_t bytes);
};

/* ---- resuming ---- */

/* For --resume: finds the checkpoint (for "auto", the newest complete one under --out), makes it
 * options->model, and options->resume its name; NULL when there is none for "auto". Looks at names,
 * sizes and trainer.json. 0, or the exit code after reporting. */
int resume_choose(struct options *options);

/* Reads DIR/trainer.json. 0, or -1 after reporting; the caller releases *saved. */
int resume_open(const char *directory, json_t **saved, struct resume_point *at);

/* Gives the workers, whose params are the model already, the rest of their state from `directory`,
 * after verifying this rank's share of the checksums. Says on the terminal and in the log (event
 * "resume") what cannot be identical. 0, or -1 after reporting. */
int resume_load(const struct resume_run *run, const char *directory, const json_t *saved,
                struct runlog *log);

/* ---- saving ---- */

/* Copies this rank's share of the state. 0, or -1 after reporting. */
int resume_snapshot(const struct resume_run *run, struct snapshot *out);

/* The name of a rank's file of it. */
void resume_file_name(int rank, int ranks, char name[64]);

/* trainer.json without its list of files. NULL: out of memory. */
json_t *resume_describe(const struct resume_run *run, const struct resume_point *at);

/* Adds a file to that list. */
void resume_add_file(json_t *trainer, const char *name, uint64_t bytes, const char *checksum);

/* Writes DIR/trainer.json, with its own checksum. 0, or -1 after reporting. */
int resume_write(json_t *trainer, const char *directory);

/* Complete checkpoints under `out` after at most `step` steps, oldest first; the caller frees the
 * names and the list. Returns how many; 0 as well when out of memory. */
size_t resume_list(const char *out, int step, char ***list);

#ifdef __cplusplus
}
#endif
#endif
