/* test_shared_memory.c — tests processes that share memory and wait for each other. Each rank is a
 * child process. To meet, they use a page that was mapped before they were started. */
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/comm/shared_memory.h"
#include "test/support/capture.h"

enum { RANKS = 6, SIZE = 3, ROUNDS = 2000, PAGE = 1 << 16 };

struct page {
    int arrived, rounds;
    char all[PAGE - 64];
};

/* lossynet_share */
static lossynet_status share(void *context, const struct lossynet_world *world, void *all,
                             size_t bytes) {
    struct page *page = (struct page *)context;
    memcpy(page->all + (size_t)world->rank * bytes, (char *)all + (size_t)world->rank * bytes,
           bytes);
    for (int i = 0; i < 2; i++) { /* all have written; all have read */
        const int round = __atomic_load_n(&page->rounds, __ATOMIC_SEQ_CST);
        if (__atomic_add_fetch(&page->arrived, 1, __ATOMIC_SEQ_CST) == world->ranks) {
            page->arrived = 0;
            __atomic_add_fetch(&page->rounds, 1, __ATOMIC_SEQ_CST);
        }
        while (__atomic_load_n(&page->rounds, __ATOMIC_SEQ_CST) == round) sched_yield();
        if (i == 0) memcpy(all, page->all, bytes * (size_t)world->ranks);
    }
    return LOSSYNET_OK;
}

static struct page *open_page(void) {
    void *page =
        mmap(NULL, sizeof(struct page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(page != MAP_FAILED);
    return (struct page *)page;
}

/* Runs work(world) in RANKS processes. Returns how many of them returned another number than 0. */
static int in_ranks(int (*work)(const struct lossynet_world *world)) {
    struct page *page = open_page();
    int failures = 0;
    for (int r = 0; r < RANKS; r++) {
        const struct lossynet_world world = {.rank = r,
                                             .ranks = RANKS,
                                             .local_rank = r,
                                             .local_ranks = RANKS,
                                             .share = share,
                                             .share_context = page};
        if (fork() == 0) _exit(work(&world));
    }
    for (int status; wait(&status) > 0;) failures += status != 0;
    munmap(page, sizeof *page);
    return failures;
}

/* Every member's memory is another's, of its own group; 0 where nobody wrote; nobody is a round
 * ahead or behind. */
static int count_together(const struct lossynet_world *world) {
    struct shared_memory *m;
    const int place = world->rank % SIZE, first = world->rank - place;
    const size_t bytes = (size_t)(1 + place) * 10000;
    if (shared_memory_open(world, first, SIZE, bytes, &m)) return 1;
    int *mine = (int *)shared_memory_of(m, place), wrong = 0;
    for (size_t i = 0; i < bytes / sizeof *mine; i++) wrong += mine[i] != 0;
    for (int round = 1; round <= ROUNDS && !wrong; round++) {
        mine[bytes / sizeof *mine - 1] = world->rank * 10000 + round;
        if (shared_memory_wait(m, NULL)) return 2;
        for (int i = 0; i < SIZE; i++) {
            const int *other = (int *)shared_memory_of(m, i);
            const size_t last = (size_t)(1 + i) * 10000 / sizeof *other - 1;
            wrong += other[last] != (first + i) * 10000 + round;
        }
        if (shared_memory_wait(m, NULL)) return 2;
    }
    shared_memory_close(m);
    return wrong ? 3 : 0;
}

static void test_members_wait_for_each_other(void **state) {
    (void)state;
    assert_int_equal(in_ranks(count_together), 0);
}

/* One member of the first group ends without a word: its group learns it, the other group goes on. */
static int lose_a_member(const struct lossynet_world *world) {
    struct shared_memory *m;
    const int place = world->rank % SIZE, first = world->rank - place;
    if (shared_memory_open(world, first, SIZE, 100, &m)) return 1;
    if (world->rank == 1) _exit(0);
    capture_begin();
    const int status = shared_memory_wait(m, NULL);
    const char *said = capture_end();
    shared_memory_close(m);
    if (first) return status || *said ? 4 : 0;
    return status == -1 && strstr(said, "of this rank's group, has ended") ? 0 : 5;
}

static void test_a_member_that_ends(void **state) {
    (void)state;
    assert_int_equal(in_ranks(lose_a_member), 0);
}

/* A group that gets no memory says so, and no other goes on without it. */
static int ask_for_too_much(const struct lossynet_world *world) {
    const int first = world->rank / SIZE * SIZE;
    struct shared_memory *m;
    capture_begin();
    const int failed = shared_memory_open(world, world->rank / SIZE * SIZE, SIZE,
                                          world->rank == 4 ? (size_t)1 << 62 : 100, &m);
    const char *said = capture_end();
    shared_memory_close(m);
    return failed && (first == SIZE) == (strstr(said, "memory to share") != NULL) ? 0 : 6;
}

static void test_nobody_goes_on_alone(void **state) {
    (void)state;
    assert_int_equal(in_ranks(ask_for_too_much), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_members_wait_for_each_other),
        cmocka_unit_test(test_a_member_that_ends),
        cmocka_unit_test(test_nobody_goes_on_alone),
    };
    return cmocka_run_group_tests_name("shared memory", tests, NULL, NULL);
}
