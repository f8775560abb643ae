/* exchange.c — see exchange.h. */
#include "llmc/memory/exchange.h"

#include <stdlib.h>
#include <string.h>

#include "llmc/log/error.h"

/* ---- vectors, see struct lossynet_memory ---- */

static void round_packets(void *context, lossynet_phase phase, float *const *vectors, int bits,
                          const uint64_t *key) {
    const struct exchange *e = context;
    const bool narrow = e->rounds_to_bf16 && phase == LOSSYNET_GRADIENT;
    e->be->exchange_round(&e->packets, vectors, bits, key, narrow);
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

/* ---- open and close ---- */

static void *to_device(const struct backend *be, const void *host, size_t bytes) {
    void *memory = be->allocate(bytes);
    if (memory) be->upload(memory, host, bytes);
    return memory;
}

/* Fills `packet` and `takes`, the host's, and e->partner. */
static void fill(struct exchange *e, const struct lossynet_comm *comm,
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
                w != o && lossynet_is_partner_of(comm, w, o);
    }
}

int exchange_open(struct exchange *e, const struct lossynet_comm *comm, int workers) {
    const size_t K = lossynet_packets(comm), pairs = (size_t)workers * (size_t)workers;
    e->packets = (struct backend_exchange){.packets = (uint32_t)K,
                                           .workers = workers,
                                           .owners = workers,
                                           .groups = lossynet_partners_of(comm, 0, NULL)};
    struct lossynet_packet_place *place = calloc(K, sizeof *place);
    struct backend_packet *packet = calloc(K, sizeof *packet);
    uint8_t *takes = calloc(pairs, sizeof *takes);
    e->partner = calloc((size_t)workers * (size_t)e->packets.groups, sizeof *e->partner);
    if (place && packet && takes && e->partner) {
        fill(e, comm, place, packet, takes);
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
    free(e->partner);
    memset(e, 0, sizeof *e);
}
