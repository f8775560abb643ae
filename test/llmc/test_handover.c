/* test_handover.c — tests what ranks keep and redistribute when their number changes
 * (llmc/comm/handover.c).
 *
 * Ranks are threads that meet over loopback. Each has workers, a comm over UDP and its own model.
 * They train with gradients that are functions of the element, and lose packets. Then they meet
 * again without some of the ranks and with new ones. */
#include <malloc.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/backend/backend.h"
#include "llmc/comm/handover.h"
#include "llmc/comm/data_parallel_model.h"
#include "llmc/comm/settings.h"
#include "llmc/log/error.h"
#include "llmc/model/config.h"

enum { MOST = 4, STEPS = 12 };

struct life { /* one rank, in one view after the other */
    struct options options;
    int listener, port;
    int rank, ranks; /* in the view that it enters */
    int64_t epoch;
    char address[32];
    int local;
    int steps; /* that it trains in the view */
    struct data_parallel d;
    struct llama_config config;
    struct param_layout layout; /* of the view */
    struct handover_place place;
    struct handover state;
    struct handover_report report;
    pthread_t thread;
    int failed;
};

/* Trains: gradients of worker w are functions of element, worker and step. */
static int train(struct life *l) {
    struct data_parallel *d = &l->d;
    for (int i = 0; i < l->steps; i++) {
        int step = l->place.at.step;
        double norm;
        struct step_metrics r;
        memset(&r, 0, sizeof r);
        if (data_parallel_begin(d, &step)) return -1;
        for (int w = 0; w < d->local; w++)
            for (size_t e = 0; e < l->layout.count; e++)
                d->worker[w].grads[e] =
                    1e-3f * sinf((float)(e + 1) * (float)(step + 1) + (float)d->worker[w].id);
        if (data_parallel_average_gradients(d) || data_parallel_gradient_norm(d, &norm)) return -1;
        const struct worker_step s = {.step = step, .learning_rate = 1e-2, .gradient_scale = 1};
        data_parallel_update_shards(d, s, norm);
        r.step = step;
        if (data_parallel_broadcast(d, ARRAY_PARAMS) || data_parallel_finish_begin(d, &r) ||
            data_parallel_finish_end(d, &r))
            return -1;
        l->place.at.step++;
    }
    return 0;
}

static int live(struct life *l) {
    struct data_parallel *d = &l->d;
    struct lossynet_world world;
    const struct lossynet_meeting meeting = {.address = l->address,
                                             .listener = l->listener,
                                             .epoch = (uint64_t)l->epoch,
                                             .rank = l->rank,
                                             .ranks = l->ranks,
                                             .seconds = 60};
    if (lossynet_rendezvous_meet(&meeting, &world)) return -1;
    memset(d, 0, sizeof *d);
    d->options = &l->options;
    d->be = backend_cpu(DTYPE_FLOAT32);
    d->layout = &l->layout;
    d->world = world;
    d->workers = l->ranks * l->local;
    param_layout_release(&l->layout);
    if (comm_layout(&l->options, &l->config, d->workers, &l->layout)) return -1;
    const struct placement_run run = {.ranks = l->ranks,
                                      .workers = d->workers,
                                      .changes = true,
                                      .leads = comm_leads(&l->options, d->workers)};
    d->placement = placement_of(&run);
    if (data_parallel_open(d) || handover_give(&l->state, d, &l->place, &l->report)) return -1;
    if (!l->report.survivors && data_parallel_initialise(d)) return -1;
    assert_int_equal(data_parallel_start(d), 0);
    int failed = train(l);
    lossynet_rendezvous_close(&world);
    return failed;
}

static void *run(void *argument) {
    struct life *l = (struct life *)argument;
    l->failed = live(l);
    return NULL;
}

static void begin(struct life *l, int local, const char *rate) {
    char *argv[] = {(char *)"test",         (char *)"--model=260K", (char *)"--vocab-size=64",
                    (char *)"--seed=7",     (char *)"--link=udp",   (char *)"--packet-bytes=256",
                    (char *)"--loss-rate",  (char *)rate,           (char *)"--drift-samples=0",
                    (char *)"--no-overlap", (char *)"--lead=off",   (char *)"--wire-dtype=float32"};
    memset(l, 0, sizeof *l);
    assert_int_equal(options_parse(sizeof argv / sizeof *argv, argv, &l->options), 0);
    assert_int_equal(config_of_model("260K", &l->config), 0);
    assert_int_equal(config_complete("260K", 64, 64, &l->config), 0);
    assert_int_equal(
        lossynet_rendezvous_listen("127.0.0.1:0", (const int[2]){0, 0}, &l->listener, &l->port), 0);
    l->local = local;
}

static void *end(void *argument) {
    struct life *l = (struct life *)argument;
    data_parallel_close(&l->d);
    handover_release(&l->state);
    param_layout_release(&l->layout);
    close(l->listener);
    return NULL;
}

/* Together, since a rank that leaves a comm waits for the others to take note. */
static void end_all(struct life *life, int count) {
    for (int r = 0; r < count; r++)
        assert_int_equal(pthread_create(&life[r].thread, NULL, end, &life[r]), 0);
    for (int r = 0; r < count; r++) pthread_join(life[r].thread, NULL);
}

/* These enter a view together, in this order of ranks, and train in it. */
static void enter(struct life *const *who, int ranks, int64_t epoch, int steps) {
    for (int r = 0; r < ranks; r++) {
        who[r]->rank = r;
        who[r]->ranks = ranks;
        who[r]->epoch = epoch;
        who[r]->steps = steps;
        snprintf(who[r]->address, sizeof who[r]->address, "127.0.0.1:%d", who[0]->port);
        assert_int_equal(pthread_create(&who[r]->thread, NULL, run, who[r]), 0);
    }
    for (int r = 0; r < ranks; r++) pthread_join(who[r]->thread, NULL);
    for (int r = 0; r < ranks; r++) assert_int_equal(who[r]->failed, 0);
}

static void leave(struct life *l) {
    assert_int_equal(handover_take(&l->d, l->epoch, &l->state), 0);
    lossynet_close(l->d.comm); /* first, as peers wait for it; the rest is compared with later */
    l->d.comm = NULL;
    data_parallel_close(&l->d);
    memset(&l->d, 0, sizeof l->d);
}

/* Ranks leave together, as a comm is left. */
static void *leave_thread(void *argument) {
    leave((struct life *)argument);
    return NULL;
}

static void leave_all(struct life *const *who, int ranks) {
    for (int r = 0; r < ranks; r++)
        assert_int_equal(pthread_create(&who[r]->thread, NULL, leave_thread, who[r]), 0);
    for (int r = 0; r < ranks; r++) pthread_join(who[r]->thread, NULL);
}

/* Copies what owners have: parameters and moments by element. */
static void collect(struct life *const *who, int ranks, float *params, float *m, float *v) {
    for (int r = 0; r < ranks; r++) {
        const struct data_parallel *d = &who[r]->d;
        for (int w = 0; w < d->local; w++) {
            size_t state = 0;
            for (int b = 0; b < d->layout->buckets; b++) {
                size_t offset, count;
                lossynet_shard(d->comm, d->worker[w].id, b, &offset, &count);
                memcpy(params + offset, d->worker[w].params + offset, count * sizeof *params);
                memcpy(m + offset, d->worker[w].m + state, count * sizeof *m);
                state += count;
            }
            const struct ranges *squares = &d->worker[w].squares;
            for (const struct range *s = squares->range; s < squares->range + squares->count; s++)
                memcpy(v + s->offset, d->worker[w].v + s->state, s->count * sizeof *v);
        }
    }
}

struct model {
    float *params, *m, *v;
};

static struct model model_of(struct life *const *who, int ranks) {
    const size_t P = who[0]->layout.count;
    struct model model = {malloc(P * sizeof(float)), malloc(P * sizeof(float)),
                          calloc(P, sizeof(float))};
    collect(who, ranks, model.params, model.m, model.v);
    return model;
}

static void release(struct model model) {
    free(model.params);
    free(model.m);
    free(model.v);
}

static void assert_replicas(struct life *const *who, int ranks, const float *params) {
    for (int r = 0; r < ranks; r++)
        for (int w = 0; w < who[r]->d.local; w++)
            assert_memory_equal(who[r]->d.worker[w].params, params,
                                who[r]->layout.count * sizeof *params);
}

/* ---- cases ---- */

/* Nobody is gone: everything is as it was, however many ranks there are now. */
static void joining_changes_nothing(void **state) {
    (void)state;
    for (int local = 1; local <= 2; local++) {
        struct life life[MOST];
        struct life *who[MOST] = {&life[0], &life[1], &life[2], &life[3]};
        for (int r = 0; r < MOST; r++) begin(&life[r], local, "0.3");
        enter(who, 2, 1, STEPS);
        struct model before = model_of(who, 2);
        assert_int_equal(life[0].report.survivors, 0);
        leave_all(who, 2);
        enter(who, 4, 2, 0);
        struct model after = model_of(who, 4);
        const size_t bytes = life[0].layout.count * sizeof(float);
        assert_memory_equal(before.params, after.params, bytes);
        assert_memory_equal(before.m, after.m, bytes);
        assert_memory_equal(before.v, after.v, bytes);
        assert_replicas(who, 4, after.params);
        for (int r = 0; r < 4; r++) {
            assert_int_equal(life[r].place.at.step, STEPS);
            assert_int_equal(life[r].report.survivors, 2);
            assert_int_equal(life[r].report.joined, 2);
            assert_int_equal(life[r].report.adopted, 0);
        }
        end_all(life, MOST);
        release(before);
        release(after);
    }
}

/* A rank is gone: what it owned comes from the freshest copy, with the tensor's mean square. */
static void check_adoption(enum optimizer optimizer) {
    struct life life[MOST];
    struct life *first[] = {&life[0], &life[1], &life[2]};
    struct life *second[] = {&life[0], &life[2], &life[3]}; /* 1 is dead, 3 is new */
    for (int r = 0; r < MOST; r++) {
        begin(&life[r], 1, "0.6");
        life[r].options.optimizer = optimizer;
    }
    enter(first, 3, 1, STEPS);
    struct model before = model_of(first, 3);
    const size_t P = life[0].layout.count;
    leave_all(first, 3);
    life[2].place.at.step = STEPS - 1; /* it had not finished the last step */
    /* What the owner that is gone owned, by element. */
    uint8_t *orphan = calloc(P, 1);
    float *freshest = malloc(P * sizeof(float));
    const struct handover *here = &life[0].state, *there = &life[2].state;
    size_t orphans = 0, fresher = 0;
    double ages = 0;
    for (int i = 0; i < here->shards; i++) {
        const struct range range = here->shard[i].range;
        if (here->shard[i].owner != 1) continue;
        memset(orphan + range.offset, 1, range.count);
        size_t p = here->shard[i].packet;
        for (size_t at = range.offset; at < range.offset + range.count;
             at += here->packet_elements, p++, orphans++) {
            const uint8_t a = here->age[p], c = there->age[p];
            const size_t rest = range.offset + range.count - at,
                         n = rest < here->packet_elements ? rest : here->packet_elements;
            const float *from = a <= c ? here->params : there->params;
            memcpy(freshest + at, from + at, n * sizeof(float));
            if (a == c) /* sent in the same step, so the same values */
                assert_memory_equal(here->params + at, there->params + at, n * sizeof(float));
            fresher += a != c;
            ages += a < c ? a : c;
        }
    }
    assert_true(fresher > 10);
    enter(second, 3, 5, 0);
    struct model after = model_of(second, 3);
    assert_replicas(second, 3, after.params);
    for (int s = 0; s < life[0].layout.spans; s++) {
        const struct span *span = &life[0].layout.span[s];
        double sum = 0, count = 0;
        for (size_t e = span->offset; e < span->offset + span->count; e++)
            if (!orphan[e]) sum += before.v[e], count++;
        for (size_t e = span->offset; e < span->offset + span->count; e++) {
            assert_true(after.params[e] == (orphan[e] ? freshest : before.params)[e]);
            assert_true(after.m[e] == (orphan[e] ? 0 : before.m[e]));
            if (orphan[e] && count)
                assert_true(fabs(after.v[e] - sum / count) <= 1e-6 * sum / count);
            else if (!orphan[e])
                assert_true(after.v[e] == before.v[e]);
        }
    }
    for (int r = 0; r < 3; r++) {
        assert_int_equal(second[r]->place.at.step, STEPS);
        assert_int_equal(second[r]->report.survivors, 2);
        assert_int_equal(second[r]->report.joined, 1);
        assert_int_equal(second[r]->report.adopted, orphans);
        assert_true(fabs(second[r]->report.mean_age - ages / (double)orphans) < 1e-9);
    }
    /* The next view has all that this one had, one rank being left of three. */
    leave_all(second, 3);
    enter(second, 1, 6, 3);
    assert_int_equal(life[0].place.at.step, STEPS + 3);
    assert_int_equal(life[0].report.survivors, 1);
    end_all(life, MOST);
    release(before);
    release(after);
    free(orphan);
    free(freshest);
}

static void what_a_dead_rank_owned_is_adopted(void **state) {
    (void)state;
    check_adoption(OPTIMIZER_ADAMW);
}

/* Muon's owners have whole matrices, so that their shards are not alike. */
static void shards_of_all_sizes_are_adopted(void **state) {
    (void)state;
    check_adoption(OPTIMIZER_MUON);
}

/* A rank brings the fresher of its workers' copies. */
static void a_rank_keeps_its_freshest_copies(void **state) {
    (void)state;
    struct life life[2];
    struct life *who[] = {&life[0], &life[1]};
    for (int r = 0; r < 2; r++) begin(&life[r], 2, "0.6");
    enter(who, 2, 1, STEPS);
    const struct data_parallel *d = &life[0].d;
    assert_int_equal(handover_take(d, 1, &life[0].state), 0);
    const struct handover *h = &life[0].state;
    const uint32_t *age[2] = {lossynet_ages(d->comm, 0), lossynet_ages(d->comm, 1)};
    size_t second = 0;
    for (int i = 0; i < h->shards; i++) {
        const struct range range = h->shard[i].range;
        size_t p = h->shard[i].packet;
        for (size_t at = range.offset; at < range.offset + range.count;
             at += h->packet_elements, p++) {
            if (h->shard[i].owner < 2) continue;
            const int w = age[1][p] < age[0][p];
            assert_int_equal(h->age[p], age[w][p]);
            assert_true(h->params[at] == d->worker[w].params[at]);
            second += (size_t)w;
        }
    }
    assert_true(second > 10);
    end_all(life, 2);
}

/* Who brings an older view's state was away, and is new. */
static void an_older_view_does_not_count(void **state) {
    (void)state;
    struct life life[3];
    struct life *who[] = {&life[0], &life[1], &life[2]};
    for (int r = 0; r < 3; r++) begin(&life[r], 1, "0");
    enter(who, 3, 1, 2);
    leave_all(who, 3);
    struct life *without[] = {&life[0], &life[1]};
    enter(without, 2, 2, 3);
    struct model before = model_of(without, 2);
    leave_all(without, 2);
    enter(who, 3, 3, 0);
    struct model after = model_of(who, 3);
    assert_memory_equal(before.params, after.params, life[0].layout.count * sizeof(float));
    assert_memory_equal(before.v, after.v, life[0].layout.count * sizeof(float));
    assert_int_equal(life[2].place.at.step, 5);
    assert_int_equal(life[2].report.survivors, 2);
    assert_int_equal(life[2].report.joined, 1);
    end_all(life, 3);
    release(before);
    release(after);
}

/* Bytes that are allocated and not freed; all 0 under AddressSanitizer, which finds leaks itself. */
static size_t allocated(void) {
    const struct mallinfo2 m = mallinfo2();
    return m.uordblks + m.hblkhd;
}

/* Members come and go. What a view needs ends with it. */
static void views_keep_no_memory(void **state) {
    (void)state;
    enum { FIRST = 4, VIEWS = 24, EACH = 512 /* bytes: some lists of free blocks differ */ };
    struct life life[3];
    struct life *who[] = {&life[0], &life[1], &life[2]};
    for (int r = 0; r < 3; r++) {
        begin(&life[r], 1, "0.2");
        life[r].options.net.encrypt = true;
        life[r].options.net.carry = 1;
        life[r].options.net.deadline = "auto";
    }
    size_t before = 0;
    for (int view = 1; view <= VIEWS; view++) {
        const int ranks = view % 2 ? 2 : 3;
        enter(who, ranks, view, 2);
        leave_all(who, ranks);
        if (view == FIRST) before = allocated();
    }
    const size_t after = allocated();
    if (after > before + EACH * (VIEWS - FIRST))
        fail_msg("%zu bytes are allocated after %d views, %zu after %d", after, VIEWS, before,
                 FIRST);
    end_all(life, 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(joining_changes_nothing),
        cmocka_unit_test(what_a_dead_rank_owned_is_adopted),
        cmocka_unit_test(shards_of_all_sizes_are_adopted),
        cmocka_unit_test(a_rank_keeps_its_freshest_copies),
        cmocka_unit_test(an_older_view_does_not_count),
        cmocka_unit_test(views_keep_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
