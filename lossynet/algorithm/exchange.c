/* exchange.c — tells the transport which packets of a phase to send and with which bytes, which
 * packets to expect, and where to store those that come.
 *
 * Local workers take turns in sending to a rank. Each worker's buckets leave in the phase's order
 * (transport.h). Packets that injected loss drops are not sent. Gradients go into the inbox and set
 * their mask. Parameters go into the vector and become fresh. With several threads (network.threads)
 * each takes packets of its own, struct ln_lane.
 */
#include "lossynet/algorithm/algorithm.h"

/* ---- injected loss ---- */

static void fill_outgoing(const struct lossynet_comm *comm, lossynet_phase phase, bool lossless) {
#pragma omp parallel for collapse(2) num_threads(ln_threads_for_marks(comm)) schedule(static)
    for (int v = 0; v < comm->workers.local; v++) {
        for (int receiver = 0; receiver < comm->workers.count; receiver++) {
            if (ln_is_local(comm, receiver)) continue;
            size_t n;
            uint8_t *mask = comm->arrivals.survives[phase] + ln_tx(comm, phase, v, receiver, &n);
            if (n == 0) continue;
            ln_injected(comm, phase, comm->workers.first + v, receiver, n, lossless, mask);
            if (phase == LOSSYNET_GRADIENT) ln_withhold(comm, v, receiver, n, mask);
        }
    }
}

/* ---- begin ---- */

/* How many packets local workers own. */
static size_t owned_packets(const struct lossynet_comm *comm) {
    const size_t *start = comm->partition.owner_start + comm->workers.first;
    return start[comm->workers.local] - start[0];
}

/* May change the source: before ln_transport_send_begin the transport does not read it. */
void ln_exchange_send(struct lossynet_comm *comm, lossynet_phase phase, float *const *vectors,
                      bool lossless) {
    struct ln_source *source = &comm->exchange.source[phase];
    const size_t ranks = (size_t)comm->world.ranks, local = (size_t)comm->workers.local;
    fill_outgoing(comm, phase, lossless);
    source->vectors = vectors;
    source->ahead = phase == LOSSYNET_PARAMETER ? comm->lead.ahead : NULL;
    for (size_t i = 0; i < comm->exchange.lanes; i++) {
        const struct ln_lane *lane = &comm->exchange.lane[i];
        memset(lane->cursor[phase], 0, ranks * local * sizeof **lane->cursor);
        memset(lane->next[phase], 0, ranks * sizeof **lane->next);
    }
    if (phase == LOSSYNET_PARAMETER && comm->exchange.kept)
        memset(comm->exchange.is_kept, 0, owned_packets(comm) * sizeof *comm->exchange.is_kept);
    for (size_t v = 0; v < local; v++) __atomic_store_n(&source->ready[v], 0, __ATOMIC_RELEASE);
    ln_transport_send_begin(comm->transport, phase);
}

void ln_exchange_ready(struct lossynet_comm *comm, lossynet_phase phase, int v, int buckets) {
    __atomic_store_n(&comm->exchange.source[phase].ready[v], buckets, __ATOMIC_RELEASE);
    ln_transport_wake(comm->transport);
}

bool ln_exchange_is_ready(const struct lossynet_comm *comm, lossynet_phase phase, int buckets) {
    for (int v = 0; v < comm->workers.local; v++)
        if (__atomic_load_n(&comm->exchange.source[phase].ready[v], __ATOMIC_ACQUIRE) < buckets)
            return false;
    return true;
}

void ln_exchange_ready_all(struct lossynet_comm *comm, lossynet_phase phase) {
    for (int v = 0; v < comm->workers.local; v++)
        __atomic_store_n(&comm->exchange.source[phase].ready[v], comm->partition.buckets,
                         __ATOMIC_RELEASE);
    ln_transport_wake(comm->transport);
}

/* ---- what leaves ---- */

/* The cursors [V] for sending to a rank. */
static struct ln_cursor *cursors(const struct ln_lane *lane, lossynet_phase phase, int rank) {
    return lane->cursor[phase] + (size_t)rank * lane->comm->workers.local;
}

/* Memory for a packet's rounded payload. Parameters in blocks are packed once for all receivers;
 * all other packets use the memory of span n. *done: the payload is there already. */
static uint8_t *place(const struct ln_lane *lane, lossynet_phase phase, int v, int n, int bucket,
                      size_t packet, bool *done) {
    const struct lossynet_comm *comm = lane->comm;
    const struct ln_exchange *exchange = &comm->exchange;
    *done = false;
    if (phase == LOSSYNET_GRADIENT || !exchange->kept)
        return lane->rounded + (size_t)n * exchange->packet_bytes;
    const struct ln_partition *partition = &comm->partition;
    const int owner = comm->workers.first + v;
    const size_t k = partition->owner_start[owner] - partition->owner_start[comm->workers.first] +
                     ln_packets_before(partition, bucket, owner) + packet;
    *done = exchange->is_kept[k];
    exchange->is_kept[k] = true;
    return exchange->kept + k * exchange->packet_bytes;
}

/* The payload of a packet of local worker v: the elements in the vector, or a rounded copy. n:
 * index of the span; offset: of the first element in the vector. */
static const void *payload(const struct ln_lane *lane, lossynet_phase phase, int v, int n,
                           const float *vector, int bucket, size_t packet, size_t offset,
                           size_t count) {
    const struct lossynet_comm *comm = lane->comm;
    const bool bf16 = comm->resources.bf16 && phase == LOSSYNET_GRADIENT;
    const struct ln_source *source = &comm->exchange.source[phase];
    const void *elements = ln_element(comm, vector, offset);
    if (phase == LOSSYNET_PARAMETER)
        elements = ln_sent(comm, source->ahead, source->vectors[v], v, bucket) +
                   packet * comm->partition.packet_elements;
    const bool as_is = bf16 ? !ln_has_blocks(&comm->partition) : !ln_has_bf16(&comm->partition);
    bool done = false;
    uint8_t *rounded = as_is ? NULL : place(lane, phase, v, n, bucket, packet, &done);
    const struct ln_rounding r = ln_rounding_of(comm, phase, comm->workers.first + v, offset);
    if (bf16 && !as_is)
        ln_elements_pack_bf16(&r, rounded, elements, count);
    else if (!as_is && !done)
        ln_elements_pack(&r, rounded, elements, count);
    const void *payload = as_is ? elements : rounded;
    if (!done && !ln_elements_are_finite(comm->partition.dtype[phase], payload, count))
        ln_not_finite_note(comm, phase, v, elements, bf16, offset, count);
    return payload;
}

/* Adds the next packets of local worker v for a rank to spans[n], from cursor `at` on, if their
 * buckets are ready. Returns the number of spans, at most `most`. */
static int next_of_worker(const struct ln_lane *lane, lossynet_phase phase, int rank, int v,
                          struct ln_cursor *at, struct ln_span *spans, int n, int most) {
    const struct lossynet_comm *comm = lane->comm;
    const struct ln_partition *partition = &comm->partition;
    const struct ln_source *source = &comm->exchange.source[phase];
    const float *vector = source->vectors[v];
    const int ready = __atomic_load_n(&source->ready[v], __ATOMIC_ACQUIRE);
    const int sender = comm->workers.first + v;
    for (; at->bucket < ready; at->bucket++, at->receiver = 0) {
        const int bucket = ln_transport_bucket(phase, partition->buckets, at->bucket);
        for (; at->receiver < comm->workers.local; at->receiver++, at->packet = 0) {
            const int receiver = rank * comm->workers.local + at->receiver;
            const int owner = phase == LOSSYNET_GRADIENT ? receiver : sender;
            if (!ln_is_link(comm, phase, sender, receiver)) continue;
            size_t packets = ln_shard_packets(partition, bucket, owner), all;
            const size_t first =
                ln_tx(comm, phase, v, receiver, &all) + ln_packets_before(partition, bucket, owner);
            const uint8_t *survives = comm->arrivals.survives[phase] + first;
            const bool counts = phase == LOSSYNET_GRADIENT && comm->feedback.unconfirmed.on;
            const bool kept = /* what injected loss takes joins the residual */
                phase == LOSSYNET_GRADIENT && comm->feedback.mass && comm->steps.round == 0;
            for (size_t k; (k = at->packet * comm->exchange.lanes + lane->number) < packets;
                 at->packet++) {
                size_t offset, count;
                ln_packet_span(partition, bucket, owner, k, &offset, &count);
                if (!survives[k] && kept) ln_not_finite_look(comm, v, vector, offset, count);
                if (!survives[k]) continue;
                if (n == most) return n;
                spans[n] = (struct ln_span){
                    .packet = {.sender = sender,
                               .receiver = receiver,
                               .bucket = bucket,
                               .number = (uint32_t)k,
                               .gradients =
                                   counts ? (uint8_t)ln_unconfirmed_gradients(comm, v, first + k)
                                          : 0},
                    .payload = payload(lane, phase, v, n, vector, bucket, k, offset, count),
                    .bytes = ln_payload_bytes(partition->dtype[phase], count)};
                n++;
            }
        }
    }
    return n;
}

static int next(void *context, lossynet_phase phase, int rank, struct ln_span *spans, int most,
                bool *complete) {
    const struct ln_lane *lane = context;
    const struct lossynet_comm *comm = lane->comm;
    int n = 0, finished = 0, *next = &lane->next[phase][rank];
    struct ln_cursor *cursor = cursors(lane, phase, rank);
    for (int i = 0; i < comm->workers.local; i++) {
        const int v = (*next + i) % comm->workers.local;
        if (n < most) n = next_of_worker(lane, phase, rank, v, &cursor[v], spans, n, most);
        finished += cursor[v].bucket >= comm->partition.buckets;
    }
    *next = (*next + 1) % comm->workers.local;
    *complete = finished == comm->workers.local;
    return n;
}

static bool ready(void *context, lossynet_phase phase, int rank) {
    const struct ln_lane *lane = context;
    const struct lossynet_comm *comm = lane->comm;
    const struct ln_cursor *cursor = cursors(lane, phase, rank);
    for (int v = 0; v < comm->workers.local; v++)
        if (cursor[v].bucket <
            __atomic_load_n(&comm->exchange.source[phase].ready[v], __ATOMIC_ACQUIRE))
            return true;
    return false;
}

/* ---- what comes ---- */

/* How many of a shard's packets a thread moves. */
static size_t part_of(const struct ln_lane *lane, size_t packets) {
    const size_t lanes = lane->comm->exchange.lanes;
    return (packets + lanes - 1 - lane->number) / lanes;
}

static uint32_t expected(void *context, lossynet_phase phase, int bucket, int sender) {
    const struct ln_lane *lane = context;
    const struct lossynet_comm *comm = lane->comm;
    size_t packets = 0;
    for (int v = 0; v < comm->workers.local; v++) {
        const int owner = phase == LOSSYNET_GRADIENT ? comm->workers.first + v : sender;
        if (ln_is_link(comm, phase, sender, comm->workers.first + v))
            packets += part_of(lane, ln_shard_packets(&comm->partition, bucket, owner));
    }
    return (uint32_t)packets;
}

/* The number of elements in a packet; 0 if there is no such packet. */
static size_t elements(const struct lossynet_comm *comm, lossynet_phase phase,
                       const struct ln_packet *packet) {
    const int owner = phase == LOSSYNET_GRADIENT ? packet->receiver : packet->sender;
    size_t offset, count;
    if (packet->number >= ln_shard_packets(&comm->partition, packet->bucket, owner) ||
        !ln_is_link(comm, phase, packet->sender, packet->receiver))
        return 0;
    ln_packet_span(&comm->partition, packet->bucket, owner, packet->number, &offset, &count);
    return count;
}

static size_t bytes(void *context, lossynet_phase phase, const struct ln_packet *packet) {
    const struct ln_lane *lane = context;
    const struct lossynet_comm *comm = lane->comm;
    if (packet->number % comm->exchange.lanes != lane->number) return 0;
    return ln_payload_bytes(comm->partition.dtype[phase], elements(comm, phase, packet));
}

/* Where a packet's elements are stored: parameters in the vector, gradients in the inbox. */
static void *landing(const struct lossynet_comm *comm, lossynet_phase phase,
                     const struct ln_packet *packet, int v) {
    const struct ln_partition *partition = &comm->partition;
    const size_t skip = (size_t)packet->number * partition->packet_elements;
    size_t offset, count;
    if (phase == LOSSYNET_PARAMETER) {
        ln_shard_span(partition, packet->sender, packet->bucket, &offset, &count);
        return ln_element(comm, comm->exchange.source[phase].vectors[v], offset + skip);
    }
    const size_t row = (size_t)packet->receiver * (partition->buckets + 1) + packet->bucket;
    return ln_inbox(comm, v, packet->sender, partition->owner_element[row] + skip);
}

/* Stores a packet at local worker v. False: it came before. */
static bool take(const struct lossynet_comm *comm, lossynet_phase phase,
                 const struct ln_packet *packet, int v, size_t k, const uint8_t *payload,
                 size_t count) {
    size_t n;
    uint8_t *arrived = ln_arrived(comm, phase, v, packet->sender, &n) + k;
    if (*arrived) return false;
    *arrived = 1;
    if (phase == LOSSYNET_GRADIENT && comm->feedback.unconfirmed.on)
        comm->feedback.mass[arrived - comm->arrivals.arrived[phase]] =
            ln_unconfirmed_mass(comm, packet->gradients);
    void *to = landing(comm, phase, packet, v);
    if (comm->resources.bf16)
        ln_elements_unpack_bf16(comm->partition.dtype[phase], to, payload, count);
    else
        ln_elements_unpack(comm->partition.dtype[phase], to, payload, count);
    return true;
}

static enum ln_delivery deliver(void *context, lossynet_phase phase, const struct ln_packet *packet,
                                const uint8_t *payload, size_t length) {
    const struct lossynet_comm *comm = ((const struct ln_lane *)context)->comm;
    const size_t count = elements(comm, phase, packet);
    (void)length; /* it matches the number of elements, see `bytes` */
    if (!comm->exchange.reliable &&
        !ln_elements_are_finite(comm->partition.dtype[phase], payload, count))
        return LOSSYNET_NOT_FINITE;
    const int owner = phase == LOSSYNET_GRADIENT ? packet->receiver : packet->sender;
    const size_t k = ln_packets_before(&comm->partition, packet->bucket, owner) + packet->number;
    return take(comm, phase, packet, packet->receiver - comm->workers.first, k, payload, count)
               ? LOSSYNET_TAKEN
               : LOSSYNET_CAME_BEFORE;
}

static const uint8_t *acknowledge(void *context, int rank, bool make, size_t *bytes) {
    const struct ln_lane *lane = context;
    return ln_acknowledge_answer(lane->comm, rank, make, bytes);
}

/* ---- open and close ---- */

static void open_inbox(struct lossynet_comm *comm, void *(*allocate)(size_t bytes),
                       void (*release)(void *memory)) {
    struct ln_exchange *exchange = &comm->exchange;
    const size_t remote = (size_t)ln_remote_groups(comm);
    size_t elements = 0;
    COMM_TAKE(comm, exchange->inbox_start, (size_t)comm->workers.local);
    for (int v = 0; v < comm->workers.local; v++) {
        if (exchange->inbox_start) exchange->inbox_start[v] = elements;
        elements += ln_partition_owned(&comm->partition, comm->workers.first + v) * remote;
    }
    exchange->inbox = ln_pool_take_from(&comm->resources.pool, elements, ln_element_bytes(comm),
                                        allocate, release);
}

static void open_lane(struct lossynet_comm *comm, size_t i) {
    const size_t local = (size_t)comm->workers.local, ranks = (size_t)comm->world.ranks;
    struct ln_lane measured, *lane = comm->exchange.lane ? &comm->exchange.lane[i] : &measured;
    lane->comm = comm;
    lane->number = i;
    for (int phase = 0; phase < 2; phase++) {
        COMM_TAKE(comm, lane->cursor[phase], ranks * local);
        COMM_TAKE(comm, lane->next[phase], ranks);
    }
    lane->rounded = NULL;
    if (ln_has_bf16(&comm->partition))
        COMM_TAKE(comm, lane->rounded, LOSSYNET_BATCH * comm->exchange.packet_bytes);
}

void ln_exchange_open(struct lossynet_comm *comm, void *(*allocate)(size_t bytes),
                      void (*release)(void *memory)) {
    const struct ln_partition *partition = &comm->partition;
    const size_t local = (size_t)comm->workers.local;
    for (int phase = 0; phase < 2; phase++) {
        struct ln_source *source = &comm->exchange.source[phase];
        COMM_TAKE(comm, source->ready, local);
        COMM_TAKE(comm, comm->arrivals.survives[phase],
                  ln_links(comm, phase == LOSSYNET_PARAMETER));
    }
    open_inbox(comm, allocate, release);
    comm->exchange.packet_bytes =
        ln_payload_bytes(partition->dtype[LOSSYNET_PARAMETER], partition->packet_elements);
    COMM_TAKE(comm, comm->exchange.lane, comm->exchange.lanes);
    for (size_t i = 0; i < comm->exchange.lanes; i++) open_lane(comm, i);
    if (ln_has_blocks(partition) && ln_remote_groups(comm) > 1) {
        COMM_TAKE(comm, comm->exchange.kept, owned_packets(comm) * comm->exchange.packet_bytes);
        COMM_TAKE(comm, comm->exchange.is_kept, owned_packets(comm));
    }
    const struct ln_transport_shape shape = {
        .workers = comm->workers.count,
        .local = comm->workers.local,
        .buckets = partition->buckets,
        .packet_bytes = comm->exchange.packet_bytes,
        .elements = ln_has_blocks(partition) ? WIRE_BLOCKS
                    : ln_has_bf16(partition) ? WIRE_BF16
                                             : WIRE_FLOAT32,
    };
    struct ln_transport_calls calls = {.next = next,
                                       .ready = ready,
                                       .expected = expected,
                                       .bytes = bytes,
                                       .deliver = deliver,
                                       .acknowledge = acknowledge};
    for (size_t i = 0; i < comm->exchange.lanes; i++) {
        calls.context = comm->exchange.lane ? &comm->exchange.lane[i] : NULL;
        ln_transport_shape(comm->transport, i, &comm->resources.pool, &shape, &calls);
    }
}
