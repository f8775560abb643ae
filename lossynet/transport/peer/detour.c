/* detour.c — takes another way to a peer when everything on the present way is lost.
 *
 * A path may fail for one pair of ranks alone: a hash bucket, an optic, a filter. A rank has these
 * ways to a peer, the cheapest first:
 *
 *     WAY_DIRECT          the link's first path
 *     WAY_OTHER_PATH      its second one, from another source port (link.h): networks that spread
 *                         traffic choose a path by the ports
 *     WAY_BY + r          by way of rank r, which sends each datagram on (session.c)
 *
 * A datagram names its sender and its receiver, and is sealed for the receiver. So a relay sends it
 * on as it is, and the receiver takes it as if it had come directly.
 *
 * Silence alone says little: a peer may compute, or its machine may be busy. So a way is given up
 * only for one that is better. A rank that waits for a peer, or repeats something to it, asks it
 * by PROBEs with a number: first on the present way; if ALONE of them are not answered, on the
 * present way and on another one in turn. An answer takes the way of its question, and also the
 * present way of its sender, which may have been found meanwhile, and the one that its sender
 * tries. So each direction of a pair is judged apart, even where no way leads there and back. A
 * rank that could not run for a while answers the last question of each way. When SURE questions
 * on the other way were answered and none meanwhile on the present way, the rank takes the other
 * way. The answers say nothing of DATA, which may be on another way: PROBEs that ask for DATA have
 * a nonce. If TRIES questions in a row on the other way are not answered, or twice as many after
 * an answer, the next one is tried. The greater rank of a pair makes TRIES_MORE: if both made as
 * many, two ways that answer each other might never be tried at once. A peer that stood still
 * answers on both when it goes on, and a network that loses packets at random loses more of them
 * on two hops than on one, so neither changes anything. Nor does it help a peer that is cut off
 * from everybody: it is late, or away.
 *
 * Pauses between questions grow with the number of ways tried, and with the number of peers that do
 * not answer them, but at least QUESTIONS_LEAST questions fit into peer_timeout where there is
 * another way, however long a round trip seems to be after a standstill. A peer that answers and
 * sends nothing new does not count: with many ranks, most peers wait for those that are searched,
 * and the search must not wait for them. Every RETURN seconds the direct way is tried again, but
 * not while an answer is waited for. Any rank may be a relay. Those that answered lately and to
 * which we send directly are tried first, from a place on that depends on the pair, so that pairs
 * choose unlike relays. The others must be tried, too: while no step is made, ranks that need
 * nothing of each other say nothing, and a way may seem to be dark that is not.
 */
#include "lossynet/transport/peer/peer.h"

#include <inttypes.h>
#include <math.h>

enum { ALONE = 2, SURE = 8, TRIES = 4, TRIES_MORE = 6, QUESTIONS_LEAST = 128 };

/* Seconds: how long we wait before the first question, at first and at most; between questions,
 * with the factor by which this grows; until the direct way is tried again; and since when a likely
 * relay was heard, at most. */
static const double DOUBT = 0.03, DOUBT_MOST = 0.5;
static const double PAUSE = 0.004, PAUSE_GROWS = 1.08, PAUSE_MOST = 0.1;
static const double RETURN = 1;
static const double LATELY = 2;

/* Returns whether a peer may be reached by this way, as far as we know; or at all, with `any`. */
static bool is_way(const struct ln_transport *t, int peer, int way, bool any) {
    if (way == WAY_DIRECT) return true;
    if (way == WAY_OTHER_PATH) return t->link->features.paths > 1;
    const int by = way - WAY_BY;
    const struct ln_peer *p = &t->peers[by];
    const bool likely =
        p->detour.way < WAY_BY && !p->lateness.late && t->receiver.now - p->live.heard < LATELY;
    return by != peer && by != t->world.rank && p->live.leaving == 0 && p->live.aborted == 0 &&
           (likely || any);
}

/* The next way to try after `way`, other than the present one; the present one if there is none.
 * When all likely ones were tried, it may be any. */
static int next_way(const struct ln_transport *t, int peer, int way) {
    const int ranks = t->world.ranks, first = (t->world.rank + peer) % ranks;
    const struct ln_detour *d = &t->peers[peer].detour;
    int likely = 0;
    for (int i = 0; i < WAY_BY + ranks; i++) likely += i != d->way && is_way(t, peer, i, false);
    const bool any = d->asked[1] >= TRIES * likely;
    /* Number 0 and 1 are the link's paths, 2 + i the rank first + i. */
    int number = way < WAY_BY ? way : WAY_BY + (way - WAY_BY - first + ranks) % ranks;
    for (int i = 0; i < WAY_BY + ranks; i++) {
        number = (number + 1) % (WAY_BY + ranks);
        const int next = number < WAY_BY ? number : WAY_BY + (number - WAY_BY + first) % ranks;
        if (next != d->way && is_way(t, peer, next, any)) return next;
    }
    return d->way;
}

static void ask_by(struct ln_transport *t, int peer, int way) {
    struct ln_detour *d = &t->peers[peer].detour;
    const uint32_t number = 1 + d->questions % (WIRE_INDICES - 1);
    d->question[d->questions++ % LOSSYNET_QUESTIONS] = (struct ln_way_question){number, way};
    ln_control_ask_by(t, peer, way, number);
}

/* Begins to ask anew. Answers on another way to earlier questions do not count from now on. */
static void rest(struct ln_detour *d) {
    for (int i = 0; i < LOSSYNET_QUESTIONS; i++)
        if (d->question[i].way != d->way) d->question[i].number = 0;
    d->asked[0] = d->asked[1] = d->answered = d->silent = 0;
}

static void take(struct ln_transport *t, int peer, int way) {
    struct ln_detour *d = &t->peers[peer].detour;
    const int by = way - WAY_BY;
    if (!t->session.told_relay && by >= 0)
        ln_log("rank %d, step %" PRIu64
               ": nothing that is sent to rank %d arrives, and by way of rank %d it does: from now "
               "on it goes by way of others when that is so (said once; the log counts relayed "
               "packets)",
               t->world.rank, ln_session_step(t), peer, by);
    t->session.told_relay |= by >= 0;
    d->way = way;
    d->candidate = WAY_DIRECT;
    d->back = t->receiver.now + RETURN;
    d->wait = DOUBT;
    d->since = t->receiver.now;
    rest(d);
    ln_timer_all_at_once(t, &t->peers[peer]);
}

void ln_detour_asked(struct ln_transport *t, int peer, uint32_t number, int way) {
    struct ln_way_question *asked = t->peers[peer].detour.to_answer;
    int i = 0;
    while (i < LOSSYNET_ANSWERS - 1 && asked[i].number && asked[i].way != way) i++;
    asked[i] = (struct ln_way_question){number, way};
}

void ln_detour_answered(struct ln_transport *t, int peer, uint32_t number) {
    struct ln_detour *d = &t->peers[peer].detour;
    int way = -1;
    for (int i = 0; i < LOSSYNET_QUESTIONS; i++)
        if (d->question[i].number == number) {
            way = d->question[i].way;
            d->question[i].number = 0;
        }
    if (way == d->way) {
        d->wait = fmin(2 * d->wait, DOUBT_MOST);
        d->since = t->receiver.now;
        if (!d->returns) rest(d);
    } else if (way == d->candidate) {
        d->silent = 0;
        if (++d->answered >= SURE) take(t, peer, way);
    }
}

/* Tries the direct way while another one is in use. Returns when to look again. */
static double try_direct(struct ln_transport *t, int peer, double now, double pause) {
    struct ln_detour *d = &t->peers[peer].detour;
    if (!d->returns) rest(d), d->candidate = WAY_DIRECT;
    d->returns = d->asked[1] < SURE + 2; /* two may be lost */
    if (d->returns) {
        ask_by(t, peer, WAY_DIRECT);
        d->asked[1]++;
        return d->due = now + pause;
    }
    rest(d);
    return d->back = now + RETURN;
}

bool ln_detour_is_silent(const struct ln_peer *peer) {
    return peer->detour.asked[0] > ALONE;
}

double ln_detour_push(struct ln_transport *t, int peer, double now) {
    struct ln_peer *p = &t->peers[peer];
    struct ln_detour *d = &p->detour;
    const bool waits = ln_needs_or_asks(t, peer) || p->live.repeated;
    /* Where all are silent, the network is not flooded with questions on unlikely ways. */
    const bool unlikely = d->asked[1] > 0 && !d->answered && !is_way(t, peer, d->candidate, false);
    const double grown = PAUSE * pow(PAUSE_GROWS, d->asked[1] / TRIES);
    const double patience = unlikely ? PAUSE_MOST : fmin(PAUSE_MOST, grown);
    /* The first questions can be answered before another way is looked for. */
    const double trips = ln_timer_timeout(p) / (d->asked[0] <= ALONE ? 2 : 4);
    const double crowd = (double)t->agenda.count[LOSSYNET_SILENT] / CROWD;
    const double slow = fmax(patience, trips) * fmax(1, crowd);
    const double most = t->session.peer_timeout / QUESTIONS_LEAST;
    const double pause = fmin(slow, most);
    if (t->link->features.reliable || t->failed || t->threads.closing) return HUGE_VAL;
    const bool searches = !d->returns && waits && d->asked[0] > 0;
    if (d->way != WAY_DIRECT && now >= d->back && !searches)
        return now < d->due ? d->due : try_direct(t, peer, now, pause);
    if (!waits) d->since = 0;
    if (!waits) return d->way == WAY_DIRECT ? HUGE_VAL : d->back;
    if (d->since == 0) rest(d), d->since = now, d->wait = DOUBT;
    const double trip = fmin(2 * ln_timer_timeout(p), 4 * most);
    const double doubts = d->since + fmax(d->wait, trip);
    if (now < doubts || now < d->due) return fmax(doubts, d->due);
    if (d->asked[0] <= ALONE || d->asked[0] <= d->asked[1]) {
        ask_by(t, peer, d->way);
        d->asked[0]++;
    } else {
        const int tries = t->world.rank < peer ? TRIES : TRIES_MORE;
        if (d->asked[1] == 0 || d->silent >= (d->answered ? 2 * tries : tries)) {
            d->candidate = next_way(t, peer, d->candidate);
            d->answered = d->silent = 0;
        }
        d->asked[1]++, d->silent++;
        if (d->candidate == d->way) return d->due = now + fmax(pause, PAUSE_MOST);
        ask_by(t, peer, d->candidate);
    }
    return d->due = now + pause;
}
