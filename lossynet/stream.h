/* stream.h — what sending (stream_send.c) and receiving (stream_receive.c) DATA have in common. */
#ifndef LOSSYNET_STREAM_H
#define LOSSYNET_STREAM_H

#include "lossynet/engine.h"

/* The bucket that leaves as number `order` of its phase, and the other way round. */
static inline int stream_bucket_at(const struct lossynet *net, int kind, int order) {
    return kind == LOSSYNET_GRADIENT ? order : net->layout.buckets - 1 - order;
}

static inline size_t stream_shard_packets(const struct lossynet_layout *layout, int bucket,
                                          int owner) {
    size_t shard = (size_t)bucket * layout->workers + owner;
    return layout->shard_packet[shard + 1] - layout->shard_packet[shard];
}

/* What DATA says of its elements. */
static inline uint8_t stream_elements(const struct lossynet_layout *layout) {
    return lossynet_rounds(layout) ? WIRE_BF16 : WIRE_FLOAT32;
}

/* The owner's packets in buckets before this one. */
static inline size_t stream_packets_before(const struct lossynet_layout *layout, int bucket,
                                           int owner) {
    return layout->owner_packet[(size_t)owner * (layout->buckets + 1) + bucket];
}

static inline bool stream_is_group(const struct lossynet *net, int kind) {
    return net->engine->multicast && kind == LOSSYNET_PARAMETER;
}

/* Nothing of this phase will follow: DONE says so. */
static inline void stream_complete(struct lossynet_outbound *to) {
    to->complete = true;
    to->done_waits = true;
    to->done = lossynet_timer_at_once();
}

#endif
