/* stream_send.c — the packets of a phase, each sent once: see engine.h.
 *
 * Sending goes from peer to peer, a batch each, starting with the next rank, so that no receiver is
 * hit by all senders at once. A peer that cannot take a batch yet is waited for: were it passed over,
 * senders would drift to the receiver that answers best, and meet there until the switch drops what
 * it cannot hold. To each peer the local workers take turns, and of each worker the buckets leave in
 * the phase's order: GRADIENT in the order in which backward finishes them, PARAMETER in the opposite
 * one, in which the next forward needs them. Packets that injected loss takes are not sent; by
 * multicast, the receiver drops them.
 */
#include "lossynet/stream.h"

#include <math.h>
#include <string.h>

static const double TURN = 0.3; /* s, longest wait for a peer whose turn it is */

/* ---- injected loss ---- */

/* Which of the packets from local worker v to worker `receiver` survive, in order of (bucket,
 * packet): the receiver's shards in phase GRADIENT, the sender's in phase PARAMETER. */
static uint8_t *outgoing(const struct lossynet *net, int kind, int v, int receiver,
                         size_t *packets) {
    const struct lossynet_layout *layout = &net->layout;
    if (kind == LOSSYNET_GRADIENT) {
        *packets = lossynet_layout_owner_packets(layout, receiver);
        return net->outgoing[kind] + (size_t)v * layout->packets + layout->owner_start[receiver];
    }
    *packets = lossynet_layout_owner_packets(layout, net->first + v);
    return net->outgoing[kind] + net->outgoing_start[v] + (size_t)receiver * *packets;
}

static void fill_outgoing(const struct lossynet *net, int kind, bool lossless) {
#pragma omp parallel for collapse(2) num_threads(net->threads) schedule(static)
    for (int v = 0; v < net->local; v++) {
        for (int receiver = 0; receiver < net->workers; receiver++) {
            if (lossynet_is_local(net, receiver)) continue;
            size_t n;
            uint8_t *mask = outgoing(net, kind, v, receiver, &n);
            lossynet_injected(net, (lossynet_phase)kind, net->first + v, receiver, n, lossless,
                              mask);
        }
    }
}

/* ---- begin ---- */

void lossynet_stream_begin(struct lossynet *net, int kind, float *const *vectors, bool lossless) {
    struct lossynet_engine *engine = net->engine;
    struct lossynet_sending *phase = &engine->phase[kind];
    if (!stream_is_group(net, kind))
        fill_outgoing(net, kind, lossless); /* nothing of it is on its way */
    lossynet_engine_enter(net);
    phase->vectors = vectors;
    phase->begun++;
    memset(phase->position, 0,
           (size_t)net->world.ranks * (size_t)net->local * sizeof *phase->position);
    for (int v = 0; v < net->local; v++) __atomic_store_n(&phase->ready[v], 0, __ATOMIC_RELEASE);
    for (int r = 0; r < net->world.ranks; r++)
        engine->peers[r].to[kind] = (struct lossynet_outbound){.complete = r == net->world.rank};
    if (stream_is_group(net, kind)) {
        memset(engine->group_position, 0, (size_t)net->local * sizeof *engine->group_position);
        engine->group = (struct lossynet_outbound){0};
    }
    lossynet_engine_leave(net);
}

void lossynet_stream_ready(struct lossynet *net, int kind) {
    int *ready = net->engine->phase[kind].ready;
    for (int v = 0; v < net->local; v++)
        __atomic_store_n(&ready[v], net->layout.buckets, __ATOMIC_RELEASE);
    if (net->engine->threaded) net->link->wake(net->link);
}

void lossynet_bucket_ready(struct lossynet *net, int worker, int bucket) {
    if (!net->engine || !net->reducing) return;
    struct lossynet_sending *phase = &net->engine->phase[LOSSYNET_GRADIENT];
    int *ready = phase->ready, v = worker - net->first;
    lossynet_carry_add(net, v, phase->vectors[v], bucket);
    __atomic_store_n(&ready[v], bucket + 1, __ATOMIC_RELEASE);
    if (net->engine->threaded) net->link->wake(net->link);
}

/* ---- sending ---- */

/* A packet's elements as they travel: where they are, or rounded in the memory of datagram n. */
static const void *payload(const struct lossynet *net, int n, const float *elements, size_t count) {
    const struct lossynet_layout *layout = &net->layout;
    if (!lossynet_rounds(layout)) return elements;
    uint16_t *rounded = net->engine->rounded + (size_t)n * layout->packet_elements;
    lossynet_elements_pack(rounded, elements, count);
    return rounded;
}

/* The next packets of local worker v for a rank, at most `most`, from `at` on; of those ready. */
static int fill_worker(struct lossynet *net, int kind, int rank, int v,
                       struct lossynet_position *at, int n, int most) {
    struct lossynet_engine *engine = net->engine;
    struct lossynet_sending *phase = &engine->phase[kind];
    const struct lossynet_layout *layout = &net->layout;
    bool group = rank == LOSSYNET_EVERYONE;
    const struct lossynet_elsewhere *elsewhere = &engine->elsewhere[v];
    bool device = kind == LOSSYNET_GRADIENT && elsewhere->vector == phase->vectors[v];
    const float *vector = device ? elsewhere->there : phase->vectors[v];
    int ready = __atomic_load_n(&phase->ready[v], __ATOMIC_ACQUIRE);
    int receivers = group ? 1 : net->local, sender = net->first + v;
    for (; at->bucket < ready; at->bucket++, at->receiver = 0) {
        int bucket = stream_bucket_at(net, kind, at->bucket);
        for (; at->receiver < receivers; at->receiver++, at->packet = 0) {
            int receiver = group ? WIRE_EVERYONE : rank * net->local + at->receiver;
            int owner = kind == LOSSYNET_GRADIENT ? receiver : sender;
            size_t packets = stream_shard_packets(layout, bucket, owner), all;
            const uint8_t *survives = group ? NULL
                                            : outgoing(net, kind, v, receiver, &all) +
                                                  stream_packets_before(layout, bucket, owner);
            for (; at->packet < packets; at->packet++) {
                if (survives && !survives[at->packet]) continue;
                if (n == most) return n;
                size_t offset, count;
                lossynet_packet_span(layout, bucket, owner, at->packet, &offset, &count);
                struct wire_header h = {.magic = WIRE_MAGIC,
                                        .version = WIRE_VERSION,
                                        .type = WIRE_DATA,
                                        .kind = (uint8_t)kind,
                                        .elements =
                                            device ? WIRE_DEVICE_FLOAT32 : stream_elements(layout),
                                        .run = (uint32_t)engine->run,
                                        .sender = (uint16_t)sender,
                                        .receiver = (uint16_t)receiver,
                                        .bucket = (uint32_t)bucket,
                                        .packet = (uint32_t)at->packet,
                                        .index = phase->begun - 1};
                wire_encode(engine->batch[n].header, &h);
                engine->batch[n].payload = payload(net, n, vector + offset, count);
                engine->batch[n].bulk = true;
                engine->batch[n].device = device;
                engine->batch[n++].length = count * layout->element_bytes;
            }
        }
    }
    return n;
}

/* Fills engine->batch with up to `most` datagrams; sets `complete` when nothing will follow. */
static int fill(struct lossynet *net, int kind, int rank, struct lossynet_outbound *to,
                struct lossynet_position *position, int most) {
    int n = 0, finished = 0;
    for (int i = 0; i < net->local; i++) {
        int v = (to->next + i) % net->local;
        if (n < most) n = fill_worker(net, kind, rank, v, &position[v], n, most);
        finished += position[v].bucket >= net->layout.buckets;
    }
    to->next = (to->next + 1) % net->local;
    to->complete = finished == net->local;
    return n;
}

/* Anything ready and not sent yet? */
static bool has_more(const struct lossynet *net, int kind,
                     const struct lossynet_position *position) {
    for (int v = 0; v < net->local; v++)
        if (position[v].bucket <
            __atomic_load_n(&net->engine->phase[kind].ready[v], __ATOMIC_ACQUIRE))
            return true;
    return false;
}

/* Hands engine->batch[0 ... n-1] over, numbered from *sequence on. */
static void send_batch(struct lossynet *net, int peer, int n, uint32_t *sequence) {
    for (int i = 0; i < n; i++)
        wire_put(net->engine->batch[i].header + WIRE_SEQUENCE_AT, (*sequence)++, 4);
    if (n > 0) lossynet_engine_send(net, peer, net->engine->batch, n);
}

/* How many datagrams a window lets through: not a trickle, unless it is all there is. */
static int room(const struct lossynet_peer *p, uint32_t sent, uint32_t credit, int most) {
    int free = p->window - (int)(sent - credit), least = p->window / 4;
    if (least > most / 2) least = most / 2;
    if (free < least) return 0;
    return free < most ? free : most;
}

static size_t full_bytes(const struct lossynet *net, int n) {
    size_t packet = WIRE_HEADER_BYTES + net->layout.packet_elements * net->layout.element_bytes;
    return packet * (size_t)n;
}

/* What pacing has counted and was not sent. */
static void give_back(struct lossynet *net, int n) {
    lossynet_pace_unused(net->engine, full_bytes(net, n));
}

/* One batch of a phase to one peer. True when something left. */
static bool push_peer(struct lossynet *net, int kind, int rank, double *wait) {
    struct lossynet_engine *engine = net->engine;
    struct lossynet_peer *p = &engine->peers[rank];
    struct lossynet_outbound *to = &p->to[kind];
    struct lossynet_sending *phase = &engine->phase[kind];
    struct lossynet_position *position = phase->position + (size_t)rank * net->local;
    if (phase->begun == 0 || to->complete || !has_more(net, kind, position)) return false;
    bool open = (int32_t)(p->open[kind] - phase->begun) >= 0;
    int most = open ? room(p, p->sent, p->credit, engine->pace.batch) : 0;
    if (most == 0) {
        p->blocked = true;
        return false;
    }
    double pause = lossynet_pace_wait(engine, full_bytes(net, most));
    if (pause > 0) {
        *wait = fmin(*wait, pause);
        return false;
    }
    int n = fill(net, kind, rank, to, position, most);
    give_back(net, most - n);
    if (p->sent == p->credit) p->credited = engine->now;
    send_batch(net, rank, n, &p->sent);
    to->sent += (uint32_t)n;
    if (to->complete) stream_complete(to);
    return n > 0;
}

/* One batch of parameters to everybody. */
static bool push_group(struct lossynet *net, double *wait) {
    struct lossynet_engine *engine = net->engine;
    struct lossynet_sending *phase = &engine->phase[LOSSYNET_PARAMETER];
    struct lossynet_outbound *to = &engine->group;
    if (phase->begun == 0 || to->complete ||
        !has_more(net, LOSSYNET_PARAMETER, engine->group_position))
        return false;
    int most = engine->pace.batch;
    for (int r = 0; r < net->world.ranks; r++) {
        struct lossynet_peer *p = &engine->peers[r];
        if (r == net->world.rank || p->to[LOSSYNET_PARAMETER].complete) continue;
        bool open = (int32_t)(p->open[LOSSYNET_PARAMETER] - phase->begun) >= 0;
        int free = open ? room(p, engine->group_sent, p->group_credit, engine->pace.batch) : 0;
        if (free == 0) p->blocked = true;
        if (free < most) most = free;
    }
    if (most == 0) return false;
    double pause = lossynet_pace_wait(engine, full_bytes(net, most));
    if (pause > 0) {
        *wait = fmin(*wait, pause);
        return false;
    }
    int n = fill(net, LOSSYNET_PARAMETER, LOSSYNET_EVERYONE, to, engine->group_position, most);
    give_back(net, most - n);
    send_batch(net, LOSSYNET_EVERYONE, n, &engine->group_sent);
    to->sent += (uint32_t)n;
    for (int r = 0; to->complete && r < net->world.ranks; r++)
        if (!engine->peers[r].to[LOSSYNET_PARAMETER].complete)
            stream_complete(&engine->peers[r].to[LOSSYNET_PARAMETER]);
    return n > 0;
}

bool lossynet_stream_push(struct lossynet *net, double *wait) {
    struct lossynet_engine *engine = net->engine;
    int others = net->world.ranks - 1;
    bool any = false, paused = false;
    if (engine->failed) return false; /* the caller knows, and may have freed its vectors */
    for (int r = 0; r < net->world.ranks; r++) engine->peers[r].blocked = false;
    if (engine->multicast) any |= push_group(net, wait);
    for (int i = 0; i < others && !paused; i++) {
        int distance = 1 + (engine->first + i) % others;
        int rank = (net->world.rank + distance) % net->world.ranks;
        double before = *wait;
        for (int kind = LOSSYNET_PARAMETER; kind >= 0; kind--)
            if (!stream_is_group(net, kind)) any |= push_peer(net, kind, rank, wait);
        const struct lossynet_peer *p = &engine->peers[rank];
        paused = *wait < before || (p->blocked && engine->now - p->credited < TURN);
        if (paused) engine->first = distance - 1; /* this peer's turn comes first */
    }
    return any;
}
