/* deadline.c — going on without late ranks: how long to wait for them, and what follows.
 *
 * A phase, or a round of messages of kind LOSSYNET_PULSE, ends when all peers are done, or a
 * deadline after half of the ranks were. It counts from the half-way rank, so that a rank that is
 * slow itself does not blame the others. Who is not done then is late: what has not come of it is
 * lost, and until it has opened the GRADIENT phase that we are in, nothing waits for it any longer
 * than for the others. A late rank sees in the others' states that they have ended its phase; it
 * then goes to their step (lossynet_transport_jump).
 *
 * The half-way rank is that of those that have a gradient: one that takes part without is done at
 * once, and says so (wire.h).
 *
 * The deadline is learnt. Let lag be the time by which a rank ends a GRADIENT phase after the
 * half-way one, q(D) the share of ranks with a lag over D, and m the largest lag of a step. With a
 * deadline D a step takes, on average, T(D) = base + E min(m, D). A late rank computes no gradient
 * in the step after (step.c), and its late one is lost, or comes in that step with error feedback:
 * of all ranks' gradients in a step comes the share
 *
 *     g = (1 - q) / (1 + q), or with error feedback g = 1 / (1 + q).
 *
 * A step with a batch B makes progress in proportion to 1 / (1 + b/B), b being the noise scale
 * (McCandlish et al. 2018, An Empirical Model of Large-Batch Training, equation 2.7). Where the
 * whole batch is b, what is reasonable, the share g of it makes 2g / (1 + g) of the progress: 1 -
 * q, or 1 / (1 + q/2). We take the D with the most progress per second, over T(D). DropCompute
 * (Giladi et al., NeurIPS 2023, section 4.1) does the same for gradients per second. Where lags are
 * spread evenly, as on a machine whose cores are shared, the best is to wait for all; where a few
 * are far behind, it is to go on. Who waits for nearly all waits twice as long as the slowest of
 * them took, and for a scheduler's turns, so that an ordinary step loses nothing. Who goes on
 * without some does so on purpose, and need not.
 *
 * The lag of a late rank is known when it opens the next phase. Steps that it leaves out tell
 * nothing of it.
 */
#include "lossynet/transport/progress.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

/* s, the shortest adaptive deadlines: of who waits for nearly all, a scheduler's turns; of others */
static const double LEAST = 0.02, LEAST_CUT = 0.015;
static const double NEARLY = 0.01; /* q(D) of a deadline that waits for nearly all, ... */
static const double MARGIN = 2;    /* ... which is so many times longer */
static const double ROUND_TRIPS = 3;
static const double TELL_AFTER = 1; /* s, before a line says that a rank is late */
static const double TELL_AGAIN = 4; /* times as long before the next */

enum {
    LEARNT = 16, /* steps before there is a deadline */
    EVERY = 8,   /* steps from one choice of it to the next */
};

void lossynet_deadline_open(struct lossynet_deadline *d, bool on, double fixed) {
    *d = (struct lossynet_deadline){.on = on, .fixed = fixed, .wait = HUGE_VAL};
}

/* ---- how long to wait ---- */

static int by_size(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

double lossynet_deadline_best(const struct lossynet_deadline *d) {
    enum { CHOICES = 20 };
    const uint32_t n = d->lags < LOSSYNET_DEADLINE_LAGS ? d->lags : LOSSYNET_DEADLINE_LAGS;
    const uint32_t steps = d->steps < LOSSYNET_DEADLINE_STEPS ? d->steps : LOSSYNET_DEADLINE_STEPS;
    float lag[LOSSYNET_DEADLINE_LAGS];
    double best = HUGE_VAL, most = 0;
    if (n == 0 || steps < LEARNT) return HUGE_VAL;
    memcpy(lag, d->lag, n * sizeof *lag);
    qsort(lag, n, sizeof *lag, by_size);
    for (uint32_t i = 0; i <= CHOICES; i++) {
        const double choice = (double)lag[(uint64_t)(n - 1) * i / CHOICES];
        uint32_t later = 0;
        while (later < n && (double)lag[n - 1 - later] > choice) later++;
        double seconds = 0;
        for (uint32_t s = 0; s < steps; s++)
            seconds += (double)d->base[s] + fmin((double)d->largest[s], choice);
        const double late = (double)later / n,
                     progress = d->late_comes ? 1 / (1 + late / 2) : 1 - late;
        const double speed = steps * progress / seconds;
        if (speed < most) continue;
        most = speed;
        best = late < NEARLY ? fmax(MARGIN * choice, LEAST) : fmax(choice, LEAST_CUT);
    }
    return best;
}

double lossynet_deadline_wait(const struct lossynet_transport *t) {
    const struct lossynet_deadline *d = &t->deadline;
    const double least = ROUND_TRIPS * t->agenda.slowest + t->receiver.grace;
    return fmax(d->fixed > 0 ? d->fixed : d->wait, least);
}

bool lossynet_deadline_is_over(const struct lossynet_transport *t, double half) {
    return half > 0 && t->receiver.empty - half > lossynet_deadline_wait(t);
}

/* Whether a rank takes part in this GRADIENT phase without a gradient, as far as is known. */
static bool idles(const struct lossynet_transport *t, int rank) {
    return rank == t->world.rank ? t->deadline.present.idle
                                 : t->peers[rank].rx[LOSSYNET_GRADIENT].idle;
}

static void note_lag(struct lossynet_deadline *d, uint32_t step, double lag) {
    d->lag[d->lags++ % LOSSYNET_DEADLINE_LAGS] = (float)lag;
    float *largest = &d->largest[step % LOSSYNET_DEADLINE_STEPS];
    if (d->steps - step <= LOSSYNET_DEADLINE_STEPS) *largest = fmaxf(*largest, (float)lag);
}

/* A deadline that is shorter than what an answer takes would make everybody late. */
static void tell_raised(struct lossynet_transport *t) {
    struct lossynet_deadline *d = &t->deadline;
    const double wait = lossynet_deadline_wait(t);
    if (d->fixed == 0 || d->raised || wait <= d->fixed) return;
    d->raised = true;
    if (t->world.rank == 0)
        lossynet_log("deadline %g s: expected at least three round trips: raised to %.2g s, and as "
                     "they change",
                     d->fixed, wait);
}

static double slowest_round_trip(const struct lossynet_transport *t) {
    double slowest = 0;
    for (int r = 0; r < t->world.ranks; r++)
        if (!lossynet_deadline_ignores(t, r)) slowest = fmax(slowest, t->peers[r].round_trip.mean);
    return slowest;
}

void lossynet_deadline_learn(struct lossynet_transport *t) {
    struct lossynet_deadline *d = &t->deadline;
    const struct lossynet_phase_state *phase = &t->phase[LOSSYNET_GRADIENT];
    t->agenda.slowest = slowest_round_trip(t);
    if (!d->on || phase->half == 0) return;
    tell_raised(t);
    const uint32_t step = d->steps++, slot = step % LOSSYNET_DEADLINE_STEPS;
    d->base[slot] = d->ended > 0 ? (float)fmax(0, phase->half - d->ended) : 0;
    d->largest[slot] = 0;
    d->ended = lossynet_now();
    for (int r = 0; r < t->world.ranks; r++) {
        struct lossynet_peer *p = &t->peers[r];
        if (r == t->world.rank) continue;
        if (idles(t, r)) continue;
        if (!p->lateness.late) {
            note_lag(d, step, fmax(0, p->rx[LOSSYNET_GRADIENT].over - phase->half));
        } else if (p->lateness.phase == phase->opened) {
            p->lateness.step = step; /* known when it has ended the phase */
            d->largest[slot] = fmaxf(d->largest[slot], (float)fmin(lossynet_deadline_wait(t), 1e9));
        }
    }
    if (d->steps >= LEARNT && d->steps % EVERY == 0) d->wait = lossynet_deadline_best(d);
}

/* ---- who is late ---- */

/* One rank tells: the first that is not late itself. */
static bool tells(const struct lossynet_transport *t, int peer) {
    for (int r = 0; r < t->world.rank; r++)
        if (r != peer && !t->peers[r].lateness.late) return false;
    return true;
}

void lossynet_deadline_tell(const struct lossynet_transport *t, int peer) {
    struct lossynet_waiting *l = &t->peers[peer].lateness;
    const double late = t->receiver.empty - l->since;
    if (late < TELL_AFTER || late < TELL_AGAIN * l->told) return;
    l->told = late;
    if (tells(t, peer))
        lossynet_log("step %" PRIu64 ": rank %d has been late for %.1f s; the others go on without "
                     "it",
                     lossynet_session_step(t), peer, late);
}

void lossynet_deadline_late(struct lossynet_transport *t, int peer) {
    struct lossynet_waiting *l = &t->peers[peer].lateness;
    if (l->late) return;
    l->late = true;
    t->deadline.late++;
    l->since = t->receiver.empty;
    l->told = 0;
    lossynet_agenda_count(t, peer);
    lossynet_agenda_soon(t, peer);
}

void lossynet_deadline_told(struct lossynet_transport *t, int peer) {
    struct lossynet_peer *p = &t->peers[peer];
    struct lossynet_waiting *l = &p->lateness;
    const struct lossynet_phase_state *phase = &t->phase[LOSSYNET_GRADIENT];
    /* Not what it says of the end of that phase, which the others' states end for it while it
     * computes. */
    if (l->phase && (int32_t)(p->control.open[LOSSYNET_GRADIENT] - l->phase) > 0) {
        note_lag(&t->deadline, l->step, t->receiver.now - l->half);
        l->phase = 0;
    }
    const uint32_t begun = lossynet_deadline_steps(t, p->control.open[LOSSYNET_GRADIENT]);
    if (begun != l->begun) {
        l->begun = begun;
        l->begun_at = t->receiver.now;
    }
    if (!l->late || (int32_t)(begun - lossynet_deadline_steps(t, phase->closed)) <= 0) return;
    l->late = false;
    t->deadline.late--;
    if (l->told > 0 && tells(t, peer))
        lossynet_log("step %" PRIu64 ": rank %d is back after %.1f s", lossynet_session_step(t),
                     peer, t->receiver.now - l->since);
}

/* ---- phases ---- */

/* Nothing of the peer holds up this phase any longer. */
static void give_up(struct lossynet_transport *t, int kind, int peer) {
    struct lossynet_peer *p = &t->peers[peer];
    const struct lossynet_phase_state *phase = &t->phase[kind];
    if (p->rx[kind].state != RX_OVER) {
        p->rx[kind].state = RX_OVER;
        p->rx[kind].over = t->receiver.empty;
        p->rx[kind].given_up = phase->opened;
        t->receiver.stragglers++;
        const bool first = kind == LOSSYNET_GRADIENT && lossynet_deadline_is_first(t);
        p->lateness.steps += first;
        if (first && p->lateness.phase == 0) {
            p->lateness.phase = phase->opened;
            p->lateness.half = phase->half > 0 ? phase->half : t->receiver.empty;
            p->lateness.step = t->deadline.steps;
        }
    }
    if (!p->tx[kind].complete && phase->begun > 0) lossynet_send_complete(&p->tx[kind]);
    lossynet_deadline_late(t, peer);
    lossynet_agenda_count(t, peer);
    lossynet_agenda_soon(t, peer);
}

/* Sending to a peer stands still: its window or its phase is shut. */
static bool is_stuck(const struct lossynet_transport *t, int peer, int kind, double wait) {
    const struct lossynet_peer *p = &t->peers[peer];
    const bool ignored = lossynet_deadline_ignores(t, peer) || lossynet_deadline_is_away(t, peer);
    return !p->tx[kind].complete && t->phase[kind].begun > 0 && p->flow.blocked &&
           (ignored || t->receiver.empty - p->flow.credited > wait);
}

void lossynet_deadline_check(struct lossynet_transport *t, int kind) {
    struct lossynet_phase_state *phase = &t->phase[kind];
    const int ranks = t->world.ranks, *count = t->agenda.count;
    if (!t->deadline.on || phase->opened == phase->closed) return;
    const bool gradient = kind == LOSSYNET_GRADIENT, idle = gradient && t->deadline.present.idle;
    const int done = count[LOSSYNET_IS_DONE + kind] + (phase->reached && !idle);
    const int counted = ranks - idle - (gradient ? count[LOSSYNET_IDLES] : 0);
    if (phase->half == 0 && 2 * done >= counted) phase->half = t->receiver.empty;
    if (!phase->awaited) return;
    const int late = lossynet_deadline_is_minority(t) ? 0 : count[LOSSYNET_LATE_FOR + kind];
    const int in_time = count[LOSSYNET_IN_TIME + kind] + late;
    const double wait = lossynet_deadline_wait(t);
    const bool ends = phase->half > 0 && t->receiver.empty - phase->half > wait;
    const bool holds_up = count[LOSSYNET_RECEIVES + kind] > 0 && (ends || in_time == 0);
    const bool stuck =
        count[LOSSYNET_STUCK + kind] > 0 || (ends && count[LOSSYNET_SENDS + kind] > 0);
    if (!holds_up && !stuck) return;
    for (int r = 0; r < ranks; r++) {
        struct lossynet_peer *p = &t->peers[r];
        if (r == t->world.rank) continue;
        const bool waits = p->rx[kind].state != RX_OVER;
        const bool ignored = lossynet_deadline_excuses(t, r, kind);
        if ((waits && (ends || (ignored && in_time == 0))) ||
            (is_stuck(t, r, kind, wait) && (ends || ignored || lossynet_deadline_is_away(t, r))))
            give_up(t, kind, r);
    }
}

/* How many GRADIENT phases at least half of the ranks are ahead. */
static uint32_t phases_ahead(struct lossynet_transport *t) {
    lossynet_progress_enter(t);
    uint32_t position = t->phase[LOSSYNET_GRADIENT].opened;
    const uint32_t own = position;
    /* The largest count that at least half of the ranks have come to. */
    for (int r = 0; r < t->world.ranks; r++) {
        const uint32_t count = t->peers[r].control.open[LOSSYNET_GRADIENT];
        int there = 0;
        if (r == t->world.rank || (int32_t)(count - position) <= 0) continue;
        for (int i = 0; i < t->world.ranks; i++)
            there += i != t->world.rank &&
                     (int32_t)(t->peers[i].control.open[LOSSYNET_GRADIENT] - count) >= 0;
        if (2 * there >= t->world.ranks) position = count;
    }
    lossynet_progress_leave(t);
    return position - own;
}

uint32_t lossynet_transport_position(struct lossynet_transport *t) {
    return phases_ahead(t) / t->deadline.phases[LOSSYNET_GRADIENT];
}

void lossynet_transport_lateness(struct lossynet_transport *t, uint64_t *late) {
    lossynet_progress_enter(t);
    for (int r = 0; r < t->world.ranks; r++) late[r] = t->peers[r].lateness.steps;
    lossynet_progress_leave(t);
}

bool lossynet_transport_sends_again(struct lossynet_transport *t, lossynet_phase phase, int rank) {
    lossynet_progress_enter(t);
    const struct lossynet_rx *rx = &t->peers[rank].rx[phase];
    const bool went_on = rx->given_up == t->phase[phase].closed;
    const bool nothing = phase == LOSSYNET_GRADIENT && rx->idle && !t->deadline.late_comes;
    lossynet_progress_leave(t);
    return !went_on && !nothing;
}

void lossynet_transport_stays(struct lossynet_transport *t, bool idle) {
    lossynet_progress_enter(t);
    t->deadline.present.idle = idle;
    t->deadline.present.opened = t->phase[LOSSYNET_GRADIENT].opened;
    lossynet_progress_leave(t);
}

void lossynet_transport_idle(struct lossynet_transport *t, bool *idle) {
    lossynet_progress_enter(t);
    for (int r = 0; r < t->world.ranks; r++) idle[r] = idles(t, r);
    lossynet_progress_leave(t);
}

bool lossynet_transport_is_behind(struct lossynet_transport *t) {
    double first = HUGE_VAL;
    lossynet_progress_enter(t);
    for (int r = 0; r < t->world.ranks; r++) {
        const struct lossynet_waiting *l = &t->peers[r].lateness;
        const uint32_t begun = lossynet_deadline_steps(t, t->phase[LOSSYNET_GRADIENT].opened);
        if (r != t->world.rank && (int32_t)(l->begun - begun) >= 0)
            first = fmin(first, l->begun_at);
    }
    const bool behind = lossynet_now() - first > lossynet_deadline_wait(t);
    lossynet_progress_leave(t);
    return behind;
}

bool lossynet_transport_is_late(struct lossynet_transport *t) {
    bool refused = false;
    if (phases_ahead(t) == 0) return false;
    lossynet_progress_enter(t);
    for (int r = 0; r < t->world.ranks; r++) refused |= t->peers[r].tx[LOSSYNET_GRADIENT].refused;
    lossynet_progress_leave(t);
    return refused;
}

void lossynet_transport_jump(struct lossynet_transport *t, uint32_t steps) {
    lossynet_progress_enter(t);
    struct lossynet_phase_state *gradient = &t->phase[LOSSYNET_GRADIENT];
    struct lossynet_phase_state *parameter = &t->phase[LOSSYNET_PARAMETER];
    gradient->begun += steps * t->deadline.phases[LOSSYNET_GRADIENT];
    gradient->opened = gradient->closed = gradient->begun;
    parameter->begun += steps * t->deadline.phases[LOSSYNET_PARAMETER];
    parameter->opened = parameter->closed = parameter->begun;
    t->rounds[LOSSYNET_PULSE].begun += steps * t->deadline.pulses;
    t->rounds[LOSSYNET_PULSE].complete = t->rounds[LOSSYNET_PULSE].begun;
    for (int r = 0; r < t->world.ranks; r++)
        for (int kind = 0; kind < 2; kind++) {
            t->peers[r].rx[kind].next_done = false;
            t->peers[r].tx[kind].complete = true;
            t->peers[r].tx[kind].done_waits = false;
        }
    lossynet_agenda_all(t);
    lossynet_progress_leave(t);
}
