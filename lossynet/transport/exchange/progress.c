/* progress.c — the loop that drives the transport, and the two threads that run it in turn: see
 * state.h. One turn of the loop receives what has come, answers it, sends what may leave, and
 * repeats what is due.
 */
#include "lossynet/transport/exchange/exchange.h"

#include <inttypes.h>
#include <math.h>
#include <signal.h>

/* receive_queue counts datagrams of full size: at most QUEUE_MOST times as many small ones fit. */
enum { TURNS = 8, QUEUE_MOST = 8 };

/* Times, in seconds. */
static const double IDLE = 1.0;        /* longest sleep; a datagram or a caller ends it */
static const double TICK = 1e-4;       /* longest sleep while we need something of a few peers, */
static const double TICK_MAX = 0.01;   /* or of many peers that do not answer */
static const double TICK_SHARE = 0.1;  /* or so much of the time since the last datagram came */
static const double LOOK = 0.02;       /* longest time between looks at a peer that we need */
static const double LOOK_LEAST = 2e-5; /* shortest time between looks, unless something comes */
/* Times, in peer time-outs. */
static const double OWING = 2;               /* longest wait for the next fragment of a message */
static const double MISFIT = 0.1;            /* a part of another length, until we say so */
static const double SUSPECTED = 0.25;        /* silence of a peer after which we ask all peers */
static const double SUSPECTED_PAUSE = 0.015; /* pause between such questions */
static const double AWAY = 0.5;              /* a turn so much too late: this rank was stopped */
/* Times, in seconds. */
static const double STOPPED = 0.5; /* a turn so much too late: not just a busy machine */
static const double LEAVING = 1.0; /* longest wait until peers know that we leave */
static const double ABORTED = 1.0; /* a peer that sent ABORT or LEAVE is gone if silent so long, */
static const double REFUSED = 0.2; /* a peer has ended if its host refuses datagrams meanwhile, */
static const double LEFT = 0.1;    /* and all that a peer sent before it left has come */

/* ---- a turn ---- */

/* Notes how far the queue was read. What came before `marked` has been read when the queue is
 * empty, or when as many datagrams were read since then as it holds. So a flood that keeps the queue
 * full does not hide that a peer is silent. */
static void note_read(struct ln_transport *t, int n) {
    struct ln_receiver *r = &t->receiver;
    const int most = QUEUE_MOST * t->link->features.receive_queue;
    r->read += n;
    if (n > 0 && r->read < most) return;
    r->empty = n > 0 ? r->marked : r->now;
    r->marked = r->now;
    r->read = 0;
}

/* Notes that this rank was stopped itself (a debugger, a suspended host). Then the others may have
 * been stopped with it, and their silence begins anew. What was answered meanwhile took no round trip. */
static void note_return(struct ln_transport *t) {
    if (t->receiver.now > t->receiver.next_turn + AWAY * t->session.peer_timeout)
        t->receiver.back = t->receiver.now;
    if (t->receiver.now > t->receiver.next_turn + STOPPED) t->receiver.resumed = t->receiver.now;
    t->receiver.next_turn = t->receiver.now;
}

/* Handles the datagrams that have come. Returns whether there were any. */
static bool receive(struct ln_transport *t) {
    struct ln_arrival arrivals[LOSSYNET_BATCH];
    bool any = false;
    for (int turn = 0; turn < TURNS; turn++) {
        t->receiver.now = ln_now();
        if (turn == 0) note_return(t);
        int n = t->link->receive(t->link, arrivals);
        if (n < 0 && !t->failed) t->failed = LOSSYNET_LINK;
        if (n < 0) return any;
        note_read(t, n);
        if (n > 0) t->receiver.news = t->receiver.now;
        for (int i = 0; i < n; i++) {
            t->session.path = arrivals[i].path;
            ln_dispatch(t, arrivals[i].peer, arrivals[i].bytes, arrivals[i].count);
        }
        any |= n > 0;
        if (n == 0) break;
    }
    for (int peer; t->link->refused && (peer = t->link->refused(t->link)) >= 0;) {
        t->peers[peer].live.refused = t->receiver.now;
        ln_agenda_soon(t, peer);
    }
    return any;
}

void ln_progress_push(struct ln_transport *t, double now) {
    for (int distance = 1; distance < t->world.ranks; distance++) {
        int r = (t->world.rank + distance) % t->world.ranks;
        ln_message_push(t, r, now);
        ln_control_push(t, r, now);
    }
}

static void suspect(struct ln_transport *t, struct ln_liveness *live, bool silent) {
    if (silent == live->suspected) return;
    live->suspected = silent;
    t->receiver.suspects += silent ? 1 : -1;
    if (silent && t->receiver.suspects == 1) ln_agenda_all(t);
}

/* Makes the transport fail if a peer that this rank needs is dead. */
static void judge(struct ln_transport *t, int peer, double silence) {
    const struct ln_liveness *live = &t->peers[peer].live;
    const bool refused = silence > REFUSED && ln_timer_is_refused(t, peer);
    const bool leaves = live->leaving > 0 && (silence > ABORTED || refused);
    if (leaves || (live->left && silence > LEFT))
        ln_session_fail(t, peer, "has left the run");
    else if (live->aborted > 0 && silence > ABORTED)
        ln_control_fail_with(t, peer);
    else if (refused)
        ln_session_fail(t, peer, "has ended: its host refuses datagrams for it");
    else if (silence > t->session.peer_timeout)
        ln_session_fail(t, peer,
                        "was not heard for %.1f s: expected an answer within %g s "
                        "(peer time-out)",
                        silence, t->session.peer_timeout);
    else if (ln_message_owed(t, peer) > OWING * t->session.peer_timeout)
        ln_session_fail(t, peer,
                        "answers, but sends nothing of a message that it owes: expected the "
                        "rest of it within %g s",
                        OWING * t->session.peer_timeout);
}

/* A peer that we need may wait in a gather that we have not begun, or take part in ours with another length.
 * If that lasts, both ranks would wait for ever: the caller's wait ends. The comm stays usable for a gather,
 * in which the ranks may tell each other where they are. */
static void find_elsewhere(struct ln_transport *t, int peer, bool needed, double now) {
    struct ln_liveness *live = &t->peers[peer].live;
    const struct ln_gathers *gather = &t->gathers[LOSSYNET_GATHER];
    const struct ln_message *m = &t->peers[peer].message[LOSSYNET_GATHER];
    const int ahead_by = (int32_t)(t->peers[peer].control.gathers - gather->begun);
    const bool ahead = ahead_by > 0;
    /* A peer that has not begun the gather did not send that part, whatever its header says. */
    const bool misfits =
        gather->open && ahead_by >= 0 && live->elsewhere.misfits && m->got_before < m->expects;
    if (!needed || !(ahead || misfits) || !t->threads.waits || t->deadline.on) {
        live->elsewhere.since = 0;
        return;
    }
    if (live->elsewhere.since == 0) live->elsewhere.since = now;
    const double lasts = (misfits ? MISFIT : 1) * t->session.peer_timeout;
    if (now - live->elsewhere.since <= lasts || t->threads.elsewhere) return;
    t->threads.elsewhere = true;
    ln_log("rank %d, step %" PRIu64
           ": rank %d has waited in another call for %g s: expected all ranks "
           "to make the same collective calls in the same order",
           t->world.rank, ln_session_step(t), peer, lasts);
}

/* Asks a peer for a sign of life, or for what lets us send. Returns when to ask again. */
static double ask(struct ln_transport *t, int peer, double now) {
    struct ln_peer *p = &t->peers[peer];
    struct ln_liveness *live = &p->live;
    const bool needed = ln_needs(t, peer), blocked = p->flow.blocked;
    const double silence = ln_timer_silence(t, peer, live->asked);
    const bool gone = live->leaving > 0 || live->aborted > 0;
    suspect(t, live,
            !gone && (needed || live->suspected) && silence > SUSPECTED * t->session.peer_timeout);
    if (needed) judge(t, peer, silence);
    /* The peer repeats what was lost on its way to us, except for what lets us send. So we ask
     * sooner when we are blocked. */
    double pause = blocked ? ln_timer_first(p) : ln_timer_longest(p);
    if (!needed) pause = fmax(pause, SUSPECTED_PAUSE * t->session.peer_timeout);
    bool moves = blocked && now - p->flow.credited < pause;
    if (moves || blocked != live->probe_sends)
        live->probe =
            (struct ln_timer){.since = moves ? p->flow.credited + pause : now, .pause = pause};
    else if (ln_timer_is_due(t, p, &live->probe, now))
        ln_control_send(t, peer, WIRE_PROBE, 0, 0, 0);
    live->probe_sends = blocked;
    return ln_timer_due(t, &live->probe, now);
}

/* Notes whether we need something of a peer, and asks it if so. Returns when to look again. */
static double watch(struct ln_transport *t, int peer, double now) {
    struct ln_peer *p = &t->peers[peer];
    struct ln_liveness *live = &p->live;
    const bool needed = ln_needs(t, peer), first = needed && live->expected == 0;
    if (!needed) live->expected = 0;
    if (first) live->expected = now;
    find_elsewhere(t, peer, ln_needs_phase(t, peer) || ln_needs_gather(t, peer), now);
    if (!ln_needs_or_asks(t, peer)) {
        live->asked = 0;
        return HUGE_VAL;
    }
    if (first || live->asked == 0) live->probe_sends = !p->flow.blocked;
    if (live->asked == 0) live->asked = now;
    if (p->lateness.late) ln_deadline_tell(t, peer);
    if (t->link->features.reliable || t->threads.closing) return HUGE_VAL;
    return fmin(now + LOOK, ask(t, peer, now));
}

/* Looks at the peers that are due. */
static void look(struct ln_transport *t, double now) {
    for (int peer; (peer = ln_agenda_next(t, now)) >= 0;) {
        double due = ln_recv_check(t, peer);
        due = fmin(due, ln_message_push(t, peer, now));
        due = fmin(due, ln_ask_push(t, peer, now));
        due = fmin(due, ln_control_push(t, peer, now));
        due = fmin(due, watch(t, peer, now));
        due = fmin(due, ln_path_push(t, peer, now));
        due = fmin(due, ln_detour_push(t, peer, now));
        ln_agenda_count(t, peer);
        ln_agenda_set(t, peer, fmax(due, now + LOOK_LEAST));
    }
}

double ln_progress_turn(struct ln_transport *t) {
    double wait = IDLE;
    bool any = receive(t);
    double now = ln_now();
    look(t, now);
    for (int kind = 0; kind < 2; kind++) ln_deadline_check(t, kind);
    any |= ln_send_push(t, &wait);
    if (any) return 0;
    wait = fmin(wait, fmax(0, fmin(ln_agenda_due(t), ln_deadline_due(t, now)) - now));
    if (t->agenda.count[LOSSYNET_EXPECTED] > 0 || ln_control_busy(t)) {
        const double quiet = TICK_SHARE * (now - t->receiver.news);
        wait = fmin(wait, fmin(TICK_MAX, fmax(TICK * ln_timer_slowness(t), quiet)));
    }
    t->receiver.next_turn = now + wait;
    return wait;
}

/* ---- threads ---- */

lossynet_status ln_progress_until(struct ln_transport *t, bool (*over)(struct ln_transport *, int),
                                  int argument) {
    t->threads.waits = true;
    t->threads.elsewhere = false;
    while (!t->failed && !t->threads.elsewhere && !over(t, argument)) {
        double wait = ln_progress_turn(t);
        if (wait > 0 && !t->failed && !over(t, argument)) t->link->wait(t->link, wait);
    }
    t->threads.waits = false;
    return !t->failed && t->threads.elsewhere ? LOSSYNET_ELSEWHERE : t->failed;
}

/* Runs the transport's own thread. It holds the lock except when a caller wants it. After a failure
 * it goes on, so that peers are still answered; the next caller gets the error. */
static void *run(void *argument) {
    struct ln_transport *t = argument;
    struct ln_threads *threads = &t->threads;
    ln_log_use(&threads->log);
    pthread_mutex_lock(&threads->lock);
    while (!threads->stop) {
        if (__atomic_load_n(&threads->wanted, __ATOMIC_SEQ_CST) > 0) {
            pthread_cond_wait(&threads->handed_back, &threads->lock);
            continue;
        }
        double wait = ln_progress_turn(t);
        if (wait > 0 && __atomic_load_n(&threads->wanted, __ATOMIC_SEQ_CST) == 0)
            t->link->wait(t->link, wait);
    }
    pthread_mutex_unlock(&threads->lock);
    return NULL;
}

static lossynet_status start(struct ln_transport *t) {
    struct ln_threads *threads = &t->threads;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* only the caller's threads take signals */
    threads->threaded = pthread_create(&threads->thread, NULL, run, t) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (threads->threaded) return LOSSYNET_OK;
    return ln_fail(LOSSYNET_LINK, "rank %d: no thread for the exchange with peers", t->world.rank);
}

lossynet_status ln_transport_start(struct ln_transport *t) {
    lossynet_status status = LOSSYNET_OK;
    for (; t && !status && !t->link->features.reliable; t = t->threads.team.next) status = start(t);
    return status;
}

/* ---- leaving ---- */

static bool all_know(struct ln_transport *t, int unused) {
    (void)unused;
    bool all = true;
    for (int r = 0; r < t->world.ranks; r++) all &= r == t->world.rank || t->peers[r].live.knows;
    return all || ln_now() > t->threads.closing_since + LEAVING;
}

/* Tells the peers that we leave, and waits until they know it. Until then we answer them, since
 * they may lack our last answers. After a failure we send ABORT and do not wait. */
static void say_leave(struct ln_transport *t) {
    const lossynet_status failed = t->failed;
    t->failed = LOSSYNET_OK;
    t->threads.closing = true;
    t->threads.closing_since = ln_now();
    for (int kind = 0; kind < 2; kind++) t->phase[kind].awaited = false;
    t->gathers[LOSSYNET_GATHER].open = t->gathers[LOSSYNET_PULSE].open = false;
    for (int r = 0; r < t->world.ranks; r++) {
        struct ln_peer *p = &t->peers[r];
        if (r == t->world.rank) continue;
        p->message[LOSSYNET_GATHER].repeat = ln_timer_at_once();
        for (int kind = 0; kind < 2; kind++)
            p->tx[kind].complete = true, p->tx[kind].done_waits &= !failed;
        if (failed) ln_control_abort(t, r), p->live.knows = true;
    }
    ln_agenda_all(t);
    if (!failed) ln_progress_until(t, all_know, 0);
    /* Peers that left before us may not have heard that we know it. They stop waiting after
     * LEAVING. */
    for (int r = 0; r < t->world.ranks; r++)
        if (r == t->world.rank)
            continue;
        else if (failed)
            ln_control_abort(t, r);
        else
            ln_control_send(t, r, WIRE_LEFT, 0, 0, 0);
    t->failed = failed;
}

void ln_progress_stop(struct ln_transport *t) {
    if (!t->threads.threaded) return;
    ln_threads_enter(t);
    const lossynet_status failed = t->failed;
    ln_progress_until(t, ln_message_settled, LOSSYNET_GATHER);
    t->failed = failed; /* a peer that fails from now on does not matter */
    say_leave(t);
    t->threads.stop = true;
    ln_threads_leave(t);
    t->link->wake(t->link);
    pthread_join(t->threads.thread, NULL);
    t->threads.threaded = false;
}
