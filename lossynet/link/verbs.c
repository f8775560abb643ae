/* verbs.c — the link over RDMA (InfiniBand, RoCE), with one UD queue pair per rank.
 *
 * The queue pair and its buffers are in verbs_queue.c, and the port is in verbs_port.c (verbs.h).
 * This file connects the ranks. At open each rank tells the others its address, and learns how
 * large a datagram between any two ranks may be. It makes one address handle per peer, for which
 * the network may need time (ARP). Then a table finds the rank that sent a datagram, by the
 * sender's queue pair number and GID, or LID.
 */
#include "lossynet/link/link.h"

#ifdef LOSSYNET_VERBS
#include "lossynet/link/peer_table.h"
#include "lossynet/link/verbs.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MTU_MOST = 4096 }; /* IBA 7.2.1 */

struct peer {
    struct verbs_address address;
    union ibv_gid gid;
    uint16_t lid;
};

struct link_verbs {
    struct ln_link link; /* first: a link is its address */
    struct ln_link_settings settings;
    struct verbs_queue queue;
    struct peer *peers;      /* [ranks] */
    struct peer_table table; /* by GID, and over InfiniBand by LID too */
};

/* ---- peers by address ---- */

static unsigned hash_gid(uint32_t qpn, const union ibv_gid *gid) {
    uint64_t tail;
    memcpy(&tail, gid->raw + 8, sizeof tail);
    return (unsigned)ln_mix(tail ^ ln_mix(qpn));
}

static unsigned hash_lid(uint32_t qpn, uint16_t lid) {
    return (unsigned)ln_mix((uint64_t)lid << 32 ^ qpn);
}

static void fill_table(struct link_verbs *v) {
    for (int r = 0; r < v->settings.world.ranks; r++) {
        const struct peer *p = &v->peers[r];
        peer_table_add(&v->table, hash_gid(p->address.qpn, &p->gid), r);
        if (!v->queue.port.ethernet) peer_table_add(&v->table, hash_lid(p->address.qpn, p->lid), r);
    }
}

/* Returns the rank that sent a datagram, or -1 for a stranger. */
static int find_sender(const struct link_verbs *v, const struct verbs_incoming *in) {
    unsigned at = in->has_gid ? hash_gid(in->qpn, &in->gid) : hash_lid(in->qpn, in->lid);
    for (;;) {
        int found = peer_table_next(&v->table, &at);
        if (found < 0) return -1;
        const struct peer *p = &v->peers[found];
        bool same = in->has_gid ? memcmp(&p->gid, &in->gid, sizeof p->gid) == 0 : p->lid == in->lid;
        if (same && p->address.qpn == in->qpn) return found;
    }
}

/* ---- agreement at open ---- */

struct obstacle {  /* why a rank cannot go on; all ranks get it */
    char why[120]; /* empty: it can */
};

/* ---- the functions of link.h ---- */

static lossynet_status link_send(struct ln_link *link, int peer, const struct ln_datagram *batch,
                                 int count) {
    struct link_verbs *v = (struct link_verbs *)link;
    for (int i = 0; i < count; i++) {
        if (batch[i].length <= link->features.payload_most) continue;
        return ln_refuse(
            "rank %d, peer rank %d: a payload of %zu bytes: expected at most %zu, which "
            "the path's MTU leaves",
            v->settings.world.rank, peer, batch[i].length, link->features.payload_most);
    }
    return verbs_queue_send(&v->queue, &v->peers[peer].address, batch, count);
}

static int link_receive(struct ln_link *link, struct ln_arrival *arrivals) {
    struct link_verbs *v = (struct link_verbs *)link;
    const int n = verbs_queue_receive(&v->queue);
    for (int i = 0; i < n; i++) {
        const struct verbs_incoming *in = &v->queue.rx.in[i];
        arrivals[i] = (struct ln_arrival){in->bytes, in->count, find_sender(v, in), 0};
    }
    return n;
}

static void link_wait(struct ln_link *link, double seconds) {
    verbs_queue_wait(&((struct link_verbs *)link)->queue, seconds);
}

static void link_wake(struct ln_link *link) {
    verbs_queue_wake(&((struct link_verbs *)link)->queue);
}

static bool link_register(struct ln_link *link, const void *memory, size_t bytes) {
    return verbs_queue_register(&((struct link_verbs *)link)->queue, memory, bytes);
}

static void link_settle(struct ln_link *link) {
    verbs_queue_flush(&((struct link_verbs *)link)->queue);
}

static uint64_t link_overruns(struct ln_link *link) {
    return verbs_port_overruns(&((struct link_verbs *)link)->queue.port);
}

static void link_close(struct ln_link *link) {
    struct link_verbs *v = (struct link_verbs *)link;
    verbs_queue_flush(&v->queue);
    for (int r = 0; v->peers && r < v->settings.world.ranks; r++)
        verbs_address_close(&v->peers[r].address);
    verbs_queue_close(&v->queue);
    verbs_port_close(&v->queue.port);
    peer_table_close(&v->table);
    free(v->peers);
    free(v);
}

/* ---- open ---- */

struct card { /* exchanged between ranks at the start */
    union ibv_gid gid;
    uint32_t qpn, mtu;
    uint16_t lid;
    bool opened, ethernet, ipv4;
};

/* Opens the port and the queue pair of this rank, without the others. */
static lossynet_status open_queue(struct link_verbs *v) {
    const struct lossynet_world *world = &v->settings.world;
    lossynet_status status =
        verbs_port_open(v->settings.network.interface, world->local_rank, &v->queue.port);
    v->queue.rank = world->rank;
    if (status) return status;
    /* The qkey is the same on all ranks. If its high bit were set in a send request, the adapter
     * would use the queue pair's own qkey instead (IBA 10.2.5). */
    return verbs_queue_open(&v->queue, (uint32_t)ln_mix(v->settings.run) & 0x7fffffff);
}

/* Returns why two ranks cannot reach each other, or NULL. */
static const char *misfit(const struct card *a, const struct card *b) {
    if (a->ethernet != b->ethernet) return "one is on Ethernet, the other on InfiniBand";
    if (a->ipv4 != b->ipv4) return "one has a GID for RoCE v2 over IPv4, the other has not";
    return NULL;
}

static lossynet_status read_cards(struct link_verbs *v, const struct card *cards) {
    const struct lossynet_world *world = &v->settings.world;
    size_t mtu = MTU_MOST;
    for (int r = 0; r < world->ranks; r++) {
        if (!cards[r].opened)
            return ln_fail(LOSSYNET_LINK, "rank %d: rank %d has no RDMA port: see its message",
                           world->rank, r);
        const char *why = misfit(&cards[0], &cards[r]);
        if (why)
            return ln_fail(LOSSYNET_LINK,
                           "the RDMA ports of ranks 0 and %d do not fit: %s: choose another "
                           "interface, DEVICE:PORT:GID_INDEX",
                           r, why);
        if (cards[r].mtu < mtu) mtu = cards[r].mtu;
        v->peers[r].gid = cards[r].gid;
        v->peers[r].lid = cards[r].lid;
        v->peers[r].address.qpn = cards[r].qpn;
    }
    v->link.features.payload_most = (mtu - WIRE_HEADER_BYTES) / 4 * 4;
    if (v->settings.payload_bytes <= v->link.features.payload_most) return LOSSYNET_OK;
    return ln_refuse("packets of %zu bytes: expected at most %zu, which the RDMA MTU of %zu leaves",
                     v->settings.payload_bytes, v->link.features.payload_most, mtu);
}

/* Exchanges the cards of all ranks. A rank that failed takes part too, so that no rank waits for
 * it. */
static lossynet_status introduce(struct link_verbs *v, lossynet_status status) {
    const struct lossynet_world *world = &v->settings.world;
    const struct verbs_port *port = &v->queue.port;
    struct card *cards = ln_memory_take((size_t)world->ranks, sizeof *cards);
    if (!cards) return LOSSYNET_NO_MEMORY;
    if (!status)
        cards[world->rank] = (struct card){.gid = port->gid,
                                           .qpn = v->queue.qp->qp_num,
                                           .mtu = (uint32_t)port->mtu,
                                           .lid = port->lid,
                                           .opened = true,
                                           .ethernet = port->ethernet,
                                           .ipv4 = port->ipv4};
    lossynet_status shared = ln_share(world, cards, sizeof *cards);
    if (!status) status = shared;
    if (!status) status = read_cards(v, cards);
    free(cards);
    return status;
}

/* Makes the address handles. It begins with the next rank, so that not all ranks ask the same one
 * at once. */
static void find_paths(struct link_verbs *v, struct obstacle *mine) {
    const struct verbs_port *port = &v->queue.port;
    int ranks = v->settings.world.ranks;
    for (int d = 1; d < ranks; d++) {
        int r = (v->settings.world.rank + d) % ranks;
        struct peer *p = &v->peers[r];
        bool routed = memcmp(p->gid.raw, port->gid.raw, 8) != 0; /* to another InfiniBand subnet */
        struct ibv_ah_attr attr = {
            .is_global = port->ethernet || routed,
            .port_num = port->number,
            .dlid = p->lid,
            .grh = {.dgid = p->gid, .sgid_index = (uint8_t)port->gid_index, .hop_limit = 64}};
        if (verbs_address_open(&p->address, v->queue.pd, attr, v->settings.network.dscp)) continue;
        char gid[VERBS_GID_TEXT];
        snprintf(mine->why, sizeof mine->why, "no path to rank %d, %s: %s", r,
                 verbs_gid_text(&p->gid, gid), strerror(errno));
        return;
    }
}

/* Connects the ranks after open_queue, which has returned `status`. Collective. */
static lossynet_status connect_ranks(struct link_verbs *v, lossynet_status status,
                                     struct obstacle *all) {
    const struct lossynet_world *world = &v->settings.world;
    status = introduce(v, status);
    if (status) return status;
    fill_table(v);
    find_paths(v, &all[world->rank]);
    status = ln_share(world, all, sizeof *all);
    for (int r = 0; r < world->ranks && !status; r++)
        if (all[r].why[0])
            status =
                ln_fail(LOSSYNET_LINK, "rank %d: RDMA: rank %d has %s", world->rank, r, all[r].why);
    return status;
}

lossynet_status ln_link_verbs_open(const struct ln_link_settings *settings, struct ln_link **out) {
    *out = NULL;
    size_t ranks = (size_t)settings->world.ranks;
    lossynet_status status = LOSSYNET_NO_MEMORY;
    struct obstacle *all = ln_memory_take(ranks, sizeof *all);
    struct link_verbs *v = ln_memory_take(1, sizeof *v);
    if (!v || !all) goto free_memory;
    v->settings = *settings;
    v->peers = ln_memory_take(ranks, sizeof *v->peers);
    if (!peer_table_open(&v->table, settings->world.ranks) || !v->peers) goto close_link;
    v->link = (struct ln_link){
        .name = "verbs",
        .send = link_send,
        .receive = link_receive,
        .wait = link_wait,
        .wake = link_wake,
        .register_memory = link_register,
        .settle = link_settle,
        .overruns = link_overruns,
        .close = link_close,
    };
    status = connect_ranks(v, open_queue(v), all);
    if (status) goto close_link;
    v->link.features.receive_queue = v->queue.rx.size;
    v->link.memory_bytes = sizeof *v + ranks * sizeof *v->peers +
                           peer_table_memory(settings->world.ranks) + v->queue.memory_bytes;
    *out = &v->link;
    v = NULL;
close_link:
    if (v) link_close(&v->link);
    v = NULL;
free_memory:
    if (status == LOSSYNET_NO_MEMORY)
        ln_log("rank %d: no memory for an RDMA link of %zu ranks", settings->world.rank, ranks);
    free(v);
    free(all);
    return status;
}

size_t ln_link_verbs_memory(int ranks, size_t payload_bytes) {
    (void)payload_bytes; /* buffers hold the whole MTU: a longer datagram would break the queue */
    return sizeof(struct link_verbs) + (size_t)ranks * sizeof(struct peer) +
           peer_table_memory(ranks) + verbs_queue_memory(MTU_MOST);
}

#else

lossynet_status ln_link_verbs_open(const struct ln_link_settings *settings, struct ln_link **out) {
    (void)settings;
    *out = NULL;
    return ln_fail(
        LOSSYNET_LINK,
        "link verbs, but this program was built without RDMA: install libibverbs-dev and "
        "build again");
}

size_t ln_link_verbs_memory(int ranks, size_t payload_bytes) {
    (void)ranks, (void)payload_bytes;
    return 0;
}

bool ln_link_verbs_available(void) {
    return false;
}

#endif
