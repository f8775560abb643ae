/* run_info.h — the facts of a run, for the log, the terminal and a checkpoint. */
#ifndef LLMC_CHECKPOINT_RUN_INFO_H
#define LLMC_CHECKPOINT_RUN_INFO_H

#include <jansson.h>
#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>

#include "llmc/backend/backend.h"
#include "llmc/model/param_layout.h"
#include "llmc/options/options.h"

struct run_info {
    const struct options *options;
    const struct param_layout *layout;
    const struct backend *be;
    const char *revision, *link;
    bool faster_in_bf16; /* bf16 would be several times faster; --dtype did not decide */
    const char *sends;   /* how vectors are sent, see port.h */
    struct {
        bool carries;      /* lost gradients join the next ones (--carry) */
        bool measured[2];  /* by phase: rounds follow what is lost (--repair auto) */
        int rounds[2];     /* in which lost packets are sent again, at the start */
        double of_late[2]; /* share that was lost before; -1: not measured */
        const char *rule;  /* checksum of the file of --rule, or NULL */
        const char *trace; /* the same of --loss-model trace:FILE */
    } loss;
    bool mapped; /* GPUs of a group read each other's gradients (port_shared.c) */
    int rank, ranks, workers;
    int threads;    /* per rank */
    int batch, seq; /* of a micro-batch */
    struct {
        uint64_t tokens, checksum;
    } data; /* training data: number of tokens, and their checksum; 0 without data */
    size_t packet_bytes, packets; /* packets: number of packets of one vector, over all owners */
    size_t moments;               /* elements of both moments of a worker, at most */
};

/* The event for the log; NULL if out of memory. */
json_t *run_info_event(const struct run_info *run);

/* The kernels that compute attention when a run trains: "own kernels" or "cuDNN 9.19.0". */
enum { RUN_INFO_ATTENTION_BYTES = 32 };
void run_info_attention(const struct backend *be, char name[RUN_INFO_ATTENTION_BYTES]);

/* Prints to the terminal, on rank 0, unless --quiet is given. */
void run_info_announce(const struct run_info *run);

/* Returns whether this rank shows progress in a line that is drawn again and again. */
bool run_info_draws_progress(const struct options *o, int rank);

#endif
