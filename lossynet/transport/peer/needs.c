/* needs.c — says what this rank still needs of a peer. It looks at the state alone, so that all
 * others may ask it.
 */
#include "lossynet/transport/peer/peer.h"

bool ln_needs_phase(const struct ln_transport *t, int peer) {
    for (int kind = 0; kind < 2; kind++)
        if (t->phase[kind].awaited && t->peers[peer].rx[kind].state != RX_OVER) return true;
    return false;
}

/* Returns whether a peer has ended this gather, maybe without us. That is so if it has opened a
 * phase that we have not opened, because there is a phase between any two rounds of this kind. */
bool ln_needs_is_past(const struct ln_transport *t, const struct ln_peer *p, int which) {
    bool passed = false;
    for (int kind = 0; kind < 2; kind++)
        passed |= (int32_t)(p->control.open[kind] - t->phase[kind].opened) > 0;
    return t->deadline.on && which == LOSSYNET_PULSE && passed;
}

bool ln_needs_no_part(const struct ln_transport *t, const struct ln_peer *p, int which) {
    return p->message[which].acked_before == p->message[which].fragments ||
           (int32_t)(p->control.complete[which] - t->gathers[which].begun) >= 0 ||
           (t->gathers[which].keeps && p->live.left);
}

bool ln_needs_no_exchange(const struct ln_transport *t, int peer, int which) {
    const struct ln_peer *p = &t->peers[peer];
    const struct ln_message *m = &p->message[which];
    if (ln_needs_is_past(t, p, which)) return true;
    return m->got_before == m->expects && ln_needs_no_part(t, p, which);
}

bool ln_needs_gather(const struct ln_transport *t, int peer) {
    for (int which = 0; which < LOSSYNET_GATHER_KINDS; which++)
        if (t->gathers[which].open && !ln_needs_no_exchange(t, peer, which)) return true;
    return false;
}

bool ln_needs(const struct ln_transport *t, int peer) {
    const struct ln_peer *p = &t->peers[peer];
    return p->flow.blocked || p->lateness.late || ln_needs_phase(t, peer) ||
           ln_needs_gather(t, peer);
}

/* While one peer is suspected, we ask all peers for a sign of life: if this rank gives up, it must
 * know which ranks it cannot reach. We also go on to measure the peer's silence then, even if a
 * phase has ended without it. */
bool ln_needs_or_asks(const struct ln_transport *t, int peer) {
    return t->receiver.suspects > 0 || ln_needs(t, peer);
}
