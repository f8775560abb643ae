/* partition.c — cuts vectors into buckets, shards and packets, which say who owns which element.
 *
 *     vector   | bucket 0                  | bucket 1              | ...
 *     shards   | owner 0 | owner 1 | own.2 | owner 0 | owner 1 |...|
 *     packets  |p0|p1|p2 |p3|p4|p5 |p6|p7  |p8|p9|...
 *
 * In a bucket of E elements each of N owners gets a run of chunk = ceil(E / N) elements, rounded up
 * to a multiple of 16. (16 float32 are a cache line, which owners must not share.) The last owners
 * get fewer elements, or none if the bucket is small. Or the caller gives the elements of each shard,
 * which may be none. A shard is cut into full packets and a last,
 * shorter one. A packet is always within one shard. Packets are numbered in order of (bucket,
 * owner, packet), which is also the order of their elements.
 */
#include "lossynet/partition/partition.h"

#include <stdlib.h>

enum { CHUNK_MULTIPLE = 16 };

static size_t minimum(size_t a, size_t b) {
    return a < b ? a : b;
}

static void add_bytes(struct ln_partition *partition, size_t owner, size_t count) {
    const size_t full = count / partition->packet_elements,
                 rest = count % partition->packet_elements;
    for (int phase = 0; phase < 2; phase++) {
        const lossynet_wire_dtype dtype = partition->dtype[phase];
        partition->owner_bytes[phase][owner] +=
            full * ln_payload_bytes(dtype, partition->packet_elements) +
            ln_payload_bytes(dtype, rest);
    }
}

static void fill(struct ln_partition *partition, const size_t *bucket_elements,
                 const size_t *shard_elements) {
    size_t element = 0, packet = 0;
    size_t owners = (size_t)partition->workers, row = (size_t)partition->buckets + 1;
    for (int b = 0; b < partition->buckets; b++) {
        size_t size = bucket_elements[b];
        size_t chunk = (size - 1) / owners + 1;
        chunk = (chunk + CHUNK_MULTIPLE - 1) / CHUNK_MULTIPLE * CHUNK_MULTIPLE;
        for (size_t w = 0; w < owners; w++) {
            size_t count = minimum((w + 1) * chunk, size) - minimum(w * chunk, size);
            if (shard_elements) count = shard_elements[b * owners + w];
            size_t packets = (count + partition->packet_elements - 1) / partition->packet_elements;
            partition->shard_element[b * owners + w] = element;
            partition->shard_packet[b * owners + w] = packet;
            partition->owner_element[w * row + b + 1] =
                partition->owner_element[w * row + b] + count;
            partition->owner_packet[w * row + b + 1] =
                partition->owner_packet[w * row + b] + packets;
            add_bytes(partition, w, count);
            if (packets > partition->largest_shard_packets)
                partition->largest_shard_packets = packets;
            element += count;
            packet += packets;
        }
    }
    partition->shard_element[(size_t)partition->buckets * owners] = partition->elements = element;
    partition->shard_packet[(size_t)partition->buckets * owners] = partition->packets = packet;
    for (size_t w = 0; w < owners; w++) {
        size_t packets = ln_partition_owner_packets(partition, (int)w);
        partition->owner_start[w + 1] = partition->owner_start[w] + packets;
        if (packets > partition->largest_owner_packets) partition->largest_owner_packets = packets;
    }
}

lossynet_status ln_partition_open(struct ln_partition *partition, int workers, int group,
                                  int buckets, const size_t *bucket_elements,
                                  const size_t *shard_elements, size_t packet_bytes,
                                  lossynet_wire_dtype dtype) {
    *partition = (struct ln_partition){
        .workers = workers, .buckets = buckets, .groups = {workers / group, group}};
    partition->dtype[LOSSYNET_GRADIENT] = dtype;
    partition->dtype[LOSSYNET_PARAMETER] = dtype > LOSSYNET_INT8 ? LOSSYNET_INT8 : dtype;
    partition->packet_elements =
        ln_payload_elements(partition->dtype[LOSSYNET_PARAMETER], packet_bytes);
    const size_t owners = (size_t)workers;
    const size_t shards = buckets * owners + 1, rows = ((size_t)buckets + 1) * owners;
    size_t *memory =
        ln_memory_take(2 * shards + 2 * rows + owners + 1 + 2 * owners, sizeof *memory);
    if (!memory)
        return ln_fail(LOSSYNET_NO_MEMORY, "no memory for the partition of %d buckets x %d workers",
                       buckets, workers);
    partition->shard_element = memory;
    partition->shard_packet = memory += shards;
    partition->owner_element = memory += shards;
    partition->owner_packet = memory += rows;
    partition->owner_start = memory += rows;
    partition->owner_bytes[LOSSYNET_GRADIENT] = memory += owners + 1;
    partition->owner_bytes[LOSSYNET_PARAMETER] = memory += owners;
    fill(partition, bucket_elements, shard_elements);
    return LOSSYNET_OK;
}

size_t ln_last_until(const size_t *start, size_t count, size_t value) {
    size_t low = 0, high = count;
    while (high - low > 1) { /* start[low] <= value < start[high] */
        const size_t middle = low + (high - low) / 2;
        *(start[middle] <= value ? &low : &high) = middle;
    }
    return low;
}

void ln_partition_close(struct ln_partition *partition) {
    free(partition->shard_element); /* the first of all arrays, which lie in one block */
    *partition = (struct ln_partition){0};
}
