/* partition.h — how vectors are cut: buckets, shards and packets, and what a packet's elements are.
 *
 * Knows which worker owns which elements, which packet carries them, and what they are on their
 * way. Must not know which packets arrive, who is where, or how anything is sent. Every function
 * depends on its arguments alone. Uses base only.
 */
#ifndef LOSSYNET_PARTITION_H
#define LOSSYNET_PARTITION_H

#include "lossynet/base/base.h"

/* ---- workers in groups (groups.c) ---- */

/* Groups follow one another in the order of workers. Without groups every worker is one. */
struct lossynet_groups {
    int count, largest; /* the most workers of a group */
    int *of;            /* [workers]: which group a worker is in */
    int *first;         /* [count + 1]: its first worker; groups[count]: all workers */
    int *partner;       /* [largest][count], see lossynet_partners */
    double *weight;     /* [count]: its workers beside those of group 0; 1 where groups are equal */
    double weights;     /* all of these together */
};

/* Of `group` workers each, and the last of those that are left; or of sizes[0], sizes[1], ...
 * workers, if that is not NULL, until there are `workers` of them. */
lossynet_status lossynet_groups_open(struct lossynet_groups *groups, int workers, int group,
                                     const int *sizes);
void lossynet_groups_close(struct lossynet_groups *groups);
/* Of the sizes: that of all groups, if they are equal. */
uint64_t lossynet_groups_fingerprint(const struct lossynet_groups *groups);

/* ---- who owns what (partition.c) ---- */

struct lossynet_partition {
    int workers, buckets;
    struct lossynet_groups groups;
    size_t elements, packets;     /* in one vector */
    size_t packet_elements;       /* in a full packet */
    lossynet_wire_dtype dtype[2]; /* of payloads, by phase */

    /* Shards in order of (bucket, owner) follow one another without gaps, both in elements and in
     * packets, so shard i = bucket * workers + owner ends where shard i + 1 starts. */
    size_t *shard_element; /* [buckets * workers + 1] */
    size_t *shard_packet;  /* [buckets * workers + 1] */

    /* The same for one owner's shards alone: what it owns in buckets before this one. */
    size_t *owner_element; /* [workers][buckets + 1] */
    size_t *owner_packet;  /* [workers][buckets + 1] */
    size_t *owner_start;   /* [workers + 1]: packets of all owners before this one */

    size_t *owner_bytes[2]; /* [workers], by phase: payloads of all an owner's packets */

    size_t largest_shard_packets, largest_owner_packets;
};

lossynet_status lossynet_partition_open(struct lossynet_partition *partition, int workers,
                                        int group, const int *group_sizes, int buckets,
                                        const size_t *bucket_elements, size_t packet_bytes,
                                        lossynet_wire_dtype dtype);
void lossynet_partition_close(struct lossynet_partition *partition);

/* The partners of an owner, itself among them, one in each group, in order of groups: they send and
 * receive for their groups the packets that it owns. */
static inline const int *lossynet_partners(const struct lossynet_partition *partition, int owner) {
    const struct lossynet_groups *groups = &partition->groups;
    const int place = owner - groups->first[groups->of[owner]];
    return groups->partner + (size_t)place * (size_t)groups->count;
}

/* It is the owner, or sends it gradients and receives its parameters. */
static inline bool lossynet_is_partner(const struct lossynet_partition *partition, int worker,
                                       int owner) {
    return lossynet_partners(partition, owner)[partition->groups.of[worker]] == worker;
}

static inline size_t lossynet_partition_owned(const struct lossynet_partition *partition,
                                              int worker) {
    return partition->owner_element[(size_t)(worker + 1) * (partition->buckets + 1) - 1];
}

static inline size_t lossynet_partition_owner_packets(const struct lossynet_partition *partition,
                                                      int worker) {
    return partition->owner_packet[(size_t)(worker + 1) * (partition->buckets + 1) - 1];
}

/* Where the elements of a shard are. */
static inline void lossynet_shard_span(const struct lossynet_partition *partition, int owner,
                                       int bucket, size_t *offset, size_t *count) {
    const size_t *start = partition->shard_element + (size_t)bucket * partition->workers + owner;
    *offset = start[0];
    *count = start[1] - start[0];
}

/* Packets of a shard. */
static inline size_t lossynet_shard_packets(const struct lossynet_partition *partition, int bucket,
                                            int owner) {
    size_t shard = (size_t)bucket * partition->workers + owner;
    return partition->shard_packet[shard + 1] - partition->shard_packet[shard];
}

/* The owner's packets in buckets before this one. */
static inline size_t lossynet_packets_before(const struct lossynet_partition *partition, int bucket,
                                             int owner) {
    return partition->owner_packet[(size_t)owner * (partition->buckets + 1) + bucket];
}

/* Where the elements of a packet of shard (bucket, owner) are. */
static inline void lossynet_packet_span(const struct lossynet_partition *partition, int bucket,
                                        int owner, size_t packet, size_t *offset, size_t *count) {
    size_t shard = (size_t)bucket * partition->workers + owner;
    size_t end = partition->shard_element[shard + 1];
    *offset = partition->shard_element[shard] + packet * partition->packet_elements;
    *count =
        end - *offset < partition->packet_elements ? end - *offset : partition->packet_elements;
}

/* ---- elements on their way (elements.c) ---- */

/* What is sent is rounded. */
static inline bool lossynet_rounds(const struct lossynet_partition *partition) {
    return partition->dtype[LOSSYNET_PARAMETER] != LOSSYNET_FLOAT32;
}

/* It is rounded in blocks with a scale, by which elements are rounded together. */
static inline bool lossynet_has_blocks(const struct lossynet_partition *partition) {
    return partition->dtype[LOSSYNET_PARAMETER] >= LOSSYNET_INT8;
}

enum { LOSSYNET_BLOCK = 32 }; /* elements of a block */

/* How elements are rounded that follow one another in a vector. They begin where a packet does, or
 * a block. */
struct lossynet_rounding {
    lossynet_wire_dtype dtype;
    /* In blocks: rounded at random, with random numbers of (key, place in the vector); else to
     * nearest. */
    bool random;
    uint64_t key;
    size_t offset; /* place of the first element */
};

/* Bytes of a payload of n elements; and elements of the longest payload that fits, whole blocks, 0
 * where not one does. */
size_t lossynet_payload_bytes(lossynet_wire_dtype dtype, size_t n);
size_t lossynet_payload_elements(lossynet_wire_dtype dtype, size_t bytes);

/* Payloads may be at any address; they are little-endian, as every machine this runs on. */
void lossynet_elements_pack(const struct lossynet_rounding *r, uint8_t *to, const float *from,
                            size_t n);
void lossynet_elements_unpack(lossynet_wire_dtype dtype, float *to, const uint8_t *payload,
                              size_t n);
/* From one worker to another of the same rank: what unpack makes of what pack has made. to may be
 * from. */
void lossynet_elements_copy(const struct lossynet_rounding *r, float *to, const float *from,
                            size_t n);
/* The same for vectors of bfloat16: packs them; unpacks to them; rounds float32 to what unpacking
 * would leave in them; and in place, for another worker of the same rank. */
void lossynet_elements_pack_bf16(const struct lossynet_rounding *r, uint8_t *to,
                                 const uint16_t *from, size_t n);
void lossynet_elements_unpack_bf16(lossynet_wire_dtype dtype, uint16_t *to, const uint8_t *payload,
                                   size_t n);
void lossynet_elements_narrow(const struct lossynet_rounding *r, uint16_t *to, const float *from,
                              size_t n);
void lossynet_elements_round_bf16(const struct lossynet_rounding *r, uint16_t *x, size_t n);
/* A payload that a wire has changed, or a stranger has made up, may hold what no computation
 * survives: NaN, infinity, and numbers of 2^64 or more, whose squares overflow when they are
 * summed. */
bool lossynet_elements_are_finite(lossynet_wire_dtype dtype, const uint8_t *payload, size_t n);

int lossynet_block_bits(lossynet_wire_dtype dtype); /* of an element: 8 or 4 */

/* The scale of a block of count <= LOSSYNET_BLOCK elements, and what one of them is rounded to
 * nearest. */
uint8_t lossynet_block_scale(lossynet_wire_dtype dtype, const float *block, size_t count);
float lossynet_block_round(lossynet_wire_dtype dtype, float x, uint8_t scale);

#endif
