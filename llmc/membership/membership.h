/* membership.h — who takes part in a run, while ranks die and join (--meet).
 *
 *     membership_open ──► view 1 ──► train ──► somebody is missing, or membership_has_changed
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

#ifdef __cplusplus
extern "C" {
#endif

struct membership;

struct membership_settings {
    const char *url;       /* etcd://HOST:PORT/RUN */
    int first_ranks;       /* the first view waits until so many processes have registered */
    int port;              /* where this process listens (TCP) for a rendezvous, from before
                            * membership_open to the end; the host is the address by which it
                            * reaches the store */
    const char *version;   /* of the program; the same in all processes */
    const json_t *options; /* an object: what must be the same in all processes */
    bool anew; /* takes over from a view none of whose members is registered any more: the
                            * user's word that they are dead */
};

struct membership_url {
    char host[256]; /* a name or an address, without brackets */
    int port;
    char run[65]; /* letters, digits, '.', '_' and '-' */
};

/* Takes etcd://HOST:PORT/RUN apart. Returns 0; -1 after reporting what is wrong with it, or that
 * the program was built without libcurl. */
int membership_url_parse(const char *url, struct membership_url *out);

/* Registers with the store and waits until a view takes this process in; says in one line whom it
 * waits for. The settings are not needed afterwards. Returns 0; 1: the run is complete already, and
 * *out is NULL; -1 after reporting: the store does not answer, or the options or the version are
 * others than the run's. Then nothing was registered. */
int membership_open(const struct membership_settings *settings, struct membership **out);

/* Says on the terminal, in one line, whether a process with these settings could take part now; its
 * port is not needed. Nothing is registered. Returns 0; or -1 after reporting: as above, or the run is
 * complete. tell: also where all is well. */
int membership_inspect(const struct membership_settings *settings, bool tell);

/* The present view. Valid until membership_next_view and membership_close. */
const struct view *membership_view(const struct membership *m);

/* Leaves the present view, for good, and blocks until there is a newer one that has this process:
 * another member's, or one that this process proposes: without the members that were not heard
 * (missing[rank of the present view]; NULL: all were; all false: somebody was not, and this process
 * does not know who, so that it waits for another's proposal first), with those who wait to join
 * and can be reached. Members that stay keep their order, joiners follow (member.joined ==
 * view.epoch). Epochs may be skipped. A process that was left out registers again and comes back as
 * a joiner. Says once where the store does not answer, and waits for it. Returns 0; 1: another
 * member has said that the run is complete; -1 after reporting, also where a signal asks the
 * program to stop. */
int membership_next_view(struct membership *m, const bool *missing);

/* Whether to call membership_next_view although nobody is missing: the store has a newer view, or,
 * on rank 0 only, which proposes first, somebody waits to join whom it can reach. All ranks should
 * then leave the comm after the same step. At most about a second old. Never blocks. */
bool membership_has_changed(const struct membership *m);

/* Sets ended[rank] of the ranks of the present view whose process has ended, as its host says; it says
 * so where nobody listens at the member's address. Takes up to half a second. */
void membership_find_ended(const struct membership *m, bool *ended);

/* Ends the present view, whose members all stop together: the run is not complete, and may begin
 * again, from a checkpoint and with other options. Returns 0, or -1. */
int membership_dissolve(struct membership *m);

/* Says that the run is complete, so that nobody joins or waits for it any more. Returns 0, or -1.
 */
int membership_complete(struct membership *m);

/* Removes the registration. NULL is fine. */
void membership_close(struct membership *m);

#ifdef __cplusplus
}
#endif
#endif
