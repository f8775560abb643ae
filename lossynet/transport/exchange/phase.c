/* phase.c — the calls that begin and end phases, wait for buckets, and exchange messages. */
#include "lossynet/transport/exchange/exchange.h"

#include <math.h>

static const double TIMEOUTS = 4; /* time-outs of a question after which we stop asking */

/* ---- begin ---- */

/* Counts the packets that this rank expects in each bucket from each sender. */
static void expect(struct ln_transport *t, lossynet_phase phase) {
    const int workers = t->shape.workers, local = t->shape.local;
    struct ln_buckets *buckets = &t->phase[phase].buckets;
    for (int b = 0; b < t->shape.buckets; b++) {
        for (int w = 0; w < workers; w++) {
            size_t i = (size_t)b * workers + w;
            bool remote = w / local != t->world.rank;
            buckets->missing[i] = remote ? t->calls.expected(t->calls.context, phase, b, w) : 0;
            buckets->passed[i] = 0;
        }
        buckets->checked[b] = 0;
        __atomic_store_n(&buckets->over[b], 0, __ATOMIC_RELEASE);
    }
    for (int w = 0; w < workers; w++) buckets->reached[w] = 0;
}

static void receive_begin(struct ln_transport *t, lossynet_phase phase) {
    ln_threads_enter(t);
    expect(t, phase);
    double now = ln_now();
    for (int r = 0; r < t->world.ranks; r++) {
        const bool self = r == t->world.rank;
        struct ln_rx *rx = &t->peers[r].rx[phase];
        /* A peer that finished this phase before we opened it has sent us no packets of it. */
        const bool over = t->deadline.on && (int32_t)(t->peers[r].control.finished[phase] -
                                                      t->phase[phase].opened) > 0;
        *rx = (struct ln_rx){.state = self || over ? RX_OVER : RX_RECEIVING,
                             .done = rx->next_done,
                             .announced = rx->next_announced,
                             .idle = rx->next_done && rx->next_idle,
                             .given_up = rx->given_up,
                             .last = now,
                             .over = now,
                             .tell = ln_control_tell(&t->peers[r], now)};
        t->peers[r].control.state_due = !self;
    }
    t->phase[phase].opened++;
    t->phase[phase].reached = false;
    t->phase[phase].half = 0;
    ln_progress_push(t, now);
    ln_agenda_all(t);
    ln_threads_leave(t);
}

void ln_transport_receive_begin(struct ln_transport *t, lossynet_phase phase) {
    for (; t; t = t->threads.team.next) receive_begin(t, phase);
}

static void send_begin(struct ln_transport *t, lossynet_phase phase) {
    ln_threads_enter(t);
    t->phase[phase].begun++;
    if (phase == LOSSYNET_GRADIENT) ln_ask_sending(t);
    for (int r = 0; r < t->world.ranks; r++) {
        const uint32_t open = t->peers[r].control.open[phase];
        const bool has_closed = t->deadline.on && (int32_t)(open - t->phase[phase].begun) > 0;
        t->peers[r].tx[phase] =
            (struct ln_tx){.complete = r == t->world.rank || has_closed, .refused = has_closed};
    }
    __atomic_store_n(&t->sender.woken, true, __ATOMIC_SEQ_CST);
    ln_agenda_all(t);
    ln_threads_leave(t);
}

void ln_transport_send_begin(struct ln_transport *t, lossynet_phase phase) {
    for (; t; t = t->threads.team.next) send_begin(t, phase);
}

void ln_transport_wake(struct ln_transport *t) {
    for (; t; t = t->threads.team.next) {
        __atomic_store_n(&t->sender.woken, true, __ATOMIC_SEQ_CST);
        if (t->threads.threaded) t->link->wake(t->link);
    }
}

/* ---- end ---- */

/* From now on we need something of the peers. */
static void need(struct ln_transport *t, lossynet_phase phase) {
    t->phase[phase].awaited = t->phase[phase].reached = true;
    ln_agenda_all(t);
}

static lossynet_status await(struct ln_transport *t, lossynet_phase phase,
                             bool (*over)(struct ln_transport *, int), int argument) {
    struct ln_phase_state *state = &t->phase[phase];
    double start = ln_now();
    need(t, phase);
    lossynet_status status = ln_progress_until(t, over, argument);
    state->awaited = false;
    ln_agenda_all(t); /* now we do not any more */
    double seconds = ln_now() - start;
    state->seconds += state->seconds > 0 ? 0.25 * (seconds - state->seconds) : seconds;
    return status;
}

/* Waits until the link no longer reads payloads in place. Then the caller may change its
 * vectors. */
static void settle(struct ln_transport *t) {
    if (t->link->settle) t->link->settle(t->link);
}

static bool phase_is_over(struct ln_transport *t, int phase) {
    return t->agenda.count[LOSSYNET_RECEIVES + phase] == 0 && ln_send_all_left(t, phase);
}

/* The other threads need something of the peers, too, while the caller waits in the first one's place. */
static void await_others(struct ln_transport *t, lossynet_phase phase) {
    while ((t = t->threads.team.next)) {
        ln_threads_enter(t);
        need(t, phase);
        ln_threads_leave(t);
    }
}

static lossynet_status end(struct ln_transport *t, lossynet_phase phase) {
    struct ln_phase_state *state = &t->phase[phase];
    ln_threads_enter(t);
    lossynet_status status = await(t, phase, phase_is_over, phase);
    settle(t);
    if (phase == LOSSYNET_GRADIENT && ln_deadline_is_first(t)) ln_deadline_learn(t);
    state->closed = state->opened;
    state->closed_at = ln_now();
    t->receiver.grace = fmax(GRACE_MIN, 0.98 * t->receiver.grace);
    ln_threads_leave(t);
    return status;
}

lossynet_status ln_transport_end(struct ln_transport *t, lossynet_phase phase) {
    lossynet_status status = LOSSYNET_OK;
    await_others(t, phase);
    for (; t && !status; t = t->threads.team.next) status = end(t, phase);
    return status;
}

static bool is_over(const struct ln_transport *t, lossynet_phase phase, int bucket) {
    return __atomic_load_n(&t->phase[phase].buckets.over[bucket], __ATOMIC_ACQUIRE);
}

/* Lets one caller in at a time. Callers that wait for the same bucket then find it over. */
static lossynet_status wait_bucket(struct ln_transport *t, lossynet_phase phase, int bucket) {
    lossynet_status status = LOSSYNET_OK;
    pthread_mutex_lock(&t->threads.caller);
    if (!is_over(t, phase, bucket)) {
        ln_threads_enter(t);
        status = await(t, phase, ln_recv_bucket_is_over, (int)phase * t->shape.buckets + bucket);
        __atomic_store_n(&t->phase[phase].buckets.over[bucket], 1, __ATOMIC_RELEASE);
        ln_threads_leave(t);
    }
    pthread_mutex_unlock(&t->threads.caller);
    return status;
}

lossynet_status ln_transport_wait_bucket(struct ln_transport *t, lossynet_phase phase, int bucket) {
    lossynet_status status = LOSSYNET_OK;
    for (; t && !status; t = t->threads.team.next) status = wait_bucket(t, phase, bucket);
    return status;
}

static bool close_bucket(struct ln_transport *t, lossynet_phase phase, int bucket) {
    uint8_t *over = &t->phase[phase].buckets.over[bucket];
    pthread_mutex_lock(&t->threads.caller);
    ln_threads_enter(t);
    const bool ends =
        !t->failed && ln_recv_bucket_is_over(t, (int)phase * t->shape.buckets + bucket);
    if (ends) __atomic_store_n(over, 1, __ATOMIC_RELEASE);
    ln_threads_leave(t);
    pthread_mutex_unlock(&t->threads.caller);
    return ends;
}

/* What a thread has closed stays so. */
bool ln_transport_close_bucket(struct ln_transport *t, lossynet_phase phase, int bucket) {
    while (t && close_bucket(t, phase, bucket)) t = t->threads.team.next;
    return !t;
}

bool ln_transport_bucket_is_over(const struct ln_transport *t, lossynet_phase phase, int bucket) {
    while (t && is_over(t, phase, bucket)) t = t->threads.team.next;
    return !t;
}

lossynet_status ln_transport_drain(struct ln_transport *t, lossynet_phase phase) {
    lossynet_status status = LOSSYNET_OK;
    for (; t && !status; t = t->threads.team.next) {
        ln_threads_enter(t);
        status = ln_progress_until(t, ln_send_all_left, phase);
        settle(t);
        ln_threads_leave(t);
    }
    return status;
}

bool ln_transport_turn(struct ln_transport *t) {
    if (t->threads.threaded) return false;
    if (pthread_mutex_trylock(&t->threads.caller) == 0) { /* else another caller runs the loop */
        const struct ln_log_target *before = ln_log_use(&t->threads.log);
        if (!t->failed) ln_progress_turn(t);
        ln_log_use(before);
        pthread_mutex_unlock(&t->threads.caller);
    }
    return true;
}

/* ---- messages ---- */

static lossynet_status exchange(struct ln_transport *t, const uint8_t *out,
                                const size_t *out_offset, bool same, uint8_t *in,
                                const size_t *in_offset, uint8_t *came) {
    const int which = came ? LOSSYNET_PULSE : LOSSYNET_GATHER;
    ln_threads_enter(t);
    lossynet_status status = ln_progress_until(t, ln_message_settled, which);
    ln_message_begin(t, which, out, out_offset, same, in, in_offset);
    if (!status) status = ln_progress_until(t, ln_message_exchanged, which);
    if (!status) ln_progress_push(t, ln_now()); /* our last acknowledgements */
    t->gathers[which].open = !status && t->gathers[which].keeps;
    ln_agenda_all(t);
    for (int r = 0; came && r < t->world.ranks; r++) {
        const struct ln_message *m = &t->peers[r].message[which];
        came[r] = r == t->world.rank || m->got_before == m->expects;
    }
    ln_threads_leave(t);
    return status;
}

lossynet_status ln_transport_swap(struct ln_transport *t, const void *out, const size_t *out_offset,
                                  void *in, const size_t *in_offset, uint8_t *came) {
    return exchange(t, out, out_offset, false, in, in_offset, came);
}

lossynet_status ln_transport_gather(struct ln_transport *t, void *data, const size_t *offset,
                                    uint8_t *came) {
    return exchange(t, data, offset, true, data, offset, came);
}

bool ln_transport_is_awaited(struct ln_transport *t) {
    const uint32_t begun = t->gathers[LOSSYNET_GATHER].begun;
    bool called = false;
    ln_threads_enter(t);
    for (int r = 0; r < t->world.ranks; r++)
        called |= (int32_t)(t->peers[r].control.gathers - begun) > 0;
    ln_threads_leave(t);
    return called;
}

/* ---- questions to late ranks (ask.c) ---- */

/* Returns how many of our DATA have left for a peer in this step. */
static uint32_t sent(const struct ln_peer *p) {
    return p->question.sent + p->tx[LOSSYNET_GRADIENT].sent;
}

static bool is_answered(struct ln_transport *t, int unused) {
    bool open = false;
    (void)unused;
    for (int r = 0; r < t->world.ranks; r++) open |= t->peers[r].question.open;
    return !open || ln_now() > t->deadline.present.asks_until;
}

lossynet_status ln_transport_ask(struct ln_transport *t, uint8_t *in, const size_t *offset,
                                 uint8_t *came) {
    lossynet_status status = LOSSYNET_OK;
    double longest = 0;
    ln_threads_enter(t);
    const uint32_t begun = t->phase[LOSSYNET_GRADIENT].begun;
    for (int r = 0; r < t->world.ranks; r++) {
        struct ln_peer *p = &t->peers[r];
        const uint32_t ahead =
            ln_deadline_steps(t, p->control.open[LOSSYNET_GRADIENT]) - ln_deadline_steps(t, begun);
        const bool knows = sent(p) > 0 && ahead <= 1; /* in the same step, or the next one */
        p->question.got = 0;
        p->question.bytes = came[r] ? 0 : offset[r + 1] - offset[r];
        p->question.open = knows && p->question.bytes > 0;
        p->question.to = in + offset[r];
        p->question.repeat = ln_timer_at_once();
        if (p->question.open) longest = fmax(longest, ln_timer_timeout(p));
    }
    if (longest > 0) {
        t->deadline.present.asks_until = ln_now() + TIMEOUTS * longest;
        ln_agenda_all(t);
        status = ln_progress_until(t, is_answered, 0);
    }
    for (int r = 0; r < t->world.ranks; r++) {
        struct ln_question *q = &t->peers[r].question;
        q->open = false;
        if (q->bytes > 0 && q->got == q->bytes)
            came[r] = 1;
        else if (!came[r] && sent(&t->peers[r]) == 0)
            came[r] = LOSSYNET_NOTHING_SENT;
    }
    ln_threads_leave(t);
    return status;
}
