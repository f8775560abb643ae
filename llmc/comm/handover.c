/* handover.c — see handover.h. */
#include "llmc/comm/handover.h"
#include "llmc/comm/data_parallel_model.h"

#include <stdlib.h>
#include <string.h>

#include "llmc/log/error.h"
#include "llmc/backend/host_vector.h"

static void *take_memory(size_t count, size_t bytes) {
    void *memory = calloc(count ? count : 1, bytes ? bytes : 1);
    if (!memory) log_out_of_memory("what ranks hand over", (double)count * (double)bytes);
    return memory;
}

/* Takes memory for the arrays that follow the elements that all workers of this rank own. */
static float *take_owned(const struct data_parallel *d, size_t *elements) {
    *elements = 0;
    for (int w = 0; w < d->local; w++) *elements += d->worker[w].owned;
    return take_memory(*elements, (size_t)arrays_that_follow() * sizeof(float));
}

/* Copies these arrays from the workers or, with `back`, to them. */
static void move_owned(const struct data_parallel *d, float *owned, size_t elements, bool back) {
    for (int w = 0; w < d->local; w++) {
        worker_move_following(&d->worker[w], d->be, owned, elements, back);
        owned += d->worker[w].owned;
    }
}

/* ---- the state of a rank ---------------------------------------------------------------- */

void handover_release(struct handover *h) {
    for (int o = 0; h->owner && o < h->workers; o++) {
        free(h->owner[o].range);
        free(h->owner[o].age);
    }
    free(h->owner);
    free(h->params);
    free(h->owned);
    memset(h, 0, sizeof *h);
}

/* Finds the elements of an owner's packet k: its bucket, offset and count. Calls go in order of
 * packets: *bucket and *before (packets in earlier buckets) start at zero and keep their values. */
static void packet_span(const struct handover *h, const struct handover_owner *owner, size_t k,
                        int *bucket, size_t *before, size_t *offset, size_t *count) {
    const size_t E = h->packet_elements;
    for (;; ++*bucket) {
        const size_t packets = (owner->range[*bucket].count + E - 1) / E;
        if (k < *before + packets) break;
        *before += packets;
    }
    const size_t skip = (k - *before) * E, rest = owner->range[*bucket].count - skip;
    *offset = owner->range[*bucket].offset + skip;
    *count = rest < E ? rest : E;
}

/* Copies the packets of local worker w's replica that are fresher than those in h->params so
 * far. */
static int take_replica(const struct data_parallel *d, int w, uint32_t *age, struct handover *h) {
    const struct worker *k = &d->worker[w];
    float *replica = host_vector(d->be, k->params, d->layout->count, true);
    if (!replica) return -1;
    for (int o = 0; o < h->workers; o++) {
        struct handover_owner *owner = &h->owner[o];
        int bucket = 0;
        size_t before = 0, offset, count;
        lossynet_ages_of_owner(d->comm, k->id, o, age);
        for (size_t p = 0; p < owner->packets; p++) {
            uint8_t is = age[p] < HANDOVER_OLDEST ? (uint8_t)age[p] : HANDOVER_OLDEST;
            packet_span(h, owner, p, &bucket, &before, &offset, &count);
            if (o == k->id) is = 0;
            if (is >= owner->age[p] && o != k->id) continue;
            owner->age[p] = is;
            memcpy(h->params + offset, replica + offset, count * sizeof *replica);
        }
    }
    host_vector_end(d->be, replica);
    return 0;
}

static int describe_owner(const struct data_parallel *d, int o, struct handover_owner *owner) {
    owner->packets = lossynet_ages_of_owner(d->comm, d->worker[0].id, o, NULL);
    owner->range = take_memory((size_t)d->layout->buckets, sizeof *owner->range);
    owner->age = take_memory(owner->packets, 1);
    if (!owner->range || !owner->age) return -1;
    memset(owner->age, HANDOVER_NOTHING, owner->packets);
    data_parallel_find_shards(d, o, owner->range);
    return 0;
}

int handover_take(const struct data_parallel *d, int64_t epoch, struct handover *out) {
    struct handover h = {.epoch = epoch,
                         .workers = d->workers,
                         .first = d->worker[0].id,
                         .local = d->local,
                         .buckets = d->layout->buckets,
                         .packet_elements = lossynet_packet_elements(d->comm)};
    size_t most = 0;
    handover_release(out);
    h.owner = take_memory((size_t)h.workers, sizeof *h.owner);
    int failed = !h.owner;
    for (int o = 0; o < h.workers && !failed; o++) {
        failed = describe_owner(d, o, &h.owner[o]);
        if (h.owner[o].packets > most) most = h.owner[o].packets;
    }
    uint32_t *age = take_memory(most, sizeof *age);
    h.params = take_memory(d->layout->count, sizeof *h.params);
    h.owned = take_owned(d, &h.elements);
    failed = failed || !age || !h.params || !h.owned;
    for (int w = 0; w < h.local && !failed; w++) failed = take_replica(d, w, age, &h);
    if (!failed) move_owned(d, h.owned, h.elements, false);
    free(age);
    *out = h;
    if (failed) handover_release(out);
    return failed ? -1 : 0;
}

/* ---- all ranks: who has which state ----------------------------------------------------- */

struct claim { /* a rank's description of its state */
    int64_t epoch;
    int workers, first, local;
    struct handover_place place;
};

struct giving {               /* one call of handover_give */
    const struct handover *h; /* this rank's state; empty if it is not from the newest view */
    struct data_parallel *d;
    struct claim *claim; /* [ranks] */
    int *holder; /* [workers of the ended view]: the rank that has this owner's state; -1: none */
    int workers; /* in the ended view */
    double *square;      /* [spans]: mean of the second moment over survivors */
    struct range *piece; /* the pieces that this rank gives, in ascending order */
    size_t pieces, room;
};

/* An all-gather with one item per rank; lossynet's has one per worker. all: [ranks * bytes]. */
static int gather_of_ranks(struct data_parallel *d, const void *mine, void *all, size_t bytes) {
    const size_t ranks = (size_t)d->world.ranks, local = (size_t)d->local;
    char *items = take_memory(local, bytes), *every = NULL;
    if (items) every = take_memory(ranks * local, bytes);
    int failed = !every;
    if (!failed) {
        memcpy(items, mine, bytes);
        failed = lossynet_all_gather(d->comm, items, every, bytes) != LOSSYNET_OK;
    }
    for (size_t r = 0; r < ranks && !failed; r++)
        memcpy((char *)all + r * bytes, every + r * local * bytes, bytes);
    free(items);
    free(every);
    return failed ? -1 : 0;
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
        report->survivors++;
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

static const size_t WITHOUT = (size_t)-1; /* state of a piece without moments */

static int add_piece(struct giving *g, struct range piece) {
    struct range *last = g->pieces ? &g->piece[g->pieces - 1] : NULL;
    if (!piece.count) return 0;
    if (last && last->offset + last->count == piece.offset && last->state == WITHOUT &&
        piece.state == WITHOUT) {
        last->count += piece.count;
        return 0;
    }
    if (!g->piece || g->pieces == g->room) {
        const size_t room = 2 * g->room + 64;
        struct range *more = realloc(g->piece, room * sizeof *more);
        if (!more) return log_out_of_memory("what ranks hand over", (double)(room * sizeof *more));
        g->piece = more;
        g->room = room;
    }
    g->piece[g->pieces++] = piece;
    return 0;
}

/* The moments of this rank's owners follow one another. */
static int add_own(struct giving *g) {
    const struct handover *h = g->h;
    size_t state = 0;
    for (int w = 0; w < h->local; w++) {
        for (int b = 0; b < h->buckets; b++) {
            struct range piece = h->owner[h->first + w].range[b];
            piece.state = state;
            state += piece.count;
            if (add_piece(g, piece)) return -1;
        }
    }
    return 0;
}

/* The rank whose copy of packet p is the freshest. Among equal ages it is the first rank from p %
 * ranks on, so that ranks share the work. */
static int freshest(const struct giving *g, const uint8_t *ages, size_t packets, size_t p) {
    const size_t ranks = (size_t)g->d->world.ranks;
    size_t best = p % ranks;
    for (size_t i = 1; i < ranks; i++) {
        const size_t r = (p + i) % ranks;
        if (ages[r * packets + p] < ages[best * packets + p]) best = r;
    }
    return (int)best;
}

/* Adds the packets whose owner is gone and of which this rank has the freshest copy. */
static int add_orphans(struct giving *g, size_t packets, struct handover_report *report) {
    const struct handover *h = g->h;
    const size_t ranks = (size_t)g->d->world.ranks;
    uint8_t *mine = take_memory(packets, 1);
    uint8_t *ages = take_memory(ranks * packets, 1);
    int failed = !mine || !ages;
    size_t p = 0;
    if (!failed) memset(mine, HANDOVER_NOTHING, packets);
    for (int o = 0; o < h->workers && !failed; o++) {
        if (g->holder[o] >= 0) continue;
        memcpy(mine + p, h->owner[o].age, h->owner[o].packets);
        p += h->owner[o].packets;
    }
    failed = failed || gather_of_ranks(g->d, mine, ages, packets);
    p = 0;
    for (size_t i = 0; i < packets && !failed; i++) {
        const int age = ages[(size_t)freshest(g, ages, packets, i) * packets + i];
        report->mean_age += (double)age / (double)packets;
        if (age > report->max_age) report->max_age = age;
    }
    report->adopted = packets;
    for (int o = 0; o < h->workers && !failed; o++) {
        const struct handover_owner *owner = &h->owner[o];
        int bucket = 0;
        size_t before = 0, offset, count;
        if (g->holder[o] >= 0) continue;
        for (size_t k = 0; k < owner->packets && !failed; k++, p++) {
            packet_span(h, owner, k, &bucket, &before, &offset, &count);
            if (freshest(g, ages, packets, p) == g->d->world.rank)
                failed = add_piece(g, (struct range){offset, count, WITHOUT});
        }
    }
    free(mine);
    free(ages);
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
    for (size_t i = 0; i < g->pieces && !failed; i++) {
        const struct range *piece = &g->piece[i];
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

static int by_offset(const void *a, const void *b) {
    const struct range *x = a, *y = b;
    return (x->offset > y->offset) - (x->offset < y->offset);
}

/* ---- messages ---- */

/* A message to a rank is a sequence of segments. Each is followed by its values: parameters, and if
 * `moments` is 1, the arrays that follow them. */
struct segment {
    uint64_t offset, count;
    uint64_t moments; /* 0 or 1 */
    uint64_t state;   /* where it starts among the elements that the rank owns now */
};

static size_t segment_bytes(size_t count, bool moments) {
    const size_t values = 1 + (moments ? (size_t)arrays_that_follow() : 0);
    return sizeof(struct segment) + values * count * sizeof(float);
}

/* Writes this rank's pieces of one shard to `to`; if it is NULL, only counts. Returns the bytes. */
static size_t write_shard(const struct giving *g, struct range shard, char *to) {
    const int following = arrays_that_follow();
    struct range given, its;
    size_t bytes = 0;
    for (size_t i = 0; ranges_next(g->piece, g->pieces, shard, &i, &given, &its);) {
        const size_t part = its.count * sizeof(float);
        const bool moments = g->piece[i - 1].state != WITHOUT;
        if (to) {
            const struct segment s = {its.offset, its.count, moments, its.state};
            const float *owned = g->h->owned + given.state;
            char *at = to + bytes;
            memcpy(at, &s, sizeof s);
            memcpy(at += sizeof s, g->h->params + its.offset, part);
            for (int a = 0; a < following && moments; a++, owned += g->h->elements)
                memcpy(at += part, owned, part);
        }
        bytes += segment_bytes(its.count, moments);
    }
    return bytes;
}

/* Writes the message to a rank; if `to` is NULL, only counts. Returns its bytes. */
static size_t write_message(const struct giving *g, int rank, char *to) {
    struct range shard = {0, 0, 0};
    size_t bytes = 0;
    for (int w = rank * g->d->local; w < (rank + 1) * g->d->local; w++) {
        for (int b = 0; b < g->d->layout->buckets; b++) {
            shard.state += shard.count;
            lossynet_shard(g->d->comm, w, b, &shard.offset, &shard.count);
            bytes += write_shard(g, shard, to ? to + bytes : NULL);
        }
    }
    return bytes;
}

struct received {  /* the new state of local owners, in the host's memory */
    float *params; /* [P] */
    float *owned;  /* as in struct handover */
    size_t elements, came;
};

/* Sets the second moments of a segment that came without moments. */
static void fill_squares(const struct giving *g, const struct segment *s, float *v) {
    const struct param_layout *l = g->d->layout;
    int span = 0;
    for (size_t i = 0; i < s->count; i++) {
        while (l->span[span].offset + l->span[span].count <= s->offset + i) span++;
        v[i] = (float)g->square[span];
    }
}

static void read_message(const struct giving *g, const char *from, size_t bytes,
                         struct received *got) {
    const int following = arrays_that_follow(), v = array_following(ARRAY_V);
    for (const char *end = from + bytes; from < end;) {
        struct segment s;
        memcpy(&s, from, sizeof s);
        const size_t part = s.count * sizeof(float);
        const char *values = from + sizeof s;
        float *owned = got->owned + s.state;
        memcpy(got->params + s.offset, values, part);
        for (int a = 0; a < following && s.moments; a++)
            memcpy(owned + (size_t)a * got->elements, values += part, part);
        if (!s.moments) fill_squares(g, &s, owned + (size_t)v * got->elements);
        got->came += s.count;
        from += segment_bytes(s.count, s.moments);
    }
}

static int exchange_messages(struct giving *g, struct received *got) {
    const size_t ranks = (size_t)g->d->world.ranks, rank = (size_t)g->d->world.rank;
    uint64_t *gives = take_memory(ranks, sizeof *gives);
    uint64_t *all = take_memory(ranks * ranks, sizeof *all);
    size_t *offset = take_memory(2 * (ranks + 1), sizeof *offset);
    char *out = NULL, *in = NULL;
    int failed = !gives || !all || !offset;
    for (size_t r = 0; r < ranks && !failed; r++) gives[r] = write_message(g, (int)r, NULL);
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
        for (size_t r = 0; r < ranks && !failed; r++) write_message(g, (int)r, out + offset[r]);
        failed = failed || lossynet_swap(g->d->comm, out, offset, in, in_offset) != LOSSYNET_OK;
        if (!failed) read_message(g, in, in_offset[ranks], got);
    }
    free(gives);
    free(all);
    free(offset);
    free(out);
    free(in);
    return failed ? -1 : 0;
}

/* ---- the whole handover ----------------------------------------------------------------- */

/* Sets the workers' vectors: first the shards of each worker, then every replica to the model. */
static int set_workers(struct giving *g, const struct received *got) {
    struct data_parallel *d = g->d;
    const size_t P = d->layout->count;
    for (int w = 0; w < d->local; w++) worker_initialise(&d->worker[w], d->be, got->params, P);
    move_owned(d, got->owned, got->elements, true);
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
    uint64_t orphans = 0, *all = take_memory((size_t)d->world.ranks, sizeof *all);
    struct received got = {.params = take_memory(d->layout->count, sizeof(float))};
    got.owned = take_owned(d, &got.elements);
    int failed = !all || !got.params || !got.owned;
    for (int o = 0; o < g->h->workers; o++)
        if (g->holder[o] < 0) orphans += g->h->owner[o].packets;
    failed = failed || gather_of_ranks(d, &orphans, all, sizeof orphans);
    for (int r = 0; r < d->world.ranks && !failed; r++)
        if (all[r] > orphans) orphans = all[r]; /* a new rank cannot count them */
    failed =
        failed || add_own(g) || average_squares(g) || (orphans && add_orphans(g, orphans, report));
    if (!failed) {
        if (g->pieces) qsort(g->piece, g->pieces, sizeof *g->piece, by_offset);
        failed = exchange_messages(g, &got);
    }
    if (!failed && got.came != got.elements)
        failed = log_error("handover: %zu of %zu parameters came: expected every one from one of "
                           "the ranks that were there before",
                           got.came, got.elements);
    failed = failed || set_workers(g, &got);
    free(got.owned);
    free(got.params);
    free(all);
    return failed ? -1 : 0;
}

int handover_give(const struct handover *h, struct data_parallel *d, struct handover_place *place,
                  struct handover_report *report) {
    struct giving g = {.h = h, .d = d};
    int failed = hear_claims(&g, h, place, report);
    if (!failed && g.holder) failed = give(&g, report);
    free(g.claim);
    free(g.holder);
    free(g.square);
    free(g.piece);
    return failed ? -1 : 0;
}
