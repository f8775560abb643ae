/* peer.h — one peer: how datagrams go to it and come from it, when they are repeated, and what
 * this rank still needs of it. Nothing here knows what peers do together (exchange/exchange.h). */
#ifndef LOSSYNET_PEER_H
#define LOSSYNET_PEER_H

#include "lossynet/transport/state.h"

/* ---- needs.c: what we still need of a peer ---- */

/* Returns whether the caller waits for a phase that is not over for this peer. */
bool ln_needs_phase(const struct ln_transport *t, int peer);
/* Returns whether an open gather, of any kind, waits for this peer. */
bool ln_needs_gather(const struct ln_transport *t, int peer);
/* Returns whether a gather needs nothing more of a peer: we have its part and it has ours, or it has
 * gone on without us. */
bool ln_needs_no_exchange(const struct ln_transport *t, int peer, int which);
/* Returns whether the peer has our part of a gather, or is gone. */
bool ln_needs_no_part(const struct ln_transport *t, const struct ln_peer *peer, int which);
/* Returns whether the peer has ended this gather, maybe without us. */
bool ln_needs_is_past(const struct ln_transport *t, const struct ln_peer *peer, int which);
/* Returns whether we need something of a peer; _or_asks: or ask it for a sign of life. */
bool ln_needs(const struct ln_transport *t, int peer);
bool ln_needs_or_asks(const struct ln_transport *t, int peer);

/* ---- late ranks: whether we wait for one (exchange/deadline.c finds out who is late) ---- */

/* Returns whether at most half of the ranks are late. */
static inline bool ln_late_is_minority(const struct ln_transport *t) {
    return 2 * t->deadline.late <= t->world.ranks;
}
/* Returns whether nothing waits for a peer: it is late, and at least half of the ranks are not. */
static inline bool ln_late_ignores(const struct ln_transport *t, int peer) {
    return t->peers[peer].lateness.late && ln_late_is_minority(t);
}
/* Returns whether a peer is away: with a deadline, it has begun a gather of kind
 * LOSSYNET_GATHER that we have not begun. While it waits there it begins no new phase or gather. */
static inline bool ln_late_is_away(const struct ln_transport *t, int peer) {
    const uint32_t begun = t->gathers[LOSSYNET_GATHER].begun;
    return t->deadline.on && (int32_t)(t->peers[peer].control.gathers - begun) > 0;
}
/* Returns whether a phase does not wait for a peer: the peer is ignored, or it is away and has not
 * finished sending this phase. */
static inline bool ln_late_excuses(const struct ln_transport *t, int peer, int kind) {
    const uint32_t finished = t->peers[peer].control.finished[kind];
    return ln_late_ignores(t, peer) ||
           (ln_late_is_away(t, peer) && (int32_t)(finished - t->phase[kind].opened) < 0);
}

/* ---- timer.c: repeating datagrams that were not answered ---- */

/* Returns the factor by which pauses are longer when many peers do not answer; 1 for few peers. */
double ln_timer_slowness(const struct ln_transport *t);
/* Notes that a peer has sent something new, and not only a sign of life. */
void ln_timer_news(struct ln_transport *t, struct ln_peer *peer);
/* Returns whether it is time to send something that a peer has not answered, for the first time or
 * again. */
bool ln_timer_is_over(const struct ln_transport *t, const struct ln_timer *timer, double now);
/* Notes that it was sent, and makes the next pause longer. */
void ln_timer_again(struct ln_transport *t, struct ln_peer *peer, struct ln_timer *timer,
                    double now);
/* Does both: returns whether to send now, and if so notes that it was sent. */
bool ln_timer_is_due(struct ln_transport *t, struct ln_peer *peer, struct ln_timer *timer,
                     double now);
/* Makes everything that a peer has not answered due at once: nothing of it arrived. */
void ln_timer_all_at_once(struct ln_transport *t, struct ln_peer *peer);
/* Notes that a peer has answered something after `seconds` seconds. */
void ln_timer_measured(struct ln_round_trip *round_trip, double seconds);
/* Pauses, in seconds: after _timeout something should have been answered. _first is the pause
 * before the first repetition; it is short, so that most losses do not cost a round trip. _longest
 * is the longest pause between repetitions. */
double ln_timer_timeout(const struct ln_peer *peer);
double ln_timer_first(const struct ln_peer *peer);
double ln_timer_longest(const struct ln_peer *peer);
/* Notes that a datagram of a peer has come. */
void ln_timer_heard(struct ln_transport *t, int peer, int type);
/* Returns the seconds since the peer was heard, or since `since` or our own return if that is
 * later; 0 if `since` is 0. since: live.expected, or live.asked, if that we ask it for signs of
 * life is enough. */
double ln_timer_silence(const struct ln_transport *t, int peer, double since);
/* Returns whether its host has refused a datagram for it since its last datagram came. */
bool ln_timer_is_refused(const struct ln_transport *t, int peer);

/* Returns when to look at a timer again. As far as is known now, that is never later than the time
 * when it is over; it may be earlier. */
double ln_timer_due(const struct ln_transport *t, const struct ln_timer *timer, double now);

static inline struct ln_timer ln_timer_at_once(void) {
    return (struct ln_timer){0, 0};
}

static inline struct ln_timer ln_timer_from(const struct ln_peer *peer, double now) {
    return (struct ln_timer){now, ln_timer_first(peer)};
}

/* ---- pacing.c ---- */

void ln_pacing_open(struct ln_pacing *pacing, double gbps, double loss_budget);
/* Returns how many seconds to wait before `bytes` may leave. 0: they may leave, and are counted. */
double ln_pacing_wait(struct ln_pacing *pacing, size_t bytes);
/* Says that `bytes` of the counted ones did not leave. */
void ln_pacing_unused(struct ln_pacing *pacing, size_t bytes);
/* Takes a peer's counts: it has seen or given up `seen` of our DATA, and `received` have
 * arrived. */
void ln_pacing_report(struct ln_transport *t, int peer, uint32_t seen, uint32_t received);
/* Sets and returns the next rate, when the share `lost` was lost at the present one. */
double ln_pacing_step(struct ln_pacing *pacing, double lost, double now);

/* ---- window.c ---- */

/* Sets session.window, the number of DATA that each peer may have on its way to us. */
void ln_window_open(struct ln_transport *t);
/* Takes the same number from a peer, for our DATA to it. */
void ln_window_told(struct ln_transport *t, int peer, int most);
/* Takes a peer's count of our DATA that have arrived there. */
void ln_window_report(struct ln_transport *t, int peer, uint32_t came);

/* ---- agenda.c: which peers a turn looks at ---- */

/* Returns false if there is no memory, which the pool has logged. */
bool ln_agenda_open(struct ln_agenda *agenda, const struct lossynet_world *world);
size_t ln_agenda_memory(int ranks); /* bytes */
/* Makes the next turn look at a peer, because something about it has changed. */
void ln_agenda_soon(struct ln_transport *t, int peer);
/* Makes the next turn look at all peers, because the caller has done something. Counts all
 * flags. */
void ln_agenda_all(struct ln_transport *t);
/* Returns a peer to look at now, or -1. After looking, call _set with the time of the next look. */
int ln_agenda_next(const struct ln_transport *t, double now);
void ln_agenda_set(struct ln_transport *t, int peer, double due);
double ln_agenda_due(const struct ln_transport *t); /* time of the next look at any */
/* Updates the flags of a peer and their counts. */
void ln_agenda_count(struct ln_transport *t, int peer);

/* ---- session.c: sealing and verifying every datagram ---- */

/* Seals and sends up to LOSSYNET_BATCH datagrams, whose headers lack only the checksum. */
void ln_session_send(struct ln_transport *t, int peer, struct ln_datagram *batch, int n);
/* The same by another way (detour.c) than the peer's present one. */
void ln_session_send_by(struct ln_transport *t, int peer, int way, struct ln_datagram *batch,
                        int n);
/* Verifies and decrypts a datagram. If no rank of this run sent it, counts it and returns false.
 * Sends it on if it is for another rank, and returns false. *peer: the rank from which it came, then
 * the rank that sent it. *way: by which way it came. */
bool ln_session_verify(struct ln_transport *t, int *peer, int *way, struct wire_header *h,
                       uint8_t *datagram, size_t bytes);
/* Makes the transport fail because of a peer, and logs one line. Later calls do nothing. */
void ln_session_fail(struct ln_transport *t, int peer, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static inline uint64_t ln_session_step(const struct ln_transport *t) {
    return __atomic_load_n(&t->session.step, __ATOMIC_RELAXED);
}

/* ---- control.c: state, probes, the end of phases, leaving ---- */

struct ln_datagram ln_control_datagram(const struct ln_transport *t, int peer, int type, int kind,
                                       uint32_t index, uint32_t packet, const void *payload,
                                       size_t bytes);
/* Makes the transport fail because of a peer that sent ABORT, and says why the peer did. */
void ln_control_fail_with(struct ln_transport *t, int peer);
/* Tells a peer that this rank has failed, and because of whom. */
void ln_control_abort(struct ln_transport *t, int peer);
/* Sends one datagram with our state. */
void ln_control_send(struct ln_transport *t, int peer, int type, int kind, uint32_t index,
                     uint32_t packet);
/* Sends a PROBE with a nonce, and with zeros up to `bytes` bytes of payload. bulk: in the class of
 * DATA. */
void ln_control_probe(struct ln_transport *t, int peer, uint32_t nonce, size_t bytes, bool bulk);
/* Sends a PROBE with the number of a question about this way, by this way. */
void ln_control_ask_by(struct ln_transport *t, int peer, int way, uint32_t number);
/* Returns when to tell a peer again that a phase is open, after we told it now; 0: never. Over a
 * long round trip we do not wait for the peer to ask, because that takes too long if our datagram
 * was lost. */
double ln_control_tell(const struct ln_peer *peer, double now);
/* Sends a peer the control datagrams that are due. Returns when the next will be due. */
double ln_control_push(struct ln_transport *t, int peer, double now);
/* Returns whether something is being repeated until it is answered. */
bool ln_control_busy(const struct ln_transport *t);

/* ---- send.c ---- */

/* Sends a batch to each peer that can take one. Returns whether something left, and lowers *wait to
 * the seconds that pacing asks to wait. */
bool ln_send_push(struct ln_transport *t, double *wait);
/* Marks our phase as complete for a peer: nothing will follow, and DONE must say so. */
static inline void ln_send_complete(struct ln_tx *tx) {
    tx->complete = true;
    tx->done_waits = true;
    tx->done = ln_timer_at_once();
}
/* For ln_progress_until: returns whether all our packets of a phase have left. */
bool ln_send_all_left(struct ln_transport *t, int phase);

/* ---- detour.c: other ways to a peer ---- */

/* Asks a peer by which ways our datagrams arrive, if we wait for it in vain. Returns when to look
 * again. */
double ln_detour_push(struct ln_transport *t, int peer, double now);

/* Returns whether the peer has not answered our questions on the present way. */
bool ln_detour_is_silent(const struct ln_peer *peer);
/* Takes a peer's question that came by this way. Our answer takes the same way. */
void ln_detour_asked(struct ln_transport *t, int peer, uint32_t number, int way);
/* Takes a peer's answer to our question with this number. */
void ln_detour_answered(struct ln_transport *t, int peer, uint32_t number);

/* ---- path.c: paths that drop large datagrams ---- */

/* Returns a new nonce for a PROBE: an even one if it is padded, else an odd one. */
uint32_t ln_path_nonce(struct ln_transport *t, bool padded);
/* Says that the oldest fragment that a peer has not acknowledged in a gather of this kind has
 * `bytes` bytes. 0: all are acknowledged, or some were just now. */
void ln_path_message(struct ln_transport *t, int peer, int which, size_t bytes, double now);
/* Takes a peer's count of our DATA that have come there. */
void ln_path_data(struct ln_transport *t, int peer, uint32_t came);
/* Says that a peer has answered the PROBE with this nonce for the first time. */
void ln_path_answered(struct ln_transport *t, int peer, uint32_t nonce);
/* Sends a PROBE if we doubt the path. Returns when to look again. */
double ln_path_push(struct ln_transport *t, int peer, double now);

/* ---- recv.c ---- */

void ln_recv_data(struct ln_transport *t, int peer, const struct wire_header *h,
                  const uint8_t *payload);
void ln_recv_done(struct ln_transport *t, int peer, const struct wire_header *h);
/* Ends a peer's phases to us that are over, and gives up on a silent peer. Returns when to look
 * again. */
double ln_recv_check(struct ln_transport *t, int peer);
/* For ln_progress_until: returns whether no more packets of a bucket will come. place: phase *
 * buckets + bucket. */
bool ln_recv_bucket_is_over(struct ln_transport *t, int place);

#endif
