/* udp_socket.h — a UDP socket as udp.c needs it: batches out, batches in.
 *
 * udp_socket.c knows addresses, interfaces, buffers, segmentation and receive offload; it knows
 * nothing of ranks.
 */
#ifndef LOSSYNET_UDP_H
#define LOSSYNET_UDP_H

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

/* Largest payload behind our header in one unfragmented IP packet, a multiple of 4. */
static inline size_t udp_payload(size_t mtu, int family) {
    return (mtu - (family == AF_INET ? 28 : 48) - WIRE_HEADER_BYTES) / 4 * 4;
}

struct udp_interface {
    struct udp_address address; /* port 0 */
    size_t mtu;
    unsigned index;
};

/* The address and MTU of the interface `name`; NULL: loopback when all ranks share this host, else
 * of those that are up and running that of the default route, or the first that is no bridge. IPv4
 * where there is one. Logs why it fails. */
lossynet_status udp_choose(const char *name, bool one_host, struct udp_interface *out);

enum { UDP_BUFFER_BYTES = 65536 }; /* of an incoming message, which may hold many datagrams */

struct udp_incoming {         /* messages that have come, of one or more datagrams each */
    uint8_t *bytes;           /* [LOSSYNET_BATCH][UDP_BUFFER_BYTES] */
    struct mmsghdr *headers;  /* [LOSSYNET_BATCH] */
    struct iovec *parts;      /* [LOSSYNET_BATCH] */
    struct udp_address *from; /* [LOSSYNET_BATCH] */
    uint8_t (*control)[64];   /* [LOSSYNET_BATCH] */
    int messages, message;    /* that are there; the one being handed out, */
    size_t offset, segment;   /* from here on, in datagrams of this size */
};

struct udp_outgoing {
    struct mmsghdr *headers; /* [LOSSYNET_BATCH] */
    struct iovec *parts;     /* [2 * LOSSYNET_BATCH] */
    uint8_t (*control)[64];  /* [LOSSYNET_BATCH] */
};

struct udp_socket {
    int fd;
    size_t granted;      /* receive buffer, as the kernel counts it */
    const char *setting; /* of the kernel, that made it smaller than was asked for; NULL: none */
    bool segmentation;   /* UDP_SEGMENT works */
    bool errors;         /* the kernel has messages of other hosts for us */
    bool fragments;      /* the path's MTU has shrunk below our datagrams */
    bool probes;         /* udp_socket_probe */
    int family, dscp;    /* traffic class of bulk datagrams */
    struct udp_incoming in;
    struct udp_outgoing out;
};

/* Binds to `address` and sets its port. On failure everything is released and a line logged. */
lossynet_status udp_socket_open(struct udp_socket *s, struct udp_address *address);
void udp_socket_close(struct udp_socket *s);
/* What is larger than a path's MTU is lost, whatever routers have told of it (IP_PMTUDISC_PROBE); or
 * no longer. */
void udp_socket_probe(struct udp_socket *s, bool on);
size_t udp_socket_memory(void);

/* Makes the socket receive what is sent to the multicast group `address`, as which it is bound. */
bool udp_socket_join(struct udp_socket *s, const struct udp_address *group,
                     const struct udp_interface *interface);
/* Makes the socket send to multicast groups through this interface. */
bool udp_socket_multicast(struct udp_socket *s, const struct udp_interface *interface);

/* Hands at most LOSSYNET_BATCH datagrams for one address to the kernel. What the network or a
 * firewall refuses counts as lost. */
lossynet_status udp_send(struct udp_socket *s, const struct udp_address *to,
                         const struct lossynet_datagram *batch, int count);

/* Takes one message of a host (ICMP) that its port `by` is closed; false when there is none. */
bool udp_refused(struct udp_socket *s, struct udp_address *by);

/* Takes one datagram that has come; false when there is none. Valid until `udp_empty` says that
 * the next call will ask the kernel again. Does not wait. */
bool udp_receive(struct udp_socket *s, uint8_t **bytes, size_t *count, struct udp_address **from);
bool udp_empty(const struct udp_socket *s);

uint64_t udp_overruns(const struct udp_socket *s); /* since open: dropped, receive buffer full */

#endif
