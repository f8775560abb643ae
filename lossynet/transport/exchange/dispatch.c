/* dispatch.c — verifies a datagram that has come, and hands it to the file for its type. */
#include "lossynet/transport/exchange/exchange.h"

enum {
    AHEAD = 2,         /* phases that a peer may be ahead of us, at most */
    AHEAD_LATE = 10000 /* with a deadline: steps that it may be ahead of us in addition */
};

/* A state that comes this many seconds after an earlier one was also sent after it. */
static const double OVERTAKEN = 1;

/* ---- state ---- */

static bool later(uint32_t a, uint32_t b) { /* a > b, for counts that wrap around */
    return (int32_t)(a - b) > 0;
}

/* Returns whether the counts in a state can be true. Without a deadline no rank ends a phase or a
 * gather without our part, so our own counts bound how many phases and gathers a peer has opened,
 * finished and completed. If we believed a higher count, we would not send until our own count
 * reached it. With a deadline the others may be up to AHEAD_LATE steps ahead. */
static bool is_possible(const struct ln_transport *t, const uint8_t *state) {
    const uint32_t steps = t->deadline.on ? AHEAD_LATE : 0;
    const uint32_t gathers = t->gathers[LOSSYNET_GATHER].begun;
    bool possible = !later((uint32_t)wire_get(state + 16, 4), gathers) &&
                    !later((uint32_t)wire_get(state + 32, 4), gathers + 1) &&
                    !later((uint32_t)wire_get(state + 28, 4),
                           t->gathers[LOSSYNET_PULSE].begun + steps * t->deadline.pulses);
    for (int kind = 0; kind < 2; kind++) {
        const struct ln_phase_state *phase = &t->phase[kind];
        uint32_t open = (uint32_t)wire_get(state + 4 * kind, 4);
        uint32_t finished = (uint32_t)wire_get(state + 8 + 4 * kind, 4);
        const uint32_t ahead = AHEAD + steps * t->deadline.phases[kind];
        possible &= !later(open, phase->begun + ahead) && !later(finished, phase->opened + ahead);
    }
    return possible;
}

/* Takes a peer's credit. Returns whether it has grown. A peer that has seen a little more than we
 * sent has believed a damaged sequence number: we take it that it has seen everything. */
static bool take_credit(struct ln_flow *flow, uint32_t told) {
    if (later(told, flow->sent + (uint32_t)(LOSSYNET_REACH * flow->window.most))) return false;
    if (later(told, flow->sent)) told = flow->sent;
    if (!later(told, flow->credit)) return false;
    flow->credit = told;
    return true;
}

static void take_state(struct ln_transport *t, int peer, const uint8_t *from) {
    struct ln_peer *p = &t->peers[peer];
    struct ln_control *told = &p->control;
    struct ln_flow *flow = &p->flow;
    const double now = t->receiver.now;
    const bool overtaken = now - told->raised < OVERTAKEN;
    bool news = false;
    for (int kind = 0; kind < 2; kind++) {
        uint32_t open = (uint32_t)wire_get(from + 4 * kind, 4);
        uint32_t finished = (uint32_t)wire_get(from + 8 + 4 * kind, 4);
        if (later(open, told->open[kind])) told->open[kind] = open, news = true;
        if (later(finished, told->finished[kind])) told->finished[kind] = finished, news = true;
        /* With a deadline a wrong count may be so high that only a lower one can correct it. */
        if (t->deadline.on && !news && !overtaken)
            told->open[kind] = open, told->finished[kind] = finished;
        /* A peer that has opened the next phase has closed this one, and needs no DONE. */
        if (later(told->open[kind], t->phase[kind].begun)) {
            p->tx[kind].done_waits = false;
            p->tx[kind].refused |= !p->tx[kind].complete;
            p->tx[kind].complete = true;
        }
    }
    const uint32_t credit = (uint32_t)wire_get(from + 20, 4);
    const uint32_t came = (uint32_t)wire_get(from + 24, 4);
    const uint32_t gathers = (uint32_t)wire_get(from + 32, 4);
    if (news) told->raised = now;
    for (int which = 0; which < LOSSYNET_GATHER_KINDS; which++) {
        uint32_t complete = (uint32_t)wire_get(from + (which == LOSSYNET_GATHER ? 16 : 28), 4);
        if (!later(complete, told->complete[which])) continue;
        told->complete[which] = complete, news = true;
        p->message[which].moved = now;
    }
    if (later(gathers, told->gathers)) told->gathers = gathers;
    if (t->deadline.on) ln_deadline_told(t, peer);
    const bool credited = take_credit(flow, credit);
    if (credited) flow->credited = now;
    if (news || credited) flow->blocked = false; /* send.c finds out again */
    if (news || credited) ln_timer_news(t, p);
    ln_window_report(t, peer, came);
    ln_path_data(t, peer, came);
    if (!later(credit, flow->sent)) ln_pacing_report(t, peer, credit, came);
}

/* Counts all DATA before `sent` as seen or given up. If `sent` is a little lower than *seen, the
 * PROBE was overtaken, and nothing changes. If it is far lower, it corrects a wrong sequence number
 * that we believed. */
static void give_up(const struct ln_transport *t, uint32_t *seen, uint32_t sent) {
    uint32_t reach = (uint32_t)(LOSSYNET_REACH * t->session.window);
    if (later(sent, *seen) || later(*seen, sent + reach)) *seen = sent;
}

/* Takes the nonce of the last PROBE of ours that a peer has answered. */
static void take_answer(struct ln_transport *t, int peer, uint32_t nonce) {
    struct ln_peer *p = &t->peers[peer];
    if (!later(nonce, p->control.answered) || later(nonce, t->receiver.nonces)) return;
    p->control.answered = nonce;
    ln_timer_news(t, p);
    ln_path_answered(t, peer, nonce);
}

static void take_probe(struct ln_transport *t, struct ln_peer *p, const struct wire_header *h) {
    give_up(t, &p->flow.seen, h->sequence);
    if (h->packet) p->control.echo = h->packet, p->control.answer_due = true;
    if (h->index == 0) p->control.state_due = true;
}

/* Handles LEAVE. Without encryption anybody on the path can send it in a peer's name. Then the peer
 * has left only if it says nothing else from then on (progress.c, timer.c). */
static void take_leave(struct ln_transport *t, int peer) {
    struct ln_liveness *live = &t->peers[peer].live;
    if (live->leaving == 0) live->leaving = t->receiver.now;
    live->left |= t->session.secure != NULL;
    live->knows = true;
}

/* Handles ABORT. Without encryption anybody on the path can send ABORT in a peer's name. Then we
 * believe it only if a second rank sends it too, or if the peer is silent from then on
 * (progress.c). */
static void take_abort(struct ln_transport *t, int peer, uint32_t missed) {
    struct ln_liveness *live = &t->peers[peer].live;
    bool believed = t->session.secure;
    int first = peer; /* the rank that failed first; the others send ABORT because of it */
    if (live->aborted == 0) live->aborted = t->receiver.now;
    live->misses = missed <= (uint32_t)t->world.ranks ? (int)missed : 0;
    for (int r = 0; r < t->world.ranks; r++) {
        const double aborted = t->peers[r].live.aborted;
        believed |= r != peer && aborted > 0;
        if (r != peer && aborted > 0 && aborted <= t->peers[first].live.aborted) first = r;
    }
    live->left |= believed;
    if (believed && !t->threads.closing) ln_control_fail_with(t, first);
}

/* Handles a datagram other than DATA, MESSAGE and TELL. Returns false if it is malformed. recv.c handles
 * the rest of DONE, message.c the ACK of a message, and ask.c the rest of ASK. */
static bool take_control(struct ln_transport *t, int peer, const struct wire_header *h,
                         const uint8_t *payload) {
    struct ln_peer *p = &t->peers[peer];
    if (h->length < WIRE_STATE_BYTES) return false;
    if (h->type != WIRE_ABORT && !is_possible(t, payload)) return false;
    if (h->type != WIRE_STATE && h->type != WIRE_PROBE) ln_timer_news(t, p);
    /* The state in an ABORT says that phases were sent completely, which is not true. */
    if (h->type != WIRE_ABORT) take_state(t, peer, payload);
    switch (h->type) {
    case WIRE_STATE:
        if (h->index > 0)
            ln_detour_answered(t, peer, h->index);
        else
            take_answer(t, peer, h->packet);
        break;
    case WIRE_PROBE:
        take_probe(t, p, h);
        break;
    case WIRE_ACK:
        if (h->kind < 2 && h->index + 1 == t->phase[h->kind].begun)
            p->tx[h->kind].done_waits = false;
        break;
    case WIRE_ABORT:
        take_abort(t, peer, h->packet);
        p->live.knows = p->control.left_due = true;
        break;
    case WIRE_LEAVE:
        take_leave(t, peer);
        take_answer(t, peer, h->packet);
        p->control.left_due = true;
        break;
    case WIRE_LEFT:
        p->live.knows |= t->threads.closing;
        break;
    }
    return true;
}

/* ---- every datagram ---- */

void ln_dispatch(struct ln_transport *t, int peer, uint8_t *datagram, size_t bytes) {
    struct wire_header h;
    const uint8_t *payload = datagram + WIRE_HEADER_BYTES;
    int way;
    if (!ln_session_verify(t, &peer, &way, &h, datagram, bytes)) return;
    ln_timer_heard(t, peer, h.type);
    if (h.type == WIRE_PROBE && h.index > 0) ln_detour_asked(t, peer, h.index, way);
    ln_agenda_soon(t, peer);
    t->agenda.sends[peer] = true;
    const bool of_phase = h.kind < WIRE_MESSAGES;
    if (h.type == WIRE_DATA)
        ln_recv_data(t, peer, &h, payload);
    else if (h.type == WIRE_MESSAGE)
        ln_message_receive(t, peer, &h, payload);
    else if (h.type == WIRE_TELL)
        ln_ask_told(t, peer, &h, payload);
    else if (!take_control(t, peer, &h, payload) || (h.type == WIRE_DONE && !of_phase))
        t->receiver.rejected.invalid++;
    else if (h.type == WIRE_DONE)
        ln_recv_done(t, peer, &h);
    else if (h.type == WIRE_ASK)
        ln_ask_receive(t, peer, &h);
    else if (h.type == WIRE_ACK && !of_phase)
        ln_message_acknowledge(t, peer, &h, payload);
}
