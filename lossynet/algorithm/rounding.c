/* rounding.c — rounds what workers of one rank send each other in the same way as packets over a
 * link, so that the result does not depend on which workers share a rank.
 *
 * Parameters are rounded to nearest, so that replicas with a packet of the same step agree, and so are
 * gradients in bfloat16. In blocks with a scale, gradients are rounded at random without bias. Each worker uses its own
 * random numbers, so that an average over workers has smaller errors than one worker's gradient.
 * With error feedback the residual holds what rounding took away from a gradient, until the sender
 * knows whether the packet arrived (error_feedback.c).
 *
 * Vectors of bfloat16 are rounded already; only blocks round them further.
 */
#include "lossynet/algorithm/calls.h"

struct ln_rounding ln_rounding_of(const struct lossynet_comm *comm, lossynet_phase phase,
                                  int sender, size_t offset) {
    struct ln_rounding r = {.dtype = comm->partition.dtype[phase], .offset = offset};
    if (phase == LOSSYNET_PARAMETER || !ln_has_blocks(&comm->partition)) return r;
    r.random = true;
    r.key = ln_mix(comm->loss.seed ^ 0x726f756e64u /* "round" */);
    r.key = ln_mix(r.key ^ comm->steps.step);
    r.key = ln_mix(r.key ^ (uint64_t)sender);
    return r;
}

int ln_wire_bits(const struct lossynet_comm *comm, lossynet_phase phase) {
    const lossynet_wire_dtype dtype = comm->partition.dtype[phase];
    return dtype == LOSSYNET_FLOAT32 ? 32 : dtype == LOSSYNET_BF16 ? 16 : ln_block_bits(dtype);
}

/* Rounds n elements, and keeps in their residual what that takes away. This error is taken
 * of the element in float32, and only then rounded to bfloat16: taken of a rounded element it would
 * miss up to 2^-9 of the element, which may be more than the error. */
LN_VECTORIZED
static void round_with_error(const struct ln_rounding *r, float *x, uint16_t *residual, size_t n) {
    enum { PIECE = 32 * LOSSYNET_BLOCK };
    struct ln_rounding of_piece = *r;
    for (size_t i = 0, count; i < n; i += count, of_piece.offset += count) {
        float before[PIECE];
        count = n - i < PIECE ? n - i : PIECE;
        memcpy(before, x + i, count * sizeof *before);
        ln_elements_copy(&of_piece, x + i, before, count);
        for (size_t e = 0; e < count; e++)
            residual[i + e] = ln_is_sound(before[e]) ? ln_bf16_keep(before[e] - x[i + e]) : 0;
    }
}

/* Rounds the shards of `owner` in local worker v's vector. */
static void round_shards(const struct lossynet_comm *comm, lossynet_phase phase, int v,
                         float *vector, int owner) {
    const struct ln_partition *partition = &comm->partition;
    struct lossynet_part part;
    lossynet_replayed(comm, comm->workers.first + v, &part);
    /* A worker that leaves a replayed step out keeps its residual as it is. */
    uint16_t *residual =
        phase == LOSSYNET_GRADIENT && part.takes_part ? ln_feedback_error(comm, v) : NULL;
    for (int b = 0; b < partition->buckets; b++) {
        size_t offset, count;
        ln_shard_span(partition, owner, b, &offset, &count);
        float *shard = vector + offset;
        const struct ln_rounding r = ln_rounding_of(comm, phase, comm->workers.first + v, offset);
        if (comm->resources.bf16) {
            ln_elements_round_bf16(&r, ln_element(comm, vector, offset), count);
            continue;
        }
        if (residual)
            round_with_error(&r, shard, residual + offset, count);
        else
            ln_elements_copy(&r, shard, shard, count);
    }
}

/* The same with the caller's function, for all workers at once: if the host cannot access vectors. */
static void round_there(const struct lossynet_comm *comm, lossynet_phase phase,
                        float *const *vectors) {
    const struct lossynet_memory *memory = &comm->resources.memory;
    uint64_t *keys = comm->resources.keys;
    bool random = false;
    for (int v = 0; v < comm->workers.local; v++) {
        const struct ln_rounding r = ln_rounding_of(comm, phase, comm->workers.first + v, 0);
        keys[v] = r.key, random = r.random;
    }
    memory->round(memory->context, phase, vectors, ln_wire_bits(comm, phase), random ? keys : NULL);
}

void ln_round_others(const struct lossynet_comm *comm, lossynet_phase phase, float *const *vectors,
                     bool remote) {
    if (!ln_rounds_vectors(comm)) return;
    if (comm->resources.memory.round) {
        if (!remote) round_there(comm, phase, vectors);
        return;
    }
#pragma omp parallel for collapse(2) num_threads(comm->resources.threads) schedule(static)
    for (int v = 0; v < comm->workers.local; v++) {
        for (int owner = 0; owner < comm->workers.count; owner++) {
            const int worker = comm->workers.first + v;
            if (owner == worker || ln_is_local(comm, owner) == remote ||
                !ln_is_partner(&comm->partition, worker, owner))
                continue;
            round_shards(comm, phase, v, vectors[v], owner);
        }
    }
}

void lossynet_round_as_sent(struct lossynet_comm *comm, float *const *vectors) {
    COMM_DEMAND(comm, ln_are_vectors(comm, (const float *const *)vectors), LN_NO_VECTORS);
    ln_round_others(comm, LOSSYNET_PARAMETER, vectors, false);
    ln_round_others(comm, LOSSYNET_PARAMETER, vectors, true);
}

void lossynet_narrow_parameters(const struct lossynet_comm *comm, uint16_t *to, const void *values,
                                size_t offset, size_t n) {
    enum { PIECE = 32 * LOSSYNET_BLOCK };
    COMM_DEMAND(comm,
                to && values && offset <= comm->partition.elements &&
                    n <= comm->partition.elements - offset,
                "%zu elements from %zu: expected memory, and elements of the vector", n, offset);
    const struct ln_partition *partition = &comm->partition;
    const size_t *end = partition->shard_element + 1;
    for (size_t done = 0, count; done < n; done += count) {
        float piece[PIECE];
        while (*end <= offset + done) end++;
        count = *end - (offset + done) < n - done ? *end - (offset + done) : n - done;
        if (count > PIECE) count = PIECE;
        memcpy(piece, (const char *)values + done * sizeof *piece, count * sizeof *piece);
        const struct ln_rounding r = {.dtype = partition->dtype[LOSSYNET_PARAMETER]};
        ln_elements_narrow(&r, to + done, piece, count);
    }
}
