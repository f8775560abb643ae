/* deadline.c — decides how long a rank waits for late ranks, and goes on without them.
 *
 * A phase, or a gather of kind LOSSYNET_PULSE, ends when all peers are done. Otherwise
 * it ends one deadline after half of the ranks were done. The time counts from the rank that
 * completes the first half, so that a rank that is slow itself does not blame the others. A rank
 * that is not done then is late: its missing packets are lost. Nothing waits for it any longer until
 * it has begun the step that we are in, unless more than half of the ranks are late. A late rank sees in the others'
 * states that they have ended its phase; it then jumps to their step (ln_transport_jump).
 *
 * Only ranks with a gradient count for the first half. An idle rank is done at once, and says so
 * in its DONE (wire.h).
 *
 * The deadline is learnt. Let the lag of a rank be the time from when half of the ranks have
 * ended a GRADIENT phase to its own end. Let q(D) be the share of ranks with a lag over D, and m the
 * largest lag of a step. With a deadline D a step takes T(D) = base + E min(m, D) on average, where
 * E is the mean over steps. A late rank computes no gradient in the next step (step.c). Its late
 * gradient is lost, or with error feedback comes in the next step. So the share of all ranks'
 * gradients that comes in a step is
 *
 *     g = (1 - q) / (1 + q), or with error feedback g = 1 / (1 + q).
 *
 * A step with a batch B makes progress in proportion to 1 / (1 + b/B), where b is the noise scale
 * (McCandlish et al. 2018, An Empirical Model of Large-Batch Training, equation 2.7). We assume
 * that the whole batch has the size b, which is reasonable. Then a share g of it makes 2g / (1 + g)
 * of the progress, which is 1 - q, or 1 / (1 + q/2) with error feedback. We choose the D for which
 * this progress divided by T(D) is largest. DropCompute (Giladi et al., NeurIPS 2023, section 4.1)
 * does the same for gradients per second. When lags are spread evenly, as on a machine with shared
 * cores, it is best to wait for all ranks; when a few ranks are far behind, it is best to go on
 * without.
 *
 * If the chosen deadline waits for nearly all ranks, it is doubled, and at least as long as a busy
 * scheduler may keep a process from running, so that an ordinary step loses nothing. If it leaves
 * out more ranks, they are left out on purpose, and it stays as it is.
 *
 * A deadline that is learnt lets no step take longer than MEDIANS median steps, or LONGEST if that
 * is more. Otherwise a rank that rarely stops for long would hold up all others each time: the few
 * lags that show it hardly lower the progress per second of a deadline that waits for the whole
 * stop.
 *
 * The lag of a late rank is known when it opens the next phase. Nothing is learnt of its lag in
 * steps that it leaves out.
 */
#include "lossynet/transport/exchange/exchange.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

/* The shortest adaptive deadlines, in seconds. A deadline that waits for nearly all ranks is at
 * least LEAST, the time that a busy scheduler may keep a process from running. A deadline that
 * leaves out more ranks is at least LEAST_CUT. */
static const double LEAST = 0.02, LEAST_CUT = 0.015;
static const double NEARLY = 0.01;   /* below this q(D) a deadline waits for nearly all ranks */
static const double MARGIN = 2;      /* such a deadline is multiplied by this */
static const double MEDIANS = 5;     /* a step that waits takes at most so many median steps, */
static const double LONGEST = 0.1;   /* or so many seconds */
static const double OWN_SHARE = 2;   /* medians of these for what is before and after the wait */
static const double ROUND_TRIPS = 3; /* no deadline is shorter than these, and the grace */
static const double TELL_AFTER = 1;  /* seconds before a line says that a rank is late */
static const double TELL_AGAIN = 4;  /* the next line comes when it is this many times as late */

enum {
    LEARNT = 16, /* steps before there is a deadline */
    EVERY = 8,   /* steps from one choice of the deadline to the next */
};

/* ---- how long to wait ---- */

static int by_size(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Returns the longest deadline that is learnt, from the times that steps take without waiting. */
static double longest(const float *base, uint32_t steps) {
    float sorted[LOSSYNET_DEADLINE_STEPS];
    memcpy(sorted, base, steps * sizeof *sorted);
    qsort(sorted, steps, sizeof *sorted, by_size);
    const double median = (double)sorted[steps / 2];
    return fmax(MEDIANS * median, LONGEST) - OWN_SHARE * median;
}

/* Returns the deadline with the most progress per second, or infinity if too little is known. */
static double best_deadline(const struct ln_deadline *d) {
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
    return fmin(best, longest(d->base, steps));
}

/* Returns how many seconds a rank waits for the others after half of them are done. At first it is
 * infinite. */
static double deadline_now(const struct ln_transport *t) {
    const struct ln_deadline *d = &t->deadline;
    const double least = ROUND_TRIPS * t->agenda.slowest + t->receiver.grace;
    return fmax(d->fixed > 0 ? d->fixed : d->wait, least);
}

bool ln_deadline_is_over(const struct ln_transport *t, double half) {
    return half > 0 && t->receiver.empty - half > deadline_now(t);
}

double ln_deadline_due(const struct ln_transport *t, double now) {
    double half = HUGE_VAL;
    for (int kind = 0; kind < 2 && t->deadline.on; kind++)
        if (t->phase[kind].awaited && t->phase[kind].half > 0)
            half = fmin(half, t->phase[kind].half);
    const struct ln_gathers *pulse = &t->gathers[LOSSYNET_PULSE];
    if (t->deadline.on && pulse->open && pulse->half > 0) half = fmin(half, pulse->half);
    const double due = half + deadline_now(t);
    return due > now ? due : HUGE_VAL;
}

/* Returns whether a rank takes part in this GRADIENT phase without a gradient, as far as we
 * know. */
static bool idles(const struct ln_transport *t, int rank) {
    return rank == t->world.rank ? t->deadline.present.idle
                                 : t->peers[rank].rx[LOSSYNET_GRADIENT].idle;
}

static void note_lag(struct ln_deadline *d, uint32_t step, double lag) {
    d->lag[d->lags++ % LOSSYNET_DEADLINE_LAGS] = (float)lag;
    float *largest = &d->largest[step % LOSSYNET_DEADLINE_STEPS];
    if (d->steps - step <= LOSSYNET_DEADLINE_STEPS) *largest = fmaxf(*largest, (float)lag);
}

/* Logs once that a fixed deadline was raised. If it were shorter than the time that an answer
 * takes, every rank would be late. */
static void tell_raised(struct ln_transport *t) {
    struct ln_deadline *d = &t->deadline;
    const double wait = deadline_now(t);
    if (d->fixed == 0 || d->raised || wait <= d->fixed) return;
    d->raised = true;
    if (t->world.rank == 0)
        ln_log("deadline %g s: expected at least three round trips: raised to %.2g s, and as "
               "they change",
               d->fixed, wait);
}

static double slowest_round_trip(const struct ln_transport *t) {
    double slowest = 0;
    for (int r = 0; r < t->world.ranks; r++)
        if (!ln_late_ignores(t, r)) slowest = fmax(slowest, t->peers[r].round_trip.mean);
    return slowest;
}

void ln_deadline_learn(struct ln_transport *t) {
    struct ln_deadline *d = &t->deadline;
    const struct ln_phase_state *phase = &t->phase[LOSSYNET_GRADIENT];
    t->agenda.slowest = slowest_round_trip(t);
    if (!d->on || phase->half == 0) return;
    tell_raised(t);
    const uint32_t step = d->steps++, slot = step % LOSSYNET_DEADLINE_STEPS;
    d->base[slot] = d->ended > 0 ? (float)fmax(0, phase->half - d->ended) : 0;
    d->largest[slot] = 0;
    d->ended = ln_now();
    for (int r = 0; r < t->world.ranks; r++) {
        struct ln_peer *p = &t->peers[r];
        if (r == t->world.rank) continue;
        if (idles(t, r)) continue;
        if (!p->lateness.late) {
            note_lag(d, step, fmax(0, p->rx[LOSSYNET_GRADIENT].over - phase->half));
        } else if (p->lateness.phase == phase->opened) {
            p->lateness.step = step; /* its lag is known when it opens the next phase */
            d->largest[slot] = fmaxf(d->largest[slot], (float)fmin(deadline_now(t), 1e9));
        }
    }
    if (d->steps >= LEARNT && d->steps % EVERY == 0) d->wait = best_deadline(d);
}

/* ---- late ranks ---- */

/* Only one rank logs a line: the first one, apart from the peer, that is not late itself. */
static bool tells(const struct ln_transport *t, int peer) {
    for (int r = 0; r < t->world.rank; r++)
        if (r != peer && !t->peers[r].lateness.late) return false;
    return true;
}

void ln_deadline_tell(const struct ln_transport *t, int peer) {
    struct ln_waiting *l = &t->peers[peer].lateness;
    const double late = t->receiver.empty - l->since;
    if (late < TELL_AFTER || late < TELL_AGAIN * l->told) return;
    l->told = late;
    if (tells(t, peer))
        ln_log("step %" PRIu64 ": rank %d has been late for %.1f s; the others go on without "
               "it",
               ln_session_step(t), peer, late);
}

void ln_deadline_late(struct ln_transport *t, int peer) {
    struct ln_waiting *l = &t->peers[peer].lateness;
    if (l->late) return;
    l->late = true;
    t->deadline.late++;
    l->since = t->receiver.empty;
    l->told = 0;
    ln_agenda_count(t, peer);
    ln_agenda_soon(t, peer);
}

void ln_deadline_told(struct ln_transport *t, int peer) {
    struct ln_peer *p = &t->peers[peer];
    struct ln_waiting *l = &p->lateness;
    const struct ln_phase_state *phase = &t->phase[LOSSYNET_GRADIENT];
    /* The lag ends when the peer opens the next phase. The end of its sending does not count: the
     * others' states end that for it, even while it still computes. */
    if (l->phase && (int32_t)(p->control.open[LOSSYNET_GRADIENT] - l->phase) > 0) {
        note_lag(&t->deadline, l->step, t->receiver.now - l->half);
        l->phase = 0;
    }
    const uint32_t begun = ln_deadline_steps(t, p->control.open[LOSSYNET_GRADIENT]);
    if (begun != l->begun) {
        l->begun = begun;
        l->begun_at = t->receiver.now;
    }
    if (!l->late || (int32_t)(begun - ln_deadline_steps(t, phase->closed)) <= 0) return;
    l->late = false;
    t->deadline.late--;
    if (l->told > 0 && tells(t, peer))
        ln_log("step %" PRIu64 ": rank %d is back after %.1f s", ln_session_step(t), peer,
               t->receiver.now - l->since);
}

/* ---- phases ---- */

/* Ends this phase for one peer: we neither wait for its packets nor send it ours. */
static void give_up(struct ln_transport *t, int kind, int peer) {
    struct ln_peer *p = &t->peers[peer];
    const struct ln_phase_state *phase = &t->phase[kind];
    if (p->rx[kind].state != RX_OVER) {
        p->rx[kind].state = RX_OVER;
        p->rx[kind].over = t->receiver.empty;
        p->rx[kind].given_up = phase->opened;
        t->receiver.stragglers++;
        const bool first = kind == LOSSYNET_GRADIENT && ln_deadline_is_first(t);
        p->lateness.steps += first;
        if (first && p->lateness.phase == 0) {
            p->lateness.phase = phase->opened;
            p->lateness.half = phase->half > 0 ? phase->half : t->receiver.empty;
            p->lateness.step = t->deadline.steps;
        }
    }
    if (!p->tx[kind].complete && phase->begun > 0) ln_send_complete(&p->tx[kind]);
    ln_deadline_late(t, peer);
    ln_agenda_count(t, peer);
    ln_agenda_soon(t, peer);
}

/* Returns whether our packets for a peer cannot leave: its window is full, or it has not opened the
 * phase. If the peer is not late or away, this must have lasted longer than `wait` seconds. */
static bool is_stuck(const struct ln_transport *t, int peer, int kind, double wait) {
    const struct ln_peer *p = &t->peers[peer];
    const bool ignored = ln_late_ignores(t, peer) || ln_late_is_away(t, peer);
    return !p->tx[kind].complete && t->phase[kind].begun > 0 && p->flow.blocked &&
           (ignored || t->receiver.empty - p->flow.credited > wait);
}

void ln_deadline_check(struct ln_transport *t, int kind) {
    struct ln_phase_state *phase = &t->phase[kind];
    const int ranks = t->world.ranks, *count = t->agenda.count;
    if (!t->deadline.on || phase->opened == phase->closed) return;
    const bool gradient = kind == LOSSYNET_GRADIENT, idle = gradient && t->deadline.present.idle;
    const int done = count[LOSSYNET_IS_DONE + kind] + (phase->reached && !idle);
    const int counted = ranks - idle - (gradient ? count[LOSSYNET_IDLES] : 0);
    if (phase->half == 0 && 2 * done >= counted) phase->half = t->receiver.empty;
    if (!phase->awaited) return;
    const int late = ln_late_is_minority(t) ? 0 : count[LOSSYNET_LATE_FOR + kind];
    const int in_time = count[LOSSYNET_IN_TIME + kind] + late;
    const double wait = deadline_now(t);
    const bool ends = phase->half > 0 && t->receiver.empty - phase->half > wait;
    const bool holds_up = count[LOSSYNET_RECEIVES + kind] > 0 && (ends || in_time == 0);
    const bool stuck =
        count[LOSSYNET_STUCK + kind] > 0 || (ends && count[LOSSYNET_SENDS + kind] > 0);
    if (!holds_up && !stuck) return;
    for (int r = 0; r < ranks; r++) {
        struct ln_peer *p = &t->peers[r];
        if (r == t->world.rank) continue;
        const bool waits = p->rx[kind].state != RX_OVER;
        const bool ignored = ln_late_excuses(t, r, kind);
        if ((waits && (ends || (ignored && in_time == 0))) ||
            (is_stuck(t, r, kind, wait) && (ends || ignored || ln_late_is_away(t, r))))
            give_up(t, kind, r);
    }
}

/* Returns by how many GRADIENT phases at least half of the ranks are ahead of this rank. */
static uint32_t phases_ahead(struct ln_transport *t) {
    ln_threads_enter(t);
    uint32_t position = t->phase[LOSSYNET_GRADIENT].opened;
    const uint32_t own = position;
    /* Find the largest count that at least half of the ranks have reached. */
    for (int r = 0; r < t->world.ranks; r++) {
        const uint32_t count = t->peers[r].control.open[LOSSYNET_GRADIENT];
        int there = 0;
        if (r == t->world.rank || (int32_t)(count - position) <= 0) continue;
        for (int i = 0; i < t->world.ranks; i++)
            there += i != t->world.rank &&
                     (int32_t)(t->peers[i].control.open[LOSSYNET_GRADIENT] - count) >= 0;
        if (2 * there >= t->world.ranks) position = count;
    }
    ln_threads_leave(t);
    return position - own;
}

uint32_t ln_transport_position(struct ln_transport *t) {
    return phases_ahead(t) / t->deadline.phases[LOSSYNET_GRADIENT];
}

void ln_transport_lateness(struct ln_transport *t, uint64_t *late) {
    ln_threads_enter(t);
    for (int r = 0; r < t->world.ranks; r++) late[r] = t->peers[r].lateness.steps;
    ln_threads_leave(t);
}

static bool sends_again(struct ln_transport *t, lossynet_phase phase, int rank) {
    ln_threads_enter(t);
    const struct ln_rx *rx = &t->peers[rank].rx[phase];
    const bool went_on = rx->given_up == t->phase[phase].closed;
    const bool nothing = phase == LOSSYNET_GRADIENT && rx->idle && !t->deadline.late_comes;
    ln_threads_leave(t);
    return !went_on && !nothing;
}

bool ln_transport_sends_again(struct ln_transport *t, lossynet_phase phase, int rank) {
    while (t && sends_again(t, phase, rank)) t = t->threads.team.next;
    return !t;
}

void ln_transport_stays(struct ln_transport *t, bool idle) {
    ln_threads_enter(t);
    t->deadline.present.idle = idle;
    t->deadline.present.opened = t->phase[LOSSYNET_GRADIENT].opened;
    ln_threads_leave(t);
}

void ln_transport_idle(struct ln_transport *t, bool *idle) {
    ln_threads_enter(t);
    for (int r = 0; r < t->world.ranks; r++) idle[r] = idles(t, r);
    ln_threads_leave(t);
}

bool ln_transport_is_behind(struct ln_transport *t) {
    double first = HUGE_VAL;
    ln_threads_enter(t);
    for (int r = 0; r < t->world.ranks; r++) {
        const struct ln_waiting *l = &t->peers[r].lateness;
        const uint32_t begun = ln_deadline_steps(t, t->phase[LOSSYNET_GRADIENT].opened);
        if (r != t->world.rank && (int32_t)(l->begun - begun) >= 0)
            first = fmin(first, l->begun_at);
    }
    const bool behind = ln_now() - first > deadline_now(t);
    ln_threads_leave(t);
    return behind;
}

bool ln_transport_is_late(struct ln_transport *t) {
    bool refused = false;
    if (phases_ahead(t) == 0) return false;
    ln_threads_enter(t);
    for (int r = 0; r < t->world.ranks; r++) refused |= t->peers[r].tx[LOSSYNET_GRADIENT].refused;
    ln_threads_leave(t);
    return refused;
}

void ln_transport_jump(struct ln_transport *t, uint32_t steps) {
    ln_threads_enter(t);
    struct ln_phase_state *gradient = &t->phase[LOSSYNET_GRADIENT];
    struct ln_phase_state *parameter = &t->phase[LOSSYNET_PARAMETER];
    gradient->begun += steps * t->deadline.phases[LOSSYNET_GRADIENT];
    gradient->opened = gradient->closed = gradient->begun;
    parameter->begun += steps * t->deadline.phases[LOSSYNET_PARAMETER];
    parameter->opened = parameter->closed = parameter->begun;
    t->gathers[LOSSYNET_PULSE].begun += steps * t->deadline.pulses;
    t->gathers[LOSSYNET_PULSE].complete = t->gathers[LOSSYNET_PULSE].begun;
    for (int r = 0; r < t->world.ranks; r++)
        for (int kind = 0; kind < 2; kind++) {
            t->peers[r].rx[kind].next_done = false;
            t->peers[r].tx[kind].complete = true;
            t->peers[r].tx[kind].done_waits = false;
        }
    ln_agenda_all(t);
    ln_threads_leave(t);
}
