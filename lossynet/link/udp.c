/* udp.c — the link over UDP, IPv4 or IPv6: one socket per rank, and a second one that only sends. Its
 * datagrams come from another port, and so on another path where the network spreads traffic by ports.
 *
 * Ranks tell each other their addresses at the start. Datagrams from other addresses are from
 * strangers. Between hosts, rounds of test datagrams at the start show how large a datagram may be.
 */
#include "lossynet/link/peer_table.h"
#include "lossynet/link/udp_socket.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

static const double TEST_SECONDS = 1.0; /* longest test of one size */
static const double TEST_PAUSE = 0.02;
/* If SURE small datagrams of a peer came, and none of full size, then that size does not pass. */
enum { SURE = 20, FAREWELLS = 3 };

struct link_udp {
    struct ln_link link; /* first: a link is its address */
    struct lossynet_world world;
    struct udp_socket socket;
    struct udp_address *address; /* [ranks]: where a rank receives, and from where it sends */
    struct udp_address *other;   /* [ranks]: from where it sends, too */
    struct peer_table table;
    uint32_t run;
    int event;
};

/* ---- peers by address ---- */

static unsigned address_hash(const struct udp_address *a) {
    uint64_t hash = a->v4.sin_port;
    if (a->any.sa_family == AF_INET)
        hash ^= (uint64_t)a->v4.sin_addr.s_addr << 16;
    else
        for (int i = 0; i < 16; i++) hash = ln_mix(hash ^ a->v6.sin6_addr.s6_addr[i]);
    return (unsigned)ln_mix(hash);
}

static int find_peer(const struct link_udp *u, const struct udp_address *a) {
    for (unsigned at = address_hash(a);;) {
        int found = peer_table_next(&u->table, &at);
        if (found < 0 || udp_address_equal(&u->address[found], a) ||
            udp_address_equal(&u->other[found], a))
            return found;
    }
}

/* ---- the link ---- */

static lossynet_status link_send(struct ln_link *link, int peer, const struct ln_datagram *batch,
                                 int count) {
    struct link_udp *u = (struct link_udp *)link;
    return udp_send(&u->socket, &u->address[peer], batch, count);
}

/* It does not ask the kernel again after some have come, since their memory would be reused. */
static int link_receive(struct ln_link *link, struct ln_arrival *arrivals) {
    struct link_udp *u = (struct link_udp *)link;
    uint8_t *bytes;
    size_t count;
    struct udp_address *from;
    int n = 0;
    while (n < LOSSYNET_BATCH && (n == 0 || !udp_empty(&u->socket)) &&
           udp_receive(&u->socket, &bytes, &count, &from)) {
        const int peer = find_peer(u, from);
        const int path = peer >= 0 && !udp_address_equal(&u->address[peer], from);
        arrivals[n++] = (struct ln_arrival){bytes, count, peer, path};
    }
    return n;
}

static int link_refused(struct ln_link *link) {
    struct link_udp *u = (struct link_udp *)link;
    struct udp_address by;
    while (udp_refused(&u->socket, &by)) {
        int peer = find_peer(u, &by);
        if (peer >= 0 && peer != u->world.rank) return peer;
    }
    return -1;
}

static void link_wait(struct ln_link *link, double seconds) {
    struct link_udp *u = (struct link_udp *)link;
    struct pollfd poll[2] = {{.fd = u->event, .events = POLLIN},
                             {.fd = u->socket.fd, .events = POLLIN}};
    struct timespec t = {(time_t)seconds, (long)((seconds - floor(seconds)) * 1e9)};
    if (!udp_empty(&u->socket) || ppoll(poll, 2, &t, NULL) <= 0) return;
    u->socket.errors |= (poll[1].revents & POLLERR) != 0;
    if (poll[0].revents) {
        uint64_t count;
        if (read(u->event, &count, sizeof count) < 0 && errno != EAGAIN)
            ln_log("eventfd refuses a read: %s", strerror(errno));
    }
}

static void link_wake(struct ln_link *link) {
    struct link_udp *u = (struct link_udp *)link;
    uint64_t one = 1;
    if (write(u->event, &one, sizeof one) < 0 && errno != EAGAIN)
        ln_log("eventfd refuses a write: %s", strerror(errno));
}

static uint64_t link_overruns(struct ln_link *link) {
    return udp_overruns(&((struct link_udp *)link)->socket);
}

static void link_close(struct ln_link *link) {
    struct link_udp *u = (struct link_udp *)link;
    if (u->event >= 0) close(u->event);
    udp_socket_close(&u->socket);
    peer_table_close(&u->table);
    free(u->other);
    free(u->address);
    free(u);
}

/* ---- the size of datagrams ---- */

/* Sends a TEST with `bytes` bytes of zeros. It also says whether the peer's test of full size has
 * come here. */
static void send_test(struct link_udp *u, int peer, const uint8_t *zeros, size_t bytes,
                      uint32_t round, bool heard) {
    const struct wire_header h = {.magic = WIRE_MAGIC,
                                  .version = WIRE_VERSION,
                                  .type = WIRE_TEST,
                                  .run = u->run,
                                  .sender = (uint16_t)u->world.rank,
                                  .receiver = (uint16_t)peer,
                                  .index = round,
                                  .packet = heard};
    struct ln_datagram test = {.payload = zeros, .length = bytes};
    wire_encode(test.header, &h);
    udp_send(&u->socket, &u->address[peer], &test, 1);
}

struct heard {        /* from a peer, in a round of tests */
    int small;        /* small datagrams that came */
    bool full, knows; /* one of full size came; the peer says that one of ours came there */
};

/* Notes the tests that have come. Returns whether any datagram has come. */
static bool hear(struct link_udp *u, struct heard *heard, size_t bytes, uint32_t round) {
    struct ln_arrival arrivals[LOSSYNET_BATCH];
    const int n = link_receive(&u->link, arrivals);
    for (int i = 0; i < n; i++) {
        struct wire_header h;
        const int peer = arrivals[i].peer;
        if (peer < 0 || arrivals[i].count < WIRE_HEADER_BYTES) continue;
        wire_decode(&h, arrivals[i].bytes, arrivals[i].count);
        if (h.magic != WIRE_MAGIC || h.type != WIRE_TEST || h.run != u->run || h.index != round)
            continue;
        heard[peer].full |= h.length == bytes;
        heard[peer].small += h.length == 0;
        heard[peer].knows |= h.packet != 0;
    }
    return n > 0;
}

/* Sends each peer datagrams with a payload of this size, and small ones, until those of full size
 * have come in both directions. Returns a peer from which only small ones came, or -1. If nothing
 * comes from a peer, that says nothing about the size. */
static int find_narrow(struct link_udp *u, struct heard *heard, const uint8_t *zeros, size_t bytes,
                       uint32_t round) {
    const int ranks = u->world.ranks;
    const double start = ln_now();
    double sent = 0;
    memset(heard, 0, (size_t)ranks * sizeof *heard);
    for (int open = 1; open > 0 && ln_now() < start + TEST_SECONDS;) {
        const bool sends = ln_now() > sent + TEST_PAUSE;
        if (sends) sent = ln_now();
        for (int i = 1; sends && i < ranks; i++) {
            const int peer = (u->world.rank + i) % ranks;
            send_test(u, peer, zeros, bytes, round, heard[peer].full);
            send_test(u, peer, NULL, 0, round, heard[peer].full);
        }
        if (!hear(u, heard, bytes, round)) link_wait(&u->link, TEST_PAUSE / 4);
        open = 0;
        for (int r = 0; r < ranks; r++)
            open += r != u->world.rank && !(heard[r].full && heard[r].knows);
    }
    int narrow = -1;
    for (int r = 0; r < ranks; r++) {
        if (r == u->world.rank) continue;
        if (heard[r].full) /* the peer may still wait to hear this */
            for (int i = 0; i < FAREWELLS; i++) send_test(u, r, NULL, 0, round, true);
        if (narrow < 0 && !heard[r].full && heard[r].small >= SURE) narrow = r;
    }
    return narrow;
}

/* Finds the largest payload that passes between all ranks, from `payload_most` down. (RFC 8899 does
 * so for one path.) The MTU of an interface limits what leaves a host. A tunnel on the way may take
 * less, and silently drop larger datagrams. */
static lossynet_status find_size(struct link_udp *u, const struct ln_link_settings *settings,
                                 size_t mtu, int family) {
    /* Ethernet; tunnels; the smallest MTU of IPv6; what every IPv4 host takes (RFC 791). */
    static const size_t smaller[] = {1500, 1400, 1280, 576};
    const size_t ranks = (size_t)u->world.ranks, wanted = u->link.features.payload_most;
    size_t bytes = wanted, next = 0;
    int from = -1, to = -1;
    int32_t *narrow = ln_memory_take(ranks, sizeof *narrow);
    struct heard *heard = ln_memory_take(ranks, sizeof *heard);
    uint8_t *zeros = ln_memory_take(wanted, 1);
    lossynet_status status = narrow && heard && zeros ? LOSSYNET_OK : LOSSYNET_NO_MEMORY;
    if (status) ln_log("rank %d: no memory to test datagrams of %zu bytes", u->world.rank, wanted);
    udp_socket_probe(&u->socket, true);
    for (uint32_t round = 1; !status; round++) {
        narrow[u->world.rank] = find_narrow(u, heard, zeros, bytes, round);
        status = ln_share(&u->world, narrow, sizeof *narrow);
        int r = 0;
        while (!status && r < u->world.ranks && narrow[r] < 0) r++;
        if (status || r == u->world.ranks) break;
        if (from < 0) from = narrow[r], to = r;
        while (next < sizeof smaller / sizeof *smaller &&
               udp_payload(smaller[next], family) >= bytes)
            next++;
        if (next == sizeof smaller / sizeof *smaller) break;
        bytes = udp_payload(smaller[next], family);
    }
    udp_socket_probe(&u->socket, false);
    free(zeros);
    free(heard);
    free(narrow);
    if (status || from < 0) return status;
    u->link.features.payload_most = bytes;
    const bool fits = settings->payload_bytes == 0;
    if (u->world.rank == 0 || !fits)
        ln_log("from rank %d to rank %d small datagrams come, and none with %zu bytes: the "
               "path's MTU is below the %zu of the interfaces. %s %zu bytes",
               from, to, wanted, mtu,
               fits ? "Packets of all ranks have at most"
                    : "Choose packets (packet_bytes) of at most",
               bytes);
    return fits ? LOSSYNET_OK : LOSSYNET_INVALID;
}

/* ---- open ---- */

struct card { /* exchanged between ranks at the start */
    struct udp_address address, other;
    uint64_t mtu;
};

static lossynet_status introduce(struct link_udp *u, const struct ln_link_settings *settings,
                                 const struct udp_address *mine, size_t mtu) {
    int ranks = u->world.ranks, rank = u->world.rank, family = mine->any.sa_family;
    struct card *cards = ln_memory_take((size_t)ranks, sizeof *cards);
    if (!cards)
        return ln_fail(LOSSYNET_NO_MEMORY, "rank %d: no memory for the addresses of %d ranks", rank,
                       ranks);
    cards[rank] = (struct card){*mine, udp_other_address(&u->socket, mine), mtu};
    lossynet_status status = ln_share(&u->world, cards, sizeof *cards);
    for (int r = 0; r < ranks && !status; r++) {
        u->address[r] = cards[r].address;
        u->other[r] = cards[r].other;
        if (cards[r].mtu < mtu) mtu = cards[r].mtu;
        if (cards[r].address.any.sa_family != family) {
            ln_log("rank %d and rank %d have no address family in common: choose another "
                   "interface",
                   rank, r);
            status = LOSSYNET_LINK;
        }
    }
    free(cards);
    if (status) return status;
    size_t room = udp_payload(mtu, family);
    if (settings->payload_bytes > room)
        return ln_refuse("packets of %zu bytes: expected at most %zu, which the MTU of %zu leaves",
                         settings->payload_bytes, room, mtu);
    u->link.features.payload_most =
        room < LOSSYNET_PAYLOAD_DEFAULT ? room : LOSSYNET_PAYLOAD_DEFAULT;
    if (settings->payload_bytes > u->link.features.payload_most)
        u->link.features.payload_most = settings->payload_bytes;
    for (int r = 0; r < u->world.ranks; r++)
        peer_table_add(&u->table, address_hash(&u->address[r]), r),
            peer_table_add(&u->table, address_hash(&u->other[r]), r);
    return LOSSYNET_OK;
}

size_t ln_link_udp_memory(int ranks, size_t payload_bytes) {
    (void)payload_bytes;
    return sizeof(struct link_udp) + 2 * (size_t)ranks * sizeof(struct udp_address) +
           peer_table_memory(ranks) + LOSSYNET_BATCH * UDP_BUFFER_BYTES;
}

lossynet_status ln_link_udp_open(const struct ln_link_settings *settings, struct ln_link **out) {
    *out = NULL;
    const struct lossynet_world *world = &settings->world;
    struct udp_interface interface;
    lossynet_status status =
        udp_choose(settings->network.interface, world->local_ranks == world->ranks, &interface);
    if (status) return status;
    struct link_udp *u = ln_memory_take(1, sizeof *u);
    if (!u) goto no_memory;
    u->world = *world;
    u->run = (uint32_t)settings->run;
    u->socket.fd = u->socket.other = -1;
    u->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    u->address = ln_memory_take((size_t)world->ranks, sizeof *u->address);
    u->other = ln_memory_take((size_t)world->ranks, sizeof *u->other);
    u->link = (struct ln_link){
        .name = "udp",
        .features.paths = 2,
        .memory_bytes = ln_link_udp_memory(world->ranks, 0),
        .send = link_send,
        .receive = link_receive,
        .wait = link_wait,
        .wake = link_wake,
        .refused = link_refused,
        .overruns = link_overruns,
        .close = link_close,
    };
    if (!peer_table_open(&u->table, world->ranks) || !u->address || !u->other || u->event < 0)
        goto close_link;
    struct udp_address mine = interface.address;
    status = udp_socket_open(&u->socket, &mine, settings->network.ports);
    u->socket.dscp = settings->network.dscp;
    if (!status && world->local_rank == 0 && settings->network.threads > 0)
        udp_socket_tell(&u->socket); /* once for a host */
    if (!status) status = introduce(u, settings, &mine, interface.mtu);
    if (!status && world->local_ranks < world->ranks) /* within a host the interface's MTU holds */
        status = find_size(u, settings, interface.mtu, mine.any.sa_family);
    if (status) {
        link_close(&u->link);
        return status;
    }
    /* The kernel counts about so many bytes for a datagram. */
    size_t packet = 2 * (u->link.features.payload_most + WIRE_HEADER_BYTES) + 1024;
    u->link.features.receive_queue = (int)(u->socket.granted / packet);
    u->link.features.queue_setting = u->socket.setting;
    u->link.features.queue_bytes = packet / 2; /* the kernel grants twice the setting */
    prctl(PR_SET_TIMERSLACK, 1000);            /* nanoseconds, so that sleeps end in time */
    *out = &u->link;
    return LOSSYNET_OK;
close_link:
    link_close(&u->link);
no_memory:
    return ln_fail(LOSSYNET_NO_MEMORY, "rank %d: no memory for %d peers", world->rank,
                   world->ranks);
}
