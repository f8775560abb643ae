/* exchange.h — what the workers of a rank exchange in a device's memory, without the host: the
 * functions that lossynet calls for their vectors and residuals.
 */
#ifndef LLMC_MEMORY_EXCHANGE_H
#define LLMC_MEMORY_EXCHANGE_H

#include "llmc/backend/backend.h"
#include "llmc/memory/worker.h"
#include "lossynet/lossynet_trainer.h"

struct exchange {
    const struct backend *be;
    struct worker *worker; /* [packets.workers], the caller's; allocated after exchange_open */
    size_t elements;       /* of a vector */
    bool rounds_first;     /* to bfloat16, as the copy of the gradient that is sent */
    bool has_error;        /* residuals hold what rounding took away */
    struct backend_exchange packets;
    struct backend_packet *packet; /* packets.packet */
    uint8_t *takes;
    int32_t *partner;
    float **gradient; /* [workers], for one call */
    uint16_t **residual;
};

/* The functions for lossynet_settings; their context is `e`, which exchange_open sets later. */
struct lossynet_memory exchange_memory(struct exchange *e);
struct lossynet_residuals exchange_residuals(struct exchange *e);

/* Learns the packets of `comm`, for the `local` workers from `first` on. The caller has set the first
 * five members. Returns 0, or -1 after reporting; the caller closes it in both cases. */
int exchange_open(struct exchange *e, const struct lossynet_comm *comm, int first, int local,
                  int workers);
void exchange_close(struct exchange *e);

#endif
