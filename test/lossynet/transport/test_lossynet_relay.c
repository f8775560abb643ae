/* test_lossynet_relay.c — tests what a rank does for others and with several of them: datagrams that it sends on,
 * a peer that others call dead, a look at the network before a run, and a link that strangers keep full.
 */
#include "fake_peer.h"

/* A comm of four ranks that hear nothing of each other but what is fed. This one is rank 0. */
static struct lossynet_comm *open_four(void) {
    struct lossynet_world world = {.rank = 0, .ranks = 4, .share = fake_exchange};
    struct lossynet_settings settings = simple_settings(4, peer_elements, 2, 0);
    struct lossynet_comm *comm;
    fake.hear = NULL;
    assert_int_equal(ln_comm_open(&world, &settings, fake_open, &comm), LOSSYNET_OK);
    return comm;
}

/* An ABORT in one peer's name ends nothing while that peer goes on; that of a second one does. */
static void test_forged_abort(void **state) {
    (void)state;
    struct lossynet_comm *comm = open_four();
    struct ln_transport *t = comm->transport;
    uint8_t datagram[WIRE_HEADER_BYTES + WIRE_STATE_BYTES] = {0};
    struct wire_header h = data_header(comm, 0, 0);
    h.receiver = 0;
    for (int peer = 1; peer < 4; peer++) {
        h.sender = (uint16_t)peer;
        for (int type = WIRE_ABORT; type; type = type == WIRE_ABORT && peer == 1 ? WIRE_STATE : 0) {
            h.type = (uint8_t)type;
            wire_encode(datagram, &h);
            feed_bytes(comm, datagram, sizeof datagram, true, peer);
            ln_threads_enter(t);
            if (type == WIRE_ABORT) assert_true(t->peers[peer].live.aborted > 0);
            assert_int_equal(t->failed, peer < 3 ? LOSSYNET_OK : LOSSYNET_LINK);
            if (type == WIRE_ABORT) t->peers[peer].live.aborted -= 1; /* a while ago */
            if (type == WIRE_STATE) assert_true(t->peers[peer].live.aborted == 0);
            ln_threads_leave(t);
        }
        if (peer == 2) capture_begin();
    }
    assert_message(capture_end(), "peer rank 2 has failed"); /* the first one; rank 1 went on */
    lossynet_close(comm);
}

/* A relay sends on directly what a peer itself has sent, even if its own datagrams go another way:
 * that may be out of date, and the sender finds out what arrives. It sends nothing on that is larger than
 * the datagrams of this run. */
static void test_a_relay(void **state) {
    (void)state;
    fake.room = 64;
    struct lossynet_comm *comm = open_four();
    struct ln_transport *t = comm->transport;
    struct wire_header h = data_header(comm, LOSSYNET_GRADIENT, 0);
    h.receiver = 2;
    ln_threads_enter(t);
    t->peers[2].detour.way = WAY_BY + 3;
    ln_threads_leave(t);
    for (int sender = 1; sender < 4; sender += 2) { /* all from rank 1 */
        h.sender = (uint16_t)sender;
        feed(comm, h, 64);
        assert_int_equal(t->receiver.relayed.packets[LOSSYNET_GRADIENT], 1);
        assert_int_equal(t->receiver.rejected.invalid, sender != 1);
    }
    h.sender = 1;
    feed(comm, h, 68);
    assert_int_equal(t->receiver.relayed.packets[LOSSYNET_GRADIENT], 1);
    assert_int_equal(t->receiver.rejected.invalid, 2);
    fake.room = 0;
    ln_threads_enter(t);
    t->failed = LOSSYNET_LINK; /* so that it says ABORT and waits for nobody */
    ln_threads_leave(t);
    lossynet_close(comm);
}

/* The header is the first part of a datagram. */
static void only_the_first_path(int peer, const uint8_t *header) {
    const struct ln_datagram *d = (const struct ln_datagram *)(const void *)header;
    assert_int_equal(peer, 1);
    assert_int_equal(d->path, 0);
    assert_int_equal(d->bulk, false);
}

/* What earlier calls left on the stack. */
static void __attribute__((noinline)) leave_traces(void) {
    volatile uint8_t traces[1 << 16];
    for (size_t i = 0; i < sizeof traces; i++) traces[i] = 1;
}

/* Before a run a rank looks at the network with datagrams of the first path and the default class. */
static void test_a_look_at_the_network(void **state) {
    (void)state;
    const struct ln_transport_settings settings = {
        .world = {.rank = 0, .ranks = 2, .share = fake_exchange}};
    const int node[2] = {0, 1};
    struct lossynet_path path[4];
    const char *name;
    fake.hear = only_the_first_path;
    leave_traces();
    assert_int_equal(ln_transport_probe(&settings, fake_open, node, 0.01, path, &name),
                     LOSSYNET_OK);
    assert_string_equal(name, "test");
    assert_true(path[1].sent > 0);
}

/* A link whose queue strangers keep full does not hide that a peer is silent. */
static void test_a_flood(void **state) {
    (void)state;
    for (int floods = 0; floods < 2; floods++) {
        struct lossynet_world world = {.rank = 0, .ranks = 2, .share = fake_exchange};
        struct lossynet_settings settings = simple_settings(4, peer_elements, 2, 0);
        struct lossynet_comm *comm;
        uint64_t mine[2] = {0}, all[4];
        settings.network.peer_timeout = 0.3;
        fake.hear = NULL;
        fake.floods = floods;
        assert_int_equal(ln_comm_open(&world, &settings, fake_open, &comm), LOSSYNET_OK);
        capture_begin();
        assert_int_equal(lossynet_all_gather(comm, mine, all, sizeof *mine), LOSSYNET_LINK);
        const char *silence = strstr(capture_end(), "was not heard for ");
        assert_true(silence && atof(silence + strlen("was not heard for ")) < 60);
        fake.floods = false;
        lossynet_close(comm);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forged_abort),
        cmocka_unit_test(test_a_relay),
        cmocka_unit_test(test_a_look_at_the_network),
        cmocka_unit_test(test_a_flood),
    };
    return cmocka_run_group_tests_name("lossynet, relays", tests, NULL, NULL);
}
