/* test_rendezvous.c — tests how ranks meet without MPI (lossynet/rendezvous.c). Each rank is a
 * thread with its own world, and they meet over loopback. */
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/socket.h>

#include "test/lossynet/test_lossynet.h"

enum { RANKS = 4 };

static char address[32];
static char messages[4096];

static void keep_message(void *context, const char *message) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    (void)context;
    pthread_mutex_lock(&lock);
    size_t used = strlen(messages);
    snprintf(messages + used, sizeof messages - used, "%s\n", message);
    pthread_mutex_unlock(&lock);
}

static void assert_said(const char *text) {
    if (!strstr(messages, text)) fail_msg("expected '%s' in: %s", text, messages);
}

/* A port of loopback that was free a moment ago, and nothing said so far. */
static int begin(void **state) {
    (void)state;
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t bytes = sizeof any;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&any, bytes) ||
        getsockname(fd, (struct sockaddr *)&any, &bytes))
        return -1;
    close(fd);
    snprintf(address, sizeof address, "127.0.0.1:%d", ntohs(any.sin_port));
    messages[0] = '\0';
    ln_log_to(keep_message, NULL);
    return 0;
}

/* ---- ranks are threads ---- */

struct rank {
    int rank, ranks;
    double seconds;
    size_t bytes; /* of what it shares, up to 65536; 0: it opens a comm instead */
    pthread_t thread;
    struct lossynet_world world;
    lossynet_status met, shared;
    uint8_t all[RANKS * 65536];
    float vector[1000];
};

static lossynet_status average(struct rank *self) {
    const size_t elements = sizeof self->vector / sizeof *self->vector;
    struct lossynet_settings settings = simple_settings(self->ranks, &elements, 1, 0);
    settings.link = LOSSYNET_LINK_UDP;
    settings.log = keep_message;
    struct lossynet_comm *comm;
    float *vectors[] = {self->vector};
    for (size_t i = 0; i < elements; i++) self->vector[i] = (float)self->rank;
    lossynet_status status = lossynet_open(&self->world, &settings, &comm);
    if (status) return status;
    status = lossynet_step_begin(comm, 0);
    if (!status) status = lossynet_reduce(comm, vectors, true);
    if (!status) status = lossynet_broadcast(comm, vectors, true);
    lossynet_close(comm);
    return status;
}

static void *live(void *argument) {
    struct rank *self = argument;
    self->met =
        lossynet_rendezvous_open(address, self->rank, self->ranks, self->seconds, &self->world);
    if (self->met) return NULL;
    if (self->bytes) {
        memset(self->all + (size_t)self->rank * self->bytes, self->rank + 1, self->bytes);
        self->shared = lossynet_bootstrap_gather(&self->world, self->all, self->bytes);
    } else {
        self->shared = average(self);
    }
    lossynet_rendezvous_close(&self->world);
    return NULL;
}

static struct rank *take_ranks(int ranks, double seconds, size_t bytes) {
    struct rank *all = calloc((size_t)ranks, sizeof *all);
    assert_non_null(all);
    for (int r = 0; r < ranks; r++) {
        all[r].rank = r;
        all[r].ranks = ranks;
        all[r].seconds = seconds;
        all[r].bytes = bytes;
    }
    return all;
}

/* The last rank comes first, so that it must wait for rank 0. */
static void live_all(struct rank *all, int ranks) {
    for (int r = ranks; r-- > 0;)
        assert_int_equal(pthread_create(&all[r].thread, NULL, live, &all[r]), 0);
    for (int r = 0; r < ranks; r++) pthread_join(all[r].thread, NULL);
}

/* ---- cases ---- */

static void ranks_meet_and_share(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 12, 65536};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        struct rank *all = take_ranks(RANKS, 20, sizes[s]);
        live_all(all, RANKS);
        for (int r = 0; r < RANKS; r++) {
            assert_int_equal(all[r].met, LOSSYNET_OK);
            assert_int_equal(all[r].shared, LOSSYNET_OK);
            assert_int_equal(all[r].world.rank, r);
            assert_int_equal(all[r].world.ranks, RANKS);
            assert_int_equal(all[r].world.local_rank, r);
            assert_int_equal(all[r].world.local_ranks, RANKS);
            for (size_t i = 0; i < RANKS * sizes[s]; i++)
                assert_int_equal(all[r].all[i], i / sizes[s] + 1);
        }
        free(all);
        begin(NULL);
    }
    assert_string_equal(messages, "");
}

static void ranks_that_met_average_over_udp(void **state) {
    (void)state;
    struct rank *all = take_ranks(RANKS, 20, 0);
    live_all(all, RANKS);
    for (int r = 0; r < RANKS; r++) {
        assert_int_equal(all[r].met, LOSSYNET_OK);
        assert_int_equal(all[r].shared, LOSSYNET_OK);
        for (int i = 0; i < 1000; i++) assert_close(all[r].vector[i], 1.5, 0);
    }
    free(all);
}

static void a_rank_alone_meets_nobody(void **state) {
    (void)state;
    struct lossynet_world world;
    assert_int_equal(lossynet_rendezvous_open("nowhere", 0, 1, 1, &world), LOSSYNET_OK);
    assert_int_equal(world.local_ranks, 1);
    lossynet_rendezvous_close(&world);
}

static void a_rank_that_does_not_come_is_missed(void **state) {
    (void)state;
    struct lossynet_world world;
    assert_int_equal(lossynet_rendezvous_open(address, 0, 3, 0.1, &world), LOSSYNET_LINK);
    assert_said("2 of 3 ranks have not come in 0.1 s");
    assert_int_equal(lossynet_rendezvous_open(address, 1, 3, 0.1, &world), LOSSYNET_LINK);
    assert_said("rank 1 reaches nobody in 0.1 s");
    lossynet_rendezvous_close(&world); /* does nothing */
}

static void what_makes_no_sense_is_refused(void **state) {
    (void)state;
    struct lossynet_world world;
    assert_int_equal(lossynet_rendezvous_open(address, 2, 2, 1, &world), LOSSYNET_INVALID);
    assert_said("rank 2 of 2, 1 s");
    assert_int_equal(lossynet_rendezvous_open(address, 0, 2, 0, &world), LOSSYNET_INVALID);
    assert_int_equal(lossynet_rendezvous_open("127.0.0.1", 0, 2, 1, &world), LOSSYNET_LINK);
    assert_said("rendezvous '127.0.0.1': expected HOST:PORT");
    assert_int_equal(lossynet_rendezvous_open("192.0.2.1:7000", 0, 2, 1, &world), LOSSYNET_LINK);
    assert_said("expected an address of this host and a free port");
}

static lossynet_status refuse(void *context, const struct lossynet_world *world, void *all,
                              size_t bytes) {
    (void)context, (void)world, (void)all, (void)bytes;
    return LOSSYNET_LINK;
}

static void link_mpi_needs_mpi(void **state) {
    (void)state;
    const struct lossynet_world met = {.ranks = 2, .local_ranks = 2, .share = refuse};
    const size_t elements = 10;
    struct lossynet_settings settings = simple_settings(2, &elements, 1, 0);
    struct lossynet_comm *comm;
    settings.link = LOSSYNET_LINK_MPI;
    assert_int_equal(lossynet_open(&met, &settings, &comm), LOSSYNET_INVALID);
    assert_null(comm);
    assert_said("link mpi: expected ranks that MPI started");
}

static void ranks_started_differently_are_named(void **state) {
    (void)state;
    struct rank *all = take_ranks(2, 5, 8);
    all[1].ranks = 3;
    live_all(all, 2);
    assert_int_equal(all[0].met, LOSSYNET_INVALID);
    assert_said("rank 1 of 3 has come: expected each of the ranks 1 to 1 of 2 once");
    assert_int_equal(all[1].met, LOSSYNET_LINK);
    assert_said("rank 1 was not admitted");
    begin(NULL);
    all[1].ranks = 2;
    all[1].bytes = 12;
    live_all(all, 2);
    assert_int_equal(all[0].shared, LOSSYNET_PROTOCOL);
    assert_said("rank 1 shares 12 bytes, rank 0 8");
    assert_int_equal(all[1].shared, LOSSYNET_LINK);
    assert_said("rank 1 has heard nothing more from rank 0");
    free(all);
}

/* Another program's connection is closed, and the ranks meet. */
static void a_stranger_is_not_counted(void **state) {
    (void)state;
    struct rank *all = take_ranks(2, 20, 8);
    assert_int_equal(pthread_create(&all[0].thread, NULL, live, &all[0]), 0);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    to.sin_port = htons((uint16_t)atoi(strrchr(address, ':') + 1));
    const char text[] = "GET / HTTP/1.1\r\nHost: a web browser\r\n\r\n";
    char answer;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    while (connect(fd, (struct sockaddr *)&to, sizeof to)) usleep(1000);
    assert_int_equal(send(fd, text, sizeof text, MSG_NOSIGNAL), sizeof text);
    while (recv(fd, &answer, 1, 0) > 0) { /* a challenge */
    }
    close(fd);
    assert_int_equal(pthread_create(&all[1].thread, NULL, live, &all[1]), 0);
    for (int r = 0; r < 2; r++) pthread_join(all[r].thread, NULL);
    for (int r = 0; r < 2; r++) assert_int_equal(all[r].shared, LOSSYNET_OK);
    assert_string_equal(messages, "");
    free(all);
}

/* ---- meetings again and again ---- */

struct comer { /* a rank that comes to one meeting */
    struct lossynet_meeting meeting;
    bool missing[RANKS];
    pthread_t thread;
    lossynet_status met;
};

static void *come(void *argument) {
    struct comer *c = argument;
    struct lossynet_world world;
    c->met = lossynet_rendezvous_meet(&c->meeting, &world);
    if (!c->met) lossynet_rendezvous_close(&world);
    return NULL;
}

static void send_comer(struct comer *c, int listener, uint64_t epoch, int rank, int ranks,
                       double seconds) {
    c->meeting = (struct lossynet_meeting){.address = address,
                                           .listener = rank ? -1 : listener,
                                           .epoch = epoch,
                                           .rank = rank,
                                           .ranks = ranks,
                                           .seconds = seconds,
                                           .missing = c->missing};
    assert_int_equal(pthread_create(&c->thread, NULL, come, c), 0);
}

/* Rank 0 listens all the time. Who comes for a later meeting waits for it; who comes for one that
 * is over is sent away, and so has no part in the one that takes place. */
static void meetings_do_not_mix(void **state) {
    (void)state;
    int listener, port;
    struct comer root, later, former, present;
    assert_int_equal(
        lossynet_rendezvous_listen("127.0.0.1:0", (const int[2]){0, 0}, &listener, &port),
        LOSSYNET_OK);
    snprintf(address, sizeof address, "127.0.0.1:%d", port);
    send_comer(&later, listener, 6, 1, 2, 20);
    send_comer(&former, listener, 4, 1, 2, 20);
    usleep(50000); /* they are there first, as a rule */
    send_comer(&root, listener, 5, 0, 2, 20);
    pthread_join(former.thread, NULL);
    assert_int_equal(former.met, LOSSYNET_LINK);
    assert_said("rank 1 was not admitted");
    assert_false(former.missing[0]); /* it was there, and is past that */
    send_comer(&present, listener, 5, 1, 2, 20);
    pthread_join(present.thread, NULL);
    pthread_join(root.thread, NULL);
    assert_int_equal(present.met, LOSSYNET_OK);
    assert_int_equal(root.met, LOSSYNET_OK);
    send_comer(&root, listener, 6, 0, 2, 20);
    pthread_join(later.thread, NULL);
    pthread_join(root.thread, NULL);
    assert_int_equal(later.met, LOSSYNET_OK);
    assert_int_equal(root.met, LOSSYNET_OK);
    close(listener);
}

static void who_does_not_come_is_named(void **state) {
    (void)state;
    int listener, port;
    double seconds = 0.25; /* on a busy machine rank 2 may need longer */
    struct comer root, other;
    assert_int_equal(
        lossynet_rendezvous_listen("127.0.0.1:0", (const int[2]){0, 0}, &listener, &port),
        LOSSYNET_OK);
    snprintf(address, sizeof address, "127.0.0.1:%d", port);
    do {
        seconds *= 4;
        send_comer(&other, listener, 1, 2, 4, seconds + 20);
        send_comer(&root, listener, 1, 0, 4, seconds);
        pthread_join(root.thread, NULL);
        pthread_join(other.thread, NULL);
    } while (root.missing[2] && seconds < 60);
    assert_int_equal(root.met, LOSSYNET_LINK);
    assert_int_equal(other.met, LOSSYNET_LINK);
    assert_true(root.missing[1] && !root.missing[2] && root.missing[3]);
    assert_false(other.missing[0]);
    close(listener);
    send_comer(&other, listener, 2, 1, 2, 0.2);
    pthread_join(other.thread, NULL);
    assert_int_equal(other.met, LOSSYNET_LINK);
    assert_true(other.missing[0]);
}

/* Only who has ended by the time at which rank 0 asks for the second time. */
static void rank_1_ends(void *context, bool *ended) {
    int *asked = context;
    ended[0] = true; /* it is there itself */
    ended[1] = ++*asked > 1;
}

/* Nobody waits for who has ended, for as long as this test is allowed to take. */
static void who_has_ended_is_not_waited_for(void **state) {
    (void)state;
    const double LONG = 1e5;
    int listener, port, asked = 0;
    struct comer root, other;
    assert_int_equal(
        lossynet_rendezvous_listen("127.0.0.1:0", (const int[2]){0, 0}, &listener, &port),
        LOSSYNET_OK);
    snprintf(address, sizeof address, "127.0.0.1:%d", port);
    send_comer(&other, listener, 1, 2, 4, LONG);
    root = (struct comer){
        .meeting = {address, listener, 1, 0, 4, LONG, root.missing, rank_1_ends, &asked}};
    come(&root);
    pthread_join(other.thread, NULL);
    assert_int_equal(root.met, LOSSYNET_LINK);
    assert_int_equal(asked, 2);
    assert_true(!root.missing[0] && root.missing[1] && !root.missing[2] && !root.missing[3]);
    assert_said("rank 1 has ended");
    close(listener); /* rank 0 has ended */
    other =
        (struct comer){.meeting = {address, listener, 2, 1, 2, LONG, other.missing, NULL, NULL}};
    come(&other);
    assert_int_equal(other.met, LOSSYNET_LINK);
    assert_true(other.missing[0]);
    assert_said("rank 0 has ended");
}

static int listen_anywhere(void) {
    int listener, port;
    assert_int_equal(
        lossynet_rendezvous_listen("127.0.0.1:0", (const int[2]){0, 0}, &listener, &port),
        LOSSYNET_OK);
    snprintf(address, sizeof address, "127.0.0.1:%d", port);
    return listener;
}

/* The time of a meeting may be over at any moment: rank 0, which nobody has told how to find out who has ended,
 * does not ask that then. */
static void a_meeting_may_be_over_at_any_moment(void **state) {
    (void)state;
    const int listener = listen_anywhere();
    bool missing[2];
    for (int i = 0; i < 4000; i++) {
        struct lossynet_world world;
        const struct lossynet_meeting meeting = {.address = address,
                                                 .listener = listener,
                                                 .ranks = 2,
                                                 .seconds = (10 + i % 200) * 1e-9,
                                                 .missing = missing};
        messages[0] = '\0';
        assert_int_equal(lossynet_rendezvous_meet(&meeting, &world), LOSSYNET_LINK);
        assert_true(missing[1] && !missing[0]);
    }
    close(listener);
}

static int connect_silently(void) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    to.sin_port = htons((uint16_t)atoi(strrchr(address, ':') + 1));
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    return fd;
}

/* More than may wait at once; the first of them have sent half a greeting. */
static void connections_that_say_nothing_hold_up_nobody(void **state) {
    (void)state;
    enum { SILENT = 300 };
    const uint64_t magic = 0x6c6f737379310003;
    int silent[SILENT];
    struct comer root, other;
    const int listener = listen_anywhere();
    for (int i = 0; i < SILENT; i++) silent[i] = connect_silently();
    for (int i = 0; i < 9; i++) assert_int_equal(send(silent[i], &magic, sizeof magic, 0), 8);
    const double began = ln_now();
    send_comer(&other, listener, 1, 1, 2, 60);
    send_comer(&root, listener, 1, 0, 2, 60);
    pthread_join(other.thread, NULL);
    pthread_join(root.thread, NULL);
    assert_int_equal(root.met, LOSSYNET_OK);
    assert_int_equal(other.met, LOSSYNET_OK);
    assert_true(ln_now() - began < 30); /* 2 s for each would be 10 minutes */
    for (int i = 0; i < SILENT; i++) close(silent[i]);
    close(listener);
}

/* The host "two" has two addresses; libc's function does the rest. */
static const char *two[2];

int __wrap_getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
                       struct addrinfo **out);
int __real_getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
                       struct addrinfo **out);

int __wrap_getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
                       struct addrinfo **out) {
    const bool both = host && strcmp(host, "two") == 0;
    int failed = __real_getaddrinfo(both ? two[0] : host, port, hints, out);
    struct addrinfo **last = out;
    while (!failed && both && *last) last = &(*last)->ai_next;
    return failed || !both ? failed : __real_getaddrinfo(two[1], port, hints, last);
}

/* A socket at 127.0.0.2 and our port whose queue is full: it answers nobody. */
static int answer_nobody(int *waiting) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK + 1)}};
    at.sin_port = htons((uint16_t)atoi(strrchr(address, ':') + 1));
    const int full = socket(AF_INET, SOCK_STREAM, 0);
    *waiting = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(full, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(listen(full, 0), 0);
    assert_int_equal(connect(*waiting, (struct sockaddr *)&at, sizeof at), 0);
    return full;
}

/* An address that does not answer, or that this host lacks, is not the only one of a name. */
static void a_name_may_have_two_addresses(void **state) {
    (void)state;
    int waiting;
    const int full = answer_nobody(&waiting);
    char port[16];
    snprintf(port, sizeof port, "%s", strrchr(address, ':'));
    snprintf(address, sizeof address, "two%s", port);
    two[0] = "192.0.2.1", two[1] = "127.0.0.1"; /* the first is for documentation: RFC 5737 */
    int listener, bound;
    const int any[2] = {0, 0};
    assert_int_equal(lossynet_rendezvous_listen("two:0", any, &listener, &bound), LOSSYNET_OK);
    close(listener);
    struct rank *all = take_ranks(2, 40, 8);
    two[0] = "127.0.0.2";
    assert_int_equal(pthread_create(&all[1].thread, NULL, live, &all[1]), 0);
    snprintf(address, sizeof address, "two%s", port);
    struct lossynet_world world;
    char own[32];
    snprintf(own, sizeof own, "127.0.0.1%s", port);
    assert_int_equal(lossynet_rendezvous_open(own, 0, 2, 40, &world), LOSSYNET_OK);
    memset(all[0].all, 1, 8);
    assert_int_equal(lossynet_bootstrap_gather(&world, all[0].all, 8), LOSSYNET_OK);
    pthread_join(all[1].thread, NULL);
    assert_int_equal(all[1].met, LOSSYNET_OK);
    lossynet_rendezvous_close(&world);
    free(all);

    snprintf(own, sizeof own, "127.0.0.2%s", port);
    assert_int_equal(lossynet_rendezvous_open(own, 1, 2, 1, &world), LOSSYNET_LINK);
    assert_said("rank 1 reaches nobody in 1 s: Connection timed out: expected rank 0 to listen");
    close(waiting);
    close(full);
}

/* It may have come for the next meeting, so it is not sent away. */
static void who_is_not_heard_in_time_is_asked_to_come_again(void **state) {
    (void)state;
    enum { CHALLENGE = 24 }; /* bytes */
    const uint64_t early = 0x6c6f7373794e4f54;
    struct comer root, other;
    uint64_t said = 0;
    char challenge[CHALLENGE];
    const int listener = listen_anywhere(), unheard = connect_silently();
    send_comer(&root, listener, 5, 0, 2, 60);
    assert_int_equal(recv(unheard, challenge, CHALLENGE, MSG_WAITALL), CHALLENGE);
    send_comer(&other, listener, 5, 1, 2, 60);
    pthread_join(other.thread, NULL);
    pthread_join(root.thread, NULL);
    assert_int_equal(root.met, LOSSYNET_OK);
    assert_int_equal(other.met, LOSSYNET_OK);
    assert_int_equal(recv(unheard, &said, sizeof said, MSG_WAITALL), sizeof said);
    assert_int_equal(said, early);
    close(unheard);
    close(listener);
}

/* The kernel of a process that is stopped accepts connections. */
static void a_rank_0_that_hangs_is_missed(void **state) {
    (void)state;
    struct comer other;
    const int listener = listen_anywhere();
    send_comer(&other, listener, 1, 1, 2, 0.2);
    pthread_join(other.thread, NULL);
    assert_int_equal(other.met, LOSSYNET_LINK);
    assert_true(other.missing[0]);
    assert_said("rank 0 says nothing at all");
    close(listener);
}

static void who_is_lost_in_a_share_is_named(void **state) {
    (void)state;
    struct lossynet_world world;
    struct comer other;
    const int listener = listen_anywhere();
    uint8_t part[2] = {0};
    send_comer(&other, listener, 1, 1, 2, 20); /* ends after it has met */
    const struct lossynet_meeting root = {
        .address = address, .listener = listener, .epoch = 1, .ranks = 2, .seconds = 20};
    assert_int_equal(lossynet_rendezvous_meet(&root, &world), LOSSYNET_OK);
    assert_int_equal(lossynet_rendezvous_lost(&world), -1);
    assert_int_equal(lossynet_bootstrap_gather(&world, part, 1), LOSSYNET_LINK);
    assert_int_equal(lossynet_rendezvous_lost(&world), 1);
    pthread_join(other.thread, NULL);
    lossynet_rendezvous_close(&world);
    close(listener);
}

static void *come_and_share(void *argument) {
    struct comer *c = argument;
    struct lossynet_world world;
    uint8_t part[2] = {0};
    c->met = lossynet_rendezvous_meet(&c->meeting, &world);
    if (!c->met) c->met = lossynet_bootstrap_gather(&world, part, 1);
    lossynet_rendezvous_close(&world);
    return NULL;
}

/* Ranks may do something for longer between two exchanges than they wait for each other to come. */
static void an_exchange_has_a_time_out_of_its_own(void **state) {
    (void)state;
    struct lossynet_world world;
    uint8_t part[2] = {0};
    const int listener = listen_anywhere();
    struct comer other = {.meeting = {.address = address,
                                      .listener = -1,
                                      .epoch = 1,
                                      .rank = 1,
                                      .ranks = 2,
                                      .seconds = 2,
                                      .exchange_seconds = 60}};
    struct lossynet_meeting root = other.meeting;
    root.listener = listener;
    root.rank = 0;
    assert_int_equal(pthread_create(&other.thread, NULL, come_and_share, &other), 0);
    assert_int_equal(lossynet_rendezvous_meet(&root, &world), LOSSYNET_OK);
    nanosleep(&(struct timespec){2, 500000000}, NULL);
    assert_int_equal(lossynet_bootstrap_gather(&world, part, 1), LOSSYNET_OK);
    pthread_join(other.thread, NULL);
    assert_int_equal(other.met, LOSSYNET_OK);
    lossynet_rendezvous_close(&world);
    close(listener);
}

static void ranks_meet_over_ipv6(void **state) {
    (void)state;
    int listener, port;
    struct comer root, other;
    if (lossynet_rendezvous_listen("[::1]:0", (const int[2]){0, 0}, &listener, &port))
        skip(); /* no IPv6 here */
    snprintf(address, sizeof address, "[::1]:%d", port);
    send_comer(&other, listener, 1, 1, 2, 20);
    send_comer(&root, listener, 1, 0, 2, 20);
    pthread_join(other.thread, NULL);
    pthread_join(root.thread, NULL);
    assert_int_equal(root.met, LOSSYNET_OK);
    assert_int_equal(other.met, LOSSYNET_OK);
    close(listener);
}

#ifdef LOSSYNET_SECURE
static void write_key(char path[32], char fill) {
    strcpy(path, "/tmp/rendezvous-key-XXXXXX");
    const int fd = mkstemp(path);
    char key[32];
    memset(key, fill, sizeof key);
    assert_int_equal(write(fd, key, sizeof key), sizeof key);
    close(fd);
}

static void send_with_key(struct comer *c, int listener, int rank, double seconds,
                          const char *key_file) {
    c->meeting = (struct lossynet_meeting){.address = address,
                                           .listener = listener,
                                           .epoch = 3,
                                           .rank = rank,
                                           .ranks = 2,
                                           .seconds = seconds,
                                           .missing = c->missing,
                                           .key_file = key_file};
    assert_int_equal(pthread_create(&c->thread, NULL, come, c), 0);
}

/* Rank 0 admits who has its key, also after somebody who has not; and nobody takes a seat from a
 * rank 0 without it. */
static void only_who_has_the_key_is_admitted(void **state) {
    (void)state;
    char right[32], wrong[32];
    struct comer root, other, intruder;
    write_key(right, 'a');
    write_key(wrong, 'b');
    const char *const false_keys[] = {wrong, NULL};
    for (int i = 0; i < 2; i++) {
        begin(NULL); /* forgets what was said */
        const int port = listen_anywhere();
        send_with_key(&root, port, 0, 60, right);
        send_with_key(&intruder, port, 1, 60, false_keys[i]);
        pthread_join(intruder.thread, NULL);
        assert_int_equal(intruder.met, LOSSYNET_LINK);
        assert_said("does not have the key of --key-file");
        send_with_key(&other, port, 1, 60, right);
        pthread_join(other.thread, NULL);
        pthread_join(root.thread, NULL);
        assert_int_equal(root.met, LOSSYNET_OK);
        assert_int_equal(other.met, LOSSYNET_OK);
        close(port);
    }
    const int port = listen_anywhere(); /* a false rank 0 sits there */
    send_with_key(&root, port, 0, 60, NULL);
    send_with_key(&other, port, 1, 60, right);
    pthread_join(other.thread, NULL);
    pthread_join(root.thread, NULL);
    assert_int_equal(other.met, LOSSYNET_LINK);
    assert_said("rank 1 was not admitted");
    close(port);
    char proof[65], another[65];
    assert_int_equal(lossynet_key_proof(right, "run", proof), LOSSYNET_OK);
    assert_int_equal(lossynet_key_proof(wrong, "run", another), LOSSYNET_OK);
    assert_string_not_equal(proof, another);
    /* HMAC-SHA256 of "run" with 32 bytes 'a', as Python's hmac computes it */
    assert_string_equal(proof, "84e92945ccb47c43de5c4f197702873a6d142089aa42594e2752377ec49069cc");
    unlink(right);
    unlink(wrong);
    assert_int_equal(lossynet_key_proof(right, "run", proof), LOSSYNET_PROTOCOL);
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(ranks_meet_and_share, begin),
        cmocka_unit_test_setup(ranks_that_met_average_over_udp, begin),
        cmocka_unit_test_setup(a_rank_alone_meets_nobody, begin),
        cmocka_unit_test_setup(a_rank_that_does_not_come_is_missed, begin),
        cmocka_unit_test_setup(what_makes_no_sense_is_refused, begin),
        cmocka_unit_test_setup(link_mpi_needs_mpi, begin),
        cmocka_unit_test_setup(ranks_started_differently_are_named, begin),
        cmocka_unit_test_setup(a_stranger_is_not_counted, begin),
        cmocka_unit_test_setup(meetings_do_not_mix, begin),
        cmocka_unit_test_setup(who_does_not_come_is_named, begin),
        cmocka_unit_test_setup(who_has_ended_is_not_waited_for, begin),
        cmocka_unit_test_setup(a_meeting_may_be_over_at_any_moment, begin),
        cmocka_unit_test_setup(connections_that_say_nothing_hold_up_nobody, begin),
        cmocka_unit_test_setup(a_name_may_have_two_addresses, begin),
        cmocka_unit_test_setup(who_is_not_heard_in_time_is_asked_to_come_again, begin),
        cmocka_unit_test_setup(a_rank_0_that_hangs_is_missed, begin),
        cmocka_unit_test_setup(who_is_lost_in_a_share_is_named, begin),
        cmocka_unit_test_setup(an_exchange_has_a_time_out_of_its_own, begin),
        cmocka_unit_test_setup(ranks_meet_over_ipv6, begin),
#ifdef LOSSYNET_SECURE
        cmocka_unit_test_setup(only_who_has_the_key_is_admitted, begin),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
