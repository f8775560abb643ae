/* link_udp.c — datagrams over UDP: nothing that carries gradients or parameters is sent twice.
 *
 * What all ranks do together, phases and all-gathers, is counted in rounds. MPI is used once, to
 * tell each other addresses and to draw the run id; then all goes through one socket per rank.
 *
 *     begin       a rank says READY, and waits until it has heard every peer in this round. Nobody
 *                 sends packets to a rank that is not listening, so none arrive early: what is
 *                 still being reduced is never overwritten, and a late rank loses nothing.
 *     send        at most a window of DATA is on its way to a peer; it opens with CREDIT. So no
 *                 receive buffer overflows, whoever is slower. Credit counts what the receiver saw
 *                 or gave up: nothing is sent again. Lost credit is asked for with another READY.
 *     DONE        is repeated until it is acknowledged, or until the peer is seen in a later round.
 *     all_gather  sends fragments in windows of 64 and repeats those not acknowledged in time.
 *
 * Between rounds, while the caller computes, a thread of this link answers peers: it repeats lost
 * acknowledgements and says that this rank is alive. Within a round the caller holds the lock, and
 * the thread sleeps.
 *
 * A rank that is silent for peer_timeout seconds while something is expected of it is dead: the
 * function returns LOSSYNET_LINK after one line that names it.
 */
#include "lossynet/udp.h"

#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { FRAGMENTS = 64, FRAGMENT_BYTES = 8192 };

static const double RETRY = 1e-3;      /* before something unanswered is repeated, seconds, ... */
static const double RETRY_MOST = 0.02; /* ... doubled each time up to this */
static const double OVERTAKEN = 3e-4;  /* ... or this, when later fragments were acknowledged */
static const double LINGER = 5e-3;     /* for acknowledgements of DONE */
static const double LEAVE = 1.0;       /* for acknowledgements of LEAVE */
static const double PATIENCE = 0.5;    /* least deadline of a silent peer within a phase */

struct udp_peer {
    struct udp_address address;
    uint32_t heard;    /* the latest round it was seen in */
    double last_heard; /* any valid datagram */
    bool left, gone;   /* it knows that we leave; it leaves itself */

    /* This phase. */
    uint32_t sent, credited;  /* DATA to it */
    uint32_t highest, unsaid; /* DATA from it: sequence reached; not yet credited */
    bool stalled;             /* gave up sending to it */
    bool done_waits;          /* our DONE is not acknowledged */
    struct lossynet_datagram done;

    /* This all-gather. */
    uint32_t fragments, acked_before; /* ours to it */
    uint64_t acked;                   /* bit i: acked_before + i */
    double sent_at[FRAGMENTS];        /* by fragment modulo FRAGMENTS; 0: not yet */
    uint32_t expected, got_before;    /* its to us */
    uint64_t got;
    bool ack_due;

    double due, retry; /* of READY, DONE or fragments */
};

struct link_udp {
    struct lossynet_link link; /* first: a link is its address */
    struct lossynet_link_settings settings;
    struct udp_socket socket;
    struct udp_peer *peers;
    int *by_address; /* hash table: rank + 1, 0 = empty */
    unsigned table;  /* its size, a power of two */
    uint64_t run, step;
    uint32_t round, window;
    enum { IDLE, PHASE, GATHER } mode;
    size_t fragment_bytes;
    double now;   /* of the datagrams being handled */
    double empty; /* when the socket was last seen empty: a rank that was itself stopped must not
                     blame peers whose datagrams it has yet to read */
    double begun, phase_seconds;
    uint8_t *data; /* of the all-gather */
    const size_t *offset;
    struct lossynet_datagram batch[UDP_BATCH];
    struct lossynet_link_counters counters;
    lossynet_status failed;
    bool held, opened, stop; /* held: the lock, by the caller's thread */
    pthread_mutex_t lock;
    pthread_t thread;
    int wake;
    uint8_t *kept; /* tests: a datagram that overtaking ones wait for */
    size_t kept_bytes;
    int kept_from;
};

int (*lossynet_udp_hook)(int rank, int peer, const uint8_t *datagram, size_t bytes);

/* ---- peers by address ---- */

static unsigned address_hash(const struct udp_address *a) {
    uint64_t hash = a->v4.sin_port;
    if (a->any.sa_family == AF_INET)
        hash ^= (uint64_t)a->v4.sin_addr.s_addr << 16;
    else
        for (int i = 0; i < 16; i++) hash = lossynet_mix(hash ^ a->v6.sin6_addr.s6_addr[i]);
    return (unsigned)lossynet_mix(hash);
}

static bool same_address(const struct udp_address *a, const struct udp_address *b) {
    if (a->any.sa_family != b->any.sa_family || a->v4.sin_port != b->v4.sin_port) return false;
    if (a->any.sa_family == AF_INET) return a->v4.sin_addr.s_addr == b->v4.sin_addr.s_addr;
    return memcmp(&a->v6.sin6_addr, &b->v6.sin6_addr, 16) == 0;
}

static int find_peer(const struct link_udp *u, const struct udp_address *a) {
    for (unsigned i = address_hash(a);; i++) {
        int found = u->by_address[i & (u->table - 1)] - 1;
        if (found < 0 || same_address(&u->peers[found].address, a)) return found;
    }
}

static void fill_table(struct link_udp *u) {
    for (int r = 0; r < u->settings.world.ranks; r++) {
        if (r == u->settings.world.rank) continue;
        unsigned i = address_hash(&u->peers[r].address);
        while (u->by_address[i & (u->table - 1)]) i++;
        u->by_address[i & (u->table - 1)] = r + 1;
    }
}

/* ---- sending ---- */

static void fail(struct link_udp *u, int peer, const char *what) {
    if (u->failed) return;
    lossynet_log("rank %d, step %" PRIu64 ", peer rank %d %s", u->settings.world.rank, u->step,
                 peer, what);
    u->failed = LOSSYNET_LINK;
}

static void seal(const struct link_udp *u, struct lossynet_datagram *d, uint32_t round,
                 uint32_t sequence) {
    wire_put(d->header + 8, u->run, 8);
    wire_put(d->header + WIRE_ROUND_AT, round, 4);
    wire_put(d->header + WIRE_SEQUENCE_AT, sequence, 4);
    wire_put(d->header + WIRE_CHECKSUM_AT, 0, 4);
    uint32_t crc = lossynet_crc32c(0, d->header, WIRE_HEADER_BYTES);
    crc = lossynet_crc32c(crc, d->payload, d->length);
    wire_put(d->header + WIRE_CHECKSUM_AT, crc, 4);
}

static void dispatch(struct link_udp *u, int peer, const struct lossynet_datagram *batch,
                     int count) {
    lossynet_status status = udp_send(&u->socket, &u->peers[peer].address, batch, count);
    if (status && !u->failed) u->failed = status;
}

static struct lossynet_datagram control(const struct link_udp *u, int peer, int type,
                                        uint32_t packet, const void *payload, size_t bytes) {
    struct lossynet_datagram d = {.payload = payload, .length = bytes};
    struct wire_header h = {.magic = WIRE_MAGIC,
                            .version = WIRE_VERSION,
                            .type = (uint8_t)type,
                            .step = u->step,
                            .sender = (uint16_t)u->settings.world.rank,
                            .receiver = (uint16_t)peer,
                            .packet = packet,
                            .length = (uint32_t)bytes};
    wire_encode(d.header, &h);
    return d;
}

static void tell(struct link_udp *u, int peer, int type, uint32_t round, uint32_t packet) {
    struct lossynet_datagram d = control(u, peer, type, packet, NULL, 0);
    seal(u, &d, round, u->peers[peer].sent);
    dispatch(u, peer, &d, 1);
}

static void send_credit(struct link_udp *u, int peer) {
    u->peers[peer].unsaid = 0;
    tell(u, peer, WIRE_CREDIT, u->round, u->peers[peer].highest);
}

static void send_ack(struct link_udp *u, int peer) {
    struct udp_peer *p = &u->peers[peer];
    uint8_t mask[8];
    wire_put(mask, p->got, 8);
    struct lossynet_datagram d = control(u, peer, WIRE_ACK, p->got_before, mask, sizeof mask);
    seal(u, &d, u->round, 0);
    dispatch(u, peer, &d, 1);
    p->ack_due = false;
}

/* ---- receiving ---- */

static size_t fragment_of(const struct link_udp *u, int rank, uint32_t fragment, size_t *at) {
    *at = u->offset[rank] + (size_t)fragment * u->fragment_bytes;
    size_t left = u->offset[rank + 1] - *at;
    return left < u->fragment_bytes ? left : u->fragment_bytes;
}

static uint32_t fragments_of(const struct link_udp *u, int rank) {
    size_t bytes = u->offset[rank + 1] - u->offset[rank];
    return bytes ? (uint32_t)((bytes + u->fragment_bytes - 1) / u->fragment_bytes) : 1;
}

static void receive_fragment(struct link_udp *u, int peer, const struct wire_header *h,
                             const uint8_t *payload) {
    struct udp_peer *p = &u->peers[peer];
    size_t at;
    if (h->packet >= p->expected || h->length != fragment_of(u, peer, h->packet, &at)) {
        u->counters.foreign++;
        return;
    }
    p->ack_due = true;
    if (h->packet < p->got_before || h->packet - p->got_before >= FRAGMENTS) return;
    uint64_t bit = (uint64_t)1 << (h->packet - p->got_before);
    if (p->got & bit) return;
    memcpy(u->data + at, payload, h->length);
    p->got |= bit;
    for (; p->got & 1; p->got >>= 1) p->got_before++;
}

static void receive_ack(struct link_udp *u, int peer, const struct wire_header *h,
                        const uint8_t *payload) {
    struct udp_peer *p = &u->peers[peer];
    if (u->mode == PHASE) p->done_waits = false;
    if (u->mode != GATHER) return;
    if (h->packet == WIRE_ALL) {
        p->acked_before = p->fragments;
        return;
    }
    if (h->length != 8 || h->packet > p->fragments || h->packet < p->acked_before) return;
    uint64_t mask = wire_get(payload, 8);
    uint32_t forward = h->packet - p->acked_before;
    for (uint32_t i = 0; i < forward && i < FRAGMENTS; i++)
        p->sent_at[(p->acked_before + i) % FRAGMENTS] = 0; /* the slot's next fragment is new */
    if (forward || (mask | p->acked) != p->acked) p->retry = RETRY;
    p->acked = (forward < 64 ? p->acked >> forward : 0) | mask;
    p->acked_before = h->packet;
}

static void receive_control(struct link_udp *u, int peer, const struct wire_header *h,
                            const uint8_t *datagram) {
    struct udp_peer *p = &u->peers[peer];
    bool now = h->round == u->round && u->mode != IDLE;
    bool over = h->round < u->round || (h->round == u->round && u->mode == IDLE);
    switch (h->type) {
    case WIRE_READY:
        if (!now || u->mode != PHASE) {
            tell(u, peer, WIRE_ALIVE, u->round, 0);
        } else {
            if (h->sequence > p->highest) p->highest = h->sequence;
            send_credit(u, peer);
        }
        break;
    case WIRE_CREDIT:
        if (now && u->mode == PHASE && h->packet <= p->sent && h->packet > p->credited)
            p->credited = h->packet;
        break;
    case WIRE_GATHER:
        if (now && u->mode == GATHER)
            receive_fragment(u, peer, h, datagram + WIRE_HEADER_BYTES);
        else
            tell(u, peer, over ? WIRE_ACK : WIRE_ALIVE, over ? h->round : u->round, WIRE_ALL);
        break;
    case WIRE_ACK:
        if (now) receive_ack(u, peer, h, datagram + WIRE_HEADER_BYTES);
        if (h->round == WIRE_ALL) p->left = true;
        break;
    case WIRE_LEAVE:
        p->left = p->gone = true;
        tell(u, peer, WIRE_ACK, WIRE_ALL, 0);
        break;
    }
}

static void receive_phase(struct link_udp *u, int peer, const struct wire_header *h,
                          const uint8_t *datagram, size_t bytes) {
    struct udp_peer *p = &u->peers[peer];
    bool now = h->round == u->round && u->mode == PHASE;
    if (h->type == WIRE_DONE) {
        if (now || h->round <= u->round)
            tell(u, peer, WIRE_ACK, h->round, WIRE_ALL);
        else
            tell(u, peer, WIRE_ALIVE, u->round, 0);
    } else if (now) {
        if (h->sequence >= p->highest) p->highest = h->sequence + 1;
        if (++p->unsaid >= (u->window + 3) / 4) send_credit(u, peer);
    } else {
        u->counters.late++;
    }
    if (now) u->settings.receive(u->settings.context, peer, datagram, bytes);
}

static void handle(struct link_udp *u, int peer, uint8_t *datagram, size_t bytes) {
    struct wire_header h;
    if (bytes < WIRE_HEADER_BYTES || peer < 0) {
        u->counters.foreign++;
        return;
    }
    wire_decode(&h, datagram);
    if (h.magic != WIRE_MAGIC || h.version != WIRE_VERSION || h.run != u->run) {
        u->counters.foreign++;
        return;
    }
    wire_put(datagram + WIRE_CHECKSUM_AT, 0, 4);
    uint32_t crc = lossynet_crc32c(0, datagram, bytes);
    wire_put(datagram + WIRE_CHECKSUM_AT, h.checksum, 4);
    if (crc != h.checksum || h.length != bytes - WIRE_HEADER_BYTES) {
        u->counters.corrupt++;
        return;
    }
    struct udp_peer *p = &u->peers[peer];
    p->last_heard = u->now;
    if (h.round > p->heard) {
        p->heard = h.round;
        p->due = 0, p->retry = RETRY; /* what it could not answer before, it can now */
        if (u->mode == GATHER) memset(p->sent_at, 0, sizeof p->sent_at);
    }
    if (h.type == WIRE_DATA || h.type == WIRE_DONE)
        receive_phase(u, peer, &h, datagram, bytes);
    else
        receive_control(u, peer, &h, datagram);
}

/* For tests: a hook says how often a datagram arrives; -1: after the next one. */
static void handle_hooked(struct link_udp *u, int peer, uint8_t *datagram, size_t bytes) {
    int copies = lossynet_udp_hook(u->settings.world.rank, peer, datagram, bytes);
    if (copies < 0 && !u->kept_bytes) {
        memcpy(u->kept, datagram, bytes);
        u->kept_bytes = bytes, u->kept_from = peer;
        return;
    }
    for (int i = 0; i < copies; i++) handle(u, peer, datagram, bytes);
    if (copies < 0) handle(u, peer, datagram, bytes);
    size_t kept = u->kept_bytes;
    u->kept_bytes = 0;
    if (kept) handle(u, u->kept_from, u->kept, kept);
}

/* Handles what has arrived; false when nothing has. */
static bool drain(struct link_udp *u) {
    bool any = false;
    for (int turn = 0; turn < 8; turn++) {
        u->now = udp_now();
        int n = udp_receive(&u->socket);
        if (n < UDP_BATCH) u->empty = u->now;
        for (int i = 0; i < n; i++) {
            int peer = find_peer(u, &u->socket.from[i]);
            (lossynet_udp_hook ? handle_hooked : handle)(u, peer, u->socket.in_part[i].iov_base,
                                                         u->socket.in[i].msg_len);
        }
        any |= n > 0;
        if (n < UDP_BATCH) break;
    }
    for (int r = 0; any && r < u->settings.world.ranks; r++)
        if (u->peers[r].ack_due) send_ack(u, r);
    return any;
}

static void pump(struct link_udp *u, double seconds) {
    if (drain(u) || seconds <= 0) return;
    udp_wait(&u->socket, seconds);
    drain(u);
}

/* ---- the thread that answers while the caller computes ---- */

static void *answer(void *argument) {
    struct link_udp *u = argument;
    for (;;) {
        struct pollfd poll_for[2] = {{.fd = u->socket.fd, .events = POLLIN},
                                     {.fd = u->wake, .events = POLLIN}};
        poll(poll_for, 2, -1);
        pthread_mutex_lock(&u->lock);
        bool stop = u->stop;
        if (!stop) drain(u);
        pthread_mutex_unlock(&u->lock);
        if (stop) return NULL;
    }
}

static void enter(struct link_udp *u) {
    if (!u->held) pthread_mutex_lock(&u->lock);
    u->held = true;
}

static lossynet_status leave(struct link_udp *u) {
    u->mode = IDLE;
    u->held = false;
    lossynet_status status = u->failed;
    pthread_mutex_unlock(&u->lock);
    return status;
}

/* ---- rounds ---- */

static void round_begin(struct link_udp *u, int mode) {
    enter(u);
    u->round++;
    u->mode = mode;
    u->begun = udp_now();
    for (int r = 0; r < u->settings.world.ranks; r++) {
        struct udp_peer *p = &u->peers[r];
        p->due = 0, p->retry = RETRY;
        p->sent = p->credited = p->highest = p->unsaid = 0;
        p->stalled = p->done_waits = p->ack_due = false;
    }
}

/* Whether it is time to repeat something to this peer; if so, the next time is later. */
static bool is_due(struct udp_peer *p, double now) {
    if (now < p->due) return false;
    p->due = now + p->retry;
    p->retry = p->retry * 2 < RETRY_MOST ? p->retry * 2 : RETRY_MOST;
    return true;
}

/* Seconds that nothing came from the peer, though it had to since `since`. */
static double silence(const struct link_udp *u, int peer, double since) {
    double last = u->peers[peer].last_heard;
    return u->empty - (last > since ? last : since);
}

/* For a peer of which something is expected. */
static void check_alive(struct link_udp *u, int peer, double since) {
    double quiet = silence(u, peer, since);
    char what[160];
    if (u->peers[peer].gone) fail(u, peer, "has left the run: see its messages");
    if (quiet <= u->settings.peer_timeout) return;
    snprintf(what, sizeof what,
             "was not heard for %.1f s: expected a running program and a network between "
             "(--peer-timeout)",
             quiet);
    fail(u, peer, what);
}

static int nth_peer(const struct link_udp *u, int distance) {
    return (u->settings.world.rank + distance) % u->settings.world.ranks;
}

static lossynet_status link_begin(struct lossynet_link *link, lossynet_phase phase, uint64_t step) {
    struct link_udp *u = (struct link_udp *)link;
    (void)phase;
    round_begin(u, PHASE);
    u->step = step;
    double start = u->begun;
    bool first = true;
    for (int missing = 1; missing && !u->failed; first = false) {
        missing = 0;
        double now = udp_now();
        for (int d = 1; d < u->settings.world.ranks; d++) {
            int r = nth_peer(u, d);
            bool late = u->peers[r].heard < u->round;
            missing += late;
            if (late || u->peers[r].gone) check_alive(u, r, start);
            if ((late || first) && is_due(&u->peers[r], now)) tell(u, r, WIRE_READY, u->round, 0);
        }
        if (missing) pump(u, RETRY);
    }
    u->begun = udp_now();
    link->patience = u->phase_seconds > 0 ? 8 * u->phase_seconds : u->settings.peer_timeout;
    if (link->patience < PATIENCE) link->patience = PATIENCE;
    if (link->patience > u->settings.peer_timeout) link->patience = u->settings.peer_timeout;
    return u->failed;
}

static void repeat_done(struct link_udp *u) {
    double now = udp_now();
    for (int r = 0; r < u->settings.world.ranks; r++) {
        struct udp_peer *p = &u->peers[r];
        if (p->heard > u->round) p->done_waits = false;
        if (p->done_waits && is_due(p, now)) dispatch(u, r, &p->done, 1);
    }
}

/* Waits until `count` more may be on their way; false when the peer does not listen any longer. */
static bool wait_window(struct link_udp *u, int peer, uint32_t count) {
    struct udp_peer *p = &u->peers[peer];
    double since = udp_now();
    uint32_t before = p->credited;
    p->retry = RETRY;
    p->due = since + RETRY;
    while (p->sent + count - p->credited > u->window) {
        if (p->heard > u->round || p->stalled || u->failed) return false;
        double now = udp_now();
        if (p->credited != before) before = p->credited, since = now, p->retry = RETRY;
        if (u->empty - since > u->link.patience) p->stalled = true;
        if (is_due(p, now)) tell(u, peer, WIRE_READY, u->round, 0);
        pump(u, RETRY);
    }
    return p->heard <= u->round;
}

static lossynet_status link_send(struct lossynet_link *link, int peer,
                                 const struct lossynet_datagram *batch, int count) {
    struct link_udp *u = (struct link_udp *)link;
    struct udp_peer *p = &u->peers[peer];
    if (batch[0].header[5] == WIRE_DONE) {
        p->done = batch[0];
        seal(u, &p->done, u->round, p->sent);
        p->done_waits = true;
        p->due = 0, p->retry = RETRY;
        return u->failed;
    }
    int most = u->window / 2 > 0 ? (int)(u->window / 2) : 1;
    for (int at = 0; at < count && !u->failed;) {
        int n = count - at < most ? count - at : most;
        if (!wait_window(u, peer, (uint32_t)n)) break; /* what is left is lost */
        size_t bytes = 0;
        for (int i = 0; i < n; i++) {
            u->batch[i] = batch[at + i];
            seal(u, &u->batch[i], u->round, p->sent + (uint32_t)i);
            bytes += WIRE_HEADER_BYTES + batch[at + i].length;
        }
        for (double wait; (wait = udp_pace(&u->socket, bytes)) > 0;) pump(u, wait);
        dispatch(u, peer, u->batch, n);
        p->sent += (uint32_t)n;
        at += n;
        drain(u);
    }
    return u->failed;
}

static lossynet_status link_flush(struct lossynet_link *link) {
    struct link_udp *u = (struct link_udp *)link;
    repeat_done(u);
    return u->failed;
}

static lossynet_status link_progress(struct lossynet_link *link) {
    struct link_udp *u = (struct link_udp *)link;
    repeat_done(u);
    pump(u, RETRY);
    return u->failed;
}

/* Peers that have not acknowledged DONE will see it implied by our next round; but that may be
 * long. */
static lossynet_status link_end(struct lossynet_link *link) {
    struct link_udp *u = (struct link_udp *)link;
    double end = udp_now(), seconds = end - u->begun;
    u->phase_seconds += u->phase_seconds > 0 ? 0.25 * (seconds - u->phase_seconds) : seconds;
    for (bool waits = true; waits && !u->failed && udp_now() < end + LINGER;) {
        repeat_done(u);
        waits = false;
        for (int r = 0; r < u->settings.world.ranks; r++) waits |= u->peers[r].done_waits;
        if (waits) pump(u, RETRY);
    }
    return leave(u);
}

static bool link_passed(struct lossynet_link *link, int peer) {
    struct link_udp *u = (struct link_udp *)link;
    return u->peers[peer].heard > u->round;
}

static double link_silence(struct lossynet_link *link, int peer) {
    struct link_udp *u = (struct link_udp *)link;
    return silence(u, peer, u->begun);
}

/* ---- all-gather ---- */

/* Sends the fragments of our part that are new within the window, or not acknowledged in time. */
static void push(struct link_udp *u, int peer, double now) {
    struct udp_peer *p = &u->peers[peer];
    uint32_t left = p->fragments - p->acked_before, most = u->window;
    if (most > FRAGMENTS) most = FRAGMENTS;
    if (most > left) most = left;
    if (p->heard < u->round) most = 1; /* it is not listening yet */
    bool again = is_due(p, now);
    int n = 0;
    size_t bytes = 0;
    for (uint32_t i = 0; i < most; i++) {
        if (p->acked >> i & 1) continue;
        double *sent_at = &p->sent_at[(p->acked_before + i) % FRAGMENTS];
        bool overtaken = i < 63 && p->acked >> (i + 1) && now - *sent_at > OVERTAKEN;
        bool late = again && now - *sent_at >= RETRY;
        if (*sent_at > 0 && !overtaken && !late) continue;
        *sent_at = now;
        size_t at, length = fragment_of(u, u->settings.world.rank, p->acked_before + i, &at);
        u->batch[n] = control(u, peer, WIRE_GATHER, p->acked_before + i, u->data + at, length);
        seal(u, &u->batch[n++], u->round, 0);
        bytes += WIRE_HEADER_BYTES + length;
    }
    if (n == 0) return;
    for (double wait; (wait = udp_pace(&u->socket, bytes)) > 0;) pump(u, wait);
    dispatch(u, peer, u->batch, n);
}

static bool is_gathered(const struct link_udp *u, int peer) {
    const struct udp_peer *p = &u->peers[peer];
    bool all_sent = p->acked_before == p->fragments || p->heard > u->round;
    return all_sent && p->got_before == p->expected;
}

static lossynet_status link_all_gather(struct lossynet_link *link, void *data,
                                       const size_t *offset) {
    struct link_udp *u = (struct link_udp *)link;
    int ranks = u->settings.world.ranks;
    round_begin(u, GATHER);
    u->data = data;
    u->offset = offset;
    for (int r = 0; r < ranks; r++) {
        struct udp_peer *p = &u->peers[r];
        p->fragments = fragments_of(u, u->settings.world.rank);
        p->expected = fragments_of(u, r);
        p->acked_before = p->got_before = 0;
        p->acked = p->got = 0;
        memset(p->sent_at, 0, sizeof p->sent_at);
    }
    for (int missing = 1; missing && !u->failed;) {
        missing = 0;
        double now = udp_now();
        for (int d = 1; d < ranks; d++) {
            int r = nth_peer(u, d);
            if (is_gathered(u, r)) continue;
            missing++;
            check_alive(u, r, u->begun);
            if (u->peers[r].acked_before < u->peers[r].fragments && u->peers[r].heard <= u->round)
                push(u, r, now);
        }
        if (missing) pump(u, OVERTAKEN);
    }
    return leave(u);
}

/* ---- open and close ---- */

static void link_counters(struct lossynet_link *link, struct lossynet_link_counters *out) {
    struct link_udp *u = (struct link_udp *)link;
    bool held = u->held;
    if (!held) pthread_mutex_lock(&u->lock);
    *out = u->counters;
    if (!held) pthread_mutex_unlock(&u->lock);
    out->overruns = udp_overruns(&u->socket);
}

/* Peers may still miss our last acknowledgements: we leave when they know. */
static void say_leave(struct link_udp *u) {
    enter(u);
    double start = udp_now();
    for (int r = 0; r < u->settings.world.ranks; r++)
        u->peers[r].due = 0, u->peers[r].retry = RETRY;
    for (int missing = 1; missing && udp_now() < start + LEAVE;) {
        missing = 0;
        for (int r = 0; r < u->settings.world.ranks; r++) {
            if (r == u->settings.world.rank || u->peers[r].left) continue;
            missing++;
            if (is_due(&u->peers[r], udp_now())) tell(u, r, WIRE_LEAVE, WIRE_ALL, 0);
        }
        if (missing) pump(u, RETRY);
    }
    /* Those who left first may have missed that we know; they give up after LEAVE. */
    for (int r = 0; r < u->settings.world.ranks; r++)
        if (r != u->settings.world.rank) tell(u, r, WIRE_LEAVE, WIRE_ALL, 0);
    leave(u);
}

static void link_close(struct lossynet_link *link) {
    struct link_udp *u = (struct link_udp *)link;
    if (u->opened) {
        if (u->failed || u->held)
            enter(u), leave(u);
        else
            say_leave(u);
        pthread_mutex_lock(&u->lock);
        u->stop = true;
        pthread_mutex_unlock(&u->lock);
        uint64_t one = 1;
        if (write(u->wake, &one, sizeof one) < 0) lossynet_log("eventfd refuses a write");
        pthread_join(u->thread, NULL);
    }
    if (u->wake >= 0) close(u->wake);
    pthread_mutex_destroy(&u->lock);
    udp_socket_close(&u->socket);
    free(u->kept);
    free(u->by_address);
    free(u->peers);
    free(u);
}

struct card { /* what ranks tell each other at the start */
    struct udp_address address;
    uint64_t run, mtu;
};

static lossynet_status introduce(struct link_udp *u, const struct udp_address *mine, size_t mtu,
                                 lossynet_udp_share share, void *context) {
    int ranks = u->settings.world.ranks, rank = u->settings.world.rank;
    struct card *cards = lossynet_memory_take((size_t)ranks, sizeof *cards);
    if (!cards) return LOSSYNET_NO_MEMORY;
    cards[rank] = (struct card){.address = *mine, .run = lossynet_random(), .mtu = mtu};
    lossynet_status status = share(context, &u->settings.world, cards, sizeof *cards);
    u->run = cards[0].run;
    for (int r = 0; r < ranks && !status; r++) {
        u->peers[r].address = cards[r].address;
        if (cards[r].mtu < mtu) mtu = cards[r].mtu;
        if (cards[r].address.any.sa_family != mine->any.sa_family) {
            lossynet_log("rank %d and rank %d have no address family in common: choose with "
                         "--interface",
                         rank, r);
            status = LOSSYNET_LINK;
        }
    }
    free(cards);
    size_t payload = udp_payload(mtu, mine->any.sa_family);
    if (!status && u->settings.packet_bytes > payload) {
        lossynet_log("packets of %zu bytes: expected at most %zu, which the MTU of %zu leaves",
                     u->settings.packet_bytes, payload, mtu);
        status = LOSSYNET_INVALID;
    }
    u->fragment_bytes = payload < FRAGMENT_BYTES ? payload : FRAGMENT_BYTES;
    fill_table(u);
    return status;
}

static unsigned table_size(int ranks) {
    unsigned size = 4;
    while (size < 4 * (unsigned)ranks) size *= 2;
    return size;
}

static size_t capacity(size_t packet_bytes) {
    size_t payload = packet_bytes > FRAGMENT_BYTES ? packet_bytes : FRAGMENT_BYTES;
    return (WIRE_HEADER_BYTES + payload + 63) / 64 * 64;
}

size_t lossynet_link_udp_memory(int ranks, size_t packet_bytes) {
    return sizeof(struct link_udp) + (size_t)ranks * sizeof(struct udp_peer) +
           table_size(ranks) * sizeof(int) + udp_socket_memory(capacity(packet_bytes)) +
           capacity(packet_bytes);
}

static bool start_thread(struct link_udp *u) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the caller's */
    bool started = pthread_create(&u->thread, NULL, answer, u) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

lossynet_status lossynet_link_udp_open_with(const struct lossynet_link_settings *settings,
                                            lossynet_udp_share share, void *context,
                                            struct lossynet_link **out) {
    *out = NULL;
    const struct lossynet_world *world = &settings->world;
    struct udp_address mine;
    size_t mtu;
    lossynet_status status =
        udp_choose(settings->interface, world->local_ranks == world->ranks, &mine, &mtu);
    if (status) return status;
    struct link_udp *u = lossynet_memory_take(1, sizeof *u);
    if (!u) goto no_memory;
    u->settings = *settings;
    u->socket.fd = u->wake = -1;
    pthread_mutex_init(&u->lock, NULL);
    u->table = table_size(world->ranks);
    u->peers = lossynet_memory_take((size_t)world->ranks, sizeof *u->peers);
    u->by_address = lossynet_memory_take(u->table, sizeof *u->by_address);
    u->kept = lossynet_memory_take(1, capacity(settings->packet_bytes));
    u->link = (struct lossynet_link){
        .name = "udp",
        .memory_bytes = lossynet_link_udp_memory(world->ranks, settings->packet_bytes),
        .begin = link_begin,
        .send = link_send,
        .flush = link_flush,
        .progress = link_progress,
        .end = link_end,
        .all_gather = link_all_gather,
        .close = link_close,
        .passed = link_passed,
        .silence = link_silence,
        .counters = link_counters,
    };
    if (!u->peers || !u->by_address || !u->kept) goto close_link;
    status =
        udp_socket_open(&u->socket, &mine, capacity(settings->packet_bytes), settings->pace_gbps);
    if (!status) status = introduce(u, &mine, mtu, share, context);
    if (status) {
        link_close(&u->link);
        return status;
    }
    /* What all peers may send at once fits half the buffer; the kernel counts about this much. */
    size_t packet = 2 * (settings->packet_bytes + WIRE_HEADER_BYTES) + 1024;
    size_t window = u->socket.granted / 2 / ((size_t)world->ranks - 1) / packet;
    u->window = window < 4 ? 4 : window > 1024 ? 1024 : (uint32_t)window;
    u->link.run = u->run;
    u->wake = eventfd(0, EFD_CLOEXEC);
    if (u->wake < 0 || !start_thread(u)) {
        lossynet_log("rank %d: no thread to answer peers", world->rank);
        link_close(&u->link);
        return LOSSYNET_LINK;
    }
    u->opened = true;
    *out = &u->link;
    return LOSSYNET_OK;
close_link:
    link_close(&u->link);
no_memory:
    lossynet_log("rank %d: no memory for %d peers", world->rank, world->ranks);
    return LOSSYNET_NO_MEMORY;
}

/* ---- with MPI ---- */

#ifdef LOSSYNET_MPI
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

static lossynet_status share_by_mpi(void *context, const struct lossynet_world *world, void *all,
                                    size_t bytes) {
    (void)context;
    int started = 0;
    MPI_Initialized(&started);
    if (started && !MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, all, (int)bytes, MPI_BYTE,
                                  MPI_COMM_WORLD))
        return LOSSYNET_OK;
    lossynet_log("rank %d: MPI cannot tell the addresses of the ranks", world->rank);
    return LOSSYNET_LINK;
}
#else
static lossynet_status share_by_mpi(void *context, const struct lossynet_world *world, void *all,
                                    size_t bytes) {
    (void)context, (void)all, (void)bytes;
    lossynet_log("%d ranks, but this program was built without MPI: install Open MPI (mpicc) and "
                 "build again",
                 world->ranks);
    return LOSSYNET_LINK;
}
#endif

lossynet_status lossynet_link_udp_open(const struct lossynet_link_settings *settings,
                                       struct lossynet_link **out) {
    return lossynet_link_udp_open_with(settings, share_by_mpi, NULL, out);
}

lossynet_status lossynet_link_udp_packet_bytes(const struct lossynet_world *world,
                                               const char *interface, size_t *bytes) {
    struct udp_address mine;
    size_t mtu = 0;
    bool one_host = world->local_ranks == world->ranks;
    uint64_t *payload = lossynet_memory_take((size_t)world->ranks, sizeof *payload);
    if (!payload) return LOSSYNET_NO_MEMORY;
    lossynet_status chosen = udp_choose(interface, one_host, &mine, &mtu);
    if (!chosen) payload[world->rank] = udp_payload(mtu, mine.any.sa_family);
    lossynet_status status = share_by_mpi(NULL, world, payload, sizeof *payload);
    *bytes = LOSSYNET_MPI_PACKET_BYTES; /* on large MTUs: small losses are better than large ones */
    for (int r = 0; r < world->ranks && !status; r++) {
        if (payload[r] < *bytes) *bytes = payload[r];
        if (payload[r] == 0) status = LOSSYNET_LINK; /* that rank has said why */
    }
    free(payload);
    return chosen ? chosen : status;
}
