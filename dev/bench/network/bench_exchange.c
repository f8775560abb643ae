/* bench_exchange.c — times reduce and broadcast of a vector as in a training step, without a model.
 *
 *     mpirun -np 4 bench_exchange MIB ROUNDS SECONDS INTERFACE GBPS [bf16|int8|int6|int4]
 *                                 [encrypt] [group=G] [threads=K]
 *
 * Each round averages MIB of float32 in buckets of 4 MiB and hands the result to all ranks. There
 * is one worker per rank; the link is udp, paced to GBPS (0: not at all). With another type than
 * float32, elements are rounded to it on the network, so that less is sent. With encrypt, every
 * datagram is sealed. With group, G ranks of a host share a replica (llmc/comm/port.h). With
 * threads, K threads of a rank send and receive. Prints {"ms": T} for each of at most ROUNDS rounds after one that warms up, and stops after SECONDS.
 * Ends with a line of counters over all rounds and ranks: packets that were expected and that
 * arrived, late packets, datagrams that a full receive queue dropped (overruns), phases of a peer
 * that the deadline ended (stragglers), and CPU seconds and payload bytes of the timed rounds.
 */
#include "dev/bench/network/bench_time.h"
#include "llmc/comm/port.h"
#include "lossynet/comm.h"

#include <inttypes.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKET_ELEMENTS = 1 << 20 };

struct bench {
    struct lossynet_world world;
    struct lossynet_comm *comm;
    size_t elements;
    float *vector;              /* what is averaged, and without groups also what is received */
    int group, threads;         /* members; threads that send and receive */
    struct port port;           /* with groups: of the vectors that ranks share */
    struct placement placement; /* of vectors in the host's memory */
    struct param_layout layout;
    struct worker worker; /* with groups: its vectors */
    float off; /* largest error of rounding: below 2 for int4 and elements up to 9, else 0 */
    struct lossynet_counters sum;
};

static void fill(struct bench *b) {
    const float share = 1.0f / (float)b->group;
    for (size_t i = 0; i < b->elements; i++)
        b->vector[i] = ((float)b->world.rank + (float)(i % 7)) * share;
}

/* If everything arrived, every element must be the average, otherwise between the lowest and the
 * highest sender's; rounding may add `off`. */
static bool averages_are_right(const struct bench *b, bool everything) {
    const float most = (float)(b->world.ranks - 1), off = b->off;
    const float *received = b->port.shared ? b->worker.params : b->vector;
    for (size_t i = 0; i < b->elements; i++) {
        const float rest = received[i] - (float)(i % 7);
        const float low = everything ? most / 2 : 0, high = everything ? most / 2 : most;
        if (!(rest >= low - off && rest <= high + off)) return false;
    }
    return true;
}

static void add_counters(struct lossynet_counters *sum, const struct lossynet_counters *c) {
    for (int phase = 0; phase < 2; phase++) {
        sum->expected[phase] += c->expected[phase];
        sum->arrived[phase] += c->arrived[phase];
        sum->bytes[phase] += c->bytes[phase];
    }
    for (int event = 0; event < LOSSYNET_EVENTS; event++) sum->network[event] += c->network[event];
}

/* Copies an owner's shards from its gradient to its parameters, as its update would. */
static void copy_own(struct bench *b) {
    for (int i = 0; i < b->layout.buckets; i++) {
        size_t offset, count;
        lossynet_shard(b->comm, b->world.rank, i, &offset, &count);
        memcpy(b->worker.params + offset, b->vector + offset, count * sizeof *b->vector);
    }
}

/* Runs a round, and adds the CPU seconds of a timed one, user and system, to `cpu`. */
static lossynet_status one_round(struct bench *b, int round, double *begun, double cpu[2]) {
    const bool shares = b->port.shared;
    double before[2], after[2];
    fill(b);
    bench_cpu(&before[0], &before[1]);
    *begun = bench_start();
    lossynet_status status = lossynet_step_begin(b->comm, (uint64_t)(round + 1));
    if (!status && b->port.overlap) status = lossynet_reduce_begin(b->comm, &b->vector, false);
    if (!status && shares && b->port.verbs.gradients_out(&b->port, &b->vector, false))
        status = LOSSYNET_LINK;
    if (!status) status = lossynet_reduce(b->comm, &b->vector, false);
    if (shares) copy_own(b);
    float *received = shares ? b->worker.params : b->vector;
    if (!status) status = lossynet_broadcast(b->comm, &received, false);
    if (!status && port_wait(&b->port)) status = LOSSYNET_LINK;
    bench_cpu(&after[0], &after[1]);
    for (int i = 0; i < 2; i++) cpu[i] += round >= 0 ? after[i] - before[i] : 0;
    return status;
}

static lossynet_status measure(struct bench *b, int rounds, double seconds) {
    const double opened = bench_now();
    double begun, cpu[2] = {0}, all[2], bytes = 0;
    bool more = true;
    for (int round = -1; round < rounds && more; round++) {
        struct lossynet_counters c;
        lossynet_status status = one_round(b, round, &begun, cpu);
        if (status) return status;
        if (round >= 0) more = bench_stop(begun, opened, seconds);
        status = lossynet_step_counters(b->comm, (uint64_t)(round + 1), &c);
        if (status) return status;
        add_counters(&b->sum, &c);
        if (round >= 0) bytes += (double)(c.bytes[0] + c.bytes[1]);
        const bool everything = c.arrived[0] == c.expected[0] && c.arrived[1] == c.expected[1];
        if (!averages_are_right(b, everything)) {
            fprintf(stderr, "bench_exchange: rank %d: wrong averages\n", b->world.rank);
            return LOSSYNET_PROTOCOL;
        }
    }
    MPI_Allreduce(cpu, all, 2, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    if (b->world.rank > 0) return LOSSYNET_OK;
    const struct lossynet_counters *s = &b->sum;
    printf("{\"expected\": %" PRIu64 ", \"arrived\": %" PRIu64 ", \"late\": %" PRIu64
           ", \"overruns\": %" PRIu64 ", \"stragglers\": %" PRIu64 ", \"packet_bytes\": %zu"
           ", \"user\": %.3f, \"system\": %.3f, \"bytes\": %.0f}\n",
           s->expected[0] + s->expected[1], s->arrived[0] + s->arrived[1],
           s->network[LOSSYNET_LATE], s->network[LOSSYNET_OVERRUN], s->network[LOSSYNET_STRAGGLER],
           lossynet_packet_bytes(b->comm), all[0], all[1], bytes);
    return LOSSYNET_OK;
}

static lossynet_status open_net(struct bench *b, int mib, const char *interface, double gbps,
                                lossynet_wire_dtype wire_dtype, bool encrypt) {
    const int buckets = (mib + 3) / 4;
    size_t *bucket_elements = malloc((size_t)buckets * sizeof *bucket_elements);
    b->elements = (size_t)mib << 18;
    if (b->group == 1) b->vector = malloc(b->elements * sizeof *b->vector);
    if (!bucket_elements || (b->group == 1 && !b->vector)) {
        free(bucket_elements);
        return LOSSYNET_NO_MEMORY;
    }
    for (int i = 0; i < buckets; i++) {
        const size_t left = b->elements - (size_t)i * BUCKET_ELEMENTS;
        bucket_elements[i] = left < BUCKET_ELEMENTS ? left : BUCKET_ELEMENTS;
    }
    const struct lossynet_settings settings = {.workers = b->world.ranks,
                                               .group = b->group,
                                               .buckets = buckets,
                                               .bucket_elements = bucket_elements,
                                               .loss = {.model = "bernoulli"},
                                               .link = LOSSYNET_LINK_UDP,
                                               .wire_dtype = wire_dtype,
                                               .network.interface = interface,
                                               .network.pace_gbps = gbps,
                                               .network.threads = b->threads,
                                               .network.encrypt = encrypt};
    const lossynet_status status = lossynet_open(&b->world, &settings, &b->comm);
    b->layout.buckets = buckets;
    b->layout.bucket_elements = bucket_elements;
    b->layout.count = b->elements;
    b->off = wire_dtype == LOSSYNET_INT4 ? 2 : 0;
    return status;
}

static lossynet_status open_group(struct bench *b) {
    const struct backend *be = backend_cpu(DTYPE_FLOAT32);
    if (!be) return LOSSYNET_INVALID;
    b->worker.id = b->world.rank;
    b->placement = (struct placement){.way = WAY_SHARED, .trains = true, .copy_bytes = 4};
    b->port = (struct port){.be = be,
                            .layout = &b->layout,
                            .comm = b->comm,
                            .placement = &b->placement,
                            .worker = &b->worker,
                            .groups.workers = b->world.ranks,
                            .local = 1,
                            .overlap = lossynet_overlaps(b->comm)}; /* as the trainer does */
    if (port_open(&b->port, &b->world, 0)) return LOSSYNET_NO_MEMORY;
    port_share_vectors(&b->port, 0);
    if (port_connect(&b->port)) return LOSSYNET_NO_MEMORY;
    b->vector = b->worker.grads;
    /* The values that a replica has where packets never arrived. */
    for (size_t i = 0; i < b->elements && b->world.rank % b->group == 0; i++)
        b->worker.params[i] = (float)(i % 7);
    return port_wait(&b->port) ? LOSSYNET_LINK : LOSSYNET_OK;
}

int main(int argc, char **argv) {
    struct bench b = {.group = 1};
    if (lossynet_bootstrap(&argc, &argv, &b.world)) return 1;
    lossynet_wire_dtype wire_dtype = LOSSYNET_FLOAT32;
    bool encrypt = false, known = argc >= 6;
    for (int i = 6; i < argc; i++) {
        bool found = strcmp(argv[i], "encrypt") == 0;
        encrypt |= found;
        for (int dtype = LOSSYNET_FLOAT32; dtype <= LOSSYNET_INT4; dtype++) {
            if (strcmp(argv[i], lossynet_wire_dtype_name(dtype)) != 0) continue;
            wire_dtype = (lossynet_wire_dtype)dtype;
            found = true;
        }
        found |= sscanf(argv[i], "group=%d", &b.group) == 1;
        found |= sscanf(argv[i], "threads=%d", &b.threads) == 1;
        known &= found;
    }
    if (!known || atoi(argv[1]) < 1 || b.world.ranks < 2) {
        fprintf(stderr, "usage: mpirun -np RANKS bench_exchange MIB ROUNDS SECONDS INTERFACE GBPS "
                        "[bf16|int8|int6|int4] [encrypt] [group=G] [threads=K]\n");
        lossynet_shutdown(2);
        return 2;
    }
    lossynet_status status =
        open_net(&b, atoi(argv[1]), argv[4], atof(argv[5]), wire_dtype, encrypt);
    const bool shares = b.group > 1;
    if (!status && shares) status = open_group(&b);
    if (!status) status = measure(&b, atoi(argv[2]), atof(argv[3]));
    lossynet_close(b.comm);
    if (!shares) free(b.vector);
    port_close(&b.port);
    free(b.layout.bucket_elements);
    lossynet_shutdown(status ? 1 : 0);
    return status ? 1 : 0;
}
