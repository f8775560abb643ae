/* views.h — a run whose ranks may die and join (--meet): from one view to the next.
 *
 * A view is the set of ranks that train together (llmc/membership). The trainer opens a comm in a
 * view and trains. When a rank is not heard any more, or somebody waits to join, every rank leaves
 * the comm with what it has (handover.h), and the next view begins:
 *
 *     views_open       joins the run; waits until a view has this process in it
 *     views_enter      in a new comm: takes what the other ranks bring
 *     views_report     tells who left and who joined
 *     views_tell, views_end_here    in each step: does somebody wait to join?
 *     views_leave      takes along what this rank has
 *     views_next       waits for the next view and meets its ranks
 *
 * Without --meet there are no views: every function takes NULL and then does nothing.
 */
#ifndef LLMC_COMM_VIEWS_H
#define LLMC_COMM_VIEWS_H

#include <stdbool.h>

#include "llmc/comm/data_parallel.h"
#include "llmc/comm/handover.h"

#ifdef __cplusplus
extern "C" {
#endif

struct views; /* opaque */

/* Checks the options that --meet needs; ranks: those that a launcher started. Returns 0, or -1 after
 * reporting. */
int views_check(const struct options *o, int ranks);

/* --preflight: whether a process with these options could take part now, in one line; tell: also where
 * it could. Nothing without --meet. Returns 0, or -1 after reporting. */
int views_preflight(const struct options *o, const char *revision, bool tell);

/* Joins the run that --meet names, with --meet-ranks others if it has not begun, and meets the ranks
 * of the first view that has this process in it. *out stays NULL without --meet, and where nothing is
 * trained. Returns 0; the
 * program's exit code after reporting; or VIEWS_COMPLETE where the run has ended already, which it
 * tells on the terminal. The caller closes *out in any case. */
enum { VIEWS_COMPLETE = -1 };
int views_open(const struct options *o, const char *revision, struct views **out);
/* How it ends for this process: with an error, after which others may go on; with all ranks, though
 * the run is not complete; or with the run, which nobody need join any more. */
enum views_end { VIEWS_RANK_FAILS, VIEWS_RUN_STOPS, VIEWS_RUN_COMPLETE };
void views_close(struct views *v, enum views_end end);

/* The ranks of the present view; N, with as many workers on each rank as at the start. */
struct lossynet_world views_world(const struct views *v);
int views_workers(const struct views *v);
/* Whether other ranks have ended the run while this one waited for a view. */
bool views_are_complete(const struct views *v);
/* Whether this process has trained in no view before this one: what is told and loaded at the start
 * of a run is told and loaded then. */
bool views_are_new(const struct views *v);

/* After data_parallel_open. *at, and last (handover.h): in, where this rank stands; out, where the
 * run goes on. *continues: all vectors are set to the state of the run; else it begins here.
 * Collective. Returns 0, or -1 after reporting. */
int views_enter(struct views *v, struct data_parallel *d, struct resume_point *at,
                struct step_metrics last[HANDOVER_STEPS], bool *continues);
/* Writes the event "view" to the log, and a line to the terminal (rank 0's); before it those of the
 * last steps that the log of another rank, which is gone, lacks. */
void views_report(struct views *v, struct progress *progress, struct jsonl *log, int step,
                  const struct step_metrics last[HANDOVER_STEPS]);

/* Call in each step before the gather that carries what is put aside. Returns 0, or -1. */
int views_tell(struct views *v, struct data_parallel *d);
/* After that gather: whether the view ends after this step, as all ranks know. */
bool views_end_here(const struct views *v);

/* Training in this view has ended, as all ranks agreed or with an error: takes what this rank
 * has out of the comm. Returns 0, or -1 where it was not other ranks that made it end. */
int views_leave(struct views *v, const struct data_parallel *d, bool agreed);
/* After data_parallel_close: waits for the next view and meets its ranks. Returns 0, or -1 after
 * reporting. */
int views_next(struct views *v);

#ifdef __cplusplus
}
#endif
#endif
