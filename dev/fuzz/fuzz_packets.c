/* fuzz_packets.c — four ranks train over a network that an input describes, byte by byte.
 *
 *     clang ... -fsanitize=fuzzer,address,undefined   coverage-guided search
 *                                                     (test/lossynet/test_fuzz.py)
 *     any compiler, -DREPLAY                          runs the files named on the command line
 *
 * The whole of lossynet above the links runs, all ranks in one thread (dev/simulation). An input
 * begins with SETTINGS bytes that choose what is run, and how many datagrams arrive untouched
 * first. Each datagram that a rank sends then takes one byte, its fate, and what that fate needs;
 * when the input ends, everything arrives.
 *
 * Two kinds of networks:
 *   fair   loses, delays, repeats, reorders, cuts and damages datagrams, adds those of strangers
 *          and noise, replays old ones, stops ranks; never longer than a peer may be silent. All
 *          ranks must come to an end with LOSSYNET_OK, and every value, mask, counter and age be
 *          right: see judge_gradients and judge_parameters.
 *   mad    moreover changes fields and payloads and makes the checksum fit, as a rank gone mad
 *          would, and stops ranks for long. Then the network is cut, or stays and carries
 *          everything: what was believed of a wrong counter must not keep ranks waiting for ever.
 *          All ranks must come to some end in bounded time; none touches memory that it should not,
 *          and a phase writes only where a datagram of that phase may land. In some, ranks do not
 *          wait for late ones (skip_late): then counts far ahead are believed for a while.
 */
#include "dev/simulation/simulation.h"
#include "lossynet/comm.h"
#include "lossynet/transport/exchange/exchange.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 4, SETTINGS = 5, HISTORY = 64, MOST_BYTES = 512 };
enum { BUCKETS = 3, ELEMENTS = 200 + 1 + 90, MOST_WORKERS = 8, STEPS = 3 };
static const size_t bucket_elements[BUCKETS] = {200, 1, 90};
static const double PEER_TIMEOUT = 1.5, MOST_SILENCE = 0.3, MOST_STOP = 0.9;

static struct {
    const uint8_t *input;
    size_t left;
    unsigned untouched; /* datagrams before the first with a fate */
    bool mad, stays, skips, overlap, encrypt, abrupt;
    bool harmless; /* so far, nothing that a rank sent came late, damaged or not at all */
    int workers, local;
    uint64_t run;
    double silent_since[RANKS][RANKS]; /* [sender][receiver] */
    double stopped, ended;             /* seconds of stops so far; when the input ended */
    struct {
        uint8_t bytes[MOST_BYTES];
        size_t count;
        int peer;
    } history[HISTORY];
    unsigned sent;

    /* What happened, told by owners and receivers, in the present step. */
    uint8_t gradient_bits[ELEMENTS]; /* which workers' gradients are in, by element */
    uint64_t arrived[STEPS + 1][2];
} run;

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static unsigned next_byte(void) {
    if (run.left == 0) {
        if (run.ended == 0) run.ended = simulation_now();
        return 0;
    }
    run.left--;
    return *run.input++;
}

/* ---- the network ---- */

static void fix_checksum(uint8_t *bytes, size_t count) {
    if (count < WIRE_HEADER_BYTES) return;
    wire_put(bytes + WIRE_CHECKSUM_AT, 0, 4);
    wire_put(bytes + WIRE_CHECKSUM_AT, ln_crc32c(0, bytes, count), 4);
}

/* Sets, adds to, or flips bits of a field of the header, or a word of the payload. */
static void change_field(uint8_t *bytes, size_t count) {
    static const struct {
        uint8_t at, width;
    } fields[] = {{0, 2},  {2, 1},  {3, 1},  {4, 4},  {8, 2}, {10, 2},
                  {12, 4}, {16, 4}, {18, 2}, {20, 4}, {24, 4}};
    unsigned which = next_byte(), how = next_byte(), low = next_byte();
    size_t at, n = sizeof fields / sizeof *fields, width = 4;
    if (which % 32 < n) {
        at = fields[which % 32].at;
        width = fields[which % 32].width;
    } else {
        size_t words = (count - WIRE_HEADER_BYTES) / 4;
        if (words == 0) return;
        at = WIRE_HEADER_BYTES + (which % 32 - n) % words * 4;
    }
    uint64_t value = wire_get(bytes + at, (int)width), operand = low;
    if (how & 4) operand <<= 8 * (how >> 3 & 3);
    switch (how & 3) {
    case 0:
        value = operand;
        break;
    case 1:
        value += operand;
        break;
    case 2:
        value -= operand;
        break;
    case 3:
        value = how & 32 ? 0x7fc00000u : value ^ operand; /* NaN */
        break;
    }
    wire_put(bytes + at, value, (int)width);
}

static void flip_bits(uint8_t *bytes, size_t count) {
    unsigned flips = 1 + next_byte() % 3; /* CRC32C finds them all */
    for (unsigned i = 0; i < flips; i++) {
        unsigned high = next_byte(), low = next_byte();
        size_t bit = (high << 8 | low) % (8 * count);
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
}

static void replay(int receiver) {
    unsigned back = 1 + next_byte() % HISTORY;
    if (back > run.sent) return;
    unsigned i = (run.sent - back) % HISTORY;
    simulation_deliver(receiver, run.history[i].peer, run.history[i].bytes, run.history[i].count,
                       0);
}

static void noise(int sender, int receiver) {
    uint8_t bytes[256];
    size_t count = next_byte();
    for (size_t i = 0; i < count; i++) bytes[i] = (uint8_t)next_byte();
    simulation_deliver(receiver, sender, bytes, count, 0);
}

static void stop(int rank) {
    double seconds = (run.mad ? 0.012 : 0.004) * next_byte();
    if (run.stopped + seconds > (run.mad ? 10 * PEER_TIMEOUT : MOST_STOP)) return;
    run.stopped += seconds;
    run.harmless = false;
    simulation_stop(rank, seconds);
}

/* What comes beside a datagram, and must do no harm. */
static void come_beside(unsigned fate, int sender, int receiver, const uint8_t *bytes,
                        size_t count) {
    if (fate >= 0xd8 && fate < 0xe0) replay(receiver);
    if (fate >= 0xe0 && fate < 0xe8) { /* by a stranger, or in another's name */
        int as = (int)(fate & 7) - 1;
        if (as != sender) simulation_deliver(receiver, as, bytes, count, 0);
    }
    if (fate >= 0xe8 && fate < 0xec) noise(sender, receiver);
    if (fate >= 0xf8 && fate < 0xfc) { /* a damaged copy before it */
        uint8_t *copy = malloc(count);
        memcpy(copy, bytes, count);
        flip_bits(copy, count);
        simulation_deliver(receiver, sender, copy, count, 0);
        free(copy);
    }
}

static void remember(int sender, const uint8_t *bytes, size_t count) {
    unsigned i = run.sent++ % HISTORY;
    if (count > MOST_BYTES) count = 0;
    memcpy(run.history[i].bytes, bytes, count);
    run.history[i].count = count;
    run.history[i].peer = sender;
}

/* True when the datagram does not arrive as it was. */
static bool come_to_harm(unsigned fate, int sender, int receiver, uint8_t *bytes, size_t count) {
    if (fate < 0x80 || fate >= 0xd8 || (fate >= 0xa0 && fate < 0xc0)) return false;
    run.harmless = false;
    if (fate < 0xa0) return true; /* lost */
    if (fate >= 0xd0)
        count = next_byte() % count;
    else
        flip_bits(bytes, count);
    simulation_deliver(receiver, sender, bytes, count, 0);
    return true;
}

static void carry(int sender, int receiver, uint8_t *bytes, size_t count) {
    unsigned fate = run.untouched ? run.untouched--, 0 : next_byte();
    double *silent = &run.silent_since[sender][receiver], now = simulation_now(), delay = 0;
    if (run.mad && !run.stays && run.ended > 0 && now > run.ended + 0.2) return; /* it is cut */
    come_beside(fate, sender, receiver, bytes, count);
    remember(sender, bytes, count);
    if (fate >= 0xfc) stop(fate & 1 ? sender : receiver);
    bool must = !run.mad && now - *silent > MOST_SILENCE;
    if (!must && come_to_harm(fate, sender, receiver, bytes, count)) return;
    if (run.mad && fate >= 0xec && fate < 0xf8) {
        for (unsigned i = 0; i <= (fate & 1); i++) change_field(bytes, count);
        fix_checksum(bytes, count);
    }
    if (fate < 0x80) delay = (fate & 7) * GRACE_MIN / 8; /* others overtake it, as DONE may */
    if (fate >= 0xb0 && fate < 0xc0) {
        delay = ldexp(1e-5, (int)(fate & 15)); /* at most 0.33 s */
        run.harmless = false;
    }
    simulation_deliver(receiver, sender, bytes, count, delay);
    if (fate >= 0xa0 && fate < 0xb0) /* twice */
        simulation_deliver(receiver, sender, bytes, count, (fate & 15) * 50e-6);
    *silent = now + delay;
}

/* ---- what must be ---- */

struct worker_view {
    struct lossynet_comm *comm;
    int rank;
    float **gradient, **parameter; /* [local][ELEMENTS] */
    float *fresh, *before;
};

/* Worker i's gradient is N 2^i, times 512 in even steps: estimator `zero` makes a number of it
 * whose bits say exactly whose gradients of which step are in. */
static float gradient_of(int worker, uint64_t step) {
    return ldexpf((float)run.workers, worker + (step % 2 ? 0 : 9));
}

/* An owner's parameters say when they were made, and what they are. */
static float parameter_of(uint64_t step, size_t element) {
    return (float)(step * 4096 + element);
}

/* Whose an element is, and the first element of its packet: 16 from the start of a shard on. */
static int owner_of[ELEMENTS];
static size_t packet_start[ELEMENTS];

static void fill_places(const struct lossynet_comm *comm) {
    for (int b = 0; b < BUCKETS; b++)
        for (int w = 0; w < run.workers; w++) {
            size_t offset, count;
            lossynet_shard(comm, w, b, &offset, &count);
            for (size_t e = 0; e < count; e++) {
                owner_of[offset + e] = w;
                packet_start[offset + e] = offset + e / 16 * 16;
            }
        }
}

/* Of local worker v: a vector is as it was outside its shards; inside, all elements of a packet
 * have the same senders, its owner among them, all of this step. */
static void judge_gradients(struct worker_view *view, int v, uint64_t step) {
    int me = view->rank * run.local + v;
    for (size_t e = 0; e < ELEMENTS; e++) {
        float got = view->gradient[v][e];
        if (owner_of[e] != me) {
            REQUIRE(got == gradient_of(me, step));
            continue;
        }
        if (run.mad) continue;
        if (step % 2 == 0) got = ldexpf(got, -9);
        unsigned bits = (unsigned)got;
        REQUIRE((float)bits == got && bits < 1u << run.workers && bits >> me & 1);
        size_t start = packet_start[e];
        run.gradient_bits[e] = (uint8_t)bits;
        REQUIRE(run.gradient_bits[start] == bits);
        if (start == e) run.arrived[step][0] += (uint64_t)__builtin_popcount(bits & ~(1u << me));
    }
}

/* Each sender is told exactly what the owners got. */
static void judge_delivered(struct worker_view *view) {
    for (int v = 0; v < run.local; v++) {
        int me = view->rank * run.local + v;
        for (int owner = 0; owner < run.workers; owner++) {
            size_t n, offset, count;
            const uint8_t *told = view->comm->arrivals.acked[LOSSYNET_GRADIENT] +
                                  ln_tx(view->comm, LOSSYNET_GRADIENT, v, owner, &n);
            const uint8_t *end = told + n;
            for (int b = 0; b < BUCKETS; b++) {
                lossynet_shard(view->comm, owner, b, &offset, &count);
                for (size_t e = offset; e < offset + count; e++)
                    if (packet_start[e] == e) REQUIRE(*told++ == (run.gradient_bits[e] >> me & 1));
            }
            REQUIRE(told == end);
        }
    }
}

/* Of local worker v: its shards are as it left them; elsewhere each packet is what its owner had
 * after one step, whole, and after this one exactly where lossynet_next_fresh says so. */
static void judge_parameters(struct worker_view *view, int v, uint64_t step) {
    int me = view->rank * run.local + v;
    static bool fresh[ELEMENTS];
    size_t cursor = 0, offset, count;
    memset(fresh, 0, sizeof fresh);
    while (lossynet_next_fresh(view->comm, me, &cursor, &offset, &count))
        for (size_t e = offset; e < offset + count; e++) fresh[e] = true;
    for (size_t e = 0; e < ELEMENTS; e++) {
        float got = view->parameter[v][e];
        bool own = owner_of[e] == me;
        if (own) REQUIRE(got == parameter_of(step, e) && fresh[e]);
        if (own || run.mad) continue;
        uint64_t made = (uint64_t)(got / 4096);
        size_t start = packet_start[e];
        REQUIRE(got == parameter_of(made, e) && made <= step);
        REQUIRE((made == step) == fresh[e]);
        REQUIRE(made == (uint64_t)(view->parameter[v][start] / 4096));
        if (start == e) run.arrived[step][1] += fresh[e];
    }
}

/* ---- a rank ---- */

static lossynet_status reduce_begin(struct worker_view *view, uint64_t step) {
    for (int v = 0; v < run.local; v++)
        for (size_t e = 0; e < ELEMENTS; e++)
            view->gradient[v][e] = gradient_of(view->rank * run.local + v, step);
    lossynet_status status = lossynet_step_begin(view->comm, step);
    return status || !run.overlap ? status
                                  : lossynet_reduce_begin(view->comm, view->gradient, false);
}

static lossynet_status reduce(struct worker_view *view, uint64_t step) {
    lossynet_status status = lossynet_reduce(view->comm, view->gradient, false);
    for (int v = 0; v < run.local && !status; v++) judge_gradients(view, v, step);
    return status;
}

static lossynet_status broadcast_begin(struct worker_view *view, uint64_t step) {
    for (int v = 0; v < run.local; v++)
        for (size_t e = 0; e < ELEMENTS; e++)
            if (owner_of[e] == view->rank * run.local + v)
                view->parameter[v][e] = parameter_of(step, e);
    return run.overlap ? lossynet_broadcast_begin(view->comm, view->parameter, false)
                       : lossynet_broadcast(view->comm, view->parameter, false);
}

static lossynet_status forward(struct worker_view *view) {
    lossynet_status status = LOSSYNET_OK;
    for (int b = BUCKETS - 1; b >= 0 && !status; b--) {
        status = lossynet_bucket_wait(view->comm, b, NULL);
        simulation_sleep(1e-4);
    }
    return status;
}

static void backward(struct worker_view *view) {
    for (int b = 0; b < BUCKETS; b++)
        for (int v = 0; v < run.local; v++) {
            simulation_sleep(1e-4 * (view->rank + 1));
            lossynet_bucket_ready(view->comm, view->rank * run.local + v, b);
        }
}

static lossynet_status account(struct worker_view *view, uint64_t step) {
    struct lossynet_counters counters;
    for (int v = 0; v < run.local; v++) judge_parameters(view, v, step);
    lossynet_status status = lossynet_step_counters(view->comm, step, &counters);
    if (!status && !run.mad) judge_delivered(view);
    uint64_t all = lossynet_packets(view->comm) * (uint64_t)(run.workers - 1);
    for (int phase = 0; phase < 2 && !status && !run.mad; phase++) {
        REQUIRE(counters.expected[phase] == all);
        REQUIRE(counters.arrived[phase] == run.arrived[step][phase]);
        REQUIRE(counters.arrived[phase] == all || !run.harmless);
    }
    if (!status && step == 2)
        status = lossynet_gather_fresh(view->comm, view->parameter, view->fresh);
    for (size_t e = 0; e < ELEMENTS && !status && step == 2 && !run.mad; e++)
        REQUIRE(view->fresh[e] == parameter_of(step, e));
    uint64_t mine[2] = {(uint64_t)view->rank, step}, everybody[MOST_WORKERS];
    if (!status) status = lossynet_all_gather(view->comm, mine, everybody, sizeof *mine);
    return status;
}

/* With overlap, gradients leave while they are computed, from parameters that are still coming. */
static lossynet_status train(struct worker_view *view) {
    lossynet_status status = LOSSYNET_OK;
    for (uint64_t step = 1; step <= STEPS + 1 && !status; step++) {
        bool last = step > STEPS, first = step == 1;
        if (!last) status = reduce_begin(view, step);
        if (!status && run.overlap) status = forward(view);
        if (!status && run.overlap && !last) backward(view);
        if (!status && run.overlap && !first) status = lossynet_broadcast_end(view->comm);
        if (last && run.abrupt) break;
        if (!status && run.overlap && !first) status = account(view, step - 1);
        if (!status && !last) status = reduce(view, step);
        if (!status && !last) status = broadcast_begin(view, step);
        if (step == STEPS && run.abrupt && !run.overlap) break; /* without meeting again */
        if (!status && !last && !run.overlap) status = account(view, step);
    }
    return status;
}

/* Without waiting for late ranks, and as far as they are, until all meet. */
static lossynet_status train_skipping(struct worker_view *view) {
    lossynet_status status = LOSSYNET_OK;
    uint64_t at = 1, everybody[MOST_WORKERS];
    while (at <= STEPS && !status) {
        double squares[MOST_WORKERS], each[2] = {1, 1};
        bool idle;
        status = lossynet_step_begin_with_majority(view->comm, &at, &idle);
        for (int v = 0; v < run.local; v++)
            for (size_t e = 0; e < ELEMENTS; e++)
                view->gradient[v][e] = gradient_of(view->rank * run.local + v, at);
        if (!status && run.overlap)
            status = lossynet_reduce_begin(view->comm, view->gradient, false);
        if (!status && run.overlap && !idle) status = forward(view);
        if (!status && run.overlap && !idle) backward(view);
        if (!status) status = lossynet_broadcast_end(view->comm);
        if (!status) status = reduce(view, at);
        if (!status) status = lossynet_pulse(view->comm, each, squares, sizeof *each);
        if (!status) status = broadcast_begin(view, at);
        at++;
        if (status || (at <= STEPS && !lossynet_is_awaited(view->comm))) continue;
        status = lossynet_broadcast_end(view->comm);
        uint64_t own[2] = {at, at};
        if (!status) status = lossynet_all_gather(view->comm, own, everybody, sizeof at);
        for (int w = 0; w < run.workers && !status; w++)
            if (everybody[w] > at) at = everybody[w];
        lossynet_agreed(view->comm);
    }
    return status;
}

static float **take_vectors(void) {
    float **vectors = calloc((size_t)run.local, sizeof *vectors);
    for (int v = 0; v < run.local; v++) {
        vectors[v] = malloc(ELEMENTS * sizeof(float));
        for (size_t e = 0; e < ELEMENTS; e++) vectors[v][e] = parameter_of(0, e);
    }
    return vectors;
}

static void free_vectors(float **vectors) {
    for (int v = 0; v < run.local; v++) free(vectors[v]);
    free(vectors);
}

static double loss_rate;

static void rank_main(int rank) {
    struct lossynet_world world = {.rank = rank,
                                   .ranks = RANKS,
                                   .local_rank = rank,
                                   .local_ranks = RANKS,
                                   .share = simulation_share};
    struct lossynet_settings settings = {
        .workers = run.workers,
        .buckets = BUCKETS,
        .bucket_elements = bucket_elements,
        .packet_bytes = 64,
        .estimator = LOSSYNET_ZERO,
        .loss = {.rate = {loss_rate, loss_rate}, .model = "bernoulli", .seed = 3},
        .link = LOSSYNET_LINK_UDP,
        .network.peer_timeout = PEER_TIMEOUT,
        .error_feedback = !run.skips, /* so that senders are told what arrived */
        .retransmission_rounds = {run.skips, 0},
        .network.skip_late = run.skips,
        .network.deadline = run.skips ? 0.01 : 0,
        .network.encrypt = run.encrypt,
    };
    struct worker_view view = {
        .rank = rank, .gradient = take_vectors(), .parameter = take_vectors()};
    view.fresh = calloc(ELEMENTS, sizeof *view.fresh);
    lossynet_status status = ln_comm_open(&world, &settings, simulation_link_open, &view.comm);
    REQUIRE(status == LOSSYNET_OK);
    lossynet_error_feedback_share(view.comm, 0); /* gradients stay as they are */
    fill_places(view.comm);
    status = run.skips ? train_skipping(&view) : train(&view);
    REQUIRE(run.mad || status == LOSSYNET_OK);
    free(view.fresh); /* before lossynet_close: the comm's thread must not look any more */
    free_vectors(view.gradient);
    free_vectors(view.parameter);
    simulation_sleep(0.01);
    lossynet_close(view.comm);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *input, size_t bytes) {
    if (bytes < SETTINGS) return 0;
    memset(&run, 0, sizeof run);
    run.input = input + SETTINGS;
    run.left = bytes - SETTINGS;
    run.untouched = 4u * input[4];
    loss_rate = input[0] & 8 ? 0.2 : 0;
    run.mad = input[0] & 1;
    run.stays = input[3] & 0x40;
    run.skips = run.mad && input[3] & 0x80;
    run.harmless = loss_rate == 0 && input[2] >= 64; /* room for all windows */
    run.overlap = input[0] & 2;
    run.abrupt = input[0] & 128;
    run.local = input[0] & 4 ? 2 : 1;
    run.workers = RANKS * run.local;
    run.encrypt = (input[0] & 0x30) == 0x30 && ln_secure_available();
    for (int s = 0; s < RANKS; s++)
        for (int r = 0; r < RANKS; r++) run.silent_since[s][r] = 1;
    const struct simulation_settings settings = {
        .ranks = RANKS,
        .seed = input[1],
        .longest_seconds = 60,
        .most_switches = 4000000,
        .payload_most = 64 + (run.encrypt ? LOSSYNET_SECURE_BYTES : 0),
        .receive_queue = 8 + input[2],
        .latency = 1e-5 * (1 + input[3] % 64),
        .carry = carry,
    };
    simulation_run(&settings, rank_main);
    return 0;
}

#ifdef REPLAY
int main(int argc, char **argv) {
    static uint8_t input[1 << 16];
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        if (!file) {
            fprintf(stderr, "%s: cannot be read\n", argv[i]);
            return 1;
        }
        size_t bytes = fread(input, 1, sizeof input, file);
        fclose(file);
        fprintf(stderr, "%s\n", argv[i]);
        LLVMFuzzerTestOneInput(input, bytes);
    }
    return 0;
}
#endif
