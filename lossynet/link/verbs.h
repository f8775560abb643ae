/* verbs.h — an RDMA port and a queue pair as verbs.c needs them.
 *
 *     verbs_port.c    devices, ports, GIDs, counters, and what a group needs outside of verbs
 *     verbs_queue.c   one Unreliable Datagram queue pair (UD): batches out, batches in
 *
 * Neither knows of ranks. "IBA" is the InfiniBand Architecture Specification, volume 1; its annex
 * A17 is RoCE v2.
 */
#ifndef LOSSYNET_VERBS_H
#define LOSSYNET_VERBS_H

#include "lossynet/link/link.h"

#include <infiniband/verbs.h>

/* ---- port ---- */

struct verbs_port {
    struct ibv_context *context;
    struct ibv_device_attr limits;
    char name[IBV_SYSFS_NAME_MAX + 16]; /* "mlx5_0:1", for messages */
    uint8_t number;
    bool ethernet; /* RoCE: peers are found by GID. Else InfiniBand, where they are by LID */
    bool ipv4;     /* RoCE v2 over IPv4: what comes begins with its IP header at byte 20 */
    int gid_index;
    union ibv_gid gid;
    uint32_t interface; /* index of the network interface that the GID belongs to; 0: none */
    uint16_t lid;
    size_t mtu;        /* bytes that a datagram holds: 256 ... 4096 */
    uint64_t overruns; /* the counters' sum when it was opened */
};

/* Opens the port that `interface` names:
 *
 *     DEVICE[:PORT[:GID_INDEX]][,...]     mlx5_0    mlx5_0:1:3    mlx5_0,mlx5_1
 *
 * Of several, the ranks of one host take one after the other. NULL: the first port that is active.
 * Without GID_INDEX: on Ethernet RoCE v2 over IPv4 where there is one, on InfiniBand 0. Logs one
 * line with all ports that there are when it fails. */
lossynet_status verbs_port_open(const char *interface, int local_rank, struct verbs_port *port);
void verbs_port_close(struct verbs_port *port); /* one that is not open is fine */

/* Datagrams that the port has dropped since open because a receive queue was full: what its
 * counters say, which is for all programs that use the port. 0 where it has no such counter. */
uint64_t verbs_port_overruns(const struct verbs_port *port);

/* "10.9.8.1", "fe80::1" */
enum { VERBS_GID_TEXT = 48 };
const char *verbs_gid_text(const union ibv_gid *gid, char text[VERBS_GID_TEXT]);

/* The group of a run: 239.192.0.0/14 (RFC 2365) or ff18::/16 (RFC 4291), by the kind of the port's
 * GID. */
union ibv_gid verbs_group(const struct verbs_port *port, uint64_t run);

/* RoCE: has the network interface join the IP group, or switches would not send it here. Returns a
 * socket; the group is left when it is closed. -1: errno says why not. */
int verbs_group_join(const struct verbs_port *port, const union ibv_gid *group);

/* ---- queue pair ---- */

struct verbs_address { /* whom to send to */
    struct ibv_ah *ah;
    uint32_t qpn;
    struct ibv_ah *bulk; /* of DATA's class; may be the same */
};

struct verbs_region { /* memory that the adapter may read */
    const uint8_t *start;
    size_t bytes;
    struct ibv_mr *mr;
};

struct verbs_incoming { /* a datagram that came */
    uint8_t *bytes;
    size_t count;
    union ibv_gid gid; /* of the sender, where has_gid; else its LID */
    uint32_t qpn;
    uint16_t lid;
    bool has_gid;
};

enum { VERBS_REGIONS = 1024 }; /* of a group, a part of each bucket for each other group */

struct verbs_tx {
    struct ibv_cq *cq;
    uint64_t posted, completed; /* sends; number i has staging slot i modulo size */
    bool stuck;                 /* they do not complete: the port does not send */
    unsigned size;              /* of the send queue */
    size_t slot;                /* bytes */
    uint8_t *staging;           /* [size][slot]: header, and payload if it is copied */
    struct ibv_mr *mr;          /* of staging */
    struct verbs_region regions[VERBS_REGIONS]; /* by address; they do not overlap */
    int region_count;
};

struct verbs_rx {
    struct ibv_cq *cq;
    int size;                        /* of the receive queue */
    size_t slot;                     /* bytes */
    uint8_t *slots;                  /* [size][slot]: GRH, header, payload */
    struct ibv_mr *mr;               /* of slots */
    int *spare, spares;              /* slots to post */
    int lent[LOSSYNET_BATCH], lents; /* slots that the caller looks at */
    struct ibv_wc wc[LOSSYNET_BATCH];
    int polled; /* in wc, by wait */
    struct verbs_incoming in[LOSSYNET_BATCH];
};

struct verbs_queue {
    struct verbs_port port; /* open */
    int rank;               /* for messages */
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_qp *qp;
    uint32_t qkey;
    bool failed; /* said, and over */
    size_t memory_bytes;
    struct verbs_tx tx;
    struct verbs_rx rx;
    bool armed; /* the channel will tell of the next completion of a receive */
    int wake;
    uint64_t said; /* bit t: an event of type t was logged */
};

/* Memory that a queue pair holds on a port of this MTU, unless the device allows less. */
size_t verbs_queue_memory(size_t mtu);

/* Makes the queue pair and posts its receives; `port` and `rank` are set, the rest is 0. On failure
 * one line has been logged, except for LOSSYNET_NO_MEMORY, and close is due. */
lossynet_status verbs_queue_open(struct verbs_queue *q, uint32_t qkey);
void verbs_queue_close(struct verbs_queue *q); /* not the port */

/* Makes the address's handles: `attr` is of the default class, `dscp` the class of bulk datagrams.
 * False, with errno, when the network knows no way. */
bool verbs_address_open(struct verbs_address *a, struct ibv_pd *pd, struct ibv_ah_attr attr,
                        int dscp);
void verbs_address_close(struct verbs_address *a);
/* What a handle for bulk datagrams has instead. */
struct ibv_ah_attr verbs_bulk(struct ibv_ah_attr attr, int dscp);

/* Returns when all that was sent has left, or cannot. Before payloads in registered memory change,
 * and before an address handle that was sent to is destroyed. */
void verbs_queue_flush(struct verbs_queue *q);

/* Sends at most LOSSYNET_BATCH datagrams; when it returns their memory is free again, but for
 * payloads in registered memory. While the port does not send they are lost. Lengths are not
 * checked: what is larger than the MTU vanishes. */
lossynet_status verbs_queue_send(struct verbs_queue *q, const struct verbs_address *to,
                                 const struct lossynet_datagram *batch, int count);

/* Takes what has come into `in`, up to LOSSYNET_BATCH, valid until the next call. Does not wait. */
int verbs_queue_receive(struct verbs_queue *q);

/* See link.h. Registered memory stays where it is until close. */
void verbs_queue_wait(struct verbs_queue *q, double seconds);
void verbs_queue_wake(struct verbs_queue *q);
bool verbs_queue_register(struct verbs_queue *q, const void *memory, size_t bytes,
                          const struct lossynet_device_memory *device);

lossynet_status verbs_queue_broken(struct verbs_queue *q, const char *what, const char *why);

#endif
