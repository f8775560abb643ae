/* types.h — the types that both the users of the library and its layers need.
 *
 * lossynet.h includes this file, and this file includes nothing of the library. So a layer below
 * the public interface need not know that interface.
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
    LOSSYNET_LINK,      /* the link failed: a peer died, MPI reported an error */
    LOSSYNET_PROTOCOL,  /* a datagram that no version of this program sends */
    LOSSYNET_FILE,      /* a trace file could not be read */
    LOSSYNET_ELSEWHERE, /* another rank waits in another collective call */
} lossynet_status;

struct lossynet_world;

/* Gathers `bytes` bytes of every rank in place at start-up. Each rank has filled in its own part of
 * `all`. Collective. On failure it logs one line and returns a status. */
typedef lossynet_status (*lossynet_share)(void *context, const struct lossynet_world *world,
                                          void *all, size_t bytes);

struct lossynet_world {
    int rank, ranks;
    int local_rank, local_ranks; /* among the ranks on this host */
    /* The function by which ranks exchange what they need before they can send packets, and its
     * context. NULL: use MPI. A launcher that has another way sets it. */
    lossynet_share share;
    void *share_context;
};

/* Takes one message, without a newline. May be called from any thread. */
typedef void (*lossynet_log_function)(void *context, const char *message);

typedef enum { LOSSYNET_GRADIENT, LOSSYNET_PARAMETER } lossynet_phase;

/* The elements of a packet. partition/elements.c describes the formats. */
typedef enum {
    LOSSYNET_FLOAT32,
    LOSSYNET_BF16, /* rounded to nearest: half the bytes */
    LOSSYNET_INT8, /* blocks of 32 with a scale: gradients rounded at random, parameters to nearest:
                      0.26 of the bytes */
    LOSSYNET_INT6, /* gradients: the same with 6 bits, 0.20 of the bytes; parameters: as INT8 */
    LOSSYNET_INT4, /* gradients: with 4 bits, 0.13 of the bytes; parameters: as INT8 */
} lossynet_wire_dtype;

typedef enum {
    LOSSYNET_LINK_AUTO,  /* verbs where every rank has an active RDMA port, else udp */
    LOSSYNET_LINK_MPI,   /* reliable */
    LOSSYNET_LINK_UDP,   /* datagrams of the operating system */
    LOSSYNET_LINK_VERBS, /* datagrams of RDMA hardware: unreliable-datagram queue pairs */
} lossynet_link_kind;

/* How ranks use links udp and verbs. All zero is fine. Over link mpi, and with one rank, it has no
 * effect. */
struct lossynet_network {
    const char *interface; /* udp: network interface; NULL: loopback if all ranks are on one host,
                              else that of the default route. verbs: device[:port[:GID index]], or
                              several for the ranks of a host; NULL: the first active port */
    int ports[2];          /* udp: the first and the last port that a rank may take; 0, 0: any */
    double pace_gbps;      /* a rank sends at most so many 10^9 bit/s; 0: no limit */
    double loss_budget;    /* a rank sends slower while the network loses more than this share, < 1;
                              needs pace_gbps. 0: it does not slow down */
    double peer_timeout;   /* seconds of silence after which a rank counts as dead; 0 means 10 */
    /* Steps do not wait for late ranks (transport/exchange/deadline.c). A phase ends `deadline` seconds after
     * half of the ranks were done; 0: the deadline is learnt. Between one
     * lossynet_step_begin_with_majority and the next call lossynet_reduce, lossynet_pulse and
     * lossynet_broadcast once each. */
    bool skip_late;
    double deadline;
    bool encrypt; /* datagrams are encrypted and authenticated (crypto.h) */
    /* With encrypt: a file with a secret that all ranks share, 16 to 4,096 bytes. NULL: the channel
     * over which ranks meet is trusted. */
    const char *key_file;
    int dscp; /* traffic class of DATA, 0 ... 63 (RFC 2474); 0: the default, as control messages */
    /* Threads that send and receive, up to LOSSYNET_LINK_THREADS, the same number on all ranks; 0 means 1. Each
     * has a socket or queue pair of its own, and takes every so many-th packet. More than 1: not with skip_late */
    int threads;
};

enum { LOSSYNET_LINK_THREADS = 64 };

enum {
    LOSSYNET_HEADER_BYTES = 28, /* before every packet's payload; base/wire.h draws it */
    LOSSYNET_SECURE_BYTES = 24, /* after the payload of an encrypted datagram; crypto/crypto.h */
};

/* Loss that the sender injects, in memory and on every link. */
struct lossynet_loss_settings {
    double rate[2];    /* by phase, in [0, 1] */
    const char *model; /* "bernoulli": each packet is lost independently.
                          "burst:MEAN": Gilbert-Elliott. Each directed link has a Markov chain that
                              goes on from step to step. Lost packets come in runs of mean length
                              MEAN >= 1. Rates: up to MEAN / (MEAN + 1), and 1.
                          "outage:MEAN": a directed link is down for whole steps, in both phases,
                              for MEAN >= 1 steps on average. Rates: as for bursts.
                              "outage:MEAN:sender", "outage:MEAN:receiver": all links from, or to,
                              a worker are down together. "outage:MEAN:PATHS": each link has PATHS
                              paths (2 to 64), which are down independently of one another.
                          "trace:FILE": FILE holds characters 0 (arrives) and 1 (lost); white space
                              and lines from # on are ignored. Each directed link starts to read at
                              its own place, and at the end goes on at the start. `rate` is ignored,
                              except that a phase with rate 0 loses nothing.
                          "replay:FILE": repeats the losses of a recorded run (record_loss), in one
                              process. */
    uint64_t seed;
    /* Links and tensors with another rate. "3=0.5": all links from and to worker 3. "2-5=1": the link from 2
     * to 5. "layers.0-3=0.5", "q_proj=0.2:0": all packets with elements of tensors whose names have these
     * parts (loss/at.c). Commas separate several entries; the last one that stands for a packet counts. Not
     * with "trace". NULL or "none": none */
    const char *at;
    uint64_t steps; /* how many the run makes, for "replay"; 0: not known */
};

/* Events that lossynet counts: mostly datagrams that did not count as arrived. */
enum lossynet_event {
    LOSSYNET_LATE,      /* DATA that came after the phase had ended */
    LOSSYNET_DUPLICATE, /* datagrams that had come before */
    LOSSYNET_REJECTED,  /* from strangers, damaged, or not finite */
    LOSSYNET_OVERRUN,   /* dropped because a rank's receive queue was full */
    LOSSYNET_STRAGGLER, /* phases of a peer that were ended by the deadline */
    LOSSYNET_PACE,      /* no event: kbit/s that all ranks may send; 0: no limit */
    LOSSYNET_RELAYED,   /* no loss: DATA that a rank sent on for others */
    LOSSYNET_EVENTS
};

struct lossynet_part { /* how a worker takes part in a step */
    bool takes_part;   /* false: it leaves the step out */
    bool computes;     /* it has a gradient */
    double norm, lead; /* values for its update, in a replay */
};

struct lossynet_path {      /* from one rank to another */
    uint64_t sent, arrived; /* datagrams of full size */
    double gbps;            /* 10^9 bit/s that arrived, with our header */
};

#endif
