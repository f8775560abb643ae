/* agreement.h — one process's part in agreeing on views, through a store (store.h).
 *
 * It knows the time only as it is told and never sleeps, so that a simulation can run it
 * (test/llmc/test_membership_histories.c). membership.c gives it a clock, a thread and a network.
 *
 *               agreement_step              agreement_leave
 *     OUTSIDE ───────────────────► INSIDE ───────────────────► LEAVING ──┐
 *        ▲     a view has it         ▲     trains in a view              │ agreement_step
 *        │                           └── a newer view has it ────────────┤
 *        └── a newer view is without it: comes again, as a new member ───┘
 *
 * Why at most one view is alive, which means that all its members are inside it: a view is made
 * only by a member of the view before it which is leaving that one for good. So the view before is
 * dead from then on. The store lets one proposal of several win. `anew` is the exception: the
 * user's word that the members of the view before are dead. */
#ifndef LLMC_MEMBERSHIP_AGREEMENT_H
#define LLMC_MEMBERSHIP_AGREEMENT_H

#include <jansson.h>

#include "llmc/membership/reach.h"
#include "llmc/membership/store.h"
#include "llmc/membership/view.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    AGREEMENT_LEASE = 5,         /* seconds without a word after which a registration lapses */
    AGREEMENT_SETTLED = 30,      /* seconds in views after which a process may come back at once */
    AGREEMENT_PAUSE_MOST = 30,   /* seconds before another registration */
    AGREEMENT_ANEW_PATIENCE = 10 /* seconds for which `anew` waits for first_ranks */
};

struct agreement_settings {
    struct store *store;
    const char *run;    /* keys begin with "RUN/" */
    struct member self; /* address, host, pid; the uid comes from `draw` */
    int first_ranks;
    bool anew;
    /* A new uid, other than all before, of this process and others. */
    void (*draw)(void *context, char uid[24]);
    /* reached[i]: whether member i listens at its address. */
    void (*reach)(void *context, const struct member *m, int members, enum reached *reached);
    void *context;
};

enum agreement_state { AGREEMENT_OUTSIDE, AGREEMENT_INSIDE, AGREEMENT_LEAVING };

enum agreement_result {
    AGREEMENT_WAIT,     /* nothing yet: step again in a moment */
    AGREEMENT_AWAY,     /* the same, since the store does not answer: store->why */
    AGREEMENT_VIEW,     /* inside a new view */
    AGREEMENT_COMPLETE, /* the run is complete */
    AGREEMENT_FAILED    /* reported */
};

/* What it waits for outside, for messages. */
enum agreement_obstacle {
    AGREEMENT_NO_OBSTACLE,
    AGREEMENT_FEW,     /* fewer than first_ranks have registered: `registered` */
    AGREEMENT_TAKING,  /* a view is there: its rank 0 has to take this process in */
    AGREEMENT_ORPHANED /* a view is there, and none of its members is registered */
};

struct agreement {
    struct agreement_settings set;
    enum agreement_state state;
    struct member self;
    struct view view;            /* inside and leaving; as it was, outside */
    bool *missing;               /* leaving */
    double began;                /* leaving since */
    bool asked;                  /* leaving, and not knowing who is missing: who has ended */
    int64_t lease;               /* 0: not registered, as far as known */
    double taken, pause, resume; /* when it was taken in; seconds; outside: not registered before */
    double look, soonest;        /* when the store is asked next while inside; not before */
    bool changed;                /* inside: as membership_has_changed */
    int64_t found; /* epoch that was there when this process came, < 0: not known yet */
    double found_at;
    enum agreement_obstacle obstacle;
    int registered;
    struct view obstacle_view; /* the view that it waits for */
    double orphaned;           /* when the view was first seen orphaned; < 0: it is not */
};

void agreement_init(struct agreement *a, const struct agreement_settings *set);
void agreement_clear(struct agreement *a); /* leaves the store alone */

/* Compares the version and the options with the run's, which are those of the process that came
 * first. AGREEMENT_VIEW: they are the same; AGREEMENT_AWAY, _COMPLETE, _FAILED. */
enum agreement_result agreement_compare(struct agreement *a, const char *version,
                                        const json_t *options);

/* Writes nothing, and says in text what a process would find that came now. AGREEMENT_VIEW: it could
 * come; AGREEMENT_AWAY, _COMPLETE, _FAILED as above. */
enum { AGREEMENT_TEXT = 200 };
enum agreement_result agreement_inspect(const struct agreement *a, const char *version,
                                        const json_t *options, char text[AGREEMENT_TEXT]);

/* Inside: leaves the view, for good, without missing[rank] (NULL: nobody is missing). Returns 0, or
 * -1 after reporting. */
int agreement_leave(struct agreement *a, double now, const bool *missing);

/* Inside and leaving: sets ended[rank] of the view's members whose process has ended, as its host says;
 * never this one's. */
void agreement_find_ended(const struct agreement *a, bool *ended);

/* Outside and leaving: one attempt to come into a view, some requests to the store. */
enum agreement_result agreement_step(struct agreement *a, double now);

/* In every state, about once a second: keeps the registration; inside, looks whether something
 * changed. */
void agreement_watch(struct agreement *a, double now);

/* Inside: lets the next agreement_watch look, since somebody may have registered; but not within the
 * first second of a view, so that those who come together are taken in together. */
void agreement_hasten(struct agreement *a);

/* Ends the view, whose members all stop, by an empty one: the run may begin again, with other
 * options. STORE_CHANGED: there is a newer view, which stays. */
enum store_status agreement_dissolve(struct agreement *a);
/* Says that the run is complete; removes the registration. */
enum store_status agreement_complete(struct agreement *a);
enum store_status agreement_withdraw(struct agreement *a);

#ifdef __cplusplus
}
#endif
#endif
