/* cmocka.h — for `make BARE=1` on a machine without cmocka: as much of it as the operator tests
 * use. Include setjmp.h before it, as for the real one. */
#ifndef BARE_CMOCKA_H
#define BARE_CMOCKA_H

#include <setjmp.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

struct CMUnitTest {
    const char *name;
    void (*test)(void **state);
    int (*setup)(void **state);
};
#define cmocka_unit_test_setup(test, setup)                                                        \
    { #test, test, setup }
#define cmocka_unit_test(test)                                                                     \
    { #test, test, NULL }

static jmp_buf *bare_place(void) { /* one per program would do; one per file is harmless */
    extern jmp_buf bare_cmocka_jump;
    return &bare_cmocka_jump;
}
#define bare_fail(...)                                                                             \
    (printf("%s:%d: ", __FILE__, __LINE__), printf(__VA_ARGS__), printf("\n"), fflush(stdout),     \
     longjmp(*bare_place(), 1))
#define fail_msg(...) bare_fail(__VA_ARGS__)
#define fail() bare_fail("failed")
#define skip() longjmp(*bare_place(), 2)
#define assert_true(x) ((x) ? (void)0 : bare_fail("not true: %s", #x))
#define assert_false(x) assert_true(!(x))
#define assert_null(x) assert_true((x) == NULL)
#define assert_non_null(x) assert_true((x) != NULL)
#define assert_int_equal(a, b) assert_true((a) == (b))
#define assert_memory_equal(a, b, bytes) assert_true(memcmp(a, b, bytes) == 0)
#define assert_string_equal(a, b) assert_true(strcmp(a, b) == 0)

#define cmocka_run_group_tests_name(title, tests, setup, teardown)                                 \
    bare_run(title, tests, sizeof(tests) / sizeof *(tests))

static inline int bare_run(const char *title, const struct CMUnitTest *tests, size_t count) {
    volatile int failures = 0;
    for (volatile size_t i = 0; i < count; i++) {
        void *state = NULL;
        int ended = setjmp(*bare_place());
        if (ended == 0) {
            if (tests[i].setup) tests[i].setup(&state);
            tests[i].test(&state);
        }
        failures += ended == 1;
        printf("%s %s: %s\n", title, tests[i].name,
               ended == 0   ? "ok"
               : ended == 1 ? "FAILED"
                            : "skipped");
        fflush(stdout);
    }
    return failures;
}

#endif
