/* algorithm.h — averaging and broadcasting vectors of which packets are lost: what lossynet.h
 * promises.
 *
 * Knows vectors, who owns what of them (partition), which packets arrive (arrivals), estimators,
 * ages, error feedback, retransmission and drift. Packets between workers of one rank are copied in
 * memory, others go through the transport.
 * Must not know links, datagrams, peers, windows or time-outs. Uses transport, partition, loss and
 * base.
 *
 *     gradient.c        GRADIENT phase: estimator weights, weighted sum      }  each phase from its
 *     parameter.c       PARAMETER phase: copies, ages, what is fresh         }  begin to its end
 *     arrivals.c        which packets arrived, and telling their senders
 *     exchange.c        which packets leave for other ranks, and where those that come land
 *     retransmit.c      rounds in which what was lost is sent again
 *     error_feedback.c  lost gradients, added to the next ones
 *     unconfirmed.c     the same, where nobody waits for acknowledgements
 *     rounding.c        what is sent is rounded, within a rank too
 *     owned.c           what owners hold, where that lies apart from vectors
 *     lead.c            how far ahead of the model owners broadcast
 *     step.c            the begin of a step, and steps that do not wait for late ranks
 *     drift.c           how far the replicas are apart, and how far they should be
 *     stats.c           counters, summed over all workers
 *     state.c           what is remembered from step to step, as bytes
 *
 * Sizes in comments: N workers, V of them in this rank, R ranks, K packets in a vector, B buckets, G
 * workers in a group. Every owner has a partner in each group, which exchanges its packets for the
 * group (partition.h); where every worker is a group, all are everyone's partners.
 */
#ifndef LOSSYNET_ALGORITHM_H
#define LOSSYNET_ALGORITHM_H

#include "lossynet/base/base.h"
#include "lossynet/loss/loss.h"
#include "lossynet/lossynet.h"
#include "lossynet/partition/partition.h"
#include "lossynet/transport/transport.h"

#include <stdio.h>
#include <string.h>

/* ---- arrivals (arrivals.c) ---- */

struct lossynet_total { /* packets since open */
    uint64_t expected, arrived;
};

/* Acknowledgements, on their way to the senders in a message. */
struct lossynet_acks {
    /* One bit per packet: by rank, of the links on which this rank's workers own the packets, and
     * of the others. */
    size_t *own_offset, *other_offset; /* [R + 1], bytes */
    uint8_t *own_bits, *other_bits;
    uint8_t *own_asks, *other_asks; /* the same in rounds of retransmission */
    uint8_t *delivered;             /* [V][(K + 7) / 8], see lossynet_delivered */
    bool deliver;                   /* after every GRADIENT phase senders are told */
    uint8_t *came;                  /* [R]: whose have come; NULL: all wait for all */
};

/* One byte per packet of each directed link between two workers, of which one is local. The packets
 * of a link lie together, in order of (bucket, packet); they are those of the shard's owner, who is
 * the receiver in phase GRADIENT and the sender in phase PARAMETER. So there are two shapes: the
 * links on which the local worker owns the packets, [V][N][its packets], and the others, [V][K].
 * lossynet_rx and lossynet_tx find a link. */
struct lossynet_arrivals {
    uint8_t *arrived[2]; /* by (receiver, sender): 1 = it is there; one's own are */
    uint8_t
        *survives[2];  /* by (sender, receiver): 1 = injected loss lets it leave; several ranks */
    uint8_t *acked[2]; /* by (sender, receiver): 1 = the sender was told that it has arrived, or
                             is not asked for again; NULL: senders are not told */
    uint8_t *takes;    /* multicast, PARAMETER: `survives` at the receiver, by (receiver, sender) */
    uint32_t *age;     /* [V][K], in order of packets: steps since parameters arrived */
    size_t *own_start; /* [V]: where a worker's links begin that have its own packets */
    uint64_t *chain;   /* [2][V][N], for loss models "burst" and "outage"; NULL for others */
    uint8_t *scratch;  /* [threads][largest_owner_packets] */
    FILE *trace;       /* of what arrives; NULL: none */
    struct lossynet_total *total; /* [V][N], by (receiver, sender), both phases */

    struct lossynet_acks acks;
};

/* See to pool.out_of_memory only. gradient, parameter: senders are told in this phase. */
void lossynet_arrivals_open(struct lossynet_comm *comm, bool gradient, bool parameter);
void lossynet_arrivals_close(struct lossynet_comm *comm);
/* Before a phase opens: nothing has arrived but one's own. */
void lossynet_arrivals_clear(struct lossynet_comm *comm, lossynet_phase phase);
/* Tells the senders what has arrived in this phase so far; in a round of retransmission: what is
 * not asked for again. Collective. */
lossynet_status lossynet_arrivals_acknowledge(struct lossynet_comm *comm, lossynet_phase phase);
/* What this rank acknowledges to another of the GRADIENT phase: with `make` of the one that is open,
 * else as it was made last. Valid until the next is made. */
const uint8_t *lossynet_arrivals_answer(struct lossynet_comm *comm, int rank, bool make,
                                        size_t *bytes);
/* What arrived at local worker v from others in a phase that has ended, and what was to; its own do
 * not count. Adds them to `total`, so call it once for each phase. */
void lossynet_arrivals_count(const struct lossynet_comm *comm, lossynet_phase phase, int v,
                             uint64_t *expected, uint64_t *arrived);
/* What injected loss lets through of n packets in this step, see lossynet_loss_mask; lossless: all.
 * In a round of retransmission: of those that had not arrived. */
void lossynet_injected(const struct lossynet_comm *comm, lossynet_phase phase, int sender,
                       int receiver, size_t n, bool lossless, uint8_t *mask);
/* Writes what arrived in a phase that has just ended, if a trace is written. */
lossynet_status lossynet_arrivals_trace(struct lossynet_comm *comm, lossynet_phase phase,
                                        uint64_t step);
/* This thread's scratch. */
uint8_t *lossynet_scratch(const struct lossynet_comm *comm);

/* ---- averaging (gradient.c) ---- */

struct lossynet_history { /* forgotten exponentially */
    double expected, arrived;
};

union lossynet_senders { /* by vector_dtype */
    const float **float32;
    const uint16_t **bf16;
};

struct lossynet_averaging {
    lossynet_estimator estimator;
    lossynet_weighted_sum weighted_sum;
    lossynet_weighted_sum_bf16 weighted_sum_bf16;
    bool whole;                       /* it is given a shard at a time */
    int done;                         /* buckets of this phase that are averaged already */
    float *weights;                   /* [threads][largest_shard_packets * groups] */
    union lossynet_senders senders;   /* [threads][groups] */
    struct lossynet_history *history; /* [V] */
    double *inflation;                /* [V]: 1/(1-p) for `ht`, this step */
};

void lossynet_weighted_sum_plain(float *out, const float *const *sender, const float *weight,
                                 int senders, size_t n, size_t packet);
void lossynet_weighted_sum_bf16_plain(float *out, const uint16_t *const *sender,
                                      const float *weight, int senders, size_t n, size_t packet);

/* ---- rounding (rounding.c) ---- */

/* Of what a worker sends, from element `offset` of its vector on, in the present step. */
struct lossynet_rounding lossynet_rounding_of(const struct lossynet_comm *comm,
                                              lossynet_phase phase, int sender, size_t offset);
/* Of vectors that the host cannot touch (settings.memory): to[j] = from[j], rounded so, for j < n
 * where a packet arrived. to may be from. */
void lossynet_round_there(const struct lossynet_comm *comm, const struct lossynet_rounding *r,
                          float *to, const float *from, const uint8_t *arrived, size_t n);
/* Rounds, in local workers' vectors, what other workers own: those of this rank, or
 * those of other ranks. */
void lossynet_round_others(const struct lossynet_comm *comm, lossynet_phase phase,
                           float *const *vectors, bool remote);

/* ---- what owners hold apart from vectors (owned.c) ---- */

struct lossynet_owned { /* [V], in order of buckets; NULL: it is in the vectors */
    float *const *averages;
    const float *const *values;
};

/* Before vectors are read or written: logs where vectors of bfloat16 lack what lies apart. */
lossynet_status lossynet_owned_check(const struct lossynet_comm *comm);
/* What PARAMETER phases send in place of the vectors' own; NULL: these. */
const float *const *lossynet_sent_values(const struct lossynet_comm *comm);

/* ---- exchange between ranks (exchange.c) ---- */

struct lossynet_cursor { /* where sending stands, for (phase, rank, local worker) */
    int bucket;          /* in the phase's order */
    int receiver;        /* local to the rank */
    size_t packet;
};

struct lossynet_source { /* what of our present phase of a kind leaves */
    float *const *vectors;
    const float *const *values;     /* PARAMETER: what leaves instead of `vectors`; NULL: these */
    int *ready;                     /* [V]: buckets that may leave, in the phase's order; atomic */
    struct lossynet_cursor *cursor; /* [R][V] */
    int *turn;                      /* [R]: local worker whose turn it is */
};

struct lossynet_elsewhere { /* a local worker's gradients, in a device's memory */
    const float *vector;    /* what phases are given instead; NULL: nothing is elsewhere */
    const float *there;
};

struct lossynet_exchange {
    struct lossynet_source source[2];     /* by phase */
    struct lossynet_elsewhere *elsewhere; /* [V] */
    uint8_t *rounded; /* [LOSSYNET_BATCH][packet_bytes], payloads, where these are rounded */
    /* By packet that a local worker owns: its parameters in blocks, packed once for all receivers,
     * and whether that is done. NULL: they are packed for each. */
    uint8_t *kept;
    bool *is_kept;
    size_t packet_bytes; /* of a full packet's payload */
    bool reliable;       /* what comes is as it was sent */
    /* Gradients of remote workers for local owners, of the vectors' dtype: element e of what v
     * owns, from its partner in the i-th remote group: inbox[inbox_start[v] + i * owned elements of
     * v + e] */
    void *inbox;
    void (*release)(void *memory); /* the inbox; NULL: free */
    size_t *inbox_start;           /* [V] */
};

/* Sees to pool.out_of_memory only. allocate: of the inbox, NULL for ours. */
void lossynet_exchange_open(struct lossynet_comm *comm, bool multicast,
                            void *(*allocate)(size_t bytes), void (*release)(void *memory));
void lossynet_exchange_close(struct lossynet_comm *comm);
/* Opens the next phase for receiving, and for sending: nothing leaves before `ready` says so. */
void lossynet_exchange_receive(struct lossynet_comm *comm, lossynet_phase phase, bool lossless);
void lossynet_exchange_send(struct lossynet_comm *comm, lossynet_phase phase, float *const *vectors,
                            bool lossless);
/* So many buckets of local worker v (0 ... V-1) may leave; all of all workers. */
void lossynet_exchange_ready(struct lossynet_comm *comm, lossynet_phase phase, int v, int buckets);
void lossynet_exchange_ready_all(struct lossynet_comm *comm, lossynet_phase phase);

/* ---- retransmission (retransmit.c) ---- */

struct lossynet_retransmission {
    int rounds[2]; /* by phase */
    double budget; /* of a phase's packets, that a worker may ask for again; 0: all */
    size_t *asked; /* [V]: by this worker, in this phase */
    uint8_t *asks; /* as arrivals.arrived: 1 = the receiver wants it again; NULL: nothing is */
    bool *sends;   /* [R]: whether something may come of a rank in this round */
};

void lossynet_retransmission_open(struct lossynet_comm *comm); /* sees to pool.out_of_memory only */
void lossynet_retransmission_close(struct lossynet_comm *comm);
/* How many rounds a phase has. In a replay none: the record says what had arrived after them. */
int lossynet_retransmission_rounds(const struct lossynet_comm *comm, lossynet_phase phase);
/* Begins round steps.round: workers ask, senders count what they will send. Collective. */
lossynet_status lossynet_retransmission_ask(struct lossynet_comm *comm, lossynet_phase phase);

/* ---- error feedback (error_feedback.c) ---- */

struct lossynet_lateness { /* of the gradients in averages, summed over packets */
    double late;           /* mean age in steps, where some are carried (error_feedback.c) */
    double others;         /* share that other workers than the owner computed */
};

struct lossynet_unconfirmed { /* unconfirmed.c; links [V][N], packets as lossynet_tx finds them */
    bool on;
    uint32_t *sent;    /* by (sender, owner): step + 1 of what lies apart; 0: nothing does */
    uint8_t *told;     /* by (sender, owner): in this step, with ... */
    uint32_t *tag;     /* ... this tag: step + 1 of what it acknowledges */
    uint32_t *own_tag; /* by (owner, sender): of the acknowledgement that is given */
    uint8_t *held, *held_apart; /* by (sender, owner) packet: gradients in residual and apart */
    float *apart;               /* [V][elements] */
};

struct lossynet_feedback {
    struct lossynet_unconfirmed unconfirmed;
    float share;
    float *mass;     /* as arrivals.arrived[GRADIENT]: gradients in the residual of a packet; NULL:
                    nothing is carried */
    float *residual; /* [V][elements]: what was sent in vain, and what rounding in blocks took away;
                        NULL: it is kept apart */
    struct lossynet_residuals apart;
    int *added; /* [V]: buckets of the present vector that have their residual */
    struct lossynet_lateness *late; /* [V]: of the last phase's averages */
    bool *alone; /* [N]: what came of the worker in the last phase was computed before */
};

/* Sees to pool.out_of_memory only. apart: may be NULL. */
void lossynet_feedback_open(struct lossynet_comm *comm, const struct lossynet_residuals *apart);

/* ---- error feedback without waiting (unconfirmed.c) ----
 * v: a local worker, 0 ... V-1. packet: index in `held`. */

void lossynet_unconfirmed_open(struct lossynet_comm *comm); /* sees to pool.out_of_memory only */
void lossynet_unconfirmed_close(struct lossynet_comm *comm);
/* Gradients that v's packet holds in this step. */
int lossynet_unconfirmed_gradients(const struct lossynet_comm *comm, int v, size_t packet);
/* Clears mask[k], k < n, of what must not or need not leave for the owner. */
void lossynet_unconfirmed_mask(const struct lossynet_comm *comm, int v, int owner, size_t n,
                               uint8_t *mask);
/* The mass, as lossynet_feedback_mass holds it, of a packet with so many gradients. */
float lossynet_unconfirmed_mass(const struct lossynet_comm *comm, int gradients);
/* The acknowledgement of local owner v to a sender: whether it is a new one; *tag: of its step. */
bool lossynet_unconfirmed_renews(struct lossynet_comm *comm, int v, int sender,
                                 const uint8_t *arrived, size_t n, uint32_t *tag);
/* Whether nothing leaves on this link, since a step's acknowledgement has not come. */
bool lossynet_unconfirmed_waits(const struct lossynet_comm *comm, int v, int owner);
/* Whether sender v has an acknowledgement of an owner in this step, and its tag. */
void lossynet_unconfirmed_told(struct lossynet_comm *comm, int v, int owner, bool told,
                               uint32_t tag);
/* As lossynet_feedback_keep, for residuals. */
void lossynet_unconfirmed_keep(struct lossynet_comm *comm, float *const *vectors);
/* After the residual of v was loaded. */
void lossynet_unconfirmed_load(struct lossynet_comm *comm, int v);

void lossynet_feedback_close(struct lossynet_comm *comm);
/* Before what is not sent yet of local worker v (0 ... V-1) leaves, up to a bucket; or of all. */
void lossynet_feedback_add(struct lossynet_comm *comm, int v, float *vector, int bucket);
void lossynet_feedback_rest(struct lossynet_comm *comm, float *const *vectors);
/* After senders were told what arrived. */
void lossynet_feedback_keep(struct lossynet_comm *comm, float *const *vectors);
/* The residual of a packet whose fate is known. has_error: the residual holds what rounding has
 * taken away. */
void lossynet_feedback_settle(bool has_error, bool arrived, float *residual, const float *sent,
                              size_t count);
/* The residual of local worker v, as bytes. */
void lossynet_feedback_save(const struct lossynet_comm *comm, int v, void *out);
void lossynet_feedback_load(struct lossynet_comm *comm, int v, const void *in);

/* ---- drift (drift.c) ---- */

enum { LOSSYNET_RING = LOSSYNET_LAGS + 1 };

struct lossynet_ages { /* one worker's; its own packets do not count */
    uint64_t sum, packets;
    uint64_t expected, arrived;    /* since open, phase PARAMETER */
    struct lossynet_lateness late; /* of the gradients in its averages */
    uint32_t largest;
    uint32_t aged[LOSSYNET_RING + 1]; /* packets of age 0, 1, ...; the last: that or more */
};

struct lossynet_drift_state {
    int samples;
    uint64_t measured;              /* calls so far */
    size_t *element;                /* [samples] */
    int *owner;                     /* [samples] */
    float *mine;                    /* [V][samples] */
    float *values;                  /* [N][samples] */
    float *fresh;                   /* [samples], of the last call */
    float *model, *model_change;    /* [samples], the same and its last change, never rounded */
    float *change;                  /* [RING][samples], the last changes */
    uint8_t *scale;                 /* [V][samples], of the blocks that an owner's samples are in */
    uint8_t *scales;                /* [N][samples]; both NULL: values are not rounded in blocks */
    struct lossynet_ages *ages;     /* [V] */
    struct lossynet_ages *all_ages; /* [N] */
    double lead;                    /* of the broadcast that is measured */
};

void lossynet_drift_open(struct lossynet_comm *comm,
                         int samples); /* sees to pool.out_of_memory only */
void lossynet_drift_close(struct lossynet_comm *comm);
/* lossynet_drift_measure in two parts: puts aside what is gathered; computes, after that is
 * there. */
lossynet_status lossynet_drift_begin(struct lossynet_comm *comm, float *const *vectors);
void lossynet_drift_end(struct lossynet_comm *comm, struct lossynet_drift *out);

/* ---- late ranks (step.c) ---- */

/* without[w], w < N: that worker had no gradient in the GRADIENT phase that has just ended. */
void lossynet_without_gradient(const struct lossynet_comm *comm, bool *without);
/* Whether a worker has a gradient in this step: not where its rank idles, or is replayed so. */
bool lossynet_has_gradient(const struct lossynet_comm *comm, int worker);
/* Clears mask[k], k < n, of what local worker v does not send to an owner, or to itself, in this
 * step. */
void lossynet_withhold(const struct lossynet_comm *comm, int v, int owner, size_t n, uint8_t *mask);
/* When lossynet_reduce begins: notes whether this rank is late. */
void lossynet_late_note(struct lossynet_comm *comm);

/* ---- the lead (lead.c) ---- */

/* Sums over steps, of which older ones count less. */
struct lossynet_lead_sums {
    double packets, age;              /* packets of others' shards, over all workers; their ages */
    double aged[LOSSYNET_RING + 1];   /* of these, packets of age 0, 1, ...; the last: or more */
    struct lossynet_lateness late;    /* of gradients, where they are carried */
    double covariance[LOSSYNET_RING]; /* of changes 0, 1, ... steps apart (drift.c) */
};

struct lossynet_lead {
    bool wanted;               /* lossynet_lead will be asked */
    const float *const *ahead; /* [V]: what the next broadcast sends; NULL: the vectors */
    double used;               /* the lead of `ahead`, in steps */
    struct lossynet_lead_sums sums;
};

/* Adds a step's ages, and its covariances; NULL: these are not measured. */
void lossynet_lead_add(struct lossynet_comm *comm, const struct lossynet_ages *ages,
                       const double *covariance);

/* ---- counters (stats.c) ---- */

enum { LOSSYNET_ASIDE_MOST = 8 };    /* gathers that wait for the next exchange */
enum { LOSSYNET_ASIDE_BYTES = 256 }; /* of one worker, beside counters, ages and drift sample */

struct lossynet_aside_item {
    void *all;
    size_t bytes; /* of a rank */
};

struct lossynet_aside { /* gathers that the next exchange carries */
    struct lossynet_aside_item item[LOSSYNET_ASIDE_MOST];
    int count;
    size_t bytes;   /* of a rank, in all of them */
    size_t room;    /* bytes of a worker */
    char *mine;     /* [V * room]; NULL: the rank is alone */
    char *together; /* [N * room] */
    uint8_t *came;  /* [R]: of the last pulse */
};

struct lossynet_stats {
    struct lossynet_counters *counters[2]; /* [V], of the present step and the last; phase[] of
                                              the receiver, bytes sent */
    struct lossynet_total *totals;         /* [V], PARAMETER phase */
    struct lossynet_counters *gathered;    /* [N] */
    struct lossynet_aside aside;
    size_t *gather_offset;              /* [R + 1] */
    uint64_t reported[LOSSYNET_EVENTS]; /* network's events when last told */
};

/* Sees to pool.out_of_memory only; after lossynet_drift_open. */
void lossynet_aside_open(struct lossynet_comm *comm);
void lossynet_aside_close(struct lossynet_comm *comm);

/* ---- all of it ---- */

struct lossynet_steps {
    uint64_t step, broadcast_step; /* the present one; that of the last broadcast */
    int turn, broadcast_turn;      /* of these, 0 or 1: where stats.counters has them */
    int round; /* of retransmission, the present one; 0: packets are sent for the first time */
    bool reducing, broadcasting; /* begun, not ended */
    /* With settings.skip_late (step.c): */
    bool skips;
    bool begun;     /* a step */
    bool idle;      /* local workers have no gradient in this step */
    bool late;      /* this rank was, in the last reduce */
    uint64_t lates; /* how often it was */
    uint64_t next;  /* the step after the present one */
};

struct lossynet_workers {
    int count; /* N */
    int local; /* V */
    int first; /* this rank hosts workers first ... first + local - 1 */
};

struct lossynet_resources {
    int threads;
    struct lossynet_pool pool;     /* what the comm takes of the host's memory */
    struct lossynet_memory memory; /* of the vectors; all NULL: the host's */
    bool bf16;                     /* vectors hold bfloat16 */
    struct lossynet_owned owned;
};

struct lossynet_comm {
    struct lossynet_world world;
    struct lossynet_workers workers;
    struct lossynet_resources resources;
    struct lossynet_partition partition;
    struct lossynet_loss loss;
    struct lossynet_steps steps;
    struct lossynet_arrivals arrivals;
    struct lossynet_averaging averaging;
    struct lossynet_feedback feedback;
    struct lossynet_retransmission retransmission;
    struct lossynet_transport *transport; /* NULL: the rank is alone */
    struct lossynet_exchange exchange;
    struct lossynet_stats stats;
    struct lossynet_drift_state drift;
    struct lossynet_lead lead;
};

#define COMM_TAKE(comm, pointer, count) POOL_TAKE(&(comm)->resources.pool, pointer, count)

static inline bool lossynet_is_local(const struct lossynet_comm *comm, int worker) {
    return worker >= comm->workers.first && worker < comm->workers.first + comm->workers.local;
}

/* Where the packets between local worker v and another one lie: those that v owns, or not; *n of
 * them, none where no packets travel. */
static inline size_t lossynet_link_start(const struct lossynet_comm *comm, bool own, int v,
                                         int other, size_t *n) {
    const int worker = comm->workers.first + v;
    const size_t packets = lossynet_partition_owner_packets(&comm->partition, own ? worker : other);
    const bool travels = own ? lossynet_is_partner(&comm->partition, other, worker)
                             : lossynet_is_partner(&comm->partition, worker, other);
    *n = travels ? packets : 0;
    return own ? comm->arrivals.own_start[v] + (size_t)other * packets
               : (size_t)v * comm->partition.packets + comm->partition.owner_start[other];
}

/* Whether packets travel from one worker to another in a phase. */
static inline bool lossynet_is_link(const struct lossynet_comm *comm, lossynet_phase phase,
                                    int sender, int receiver) {
    return phase == LOSSYNET_GRADIENT ? lossynet_is_partner(&comm->partition, sender, receiver)
                                      : lossynet_is_partner(&comm->partition, receiver, sender);
}

/* The same by direction: from a worker to local worker v, and from v to a worker. */
static inline size_t lossynet_rx(const struct lossynet_comm *comm, lossynet_phase phase, int v,
                                 int sender, size_t *n) {
    return lossynet_link_start(comm, phase == LOSSYNET_GRADIENT, v, sender, n);
}

static inline size_t lossynet_tx(const struct lossynet_comm *comm, lossynet_phase phase, int v,
                                 int receiver, size_t *n) {
    return lossynet_link_start(comm, phase == LOSSYNET_PARAMETER, v, receiver, n);
}

/* What has arrived at local worker v of a sender's packets. */
static inline uint8_t *lossynet_arrived(const struct lossynet_comm *comm, lossynet_phase phase,
                                        int v, int sender, size_t *n) {
    return comm->arrivals.arrived[phase] + lossynet_rx(comm, phase, v, sender, n);
}

/* Bytes of arrays by (receiver, sender), and by (sender, receiver). */
static inline size_t lossynet_links(const struct lossynet_comm *comm, bool own) {
    size_t packets = 0;
    for (int v = 0; v < comm->workers.local; v++)
        packets += lossynet_partition_owner_packets(&comm->partition, comm->workers.first + v);
    return own ? packets * (size_t)comm->workers.count
               : (size_t)comm->workers.local * comm->partition.packets;
}

/* The masses of their residuals, NULL where nothing is carried. */
static inline float *lossynet_feedback_mass(const struct lossynet_comm *comm, int v) {
    return comm->feedback.mass ? comm->feedback.mass + comm->arrivals.own_start[v] : NULL;
}

/* Where rounding notes what it takes away from local worker v's gradient; NULL where nothing
 * does. */
static inline float *lossynet_feedback_error(const struct lossynet_comm *comm, int v) {
    return comm->feedback.residual && lossynet_has_blocks(&comm->partition)
               ? comm->feedback.residual + (size_t)v * comm->partition.elements
               : NULL;
}

/* How many groups have a worker in this rank, from group *first on; and how many have none. */
static inline int lossynet_local_groups(const struct lossynet_comm *comm, int *first) {
    const int *of = comm->partition.groups.of + comm->workers.first;
    *first = of[0];
    return of[comm->workers.local - 1] - of[0] + 1;
}

static inline int lossynet_remote_groups(const struct lossynet_comm *comm) {
    int first;
    return comm->partition.groups.count - lossynet_local_groups(comm, &first);
}

static inline size_t lossynet_element_bytes(const struct lossynet_comm *comm) { /* of vectors */
    return comm->resources.bf16 ? sizeof(uint16_t) : sizeof(float);
}

/* Element e of a vector that a phase was given, or of the inbox. */
static inline void *lossynet_element(const struct lossynet_comm *comm, const void *vector,
                                     size_t e) {
    return (char *)vector + e * lossynet_element_bytes(comm);
}

/* What workers of this rank send each other is rounded in their vectors. */
static inline bool lossynet_rounds_vectors(const struct lossynet_comm *comm) {
    return comm->resources.bf16 ? lossynet_has_blocks(&comm->partition)
                                : lossynet_rounds(&comm->partition);
}

/* Element e of what local worker v owns, as a sender's packets brought it. */
static inline void *lossynet_inbox(const struct lossynet_comm *comm, int v, int sender, size_t e) {
    int first, local = lossynet_local_groups(comm, &first);
    const int group = comm->partition.groups.of[sender];
    size_t remote = (size_t)(group < first ? group : group - local);
    return lossynet_element(
        comm, comm->exchange.inbox,
        comm->exchange.inbox_start[v] + e +
            remote * lossynet_partition_owned(&comm->partition, comm->workers.first + v));
}

/* Elements `offset` ... of a vector, of shard (bucket, local owner v): in `values`, or in the
 * vector, of float32 then, where these are NULL. */
static inline const float *lossynet_parameters(const struct lossynet_comm *comm,
                                               const float *const *values, const float *vector,
                                               int v, int bucket, size_t offset) {
    const struct lossynet_partition *partition = &comm->partition;
    const int owner = comm->workers.first + v;
    if (!values) return vector + offset;
    return values[v] + partition->owner_element[(size_t)owner * (partition->buckets + 1) + bucket] +
           (offset - partition->shard_element[(size_t)bucket * partition->workers + owner]);
}

#endif
