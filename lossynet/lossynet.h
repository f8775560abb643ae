/* lossynet.h — averaging and broadcasting vectors over a network that loses packets.
 *
 * The header begins with the functions of a simple program (dev/examples/average.c), and goes on with
 * settings and what else most programs need. lossynet_trainer.h has the rest: resuming, replays,
 * devices, and ranks that come and go. The library knows no model. It sees N workers.
 * Each worker holds vectors of P elements, which are float32 or bfloat16 (see "Vectors of bfloat16").
 *
 *     bucket   consecutive elements of a vector, about one layer
 *     shard    the 1/N of a bucket that one worker, its owner, averages and broadcasts
 *     packet   at most packet_bytes of a shard; a packet arrives as a whole or is lost
 *
 * One training step has two phases:
 *
 *     GRADIENT    lossynet_reduce()     every worker -> the owner of each shard; the owner
 *                                       estimates the average from what arrived
 *     PARAMETER   lossynet_broadcast()  each owner -> every worker; what arrives overwrites, what
 *                                       does not arrive stays as it was and ages by one step
 *
 * N workers live in R ranks (processes). Each rank hosts V = N/R of them: rank r hosts workers
 * r*V ... r*V + V-1. Workers of one rank exchange packets in memory, and ranks exchange them
 * through a link (link.h). Injected loss treats both alike. So the result is the same, bit for bit,
 * however the workers are spread over ranks.
 *
 * Groups: workers g*G ... g*G + G-1 form group g, which has one replica of the vector. Each worker
 * still owns its shards (1/N). Member j of a group exchanges packets with member j of every other
 * group; these members are partners. So a member carries 1/G of its group's vector. The caller
 * combines the vectors of a group's members: before a bucket is ready, a member's vector must hold
 * the group's mean in the elements that the member's partners own. After a broadcast each member
 * has received the elements that its partners own. Members in one rank may share one vector. In
 * formulas N is then the number of groups. A rank hosts whole groups, or one worker. With G = 1
 * every worker is a group.
 *
 * Vectors of bfloat16 (settings.vector_dtype): in both phases the vectors hold P elements of 2
 * bytes. With wire dtype bf16 packets carry these elements as they are. With int8, int6 and int4
 * packets carry them rounded in blocks, and what a receiver decodes is exact in bfloat16. Functions
 * take the vectors as `float *const *vectors`; the caller casts its pointers to uint16_t. Float32 values
 * that owners hold lie in other memory (lossynet_shards).
 *
 * Errors: functions return a status. The first function to see an error logs one line
 * (settings.log). Threads: only one thread at a time may call the library,
 * unless a function says otherwise. "Collective": every rank must make the same call. Processes: after a
 * process has opened a comm, a child that it forks must not use the library, since OpenMP's threads stay behind.
 *
 * Wrong calls: NULL where memory must be, a worker, bucket or step that is not there, calls out of order, other
 * vectors than a phase began with. They change nothing and log one line, which names the function and what was
 * expected. Then functions that return a status return LOSSYNET_INVALID. The others end the process (abort),
 * because what they return would be taken for right; nothing else does. This holds in every build, and for
 * lossynet_trainer.h. What is not noticed: a comm that was closed, and memory that is too small.
 */
#ifndef LOSSYNET_H
#define LOSSYNET_H

#include "lossynet/base/types.h" /* status, world, loss settings, events */

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default) /* a shared library exports these functions */

/* MAJOR.MINOR.PATCH. MINOR changes whenever this header changes, because programs fill in its
 * structs. */
#define LOSSYNET_VERSION "0.3.0"

/* ---- the functions of a simple program ------------------------------------------------ */

struct lossynet_comm; /* opaque: one per rank */
struct lossynet_settings;
struct lossynet_counters;

/* LOSSYNET_VERSION of the library that the program has loaded. */
const char *lossynet_version(void);

const char *lossynet_status_string(lossynet_status status); /* static text, never NULL */

/* Joins the other ranks without a launcher. Rank 0 listens at TCP `address`, "HOST:PORT" of its own
 * host, and the others connect to it. Every process names its rank, 0 ... ranks - 1. The call waits
 * at most `seconds` for the others, and so does every later exchange over these connections. They
 * carry only what ranks need to find each other; packets go over the link, which is udp or verbs.
 * Any program that can reach the address can take a rank's place: use a trusted network, or
 * lossynet_rendezvous_meet with a key file.
 * LOSSYNET_INVALID: rank, ranks or seconds make no sense, or a rank came twice. LOSSYNET_LINK: the
 * ranks did not meet. After an error there is nothing to close. */
lossynet_status lossynet_rendezvous_open(const char *address, int rank, int ranks, double seconds,
                                         struct lossynet_world *world);

/* Closes the connections. Call it after the comm is closed. It does nothing if the ranks did not
 * meet by rendezvous. */
void lossynet_rendezvous_close(struct lossynet_world *world);

/* Checks settings, also the loss model and its files, without opening a comm. If something is wrong,
 * it logs one line that begins with a name of lossynet_named_set and says what was expected. */
lossynet_status lossynet_check(const struct lossynet_world *world,
                               const struct lossynet_settings *settings);

/* Opens a comm and allocates all memory that it will ever need. Collective. */
lossynet_status lossynet_open(const struct lossynet_world *world,
                              const struct lossynet_settings *settings, struct lossynet_comm **out);
void lossynet_close(struct lossynet_comm *comm); /* NULL is fine */

/* Starts step `step` (0, 1, ...; the same on every rank). */
lossynet_status lossynet_step_begin(struct lossynet_comm *comm, uint64_t step);

/* GRADIENT phase. vectors[V]: the local workers' vectors of P elements. On return each owner's
 * shard of its own vector (or that of lossynet_shards) holds the estimate of the average.
 * Other elements are unchanged, or rounded as they were sent (wire_dtype). Collective.
 * lossless: no loss is injected (algorithm `reliable`). N = 1: nothing happens, nothing counts.
 * A step may call it again: the same packets are lost, and count again. */
lossynet_status lossynet_reduce(struct lossynet_comm *comm, float *const *vectors, bool lossless);

/* PARAMETER phase. Every owner sends its shards to all workers. What arrives overwrites the
 * worker's elements, rounded by wire_dtype. An owner's own shards stay as they are. Collective. */
lossynet_status lossynet_broadcast(struct lossynet_comm *comm, float *const *vectors,
                                   bool lossless);

/* Assembles the owners' shards in `fresh` (P elements, not one of the vectors) on every rank.
 * Nothing is lost, rounded or counted. Collective. */
lossynet_status lossynet_gather_fresh(struct lossynet_comm *comm, float *const *vectors,
                                      float *fresh);

/* Counters of `step`, the present step or the one before, summed over all workers of all ranks.
 * Call it after the broadcast of that step has ended. Collective. */
lossynet_status lossynet_step_counters(struct lossynet_comm *comm, uint64_t step,
                                       struct lossynet_counters *out);

/* ---- settings --------------------------------------------------------------------------- */

/* How an owner o computes an average from the gradients that arrived. The formulas apply to each
 * packet separately. S: the senders, without o, whose packet arrived; p: the loss rate. */
typedef enum {
    LOSSYNET_MEAN,     /* (g_o + sum_S g_i) / (1 + |S|): the paper's; over-weights the owner:
                          E[w_o] = (1 - p^N) / (N (1 - p)) */
    LOSSYNET_BALANCED, /* g_o/N + (N-1)/N mean_S g_i, or g_o if S is empty: unbiased whenever
                          anything arrives */
    LOSSYNET_ZERO,     /* (g_o + sum_S g_i) / N: biased, loss shrinks the gradient */
} lossynet_estimator;

/* If everything arrived, and in a `lossless` phase, all give every sender the weight float(1.0/N)
 * exactly. */

/* Computes the masked average, where the vectors live. For j < n:
 * out[j] = sum over i < senders of weight[(j / packet) * senders + i] * sender[i][j], in order of
 * i. Weight 0 means that the packet did not arrive; sender[i] must not be read there. out may be
 * one of the senders. */
typedef void (*lossynet_weighted_sum)(float *out, const float *const *sender, const float *weight,
                                      int senders, size_t n, size_t packet);

/* The same for vectors of bfloat16, the upper halves of float32. out is none of the senders.
 * Products and sums are float32. So the average has the same bits as with float32 vectors of the
 * same values. */
typedef void (*lossynet_weighted_sum_bf16)(float *out, const uint16_t *const *sender,
                                           const float *weight, int senders, size_t n,
                                           size_t packet);

/* ---- a rule of one's own -------------------------------------------------------------- */

/* One owner's shard of a bucket, for which a function of a rule is called. */
struct lossynet_rule_part {
    uint64_t step;
    int workers, owner, bucket;
    size_t offset, count; /* its elements in the vector, all float32 */
    size_t packet,
        packets; /* elements of a packet, the last of which may be shorter; number of packets */
};

/* Functions in the place of the library's; a NULL one is the library's. They are called one after another,
 * perhaps on different threads, and must not call the library. What a part's function returns may depend on
 * the part, its arguments and the rule's own state; a state is not saved with a run.
 *   send      may change what `worker` sends an owner, values[count], before it is rounded and leaves. It is
 *             called for the worker's own part, too. Not with error_feedback
 *   average   average[count] becomes the owner's average. gradients[s][count] is what worker s sent, where
 *             arrived[s * packets + k] is not 0 for its packet k; elsewhere it must not be read. The owner's
 *             own arrives always, unless it is late. carried[s * packets + k]: with error_feedback, how many
 *             earlier gradients this packet held besides
 *   receive   may change values[count], which `worker` has received of another owner's parameters. age[k]:
 *             how many broadcasts ago packet k last arrived; 0: just now
 *   reliable  before each phase of a step: whether nothing is to be lost in it. For the program, which gives
 *             it to lossynet_reduce and lossynet_broadcast (`lossless`). steps: of the whole run; 0: not known.
 *             norm: of the averaged gradient, before a PARAMETER phase that of this step, else of the last one,
 *             the same on all ranks; NaN: there is none. Not with skip_late */
struct lossynet_rule {
    size_t size;   /* sizeof(struct lossynet_rule), by which the library knows its version */
    void *context; /* the first argument of all */
    void (*send)(void *context, const struct lossynet_rule_part *part, int worker, float *values);
    void (*average)(void *context, const struct lossynet_rule_part *part,
                    const float *const *gradients, const uint8_t *arrived, const float *carried,
                    float *average);
    void (*receive)(void *context, const struct lossynet_rule_part *part, int worker,
                    const uint32_t *age, float *values);
    bool (*reliable)(void *context, lossynet_phase phase, uint64_t step, uint64_t steps,
                     double norm);
};

/* ---- settings, continued ---------------------------------------------------------------- */

struct lossynet_memory; /* of a device; lossynet_trainer.h */

/* A part of the vector that loss.at and repair_at may name. */
struct lossynet_tensor {
    const char *name;    /* parts between dots, such as "model.layers.0.mlp.up_proj.weight" */
    size_t first, count; /* elements */
};

enum { LOSSYNET_ROUNDS_MEASURED = -1, LOSSYNET_ROUNDS_MOST = 5, LOSSYNET_ROUNDS_GIVEN = 16 };

/* The number of rounds, at most LOSSYNET_ROUNDS_MOST, that LOSSYNET_ROUNDS_MEASURED makes at loss
 * rate p within a budget (settings.retransmission_budget). error_feedback: lost gradients join the
 * next ones, so more of them may stay lost. */
int lossynet_rounds_at(lossynet_phase phase, double p, double budget, bool error_feedback);

/* What so many rounds are expected to do at loss rate p within a budget: `again`, the packets that
 * they send, and `left`, those that stay lost, as shares of the phase's packets. */
void lossynet_rounds_expect(int rounds, double p, double budget, double *again, double *left);

/* The number of rounds that these settings lead to with the loss that they inject, and what is
 * expected of them, as above. Where links are down rounds take other ways; a packet that another
 * worker sends on counts twice in `again`. */
int lossynet_rounds_plan(const struct lossynet_settings *settings, lossynet_phase phase,
                         double *again, double *left);

struct lossynet_settings {
    int workers;                   /* N, a multiple of the number of ranks */
    int group;                     /* G, which divides N; 0 means 1. See "Groups" above */
    int buckets;                   /* number of buckets */
    const size_t *bucket_elements; /* [buckets], > 0; copied */
    /* [buckets][workers], copied: elements of each owner's shard, which follow one another in order of
     * owners and make up the bucket; 0: it has none. NULL: shards are as equal as cache lines allow */
    const size_t *shard_elements;
    size_t packet_bytes; /* payload of a packet, a multiple of 4; 0: default of the link */
    lossynet_wire_dtype wire_dtype; /* of packets, over a link or in memory */
    /* Of vectors: float32 or bf16. bf16 needs lossynet_shards, another wire_dtype than
     * float32, no `memory` and no error feedback. */
    lossynet_wire_dtype vector_dtype;
    lossynet_estimator estimator;
    /* NULL: none. Copied. It needs float32 vectors in the host's memory, and no groups. */
    const struct lossynet_rule *rule;
    struct lossynet_loss_settings loss;
    lossynet_link_kind link;
    lossynet_weighted_sum weighted_sum;           /* NULL: a plain loop */
    lossynet_weighted_sum_bf16 weighted_sum_bf16; /* the same for vectors of bfloat16 */
    bool weighted_sum_whole; /* each call of weighted_sum gets a whole shard instead of one part
                                per CPU thread; this is fastest on a device */
    /* Memory for gradients from other ranks, which weighted_sum reads beside the vectors. Returns
     * NULL if there is none, and need not clear it. Give both functions, or neither for malloc. */
    void *(*allocate)(size_t bytes);
    void (*release)(void *memory); /* called when the comm closes */
    /* copied; NULL: the vectors are in the host's memory. Otherwise one rank only */
    const struct lossynet_memory *memory;
    int drift_samples; /* parameters sampled to measure drift; 0: none */
    bool lead;         /* lossynet_lead will be called: gathers ages even without drift_samples */
    /* The lost part of a gradient is added to its sender's next gradient (error_feedback.c). This
     * includes what rounding to wire_dtype took away. For estimators mean and zero, and vectors of
     * float32 in the host's memory. lossynet_reduce then also changes elements of the vectors that
     * their worker does not own. */
    bool error_feedback;
    /* With error_feedback: owners tell senders what arrived in the messages of the next all-gather,
     * and not in an exchange of lossynet_reduce, which takes half a round trip. Until this all-gather
     * or the next broadcast returns, do not change vectors where their workers own nothing. It has
     * no effect with skip_late, or with one rank. */
    bool acknowledge_later;
    /* By phase: how many times lost packets are sent again; they may be lost again
     * (retransmit.c). LOSSYNET_ROUNDS_MEASURED: as many as the measured loss asks for
     * (rounds.c). If the program measures no drift after a step, the next broadcast makes one small
     * exchange for it. With skip_late it goes by the injected loss alone. A number is at most
     * LOSSYNET_ROUNDS_GIVEN. */
    int retransmission_rounds[2];
    /* Links or tensors with another number of rounds, as loss.at gives rates: "layers.0-3=2:1". A budget
     * does not bind them. NULL or "none": none */
    const char *repair_at;
    const struct lossynet_tensor
        *tensors; /* [tensor_count]: what these lists may name; NULL: nothing */
    int tensor_count;
    /* At most this share of a phase's packets to a worker is sent again; packets that have been
     * missing longest come first. 0: no limit. */
    double retransmission_budget;
    struct lossynet_network network;
    const char *record_loss; /* FILE (with several ranks FILE.RANK): what arrived, as a trace
                              (loss_trace.c); NULL: not written */
    /* Receives the messages about this comm, and those of the function that is given these settings,
     * on any thread. NULL: they go where the process's go (lossynet_messages_to). */
    lossynet_log_function log;
    void *log_context;
};

const char *lossynet_estimator_name(lossynet_estimator estimator); /* "mean", ... */

/* ---- ranks that a launcher started ---------------------------------------------------- */

/* Joins the MPI job that mpirun or srun started. If the environment shows no launcher, the process
 * becomes rank 0 of 1 and makes no MPI call. A build without MPI does the same, but it returns
 * LOSSYNET_LINK if a launcher started several ranks, since these would overwrite each other's
 * files. Call it once, before all other functions. */
lossynet_status lossynet_bootstrap(int *argc, char ***argv, struct lossynet_world *world);

/* An all-gather that needs no comm. all: one part of `bytes` bytes per rank; the caller has filled
 * in its own. `bytes` is the same on every rank. Collective. */
lossynet_status lossynet_bootstrap_gather(const struct lossynet_world *world, void *all,
                                          size_t bytes);

/* Leaves the job. Every rank calls it last, with its exit code. It waits for the other ranks. If
 * exit_code is not 0, it waits only 3 seconds and then ends them (MPI_Abort), because they would
 * otherwise wait for this rank for ever. */
void lossynet_shutdown(int exit_code);

/* ---- the comm ---------------------------------------------------------------------------- */

/* The part of a bucket that `worker` owns: `count` elements, the first at `offset` in the whole
 * vector. count may be 0 if a bucket is smaller than N cache lines, or shard_elements says so. */
void lossynet_shard(const struct lossynet_comm *comm, int worker, int bucket, size_t *offset,
                    size_t *count);
size_t lossynet_owned_elements(const struct lossynet_comm *comm, int worker); /* over all buckets */
/* The first worker of a worker's group, and the number of workers in the group. */
void lossynet_group(const struct lossynet_comm *comm, int worker, int *first, int *size);
/* Whether `worker` is `owner`, or exchanges packets with it for its group: sends it gradients and
 * receives its parameters. */
bool lossynet_is_partner_of(const struct lossynet_comm *comm, int worker, int owner);
size_t lossynet_packets(const struct lossynet_comm *comm); /* in one vector, all owners */
size_t lossynet_packet_bytes(const struct lossynet_comm *comm);
/* "memory" if there is only one rank */
const char *lossynet_link_name(const struct lossynet_comm *comm);
/* Whether packets move while the caller computes. */
bool lossynet_overlaps(const struct lossynet_comm *comm);

/* Makes vectors[V], of the local workers, what a broadcast without loss would have left. Before it
 * all workers hold the same values, or those that the owners had. If wire_dtype is not float32, it
 * rounds the elements that a worker does not own. It changes nothing with wire_dtype float32, or in
 * vectors of bfloat16 with wire_dtype bf16. */
void lossynet_round_as_sent(struct lossynet_comm *comm, float *const *vectors);

/* ---- phases in parts ------------------------------------------------------------------ */

/* lossynet_reduce in two parts, so that a vector can leave while it is still being computed. (Over
 * link mpi everything leaves in lossynet_reduce.) Call reduce_begin after step_begin. Then call
 * bucket_ready when a local worker's vector is final in a bucket; each worker's buckets must become
 * ready in ascending order. Any thread may call it. At the end call lossynet_reduce with the same
 * arguments, and the same list until then: it makes all buckets ready and ends the phase. */
lossynet_status lossynet_reduce_begin(struct lossynet_comm *comm, float *const *vectors,
                                      bool lossless);
lossynet_status lossynet_bucket_ready(struct lossynet_comm *comm, int worker, int bucket);

/* Between reduce_begin and lossynet_reduce, with the arguments of the latter: averages a bucket if
 * it is ready at all local workers and no more of its packets can come. It never waits. Call it for
 * buckets in ascending order, from one thread. False: not done, for example because of
 * retransmission or a deadline; lossynet_reduce will do it. */
bool lossynet_reduce_arrived(struct lossynet_comm *comm, float *const *vectors, bool lossless,
                             int bucket);

/* lossynet_broadcast in parts, so that a forward pass can start on a bucket as soon as its
 * parameters are there. Buckets arrive in the order in which a forward pass needs them, the last
 * one first. Between begin and end a rank may read only buckets that it has waited for. It must not
 * write what it owns until the next lossynet_reduce has returned. bucket_wait may be called from
 * several threads, again, and when no phase is open. *waited, if not NULL, gets the seconds that it
 * waited. */
lossynet_status lossynet_broadcast_begin(struct lossynet_comm *comm, float *const *vectors,
                                         bool lossless);
lossynet_status lossynet_bucket_wait(struct lossynet_comm *comm, int bucket, double *waited);
lossynet_status lossynet_broadcast_end(struct lossynet_comm *comm); /* fine when none is open */

/* ---- what is done about loss ---------------------------------------------------------- */

/* With settings.error_feedback: which share of the residual the next lossynet_reduce adds, 0 ... 1
 * (the default is 1). The same on every rank. Call it before lossynet_reduce_begin. */
void lossynet_error_feedback_share(struct lossynet_comm *comm, double share);

/* From now on broadcasts send ahead[v] instead of what local worker v owns: as many float32
 * elements, in order of buckets. These are the model's values plus `lead` times its last change.
 * NULL: broadcasts send the owners' values again. The memory is where the vectors are (the host's
 * or the device's). It must keep its contents until the broadcast has ended and the next
 * lossynet_reduce has returned. Call it between steps only. */
void lossynet_broadcast_ahead(struct lossynet_comm *comm, const float *const *ahead, double lead);

/* The lead, in steps, that makes the mean of the replicas equal to the model. It is computed from
 * measurements of earlier steps: how far replicas were behind along the model's path, plus how late
 * carried gradients were (lead.c derives it). 0 before anything was lost. The same on every rank.
 * Needs settings.lead. Without a drift sample, or if no drift is measured after a step, it takes all
 * changes of the model as alike. */
double lossynet_lead(const struct lossynet_comm *comm);

/* ---- exchanges without loss ----------------------------------------------------------- */

/* lossynet_gather_fresh for one bucket; `fresh` holds only its elements. */
lossynet_status lossynet_gather_bucket(struct lossynet_comm *comm, float *const *vectors,
                                       int bucket, float *fresh);

/* Small, reliable all-gather: each rank gives V items of `bytes` bytes, and `all` gets N items in
 * the order of workers. Collective. */
lossynet_status lossynet_all_gather(struct lossynet_comm *comm, const void *mine, void *all,
                                    size_t bytes);

/* Reliable all-to-all exchange. `out` holds the bytes for rank r at out_offset[r] ...
 * out_offset[r + 1]; `in` gets those from rank r at in_offset[r] ... in_offset[r + 1]. Both offsets
 * are [ranks + 1]. Sizes must agree at both ranks. The rank's own part is copied. Collective. */
lossynet_status lossynet_swap(struct lossynet_comm *comm, const void *out, const size_t *out_offset,
                              void *in, const size_t *in_offset);

/* ---- accounting ------------------------------------------------------------------------- */

struct lossynet_counters { /* packets between workers; a worker's packets to itself do not count */
    uint64_t expected[2];  /* by phase */
    uint64_t arrived[2];
    uint64_t bytes[2];                 /* payload bytes that workers sent, lost ones included */
    uint64_t resent[2];                /* packets that were sent again, and second hops */
    uint64_t network[LOSSYNET_EVENTS]; /* events of links udp and verbs since the last call */
};

struct lossynet_bucket { /* packets of a bucket, as in lossynet_counters */
    uint64_t expected[2], arrived[2], resent[2];
    uint64_t late[2]; /* came after their phase, since the last call */
};

/* lossynet_step_counters for each bucket: out[buckets]. It makes its own exchange. Collective. */
lossynet_status lossynet_step_buckets(struct lossynet_comm *comm, uint64_t step,
                                      struct lossynet_bucket *out);

/* lost[r * N + s] (N * N, on every rank): the share of packets from worker s to worker r that did
 * not arrive, since open and in both phases; 0 if none was sent. Collective. */
lossynet_status lossynet_lost_between(struct lossynet_comm *comm, float *lost);

/* Bytes of memory that this rank's comm holds. */
size_t lossynet_memory_bytes(const struct lossynet_comm *comm);

/* The same without opening a comm, for any world, with this machine's threads and files. If the
 * settings make no sense, it logs one line and returns 0. */
size_t lossynet_memory_needed(const struct lossynet_world *world,
                              const struct lossynet_settings *settings);

/* ---- drift (drift.c derives the formulas) ----------------------------------------------- */

enum { LOSSYNET_LAGS = 16, LOSSYNET_AGES = 8 };

struct lossynet_drift {
    double pair;   /* ||theta_i - theta_j||^2, mean over pairs of workers */
    double owner;  /* ||theta_i - theta_fresh||^2, mean over workers that do not own the element */
    double sigma2; /* ||the last step's change of the fresh model||^2 */
    double rho[LOSSYNET_LAGS]; /* correlation of that change with those 1, 2, ... steps earlier */
    double expected_pair; /* formula with the measured loss rate, and sigma2 and rho of what owners
                             sent: these, but for the lead */
    double expected_owner;
    double paper_pair; /* the paper's 2p/(1+p) sigma2, for comparison */
    double lead;       /* of the last broadcast, in steps */
    double lag;      /* how far the mean replica is behind the model along the model's last change,
                          in units of that change (steps); negative: ahead */
    double mean_age; /* over (worker, packet), owners excluded; steps */
    uint32_t max_age;
    double age_share[LOSSYNET_AGES]; /* share of these packets with age 0, 1, ...; last: or more */
};

/* Measures drift after a broadcast, on a fixed random sample of elements, and scales it to the
 * whole vector. Call it once in every step, because sigma2 and rho come from successive calls.
 * Collective. Needs drift_samples > 0 and N > 1. Otherwise all fields are 0, but with settings.lead
 * and N > 1 the ages and the lead are measured. The first call has seen no change: sigma2 and the
 * expected values are 0. If nothing has ever arrived (p = 1), the expected values are infinite;
 * JSON cannot hold them. */
lossynet_status lossynet_drift_measure(struct lossynet_comm *comm, float *const *vectors,
                                       struct lossynet_drift *out);

/* lossynet_drift_measure and lossynet_step_counters of `step`, in two parts around the next
 * lossynet_all_gather. Together the three cost one exchange. Call begin after the broadcast of
 * `step` has ended and before vectors change; it samples the values. end computes the results. If
 * there was no gather in between, end makes the exchange itself. Both are collective. */
lossynet_status lossynet_report_begin(struct lossynet_comm *comm, uint64_t step,
                                      float *const *vectors);
lossynet_status lossynet_report_end(struct lossynet_comm *comm, struct lossynet_counters *counters,
                                    struct lossynet_drift *drift);

/* The formulas alone, without a lead. N workers, loss rate p in [0, 1), correlations rho[lags]:
 *   (1-2/N) sigma2 2p/(1-p^2) C(p) + (2/N) sigma2 p/(1-p) C(p),  C(p) = 1 + 2 sum_k rho_k p^k
 * p = 1 gives infinity. */
double lossynet_drift_pair(int workers, double p, double sigma2, const double *rho, int lags);
double lossynet_drift_paper(double p, double sigma2); /* 2p/(1+p) sigma2 */

/* ---- for programs in other languages (named.c) ------------------------------------------ */

/* Settings by name and value, as text. The names are those of the trainer's options without "--", and
 * ranges and defaults are the trainer's (options.c). What a caller of the library does itself can be
 * read from them: "lead", "look-ahead" (for lossynet_broadcast_ahead), "carry" (for
 * lossynet_error_feedback_share; "auto": 1). */
struct lossynet_named; /* opaque */

/* bucket_elements: [buckets], copied. NULL: no memory, after one logged line. */
struct lossynet_named *lossynet_named_open(int buckets, const size_t *bucket_elements);
void lossynet_named_close(struct lossynet_named *named); /* NULL is fine */
/* `value` is copied. LOSSYNET_INVALID, after one logged line that says what was expected: there is
 * no such name or value; nothing changes. lossynet_open checks how values go together. */
lossynet_status lossynet_named_set(struct lossynet_named *named, const char *name,
                                   const char *value);
/* A value as it was set, until it is set again. NULL: there is no such name. */
const char *lossynet_named_get(const struct lossynet_named *named, const char *name);
/* What loss-at and repair-at may name; `name` is copied. And a rule, and shard_elements of the settings, which
 * must stay until a comm is open; a rule's functions must stay until it is closed. */
lossynet_status lossynet_named_tensor(struct lossynet_named *named, const char *name, size_t first,
                                      size_t count);
void lossynet_named_rule(struct lossynet_named *named, const struct lossynet_rule *rule);
void lossynet_named_shards(struct lossynet_named *named, const size_t *shard_elements);
const char *lossynet_named_name(int index); /* 0, 1, ...: the names; NULL after the last */
/* For lossynet_open with so many ranks. Valid until the next of these calls. */
const struct lossynet_settings *lossynet_named_settings(struct lossynet_named *named, int ranks);

/* sizeof of struct lossynet_world, lossynet_counters, lossynet_drift or lossynet_not_finite ("world",
 * ...), which such a program declares again and compares. 0: another name. */
size_t lossynet_struct_bytes(const char *name);

/* Sends messages that are about no comm, or about one without settings.log, to `log` from now on. NULL:
 * to stderr, as "lossynet: ...". Call it while no comm is open. */
void lossynet_messages_to(lossynet_log_function log, void *context);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
