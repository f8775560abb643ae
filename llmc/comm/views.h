/* views.h — takes a run whose ranks may die and join (--meet) from one view to the next.
 *
 * A view is the set of ranks that train together (llmc/membership). The trainer opens a comm in a
 * view and trains. When a rank is not heard any more, or a process waits to join, every rank copies
 * its state out of the comm (handover.h), and the next view begins:
 *
 *     views_open       joins the run; waits until a view has this process in it
 *     views_begin      where the run has not begun: takes the checkpoint that rank 0 begins at
 *     views_enter      in a new comm: receives the state that the other ranks bring
 *     views_report     reports which ranks left and joined
 *     views_tell, views_end_here    in each step: whether a process waits to join
 *     views_leave      copies this rank's state out of the comm
 *     views_next       waits for the next view and meets its ranks
 *
 * Without --meet there are no views: every function takes NULL and then does nothing.
 */
#ifndef LLMC_COMM_VIEWS_H
#define LLMC_COMM_VIEWS_H

#include <stdbool.h>

#include "llmc/comm/data_parallel.h"
#include "llmc/comm/handover.h"

struct views; /* opaque */

/* Checks the options that --meet needs. ranks: the number that a launcher started. Returns 0, or -1
 * after reporting. */
int views_check(const struct options *o, int ranks);

/* Joins the run that --meet names; if the run has not begun, waits until --meet-ranks processes are
 * there. Then meets the ranks of the first view that has this process in it. *out stays NULL
 * without --meet, and in modes that do not train. Returns 0; the program's exit code after
 * reporting; or VIEWS_COMPLETE if the run has ended already, which it prints. With --meet,
 * o->resume is NULL afterwards; views_begin sets it. The caller closes *out in any case; it keeps
 * `o`. */
enum { VIEWS_COMPLETE = -1 };
int views_open(struct options *o, const char *revision, struct views **out);
/* How the run ends for this process: with an error, after which other ranks may go on; together
 * with all ranks, before the run is complete; or because the run is complete. */
enum views_end { VIEWS_RANK_FAILS, VIEWS_RUN_STOPS, VIEWS_RUN_COMPLETE };
void views_close(struct views *v, enum views_end end);

/* The ranks of the present view, and their number of workers. Each rank has as many workers as at
 * the start. */
struct lossynet_world views_world(const struct views *v);
int views_workers(const struct views *v);
/* Whether other ranks have ended the run while this one waited for a view. */
bool views_are_complete(const struct views *v);
/* Whether this process has not trained in any earlier view. Then it reads checkpoints and prints
 * the same lines as at the start of a run. */
bool views_is_first_start(const struct views *v);

/* Call first in each view. If nobody has trained yet, sets o->resume and o->model of views_open
 * (resume_choose) to the checkpoint that --resume means on rank 0. Collective. Returns 0, or -1
 * after reporting here or on another rank. */
int views_begin(struct views *v);
/* Call after data_parallel_open. *at and last (handover.h): in, how far this rank has come; out,
 * where the run goes on. *continues: the run goes on, and all vectors have its state; otherwise it
 * begins here. Collective. Returns 0, or -1 after reporting. */
int views_enter(struct views *v, struct data_parallel *d, struct resume_point *at,
                struct step_metrics last[HANDOVER_STEPS], bool *continues);
/* Writes the event "view" to the log, and a line to rank 0's terminal. If another rank wrote the
 * log before, it may lack the last steps, so these are written first. */
void views_report(struct views *v, struct progress *progress, struct jsonl *log, int step,
                  const struct step_metrics last[HANDOVER_STEPS]);

/* Call in each step before a gather, which carries whether this rank wants the view to end
 * (lossynet_rank_gather). Returns 0, or -1. */
int views_tell(struct views *v, struct data_parallel *d);
/* Call after that gather: whether the view ends after this step. All ranks get the same answer. */
bool views_end_here(const struct views *v);

/* Call when training in this view has ended. agreed: all ranks agreed to end it; otherwise it ended
 * with an error. Copies this rank's state out of the comm. Returns 0, or -1 if an error was not
 * caused by other ranks, or after reporting. */
int views_leave(struct views *v, const struct data_parallel *d, bool agreed);
/* After data_parallel_close: waits for the next view and meets its ranks. Returns 0, or -1 after
 * reporting. */
int views_next(struct views *v);

#endif
