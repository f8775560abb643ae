/* transport.h — packets to the workers of other ranks, each sent once, and what of them arrives.
 *
 * Knows ranks and peers, phases with their buckets and packets as numbers, windows, pacing,
 * time-outs, keys, and the datagram (base/wire.h). It moves spans of bytes to peers and reports
 * what arrived. Must not know vectors, shards, estimators, ages, or what becomes of a step without
 * a packet. Uses link, crypto and base. Whoever uses it hands over `struct
 * lossynet_transport_calls`.
 *
 * A phase goes through these calls, for each kind on its own:
 *
 *     receive_begin   peers may send; for GRADIENT right after the phase before, so that nobody
 *                     waits
 *     send_begin      what `next` gives may leave; `wake` when there is more
 *     wait_bucket     all packets that will come of a bucket are there
 *     end             all packets that will come are there, and ours have left
 *
 * Where a lost packet is noticed: recv.c, check_complete. Where a datagram is encrypted: session.c,
 * lossynet_session_seal.
 */
#ifndef LOSSYNET_TRANSPORT_H
#define LOSSYNET_TRANSPORT_H

#include "lossynet/base/base.h"
#include "lossynet/link/link.h"

struct lossynet_transport; /* opaque */

/* ---- what the user of the transport provides ---- */

struct lossynet_packet {  /* of a phase: from worker to worker, and which of the bucket's packets */
    int sender, receiver; /* receiver LOSSYNET_EVERYONE: all workers of other ranks */
    int bucket;
    uint32_t number;
    uint8_t gradients; /* that were added up in it (wire.h); 0: one, or unknown */
};

struct lossynet_span { /* a packet to send */
    struct lossynet_packet packet;
    const void *payload;
    size_t bytes;
    bool device; /* the payload is in a device's memory, which the link can read */
};

enum lossynet_delivery { LOSSYNET_TAKEN, LOSSYNET_CAME_BEFORE, LOSSYNET_NOT_FINITE };

/* The bucket that leaves as number `order` of its phase, and the other way round: GRADIENT goes up,
 * as backward finishes buckets, PARAMETER down, as the next forward needs them. */
static inline int lossynet_transport_bucket(lossynet_phase phase, int buckets, int order) {
    return phase == LOSSYNET_GRADIENT ? order : buckets - 1 - order;
}

/* All are called with the transport's lock held, also from its own thread. */
struct lossynet_transport_calls {
    void *context;
    /* Fills in the next packets for a rank (or LOSSYNET_EVERYONE), at most `most` and
     * LOSSYNET_BATCH, and returns their number. *complete: none will follow in this phase. Payloads
     * stay until the next call; those in registered memory until the phase's end. */
    int (*next)(void *context, lossynet_phase phase, int rank, struct lossynet_span *spans,
                int most, bool *complete);
    /* Whether `next` has a packet now. */
    bool (*ready)(void *context, lossynet_phase phase, int rank);
    /* Packets that this rank expects of a bucket from a worker of another rank. */
    uint32_t (*expected)(void *context, lossynet_phase phase, int bucket, int sender);
    /* Bytes of a packet from another rank to a worker of this one; 0: there is no such packet.
     * `sender` and `bucket` exist. */
    size_t (*bytes)(void *context, lossynet_phase phase, const struct lossynet_packet *packet);
    /* Takes such a packet, of the phase and bucket that are open. */
    enum lossynet_delivery (*deliver)(void *context, lossynet_phase phase,
                                      const struct lossynet_packet *packet, const uint8_t *payload,
                                      size_t bytes);
    /* What this rank acknowledges to another of the open GRADIENT phase, of which nothing more will
     * come from there; or, unless `make`, what it has acknowledged last. */
    const uint8_t *(*acknowledge)(void *context, int rank, bool make, size_t *bytes);
};

/* ---- open and close (session.c, progress.c) ---- */

struct lossynet_transport_settings { /* as in lossynet_settings */
    struct lossynet_world world;
    size_t packet_bytes;
    const char *interface;
    double pace_gbps, loss_budget, peer_timeout;
    bool skip_late;  /* late ranks are not waited for, ... */
    double deadline; /* ... longer than so many seconds; 0: adaptive */
    int pulses;      /* of a step; 0: one */
    int phases[2];   /* of a step, by kind; 0: one */
    bool late_comes; /* what is late of GRADIENT comes in the step after */
    int dscp;
    bool multicast, encrypt;
    const char *key_file;
};

struct lossynet_transport_shape { /* what is transported */
    int workers, local, buckets;  /* N, V, B */
    size_t packet_bytes;          /* of a full packet, on its way */
    uint8_t elements;             /* enum of wire.h: what payloads are made of */
};

/* Opens the link and introduces the ranks to each other. Collective. On failure *out is NULL and a
 * line is logged. */
lossynet_status lossynet_transport_open(const struct lossynet_transport_settings *settings,
                                        lossynet_link_open link_open, lossynet_share share,
                                        void *share_context, struct lossynet_transport **out);

/* Allocates what depends on the shape; t NULL: counts only. Sees to pool->out_of_memory only. */
void lossynet_transport_shape(struct lossynet_transport *t, struct lossynet_pool *pool,
                              const struct lossynet_transport_shape *shape,
                              const struct lossynet_transport_calls *calls);

/* Starts the transport's thread, after receive_begin of GRADIENT. A reliable link has none. */
lossynet_status lossynet_transport_start(struct lossynet_transport *t);

/* Says LEAVE, or ABORT after a failure. NULL is fine. */
void lossynet_transport_close(struct lossynet_transport *t);

/* Bytes that `open` takes beside the link's memory. */
size_t lossynet_transport_memory(int ranks, size_t packet_bytes, bool encrypt);

/* ---- phases (send.c, recv.c) ---- */

/* Opens the next phase of this kind for receiving, and tells the peers. */
void lossynet_transport_receive_begin(struct lossynet_transport *t, lossynet_phase phase);
/* Opens it for sending; what `next` reads is set up, and belongs to the transport now. */
void lossynet_transport_send_begin(struct lossynet_transport *t, lossynet_phase phase);
/* There is more to send. From any thread. */
void lossynet_transport_wake(struct lossynet_transport *t);

/* Waits until all that will come of one bucket is there; ours need not have left. Later packets of
 * the bucket are refused. */
lossynet_status lossynet_transport_wait_bucket(struct lossynet_transport *t, lossynet_phase phase,
                                               int bucket);
/* The same without waiting: false where something may still come, and nothing has changed. */
bool lossynet_transport_close_bucket(struct lossynet_transport *t, lossynet_phase phase,
                                     int bucket);
/* Whether it has been waited for. From any thread. */
bool lossynet_transport_bucket_is_over(const struct lossynet_transport *t, lossynet_phase phase,
                                       int bucket);
/* Waits until all that will come is there and ours have left; closes the phase. */
lossynet_status lossynet_transport_end(struct lossynet_transport *t, lossynet_phase phase);
/* One turn of the loop, where no thread runs it. Returns whether none does. */
bool lossynet_transport_turn(struct lossynet_transport *t);
/* Waits until all our packets of a phase have left. */
lossynet_status lossynet_transport_drain(struct lossynet_transport *t, lossynet_phase phase);

/* ---- messages that arrive (message.c) ---- */

/* Every rank gives each other rank some bytes and gets some: out[r], in[r] (pointers into caller's
 * memory; the rank's own are ignored), bytes offset[r] ... offset[r + 1]. Collective. */
lossynet_status lossynet_transport_swap(struct lossynet_transport *t, const void *out,
                                        const size_t *out_offset, void *in,
                                        const size_t *in_offset);
/* In place: rank r's part of `data` is bytes offset[r] ... offset[r + 1]. Collective. */
lossynet_status lossynet_transport_gather(struct lossynet_transport *t, void *data,
                                          const size_t *offset);
/* The same, as often in each step as settings.pulses says, without the parts of late ranks:
 * came[r]: rank r's part is whole. What the others' bytes hold is undefined. */
lossynet_status lossynet_transport_pulse(struct lossynet_transport *t, void *data,
                                         const size_t *offset, uint8_t *came);
/* lossynet_transport_swap in the same way. */
lossynet_status lossynet_transport_swap_pulse(struct lossynet_transport *t, const void *out,
                                              const size_t *out_offset, void *in,
                                              const size_t *in_offset, uint8_t *came);
/* After such a swap that acknowledges a GRADIENT phase: asks ranks whose part has not come for it,
 * and sets came[r] where it has (ask.c); or LOSSYNET_NOTHING_SENT, where nothing of the phase has left
 * for it. */
enum { LOSSYNET_NOTHING_SENT = 2 };
lossynet_status lossynet_transport_ask(struct lossynet_transport *t, uint8_t *in,
                                       const size_t *in_offset, uint8_t *came);
/* Before and after the caller makes what it acknowledges of the phase that has ended. */
void lossynet_transport_acknowledges(struct lossynet_transport *t, bool whole);
/* Whether a rank waits in a swap or gather that this rank has not begun. */
bool lossynet_transport_is_called(struct lossynet_transport *t);

/* ---- late ranks (deadline.c); settings.phases and settings.pulses belong to a step ---- */

/* How many steps at least half of the ranks are ahead. Between steps. */
uint32_t lossynet_transport_position(struct lossynet_transport *t);
/* Whether this rank is late: most ranks have ended the present GRADIENT phase, and not all that is
 * ours had left before they did. */
bool lossynet_transport_is_late(struct lossynet_transport *t);
/* This rank has begun a step, and will average its GRADIENT phase; idle: it has no gradient. */
void lossynet_transport_stays(struct lossynet_transport *t, bool idle);
/* idle[r]: rank r has said that it has no gradient in the GRADIENT phase that has ended last. */
void lossynet_transport_idle(struct lossynet_transport *t, bool *idle);
/* Whether others have begun the step of the present GRADIENT phase more than a deadline ago. */
bool lossynet_transport_is_behind(struct lossynet_transport *t);
/* Leaves out the phases and pulses of so many steps, 0 or more: between steps, when the PARAMETER
 * phase has ended. Of GRADIENT nothing is open after it, until receive_begin. */
void lossynet_transport_jump(struct lossynet_transport *t, uint32_t steps);
/* late[r]: steps of which this rank ended the first GRADIENT phase without rank r. */
void lossynet_transport_lateness(struct lossynet_transport *t, uint64_t *late);
/* Whether a rank may still send something of the phase that has ended last: that went on with it,
 * and it has something to send. */
bool lossynet_transport_sends_again(struct lossynet_transport *t, lossynet_phase phase, int rank);

/* ---- queries ---- */

struct lossynet_transport_facts {
    uint64_t session;    /* random, the same on all ranks */
    const char *link;    /* its name */
    size_t payload_most; /* bytes that fit a datagram beside header and trailer */
    size_t link_bytes;   /* memory that the link holds */
    bool multicast;      /* parameters go to LOSSYNET_EVERYONE */
    bool threaded;       /* packets move while the caller computes */
    bool reliable;       /* nothing is lost, and what comes is as it was sent */
    bool reads_devices;  /* payloads may be in a device's memory */
};

struct lossynet_transport_facts lossynet_transport_facts(const struct lossynet_transport *t);

/* Whether a peer has made a call fail: lossynet.h, lossynet_has_failed. Not over a reliable
 * link. */
bool lossynet_transport_has_failed(struct lossynet_transport *t, bool *missing);

/* What the network did since open, [LOSSYNET_EVENTS]; pace: now. */
void lossynet_transport_counters(struct lossynet_transport *t, uint64_t *events);

/* The caller's step, for messages to people. */
void lossynet_transport_set_step(struct lossynet_transport *t, uint64_t step);

/* Lets the link's hardware read payloads in this memory in place, until close. False: it copies. */
bool lossynet_transport_register(struct lossynet_transport *t, const void *memory, size_t bytes,
                                 const struct lossynet_device_memory *device);

/* ---- the network before a run (probe.c) ---- */

/* Sends test datagrams from every rank to every other: lossynet.h, lossynet_probe. */
lossynet_status lossynet_transport_probe(const struct lossynet_transport_settings *settings,
                                         lossynet_link_open link_open, lossynet_share share,
                                         void *share_context, const int *node, double seconds,
                                         struct lossynet_path *out, const char **link_name);

#endif
