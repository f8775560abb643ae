/* control.c — sends control datagrams: the state that opens windows and phases, the end
 * of phases, and the leaving of a rank.
 *
 * All of them may arrive more than once without harm. They are repeated until they are answered, or
 * until the peer's state implies the answer. Messages are in message.c.
 */
#include "lossynet/transport/peer/peer.h"

#include <math.h>

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
    const bool answers = type == WIRE_STATE || type == WIRE_LEAVE;
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

/* Answers each way's last question, on three ways (detour.c). */
static void answer_by(struct ln_transport *t, int peer) {
    struct ln_detour *d = &t->peers[peer].detour;
    for (int i = 0; i < LOSSYNET_ANSWERS && d->to_answer[i].number; i++) {
        const struct ln_way_question q = d->to_answer[i];
        const int way[] = {q.way, d->way, d->candidate};
        for (int k = 0; k < 3; k++)
            if (k == 0 || (way[k] != q.way && (k == 1 || way[k] != d->way)))
                send_in_class(t, peer, way[k], WIRE_STATE, 0, q.number, 0, false, 0);
        d->to_answer[i].number = 0;
    }
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

/* ---- failing ---- */

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
