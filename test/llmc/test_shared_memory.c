/* test_shared_memory.c — tests processes that share memory and wait for each other. Each rank is a
 * child process. To meet, they use a page that was mapped before they were started. */
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/memory/shared_memory.h"
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
    int failures = 0, ended = 0, status;
    pid_t stopped = 0;
    for (int r = 0; r < RANKS; r++) {
        const struct lossynet_world world = {.rank = r,
                                             .ranks = RANKS,
                                             .local_rank = r,
                                             .local_ranks = RANKS,
                                             .share = share,
                                             .share_context = page};
        if (fork() == 0) _exit(work(&world));
    }
    while (ended < RANKS) {
        const pid_t pid = waitpid(-1, &status, WUNTRACED);
        if (WIFSTOPPED(status)) {
            stopped = pid;
            continue;
        }
        failures += status != 0;
        /* One that has stopped itself goes on when the others have ended. */
        if (++ended == RANKS - 1 && stopped) kill(stopped, SIGCONT);
    }
    munmap(page, sizeof *page);
    return failures;
}

/* Every member's memory is another's, of its own group; 0 where nobody wrote; nobody is a round
 * ahead or behind. */
static int count_together(const struct lossynet_world *world) {
    struct shared_memory *m;
    const int place = world->rank % SIZE, first = world->rank - place;
    const size_t bytes = (size_t)(1 + place) * 10000;
    if (shared_memory_open(world, first, SIZE, bytes, 60, &m)) return 1;
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
    if (shared_memory_open(world, first, SIZE, 100, 60, &m)) return 1;
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

/* One member of the first group is stopped: its group learns it after the time-out, and not before.
 * One of the second group needs longer than that, but it lives. */
static double timeout;

static int stop_a_member(const struct lossynet_world *world) {
    struct shared_memory *m;
    const int place = world->rank % SIZE, first = world->rank - place;
    struct timespec before, after;
    if (shared_memory_open(world, first, SIZE, 100, timeout, &m)) return 1;
    if (world->rank == 1) raise(SIGSTOP);
    if (world->rank == 4) nanosleep(&(struct timespec){.tv_sec = (time_t)(2 * timeout)}, NULL);
    capture_begin();
    clock_gettime(CLOCK_MONOTONIC, &before);
    const int status = shared_memory_wait(m, NULL);
    clock_gettime(CLOCK_MONOTONIC, &after);
    const char *said = capture_end();
    const double seconds =
        (double)(after.tv_sec - before.tv_sec) + 1e-9 * (double)(after.tv_nsec - before.tv_nsec);
    if (first) {
        shared_memory_close(m);
        return status || *said ? 7 : 0;
    }
    if (world->rank == 1) return 0;
    /* The first to give up names rank 1. The other may learn that the first has ended. */
    const bool names = strstr(said, "rank 1, of this rank's group, gave no sign of life") ||
                       (strstr(said, "has ended") && !strstr(said, "rank 1,"));
    return status == -1 && seconds >= timeout && names ? 0 : 8;
}

static void test_a_member_that_hangs(void **state) {
    (void)state;
    int wrong = 1; /* on a busy machine who lives may give no sign of it for longer */
    for (timeout = 0.5; wrong && timeout < 60; timeout *= 4) wrong = in_ranks(stop_a_member);
    assert_int_equal(wrong, 0);
}

/* A group that gets no memory says so, and no other goes on without it. */
static int ask_for_too_much(const struct lossynet_world *world) {
    const int first = world->rank / SIZE * SIZE;
    struct shared_memory *m;
    capture_begin();
    const int failed = shared_memory_open(world, world->rank / SIZE * SIZE, SIZE,
                                          world->rank == 4 ? (size_t)1 << 62 : 100, 60, &m);
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
        cmocka_unit_test(test_a_member_that_hangs),
        cmocka_unit_test(test_nobody_goes_on_alone),
    };
    return cmocka_run_group_tests_name("shared memory", tests, NULL, NULL);
}
