/* rounds.c — how many rounds of retransmission the measured loss asks for.
 *
 * Perplexity does not suffer where few gradients and not too many parameters stay lost
 * (scripts/sweeps/results.md). So where more than `few` of a phase's packets are lost, it has the
 * smallest number of rounds r, at most `most`, after which at most `enough` of them stay lost,
 * p^(r+1) <= enough, and no round for which the budget leaves nothing. Where little is lost there
 * is no round, and a step has no round trip more. More parameters than gradients may stay lost: who
 * misses some goes on with older ones, which owners that lead make up for (lead.c). Gradients that
 * do not come with the next ones (error_feedback.c) cost some four times as much, so fewer may stay
 * lost, and more rounds, which send little, are worth their trips.
 *
 * p is the share of packets that did not arrive when they were sent for the first time, of all
 * workers, in all steps so far; older steps count exponentially less. It is a mean over links,
 * because the cost goes with what all of them lose together: a dead link or a worker that loses half
 * of its packets costs a tenth of a percent (results.md, uneven loss). Before anything was measured
 * it is the injected loss; if none is injected, packets of the first step are sent once. All ranks
 * gather the counts with the ages (drift.c), in the program's report of a step or, if it makes none,
 * when the next broadcast begins. So they make the same number of rounds. The number is chosen when a
 * step's broadcast begins, for this broadcast and for the next gradients: at that time all ranks know
 * the same steps, whether they overlap or not.
 *
 * A number that was chosen stays until the loss is a tenth beyond the threshold of another, so that loss near
 * a threshold does not change it in every other step.
 *
 * Where links are down, rounds take other ways, and there are as many as bring something (ways.c). A
 * link that is always down has at least one round.
 *
 * Ranks that do not wait for late ones (skip_late) do not all know the same counts. They make as
 * many rounds as the injected loss asks for, in all steps.
 */
#include "lossynet/algorithm/calls.h"
#include "lossynet/lossynet_trainer.h"

#include <math.h>

struct limits {
    double few, enough;
    int most;
};
static const struct limits GRADIENTS = {1 / 15.0, 1 / 400.0, LOSSYNET_ROUNDS_MOST};
static const struct limits GRADIENTS_THAT_COME_LATER = {1 / 15.0, 1 / 80.0, LOSSYNET_ROUNDS_MOST};
/* Not 0.1: what is measured where 10% is lost goes up and down across it. */
static const struct limits PARAMETERS = {0.12, 0.12, 2};
static const double FORGET = 0.98; /* factor per step: a memory of about 50 steps */
static const double BEYOND = 1.1;  /* of a threshold, before another number of rounds is chosen */

void lossynet_rounds_expect(int rounds, double p, double budget, double *again, double *left) {
    LN_DEMAND(NULL, again && left, LN_NO_OUTPUT);
    *again = 0;
    *left = p;
    for (int r = 0; r < rounds; r++) {
        const double sent = budget > 0 ? fmin(*left, budget - *again) : *left;
        *again += sent;
        *left -= sent * (1 - p);
    }
}

int lossynet_rounds_at(lossynet_phase phase, double p, double budget, bool error_feedback) {
    const struct limits *limits = phase == LOSSYNET_PARAMETER ? &PARAMETERS
                                  : error_feedback            ? &GRADIENTS_THAT_COME_LATER
                                                              : &GRADIENTS;
    int rounds = 0;
    if (p <= limits->few) return 0;
    for (; rounds < limits->most; rounds++) {
        double again, left;
        lossynet_rounds_expect(rounds, p, budget, &again, &left);
        if (left <= limits->enough || (budget > 0 && again >= budget)) break;
    }
    return rounds;
}

/* The number of rounds with this injected loss, where p is lost. groups: replicas of a packet. */
static int rounds_with(const struct ln_loss *loss, int groups, lossynet_phase phase, double p,
                       double budget, bool error_feedback) {
    if (loss->model == LOSS_OUTAGE) return ln_ways_rounds(loss, groups, phase, p, budget);
    const int rounds = lossynet_rounds_at(phase, p, budget, error_feedback);
    return rounds == 0 && p > 0 && ln_loss_has_dead_links(loss) ? 1 : rounds;
}

int lossynet_rounds_plan(const struct lossynet_settings *settings, lossynet_phase phase,
                         double *again, double *left) {
    LN_DEMAND(NULL, settings && again && left, LN_NO_OUTPUT);
    LN_DEMAND(NULL, LN_IN_RANGE((int)phase, 2), "phase %d: expected 0 or 1", (int)phase);
    const double p = settings->loss.rate[phase], budget = settings->retransmission_budget;
    const int groups = settings->workers / (settings->group > 1 ? settings->group : 1);
    int rounds = settings->retransmission_rounds[phase];
    struct ln_loss loss;
    ln_loss_open(&loss, &settings->loss, settings->workers); /* of wrong settings it is empty */
    if (rounds == LOSSYNET_ROUNDS_MEASURED)
        rounds = rounds_with(&loss, groups, phase, p, budget, settings->error_feedback);
    if (loss.model == LOSS_OUTAGE)
        ln_ways_expect(&loss, groups, phase, rounds, p, budget, again, left);
    else
        lossynet_rounds_expect(rounds, p, budget, again, left);
    ln_loss_close(&loss);
    return rounds;
}

/* What settings.retransmission_rounds means: a number, or LOSSYNET_ROUNDS_MEASURED. */
static int planned_rounds(const struct lossynet_settings *settings, lossynet_phase phase) {
    const int rounds = settings->retransmission_rounds[phase];
    double again, left;
    if (rounds != LOSSYNET_ROUNDS_MEASURED || !settings->network.skip_late) return rounds;
    return lossynet_rounds_plan(settings, phase, &again, &left);
}

static uint32_t rounds_now(const struct lossynet_comm *comm, lossynet_phase phase, double p) {
    const struct ln_retransmission *r = &comm->retransmission;
    return (uint32_t)rounds_with(&comm->loss, comm->partition.groups.count, phase, p, r->budget,
                                 r->error_feedback);
}

static void say_nothing(void *context, const char *message) {
    (void)context, (void)message;
}

int ln_rounds_most_of(const struct lossynet_settings *settings, lossynet_phase phase) {
    const struct ln_log_target nobody = {say_nothing, NULL}, *before = ln_log_use(&nobody);
    const int planned = planned_rounds(settings, phase);
    const int most = planned == LOSSYNET_ROUNDS_MEASURED ? LOSSYNET_ROUNDS_MOST : planned;
    struct ln_at at;
    const int own = ln_repair_at_parse(&at, settings) ? 0 : (int)ln_at_most(&at, phase);
    ln_at_close(&at);
    ln_log_use(before);
    return own > most ? own : most;
}

int ln_rounds_most(const struct lossynet_comm *comm, lossynet_phase phase) {
    const struct ln_retransmission *r = &comm->retransmission;
    return r->most_own[phase] > r->rounds[phase] ? r->most_own[phase] : r->rounds[phase];
}

void ln_rounds_open(struct lossynet_comm *comm, const struct lossynet_settings *settings) {
    struct ln_retransmission *r = &comm->retransmission;
    r->budget = settings->retransmission_budget;
    r->error_feedback = settings->error_feedback;
    for (int phase = 0; phase < 2; phase++) {
        const int planned = planned_rounds(settings, (lossynet_phase)phase);
        r->measured[phase] = planned == LOSSYNET_ROUNDS_MEASURED;
        r->rounds[phase] = r->measured[phase] ? LOSSYNET_ROUNDS_MOST : planned;
        r->most_own[phase] = (int)ln_at_most(&comm->arrivals.names.rounds, (lossynet_phase)phase);
        if (!r->measured[phase]) continue;
        /* As if one step had lost what is injected. */
        const double packets = (double)comm->partition.packets * (comm->partition.groups.count - 1);
        const double p = ln_names_loss(comm, (lossynet_phase)phase);
        r->sums.sent[phase] = p > 0 ? packets : 0;
        r->sums.lost[phase] = p * packets;
        r->sums.rounds[phase] = rounds_now(comm, (lossynet_phase)phase, p);
        COMM_TAKE(comm, r->first[phase], (size_t)comm->workers.local);
    }
}

void ln_rounds_count(struct lossynet_comm *comm, lossynet_phase phase) {
    struct ln_retransmission *r = &comm->retransmission;
    if (!r->measured[phase]) return;
#pragma omp parallel for num_threads(ln_threads_for_marks(comm)) schedule(static)
    for (int v = 0; v < comm->workers.local; v++) {
        struct ln_total all = {0};
        for (int sender = 0; sender < comm->workers.count; sender++) {
            size_t n;
            const uint8_t *arrived = ln_arrived(comm, phase, v, sender, &n);
            if (sender == comm->workers.first + v) continue;
            all.expected += n;
            for (size_t k = 0; k < n; k++) all.arrived += arrived[k];
        }
        r->first[phase][v] = all;
    }
}

void ln_rounds_add(struct lossynet_comm *comm, const struct ln_ages *ages) {
    struct ln_rounds_sums *sums = &comm->retransmission.sums;
    for (int phase = 0; phase < 2; phase++) {
        const struct ln_total *first = &ages->first[phase];
        sums->sent[phase] = FORGET * sums->sent[phase] + (double)first->expected;
        sums->lost[phase] = FORGET * sums->lost[phase] + (double)(first->expected - first->arrived);
    }
}

void ln_rounds_choose(struct lossynet_comm *comm) {
    struct ln_retransmission *r = &comm->retransmission;
    for (int phase = 0; phase < 2; phase++) {
        if (!r->measured[phase] || !(r->sums.sent[phase] > 0)) continue;
        const double p = r->sums.lost[phase] / r->sums.sent[phase];
        const uint32_t less = rounds_now(comm, (lossynet_phase)phase, p / BEYOND);
        const uint32_t more = rounds_now(comm, (lossynet_phase)phase, fmin(p * BEYOND, 1));
        uint32_t *now = &r->sums.rounds[phase]; /* a small budget allows fewer where more is lost */
        if (*now < less && *now < more) *now = less < more ? less : more;
        if (*now > less && *now > more) *now = less > more ? less : more;
    }
}

int lossynet_rounds_now(const struct lossynet_comm *comm, lossynet_phase phase) {
    COMM_DEMAND(comm, COMM_PHASE(phase));
    const struct ln_retransmission *r = &comm->retransmission;
    return r->measured[phase] ? (int)r->sums.rounds[phase] : r->rounds[phase];
}

double lossynet_lost_of_late(const struct lossynet_comm *comm, lossynet_phase phase) {
    COMM_DEMAND(comm, COMM_PHASE(phase));
    const struct ln_retransmission *r = &comm->retransmission;
    if (!r->measured[phase] || !(r->sums.sent[phase] > 0)) return -1;
    return r->sums.lost[phase] / r->sums.sent[phase];
}
