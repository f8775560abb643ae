/* link.h — how ranks exchange datagrams: the interface that every link implements.
 *
 * A link carries datagrams (wire.h) between ranks and knows nothing of what they mean. It may lose,
 * reorder or duplicate them. What a phase is, when it is over and which datagram is believed is
 * decided once, for all links, in exchange.c:
 *
 *     exchange.c      begin   send send send ...   flush   progress progress ...   end
 *        ^                      |                             |
 *        |                      v                             v
 *        +---- receive() ---- link_mpi.c (reliable carrier), link_udp.c (loses datagrams)
 *
 * All functions of a link are called from one thread, and call `receive` from that thread, out of
 * send, flush, progress and end. They return LOSSYNET_LINK after logging one line that names the
 * peer and the step.
 */
#ifndef LOSSYNET_LINK_H
#define LOSSYNET_LINK_H

#include "lossynet/lossynet.h"
#include "lossynet/wire.h"

struct lossynet_datagram {
    uint8_t header[WIRE_HEADER_BYTES];
    const void *payload;
    size_t length; /* of the payload */
};

/* Hands over one datagram; it is gone when the function returns. peer: the rank it came from, or
 * -1 when the link cannot tell. Contents are not validated. */
typedef void (*lossynet_receive)(void *context, int peer, const uint8_t *datagram, size_t bytes);

struct lossynet_link_counters { /* datagrams not handed over, since open */
    uint64_t late;              /* DATA of a phase that is over */
    uint64_t foreign;           /* from strangers or another run, or no datagram of ours at all */
    uint64_t corrupt;           /* checksum */
    uint64_t overruns;          /* dropped by the kernel: receive buffer full */
};

struct lossynet_link {
    const char *name;
    size_t memory_bytes; /* buffers it holds */
    uint64_t run;        /* the run id, if the link has drawn one */

    /* Opens a phase: from now on datagrams of this phase are delivered. Datagrams of a later phase
     * may reach this rank before it opens it; a link either keeps them back or delivers them, to
     * be dropped as belonging to another phase. */
    lossynet_status (*begin)(struct lossynet_link *link, lossynet_phase phase, uint64_t step);

    /* Sends a batch to one rank. Payloads may be reused when it returns. */
    lossynet_status (*send)(struct lossynet_link *link, int peer,
                            const struct lossynet_datagram *batch, int count);

    /* Nothing sent so far waits for company any longer. */
    lossynet_status (*flush)(struct lossynet_link *link);

    /* Delivers what has arrived; gives the processor away for a moment when nothing has. */
    lossynet_status (*progress)(struct lossynet_link *link);

    /* The phase is over here. Returns when peers can go on without this rank's help. */
    lossynet_status (*end)(struct lossynet_link *link);

    /* Reliable: rank r's part of `data` is bytes offset[r] ... offset[r + 1]; each rank comes with
     * its own part filled in and leaves with all. offset[0] need not be 0; what is outside stays
     * untouched. Not within a phase. */
    lossynet_status (*all_gather)(struct lossynet_link *link, void *data, const size_t *offset);

    void (*close)(struct lossynet_link *link);

    /* Only where datagrams may be lost; NULL elsewhere. The link repeats a DONE until the peer has
     * it or has gone on, and may deliver one several times. */
    bool (*passed)(struct lossynet_link *link, int peer);    /* the peer has ended this phase */
    double (*silence)(struct lossynet_link *link, int peer); /* seconds since it was heard */
    double patience; /* seconds of silence after which a peer's phase is over */
    void (*counters)(struct lossynet_link *link, struct lossynet_link_counters *out);
};

struct lossynet_link_settings {
    struct lossynet_world world;
    size_t packet_bytes; /* largest payload */
    lossynet_receive receive;
    void *context; /* for receive */
    /* Links other than MPI: as in lossynet_settings. */
    const char *interface;
    double pace_gbps, peer_timeout;
};

/* Collective. On failure *out is NULL and one line has been logged. */
typedef lossynet_status (*lossynet_link_open)(const struct lossynet_link_settings *settings,
                                              struct lossynet_link **out);

lossynet_status lossynet_link_mpi_open(const struct lossynet_link_settings *settings,
                                       struct lossynet_link **out);
size_t lossynet_link_mpi_memory(int ranks, size_t packet_bytes);

lossynet_status lossynet_link_udp_open(const struct lossynet_link_settings *settings,
                                       struct lossynet_link **out);
size_t lossynet_link_udp_memory(int ranks, size_t packet_bytes);

/* The default payload: what the smallest MTU of all ranks carries, at most 4096. Collective. */
lossynet_status lossynet_link_udp_packet_bytes(const struct lossynet_world *world,
                                               const char *interface, size_t *bytes);

/* The same link, with another way to tell each other addresses: an all-gather of `bytes` per rank,
 * in place. For tests. */
typedef lossynet_status (*lossynet_udp_share)(void *context, const struct lossynet_world *world,
                                              void *all, size_t bytes);
lossynet_status lossynet_link_udp_open_with(const struct lossynet_link_settings *settings,
                                            lossynet_udp_share share, void *context,
                                            struct lossynet_link **out);

/* Tests: says of every datagram that arrives how often it is seen; -1: once, after the next. */
extern int (*lossynet_udp_hook)(int rank, int peer, const uint8_t *datagram, size_t bytes);

enum { LOSSYNET_UDP_PACKET_BYTES = 1420 }; /* estimate, where no MTU is known: 1500 */
enum { LOSSYNET_MPI_PACKET_BYTES = 4096 }; /* default payload, in memory too */

#endif
