/* saver.h — when and how checkpoints are written: while training goes on, whole or not at all.
 *
 * After every step the ranks tell each other how far they are. When a save is due, they wait for
 * the one before, rank 0 makes room under OUT/checkpoint-STEP.partial, each rank copies its state
 * (resume.h), and a thread of each rank writes its part of the copy. When all parts are written,
 * rank 0's thread adds trainer.json with all checksums, syncs, renames the directory to its final
 * name, and removes checkpoints beyond the newest `keep`.
 *
 * Training waits for the copy, and for the disk only when a save is due before the last one is
 * through. A save that fails (full disk, read-only or vanished directory) is reported; training
 * goes on until the next. A killed run leaves whole checkpoints and perhaps a .partial directory,
 * which nothing reads and the next run removes.
 *
 * SIGTERM and SIGUSR1 (Slurm's warning, `--signal=USR1@120`) ask for a checkpoint and an end: ranks
 * tell each other, so that all stop after the same step.
 *
 * Every rank calls the same functions in the same order, from one thread.
 */
#ifndef LLMC_SAVER_H
#define LLMC_SAVER_H

#include <stdbool.h>

#include "llmc/resume.h"

#ifdef __cplusplus
extern "C" {
#endif

struct saver;

/* Small, reliable, collective: each rank gives `local` items of `bytes`, all[workers] gets
 * everybody's in order, as lossynet_all_gather. 0, or -1 after reporting. */
typedef int (*saver_gather)(void *context, const void *mine, void *all, size_t bytes);

/* Makes the model, P parameters that stay valid until the next call, on every rank. Collective. 0,
 * or -1 after reporting. */
typedef int (*saver_model)(void *context, const float **model);

struct saver_settings {
    const struct resume_run *run; /* all of this outlives the saver */
    const char *tokenizer;        /* a file to copy; NULL: that of the model, if any */
    saver_gather gather;
    void *gather_context;
    saver_model model;
    void *model_context;
};

/* step: steps done when the run starts; the checkpoints before it of a run that is resumed count
 * towards options->keep. Installs the signal handlers. NULL is a saver that saves nothing. 0, or -1
 * after reporting. */
int saver_open(const struct saver_settings *settings, int step, struct saver **out);

/* Lets go of everything; waits for a write of this rank that is under way, which then leaves no
 * checkpoint. */
void saver_close(struct saver *s);

/* After each step: hears how far the ranks are. *stop becomes true when a signal has come to one of
 * them, *due when a checkpoint is to be written: then, every options->save_every steps, and after
 * the last. 0, or -1 when the ranks could not be heard. */
int saver_poll(struct saver *s, int step, bool *due, bool *stop);

/* Saves the run as it stands between two steps: no phase is open. A checkpoint that cannot be
 * written is reported and is the next one's affair. 0, or -1 when the ranks could not be heard. */
int saver_save(struct saver *s, const struct resume_point *at);

/* Waits until everything is written. 0, or -1 when the ranks could not be heard. */
int saver_finish(struct saver *s);

/* On rank 0: the newest checkpoint of this run that is still there; "" if there is none. */
const char *saver_last(const struct saver *s);

/* On rank 0: saves were asked for, and none of them is on disk. */
bool saver_has_failed(const struct saver *s);

#ifdef __cplusplus
}
#endif
#endif
