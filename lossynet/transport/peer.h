/* peer.h — what a rank remembers of each other rank.
 *
 *     live      whether it answers                        watched by progress.c
 *     round_trip                                          timer.c
 *     flow      datagrams on their way, in both directions   send.c, recv.c, window.c
 *     control   what it told of itself, and what we owe it    control.c
 *     tx, rx    the present phase of each kind             send.c, recv.c
 *     message   the present rounds of small messages        message.c
 *     lateness  whether we wait for it                      deadline.c
 *     question  what it has of our gradient                 ask.c
 */
#ifndef LOSSYNET_PEER_H
#define LOSSYNET_PEER_H

#include "lossynet/base/base.h"

enum {
    LOSSYNET_FRAGMENTS = 64,  /* of a message on their way to a peer */
    LOSSYNET_ROUND_KINDS = 2, /* of message rounds: WIRE_MESSAGES, WIRE_PULSES */
    LOSSYNET_REACH = 4,       /* windows; a sequence that is farther from the last cannot be */
};

struct lossynet_timer {
    double since, pause; /* due so long after; pause 0: the first time, which repeats nothing */
};

struct lossynet_round_trip { /* to it and back, of small messages: RFC 6298, section 2 */
    double mean, deviation;  /* s; 0: not known yet */
    double least;            /* s, of late: without queues */
};

struct lossynet_liveness {
    double heard;    /* any valid datagram */
    double expected; /* since then we have waited for something of it; 0: we do not */
    double asked;    /* since then it is asked for signs of life, be it for others' silence; or 0 */
    bool repeated;   /* something was, since it last said more than that it is there */
    bool left;       /* it said LEAVE, or ABORT */
    double aborted;  /* when it said ABORT, after which it said nothing else; 0: it has not */
    double refused;  /* when its host said that nobody is at its address; 0: never */
    bool suspected;  /* it has been silent for so long that all peers are asked */
    bool missed;     /* it was silent when a peer made the comm fail */
    bool knows;      /* that we leave */
    bool probe_sends; /* the probe asks for what lets us send */
    struct lossynet_timer probe;
};

struct lossynet_loss_report { /* what a peer told of our DATA, since the pace last changed */
    uint32_t from;            /* DATA before this were sent earlier */
    bool counting;
    uint32_t seen, received;
};

struct lossynet_window { /* DATA that may be on their way to it */
    int now, least, most;
    bool full;     /* it has held up DATA in the present sample, */
    double since;  /* which has begun then; 0: there is none */
    uint32_t came; /* DATA that had come there, then */
    double rate;   /* that come there per second, the most of late */
    int narrow;    /* samples in a row in which it was too small, at its largest */
};

struct lossynet_flow {
    struct lossynet_window window;
    bool blocked;                        /* DATA could not leave: window or phase */
    bool shut;                           /* since its phase is, ... */
    double shut_since;                   /* ... which it was not before */
    double credited;                     /* when credit last moved */
    uint32_t sent, credit, group_credit; /* DATA to it */
    uint32_t seen, group_seen;           /* sequences of its DATA: all before were seen */
    uint32_t unacknowledged;             /* its DATA for which no credit was given yet */
    uint32_t came;                       /* its DATA, since the start */
    uint32_t vanished;                   /* its DATA, announced since the last phase with any */
    uint32_t noticed[2];                 /* came, when its last phase of a kind ended */
    struct lossynet_loss_report report;
};

struct lossynet_control {
    uint32_t open[2], finished[2]; /* what it told of itself (wire.h) */
    uint32_t complete[LOSSYNET_ROUND_KINDS], meetings;
    double raised; /* when open or finished last grew */
    bool state_due, left_due, answer_due, ack_due[LOSSYNET_ROUND_KINDS];
    uint32_t echo;     /* nonce of the last PROBE from it */
    uint32_t answered; /* nonce of the last PROBE of ours that it answered */
};

struct lossynet_tx { /* our present phase of a kind to one peer */
    uint32_t sent;   /* DATA */
    bool complete;   /* all sent, or given up */
    bool refused;    /* given up, since the peer had closed the phase */
    bool done_waits; /* DONE is not acknowledged */
    struct lossynet_timer done;
};

enum lossynet_rx_state {
    RX_RECEIVING,
    RX_ENDING, /* all has been sent, and what has not come may be on its way */
    RX_OVER,   /* what has not come is lost */
};

struct lossynet_rx { /* one peer's present phase of a kind to us */
    enum lossynet_rx_state state;
    uint64_t received;
    bool done; /* DONE has come, and said that so many were sent: */
    uint32_t announced;
    double last;    /* DATA came */
    double ending;  /* since then RX_ENDING */
    double over;    /* when it became RX_OVER */
    uint32_t nonce; /* of the PROBE sent then: its answer comes after what was sent before */
    struct lossynet_timer probe;
    uint32_t given_up; /* the phase, from 1 on, that last ended without it since it was late */
    double tell;       /* when to tell it again that the phase is open; 0: never */
    bool idle;         /* it has no gradient in this phase, DONE has said */
    bool next_done;    /* DONE of the next phase came before we opened it: nothing was sent */
    bool next_idle;
    uint32_t next_announced;
};

struct lossynet_message { /* the present message round of a kind: ours to it, its to us */
    const uint8_t *out;
    uint8_t *in;
    size_t out_bytes, in_bytes;
    uint32_t fragments, acked_before, expects, got_before;
    uint64_t acked, got;                /* bit i: ..._before + i */
    double sent_at[LOSSYNET_FRAGMENTS]; /* by fragment modulo their number; 0: not yet */
    uint32_t in_round;                  /* it has begun so many message rounds */
    uint32_t stamp; /* of its last fragment, until an acknowledgement has returned it; 0: none */
    double moved;   /* when it last sent a fragment, or completed a round */
    struct lossynet_timer repeat; /* of the first kind, also of LEAVE */
};

struct lossynet_waiting { /* whether we wait for it (deadline.c) */
    bool late;            /* we went on without it, and it has not caught up */
    double since;         /* it is late, s */
    double told;          /* so many seconds late when a line last said so; 0: none did */
    uint32_t phase;  /* GRADIENT phases opened when it was late, until its lag is known; 0: it is */
    uint32_t step;   /* the same, as counted by lossynet_deadline_learn */
    double half;     /* when half of the ranks were done with that phase */
    uint64_t steps;  /* whose first GRADIENT phase we ended without it */
    uint32_t begun;  /* steps that it has begun, as it told first ... */
    double begun_at; /* ... at this time */
};

struct lossynet_question { /* what it has of ours, and we of its (ask.c) */
    bool open;             /* we ask, and it has answered `got` of so many bytes */
    uint8_t *to;
    size_t bytes, got;
    struct lossynet_timer repeat;
    uint32_t sent;  /* DATA of the step's GRADIENT phases before the present one, from us */
    uint32_t holds; /* GRADIENT phases, of whose last we have what it may ask for; 0: of none */
};

struct lossynet_peer {
    struct lossynet_liveness live;
    struct lossynet_round_trip round_trip;
    struct lossynet_flow flow;
    struct lossynet_control control;
    struct lossynet_tx tx[2];
    struct lossynet_rx rx[2];
    struct lossynet_message message[LOSSYNET_ROUND_KINDS];
    struct lossynet_waiting lateness;
    struct lossynet_question question;
};

#endif
