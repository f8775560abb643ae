/* round_trips.c — measures what a step costs, in time and in datagrams other than DATA, over a
 * network with a given round trip and loss.
 *
 *     build/round_trips SECONDS SHARE [QUEUE [RANKS [BYTES [rule]]]]
 *
 * SECONDS is the round trip, SHARE the share of datagrams that are lost, and QUEUE the number of
 * datagrams that a rank's receive queue holds. In each step RANKS ranks (default 4) average,
 * broadcast, and exchange a few numbers; they compute nothing. BYTES is the payload of a full packet
 * (default 256). With `rule` lost gradients are sent again as often as the measured loss asks for,
 * and what stays lost comes with the next ones. The result is a function of the arguments:
 * test/lossynet/test_simulation.py compares it with bounds.
 */
#include "dev/simulation/simulation.h"
#include "lossynet/comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS = 64, BUCKETS = 3, ELEMENTS = 4000, WARM = 3, STEPS = 20, ROUNDS = 40, LATE = 3 };
static const size_t bucket_elements[BUCKETS] = {ELEMENTS, ELEMENTS, ELEMENTS};

static struct {
    int ranks;
    size_t packet_bytes;   /* payload of a full packet */
    bool rule;             /* what is lost is made up for */
    double share;          /* share of datagrams that are lost */
    uint64_t control;      /* datagrams sent, without DATA */
    int lose;              /* how many of rank 1's next MESSAGEs to rank 0 are lost */
    double step, round[2]; /* seconds: of a step; of an exchange, without and with that loss */
    double data_left;      /* when the last DATA between the first three ranks left, seconds */
} run;

static void carry(int sender, int receiver, uint8_t *bytes, size_t count) {
    int type = wire_type(bytes);
    run.control += type != WIRE_DATA;
    if (type == WIRE_DATA && sender < LATE && receiver < LATE) run.data_left = simulation_now();
    if (run.lose && type == WIRE_MESSAGE && sender == 1 && receiver == 0) {
        run.lose--;
        return;
    }
    if (simulation_chance(run.share)) return;
    simulation_deliver(receiver, sender, bytes, count, 0);
}

static void step(struct lossynet_comm *comm, float **vector, uint64_t number) {
    struct lossynet_counters counters;
    struct lossynet_drift drift;
    double mine = 1, all[MOST_RANKS];
    simulation_require(!lossynet_step_begin(comm, number), "the begin of a step");
    simulation_require(!lossynet_reduce(comm, vector, false), "averaging");
    simulation_require(!lossynet_all_gather(comm, &mine, all, sizeof mine), "the norm");
    simulation_require(!lossynet_broadcast(comm, vector, false), "the broadcast");
    simulation_require(!lossynet_report_begin(comm, number, vector), "what to report");
    simulation_require(!lossynet_report_end(comm, &counters, &drift), "counting");
}

/* Makes an exchange that all ranks begin at the same time, when nothing else is on its way. Returns
 * its seconds. */
static double exchange(struct lossynet_comm *comm, int rank, int round, bool lose) {
    double mine = 1, all[MOST_RANKS], start = 1000.0 * (1 + round);
    simulation_sleep(start - simulation_now());
    if (rank == 0)
        run.lose = lose ? 2 : 0; /* 2: the first is repeated at once, as it may be early */
    simulation_require(!lossynet_all_gather(comm, &mine, all, sizeof mine), "an exchange");
    return simulation_now() - start;
}

/* Makes a broadcast that rank LATE begins late, or in which it stops in the middle. Returns how
 * long the first three ranks take to send their DATA to one another. */
static double broadcast(struct lossynet_comm *comm, int rank, float **vector, bool stops,
                        uint64_t number) {
    struct lossynet_counters counters;
    const double late = 0.25;
    simulation_require(!lossynet_step_begin(comm, number), "the begin of a step");
    simulation_require(!lossynet_reduce(comm, vector, false), "averaging");
    double start = simulation_now();
    if (rank == LATE && !stops) simulation_sleep(late);
    simulation_require(!lossynet_broadcast_begin(comm, vector, false), "the begin of a broadcast");
    if (rank == LATE && stops) simulation_stop(rank, late);
    simulation_require(!lossynet_broadcast_end(comm), "a broadcast");
    double left = run.data_left - start;
    simulation_require(!lossynet_step_counters(comm, number, &counters), "counting");
    return left;
}

static void rank_main(int rank) {
    const struct lossynet_world world = {.rank = rank,
                                         .ranks = run.ranks,
                                         .local_rank = rank,
                                         .local_ranks = run.ranks,
                                         .share = simulation_share};
    const struct lossynet_settings settings = {
        .workers = run.ranks,
        .buckets = BUCKETS,
        .bucket_elements = bucket_elements,
        .packet_bytes = run.packet_bytes,
        .loss = {.model = "bernoulli", .seed = 3},
        .error_feedback = run.rule,
        .acknowledge_later = true,
        .retransmission_rounds = {run.rule ? LOSSYNET_ROUNDS_MEASURED : 0},
        .retransmission_budget = run.rule ? 0.2 : 0,
        .link = LOSSYNET_LINK_UDP};
    struct lossynet_comm *comm;
    float *vector = calloc(BUCKETS * ELEMENTS, sizeof *vector);
    simulation_require(!ln_comm_open(&world, &settings, simulation_link_open, &comm), "opening");
    for (uint64_t s = 0; s < WARM; s++) step(comm, &vector, s);
    uint64_t before = run.control;
    double start = simulation_now();
    for (uint64_t s = WARM; s < WARM + STEPS; s++) step(comm, &vector, s);
    if (rank == 0) {
        run.step = (simulation_now() - start) / STEPS;
        run.control -= before;
        printf("step_ms %.3f control %.1f", 1e3 * run.step,
               (double)run.control / (STEPS * run.ranks * (run.ranks - 1)));
    }
    for (int round = 0; round < ROUNDS; round++) {
        double seconds = exchange(comm, rank, round, round % 2);
        if (rank == 0) run.round[round % 2] += seconds / (ROUNDS / 2);
    }
    if (rank == 0)
        printf(" exchange_ms %.3f lost_message_ms %.3f", 1e3 * run.round[0],
               1e3 * (run.round[1] - run.round[0]));
    for (int stops = 0; stops < 2; stops++) {
        double seconds = broadcast(comm, rank, &vector, stops, (uint64_t)(WARM + STEPS + stops));
        if (rank == 0)
            printf(" %s %.3f", stops ? "beside_stopped_ms" : "beside_late_ms", 1e3 * seconds);
    }
    if (rank == 0) puts("");
    lossynet_close(comm);
    free(vector);
}

int main(int argc, char **argv) {
    double round_trip = argc > 1 ? atof(argv[1]) : 2e-4;
    run.share = argc > 2 ? atof(argv[2]) : 0;
    run.ranks = argc > 4 ? atoi(argv[4]) : 4;
    run.packet_bytes = argc > 5 ? (size_t)atoi(argv[5]) : 256;
    run.rule = argc > 6 && !strcmp(argv[6], "rule");
    if (run.ranks <= LATE || run.ranks > MOST_RANKS) return 2;
    const struct simulation_settings settings = {.ranks = run.ranks,
                                                 .seed = 1,
                                                 .longest_seconds = 1e6,
                                                 .most_switches = UINT64_MAX,
                                                 .payload_most = run.packet_bytes,
                                                 .receive_queue = argc > 3 ? atoi(argv[3]) : 1024,
                                                 .latency = round_trip / 2,
                                                 .carry = carry};
    simulation_run(&settings, rank_main);
    return 0;
}
