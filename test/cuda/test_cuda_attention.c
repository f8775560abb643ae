/* test_cuda_attention.c — tests the attention kernels of llmc/backend/cuda in the emulation, in
 * more shapes than the operator tests have time for: every length around a tile's edge, every head
 * size of a preset, groups, logits that grow along the sequence, every order of threads.
 *
 * Errors are measured per row of a head (D numbers): the norm of the difference is divided by the
 * norm of the reference's row, or by the root mean square of all rows if that is larger. A norm
 * over the whole array would hide a wrong row. log_sum_exp is compared directly.
 *
 * dq in bfloat16 is the least exact: delta = rowsum(dO * O) uses the rounded O, and in the first
 * rows, which have few keys, dP - delta is a small difference of large numbers.
 *
 * There is no build with sanitizers but the thread sanitizer's (test_cuda_emulation.py), since
 * test_operators_emulated runs the same kernels with them. Takes 40 s.
 */
#include "test/llmc/operators.h"

#include "test/cuda/kernels_backend.h"
#include "test/llmc/operators_reference.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

static int setup(void **state) {
    (void)state;
    kernels_order(KERNELS_FORWARD, 0);
    operators_seed(4);
    return 0;
}

/* ---- errors ------------------------------------------------------------------------------- */

/* The worst error of the rows of heads from <= row % heads < to. */
static double worst_row(const struct array *a, int heads, int from, int to, int D) {
    double part = 0, all = 0, worst = 0;
    const size_t rows = a->n / D;
    float *value = array_read(a);
    for (size_t i = 0; i < a->n; i++) {
        const double square = a->reference[i] * a->reference[i];
        const int head = (int)(i / D % heads);
        all += square / rows;
        if (from <= head && head < to) part += square * heads / rows / (to - from);
    }
    /* a lone query's gradient is 0 on every row: then a tenth of the other parts' is the least */
    const double least = fmax(part, 1e-2 * all);
    for (size_t row = 0; row < rows; row++) {
        if ((int)(row % heads) < from || (int)(row % heads) >= to) continue;
        double error = 0, square = 0;
        for (size_t i = row * D; i < (row + 1) * D; i++) {
            const double d = value[i] - a->reference[i];
            error += d * d;
            square += a->reference[i] * a->reference[i];
        }
        const double relative = sqrt(error / fmax(square, least));
        if (!(relative <= worst)) worst = isnan(relative) ? INFINITY : relative;
    }
    free(value);
    return worst;
}

static double worst_element(const struct array *a) {
    double worst = 0;
    float *value = array_read(a);
    for (size_t i = 0; i < a->n; i++) {
        const double d = fabs(value[i] - a->reference[i]);
        if (!(d <= worst)) worst = isnan(d) ? INFINITY : d;
    }
    free(value);
    return worst;
}

enum { OUT, LOG_SUM_EXP, DQ, DK, DV, ERRORS };
static const char *error_names[ERRORS] = {"out", "log_sum_exp", "dq", "dk", "dv"};

/* Twice to four times what was seen. */
static const double allowed_float32[ERRORS] = {1e-6, 3e-6, 1e-5, 1e-5, 5e-6};
static const double allowed_bfloat16[ERRORS] = {1e-2, 3e-6, 3e-2, 2e-2, 1e-2};

static void log_error(const char *what, const double worst[ERRORS], const double allowed[ERRORS]) {
    printf("# %s, %-17s:", what, subject.backend->name);
    for (int i = 0; i < ERRORS; i++)
        printf(" %s %.1e of %.1e%s", error_names[i], worst[i], allowed[i],
               i + 1 < ERRORS ? "," : "\n");
    fflush(stdout);
}

/* ---- one shape ---------------------------------------------------------------------------- */

struct shape {
    int B, T, H, K, D;
};

struct problem {
    struct array qkv, out, log_sum_exp, dout, dqkv;
};

/* Token t's numbers are up to size * growth^(t / T). */
static struct problem problem_make(struct shape s, double size, double growth) {
    const size_t rows = (size_t)s.B * s.T, n = rows * s.H * s.D, wide = s.D * (s.H + 2 * s.K);
    struct problem p = {array_random(rows * wide, size, TENSOR), array_empty(n, TENSOR),
                        array_empty(rows * s.H, FLOAT32), array_random(n, 1, TENSOR),
                        array_empty(rows * wide, TENSOR)};
    for (size_t i = 0; i < p.qkv.n; i++)
        p.qkv.reference[i] *= pow(growth, (double)(i / wide % s.T) / s.T);
    array_write(&p.qkv);
    return p;
}

static void problem_free(struct problem *p) {
    array_free(&p->qkv), array_free(&p->out), array_free(&p->log_sum_exp);
    array_free(&p->dout), array_free(&p->dqkv);
}

static void problem_run(struct problem *p, struct shape s) {
    subject.backend->attention_forward(p->out.value, p->log_sum_exp.value, p->qkv.value, s.B, s.T,
                                       s.H, s.K, s.D);
    subject.backend->attention_backward(p->dqkv.value, p->dout.value, p->out.value, p->qkv.value,
                                        p->log_sum_exp.value, s.B, s.T, s.H, s.K, s.D);
}

static void check(struct shape s, double size, double growth, const double allowed[ERRORS],
                  double worst[ERRORS]) {
    struct problem p = problem_make(s, size, growth);
    problem_run(&p, s);
    reference_attention(p.out.reference, p.log_sum_exp.reference, p.qkv.reference, s.B, s.T, s.H,
                        s.K, s.D);
    reference_attention_backward(p.dqkv.reference, p.dout.reference, p.qkv.reference, s.B, s.T, s.H,
                                 s.K, s.D);
    const int H = s.H, K = s.K, all = H + 2 * K;
    const double error[ERRORS] = {worst_row(&p.out, H, 0, H, s.D), worst_element(&p.log_sum_exp),
                                  worst_row(&p.dqkv, all, 0, H, s.D),
                                  worst_row(&p.dqkv, all, H, H + K, s.D),
                                  worst_row(&p.dqkv, all, H + K, all, s.D)};
    for (int i = 0; i < ERRORS; i++) {
        if (!(error[i] <= allowed[i]))
            fail_msg("%s, B %d T %d H %d K %d D %d: %s is off by %.3g, allowed %.3g",
                     subject.backend->name, s.B, s.T, s.H, s.K, s.D, error_names[i], error[i],
                     allowed[i]);
        worst[i] = fmax(worst[i], error[i]);
    }
    problem_free(&p);
}

/* ---- tests -------------------------------------------------------------------------------- */

/* Pairs: each length meets each head size, and so does each kind of heads; over the head sizes each
 * length meets each kind of heads. The longest meets the smallest heads alone. The thread sanitizer looks at one tile
 * and at two, and the kernels as nvcc compiled them (dev/emulation/ptx) at three, too. */
static void check_lengths(int D, int seed, const double allowed[ERRORS]) {
    static const int lengths[] = {7, 65, 129, 1, 64, 63, 127, 128, 200, 260};
    static const int heads[][2] = {{1, 1}, {4, 2}, {8, 1}, {2, 2}};
    double worst[ERRORS] = {0};
    char what[32];
    const int some_lengths = SANITIZED              ? 2
                             : getenv("PTX_TARGET") ? 5
                             : D == 8               ? LENGTH(lengths)
                                                    : LENGTH(lengths) - 1;
    for (int t = 0; t < some_lengths; t++) {
        const int *some = heads[(t + seed) % LENGTH(heads)];
        check((struct shape){1 + (t + seed + t / 2) % 2, lengths[t], some[0], some[1], D}, 1, 1,
              allowed, worst);
    }
    snprintf(what, sizeof what, "head size %3d", D);
    log_error(what, worst, allowed);
}

static void test_head_sizes_of_presets(void **state) {
    (void)state;
    static const int sizes[] = {8, 32, 48, 64, 128};
    for (int i = 0; i < LENGTH(sizes); i++) {
        subject.backend = kernels_backend(true);
        check_lengths(sizes[i], i, allowed_bfloat16);
        subject.backend = kernels_backend(false);
        if (i % 2 == 0) check_lengths(sizes[i], i + 1, allowed_float32);
    }
}

/* 16 to 120: zeros fill up the tiles. 2, 100, 200: no tensor cores. */
static void test_other_head_sizes(void **state) {
    (void)state;
    static const int sizes[] = {16, 24, 40, 80, 96, 120, 2, 100, 200};
    double worst[2][ERRORS] = {{0}};
    for (int half = 0; half < 2; half++) {
        const double *allowed = half ? allowed_bfloat16 : allowed_float32;
        subject.backend = kernels_backend(half);
        for (int i = 0; i < LENGTH(sizes); i++) {
            check((struct shape){1, 70, 2, 1, sizes[i]}, 1, 1, allowed, worst[half]);
            if (half && !SANITIZED)
                check((struct shape){1, 135, 3, 3, sizes[i]}, 1, 1, allowed, worst[half]);
        }
        log_error("other head sizes", worst[half], allowed);
    }
}

/* Logits in the hundreds: exp overflows unless the largest is taken off. They grow along the
 * sequence, so that the largest so far changes with every tile of keys, or shrink, so that it never
 * does. Most weights are then 0 or 1, where dP - delta cancels. */
static void test_large_logits(void **state) {
    (void)state;
    static const double float32[ERRORS] = {5e-5, 3e-4, 2e-4, 2e-4, 5e-5};
    static const double bfloat16[ERRORS] = {1e-2, 3e-4, 3e-1, 2e-1, 1e-2};
    for (int half = 0; half < 2; half++) {
        double worst[ERRORS] = {0};
        subject.backend = kernels_backend(half);
        const double *allowed = half ? bfloat16 : float32;
        for (int D = 64; D <= 128; D *= 2) {
            const struct shape s = {1, SANITIZED ? 70 : 200, 2, 1, D};
            check(s, 1, 16, allowed, worst);
            if (SANITIZED) continue; /* the same memory, whatever the numbers */
            check(s, 12, 1, allowed, worst);
            check(s, 16, 1. / 16, allowed, worst);
        }
        log_error("large logits", worst, allowed);
    }
}

static void assert_same(const struct array *a, const struct array *b, const char *what,
                        struct shape s, int order) {
    const size_t bytes = bytes_of_array(a);
    char *x = (char *)malloc(bytes), *y = (char *)malloc(bytes);
    assert_true(x && y);
    subject.backend->copy(x, a->value, bytes);
    subject.backend->copy(y, b->value, bytes);
    if (memcmp(x, y, bytes) != 0)
        fail_msg("%s, T %d D %d: %s differs in order %d", subject.backend->name, s.T, s.D, what,
                 order);
    free(x);
    free(y);
}

static void test_same_bits_in_any_order_of_threads(void **state) {
    (void)state;
    static const struct shape shapes[] = {{1, 140, 2, 1, 64},
                                          {1, 200, 1, 1, 64},
                                          {2, 65, 2, 1, 128},
                                          {1, 140, 2, 2, 128},
                                          {1, 33, 4, 2, 48}};
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < (SANITIZED ? 1 : LENGTH(shapes)); i++) {
            const struct shape s = shapes[i];
            subject.backend = kernels_backend(half);
            struct problem p = problem_make(s, 1, 1);
            struct problem first = {{0},
                                    array_empty(p.out.n, TENSOR),
                                    array_empty(p.log_sum_exp.n, FLOAT32),
                                    {0},
                                    array_empty(p.dqkv.n, TENSOR)};
            for (int order = 0; order < 4; order++) { /* the last two are random */
                kernels_order(order == 0   ? KERNELS_FORWARD
                              : order == 1 ? KERNELS_REVERSE
                                           : KERNELS_RANDOM,
                              order);
                array_poison(&p.out), array_poison(&p.log_sum_exp), array_poison(&p.dqkv);
                problem_run(&p, s);
                if (order == 0) {
                    subject.backend->copy(first.out.value, p.out.value, bytes_of_array(&p.out));
                    subject.backend->copy(first.log_sum_exp.value, p.log_sum_exp.value,
                                          bytes_of_array(&p.log_sum_exp));
                    subject.backend->copy(first.dqkv.value, p.dqkv.value, bytes_of_array(&p.dqkv));
                }
                assert_same(&p.out, &first.out, "out", s, order);
                assert_same(&p.log_sum_exp, &first.log_sum_exp, "log_sum_exp", s, order);
                assert_same(&p.dqkv, &first.dqkv, "dqkv", s, order);
            }
            problem_free(&p);
            array_free(&first.out), array_free(&first.log_sum_exp), array_free(&first.dqkv);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_head_sizes_of_presets, setup),
        cmocka_unit_test_setup(test_other_head_sizes, setup),
        cmocka_unit_test_setup(test_large_logits, setup),
        cmocka_unit_test_setup(test_same_bits_in_any_order_of_threads, setup),
    };
    return cmocka_run_group_tests_name("attention", tests, NULL, NULL);
}
