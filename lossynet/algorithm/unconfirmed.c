/* unconfirmed.c — error feedback when steps do not wait for acknowledgements (settings.network.skip_late).
 *
 * A sender must know whether a packet arrived before it sends the packet's gradient again.
 * Otherwise the gradient could count twice. A late owner acknowledges late. So each link (from a
 * local worker to an owner) is in one of two states at its sender:
 *
 *     confirmed    The sender knows which of its packets arrived. The residual holds those that
 *                  did not.
 *     unconfirmed  The acknowledgement of one step, `sent`, has not come. `apart` holds a copy of
 *                  the packets of that step. Nothing leaves on the link until the acknowledgement
 *                  comes. What the worker computes meanwhile goes into the residual.
 *
 * The owner: an acknowledgement carries the number of its step. The owner repeats it in every step
 * until newer packets arrive on the link. Newer packets leave only after the sender has the
 * acknowledgement. So no acknowledgement is lost for good, and every gradient counts exactly once,
 * however long a rank was away. One exception: if a packet would hold more than MOST gradients, the
 * sender drops them.
 *
 * The transport asks for an acknowledgement that has not come (ask.c), so that links are seldom
 * unconfirmed. On an unconfirmed link a late gradient would come two steps late instead of one, and
 * a late owner would get nothing in the next step.
 *
 * A late sender leaves steps out. So an owner cannot tell from its own losses how many gradients a
 * packet holds; the packet itself says it (wire.h). Averages are divided by the mass
 * M(n) of n gradients: M(1) = 1, M(n) = 1 + share M(n-1). When `apart` joins a residual that holds
 * n newer gradients, it is multiplied by share^n.
 *
 * A worker without a gradient in a step (step.c) sends its residual as it is, not times the share.
 * Its late gradient arrives in this way.
 */
#include "lossynet/algorithm/algorithm.h"

enum { MOST = 255 }; /* gradients in one packet */

static const struct ln_unconfirmed *of(const struct lossynet_comm *comm) {
    return &comm->feedback.unconfirmed;
}

void ln_unconfirmed_open(struct lossynet_comm *comm) {
    struct ln_unconfirmed *u = &comm->feedback.unconfirmed;
    const size_t links = (size_t)comm->workers.local * (size_t)comm->workers.count;
    const size_t packets = ln_links(comm, false);
    u->on = true;
    COMM_TAKE(comm, u->sent, links);
    COMM_TAKE(comm, u->told, links);
    COMM_TAKE(comm, u->tag, links);
    COMM_TAKE(comm, u->own_tag, links);
    COMM_TAKE(comm, u->held, packets);
    COMM_TAKE(comm, u->held_apart, packets);
    COMM_TAKE(comm, u->apart, (size_t)comm->workers.local * comm->partition.elements);
}

static uint32_t now(const struct lossynet_comm *comm) { /* never 0 */
    return (uint32_t)comm->steps.step + 1;
}

static size_t link_of(const struct lossynet_comm *comm, int v, int other) {
    return (size_t)v * comm->workers.count + other;
}

bool ln_unconfirmed_waits(const struct lossynet_comm *comm, int v, int owner) {
    return of(comm)->sent[link_of(comm, v, owner)] != 0;
}

/* ---- sending ---- */

/* How many gradients a packet of local worker v holds: the worker's own, if it has one, and those
 * in its residual. */
static unsigned gradients(const struct lossynet_comm *comm, int v, size_t packet) {
    const unsigned own = ln_has_gradient(comm, comm->workers.first + v);
    return own + of(comm)->held[packet];
}

int ln_unconfirmed_gradients(const struct lossynet_comm *comm, int v, size_t packet) {
    const unsigned n = gradients(comm, v, packet);
    return n < MOST ? (int)n : MOST;
}

static void withhold_unconfirmed(const struct lossynet_comm *comm, int v, int owner, size_t n,
                                 uint8_t *mask) {
    size_t all, start = ln_tx(comm, LOSSYNET_GRADIENT, v, owner, &all);
    const bool waits = ln_unconfirmed_waits(comm, v, owner);
    for (size_t k = 0; k < n; k++)
        mask[k] &= !waits && ln_unconfirmed_gradients(comm, v, start + k) > 0;
}

void ln_withhold(const struct lossynet_comm *comm, int v, int owner, size_t n, uint8_t *mask) {
    const int sender = comm->workers.first + v;
    if (comm->feedback.unconfirmed.on && owner != sender)
        withhold_unconfirmed(comm, v, owner, n, mask);
    else if (!ln_has_gradient(comm, sender))
        memset(mask, 0, n);
}

float ln_unconfirmed_mass(const struct lossynet_comm *comm, int gradients) {
    float mass = 0; /* without the newest gradient, as in ln_feedback_keep */
    for (int n = 1; n < gradients; n++) mass = 1 + comm->feedback.share * mass;
    return mass;
}

/* ---- acknowledgements ---- */

bool ln_unconfirmed_renews(struct lossynet_comm *comm, int v, int sender, const uint8_t *arrived,
                           size_t n, uint32_t *tag) {
    uint32_t *own = &of(comm)->own_tag[link_of(comm, v, sender)];
    const bool any = n > 0 && memchr(arrived, 1, n) != NULL;
    if (any) *own = now(comm);
    *tag = *own;
    return any;
}

void ln_unconfirmed_told(struct lossynet_comm *comm, int v, int owner, bool told, uint32_t tag) {
    of(comm)->told[link_of(comm, v, owner)] = told;
    of(comm)->tag[link_of(comm, v, owner)] = tag;
}

/* ---- after the phase ---- */

struct packet {                 /* one packet of a link */
    uint16_t *residual, *apart; /* [count], bfloat16 */
    const float *sent;          /* [count]: its elements as they were sent, or would have been */
    size_t count;
    uint8_t *held, *held_apart; /* gradients in `residual`, in `apart` */
    bool has_error;             /* the residual holds what rounding took away (error_feedback.c) */
    uint64_t lots;              /* ln_residual_lots */
    size_t offset;              /* of its first element in the vector */
};

static void forget(const struct packet *p) {
    memset(p->residual, 0, p->count * sizeof *p->residual);
    *p->held = 0;
}

/* The packet has arrived, or `apart` holds it: the residual no longer holds its gradients. */
static void leave(const struct packet *p) {
    ln_residual_settle(p->has_error, true, p->residual, p->sent, p->count, p->lots, p->offset);
    *p->held = 0;
}

/* The packet has certainly not arrived: the residual keeps its n gradients. */
static void keep(const struct packet *p, unsigned n) {
    ln_residual_settle(p->has_error, false, p->residual, p->sent, p->count, p->lots, p->offset);
    *p->held = (uint8_t)n;
    if (n > MOST) forget(p);
}

static void put_apart(const struct packet *p, unsigned n) {
    ln_residual_settle(false, false, p->apart, p->sent, p->count, p->lots, p->offset);
    *p->held_apart = (uint8_t)(n < MOST ? n : MOST);
    leave(p);
}

/* What `apart` holds has not arrived: adds it to the residual, whose gradients are all newer. */
static void join(const struct packet *p, float share) {
    float weight = 1;
    for (int i = 0; i < *p->held; i++) weight *= share;
    const uint64_t others = ~p->lots; /* `keep` has just used these */
    for (size_t e = 0; e < p->count; e++) {
        const float late = weight * ln_bf16_widen(p->apart[e]);
        p->residual[e] =
            ln_bf16_keep_sum(ln_bf16_widen(p->residual[e]) + late, others, p->offset + e);
    }
    const unsigned n = (unsigned)*p->held + *p->held_apart;
    *p->held = (uint8_t)n;
    if (n > MOST) forget(p);
}

static void keep_link(const struct lossynet_comm *comm, int v, int owner, const float *vector) {
    const struct ln_partition *partition = &comm->partition;
    const struct ln_unconfirmed *u = of(comm);
    const size_t link = link_of(comm, v, owner), offset_v = (size_t)v * partition->elements;
    const bool told = u->told[link];
    const uint32_t before = u->sent[link];
    size_t n, at = ln_tx(comm, LOSSYNET_GRADIENT, v, owner, &n);
    const uint8_t *acked = comm->arrivals.acked[LOSSYNET_GRADIENT] + at;
    bool any = false;
    for (struct ln_place place = {0}; ln_next_place(partition, owner, &place); acked++, at++) {
        const size_t offset = place.offset;
        const struct packet p = {.residual = comm->feedback.residual + offset_v + offset,
                                 .apart = u->apart + offset_v + offset,
                                 .sent = vector + offset,
                                 .count = place.count,
                                 .held = &u->held[at],
                                 .held_apart = &u->held_apart[at],
                                 .has_error = ln_rounds_vectors(comm),
                                 .lots = ln_residual_lots(comm, v),
                                 .offset = offset};
        const unsigned sent = gradients(comm, v, at);
        any |= sent > 0;
        if (!before && !told)
            put_apart(&p, sent);
        else if (!before && u->tag[link] == now(comm) && *acked)
            leave(&p);
        else
            keep(&p, sent);
        if (before && told && !(u->tag[link] == before && *acked)) join(&p, comm->feedback.share);
    }
    if (before && told)
        u->sent[link] = 0;
    else if (!before && !told && any)
        u->sent[link] = now(comm);
}

void ln_unconfirmed_keep(struct lossynet_comm *comm, float *const *vectors) {
#pragma omp parallel for num_threads(ln_threads_for_workers(comm)) schedule(static)
    for (int v = 0; v < comm->workers.local; v++) {
        struct lossynet_part part;
        lossynet_replayed(comm, comm->workers.first + v, &part);
        if (!part.takes_part) continue;
        for (int owner = 0; owner < comm->workers.count; owner++)
            if (owner != comm->workers.first + v &&
                ln_is_partner(&comm->partition, comm->workers.first + v, owner))
                keep_link(comm, v, owner, vectors[v]);
    }
}

/* Saved states do not hold `held`. A residual counts as one gradient if it is not 0. If
 * residuals also hold what rounding took away, this would be wrong: then `held` is 0, and gradients
 * in the residual do not add to the mass of the next average. */
void ln_unconfirmed_load(struct lossynet_comm *comm, int v) {
    const struct ln_partition *partition = &comm->partition;
    const bool has_error = ln_feedback_error(comm, v) != NULL;
    for (int owner = 0; owner < comm->workers.count; owner++) {
        size_t n, at = ln_tx(comm, LOSSYNET_GRADIENT, v, owner, &n);
        for (struct ln_place p = {0}; n > 0 && ln_next_place(partition, owner, &p); at++) {
            const uint16_t *residual =
                comm->feedback.residual + (size_t)v * partition->elements + p.offset;
            of(comm)->held[at] = 0;
            for (size_t e = 0; !has_error && e < p.count; e++)
                of(comm)->held[at] |= ln_bf16_widen(residual[e]) != 0;
        }
    }
}
