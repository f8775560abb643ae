/* exchange.c — see exchange.h. */
#include "llmc/memory/exchange.h"

#include <stdlib.h>
#include <string.h>

#include "llmc/log/error.h"

/* ---- vectors, see struct lossynet_memory ---- */

static void round_packets(void *context, float *const *vectors, int bits, const uint64_t *key) {
    const struct exchange *e = context;
    e->be->exchange_round(&e->packets, vectors, NULL, bits, key);
}

static void average(void *context, float *const *vectors, const float *weight) {
    const struct exchange *e = context;
    e->be->exchange_average(&e->packets, vectors, weight);
}

static void broadcast(void *context, float *const *vectors, const float *const *ahead,
                      const uint8_t *arrived, int bits) {
    const struct exchange *e = context;
    e->be->exchange_copy(&e->packets, vectors, ahead, arrived, bits);
}

static void gather(void *context, float *out, float *const *vectors, const size_t *element,
                   const int32_t *of, size_t n) {
    const struct exchange *e = context;
    e->be->gather(out, vectors, e->packets.workers, element, of, n);
}

struct lossynet_memory exchange_memory(struct exchange *e) {
    return (struct lossynet_memory){e, round_packets, average, broadcast, e->be->copy, gather};
}

/* ---- residuals, see struct lossynet_residuals ---- */

static void list_vectors(const struct exchange *e) {
    for (int w = 0; w < e->packets.workers; w++) {
        e->gradient[w] = e->worker[w].grads;
        e->residual[w] = e->worker[w].residual;
    }
}

static void round_residuals(void *context, int bits, const uint64_t *key) {
    const struct exchange *e = context;
    for (int w = 0; w < e->packets.workers && e->rounds_first; w++)
        e->be->round(e->worker[w].grads, e->elements);
    list_vectors(e);
    e->be->exchange_round(&e->packets, e->gradient, e->residual, bits, key);
}

static void keep_residuals(void *context, const uint8_t *arrived, const uint64_t *lots) {
    const struct exchange *e = context;
    list_vectors(e);
    e->be->exchange_keep(&e->packets, e->residual, e->gradient, arrived,
                         e->has_error ? LOST_ADDED : LOST_ALONE, lots);
}

static const struct worker *worker_of(const struct exchange *e, int id) {
    return &e->worker[id - e->worker[0].id];
}

static void save_residual(void *context, int worker, void *out) {
    const struct exchange *e = context;
    e->be->download(out, worker_of(e, worker)->residual, e->elements * sizeof(uint16_t));
}

static void load_residual(void *context, int worker, const void *in) {
    const struct exchange *e = context;
    e->be->upload(worker_of(e, worker)->residual, in, e->elements * sizeof(uint16_t));
}

struct lossynet_residuals exchange_residuals(struct exchange *e) {
    return (struct lossynet_residuals){e, round_residuals, keep_residuals, save_residual,
                                       load_residual};
}

/* ---- open and close ---- */

static void *to_device(const struct backend *be, const void *host, size_t bytes) {
    void *memory = be->allocate(bytes);
    if (memory) be->upload(memory, host, bytes);
    return memory;
}

/* Fills `packet` and `takes`, the host's, and e->partner. */
static void fill(struct exchange *e, const struct lossynet_comm *comm, int first,
                 struct lossynet_packet_place *place, struct backend_packet *packet,
                 uint8_t *takes) {
    const int owners = e->packets.owners;
    lossynet_packet_places(comm, place);
    for (uint32_t k = 0; k < e->packets.packets; k++) {
        packet[k] = (struct backend_packet){place[k].element, place[k].owned, place[k].count,
                                            place[k].owner};
        if (place[k].count > e->packets.longest) e->packets.longest = place[k].count;
    }
    for (int o = 0; o < owners; o++) {
        lossynet_partners_of(comm, o, e->partner + (size_t)o * (size_t)e->packets.groups);
        for (int w = 0; w < e->packets.workers; w++)
            takes[(size_t)w * (size_t)owners + (size_t)o] =
                first + w != o && lossynet_is_partner_of(comm, first + w, o);
    }
}

int exchange_open(struct exchange *e, const struct lossynet_comm *comm, int first, int local,
                  int workers) {
    const size_t K = lossynet_packets(comm), pairs = (size_t)local * (size_t)workers;
    e->packets = (struct backend_exchange){.packets = (uint32_t)K,
                                           .workers = local,
                                           .owners = workers,
                                           .groups = lossynet_partners_of(comm, 0, NULL)};
    struct lossynet_packet_place *place = calloc(K, sizeof *place);
    struct backend_packet *packet = calloc(K, sizeof *packet);
    uint8_t *takes = calloc(pairs, sizeof *takes);
    e->partner = calloc((size_t)workers * (size_t)e->packets.groups, sizeof *e->partner);
    e->gradient = calloc((size_t)local, sizeof *e->gradient);
    e->residual = calloc((size_t)local, sizeof *e->residual);
    if (place && packet && takes && e->partner && e->gradient && e->residual) {
        fill(e, comm, first, place, packet, takes);
        e->packet = to_device(e->be, packet, K * sizeof *packet);
        e->takes = to_device(e->be, takes, pairs);
    }
    free(place), free(packet), free(takes);
    e->packets.packet = e->packet, e->packets.takes = e->takes, e->packets.partner = e->partner;
    return e->packet && e->takes
               ? 0
               : log_out_of_memory("the list of packets", (double)(K * sizeof *packet));
}

void exchange_close(struct exchange *e) {
    if (e->packet) e->be->release(e->packet);
    if (e->takes) e->be->release(e->takes);
    free(e->partner), free(e->gradient), free(e->residual);
    memset(e, 0, sizeof *e);
}
