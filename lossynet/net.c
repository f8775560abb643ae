/* net.c — a net from open to close: settings are checked, everything is allocated, ranks agree.
 *
 * After lossynet_open nothing is allocated any more. What a net holds, for V of N workers in a
 * rank and vectors of P elements in K packets (plus what the link buffers, plus drift samples):
 *
 *     arrival masks    ~ V K bytes           ages         4 V K bytes
 *     weights          a shard's worth per thread
 *     several ranks:   inbox <= 4 V P bytes  (V shards of the N - V remote workers, when all
 *                      owners' shards are of equal size), outgoing masks ~ V K bytes
 */
#include "lossynet/engine.h"

#include <inttypes.h>
#include <math.h>
#include <omp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

const char *lossynet_status_string(lossynet_status status) {
    switch (status) {
    case LOSSYNET_OK:
        return "success";
    case LOSSYNET_INVALID:
        return "invalid argument or setting";
    case LOSSYNET_NO_MEMORY:
        return "out of memory";
    case LOSSYNET_LINK:
        return "the link between ranks failed";
    case LOSSYNET_PROTOCOL:
        return "a peer broke the protocol";
    case LOSSYNET_FILE:
        return "a file could not be read";
    }
    return "unknown status";
}

void lossynet_log(const char *format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    fprintf(stderr, "lossynet: %s\n", line); /* one call: lines of several ranks stay whole */
}

/* ---- memory ---- */

enum { ALIGNMENT = 64 };

int lossynet_memory_fail_after = -1;

void *lossynet_memory_take(size_t count, size_t size) {
    if (lossynet_memory_fail_after >= 0 && lossynet_memory_fail_after-- == 0) return NULL;
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > SIZE_MAX / 2) return NULL;
    bytes = (bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT;
    void *memory = aligned_alloc(ALIGNMENT, bytes);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

/* allocate: NULL for lossynet_memory_take */
static void *take(struct lossynet *net, size_t count, size_t size, void *(*allocate)(size_t)) {
    net->memory_bytes += count * size;
    if (net->measuring || net->out_of_memory) return NULL;
    void *memory = allocate ? allocate(count * size) : lossynet_memory_take(count, size);
    if (!memory) {
        net->out_of_memory = true;
        lossynet_log("rank %d: no memory for %zu x %zu bytes, after %zu MB", net->world.rank, count,
                     size, (net->memory_bytes - count * size) >> 20);
    }
    return memory;
}

void *lossynet_net_take(struct lossynet *net, size_t count, size_t size) {
    return take(net, count, size, NULL);
}

/* ---- names ---- */

static const char *const estimator_names[] = {"mean", "balanced", "ht", "zero"};
static const char *const wire_dtype_names[] = {"float32", "bf16"};
static const char *const link_names[] = {"auto", "mpi", "udp", "verbs"};

static int find(const char *name, const char *const *names, int count) {
    for (int i = 0; i < count; i++)
        if (strcmp(name, names[i]) == 0) return i;
    return -1;
}

bool lossynet_estimator_parse(const char *name, lossynet_estimator *out) {
    int found = find(name, estimator_names, 4);
    if (found >= 0) *out = (lossynet_estimator)found;
    return found >= 0;
}

bool lossynet_link_parse(const char *name, lossynet_link_kind *out) {
    int found = find(name, link_names, 4);
    if (found >= 0) *out = (lossynet_link_kind)found;
    return found >= 0;
}

const char *lossynet_estimator_name(lossynet_estimator estimator) {
    return estimator >= LOSSYNET_MEAN && estimator <= LOSSYNET_ZERO ? estimator_names[estimator]
                                                                    : "unknown";
}

/* ---- settings ---- */

static lossynet_status check_sizes(const struct lossynet_settings *settings) {
    if (settings->buckets < 1 || !settings->bucket_elements) {
        lossynet_log("buckets %d: expected at least 1", settings->buckets);
        return LOSSYNET_INVALID;
    }
    size_t elements = 0;
    for (int b = 0; b < settings->buckets; b++) {
        size_t size = settings->bucket_elements[b];
        if (size == 0 || size > SIZE_MAX / 64 - elements) {
            lossynet_log("bucket %d: %zu elements: expected at least 1, and a sum that fits memory",
                         b, size);
            return LOSSYNET_INVALID;
        }
        elements += size;
    }
    if (settings->packet_bytes % sizeof(float) || settings->packet_bytes > 1u << 30) {
        lossynet_log("packet size %zu bytes: expected a multiple of 4 up to 1 GiB, or 0 for the "
                     "default",
                     settings->packet_bytes);
        return LOSSYNET_INVALID;
    }
    return LOSSYNET_OK;
}

static lossynet_status check(const struct lossynet_world *world,
                             const struct lossynet_settings *settings) {
    if (world->ranks < 1 || world->rank < 0 || world->rank >= world->ranks) {
        lossynet_log("rank %d of %d ranks: expected 0 <= rank < ranks", world->rank, world->ranks);
        return LOSSYNET_INVALID;
    }
    if (settings->workers < 1 || settings->workers > WIRE_WORKERS) {
        lossynet_log("workers %d: expected 1 to %d", settings->workers, WIRE_WORKERS);
        return LOSSYNET_INVALID;
    }
    if (settings->memory && world->ranks > 1) {
        lossynet_log("vectors outside the host's memory: expected 1 rank, got %d", world->ranks);
        return LOSSYNET_INVALID;
    }
    if (settings->workers % world->ranks) {
        lossynet_log("workers %d: expected a multiple of the %d ranks", settings->workers,
                     world->ranks);
        return LOSSYNET_INVALID;
    }
    if (settings->wire_dtype != LOSSYNET_FLOAT32 && settings->wire_dtype != LOSSYNET_BF16) {
        lossynet_log("wire dtype %d: expected float32 or bf16", (int)settings->wire_dtype);
        return LOSSYNET_INVALID;
    }
    if (settings->memory && settings->wire_dtype && !settings->memory->masked_round) {
        lossynet_log("wire dtype bf16, vectors outside the host's memory: expected masked_round");
        return LOSSYNET_INVALID;
    }
    if (settings->estimator < LOSSYNET_MEAN || settings->estimator > LOSSYNET_ZERO) {
        lossynet_log("estimator %d: expected mean, balanced, ht or zero", (int)settings->estimator);
        return LOSSYNET_INVALID;
    }
    if (settings->link < LOSSYNET_LINK_AUTO || settings->link > LOSSYNET_LINK_VERBS) {
        lossynet_log("link %d: expected auto, mpi, udp or verbs", (int)settings->link);
        return LOSSYNET_INVALID;
    }
    if (!(settings->pace_gbps >= 0) || !(settings->peer_timeout >= 0)) {
        lossynet_log("pace %g Gbit/s, peer time-out %g s: expected 0 or more", settings->pace_gbps,
                     settings->peer_timeout);
        return LOSSYNET_INVALID;
    }
    if (!(settings->loss_budget >= 0 && settings->loss_budget < 1) ||
        (settings->loss_budget > 0 && !(settings->pace_gbps > 0))) {
        lossynet_log("loss budget %g at %g Gbit/s: expected a share below 1, and a rate not to be "
                     "exceeded",
                     settings->loss_budget, settings->pace_gbps);
        return LOSSYNET_INVALID;
    }
    if (settings->dscp < 0 || settings->dscp > 63) {
        lossynet_log("traffic class %d: expected a DSCP from 0 to 63", settings->dscp);
        return LOSSYNET_INVALID;
    }
    if (settings->drift_samples < 0) {
        lossynet_log("drift samples %d: expected 0 or more", settings->drift_samples);
        return LOSSYNET_INVALID;
    }
    if (settings->repair[0] < 0 || settings->repair[1] < 0) {
        lossynet_log("repair rounds %d and %d: expected 0 or more", settings->repair[0],
                     settings->repair[1]);
        return LOSSYNET_INVALID;
    }
    if (!(settings->repair_budget >= 0 && settings->repair_budget < INFINITY)) {
        lossynet_log("repair budget %g: expected a share of a phase's packets, or 0 for all",
                     settings->repair_budget);
        return LOSSYNET_INVALID;
    }
    if (settings->carry && settings->estimator != LOSSYNET_MEAN &&
        settings->estimator != LOSSYNET_ZERO) {
        lossynet_log("carry: expected estimator mean or zero");
        return LOSSYNET_INVALID;
    }
    if (settings->carry && settings->memory) {
        lossynet_log("carry: expected vectors in the host's memory");
        return LOSSYNET_INVALID;
    }
    if (settings->multicast && settings->repair[LOSSYNET_PARAMETER]) {
        lossynet_log("multicast: expected no repair of parameters, which goes to single workers");
        return LOSSYNET_INVALID;
    }
    return check_sizes(settings);
}

/* ---- open ---- */

static void take_threads(struct lossynet *net) {
    const struct lossynet_layout *layout = &net->layout;
    size_t workers = (size_t)net->workers, threads = (size_t)net->threads;
    NET_TAKE(net, net->weights, threads * layout->largest_shard_packets * workers);
    NET_TAKE(net, net->senders, threads * workers);
    NET_TAKE(net, net->masks, threads * layout->largest_owner_packets);
}

size_t lossynet_arrived_packets(const struct lossynet *net) {
    size_t packets = 0;
    for (int v = 0; v < net->local; v++)
        packets += lossynet_layout_owner_packets(&net->layout, net->first + v);
    return packets * (size_t)net->workers;
}

uint8_t *lossynet_thread_mask(const struct lossynet *net) {
    return net->masks + (size_t)omp_get_thread_num() * net->layout.largest_owner_packets;
}

static void take_phases(struct lossynet *net) {
    size_t local = (size_t)net->local, workers = (size_t)net->workers;
    NET_TAKE(net, net->arrived, lossynet_arrived_packets(net));
    NET_TAKE(net, net->arrived_start, local);
    NET_TAKE(net, net->history, local);
    NET_TAKE(net, net->inflation, local);
    NET_TAKE(net, net->age, local * net->layout.packets);
    NET_TAKE(net, net->counters[0], local);
    NET_TAKE(net, net->counters[1], local);
    NET_TAKE(net, net->totals, local);
    net->gathered = lossynet_net_take(net, workers, LOSSYNET_GATHERED_BYTES);
    if (net->loss.model == LOSS_BURST || net->loss.model == LOSS_OUTAGE)
        NET_TAKE(net, net->chain, 2 * local * workers);
    if (!net->arrived_start) return;
    for (size_t v = 1; v < local; v++)
        net->arrived_start[v] =
            net->arrived_start[v - 1] +
            lossynet_layout_owner_packets(&net->layout, net->first + (int)v - 1) * workers;
}

static void take_exchange(struct lossynet *net, const struct lossynet_settings *settings,
                          bool multicast) {
    size_t local = (size_t)net->local, workers = (size_t)net->workers;
    size_t remote = workers - local, inbox = 0, outgoing = 0;
    for (size_t v = 0; v < local; v++) {
        inbox += lossynet_layout_owned(&net->layout, net->first + (int)v) * remote;
        outgoing += lossynet_layout_owner_packets(&net->layout, net->first + (int)v) * workers;
    }
    net->release = settings->release;
    net->inbox = take(net, inbox, sizeof *net->inbox, settings->allocate);
    NET_TAKE(net, net->inbox_start, local);
    NET_TAKE(net, net->outgoing[LOSSYNET_GRADIENT], local * net->layout.packets);
    NET_TAKE(net, net->outgoing[LOSSYNET_PARAMETER], outgoing);
    NET_TAKE(net, net->outgoing_start, local);
    if (multicast) NET_TAKE(net, net->incoming, local * net->layout.packets);
    lossynet_engine_take(net, multicast);
    NET_TAKE(net, net->gather_offset, (size_t)net->world.ranks + 1);
    if (!net->gather_offset) return;
    for (size_t v = 1; v < local; v++) {
        int before = net->first + (int)v - 1;
        net->inbox_start[v] =
            net->inbox_start[v - 1] + lossynet_layout_owned(&net->layout, before) * remote;
        net->outgoing_start[v] = net->outgoing_start[v - 1] +
                                 lossynet_layout_owner_packets(&net->layout, before) * workers;
    }
}

static void place(struct lossynet *net, const struct lossynet_world *world, int workers) {
    net->world = *world;
    net->workers = workers;
    net->local = workers / world->ranks;
    net->first = world->rank * net->local;
}

/* Everything but the link and the engine's peers. */
/* What a datagram's header has room for. */
static lossynet_status check_wire(const struct lossynet_layout *layout) {
    if (layout->buckets > WIRE_BUCKETS) {
        lossynet_log("buckets %d: expected at most %d, with more than one rank", layout->buckets,
                     WIRE_BUCKETS);
        return LOSSYNET_INVALID;
    }
    for (int i = 0; i < layout->buckets * layout->workers; i++) {
        size_t packets = layout->shard_packet[i + 1] - layout->shard_packet[i];
        if (packets <= WIRE_PACKETS) continue;
        lossynet_log("bucket %d: %zu packets for one owner: expected at most %d, so larger packets "
                     "(--packet-bytes), more workers or smaller buckets",
                     i / layout->workers, packets, WIRE_PACKETS);
        return LOSSYNET_INVALID;
    }
    return LOSSYNET_OK;
}

static lossynet_status prepare(struct lossynet *net, const struct lossynet_settings *settings,
                               size_t packet_bytes, bool multicast) {
    net->threads = omp_get_max_threads();
    net->estimator = settings->estimator;
    net->return_masks = settings->return_masks || settings->carry;
    memcpy(net->repair.rounds, settings->repair, sizeof net->repair.rounds);
    net->repair.budget = settings->repair_budget;
    if (settings->memory) net->memory = *settings->memory;
    net->weighted_sum =
        settings->weighted_sum ? settings->weighted_sum : lossynet_weighted_sum_plain;

    char why[256];
    struct lossynet_loss_settings loss = settings->loss;
    loss.workers = settings->workers;
    lossynet_status status = lossynet_loss_open(&net->loss, &loss, why, sizeof why);
    if (status) {
        lossynet_log("%s", why);
        return status;
    }
    status = lossynet_layout_open(&net->layout, settings->workers, settings->buckets,
                                  settings->bucket_elements, packet_bytes,
                                  settings->wire_dtype == LOSSYNET_BF16 ? 2 : sizeof(float));
    if (!status && net->world.ranks > 1) status = check_wire(&net->layout);
    if (status) return status;
    size_t table = (size_t)settings->buckets * settings->workers;
    net->memory_bytes += sizeof *net + 4 * table * sizeof(size_t) + net->loss.trace_length +
                         (size_t)net->loss.at_count * sizeof *net->loss.at;

    take_threads(net);
    take_phases(net);
    if (net->world.ranks > 1) take_exchange(net, settings, multicast);
    if (settings->carry) lossynet_carry_open(net);
    lossynet_repair_open(net);
    lossynet_masks_open(
        net, settings->return_masks || settings->carry || settings->repair[LOSSYNET_GRADIENT],
        settings->repair[LOSSYNET_PARAMETER] > 0);
    lossynet_drift_open(net, settings->drift_samples);
    if (net->out_of_memory) return LOSSYNET_NO_MEMORY;
    return lossynet_record_open(net, settings->record_loss);
}

/* What ranks must have in common for their masks to agree. */
static uint64_t fingerprint(const struct lossynet *net, const struct lossynet_settings *settings) {
    const struct lossynet_layout *layout = &net->layout;
    uint64_t hash = lossynet_mix((uint64_t)net->workers);
    for (int i = 0; i <= layout->buckets * net->workers; i++) {
        hash = lossynet_mix(hash ^ layout->shard_element[i]);
        hash = lossynet_mix(hash ^ layout->shard_packet[i]);
    }
    hash = lossynet_mix(hash ^ lossynet_loss_fingerprint(&net->loss));
    hash = lossynet_mix(hash ^ (uint64_t)net->estimator);
    hash = lossynet_mix(hash ^ (uint64_t)settings->drift_samples);
    hash = lossynet_mix(hash ^ (uint64_t)settings->multicast ^ (uint64_t)settings->encrypt << 1);
    hash = lossynet_mix(hash ^ (uint64_t)settings->return_masks ^ (uint64_t)settings->carry << 1);
    hash = lossynet_mix(hash ^ (uint64_t)settings->repair[0] << 32 ^ (uint64_t)settings->repair[1]);
    uint64_t budget;
    memcpy(&budget, &settings->repair_budget, sizeof budget);
    hash = lossynet_mix(hash ^ budget);
    return hash;
}

uint64_t lossynet_random(void) {
    uint64_t run;
    if (getrandom(&run, sizeof run, 0) == (ssize_t)sizeof run) return run;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return lossynet_mix((uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec);
}

/* All ranks make sure that they are set up alike. A rank that could not be set up says so to the
 * others, who would wait for it. */
static lossynet_status agree(struct lossynet *net, const struct lossynet_settings *settings,
                             lossynet_status prepared, lossynet_share share, void *context) {
    struct hello {
        uint64_t prepared, fingerprint, wire_dtype;
    };
    struct hello *hello = lossynet_memory_take((size_t)net->world.ranks, sizeof *hello);
    if (!hello) {
        lossynet_log("rank %d: no memory to greet %d ranks", net->world.rank, net->world.ranks);
        return LOSSYNET_NO_MEMORY;
    }
    hello[net->world.rank].prepared = prepared == LOSSYNET_OK;
    hello[net->world.rank].wire_dtype = settings->wire_dtype;
    if (!prepared) hello[net->world.rank].fingerprint = fingerprint(net, settings);
    lossynet_status status = share(context, &net->world, hello, sizeof *hello);
    for (int r = 0; status == LOSSYNET_OK && r < net->world.ranks; r++) {
        if (!hello[r].prepared || !hello[0].prepared) {
            status = prepared ? prepared : LOSSYNET_LINK;
        } else if (hello[r].wire_dtype != hello[0].wire_dtype) {
            lossynet_log("rank %d was started with --wire-dtype %s, rank 0 with %s: expected the "
                         "same on all ranks",
                         r, wire_dtype_names[hello[r].wire_dtype],
                         wire_dtype_names[hello[0].wire_dtype]);
            status = LOSSYNET_INVALID;
        } else if (hello[r].fingerprint != hello[0].fingerprint) {
            lossynet_log("rank %d was started with other settings than rank 0: expected the same "
                         "workers, buckets, packets, estimator, seed and loss",
                         r);
            status = LOSSYNET_INVALID;
        }
    }
    free(hello);
    return status;
}

/* Ranks meet, learn what a packet can carry, allocate, and begin to listen. */
static lossynet_status join(struct lossynet *net, const struct lossynet_settings *settings,
                            lossynet_link_open link_open, lossynet_share share, void *context) {
    lossynet_status status = lossynet_engine_open(net, settings, link_open, share, context);
    if (status) return status;
    net->memory_bytes += net->link->memory_bytes;
    if (settings->encrypt) net->memory_bytes += lossynet_secure_memory(net->world.ranks);
    net->run = net->engine->run;
    size_t packet_bytes = settings->packet_bytes;
    if (!packet_bytes)
        packet_bytes = net->engine->payload_most - (settings->encrypt ? LOSSYNET_SECURE_BYTES : 0);
    status = prepare(net, settings, packet_bytes, net->engine->multicast);
    status = agree(net, settings, status, share, context);
    if (status) return status;
    lossynet_stream_open(net, LOSSYNET_GRADIENT, false);
    return lossynet_engine_start(net);
}

lossynet_status lossynet_net_open(const struct lossynet_world *world,
                                  const struct lossynet_settings *settings,
                                  lossynet_link_open link_open, lossynet_share share,
                                  void *share_context, struct lossynet **out) {
    *out = NULL;
    lossynet_status status = check(world, settings);
    if (status) return status;
    struct lossynet *net = lossynet_memory_take(1, sizeof *net);
    if (!net) {
        lossynet_log("no memory for a net");
        return LOSSYNET_NO_MEMORY;
    }
    place(net, world, settings->workers);
    if (world->ranks > 1)
        status = join(net, settings, link_open, share, share_context);
    else
        status = prepare(net, settings,
                         settings->packet_bytes ? settings->packet_bytes : LOSSYNET_PAYLOAD_DEFAULT,
                         false);
    if (status)
        lossynet_close(net);
    else
        *out = net;
    return status;
}

static lossynet_link_open link_of(lossynet_link_kind kind) {
    return kind == LOSSYNET_LINK_UDP     ? lossynet_link_udp_open
           : kind == LOSSYNET_LINK_VERBS ? lossynet_link_verbs_open
                                         : lossynet_link_mpi_open;
}

/* auto: RDMA where every rank has it, else UDP. Collective. */
static lossynet_status choose_link(const struct lossynet_world *world, lossynet_link_kind *kind) {
    size_t ranks = (size_t)world->ranks;
    bool *all = lossynet_memory_take(ranks, sizeof *all), every = true;
    if (!all) {
        lossynet_log("rank %d: no memory to ask %zu ranks for RDMA", world->rank, ranks);
        return LOSSYNET_NO_MEMORY;
    }
    all[world->rank] = lossynet_link_verbs_available();
    lossynet_status status = lossynet_share_mpi(NULL, world, all, sizeof *all);
    for (size_t r = 0; r < ranks; r++) every &= all[r];
    *kind = every ? LOSSYNET_LINK_VERBS : LOSSYNET_LINK_UDP;
    free(all);
    return status;
}

lossynet_status lossynet_link_choose(const struct lossynet_world *world, lossynet_link_kind kind,
                                     lossynet_link_open *out) {
    lossynet_status status = LOSSYNET_OK;
    if (kind == LOSSYNET_LINK_AUTO && world->ranks > 1) status = choose_link(world, &kind);
    *out = link_of(kind);
    return status;
}

lossynet_status lossynet_open(const struct lossynet_world *world,
                              const struct lossynet_settings *settings, struct lossynet **out) {
    *out = NULL;
    lossynet_link_open link_open;
    lossynet_status status = check(world, settings);
    if (!status) status = lossynet_link_choose(world, settings->link, &link_open);
    if (status) return status;
    return lossynet_net_open(world, settings, link_open, lossynet_share_mpi, NULL, out);
}

void lossynet_close(struct lossynet *net) {
    if (!net) return;
    lossynet_engine_close(net);
    lossynet_record_close(net);
    lossynet_drift_close(net);
    lossynet_repair_close(net);
    lossynet_carry_close(net);
    lossynet_masks_close(net);
    free(net->gather_offset);
    free(net->incoming);
    free(net->outgoing_start);
    free(net->outgoing[1]);
    free(net->outgoing[0]);
    free(net->inbox_start);
    (net->release ? net->release : free)(net->inbox);
    free(net->chain);
    free(net->gathered);
    free(net->totals);
    free(net->counters[1]);
    free(net->counters[0]);
    free(net->age);
    free(net->inflation);
    free(net->history);
    free(net->arrived_start);
    free(net->arrived);
    free(net->masks);
    free(net->senders);
    free(net->weights);
    lossynet_layout_close(&net->layout);
    lossynet_loss_close(&net->loss);
    free(net);
}

/* ---- queries ---- */

const char *lossynet_link_name(const struct lossynet *net) {
    return net->link ? net->link->name : "memory";
}

bool lossynet_overlaps(const struct lossynet *net) {
    return net->engine && net->engine->threaded;
}

static bool register_memory(struct lossynet *net, const float *vector,
                            const struct lossynet_device_memory *device) {
    if (!net->link || !net->link->register_memory || net->engine->secure ||
        lossynet_rounds(&net->layout))
        return false;
    lossynet_engine_enter(net);
    bool done = net->link->register_memory(net->link, vector, net->layout.elements * sizeof *vector,
                                           device);
    lossynet_engine_leave(net);
    return done;
}

bool lossynet_register(struct lossynet *net, const float *vector) {
    return register_memory(net, vector, NULL);
}

bool lossynet_register_device(struct lossynet *net, int worker, const float *vector,
                              const float *there, const struct lossynet_device_memory *device) {
    if (!net->link || net->carry.residual) return false;
    if (!net->link->checks_payload) {
        if (net->world.rank == 0)
            lossynet_log("link %s does not read a GPU's memory: gradients go through the host's",
                         net->link->name);
        return false;
    }
    if (!register_memory(net, there, device)) return false;
    lossynet_engine_enter(net);
    net->engine->elsewhere[worker - net->first] = (struct lossynet_elsewhere){vector, there};
    lossynet_engine_leave(net);
    return true;
}

size_t lossynet_memory_bytes(const struct lossynet *net) {
    return net->memory_bytes;
}

size_t lossynet_memory_needed(const struct lossynet_world *world,
                              const struct lossynet_settings *settings) {
    if (check(world, settings)) return 0;
    struct lossynet *net = lossynet_memory_take(1, sizeof *net);
    if (!net) return 0;
    net->measuring = true;
    size_t bytes = 0, packet_bytes = settings->packet_bytes;
    bool udp = settings->link == LOSSYNET_LINK_UDP && world->ranks > 1;
    size_t trailer = settings->encrypt && world->ranks > 1 ? LOSSYNET_SECURE_BYTES : 0;
    if (!packet_bytes)
        packet_bytes = (udp ? LOSSYNET_UDP_PACKET_BYTES : LOSSYNET_PAYLOAD_DEFAULT) - trailer;
    place(net, world, settings->workers);
    if (prepare(net, settings, packet_bytes, settings->multicast) == LOSSYNET_OK) {
        bytes = net->memory_bytes;
        if (world->ranks > 1) {
            bytes += sizeof(struct lossynet_engine);
            bytes += (size_t)world->ranks * sizeof(struct lossynet_peer);
            if (trailer)
                bytes += lossynet_secure_memory(world->ranks) +
                         LOSSYNET_BATCH * (packet_bytes + trailer);
            bytes += (settings->link == LOSSYNET_LINK_UDP ? lossynet_link_udp_memory
                      : settings->link == LOSSYNET_LINK_VERBS
                          ? lossynet_link_verbs_memory
                          : lossynet_link_mpi_memory)(world->ranks, packet_bytes);
        }
    }
    lossynet_close(net);
    return bytes;
}

/* ---- steps ---- */

lossynet_status lossynet_step_begin(struct lossynet *net, uint64_t step) {
    __atomic_store_n(&net->step, step, __ATOMIC_RELAXED); /* lossynet_engine_step */
    memset(net->counters[step % 2], 0, (size_t)net->local * sizeof **net->counters);
    return LOSSYNET_OK;
}
