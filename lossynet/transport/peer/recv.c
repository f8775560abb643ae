/* recv.c — receives the packets of a phase, and finds out when no more will come: see state.h.
 *
 * It checks every field of a datagram before it uses any of them. It notices a lost packet when a
 * peer's phase (check_complete), or a bucket, ends without it.
 */
#include "lossynet/transport/peer/peer.h"

#include <inttypes.h>
#include <math.h>

/* A phase ends without a silent peer after the longest of three times: PATIENCE seconds,
 * PATIENCE_SHARE of peer_timeout, and PATIENCE_PHASES times the mean wait for a phase. PATIENCE is
 * longer than a busy machine may keep a rank from running: to end the phase sooner would gain
 * little, since every step needs one number from every rank. */
static const double PATIENCE = 2;
static const double PATIENCE_SHARE = 0.2;
static const double PATIENCE_PHASES = 8;

static const double REORDERING = 0.25; /* round trips; see most_overtaken */
static const double GRACE_SHARE = 0.2; /* of peer_timeout: the longest grace */
static const double UNSEEN = 25;       /* times the grace; see most_overtaken */

/* ---- receiving ---- */

static bool is_local(const struct ln_transport *t, int worker) {
    return worker / t->shape.local == t->world.rank;
}

/* Checks the fields of DATA, and fills in `packet`. Returns the counter of the error, or NULL. */
static uint64_t *reject(struct ln_transport *t, const struct wire_header *h,
                        struct ln_packet *packet) {
    struct ln_rejected *rejected = &t->receiver.rejected;
    if (h->kind >= 2 || h->elements != t->shape.elements || h->sender >= t->shape.workers ||
        is_local(t, h->sender) || h->bucket >= (uint32_t)t->shape.buckets)
        return &rejected->invalid;
    *packet = (struct ln_packet){.sender = h->sender,
                                 .receiver = h->receiver,
                                 .bucket = (int)h->bucket,
                                 .number = h->packet,
                                 .gradients = h->gradients};
    size_t bytes = t->calls.bytes(t->calls.context, (lossynet_phase)h->kind, packet);
    if (bytes == 0 || h->length != bytes) return &rejected->invalid;

    const struct ln_phase_state *phase = &t->phase[h->kind];
    const struct ln_peer *p = &t->peers[h->sender / t->shape.local];
    if ((h->index + 1 - phase->opened) % WIRE_INDICES || phase->closed == phase->opened ||
        p->rx[h->kind].state == RX_OVER || phase->buckets.over[h->bucket]) {
        phase->buckets.late[h->bucket]++;
        return &rejected->late;
    }
    return NULL;
}

/* Returns how long the grace may become for a peer: as in RFC 8985 (RACK), section 6.2, step 4, one
 * round trip. On a short path the sender's processor may hold packets up for longer. */
static double grace_most(const struct ln_transport *t, const struct ln_peer *p) {
    return fmax(GRACE_MAX, fmin(p->round_trip.mean, GRACE_SHARE * t->session.peer_timeout));
}

static double grace_of(const struct ln_transport *t, const struct ln_peer *p) {
    return fmin(t->receiver.grace, grace_most(t, p));
}

/* Makes the grace longer when DATA come after we have ended their phase or bucket: others overtook
 * them by more than we waited. If we did not wait, since their rank was late, nothing changes. */
static void learn_grace(struct ln_transport *t, int peer, const struct wire_header *h) {
    const struct ln_phase_state *phase = &t->phase[h->kind];
    const struct ln_peer *p = &t->peers[peer];
    const struct ln_rx *rx = &p->rx[h->kind];
    const bool last = (h->index + 1 - phase->closed) % WIRE_INDICES == 0;
    const bool present = (h->index + 1 - phase->opened) % WIRE_INDICES == 0;
    double ended = 0;
    if (last && rx->given_up != phase->closed)
        ended = phase->closed_at;
    else if (present && !last && rx->state == RX_OVER && rx->given_up != phase->opened)
        ended = rx->over;
    if (ended == 0) return;
    const double needed = t->receiver.grace + t->receiver.now - ended;
    t->receiver.grace = fmax(t->receiver.grace, fmin(needed, grace_most(t, p)));
}

/* Counts a packet that came. When the first packet of a bucket comes, notes the time for all
 * earlier buckets of this sender: packets that they lack are lost when the grace has passed. */
static void reach(struct ln_transport *t, const struct wire_header *h) {
    const lossynet_phase phase = (lossynet_phase)h->kind;
    const int buckets = t->shape.buckets;
    struct ln_buckets *b = &t->phase[phase].buckets;
    int order = ln_transport_bucket(phase, buckets, (int)h->bucket); /* its own inverse */
    size_t i = (size_t)h->bucket * t->shape.workers + h->sender;
    if (b->missing[i] > 0) b->missing[i]--;
    for (int *at = &b->reached[h->sender]; *at < order; ++*at)
        b->passed[(size_t)ln_transport_bucket(phase, buckets, *at) * t->shape.workers + h->sender] =
            t->receiver.now;
}

static double check_complete(struct ln_transport *t, int kind, int peer);

void ln_recv_data(struct ln_transport *t, int peer, const struct wire_header *h,
                  const uint8_t *payload) {
    struct ln_peer *p = &t->peers[peer];
    struct ln_flow *flow = &p->flow;
    struct ln_rejected *rejected = &t->receiver.rejected;
    if (h->sequence - flow->seen < (uint32_t)(LOSSYNET_REACH * t->session.window))
        flow->seen = h->sequence + 1;
    flow->came++;
    if (++flow->unacknowledged >= (uint32_t)t->session.credit_every) p->control.state_due = true;
    struct ln_packet packet;
    uint64_t *wrong = t->failed ? &rejected->late : reject(t, h, &packet);
    if (wrong) {
        ++*wrong;
        if (wrong == &rejected->late) learn_grace(t, peer, h);
        return;
    }
    enum ln_delivery delivery =
        t->calls.deliver(t->calls.context, (lossynet_phase)h->kind, &packet, payload, h->length);
    if (delivery != LOSSYNET_TAKEN) {
        ++*(delivery == LOSSYNET_NOT_FINITE ? &rejected->not_finite : &rejected->duplicate);
        return;
    }
    ln_timer_news(t, p);
    p->rx[h->kind].received++;
    p->rx[h->kind].last = t->receiver.now;
    reach(t, h);
    check_complete(t, h->kind, peer);
}

void ln_recv_done(struct ln_transport *t, int peer, const struct wire_header *h) {
    struct ln_rx *rx = &t->peers[peer].rx[h->kind];
    uint32_t opened = t->phase[h->kind].opened;
    if (h->index == opened) { /* we have not opened this phase, so the peer sent nothing of it */
        rx->next_done = true;
        rx->next_announced = h->packet;
        rx->next_idle = h->elements == WIRE_IDLE;
    } else if (h->index + 1 == opened) {
        rx->done = true;
        rx->announced = h->packet;
        rx->idle = h->elements == WIRE_IDLE;
        check_complete(t, h->kind, peer);
    } else if ((int32_t)(h->index - opened) > 0) {
        return; /* no peer can be so far ahead */
    }
    ln_control_send(t, peer, WIRE_ACK, h->kind, h->index, 0);
}

/* ---- the end ---- */

/* Ends a peer's phase over a reliable link, where DONE comes after all DATA. */
static void check_reliable(struct ln_transport *t, int peer, struct ln_rx *rx) {
    if (!rx->done) return;
    rx->state = RX_OVER;
    if (rx->received == rx->announced) return;
    ln_log("rank %d, step %" PRIu64 ": rank %d sent %" PRIu32 " packets, %" PRIu64
           " arrived over a link that loses none",
           t->world.rank, ln_session_step(t), peer, rx->announced, rx->received);
    if (!t->failed) t->failed = LOSSYNET_PROTOCOL;
}

/* Returns after how many seconds a missing packet is lost, and not only overtaken by the packets
 * that came. RFC 8985 (RACK), section 6.2, also takes a quarter of a round trip, and less if
 * nothing was overtaken before. If a PROBE is answered sooner, that is better evidence. */
static double most_overtaken(const struct ln_transport *t, const struct ln_peer *p) {
    const double most = fmax(GRACE_MAX, REORDERING * p->round_trip.mean);
    const double unseen = UNSEEN * t->receiver.grace;
    return unseen < p->round_trip.least ? fmin(most, unseen) : most;
}

/* Ends a peer's phase to us when it is over: all packets have come, or the missing ones are lost.
 * Returns when to look again, if nothing comes. */
static double check_complete(struct ln_transport *t, int kind, int peer) {
    struct ln_peer *p = &t->peers[peer];
    const struct ln_phase_state *phase = &t->phase[kind];
    struct ln_receiver *receiver = &t->receiver;
    struct ln_rx *rx = &p->rx[kind];
    if (rx->state == RX_OVER || phase->opened == phase->closed) return HUGE_VAL;
    if (t->link->features.reliable) {
        check_reliable(t, peer, rx);
        return HUGE_VAL;
    }
    bool all = rx->done && (uint32_t)rx->received == rx->announced;
    bool ended = rx->done || (int32_t)(p->control.finished[kind] - phase->opened) >= 0;
    if (ended && rx->state == RX_RECEIVING) {
        rx->state = RX_ENDING;
        rx->ending = receiver->now;
        rx->nonce = ln_path_nonce(t, false);
        rx->probe = ln_timer_at_once();
    }
    if (!ended) return HUGE_VAL;
    const double silent_since = fmax(rx->last, rx->ending);
    bool quiet = receiver->empty - silent_since > grace_of(t, p);
    /* A peer that has left answers no more. Everything that it sent is on its way. */
    bool answered = p->live.leaving > 0 || (int32_t)(p->control.answered - rx->nonce) >= 0;
    const double overtaken = t->session.two_classes ? HUGE_VAL : most_overtaken(t, p);
    answered |= receiver->empty - silent_since > overtaken;
    if (all || (quiet && answered)) {
        rx->state = RX_OVER;
        rx->over = receiver->now;
        return HUGE_VAL;
    }
    if (answered) return silent_since + grace_of(t, p);
    if (ln_timer_is_due(t, p, &rx->probe, receiver->now))
        ln_control_send(t, peer, WIRE_PROBE, 0, 0, rx->nonce);
    return fmin(silent_since + overtaken, ln_timer_due(t, &rx->probe, receiver->now));
}

static double patience(const struct ln_transport *t, const struct ln_phase_state *phase) {
    const double least = fmax(PATIENCE, PATIENCE_SHARE * t->session.peer_timeout);
    return fmax(least, PATIENCE_PHASES * phase->seconds);
}

double ln_recv_check(struct ln_transport *t, int peer) {
    struct ln_peer *p = &t->peers[peer];
    double due = HUGE_VAL;
    if (t->link->features.reliable) return due;
    for (int kind = 0; kind < 2; kind++) {
        const struct ln_phase_state *phase = &t->phase[kind];
        due = fmin(due, check_complete(t, kind, peer));
        if (ln_timer_silence(t, peer, p->live.expected) <= patience(t, phase)) continue;
        if (phase->awaited && p->rx[kind].state != RX_OVER) {
            p->rx[kind].state = RX_OVER;
            p->rx[kind].over = t->receiver.empty;
            t->receiver.stragglers++;
        }
        if (phase->begun > 0 && !p->tx[kind].complete && p->flow.blocked)
            ln_send_complete(&p->tx[kind]); /* what we have not sent is lost */
    }
    return due;
}

/* Returns whether no more packets of a sender's bucket will come. Once true, it stays true. */
static bool is_there(const struct ln_transport *t, int kind, int bucket, int sender) {
    const struct ln_buckets *b = &t->phase[kind].buckets;
    const struct ln_receiver *receiver = &t->receiver;
    const size_t i = (size_t)bucket * t->shape.workers + sender;
    if (b->missing[i] == 0 || is_local(t, sender)) return true;
    const struct ln_peer *p = &t->peers[sender / t->shape.local];
    if (p->rx[kind].state == RX_OVER) return true;
    const double passed = b->passed[i];
    return !t->link->features.reliable && passed > 0 && receiver->empty - passed > grace_of(t, p);
}

bool ln_recv_bucket_is_over(struct ln_transport *t, int place) {
    const int kind = place / t->shape.buckets, bucket = place % t->shape.buckets;
    int *checked = &t->phase[kind].buckets.checked[bucket];
    while (*checked < t->shape.workers && is_there(t, kind, bucket, *checked)) ++*checked;
    for (int w = *checked; w < t->shape.workers; w++)
        if (!ln_late_excuses(t, w / t->shape.local, kind) && !is_there(t, kind, bucket, w))
            return false;
    return true;
}
