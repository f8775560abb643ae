/* test_lossynet.c — tests the partition, injected loss, phases within one rank, settings and
 * memory.
 *
 * Other programs test the rest: test_estimators.c, test_drift.c, test_lossynet_receive.c (what a
 * broken or hostile peer can send), and test_lossynet_ranks.c, test_same_bits.c and
 * test_lossynet_mpi.c (several ranks).
 */
#include "test_lossynet.h"

#include "failing_memory.h"

/* ---- partition ---- */

static void check_layout(int workers, const size_t *elements, int buckets, size_t packet_bytes) {
    struct lossynet_settings settings = simple_settings(workers, elements, buckets, 0);
    settings.packet_bytes = packet_bytes;
    struct lossynet_comm *comm = open_alone(&settings);
    size_t packet = packet_bytes / 4, next = 0, packets = 0, owned[64] = {0};
    for (int b = 0; b < buckets; b++) {
        size_t start = next, chunk = (elements[b] + (size_t)workers - 1) / (size_t)workers;
        for (int w = 0; w < workers; w++) {
            size_t offset, count;
            lossynet_shard(comm, w, b, &offset, &count);
            assert_int_equal(offset, next); /* no gap, no overlap */
            assert_true(count <= (chunk + 15) / 16 * 16);
            if (count && next > start) assert_int_equal((next - start) % 16, 0);
            next += count;
            packets += (count + packet - 1) / packet;
            owned[w] += count;
        }
        assert_int_equal(next - start, elements[b]);
    }
    assert_int_equal(lossynet_packets(comm), packets);
    assert_int_equal(lossynet_packet_bytes(comm), packet_bytes);
    for (int w = 0; w < workers; w++) assert_int_equal(lossynet_owned_elements(comm, w), owned[w]);

    /* Before anything was broadcast all is fresh, in one run. */
    size_t cursor = 0, offset, count;
    assert_true(lossynet_next_fresh(comm, 0, &cursor, &offset, &count));
    assert_int_equal(offset, 0);
    assert_int_equal(count, next);
    assert_false(lossynet_next_fresh(comm, 0, &cursor, &offset, &count));
    lossynet_close(comm);
}

static void test_layout(void **state) {
    (void)state;
    const size_t elements[] = {1, 16, 17, 1000, 4096, 99991};
    const int workers[] = {1, 2, 3, 7, 8, 64};
    const size_t packets[] = {4, 60, 64, 4096, 1 << 20};
    for (size_t i = 0; i < 6; i++)
        for (size_t j = 0; j < 5; j++) check_layout(workers[i], elements, 6, packets[j]);
}

/* An owner may have a bucket alone, and nothing of another. */
static void test_given_shards(void **state) {
    (void)state;
    const size_t elements[2] = {100, 50}, shards[2][3] = {{0, 100, 0}, {33, 0, 17}};
    struct lossynet_settings settings = simple_settings(3, elements, 2, 0);
    settings.shard_elements = shards[0];
    struct lossynet_comm *comm = open_alone(&settings);
    size_t next = 0, packets = 0;
    for (int b = 0; b < 2; b++) {
        for (int w = 0; w < 3; w++) {
            size_t offset, count;
            lossynet_shard(comm, w, b, &offset, &count);
            assert_int_equal(offset, next);
            assert_int_equal(count, shards[b][w]);
            next += count;
            packets += (count + 15) / 16;
        }
    }
    assert_int_equal(lossynet_packets(comm), packets);
    for (int w = 0; w < 3; w++)
        assert_int_equal(lossynet_owned_elements(comm, w), shards[0][w] + shards[1][w]);
    lossynet_close(comm);
}

static void test_names(void **state) {
    (void)state;
    const char *names[] = {"mean", "balanced", "zero"};
    for (int i = 0; i < 3; i++)
        assert_string_equal(lossynet_estimator_name((lossynet_estimator)i), names[i]);
    assert_string_equal(lossynet_estimator_name((lossynet_estimator)9), "unknown");
    assert_string_equal(lossynet_wire_dtype_name(LOSSYNET_INT6), "int6");
    assert_string_equal(lossynet_wire_dtype_name(-1), "unknown");
    for (int s = LOSSYNET_OK; s <= LOSSYNET_ELSEWHERE + 1; s++)
        assert_true(strlen(lossynet_status_string((lossynet_status)s)) > 0);
}

/* ---- injected loss ---- */

static struct ln_loss open_loss(double p, const char *model, uint64_t seed) {
    struct lossynet_loss_settings settings = {.rate = {p, p}, .model = model, .seed = seed};
    struct ln_loss loss;
    assert_int_equal(ln_loss_open(&loss, &settings, 2), LOSSYNET_OK);
    return loss;
}

enum { MANY = 400000 };
static uint8_t mask_a[MANY], mask_b[MANY];

static double lost(const uint8_t *mask, size_t n) {
    size_t count = 0;
    for (size_t k = 0; k < n; k++) count += !mask[k];
    return (double)count / (double)n;
}

/* Correlation of two masks whose packets are lost with probability p. */
static double correlation(const uint8_t *a, const uint8_t *b, size_t n, double p) {
    double sum = 0;
    for (size_t k = 0; k < n; k++) sum += (!a[k] - p) * (!b[k] - p);
    return sum / ((double)n * p * (1 - p));
}

static void test_bernoulli(void **state) {
    (void)state;
    const double rates[] = {0.001, 0.1, 0.5, 0.99};
    double bound = 5 / sqrt(MANY);
    for (int i = 0; i < 4; i++) {
        double p = rates[i];
        struct ln_loss loss = open_loss(p, "bernoulli", 7), other = open_loss(p, NULL, 8);
        ln_loss_mask(&loss, LOSSYNET_GRADIENT, 3, 1, 2, MANY, NULL, mask_a);
        assert_close(lost(mask_a, MANY), p, 5 * sqrt(p * (1 - p) / MANY));
        assert_close(correlation(mask_a, mask_a + 1, MANY - 1, p), 0, bound); /* neighbours */
        /* one of seed, phase, step, sender, receiver differs; sender and receiver swapped */
        const struct {
            const struct ln_loss *loss;
            lossynet_phase phase;
            uint64_t step;
            int sender, receiver;
        } streams[] = {
            {&other, LOSSYNET_GRADIENT, 3, 1, 2}, {&loss, LOSSYNET_PARAMETER, 3, 1, 2},
            {&loss, LOSSYNET_GRADIENT, 4, 1, 2},  {&loss, LOSSYNET_GRADIENT, 3, 0, 2},
            {&loss, LOSSYNET_GRADIENT, 3, 1, 3},  {&loss, LOSSYNET_GRADIENT, 3, 2, 1},
        };
        for (int j = 0; j < 6; j++) {
            ln_loss_mask(streams[j].loss, streams[j].phase, streams[j].step, streams[j].sender,
                         streams[j].receiver, MANY, NULL, mask_b);
            assert_close(correlation(mask_a, mask_b, MANY, p), 0, bound);
        }
        ln_loss_mask(&loss, LOSSYNET_GRADIENT, 3, 1, 2, MANY, NULL, mask_b);
        assert_memory_equal(mask_a, mask_b, MANY); /* a pure function */
    }
}

/* Few packets per step, many steps: the same link's loss over time, and different links at one
 * time, are as random as one long mask. */
static void test_bernoulli_over_steps(void **state) {
    (void)state;
    double p = 0.1;
    struct ln_loss loss = open_loss(p, "bernoulli", 7);
    for (int step = 0; step < MANY / 4; step++) {
        ln_loss_mask(&loss, LOSSYNET_PARAMETER, (uint64_t)step, 0, 1, 4, NULL, mask_a + 4 * step);
        ln_loss_mask(&loss, LOSSYNET_PARAMETER, 0, step % 60000, step / 60000, 4, NULL,
                     mask_b + 4 * step);
    }
    for (int lag = 1; lag <= 8; lag++) {
        assert_close(correlation(mask_a, mask_a + lag, MANY - 8, p), 0, 5 / sqrt(MANY));
        assert_close(correlation(mask_b, mask_b + lag, MANY - 8, p), 0, 5 / sqrt(MANY));
    }
    assert_close(lost(mask_a, MANY), p, 5 * sqrt(p * (1 - p) / MANY));
    assert_close(lost(mask_b, MANY), p, 5 * sqrt(p * (1 - p) / MANY));
}

/* Rate and mean run of a link's losses over steps of n packets each. */
static void check_burst(double mean, double p, size_t n) {
    char model[32];
    snprintf(model, sizeof model, "burst:%g", mean);
    struct ln_loss loss = open_loss(p, model, 5);
    uint64_t chain = 0;
    size_t steps = MANY / n;
    for (size_t step = 0; step < steps; step++)
        ln_loss_mask(&loss, LOSSYNET_GRADIENT, step, 3, 4, n, &chain, mask_a + step * n);
    size_t all = steps * n, runs = 0, losses = 0;
    for (size_t k = 0; k < all; k++) {
        losses += !mask_a[k];
        runs += !mask_a[k] && (k == 0 || mask_a[k - 1]);
    }
    double run = (double)losses / (double)runs, deviation = sqrt(mean * (mean - 1));
    /* The rate's variance is larger than Bernoulli's by (1+r)/(1-r), r the correlation of
     * neighbours, 1 - a - b. */
    double r = 1 - 1 / (mean * (1 - p));
    double rate_error = sqrt(p * (1 - p) / (double)all * (1 + r) / (1 - r));
    assert_close((double)losses / (double)all, p, 5 * rate_error + 1e-9);
    assert_close(run, mean, 5 * deviation / sqrt((double)runs) + mean * 1e-4);

    /* Without the memory of the last step, each step from nothing: the same. */
    for (size_t step = steps; step-- > 0;) {
        if (mean > 50 && step % 8) continue; /* looking back takes time */
        ln_loss_mask(&loss, LOSSYNET_GRADIENT, step, 3, 4, n, NULL, mask_b);
        assert_memory_equal(mask_a + step * n, mask_b, n);
    }
}

static void test_burst(void **state) {
    (void)state;
    check_burst(10, 0.1, 1000);
    check_burst(10, 0.1, 3); /* most runs cross steps */
    check_burst(4, 0.5, 7);
    check_burst(100, 0.3, 50);
    check_burst(1.25, 0.2, 10); /* = Bernoulli */
    check_burst(1, 0.3, 10);    /* never two in a row */
    check_burst(2, 0.6, 10);    /* shorter than chance, states flip */
}

/* The memory of a step is used for the step after it only. */
static void test_burst_with_gaps(void **state) {
    (void)state;
    struct ln_loss loss = open_loss(0.5, "burst:40", 5);
    const uint64_t steps[] = {0, 1, 2, 7, 7, 3, 4, 1000, 0};
    for (int link = 0; link < 50; link++) {
        uint64_t chain = 0;
        for (int i = 0; i < 9; i++) {
            ln_loss_mask(&loss, LOSSYNET_GRADIENT, steps[i], link, 99, 5, &chain, mask_a);
            ln_loss_mask(&loss, LOSSYNET_GRADIENT, steps[i], link, 99, 5, NULL, mask_b);
            assert_memory_equal(mask_a, mask_b, 5);
        }
    }
}

/* Alternates for ever; the state is drawn, and nothing hangs. */
static void test_burst_that_never_decides(void **state) {
    (void)state;
    struct ln_loss loss = open_loss(0.5, "burst:1", 5);
    ln_loss_mask(&loss, LOSSYNET_GRADIENT, 9, 0, 1, 100, NULL, mask_a);
    for (int k = 1; k < 100; k++) assert_true(mask_a[k] != mask_a[k - 1]);
    for (int i = 0; i < 1000; i++)
        ln_loss_mask(&loss, LOSSYNET_GRADIENT, 0, i, 1, 1, NULL, mask_a + i);
    assert_close(lost(mask_a, 1000), 0.5, 5 * sqrt(0.25 / 1000));
}

/* The state before a step is stationary: over many links, the first packet is lost with p. */
static void test_burst_starts_stationary(void **state) {
    (void)state;
    struct ln_loss loss = open_loss(0.3, "burst:50", 5);
    int links = 40000;
    for (int i = 0; i < links; i++)
        ln_loss_mask(&loss, LOSSYNET_PARAMETER, 0, i, 1, 1, NULL, mask_a + i);
    assert_close(lost(mask_a, (size_t)links), 0.3, 5 * sqrt(0.3 * 0.7 / links));
}

static void write_file(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void test_trace(void **state) {
    (void)state;
    char path[64], model[96];
    snprintf(path, sizeof path, "/tmp/test_lossynet.%ld", (long)getpid());
    snprintf(model, sizeof model, "trace:%s", path);
    write_file(path, "# ten\r\n0001\t1  0\n# 111\n1 000 # 1");
    const char *pattern = "0001101000";
    struct ln_loss loss = open_loss(0.5, model, 5);
    assert_int_equal(loss.trace_length, 10);
    int starts[10] = {0};
    for (int link = 0; link < 200; link++) {
        size_t start = 10;
        for (uint64_t step = 0; step < 3; step++) /* on from step to step, 7 packets each */
            ln_loss_mask(&loss, LOSSYNET_GRADIENT, step, link, 1, 7, NULL, mask_a + 7 * step);
        for (size_t at = 0; at < 10 && start == 10; at++) {
            size_t k = 0;
            while (k < 21 && (pattern[(at + k) % 10] == '0') == mask_a[k]) k++;
            if (k == 21) start = at;
        }
        assert_true(start < 10);
        starts[start]++;
    }
    for (int at = 0; at < 10; at++) assert_true(starts[at] > 5); /* places of their own */
    ln_loss_close(&loss);

    struct lossynet_loss_settings settings = {.rate = {0, 0.1}, .model = model};
    char why[256];
    assert_int_equal(loss_check(&settings, why), LOSSYNET_OK);
    assert_int_equal(ln_loss_open(&loss, &settings, 2), LOSSYNET_OK);
    ln_loss_mask(&loss, LOSSYNET_GRADIENT, 0, 0, 1, 100, NULL, mask_a); /* rate 0 */
    assert_true(lost(mask_a, 100) == 0);
    ln_loss_mask(&loss, LOSSYNET_PARAMETER, 0, 0, 1, 100, NULL, mask_a);
    assert_true(lost(mask_a, 100) == 0.3);
    ln_loss_close(&loss);

    const char *bad[][2] = {{"01\n0x1", "line 2"}, {" \n# 01", "empty"}, {"", "empty"}};
    for (int i = 0; i < 3; i++) {
        write_file(path, bad[i][0]);
        assert_int_equal(loss_check(&settings, why), LOSSYNET_FILE);
        assert_non_null(strstr(why, bad[i][1]));
        assert_non_null(strstr(why, path));
    }
    remove(path);
    assert_int_equal(loss_check(&settings, why), LOSSYNET_FILE);
    assert_non_null(strstr(why, "No such file"));
}

static void test_loss_check(void **state) {
    (void)state;
    const struct {
        double gradient, parameter;
        const char *model, *says;
    } wrong[] = {
        {-0.1, 0, "bernoulli", "gradient loss rate -0.1: expected a number from 0 to 1"},
        {0, 1.5, "bernoulli", "parameter loss rate 1.5: expected"},
        {NAN, 0, "bernoulli", "expected a number from 0 to 1"},
        {0, 0, "markov", "\"markov\": expected bernoulli, burst:MEAN_LENGTH, outage:MEAN"},
        {0, 0, "burst:0.5", "burst:0.5: the mean run length must be"},
        {0, 0, "burst:", "mean run length"},
        {0, 0, "burst:3x", "mean run length"},
        {0, 0, "burst:nan", "mean run length"},
        {0, 0.6, "burst:1", "loses at most 0.5 of the packets, the parameter loss rate is 0.6"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct lossynet_loss_settings settings = {.rate = {wrong[i].gradient, wrong[i].parameter},
                                                  .model = wrong[i].model};
        char why[256] = "";
        assert_int_equal(loss_check(&settings, why), LOSSYNET_INVALID);
        if (!strstr(why, wrong[i].says) || strchr(why, '\n'))
            fail_msg("\"%s\" lacks \"%s\"", why, wrong[i].says);
    }
    struct lossynet_loss_settings right = {.rate = {1, 0.5}, .model = "burst:1"};
    char why[256];
    assert_int_equal(loss_check(&right, why), LOSSYNET_OK);
}

/* ---- phases in memory ---- */

/* A broadcast against its definition: what is fresh equals the owner's, the rest is as it was, and
 * counters, ages and fresh runs agree. */
static void check_broadcast(int workers, double p, const char *model) {
    const size_t elements[3] = {3001, 5, 640};
    size_t all = 3646;
    struct lossynet_settings settings = simple_settings(workers, elements, 3, p);
    settings.loss.model = model;
    settings.drift_samples = 10;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(workers, all), **before = take_vectors(workers, all);
    uint32_t *age = calloc(all * (size_t)workers, sizeof *age);
    for (uint64_t step = 0; step < 6; step++) {
        for (int w = 0; w < workers; w++)
            for (size_t e = 0; e < all; e++)
                x[w][e] = before[w][e] = (float)random_unit(step, (uint64_t)w, e);
        lossynet_step_begin(comm, step);
        bool lossless = step == 4;
        assert_int_equal(lossynet_broadcast(comm, x, lossless), LOSSYNET_OK);
        uint64_t missing = 0, sum = 0, aged[LOSSYNET_AGES] = {0};
        uint32_t largest = 0;
        for (int w = 0; w < workers; w++) {
            uint32_t *mine = age + (size_t)w * all;
            for (size_t e = 0; e < all; e++) mine[e]++;
            size_t cursor = 0, offset, count, last = 0;
            while (lossynet_next_fresh(comm, w, &cursor, &offset, &count)) {
                assert_true(count > 0 && (offset > last || last == 0)); /* maximal, ascending */
                for (size_t e = offset; e < offset + count; e++) mine[e] = 0;
                last = offset + count;
            }
            for (int b = 0; b < 3; b++) {
                for (int o = 0; o < workers; o++) {
                    size_t start, n;
                    lossynet_shard(comm, o, b, &start, &n);
                    for (size_t e = start; e < start + n; e++) {
                        assert_true(x[w][e] == (mine[e] ? before[w][e] : before[o][e]));
                        if (o == w || lossless || p == 0) assert_int_equal(mine[e], 0);
                        if (o != w && p == 1 && !lossless) assert_true(mine[e] > 0);
                        if ((e - start) % 16) continue; /* packets of 16 elements */
                        missing += mine[e] > 0;
                        if (o != w) aged[mine[e]]++; /* at most 6 */
                        sum += mine[e];
                        if (mine[e] > largest) largest = mine[e];
                    }
                }
            }
        }
        struct lossynet_counters counters;
        assert_int_equal(lossynet_step_counters(comm, comm->steps.step, &counters), LOSSYNET_OK);
        uint64_t expected = lossynet_packets(comm) * (uint64_t)(workers - 1);
        assert_int_equal(counters.expected[LOSSYNET_PARAMETER], expected);
        assert_int_equal(counters.arrived[LOSSYNET_PARAMETER], expected - missing);
        assert_int_equal(counters.bytes[LOSSYNET_PARAMETER], all * 4 * (size_t)(workers - 1));
        assert_int_equal(counters.expected[LOSSYNET_GRADIENT], 0);
        struct lossynet_drift drift;
        assert_int_equal(lossynet_drift_measure(comm, x, &drift), LOSSYNET_OK);
        assert_int_equal(drift.max_age, largest);
        if (workers > 1) assert_close(drift.mean_age, (double)sum / (double)expected, 1e-12);
        for (int k = 0; k < LOSSYNET_AGES && workers > 1; k++)
            assert_close(drift.age_share[k], (double)aged[k] / (double)expected, 1e-12);

        float *fresh = calloc(all, sizeof *fresh);
        assert_int_equal(lossynet_gather_fresh(comm, x, fresh), LOSSYNET_OK);
        for (int b = 0; b < 3; b++)
            for (int o = 0; o < workers; o++) {
                size_t start, n;
                lossynet_shard(comm, o, b, &start, &n);
                assert_memory_equal(fresh + start, before[o] + start, n * sizeof *fresh);
            }
        free(fresh);
    }
    free(age);
    free_vectors(before);
    free_vectors(x);
    lossynet_close(comm);
}

static void test_broadcast(void **state) {
    (void)state;
    check_broadcast(1, 0.5, "bernoulli");
    check_broadcast(2, 0.3, "bernoulli");
    check_broadcast(5, 0.1, "bernoulli");
    check_broadcast(5, 0, "bernoulli");
    check_broadcast(5, 1, "bernoulli");
    check_broadcast(64, 0.5, "bernoulli"); /* more workers than packets in a bucket */
    check_broadcast(8, 0.3, "burst:6");
}

static void test_counters(void **state) {
    (void)state;
    const size_t elements[2] = {10000, 3};
    struct lossynet_settings settings = simple_settings(4, elements, 2, 0.25);
    settings.loss.rate[LOSSYNET_PARAMETER] = 0.5;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(4, 10003);
    struct lossynet_counters c;
    for (uint64_t step = 0; step < 2; step++) { /* of the current step, not added up */
        lossynet_step_begin(comm, step);
        lossynet_reduce(comm, x, false);
        lossynet_broadcast(comm, x, false);
        assert_int_equal(lossynet_step_counters(comm, comm->steps.step, &c), LOSSYNET_OK);
        for (int phase = 0; phase < 2; phase++) {
            double rate = settings.loss.rate[phase], n = 3.0 * (double)lossynet_packets(comm);
            assert_true(c.expected[phase] == n);
            assert_close((double)c.arrived[phase] / n, 1 - rate, 5 * sqrt(rate * (1 - rate) / n));
            assert_int_equal(c.bytes[phase], 3 * 10003 * 4);
        }
    }
    lossynet_step_begin(comm, 2);
    lossynet_step_counters(comm, comm->steps.step, &c);
    assert_int_equal(c.expected[0] + c.expected[1] + c.arrived[0] + c.bytes[0], 0);
    free_vectors(x);
    lossynet_close(comm);
}

/* The caller's weighted sum is called once per (owner, bucket), and the default agrees with the
 * definition for any weights, also with out among the senders. */
static int sums;
static void counting_sum(float *out, const float *const *sender, const float *weight, int senders,
                         size_t n, size_t packet) {
#pragma omp atomic
    sums++;
    ln_weighted_sum_plain(out, sender, weight, senders, n, packet);
}

static void test_weighted_sum(void **state) {
    (void)state;
    const size_t elements[3] = {1000, 2000, 10}; /* the last bucket has one owner */
    struct lossynet_settings settings = simple_settings(5, elements, 3, 0.3);
    settings.weighted_sum = counting_sum;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(5, 3010);
    sums = 0;
    assert_int_equal(lossynet_step_begin(comm, 0), LOSSYNET_OK);
    assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
    assert_int_equal(sums, 11);
    lossynet_close(comm);

    const size_t n = 2500, packets[] = {1, 16, 1000, 1024, 4096};
    const float *senders[5];
    for (int i = 0; i < 5; i++) {
        senders[i] = x[i];
        for (size_t j = 0; j < n; j++) x[i][j] = (float)random_unit(1, (uint64_t)i, j);
    }
    float *weight = calloc(5 * n, sizeof *weight), *want = calloc(n, sizeof *want);
    for (int i = 0; i < 5; i++) {
        size_t packet = packets[i];
        for (size_t k = 0; k < 5 * n; k++)
            weight[k] = random_bits(2, packet, k) % 3 ? (float)random_unit(3, packet, k) : 0;
        for (size_t j = 0; j < n; j++) {
            want[j] = 0;
            for (int s = 0; s < 5; s++) want[j] += weight[j / packet * 5 + (size_t)s] * x[s][j];
        }
        ln_weighted_sum_plain(x[i], senders, weight, 5, n, packet);
        assert_memory_equal(x[i], want, n * sizeof *want);
    }
    free(want);
    free(weight);
    free_vectors(x);
}

/* ---- settings and memory ---- */

static void refused(const struct lossynet_world *world, const struct lossynet_settings *settings,
                    lossynet_status status, const char *says) {
    struct lossynet_comm *comm = (struct lossynet_comm *)&comm;
    capture_begin();
    lossynet_status got = lossynet_open(world, settings, &comm);
    const char *text = capture_end();
    assert_message(text, says);
    assert_int_equal(got, status);
    assert_null(comm);
}

static void test_settings(void **state) {
    (void)state;
    const size_t elements[2] = {100, 0};
    const struct lossynet_settings good = simple_settings(4, elements, 1, 0.1);
    struct lossynet_settings s;
    s = good, s.workers = 0;
    refused(&alone, &s, LOSSYNET_INVALID, "workers 0: expected 1 to 65534");
    s = good, s.buckets = 0;
    refused(&alone, &s, LOSSYNET_INVALID, "buckets 0: expected at least 1");
    s = good, s.buckets = 2;
    refused(&alone, &s, LOSSYNET_INVALID, "bucket 1: 0 elements: expected at least 1");
    const size_t few[4] = {50, 0, 49, 0}, many[4] = {50, 51, 49, SIZE_MAX - 49};
    s = good, s.shard_elements = few;
    refused(&alone, &s, LOSSYNET_INVALID, "bucket 0: expected shards of 100 elements in all");
    s = good, s.shard_elements = many;
    refused(&alone, &s, LOSSYNET_INVALID, "bucket 0: expected shards of 100 elements in all");
    s = good, s.packet_bytes = 6;
    refused(&alone, &s, LOSSYNET_INVALID, "packet size 6 bytes: expected a multiple of 4");
    s = good, s.estimator = (lossynet_estimator)7;
    refused(&alone, &s, LOSSYNET_INVALID, "estimator 7: expected mean");
    s = good, s.link = (lossynet_link_kind)7;
    refused(&alone, &s, LOSSYNET_INVALID, "link 7: expected auto, mpi, udp or verbs");
    s = good, s.drift_samples = -1;
    refused(&alone, &s, LOSSYNET_INVALID, "drift samples -1: expected 0 or more");
    s = good, s.loss.rate[0] = 2;
    refused(&alone, &s, LOSSYNET_INVALID, "gradient loss rate 2: expected");
    s = good, s.loss.model = "trace:/nonexistent";
    refused(&alone, &s, LOSSYNET_FILE, "/nonexistent: No such file");
    struct lossynet_world three = {.rank = 1, .ranks = 3};
    s = good;
    refused(&three, &s, LOSSYNET_INVALID, "workers 4: expected a multiple of the 3 ranks");
    struct lossynet_world outside = {.rank = 3, .ranks = 2};
    refused(&outside, &s, LOSSYNET_INVALID, "rank 3 of 2 ranks");
    struct lossynet_world two = {.rank = 0, .ranks = 2};
    refused(&two, &s, LOSSYNET_LINK, "MPI"); /* no bootstrap, or no MPI at all */
    lossynet_close(NULL);
}

/* Every allocation fails in turn: one line, the right status, nothing leaked. */
static void test_out_of_memory(void **state) {
    (void)state;
    char path[64], model[96];
    snprintf(path, sizeof path, "/tmp/test_lossynet.%ld", (long)getpid());
    snprintf(model, sizeof model, "trace:%s", path);
    write_file(path, "0101");
    const char *models[] = {"burst:4", model};
    const size_t elements[2] = {100, 200};
    for (int i = 0; i < 2; i++) {
        struct lossynet_settings settings = simple_settings(4, elements, 2, 0.1);
        settings.loss.model = models[i];
        const struct lossynet_tensor tensor = {"a", 0, 100};
        settings.loss.at = i == 0 ? "1=0.2,2-3=1,a=0.3" : NULL;
        settings.tensors = &tensor, settings.tensor_count = 1;
        settings.drift_samples = 50;
        int allocations = 0;
        for (;; allocations++) {
            struct lossynet_comm *comm;
            capture_begin();
            memory_fail_after = allocations;
            lossynet_status status = lossynet_open(&alone, &settings, &comm);
            memory_fail_after = -1;
            const char *text = capture_end();
            lossynet_close(comm);
            if (status == LOSSYNET_OK) break;
            assert_int_equal(status, LOSSYNET_NO_MEMORY);
            assert_message(text, "no memory");
        }
        assert_true(allocations > 20);
    }
    remove(path);
}

static void keep_message(void *context, const char *message) {
    snprintf(context, 128, "%s", message);
}

/* Each comm has its own target of messages; those about none, or one without, go to stderr. */
static void test_messages_of_each_comm(void **state) {
    (void)state;
    const size_t elements[2] = {100, 50};
    struct lossynet_settings settings = simple_settings(2, elements, 2, 0), wrong;
    char said[2][128] = {"", ""};
    struct lossynet_comm *comm[2], *none;
    settings.log = keep_message;
    for (int c = 0; c < 2; c++) {
        settings.log_context = said[c];
        comm[c] = open_alone(&settings);
    }
    wrong = settings;
    wrong.workers = 0;
    capture_begin();
    assert_int_equal(lossynet_shards(comm[0], NULL), LOSSYNET_INVALID);
    assert_int_equal(lossynet_open(&alone, &wrong, &none), LOSSYNET_INVALID);
    assert_string_equal(capture_end(), "");
    assert_non_null(strstr(said[0], "shards apart: expected memory"));
    assert_non_null(strstr(said[1], "workers 0: expected"));
    wrong.log = NULL;
    capture_begin();
    assert_int_equal(lossynet_check(&alone, &wrong), LOSSYNET_INVALID);
    assert_message(capture_end(), "workers 0: expected");
    for (int c = 0; c < 2; c++) lossynet_close(comm[c]);
}

static void test_memory(void **state) {
    (void)state;
    const size_t elements[2] = {100000, 5000};
    struct lossynet_settings settings = simple_settings(8, elements, 2, 0.1);
    settings.packet_bytes = 4096;
    settings.drift_samples = 250;
    struct lossynet_comm *comm = open_alone(&settings);
    assert_int_equal(lossynet_memory_bytes(comm), lossynet_memory_needed(&alone, &settings));
    lossynet_close(comm);
    /* One worker per rank: the inbox is its shards from the others, 7/8 of a vector. */
    struct lossynet_world eight = {.rank = 0, .ranks = 8};
    size_t needed = lossynet_memory_needed(&eight, &settings);
    /* Of the link, and 512 KiB of messages that are repeated. */
    size_t trains = ln_link_mpi_memory(8, 4096) + (512 << 10);
    assert_true(needed > trains + 105000 * 4 * 6 / 8 && needed < trains + 105000 * 4 * 10 / 8);
    /* What threads have of their own are lists, links and batches, and no vector. */
    settings.link = LOSSYNET_LINK_UDP;
    needed = lossynet_memory_needed(&eight, &settings);
    settings.network.threads = 4;
    const size_t more = lossynet_memory_needed(&eight, &settings) - needed;
    assert_true(more > 3 * ln_link_udp_memory(8, 4096) &&
                more < 4 * (ln_link_udp_memory(8, 4096) + (1 << 20)));
    /* 7B over 64 ranks: nothing is allocated; the inbox is 63/64 of a vector, all else little. */
    const size_t large[1] = {6738415616};
    settings = simple_settings(64, large, 1, 0.1);
    settings.packet_bytes = 4096;
    struct lossynet_world many = {.rank = 0, .ranks = 64};
    needed = lossynet_memory_needed(&many, &settings);
    double vector = 4.0 * (double)large[0];
    assert_true((double)needed > 0.985 * vector && (double)needed < 1.02 * vector);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout),
        cmocka_unit_test(test_given_shards),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_bernoulli),
        cmocka_unit_test(test_bernoulli_over_steps),
        cmocka_unit_test(test_burst),
        cmocka_unit_test(test_burst_with_gaps),
        cmocka_unit_test(test_burst_that_never_decides),
        cmocka_unit_test(test_burst_starts_stationary),
        cmocka_unit_test(test_trace),
        cmocka_unit_test(test_loss_check),
        cmocka_unit_test(test_broadcast),
        cmocka_unit_test(test_counters),
        cmocka_unit_test(test_weighted_sum),
        cmocka_unit_test(test_settings),
        cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_messages_of_each_comm),
        cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests_name("lossynet", tests, NULL, NULL);
}
