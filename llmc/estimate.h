/* estimate.h — memory and traffic of a run, from arithmetic alone; nothing is allocated. */
#ifndef LLMC_ESTIMATE_H
#define LLMC_ESTIMATE_H

#include <stdbool.h>

#include "llmc/config.h"

#ifdef __cplusplus
extern "C" {
#endif

struct estimate_settings {
    const char *model; /* name to print */
    int workers;       /* one per rank */
    int batch, seq, micro_batches;
    bool sharded_optimizer;         /* ZeRO-1: each worker keeps moments of the 1/N it owns */
    double network_bytes;           /* what the network layer needs, receive buffers above all */
    int packet_bytes, header_bytes; /* payload, and our header before it */
    double link_gbps;               /* 10^9 bit/s, each way */
};

struct estimate {
    double parameters;                      /* P */
    double parameter_bytes, gradient_bytes; /* 4P each */
    double optimizer_bytes;                 /* 8P, or 8P/N when sharded */
    double network_bytes;
    double fresh_bytes; /* 4P when N > 1: evaluation and saving */
    double copy_bytes; /* that a checkpoint is written from, on rank 0; stale packets come on top */
    double activation_bytes;
    double total_bytes;
    double phase_bytes; /* payload a worker sends in a phase; it receives as much */
    double phase_packets;
    double phase_seconds; /* on the link, headers counted */
};

enum {
    ESTIMATE_FRAME_BYTES = 66
}; /* Ethernet 38 with preamble, checksum and gap; IPv4 20; UDP 8 */

struct estimate estimate_run(const struct llama_config *config, const struct estimate_settings *s);

/* The same as a table on stdout. */
void estimate_print(const struct llama_config *config, const struct estimate_settings *s);

/* What drift to expect, computed by the network layer. */
void estimate_print_drift(double p, double uncorrelated, double correlated, double paper);

#ifdef __cplusplus
}
#endif
#endif
