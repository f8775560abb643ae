/* internal.h — what lossynet's files share.
 *
 *     net.c        settings, open and close: allocates everything
 *     layout.c     buckets, shards, packets: who owns which element
 *     elements.c   elements on their way: float32, or rounded to bfloat16
 *     loss.c       injected loss: which packets of a link arrive
 *     gradient.c   GRADIENT phase: masks, estimator weights, sum               } stream_*.c bring
 *     parameter.c  PARAMETER phase: copies, ages, what is fresh                } others' packets
 *     engine.c     datagrams between ranks: who sends and receives, and when   } engine.h draws
 *     stream_*.c   DATA: the packets of a phase, each sent once                } how they fit
 *     reliable.c   what must arrive: DONE, small messages, state               }
 *     link_mpi.c, link_udp.c, link_verbs.c   links (link.h), with udp.h and verbs.h
 *     checksum.c   CRC32C of datagrams; secure.c their encryption
 *     pace.c       how fast DATA leaves, and the loss budget
 *     record.c     what arrived, as a trace of losses
 *     traffic_class.c   the class in which DATA travels
 *     control.c    all-gathers of small things, counters
 *     masks.c      which packets arrived, told to their senders
 *     carry.c      lost gradients, added to the next ones
 *     repair.c     rounds in which what was lost is sent again
 *     drift.c      how far the replicas are apart, and how far they should be
 *     state.c      what is remembered from step to step, as bytes
 *     bootstrap.c  joining and leaving the job
 *     probe.c      what the network carries from each rank to each other, before a run
 */
#ifndef LOSSYNET_INTERNAL_H
#define LOSSYNET_INTERNAL_H

#include "lossynet/link.h"
#include "lossynet/lossynet.h"

#include <stdio.h>
#include <string.h>

/* One line to stderr, "lossynet: ..." */
void lossynet_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- memory (net.c) ---- */

/* Zeroed, aligned to 64 bytes, released with free(). NULL when there is none; not logged. */
void *lossynet_memory_take(size_t count, size_t size);

/* Tests: the allocation after this many more fails; negative: none does. */
extern int lossynet_memory_fail_after;

/* ---- checksum (checksum.c) ---- */

/* Goes on from `crc`, 0 at the start. */
uint32_t lossynet_crc32c(uint32_t crc, const void *data, size_t bytes);
uint32_t lossynet_crc32c_plain(uint32_t crc, const void *data, size_t bytes);

uint64_t lossynet_random(void); /* never the same (net.c) */

/* InfiniBand's service level, or 802.1Q's priority, of a traffic class (traffic_class.c). */
int lossynet_service_level(int dscp);

/* ---- layout (layout.c) ---- */

struct lossynet_layout {
    int workers, buckets;
    size_t elements, packets; /* in one vector */
    size_t packet_elements;   /* in a full packet */
    size_t element_bytes;     /* of a payload: 4, or 2 of bfloat16 */

    /* Shards in order of (bucket, owner) follow one another without gaps, both in elements and in
     * packets, so shard i = bucket * workers + owner ends where shard i + 1 starts. */
    size_t *shard_element; /* [buckets * workers + 1] */
    size_t *shard_packet;  /* [buckets * workers + 1] */

    /* The same for one owner's shards alone: what it owns in buckets before this one. */
    size_t *owner_element; /* [workers][buckets + 1] */
    size_t *owner_packet;  /* [workers][buckets + 1] */
    size_t *owner_start;   /* [workers + 1]: packets of all owners before this one */

    size_t largest_shard_packets, largest_owner_packets;
};

lossynet_status lossynet_layout_open(struct lossynet_layout *layout, int workers, int buckets,
                                     const size_t *bucket_elements, size_t packet_bytes,
                                     size_t element_bytes);
void lossynet_layout_close(struct lossynet_layout *layout);

static inline size_t lossynet_layout_owned(const struct lossynet_layout *layout, int worker) {
    return layout->owner_element[(size_t)(worker + 1) * (layout->buckets + 1) - 1];
}

static inline size_t lossynet_layout_owner_packets(const struct lossynet_layout *layout,
                                                   int worker) {
    return layout->owner_packet[(size_t)(worker + 1) * (layout->buckets + 1) - 1];
}

/* ---- elements on their way (elements.c) ---- */

/* What is sent is rounded to bfloat16. */
static inline bool lossynet_rounds(const struct lossynet_layout *layout) {
    return layout->element_bytes != sizeof(float);
}

void lossynet_round(float *to, const float *from, size_t n); /* to may be from */
/* A payload of bfloat16, little-endian as every machine this runs on. */
void lossynet_elements_pack(uint16_t *to, const float *from, size_t n);
/* A payload of n elements, at any address. */
void lossynet_elements_unpack(const struct lossynet_layout *layout, float *to,
                              const uint8_t *payload, size_t n);
/* From one worker to another of the same rank. */
void lossynet_elements_copy(const struct lossynet_layout *layout, float *to, const float *from,
                            size_t n);
/* A payload that a wire has changed may hold what no computation survives. */
bool lossynet_elements_are_finite(const struct lossynet_layout *layout, const uint8_t *payload,
                                  size_t bytes);
/* Rounds, in local workers' vectors, what other workers own: those of this rank, or `remote` ones
 * as well. */
void lossynet_round_others(const struct lossynet *net, float *const *vectors, bool remote);

/* ---- injected loss (loss.c) ---- */

enum lossynet_loss_model { LOSS_BERNOULLI, LOSS_BURST, LOSS_OUTAGE, LOSS_TRACE };

struct lossynet_loss_at { /* links with a rate of their own */
    int sender, receiver; /* receiver -1: those from and to `sender` */
    double rate;
};

struct lossynet_loss {
    enum lossynet_loss_model model;
    uint64_t seed;
    double rate[2];
    double mean_run; /* burst: packets; outage: steps */
    uint8_t *trace;  /* 1 = arrives */
    size_t trace_length;
    struct lossynet_loss_at *at; /* [at_count] */
    int at_count;
};

/* On failure `why` says in one line what was expected. */
lossynet_status lossynet_loss_open(struct lossynet_loss *loss,
                                   const struct lossynet_loss_settings *settings, char *why,
                                   size_t why_size);
void lossynet_loss_close(struct lossynet_loss *loss);

/* arrived[k] = 1 or 0 for the n packets that `sender` sends to `receiver` in this phase and step,
 * in order of (bucket, packet). A pure function of its arguments, whatever the number of ranks.
 * chain: for "burst" and "outage", one word per link and phase that starts as 0 and saves looking
 * back (loss.c); NULL is fine. */
void lossynet_loss_mask(const struct lossynet_loss *loss, lossynet_phase phase, uint64_t step,
                        int sender, int receiver, size_t n, uint64_t *chain, uint8_t *arrived);

/* Of all that masks depend on, but for a trace's contents. */
uint64_t lossynet_loss_fingerprint(const struct lossynet_loss *loss);

/* 64 well-mixed bits (splitmix64's finalizer, Steele, Lea & Flood 2014). */
static inline uint64_t lossynet_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* ---- exchange between ranks (engine.h) ---- */

struct lossynet_rejected { /* datagrams dropped on receipt, by the first thing found wrong */
    uint64_t truncated;    /* shorter than the header, or than it says */
    uint64_t foreign;      /* another magic or run id, or from a stranger */
    uint64_t version;
    uint64_t corrupt;    /* checksum or authentication */
    uint64_t invalid;    /* type, worker, bucket, packet or length that cannot be */
    uint64_t late;       /* DATA of a phase, or a bucket, that is not open */
    uint64_t duplicate;  /* DATA that came before */
    uint64_t not_finite; /* NaN or infinity, over links that lose datagrams */
};

/* ---- the default weighted sum (gradient.c) ---- */

void lossynet_weighted_sum_plain(float *out, const float *const *sender, const float *weight,
                                 int senders, size_t n, size_t packet);

/* ---- drift (drift.c) ---- */

enum { LOSSYNET_RING = LOSSYNET_LAGS + 1 };

struct lossynet_ages { /* one worker's; its own packets do not count */
    uint64_t sum, packets;
    uint64_t expected, arrived; /* since open, phase PARAMETER */
    uint32_t largest;
    uint32_t aged[LOSSYNET_AGES]; /* packets of age 0, 1, ...; the last: that or more */
};

enum { LOSSYNET_GATHERED_BYTES = 128 }; /* of one worker's small struct */
_Static_assert(WIRE_HEADER_BYTES == (int)LOSSYNET_HEADER_BYTES, "what packets have before them");
_Static_assert(sizeof(struct lossynet_counters) <= LOSSYNET_GATHERED_BYTES &&
                   sizeof(struct lossynet_ages) <= LOSSYNET_GATHERED_BYTES,
               "lossynet_net.gathered");

struct lossynet_drift_state {
    int samples;
    uint64_t measured;          /* calls so far */
    size_t *element;            /* [samples] */
    int *owner;                 /* [samples] */
    float *mine;                /* [V][samples] */
    float *values;              /* [N][samples] */
    float *fresh;               /* [samples], of the last call */
    float *change;              /* [RING][samples], the last changes */
    struct lossynet_ages *ages; /* [V] */
};

/* ---- arrival masks back to the senders (masks.c) ---- */

struct lossynet_masks {
    size_t *told_start, *heard_start; /* [R + 1], bytes */
    uint8_t *told, *heard;
    uint8_t *delivered; /* [V][(packets + 7) / 8], GRADIENT */
    uint8_t *reached;   /* PARAMETER: as lossynet.arrived, by owner and receiver */
};

/* See to out_of_memory only. */
void lossynet_masks_open(struct lossynet *net, bool gradient, bool parameter);
void lossynet_masks_close(struct lossynet *net);
/* Tells the senders what has arrived in this phase so far; in a repair round: what is not asked for
 * again. Collective. */
lossynet_status lossynet_masks_return(struct lossynet *net, lossynet_phase phase);
size_t lossynet_delivered_bytes(const struct lossynet *net); /* of one worker */
/* Of the n packets from local worker `sender` to `receiver`, in order of (bucket, packet): sets
 * mask[k] to 0 where the sender was told that packet k has arrived, or is not asked for. */
void lossynet_masks_keep_missing(const struct lossynet *net, lossynet_phase phase, int sender,
                                 int receiver, size_t n, uint8_t *mask);

/* ---- sending again (repair.c) ---- */

struct lossynet_repair {
    int rounds[2]; /* by phase */
    double budget; /* of a phase's packets, that a worker may ask for again; 0: all */
    size_t *asked; /* [V]: by this worker, in this phase */
    uint8_t *asks; /* 1: this worker wants it again. GRADIENT: as lossynet.arrived; PARAMETER: as
                        lossynet.age. NULL: nothing is sent again */
};

void lossynet_repair_open(struct lossynet *net); /* sees to out_of_memory only */
void lossynet_repair_close(struct lossynet *net);
/* What is sent again in round net->round by a local sender, see lossynet_injected. */
void lossynet_repair_mask(const struct lossynet *net, lossynet_phase phase, int sender,
                          int receiver, size_t n, uint8_t *mask);
/* Begins round net->round: workers ask, senders count what they will send. Collective. */
lossynet_status lossynet_repair_ask(struct lossynet *net, lossynet_phase phase);

/* ---- lost gradients, later (carry.c) ---- */

struct lossynet_carry {
    float share;
    float *residual; /* [V][elements]: what was sent in vain; NULL: nothing is carried */
    float *mass;     /* gradients in the residual of each sender's packets, as lossynet.arrived */
    int *added;      /* [V]: buckets of the present vector that have their residual */
};

void lossynet_carry_open(struct lossynet *net); /* sees to out_of_memory only */
void lossynet_carry_close(struct lossynet *net);
/* Before what is not sent yet of local worker v (0 ... V-1) leaves, up to a bucket; or of all. */
void lossynet_carry_add(struct lossynet *net, int v, float *vector, int bucket);
void lossynet_carry_rest(struct lossynet *net, float *const *vectors);
/* After masks were returned. */
void lossynet_carry_keep(struct lossynet *net, float *const *vectors);

/* ---- the net (net.c) ---- */

/* What arrived in a phase that has just ended, for replay (record.c). path NULL: nothing is written. */
lossynet_status lossynet_record_open(struct lossynet *net, const char *path);
lossynet_status lossynet_record(struct lossynet *net, lossynet_phase phase, uint64_t step);
void lossynet_record_close(struct lossynet *net);

struct lossynet_history { /* forgotten exponentially */
    double expected, arrived;
};

struct lossynet_total { /* since open; PARAMETER phase */
    uint64_t expected, arrived;
};

struct lossynet {
    struct lossynet_world world;
    int workers; /* N */
    int local;   /* V */
    int first;   /* this rank hosts workers first ... first + local - 1 */
    int threads;
    lossynet_estimator estimator;
    lossynet_weighted_sum weighted_sum;
    struct lossynet_memory memory; /* all NULL: the host's */
    struct lossynet_layout layout;
    struct lossynet_loss loss;
    bool return_masks;
    int round;       /* of repair, the present one; 0: packets are sent for the first time */
    uint64_t *chain; /* [2][V][N], for "burst" and "outage" */
    uint64_t step, run;
    uint64_t broadcast_step;     /* of the last broadcast */
    FILE *record;                /* NULL: none */
    bool reducing, broadcasting; /* begun, not ended */
    size_t memory_bytes;
    bool measuring; /* lossynet_memory_needed: count, allocate nothing */
    bool out_of_memory;

    /* Per thread. */
    float *weights;        /* [threads][largest_shard_packets * N] */
    const float **senders; /* [threads][N] */
    uint8_t *masks;        /* [threads][largest_owner_packets] */

    /* GRADIENT: packet k of local owner v from sender s arrived?
     * arrived[arrived_start[v] + s * packets of v + k] */
    uint8_t *arrived;
    size_t *arrived_start;            /* [V] */
    struct lossynet_history *history; /* [V] */
    double *inflation;                /* [V]: 1/(1-p) for `ht`, this step */

    /* PARAMETER: steps since packet p reached local worker v, age[v * packets + p] */
    uint32_t *age;

    /* Of steps with even and odd numbers; phase[] of the receiver, bytes sent. */
    struct lossynet_counters *counters[2]; /* [V] */
    struct lossynet_total *totals;         /* [V] */
    void *gathered;                        /* [N] of struct lossynet_counters or lossynet_ages */

    /* Several ranks only. */
    struct lossynet_link *link;
    struct lossynet_engine *engine;
    struct lossynet_rejected rejected;
    uint64_t stragglers;                /* phases of peers that ended by deadline */
    uint64_t reported[LOSSYNET_EVENTS]; /* network's events when last told */
    /* Gradients of remote workers for local owners: element e of what v owns, from the i-th remote
     * worker: inbox[inbox_start[v] + i * owned elements of v + e] */
    float *inbox;
    void (*release)(void *memory); /* the inbox; NULL: free */
    size_t *inbox_start;           /* [V] */
    uint8_t *outgoing[2];   /* which packets to remote workers survive injected loss, by phase */
    size_t *outgoing_start; /* [V], of phase PARAMETER */
    uint8_t *incoming;      /* multicast: the same at the receiver, [V][packets] */
    size_t *gather_offset;  /* [R + 1] */

    struct lossynet_masks masks_returned;
    struct lossynet_carry carry;
    struct lossynet_repair repair;
    struct lossynet_drift_state drift;
};

/* lossynet_open over a link of the caller's choice, which a rank alone does not open. */
lossynet_status lossynet_net_open(const struct lossynet_world *world,
                                  const struct lossynet_settings *settings,
                                  lossynet_link_open link_open, lossynet_share share,
                                  void *share_context, struct lossynet **out);

/* How to open a link of this kind; auto: RDMA where every rank has it, else UDP, and collective. */
lossynet_status lossynet_link_choose(const struct lossynet_world *world, lossynet_link_kind kind,
                                     lossynet_link_open *out);

/* A lossynet_share by MPI (bootstrap.c). */
lossynet_status lossynet_share_mpi(void *context, const struct lossynet_world *world, void *all,
                                   size_t bytes);

void lossynet_drift_open(struct lossynet *net, int samples); /* sees to out_of_memory only */
void lossynet_drift_close(struct lossynet *net);

/* What the network did since open, [LOSSYNET_EVENTS]. */
void lossynet_network_counters(struct lossynet *net, uint64_t *events);

/* lossynet_memory_take for something the net keeps: adds up memory_bytes, notes a failure in
 * out_of_memory, and only counts when measuring. */
void *lossynet_net_take(struct lossynet *net, size_t count, size_t size);
#define NET_TAKE(net, pointer, count)                                                              \
    ((pointer) = lossynet_net_take((net), (count), sizeof *(pointer)))

static inline bool lossynet_is_local(const struct lossynet *net, int worker) {
    return worker >= net->first && worker < net->first + net->local;
}

/* Where the elements of a packet of shard (bucket, owner) are. */
static inline void lossynet_packet_span(const struct lossynet_layout *layout, int bucket, int owner,
                                        size_t packet, size_t *offset, size_t *count) {
    size_t shard = (size_t)bucket * layout->workers + owner;
    size_t end = layout->shard_element[shard + 1];
    *offset = layout->shard_element[shard] + packet * layout->packet_elements;
    *count = end - *offset < layout->packet_elements ? end - *offset : layout->packet_elements;
}

/* Packets of local owners, from every worker: the size of `arrived` and of what is laid out like it. */
size_t lossynet_arrived_packets(const struct lossynet *net);

/* This thread's [largest_owner_packets] of net->masks. */
uint8_t *lossynet_thread_mask(const struct lossynet *net);

/* Masks: packets of local owner `v` (0 ... V-1) from worker `sender`. */
static inline uint8_t *lossynet_arrived(const struct lossynet *net, int v, int sender) {
    size_t n = lossynet_layout_owner_packets(&net->layout, net->first + v);
    return net->arrived + net->arrived_start[v] + (size_t)sender * n;
}

/* The masses of their residuals, NULL where nothing is carried. */
static inline float *lossynet_carry_mass(const struct lossynet *net, int v) {
    return net->carry.mass ? net->carry.mass + net->arrived_start[v] : NULL;
}

static inline float *lossynet_inbox(const struct lossynet *net, int v, int sender) {
    size_t remote = (size_t)(sender < net->first ? sender : sender - net->local);
    return net->inbox + net->inbox_start[v] +
           remote * lossynet_layout_owned(&net->layout, net->first + v);
}

static inline uint64_t *lossynet_chain(const struct lossynet *net, lossynet_phase phase, int v,
                                       int receiver) {
    if (!net->chain) return NULL;
    return net->chain + ((size_t)phase * net->local + v) * net->workers + receiver;
}

/* What injected loss lets through of n packets in this step, see lossynet_loss_mask; lossless: all.
 * In a repair round: of those that had not arrived. */
static inline void lossynet_injected(const struct lossynet *net, lossynet_phase phase, int sender,
                                     int receiver, size_t n, bool lossless, uint8_t *mask) {
    if (lossless) {
        memset(mask, 1, n);
        return;
    }
    if (net->round > 0) {
        lossynet_repair_mask(net, phase, sender, receiver, n, mask);
        return;
    }
    uint64_t *chain = lossynet_is_local(net, sender)
                          ? lossynet_chain(net, phase, sender - net->first, receiver)
                          : NULL;
    lossynet_loss_mask(&net->loss, phase, net->step, sender, receiver, n, chain, mask);
}

#endif
