/* message.c — small messages that must arrive.
 *
 * A message round gives every rank some bytes of every other one. Bytes travel in fragments, at
 * most LOSSYNET_FRAGMENTS of a peer's unacknowledged; a fragment is sent again when it is not
 * acknowledged in time, sooner when later ones were. A rank that has not begun the round yet drops
 * fragments; when it begins, its own fragments say so, and all are sent again at once.
 */
#include "lossynet/transport/progress.h"

#include <math.h>

static const double DEAF = 1e-3; /* s, before what a peer does not listen to yet is sent again */
static const double OVERTAKEN = 3e-4; /* s, before a fragment that others overtook is sent again, */
static const double OVERTAKEN_SHARE = 1.25; /* or so many round trips */

static size_t fragment(const struct lossynet_transport *t, size_t bytes, uint32_t n, size_t *at) {
    *at = (size_t)n * t->rounds.fragment_bytes;
    return bytes - *at < t->rounds.fragment_bytes ? bytes - *at : t->rounds.fragment_bytes;
}

static uint32_t fragments(const struct lossynet_transport *t, size_t bytes) {
    const size_t one = t->rounds.fragment_bytes;
    return bytes ? (uint32_t)((bytes + one - 1) / one) : 1;
}

static bool all_acknowledged(const struct lossynet_transport *t, const struct lossynet_peer *p) {
    return p->message.acked_before == p->message.fragments ||
           (int32_t)(p->control.messages - t->rounds.begun) >= 0;
}

/* The time, microseconds; never 0. */
static uint32_t stamp_of(double now) {
    return (uint32_t)(uint64_t)(now * 1e6) | 1;
}

/* ---- sending ---- */

/* Sends the fragments that are new within the window, or not acknowledged in time. */
void lossynet_message_push(struct lossynet_transport *t, int peer, double now) {
    struct lossynet_peer *p = &t->peers[peer];
    struct lossynet_message *m = &p->message;
    if (!t->rounds.open || all_acknowledged(t, p)) return;
    const bool again = !t->link->reliable && lossynet_timer_is_over(t, &m->repeat, now);
    const bool listens = m->in_round >= t->rounds.begun;
    const double timeout = fmin(m->repeat.pause, lossynet_timer_timeout(p));
    const double late = listens ? timeout : fmax(timeout, DEAF);
    const double overtaken = fmax(OVERTAKEN, OVERTAKEN_SHARE * p->round_trip.mean);
    bool repeated = false;
    uint32_t most = m->fragments - m->acked_before;
    uint32_t window =
        p->flow.window < LOSSYNET_FRAGMENTS ? (uint32_t)p->flow.window : LOSSYNET_FRAGMENTS;
    if (most > window) most = window;
    if (!listens) most = 1;
    int n = 0;
    for (uint32_t i = 0; i < most && n < LOSSYNET_BATCH; i++) {
        if (m->acked >> i & 1) continue;
        double *sent_at = &m->sent_at[(m->acked_before + i) % LOSSYNET_FRAGMENTS];
        bool was_overtaken =
            !t->link->reliable && i < 63 && m->acked >> (i + 1) && now - *sent_at > overtaken;
        bool is_late = *sent_at > 0 && again && now - *sent_at >= late;
        if (*sent_at > 0 && !was_overtaken && !is_late) continue;
        *sent_at = now;
        repeated |= is_late;
        size_t at, bytes = fragment(t, m->out_bytes, m->acked_before + i, &at);
        t->sender.batch[n] =
            lossynet_control_datagram(t, peer, WIRE_MESSAGE, WIRE_MESSAGES, t->rounds.begun - 1,
                                      m->acked_before + i, m->out + at, bytes);
        wire_put(t->sender.batch[n++].header + WIRE_SEQUENCE_AT, stamp_of(now), 4);
    }
    if (repeated) lossynet_timer_again(t, p, &m->repeat, now);
    if (n > 0) lossynet_session_send(t, peer, t->sender.batch, n);
}

/* ---- receiving ---- */

void lossynet_message_receive(struct lossynet_transport *t, int peer, const struct wire_header *h,
                              const uint8_t *payload) {
    struct lossynet_peer *p = &t->peers[peer];
    struct lossynet_message *m = &p->message;
    if ((int32_t)(h->index - t->rounds.begun) > 0) { /* nobody ends a round without our part */
        t->receiver.rejected.invalid++;
        return;
    }
    lossynet_timer_news(t, p);
    m->moved = t->receiver.now;
    if ((int32_t)(h->index + 1 - m->in_round) > 0) {
        m->in_round = h->index + 1;
        /* What it could not hear before, it can now. */
        if (m->in_round == t->rounds.begun) memset(m->sent_at, 0, sizeof m->sent_at);
    }
    if (!t->rounds.open || h->index != t->rounds.begun - 1) {
        p->control.state_due = true;
        return;
    }
    size_t at;
    if (h->packet >= m->expects || h->length != fragment(t, m->in_bytes, h->packet, &at)) {
        t->receiver.rejected.invalid++;
        return;
    }
    p->control.ack_due = true;
    m->stamp = h->sequence;
    if (h->packet < m->got_before || h->packet - m->got_before >= LOSSYNET_FRAGMENTS) return;
    uint64_t bit = (uint64_t)1 << (h->packet - m->got_before);
    if (m->got & bit) return;
    if (h->length) memcpy(m->in + at, payload, h->length);
    m->got |= bit;
    for (; m->got & 1; m->got >>= 1) m->got_before++;
}

void lossynet_message_acknowledge(struct lossynet_transport *t, int peer,
                                  const struct wire_header *h, const uint8_t *payload) {
    struct lossynet_peer *p = &t->peers[peer];
    struct lossynet_message *m = &p->message;
    double taken = 1e-6 * (uint32_t)(stamp_of(t->receiver.now) - h->sequence);
    if (h->sequence && taken > 0 && taken < t->session.peer_timeout)
        lossynet_timer_measured(&p->round_trip, taken);
    if (!t->rounds.open || h->index != t->rounds.begun - 1 || h->length != WIRE_STATE_BYTES + 8 ||
        h->packet > m->fragments || h->packet < m->acked_before)
        return;
    uint64_t mask = wire_get(payload + WIRE_STATE_BYTES, 8);
    uint32_t forward = h->packet - m->acked_before;
    for (uint32_t i = 0; i < forward && i < LOSSYNET_FRAGMENTS; i++) /* the slot's next is new */
        m->sent_at[(m->acked_before + i) % LOSSYNET_FRAGMENTS] = 0;
    if (forward || (mask | m->acked) != m->acked) m->repeat.pause = lossynet_timer_timeout(p);
    m->acked = (forward < 64 ? m->acked >> forward : 0) | mask;
    m->acked_before = h->packet;
}

/* ---- rounds ---- */

static bool is_exchanged(const struct lossynet_transport *t, int peer) {
    const struct lossynet_peer *p = &t->peers[peer];
    return p->message.got_before == p->message.expects && all_acknowledged(t, p);
}

bool lossynet_message_awaits(const struct lossynet_transport *t, int peer) {
    return t->rounds.open && !is_exchanged(t, peer);
}

double lossynet_message_owed(const struct lossynet_transport *t, int peer) {
    const struct lossynet_peer *p = &t->peers[peer];
    const struct lossynet_message *m = &p->message;
    bool begun = (int32_t)(m->in_round - t->rounds.begun) >= 0 ||
                 (int32_t)(p->control.messages - t->rounds.begun) >= 0;
    return t->rounds.open && begun && m->got_before < m->expects ? t->receiver.empty - m->moved : 0;
}

bool lossynet_message_exchanged(struct lossynet_transport *t, int unused) {
    (void)unused;
    bool received = true, all = true;
    for (int r = 0; r < t->world.ranks; r++) {
        if (r == t->world.rank) continue;
        const struct lossynet_message *m = &t->peers[r].message;
        received &= m->got_before == m->expects;
        all &= is_exchanged(t, r);
    }
    if (received && t->rounds.complete != t->rounds.begun) {
        t->rounds.complete = t->rounds.begun; /* from now on every state says so */
        for (int r = 0; r < t->world.ranks; r++) t->peers[r].control.ack_due = true;
    }
    return all;
}

void lossynet_message_begin(struct lossynet_transport *t, const uint8_t *out,
                            const size_t *out_offset, bool same, uint8_t *in,
                            const size_t *in_offset) {
    t->rounds.begun++;
    t->rounds.open = true;
    for (int r = 0; r < t->world.ranks; r++) {
        struct lossynet_message *m = &t->peers[r].message;
        int part = same ? t->world.rank : r;
        m->out = out + out_offset[part];
        m->in = in + in_offset[r];
        m->out_bytes = out_offset[part + 1] - out_offset[part];
        m->in_bytes = in_offset[r + 1] - in_offset[r];
        m->fragments = fragments(t, m->out_bytes);
        m->expects = fragments(t, m->in_bytes);
        m->acked_before = m->got_before = 0;
        m->acked = m->got = 0;
        memset(m->sent_at, 0, sizeof m->sent_at);
        m->moved = lossynet_now();
        m->repeat = lossynet_timer_from(&t->peers[r], m->moved);
    }
}
