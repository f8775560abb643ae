/* timer.c — decides when to repeat what was not answered, and measures the silence of peers. */
#include "lossynet/transport/peer/peer.h"

#include <math.h>

static const double EARLY = 0.1;        /* round trips before the first repetition */
static const double OVERTAKEN = 0.1;    /* seconds; what comes this much later was sent later */
static const double FORGET = 1.0 / 64;  /* share by which `least` moves to the mean when it grows */
static const double GRANULARITY = 1e-4; /* of the loop's turns, in seconds */

double ln_timer_slowness(const struct ln_transport *t) {
    double crowd = (double)t->receiver.unanswered / CROWD;
    return crowd > 1 ? crowd * crowd : 1;
}

void ln_timer_news(struct ln_transport *t, struct ln_peer *peer) {
    t->receiver.unanswered -= peer->live.repeated;
    peer->live.repeated = false;
}

/* Returns the pause of a timer, which is longer while many peers do not answer. */
static double pause_of(const struct ln_transport *t, const struct ln_timer *timer) {
    const double pause = timer->pause * ln_timer_slowness(t);
    return fmin(pause, t->session.peer_timeout / REPETITIONS_LEAST);
}

bool ln_timer_is_over(const struct ln_transport *t, const struct ln_timer *timer, double now) {
    return now - timer->since >= pause_of(t, timer);
}

/* While many peers do not answer, pauses are longer, and they become shorter when some peers
 * answer. So we look again before the end of a pause. */
double ln_timer_due(const struct ln_transport *t, const struct ln_timer *timer, double now) {
    const double left = timer->since + pause_of(t, timer) - now;
    return now + fmin(left, fmax(timer->pause, left / 4));
}

void ln_timer_again(struct ln_transport *t, struct ln_peer *peer, struct ln_timer *timer,
                    double now) {
    if (timer->pause > 0 && !peer->live.repeated) {
        peer->live.repeated = true;
        t->receiver.unanswered++;
    }
    double next = fmax(RTO_BACKOFF * timer->pause, ln_timer_timeout(peer));
    if (timer->pause == 0) next = ln_timer_first(peer);
    timer->pause = fmin(next, ln_timer_longest(peer));
    timer->since = now;
}

bool ln_timer_is_due(struct ln_transport *t, struct ln_peer *peer, struct ln_timer *timer,
                     double now) {
    if (!ln_timer_is_over(t, timer, now)) return false;
    ln_timer_again(t, peer, timer, now);
    return true;
}

void ln_timer_all_at_once(struct ln_transport *t, struct ln_peer *peer) {
    ln_timer_news(t, peer);
    peer->live.probe = peer->question.repeat = ln_timer_at_once();
    for (int kind = 0; kind < 2; kind++)
        peer->tx[kind].done = peer->rx[kind].probe = ln_timer_at_once();
    for (int which = 0; which < LOSSYNET_GATHER_KINDS; which++)
        peer->message[which].repeat = ln_timer_at_once();
}

/* ---- round trips ---- */

/* Follows RFC 6298, sections 2.2 and 2.3. Stamps show which of several sendings was answered, so
 * answers to repeated datagrams count too. */
void ln_timer_measured(struct ln_round_trip *r, double seconds) {
    if (r->mean == 0) {
        *r = (struct ln_round_trip){.mean = seconds, .deviation = seconds / 2, .least = seconds};
        return;
    }
    r->deviation += 0.25 * (fabs(seconds - r->mean) - r->deviation);
    r->mean += 0.125 * (seconds - r->mean);
    r->least = seconds < r->least ? seconds : r->least + FORGET * (r->mean - r->least);
}

/* The deviation adds at most the mean and RTO_MAX to the time-out. Otherwise a peer that was
 * stopped for a moment would make the next loss take as long. */
double ln_timer_timeout(const struct ln_peer *peer) {
    const struct ln_round_trip *r = &peer->round_trip;
    double margin = fmin(fmax(4 * r->deviation, GRANULARITY), r->mean + RTO_MAX);
    return r->mean > 0 ? fmax(r->mean + margin, RTO_MIN) : RTO_MIN;
}

double ln_timer_first(const struct ln_peer *peer) {
    return fmax(EARLY * peer->round_trip.mean, RTO_MIN);
}

double ln_timer_longest(const struct ln_peer *peer) {
    return fmax(RTO_MAX, 2 * ln_timer_timeout(peer));
}

/* ---- silence ---- */

void ln_timer_heard(struct ln_transport *t, int peer, int type) {
    struct ln_liveness *live = &t->peers[peer].live;
    live->heard = t->receiver.now;
    bool lives = type != WIRE_ABORT && t->receiver.now - live->aborted > OVERTAKEN;
    if (live->aborted > 0 && lives) live->aborted = 0; /* the peer did not send that ABORT */
    /* A rank that leaves sends none of these any more (control.c). */
    const bool stays = type == WIRE_DATA || type == WIRE_STATE || type == WIRE_MESSAGE;
    if (live->leaving == 0 || !stays || t->receiver.now - live->leaving <= OVERTAKEN) return;
    live->leaving = 0; /* the peer did not send that LEAVE */
    live->knows = false;
}

bool ln_timer_is_refused(const struct ln_transport *t, int peer) {
    const struct ln_liveness *live = &t->peers[peer].live;
    return live->refused > live->heard;
}

double ln_timer_silence(const struct ln_transport *t, int peer, double since) {
    const double heard = fmax(t->peers[peer].live.heard, t->receiver.back);
    return since > 0 ? t->receiver.empty - fmax(heard, since) : 0;
}
