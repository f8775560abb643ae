/* test_operators_device.c — the operator tests (operators.h) on the CUDA backend as the program
 * uses it (llmc/backend/cuda/backend_cuda.cu), in float32 and bfloat16, on a GPU. If there is no
 * GPU, it says so and exits with 77. OPERATORS_MOST_WORK=N leaves out shapes of more than N
 * elements, and OPERATORS_ONLY=NAME all tests but one. (test_operators_emulated.c is the same on the
 * emulated device.)
 */
#include "test/llmc/operators.h"

#include <omp.h>

#include "llmc/backend/cuda/backend_cuda.h"

#ifdef EMULATED
#include "dev/emulation/device_emulated.h"
#endif

/* The order of an emulated device's threads; a GPU has its own. */
static void set_order(bool random) {
#ifdef EMULATED
    emulated_order(random ? EMULATED_RANDOM : EMULATED_FORWARD, 99);
#else
    (void)random;
#endif
}

static int setup(void **state) {
    (void)state;
    operators_seed(7);
    set_order(false);
    return 0;
}

/* Called twice, by two threads at once, and in another order of the device's threads. */
static void test_same_bits_when_called_again(void **state) {
    (void)state;
    struct inputs *in = inputs_new();
    struct outputs expected = {0}, got[2] = {{0}};
    run_everything(in, &expected);
    set_order(true);
#pragma omp parallel num_threads(2)
    run_everything(in, &got[omp_get_thread_num()]);
    for (int i = 0; i < 2; i++) {
        assert_same_bits(&expected, &got[i], "on thread", i);
        outputs_free(&got[i]);
    }
    outputs_free(&expected);
    inputs_free(in);
}

/* Memory is zero when `allocate` returns: nothing clears what is copied to it at once. */
static void test_new_memory_is_zero(void **state) {
    (void)state;
    const struct backend *b = subject.backend;
    float *host = (float *)b->allocate_pinned(2 * sizeof *host), *found = host + 1;
    float *memory = (float *)b->allocate(2 * sizeof *memory);
    host[0] = 3;
    b->h2d_async(memory, host, sizeof *host);
    b->h2d_wait();
    b->download(found, memory, sizeof *found);
    assert_float_equal(*found, 3, 0);
    b->download(found, memory + 1, sizeof *found);
    assert_float_equal(*found, 0, 0);
    b->release(memory);
    b->release_pinned(host);
}

/* Whether the conversion of `in`, whose only value is `x`, was repeated. Its result must be x. */
static bool repeats(char key, weight *out, float *in, float x) {
    const struct backend *b = subject.backend;
    float found = 0;
    uint16_t half;
    b->upload(in, &x, sizeof x);
    const bool repeated = b->pass_begin(3, &key, sizeof key);
    if (!repeated) b->convert(out, in, 1);
    b->pass_end(3);
    b->download(b->weight_bytes == 2 ? (void *)&half : (void *)&found, out, b->weight_bytes);
    if (b->weight_bytes == 2) memcpy((char *)&found + 2, &half, sizeof half);
    assert_float_equal(found, x, 0);
    return repeated;
}

/* A pass is called twice, and then repeated with what memory holds at that time. Another key begins anew, and so do
 * all passes when memory is released. */
static void test_passes_that_repeat(void **state) {
    (void)state;
    const struct backend *b = subject.backend;
    float *in = (float *)b->allocate(sizeof *in), *other = (float *)b->allocate(sizeof *other);
    weight *out = b->allocate(sizeof *in);
    for (int i = 0; i < 4; i++) assert_int_equal(repeats('a', out, in, (float)i), i > 1);
    for (int i = 0; i < 3; i++) assert_int_equal(repeats('b', out, other, (float)i), i > 1);
    assert_false(repeats('a', out, in, 7));
    assert_false(repeats('a', out, in, 8));
    b->release(other);
    for (int i = 0; i < 3; i++) assert_int_equal(repeats('a', out, in, (float)i), i > 1);
    b->release(in);
    b->release(out);
}

int main(void) {
    const struct CMUnitTest tests[] = {
#define OPERATOR_TEST(name) cmocka_unit_test_setup(name, setup),
#include "test/llmc/operators_list.h"
        cmocka_unit_test_setup(test_weighted_sum_pinned, setup),
        cmocka_unit_test_setup(test_weighted_sum_pinned_bf16, setup),
        cmocka_unit_test_setup(test_copies_that_round, setup),
        cmocka_unit_test_setup(test_same_bits_when_called_again, setup),
        cmocka_unit_test_setup(test_passes_that_repeat, setup),
        cmocka_unit_test_setup(test_new_memory_is_zero, setup),
    };
    int failures = 0;
    subject.in_place = true;
    const char *most = getenv("OPERATORS_MOST_WORK"); /* smaller shapes, for slow sanitizers */
#ifdef EMULATED
    subject.most_work = 500000;
#ifdef __SANITIZE_ADDRESS__
    subject.most_work = 10000;
#endif
#endif
    if (most) subject.most_work = strtoull(most, NULL, 10);
    for (int half = 0; half < 2; half++) {
        char why[256];
        subject.backend = backend_cuda(half ? DTYPE_BF16 : DTYPE_FLOAT32, 0, why, sizeof why);
        if (!subject.backend) {
            printf("no GPU to test on: %s\n", why);
            return 77;
        }
        printf("# %s\n", subject.backend->details);
        fflush(stdout);
        const char *name = half ? "bfloat16" : "float32", *only = getenv("OPERATORS_ONLY");
        for (size_t i = 0; only && i < sizeof tests / sizeof *tests; i++) {
            const struct CMUnitTest one[] = {tests[i]};
            if (strcmp(only, tests[i].name)) continue;
            failures += cmocka_run_group_tests_name(name, one, NULL, NULL);
        }
        if (!only) failures += cmocka_run_group_tests_name(name, tests, NULL, NULL);
        operators_report(subject.backend->details);
    }
    return failures ? 1 : 0;
}
