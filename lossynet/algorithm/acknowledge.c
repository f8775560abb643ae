/* acknowledge.c — tells senders which of their packets arrived.
 *
 * Receivers note arrivals by (receiver, sender). They tell the senders reliably, with one bit per
 * packet: each rank gets the bits of all links on which its workers send. In a round of
 * retransmission the bits say which packets are not asked for again (retransmit.c). Senders store
 * the bits that they get by (sender, receiver). After GRADIENT a rank sends bits of links whose
 * packets its workers own, after PARAMETER bits of the other links.
 */
#include "lossynet/algorithm/algorithm.h"

/* A tag before a link's bits, if these may be of an earlier step (unconfirmed.c). */
enum { TAG_BYTES = 4 };

/* Writes bits for `rank`: which packets of its workers local workers have, or do not ask for. */
static void write_bits(struct lossynet_comm *comm, lossynet_phase phase, int rank, uint8_t *to) {
    const bool tagged = comm->feedback.unconfirmed.on, again = comm->steps.round > 0;
    for (int sender = rank * comm->workers.local; sender < (rank + 1) * comm->workers.local;
         sender++) {
        for (int v = 0; v < comm->workers.local; v++) {
            size_t n, start = ln_rx(comm, phase, v, sender, &n);
            if (!ln_is_link(comm, phase, sender, comm->workers.first + v)) continue;
            const uint8_t *arrived = comm->arrivals.arrived[phase] + start;
            const uint8_t *asks = again ? comm->retransmission.asks + start : NULL;
            uint32_t tag = 0;
            if (tagged && !again && !ln_unconfirmed_renews(comm, v, sender, arrived, n, &tag)) {
                wire_put(to, tag, TAG_BYTES);
                to += TAG_BYTES + (n + 7) / 8; /* the bits of the last acknowledgement stay */
                continue;
            }
            if (tagged) wire_put(to, tag, TAG_BYTES), to += TAG_BYTES;
            memset(to, 0, (n + 7) / 8);
            for (size_t k = 0; k < n; k++)
                to[k / 8] |= (uint8_t)((asks ? !asks[k] : arrived[k]) << k % 8);
            to += (n + 7) / 8;
        }
    }
}

const uint8_t *ln_acknowledge_answer(struct lossynet_comm *comm, int rank, bool make,
                                     size_t *bytes) {
    const struct ln_acks *acks = &comm->arrivals.acks;
    uint8_t *bits = acks->own_bits + acks->own_offset[rank];
    if (make) write_bits(comm, LOSSYNET_GRADIENT, rank, bits);
    *bytes = acks->own_offset[rank + 1] - acks->own_offset[rank];
    return bits;
}

/* Asks late ranks for their parts. If nothing was sent to a rank, its bits are 0. */
static lossynet_status ask(struct lossynet_comm *comm, uint8_t *in, const size_t *offset,
                           uint8_t *came) {
    lossynet_status status = ln_transport_ask(comm->transport, in, offset, came);
    for (int r = 0; r < comm->world.ranks; r++)
        if (came[r] == LOSSYNET_NOTHING_SENT) memset(in + offset[r], 0, offset[r + 1] - offset[r]);
    return status;
}

/* Reads the bits from `rank`: which packets of local workers its workers have. In a round of
 * retransmission a rank whose part has not come asks for nothing. */
static void read_bits(struct lossynet_comm *comm, lossynet_phase phase, int rank, int came,
                      const uint8_t *from) {
    const bool tagged = comm->feedback.unconfirmed.on, again = comm->steps.round > 0;
    for (int v = 0; v < comm->workers.local; v++) {
        for (int receiver = rank * comm->workers.local; receiver < (rank + 1) * comm->workers.local;
             receiver++) {
            size_t n;
            uint8_t *acked = comm->arrivals.acked[phase] + ln_tx(comm, phase, v, receiver, &n);
            if (!ln_is_link(comm, phase, comm->workers.first + v, receiver)) continue;
            if (tagged && !again) {
                const bool told =
                    comm->loss.replay ? ln_loss_replay_told(comm->loss.replay, comm->steps.step,
                                                            comm->workers.first + v, receiver)
                    : came == LOSSYNET_NOTHING_SENT ? !ln_unconfirmed_waits(comm, v, receiver)
                                                    : came;
                ln_unconfirmed_told(comm, v, receiver, told, (uint32_t)wire_get(from, TAG_BYTES));
            }
            if (tagged) from += TAG_BYTES;
            for (size_t k = 0; k < n; k++)
                acked[k] = (again && !came) || (from[k / 8] >> k % 8 & 1);
            from += (n + 7) / 8;
        }
    }
}

lossynet_status ln_acknowledge(struct lossynet_comm *comm, lossynet_phase phase) {
    struct ln_acks *acks = &comm->arrivals.acks;
    const bool own = phase == LOSSYNET_GRADIENT; /* we send bits of packets that we own */
    const bool again = comm->steps.round > 0;
    uint8_t *own_bits = again ? acks->own_asks : acks->own_bits,
            *other_bits = again ? acks->other_asks : acks->other_bits,
            *out = own ? own_bits : other_bits, *in = own ? other_bits : own_bits;
    const size_t *out_offset = own ? acks->own_offset : acks->other_offset;
    const size_t *in_offset = own ? acks->other_offset : acks->own_offset;
    const int rank = comm->world.rank;
    uint8_t *const came = acks->came;
    const bool asks = came && own && comm->feedback.unconfirmed.on && !again;
    if (asks) ln_transport_acknowledges(comm->transport, false);
    for (int r = 0; r < comm->world.ranks; r++) write_bits(comm, phase, r, out + out_offset[r]);
    if (asks) ln_transport_acknowledges(comm->transport, true);
    memcpy(in + in_offset[rank], out + out_offset[rank], out_offset[rank + 1] - out_offset[rank]);
    if (comm->transport) {
        lossynet_status status =
            ln_transport_swap(comm->transport, out, out_offset, in, in_offset, came);
        if (!status && asks) status = ask(comm, in, in_offset, came);
        if (status) return status;
    }
    for (int r = 0; r < comm->world.ranks; r++)
        read_bits(comm, phase, r, came ? came[r] : true, in + in_offset[r]);
    return LOSSYNET_OK;
}

void ln_acknowledge_write(struct lossynet_comm *comm) {
    struct ln_acks *acks = &comm->arrivals.acks;
    for (int r = 0; r < comm->world.ranks; r++)
        write_bits(comm, LOSSYNET_GRADIENT, r, acks->own_bits + acks->own_offset[r]);
    acks->due = true;
}

/* Senders have been told, in acks.other_bits. */
static void end_later(struct lossynet_comm *comm) {
    struct ln_acks *acks = &comm->arrivals.acks;
    const int rank = comm->world.rank;
    const size_t own = acks->own_offset[rank];
    acks->due = false;
    memcpy(acks->other_bits + acks->other_offset[rank], acks->own_bits + own,
           acks->own_offset[rank + 1] - own);
    for (int r = 0; r < comm->world.ranks; r++)
        read_bits(comm, LOSSYNET_GRADIENT, r, true, acks->other_bits + acks->other_offset[r]);
    ln_feedback_keep(comm, acks->vectors);
}

lossynet_status ln_acknowledge_settle(struct lossynet_comm *comm) {
    struct ln_acks *acks = &comm->arrivals.acks;
    if (!acks->due) return LOSSYNET_OK;
    lossynet_status status = ln_transport_swap(comm->transport, acks->own_bits, acks->own_offset,
                                               acks->other_bits, acks->other_offset, NULL);
    if (!status) end_later(comm);
    return status;
}

/* The message to a rank is the part, which is the same for all ranks, and then the rank's bits. */
lossynet_status ln_acknowledge_gather(struct lossynet_comm *comm, void *all, size_t part) {
    struct ln_acks *acks = &comm->arrivals.acks;
    const int ranks = comm->world.ranks;
    size_t *out_offset = acks->own_offset, *in_offset = acks->other_offset;
    for (int r = 0; r < ranks; r++) {
        uint8_t *to = acks->out + out_offset[r] + (size_t)r * part;
        memcpy(to, (char *)all + part * (size_t)comm->world.rank, part);
        memcpy(to + part, acks->own_bits + out_offset[r], out_offset[r + 1] - out_offset[r]);
    }
    for (int r = 0; r <= ranks; r++) {
        out_offset[r] += (size_t)r * part;
        in_offset[r] += (size_t)r * part;
    }
    lossynet_status status =
        ln_transport_swap(comm->transport, acks->out, out_offset, acks->in, in_offset, NULL);
    for (int r = 0; r <= ranks; r++) {
        out_offset[r] -= (size_t)r * part;
        in_offset[r] -= (size_t)r * part;
    }
    for (int r = 0; r < ranks && !status; r++) {
        if (r == comm->world.rank) continue;
        const uint8_t *from = acks->in + in_offset[r] + (size_t)r * part;
        memcpy((char *)all + part * (size_t)r, from, part);
        memcpy(acks->other_bits + in_offset[r], from + part, in_offset[r + 1] - in_offset[r]);
    }
    if (!status) end_later(comm);
    return status;
}

/* ---- open and close ---- */

/* Bytes of bits for all links between two ranks whose packets workers of `rank` own. */
static size_t rank_bytes(const struct lossynet_comm *comm, int rank, int other) {
    const struct ln_partition *partition = &comm->partition;
    const int size = partition->groups.size, local = comm->workers.local, first = other * local;
    const size_t tag = comm->feedback.unconfirmed.on ? TAG_BYTES : 0;
    size_t bytes = 0;
    for (int w = rank * local; w < (rank + 1) * local; w++) {
        const int below =
            size - 1 - w % size; /* counts the partners (ln_is_partner) below a worker */
        const int partners = (first + local + below) / size - (first + below) / size;
        bytes += (size_t)partners * ((ln_partition_owner_packets(partition, w) + 7) / 8 + tag);
    }
    return bytes;
}

void ln_acknowledge_open(struct lossynet_comm *comm, bool gradient, bool parameter) {
    struct ln_arrivals *a = &comm->arrivals;
    struct ln_acks *acks = &a->acks;
    const size_t ranks = (size_t)comm->world.ranks;
    size_t own = 0, other = 0;
    COMM_TAKE(comm, acks->own_offset, ranks + 1);
    COMM_TAKE(comm, acks->other_offset, ranks + 1);
    for (int r = 0; r < comm->world.ranks; r++) {
        own += rank_bytes(comm, comm->world.rank, r);
        other += rank_bytes(comm, r, comm->world.rank);
        if (!acks->other_offset) continue;
        acks->own_offset[r + 1] = own;
        acks->other_offset[r + 1] = other;
    }
    if (comm->steps.skips) COMM_TAKE(comm, acks->came, ranks);
    COMM_TAKE(comm, acks->own_bits, own);
    COMM_TAKE(comm, acks->other_bits, other);
    if (ln_rounds_most(comm, LOSSYNET_GRADIENT) || ln_rounds_most(comm, LOSSYNET_PARAMETER)) {
        COMM_TAKE(comm, acks->own_asks, own);
        COMM_TAKE(comm, acks->other_asks, other);
    }
    if (gradient) COMM_TAKE(comm, a->acked[LOSSYNET_GRADIENT], ln_links(comm, false));
    if (parameter) COMM_TAKE(comm, a->acked[LOSSYNET_PARAMETER], ln_links(comm, true));
}

void ln_acknowledge_open_later(struct lossynet_comm *comm, size_t room) {
    struct ln_acks *acks = &comm->arrivals.acks;
    const size_t ranks = (size_t)comm->world.ranks;
    acks->later = acks->own_offset && acks->other_offset;
    acks->room = room;
    if (!acks->later) return;
    COMM_TAKE(comm, acks->vectors, (size_t)comm->workers.local);
    COMM_TAKE(comm, acks->out, ranks * room + acks->own_offset[ranks]);
    COMM_TAKE(comm, acks->in, ranks * room + acks->other_offset[ranks]);
}
