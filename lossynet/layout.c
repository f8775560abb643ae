/* layout.c — buckets, shards and packets: who owns which element, and which packet carries it.
 *
 *     vector   | bucket 0                  | bucket 1              | ...
 *     shards   | owner 0 | owner 1 | own.2 | owner 0 | owner 1 |...|
 *     packets  |p0|p1|p2 |p3|p4|p5 |p6|p7  |p8|p9|...
 *
 * In a bucket of E elements each of N owners gets a run of chunk = ceil(E / N) elements, rounded up
 * to 16 (a cache line of float32, so that owners never share one); the last owners get less, or
 * nothing when the bucket is small. A shard is cut in full packets and a last, shorter one.
 * Packets never straddle shards. They are numbered in order of (bucket, owner, packet), which is
 * also the order of their elements.
 */
#include "lossynet/internal.h"

#include <stdlib.h>

enum { CHUNK_MULTIPLE = 16 };

static size_t minimum(size_t a, size_t b) {
    return a < b ? a : b;
}

static void fill(struct lossynet_layout *layout, const size_t *bucket_elements) {
    size_t element = 0, packet = 0;
    size_t owners = (size_t)layout->workers, row = (size_t)layout->buckets + 1;
    for (int b = 0; b < layout->buckets; b++) {
        size_t size = bucket_elements[b];
        size_t chunk = (size - 1) / owners + 1;
        chunk = (chunk + CHUNK_MULTIPLE - 1) / CHUNK_MULTIPLE * CHUNK_MULTIPLE;
        for (size_t w = 0; w < owners; w++) {
            size_t count = minimum((w + 1) * chunk, size) - minimum(w * chunk, size);
            size_t packets = (count + layout->packet_elements - 1) / layout->packet_elements;
            layout->shard_element[b * owners + w] = element;
            layout->shard_packet[b * owners + w] = packet;
            layout->owner_element[w * row + b + 1] = layout->owner_element[w * row + b] + count;
            layout->owner_packet[w * row + b + 1] = layout->owner_packet[w * row + b] + packets;
            if (packets > layout->largest_shard_packets) layout->largest_shard_packets = packets;
            element += count;
            packet += packets;
        }
    }
    layout->shard_element[(size_t)layout->buckets * owners] = layout->elements = element;
    layout->shard_packet[(size_t)layout->buckets * owners] = layout->packets = packet;
    for (size_t w = 0; w < owners; w++) {
        size_t packets = lossynet_layout_owner_packets(layout, (int)w);
        layout->owner_start[w + 1] = layout->owner_start[w] + packets;
        if (packets > layout->largest_owner_packets) layout->largest_owner_packets = packets;
    }
}

lossynet_status lossynet_layout_open(struct lossynet_layout *layout, int workers, int buckets,
                                     const size_t *bucket_elements, size_t packet_bytes,
                                     size_t element_bytes) {
    *layout = (struct lossynet_layout){.workers = workers, .buckets = buckets};
    layout->packet_elements = packet_bytes / element_bytes;
    layout->element_bytes = element_bytes;
    size_t shards = (size_t)buckets * workers + 1, rows = ((size_t)buckets + 1) * workers;
    layout->shard_element = (size_t *)lossynet_memory_take(shards, sizeof(size_t));
    layout->shard_packet = (size_t *)lossynet_memory_take(shards, sizeof(size_t));
    layout->owner_element = (size_t *)lossynet_memory_take(rows, sizeof(size_t));
    layout->owner_packet = (size_t *)lossynet_memory_take(rows, sizeof(size_t));
    layout->owner_start = (size_t *)lossynet_memory_take((size_t)workers + 1, sizeof(size_t));
    if (!layout->shard_element || !layout->shard_packet || !layout->owner_element ||
        !layout->owner_packet || !layout->owner_start) {
        lossynet_log("no memory for the layout of %d buckets x %d workers", buckets, workers);
        lossynet_layout_close(layout);
        return LOSSYNET_NO_MEMORY;
    }
    fill(layout, bucket_elements);
    return LOSSYNET_OK;
}

void lossynet_layout_close(struct lossynet_layout *layout) {
    free(layout->shard_element);
    free(layout->shard_packet);
    free(layout->owner_element);
    free(layout->owner_packet);
    free(layout->owner_start);
    *layout = (struct lossynet_layout){0};
}

/* ---- public ---- */

void lossynet_shard(const struct lossynet *net, int worker, int bucket, size_t *offset,
                    size_t *count) {
    const size_t *start = net->layout.shard_element + (size_t)bucket * net->workers + worker;
    *offset = start[0];
    *count = start[1] - start[0];
}

size_t lossynet_owned_elements(const struct lossynet *net, int worker) {
    return lossynet_layout_owned(&net->layout, worker);
}

size_t lossynet_packets(const struct lossynet *net) {
    return net->layout.packets;
}

size_t lossynet_packet_bytes(const struct lossynet *net) {
    return net->layout.packet_elements * net->layout.element_bytes;
}
