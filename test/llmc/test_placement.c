/* Tests where a run's arrays lie (placement.h), over all combinations of backend, ranks, types and
 * options that a run may have; and that a worker allocates what the table of arrays says
 * (arrays.h), no more and no less. */
#include "llmc/memory/placement.h"
#include "llmc/memory/worker.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- what typical runs hold ---- */

/* Two workers, one per rank, of a model with 32 layers; ONE: both in one rank. */
#define TWO .ranks = 2, .workers = 2, .micro_batches = 1, .layers = 32
#define ONE .ranks = 1, .workers = 2, .micro_batches = 1, .layers = 32
#define GPU .device = true, .dtype = DTYPE_BF16

static const struct {
    const char *name;
    struct placement_run run;
    struct {
        bool trains, steps_alone, rounds_to_bf16;
        bool staged, masters, weights, leads; /* arrays that there are */
        bool copies_bf16, gathers, shares_ranks;
        int slots, copy_slots;
    } expected;
} runs[] = {
    {"CPU", {TWO, .leads = true}, {.trains = true, .leads = true, .gathers = true}},
    {"CPU, evaluation", {TWO, .evaluates = true, .leads = true}, {.gathers = true}},
    {"CPU, a worker alone",
     {.ranks = 1, .workers = 1, .micro_batches = 1, .layers = 32},
     {.trains = true}},
    {"CPU, a group of ranks",
     {TWO, .group = 2},
     {.trains = true, .gathers = true, .shares_ranks = true}},
    {"GPU, float32, one rank", {ONE, .device = true}, {.trains = true, .gathers = true}},
    {"GPU, float32", {TWO, .device = true, .narrow = true}, {.trains = true, .staged = true}},
    {"GPU, bf16, one rank, bf16 packets",
     {ONE, GPU, .narrow = true},
     {.trains = true, .weights = true, .rounds_to_bf16 = true, .gathers = true}},
    {"GPU, bf16",
     {TWO, GPU},
     {.trains = true,
      .staged = true,
      .masters = true,
      .weights = true,
      .gathers = true,
      .slots = 3}},
    {"GPU, bf16 packets",
     {TWO, GPU, .narrow = true},
     {.trains = true,
      .staged = true,
      .masters = true,
      .copies_bf16 = true,
      .rounds_to_bf16 = true,
      .weights = true,
      .gathers = true,
      .slots = 3}},
    {"GPU, bf16 packets, micro-batches",
     {.ranks = 2, .workers = 2, .micro_batches = 2, .layers = 32, GPU, .narrow = true},
     {.trains = true,
      .staged = true,
      .masters = true,
      .copies_bf16 = true,
      .rounds_to_bf16 = true,
      .weights = true,
      .gathers = true}},
    {"GPU, deep model",
     {.ranks = 2, .workers = 2, .micro_batches = 1, .layers = BACKEND_MARKS, GPU},
     {.trains = true, .staged = true, .masters = true, .weights = true, .gathers = true}},
    {"GPU, --meet",
     {TWO, GPU, .changes = true, .narrow = true},
     {.trains = true, .staged = true, .weights = true, .rounds_to_bf16 = true}},
    {"GPU, rps",
     {TWO, GPU, .steps_alone = true},
     {.trains = true, .staged = true, .weights = true, .steps_alone = true}},
    {"GPU, a group of ranks",
     {TWO, GPU, .group = 2, .narrow = true},
     {.trains = true,
      .staged = true,
      .masters = true,
      .copies_bf16 = true,
      .rounds_to_bf16 = true,
      .weights = true,
      .gathers = true,
      .slots = 3,
      .copy_slots = 3,
      .shares_ranks = true}},
};

static void same(const char *run, const char *member, int is, int expected) {
    if (is != expected) fail_msg("%s: %s is %d, expected %d", run, member, is, expected);
}

static void test_typical_runs(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        const struct placement p = placement_of(&runs[i].run);
        const enum way way = runs[i].expected.shares_ranks ? WAY_SHARED
                             : runs[i].expected.staged     ? WAY_STAGED
                                                           : WAY_IN_PLACE;
        same(runs[i].name, "way", (int)p.way, (int)way);
        same(runs[i].name, "copy_bytes", p.copy_bytes, runs[i].expected.copies_bf16 ? 2 : 4);
#define SAME(is, member) same(runs[i].name, #member, (int)p.is, (int)runs[i].expected.member)
        SAME(trains, trains), SAME(steps_alone, steps_alone), SAME(rounds_to_bf16, rounds_to_bf16);
        SAME(has[ARRAY_COMM_PARAMS], staged), SAME(has[ARRAY_MASTER], masters);
        SAME(has[ARRAY_WEIGHTS], weights), SAME(has[ARRAY_AHEAD], leads);
        SAME(has[ARRAY_MODEL], gathers);
        SAME(slots, slots), SAME(copy_slots, copy_slots);
    }
}

/* ---- all runs: a worker and the table of arrays ---- */

enum { OWNED = 301, LAYERS = 2 };
static double taken[2], blocks; /* bytes on the device, and pinned; blocks that are not released */

static void *take(int space, size_t bytes) {
    taken[space] += (double)bytes;
    blocks++;
    return malloc(bytes);
}
static void *take_device(size_t bytes) {
    return take(0, bytes);
}
static void *take_pinned(size_t bytes) {
    return take(1, bytes);
}
static void give_back(void *memory) {
    blocks -= memory != NULL;
    free(memory);
}

/* Whether validate.c and comm/settings.c would let a run be like this. */
static bool is_allowed(const struct placement_run *r) {
    if (r->workers % r->ranks || r->group > r->workers) return false;
    if (r->steps_alone && (r->group > 1 || r->leads || r->narrow)) return false;
    return r->group <= 1 || !r->changes;
}

static void check_vectors(const struct worker *w, const struct placement *p) {
    assert_true(w->params && w->comm_params);
    assert_true((w->params == w->comm_params) ==
                (!p->has[ARRAY_COMM_PARAMS] || p->has[ARRAY_MASTER]));
    assert_true(!p->trains || (w->grads && w->comm_grads && w->m && w->v));
    assert_true(!p->trains || (w->grads == w->comm_grads) == !p->has[ARRAY_COMM_PARAMS]);
    assert_true(!w->m == !p->trains);
    assert_true(!w->master == !p->has[ARRAY_MASTER] && !w->average == !p->has[ARRAY_MASTER]);
    assert_true(!w->comm_master == (p->copy_bytes == 4) &&
                !w->comm_average == (p->copy_bytes == 4) && w->copy_bytes == p->copy_bytes);
    assert_true(!w->ahead == !p->has[ARRAY_AHEAD] && !w->comm_ahead == !p->has[ARRAY_AHEAD]);
    assert_true((w->ahead == w->comm_ahead) ==
                (!p->has[ARRAY_AHEAD] || !p->has[ARRAY_COMM_PARAMS]));
}

/* A worker's own arrays of a line; those of the rank and of a group come from elsewhere. */
static double said(const struct placement *p, const struct array_sizes *sizes, bool pinned) {
    double bytes = 0;
    for (int a = 0; a < ARRAYS; a++) {
        const struct array_row *row = &array_rows[a];
        assert_true(!row->saved || row->extent == EXTENT_OWNED || a == ARRAY_V);
        assert_true(!row->follows || row->saved); /* by the same name in all checkpoints */
        if (!p->has[a] || row->space == SPACE_GROUP || row->per == PER_RANK ||
            row->per == PER_SET || (row->space == SPACE_PINNED) != pinned)
            continue;
        bytes += array_bytes((enum array)a, p, sizes);
    }
    return bytes;
}

static int check_run(const struct placement_run *r, const struct param_layout *layout) {
    const struct backend be = {.allocate = take_device,
                               .release = give_back,
                               .allocate_pinned = take_pinned,
                               .release_pinned = give_back};
    const struct placement p = placement_of(r);
    struct worker w = {.squares.elements = OWNED};
    /* Members of a group take what they share from elsewhere (group.c). */
    float shared;
    if (p.way == WAY_SHARED) {
        w.comm_params = w.comm_grads = &shared;
        if (!p.has[ARRAY_COMM_PARAMS]) w.params = w.grads = &shared;
    }
    taken[0] = taken[1] = 0;
    assert_int_equal(worker_allocate(&w, &be, layout, &p, OWNED), 0);
    if (p.way != WAY_SHARED) {
        const struct array_sizes sizes = worker_sizes(layout, &p, OWNED);
        assert_true(taken[0] == said(&p, &sizes, false));
        const double more = taken[1] - said(&p, &sizes, true); /* two vectors of odd length */
        assert_true(more == 0 || (p.copy_bytes == 2 && more > 0 && more <= 4));
        check_vectors(&w, &p);
        assert_true(p.has[ARRAY_COMM_PARAMS] || taken[1] == 0);
    }
    /* Each network copy is of the type that lossynet reads, and only devices have copies. */
    assert_true(p.copy_bytes == 4 || (p.has[ARRAY_MASTER] && p.rounds_to_bf16));
    assert_true(!p.has[ARRAY_MASTER] ||
                (p.has[ARRAY_COMM_PARAMS] && p.has[ARRAY_WEIGHTS] && p.trains));
    assert_true(r->device ||
                !(p.has[ARRAY_COMM_PARAMS] || p.has[ARRAY_WEIGHTS] || p.rounds_to_bf16 || p.slots));
    assert_true(!p.slots || (p.has[ARRAY_MASTER] && r->micro_batches == 1));
    worker_release(&w, &be);
    assert_true(blocks == 0);
    return 1;
}

static void test_all_runs(void **state) {
    (void)state;
    struct llama_config c = {.layers = LAYERS,
                             .width = 8,
                             .hidden = 16,
                             .heads = 2,
                             .kv_heads = 2,
                             .head_size = 4,
                             .vocabulary = 11,
                             .positions = 8};
    struct param_layout layout;
    int checked = 0;
    assert_int_equal(param_layout_build(&c, &layout), 0);
    for (int bits = 0; bits < 1 << 8; bits++)
        for (int ranks = 1; ranks <= 2; ranks++)
            for (int local = 1; local <= 2; local++)
                for (int group = 1; group <= 2; group++) {
                    const struct placement_run r = {.device = bits & 1,
                                                    .dtype =
                                                        bits >> 1 & 1 ? DTYPE_BF16 : DTYPE_FLOAT32,
                                                    .ranks = ranks,
                                                    .workers = ranks * local,
                                                    .group = group,
                                                    .micro_batches = 1 + (bits >> 2 & 1),
                                                    .layers = LAYERS,
                                                    .evaluates = bits >> 3 & 1,
                                                    .steps_alone = bits >> 4 & 1,
                                                    .changes = bits >> 5 & 1,
                                                    .leads = bits >> 6 & 1,
                                                    .narrow = bits >> 7 & 1};
                    if (is_allowed(&r)) checked += check_run(&r, &layout);
                }
    assert_true(checked > 500);
    param_layout_release(&layout);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_typical_runs),
        cmocka_unit_test(test_all_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
