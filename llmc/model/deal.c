/* deal.c — who owns which matrices, for Muon, which needs whole ones. See param_layout.h.
 *
 * A unit is the part of a bucket that one owner must have as a whole: a layer's matrix, with the norm
 * before it. With many owners a large matrix is several units, blocks of its rows, since all workers send
 * a unit to one owner at once. Units of the first layers are smallest: backward finishes those layers
 * last and forward needs them first, so little is computed beside their exchange.
 *
 * In a bucket, owners follow one another in order of their numbers (lossynet's partition): each gets
 * some consecutive units, or none. Layers are dealt out from the first on. deal_layer finds the owners
 * with the least sum of squares of all that they own so far, which spreads a layer over many owners.
 * The tables of the embedding and the classifier, which AdamW updates, can be cut anywhere: they fill
 * up the owners that have least.
 */
#include "llmc/model/param_layout.h"
#include "llmc/log/error.h"

#include <stdlib.h>
#include <string.h>

enum {
    PARTS = 8,        /* into which an owner's share is cut, at least */
    BLOCK_ROWS = 512, /* fewest rows of a block, */
    BLOCK_SHAPE = 16, /* and most columns for each of its rows */
    PASSES = 3,       /* after the first one, each layer is dealt out again beside all others */
    LINE = 16         /* elements of a cache line */
};

struct choice { /* how units 0 ... u are best owned if owner w has unit u, or an owner up to w */
    uint64_t cost;
    int first, owner,
        before; /* `owner` has units first ... u; `before` is the owner of first - 1 */
};

struct deal {
    struct param_layout *layout;
    int workers, units, most; /* units of the bucket that is dealt out; room for them */
    size_t largest;           /* elements of a matrix that is not cut */
    size_t *unit;             /* [most]: elements */
    size_t *owned;            /* [workers]: elements of all buckets dealt out so far */
    struct choice *at, *best; /* [most][workers] each: w itself has unit u; any owner up to w */
    int shift;                /* costs count in 2^shift elements, so that they fit into 64 bits */
};

static int blocks_of(const struct span *s, size_t largest) {
    const int fewest = s->cols > BLOCK_ROWS * BLOCK_SHAPE ? s->cols / BLOCK_SHAPE : BLOCK_ROWS;
    const size_t wanted = (s->count - 1) / largest + 1, most = (size_t)(s->rows / fewest);
    return (int)(wanted < most ? wanted : most > 1 ? most : 1);
}

/* Lists the units of a bucket with a layer. */
static void find_units(struct deal *d, int bucket) {
    const struct param_layout *l = d->layout;
    const size_t first = param_layout_bucket_offset(l, bucket);
    const size_t layer = (size_t)(l->buckets - 1 - bucket); /* from 1 on */
    const size_t early = layer * (l->bucket_elements[bucket] / (size_t)d->workers) + 1;
    const size_t largest = early < d->largest ? early : d->largest;
    size_t norm = 0;
    d->units = 0;
    for (const struct span *s = l->span; s < l->span + l->spans; s++) {
        if (s->offset < first || s->offset >= first + l->bucket_elements[bucket]) continue;
        const int blocks = s->rows ? blocks_of(s, largest) : 0;
        if (!blocks) norm += s->count;
        for (int i = 0; i < blocks; i++, norm = 0)
            d->unit[d->units++] =
                norm + (size_t)(s->rows / blocks + (i < s->rows % blocks)) * (size_t)s->cols;
    }
}

/* What it costs beyond its other elements if an owner gets so many more. */
static uint64_t cost_of(const struct deal *d, int owner, size_t elements) {
    const uint64_t more = elements >> d->shift, has = d->owned[owner] >> d->shift;
    return more * (more + 2 * has);
}

/* The cheapest way for `owner` to have unit u, and the units before it that it then has, too. */
static struct choice choose(const struct deal *d, int u, int owner) {
    struct choice best = {UINT64_MAX, 0, owner, -1}; /* not possible */
    size_t elements = 0;
    const int most = 2 * d->units / d->workers + 2, last = u >= most ? u - most + 1 : 0;
    for (int first = u; first >= last; first--) { /* no owner needs more */
        elements += d->unit[first];
        if (first > 0 && owner == 0) continue;
        const struct choice *before =
            first ? &d->best[(size_t)(first - 1) * (size_t)d->workers + (size_t)(owner - 1)] : NULL;
        if (before && before->cost == UINT64_MAX) continue;
        const uint64_t cost = cost_of(d, owner, elements) + (before ? before->cost : 0);
        if (cost >= best.cost) continue;
        best = (struct choice){cost, first, owner, before ? before->owner : -1};
    }
    return best;
}

static void deal_layer(struct deal *d, size_t *shard) {
    const size_t N = (size_t)d->workers;
    for (int u = 0; u < d->units; u++) {
        struct choice *at = d->at + (size_t)u * N, *best = d->best + (size_t)u * N;
        for (int w = 0; w < d->workers; w++) {
            at[w] = choose(d, u, w);
            best[w] = w > 0 && best[w - 1].cost <= at[w].cost ? best[w - 1] : at[w];
        }
    }
    memset(shard, 0, N * sizeof *shard);
    int owner = d->best[(size_t)d->units * N - 1].owner;
    for (int u = d->units - 1; u >= 0;) {
        const struct choice *c = &d->at[(size_t)u * N + (size_t)owner];
        for (; u >= c->first; u--) shard[owner] += d->unit[u];
        d->owned[owner] += shard[owner];
        owner = c->before;
    }
}

/* Whether owners together lack `count` elements or more to `level`. */
static bool holds(const struct deal *d, size_t level, size_t count) {
    size_t lacking = 0;
    for (int w = 0; w < d->workers; w++) lacking += d->owned[w] < level ? level - d->owned[w] : 0;
    return lacking >= count;
}

/* Deals out a table of `count` elements, so that the largest owner has as few as possible. */
static void fill_up(struct deal *d, size_t count, size_t *shard) {
    size_t low = 0,
           high = d->layout->count; /* the lowest level that holds the table is in (low, high] */
    while (high - low > 1) {
        const size_t level = low + (high - low) / 2;
        *(holds(d, level, count) ? &high : &low) = level;
    }
    for (int w = 0; w < d->workers; w++) {
        size_t more = d->owned[w] < high ? (high - d->owned[w] + LINE - 1) / LINE * LINE : 0;
        if (more > count) more = count;
        shard[w] = more;
        d->owned[w] += more;
        count -= more;
    }
}

static bool has_layer(const struct param_layout *l, int bucket) {
    return bucket >= !l->config.tied && bucket < l->buckets - 1;
}

/* Whether all layers are dealt out, and nobody has a tenth more than its share of the model. */
static bool is_even(const struct deal *d) {
    size_t most = 0;
    for (int w = 0; w < d->workers; w++) most = d->owned[w] > most ? d->owned[w] : most;
    return most > 0 && most <= d->layout->count / (size_t)d->workers * 11 / 10;
}

static void deal_all(struct deal *d) {
    const struct param_layout *l = d->layout;
    const size_t N = (size_t)d->workers;
    for (int pass = 0; pass < PASSES && !is_even(d); pass++) {
        for (int layer = 0; layer < l->config.layers; layer++) {
            const int b = l->buckets - 2 - layer;
            size_t *shard = l->shard_elements + (size_t)b * N;
            for (size_t w = 0; w < N; w++) d->owned[w] -= shard[w];
            find_units(d, b);
            deal_layer(d, shard);
        }
    }
    for (int b = 0; b < l->buckets; b++)
        if (!has_layer(l, b)) fill_up(d, l->bucket_elements[b], l->shard_elements + (size_t)b * N);
}

int param_layout_deal(struct param_layout *l, int workers) {
    const size_t N = (size_t)workers;
    struct deal d = {.layout = l, .workers = workers};
    size_t matrices = 0;
    for (int s = 0; s < l->spans; s++) matrices += l->span[s].rows ? l->span[s].count : 0;
    d.largest = matrices / N / PARTS + 1;
    while (l->count >> d.shift > (size_t)1 << 30) d.shift++;
    for (int s = 0; s < l->spans; s++) d.most += l->span[s].rows ? blocks_of(&l->span[s], 1) : 0;
    d.most /= l->config.layers;
    l->shard_elements = calloc((size_t)l->buckets * N, sizeof *l->shard_elements);
    d.unit = calloc((size_t)d.most, sizeof *d.unit);
    d.owned = calloc(N, sizeof *d.owned);
    d.at = calloc((size_t)d.most * N, sizeof *d.at);
    d.best = calloc((size_t)d.most * N, sizeof *d.best);
    const bool memory = l->shard_elements && d.unit && d.owned && d.at && d.best;
    if (memory) deal_all(&d);
    free(d.unit), free(d.owned), free(d.at), free(d.best);
    return memory ? 0 : log_out_of_memory("the owners of matrices", 0);
}

size_t param_layout_largest_owner(const struct param_layout *l, int workers, size_t *squares) {
    size_t most = 0;
    *squares = 0;
    for (int w = 0; w < workers; w++) {
        size_t owned = 0, bucket = 0, moments = 0;
        for (int b = 0; b < l->buckets; bucket += l->bucket_elements[b++]) {
            const size_t *shard = l->shard_elements + (size_t)b * (size_t)workers;
            struct range mine = {bucket, shard[w], 0};
            for (int before = 0; before < w; before++) mine.offset += shard[before];
            for (const struct span *s = l->span; s < l->span + l->spans; s++)
                if (!s->rows)
                    moments += range_common(mine, (struct range){s->offset, s->count, 0}).count;
            owned += mine.count;
        }
        if (owned > most) most = owned;
        if (moments > *squares) *squares = moments;
    }
    return most;
}

double param_layout_backlog(const struct param_layout *l, int workers, double per_layer) {
    double most = 0;
    for (int w = 0; w < workers; w++) {
        double owned = 0;
        for (int layer = 0; layer < l->config.layers; layer++) {
            owned += (double)l->shard_elements[(l->buckets - 2 - layer) * workers + w];
            if (owned - layer * per_layer > most) most = owned - layer * per_layer;
        }
    }
    return most;
}
