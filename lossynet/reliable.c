/* reliable.c — what must arrive: the end of phases, small messages, and the state that opens
 * windows and phases. Everything here is idempotent and repeated until it is answered, or until
 * what the peer says of itself implies the answer.
 *
 * A message round gives every rank some bytes of every other one. Bytes travel in fragments, at
 * most LOSSYNET_FRAGMENTS of a peer's unacknowledged; a fragment is sent again when it is not
 * acknowledged in time, sooner when later ones were. A rank that has not begun the round yet drops
 * fragments; when it begins, its own fragments say so, and all are sent again at once.
 */
#include "lossynet/engine.h"

#include <math.h>
#include <string.h>

static const double LATE = 1e-3;      /* s, before a fragment is sent again */
static const double OVERTAKEN = 3e-4; /* s, before a fragment that others overtook is sent again */

/* ---- sending ---- */

static struct lossynet_datagram control(const struct lossynet *net, int peer, int type, int kind,
                                        uint32_t index, uint32_t packet, const void *payload,
                                        size_t bytes) {
    struct lossynet_datagram d = {.payload = payload, .length = bytes};
    struct wire_header h = {.magic = WIRE_MAGIC,
                            .version = WIRE_VERSION,
                            .type = (uint8_t)type,
                            .kind = (uint8_t)kind,
                            .run = (uint32_t)net->engine->run,
                            .sender = (uint16_t)net->world.rank,
                            .receiver = (uint16_t)peer,
                            .packet = packet,
                            .index = index,
                            .sequence = net->engine->peers[peer].sent};
    wire_encode(d.header, &h);
    return d;
}

static void put_state(const struct lossynet *net, int peer, uint8_t *to) {
    const struct lossynet_engine *engine = net->engine;
    const struct lossynet_peer *p = &engine->peers[peer];
    for (int kind = 0; kind < 2; kind++) {
        const struct lossynet_sending *phase = &engine->phase[kind];
        uint32_t finished = phase->begun - (phase->begun > 0 && !p->to[kind].complete);
        wire_put(to + 4 * kind, phase->opened, 4);
        wire_put(to + 8 + 4 * kind, finished, 4);
    }
    wire_put(to + 16, engine->complete, 4);
    wire_put(to + 20, p->seen, 4);
    wire_put(to + 24, p->group_seen, 4);
    wire_put(to + 28, engine->group_sent, 4);
    wire_put(to + 32, p->came, 4);
}

/* Sends one datagram with our state. In two classes, what overtakes DATA does not say how much of it
 * was sent (PROBE), and answers nothing (STATE). */
static void tell(struct lossynet *net, int peer, int type, int kind, uint32_t index,
                 uint32_t packet, bool bulk) {
    struct lossynet_engine *engine = net->engine;
    struct lossynet_peer *p = &engine->peers[peer];
    bool overtakes = engine->two_classes && !bulk;
    uint8_t payload[WIRE_STATE_BYTES + 8];
    size_t bytes = WIRE_STATE_BYTES;
    put_state(net, peer, payload);
    if (type == WIRE_ACK && kind == WIRE_MESSAGES) {
        wire_put(payload + bytes, p->got, 8);
        bytes += 8;
    }
    if (type == WIRE_STATE) packet = overtakes ? 0 : p->echo;
    struct lossynet_datagram d = control(net, peer, type, kind, index, packet, payload, bytes);
    if (type == WIRE_PROBE && overtakes) wire_put(d.header + WIRE_SEQUENCE_AT, p->credit, 4);
    if (overtakes) wire_put(payload + 28, p->group_credit, 4);
    d.bulk = bulk;
    lossynet_engine_send(net, peer, &d, 1);
}

void lossynet_reliable_tell(struct lossynet *net, int peer, int type, int kind, uint32_t index,
                            uint32_t packet) {
    struct lossynet_engine *engine = net->engine;
    struct lossynet_peer *p = &engine->peers[peer];
    tell(net, peer, type, kind, index, packet, false);
    /* Both: that of the default class comes also while the other class is starved. */
    bool behind_data = type == WIRE_STATE ? p->answer_due : type == WIRE_PROBE && !packet;
    if (engine->two_classes && behind_data) tell(net, peer, type, kind, index, packet, true);
    p->unsaid = 0;
    if (type == WIRE_STATE) p->state_due = p->answer_due = false;
}

static size_t fragment(const struct lossynet_engine *engine, size_t bytes, uint32_t n, size_t *at) {
    *at = (size_t)n * engine->fragment_bytes;
    return bytes - *at < engine->fragment_bytes ? bytes - *at : engine->fragment_bytes;
}

static uint32_t fragments(const struct lossynet_engine *engine, size_t bytes) {
    return bytes ? (uint32_t)((bytes + engine->fragment_bytes - 1) / engine->fragment_bytes) : 1;
}

static bool all_acknowledged(const struct lossynet_engine *engine, const struct lossynet_peer *p) {
    return p->acked_before == p->fragments || (int32_t)(p->messages - engine->rounds) >= 0;
}

/* Sends the fragments that are new within the window, or not acknowledged in time. */
static void push_fragments(struct lossynet *net, int peer, double now) {
    struct lossynet_engine *engine = net->engine;
    struct lossynet_peer *p = &engine->peers[peer];
    bool again = !net->link->reliable && lossynet_timer_is_due(engine, p, &p->message, now);
    uint32_t most = p->fragments - p->acked_before;
    uint32_t window = p->window < LOSSYNET_FRAGMENTS ? (uint32_t)p->window : LOSSYNET_FRAGMENTS;
    if (most > window) most = window;
    if (p->in_round < engine->rounds) most = 1; /* it does not listen yet */
    int n = 0;
    for (uint32_t i = 0; i < most && n < LOSSYNET_BATCH; i++) {
        if (p->acked >> i & 1) continue;
        double *sent_at = &p->sent_at[(p->acked_before + i) % LOSSYNET_FRAGMENTS];
        bool overtaken =
            !net->link->reliable && i < 63 && p->acked >> (i + 1) && now - *sent_at > OVERTAKEN;
        bool late = again && now - *sent_at >= LATE;
        if (*sent_at > 0 && !overtaken && !late) continue;
        *sent_at = now;
        size_t at, bytes = fragment(engine, p->out_bytes, p->acked_before + i, &at);
        engine->batch[n++] = control(net, peer, WIRE_MESSAGE, WIRE_MESSAGES, engine->rounds - 1,
                                     p->acked_before + i, p->out + at, bytes);
    }
    if (n > 0) lossynet_engine_send(net, peer, engine->batch, n);
}

void lossynet_reliable_push(struct lossynet *net, double now) {
    struct lossynet_engine *engine = net->engine;
    for (int distance = 1; distance < net->world.ranks; distance++) {
        int r = (net->world.rank + distance) % net->world.ranks;
        struct lossynet_peer *p = &engine->peers[r];
        if (engine->messaging && !all_acknowledged(engine, p)) push_fragments(net, r, now);
        for (int kind = 0; kind < 2; kind++) {
            struct lossynet_outbound *to = &p->to[kind];
            if (!to->done_waits || !lossynet_timer_is_due(engine, p, &to->done, now)) continue;
            if (net->link->reliable) to->done.since = HUGE_VAL;
            bool group = engine->multicast && kind == LOSSYNET_PARAMETER;
            lossynet_reliable_tell(net, r, WIRE_DONE, kind, engine->phase[kind].begun - 1,
                                   group ? engine->group.sent : to->sent);
        }
        if (engine->closing && !p->knows && lossynet_timer_is_due(engine, p, &p->message, now))
            lossynet_reliable_tell(net, r, WIRE_LEAVE, 0, 0, 0);
        if (p->ack_due)
            lossynet_reliable_tell(net, r, WIRE_ACK, WIRE_MESSAGES, engine->rounds - 1,
                                   p->got_before);
        else if (p->state_due)
            lossynet_reliable_tell(net, r, WIRE_STATE, 0, 0, 0);
        p->ack_due = false;
        if (p->left_due) lossynet_reliable_tell(net, r, WIRE_LEFT, 0, 0, 0);
        p->left_due = false;
    }
}

bool lossynet_reliable_busy(const struct lossynet *net) {
    const struct lossynet_engine *engine = net->engine;
    bool busy = engine->messaging || engine->closing;
    for (int r = 0; !busy && r < net->world.ranks; r++)
        busy = engine->peers[r].to[0].done_waits || engine->peers[r].to[1].done_waits;
    return busy;
}

/* ---- receiving ---- */

static bool later(uint32_t a, uint32_t b) { /* counts wrap around */
    return (int32_t)(a - b) > 0;
}

static void take_state(struct lossynet *net, int peer, const uint8_t *from) {
    struct lossynet_peer *p = &net->engine->peers[peer];
    bool news = false;
    for (int kind = 0; kind < 2; kind++) {
        uint32_t open = (uint32_t)wire_get(from + 4 * kind, 4);
        uint32_t finished = (uint32_t)wire_get(from + 8 + 4 * kind, 4);
        if (later(open, p->open[kind])) p->open[kind] = open, news = true;
        if (later(finished, p->finished[kind])) p->finished[kind] = finished, news = true;
        /* Whoever opens the next phase has closed this one, and needs no DONE. */
        if (later(p->open[kind], net->engine->phase[kind].begun)) {
            p->to[kind].done_waits = false;
            p->to[kind].complete = true;
        }
    }
    uint32_t messages = (uint32_t)wire_get(from + 16, 4), credit = (uint32_t)wire_get(from + 20, 4),
             group = (uint32_t)wire_get(from + 24, 4);
    if (later(messages, p->messages)) p->messages = messages, news = true;
    if (later(credit, p->credit) && !later(credit, p->sent))
        p->credit = credit, p->credited = net->engine->now;
    if (later(group, p->group_credit) && !later(group, net->engine->group_sent))
        p->group_credit = group, p->credited = net->engine->now;
    if (news || p->credited == net->engine->now) lossynet_engine_news(net->engine, p);
    lossynet_pace_report(net, peer, credit + group, (uint32_t)wire_get(from + 32, 4));
}

static void receive_fragment(struct lossynet *net, int peer, const struct wire_header *h,
                             const uint8_t *payload) {
    struct lossynet_engine *engine = net->engine;
    struct lossynet_peer *p = &engine->peers[peer];
    if (later(h->index + 1, p->in_round)) {
        p->in_round = h->index + 1;
        /* What it could not hear before, it can now. */
        if (p->in_round == engine->rounds) memset(p->sent_at, 0, sizeof p->sent_at);
    }
    if (!engine->messaging || h->index != engine->rounds - 1) {
        p->state_due = true;
        return;
    }
    size_t at;
    if (h->packet >= p->expects || h->length != fragment(engine, p->in_bytes, h->packet, &at)) {
        net->rejected.invalid++;
        return;
    }
    p->ack_due = true;
    if (h->packet < p->got_before || h->packet - p->got_before >= LOSSYNET_FRAGMENTS) return;
    uint64_t bit = (uint64_t)1 << (h->packet - p->got_before);
    if (p->got & bit) return;
    if (h->length) memcpy(p->in + at, payload, h->length);
    p->got |= bit;
    for (; p->got & 1; p->got >>= 1) p->got_before++;
}

static void receive_ack(struct lossynet *net, int peer, const struct wire_header *h,
                        const uint8_t *payload) {
    struct lossynet_engine *engine = net->engine;
    struct lossynet_peer *p = &engine->peers[peer];
    if (h->kind < 2) {
        if (h->index + 1 == engine->phase[h->kind].begun) p->to[h->kind].done_waits = false;
        return;
    }
    if (!engine->messaging || h->index != engine->rounds - 1 || h->length != WIRE_STATE_BYTES + 8 ||
        h->packet > p->fragments || h->packet < p->acked_before)
        return;
    uint64_t mask = wire_get(payload + WIRE_STATE_BYTES, 8);
    uint32_t forward = h->packet - p->acked_before;
    for (uint32_t i = 0; i < forward && i < LOSSYNET_FRAGMENTS; i++) /* the slot's next is new */
        p->sent_at[(p->acked_before + i) % LOSSYNET_FRAGMENTS] = 0;
    if (forward || (mask | p->acked) != p->acked) p->message.pause = LOSSYNET_RETRY;
    p->acked = (forward < 64 ? p->acked >> forward : 0) | mask;
    p->acked_before = h->packet;
}

void lossynet_reliable_receive(struct lossynet *net, int peer, const struct wire_header *h,
                               const uint8_t *payload) {
    struct lossynet_peer *p = &net->engine->peers[peer];
    if (h->type != WIRE_STATE && h->type != WIRE_PROBE) lossynet_engine_news(net->engine, p);
    if (h->type == WIRE_MESSAGE) {
        receive_fragment(net, peer, h, payload);
        return;
    }
    if (h->length < WIRE_STATE_BYTES) {
        net->rejected.invalid++;
        return;
    }
    if (h->type != WIRE_ABORT) take_state(net, peer, payload); /* what it sent is not complete */
    switch (h->type) {
    case WIRE_STATE:
        if (!later(h->packet, p->answered) || later(h->packet, net->engine->questions)) break;
        p->answered = h->packet;
        lossynet_engine_news(net->engine, p);
        break;
    case WIRE_PROBE:; /* what was sent before it and has not come is given up */
        uint32_t group_sent = (uint32_t)wire_get(payload + 28, 4);
        if (later(h->sequence, p->seen)) p->seen = h->sequence;
        if (later(group_sent, p->group_seen)) p->group_seen = group_sent;
        if (h->packet) p->echo = h->packet, p->answer_due = true;
        p->state_due = true;
        break;
    case WIRE_DONE:
        if (h->kind < 2)
            lossynet_stream_done(net, peer, h);
        else
            net->rejected.invalid++;
        break;
    case WIRE_ACK:
        receive_ack(net, peer, h, payload);
        break;
    case WIRE_ABORT:
        if (!net->engine->closing) lossynet_engine_fail(net, peer, "has failed");
        /* fall through */
    case WIRE_LEAVE:
        p->left = p->knows = p->left_due = true;
        break;
    case WIRE_LEFT:
        p->knows = true;
        break;
    }
}

/* ---- message rounds ---- */

static bool is_exchanged(const struct lossynet *net, int peer) {
    const struct lossynet_peer *p = &net->engine->peers[peer];
    return p->got_before == p->expects && all_acknowledged(net->engine, p);
}

bool lossynet_reliable_awaits(const struct lossynet *net, int peer) {
    return net->engine->messaging && !is_exchanged(net, peer);
}

static bool all_exchanged(struct lossynet *net, int unused) {
    (void)unused;
    bool received = true, all = true;
    for (int r = 0; r < net->world.ranks; r++) {
        if (r == net->world.rank) continue;
        const struct lossynet_peer *p = &net->engine->peers[r];
        received &= p->got_before == p->expects;
        all &= is_exchanged(net, r);
    }
    if (received && net->engine->complete != net->engine->rounds) {
        net->engine->complete = net->engine->rounds; /* from now on every state says so */
        for (int r = 0; r < net->world.ranks; r++) net->engine->peers[r].ack_due = true;
    }
    return all;
}

/* out: the part for rank r is bytes out_offset[r] ... out_offset[r + 1]; in: the part from it. */
static lossynet_status exchange(struct lossynet *net, const uint8_t *out, const size_t *out_offset,
                                bool same, uint8_t *in, const size_t *in_offset) {
    struct lossynet_engine *engine = net->engine;
    lossynet_engine_enter(net);
    engine->rounds++;
    engine->messaging = true;
    for (int r = 0; r < net->world.ranks; r++) {
        struct lossynet_peer *p = &engine->peers[r];
        int part = same ? net->world.rank : r;
        p->out = out + out_offset[part];
        p->in = in + in_offset[r];
        p->out_bytes = out_offset[part + 1] - out_offset[part];
        p->in_bytes = in_offset[r + 1] - in_offset[r];
        p->fragments = fragments(engine, p->out_bytes);
        p->expects = fragments(engine, p->in_bytes);
        p->acked_before = p->got_before = 0;
        p->acked = p->got = 0;
        memset(p->sent_at, 0, sizeof p->sent_at);
        p->message = lossynet_timer_from(lossynet_now());
    }
    lossynet_status status = lossynet_engine_until(net, all_exchanged, 0);
    if (!status) lossynet_reliable_push(net, lossynet_now()); /* our last acknowledgements */
    engine->messaging = false;
    lossynet_engine_leave(net);
    return status;
}

lossynet_status lossynet_swap(struct lossynet *net, const void *out, const size_t *out_offset,
                              void *in, const size_t *in_offset) {
    return exchange(net, out, out_offset, false, in, in_offset);
}

lossynet_status lossynet_gather(struct lossynet *net, void *data, const size_t *offset) {
    return exchange(net, data, offset, true, data, offset);
}
