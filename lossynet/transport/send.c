/* send.c — the packets of a phase, each sent once: see progress.h.
 *
 * Sending goes from peer to peer, a batch each, starting with the next rank, so that no receiver is
 * hit by all senders at once. A peer that cannot take a batch yet is waited for: were it passed
 * over, senders would drift to the receiver that answers best, and meet there until the switch
 * drops what it cannot hold. But one that is silent, or has not come to this phase yet, may take
 * long, and is passed over after a moment. Which packets leave, and in what order, is for the user
 * of the transport to say.
 */
#include "lossynet/transport/progress.h"

#include <math.h>

static const double TURN = 0.3;     /* s, longest wait for a peer whose turn it is, ... */
static const double SILENCE = 0.1;  /* ... of which nothing is heard, beside a round trip, ... */
static const double OPENING = 0.03; /* ... and whose phase is shut */

/* Makes datagrams of spans. */
static void encode(struct lossynet_transport *t, int kind, int n, uint32_t *sequence) {
    for (int i = 0; i < n; i++) {
        const struct lossynet_span *span = &t->sender.spans[i];
        struct lossynet_datagram *d = &t->sender.batch[i];
        const int receiver = span->packet.receiver;
        const struct wire_header h = {
            .magic = WIRE_MAGIC,
            .version = WIRE_VERSION,
            .type = WIRE_DATA,
            .kind = (uint8_t)kind,
            .elements = span->device ? WIRE_DEVICE_FLOAT32 : t->shape.elements,
            .run = (uint32_t)t->session.id,
            .sender = (uint16_t)span->packet.sender,
            .receiver = receiver == LOSSYNET_EVERYONE ? WIRE_EVERYONE : (uint16_t)receiver,
            .bucket = (uint32_t)span->packet.bucket,
            .packet = span->packet.number,
            .index = t->phase[kind].begun - 1,
            .gradients = span->packet.gradients,
            .sequence = (*sequence)++};
        wire_encode(d->header, &h);
        d->payload = span->payload;
        d->length = span->bytes;
        d->bulk = true;
        d->device = span->device;
    }
}

/* How many datagrams a window lets through: not a trickle, unless it is all there is. */
static int room(const struct lossynet_flow *flow, uint32_t sent, uint32_t credit, int most) {
    int free = flow->window - (int)(sent - credit), least = flow->window / 4;
    if (least > most / 2) least = most / 2;
    if (free < least) return 0;
    return free < most ? free : most;
}

static size_t full_bytes(const struct lossynet_transport *t, int n) {
    return (WIRE_HEADER_BYTES + t->shape.packet_bytes) * (size_t)n;
}

/* Sends the next packets, at most `most`, to a rank or to everyone. Returns how many left, or -1
 * when pacing has them wait. */
static int send_batch(struct lossynet_transport *t, int kind, int rank, struct lossynet_tx *tx,
                      int most, uint32_t *sequence, double *wait) {
    double pause = lossynet_pacing_wait(&t->pacing, full_bytes(t, most));
    if (pause > 0) {
        *wait = fmin(*wait, pause);
        return -1;
    }
    int n = t->calls.next(t->calls.context, (lossynet_phase)kind, rank, t->sender.spans, most,
                          &tx->complete);
    lossynet_pacing_unused(&t->pacing, full_bytes(t, most - n));
    encode(t, kind, n, sequence);
    if (n > 0) lossynet_session_send(t, rank, t->sender.batch, n);
    tx->sent += (uint32_t)n;
    return n;
}

/* Whether a peer has opened our present phase. */
static bool is_open(const struct lossynet_transport *t, const struct lossynet_peer *p, int kind) {
    return (int32_t)(p->control.open[kind] - t->phase[kind].begun) >= 0;
}

/* One batch of a phase to one peer. True when something left. */
static bool push_peer(struct lossynet_transport *t, int kind, int rank, double *wait) {
    struct lossynet_peer *p = &t->peers[rank];
    struct lossynet_flow *flow = &p->flow;
    struct lossynet_tx *tx = &p->tx[kind];
    if (t->phase[kind].begun == 0 || tx->complete ||
        !t->calls.ready(t->calls.context, (lossynet_phase)kind, rank))
        return false;
    int most = is_open(t, p, kind) ? room(flow, flow->sent, flow->credit, t->pacing.batch) : 0;
    if (most == 0) {
        flow->blocked = true;
        flow->shut |= !is_open(t, p, kind);
        return false;
    }
    bool idle = flow->sent == flow->credit;
    int n = send_batch(t, kind, rank, tx, most, &flow->sent, wait);
    if (n < 0) return false;
    if (idle) flow->credited = t->receiver.now;
    if (tx->complete) lossynet_send_complete(tx);
    return n > 0;
}

/* One batch of parameters to everybody. */
static bool push_group(struct lossynet_transport *t, double *wait) {
    const int kind = LOSSYNET_PARAMETER;
    struct lossynet_tx *tx = &t->sender.group;
    if (t->phase[kind].begun == 0 || tx->complete ||
        !t->calls.ready(t->calls.context, LOSSYNET_PARAMETER, LOSSYNET_EVERYONE))
        return false;
    int most = t->pacing.batch;
    for (int r = 0; r < t->world.ranks; r++) {
        struct lossynet_peer *p = &t->peers[r];
        struct lossynet_flow *flow = &p->flow;
        if (r == t->world.rank || p->tx[kind].complete) continue;
        int free = 0;
        if (is_open(t, p, kind))
            free = room(flow, t->sender.group_sent, flow->group_credit, t->pacing.batch);
        if (free == 0) flow->blocked = true;
        if (free < most) most = free;
    }
    if (most == 0) return false;
    int n = send_batch(t, kind, LOSSYNET_EVERYONE, tx, most, &t->sender.group_sent, wait);
    for (int r = 0; tx->complete && r < t->world.ranks; r++)
        if (!t->peers[r].tx[kind].complete) lossynet_send_complete(&t->peers[r].tx[kind]);
    return n > 0;
}

/* Whether the others' turns wait for this peer's. */
static bool is_waited_for(const struct lossynet_transport *t, struct lossynet_peer *p) {
    struct lossynet_flow *flow = &p->flow;
    const double now = t->receiver.now;
    if (lossynet_deadline_ignores(t, (int)(p - t->peers))) return false;
    if (!flow->shut) flow->shut_since = now;
    if (!flow->blocked || now - flow->credited >= TURN) return false;
    if (t->receiver.empty - p->live.heard > SILENCE + lossynet_timer_timeout(p)) return false;
    return now - flow->shut_since < OPENING;
}

bool lossynet_send_push(struct lossynet_transport *t, double *wait) {
    const int others = t->world.ranks - 1;
    bool any = false, paused = false;
    if (t->failed) return false; /* the caller knows, and may have freed its vectors */
    for (int r = 0; r < t->world.ranks; r++)
        t->peers[r].flow.blocked = t->peers[r].flow.shut = false;
    if (t->session.multicast) any |= push_group(t, wait);
    for (int i = 0; i < others && !paused; i++) {
        int distance = 1 + (t->sender.first + i) % others;
        int rank = (t->world.rank + distance) % t->world.ranks;
        double before = *wait;
        for (int kind = LOSSYNET_PARAMETER; kind >= 0; kind--)
            if (!lossynet_is_group(t, kind)) any |= push_peer(t, kind, rank, wait);
        bool waited_for = is_waited_for(t, &t->peers[rank]);
        paused = *wait < before || waited_for;
        if (paused) t->sender.first = distance - 1; /* this peer's turn comes first */
    }
    return any;
}

bool lossynet_send_all_left(struct lossynet_transport *t, int phase) {
    for (int r = 0; r < t->world.ranks; r++) {
        const struct lossynet_tx *tx = &t->peers[r].tx[phase];
        if (r == t->world.rank) continue;
        if (!tx->complete && t->phase[phase].begun > 0) return false;
        if (t->link->features.reliable && tx->done_waits) return false; /* MPI: all has arrived */
    }
    return true;
}
