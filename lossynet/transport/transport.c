/* transport.c — opens and closes the transport: ranks introduce themselves, memory is allocated. */
#include "lossynet/transport/exchange/exchange.h"

#include <math.h>
#include <stdlib.h>

enum { FRAGMENT_BYTES = 8192 };

static const double PEER_TIMEOUT = 10; /* seconds, if the caller gives none */

/* ---- open ---- */

struct hello { /* exchanged between ranks before the link opens, and again after */
    uint64_t session, encrypt, threads;
    int64_t window;
};

static lossynet_status share_hello(struct ln_transport *t, struct hello *all, struct hello mine) {
    memset(all, 0, (size_t)t->world.ranks * sizeof *all);
    all[t->world.rank] = mine;
    return ln_share(&t->world, all, sizeof *all);
}

/* Agrees on a session and, if datagrams are encrypted, on its keys. */
static lossynet_status open_session(struct ln_transport *t,
                                    const struct ln_transport_settings *settings,
                                    struct hello *all) {
    lossynet_status status =
        share_hello(t, all,
                    (struct hello){.session = ln_random(),
                                   .encrypt = settings->network.encrypt,
                                   .threads = (uint64_t)settings->network.threads});
    if (status) return status;
    t->session.id = all[0].session;
    for (int r = 1; r < t->world.ranks; r++) {
        if (all[r].threads != all[0].threads)
            return ln_refuse(
                "rank %d was started with link-threads %d, rank 0 with %d: expected the same on "
                "all ranks",
                r, (int)all[r].threads, (int)all[0].threads);
        if (all[r].encrypt == all[0].encrypt) continue;
        return ln_refuse(
            "rank %d was started %s encryption, rank 0 %s: expected the same on all ranks", r,
            all[r].encrypt ? "with" : "without", all[0].encrypt ? "with" : "without");
    }
    if (!settings->network.encrypt) return LOSSYNET_OK;
    return ln_secure_open(&t->world, t->session.id, settings->network.key_file, &t->session.secure);
}

/* Opens the link and tells the peers how much they may send. */
static lossynet_status introduce(struct ln_transport *t,
                                 const struct ln_transport_settings *settings,
                                 ln_link_open link_open, struct hello *all) {
    struct ln_session *session = &t->session;
    const int ranks = t->world.ranks;
    lossynet_status status = open_session(t, settings, all);
    if (status) return status;
    const size_t trailer = settings->network.encrypt ? LOSSYNET_SECURE_BYTES : 0;
    const struct ln_link_settings link = {
        .world = t->world,
        .run = session->id,
        .payload_bytes = settings->packet_bytes ? settings->packet_bytes + trailer : 0,
        .network = settings->network,
    };
    session->two_classes = settings->network.dscp > 0;
    status = link_open(&link, &t->link);
    if (status) return status;
    session->payload_most = t->link->features.payload_most;
    size_t room = session->payload_most - trailer;
    t->session.fragment_bytes = (room < FRAGMENT_BYTES ? room : FRAGMENT_BYTES) / 4 * 4;

    /* All peers together may fill half of the queue with DATA. The rest is for other datagrams. */
    ln_window_open(t);
    status = share_hello(t, all, (struct hello){.window = session->window});
    for (int r = 0; r < ranks && !status; r++) ln_window_told(t, r, (int)all[r].window);
    return status;
}

/* Opens what one thread has. first: the first thread's, or NULL. */
static lossynet_status open_one(const struct ln_transport_settings *settings,
                                ln_link_open link_open, struct ln_transport *first,
                                struct ln_transport **out) {
    *out = NULL;
    const size_t ranks = (size_t)settings->world.ranks;
    struct ln_transport *t = ln_memory_take(1, sizeof *t);
    if (!t)
        return ln_fail(LOSSYNET_NO_MEMORY, "rank %d: no memory for %zu peers", settings->world.rank,
                       ranks);
    struct hello *all;
    lossynet_status status = LOSSYNET_NO_MEMORY;
    t->world = settings->world;
    t->threads.log = settings->log;
    t->threads.team.first_told = first ? &first->threads.team.told : &t->threads.team.told;
    t->agenda.pool.rank = t->world.rank;
    pthread_mutex_init(&t->threads.lock, NULL);
    pthread_mutex_init(&t->threads.caller, NULL);
    pthread_cond_init(&t->threads.handed_back, NULL);
    POOL_TAKE(&t->agenda.pool, all, ranks);
    POOL_TAKE(&t->agenda.pool, t->peers, ranks);
    POOL_TAKE(&t->agenda.pool, t->gathers[LOSSYNET_GATHER].kept, LOSSYNET_KEPT_BYTES);
    if (ln_agenda_open(&t->agenda, &t->world)) {
        t->session.peer_timeout =
            settings->network.peer_timeout > 0 ? settings->network.peer_timeout : PEER_TIMEOUT;
        ln_pacing_open(&t->pacing, settings->network.pace_gbps, settings->network.loss_budget);
        t->sender.first = (t->world.rank + 1) % t->world.ranks;
        t->receiver.empty = t->receiver.marked = t->receiver.back = ln_now();
        t->receiver.grace = GRACE_MIN;
        t->deadline = (struct ln_deadline){.on = settings->network.skip_late,
                                           .fixed = settings->network.deadline,
                                           .wait = HUGE_VAL,
                                           .late_comes = settings->late_comes,
                                           .pulses = settings->pulses,
                                           .phases = {settings->phases[0], settings->phases[1]}};
        status = introduce(t, settings, link_open, all);
        if (!status && t->link->features.reliable) t->deadline.on = false;
    }
    if (status)
        ln_transport_close(t);
    else
        *out = t;
    return status;
}

lossynet_status ln_transport_open(const struct ln_transport_settings *settings,
                                  ln_link_open link_open, struct ln_transport **out) {
    struct ln_transport_settings each = *settings;
    const int threads = settings->network.threads > 1 ? settings->network.threads : 1;
    each.network.threads = threads;
    each.network.pace_gbps /= threads;
    struct ln_transport **next = out;
    lossynet_status status = open_one(&each, link_open, NULL, next);
    for (int i = 1; i < threads && !status && !(*out)->link->features.reliable; i++) {
        each.packet_bytes = ln_transport_facts(*out).payload_most;
        each.network.threads = 0; /* not the first */
        next = &(*next)->threads.team.next;
        status = open_one(&each, link_open, *out, next);
    }
    if (!status) return LOSSYNET_OK;
    ln_transport_close(*out);
    *out = NULL;
    return status;
}

void ln_transport_shape(struct ln_transport *t, size_t thread, struct ln_pool *pool,
                        const struct ln_transport_shape *shape,
                        const struct ln_transport_calls *calls) {
    const size_t workers = (size_t)shape->workers, buckets = (size_t)shape->buckets;
    struct ln_transport measured; /* counts only */
    for (; t && thread > 0; thread--) t = t->threads.team.next;
    if (!t) t = &measured;
    for (int kind = 0; kind < 2; kind++) {
        struct ln_buckets *b = &t->phase[kind].buckets;
        POOL_TAKE(pool, b->missing, buckets * workers);
        POOL_TAKE(pool, b->late, buckets);
        POOL_TAKE(pool, b->passed, buckets * workers);
        POOL_TAKE(pool, b->reached, workers);
        POOL_TAKE(pool, b->checked, buckets);
        POOL_TAKE(pool, b->over, buckets);
    }
    if (t == &measured) return;
    t->shape = *shape;
    t->calls = *calls;
    t->session.padding = ln_pool_take(pool, 1, t->session.payload_most);
    if (t->session.secure)
        t->session.sealed = ln_pool_take(pool, LOSSYNET_BATCH, t->session.payload_most);
}

size_t ln_transport_memory(int ranks, size_t packet_bytes, bool encrypt) {
    size_t bytes = sizeof(struct ln_transport) + (size_t)ranks * sizeof(struct ln_peer) +
                   ln_agenda_memory(ranks) + LOSSYNET_KEPT_BYTES + packet_bytes;
    if (encrypt)
        bytes += ln_secure_memory(ranks) + LOSSYNET_BATCH * (packet_bytes + LOSSYNET_SECURE_BYTES);
    return bytes;
}

/* ---- close ---- */

/* Ends all threads. Where one has failed, the others fail, too: they need not wait for peers. */
static void stop(struct ln_transport *t) {
    lossynet_status failed = LOSSYNET_OK;
    for (struct ln_transport *one = t; one && !failed; one = one->threads.team.next) {
        ln_threads_enter(one);
        failed = one->failed;
        ln_threads_leave(one);
    }
    for (; t; t = t->threads.team.next) {
        ln_threads_enter(t);
        if (!t->failed) t->failed = failed;
        ln_threads_leave(t);
        ln_progress_stop(t);
    }
}

void ln_transport_close(struct ln_transport *t) {
    stop(t);
    for (struct ln_transport *next; t; t = next) {
        next = t->threads.team.next;
        if (t->link) t->link->close(t->link);
        ln_secure_close(t->session.secure);
        pthread_cond_destroy(&t->threads.handed_back);
        pthread_mutex_destroy(&t->threads.caller);
        pthread_mutex_destroy(&t->threads.lock);
        ln_pool_close(&t->agenda.pool);
        free(t);
    }
}

/* ---- queries ---- */

static size_t bytes_of(const struct ln_transport *t) {
    return sizeof *t + t->agenda.pool.bytes + t->link->memory_bytes +
           (t->session.secure ? ln_secure_memory(t->world.ranks) : 0);
}

struct ln_transport_facts ln_transport_facts(const struct ln_transport *t) {
    size_t bytes = 0, threads = 0;
    for (const struct ln_transport *one = t; one; one = one->threads.team.next)
        bytes += bytes_of(one), threads++;
    return (struct ln_transport_facts){
        .session = t->session.id,
        .link = t->link->name,
        .payload_most = t->session.payload_most - (t->session.secure ? LOSSYNET_SECURE_BYTES : 0),
        .bytes = bytes,
        .threads = threads,
        .threaded = t->threads.threaded,
        .reliable = t->link->features.reliable,
    };
}

bool ln_transport_has_failed(struct ln_transport *t, bool *missing) {
    if (t->link->features.reliable) return false;
    bool failed = false;
    for (int r = 0; r < t->world.ranks; r++) missing[r] = false;
    for (struct ln_transport *one = t; one; one = one->threads.team.next) {
        ln_threads_enter(one);
        for (int r = 0; r < t->world.ranks; r++) missing[r] |= one->peers[r].live.missed;
        failed |= one->failed != LOSSYNET_OK;
        ln_threads_leave(one);
    }
    if (failed) stop(t); /* nothing writes into the vectors any more */
    return failed;
}

static void add_counters(struct ln_transport *t, uint64_t *events, struct ln_relayed *relayed) {
    ln_threads_enter(t);
    const struct ln_rejected *r = &t->receiver.rejected;
    events[LOSSYNET_LATE] += r->late;
    events[LOSSYNET_DUPLICATE] += r->duplicate;
    events[LOSSYNET_REJECTED] +=
        r->truncated + r->foreign + r->version + r->corrupt + r->invalid + r->not_finite;
    events[LOSSYNET_OVERRUN] += t->link->overruns ? t->link->overruns(t->link) : 0;
    events[LOSSYNET_STRAGGLER] += t->receiver.stragglers;
    for (int phase = 0; phase < 2; phase++) {
        relayed->packets[phase] += t->receiver.relayed.packets[phase];
        relayed->bytes[phase] += t->receiver.relayed.bytes[phase];
    }
    events[LOSSYNET_PACE] += (uint64_t)(t->pacing.rate * 8e-3);
    ln_threads_leave(t);
}

void ln_transport_counters(struct ln_transport *t, uint64_t *events, struct ln_relayed *relayed) {
    memset(events, 0, LOSSYNET_EVENTS * sizeof *events);
    *relayed = (struct ln_relayed){0};
    for (; t; t = t->threads.team.next) add_counters(t, events, relayed);
    events[LOSSYNET_RELAYED] = relayed->packets[0] + relayed->packets[1];
}

void ln_transport_late(struct ln_transport *t, lossynet_phase phase, int bucket, uint64_t *late) {
    for (*late = 0; t; t = t->threads.team.next) {
        ln_threads_enter(t);
        *late += t->phase[phase].buckets.late[bucket];
        t->phase[phase].buckets.late[bucket] = 0;
        ln_threads_leave(t);
    }
}

void ln_transport_set_step(struct ln_transport *t, uint64_t step) {
    for (; t; t = t->threads.team.next)
        __atomic_store_n(&t->session.step, step, __ATOMIC_RELAXED); /* ln_session_step */
}

bool ln_transport_register(struct ln_transport *t, const void *memory, size_t bytes) {
    if (!t->link->register_memory || t->session.secure) return false;
    bool done = true;
    for (; t; t = t->threads.team.next) {
        ln_threads_enter(t);
        done &= t->link->register_memory(t->link, memory, bytes);
        ln_threads_leave(t);
    }
    return done;
}
