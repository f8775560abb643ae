/* agreement.h — one process's part in agreeing on views, through a store (store.h).
 *
 * Callers pass the time in, and no function sleeps, so that a simulation can run this code
 * (test/llmc/membership/test_membership_histories.c). membership.c gives it a clock, a thread and a network.
 *
 *               agreement_step              agreement_leave
 *     OUTSIDE ───────────────────► INSIDE ───────────────────► LEAVING ──┐
 *        ▲     a view has it         ▲     trains in a view              │ agreement_step
 *        │                           └── a newer view has it ────────────┤
 *        └── a newer view is without it: registers again, as a new member┘
 *
 * A view is alive if all its members are inside it. At most one view is alive, for this reason: a
 * view is made only by a member of the view before, and that member is leaving the view before for
 * good. So the view before is dead from then on. If several members propose a view, the store
 * accepts only one. `anew` is the exception: there the user asserts that the members of the view
 * before are dead. */
#ifndef LLMC_MEMBERSHIP_AGREEMENT_H
#define LLMC_MEMBERSHIP_AGREEMENT_H

#include <jansson.h>

#include "llmc/membership/reach.h"
#include "llmc/membership/store.h"
#include "llmc/membership/view.h"

enum {
    AGREEMENT_LEASE = 5,         /* seconds after which a registration ends if it is not renewed */
    AGREEMENT_SETTLED = 30,      /* seconds in views after which a process may return at once */
    AGREEMENT_PAUSE_MOST = 30,   /* longest pause before another registration, in seconds */
    AGREEMENT_ANEW_PATIENCE = 10 /* seconds for which `anew` waits for first_ranks */
};

struct agreement_settings {
    struct store *store;
    const char *run;    /* keys begin with "RUN/" */
    struct member self; /* address, host, pid; the uid comes from `draw` */
    int first_ranks;
    bool anew;
    /* Draws a new uid, different from all that any process has had. */
    void (*draw)(void *context, char uid[24]);
    /* Sets reached[i]: whether member i listens at its address. */
    void (*reach)(void *context, const struct member *m, int members, enum reached *reached);
    void *context;
    /* May be NULL. Writes a proof that this process has the run's key, made for `text`. Processes
     * whose registration has another proof are not taken in. Returns 0, or -1 after reporting. */
    int (*prove)(void *context, const char *text, char proof[65]);
};

enum agreement_state { AGREEMENT_OUTSIDE, AGREEMENT_INSIDE, AGREEMENT_LEAVING };

enum agreement_result {
    AGREEMENT_WAIT,     /* no result yet: call again in a moment */
    AGREEMENT_AWAY,     /* the same, because the store does not answer: see store->why */
    AGREEMENT_VIEW,     /* inside a new view */
    AGREEMENT_COMPLETE, /* the run is complete */
    AGREEMENT_STOPPED,  /* the run was stopped without this process, which was in a view of it */
    AGREEMENT_FAILED    /* an error, which was reported */
};

/* What a process outside waits for; used in messages. */
enum agreement_obstacle {
    AGREEMENT_NO_OBSTACLE,
    AGREEMENT_FEW,     /* fewer than first_ranks processes have registered: `registered` */
    AGREEMENT_TAKING,  /* a view exists: its rank 0 has to take this process in */
    AGREEMENT_ORPHANED /* a view exists, but none of its members is registered */
};

struct agreement_leaving { /* while the process leaves a view */
    bool *missing;         /* the members that are missing */
    double began;          /* since when */
    double patience;       /* seconds until it proposes a view; < 0: not known yet */
    bool takes_in;         /* the next view may have new members */
};

struct agreement_lease {
    int64_t id;                  /* 0: not registered, as far as this process knows */
    double taken, pause, resume; /* taken in at; next pause, s; not registered before */
};

struct agreement {
    struct agreement_settings set;
    enum agreement_state state;
    struct member self;
    struct view view; /* inside and leaving: the present view; outside: the last one */
    struct agreement_leaving leaving;
    struct agreement_lease lease;
    double look, soonest; /* inside: time to ask the store next; earliest such time */
    bool changed;         /* inside: the result of membership_has_changed */
    int64_t found; /* epoch of the view that this process found at first; < 0: not known yet */
    double found_at;
    enum agreement_obstacle obstacle;
    int registered;
    struct view obstacle_view; /* the view that it waits for */
    double orphaned;           /* when the view was first seen orphaned; < 0: it is not */
};

void agreement_init(struct agreement *a, const struct agreement_settings *set);
void agreement_clear(struct agreement *a); /* does not change the store */

/* Compares version and options with the run's, which the first process has set. Returns
 * AGREEMENT_VIEW if they are the same; otherwise AGREEMENT_AWAY, _COMPLETE or _FAILED. */
enum agreement_result agreement_compare(struct agreement *a, const char *version,
                                        const json_t *options);

/* Call inside a view: leaves it for good. missing[rank]: members that the next view should leave
 * out (NULL: none). takes_in: it may take new members in. It should not after a view that was not
 * begun, perhaps because of them. Returns 0, or -1 after reporting. */
int agreement_leave(struct agreement *a, double now, const bool *missing, bool takes_in);

/* Call inside or leaving: sets ended[rank] of the view's members whose host says that their process
 * has ended; never this process's own. It asks those for which ended[rank] is false: a host that is
 * cut off takes half a second. */
void agreement_find_ended(const struct agreement *a, bool *ended);

/* Call outside or leaving: tries once to get into a view, with some requests to the store. */
enum agreement_result agreement_step(struct agreement *a, double now);

/* Call in every state, about once a second: renews the registration; inside, checks whether
 * something has changed. */
void agreement_watch(struct agreement *a, double now);

/* Call inside when a process may have registered: the next agreement_watch asks the store. It does
 * not do so in the first second of a view, so that processes that come together are taken in
 * together. */
void agreement_hasten(struct agreement *a);

/* Ends the view, whose members all stop, by making an empty one. A process that the run had left
 * out stops, too, when it sees that. The run may begin again, with other options. Rank 0 does so,
 * when it has written its last line; another member, if rank 0 has died before that. Returns
 * AGREEMENT_STOPPED if there is a newer view; AGREEMENT_WAIT while rank 0 still has to do it; or
 * AGREEMENT_AWAY, or AGREEMENT_FAILED after reporting. */
enum agreement_result agreement_dissolve(struct agreement *a);
/* The first marks the run as complete, and the second removes this process's registration. */
enum store_status agreement_complete(struct agreement *a);
enum store_status agreement_withdraw(struct agreement *a);

#endif
