/* link.h — the interface of a link, which carries datagrams from rank to rank.
 *
 * A link carries datagrams (wire.h) and does not know what they mean. It may lose, reorder or
 * duplicate them. The transport does the rest, in the same way for all links: phases, windows,
 * repetitions, time-outs, and the decision which datagrams to accept.
 *
 *     progress.c   send.c, recv.c   control.c   the loop; DATA; what must arrive
 *          |  send        ^  receive
 *          v              |
 *     mpi.c (reliable carrier)   udp.c   verbs.c (UD queue pairs)
 *
 * One thread at a time calls the functions of a link, except wake. After open no memory is
 * allocated.
 */
#ifndef LOSSYNET_LINK_H
#define LOSSYNET_LINK_H

#include "lossynet/base/base.h"
#include "lossynet/base/wire.h"

enum { LOSSYNET_BATCH = 64 }; /* datagrams sent or received at once */

struct ln_datagram { /* to send */
    uint8_t header[WIRE_HEADER_BYTES];
    const void *payload; /* may be NULL if length is 0 */
    size_t length;       /* of the payload, bytes */
    bool bulk;           /* travels in the class of DATA; the same in all of a batch */
    int path;            /* below features.paths; the same in all of a batch */
};

struct ln_arrival { /* a received datagram, header and payload in one piece */
    uint8_t *bytes; /* the receiver may write here */
    size_t count;
    int peer; /* the rank that sent it, by the link's own addresses; -1: a stranger */
    int path; /* on which it came */
};

struct ln_link_features {
    bool reliable;       /* loses and repeats nothing, keeps the order between two ranks (MPI) */
    size_t payload_most; /* most bytes of payload in a datagram between any two ranks, the same on
                            all ranks, a multiple of 4 */
    int receive_queue;   /* datagrams of full size that this rank can hold before it reads them;
                            the transport lets peers have half as many on their way */
    int paths;           /* to each rank, which the network may route apart; 0 means 1 */
    const char *queue_setting; /* the system setting that limits receive_queue; NULL: none does */
    size_t queue_bytes;        /* how much of that setting a datagram of full size takes */
};

struct ln_link {
    const char *name;
    struct ln_link_features features;
    size_t memory_bytes; /* memory that the link holds */

    /* Sends 1 ... LOSSYNET_BATCH datagrams to one rank. The caller may reuse headers and payloads
     * when it returns, but payloads in registered memory only after `settle`. Datagrams that the
     * network refuses count as lost. If the link is broken, logs one line and returns
     * LOSSYNET_LINK. */
    lossynet_status (*send)(struct ln_link *link, int peer, const struct ln_datagram *batch,
                            int count);

    /* Takes up to LOSSYNET_BATCH datagrams that have come, and returns their number. It returns 0
     * only if there are none. Does not wait. They stay valid until the next call. -1: the link is
     * broken, and one line was logged. */
    int (*receive)(struct ln_link *link, struct ln_arrival *arrivals);

    /* Sleeps until there may be something to receive, until woken, or for `seconds` seconds. (MPI
     * cannot do that, and only gives the processor away for a moment.) */
    void (*wait)(struct ln_link *link, double seconds);

    /* Ends the present or the next wait. Any thread may call it at any time. Reliable links, for
     * which there is one thread, have none. */
    void (*wake)(struct ln_link *link);

    /* Optional, with settle. Registers memory with payloads, until close, so that hardware can read
     * them in place. Payloads in other memory are copied. If it fails, it returns false, mostly
     * after one line, and these payloads are copied too. */
    bool (*register_memory)(struct ln_link *link, const void *memory, size_t bytes);
    /* Waits until everything that was sent has left, or cannot leave. */
    void (*settle)(struct ln_link *link);

    /* Optional. Returns a rank whose host reports that no process receives at its address any more
     * (the process was killed), once for each report, or -1. Anybody on the path can forge one. */
    int (*refused)(struct ln_link *link);

    /* Optional. Counts datagrams dropped since open because this rank's receive queue was full. */
    uint64_t (*overruns)(struct ln_link *link);

    void (*close)(struct ln_link *link);
};

struct ln_link_settings {
    struct lossynet_world world;
    uint64_t run;         /* random, the same on all ranks */
    size_t payload_bytes; /* largest payload that will be sent. 0: the most that fits, up to
                             LOSSYNET_PAYLOAD_DEFAULT. If it does not fit, open fails. */
    struct lossynet_network network; /* interface, ports; dscp, which only bulk datagrams have */
};

enum {
    LOSSYNET_PAYLOAD_DEFAULT = 4096,  /* not larger, so that a loss is small */
    LOSSYNET_UDP_PACKET_BYTES = 1444, /* an estimate for an unknown MTU, taken as 1500 */
};

/* Opens a link. Collective. On failure *out is NULL and one line has been logged. */
typedef lossynet_status (*ln_link_open)(const struct ln_link_settings *settings,
                                        struct ln_link **out);

lossynet_status ln_link_mpi_open(const struct ln_link_settings *settings, struct ln_link **out);
lossynet_status ln_link_udp_open(const struct ln_link_settings *settings, struct ln_link **out);
lossynet_status ln_link_verbs_open(const struct ln_link_settings *settings, struct ln_link **out);

/* Return the bytes that an open link of `ranks` ranks would hold. */
size_t ln_link_mpi_memory(int ranks, size_t payload_bytes);
size_t ln_link_udp_memory(int ranks, size_t payload_bytes);
size_t ln_link_verbs_memory(int ranks, size_t payload_bytes);

/* Returns whether this rank has an RDMA port in state ACTIVE. Without libibverbs it returns false.
 * Logs nothing. */
bool ln_link_verbs_available(void);

/* Sets *out to the function that opens a link of this kind (select.c). For LOSSYNET_LINK_AUTO it
 * chooses RDMA if every rank has it, else UDP; then it is collective. */
lossynet_status ln_link_choose(const struct lossynet_world *world, lossynet_link_kind kind,
                               ln_link_open *out);

/* ---- traffic classes (dscp.c) ---- */

/* Parses the name of a traffic class: "default", "le" (RFC 8622), "cs0" ... "cs7", "af11" ...
 * "af43", "va", "ef", "0" ... "63". Returns false for other names. */
bool ln_dscp_parse(const char *name, int *dscp);
/* Returns InfiniBand's service level, or 802.1Q's priority, of a traffic class. */
int ln_service_level(int dscp);

#endif
