/* test_lossynet_threads.h — several ranks in one process: each is a thread with a net of its own.
 * They meet at a barrier instead of MPI.
 */
#ifndef TEST_LOSSYNET_THREADS_H
#define TEST_LOSSYNET_THREADS_H

#include "test_lossynet.h"

#include "lossynet/engine.h"

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

struct rank {
    int rank;
    const struct lossynet_settings *settings;
    lossynet_link_open open;
    void (*work)(struct rank *rank, struct lossynet *net);
    lossynet_status status;
    uint64_t digest;
    struct lossynet_counters counters;
    struct lossynet_rejected rejected;
    uint64_t overruns;
    double seconds;
};

static void *rank_main(void *argument) {
    struct rank *rank = argument;
    struct lossynet_world world = {rank->rank, post.ranks, rank->rank, post.ranks};
    struct lossynet *net;
    rank->status = lossynet_net_open(&world, rank->settings, rank->open, share, NULL, &net);
    if (rank->status) return NULL;
    double start = lossynet_now();
    rank->work(rank, net);
    rank->seconds = lossynet_now() - start;
    lossynet_engine_enter(net);
    rank->rejected = net->rejected;
    if (net->link->overruns) rank->overruns = net->link->overruns(net->link);
    lossynet_engine_leave(net);
    lossynet_close(net);
    return NULL;
}

/* settings: [ranks] */
static inline void run_ranks_with(int ranks, const struct lossynet_settings *settings,
                                  size_t stride, lossynet_link_open open,
                                  void (*work)(struct rank *, struct lossynet *), struct rank *rank,
                                  int (*hook)(int, int, const uint8_t *, size_t)) {
    pthread_t thread[RANKS];
    memset(&post, 0, sizeof post);
    post.ranks = ranks;
    pthread_barrier_init(&post.barrier, NULL, (unsigned)ranks);
    lossynet_arrival_hook = hook;
    for (int r = 0; r < ranks; r++) {
        rank[r] = (struct rank){
            .rank = r, .settings = settings + (size_t)r * stride, .open = open, .work = work};
        assert_int_equal(pthread_create(&thread[r], NULL, rank_main, &rank[r]), 0);
    }
    for (int r = 0; r < ranks; r++) pthread_join(thread[r], NULL);
    lossynet_arrival_hook = NULL;
    pthread_barrier_destroy(&post.barrier);
}

static inline void run_ranks(int ranks, const struct lossynet_settings *settings,
                             lossynet_link_open open,
                             void (*work)(struct rank *, struct lossynet *), struct rank *rank,
                             int (*hook)(int, int, const uint8_t *, size_t)) {
    run_ranks_with(ranks, settings, 0, open, work, rank, hook);
}

static inline void run_scenario(struct rank *rank, struct lossynet *net) {
    rank->digest = scenario_run(net, rank->rank, SCENARIO_WORKERS / post.ranks);
    if (!rank->digest) rank->status = LOSSYNET_LINK;
}

#endif
