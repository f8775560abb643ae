/* test_membership_histories.c — tests the agreement on views (llmc/membership/agreement.h,
 * unchanged) in 5,000 made-up histories of up to six processes, and some of 64. The store is in
 * memory, and time is simulated; membership_hosts.h has the processes.
 *
 * A history is 40 s of faults: processes are killed, restarted and frozen; the network is cut in
 * two, or in one direction; the store is away, or some processes cannot reach it; it loses leases,
 * and answers and takes writes late. Then all faults end, and in some histories all processes but
 * one are killed. These properties must hold:
 *
 *   always       No epoch is written twice. A process takes the view that was written. Members keep
 *                their order. No uid that was left out comes back. At most one view is alive: a
 *                view is alive if all its members are inside it, so that this side of a cut could
 *                train. (The test does not even ask whether the members hear each other.)
 *   in the end   All processes that are left are in one view.
 *
 * HISTORY=N runs history N alone and prints it. PROCESSES=N, up to 1,024, runs one history of N
 * processes alone, and prints what an agreement of N costs. (1,024 take a minute or two, and a
 * stack of 256 MiB, ulimit -s.) Takes 40 s.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <malloc.h>

#include "llmc/log/error.h"
#include "test/llmc/membership/membership_hosts.h"

#if defined(__SANITIZE_ADDRESS__)
enum { HISTORIES = 400, WIDE_HISTORIES = 1 };
#else
enum { HISTORIES = 5000, WIDE_HISTORIES = 4 };
#endif

static const double FAULTS_END = 40, GIVE_UP = 250; /* seconds of a history */

/* ---- what must hold always ---- */

/* Somebody registers. Who is rank 0 may hear of it at once. */
static void hear(struct world *w) {
    for (int s = 0; s < w->slots; s++) {
        struct process *p = &w->process[s];
        if (!p->alive || p->a.view.self != 0 || !w->up || !w->asks[s] || !chance(0.5)) continue;
        agreement_hasten(&p->a);
        p->watch = now(w);
    }
}

/* A view is written. */
static void see_write(void *context, const struct store_write *write) {
    struct world *w = (struct world *)context;
    if (write->value && !strncmp(write->key, "run/member/", 11)) hear(w);
    if (strcmp(write->key, "run/view") != 0) return;
    struct view v;
    check_that(w, write->value && view_from_json(write->value, &v), "no view is written");
    tell(w, "view %s", write->value);
    check_that(w, v.epoch == w->epoch + 1 && v.epoch < EPOCHS && v.members <= MEMBERS,
               "epoch %lld is written after epoch %lld", (long long)v.epoch, (long long)w->epoch);
    const struct view *before = &w->view[w->epoch];
    int last = -1;
    bool joiners = false;
    for (int r = 0; r < v.members; r++) {
        const int rank = view_rank_of(before, v.member[r].uid);
        for (int i = 0; i < w->lefts; i++)
            check_that(w, strcmp(w->left[i], v.member[r].uid) != 0, "%s was left out before",
                       v.member[r].uid);
        check_that(w, rank < 0 || (rank > last && !joiners), "epoch %lld: another order",
                   (long long)v.epoch);
        check_that(w, (rank < 0) == (v.member[r].joined == v.epoch), "epoch %lld: who joined?",
                   (long long)v.epoch);
        if (rank < 0)
            joiners = true;
        else
            last = rank;
    }
    for (int r = 0; r < before->members; r++)
        if (view_rank_of(&v, before->member[r].uid) < 0) {
            check_that(w, w->lefts < UIDS, "more than %d were left out", UIDS);
            memcpy(w->left[w->lefts++], before->member[r].uid, 24);
        }
    w->epoch = v.epoch;
    w->view[v.epoch] = v;
    count.views++;
}

/* All members of its view are inside it. */
static bool is_alive(struct world *w, const struct process *p) {
    if (!p->alive || p->a.state != AGREEMENT_INSIDE) return false;
    for (int r = 0; r < p->a.view.members; r++) {
        const struct process *q = process_of(w, &p->a.view.member[r]);
        if (!q || q->stops || q->a.state != AGREEMENT_INSIDE || q->a.view.epoch != p->a.view.epoch)
            return false;
    }
    return true;
}

static void check_sides(struct world *w) {
    int64_t alive = 0;
    w->checks++;
    for (int s = 0; s < w->slots; s++) {
        const struct process *p = &w->process[s];
        const int64_t epoch = p->a.view.epoch;
        if (!p->alive || p->a.state != AGREEMENT_INSIDE || w->checked[epoch] == w->checks) continue;
        w->checked[epoch] = w->checks; /* any of its members says whether it is alive */
        if (!is_alive(w, p)) continue;
        check_that(w, !alive, "views %lld and %lld are both alive", (long long)alive,
                   (long long)epoch);
        alive = epoch;
    }
}

/* All processes that there are, at least one, are in one view, which is the last one. */
static bool has_settled(struct world *w) {
    int processes = 0;
    for (int s = 0; s < w->slots; s++) processes += w->process[s].alive;
    for (int s = 0; s < w->slots; s++) {
        const struct process *p = &w->process[s];
        if (p->alive && p->a.state == AGREEMENT_INSIDE && p->a.view.epoch == w->epoch)
            return p->a.view.members == processes && is_alive(w, p);
    }
    return false;
}

/* ---- faults ---- */

/* Cuts the network in two; one side, both or none reach the store. Or one direction of one path. */
static void cut(struct world *w) {
    const unsigned store = random_below(4);
    bool side[SLOTS];
    for (int a = 0; a < w->slots; a++) {
        side[a] = chance(0.5);
        w->asks[a] = store & (1u << side[a]);
        tell(w, "cut, process %d on side %d, which reaches the store: %d", a, side[a], w->asks[a]);
    }
    for (int a = 0; a < w->slots; a++)
        for (int b = 0; b < w->slots; b++) w->hears[a][b] = side[a] == side[b];
}

static void heal(struct world *w) {
    tell(w, "healed");
    for (int a = 0; a < w->slots; a++) {
        w->asks[a] = true;
        for (int b = 0; b < w->slots; b++) w->hears[a][b] = true;
    }
}

static void store_down(struct world *w) {
    if (w->up) memory_down(&w->memory);
    w->up = false;
    w->back = now(w) + uniform(15);
    tell(w, "the store is down");
}

static void store_up(struct world *w, bool leases_lost) {
    if (!w->up) memory_up(&w->memory, leases_lost);
    w->up = true;
    w->back = INFINITY;
    tell(w, "the store is up");
}

static bool any_member_lives(struct world *w) {
    for (int r = 0; r < w->view[w->epoch].members; r++)
        if (process_of(w, &w->view[w->epoch].member[r])) return true;
    return false;
}

/* If all members of the last view are dead, the user says so. If there is no process, begins one.
 */
static void user(struct world *w) {
    int processes = 0;
    for (int s = 0; s < w->slots; s++) processes += w->process[s].alive;
    for (int s = 0; s < w->slots && !processes; s++) begin(w, s), processes += w->process[s].alive;
    if (!w->view[w->epoch].members || any_member_lives(w)) return;
    for (int s = 0; s < w->slots; s++) {
        struct process *p = &w->process[s];
        if (!p->alive || (p->a.set.anew && now(w) < p->a.found_at + 20)) continue;
        tell(w, "process %d takes over", s);
        p->a.set.anew = true;
        p->a.found = w->epoch;
        p->a.found_at = now(w);
        count.anews++;
        return;
    }
}

/* All members of a view that is alive stop together. */
static void stop_all(struct world *w, struct process *p) {
    if (p->busy || !is_alive(w, p)) return;
    for (int r = 0; r < p->a.view.members; r++)
        if (r != p->a.view.self) end(process_of(w, &p->a.view.member[r]));
    p->busy = p->stops = true;
    tell(w, "process %d ends the view", p->slot);
    enum agreement_result result;
    while ((result = agreement_dissolve(&p->a)) == AGREEMENT_WAIT) stall(p, 0.1);
    count.stops += result == AGREEMENT_STOPPED;
    p->busy = false;
    if (p->doomed)
        agreement_clear(&p->a);
    else
        end(p);
}

static void break_something(struct world *w) {
    const int a = (int)random_below((uint32_t)w->slots), b = (int)random_below((uint32_t)w->slots);
    struct process *p = &w->process[a];
    switch (random_below(11)) {
    case 0:
    case 1:
        end(p);
        break;
    case 2:
    case 3:
        begin(w, a);
        break;
    case 4:
        p->frozen = now(w) + uniform(15);
        tell(w, "process %d is frozen until %.2f", a, p->frozen);
        break;
    case 5:
        cut(w);
        break;
    case 6:
        w->hears[a][b] = a == b;
        tell(w, "process %d does not hear %d", a, b);
        break;
    case 7:
        heal(w);
        break;
    case 8:
        store_down(w);
        break;
    case 9:
        user(w);
        break;
    case 10:
        stop_all(w, p);
        break;
    }
}

/* The end of the faults. Perhaps one process is left over. */
static void heal_all(struct world *w) {
    heal(w);
    store_up(w, false);
    w->faulty = false;
    if (chance(0.4)) {
        const int kept = (int)random_below((uint32_t)w->slots);
        for (int s = 0; s < w->slots; s++)
            if (s != kept) end(&w->process[s]);
        begin(w, kept);
        count.alone++;
    } else if (chance(0.5)) {
        for (int s = 0; s < w->slots; s++) begin(w, s);
    } else {
        begin(w, 0);
    }
}

/* ---- time ---- */

static bool can_act(const struct process *p) {
    return p->alive && !p->busy;
}

static double next_of(const struct process *p) {
    return fmax(p->frozen, fmin(p->tick, p->watch));
}

/* All that happens up to a time, in order. Processes act one within another where one waits. */
static void run_until(struct world *w, double until) {
    while (!w->done) {
        double next = fmin(w->fault, w->back);
        int late = -1;
        struct process *first = NULL;
        for (int i = 0; i < w->memory.late; i++)
            if (w->up && w->memory.later[i].when < next) next = w->memory.later[late = i].when;
        for (int s = 0; s < w->slots; s++)
            if (can_act(&w->process[s]) && next_of(&w->process[s]) < next)
                next = next_of((first = &w->process[s]));
        if (next > until) break;
        w->memory.now = fmax(next, now(w));
        if (first)
            act(first);
        else if (late >= 0)
            memory_arrive(&w->memory, late, true), count.late++;
        else if (next == w->back)
            store_up(w, chance(0.3));
        else if (now(w) < FAULTS_END)
            break_something(w), w->fault += uniform(w->slots > FEW ? 2 : 8);
        else if (w->faulty)
            heal_all(w), w->fault = now(w) + 1;
        else
            user(w), w->fault += 5;
        if (!w->faulty && !w->endless && has_settled(w)) w->done = true;
    }
    if (!w->done) w->memory.now = fmax(until, now(w));
}

/* Fewer processes than the first view takes wait for more, for ever. */
static bool may_wait(const struct world *w) {
    int processes = 0;
    for (int s = 0; s < w->slots; s++) processes += w->process[s].alive;
    return !w->view[w->epoch].members && processes < w->first_ranks;
}

static struct world *world_open(int number, int slots) {
    struct world *w = (struct world *)calloc(1, sizeof *w);
    assert_non_null(w);
    chance_key = (uint64_t)number;
    chance_index = 0;
    w->number = number;
    w->slots = slots ? slots : 2 + (int)random_below(FEW - 1);
    w->first_ranks = w->slots - (int)random_below((uint32_t)w->slots);
    w->memory.seen = see_write;
    w->memory.context = w;
    w->up = true;
    w->back = INFINITY;
    heal(w);
    for (int s = 0; s < w->slots; s++) begin(w, s);
    return w;
}

static void world_close(struct world *w) {
    for (int s = 0; s < w->slots; s++) end(&w->process[s]);
    for (int64_t e = 1; e <= w->epoch; e++) view_clear(&w->view[e]);
    memory_clear(&w->memory);
    free(w);
}

/* ---- tests ---- */

static void history(int number, int slots) {
    struct world *w = world_open(number, slots);
    w->faulty = true;
    w->fault = uniform(12);
    run_until(w, GIVE_UP);
    check_that(w, w->done || may_wait(w), "no view has all processes, long after the last fault");
    world_close(w);
}

static void test_histories(void **state) {
    (void)state;
    const char *only = getenv("HISTORY");
    log_muted = true;
    telling = only != NULL;
    for (int i = only ? atoi(only) : 0; i < (only ? atoi(only) + 1 : HISTORIES); i++) history(i, 0);
    log_muted = false;
    print_message("%ld views, %ld times left out, %ld conflicts, %ld late writes, %ld waits, "
                  "%ld takeovers, %ld lone survivors, %ld stops, %ld that follow\n",
                  count.views, count.lefts, count.conflicts, count.late, count.stalls, count.anews,
                  count.alone, count.stops, count.follows);
    if (only) return;
    assert_true(count.views > 3 * HISTORIES);
    assert_true(count.lefts > HISTORIES / 10);
    assert_true(count.conflicts > HISTORIES / 10 && count.late > HISTORIES / 10);
    assert_true(count.anews > HISTORIES / 100 && count.follows > HISTORIES / 100);
}

/* A quiet world of `slots` processes that are in their first view. */
static struct world *settled(int slots) {
    struct world *w = world_open(1, slots);
    w->first_ranks = slots;
    for (int s = 0; s < slots; s++) w->process[s].a.set.first_ranks = slots;
    w->fault = INFINITY;
    run_until(w, 60);
    assert_true(w->done);
    w->done = false;
    w->endless = true;
    return w;
}

static void test_wide_histories(void **state) {
    (void)state;
    const char *wanted = getenv("PROCESSES");
    const int processes = wanted ? atoi(wanted) : MANY, histories = wanted ? 1 : WIDE_HISTORIES;
    const long views = count.views;
    log_muted = true;
    for (int i = 0; i < histories; i++) history(i, processes);
    log_muted = false;
    print_message("%ld views in %d histories of %d processes\n", count.views - views, histories,
                  processes);
    assert_true(count.views - views > 3 * histories);
}

/* One of many dies: one proposal is enough, and nobody else is left out. */
static void agree(int processes) {
    struct world *w = settled(processes);
    run_until(w, now(w) + 10);
    w->endless = false;
    const double began = now(w);
    end(&w->process[w->view[w->epoch].member[processes / 2].pid]);
    memset(&count, 0, sizeof count);
    run_until(w, began + 60);
    print_message(
        "%d processes, one dies: %.2f s until all others are in the next view, of which %g s "
        "until it is noticed; %ld snapshots, %ld writes, %ld of them in vain, %ld leases kept\n",
        processes, now(w) - began, SILENCE, count.lists, count.commits, count.conflicts,
        count.keeps);
    assert_true(w->done);
    assert_int_equal(w->epoch, 2);
    assert_int_equal(w->view[2].members, processes - 1);
    world_close(w);
}

static void test_one_of_many_dies(void **state) {
    (void)state;
    const char *processes = getenv("PROCESSES");
    agree(4);
    agree(MANY);
    if (processes) agree(atoi(processes));
}

/* Seconds until the next view is there, when the `gone` last members have died or are cut off. */
static double until_next_view(int processes, int gone, bool cut_off) {
    struct world *w = settled(processes);
    run_until(w, now(w) + 5);
    const double began = now(w);
    for (int r = processes - gone; r < processes; r++) {
        const int pid = w->view[1].member[r].pid;
        w->asks[pid] = false;
        for (int s = 0; s < processes && cut_off; s++) w->hears[s][pid] = w->hears[pid][s] = false;
        if (!cut_off) end(&w->process[pid]);
    }
    while (w->epoch == 1 && now(w) < began + 20) run_until(w, now(w) + 0.01);
    const double seconds = now(w) - began;
    assert_int_equal(w->view[2].members, processes - gone);
    world_close(w);
    return seconds;
}

/* What is known is not waited for: that a host which is cut off does not answer, and that dead
 * processes, unlike silent ones, are on no larger side of a cut. */
static void test_what_is_known_is_not_waited_for(void **state) {
    (void)state;
    const double cut_off = until_next_view(4, 1, true), most = until_next_view(4, 3, false),
                 most_cut_off = until_next_view(4, 3, true);
    print_message("%.2f s until one of four that is cut off is left out; three of four that are "
                  "dead: %.2f s, cut off: %.2f s\n",
                  cut_off, most, most_cut_off);
    assert_true(cut_off < SILENCE + 0.5 && most < SILENCE + 0.5);
    assert_true(most_cut_off > SILENCE + 1.5);
}

/* More are silent than one write can remove; they come back as new ones. */
static void test_many_are_left_out_at_once(void **state) {
    (void)state;
    enum { ALL = STORE_WRITES_MOST + 60, SILENT = STORE_WRITES_MOST + 30 };
    struct world *w = settled(ALL);
    const int before = w->lefts;
    for (int s = 0; s < SILENT; s++) w->process[s].frozen = now(w) + 20;
    run_until(w, now(w) + 15);
    assert_true(w->lefts - before == SILENT && w->view[w->epoch].members == ALL - SILENT);
    w->endless = false;
    run_until(w, now(w) + 60);
    assert_true(w->done && w->view[w->epoch].members == ALL);
    world_close(w);
}

static void test_store_away_while_nobody_dies(void **state) {
    (void)state;
    struct world *w = settled(4);
    const double until = now(w) + 70;
    store_down(w);
    w->back = now(w) + 60;
    for (double t = now(w); t < until; t += 0.1) {
        run_until(w, t);
        for (int s = 0; s < w->slots; s++) {
            assert_int_equal(w->process[s].a.state, AGREEMENT_INSIDE);
            assert_false(w->process[s].a.changed);
        }
    }
    assert_int_equal(w->epoch, 1);
    world_close(w);
}

/* One process does not hear another, and rank 0, which reaches both, takes back who was left out.
 */
static void test_one_way_link_changes_few_views(void **state) {
    (void)state;
    struct world *w = settled(4);
    const struct member *member = w->process[0].a.view.member;
    w->hears[member[2].pid][member[1].pid] = false;
    run_until(w, now(w) + 600);
    print_message("%lld views in ten minutes of a link that loses everything one way\n",
                  (long long)w->epoch);
    assert_true(w->epoch > 20 && w->epoch < 100);
    world_close(w);
}

/* Whom rank 0 cannot reach does not stop the others. */
static void test_unreachable_joiner_disturbs_nobody(void **state) {
    (void)state;
    struct world *w = settled(3);
    w->slots = 4;
    for (int s = 0; s < 4; s++) w->hears[s][3] = w->hears[3][s] = s == 3;
    w->asks[3] = true;
    begin(w, 3);
    run_until(w, now(w) + 60);
    assert_int_equal(w->epoch, 1);
    assert_int_equal(w->process[3].a.obstacle, AGREEMENT_TAKING);
    world_close(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_histories),
        cmocka_unit_test(test_wide_histories),
        cmocka_unit_test(test_one_of_many_dies),
        cmocka_unit_test(test_what_is_known_is_not_waited_for),
        cmocka_unit_test(test_many_are_left_out_at_once),
        cmocka_unit_test(test_store_away_while_nobody_dies),
        cmocka_unit_test(test_one_way_link_changes_few_views),
        cmocka_unit_test(test_unreachable_joiner_disturbs_nobody),
    };
    const struct CMUnitTest wide[] = {
        cmocka_unit_test(test_wide_histories),
        cmocka_unit_test(test_one_of_many_dies),
    };
    /* A world is many MiB, most of which no history touches. Fresh pages from the kernel are zero;
     * memory that was used before would be cleared for each of 5,000 histories. */
    mallopt(M_MMAP_THRESHOLD, 1 << 20);
    if (getenv("PROCESSES")) return cmocka_run_group_tests(wide, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
