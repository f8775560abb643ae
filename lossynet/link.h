/* link.h — how ranks exchange datagrams: the interface that every link implements.
 *
 * A link carries datagrams (wire.h) between ranks and knows nothing of what they mean. It may lose,
 * reorder or duplicate them. What a phase is, when it is over and which datagram is believed is
 * decided once, for all links, in exchange.c:
 *
 *     exchange.c      begin   send send send ...   flush   progress progress ...   end
 *        ^                      |                             |
 *        |                      v                             v
 *        +---- receive() ---- link_mpi.c (reliable carrier), and one file for each further link
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

struct lossynet_link {
    const char *name;
    size_t memory_bytes; /* buffers it holds */

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
};

struct lossynet_link_settings {
    struct lossynet_world world;
    size_t packet_bytes; /* largest payload */
    lossynet_receive receive;
    void *context; /* for receive */
};

/* Collective. On failure *out is NULL and one line has been logged. */
typedef lossynet_status (*lossynet_link_open)(const struct lossynet_link_settings *settings,
                                              struct lossynet_link **out);

lossynet_status lossynet_link_mpi_open(const struct lossynet_link_settings *settings,
                                       struct lossynet_link **out);
size_t lossynet_link_mpi_memory(int ranks, size_t packet_bytes);

enum { LOSSYNET_MPI_PACKET_BYTES = 4096 }; /* default payload, in memory too */

#endif
