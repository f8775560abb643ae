/* agenda.c — chooses the peers that a turn of the loop looks at, so that the others cost nothing.
 *
 * A turn looks at the peers from which something has come, and at those for which something is due.
 * They are found with a heap that holds each peer once, ordered by time (Cormen et al.,
 * Introduction to Algorithms, chapter 6). The caller's own acts, such as the begin of a phase,
 * concern all peers, but a step has only few of them.
 *
 * Conditions on all peers, for example that a phase is over, are counts of peers. After each look
 * at a peer, flags store which conditions are true for it, and the counts follow the changes. So a
 * step of N ranks costs a rank O(N log N), however many turns it takes.
 */
#include "lossynet/transport/peer/peer.h"

#include <math.h>

/* ---- the heap ---- */

static bool comes_before(const struct ln_agenda *a, int p, int q) {
    return a->due[p] < a->due[q];
}

static void put(struct ln_agenda *a, int at, int peer) {
    a->heap[at] = peer;
    a->place[peer] = at;
}

static void move_up(struct ln_agenda *a, int at) {
    const int peer = a->heap[at];
    for (; at > 0 && comes_before(a, peer, a->heap[(at - 1) / 2]); at = (at - 1) / 2)
        put(a, at, a->heap[(at - 1) / 2]);
    put(a, at, peer);
}

static void move_down(struct ln_agenda *a, int at) {
    const int peer = a->heap[at];
    for (int child; (child = 2 * at + 1) < a->peers; at = child) {
        child += child + 1 < a->peers && comes_before(a, a->heap[child + 1], a->heap[child]);
        if (!comes_before(a, a->heap[child], peer)) break;
        put(a, at, a->heap[child]);
    }
    put(a, at, peer);
}

void ln_agenda_set(struct ln_transport *t, int peer, double due) {
    struct ln_agenda *a = &t->agenda;
    const bool sooner = due < a->due[peer];
    a->due[peer] = due;
    if (sooner)
        move_up(a, a->place[peer]);
    else
        move_down(a, a->place[peer]);
}

/* ---- open and close ---- */

bool ln_agenda_open(struct ln_agenda *a, const struct lossynet_world *world) {
    struct ln_pool *pool = &a->pool;
    const size_t ranks = (size_t)world->ranks;
    POOL_TAKE(pool, a->heap, ranks);
    POOL_TAKE(pool, a->place, ranks);
    POOL_TAKE(pool, a->due, ranks);
    POOL_TAKE(pool, a->flags, ranks);
    POOL_TAKE(pool, a->sends, ranks);
    if (pool->out_of_memory) return false;
    /* Each rank begins with another peer, so that not all ranks send to the same one at once. */
    for (int i = 1; i < world->ranks; i++) put(a, i - 1, (world->rank + i) % world->ranks);
    a->peers = world->ranks - 1;
    a->place[world->rank] = -1;
    return true;
}

size_t ln_agenda_memory(int ranks) {
    const struct ln_agenda *a = NULL;
    return (size_t)ranks * (sizeof *a->heap + sizeof *a->place + sizeof *a->due + sizeof *a->flags +
                            sizeof *a->sends);
}

/* ---- the next peer ---- */

void ln_agenda_soon(struct ln_transport *t, int peer) {
    if (t->agenda.due[peer] > 0) ln_agenda_set(t, peer, 0);
}

void ln_agenda_all(struct ln_transport *t) {
    struct ln_agenda *a = &t->agenda;
    for (int i = 1; i < t->world.ranks; i++) {
        const int peer = (t->world.rank + i) % t->world.ranks;
        a->due[peer] = 0;
        put(a, i - 1, peer);
        ln_agenda_count(t, peer);
    }
}

int ln_agenda_next(const struct ln_transport *t, double now) {
    const struct ln_agenda *a = &t->agenda;
    return a->peers > 0 && a->due[a->heap[0]] <= now ? a->heap[0] : -1;
}

double ln_agenda_due(const struct ln_transport *t) {
    const struct ln_agenda *a = &t->agenda;
    return a->peers > 0 ? a->due[a->heap[0]] : HUGE_VAL;
}

/* ---- counts ---- */

static uint32_t flag(enum ln_flag which, bool set) {
    return (uint32_t)set << which;
}

static uint32_t flags_of(const struct ln_transport *t, int peer) {
    const struct ln_peer *p = &t->peers[peer];
    const bool late = p->lateness.late, away = ln_late_is_away(t, peer);
    uint32_t flags = flag(LOSSYNET_IDLES, p->rx[LOSSYNET_GRADIENT].idle) |
                     flag(LOSSYNET_EXPECTED, ln_needs_or_asks(t, peer)) |
                     flag(LOSSYNET_SILENT, ln_detour_is_silent(p)) |
                     flag(LOSSYNET_BLOCKED, p->flow.blocked);
    for (int kind = 0; kind < 2; kind++) {
        const struct ln_phase_state *phase = &t->phase[kind];
        const bool waits = p->rx[kind].state != RX_OVER;
        const bool idles = kind == LOSSYNET_GRADIENT && p->rx[kind].idle;
        const bool leaves = phase->begun > 0 && !p->tx[kind].complete;
        const bool excused = away && (int32_t)(p->control.finished[kind] - phase->opened) < 0;
        flags |= flag(LOSSYNET_RECEIVES + kind, waits) |
                 flag(LOSSYNET_IS_DONE + kind, !waits && !idles) |
                 flag(LOSSYNET_IN_TIME + kind, waits && !excused && !late) |
                 flag(LOSSYNET_LATE_FOR + kind, waits && !excused && late) |
                 flag(LOSSYNET_SENDS + kind, leaves) |
                 flag(LOSSYNET_STUCK + kind, leaves && p->flow.blocked && (late || away)) |
                 flag(LOSSYNET_UNCONFIRMED + kind, p->tx[kind].done_waits);
    }
    for (int which = 0; which < LOSSYNET_GATHER_KINDS; which++) {
        const struct ln_message *m = &p->message[which];
        const bool done = ln_needs_no_exchange(t, peer, which);
        const bool elsewhere = away && (int32_t)(m->in_gather - t->gathers[which].begun) < 0;
        flags |= flag(LOSSYNET_LACKS + which, m->got_before != m->expects) |
                 flag(LOSSYNET_EXCHANGES + which, !done) |
                 flag(LOSSYNET_EXCHANGES_IN_TIME + which, !done && !elsewhere && !late) |
                 flag(LOSSYNET_EXCHANGES_LATE + which, !done && !elsewhere && late);
    }
    return flags;
}

void ln_agenda_count(struct ln_transport *t, int peer) {
    struct ln_agenda *a = &t->agenda;
    const uint32_t flags = flags_of(t, peer);
    for (uint32_t changed = flags ^ a->flags[peer]; changed; changed &= changed - 1) {
        const int which = __builtin_ctz(changed);
        a->count[which] += flags >> which & 1 ? 1 : -1;
    }
    a->flags[peer] = flags;
}
