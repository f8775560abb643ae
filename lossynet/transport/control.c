/* control.c — sends and handles control datagrams: the state that opens windows and phases, the end
 * of phases, and the leaving of a rank.
 *
 * All of them may arrive more than once without harm. They are repeated until they are answered, or
 * until the peer's state implies the answer. Messages are in message.c.
 */
#include "lossynet/transport/progress.h"

#include <math.h>

enum {
    AHEAD = 2,         /* phases that a peer may be ahead of us, at most */
    AHEAD_LATE = 10000 /* with a deadline: steps that it may be ahead of us in addition */
};

/* A state that comes this many seconds after an earlier one was also sent after it. */
static const double OVERTAKEN = 1;

/* ---- sending ---- */

struct ln_datagram ln_control_datagram(const struct ln_transport *t, int peer, int type, int kind,
                                       uint32_t index, uint32_t packet, const void *payload,
                                       size_t bytes) {
    struct ln_datagram d = {.payload = payload, .length = bytes};
    const bool idle = type == WIRE_DONE && kind == LOSSYNET_GRADIENT && t->deadline.present.idle;
    struct wire_header h = {.magic = WIRE_MAGIC,
                            .version = WIRE_VERSION,
                            .type = (uint8_t)type,
                            .kind = (uint8_t)kind,
                            .elements = idle ? WIRE_IDLE : 0,
                            .run = (uint32_t)t->session.id,
                            .sender = (uint16_t)t->world.rank,
                            .receiver = (uint16_t)peer,
                            .packet = packet,
                            .index = index,
                            .sequence = t->peers[peer].flow.sent};
    wire_encode(d.header, &h);
    return d;
}

static void put_state(const struct ln_transport *t, int peer, uint8_t *to) {
    const struct ln_peer *p = &t->peers[peer];
    for (int kind = 0; kind < 2; kind++) {
        const struct ln_phase_state *phase = &t->phase[kind];
        uint32_t finished = phase->begun - (phase->begun > 0 && !p->tx[kind].complete);
        wire_put(to + 4 * kind, phase->opened, 4);
        wire_put(to + 8 + 4 * kind, finished, 4);
    }
    wire_put(to + 16, t->gathers[LOSSYNET_GATHER].complete, 4);
    wire_put(to + 20, p->flow.seen, 4);
    wire_put(to + 24, p->flow.came, 4);
    wire_put(to + 28, t->gathers[LOSSYNET_PULSE].complete, 4);
    wire_put(to + 32, t->gathers[LOSSYNET_GATHER].begun, 4);
}

/* Sends one datagram in the class of DATA (`bulk`) or in the default class. If DATA has a class of
 * its own, a datagram of the default class may overtake DATA, and so may one that takes another way.
 * Then a PROBE does not say how many DATA were sent, and a STATE answers no nonce. The index of both
 * is the number of a question about a way, else 0. The payload has at least `least` bytes. */
static void send_in_class(struct ln_transport *t, int peer, int way, int type, int kind,
                          uint32_t index, uint32_t packet, bool bulk, size_t least) {
    struct ln_peer *p = &t->peers[peer];
    bool overtakes = t->session.two_classes && !bulk;
    uint8_t small[WIRE_STATE_BYTES + 8], *payload = least ? t->session.padding : small;
    size_t bytes = WIRE_STATE_BYTES;
    put_state(t, peer, payload);
    struct ln_message *answered =
        type == WIRE_ACK && kind >= WIRE_MESSAGES ? &p->message[kind - WIRE_MESSAGES] : NULL;
    if (answered) {
        wire_put(payload + bytes, answered->got, 8);
        bytes += 8;
    }
    /* A rank that leaves says so in place of STATE. So a STATE shows that a rank has not left. */
    const bool answers = type == WIRE_STATE || (type == WIRE_LEAVE && t->threads.closing);
    if (answers) type = t->threads.closing ? WIRE_LEAVE : WIRE_STATE;
    if (answers) packet = overtakes || index ? 0 : p->control.echo;
    if (bytes < least) bytes = least;
    struct ln_datagram d = ln_control_datagram(t, peer, type, kind, index, packet, payload, bytes);
    if (answered) {
        wire_put(d.header + WIRE_SEQUENCE_AT, answered->stamp, 4);
        answered->stamp = 0;
    }
    if (type == WIRE_PROBE && (overtakes || way != p->detour.way))
        wire_put(d.header + WIRE_SEQUENCE_AT, p->flow.credit, 4);
    d.bulk = bulk;
    ln_session_send_by(t, peer, way, &d, 1);
}

void ln_control_send(struct ln_transport *t, int peer, int type, int kind, uint32_t index,
                     uint32_t packet) {
    struct ln_peer *p = &t->peers[peer];
    const bool answers = type == WIRE_STATE && p->control.answer_due;
    const int way = p->detour.way;
    send_in_class(t, peer, way, type, kind, index, packet, false, 0);
    /* Send it in both classes: the one in the default class arrives even if no DATA does. */
    bool behind_data = answers || (type == WIRE_PROBE && !packet);
    if (t->session.two_classes && behind_data)
        send_in_class(t, peer, way, type, kind, index, packet, true, 0);
    p->flow.unacknowledged = 0;
    if (type == WIRE_STATE) p->control.state_due = p->control.answer_due = false;
}

void ln_control_probe(struct ln_transport *t, int peer, uint32_t nonce, size_t bytes, bool bulk) {
    send_in_class(t, peer, t->peers[peer].detour.way, WIRE_PROBE, 0, 0, nonce, bulk, bytes);
}

void ln_control_ask_by(struct ln_transport *t, int peer, int way, uint32_t number) {
    send_in_class(t, peer, way, WIRE_PROBE, 0, number, 0, false, 0);
}

static void answer_by(struct ln_transport *t, int peer) {
    struct ln_detour *d = &t->peers[peer].detour;
    if (d->echo) send_in_class(t, peer, d->answer, WIRE_STATE, 0, d->echo, 0, false, 0);
    d->echo = 0;
}

double ln_control_tell(const struct ln_peer *peer, double now) {
    const double pause = ln_timer_first(peer);
    return pause > RTO_MIN ? now + pause : 0;
}

/* Makes our state due when it is time to tell a peer again that a phase is open. Returns when that
 * will be. */
static double tell_again(struct ln_peer *p, struct ln_rx *rx, double now) {
    if (rx->tell > now) return rx->tell;
    if (rx->tell > 0 && rx->received == 0 && !rx->done) p->control.state_due = true;
    rx->tell = 0;
    return HUGE_VAL;
}

double ln_control_push(struct ln_transport *t, int peer, double now) {
    struct ln_peer *p = &t->peers[peer];
    struct ln_control *control = &p->control;
    double due = HUGE_VAL;
    for (int kind = 0; kind < 2; kind++) {
        struct ln_tx *tx = &p->tx[kind];
        due = fmin(due, tell_again(p, &p->rx[kind], now));
        if (!tx->done_waits) continue;
        if (ln_timer_is_due(t, p, &tx->done, now)) {
            if (t->link->features.reliable) tx->done.since = HUGE_VAL;
            ln_control_send(t, peer, WIRE_DONE, kind, t->phase[kind].begun - 1, tx->sent);
        }
        due = fmin(due, ln_timer_due(t, &tx->done, now));
    }
    if (t->threads.closing && !p->live.knows) {
        struct ln_timer *repeat = &p->message[LOSSYNET_GATHER].repeat;
        if (ln_timer_is_due(t, p, repeat, now)) ln_control_send(t, peer, WIRE_LEAVE, 0, 0, 0);
        due = fmin(due, ln_timer_due(t, repeat, now));
    }
    due = fmin(due, ln_ask_push(t, peer, now));
    bool told = false; /* our state */
    for (int which = 0; which < LOSSYNET_GATHER_KINDS; which++) {
        if (control->ack_due[which])
            ln_control_send(t, peer, WIRE_ACK, WIRE_MESSAGES + which, t->gathers[which].begun - 1,
                            p->message[which].got_before);
        told |= control->ack_due[which];
        control->ack_due[which] = false;
    }
    if (control->state_due && !told) ln_control_send(t, peer, WIRE_STATE, 0, 0, 0);
    answer_by(t, peer);
    if (control->left_due) ln_control_send(t, peer, WIRE_LEFT, 0, 0, 0);
    control->left_due = false;
    return due;
}

bool ln_control_busy(const struct ln_transport *t) {
    const int *unconfirmed = &t->agenda.count[LOSSYNET_UNCONFIRMED];
    bool exchanges = false;
    for (int which = 0; which < LOSSYNET_GATHER_KINDS; which++)
        exchanges |= t->gathers[which].open && t->agenda.count[LOSSYNET_EXCHANGES + which] > 0;
    return exchanges || t->threads.closing || unconfirmed[0] > 0 || unconfirmed[1] > 0;
}

/* ---- receiving ---- */

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
    live->left |= t->link->features.reliable || t->session.secure;
    live->knows = true;
}

void ln_control_abort(struct ln_transport *t, int peer) {
    ln_control_send(t, peer, WIRE_ABORT, 0, 0, (uint32_t)t->session.missed);
}

void ln_control_fail_with(struct ln_transport *t, int peer) {
    const int misses = t->peers[peer].live.misses;
    if (misses == 1 + t->world.rank)
        ln_session_fail(t, peer, "leaves, since it does not hear this rank");
    else if (misses > 0)
        ln_session_fail(t, peer, "leaves, since it does not hear rank %d", misses - 1);
    else
        ln_session_fail(t, peer, "has failed");
    if (misses > 0 && misses != 1 + t->world.rank) t->session.missed = misses; /* the first cause */
}

/* Handles ABORT. Without encryption anybody on the path can send ABORT in a peer's name. Then we
 * believe it only if a second rank sends it too, or if the peer is silent from then on
 * (progress.c). */
static void take_abort(struct ln_transport *t, int peer, uint32_t missed) {
    struct ln_liveness *live = &t->peers[peer].live;
    bool believed = t->link->features.reliable || t->session.secure;
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

bool ln_control_receive(struct ln_transport *t, int peer, const struct wire_header *h,
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
