/* membership_hosts.h — the processes of simulated histories, on hosts with a network between them.
 * Each agrees on views with the others (llmc/membership/agreement.h, unchanged), through a store in
 * memory (membership_store.h), and listens to the members of its view.
 *
 * The test that includes this, once and after cmocka.h, moves the time (run_until), makes the
 * faults, and checks what must hold (check_sides). While a process waits for the store, for a
 * moment or for many seconds, all others go on. So anything may happen between its reading and
 * writing.
 */
#ifndef MEMBERSHIP_HOSTS_H
#define MEMBERSHIP_HOSTS_H

#include "llmc/membership/agreement.h"
#include "llmc/util/random.h"
#include "test/llmc/membership/membership_store.h"

enum { FEW = 6, MANY = 64 }; /* processes of a history, at most */
enum { SLOTS = 1024, MEMBERS = 2048, EPOCHS = 4096, UIDS = 16384 };

static const double SILENCE = 1, GRACE = 1; /* seconds until a member is missing; more at first */

struct world;

/* A process, or none, at one of the world's places. */
struct process {
    struct store store; /* first: a connection is a process */
    struct world *world;
    int slot;
    bool alive, busy, doomed; /* doomed: killed while it was busy */
    bool stops;               /* ends the view: it trains no more */
    double frozen;            /* until then it does nothing and is not heard */
    double tick, watch;       /* when it acts next */
    double heard[MEMBERS];    /* by rank of its view */
    struct agreement a;
};

struct world {
    int number, slots, first_ranks;
    struct memory memory; /* its `now` is the time of all */
    struct process process[SLOTS];
    bool hears[SLOTS][SLOTS]; /* [who][whom] */
    bool asks[SLOTS];         /* reaches the store */
    bool up, faulty, done;
    bool endless;                 /* goes on when all are in one view */
    double back;                  /* when the store comes back */
    double fault;                 /* when the next fault comes */
    struct view view[EPOCHS];     /* all that were written */
    int64_t epoch;                /* of the last one */
    long checked[EPOCHS], checks; /* check_sides */
    char left[UIDS][24];          /* who was left out */
    int lefts, drawn;
};

/* That histories are not dull. */
static struct {
    long views, lefts, anews, late, stalls, conflicts, alone, stops, follows;
    long lists, commits, keeps; /* requests to the store */
} count;

static bool telling;

static double now(const struct world *w) {
    return w->memory.now;
}

/* The chances of a history are a function of its number. */
static uint64_t chance_key, chance_index;

static uint32_t random_below(uint32_t n) {
    return (uint32_t)(random_bits(chance_key, chance_index++) % n);
}

static double uniform(double most) {
    return most * random_uniform(chance_key, chance_index++);
}

static bool chance(double p) {
    return uniform(1) < p;
}

__attribute__((format(printf, 2, 3))) static void tell(const struct world *w, const char *format,
                                                       ...) {
    if (!telling) return;
    char text[200];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    print_message("%7.2f  %s\n", now(w), text);
}

#define check_that(w, holds, ...)                                                                  \
    do {                                                                                           \
        if (!(holds)) {                                                                            \
            print_error("history %d, %.2f s: ", (w)->number, now(w));                              \
            print_error(__VA_ARGS__);                                                              \
            print_error("\n");                                                                     \
            fail();                                                                                \
        }                                                                                          \
    } while (0)

/* The process that is this member, NULL: it is no more, or is registered anew. */
static struct process *process_of(struct world *w, const struct member *m) {
    struct process *p = &w->process[m->pid];
    return p->alive && !strcmp(p->a.self.uid, m->uid) ? p : NULL;
}

static bool same_members(const struct view *a, const struct view *b) {
    bool same = a->members == b->members;
    for (int r = 0; same && r < a->members; r++)
        same = !strcmp(a->member[r].uid, b->member[r].uid) &&
               a->member[r].joined == b->member[r].joined;
    return same;
}

static void run_until(struct world *w, double end);
static void check_sides(struct world *w);

/* ---- the store, as a process reaches it ---- */

/* The process waits, and all others go on. */
static void stall(struct process *p, double seconds) {
    count.stalls++;
    run_until(p->world, now(p->world) + seconds);
}

/* A request or an answer is on its way. Whether it arrives. */
static bool travels(struct process *p) {
    struct world *w = p->world;
    /* Others act within this one's wait, so that where many wait, none ends. */
    const double share = w->slots > FEW ? (double)FEW / w->slots : 1;
    if (chance(0.3 * share))
        stall(p, uniform(0.1));
    else if (w->faulty && chance(0.02 * share))
        stall(p, uniform(12));
    return !p->doomed && w->up && w->asks[p->slot] && !(w->faulty && chance(0.02));
}

static enum store_status answer(struct process *p, enum store_status status) {
    const bool arrives = travels(p);
    snprintf(p->store.why, sizeof p->store.why, "made up");
    return arrives ? status : STORE_AWAY;
}

static enum store_status store_list(struct store *s, const char *prefix,
                                    struct store_entries *out) {
    struct process *p = (struct process *)s;
    *out = (struct store_entries){0};
    count.lists++;
    if (!travels(p)) return STORE_AWAY;
    memory_list(&p->world->memory, prefix, out);
    const enum store_status status = answer(p, STORE_DONE);
    if (status != STORE_DONE) store_entries_clear(out);
    return status;
}

static enum store_status store_commit(struct store *s, const char *guard, int64_t modified,
                                      const struct store_write *write, int writes) {
    struct process *p = (struct process *)s;
    struct world *w = p->world;
    count.commits++;
    if (w->faulty && w->up && w->asks[p->slot] && chance(0.05)) {
        memory_commit_late(&w->memory, now(w) + uniform(10), guard, modified, write, writes);
        return answer(p, STORE_AWAY);
    }
    if (!travels(p)) return STORE_AWAY;
    if (w->faulty && chance(0.1)) /* it was sent twice */
        memory_commit_late(&w->memory, now(w) + uniform(10), guard, modified, write, writes);
    const enum store_status status = memory_commit(&w->memory, guard, modified, write, writes);
    count.conflicts += status == STORE_CHANGED;
    return answer(p, status);
}

static enum store_status store_grant(struct store *s, int seconds, int64_t *lease) {
    struct process *p = (struct process *)s;
    if (!travels(p)) return STORE_AWAY;
    *lease = memory_grant(&p->world->memory, seconds);
    return answer(p, STORE_DONE);
}

static enum store_status store_keep(struct store *s, int64_t lease) {
    struct process *p = (struct process *)s;
    count.keeps++;
    if (!travels(p)) return STORE_AWAY;
    return answer(p, memory_keep(&p->world->memory, lease));
}

static void draw(void *context, char uid[24]) {
    struct process *p = (struct process *)context;
    snprintf(uid, 24, "%d.%d", p->slot, p->world->drawn++);
}

/* A connection takes both directions. A frozen process answers: its kernel does; and so does the
 * kernel of a dead one. An answer that does not come is waited for. */
static void reach(void *context, const struct member *m, int members, enum reached *reached) {
    struct process *p = (struct process *)context;
    const struct world *w = p->world;
    bool all = true;
    for (int i = 0; i < members; i++) {
        reached[i] = !w->hears[p->slot][m[i].pid] || !w->hears[m[i].pid][p->slot] ? REACHED_NOT
                     : w->process[m[i].pid].alive                                 ? REACHED
                                                                                  : REACHED_REFUSED;
        all &= reached[i] != REACHED_NOT;
    }
    if (!all) stall(p, 0.5);
}

/* ---- a process ---- */

static void begin(struct world *w, int slot) {
    struct process *p = &w->process[slot];
    if (p->alive || p->busy) return;
    *p = (struct process){.store = {store_list, store_commit, store_grant, store_keep, NULL, ""},
                          .world = w,
                          .slot = slot,
                          .alive = true,
                          .tick = now(w) + uniform(1),
                          .watch = now(w) + uniform(1)};
    struct agreement_settings set = {.store = &p->store,
                                     .run = "run",
                                     .self = {.host = "host", .pid = slot},
                                     .first_ranks = w->first_ranks,
                                     .draw = draw,
                                     .reach = reach,
                                     .context = p};
    snprintf(set.self.address, sizeof set.self.address, "10.0.0.%d:1", slot);
    agreement_init(&p->a, &set);
    tell(w, "process %d begins", slot);
}

static void end(struct process *p) {
    if (!p->alive) return;
    p->alive = false;
    p->doomed = p->busy;
    if (!p->busy) agreement_clear(&p->a);
    tell(p->world, "process %d is killed", p->slot);
}

/* Trains: listens to the members of its view, and leaves it when one is silent. */
static void train(struct process *p) {
    struct world *w = p->world;
    const struct view *v = &p->a.view;
    bool missing[MEMBERS] = {0}, any = false;
    for (int r = 0; r < v->members; r++) {
        const struct process *q = process_of(w, &v->member[r]);
        if (r == v->self || (q && q->a.state == AGREEMENT_INSIDE && q->frozen <= now(w) &&
                             q->a.view.epoch == v->epoch && w->hears[p->slot][q->slot]))
            p->heard[r] = fmax(p->heard[r], now(w));
        missing[r] = now(w) > p->heard[r] + SILENCE;
        any |= missing[r];
    }
    if (any && chance(0.1)) memset(missing, 0, sizeof missing); /* does not know who */
    if (any || (p->a.changed && chance(0.7)))
        assert_int_equal(agreement_leave(&p->a, now(w), any ? missing : NULL, true), 0);
}

static void seek(struct process *p) {
    struct world *w = p->world;
    const int64_t epoch = p->a.view.epoch;
    const enum agreement_state before = p->a.state;
    const enum agreement_result result = agreement_step(&p->a, now(w));
    if (before == AGREEMENT_LEAVING && p->a.state == AGREEMENT_OUTSIDE) count.lefts++;
    check_that(w,
               p->doomed || result == AGREEMENT_WAIT || result == AGREEMENT_AWAY ||
                   result == AGREEMENT_VIEW || result == AGREEMENT_STOPPED,
               "process %d: result %d", p->slot, result);
    if (result == AGREEMENT_STOPPED) { /* the others stopped while it was left out */
        check_that(w, epoch > 0, "process %d stops, and was in no view", p->slot);
        count.follows++;
        end(p);
    }
    if (result != AGREEMENT_VIEW) return;
    const struct view *v = &p->a.view;
    tell(w, "process %d (%s) is rank %d of view %lld", p->slot, p->a.self.uid, v->self,
         (long long)v->epoch);
    check_that(w, v->epoch > epoch, "view %lld after %lld", (long long)v->epoch, (long long)epoch);
    check_that(w, v->epoch <= w->epoch && same_members(v, &w->view[v->epoch]),
               "process %d has a view %lld that was not written", p->slot, (long long)v->epoch);
    check_that(w, v->self >= 0 && !strcmp(v->member[v->self].uid, p->a.self.uid), "wrong rank");
    for (int r = 0; r < v->members; r++) p->heard[r] = now(w) + GRACE;
}

static void act(struct process *p) {
    struct world *w = p->world;
    p->busy = true;
    if (p->watch <= p->tick) {
        p->watch = now(w) + 1;
        agreement_watch(&p->a, now(w));
    } else {
        const double pause = p->a.state == AGREEMENT_OUTSIDE ? 0.5 : 0.15;
        p->tick = now(w) + pause + uniform(pause);
        if (p->a.state == AGREEMENT_INSIDE)
            train(p);
        else
            seek(p);
    }
    p->busy = false;
    if (p->doomed) agreement_clear(&p->a);
    check_sides(w);
}

#endif
