/* not_finite.c — tells all ranks that a worker has computed numbers that no receiver takes.
 *
 * Receivers refuse packets with NaN, infinity, or numbers of 2^64 or more: over a network that may
 * damage or forge packets they cannot tell whose fault such a number is (elements.c). So its sender
 * says it, who knows it before the packet leaves. It notes the first such element, and the pulse
 * carries the notes of all workers to all ranks. No step costs more for it: a packet's elements are
 * in the cache, since its checksum is computed next.
 *
 *     packets that leave for other ranks    exchange.c, when they are packed
 *     packets that injected loss drops      the same, since they would join the residual; between
 *                                           workers of a rank after the GRADIENT phase
 *     packets that arrive within a rank     nobody reads them but the weighted sum. So the average is
 *                                           not finite, and the caller's norm shows it; as with an
 *                                           owner's own gradient. lossynet_find_not_finite then
 *                                           looks for the worker
 *
 * Residuals keep no such number (ln_bf16_keep), but 0. With carry the mass of the lost packet counts all the same:
 * its owner takes the sender's next packet, which brings one gradient, as the sum of two.
 *
 * A note is one number: the least is the first element. 0 is none.
 */
#include "lossynet/algorithm/calls.h"

#include <stdlib.h>

/* element << 17 | phase << 16 | upper half of the value, and 1 more */
static uint64_t note_of(lossynet_phase phase, size_t element, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return ((uint64_t)element << 17 | (uint64_t)phase << 16 | bits >> 16) + 1;
}

void ln_not_finite_open(struct lossynet_comm *comm) {
    COMM_TAKE(comm, comm->stats.not_finite.mine, (size_t)comm->workers.local);
    COMM_TAKE(comm, comm->stats.not_finite.all, (size_t)comm->workers.count);
}

/* Threads may note at the same time; the least note stays. */
static void keep_least(uint64_t *least, uint64_t note) {
    uint64_t before = __atomic_load_n(least, __ATOMIC_RELAXED);
    while ((before == 0 || note < before) &&
           !__atomic_compare_exchange_n(least, &before, note, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED))
        continue;
}

static float element_of(const void *elements, bool bf16, size_t e) {
    return bf16 ? ln_bf16_widen(((const uint16_t *)elements)[e]) : ((const float *)elements)[e];
}

/* The first element that no receiver takes; count: none. */
static size_t first_of(const void *elements, bool bf16, size_t count) {
    size_t e = 0;
    while (e < count && ln_is_sound(element_of(elements, bf16, e))) e++;
    return e;
}

void ln_not_finite_note(const struct lossynet_comm *comm, lossynet_phase phase, int v,
                        const void *elements, bool bf16, size_t offset, size_t count) {
    const size_t e = first_of(elements, bf16, count) % count; /* 0: only rounded it is too large */
    keep_least(&comm->stats.not_finite.mine[v],
               note_of(phase, offset + e, element_of(elements, bf16, e)));
}

/* Notes the first such number among elements of a gradient. */
static void look(uint64_t *least, const void *elements, bool bf16, size_t offset, size_t count) {
    const size_t e = first_of(elements, bf16, count);
    if (e < count)
        keep_least(least, note_of(LOSSYNET_GRADIENT, offset + e, element_of(elements, bf16, e)));
}

void ln_not_finite_look(const struct lossynet_comm *comm, int v, const void *vector, size_t offset,
                        size_t count) {
    look(&comm->stats.not_finite.mine[v], ln_element(comm, vector, offset), comm->resources.bf16,
         offset, count);
}

/* What local worker v lost on its link to `owner` in this rank. */
static void look_at_lost(const struct lossynet_comm *comm, int v, int owner, const float *vector) {
    size_t n;
    const uint8_t *arrived = ln_arrived(comm, LOSSYNET_GRADIENT, owner - comm->workers.first,
                                        comm->workers.first + v, &n);
    for (struct ln_place p = {0}; n > 0 && ln_next_place(&comm->partition, owner, &p);)
        if (!*arrived++) ln_not_finite_look(comm, v, vector, p.offset, p.count);
}

void ln_not_finite_look_at_lost(const struct lossynet_comm *comm, float *const *vectors) {
    if (!comm->feedback.mass) return;
#pragma omp parallel for collapse(2) num_threads(ln_threads_for_workers(comm)) schedule(static)
    for (int v = 0; v < comm->workers.local; v++)
        for (int i = 0; i < comm->workers.local; i++)
            if (i != v) look_at_lost(comm, v, comm->workers.first + i, vectors[v]);
}

/* ---- telling ---- */

lossynet_status ln_not_finite_tell(struct lossynet_comm *comm) {
    struct ln_not_finite *state = &comm->stats.not_finite;
    memset(state->all, 0, (size_t)comm->workers.count * sizeof *state->all);
    state->asked = false;
    const lossynet_status status =
        lossynet_all_gather_later(comm, state->mine, state->all, sizeof *state->all);
    memset(state->mine, 0, (size_t)comm->workers.local * sizeof *state->mine);
    return status;
}

static struct lossynet_not_finite read_note(uint64_t note, int worker) {
    const float value = ln_bf16_widen((uint16_t)(--note & 0xffff));
    return (struct lossynet_not_finite){
        1, worker, note >> 16 & 1 ? LOSSYNET_PARAMETER : LOSSYNET_GRADIENT, note >> 17, value};
}

static bool find(const struct lossynet_comm *comm, struct lossynet_not_finite *out) {
    int workers = 0;
    *out = (struct lossynet_not_finite){0};
    for (int w = comm->workers.count - 1; w >= 0; w--)
        if (comm->stats.not_finite.all[w])
            *out = read_note(comm->stats.not_finite.all[w], w), workers++;
    out->workers = workers;
    return workers > 0;
}

bool lossynet_is_not_finite(struct lossynet_comm *comm, struct lossynet_not_finite *out) {
    COMM_DEMAND(comm, out, LN_NO_OUTPUT);
    comm->stats.not_finite.asked = true;
    return find(comm, out);
}

void ln_not_finite_log(struct lossynet_comm *comm) {
    struct lossynet_not_finite first;
    if (comm->stats.not_finite.asked || !comm->stats.not_finite.all || !find(comm, &first)) return;
    comm->stats.not_finite.asked = true;
    ln_fail_at(&comm->resources.log, LOSSYNET_INVALID,
               "element %zu of the %s of worker %d is %g: expected finite numbers below 2^63; what "
               "it sends with such numbers is lost",
               (size_t)first.element, first.phase == LOSSYNET_GRADIENT ? "gradient" : "parameters",
               first.worker, (double)first.value);
}

/* ---- looking for a worker ---- */

/* The same as look, also in memory that the host cannot access. vector: `offset` is its first. */
static void look_anywhere(const struct lossynet_comm *comm, uint64_t *least, const float *elements,
                          bool bf16, size_t offset, size_t count) {
    enum { PIECE = 1024 };
    if (!comm->resources.memory.gather) {
        look(least, elements, bf16, offset, count);
        return;
    }
    for (size_t i = 0; i < count; i += PIECE) {
        float piece[PIECE], *vector = (float *)elements;
        size_t which[PIECE], n = 0;
        for (; n < PIECE && i + n < count; n++) which[n] = i + n;
        const struct lossynet_memory *memory = &comm->resources.memory;
        int32_t first[PIECE] = {0};
        memory->gather(memory->context, piece, &vector, which, first, n);
        look(least, piece, false, offset + i, n);
    }
}

/* What local worker v sent to others, and the averages that it owns. */
static void look_at_worker(const struct lossynet_comm *comm, int v, float *vector, uint64_t *sent,
                           uint64_t *average) {
    const struct ln_partition *partition = &comm->partition;
    const bool bf16 = comm->resources.bf16;
    for (int b = 0; b < partition->buckets; b++) {
        for (int owner = 0; owner < comm->workers.count; owner++) {
            size_t offset, count;
            ln_shard_span(partition, owner, b, &offset, &count);
            if (owner == comm->workers.first + v)
                look_anywhere(comm, average, ln_shard_of(comm, vector, v, b).average, false, offset,
                              count);
            else if (ln_is_partner(partition, comm->workers.first + v, owner))
                look_anywhere(comm, sent, ln_element(comm, vector, offset), bf16, offset, count);
        }
    }
}

/* If nobody sent such a number, an average has it from its owner's own gradient. */
lossynet_status lossynet_find_not_finite(struct lossynet_comm *comm, float *const *vectors) {
    lossynet_status status = ln_vectors_check(comm, vectors, __func__);
    if (status) return status;
    struct ln_not_finite *state = &comm->stats.not_finite;
    struct found {
        uint64_t sent, average;
    } *mine = ln_memory_take((size_t)comm->workers.local, sizeof *mine),
      *all = ln_memory_take((size_t)comm->workers.count, sizeof *all);
    bool sent = false;
    if (!mine || !all)
        status = ln_fail_at(&comm->resources.log, LOSSYNET_NO_MEMORY,
                            "no memory to look for numbers that are not finite");
    for (int v = 0; v < comm->workers.local && !status; v++) {
        mine[v].sent = state->all[comm->workers.first + v];
        look_at_worker(comm, v, vectors[v], &mine[v].sent, &mine[v].average);
    }
    if (!status) status = lossynet_all_gather(comm, mine, all, sizeof *all);
    for (int w = 0; w < comm->workers.count && !status; w++) sent |= all[w].sent != 0;
    for (int w = 0; w < comm->workers.count && !status; w++)
        state->all[w] = sent ? all[w].sent : all[w].average;
    free(mine);
    free(all);
    return status;
}
