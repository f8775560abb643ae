/* bench_turn.c — measures how long a turn of the progress engine takes on a rank of many.
 *
 *     build/dev/bench/network/bench_turn [RANKS ...]      64, 1,024 and 16,384
 *
 * The other ranks send nothing, and nothing leaves. It times four kinds of turns: of an idle rank,
 * of a rank that waits for all others in a phase and has nothing due yet, with news of a single
 * peer, and a turn that looks at all peers, as after each call of the caller.
 */
#include "lossynet/transport/exchange/exchange.h"

#include <stdio.h>
#include <stdlib.h>

enum { TURNS = 2000, FULL_TURNS = 20 };

static lossynet_status link_send(struct ln_link *link, int peer, const struct ln_datagram *batch,
                                 int count) {
    (void)link, (void)peer, (void)batch, (void)count;
    return LOSSYNET_OK;
}

static int link_receive(struct ln_link *link, struct ln_arrival *arrivals) {
    (void)link, (void)arrivals;
    return 0;
}

static void link_nothing(struct ln_link *link) {
    (void)link;
}

static lossynet_status link_open(const struct ln_link_settings *settings, struct ln_link **out) {
    static struct ln_link link;
    (void)settings;
    link = (struct ln_link){.name = "none",
                            .features = {.payload_most = 1400, .receive_queue = 1 << 20},
                            .send = link_send,
                            .receive = link_receive,
                            .wake = link_nothing,
                            .close = link_nothing};
    *out = &link;
    return LOSSYNET_OK;
}

/* Pretends that the other ranks share what rank 0 shares. */
static lossynet_status share(void *context, const struct lossynet_world *world, void *all,
                             size_t bytes) {
    (void)context;
    for (int r = 1; r < world->ranks; r++) memcpy((char *)all + (size_t)r * bytes, all, bytes);
    return LOSSYNET_OK;
}

static bool ready(void *context, lossynet_phase phase, int rank) {
    (void)context, (void)phase, (void)rank;
    return false;
}

static uint32_t expected(void *context, lossynet_phase phase, int bucket, int sender) {
    (void)context, (void)phase, (void)bucket, (void)sender;
    return 1;
}

static double microseconds(struct ln_transport *t, int turns, bool one, bool all) {
    const double start = ln_now();
    for (int i = 0; i < turns; i++) {
        if (one) ln_agenda_soon(t, 1 + i % (t->world.ranks - 1));
        if (all) ln_agenda_all(t);
        ln_progress_turn(t);
    }
    return 1e6 * (ln_now() - start) / turns;
}

static void measure(int ranks) {
    const struct ln_transport_settings settings = {.world = {.ranks = ranks, .share = share},
                                                   .network.peer_timeout = 1e6,
                                                   .pulses = 1,
                                                   .phases = {1, 1}};
    const struct ln_transport_shape shape = {
        .workers = ranks, .local = 1, .buckets = 1, .packet_bytes = 1400};
    const struct ln_transport_calls calls = {.ready = ready, .expected = expected};
    struct ln_pool pool = {0};
    struct ln_transport *t;
    if (ln_transport_open(&settings, link_open, &t)) exit(1);
    ln_transport_shape(t, 0, &pool, &shape, &calls);
    if (pool.out_of_memory) exit(1);
    ln_transport_receive_begin(t, LOSSYNET_GRADIENT);
    ln_transport_send_begin(t, LOSSYNET_GRADIENT);
    ln_progress_turn(t);
    const double idle = microseconds(t, TURNS, false, false);
    t->phase[LOSSYNET_GRADIENT].awaited = true;
    const double all = microseconds(t, FULL_TURNS, false, true);
    const double waits = microseconds(t, TURNS, false, false);
    const double one = microseconds(t, TURNS, true, false);
    printf("| %d | %.2f | %.2f | %.2f | %.0f |\n", ranks, idle, waits, one, all);
    ln_transport_close(t);
    ln_pool_close(&pool);
}

int main(int argc, char **argv) {
    puts("| ranks | idle, us | waits, us | news of one, us | all, us |");
    puts("| ---: | ---: | ---: | ---: | ---: |");
    if (argc == 1) measure(64), measure(1024), measure(16384);
    for (int i = 1; i < argc; i++) measure(atoi(argv[i]));
    return 0;
}
