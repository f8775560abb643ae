/* probe.c — measures what the network carries from each rank to each other before a run.
 *
 * Ranks send TEST datagrams of full size over the same link that the run will use. In each pairing
 * every rank sends to one other rank and receives from one other rank, so that all have the same
 * load. If all nodes have the same number of ranks, then in a pairing all ranks of a node send to the
 * ranks of one other node, or all to ranks of their own node.
 *
 *     sender    TEST, kind 0, sequence 0, 1, ...        while less than a window is on its way
 *     receiver  TEST, kind 1, packet: next sequence     counts what it has seen, and what was lost
 *
 * The window is at most what the receiver can hold, as in training (state.h), so that losses are
 * losses of the network. It opens with the answers: datagrams that nobody answers must not harm
 * others, since a switch sends datagrams for a host that it cannot find to every host. Ranks wait
 * for each other before a pairing and after its sending. Datagrams that come after that, until none
 * comes for a moment, count as arrived, but not towards the rate.
 */
#include "lossynet/transport/transport.h"

#include <math.h>
#include <stdlib.h>

/* Seconds without an answer, after which all unanswered datagrams count as lost. */
static const double STALL = 0.1;
static const double ANSWER = 1e-3; /* longest delay of an answer, in seconds */
static const double REPEAT = 5e-3; /* seconds between repetitions of an answer */
/* A pairing is over when nothing came for QUIET seconds, or QUIET_MOST seconds after its sending. */
static const double QUIET = 0.02;
static const double QUIET_MOST = 1.0;
enum { WINDOW_MOST = 1024, ANSWERS = 8 /* per window */ };

struct probe {
    struct lossynet_world world;
    struct ln_link *link;
    uint64_t run;
    uint64_t *meeting; /* [ranks]: what ranks give each other when they meet */
    uint8_t *payload;  /* [payload_bytes] */
    size_t payload_bytes;
    int window, batch; /* datagrams: most on their way; how many are sent at once */
    double rate, due;  /* pacing: bytes per second, 0 = no limit; when more may leave */

    /* The present pairing. */
    int pairing, to, from;
    uint32_t sent, answered; /* sequence numbers */
    int open;                /* how many datagrams may be on their way now */
    double moved;            /* when `answered` last grew */
    uint32_t next, unsaid;   /* next sequence of `from`; datagrams since our last answer */
    uint64_t arrived, bytes; /* datagrams; bytes that came after the first arrival */
    double end, first, last, said;
};

/* ---- pairs of ranks ---- */

/* Sorts the ranks by (node, rank). Sets *each to the ranks per node, or to 0 if nodes differ. */
static void order_ranks(const int *node, int ranks, int *order, int *each) {
    int nodes = 0, placed = 0;
    *each = 0;
    for (int r = 0; r < ranks; r++) nodes = node[r] >= nodes ? node[r] + 1 : nodes;
    for (int n = 0; n < nodes; n++) {
        const int before = placed;
        for (int r = 0; r < ranks; r++)
            if (node[r] == n) order[placed++] = r;
        if (n == 0) *each = placed;
        if (placed - before != *each) *each = 0;
    }
}

/* Returns the place to which the rank at place `at` of the order sends in pairing 1 ... ranks - 1.
 * With -pairing it returns the place from which that rank receives. */
static int partner(int at, int pairing, int ranks, int each) {
    const int sign = pairing < 0 ? -1 : 1, i = abs(pairing);
    if (each == 0) return (at + sign * i + ranks) % ranks;
    const int node = (at / each + sign * (i / each) + ranks / each) % (ranks / each);
    return node * each + (at % each + sign * (i % each) + each) % each;
}

/* ---- datagrams ---- */

static lossynet_status put(struct probe *p, int peer, int kind, uint32_t first, int count) {
    struct ln_datagram batch[LOSSYNET_BATCH];
    for (int i = 0; i < count; i++) {
        const struct wire_header h = {.magic = WIRE_MAGIC,
                                      .version = WIRE_VERSION,
                                      .type = WIRE_TEST,
                                      .kind = (uint8_t)kind,
                                      .run = (uint32_t)p->run,
                                      .index = (uint32_t)p->pairing,
                                      .sender = (uint16_t)p->world.rank,
                                      .receiver = (uint16_t)peer,
                                      .packet = p->next,
                                      .sequence = first + (uint32_t)i};
        batch[i] =
            (struct ln_datagram){.payload = p->payload, .length = kind ? 0 : p->payload_bytes};
        wire_encode(batch[i].header, &h);
    }
    return p->link->send(p->link, peer, batch, count);
}

static void take(struct probe *p, const struct ln_arrival *a, double now) {
    struct wire_header h;
    if (a->count < WIRE_HEADER_BYTES) return;
    wire_decode(&h, a->bytes, a->count);
    if (h.magic != WIRE_MAGIC || h.type != WIRE_TEST || h.run != (uint32_t)p->run ||
        h.index != (uint32_t)p->pairing)
        return;
    if (h.kind == 1 && a->peer == p->to && (int32_t)(h.packet - p->answered) > 0) {
        const int more = p->open + (int)(h.packet - p->answered);
        p->open = more < p->window ? more : p->window;
        p->answered = h.packet;
        p->moved = now;
    } else if (h.kind == 0 && a->peer == p->from) {
        p->arrived++;
        p->unsaid++;
        if ((int32_t)(h.sequence + 1 - p->next) > 0) p->next = h.sequence + 1;
        if (p->first == 0) p->first = now;
        if (now > p->first && now < p->end) {
            p->bytes += a->count;
            p->last = now;
        }
    }
}

/* Takes the datagrams that have come, and answers when that is due. Returns how many came. */
static int receive(struct probe *p, lossynet_status *status) {
    struct ln_arrival arrivals[LOSSYNET_BATCH];
    const int n = p->link->receive(p->link, arrivals);
    const double now = ln_now(), since = now - p->said;
    if (n < 0) return *status = LOSSYNET_LINK, 0;
    for (int i = 0; i < n; i++) take(p, &arrivals[i], now);
    if ((int)p->unsaid >= p->window / ANSWERS || (p->unsaid && since > ANSWER) ||
        (p->next && since > REPEAT && !p->link->features.reliable)) {
        *status = put(p, p->from, 1, 0, 1);
        p->unsaid = 0;
        p->said = now;
    }
    return n;
}

/* ---- pairings ---- */

static lossynet_status meet(struct probe *p) {
    return ln_share(&p->world, p->meeting, sizeof *p->meeting);
}

static bool may_send(struct probe *p, double now) {
    if (!p->link->features.reliable && now > p->moved + STALL) {
        p->answered = p->sent;
        p->open = p->batch;
        p->moved = now;
    }
    return (int)(p->sent - p->answered) + p->batch <= p->open && now >= p->due;
}

static lossynet_status send_and_receive(struct probe *p, double seconds) {
    const double start = ln_now();
    lossynet_status status = LOSSYNET_OK;
    p->end = start + seconds;
    p->moved = p->due = start;
    for (double now = start; now < p->end && !status; now = ln_now()) {
        int moved = receive(p, &status);
        if (!status && may_send(p, now)) {
            status = put(p, p->to, 0, p->sent, p->batch);
            p->sent += (uint32_t)p->batch;
            const double bytes = (double)p->batch * (double)(p->payload_bytes + WIRE_HEADER_BYTES);
            if (p->rate > 0) p->due = fmax(p->due, now - STALL) + bytes / p->rate;
            moved++;
        }
        if (!moved) p->link->wait(p->link, ANSWER / 2);
    }
    return status;
}

/* Receives the datagrams that are still on their way. */
static lossynet_status drain(struct probe *p) {
    const double start = ln_now();
    lossynet_status status = LOSSYNET_OK;
    double now = start, last = start;
    while (now < last + QUIET && now < start + QUIET_MOST && !status) {
        const int n = receive(p, &status);
        now = ln_now();
        if (n) last = now;
        if (!n) p->link->wait(p->link, ANSWER);
    }
    return status;
}

/* mine: what this rank sent to each peer, and what arrived from it. */
static lossynet_status all_pairings(struct probe *p, const int *node, double seconds,
                                    struct lossynet_path *mine) {
    const int ranks = p->world.ranks;
    int *order = ln_memory_take((size_t)ranks, sizeof *order), each, at = 0;
    lossynet_status status = LOSSYNET_OK;
    if (!order) return LOSSYNET_NO_MEMORY;
    order_ranks(node, ranks, order, &each);
    while (order[at] != p->world.rank) at++;
    for (p->pairing = 1; p->pairing < ranks && !status; p->pairing++) {
        p->to = order[partner(at, p->pairing, ranks, each)];
        p->from = order[partner(at, -p->pairing, ranks, each)];
        p->sent = p->answered = p->next = p->unsaid = 0;
        p->arrived = p->bytes = 0;
        p->open = p->batch;
        p->first = p->last = 0;
        p->said = ln_now();
        status = meet(p);
        if (!status) status = send_and_receive(p, seconds);
        if (!status) status = meet(p);
        if (!status) status = drain(p);
        mine[p->to].sent = p->sent;
        mine[p->from].arrived = p->arrived;
        if (p->bytes)
            mine[p->from].gbps = 8e-9 * (double)p->bytes / fmax(p->last - p->first, seconds / 4);
    }
    free(order);
    return status;
}

/* ---- all of it ---- */

static lossynet_status over_link(struct probe *p, const int *node, double seconds,
                                 struct lossynet_path *out) {
    const size_t ranks = (size_t)p->world.ranks, rank = (size_t)p->world.rank;
    struct lossynet_path *told = ln_memory_take(ranks * ranks, sizeof *told);
    lossynet_status status = LOSSYNET_NO_MEMORY;
    p->payload = ln_memory_take(p->payload_bytes, 1);
    if (!told || !p->payload) goto release;
    for (size_t i = 0; i < p->payload_bytes; i++)
        p->payload[i] = (uint8_t)ln_mix(i); /* like gradients, it cannot be compressed */
    status = all_pairings(p, node, seconds, told + rank * ranks);
    if (!status) status = ln_share(&p->world, told, ranks * sizeof *told);
    for (size_t s = 0; s < ranks; s++)
        for (size_t r = 0; r < ranks; r++)
            out[s * ranks + r] = (struct lossynet_path){.sent = told[s * ranks + r].sent,
                                                        .arrived = told[r * ranks + s].arrived,
                                                        .gbps = told[r * ranks + s].gbps};
release:
    if (status == LOSSYNET_NO_MEMORY)
        ln_log("rank %d: no memory to test the paths of %zu ranks", p->world.rank, ranks);
    free(p->payload);
    free(told);
    return status;
}

lossynet_status ln_transport_probe(const struct ln_transport_settings *settings,
                                   ln_link_open link_open, const int *node, double seconds,
                                   struct lossynet_path *out, const char **link_name) {
    const struct lossynet_world *world = &settings->world;
    struct probe p = {.world = *world};
    p.meeting = ln_memory_take((size_t)world->ranks, sizeof *p.meeting);
    if (!p.meeting)
        return ln_fail(LOSSYNET_NO_MEMORY, "rank %d: no memory to meet %d ranks", world->rank,
                       world->ranks);
    p.meeting[world->rank] = ln_random();
    lossynet_status status = meet(&p);
    p.run = p.meeting[0];
    const struct ln_link_settings link = {.world = *world,
                                          .run = p.run,
                                          .payload_bytes = settings->packet_bytes,
                                          .network = settings->network};
    if (!status) status = link_open(&link, &p.link);
    if (status) goto free_meeting;
    *link_name = p.link->name;
    p.payload_bytes =
        settings->packet_bytes ? settings->packet_bytes : p.link->features.payload_most;
    p.rate = settings->network.pace_gbps * 1e9 / 8;
    p.window = p.link->features.receive_queue / 2;
    if (p.link->features.reliable) p.window /= world->ranks - 1; /* answers need room too */
    if (p.window > WINDOW_MOST) p.window = WINDOW_MOST;
    if (p.window < 2) p.window = 2;
    p.batch = p.window / 2 < LOSSYNET_BATCH ? p.window / 2 : LOSSYNET_BATCH;
    status = over_link(&p, node, seconds, out);
    p.link->close(p.link);
free_meeting:
    free(p.meeting);
    return status;
}
