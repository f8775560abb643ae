/* state_peer.h — the state that a rank keeps for each peer, that is, for each other rank.
 *
 *     live        whether the peer answers                           progress.c
 *     round_trip  the time to the peer and back                      timer.c
 *     flow        datagrams on their way, in both directions         send.c, recv.c, window.c
 *     control     the counts that it told us, and the answers that   control.c
 *                 we must send it
 *     tx, rx      the present phase of each kind, ours and its       send.c, recv.c
 *     message     the present rounds of small messages               message.c
 *     lateness    whether we wait for it                             deadline.c
 *     doubt       whether large datagrams still pass to it           path.c
 *     detour      by which way our datagrams go to it                detour.c
 *     question    its acknowledgement of our gradient                ask.c
 *
 * In the comments "it" is the peer, and times without a unit are those of ln_now.
 */
#ifndef LOSSYNET_STATE_PEER_H
#define LOSSYNET_STATE_PEER_H

#include "lossynet/base/base.h"

enum {
    LOSSYNET_FRAGMENTS = 64,   /* most fragments of a message on their way to a peer */
    LOSSYNET_GATHER_KINDS = 2, /* kinds of gathers: WIRE_MESSAGES, WIRE_PULSES */
    LOSSYNET_QUESTIONS = 32,   /* about ways, that are remembered: a long path holds many */
    LOSSYNET_ANSWERS = 4,      /* to such questions, that wait: one for each way */
    LOSSYNET_REACH = 4, /* windows; a sequence farther than this from the last one is invalid */
};

struct ln_timer {        /* due `pause` seconds after `since` */
    double since, pause; /* seconds; pause 0: nothing has been sent yet */
};

struct ln_round_trip {      /* of small messages (RFC 6298, section 2) */
    double mean, deviation; /* seconds; 0: not known yet */
    double least;           /* seconds; the recent minimum, which is without queues */
};

struct ln_elsewhere { /* it waits in a gather that we have not begun, or in another one than we */
    double since;     /* 0: it does not */
    bool misfits;     /* its part of our gather has another length */
};

struct ln_liveness {
    double heard;     /* when its last valid datagram came */
    double expected;  /* since when we need something of it; 0: we need nothing */
    double asked;     /* since when we ask it for signs of life; 0: we do not */
    bool repeated;    /* we repeated something to it, and it has not said anything new since */
    bool left;        /* it sent a LEAVE or an ABORT that we believe */
    double leaving;   /* when it first sent LEAVE, if nothing denied that later; 0: it did not */
    double aborted;   /* when it first sent ABORT, if nothing else came later; 0: it did not */
    int misses;       /* 1 + the rank that it does not hear, as its ABORT says; 0: none */
    double refused;   /* when its host last refused a datagram for its address; 0: never */
    bool suspected;   /* it has been silent for so long that we ask all peers */
    bool missed;      /* it was silent when a peer made the comm fail */
    bool knows;       /* it knows that we leave */
    bool probe_sends; /* our PROBE asks for what lets us send: credit, or an open phase */
    struct ln_timer probe;
    struct ln_elsewhere elsewhere;
};

struct ln_loss_report { /* counts of our DATA, as it told them since the pace last changed */
    uint32_t from;      /* so many DATA were sent before that, at another pace */
    bool counting;
    uint32_t seen, received;
};

struct ln_window { /* how many DATA may be on their way to it */
    int now, least, most;
    bool full;     /* the window has held up DATA in the present sample */
    double since;  /* when the present sample began; 0: there is none */
    uint32_t came; /* DATA that had arrived there when the sample began */
    double rate;   /* DATA that arrive there per second, a recent maximum */
    int narrow;    /* samples in a row in which the largest window was too small */
};

struct ln_flow {
    struct ln_window window;
    bool blocked;            /* DATA could not leave: no window, or no open phase */
    bool shut;               /* DATA could not leave: it had not opened the phase */
    double shut_since;       /* when `shut` was last false */
    double credited;         /* when credit last grew, or we sent after a pause */
    uint32_t sent, credit;   /* of our DATA to it */
    uint32_t seen;           /* we have seen, or given up, all its DATA before this */
    uint32_t unacknowledged; /* its DATA for which we have not given credit yet */
    uint32_t came;           /* its DATA that arrived, since the start */
    struct ln_loss_report report;
};

struct ln_control {
    uint32_t open[2], finished[2]; /* from its state (wire.h) */
    uint32_t complete[LOSSYNET_GATHER_KINDS], gathers;
    double raised; /* when open or finished last grew */
    bool state_due, left_due, answer_due, ack_due[LOSSYNET_GATHER_KINDS];
    uint32_t echo;     /* nonce of the last PROBE from it */
    uint32_t answered; /* nonce of the last PROBE of ours that it answered */
};

struct ln_tx {       /* our present phase of a kind to it */
    uint32_t sent;   /* DATA */
    bool complete;   /* we have sent everything, or given up */
    bool refused;    /* we have given up, since the peer had closed the phase */
    bool done_waits; /* our DONE has to be sent, or is not acknowledged */
    struct ln_timer done;
};

enum ln_rx_state {
    RX_RECEIVING,
    RX_ENDING, /* it has sent everything, and missing packets may still be on their way */
    RX_OVER,   /* missing packets are lost */
};

struct ln_rx { /* its present phase of a kind to us */
    enum ln_rx_state state;
    uint64_t received;  /* DATA */
    bool done;          /* its DONE has come */
    uint32_t announced; /* how many DATA it sent, as its DONE says */
    double last;        /* when DATA last came */
    double ending;      /* when the state became RX_ENDING */
    double over;        /* when the state became RX_OVER */
    uint32_t nonce;     /* of the PROBE sent at `ending`; its answer comes after all its DATA */
    struct ln_timer probe;
    uint32_t given_up; /* the last phase, counted from 1, that we ended without it; 0: none */
    double tell;       /* when to tell it again that the phase is open; 0: never */
    bool idle;         /* its DONE said that it has no gradient in this phase */
    bool next_done;    /* DONE of the next phase came before we opened it: nothing was sent */
    bool next_idle;
    uint32_t next_announced;
};

struct ln_message { /* the present gather of a kind: our part for it, its for us */
    const uint8_t *out;
    uint8_t *in;
    size_t out_bytes, in_bytes;
    uint32_t fragments, acked_before, expects, got_before; /* fragments of `out`, then of `in` */
    uint64_t acked, got;                /* bit i stands for fragment ..._before + i */
    double sent_at[LOSSYNET_FRAGMENTS]; /* by fragment modulo LOSSYNET_FRAGMENTS; 0: not yet */
    uint32_t in_gather;                 /* gathers that it has begun */
    uint32_t stamp;         /* of its last fragment, until an acknowledgement returns it; 0: none */
    double moved;           /* when a new fragment of it last came, or it completed a gather */
    struct ln_timer repeat; /* in the first kind of gather, also for LEAVE */
};

struct ln_waiting {  /* whether we wait for it (deadline.c) */
    bool late;       /* we went on without it, and it has not caught up */
    double since;    /* when it became late */
    double told;     /* how late it was when a line last said so, in seconds; 0: none did */
    uint32_t phase;  /* GRADIENT phases opened when it was late, while its lag is unknown; else 0 */
    uint32_t step;   /* the step of that phase, as ln_deadline_learn counts steps */
    double half;     /* when half of the ranks were done with that phase */
    uint64_t steps;  /* steps whose first GRADIENT phase we ended without it */
    uint32_t begun;  /* steps that it has begun */
    double begun_at; /* when we first heard this number */
};

struct ln_question { /* acknowledgements that we ask it for, or it asks us for (ask.c) */
    bool open;       /* we are asking it */
    uint8_t *to;
    size_t bytes, got; /* bytes that we ask for, and bytes that it has answered */
    struct ln_timer repeat;
    uint32_t sent;  /* our DATA to it in the step's GRADIENT phases before the present one */
    uint32_t holds; /* we have an acknowledgement for this GRADIENT phase, from 1 on; 0: for none */
};

struct ln_doubt { /* whether datagrams of full size still pass to it (path.c) */
    size_t bytes; /* payload of datagrams that may not pass; 0: we do not doubt */
    bool data;    /* that is because of DATA, and not because of a message */
    double waits[LOSSYNET_GATHER_KINDS]; /* since when a large fragment waits; 0: none does */
    uint32_t came, sent; /* at the begin of a sample: its count of our DATA, and our count */
    bool sampled;        /* a sample has left; it may still be on its way */
    double since;        /* when it had left */
    uint32_t vanished;   /* DATA in a row of which none came, when the doubt began; 0: some came */
    bool told;           /* a line has said that DATA do not come */
    uint32_t first;      /* nonce of the first PROBE; 0: none has left */
    bool padded;         /* the last PROBE was padded */
    int answers;         /* to small PROBEs */
    double due;          /* when the next PROBE leaves */
    double trusted;      /* until when we do not doubt again */
};

enum { WAY_DIRECT, WAY_OTHER_PATH, WAY_BY }; /* WAY_BY + r: by way of rank r */

struct ln_way_question {
    uint32_t number; /* 0: none, or answered */
    int way;
};

struct ln_detour { /* by which way our datagrams go to it (detour.c) */
    int way;       /* the present one */
    int candidate; /* another one that is tried */
    struct ln_way_question to_answer[LOSSYNET_ANSWERS]; /* its last one on each way */
    bool returns;                                       /* the direct way is being tried again */
    double since;       /* since when we wait for an answer; 0: we do not */
    double wait;        /* seconds of that before we ask */
    double due;         /* when the next question leaves */
    double back;        /* when the direct way is tried again */
    int asked[2];       /* questions on the present way, on the other one */
    int answered;       /* of the latter */
    int silent;         /* questions on the other one since its last answer */
    uint32_t questions; /* since the start */
    struct ln_way_question question[LOSSYNET_QUESTIONS];
};

struct ln_peer {
    struct ln_liveness live;
    struct ln_round_trip round_trip;
    struct ln_flow flow;
    struct ln_control control;
    struct ln_tx tx[2];
    struct ln_rx rx[2];
    struct ln_message message[LOSSYNET_GATHER_KINDS];
    struct ln_waiting lateness;
    struct ln_question question;
    struct ln_doubt doubt;
    struct ln_detour detour;
};

#endif
