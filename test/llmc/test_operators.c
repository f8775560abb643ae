/* test_operators.c — runs the operator tests (operators.h) on every CPU backend that this machine
 * can run, and compares each backend's bits for different numbers of threads. Takes 60 s. */
#include "test/llmc/operators.h"

#include <omp.h>

#include "llmc/backend/cpu/backend_cpu.h"

static void test_same_bits_on_any_number_of_threads(void **state) {
    (void)state;
    enum { MOST = 3 };
    int before = omp_get_max_threads();
    struct inputs *in = inputs_new();
    struct outputs expected = {0}, got[MOST] = {{0}};
    omp_set_num_threads(1);
    run_everything(in, &expected);
    for (int threads = 1; threads <= MOST; threads++) {
        omp_set_num_threads(threads);
        run_everything(in, &got[0]);
        assert_same_bits(&expected, &got[0], "on threads:", threads);
        outputs_free(&got[0]);
#pragma omp parallel num_threads(threads)
        run_everything(in, &got[omp_get_thread_num()]);
        for (int i = 0; i < threads; i++) {
            assert_same_bits(&expected, &got[i], "inside a parallel region, threads:", threads);
            outputs_free(&got[i]);
        }
    }
    outputs_free(&expected);
    inputs_free(in);
    omp_set_num_threads(before);
}

/* The same where the program allows nested regions; and a caller's setting is left as it was. */
static void test_inside_a_parallel_region_that_may_nest(void **state) {
    (void)state;
    struct inputs *in = inputs_new();
    struct outputs o[3] = {{0}};
    int levels = omp_get_max_active_levels(), threads[2];
    omp_set_max_active_levels(4);
    run_everything(in, &o[2]);
#pragma omp parallel num_threads(2)
    {
        int i = omp_get_thread_num();
        omp_set_num_threads(3);
        run_everything(in, &o[i]);
        threads[i] = omp_get_max_threads();
    }
    omp_set_max_active_levels(levels);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(threads[i], 3);
        assert_same_bits(&o[2], &o[i], "nested, threads:", 2);
    }
    for (int i = 0; i < 3; i++) outputs_free(&o[i]);
    inputs_free(in);
}

#ifdef __SANITIZE_ADDRESS__
enum { MOST_WORK = 500000, LESS_WORK = 20000 };
#else
enum { MOST_WORK = 0, LESS_WORK = 100000 }; /* 0: no limit */
#endif

static int setup(void **state) {
    (void)state;
    operators_seed(0); /* each test the same, alone or not */
    return 0;
}

/* The instances are the same sources, compiled for other registers; the best of bf16 multiplies in
 * another way than the rest. So the best of float32 and the best two of bf16 take all shapes, the
 * others smaller ones, and all less under sanitizers, which are slow. An argument takes those
 * backends alone whose title has it, like "bf16 x86_64_v3". */
int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
#define OPERATOR_TEST(name) cmocka_unit_test_setup(name, setup),
#include "test/llmc/operators_list.h"
        cmocka_unit_test_setup(test_weights_are_rounded, setup),
        cmocka_unit_test_setup(test_same_bits_on_any_number_of_threads, setup),
        cmocka_unit_test_setup(test_inside_a_parallel_region_that_may_nest, setup),
    };
    const enum dtype dtypes[] = {DTYPE_FLOAT32, DTYPE_BF16};
    int failures = 0;
    const char *isa,
        *most = getenv("OPERATORS_MOST_WORK"); /* smaller shapes, for emulated processors */
    for (int d = 0; d < 2; d++)
        for (int i = 0; (subject.backend = backend_cpu_instance(dtypes[d], i, &isa)); i++) {
            char title[80];
            snprintf(title, sizeof title, "%s %s", d ? "bf16" : "float32", isa);
            if (argc > 1 && !strstr(title, argv[1])) continue;
            subject.most_work = i > d ? LESS_WORK : MOST_WORK;
            if (most) subject.most_work = strtoull(most, NULL, 10);
            printf("# %s %s: %s\n", subject.backend->name, title, subject.backend->details);
            fflush(stdout);
            failures += cmocka_run_group_tests_name(title, tests, NULL, NULL);
            operators_report(title);
        }
    return failures ? 1 : 0;
}
