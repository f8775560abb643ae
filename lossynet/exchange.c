/* exchange.c — one phase between ranks, over any link.
 *
 * Sending   goes bucket by bucket, and within a bucket from peer to peer, a batch each, starting
 *           with the next rank: no receiver is hit by all senders at once. Packets that injected
 *           loss takes are not sent.
 * Receiving happens inside the link's functions: lossynet_exchange_receive validates every field of
 *           a datagram before it believes any, and counts what it drops. A gradient lands in the
 *           inbox and sets its mask, a parameter lands in the vector and becomes fresh.
 * The end   of a phase with a peer is its DONE, which says how many packets it sent. A reliable
 * link keeps order, so a DONE that comes before all of them is an error. Where datagrams are lost,
 * it is over when all have come, when nothing more has come for a moment after the DONE (what was
 * overtaken), when the peer is seen in a later phase, or when it has been silent for longer than a
 * deadline. What has not come then is lost.
 */
#include "lossynet/internal.h"

#include <inttypes.h>
#include <string.h>

static const double GRACE = 1e-3; /* seconds, for packets that a DONE overtook */

/* ---- injected loss on the way out ---- */

/* Which of the packets from local worker v to worker `receiver` survive, in order of (bucket,
 * packet): the receiver's shards in phase GRADIENT, the sender's in phase PARAMETER. */
static uint8_t *outgoing(const struct lossynet *net, lossynet_phase phase, int v, int receiver,
                         size_t *packets) {
    const struct lossynet_layout *layout = &net->layout;
    if (phase == LOSSYNET_GRADIENT) {
        *packets = lossynet_layout_owner_packets(layout, receiver);
        return net->outgoing + (size_t)v * layout->packets + layout->owner_start[receiver];
    }
    *packets = lossynet_layout_owner_packets(layout, net->first + v);
    return net->outgoing + net->outgoing_start[v] + (size_t)receiver * *packets;
}

static void fill_outgoing(const struct lossynet *net, lossynet_phase phase, bool lossless) {
#pragma omp parallel for collapse(2) num_threads(net->threads) schedule(static)
    for (int v = 0; v < net->local; v++) {
        for (int receiver = 0; receiver < net->workers; receiver++) {
            if (lossynet_is_local(net, receiver)) continue;
            size_t n;
            uint8_t *mask = outgoing(net, phase, v, receiver, &n);
            if (lossless)
                memset(mask, 1, n);
            else
                lossynet_loss_mask(&net->loss, phase, net->step, net->first + v, receiver, n,
                                   lossynet_chain(net, phase, v, receiver), mask);
        }
    }
}

/* ---- sending ---- */

static struct wire_header header(const struct lossynet *net, lossynet_phase phase, int type,
                                 int sender, int receiver) {
    return (struct wire_header){
        .magic = WIRE_MAGIC,
        .version = WIRE_VERSION,
        .type = (uint8_t)type,
        .phase = (uint8_t)phase,
        .run = net->run,
        .step = net->step,
        .sender = (uint16_t)sender,
        .receiver = (uint16_t)receiver,
    };
}

/* Where a packet's elements are. */
static void packet_span(const struct lossynet_layout *layout, int bucket, int owner, size_t packet,
                        size_t *offset, size_t *count) {
    size_t shard = (size_t)bucket * layout->workers + owner;
    size_t end = layout->shard_element[shard + 1];
    *offset = layout->shard_element[shard] + packet * layout->packet_elements;
    *count = end - *offset < layout->packet_elements ? end - *offset : layout->packet_elements;
}

/* The next packets of a bucket for a rank, at most LOSSYNET_BATCH; 0 when there are no more.
 * The peer's send position goes on: senders, for each its receivers, for each the packets. */
static int fill_batch(struct lossynet *net, lossynet_phase phase, float *const *vectors, int rank,
                      int bucket) {
    const struct lossynet_layout *layout = &net->layout;
    struct lossynet_peer *at = &net->peers[rank];
    int n = 0;
    for (; at->sender < net->local; at->sender++, at->receiver = 0) {
        for (; at->receiver < net->local; at->receiver++, at->packet = 0) {
            int sender = net->first + at->sender, receiver = rank * net->local + at->receiver;
            int owner = phase == LOSSYNET_GRADIENT ? receiver : sender;
            size_t row = (size_t)owner * (layout->buckets + 1) + bucket, all;
            size_t packets = layout->owner_packet[row + 1] - layout->owner_packet[row];
            const uint8_t *survives =
                outgoing(net, phase, at->sender, receiver, &all) + layout->owner_packet[row];
            for (; at->packet < packets; at->packet++) {
                if (!survives[at->packet]) continue;
                if (n == LOSSYNET_BATCH) return n;
                size_t offset, count;
                packet_span(layout, bucket, owner, at->packet, &offset, &count);
                struct wire_header h = header(net, phase, WIRE_DATA, sender, receiver);
                h.bucket = (uint32_t)bucket;
                h.packet = (uint32_t)at->packet;
                h.length = (uint32_t)(count * sizeof(float));
                wire_encode(net->batch[n].header, &h);
                net->batch[n].payload = vectors[at->sender] + offset;
                net->batch[n++].length = h.length;
            }
        }
    }
    return n;
}

static lossynet_status send_bucket(struct lossynet *net, lossynet_phase phase,
                                   float *const *vectors, int bucket) {
    int ranks = net->world.ranks;
    for (int r = 0; r < ranks; r++)
        net->peers[r].sender = net->peers[r].receiver = 0, net->peers[r].packet = 0;
    for (bool more = true; more;) {
        more = false;
        for (int distance = 1; distance < ranks; distance++) {
            int rank = (net->world.rank + distance) % ranks;
            int n = fill_batch(net, phase, vectors, rank, bucket);
            if (n == 0) continue;
            lossynet_status status = net->link->send(net->link, rank, net->batch, n);
            if (status) return status;
            net->peers[rank].sent += (uint64_t)n;
            more = true;
        }
    }
    return LOSSYNET_OK;
}

static lossynet_status send_done(struct lossynet *net, lossynet_phase phase) {
    for (int distance = 1; distance < net->world.ranks; distance++) {
        int rank = (net->world.rank + distance) % net->world.ranks;
        struct wire_header h = header(net, phase, WIRE_DONE, net->first, rank * net->local);
        h.packet = (uint32_t)net->peers[rank].sent;
        struct lossynet_datagram done = {.payload = NULL, .length = 0};
        wire_encode(done.header, &h);
        lossynet_status status = net->link->send(net->link, rank, &done, 1);
        if (status) return status;
    }
    return net->link->flush(net->link);
}

static bool is_lossy(const struct lossynet *net) {
    return net->link->passed != NULL;
}

static void peer_over(struct lossynet *net, struct lossynet_peer *peer) {
    net->exchange.waiting -= !peer->done;
    peer->done = true;
}

/* Ends what will not end by itself. */
static void end_peers(struct lossynet *net) {
    struct lossynet_link *link = net->link;
    for (int rank = 0; rank < net->world.ranks; rank++) {
        struct lossynet_peer *peer = &net->peers[rank];
        if (rank == net->world.rank || peer->done) continue;
        double silence = link->silence(link, rank);
        bool over = link->passed(link, rank) || (peer->told && silence > GRACE);
        bool late = !over && silence > link->patience;
        net->stragglers += late;
        if (over || late) peer_over(net, peer);
    }
}

lossynet_status lossynet_exchange_run(struct lossynet *net, lossynet_phase phase,
                                      float *const *vectors, bool lossless) {
    if (!net->link) return LOSSYNET_OK;
    fill_outgoing(net, phase, lossless);
    struct lossynet_exchange *exchange = &net->exchange;
    *exchange = (struct lossynet_exchange){
        .open = true, .phase = phase, .vectors = vectors, .waiting = net->world.ranks - 1};
    memset(net->peers, 0, (size_t)net->world.ranks * sizeof *net->peers);

    lossynet_status status = net->link->begin(net->link, phase, net->step);
    for (int b = 0; status == LOSSYNET_OK && b < net->layout.buckets; b++)
        status = send_bucket(net, phase, vectors, b);
    if (status == LOSSYNET_OK) status = send_done(net, phase);
    while (status == LOSSYNET_OK && exchange->status == LOSSYNET_OK && exchange->waiting > 0) {
        status = net->link->progress(net->link);
        if (is_lossy(net)) end_peers(net);
    }
    if (status == LOSSYNET_OK) status = exchange->status;
    if (status == LOSSYNET_OK) status = net->link->end(net->link);
    exchange->open = false;
    return status;
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

static void count_received(struct lossynet *net, int rank) {
    struct lossynet_peer *peer = &net->peers[rank];
    peer->received++;
    if (peer->told && (uint32_t)peer->received == peer->announced) peer_over(net, peer);
}

/* The counter of what is wrong with a datagram, NULL when it can be believed. */
static uint64_t *reject(struct lossynet *net, int peer, const struct wire_header *h, size_t bytes) {
    struct lossynet_rejected *rejected = &net->rejected;
    const struct lossynet_layout *layout = &net->layout;
    if (h->magic != WIRE_MAGIC) return &rejected->foreign;
    if (h->version != WIRE_VERSION) return &rejected->version;
    if (h->run != net->run) return &rejected->foreign;
    if (h->length != bytes - WIRE_HEADER_BYTES) return &rejected->truncated;
    if (h->zero || h->phase > LOSSYNET_PARAMETER || h->sender >= net->workers ||
        lossynet_is_local(net, h->sender) || !lossynet_is_local(net, h->receiver) ||
        (peer >= 0 && h->sender / net->local != peer))
        return &rejected->invalid;
    if (!net->exchange.open || h->step != net->step || h->phase != net->exchange.phase)
        return &rejected->stale;

    if (h->type == WIRE_DONE)
        return h->length || h->bucket || h->sender % net->local || h->receiver != net->first
                   ? &rejected->invalid
                   : NULL;
    if (h->type != WIRE_DATA || h->bucket >= (uint32_t)layout->buckets) return &rejected->invalid;
    int owner = h->phase == LOSSYNET_GRADIENT ? h->receiver : h->sender;
    size_t shard = (size_t)h->bucket * net->workers + owner, offset, count;
    if (h->packet >= layout->shard_packet[shard + 1] - layout->shard_packet[shard])
        return &rejected->invalid;
    packet_span(layout, (int)h->bucket, owner, h->packet, &offset, &count);
    return h->length == count * sizeof(float) ? NULL : &rejected->invalid;
}

static void receive_done(struct lossynet *net, const struct wire_header *h) {
    int rank = h->sender / net->local;
    struct lossynet_peer *peer = &net->peers[rank];
    if (is_lossy(net)) {
        peer->told = true;
        peer->announced = h->packet;
        if ((uint32_t)peer->received == h->packet) peer_over(net, peer);
        return;
    }
    if (peer->done) {
        net->rejected.duplicate++;
        return;
    }
    peer_over(net, peer);
    if ((uint32_t)peer->received != h->packet) {
        lossynet_log("rank %d, step %" PRIu64 ": rank %d sent %" PRIu32 " packets, %" PRIu64
                     " arrived over a link that loses none",
                     net->world.rank, net->step, rank, h->packet, peer->received);
        net->exchange.status = LOSSYNET_PROTOCOL;
    }
}

static void receive_gradient(struct lossynet *net, const struct wire_header *h,
                             const uint8_t *payload) {
    const struct lossynet_layout *layout = &net->layout;
    int v = h->receiver - net->first;
    size_t row = (size_t)h->receiver * (layout->buckets + 1) + h->bucket;
    uint8_t *arrived = lossynet_arrived(net, v, h->sender) + layout->owner_packet[row] + h->packet;
    if (*arrived) {
        net->rejected.duplicate++;
        return;
    }
    *arrived = 1;
    memcpy(lossynet_inbox(net, v, h->sender) + layout->owner_element[row] +
               (size_t)h->packet * layout->packet_elements,
           payload, h->length);
    count_received(net, h->sender / net->local);
}

static void receive_parameter(struct lossynet *net, const struct wire_header *h,
                              const uint8_t *payload) {
    const struct lossynet_layout *layout = &net->layout;
    int v = h->receiver - net->first;
    size_t shard = (size_t)h->bucket * net->workers + h->sender, offset, count;
    uint32_t *age =
        net->age + (size_t)v * layout->packets + layout->shard_packet[shard] + h->packet;
    if (*age == 0) { /* all that is not one's own grew older before the phase */
        net->rejected.duplicate++;
        return;
    }
    *age = 0;
    packet_span(layout, (int)h->bucket, h->sender, h->packet, &offset, &count);
    memcpy(net->exchange.vectors[v] + offset, payload, h->length);
    count_received(net, h->sender / net->local);
}

void lossynet_exchange_receive(void *context, int peer, const uint8_t *datagram, size_t bytes) {
    struct lossynet *net = context;
    if (bytes < WIRE_HEADER_BYTES) {
        net->rejected.truncated++;
        return;
    }
    struct wire_header h;
    wire_decode(&h, datagram);
    uint64_t *wrong = reject(net, peer, &h, bytes);
    if (wrong)
        ++*wrong;
    else if (h.type == WIRE_DONE)
        receive_done(net, &h);
    else if (is_lossy(net) && !is_finite(datagram + WIRE_HEADER_BYTES, h.length))
        net->rejected.not_finite++;
    else if (h.phase == LOSSYNET_GRADIENT)
        receive_gradient(net, &h, datagram + WIRE_HEADER_BYTES);
    else
        receive_parameter(net, &h, datagram + WIRE_HEADER_BYTES);
}
