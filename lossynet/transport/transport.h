/* transport.h — sends packets to the workers of other ranks, and reports which packets arrived.
 *
 * The transport moves spans of bytes to peers and sends each packet once. It knows ranks and peers,
 * phases with their buckets and packets as numbers, windows, pacing, time-outs, keys, and the
 * datagram (base/wire.h). It must not know vectors, shards, estimators, ages, or how a step goes on
 * without a packet. It uses link, crypto and base. The caller provides a `struct
 * ln_transport_calls`.
 *
 * The caller runs each phase, of either kind, with these calls:
 *
 *     receive_begin   lets peers send. For GRADIENT it follows right after the phase before, so
 *                     that no peer waits for it
 *     send_begin      lets the packets leave that `next` gives; `wake` says that there are more
 *     wait_bucket     waits until no more packets of a bucket will come
 *     end             waits until no more packets of the phase will come, and ours have left
 *
 * check_complete in recv.c notices lost packets. seal in session.c encrypts datagrams.
 */
#ifndef LOSSYNET_TRANSPORT_H
#define LOSSYNET_TRANSPORT_H

#include "lossynet/base/base.h"
#include "lossynet/link/link.h"

struct ln_transport; /* opaque */

/* ---- what the user of the transport provides ---- */

struct ln_packet {        /* names one packet of a phase */
    int sender, receiver; /* workers */
    int bucket;
    uint32_t number;   /* within the bucket */
    uint8_t gradients; /* how many gradients were added up in it (wire.h); 0: one, or unknown */
};

struct ln_span { /* a packet to send */
    struct ln_packet packet;
    const void *payload;
    size_t bytes;
};

enum ln_delivery { LOSSYNET_TAKEN, LOSSYNET_CAME_BEFORE, LOSSYNET_NOT_FINITE };

/* Returns the bucket that leaves as number `order` of its phase. The function is its own
 * inverse. GRADIENT sends buckets in the order in which backward finishes them, and PARAMETER in
 * the opposite order, in which the next forward pass needs them. */
static inline int ln_transport_bucket(lossynet_phase phase, int buckets, int order) {
    return phase == LOSSYNET_GRADIENT ? order : buckets - 1 - order;
}

/* The transport calls these functions with its lock held, and also from its own thread. */
struct ln_transport_calls {
    void *context;
    /* Fills in the next packets for a rank, at most `most` and at most LOSSYNET_BATCH, and returns
     * their number. Sets *complete when no more will follow in this phase. Payloads stay valid
     * until the next call, and those in registered memory until the phase ends. */
    int (*next)(void *context, lossynet_phase phase, int rank, struct ln_span *spans, int most,
                bool *complete);
    /* Returns whether `next` has a packet now. */
    bool (*ready)(void *context, lossynet_phase phase, int rank);
    /* Returns how many packets of a bucket this rank expects from a worker of another rank. */
    uint32_t (*expected)(void *context, lossynet_phase phase, int bucket, int sender);
    /* Returns the size in bytes of a packet from another rank to a worker of this rank, or 0 if
     * there is no such packet. The transport has checked that `sender` and `bucket` exist. */
    size_t (*bytes)(void *context, lossynet_phase phase, const struct ln_packet *packet);
    /* Takes such a packet. Its phase and its bucket are open. */
    enum ln_delivery (*deliver)(void *context, lossynet_phase phase, const struct ln_packet *packet,
                                const uint8_t *payload, size_t bytes);
    /* Returns what this rank acknowledges to another rank. With `make` it makes the
     * acknowledgement of the open GRADIENT phase, in which nothing more will come from that
     * rank. Otherwise it returns the last acknowledgement. */
    const uint8_t *(*acknowledge)(void *context, int rank, bool make, size_t *bytes);
};

/* ---- open and close (transport.c, exchange/progress.c) ---- */

struct ln_transport_settings { /* fields have the same meaning in lossynet_settings */
    struct lossynet_world world;
    size_t packet_bytes;
    struct lossynet_network network;
    struct ln_log_target log;
    uint32_t pulses, phases[2]; /* gathers of LOSSYNET_PULSE per step; phases per step, by kind */
    bool late_comes;            /* late gradients are sent again in the next step */
};

struct ln_transport_shape {
    int workers, local, buckets; /* N of all ranks, V of this rank, B */
    size_t packet_bytes;         /* payload of a full packet, as it is sent */
    uint8_t elements;            /* format of the payloads, an enum of wire.h */
};

/* Opens the link, and lets the ranks exchange what they must know of each other. With several
 * network.threads each opens a link; over a reliable link there is one. Collective. On failure *out is
 * NULL and one line is logged. */
lossynet_status ln_transport_open(const struct ln_transport_settings *settings,
                                  ln_link_open link_open, struct ln_transport **out);

/* Takes the memory of thread `thread` that depends on the shape from the pool, which is to be closed after
 * the transport. `calls` are those of this thread, which moves the packets that they give and expect. With
 * t NULL it only counts the bytes. The caller must check pool->out_of_memory. */
void ln_transport_shape(struct ln_transport *t, size_t thread, struct ln_pool *pool,
                        const struct ln_transport_shape *shape,
                        const struct ln_transport_calls *calls);

/* Starts the transport's thread. Call it after receive_begin of GRADIENT. Over a reliable link
 * there is no thread. */
lossynet_status ln_transport_start(struct ln_transport *t);

/* Sends LEAVE to all peers, or ABORT after a failure, and closes the transport. t may be NULL. */
void ln_transport_close(struct ln_transport *t);

/* Returns the bytes that `open` takes in addition to the link's memory. */
size_t ln_transport_memory(int ranks, size_t packet_bytes, bool encrypt);

/* ---- phases (exchange/phase.c) ---- */

/* Opens the next phase of this kind for receiving, and tells the peers. */
void ln_transport_receive_begin(struct ln_transport *t, lossynet_phase phase);
/* Opens the phase for sending. The data that `next` reads is ready, and the caller must not
 * change it from now on. */
void ln_transport_send_begin(struct ln_transport *t, lossynet_phase phase);
/* Says that there is more to send. Any thread may call it. */
void ln_transport_wake(struct ln_transport *t);

/* Waits until no more packets of one bucket will come. It does not wait for our own packets to
 * leave. Packets of the bucket that come later are refused. */
lossynet_status ln_transport_wait_bucket(struct ln_transport *t, lossynet_phase phase, int bucket);
/* Does the same without waiting. Returns false, and changes nothing, if more packets may still
 * come. */
bool ln_transport_close_bucket(struct ln_transport *t, lossynet_phase phase, int bucket);
/* Returns whether one of the two calls above has closed the bucket. Any thread may call it. */
bool ln_transport_bucket_is_over(const struct ln_transport *t, lossynet_phase phase, int bucket);
/* Waits until no more packets of the phase will come and ours have left, then closes the phase. */
lossynet_status ln_transport_end(struct ln_transport *t, lossynet_phase phase);
/* Runs the loop once if the transport has no thread. Returns whether it has none. */
bool ln_transport_turn(struct ln_transport *t);
/* Waits until all our packets of a phase have left. */
lossynet_status ln_transport_drain(struct ln_transport *t, lossynet_phase phase);

/* ---- messages that are repeated until they arrive (exchange/phase.c, message.c) ---- */

/* Every rank sends some bytes to each other rank and receives some. The part for rank r is bytes
 * out_offset[r] ... out_offset[r + 1] of `out`; the part from rank r is bytes in_offset[r] ...
 * in_offset[r + 1] of `in`. A rank's part for itself is ignored. came: NULL, or the call is a
 * pulse, which goes on without the parts of late ranks. Then came[r] is set if rank r's part is
 * complete; otherwise the bytes of its part are undefined. A step has settings.pulses pulses.
 * Collective. */
lossynet_status ln_transport_swap(struct ln_transport *t, const void *out, const size_t *out_offset,
                                  void *in, const size_t *in_offset, uint8_t *came);
/* Gathers the parts of all ranks in place, in the same way. Rank r's part of `data` is bytes
 * offset[r] ... offset[r + 1]. Collective. */
lossynet_status ln_transport_gather(struct ln_transport *t, void *data, const size_t *offset,
                                    uint8_t *came);
/* Asks ranks for their missing parts, after a pulse that acknowledged a GRADIENT phase
 * (ask.c). Sets came[r] to 1 if rank r's part came, and to LOSSYNET_NOTHING_SENT if it did not
 * and we have sent rank r nothing in this step. */
enum { LOSSYNET_NOTHING_SENT = 2 };
lossynet_status ln_transport_ask(struct ln_transport *t, uint8_t *in, const size_t *in_offset,
                                 uint8_t *came);
/* Call it with `whole` false before the caller makes its acknowledgements of the phase that has
 * ended, and with `whole` true after. In between the transport answers no questions about them. */
void ln_transport_acknowledges(struct ln_transport *t, bool whole);
/* Returns whether another rank has begun a swap or gather that this rank has not begun. */
bool ln_transport_is_awaited(struct ln_transport *t);

/* ---- late ranks (deadline.c); settings.phases and settings.pulses belong to a step ---- */

/* Returns how many steps at least half of the ranks are ahead of this rank. Call it between
 * steps. */
uint32_t ln_transport_position(struct ln_transport *t);
/* Returns whether this rank is late: at least half of the ranks have gone on to a later GRADIENT
 * phase, and some peer closed the present one before all of our packets had left. */
bool ln_transport_is_late(struct ln_transport *t);
/* Says that this rank has begun a step and will average its GRADIENT phase. idle: this rank has
 * no gradient in it. */
void ln_transport_stays(struct ln_transport *t, bool idle);
/* Sets idle[r] if rank r has said that it has no gradient in the GRADIENT phase that ended last. */
void ln_transport_idle(struct ln_transport *t, bool *idle);
/* Returns whether another rank has begun the step of the present GRADIENT phase more than a
 * deadline ago. */
bool ln_transport_is_behind(struct ln_transport *t);
/* Leaves out the phases and pulses of `steps` steps, 0 or more. Call it between steps, after the
 * PARAMETER phase has ended. After it no GRADIENT phase is open until receive_begin. */
void ln_transport_jump(struct ln_transport *t, uint32_t steps);
/* Sets late[r] to the number of steps whose first GRADIENT phase this rank ended without rank r. */
void ln_transport_lateness(struct ln_transport *t, uint64_t *late);
/* Returns whether a rank may still send packets of the phase that ended last: this rank did not
 * end the phase without it, and it has something to send. */
bool ln_transport_sends_again(struct ln_transport *t, lossynet_phase phase, int rank);

/* ---- queries ---- */

struct ln_transport_facts {
    uint64_t session;    /* random, the same on all ranks */
    const char *link;    /* its name */
    size_t payload_most; /* bytes that fit a datagram beside header and trailer */
    size_t bytes;        /* memory that the transport, its link and its keys hold */
    size_t threads;      /* that move packets, or one: the caller's */
    bool threaded;       /* packets move while the caller computes */
    bool reliable;       /* the link loses and damages nothing */
};

struct ln_transport_facts ln_transport_facts(const struct ln_transport *t);

/* Returns whether a peer has made a call fail (lossynet_trainer.h, lossynet_has_failed). Over a reliable
 * link it returns false. */
bool ln_transport_has_failed(struct ln_transport *t, bool *missing);

/* DATA that this rank sent on for others since open, by phase: second hops (detour.c). */
struct ln_relayed {
    uint64_t packets[2], bytes[2]; /* bytes: payload */
};

/* Counts what happened in the network since open, in events[LOSSYNET_EVENTS]. LOSSYNET_PACE is
 * the present value. */
void ln_transport_counters(struct ln_transport *t, uint64_t *events, struct ln_relayed *relayed);

/* The DATA packets of a bucket that came after their phase, since the last call. */
void ln_transport_late(struct ln_transport *t, lossynet_phase phase, int bucket, uint64_t *late);

/* Sets the caller's step, which lines of the log name. */
void ln_transport_set_step(struct ln_transport *t, uint64_t step);

/* Lets the link's hardware read payloads in this memory in place, until close. Returns false if
 * the link copies them instead. */
bool ln_transport_register(struct ln_transport *t, const void *memory, size_t bytes);

/* ---- the network before a run (probe.c) ---- */

/* Sends test datagrams from every rank to every other (lossynet_trainer.h, lossynet_probe). */
lossynet_status ln_transport_probe(const struct ln_transport_settings *settings,
                                   ln_link_open link_open, const int *node, double seconds,
                                   struct lossynet_path *out, const char **link_name);

#endif
