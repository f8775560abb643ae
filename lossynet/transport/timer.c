/* timer.c — when to repeat what was not answered, and who is silent. */
#include "lossynet/transport/progress.h"

#include <math.h>

double lossynet_timer_slowness(const struct lossynet_transport *t) {
    double crowd = (double)t->receiver.unanswered / CROWD;
    return crowd > 1 ? crowd * crowd : 1;
}

void lossynet_timer_news(struct lossynet_transport *t, struct lossynet_peer *peer) {
    t->receiver.unanswered -= peer->live.repeated;
    peer->live.repeated = false;
}

bool lossynet_timer_is_due(struct lossynet_transport *t, struct lossynet_peer *peer,
                           struct lossynet_timer *timer, double now) {
    double pause = timer->pause * lossynet_timer_slowness(t);
    if (now - timer->since < fmin(pause, t->session.peer_timeout / REPETITIONS_LEAST)) return false;
    if (timer->pause > 0 && !peer->live.repeated) {
        peer->live.repeated = true;
        t->receiver.unanswered++;
    }
    double longer = RTO_BACKOFF * timer->pause;
    timer->pause = fmin(fmax(longer, RTO_MIN), RTO_MAX);
    timer->since = now;
    return true;
}

double lossynet_timer_silence(const struct lossynet_transport *t, int peer) {
    const struct lossynet_liveness *live = &t->peers[peer].live;
    double since = live->heard > live->expected ? live->heard : live->expected;
    return live->expected > 0 ? t->receiver.empty - since : 0;
}
