/* test_cuda_kernels.c — the operator tests (operators.h) on the CUDA kernels, run by the emulation
 * (dev/emulation) in float32 and bfloat16, with the threads in several orders.
 *
 * There is no build with sanitizers but the thread sanitizer's (test_cuda_emulation.py), since
 * test_operators_emulated runs the same kernels with them. It uses small shapes, and only the first
 * order for float32 and the second for bfloat16; test_same_bits_in_any_order_of_threads uses three
 * orders for both. Takes 30 s.
 */
#include "test/llmc/operators.h"
#include "test/cuda/kernels_backend.h"

#include <limits.h>
#include <sys/wait.h>
#include <unistd.h>

static const struct {
    const char *name;
    enum kernels_order order;
    int seed;
} orders[] = {
    {"forward", KERNELS_FORWARD, 0},
    {"reverse", KERNELS_REVERSE, 0},
    {"random", KERNELS_RANDOM, 1},
};
static int order; /* the one under test */

static int setup(void **state) {
    (void)state;
    operators_seed(order); /* other numbers in every order */
    kernels_order(orders[order].order, orders[order].seed);
    return 0;
}

/* The order of threads must not show in a result. */
static void test_same_bits_in_any_order_of_threads(void **state) {
    (void)state;
    struct inputs *in = inputs_new();
    struct outputs expected = {0}, got = {0};
    kernels_order(KERNELS_FORWARD, 0);
    run_everything(in, &expected);
    for (int i = 1; i < 3; i++) { /* reverse, random */
        kernels_order(orders[i].order, orders[i].seed + order);
        run_everything(in, &got);
        assert_same_bits(&expected, &got, "in order", i);
        outputs_free(&got);
    }
    outputs_free(&expected);
    inputs_free(in);
}

/* Kernels count in 32 bits: what is beyond ends the program, before anything is computed. */
static void test_too_many_items(void **state) {
    (void)state;
    const struct backend *b = subject.backend;
    for (int operation = 0; operation < 4; operation++) {
        int status;
        const pid_t child = fork();
        if (child == 0) {
            close(STDERR_FILENO);
            if (operation == 0) b->swiglu_forward(NULL, NULL, INT_MAX, 3);
            if (operation == 1) b->swiglu_backward(NULL, NULL, NULL, INT_MAX, 3);
            if (operation == 2) b->rope(NULL, NULL, NULL, 1 << 11, 1 << 20, 2, 1, 2, false);
            if (operation == 3) b->attention_forward(NULL, NULL, NULL, 1 << 10, 1 << 20, 2, 1, 8);
            _exit(0);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
#define OPERATOR_TEST(name) cmocka_unit_test_setup(name, setup),
#include "test/llmc/operators_list.h"
        cmocka_unit_test_setup(test_same_bits_in_any_order_of_threads, setup),
        cmocka_unit_test_setup(test_too_many_items, setup),
    };
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    size_t most_work[] = {13000, 13000};
    const bool slow = true;
#else
    size_t most_work[] = {500000, 40000};
    const bool slow = false;
#endif
    int failures = 0;
    for (int half = 0; half < 2; half++) {
        subject.backend = kernels_backend(half);
        const int first = slow ? half : 0, end = slow ? half + 1 : LENGTH(orders);
        for (order = first; order < end; order++) {
            char name[64];
            subject.most_work = most_work[order > 0];
            snprintf(name, sizeof name, "%s, %s", subject.backend->name, orders[order].name);
            failures += cmocka_run_group_tests_name(name, tests, NULL, NULL);
            if (order == first || order == end - 1) operators_report(name);
        }
    }
    return failures ? 1 : 0;
}
