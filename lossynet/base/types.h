/* types.h — the types that users of the library and its layers both name.
 *
 * lossynet.h includes it, and it includes nothing of the library, so that a layer below the public
 * interface need not know that interface.
 */
#ifndef LOSSYNET_TYPES_H
#define LOSSYNET_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
    LOSSYNET_OK = 0,
    LOSSYNET_INVALID, /* an argument or setting makes no sense */
    LOSSYNET_NO_MEMORY,
    LOSSYNET_LINK,     /* the link failed: a peer died, MPI reported an error */
    LOSSYNET_PROTOCOL, /* a datagram that no version of this program sends */
    LOSSYNET_FILE,     /* a trace file could not be read */
} lossynet_status;

struct lossynet_world;

/* An in-place all-gather of `bytes` per rank at start-up: each rank comes with its own part of
 * `all` filled in. Collective. Returns a status after logging one line. */
typedef lossynet_status (*lossynet_share)(void *context, const struct lossynet_world *world,
                                          void *all, size_t bytes);

struct lossynet_world {
    int rank, ranks;
    int local_rank, local_ranks; /* among the ranks on this host */
    /* How the ranks tell each other what they need to know before they can exchange packets, and
     * what it is called with. NULL: by MPI. A launcher that has another way sets it. */
    lossynet_share share;
    void *share_context;
};

/* Takes one message, without a newline. May be called from any thread. */
typedef void (*lossynet_log_function)(void *context, const char *message);

typedef enum { LOSSYNET_GRADIENT, LOSSYNET_PARAMETER } lossynet_phase;

/* Elements of a packet; partition/elements.c has the formats. */
typedef enum {
    LOSSYNET_FLOAT32,
    LOSSYNET_BF16, /* rounded to nearest: half the bytes */
    LOSSYNET_INT8, /* blocks of 32 with a scale: gradients rounded at random, parameters to nearest:
                      0.26 of the bytes */
    LOSSYNET_INT4, /* the same of 4 bits for gradients, 0.13 of the bytes; parameters as int8 */
} lossynet_wire_dtype;

typedef enum {
    LOSSYNET_LINK_AUTO,  /* verbs where every rank has an active RDMA port, else udp */
    LOSSYNET_LINK_MPI,   /* reliable */
    LOSSYNET_LINK_UDP,   /* datagrams of the operating system */
    LOSSYNET_LINK_VERBS, /* datagrams of RDMA hardware: unreliable-datagram queue pairs */
} lossynet_link_kind;

enum {
    LOSSYNET_HEADER_BYTES = 28, /* before every packet's payload; base/wire.h draws it */
    LOSSYNET_SECURE_BYTES = 24, /* behind it, where datagrams are encrypted; crypto/crypto.h */
};

struct lossynet_device_memory { /* where network hardware finds a device's memory */
    int dmabuf;    /* a file descriptor of the dma-buf that contains it, closed by the caller
                      when registered; -1: the memory's address is all there is */
    size_t offset; /* in dmabuf */
};

/* Loss that is injected at the sender, in memory and on every link. */
struct lossynet_loss_settings {
    double rate[2];    /* by phase, in [0, 1] */
    const char *model; /* "bernoulli": independent packets.
                          "burst:MEAN": Gilbert-Elliott, a chain per directed link that goes on from
                              step to step; lost packets come in runs of mean length MEAN >= 1, for
                              rates up to MEAN / (MEAN + 1), and 1.
                          "outage:MEAN": a directed link is down for whole steps, in both phases,
                              for MEAN >= 1 steps on average; rates as for bursts.
                          "trace:FILE": FILE holds characters 0 (arrives) and 1 (lost), white space
                              and lines from # ignored; each directed link reads it in a circle from
                              a place of its own; `rate` is ignored, except that a phase with rate 0
                              loses nothing.
                          "replay:FILE": the packets of a recorded run (record_loss), in one
                              process. */
    uint64_t seed;
    const char *at; /* links with another rate, in both phases: "3=0.5" those from and to worker 3,
                       "2-5=1" the one from 2 to 5, several with commas, of which the last that
                       names a link counts. Not with "trace". NULL or "none": none */
    int workers;    /* for `at`; lossynet_open knows them */
};

enum lossynet_event {                     /* datagrams that count as not arrived, and phases */
                      LOSSYNET_LATE,      /* DATA that came after the phase had ended */
                      LOSSYNET_DUPLICATE, /* came again */
                      LOSSYNET_REJECTED,  /* of strangers, damaged, or not finite */
                      LOSSYNET_OVERRUN,   /* dropped because a rank's receive queue was full */
                      LOSSYNET_STRAGGLER, /* phases of a peer that were ended by the deadline */
                      LOSSYNET_PACE, /* no event: kbit/s that all ranks may send; 0: no limit */
                      LOSSYNET_EVENTS
};

struct lossynet_part { /* what a worker does in a step */
    bool takes_part;   /* false: it leaves the step out */
    bool computes;     /* it has a gradient */
    double norm, lead; /* that its update uses, in a replay */
};

struct lossynet_path {      /* from one rank to another */
    uint64_t sent, arrived; /* datagrams of full size */
    double gbps;            /* 10^9 bit/s that arrived, our header counted */
};

#endif
