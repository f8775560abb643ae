/* test_lossynet_repeat.c — tests how often a rank repeats messages to peers that do not answer, or
 * answer only that they are alive.
 *
 * The comm is of rank 0 of many, with one worker in each rank. This test plays the others: it
 * counts the messages to them, and answers or not. The limits do not depend on the machine's
 * speed, because a slow machine repeats less.
 */
#include "fake_link.h"

#include "lossynet/transport/exchange/exchange.h"

#include <limits.h>
#include <stdatomic.h>

enum { RANKS = 64 };

static int silent_ranks; /* ranks 1 ... silent_ranks say nothing, the others answer each PROBE */
static atomic_int sent_control;

/* Counts control datagrams. A PROBE's answer is a STATE that says nothing: phases closed, nothing
 * sent, nothing seen. */
static void hear(int peer, const uint8_t *header) {
    const int type = wire_type(header);
    atomic_fetch_add(&sent_control, type != WIRE_DATA);
    if (type == WIRE_PROBE && peer > silent_ranks) fake_reply(peer, header, WIRE_STATE);
}

/* ---- counting ---- */

static const double SECONDS = 0.5;

/* Control datagrams that rank 0 sends within SECONDS of a phase to so many others. If it was watched
 * for longer, because the machine is busy, in such a part of the time. */
static int count(int others, int silent) {
    const size_t elements = 64 * RANKS;
    const struct lossynet_world world = {
        .ranks = others + 1, .local_ranks = others + 1, .share = fake_exchange};
    struct lossynet_settings settings = simple_settings(others + 1, &elements, 1, 0);
    struct lossynet_comm *comm;
    fake.hear = hear;
    silent_ranks = silent;
    atomic_store(&sent_control, 0);
    settings.network.peer_timeout = 60;
    assert_int_equal(ln_comm_open(&world, &settings, fake_open, &comm), LOSSYNET_OK);
    float **vectors = take_vectors(1, elements);
    assert_int_equal(lossynet_step_begin(comm, 0), LOSSYNET_OK);
    assert_int_equal(lossynet_reduce_begin(comm, vectors, false), LOSSYNET_OK);
    lossynet_bucket_ready(comm, 0, 0);
    ln_threads_enter(comm->transport);
    comm->transport->phase[LOSSYNET_GRADIENT].awaited = true; /* as in lossynet_reduce */
    ln_agenda_all(comm->transport);
    int before = atomic_load(&sent_control);
    ln_threads_leave(comm->transport);
    const double start = ln_now();
    nanosleep(&(struct timespec){.tv_nsec = (long)(SECONDS * 1e9)}, NULL);
    int sent = atomic_load(&sent_control) - before;
    sent = (int)(sent * SECONDS / (ln_now() - start));
    ln_threads_enter(comm->transport);
    comm->transport->failed = LOSSYNET_LINK; /* so that it says ABORT and waits for nobody */
    ln_threads_leave(comm->transport);
    lossynet_close(comm);
    free_vectors(vectors);
    print_message("%d others, %d silent: %d datagrams in %g s\n", others, silent, sent, SECONDS);
    return sent;
}

/* A busy machine may keep the engine from running, so that less is sent. It gets more chances; more
 * than `most` must not be sent in any. */
static void assert_sent(int others, int silent, int least, int most) {
    int sent = 0;
    for (int chance = 0; chance < 20 && sent < least && sent <= most; chance++)
        sent = count(others, silent);
    assert_in_range(sent, least, most);
}

/* Where loss is what keeps few from answering, they are told again soon, ... */
static void test_few_are_told_often(void **state) {
    (void)state;
    assert_sent(3, 3, 3 * 10, 3 * 60);
}

/* ... and many are not flooded: all together no more than a few. */
static void test_many_are_not_flooded(void **state) {
    (void)state;
    assert_sent(63, 63, 63, 9 * 63);
}

/* Some that are silent among many that answer are few. */
static void test_few_of_many(void **state) {
    (void)state;
    assert_sent(63, 3, 3 * 10 + 1, INT_MAX);
}

/* Whoever answers that there is nothing new is asked less and less often. */
static void test_no_news(void **state) {
    (void)state;
    assert_sent(3, 0, 3 * 10, 3 * 60);
    assert_sent(63, 0, 63, 63 * 60);
}

/* ---- which peers a turn looks at ---- */

/* A turn looks at those of which something is new and at no other: what another is owed has to wait
 * until then. So a turn costs as much among many ranks as among few. */
static void test_a_turn_looks_at_few(void **state) {
    (void)state;
    const size_t elements = 64 * RANKS;
    const struct lossynet_world world = {
        .ranks = RANKS, .local_ranks = RANKS, .share = fake_exchange};
    struct lossynet_settings settings = simple_settings(RANKS, &elements, 1, 0);
    struct lossynet_comm *comm;
    fake.hear = hear;
    silent_ranks = RANKS;
    settings.network.peer_timeout = 60;
    assert_int_equal(ln_comm_open(&world, &settings, fake_open, &comm), LOSSYNET_OK);
    struct ln_transport *t = comm->transport;
    ln_threads_enter(t);
    ln_progress_turn(t);
    for (int r = 1; r < RANKS; r++) assert_true(t->agenda.due[r] > ln_now());
    atomic_store(&sent_control, 0);
    for (int r = 1; r < RANKS; r++) t->peers[r].control.state_due = true;
    ln_agenda_soon(t, 7);
    ln_progress_turn(t);
    assert_int_equal(atomic_load(&sent_control), 1);
    assert_false(t->peers[7].control.state_due);
    assert_true(t->peers[8].control.state_due);
    ln_agenda_all(t); /* the caller has done something */
    ln_progress_turn(t);
    assert_int_equal(atomic_load(&sent_control), RANKS - 1);
    t->failed = LOSSYNET_LINK; /* so that it says ABORT and waits for nobody */
    ln_threads_leave(t);
    lossynet_close(comm);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_few_are_told_often),  cmocka_unit_test(test_many_are_not_flooded),
        cmocka_unit_test(test_few_of_many),         cmocka_unit_test(test_no_news),
        cmocka_unit_test(test_a_turn_looks_at_few),
    };
    return cmocka_run_group_tests_name("repetition", tests, NULL, NULL);
}
