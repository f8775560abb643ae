/* send.c — sends the packets of a phase, each packet once: see state.h.
 *
 * A rank sends one batch to each peer in turn. It starts with the next rank, so that not all
 * senders send to the same receiver at once. If a peer cannot take a batch yet, the rank waits for
 * it. If it went on to the next peer instead, more and more senders would send to the receiver that
 * answers fastest, until the switch before it drops packets. But a peer that is silent, or has not
 * opened this phase yet, may take long: after a moment the rank goes on without it. The user of the
 * transport decides which packets leave, and in what order.
 */
#include "lossynet/transport/peer/peer.h"

#include <math.h>

/* How long the others' turns wait for a peer, in seconds: TURN at most. They do not wait if it has
 * been silent for SILENCE and a time-out, or has not opened the phase for OPENING. */
static const double TURN = 0.3;
static const double SILENCE = 0.1;
static const double OPENING = 0.03;

/* Makes datagrams of spans. */
static void encode(struct ln_transport *t, struct ln_flow *flow, int kind, int n) {
    for (int i = 0; i < n; i++) {
        const struct ln_span *span = &t->sender.spans[i];
        struct ln_datagram *d = &t->sender.batch[i];
        const struct wire_header h = {.magic = WIRE_MAGIC,
                                      .version = WIRE_VERSION,
                                      .type = WIRE_DATA,
                                      .kind = (uint8_t)kind,
                                      .elements = t->shape.elements,
                                      .run = (uint32_t)t->session.id,
                                      .sender = (uint16_t)span->packet.sender,
                                      .receiver = (uint16_t)span->packet.receiver,
                                      .bucket = (uint32_t)span->packet.bucket,
                                      .packet = span->packet.number,
                                      .index = t->phase[kind].begun - 1,
                                      .gradients = span->packet.gradients,
                                      .sequence = flow->sent++};
        wire_encode(d->header, &h);
        d->payload = span->payload;
        d->length = span->bytes;
        d->bulk = true;
    }
}

/* Returns how many datagrams a window lets through. To avoid small batches it is 0 while little of
 * the window is free. */
static int room(const struct ln_flow *flow, int most) {
    int free = flow->window.now - (int)(flow->sent - flow->credit), least = flow->window.now / 4;
    if (least > most / 2) least = most / 2;
    if (free < least) return 0;
    return free < most ? free : most;
}

static size_t full_bytes(const struct ln_transport *t, int n) {
    return (WIRE_HEADER_BYTES + t->shape.packet_bytes) * (size_t)n;
}

/* Sends the next packets, at most `most`, to a rank. Returns how many left, or -1 if they must wait
 * for pacing. */
static int send_batch(struct ln_transport *t, int kind, int rank, struct ln_tx *tx, int most,
                      double *wait) {
    double pause = ln_pacing_wait(&t->pacing, full_bytes(t, most));
    if (pause > 0) {
        *wait = fmin(*wait, pause);
        return -1;
    }
    int n = t->calls.next(t->calls.context, (lossynet_phase)kind, rank, t->sender.spans, most,
                          &tx->complete);
    ln_pacing_unused(&t->pacing, full_bytes(t, most - n));
    encode(t, &t->peers[rank].flow, kind, n);
    if (n > 0) ln_session_send(t, rank, t->sender.batch, n);
    tx->sent += (uint32_t)n;
    return n;
}

/* Returns whether a peer has opened our present phase. */
static bool is_open(const struct ln_transport *t, const struct ln_peer *p, int kind) {
    return (int32_t)(p->control.open[kind] - t->phase[kind].begun) >= 0;
}

/* Sends one batch of a phase to one peer. Returns how many datagrams left, or -1 if they must wait
 * for pacing. */
static int push_peer(struct ln_transport *t, int kind, int rank, double *wait) {
    struct ln_peer *p = &t->peers[rank];
    struct ln_flow *flow = &p->flow;
    struct ln_tx *tx = &p->tx[kind];
    if (t->phase[kind].begun == 0 || tx->complete ||
        !t->calls.ready(t->calls.context, (lossynet_phase)kind, rank))
        return 0;
    int most = is_open(t, p, kind) ? room(flow, t->pacing.batch) : 0;
    if (most == 0) {
        flow->blocked = true;
        flow->shut |= !is_open(t, p, kind);
        flow->window.full |= is_open(t, p, kind);
        return 0;
    }
    bool idle = flow->sent == flow->credit;
    int n = send_batch(t, kind, rank, tx, most, wait);
    if (n < 0) return n;
    if (idle) flow->credited = t->receiver.now, flow->window.since = 0;
    if (tx->complete) ln_send_complete(tx);
    return n;
}

/* Returns whether the others' turns wait for this peer's turn. */
static bool is_waited_for(const struct ln_transport *t, struct ln_peer *p) {
    struct ln_flow *flow = &p->flow;
    const double now = t->receiver.now;
    if (ln_late_ignores(t, (int)(p - t->peers))) return false;
    if (!flow->blocked || now - flow->credited >= TURN) return false;
    if (t->receiver.empty - p->live.heard > SILENCE + ln_timer_timeout(p)) return false;
    return !flow->shut || now - flow->shut_since < OPENING;
}

/* Notes that something new may leave for every peer. */
static void look_at_all(struct ln_transport *t) {
    for (int r = 0; r < t->world.ranks; r++) {
        struct ln_flow *flow = &t->peers[r].flow;
        t->agenda.sends[r] = r != t->world.rank;
        if (!flow->shut) flow->shut_since = t->receiver.now;
    }
}

/* Updates the flags of a peer after sending. If they have changed, the next turn looks at it. */
static void count_again(struct ln_transport *t, int rank) {
    const uint32_t before = t->agenda.flags[rank];
    ln_agenda_count(t, rank);
    if (t->agenda.flags[rank] != before) ln_agenda_soon(t, rank);
}

/* Sends a peer what it can take. Returns whether the others' turns wait for its turn. */
static bool push_all(struct ln_transport *t, int rank, double *wait, bool *any) {
    struct ln_flow *flow = &t->peers[rank].flow;
    bool left = false, paced = false;
    flow->blocked = flow->shut = false;
    for (int kind = LOSSYNET_PARAMETER; kind >= 0; kind--) {
        const int n = push_peer(t, kind, rank, wait);
        left |= n > 0;
        paced |= n < 0;
    }
    if (!flow->shut) flow->shut_since = t->receiver.now;
    const bool paused = paced || is_waited_for(t, &t->peers[rank]);
    /* If nothing can leave, we look again when the peer sends something, or the caller has more. */
    t->agenda.sends[rank] = left || paused;
    count_again(t, rank);
    *any |= left;
    return paused;
}

/* Returns the first peer in from ... end - 1 that something may leave for, or `end`. */
static int next_to_send(const struct ln_transport *t, int from, int end) {
    const bool *found =
        from < end ? memchr(t->agenda.sends + from, true, (size_t)(end - from)) : NULL;
    return found ? (int)(found - t->agenda.sends) : end;
}

bool ln_send_push(struct ln_transport *t, double *wait) {
    const int ranks = t->world.ranks, first = t->sender.first;
    bool any = false, paused = false;
    if (t->failed) return false; /* the caller knows, and may have freed its vectors */
    if (__atomic_exchange_n(&t->sender.woken, false, __ATOMIC_SEQ_CST)) look_at_all(t);
    for (int half = 0; half < 2; half++) { /* from `first` on, around */
        const int end = half == 0 ? ranks : first;
        int rank = next_to_send(t, half == 0 ? first : 0, end);
        for (; rank < end && !paused; rank = next_to_send(t, rank + 1, end)) {
            paused = push_all(t, rank, wait, &any);
            if (paused) t->sender.first = rank; /* this peer's turn comes first */
        }
    }
    return any;
}

bool ln_send_all_left(struct ln_transport *t, int phase) {
    if (t->agenda.count[LOSSYNET_SENDS + phase] > 0) return false;
    /* Over MPI, wait until everything has arrived. */
    return !t->link->features.reliable || t->agenda.count[LOSSYNET_UNCONFIRMED + phase] == 0;
}
