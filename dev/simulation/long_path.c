/* long_path.c — measures how busy ranks keep their links over a long round trip, in simulated time.
 *
 *     build/long_path SECONDS [GBPS [QUEUE [MIB [RANKS [LOST]]]]]
 *
 * SECONDS is the round trip, GBPS the rate of each rank's link in each direction, QUEUE the number
 * of datagrams that a rank's receive queue holds, MIB the size of the vector that a step averages
 * and broadcasts, and LOST the share of DATA that is lost. A host's send queue holds 512 KiB, like
 * a socket's; a rank that sends more waits. The switch has no limit. The program prints one line
 * about the last of six steps:
 *
 *     step_ms     its time
 *     least_ms    the least possible time: links are busy from the first packet to the last in both
 *                 phases, one phase follows the other, and the last packet of each phase is on its
 *                 way for half a round trip
 *     busy        least_ms / step_ms
 *     queue_ms    the longest wait of a datagram for a receiver's link
 *
 * The result is a function of the arguments: test/lossynet/test_simulation.py compares it with
 * bounds.
 */
#include "dev/simulation/simulation.h"
#include "lossynet/comm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST_RANKS = 64, STEPS = 6, PAYLOAD = 1444, HEADERS = 42, ETHERNET = 24 };
static const double HOST_QUEUE = 512 << 10; /* bytes */

static struct {
    int ranks;
    size_t elements;
    double lost, rate;                              /* rate: bytes per second */
    double sends[MOST_RANKS], receives[MOST_RANKS]; /* until when a rank's link is busy */
    double step, queue;                             /* seconds, see above */
} run;

static void carry(int sender, int receiver, uint8_t *bytes, size_t count) {
    const double seconds = (double)(count + HEADERS + ETHERNET) / run.rate;
    if (run.sends[sender] > simulation_now() + HOST_QUEUE / run.rate)
        simulation_sleep(run.sends[sender] - simulation_now() - HOST_QUEUE / run.rate);
    const double now = simulation_now();
    run.sends[sender] = fmax(run.sends[sender], now) + seconds;
    if (wire_type(bytes) == WIRE_DATA && simulation_chance(run.lost)) return;
    /* The switch begins to forward a datagram before all of it has come. */
    const double leaves = fmax(run.receives[receiver], run.sends[sender] - seconds);
    run.queue = fmax(run.queue, leaves - (run.sends[sender] - seconds));
    run.receives[receiver] = leaves + seconds;
    simulation_deliver(receiver, sender, bytes, count, run.receives[receiver] - now);
}

static void rank_main(int rank) {
    const struct lossynet_world world = {.rank = rank,
                                         .ranks = run.ranks,
                                         .local_rank = rank,
                                         .local_ranks = run.ranks,
                                         .share = simulation_share};
    const struct lossynet_settings settings = {.workers = run.ranks,
                                               .buckets = 1,
                                               .bucket_elements = &run.elements,
                                               .packet_bytes = PAYLOAD,
                                               .loss = {.model = "bernoulli"},
                                               .link = LOSSYNET_LINK_UDP};
    struct lossynet_comm *comm;
    float *vector = calloc(run.elements, sizeof *vector);
    double mine = 1, all[MOST_RANKS];
    simulation_require(!ln_comm_open(&world, &settings, simulation_link_open, &comm), "opening");
    for (uint64_t step = 0; step < STEPS; step++) {
        const double start = simulation_now();
        run.queue = 0;
        simulation_require(!lossynet_step_begin(comm, step), "the begin of a step");
        simulation_require(!lossynet_reduce(comm, &vector, false), "averaging");
        simulation_require(!lossynet_broadcast(comm, &vector, false), "the broadcast");
        if (rank == 0) run.step = simulation_now() - start;
        simulation_require(!lossynet_all_gather(comm, &mine, all, sizeof mine), "an exchange");
    }
    lossynet_close(comm);
    free(vector);
}

int main(int argc, char **argv) {
    const double round_trip = argc > 1 ? atof(argv[1]) : 0.1;
    const double gbps = argc > 2 ? atof(argv[2]) : 1;
    run.rate = gbps * 1e9 / 8;
    run.elements = (size_t)(argc > 4 ? atoi(argv[4]) : 64) << 18;
    run.ranks = argc > 5 ? atoi(argv[5]) : 4;
    run.lost = argc > 6 ? atof(argv[6]) : 0;
    if (run.ranks < 2 || run.ranks > MOST_RANKS || run.rate <= 0) return 2;
    const struct simulation_settings settings = {.ranks = run.ranks,
                                                 .seed = 1,
                                                 .longest_seconds = 1e4,
                                                 .most_switches = UINT64_MAX,
                                                 .payload_most = PAYLOAD,
                                                 .receive_queue = argc > 3 ? atoi(argv[3]) : 33825,
                                                 .latency = round_trip / 2,
                                                 .carry = carry};
    simulation_run(&settings, rank_main);
    const double share = (double)(run.ranks - 1) / run.ranks;
    const double wire = (double)(PAYLOAD + WIRE_HEADER_BYTES + HEADERS + ETHERNET) / PAYLOAD;
    const double bytes = 4.0 * (double)run.elements * share * wire;
    const double least = 2 * bytes / run.rate + round_trip;
    printf("step_ms %.1f least_ms %.1f busy %.3f queue_ms %.1f\n", 1e3 * run.step, 1e3 * least,
           least / run.step, 1e3 * run.queue);
    return 0;
}
