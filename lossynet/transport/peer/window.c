/* window.c — limits how many DATA may be on their way to a peer.
 *
 * A rank tells each peer how many DATA that peer may have on its way to it. Together these fill at
 * most half of its receive queue, even if the rank does not run for a while. Over a short path this
 * is more than the path needs: DATA that are sent too early wait in queues, and delay everything
 * behind them. Over a long path it may be too little, so that the path is partly idle. So a window
 * follows what the path holds, as in BBR (Cardwell et al. 2016, BBR: Congestion-Based Congestion
 * Control):
 *
 *     window = 2 * (DATA that arrive there per second) * (round trip)
 *
 * It is at least what short paths need, and at most what the peer allows. While the window limits
 * the sending, the rate is one window per round trip, and so the window doubles in each round trip.
 * The rate counts DATA that arrived, and not credit, which also counts lost DATA. So the window
 * does not grow on a path that loses the excess.
 *
 * A sample takes at least one round trip. It begins with the first news after a pause, since
 * nothing can be learnt from a pause. A higher rate is believed at once. A lower rate is believed
 * gradually, and only if the window limited the sending.
 */
#include "lossynet/transport/peer/peer.h"

#include <math.h>
#include <stdio.h>

enum { WINDOW_MIN = 4, WINDOW_SHORT = 1024, QUEUE_SHORT = 4096, NARROW = 16 };

static const double GAIN = 2;
static const double FALL = 0.125;
static const double SAMPLE = 0.01;     /* shortest sample in seconds: answers may come in bunches */
static const double EXAMPLE = 1e9 / 8; /* bytes per second, an example for the line of the log */
static const double PATH_HEADERS = 42; /* bytes: Ethernet, IPv4, UDP */

/* Returns how many DATA each of `peers` peers may have on its way into a receive queue. */
static int share(int queue, int peers) {
    const int window = queue / 2 / peers;
    return window < WINDOW_MIN ? WINDOW_MIN : window;
}

/* Returns the smallest window, which is enough over short paths. */
static int least(const struct ln_transport *t, int most) {
    const int window = share(QUEUE_SHORT, t->world.ranks - 1);
    const int enough = window < WINDOW_SHORT ? window : WINDOW_SHORT;
    return most < enough ? most : enough;
}

void ln_window_open(struct ln_transport *t) {
    t->session.window = share(t->link->features.receive_queue, t->world.ranks - 1);
    t->session.credit_every = (least(t, t->session.window) + 3) / 4;
}

void ln_window_told(struct ln_transport *t, int peer, int most) {
    struct ln_window *w = &t->peers[peer].flow.window;
    w->most = most;
    w->least = w->now = least(t, most);
}

/* Logs once that the receive queue of a peer's host is so small that the path is partly idle. Only
 * rank 0 does so, and rank 1 about rank 0. */
static void tell(struct ln_transport *t, int peer) {
    const struct ln_link_features *link = &t->link->features;
    const struct ln_window *w = &t->peers[peer].flow.window;
    const double round_trip = t->peers[peer].round_trip.least;
    const double bytes = (double)(WIRE_HEADER_BYTES + t->shape.packet_bytes) + PATH_HEADERS;
    const double needed = 2 * EXAMPLE * round_trip / bytes * (double)link->queue_bytes;
    char what[128] = "no setting allows more";
    if (t->session.told_window || t->world.rank != (peer == 0)) return;
    t->session.told_window = true;
    if (link->queue_setting)
        snprintf(what, sizeof what,
                 "1 Gbit/s takes a receive buffer of %.0f MiB on each host: as root, sysctl -w "
                 "%s=%.0f",
                 ceil(needed / 0x1p20), link->queue_setting, ceil(needed / 0x1p20) * 0x1p20);
    ln_log("rank %d: a round trip of %.3g ms to rank %d, whose receive buffer has room for %d "
           "packets of each rank, leaves at most %.3g Mbit/s to it; %s",
           t->world.rank, 1e3 * round_trip, peer, w->most, 8e-6 * w->most * bytes / round_trip,
           what);
}

void ln_window_report(struct ln_transport *t, int peer, uint32_t came) {
    struct ln_window *w = &t->peers[peer].flow.window;
    const double round_trip = t->peers[peer].round_trip.least, now = t->receiver.now;
    if (round_trip == 0 || came == w->came) return;
    const double seconds = now - w->since, rate = (int32_t)(came - w->came) / seconds;
    if (w->since > 0 && seconds < fmax(round_trip, SAMPLE)) return;
    if (w->since > 0) {
        if (rate > w->rate)
            w->rate = rate;
        else if (w->full)
            w->rate += FALL * (rate - w->rate);
        const double wanted = GAIN * w->rate * round_trip;
        w->now = (int)fmin(fmax(wanted, w->least), w->most);
        const bool narrow = w->full && GAIN * rate * round_trip > w->most;
        w->narrow = narrow ? w->narrow + 1 : 0;
        if (w->narrow == NARROW) tell(t, peer);
    }
    w->since = now;
    w->came = came;
    w->full = false;
}
