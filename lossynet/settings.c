/* settings.c — names of settings, and checks that their values make sense. */
#include "lossynet/comm.h"
#include "lossynet/lossynet_trainer.h"

#include <math.h>

const char *lossynet_status_string(lossynet_status status) {
    static const char *const texts[] = {
        [LOSSYNET_OK] = "success",
        [LOSSYNET_INVALID] = "invalid argument or setting",
        [LOSSYNET_NO_MEMORY] = "out of memory",
        [LOSSYNET_LINK] = "the link between ranks failed",
        [LOSSYNET_PROTOCOL] = "a peer broke the protocol",
        [LOSSYNET_FILE] = "a file could not be read",
        [LOSSYNET_ELSEWHERE] = "another rank waits in another collective call",
    };
    return (size_t)status < sizeof texts / sizeof *texts ? texts[status] : "unknown status";
}

/* ---- names ---- */

const char *const ln_estimator_names[] = {"mean", "balanced", "zero", NULL};
const char *const ln_link_names[] = {"auto", "mpi", "udp", "verbs", NULL};
const char *const ln_wire_dtype_names[] = {"float32", "bf16", "int8", "int6", "int4", "auto", NULL};

const char *lossynet_estimator_name(lossynet_estimator estimator) {
    return estimator >= LOSSYNET_MEAN && estimator <= LOSSYNET_ZERO ? ln_estimator_names[estimator]
                                                                    : "unknown";
}

const char *lossynet_wire_dtype_name(int wire_dtype) {
    return wire_dtype >= LOSSYNET_FLOAT32 && wire_dtype <= LOSSYNET_WIRE_AUTO
               ? ln_wire_dtype_names[wire_dtype]
               : "unknown";
}

/* ---- settings ---- */

static lossynet_status check_vectors(const struct lossynet_settings *settings) {
    if (settings->vector_dtype == LOSSYNET_FLOAT32) return LOSSYNET_OK;
    if (settings->vector_dtype != LOSSYNET_BF16)
        return ln_refuse("vector dtype %d: expected float32 or bf16", (int)settings->vector_dtype);
    if (settings->wire_dtype == LOSSYNET_FLOAT32)
        return ln_refuse(
            "vectors of bf16, wire dtype float32: expected wire dtype bf16, int8, int6 or int4");
    if (settings->memory) return ln_refuse("vectors of bf16: expected them in the host's memory");
    if (settings->error_feedback) return ln_refuse("carry: expected vectors of float32, got bf16");
    return LOSSYNET_OK;
}

/* Whether shards make up a bucket of this size. */
static bool make_up(const size_t *shard, int workers, size_t size) {
    for (int w = 0; w < workers; w++) {
        if (shard[w] > size) return false;
        size -= shard[w];
    }
    return size == 0;
}

static lossynet_status check_sizes(const struct lossynet_settings *settings) {
    if (settings->buckets < 1 || !settings->bucket_elements)
        return ln_refuse("buckets %d: expected at least 1", settings->buckets);
    size_t elements = 0;
    for (int b = 0; b < settings->buckets; b++) {
        size_t size = settings->bucket_elements[b];
        if (size == 0 || size > SIZE_MAX / 64 - elements)
            return ln_refuse(
                "bucket %d: %zu elements: expected at least 1, and a sum that fits memory", b,
                size);
        elements += size;
        const size_t first = (size_t)b * (size_t)settings->workers;
        if (settings->shard_elements &&
            !make_up(settings->shard_elements + first, settings->workers, size))
            return ln_refuse("bucket %d: expected shards of %zu elements in all", b, size);
    }
    if (settings->tensor_count < 0 || (settings->tensor_count && !settings->tensors))
        return ln_refuse("tensors %d: expected 0 or more, and where they lie",
                         settings->tensor_count);
    for (int t = 0; t < settings->tensor_count; t++) {
        const struct lossynet_tensor *tensor = &settings->tensors[t];
        if (tensor->name && tensor->first <= elements && tensor->count <= elements - tensor->first)
            continue;
        return ln_refuse(
            "tensor %s: %zu elements from %zu: expected a name, and a part of the vector of %zu",
            tensor->name ? tensor->name : "without a name", tensor->count, tensor->first, elements);
    }
    if (settings->packet_bytes % sizeof(float) || settings->packet_bytes > 1u << 30)
        return ln_refuse(
            "packet size %zu bytes: expected a multiple of 4 up to 1 GiB, or 0 for the "
            "default",
            settings->packet_bytes);
    return LOSSYNET_OK;
}

static lossynet_status check_group(const struct lossynet_world *world,
                                   const struct lossynet_settings *settings) {
    const int group = settings->group, local = settings->workers / world->ranks;
    if (group == 0 || group == 1) return LOSSYNET_OK;
    if (group < 0 || settings->workers % group)
        return ln_refuse("group %d: expected a number that divides the %d workers", group,
                         settings->workers);
    if (world->ranks > 1 && local > 1 && local % group)
        return ln_refuse(
            "group %d: expected one worker in each rank, or whole groups, got %d workers "
            "in each",
            group, local);
    if (settings->network.skip_late) return ln_refuse("group %d: expected no deadline", group);
    return LOSSYNET_OK;
}

lossynet_status ln_settings_check(const struct lossynet_world *world,
                                  const struct lossynet_settings *settings) {
    if (world->ranks < 1 || world->rank < 0 || world->rank >= world->ranks)
        return ln_refuse("rank %d of %d ranks: expected 0 <= rank < ranks", world->rank,
                         world->ranks);
    if (settings->workers < 1 || settings->workers > WIRE_WORKERS)
        return ln_refuse("workers %d: expected 1 to %d", settings->workers, WIRE_WORKERS);
    if (settings->memory && world->ranks > 1)
        return ln_refuse("vectors outside the host's memory: expected 1 rank, got %d",
                         world->ranks);
    if (settings->workers % world->ranks)
        return ln_refuse("workers %d: expected a multiple of the %d ranks", settings->workers,
                         world->ranks);
    if (check_group(world, settings)) return LOSSYNET_INVALID;
    const bool blocks = settings->wire_dtype >= LOSSYNET_INT8;
    if (settings->wire_dtype < LOSSYNET_FLOAT32 || settings->wire_dtype > LOSSYNET_INT4)
        return ln_refuse("wire dtype %d: expected float32, bf16, int8, int6 or int4",
                         (int)settings->wire_dtype);
    if (check_vectors(settings)) return LOSSYNET_INVALID;
    if (blocks && settings->packet_bytes &&
        ln_payload_elements(LOSSYNET_INT8, settings->packet_bytes) == 0)
        return ln_refuse(
            "packet size %zu bytes: expected at least 36, for a block of wire dtype %s",
            settings->packet_bytes, lossynet_wire_dtype_name((int)settings->wire_dtype));
    const struct lossynet_memory *memory = settings->memory;
    if (memory &&
        !(memory->round && memory->average && memory->broadcast && memory->copy && memory->gather))
        return ln_refuse(
            "vectors outside the host's memory: expected all functions of lossynet_memory");
    if (settings->estimator < LOSSYNET_MEAN || settings->estimator > LOSSYNET_ZERO)
        return ln_refuse("estimator %d: expected mean, balanced or zero", (int)settings->estimator);
    if (settings->link < LOSSYNET_LINK_AUTO || settings->link > LOSSYNET_LINK_VERBS)
        return ln_refuse("link %d: expected auto, mpi, udp or verbs", (int)settings->link);
    if (!(settings->network.pace_gbps >= 0) || !(settings->network.peer_timeout >= 0))
        return ln_refuse("pace %g Gbit/s, peer time-out %g s: expected 0 or more",
                         settings->network.pace_gbps, settings->network.peer_timeout);
    if (!(settings->network.loss_budget >= 0 && settings->network.loss_budget < 1) ||
        (settings->network.loss_budget > 0 && !(settings->network.pace_gbps > 0)))
        return ln_refuse(
            "loss-budget %g: expected a share below 1, and pace-gbps too, the rate of a "
            "rank's link",
            settings->network.loss_budget);
    if (settings->network.threads < 0 || settings->network.threads > LOSSYNET_LINK_THREADS)
        return ln_refuse("link-threads %d: expected 1 to %d", settings->network.threads,
                         LOSSYNET_LINK_THREADS);
    if (settings->network.threads > 1 && settings->network.skip_late)
        return ln_refuse("link-threads %d: expected no deadline", settings->network.threads);
    if (settings->network.dscp < 0 || settings->network.dscp > 63)
        return ln_refuse("traffic class %d: expected a DSCP from 0 to 63", settings->network.dscp);
    if (settings->drift_samples < 0)
        return ln_refuse("drift samples %d: expected 0 or more", settings->drift_samples);
    for (int phase = 0; phase < 2; phase++) {
        const int rounds = settings->retransmission_rounds[phase];
        if (rounds >= LOSSYNET_ROUNDS_MEASURED && rounds <= LOSSYNET_ROUNDS_GIVEN) continue;
        return ln_refuse("repair %d: expected 0 to %d, or -1", rounds, LOSSYNET_ROUNDS_GIVEN);
    }
    if (!(settings->retransmission_budget >= 0 && settings->retransmission_budget < INFINITY))
        return ln_refuse(
            "retransmission budget %g: expected a share of a phase's packets, or 0 for all",
            settings->retransmission_budget);
    if (settings->network.skip_late && !(settings->network.deadline >= 0))
        return ln_refuse("deadline %g s: expected 0 or more", settings->network.deadline);
    if (settings->error_feedback && settings->estimator != LOSSYNET_MEAN &&
        settings->estimator != LOSSYNET_ZERO)
        return ln_refuse("carry: expected estimator mean or zero, got %s",
                         lossynet_estimator_name(settings->estimator));
    if (settings->error_feedback && settings->memory)
        return ln_refuse("carry: expected vectors in the host's memory");
    if (settings->network.key_file && !settings->network.encrypt)
        return ln_refuse("key-file %s: expected encrypt with it", settings->network.key_file);
    if (ln_rule_check(settings)) return LOSSYNET_INVALID;
    return check_sizes(settings);
}

static lossynet_status check_all(const struct lossynet_world *world,
                                 const struct lossynet_settings *settings) {
    struct ln_loss loss;
    struct ln_at rounds = {0};
    lossynet_status status = ln_settings_check(world, settings);
    if (status) return status;
    status = ln_loss_open(&loss, &settings->loss, settings->workers);
    if (status) return status;
    status = ln_repair_at_parse(&rounds, settings);
    if (!status && settings->tensors &&
        (!ln_names_exist(&loss.at, "loss-at", settings) ||
         !ln_names_exist(&rounds, "repair-at", settings)))
        status = LOSSYNET_INVALID;
    ln_loss_close(&loss);
    ln_at_close(&rounds);
    return status;
}

lossynet_status lossynet_check(const struct lossynet_world *world,
                               const struct lossynet_settings *settings) {
    LN_EXPECT(NULL, world && settings, LN_NO_SETTINGS);
    const struct ln_log_target log = {settings->log, settings->log_context};
    const struct ln_log_target *before = ln_log_use(&log);
    lossynet_status status = check_all(world, settings);
    ln_log_use(before);
    return status;
}
