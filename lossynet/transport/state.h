/* state.h — the state of the transport, which the files of its two folders share.
 *
 *     caller's thread                      the transport's own thread
 *     send_begin, wake, end ...       -->  sends what is ready, receives, answers peers, while the
 *     wait_bucket, swap, gather            caller computes
 *            |                                       |
 *         phase.c, transport.c                       |
 *            +---> progress.c: a turn <--------------+   whichever holds the lock runs the turns;
 *                  dispatch.c                            the caller gets the lock first
 *                    |       |
 *     exchange/   message.c, deadline.c, ask.c: all ranks
 *     ---------------|---------------------------------------------------------------------
 *     peer/       send.c, recv.c: packets of a phase       one peer: nothing here calls
 *                 control.c, detour.c, path.c              exchange/
 *                 window.c, pacing.c, timer.c, agenda.c, needs.c
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
#ifndef LOSSYNET_STATE_H
#define LOSSYNET_STATE_H

#include "lossynet/crypto/crypto.h"
#include "lossynet/transport/state_peer.h"
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
    uint64_t *late;    /* [B]: DATA that came after their phase, since ln_transport_late */
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
    bool told_relay;  /* a line has said that a relay is used */
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
    double resumed;   /* the same, also after a short stop (progress.c) */
    double grace;     /* from GRACE_MIN on, learnt from late DATA, slowly forgotten (recv.c) */
    uint32_t nonces;  /* PROBEs sent with a number */
    int unanswered;   /* peers with live.repeated */
    int suspects;     /* peers with live.suspected */
    struct ln_rejected rejected;
    uint64_t stragglers; /* phases of peers that were ended by a deadline */
    struct ln_relayed relayed;
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

struct ln_team {               /* with several network.threads each has a transport and a link */
    struct ln_transport *next; /* the next thread's; NULL: this is the last */
    bool told, *first_told;    /* whether one has said why it failed; the first one's */
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
    struct ln_team team;
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
    LOSSYNET_SILENT,                 /* it did not answer ALONE questions (peer/detour.c) */
    LOSSYNET_BLOCKED,                /* DATA to it wait for its window, or for it to open a phase */
    LOSSYNET_FLAGS
};

struct ln_agenda {
    struct ln_pool pool; /* all memory that does not depend on the shape */
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

#endif
