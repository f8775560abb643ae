/* view.h — who takes part in a run, and what the next view is. Pure: no input, output or clock.
 *
 * A run is trained in one view at a time. The views of a run are numbered from 1, and each of them
 * is made of the one before: those who stay keep their order, who joins is appended. */
#ifndef LLMC_MEMBERSHIP_VIEW_H
#define LLMC_MEMBERSHIP_VIEW_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct member {
    char uid[24];     /* of a registration; a process that registers again takes another */
    char address[72]; /* HOST:PORT, where the process listens (TCP) for a rendezvous */
    char host[64];    /* its name, for messages */
    int pid;
    int64_t joined; /* epoch of the first view that has this member; 0: none has. A member with
                     * joined == epoch is new in a view and has no state of the run */
};

struct view {
    int64_t epoch;         /* 0: no view */
    int members;           /* 0: the view before was dissolved, and the run can begin again */
    struct member *member; /* in the order of ranks */
    int self;              /* rank of this process; -1: the view is without it */
};

/* The rank of a uid, or -1. */
int view_rank_of(const struct view *v, const char *uid);

/* The view after `present`: its members without missing[rank], then the joiners. missing may be
 * NULL. self is -1 until view_rank_of sets it. Returns 0, or -1 after reporting; *out is then
 * empty. */
int view_next(const struct view *present, const bool *missing, const struct member *joiner,
              int joiners, struct view *out);

/* Seconds after which rank `self` proposes the view without missing[] (NULL: nobody): ranks that
 * are heard follow one another, so that one proposal is enough; who would leave out half of the
 * view or more waits longer, since the larger side should go on. Who does not know who is gone
 * (missing is not NULL, and all false) leaves it to those who do. */
double view_patience(const struct view *v, const bool *missing);

int view_copy(const struct view *from,
              struct view *to);  /* 0, or -1 after reporting; *to is empty */
void view_clear(struct view *v); /* an empty one is fine */

/* Text of a view and of a member as the store has them; the caller frees. NULL after reporting. */
char *view_to_json(const struct view *v);
char *member_to_json(const struct member *m);
/* The other way; what names nothing valid gives false, and reports nothing. self is -1. The uid of
 * a member is not part of its text. */
bool view_from_json(const char *text, struct view *out);
bool member_from_json(const char *text, const char *uid, struct member *out);

#ifdef __cplusplus
}
#endif
#endif
