/* verbs.h — an RDMA port and a queue pair, for verbs.c.
 *
 *     verbs_port.c    devices, ports, GIDs and counters
 *     verbs_queue.c   one Unreliable Datagram queue pair (UD), which sends and receives batches
 *
 * Neither knows other ranks. In comments "IBA" is the InfiniBand Architecture Specification, volume
 * 1; its annex A17 is RoCE v2.
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
    bool ethernet; /* RoCE, which finds peers by GID; else InfiniBand, which finds them by LID */
    bool ipv4;     /* RoCE v2 over IPv4: arrivals have the IP header at byte 20 */
    int gid_index;
    union ibv_gid gid;
    uint16_t lid;
    size_t mtu;        /* bytes that a datagram holds: 256 ... 4096 */
    uint64_t overruns; /* the sum of the counters when the port was opened */
};

/* Opens the port that `interface` names:
 *
 *     DEVICE[:PORT[:GID_INDEX]][,...]     mlx5_0    mlx5_0:1:3    mlx5_0,mlx5_1
 *
 * If it names several ports, the ranks of one host take them in turn. NULL: the first active port.
 * Without GID_INDEX it takes, on Ethernet, preferably a GID of RoCE v2 over IPv4, and on InfiniBand
 * GID 0. If it fails, it logs one line that lists all ports. */
lossynet_status verbs_port_open(const char *interface, int local_rank, struct verbs_port *port);
void verbs_port_close(struct verbs_port *port); /* the port need not be open */

/* Returns how many datagrams the port has dropped since open because a receive queue was full. The
 * port's counters count for all programs that use it. Returns 0 if it has no such counter. */
uint64_t verbs_port_overruns(const struct verbs_port *port);

/* Writes a GID as text, like "10.9.8.1" or "fe80::1". */
enum { VERBS_GID_TEXT = 48 };
const char *verbs_gid_text(const union ibv_gid *gid, char text[VERBS_GID_TEXT]);

/* ---- queue pair ---- */

struct verbs_address { /* of a receiver */
    struct ibv_ah *ah;
    uint32_t qpn;
    struct ibv_ah *bulk; /* with the traffic class of DATA; may be the same */
};

struct verbs_region { /* memory that the adapter may read */
    const uint8_t *start;
    size_t bytes;
    struct ibv_mr *mr;
};

struct verbs_incoming { /* a datagram that has come */
    uint8_t *bytes;
    size_t count;
    union ibv_gid gid; /* of the sender, if has_gid; else `lid` is valid */
    uint32_t qpn;
    uint16_t lid;
    bool has_gid;
};

enum { VERBS_REGIONS = 1024 }; /* enough for a group: a part of each bucket per other group */

struct verbs_tx {
    struct ibv_cq *cq;
    uint64_t posted, completed; /* counts of sends; send i uses staging slot i modulo size */
    bool stuck;                 /* sends do not complete: the port does not send */
    unsigned size;              /* of the send queue */
    size_t slot;                /* bytes */
    uint8_t *staging;           /* [size][slot]: header, and the payload if it is copied */
    struct ibv_mr *mr;          /* of staging */
    struct verbs_region regions[VERBS_REGIONS]; /* sorted by address; they do not overlap */
    int region_count;
};

struct verbs_rx {
    struct ibv_cq *cq;
    int size;                        /* of the receive queue */
    size_t slot;                     /* bytes */
    uint8_t *slots;                  /* [size][slot]: GRH, header, payload */
    struct ibv_mr *mr;               /* of slots */
    int *spare, spares;              /* slots that can be posted */
    int lent[LOSSYNET_BATCH], lents; /* slots that the caller is reading */
    struct ibv_wc wc[LOSSYNET_BATCH];
    int polled; /* completions in wc that verbs_queue_wait has found */
    struct verbs_incoming in[LOSSYNET_BATCH];
};

struct verbs_queue {
    struct verbs_port port; /* open */
    int rank;               /* for messages */
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_qp *qp;
    uint32_t qkey;
    bool failed; /* it has failed for good, and a line was logged */
    size_t memory_bytes;
    struct verbs_tx tx;
    struct verbs_rx rx;
    bool armed;    /* the channel will report the next completion of a receive */
    int wake;      /* an eventfd */
    uint64_t said; /* bit t: an event of type t was logged */
};

/* Returns the bytes that a queue pair holds on a port of this MTU, unless the device allows
 * less. */
size_t verbs_queue_memory(size_t mtu);

/* Makes the queue pair and posts its receives. The caller has set `port` and `rank`, and the rest
 * is 0. On failure one line has been logged, except for LOSSYNET_NO_MEMORY, and the caller must
 * close the queue. */
lossynet_status verbs_queue_open(struct verbs_queue *q, uint32_t qkey);
void verbs_queue_close(struct verbs_queue *q); /* does not close the port */

/* Makes the address handles. `attr` is for the default class, and `dscp` is the class of bulk
 * datagrams. If the network has no path, it sets errno and returns false. */
bool verbs_address_open(struct verbs_address *a, struct ibv_pd *pd, struct ibv_ah_attr attr,
                        int dscp);
void verbs_address_close(struct verbs_address *a);
/* Returns the attributes of the handle for bulk datagrams. */
struct ibv_ah_attr verbs_bulk(struct ibv_ah_attr attr, int dscp);

/* Waits until everything that was sent has left, or cannot leave. Call it before payloads in
 * registered memory change, and before an address handle is destroyed that was used. */
void verbs_queue_flush(struct verbs_queue *q);

/* Sends at most LOSSYNET_BATCH datagrams. When it returns, the caller may reuse their memory,
 * except payloads in registered memory. While the port does not send, datagrams are lost. Lengths
 * are not checked: a datagram that is larger than the MTU is lost silently. */
lossynet_status verbs_queue_send(struct verbs_queue *q, const struct verbs_address *to,
                                 const struct ln_datagram *batch, int count);

/* Takes up to LOSSYNET_BATCH datagrams that have come into `in`, and returns their number. They are
 * valid until the next call. Does not wait. */
int verbs_queue_receive(struct verbs_queue *q);

/* Do what link.h says. Registered memory must not be freed before close. */
void verbs_queue_wait(struct verbs_queue *q, double seconds);
void verbs_queue_wake(struct verbs_queue *q);
bool verbs_queue_register(struct verbs_queue *q, const void *memory, size_t bytes);

#endif
