/* test_lossynet_ranks.c — several ranks in one process, over a link made for this test.
 *
 * Each rank is a thread with a net of its own; datagrams travel through mailboxes in memory. So the
 * exchange between ranks runs without MPI, under the sanitizers, and with a link that misbehaves:
 *   - the scenario of test_lossynet.h gives the bits of one rank with eight workers, for 2, 4 and 8
 *     ranks, with ranks that run at different speeds, and with early datagrams of the next phase;
 *   - a link that fails at its k-th call is reported by every public function, without a leak.
 */
#include "test_lossynet.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

enum { RANKS = 8 };

/* ---- a link of mailboxes ---- */

struct letter {
    struct letter *next;
    int from;
    uint64_t phase; /* counted by the sender */
    size_t bytes;
    uint8_t datagram[];
};

struct mail_link {
    struct lossynet_link link;
    struct lossynet_link_settings settings;
    uint64_t phase;
};

static struct {
    int ranks;
    pthread_mutex_t lock;
    pthread_barrier_t barrier;
    struct letter *first[RANKS], **last[RANKS];
    uint8_t *gather; /* what the ranks have put together so far */
    int calls_left;  /* the link call after so many fails; negative: none */
    bool hurry;      /* ranks take a nap now and then, so that others get ahead */
} post;

static lossynet_status allowed(void) {
    lossynet_status status = LOSSYNET_OK;
    pthread_mutex_lock(&post.lock);
    if (post.calls_left >= 0 && post.calls_left-- == 0) status = LOSSYNET_LINK;
    if (status) post.calls_left = 0; /* it stays broken */
    pthread_mutex_unlock(&post.lock);
    return status;
}

static lossynet_status mail_begin(struct lossynet_link *link, lossynet_phase phase, uint64_t step) {
    struct mail_link *mail = (struct mail_link *)link;
    mail->phase++;
    if (post.hurry && (step + (uint64_t)phase + (uint64_t)mail->settings.world.rank) % 3 == 0)
        nanosleep(&(struct timespec){.tv_nsec = 3000000}, NULL);
    return allowed();
}

static lossynet_status mail_send(struct lossynet_link *link, int peer,
                                 const struct lossynet_datagram *batch, int count) {
    struct mail_link *mail = (struct mail_link *)link;
    for (int i = 0; i < count; i++) {
        size_t bytes = WIRE_HEADER_BYTES + batch[i].length;
        struct letter *letter = malloc(sizeof *letter + bytes);
        *letter = (struct letter){
            .from = mail->settings.world.rank, .phase = mail->phase, .bytes = bytes};
        memcpy(letter->datagram, batch[i].header, WIRE_HEADER_BYTES);
        if (batch[i].length)
            memcpy(letter->datagram + WIRE_HEADER_BYTES, batch[i].payload, batch[i].length);
        pthread_mutex_lock(&post.lock);
        *post.last[peer] = letter;
        post.last[peer] = &letter->next;
        pthread_mutex_unlock(&post.lock);
    }
    return allowed();
}

static lossynet_status mail_flush(struct lossynet_link *link) {
    (void)link;
    return allowed();
}

/* The first letter of this phase; those of the next stay. */
static struct letter *mail_fetch(struct mail_link *mail) {
    int rank = mail->settings.world.rank;
    pthread_mutex_lock(&post.lock);
    struct letter **at = &post.first[rank];
    while (*at && (*at)->phase != mail->phase) at = &(*at)->next;
    struct letter *letter = *at;
    if (letter) {
        *at = letter->next;
        if (!*at) post.last[rank] = at;
    }
    pthread_mutex_unlock(&post.lock);
    return letter;
}

static lossynet_status mail_progress(struct lossynet_link *link) {
    struct mail_link *mail = (struct mail_link *)link;
    struct letter *letter = mail_fetch(mail);
    if (!letter) sched_yield();
    for (; letter; letter = mail_fetch(mail)) {
        mail->settings.receive(mail->settings.context, letter->from, letter->datagram,
                               letter->bytes);
        free(letter);
    }
    return allowed();
}

static lossynet_status mail_all_gather(struct lossynet_link *link, void *data,
                                       const size_t *offset) {
    struct mail_link *mail = (struct mail_link *)link;
    int rank = mail->settings.world.rank;
    if (rank == 0) post.gather = calloc(offset[post.ranks] + 1, 1);
    pthread_barrier_wait(&post.barrier);
    memcpy(post.gather + offset[rank], (char *)data + offset[rank],
           offset[rank + 1] - offset[rank]);
    pthread_barrier_wait(&post.barrier);
    memcpy((char *)data + offset[0], post.gather + offset[0], offset[post.ranks] - offset[0]);
    pthread_barrier_wait(&post.barrier);
    if (rank == 0) free(post.gather);
    return LOSSYNET_OK;
}

static void mail_close(struct lossynet_link *link) {
    free(link);
}

static lossynet_status mail_open(const struct lossynet_link_settings *settings,
                                 struct lossynet_link **out) {
    struct mail_link *mail = calloc(1, sizeof *mail);
    mail->settings = *settings;
    mail->link = (struct lossynet_link){
        .name = "mail",
        .begin = mail_begin,
        .send = mail_send,
        .flush = mail_flush,
        .progress = mail_progress,
        .end = mail_flush,
        .all_gather = mail_all_gather,
        .close = mail_close,
    };
    *out = &mail->link;
    return LOSSYNET_OK;
}

static void post_open(int ranks, bool hurry, int calls_left) {
    memset(&post, 0, sizeof post);
    post.ranks = ranks;
    post.hurry = hurry;
    post.calls_left = calls_left;
    pthread_mutex_init(&post.lock, NULL);
    pthread_barrier_init(&post.barrier, NULL, (unsigned)ranks);
    for (int r = 0; r < RANKS; r++) post.last[r] = &post.first[r];
}

/* Returns how many letters nobody has read. */
static int post_close(void) {
    int unread = 0;
    for (int r = 0; r < RANKS; r++) {
        for (struct letter *letter = post.first[r], *next; letter; letter = next, unread++) {
            next = letter->next;
            free(letter);
        }
    }
    pthread_barrier_destroy(&post.barrier);
    pthread_mutex_destroy(&post.lock);
    return unread;
}

/* ---- the scenario ---- */

struct rank {
    int rank;
    const struct lossynet_settings *settings;
    lossynet_status status;
    uint64_t digest;
};

static void *rank_main(void *argument) {
    struct rank *rank = argument;
    struct lossynet_world world = {.rank = rank->rank, .ranks = post.ranks};
    struct lossynet *net;
    rank->status = lossynet_net_open(&world, rank->settings, mail_open, &net);
    if (rank->status) return NULL;
    rank->digest = scenario_run(net, rank->rank, SCENARIO_WORKERS / post.ranks);
    const struct lossynet_rejected none = {0};
    if (memcmp(&net->rejected, &none, sizeof none)) rank->status = LOSSYNET_PROTOCOL;
    lossynet_close(net);
    return NULL;
}

static uint64_t digest_of(int ranks, bool hurry, const struct lossynet_settings *settings) {
    post_open(ranks, hurry, -1);
    struct rank rank[RANKS];
    pthread_t thread[RANKS];
    for (int r = 0; r < ranks; r++) {
        rank[r] = (struct rank){.rank = r, .settings = settings};
        assert_int_equal(pthread_create(&thread[r], NULL, rank_main, &rank[r]), 0);
    }
    for (int r = 0; r < ranks; r++) pthread_join(thread[r], NULL);
    for (int r = 0; r < ranks; r++) {
        assert_int_equal(rank[r].status, LOSSYNET_OK);
        assert_true(rank[r].digest == rank[0].digest && rank[r].digest);
    }
    assert_int_equal(post_close(), 0);
    return rank[0].digest;
}

static void same_bits(const char *model, double p, lossynet_estimator estimator) {
    struct lossynet_settings settings = scenario_settings(model, p, estimator);
    struct lossynet *net = open_alone(&settings);
    uint64_t want = scenario_run(net, 0, SCENARIO_WORKERS);
    lossynet_close(net);
    for (int ranks = 2; ranks <= RANKS; ranks *= 2)
        assert_true(digest_of(ranks, ranks == 4, &settings) == want);
    settings.loss.seed++; /* the digest sees loss */
    net = open_alone(&settings);
    if (p > 0 && p < 1) assert_true(scenario_run(net, 0, SCENARIO_WORKERS) != want);
    lossynet_close(net);
}

static void test_same_bits(void **state) {
    (void)state;
    same_bits("bernoulli", 0, LOSSYNET_MEAN);
    same_bits("bernoulli", 0.2, LOSSYNET_MEAN);
    same_bits("bernoulli", 0.2, LOSSYNET_HT);
    same_bits("bernoulli", 1, LOSSYNET_BALANCED);
    same_bits("burst:7", 0.3, LOSSYNET_BALANCED);
}

/* ---- ranks that disagree, links that fail ---- */

static void test_other_settings(void **state) {
    (void)state;
    post_open(2, false, -1);
    struct lossynet_settings settings[2];
    struct rank rank[2];
    pthread_t thread[2];
    capture_begin();
    for (int r = 0; r < 2; r++) {
        settings[r] = scenario_settings("bernoulli", r ? 0.2 : 0.1, LOSSYNET_MEAN);
        rank[r] = (struct rank){.rank = r, .settings = &settings[r]};
        pthread_create(&thread[r], NULL, rank_main, &rank[r]);
    }
    for (int r = 0; r < 2; r++) pthread_join(thread[r], NULL);
    const char *text = capture_end();
    post_close();
    assert_non_null(strstr(text, "rank 1 was started with other settings than rank 0"));
    assert_int_equal(rank[0].status, LOSSYNET_INVALID);
    assert_int_equal(rank[1].status, LOSSYNET_INVALID);
}

/* Answers for the missing rank with what rank 0 says. */
static lossynet_status lonely_all_gather(struct lossynet_link *link, void *data,
                                         const size_t *offset) {
    (void)link;
    size_t bytes = offset[1] - offset[0];
    if (bytes == offset[2] - offset[1]) memcpy((char *)data + bytes, data, bytes);
    return allowed();
}

static lossynet_status mail_lonely(const struct lossynet_link_settings *settings,
                                   struct lossynet_link **out) {
    lossynet_status status = mail_open(settings, out);
    (*out)->all_gather = lonely_all_gather;
    return status;
}

/* Rank 0 of 2, whose link breaks at each of its calls in turn: the function that made the call
 * returns LOSSYNET_LINK, and closing leaks nothing. */
static lossynet_status all_functions(struct lossynet *net, float **x, float *fresh) {
    struct lossynet_counters counters;
    struct lossynet_drift drift;
    lossynet_status status = lossynet_step_counters(net, &counters);
    if (!status) status = lossynet_drift_measure(net, x, &drift);
    if (!status) status = lossynet_gather_fresh(net, x, fresh);
    if (!status) status = lossynet_reduce(net, x, false);
    return status ? status : lossynet_broadcast(net, x, false);
}

static void test_broken_link(void **state) {
    (void)state;
    struct lossynet_world world = {.rank = 0, .ranks = 2};
    size_t elements = 1000;
    struct lossynet_settings settings = simple_settings(2, &elements, 1, 0);
    settings.drift_samples = 10;
    float **x = take_vectors(1, elements), *fresh = calloc(elements, sizeof *fresh);
    for (int calls = 0; calls < 12; calls++) {
        post_open(1, false, -1); /* the other rank is missing: all_gather does nothing */
        struct lossynet *net;
        lossynet_status status = lossynet_net_open(&world, &settings, mail_lonely, &net);
        assert_int_equal(status, LOSSYNET_OK);
        post.calls_left = calls;
        assert_int_equal(all_functions(net, x, fresh), LOSSYNET_LINK);
        lossynet_close(net);
        post_close();
    }
    post_open(1, false, 0); /* fails while ranks greet each other */
    struct lossynet *net;
    assert_int_equal(lossynet_net_open(&world, &settings, mail_lonely, &net), LOSSYNET_LINK);
    assert_null(net);
    post_close();
    free(fresh);
    free_vectors(x);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_other_settings),
        cmocka_unit_test(test_broken_link),
    };
    return cmocka_run_group_tests_name("lossynet between ranks", tests, NULL, NULL);
}
