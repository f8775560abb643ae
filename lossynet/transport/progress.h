/* progress.h — the transport from inside: one protocol over any link, driven by one loop.
 *
 *     caller's thread                      the transport's own thread
 *     send_begin, wake, end ...       -->  sends what is ready, receives, answers peers, while the
 *     wait_bucket, swap, gather            caller computes
 *            |                                       |
 *         phase.c, transport.c                       |
 *            +---> progress.c: a turn <--------------+   whoever holds the lock turns;
 *                  dispatch.c                            the caller goes before the thread
 *                    |        |       |
 *                 send.c   recv.c   message.c
 *                    |        |       |
 *                 control.c, pacing.c, window.c, timer.c, deadline.c, ask.c, agenda.c
 *                    |
 *                 session.c: seals, verifies  -->  link->send, link->receive
 *
 * DATA is sent once. It may leave when its bucket is ready, when the peer has opened the phase
 * (it says so in its state), and while at most a window of DATA is on its way to that peer: so no
 * receive queue overflows, whoever is slower, and nothing comes early. The window moves with
 * credit, which counts what the receiver saw or gave up; lost credit is asked for with PROBE.
 *
 * A phase with a peer is over when all that its DONE announced has arrived; or after DONE, or what
 * implies DONE, when a PROBE has been answered and nothing came for a moment (what was overtaken
 * has come then); or when it has been silent for longer than a deadline that adapts to the phases
 * seen. A bucket is over for a peer when it is complete, or a moment after later buckets of that
 * peer began to come: it is averaged, or computed with, while later ones are on their way.
 *
 * Without a deadline a peer that answers is waited for. With one (deadline.c) phases, and messages
 * of kind LOSSYNET_PULSE, go on without a peer that is late; it finds others ahead and jumps to
 * their step. A peer of which something is expected and that is silent for peer_timeout is dead:
 * the call returns LOSSYNET_LINK after one line.
 *
 * DATA may travel in another traffic class than the rest (`dscp`), whose queues are longer. What
 * counts on coming behind DATA travels in its class then: the answer to a probe's nonce, and a
 * PROBE that says how much was sent.
 *
 * MPI makes no progress while the caller computes: over a reliable link there is no thread, nothing
 * is repeated and nothing times out.
 */
#ifndef LOSSYNET_PROGRESS_H
#define LOSSYNET_PROGRESS_H

#include "lossynet/crypto/crypto.h"
#include "lossynet/transport/peer.h"
#include "lossynet/transport/transport.h"

#include <pthread.h>

/* Before something unanswered is repeated, s; where a round trip takes longer, so does this. */
static const double RTO_MIN = 3e-4;
/* So many times longer each time: where 10% is lost, several losses in a row are common. */
static const double RTO_BACKOFF = 1.5;
static const double RTO_MAX = 0.02;   /* or twice the first */
static const double GRACE_MIN = 2e-4; /* for DATA that was overtaken; longer where some came late */
static const double GRACE_MAX = 0.02;

/* Time-outs grow by the square of n / CROWD, where n peers, more than that, have said nothing new
 * since something was repeated to them: they are slow then, not deaf, and every repetition slows
 * them more. But so many repetitions fit the time-out of peers at least. */
enum { CROWD = 4, REPETITIONS_LEAST = 8 };

struct lossynet_rejected { /* datagrams dropped on receipt, by the first thing found wrong */
    uint64_t truncated;    /* shorter than the header, or than it says */
    uint64_t foreign;      /* another magic or session, or from a stranger */
    uint64_t version;
    uint64_t corrupt;    /* checksum or authentication */
    uint64_t invalid;    /* type, worker, bucket, packet or length that cannot be */
    uint64_t late;       /* DATA of a phase, or a bucket, that is not open */
    uint64_t duplicate;  /* DATA, or anything encrypted, that came before */
    uint64_t not_finite; /* NaN or infinity, over links that lose datagrams */
};

struct lossynet_pacing {
    double rate, most;            /* bytes per second; 0: no limit */
    double burst, tokens, filled; /* token bucket; when it was filled */
    int batch;                    /* datagrams that leave at once, at most */
    double budget;                /* share of DATA that may be lost; 0: any */
    double expected, arrived;     /* since the rate last changed, ... */
    double stepped;               /* ... at this time */
    double clear;                 /* cumulative sum that grows while less is lost */
    double rise;                  /* power of the factor of a step up; 0: the last was none */
    double risen;                 /* when that changed */
};

struct lossynet_buckets { /* of the present phase of a kind, as received */
    uint32_t *missing;    /* [B][N]: packets for local workers that have not come */
    double *passed;       /* [B][N]: when a later bucket of that sender began to come */
    int *reached;         /* [N]: latest bucket seen, in the phase's order */
    int *checked;  /* [B]: of so many senders, from the first on, all is there that will be */
    uint8_t *over; /* [B]; atomic */
};

struct lossynet_phase_state { /* our present phase of a kind */
    uint32_t begun;           /* phases so far; the present one is begun - 1 */
    uint32_t opened;          /* for receiving */
    uint32_t closed;
    bool awaited; /* the caller waits for its end */
    bool reached; /* the caller has waited for something of it */
    double half;  /* when half of the ranks were done with it; 0: not yet */
    double closed_at;
    double seconds; /* that ends took to wait for, averaged */
    struct lossynet_buckets buckets;
};

struct lossynet_session { /* what all datagrams of a run have in common */
    uint64_t id;
    struct lossynet_secure *secure; /* NULL: not encrypted */
    uint8_t *sealed;                /* [LOSSYNET_BATCH][payload_most], with secure */
    size_t payload_most;            /* with the trailer */
    size_t fragment_bytes;          /* of a message, in one datagram */
    bool two_classes;               /* DATA has a class of its own */
    bool multicast;
    double peer_timeout;
    int window;       /* DATA that a peer may have on its way to us, at most */
    int credit_every; /* after so many a peer is given credit */
    bool told_window; /* a line has said that receive queues keep paths idle */
    uint64_t step;    /* the caller's, for lines of the log; atomic */
};

struct lossynet_sender {
    struct lossynet_datagram batch[LOSSYNET_BATCH];
    struct lossynet_span spans[LOSSYNET_BATCH];
    int first;           /* the peer to begin with */
    bool woken;          /* the caller has more to send; atomic */
    uint32_t group_sent; /* multicast: DATA so far */
    struct lossynet_tx group;
};

enum { LOSSYNET_MEETING, LOSSYNET_PULSE }; /* message rounds: all wait; late ranks are left out */

enum { LOSSYNET_KEPT_BYTES = 64 << 10 }; /* of our parts of a round, to all ranks together */

struct lossynet_rounds { /* of messages of a kind */
    uint32_t begun;
    uint32_t complete; /* here: we have everybody's part */
    bool open;         /* the caller waits, or our part is still to be acknowledged */
    bool keeps;        /* ours lies in `kept`: the caller need not wait for that */
    uint8_t *kept;     /* [LOSSYNET_KEPT_BYTES], of LOSSYNET_MEETING alone */
    double half;       /* when half of the ranks were done; 0: not yet */
};

struct lossynet_receiver {
    double now; /* of the datagrams being handled */
    double
        empty; /* when the link was last seen empty: a rank that was itself stopped must not blame
                     peers whose datagrams it has yet to read */
    double grace;    /* learnt from what came late, forgotten slowly */
    uint32_t nonces; /* PROBEs with a number, so far */
    int unanswered;  /* peers with live.repeated */
    int suspects;    /* peers with live.suspected */
    struct lossynet_rejected rejected;
    uint64_t ignored;    /* TEST datagrams */
    uint64_t stragglers; /* phases of peers that ended by deadline */
};

enum { LOSSYNET_DEADLINE_LAGS = 1024, LOSSYNET_DEADLINE_STEPS = 64 }; /* remembered, the last */

struct lossynet_present_step { /* of this rank */
    bool idle;                 /* it has no gradient in it */
    uint32_t opened;           /* GRADIENT phases, when it began */
    double asks_until;         /* the end of its questions (ask.c) */
};

struct lossynet_deadline {
    bool on;
    double fixed; /* s; 0: learnt */
    bool raised;  /* a line has said that it is too short */
    double wait;  /* s, learnt */
    double ended; /* when the last GRADIENT phase did */
    int late;     /* peers */
    struct lossynet_present_step present;
    bool late_comes;            /* gradients that are late come in the step after */
    uint32_t pulses, phases[2]; /* of a step */
    uint32_t lags, steps;
    float lag[LOSSYNET_DEADLINE_LAGS]; /* s, of peers, after the half-way rank */
    float largest[LOSSYNET_DEADLINE_STEPS], base[LOSSYNET_DEADLINE_STEPS]; /* s, by step */
};

struct lossynet_threads {
    bool threaded, stop, closing;
    double closing_since;
    int wanted; /* callers that want the lock; atomic */
    pthread_mutex_t lock, caller;
    pthread_cond_t handed_back;
    pthread_t thread;
};

/* What is counted of peers (agenda.c); where two follow each other, of each kind of phase or
 * round. */
enum lossynet_flag {
    LOSSYNET_RECEIVES,               /* its phase to us is not over */
    LOSSYNET_IS_DONE = 2,            /* it is, and it has a gradient */
    LOSSYNET_IN_TIME = 4,            /* it is not, and a peer on time, */
    LOSSYNET_LATE_FOR = 6,           /* or a late one, has yet to end it */
    LOSSYNET_SENDS = 8,              /* not all of ours has left to it */
    LOSSYNET_STUCK = 10,             /* nor can it, since the peer is late or away */
    LOSSYNET_UNCONFIRMED = 12,       /* DONE */
    LOSSYNET_LACKS = 14,             /* its part of a round has not come */
    LOSSYNET_EXCHANGES = 16,         /* or ours is not acknowledged, */
    LOSSYNET_EXCHANGES_IN_TIME = 18, /* by a peer on time, */
    LOSSYNET_EXCHANGES_LATE = 20,    /* or by a late one */
    LOSSYNET_IDLES = 22,             /* it has no gradient in this step */
    LOSSYNET_EXPECTED,               /* something is expected of it */
    LOSSYNET_BLOCKED,                /* by its window, or its phase */
    LOSSYNET_FLAGS
};

struct lossynet_agenda {
    int peers;
    int *heap, *place; /* [peers] by time; [R], where in it */
    double *due;       /* [R]: when to look at a peer again */
    uint32_t *flags;   /* [R], and how many peers have each: */
    int count[LOSSYNET_FLAGS];
    bool *sends;    /* [R]: DATA may leave to it, or must wait for it */
    double slowest; /* round trip to a peer that is waited for, s, or a little more */
};

struct lossynet_transport {
    struct lossynet_world world;
    struct lossynet_transport_shape shape;
    struct lossynet_transport_calls calls;
    struct lossynet_link *link;
    struct lossynet_session session;
    struct lossynet_peer *peers; /* [R] */
    struct lossynet_agenda agenda;
    struct lossynet_phase_state phase[2];
    struct lossynet_rounds rounds[LOSSYNET_ROUND_KINDS];
    struct lossynet_deadline deadline;
    struct lossynet_sender sender;
    struct lossynet_receiver receiver;
    struct lossynet_pacing pacing;
    struct lossynet_threads threads;
    lossynet_status failed;
};

static inline bool lossynet_is_group(const struct lossynet_transport *t, int kind) {
    return t->session.multicast && kind == LOSSYNET_PARAMETER;
}

/* ---- session.c: what every datagram goes through ---- */

/* Seals and sends up to LOSSYNET_BATCH datagrams with headers but for their checksum. */
void lossynet_session_send(struct lossynet_transport *t, int peer, struct lossynet_datagram *batch,
                           int n);
/* Verifies and decrypts a datagram: false, and counted, when no rank of this run has sent it. */
bool lossynet_session_verify(struct lossynet_transport *t, int peer, struct wire_header *h,
                             uint8_t *datagram, size_t bytes);
/* Says once that a peer made the transport fail. */
void lossynet_session_fail(struct lossynet_transport *t, int peer, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static inline uint64_t lossynet_session_step(const struct lossynet_transport *t) {
    return __atomic_load_n(&t->session.step, __ATOMIC_RELAXED);
}

/* ---- timer.c: repeating what was not answered ---- */

/* How many times longer than for few peers to wait before something is repeated. */
double lossynet_timer_slowness(const struct lossynet_transport *t);
/* A peer has said more than that it is there. */
void lossynet_timer_news(struct lossynet_transport *t, struct lossynet_peer *peer);
/* Whether it is time to send again, or for the first time, what a peer has not answered. */
bool lossynet_timer_is_over(const struct lossynet_transport *t, const struct lossynet_timer *timer,
                            double now);
/* It was sent: the next time is later. */
void lossynet_timer_again(struct lossynet_transport *t, struct lossynet_peer *peer,
                          struct lossynet_timer *timer, double now);
/* Both: whether to send now. */
bool lossynet_timer_is_due(struct lossynet_transport *t, struct lossynet_peer *peer,
                           struct lossynet_timer *timer, double now);
/* A peer has answered something after so many seconds. */
void lossynet_timer_measured(struct lossynet_round_trip *round_trip, double seconds);
/* Seconds after which something should have been answered; before the first repetition, which is
 * early, so that most losses do not cost a round trip; the longest between repetitions. */
double lossynet_timer_timeout(const struct lossynet_peer *peer);
double lossynet_timer_first(const struct lossynet_peer *peer);
double lossynet_timer_longest(const struct lossynet_peer *peer);
/* A datagram of a peer has come. */
void lossynet_timer_heard(struct lossynet_transport *t, int peer, int type);
/* Seconds since a peer of which something is expected was heard. */
double lossynet_timer_silence(const struct lossynet_transport *t, int peer);
/* The same for one that is asked for signs of life, also while nothing else is expected of it. */
double lossynet_timer_unanswered(const struct lossynet_transport *t, int peer);
/* Whether its host has refused a datagram for it since it was last heard. */
bool lossynet_timer_is_refused(const struct lossynet_transport *t, int peer);

/* When a timer may be over: never later, as far as is known, and looked at again if it is not. */
double lossynet_timer_due(const struct lossynet_transport *t, const struct lossynet_timer *timer,
                          double now);

static inline struct lossynet_timer lossynet_timer_at_once(void) {
    return (struct lossynet_timer){0, 0};
}

static inline struct lossynet_timer lossynet_timer_from(const struct lossynet_peer *peer,
                                                        double now) {
    return (struct lossynet_timer){now, lossynet_timer_first(peer)};
}

/* ---- agenda.c: which peers a turn looks at ---- */

/* False where there is no memory; closing is fine then, too. */
bool lossynet_agenda_open(struct lossynet_agenda *agenda, const struct lossynet_world *world);
void lossynet_agenda_close(struct lossynet_agenda *agenda);
size_t lossynet_agenda_memory(int ranks); /* bytes */
/* The next turn looks at a peer, since something of it has changed, ... */
void lossynet_agenda_soon(struct lossynet_transport *t, int peer);
/* ... or at all, since the caller has done something; counts them. */
void lossynet_agenda_all(struct lossynet_transport *t);
/* A peer to look at now, -1: none; whoever has looked sets when to look again. */
int lossynet_agenda_next(const struct lossynet_transport *t, double now);
void lossynet_agenda_set(struct lossynet_transport *t, int peer, double due);
double lossynet_agenda_due(const struct lossynet_transport *t); /* of the next */
/* Counts what is true of a peer now. */
void lossynet_agenda_count(struct lossynet_transport *t, int peer);

/* ---- pacing.c ---- */

void lossynet_pacing_open(struct lossynet_pacing *pacing, double gbps, double loss_budget);
/* Seconds to wait before `bytes` may leave; 0: they may, and count. */
double lossynet_pacing_wait(struct lossynet_pacing *pacing, size_t bytes);
/* So many of them did not leave. */
void lossynet_pacing_unused(struct lossynet_pacing *pacing, size_t bytes);
/* A peer's state: it has seen, or given up, `seen` of our DATA; `received` have come. */
void lossynet_pacing_report(struct lossynet_transport *t, int peer, uint32_t seen,
                            uint32_t received);
/* The next rate, when the share `lost` was lost at the present one. */
double lossynet_pacing_step(struct lossynet_pacing *pacing, double lost, double now);

/* ---- window.c ---- */

/* How much peers may have on their way to us: session.window. */
void lossynet_window_open(struct lossynet_transport *t);
/* A peer has told us the same. */
void lossynet_window_told(struct lossynet_transport *t, int peer, int most);
/* A peer's state: so many of our DATA have come there. */
void lossynet_window_report(struct lossynet_transport *t, int peer, uint32_t came);

/* ---- control.c: state, probes, the end of phases, leaving ---- */

struct lossynet_datagram lossynet_control_datagram(const struct lossynet_transport *t, int peer,
                                                   int type, int kind, uint32_t index,
                                                   uint32_t packet, const void *payload,
                                                   size_t bytes);
/* Sends one datagram with our state. */
void lossynet_control_send(struct lossynet_transport *t, int peer, int type, int kind,
                           uint32_t index, uint32_t packet);
/* When to tell a peer again that a phase is open, which has been told now; 0: never. Over a long
 * round trip its question would take too long, where the first was lost. */
double lossynet_control_tell(const struct lossynet_peer *peer, double now);
/* Sends to a peer what is due; returns when something will be. */
double lossynet_control_push(struct lossynet_transport *t, int peer, double now);
/* A datagram other than DATA and MESSAGE; false when it is malformed. What DONE and the ACK of a
 * message say is for recv.c and message.c. */
bool lossynet_control_receive(struct lossynet_transport *t, int peer, const struct wire_header *h,
                              const uint8_t *payload);
bool lossynet_control_busy(const struct lossynet_transport *t); /* repeats until answered */

/* ---- ask.c: acknowledgements of late ranks ---- */

/* Sending of the next GRADIENT phase is about to begin. */
void lossynet_ask_sending(struct lossynet_transport *t);
void lossynet_ask_receive(struct lossynet_transport *t, int peer, const struct wire_header *h);
void lossynet_ask_told(struct lossynet_transport *t, int peer, const struct wire_header *h,
                       const uint8_t *payload);
/* Returns when to look again. */
double lossynet_ask_push(struct lossynet_transport *t, int peer, double now);

/* ---- deadline.c: going on without late ranks ---- */

void lossynet_deadline_open(struct lossynet_deadline *deadline, bool on, double fixed);
/* Seconds that a rank waits for others after half of them are done; infinite at first. */
double lossynet_deadline_wait(const struct lossynet_transport *t);
/* Whether they are over, `half` being when half were done (0: not yet). */
bool lossynet_deadline_is_over(const struct lossynet_transport *t, double half);
/* Whether at most half of the ranks are late. */
static inline bool lossynet_deadline_is_minority(const struct lossynet_transport *t) {
    return 2 * t->deadline.late <= t->world.ranks;
}
/* Whether nothing waits for a peer any more: it is late, and at least half of the ranks are not. */
static inline bool lossynet_deadline_ignores(const struct lossynet_transport *t, int peer) {
    return t->peers[peer].lateness.late && lossynet_deadline_is_minority(t);
}
/* Whether a peer waits in a message round of kind LOSSYNET_MEETING that we have not begun: it sends
 * nothing of what it has not begun before. */
static inline bool lossynet_deadline_is_away(const struct lossynet_transport *t, int peer) {
    const uint32_t begun = t->rounds[LOSSYNET_MEETING].begun;
    return t->deadline.on && (int32_t)(t->peers[peer].control.meetings - begun) > 0;
}
/* Whether nothing waits for a peer in a phase: it is ignored, or away and has not sent it. */
static inline bool lossynet_deadline_excuses(const struct lossynet_transport *t, int peer,
                                             int kind) {
    const uint32_t finished = t->peers[peer].control.finished[kind];
    return lossynet_deadline_ignores(t, peer) ||
           (lossynet_deadline_is_away(t, peer) && (int32_t)(finished - t->phase[kind].opened) < 0);
}
/* Steps to which so many GRADIENT phases belong, the last not with all of its own. */
static inline uint32_t lossynet_deadline_steps(const struct lossynet_transport *t,
                                               uint32_t phases) {
    const uint32_t each = t->deadline.phases[LOSSYNET_GRADIENT];
    return (phases + each - 1) / each;
}
/* Whether the present GRADIENT phase is the first of its step. */
static inline bool lossynet_deadline_is_first(const struct lossynet_transport *t) {
    return (t->phase[LOSSYNET_GRADIENT].opened - 1) % t->deadline.phases[LOSSYNET_GRADIENT] == 0;
}
/* Says now and then that a peer is late. */
void lossynet_deadline_tell(const struct lossynet_transport *t, int peer);
/* We go on without a peer. */
void lossynet_deadline_late(struct lossynet_transport *t, int peer);
/* A peer has told its state: it may have caught up. */
void lossynet_deadline_told(struct lossynet_transport *t, int peer);
/* In each turn: ends what late peers hold up in a phase. */
void lossynet_deadline_check(struct lossynet_transport *t, int kind);
/* A GRADIENT phase has ended: learns from how late peers were. */
void lossynet_deadline_learn(struct lossynet_transport *t);
/* The deadline with the most progress per second; infinite while too little is known. */
double lossynet_deadline_best(const struct lossynet_deadline *deadline);

/* ---- message.c ---- */

/* Sends to a peer what is due of our message; returns when something will be. */
double lossynet_message_push(struct lossynet_transport *t, int peer, double now);
void lossynet_message_receive(struct lossynet_transport *t, int peer, const struct wire_header *h,
                              const uint8_t *payload);
void lossynet_message_acknowledge(struct lossynet_transport *t, int peer,
                                  const struct wire_header *h, const uint8_t *payload);
bool lossynet_message_awaits(const struct lossynet_transport *t, int peer);
/* Its part of the present round is here, and ours there, or it has gone on without. */
bool lossynet_message_is_exchanged(const struct lossynet_transport *t, int peer, int which);
/* Seconds since a peer that has begun this round sent something of what we lack of it; 0: we lack
 * nothing. A peer repeats it until we acknowledge it, unless it wrongly believes that we did. */
double lossynet_message_owed(const struct lossynet_transport *t, int peer);
/* Begins a round of a kind: the part for rank r is bytes out_offset[r] ... out_offset[r + 1], or of
 * this rank's where it is the same for all; in_offset: the parts from them. */
void lossynet_message_begin(struct lossynet_transport *t, int which, const uint8_t *out,
                            const size_t *out_offset, bool same, uint8_t *in,
                            const size_t *in_offset);
/* For lossynet_progress_until: all parts of the round of this kind have come, and ours have arrived
 * or are kept; but for those of late ranks in a LOSSYNET_PULSE. */
bool lossynet_message_exchanged(struct lossynet_transport *t, int which);
/* The same: what we kept of our parts has arrived, so that the next round may begin. */
bool lossynet_message_settled(struct lossynet_transport *t, int which);

/* ---- send.c ---- */

/* Sends a batch to each peer that can take one. True when something left; *wait: for pacing. */
bool lossynet_send_push(struct lossynet_transport *t, double *wait);
/* Nothing of this phase will follow: DONE says so. */
static inline void lossynet_send_complete(struct lossynet_tx *tx) {
    tx->complete = true;
    tx->done_waits = true;
    tx->done = lossynet_timer_at_once();
}
/* For lossynet_progress_until: all our packets of a phase have left. */
bool lossynet_send_all_left(struct lossynet_transport *t, int phase);

/* ---- recv.c ---- */

void lossynet_recv_data(struct lossynet_transport *t, int peer, const struct wire_header *h,
                        const uint8_t *payload);
void lossynet_recv_done(struct lossynet_transport *t, int peer, const struct wire_header *h);
/* Ends what of a peer will not end by itself, and gives up on the silent; returns when to look
 * again. */
double lossynet_recv_check(struct lossynet_transport *t, int peer);
/* Something of the awaited phases is missing from this peer. */
bool lossynet_recv_awaits(const struct lossynet_transport *t, int peer);
/* For lossynet_progress_until: all is there that will come of a phase, or of a bucket. */
bool lossynet_recv_phase_is_over(struct lossynet_transport *t, int phase);
bool lossynet_recv_gradient_is_over(struct lossynet_transport *t, int bucket);
bool lossynet_recv_parameter_is_over(struct lossynet_transport *t, int bucket);

/* ---- dispatch.c ---- */

/* Verifies one datagram and hands it to who handles it; the lock is held. */
void lossynet_dispatch(struct lossynet_transport *t, int peer, uint8_t *datagram, size_t bytes);

/* ---- progress.c ---- */

/* One turn; returns seconds until something is due, 0 when there may be more to do now. */
double lossynet_progress_turn(struct lossynet_transport *t);
/* Whether something is expected of a peer. */
bool lossynet_progress_expects(const struct lossynet_transport *t, int peer);
/* Sends to all peers what is due, but for DATA. */
void lossynet_progress_push(struct lossynet_transport *t, double now);
/* Takes the lock from the transport's thread, gives it back. */
void lossynet_progress_enter(struct lossynet_transport *t);
void lossynet_progress_leave(struct lossynet_transport *t);
/* Turns, with the lock held, until over(t, argument) or failure. */
lossynet_status lossynet_progress_until(struct lossynet_transport *t,
                                        bool (*over)(struct lossynet_transport *t, int argument),
                                        int argument);
lossynet_status lossynet_progress_start(struct lossynet_transport *t);
/* Takes leave of the peers and ends the thread. */
void lossynet_progress_stop(struct lossynet_transport *t);

#endif
