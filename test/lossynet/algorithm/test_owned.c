/* test_owned.c — tests vectors of bfloat16, and owners' values that are stored apart from the
 * vectors (lossynet_shards). Averages, replicas, drift, the gathered model and states must
 * have the same bits as with vectors of float32 that hold everything. test_same_bits.c and
 * test_lossynet_udp.c test the same between ranks.
 */
#include "test/lossynet/elsewhere.h"

enum { WORKERS = 4, BUCKETS = 3, ELEMENTS = 1000 + 7 + 333 };
static const size_t elements[BUCKETS] = {1000, 7, 333};

static struct lossynet_settings bf16_settings(int workers, double p) {
    struct lossynet_settings settings = simple_settings(workers, elements, BUCKETS, p);
    settings.wire_dtype = settings.vector_dtype = LOSSYNET_BF16;
    return settings;
}

/* ---- the same bits ---- */

struct outcome {
    uint64_t digest, states;
};

static struct outcome run(struct lossynet_settings settings) {
    struct lossynet_comm *comm = open_alone(&settings);
    struct outcome outcome = {.digest = scenario_run(comm, 0, SCENARIO_WORKERS)};
    for (int w = LOSSYNET_ALL_WORKERS; w < SCENARIO_WORKERS; w++) {
        const size_t bytes = lossynet_state_bytes(comm, w);
        void *state = malloc(bytes);
        lossynet_state_save(comm, w, state);
        outcome.states = digest_bytes(outcome.states, state, bytes);
        free(state);
    }
    lossynet_close(comm);
    return outcome;
}

static void same_bits(struct lossynet_settings settings) {
    struct outcome outcome[SCENARIO_BF16 + 1];
    for (scenario_kind = SCENARIO_ROUNDED; scenario_kind <= SCENARIO_BF16; scenario_kind++) {
        settings.vector_dtype = scenario_kind == SCENARIO_BF16 ? LOSSYNET_BF16 : LOSSYNET_FLOAT32;
        outcome[scenario_kind] = run(settings);
    }
    scenario_kind = SCENARIO_ANY;
    assert_true(outcome[SCENARIO_ROUNDED].digest != 0);
    for (int kind = SCENARIO_APART; kind <= SCENARIO_BF16; kind++)
        assert_memory_equal(&outcome[kind], &outcome[SCENARIO_ROUNDED], sizeof *outcome);
}

static void test_same_bits(void **state) {
    (void)state;
    const lossynet_estimator estimators[] = {LOSSYNET_MEAN, LOSSYNET_BALANCED, LOSSYNET_ZERO};
    for (int i = 0; i < 3; i++) {
        struct lossynet_settings settings =
            scenario_settings(i % 2 ? "burst:5" : "bernoulli", 0.3, estimators[i]);
        settings.wire_dtype = (lossynet_wire_dtype)(LOSSYNET_BF16 + i % 3);
        same_bits(settings);
        settings.retransmission_rounds[i % 2] = 1;
        same_bits(settings);
    }
    struct lossynet_settings groups = scenario_settings("outage:3", 0.3, LOSSYNET_MEAN);
    groups.wire_dtype = LOSSYNET_INT8;
    groups.group = SCENARIO_WORKERS / 2;
    same_bits(groups);
    groups.wire_dtype = LOSSYNET_BF16;
    same_bits(groups);
    groups.group = SCENARIO_WORKERS; /* nobody to send to */
    same_bits(groups);
}

/* In turns a worker has no gradient; a fifth of the packets is lost. */
static void write_record(FILE *file, const struct ln_partition *partition) {
    static const char *const phase[] = {"gradient", "parameter"};
    for (int step = 0; step < SCENARIO_STEPS; step++) {
        for (int w = 0; w < SCENARIO_WORKERS; w++) {
            for (int s = 0; s < 2 * SCENARIO_WORKERS; s++) {
                const int sender = s / 2, owner = s % 2 ? sender : w;
                if (sender == w) continue;
                fprintf(file, "# step %d, %s, worker %d to %d\n", step, phase[s % 2], sender, w);
                const size_t n = ln_partition_owner_packets(partition, owner);
                for (size_t k = 0; k < n; k++)
                    putc(random_bits((uint64_t)step, (uint64_t)(w * 100 + s), k) % 5 ? '0' : '1',
                         file);
                putc('\n', file);
            }
            fprintf(file, "# step %d, worker %d %s, norm 0x1p+0, lead 0x0p+0\n", step, w,
                    w == step % SCENARIO_WORKERS ? "idles" : "computes");
        }
    }
}

static void test_same_bits_replayed(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0, LOSSYNET_MEAN);
    settings.wire_dtype = LOSSYNET_BF16;
    struct lossynet_comm *plain = open_alone(&settings);
    char path[] = "/tmp/lossynet-record-XXXXXX", model[64];
    const int descriptor = mkstemp(path);
    assert_true(descriptor >= 0);
    FILE *file = fdopen(descriptor, "w");
    write_record(file, &plain->partition);
    fprintf(file, "# end\n");
    assert_int_equal(fclose(file), 0);
    lossynet_close(plain);
    snprintf(model, sizeof model, "replay:%s", path);
    settings.loss.model = model;
    same_bits(settings);
    unlink(path);
}

/* A replica of bfloat16 begins with what a broadcast that loses nothing would leave, and what an owner
 * has is read as it is, wherever it lies in memory. */
static void test_first_values(void **state) {
    (void)state;
    for (int wire = LOSSYNET_BF16; wire <= LOSSYNET_INT4; wire++) {
        struct lossynet_settings settings = bf16_settings(WORKERS, 0);
        settings.wire_dtype = (lossynet_wire_dtype)wire;
        struct lossynet_comm *comm = open_alone(&settings);
        float **x = take_vectors(WORKERS, ELEMENTS), **values = take_vectors(WORKERS, ELEMENTS);
        char *unaligned = malloc(ELEMENTS * sizeof(float) + 1);
        uint16_t *first = malloc(ELEMENTS * sizeof *first);
        assert_int_equal(shards_apart(comm, x, values), LOSSYNET_OK);
        for (size_t e = 0; e < ELEMENTS; e++) {
            const float value = (float)random_unit(4, 0, e);
            memcpy(unaligned + 1 + e * sizeof value, &value, sizeof value);
        }
        lossynet_narrow_parameters(comm, first, unaligned + 1, 0, ELEMENTS);
        for (int w = 0; w < WORKERS; w++) {
            float *value = values[w];
            size_t offset, count;
            for (int b = 0; b < BUCKETS; b++, value += count) {
                lossynet_shard(comm, w, b, &offset, &count);
                memcpy(value, unaligned + 1 + offset * sizeof *value, count * sizeof *value);
            }
        }
        lossynet_step_begin(comm, 0);
        assert_int_equal(lossynet_broadcast(comm, x, true), LOSSYNET_OK);
        for (int w = 0; w < WORKERS; w++)
            for (size_t e = 0; e < ELEMENTS; e++)
                if (owner_of(comm, e) != w) assert_int_equal(((uint16_t *)x[w])[e], first[e]);
        free(first);
        free(unaligned);
        free_vectors(values);
        free_vectors(x);
        lossynet_close(comm);
    }
}

/* ---- averages ---- */

/* A worker alone averages what it has. */
static void test_one_worker(void **state) {
    (void)state;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        struct lossynet_settings settings = bf16_settings(1, 0.3);
        settings.vector_dtype = bf16 ? LOSSYNET_BF16 : LOSSYNET_FLOAT32;
        struct lossynet_comm *comm = open_alone(&settings);
        float **x = take_vectors(1, ELEMENTS), **averages = take_vectors(1, ELEMENTS);
        float **values = take_vectors(1, ELEMENTS), *fresh = calloc(ELEMENTS, sizeof *fresh);
        assert_int_equal(lossynet_owned_elements(comm, 0), ELEMENTS);
        assert_int_equal(shards_apart(comm, averages, values), LOSSYNET_OK);
        for (size_t e = 0; e < ELEMENTS; e++) {
            values[0][e] = (float)random_unit(2, 0, e);
            if (bf16)
                ((uint16_t *)x[0])[e] = ln_bf16_narrow((float)random_unit(1, 0, e));
            else
                x[0][e] = (float)random_unit(1, 0, e);
        }
        lossynet_step_begin(comm, 0);
        assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
        assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
        assert_int_equal(lossynet_gather_fresh(comm, x, fresh), LOSSYNET_OK);
        for (size_t e = 0; e < ELEMENTS; e++) {
            const float own = bf16 ? ln_bf16_widen(((uint16_t *)x[0])[e]) : x[0][e];
            assert_true(averages[0][e] == own);
        }
        assert_memory_equal(fresh, values[0], ELEMENTS * sizeof *fresh);
        free(fresh);
        free_vectors(values);
        free_vectors(averages);
        free_vectors(x);
        lossynet_close(comm);
    }
}

static int sums;

static void count_sum(float *out, const uint16_t *const *sender, const float *weight, int senders,
                      size_t n, size_t packet) {
#pragma omp atomic
    sums++;
    ln_weighted_sum_bf16_plain(out, sender, weight, senders, n, packet);
}

/* The caller's weighted sum is called for each shard, and the default agrees with that of
 * float32. */
static void test_weighted_sum(void **state) {
    (void)state;
    struct lossynet_settings settings = bf16_settings(WORKERS, 0.3);
    settings.weighted_sum_bf16 = count_sum;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(WORKERS, ELEMENTS), **apart = take_vectors(WORKERS, ELEMENTS);
    assert_int_equal(shards_apart(comm, apart, apart), LOSSYNET_OK);
    sums = 0;
    lossynet_step_begin(comm, 0);
    assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
    assert_int_equal(sums, 2 * WORKERS + 1); /* the small bucket has one owner */
    lossynet_close(comm);

    const size_t packets[] = {1, 16, 1000, 4096};
    uint16_t bf16[WORKERS][ELEMENTS];
    const uint16_t *sender[WORKERS];
    static float weight[WORKERS * ELEMENTS], got[ELEMENTS], want[ELEMENTS];
    for (int w = 0; w < WORKERS; w++) {
        sender[w] = bf16[w];
        for (size_t e = 0; e < ELEMENTS; e++) {
            bf16[w][e] = ln_bf16_narrow((float)random_unit(1, (uint64_t)w, e));
            x[w][e] = ln_bf16_widen(bf16[w][e]);
        }
    }
    for (int i = 0; i < 4; i++) {
        for (size_t k = 0; k < WORKERS * ELEMENTS; k++)
            weight[k] = random_bits(2, (uint64_t)i, k) % 3 ? (float)random_unit(3, 1, k) : 0;
        ln_weighted_sum_bf16_plain(got, sender, weight, WORKERS, ELEMENTS, packets[i]);
        ln_weighted_sum_plain(want, (const float *const *)x, weight, WORKERS, ELEMENTS, packets[i]);
        assert_memory_equal(got, want, sizeof want);
    }
    free_vectors(apart);
    free_vectors(x);
}

/* ---- memory ---- */

/* An inbox of half the bytes; nothing else differs. */
static void test_memory(void **state) {
    (void)state;
    struct lossynet_settings settings = bf16_settings(WORKERS, 0.1), wide = settings;
    settings.drift_samples = wide.drift_samples = 100;
    wide.vector_dtype = LOSSYNET_FLOAT32;
    struct lossynet_comm *comm = open_alone(&settings);
    const size_t inbox = (WORKERS - 1) * lossynet_owned_elements(comm, 2); /* of its partners */
    assert_int_equal(lossynet_memory_bytes(comm), lossynet_memory_needed(&alone, &settings));
    assert_int_equal(lossynet_memory_bytes(comm), lossynet_memory_needed(&alone, &wide));
    lossynet_close(comm);
    const struct lossynet_world world = {.rank = 2, .ranks = WORKERS};
    assert_int_equal(lossynet_memory_needed(&world, &wide) -
                         lossynet_memory_needed(&world, &settings),
                     2 * inbox);
}

/* ---- refusals ---- */

static void refused(struct lossynet_settings settings, const char *why) {
    struct lossynet_comm *comm;
    capture_begin();
    const lossynet_status status = lossynet_open(&alone, &settings, &comm);
    assert_message(capture_end(), why);
    assert_int_equal(status, LOSSYNET_INVALID);
}

static void test_settings(void **state) {
    (void)state;
    const struct lossynet_memory memory = elsewhere_memory(NULL);
    struct lossynet_settings settings = bf16_settings(WORKERS, 0);
    settings.vector_dtype = LOSSYNET_INT8;
    refused(settings, "vector dtype 2: expected float32 or bf16");
    settings = bf16_settings(WORKERS, 0);
    settings.wire_dtype = LOSSYNET_FLOAT32;
    refused(settings,
            "vectors of bf16, wire dtype float32: expected wire dtype bf16, int8, int6 or int4");
    settings = bf16_settings(WORKERS, 0);
    settings.memory = &memory;
    refused(settings, "vectors of bf16: expected them in the host's memory");
    settings = bf16_settings(WORKERS, 0);
    settings.error_feedback = true;
    refused(settings, "carry: expected vectors of float32, got bf16");
}

/* Every function that is given vectors of bfloat16 needs to know where the rest is. */
static void test_phases_need_what_is_owned(void **state) {
    (void)state;
    const struct lossynet_memory memory = elsewhere_memory(NULL);
    const char *const why = "vectors of bf16: expected lossynet_shards before the first phase";
    struct lossynet_settings settings = bf16_settings(WORKERS, 0);
    settings.drift_samples = 10;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(WORKERS, ELEMENTS), fresh[1] = {0};
    struct lossynet_drift drift;
    for (int i = 0; i < 4; i++) {
        capture_begin();
        lossynet_step_begin(comm, 0);
        const lossynet_status status = i == 0   ? lossynet_reduce(comm, x, false)
                                       : i == 1 ? lossynet_broadcast(comm, x, false)
                                       : i == 2 ? lossynet_drift_measure(comm, x, &drift)
                                                : lossynet_gather_fresh(comm, x, fresh);
        assert_message(capture_end(), why);
        assert_int_equal(status, LOSSYNET_INVALID);
    }
    capture_begin();
    assert_int_equal(shards_apart(comm, x, NULL), LOSSYNET_INVALID);
    assert_message(capture_end(), "expected memory for both averages and values");
    lossynet_close(comm);
    settings.wire_dtype = settings.vector_dtype = LOSSYNET_FLOAT32;
    settings.memory = &memory;
    comm = open_alone(&settings);
    capture_begin();
    assert_int_equal(shards_apart(comm, x, x), LOSSYNET_INVALID);
    assert_message(capture_end(), "shards apart: expected vectors in the host's memory");
    lossynet_close(comm);
    free_vectors(x);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),    cmocka_unit_test(test_same_bits_replayed),
        cmocka_unit_test(test_first_values), cmocka_unit_test(test_one_worker),
        cmocka_unit_test(test_weighted_sum), cmocka_unit_test(test_memory),
        cmocka_unit_test(test_settings),     cmocka_unit_test(test_phases_need_what_is_owned),
    };
    return cmocka_run_group_tests_name("what owners hold apart", tests, NULL, NULL);
}
