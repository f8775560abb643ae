/* exchange.h — what the workers of a rank exchange in a device's memory, without the host: the
 * functions that lossynet calls for their vectors.
 */
#ifndef LLMC_MEMORY_EXCHANGE_H
#define LLMC_MEMORY_EXCHANGE_H

#include "llmc/backend/backend.h"
#include "lossynet/lossynet_trainer.h"

struct exchange {
    const struct backend *be;
    bool rounds_to_bf16; /* gradients (placement.h) */
    struct backend_exchange packets;
    struct backend_packet *packet; /* packets.packet */
    uint8_t *takes;
    int32_t *partner;
};

/* The functions for lossynet_settings, of vectors on e->be; their context is `e`, which
 * exchange_open sets later. */
struct lossynet_memory exchange_memory(struct exchange *e);

/* Learns the packets of `comm`, whose workers are all in this rank. The caller has set the first
 * two members. Returns 0, or -1 after reporting; the caller closes it in both cases. */
int exchange_open(struct exchange *e, const struct lossynet_comm *comm, int workers);
void exchange_close(struct exchange *e);

#endif
