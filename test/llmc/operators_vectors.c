/* operators_vectors.c — tests operations on flat vectors, independent of a model: optimiser, norm,
 * and the masked average; see operators.h. */
#include "test/llmc/operators.h"
#include "test/llmc/operators_reference.h"

static bool too_large(size_t elements) {
    return subject.most_work && elements > subject.most_work;
}

/* ---- optimiser ------------------------------------------------------------------------------- */

static void check_adamw(size_t n, bool in_place) {
    if (too_large(n)) return;
    /* betas that float32 holds exactly, so that 1 - beta has no rounding of its own */
    struct adamw_settings settings = {0.875f, 0.9375f, 1e-8f, 1.5f};
    struct array master = array_random(n, 1, FLOAT32), m = array_random(n, 0, FLOAT32);
    struct array v = array_random(n, 0, FLOAT32), gradient = array_random(n, 3, FLOAT32);
    struct array param = array_empty(n, WEIGHT), ahead = array_empty(n, FLOAT32);
    m.terms = 1;
    void *target = in_place ? master.value : param.value;
    for (int step = 1; step <= 4; step++) {
        for (size_t i = 0; i < n; i++) ahead.reference[i] = -1.5 * master.reference[i];
        reference_adamw(master.reference, m.reference, v.reference, gradient.reference, n,
                        settings.beta1, settings.beta2, settings.eps, step, 0.01f, 0.1f, 0.5f);
        for (size_t i = 0; i < n; i++) ahead.reference[i] += 2.5 * master.reference[i];
        subject.backend->adamw(target, master.value, m.value, v.value,
                               step == 3 ? NULL : ahead.value, gradient.value, n, &settings, step,
                               0.01f, 0.1f, 0.5f);
        for (size_t i = 0; i < n; i++) gradient.reference[i] = random_uniform();
        array_write(&gradient);
    }
    assert_close(&master, "adamw: master", 5e-7, 5e-7);
    assert_close(&ahead, "adamw: ahead", 1e-6, 1e-6);
    assert_close(&m, "adamw: m", 1e-6, 1e-6);
    assert_close(&v, "adamw: v", 1e-6, 1e-6);
    if (!in_place) { /* the master weights rounded to nearest */
        float *exact = array_read(&master);
        for (size_t i = 0; i < n; i++) param.reference[i] = exact[i];
        struct array rounded = array_empty(n, WEIGHT);
        array_write_floats(&rounded, exact);
        free(exact);
        float *expected = array_read(&rounded), *got = array_read(&param);
        assert_memory_equal(got, expected, n * sizeof(float));
        free(expected), free(got);
        array_free(&rounded);
    }
    array_free(&master), array_free(&m), array_free(&v), array_free(&param), array_free(&gradient);
    array_free(&ahead);
}

void test_adamw(void **state) {
    (void)state;
    size_t sizes[] = {1, 31, 1000, 50001};
    for (int s = 0; s < LENGTH(sizes); s++) {
        check_adamw(sizes[s], false);
        if (subject.in_place || subject.backend->weight_bytes == sizeof(float))
            check_adamw(sizes[s], true);
    }
}

static void check_muon(int R, int C) {
    const size_t n = (size_t)R * (size_t)C;
    const struct muon_settings settings = {0.9375f, 1.5f}; /* exact, as above */
    if (too_large(n * (size_t)(R < C ? R : C))) return;
    struct array master = array_random(n, 1, FLOAT32), m = array_random(n, 0, FLOAT32);
    struct array gradient = array_random(n, 3, FLOAT32), ahead = array_empty(n, FLOAT32);
    struct array param = array_empty(n, WEIGHT);
    m.terms = 1;
    for (int step = 0; step < 3; step++) {
        for (size_t i = 0; i < n; i++) ahead.reference[i] = -1.5 * master.reference[i];
        reference_muon(master.reference, m.reference, gradient.reference, (size_t)R, (size_t)C,
                       settings.momentum, 0.01f, 0.1f, 0.5f);
        for (size_t i = 0; i < n; i++) ahead.reference[i] += 2.5 * master.reference[i];
        subject.backend->muon(param.value, master.value, m.value, step == 1 ? NULL : ahead.value,
                              gradient.value, R, C, &settings, 0.01f, 0.1f, 0.5f);
        for (size_t i = 0; i < n; i++) gradient.reference[i] = random_uniform();
        array_write(&gradient);
    }
    assert_close(&master, "muon: master", 1e-6, 1e-3);
    assert_close(&ahead, "muon: ahead", 1e-6, 2e-3);
    assert_close(&m, "muon: m", 1e-6, 1e-6);
    for (size_t i = 0; i < n; i++) param.reference[i] = master.reference[i];
    assert_close(&param, "muon: parameters", 1e-6, 4e-3);
    array_free(&master), array_free(&m), array_free(&gradient), array_free(&ahead);
    array_free(&param);
}

/* Wide and tall matrices, also of one row, one column and one element; none of zeros is divided by 0. */
void test_muon(void **state) {
    (void)state;
    const int shapes[][2] = {{1, 1}, {1, 40}, {33, 1}, {64, 64}, {32, 64}, {172, 64}, {64, 172}};
    for (int s = 0; s < LENGTH(shapes); s++) check_muon(shapes[s][0], shapes[s][1]);
    const struct muon_settings settings = {0.9375f, 0};
    struct array master = array_random(64, 1, FLOAT32), zero = array_random(64, 0, FLOAT32);
    struct array m = array_random(64, 0, FLOAT32);
    subject.backend->muon(master.value, master.value, m.value, NULL, zero.value, 8, 8, &settings,
                          0.01f, 0, 1);
    assert_close(&master, "muon: without a gradient", 0, 0);
    array_free(&master), array_free(&zero), array_free(&m);
}

void test_sum_of_squares(void **state) {
    (void)state;
    size_t sizes[] = {0, 1, 17, 16384, 16385, 1000003, 20000001};
    for (int s = 0; s < LENGTH(sizes); s++) {
        if (too_large(sizes[s])) continue;
        struct array x = array_random(sizes[s], 1, FLOAT32);
        double got = subject.backend->sum_of_squares(x.value, x.n);
        /* 20 million squares, added one after the other in double, would be off by 1e-12. */
        long double sum = 0;
        for (size_t i = 0; i < x.n; i++) sum += (long double)x.reference[i] * x.reference[i];
        if (!(fabsl(got - sum) <= 1e-13L * sum)) fail_msg("%zu: %.17g, not %.17Lg", x.n, got, sum);
        /* Of several parts at once, to the last bit. */
        const size_t half = x.n / 2, n[] = {half, 0, x.n - half, x.n};
        const float *const part[] = {x.value, x.value, (const float *)x.value + half, x.value};
        double sums[LENGTH(n)];
        subject.backend->sums_of_squares(sums, part, n, LENGTH(n));
        for (int i = 0; i < LENGTH(n); i++)
            assert_true(sums[i] == subject.backend->sum_of_squares(part[i], n[i]));
        array_free(&x);
    }
}

/* ---- masked average -------------------------------------------------------------------------- */

/* `aliased`: the sender that is also the output, -1 for none. */
static void check_weighted_sum(int N, size_t n, size_t packet, int aliased) {
    if (too_large(n * N)) return;
    size_t packets = (n + packet - 1) / packet;
    struct array *sender = (struct array *)malloc(sizeof *sender * N);
    struct array out = array_empty(n, FLOAT32);
    const float **senders = (const float **)malloc(sizeof *senders * N);
    assert_true(sender && senders);
    out.terms = 1;
    float *weight = (float *)malloc(sizeof(float) * packets * N);
    float *sent = (float *)malloc(sizeof(float) * n);
    assert_true(weight && sent);
    for (size_t i = 0; i < packets * N; i++)
        weight[i] = random_uniform() < -0.3 ? 0 : (float)random_uniform();
    if (packets > 2) memset(weight + N, 0, sizeof(float) * N); /* nothing arrived */
    for (int i = 0; i < N; i++) {
        sender[i] = array_random(n, 1, FLOAT32);
        senders[i] = sender[i].value;
        for (size_t j = 0; j < n; j++) {
            float w = weight[j / packet * N + i];
            out.reference[j] += w * sender[i].reference[j];
            sent[j] = w == 0 ? NAN : (float)sender[i].reference[j]; /* did not arrive: not read */
        }
        array_write_floats(&sender[i], sent);
    }
    void *target = aliased < 0 ? out.value : sender[aliased].value;
    subject.backend->weighted_sum(target, senders, weight, N, n, packet);
    if (aliased >= 0) subject.backend->copy(out.value, target, bytes_of_array(&out));
    assert_close(&out, "weighted_sum", 1e-6, 1e-6);
    for (int i = 0; i < N; i++) array_free(&sender[i]);
    array_free(&out);
    free(weight);
    free(sent);
    free(senders);
    free(sender);
}

void test_weighted_sum(void **state) {
    (void)state;
    size_t shapes[][2] = {{1, 1},         {10, 3},       {1000, 1024}, {5003, 1024},
                          {100003, 1024}, {50000, 5000}, {4096, 7}};
    for (int s = 0; s < LENGTH(shapes); s++)
        for (int aliased = -1; aliased < 5; aliased++)
            check_weighted_sum(5, shapes[s][0], shapes[s][1], aliased);
    check_weighted_sum(300, 40, 16, 299); /* many workers */
}
