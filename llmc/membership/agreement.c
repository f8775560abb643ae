/* agreement.c — see agreement.h. */
#include "llmc/membership/agreement.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/log/error.h"

enum { KEY_BYTES = 160 };

/* Writes the run's key of this name to `key`, which it returns. uid: of a member's key; else "". */
static char *key_of(const struct agreement *a, const char *name, const char *uid,
                    char key[KEY_BYTES]) {
    snprintf(key, KEY_BYTES, "%s/%s%s", a->set.run, name, uid);
    return key;
}

/* ---- the run as the store has it at one moment ---- */

struct room {
    bool complete;
    char *options;    /* NULL: no process has written them yet */
    char *left;       /* " UID " of each member that a view left out without removing its
                       * registration, or NULL */
    struct view view; /* epoch 0: there is none */
    int64_t modified; /* revision of the view's key; 0: there is none */
    struct member *registered;
    int members; /* number of registered members, which are in the order of registration */
};

static void room_clear(struct room *room) {
    free(room->options);
    free(room->left);
    free(room->registered);
    free(room->view.member);
    *room = (struct room){.view.self = -1};
}

static const char MEMBER[] = "member/"; /* before the uid, in a member's key */

static enum agreement_result take_entry(const struct agreement *a, const struct store_entry *e,
                                        struct room *room) {
    const char *name = e->key + strlen(a->set.run) + 1;
    if (!strcmp(name, "complete")) room->complete = true;
    if (!strcmp(name, "options") && !room->options) room->options = strdup(e->value);
    if (!strcmp(name, "left") && !room->left) room->left = strdup(e->value);
    if (!strncmp(name, MEMBER, strlen(MEMBER)) &&
        member_from_json(e->value, name + strlen(MEMBER), &room->registered[room->members]))
        room->members++;
    if (!strcmp(name, "view")) {
        room->modified = e->modified;
        if (!view_from_json(e->value, &room->view)) {
            log_error("the store's key %s does not hold a view; is the run's name that of another "
                      "program?",
                      e->key);
            return AGREEMENT_FAILED;
        }
        room->view.self = view_rank_of(&room->view, a->self.uid);
    }
    return AGREEMENT_WAIT;
}

/* Reads the run's keys. On AGREEMENT_WAIT the caller clears *room; otherwise it is empty. */
static enum agreement_result look(const struct agreement *a, struct room *room) {
    struct store_entries entries;
    char prefix[KEY_BYTES];
    *room = (struct room){.view.self = -1};
    if (a->set.store->list(a->set.store, key_of(a, "", "", prefix), &entries) != STORE_DONE)
        return AGREEMENT_AWAY;
    enum agreement_result result = AGREEMENT_WAIT;
    room->registered = calloc((size_t)entries.count + 1, sizeof *room->registered);
    if (!room->registered) {
        log_out_of_memory("registered members", entries.count * (double)sizeof *room->registered);
        result = AGREEMENT_FAILED;
    }
    for (int i = 0; i < entries.count && result == AGREEMENT_WAIT; i++)
        result = take_entry(a, &entries.entry[i], room);
    store_entries_clear(&entries);
    if (result != AGREEMENT_WAIT) room_clear(room);
    return result;
}

static const struct member *registered(const struct room *room, const char *uid) {
    for (int i = 0; i < room->members; i++)
        if (!strcmp(room->registered[i].uid, uid)) return &room->registered[i];
    return NULL;
}

static bool was_left_out(const struct room *room, const char *uid) {
    char word[32];
    snprintf(word, sizeof word, " %s ", uid);
    return room->left && strstr(room->left, word);
}

/* ---- registration ---- */

void agreement_init(struct agreement *a, const struct agreement_settings *set) {
    *a = (struct agreement){.set = *set, .self = set->self, .orphaned = -1, .found = -1};
    a->view.self = -1;
}

void agreement_clear(struct agreement *a) {
    free(a->leaving.missing);
    view_clear(&a->view);
    view_clear(&a->obstacle_view);
    a->leaving.missing = NULL;
}

/* The proof that belongs to a registration. It holds for this run, uid and address alone. */
static int prove(const struct agreement *a, const struct member *m, char proof[65]) {
    char text[256];
    proof[0] = '\0';
    snprintf(text, sizeof text, "member %s %s %s", a->set.run, m->uid, m->address);
    return a->set.prove ? a->set.prove(a->set.context, text, proof) : 0;
}

/* Whether a registration was made with the run's key. */
static bool has_key(const struct agreement *a, const struct member *m) {
    char right[65];
    return !a->set.prove || (!prove(a, m, right) && !strcmp(right, m->proof));
}

/* Registers under a new lease, if the view is still the one of the room. So a process that was left
 * out meanwhile does not register again under the uid that was left out. */
static void enroll(struct agreement *a, const struct room *room) {
    char view[KEY_BYTES], key[KEY_BYTES];
    int64_t lease;
    if (a->set.store->grant(a->set.store, AGREEMENT_LEASE, &lease) != STORE_DONE) return;
    struct member self = a->self;
    if (prove(a, &self, self.proof)) return;
    char *value = member_to_json(&self);
    const struct store_write write = {key_of(a, MEMBER, self.uid, key), value, lease};
    if (value && a->set.store->commit(a->set.store, key_of(a, "view", "", view), room->modified,
                                      &write, 1) == STORE_DONE)
        a->lease.id = lease;
    free(value);
}

enum store_status agreement_withdraw(struct agreement *a) {
    char key[KEY_BYTES], guard[KEY_BYTES];
    const struct store_write write = {key_of(a, MEMBER, a->self.uid, key), NULL, 0};
    a->lease.id = 0;
    return a->set.store->commit(a->set.store, key_of(a, "no key", "", guard), 0, &write, 1);
}

enum store_status agreement_complete(struct agreement *a) {
    char key[KEY_BYTES];
    const struct store_write write = {key_of(a, "complete", "", key), "true", 0};
    const enum store_status status = a->set.store->commit(a->set.store, key, 0, &write, 1);
    return status == STORE_CHANGED ? STORE_DONE : status; /* another member has marked it */
}

/* ---- the options ---- */

static void short_text(const json_t *value, char text[100]) {
    char *all =
        value ? json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(12)) : NULL;
    snprintf(text, 100, "%s", all ? all : "not set");
    free(all);
}

/* The first key of `one` whose value in `other` is different; NULL: none. */
static const char *difference(const json_t *one, const json_t *other) {
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)one, key, value) {
        if (!json_equal(value, json_object_get(other, key))) return key;
    }
    return NULL;
}

static enum agreement_result compare(const struct agreement *a, const char *text,
                                     const char *version, const json_t *options) {
    char here[100], there[100];
    json_t *said = json_loads(text, 0, NULL);
    const char *their = json_string_value(json_object_get(said, "version"));
    const json_t *theirs = json_object_get(said, "options");
    const char *key = difference(options, theirs);
    if (!key) key = difference(theirs, options);
    enum agreement_result result = AGREEMENT_FAILED;
    if (!their || !json_is_object(theirs))
        log_error("the store's key %s/options holds no options; is the run's name that of another "
                  "program?",
                  a->set.run);
    else if (strcmp(version, their) != 0)
        log_error("this program is version %s, and run %s was begun with version %s; start the "
                  "same program everywhere, or name another run",
                  version, a->set.run, their);
    else if (key) {
        short_text(json_object_get(options, key), here);
        short_text(json_object_get(theirs, key), there);
        log_error("%s%s is %s here and %s in run %s; give all ranks the same, or name another run",
                  strchr(key, ' ') ? "" : "option ", key, here, there, a->set.run);
    } else {
        result = AGREEMENT_VIEW;
    }
    json_decref(said);
    return result;
}

enum agreement_result agreement_compare(struct agreement *a, const char *version,
                                        const json_t *options) {
    struct room room;
    enum agreement_result result = look(a, &room);
    if (result == AGREEMENT_WAIT && !room.complete && !room.options) { /* the first process */
        char key[KEY_BYTES];
        json_t *all = json_pack("{s:s, s:O}", "version", version, "options", options);
        char *text = json_dumps(all, JSON_COMPACT);
        json_decref(all);
        const struct store_write write = {key_of(a, "options", "", key), text, 0};
        const enum store_status status =
            text ? a->set.store->commit(a->set.store, key, 0, &write, 1) : STORE_AWAY;
        free(text);
        room_clear(&room);
        if (status == STORE_AWAY) return AGREEMENT_AWAY;
        result = look(a, &room); /* another process may have been earlier */
    }
    if (result == AGREEMENT_WAIT)
        result = room.complete  ? AGREEMENT_COMPLETE
                 : room.options ? compare(a, room.options, version, options)
                                : AGREEMENT_AWAY;
    room_clear(&room);
    return result;
}

static bool is_orphaned(const struct room *room) {
    for (int r = 0; r < room->view.members; r++)
        if (registered(room, room->view.member[r].uid)) return false;
    return true;
}

/* ---- proposals ---- */

/* Whether registration i is out of date, because another registration has the same address: this
 * process's or a later one. Then its process has ended, or has registered again. */
static bool superseded(const struct agreement *a, const struct room *room, int i) {
    const struct member *m = &room->registered[i];
    if (!strcmp(m->uid, a->self.uid)) return false;
    if (!strcmp(m->address, a->self.address)) return true;
    for (int k = i + 1; k < room->members; k++)
        if (!strcmp(room->registered[k].address, m->address) && has_key(a, &room->registered[k]))
            return true;
    return false;
}

/* Lists the members that are registered, are not in the room's view, were not left out, and can be
 * reached; this process counts as reached. The caller frees the list. NULL after reporting that
 * memory is lacking. */
static struct member *waiting(const struct agreement *a, const struct room *room, int *count) {
    const size_t most = (size_t)room->members + 1;
    struct member *list = calloc(most, sizeof *list);
    enum reached *reached = (enum reached *)calloc(most, sizeof *reached);
    *count = 0;
    if (!list || !reached) {
        log_out_of_memory("waiting members", (double)(most * sizeof *list));
        free(list);
        list = NULL;
    } else {
        int all = 0;
        for (int i = 0; i < room->members; i++)
            if (view_rank_of(&room->view, room->registered[i].uid) < 0 &&
                !was_left_out(room, room->registered[i].uid) && !superseded(a, room, i) &&
                has_key(a, &room->registered[i])) {
                list[all] = room->registered[i];
                memset(list[all++].proof, 0, sizeof list->proof); /* of the registration */
            }
        if (all) a->set.reach(a->set.context, list, all, reached);
        for (int i = 0; i < all; i++)
            if (reached[i] == REACHED || !strcmp(list[i].uid, a->self.uid))
                list[(*count)++] = list[i];
    }
    free(reached);
    return list;
}

/* Enters a view: AGREEMENT_VIEW, or AGREEMENT_FAILED. */
static enum agreement_result take(struct agreement *a, const struct view *next, double now) {
    struct view copy;
    if (view_copy(next, &copy)) return AGREEMENT_FAILED;
    view_clear(&a->view);
    a->view = copy;
    a->view.self = view_rank_of(next, a->self.uid);
    if (a->state == AGREEMENT_OUTSIDE) a->lease.taken = now;
    a->state = AGREEMENT_INSIDE;
    a->changed = false;
    a->look = a->soonest = now + 1;
    a->orphaned = -1;
    a->obstacle = AGREEMENT_NO_OBSTACLE;
    return AGREEMENT_VIEW;
}

/* Writes the view after the room's, and removes the registrations of the members that it leaves
 * out, so that no later view takes them in under the same uid. It does so even for members that are
 * not registered in the room, since they may register again before this is written. If there are
 * too many for one write, it writes their uids to the key "left". */
static enum store_status commit_view(const struct agreement *a, const struct room *room,
                                     const struct view *next, const char *text,
                                     bool without_options) {
    char key[STORE_WRITES_MOST][KEY_BYTES];
    struct store_write write[STORE_WRITES_MOST];
    int writes = 1;
    const size_t most = (size_t)room->view.members + (size_t)room->members;
    char *left = calloc(most + 1, sizeof " " + sizeof room->registered->uid), *end = left;
    if (!left) return STORE_AWAY;
    write[0] = (struct store_write){key_of(a, "view", "", key[0]), text, 0};
    if (without_options) {
        write[1] = (struct store_write){key_of(a, "options", "", key[1]), NULL, 0};
        writes++;
    }
    for (int r = 0; r < room->view.members; r++) {
        const char *uid = room->view.member[r].uid;
        if (view_rank_of(next, uid) >= 0) continue;
        if (writes == STORE_WRITES_MOST - 1) {
            end += sprintf(end, " %s ", uid);
            continue;
        }
        write[writes] = (struct store_write){key_of(a, MEMBER, uid, key[writes]), NULL, 0};
        writes++;
    }
    for (int i = 0; i < room->members; i++) /* by earlier views, and still registered */
        if (was_left_out(room, room->registered[i].uid))
            end += sprintf(end, " %s ", room->registered[i].uid);
    if (end > left || room->left) {
        const char *value = end > left ? left : NULL;
        write[writes] = (struct store_write){key_of(a, "left", "", key[writes]), value, 0};
        writes++;
    }
    const enum store_status status =
        a->set.store->commit(a->set.store, key[0], room->modified, write, writes);
    free(left);
    return status;
}

static enum agreement_result commit(struct agreement *a, const struct room *room,
                                    const struct view *next, double now) {
    char *text = view_to_json(next);
    if (!text) return AGREEMENT_FAILED;
    const enum store_status status = commit_view(a, room, next, text, false);
    free(text);
    if (status == STORE_DONE) return take(a, next, now);
    return status == STORE_AWAY ? AGREEMENT_AWAY : AGREEMENT_WAIT; /* another proposal won */
}

/* Whether rank 0 is there and can end the view. */
static bool root_lives(const struct agreement *a, const struct room *room) {
    enum reached reached = REACHED_NOT;
    if (!registered(room, a->view.member[0].uid)) return false;
    a->set.reach(a->set.context, a->view.member, 1, &reached);
    return reached != REACHED_REFUSED;
}

enum agreement_result agreement_dissolve(struct agreement *a) {
    struct room room;
    struct view none = {a->view.epoch + 1, 0, NULL, -1};
    enum agreement_result result = look(a, &room);
    if (result != AGREEMENT_WAIT) return result;
    if (room.view.epoch != a->view.epoch) {
        result = AGREEMENT_STOPPED;
    } else if (a->view.self == 0 || !root_lives(a, &room)) {
        char *text = view_to_json(&none);
        const enum store_status status =
            text ? commit_view(a, &room, &none, text, true) : STORE_AWAY;
        result = status == STORE_AWAY ? AGREEMENT_AWAY : AGREEMENT_STOPPED;
        free(text);
    }
    room_clear(&room);
    return result;
}

void agreement_find_ended(const struct agreement *a, bool *ended) {
    const size_t members = (size_t)a->view.members;
    struct member *asked = calloc(members, sizeof *asked);
    enum reached *reached = (enum reached *)calloc(members, sizeof *reached);
    int count = 0;
    if (asked && reached) { /* otherwise no member is found, and the caller waits longer */
        for (int r = 0; r < a->view.members; r++)
            if (!ended[r] && r != a->view.self) asked[count++] = a->view.member[r];
        a->set.reach(a->set.context, asked, count, reached);
        for (int r = 0, i = 0; i < count; r++)
            if (!ended[r] && r != a->view.self) ended[r] = reached[i++] == REACHED_REFUSED;
    }
    free(asked);
    free(reached);
}

static bool knows_who(const struct agreement *a) {
    for (int r = 0; a->leaving.missing && r < a->view.members; r++)
        if (a->leaving.missing[r]) return true;
    return !a->leaving.missing;
}

/* Proposes the view after the room's, without missing[] and with the processes that wait, if there
 * are at least `least` of these. */
static enum agreement_result propose(struct agreement *a, const struct room *room,
                                     const bool *missing, int least, double now) {
    int joiners;
    struct view next;
    enum agreement_result result = AGREEMENT_WAIT;
    struct member *joiner = waiting(a, room, &joiners);
    if (!joiner) return AGREEMENT_FAILED;
    if (a->state == AGREEMENT_LEAVING && !a->leaving.takes_in) joiners = 0;
    if (joiners >= least) {
        if (view_next(&room->view, missing, joiner, joiners, &next))
            result = AGREEMENT_FAILED;
        else
            result = commit(a, room, &next, now);
        view_clear(&next);
    }
    free(joiner);
    return result;
}

/* ---- leaving a view ---- */

int agreement_leave(struct agreement *a, double now, const bool *missing, bool takes_in) {
    free(a->leaving.missing);
    a->leaving.missing = NULL;
    if (missing) {
        a->leaving.missing = calloc((size_t)a->view.members, sizeof *a->leaving.missing);
        if (!a->leaving.missing) return log_out_of_memory("missing members", a->view.members);
        for (int r = 0; r < a->view.members; r++)
            a->leaving.missing[r] = missing[r] && r != a->view.self;
    }
    a->state = AGREEMENT_LEAVING;
    a->leaving.takes_in = takes_in;
    a->leaving.patience = -1;
    a->leaving.began = now;
    return 0;
}

/* A newer view is without this process, which will register again as a new member. If it was left
 * out soon after it came, it pauses first: otherwise a link that loses all packets in one direction
 * would change views again and again. */
static void left_out(struct agreement *a, double now) {
    const bool soon = now - a->lease.taken < AGREEMENT_SETTLED;
    a->lease.pause = !soon ? 0 : a->lease.pause < 1 ? 1 : 2 * a->lease.pause;
    if (a->lease.pause > AGREEMENT_PAUSE_MOST) a->lease.pause = AGREEMENT_PAUSE_MOST;
    a->lease.resume = now + a->lease.pause;
    a->state = AGREEMENT_OUTSIDE;
    a->lease.id = 0;
    a->self.uid[0] = 0;
}

/* Sets how long this process waits before it proposes a view. Hosts are asked whether members have
 * ended if nobody is known to be missing, or if that makes the wait shorter. */
static int find_patience(struct agreement *a) {
    const struct view *v = &a->view;
    bool *missing = a->leaving.missing;
    bool *ended = calloc((size_t)v->members, sizeof *ended);
    if (!ended) return log_out_of_memory("ended members", v->members);
    const bool knows = knows_who(a);
    if (!knows || view_patience(v, missing, missing) < view_patience(v, missing, ended)) {
        for (int r = 0; r < v->members; r++) ended[r] = knows && !missing[r]; /* is not asked */
        agreement_find_ended(a, ended);
        for (int r = 0; r < v->members; r++) {
            missing[r] |= ended[r] && !knows;
            ended[r] &= missing[r];
        }
    }
    a->leaving.patience = view_patience(v, missing, ended);
    free(ended);
    return 0;
}

static enum agreement_result step_leaving(struct agreement *a, const struct room *room,
                                          double now) {
    if (room->view.epoch < a->view.epoch) {
        log_error("the store has %s of run %s, but this rank is in view %lld: the store lost data; "
                  "start the run again under another name, from its last checkpoint",
                  room->view.epoch ? "an older view" : "no view", a->set.run,
                  (long long)a->view.epoch);
        return AGREEMENT_FAILED;
    }
    if (room->view.epoch > a->view.epoch) {
        if (room->view.self >= 0) return take(a, &room->view, now);
        left_out(a, now);
        return AGREEMENT_WAIT;
    }
    if (a->leaving.patience < 0 && find_patience(a)) return AGREEMENT_FAILED;
    if (now < a->leaving.began + a->leaving.patience) return AGREEMENT_WAIT;
    /* If several ranks die at once, this rank may have noticed only one of them. */
    if (a->leaving.missing) agreement_find_ended(a, a->leaving.missing);
    return propose(a, room, a->leaving.missing, 0, now);
}

/* ---- coming from outside ---- */

static enum agreement_result see_obstacle(struct agreement *a, const struct room *room,
                                          enum agreement_obstacle obstacle) {
    a->obstacle = obstacle;
    a->registered = room->members;
    view_clear(&a->obstacle_view);
    return view_copy(&room->view, &a->obstacle_view) ? AGREEMENT_FAILED : AGREEMENT_WAIT;
}

/* With `anew` the user asserts that the members of the view that this process found are dead: their
 * registrations have ended, or end soon. This does not hold for a later view, or for members that
 * stay registered for longer. */
static bool may_take_over(const struct agreement *a, const struct room *room) {
    return a->set.anew && room->view.epoch == a->found &&
           a->orphaned < a->found_at + 2 * AGREEMENT_LEASE;
}

static enum agreement_result step_outside(struct agreement *a, const struct room *room,
                                          double now) {
    if (room->view.self >= 0) return take(a, &room->view, now);
    if (a->found < 0) a->found = room->view.epoch, a->found_at = now;
    if (!registered(room, a->self.uid)) {
        /* The uid before this one may have been taken in and left out in the meantime. */
        a->set.draw(a->set.context, a->self.uid);
        enroll(a, room);
        return AGREEMENT_WAIT;
    }
    if (!room->view.members) { /* no view yet, or it was dissolved */
        /* The process that registered first proposes the first view. */
        const bool first = !strcmp(room->registered[0].uid, a->self.uid);
        const enum agreement_result seen = see_obstacle(a, room, AGREEMENT_FEW);
        if (seen == AGREEMENT_FAILED || !first || room->members < a->set.first_ranks) return seen;
        return propose(a, room, NULL, a->set.first_ranks, now);
    }
    if (!is_orphaned(room)) {
        a->orphaned = -1;
        return see_obstacle(a, room, AGREEMENT_TAKING);
    }
    if (a->orphaned < 0) a->orphaned = now;
    if (!may_take_over(a, room)) return see_obstacle(a, room, AGREEMENT_ORPHANED);
    if (room->members < a->set.first_ranks && now < a->orphaned + AGREEMENT_ANEW_PATIENCE)
        return see_obstacle(a, room, AGREEMENT_FEW);
    bool *all = malloc((size_t)room->view.members);
    if (!all) {
        log_out_of_memory("missing members", room->view.members);
        return AGREEMENT_FAILED;
    }
    memset(all, true, (size_t)room->view.members);
    const enum agreement_result result = propose(a, room, all, 1, now);
    free(all);
    return result;
}

enum agreement_result agreement_step(struct agreement *a, double now) {
    struct room room;
    enum agreement_result result = look(a, &room);
    if (result != AGREEMENT_WAIT) return result;
    const bool dissolved = !room.view.members && room.view.epoch > a->view.epoch;
    if (room.complete)
        result = AGREEMENT_COMPLETE;
    else if (dissolved && a->view.epoch > 0)
        result = AGREEMENT_STOPPED;
    else if (a->state == AGREEMENT_OUTSIDE && now < a->lease.resume)
        result = AGREEMENT_WAIT;
    else if (a->state == AGREEMENT_OUTSIDE)
        result = step_outside(a, &room, now);
    else
        result = step_leaving(a, &room, now);
    room_clear(&room);
    return result;
}

/* ---- watching ---- */

/* Whether there is a newer view; or, on rank 0, which proposes first, whether a process waits that
 * it can reach. */
static bool has_changed(const struct agreement *a, const struct room *room) {
    if (room->view.epoch > a->view.epoch) return true;
    if (a->view.self != 0) return false;
    int joiners;
    struct member *joiner = waiting(a, room, &joiners);
    free(joiner);
    return joiners > 0;
}

void agreement_hasten(struct agreement *a) {
    a->look = a->soonest;
}

/* Seconds until a member looks again at keys that another program has overwritten. */
static const double SPOILED = 60;

void agreement_watch(struct agreement *a, double now) {
    struct room room;
    if (a->lease.id && a->set.store->keep(a->set.store, a->lease.id) == STORE_CHANGED)
        a->lease.id = 0;
    if (a->state != AGREEMENT_INSIDE || now < a->look) return;
    /* All members of a large view together ask at most 64 times a second. */
    a->look = now + (a->view.members > 64 ? a->view.members / 64.0 : 1) - 0.1;
    const enum agreement_result found = look(a, &room);
    /* A line was printed. A registration that is heard late does not make it look sooner, either. */
    if (found == AGREEMENT_FAILED) a->look = a->soonest = now + SPOILED;
    if (found != AGREEMENT_WAIT) return;
    if (!a->changed) a->changed = has_changed(a, &room);
    if (room.view.self >= 0 && room.view.epoch >= a->view.epoch && !registered(&room, a->self.uid))
        enroll(a, &room);
    room_clear(&room);
}
