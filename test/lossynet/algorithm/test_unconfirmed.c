/* test_unconfirmed.c — tests error feedback if acknowledgements come late or never, and workers
 * leave out steps or have no gradient. It replays records of runs that are made up at random.
 * Every gradient must count exactly once.
 */
#include "test/lossynet/test_lossynet.h"

#include <unistd.h>

enum { WORKERS = 4, BUCKETS = 2, ELEMENTS = 500 + 130, RANDOM = 60, CALM = 8 };
static const size_t elements[BUCKETS] = {500, 130};

struct part {
    bool takes_part, computes;
};

/* In the last CALM steps all take part, and everything arrives and is told. */
static bool happens(uint64_t seed, uint64_t step, uint64_t what, double probability) {
    return step >= RANDOM || random_unit(seed, step, what) < probability;
}

/* In each step at least one worker takes part, or the record lacks it. */
static struct part part_of(uint64_t seed, uint64_t step, int worker) {
    struct part part = {.takes_part = worker == (int)(step % WORKERS) ||
                                      happens(seed, step, 100 + (uint64_t)worker, 0.8)};
    part.computes = part.takes_part && happens(seed, step, 200 + (uint64_t)worker, 0.8);
    return part;
}

static void write_record(FILE *file, const struct ln_partition *partition, uint64_t seed) {
    for (uint64_t step = 0; step < RANDOM + CALM; step++) {
        for (int w = 0; w < WORKERS; w++) {
            const struct part part = part_of(seed, step, w);
            if (!part.takes_part) continue;
            for (int s = 0; s < WORKERS; s++) {
                if (s == w) continue;
                fprintf(file, "# step %d, gradient, worker %d to %d\n", (int)step, s, w);
                const size_t n = ln_partition_owner_packets(partition, w);
                for (size_t k = 0; k < n; k++) {
                    const uint64_t what = 1000 + ((uint64_t)w * WORKERS + (uint64_t)s) * 100 + k;
                    putc(part_of(seed, step, s).takes_part && happens(seed, step, what, 0.7) ? '0'
                                                                                             : '1',
                         file);
                }
                putc('\n', file);
            }
            fprintf(file, "# step %d, worker %d %s, norm 0x1p+0, lead 0x0p+0\n", (int)step, w,
                    part.computes ? "computes" : "idles");
            fprintf(file, "# step %d, worker %d told ", (int)step, w);
            for (int o = 0; o < WORKERS; o++) {
                const bool both = part_of(seed, step, o).takes_part;
                const uint64_t what = 300 + (uint64_t)(w * WORKERS + o);
                putc(o == w || (both && happens(seed, step, what, 0.6)) ? '1' : '0', file);
            }
            putc('\n', file);
        }
    }
}

/* Worker LATE is late in even steps, and has no gradient in odd ones. */
enum { LATE = 1 };
static void write_late(FILE *file, const struct ln_partition *partition, uint64_t steps) {
    for (uint64_t step = 0; step < steps; step++) {
        for (int w = 0; w < WORKERS; w++) {
            const size_t n = ln_partition_owner_packets(partition, w);
            for (int s = 0; s < WORKERS; s++) {
                if (s == w) continue;
                fprintf(file, "# step %d, gradient, worker %d to %d\n", (int)step, s, w);
                for (size_t k = 0; k < n; k++) putc("01"[s == LATE && step % 2 == 0], file);
                putc('\n', file);
            }
            fprintf(file, "# step %d, worker %d %s, norm 0x1p+0, lead 0x0p+0\n", (int)step, w,
                    w == LATE && step % 2 ? "idles" : "computes");
            fprintf(file, "# step %d, worker %d told 1111\n", (int)step, w);
        }
    }
}

/* A comm that makes a run of `write`; the file is gone by then. */
static struct lossynet_comm *open_run(void (*write)(FILE *, const struct ln_partition *, uint64_t),
                                      uint64_t seed, lossynet_estimator estimator) {
    struct lossynet_settings settings = simple_settings(WORKERS, elements, BUCKETS, 0);
    struct lossynet_comm *plain = open_alone(&settings);
    char path[] = "/tmp/lossynet-record-XXXXXX", model[64];
    int descriptor = mkstemp(path);
    assert_true(descriptor >= 0);
    FILE *file = fdopen(descriptor, "w");
    write(file, &plain->partition, seed);
    fprintf(file, "# end\n");
    assert_int_equal(fclose(file), 0);
    lossynet_close(plain);
    snprintf(model, sizeof model, "replay:%s", path);
    settings.loss.model = model;
    settings.estimator = estimator;
    settings.error_feedback = true;
    struct lossynet_comm *comm = open_alone(&settings);
    unlink(path);
    return comm;
}

/* The worker that owns each element. */
static void find_owners(const struct lossynet_comm *comm, int owner[ELEMENTS]) {
    for (int o = 0; o < WORKERS; o++) {
        for (int b = 0; b < BUCKETS; b++) {
            size_t offset, count;
            lossynet_shard(comm, o, b, &offset, &count);
            for (size_t e = offset; e < offset + count; e++) owner[e] = o;
        }
    }
}

/* Sums of whole numbers are exact: what the owners have summed up in the end is what was
 * computed. */
static void every_gradient_counts_once(uint64_t seed) {
    static double computed[ELEMENTS], averaged[ELEMENTS];
    struct lossynet_comm *comm = open_run(write_record, seed, LOSSYNET_ZERO);
    float **x = take_vectors(WORKERS, ELEMENTS);
    int owner[ELEMENTS];
    find_owners(comm, owner);
    memset(computed, 0, sizeof computed);
    memset(averaged, 0, sizeof averaged);
    for (uint64_t step = 0; step < RANDOM + CALM; step++) {
        for (int w = 0; w < WORKERS; w++) {
            const bool computes = part_of(seed, step, w).computes;
            for (size_t e = 0; e < ELEMENTS; e++) {
                x[w][e] = (float)(int)(8 * random_unit(step, (uint64_t)w, e));
                if (computes) computed[e] += (double)x[w][e];
            }
        }
        assert_int_equal(lossynet_step_begin(comm, step), LOSSYNET_OK);
        assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
        for (size_t e = 0; e < ELEMENTS; e++) averaged[e] += WORKERS * (double)x[owner[e]][e];
    }
    for (size_t e = 0; e < ELEMENTS; e++) assert_true(averaged[e] == computed[e]);
    free_vectors(x);
    lossynet_close(comm);
}

static void test_once(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) every_gradient_counts_once(seed);
}

/* With `mean` a gradient that never changes comes out as it is, wherever anything arrived: packets
 * say truly how many gradients they hold. Sums of them are exact in bfloat16; with halves each
 * rounding of a residual changes it by at most 2^-7, of which the next one halves what was before, and
 * half of the residual is sent. */
static void test_masses(void **state) {
    (void)state;
    for (int half = 0; half < 2; half++) {
        struct lossynet_comm *comm = open_run(write_record, 7, LOSSYNET_MEAN);
        float **x = take_vectors(WORKERS, ELEMENTS);
        int there = 0, owner[ELEMENTS];
        find_owners(comm, owner);
        lossynet_error_feedback_share(comm, half ? 0.5 : 1);
        for (uint64_t step = 0; step < RANDOM + CALM; step++) {
            for (int w = 0; w < WORKERS; w++)
                for (size_t e = 0; e < ELEMENTS; e++) x[w][e] = (float)(1 + e % 5);
            assert_int_equal(lossynet_step_begin(comm, step), LOSSYNET_OK);
            assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
            for (size_t e = 0; e < ELEMENTS; e++) {
                const float average = x[owner[e]][e];
                if (average == 0) continue; /* nothing arrived */
                const double gradient = (double)(1 + e % 5);
                assert_close(average, gradient, half ? gradient * 0x1p-7 : 1e-4);
                there++;
            }
        }
        assert_true(there > (RANDOM + CALM) * ELEMENTS / 2);
        free_vectors(x);
        lossynet_close(comm);
    }
}

/* A gradient that comes without a newer one is late all the same, and the lead counts it. */
static void test_ages(void **state) {
    (void)state;
    enum { STEPS = 6 };
    struct lossynet_comm *comm = open_run(write_late, STEPS, LOSSYNET_MEAN);
    float **x = take_vectors(WORKERS, ELEMENTS);
    for (uint64_t step = 0; step < STEPS; step++) {
        const bool comes = step % 2;
        assert_int_equal(lossynet_step_begin(comm, step), LOSSYNET_OK);
        assert_int_equal(lossynet_reduce(comm, x, false), LOSSYNET_OK);
        for (int v = 0; v < WORKERS; v++) {
            const double packets = (double)ln_partition_owner_packets(&comm->partition, v);
            const struct lossynet_lateness *late = &comm->feedback.late[v];
            const double came = WORKERS - ((v == LATE) == comes);
            const double own = v == LATE && comes ? 0 : 1;
            assert_close(late->late / packets, v != LATE && comes ? 1 / came : 0, 1e-12);
            assert_close(late->others / packets, 1 - own / came, 1e-12);
        }
    }
    free_vectors(x);
    lossynet_close(comm);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_once),
        cmocka_unit_test(test_ages),
        cmocka_unit_test(test_masses),
    };
    return cmocka_run_group_tests_name("gradients whose fate is told late", tests, NULL, NULL);
}
