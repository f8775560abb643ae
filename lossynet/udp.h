/* udp.h — a UDP socket as link_udp.c needs it: batches out, batches in, paced.
 *
 * udp_socket.c knows addresses, interfaces, buffers, segmentation offload and pacing; it knows
 * nothing of ranks and phases.
 */
#ifndef LOSSYNET_UDP_H
#define LOSSYNET_UDP_H

#include "lossynet/internal.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <time.h>

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

/* Largest payload behind our header in one unfragmented IP packet, a multiple of 4. */
static inline size_t udp_payload(size_t mtu, int family) {
    return (mtu - (family == AF_INET ? 28 : 48) - WIRE_HEADER_BYTES) / 4 * 4;
}

/* The address and MTU of `interface`; NULL: loopback when all ranks share this host, else the first
 * interface that is up. IPv4 where there is one. The port is 0. Logs why it fails. */
lossynet_status udp_choose(const char *interface, bool one_host, struct udp_address *address,
                           size_t *mtu);

enum { UDP_BATCH = LOSSYNET_BATCH };

struct udp_socket {
    int fd;
    size_t capacity;    /* of a datagram, header included */
    size_t granted;     /* receive buffer, as the kernel counts it */
    bool segmentation;  /* UDP_SEGMENT works */
    double rate, burst; /* pacing: bytes per second, 0 = none; size of the token bucket */
    double tokens, filled;
    uint8_t *incoming; /* [UDP_BATCH][capacity] */
    struct mmsghdr *in, *out;
    struct iovec *in_part, *out_part; /* [UDP_BATCH], [2 * UDP_BATCH] */
    struct udp_address *from;         /* [UDP_BATCH] */
    uint8_t (*control)[64];           /* [UDP_BATCH] */
};

/* Binds to `address` and sets its port. On failure everything is released and a line logged. */
lossynet_status udp_socket_open(struct udp_socket *s, struct udp_address *address, size_t capacity,
                                double gbps);
void udp_socket_close(struct udp_socket *s);
size_t udp_socket_memory(size_t capacity);

/* Hands at most UDP_BATCH datagrams for one address to the kernel. What the network or a firewall
 * refuses counts as lost. */
lossynet_status udp_send(struct udp_socket *s, const struct udp_address *to,
                         const struct lossynet_datagram *batch, int count);

/* Takes what is there, up to UDP_BATCH: datagram i is in[i].msg_len bytes at in_part[i].iov_base
 * from from[i]. Does not wait. */
int udp_receive(struct udp_socket *s);

/* Sleeps until something is there, at most so long. */
void udp_wait(struct udp_socket *s, double seconds);

/* 0 when `bytes` may leave now, and then they count; else how long to wait before asking again. */
double udp_pace(struct udp_socket *s, size_t bytes);

uint64_t udp_overruns(const struct udp_socket *s); /* since open: dropped, receive buffer full */

static inline double udp_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#endif
