/* test_membership.c — tests membership.h and the store of etcd.h with a real etcd, which this test
 * starts. It is skipped if etcd is not installed. Members are threads of this process.
 * Takes 20 s. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

#include "llmc/log/error.h"
#include "llmc/membership/etcd.h"
#include "llmc/membership/membership.h"
#include "llmc/membership/reach.h"
#include "test/support/llmc_test.h"

enum { PATIENCE = 60 }; /* seconds after which something will not come any more */

static void doze(void) {
    nanosleep(&(struct timespec){0, 20000000}, NULL);
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Waits until the expression holds. */
#define comes(expression)                                                                          \
    do {                                                                                           \
        const double end_ = seconds() + PATIENCE;                                                  \
        while (!(expression)) {                                                                    \
            if (seconds() > end_) fail_msg("%s: %s does not come", __func__, #expression);         \
            doze();                                                                                \
        }                                                                                          \
    } while (0)

/* What the store answers. On a busy machine it may answer too late, and is asked again. */
#define assert_answer(request, expected)                                                           \
    do {                                                                                           \
        enum store_status answer_;                                                                 \
        comes((answer_ = (request)) != STORE_AWAY);                                                \
        assert_int_equal(answer_, expected);                                                       \
    } while (0)

#define assert_keys(store, prefix, expected)                                                       \
    do {                                                                                           \
        int keys_;                                                                                 \
        comes((keys_ = keys(store, prefix)) >= 0);                                                 \
        assert_int_equal(keys_, expected);                                                         \
    } while (0)

/* A TCP socket that listens at a free port of the loopback interface. */
static int listening(int *port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof a;
    const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(s >= 0 && !bind(s, (struct sockaddr *)&a, sizeof a) && !listen(s, 128));
    assert_int_equal(getsockname(s, (struct sockaddr *)&a, &bytes), 0);
    *port = ntohs(a.sin_port);
    return s;
}

/* ---- etcd ---- */

static int client_port, peer_port;
static pid_t etcd_process;

static void etcd_start(void) {
    char client[64], peer[64], cluster[80];
    snprintf(client, sizeof client, "http://127.0.0.1:%d", client_port);
    snprintf(peer, sizeof peer, "http://127.0.0.1:%d", peer_port);
    snprintf(cluster, sizeof cluster, "default=%s", peer);
    const char *data = in_scratch("etcd"), *log = in_scratch("etcd.log");
    etcd_process = fork();
    assert_true(etcd_process >= 0);
    if (!etcd_process) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        const int file = open(log, O_CREAT | O_WRONLY | O_APPEND, 0600);
        dup2(file, STDOUT_FILENO);
        dup2(file, STDERR_FILENO);
        execlp("etcd", "etcd", "--data-dir", data, "--listen-client-urls", client,
               "--advertise-client-urls", client, "--listen-peer-urls", peer,
               "--initial-advertise-peer-urls", peer, "--initial-cluster", cluster, (char *)NULL);
        _exit(127);
    }
}

static void etcd_stop(void) {
    kill(etcd_process, SIGKILL);
    waitpid(etcd_process, NULL, 0);
}

static struct store *connected(void) {
    struct store *s;
    assert_int_equal(etcd_open("127.0.0.1", client_port, &s), 0);
    return s;
}

static int keys(struct store *s, const char *prefix) {
    struct store_entries e;
    if (s->list(s, prefix, &e) != STORE_DONE) return -1;
    const int count = e.count;
    store_entries_clear(&e);
    return count;
}

static int begin_tests(void **state) {
    /* etcd waits for the disk at every write, which takes long where others write, too. */
    if (!access("/dev/shm", W_OK)) setenv("TMPDIR", "/dev/shm", 0);
    if (make_scratch(state)) return -1;
    close(listening(&client_port));
    close(listening(&peer_port));
    etcd_start();
    struct store *s = connected();
    comes(keys(s, "x/") == 0);
    s->close(s);
    return 0;
}

static int end_tests(void **state) {
    etcd_stop();
    return remove_scratch(state);
}

/* ---- the store ---- */

static int64_t revision_of(struct store *s, const char *key, char value[64]) {
    struct store_entries e;
    int64_t revision = 0;
    assert_answer(s->list(s, key, &e), STORE_DONE);
    for (int i = 0; i < e.count; i++)
        if (!strcmp(e.entry[i].key, key)) {
            revision = e.entry[i].modified;
            snprintf(value, 64, "%s", e.entry[i].value);
        }
    store_entries_clear(&e);
    return revision;
}

static enum store_status put(struct store *s, const char *key, int64_t modified, const char *value,
                             int64_t lease) {
    return s->commit(s, key, modified, &(struct store_write){key, value, lease}, 1);
}

static void test_one_of_two_writes_wins(void **state) {
    (void)state;
    struct store *a = connected(), *b = connected();
    static const char TEXT[] = "{\"a\":\"\\u00e4 \xc3\xa4\"}";
    char value[64];
    assert_answer(put(a, "store/k", 0, TEXT, 0), STORE_DONE);
    assert_answer(put(b, "store/k", 0, "b", 0), STORE_CHANGED);
    const int64_t first = revision_of(b, "store/k", value);
    assert_string_equal(value, TEXT);
    assert_answer(put(b, "store/k", first, "b", 0), STORE_DONE);
    assert_answer(put(a, "store/k", first, "a", 0), STORE_CHANGED);
    assert_answer(put(b, "store/k", first, "b", 0), STORE_DONE); /* it has made this write */
    assert_true(revision_of(a, "store/k", value) > first);
    assert_string_equal(value, "b");
    /* All or nothing, also where a key is removed. */
    const struct store_write both[] = {{"store/other", "", 0}, {"store/k", NULL, 0}};
    assert_answer(a->commit(a, "store/k", first, both, 2), STORE_CHANGED);
    assert_keys(a, "store/", 1);
    assert_answer(a->commit(a, "store/k", revision_of(a, "store/k", value), both, 2), STORE_DONE);
    assert_keys(b, "store/", 1);
    assert_int_equal(revision_of(b, "store/k", value), 0);
    assert_true(revision_of(b, "store/other", value) > 0);
    assert_string_equal(value, "");
    assert_answer(
        a->commit(a, "store/none", 0, (const struct store_write[]){{"store/other", NULL, 0}}, 1),
        STORE_DONE);
    a->close(a);
    b->close(b);
}

static void test_keys_come_in_the_order_of_their_making(void **state) {
    (void)state;
    struct store *s = connected();
    static const char *const names[] = {"order/c", "order/a", "order/b"};
    struct store_entries e;
    for (int i = 0; i < 3; i++) assert_answer(put(s, names[i], 0, "x", 0), STORE_DONE);
    assert_answer(put(s, "orders/d", 0, "x", 0), STORE_DONE);
    assert_answer(s->list(s, "order/", &e), STORE_DONE);
    assert_int_equal(e.count, 3);
    for (int i = 0; i < 3; i++) assert_string_equal(e.entry[i].key, names[i]);
    store_entries_clear(&e);
    s->close(s);
}

static void test_a_lease_ends(void **state) {
    (void)state;
    struct store *s = connected();
    int64_t kept, lapsed;
    assert_answer(s->grant(s, PATIENCE, &kept), STORE_DONE);
    assert_answer(put(s, "lease/kept", 0, "x", kept), STORE_DONE);
    comes(s->grant(s, 1, &lapsed) == STORE_DONE &&
          put(s, "lease/lapsed", 0, "x", lapsed) == STORE_DONE);
    comes(keys(s, "lease/") == 1);
    assert_answer(s->keep(s, kept), STORE_DONE);
    assert_answer(s->keep(s, lapsed), STORE_CHANGED);
    assert_int_equal(put(s, "lease/lapsed", 0, "x", lapsed), STORE_AWAY);
    assert_non_null(strstr(s->why, "lease not found"));
    s->close(s);
}

static void test_etcd_is_restarted(void **state) {
    (void)state;
    struct store *s = connected();
    int64_t lease;
    char before[64], after[64];
    assert_answer(s->grant(s, PATIENCE, &lease), STORE_DONE);
    assert_answer(put(s, "store/view", 0, "seven", 0), STORE_DONE);
    assert_answer(put(s, "store/member", 0, "x", lease), STORE_DONE);
    const int64_t revision = revision_of(s, "store/view", before);
    etcd_stop();
    assert_int_equal(keys(s, "store/"), -1);
    assert_true(strlen(s->why) > 0);
    etcd_start();
    comes(keys(s, "store/") == 2);
    assert_int_equal(revision_of(s, "store/view", after), revision);
    assert_string_equal(after, "seven");
    comes(s->keep(s, lease) == STORE_DONE);
    s->close(s);
}

/* A store that answers a request only while another connection waits for an answer, as if packets
 * of that one were lost. */
static void *answer_second_tries(void *user) {
    static const char ANSWER[] = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}";
    enum { CONNECTIONS = 64 };
    struct pollfd wait[1 + CONNECTIONS] = {{*(int *)user, POLLIN, 0}};
    bool asks[1 + CONNECTIONS] = {false};
    int open = 1, waits = 0;
    char request[4096];
    while (poll(wait, (nfds_t)open, -1) > 0 && !(wait[0].revents & POLLHUP)) {
        for (int i = 1; i < open; i++) {
            if (!wait[i].revents) continue;
            const bool more = recv(wait[i].fd, request, sizeof request, 0) > 0;
            const bool answers = more && waits > asks[i];
            if (answers) send(wait[i].fd, ANSWER, strlen(ANSWER), MSG_NOSIGNAL);
            waits += (more && !answers) - asks[i];
            asks[i] = more && !answers;
            if (more) continue;
            close(wait[i].fd);
            wait[i].fd = -1;
        }
        if (!wait[0].revents) continue;
        assert_true(open <= CONNECTIONS);
        wait[open++] = (struct pollfd){accept(wait[0].fd, NULL, NULL), POLLIN, 0};
    }
    for (int i = 1; i < open; i++) close(wait[i].fd);
    return NULL;
}

static void test_a_request_is_sent_again_over_another_connection(void **state) {
    (void)state;
    pthread_t thread;
    int port, found = -1, listener = listening(&port);
    assert_int_equal(pthread_create(&thread, NULL, answer_second_tries, &listener), 0);
    for (int i = 0; i < 5 && found < 0; i++) { /* on a busy machine the second may come too late */
        struct store *s;
        assert_int_equal(etcd_open("127.0.0.1", port, &s), 0);
        found = keys(s, "x/");
        s->close(s);
    }
    shutdown(listener, SHUT_RDWR);
    pthread_join(thread, NULL);
    close(listener);
    assert_int_equal(found, 0);
}

/* ---- who can be reached ---- */

static void test_who_listens_is_reached(void **state) {
    (void)state;
    static const char *const wrong[] = {"",   "127.0.0.1",  "host:1", "[127.0.0.1:1",
                                        ":1", "127.0.0.1:x"};
    enum { WRONG = sizeof wrong / sizeof *wrong, ALL = WRONG + 2 };
    struct member m[ALL] = {0};
    enum reached reached[ALL];
    int port, closed;
    const int s = listening(&port);
    close(listening(&closed));
    snprintf(m[0].address, sizeof m[0].address, "127.0.0.1:%d", port);
    snprintf(m[1].address, sizeof m[1].address, "127.0.0.1:%d", closed);
    for (int i = 0; i < WRONG; i++)
        snprintf(m[2 + i].address, sizeof m[2 + i].address, "%s", wrong[i]);
    reach_members(m, ALL, reached);
    assert_int_equal(reached[0], REACHED);
    assert_int_equal(reached[1], REACHED_REFUSED);
    for (int i = 2; i < ALL; i++) assert_int_equal(reached[i], REACHED_NOT);
    /* More than are asked at once. */
    struct member *many = (struct member *)calloc(200, sizeof *many);
    enum reached all[200];
    assert_non_null(many);
    for (int i = 0; i < 200; i++) many[i] = m[i % 3 == 0 ? 0 : 1];
    reach_members(many, 200, all);
    for (int i = 0; i < 200; i++) assert_int_equal(all[i], i % 3 ? REACHED_REFUSED : REACHED);
    free(many);
    close(s);
}

/* ---- members ---- */

struct player {
    pthread_t thread;
    struct membership *m;
    int socket, port, ranks, status;
    const char *run, *version;
    double rate;
    const char *key; /* NULL: the run has none */
    bool anew, alone /* takes nobody in */, missing[8];
};

static struct player player(const char *run, int ranks) {
    struct player p = {.run = run, .ranks = ranks, .version = "1.0", .rate = 0.5};
    p.socket = listening(&p.port);
    return p;
}

static int listen_already(void *context, const char *address) {
    assert_string_equal(address, "127.0.0.1");
    return ((const struct player *)context)->port;
}

/* Stands for an HMAC: the text, and the key at its end. */
static int make_proof(void *context, const char *text, char proof[65]) {
    const size_t length = strlen(text), most = 60;
    snprintf(proof, 65, "%s%s", text + (length > most ? length - most : 0),
             ((const struct player *)context)->key);
    return 0;
}

static void *open_one(void *user) {
    struct player *p = (struct player *)user;
    char url[100];
    snprintf(url, sizeof url, "etcd://127.0.0.1:%d/%s", client_port, p->run);
    json_t *options = json_object();
    json_object_set_new(options, "lr", json_real(p->rate));
    json_object_set_new(options, "seq", json_integer(256));
    const struct membership_settings settings = {.url = url,
                                                 .first_ranks = p->ranks,
                                                 .listen = listen_already,
                                                 .prove = p->key ? make_proof : NULL,
                                                 .context = p,
                                                 .version = p->version,
                                                 .options = options,
                                                 .anew = p->anew};
    p->status = membership_open(&settings, &p->m);
    json_decref(options);
    return NULL;
}

static void *next_one(void *user) {
    struct player *p = (struct player *)user;
    p->status = membership_next_view(p->m, p->missing, !p->alone);
    return NULL;
}

static void start(struct player *p, void *(*what)(void *)) {
    assert_int_equal(pthread_create(&p->thread, NULL, what, p), 0);
}

static int wait_for(struct player *p) {
    pthread_join(p->thread, NULL);
    return p->status;
}

static void leave(struct player *p) {
    membership_close(p->m);
    close(p->socket);
}

static const struct view *view(const struct player *p) {
    return membership_view(p->m);
}

/* Both are in one view, at these ranks. */
static void assert_together(const struct player *a, int a_rank, const struct player *b,
                            int b_rank) {
    assert_int_equal(view(a)->epoch, view(b)->epoch);
    assert_int_equal(view(a)->members, view(b)->members);
    assert_memory_equal(view(a)->member, view(b)->member,
                        (size_t)view(a)->members * sizeof *view(a)->member);
    assert_int_equal(view(a)->self, a_rank);
    assert_int_equal(view(b)->self, b_rank);
}

/* Two that have opened a run together; p[0] is rank 0. */
static void two(const char *run, struct player p[2]) {
    for (int i = 0; i < 2; i++) {
        p[i] = player(run, 2);
        start(&p[i], open_one);
    }
    for (int i = 0; i < 2; i++) assert_int_equal(wait_for(&p[i]), 0);
    if (view(&p[0])->self != 0) {
        const struct player first = p[1];
        p[1] = p[0];
        p[0] = first;
    }
    assert_together(&p[0], 0, &p[1], 1);
    assert_int_equal(view(&p[0])->epoch, 1);
    assert_int_equal(view(&p[0])->members, 2);
}

static void test_two_meet_and_a_third_joins(void **state) {
    (void)state;
    struct player p[2], third = player("join", 2);
    char address[64];
    two("join", p);
    snprintf(address, sizeof address, "127.0.0.1:%d", p[1].port);
    assert_string_equal(view(&p[0])->member[1].address, address);
    assert_int_equal(view(&p[0])->member[1].pid, getpid());
    start(&third, open_one);
    comes(membership_has_changed(p[0].m));
    for (int i = 0; i < 2; i++) start(&p[i], next_one);
    for (int i = 0; i < 2; i++) assert_int_equal(wait_for(&p[i]), 0);
    assert_int_equal(wait_for(&third), 0);
    assert_together(&p[0], 0, &p[1], 1);
    assert_together(&p[0], 0, &third, 2);
    assert_int_equal(view(&third)->member[1].joined, 1);
    assert_int_equal(view(&third)->member[2].joined, view(&third)->epoch);
    leave(&p[0]); /* dies, for the others */
    p[1].missing[0] = third.missing[0] = true;
    start(&p[1], next_one);
    start(&third, next_one);
    assert_int_equal(wait_for(&p[1]) | wait_for(&third), 0);
    assert_together(&p[1], 0, &third, 1);
    assert_int_equal(view(&third)->members, 2);
    leave(&p[1]);
    leave(&third);
}

/* After a view that was not begun: who waits may be the reason. */
static void test_who_waits_is_not_taken_in_after_a_failure(void **state) {
    (void)state;
    struct player p[2], third = player("alone", 2);
    two("alone", p);
    start(&third, open_one);
    comes(membership_has_changed(p[0].m));
    for (int i = 0; i < 2; i++) {
        p[i].alone = true;
        start(&p[i], next_one);
    }
    for (int i = 0; i < 2; i++) assert_int_equal(wait_for(&p[i]), 0);
    assert_together(&p[0], 0, &p[1], 1);
    assert_int_equal(view(&p[0])->members, 2);
    assert_int_equal(view(&p[0])->epoch, 2);
    comes(membership_has_changed(p[0].m));
    for (int i = 0; i < 2; i++) {
        p[i].alone = false;
        start(&p[i], next_one);
    }
    for (int i = 0; i < 2; i++) assert_int_equal(wait_for(&p[i]), 0);
    assert_int_equal(wait_for(&third), 0);
    assert_together(&p[0], 0, &third, 2);
    for (int i = 0; i < 2; i++) leave(&p[i]);
    leave(&third);
}

/* Who writes to the store without the run's key is not taken in, and does not stand in for another
 * process either, whose address it gives as its own. */
static void test_who_has_no_key_is_not_taken_in(void **state) {
    (void)state;
    struct player p[2], third = player("key", 2), stranger = player("key", 2), false_third;
    for (int i = 0; i < 2; i++) {
        p[i] = player("key", 2);
        p[i].key = "a";
        start(&p[i], open_one);
    }
    for (int i = 0; i < 2; i++) assert_int_equal(wait_for(&p[i]), 0);
    if (view(&p[0])->self != 0) {
        const struct player first = p[1];
        p[1] = p[0], p[0] = first;
    }
    third.key = "a";
    false_third = third;
    stranger.key = false_third.key = "b";
    start(&stranger, open_one);
    start(&third, open_one);
    comes(membership_has_changed(p[0].m));
    start(&false_third, open_one);
    for (int i = 0; i < 2; i++) start(&p[i], next_one);
    for (int i = 0; i < 2; i++) assert_int_equal(wait_for(&p[i]), 0);
    assert_int_equal(wait_for(&third), 0);
    assert_int_equal(view(&p[0])->members, 3);
    assert_together(&p[0], 0, &third, 2);
    assert_int_equal(membership_complete(p[0].m), 0);
    assert_int_equal(wait_for(&stranger), 1); /* the run is complete without it */
    assert_int_equal(wait_for(&false_third), 1);
    for (int i = 0; i < 2; i++) leave(&p[i]);
    leave(&third);
    close(stranger.socket);
}

static void test_who_is_left_out_comes_back_as_new(void **state) {
    (void)state;
    struct player p[2];
    char uid[24];
    two("left", p);
    memcpy(uid, view(&p[1])->member[1].uid, sizeof uid);
    p[0].missing[1] = true;
    start(&p[0], next_one);
    assert_int_equal(wait_for(&p[0]), 0);
    assert_int_equal(view(&p[0])->members, 1);
    comes(membership_has_changed(p[1].m));
    start(&p[1], next_one);
    comes(membership_has_changed(p[0].m));
    p[0].missing[1] = false;
    start(&p[0], next_one);
    assert_int_equal(wait_for(&p[0]) | wait_for(&p[1]), 0);
    assert_together(&p[0], 0, &p[1], 1);
    assert_string_not_equal(view(&p[0])->member[1].uid, uid);
    assert_int_equal(view(&p[0])->member[1].joined, view(&p[0])->epoch);
    leave(&p[0]);
    leave(&p[1]);
}

static void test_a_rank_stands_still_without_the_store(void **state) {
    (void)state;
    struct player p[2];
    two("still", p);
    etcd_stop();
    leave(&p[1]);
    p[0].missing[1] = true;
    capture_begin();
    start(&p[0], next_one);
    struct stat said = {0};
    comes(!fstat(fileno(capture_file), &said) && said.st_size > 0);
    etcd_start();
    assert_int_equal(wait_for(&p[0]), 0);
    catch_end();
    assert_caught("this rank stands still until it does", __FILE__, __LINE__);
    assert_int_equal(view(&p[0])->members, 1);
    leave(&p[0]);
}

/* etcd hangs for longer than a request may take, and then goes on. */
static void test_a_process_starts_while_the_store_hangs(void **state) {
    (void)state;
    struct player p = player("hangs", 1);
    kill(etcd_process, SIGSTOP);
    start(&p, open_one);
    nanosleep(&(struct timespec){.tv_sec = 2, .tv_nsec = 300000000}, NULL);
    kill(etcd_process, SIGCONT);
    assert_int_equal(wait_for(&p), 0);
    leave(&p);
}

static void assert_refused(struct player p, const char *text) {
    capture_begin();
    start(&p, open_one);
    const int status = wait_for(&p);
    catch_end();
    assert_int_equal(status, -1);
    assert_null(p.m);
    assert_caught(text, __FILE__, __LINE__);
    close(p.socket);
}

static void test_other_options_are_refused(void **state) {
    (void)state;
    struct player p[2], other = player("options", 1), older = player("options", 1);
    two("options", p);
    other.rate = 0.25;
    assert_refused(other, "option lr is 0.25 here and 0.5 in run options");
    older.version = "0.9";
    assert_refused(older,
                   "this program is version 0.9, and run options was begun with version 1.0");
    struct store *s = connected();
    assert_keys(s, "options/member/", 2);
    leave(&p[1]);
    assert_keys(s, "options/member/", 1);
    leave(&p[0]);
    assert_keys(s, "options/member/", 0);
    s->close(s);
}

static void test_keys_of_another_program_are_refused(void **state) {
    (void)state;
    struct store *s = connected();
    assert_answer(put(s, "foreign/view", 0, "hello", 0), STORE_DONE);
    assert_refused(player("foreign", 1), "foreign/view does not hold a view");
    assert_answer(put(s, "strange/options", 0, "hello", 0), STORE_DONE);
    assert_refused(player("strange", 1), "strange/options holds no options");
    s->close(s);
}

static int lines_captured(void) {
    char text[4096];
    const ssize_t bytes = pread(fileno(capture_file), text, sizeof text, 0);
    int lines = 0;
    for (ssize_t i = 0; i < bytes; i++) lines += text[i] == '\n';
    return lines;
}

/* Somebody overwrites the view of a run that trains: each member says so once, and not at each
 * look. */
static void test_an_overwritten_view_is_told_once(void **state) {
    (void)state;
    struct player p[2];
    struct store *s = connected();
    two("spoiled", p);
    char was[64];
    const int64_t revision = revision_of(s, "spoiled/view", was);
    capture_begin();
    assert_answer(put(s, "spoiled/view", revision, "hello", 0), STORE_DONE);
    comes(lines_captured() >= 2);
    nanosleep(&(struct timespec){.tv_sec = 2}, NULL);
    assert_int_equal(lines_captured(), 2);
    capture_end();
    for (int i = 0; i < 2; i++) leave(&p[i]);
    s->close(s);
}

static void test_a_store_that_is_not_there(void **state) {
    (void)state;
    const int port = client_port;
    int unused;
    close(listening(&unused));
    client_port = unused;
    assert_refused(player("nowhere", 1), "is etcd running there?");
    client_port = port;
}

static void test_a_complete_run_is_not_joined(void **state) {
    (void)state;
    struct player p[2], late = player("complete", 1);
    two("complete", p);
    assert_int_equal(membership_complete(p[0].m), 0);
    assert_int_equal(membership_complete(p[0].m), 0);
    start(&late, open_one);
    assert_int_equal(wait_for(&late), 1);
    assert_null(late.m);
    start(&p[1], next_one);
    assert_int_equal(wait_for(&p[1]), 1);
    leave(&p[0]);
    leave(&p[1]);
    close(late.socket);
}

/* The members stop while a process that they have left out is away. It stops, too, and a process that
 * has never been in the run waits for the next start. */
static void test_who_was_left_out_stops_with_the_others(void **state) {
    (void)state;
    struct player p[2], late = player("stopped", 1);
    two("stopped", p);
    p[0].missing[1] = true;
    start(&p[0], next_one);
    assert_int_equal(wait_for(&p[0]), 0);
    assert_int_equal(membership_dissolve(p[0].m), 0);
    leave(&p[0]);
    start(&p[1], next_one);
    assert_int_equal(wait_for(&p[1]), 1);
    leave(&p[1]);
    start(&late, open_one);
    assert_int_equal(wait_for(&late), 0);
    assert_int_equal(view(&late)->epoch, 4); /* the third is empty */
    leave(&late);
}

static void *dissolve_one(void *user) {
    struct player *p = (struct player *)user;
    p->status = membership_dissolve(p->m);
    return NULL;
}

/* Rank 0 ends the view, and rank 1 waits for that. If rank 0 dies before, rank 1 does it. */
static void test_rank_0_ends_the_view_or_dies(void **state) {
    (void)state;
    struct player p[2], left = player("ended", 1);
    for (int dies = 0; dies < 2; dies++) {
        two(dies ? "died" : "ended", p);
        start(&p[1], dissolve_one);
        for (int i = 0; i < 10; i++) {
            doze();
            assert_false(membership_has_changed(p[0].m));
        }
        if (dies)
            close(p[0].socket); /* its registration stays for a while */
        else
            assert_int_equal(membership_dissolve(p[0].m), 0);
        assert_int_equal(wait_for(&p[1]), 0);
        start(&p[0], next_one); /* as a process that was left out */
        assert_int_equal(wait_for(&p[0]), 1);
        membership_close(p[0].m);
        if (!dies) close(p[0].socket);
        leave(&p[1]);
    }
    start(&left, open_one);
    assert_int_equal(wait_for(&left), 0);
    assert_int_equal(view(&left)->epoch, 3); /* the second is empty */
    leave(&left);
}

/* All members end without a word to the store: their leases end. */
static void test_a_run_whose_members_are_dead_is_taken_over(void **state) {
    (void)state;
    struct player p[2], heir = player("heir", 2);
    two("heir", p);
    leave(&p[0]);
    leave(&p[1]);
    heir.anew = true;
    heir.ranks = 1;
    start(&heir, open_one);
    assert_int_equal(wait_for(&heir), 0);
    assert_int_equal(view(&heir)->epoch, 2);
    assert_int_equal(view(&heir)->members, 1);
    assert_int_equal(view(&heir)->member[0].joined, 2);
    leave(&heir);
}

/* ---- hearing of writes ---- */

static enum etcd_watch_result heard(struct etcd_watch *w, double seconds) {
    return etcd_watch_wait(w, true, seconds);
}

/* Until nothing is heard any more: a new connection is heard, too. */
static void hear_all(struct etcd_watch *w) {
    comes(heard(w, 0.1) == ETCD_WATCH_WRITTEN);
    while (heard(w, 0.3) == ETCD_WATCH_WRITTEN) continue;
}

static void test_writes_are_heard(void **state) {
    (void)state;
    struct etcd_watch *w;
    struct store *s = connected();
    assert_int_equal(etcd_watch_open("127.0.0.1", client_port, "store/heard/", &w), 0);
    hear_all(w);
    assert_answer(put(s, "store/away", 0, "1", 0), STORE_DONE);
    assert_answer(put(s, "store/deaf", 0, "1", 0), STORE_DONE);
    assert_int_equal(heard(w, 0.3), ETCD_WATCH_TIME);
    assert_answer(put(s, "store/heard/a", 0, "1", 0), STORE_DONE);
    assert_int_equal(heard(w, 100), ETCD_WATCH_WRITTEN);
    assert_int_equal(heard(w, 0.3), ETCD_WATCH_TIME);
    char value[64];
    const int64_t first = revision_of(s, "store/heard/a", value);
    /* What is removed is no news; nor is what is written while nobody listens, until one connects. */
    assert_answer(put(s, "store/heard/a", first, NULL, 0), STORE_DONE);
    assert_int_equal(heard(w, 0.3), ETCD_WATCH_TIME);
    assert_int_equal(etcd_watch_wait(w, false, 0), ETCD_WATCH_TIME);
    assert_answer(put(s, "store/heard/b", 0, "1", 0), STORE_DONE);
    assert_int_equal(etcd_watch_wait(w, false, 0.3), ETCD_WATCH_TIME);
    hear_all(w);
    /* The store is away, and comes back. */
    etcd_stop();
    for (int i = 0; i < 3; i++) assert_int_equal(heard(w, 0.3), ETCD_WATCH_TIME);
    etcd_start();
    hear_all(w);
    comes(keys(s, "store/heard/") == 1);
    assert_answer(put(s, "store/heard/c", 0, "1", 0), STORE_DONE);
    assert_int_equal(heard(w, 100), ETCD_WATCH_WRITTEN);
    etcd_watch_end(w);
    assert_int_equal(heard(w, 100), ETCD_WATCH_ENDED);
    etcd_watch_close(w);
    s->close(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_of_two_writes_wins),
        cmocka_unit_test(test_keys_come_in_the_order_of_their_making),
        cmocka_unit_test(test_a_lease_ends),
        cmocka_unit_test(test_etcd_is_restarted),
        cmocka_unit_test(test_a_request_is_sent_again_over_another_connection),
        cmocka_unit_test(test_who_listens_is_reached),
        cmocka_unit_test(test_writes_are_heard),
        cmocka_unit_test(test_two_meet_and_a_third_joins),
        cmocka_unit_test(test_who_waits_is_not_taken_in_after_a_failure),
        cmocka_unit_test(test_who_has_no_key_is_not_taken_in),
        cmocka_unit_test(test_who_is_left_out_comes_back_as_new),
        cmocka_unit_test(test_a_rank_stands_still_without_the_store),
        cmocka_unit_test(test_a_process_starts_while_the_store_hangs),
        cmocka_unit_test(test_other_options_are_refused),
        cmocka_unit_test(test_keys_of_another_program_are_refused),
        cmocka_unit_test(test_an_overwritten_view_is_told_once),
        cmocka_unit_test(test_a_store_that_is_not_there),
        cmocka_unit_test(test_a_complete_run_is_not_joined),
        cmocka_unit_test(test_who_was_left_out_stops_with_the_others),
        cmocka_unit_test(test_rank_0_ends_the_view_or_dies),
        cmocka_unit_test(test_a_run_whose_members_are_dead_is_taken_over),
    };
    if (!etcd_built() || system("command -v etcd >/dev/null")) {
        puts("etcd is not installed (package etcd-server), or libcurl was not when this was built");
        return 77;
    }
    return cmocka_run_group_tests(tests, begin_tests, end_tests);
}
