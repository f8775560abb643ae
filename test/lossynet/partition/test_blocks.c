/* test_blocks.c — tests elements that are sent in blocks, rounded with a scale per block: bounds
 * of the error, rounding that is right on average, the values that a phase leaves in each vector,
 * counters, and error feedback of the rounding errors. test_same_bits.c, test_lossynet_udp.c and
 * test_lossynet_mpi.c test that bits are the same over links and ranks.
 */
#include "test/lossynet/elsewhere.h"

enum { BLOCK = LOSSYNET_BLOCK };

struct format {
    lossynet_wire_dtype dtype;
    int most; /* largest integer */
};
static const struct format formats[] = {
    {LOSSYNET_INT8, 127}, {LOSSYNET_INT6, 31}, {LOSSYNET_INT4, 7}};
enum { FORMATS = sizeof formats / sizeof *formats };

static int bits_of(const struct format *f) {
    return ln_block_bits(f->dtype);
}

static struct ln_rounding rounding(lossynet_wire_dtype dtype, bool random, uint64_t key) {
    return (struct ln_rounding){.dtype = dtype, .random = random, .key = key};
}

/* The smallest power of 2 of which `most` are not less than the largest element. */
static double unit_of(const float *x, size_t n, int most) {
    double largest = 0;
    for (size_t i = 0; i < n; i++) largest = fmax(largest, fabs((double)x[i]));
    const double least = most == 127 ? 0x1p-126 : most == 31 ? 0x1p-124 : 0x1p-122;
    double unit = largest > 0 ? ldexp(1, (int)floor(log2(largest / most)) - 1) : 0;
    while (unit * most < largest) unit *= 2;
    return fmax(unit, least);
}

/* Normal numbers of very different sizes from block to block. */
static void fill_blocks(float *x, size_t n, uint64_t seed) {
    for (size_t i = 0; i < n; i++) {
        const int exponent = (int)(random_bits(seed, 1, i / BLOCK) % 200) - 100;
        x[i] = (float)ldexp(random_unit(seed, 2, i) * random_unit(seed, 3, i), exponent);
    }
}

/* n elements: rounding in place, packing and unpacking, twice. */
static void check(const struct format *f, const float *x, size_t n, bool random, uint64_t key) {
    enum { MOST = 512 };
    float once[MOST], twice[MOST], other[MOST], packed_twice[MOST];
    uint8_t payload[MOST * 2 + 1];
    const size_t bytes = ln_payload_bytes(f->dtype, n);
    const struct ln_rounding r = rounding(f->dtype, random, key);
    const struct ln_rounding again = rounding(f->dtype, !random, key + 7);
    assert_true(n <= MOST && bytes < sizeof payload);
    ln_elements_copy(&r, once, x, n);
    for (size_t i = 0; i < n; i++) {
        const size_t block = i / BLOCK * BLOCK, count = n - block < BLOCK ? n - block : BLOCK;
        const double unit = unit_of(x + block, count, f->most);
        const double q = (double)once[i] / unit,
                     error = fabs((double)once[i] - (double)x[i]) / unit;
        assert_true(q == rint(q) && fabs(q) <= f->most);
        if (random ? error >= 1 : error > 0.5) fail_msg("%a becomes %a", x[i], once[i]);
    }
    ln_elements_copy(&again, twice, once, n); /* rounding what is rounded changes nothing */
    assert_memory_equal(twice, once, n * sizeof *once);
    payload[bytes + 1] = 0xa5;
    ln_elements_pack(&r, payload + 1, x, n);
    assert_int_equal(payload[bytes + 1], 0xa5);
    ln_elements_unpack(f->dtype, other, payload + 1, n);
    assert_memory_equal(other, once, n * sizeof *once);
    ln_elements_pack(&again, payload, once, n);
    ln_elements_unpack(f->dtype, packed_twice, payload, n);
    assert_memory_equal(packed_twice, once, n * sizeof *once);
}

static void test_rounding(void **state) {
    (void)state;
    float x[512];
    for (int f = 0; f < FORMATS; f++) {
        for (uint64_t i = 0; i < 3000; i++) {
            const size_t n = 1 + i % 300;
            fill_blocks(x, n, i);
            check(&formats[f], x, n, i % 2, i);
        }
    }
}

/* Sizes at which the scale changes, nothing at all, and the smallest and largest numbers. */
static void test_edges(void **state) {
    (void)state;
    for (int f = 0; f < FORMATS; f++) {
        const float most = (float)formats[f].most;
        const float edges[] = {0,
                               0x1p-149f,
                               0x1p-126f,
                               0x1p-120f,
                               1,
                               0x1p100f,
                               nextafterf(1, 2),
                               most,
                               nextafterf(most, 200),
                               nextafterf(most + 1, 0),
                               most + 1,
                               most / 2,
                               nextafterf(most / 2, 200)};
        for (size_t i = 0; i < sizeof edges / sizeof *edges; i++) {
            for (int random = 0; random < 2; random++) {
                float x[40] = {0};
                x[3] = edges[i], x[4] = -edges[i], x[5] = edges[i] / 3, x[37] = 1;
                check(&formats[f], x, 40, random, i);
            }
        }
    }
}

/* A block with something in it that is not finite is NaN, and no other is. */
static void test_not_finite(void **state) {
    (void)state;
    const float wrong[] = {NAN, INFINITY, -INFINITY};
    for (int f = 0; f < FORMATS; f++) {
        for (int i = 0; i < 3; i++) {
            float x[96], y[96];
            uint8_t payload[200];
            const struct ln_rounding r = rounding(formats[f].dtype, i % 2, 1);
            for (int e = 0; e < 96; e++) x[e] = e == 40 ? wrong[i] : 1;
            ln_elements_pack(&r, payload, x, 96);
            ln_elements_unpack(r.dtype, y, payload, 96);
            for (int e = 0; e < 96; e++) assert_true(isnan(y[e]) == (e / BLOCK == 1));
            assert_false(ln_elements_are_finite(r.dtype, payload, 96));
            assert_true(ln_elements_are_finite(r.dtype, payload, 32));
        }
        for (int exponent = -126; exponent < 128; exponent++) { /* as for float32: up to 2^64 */
            const float x = ldexpf(1.25f, exponent);
            const struct ln_rounding r = rounding(formats[f].dtype, false, 1);
            uint8_t payload[8];
            ln_elements_pack(&r, payload, &x, 1);
            assert_int_equal(ln_elements_are_finite(r.dtype, payload, 1), exponent < 63);
        }
    }
}

/* In units the error at random has mean 0 at every fraction, so mean square f (1 - f), and nothing
 * in common with that of another worker, step or place. */
static void test_random_rounding_is_unbiased(void **state) {
    (void)state;
    enum { N = 200000 };
    for (int f = 0; f < FORMATS; f++) {
        float x[BLOCK], y[BLOCK];
        double sum[BLOCK] = {0}, squares = 0, common = 0, before = 0;
        for (int e = 0; e < BLOCK; e++) x[e] = (float)(e - 16) / BLOCK;
        x[0] = (float)formats[f].most;
        for (uint64_t i = 0; i < N / BLOCK; i++) {
            struct ln_rounding r = rounding(formats[f].dtype, true, random_bits(9, i / 2, 0));
            r.offset = i % 2 * BLOCK;
            ln_elements_copy(&r, y, x, BLOCK);
            assert_true(y[0] == x[0]);
            for (int e = 1; e < BLOCK; e++) {
                const double error = (double)y[e] - (double)x[e];
                sum[e] += error;
                squares += error * error;
                common += error * before;
                before = error;
            }
        }
        double expected = 0;
        for (int e = 1; e < BLOCK; e++) {
            const double fraction = (double)x[e] - floor((double)x[e]);
            const double variance = fraction * (1 - fraction) * (N / BLOCK);
            assert_close(sum[e], 0, 5 * sqrt(variance) + 1e-3);
            expected += variance;
        }
        assert_close(squares / expected, 1, 0.03);
        assert_close(common / expected, 0, 0.03);
    }
}

/* ---- what a phase leaves ---- */

enum { WORKERS = 5, BUCKETS = 3, ELEMENTS = 1000 + 7 + 333, PACKET = 136 };
static const size_t elements[BUCKETS] = {1000, 7, 333};

static struct lossynet_settings blocks_settings(lossynet_wire_dtype dtype, double p) {
    struct lossynet_settings settings = simple_settings(WORKERS, elements, BUCKETS, p);
    settings.packet_bytes = PACKET;
    settings.wire_dtype = dtype;
    settings.drift_samples = ELEMENTS;
    return settings;
}

/* Every shard of x as packets hold it, each unpacked alone: `sender` -1 for the owner. */
static void travel(const struct lossynet_comm *comm, lossynet_phase phase, int sender,
                   const float *x, float *out) {
    const struct ln_partition *p = &comm->partition;
    uint8_t payload[PACKET];
    for (int b = 0; b < BUCKETS; b++) {
        for (int owner = 0; owner < WORKERS; owner++) {
            for (size_t k = 0; k < ln_shard_packets(p, b, owner); k++) {
                size_t offset, count;
                ln_packet_span(p, b, owner, k, &offset, &count);
                const struct ln_rounding r =
                    ln_rounding_of(comm, phase, sender < 0 ? owner : sender, offset);
                assert_true(ln_payload_bytes(r.dtype, count) <= PACKET);
                ln_elements_pack(&r, payload, x + offset, count);
                ln_elements_unpack(r.dtype, out + offset, payload, count);
            }
        }
    }
}

static void fill(float **x, uint64_t seed) {
    for (int w = 0; w < WORKERS; w++)
        for (size_t e = 0; e < ELEMENTS; e++) x[w][e] = (float)random_unit(seed, (uint64_t)w, e);
}

static void copy_all(float **to, float **from) {
    for (int w = 0; w < WORKERS; w++) memcpy(to[w], from[w], ELEMENTS * sizeof **to);
}

/* Others get the owner's value as its packet holds it, or keep what they have; the owner keeps its
 * own, and so does the model. The next packet that arrives heals all: nothing is left of what was
 * there before. */
static void test_broadcast(void **state) {
    (void)state;
    for (int f = 0; f < FORMATS; f++) {
        struct lossynet_settings settings = blocks_settings(formats[f].dtype, 0.3);
        struct lossynet_comm *comm = open_alone(&settings);
        float **x = take_vectors(WORKERS, ELEMENTS), **before = take_vectors(WORKERS, ELEMENTS);
        float *model = calloc(ELEMENTS, sizeof *model), *sent = calloc(ELEMENTS, sizeof *sent),
              *fresh = calloc(ELEMENTS, sizeof *fresh);
        fill(x, 1);
        copy_all(before, x);
        for (size_t e = 0; e < ELEMENTS; e++) model[e] = x[owner_of(comm, e)][e];
        lossynet_step_begin(comm, 3);
        travel(comm, LOSSYNET_PARAMETER, -1, model, sent);
        assert_int_equal(lossynet_broadcast(comm, x, false), LOSSYNET_OK);
        assert_int_equal(lossynet_gather_fresh(comm, x, fresh), LOSSYNET_OK);
        assert_memory_equal(fresh, model, ELEMENTS * sizeof *model);
        size_t stale = 0;
        for (int w = 0; w < WORKERS; w++) {
            size_t cursor = 0, offset = 0, count = 0;
            for (size_t e = 0; e < ELEMENTS; e++) {
                while (e >= offset + count &&
                       lossynet_next_fresh(comm, w, &cursor, &offset, &count)) {
                }
                const bool is_fresh = e >= offset && e < offset + count;
                const float got = owner_of(comm, e) == w ? model[e] : sent[e];
                assert_true(x[w][e] == (is_fresh ? got : before[w][e]));
                stale += !is_fresh;
            }
        }
        assert_true(stale > ELEMENTS / 2 && stale < 2 * ELEMENTS);
        free(fresh), free(sent), free(model);
        free_vectors(before);
        free_vectors(x);
        lossynet_close(comm);
    }
}

/* Each estimator averages the others' gradients as packets hold them, each worker's rounded with
 * its own random numbers, and the owner's own as it is; another step has others. */
static void check_reduce(lossynet_wire_dtype dtype, lossynet_estimator estimator) {
    struct lossynet_settings settings = blocks_settings(dtype, 0);
    settings.estimator = estimator;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(WORKERS, ELEMENTS), **sent = take_vectors(WORKERS, ELEMENTS);
    float *first = calloc(ELEMENTS, sizeof *first);
    for (uint64_t step = 0; step < 2; step++) {
        fill(x, 2);
        lossynet_step_begin(comm, step);
        for (int w = 0; w < WORKERS; w++) {
            travel(comm, LOSSYNET_GRADIENT, w, x[w], sent[w]);
            for (size_t e = 0; e < ELEMENTS; e++)
                if (owner_of(comm, e) == w) sent[w][e] = x[w][e];
        }
        size_t same = 0;
        for (size_t e = 0; e < ELEMENTS; e++) same += sent[1][e] == first[e];
        if (step) assert_true(same < ELEMENTS * 3 / 4);
        memcpy(first, sent[1], ELEMENTS * sizeof *first);
        assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
        for (size_t e = 0; e < ELEMENTS; e++) {
            double sum = 0;
            for (int w = 0; w < WORKERS; w++) sum += (double)sent[w][e];
            assert_close(x[owner_of(comm, e)][e], sum / WORKERS, 1e-6);
        }
    }
    free(first);
    free_vectors(sent);
    free_vectors(x);
    lossynet_close(comm);
}

static void test_reduce(void **state) {
    (void)state;
    for (int f = 0; f < FORMATS; f++) {
        check_reduce(formats[f].dtype, LOSSYNET_MEAN);
        check_reduce(formats[f].dtype, LOSSYNET_BALANCED);
        check_reduce(formats[f].dtype, LOSSYNET_ZERO);
    }
}

/* Payload bytes are counted as they are, scales included, what is sent again too. */
static void test_bytes(void **state) {
    (void)state;
    for (int f = 0; f < FORMATS; f++) {
        /* All is lost, but links are not down: nobody would send again over those. */
        struct lossynet_settings settings = blocks_settings(formats[f].dtype, 1 - 1e-12);
        settings.retransmission_rounds[0] = settings.retransmission_rounds[1] = 1;
        struct lossynet_counters c;
        struct lossynet_comm *comm = open_alone(&settings);
        const struct ln_partition *p = &comm->partition;
        size_t bytes[2] = {0};
        for (int b = 0; b < BUCKETS; b++) {
            for (int w = 0; w < WORKERS; w++) {
                for (size_t k = 0; k < ln_shard_packets(p, b, w); k++) {
                    size_t offset, count;
                    ln_packet_span(p, b, w, k, &offset, &count);
                    bytes[LOSSYNET_GRADIENT] += ln_payload_bytes(formats[f].dtype, count);
                    bytes[LOSSYNET_PARAMETER] += ln_payload_bytes(LOSSYNET_INT8, count);
                }
            }
        }
        assert_true(bytes[LOSSYNET_PARAMETER] < ELEMENTS * 1.06);
        assert_true(bytes[LOSSYNET_GRADIENT] < ELEMENTS * (0.06 + bits_of(&formats[f]) / 8.0));
        float **x = take_vectors(WORKERS, ELEMENTS);
        lossynet_step_begin(comm, 0);
        lossynet_reduce(comm, x, false);
        lossynet_broadcast(comm, x, false);
        assert_int_equal(lossynet_step_counters(comm, 0, &c), LOSSYNET_OK);
        for (int phase = 0; phase < 2; phase++)
            assert_int_equal(c.bytes[phase], 2 * (WORKERS - 1) * bytes[phase]);
        free_vectors(x);
        lossynet_close(comm);
    }
    assert_int_equal(ln_payload_bytes(LOSSYNET_INT8, 32), 33);
    assert_int_equal(ln_payload_bytes(LOSSYNET_INT8, 33), 35);
    assert_int_equal(ln_payload_elements(LOSSYNET_INT8, 1472), 44 * 32);
    assert_int_equal(ln_payload_bytes(LOSSYNET_INT6, 32), 25);
    assert_int_equal(ln_payload_bytes(LOSSYNET_INT6, 33), 27);
    assert_int_equal(ln_payload_bytes(LOSSYNET_INT6, 37), 30);
    assert_int_equal(ln_payload_bytes(LOSSYNET_INT4, 32), 17);
    assert_int_equal(ln_payload_bytes(LOSSYNET_INT4, 33), 19);
}

/* From the start on, and as long as nothing is lost, replicas are not apart: what others have is
 * what the owner's values are rounded. */
static void test_no_drift_without_loss(void **state) {
    (void)state;
    for (int f = 0; f < FORMATS; f++) {
        struct lossynet_settings settings = blocks_settings(formats[f].dtype, 0);
        struct lossynet_comm *comm = open_alone(&settings);
        float **x = take_vectors(WORKERS, ELEMENTS);
        struct lossynet_drift drift;
        for (int w = 0; w < WORKERS; w++)
            for (size_t e = 0; e < ELEMENTS; e++) x[w][e] = (float)random_unit(4, 0, e);
        lossynet_round_as_sent(comm, x);
        for (uint64_t step = 0; step < 4; step++) {
            if (step > 0) {
                for (size_t e = 0; e < ELEMENTS; e++)
                    x[owner_of(comm, e)][e] += (float)(0.1 * random_unit(5, step, e));
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
}

/* ---- error feedback ---- */

enum { STEPS = 60 };

/* Over many steps owners get all of the gradients, up to what is in the residuals at the end: what
 * rounding takes away comes with the next packet. Nothing is lost here, so that is less than a unit
 * for each of the others. Without error feedback errors add up. */
static void test_what_rounding_takes_comes_later(void **state) {
    (void)state;
    for (int f = 0; f < FORMATS; f++) {
        double worst[2];
        for (int carry = 0; carry < 2; carry++) {
            struct lossynet_settings settings = blocks_settings(formats[f].dtype, 0);
            settings.estimator = LOSSYNET_ZERO;
            settings.error_feedback = carry;
            struct lossynet_comm *comm = open_alone(&settings);
            float **x = take_vectors(WORKERS, ELEMENTS);
            double *missing = calloc(ELEMENTS, sizeof *missing);
            for (uint64_t step = 0; step < STEPS; step++) {
                for (int w = 0; w < WORKERS; w++) {
                    for (size_t e = 0; e < ELEMENTS; e++) {
                        x[w][e] = (float)random_unit(6 + step, (uint64_t)w, e);
                        missing[e] += (double)x[w][e];
                    }
                }
                lossynet_step_begin(comm, step);
                assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
                for (size_t e = 0; e < ELEMENTS; e++)
                    missing[e] -= WORKERS * (double)x[owner_of(comm, e)][e];
            }
            worst[carry] = 0;
            for (size_t e = 0; e < ELEMENTS; e++)
                worst[carry] = fmax(worst[carry], fabs(missing[e]));
            free(missing);
            free_vectors(x);
            lossynet_close(comm);
        }
        const double unit = unit_of((float[]){4}, 1, formats[f].most); /* of elements below 4 */
        const double steps =
            1 + STEPS * 0x1p-9; /* each rounds the residual, which is below a unit */
        assert_true(worst[1] < (WORKERS - 1) * unit * steps + 1e-4);
        assert_true(worst[0] > 2 * worst[1]);
    }
}

struct taken {
    size_t lost, early; /* elements that were lost; whose residual would be another, see below */
};

/* Checks worker w's residual after a step, to the last bit. u: what was to be sent; q: what its packets
 * held. Where a packet arrived it is u - q, rounded to bfloat16; u rounded to bfloat16 less q would
 * be something else. Where it was lost, q is added to that, and the sum rounded up or down. Adds to missing[e]
 * what this rounding took away. */
static void check_residual(const struct lossynet_comm *comm, uint64_t step, int w, const float *u,
                           const float *q, double *missing, struct taken *taken) {
    const struct ln_partition *p = &comm->partition;
    const uint16_t *residual = comm->feedback.residual + (size_t)w * ELEMENTS;
    for (int owner = 0; owner < WORKERS; owner++) {
        uint8_t mask[ELEMENTS], *arrived = mask;
        ln_loss_mask(&comm->loss, LOSSYNET_GRADIENT, step, w, owner,
                     ln_partition_owner_packets(p, owner), NULL, mask);
        for (int b = 0; owner != w && b < BUCKETS; b++) {
            for (size_t k = 0; k < ln_shard_packets(p, b, owner); k++, arrived++) {
                size_t offset, count;
                ln_packet_span(p, b, owner, k, &offset, &count);
                for (size_t e = offset; e < offset + count; e++) {
                    const float error = as_bf16(u[e] - q[e]), kept = ln_bf16_widen(residual[e]);
                    const float sum = error + q[e];
                    if (*arrived ? kept != error : !(fabsf(kept - sum) <= 0x1p-7f * fabsf(sum)))
                        fail_msg("residual of %a, sent as %a: %a, expected %a", u[e], q[e], kept,
                                 *arrived ? error : sum);
                    missing[e] +=
                        (double)kept - (*arrived ? (double)u[e] - (double)q[e] : (double)u[e]);
                    taken->lost += !*arrived;
                    taken->early += *arrived && as_bf16(as_bf16(u[e]) - q[e]) != error;
                }
            }
        }
    }
}

/* Where packets are lost as well, all that is missing at the end is in the residuals, but for what
 * their rounding to bfloat16 took away. */
static void test_residuals_hold_what_is_missing(void **state) {
    (void)state;
    for (int f = 0; f < FORMATS; f++) {
        struct lossynet_settings settings = blocks_settings(formats[f].dtype, 0.4);
        settings.estimator = LOSSYNET_ZERO;
        settings.error_feedback = true;
        struct lossynet_comm *comm = open_alone(&settings);
        float **x = take_vectors(WORKERS, ELEMENTS), **sent = take_vectors(WORKERS, ELEMENTS);
        float **held = take_vectors(WORKERS, ELEMENTS);
        double *missing = calloc(ELEMENTS, sizeof *missing);
        struct taken taken = {0};
        size_t lost = 0;
        for (uint64_t step = 0; step < STEPS; step++) {
            fill(x, 100 + step);
            lossynet_step_begin(comm, step);
            for (int w = 0; w < WORKERS; w++) {
                const uint16_t *residual = comm->feedback.residual + (size_t)w * ELEMENTS;
                for (size_t e = 0; e < ELEMENTS; e++) {
                    missing[e] += (double)x[w][e];
                    sent[w][e] = x[w][e] + ln_bf16_widen(residual[e]);
                }
                travel(comm, LOSSYNET_GRADIENT, w, sent[w], held[w]);
            }
            assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
            for (int w = 0; w < WORKERS; w++)
                check_residual(comm, step, w, sent[w], held[w], missing, &taken);
            for (size_t e = 0; e < ELEMENTS; e++)
                missing[e] -= WORKERS * (double)x[owner_of(comm, e)][e];
        }
        for (size_t e = 0; e < ELEMENTS; e++) {
            double kept = 0;
            for (int w = 0; w < WORKERS; w++)
                kept += (double)ln_bf16_widen(comm->feedback.residual[(size_t)w * ELEMENTS + e]);
            assert_close(missing[e], kept, 1e-3);
            lost += fabs(kept) > 0.5;
        }
        assert_true(lost > ELEMENTS / 4 && taken.lost > ELEMENTS && taken.early > ELEMENTS);
        free(missing);
        free_vectors(held);
        free_vectors(sent);
        free_vectors(x);
        lossynet_close(comm);
    }
}

/* A shard is rounded part by part, with the random numbers of each block's place in the vector. */
static void test_shards_of_many_blocks(void **state) {
    (void)state;
    enum { LARGE = 7000 };
    const size_t large[1] = {LARGE};
    struct lossynet_settings settings = simple_settings(2, large, 1, 0);
    settings.packet_bytes = PACKET;
    settings.wire_dtype = LOSSYNET_INT8;
    settings.estimator = LOSSYNET_ZERO;
    settings.error_feedback = true;
    struct lossynet_comm *comm = open_alone(&settings);
    float **x = take_vectors(2, LARGE), u[LARGE], q[LARGE];
    for (size_t e = 0; e < LARGE; e++) x[0][e] = u[e] = (float)random_unit(3, 1, e);
    lossynet_step_begin(comm, 1);
    size_t offset, count;
    lossynet_shard(comm, 1, 0, &offset, &count); /* worker 0 sends it */
    const struct ln_rounding r = ln_rounding_of(comm, LOSSYNET_GRADIENT, 0, offset);
    ln_elements_copy(&r, q + offset, u + offset, count);
    assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
    assert_memory_equal(x[0] + offset, q + offset, count * sizeof *q);
    for (size_t e = offset; e < offset + count; e++)
        assert_true(ln_bf16_widen(comm->feedback.residual[e]) == as_bf16(u[e] - q[e]));
    free_vectors(x);
    lossynet_close(comm);
}

/* ---- vectors that the host cannot touch ---- */

/* The bits of vectors that are in the host's memory: averages, replicas, drift. */
static void test_elsewhere(void **state) {
    (void)state;
    for (int f = 0; f < FORMATS; f++) {
        float **x[2];
        struct lossynet_comm *comm[2];
        struct lossynet_drift drift[2];
        for (int i = 0; i < 2; i++) {
            x[i] = take_vectors(WORKERS, ELEMENTS);
            struct elsewhere e = {0};
            const struct lossynet_memory memory = elsewhere_memory(&e);
            struct lossynet_settings settings = blocks_settings(formats[f].dtype, 0.3);
            settings.estimator = LOSSYNET_MEAN;
            settings.retransmission_rounds[LOSSYNET_PARAMETER] = f % 2;
            settings.memory = i ? &memory : NULL;
            comm[i] = open_alone(&settings);
            elsewhere_open(&e, comm[i], WORKERS);
            fill(x[i], 7);
            lossynet_round_as_sent(comm[i], x[i]);
            for (uint64_t step = 0; step < 4; step++) {
                /* Before step 2 a step ends without its broadcast, which was to lose nothing. */
                for (int end = step != 2; end < 2; end++) {
                    lossynet_step_begin(comm[i], step);
                    fill(x[i], 8 + step);
                    assert_int_equal(lossynet_reduce(comm[i], x[i], false), LOSSYNET_OK);
                    const bool prepares = step == 1 || !end;
                    if (prepares)
                        assert_int_equal(lossynet_broadcast_prepare(comm[i], !end), LOSSYNET_OK);
                    assert_true(comm[i]->steps.prepared == (i && prepares));
                }
                assert_int_equal(lossynet_broadcast(comm[i], x[i], false), LOSSYNET_OK);
                assert_int_equal(lossynet_drift_measure(comm[i], x[i], &drift[i]), LOSSYNET_OK);
            }
            free(e.packet);
        }
        for (int w = 0; w < WORKERS; w++)
            assert_memory_equal(x[0][w], x[1][w], ELEMENTS * sizeof *x[0][w]);
        assert_true(drift[0].pair == drift[1].pair && drift[0].pair > 0);
        for (int i = 0; i < 2; i++) {
            free_vectors(x[i]);
            lossynet_close(comm[i]);
        }
    }
}

/* ---- refusals ---- */

static void refuse(const struct lossynet_settings *settings, const char *expected) {
    struct lossynet_comm *comm;
    capture_begin();
    assert_int_equal(lossynet_open(&alone, settings, &comm), LOSSYNET_INVALID);
    assert_message(capture_end(), expected);
}

static void test_refusals(void **state) {
    (void)state;
    struct lossynet_memory memory = elsewhere_memory(NULL);
    memory.round = NULL;
    struct lossynet_settings settings = blocks_settings(LOSSYNET_INT8, 0);
    settings.memory = &memory;
    refuse(&settings, "vectors outside the host's memory: expected all functions");
    memory = elsewhere_memory(NULL);
    settings.error_feedback = true, settings.estimator = LOSSYNET_MEAN;
    refuse(&settings, "carry: expected vectors in the host's memory");
    settings.error_feedback = false;
    settings.memory = NULL;
    settings.packet_bytes = 32;
    refuse(&settings, "packet size 32 bytes: expected at least 36, for a block of wire dtype int8");
    settings.packet_bytes = 36;
    struct lossynet_comm *comm = open_alone(&settings);
    assert_int_equal(lossynet_packet_bytes(comm), 33);
    assert_false(lossynet_register(comm, NULL, 0));
    lossynet_close(comm);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rounding),
        cmocka_unit_test(test_edges),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_random_rounding_is_unbiased),
        cmocka_unit_test(test_broadcast),
        cmocka_unit_test(test_reduce),
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_no_drift_without_loss),
        cmocka_unit_test(test_what_rounding_takes_comes_later),
        cmocka_unit_test(test_residuals_hold_what_is_missing),
        cmocka_unit_test(test_shards_of_many_blocks),
        cmocka_unit_test(test_elsewhere),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests_name("elements in blocks with a scale", tests, NULL, NULL);
}
