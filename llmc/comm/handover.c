/* handover.c — see handover.h. */
#include "llmc/comm/handover.h"

#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/log/error.h"
#include "llmc/backend/host_vector.h"
#include "llmc/comm/data_parallel_model.h"
#include "llmc/comm/rank_state.h"

static void *take_memory(size_t count, size_t bytes) {
    void *memory = calloc(count ? count : 1, bytes ? bytes : 1);
    if (!memory) log_out_of_memory("what ranks hand over", (double)count * (double)bytes);
    return memory;
}

/* ---- the state of a rank ---------------------------------------------------------------- */

void handover_release(struct handover *h) {
    free(h->shard);
    free(h->age);
    free(h->params);
    free(h->owned);
    memset(h, 0, sizeof *h);
}

static size_t packets_of(const struct handover *h, const struct handover_shard *s) {
    return (s->range.count + h->packet_elements - 1) / h->packet_elements;
}

static bool is_own(const struct handover *h, const struct handover_shard *s) {
    return s->owner >= h->first && s->owner < h->first + h->local;
}

/* The elements of packet k of a shard. */
static struct range packet_at(const struct handover *h, const struct handover_shard *s, size_t k) {
    const size_t E = h->packet_elements, skip = k * E, rest = s->range.count - skip;
    return (struct range){s->range.offset + skip, rest < E ? rest : E, 0};
}

/* Copies the packets of a local worker's replica that are fresher than those in h->params so far. */
static int take_replica(const struct data_parallel *d, const struct worker *w, struct handover *h) {
    const uint32_t *ages = lossynet_ages(d->comm, w->id);
    float *replica = host_vector(d->be, w->params, d->layout->count, true);
    if (!replica) return -1;
    for (const struct handover_shard *s = h->shard; s < h->shard + h->shards; s++) {
        const bool own = s->owner == w->id;
        for (size_t k = 0, p = s->packet; k < packets_of(h, s); k++, p++) {
            const struct range at = packet_at(h, s, k);
            const uint32_t age = own ? 0 : ages[p];
            const uint8_t is = age < HANDOVER_OLDEST ? (uint8_t)age : HANDOVER_OLDEST;
            if (is >= h->age[p] && !own) continue;
            h->age[p] = is;
            memcpy(h->params + at.offset, replica + at.offset, at.count * sizeof *replica);
        }
    }
    host_vector_end(d->be, replica);
    return 0;
}

/* Copies the arrays that follow a local worker's elements to where its shards say. */
static void take_owned(const struct data_parallel *d, const struct worker *w, struct handover *h,
                       size_t state) {
    float *to = h->owned + state;
    for (int a = 0; a < ARRAYS; a++) {
        if (!array_rows[a].follows) continue;
        const struct ranges mine = state_of_owner(d, w, (enum array)a);
        struct range has, place;
        for (int b = 0; b < d->layout->buckets; b++)
            for (size_t i = 0; ranges_next(mine.range, mine.count, w->range[b], &i, &has, &place);)
                d->be->download(to + place.state, worker_array(w, (enum array)a) + has.state,
                                has.count * sizeof *to);
        to += h->elements;
    }
    for (int b = 0; b < d->layout->buckets; b++)
        h->shard[b * d->workers + w->id].range.state = state + w->range[b].state;
}

static void list_shards(const struct data_parallel *d, struct handover *h) {
    size_t packet = 0;
    for (int i = 0; i < h->shards; i++) {
        struct handover_shard *s = &h->shard[i];
        s->owner = i % d->workers;
        s->packet = packet;
        lossynet_shard(d->comm, s->owner, i / d->workers, &s->range.offset, &s->range.count);
        packet += packets_of(h, s);
    }
    assert(packet == lossynet_packets(d->comm));
}

int handover_take(const struct data_parallel *d, int64_t epoch, struct handover *out) {
    struct handover h = {.epoch = epoch,
                         .workers = d->workers,
                         .first = d->worker[0].id,
                         .local = d->local,
                         .shards = d->layout->buckets * d->workers,
                         .packet_elements = lossynet_packet_elements(d->comm)};
    const size_t packets = lossynet_packets(d->comm);
    size_t state = 0;
    handover_release(out);
    for (int w = 0; w < h.local; w++) h.elements += d->worker[w].owned;
    h.shard = take_memory((size_t)h.shards, sizeof *h.shard);
    h.age = take_memory(packets, 1);
    h.params = take_memory(d->layout->count, sizeof *h.params);
    h.owned = take_memory(h.elements, (size_t)arrays_that_follow() * sizeof *h.owned);
    int failed = !h.shard || !h.age || !h.params || !h.owned;
    if (!failed) {
        memset(h.age, HANDOVER_NOTHING, packets);
        list_shards(d, &h);
    }
    for (int w = 0; w < h.local && !failed; state += d->worker[w++].owned) {
        failed = take_replica(d, &d->worker[w], &h);
        if (!failed) take_owned(d, &d->worker[w], &h, state);
    }
    *out = h;
    if (failed) handover_release(out);
    return failed ? -1 : 0;
}

/* ---- all ranks: who has which state ----------------------------------------------------- */

struct claim { /* a rank's description of its state */
    int64_t epoch;
    int workers, first, local;
    size_t packets, own; /* in the ended view, of all owners and of the rank's */
    struct handover_place place;
};

struct giving {               /* one call of handover_give */
    const struct handover *h; /* this rank's state; empty if it is not from the newest view */
    struct data_parallel *d;
    struct claim *claim; /* [ranks] */
    int *holder; /* [workers of the ended view]: the rank that has this owner's state; -1: none */
    int workers; /* in the ended view */
    size_t orphans;      /* packets of owners whose state no rank has, in the order of elements */
    uint8_t *ages;       /* [ranks][orphans], of each rank's copies */
    double *square;      /* [spans]: mean of the second moment over survivors */
    struct ranges piece; /* what this rank gives, in ascending order; state: place in h->owned */
};

static int gather_of_ranks(struct data_parallel *d, const void *mine, void *all, size_t bytes) {
    return lossynet_rank_gather(d->comm, mine, all, bytes, false) ? -1 : 0;
}

/* Gathers the claims: finds the ranks that were in the newest view, and how far the run is. */
static int hear_claims(struct giving *g, const struct handover *h, struct handover_place *place,
                       struct handover_report *report) {
    static const struct handover nothing;
    const int ranks = g->d->world.ranks;
    struct claim mine = {.epoch = h->epoch,
                         .workers = h->workers,
                         .first = h->first,
                         .local = h->local,
                         .place = *place};
    for (int i = 0; i < h->shards; i++) {
        const struct handover_shard *s = &h->shard[i];
        mine.packets += packets_of(h, s);
        if (is_own(h, s)) mine.own += packets_of(h, s);
    }
    int64_t newest = 0;
    const struct claim *farthest = NULL;
    g->claim = take_memory((size_t)ranks, sizeof *g->claim);
    if (!g->claim || gather_of_ranks(g->d, &mine, g->claim, sizeof mine)) return -1;
    for (int r = 0; r < ranks; r++)
        if (g->claim[r].epoch > newest) newest = g->claim[r].epoch;
    memset(report, 0, sizeof *report);
    for (int r = 1; r < ranks && newest == 0; r++)
        if (g->claim[r].place.at.step != g->claim[0].place.at.step)
            return log_error(
                "rank %d begins after %d steps, rank 0 after %d: expected all ranks to "
                "resume from the same checkpoint; start them again",
                r, g->claim[r].place.at.step, g->claim[0].place.at.step);
    if (newest == 0) return 0;
    for (int r = 0; r < ranks; r++) {
        const struct claim *c = &g->claim[r];
        if (c->epoch != newest) {
            report->joined++;
            continue;
        }
        if (!report->survivors++) g->orphans = c->packets;
        g->orphans -= c->own;
        g->workers = c->workers;
        if (!farthest || c->place.at.step > farthest->place.at.step) farthest = c;
    }
    *place = farthest->place;
    g->h = h->epoch == newest ? h : &nothing;
    g->holder = take_memory((size_t)g->workers, sizeof *g->holder);
    if (!g->holder) return -1;
    for (int o = 0; o < g->workers; o++) g->holder[o] = -1;
    for (int r = 0; r < ranks; r++)
        for (int w = 0; g->claim[r].epoch == newest && w < g->claim[r].local; w++)
            g->holder[g->claim[r].first + w] = r;
    return 0;
}

/* ---- the pieces that this rank gives ---------------------------------------------------- */

static const size_t WITHOUT = SIZE_MAX / 2; /* state of a piece without moments; or larger */

/* The rank whose copy of orphan p is the freshest, and its age. Among equal ages it is the first rank
 * from p % ranks on, so that ranks share the work. */
static int freshest(const struct giving *g, size_t p, uint8_t *age) {
    const size_t ranks = (size_t)g->d->world.ranks;
    size_t best = p % ranks;
    for (size_t i = 1; i < ranks; i++) {
        const size_t r = (p + i) % ranks;
        if (g->ages[r * g->orphans + p] < g->ages[best * g->orphans + p]) best = r;
    }
    *age = g->ages[best * g->orphans + p];
    return (int)best;
}

/* Gathers how old each rank's copies of the orphans are. */
static int gather_ages(struct giving *g, struct handover_report *report) {
    const struct handover *h = g->h;
    uint8_t *mine = take_memory(g->orphans, 1), age;
    size_t p = 0;
    g->ages = take_memory((size_t)g->d->world.ranks * g->orphans, 1);
    int failed = !mine || !g->ages;
    if (!failed) memset(mine, HANDOVER_NOTHING, g->orphans);
    for (int i = 0; i < h->shards && !failed; i++) {
        const size_t n = packets_of(h, &h->shard[i]);
        if (g->holder[h->shard[i].owner] >= 0) continue;
        memcpy(mine + p, h->age + h->shard[i].packet, n);
        p += n;
    }
    failed = failed || gather_of_ranks(g->d, mine, g->ages, g->orphans);
    for (p = 0; p < g->orphans && !failed; p++) {
        freshest(g, p, &age);
        report->mean_age += (double)age / (double)g->orphans;
        if (age > report->max_age) report->max_age = age;
    }
    report->adopted = g->orphans;
    free(mine);
    return failed;
}

/* Lists the shards of this rank, and the orphans of which it has the freshest copy. */
static int find_pieces(struct giving *g) {
    const struct handover *h = g->h;
    const int rank = g->d->world.rank;
    size_t p = 0; /* orphans so far */
    int failed = 0;
    for (int i = 0; i < h->shards && !failed; i++) {
        const struct handover_shard *s = &h->shard[i];
        const int holder = g->holder[s->owner];
        if (holder == rank) failed = ranges_add(&g->piece, s->range);
        for (size_t k = 0; holder < 0 && k < packets_of(h, s) && !failed; k++, p++) {
            struct range piece = packet_at(h, s, k);
            uint8_t age;
            piece.state = WITHOUT;
            if (freshest(g, p, &age) == rank) failed = ranges_add(&g->piece, piece);
        }
    }
    return failed;
}

/* Computes the mean of the survivors' second moments in each tensor. */
static int average_squares(struct giving *g) {
    const struct param_layout *l = g->d->layout;
    const size_t spans = (size_t)l->spans, ranks = (size_t)g->d->world.ranks;
    double *mine = take_memory(2 * spans, sizeof *mine);
    double *all = take_memory(2 * spans * ranks, sizeof *all);
    const float *v = g->h->owned + (size_t)array_following(ARRAY_V) * g->h->elements;
    double whole[2] = {0, 0};
    g->square = take_memory(spans, sizeof *g->square);
    int failed = !mine || !all || !g->square;
    for (size_t i = 0; i < g->piece.count && !failed; i++) {
        const struct range *piece = &g->piece.range[i];
        for (size_t s = 0; s < spans && piece->state != WITHOUT; s++) {
            const struct span *span = &l->span[s];
            const struct range both =
                range_common(*piece, (struct range){span->offset, span->count, 0});
            for (size_t e = 0; e < both.count; e++) mine[2 * s] += v[both.state + e];
            mine[2 * s + 1] += (double)both.count;
        }
    }
    failed = failed || gather_of_ranks(g->d, mine, all, 2 * spans * sizeof *mine);
    for (size_t s = 0; s < spans && !failed; s++) {
        mine[2 * s] = mine[2 * s + 1] = 0;
        for (size_t r = 0; r < ranks; r++)
            for (size_t i = 0; i < 2; i++) mine[2 * s + i] += all[2 * (r * spans + s) + i];
        for (size_t i = 0; i < 2; i++) whole[i] += mine[2 * s + i];
    }
    for (size_t s = 0; s < spans && !failed; s++) {
        const double *sum = mine[2 * s + 1] > 0 ? mine + 2 * s : whole; /* whole: all was lost */
        g->square[s] = sum[1] > 0 ? sum[0] / sum[1] : 0;
    }
    free(mine);
    free(all);
    return failed ? -1 : 0;
}

/* ---- messages ---- */

/* A message to a rank has what the rank owns now of this rank's pieces: their ranges, then their
 * parameters, then each of the arrays that follow them. */
struct message {
    uint64_t ranges, elements;
};

static size_t message_bytes(const struct ranges *list) {
    const size_t values = (1 + (size_t)arrays_that_follow()) * list->elements;
    const size_t bytes = sizeof(struct message) + list->count * sizeof(struct range);
    return (bytes + values * sizeof(float) + 7) / 8 * 8;
}

/* Lists the parts of this rank's pieces that a rank owns now, in the order of elements. */
static int find_parts(const struct giving *g, int rank, struct ranges *list) {
    const struct data_parallel *d = g->d;
    struct range shard = {0}, part, of_shard;
    int failed = 0;
    for (int i = 0; i < d->layout->buckets * d->local; i++) {
        lossynet_shard(d->comm, rank * d->local + i % d->local, i / d->local, &shard.offset,
                       &shard.count);
        for (size_t k = 0;
             !failed && ranges_next(g->piece.range, g->piece.count, shard, &k, &part, &of_shard);)
            failed = ranges_add(list, part);
    }
    return failed;
}

/* Writes what an array that follows has of a part of a piece. */
static void write_values(const struct giving *g, enum array array, struct range part, float *to) {
    const struct param_layout *l = g->d->layout;
    const float *owned = g->h->owned + (size_t)array_following(array) * g->h->elements;
    if (part.state < WITHOUT) {
        memcpy(to, owned + part.state, part.count * sizeof *to);
        return;
    }
    int span = 0;
    for (size_t i = 0; i < part.count; i++) {
        while (l->span[span].offset + l->span[span].count <= part.offset + i) span++;
        to[i] = array == ARRAY_V ? (float)g->square[span] : 0;
    }
}

static void write_message(const struct giving *g, const struct ranges *parts, char *to) {
    struct message *m = (struct message *)to;
    struct range *list = (struct range *)(m + 1);
    const struct range *part = parts->range;
    float *value = (float *)(list + parts->count);
    size_t state = 0;
    *m = (struct message){parts->count, parts->elements};
    for (size_t i = 0; i < m->ranges; value += part[i].count, state += part[i++].count) {
        list[i] = (struct range){part[i].offset, part[i].count, state};
        memcpy(value, g->h->params + part[i].offset, part[i].count * sizeof *value);
    }
    for (int a = 0; a < ARRAYS; a++)
        for (size_t i = 0; i < m->ranges && array_rows[a].follows; value += part[i++].count)
            write_values(g, (enum array)a, part[i], value);
}

/* Takes the parameters of a message, and gives the rest to the workers. Returns the number of elements
 * that they took. */
static size_t read_message(const struct giving *g, const char *from, float *params) {
    const struct message *m = (const struct message *)from;
    const struct range *list = (const struct range *)(m + 1);
    const char *values = (const char *)(list + m->ranges);
    size_t taken = 0;
    for (size_t i = 0; i < m->ranges; i++)
        memcpy(params + list[i].offset, values + list[i].state * sizeof *params,
               list[i].count * sizeof *params);
    for (int a = 0; a < ARRAYS; a++) {
        if (array_rows[a].follows) values += m->elements * sizeof *params;
        for (int w = 0; w < g->d->local && array_rows[a].follows; w++) {
            const size_t took =
                state_take(g->d, &g->d->worker[w], (enum array)a, list, m->ranges, values);
            if (a == ARRAY_M) taken += took;
        }
    }
    return taken;
}

/* params: receives what the local workers own. *came: the number of these elements. */
static int exchange_messages(struct giving *g, float *params, size_t *came) {
    const size_t ranks = (size_t)g->d->world.ranks, rank = (size_t)g->d->world.rank;
    uint64_t *gives = take_memory(ranks, sizeof *gives);
    uint64_t *all = take_memory(ranks * ranks, sizeof *all);
    size_t *offset = take_memory(2 * (ranks + 1), sizeof *offset);
    struct ranges *parts = take_memory(ranks, sizeof *parts);
    char *out = NULL, *in = NULL;
    int failed = !gives || !all || !offset || !parts;
    for (size_t r = 0; r < ranks && !failed; r++) {
        failed = find_parts(g, (int)r, &parts[r]);
        gives[r] = message_bytes(&parts[r]);
    }
    failed = failed || gather_of_ranks(g->d, gives, all, ranks * sizeof *gives);
    if (!failed) {
        size_t *in_offset = offset + ranks + 1;
        for (size_t r = 0; r < ranks; r++) {
            offset[r + 1] = offset[r] + gives[r];
            in_offset[r + 1] = in_offset[r] + all[r * ranks + rank];
        }
        out = take_memory(offset[ranks], 1);
        in = take_memory(in_offset[ranks], 1);
        failed = !out || !in;
        for (size_t r = 0; r < ranks && !failed; r++) write_message(g, &parts[r], out + offset[r]);
        failed = failed || lossynet_swap(g->d->comm, out, offset, in, in_offset) != LOSSYNET_OK;
        for (size_t r = 0; r < ranks && !failed; r++)
            *came += read_message(g, in + in_offset[r], params);
    }
    for (size_t r = 0; parts && r < ranks; r++) free(parts[r].range);
    free(parts);
    free(gives);
    free(all);
    free(offset);
    free(out);
    free(in);
    return failed ? -1 : 0;
}

/* ---- the whole handover ----------------------------------------------------------------- */

/* Sets the workers' parameters: first the shards of each worker, then every replica to the model. */
static int set_workers(struct data_parallel *d, const float *params) {
    const size_t P = d->layout->count;
    for (int w = 0; w < d->local; w++) worker_initialise(&d->worker[w], d->be, params, P);
    if (d->workers == 1) return 0;
    const float *model;
    if (data_parallel_model(d, &model)) return -1;
    float *host = host_vector(d->be, (float *)model, P, true);
    for (int w = 0; host && w < d->local; w++) worker_initialise(&d->worker[w], d->be, host, P);
    if (host) host_vector_end(d->be, host);
    return host ? 0 : -1;
}

static int give(struct giving *g, struct handover_report *report) {
    struct data_parallel *d = g->d;
    size_t owned = 0, came = 0;
    float *params = take_memory(d->layout->count, sizeof *params);
    for (int w = 0; w < d->local; w++) owned += d->worker[w].owned;
    int failed = !params || (g->orphans && gather_ages(g, report)) || find_pieces(g) ||
                 average_squares(g) || exchange_messages(g, params, &came);
    if (!failed && came != owned)
        failed = log_error("handover: %zu of %zu parameters came: expected every one from one of "
                           "the ranks that were there before",
                           came, owned);
    failed = failed || set_workers(d, params);
    free(params);
    return failed ? -1 : 0;
}

int handover_give(const struct handover *h, struct data_parallel *d, struct handover_place *place,
                  struct handover_report *report) {
    struct giving g = {.h = h, .d = d};
    int failed = hear_claims(&g, h, place, report);
    if (!failed && g.holder) failed = give(&g, report);
    free(g.claim);
    free(g.holder);
    free(g.ages);
    free(g.square);
    free(g.piece.range);
    return failed ? -1 : 0;
}
