/* memory_plan.h — computes memory and traffic of a run by arithmetic, and allocates nothing. */
#ifndef LLMC_MEMORY_MEMORY_PLAN_H
#define LLMC_MEMORY_MEMORY_PLAN_H

#include <stdbool.h>

#include "llmc/model/activations.h"
#include "llmc/model/config.h"
#include "llmc/memory/arrays.h"
#include "llmc/options/options.h"

struct memory_plan_wire {           /* what is sent */
    int packet_bytes, header_bytes; /* of a packet: its payload, and the header before it */
    double bytes[2];                /* bytes of an element of the payload, by phase, with scales */
    const char *dtype;              /* its name to print */
    double resent[2];               /* expected retransmissions by phase, as a share of the phase */
    double link_gbps;               /* 10^9 bit/s, each way */
    int threads;                    /* of a rank, that send and receive (--link-threads) */
};

struct memory_plan_saving { /* what leaves the vectors, and what files hold */
    double stale;           /* share of a replica that is stale */
    bool exact;             /* every replica is the model, unless owners lead */
    bool carries;           /* on a CPU, lost gradients (--carry) */
    bool gathers;           /* the model is put together from its owners, to evaluate or to save */
    bool saves;             /* it saves checkpoints, from copies in memory */
    double shard_bytes;
    int rank; /* number of the rank, which decides which shards it saves */
};

struct param_layout;

struct memory_plan_owners { /* with Muon, whose owners have unequal shards; all else 0 */
    double largest;         /* elements of the owner that has most */
    double squares;         /* second moments of the owner that has most of them */
    const struct param_layout *layout;
};

struct memory_plan_settings {
    const char *model; /* name to print */
    struct memory_plan_owners owners;
    struct placement_run run;
    int batch, seq;           /* of a micro-batch */
    int sets;                 /* of activations; 0: 1 */
    int threads;              /* CPU: threads that compute; 0: 1 */
    bool cudnn;               /* it may compute attention */
    bool remembers;           /* it keeps keys and values of all layers, to generate text */
    enum recompute recompute; /* not auto */
    double network_bytes;     /* what the network layer needs, mainly receive buffers */
    struct memory_plan_wire wire;
    struct memory_plan_saving saving;
};

struct memory_plan {
    double parameters;    /* P */
    double line[LINES];   /* bytes of the arrays (arrays.h); the model's, if it is put together */
    double working_bytes; /* working memory of operations and libraries */
    double program_bytes; /* on a CPU: the process itself and its libraries */
    double network_bytes;
    double copy_bytes;   /* the copy from which a checkpoint is written */
    double change_bytes; /* state that ranks hand over, while nothing is computed or saved */
    double activation_bytes;
    double total_bytes;
    double host_bytes;     /* with a device: host memory, mainly pinned vectors */
    double phase_bytes[2]; /* payload a worker sends in a phase; it receives as much */
    double phase_packets;
    double phase_seconds[2];  /* time on the link, including headers */
    double thread_seconds[2]; /* time of the threads that send and receive, one after the other */
};

/* Bytes around a datagram: Ethernet 38 with preamble, checksum and gap; IPv4 20; UDP 8. */
enum { MEMORY_PLAN_FRAME_BYTES = 66 };
/* Bytes of cuBLASLt's workspace of a set; and those that opening a device takes: the first of these, and an
 * assumed 600 MB for the driver's context and code. */
enum { MEMORY_PLAN_PRODUCT_BYTES = 64 << 20 };
enum { MEMORY_PLAN_OPENED_BYTES = MEMORY_PLAN_PRODUCT_BYTES + 600000000 };

/* Bytes of a process that computes nothing yet (measured). */
enum { MEMORY_PLAN_PROGRAM_BYTES = 10000000 };

/* Settings of rank 0 of a run with these options, one worker per rank, in float32 on the CPU. The
 * network's fields (network_bytes, wire.header_bytes) are 0. Without --train, the run is assumed to
 * evaluate and to save. */
struct memory_plan_settings memory_plan_of_options(const struct options *options, int workers,
                                                   int seq);

/* Changes the settings to those of rank `rank` of `ranks`, with its share of the workers. */
void memory_plan_place(struct memory_plan_settings *s, int ranks, int rank);

struct memory_plan memory_plan_of_run(const struct llama_config *config,
                                      const struct memory_plan_settings *s);

/* Size of a checkpoint, including the stale packets of the replicas. */
double memory_plan_checkpoint_bytes(const struct llama_config *config,
                                    const struct memory_plan_settings *s);

/* The most sets of activations that a rank can use at once on a device: one for each of its groups, at most
 * BACKEND_SETS. */
int memory_plan_most_sets(const struct memory_plan_settings *s);

/* Sets s->recompute to the least recomputation with which the run needs at most `available` bytes,
 * and *total to the bytes that it needs. If nothing fits, it sets the most recomputation. available
 * 0: it is unknown, and there is no recomputation. Returns whether the run fits. */
bool memory_plan_choose_recompute(const struct llama_config *config, struct memory_plan_settings *s,
                                  double available, double *total);

/* Prints the memory as a table to stdout. */
void memory_plan_print_memory(const struct llama_config *config,
                              const struct memory_plan_settings *s);

/* Prints the memory, the disk space and the traffic. */
void memory_plan_print(const struct llama_config *config, const struct memory_plan_settings *s);

/* Prints the expected drift, which the network layer computes. */
void memory_plan_print_drift(double p, double uncorrelated, double correlated, double paper);

#endif
