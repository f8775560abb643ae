/* run.h — what a run is: the facts that the log, the terminal and a checkpoint tell of it.
 */
#ifndef LLMC_RUN_H
#define LLMC_RUN_H

#include <jansson.h>
#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>

#include "llmc/layout.h"
#include "llmc/options.h"

#ifdef __cplusplus
extern "C" {
#endif

struct run_facts {
    const struct options *options;
    const struct layout *layout;
    const char *revision, *backend, *link;
    const char *sends;               /* how vectors leave, see staging.h */
    int rank, ranks, workers, local; /* local: workers of this rank */
    int threads;                     /* per rank */
    int batch, seq;                  /* of a micro-batch */
    uint64_t train_tokens;           /* in the data; 0 without any */
    size_t packet_bytes, packets;    /* packets: of one vector, all owners */
    size_t moments;                  /* of the worker that owns most */
};

json_t *run_event(const struct run_facts *run); /* for the log; NULL: out of memory */

void run_announce(const struct run_facts *run); /* to the terminal, on rank 0, unless quiet */

#ifdef __cplusplus
}
#endif
#endif
