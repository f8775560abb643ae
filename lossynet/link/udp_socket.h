/* udp_socket.h — a UDP socket for udp.c, which sends and receives batches of datagrams.
 *
 * udp_socket.c knows addresses, interfaces, buffers, segmentation and receive offload. It does not
 * know ranks.
 */
#ifndef LOSSYNET_UDP_SOCKET_H
#define LOSSYNET_UDP_SOCKET_H

#include "lossynet/link/link.h"

#include <netinet/in.h>
#include <sys/socket.h>

struct udp_address {
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    };
};

static inline socklen_t udp_address_bytes(const struct udp_address *a) {
    return a->any.sa_family == AF_INET ? sizeof a->v4 : sizeof a->v6;
}

bool udp_address_equal(const struct udp_address *a, const struct udp_address *b);

/* Returns the largest payload after our header in one unfragmented IP packet, a multiple of 4. */
static inline size_t udp_payload(size_t mtu, int family) {
    return (mtu - (family == AF_INET ? 28 : 48) - WIRE_HEADER_BYTES) / 4 * 4;
}

struct udp_interface {
    struct udp_address address; /* port 0 */
    size_t mtu;
    unsigned index;
};

/* Finds the address and MTU of the interface `name`. If `name` is NULL and all ranks share this
 * host, it takes loopback. Otherwise it takes, of the interfaces that are up and running, the one
 * with the default route, or else the first one that is not a bridge. It prefers IPv4. If it fails,
 * it logs why. */
lossynet_status udp_choose(const char *name, bool one_host, struct udp_interface *out);

enum { UDP_BUFFER_BYTES = 65536 }; /* of an incoming message, which may hold many datagrams */

struct udp_incoming { /* messages that have come, of one or more datagrams each */
    uint8_t *bytes;   /* [LOSSYNET_BATCH][UDP_BUFFER_BYTES] */
    struct mmsghdr headers[LOSSYNET_BATCH];
    struct iovec parts[LOSSYNET_BATCH];
    struct udp_address from[LOSSYNET_BATCH];
    uint8_t control[LOSSYNET_BATCH][64];
    int messages, message;  /* how many there are; the one whose datagrams are being taken */
    size_t offset, segment; /* where its next datagram begins; the size of its datagrams */
};

struct udp_outgoing {
    struct mmsghdr headers[LOSSYNET_BATCH];
    struct iovec parts[2 * LOSSYNET_BATCH];
    uint8_t control[LOSSYNET_BATCH][64];
};

struct udp_socket { /* stays where it is, since it points to its own parts */
    int fd;
    int other;           /* sends from another port, and receives nothing */
    size_t granted;      /* bytes of the receive buffer, as the kernel counts them */
    const char *setting; /* the kernel setting that kept it smaller than we asked; NULL: none */
    bool segmentation;   /* UDP_SEGMENT works */
    bool errors;         /* the error queue may hold messages of other hosts for us */
    bool fragments;      /* the path's MTU has become smaller than our datagrams */
    bool probes;         /* udp_socket_probe is on */
    int family, dscp;    /* address family; traffic class of bulk datagrams */
    struct udp_incoming in;
    struct udp_outgoing out;
};

/* Opens a socket, binds it to `address` and a port of `ports` (ln_port_bind), and sets the port in
 * `address`. On failure it releases everything and logs a line. */
lossynet_status udp_socket_open(struct udp_socket *s, struct udp_address *address,
                                const int ports[2]);
/* Logs a line if the kernel granted a small receive buffer. */
void udp_socket_tell(const struct udp_socket *s);
/* The address of the other port. */
struct udp_address udp_other_address(const struct udp_socket *s, const struct udp_address *address);
void udp_socket_close(struct udp_socket *s);
/* While it is on, datagrams are sent up to the MTU of the interface, even if routers have reported
 * a smaller MTU of the path (IP_PMTUDISC_PROBE); those that are too large are lost. */
void udp_socket_probe(struct udp_socket *s, bool on);

/* Gives the kernel at most LOSSYNET_BATCH datagrams for one address. Datagrams that the network or
 * a firewall refuses count as lost. */
lossynet_status udp_send(struct udp_socket *s, const struct udp_address *to,
                         const struct ln_datagram *batch, int count);

/* Takes one report of a host (ICMP) that its port `by` is closed. Returns false if there is
 * none. */
bool udp_refused(struct udp_socket *s, struct udp_address *by);

/* Takes one datagram that has come. Returns false if there is none. Does not wait. The datagram
 * stays valid while udp_empty returns false, and after that until the next call, which asks the
 * kernel again. */
bool udp_receive(struct udp_socket *s, uint8_t **bytes, size_t *count, struct udp_address **from);
bool udp_empty(const struct udp_socket *s);

/* Returns how many datagrams were dropped since open because the receive buffer was full. */
uint64_t udp_overruns(const struct udp_socket *s);

#endif
