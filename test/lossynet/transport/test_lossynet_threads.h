/* test_lossynet_threads.h — several ranks in one process: each is a thread with a comm of its own.
 * They meet at a barrier instead of MPI.
 */
#ifndef TEST_LOSSYNET_THREADS_H
#define TEST_LOSSYNET_THREADS_H

#include "test/lossynet/test_lossynet.h"

#include "lossynet/transport/exchange/exchange.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

enum { RANKS = 8, CARD_BYTES = 4096 };

static struct {
    int ranks;
    pthread_barrier_t barrier;
    uint8_t cards[RANKS * CARD_BYTES];
    atomic_int seen[RANKS][RANKS]; /* datagrams of the kind a test counts, [receiver][sender] */
    atomic_int total;
    atomic_bool cut;
} post;

static lossynet_status share(void *context, const struct lossynet_world *world, void *all,
                             size_t bytes) {
    (void)context;
    assert_true(bytes <= CARD_BYTES);
    memcpy(post.cards + (size_t)world->rank * bytes, (char *)all + (size_t)world->rank * bytes,
           bytes);
    pthread_barrier_wait(&post.barrier);
    memcpy(all, post.cards, bytes * (size_t)world->ranks);
    pthread_barrier_wait(&post.barrier);
    return LOSSYNET_OK;
}

/* ---- a hook says how often a datagram arrives; -1: once, after the next one ---- */

static int (*arrival_hook)(int rank, int peer, const uint8_t *datagram, size_t bytes);

enum { LINKS = 8 };  /* of a rank: network.threads */
static struct kept { /* by rank and link: a datagram that is overtaken */
    const struct ln_transport *of;
    uint8_t *bytes;
    size_t count;
    int peer;
} kept[RANKS][LINKS];

/* Linked with --wrap=ln_dispatch. */
void __real_ln_dispatch(struct ln_transport *t, int peer, uint8_t *datagram, size_t bytes);
void __wrap_ln_dispatch(struct ln_transport *t, int peer, uint8_t *datagram, size_t bytes);

void __wrap_ln_dispatch(struct ln_transport *t, int peer, uint8_t *datagram, size_t bytes) {
    const int rank = t->world.rank;
    const int copies = arrival_hook ? arrival_hook(rank, peer, datagram, bytes) : 1;
    struct kept *k = kept[rank];
    const struct ln_transport *nobody = NULL;
    while (
        __atomic_load_n(&k->of, __ATOMIC_SEQ_CST) != t &&
        !__atomic_compare_exchange_n(&k->of, &nobody, t, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        k++, nobody = NULL;
    if (copies < 0 && !k->bytes) {
        k->bytes = malloc(bytes);
        k->count = bytes;
        k->peer = peer;
        memcpy(k->bytes, datagram, bytes);
        return;
    }
    for (int i = 0; i < copies || (copies < 0 && i == 0); i++)
        __real_ln_dispatch(t, peer, datagram, bytes);
    if (!k->bytes) return;
    __real_ln_dispatch(t, k->peer, k->bytes, k->count);
    free(k->bytes);
    k->bytes = NULL;
}

/* ---- ranks ---- */

struct rank {
    int rank;
    const struct lossynet_settings *settings;
    ln_link_open open;
    void (*work)(struct rank *rank, struct lossynet_comm *comm);
    lossynet_status status;
    uint64_t digest;
    struct lossynet_counters counters;
    struct ln_rejected rejected;
    uint64_t overruns;
    double seconds;
};

static void *rank_main(void *argument) {
    struct rank *rank = argument;
    struct lossynet_world world = {.rank = rank->rank,
                                   .ranks = post.ranks,
                                   .local_rank = rank->rank,
                                   .local_ranks = post.ranks,
                                   .share = share};
    struct lossynet_comm *comm;
    rank->status = ln_comm_open(&world, rank->settings, rank->open, &comm);
    if (rank->status) return NULL;
    double start = ln_now();
    rank->work(rank, comm);
    rank->seconds = ln_now() - start;
    struct ln_transport *t = comm->transport;
    ln_threads_enter(t);
    rank->rejected = t->receiver.rejected;
    if (t->link->overruns) rank->overruns = t->link->overruns(t->link);
    ln_threads_leave(t);
    lossynet_close(comm);
    return NULL;
}

/* settings: [ranks] */
static inline void run_ranks_with(int ranks, const struct lossynet_settings *settings,
                                  size_t stride, ln_link_open open,
                                  void (*work)(struct rank *, struct lossynet_comm *),
                                  struct rank *rank,
                                  int (*hook)(int, int, const uint8_t *, size_t)) {
    pthread_t thread[RANKS];
    memset(&post, 0, sizeof post);
    post.ranks = ranks;
    pthread_barrier_init(&post.barrier, NULL, (unsigned)ranks);
    arrival_hook = hook;
    for (int r = 0; r < ranks; r++) {
        rank[r] = (struct rank){
            .rank = r, .settings = settings + (size_t)r * stride, .open = open, .work = work};
        assert_int_equal(pthread_create(&thread[r], NULL, rank_main, &rank[r]), 0);
    }
    for (int r = 0; r < ranks; r++) pthread_join(thread[r], NULL);
    arrival_hook = NULL;
    for (int i = 0; i < RANKS * LINKS; i++) free(kept[i / LINKS][i % LINKS].bytes);
    memset(kept, 0, sizeof kept);
    pthread_barrier_destroy(&post.barrier);
}

static inline void run_ranks(int ranks, const struct lossynet_settings *settings, ln_link_open open,
                             void (*work)(struct rank *, struct lossynet_comm *), struct rank *rank,
                             int (*hook)(int, int, const uint8_t *, size_t)) {
    run_ranks_with(ranks, settings, 0, open, work, rank, hook);
}

/* What a rank alone computes. */
static inline uint64_t digest_alone(const struct lossynet_settings *settings) {
    struct lossynet_comm *comm = open_alone(settings);
    const uint64_t digest = scenario_run(comm, 0, SCENARIO_WORKERS);
    lossynet_close(comm);
    return digest;
}

static inline void run_scenario(struct rank *rank, struct lossynet_comm *comm) {
    rank->digest = scenario_run(comm, rank->rank, SCENARIO_WORKERS / post.ranks);
    if (!rank->digest) rank->status = LOSSYNET_LINK;
}

#endif
