/* stream.c — the packets of a phase, each sent once: see engine.h.
 *
 * Sending   goes from peer to peer, a batch each, starting with the next rank, so that no receiver
 *           is hit by all senders at once. A peer that cannot take a batch yet is waited for: were
 *           it passed over, senders would drift to the receiver that answers best, and meet there
 *           until the switch drops what it cannot hold. To each peer the local workers take turns,
 *           and of each worker the buckets leave in the phase's order: GRADIENT in the order in
 *           which backward finishes them, PARAMETER in the opposite one, in which the next forward
 *           needs them. Packets that injected loss takes are not sent; by multicast, the receiver
 *           drops them.
 * Receiving validates every field of a datagram before it believes any. A gradient lands in the
 *           inbox and sets its mask, a parameter lands in the vector and becomes fresh.
 */
#include "lossynet/engine.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* s, least deadline of a silent peer within a phase. Going on without it would gain little, since
 * every step needs one number from every rank; so this is longer than a busy machine may keep a rank
 * from running. */
static const double PATIENCE = 2;
static const double TURN = 0.3;          /* s, longest wait for a peer whose turn it is */
static const double PATIENCE_PHASES = 8; /* or so many times what phases take to wait for */

/* ---- order and place ---- */

/* The bucket that leaves as number `order` of its phase, and the other way round. */
static int bucket_at(const struct lossynet *net, int kind, int order) {
    return kind == LOSSYNET_GRADIENT ? order : net->layout.buckets - 1 - order;
}

/* Where a packet's elements are. */
static void packet_span(const struct lossynet_layout *layout, int bucket, int owner, size_t packet,
                        size_t *offset, size_t *count) {
    size_t shard = (size_t)bucket * layout->workers + owner;
    size_t end = layout->shard_element[shard + 1];
    *offset = layout->shard_element[shard] + packet * layout->packet_elements;
    *count = end - *offset < layout->packet_elements ? end - *offset : layout->packet_elements;
}

static size_t shard_packets(const struct lossynet_layout *layout, int bucket, int owner) {
    size_t shard = (size_t)bucket * layout->workers + owner;
    return layout->shard_packet[shard + 1] - layout->shard_packet[shard];
}

/* The owner's packets in buckets before this one. */
static size_t packets_before(const struct lossynet_layout *layout, int bucket, int owner) {
    return layout->owner_packet[(size_t)owner * (layout->buckets + 1) + bucket];
}

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

/* ---- begin and open ---- */

static bool is_group(const struct lossynet *net, int kind) {
    return net->engine->multicast && kind == LOSSYNET_PARAMETER;
}

void lossynet_stream_begin(struct lossynet *net, int kind, float *const *vectors, bool lossless) {
    struct lossynet_engine *engine = net->engine;
    struct lossynet_sending *phase = &engine->phase[kind];
    if (!is_group(net, kind)) fill_outgoing(net, kind, lossless); /* nothing of it is on its way */
    lossynet_engine_enter(net);
    phase->vectors = vectors;
    phase->begun++;
    memset(phase->position, 0,
           (size_t)net->world.ranks * (size_t)net->local * sizeof *phase->position);
    for (int v = 0; v < net->local; v++) __atomic_store_n(&phase->ready[v], 0, __ATOMIC_RELEASE);
    for (int r = 0; r < net->world.ranks; r++)
        engine->peers[r].to[kind] = (struct lossynet_outbound){.complete = r == net->world.rank};
    if (is_group(net, kind)) {
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
    int *ready = net->engine->phase[LOSSYNET_GRADIENT].ready;
    __atomic_store_n(&ready[worker - net->first], bucket + 1, __ATOMIC_RELEASE);
    if (net->engine->threaded) net->link->wake(net->link);
}

/* What every sender's buckets have in packets for this rank. */
static void expect(struct lossynet *net, int kind) {
    struct lossynet_engine *engine = net->engine;
    const struct lossynet_layout *layout = &net->layout;
    for (int b = 0; b < layout->buckets; b++) {
        size_t owned = 0;
        for (int v = 0; v < net->local; v++) owned += shard_packets(layout, b, net->first + v);
        for (int w = 0; w < net->workers; w++) {
            size_t i = (size_t)b * net->workers + w, packets = owned;
            if (kind == LOSSYNET_PARAMETER)
                packets =
                    shard_packets(layout, b, w) * (engine->multicast ? 1 : (size_t)net->local);
            engine->missing[kind][i] = lossynet_is_local(net, w) ? 0 : (uint32_t)packets;
            engine->passed[kind][i] = 0;
        }
        __atomic_store_n(&engine->bucket_over[kind][b], 0, __ATOMIC_RELEASE);
    }
    for (int w = 0; w < net->workers; w++) engine->reached[kind][w] = 0;
}

void lossynet_stream_open(struct lossynet *net, int kind, bool lossless) {
    struct lossynet_engine *engine = net->engine;
    if (is_group(net, kind)) fill_incoming(net, lossless);
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

/* ---- sending ---- */

/* The next packets of local worker v for a rank, at most `most`, from `at` on; of those ready. */
static int fill_worker(struct lossynet *net, int kind, int rank, int v,
                       struct lossynet_position *at, int n, int most) {
    struct lossynet_engine *engine = net->engine;
    struct lossynet_sending *phase = &engine->phase[kind];
    const struct lossynet_layout *layout = &net->layout;
    bool group = rank == LOSSYNET_EVERYONE;
    int ready = __atomic_load_n(&phase->ready[v], __ATOMIC_ACQUIRE);
    int receivers = group ? 1 : net->local, sender = net->first + v;
    for (; at->bucket < ready; at->bucket++, at->receiver = 0) {
        int bucket = bucket_at(net, kind, at->bucket);
        for (; at->receiver < receivers; at->receiver++, at->packet = 0) {
            int receiver = group ? WIRE_EVERYONE : rank * net->local + at->receiver;
            int owner = kind == LOSSYNET_GRADIENT ? receiver : sender;
            size_t packets = shard_packets(layout, bucket, owner), all;
            const uint8_t *survives = group ? NULL
                                            : outgoing(net, kind, v, receiver, &all) +
                                                  packets_before(layout, bucket, owner);
            for (; at->packet < packets; at->packet++) {
                if (survives && !survives[at->packet]) continue;
                if (n == most) return n;
                size_t offset, count;
                packet_span(layout, bucket, owner, at->packet, &offset, &count);
                struct wire_header h = {.magic = WIRE_MAGIC,
                                        .version = WIRE_VERSION,
                                        .type = WIRE_DATA,
                                        .kind = (uint8_t)kind,
                                        .run = (uint32_t)engine->run,
                                        .sender = (uint16_t)sender,
                                        .receiver = (uint16_t)receiver,
                                        .bucket = (uint32_t)bucket,
                                        .packet = (uint32_t)at->packet,
                                        .index = phase->begun - 1};
                wire_encode(engine->batch[n].header, &h);
                engine->batch[n].payload = phase->vectors[v] + offset;
                engine->batch[n].bulk = true;
                engine->batch[n++].length = count * sizeof(float);
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

static void complete(struct lossynet_outbound *to) {
    to->complete = true;
    to->done_waits = true;
    to->done = lossynet_timer_from(0);
}

/* How many datagrams a window lets through: not a trickle, unless it is all there is. */
static int room(const struct lossynet_peer *p, uint32_t sent, uint32_t credit) {
    int free = p->window - (int)(sent - credit), least = p->window / 4;
    if (least > LOSSYNET_BATCH / 2) least = LOSSYNET_BATCH / 2;
    if (free < least) return 0;
    return free < LOSSYNET_BATCH ? free : LOSSYNET_BATCH;
}

static size_t full_bytes(const struct lossynet *net, int n) {
    size_t packet = WIRE_HEADER_BYTES + net->layout.packet_elements * sizeof(float);
    return packet * (size_t)n;
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
    int most = open ? room(p, p->sent, p->credit) : 0;
    if (most == 0) {
        p->blocked = true;
        return false;
    }
    double pause = lossynet_engine_pace(engine, full_bytes(net, most));
    if (pause > 0) {
        *wait = fmin(*wait, pause);
        return false;
    }
    int n = fill(net, kind, rank, to, position, most);
    if (n < most) engine->tokens += (double)full_bytes(net, most - n) * (engine->rate > 0);
    if (p->sent == p->credit) p->credited = engine->now;
    send_batch(net, rank, n, &p->sent);
    to->sent += (uint32_t)n;
    if (to->complete) complete(to);
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
    int most = LOSSYNET_BATCH;
    for (int r = 0; r < net->world.ranks; r++) {
        struct lossynet_peer *p = &engine->peers[r];
        if (r == net->world.rank || p->to[LOSSYNET_PARAMETER].complete) continue;
        bool open = (int32_t)(p->open[LOSSYNET_PARAMETER] - phase->begun) >= 0;
        int free = open ? room(p, engine->group_sent, p->group_credit) : 0;
        if (free == 0) p->blocked = true;
        if (free < most) most = free;
    }
    if (most == 0) return false;
    double pause = lossynet_engine_pace(engine, full_bytes(net, most));
    if (pause > 0) {
        *wait = fmin(*wait, pause);
        return false;
    }
    int n = fill(net, LOSSYNET_PARAMETER, LOSSYNET_EVERYONE, to, engine->group_position, most);
    send_batch(net, LOSSYNET_EVERYONE, n, &engine->group_sent);
    to->sent += (uint32_t)n;
    for (int r = 0; to->complete && r < net->world.ranks; r++)
        if (!engine->peers[r].to[LOSSYNET_PARAMETER].complete)
            complete(&engine->peers[r].to[LOSSYNET_PARAMETER]);
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
            if (!is_group(net, kind)) any |= push_peer(net, kind, rank, wait);
        const struct lossynet_peer *p = &engine->peers[rank];
        paused = *wait < before || (p->blocked && engine->now - p->credited < TURN);
        if (paused) engine->first = distance - 1; /* this peer's turn comes first */
    }
    return any;
}

/* ---- receiving ---- */

/* A payload that a wire has changed may hold what no computation survives. */
static bool is_finite(const uint8_t *payload, size_t bytes) {
    const uint32_t exponent = 0x7f800000;
    uint32_t wrong = 0;
    for (size_t i = 0; i < bytes; i += sizeof(float)) {
        uint32_t bits;
        memcpy(&bits, payload + i, sizeof bits);
        wrong |= (bits & exponent) == exponent;
    }
    return !wrong;
}

/* Judges what DATA says: the counter of what is wrong, or NULL. */
static uint64_t *reject(struct lossynet *net, const struct wire_header *h, const uint8_t *payload) {
    struct lossynet_engine *engine = net->engine;
    const struct lossynet_layout *layout = &net->layout;
    bool group = h->receiver == WIRE_EVERYONE;
    if (h->kind >= 2 || h->sender >= net->workers || lossynet_is_local(net, h->sender) ||
        h->bucket >= (uint32_t)layout->buckets ||
        group != (engine->multicast && h->kind == LOSSYNET_PARAMETER))
        return &net->rejected.invalid;
    int owner = h->kind == LOSSYNET_GRADIENT ? h->receiver : h->sender;
    size_t offset, count;
    if (h->packet >= shard_packets(layout, (int)h->bucket, owner)) return &net->rejected.invalid;
    packet_span(layout, (int)h->bucket, owner, h->packet, &offset, &count);
    if (h->length != count * sizeof(float)) return &net->rejected.invalid;

    const struct lossynet_sending *phase = &engine->phase[h->kind];
    if (h->index + 1 != phase->opened || phase->closed == phase->opened ||
        engine->peers[h->sender / net->local].from[h->kind].over)
        return &net->rejected.late;
    if (engine->bucket_over[h->kind][h->bucket]) return &net->rejected.late;
    if (!net->link->reliable && !is_finite(payload, h->length)) return &net->rejected.not_finite;
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
    memcpy(lossynet_inbox(net, v, h->sender) + layout->owner_element[row] +
               (size_t)h->packet * layout->packet_elements,
           payload, h->length);
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
    packet_span(layout, (int)h->bucket, h->sender, h->packet, &offset, &count);
    memcpy(net->engine->phase[LOSSYNET_PARAMETER].vectors[v] + offset, payload, h->length);
    return true;
}

static bool take_multicast(struct lossynet *net, const struct wire_header *h,
                           const uint8_t *payload) {
    size_t packet = packets_before(&net->layout, (int)h->bucket, h->sender) + h->packet;
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
    int order = bucket_at(net, h->kind, (int)h->bucket); /* its own inverse */
    size_t i = (size_t)h->bucket * net->workers + h->sender;
    if (engine->missing[h->kind][i] > 0) engine->missing[h->kind][i]--;
    for (int *at = &engine->reached[h->kind][h->sender]; *at < order; ++*at)
        engine->passed[h->kind][(size_t)bucket_at(net, h->kind, *at) * net->workers + h->sender] =
            engine->now;
}

static void judge_peer(struct lossynet *net, int kind, int peer);

void lossynet_stream_receive(struct lossynet *net, int peer, const struct wire_header *h,
                             const uint8_t *payload) {
    struct lossynet_engine *engine = net->engine;
    struct lossynet_peer *p = &engine->peers[peer];
    uint32_t *seen = h->receiver == WIRE_EVERYONE ? &p->group_seen : &p->seen;
    if ((int32_t)(h->sequence + 1 - *seen) > 0) *seen = h->sequence + 1;
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
        from->ask = lossynet_timer_from(0);
    }
    bool quiet = ended && engine->empty - fmax(from->last, from->ended) > engine->grace;
    /* Whoever has left answers no more; all that it sent is on its way. */
    bool answered = ended && (p->left || (int32_t)(p->answered - from->question) >= 0);
    from->over = all || (quiet && answered);
    if (ended && !answered && !from->over && lossynet_timer_is_due(&from->ask, engine->now))
        lossynet_reliable_tell(net, peer, WIRE_PROBE, 0, 0, from->question);
}

static double patience(const struct lossynet_sending *phase) {
    return fmax(PATIENCE, PATIENCE_PHASES * phase->seconds);
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
            if (lossynet_engine_silence(engine, r) <= patience(phase)) continue;
            if (phase->awaited && !p->from[kind].over) {
                p->from[kind].over = true;
                net->stragglers++;
            }
            if (phase->begun > 0 && !p->to[kind].complete && p->blocked)
                complete(&p->to[kind]); /* what is left is lost */
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

lossynet_status lossynet_stream_end(struct lossynet *net, int kind) {
    struct lossynet_sending *phase = &net->engine->phase[kind];
    lossynet_engine_enter(net);
    lossynet_status status = await(net, kind, phase_over, kind);
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
    lossynet_engine_leave(net);
    return status;
}
