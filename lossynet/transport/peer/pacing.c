/* pacing.c — limits how fast a rank sends DATA: a token bucket, whose rate follows the loss budget.
 *
 * With a loss budget P the rate is controlled so that the network loses the share P of DATA. A rank
 * lowers its rate when more is lost, and raises it, up to pace_gbps, when less is lost. The state
 * of a peer says how many DATA have come there (wire.h), so a rank learns its losses within the
 * phase.
 *
 *     Let a link have the rate c left for this rank. Of the rate r it lets min(r, c) through. If
 *     r > c, then r (1 - lost) = c, and the rate at which the share P is lost is
 *
 *         r' = c / (1 - P) = r (1 - lost) / (1 - P)
 *
 * So one step down is enough when r > c. When nothing is lost, a step up is a factor 1 / (1 - P).
 * When less than P / 2 was lost for RISE_SECONDS the factor grows, step by step, up to 2. It does
 * not grow earlier: if other traffic pauses only for a moment, to use its share is not worth the
 * packets that are lost when it comes back.
 *
 * A step is taken when the reports on the DATA sent since the last step show one of these:
 *
 *   - enough DATA, so that the share lost is known to within about a quarter of P;
 *   - many lost DATA, so that the share is surely well above P;
 *   - a share that is surely well below P, if the last step was CLEAR_SECONDS ago. This is for a
 *     rank that sends little. The test is Page's cumulative sum for the shares P and P / 4.
 *
 * So while the rate rises, each step takes about CLEAR / P packets, and the first steps take
 * longest: while the rate doubles, all steps together take twice as long as the first. With P = 5%,
 * the rate rises from a 64th of 100 Mbit/s to the whole in about 3 s.
 *
 * If loss does not depend on the rate (a bad cable), pacing cannot avoid it. Then the rate ends at
 * a 64th of pace_gbps, and not at 0.
 *
 * With a budget datagrams leave in smaller batches, because short queues cannot hold long bursts.
 */
#include "lossynet/transport/peer/peer.h"

#include <math.h>

static const double BURST_BYTES = 256 << 10;
static const double BURST_SECONDS = 100e-6; /* a sleep may last this much too long */
static const double LEAST = 1.0 / 64;       /* lowest rate, relative to the highest */
static const double RISE_MOST = 2;          /* the factor of a step up grows to this at most */
static const double RISE_SECONDS = 0.25, RISE_FASTER = 4, RISE_FASTEST = 4096;
/* A step is due when the budget allows TELLING losses in the DATA reported, or when MANY were lost,
 * or, after CLEAR_SECONDS, when the cumulative sum has reached CLEAR. */
static const double TELLING = 16, MANY = 32, CLEAR = 4;
static const double CLEAR_SECONDS = 0.25;
enum { STEP_LEAST = 256, BUDGET_BATCH = 16 };

void ln_pacing_open(struct ln_pacing *pace, double gbps, double loss_budget) {
    pace->most = pace->rate = gbps * 1e9 / 8;
    pace->budget = loss_budget;
    pace->batch = pace->budget > 0 ? BUDGET_BATCH : LOSSYNET_BATCH;
    pace->burst = (pace->budget > 0 ? 0.1 : 1) * BURST_BYTES + pace->rate * BURST_SECONDS;
    pace->tokens = pace->burst;
    pace->filled = ln_now();
}

double ln_pacing_wait(struct ln_pacing *pace, size_t bytes) {
    if (pace->rate <= 0) return 0;
    double now = ln_now(), need = fmin((double)bytes, pace->burst);
    pace->tokens = fmin(pace->burst, pace->tokens + (now - pace->filled) * pace->rate);
    pace->filled = now;
    if (pace->tokens >= need) {
        pace->tokens -= (double)bytes;
        return 0;
    }
    return fmax(20e-6, (need - pace->tokens) / pace->rate);
}

void ln_pacing_unused(struct ln_pacing *pace, size_t bytes) {
    if (pace->rate > 0) pace->tokens += (double)bytes;
}

double ln_pacing_step(struct ln_pacing *pace, double lost, double now) {
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

/* Returns whether a step is due. Sets *lost to the share that counts as lost. */
static bool tells(const struct ln_pacing *pace, double now, double *lost) {
    *lost = 1 - fmin(1, pace->arrived / pace->expected);
    if (pace->expected - pace->arrived >= MANY) return true;
    if (pace->expected >= STEP_LEAST && pace->budget * pace->expected >= TELLING) return true;
    *lost = 0;
    return pace->clear >= CLEAR && now - pace->stepped >= CLEAR_SECONDS;
}

/* Takes a step. DATA that are on their way were sent at the old rate, so they do not count. */
static void step(struct ln_transport *t, double lost) {
    struct ln_pacing *pace = &t->pacing;
    ln_pacing_step(pace, lost, t->receiver.now);
    pace->expected = pace->arrived = pace->clear = 0;
    pace->stepped = t->receiver.now;
    for (int r = 0; r < t->world.ranks; r++) {
        struct ln_flow *flow = &t->peers[r].flow;
        flow->report = (struct ln_loss_report){.from = flow->sent};
    }
}

void ln_pacing_report(struct ln_transport *t, int peer, uint32_t seen, uint32_t received) {
    struct ln_pacing *pace = &t->pacing;
    struct ln_loss_report *report = &t->peers[peer].flow.report;
    if (pace->budget <= 0) return;
    if (!report->counting) {
        if ((int32_t)(seen - report->from) < 0) return;
        *report = (struct ln_loss_report){.counting = true, .seen = seen, .received = received};
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
