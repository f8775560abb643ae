/* training.h — a run of training, without its mathematics: how far it has come, where it goes on
 * after a stop and after a change of ranks, and what it tells the terminal, the log and checkpoints.
 *
 *     training_open        takes part in the run (--meet), or is alone with the launcher's ranks
 *     training_choose      which checkpoint it begins at
 *     training_enter       the comm is open: takes the state of earlier ranks; opens the log
 *     training_begin       loads the checkpoint's state; from here on steps are made
 *     training_finish_*    in each step: the end of the step before
 *     training_after_step  says what is due now
 *     training_end         the last checkpoint, and the last line
 *     training_leave       or ranks change: keeps their state for the next view
 *     training_next_view
 *     training_close
 */
#ifndef LLMC_RUN_TRAINING_H
#define LLMC_RUN_TRAINING_H

#include "llmc/comm/async_writer.h"
#include "llmc/comm/data_parallel.h"
#include "llmc/comm/views.h"
#include "llmc/log/metrics.h"
#include "llmc/run/due.h"
#include "llmc/run/out_lock.h"

struct training { /* what survives a change of ranks (--meet). Zeros before training_open */
    struct options *options;
    const char *revision;        /* of the program */
    struct lossynet_world world; /* the present ranks */
    struct llama_config config;  /* read once: the checkpoint may be gone in a later view */
    struct views *views;         /* where ranks may change; NULL without --meet */
    struct out_lock lock;        /* rank 0's, until the end of the run */
    struct resume_point at;      /* how far the run has come: steps and data */
    struct step_metrics recent[HANDOVER_STEPS]; /* handover.h */
};

struct training_view { /* the part of a run that the same ranks train */
    struct training *run;
    struct data_parallel *dp; /* the workers and the network; the caller opens and closes it */
    struct step_metrics record, last; /* of this step; of the step before */
    int rounds[2];    /* in which lost packets are sent again, by phase, as was last told */
    int quiet_until;  /* the step before which no change of them is told */
    int updated;      /* steps that this rank's owners made; may be ahead of run->at */
    bool continues;   /* the state came from ranks of an earlier view (--meet) */
    const char *from; /* the checkpoint that it begins at; NULL: none */
    json_t *saved;    /* its trainer.json */
    /* The caller sets faster_in_bf16, batch, seq and data before training_enter. */
    struct run_info facts;
    struct async_writer *saver;
    struct jsonl *log;
    struct progress progress;
};

/* Takes part in the run that --meet names (views_open), or begins with the ranks of a launcher. Returns
 * 0; the program's exit code after reporting; or VIEWS_COMPLETE. The caller closes it in any case. */
int training_open(struct training *run, struct options *options, const char *revision,
                  const struct lossynet_world *launched);
/* status: the exit code so far, or VIEWS_COMPLETE. Returns the exit code. */
int training_close(struct training *run, int status);
/* The number of workers of the present ranks. */
int training_workers(const struct training *run);

/* ---- a view: functions that can fail are collective, and return 0, or -1 after reporting ---- */

/* Sets `from`, `saved` and run->at to where this view begins, and locks --out. */
int training_choose(struct training_view *v);
/* Call after data_parallel_open: gives the workers their parameters, from other ranks (`continues`),
 * from --model or from the seed, and writes the log's first line. Also for --eval. */
int training_enter(struct training_view *v);
/* Call before the first step. tokenizer: a file that checkpoints get a copy of, or NULL. */
int training_begin(struct training_view *v, const char *tokenizer);
/* Call before data_parallel_close. Releases all that the view has opened. */
void training_close_view(struct training_view *v);

/* Begins the record of `step`: tokens and learning rate. */
void training_begin_record(struct training_view *v, int step);
/* This rank's owners have made the step: a rank that takes over may need its record. */
void training_note_update(struct training_view *v);
/* These two end the step before `record`, if it has not ended. The first closes its PARAMETER phase.
 * The second records the step, after ranks have exchanged what they measured. The third does both. */
int training_finish_begin(struct training_view *v);
int training_finish_end(struct training_view *v);
int training_finish_step(struct training_view *v);
/* Counts the step in `record`, and sets *due: what the run does before the next step. If anything
 * is due, the step has ended on all ranks. news: zeros before the first step. With a loss or a norm
 * that is not finite it ends the run, since it cannot recover, and returns -1. */
int training_after_step(struct training_view *v, struct data_parallel_news *news, struct due *due);

/* A signal ended the evaluation that was due: the run stops here, after a checkpoint. */
void training_stop(const struct training_view *v, struct data_parallel_news *news, struct due *due);

/* Ends a run that is complete or was stopped by a signal, after its last checkpoint, and says it on the
 * terminal and in the log. eval: the last evaluation, or NULL. Returns -1 also if the last checkpoint
 * could not be written. */
int training_end(struct training_view *v, bool stopped, const struct eval_metrics *eval);
/* Takes this rank out of a view that is over: agreed by all ranks, or because of an error. Returns -1
 * if the run cannot go on in another view. */
int training_leave(struct training_view *v, bool agreed);
/* After data_parallel_close: waits for the next view and meets its ranks (views_next). */
int training_next_view(struct training *run);

#endif
