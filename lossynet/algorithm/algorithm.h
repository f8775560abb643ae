/* algorithm.h — averages and broadcasts vectors over a network that loses packets.
 *
 * This layer implements what lossynet.h promises. It knows vectors, their owners (partition), which
 * packets arrive (arrivals), estimators, ages, error feedback, retransmission and drift. It copies
 * packets between workers of one rank in memory, and sends the others through the transport.
 * It must not know links, datagrams, peers, windows or time-outs. It uses transport, partition,
 * loss and base.
 *
 *     gradient.c        GRADIENT phase: estimator weights, weighted sum      }  each phase from its
 *     parameter.c       PARAMETER phase: copies, ages, fresh elements        }  begin to its end
 *     calls.c           checks of what public functions are given (calls.h)
 *     rule.c            a rule of the program's own in their place
 *     arrivals.c        which packets arrived; injected.c: which ones injected loss lets through
 *     acknowledge.c     tells their senders
 *     exchange.c        which packets leave for other ranks, and where received packets are stored
 *     retransmit.c      rounds of retransmission
 *     rounds.c          how many of them the measured loss asks for
 *     ways.c            by which way they ask where a link is down
 *     names.c           which packets hold tensors with a loss rate or rounds of their own
 *     error_feedback.c  adds lost gradients to the next ones
 *     unconfirmed.c     the same when acknowledgements may come late
 *     residual.c        what both keep of a packet
 *     not_finite.c      tells all ranks whose numbers no receiver takes
 *     rounding.c        rounds what workers of one rank send each other, as over a link
 *     lead.c            how far ahead of the model owners broadcast
 *     step.c            the begin of a step, and steps that do not wait for late ranks
 *     parts.c           which part a worker takes in such a step
 *     drift.c           measures how far replicas differ, and computes how far they should
 *     gather.c          small gathers that always arrive
 *     stats.c           counters summed over all workers, and the report of a step
 *     state.c           the state that a checkpoint keeps, as bytes
 *
 * Sizes in comments: N workers, V of them in this rank, R ranks, K packets in a vector, B buckets,
 * G workers in a group. Every owner has a partner in each group, a worker that exchanges the
 * owner's packets for the group (partition.h). If every worker is a group, every worker is a
 * partner of every owner.
 */
#ifndef LOSSYNET_ALGORITHM_H
#define LOSSYNET_ALGORITHM_H

#include "lossynet/base/base.h"
#include "lossynet/loss/loss.h"
#include "lossynet/lossynet_trainer.h"
#include "lossynet/partition/partition.h"
#include "lossynet/transport/transport.h"

#include <stdio.h>
#include <string.h>

/* ---- arrivals (arrivals.c) ---- */

enum { LOSSYNET_NAME_CLASSES = 256 };

struct ln_name_class { /* bits of the entries that stand for a packet (ln_at_names) */
    uint32_t loss, rounds;
};

struct ln_names {
    struct ln_at rounds; /* settings.repair_at */
    uint8_t
        *packet; /* [K], in order of (owner, bucket, packet): its class; NULL: all are in class 0 */
    uint8_t *mask; /* [threads][largest_owner_packets] */
    int classes;
    struct ln_name_class class_of[LOSSYNET_NAME_CLASSES];
};

struct ln_total { /* packets since open */
    uint64_t expected, arrived;
};

/* Acknowledgements: one bit per packet, packed for the message to each rank. `own` are links whose
 * packets this rank's workers own, `other` the other links. */
struct ln_acks {
    size_t *own_offset, *other_offset; /* [R + 1], bytes: where each rank's bits begin */
    uint8_t *own_bits, *other_bits;
    uint8_t *own_asks, *other_asks; /* the same in rounds of retransmission */
    bool later;                     /* with the next gather, see settings.acknowledge_later */
    bool due;                       /* own_bits are written, and have not been sent */
    float **vectors;                /* [V]: whose packets they are about */
    uint8_t *out, *in;              /* both messages of such a gather, for all ranks */
    size_t room;   /* bytes of one rank's part of a gather that they have room for */
    uint8_t *came; /* [R]: a rank's part has come; NULL: ranks wait for all */
};

/* One byte per packet of each directed link between two workers, one of which is local. The packets
 * of a link are contiguous, in order of (bucket, packet). They belong to the shard's owner, who is
 * the receiver in phase GRADIENT and the sender in phase PARAMETER. So arrays have two shapes:
 * [V][N][packets of v] for links whose packets the local worker v owns, and [V][K] for the others.
 * ln_rx and ln_tx find a link. */
struct ln_arrivals {
    uint8_t *arrived[2]; /* by (receiver, sender): 1 = arrived; always 1 for a worker's own */
    uint8_t
        *survives[2];  /* by (sender, receiver): 1 = injected loss lets it leave; several ranks */
    uint8_t *acked[2]; /* by (sender, receiver): 1 = the sender was told that it arrived, or
                             it is not asked for again; NULL: senders are not told */
    uint32_t *age;     /* [V][K], in order of packets: steps since parameters arrived */
    size_t *own_start; /* [V]: start of the links on which worker v owns the packets */
    uint64_t *chain;   /* [2][V][N], for loss models "burst" and "outage"; NULL for others */
    uint8_t *scratch;  /* [threads][2][largest_owner_packets]; the second half is that of ways.c */
    FILE *trace;       /* records what arrives; NULL: no record */
    struct ln_total *total; /* [V][N], by (receiver, sender), both phases */

    struct ln_acks acks;
    struct ln_names names; /* see names.c */
};

/* Failures are only noted in pool.out_of_memory. */
void ln_arrivals_open(struct lossynet_comm *comm);
/* Ends the record of losses, if there is one. */
void ln_arrivals_close(struct lossynet_comm *comm);
/* Before a phase opens: notes that only workers' own packets have arrived. */
void ln_arrivals_clear(struct lossynet_comm *comm, lossynet_phase phase);
/* Adds to all counts what local worker v expected from others in a phase that has ended, what
 * arrived, and the bytes that it sent. Call it once for each phase. */
void ln_arrivals_count(const struct lossynet_comm *comm, lossynet_phase phase, int v);
/* Packets that have arrived become fresh. All others that the worker does not own become older by
 * `steps`. */
void ln_arrivals_age(const struct lossynet_comm *comm, int v, uint64_t steps);
/* If a trace is written, writes what arrived in a phase that has just ended. */
lossynet_status ln_arrivals_trace(struct lossynet_comm *comm, lossynet_phase phase, uint64_t step);
/* This thread's scratch memory. */
uint8_t *ln_scratch(const struct lossynet_comm *comm);

/* ---- telling the senders (acknowledge.c) ---- */

/* Failures are only noted in pool.out_of_memory. gradient, parameter: senders are told what arrived
 * in this phase. */
void ln_acknowledge_open(struct lossynet_comm *comm, bool gradient, bool parameter);
/* For ln_acknowledge_gather with parts of up to `room` bytes. */
void ln_acknowledge_open_later(struct lossynet_comm *comm, size_t room);
/* Tells the senders what has arrived in this phase so far. In a round of retransmission it tells
 * them which packets are not asked for again. Collective. */
lossynet_status ln_acknowledge(struct lossynet_comm *comm, lossynet_phase phase);
/* The same for a GRADIENT phase in two parts. write: notes what has arrived. gather: gathers parts of
 * `part` bytes in place, as ln_transport_gather does, and the same messages bring what was
 * noted to the senders (acks.due). Collective. */
void ln_acknowledge_write(struct lossynet_comm *comm);
lossynet_status ln_acknowledge_gather(struct lossynet_comm *comm, void *all, size_t part);
/* Tells the senders now, if that is due. Collective. */
lossynet_status ln_acknowledge_settle(struct lossynet_comm *comm);
/* This rank's acknowledgement of a GRADIENT phase to another rank. make: of the phase that is open;
 * otherwise the one that was made last. Valid until the next one is made. */
const uint8_t *ln_acknowledge_answer(struct lossynet_comm *comm, int rank, bool make,
                                     size_t *bytes);

/* ---- injected loss (injected.c) ---- */

/* Sets mask[k], k < n: whether injected loss lets packet k through in this step, see
 * ln_loss_mask. lossless: all pass. In a round of retransmission only packets that are asked
 * for again can pass. */
void ln_injected(const struct lossynet_comm *comm, lossynet_phase phase, int sender, int receiver,
                 size_t n, bool lossless, uint8_t *mask);

/* ---- averaging (gradient.c) ---- */

union ln_senders { /* by vector_dtype */
    const float **float32;
    const uint16_t **bf16;
};

struct ln_rule { /* rule.c */
    struct lossynet_rule functions;
    /* for one call of `average`: [N][largest_shard_packets], [N], and a shard */
    uint8_t *arrived;
    float *carried;
    const float **gradients;
    float *average;
    float *const *vectors; /* of the present broadcast */
};

struct ln_averaging {
    struct ln_rule rule;
    lossynet_estimator estimator;
    lossynet_weighted_sum weighted_sum;
    lossynet_weighted_sum_bf16 weighted_sum_bf16;
    bool whole;            /* settings.weighted_sum_whole */
    float *const *vectors; /* of the phase that has begun, and whether it is */
    bool lossless;
    int done; /* buckets of this phase that are averaged already */
    /* [threads][largest_shard_packets * groups]; with memory.average [K * groups] */
    float *weights;
    union ln_senders senders; /* [threads][groups] */
};

void ln_weighted_sum_plain(float *out, const float *const *sender, const float *weight, int senders,
                           size_t n, size_t packet);
void ln_weighted_sum_bf16_plain(float *out, const uint16_t *const *sender, const float *weight,
                                int senders, size_t n, size_t packet);

/* ---- a rule of the program's own (rule.c) ---- */

/* Logs one line if the settings do not fit a rule. */
lossynet_status ln_rule_check(const struct lossynet_settings *settings);
/* Failures are only noted in pool.out_of_memory. rule NULL: there is none. */
void ln_rule_open(struct lossynet_comm *comm, const struct lossynet_rule *rule);
uint64_t
ln_rule_fingerprint(const struct lossynet_rule *rule); /* of what must be alike on all ranks */
/* The buckets of local worker v's gradient up to `bucket` are about to leave. */
void ln_rule_send(struct lossynet_comm *comm, int v, float *vector, int bucket);
/* Averages what local worker v owns of a bucket. */
void ln_rule_average(const struct lossynet_comm *comm, float *const *vectors, int v, int bucket);
/* After the ages of a broadcast are known. */
void ln_rule_receive(const struct lossynet_comm *comm);

/* ---- rounding (rounding.c) ---- */

/* How a worker's elements from `offset` of its vector on are rounded in the present step. */
struct ln_rounding ln_rounding_of(const struct lossynet_comm *comm, lossynet_phase phase,
                                  int sender, size_t offset);
/* Bits of an element of a phase's packets, as for the functions of struct lossynet_memory. */
int ln_wire_bits(const struct lossynet_comm *comm, lossynet_phase phase);
/* Rounds, in local workers' vectors, the elements that other workers of this rank own; or with
 * `remote` those that workers of other ranks own. */
void ln_round_others(const struct lossynet_comm *comm, lossynet_phase phase, float *const *vectors,
                     bool remote);

/* ---- exchange between ranks (exchange.c) ---- */

struct ln_cursor { /* the next packet to send, for (phase, rank, local worker) */
    int bucket;    /* in the phase's order */
    int receiver;  /* index of a worker in that rank */
    size_t packet; /* of the thread's own */
};

struct ln_source { /* where the packets of a phase that we send come from */
    float *const *vectors;
    const float *const *ahead; /* PARAMETER: lead.ahead of this broadcast */
    int *ready;                /* [V]: buckets that may leave, in the phase's order; atomic */
};

/* What a thread of the transport has of its own. Of the K of them, thread i moves packets i, i + K, i + 2 K
 * ... of each shard. */
struct ln_lane {
    struct lossynet_comm *comm;
    size_t number;               /* i */
    struct ln_cursor *cursor[2]; /* by phase, [R][V] */
    int *next[2];                /* [R]: local worker that sends next */
    uint8_t *rounded; /* [LOSSYNET_BATCH][packet_bytes]: rounded payloads; NULL: none are rounded */
};

struct ln_exchange {
    struct ln_source source[2]; /* by phase */
    struct ln_lane *lane;       /* [lanes] */
    size_t lanes;
    /* For each packet that a local worker owns: its parameters in blocks, packed once for all
     * receivers, and whether this is done. NULL: they are packed for each receiver. */
    uint8_t *kept;
    bool *is_kept;
    size_t packet_bytes; /* of a full packet's payload */
    bool reliable;       /* the link neither loses nor changes packets */
    /* Gradients from remote workers for local owners, of the vectors' dtype. Element e of what v
     * owns, from v's partner in the i-th remote group, is at inbox[inbox_start[v] + i * (elements
     * that v owns) + e]. */
    void *inbox;
    size_t *inbox_start; /* [V] */
};

/* Failures are only noted in pool.out_of_memory. allocate, release: for the inbox; NULL: the library's. */
void ln_exchange_open(struct lossynet_comm *comm, void *(*allocate)(size_t bytes),
                      void (*release)(void *memory));
/* Opens the next phase for sending. Nothing leaves before a `ready` call. */
void ln_exchange_send(struct lossynet_comm *comm, lossynet_phase phase, float *const *vectors,
                      bool lossless);
/* The first `buckets` buckets of local worker v (0 ... V-1) may leave; or all buckets of all local
 * workers. */
void ln_exchange_ready(struct lossynet_comm *comm, lossynet_phase phase, int v, int buckets);
void ln_exchange_ready_all(struct lossynet_comm *comm, lossynet_phase phase);
/* Whether so many buckets of all local workers are ready. Then they hold what was written before. */
bool ln_exchange_is_ready(const struct lossynet_comm *comm, lossynet_phase phase, int buckets);

/* ---- retransmission (retransmit.c) ---- */

struct ln_rounds_sums { /* by phase; packets sent for the first time, see rounds.c */
    double sent[2], lost[2];
    uint32_t rounds[2]; /* chosen for the present step */
};

struct ln_retransmission {
    int rounds[2];    /* by phase; where they are measured, the most that there can be */
    int most_own[2];  /* the most rounds that a tensor or link has of its own (names.c) */
    bool measured[2]; /* by phase: sums.rounds counts (rounds.c) */
    struct ln_rounds_sums sums;
    struct ln_total *first[2]; /* [V]: the last phase, before its rounds; NULL: not measured */
    double budget; /* share of a phase's packets that a worker may ask for again; 0: no limit */
    bool error_feedback; /* lost gradients join the next ones */
    size_t *asked;       /* [V]: packets that this worker has asked for in this phase */
    uint8_t *asks; /* as arrivals.arrived: 1 = the receiver asks for it; NULL: no retransmission */
    bool *sends;   /* [R]: whether packets may come from a rank in this round */
    uint8_t *hops; /* [V][N]: how often a packet from this sender is sent in this round; 0: never */
};

/* Failures are only noted in pool.out_of_memory. */
void ln_retransmission_open(struct lossynet_comm *comm);
/* How many rounds the present phase has: those of all packets, or more of some. A replay has none: its
 * record says what had arrived after them. */
int ln_retransmission_rounds(const struct lossynet_comm *comm, lossynet_phase phase);
/* Begins round steps.round: workers ask for packets, and senders count what they will send.
 * Collective. */
lossynet_status ln_retransmission_ask(struct lossynet_comm *comm, lossynet_phase phase);

/* ---- other ways, where links are down (ways.c) ---- */

struct ln_way { /* of a link's packets in a round of retransmission */
    int path;   /* of the link; 0: the one on which packets are sent for the first time */
    int by;     /* GRADIENT: the worker that sends them on; PARAMETER: that has them. -1: none */
    int hops;   /* how often a packet is sent; 0: no way is up */
};

/* The way of the present round, steps.round. */
struct ln_way ln_way_of(const struct lossynet_comm *comm, lossynet_phase phase, int sender,
                        int receiver);
/* Sets mask[k], k < n: whether injected loss lets packet k through on this way. Uses the second half
 * of the thread's scratch memory. */
void ln_way_mask(const struct lossynet_comm *comm, lossynet_phase phase, const struct ln_way *way,
                 int sender, int receiver, size_t n, uint8_t *mask);
/* The same for the way from the sender to way->by. */
void ln_way_first_hop(const struct lossynet_comm *comm, lossynet_phase phase,
                      const struct ln_way *way, int sender, size_t n, uint8_t *mask);
/* What lossynet_rounds_expect says, for the model "outage". A second hop counts as a packet. */
void ln_ways_expect(const struct ln_loss *loss, int workers, lossynet_phase phase, int rounds,
                    double p, double budget, double *again, double *left);
/* How many rounds bring something, for the model "outage". */
int ln_ways_rounds(const struct ln_loss *loss, int workers, lossynet_phase phase, double p,
                   double budget);

/* ---- tensors with values of their own (names.c) ---- */

/* Reads settings.repair_at. Logs what is wrong. Close the list in any case. */
lossynet_status ln_repair_at_parse(struct ln_at *at, const struct lossynet_settings *settings);
/* Whether there are tensors with the names in a list. If not, logs one line that begins with `setting`. */
bool ln_names_exist(const struct ln_at *at, const char *setting,
                    const struct lossynet_settings *settings);
/* After the partition and the loss model were opened. Logs one line on failure. */
lossynet_status ln_names_open(struct lossynet_comm *comm, const struct lossynet_settings *settings);
/* As ln_loss_mask, in this step, with the rates of tensors. */
void ln_names_mask(const struct lossynet_comm *comm, const struct ln_loss *loss,
                   lossynet_phase phase, int sender, int receiver, size_t n, uint64_t *chain,
                   uint8_t *mask);
/* The injected loss rate, mean over links and packets. */
double ln_names_loss(const struct lossynet_comm *comm, lossynet_phase phase);
/* How many rounds packet k of a link has of its own; -1: as many as all others. */
int ln_names_rounds(const struct lossynet_comm *comm, lossynet_phase phase, int sender,
                    int receiver, size_t k);

/* ---- the number of rounds (rounds.c) ---- */

/* The most rounds that a phase can have, those of tensors and links of their own included. */
int ln_rounds_most_of(const struct lossynet_settings *settings, lossynet_phase phase);
int ln_rounds_most(const struct lossynet_comm *comm, lossynet_phase phase);
/* Failures are only noted in pool.out_of_memory. Call it before ln_retransmission_open. */
void ln_rounds_open(struct lossynet_comm *comm, const struct lossynet_settings *settings);
/* Counts what has arrived of a phase, before its first round. */
void ln_rounds_count(struct lossynet_comm *comm, lossynet_phase phase);
/* Adds a step's counts to the sums. */
struct ln_ages;
void ln_rounds_add(struct lossynet_comm *comm, const struct ln_ages *ages);
/* Chooses the rounds of the broadcast that begins, and of the next GRADIENT phase. */
void ln_rounds_choose(struct lossynet_comm *comm);

/* ---- error feedback (error_feedback.c) ---- */

struct lossynet_lateness { /* of the gradients in averages, summed over packets */
    double late;           /* mean age in steps; carried gradients are late (error_feedback.c) */
    double others;         /* share that was computed by other workers than the owner */
};

struct ln_unconfirmed { /* unconfirmed.c; links [V][N], packets as ln_tx finds them */
    bool on;
    uint32_t *sent;             /* by (sender, owner): step + 1 of what `apart` holds; 0: nothing */
    uint8_t *told;              /* by (sender, owner): an acknowledgement came in this step ... */
    uint32_t *tag;              /* ... with this tag: step + 1 of what it acknowledges */
    uint32_t *own_tag;          /* by (owner, sender): tag of the acknowledgement that we give */
    uint8_t *held, *held_apart; /* by (sender, owner) packet: gradients in `residual`, `apart` */
    uint16_t *apart;            /* [V][elements], bfloat16 like residuals */
};

struct ln_feedback {
    struct ln_unconfirmed unconfirmed;
    float share;
    float *mass; /* as arrivals.arrived[GRADIENT]: gradients in the residual of a packet; NULL: no
                    error feedback */
    /* [V][elements]: gradients that were lost, and what rounding took away. bfloat16. In a long
     * outage a residual grows to hundreds of gradients, and to nearest it would not grow beyond 256
     * times what is added. So what is lost is rounded at random, with numbers that depend on (seed,
     * step, worker, element). */
    uint16_t *residual;
    uint64_t step;                  /* whose packets senders are told about */
    struct lossynet_lateness *late; /* [V]: of the last phase's averages */
    bool *alone; /* [N]: the worker had no gradient in the last phase and sent its residual alone */
};

/* Failures are only noted in pool.out_of_memory. */
void ln_feedback_open(struct lossynet_comm *comm);

/* ---- error feedback without waiting (unconfirmed.c) ----
 * v: a local worker, 0 ... V-1. packet: index in `held`. */

/* Failures are only noted in pool.out_of_memory. */
void ln_unconfirmed_open(struct lossynet_comm *comm);
/* How many gradients v's packet holds in this step. */
int ln_unconfirmed_gradients(const struct lossynet_comm *comm, int v, size_t packet);
/* Clears mask[k], k < n, for packets that local worker v does not send to `owner` in this step. The
 * owner may be v itself. */
void ln_withhold(const struct lossynet_comm *comm, int v, int owner, size_t n, uint8_t *mask);
/* The mass of a packet with so many gradients, as ln_feedback_mass holds it. */
float ln_unconfirmed_mass(const struct lossynet_comm *comm, int gradients);
/* Whether local owner v gives a sender a new acknowledgement, instead of repeating the last one.
 * *tag: the tag of the acknowledgement. */
bool ln_unconfirmed_renews(struct lossynet_comm *comm, int v, int sender, const uint8_t *arrived,
                           size_t n, uint32_t *tag);
/* Whether nothing may leave on this link, because the acknowledgement of a step has not come. */
bool ln_unconfirmed_waits(const struct lossynet_comm *comm, int v, int owner);
/* Notes whether an owner's acknowledgement came to sender v in this step, and its tag. */
void ln_unconfirmed_told(struct lossynet_comm *comm, int v, int owner, bool told, uint32_t tag);
/* Updates the residuals after a phase, for ln_feedback_keep. */
void ln_unconfirmed_keep(struct lossynet_comm *comm, float *const *vectors);
/* Call it after the residual of v was loaded. */
void ln_unconfirmed_load(struct lossynet_comm *comm, int v);

/* Adds the residual of local worker v (0 ... V-1) to its vector, up to `bucket`, before these
 * buckets leave; or of all local workers in all buckets. A bucket gets it once in a phase. */
void ln_feedback_add(struct lossynet_comm *comm, int v, float *vector, int bucket);
void ln_feedback_rest(struct lossynet_comm *comm, float *const *vectors);
/* After a GRADIENT phase: owners update the masses; then senders, after they were told what arrived,
 * the residuals. */
void ln_feedback_count(struct lossynet_comm *comm);
void ln_feedback_keep(struct lossynet_comm *comm, float *const *vectors);
/* The random numbers that round the residual of local worker v (ln_bf16_keep_sum). */
uint64_t ln_residual_lots(const struct lossynet_comm *comm, int v);
/* Updates the residual of a packet that certainly arrived or did not. has_error: the residual holds
 * what rounding took away. lots: ln_residual_lots; offset: of the first element in the vector. */
void ln_residual_settle(bool has_error, bool arrived, uint16_t *residual, const float *sent,
                        size_t count, uint64_t lots, size_t offset);
/* The residual of local worker v as float32, which need not be aligned. */
void ln_feedback_save(const struct lossynet_comm *comm, int v, void *out);
void ln_feedback_load(struct lossynet_comm *comm, int v, const void *in);

/* ---- numbers that are not finite (not_finite.c) ----
 * v: a local worker, 0 ... V-1. Elements are from `offset` of its vector on. */

struct ln_not_finite { /* notes: the first such number of a worker; 0: none */
    uint64_t *mine;    /* [V], since the last pulse; atomic */
    uint64_t *all;     /* [N], as the last pulse brought them */
    bool asked;        /* the program has asked for them, or was told */
};

/* Failures are only noted in pool.out_of_memory. */
void ln_not_finite_open(struct lossynet_comm *comm);
/* Notes the first unsound number of `count` elements, which make a packet that receivers refuse. */
void ln_not_finite_note(const struct lossynet_comm *comm, lossynet_phase phase, int v,
                        const void *elements, bool bf16, size_t offset, size_t count);
/* The same if there is such a number among these elements of v's gradient. */
void ln_not_finite_look(const struct lossynet_comm *comm, int v, const void *vector, size_t offset,
                        size_t count);
/* The same for what injected loss took between workers of this rank and residuals would keep. */
void ln_not_finite_look_at_lost(const struct lossynet_comm *comm, float *const *vectors);
/* Has the next exchange bring the notes to all ranks. */
lossynet_status ln_not_finite_tell(struct lossynet_comm *comm);
/* Logs one line if the program did not ask. */
void ln_not_finite_log(struct lossynet_comm *comm);

/* ---- drift (drift.c) ---- */

enum { LOSSYNET_RING = LOSSYNET_LAGS + 1 };

struct ln_ages { /* one worker's; its own packets do not count */
    uint64_t sum, packets;
    uint64_t expected, arrived;    /* since open, phase PARAMETER */
    struct ln_total first[2];      /* of this step, before rounds of retransmission (rounds.c) */
    struct lossynet_lateness late; /* of the gradients in its averages */
    uint32_t largest;
    uint64_t aged[LOSSYNET_RING + 1]; /* packets of age 0, 1, ...; the last: this age or more */
};

/* Values of the sample in this call and in the last one, and their last changes. */
struct ln_series {
    float *now, *last; /* [samples] */
    float *change;     /* [RING][samples] */
};

struct ln_model_sample {   /* [samples] each */
    float *value, *change; /* the model's values and their last change, not rounded */
    float *offset;         /* fresh less sent */
};

struct ln_sampled_blocks { /* that samples are in; NULL: values are not rounded in blocks */
    uint8_t *scale;        /* [V][samples], of an owner's samples */
    uint8_t *scales;       /* [N][samples] */
    /* [samples * LOSSYNET_BLOCK], if the host cannot access vectors; else NULL */
    size_t *element;
    int32_t *owner;
    float *value;
};

struct ln_drift_state {
    int samples;
    uint64_t measured;      /* calls so far */
    size_t *element;        /* [samples] */
    int *owner;             /* [samples] */
    float *mine;            /* [V][samples] */
    float *values;          /* [N][samples] */
    struct ln_series fresh; /* the model's values, rounded as packets are */
    struct ln_series sent;  /* what owners sent: the same, but for the lead */
    struct ln_model_sample model;
    uint64_t led_until; /* the last number of changes at which `sent` may differ */
    struct ln_sampled_blocks blocks;
    struct ln_ages *ages;     /* [V] */
    struct ln_ages *all_ages; /* [N] */
    double lead;              /* of the broadcast that is measured */
};

/* Failures are only noted in pool.out_of_memory. */
void ln_drift_open(struct lossynet_comm *comm, int samples);
/* lossynet_drift_measure in two parts: begin puts the gathers aside; end computes, after they were
 * made. */
lossynet_status ln_drift_begin(struct lossynet_comm *comm, float *const *vectors);
void ln_drift_end(struct lossynet_comm *comm, struct lossynet_drift *out);
/* Gathers the ages and the counts of the last broadcast, for the lead and the rounds, if the program has
 * not measured it. */
lossynet_status ln_drift_settle(struct lossynet_comm *comm);

/* ---- late ranks (parts.c, step.c) ---- */

/* without[w], w < N: worker w had no gradient in the GRADIENT phase that has just ended. */
void ln_without_gradient(const struct lossynet_comm *comm, bool *without);
/* Whether a worker has a gradient in this step. A local worker has none if its rank is idle. In a
 * replay the record says it for every worker. */
bool ln_has_gradient(const struct lossynet_comm *comm, int worker);
/* Notes whether this rank is late. Called when lossynet_reduce begins. */
void ln_late_note(struct lossynet_comm *comm);

/* ---- the lead (lead.c) ---- */

/* Sums over steps. Older steps count less. */
struct ln_lead_sums {
    double packets, age;              /* packets of others' shards, over all workers; their ages */
    double aged[LOSSYNET_RING + 1];   /* these packets by age 0, 1, ...; the last: or more */
    struct lossynet_lateness late;    /* of gradients, with error feedback */
    double covariance[LOSSYNET_RING]; /* of changes 0, 1, ... steps apart (drift.c) */
};

struct lossynet_lead {
    bool wanted;               /* the program will call lossynet_lead */
    const float *const *ahead; /* [V]: what the next broadcast sends; NULL: the owners' values */
    double used;               /* the lead of `ahead`, in steps */
    struct ln_lead_sums sums;
};

/* Adds a step's ages and covariances to the sums. covariance NULL: not measured. */
void ln_lead_add(struct lossynet_comm *comm, const struct ln_ages *ages, const double *covariance);

/* ---- gathers (gather.c) and counters (stats.c) ---- */

enum { LOSSYNET_ASIDE_MOST = 9 };    /* most gathers that may wait for the next exchange */
enum { LOSSYNET_ASIDE_BYTES = 256 }; /* for one worker, beside counters, ages and drift sample */

struct ln_aside_item {
    void *all;
    size_t bytes; /* one rank's part */
};

struct ln_aside { /* gathers that the next exchange carries */
    struct ln_aside_item item[LOSSYNET_ASIDE_MOST];
    int count;
    size_t bytes;   /* one rank's part of all items */
    size_t room;    /* bytes that one worker may use */
    char *mine;     /* [V * room]; NULL: there is only one rank */
    char *together; /* [N * room] */
    uint8_t *came;  /* [R]: whose part came in the last pulse */
};

#define LN_NO_STEP UINT64_MAX

struct ln_stats {
    uint64_t step[2];                      /* whose the next two are; LN_NO_STEP: none */
    struct lossynet_counters *counters[2]; /* [V], of the present step and the one before: packets
                                              that the worker expected and got, bytes it sent */
    struct lossynet_bucket *buckets[2];    /* [V][B], of the same steps */
    struct ln_total *totals;               /* [V], PARAMETER phase */
    struct lossynet_counters *gathered;    /* [N] */
    struct ln_not_finite not_finite;
    struct ln_aside aside;
    bool reporting;                     /* a report has begun and not ended */
    size_t *gather_offset;              /* [R + 1] */
    uint64_t reported[LOSSYNET_EVENTS]; /* network events that were already reported, */
    struct ln_relayed relayed;          /* and packets that were sent on for others */
};

/* Failures are only noted in pool.out_of_memory. Call it after ln_drift_open. */
void ln_aside_open(struct lossynet_comm *comm);
/* Exchanges everything that was put aside. In a pulse, which does not wait for late ranks, their
 * parts keep their old values. */
lossynet_status ln_aside_exchange(struct lossynet_comm *comm, bool pulse);
/* Whether there is room to put another `part` bytes of this rank aside. */
bool ln_aside_fits(const struct lossynet_comm *comm, size_t part);
/* Gathers parts of `part` bytes, in place. What owners have to tell senders goes with them, if there
 * is room. */
lossynet_status ln_gather(struct lossynet_comm *comm, void *all, size_t part);

/* ---- all of it ---- */

struct ln_steps {
    uint64_t step, broadcast_step; /* the present step; the step of the last broadcast */
    int current, of_broadcast;     /* 0 or 1: which of stats.counters belongs to each of them */
    int round; /* round of retransmission; 0: packets are sent for the first time */
    bool reducing, broadcasting; /* the phase has begun and not ended */
    bool prepared;               /* what arrives of the next broadcast is decided */
    bool unmeasured;             /* the last broadcast: its ages and losses are not gathered */
    /* With settings.network.skip_late (step.c): */
    bool skips;     /* steps do not wait for late ranks */
    bool begun;     /* a step has begun since open */
    bool idle;      /* local workers have no gradient in this step */
    bool late;      /* this rank was late in the last lossynet_reduce */
    uint64_t lates; /* how often it was late */
    uint64_t next;  /* the step after the present one */
};

struct ln_workers {
    int count; /* N */
    int local; /* V */
    int first; /* this rank hosts workers first ... first + local - 1 */
};

struct ln_resources {
    int threads;
    struct ln_log_target log;
    struct ln_pool pool;           /* the comm's memory on the host */
    struct lossynet_memory memory; /* functions for the vectors' memory; all NULL: the host's */
    bool bf16;                     /* vectors hold bfloat16 */
    struct lossynet_shard *shard;  /* [V * buckets], as the caller gave them; NULL: in vectors */
    uint64_t *keys;                /* [V], for one call of `round` */
};

struct lossynet_comm {
    struct lossynet_world world;
    struct ln_workers workers;
    struct ln_resources resources;
    struct ln_partition partition;
    struct ln_loss loss;
    struct ln_steps steps;
    struct ln_arrivals arrivals;
    struct ln_averaging averaging;
    struct ln_feedback feedback;
    struct ln_retransmission retransmission;
    struct ln_transport *transport; /* NULL: there is only one rank */
    struct ln_exchange exchange;
    struct ln_stats stats;
    struct ln_drift_state drift;
    struct lossynet_lead lead;
};

#define COMM_TAKE(comm, pointer, count) POOL_TAKE(&(comm)->resources.pool, pointer, count)

/* How many threads work on marks, one for each packet of each link. Where there are few, a region of all
 * threads takes longer than the marks. */
static inline int ln_threads_for_marks(const struct lossynet_comm *comm) {
    enum { FEW = 50000 };
    return (size_t)comm->workers.local * comm->partition.packets < FEW ? 1
                                                                       : comm->resources.threads;
}

/* How many threads work on vectors, each on those of one worker. */
static inline int ln_threads_for_workers(const struct lossynet_comm *comm) {
    return comm->workers.local < comm->resources.threads ? comm->workers.local
                                                         : comm->resources.threads;
}

static inline bool ln_is_local(const struct lossynet_comm *comm, int worker) {
    return worker >= comm->workers.first && worker < comm->workers.first + comm->workers.local;
}

/* How many buckets of local worker v are ready in the GRADIENT phase. To the others no residual is
 * added yet. */
static inline int ln_exchange_next(const struct lossynet_comm *comm, int v) {
    const int *ready = comm->exchange.source[LOSSYNET_GRADIENT].ready;
    return comm->transport ? __atomic_load_n(&ready[v], __ATOMIC_ACQUIRE) : 0;
}

/* Where arrays of struct ln_arrivals hold the link between local worker v and another one.
 * own: the link whose packets v owns; otherwise the other one owns them. *n: the number of packets,
 * 0 if the two exchange none. */
static inline size_t ln_link_start(const struct lossynet_comm *comm, bool own, int v, int other,
                                   size_t *n) {
    const int worker = comm->workers.first + v;
    const size_t packets = ln_partition_owner_packets(&comm->partition, own ? worker : other);
    const bool travels = own ? ln_is_partner(&comm->partition, other, worker)
                             : ln_is_partner(&comm->partition, worker, other);
    *n = travels ? packets : 0;
    return own ? comm->arrivals.own_start[v] + (size_t)other * packets
               : (size_t)v * comm->partition.packets + comm->partition.owner_start[other];
}

/* Whether packets travel from one worker to another in a phase. */
static inline bool ln_is_link(const struct lossynet_comm *comm, lossynet_phase phase, int sender,
                              int receiver) {
    return phase == LOSSYNET_GRADIENT ? ln_is_partner(&comm->partition, sender, receiver)
                                      : ln_is_partner(&comm->partition, receiver, sender);
}

/* ln_link_start by direction: from `sender` to local worker v, and from v to `receiver`. */
static inline size_t ln_rx(const struct lossynet_comm *comm, lossynet_phase phase, int v,
                           int sender, size_t *n) {
    return ln_link_start(comm, phase == LOSSYNET_GRADIENT, v, sender, n);
}

static inline size_t ln_tx(const struct lossynet_comm *comm, lossynet_phase phase, int v,
                           int receiver, size_t *n) {
    return ln_link_start(comm, phase == LOSSYNET_PARAMETER, v, receiver, n);
}

/* Which of a sender's packets have arrived at local worker v. */
static inline uint8_t *ln_arrived(const struct lossynet_comm *comm, lossynet_phase phase, int v,
                                  int sender, size_t *n) {
    return comm->arrivals.arrived[phase] + ln_rx(comm, phase, v, sender, n);
}

/* Packets in all links whose packets a local worker owns, or in all other links: the length of the
 * arrays in struct ln_arrivals. */
static inline size_t ln_links(const struct lossynet_comm *comm, bool own) {
    size_t packets = 0;
    for (int v = 0; v < comm->workers.local; v++)
        packets += ln_partition_owner_packets(&comm->partition, comm->workers.first + v);
    return own ? packets * (size_t)comm->workers.count
               : (size_t)comm->workers.local * comm->partition.packets;
}

/* The masses of the residuals of packets for local owner v; NULL without error feedback. */
static inline float *ln_feedback_mass(const struct lossynet_comm *comm, int v) {
    return comm->feedback.mass ? comm->feedback.mass + comm->arrivals.own_start[v] : NULL;
}

/* How many groups have a worker in this rank, beginning with group *first; and how many have
 * none. */
static inline int ln_local_groups(const struct lossynet_comm *comm, int *first) {
    const int size = comm->partition.groups.size;
    *first = comm->workers.first / size;
    return (comm->workers.first + comm->workers.local - 1) / size - *first + 1;
}

static inline int ln_remote_groups(const struct lossynet_comm *comm) {
    int first;
    return comm->partition.groups.count - ln_local_groups(comm, &first);
}

static inline size_t ln_element_bytes(const struct lossynet_comm *comm) { /* of vectors */
    return comm->resources.bf16 ? sizeof(uint16_t) : sizeof(float);
}

/* Element e of a vector that a phase was given, or of the inbox. */
static inline void *ln_element(const struct lossynet_comm *comm, const void *vector, size_t e) {
    return (char *)vector + e * ln_element_bytes(comm);
}

/* Whether packets between workers of this rank are rounded in the workers' vectors. */
static inline bool ln_rounds_vectors(const struct lossynet_comm *comm) {
    return comm->resources.bf16 ? ln_has_blocks(&comm->partition) : ln_has_bf16(&comm->partition);
}

/* Where rounding stores what it takes away from local worker v's gradient; NULL if it stores
 * nothing. */
static inline uint16_t *ln_feedback_error(const struct lossynet_comm *comm, int v) {
    return comm->feedback.residual && ln_rounds_vectors(comm)
               ? comm->feedback.residual + (size_t)v * comm->partition.elements
               : NULL;
}

/* Element e of what local worker v owns, as the packets of a remote sender brought it. */
static inline void *ln_inbox(const struct lossynet_comm *comm, int v, int sender, size_t e) {
    int first, local = ln_local_groups(comm, &first);
    const int group = sender / comm->partition.groups.size;
    size_t remote = (size_t)(group < first ? group : group - local);
    return ln_element(comm, comm->exchange.inbox,
                      comm->exchange.inbox_start[v] + e +
                          remote * ln_partition_owned(&comm->partition, comm->workers.first + v));
}

/* The shard of local worker v in a bucket: apart, or in the vector, which is then float32. */
static inline struct lossynet_shard ln_shard_of(const struct lossynet_comm *comm, float *vector,
                                                int v, int bucket) {
    const struct ln_partition *partition = &comm->partition;
    if (comm->resources.shard) return comm->resources.shard[v * partition->buckets + bucket];
    float *first =
        vector +
        partition->shard_element[(size_t)bucket * partition->workers + comm->workers.first + v];
    return (struct lossynet_shard){first, first};
}

/* What a broadcast sends of this shard. ahead: as for lossynet_broadcast_ahead. */
static inline const float *ln_sent(const struct lossynet_comm *comm, const float *const *ahead,
                                   float *vector, int v, int bucket) {
    const struct ln_partition *partition = &comm->partition;
    const size_t owner = (size_t)(comm->workers.first + v);
    return ahead ? ahead[v] + partition->owner_element[owner * (partition->buckets + 1) + bucket]
                 : ln_shard_of(comm, vector, v, bucket).value;
}

#endif
