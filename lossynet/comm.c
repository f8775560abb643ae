/* comm.c — opens and closes a comm: checks settings, allocates all memory, and makes ranks agree.
 *
 * After lossynet_open nothing is allocated any more. A rank with V of N workers, and vectors of P
 * elements in K packets, holds this memory (plus link buffers and drift samples):
 *
 *     arrival masks    ~ V K bytes           ages         4 V K bytes
 *     weights          those of one shard per thread; of all packets, if the host cannot access the
 *                      vectors
 *     several ranks:   inbox <= 4 V P bytes  (V shards of the N - V remote workers, if all
 *                      owners' shards are of equal size; 2 V P with vectors of bf16), outgoing
 *                      masks ~ V K bytes; with int8 to int4 the packets that it owns, V P / N bytes
 *     error feedback:  residuals 2 V P bytes (with skip_late 4 V P), masses 4 V K bytes
 */
#include "lossynet/comm.h"
#include "lossynet/algorithm/calls.h"
#include "lossynet/crypto/crypto.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- open ---- */

static void take_averaging(struct lossynet_comm *comm) {
    struct ln_averaging *averaging = &comm->averaging;
    const size_t groups = (size_t)comm->partition.groups.count;
    const size_t threads = (size_t)comm->resources.threads;
    const size_t packets = comm->resources.memory.average
                               ? comm->partition.packets
                               : threads * comm->partition.largest_shard_packets;
    COMM_TAKE(comm, averaging->weights, packets * groups);
    if (comm->resources.bf16)
        COMM_TAKE(comm, averaging->senders.bf16, threads * groups);
    else
        COMM_TAKE(comm, averaging->senders.float32, threads * groups);
    COMM_TAKE(comm, comm->resources.keys, (size_t)comm->workers.local);
}

static void take_stats(struct lossynet_comm *comm) {
    struct ln_stats *stats = &comm->stats;
    stats->step[0] = stats->step[1] = LN_NO_STEP;
    COMM_TAKE(comm, stats->counters[0], (size_t)comm->workers.local);
    COMM_TAKE(comm, stats->counters[1], (size_t)comm->workers.local);
    for (int i = 0; i < 2; i++)
        COMM_TAKE(comm, stats->buckets[i],
                  (size_t)comm->workers.local * (size_t)comm->partition.buckets);
    COMM_TAKE(comm, stats->totals, (size_t)comm->workers.local);
    COMM_TAKE(comm, stats->gathered, (size_t)comm->workers.count);
    if (comm->world.ranks > 1) COMM_TAKE(comm, stats->gather_offset, (size_t)comm->world.ranks + 1);
}

static void place(struct lossynet_comm *comm, const struct lossynet_world *world, int workers) {
    comm->world = *world;
    comm->resources.pool.rank = world->rank;
    comm->workers.count = workers;
    comm->workers.local = workers / world->ranks;
    comm->workers.first = world->rank * comm->workers.local;
}

/* Checks that buckets and packet numbers fit into a datagram's header. */
static lossynet_status check_wire(const struct ln_partition *partition) {
    if (partition->buckets > WIRE_BUCKETS)
        return ln_refuse("buckets %d: expected at most %d, with more than one rank",
                         partition->buckets, WIRE_BUCKETS);
    for (int i = 0; i < partition->buckets * partition->workers; i++) {
        size_t packets = partition->shard_packet[i + 1] - partition->shard_packet[i];
        if (packets <= WIRE_PACKETS) continue;
        return ln_refuse(
            "bucket %d: %zu packets for one owner: expected at most %d, so larger packets "
            "(packet_bytes), more workers or smaller buckets",
            i / partition->workers, packets, WIRE_PACKETS);
    }
    return LOSSYNET_OK;
}

/* Checks that a replay's record has the packets of this run. */
static lossynet_status check_replay(const struct lossynet_comm *comm,
                                    const struct lossynet_settings *settings) {
    const int workers = comm->partition.workers;
    size_t *packets = ln_memory_take((size_t)workers, sizeof *packets);
    if (!packets) return ln_fail(LOSSYNET_NO_MEMORY, "no memory for the replay");
    for (int w = 0; w < workers; w++) packets[w] = ln_partition_owner_packets(&comm->partition, w);
    const lossynet_status status =
        ln_loss_replay_fits(comm->loss.replay, packets, workers, settings->error_feedback);
    free(packets);
    return status;
}

/* Bytes of a full packet's payload, over a link that has room for `room`. */
static size_t payload_for(const struct lossynet_settings *settings, size_t room) {
    return settings->packet_bytes ? settings->packet_bytes
                                  : ln_payload_default(settings->wire_dtype, room);
}

/* The ranks of a host share its processors, unless somebody chose a number of threads. Otherwise the
 * threads of a rank that wait for one another hold up the other ranks. */
static int threads_for(const struct lossynet_comm *comm) {
    const int threads = omp_get_max_threads(), sharing = comm->world.local_ranks;
    if (sharing < 2 || getenv("OMP_NUM_THREADS") || threads != omp_get_num_procs()) return threads;
    return threads > sharing ? threads / sharing : 1;
}

static lossynet_status prepare(struct lossynet_comm *comm, const struct lossynet_settings *settings,
                               size_t packet_bytes) {
    comm->resources.threads = threads_for(comm);
    comm->averaging.estimator = settings->estimator;
    comm->lead.wanted = settings->lead;
    if (settings->memory) comm->resources.memory = *settings->memory;
    comm->resources.bf16 = settings->vector_dtype == LOSSYNET_BF16;
    comm->averaging.whole = settings->weighted_sum_whole;
    comm->averaging.weighted_sum =
        settings->weighted_sum ? settings->weighted_sum : ln_weighted_sum_plain;
    comm->averaging.weighted_sum_bf16 =
        settings->weighted_sum_bf16 ? settings->weighted_sum_bf16 : ln_weighted_sum_bf16_plain;

    lossynet_status status = ln_loss_open(&comm->loss, &settings->loss, settings->workers);
    if (status) return status;
    status = ln_partition_open(&comm->partition, settings->workers,
                               settings->group > 1 ? settings->group : 1, settings->buckets,
                               settings->bucket_elements, settings->shard_elements, packet_bytes,
                               settings->wire_dtype);
    if (!status && comm->world.ranks > 1) status = check_wire(&comm->partition);
    if (status) return status;
    if (comm->loss.replay && !comm->resources.pool.measuring) status = check_replay(comm, settings);
    if (status) return status;
    status = ln_names_open(comm, settings);
    if (status) return status;
    size_t table = (size_t)settings->buckets * settings->workers;
    comm->resources.pool.bytes += sizeof *comm + 4 * table * sizeof(size_t) +
                                  comm->loss.trace_length +
                                  (size_t)comm->loss.at.count * sizeof *comm->loss.at.entry;

    take_averaging(comm);
    ln_rule_open(comm, settings->rule);
    take_stats(comm);
    if (settings->error_feedback && (comm->steps.skips || comm->loss.replay))
        ln_unconfirmed_open(comm);
    ln_rounds_open(comm, settings);
    const bool tells[2] = {settings->error_feedback || ln_rounds_most(comm, LOSSYNET_GRADIENT),
                           ln_rounds_most(comm, LOSSYNET_PARAMETER) != 0};
    ln_arrivals_open(comm);
    if (tells[0] || tells[1]) ln_acknowledge_open(comm, tells[0], tells[1]);
    if (comm->world.ranks > 1) ln_exchange_open(comm, settings->allocate, settings->release);
    if (settings->error_feedback) ln_feedback_open(comm);
    ln_retransmission_open(comm);
    ln_drift_open(comm, settings->drift_samples);
    ln_not_finite_open(comm);
    ln_aside_open(comm);
    if (settings->acknowledge_later && settings->error_feedback && comm->world.ranks > 1 &&
        !comm->steps.skips)
        ln_acknowledge_open_later(comm, comm->stats.aside.room * (size_t)comm->workers.local);
    if (comm->resources.pool.out_of_memory) return LOSSYNET_NO_MEMORY;
    if (!settings->record_loss || comm->resources.pool.measuring) return LOSSYNET_OK;
    return ln_loss_trace_open(settings->record_loss, settings->loss.model, &comm->world,
                              &comm->arrivals.trace);
}

/* A hash of settings that must be the same on all ranks, so that their masks agree. */
static uint64_t fingerprint(const struct lossynet_comm *comm,
                            const struct lossynet_settings *settings) {
    const struct ln_partition *partition = &comm->partition;
    uint64_t hash = ln_mix((uint64_t)comm->workers.count);
    for (int i = 0; i <= partition->buckets * comm->workers.count; i++) {
        hash = ln_mix(hash ^ partition->shard_element[i]);
        hash = ln_mix(hash ^ partition->shard_packet[i]);
    }
    hash = ln_mix(hash ^ (uint64_t)partition->groups.size);
    hash = ln_mix(hash ^ ln_loss_fingerprint(&comm->loss));
    hash = ln_mix(hash ^ (uint64_t)comm->averaging.estimator);
    hash = ln_mix(hash ^ (uint64_t)settings->drift_samples);
    hash = ln_mix(hash ^ (uint64_t)settings->network.encrypt << 1 ^ (uint64_t)settings->lead << 2 ^
                  (uint64_t)settings->network.skip_late << 3);
    hash = ln_mix(hash ^ (uint64_t)settings->error_feedback << 1 ^
                  (uint64_t)settings->acknowledge_later << 2);
    hash = ln_mix(hash ^ (uint64_t)(uint32_t)settings->retransmission_rounds[0] << 32 ^
                  (uint64_t)(uint32_t)settings->retransmission_rounds[1]);
    hash =
        ln_at_fingerprint(&comm->arrivals.names.rounds, hash) + ln_rule_fingerprint(settings->rule);
    uint64_t budget;
    memcpy(&budget, &settings->retransmission_budget, sizeof budget);
    hash = ln_mix(hash ^ budget);
    return hash;
}

/* Checks that all ranks have the same settings. A rank that could not be set up tells the others,
 * because they would otherwise wait for it. */
static lossynet_status agree(struct lossynet_comm *comm, const struct lossynet_settings *settings,
                             lossynet_status prepared) {
    struct hello {
        uint64_t prepared, fingerprint, wire_dtype;
    };
    struct hello *hello = ln_memory_take((size_t)comm->world.ranks, sizeof *hello);
    if (!hello)
        return ln_fail(LOSSYNET_NO_MEMORY, "rank %d: no memory to greet %d ranks", comm->world.rank,
                       comm->world.ranks);
    hello[comm->world.rank].prepared = prepared == LOSSYNET_OK;
    hello[comm->world.rank].wire_dtype = settings->wire_dtype;
    if (!prepared) hello[comm->world.rank].fingerprint = fingerprint(comm, settings);
    lossynet_status status = ln_share(&comm->world, hello, sizeof *hello);
    for (int r = 0; status == LOSSYNET_OK && r < comm->world.ranks; r++) {
        if (!hello[r].prepared || !hello[0].prepared) {
            status = prepared ? prepared : LOSSYNET_LINK;
        } else if (hello[r].wire_dtype != hello[0].wire_dtype) {
            ln_log("rank %d was started with wire dtype %s, rank 0 with %s: expected the "
                   "same on all ranks",
                   r, lossynet_wire_dtype_name((int)hello[r].wire_dtype),
                   lossynet_wire_dtype_name((int)hello[0].wire_dtype));
            status = LOSSYNET_INVALID;
        } else if (hello[r].fingerprint != hello[0].fingerprint) {
            ln_log("rank %d was started with other settings than rank 0: expected the same "
                   "workers, buckets, packets, estimator, seed, loss and trace of losses",
                   r);
            status = LOSSYNET_INVALID;
        }
    }
    free(hello);
    return status;
}

/* With several ranks: meets the others, learns the link's packet size, allocates, and opens the
 * first GRADIENT phase for receiving. */
static lossynet_status join(struct lossynet_comm *comm, const struct lossynet_settings *settings,
                            ln_link_open link_open) {
    int rounds[2];
    for (int phase = 0; phase < 2; phase++)
        rounds[phase] = ln_rounds_most_of(settings, (lossynet_phase)phase);
    const struct ln_transport_settings transport = {
        .world = comm->world,
        .packet_bytes = settings->packet_bytes,
        .network = settings->network,
        .log = comm->resources.log,
        .late_comes = settings->error_feedback,
        .pulses =
            1 + settings->error_feedback + rounds[LOSSYNET_GRADIENT] + rounds[LOSSYNET_PARAMETER],
        .phases = {1 + rounds[LOSSYNET_GRADIENT], 1 + rounds[LOSSYNET_PARAMETER]},
    };
    lossynet_status status = ln_transport_open(&transport, link_open, &comm->transport);
    if (status) return status;
    const struct ln_transport_facts facts = ln_transport_facts(comm->transport);
    comm->resources.pool.bytes += facts.bytes;
    comm->exchange.reliable = facts.reliable;
    comm->exchange.lanes = facts.threads;
    comm->steps.skips = settings->network.skip_late && !facts.reliable;
    status = prepare(comm, settings, payload_for(settings, facts.payload_most));
    status = agree(comm, settings, status);
    if (status) return status;
    ln_transport_receive_begin(comm->transport, LOSSYNET_GRADIENT);
    return ln_transport_start(comm->transport);
}

static struct ln_log_target target_of(const struct lossynet_settings *settings) {
    return (struct ln_log_target){settings->log, settings->log_context};
}

static lossynet_status open_over(const struct lossynet_world *world,
                                 const struct lossynet_settings *settings, ln_link_open link_open,
                                 struct lossynet_comm **out) {
    lossynet_status status = ln_settings_check(world, settings);
    if (!status && !link_open && settings->link == LOSSYNET_LINK_MPI &&
        world->share != ln_bootstrap_share)
        status = ln_refuse("link mpi: expected ranks that MPI started; ranks that met otherwise "
                           "take link udp or verbs");
    if (!status && !link_open && world->ranks > 1)
        status = ln_link_choose(world, settings->link, &link_open);
    if (status) return status;
    struct lossynet_comm *comm = ln_memory_take(1, sizeof *comm);
    if (!comm) return ln_fail(LOSSYNET_NO_MEMORY, "no memory for a comm");
    comm->resources.log = target_of(settings);
    place(comm, world, settings->workers);
    if (world->ranks > 1)
        status = join(comm, settings, link_open);
    else
        status = prepare(comm, settings, payload_for(settings, LOSSYNET_PAYLOAD_DEFAULT));
    if (status)
        lossynet_close(comm);
    else
        *out = comm;
    return status;
}

lossynet_status ln_comm_open(const struct lossynet_world *world,
                             const struct lossynet_settings *settings, ln_link_open link_open,
                             struct lossynet_comm **out) {
    const struct ln_log_target log = target_of(settings), *before = ln_log_use(&log);
    *out = NULL;
    lossynet_status status = open_over(world, settings, link_open, out);
    ln_log_use(before);
    return status;
}

lossynet_status lossynet_open(const struct lossynet_world *world,
                              const struct lossynet_settings *settings,
                              struct lossynet_comm **out) {
    LN_EXPECT(NULL, world && settings && out, LN_NO_SETTINGS);
    const struct lossynet_world meeting = ln_bootstrap_world(world);
    return ln_comm_open(&meeting, settings, NULL, out);
}

void lossynet_close(struct lossynet_comm *comm) {
    if (!comm) return;
    const struct ln_log_target log = comm->resources.log, *before = ln_log_use(&log);
    ln_transport_close(comm->transport);
    ln_not_finite_log(comm);
    ln_arrivals_close(comm);
    ln_at_close(&comm->arrivals.names.rounds);
    free(comm->resources.shard);
    ln_pool_close(&comm->resources.pool);
    ln_partition_close(&comm->partition);
    ln_loss_close(&comm->loss);
    free(comm);
    ln_log_use(before);
}

/* ---- queries ---- */

void lossynet_shard(const struct lossynet_comm *comm, int worker, int bucket, size_t *offset,
                    size_t *count) {
    COMM_DEMAND(comm, COMM_WORKER(comm, worker));
    COMM_DEMAND(comm, COMM_BUCKET(comm, bucket));
    COMM_DEMAND(comm, offset && count, LN_NO_OUTPUT);
    ln_shard_span(&comm->partition, worker, bucket, offset, count);
}

void lossynet_group(const struct lossynet_comm *comm, int worker, int *first, int *size) {
    COMM_DEMAND(comm, COMM_WORKER(comm, worker));
    COMM_DEMAND(comm, first && size, LN_NO_OUTPUT);
    *size = comm->partition.groups.size;
    *first = worker / *size * *size;
}

bool lossynet_is_partner_of(const struct lossynet_comm *comm, int worker, int owner) {
    COMM_DEMAND(comm, COMM_WORKER(comm, worker));
    COMM_DEMAND(comm, COMM_WORKER(comm, owner));
    return ln_is_partner(&comm->partition, worker, owner);
}

size_t lossynet_owned_elements(const struct lossynet_comm *comm, int worker) {
    COMM_DEMAND(comm, COMM_WORKER(comm, worker));
    return ln_partition_owned(&comm->partition, worker);
}

void lossynet_packet_places(const struct lossynet_comm *comm, struct lossynet_packet_place *out) {
    COMM_DEMAND(comm, out, LN_NO_OUTPUT);
    const struct ln_partition *partition = &comm->partition;
    for (int owner = 0; owner < partition->workers; owner++) {
        size_t owned = 0;
        for (struct ln_place p = {0}; ln_next_place(partition, owner, &p); owned += p.count)
            *out++ = (struct lossynet_packet_place){p.offset, owned, (uint32_t)p.count, owner};
    }
}

int lossynet_partners_of(const struct lossynet_comm *comm, int owner, int32_t *out) {
    COMM_DEMAND(comm, COMM_WORKER(comm, owner));
    const int groups = comm->partition.groups.count;
    for (int g = 0; out && g < groups; g++) out[g] = ln_partner(&comm->partition, owner, g);
    return groups;
}

size_t lossynet_packets(const struct lossynet_comm *comm) {
    LN_DEMAND(NULL, comm, LN_NO_COMM);
    return comm->partition.packets;
}

size_t lossynet_packet_bytes(const struct lossynet_comm *comm) {
    LN_DEMAND(NULL, comm, LN_NO_COMM);
    return ln_payload_bytes(comm->partition.dtype[LOSSYNET_PARAMETER],
                            comm->partition.packet_elements);
}

const char *lossynet_link_name(const struct lossynet_comm *comm) {
    LN_DEMAND(NULL, comm, LN_NO_COMM);
    return comm->transport ? ln_transport_facts(comm->transport).link : "memory";
}

bool lossynet_overlaps(const struct lossynet_comm *comm) {
    LN_DEMAND(NULL, comm, LN_NO_COMM);
    return comm->transport && ln_transport_facts(comm->transport).threaded;
}

bool lossynet_register(struct lossynet_comm *comm, const float *vector, size_t count) {
    COMM_DEMAND(comm, vector || !count, "expected a vector, got NULL");
    if (!comm->transport || ln_rounds_vectors(comm)) return false;
    return ln_transport_register(comm->transport, vector, count * ln_element_bytes(comm));
}

size_t lossynet_memory_bytes(const struct lossynet_comm *comm) {
    LN_DEMAND(NULL, comm, LN_NO_COMM);
    return comm->resources.pool.bytes;
}

static size_t memory_needed(const struct lossynet_world *world,
                            const struct lossynet_settings *settings) {
    if (ln_settings_check(world, settings)) return 0;
    struct lossynet_comm *comm = ln_memory_take(1, sizeof *comm);
    if (!comm) return 0;
    comm->resources.pool.measuring = true;
    size_t bytes = 0;
    bool udp = settings->link == LOSSYNET_LINK_UDP && world->ranks > 1;
    size_t trailer = settings->network.encrypt && world->ranks > 1 ? LOSSYNET_SECURE_BYTES : 0;
    const size_t packet = payload_for(
        settings, (udp ? LOSSYNET_UDP_PACKET_BYTES : LOSSYNET_PAYLOAD_DEFAULT) - trailer);
    place(comm, world, settings->workers);
    comm->steps.skips = settings->network.skip_late && world->ranks > 1;
    const size_t threads = settings->link != LOSSYNET_LINK_MPI && settings->network.threads > 1
                               ? (size_t)settings->network.threads
                               : 1;
    comm->exchange.lanes = threads;
    if (prepare(comm, settings, packet) == LOSSYNET_OK) {
        bytes = comm->resources.pool.bytes;
        if (world->ranks > 1) {
            bytes += threads * ln_transport_memory(world->ranks, packet, settings->network.encrypt);
            bytes += threads * (settings->link == LOSSYNET_LINK_UDP ? ln_link_udp_memory
                                : settings->link == LOSSYNET_LINK_VERBS
                                    ? ln_link_verbs_memory
                                    : ln_link_mpi_memory)(world->ranks, packet);
        }
    }
    lossynet_close(comm);
    return bytes;
}

size_t lossynet_memory_needed(const struct lossynet_world *world,
                              const struct lossynet_settings *settings) {
    LN_DEMAND(NULL, world && settings, LN_NO_SETTINGS);
    const struct ln_log_target log = target_of(settings), *before = ln_log_use(&log);
    const size_t bytes = memory_needed(world, settings);
    ln_log_use(before);
    return bytes;
}

/* ---- before a run: the key, the network ---- */

lossynet_status lossynet_key_proof(const char *key_file, const char *text, char proof[65]) {
    LN_EXPECT(NULL, key_file && text && proof,
              "expected a key file, a text and memory for a proof");
    struct ln_key key;
    uint8_t bytes[LOSSYNET_PROOF_BYTES];
    const bool known =
        ln_key_read(key_file, -1, &key) && ln_key_proof_of(&key, text, strlen(text), bytes);
    explicit_bzero(&key, sizeof key);
    for (size_t i = 0; known && i < sizeof bytes; i++)
        snprintf(proof + 2 * i, 3, "%02x", (unsigned)bytes[i]);
    return known ? LOSSYNET_OK : LOSSYNET_PROTOCOL;
}

lossynet_status lossynet_probe(const struct lossynet_world *world,
                               const struct lossynet_settings *settings, const int *node,
                               double seconds, struct lossynet_path *out, const char **link_name) {
    LN_EXPECT(NULL, world && settings && node && out && link_name, LN_NO_SETTINGS);
    LN_EXPECT(NULL, seconds > 0, "%g s: expected a time above 0", seconds);
    const struct ln_transport_settings transport = {
        .world = ln_bootstrap_world(world),
        .packet_bytes = settings->packet_bytes,
        .network = {.interface = settings->network.interface,
                    .ports = {settings->network.ports[0], settings->network.ports[1]},
                    .pace_gbps = settings->network.pace_gbps},
        .log = target_of(settings)};
    ln_link_open link_open;
    const bool named = settings->link || transport.network.interface || transport.network.ports[0];
    *link_name = "memory";
    *out = (struct lossynet_path){0};
    if (world->ranks < 2 && (!named || settings->link == LOSSYNET_LINK_MPI)) return LOSSYNET_OK;
    const struct ln_log_target *before = ln_log_use(&transport.log);
    lossynet_status status = ln_link_choose(&transport.world, settings->link, &link_open);
    if (!status) status = ln_transport_probe(&transport, link_open, node, seconds, out, link_name);
    ln_log_use(before);
    return status;
}
