/* rounding.c — what is sent is rounded to bfloat16 also where nothing is sent: between workers of
 * one rank, so that the result does not depend on who shares a rank.
 */
#include "lossynet/algorithm/algorithm.h"

/* A worker's vector, where `owner` owns it. */
static void round_shards(const struct lossynet_comm *comm, float *vector, int owner) {
    const struct lossynet_partition *partition = &comm->partition;
    uint8_t *all = lossynet_scratch(comm);
    if (comm->memory.masked_round) memset(all, 1, partition->largest_owner_packets);
    for (int b = 0; b < partition->buckets; b++) {
        size_t offset, count;
        lossynet_shard_span(partition, owner, b, &offset, &count);
        float *shard = vector + offset;
        if (comm->memory.masked_round)
            comm->memory.masked_round(shard, shard, all, count, partition->packet_elements);
        else
            lossynet_round(shard, shard, count);
    }
}

void lossynet_round_others(const struct lossynet_comm *comm, float *const *vectors, bool remote) {
    const int first = remote ? 0 : comm->first, owners = remote ? comm->workers : comm->local;
    if (!lossynet_rounds(&comm->partition)) return;
#pragma omp parallel for collapse(2) num_threads(comm->threads) schedule(static)
    for (int v = 0; v < comm->local; v++)
        for (int i = 0; i < owners; i++)
            if (first + i != comm->first + v) round_shards(comm, vectors[v], first + i);
}

void lossynet_start(struct lossynet_comm *comm, float *const *vectors) {
    lossynet_round_others(comm, vectors, true);
}
