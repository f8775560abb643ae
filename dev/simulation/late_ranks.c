/* late_ranks.c — measures what late ranks cost the others, with and without a deadline, in
 * simulated time.
 *
 *     build/late_ranks RANKS WHAT DEADLINE [SEED [carry] [repair] [compute=SECONDS] [lost=SHARE]
 *                                           [steps=STEPS]]
 *                                                       DEADLINE: auto, off, or seconds
 *
 * With `carry` late and lost packets of a gradient are added to the next gradient (error feedback).
 * With `repair` lost packets are sent again in two rounds for gradients and one for parameters.
 *
 * In each step ranks compute for 0.1 s (or `compute`) and make the same exchanges as a trainer. The
 * network has a round trip of 0.2 ms and loses a share `lost` of the datagrams (default 0). WHAT
 * says how ranks are disturbed:
 *
 *     even      nothing
 *     spread    compute times are uniform within 20% of this time, drawn for each rank and step
 *     tail      compute times are lognormal with this median and P99/P50 = 3
 *     stop      one rank stops for 0.5 s every 5 s
 *     slow      one rank computes three times as long
 *     random    lognormal compute times with P99/P50 = 10, stops of all lengths at any moment, 10%
 *               of the datagrams lost, and a meeting every 20 steps
 *
 * The program prints one line about the steps after the first 32, in which a deadline is learnt:
 *
 *     mean        mean time of a step, divided by the median compute time
 *     p50 p99     quantiles of step times of ranks that are not stopped, divided in the same way
 *     longest     the longest of these step times, divided in the same way
 *     lost        share of packets of computed gradients that owners did not get; with `carry` it
 *                 is below 0 if more came from earlier steps than were left for later steps
 *     delay       mean age of the gradients in averages, steps
 *     idle        share of steps in which a rank took part without a gradient
 *     left_out    share of steps in which a rank took no part
 *     pace        steps per second, divided by that of undisturbed ranks
 *     throughput  averaged gradients per second, divided by that of undisturbed ranks
 *     steps       the step at which all ranks have ended
 *     uncounted   with `carry`, after some more steps in which nothing is disturbed or lost:
 *                 elements of gradients that were computed, minus those that were averaged
 *
 * The result is a function of the arguments: test/lossynet/test_simulation.py compares it with
 * bounds.
 */
#include "dev/simulation/simulation.h"
#include "lossynet/comm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    PACKET = 16,        /* elements */
    SHARD_REPAIRED = 4, /* packets of a shard with `repair`; without it, one */
    MOST_STEPS = 400,
    WARM_STEPS = 32, /* steps in which a deadline is learnt */
    MEETING = 20,
    UNDISTURBED_STEPS = 6,
    CALM_STEPS = 8
};
enum what { EVEN, SPREAD, TAIL, STOP, SLOW, RANDOM, WHATS };
static const char *const name[WHATS] = {"even", "spread", "tail", "stop", "slow", "random"};
static const double STOPPED = 0.5, STOPS_EVERY = 5, SLOWNESS = 3, SPREAD_BY = 0.2;

static struct {
    int ranks, warm, steps;
    enum what what;
    bool skips, carries, repairs;
    double compute, deadline, lost;
    uint64_t random;
    size_t elements;

    /* About steps from `warm` on: */
    double seconds;      /* sum over ranks of the time that these steps took */
    float *step_seconds; /* [counted]: times of steps of ranks that are not stopped */
    size_t counted;
    uint64_t made, idle; /* steps that ranks made, and made without a gradient; sums over ranks */
    uint64_t *computed;  /* [steps]: ranks that had a gradient */
    uint64_t *averaged;  /* [steps]: gradients of other ranks that owners got, summed over owners */
    uint64_t averaged_all; /* gradients that owners averaged, their own included, in all steps */
    uint64_t ages;         /* sum of the ages of these gradients, in steps */

    uint64_t last;     /* the step at which all ranks have ended; 0: not yet */
    int64_t uncounted; /* in all steps: elements computed, minus elements averaged by the owners */
} run;

static void *take(size_t count, size_t bytes) {
    void *memory = calloc(count, bytes);
    simulation_require(memory != NULL, "taking memory");
    return memory;
}

/* ---- random numbers of our own: compute times are the same with and without a deadline ---- */

static double uniform(uint64_t a, uint64_t b) {
    uint64_t x = run.random + a * 0x9e3779b97f4a7c15u + b * 0xc2b2ae3d27d4eb4fu;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return ((double)((x ^ (x >> 31)) >> 11) + 0.5) * 0x1p-53;
}

static double lognormal(double p99, uint64_t rank, uint64_t step) {
    const double normal = sqrt(-2 * log(uniform(2 * rank, step))) *
                          cos(2 * 3.14159265358979 * uniform(2 * rank + 1, step));
    return exp(log(p99) / 2.3263 * normal);
}

/* Whether a step is one of those at the end in which nothing is disturbed. */
static bool is_calm(uint64_t step) {
    return step >= (uint64_t)run.steps;
}

static double compute_seconds(int rank, uint64_t step) {
    const bool last = rank == run.ranks - 1;
    if (is_calm(step)) return run.compute;
    switch (run.what) {
    case SPREAD:
        return run.compute * (1 + SPREAD_BY * (2 * uniform((uint64_t)rank, step) - 1));
    case TAIL:
        return run.compute * lognormal(3, (uint64_t)rank, step);
    case RANDOM:
        return run.compute * lognormal(10, (uint64_t)rank, step);
    case SLOW:
        return last ? SLOWNESS * run.compute : run.compute;
    default:
        return run.compute;
    }
}

static bool is_stopped(int rank) {
    return run.what == RANDOM || (run.what == STOP && rank == run.ranks - 1);
}

/* ---- the network ---- */

static void carry(int sender, int receiver, uint8_t *bytes, size_t count) {
    if (run.last > 0) {
        simulation_deliver(receiver, sender, bytes, count, 0);
        return;
    }
    if (run.lost > 0 && simulation_random() % 1000 < (uint64_t)(1000 * run.lost)) return;
    if (run.what == RANDOM && simulation_random() % 4000 == 0)
        simulation_stop((int)(simulation_random() % (uint64_t)run.ranks),
                        exp(-7 + 7e-3 * (double)(simulation_random() % 1000)));
    simulation_deliver(receiver, sender, bytes, count, 0);
}

/* ---- a rank ---- */

struct rank {
    int rank;
    struct lossynet_comm *comm;
    float *gradient, *parameter;
    double *squares; /* [ranks] */
    double *meeting; /* [ranks] */
    uint64_t at;     /* the next step */
    double ended;    /* when the last step ended */
    double stops;    /* when the rank stops next */
    bool unfinished; /* the broadcast and report of the last step have not ended */
};

/* Elements of each shard say in which step a gradient was computed: from this one on, the step's
 * digits, the lowest first. They are so small that residuals, which are bfloat16, hold sums of them
 * exactly. */
enum { DIGITS = 4, BASE = 16 };

static size_t step_at(const struct rank *r, int owner) {
    size_t offset, count;
    lossynet_shard(r->comm, owner, 0, &offset, &count);
    return offset + 1;
}

static void write_step(float *digits, uint64_t step) {
    for (int d = 0; d < DIGITS; d++, step /= BASE)
        digits[d] = (float)(d < DIGITS - 1 ? step % BASE : step);
}

/* The sum of the steps of the gradients in an average. */
static uint64_t read_steps(const float *digits) {
    uint64_t sum = 0;
    for (int d = DIGITS - 1; d >= 0; d--)
        sum = sum * BASE + (uint64_t)lrintf(digits[d] * (float)run.ranks);
    return sum;
}

static void compute(struct rank *r, uint64_t step) {
    double seconds = compute_seconds(r->rank, step);
    simulation_require(!lossynet_bucket_wait(r->comm, 0, NULL), "waiting for parameters");
    if (run.what == STOP && !is_calm(step) && is_stopped(r->rank) &&
        simulation_now() + seconds > r->stops) {
        const double before = fmax(0, r->stops - simulation_now());
        simulation_sleep(before);
        simulation_stop(r->rank, STOPPED);
        simulation_sleep(0);
        r->stops += STOPS_EVERY;
        seconds -= before;
    }
    simulation_sleep(seconds);
    for (size_t e = 0; e < run.elements; e++) r->gradient[e] = 1;
    for (int owner = 0; owner < run.ranks; owner++)
        write_step(r->gradient + step_at(r, owner), step);
    lossynet_bucket_ready(r->comm, r->rank, 0);
}

static void end_broadcast(struct rank *r) {
    if (!r->unfinished) return;
    simulation_require(!lossynet_broadcast_end(r->comm), "a broadcast");
    simulation_require(!lossynet_report_begin(r->comm, r->at - 1, &r->parameter),
                       "the report's begin");
}

static void end_report(struct rank *r) {
    struct lossynet_counters counters;
    struct lossynet_drift drift;
    if (!r->unfinished) return;
    simulation_require(!lossynet_report_end(r->comm, &counters, &drift), "the report");
    r->unfinished = false;
}

/* Notes what a step did. Gradients are 1, so the owner's average says how many gradients it got.
 * A few elements of each shard are the number of the step, so averages also give the ages. */
static void note(struct rank *r, uint64_t step, bool idle) {
    size_t offset, count;
    const double now = simulation_now();
    lossynet_shard(r->comm, r->rank, 0, &offset, &count);
    const uint64_t got = (uint64_t)lrintf(r->gradient[offset] * (float)run.ranks);
    const size_t stamp = step_at(r, r->rank);
    run.uncounted += ((int64_t)run.elements - DIGITS * run.ranks) * !idle;
    for (size_t e = offset; e < offset + count; e++)
        if (e < stamp || e >= stamp + DIGITS)
            run.uncounted -= lrintf(r->gradient[e] * (float)run.ranks);
    if (step >= (uint64_t)run.warm && step < (uint64_t)run.steps) {
        run.made++;
        run.idle += idle;
        run.computed[step] += !idle;
        run.averaged[step] += got - !idle;
        run.averaged_all += got;
        run.ages += got * step - read_steps(r->gradient + stamp);
        run.seconds += r->at > 0 ? (now - r->ended) : 0;
        if (!is_stopped(r->rank)) run.step_seconds[run.counted++] = (float)(now - r->ended);
    }
    r->ended = now;
}

static void make_step(struct rank *r) {
    uint64_t step = r->at;
    bool idle;
    double mine = 1;
    simulation_require(!lossynet_step_begin_with_majority(r->comm, &step, &idle),
                       "the begin of a step");
    simulation_require(!lossynet_reduce_begin(r->comm, &r->gradient, false),
                       "the begin of averaging");
    if (!idle) compute(r, step);
    end_broadcast(r);
    simulation_require(!lossynet_reduce(r->comm, &r->gradient, false), "averaging");
    simulation_require(!lossynet_pulse(r->comm, &mine, r->squares, sizeof mine), "the pulse");
    end_report(r);
    for (size_t e = 0; e < run.elements; e++) r->parameter[e] = (float)step;
    simulation_require(!lossynet_broadcast_begin(r->comm, &r->parameter, false), "the broadcast");
    note(r, step, idle);
    r->unfinished = true;
    r->at = step + 1;
}

static void meet(struct rank *r) {
    double at = (double)r->at;
    end_broadcast(r);
    end_report(r);
    simulation_require(!lossynet_all_gather(r->comm, &at, r->meeting, sizeof at), "a meeting");
    for (int i = 0; i < run.ranks; i++) at = fmax(at, r->meeting[i]);
    lossynet_agreed(r->comm);
    r->at = (uint64_t)at;
}

static void rank_main(int rank) {
    const struct lossynet_world world = {.rank = rank,
                                         .ranks = run.ranks,
                                         .local_rank = rank,
                                         .local_ranks = run.ranks,
                                         .share = simulation_share};
    const struct lossynet_settings settings = {
        .workers = run.ranks,
        .buckets = 1,
        .bucket_elements = &run.elements,
        .packet_bytes = PACKET * sizeof(float),
        .estimator = LOSSYNET_ZERO,
        .loss = {.model = "bernoulli"},
        .link = LOSSYNET_LINK_UDP,
        .error_feedback = run.carries,
        .retransmission_rounds = {2 * run.repairs, run.repairs},
        .retransmission_budget = 0.3,
        .network.skip_late = run.skips,
        .network.deadline = run.deadline};
    struct rank r = {.rank = rank,
                     .gradient = take(run.elements, sizeof(float)),
                     .parameter = take(run.elements, sizeof(float)),
                     .squares = take((size_t)run.ranks, sizeof(double)),
                     .meeting = take((size_t)run.ranks, sizeof(double)),
                     .stops = simulation_now() + STOPS_EVERY * uniform(0, 0)};
    simulation_require(!ln_comm_open(&world, &settings, simulation_link_open, &r.comm), "opening");
    r.ended = simulation_now();
    while (r.at < (uint64_t)run.steps) {
        make_step(&r);
        const bool pauses =
            r.at >= (uint64_t)run.steps || (run.what == RANDOM && r.at % MEETING == 0);
        if (pauses || lossynet_is_awaited(r.comm)) meet(&r);
    }
    simulation_require(run.last == 0 || run.last == r.at, "ending at the same step");
    run.last = r.at;
    const uint64_t end = r.at + (run.carries ? CALM_STEPS : 0);
    while (r.at < end) make_step(&r);
    meet(&r);
    simulation_require(r.at == end, "ending at the same step");
    lossynet_close(r.comm);
    free(r.gradient);
    free(r.parameter);
    free(r.squares);
    free(r.meeting);
}

/* ---- runs ---- */

static void simulate(uint64_t seed) {
    const size_t steps = (size_t)run.steps, ranks = (size_t)run.ranks;
    run.elements = (run.repairs ? SHARD_REPAIRED : 1) * PACKET * ranks;
    run.seconds = 0;
    run.counted = 0;
    run.made = run.idle = run.averaged_all = run.ages = run.last = 0;
    run.uncounted = 0;
    run.step_seconds = take(steps * ranks, sizeof *run.step_seconds);
    run.computed = take(steps, sizeof *run.computed);
    run.averaged = take(steps, sizeof *run.averaged);
    run.random = seed * 0x2545f4914f6cdd1du;
    const struct simulation_settings settings = {.ranks = run.ranks,
                                                 .seed = seed,
                                                 .longest_seconds = 1e5,
                                                 .most_switches = UINT64_MAX,
                                                 .payload_most = 1400,
                                                 .receive_queue = 64 * run.ranks,
                                                 .latency = 1e-4,
                                                 .carry = carry};
    simulation_run(&settings, rank_main);
}

static void forget(void) {
    free(run.step_seconds);
    free(run.computed);
    free(run.averaged);
}

static int by_size(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double quantile(double q) {
    if (run.counted == 0) return NAN;
    return (double)run.step_seconds[(size_t)(q * (double)(run.counted - 1))];
}

static void print(double undisturbed) {
    const double steps = run.steps - run.warm, ranks = run.ranks;
    double expected = 0, averaged = 0;
    for (int s = run.warm; s < run.steps; s++) {
        expected += (double)run.computed[s] * (ranks - 1);
        averaged += (double)run.averaged[s];
    }
    const double mean = run.seconds / (steps * ranks);
    qsort(run.step_seconds, run.counted, sizeof *run.step_seconds, by_size);
    printf("mean %.3f p50 %.3f p99 %.3f longest %.3f lost %.5f delay %.3f idle %.4f left_out %.4f "
           "pace %.3f "
           "throughput %.3f steps %llu uncounted %lld\n",
           mean / run.compute, quantile(0.5) / run.compute, quantile(0.99) / run.compute,
           quantile(1) / run.compute, 1 - averaged / expected,
           (double)run.ages / (double)run.averaged_all, (double)run.idle / (steps * ranks),
           1 - (double)run.made / (steps * ranks), undisturbed / mean,
           undisturbed / mean * (double)run.averaged_all / (steps * ranks * ranks),
           (unsigned long long)run.last, (long long)run.uncounted);
}

/* Seconds of a step if nothing disturbs the ranks. */
static double undisturbed_step(void) {
    run.what = EVEN;
    run.skips = false;
    run.warm = 1;
    run.steps = UNDISTURBED_STEPS;
    simulate(1);
    const double seconds = run.seconds / ((run.steps - run.warm) * run.ranks);
    forget();
    return seconds;
}

int main(int argc, char **argv) {
    run.ranks = argc > 1 ? atoi(argv[1]) : 0;
    run.compute = 0.1;
    double lost = 0;
    int steps = run.ranks > 4 ? MOST_STEPS / 4 : MOST_STEPS;
    for (int i = 5; i < argc; i++) {
        if (strncmp(argv[i], "compute=", 8) == 0) run.compute = atof(argv[i] + 8);
        if (strncmp(argv[i], "lost=", 5) == 0) lost = atof(argv[i] + 5);
        if (strncmp(argv[i], "steps=", 6) == 0) steps = atoi(argv[i] + 6);
    }
    int what = 0;
    while (argc > 2 && what < WHATS && strcmp(argv[2], name[what]) != 0) what++;
    if (argc < 4 || run.ranks < 2 || what == WHATS || !(run.compute > 0) || steps <= WARM_STEPS) {
        fprintf(stderr,
                "usage: %s RANKS even|spread|tail|stop|slow|random DEADLINE [SEED [carry] "
                "[repair] [compute=SECONDS] [lost=SHARE] [steps=STEPS, more than %d]]\n",
                argv[0], WARM_STEPS);
        return 2;
    }
    const double undisturbed = undisturbed_step();
    run.what = (enum what)what;
    run.skips = strcmp(argv[3], "off") != 0;
    run.deadline = strcmp(argv[3], "auto") == 0 ? 0 : atof(argv[3]);
    for (int i = 5; i < argc; i++) {
        run.carries |= strcmp(argv[i], "carry") == 0;
        run.repairs |= strcmp(argv[i], "repair") == 0;
    }
    run.lost = run.what == RANDOM ? 0.1 : lost;
    run.warm = WARM_STEPS;
    run.steps = steps;
    simulate(argc > 4 ? (uint64_t)atoll(argv[4]) : 1);
    print(undisturbed);
    forget();
    return 0;
}
