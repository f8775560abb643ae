/* engine.c — the crank of lossynet's exchange between ranks: see engine.h.
 *
 * One turn receives what has come, answers, sends what may leave, and repeats what is due. Here is
 * also what every datagram goes through: sealing on its way out, judging on its way in.
 */
#include "lossynet/engine.h"

#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FRAGMENT_BYTES = 8192, TURNS = 8 };

static const double IDLE = 1.0;       /* longest sleep; a datagram or a caller ends it */
static const double TICK = 1e-4;      /* longest sleep while something is expected, of few, ... */
static const double TICK_MOST = 0.01; /* ... and of many */
static const double LEAVING = 1.0;    /* longest wait for peers to take note that we leave */
static const double LEFT = 0.1;       /* silence of a rank that has left: what it sent has come */
static const double PEER_TIMEOUT = 10;

int (*lossynet_arrival_hook)(int rank, int peer, const uint8_t *datagram, size_t bytes);

void lossynet_engine_fail(struct lossynet *net, int peer, const char *format, ...) {
    if (net->engine->failed) return;
    char what[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    lossynet_log("rank %d, step %" PRIu64 ", peer rank %d %s", net->world.rank,
                 lossynet_engine_step(net), peer, what);
    net->engine->failed = LOSSYNET_LINK;
}

/* ---- repeating ---- */

bool lossynet_timer_is_due(struct lossynet_engine *engine, struct lossynet_peer *peer,
                           struct lossynet_timer *t, double now) {
    double pause = t->pause * lossynet_engine_slowness(engine);
    if (now - t->since < fmin(pause, engine->peer_timeout / LOSSYNET_RETRIES_LEAST)) return false;
    if (t->pause > 0 && !peer->repeated) {
        peer->repeated = true;
        engine->unanswered++;
    }
    double longer = LOSSYNET_RETRY_MORE * t->pause;
    t->pause = fmin(fmax(longer, LOSSYNET_RETRY), LOSSYNET_RETRY_MOST);
    t->since = now;
    return true;
}

/* ---- sending ---- */

static void seal(struct lossynet *net, struct lossynet_datagram *d, int slot) {
    struct lossynet_engine *engine = net->engine;
    wire_put(d->header + WIRE_CHECKSUM_AT, 0, 4);
    if (engine->secure) {
        size_t sealed = d->length + LOSSYNET_SECURE_BYTES;
        uint8_t *out = engine->sealed + (size_t)slot * engine->payload_most;
        lossynet_secure_seal(engine->secure, d->header, d->payload, d->length, out);
        d->payload = out;
        d->length = sealed;
    } else if (!net->link->reliable) {
        uint32_t crc = lossynet_crc32c(0, d->header, WIRE_HEADER_BYTES);
        if (!d->device) crc = lossynet_crc32c(crc, d->payload, d->length);
        wire_put(d->header + WIRE_CHECKSUM_AT, crc, 4);
    }
}

void lossynet_engine_send(struct lossynet *net, int peer, struct lossynet_datagram *batch, int n) {
    for (int i = 0; i < n; i++) seal(net, &batch[i], i);
    lossynet_status status = net->link->send(net->link, peer, batch, n);
    if (status && !net->engine->failed) net->engine->failed = status;
}

/* ---- receiving ---- */

/* The counter of what is wrong with a datagram as such, NULL when a rank of this run has sent it. */
static uint64_t *reject(struct lossynet *net, int peer, struct wire_header *h, uint8_t *datagram,
                        size_t bytes) {
    struct lossynet_engine *engine = net->engine;
    struct lossynet_rejected *rejected = &net->rejected;
    if (bytes < WIRE_HEADER_BYTES) return &rejected->truncated;
    wire_decode(h, datagram, bytes);
    if (h->magic != WIRE_MAGIC || peer < 0 || peer >= net->world.ranks || peer == net->world.rank)
        return &rejected->foreign;
    if (h->version != WIRE_VERSION) return &rejected->version;
    if (h->run != (uint32_t)engine->run) return &rejected->foreign;
    if (h->type == WIRE_TEST) return &engine->ignored;
    if (engine->secure) {
        if (h->length < LOSSYNET_SECURE_BYTES ||
            !lossynet_secure_open_datagram(engine->secure, peer, datagram,
                                           datagram + WIRE_HEADER_BYTES, h->length))
            return &rejected->corrupt;
        h->length -= LOSSYNET_SECURE_BYTES;
    } else if (!net->link->reliable) {
        wire_put(datagram + WIRE_CHECKSUM_AT, 0, 4);
        bool header_alone =
            net->link->checks_payload && h->type == WIRE_DATA && h->elements == WIRE_DEVICE_FLOAT32;
        uint32_t crc = lossynet_crc32c(0, datagram, header_alone ? WIRE_HEADER_BYTES : bytes);
        wire_put(datagram + WIRE_CHECKSUM_AT, h->checksum, 4);
        if (crc != h->checksum) return &rejected->corrupt;
    }
    int sender = h->type == WIRE_DATA ? h->sender / net->local : h->sender;
    bool ours = h->type == WIRE_DATA
                    ? h->receiver == WIRE_EVERYONE || lossynet_is_local(net, h->receiver)
                    : h->receiver == net->world.rank;
    if (h->type == 0 || h->type >= WIRE_TYPES || h->kind >= WIRE_KINDS || sender != peer || !ours)
        return &rejected->invalid;
    return NULL;
}

void lossynet_engine_receive(struct lossynet *net, int peer, uint8_t *datagram, size_t bytes) {
    struct wire_header h;
    uint64_t *wrong = reject(net, peer, &h, datagram, bytes);
    if (wrong) {
        ++*wrong;
        return;
    }
    net->engine->peers[peer].heard = net->engine->now;
    if (h.type == WIRE_DATA)
        lossynet_stream_receive(net, peer, &h, datagram + WIRE_HEADER_BYTES);
    else
        lossynet_reliable_receive(net, peer, &h, datagram + WIRE_HEADER_BYTES);
}

/* For tests: a hook says how often a datagram arrives; -1: after the next one. */
static void receive_hooked(struct lossynet *net, int peer, uint8_t *datagram, size_t bytes) {
    struct lossynet_kept *kept = &net->engine->kept;
    int copies = lossynet_arrival_hook(net->world.rank, peer, datagram, bytes);
    if (copies < 0 && !kept->bytes) {
        *kept = (struct lossynet_kept){malloc(bytes), bytes, peer};
        memcpy(kept->bytes, datagram, bytes);
        return;
    }
    for (int i = 0; i < copies || (copies < 0 && i == 0); i++)
        lossynet_engine_receive(net, peer, datagram, bytes);
    if (!kept->bytes) return;
    lossynet_engine_receive(net, kept->peer, kept->bytes, kept->count);
    free(kept->bytes);
    kept->bytes = NULL;
}

/* Handles what has come; false when nothing has. */
static bool receive(struct lossynet *net) {
    struct lossynet_engine *engine = net->engine;
    struct lossynet_arrival arrivals[LOSSYNET_BATCH];
    bool any = false;
    for (int turn = 0; turn < TURNS; turn++) {
        engine->now = lossynet_now();
        int n = net->link->receive(net->link, arrivals);
        if (n == 0) engine->empty = engine->now;
        for (int i = 0; i < n; i++)
            (lossynet_arrival_hook ? receive_hooked : lossynet_engine_receive)(
                net, arrivals[i].peer, arrivals[i].bytes, arrivals[i].count);
        any |= n > 0;
        if (n == 0) break;
    }
    return any;
}

/* ---- turning ---- */

/* Asks those of whom something is expected, and finds the dead. True while anything is expected. */
static bool watch(struct lossynet *net, double now) {
    struct lossynet_engine *engine = net->engine;
    bool expecting = false;
    for (int r = 0; r < net->world.ranks; r++) {
        if (r == net->world.rank) continue;
        struct lossynet_peer *p = &engine->peers[r];
        if (!p->blocked && !lossynet_stream_awaits(net, r) && !lossynet_reliable_awaits(net, r)) {
            p->expected = 0;
            continue;
        }
        expecting = true;
        if (p->expected == 0) p->expected = now, p->probe_sends = !p->blocked;
        if (net->link->reliable || engine->closing) continue;
        double silence = lossynet_engine_silence(engine, r);
        if (p->left && silence > LEFT)
            lossynet_engine_fail(net, r, "has left the run");
        else if (silence > engine->peer_timeout)
            lossynet_engine_fail(net, r,
                                 "was not heard for %.1f s: expected an answer within %g s "
                                 "(--peer-timeout)",
                                 silence, engine->peer_timeout);
        /* What is lost on its way to us is repeated by the peer, except for what lets us send. */
        double pause = p->blocked ? LOSSYNET_RETRY : LOSSYNET_RETRY_MOST;
        bool moves = p->blocked && now - p->credited < LOSSYNET_RETRY;
        if (moves || p->blocked != p->probe_sends)
            p->probe = (struct lossynet_timer){.since = now, .pause = pause};
        else if (lossynet_timer_is_due(engine, p, &p->probe, now))
            lossynet_reliable_tell(net, r, WIRE_PROBE, 0, 0, 0);
        p->probe_sends = p->blocked;
    }
    return expecting;
}

double lossynet_engine_turn(struct lossynet *net) {
    double wait = IDLE;
    bool any = receive(net);
    double now = lossynet_now();
    lossynet_stream_judge(net);
    lossynet_reliable_push(net, now);
    any |= lossynet_stream_push(net, &wait);
    bool expecting = watch(net, now);
    if (any) return 0;
    if (!expecting && !lossynet_reliable_busy(net)) return wait;
    return fmin(wait, fmin(TICK_MOST, TICK * lossynet_engine_slowness(net->engine)));
}

/* ---- threads ---- */

void lossynet_engine_enter(struct lossynet *net) {
    struct lossynet_engine *engine = net->engine;
    if (!engine->threaded) return;
    __atomic_add_fetch(&engine->wanted, 1, __ATOMIC_SEQ_CST);
    net->link->wake(net->link);
    pthread_mutex_lock(&engine->lock);
}

void lossynet_engine_leave(struct lossynet *net) {
    struct lossynet_engine *engine = net->engine;
    if (!engine->threaded) return;
    __atomic_sub_fetch(&engine->wanted, 1, __ATOMIC_SEQ_CST);
    pthread_cond_signal(&engine->handed_back);
    pthread_mutex_unlock(&engine->lock);
}

lossynet_status lossynet_engine_until(struct lossynet *net, bool (*over)(struct lossynet *, int),
                                      int argument) {
    struct lossynet_engine *engine = net->engine;
    while (!engine->failed && !over(net, argument)) {
        double wait = lossynet_engine_turn(net);
        if (wait > 0 && !engine->failed && !over(net, argument)) net->link->wait(net->link, wait);
    }
    return engine->failed;
}

/* The engine's own thread: holds the lock but while a caller wants it. A failure is the next
 * caller's to hear of; until then peers may still be answered. */
static void *run(void *argument) {
    struct lossynet *net = argument;
    struct lossynet_engine *engine = net->engine;
    pthread_mutex_lock(&engine->lock);
    while (!engine->stop) {
        if (__atomic_load_n(&engine->wanted, __ATOMIC_SEQ_CST) > 0) {
            pthread_cond_wait(&engine->handed_back, &engine->lock);
            continue;
        }
        double wait = lossynet_engine_turn(net);
        if (wait > 0 && __atomic_load_n(&engine->wanted, __ATOMIC_SEQ_CST) == 0)
            net->link->wait(net->link, wait);
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

lossynet_status lossynet_engine_start(struct lossynet *net) {
    if (net->link->reliable) return LOSSYNET_OK;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the caller's */
    net->engine->threaded = pthread_create(&net->engine->thread, NULL, run, net) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (net->engine->threaded) return LOSSYNET_OK;
    lossynet_log("rank %d: no thread for the exchange with peers", net->world.rank);
    return LOSSYNET_LINK;
}

/* ---- open ---- */

struct card { /* what ranks tell each other before the link opens, and after */
    uint64_t run, encrypt;
    int64_t window;
};

static lossynet_status share_cards(struct lossynet *net, lossynet_share share, void *context,
                                   struct card *cards, struct card mine) {
    memset(cards, 0, (size_t)net->world.ranks * sizeof *cards);
    cards[net->world.rank] = mine;
    return share(context, &net->world, cards, sizeof *cards);
}

static lossynet_status introduce(struct lossynet *net, const struct lossynet_settings *settings,
                                 lossynet_link_open link_open, lossynet_share share, void *context,
                                 struct card *cards) {
    struct lossynet_engine *engine = net->engine;
    int ranks = net->world.ranks;
    lossynet_status status =
        share_cards(net, share, context, cards,
                    (struct card){.run = lossynet_random(), .encrypt = settings->encrypt});
    if (status) return status;
    engine->run = cards[0].run;
    for (int r = 1; r < ranks; r++) {
        if (cards[r].encrypt == cards[0].encrypt) continue;
        lossynet_log("rank %d was started %s --encrypt, rank 0 %s: expected the same on all ranks",
                     r, cards[r].encrypt ? "with" : "without",
                     cards[0].encrypt ? "with" : "without");
        return LOSSYNET_INVALID;
    }
    if (settings->encrypt) {
        status = lossynet_secure_open(&net->world, engine->run, share, context, &engine->secure);
        if (status) return status;
    }
    size_t trailer = settings->encrypt ? LOSSYNET_SECURE_BYTES : 0;
    struct lossynet_link_settings link = {
        .world = net->world,
        .share = share,
        .share_context = context,
        .run = engine->run,
        .payload_bytes = settings->packet_bytes ? settings->packet_bytes + trailer : 0,
        .interface = settings->interface,
        .dscp = settings->dscp,
        .multicast = settings->multicast,
    };
    engine->two_classes = settings->dscp > 0;
    status = link_open(&link, &net->link);
    if (status) return status;
    engine->payload_most = net->link->payload_most;
    engine->multicast = settings->multicast && net->link->multicast;
    size_t room = engine->payload_most - trailer;
    engine->fragment_bytes = (room < FRAGMENT_BYTES ? room : FRAGMENT_BYTES) / 4 * 4;

    /* All peers together may fill half of the queue; the rest is for what is not counted. */
    int window = net->link->receive_queue / 2 / (ranks - 1);
    engine->window = window < 4 ? 4 : window > 1024 ? 1024 : window;
    status = share_cards(net, share, context, cards, (struct card){.window = engine->window});
    for (int r = 0; r < ranks && !status; r++) engine->peers[r].window = (int)cards[r].window;
    return status;
}

lossynet_status lossynet_engine_open(struct lossynet *net, const struct lossynet_settings *settings,
                                     lossynet_link_open link_open, lossynet_share share,
                                     void *share_context) {
    size_t ranks = (size_t)net->world.ranks;
    struct lossynet_engine *engine = lossynet_memory_take(1, sizeof *engine);
    struct card *cards = lossynet_memory_take(ranks, sizeof *cards);
    if (engine) engine->peers = lossynet_memory_take(ranks, sizeof *engine->peers);
    net->engine = engine;
    lossynet_status status = LOSSYNET_NO_MEMORY;
    if (engine) {
        pthread_mutex_init(&engine->lock, NULL);
        pthread_mutex_init(&engine->caller, NULL);
        pthread_cond_init(&engine->handed_back, NULL);
    }
    if (!engine || !cards || !engine->peers) {
        lossynet_log("rank %d: no memory for %zu peers", net->world.rank, ranks);
    } else {
        engine->peer_timeout = settings->peer_timeout > 0 ? settings->peer_timeout : PEER_TIMEOUT;
        lossynet_pace_open(engine, settings);
        engine->empty = lossynet_now();
        engine->grace = LOSSYNET_GRACE;
        status = introduce(net, settings, link_open, share, share_context, cards);
    }
    free(cards);
    return status;
}

void lossynet_engine_take(struct lossynet *net, bool multicast) {
    struct lossynet_engine *engine = net->engine;
    size_t local = (size_t)net->local, workers = (size_t)net->workers;
    size_t buckets = (size_t)net->layout.buckets, ranks = (size_t)net->world.ranks;
    struct lossynet_engine measured; /* counts only */
    if (!engine) engine = &measured;
    for (int kind = 0; kind < 2; kind++) {
        NET_TAKE(net, engine->phase[kind].ready, local);
        NET_TAKE(net, engine->phase[kind].position, ranks * local);
        NET_TAKE(net, engine->missing[kind], buckets * workers);
        NET_TAKE(net, engine->passed[kind], buckets * workers);
        NET_TAKE(net, engine->reached[kind], workers);
        NET_TAKE(net, engine->bucket_over[kind], buckets);
    }
    NET_TAKE(net, engine->elsewhere, local);
    if (multicast) NET_TAKE(net, engine->group_position, local);
    if (lossynet_rounds(&net->layout))
        NET_TAKE(net, engine->rounded, LOSSYNET_BATCH * net->layout.packet_elements);
    if (net->engine && engine->secure)
        engine->sealed = lossynet_net_take(net, LOSSYNET_BATCH, engine->payload_most);
}

/* ---- close ---- */

static bool all_know(struct lossynet *net, int unused) {
    (void)unused;
    bool all = true;
    for (int r = 0; r < net->world.ranks; r++)
        all &= r == net->world.rank || net->engine->peers[r].knows;
    return all || lossynet_now() > net->engine->closing_since + LEAVING;
}

/* Peers may still miss our last answers: we leave when they know that we do. */
static void say_leave(struct lossynet *net) {
    struct lossynet_engine *engine = net->engine;
    int type = engine->failed ? WIRE_ABORT : WIRE_LEAVE;
    lossynet_status failed = engine->failed;
    engine->failed = LOSSYNET_OK;
    engine->closing = true;
    engine->closing_since = lossynet_now();
    for (int kind = 0; kind < 2; kind++) engine->phase[kind].awaited = false;
    engine->messaging = false;
    for (int r = 0; r < net->world.ranks; r++) {
        struct lossynet_peer *p = &engine->peers[r];
        if (r == net->world.rank) continue;
        p->message = lossynet_timer_at_once();
        for (int kind = 0; kind < 2; kind++)
            p->to[kind].complete = true, p->to[kind].done_waits &= !failed;
        if (failed) lossynet_reliable_tell(net, r, type, 0, 0, 0), p->knows = true;
    }
    engine->group.complete = true;
    if (!failed) lossynet_engine_until(net, all_know, 0);
    /* Those who left first may have missed that we know; they give up after LEAVING. */
    for (int r = 0; r < net->world.ranks; r++)
        if (r != net->world.rank)
            lossynet_reliable_tell(net, r, failed ? type : WIRE_LEFT, 0, 0, 0);
    engine->failed = failed;
}

void lossynet_engine_close(struct lossynet *net) {
    struct lossynet_engine *engine = net->engine;
    if (!engine) return;
    if (engine->threaded) {
        lossynet_engine_enter(net);
        say_leave(net);
        engine->stop = true;
        lossynet_engine_leave(net);
        net->link->wake(net->link);
        pthread_join(engine->thread, NULL);
    }
    if (net->link) net->link->close(net->link);
    net->link = NULL;
    lossynet_secure_close(engine->secure);
    pthread_cond_destroy(&engine->handed_back);
    pthread_mutex_destroy(&engine->caller);
    pthread_mutex_destroy(&engine->lock);
    for (int kind = 0; kind < 2; kind++) {
        free(engine->phase[kind].position);
        free(engine->phase[kind].ready);
        free(engine->bucket_over[kind]);
        free(engine->reached[kind]);
        free(engine->passed[kind]);
        free(engine->missing[kind]);
    }
    free(engine->kept.bytes);
    free(engine->sealed);
    free(engine->rounded);
    free(engine->elsewhere);
    free(engine->group_position);
    free(engine->peers);
    free(engine);
    net->engine = NULL;
}
