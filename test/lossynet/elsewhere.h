/* elsewhere.h — struct lossynet_memory for tests: it does on the host, from the places of packets alone,
 * what a device does.
 */
#ifndef TEST_LOSSYNET_ELSEWHERE_H
#define TEST_LOSSYNET_ELSEWHERE_H

#include "test/lossynet/test_lossynet.h"

struct elsewhere {
    struct lossynet_comm *comm;
    struct lossynet_packet_place *packet; /* [packets] */
    size_t packets;
    int workers, calls[3]; /* of round, average, broadcast */
};

/* Call it when the comm is open, and before its first phase. */
static inline void elsewhere_open(struct elsewhere *e, struct lossynet_comm *comm, int workers) {
    e->comm = comm, e->workers = workers, e->packets = lossynet_packets(comm);
    e->packet = (struct lossynet_packet_place *)calloc(e->packets, sizeof *e->packet);
    assert_non_null(e->packet);
    lossynet_packet_places(comm, e->packet);
}

static inline bool elsewhere_takes(const struct elsewhere *e, int worker, size_t k) {
    const int owner = e->packet[k].owner;
    return worker != owner && lossynet_is_partner_of(e->comm, worker, owner);
}

static inline void elsewhere_rounded(float *to, const float *from,
                                     const struct lossynet_packet_place *p, int bits,
                                     const uint64_t *key) {
    const struct ln_rounding r = {bits == 32   ? LOSSYNET_FLOAT32
                                  : bits == 16 ? LOSSYNET_BF16
                                  : bits == 8  ? LOSSYNET_INT8
                                  : bits == 6  ? LOSSYNET_INT6
                                               : LOSSYNET_INT4,
                                  key != NULL, key ? *key : 0, p->element};
    ln_elements_copy(&r, to, from, p->count);
}

static inline void elsewhere_round(void *context, lossynet_phase phase, float *const *vectors,
                                   int bits, const uint64_t *key) {
    struct elsewhere *e = (struct elsewhere *)context;
    (void)phase;
    e->calls[0]++;
    for (int w = 0; w < e->workers; w++)
        for (size_t k = 0; k < e->packets; k++)
            if (elsewhere_takes(e, w, k))
                elsewhere_rounded(vectors[w] + e->packet[k].element,
                                  vectors[w] + e->packet[k].element, &e->packet[k], bits,
                                  key ? &key[w] : NULL);
}

static inline void elsewhere_average(void *context, float *const *vectors, const float *weight) {
    struct elsewhere *e = (struct elsewhere *)context;
    int32_t partner[256];
    e->calls[1]++;
    for (size_t k = 0; k < e->packets; k++) {
        const struct lossynet_packet_place *p = &e->packet[k];
        const int groups = lossynet_partners_of(e->comm, p->owner, partner);
        for (size_t j = p->element; j < p->element + p->count; j++) {
            float sum = 0;
            for (int g = 0; g < groups; g++)
                if (weight[k * (size_t)groups + (size_t)g] != 0)
                    sum += weight[k * (size_t)groups + (size_t)g] * vectors[partner[g]][j];
            vectors[p->owner][j] = sum;
        }
    }
}

static inline void elsewhere_broadcast(void *context, float *const *vectors,
                                       const float *const *ahead, const uint8_t *arrived,
                                       int bits) {
    struct elsewhere *e = (struct elsewhere *)context;
    e->calls[2]++;
    for (int w = 0; w < e->workers; w++)
        for (size_t k = 0; k < e->packets; k++) {
            const struct lossynet_packet_place *p = &e->packet[k];
            if (elsewhere_takes(e, w, k) && arrived[(size_t)w * e->packets + k])
                elsewhere_rounded(vectors[w] + p->element,
                                  ahead ? ahead[p->owner] + p->owned
                                        : vectors[p->owner] + p->element,
                                  p, bits, NULL);
        }
}

static inline void elsewhere_copy(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
}

static inline void elsewhere_gather(void *context, float *out, float *const *vectors,
                                    const size_t *element, const int32_t *of, size_t n) {
    const struct elsewhere *e = (const struct elsewhere *)context;
    for (int w = 0; !of && w < e->workers; w++)
        for (size_t i = 0; i < n; i++) out[(size_t)w * n + i] = vectors[w][element[i]];
    for (size_t i = 0; of && i < n; i++) out[i] = vectors[of[i]][element[i]];
}

static inline struct lossynet_memory elsewhere_memory(struct elsewhere *e) {
    return (struct lossynet_memory){e,
                                    elsewhere_round,
                                    elsewhere_average,
                                    elsewhere_broadcast,
                                    elsewhere_copy,
                                    elsewhere_gather};
}

#endif
