/* error_feedback.c — adds the lost packets of a gradient to the sender's next gradient, so that
 * they are late instead of lost.
 *
 * After a GRADIENT phase senders learn which packets arrived (acknowledge.c). A sender keeps the
 * packets that did not arrive as its residual. In the next step it sends u = g + share * residual.
 * This is error feedback, as in compressed gradient descent (Stich, Cordonnier & Jaggi 2018); here
 * the network is the compressor. Residuals are bfloat16; sums and differences are float32, and only
 * what is kept of them is rounded. A sum that is kept for many steps is rounded at random (struct
 * ln_feedback). What no receiver takes is not kept (not_finite.c).
 *
 * An owner knows which packets were lost. So it knows the mass of each packet, the weight of all
 * gradients that the packet holds: 1, and after a loss 1 + share * (mass before). It divides the
 * sum by the mass that arrived, so that a mean stays a mean however many gradients are late. (A sum
 * divided by N would vary with the losses, by sqrt(2p / (N (1-p))) of itself.) Estimator `zero`
 * divides by N: with share 1 every gradient then counts 1/N in the end. All this costs one more bit
 * per packet, and no exchange of its own with settings.acknowledge_later.
 *
 * The residual also carries what rounding takes away (elements.c), even from packets that
 * arrive: it is u - Q(u) if the packet arrived, and u if it did not. Such an error is not a late
 * gradient and does not count in the mass.
 *
 * Gradients that are one step late are as useful as fresh ones if the noise between batches is
 * larger than what a step changes. This holds in the long flat part of training. While a model
 * changes fast, late gradients are wrong.
 */
#include "lossynet/algorithm/calls.h"

static const double LEAST_WEIGHT = 1e-20; /* of a gradient, for its age to count */

void ln_feedback_open(struct lossynet_comm *comm) {
    size_t local = (size_t)comm->workers.local;
    COMM_TAKE(comm, comm->feedback.residual, local * comm->partition.elements);
    COMM_TAKE(comm, comm->feedback.mass, ln_links(comm, true));
    COMM_TAKE(comm, comm->feedback.late, local);
    COMM_TAKE(comm, comm->feedback.alone, (size_t)comm->workers.count);
    comm->feedback.share = 1;
}

void lossynet_error_feedback_share(struct lossynet_comm *comm, double share) {
    COMM_DEMAND(comm, share >= 0 && share <= 1, "share %g: expected 0 to 1", share);
    comm->feedback.share = (float)share;
}

LN_VECTORIZED
static void add(float *x, const uint16_t *residual, size_t n, float share, bool instead) {
    for (size_t e = 0; instead && e < n; e++) x[e] = ln_bf16_widen(residual[e]);
    for (size_t e = 0; !instead && e < n; e++) x[e] += share * ln_bf16_widen(residual[e]);
}

void ln_feedback_add(struct lossynet_comm *comm, int v, float *vector, int bucket) {
    if (!comm->feedback.residual) return;
    const struct ln_partition *partition = &comm->partition;
    const uint16_t *residual = comm->feedback.residual + (size_t)v * partition->elements;
    const float share = comm->feedback.share;
    const int worker = comm->workers.first + v;
    const bool instead = comm->feedback.unconfirmed.on && !ln_has_gradient(comm, worker);
    for (int b = ln_exchange_next(comm, v); b <= bucket; b++) {
        for (int owner = 0; owner < comm->workers.count; owner++) {
            size_t offset, count;
            if (!ln_is_partner(partition, worker, owner)) continue;
            ln_shard_span(partition, owner, b, &offset, &count);
            add(vector + offset, residual + offset, count, share, instead);
        }
    }
}

void ln_feedback_rest(struct lossynet_comm *comm, float *const *vectors) {
    if (!comm->feedback.residual) return;
#pragma omp parallel for num_threads(ln_threads_for_workers(comm)) schedule(static)
    for (int v = 0; v < comm->workers.local; v++)
        ln_feedback_add(comm, v, vectors[v], comm->partition.buckets - 1);
}

void ln_feedback_save(const struct lossynet_comm *comm, int v, void *out) {
    const size_t n = comm->partition.elements;
    memcpy(out, comm->feedback.residual + (size_t)v * n, n * sizeof(uint16_t));
}

void ln_feedback_load(struct lossynet_comm *comm, int v, const void *in) {
    const size_t n = comm->partition.elements;
    memcpy(comm->feedback.residual + (size_t)v * n, in, n * sizeof(uint16_t));
    if (comm->feedback.unconfirmed.on) ln_unconfirmed_load(comm, v);
}

/* Updates the residual of local worker v, whose packets held `vector`. */
static void keep(const struct lossynet_comm *comm, int v, const float *vector) {
    const struct ln_partition *partition = &comm->partition;
    uint16_t *residual = comm->feedback.residual + (size_t)v * partition->elements;
    const uint64_t lots = ln_residual_lots(comm, v);
    const bool has_error = ln_feedback_error(comm, v) != NULL;
    for (int owner = 0; owner < comm->workers.count; owner++) {
        size_t n;
        const uint8_t *acked =
            comm->arrivals.acked[LOSSYNET_GRADIENT] + ln_tx(comm, LOSSYNET_GRADIENT, v, owner, &n);
        for (struct ln_place p = {0}; n > 0 && ln_next_place(partition, owner, &p);)
            ln_residual_settle(has_error, *acked++, residual + p.offset, vector + p.offset, p.count,
                               lots, p.offset);
    }
}

/* Sum over the gradients in a residual of this mass: the age of each times its weight. A gradient
 * that was lost i times is i steps old and has the weight share^i. A mass is a rounded sum of weights,
 * which smaller and smaller weights may never add up to: the least ones are left out. */
static double late_by(double mass, double share) {
    double late = 0, weight = 1;
    for (int lost = 1; mass > weight / 2 && weight > LEAST_WEIGHT; lost++) {
        mass -= weight;
        weight *= share;
        late += lost * weight;
    }
    return late;
}

/* How late the gradients were that local owner v has averaged. Call it before the masses change. A
 * worker without a gradient in this step sends its residual alone, which is then one step older. */
static struct lossynet_lateness measure_lateness(const struct lossynet_comm *comm, int v) {
    const struct ln_partition *partition = &comm->partition;
    const int worker = comm->workers.first + v;
    const size_t n = ln_partition_owner_packets(partition, worker);
    const float *mass = ln_feedback_mass(comm, v);
    const uint8_t *arrived =
        comm->arrivals.arrived[LOSSYNET_GRADIENT] + comm->arrivals.own_start[v];
    const double share = (double)comm->feedback.share;
    struct lossynet_lateness sum = {0};
    for (size_t k = 0; k < n; k++) {
        double gradients = 0, late = 0;
        for (int g = 0; g < partition->groups.count; g++) {
            const int partner = ln_partner(partition, worker, g);
            const size_t i = (size_t)partner * n + k;
            if (!arrived[i]) continue;
            const double all = 1 + share * (double)mass[i];
            gradients += all;
            if (mass[i] > 0) late += late_by((double)mass[i], share);
            if (comm->feedback.alone[partner]) late += all;
        }
        if (gradients == 0) continue;
        sum.late += late / gradients;
        sum.others += 1 - (arrived[(size_t)worker * n + k] ? 1 : 0) / gradients;
    }
    return sum;
}

void ln_feedback_count(struct lossynet_comm *comm) {
    const float share = comm->feedback.share;
    comm->feedback.step = comm->steps.step;
    ln_without_gradient(comm, comm->feedback.alone);
#pragma omp parallel for num_threads(ln_threads_for_marks(comm)) schedule(static)
    for (int v = 0; v < comm->workers.local; v++) {
        comm->feedback.late[v] = measure_lateness(comm, v);
        /* If acknowledgements may come late, each packet carries its number of gradients
         * (unconfirmed.c). The mass then only says which packets to ask for first
         * (retransmit.c). */
        for (int s = 0; s < comm->workers.count; s++) {
            if (s == comm->workers.first + v) continue; /* its own is never lost */
            size_t n, start = ln_rx(comm, LOSSYNET_GRADIENT, v, s, &n);
            const uint8_t *arrived = comm->arrivals.arrived[LOSSYNET_GRADIENT] + start;
            float *mass = comm->feedback.mass + start;
            for (size_t k = 0; k < n; k++) mass[k] = arrived[k] ? 0 : 1 + share * mass[k];
        }
    }
}

void ln_feedback_keep(struct lossynet_comm *comm, float *const *vectors) {
    /* Rounds what was sent to other ranks, too, so that residuals get the errors. */
    ln_round_others(comm, LOSSYNET_GRADIENT, vectors, true);
    if (comm->feedback.unconfirmed.on) {
        ln_unconfirmed_keep(comm, vectors);
        return;
    }
#pragma omp parallel for num_threads(ln_threads_for_workers(comm)) schedule(static)
    for (int v = 0; v < comm->workers.local; v++) keep(comm, v, vectors[v]);
}
