/* path.c — notices a path that has begun to drop large datagrams (a "black hole").
 *
 * A tunnel or a router on the way may take less than the interfaces say, and drop larger datagrams
 * without a message. When the link opens, it measures what passes (link/udp.c). Here a rank notices
 * that less passes later. As in RFC 8899, section 4.3, it takes the loss of large datagrams in a
 * row as the sign, and then sends probes:
 *
 *   - we doubt that a size passes if a large fragment of a message is not acknowledged for a while,
 *     or if at most half of SENT DATA have arrived;
 *   - then small PROBEs, and PROBEs padded to this size, leave in turn. Odd nonces are small, even
 *     nonces are padded, so each answer says which one has arrived. An answer to a padded one ends
 *     the doubt;
 *   - if SURE small ones were answered meanwhile and no padded one, then no large datagram passes.
 *     Chance does not do that: if half of all datagrams were lost, it would happen once in 1e10.
 *
 * Vectors are cut into packets when a comm opens, so they cannot become smaller now. The comm fails
 * with one line. When ranks meet again, the link measures the path and chooses smaller packets.
 */
#include "lossynet/transport/peer/peer.h"

#include <inttypes.h>
#include <math.h>

enum { SENT = 64, SURE = 32 };

/* Seconds without an acknowledgement after which we doubt, and between two PROBEs; at most these
 * shares of the peer time-out. */
static const double DOUBT = 1, DOUBT_SHARE = 0.125;
static const double PAUSE = 0.02, PAUSE_SHARE = 0.005;
/* After SENT DATA have left, we wait as long, but at least so many time-outs, before we ask how many
 * came. */
static const double TRIPS = 4;
static const double AGAIN_SHARE = 0.5; /* of the peer time-out: the next doubt comes not before */

uint32_t ln_path_nonce(struct ln_transport *t, bool padded) {
    uint32_t *nonces = &t->receiver.nonces;
    *nonces += 1 + (*nonces % 2 != padded);
    if (*nonces == 0) *nonces = 2; /* 0 stands for no nonce */
    return *nonces;
}

static void begin(struct ln_transport *t, int peer, size_t bytes, bool data) {
    struct ln_doubt *doubt = &t->peers[peer].doubt;
    if (doubt->bytes > 0 || bytes <= WIRE_STATE_BYTES || t->receiver.now < doubt->trusted) return;
    doubt->bytes = bytes;
    doubt->data = data;
    doubt->answers = 0;
    doubt->first = 0;
    doubt->due = 0;
    ln_agenda_soon(t, peer);
}

static double patience(const struct ln_transport *t) {
    return fmin(DOUBT, DOUBT_SHARE * t->session.peer_timeout);
}

void ln_path_message(struct ln_transport *t, int peer, int which, size_t bytes, double now) {
    double *waits = &t->peers[peer].doubt.waits[which];
    if (bytes == 0) {
        *waits = 0;
    } else if (*waits == 0) {
        *waits = now;
    } else if (now - *waits > patience(t)) {
        begin(t, peer, bytes, false);
    }
}

void ln_path_data(struct ln_transport *t, int peer, uint32_t came) {
    const struct ln_peer *p = &t->peers[peer];
    struct ln_doubt *doubt = &t->peers[peer].doubt;
    const uint32_t sent = p->flow.sent, more = sent - doubt->sent;
    const double now = t->receiver.now;
    if (more < SENT) return;
    if (!doubt->sampled) doubt->since = now;
    doubt->sampled = true;
    /* What was sent in the last round trips may still be on its way, or its count may be. */
    if (now - doubt->since < fmax(patience(t), TRIPS * ln_timer_timeout(p))) return;
    /* The last packet of a shard may be so small that it passes. */
    if (2 * (came - doubt->came) <= more) {
        if (doubt->bytes == 0) doubt->vanished = came == doubt->came ? more : 0;
        begin(t, peer, t->shape.packet_bytes, true);
    }
    doubt->came = came;
    doubt->sent = sent;
    doubt->sampled = false;
}

/* Logs once that DATA do not arrive, although datagrams of this size do. */
static void tell_vanished(const struct ln_transport *t, int peer) {
    struct ln_doubt *doubt = &t->peers[peer].doubt;
    if (!doubt->data || doubt->vanished == 0 || doubt->told) return;
    doubt->told = true;
    ln_log("rank %d, step %" PRIu64 ": none of the last %" PRIu32 " packets to rank %d has "
           "come, and other datagrams of their size do: is there a filter on the path?",
           t->world.rank, ln_session_step(t), doubt->vanished, peer);
}

void ln_path_answered(struct ln_transport *t, int peer, uint32_t nonce) {
    struct ln_doubt *doubt = &t->peers[peer].doubt;
    if (doubt->bytes == 0 || doubt->first == 0 || (int32_t)(nonce - doubt->first) < 0) return;
    if (nonce % 2 == 0) {
        tell_vanished(t, peer);
        doubt->bytes = 0;
        doubt->trusted = t->receiver.now + AGAIN_SHARE * t->session.peer_timeout;
        doubt->waits[0] = doubt->waits[1] = 0;
    } else if (++doubt->answers >= SURE) {
        ln_session_fail(
            t, peer,
            "gets no datagram with %zu bytes from rank %d any more, and all small ones: the path "
            "drops what is larger than its MTU. When ranks meet again they choose smaller packets",
            doubt->bytes, t->world.rank);
    }
}

double ln_path_push(struct ln_transport *t, int peer, double now) {
    struct ln_doubt *doubt = &t->peers[peer].doubt;
    if (doubt->bytes == 0 || t->failed || t->threads.closing) return HUGE_VAL;
    if (now < doubt->due) return doubt->due;
    doubt->due = now + fmin(PAUSE, PAUSE_SHARE * t->session.peer_timeout);
    doubt->padded = !doubt->padded || doubt->first == 0;
    const uint32_t nonce = ln_path_nonce(t, doubt->padded);
    if (doubt->first == 0) doubt->first = nonce;
    ln_control_probe(t, peer, nonce, doubt->padded ? doubt->bytes : 0, doubt->data);
    return doubt->due;
}
