/* test_lossynet_secure.c — tests several ranks in one process over encrypted UDP datagrams on
 * loopback.
 *
 *   - The scenario of test_lossynet.h gives the bits of one rank with eight workers.
 *   - No word of a vector is readable in any datagram.
 *   - Datagrams that are changed on their way are refused and counted.
 *   - Ranks do not start if only some of them encrypt.
 */
#include "test_lossynet_threads.h"

/* ---- the same bits ---- */

static void same_bits(double p, int ranks) {
    struct lossynet_settings settings = scenario_settings("bernoulli", p, LOSSYNET_ZERO);
    struct lossynet_comm *comm = open_alone(&settings);
    uint64_t want = scenario_run(comm, 0, SCENARIO_WORKERS);
    lossynet_close(comm);
    settings.link = LOSSYNET_LINK_UDP;
    settings.network.encrypt = true;
    struct rank rank[RANKS];
    run_ranks(ranks, &settings, ln_link_udp_open, run_scenario, rank, NULL);
    const struct ln_rejected none = {0};
    for (int r = 0; r < ranks; r++) {
        assert_int_equal(rank[r].status, LOSSYNET_OK);
        assert_true(rank[r].digest == want);
        assert_memory_equal(&rank[r].rejected, &none, sizeof none);
    }
}

static void test_same_bits(void **state) {
    (void)state;
    same_bits(0, 2);
    same_bits(0.2, 4);
}

/* ---- what can be read on the way ---- */

enum { ELEMENTS = 2 * 4000, STEPS = 3 };
static const size_t elements = ELEMENTS;

/* Values of which all bits are known: words of vectors, and of nothing else. */
static const uint32_t words[2] = {0x3f9a5c3b, 0x3fb6d2e7};

static float value_of(int rank) {
    float value;
    memcpy(&value, &words[rank], sizeof value);
    return value;
}

static void run_steps(struct rank *rank, struct lossynet_comm *comm) {
    float **x = take_vectors(1, ELEMENTS);
    for (uint64_t step = 0; step < STEPS && !rank->status; step++) {
        for (size_t e = 0; e < ELEMENTS; e++) x[0][e] = value_of(rank->rank);
        rank->status = lossynet_step_begin(comm, step);
        if (!rank->status) rank->status = lossynet_reduce(comm, x, false);
        float mean = (value_of(0) + value_of(1)) / 2;
        for (size_t e = 0; e < ELEMENTS && !rank->status; e++) {
            assert_true(x[0][e] == value_of(rank->rank) || fabsf(x[0][e] - mean) < 1e-6f);
            x[0][e] = value_of(rank->rank);
        }
        if (!rank->status) rank->status = lossynet_broadcast(comm, x, false);
        for (size_t e = 0; e < ELEMENTS && !rank->status; e++)
            assert_true(x[0][e] == value_of(0) || x[0][e] == value_of(1));
    }
    free_vectors(x);
}

static struct lossynet_settings step_settings(bool encrypt) {
    struct lossynet_settings settings = simple_settings(2, &elements, 1, 0);
    settings.link = LOSSYNET_LINK_UDP;
    settings.network.encrypt = encrypt;
    return settings;
}

/* Counts words of vectors in what arrives. */
static int read_along(int rank, int peer, const uint8_t *datagram, size_t bytes) {
    (void)rank, (void)peer;
    for (size_t at = WIRE_HEADER_BYTES; at + 4 <= bytes; at += 4) {
        uint32_t word = (uint32_t)wire_get(datagram + at, 4);
        if (word == words[0] || word == words[1]) atomic_fetch_add(&post.total, 1);
    }
    return 1;
}

static void test_nothing_readable(void **state) {
    (void)state;
    for (int encrypt = 0; encrypt < 2; encrypt++) {
        struct lossynet_settings settings = step_settings(encrypt);
        struct rank rank[RANKS];
        run_ranks(2, &settings, ln_link_udp_open, run_steps, rank, read_along);
        for (int r = 0; r < 2; r++) assert_int_equal(rank[r].status, LOSSYNET_OK);
        assert_int_equal(atomic_load(&post.total), encrypt ? 0 : STEPS * 2 * ELEMENTS);
    }
}

/* ---- what is changed on the way ---- */

/* Flips a bit of every tenth datagram, anywhere. */
static int change(int rank, int peer, const uint8_t *datagram, size_t bytes) {
    uint64_t n = (uint64_t)atomic_fetch_add(&post.seen[rank][peer], 1);
    if (n % 10 == 9) {
        uint64_t bit = random_bits(11, (uint64_t)rank, n) % (8 * bytes);
        ((uint8_t *)datagram)[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    return 1;
}

static void test_changed(void **state) {
    (void)state;
    struct lossynet_settings settings = step_settings(true);
    struct rank rank[RANKS];
    run_ranks(2, &settings, ln_link_udp_open, run_steps, rank, change);
    for (int r = 0; r < 2; r++) {
        const struct ln_rejected *rejected = &rank[r].rejected;
        assert_int_equal(rank[r].status, LOSSYNET_OK);
        assert_true(rejected->corrupt > 0);
        assert_int_equal(rejected->not_finite + rejected->invalid, 0);
    }
}

/* ---- ranks that disagree ---- */

static void test_only_some(void **state) {
    (void)state;
    struct lossynet_settings settings[2] = {step_settings(false), step_settings(true)};
    struct rank rank[RANKS];
    capture_begin();
    run_ranks_with(2, settings, 1, ln_link_udp_open, run_steps, rank, NULL);
    const char *text = capture_end();
    for (int r = 0; r < 2; r++) assert_int_equal(rank[r].status, LOSSYNET_INVALID);
    assert_non_null(strstr(text, "rank 1 was started with encryption, rank 0 without"));
}

int main(void) {
    if (!ln_secure_available()) {
        printf("built without OpenSSL\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_nothing_readable),
        cmocka_unit_test(test_changed),
        cmocka_unit_test(test_only_some),
    };
    return cmocka_run_group_tests_name("lossynet, encrypted", tests, NULL, NULL);
}
