/* gather.c — small all-gathers that always arrive.
 *
 * A gather costs an exchange with every rank, however few bytes it carries. So gathers whose result
 * is not needed at once are put aside, and the next gather carries them. Rank r's part of such an
 * exchange is what its workers gave to the first gather put aside, then to the second, and so on.
 */
#include "lossynet/algorithm/calls.h"

#include <string.h>

void ln_aside_open(struct lossynet_comm *comm) {
    struct ln_aside *aside = &comm->stats.aside;
    aside->room = sizeof(struct lossynet_counters) + sizeof(struct ln_ages) +
                  (size_t)comm->drift.samples * (sizeof(float) + ln_has_blocks(&comm->partition)) +
                  sizeof(uint64_t) /* not_finite.c */ + LOSSYNET_ASIDE_BYTES;
    if (comm->world.ranks == 1) return;
    COMM_TAKE(comm, aside->mine, aside->room * (size_t)comm->workers.local);
    COMM_TAKE(comm, aside->together, aside->room * (size_t)comm->workers.count);
    COMM_TAKE(comm, aside->came, (size_t)comm->world.ranks);
}

/* Sets the offsets for parts of `part` bytes from each rank. */
static void offsets(struct lossynet_comm *comm, size_t part) {
    for (int r = 0; r <= comm->world.ranks; r++) comm->stats.gather_offset[r] = part * (size_t)r;
}

lossynet_status ln_gather(struct lossynet_comm *comm, void *all, size_t part) {
    const struct ln_acks *acks = &comm->arrivals.acks;
    if (acks->due && part <= acks->room) return ln_acknowledge_gather(comm, all, part);
    lossynet_status status = ln_acknowledge_settle(comm);
    if (status) return status;
    offsets(comm, part);
    return ln_transport_gather(comm->transport, all, comm->stats.gather_offset, NULL);
}

lossynet_status ln_aside_exchange(struct lossynet_comm *comm, bool pulse) {
    struct ln_aside *aside = &comm->stats.aside;
    const size_t part = aside->bytes;
    const int count = aside->count;
    aside->count = 0;
    aside->bytes = 0;
    if (!count) return LOSSYNET_OK;
    memcpy(aside->together + part * (size_t)comm->world.rank, aside->mine, part);
    lossynet_status status;
    if (pulse) {
        offsets(comm, part);
        status = ln_transport_gather(comm->transport, aside->together, comm->stats.gather_offset,
                                     aside->came);
    } else {
        status = ln_gather(comm, aside->together, part);
    }
    for (int r = 0; status == LOSSYNET_OK && r < comm->world.ranks; r++) {
        const char *from = aside->together + part * (size_t)r;
        if (pulse && !aside->came[r]) continue;
        for (int i = 0; i < count; i++) {
            const size_t bytes = aside->item[i].bytes;
            memcpy((char *)aside->item[i].all + bytes * (size_t)r, from, bytes);
            from += bytes;
        }
    }
    return status;
}

bool ln_aside_fits(const struct lossynet_comm *comm, size_t part) {
    const struct ln_aside *aside = &comm->stats.aside;
    return aside->count < LOSSYNET_ASIDE_MOST &&
           aside->bytes + part <= aside->room * (size_t)comm->workers.local;
}

/* Puts a gather aside, for which there is room. part: the bytes of a rank. */
static void put_aside(struct lossynet_comm *comm, const void *mine, void *all, size_t part) {
    struct ln_aside *aside = &comm->stats.aside;
    memcpy(aside->mine + aside->bytes, mine, part);
    aside->item[aside->count++] = (struct ln_aside_item){all, part};
    aside->bytes += part;
}

static lossynet_status gather(struct lossynet_comm *comm, const void *mine, void *all,
                              size_t part) {
    const bool joins = comm->stats.aside.count && ln_aside_fits(comm, part);
    if (joins) put_aside(comm, mine, all, part);
    lossynet_status status = ln_aside_exchange(comm, false);
    if (status || joins) return status;
    memcpy((char *)all + part * (size_t)comm->world.rank, mine, part);
    return comm->transport ? ln_gather(comm, all, part) : LOSSYNET_OK;
}

static lossynet_status gather_later(struct lossynet_comm *comm, const void *mine, void *all,
                                    size_t part) {
    if (!comm->transport || !ln_aside_fits(comm, part)) return gather(comm, mine, all, part);
    put_aside(comm, mine, all, part);
    return LOSSYNET_OK;
}

lossynet_status lossynet_all_gather_later(struct lossynet_comm *comm, const void *mine, void *all,
                                          size_t bytes) {
    COMM_EXPECT(comm, (mine && all) || !bytes, LN_NO_BYTES);
    return gather_later(comm, mine, all, bytes * (size_t)comm->workers.local);
}

lossynet_status lossynet_all_gather(struct lossynet_comm *comm, const void *mine, void *all,
                                    size_t bytes) {
    COMM_EXPECT(comm, (mine && all) || !bytes, LN_NO_BYTES);
    return gather(comm, mine, all, bytes * (size_t)comm->workers.local);
}

lossynet_status lossynet_rank_gather(struct lossynet_comm *comm, const void *mine, void *all,
                                     size_t bytes, bool later) {
    COMM_EXPECT(comm, (mine && all) || !bytes, LN_NO_BYTES);
    return (later ? gather_later : gather)(comm, mine, all, bytes);
}

static bool is_swap(const struct lossynet_comm *comm, const void *out, const size_t *out_offset,
                    const void *in, const size_t *in_offset) {
    const int ranks = comm->world.ranks, own = comm->world.rank;
    if (!out_offset || !in_offset) return false;
    for (int r = 0; r < ranks; r++)
        if (out_offset[r + 1] < out_offset[r] || in_offset[r + 1] < in_offset[r]) return false;
    return (out || out_offset[ranks] == out_offset[0]) &&
           (in || in_offset[ranks] == in_offset[0]) &&
           out_offset[own + 1] - out_offset[own] == in_offset[own + 1] - in_offset[own];
}

lossynet_status lossynet_swap(struct lossynet_comm *comm, const void *out, const size_t *out_offset,
                              void *in, const size_t *in_offset) {
    COMM_EXPECT(comm, is_swap(comm, out, out_offset, in, in_offset),
                "expected ascending offsets, memory for the bytes, and a part of its own that both "
                "have");
    const size_t rank = (size_t)comm->world.rank, own = out_offset[rank + 1] - out_offset[rank];
    if (own) memcpy((char *)in + in_offset[rank], (const char *)out + out_offset[rank], own);
    if (!comm->transport) return LOSSYNET_OK;
    return ln_transport_swap(comm->transport, out, out_offset, in, in_offset, NULL);
}
