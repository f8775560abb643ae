/* view.h — a view (the processes that take part in a run), and how the next view is made of it.
 * Functions here use no input, output or clock.
 *
 * A run is trained in one view at a time. The views of a run are numbered from 1, and each of them
 * is made of the one before: members that stay keep their order, and new members are appended. */
#ifndef LLMC_MEMBERSHIP_VIEW_H
#define LLMC_MEMBERSHIP_VIEW_H

#include <stdbool.h>
#include <stdint.h>

struct member {
    char uid[24];     /* of a registration; a process that registers again takes a new one */
    char address[72]; /* HOST:PORT, where the process listens (TCP) for a rendezvous */
    char host[64];    /* its name, for messages */
    int pid, process; /* process: the number by which its launcher knows it; -1: none */
    int64_t joined;   /* epoch of the first view that has this member; 0: none yet. A member with
                     * joined == epoch is new in that view and has no state of the run */
    char proof[65];   /* of a registration in a run with a key, as hexadecimal digits; else "" */
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

/* Seconds that rank `self` waits before it proposes the view without missing[] (NULL: nobody is
 * missing). Each rank that is heard waits longer than the one before it, so that one proposal is
 * enough. A rank that would leave out half of the view or more waits longer, since the larger side
 * should go on; missing members of which ended[] says that they have ended are on no side. A rank
 * that does not know who is gone (missing is not NULL, and all false) waits for those that know. */
double view_patience(const struct view *v, const bool *missing, const bool *ended);

int view_copy(const struct view *from,
              struct view *to);  /* 0, or -1 after reporting; *to is empty */
void view_clear(struct view *v); /* an empty one is fine */

/* The text of a view and of a member in the store; the caller frees it. NULL after reporting. */
char *view_to_json(const struct view *v);
char *member_to_json(const struct member *m);
/* Parse these texts. Return false, and report nothing, if the text is not valid. self is set to -1.
 * The uid of a member is not part of its text. */
bool view_from_json(const char *text, struct view *out);
bool member_from_json(const char *text, const char *uid, struct member *out);

#endif
