/* test_pace.c — the loss budget's rule, against links that let a known rate through.
 */
#include "test_lossynet.h"

#include "lossynet/engine.h"

/* Rate after so many steps on a link that others leave `free` of. */
static double settle(struct lossynet_pace *pace, double free, int steps) {
    for (int i = 0; i < steps; i++)
        lossynet_pace_step(pace, pace->rate > free ? 1 - free / pace->rate : 0);
    return pace->rate;
}

static void test_converges(void **state) {
    (void)state;
    for (double budget = 0.01; budget < 0.5; budget *= 3) {
        struct lossynet_pace pace = {.most = 100, .rate = 100, .budget = budget};
        assert_close(settle(&pace, 200, 10), 100, 0);                /* free: full rate */
        assert_close(settle(&pace, 30, 1), 30 / (1 - budget), 1e-9); /* at once */
        assert_close(settle(&pace, 30, 5), 30 / (1 - budget), 1e-9); /* and stays */
        assert_close(settle(&pace, 10, 3), 10 / (1 - budget), 1e-9); /* less is free */
        int steps = 0;
        for (; settle(&pace, 50, 1) < 50 && steps < 1000; steps++) continue; /* recovers */
        assert_true(steps < 3 + 0.5 / budget);
        assert_close(settle(&pace, 50, 20), 50 / (1 - budget), 1e-9);
        assert_close(settle(&pace, 1e9, 1000), 100, 0);
    }
}

static void test_loss_that_is_not_congestion(void **state) {
    (void)state;
    struct lossynet_pace pace = {.most = 64, .rate = 64, .budget = 0.05};
    for (int i = 0; i < 1000; i++) lossynet_pace_step(&pace, 0.2);
    assert_close(pace.rate, 1, 1e-12); /* slow, not stopped */
    lossynet_pace_step(&pace, 1);
    assert_close(pace.rate, 1, 1e-12);
}

static void test_settings(void **state) {
    (void)state;
    static const double wrong[][2] = {{0.1, 0}, {1, 1}, {-0.1, 1}, {NAN, 1}};
    size_t elements = 100;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct lossynet_settings settings = simple_settings(2, &elements, 1, 0);
        struct lossynet *net;
        settings.loss_budget = wrong[i][0];
        settings.pace_gbps = wrong[i][1];
        capture_begin();
        lossynet_status status = lossynet_open(&alone, &settings, &net);
        assert_message(capture_end(), "expected a share below 1, and a rate");
        assert_int_equal(status, LOSSYNET_INVALID);
    }
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_converges),
        cmocka_unit_test(test_loss_that_is_not_congestion),
        cmocka_unit_test(test_settings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
