/* pacing.c — how fast a rank sends DATA: a token bucket, and the loss budget that sets its rate.
 *
 * With loss budget P the share of DATA that the network loses is held at P: a rank lowers its rate
 * when more is lost, and raises it, up to pace_gbps, when less is. Peers tell in their state how
 * much has come (wire.h), so a rank knows what became of what it sent, within the phase.
 *
 *     A link that others leave the rate c lets min(r, c) of the rate r through. Then
 *     r (1 - lost) = c, and the rate at which the share P is lost is
 *
 *         r' = c / (1 - P) = r (1 - lost) / (1 - P)
 *
 * in one step down, where r > c, and by a factor 1 / (1 - P) per step up, where nothing is lost.
 * When that has been so for RISE_SECONDS the factor grows, step by step up to 2: what others left
 * unused for a moment only is not worth what is lost when they come back.
 *
 * A step is taken when enough was heard of what was sent since the last one: to tell its share lost
 * to within a quarter of P or so; or sooner, that it is well above P; or, where that takes a rank
 * that sends little more than CLEAR_SECONDS, that it has become well less (Page's cumulative sums,
 * of the shares P and P / 4). So on its way up it waits for CLEAR / P packets at a time, and the
 * first take longest: where the rate doubles, all steps together take twice as long as the first of
 * them. With a P of 5%, a 64th of 100 Mbit/s is back in some 3 s.
 *
 * Loss that does not depend on the rate (a bad cable) cannot be paced away: the rate ends at a 64th
 * of pace_gbps then, not at 0.
 *
 * Under a budget datagrams leave in smaller batches: short queues do not hold bursts.
 */
#include "lossynet/transport/progress.h"

#include <math.h>

static const double BURST_BYTES = 256 << 10;
static const double BURST_SECONDS =
    100e-6;                           /* and what would have left while a sleep was too long */
static const double LEAST = 1.0 / 64; /* of the most */
static const double RISE_MOST = 2;    /* per step */
static const double RISE_SECONDS = 0.25, RISE_FASTER = 4, RISE_FASTEST = 4096;
/* A step takes so many packets as would lose TELLING at the budget, or loses MANY, or is clear. */
static const double TELLING = 16, MANY = 32, CLEAR = 4;
static const double CLEAR_SECONDS = 0.25; /* before less than the first will do */
enum { STEP_LEAST = 256, BUDGET_BATCH = 16 };

void lossynet_pacing_open(struct lossynet_pacing *pace, double gbps, double loss_budget) {
    pace->most = pace->rate = gbps * 1e9 / 8;
    pace->budget = loss_budget;
    pace->batch = pace->budget > 0 ? BUDGET_BATCH : LOSSYNET_BATCH;
    pace->burst = (pace->budget > 0 ? 0.1 : 1) * BURST_BYTES + pace->rate * BURST_SECONDS;
    pace->tokens = pace->burst;
    pace->filled = lossynet_now();
}

double lossynet_pacing_wait(struct lossynet_pacing *pace, size_t bytes) {
    if (pace->rate <= 0) return 0;
    double now = lossynet_now(), need = fmin((double)bytes, pace->burst);
    pace->tokens = fmin(pace->burst, pace->tokens + (now - pace->filled) * pace->rate);
    pace->filled = now;
    if (pace->tokens >= need) {
        pace->tokens -= (double)bytes;
        return 0;
    }
    return fmax(20e-6, (need - pace->tokens) / pace->rate);
}

void lossynet_pacing_unused(struct lossynet_pacing *pace, size_t bytes) {
    if (pace->rate > 0) pace->tokens += (double)bytes;
}

double lossynet_pacing_step(struct lossynet_pacing *pace, double lost, double now) {
    if (lost >= pace->budget / 2)
        pace->rise = 0;
    else if (pace->rise == 0)
        pace->rise = 1, pace->risen = now;
    else if (now - pace->risen >= RISE_SECONDS)
        pace->rise = fmin(RISE_FASTER * pace->rise, RISE_FASTEST), pace->risen = now;
    double factor = (1 - lost) / (1 - pace->budget);
    if (pace->rise > 1) factor = fmin(fmax(factor, RISE_MOST), pow(factor, pace->rise));
    return pace->rate = fmin(pace->most, fmax(LEAST * pace->most, pace->rate * factor));
}

/* Whether a step is due, for the share lost. */
static bool tells(const struct lossynet_pacing *pace, double now, double *lost) {
    *lost = 1 - fmin(1, pace->arrived / pace->expected);
    if (pace->expected - pace->arrived >= MANY) return true;
    if (pace->expected >= STEP_LEAST && pace->budget * pace->expected >= TELLING) return true;
    *lost = 0;
    return pace->clear >= CLEAR && now - pace->stepped >= CLEAR_SECONDS;
}

/* Takes a step; what is on its way was sent at the old rate, and tells nothing of the new one. */
static void step(struct lossynet_transport *t, double lost) {
    struct lossynet_pacing *pace = &t->pacing;
    lossynet_pacing_step(pace, lost, t->receiver.now);
    pace->expected = pace->arrived = pace->clear = 0;
    pace->stepped = t->receiver.now;
    for (int r = 0; r < t->world.ranks; r++) {
        struct lossynet_flow *flow = &t->peers[r].flow;
        flow->report = (struct lossynet_loss_report){.from = flow->sent + t->sender.group_sent};
    }
}

void lossynet_pacing_report(struct lossynet_transport *t, int peer, uint32_t seen,
                            uint32_t received) {
    struct lossynet_pacing *pace = &t->pacing;
    struct lossynet_loss_report *report = &t->peers[peer].flow.report;
    if (pace->budget <= 0) return;
    if (!report->counting) {
        if ((int32_t)(seen - report->from) < 0) return;
        *report =
            (struct lossynet_loss_report){.counting = true, .seen = seen, .received = received};
        return;
    }
    if ((int32_t)(seen - report->seen) <= 0 || (int32_t)(received - report->received) < 0) return;
    double expected = seen - report->seen, arrived = received - report->received, lost;
    pace->expected += expected;
    pace->arrived += arrived;
    pace->clear = fmax(0, pace->clear + pace->budget * expected - 2 * (expected - arrived));
    report->seen = seen;
    report->received = received;
    if (tells(pace, t->receiver.now, &lost)) step(t, lost);
}
