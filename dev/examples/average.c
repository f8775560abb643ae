/* average.c — two processes average a vector over UDP, while 10% of the packets are dropped.
 *
 *     make liblossynet install PREFIX=$HOME/lossynet
 *     export PKG_CONFIG_PATH=$HOME/lossynet/lib/pkgconfig LD_LIBRARY_PATH=$HOME/lossynet/lib
 *     cc dev/examples/average.c $(pkg-config --cflags --libs lossynet) -o average
 *
 *     ./average 0        in one terminal, and in another, or on another host (then with HOST:PORT):
 *     ./average 1
 */
#include <lossynet.h>

#include <stdio.h>
#include <stdlib.h>

enum { PROCESSES = 2, ELEMENTS = 1000000, STEPS = 5 };

static float vector[ELEMENTS];

/* Rank 0 brings a vector of ones, rank 1 brings twos: the average is 1.5. */
static lossynet_status average(struct lossynet_comm *comm, int rank, uint64_t step) {
    float *vectors[] = {vector};
    struct lossynet_counters counters;
    for (size_t i = 0; i < ELEMENTS; i++) vector[i] = (float)(rank + 1);

    lossynet_status status = lossynet_step_begin(comm, step);
    /* Each process owns half of the elements, and averages them from the packets that arrive. */
    if (!status) status = lossynet_reduce(comm, vectors, false);
    /* It sends its half to the other one, who keeps its own values where a packet is lost. */
    if (!status) status = lossynet_broadcast(comm, vectors, false);
    if (!status) status = lossynet_step_counters(comm, step, &counters);
    if (status) return status;
    size_t averaged = 0;
    for (size_t i = 0; i < ELEMENTS; i++) averaged += vector[i] == 1.5f;
    printf("step %d: %d of %d packets arrived, %.1f%% of the elements are 1.5 here\n", (int)step,
           (int)(counters.arrived[LOSSYNET_GRADIENT] + counters.arrived[LOSSYNET_PARAMETER]),
           (int)(counters.expected[LOSSYNET_GRADIENT] + counters.expected[LOSSYNET_PARAMETER]),
           100.0 * (double)averaged / ELEMENTS);
    return LOSSYNET_OK;
}

int main(int argc, char **argv) {
    const int rank = argc > 1 ? atoi(argv[1]) : -1; /* of two, 0 or 1 */
    const char *address = argc > 2 ? argv[2] : "127.0.0.1:7010";
    const size_t elements = ELEMENTS;
    const struct lossynet_settings settings = {
        .workers = PROCESSES,
        .buckets = 1,
        .bucket_elements = &elements,
        .estimator = LOSSYNET_BALANCED,
        .link = LOSSYNET_LINK_UDP,
        .loss = {.rate = {0.1, 0.1}, .model = "bernoulli", .seed = 1}};
    struct lossynet_world world;
    struct lossynet_comm *comm = NULL;
    lossynet_status status = lossynet_rendezvous_open(address, rank, PROCESSES, 60, &world);
    if (!status) status = lossynet_open(&world, &settings, &comm);
    for (uint64_t step = 0; !status && step < STEPS; step++) status = average(comm, rank, step);
    lossynet_close(comm);
    lossynet_rendezvous_close(&world);
    return status ? EXIT_FAILURE : EXIT_SUCCESS;
}
