/* test_named.c — tests settings by name (lossynet/named.c). */
#include <stdio.h>

#include "test/lossynet/test_lossynet.h"

static char said[512];

static void keep(void *context, const char *message) {
    (void)context;
    snprintf(said, sizeof said, "%s", message);
}

static const size_t ELEMENTS[] = {1000, 300};

static int begin(void **state) {
    said[0] = '\0';
    lossynet_messages_to(keep, NULL);
    *state = lossynet_named_open(2, ELEMENTS);
    return *state ? 0 : -1;
}

static int end(void **state) {
    lossynet_named_close(*state);
    lossynet_messages_to(NULL, NULL);
    return 0;
}

static void values_reach_the_settings(void **state) {
    struct lossynet_named *named = *state;
    static const char *const given[][2] = {{"workers", "3"},
                                           {"wire-dtype", "int8"},
                                           {"estimator", "zero"},
                                           {"loss-rate", "0.5,0.25"},
                                           {"loss-model", "burst:4"},
                                           {"loss-seed", "9007199254740991"},
                                           {"carry", "0"},
                                           {"lead", "off"},
                                           {"look-ahead", "1.5"},
                                           {"link", "udp"},
                                           {"traffic-class", "le"},
                                           {"deadline", "0.5"},
                                           {"encrypt", "1"},
                                           {"port-range", "5000-5009"},
                                           {"packet-bytes", "1024"},
                                           {"repair", "2,3"}};
    for (size_t i = 0; i < sizeof given / sizeof *given; i++) {
        assert_int_equal(lossynet_named_set(named, given[i][0], given[i][1]), LOSSYNET_OK);
        assert_string_equal(lossynet_named_get(named, given[i][0]), given[i][1]);
    }
    const struct lossynet_settings *s = lossynet_named_settings(named, 3);
    assert_int_equal(s->workers, 3);
    assert_int_equal(s->buckets, 2);
    assert_memory_equal(s->bucket_elements, ELEMENTS, sizeof ELEMENTS);
    assert_int_equal(s->wire_dtype, LOSSYNET_INT8);
    assert_int_equal(s->estimator, LOSSYNET_ZERO);
    assert_true(s->loss.rate[LOSSYNET_PARAMETER] == 0.25 && s->loss.rate[LOSSYNET_GRADIENT] == 0.5);
    assert_string_equal(s->loss.model, "burst:4");
    assert_true(s->loss.seed == 9007199254740991u);
    assert_false(s->error_feedback);
    assert_false(s->lead);
    assert_int_equal(s->link, LOSSYNET_LINK_UDP);
    assert_int_equal(s->network.dscp, 1);
    assert_true(s->network.skip_late && s->network.deadline == 0.5 && s->network.encrypt);
    assert_true(s->network.ports[0] == 5000 && s->network.ports[1] == 5009);
    assert_int_equal(s->packet_bytes, 1024);
    assert_int_equal(s->retransmission_rounds[LOSSYNET_GRADIENT], 2);
    assert_int_equal(s->retransmission_rounds[LOSSYNET_PARAMETER], 3);
    assert_string_equal(said, "");
}

static void defaults_open_a_comm(void **state) {
    const struct lossynet_world alone = {.rank = 0, .ranks = 1, .local_ranks = 1};
    const struct lossynet_settings *s = lossynet_named_settings(*state, 1);
    struct lossynet_comm *comm;
    assert_true(s->lead && !s->network.skip_late);
    assert_true(s->error_feedback); /* of what rounding takes away */
    assert_int_equal(s->wire_dtype, LOSSYNET_INT6);
    assert_int_equal(s->retransmission_rounds[LOSSYNET_GRADIENT], LOSSYNET_ROUNDS_MEASURED);
    assert_int_equal(s->retransmission_rounds[LOSSYNET_PARAMETER], LOSSYNET_ROUNDS_MEASURED);
    assert_null(s->network.interface);
    assert_int_equal(lossynet_open(&alone, s, &comm), LOSSYNET_OK);
    assert_int_equal(lossynet_owned_elements(comm, 0), ELEMENTS[0] + ELEMENTS[1]);
    lossynet_close(comm);
}

static void owners_may_have_unequal_shards(void **state) {
    static const size_t shards[2][1] = {{1}, {1}};
    const struct lossynet_world alone = {.rank = 0, .ranks = 1, .local_ranks = 1};
    struct lossynet_comm *comm;
    lossynet_named_shards(*state, shards[0]);
    const struct lossynet_settings *s = lossynet_named_settings(*state, 1);
    assert_ptr_equal(s->shard_elements, shards[0]);
    /* They do not make up the buckets. */
    assert_int_equal(lossynet_open(&alone, s, &comm), LOSSYNET_INVALID);
}

static void wrong_values_change_nothing(void **state) {
    struct lossynet_named *named = *state;
    static const char *const wrong[][3] = {
        {"colour", "red", "no setting 'colour'"},
        {"repair", "often", "repair: expected auto or a whole number from 0 to 16, or two"},
        {"repair", "100000", "expected auto or a whole number from 0 to 16"},
        {"port-range", "5000",
         "port-range: expected FIRST-LAST, at least two ports from 1 to 65535"},
        {"port-range", "0-9", "expected FIRST-LAST"},
        {"port-range", "9-9", "expected FIRST-LAST"},
        {"port-range", "9000-8000", "expected FIRST-LAST"},
        {"port-range", "5000-65536", "expected FIRST-LAST"},
        {"port-range", "5000-5009x", "expected FIRST-LAST"},
        {"workers", "-1", "workers: expected a whole number from 0 to 65534, got '-1'"},
        {"workers", "4x", "expected a whole number"},
        {"wire-dtype", "fp8", "expected one of float32 bf16 int8 int6 int4 auto"},
        {"repair-budget", "nan", "expected auto or a number from 0 to 1000"},
        {"carry", "1.5", "expected auto or a number from 0 to 1"},
        {"lead", "far", "expected one of auto off"},
        {"look-ahead", "-1", "expected a number from 0 to 100"},
        {"look-ahead", "0x10", "expected a number from 0 to 100, got '0x10'"},
        {"deadline", "0", "expected auto, off or a number of seconds"},
        {"deadline", "0x1", "expected auto, off or a number of seconds"},
        {"estimator", "median", "expected one of mean balanced"},
        {"link", "tcp", "expected one of auto mpi"},
        {"traffic-class", "blue", "expected default, le"},
        {"encrypt", "yes", "expected 0 or 1"},
        {"loss-seed", "18446744073709551616", "expected a whole number"}};
    const struct lossynet_settings before = *lossynet_named_settings(named, 2);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        said[0] = '\0';
        assert_int_equal(lossynet_named_set(named, wrong[i][0], wrong[i][1]), LOSSYNET_INVALID);
        if (!strstr(said, wrong[i][2])) fail_msg("expected '%s' in: %s", wrong[i][2], said);
    }
    assert_memory_equal(&before, lossynet_named_settings(named, 2), sizeof before);
    assert_null(lossynet_named_get(named, "colour"));
}

static void every_name_has_a_value(void **state) {
    int names = 0;
    for (const char *name; (name = lossynet_named_name(names)) != NULL; names++)
        assert_non_null(lossynet_named_get(*state, name));
    assert_true(names > 20);
    assert_null(lossynet_named_name(-1));
    assert_int_equal(lossynet_struct_bytes("drift"), sizeof(struct lossynet_drift));
    assert_int_equal(lossynet_struct_bytes("not_finite"), sizeof(struct lossynet_not_finite));
    assert_int_equal(lossynet_struct_bytes("settings"), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(values_reach_the_settings, begin, end),
        cmocka_unit_test_setup_teardown(defaults_open_a_comm, begin, end),
        cmocka_unit_test_setup_teardown(owners_may_have_unequal_shards, begin, end),
        cmocka_unit_test_setup_teardown(wrong_values_change_nothing, begin, end),
        cmocka_unit_test_setup_teardown(every_name_has_a_value, begin, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
