/* retransmit.c — sends lost packets of a phase again, a bounded number of times.
 *
 * In a round the receivers tell the senders which packets they ask for again (acknowledge.c: reliably,
 * one bit per packet). The senders send these once more, and they may be lost again. With loss rate
 * p and r rounds a packet stays lost with probability p^(r+1). So formulas in p (estimators, ages,
 * drift) hold with p^(r+1) instead. The cost is p + p^2 + ... + p^r of the phase's traffic, and a
 * round trip or two per round, in which nothing is computed.
 *
 * Tensors and links may have more or fewer rounds than the others (names.c). The budget does not bind them.
 *
 * A budget bounds this cost: a worker asks for at most this share of the packets that a phase has
 * for it. It then asks first for packets that have been missing longest: the oldest parameters, or
 * with error feedback the gradients whose sender holds most in its residual (error_feedback.c).
 * Among equal packets it chooses at random, so that every part of the model gets its turn. The
 * distribution of ages then has a shorter tail than the geometric one that expected drift assumes.
 *
 * A round is a phase of its own on the wire (send.c). It has only these packets, and the same
 * deadlines as any other phase. If a rank is late in a phase or a round, the other ranks neither
 * wait for it in further rounds of the step nor ask it. If a rank asks too late, nobody answers it.
 * A trace records what had arrived after the last round, and error feedback acknowledges it.
 * Injected loss is drawn anew for each round, as a function of (step, round), also for bursts and
 * traces, because a round comes a round trip later, when a burst of packets is over. An outage of
 * whole steps lasts longer: there a round takes another way (ways.c).
 */
#include "lossynet/algorithm/algorithm.h"

enum { AGES = 64 }; /* classes of steps missing: 0 ... 62, and more */

void ln_retransmission_open(struct lossynet_comm *comm) {
    size_t packets = 0;
    for (int phase = 0; phase < 2; phase++) {
        const size_t links = ln_links(comm, phase == LOSSYNET_GRADIENT);
        if (!ln_rounds_most(comm, (lossynet_phase)phase)) continue;
        if (packets < links) packets = links;
        if (!packets) packets = 1; /* who owns nothing receives none, and makes the rounds */
    }
    if (!packets) return;
    COMM_TAKE(comm, comm->retransmission.asks, packets);
    COMM_TAKE(comm, comm->retransmission.asked, (size_t)comm->workers.local);
    COMM_TAKE(comm, comm->retransmission.sends, (size_t)comm->world.ranks);
    COMM_TAKE(comm, comm->retransmission.hops,
              (size_t)comm->workers.local * (size_t)comm->workers.count);
}

int ln_retransmission_rounds(const struct lossynet_comm *comm, lossynet_phase phase) {
    const int own = comm->retransmission.most_own[phase], all = lossynet_rounds_now(comm, phase);
    if (comm->loss.replay) return 0;
    return own > all ? own : all;
}

/* ---- asking ---- */

struct wanted { /* the packets of a phase that are for local worker v */
    int worker;
    size_t count, own;      /* all packets; those from the worker itself */
    const uint8_t *arrived; /* by link, as arrivals.arrived */
    uint8_t *asks;
    const float *mass;   /* GRADIENT, by link; NULL: no error feedback */
    const uint32_t *age; /* PARAMETER, in order of packets; else NULL */
    const uint8_t *hops; /* by sender */
    int runs;            /* see run_of */
    bool is_over;        /* only tensors and links with rounds of their own have more of them */
};

/* How many packets of a phase are for local worker v, its own included. */
static size_t packets_for(const struct lossynet_comm *comm, lossynet_phase phase, int v) {
    size_t packets = 0, n;
    for (int sender = 0; sender < comm->workers.count; sender++) {
        ln_rx(comm, phase, v, sender, &n);
        packets += n;
    }
    return packets;
}

static struct wanted wanted_by(const struct lossynet_comm *comm, lossynet_phase phase, int v) {
    const struct ln_partition *partition = &comm->partition;
    const bool gradient = phase == LOSSYNET_GRADIENT;
    size_t own = ln_partition_owner_packets(partition, comm->workers.first + v), n;
    size_t start = ln_rx(comm, phase, v, 0, &n);
    return (struct wanted){
        .worker = comm->workers.first + v,
        .count = packets_for(comm, phase, v),
        .own = own,
        .arrived = comm->arrivals.arrived[phase] + start,
        .asks = comm->retransmission.asks + start,
        .mass = gradient ? ln_feedback_mass(comm, v) : NULL,
        .age = gradient ? NULL : comm->arrivals.age + (size_t)v * partition->packets,
        .hops = comm->retransmission.hops + (size_t)v * partition->workers,
        .runs = (gradient ? 1 : partition->buckets) * partition->workers,
        .is_over = comm->steps.round > lossynet_rounds_now(comm, phase),
    };
}

/* The packets of run r. Gradients are visited by link, parameters in order of packets; this order
 * must not change, because random choices depend on it. A run is contiguous in both orders: from
 * `index` on in the order of visits, and from `at` on by link. Its sender is worker r modulo the
 * number of workers. */
static void run_of(const struct lossynet_comm *comm, const struct wanted *w, int r, size_t *index,
                   size_t *at, size_t *count) {
    const struct ln_partition *partition = &comm->partition;
    const int bucket = r / partition->workers, owner = r % partition->workers;
    *count = 0;
    if (w->age ? !ln_is_partner(partition, w->worker, owner)
               : !ln_is_partner(partition, owner, w->worker))
        return;
    if (!w->age) { /* GRADIENT: all packets from sender r */
        *index = *at = (size_t)r * w->own;
        *count = w->own;
        return;
    }
    *index = partition->shard_packet[r];
    *count = partition->shard_packet[r + 1] - *index;
    *at = partition->owner_start[owner] + ln_packets_before(partition, bucket, owner);
}

/* The rounds that a packet has of its own (names.c); -1: as many as all others. */
static int own_rounds(const struct lossynet_comm *comm, const struct wanted *w, int sender,
                      size_t at) {
    const lossynet_phase phase = w->age ? LOSSYNET_PARAMETER : LOSSYNET_GRADIENT;
    const size_t first = w->age ? comm->partition.owner_start[sender] : (size_t)sender * w->own;
    return ln_names_rounds(comm, phase, sender, w->worker, at - first);
}

/* For how many steps a packet has been missing; 0: it has arrived, its sender will not send it in this
 * round, or its tensor or link has rounds of its own. */
static size_t missing_for(const struct lossynet_comm *comm, const struct wanted *w, int sender,
                          size_t index, size_t at) {
    if (w->arrived[at] || !w->hops[sender] || w->is_over) return 0;
    if (own_rounds(comm, w, sender, at) >= 0) return 0;
    size_t steps = 1 + (w->age ? (size_t)w->age[index] : w->mass ? (size_t)w->mass[at] : 0);
    return steps < AGES ? steps : AGES - 1;
}

/* Finds the ways from all senders to local worker v in this round. */
static void find_ways(struct lossynet_comm *comm, lossynet_phase phase, int v) {
    uint8_t *hops = comm->retransmission.hops + (size_t)v * comm->workers.count;
    for (int s = 0; s < comm->workers.count; s++) {
        const bool sends = comm->retransmission.sends[s / comm->workers.local];
        hops[s] = sends ? (uint8_t)ln_way_of(comm, phase, s, comm->workers.first + v).hops : 0;
    }
}

/* How many packets may still be sent again for local worker v. */
static size_t room(const struct lossynet_comm *comm, const struct wanted *w, int v) {
    if (comm->retransmission.budget == 0) return SIZE_MAX;
    double most = comm->retransmission.budget * (double)(w->count - w->own);
    return most > (double)comm->retransmission.asked[v]
               ? (size_t)most - comm->retransmission.asked[v]
               : 0;
}

static void ask(struct lossynet_comm *comm, lossynet_phase phase, int v) {
    const struct wanted w = wanted_by(comm, phase, v);
    find_ways(comm, phase, v);
    if (comm->steps.round == 1) comm->retransmission.asked[v] = 0;
    size_t aged[AGES] = {0}, left = room(comm, &w, v), cut = AGES - 1;
    size_t index, at, count;
    for (int r = 0; r < w.runs; r++) {
        run_of(comm, &w, r, &index, &at, &count);
        const int sender = r % comm->workers.count;
        for (size_t k = 0; k < count; k++)
            aged[missing_for(comm, &w, sender, index + k, at + k)] += w.hops[sender];
    }
    /* Asks for all packets missing for more than `cut` steps, and for `left` of those missing for
     * exactly `cut` steps. A packet counts once for each hop. */
    for (; cut > 0 && aged[cut] <= left; cut--) left -= aged[cut];
    size_t among = cut > 0 ? aged[cut] : 0;
    uint64_t lot = ln_mix(comm->loss.seed ^ (uint64_t)phase << 32 ^ (uint64_t)comm->steps.round);
    lot = ln_mix(lot ^ comm->steps.step);
    lot = ln_mix(lot ^ (uint64_t)(comm->workers.first + v));
    for (int r = 0; r < w.runs; r++) {
        run_of(comm, &w, r, &index, &at, &count);
        const int sender = r % comm->workers.count;
        const size_t hops = w.hops[sender];
        for (size_t k = 0; k < count; k++) {
            const size_t steps = missing_for(comm, &w, sender, index + k, at + k);
            bool asks = steps > cut;
            if (steps == cut && among > 0) { /* each with left/among (Knuth's selection sampling) */
                asks = ln_mix(lot + index + k) % among < left && hops <= left;
                among -= hops;
                left -= asks ? hops : 0;
            }
            comm->retransmission.asked[v] += asks ? hops : 0;
            w.asks[at + k] = asks || (!w.arrived[at + k] && hops > 0 &&
                                      own_rounds(comm, &w, sender, at + k) >= comm->steps.round);
        }
    }
}

/* ---- sending ---- */

/* Sets times[k], k < n: how often packet k of local sender v will be sent again to a receiver. What a
 * relay loses has no second hop, and a worker that lacks parameters cannot send them. */
static void count_hops(const struct lossynet_comm *comm, lossynet_phase phase, int v, int receiver,
                       size_t n, uint8_t *times) {
    const int sender = comm->workers.first + v;
    const struct ln_way way = ln_way_of(comm, phase, sender, receiver);
    uint8_t *there = ln_scratch(comm) + comm->partition.largest_owner_packets;
    if (way.by < 0) return;
    ln_way_first_hop(comm, phase, &way, sender, n, there);
    for (size_t k = 0; k < n; k++)
        if (times[k]) times[k] = (uint8_t)(way.hops - 1 + there[k]);
}

/* Counts the packets that local sender v will send again to the others. Injected loss may still
 * drop them. Another worker's hops are counted here, too. */
static void count_resent(struct lossynet_comm *comm, lossynet_phase phase, int v) {
    const struct ln_partition *partition = &comm->partition;
    struct lossynet_counters *counters = &comm->stats.counters[comm->steps.current][v];
    struct lossynet_bucket *buckets =
        comm->stats.buckets[comm->steps.current] + (size_t)v * (size_t)partition->buckets;
    for (int receiver = 0; receiver < comm->workers.count; receiver++) {
        if (receiver == comm->workers.first + v) continue;
        int owner = phase == LOSSYNET_GRADIENT ? receiver : comm->workers.first + v;
        size_t n, start = ln_tx(comm, phase, v, receiver, &n);
        uint8_t *leaves = ln_scratch(comm);
        if (n == 0) continue; /* no partner */
        for (size_t k = 0; k < n; k++) leaves[k] = !comm->arrivals.acked[phase][start + k];
        if (phase == LOSSYNET_GRADIENT) ln_withhold(comm, v, receiver, n, leaves);
        count_hops(comm, phase, v, receiver, n, leaves);
        for (struct ln_place p = {0}; ln_next_place(partition, owner, &p); leaves++) {
            counters->bytes[phase] += *leaves * ln_payload_bytes(partition->dtype[phase], p.count);
            counters->resent[phase] += *leaves;
            buckets[p.bucket].resent[phase] += *leaves;
        }
    }
}

lossynet_status ln_retransmission_ask(struct lossynet_comm *comm, lossynet_phase phase) {
    for (int r = 0; r < comm->world.ranks; r++)
        comm->retransmission.sends[r] = !comm->steps.skips || r == comm->world.rank ||
                                        ln_transport_sends_again(comm->transport, phase, r);
#pragma omp parallel for num_threads(ln_threads_for_marks(comm)) schedule(static)
    for (int v = 0; v < comm->workers.local; v++) ask(comm, phase, v);
    lossynet_status status = ln_acknowledge(comm, phase);
    if (status) return status;
#pragma omp parallel for num_threads(ln_threads_for_marks(comm)) schedule(static)
    for (int v = 0; v < comm->workers.local; v++) count_resent(comm, phase, v);
    return LOSSYNET_OK;
}
