/* progress.h — the inside of the transport: one protocol over any link, driven by one loop.
 *
 *     caller's thread                      the transport's own thread
 *     send_begin, wake, end ...       -->  sends what is ready, receives, answers peers, while the
 *     wait_bucket, swap, gather            caller computes
 *            |                                       |
 *         phase.c, transport.c                       |
 *            +---> progress.c: a turn <--------------+   whichever holds the lock runs the turns;
 *                  dispatch.c                            the caller gets the lock first
 *                    |        |       |
 *                 send.c   recv.c   message.c
 *                    |        |       |
 *                 control.c, pacing.c, window.c, timer.c, deadline.c, ask.c, path.c, detour.c,
 *                 agenda.c, needs.c
 *                    |
 *                 session.c: seals, verifies  -->  link->send, link->receive
 *
 * DATA is sent once. It may leave when three things are true: its bucket is ready, the peer has
 * opened the phase (the peer's state says so), and less than a window of DATA is on its way to that
 * peer. So no receive queue overflows, even if the peer is slower, and no DATA comes early. The
 * window moves with credit, which counts the DATA that the receiver saw or gave up. If credit was
 * lost, the sender asks for it with PROBE.
 *
 * The phase of a peer is over when one of these is true:
 *
 *   - all packets that its DONE announced have arrived;
 *   - it has sent DONE, or something that implies DONE. Then it answered a PROBE, and no DATA came
 *     for a moment; or no DATA came for so long that none can have been overtaken (recv.c);
 *   - it has been silent for longer than a deadline that adapts to earlier phases.
 *
 * A bucket of a peer is over when it is complete, or a moment after later buckets of that peer
 * began to come. So the caller can average a bucket, or compute with it, before later ones arrive.
 *
 * Without a deadline a rank waits for every peer that answers. With a deadline (deadline.c) phases,
 * and messages of kind LOSSYNET_PULSE, go on without late ranks. A late rank notices that the
 * others are ahead and jumps to their step. A peer is dead when this rank needs something of it and
 * it has been silent for peer_timeout: then the call logs one line and returns LOSSYNET_LINK.
 *
 * DATA may travel in a traffic class of its own (`dscp`), whose queues are longer. Then datagrams
 * that must arrive after DATA travel in its class too: the answer to a probe's nonce, and a PROBE
 * that says how much was sent.
 *
 * MPI makes no progress while the caller computes. So over a reliable link there is no thread,
 * nothing is repeated, and nothing times out.
 */
#ifndef LOSSYNET_PROGRESS_H
#define LOSSYNET_PROGRESS_H

#include "lossynet/crypto/crypto.h"
#include "lossynet/transport/peer.h"
#include "lossynet/transport/transport.h"

#include <pthread.h>

/* A datagram that is not answered is first repeated after RTO_MIN seconds, or later if round trips
 * are longer. */
static const double RTO_MIN = 3e-4;
/* Each pause is this factor longer than the one before. The factor is small, because with 10% of
 * loss several losses in a row are common. */
static const double RTO_BACKOFF = 1.5;
static const double RTO_MAX = 0.02; /* longest pause in seconds, or twice a time-out if longer */
/* How long to wait for DATA that were overtaken, in seconds. It grows when DATA come late, up to
 * GRACE_MAX, or over a longer path up to a round trip (recv.c). */
static const double GRACE_MIN = 2e-4;
static const double GRACE_MAX = 0.02;

/* When n > CROWD peers have not said anything new since something was repeated to them, time-outs
 * grow by the square of n / CROWD. Such peers are slow, not dead, and every repetition slows them
 * more. But at least REPETITIONS_LEAST repetitions fit into peer_timeout. */
enum { CROWD = 4, REPETITIONS_LEAST = 8 };

struct ln_rejected {    /* datagrams dropped on receipt, by the first error found */
    uint64_t truncated; /* shorter than the header */
    uint64_t foreign;   /* wrong magic or session, or from a stranger */
    uint64_t version;
    uint64_t corrupt;    /* wrong checksum or authentication tag */
    uint64_t invalid;    /* a type, worker, bucket, packet or length that does not exist */
    uint64_t late;       /* DATA of a phase or bucket that is not open */
    uint64_t duplicate;  /* DATA, or an encrypted datagram, that had come before */
    uint64_t not_finite; /* NaN or infinity, over links that lose datagrams */
};

struct ln_pacing {
    double rate, most;            /* bytes per second; 0: no limit */
    double burst, tokens, filled; /* token bucket in bytes; when it was last filled */
    int batch;                    /* most datagrams that leave at once */
    double budget;                /* share of DATA that may be lost; 0: no budget */
    double expected, arrived;     /* DATA since the rate last changed */
    double stepped;               /* when the rate last changed */
    double clear; /* cumulative sum that grows while clearly less than the budget is lost */
    double rise;  /* power of the factor of a step up; 0: the last step was not up */
    double risen; /* when `rise` last changed */
};

struct ln_buckets {    /* what arrived of the present phase of a kind */
    uint32_t *missing; /* [B][N]: packets for local workers that have not come */
    double *passed;    /* [B][N]: when a later bucket of that sender began to come; 0: not yet */
    int *reached;      /* [N]: latest bucket seen, in the phase's order */
    int *checked;      /* [B]: no more will come from senders 0 ... checked - 1 */
    uint8_t *over;     /* [B]; the caller has closed the bucket; atomic */
};

struct ln_phase_state { /* our phases of a kind */
    uint32_t begun;     /* phases begun for sending; the present one is begun - 1 */
    uint32_t opened;    /* phases opened for receiving */
    uint32_t closed;    /* phases that have ended */
    bool awaited;       /* the caller waits for the phase or one of its buckets */
    bool reached;       /* the caller has waited so at least once in this phase */
    double half;        /* when half of the ranks were done with it; 0: not yet */
    double closed_at;
    double seconds; /* how long the caller waits, a moving average */
    struct ln_buckets buckets;
};

struct ln_session { /* what all datagrams of a run have in common */
    uint64_t id;
    struct ln_secure *secure; /* NULL: not encrypted */
    uint8_t *sealed;          /* [LOSSYNET_BATCH][payload_most], with secure */
    uint8_t *padding;         /* [payload_most], for PROBEs of full size */
    size_t payload_most;      /* bytes, with the trailer of an encrypted datagram */
    size_t fragment_bytes;    /* bytes of a message that fit one datagram */
    bool two_classes;         /* DATA has a traffic class of its own */
    double peer_timeout;
    int window;       /* most DATA that a peer may have on its way to us */
    int credit_every; /* we give a peer credit after so many DATA */
    int missed;       /* 1 + the peer because of which this rank has failed; 0: none */
    int path;         /* of the link, on which the datagram came that is being handled */
    bool told_window; /* a line has said that receive queues keep paths idle */
    uint64_t step;    /* the caller's step, for lines of the log; atomic */
};

struct ln_sender {
    struct ln_datagram batch[LOSSYNET_BATCH];
    struct ln_span spans[LOSSYNET_BATCH];
    int first;  /* the peer to begin with */
    bool woken; /* the caller has more to send; atomic */
};

/* Kinds of gathers. In a LOSSYNET_GATHER all ranks wait for all; a LOSSYNET_PULSE goes on
 * without late ranks. */
enum { LOSSYNET_GATHER, LOSSYNET_PULSE };

enum { LOSSYNET_KEPT_BYTES = 512 << 10 }; /* most bytes kept of our parts of a gather, in all */

struct ln_gathers { /* gathers of a kind */
    uint32_t begun;
    uint32_t complete; /* gathers of which we have the parts of all ranks */
    bool open;         /* the caller waits, or our part is not acknowledged yet */
    bool keeps;        /* our part was copied to `kept`: the caller need not wait for its arrival */
    uint8_t *kept;     /* [LOSSYNET_KEPT_BYTES], only for LOSSYNET_GATHER */
    double half;       /* when half of the ranks were done; 0: not yet */
};

struct ln_receiver {
    double now; /* when the datagrams that are being handled were received */
    /* When the link was last found empty. Silence is measured up to this time: a rank that was
     * stopped itself must not blame peers whose datagrams it has not read yet. */
    double empty;
    double marked;    /* when `read` was last 0; or later, but before the oldest that waits */
    int read;         /* datagrams read since then */
    double news;      /* when a datagram last came */
    double next_turn; /* when the next turn is to begin, at the latest */
    double back;      /* when this rank last noticed that it had been stopped itself */
    double grace;     /* from GRACE_MIN on, learnt from late DATA, slowly forgotten (recv.c) */
    uint32_t nonces;  /* PROBEs sent with a number */
    int unanswered;   /* peers with live.repeated */
    int suspects;     /* peers with live.suspected */
    struct ln_rejected rejected;
    uint64_t ignored;    /* TEST datagrams; what we sent on, but for DATA */
    uint64_t stragglers; /* phases of peers that were ended by a deadline */
    uint64_t relayed;    /* DATA that we sent on for others */
};

/* How many of the last lags and steps are remembered. */
enum { LOSSYNET_DEADLINE_LAGS = 1024, LOSSYNET_DEADLINE_STEPS = 64 };

struct ln_present_step { /* of this rank */
    bool idle;           /* this rank has no gradient in it */
    uint32_t opened;     /* GRADIENT phases opened when the step began */
    double asks_until;   /* when this rank stops asking for acknowledgements (ask.c) */
};

struct ln_deadline {
    bool on;
    double fixed; /* seconds; 0: the deadline is learnt */
    bool raised;  /* a line has said that `fixed` is too short */
    double wait;  /* seconds, learnt */
    double ended; /* when the last GRADIENT phase ended */
    int late;     /* late peers */
    struct ln_present_step present;
    bool late_comes;                   /* late gradients are sent again in the next step */
    uint32_t pulses, phases[2];        /* per step */
    uint32_t lags, steps;              /* measured so far */
    float lag[LOSSYNET_DEADLINE_LAGS]; /* seconds from when half were done to a peer */
    float largest[LOSSYNET_DEADLINE_STEPS], base[LOSSYNET_DEADLINE_STEPS]; /* seconds, by step */
};

struct ln_threads {
    bool threaded, stop, closing;
    bool waits;     /* a caller waits in ln_progress_until */
    bool elsewhere; /* a peer waits in another call than this rank, and neither can end */
    double closing_since;
    int wanted; /* callers that want the lock; atomic */
    pthread_mutex_t lock, caller;
    pthread_cond_t handed_back;
    pthread_t thread;
    struct ln_log_target log;
    const struct ln_log_target *log_before; /* what the caller that has the lock used */
};

/* Conditions of a peer, which agenda.c counts. Those before LOSSYNET_IDLES stand for two flags
 * each, one per kind of phase or gather. The flags for peers on time, and for late peers, leave out
 * a peer that is away (deadline.c) and has not sent its part. */
enum ln_flag {
    LOSSYNET_RECEIVES,               /* its phase to us is not over */
    LOSSYNET_IS_DONE = 2,            /* its phase to us is over, and it has a gradient */
    LOSSYNET_IN_TIME = 4,            /* its phase to us is not over, and it is on time */
    LOSSYNET_LATE_FOR = 6,           /* its phase to us is not over, and it is late */
    LOSSYNET_SENDS = 8,              /* not all of our packets have left for it */
    LOSSYNET_STUCK = 10,             /* they cannot leave, since the peer is late or away */
    LOSSYNET_UNCONFIRMED = 12,       /* it has not acknowledged our DONE */
    LOSSYNET_LACKS = 14,             /* its part of a gather has not come */
    LOSSYNET_EXCHANGES = 16,         /* its part has not come, or ours is not acknowledged */
    LOSSYNET_EXCHANGES_IN_TIME = 18, /* the same, and the peer is on time */
    LOSSYNET_EXCHANGES_LATE = 20,    /* the same, and the peer is late */
    LOSSYNET_IDLES = 22,             /* it has no gradient in this step */
    LOSSYNET_EXPECTED,               /* we need something of it, or ask it for a sign of life */
    LOSSYNET_BLOCKED,                /* DATA to it wait for its window, or for it to open a phase */
    LOSSYNET_FLAGS
};

struct ln_agenda {
    int peers;
    int *heap, *place;         /* [peers]: the peers, a heap by `due`; [R]: a peer's index in it */
    double *due;               /* [R]: when to look at a peer again */
    uint32_t *flags;           /* [R]: bit f is set if the peer has flag f */
    int count[LOSSYNET_FLAGS]; /* how many peers have each flag */
    bool *sends;    /* [R]: DATA may leave for the peer, or other peers wait for its turn */
    double slowest; /* longest round trip to a peer that is not ignored, or a bit more [s] */
};

struct ln_transport {
    struct lossynet_world world;
    struct ln_transport_shape shape;
    struct ln_transport_calls calls;
    struct ln_link *link;
    struct ln_session session;
    struct ln_peer *peers; /* [R] */
    struct ln_agenda agenda;
    struct ln_phase_state phase[2];
    struct ln_gathers gathers[LOSSYNET_GATHER_KINDS];
    struct ln_deadline deadline;
    struct ln_sender sender;
    struct ln_receiver receiver;
    struct ln_pacing pacing;
    struct ln_threads threads;
    lossynet_status failed;
};

/* ---- threads.c: one thread at a time ---- */

/* Takes the lock from the transport's thread, and gives it back. */
void ln_threads_enter(struct ln_transport *t);
void ln_threads_leave(struct ln_transport *t);

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
/* Returns how long a peer that we need has been silent, in seconds; 0 if we need nothing of it. */
double ln_timer_silence(const struct ln_transport *t, int peer);
/* Does the same for a peer that we ask for signs of life, even if we need nothing else of it. */
double ln_timer_unanswered(const struct ln_transport *t, int peer);
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

/* ---- agenda.c: which peers a turn looks at ---- */

/* Returns false if there is no memory. Closing is allowed then, too. */
bool ln_agenda_open(struct ln_agenda *agenda, const struct lossynet_world *world);
void ln_agenda_close(struct ln_agenda *agenda);
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

/* ---- detour.c: other ways to a peer ---- */

/* Asks a peer by which ways our datagrams arrive, if we wait for it in vain. Returns when to look
 * again. */
double ln_detour_push(struct ln_transport *t, int peer, double now);
/* Takes a peer's question that came by this way. Our answer takes the same way. */
void ln_detour_asked(struct ln_transport *t, int peer, uint32_t number, int way);
/* Takes a peer's answer to our question with this number. */
void ln_detour_answered(struct ln_transport *t, int peer, uint32_t number);

/* ---- ask.c: acknowledgements of late ranks ---- */

/* Counts our DATA of the step's earlier GRADIENT phases. Call it when the next one begins to send,
 * before its tx is cleared. */
void ln_ask_sending(struct ln_transport *t);
void ln_ask_receive(struct ln_transport *t, int peer, const struct wire_header *h);
void ln_ask_told(struct ln_transport *t, int peer, const struct wire_header *h,
                 const uint8_t *payload);
/* Asks a peer if that is due. Returns when to look again. */
double ln_ask_push(struct ln_transport *t, int peer, double now);

/* ---- deadline.c: going on without late ranks ---- */

void ln_deadline_open(struct ln_deadline *deadline, bool on, double fixed);
/* Returns how many seconds a rank waits for the others after half of them are done. At first it is
 * infinite. */
double ln_deadline_wait(const struct ln_transport *t);
/* Returns whether this time is over. half: when half of the ranks were done; 0: they are not
 * yet. */
bool ln_deadline_is_over(const struct ln_transport *t, double half);
/* Returns the next time, after `now`, at which it is over for a phase or gather that waits; infinity
 * if there is none. */
double ln_deadline_due(const struct ln_transport *t, double now);
/* Returns whether at most half of the ranks are late. */
static inline bool ln_deadline_is_minority(const struct ln_transport *t) {
    return 2 * t->deadline.late <= t->world.ranks;
}
/* Returns whether nothing waits for a peer: it is late, and at least half of the ranks are not. */
static inline bool ln_deadline_ignores(const struct ln_transport *t, int peer) {
    return t->peers[peer].lateness.late && ln_deadline_is_minority(t);
}
/* Returns whether a peer is away: with a deadline, it has begun a gather of kind
 * LOSSYNET_GATHER that we have not begun. While it waits there it begins no new phase or gather. */
static inline bool ln_deadline_is_away(const struct ln_transport *t, int peer) {
    const uint32_t begun = t->gathers[LOSSYNET_GATHER].begun;
    return t->deadline.on && (int32_t)(t->peers[peer].control.gathers - begun) > 0;
}
/* Returns whether a phase does not wait for a peer: the peer is ignored, or it is away and has not
 * finished sending this phase. */
static inline bool ln_deadline_excuses(const struct ln_transport *t, int peer, int kind) {
    const uint32_t finished = t->peers[peer].control.finished[kind];
    return ln_deadline_ignores(t, peer) ||
           (ln_deadline_is_away(t, peer) && (int32_t)(finished - t->phase[kind].opened) < 0);
}
/* Returns how many steps `phases` GRADIENT phases belong to. The last may lack some phases. */
static inline uint32_t ln_deadline_steps(const struct ln_transport *t, uint32_t phases) {
    const uint32_t each = t->deadline.phases[LOSSYNET_GRADIENT];
    return (phases + each - 1) / each;
}
/* Returns whether the present GRADIENT phase is the first of its step. */
static inline bool ln_deadline_is_first(const struct ln_transport *t) {
    return (t->phase[LOSSYNET_GRADIENT].opened - 1) % t->deadline.phases[LOSSYNET_GRADIENT] == 0;
}
/* Logs that a peer is late, now and then. */
void ln_deadline_tell(const struct ln_transport *t, int peer);
/* Marks a peer as late: we go on without it. */
void ln_deadline_late(struct ln_transport *t, int peer);
/* Takes a peer's new state, and finds out whether it has caught up. */
void ln_deadline_told(struct ln_transport *t, int peer);
/* Ends a phase for the late peers that hold it up. Every turn calls it. */
void ln_deadline_check(struct ln_transport *t, int kind);
/* Learns how late peers were, when the first GRADIENT phase of a step has ended. */
void ln_deadline_learn(struct ln_transport *t);
/* Returns the deadline with the most progress per second, or infinity if too little is known. */
double ln_deadline_best(const struct ln_deadline *deadline);

/* ---- message.c ---- */

/* Sends a peer the fragments of our messages that are due. Returns when the next will be due. */
double ln_message_push(struct ln_transport *t, int peer, double now);
void ln_message_receive(struct ln_transport *t, int peer, const struct wire_header *h,
                        const uint8_t *payload);
void ln_message_acknowledge(struct ln_transport *t, int peer, const struct wire_header *h,
                            const uint8_t *payload);
/* Returns how many seconds ago a peer that has begun an open gather last sent a fragment, if we lack
 * some; else 0. A peer repeats fragments until we acknowledge them, unless it wrongly believes that
 * we did. */
double ln_message_owed(const struct ln_transport *t, int peer);
/* Begins a gather of a kind. Our part for rank r is bytes out_offset[r] ... out_offset[r + 1] of
 * `out`; with `same` all ranks get the part at this rank's own offset. The part from rank r goes to
 * in_offset[r] ... in_offset[r + 1] of `in`. */
void ln_message_begin(struct ln_transport *t, int which, const uint8_t *out,
                      const size_t *out_offset, bool same, uint8_t *in, const size_t *in_offset);
/* For ln_progress_until: returns whether all parts of the gather have come, and ours have
 * arrived or are kept. A LOSSYNET_PULSE does not wait for late ranks. */
bool ln_message_exchanged(struct ln_transport *t, int which);
/* For ln_progress_until: returns whether our kept parts have arrived, so that the next gather
 * may begin. */
bool ln_message_settled(struct ln_transport *t, int which);

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

/* ---- recv.c ---- */

void ln_recv_data(struct ln_transport *t, int peer, const struct wire_header *h,
                  const uint8_t *payload);
void ln_recv_done(struct ln_transport *t, int peer, const struct wire_header *h);
/* Ends a peer's phases to us that are over, and gives up on a silent peer. Returns when to look
 * again. */
double ln_recv_check(struct ln_transport *t, int peer);
/* For ln_progress_until: return whether no more packets of a phase, or a bucket, will
 * come. */
bool ln_recv_phase_is_over(struct ln_transport *t, int phase);
bool ln_recv_gradient_is_over(struct ln_transport *t, int bucket);
bool ln_recv_parameter_is_over(struct ln_transport *t, int bucket);

/* ---- dispatch.c ---- */

/* Verifies one datagram and passes it to the file that handles its type. The lock is held. */
void ln_dispatch(struct ln_transport *t, int peer, uint8_t *datagram, size_t bytes);

/* ---- progress.c ---- */

/* Runs one turn. Returns seconds until something is due, or 0 if there may be more to do now. */
double ln_progress_turn(struct ln_transport *t);
/* Sends all peers the datagrams that are due, except DATA. */
void ln_progress_push(struct ln_transport *t, double now);
/* Runs turns, with the lock held, until over(t, argument) is true or the transport has failed. */
lossynet_status ln_progress_until(struct ln_transport *t,
                                  bool (*over)(struct ln_transport *t, int argument), int argument);
lossynet_status ln_progress_start(struct ln_transport *t);
/* Tells the peers that we leave, and ends the thread. */
void ln_progress_stop(struct ln_transport *t);

#endif
