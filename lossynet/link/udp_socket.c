/* udp_socket.c — implements the UDP socket of udp_socket.h: address, buffers, segmentation and
 * receive offload. */
#include "lossynet/link/udp_socket.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <linux/errqueue.h>
#include <linux/ethtool.h>
#include <linux/sock_diag.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netinet/udp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

enum {
    BUFFER_BYTES = 64 << 20, /* the receive buffer that we ask for: long paths hold much */
    BUFFER_LEAST = 1 << 20,  /* a smaller receive buffer gets a warning, */
    BUFFER_SHORT = 8 << 20,  /* which recommends this: it is enough for short paths */
    /* The send buffer that we ask for: a few ms at 1 Gbit/s. Datagrams in the host's own queue
     * delay credit and everything else that peers wait for. And that queue may not hold more. */
    QUEUE_BYTES = 512 << 10,
    SEGMENTS_BYTES = 65000, /* most bytes of one segmented send: an IP packet's limit */
};

/* ---- which address ---- */

/* Returns whether datagrams for hosts that are not neighbours would leave with this address. It
 * sends none. */
static bool has_default_route(const struct sockaddr *mine) {
    struct udp_address far = {.any.sa_family = mine->sa_family}, from = {0};
    if (mine->sa_family == AF_INET)
        inet_pton(AF_INET, "192.0.2.1", &far.v4.sin_addr); /* for documentation: RFC 5737 */
    else
        inet_pton(AF_INET6, "2001:db8::1", &far.v6.sin6_addr); /* the same: RFC 3849 */
    far.v4.sin_port = htons(9);
    socklen_t length = sizeof from;
    int fd = socket(mine->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool same = false;
    if (fd >= 0 && !connect(fd, &far.any, udp_address_bytes(&far)) &&
        !getsockname(fd, &from.any, &length)) {
        struct udp_address own = {0};
        memcpy(&own, mine, udp_address_bytes(&far));
        own.v4.sin_port = from.v4.sin_port;
        same = udp_address_equal(&own, &from);
    }
    if (fd >= 0) close(fd);
    return same;
}

/* Returns whether an interface is a bridge, which usually connects only the host's own containers
 * and virtual machines. */
static bool is_bridge(const char *name) {
    struct ethtool_drvinfo driver = {.cmd = ETHTOOL_GDRVINFO};
    struct ifreq request = {.ifr_data = (char *)&driver};
    strncpy(request.ifr_name, name, sizeof request.ifr_name - 1);
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool told = fd >= 0 && ioctl(fd, SIOCETHTOOL, &request) == 0;
    if (fd >= 0) close(fd);
    return told && strcmp(driver.driver, "bridge") == 0;
}

/* Returns how much we prefer an interface; 0: we do not take it. The one with the default route
 * comes first, then those that are not bridges, and IPv4 before IPv6. */
static int preference(const struct ifaddrs *i, const char *name, bool one_host) {
    const unsigned needed = name ? IFF_UP : IFF_UP | IFF_RUNNING;
    if (!i->ifa_addr || (i->ifa_flags & needed) != needed) return 0;
    int family = i->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) return 0;
    if (name ? strcmp(i->ifa_name, name) != 0 : one_host != !!(i->ifa_flags & IFF_LOOPBACK))
        return 0;
    if (family == AF_INET6 &&
        IN6_IS_ADDR_LINKLOCAL(&((struct sockaddr_in6 *)i->ifa_addr)->sin6_addr))
        return 0;
    return 1 + (family == AF_INET) + 2 * !is_bridge(i->ifa_name) +
           4 * has_default_route(i->ifa_addr);
}

lossynet_status udp_choose(const char *name, bool one_host, struct udp_interface *out) {
    struct ifaddrs *all = NULL, *best = NULL;
    if (getifaddrs(&all)) all = NULL;
    int best_preference = 0;
    for (struct ifaddrs *i = all; i; i = i->ifa_next) {
        int p = preference(i, name, one_host);
        if (p > best_preference) best = i, best_preference = p;
    }
    lossynet_status status = LOSSYNET_LINK;
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (best) {
        struct ifreq request = {0};
        strncpy(request.ifr_name, best->ifa_name, sizeof request.ifr_name - 1);
        memset(out, 0, sizeof *out);
        memcpy(&out->address, best->ifa_addr,
               best->ifa_addr->sa_family == AF_INET ? sizeof out->address.v4
                                                    : sizeof out->address.v6);
        out->index = if_nametoindex(best->ifa_name);
        if (fd >= 0 && ioctl(fd, SIOCGIFMTU, &request) == 0 && request.ifr_mtu >= 576) {
            out->mtu = (size_t)request.ifr_mtu;
            status = LOSSYNET_OK;
        } else {
            ln_log("interface %s: no MTU of at least 576: %s", best->ifa_name, strerror(errno));
        }
    } else if (name) {
        char host[65] = "this host";
        gethostname(host, sizeof host - 1);
        ln_log("interface %s: expected the name of a network interface that is up and has "
               "an IP address on %s (see: ip address)",
               name, host);
    } else {
        ln_log("no network interface is up, running and has an IP address (see: ip address)");
    }
    if (fd >= 0) close(fd);
    freeifaddrs(all);
    return status;
}

bool udp_address_equal(const struct udp_address *a, const struct udp_address *b) {
    if (a->any.sa_family != b->any.sa_family || a->v4.sin_port != b->v4.sin_port) return false;
    if (a->any.sa_family == AF_INET) return a->v4.sin_addr.s_addr == b->v4.sin_addr.s_addr;
    return memcmp(&a->v6.sin6_addr, &b->v6.sin6_addr, 16) == 0;
}

/* ---- open and close ---- */

/* Asks for a buffer. Returns the bytes that were granted, as the kernel counts: twice those
 * asked. */
static size_t request_buffer(int fd, int option, int force, int bytes) {
    int granted = 0;
    socklen_t length = sizeof granted;
    if (setsockopt(fd, SOL_SOCKET, force, &bytes, sizeof bytes))
        setsockopt(fd, SOL_SOCKET, option, &bytes, sizeof bytes);
    getsockopt(fd, SOL_SOCKET, option, &granted, &length);
    return (size_t)granted;
}

static bool take_memory(struct udp_socket *s) {
    s->in.bytes = ln_memory_take(LOSSYNET_BATCH, UDP_BUFFER_BYTES);
    if (!s->in.bytes) return false;
    for (int i = 0; i < LOSSYNET_BATCH; i++) {
        s->in.parts[i] =
            (struct iovec){s->in.bytes + (size_t)i * UDP_BUFFER_BYTES, UDP_BUFFER_BYTES};
        s->in.headers[i].msg_hdr.msg_iov = &s->in.parts[i];
        s->in.headers[i].msg_hdr.msg_iovlen = 1;
        s->in.headers[i].msg_hdr.msg_name = &s->in.from[i];
        s->in.headers[i].msg_hdr.msg_control = s->in.control[i];
    }
    return true;
}

/* Sets the option of the socket's family. */
static void set_option(const struct udp_socket *s, int fd, int v4, int v6, int value) {
    const bool is_v4 = s->family == AF_INET;
    setsockopt(fd, is_v4 ? IPPROTO_IP : IPPROTO_IPV6, is_v4 ? v4 : v6, &value, sizeof value);
}

/* Lets the kernel fragment datagrams, or not. With one fragment the whole datagram is lost, so we
 * allow it only if the path needs it. (The values of IPv6 are those of IPv4.) */
static void allow_fragments(struct udp_socket *s, bool allowed) {
    const int how = allowed ? IP_PMTUDISC_WANT : IP_PMTUDISC_DO;
    set_option(s, s->fd, IP_MTU_DISCOVER, IPV6_MTU_DISCOVER, how);
    set_option(s, s->other, IP_MTU_DISCOVER, IPV6_MTU_DISCOVER, how);
    s->fragments = allowed;
}

void udp_socket_probe(struct udp_socket *s, bool on) {
    allow_fragments(s, false);
    s->probes = on;
    if (on) set_option(s, s->fd, IP_MTU_DISCOVER, IPV6_MTU_DISCOVER, IP_PMTUDISC_PROBE);
}

lossynet_status udp_socket_open(struct udp_socket *s, struct udp_address *address,
                                const int ports[2]) {
    *s = (struct udp_socket){.fd = -1, .other = -1};
    if (!take_memory(s)) {
        ln_log("no memory for incoming datagrams");
        udp_socket_close(s);
        return LOSSYNET_NO_MEMORY;
    }
    int family = s->family = address->any.sa_family, segment = 0, one = 1;
    socklen_t length = udp_address_bytes(address);
    struct udp_address any = *address; /* its port is 0 */
    s->other = socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    s->fd = socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (s->fd < 0 || s->other < 0 || !ln_port_bind(s->other, &any.any, length, ports) ||
        !ln_port_bind(s->fd, &address->any, length, ports) ||
        getsockname(s->fd, &address->any, &length)) {
        if (errno == EADDRINUSE && ports[0])
            ln_log("no UDP socket: no port from %d to %d is free: expected two for each rank of "
                   "this host",
                   ports[0], ports[1]);
        else
            ln_log("no UDP socket: %s%s", strerror(errno),
                   errno == EADDRINUSE ? ": expected a free port in net.ipv4.ip_local_port_range"
                                       : "");
        udp_socket_close(s);
        return LOSSYNET_LINK;
    }
    allow_fragments(s, false);
    set_option(s, s->fd, IP_RECVERR, IPV6_RECVERR, 1);
    s->segmentation = setsockopt(s->fd, IPPROTO_UDP, UDP_SEGMENT, &segment, sizeof segment) == 0;
    setsockopt(s->fd, IPPROTO_UDP, UDP_GRO, &one, sizeof one); /* datagrams may come in one piece */
    s->granted = request_buffer(s->fd, SO_RCVBUF, SO_RCVBUFFORCE, BUFFER_BYTES);
    if (s->granted / 2 < BUFFER_BYTES) s->setting = "net.core.rmem_max";
    request_buffer(s->fd, SO_SNDBUF, SO_SNDBUFFORCE, QUEUE_BYTES);
    request_buffer(s->other, SO_SNDBUF, SO_SNDBUFFORCE, QUEUE_BYTES);
    return LOSSYNET_OK;
}

void udp_socket_tell(const struct udp_socket *s) {
    if (s->granted / 2 < BUFFER_LEAST)
        ln_log("a receive buffer of %zu KiB is small for full speed: as root, sysctl -w "
               "net.core.rmem_max=%d",
               s->granted >> 11, BUFFER_SHORT);
}

struct udp_address udp_other_address(const struct udp_socket *s,
                                     const struct udp_address *address) {
    struct udp_address other = *address;
    socklen_t length = udp_address_bytes(address);
    getsockname(s->other, &other.any, &length);
    return other;
}

void udp_socket_close(struct udp_socket *s) {
    if (s->fd >= 0) close(s->fd);
    if (s->other >= 0) close(s->other);
    free(s->in.bytes);
    *s = (struct udp_socket){.fd = -1, .other = -1};
}

/* ---- sending ---- */

/* Adds ancillary data to a message. */
static void add_control(struct msghdr *m, uint8_t *control, int level, int type, const void *data,
                        size_t bytes) {
    struct cmsghdr *c = (struct cmsghdr *)(control + m->msg_controllen);
    c->cmsg_level = level;
    c->cmsg_type = type;
    c->cmsg_len = CMSG_LEN(bytes);
    memcpy(CMSG_DATA(c), data, bytes);
    m->msg_control = control;
    m->msg_controllen += CMSG_SPACE(bytes);
}

/* Fills message `m` with the first datagrams of `batch`. Returns how many. In a segmented message
 * all datagrams but the last have the same size; the last may be smaller. */
static int fill_message(struct udp_socket *s, struct msghdr *m, struct iovec *part,
                        uint8_t *control, const struct ln_datagram *batch, int count) {
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
        uint16_t segment = (uint16_t)size;
        add_control(m, control, IPPROTO_UDP, UDP_SEGMENT, &segment, sizeof segment);
    }
    if (batch[0].bulk && s->dscp) {
        int class = s->dscp << 2; /* the lower two bits are for congestion notification */
        bool v4 = s->family == AF_INET;
        add_control(m, control, v4 ? IPPROTO_IP : IPPROTO_IPV6, v4 ? IP_TOS : IPV6_TCLASS, &class,
                    sizeof class);
    }
    return n;
}

static bool is_segmented(const struct msghdr *m) {
    return m->msg_iovlen > 2; /* each datagram has two parts */
}

static size_t message_bytes(const struct msghdr *m) {
    size_t sum = 0;
    for (size_t i = 0; i < m->msg_iovlen; i++) sum += m->msg_iov[i].iov_len;
    return sum;
}

lossynet_status udp_send(struct udp_socket *s, const struct udp_address *to,
                         const struct ln_datagram *batch, int count) {
again:;
    int messages = 0;
    for (int i = 0; i < count; messages++) {
        struct msghdr *m = &s->out.headers[messages].msg_hdr;
        *m = (struct msghdr){.msg_name = (void *)&to->any, .msg_namelen = udp_address_bytes(to)};
        i += fill_message(s, m, s->out.parts + 2 * i, s->out.control[messages], batch + i,
                          count - i);
    }
    for (int sent = 0; sent < messages;) {
        int n = sendmmsg(batch[0].path ? s->other : s->fd, s->out.headers + sent,
                         (unsigned)(messages - sent), 0);
        if (n > 0) {
            sent += n;
        } else if (errno == ECONNREFUSED && !s->errors) {
            s->errors = true; /* about an earlier datagram, maybe to another address: try again */
        } else if (errno == EMSGSIZE && !is_segmented(&s->out.headers[sent].msg_hdr) &&
                   !s->fragments && !s->probes) {
            ln_log("a path's MTU has become too small for a datagram of %zu bytes: from now "
                   "on it travels in fragments, and is lost with any of them; choose a "
                   "smaller packet size (packet_bytes) when you can",
                   message_bytes(&s->out.headers[sent].msg_hdr));
            allow_fragments(s, true); /* and try again */
        } else if (is_segmented(&s->out.headers[sent].msg_hdr) && s->segmentation &&
                   (errno == EIO || errno == EINVAL || errno == EOPNOTSUPP || errno == EMSGSIZE)) {
            s->segmentation = false; /* unsupported here; what has left is sent twice */
            goto again;
        } else if (errno != EINTR) {
            sent++; /* ENOBUFS, EMSGSIZE, EHOSTUNREACH, ...: counts as lost in the network */
        }
    }
    return LOSSYNET_OK;
}

/* ---- receiving ---- */

bool udp_empty(const struct udp_socket *s) {
    return s->in.message >= s->in.messages;
}

/* Returns the size of the datagrams that the kernel has joined into one message. */
static size_t segment_of(struct msghdr *m, size_t bytes) {
    for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
        int segment;
        if (c->cmsg_level != IPPROTO_UDP || c->cmsg_type != UDP_GRO) continue;
        memcpy(&segment, CMSG_DATA(c), sizeof segment);
        if (segment > 0) return (size_t)segment;
    }
    return bytes;
}

static bool fetch(struct udp_socket *s) {
    for (int i = 0; i < LOSSYNET_BATCH; i++) {
        s->in.headers[i].msg_hdr.msg_namelen = sizeof *s->in.from;
        s->in.headers[i].msg_hdr.msg_controllen = sizeof *s->in.control;
    }
    int n = recvmmsg(s->fd, s->in.headers, LOSSYNET_BATCH, MSG_DONTWAIT, NULL);
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) { /* after the error, read what came */
        s->errors = true;
        n = recvmmsg(s->fd, s->in.headers, LOSSYNET_BATCH, MSG_DONTWAIT, NULL);
    }
    s->in.messages = n > 0 ? n : 0;
    s->in.message = 0;
    s->in.offset = 0;
    return n > 0;
}

bool udp_receive(struct udp_socket *s, uint8_t **bytes, size_t *count, struct udp_address **from) {
    if (udp_empty(s) && !fetch(s)) return false;
    struct mmsghdr *m = &s->in.headers[s->in.message];
    if (s->in.offset == 0) s->in.segment = segment_of(&m->msg_hdr, m->msg_len);
    size_t left = m->msg_len - s->in.offset;
    *bytes = s->in.parts[s->in.message].iov_base;
    *bytes += s->in.offset;
    *count = left < s->in.segment ? left : s->in.segment;
    *from = &s->in.from[s->in.message];
    s->in.offset += *count;
    if (s->in.offset >= m->msg_len) s->in.message++, s->in.offset = 0;
    return true;
}

/* Reads the error queue. The address of such a message is the one to which our datagram was sent
 * (ip(7), IP_RECVERR). */
bool udp_refused(struct udp_socket *s, struct udp_address *by) {
    while (s->errors) {
        uint8_t control[512];
        struct msghdr m = {.msg_name = by,
                           .msg_namelen = sizeof *by,
                           .msg_control = control,
                           .msg_controllen = sizeof control};
        if (recvmsg(s->fd, &m, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) {
            s->errors = false;
            break;
        }
        for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
            struct sock_extended_err error;
            const bool v4 = c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_RECVERR;
            const bool v6 = c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_RECVERR;
            if (!v4 && !v6) continue;
            memcpy(&error, CMSG_DATA(c), sizeof error);
            if (error.ee_errno == ECONNREFUSED) return true;
        }
    }
    return false;
}

uint64_t udp_overruns(const struct udp_socket *s) {
    uint32_t info[SK_MEMINFO_VARS] = {0};
    socklen_t length = sizeof info;
    getsockopt(s->fd, SOL_SOCKET, SO_MEMINFO, info, &length);
    return info[SK_MEMINFO_DROPS];
}
