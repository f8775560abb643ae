/* udp_socket.c — one UDP socket: address, buffers, segmentation offload, pacing. See udp.h. */
#include "lossynet/udp.h"

#include <errno.h>
#include <ifaddrs.h>
#include <linux/sock_diag.h>
#include <math.h>
#include <net/if.h>
#include <netinet/udp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif

enum {
    BUFFER_BYTES = 8 << 20, /* asked for, each way */
    BUFFER_LEAST = 1 << 20, /* below, warn */
    SEGMENTS_BYTES = 65000, /* of one segmented send: an IP packet's limit, with headers */
    BURST_BYTES = 256 << 10,
};

/* ---- which address ---- */

/* How much we like an interface: 0 not at all, IPv4 before IPv6. */
static int preference(const struct ifaddrs *i, const char *name, bool one_host) {
    if (!i->ifa_addr || !(i->ifa_flags & IFF_UP)) return 0;
    int family = i->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) return 0;
    if (name ? strcmp(i->ifa_name, name) != 0 : one_host != !!(i->ifa_flags & IFF_LOOPBACK))
        return 0;
    if (family == AF_INET) return 2;
    return !IN6_IS_ADDR_LINKLOCAL(&((struct sockaddr_in6 *)i->ifa_addr)->sin6_addr);
}

lossynet_status udp_choose(const char *interface, bool one_host, struct udp_address *address,
                           size_t *mtu) {
    struct ifaddrs *all = NULL, *best = NULL;
    if (getifaddrs(&all)) all = NULL;
    int best_preference = 0;
    for (struct ifaddrs *i = all; i; i = i->ifa_next) {
        int p = preference(i, interface, one_host);
        if (p > best_preference) best = i, best_preference = p;
    }
    lossynet_status status = LOSSYNET_LINK;
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (best) {
        struct ifreq request = {0};
        strncpy(request.ifr_name, best->ifa_name, sizeof request.ifr_name - 1);
        memset(address, 0, sizeof *address);
        memcpy(address, best->ifa_addr,
               best->ifa_addr->sa_family == AF_INET ? sizeof address->v4 : sizeof address->v6);
        if (fd >= 0 && ioctl(fd, SIOCGIFMTU, &request) == 0 && request.ifr_mtu >= 576) {
            *mtu = (size_t)request.ifr_mtu;
            status = LOSSYNET_OK;
        } else {
            lossynet_log("interface %s: no MTU of at least 576: %s", best->ifa_name,
                         strerror(errno));
        }
    } else if (interface) {
        lossynet_log("--interface %s: expected the name of a network interface that is up and has "
                     "an IP address (see: ip address)",
                     interface);
    } else {
        lossynet_log("no network interface is up and has an IP address (see: ip address)");
    }
    if (fd >= 0) close(fd);
    freeifaddrs(all);
    return status;
}

/* ---- open and close ---- */

/* Asks for a buffer; returns what was granted, as the kernel counts (twice what is asked). */
static size_t request_buffer(int fd, int option, int force) {
    int bytes = BUFFER_BYTES, granted = 0;
    socklen_t length = sizeof granted;
    if (setsockopt(fd, SOL_SOCKET, force, &bytes, sizeof bytes))
        setsockopt(fd, SOL_SOCKET, option, &bytes, sizeof bytes);
    getsockopt(fd, SOL_SOCKET, option, &granted, &length);
    return (size_t)granted;
}

size_t udp_socket_memory(size_t capacity) {
    return UDP_BATCH * (capacity + 2 * sizeof(struct mmsghdr) + 3 * sizeof(struct iovec) +
                        sizeof(struct udp_address) + 64);
}

static bool take_memory(struct udp_socket *s) {
    s->incoming = lossynet_memory_take(UDP_BATCH, s->capacity);
    s->in = lossynet_memory_take(UDP_BATCH, sizeof *s->in);
    s->out = lossynet_memory_take(UDP_BATCH, sizeof *s->out);
    s->in_part = lossynet_memory_take(UDP_BATCH, sizeof *s->in_part);
    s->out_part = lossynet_memory_take(2 * UDP_BATCH, sizeof *s->out_part);
    s->from = lossynet_memory_take(UDP_BATCH, sizeof *s->from);
    s->control = lossynet_memory_take(UDP_BATCH, sizeof *s->control);
    if (!s->incoming || !s->in || !s->out || !s->in_part || !s->out_part || !s->from || !s->control)
        return false;
    for (int i = 0; i < UDP_BATCH; i++) {
        s->in_part[i] = (struct iovec){s->incoming + (size_t)i * s->capacity, s->capacity};
        s->in[i].msg_hdr.msg_iov = &s->in_part[i];
        s->in[i].msg_hdr.msg_iovlen = 1;
        s->in[i].msg_hdr.msg_name = &s->from[i];
    }
    return true;
}

lossynet_status udp_socket_open(struct udp_socket *s, struct udp_address *address, size_t capacity,
                                double gbps) {
    *s = (struct udp_socket){.fd = -1, .capacity = capacity};
    if (!take_memory(s)) {
        lossynet_log("no memory for datagrams of %zu bytes", capacity);
        udp_socket_close(s);
        return LOSSYNET_NO_MEMORY;
    }
    int family = address->any.sa_family, discover = IP_PMTUDISC_DO, segment = 0;
    socklen_t length = udp_address_bytes(address);
    s->fd = socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (s->fd < 0 || bind(s->fd, &address->any, length) ||
        getsockname(s->fd, &address->any, &length)) {
        lossynet_log("no UDP socket: %s", strerror(errno));
        udp_socket_close(s);
        return LOSSYNET_LINK;
    }
    if (family == AF_INET) /* lost fragments lose the whole packet: never fragment */
        setsockopt(s->fd, IPPROTO_IP, IP_MTU_DISCOVER, &discover, sizeof discover);
    else
        setsockopt(s->fd, IPPROTO_IPV6, IPV6_MTU_DISCOVER, &discover, sizeof discover);
    s->segmentation = setsockopt(s->fd, IPPROTO_UDP, UDP_SEGMENT, &segment, sizeof segment) == 0;
    s->granted = request_buffer(s->fd, SO_RCVBUF, SO_RCVBUFFORCE);
    size_t out = request_buffer(s->fd, SO_SNDBUF, SO_SNDBUFFORCE);
    if (s->granted / 2 < BUFFER_LEAST || out / 2 < BUFFER_LEAST)
        lossynet_log("socket buffers of %zu and %zu KiB are small for full speed: as root, sysctl "
                     "-w net.core.rmem_max=%d net.core.wmem_max=%d",
                     s->granted >> 11, out >> 11, BUFFER_BYTES, BUFFER_BYTES);
    s->rate = gbps * 1e9 / 8;
    /* A batch, and what would have left while a short sleep lasted too long. */
    s->burst = BURST_BYTES + s->rate * 100e-6;
    s->tokens = s->burst;
    s->filled = udp_now();
    prctl(PR_SET_TIMERSLACK, 1000);
    return LOSSYNET_OK;
}

void udp_socket_close(struct udp_socket *s) {
    if (s->fd >= 0) close(s->fd);
    free(s->control);
    free(s->from);
    free(s->out_part);
    free(s->in_part);
    free(s->out);
    free(s->in);
    free(s->incoming);
    *s = (struct udp_socket){.fd = -1};
}

/* ---- sending ---- */

/* Adds to message `m` its datagrams from batch[i] on; returns how many. All but the last of a
 * segmented message have one size. */
static int fill_message(struct udp_socket *s, struct msghdr *m, struct iovec *part,
                        uint8_t *control, const struct lossynet_datagram *batch, int count) {
    size_t size = WIRE_HEADER_BYTES + batch[0].length, sum = 0;
    int n = 0;
    while (n < count) {
        size_t bytes = WIRE_HEADER_BYTES + batch[n].length;
        if (n > 0 && (!s->segmentation || bytes > size || sum + bytes > SEGMENTS_BYTES)) break;
        part[2 * n] = (struct iovec){(void *)batch[n].header, WIRE_HEADER_BYTES};
        part[2 * n + 1] = (struct iovec){(void *)batch[n].payload, batch[n].length};
        sum += bytes;
        n++;
        if (bytes < size) break;
    }
    m->msg_iov = part;
    m->msg_iovlen = (size_t)(2 * n);
    m->msg_control = NULL;
    m->msg_controllen = 0;
    if (n > 1) {
        m->msg_control = control;
        m->msg_controllen = CMSG_SPACE(sizeof(uint16_t));
        struct cmsghdr *c = CMSG_FIRSTHDR(m);
        c->cmsg_level = IPPROTO_UDP;
        c->cmsg_type = UDP_SEGMENT;
        c->cmsg_len = CMSG_LEN(sizeof(uint16_t));
        uint16_t segment = (uint16_t)size;
        memcpy(CMSG_DATA(c), &segment, sizeof segment);
    }
    return n;
}

lossynet_status udp_send(struct udp_socket *s, const struct udp_address *to,
                         const struct lossynet_datagram *batch, int count) {
again:;
    int messages = 0;
    for (int i = 0; i < count; messages++) {
        struct msghdr *m = &s->out[messages].msg_hdr;
        *m = (struct msghdr){.msg_name = (void *)&to->any, .msg_namelen = udp_address_bytes(to)};
        i += fill_message(s, m, s->out_part + 2 * i, s->control[messages], batch + i, count - i);
    }
    for (int sent = 0; sent < messages;) {
        int n = sendmmsg(s->fd, s->out + sent, (unsigned)(messages - sent), 0);
        if (n > 0) {
            sent += n;
        } else if (errno == EMSGSIZE && !s->out[sent].msg_hdr.msg_controllen) {
            lossynet_log("a datagram of %zu bytes does not fit the path's MTU: choose a smaller "
                         "--packet-bytes",
                         WIRE_HEADER_BYTES + batch[0].length);
            return LOSSYNET_LINK;
        } else if (s->out[sent].msg_hdr.msg_controllen && s->segmentation &&
                   (errno == EIO || errno == EINVAL || errno == EOPNOTSUPP || errno == EMSGSIZE)) {
            s->segmentation = false; /* the interface cannot; what left already comes twice */
            goto again;
        } else if (errno != EINTR) {
            sent++; /* ENOBUFS, EPERM, EHOSTUNREACH, ...: lost, like in the network */
        }
    }
    return LOSSYNET_OK;
}

double udp_pace(struct udp_socket *s, size_t bytes) {
    if (s->rate <= 0) return 0;
    double now = udp_now();
    s->tokens = fmin(s->burst, s->tokens + (now - s->filled) * s->rate);
    s->filled = now;
    if (s->tokens >= fmin((double)bytes, s->burst)) {
        s->tokens -= (double)bytes;
        return 0;
    }
    return fmax(20e-6, (fmin((double)bytes, s->burst) - s->tokens) / s->rate);
}

/* ---- receiving ---- */

int udp_receive(struct udp_socket *s) {
    for (int i = 0; i < UDP_BATCH; i++) s->in[i].msg_hdr.msg_namelen = sizeof *s->from;
    int n = recvmmsg(s->fd, s->in, UDP_BATCH, MSG_DONTWAIT, NULL);
    return n > 0 ? n : 0;
}

void udp_wait(struct udp_socket *s, double seconds) {
    struct pollfd poll = {.fd = s->fd, .events = POLLIN};
    struct timespec t = {(time_t)seconds, (long)((seconds - floor(seconds)) * 1e9)};
    if (seconds > 0) ppoll(&poll, 1, &t, NULL);
}

uint64_t udp_overruns(const struct udp_socket *s) {
    uint32_t info[SK_MEMINFO_VARS] = {0};
    socklen_t length = sizeof info;
    getsockopt(s->fd, SOL_SOCKET, SO_MEMINFO, info, &length);
    return info[SK_MEMINFO_DROPS];
}
