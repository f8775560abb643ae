/* lossynet.h — averaging and broadcasting vectors over a network that loses packets.
 *
 * The library's only public header. It knows no model: it sees N workers that each hold vectors of
 * P elements, cut in buckets: float32, or bfloat16 (see "vectors of bfloat16").
 *
 *     bucket   a run of consecutive elements, about one layer
 *     shard    the 1/N of a bucket that one worker, its owner, averages and broadcasts
 *     packet   at most packet_bytes of a shard: what is lost or arrives
 *
 * One training step has two phases:
 *
 *     GRADIENT    lossynet_reduce()     every worker -> the owner of each shard; the owner
 *                                       estimates the average from what arrived
 *     PARAMETER   lossynet_broadcast()  each owner -> every worker; what arrives overwrites, what
 *                                       does not arrive stays as it was and ages by one step
 *
 * N workers live in R ranks (processes), V = N/R in each: rank r hosts workers r*V ... r*V + V-1.
 * Workers of one rank exchange in memory, ranks through a link (link.h); injected loss treats both
 * alike, so the result is the same, bit for bit, however the workers are spread.
 *
 * Groups: workers g*G ... g*G + G-1 form group g, with one replica of the vector. Each of them owns
 * its shards (1/N), but what it sends, receives and averages are groups' vectors: member j of each
 * group exchanges packets with member j of the other groups, its partners, and so carries 1/G of
 * the group's vector. Whoever calls puts the members' vectors together: before a bucket is ready,
 * what their partners own must hold the group's mean; after a broadcast each member has received
 * what its partners own. Members of one rank may be given the same memory as their vectors. Where a
 * formula has N it is then the number of groups. A rank has whole groups or one worker. With G = 1
 * every worker is a group. Where G does not divide N, the last group is shorter, by what is
 * missing; or settings.group_sizes says how many workers each group has. The owner at place j of
 * its group then has as its partner in a group of S workers member j modulo S
 * (lossynet_is_partner_of), and in an average a group counts as many times as it has workers.
 *
 * Vectors of bfloat16 (settings.vector_dtype): the vectors that phases are given hold P elements of
 * 2 bytes in both phases, as packets carry them or, with wire dtype int8 and int4, before they are
 * rounded in blocks; what comes in blocks is a number of bfloat16. Functions take them as
 * `float *const *vectors`; each pointer is then one to uint16_t that the caller has cast. What
 * owners hold in float32 lies apart (lossynet_owned_apart).
 *
 * Errors: functions return a status; the first function to see an error logs one line
 * (settings.log). The library never exits. Threads: one thread calls at a time, unless stated.
 */
#ifndef LOSSYNET_H
#define LOSSYNET_H

#include "lossynet/base/types.h" /* status, world, loss settings, events */

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default) /* what a shared library exports */

/* MAJOR.MINOR.PATCH. MINOR changes whenever this header does, since programs fill in its
 * structs. */
#define LOSSYNET_VERSION "0.1.0"

/* LOSSYNET_VERSION of the library that the program runs with. */
const char *lossynet_version(void);

const char *lossynet_status_string(lossynet_status status); /* static text, never NULL */

/* ---- bootstrap: who takes part ---------------------------------------------------------- */

/* Joins the MPI job that mpirun or srun started; alone (rank 0 of 1, no MPI call at all) when no
 * launcher is seen in the environment. Built without MPI: alone as well, but LOSSYNET_LINK when a
 * launcher started several ranks, which would overwrite each other's files. Call once, first. */
lossynet_status lossynet_bootstrap(int *argc, char ***argv, struct lossynet_world *world);

/* Joins the other ranks without a launcher: rank 0 listens at TCP `address`, "HOST:PORT" of its own
 * host, the others connect to it; every process names its rank, 0 ... ranks - 1. Waits at most
 * `seconds` for the others, here and whenever ranks exchange something through it. It carries what
 * ranks need to find each other; packets go over the link, which is udp or verbs. Whoever can reach
 * the address can take a rank's place, so it belongs into a trusted network.
 * LOSSYNET_INVALID: rank, ranks or seconds make no sense, or a rank came twice. LOSSYNET_LINK: the
 * ranks did not meet. Nothing is to be closed then. */
lossynet_status lossynet_rendezvous_open(const char *address, int rank, int ranks, double seconds,
                                         struct lossynet_world *world);

/* The same for ranks that meet again and again, in other numbers: one meeting. */
struct lossynet_meeting {
    const char *address; /* of rank 0, "HOST:PORT" */
    /* Rank 0's socket, that listens there. On other ranks, any number from 0 on: rank 0 listens since
     * before the meeting, so that it has ended where its host refuses the connection. -1: rank 0
     * opens one for this meeting. */
    int listener;
    uint64_t epoch; /* of the meeting. Who comes for an earlier one is sent away, who comes for
                            a later one is told to come again. */
    int rank, ranks;
    double seconds;
    bool *missing; /* [ranks] or NULL; out, where ranks did not meet: those that this one missed */
    /* NULL, or on rank 0, asked again and again while it waits: sets ended[r] of the ranks that will
     * not come, so that it does not wait any longer. */
    void (*find_ended)(void *context, bool *ended);
    void *context; /* of find_ended */
};

/* Listens at `address`, with port 0 at any free port. *listener: a socket that the caller closes;
 * *port: where it listens. Connections wait in it until the next meeting. */
lossynet_status lossynet_rendezvous_listen(const char *address, int *listener, int *port);
lossynet_status lossynet_rendezvous_meet(const struct lossynet_meeting *meeting,
                                         struct lossynet_world *world);

/* Closes the connections, after the comm is closed. Does nothing for a world that joined
 * otherwise. */
void lossynet_rendezvous_close(struct lossynet_world *world);

/* What every rank tells all, before a comm is open. all: one part of `bytes` bytes per rank, this
 * rank's filled in. Every rank calls it, with the same `bytes`. */
lossynet_status lossynet_bootstrap_gather(const struct lossynet_world *world, void *all,
                                          size_t bytes);

/* Leaves the job. Every rank calls it last, with the code that it will exit with. It waits for the
 * other ranks; where exit_code is not 0, for 3 seconds only, after which it ends them (MPI_Abort),
 * since they would otherwise wait for this rank for ever. */
void lossynet_shutdown(int exit_code);

/* ---- settings --------------------------------------------------------------------------- */

/* How an owner o turns the gradients that arrived into an average. S: the senders (o excluded)
 * whose packet arrived; p: the loss rate. Applied to each packet on its own. */
typedef enum {
    LOSSYNET_MEAN,     /* (g_o + sum_S g_i) / (1 + |S|): the paper's; over-weights the owner:
                          E[w_o] = (1 - p^N) / (N (1 - p)) */
    LOSSYNET_BALANCED, /* g_o/N + (N-1)/N mean_S g_i, g_o alone if S is empty: unbiased whenever
                          anything arrives */
    LOSSYNET_HT,       /* (g_o + sum_S g_i / (1 - p)) / N: Horvitz-Thompson, with the p that this
                          owner measured in the steps before (gradient.c) */
    LOSSYNET_ZERO,     /* (g_o + sum_S g_i) / N: biased, loss shrinks the gradient */
} lossynet_estimator;

/* All four give every sender exactly float(1.0/N) where everything arrived (ht: has always
 * arrived), and in a `lossless` phase. */

/* The masked average, computed where the vectors live. For j < n:
 * out[j] = sum over i < senders of weight[(j / packet) * senders + i] * sender[i][j], in order of
 * i; weight 0 = did not arrive, sender[i] must not be read there. out may be one of the senders. */
typedef void (*lossynet_weighted_sum)(float *out, const float *const *sender, const float *weight,
                                      int senders, size_t n, size_t packet);

/* The same for vectors of bfloat16, the upper halves of float32; out is none of the senders. Products
 * and sums are of float32, so that averages have the bits of vectors of float32 with the same
 * gradients. */
typedef void (*lossynet_weighted_sum_bf16)(float *out, const uint16_t *const *sender,
                                           const float *weight, int senders, size_t n,
                                           size_t packet);

/* For vectors that lie in memory the host cannot touch (a GPU's); the vectors are then only handed
 * to these functions and to weighted_sum, which may be called from several threads at once.
 *   masked_copy  to[j] = from[j] for j < n where arrived[j / packet] is not 0
 *   masked_round the same, rounded to bfloat16, to nearest even; to may be from. Only with
 *                wire_dtype bf16; else it may be NULL
 *   round_blocks the same, rounded in blocks of 32 to integers of so many bits, 8 or 4, with a scale
 *                (elements.c); at random with the numbers of *key + j in the block that begins with
 *                element j, or to nearest where key is NULL. arrived NULL: everything did. `packet` is
 *                a multiple of 32. Only with wire_dtype int8 and int4; else it may be NULL
 *   copy         within that memory
 *   gather       out[i] = vector[element[i]], i < n; out and element are the host's */
struct lossynet_memory {
    void (*masked_copy)(float *to, const float *from, const uint8_t *arrived, size_t n,
                        size_t packet);
    void (*masked_round)(float *to, const float *from, const uint8_t *arrived, size_t n,
                         size_t packet);
    void (*round_blocks)(float *to, const float *from, const uint8_t *arrived, size_t n,
                         size_t packet, int bits, const uint64_t *key);
    void (*copy)(void *to, const void *from, size_t bytes);
    void (*gather)(float *out, const float *vector, const size_t *element, size_t n);
};

/* Where what was lost of gradients is kept, if not in lossynet's memory: beside vectors that are
 * computed on a GPU, say. Whoever keeps it adds it, times the share, to a vector before the vector
 * is ready. Called with local workers, from several threads at once.
 *   round only with wire_dtype int8 and int4, of n elements from `offset` of a worker's vector, where
 *         the residual is kept: rounds them as round_blocks does, and the residual is what this takes
 *         away. It is called once for what others own, before keep
 *   keep  of such elements: the residual is 0 where arrived[j / packet] is not 0, and elsewhere the
 *         element as it was sent, so with wire_dtype bf16 rounded. With int8 and int4 it stays where
 *         the packet arrived, and the element as it was sent joins it elsewhere
 *   save  the residual of all P elements, into memory of the host's that need not be aligned
 *   load  the same back */
struct lossynet_residuals {
    void *context;
    void (*round)(void *context, int worker, size_t offset, size_t n, int bits,
                  const uint64_t *key);
    void (*keep)(void *context, int worker, size_t offset, size_t n, size_t packet,
                 const uint8_t *arrived);
    void (*save)(void *context, int worker, void *out);
    void (*load)(void *context, int worker, const void *in);
};

struct lossynet_settings {
    int workers;            /* N, a multiple of the number of ranks */
    int group;              /* G, at most N; 0: 1. See "groups" above */
    const int *group_sizes; /* workers of each group, N in all, instead of G; NULL: G. Copied */
    int buckets;            /* number of buckets */
    const size_t *bucket_elements; /* [buckets], > 0; copied */
    size_t packet_bytes; /* payload of a packet, a multiple of 4; 0: default of the link */
    lossynet_wire_dtype wire_dtype; /* of what is sent, over a link or in memory */
    /* Of the vectors: float32, or bf16, which needs another wire_dtype than float32, error feedback
     * only with `residuals`, no `memory`, and lossynet_owned_apart */
    lossynet_wire_dtype vector_dtype;
    lossynet_estimator estimator;
    struct lossynet_loss_settings loss;
    lossynet_link_kind link;
    lossynet_weighted_sum weighted_sum;           /* NULL: a plain loop */
    lossynet_weighted_sum_bf16 weighted_sum_bf16; /* the same for vectors of bfloat16 */
    bool weighted_sum_whole; /* it is given a shard at a time, and not a part for each CPU thread: a
                                device is fastest so */
    /* For what other ranks sent, which weighted_sum reads beside vectors: returns NULL where there
     * is no memory, and need not clear it. Both or neither; neither: malloc's. */
    void *(*allocate)(size_t bytes);
    void (*release)(void *memory); /* of `allocate`, when the comm closes; NULL is fine */
    /* copied; NULL: the vectors are in the host's memory. Else: one rank only */
    const struct lossynet_memory *memory;
    int drift_samples; /* parameters watched for drift; 0: none */
    bool lead; /* lossynet_lead will be asked: ages are gathered without drift_samples, too */
    bool return_masks; /* owners tell senders what arrived, see lossynet_delivered */
    /* What was lost of a gradient is added to its sender's next one (error_feedback.c); with
     * wire_dtype int8 and int4 also what rounding has taken away. For estimators mean and zero; the
     * vectors given to lossynet_reduce then change where they are not owned, too. */
    bool error_feedback;
    const struct lossynet_residuals *residuals; /* copied; NULL: lossynet keeps and adds them */
    /* By phase: so many times what was lost is sent again, and may be lost again (retransmit.c). */
    int retransmission_rounds[2];
    /* Of a phase's packets to a worker, at most this share is sent again, what has been missing
     * longest first; 0: all that was lost. */
    double retransmission_budget;
    /* Links udp and verbs only. */
    const char *interface; /* udp: of the network; NULL: loopback on one host, else that of the
                              default route. verbs: device[:port[:GID index]], or several for the
                              ranks of a host; NULL: the first active port */
    double pace_gbps;      /* a rank sends at most so many 10^9 bit/s; 0: no limit */
    double loss_budget;    /* it sends slower where the network loses more than this share, < 1;
                              needs pace_gbps. 0: however much is lost */
    const char *
        record_loss; /* FILE, of rank r FILE.r: what arrived, for the loss model trace (loss_trace.c);
                              NULL: not written */
    double peer_timeout; /* seconds of silence after which a rank is dead; 0: 10 */
    /* Links udp and verbs, several ranks: a step does not wait for late ranks
     * (transport/deadline.c) longer than `deadline` seconds after half of the ranks; 0: learnt.
     * Between the lossynet_step_follow of a step and the next one call lossynet_reduce,
     * lossynet_pulse and lossynet_broadcast, each once. Not with return_masks. */
    bool skip_late;
    double deadline;
    bool multicast; /* parameters are sent once for all ranks, where the network can */
    bool encrypt;   /* datagrams are encrypted and authenticated (crypto.h) */
    /* With encrypt: a secret of all ranks, 16 to 4,096 bytes; NULL: the channel that ranks meet by
     * is trusted. */
    const char *key_file;
    int dscp; /* traffic class of DATA, 0 ... 63 (RFC 2474); 0: the default, as control */
    /* Where messages go, from lossynet_open or lossynet_probe on and for the whole process. NULL:
     * as before; at first to stderr, as "lossynet: ..." */
    lossynet_log_function log;
    void *log_context;
};

/* Names as on the command line ("mean", ...). Return false when there is no such name. */
bool lossynet_estimator_parse(const char *name, lossynet_estimator *out);
bool lossynet_link_parse(const char *name, lossynet_link_kind *out);
/* "default", "le" (RFC 8622), "cs0" ... "cs7", "af11" ... "af43", "va", "ef", "0" ... "63" */
bool lossynet_traffic_class_parse(const char *name, int *dscp);
const char *lossynet_estimator_name(lossynet_estimator estimator);

/* Checks a loss model without opening a comm: rates in [0,1], a known model, a readable trace.
 * On failure writes one line of what was expected to `why`. For usage errors. */
lossynet_status lossynet_loss_check(const struct lossynet_loss_settings *loss, char *why,
                                    size_t why_size);

/* ---- the comm ---------------------------------------------------------------------------- */

struct lossynet_comm; /* opaque */

/* Collective. Everything the comm will ever need is allocated here. */
lossynet_status lossynet_open(const struct lossynet_world *world,
                              const struct lossynet_settings *settings, struct lossynet_comm **out);
void lossynet_close(struct lossynet_comm *comm); /* NULL is fine */

/* The part of a bucket that `worker` owns: `count` elements from `offset` (from the start of the
 * whole vector). count may be 0 when a bucket is smaller than N cache lines. */
void lossynet_shard(const struct lossynet_comm *comm, int worker, int bucket, size_t *offset,
                    size_t *count);
size_t lossynet_owned_elements(const struct lossynet_comm *comm, int worker); /* over all buckets */
/* The group of a worker: its first worker, and how many it has. */
void lossynet_group(const struct lossynet_comm *comm, int worker, int *first, int *size);
/* Whether a worker sends gradients to an owner and receives its parameters, for its group; or is
 * the owner. */
bool lossynet_is_partner_of(const struct lossynet_comm *comm, int worker, int owner);
size_t lossynet_packets(const struct lossynet_comm *comm); /* in one vector, all owners */
size_t lossynet_packet_bytes(const struct lossynet_comm *comm);
/* "memory" when the rank is alone */
const char *lossynet_link_name(const struct lossynet_comm *comm);
/* Whether packets move while the caller computes. */
bool lossynet_overlaps(const struct lossynet_comm *comm);

/* Where what owners hold lies apart from vectors. Of each local worker v, float32 of
 * lossynet_owned_elements elements, in order of buckets:
 *   averages[v]  gets the estimate of lossynet_reduce; v's own shards of its vector, which it reads
 *                as v's contribution, stay as they are
 *   values[v]    the parameters that v owns: broadcasts send them (or what lossynet_broadcast_ahead
 *                gives), drift takes them as the owner's, lossynet_gather_fresh assembles them.
 *                PARAMETER phases neither read nor write v's own shards of its vector.
 * All of it, the arrays of pointers too, stays the caller's, until lossynet_close. values[v] may
 * change when an owner's shard might: between the return of lossynet_reduce and the broadcast.
 * Call it before the first phase, which vectors of bfloat16 need; vectors of float32 may. With
 * N = 1 lossynet_reduce then copies. LOSSYNET_INVALID, after one line: without one of the two, or
 * with settings.memory. */
lossynet_status lossynet_owned_apart(struct lossynet_comm *comm, float *const *averages,
                                     const float *const *values);

/* A vector (`count` elements, the host's memory) that phases will be given: network hardware that
 * can (link verbs) sends from it in place, where elements travel as they are: float32, or gradients
 * in vectors of bfloat16, not encrypted. It must then stay until lossynet_close. False: what is sent
 * from it is copied first, as from any other. */
bool lossynet_register(struct lossynet_comm *comm, const float *vector, size_t count);

/* Gradients of local worker `worker`, given to phases as `vector`, leave from `there` (P elements
 * of a GPU's memory), which network hardware reads. Of `vector` itself only what workers of this
 * rank own is then read. Their checksum covers the header alone (wire.h), so this needs a link that
 * checks payloads (verbs), elements that travel as they are, and no error feedback. Both stay
 * until lossynet_close. False, after one line where link or hardware refused, or where vectors are
 * of bfloat16: all of `vector` is read. */
bool lossynet_register_device(struct lossynet_comm *comm, int worker, const float *vector,
                              const float *there, const struct lossynet_device_memory *device);

/* vectors[V], of local workers, who all start with the same values, or go on with those that
 * owners had: makes them what a broadcast that loses nothing would have left. With a
 * wire_dtype but float32 that rounds what a worker does not own; else, and in vectors of bfloat16
 * with wire_dtype bf16, it changes nothing. */
void lossynet_start(struct lossynet_comm *comm, float *const *vectors);

/* For vectors of bfloat16, before lossynet_start: to[j], j < n, becomes what a packet brings of
 * values[j], float32 of element offset + j, where a shard or a packet begins with element `offset`.
 * (Rounding what is bfloat16 already would differ in blocks.) values need not be aligned. */
void lossynet_narrow_parameters(const struct lossynet_comm *comm, uint16_t *to, const void *values,
                                size_t offset, size_t n);

/* Whether late ranks are not waited for: skip_late, over a link that can. */
bool lossynet_skips_late(const struct lossynet_comm *comm);

/* With settings.skip_late, in the place of lossynet_step_begin: starts *step, or the later one that
 * most ranks are at, which is then in *step: steps in between are left out. *idle: this rank was
 * late, so its workers take part without a gradient; what the vectors hold is not sent, but with
 * error_feedback what was late before. Without skip_late the same
 * as lossynet_step_begin. */
lossynet_status lossynet_step_follow(struct lossynet_comm *comm, uint64_t *step, bool *idle);

/* With settings.skip_late: whether another rank waits in a collective call that does not belong to
 * a step (all but those that lossynet_step_follow names), so that this one had better join it. All
 * must then agree on a step; lossynet_met says that they have. */
bool lossynet_is_called(struct lossynet_comm *comm);
void lossynet_met(struct lossynet_comm *comm);

/* late[r], r < ranks: so many steps went on here without rank r since open; of this rank: in so
 * many it was late. */
void lossynet_lateness(struct lossynet_comm *comm, uint64_t *late);

/* Whether a call has failed because of another rank, over a link that is not reliable: nothing
 * more can be done with this comm than to close it. missing[r], r < ranks: rank r was not heard for
 * half of settings.peer_timeout, and has said nothing of leaving. */
bool lossynet_has_failed(struct lossynet_comm *comm, bool *missing);

/* One turn of sending and receiving over a link without a thread of its own (MPI). Returns true
 * where there is none: who waits for another process by other means than these calls must call this
 * meanwhile, since a third process may wait for what this one has not sent yet. */
bool lossynet_turn(struct lossynet_comm *comm);

/* Starts step `step` (0, 1, ...; the same on every rank). */
lossynet_status lossynet_step_begin(struct lossynet_comm *comm, uint64_t step);

/* GRADIENT phase. vectors[V]: the local workers' vectors of P elements. On return each owner's
 * shard of its own vector holds the estimate of the average (or lossynet_owned_apart's memory); the
 * rest is unchanged, or rounded as it was sent (wire_dtype). Collective.
 * lossless: nothing is injected (algorithm `reliable`). N = 1: nothing happens, nothing counts.
 * May be called again in a step: the same packets are lost, and count again. */
lossynet_status lossynet_reduce(struct lossynet_comm *comm, float *const *vectors, bool lossless);

/* The same in two parts, so that a vector leaves while it is still being computed (not over link
 * mpi, where all leaves in lossynet_reduce): after reduce_begin, bucket_ready says that a local
 * worker's vector is final in this bucket; each worker's buckets must become ready in ascending
 * order, from any thread. lossynet_reduce with the same arguments ends the phase, all buckets being
 * ready then. Call reduce_begin after step_begin. */
lossynet_status lossynet_reduce_begin(struct lossynet_comm *comm, float *const *vectors,
                                      bool lossless);
void lossynet_bucket_ready(struct lossynet_comm *comm, int worker, int bucket);

/* Between bucket_ready and lossynet_reduce, with its arguments: averages a bucket that is ready at
 * all local workers, if all that will come of it is there. It never waits. Buckets in ascending
 * order, from one thread. False: not done, as for retransmission, estimator `ht` and deadlines;
 * lossynet_reduce will. */
bool lossynet_reduce_arrived(struct lossynet_comm *comm, float *const *vectors, bool lossless,
                             int bucket);

/* With settings.error_feedback: how much of what was lost before is added in the next reduce,
 * 0 ... 1 (the default). The same on every rank; before lossynet_reduce_begin. */
void lossynet_error_feedback_share(struct lossynet_comm *comm, double share);

/* PARAMETER phase. Every owner's shards go to all workers; what arrives overwrites, as
 * wire_dtype has rounded it. The owner's own stay as they are. Collective. */
lossynet_status lossynet_broadcast(struct lossynet_comm *comm, float *const *vectors,
                                   bool lossless);

/* The same in parts, so that computing may go on where a bucket's parameters are there, in the
 * order in which a forward pass needs them, the last bucket first. Between begin and end a rank
 * reads only buckets it has waited for, and writes nothing that it owns until the next
 * lossynet_reduce has returned. bucket_wait may be called from several threads, repeatedly, also
 * when no phase is open; *waited, where given, gets the seconds it slept. */
lossynet_status lossynet_broadcast_begin(struct lossynet_comm *comm, float *const *vectors,
                                         bool lossless);
lossynet_status lossynet_bucket_wait(struct lossynet_comm *comm, int bucket, double *waited);
lossynet_status lossynet_broadcast_end(struct lossynet_comm *comm); /* fine when none is open */

/* The broadcasts from now on send ahead[v] in place of what local worker v owns: as many elements,
 * float32, in order of buckets. They are values of the model plus `lead` times its last change.
 * NULL: the owners' values are sent again. The memory must keep its contents until the broadcast has
 * ended and the next lossynet_reduce has returned; it lies where the vectors lie. Between steps
 * only. */
void lossynet_broadcast_ahead(struct lossynet_comm *comm, const float *const *ahead, double lead);

/* The lead, in steps, with which the mean of the replicas is the model, by what earlier steps have
 * measured: how far replicas were behind along the model's path, plus how late carried gradients
 * were (lead.c derives it). 0 before anything was lost. The same on every rank. Needs settings.lead
 * and lossynet_drift_measure after every step. */
double lossynet_lead(const struct lossynet_comm *comm);

/* Walks over what the last broadcast left fresh at a local worker (its own shards included), as
 * maximal runs of elements in ascending order. Start with *cursor = 0; false at the end. Before the
 * first broadcast everything is fresh: workers start from the same values. */
bool lossynet_next_fresh(const struct lossynet_comm *comm, int worker, size_t *cursor,
                         size_t *offset, size_t *count);

/* How many steps ago what a local worker holds of `owner`'s shards was broadcast: of each packet,
 * in order of buckets and elements; 0 where they are its own. A shard's packet k has elements k*E
 * ... of the shard, E = lossynet_packet_elements. NULL: only their number is wanted, which is
 * returned. */
size_t lossynet_ages_of_owner(const struct lossynet_comm *comm, int worker, int owner,
                              uint32_t *ages);
size_t lossynet_packet_elements(const struct lossynet_comm *comm);

/* Assembles the owners' shards into `fresh` (P elements, none of the vectors) on every rank;
 * nothing is lost, rounded or counted. Collective. */
lossynet_status lossynet_gather_fresh(struct lossynet_comm *comm, float *const *vectors,
                                      float *fresh);

/* The same of one bucket, into `fresh`, which holds its elements alone. */
lossynet_status lossynet_gather_bucket(struct lossynet_comm *comm, float *const *vectors,
                                       int bucket, float *fresh);

/* Small, reliable all-gather: each rank gives V items of `bytes`, `all` gets N, in worker order.
 * Collective. */
lossynet_status lossynet_all_gather(struct lossynet_comm *comm, const void *mine, void *all,
                                    size_t bytes);

/* Every rank gives each rank some bytes and gets some, reliably: `out` holds those for rank r at
 * bytes out_offset[r] ... out_offset[r + 1], `in` gets those of rank r at in_offset[r] ...
 * in_offset[r + 1]; both are [ranks + 1], and what one rank gives is what the other gets. The own
 * part is copied. Collective. */
lossynet_status lossynet_swap(struct lossynet_comm *comm, const void *out, const size_t *out_offset,
                              void *in, const size_t *in_offset);

/* The same, put aside until the next lossynet_all_gather, which carries it in its own exchange, or
 * until another call below that gathers. `mine` is copied now, `all` is written then; the memory of
 * `all` must stay until then. What does not fit (some 256 bytes per worker, 8 calls) is gathered at
 * once, together with what waits. The same calls in the same order on every rank. Collective. */
lossynet_status lossynet_all_gather_aside(struct lossynet_comm *comm, const void *mine, void *all,
                                          size_t bytes);

/* lossynet_all_gather, once in each step: with settings.skip_late it does not wait for late ranks,
 * whose part of `all`, and of what was put aside, stays as it was: what they told last. */
lossynet_status lossynet_pulse(struct lossynet_comm *comm, const void *mine, void *all,
                               size_t bytes);

/* With skip_late and record_loss: the numbers that local workers' updates use in this step are
 * recorded beside what arrived, so that one process can make the run again (loss model
 * "replay:FILE"). */
void lossynet_note_part(struct lossynet_comm *comm, double norm, double lead);

/* What a worker does in the present step. True in a replay, where every worker may be asked for. */
bool lossynet_replayed(const struct lossynet_comm *comm, int worker, struct lossynet_part *out);

/* With settings.return_masks: which packets of a local worker's vector arrived at their owners in
 * the last lossynet_reduce. Bit k % 8 of byte k / 8 stands for packet k; packets are numbered in
 * order of their elements, their number is lossynet_packets. A worker's own always arrive. Valid
 * until the next lossynet_reduce; NULL without return_masks. */
const uint8_t *lossynet_delivered(const struct lossynet_comm *comm, int worker);

/* ---- accounting ------------------------------------------------------------------------- */

struct lossynet_counters { /* packets that travel between workers; one to itself never counts */
    uint64_t expected[2];  /* by phase */
    uint64_t arrived[2];
    uint64_t bytes[2];                 /* payload bytes that left a worker, lost ones included */
    uint64_t resent[2];                /* packets sent again, by their senders */
    uint64_t network[LOSSYNET_EVENTS]; /* what links udp and verbs met, since this was last asked */
};

/* Of `step`, the present one or the one before, after its broadcast has ended; summed over all
 * workers of all ranks. Collective. */
lossynet_status lossynet_step_counters(struct lossynet_comm *comm, uint64_t step,
                                       struct lossynet_counters *out);

/* lost[r * N + s] (N * N, on every rank): of the packets that worker s sent to worker r since open,
 * in both phases, the share that did not arrive; 0 where none was sent. Collective. */
lossynet_status lossynet_lost_between(struct lossynet_comm *comm, float *lost);

/* Bytes this rank's comm holds. */
size_t lossynet_memory_bytes(const struct lossynet_comm *comm);

/* The same without opening a comm, for any world; 0 after logging when the settings make
 * no sense. The threads and files of this machine count. */
size_t lossynet_memory_needed(const struct lossynet_world *world,
                              const struct lossynet_settings *settings);

/* ---- state, for resuming a run (state.c) ------------------------------------------------ */

enum { LOSSYNET_ALL_WORKERS = -1 }; /* what they have in common: the drift sample's history */

/* What a comm remembers from step to step, of one local worker or of all: so many bytes, which do
 * not depend on how workers are spread over ranks. Between steps only. */
size_t lossynet_state_bytes(const struct lossynet_comm *comm, int worker);
void lossynet_state_save(const struct lossynet_comm *comm, int worker, void *out);

/* Into a comm that has made no step yet. False, with nothing changed, for the bytes of another
 * worker or of a comm with other workers, buckets or packets (of all: other samples or seed). */
bool lossynet_state_load(struct lossynet_comm *comm, int worker, const void *bytes, size_t count);

/* ---- drift (drift.c derives the formulas) ----------------------------------------------- */

enum { LOSSYNET_LAGS = 16, LOSSYNET_AGES = 8 };

struct lossynet_drift {
    double pair;   /* ||theta_i - theta_j||^2, mean over pairs of workers */
    double owner;  /* ||theta_i - theta_fresh||^2, mean over workers that do not own it */
    double sigma2; /* ||the last step's change of the fresh model||^2 */
    double rho[LOSSYNET_LAGS]; /* of that change with those 1, 2, ... steps before it */
    double expected_pair;      /* formula with this sigma2, rho and the measured loss rate */
    double expected_owner;
    double paper_pair; /* the paper's 2p/(1+p) sigma2, for comparison */
    double lead;       /* of the last broadcast, in steps */
    double lag;      /* how far the mean replica is behind the model along the model's last change,
                          in units of that change (steps); negative: ahead */
    double mean_age; /* over (worker, packet), owners excluded; steps */
    uint32_t max_age;
    double age_share[LOSSYNET_AGES]; /* of those packets, aged 0, 1, ...; the last: that or more */
};

/* Measures after a broadcast, on a fixed random sample of elements, scaled to the whole vector.
 * Call once per step, every step: sigma2 and rho come from successive calls. Collective.
 * Needs drift_samples > 0 and N > 1; otherwise all fields are 0. The first call has seen no change
 * yet: sigma2 and what is expected are 0. Where nothing has ever arrived (p = 1), what is expected
 * is infinite; JSON has no such number. */
lossynet_status lossynet_drift_measure(struct lossynet_comm *comm, float *const *vectors,
                                       struct lossynet_drift *out);

/* lossynet_drift_measure and lossynet_step_counters of `step`, in two parts around the next
 * lossynet_all_gather, so that all together cost one exchange: begin takes the values that are
 * measured, after the broadcast of `step` has ended and before vectors change; end computes.
 * Without a gather in between end makes the exchange. Each is collective. */
lossynet_status lossynet_report_begin(struct lossynet_comm *comm, uint64_t step,
                                      float *const *vectors);
lossynet_status lossynet_report_end(struct lossynet_comm *comm, struct lossynet_counters *counters,
                                    struct lossynet_drift *drift);

/* The formulas alone. N workers, loss rate p in [0, 1), correlations rho[lags], lead l in steps:
 *   owner to worker   O = sigma2 [p/(1-p) C(p) + l^2 - 2 l R],  R = sum_k rho_k p^k
 *   worker to worker  (1-2/N) sigma2 [2p/(1-p^2) C(p) + 4 l (l+1) (p - (1-p) R)/(1+p)] + (2/N) O
 *   C(p) = 1 + 2 R
 * p = 1 gives infinity. */
double lossynet_drift_owner(double p, double lead, double sigma2, const double *rho, int lags);
double lossynet_drift_pair(int workers, double p, double lead, double sigma2, const double *rho,
                           int lags);
double lossynet_drift_paper(double p, double sigma2); /* 2p/(1+p) sigma2 */

/* ---- the network before a run (probe.c) ------------------------------------------------- */

/* Sends test datagrams from every rank to every other, over the link, with the packet size and at
 * the pace that `settings` name (nothing else of them matters), in ranks - 1 rounds of `seconds`.
 * In a round every rank sends to one rank and receives from one. node[ranks]: the host that each
 * rank is on, 0, 1, ..., the same on all ranks. out[s * ranks + r] (ranks * ranks), on every rank:
 * from s to r. *link_name: static text. Collective. */
lossynet_status lossynet_probe(const struct lossynet_world *world,
                               const struct lossynet_settings *settings, const int *node,
                               double seconds, struct lossynet_path *out, const char **link_name);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
