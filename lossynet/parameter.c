/* parameter.c — the PARAMETER phase: every owner's shards go to all workers.
 *
 * What arrives overwrites, what does not arrive stays as it was and ages by one. Values are sent,
 * never differences, so a single arrival heals whatever was missed before: that bounds the drift
 * (drift.c). A packet is fresh at a worker when its age is 0, which is all there is to know about
 * arrival here; an owner's own packets never age. What was lost may be sent again (repair.c).
 *
 * Within a rank a packet that arrives is one copy from the owner's vector (elements.c), and
 * neighbours that arrive together are one copy. Owners' shards are read and other shards written, so
 * no order between workers matters.
 */
#include "lossynet/engine.h"

#include <string.h>

/* ---- copies within the rank ---- */

/* Copies those of owner's packets that arrived to local worker `to`, and makes them fresh.
 * mask[k]: in order of (bucket, packet). */
static void copy_arrived(const struct lossynet *net, float *const *vectors, int owner, int to,
                         const uint8_t *mask) {
    const struct lossynet_layout *layout = &net->layout;
    const float *source = vectors[owner - net->first];
    float *target = vectors[to - net->first];
    uint32_t *age = net->age + (size_t)(to - net->first) * layout->packets;
    for (int b = 0; b < layout->buckets; b++) {
        size_t shard = (size_t)b * net->workers + owner;
        size_t first = layout->shard_packet[shard];
        size_t packets = layout->shard_packet[shard + 1] - first;
        size_t start = layout->shard_element[shard], end = layout->shard_element[shard + 1];
        if (net->memory.masked_copy) {
            (lossynet_rounds(layout) ? net->memory.masked_round : net->memory.masked_copy)(
                target + start, source + start, mask, end - start, layout->packet_elements);
            for (size_t k = 0; k < packets; k++)
                if (mask[k]) age[first + k] = 0;
            mask += packets;
            continue;
        }
        for (size_t k = 0; k < packets;) {
            size_t run = k;
            while (run < packets && mask[run]) age[first + run++] = 0;
            if (run > k) {
                size_t from = start + k * layout->packet_elements;
                size_t until = start + run * layout->packet_elements;
                if (until > end) until = end;
                lossynet_elements_copy(layout, target + from, source + from, until - from);
            }
            k = run + 1;
        }
        mask += packets;
    }
}

/* ---- the phase ---- */

/* Everything a worker does not own gets one step older. */
static void grow_older(const struct lossynet *net, int v) {
    const struct lossynet_layout *layout = &net->layout;
    uint32_t *age = net->age + (size_t)v * layout->packets;
    size_t shards = (size_t)layout->buckets * net->workers;
    for (size_t shard = 0; shard < shards; shard++) {
        if (shard % net->workers == (size_t)(net->first + v)) continue;
        for (size_t p = layout->shard_packet[shard]; p < layout->shard_packet[shard + 1]; p++)
            age[p] += age[p] != UINT32_MAX;
    }
}

static void count(struct lossynet *net, int v) {
    const struct lossynet_layout *layout = &net->layout;
    int worker = net->first + v;
    const uint32_t *age = net->age + (size_t)v * layout->packets;
    uint64_t own = lossynet_layout_owner_packets(layout, worker), fresh = 0;
    for (size_t p = 0; p < layout->packets; p++) fresh += age[p] == 0;

    struct lossynet_counters *counters = &net->counters[net->broadcast_step % 2][v];
    counters->expected[LOSSYNET_PARAMETER] += layout->packets - own;
    counters->arrived[LOSSYNET_PARAMETER] += fresh - own;
    counters->bytes[LOSSYNET_PARAMETER] +=
        lossynet_owned_elements(net, worker) * layout->element_bytes * (uint64_t)(net->workers - 1);
    net->totals[v].expected += layout->packets - own;
    net->totals[v].arrived += fresh - own;
}

/* Within the rank. Owners outermost: all receivers read one owner's shards while these are in the
 * cache. */
static void copy_local(const struct lossynet *net, float *const *vectors, bool lossless) {
#pragma omp parallel for collapse(2) num_threads(net->threads) schedule(static)
    for (int s = 0; s < net->local; s++) {
        for (int v = 0; v < net->local; v++) {
            if (s == v) continue;
            int owner = net->first + s, to = net->first + v;
            size_t n = lossynet_layout_owner_packets(&net->layout, owner);
            uint8_t *mask = lossynet_thread_mask(net);
            lossynet_injected(net, LOSSYNET_PARAMETER, owner, to, n, lossless, mask);
            copy_arrived(net, vectors, owner, to, mask);
        }
    }
}

/* Sends, the first time or again. */
static void send(struct lossynet *net, float *const *vectors, bool lossless) {
    if (net->engine) {
        lossynet_stream_begin(net, LOSSYNET_PARAMETER, vectors, lossless);
        lossynet_stream_open(net, LOSSYNET_PARAMETER, lossless);
        lossynet_stream_ready(net, LOSSYNET_PARAMETER);
    }
    copy_local(net, vectors, lossless);
}

/* Ends the phase: sends again what the first sending lost. */
static lossynet_status repair(struct lossynet *net, float *const *vectors) {
    lossynet_status status = LOSSYNET_OK;
    const int rounds = net->repair.rounds[LOSSYNET_PARAMETER];
    for (net->round = 1; net->round <= rounds && !status; net->round++) {
        if (net->engine) status = lossynet_stream_end(net, LOSSYNET_PARAMETER);
        if (!status) status = lossynet_repair_ask(net, LOSSYNET_PARAMETER);
        if (!status) send(net, vectors, false);
    }
    net->round = 0;
    return status ? status : lossynet_broadcast_end(net);
}

lossynet_status lossynet_broadcast_begin(struct lossynet *net, float *const *vectors,
                                         bool lossless) {
    lossynet_status status = lossynet_broadcast_end(net);
    if (status || net->workers == 1) return status;
    net->broadcast_step = net->step;
#pragma omp parallel for num_threads(net->threads) schedule(static)
    for (int v = 0; v < net->local; v++) grow_older(net, v);
    send(net, vectors, lossless);
    net->broadcasting = true;
    return net->repair.rounds[LOSSYNET_PARAMETER] && !lossless ? repair(net, vectors) : LOSSYNET_OK;
}

lossynet_status lossynet_bucket_wait(struct lossynet *net, int bucket, double *waited) {
    if (waited) *waited = 0;
    if (!net->broadcasting || !net->engine ||
        __atomic_load_n(&net->engine->bucket_over[LOSSYNET_PARAMETER][bucket], __ATOMIC_ACQUIRE))
        return LOSSYNET_OK;
    double start = lossynet_now();
    pthread_mutex_lock(&net->engine->caller);
    lossynet_status status = LOSSYNET_OK;
    if (!__atomic_load_n(&net->engine->bucket_over[LOSSYNET_PARAMETER][bucket], __ATOMIC_ACQUIRE))
        status = lossynet_stream_bucket(net, LOSSYNET_PARAMETER, bucket);
    pthread_mutex_unlock(&net->engine->caller);
    if (waited) *waited = lossynet_now() - start;
    return status;
}

lossynet_status lossynet_broadcast_end(struct lossynet *net) {
    if (!net->broadcasting) return LOSSYNET_OK;
    net->broadcasting = false;
    lossynet_status status = LOSSYNET_OK;
    if (net->engine) status = lossynet_stream_end(net, LOSSYNET_PARAMETER);
    if (status) return status;
#pragma omp parallel for num_threads(net->threads) schedule(static)
    for (int v = 0; v < net->local; v++) count(net, v);
    return lossynet_record(net, LOSSYNET_PARAMETER, net->broadcast_step);
}

lossynet_status lossynet_broadcast(struct lossynet *net, float *const *vectors, bool lossless) {
    lossynet_status status = lossynet_broadcast_begin(net, vectors, lossless);
    return status ? status : lossynet_broadcast_end(net);
}

/* ---- what is fresh ---- */

/* First element of a packet. */
static size_t packet_element(const struct lossynet_layout *layout, size_t packet) {
    if (packet >= layout->packets) return layout->elements;
    size_t low = 0, high = (size_t)layout->buckets * layout->workers;
    while (high - low > 1) { /* shard_packet[low] <= packet < shard_packet[high] */
        size_t middle = low + (high - low) / 2;
        if (layout->shard_packet[middle] <= packet)
            low = middle;
        else
            high = middle;
    }
    return layout->shard_element[low] +
           (packet - layout->shard_packet[low]) * layout->packet_elements;
}

bool lossynet_next_fresh(const struct lossynet *net, int worker, size_t *cursor, size_t *offset,
                         size_t *count) {
    /* Packets are numbered in order of their elements and without gaps, so that a run of fresh
     * packets is a run of elements. */
    const struct lossynet_layout *layout = &net->layout;
    const uint32_t *age = net->age + (size_t)(worker - net->first) * layout->packets;
    size_t first = *cursor;
    while (first < layout->packets && age[first]) first++;
    size_t last = first;
    while (last < layout->packets && !age[last]) last++;
    *cursor = last;
    if (first == last) return false;
    *offset = packet_element(layout, first);
    *count = packet_element(layout, last) - *offset;
    return true;
}

/* ---- the model ---- */

lossynet_status lossynet_gather_fresh(struct lossynet *net, float *const *vectors, float *fresh) {
    const struct lossynet_layout *layout = &net->layout;
#pragma omp parallel for collapse(2) num_threads(net->threads) schedule(static)
    for (int b = 0; b < layout->buckets; b++) {
        for (int v = 0; v < net->local; v++) {
            size_t offset, count;
            lossynet_shard(net, net->first + v, b, &offset, &count);
            if (net->memory.copy)
                net->memory.copy(fresh + offset, vectors[v] + offset, count * sizeof *fresh);
            else
                memcpy(fresh + offset, vectors[v] + offset, count * sizeof *fresh);
        }
    }
    /* In a bucket the shards of a rank's workers follow one another. */
    for (int b = 0; net->link && b < layout->buckets; b++) {
        const size_t *start = layout->shard_element + (size_t)b * net->workers;
        for (int r = 0; r <= net->world.ranks; r++)
            net->gather_offset[r] = start[(size_t)r * net->local] * sizeof *fresh;
        lossynet_status status = lossynet_gather(net, fresh, net->gather_offset);
        if (status) return status;
    }
    return LOSSYNET_OK;
}
