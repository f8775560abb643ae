/* link.h — how datagrams get from rank to rank: the interface that every link implements.
 *
 * A link carries datagrams (wire.h) and knows nothing of what they mean. It may lose, reorder or
 * duplicate them. Phases, windows, repetition of what must arrive, time-outs and which datagram is
 * believed are decided once, for all links, by the transport:
 *
 *     progress.c   send.c, recv.c   control.c   the loop; DATA; what must arrive
 *          |  send        ^  receive
 *          v              |
 *     mpi.c (reliable carrier)   udp.c   verbs.c (UD queue pairs)
 *
 * All functions are called by one thread at a time, except wake. Nothing is allocated after open.
 */
#ifndef LOSSYNET_LINK_H
#define LOSSYNET_LINK_H

#include "lossynet/base/base.h"
#include "lossynet/base/wire.h"

enum {
    LOSSYNET_BATCH = 64,    /* datagrams sent or received at once */
    LOSSYNET_EVERYONE = -1, /* peer: all other ranks, by multicast */
};

struct lossynet_datagram { /* to send */
    uint8_t header[WIRE_HEADER_BYTES];
    const void *payload; /* may be NULL where length is 0 */
    size_t length;       /* of the payload */
    bool bulk;           /* travels in the class of DATA; all of a batch alike */
    bool device;         /* payload is a device's memory, registered, which the host cannot read */
};

struct lossynet_arrival { /* received: header and payload in one piece */
    uint8_t *bytes;       /* the receiver may write here */
    size_t count;
    int peer; /* the rank it came from by the link's own addresses; -1: a stranger */
};

struct lossynet_link_features {
    bool reliable;       /* loses and repeats nothing, keeps order between two ranks (MPI) */
    bool multicast;      /* send to LOSSYNET_EVERYONE works, for all ranks */
    bool checks_payload; /* hardware drops what comes with another payload than was sent */
    size_t payload_most; /* bytes of payload that fit a datagram between any two ranks, the same on
                            all ranks, a multiple of 4 */
    int receive_queue;   /* datagrams of full size that this rank can hold before it looks at them;
                            the transport lets peers have half as many on their way */
    const char *queue_setting; /* the system's, which bounds that; NULL: none does */
    size_t queue_bytes;        /* that a datagram of full size takes of it */
};

struct lossynet_link {
    const char *name;
    struct lossynet_link_features features;
    size_t memory_bytes; /* that it holds */

    /* Hands over 1 ... LOSSYNET_BATCH datagrams for one rank. Headers and payloads may be reused
     * when it returns, payloads in registered memory after `settle`. What the network refuses
     * counts as lost. LOSSYNET_LINK: the link is broken, after one line. */
    lossynet_status (*send)(struct lossynet_link *link, int peer,
                            const struct lossynet_datagram *batch, int count);

    /* Takes up to LOSSYNET_BATCH datagrams that have come; 0 says that there are none, and only
     * that does. Does not wait. They stay valid until the next call. */
    int (*receive)(struct lossynet_link *link, struct lossynet_arrival *arrivals);

    /* Sleeps until there may be something to receive, until woken, or for so many seconds.
     * (MPI, which cannot: gives the processor away for a moment.) */
    void (*wait)(struct lossynet_link *link, double seconds);

    /* Ends the present or the next wait. From any thread, also while another calls any function. */
    void (*wake)(struct lossynet_link *link);

    /* Optional, with settle. Memory that payloads will be sent from, until close, so that hardware
     * may read it in place; other payloads work too, and are copied. False, after one line: these
     * are copied as well. device: NULL for the host's memory. */
    bool (*register_memory)(struct lossynet_link *link, const void *memory, size_t bytes,
                            const struct lossynet_device_memory *device);
    /* Waits until what was sent has left, or cannot. */
    void (*settle)(struct lossynet_link *link);

    /* Optional: a rank whose host has said that nobody takes datagrams at its address any more (a
     * process that was killed), each time it says so; -1: none. Anybody on the path can say it. */
    int (*refused)(struct lossynet_link *link);

    /* Optional: datagrams dropped since open because this rank's receive queue was full. */
    uint64_t (*overruns)(struct lossynet_link *link);

    void (*close)(struct lossynet_link *link);
};

struct lossynet_link_settings {
    struct lossynet_world world;
    lossynet_share share;
    void *share_context;
    uint64_t run;          /* random, the same on all ranks: for a group address */
    size_t payload_bytes;  /* largest payload that will be sent; 0: the most that fits, at most
                              LOSSYNET_PAYLOAD_DEFAULT. More than fits is an error. */
    const char *interface; /* as in lossynet_settings; may be NULL */
    int dscp;              /* of bulk datagrams; others have 0 */
    bool multicast;        /* try; where it fails, say so in one line (rank 0) and go on without */
};

enum {
    LOSSYNET_PAYLOAD_DEFAULT = 4096,  /* small losses are better than large ones */
    LOSSYNET_UDP_PACKET_BYTES = 1444, /* an estimate, where no MTU is known: 1500 */
};

/* Collective. On failure *out is NULL and one line has been logged. */
typedef lossynet_status (*lossynet_link_open)(const struct lossynet_link_settings *settings,
                                              struct lossynet_link **out);

lossynet_status lossynet_link_mpi_open(const struct lossynet_link_settings *settings,
                                       struct lossynet_link **out);
lossynet_status lossynet_link_udp_open(const struct lossynet_link_settings *settings,
                                       struct lossynet_link **out);
lossynet_status lossynet_link_verbs_open(const struct lossynet_link_settings *settings,
                                         struct lossynet_link **out);

/* Bytes that an open link of `ranks` ranks would hold, to tell before one is open. */
size_t lossynet_link_mpi_memory(int ranks, size_t payload_bytes);
size_t lossynet_link_udp_memory(int ranks, size_t payload_bytes);
size_t lossynet_link_verbs_memory(int ranks, size_t payload_bytes);

/* Whether this rank has an RDMA port in state ACTIVE; false when built without libibverbs. Logs
 * nothing. */
bool lossynet_link_verbs_available(void);

/* How to open a link of this kind (select.c). auto: RDMA where every rank has it, else UDP, and
 * collective, by `share`. */
lossynet_status lossynet_link_choose(const struct lossynet_world *world, lossynet_link_kind kind,
                                     lossynet_share share, void *share_context,
                                     lossynet_link_open *out);

/* ---- traffic classes (dscp.c) ---- */

/* "default", "le" (RFC 8622), "cs0" ... "cs7", "af11" ... "af43", "va", "ef", "0" ... "63" */
bool lossynet_dscp_parse(const char *name, int *dscp);
/* InfiniBand's service level, or 802.1Q's priority, of a traffic class. */
int lossynet_service_level(int dscp);

#endif
