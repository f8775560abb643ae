/* test_error_feedback.c — tests that lost gradients are added to the next ones. A reference keeps
 * the residual of every packet and sender, rounded to bfloat16. Also tests what must hold for sums
 * over time. */
#include "test/lossynet/test_lossynet.h"

enum { WORKERS = 4, BUCKETS = 2, ELEMENTS = 500 + 130, PACKETS_MOST = 64 };
static const size_t elements[BUCKETS] = {500, 130};

static struct lossynet_settings feedback_settings(double p, lossynet_estimator estimator) {
    struct lossynet_settings settings = simple_settings(WORKERS, elements, BUCKETS, p);
    settings.estimator = estimator;
    settings.error_feedback = true;
    return settings;
}

static double gradient(uint64_t step, int worker, size_t element) {
    return 1 + random_unit(step, (uint64_t)worker, element);
}

static float kept(const struct lossynet_comm *comm, int worker, size_t element) {
    return ln_bf16_widen(comm->feedback.residual[(size_t)worker * ELEMENTS + element]);
}

static void against_reference(double p, lossynet_estimator estimator, double share) {
    struct lossynet_settings settings = feedback_settings(p, estimator);
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(WORKERS, ELEMENTS);
    static float residual[WORKERS][ELEMENTS];
    static double mass[WORKERS][ELEMENTS]; /* per element too */
    memset(residual, 0, sizeof residual);
    memset(mass, 0, sizeof mass);
    lossynet_error_feedback_share(comm, share);
    for (uint64_t step = 0; step < 12; step++) {
        for (int w = 0; w < WORKERS; w++)
            for (size_t e = 0; e < ELEMENTS; e++) x[w][e] = (float)gradient(step, w, e);
        assert_int_equal(lossynet_step_begin(comm, step), LOSSYNET_OK);
        assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
        size_t of_owner[WORKERS] = {0};
        for (int b = 0; b < BUCKETS; b++) {
            for (int o = 0; o < WORKERS; o++) {
                size_t offset, count, n = ln_partition_owner_packets(&comm->partition, o);
                lossynet_shard(comm, o, b, &offset, &count);
                for (size_t at = 0; at < count; at += 16, of_owner[o]++) {
                    bool there[WORKERS];
                    for (int w = 0; w < WORKERS; w++) {
                        uint8_t mask[PACKETS_MOST];
                        ln_loss_mask(&comm->loss, LOSSYNET_GRADIENT, step, w, o, n, NULL, mask);
                        there[w] = w == o || mask[of_owner[o]];
                    }
                    for (size_t e = offset + at; e < offset + count && e < offset + at + 16; e++) {
                        double sum = 0, masses = 0;
                        for (int w = 0; w < WORKERS; w++) {
                            const volatile float late = (float)share * residual[w][e];
                            const float sent = (float)gradient(step, w, e) + late;
                            double holds = 1 + share * mass[w][e];
                            if (there[w]) sum += (double)sent, masses += holds;
                            /* what was sent, rounded once, up or down */
                            residual[w][e] = kept(comm, w, e);
                            if (there[w])
                                assert_true(residual[w][e] == 0);
                            else
                                assert_true(fabsf(residual[w][e] - sent) < 0x1p-7f * fabsf(sent) &&
                                            residual[w][e] == as_bf16(residual[w][e]));
                            mass[w][e] = there[w] ? 0 : holds;
                        }
                        double by = estimator == LOSSYNET_ZERO ? WORKERS : masses;
                        assert_close(x[o][e], sum / by, 1e-5 * (1 + fabs(sum)));
                    }
                }
            }
        }
    }
    free_vectors(x);
    lossynet_close(comm);
}

static void test_reference(void **state) {
    (void)state;
    against_reference(0, LOSSYNET_MEAN, 1);
    against_reference(0.4, LOSSYNET_MEAN, 1);
    against_reference(0.4, LOSSYNET_MEAN, 0.5);
    against_reference(0.4, LOSSYNET_MEAN, 0);
    against_reference(0.4, LOSSYNET_ZERO, 1);
    against_reference(1, LOSSYNET_MEAN, 1);
}

/* Nothing is lost, only late: with `zero` the sum over time is that of all gradients but what is
 * still on its way; and with `mean` a gradient that never changes comes out as it is. */
static void test_nothing_is_lost(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct lossynet_settings settings =
            feedback_settings(0.3, i ? LOSSYNET_MEAN : LOSSYNET_ZERO);
        struct lossynet_comm *comm = open_alone(&settings);
        float **x = take_vectors(WORKERS, ELEMENTS);
        double sum[ELEMENTS] = {0};
        for (uint64_t step = 0; step < 40; step++) {
            for (int w = 0; w < WORKERS; w++)
                for (size_t e = 0; e < ELEMENTS; e++) x[w][e] = 3;
            assert_int_equal(lossynet_step_begin(comm, step), LOSSYNET_OK);
            assert_int_equal(lossynet_reduce(comm, x, step == 39), LOSSYNET_OK); /* all comes in */
            for (int w = 0; w < WORKERS; w++) {
                for (int b = 0; b < BUCKETS; b++) {
                    size_t offset, count;
                    lossynet_shard(comm, w, b, &offset, &count);
                    for (size_t e = offset; e < offset + count; e++) {
                        if (i) assert_close(x[w][e], 3, 1e-5);
                        sum[e] += x[w][e];
                    }
                }
            }
        }
        for (size_t e = 0; e < ELEMENTS; e++) assert_close(sum[e], 120, 1e-3);
        free_vectors(x);
        lossynet_close(comm);
    }
}

/* The same after an outage of hundreds of steps, which takes all links of worker 1. A residual is
 * bfloat16; it must grow on, though each gradient is less than half a unit of its last bit. */
static void outage(lossynet_wire_dtype wire, float each) {
    enum { STEPS = 700 };
    struct lossynet_settings settings = feedback_settings(0, LOSSYNET_MEAN);
    settings.loss.at = "1=1";
    settings.wire_dtype = wire;
    settings.packet_bytes = ln_payload_bytes(wire, 64) / 4 * 4;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(WORKERS, ELEMENTS);
    for (uint64_t step = 0; step <= STEPS; step++) {
        for (int w = 0; w < WORKERS; w++)
            for (size_t e = 0; e < ELEMENTS; e++) x[w][e] = each;
        assert_int_equal(lossynet_step_begin(comm, step), LOSSYNET_OK);
        assert_int_equal(lossynet_reduce(comm, x, step == STEPS), LOSSYNET_OK); /* all comes in */
    }
    for (int w = 0; w < WORKERS; w++) {
        for (int b = 0; b < BUCKETS; b++) {
            size_t offset, count;
            lossynet_shard(comm, w, b, &offset, &count);
            for (size_t e = offset; e < offset + count; e++)
                assert_close(x[w][e], (double)each, 0.05 * (double)each);
        }
    }
    free_vectors(x);
    lossynet_close(comm);
}

static void test_long_outage(void **state) {
    (void)state;
    outage(LOSSYNET_FLOAT32, 1);
    outage(LOSSYNET_BF16, 0.3f);
    outage(LOSSYNET_INT8, 1);
}

/* A comm that takes over another's state goes on like it. */
static void test_state(void **state) {
    (void)state;
    struct lossynet_settings settings = feedback_settings(0.4, LOSSYNET_MEAN);
    struct lossynet_comm *comm[2] = {open_alone(&settings), NULL};
    float **x[2] = {take_vectors(WORKERS, ELEMENTS), take_vectors(WORKERS, ELEMENTS)};
    for (uint64_t step = 0; step < 10; step++) {
        if (step == 5) {
            comm[1] = open_alone(&settings);
            for (int w = 0; w < WORKERS; w++) {
                size_t bytes = lossynet_state_bytes(comm[0], w);
                void *saved = malloc(bytes);
                lossynet_state_save(comm[0], w, saved);
                assert_true(lossynet_state_load(comm[1], w, saved, bytes));
                free(saved);
            }
        }
        for (int i = 0; i < 2 && comm[i]; i++) {
            for (int w = 0; w < WORKERS; w++)
                for (size_t e = 0; e < ELEMENTS; e++) x[i][w][e] = (float)gradient(step, w, e);
            assert_int_equal(lossynet_step_begin(comm[i], step), LOSSYNET_OK);
            assert_int_equal(lossynet_reduce(comm[i], x[i], false), LOSSYNET_OK);
        }
        for (int w = 0; w < WORKERS && comm[1]; w++)
            assert_memory_equal(x[0][w], x[1][w], ELEMENTS * sizeof(float));
    }
    for (int i = 0; i < 2; i++) {
        free_vectors(x[i]);
        lossynet_close(comm[i]);
    }
}

/* How late gradients are is found after many losses in a row, too. With half of each carried their mass is then
 * rounded to 2, which the weights 1, 1/2, 1/4 ... never add up to. */
static void test_age_after_many_losses(void **state) {
    (void)state;
    struct lossynet_settings settings = feedback_settings(1, LOSSYNET_MEAN);
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(WORKERS, ELEMENTS);
    lossynet_error_feedback_share(comm, 0.5);
    for (uint64_t step = 0; step < 31; step++) {
        assert_int_equal(lossynet_step_begin(comm, step), LOSSYNET_OK);
        assert_int_equal(lossynet_reduce(comm, x, step == 30), LOSSYNET_OK);
    }
    for (int v = 0; v < WORKERS; v++) { /* 3 of 4 senders: 1 and half of 2; the ages add up to 2 */
        const double packets = (double)ln_partition_owner_packets(&comm->partition, v);
        assert_close(comm->feedback.late[v].late / packets, 3 * 2 / (1 + 3 * 2.0), 1e-5);
    }
    free_vectors(x);
    lossynet_close(comm);
}

static void test_refusals(void **state) {
    (void)state;
    struct lossynet_comm *comm = NULL;
    struct lossynet_settings settings = feedback_settings(0.1, LOSSYNET_BALANCED);
    capture_begin();
    assert_int_equal(lossynet_open(&alone, &settings, &comm), LOSSYNET_INVALID);
    assert_message(capture_end(), "carry: expected estimator mean or zero, got balanced");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reference),   cmocka_unit_test(test_nothing_is_lost),
        cmocka_unit_test(test_long_outage), cmocka_unit_test(test_age_after_many_losses),
        cmocka_unit_test(test_state),       cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests_name("lost gradients, later", tests, NULL, NULL);
}
