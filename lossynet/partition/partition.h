/* partition.h — cuts vectors into buckets, shards and packets, and encodes the elements of packets.
 *
 * This layer knows which worker owns which elements, which packet carries them, and their format in
 * packets. It must not know which packets arrive, where workers run, or how anything is sent. Every
 * function depends on its arguments alone. It uses base only.
 */
#ifndef LOSSYNET_PARTITION_H
#define LOSSYNET_PARTITION_H

#include "lossynet/base/base.h"

/* Each group has `size` consecutive workers. Without groups every worker is a group. */
struct ln_groups {
    int count, size;
};

/* ---- who owns what (partition.c) ---- */

struct ln_partition {
    int workers, buckets;
    struct ln_groups groups;
    size_t elements, packets;     /* in one vector */
    size_t packet_elements;       /* in a full packet */
    lossynet_wire_dtype dtype[2]; /* of payloads, by phase */

    /* First element and first packet of each shard. Shards are in order of (bucket, owner) without
     * gaps, so shard i = bucket * workers + owner ends where shard i + 1 starts. */
    size_t *shard_element; /* [buckets * workers + 1] */
    size_t *shard_packet;  /* [buckets * workers + 1] */

    /* The same within one owner's shards: elements and packets that it owns in earlier buckets. */
    size_t *owner_element; /* [workers][buckets + 1] */
    size_t *owner_packet;  /* [workers][buckets + 1] */
    size_t *owner_start;   /* [workers + 1]: packets of all owners before this one */

    size_t *owner_bytes[2]; /* [workers], by phase: payload bytes of all packets of an owner */

    size_t largest_shard_packets, largest_owner_packets;
};

/* shard_elements: [buckets][workers]; NULL: equal shards. */
lossynet_status ln_partition_open(struct ln_partition *partition, int workers, int group,
                                  int buckets, const size_t *bucket_elements,
                                  const size_t *shard_elements, size_t packet_bytes,
                                  lossynet_wire_dtype dtype);
void ln_partition_close(struct ln_partition *partition);

/* The partner of an owner in a group: the member at the same place, which sends and receives the
 * owner's packets for its group. In the owner's own group it is the owner itself. */
static inline int ln_partner(const struct ln_partition *partition, int owner, int group) {
    return group * partition->groups.size + owner % partition->groups.size;
}

/* Whether the worker is the owner, or sends it gradients and receives its parameters. */
static inline bool ln_is_partner(const struct ln_partition *partition, int worker, int owner) {
    return worker % partition->groups.size == owner % partition->groups.size;
}

static inline size_t ln_partition_owned(const struct ln_partition *partition, int worker) {
    return partition->owner_element[(size_t)(worker + 1) * (partition->buckets + 1) - 1];
}

static inline size_t ln_partition_owner_packets(const struct ln_partition *partition, int worker) {
    return partition->owner_packet[(size_t)(worker + 1) * (partition->buckets + 1) - 1];
}

/* The elements of a shard: `count` from `offset` of the vector on. */
static inline void ln_shard_span(const struct ln_partition *partition, int owner, int bucket,
                                 size_t *offset, size_t *count) {
    const size_t *start = partition->shard_element + (size_t)bucket * partition->workers + owner;
    *offset = start[0];
    *count = start[1] - start[0];
}

/* The number of packets in a shard. */
static inline size_t ln_shard_packets(const struct ln_partition *partition, int bucket, int owner) {
    size_t shard = (size_t)bucket * partition->workers + owner;
    return partition->shard_packet[shard + 1] - partition->shard_packet[shard];
}

/* The number of the owner's packets in buckets before this one. */
static inline size_t ln_packets_before(const struct ln_partition *partition, int bucket,
                                       int owner) {
    return partition->owner_packet[(size_t)owner * (partition->buckets + 1) + bucket];
}

/* The elements of a packet of shard (bucket, owner): `count` from `offset` of the vector on. */
static inline void ln_packet_span(const struct ln_partition *partition, int bucket, int owner,
                                  size_t packet, size_t *offset, size_t *count) {
    size_t shard = (size_t)bucket * partition->workers + owner;
    size_t end = partition->shard_element[shard + 1];
    *offset = partition->shard_element[shard] + packet * partition->packet_elements;
    *count =
        end - *offset < partition->packet_elements ? end - *offset : partition->packet_elements;
}

struct ln_place { /* of one of an owner's packets */
    int bucket;
    size_t next;          /* number in the shard of the packet after it */
    size_t offset, count; /* its elements */
};

/* Moves to the owner's next packet, in order of (bucket, packet), at first from {0} to the first one.
 * Returns false after the last one. */
static inline bool ln_next_place(const struct ln_partition *partition, int owner,
                                 struct ln_place *at) {
    for (; at->bucket < partition->buckets; at->bucket++, at->next = 0) {
        if (at->next == ln_shard_packets(partition, at->bucket, owner)) continue;
        ln_packet_span(partition, at->bucket, owner, at->next++, &at->offset, &at->count);
        return true;
    }
    return false;
}

/* The last of start[0 ... count - 1], which ascend, that is not above `value`; start[0] is not. */
size_t ln_last_until(const size_t *start, size_t count, size_t value);

/* ---- elements in packets (elements.c) ---- */

/* Whether packets hold rounded elements. */
static inline bool ln_has_bf16(const struct ln_partition *partition) {
    return partition->dtype[LOSSYNET_PARAMETER] != LOSSYNET_FLOAT32;
}

/* Whether elements are rounded in blocks. The elements of a block have a common scale. */
static inline bool ln_has_blocks(const struct ln_partition *partition) {
    return partition->dtype[LOSSYNET_PARAMETER] >= LOSSYNET_INT8;
}

enum { LOSSYNET_BLOCK = 32 }; /* elements of a block */

/* How to round consecutive elements of a vector. The first one must be the first of a packet or of
 * a block. */
struct ln_rounding {
    lossynet_wire_dtype dtype;
    /* In blocks. true: rounds at random, with random numbers that depend on (key, place in the
     * vector). false: rounds to nearest. */
    bool random;
    uint64_t key;
    size_t offset; /* place of the first element in the vector */
};

/* Bytes of a payload of n elements; and the largest number of elements whose payload fits in
 * `bytes`: whole blocks, and 0 if not even one fits. */
size_t ln_payload_bytes(lossynet_wire_dtype dtype, size_t n);
size_t ln_payload_elements(lossynet_wire_dtype dtype, size_t bytes);
/* Bytes of the packets that a link with room for payloads of `room` bytes gets by default: with a
 * multiple of 8 elements, so that processors and GPUs average whole vectors of them. */
size_t ln_payload_default(lossynet_wire_dtype dtype, size_t room);

/* Payloads need no alignment. They are little-endian, as are all machines that this runs on. */
void ln_elements_pack(const struct ln_rounding *r, uint8_t *to, const float *from, size_t n);
void ln_elements_unpack(lossynet_wire_dtype dtype, float *to, const uint8_t *payload, size_t n);
/* For workers of one rank: gives the same result as pack and then unpack. to may be from. */
void ln_elements_copy(const struct ln_rounding *r, float *to, const float *from, size_t n);
/* The same for vectors of bfloat16: packs from them, and unpacks into them. narrow rounds float32
 * to what unpacking would give; round_bf16 rounds in place, for other workers of the rank. */
void ln_elements_pack_bf16(const struct ln_rounding *r, uint8_t *to, const uint16_t *from,
                           size_t n);
void ln_elements_unpack_bf16(lossynet_wire_dtype dtype, uint16_t *to, const uint8_t *payload,
                             size_t n);
void ln_elements_narrow(const struct ln_rounding *r, uint16_t *to, const float *from, size_t n);
void ln_elements_round_bf16(const struct ln_rounding *r, uint16_t *x, size_t n);
/* Whether a payload holds only numbers that one can compute with. A payload that was damaged or
 * forged may hold NaN, infinity, or numbers of 2^64 or more, whose squares overflow when they are
 * summed. */
bool ln_elements_are_finite(lossynet_wire_dtype dtype, const uint8_t *payload, size_t n);

int ln_block_bits(lossynet_wire_dtype dtype); /* bits of an element: 8, 6 or 4 */

/* The scale of a block of count <= LOSSYNET_BLOCK elements; and element x of a block with this
 * scale, rounded to nearest. */
uint8_t ln_block_scale(lossynet_wire_dtype dtype, const float *block, size_t count);
float ln_block_round(lossynet_wire_dtype dtype, float x, uint8_t scale);

#endif
