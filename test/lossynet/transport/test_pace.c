/* test_pace.c — tests the rule of the loss budget with simulated links of a known rate: step by
 * step, and second by second with the reports of a peer on a made-up network.
 */
#include "test/lossynet/test_lossynet.h"

#include "lossynet/transport/exchange/exchange.h"

/* Rate after so many steps, a second apart, on a link that others leave `free` of. */
static double settle(struct ln_pacing *pace, double free, int steps) {
    for (int i = 0; i < steps; i++)
        ln_pacing_step(pace, pace->rate > free ? 1 - free / pace->rate : 0, pace->risen + 1);
    return pace->rate;
}

static void test_converges(void **state) {
    (void)state;
    for (double budget = 0.01; budget < 0.5; budget *= 3) {
        struct ln_pacing pace = {.most = 100, .rate = 100, .budget = budget};
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
    struct ln_pacing pace = {.most = 64, .rate = 64, .budget = 0.05};
    for (int i = 0; i < 1000; i++) ln_pacing_step(&pace, 0.2, i);
    assert_close(pace.rate, 1, 1e-12); /* slow, not stopped */
    ln_pacing_step(&pace, 1, 1000);
    assert_close(pace.rate, 1, 1e-12);
}

/* ---- with a clock ---- */

/* A rank sends to a peer at its pace, 1,500 bytes at a time, over a link of 100 Mbit/s that others
 * leave `free` bytes per second of, from a queue of 11 packets. The peer reports every 10 ms, and
 * its report takes `delay` s. */
static const double SLOT = 5e-4, LINK = 12.5e6, PACKET = 1500, REPORT = 0.01;
enum { QUEUE = 11, IN_FLIGHT = 64 };

struct made_up {
    struct ln_transport transport;
    struct ln_peer peers[2];
    double now, queue, ready, delay, random; /* random: share lost whatever the rate */
    uint32_t arrived, lost;
    struct {
        double due;
        uint32_t sent, arrived;
    } report[IN_FLIGHT];
    uint64_t reported, handled;
};

static void made_up_open(struct made_up *m, double budget) {
    *m = (struct made_up){.delay = 0.005};
    m->transport.world.ranks = 2;
    m->transport.peers = m->peers;
    ln_pacing_open(&m->transport.pacing, 0.1, budget);
}

/* Lets `seconds` pass; returns the share lost. */
static double pass(struct made_up *m, double seconds, double (*free)(double)) {
    uint32_t *sent = &m->peers[1].flow.sent, lost_before = m->lost, sent_before = *sent;
    for (double end = m->now + seconds; m->now < end; m->now += SLOT) {
        m->queue = fmax(0, m->queue - free(m->now) * SLOT / PACKET);
        for (m->ready += m->transport.pacing.rate * SLOT / PACKET; m->ready >= 1; m->ready--) {
            double draw = ldexp((double)(random_bits(5, ++*sent, 0) >> 11), -53);
            bool fits = m->queue + 1 <= QUEUE && draw >= m->random;
            m->queue += fits;
            m->arrived += fits;
            m->lost += !fits;
        }
        if ((uint64_t)(m->now / REPORT) >= m->reported) {
            double due = m->now + m->delay;
            size_t slot = m->reported++ % IN_FLIGHT;
            m->report[slot].due = due, m->report[slot].sent = *sent;
            m->report[slot].arrived = m->arrived;
        }
        m->transport.receiver.now = m->now;
        for (; m->handled < m->reported && m->report[m->handled % IN_FLIGHT].due <= m->now;
             m->handled++)
            ln_pacing_report(&m->transport, 1, m->report[m->handled % IN_FLIGHT].sent,
                             m->report[m->handled % IN_FLIGHT].arrived);
    }
    return (double)(m->lost - lost_before) / (double)(*sent - sent_before);
}

static double all(double now) {
    (void)now;
    return LINK;
}

static double half(double now) {
    (void)now;
    return 0.5 * LINK;
}

static double little(double now) {
    (void)now;
    return 0.01 * LINK;
}

static double flips(double now) {
    return ((long)now % 2 ? 0.8 : 0.2) * LINK;
}

/* Others take all for 20 to 60 ms, half of the time. */
static double bursts(double now) {
    uint64_t slot = (uint64_t)(now / 0.02);
    return random_bits(6, slot / 3, slot % 3 == 0) % 2 ? LINK : 0;
}

/* When others have gone, the rate is back within seconds, also from as little as there is. */
static void test_recovers_in_time(void **state) {
    (void)state;
    for (double budget = 0.05; budget < 0.3; budget *= 2) {
        for (double delay = 0.005; delay < 0.02; delay *= 3) {
            struct made_up m;
            made_up_open(&m, budget);
            m.delay = delay;
            pass(&m, 3, all);
            assert_close(m.transport.pacing.rate, LINK, 1);
            pass(&m, 12, little);
            assert_true(m.transport.pacing.rate < 0.03 * LINK);
            double seconds = 0;
            for (; m.transport.pacing.rate < 0.9 * LINK && seconds < 30; seconds += 0.1)
                pass(&m, 0.1, all);
            assert_true(seconds < 3.2);
        }
    }
}

/* The budget is kept where what is free stays, nearly where it changes each second, and as well as
 * can be where it is all or nothing for moments: lost are up to 15% more. */
static void test_keeps_budget(void **state) {
    (void)state;
    for (double budget = 0.02; budget < 0.2; budget *= 2) {
        struct made_up m;
        made_up_open(&m, budget);
        pass(&m, 5, half);
        double steady = pass(&m, 20, half), rate = m.transport.pacing.rate;
        double flipping = pass(&m, 20, flips), bursty = pass(&m, 20, bursts);
        assert_close(steady, budget, 0.02 * budget);
        assert_close(rate, 0.5 * LINK / (1 - budget), 0.05 * LINK);
        assert_true(flipping < budget + 0.025);
        assert_true(bursty < budget + 0.15);
    }
}

static void test_settings(void **state) {
    (void)state;
    static const double wrong[][2] = {{0.1, 0}, {1, 1}, {-0.1, 1}, {NAN, 1}};
    size_t elements = 100;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct lossynet_settings settings = simple_settings(2, &elements, 1, 0);
        struct lossynet_comm *comm;
        settings.network.loss_budget = wrong[i][0];
        settings.network.pace_gbps = wrong[i][1];
        capture_begin();
        lossynet_status status = lossynet_open(&alone, &settings, &comm);
        assert_message(capture_end(), "expected a share below 1, and pace-gbps");
        assert_int_equal(status, LOSSYNET_INVALID);
    }
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_converges),        cmocka_unit_test(test_loss_that_is_not_congestion),
        cmocka_unit_test(test_recovers_in_time), cmocka_unit_test(test_keeps_budget),
        cmocka_unit_test(test_settings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
