/* test_lossynet_repeat.c — how often a rank repeats itself to peers that do not answer, or only that
 * they are there.
 *
 * A net of rank 0 of many, one worker in each; the others are this test, which counts what is sent to
 * them and answers, or not. Nothing here depends on how fast the machine is: a slow one repeats less.
 */
#include "test_lossynet.h"

#include "lossynet/engine.h"

#include <stdatomic.h>

enum { RANKS = 64, ANSWERS = 4 * RANKS, ANSWER_BYTES = WIRE_HEADER_BYTES + WIRE_STATE_BYTES };

static struct {
    struct lossynet_link link;
    struct lossynet_world world;
    int silent;      /* ranks 1 ... silent say nothing, the others answer each PROBE */
    atomic_int sent; /* control datagrams */
    uint8_t answer[ANSWERS][ANSWER_BYTES], shown[LOSSYNET_BATCH][ANSWER_BYTES];
    int peer[ANSWERS], answers;
} fake;

/* ---- the link ---- */

/* A peer's STATE that says nothing: phases closed, nothing sent, nothing seen. */
static void answer(int peer, const uint8_t *probe) {
    if (fake.answers == ANSWERS) return;
    struct wire_header h;
    uint8_t *to = fake.answer[fake.answers];
    wire_decode(&h, probe, WIRE_HEADER_BYTES);
    h.type = WIRE_STATE;
    h.sender = (uint16_t)peer, h.receiver = 0;
    h.checksum = 0;
    memset(to, 0, ANSWER_BYTES);
    wire_encode(to, &h);
    wire_put(to + WIRE_CHECKSUM_AT, lossynet_crc32c(0, to, ANSWER_BYTES), 4);
    fake.peer[fake.answers++] = peer;
}

static lossynet_status fake_send(struct lossynet_link *link, int peer,
                                 const struct lossynet_datagram *batch, int count) {
    (void)link;
    for (int i = 0; i < count; i++) {
        int type = wire_type(batch[i].header);
        atomic_fetch_add(&fake.sent, type != WIRE_DATA);
        if (type == WIRE_PROBE && peer > fake.silent) answer(peer, batch[i].header);
    }
    return LOSSYNET_OK;
}

static int fake_receive(struct lossynet_link *link, struct lossynet_arrival *arrivals) {
    (void)link;
    int n = 0;
    for (; n < LOSSYNET_BATCH && fake.answers > 0; n++) {
        memcpy(fake.shown[n], fake.answer[--fake.answers], ANSWER_BYTES);
        arrivals[n] = (struct lossynet_arrival){
            .bytes = fake.shown[n], .count = ANSWER_BYTES, .peer = fake.peer[fake.answers]};
    }
    return n;
}

static void fake_wait(struct lossynet_link *link, double seconds) {
    (void)link;
    seconds = fmin(seconds, 1e-3);
    nanosleep(&(struct timespec){.tv_nsec = (long)(seconds * 1e9)}, NULL);
}

static void nothing(struct lossynet_link *link) {
    (void)link;
}

static lossynet_status fake_open(const struct lossynet_link_settings *settings,
                                 struct lossynet_link **out) {
    (void)settings;
    fake.link = (struct lossynet_link){
        .name = "test",
        .payload_most = 4096,
        .receive_queue = 1000,
        .send = fake_send,
        .receive = fake_receive,
        .wait = fake_wait,
        .wake = nothing,
        .close = nothing,
    };
    *out = &fake.link;
    return LOSSYNET_OK;
}

/* The missing ranks say what rank 0 says. */
static lossynet_status echo(void *context, const struct lossynet_world *world, void *all,
                            size_t bytes) {
    (void)context;
    for (int r = 1; r < world->ranks; r++) memcpy((char *)all + (size_t)r * bytes, all, bytes);
    return LOSSYNET_OK;
}

/* ---- counting ---- */

/* Control datagrams that rank 0 sends within `seconds` of a phase to so many others. */
static int count(int others, int silent, double seconds) {
    const size_t elements = 64 * RANKS;
    const struct lossynet_world world = {.ranks = others + 1, .local_ranks = others + 1};
    struct lossynet_settings settings = simple_settings(others + 1, &elements, 1, 0);
    struct lossynet *net;
    memset(&fake, 0, sizeof fake);
    fake.silent = silent;
    settings.peer_timeout = 60;
    assert_int_equal(lossynet_net_open(&world, &settings, fake_open, echo, NULL, &net),
                     LOSSYNET_OK);
    float **vectors = take_vectors(1, elements);
    assert_int_equal(lossynet_step_begin(net, 0), LOSSYNET_OK);
    assert_int_equal(lossynet_reduce_begin(net, vectors, false), LOSSYNET_OK);
    lossynet_bucket_ready(net, 0, 0);
    lossynet_engine_enter(net);
    net->engine->phase[LOSSYNET_GRADIENT].awaited = true; /* as in lossynet_reduce */
    int before = atomic_load(&fake.sent);
    lossynet_engine_leave(net);
    nanosleep(&(struct timespec){(time_t)seconds, (long)(fmod(seconds, 1) * 1e9)}, NULL);
    int sent = atomic_load(&fake.sent) - before;
    lossynet_engine_enter(net);
    net->engine->failed = LOSSYNET_LINK; /* so that it says ABORT and waits for nobody */
    lossynet_engine_leave(net);
    lossynet_close(net);
    free_vectors(vectors);
    print_message("%d others, %d silent: %d datagrams in %g s\n", others, silent, sent, seconds);
    return sent;
}

/* Where loss is what keeps few from answering, they are told again soon, ... */
static void test_few_are_told_often(void **state) {
    (void)state;
    assert_in_range(count(3, 3, 0.5), 3 * 10, 3 * 60);
}

/* ... and many are not flooded: all together no more than a few. */
static void test_many_are_not_flooded(void **state) {
    (void)state;
    assert_in_range(count(63, 63, 0.5), 63, 2 * 63 + 4 * 60);
}

/* Some that are silent among many that answer are few. */
static void test_few_of_many(void **state) {
    (void)state;
    assert_true(count(63, 3, 0.5) > 3 * 10);
}

/* Whoever answers that there is nothing new is asked less and less often. */
static void test_no_news(void **state) {
    (void)state;
    assert_in_range(count(3, 0, 0.5), 3 * 10, 3 * 60);
    assert_in_range(count(63, 0, 0.5), 63, 63 * 60);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_few_are_told_often),
        cmocka_unit_test(test_many_are_not_flooded),
        cmocka_unit_test(test_few_of_many),
        cmocka_unit_test(test_no_news),
    };
    return cmocka_run_group_tests_name("repetition", tests, NULL, NULL);
}
