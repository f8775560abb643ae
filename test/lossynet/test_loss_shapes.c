/* test_loss_shapes.c — tests losses that are neither independent nor equal on all links: links
 * that are down for whole steps, and links with their own loss rates. It checks their effect on
 * the owners' averages and on replicas.
 */
#include "test_lossynet.h"

static struct ln_loss open_loss(double gradient, double parameter, const char *model,
                                const char *at) {
    struct lossynet_loss_settings settings = {
        .rate = {gradient, parameter}, .model = model, .seed = 5, .at = at};
    struct ln_loss loss;
    assert_int_equal(ln_loss_open(&loss, &settings, 8), LOSSYNET_OK);
    return loss;
}

/* Whether the link is up in this step; all packets of a phase must share its fate. */
static bool up(const struct ln_loss *loss, lossynet_phase phase, uint64_t step, int sender,
               int receiver, uint64_t *chain) {
    uint8_t mask[7];
    ln_loss_mask(loss, phase, step, sender, receiver, sizeof mask, chain, mask);
    for (size_t k = 1; k < sizeof mask; k++) assert_int_equal(mask[k], mask[0]);
    return mask[0];
}

/* ---- outages ---- */

enum { STEPS = 100000 };

/* Rate and mean length over many steps of a link, within 5 standard errors; and the same steps from
 * nothing, in any order, as a resumed run or another spread of the workers asks for them. */
static void check_outages(double mean, double p) {
    char model[32];
    snprintf(model, sizeof model, "outage:%g", mean);
    struct ln_loss loss = open_loss(p, p, model, NULL);
    static bool was_up[STEPS];
    uint64_t chain[2] = {0};
    size_t down = 0, runs = 0;
    for (int step = 0; step < STEPS; step++) {
        was_up[step] = up(&loss, LOSSYNET_GRADIENT, (uint64_t)step, 3, 4, &chain[0]);
        assert_int_equal(up(&loss, LOSSYNET_PARAMETER, (uint64_t)step, 3, 4, &chain[1]),
                         was_up[step]); /* one state for both phases */
        down += !was_up[step];
        runs += !was_up[step] && (step == 0 || was_up[step - 1]);
    }
    double r = 1 - 1 / (mean * (1 - p)); /* correlation of neighbours, as for bursts */
    assert_close((double)down / STEPS, p, 5 * sqrt(p * (1 - p) / STEPS * (1 + r) / (1 - r)));
    assert_close((double)down / (double)runs, mean,
                 5 * sqrt(mean * (mean - 1) / (double)runs) + mean * 1e-3);
    for (int step = STEPS - 1; step >= 0; step -= 7)
        assert_int_equal(up(&loss, LOSSYNET_GRADIENT, (uint64_t)step, 3, 4, NULL), was_up[step]);
}

static void test_outages(void **state) {
    (void)state;
    check_outages(1, 0.1);       /* never two steps in a row */
    check_outages(1 / 0.9, 0.1); /* independent steps */
    check_outages(5, 0.1);
    check_outages(20, 0.1);
    check_outages(4, 0.5);
}

/* Links, directions and seeds are independent; a run begins in the stationary state. */
static void test_outages_of_many_links(void **state) {
    (void)state;
    enum { LINKS = 20000 };
    const double p = 0.3;
    struct ln_loss loss = open_loss(p, p, "outage:10", NULL), other = loss;
    other.seed++;
    double sum = 0, back = 0, next = 0, seed = 0;
    for (int i = 0; i < LINKS; i++) {
        double down = !up(&loss, LOSSYNET_PARAMETER, 0, i, i + 1, NULL) - p;
        sum += down;
        back += down * (!up(&loss, LOSSYNET_PARAMETER, 0, i + 1, i, NULL) - p);
        next += down * (!up(&loss, LOSSYNET_PARAMETER, 0, i, i + 2, NULL) - p);
        seed += down * (!up(&other, LOSSYNET_PARAMETER, 0, i, i + 1, NULL) - p);
    }
    double error = 5 / sqrt(LINKS);
    assert_close(sum / LINKS, 0, error * sqrt(p * (1 - p)));
    assert_close(back / LINKS, 0, error * p * (1 - p));
    assert_close(next / LINKS, 0, error * p * (1 - p));
    assert_close(seed / LINKS, 0, error * p * (1 - p));
}

/* With unlike rates the phase with the lower one is down only while the other is; 0 and 1 mean
 * what they say. */
static void test_outages_with_unlike_rates(void **state) {
    (void)state;
    struct ln_loss loss = open_loss(0.1, 0.4, "outage:5", NULL);
    int down[2] = {0};
    for (uint64_t step = 0; step < 20000; step++) {
        bool gradient = up(&loss, LOSSYNET_GRADIENT, step, 1, 2, NULL);
        bool parameter = up(&loss, LOSSYNET_PARAMETER, step, 1, 2, NULL);
        assert_true(gradient || !parameter);
        down[0] += !gradient;
        down[1] += !parameter;
    }
    assert_close(down[0] / 20000.0, 0.1, 0.04);
    assert_close(down[1] / 20000.0, 0.4, 0.06);
    loss = open_loss(0, 1, "outage:5", NULL);
    for (uint64_t step = 0; step < 100; step++) {
        assert_true(up(&loss, LOSSYNET_GRADIENT, step, 1, 2, NULL));
        assert_false(up(&loss, LOSSYNET_PARAMETER, step, 1, 2, NULL));
    }
}

/* How often links a-b and c-d are down together, over many steps of outages a fifth of the time. */
static double down_together(const char *model, int a, int b, int c, int d) {
    struct ln_loss loss = open_loss(0.2, 0.2, model, NULL);
    int together = 0, first = 0;
    uint64_t chain[2] = {0};
    for (uint64_t step = 0; step < 20000; step++) {
        const bool down = !up(&loss, LOSSYNET_GRADIENT, step, a, b, &chain[0]);
        first += down;
        together += !up(&loss, LOSSYNET_PARAMETER, step, c, d, &chain[1]) && down;
    }
    assert_close(first / 20000.0, 0.2, 0.04);
    return together / (double)first;
}

/* Links of one sender or of one receiver are always down together, and others as often as chance
 * has it. */
static void test_outages_that_share_a_fate(void **state) {
    (void)state;
    const struct {
        const char *model;
        double from, to, other; /* P(down | down) of links from one worker, to one, and unlike */
    } cases[] = {{"outage:5", 0.2, 0.2, 0.2},
                 {"outage:5:sender", 1, 0.2, 0.2},
                 {"outage:5:receiver", 0.2, 1, 0.2}};
    for (int i = 0; i < 3; i++) {
        assert_close(down_together(cases[i].model, 1, 2, 1, 5), cases[i].from, 0.06);
        assert_close(down_together(cases[i].model, 1, 2, 5, 2), cases[i].to, 0.06);
        assert_close(down_together(cases[i].model, 1, 2, 2, 1), cases[i].other, 0.06);
    }
}

/* Paths of a link are down independently of one another. Packets leave on the first, whose losses
 * are those of a link with one path. */
static void test_outages_of_paths(void **state) {
    (void)state;
    struct ln_loss loss = open_loss(0.2, 0.2, "outage:5:3", NULL);
    struct ln_loss one = open_loss(0.2, 0.2, "outage:5", NULL);
    struct ln_loss burst = open_loss(0.2, 0.2, "burst:5", "1-2=1");
    int down[3] = {0}, both = 0;
    for (uint64_t step = 0; step < 5000; step++) {
        bool is[3];
        for (int path = 0; path < 3; path++)
            down[path] += is[path] = ln_loss_is_down(&loss, LOSSYNET_GRADIENT, step, 1, 2, path);
        both += is[1] && is[2];
        assert_int_equal(is[0], !up(&loss, LOSSYNET_PARAMETER, step, 1, 2, NULL));
        assert_int_equal(is[0], ln_loss_is_down(&one, LOSSYNET_PARAMETER, step, 1, 2, 0));
        assert_false(ln_loss_is_down(&burst, LOSSYNET_GRADIENT, step, 2, 1, 0));
        assert_true(ln_loss_is_down(&burst, LOSSYNET_GRADIENT, step, 1, 2, 0));
    }
    for (int path = 0; path < 3; path++) assert_close(down[path] / 5000.0, 0.2, 0.08);
    assert_close(both / 5000.0, 0.04, 0.03);
    ln_loss_close(&burst);
    ln_loss_close(&one);
    ln_loss_close(&loss);
}

/* ---- a comm: what arrives, link by link ---- */

enum { WORKERS = 8, ELEMENTS = 8 * 640 }; /* 40 packets of 16 elements for each owner */

struct arrivals { /* [sender][receiver], summed over steps */
    double gradient[WORKERS][WORKERS], parameter[WORKERS][WORKERS];
};

/* Reduces vectors of worker w's number, 2^w, and broadcasts; shares of packets that arrived. With
 * estimator zero the average says who arrived. */
static void run_net(const char *model, double p, const char *at, int rounds, int steps,
                    struct arrivals *out) {
    const size_t elements = ELEMENTS;
    struct lossynet_settings settings = simple_settings(WORKERS, &elements, 1, p);
    settings.loss.model = model;
    settings.loss.at = at;
    settings.estimator = LOSSYNET_ZERO;
    settings.retransmission_rounds[0] = settings.retransmission_rounds[1] = rounds;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(WORKERS, elements);
    memset(out, 0, sizeof *out);
    for (int step = 0; step < steps; step++) {
        for (int w = 0; w < WORKERS; w++)
            for (size_t e = 0; e < elements; e++) x[w][e] = ldexpf(WORKERS, w);
        lossynet_step_begin(comm, (uint64_t)step);
        assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
        for (int o = 0; o < WORKERS; o++) {
            size_t offset, count;
            lossynet_shard(comm, o, 0, &offset, &count);
            for (size_t e = offset; e < offset + count; e++) {
                int who = (int)x[o][e];
                assert_true((who >> o & 1) && who < 1 << WORKERS);
                for (int w = 0; w < WORKERS; w++)
                    out->gradient[w][o] += (who >> w & 1) / (double)(steps * (int)count);
                x[o][e] = -1;
            }
        }
        assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
        for (int o = 0; o < WORKERS; o++) {
            size_t offset, count;
            lossynet_shard(comm, o, 0, &offset, &count);
            for (int w = 0; w < WORKERS; w++)
                for (size_t e = offset; e < offset + count; e++)
                    out->parameter[o][w] += (x[w][e] == -1) / (double)(steps * (int)count);
        }
    }
    free_vectors(x);
    lossynet_close(comm);
}

/* The share that a round loses of what goes by way of another worker: steps take workers in turn. */
static double lost_by_others(double rate[WORKERS][WORKERS], int s, int r, int steps) {
    double lost = 0;
    for (int step = 0; step < steps; step++) {
        int by = (s + r + step) % WORKERS;
        while (by == s || by == r) by = (by + 1) % WORKERS;
        lost += (1 - (1 - rate[s][by]) * (1 - rate[by][r])) / steps;
    }
    return lost;
}

/* Every link's share of 40 packets x 50 steps against what it should be. */
static void check_rates(const char *at, int rounds, double rate[WORKERS][WORKERS]) {
    static struct arrivals a;
    run_net("bernoulli", 0.1, at, rounds, 50, &a);
    for (int s = 0; s < WORKERS; s++)
        for (int r = 0; r < WORKERS; r++) {
            double p = s == r ? 0 : pow(rate[s][r], rounds + 1);
            if (rate[s][r] >= 1 && rounds > 0) p = lost_by_others(rate, s, r, 50);
            double error = 5 * sqrt(p * (1 - p) / (40 * 50));
            assert_close(1 - a.gradient[s][r], p, error + 1e-9);
            assert_close(1 - a.parameter[s][r], p, error + 1e-9);
        }
}

static void test_uneven_rates(void **state) {
    (void)state;
    for (int rounds = 0; rounds < 2; rounds++) {
        double rate[WORKERS][WORKERS];
        for (int i = 0; i < WORKERS * WORKERS; i++) rate[i / WORKERS][i % WORKERS] = 0.1;
        check_rates("none", rounds, rate);
        rate[2][5] = 1; /* but not 5 to 2 */
        check_rates("2-5=1", rounds, rate);
        for (int w = 0; w < WORKERS; w++) rate[3][w] = rate[w][3] = 0.5;
        check_rates("2-5=1,3=0.5", rounds, rate);
        rate[3][0] = rate[0][3] = 0; /* the last counts */
        rate[0][1] = 0.25;
        check_rates("2-5=1,3=0.5,3-0=0.3,3-0=0,0-3=0e0,0-1=.25", rounds, rate);
    }
}

/* Sending again brings nothing while all ways of a worker are down. */
static void test_outages_outlast_retransmission(void **state) {
    (void)state;
    static struct arrivals once, again;
    run_net("outage:3:sender", 0.3, NULL, 0, 60, &once);
    run_net("outage:3:sender", 0.3, NULL, 2, 60, &again);
    assert_memory_equal(&once, &again, sizeof once);
    run_net("outage:3:receiver", 0.3, NULL, 0, 60, &once);
    run_net("outage:3:receiver", 0.3, NULL, 2, 60, &again);
    assert_memory_equal(&once, &again, sizeof once);
    run_net("outage:3", 0.3, NULL, 0, 60, &once);
    double mean = 0;
    for (int i = 0; i < WORKERS * WORKERS; i++)
        mean += i / WORKERS == i % WORKERS ? 0 : once.gradient[i / WORKERS][i % WORKERS] / 56;
    assert_close(mean, 0.7, 0.1);
    assert_memory_equal(once.gradient, once.parameter, sizeof once.gradient);
}

/* A link of its own keeps the model: bursts and outages of the same length at another rate. */
static void test_chains_with_a_rate_of_their_own(void **state) {
    (void)state;
    struct ln_loss loss = open_loss(0.1, 0.1, "outage:5", "2-5=0.5,6=0");
    struct ln_loss plain = open_loss(0.5, 0.5, "outage:5", NULL);
    struct ln_loss burst = open_loss(0.1, 0.1, "burst:5", "2-5=0.5"),
                   even = open_loss(0.5, 0.5, "burst:5", NULL);
    for (uint64_t step = 0; step < 1000; step++) {
        uint8_t a[10], b[10];
        assert_int_equal(up(&loss, LOSSYNET_GRADIENT, step, 2, 5, NULL),
                         up(&plain, LOSSYNET_GRADIENT, step, 2, 5, NULL));
        assert_true(up(&loss, LOSSYNET_GRADIENT, step, 6, 5, NULL));
        assert_true(up(&loss, LOSSYNET_PARAMETER, step, 1, 6, NULL));
        ln_loss_mask(&burst, LOSSYNET_PARAMETER, step, 2, 5, 10, NULL, a);
        ln_loss_mask(&even, LOSSYNET_PARAMETER, step, 2, 5, 10, NULL, b);
        assert_memory_equal(a, b, sizeof a);
    }
    ln_loss_close(&loss);
    ln_loss_close(&burst);
}

/* Rates by phase, and links from and to every worker. */
static void test_rates_by_phase_and_wildcards(void **state) {
    (void)state;
    struct arrivals net;
    run_net("bernoulli", 0, "3-*=0.5:0,*-1=0:0.4,3-2=0", 0, 300, &net);
    for (int s = 0; s < WORKERS; s++)
        for (int r = 0; r < WORKERS; r++) {
            if (s == r) continue;
            const double lost = s == 3 && r != 1 && r != 2 ? 0.5 : 0, stale = r == 1 ? 0.4 : 0;
            assert_close(1 - net.gradient[s][r], lost, lost > 0 ? 0.1 : 1e-9);
            assert_close(1 - net.parameter[s][r], stale, stale > 0 ? 0.1 : 1e-9);
        }
}

/* ---- tensors ---- */

/* A name in a list stands for tensors that have its parts in its order. */
static void test_names_of_tensors(void **state) {
    (void)state;
    const struct {
        const char *name, *tensor;
        bool fits;
    } cases[] = {
        {"layers.0-3", "model.layers.0.mlp.up_proj.weight", true},
        {"layers.0-3", "model.layers.3.mlp.up_proj.weight", true},
        {"layers.0-3", "model.layers.4.mlp.up_proj.weight", false},
        {"layers.0-3", "model.layers.30.mlp.up_proj.weight", false},
        {"layers.10-12.q_proj", "model.layers.11.self_attn.q_proj.weight", true},
        {"layers.10-12.q_proj", "model.layers.11.self_attn.k_proj.weight", false},
        {"layers.2", "model.layers.2.input_layernorm.weight", true},
        {"layers.2", "model.layers.20.input_layernorm.weight", false},
        {"q_proj", "model.layers.2.self_attn.q_proj.weight", true},
        {"proj", "model.layers.2.self_attn.q_proj.weight", false},
        {"mlp.layers", "model.layers.2.mlp.up_proj.weight", false},
        {"lm_head", "lm_head.weight", true},
        {"model.norm.weight", "model.norm.weight", true},
        {"model.norm.weight.x", "model.norm.weight", false},
        {"h-1", "h.1", false},
        {"0.weight", "0.weight", true},
        {"1-2.weight", "blocks.2.weight", true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char at[128];
        snprintf(at, sizeof at, "3=0.5,%s=0.25", cases[i].name);
        struct ln_loss loss = open_loss(0.1, 0.1, "bernoulli", at);
        if (ln_at_names(&loss.at, cases[i].tensor) != cases[i].fits)
            fail_msg("%s, %s", cases[i].name, cases[i].tensor);
        ln_loss_close(&loss);
    }
}

enum { PART = 6 * 1024, BUCKET = 3 * PART }; /* two buckets of three tensors, which packets cut */
static const struct lossynet_tensor parts[] = {
    {"b.1", 0, PART},          {"a.1", PART, PART},           {"norm", 2 * PART, PART},
    {"b.0", BUCKET, PART + 5}, {"a.0", BUCKET + PART + 5, 1}, {"c", BUCKET + PART + 6, PART}};

static struct lossynet_settings settings_of_parts(const size_t *buckets, const char *at,
                                                  const char *repair_at) {
    struct lossynet_settings settings = simple_settings(4, buckets, 2, 0);
    settings.packet_bytes = 256;
    settings.loss.at = at;
    settings.repair_at = repair_at;
    settings.tensors = parts;
    settings.tensor_count = sizeof parts / sizeof *parts;
    return settings;
}

/* The share of the elements of each part that a step's broadcasts brought to worker 0 of others. */
static void shares_of(const char *model, const char *at, const char *repair_at, double *share) {
    const size_t buckets[2] = {BUCKET, BUCKET};
    struct lossynet_settings settings = settings_of_parts(buckets, at, repair_at);
    if (model) settings.loss.model = model;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(4, 2 * BUCKET);
    double came[6] = {0}, of[6] = {0};
    for (int step = 0; step < 200; step++) {
        for (int w = 0; w < 4; w++)
            for (size_t e = 0; e < 2 * BUCKET; e++) x[w][e] = (float)w;
        lossynet_step_begin(comm, (uint64_t)step);
        assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
        for (int b = 0; b < 2; b++)
            for (int owner = 1; owner < 4; owner++) {
                size_t offset, count;
                lossynet_shard(comm, owner, b, &offset, &count);
                for (int t = 0; t < 6; t++)
                    for (size_t e = parts[t].first; e < parts[t].first + parts[t].count; e++)
                        if (e >= offset && e < offset + count)
                            of[t]++, came[t] += x[0][e] == (float)owner;
            }
    }
    for (int t = 0; t < 6; t++) share[t] = of[t] > 0 ? came[t] / of[t] : -1;
    free_vectors(x);
    lossynet_close(comm);
}

static void test_tensors_with_rates_of_their_own(void **state) {
    (void)state;
    double share[6];
    shares_of(NULL, "a.0-1=0.5,norm=1", NULL, share);
    assert_close(share[0], 1, 0.005); /* but for a packet that begins in b.1 and ends in a.1 */
    assert_close(share[1], 0.5, 0.03);
    assert_close(share[2], 0, 0.005);
    assert_close(share[4], 0.5, 0.1); /* a single element */
    assert_true(share[3] > 0.98 && share[5] > 0.98);
    shares_of("burst:4", "norm=0.25,0-*=1,a.1=0.5", NULL, share);
    assert_close(share[1], 0.5, 0.06);
    assert_close(share[2], 0.75, 0.06);
    assert_int_equal(share[3], 1);
    shares_of("outage:3", "norm=0.5", NULL, share);
    assert_close(share[2], 0.5, 0.1);
    assert_close(share[1], 1, 0.01);
}

/* Rounds of some tensors, beside none and beside one of all others. */
static void test_tensors_with_rounds_of_their_own(void **state) {
    (void)state;
    double share[6];
    shares_of(NULL, "*-*=0.4", "norm=3,b.1=1", share);
    const double want[] = {1 - 0.4 * 0.4, 0.6, 1 - 0.4 * 0.4 * 0.4 * 0.4, 0.6, 0.6, 0.6};
    for (int t = 0; t < 6; t++) assert_close(share[t], want[t], t == 4 ? 0.12 : 0.02);
    shares_of(NULL, "*-*=0.4", "*-*=2,norm=0:1,b=0", share);
    assert_close(share[1], 1 - 0.4 * 0.4 * 0.4, 0.02);
    assert_close(share[2], 1 - 0.4 * 0.4, 0.02);
    assert_close(share[0], 0.6, 0.02);
}

static char said[512];
static void hear(void *context, const char *message) {
    (void)context;
    snprintf(said, sizeof said, "%s", message);
}

static void test_names_that_no_tensor_has(void **state) {
    (void)state;
    const struct {
        const char *at, *repair_at, *says;
    } wrong[] = {
        {"a.2=0.5", NULL,
         "loss-at: 'a.2': no tensor has such a name: expected parts of one such as"},
        {NULL, "d=1", "repair-at: 'd': no tensor has such a name"},
        {"a.0-=0.5", NULL, "loss-at: 'a.0-': no tensor has such a name"},
        {"a.1-2=0.5", NULL, "loss-at: 'a.1-2': expected two numbers that tensors have"},
        {"a.1-0=0.5", NULL, "loss-at: 'a.1-0': no tensor has such a name"},
        {NULL, "a=17", "repair-at: 'a=17': round 17: expected a whole number from 0 to 16"},
        {NULL, "a=0.5", "repair-at: 'a=0.5': round 0.5: expected a whole number"},
        {NULL, "9=1", "repair-at: '9=1': worker 9: expected 0 to 3"},
        {NULL, "a", "repair-at: 'a': expected WORKER=ROUNDS"},
        {"a b=0.5", NULL, "loss-at: 'a b=0.5': expected WORKER=RATE"},
    };
    const struct lossynet_world world = {.ranks = 1, .local_ranks = 1};
    const size_t buckets[2] = {BUCKET, BUCKET};
    struct lossynet_comm *comm;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct lossynet_settings s = settings_of_parts(buckets, wrong[i].at, wrong[i].repair_at);
        s.log = hear;
        assert_int_equal(lossynet_check(&world, &s), LOSSYNET_INVALID);
        if (!strstr(said, wrong[i].says)) fail_msg("\"%s\" lacks \"%s\"", said, wrong[i].says);
        assert_int_equal(lossynet_open(&world, &s, &comm), LOSSYNET_INVALID);
    }
    struct lossynet_settings s = settings_of_parts(buckets, "1=0.5,1-2=1", NULL);
    assert_int_equal(lossynet_check(&world, &s), LOSSYNET_OK);
    s = settings_of_parts(buckets, "a=0.5", NULL);
    s.tensors = NULL, s.tensor_count = 0;
    s.log = hear;
    assert_int_equal(lossynet_check(&world, &s), LOSSYNET_OK); /* names are not known yet */
    assert_int_equal(lossynet_open(&world, &s, &comm), LOSSYNET_INVALID);
    assert_non_null(strstr(said, "loss-at: 'a': expected a list of tensors"));
    const struct lossynet_tensor outside[] = {
        {"a", 2 * BUCKET - 1, 2}, {"a", SIZE_MAX, 1}, {"a", 1, SIZE_MAX}, {NULL, 0, 1}};
    for (int i = 0; i < 4; i++) {
        s.tensors = outside + i, s.tensor_count = 1;
        assert_int_equal(lossynet_open(&world, &s, &comm), LOSSYNET_INVALID);
        assert_non_null(strstr(said, "expected a name, and a part of the vector of"));
    }
    s.tensors = NULL;
    for (s.tensor_count = -1; s.tensor_count <= 1; s.tensor_count += 2) {
        assert_int_equal(lossynet_open(&world, &s, &comm), LOSSYNET_INVALID);
        assert_non_null(strstr(said, "expected 0 or more, and where they lie"));
    }
}

/* ---- estimators ---- */

/* What gradient.c says of uneven links: a sender's mean weight is its share of what is delivered.
 * Worker 3 delivers half of what the others do. */
static void test_weight_of_a_bad_worker(void **state) {
    (void)state;
    enum { BAD = 3, ROUNDS = 400 };
    const lossynet_estimator estimators[] = {LOSSYNET_MEAN, LOSSYNET_BALANCED};
    const size_t elements = ELEMENTS;
    for (int i = 0; i < 2; i++) {
        struct lossynet_settings settings = simple_settings(WORKERS, &elements, 1, 0);
        settings.loss.at = "3=0.5";
        settings.estimator = estimators[i];
        struct lossynet_comm *comm = open_alone(&settings);
        float **x = take_vectors(WORKERS, elements);
        double weight = 0, total = 0; /* of BAD and of all, at owner 0 */
        size_t offset, count;
        lossynet_shard(comm, 0, 0, &offset, &count);
        for (int step = 0; step < ROUNDS; step++) {
            for (int what = 0; what < 2; what++) {
                for (int w = 0; w < WORKERS; w++)
                    for (size_t e = 0; e < elements; e++) x[w][e] = what || w == BAD;
                lossynet_step_begin(comm, (uint64_t)step);
                assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
                double sum = 0;
                for (size_t e = offset; e < offset + count; e++) sum += x[0][e];
                *(what ? &total : &weight) += sum / (double)count / ROUNDS;
            }
        }
        assert_close(total, 1, 0.01);
        assert_close(weight, 0.5 / 8,
                     0.02 / 8); /* mean: 1/8 where it arrives. balanced: 7/8 over 7 */
        free_vectors(x);
        lossynet_close(comm);
    }
}

/* ---- settings ---- */

static void test_check(void **state) {
    (void)state;
    const struct {
        const char *model, *at, *says;
        double rate;
    } wrong[] = {
        {"outage:0.5", NULL, "outage:0.5: the mean run length must be a number from 1", 0},
        {"outage:", NULL, "the mean run length must be", 0},
        {"outage", NULL, "\"outage\": expected bernoulli, burst:MEAN_LENGTH, outage:MEAN", 0},
        {"outage:5:", NULL, "outage:5:: \"\": expected sender, receiver, or a number of paths", 0},
        {"outage:5:1", NULL, "\"1\": expected sender, receiver, or a number of paths from 2", 0},
        {"outage:5:sender:2", NULL, "\"sender:2\": expected sender, receiver, or a number", 0},
        {"outage:5:2x", NULL, "\"2x\": expected sender", 0},
        {"outage:5:-2", NULL, "\"-2\": expected sender", 0},
        {"burst:5:2", NULL, "burst:5:2: the mean run length must be a number", 0},
        {"outage:1", NULL, "outage:1 loses at most 0.5 of the packets, the gradient loss rate",
         0.6},
        {"bernoulli", "3", "'3': expected WORKER=RATE or SENDER-RECEIVER=RATE", 0},
        {"bernoulli", "", "'': expected WORKER=RATE", 0},
        {"bernoulli", "=0.5", "'=0.5': expected WORKER=RATE", 0},
        {"bernoulli", "3=", "'3=': expected WORKER=RATE", 0},
        {"bernoulli", "3=x", "'3=x': expected WORKER=RATE", 0},
        {"bernoulli", "3=0.5x", "expected WORKER=RATE", 0},
        {"bernoulli", "3:0.5", "expected WORKER=RATE", 0},
        {"bernoulli", "2-=1", "'2-=1': expected WORKER=RATE", 0},
        {"bernoulli", "2-", "expected WORKER=RATE", 0},
        {"bernoulli", "3=0.5,", "'': expected WORKER=RATE", 0},
        {"bernoulli", "3=0.5,,4=1", "'': expected WORKER=RATE", 0},
        {"bernoulli", "1e9=0.5", "expected WORKER=RATE", 0},
        {"bernoulli", "99999999999999999999=0.5", "expected WORKER=RATE", 0},
        {"bernoulli", "8=0.5", "'8=0.5': worker 8: expected 0 to 7", 0},
        {"bernoulli", "-1=0.5", "worker -1: expected 0 to 7", 0},
        {"bernoulli", "1=0,2-8=0.5", "'2-8=0.5': worker 8: expected 0 to 7", 0},
        {"bernoulli", "2--1=0.5", "worker -1: expected 0 to 7", 0},
        {"bernoulli", "-2147483648=0.5", "worker -2147483648: expected 0 to 7", 0},
        {"bernoulli", "2-2=0.5", "'2-2=0.5': expected two workers", 0},
        {"bernoulli", "2=1.5", "'2=1.5': loss rate 1.5: expected a number from 0 to 1", 0},
        {"bernoulli", "2=-0.5", "loss rate -0.5: expected", 0},
        {"bernoulli", "2=nan", "loss rate nan: expected", 0},
        {"burst:2", "2=0.9", "burst:2 loses at most 0.6667 of the packets, the worker 2's loss", 0},
        {"outage:2", "2-1=0.9", "outage:2 loses at most 0.6667 of the packets, the link 2-1's", 0},
    };
    char why[256];
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct lossynet_loss_settings settings = {
            .rate = {wrong[i].rate, 0}, .model = wrong[i].model, .at = wrong[i].at};
        why[0] = 0;
        assert_int_equal(loss_check(&settings, why), LOSSYNET_INVALID);
        if (!strstr(why, wrong[i].says) || strchr(why, '\n'))
            fail_msg("\"%s\" lacks \"%s\"", why, wrong[i].says);
    }
    char path[64], model[96];
    snprintf(path, sizeof path, "/tmp/test_loss_shapes.%ld", (long)getpid());
    snprintf(model, sizeof model, "trace:%s", path);
    FILE *file = fopen(path, "w");
    fputs("01", file);
    fclose(file);
    struct lossynet_loss_settings settings = {.rate = {1, 1}, .model = model, .at = "2=0.5"};
    assert_int_equal(loss_check(&settings, why), LOSSYNET_INVALID);
    assert_non_null(strstr(why, "'2=0.5': a trace has no rates"));
    settings.at = "none";
    assert_int_equal(loss_check(&settings, why), LOSSYNET_OK);
    remove(path);
}

/* What ranks compare before they start (comm.c). */
static void test_fingerprint(void **state) {
    (void)state;
    const char *const at[] = {NULL,      "1=0.5",       "1=0.25", "2=0.5", "2-1=0.5",
                              "1-2=0.5", "1=0.5,2=0.5", "a=0.5",  "b=0.5"};
    const char *const models[] = {"bernoulli",         "burst:5",    "outage:5",  "outage:5:sender",
                                  "outage:5:receiver", "outage:5:2", "outage:5:3"};
    uint64_t seen[63];
    for (size_t i = 0; i < 63; i++) {
        struct ln_loss loss = open_loss(0.1, 0.1, models[i % 7], at[i / 7]);
        seen[i] = ln_loss_fingerprint(&loss);
        for (size_t j = 0; j < i; j++) assert_true(seen[i] != seen[j]);
        ln_loss_close(&loss);
    }
    for (size_t i = 0; i < 2; i++) {
        struct ln_loss loss = {
            .model = LOSS_TRACE, .trace = (uint8_t *)(i ? "\1" : "\0"), .trace_length = 1};
        seen[i] = ln_loss_fingerprint(&loss);
    }
    assert_true(seen[0] != seen[1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_outages),
        cmocka_unit_test(test_outages_of_many_links),
        cmocka_unit_test(test_outages_with_unlike_rates),
        cmocka_unit_test(test_outages_that_share_a_fate),
        cmocka_unit_test(test_outages_of_paths),
        cmocka_unit_test(test_uneven_rates),
        cmocka_unit_test(test_rates_by_phase_and_wildcards),
        cmocka_unit_test(test_outages_outlast_retransmission),
        cmocka_unit_test(test_chains_with_a_rate_of_their_own),
        cmocka_unit_test(test_names_of_tensors),
        cmocka_unit_test(test_tensors_with_rates_of_their_own),
        cmocka_unit_test(test_tensors_with_rounds_of_their_own),
        cmocka_unit_test(test_names_that_no_tensor_has),
        cmocka_unit_test(test_weight_of_a_bad_worker),
        cmocka_unit_test(test_check),
        cmocka_unit_test(test_fingerprint),
    };
    return cmocka_run_group_tests_name("loss shapes", tests, NULL, NULL);
}
