/* estimate.h — memory and traffic of a run, from arithmetic alone; nothing is allocated. */
#ifndef LLMC_ESTIMATE_H
#define LLMC_ESTIMATE_H

#include <stdbool.h>

#include "llmc/activations.h"
#include "llmc/config.h"
#include "llmc/options.h"

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
    int wire_bytes;                 /* of an element of it */
    double resent[2];               /* expected in repair rounds, as a share of the phase */
    double link_gbps;               /* 10^9 bit/s, each way */
    bool device;                    /* on a GPU */
    enum dtype dtype;               /* of weights in use and of activations */
    enum recompute recompute;       /* not auto */
    double stale;                   /* share of a replica that is not the model's */
    int local;                      /* workers that share the device or the rank; 0: 1 */
    bool evaluating;                /* no gradients, no optimizer */
    bool staged;                    /* several ranks: on a device, the network reads the host */
};

struct estimate {
    double parameters;                      /* P */
    double parameter_bytes, gradient_bytes; /* 4P each, for each local worker */
    double optimizer_bytes;                 /* 8P, or 8P/N when sharded, for each local worker */
    double weight_bytes;                    /* 2P in bf16: the copy that is computed with */
    double working_bytes;                   /* on a GPU: what operations and libraries take */
    double network_bytes;
    double fresh_bytes; /* 4P when N > 1: evaluation and saving */
    double copy_bytes; /* that a checkpoint is written from, on rank 0; stale packets come on top */
    double activation_bytes;
    double total_bytes;
    double host_bytes;  /* device: of the host's memory, pinned vectors above all */
    double phase_bytes; /* payload a worker sends in a phase; it receives as much */
    double phase_packets;
    double phase_seconds; /* on the link, headers counted */
};

/* Ethernet 38 with preamble, checksum and gap; IPv4 20; UDP 8 */
enum { ESTIMATE_FRAME_BYTES = 66 };
/* Opening a device: cuBLASLt's workspace; the driver's context with its code (assumed). */
enum { ESTIMATE_OPENED_BYTES = (64 << 20) + 600000000 };

/* What the options say of a run with one worker per rank, in float32 on the CPU; the network's
 * fields (network_bytes, header_bytes) are left 0. */
struct estimate_settings estimate_of_options(const struct options *options, int workers, int seq);

struct estimate estimate_run(const struct llama_config *config, const struct estimate_settings *s);

/* Of a checkpoint, with the packets in which replicas differ from the model. */
double estimate_checkpoint_bytes(const struct llama_config *config,
                                 const struct estimate_settings *s);

/* Sets s->recompute to the least recomputation whose total is at most `available` bytes (0: not
 * known, then none), and *total to that total; with none that fits, to the greatest and its total.
 * Returns whether it fits. */
bool estimate_choose_recompute(const struct llama_config *config, struct estimate_settings *s,
                               double available, double *total);

/* The same as a table on stdout. */
void estimate_print(const struct llama_config *config, const struct estimate_settings *s);

/* What drift to expect, computed by the network layer. */
void estimate_print_drift(double p, double uncorrelated, double correlated, double paper);

#ifdef __cplusplus
}
#endif
#endif
