/* engine.h — datagrams between ranks: one protocol over any link (link.h, wire.h).
 *
 *     caller's thread                      the engine's own thread
 *     reduce_begin, bucket_ready ...  -->  sends what is ready, receives, answers peers, while the
 *     reduce, bucket_wait, all_gather      caller computes
 *            |                                       |
 *            +------> engine_turn (engine.c) <-------+   whoever holds the lock turns the crank;
 *                      |        |       |                the caller goes before the thread
 *               stream_*.c reliable.c   link->send, link->receive
 *
 * DATA is sent once. It may leave when its bucket is ready, when the peer has opened the phase
 * (it tells in its state), and while at most a window of DATA is on its way to that peer: so no
 * receive queue overflows, whoever is slower, and nothing comes early. The window moves with
 * credit, which counts what the receiver saw or gave up; lost credit is asked for with PROBE.
 *
 * A phase with a peer is over when all that its DONE announced has arrived; or after DONE, or what
 * implies DONE, when a PROBE has been answered and nothing came for a moment (what was overtaken has
 * come then); or when it has been silent for longer than a deadline that adapts to the phases seen.
 * A bucket is over for a peer when it is complete, or a moment after later buckets of that peer
 * began to come: it is averaged, or computed with, while later ones are on their way.
 *
 * A peer that answers is waited for: every step needs one number from every rank (the norm of the
 * gradient), so that going on without it would gain nothing. A peer of which something is expected
 * and that is silent for peer_timeout is dead: the call returns LOSSYNET_LINK after one line.
 *
 * DATA may travel in another traffic class than the rest (`dscp`), whose queues are longer. What
 * counts on coming behind DATA travels in its class then: the answer to a question, and a PROBE that
 * says how much was sent.
 *
 * MPI makes no progress while the caller computes: over a reliable link there is no thread, nothing
 * is repeated and nothing times out.
 */
#ifndef LOSSYNET_ENGINE_H
#define LOSSYNET_ENGINE_H

#include "lossynet/internal.h"
#include "lossynet/secure.h"

#include <pthread.h>
#include <time.h>

static inline double lossynet_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

enum { LOSSYNET_FRAGMENTS = 64 }; /* of a message on their way to a peer */

static const double LOSSYNET_RETRY = 3e-4; /* before something unanswered is repeated, s, ... */
/* ... so many times longer each time: where 10% is lost, several losses in a row are common. */
static const double LOSSYNET_RETRY_MORE = 1.5;
static const double LOSSYNET_RETRY_MOST = 0.02;
static const double LOSSYNET_GRACE = 2e-4;      /* for DATA that was overtaken; longer where some */
static const double LOSSYNET_GRACE_MOST = 0.02; /* came late */

/* ... and by the square of n / LOSSYNET_FEW, where n peers, more than that, have said nothing new since
 * something was repeated to them: they are slow then, not deaf, and every repetition slows them more.
 * But so many times within the time-out of peers at least. */
enum { LOSSYNET_FEW = 4, LOSSYNET_RETRIES_LEAST = 8 };

struct lossynet_timer {
    double since, pause; /* due so long after; pause 0: the first time, which repeats nothing */
};

struct lossynet_outbound { /* our present phase of a kind to one peer */
    uint32_t sent;         /* DATA */
    bool complete;         /* all sent, or given up */
    bool done_waits;       /* DONE is not acknowledged */
    struct lossynet_timer done;
    int next; /* local worker whose turn it is */
};

struct lossynet_position { /* where sending stands, for (phase, peer, local worker) */
    int bucket;            /* in the phase's order */
    int receiver;          /* local to the peer */
    size_t packet;
};

struct lossynet_inbound { /* one peer's present phase of a kind to us */
    uint64_t received;
    uint32_t announced;
    bool told; /* it has announced */
    bool over;
    double last;       /* DATA came */
    double ended;      /* since then we know that all has been sent; 0: we do not */
    uint32_t question; /* asked then: its answer comes after what was sent before; 0: none */
    struct lossynet_timer ask;
    bool next_told; /* DONE of the next phase came before we opened it: nothing was sent */
    uint32_t next_announced;
};

struct lossynet_report { /* what a peer told of our DATA, since the pace last changed */
    uint32_t from;       /* DATA before this were sent earlier */
    bool counting;
    uint32_t seen, received;
};

struct lossynet_pace {
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

struct lossynet_peer {
    int window;      /* DATA that may be on their way to it */
    double heard;    /* any valid datagram */
    bool repeated;   /* something was, since it last said more than that it is there */
    double expected; /* since then we have waited for something of it; 0: we do not */
    double credited; /* when credit last moved */
    struct lossynet_timer probe;
    bool probe_sends; /* it asks for what lets us send */
    bool left;        /* it said LEAVE or ABORT */
    bool knows;       /* that we leave */
    bool blocked;     /* DATA could not leave: window or phase */
    bool state_due, left_due, answer_due;
    uint32_t echo, answered; /* number of the last PROBE from it, and of ours that it answered */

    uint32_t open[2], finished[2], messages; /* what it told of itself (wire.h) */
    uint32_t sent, credit, group_credit;     /* DATA to it */
    uint32_t seen, group_seen;               /* sequences of its DATA: all before were seen */
    uint32_t unsaid;                         /* DATA not yet credited */
    uint32_t came;                           /* its DATA, since the start */
    struct lossynet_report report;

    struct lossynet_outbound to[2];
    struct lossynet_inbound from[2];

    /* The present message round: ours to it, its to us. */
    const uint8_t *out;
    uint8_t *in;
    size_t out_bytes, in_bytes;
    uint32_t fragments, acked_before, expects, got_before;
    uint64_t acked, got;                /* bit i: ..._before + i */
    double sent_at[LOSSYNET_FRAGMENTS]; /* by fragment modulo their number; 0: not yet */
    uint32_t in_round;                  /* it has begun so many message rounds */
    bool ack_due;
    struct lossynet_timer message;
};

struct lossynet_sending { /* our present phase of a kind */
    float *const *vectors;
    uint32_t begun;  /* phases so far; the present one is begun - 1 */
    uint32_t opened; /* for receiving */
    uint32_t closed;
    bool awaited; /* the caller waits for its end */
    int *ready;   /* [V]: buckets that may leave, in the phase's order; atomic */
    struct lossynet_position *position; /* [R][V] */
    double closed_at;
    double seconds; /* that ends took to wait for, averaged */
};

struct lossynet_elsewhere { /* a local worker's gradients, in a device's memory */
    const float *vector;    /* what phases are given instead; NULL: nothing is elsewhere */
    const float *there;
};

struct lossynet_kept { /* tests: a datagram that is overtaken */
    uint8_t *bytes;
    size_t count;
    int peer;
};

struct lossynet_engine {
    struct lossynet_peer *peers; /* [R] */
    struct lossynet_sending phase[2];
    uint64_t run;
    double peer_timeout;
    lossynet_status failed;
    double now;       /* of the datagrams being handled */
    double grace;     /* learnt from what came late, forgotten slowly */
    uint64_t ignored; /* TEST datagrams */
    double empty;     /* when the link was last seen empty: a rank that was itself stopped must not
                     blame peers whose datagrams it has yet to read */

    /* By kind and (bucket, sender). */
    uint32_t *missing[2];    /* [B][N]: packets for local workers that have not come */
    double *passed[2];       /* [B][N]: when a later bucket of that sender began to come */
    int *reached[2];         /* [N]: latest bucket seen, in the phase's order */
    uint8_t *bucket_over[2]; /* [B]; atomic */

    /* Multicast. */
    bool multicast;
    uint32_t group_sent;
    struct lossynet_outbound group;
    struct lossynet_position *group_position; /* [V] */

    /* Messages. */
    uint32_t rounds;   /* begun */
    uint32_t complete; /* here: we have everybody's part */
    bool messaging;
    size_t fragment_bytes;

    /* Sending. */
    int window;         /* DATA that a peer may have on its way to us */
    uint32_t questions; /* PROBEs with a number, so far */
    bool two_classes;   /* DATA has a class of its own */
    struct lossynet_datagram batch[LOSSYNET_BATCH];
    struct lossynet_secure *secure;
    uint8_t *sealed;   /* [LOSSYNET_BATCH][payload_most], with secure */
    uint16_t *rounded; /* [LOSSYNET_BATCH][packet_elements], payloads, where these are bfloat16 */
    struct lossynet_elsewhere *elsewhere; /* [V] */
    size_t payload_most;
    struct lossynet_pace pace;
    int first;      /* distance of the peer to begin with */
    int unanswered; /* peers with `repeated` */

    struct lossynet_kept kept;

    /* Threads. */
    bool threaded, stop, closing;
    double closing_since;
    int wanted; /* callers that want the lock; atomic */
    pthread_mutex_t lock, caller;
    pthread_cond_t handed_back;
    pthread_t thread;
};

/* The caller's step, for messages to people: it changes while the engine's thread looks. */
static inline uint64_t lossynet_engine_step(const struct lossynet *net) {
    return __atomic_load_n(&net->step, __ATOMIC_RELAXED);
}

/* ---- engine.c ---- */

/* Opens the link and introduces the ranks to each other. Collective. */
lossynet_status lossynet_engine_open(struct lossynet *net, const struct lossynet_settings *settings,
                                     lossynet_link_open link_open, lossynet_share share,
                                     void *share_context);
/* Starts the thread, when all that it touches is there. */
lossynet_status lossynet_engine_start(struct lossynet *net);
void lossynet_engine_close(struct lossynet *net); /* says LEAVE, or ABORT after a failure */

/* Allocates what the engine needs of net's layout, after the link is open. */
void lossynet_engine_take(struct lossynet *net, bool multicast);

/* Takes the lock from the engine's thread, gives it back. */
void lossynet_engine_enter(struct lossynet *net);
void lossynet_engine_leave(struct lossynet *net);

/* Turns the crank, with the lock held, until over(net, argument) or failure. */
lossynet_status lossynet_engine_until(struct lossynet *net,
                                      bool (*over)(struct lossynet *net, int argument),
                                      int argument);

/* Seals and sends up to LOSSYNET_BATCH datagrams with headers but for their checksum. */
void lossynet_engine_send(struct lossynet *net, int peer, struct lossynet_datagram *batch, int n);

/* Says once that a peer made the net fail. */
void lossynet_engine_fail(struct lossynet *net, int peer, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Seconds since a peer of which something is expected was heard. */
static inline double lossynet_engine_silence(const struct lossynet_engine *engine, int peer) {
    const struct lossynet_peer *p = &engine->peers[peer];
    double since = p->heard > p->expected ? p->heard : p->expected;
    return p->expected > 0 ? engine->empty - since : 0;
}

/* For tests: says of every datagram that arrives how often it is seen; -1: once, after the next. */
extern int (*lossynet_arrival_hook)(int rank, int peer, const uint8_t *datagram, size_t bytes);

/* Judges and handles one datagram; the lock is held. */
void lossynet_engine_receive(struct lossynet *net, int peer, uint8_t *datagram, size_t bytes);

/* One turn; returns seconds until something is due, 0 when there may be more to do now. */
double lossynet_engine_turn(struct lossynet *net);

/* How many times longer than for few peers to wait before something is repeated. */
static inline double lossynet_engine_slowness(const struct lossynet_engine *engine) {
    double crowd = (double)engine->unanswered / LOSSYNET_FEW;
    return crowd > 1 ? crowd * crowd : 1;
}

/* A peer has said more than that it is there. */
static inline void lossynet_engine_news(struct lossynet_engine *engine,
                                        struct lossynet_peer *peer) {
    engine->unanswered -= peer->repeated;
    peer->repeated = false;
}

static inline struct lossynet_timer lossynet_timer_at_once(void) {
    return (struct lossynet_timer){0, 0};
}

static inline struct lossynet_timer lossynet_timer_from(double now) {
    return (struct lossynet_timer){now, LOSSYNET_RETRY};
}

/* Whether to send now, for the first time or again, what a peer has not answered. */
bool lossynet_timer_is_due(struct lossynet_engine *engine, struct lossynet_peer *peer,
                           struct lossynet_timer *t, double now);

/* ---- pace.c ---- */

void lossynet_pace_open(struct lossynet_engine *engine, const struct lossynet_settings *settings);
/* Seconds to wait before `bytes` may leave; 0: they may, and count. */
double lossynet_pace_wait(struct lossynet_engine *engine, size_t bytes);
/* So many of them did not leave. */
void lossynet_pace_unused(struct lossynet_engine *engine, size_t bytes);
/* A peer's state: it has seen, or given up, `seen` of our DATA; `received` have come. */
void lossynet_pace_report(struct lossynet *net, int peer, uint32_t seen, uint32_t received);
/* The next rate, when the share `lost` was lost at the present one. */
double lossynet_pace_step(struct lossynet_pace *pace, double lost, double now);

/* ---- stream_send.c ---- */

/* Opens phase `kind` for sending; nothing leaves before `ready` says so. */
void lossynet_stream_begin(struct lossynet *net, int kind, float *const *vectors, bool lossless);
/* All buckets of all local workers may leave. */
void lossynet_stream_ready(struct lossynet *net, int kind);
/* Sends a batch to each peer that can take one. True when something left; *wait: for pacing. */
bool lossynet_stream_push(struct lossynet *net, double *wait);

/* ---- stream_receive.c ---- */

/* Opens the next phase of this kind for receiving, and tells the peers. */
void lossynet_stream_open(struct lossynet *net, int kind, bool lossless);
/* Waits until all peers' phases are over and all of ours have left; closes it. */
lossynet_status lossynet_stream_end(struct lossynet *net, int kind);
/* The same for what peers send of one bucket; ours need not have left. */
lossynet_status lossynet_stream_bucket(struct lossynet *net, int kind, int bucket);
/* Waits until all our parameters have left. */
lossynet_status lossynet_stream_drain(struct lossynet *net);

void lossynet_stream_receive(struct lossynet *net, int peer, const struct wire_header *h,
                             const uint8_t *payload);
void lossynet_stream_done(struct lossynet *net, int peer, const struct wire_header *h);
/* Ends what will not end by itself; gives up on the silent. */
void lossynet_stream_judge(struct lossynet *net);
/* Something of the awaited phases is missing from this peer. */
bool lossynet_stream_awaits(const struct lossynet *net, int peer);

/* ---- reliable.c ---- */

/* Every rank gives each other rank some bytes and gets some: out[r], in[r] (pointers into caller's
 * memory; the rank's own are ignored). Collective; all arrives. */
lossynet_status lossynet_swap(struct lossynet *net, const void *out, const size_t *out_offset,
                              void *in, const size_t *in_offset);
/* In place: rank r's part of `data` is bytes offset[r] ... offset[r + 1]. */
lossynet_status lossynet_gather(struct lossynet *net, void *data, const size_t *offset);

/* A datagram other than DATA. */
void lossynet_reliable_receive(struct lossynet *net, int peer, const struct wire_header *h,
                               const uint8_t *payload);
void lossynet_reliable_tell(struct lossynet *net, int peer, int type, int kind, uint32_t index,
                            uint32_t packet);
/* Sends what is due. */
void lossynet_reliable_push(struct lossynet *net, double now);
bool lossynet_reliable_awaits(const struct lossynet *net, int peer);
bool lossynet_reliable_busy(const struct lossynet *net); /* something is repeated until answered */

#endif
