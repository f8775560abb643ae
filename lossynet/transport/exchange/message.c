/* message.c — exchanges small messages, and repeats them until they arrive.
 *
 * In a gather every rank gets some bytes, its part, from every other rank. The bytes travel
 * in fragments. At most LOSSYNET_FRAGMENTS fragments to a peer are unacknowledged. A fragment is
 * sent again when it is not acknowledged in time, and sooner if later ones were acknowledged. A
 * rank that has not begun the gather yet drops fragments. When it begins, its own fragments show
 * that, and the others send it all of theirs again at once.
 *
 * A caller waits until it has the others' parts. Its own part, if it is small, is copied. Then the
 * caller goes on while the transport repeats the copy until it is acknowledged; only the next gather
 * of the same kind waits for that. So a gather takes half a round trip if nothing is lost.
 *
 * There are two kinds of rounds, and each has its own count. In rounds of kind WIRE_MESSAGES all
 * ranks wait for all. A gather of kind WIRE_PULSES belongs to a step: with a deadline it goes on
 * without the parts of late ranks (deadline.c), and a late rank may find that the others have ended
 * the gather.
 */
#include "lossynet/transport/exchange/exchange.h"

#include <math.h>

/* Seconds before a fragment is sent again to a peer that has not begun the gather, at least. */
static const double DEAF = 1e-3;
/* A fragment is sent again, after later ones were acknowledged, when it is this many seconds old,
 * or so many round trips if these take longer. */
static const double OVERTAKEN = 3e-4;
static const double OVERTAKEN_SHARE = 1.25;

static size_t fragment(const struct ln_transport *t, size_t bytes, uint32_t n, size_t *at) {
    *at = (size_t)n * t->session.fragment_bytes;
    return bytes - *at < t->session.fragment_bytes ? bytes - *at : t->session.fragment_bytes;
}

static uint32_t fragments(const struct ln_transport *t, size_t bytes) {
    const size_t one = t->session.fragment_bytes;
    return bytes ? (uint32_t)((bytes + one - 1) / one) : 1;
}

/* Returns the time in microseconds, but never 0. */
static uint32_t stamp_of(double now) {
    return (uint32_t)(uint64_t)(now * 1e6) | 1;
}

/* ---- sending ---- */

/* Sends the fragments that are new within the window, or were not acknowledged in time. Returns
 * when to look again. */
static double push(struct ln_transport *t, int peer, int which, double now) {
    struct ln_peer *p = &t->peers[peer];
    struct ln_message *m = &p->message[which];
    if (!t->gathers[which].open || ln_needs_no_part(t, p, which) || ln_needs_is_past(t, p, which)) {
        ln_path_message(t, peer, which, 0, now);
        return HUGE_VAL;
    }
    const bool again = !t->link->features.reliable && ln_timer_is_over(t, &m->repeat, now);
    const bool listens = (int32_t)(m->in_gather - t->gathers[which].begun) >= 0;
    const double timeout = fmin(m->repeat.pause, ln_timer_timeout(p));
    const double late = listens ? timeout : fmax(timeout, DEAF);
    const double overtaken = fmax(OVERTAKEN, OVERTAKEN_SHARE * p->round_trip.mean);
    bool repeated = false;
    /* When the oldest unacknowledged fragment was sent; when an overtaken one must be sent
     * again. */
    double oldest = HUGE_VAL, due = HUGE_VAL;
    uint32_t most = m->fragments - m->acked_before;
    if (most > (uint32_t)p->flow.window.least) most = (uint32_t)p->flow.window.least;
    if (most > LOSSYNET_FRAGMENTS) most = LOSSYNET_FRAGMENTS;
    if (!listens) most = 1;
    int n = 0;
    for (uint32_t i = 0; i < most && n < LOSSYNET_BATCH; i++) {
        if (m->acked >> i & 1) continue;
        double *sent_at = &m->sent_at[(m->acked_before + i) % LOSSYNET_FRAGMENTS];
        const bool others_came = !t->link->features.reliable && i < 63 && m->acked >> (i + 1);
        const bool was_overtaken = others_came && now - *sent_at > overtaken;
        bool is_late = *sent_at > 0 && again && now - *sent_at >= late;
        const bool waits = *sent_at > 0 && !was_overtaken && !is_late;
        if (!waits) *sent_at = now;
        oldest = fmin(oldest, *sent_at);
        if (others_came) due = fmin(due, *sent_at + overtaken);
        if (waits) continue;
        repeated |= is_late;
        size_t at, bytes = fragment(t, m->out_bytes, m->acked_before + i, &at);
        t->sender.batch[n] = ln_control_datagram(t, peer, WIRE_MESSAGE, WIRE_MESSAGES + which,
                                                 t->gathers[which].begun - 1, m->acked_before + i,
                                                 m->out + at, bytes);
        wire_put(t->sender.batch[n++].header + WIRE_SEQUENCE_AT, stamp_of(now), 4);
    }
    if (repeated) ln_timer_again(t, p, &m->repeat, now);
    if (n > 0) ln_session_send(t, peer, t->sender.batch, n);
    if (t->link->features.reliable) return HUGE_VAL;
    size_t at, first = fragment(t, m->out_bytes, m->acked_before, &at);
    ln_path_message(t, peer, which, first, now);
    return fmin(due, fmax(oldest + fmin(late, timeout), ln_timer_due(t, &m->repeat, now)));
}

double ln_message_push(struct ln_transport *t, int peer, double now) {
    double due = HUGE_VAL;
    for (int which = 0; which < LOSSYNET_GATHER_KINDS; which++)
        due = fmin(due, push(t, peer, which, now));
    return due;
}

/* ---- receiving ---- */

void ln_message_receive(struct ln_transport *t, int peer, const struct wire_header *h,
                        const uint8_t *payload) {
    struct ln_peer *p = &t->peers[peer];
    if (h->kind < WIRE_MESSAGES) {
        t->receiver.rejected.invalid++;
        return;
    }
    const int which = h->kind - WIRE_MESSAGES;
    const struct ln_gathers *gather = &t->gathers[which];
    struct ln_message *m = &p->message[which];
    const bool left_behind = t->deadline.on && which == LOSSYNET_PULSE;
    if ((int32_t)(h->index - gather->begun) > 0 && !left_behind) {
        t->receiver.rejected.invalid++; /* no rank can end a gather without our part */
        return;
    }
    ln_timer_news(t, p);
    if ((int32_t)(h->index + 1 - m->in_gather) > 0) {
        m->moved = t->receiver.now;
        m->in_gather = h->index + 1;
        /* The peer has begun this gather, and now takes the fragments that it dropped before. */
        if (m->in_gather == gather->begun) memset(m->sent_at, 0, sizeof m->sent_at);
    }
    if (!gather->open || h->index != gather->begun - 1) {
        p->control.state_due = true;
        return;
    }
    size_t at;
    if (h->packet >= m->expects || h->length != fragment(t, m->in_bytes, h->packet, &at)) {
        p->live.elsewhere.misfits |= which == LOSSYNET_GATHER;
        t->receiver.rejected.invalid++;
        return;
    }
    p->live.elsewhere.misfits &= which != LOSSYNET_GATHER;
    p->control.ack_due[which] = true;
    m->stamp = h->sequence;
    if (h->packet < m->got_before || h->packet - m->got_before >= LOSSYNET_FRAGMENTS) return;
    uint64_t bit = (uint64_t)1 << (h->packet - m->got_before);
    if (m->got & bit) return;
    m->moved = t->receiver.now;
    if (h->length) memcpy(m->in + at, payload, h->length);
    m->got |= bit;
    for (; m->got & 1; m->got >>= 1) m->got_before++;
}

void ln_message_acknowledge(struct ln_transport *t, int peer, const struct wire_header *h,
                            const uint8_t *payload) {
    struct ln_peer *p = &t->peers[peer];
    const int which = h->kind - WIRE_MESSAGES;
    struct ln_message *m = &p->message[which];
    double taken = 1e-6 * (uint32_t)(stamp_of(t->receiver.now) - h->sequence);
    const bool ran = t->receiver.now - taken >= t->receiver.resumed; /* all the time */
    if (h->sequence && taken > 0 && taken < t->session.peer_timeout && ran) {
        ln_timer_measured(&p->round_trip, taken);
        t->agenda.slowest = fmax(t->agenda.slowest, p->round_trip.mean);
    }
    if (!t->gathers[which].open || h->index != t->gathers[which].begun - 1 ||
        h->length != WIRE_STATE_BYTES + 8 || h->packet > m->fragments ||
        h->packet < m->acked_before)
        return;
    uint64_t mask = wire_get(payload + WIRE_STATE_BYTES, 8);
    uint32_t forward = h->packet - m->acked_before;
    /* The next fragment with the same index in sent_at has not been sent yet. */
    for (uint32_t i = 0; i < forward && i < LOSSYNET_FRAGMENTS; i++)
        m->sent_at[(m->acked_before + i) % LOSSYNET_FRAGMENTS] = 0;
    if (forward || (mask | m->acked) != m->acked) m->repeat.pause = ln_timer_timeout(p);
    if (forward) ln_path_message(t, peer, which, 0, t->receiver.now);
    m->acked = (forward < 64 ? m->acked >> forward : 0) | mask;
    m->acked_before = h->packet;
}

/* ---- rounds ---- */

double ln_message_owed(const struct ln_transport *t, int peer) {
    const struct ln_peer *p = &t->peers[peer];
    double owed = 0;
    for (int which = 0; which < LOSSYNET_GATHER_KINDS; which++) {
        const struct ln_gathers *gather = &t->gathers[which];
        const struct ln_message *m = &p->message[which];
        bool begun =
            (int32_t)(m->in_gather - gather->begun) >= 0 ||
            (which == LOSSYNET_GATHER && (int32_t)(p->control.gathers - gather->begun) >= 0) ||
            (int32_t)(p->control.complete[which] - gather->begun) >= 0;
        if (gather->open && begun && m->got_before < m->expects && !ln_needs_is_past(t, p, which))
            owed = fmax(owed, t->receiver.empty - fmax(m->moved, t->receiver.back));
    }
    return owed;
}

bool ln_message_exchanged(struct ln_transport *t, int which) {
    struct ln_gathers *gather = &t->gathers[which];
    const int ranks = t->world.ranks, *count = t->agenda.count + which;
    const int lacking = count[LOSSYNET_LACKS];
    const bool all = count[LOSSYNET_EXCHANGES] == 0 || (gather->keeps && lacking == 0);
    if (lacking == 0 && gather->complete != gather->begun) {
        gather->complete = gather->begun; /* from now on our state says so */
        for (int r = 0; r < ranks; r++) t->peers[r].control.ack_due[which] = true;
        ln_agenda_all(t);
    }
    if (all || !t->deadline.on || which != LOSSYNET_PULSE) return all;
    if (gather->half == 0 && 2 * (ranks - lacking) >= ranks) gather->half = t->receiver.empty;
    const int late = ln_late_is_minority(t) ? 0 : count[LOSSYNET_EXCHANGES_LATE];
    if (count[LOSSYNET_EXCHANGES_IN_TIME] + late == 0) return true;
    if (!ln_deadline_is_over(t, gather->half)) return false;
    for (int r = 0; r < ranks; r++)
        if (r != t->world.rank && !ln_needs_no_exchange(t, r, which)) ln_deadline_late(t, r);
    return true;
}

bool ln_message_settled(struct ln_transport *t, int which) {
    return !t->gathers[which].open || t->agenda.count[LOSSYNET_EXCHANGES + which] == 0;
}

/* Returns where our parts lie during the gather. If they are small, and the transport has a thread,
 * they are copied. Then the caller waits only for the others' parts, and not until ours arrive. */
static const uint8_t *keep(struct ln_transport *t, int which, const uint8_t *out,
                           const size_t *offset, bool same) {
    struct ln_gathers *gather = &t->gathers[which];
    const size_t first = same ? offset[t->world.rank] : 0;
    const size_t bytes = offset[same ? t->world.rank + 1 : t->world.ranks] - first;
    gather->keeps = which == LOSSYNET_GATHER && t->threads.threaded && bytes <= LOSSYNET_KEPT_BYTES;
    if (!gather->keeps) return out + first;
    if (bytes) memcpy(gather->kept, out + first, bytes);
    return gather->kept;
}

void ln_message_begin(struct ln_transport *t, int which, const uint8_t *out,
                      const size_t *out_offset, bool same, uint8_t *in, const size_t *in_offset) {
    t->gathers[which].begun++;
    t->gathers[which].open = true;
    t->gathers[which].half = 0;
    const uint8_t *parts = keep(t, which, out, out_offset, same);
    for (int r = 0; r < t->world.ranks; r++) {
        struct ln_message *m = &t->peers[r].message[which];
        int part = same ? t->world.rank : r;
        m->out = same ? parts : parts + out_offset[part];
        m->in = in + in_offset[r];
        m->out_bytes = out_offset[part + 1] - out_offset[part];
        m->in_bytes = in_offset[r + 1] - in_offset[r];
        m->fragments = fragments(t, m->out_bytes);
        m->expects = fragments(t, m->in_bytes);
        m->acked_before = m->got_before = 0;
        m->acked = m->got = 0;
        t->peers[r].live.elsewhere.misfits &= which != LOSSYNET_GATHER;
        memset(m->sent_at, 0, sizeof m->sent_at);
        m->moved = ln_now();
        m->repeat = ln_timer_from(&t->peers[r], m->moved);
    }
    ln_agenda_all(t);
}
