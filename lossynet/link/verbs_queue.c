/* verbs_queue.c — sends and receives batches over one UD queue pair (Unreliable Datagram): verbs.h.
 *
 * Sending: header and payload are parts of one work request. The header is copied to a slot of
 * registered memory. The payload is copied behind it, unless it lies in memory that the caller has
 * registered; then the adapter reads it in place, some time later. In a batch the last send, and
 * every 32nd, asks for a completion.
 *
 * Receiving: buffers are posted for as many datagrams as may come in a burst. Buffers that the
 * caller has read go back to the adapter, many at once.
 *
 * Neither side learns of a loss. A datagram is lost silently, and its send completes without an
 * error, if it is larger than the path's MTU, if its qkey is wrong, or if no receive is posted.
 *
 * An arrival begins with 40 bytes for a GRH, even if the datagram had none (IBA 11.4.1.2). For RoCE
 * v2 over IPv4 the last 20 of these bytes are the IP header, and the first 20 are undefined
 * (A17.4.5.2).
 *
 * Payloads lie in host memory, which is pinned if a GPU copies them there.
 */
#ifdef LOSSYNET_VERBS
#include "lossynet/link/verbs.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum {
    GRH_BYTES = 40,
    HEADER_AT = 64, /* our header in a receive slot: aligned, with room for the GRH before it */
    SENDS = 512,
    SENDS_LEAST = 2 * LOSSYNET_BATCH,
    RECEIVES = 8192,
    RECEIVE_BYTES = 32 << 20,
    SIGNAL = 32,  /* sends per completion */
    REFILL = 32,  /* least receives posted at once, if there is no wait in between */
    SPINS = 256,  /* polls before we give the processor away */
    POLLS = 1000, /* and so many more, on a busy machine, before a device is stuck */
};

/* After so many seconds and POLLS without a completion we no longer wait for sends: a port without a
 * cable keeps them. The same holds while the link closes. */
static const double STUCK = 0.1;

/* Marks the queue as failed, and logs one line the first time. Returns LOSSYNET_LINK. */
static lossynet_status broken(struct verbs_queue *q, const char *what, const char *why) {
    if (!q->failed) ln_log("rank %d, RDMA port %s: %s: %s", q->rank, q->port.name, what, why);
    q->failed = true;
    return LOSSYNET_LINK;
}

/* ---- receiving ---- */

static void refill(struct verbs_queue *q) {
    while (q->rx.spares > 0 && !q->failed) {
        struct ibv_recv_wr wr[LOSSYNET_BATCH], *bad;
        struct ibv_sge part[LOSSYNET_BATCH];
        int n = q->rx.spares < LOSSYNET_BATCH ? q->rx.spares : LOSSYNET_BATCH;
        for (int i = 0; i < n; i++) {
            int slot = q->rx.spare[--q->rx.spares];
            uint8_t *at = q->rx.slots + (size_t)slot * q->rx.slot + HEADER_AT - GRH_BYTES;
            part[i] = (struct ibv_sge){.addr = (uintptr_t)at,
                                       .length = (uint32_t)(q->rx.slot - HEADER_AT + GRH_BYTES),
                                       .lkey = q->rx.mr->lkey};
            wr[i] = (struct ibv_recv_wr){.wr_id = (uint64_t)slot,
                                         .next = i + 1 < n ? &wr[i + 1] : NULL,
                                         .sg_list = &part[i],
                                         .num_sge = 1};
        }
        int code = ibv_post_recv(q->qp, wr, &bad);
        if (code) broken(q, "ibv_post_recv", strerror(code));
    }
}

static int poll_receives(struct verbs_queue *q) {
    int n = ibv_poll_cq(q->rx.cq, LOSSYNET_BATCH, q->rx.wc);
    if (n < 0) broken(q, "ibv_poll_cq", "the completion queue has failed");
    return n > 0 ? n : 0;
}

static struct verbs_incoming look(const struct verbs_queue *q, const struct ibv_wc *wc) {
    uint8_t *bytes = q->rx.slots + wc->wr_id * q->rx.slot + HEADER_AT;
    const uint8_t *grh = bytes - GRH_BYTES;
    struct verbs_incoming in = {.bytes = bytes,
                                .count = wc->byte_len > GRH_BYTES ? wc->byte_len - GRH_BYTES : 0,
                                .qpn = wc->src_qp,
                                .lid = wc->slid,
                                .has_gid = q->port.ethernet || wc->wc_flags & IBV_WC_GRH};
    if (q->port.ipv4) {
        in.gid.raw[10] = in.gid.raw[11] = 0xff;
        memcpy(in.gid.raw + 12, grh + 20 + 12, 4); /* source address of the IP header */
    } else {
        memcpy(in.gid.raw, grh + 8, 16);
    }
    return in;
}

int verbs_queue_receive(struct verbs_queue *q) {
    while (q->rx.lents > 0) q->rx.spare[q->rx.spares++] = q->rx.lent[--q->rx.lents];
    if (q->rx.spares >= REFILL) refill(q);
    int n = q->rx.polled ? q->rx.polled : poll_receives(q), count = 0;
    q->rx.polled = 0;
    if (n == 0) refill(q);
    for (int i = 0; i < n; i++) {
        q->rx.lent[q->rx.lents++] = (int)q->rx.wc[i].wr_id;
        if (q->rx.wc[i].status == IBV_WC_SUCCESS)
            q->rx.in[count++] = look(q, &q->rx.wc[i]);
        else
            broken(q, "a receive failed", ibv_wc_status_str(q->rx.wc[i].status));
    }
    return count;
}

/* ---- waiting ---- */

/* Takes the asynchronous events of the device, which report errors and changes of the port. */
static void take_events(struct verbs_queue *q) {
    struct ibv_async_event event;
    while (ibv_get_async_event(q->port.context, &event) == 0) {
        enum ibv_event_type type = event.event_type;
        ibv_ack_async_event(&event);
        switch (type) {
        case IBV_EVENT_CQ_ERR:
        case IBV_EVENT_QP_FATAL:
        case IBV_EVENT_QP_REQ_ERR:
        case IBV_EVENT_QP_ACCESS_ERR:
        case IBV_EVENT_DEVICE_FATAL:
            broken(q, "the device reports", ibv_event_type_str(type));
            break;
        case IBV_EVENT_PORT_ERR:
        case IBV_EVENT_PORT_ACTIVE:
        case IBV_EVENT_LID_CHANGE:
        case IBV_EVENT_GID_CHANGE:
            if (!(q->said >> type & 1))
                ln_log("rank %d, RDMA port %s: the device reports: %s (said once)", q->rank,
                       q->port.name, ibv_event_type_str(type));
            q->said |= (uint64_t)1 << type;
            break;
        default:
            break;
        }
    }
}

void verbs_queue_wait(struct verbs_queue *q, double seconds) {
    if (q->rx.polled || q->failed || seconds <= 0) return;
    refill(q);
    if (!q->armed) {
        int code = ibv_req_notify_cq(q->rx.cq, 0);
        if (code) broken(q, "ibv_req_notify_cq", strerror(code));
        q->armed = true;
    }
    q->rx.polled = poll_receives(q); /* what came before q->armed wakes nobody */
    if (q->rx.polled || q->failed) return;
    struct pollfd poll_for[3] = {{.fd = q->channel->fd, .events = POLLIN},
                                 {.fd = q->wake, .events = POLLIN},
                                 {.fd = q->port.context->async_fd, .events = POLLIN}};
    struct timespec t = {(time_t)seconds, (long)((seconds - floor(seconds)) * 1e9)};
    if (ppoll(poll_for, 3, &t, NULL) <= 0) return;
    struct ibv_cq *cq;
    void *context;
    uint64_t count;
    if (poll_for[0].revents && ibv_get_cq_event(q->channel, &cq, &context) == 0) {
        ibv_ack_cq_events(cq, 1);
        q->armed = false;
    }
    if (poll_for[2].revents) take_events(q);
    if (poll_for[1].revents && read(q->wake, &count, sizeof count) < 0) return; /* already read */
}

void verbs_queue_wake(struct verbs_queue *q) {
    uint64_t one = 1;
    if (write(q->wake, &one, sizeof one) < 0) return; /* the counter is full: it wakes anyway */
}

/* ---- addresses ---- */

struct ibv_ah_attr verbs_bulk(struct ibv_ah_attr attr, int dscp) {
    attr.grh.traffic_class = (uint8_t)(dscp << 2); /* RoCE v2: for the IP header (A17.4.3.1) */
    attr.sl = (uint8_t)ln_service_level(dscp);
    return attr;
}

bool verbs_address_open(struct verbs_address *a, struct ibv_pd *pd, struct ibv_ah_attr attr,
                        int dscp) {
    struct ibv_ah_attr bulk = verbs_bulk(attr, dscp);
    a->ah = ibv_create_ah(pd, &attr);
    a->bulk = a->ah && dscp ? ibv_create_ah(pd, &bulk) : a->ah;
    return a->bulk;
}

void verbs_address_close(struct verbs_address *a) {
    if (a->bulk && a->bulk != a->ah) ibv_destroy_ah(a->bulk);
    if (a->ah) ibv_destroy_ah(a->ah);
    a->ah = a->bulk = NULL;
}

/* ---- sending ---- */

/* Returns how many regions begin at `at` or before. */
static int regions_until(const struct verbs_queue *q, const uint8_t *at) {
    int low = 0, high = q->tx.region_count;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (q->tx.regions[middle].start <= at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static const struct verbs_region *find_region(const struct verbs_queue *q, const void *payload,
                                              size_t bytes) {
    const uint8_t *at = (const uint8_t *)payload;
    const int until = regions_until(q, at);
    if (until == 0) return NULL;
    const struct verbs_region *r = &q->tx.regions[until - 1];
    return bytes <= r->bytes && (size_t)(at - r->start) <= r->bytes - bytes ? r : NULL;
}

static void add_region(struct verbs_queue *q, struct verbs_region region) {
    const int at = regions_until(q, region.start);
    struct verbs_region *r = q->tx.regions;
    memmove(r + at + 1, r + at, (size_t)(q->tx.region_count - at) * sizeof *r);
    r[at] = region;
    q->tx.region_count++;
}

/* Takes up to 16 completions of sends, and returns their number. */
static int poll_sends(struct verbs_queue *q) {
    struct ibv_wc wc[16];
    int n = ibv_poll_cq(q->tx.cq, 16, wc);
    for (int i = 0; i < n; i++) {
        q->tx.completed = wc[i].wr_id + 1; /* and all before it, which asked for no completion */
        if (wc[i].status) broken(q, "a send failed", ibv_wc_status_str(wc[i].status));
    }
    if (n < 0) broken(q, "ibv_poll_cq", "the completion queue has failed");
    if (n > 0) q->tx.stuck = false;
    return n;
}

/* Waits until all sends before number `until` have completed. Returns false if they do not. */
static bool await_sends(struct verbs_queue *q, uint64_t until) {
    double since = 0;
    for (int idle = 0; q->tx.completed < until && !q->failed;) {
        if (poll_sends(q)) {
            idle = 0;
            continue;
        }
        if (q->tx.stuck) return false;
        if (++idle < SPINS) continue;
        if (idle == SPINS) since = ln_now();
        q->tx.stuck = idle >= SPINS + POLLS && ln_now() - since > STUCK;
        sched_yield();
    }
    return !q->failed;
}

/* Makes one work request of a datagram. */
static void fill_request(struct verbs_queue *q, const struct verbs_address *to, uint64_t number,
                         const struct ln_datagram *d, struct ibv_send_wr *wr,
                         struct ibv_sge *part) {
    uint8_t *staging = q->tx.staging + number % q->tx.size * q->tx.slot;
    const struct verbs_region *region = d->length ? find_region(q, d->payload, d->length) : NULL;
    memcpy(staging, d->header, WIRE_HEADER_BYTES);
    part[0] = (struct ibv_sge){(uintptr_t)staging, WIRE_HEADER_BYTES, q->tx.mr->lkey};
    if (region) {
        part[1] = (struct ibv_sge){(uintptr_t)d->payload, (uint32_t)d->length, region->mr->lkey};
    } else if (d->length) {
        memcpy(staging + WIRE_HEADER_BYTES, d->payload, d->length);
        part[0].length += (uint32_t)d->length;
    }
    *wr = (struct ibv_send_wr){.wr_id = number,
                               .sg_list = part,
                               .num_sge = region ? 2 : 1,
                               .opcode = IBV_WR_SEND,
                               .wr.ud = {d->bulk ? to->bulk : to->ah, to->qpn, q->qkey}};
}

lossynet_status verbs_queue_send(struct verbs_queue *q, const struct verbs_address *to,
                                 const struct ln_datagram *batch, int count) {
    struct ibv_send_wr wr[LOSSYNET_BATCH], *bad;
    struct ibv_sge part[2 * LOSSYNET_BATCH];
    uint64_t last = q->tx.posted + (uint64_t)count;
    if (q->failed) return LOSSYNET_LINK;
    if (last > q->tx.size && !await_sends(q, last - q->tx.size))
        return q->failed ? LOSSYNET_LINK : LOSSYNET_OK; /* lost */
    for (int i = 0; i < count; i++) {
        fill_request(q, to, q->tx.posted + (uint64_t)i, &batch[i], &wr[i], &part[2 * i]);
        wr[i].next = i + 1 < count ? &wr[i + 1] : NULL;
        if (i + 1 == count || (i + 1) % SIGNAL == 0) wr[i].send_flags = IBV_SEND_SIGNALED;
    }
    int code = ibv_post_send(q->qp, wr, &bad);
    if (code) return broken(q, "ibv_post_send", strerror(code));
    q->tx.posted = last;
    return LOSSYNET_OK;
}

/* A send that is stuck may leave later, when its payload has changed. Then its checksum is
 * wrong. */
void verbs_queue_flush(struct verbs_queue *q) {
    if (q->qp) await_sends(q, q->tx.posted);
}

bool verbs_queue_register(struct verbs_queue *q, const void *memory, size_t bytes) {
    if (q->tx.region_count == VERBS_REGIONS || bytes == 0) return false;
    struct ibv_mr *mr = ibv_reg_mr(q->pd, (void *)memory, bytes, 0); /* for reading only */
    if (mr)
        add_region(q, (struct verbs_region){(const uint8_t *)memory, bytes, mr});
    else
        ln_log("rank %d, RDMA port %s: cannot register %zu MB (%s), so payloads are copied: "
               "raise the limit of locked memory (ulimit -l)",
               q->rank, q->port.name, bytes >> 20, strerror(errno));
    return mr;
}

/* ---- open and close ---- */

static size_t slot_bytes(size_t mtu) {
    return (HEADER_AT + mtu + 63) / 64 * 64;
}

static size_t staging_bytes(size_t mtu) {
    return (mtu + 63) / 64 * 64;
}

static int receives(size_t mtu, int most) {
    int fit = (int)(RECEIVE_BYTES / slot_bytes(mtu));
    if (fit > RECEIVES) fit = RECEIVES;
    return fit < most ? fit : most;
}

static size_t memory(size_t mtu, unsigned sends, int receives) {
    return sends * staging_bytes(mtu) + (size_t)receives * (slot_bytes(mtu) + sizeof(int));
}

size_t verbs_queue_memory(size_t mtu) {
    return memory(mtu, SENDS, receives(mtu, RECEIVES));
}

static lossynet_status take_memory(struct verbs_queue *q) {
    size_t sending = q->tx.size * q->tx.slot, receiving = (size_t)q->rx.size * q->rx.slot;
    q->memory_bytes = memory(q->port.mtu, q->tx.size, q->rx.size);
    q->tx.staging = ln_memory_take(q->tx.size, q->tx.slot);
    q->rx.slots = ln_memory_take((size_t)q->rx.size, q->rx.slot);
    q->rx.spare = ln_memory_take((size_t)q->rx.size, sizeof *q->rx.spare);
    if (!q->tx.staging || !q->rx.slots || !q->rx.spare) return LOSSYNET_NO_MEMORY;
    for (; q->rx.spares < q->rx.size; q->rx.spares++)
        q->rx.spare[q->rx.spares] = q->rx.size - 1 - q->rx.spares;
    q->tx.mr = ibv_reg_mr(q->pd, q->tx.staging, sending, 0);
    q->rx.mr = ibv_reg_mr(q->pd, q->rx.slots, receiving, IBV_ACCESS_LOCAL_WRITE);
    if (q->tx.mr && q->rx.mr) return LOSSYNET_OK;
    return ln_fail(
        LOSSYNET_LINK,
        "rank %d, RDMA port %s: cannot register %zu MB of buffers: %s: raise the limit of "
        "locked memory (ulimit -l)",
        q->rank, q->port.name, (sending + receiving) >> 20, strerror(errno));
}

/* Brings the queue pair from RESET to RTS, and posts all receives on the way (IBA 10.3.1). */
static lossynet_status start(struct verbs_queue *q) {
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT, .port_num = q->port.number, .qkey = q->qkey};
    int code =
        ibv_modify_qp(q->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
    if (!code) refill(q);
    attr.qp_state = IBV_QPS_RTR;
    if (!code) code = ibv_modify_qp(q->qp, &attr, IBV_QP_STATE);
    attr.qp_state = IBV_QPS_RTS;
    if (!code) code = ibv_modify_qp(q->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
    if (code) broken(q, "ibv_modify_qp", strerror(code));
    return q->failed ? LOSSYNET_LINK : LOSSYNET_OK;
}

static bool unblock(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0;
}

lossynet_status verbs_queue_open(struct verbs_queue *q, uint32_t qkey) {
    const struct ibv_device_attr *limits = &q->port.limits;
    int most = limits->max_qp_wr < limits->max_cqe ? limits->max_qp_wr : limits->max_cqe;
    q->qkey = qkey;
    q->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    q->tx.size = most < SENDS ? (unsigned)most : SENDS;
    q->rx.size = receives(q->port.mtu, most);
    q->rx.slot = slot_bytes(q->port.mtu);
    q->tx.slot = staging_bytes(q->port.mtu);
    if (most < SENDS_LEAST || limits->max_sge < 2)
        return ln_fail(LOSSYNET_LINK,
                       "RDMA port %s: queues of %d with %d parts: expected at least %d with 2",
                       q->port.name, most, limits->max_sge, SENDS_LEAST);
    q->pd = ibv_alloc_pd(q->port.context);
    q->channel = ibv_create_comp_channel(q->port.context);
    if (q->channel) {
        q->tx.cq = ibv_create_cq(q->port.context, (int)q->tx.size, NULL, NULL, 0);
        q->rx.cq = ibv_create_cq(q->port.context, q->rx.size, NULL, q->channel, 0);
    }
    if (!q->pd || !q->channel || !q->tx.cq || !q->rx.cq || q->wake < 0 ||
        !unblock(q->channel->fd) || !unblock(q->port.context->async_fd))
        return broken(q, "no completion queues", strerror(errno));
    lossynet_status status = take_memory(q);
    if (status) return status;
    struct ibv_qp_init_attr create = {.send_cq = q->tx.cq,
                                      .recv_cq = q->rx.cq,
                                      .qp_type = IBV_QPT_UD,
                                      .cap = {.max_send_wr = q->tx.size,
                                              .max_recv_wr = (uint32_t)q->rx.size,
                                              .max_send_sge = 2,
                                              .max_recv_sge = 1}};
    q->qp = ibv_create_qp(q->pd, &create);
    if (!q->qp) return broken(q, "no UD queue pair", strerror(errno));
    return start(q);
}

void verbs_queue_close(struct verbs_queue *q) {
    if (q->qp) ibv_destroy_qp(q->qp);
    for (int i = 0; i < q->tx.region_count; i++) ibv_dereg_mr(q->tx.regions[i].mr);
    if (q->rx.mr) ibv_dereg_mr(q->rx.mr);
    if (q->tx.mr) ibv_dereg_mr(q->tx.mr);
    if (q->rx.cq) ibv_destroy_cq(q->rx.cq);
    if (q->tx.cq) ibv_destroy_cq(q->tx.cq);
    if (q->channel) ibv_destroy_comp_channel(q->channel);
    if (q->pd) ibv_dealloc_pd(q->pd);
    if (q->wake > 0) close(q->wake);
    free(q->rx.spare);
    free(q->rx.slots);
    free(q->tx.staging);
}

#endif
