/* operators_exchange.c — tests what workers of a device exchange, to the last bit: a run does not depend
 * on where packets are rounded, averaged and copied; see operators.h. */
#include "test/llmc/operators.h"

#include "lossynet/partition/partition.h"

/* ---- a net of workers ---- */

enum { WORKERS = 5, PACKETS = 37, LONGEST = 200, ROOM = PACKETS * (LONGEST + 8) };

struct net {
    struct backend_packet packet[PACKETS];
    uint8_t takes[WORKERS * WORKERS], arrived[WORKERS * PACKETS];
    int32_t partner[WORKERS * WORKERS];
    struct backend_exchange e;
    float *x[WORKERS], *there[WORKERS]; /* vectors of ROOM elements: the host's, the backend's */
    float *ahead[WORKERS], *ahead_there[WORKERS]; /* each owner's elements */
};

/* Numbers at the edges of bfloat16's. */
static const float edges[] = {
    0.0f,          -0.0f,           1.0f,        0x1.01p0f,        0x1.03p0f,     -0x1.01p0f,
    0x1.010002p0f, 0x1.00fffep0f,   0x1.fep0f,   0x1.ffp0f,        0x1.fffffep0f, 0x1p-126f,
    0x1p-133f,     0x1p-134f,       0x1.8p-133f, 0x1.000002p-134f, 0x1p-149f,     -0x1p-149f,
    0x1.fep127f,   0x1.fefffep127f, 0x1.ffp127f, 0x1.fffffep127f,  -0x1.ffp127f,  INFINITY,
    -INFINITY};

/* In a vector of n elements, of which the first are numbers of every kind: exact halves, the largest
 * that a block's unit allows, and blocks that are tiny, huge, or not finite. */
static void fill_blocks(float *x, size_t n) {
    static const float special[][4] = {{127, 0.5f, 1.5f, -2.5f},     {7, -0.5f, 127.5f, -7.5f},
                                       {1e-44f, -1e-40f, 1e-39f, 0}, {-0.0f, 0, -0.0f, 0},
                                       {3e38f, 1, -1e-30f, 0},       {3.39e38f, -3.39e38f, 0, 0},
                                       {INFINITY, 1, 2, 3},          {1, NAN, -INFINITY, 3}};
    for (size_t j = 0; j < n; j++) x[j] = (float)(random_uniform() * pow(2, 40 * random_uniform()));
    for (size_t b = 0; b < (size_t)LENGTH(special) && (b + 1) * 32 <= n; b++) {
        memset(x + b * 32, 0, 32 * sizeof *x);
        memcpy(x + b * 32, special[b], sizeof special[b]);
    }
}

static size_t random_below(size_t n) {
    return (size_t)(fabs(random_uniform()) * (double)n * 0.999999);
}

/* Packets of all lengths, aligned or not, with gaps between them. */
static void make_packets(struct net *net) {
    size_t element = 0, owned[WORKERS] = {0};
    for (int k = 0; k < PACKETS; k++) {
        const int32_t owner = (int32_t)random_below(WORKERS);
        const uint32_t count = k % 3 ? (uint32_t)(1 + random_below(LONGEST)) : LONGEST;
        element += random_below(8);
        net->packet[k] = (struct backend_packet){element, owned[owner], count, owner};
        element += count, owned[owner] += count;
    }
    assert_true(element <= ROOM);
}

/* Workers are dealt to groups in turn. An owner's partner in its own group is itself. */
static void make_partners(struct net *net, int groups) {
    net->e.groups = groups;
    for (int o = 0; o < WORKERS; o++) {
        for (int g = 0; g < groups; g++) {
            int partner = g + groups * (int)random_below((size_t)((WORKERS - 1 - g) / groups + 1));
            if (g == o % groups) partner = o;
            net->partner[o * groups + g] = partner;
        }
        for (int w = 0; w < WORKERS; w++)
            net->takes[w * WORKERS + o] = w != o && net->partner[o * groups + w % groups] == w;
    }
}

static struct net *net_new(int groups) {
    struct net *net = (struct net *)calloc(1, sizeof *net);
    assert_non_null(net);
    make_packets(net);
    make_partners(net, groups);
    for (int i = 0; i < WORKERS * PACKETS; i++) net->arrived[i] = random_uniform() > 0;
    for (int w = 0; w < WORKERS; w++) {
        net->x[w] = (float *)malloc(ROOM * sizeof(float));
        net->ahead[w] = (float *)malloc(ROOM * sizeof(float));
        assert_true(net->x[w] && net->ahead[w]);
        fill_blocks(net->x[w], ROOM);
        fill_blocks(net->ahead[w], ROOM);
        const struct backend_packet *p = &net->packet[0]; /* some elements that packets have */
        for (int i = 0; i < LENGTH(edges); i++) net->x[w][p->element + (size_t)i] = edges[i];
        net->there[w] = (float *)upload(net->x[w], ROOM * sizeof(float));
        net->ahead_there[w] = (float *)upload(net->ahead[w], ROOM * sizeof(float));
    }
    net->e.packet = (struct backend_packet *)upload(net->packet, sizeof net->packet);
    net->e.takes = (uint8_t *)upload(net->takes, sizeof net->takes);
    net->e.partner = net->partner;
    net->e.packets = PACKETS, net->e.longest = LONGEST;
    net->e.workers = net->e.owners = WORKERS;
    return net;
}

static void net_free(struct net *net) {
    const struct backend *b = subject.backend;
    for (int w = 0; w < WORKERS; w++) {
        b->release(net->there[w]), b->release(net->ahead_there[w]);
        free(net->x[w]), free(net->ahead[w]);
    }
    b->release((void *)net->e.packet), b->release((void *)net->e.takes);
    free(net);
}

static bool takes(const struct net *net, int worker, int k) {
    return net->takes[worker * WORKERS + net->packet[k].owner] != 0;
}

/* ---- what is expected ---- */

static const int all_bits[] = {32, 16, 8, 6, 4};

static void check_bf16(float got, float from) {
    const float want = rounded_reference(from);
    if (isnan(from) ? !isnan(got) : memcmp(&got, &want, sizeof got) != 0)
        fail_msg("%a becomes %a, expected %a", (double)from, (double)got, (double)want);
}

/* Whether to[] is from[] of a packet, rounded. */
static void check_packet(const float *to, const float *from, const struct backend_packet *p,
                         int bits, const uint64_t *key) {
    float want[LONGEST];
    const struct ln_rounding r = {bits == 8   ? LOSSYNET_INT8
                                  : bits == 6 ? LOSSYNET_INT6
                                              : LOSSYNET_INT4,
                                  key != NULL, key ? *key : 0, p->element};
    if (bits < 16) ln_elements_copy(&r, want, from, p->count);
    for (uint32_t j = 0; j < p->count; j++) {
        const float *expected = bits < 16 ? &want[j] : &from[j];
        if (bits == 16)
            check_bf16(to[j], from[j]);
        else if (memcmp(&to[j], expected, sizeof *expected))
            fail_msg("%d bits: element %u of a packet of %u, %a, is %a, expected %a", bits, j,
                     p->count, (double)from[j], (double)to[j], (double)*expected);
    }
}

/* Reads worker w's vector back, and whether it is as before outside the packets that changed. */
static float *read_vector(const struct net *net, int w, const bool *changed) {
    float *got = (float *)malloc(ROOM * sizeof *got);
    uint8_t *may = (uint8_t *)calloc(ROOM, 1);
    assert_true(got && may);
    subject.backend->download(got, net->there[w], ROOM * sizeof *got);
    for (int k = 0; k < PACKETS; k++)
        if (changed[k]) memset(may + net->packet[k].element, 1, net->packet[k].count);
    for (size_t j = 0; j < ROOM; j++)
        if (!may[j] && memcmp(&got[j], &net->x[w][j], sizeof *got))
            fail_msg("element %zu of worker %d has changed", j, w);
    free(may);
    return got;
}

/* ---- tests ---- */

void test_exchange_copy(void **state) {
    (void)state;
    const struct backend *b = subject.backend;
    for (int i = 0; b->exchange_copy && i < 2 * LENGTH(all_bits); i++) {
        struct net *net = net_new(i % 3 ? WORKERS : 2);
        const bool leads = i % 2;
        const int bits = all_bits[i / 2];
        b->exchange_copy(&net->e, net->there, leads ? (const float *const *)net->ahead_there : NULL,
                         net->arrived, bits);
        for (int w = 0; w < WORKERS; w++) {
            bool changed[PACKETS];
            for (int k = 0; k < PACKETS; k++)
                changed[k] = takes(net, w, k) && net->arrived[w * PACKETS + k];
            float *got = read_vector(net, w, changed);
            for (int k = 0; k < PACKETS; k++) {
                const struct backend_packet *p = &net->packet[k];
                const float *from =
                    leads ? net->ahead[p->owner] + p->owned : net->x[p->owner] + p->element;
                if (changed[k]) check_packet(got + p->element, from, p, bits, NULL);
            }
            free(got);
        }
        net_free(net);
    }
}

static void round_all(float *x, size_t n) {
    for (size_t j = 0; j < n; j++) x[j] = rounded_reference(x[j]);
}

static void check_round(struct net *net, int bits, bool random, bool narrow) {
    const struct backend *b = subject.backend;
    uint64_t key[WORKERS];
    for (int w = 0; w < WORKERS; w++) key[w] = 0xfedcba9876543210 * (uint64_t)(w + 1);
    b->exchange_round(&net->e, net->there, bits, random ? key : NULL, narrow);
    for (int w = 0; w < WORKERS; w++) {
        bool changed[PACKETS];
        for (int k = 0; k < PACKETS; k++)
            changed[k] = takes(net, w, k) || (narrow && net->packet[k].owner == w);
        float *got = read_vector(net, w, changed);
        if (narrow) round_all(net->x[w], ROOM);
        for (int k = 0; k < PACKETS; k++) {
            const struct backend_packet *p = &net->packet[k];
            if (changed[k])
                check_packet(got + p->element, net->x[w] + p->element, p,
                             takes(net, w, k) ? bits : 16, random ? &key[w] : NULL);
        }
        free(got);
    }
}

void test_exchange_round(void **state) {
    (void)state;
    for (int i = 0; subject.backend->exchange_round && i < 4 * LENGTH(all_bits); i++) {
        const int bits = all_bits[i / 4];
        const bool random = i % 2, narrow = i / 2 % 2;
        if (bits == 32 || (bits == 16 && random)) continue;
        struct net *net = net_new(random ? WORKERS : 3);
        check_round(net, bits, random, narrow);
        net_free(net);
    }
}

/* What did not arrive is not a number. An owner's own vector is one of the senders. */
void test_exchange_average(void **state) {
    (void)state;
    const struct backend *b = subject.backend;
    for (int i = 0; b->exchange_average && i < 3; i++) {
        const int groups = i == 0 ? WORKERS : i == 1 ? 2 : 4;
        struct net *net = net_new(groups);
        float weight[PACKETS * WORKERS];
        for (int k = 0; k < PACKETS; k++) {
            const struct backend_packet *p = &net->packet[k];
            for (int g = 0; g < groups; g++) {
                const float w = random_uniform() > 0 ? (float)random_uniform() : 0;
                float *x = net->x[net->partner[p->owner * groups + g]];
                weight[k * groups + g] = w;
                for (size_t j = p->element; j < p->element + p->count; j++)
                    x[j] = w == 0 ? NAN : (float)random_uniform();
            }
        }
        for (int w = 0; w < WORKERS; w++) b->upload(net->there[w], net->x[w], ROOM * sizeof(float));
        b->exchange_average(&net->e, net->there, weight);
        for (int w = 0; w < WORKERS; w++) {
            bool changed[PACKETS];
            for (int k = 0; k < PACKETS; k++) changed[k] = net->packet[k].owner == w;
            float *got = read_vector(net, w, changed);
            for (int k = 0; k < PACKETS; k++) {
                const struct backend_packet *p = &net->packet[k];
                for (size_t j = p->element; changed[k] && j < p->element + p->count; j++) {
                    float want = 0;
                    for (int g = 0; g < groups; g++) {
                        const float *x = net->x[net->partner[w * groups + g]];
                        const float factor = weight[k * groups + g];
                        if (factor != 0) want = fmaf(factor, x[j], want);
                    }
                    assert_true(got[j] == want);
                }
            }
            free(got);
        }
        net_free(net);
    }
}
