/* stream_receive.c — the packets of a phase as they come, and the end of phases: see engine.h.
 *
 * Every field of a datagram is validated before any is believed. A gradient lands in the inbox and
 * sets its mask, a parameter lands in the vector and becomes fresh.
 */
#include "lossynet/stream.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* s, least deadline of a silent peer within a phase. Going on without it would gain little, since
 * every step needs one number from every rank; so this is longer than a busy machine may keep a rank
 * from running. */
static const double PATIENCE = 2;
static const double PATIENCE_SHARE = 0.2; /* or of the time after which a peer is dead */
static const double PATIENCE_PHASES = 8;  /* or so many times what phases take to wait for */

/* ---- injected loss ---- */

/* By multicast everything is sent: which of owner's parameters local worker v may take. */
static uint8_t *incoming(const struct lossynet *net, int v, int owner) {
    return net->incoming + (size_t)v * net->layout.packets + net->layout.owner_start[owner];
}

static void fill_incoming(const struct lossynet *net, bool lossless) {
#pragma omp parallel for collapse(2) num_threads(net->threads) schedule(static)
    for (int v = 0; v < net->local; v++) {
        for (int owner = 0; owner < net->workers; owner++) {
            if (lossynet_is_local(net, owner)) continue;
            size_t n = lossynet_layout_owner_packets(&net->layout, owner);
            uint8_t *mask = incoming(net, v, owner);
            lossynet_injected(net, LOSSYNET_PARAMETER, owner, net->first + v, n, lossless, mask);
        }
    }
}

/* ---- open ---- */

/* What every sender's buckets have in packets for this rank. */
static void expect(struct lossynet *net, int kind) {
    struct lossynet_engine *engine = net->engine;
    const struct lossynet_layout *layout = &net->layout;
    for (int b = 0; b < layout->buckets; b++) {
        size_t owned = 0;
        for (int v = 0; v < net->local; v++)
            owned += stream_shard_packets(layout, b, net->first + v);
        for (int w = 0; w < net->workers; w++) {
            size_t i = (size_t)b * net->workers + w, packets = owned;
            if (kind == LOSSYNET_PARAMETER)
                packets = stream_shard_packets(layout, b, w) *
                          (engine->multicast ? 1 : (size_t)net->local);
            engine->missing[kind][i] = lossynet_is_local(net, w) ? 0 : (uint32_t)packets;
            engine->passed[kind][i] = 0;
        }
        __atomic_store_n(&engine->bucket_over[kind][b], 0, __ATOMIC_RELEASE);
    }
    for (int w = 0; w < net->workers; w++) engine->reached[kind][w] = 0;
}

void lossynet_stream_open(struct lossynet *net, int kind, bool lossless) {
    struct lossynet_engine *engine = net->engine;
    if (stream_is_group(net, kind)) fill_incoming(net, lossless);
    lossynet_engine_enter(net);
    expect(net, kind);
    double now = lossynet_now();
    for (int r = 0; r < net->world.ranks; r++) {
        struct lossynet_inbound *from = &engine->peers[r].from[kind];
        *from = (struct lossynet_inbound){.over = r == net->world.rank,
                                          .told = from->next_told,
                                          .announced = from->next_announced,
                                          .last = now};
        engine->peers[r].state_due = r != net->world.rank;
    }
    engine->phase[kind].opened++;
    lossynet_reliable_push(net, now);
    lossynet_engine_leave(net);
}

/* ---- receiving ---- */

static bool fit(const struct lossynet *net, uint8_t elements) {
    return elements == stream_elements(&net->layout) ||
           (elements == WIRE_DEVICE_FLOAT32 && net->link->checks_payload &&
            !lossynet_rounds(&net->layout));
}

/* Judges what DATA says: the counter of what is wrong, or NULL. */
static uint64_t *reject(struct lossynet *net, const struct wire_header *h, const uint8_t *payload) {
    struct lossynet_engine *engine = net->engine;
    const struct lossynet_layout *layout = &net->layout;
    bool group = h->receiver == WIRE_EVERYONE;
    if (h->kind >= 2 || !fit(net, h->elements) || h->sender >= net->workers ||
        lossynet_is_local(net, h->sender) || h->bucket >= (uint32_t)layout->buckets ||
        group != (engine->multicast && h->kind == LOSSYNET_PARAMETER))
        return &net->rejected.invalid;
    int owner = h->kind == LOSSYNET_GRADIENT ? h->receiver : h->sender;
    size_t offset, count;
    if (h->packet >= stream_shard_packets(layout, (int)h->bucket, owner))
        return &net->rejected.invalid;
    lossynet_packet_span(layout, (int)h->bucket, owner, h->packet, &offset, &count);
    if (h->length != count * layout->element_bytes) return &net->rejected.invalid;

    const struct lossynet_sending *phase = &engine->phase[h->kind];
    if (h->index + 1 != phase->opened || phase->closed == phase->opened ||
        engine->peers[h->sender / net->local].from[h->kind].over)
        return &net->rejected.late;
    if (engine->bucket_over[h->kind][h->bucket]) return &net->rejected.late;
    if (!net->link->reliable && !lossynet_elements_are_finite(layout, payload, h->length))
        return &net->rejected.not_finite;
    return NULL;
}

/* DATA of the phase that has just ended was on its way for longer than we waited. */
static void learn_grace(struct lossynet *net, const struct wire_header *h) {
    struct lossynet_engine *engine = net->engine;
    const struct lossynet_sending *phase = &engine->phase[h->kind];
    if (h->index + 1 != phase->closed) return;
    double late = 2 * (engine->now - phase->closed_at);
    engine->grace = fmin(fmax(engine->grace, late), LOSSYNET_GRACE_MOST);
}

static bool take_gradient(struct lossynet *net, const struct wire_header *h,
                          const uint8_t *payload) {
    const struct lossynet_layout *layout = &net->layout;
    int v = h->receiver - net->first;
    size_t row = (size_t)h->receiver * (layout->buckets + 1) + h->bucket;
    uint8_t *arrived = lossynet_arrived(net, v, h->sender) + layout->owner_packet[row] + h->packet;
    if (*arrived) return false;
    *arrived = 1;
    float *to = lossynet_inbox(net, v, h->sender) + layout->owner_element[row];
    lossynet_elements_unpack(layout, to + (size_t)h->packet * layout->packet_elements, payload,
                             h->length / layout->element_bytes);
    return true;
}

static bool take_parameter(struct lossynet *net, const struct wire_header *h, int v,
                           const uint8_t *payload) {
    const struct lossynet_layout *layout = &net->layout;
    size_t shard = (size_t)h->bucket * net->workers + h->sender, offset, count;
    uint32_t *age =
        net->age + (size_t)v * layout->packets + layout->shard_packet[shard] + h->packet;
    if (*age == 0) return false; /* all that is not one's own grew older before the phase */
    *age = 0;
    lossynet_packet_span(layout, (int)h->bucket, h->sender, h->packet, &offset, &count);
    float *to = net->engine->phase[LOSSYNET_PARAMETER].vectors[v] + offset;
    lossynet_elements_unpack(layout, to, payload, count);
    return true;
}

static bool take_multicast(struct lossynet *net, const struct wire_header *h,
                           const uint8_t *payload) {
    size_t packet = stream_packets_before(&net->layout, (int)h->bucket, h->sender) + h->packet;
    int wanted = 0, taken = 0;
    for (int v = 0; v < net->local; v++) {
        if (!incoming(net, v, h->sender)[packet]) continue;
        wanted++;
        taken += take_parameter(net, h, v, payload);
    }
    return taken > 0 || wanted == 0;
}

/* A bucket of this sender begins to come: those before it will not. */
static void reach(struct lossynet *net, const struct wire_header *h) {
    struct lossynet_engine *engine = net->engine;
    int order = stream_bucket_at(net, h->kind, (int)h->bucket); /* its own inverse */
    size_t i = (size_t)h->bucket * net->workers + h->sender;
    if (engine->missing[h->kind][i] > 0) engine->missing[h->kind][i]--;
    for (int *at = &engine->reached[h->kind][h->sender]; *at < order; ++*at)
        engine->passed[h->kind][(size_t)stream_bucket_at(net, h->kind, *at) * net->workers +
                                h->sender] = engine->now;
}

static void judge_peer(struct lossynet *net, int kind, int peer);

void lossynet_stream_receive(struct lossynet *net, int peer, const struct wire_header *h,
                             const uint8_t *payload) {
    struct lossynet_engine *engine = net->engine;
    struct lossynet_peer *p = &engine->peers[peer];
    uint32_t *seen = h->receiver == WIRE_EVERYONE ? &p->group_seen : &p->seen;
    if ((int32_t)(h->sequence + 1 - *seen) > 0) *seen = h->sequence + 1;
    p->came++;
    if (++p->unsaid >= ((uint32_t)engine->window + 3) / 4) p->state_due = true;
    uint64_t *wrong = engine->failed ? &net->rejected.late : reject(net, h, payload);
    if (wrong) {
        ++*wrong;
        if (wrong == &net->rejected.late) learn_grace(net, h);
        return;
    }
    bool fresh = h->kind == LOSSYNET_GRADIENT ? take_gradient(net, h, payload)
                 : h->receiver == WIRE_EVERYONE
                     ? take_multicast(net, h, payload)
                     : take_parameter(net, h, h->receiver - net->first, payload);
    if (!fresh) {
        net->rejected.duplicate++;
        return;
    }
    lossynet_engine_news(engine, p);
    p->from[h->kind].received++;
    p->from[h->kind].last = engine->now;
    reach(net, h);
    judge_peer(net, h->kind, peer);
}

void lossynet_stream_done(struct lossynet *net, int peer, const struct wire_header *h) {
    struct lossynet_engine *engine = net->engine;
    struct lossynet_inbound *from = &engine->peers[peer].from[h->kind];
    uint32_t opened = engine->phase[h->kind].opened;
    if (h->index == opened) { /* we have not opened it, so that nothing was sent */
        from->next_told = true;
        from->next_announced = h->packet;
    } else if (h->index + 1 == opened) {
        from->told = true;
        from->announced = h->packet;
        judge_peer(net, h->kind, peer);
    } else if ((int32_t)(h->index - opened) > 0) {
        return; /* nobody is so far ahead */
    }
    lossynet_reliable_tell(net, peer, WIRE_ACK, h->kind, h->index, 0);
}

/* ---- the end ---- */

/* Ends a peer's phase to us when it is over. */
static void judge_peer(struct lossynet *net, int kind, int peer) {
    struct lossynet_engine *engine = net->engine;
    struct lossynet_peer *p = &engine->peers[peer];
    struct lossynet_sending *phase = &engine->phase[kind];
    struct lossynet_inbound *from = &p->from[kind];
    if (from->over || phase->opened == phase->closed) return;
    bool all = from->told && (uint32_t)from->received == from->announced;
    if (net->link->reliable) {
        from->over = from->told;
        if (from->told && !all) {
            lossynet_log("rank %d, step %" PRIu64 ": rank %d sent %" PRIu32 " packets, %" PRIu64
                         " arrived over a link that loses none",
                         net->world.rank, lossynet_engine_step(net), peer, from->announced,
                         from->received);
            if (!engine->failed) engine->failed = LOSSYNET_PROTOCOL;
        }
        return;
    }
    bool ended = from->told || (int32_t)(p->finished[kind] - phase->opened) >= 0;
    if (ended && from->ended == 0) {
        from->ended = engine->now;
        from->question = ++engine->questions;
        from->ask = lossynet_timer_at_once();
    }
    bool quiet = ended && engine->empty - fmax(from->last, from->ended) > engine->grace;
    /* Whoever has left answers no more; all that it sent is on its way. */
    bool answered = ended && (p->left || (int32_t)(p->answered - from->question) >= 0);
    from->over = all || (quiet && answered);
    if (ended && !answered && !from->over &&
        lossynet_timer_is_due(engine, p, &from->ask, engine->now))
        lossynet_reliable_tell(net, peer, WIRE_PROBE, 0, 0, from->question);
}

static double patience(const struct lossynet_engine *engine, const struct lossynet_sending *phase) {
    const double least = fmax(PATIENCE, PATIENCE_SHARE * engine->peer_timeout);
    return fmax(least, PATIENCE_PHASES * phase->seconds);
}

void lossynet_stream_judge(struct lossynet *net) {
    struct lossynet_engine *engine = net->engine;
    if (net->link->reliable) return;
    for (int kind = 0; kind < 2; kind++) {
        struct lossynet_sending *phase = &engine->phase[kind];
        for (int r = 0; r < net->world.ranks; r++) {
            struct lossynet_peer *p = &engine->peers[r];
            if (r == net->world.rank) continue;
            judge_peer(net, kind, r);
            if (lossynet_engine_silence(engine, r) <= patience(engine, phase)) continue;
            if (phase->awaited && !p->from[kind].over) {
                p->from[kind].over = true;
                net->stragglers++;
            }
            if (phase->begun > 0 && !p->to[kind].complete && p->blocked)
                stream_complete(&p->to[kind]); /* what is left is lost */
        }
    }
}

bool lossynet_stream_awaits(const struct lossynet *net, int peer) {
    for (int kind = 0; kind < 2; kind++)
        if (net->engine->phase[kind].awaited && !net->engine->peers[peer].from[kind].over)
            return true;
    return false;
}

static bool all_left(struct lossynet *net, int kind) {
    const struct lossynet_peer *peers = net->engine->peers;
    for (int r = 0; r < net->world.ranks; r++) {
        const struct lossynet_outbound *to = &peers[r].to[kind];
        if (r == net->world.rank) continue;
        if (!to->complete && net->engine->phase[kind].begun > 0) return false;
        if (net->link->reliable && to->done_waits) return false; /* MPI: all has arrived */
    }
    return true;
}

static bool all_over(struct lossynet *net, int kind) {
    for (int r = 0; r < net->world.ranks; r++)
        if (!net->engine->peers[r].from[kind].over) return false;
    return true;
}

static bool phase_over(struct lossynet *net, int kind) {
    return all_over(net, kind) && all_left(net, kind);
}

static bool bucket_over(struct lossynet *net, int kind, int bucket) {
    struct lossynet_engine *engine = net->engine;
    for (int w = 0; w < net->workers; w++) {
        size_t i = (size_t)bucket * net->workers + w;
        if (engine->missing[kind][i] == 0 || lossynet_is_local(net, w)) continue;
        if (engine->peers[w / net->local].from[kind].over) continue;
        double passed = engine->passed[kind][i];
        if (net->link->reliable || passed == 0 || engine->empty - passed <= engine->grace)
            return false;
    }
    return true;
}

static bool gradient_over(struct lossynet *net, int bucket) {
    return bucket_over(net, LOSSYNET_GRADIENT, bucket);
}

static bool parameter_over(struct lossynet *net, int bucket) {
    return bucket_over(net, LOSSYNET_PARAMETER, bucket);
}

static lossynet_status await(struct lossynet *net, int kind, bool (*over)(struct lossynet *, int),
                             int argument) {
    struct lossynet_sending *phase = &net->engine->phase[kind];
    double start = lossynet_now();
    phase->awaited = true;
    lossynet_status status = lossynet_engine_until(net, over, argument);
    phase->awaited = false;
    double seconds = lossynet_now() - start;
    phase->seconds += phase->seconds > 0 ? 0.25 * (seconds - phase->seconds) : seconds;
    return status;
}

/* Vectors may change: nothing reads them any longer. */
static void settle(struct lossynet *net) {
    if (net->link->settle) net->link->settle(net->link);
}

lossynet_status lossynet_stream_end(struct lossynet *net, int kind) {
    struct lossynet_sending *phase = &net->engine->phase[kind];
    lossynet_engine_enter(net);
    lossynet_status status = await(net, kind, phase_over, kind);
    settle(net);
    phase->closed = phase->opened;
    phase->closed_at = lossynet_now();
    net->engine->grace = fmax(LOSSYNET_GRACE, 0.98 * net->engine->grace);
    lossynet_engine_leave(net);
    return status;
}

lossynet_status lossynet_stream_bucket(struct lossynet *net, int kind, int bucket) {
    lossynet_engine_enter(net);
    lossynet_status status =
        await(net, kind, kind == LOSSYNET_GRADIENT ? gradient_over : parameter_over, bucket);
    __atomic_store_n(&net->engine->bucket_over[kind][bucket], 1, __ATOMIC_RELEASE);
    lossynet_engine_leave(net);
    return status;
}

lossynet_status lossynet_stream_drain(struct lossynet *net) {
    lossynet_engine_enter(net);
    lossynet_status status = lossynet_engine_until(net, all_left, LOSSYNET_PARAMETER);
    settle(net);
    lossynet_engine_leave(net);
    return status;
}
