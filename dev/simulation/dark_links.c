/* dark_links.c — measures what steps of many ranks cost while some links are down, in simulated time.
 *
 *     build/dark_links RANKS SHARE [COMPUTE [SEED [DARK]]]
 *
 * RANKS ranks make steps for 20 simulated seconds. They compute for COMPUTE seconds (default 0.5), and
 * average and broadcast by the default rule: rounds by the measured loss, error feedback, ages gathered.
 * Each shard is one packet of 1,024 bytes. A directed link drops everything for DARK seconds (default 10)
 * at a time, and is down for a share SHARE of the time; in the last step all are up. The round trip
 * takes 0.2 ms.
 *
 * The program prints one line about the steps after the first 5 s, in which no link is down:
 *
 *     steps      their number
 *     mean_ms p50_ms p99_ms longest_ms    time of rank 0's steps, without computing
 *     lost       shares of packets that stayed lost: gradients, then parameters
 *     relayed    share of packets that took a second hop
 *     mbytes     of all datagrams on all hops, in a step
 *     stale      share of parameters that a worker has, other than its own, with an age above 0
 *     age999     age in steps that 99.9% of them do not exceed; 7: or more
 *     oldest     the greatest age
 *
 * The result is a function of the arguments: test/lossynet/test_simulation.py compares it with bounds.
 */
#include "dev/simulation/simulation.h"
#include "lossynet/comm.h"

#include <stdio.h>
#include <stdlib.h>

enum { PACKET = 1024, MOST_STEPS = 4096 };
static const double EVENT = 5, LENGTH = 20;

static struct {
    int ranks;
    double share, compute, dark, begun;
    uint64_t seed, bytes, expected[2], arrived[2], relayed, packets;
    double seconds[MOST_STEPS], ages[LOSSYNET_AGES];
    int steps;
    uint32_t oldest;
} run;

static double since_event(void) {
    return simulation_now() - run.begun - EVENT;
}

/* Each link has its own beginning of a period of DARK seconds, and is down in a share of these. */
static bool is_dark(int sender, int receiver) {
    const uint64_t link = ln_mix(run.seed ^ ln_mix((uint64_t)sender << 32 | (uint64_t)receiver));
    if (run.begun == 0 || since_event() < 0 || since_event() > LENGTH - EVENT) return false;
    const double period = since_event() / run.dark + (double)(link >> 11) * 0x1p-53;
    return (double)(ln_mix(link + (uint64_t)period) >> 11) * 0x1p-53 < run.share;
}

static void carry(int sender, int receiver, uint8_t *bytes, size_t count) {
    if (run.begun > 0 && since_event() >= 0) run.bytes += count;
    if (!is_dark(sender, receiver)) simulation_deliver(receiver, sender, bytes, count, 0);
}

static void count(const struct lossynet_counters *counters, const struct lossynet_drift *drift,
                  double seconds) {
    simulation_require(run.steps < MOST_STEPS, "counting so many steps");
    run.seconds[run.steps++] = seconds;
    for (int phase = 0; phase < 2; phase++) {
        run.expected[phase] += counters->expected[phase];
        run.arrived[phase] += counters->arrived[phase];
    }
    run.relayed += counters->network[LOSSYNET_RELAYED];
    for (int age = 0; age < LOSSYNET_AGES; age++) run.ages[age] += drift->age_share[age];
    if (drift->max_age > run.oldest) run.oldest = drift->max_age;
}

/* Makes a step; returns whether it was the last one. */
static bool step(struct lossynet_comm *comm, int rank, uint64_t number, float **vector,
                 uint8_t *stops) {
    struct lossynet_counters counters;
    struct lossynet_drift drift;
    const double start = simulation_now();
    const uint8_t mine = since_event() > LENGTH - EVENT;
    simulation_sleep(run.compute);
    simulation_require(!lossynet_step_begin(comm, number), "the begin of a step");
    simulation_require(!lossynet_reduce(comm, vector, false), "averaging");
    simulation_require(!lossynet_broadcast(comm, vector, false), "the broadcast");
    simulation_require(!lossynet_report_begin(comm, number, vector), "what to report");
    simulation_require(!lossynet_all_gather(comm, &mine, stops, 1), "the norm");
    simulation_require(!lossynet_report_end(comm, &counters, &drift), "counting");
    if (rank == 0 && start - run.begun >= EVENT)
        count(&counters, &drift, simulation_now() - start - run.compute);
    bool ends = false;
    for (int r = 0; r < run.ranks; r++) ends |= stops[r];
    return ends;
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print(void) {
    double mean = 0, lost[2], below = 0;
    int age = 0;
    for (int i = 0; i < run.steps; i++) mean += run.seconds[i] / run.steps;
    qsort(run.seconds, (size_t)run.steps, sizeof *run.seconds, compare);
    for (int phase = 0; phase < 2; phase++)
        lost[phase] = 1 - (double)run.arrived[phase] / (double)run.expected[phase];
    while (age < LOSSYNET_AGES - 1 && (below += run.ages[age] / run.steps) < 0.999) age++;
    printf(
        "steps %d mean_ms %.1f p50_ms %.1f p99_ms %.1f longest_ms %.1f lost %.5f %.5f relayed %.5f "
        "mbytes %.2f stale %.5f age999 %d oldest %u\n",
        run.steps, 1e3 * mean, 1e3 * run.seconds[run.steps / 2],
        1e3 * run.seconds[(int)(0.99 * run.steps)], 1e3 * run.seconds[run.steps - 1], lost[0],
        lost[1], (double)run.relayed / (double)(run.expected[0] + run.expected[1]),
        1e-6 * (double)run.bytes / run.steps, 1 - run.ages[0] / run.steps, age, run.oldest);
}

static void rank_main(int rank) {
    const struct lossynet_world world = {.rank = rank,
                                         .ranks = run.ranks,
                                         .local_rank = rank,
                                         .local_ranks = run.ranks,
                                         .share = simulation_share};
    const size_t elements = (size_t)run.ranks * PACKET / sizeof(float);
    const struct lossynet_settings settings = {
        .workers = run.ranks,
        .buckets = 1,
        .bucket_elements = &elements,
        .packet_bytes = PACKET,
        .loss = {.model = "bernoulli"},
        .error_feedback = true,
        .acknowledge_later = true,
        .lead = true,
        .retransmission_rounds = {LOSSYNET_ROUNDS_MEASURED, LOSSYNET_ROUNDS_MEASURED},
        .retransmission_budget = 0.2,
        .link = LOSSYNET_LINK_UDP};
    struct lossynet_comm *comm;
    float *vector = calloc(elements, sizeof *vector);
    uint8_t *stops = calloc((size_t)run.ranks, 1);
    simulation_require(vector && stops, "taking memory");
    simulation_require(!ln_comm_open(&world, &settings, simulation_link_open, &comm), "opening");
    if (run.begun == 0) run.begun = simulation_now();
    for (uint64_t number = 0; !step(comm, rank, number, &vector, stops); number++) {
    }
    if (rank == 0) print();
    lossynet_close(comm);
    free(vector);
    free(stops);
}

int main(int argc, char **argv) {
    run.ranks = argc > 1 ? atoi(argv[1]) : 0;
    run.share = argc > 2 ? atof(argv[2]) : -1;
    run.compute = argc > 3 ? atof(argv[3]) : 0.5;
    run.seed = argc > 4 ? (uint64_t)atoll(argv[4]) : 1;
    run.dark = argc > 5 ? atof(argv[5]) : 10;
    if (run.ranks < 3 || !(run.share >= 0 && run.share < 1) || !(run.compute > 0) ||
        !(run.dark > 0)) {
        fprintf(stderr,
                "usage: %s RANKS SHARE [COMPUTE [SEED [DARK]]], see dev/simulation/dark_links.c\n",
                argv[0]);
        return 2;
    }
    const struct simulation_settings settings = {.ranks = run.ranks,
                                                 .seed = run.seed,
                                                 .longest_seconds = 2000,
                                                 .most_switches = UINT64_MAX,
                                                 .payload_most = PACKET,
                                                 .receive_queue = 1024 + 8 * run.ranks,
                                                 .latency = 1e-4,
                                                 .carry = carry};
    simulation_run(&settings, rank_main);
    return 0;
}
