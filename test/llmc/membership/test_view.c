/* test_view.c — tests views: the next view, when it is proposed, and its text; and the URL of a
 * run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "llmc/membership/etcd.h"
#include "llmc/membership/membership.h"
#include "llmc/membership/view.h"
#include "test/support/capture.h"

static struct member someone(const char *uid) {
    struct member m = {.host = "host", .pid = 7};
    snprintf(m.uid, sizeof m.uid, "%s", uid);
    snprintf(m.address, sizeof m.address, "10.0.0.1:%s", uid);
    return m;
}

/* A view of members "1", "2", ... */
static struct view view_of(int members) {
    struct member joiner[16];
    const struct view none = {.epoch = 0};
    struct view v;
    for (int i = 0; i < members; i++) {
        char uid[12];
        snprintf(uid, sizeof uid, "%d", i + 1);
        joiner[i] = someone(uid);
    }
    assert_int_equal(view_next(&none, NULL, joiner, members, &v), 0);
    assert_int_equal(v.epoch, 1);
    return v;
}

static void assert_uids(const struct view *v, const char *expected) {
    char uids[400] = "";
    for (int r = 0; r < v->members; r++)
        snprintf(uids + strlen(uids), sizeof uids - strlen(uids), "%s ", v->member[r].uid);
    assert_string_equal(uids, expected);
}

static void test_survivors_keep_their_order(void **state) {
    (void)state;
    struct view v = view_of(5), next, last;
    const struct member joiner[] = {someone("b"), someone("a")};
    assert_uids(&v, "1 2 3 4 5 ");
    assert_int_equal(
        view_next(&v, (const bool[]){true, false, false, true, false}, joiner, 2, &next), 0);
    assert_uids(&next, "2 3 5 b a ");
    assert_int_equal(next.epoch, 2);
    assert_int_equal(next.member[0].joined, 1);
    assert_int_equal(next.member[3].joined, 2);
    assert_int_equal(view_next(&next, NULL, NULL, 0, &last), 0);
    assert_uids(&last, "2 3 5 b a ");
    assert_int_equal(last.epoch, 3);
    assert_int_equal(view_rank_of(&last, "b"), 3);
    assert_int_equal(view_rank_of(&last, "1"), -1);
    view_clear(&v);
    view_clear(&next);
    view_clear(&last);
}

static void test_who_proposes_first(void **state) {
    (void)state;
    struct view v = view_of(4);
    const bool none[4] = {false}, first[] = {true, false, false, false},
               half[] = {true, true, false, false}, most[] = {true, true, false, true};
    v.self = 0;
    assert_true(view_patience(&v, NULL, none) == 0);
    v.self = 2;
    const double alone = view_patience(&v, most, none), cut = view_patience(&v, half, none),
                 one = view_patience(&v, first, none);
    assert_true(one > 0 && one < cut && cut < alone && alone <= 2);
    /* Who has ended is on no side of a cut. */
    assert_true(view_patience(&v, most, most) == 0 && view_patience(&v, half, half) == 0);
    assert_true(view_patience(&v, most, half) > 0 && view_patience(&v, most, half) < alone);
    /* Who does not know who is missing waits for those who do. */
    assert_true(view_patience(&v, none, none) > one + 1);
    v.self = 1;
    assert_true(view_patience(&v, first, none) == 0); /* rank 0 is missing: rank 1 is the first */
    view_clear(&v);
}

static void test_text(void **state) {
    (void)state;
    struct view v = view_of(3), again;
    char *text = view_to_json(&v);
    assert_non_null(text);
    assert_true(view_from_json(text, &again));
    assert_int_equal(again.epoch, 1);
    assert_int_equal(again.members, 3);
    assert_memory_equal(again.member, v.member, 3 * sizeof *v.member);
    assert_int_equal(again.self, -1);
    free(text);
    text = member_to_json(&v.member[1]);
    struct member m;
    assert_true(member_from_json(text, "2", &m));
    assert_string_equal(m.address, "10.0.0.1:2");
    assert_int_equal(m.pid, 7);
    free(text);
    view_clear(&v);
    view_clear(&again);
}

#define MEMBER "{\"address\":\"1.2.3.4:5\",\"host\":\"h\",\"pid\":1,\"uid\":\"%s\",\"joined\":1}"

static void test_text_that_is_no_view(void **state) {
    (void)state;
    static const char *const wrong[] = {
        "",
        "{",
        "[]",
        "7",
        "{\"epoch\":1}",
        "{\"epoch\":1,\"members\":[7]}",
        "{\"epoch\":1,\"members\":{}}",
        "{\"epoch\":0,\"members\":[{\"address\":\"1.2.3.4:5\",\"host\":\"h\",\"pid\":1,\"uid\":"
        "\"a\","
        "\"joined\":1}]}",
        "{\"epoch\":1,\"members\":[{\"address\":\"1.2.3.4:5\",\"host\":\"h\",\"pid\":1,\"uid\":"
        "\"a\","
        "\"joined\":2}]}",
        "{\"epoch\":1,\"members\":[{\"address\":\"1.2.3.4:5\",\"host\":\"h\",\"pid\":-1,\"uid\":"
        "\"a\","
        "\"joined\":1}]}",
        "{\"epoch\":1,\"members\":[{\"address\":\"1.2.3.4:5\",\"host\":\"h\",\"pid\":1,"
        "\"uid\":\"a-name-that-is-longer-than-any-uid\",\"joined\":1}]}"};
    struct view v;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_false(view_from_json(wrong[i], &v));
        assert_null(v.member);
    }
    char text[400];
    snprintf(text, sizeof text, "{\"epoch\":1,\"members\":[" MEMBER "," MEMBER "]}", "a", "b");
    assert_true(view_from_json(text, &v));
    view_clear(&v);
    snprintf(text, sizeof text, "{\"epoch\":1,\"members\":[" MEMBER "," MEMBER "]}", "a", "a");
    assert_false(view_from_json(text, &v)); /* a member that is there twice */
}

static void test_url(void **state) {
    (void)state;
    struct membership_url u;
    if (!etcd_built()) skip();
    assert_int_equal(membership_url_parse("etcd://host-1.cluster:2379/my_run.2", &u), 0);
    assert_string_equal(u.host, "host-1.cluster");
    assert_int_equal(u.port, 2379);
    assert_string_equal(u.run, "my_run.2");
    assert_int_equal(membership_url_parse("etcd://[fe80::1]:1/r", &u), 0);
    assert_string_equal(u.host, "fe80::1");
}

static void test_url_that_is_wrong(void **state) {
    (void)state;
    static const struct {
        const char *url, *said;
    } wrong[] = {{"", "does not begin with etcd://"},
                 {"http://host:1/run", "does not begin with etcd://"},
                 {"etcd://host:1", "no run"},
                 {"etcd://host/run", "no port"},
                 {"etcd://:1/run", "no host"},
                 {"etcd://a/b:1/run", "no port"},
                 {"etcd://a b:1/run", "this is no host"},
                 {"etcd://::1:2379/run", "an IPv6 address stands in brackets"},
                 {"etcd://host:0/run", "the port is no number from 1 to 65535"},
                 {"etcd://host:65536/run", "the port is no number from 1 to 65535"},
                 {"etcd://host:12x/run", "the port is no number from 1 to 65535"},
                 {"etcd://host:-1/run", "the port is no number from 1 to 65535"},
                 {"etcd://host:1/", "1 to 64 characters"},
                 {"etcd://host:1/a/b", "letters, digits"},
                 {"etcd://host:1/a b", "letters, digits"}};
    struct membership_url u;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        capture_begin();
        const int status = membership_url_parse(wrong[i].url, &u);
        const char *said = capture_end();
        if (status != -1 || !strstr(said, wrong[i].said) ||
            strchr(said, '\n') != said + strlen(said) - 1)
            print_error("%s: %d, %s", wrong[i].url, status, said);
        assert_int_equal(status, -1);
        assert_non_null(strstr(said, wrong[i].said));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_survivors_keep_their_order),
        cmocka_unit_test(test_who_proposes_first),
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_text_that_is_no_view),
        cmocka_unit_test(test_url),
        cmocka_unit_test(test_url_that_is_wrong),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
