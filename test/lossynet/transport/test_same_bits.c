/* test_same_bits.c — tests that bits do not depend on how the workers are spread over ranks, over a
 * link of mailboxes in memory.
 *
 * For 2, 4 and 8 ranks the scenario of test_lossynet.h must give the bits of one rank with eight
 * workers, over both kinds of link, and with ranks of different speeds. This holds for several
 * loss models and estimators, retransmission, error feedback, groups, rounded elements, and owners'
 * values stored apart from vectors. Memory that an adapter may read in place must not change until
 * the link has settled. With the address sanitizer each setting takes one number of ranks, in turn,
 * and without it the two others. Takes 40 s.
 */
#include "mailboxes.h"

#ifdef __SANITIZE_ADDRESS__
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

/* Pairs: all settings meet all numbers of ranks (in two builds) and both links, and every other
 * settings the same number over the same link. Elements that travel as they are leave from
 * registered memory. */
static void same_bits_as(uint64_t want, const struct lossynet_settings *settings) {
    static int turn;
    turn++;
    for (int ranks = 2, i = turn; ranks <= RANKS; ranks *= 2, i++) {
        if (SANITIZED != (ranks == 2 << turn % 3)) continue;
        const ln_link_open open = i % 2 ? mail_open : post_office_open;
        assert_true(digest_of(ranks, open, ranks == 4, settings, run_scenario) == want);
        if (settings->wire_dtype != settings->vector_dtype)
            assert_int_equal(office.settled, 0);
        else if (settings->loss.rate[0] < 1)
            assert_true(office.settled > 1000);
    }
}

static void same_bits_with(struct lossynet_settings settings) {
    const double p = settings.loss.rate[0];
    const uint64_t want = digest_alone(&settings);
    same_bits_as(want, &settings);
    settings.loss.seed++; /* the digest sees loss */
    if (p > 0 && p < 1) assert_true(digest_alone(&settings) != want);
}

static void same_bits(const char *model, double p, lossynet_estimator estimator) {
    same_bits_with(scenario_settings(model, p, estimator));
}

static void test_same_bits(void **state) {
    (void)state;
    same_bits("bernoulli", 0, LOSSYNET_MEAN);
    same_bits("bernoulli", 0.2, LOSSYNET_MEAN);
    same_bits("bernoulli", 0.2, LOSSYNET_ZERO);
    same_bits("bernoulli", 1, LOSSYNET_BALANCED);
    same_bits("burst:7", 0.3, LOSSYNET_BALANCED);
    same_bits("outage:3", 0.3, LOSSYNET_ZERO);
    struct lossynet_settings uneven = scenario_settings("bernoulli", 0.1, LOSSYNET_ZERO);
    uneven.loss.at = "3=0.5,2-5=1,5=0";
    same_bits_with(uneven);
}

/* What other ranks sent lies in the caller's memory, and is given back. */
static atomic_int allocated;
static atomic_size_t allocated_bytes;

static void *allocate(size_t bytes) {
    atomic_fetch_add(&allocated, 1);
    atomic_fetch_add(&allocated_bytes, bytes);
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (memory) memset(memory, 0xff, bytes);
    return memory;
}

static void release(void *memory) {
    atomic_fetch_sub(&allocated, 1);
    free(memory);
}

static void test_same_bits_allocated(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0.2, LOSSYNET_MEAN);
    settings.allocate = allocate;
    settings.release = release;
    same_bits_with(settings);
    assert_int_equal(allocated, 0);
    assert_true(allocated_bytes > 0);
}

static void test_same_bits_retransmitted(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0.4, LOSSYNET_MEAN);
    settings.retransmission_rounds[LOSSYNET_PARAMETER] = 1;
    same_bits_with(settings);
    settings.loss.model = "burst:7";
    settings.retransmission_rounds[LOSSYNET_GRADIENT] = 2;
    same_bits_with(settings);
    settings.loss.model = "outage:2";
    settings.loss.at = "1-2=0.1";
    same_bits_with(settings);
    settings.retransmission_budget = 0.2;
    same_bits_with(settings);
    settings.loss.model = "outage:2:2"; /* another path, then another worker */
    settings.loss.at = "1-2=1";
    same_bits_with(settings);
}

static void test_same_bits_carried(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0.3, LOSSYNET_MEAN);
    settings.error_feedback = true;
    same_bits_with(settings);
    settings.acknowledge_later = true;
    same_bits_with(settings);
    settings.retransmission_rounds[LOSSYNET_GRADIENT] = 1;
    same_bits_with(settings);
    settings.retransmission_budget = 0.1;
    same_bits_with(settings);
}

/* Members of a group in one rank, or each in its own: with all that depends on who is whose partner. */
static void test_same_bits_in_groups(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("burst:7", 0.3, LOSSYNET_ZERO);
    settings.group = 2;
    same_bits_with(settings);
    settings.loss.model = "outage:2";
    settings.estimator = LOSSYNET_BALANCED;
    settings.retransmission_rounds[LOSSYNET_GRADIENT] = 1;
    settings.retransmission_rounds[LOSSYNET_PARAMETER] = 2;
    settings.retransmission_budget = 0.2;
    same_bits_with(settings);
    settings.loss.model = "bernoulli";
    settings.estimator = LOSSYNET_MEAN;
    settings.error_feedback = true;
    same_bits_with(settings);
    settings.wire_dtype = LOSSYNET_INT8;
    same_bits_with(settings);
}

/* Shards of given sizes, many of which have nothing. */
static void test_same_bits_of_unequal_shards(void **state) {
    (void)state;
    static const size_t shards[SCENARIO_BUCKETS][SCENARIO_WORKERS] = {
        {0, 2500}, {3, 0, 36, 0, 0, 1}, {0, 0, 0, 0, 0, 0, 0, 1}, {100, 0, 3000, 0, 0, 45, 2200}};
    struct lossynet_settings settings = scenario_settings("bernoulli", 0.3, LOSSYNET_MEAN);
    settings.shard_elements = shards[0];
    same_bits_with(settings);
    settings.error_feedback = true;
    settings.retransmission_rounds[LOSSYNET_GRADIENT] = 1;
    settings.retransmission_rounds[LOSSYNET_PARAMETER] = 1;
    same_bits_with(settings);
    settings.wire_dtype = LOSSYNET_INT6;
    same_bits_with(settings);
    settings.group = 2;
    same_bits_with(settings);
}

static void same_bits_rounded(lossynet_wire_dtype wire_dtype) {
    struct lossynet_settings settings = scenario_settings("bernoulli", 0, LOSSYNET_MEAN);
    settings.wire_dtype = wire_dtype;
    if (wire_dtype == LOSSYNET_BF16) same_bits_with(settings);
    settings.loss.rate[0] = settings.loss.rate[1] = 0.3;
    same_bits_with(settings);
    settings.error_feedback = true;
    settings.retransmission_rounds[LOSSYNET_GRADIENT] = 1;
    settings.retransmission_rounds[LOSSYNET_PARAMETER] = 1;
    same_bits_with(settings);
}

static void test_same_bits_rounded(void **state) {
    (void)state;
    same_bits_rounded(LOSSYNET_BF16);
    same_bits_rounded(LOSSYNET_INT8);
    same_bits_rounded(LOSSYNET_INT6);
    same_bits_rounded(LOSSYNET_INT4);
}

/* What owners hold lies apart from vectors, which are of bfloat16 where they can be: the bits of
 * vectors of float32 that hold all. */
static void same_bits_apart(struct lossynet_settings settings) {
    scenario_kind = SCENARIO_ROUNDED;
    const uint64_t want = digest_alone(&settings);
    const bool bf16 = settings.wire_dtype != LOSSYNET_FLOAT32 && !settings.error_feedback;
    scenario_kind = bf16 ? SCENARIO_BF16 : SCENARIO_APART;
    if (bf16) settings.vector_dtype = LOSSYNET_BF16;
    same_bits_as(want, &settings);
    scenario_kind = SCENARIO_ANY;
}

static void test_same_bits_apart(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0, LOSSYNET_MEAN);
    settings.wire_dtype = LOSSYNET_BF16;
    same_bits_apart(settings);
    settings.loss.rate[0] = settings.loss.rate[1] = 0.3;
    settings.allocate = allocate;
    settings.release = release;
    same_bits_apart(settings);
    settings.estimator = LOSSYNET_ZERO;
    settings.loss.model = "burst:7";
    same_bits_apart(settings);
    settings.retransmission_rounds[LOSSYNET_GRADIENT] = 1;
    settings.retransmission_rounds[LOSSYNET_PARAMETER] = 2;
    settings.retransmission_budget = 0.2;
    same_bits_apart(settings);
    settings.group = 2;
    settings.estimator = LOSSYNET_BALANCED;
    same_bits_apart(settings);
    settings.wire_dtype = LOSSYNET_INT4;
    same_bits_apart(settings);
    settings.wire_dtype = LOSSYNET_INT8;
    settings.group = 1;
    same_bits_apart(settings);
    assert_int_equal(allocated, 0);
}

/* Vectors of float32 with any wire dtype, and with error feedback. */
static void test_same_bits_apart_float32(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0.3, LOSSYNET_MEAN);
    settings.error_feedback = true;
    same_bits_apart(settings);
    settings.wire_dtype = LOSSYNET_INT4;
    same_bits_apart(settings);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_same_bits_allocated),
        cmocka_unit_test(test_same_bits_retransmitted),
        cmocka_unit_test(test_same_bits_carried),
        cmocka_unit_test(test_same_bits_in_groups),
        cmocka_unit_test(test_same_bits_of_unequal_shards),
        cmocka_unit_test(test_same_bits_rounded),
        cmocka_unit_test(test_same_bits_apart),
        cmocka_unit_test(test_same_bits_apart_float32),
    };
    return cmocka_run_group_tests_name("lossynet, the same bits", tests, NULL, NULL);
}
