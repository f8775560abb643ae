/* membership.h — agrees on the processes that take part in a run while ranks die and join (--meet).
 *
 *     membership_open ──► view 1 ──► train ──► a rank is missing, or membership_has_changed
 *                           ▲                                     │
 *                           └──── membership_next_view ◄──────────┘      leave the comm, then ask
 *
 * The README of this folder has the rules. Functions that return int report an error in one line.
 */
#ifndef LLMC_MEMBERSHIP_MEMBERSHIP_H
#define LLMC_MEMBERSHIP_MEMBERSHIP_H

#include <jansson.h>
#include <stdbool.h>

#include "llmc/membership/view.h"

struct membership;

struct membership_settings {
    const char *url; /* etcd://HOST:PORT/RUN */
    int first_ranks; /* the first view waits until so many processes have registered */
    /* Listens for a rendezvous (TCP) at a numeric address, the one from which this process connects
     * to the store, from now to the end. Returns the port, or -1 after reporting. */
    int (*listen)(void *context, const char *address);
    int (*prove)(void *context, const char *text, char proof[65]); /* of agreement_settings */
    void *context;                                                 /* of these two */
    const char *version;   /* of the program; the same in all processes */
    const json_t *options; /* an object: the options that must be the same in all processes */
    int process;           /* the number by which its launcher knows this process; -1: none */
    bool anew;             /* replaces a view of which no member is registered any more: the user
                            * asserts that they are dead */
};

struct membership_url {
    char host[256]; /* a name or an address, without brackets */
    int port;
    char run[65]; /* letters, digits, '.', '_' and '-' */
};

/* Parses etcd://HOST:PORT/RUN. Returns 0, or -1 after reporting what is wrong with it, or that the
 * program was built without libcurl. */
int membership_url_parse(const char *url, struct membership_url *out);

/* Registers with the store and waits until a view takes this process in; prints in one line what it
 * waits for. The settings are not needed afterwards. Returns 0; 1 if the run is complete already,
 * and then *out is NULL; -1 after reporting that the store does not answer, or that options or
 * version differ from the run's. In the last case nothing was registered. */
int membership_open(const struct membership_settings *settings, struct membership **out);

/* The present view. Valid until membership_next_view and membership_close. */
const struct view *membership_view(const struct membership *m);

/* Leaves the present view for good, and blocks until there is a newer one that has this process.
 * Another member proposes that view, or this process does. It leaves out the members that were not
 * heard: missing[rank of the present view]. NULL: all were heard. All false: some rank was not
 * heard, but this process does not know which one, so it waits for another member's proposal first.
 * The new view takes in processes that wait to join and can be reached. Members that stay keep
 * their order; joiners follow (member.joined == view.epoch). Epochs may be skipped. A process that
 * was left out registers again and returns as a joiner. takes_in: false after a view that was not
 * begun; then the next one has no new members, which may be at fault. If the store does not answer,
 * this is reported once, and the function waits. Returns 0; 1 if another member has marked the run
 * as complete, or if the members of a later view have all stopped, which is reported; -1 after
 * reporting, also if a signal asks the program to stop. */
int membership_next_view(struct membership *m, const bool *missing, bool takes_in);

/* Whether to call membership_next_view although no rank is missing. It is true if the store has a
 * newer view. On rank 0, which proposes first, it is also true if a process waits to join and can
 * be reached. All ranks should then leave the comm after the same step. The answer is at most about
 * a second old. Never blocks. */
bool membership_has_changed(const struct membership *m);

/* Sets ended[rank] of the ranks of the present view whose process has ended: their host answers
 * that nobody listens at the member's address. Asks those for which it is false, for up to half a
 * second. */
void membership_find_ended(const struct membership *m, bool *ended);

/* Ends the present view, whose members all stop together and all call this. The run is not complete,
 * and may begin again, from a checkpoint and with other options. Rank 0 ends the view; the others
 * wait for that, and do it if rank 0 has died. Returns 0, or -1. */
int membership_dissolve(struct membership *m);

/* Marks the run as complete, so that no process joins it or waits for it any more. Returns 0, or
 * -1.
 */
int membership_complete(struct membership *m);

/* Removes the registration. NULL is fine. */
void membership_close(struct membership *m);

#endif
