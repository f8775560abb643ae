/* bad_paths.c — shows what ranks do when paths, peers or strangers misbehave, in simulated time.
 *
 *     build/bad_paths WHAT [SEED [TIMEOUT]]
 *
 * Four ranks make steps of 20 ms for 20 simulated seconds: they average, broadcast, and gather a
 * message of 3,000 bytes. TIMEOUT is the peer time-out in seconds (default 4). After 5 s this
 * happens, by WHAT:
 *
 *     none          nothing
 *     hole          the path between ranks 0 and 1 drops datagrams over 1,000 bytes, without a message
 *     hole-packets  the same, and the message has 100 bytes
 *     hole-data     it drops all DATA, and nothing else
 *     hole-back     as hole, but only for 0.5 s
 *     dark          the path between ranks 0 and 1 drops everything, in both directions
 *     dark-way      the same from rank 0 to rank 1 only
 *     dark-switched another path every second, chosen by the seed
 *     dark-frozen   as dark-way, from the datagram with the number SEED on; when it leaves, all
 *                   ranks are stopped for 3 s
 *     dark-relay    as dark-way, and also from rank 0 to rank 2, and 7 s later to rank 3 instead;
 *                   from the start, datagrams take 200 ms
 *     dark-corners  as dark, and also from rank 2 to rank 0 and from rank 3 to rank 1
 *     lossy         the network loses 40% of all datagrams
 *     leave         a stranger sends rank 0 a LEAVE in rank 1's name; rank 1 goes on
 *     leaves        a stranger does so every 50 ms
 *     left          rank 1 ends without a word to the others, except that LEAVE
 *     frozen        all ranks are stopped for 3 peer time-outs, and wake within 50 ms
 *     stopped       rank 1 is stopped for half a peer time-out
 *     dead          rank 1 is stopped for ever
 *     wrap          all numbers of phases jump ahead, four times, past 2^32
 *     jitter        from the start: datagrams take 40 ms and up to 20 ms more, each for itself
 *     jitter-short  from the start: datagrams take up to 5 ms, each for itself
 *     jitter-long   from the start: datagrams take 50 ms and up to 500 ms more
 *
 * The program prints one line:
 *
 *     failed     ranks whose comm failed
 *     seconds    from the event until the first failed; or until all ended
 *     steps      steps that rank 0 made, and `after`: those of the last 2 s
 *     lost       share of packets of the second half of the run that did not come in time
 *     step_ms    mean time of rank 0's steps in the second half
 *     wakes      how often rank 2 woke per second, in the first long step after the event
 *
 * test/lossynet/test_simulation.py compares this with bounds.
 */
#include "dev/simulation/simulation.h"
#include "lossynet/comm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 4, ELEMENTS = 20000, MESSAGE = 3000, SHORT = 100, PAYLOAD = 1400, NARROW = 1000 };
static const double COMPUTE = 0.02, EVENT = 5, LENGTH = 20;

enum what {
    NONE,
    HOLE,
    HOLE_PACKETS,
    HOLE_DATA,
    HOLE_BACK,
    DARK,
    DARK_WAY,
    DARK_SWITCHED,
    DARK_FROZEN,
    DARK_RELAY,
    DARK_CORNERS,
    LOSSY,
    LEAVE,
    LEAVES,
    LEFT,
    FROZEN,
    STOPPED,
    DEAD,
    WRAP,
    JITTER,
    JITTER_SHORT,
    JITTER_LONG,
    WHATS
};
static const char *const name[WHATS] = {
    "none",     "hole",          "hole-packets", "hole-data",  "hole-back",    "dark",
    "dark-way", "dark-switched", "dark-frozen",  "dark-relay", "dark-corners", "lossy",
    "leave",    "leaves",        "left",         "frozen",     "stopped",      "dead",
    "wrap",     "jitter",        "jitter-short", "jitter-long"};

static struct {
    enum what what;
    double timeout, begun, failed_at, forged;
    int failed, steps, late_steps, left; /* left: datagrams until the path of dark-frozen is dark */
    bool done;
    uint64_t expected, arrived; /* packets, in the second half */
    double counted_seconds;     /* of rank 0's steps in the second half */
    int counted;
    uint64_t switches; /* of rank 2, at the event */
    double wakes;      /* of rank 2, per second, in the step with the event */
} run;

static double since_event(void) {
    return simulation_now() - run.begun - EVENT;
}

/* ---- the network ---- */

static double uniform(void) {
    return (double)(simulation_random() >> 11) * 0x1p-53;
}

/* A LEAVE in the name of a datagram's sender, made of its header and state. */
static void forge_leave(int sender, int receiver, const uint8_t *bytes) {
    uint8_t forged[WIRE_HEADER_BYTES + WIRE_STATE_BYTES];
    memcpy(forged, bytes, sizeof forged);
    forged[3] = (uint8_t)WIRE_LEAVE;
    wire_put(forged + WIRE_CHECKSUM_AT, 0, 4);
    wire_put(forged + WIRE_CHECKSUM_AT, ln_crc32c(0, forged, sizeof forged), 4);
    simulation_deliver(receiver, sender, forged, sizeof forged, 0);
}

static double jitter(void) {
    if (run.what == DARK_RELAY) return 0.2;
    if (run.what == JITTER) return 0.04 + 0.02 * uniform();
    if (run.what == JITTER_SHORT) return 0.005 * uniform();
    if (run.what == JITTER_LONG) return 0.05 + 0.5 * uniform();
    return 0;
}

/* Whether a pair of ranks is the one that is dark in this second. */
static bool is_switched_off(int a, int b, int second) {
    static int seen = -1, dark[2];
    if (second != seen) {
        dark[0] = (int)(simulation_random() % RANKS);
        dark[1] = (dark[0] + 1 + (int)(simulation_random() % (RANKS - 1))) % RANKS;
        seen = second;
    }
    return (a == dark[0] && b == dark[1]) || (a == dark[1] && b == dark[0]);
}

/* Whether a path is dark from a certain datagram on, with which all ranks stop for a while. */
static bool is_dark_frozen(int sender, int receiver) {
    if (sender != 0 || receiver != 1) return false;
    for (int r = 0; r < RANKS && run.left == 1; r++) simulation_stop(r, 3 + 0.05 * uniform());
    return --run.left <= 0;
}

static bool is_dropped(int sender, int receiver, const uint8_t *bytes, size_t count) {
    const double since = since_event();
    const bool path = sender + receiver == 1;
    if (since < 0 || run.done) return false;
    if (run.what == HOLE || run.what == HOLE_PACKETS) return path && count > NARROW;
    if (run.what == HOLE_DATA) return path && wire_type(bytes) == WIRE_DATA;
    if (run.what == HOLE_BACK) return path && count > NARROW && since < 0.5;
    if (run.what == DARK) return path;
    if (run.what == DARK_WAY) return sender == 0 && receiver == 1;
    if (run.what == DARK_SWITCHED) return is_switched_off(sender, receiver, (int)since);
    if (run.what == DARK_FROZEN) return is_dark_frozen(sender, receiver);
    if (run.what == DARK_RELAY)
        return sender == 0 && (receiver == 1 || receiver == 2 + (since > 7));
    if (run.what == DARK_CORNERS) return path || sender == receiver + 2;
    if (run.what == LOSSY) return uniform() < 0.4;
    return false;
}

static void carry(int sender, int receiver, uint8_t *bytes, size_t count) {
    const bool told = count == WIRE_HEADER_BYTES + WIRE_STATE_BYTES;
    const bool leaves = run.what == LEAVE || run.what == LEAVES || run.what == LEFT;
    if (leaves && since_event() > 0 && told && sender == 1 && receiver == 0 && !run.done &&
        simulation_now() > run.forged) {
        run.forged = run.what == LEAVES ? simulation_now() + 0.05 : HUGE_VAL;
        forge_leave(sender, receiver, bytes);
        if (run.what == LEFT) simulation_stop(1, 100);
    }
    if (run.what == LEFT && run.forged == HUGE_VAL && sender == 1) return;
    if (is_dropped(sender, receiver, bytes, count)) return;
    simulation_deliver(receiver, sender, bytes, count, jitter());
}

/* ---- a rank ---- */

/* Stops ranks, once, at the time of the event. Rank 3 does it, while the others wait for it. */
static void disturb(int rank) {
    static bool disturbed;
    if (run.steps == 0) disturbed = false;
    if (rank != 3 || since_event() < 0 || disturbed) return;
    disturbed = true;
    simulation_sleep(0.1 * COMPUTE); /* the others wait for this rank now */
    const double frozen = 3 * run.timeout;
    for (int r = 0; r < RANKS && run.what == FROZEN; r++)
        simulation_stop(r, frozen + 0.05 * uniform());
    if (run.what == STOPPED) simulation_stop(1, run.timeout / 2);
    if (run.what == DEAD) simulation_stop(1, 1000);
    run.switches = simulation_switches(2);
    simulation_sleep(0);
}

/* Leaves out as many phases as brings their numbers past 2^32 in four steps. All ranks do so at the
 * same place, between two steps. */
static void jump(struct lossynet_comm *comm, uint64_t step) {
    if (run.what != WRAP || step % 50 != 49 || step > 200) return;
    ln_transport_jump(comm->transport, UINT32_MAX / 4 - 100);
    ln_transport_receive_begin(comm->transport, LOSSYNET_GRADIENT);
}

static lossynet_status make_step(struct lossynet_comm *comm, uint64_t step, float *vector,
                                 uint8_t *all) {
    struct lossynet_counters counters;
    static uint8_t mine[MESSAGE];
    lossynet_status status = lossynet_step_begin(comm, step);
    if (!status) status = lossynet_reduce(comm, &vector, false);
    if (!status) status = lossynet_broadcast(comm, &vector, false);
    if (!status) status = lossynet_step_counters(comm, step, &counters);
    const size_t bytes = run.what == HOLE_PACKETS ? SHORT : MESSAGE;
    if (!status) status = lossynet_all_gather(comm, mine, all, bytes);
    if (status || since_event() < (LENGTH - EVENT) / 2) return status;
    for (int kind = 0; kind < 2; kind++) {
        run.expected += counters.expected[kind];
        run.arrived += counters.arrived[kind];
    }
    return status;
}

static void note(int rank, double seconds) {
    if (rank == 2 && run.wakes == 0 && since_event() > 0.3 * run.timeout)
        run.wakes = (double)(simulation_switches(2) - run.switches) / since_event();
    if (rank != 0) return;
    run.steps++;
    run.late_steps += since_event() > LENGTH - EVENT - 2;
    if (since_event() < (LENGTH - EVENT) / 2) return;
    run.counted_seconds += seconds;
    run.counted++;
}

static void rank_main(int rank) {
    const struct lossynet_world world = {.rank = rank,
                                         .ranks = RANKS,
                                         .local_rank = rank,
                                         .local_ranks = RANKS,
                                         .share = simulation_share};
    const size_t elements = ELEMENTS;
    const struct lossynet_settings settings = {.workers = RANKS,
                                               .buckets = 1,
                                               .bucket_elements = &elements,
                                               .packet_bytes = PAYLOAD,
                                               .loss = {.model = "bernoulli"},
                                               .link = LOSSYNET_LINK_UDP,
                                               .network.peer_timeout = run.timeout};
    struct lossynet_comm *comm;
    float *vector = calloc(ELEMENTS, sizeof *vector);
    uint8_t *all = calloc(RANKS, MESSAGE);
    lossynet_status status = ln_comm_open(&world, &settings, simulation_link_open, &comm);
    simulation_require(!status, "opening");
    if (run.begun == 0) run.begun = simulation_now();
    bool ends = false; /* all ranks end after the same step */
    for (uint64_t step = 0; !status && !ends; step++) {
        const double start = simulation_now();
        simulation_sleep(COMPUTE);
        status = make_step(comm, step, vector, all);
        note(rank, simulation_now() - start);
        disturb(rank);
        uint8_t stops = since_event() > LENGTH - EVENT, stop[RANKS] = {0};
        if (!status) status = lossynet_all_gather(comm, &stops, stop, 1);
        for (int r = 0; r < RANKS; r++) ends |= stop[r];
        if (!status && !ends) jump(comm, step);
    }
    if (status && run.failed++ == 0) run.failed_at = since_event();
    run.done = true;
    lossynet_close(comm);
    free(vector);
    free(all);
}

int main(int argc, char **argv) {
    int what = 0;
    while (argc > 1 && what < WHATS && strcmp(argv[1], name[what]) != 0) what++;
    run.timeout = argc > 3 ? atof(argv[3]) : 4;
    if (argc < 2 || what == WHATS || !(run.timeout > 0)) {
        fprintf(stderr, "usage: %s WHAT [SEED [TIMEOUT]], see dev/simulation/bad_paths.c\n",
                argv[0]);
        return 2;
    }
    run.what = (enum what)what;
    run.left = argc > 2 ? atoi(argv[2]) : 1;
    const struct simulation_settings settings = {.ranks = RANKS,
                                                 .seed = argc > 2 ? (uint64_t)atoll(argv[2]) : 1,
                                                 .longest_seconds = 2000,
                                                 .most_switches = UINT64_MAX,
                                                 .payload_most = PAYLOAD,
                                                 .receive_queue = 1024,
                                                 .latency = 1e-4,
                                                 .carry = carry};
    simulation_run(&settings, rank_main);
    const double lost = run.expected > 0 ? 1 - (double)run.arrived / (double)run.expected : 0;
    printf("failed %d seconds %.2f steps %d after %d lost %.5f step_ms %.2f "
           "wakes %.0f\n",
           run.failed, run.failed ? run.failed_at : LENGTH - EVENT, run.steps, run.late_steps, lost,
           run.counted ? 1e3 * run.counted_seconds / run.counted : 0, run.wakes);
    return 0;
}
