/* test_elements.c — tests elements that are sent as bfloat16: rounding compared with a reference in
 * float64, the values that a phase leaves in each vector, and counters. test_same_bits.c,
 * test_lossynet_udp.c and test_lossynet_mpi.c test that bits are the same over links and ranks.
 */
#include "test/lossynet/elsewhere.h"

static const struct ln_rounding bf16 = {.dtype = LOSSYNET_BF16};
static const struct ln_rounding float32 = {.dtype = LOSSYNET_FLOAT32};

static float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float rounded(float x) {
    ln_elements_copy(&bf16, &x, &x, 1);
    return x;
}

/* Between two numbers of 8 bits the nearer, in the middle the even one. */
static float reference(float x) {
    int exponent;
    if (x == 0 || isinf(x)) return x;
    frexp((double)x, &exponent);
    const int last = exponent - 8 < -133 ? -133 : exponent - 8; /* below it: subnormal */
    return (float)ldexp(nearbyint(ldexp((double)x, -last)), last);
}

static void check_bits(uint32_t bits) {
    const float x = from_bits(bits), got = rounded(x);
    uint8_t packed[2];
    float unpacked;
    ln_elements_pack(&bf16, packed, &x, 1);
    ln_elements_unpack(LOSSYNET_BF16, &unpacked, packed, 1);
    assert_int_equal(bits_of(unpacked), bits_of(got));
    assert_int_equal(bits_of(got) & 0xffff, 0);
    if (isnan(x)) {
        assert_true(isnan(got) && bits_of(got) >> 31 == bits >> 31);
    } else if (bits_of(got) != bits_of(reference(x))) {
        fail_msg("%a becomes %a, expected %a", x, got, reference(x));
    }
    const bool finite = ln_elements_are_finite(LOSSYNET_BF16, packed, 1);
    assert_int_equal(finite, fabsf(got) < 0x1p64f);
    assert_int_equal(bits_of(rounded(got)), bits_of(got)); /* twice is as once */
}

static void test_every_upper_half(void **state) {
    (void)state;
    const uint32_t lower[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    for (uint32_t upper = 0; upper < 1 << 16; upper++)
        for (int i = 0; i < 6; i++) check_bits(upper << 16 | lower[i]);
}

/* In units of what the last bit stands for the error is uniform: its mean is 0, its mean square
 * 1/12, for positive and for negative numbers. (Cutting off would have -1/2 and 1/2.) */
static void test_rounding_is_unbiased(void **state) {
    (void)state;
    enum { N = 1 << 20 };
    for (int sign = -1; sign <= 1; sign += 2) {
        double sum = 0, squares = 0;
        for (uint64_t i = 0; i < N; i++) {
            int exponent;
            float x = (float)(sign * (1e-3 + fabs(random_unit(3, (uint64_t)(sign + 1), i))));
            frexp((double)x, &exponent);
            double error = ldexp((double)rounded(x) - (double)x, 8 - exponent);
            assert_true(fabs(error) <= 0.5);
            sum += error;
            squares += error * error;
        }
        assert_close(sum / N, 0, 5 * sqrt(1.0 / 12 / N));
        assert_close(squares / N, 1.0 / 12, 0.001);
    }
}

/* As they are: also unaligned, and any bits. */
static void test_float32_is_copied(void **state) {
    (void)state;
    const float x[4] = {1, from_bits(0x7fffffff), from_bits(0x00012345), -INFINITY};
    uint8_t payload[sizeof x + 1];
    float out[4];
    memcpy(payload + 1, x, sizeof x);
    ln_elements_unpack(LOSSYNET_FLOAT32, out, payload + 1, 4);
    assert_memory_equal(out, x, sizeof x);
    assert_true(ln_elements_are_finite(LOSSYNET_FLOAT32, payload + 1, 1));
    assert_false(ln_elements_are_finite(LOSSYNET_FLOAT32, payload + 1, 2));
    assert_true(ln_elements_are_finite(LOSSYNET_FLOAT32, payload + 9, 1));
    assert_false(ln_elements_are_finite(LOSSYNET_FLOAT32, payload + 9, 2));
    memset(out, 0, sizeof out);
    ln_elements_copy(&float32, out, x, 4);
    assert_memory_equal(out, x, sizeof x);
}

/* ---- what a phase leaves ---- */

enum { WORKERS = 5, BUCKETS = 3, ELEMENTS = 1000 + 7 + 333 };
static const size_t elements[BUCKETS] = {1000, 7, 333};

static struct lossynet_comm *open_bf16(double p) {
    struct lossynet_settings settings = simple_settings(WORKERS, elements, BUCKETS, p);
    settings.wire_dtype = LOSSYNET_BF16;
    settings.drift_samples = ELEMENTS;
    return open_alone(&settings);
}

static void fill(float **x, uint64_t seed) {
    for (int w = 0; w < WORKERS; w++)
        for (size_t e = 0; e < ELEMENTS; e++) x[w][e] = (float)random_unit(seed, (uint64_t)w, e);
}

static void test_packets_hold_twice_as_much(void **state) {
    (void)state;
    struct lossynet_comm *comm = open_bf16(0);
    size_t packets = 0;
    for (int b = 0; b < BUCKETS; b++) {
        for (int w = 0; w < WORKERS; w++) {
            size_t offset, count;
            lossynet_shard(comm, w, b, &offset, &count);
            packets += (count + 31) / 32;
        }
    }
    assert_int_equal(lossynet_packet_bytes(comm), 64);
    assert_int_equal(lossynet_packets(comm), packets);
    lossynet_close(comm);
}

/* A GPU averages packets of 8 elements at a time, so every link's packets have a multiple of 8. */
static void test_packets_are_whole_vectors(void **state) {
    (void)state;
    static const size_t frame[] = {256, 512, 576, 1024, 1280, 1400, 1500, 2048, 4096, 9000};
    static const size_t headers[] = {WIRE_HEADER_BYTES, WIRE_HEADER_BYTES + 28,
                                     WIRE_HEADER_BYTES + 48}; /* RDMA; UDP over IPv4, IPv6 */
    static const lossynet_wire_dtype dtype[] = {LOSSYNET_FLOAT32, LOSSYNET_BF16, LOSSYNET_INT8,
                                                LOSSYNET_INT6, LOSSYNET_INT4};
    for (size_t f = 0; f < sizeof frame / sizeof *frame; f++) {
        for (int i = 0; i < 2 * 3 * 5; i++) {
            const size_t trailer = i % 2 ? LOSSYNET_SECURE_BYTES : 0;
            const size_t room = (frame[f] - headers[i / 2 % 3] - trailer) / 4 * 4;
            const size_t bytes = ln_payload_default(dtype[i / 6], room);
            const size_t elements = ln_payload_elements(dtype[i / 6], bytes);
            assert_true(bytes + 31 >= room && bytes <= room);
            assert_true(elements > 0 && elements % 8 == 0);
        }
    }
}

/* Others get the owner's value rounded, or keep what they have; the owner keeps its own, and so
 * does the model. */
static void test_broadcast(void **state) {
    (void)state;
    struct lossynet_comm *comm = open_bf16(0.3);
    float **x = take_vectors(WORKERS, ELEMENTS), **before = take_vectors(WORKERS, ELEMENTS);
    float *fresh = calloc(ELEMENTS, sizeof *fresh);
    fill(x, 1);
    for (int w = 0; w < WORKERS; w++) memcpy(before[w], x[w], ELEMENTS * sizeof **x);
    assert_int_equal(lossynet_step_begin(comm, 0), LOSSYNET_OK);
    assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
    assert_int_equal(lossynet_gather_fresh(comm, x, fresh), LOSSYNET_OK);
    size_t stale = 0;
    for (int w = 0; w < WORKERS; w++) {
        size_t cursor = 0, offset = 0, count = 0;
        for (size_t e = 0; e < ELEMENTS; e++) {
            const int owner = owner_of(comm, e);
            while (e >= offset + count && lossynet_next_fresh(comm, w, &cursor, &offset, &count)) {
            }
            const bool is_fresh = e >= offset && e < offset + count;
            const float sent = owner == w ? before[w][e] : rounded(before[owner][e]);
            assert_true(x[w][e] == (is_fresh ? sent : before[w][e]));
            assert_true(fresh[e] == before[owner][e]);
            stale += !is_fresh;
        }
    }
    assert_true(stale > ELEMENTS / 2 && stale < 2 * ELEMENTS);
    free(fresh);
    free_vectors(before);
    free_vectors(x);
    lossynet_close(comm);
}

/* Each estimator averages the others' gradients rounded and the owner's own as it is. */
static void check_reduce(lossynet_estimator estimator) {
    struct lossynet_settings settings = simple_settings(WORKERS, elements, BUCKETS, 0);
    settings.wire_dtype = LOSSYNET_BF16;
    settings.estimator = estimator;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(WORKERS, ELEMENTS), **before = take_vectors(WORKERS, ELEMENTS);
    fill(x, 2);
    for (int w = 0; w < WORKERS; w++) memcpy(before[w], x[w], ELEMENTS * sizeof **x);
    for (int again = 0; again < 2; again++) { /* once more in the step: rounding changes nothing */
        for (size_t e = 0; e < ELEMENTS; e++)
            x[owner_of(comm, e)][e] = before[owner_of(comm, e)][e];
        assert_int_equal(lossynet_step_begin(comm, 0), LOSSYNET_OK);
        assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
        for (size_t e = 0; e < ELEMENTS; e++) {
            const int owner = owner_of(comm, e);
            double sum = before[owner][e];
            for (int w = 0; w < WORKERS; w++)
                if (w != owner) sum += (double)rounded(before[w][e]);
            assert_close(x[owner][e], sum / WORKERS, 1e-6);
        }
    }
    free_vectors(before);
    free_vectors(x);
    lossynet_close(comm);
}

static void test_reduce(void **state) {
    (void)state;
    check_reduce(LOSSYNET_MEAN);
    check_reduce(LOSSYNET_BALANCED);
    check_reduce(LOSSYNET_ZERO);
}

static void test_bytes_are_half(void **state) {
    (void)state;
    struct lossynet_settings settings = simple_settings(WORKERS, elements, BUCKETS, 0.2);
    settings.retransmission_rounds[0] = settings.retransmission_rounds[1] = 1;
    for (int half = 0; half < 2; half++) {
        struct lossynet_counters c;
        settings.wire_dtype = half ? LOSSYNET_BF16 : LOSSYNET_FLOAT32;
        settings.loss.rate[0] = settings.loss.rate[1] = 1 - 1e-12; /* all is sent twice */
        struct lossynet_comm *comm = open_alone(&settings);
        float **x = take_vectors(WORKERS, ELEMENTS);
        lossynet_step_begin(comm, 0);
        lossynet_reduce(comm, x, false);
        lossynet_broadcast(comm, x, false);
        assert_int_equal(lossynet_step_counters(comm, 0, &c), LOSSYNET_OK);
        for (int phase = 0; phase < 2; phase++) {
            assert_int_equal(c.bytes[phase], 2 * (WORKERS - 1) * ELEMENTS * (half ? 2 : 4));
            assert_int_equal(c.expected[phase], (WORKERS - 1) * lossynet_packets(comm));
        }
        free_vectors(x);
        lossynet_close(comm);
    }
}

/* From the start on, and as long as nothing is lost, replicas are not apart: what others have is
 * what the owner's values are rounded. */
static void test_no_drift_without_loss(void **state) {
    (void)state;
    struct lossynet_comm *comm = open_bf16(0);
    float **x = take_vectors(WORKERS, ELEMENTS);
    struct lossynet_drift drift;
    for (uint64_t step = 0; step < 4; step++) {
        if (step == 0) {
            for (int w = 0; w < WORKERS; w++)
                for (size_t e = 0; e < ELEMENTS; e++) x[w][e] = (float)random_unit(4, 0, e);
            lossynet_round_as_sent(comm, x);
            for (int w = 0; w < WORKERS; w++) {
                for (size_t e = 0; e < ELEMENTS; e++) {
                    const float first = (float)random_unit(4, 0, e);
                    assert_true(x[w][e] == (owner_of(comm, e) == w ? first : rounded(first)));
                }
            }
        } else {
            for (size_t e = 0; e < ELEMENTS; e++)
                x[owner_of(comm, e)][e] += (float)(1e-3 * random_unit(5, step, e));
            lossynet_step_begin(comm, step);
            assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
        }
        assert_int_equal(lossynet_drift_measure(comm, x, &drift), LOSSYNET_OK);
        assert_true(drift.pair == 0 && drift.owner == 0);
        assert_true(step == 0 || drift.sigma2 > 0);
    }
    free_vectors(x);
    lossynet_close(comm);
}

/* ---- vectors that the host cannot touch ---- */

/* Each phase is one call, however many workers there are and however often packets are sent again. */
static void test_other_memory(void **state) {
    (void)state;
    for (int dtype = LOSSYNET_FLOAT32; dtype <= LOSSYNET_INT4; dtype++) {
        struct elsewhere e = {0};
        const struct lossynet_memory memory = elsewhere_memory(&e);
        struct lossynet_settings settings = scenario_settings("bernoulli", 0.3, LOSSYNET_MEAN);
        settings.wire_dtype = (lossynet_wire_dtype)dtype;
        settings.retransmission_rounds[LOSSYNET_GRADIENT] = 1;
        settings.retransmission_rounds[LOSSYNET_PARAMETER] = 2;
        settings.group = dtype % 2 ? 2 : 0;
        uint64_t digest[2];
        for (int i = 0; i < 2; i++) {
            settings.memory = i ? &memory : NULL;
            struct lossynet_comm *comm = open_alone(&settings);
            if (i) elsewhere_open(&e, comm, SCENARIO_WORKERS);
            digest[i] = scenario_run(comm, 0, SCENARIO_WORKERS);
            lossynet_close(comm);
        }
        assert_true(digest[0] == digest[1] && digest[0]);
        const int reduced = e.calls[1]; /* some steps reduce a second vector, or it again */
        assert_true(reduced <= 3 * SCENARIO_STEPS && e.calls[0] <= reduced + 1);
        assert_int_equal(e.calls[2], SCENARIO_STEPS);
        free(e.packet);
    }
}

static void test_refusals(void **state) {
    (void)state;
    struct lossynet_memory memory = elsewhere_memory(NULL);
    struct lossynet_settings settings = simple_settings(WORKERS, elements, BUCKETS, 0);
    struct lossynet_comm *comm;
    settings.memory = &memory;
    comm = open_alone(&settings);
    lossynet_close(comm);
    memory.average = NULL;
    capture_begin();
    assert_int_equal(lossynet_open(&alone, &settings, &comm), LOSSYNET_INVALID);
    assert_message(capture_end(), "expected all functions of lossynet_memory");
    settings.memory = NULL;
    settings.wire_dtype = (lossynet_wire_dtype)9;
    capture_begin();
    assert_int_equal(lossynet_open(&alone, &settings, &comm), LOSSYNET_INVALID);
    assert_message(capture_end(), "wire dtype 9: expected float32, bf16, int8, int6 or int4");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_upper_half),
        cmocka_unit_test(test_rounding_is_unbiased),
        cmocka_unit_test(test_float32_is_copied),
        cmocka_unit_test(test_packets_hold_twice_as_much),
        cmocka_unit_test(test_packets_are_whole_vectors),
        cmocka_unit_test(test_broadcast),
        cmocka_unit_test(test_reduce),
        cmocka_unit_test(test_bytes_are_half),
        cmocka_unit_test(test_no_drift_without_loss),
        cmocka_unit_test(test_other_memory),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests_name("elements on their way", tests, NULL, NULL);
}
