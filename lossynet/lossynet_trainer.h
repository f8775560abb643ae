/* lossynet_trainer.h — what a trainer needs beside lossynet.h: ranks that come and go, memory of
 * its own and of devices, late ranks and replays, the table of options, resuming, and a look at the
 * network before a run. */
#ifndef LOSSYNET_TRAINER_H
#define LOSSYNET_TRAINER_H

#include "lossynet/lossynet.h"

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

/* ---- ranks that come and go ----------------------------------------------------------- */

/* One meeting of ranks. A program whose number of ranks changes lets them meet several times. */
struct lossynet_meeting {
    const char *address; /* of rank 0, "HOST:PORT" */
    /* On rank 0: a socket that listens at `address`. On other ranks: 0 or more says that rank 0 has
     * such a socket; a refused connection then means that rank 0 has ended. -1: rank 0 opens a
     * socket for this meeting alone. */
    int listener;
    /* Number of the meeting. Rank 0 closes the connection of a rank that comes for an earlier one.
     * It tells a rank that comes for a later one to come again. */
    uint64_t epoch;
    int rank, ranks;
    double seconds; /* for which ranks wait for each other */
    bool *missing;  /* [ranks] or NULL; output if the ranks did not meet: which ones were missing */
    /* May be NULL. Rank 0 calls it repeatedly while it waits, if `missing` is given. It sets
     * ended[r] for ranks that will not come; rank 0 then stops waiting. It is true already for
     * those that have come. */
    void (*find_ended)(void *context, bool *ended);
    void *context; /* of find_ended */
    /* NULL, or a file with the same secret on all ranks (key_file of struct lossynet_settings).
     * Rank 0 sends callers away who do not prove that they have it, and the others refuse a rank 0
     * that does not. */
    const char *key_file;
    double exchange_seconds; /* the same as `seconds` for each later exchange; 0: `seconds` */
};

/* Listens at `address`; port 0 chooses a free port, of ports[0] to ports[1] unless they are 0.
 * *listener gets a socket, which the caller closes, and *port its port. Connections wait in the
 * socket until the next meeting. */
lossynet_status lossynet_rendezvous_listen(const char *address, const int ports[2], int *listener,
                                           int *port);
lossynet_status lossynet_rendezvous_meet(const struct lossynet_meeting *meeting,
                                         struct lossynet_world *world);

/* Writes a proof that this process has the contents of a key file: the HMAC-SHA256 of `text` with
 * them as the key, as hexadecimal digits. Who does not have them cannot make it. LOSSYNET_PROTOCOL:
 * there is no such file, or it does not have 16 to 4096 bytes; nothing is logged. */
lossynet_status lossynet_key_proof(const char *key_file, const char *text, char proof[65]);

/* After a failed exchange over these connections: the rank that this rank did not hear; -1: it does
 * not know, or the ranks did not meet by rendezvous. */
int lossynet_rendezvous_lost(const struct lossynet_world *world);

/* Whether a call has failed because of another rank, over a link that is not reliable. The comm can
 * then only be closed. missing[r], r < ranks: this rank heard nothing from rank r for half of
 * settings.network.peer_timeout, and rank r did not say that it leaves. */
bool lossynet_has_failed(struct lossynet_comm *comm, bool *missing);

/* Makes one turn of sending and receiving over a link without a thread of its own (MPI). Returns
 * whether the link has no thread. A program that waits for another process by other means must then
 * call this repeatedly, because a third process may wait for packets that this one has not sent. */
bool lossynet_turn(struct lossynet_comm *comm);

/* ---- memory of the caller and of devices ---------------------------------------------- */

/* A packet of a vector: where its elements lie. */
struct lossynet_packet_place {
    size_t element; /* the first one, in the vector */
    size_t owned;   /* the same, counted among the elements that the owner owns */
    uint32_t count;
    int32_t owner;
};

/* The K = lossynet_packets() packets of a vector in order of (owner, bucket, packet). The functions
 * below that are given marks or weights have them in this order. */
void lossynet_packet_places(const struct lossynet_comm *comm, struct lossynet_packet_place *out);
/* out[g], g < G: the worker that sends and receives the owner's packets for group g; without groups,
 * worker g. Returns G. out may be NULL. */
int lossynet_partners_of(const struct lossynet_comm *comm, int owner, int32_t *out);

/* Functions for the vectors of N workers in memory that the host cannot access, such as a GPU's. The
 * library then passes vectors only to these functions. One call does the work of a whole phase:
 * `vectors` are those of all workers, and packets are those of lossynet_packet_places. A worker that
 * is no partner of an owner (lossynet_is_partner_of) neither sends nor receives its packets. One
 * thread calls them.
 *   round     rounds, in each vector, the packets that the worker sends to other owners: with 16
 *             `bits` to bfloat16, to nearest even; with 8, 6 or 4 in blocks of 32 to integers with a
 *             scale (elements.c), and then at random: the block that begins with element e of the
 *             vector of worker v uses the key key[v] + e. key NULL: to nearest. phase: whether the
 *             vectors are gradients or parameters
 *   average   the packets of an owner, in its vector, become the sum over the groups g of
 *             weight[k * G + g] times the vector of its partner in g, for packet k, in order of g.
 *             Weight 0: not read
 *   broadcast copies packet k of its owner to worker v where arrived[v * K + k] is not 0, v being
 *             another worker, rounded as by `round` (32 bits: not at all). ahead: the owners' values,
 *             each owner's elements one after another; NULL: their vectors
 *   copy      copies within that memory
 *   gather    out[v * n + i] = vectors[v][element[i]], i < n, for all v. `of` not NULL: out[i] =
 *             vectors[of[i]][element[i]], i < n. out, element and `of` are in the host's memory */
struct lossynet_memory {
    void *context;
    void (*round)(void *context, lossynet_phase phase, float *const *vectors, int bits,
                  const uint64_t *key);
    void (*average)(void *context, float *const *vectors, const float *weight);
    void (*broadcast)(void *context, float *const *vectors, const float *const *ahead,
                      const uint8_t *arrived, int bits);
    void (*copy)(void *to, const void *from, size_t bytes);
    void (*gather)(void *context, float *out, float *const *vectors, const size_t *element,
                   const int32_t *of, size_t n);
};

/* May be called between a step's lossynet_reduce and its broadcast, with the same `lossless`. With
 * functions for vectors (above), decides already now what of the broadcast arrives, so that the
 * device need not wait for that then. Does nothing otherwise, or if the last broadcast was not
 * reported. */
lossynet_status lossynet_broadcast_prepare(struct lossynet_comm *comm, bool lossless);

/* Where an owner has a shard, in float32. By default both are its elements of the vectors that the
 * functions are given.
 *   average  gets the estimate of lossynet_reduce, which reads the owner's own vector as its
 *            contribution
 *   value    the parameters: broadcasts send them (or what lossynet_broadcast_ahead gives), drift
 *            uses them as the owner's values, and lossynet_gather_fresh assembles them */
struct lossynet_shard {
    float *average;
    const float *value;
};

/* Says where local owners have their shards apart from the vectors: shard[v * buckets + b] for local
 * worker v and bucket b; copied. The caller keeps ownership of the memory, and must keep it until
 * lossynet_close. It may change values between the return of lossynet_reduce and the broadcast.
 * lossynet_reduce then leaves v's own shards of its vector as they are, and PARAMETER phases neither
 * read nor write them. Vectors of bfloat16 need this call before the first phase; for vectors of
 * float32 it is optional. With N = 1 lossynet_reduce then copies. LOSSYNET_INVALID, after one logged
 * line: a pointer is NULL, or settings.memory is set. */
lossynet_status lossynet_shards(struct lossynet_comm *comm, const struct lossynet_shard *shard);

/* Registers a vector (`count` elements in the host's memory) that phases will be given. Network
 * hardware (link verbs) can then send from it in place, if packets are not encrypted and carry the
 * elements as they are: float32, or gradients in vectors of bfloat16. The vector must then stay
 * until lossynet_close. False: packets from it are copied first, as from any other vector. */
bool lossynet_register(struct lossynet_comm *comm, const float *vector, size_t count);

/* For vectors of bfloat16, before lossynet_round_as_sent. values[j], j < n, is the float32 value of
 * element offset + j; to[j] becomes what a packet would bring of it. A shard or a packet must begin
 * with element `offset`. (In blocks, rounding float32 to bfloat16 first would give another result.)
 * values need not be aligned. */
void lossynet_narrow_parameters(const struct lossynet_comm *comm, uint16_t *to, const void *values,
                                size_t offset, size_t n);

/* ---- late ranks, and replays of a run ------------------------------------------------- */

/* Whether steps do not wait for late ranks: skip_late is set and the link supports it. */
bool lossynet_skips_late(const struct lossynet_comm *comm);

/* With settings.network.skip_late, instead of lossynet_step_begin: starts *step, or a later step if most
 * ranks are already there. It then leaves out the steps in between and sets *step. *idle: this rank
 * was late, so its workers take part without a gradient. What the vectors hold is then not sent,
 * but with error_feedback residuals are. Without skip_late it does the same as
 * lossynet_step_begin. */
lossynet_status lossynet_step_begin_with_majority(struct lossynet_comm *comm, uint64_t *step,
                                                  bool *idle);

/* With settings.network.skip_late: whether another rank waits for this one in a collective call outside of
 * steps (any but lossynet_reduce, lossynet_pulse and lossynet_broadcast). This rank should then
 * join it. All ranks must then agree on a step; afterwards each calls lossynet_agreed. */
bool lossynet_is_awaited(struct lossynet_comm *comm);
void lossynet_agreed(struct lossynet_comm *comm);

/* late[r], r < ranks: in how many steps since open this rank went on without rank r. For this rank
 * itself: in how many steps it was late. */
void lossynet_lateness(struct lossynet_comm *comm, uint64_t *late);

/* A lossynet_all_gather that each step makes once. With settings.network.skip_late it does not wait for
 * late ranks: their parts of `all`, and of gathers put aside, stay as an earlier step left them. */
lossynet_status lossynet_pulse(struct lossynet_comm *comm, const void *mine, void *all,
                               size_t bytes);

/* A number that no receiver takes: NaN, infinite, or 2^63 or more in size. */
struct lossynet_not_finite {
    int workers;          /* how many have such numbers; 0: none, and all else is 0 */
    int worker;           /* the first of them, */
    lossynet_phase phase; /* in its gradient, or in the parameters that it owns */
    uint64_t element;     /* the first in the whole vector */
    float value;          /* to 7 bits */
};

/* What the last lossynet_pulse told of such numbers, the same on every rank: those in gradients of
 * this step and in parameters of the last broadcast. Packets with them are lost, and residuals do
 * not keep them, so the next step can be made. Who finds one should not update the parameters in
 * this step. Numbers in gradients of the owner itself, and of workers of its own rank, are in the
 * average instead, and are not told. If the program does not ask, a line is logged. */
bool lossynet_is_not_finite(struct lossynet_comm *comm, struct lossynet_not_finite *out);

/* After lossynet_reduce of these vectors: looks for such numbers in all gradients, also where they are
 * not told, for lossynet_is_not_finite. With groups, a worker stands for its group. Collective. */
lossynet_status lossynet_find_not_finite(struct lossynet_comm *comm, float *const *vectors);

/* A lossynet_all_gather that waits for the next one, or for another call below that gathers, and
 * shares its exchange. `mine` is copied at once. `all` is written later and must stay until then.
 * If the data do not fit (some 256 bytes per worker, 8 calls), they are gathered at once, with
 * those that wait. Every rank makes the same calls in the same order. Collective. */
lossynet_status lossynet_all_gather_later(struct lossynet_comm *comm, const void *mine, void *all,
                                          size_t bytes);

/* As lossynet_all_gather_later, or if not `later` lossynet_all_gather, with one item of `bytes`
 * bytes from each rank; `all` gets them in the order of ranks. Collective. */
lossynet_status lossynet_rank_gather(struct lossynet_comm *comm, const void *mine, void *all,
                                     size_t bytes, bool later);

/* With skip_late and record_loss: records the numbers that local workers' updates use in this step,
 * beside what arrived. One process can then repeat the run (loss model "replay:FILE"). */
void lossynet_note_part(struct lossynet_comm *comm, double norm, double lead);

/* Says in *out what a worker does in the present step. Returns whether this is a replay; only then
 * `worker` may be any worker, not just a local one. */
bool lossynet_replayed(const struct lossynet_comm *comm, int worker, struct lossynet_part *out);

/* ---- the table of options (options.c) --------------------------------------------------- */

/* What others must know about an option. With RUN alone it is a part of what a run is: all ranks
 * have the same value, and a sweep (scripts/sweeps) names a run by it. Programs whose tables have
 * such lines may add marks from 1 << 16 on, and 4 and 16. */
enum lossynet_option_mark {
    LOSSYNET_RUN = 0,
    LOSSYNET_RESUMED = 1,   /* with another value a resumed run has other results, and says so */
    LOSSYNET_NEUTRAL = 2,   /* changes no result: a sweep does not name a run by it */
    LOSSYNET_EACH_RANK = 8, /* a rank may have another value: its files, its devices */
    /* What else must be so for the option to have an effect. Where it is not, a run says so. */
    LOSSYNET_IF_LOSES = 1 << 8,       /* phases that are not `lossless` */
    LOSSYNET_IF_LOSSY = 1 << 9,       /* the same, with owners that broadcast parameters */
    LOSSYNET_IF_ESTIMATES = 1 << 10,  /* the same, or owners that average gradients */
    LOSSYNET_IF_DATAGRAMS = 1 << 11,  /* link udp or verbs */
    LOSSYNET_IF_BROADCASTS = 1 << 12, /* owners that broadcast parameters, lossless or not */
    LOSSYNET_IF_TRAINS = 1 << 13,     /* steps are made */
};

enum lossynet_option_kind {
    LOSSYNET_OPTION_TITLE,     /* no option: a title for those that follow */
    LOSSYNET_OPTION_ELSEWHERE, /* in a program's table: the option that the library has of this name */
    LOSSYNET_OPTION_FLAG,      /* bool */
    LOSSYNET_OPTION_TEXT,      /* const char *, the text that was given */
    LOSSYNET_OPTION_WHOLE,     /* int */
    LOSSYNET_OPTION_WHOLE64, /* int64_t */
    LOSSYNET_OPTION_REAL,    /* double */
    LOSSYNET_OPTION_CHOICE   /* int, the index of a name in `choices` */
};

struct lossynet_option {
    const char *name;
    enum lossynet_option_kind kind;
    size_t offset;              /* of its value */
    unsigned marks;             /* enum lossynet_option_mark */
    const char *initial;        /* default, as text; NULL: none; "-1": follows from others */
    double low, high;           /* WHOLE and REAL: allowed range, both ends included */
    const char *const *choices; /* CHOICE: names, and a NULL after them */
    /* For --help. A WHOLE or REAL whose argument begins with "auto|" may be `auto`, LOSSYNET_AUTO.
     * One with "[," in it has two numbers in its field, by phase: gradients, parameters. */
    const char *argument, *help;
    bool (*fits)(
        const char *text); /* TEXT: NULL, or whether the text has the right form; which is */
    const char *expected;
};

/* A file that has a table of options defines LOSSYNET_OPTION_ROWS, the struct of the values, before it includes
 * this header, and gets the forms of a row and short names of marks. */
#ifdef LOSSYNET_OPTION_ROWS
#define OPTION_AT(field) offsetof(LOSSYNET_OPTION_ROWS, field)
#define TITLE(text)                                                                                \
    { .name = text, .kind = LOSSYNET_OPTION_TITLE }
#define ELSEWHERE(text)                                                                            \
    { .name = text, .kind = LOSSYNET_OPTION_ELSEWHERE }
#define OPTION(n, k, field, m, i, a, h, ...)                                                       \
    {                                                                                              \
        .name = n, .kind = LOSSYNET_OPTION_##k, .offset = OPTION_AT(field), .marks = m,            \
        .initial = i, .argument = a, .help = h, __VA_ARGS__                                        \
    }
#define SWITCH(name, field, marks, help)                                                           \
    OPTION(name, FLAG, field, marks, NULL, NULL, help, .low = 0)
#define STRING(name, field, marks, initial, argument, help)                                        \
    OPTION(name, TEXT, field, marks, initial, argument, help, .low = 0)
#define STRING_THAT(is, what, name, field, marks, initial, argument, help)                         \
    OPTION(name, TEXT, field, marks, initial, argument, help, .fits = is, .expected = what)
#define WHOLE(name, field, marks, initial, least, most, argument, help)                            \
    OPTION(name, WHOLE, field, marks, initial, argument, help, .low = least, .high = most)
#define SEED(name, field, marks, initial, help)                                                    \
    OPTION(name, WHOLE64, field, marks, initial, "N", help, .low = 0, .high = 9007199254740992.0)
#define REAL(name, field, marks, initial, least, most, argument, help)                             \
    OPTION(name, REAL, field, marks, initial, argument, help, .low = least, .high = most)
#define ONE_OF(name, field, marks, initial, list, argument, help)                                  \
    OPTION(name, CHOICE, field, marks, initial, argument, help, .choices = list)
#define RUN LOSSYNET_RUN
#define RESUMED LOSSYNET_RESUMED
#define NEUTRAL LOSSYNET_NEUTRAL
#define EACH_RANK LOSSYNET_EACH_RANK
#define IF_LOSES LOSSYNET_IF_LOSES
#define IF_LOSSY LOSSYNET_IF_LOSSY
#define IF_BROADCASTS LOSSYNET_IF_BROADCASTS
#define IF_ESTIMATES LOSSYNET_IF_ESTIMATES
#define IF_DATAGRAMS LOSSYNET_IF_DATAGRAMS
#define IF_TRAINS LOSSYNET_IF_TRAINS
#endif

enum { LOSSYNET_AUTO = -1 };
enum {
    LOSSYNET_WIRE_AUTO = LOSSYNET_INT4 + 1
}; /* of wire_dtype below, see lossynet_options_wire */
enum { LOSSYNET_LEAD_AUTO, LOSSYNET_LEAD_OFF };

/* The values of the options in the library's table. */
struct lossynet_options {
    double look_ahead;   /* what the caller adds to lossynet_lead */
    double loss_rate[2]; /* by phase: gradients, parameters */
    const char *loss_model, *loss_at, *repair_at;
    int64_t loss_seed; /* -1: 1 */
    int estimator;     /* lossynet_estimator */
    int lead;          /* LOSSYNET_LEAD_ */
    double carry;      /* LOSSYNET_AUTO, or the number; so are the next two */
    int repair[2];     /* by phase */
    double repair_budget;
    int workers; /* 0: one per rank */
    int link;    /* lossynet_link_kind */
    int packet_bytes;
    int wire_dtype; /* lossynet_wire_dtype, or LOSSYNET_WIRE_AUTO */
    const char *interface, *port_range, *traffic_class;
    double pace_gbps, loss_budget, peer_timeout; /* peer_timeout -1: the default */
    int link_threads;
    const char *deadline, *key_file, *record_loss;
    bool encrypt;
    int drift_samples;
};

/* Line i of the library's table, from 0 on. NULL: there is none. The offsets are in struct
 * lossynet_options. A program's own table may have it as the first member of its own struct. */
const struct lossynet_option *lossynet_option_at(int i);
const struct lossynet_option *lossynet_option_named(const char *name);

/* Parses `text`, and stores the value at values + option->offset; a TEXT itself is kept, not copied.
 * A FLAG is "0" or "1". False: it does not fit, and `wrong` (`size` bytes) gets a line that begins with
 * the option's name and says what was expected. The value may have changed then. */
bool lossynet_option_set(const struct lossynet_option *option, void *values, const char *text,
                         char *wrong, size_t size);
void lossynet_option_reset(const struct lossynet_option *option, void *values); /* to its default */
bool lossynet_option_is_automatic(const struct lossynet_option *option);        /* may be `auto` */
bool lossynet_option_is_pair(const struct lossynet_option *option);

/* Settings from options, for `ranks` ranks. Leaves what is not in the table to the caller: groups,
 * buckets, functions. */
void lossynet_options_apply(const struct lossynet_options *options, int ranks,
                            struct lossynet_settings *out);

/* The type on the wire. */
lossynet_wire_dtype lossynet_options_wire(const struct lossynet_options *options);
/* The share for lossynet_error_feedback_share, and the rounds of retransmission. */
double lossynet_options_carry(const struct lossynet_options *options, int ranks);
int lossynet_options_rounds(const struct lossynet_options *options, lossynet_phase phase);

/* How often a phase of the next step sends lost packets again, at most; and the share of its packets
 * that were lost of late before anything went again, mean over all links: injected loss at first. -1
 * where it is not measured. */
int lossynet_rounds_now(const struct lossynet_comm *comm, lossynet_phase phase);
double lossynet_lost_of_late(const struct lossynet_comm *comm, lossynet_phase phase);

/* The bytes of an element in a packet of a phase, with its share of the scale that a block of 32
 * has. */
double lossynet_wire_bytes(lossynet_wire_dtype dtype, lossynet_phase phase);
const char *lossynet_wire_dtype_name(int dtype); /* static text; also of LOSSYNET_WIRE_AUTO */

/* ---- what arrived --------------------------------------------------------------------- */

/* Iterates over the elements that are fresh at a local worker after the last broadcast (its own
 * shards included), as maximal ranges in ascending order. Start with *cursor = 0. Returns false at
 * the end. Before the first broadcast everything is fresh, because workers start from the same
 * values. */
bool lossynet_next_fresh(const struct lossynet_comm *comm, int worker, size_t *cursor,
                         size_t *offset, size_t *count);

/* The age of each packet at a local worker: how many steps ago the values that it holds were
 * broadcast; 0 for its own shards. [lossynet_packets], in the order of elements, valid until the next
 * broadcast. Packet k of a shard begins with element k*E of the shard, E = lossynet_packet_elements. */
const uint32_t *lossynet_ages(const struct lossynet_comm *comm, int worker);
size_t lossynet_packet_elements(const struct lossynet_comm *comm);

/* ---- state, for resuming a run (state.c) ------------------------------------------------ */

enum { LOSSYNET_ALL_WORKERS = -1 }; /* state that all workers share: history of drift and lead */

/* What a comm remembers from step to step, as bytes: of one local worker, or of all. The bytes do
 * not depend on how workers are spread over ranks. Call these between steps only. */
size_t lossynet_state_bytes(const struct lossynet_comm *comm, int worker);
void lossynet_state_save(const struct lossynet_comm *comm, int worker, void *out);

/* Loads the state into a comm that has made no step yet. Returns false and changes nothing if the
 * bytes are of another worker, or of a comm with other workers, buckets or packets (for the shared
 * state also: other samples or seed). */
bool lossynet_state_load(struct lossynet_comm *comm, int worker, const void *bytes, size_t count);

/* ---- the network before a run (transport/probe.c) --------------------------------------- */

/* Sends test datagrams from every rank to every other, in ranks - 1 pairings of `seconds`. In a pairing
 * every rank sends to one rank and receives from one. It uses the link, interface, packet size, pace
 * and log of `settings`, nothing else. node[ranks]: the number of each rank's host, 0, 1, ..., the
 * same on all ranks. out[s * ranks + r] (ranks * ranks), on every rank: the path from s to r.
 * *link_name: static text. A rank alone opens the link if the settings name one, an interface or ports.
 * Collective. */
lossynet_status lossynet_probe(const struct lossynet_world *world,
                               const struct lossynet_settings *settings, const int *node,
                               double seconds, struct lossynet_path *out, const char **link_name);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
