/* operators.c — compares each operation of a backend with its float64 reference; see operators.h.
 * */
#include "test/llmc/operators.h"
#include "test/llmc/operators_reference.h"

/* bfloat16 has 8 bits: rounding once is off by 2^-8 at most, which is the tolerance of operations
 * that calculate in float32 and round what they write. */
#define ROUNDED 0x1p-8

static bool too_large(size_t elements) {
    return subject.most_work && elements > subject.most_work;
}

/* ---- finite differences ------------------------------------------------------------------- */

/* What a loss needs: an operation's inputs, and what its output is weighted with. */
struct problem {
    int N, C, O, B, T, H, K, D;
    const int32_t *targets;
    struct array *x, *w, *dout;
    double *out;
};

/* A backend's gradient of loss = sum(dout * forward(x)) against the central difference of the
 * float64 forward along random directions. For float32: other types round more than this allows. */
static void assert_gradient(double (*loss)(const struct problem *), struct problem *problem,
                            size_t outputs, struct array *x, const struct array *gradient) {
    if (subject.backend->element_bytes != sizeof(float)) return;
    double *direction = (double *)malloc(sizeof(double) * x->n);
    double *saved = (double *)malloc(sizeof(double) * x->n);
    float *got = array_read(gradient);
    problem->out = (double *)malloc(sizeof(double) * outputs);
    memcpy(saved, x->reference, sizeof(double) * x->n);
    for (int trial = 0; trial < 3; trial++) {
        const double h = 1e-5;
        double slope = 0, square = 0, ends[2];
        for (size_t i = 0; i < x->n; i++) {
            direction[i] = random_uniform();
            slope += direction[i] * got[i];
            square += got[i] * (double)got[i];
        }
        for (int side = 0; side < 2; side++) {
            for (size_t i = 0; i < x->n; i++)
                x->reference[i] = saved[i] + (side ? -h : h) * direction[i];
            ends[side] = loss(problem);
        }
        double difference = (ends[0] - ends[1]) / (2 * h);
        if (!(fabs(difference - slope) <= 1e-5 * sqrt(square) + 1e-8))
            fail_msg("gradient along a direction: %.9g, finite difference %.9g", slope, difference);
    }
    memcpy(x->reference, saved, sizeof(double) * x->n);
    free(problem->out);
    free(direction);
    free(saved);
    free(got);
}

static double dot(const double *a, const struct array *b) {
    double sum = 0;
    for (size_t i = 0; i < b->n; i++) sum += a[i] * b->reference[i];
    return sum;
}

static double rmsnorm_loss(const struct problem *p) {
    reference_rmsnorm(p->out, NULL, p->x->reference, p->w->reference, p->N, p->C, 1e-5);
    return dot(p->out, p->dout);
}

static double matmul_loss(const struct problem *p) {
    reference_matmul(p->out, p->x->reference, p->w->reference, p->N, p->C, p->O);
    return dot(p->out, p->dout);
}

static double attention_loss(const struct problem *p) {
    reference_attention(p->out, NULL, p->x->reference, p->B, p->T, p->H, p->K, p->D);
    return dot(p->out, p->dout);
}

static double swiglu_loss(const struct problem *p) {
    reference_swiglu(p->out, p->x->reference, p->N, p->C);
    return dot(p->out, p->dout);
}

enum { CLASSIFIER_SCALE_INVERSE = 8 };

static double classifier_loss(const struct problem *p) {
    reference_classifier(p->out, NULL, NULL, p->x->reference, p->w->reference, p->targets, p->N,
                         p->C, p->O, 1);
    double sum = 0;
    for (int n = 0; n < p->N; n++) sum += p->out[n];
    return sum / CLASSIFIER_SCALE_INVERSE;
}

/* ---- memory ------------------------------------------------------------------------------- */

static void assert_all_zero(const void *p, size_t bytes, const char *what) {
    unsigned char *host = (unsigned char *)malloc(bytes);
    assert_non_null(host);
    subject.backend->download(host, p, bytes);
    for (size_t i = 0; i < bytes; i++)
        if (host[i]) fail_msg("%s(%zu): byte %zu is not zero", what, bytes, i);
    free(host);
}

void test_memory(void **state) {
    (void)state;
    const struct backend *b = subject.backend;
    size_t sizes[] = {1, 63, 4096, 5000001, 33554432 + 3};
    for (int i = 0; i < LENGTH(sizes); i++) {
        size_t n = sizes[i];
        if (too_large(n / 8)) continue;
        unsigned char *host = (unsigned char *)malloc(2 * n);
        void *from = b->allocate(n), *to = b->allocate(n);
        assert_true(host && from && to && (uintptr_t)from % 64 == 0 && (uintptr_t)to % 64 == 0);
        assert_all_zero(from, n, "allocate");
        for (size_t j = 0; j < n; j++) host[j] = (unsigned char)(j * 7 + j / 251);
        b->upload(from, host, n);
        b->copy(to, from, n);
        b->download(host + n, to, n);
        assert_memory_equal(host + n, host, n);
        b->clear(to, n);
        assert_all_zero(to, n, "clear");
        b->release(from);
        b->release(to);
        free(host);
    }
    b->release(NULL);
    assert_null(b->allocate(SIZE_MAX - 100));
}

/* ---- embedding, RMSNorm -------------------------------------------------------------------- */

void test_embedding(void **state) {
    (void)state;
    int shapes[][3] = {{1, 1, 1},    {3, 5, 2},     {7, 16, 1000},  {77, 288, 97},
                       {300, 64, 5}, {64, 130, 11}, {65, 24, 3001}, {200, 100, 32003},
                       {700, 24, 3}, {333, 33, 2},  {96, 8, 1}};
    for (int s = 0; s < LENGTH(shapes); s++) {
        int N = shapes[s][0], C = shapes[s][1], V = shapes[s][2];
        if (too_large((size_t)V * C)) continue;
        struct tokens tokens = random_tokens(N, V);
        struct array table = array_random((size_t)V * C, 1, WEIGHT);
        struct array out = array_empty((size_t)N * C, TENSOR);
        struct array dout = array_random(out.n, 1, TENSOR);
        subject.backend->embedding_forward(out.value, tokens.value, table.value, N, C);
        for (int i = 0; i < N * C; i++)
            out.reference[i] = table.reference[(size_t)tokens.host[i / C] * C + i % C];
        assert_close(&out, "embedding_forward", 0, 0);
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            struct array dtable = array_filled(table.n, accumulate, FLOAT32);
            for (int i = 0; i < N * C; i++)
                dtable.reference[(size_t)tokens.host[i / C] * C + i % C] += dout.reference[i];
            subject.backend->embedding_backward(dtable.value, tokens.value, dout.value, N, C, V,
                                                accumulate);
            assert_close(&dtable, "embedding_backward", 4e-7, 4e-7);
            array_free(&dtable);
        }
        array_free(&table), array_free(&out), array_free(&dout);
        tokens_free(&tokens);
    }
}

static void check_rmsnorm_backward(int N, int C, struct array *x, struct array *w,
                                   const double *exact_rstd, bool accumulate) {
    struct array rstd = array_empty(N, FLOAT32);
    memcpy(rstd.reference, exact_rstd, sizeof(double) * N);
    array_write(&rstd);
    struct array dout = array_random(x->n, 1, TENSOR);
    struct array dx = array_random(x->n, 1, TENSOR), dw = array_filled(C, accumulate, FLOAT32);
    struct array dx0 = array_empty(x->n, TENSOR), dw0 = array_empty(C, FLOAT32);
    reference_rmsnorm_backward(dx0.reference, dw0.reference, dout.reference, x->reference,
                               w->reference, rstd.reference, N, C);
    array_add_reference(&dx, &dx0);
    array_add_reference(&dw, &dw0);
    dx.terms = 1;
    subject.backend->rmsnorm_backward(dx.value, dw.value, dout.value, x->value, w->value,
                                      rstd.value, N, C, accumulate);
    assert_close(&dx, "rmsnorm_backward: dx", 5e-7, ROUNDED);
    assert_close(&dw, "rmsnorm_backward: dw", 2e-6, 2e-6);
    if (!accumulate) {
        subject.backend->clear(dx0.value, bytes_of_array(&dx0));
        subject.backend->rmsnorm_backward(dx0.value, dw.value, dout.value, x->value, w->value,
                                          rstd.value, N, C, false);
        struct problem p = {.N = N, .C = C, .x = x, .w = w, .dout = &dout};
        if (C > 1) assert_gradient(rmsnorm_loss, &p, x->n, x, &dx0); /* C = 1: dx is nearly 0 */
        assert_gradient(rmsnorm_loss, &p, x->n, w, &dw);
    }
    array_free(&dout), array_free(&dx), array_free(&dw), array_free(&dx0), array_free(&dw0);
    array_free(&rstd);
}

/* sum = x + y as the backend's type rounds it, out = rmsnorm(sum). */
static void check_residual_rmsnorm(int N, int C, struct array *x, struct array *w, bool in_place) {
    struct array y = array_random(x->n, 2, TENSOR), sum = array_empty(x->n, TENSOR);
    struct array out = array_empty(x->n, TENSOR), rstd = array_empty(N, FLOAT32);
    for (size_t i = 0; i < x->n; i++)
        sum.reference[i] = (float)x->reference[i] + (float)y.reference[i];
    array_write(&sum);
    reference_rmsnorm(out.reference, rstd.reference, sum.reference, w->reference, N, C, 1e-5);
    array_poison(&sum);
    if (in_place) subject.backend->copy(sum.value, x->value, bytes_of_array(x));
    subject.backend->residual_rmsnorm_forward(sum.value, out.value, rstd.value,
                                              in_place ? sum.value : x->value, y.value, w->value, N,
                                              C, 1e-5f);
    assert_close(&sum, "residual_rmsnorm_forward: sum", 0, 0);
    assert_close(&out, "residual_rmsnorm_forward: out", 2e-6, ROUNDED);
    assert_close(&rstd, "residual_rmsnorm_forward: rstd", 2e-6, 2e-6);
    array_free(&y), array_free(&sum), array_free(&out), array_free(&rstd);
}

void test_rmsnorm(void **state) {
    (void)state;
    int shapes[][2] = {{1, 1},     {1, 7},     {2, 64},    {65, 288},  {129, 97},
                       {63, 72},   {390, 33},  {500, 16},  {300, 512}, {3, 4096},
                       {2, 12288}, {2, 12296}, {3500, 40}, {70, 1024}};
    for (int s = 0; s < LENGTH(shapes); s++) {
        int N = shapes[s][0], C = shapes[s][1];
        size_t n = (size_t)N * C;
        if (too_large(n)) continue;
        struct array x = array_random(n, 2, TENSOR), w = array_random(C, 1, WEIGHT);
        struct array out = array_empty(n, TENSOR), rstd = array_empty(N, FLOAT32);
        reference_rmsnorm(out.reference, rstd.reference, x.reference, w.reference, N, C, 1e-5);
        subject.backend->rmsnorm_forward(out.value, rstd.value, x.value, w.value, N, C, 1e-5f);
        assert_close(&out, "rmsnorm_forward: out", 2e-6, ROUNDED);
        assert_close(&rstd, "rmsnorm_forward: rstd", 2e-6, 2e-6);
        for (int i = 0; i < 2; i++) {
            check_rmsnorm_backward(N, C, &x, &w, rstd.reference, i);
            check_residual_rmsnorm(N, C, &x, &w, i);
        }
        array_free(&x), array_free(&w), array_free(&out), array_free(&rstd);
    }
}

/* ---- matrix products ------------------------------------------------------------------------ */

static void check_matmul(int N, int I, int O) {
    struct array x = array_random((size_t)N * I, 1, TENSOR);
    struct array w = array_random((size_t)O * I, 1, WEIGHT),
                 out = array_empty((size_t)N * O, TENSOR);
    struct array dout = array_random(out.n, 1, TENSOR);
    struct array dx0 = array_empty(x.n, TENSOR), dw0 = array_empty(w.n, FLOAT32);
    reference_matmul(out.reference, x.reference, w.reference, N, I, O);
    subject.backend->matmul_forward(out.value, x.value, w.value, N, I, O);
    assert_close(&out, "matmul_forward", 1e-6, ROUNDED);
    reference_matmul_backward(dx0.reference, dw0.reference, dout.reference, x.reference,
                              w.reference, N, I, O);
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        struct array dx = array_filled(x.n, accumulate, TENSOR);
        struct array dw = array_filled(w.n, accumulate, FLOAT32);
        array_add_reference(&dx, &dx0);
        array_add_reference(&dw, &dw0);
        subject.backend->matmul_backward_input(dx.value, dout.value, w.value, N, I, O, accumulate);
        subject.backend->matmul_backward_weight(dw.value, dout.value, x.value, N, I, O, accumulate);
        assert_close(&dx, "matmul_backward_input", 1e-6, ROUNDED);
        /* Tensor cores cut off what does not fit float32 where other units round: by arithmetic up
         * to 7e-7 of a sum of 600 (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor
         * cores"). */
        assert_close(&dw, "matmul_backward_weight", 1e-6, 3e-6);
        if (!accumulate && (long)N * I * O < 4000000) {
            struct problem p = {.N = N, .C = I, .O = O, .x = &x, .w = &w, .dout = &dout};
            assert_gradient(matmul_loss, &p, out.n, &x, &dx);
            assert_gradient(matmul_loss, &p, out.n, &w, &dw);
        }
        array_free(&dx), array_free(&dw);
    }
    array_free(&x), array_free(&w), array_free(&out), array_free(&dout);
    array_free(&dx0), array_free(&dw0);
}

void test_matmul(void **state) {
    (void)state;
    /* Powers of two among them: rows that far apart take another path. */
    int shapes[][3] = {{1, 1, 1},       {1, 288, 97},   {97, 1, 5},     {5, 31, 1},
                       {64, 48, 300},   {130, 288, 77}, {33, 512, 128}, {257, 128, 256},
                       {600, 16, 1024}, {3, 384, 640}};
    for (int s = 0; s < LENGTH(shapes); s++)
        if (!too_large((size_t)shapes[s][0] * shapes[s][1] * shapes[s][2] / 8))
            check_matmul(shapes[s][0], shapes[s][1], shapes[s][2]);
}

/* Where weights in use are float32, operations round them: the results are those of rounded
 * ones. */
void test_weights_are_rounded(void **state) {
    (void)state;
    enum { N = 5, I = 70, O = 45 };
    const struct backend *b = subject.backend;
    if (b->weight_bytes == b->element_bytes) skip();
    struct array x = array_random(N * I, 1, TENSOR), dout = array_random(N * O, 1, TENSOR);
    struct array exact = array_random(O * I, 1, FLOAT32), rounded = array_empty(O * I, WEIGHT);
    struct array out[2] = {array_empty(N * O, TENSOR), array_empty(N * O, TENSOR)};
    struct array dx[2] = {array_empty(N * I, TENSOR), array_empty(N * I, TENSOR)};
    struct tokens tokens = random_tokens(N, O);
    struct array loss[2] = {array_empty(N, FLOAT32), array_empty(N, FLOAT32)};
    struct array row[2] = {array_empty(N * I, TENSOR), array_empty(N * I, TENSOR)};
    memcpy(rounded.reference, exact.reference, sizeof(double) * O * I);
    array_write(&rounded);
    for (int i = 0; i < 2; i++) {
        const weight *w = i ? rounded.value : exact.value;
        b->matmul_forward(out[i].value, x.value, w, N, I, O);
        b->matmul_backward_input(dx[i].value, dout.value, w, N, I, O, false);
        b->classifier(loss[i].value, NULL, NULL, x.value, w, tokens.value, N, I, O, 1, false);
        b->embedding_forward(row[i].value, tokens.value, w, N, I);
    }
    struct array *same[] = {out, dx, loss, row};
    for (int i = 0; i < LENGTH(same); i++) {
        assert_memory_equal(same[i][0].value, same[i][1].value, bytes_of_array(&same[i][0]));
        array_free(&same[i][0]), array_free(&same[i][1]);
    }
    array_free(&x), array_free(&dout), array_free(&exact), array_free(&rounded);
    tokens_free(&tokens);
}

/* ---- rotary embedding and attention --------------------------------------------------------- */

struct attention_shape {
    int B, T, H, K, D;
};

static const struct attention_shape attention_shapes[] = {
    {1, 1, 1, 1, 2},   {2, 1, 4, 2, 6},    {1, 5, 2, 2, 6},    {3, 17, 4, 1, 12},
    {2, 64, 2, 2, 48}, {1, 65, 6, 3, 48},  {2, 100, 8, 4, 64}, {1, 130, 2, 1, 128},
    {2, 33, 8, 8, 8},  {1, 256, 3, 3, 48}, {2, 1, 8, 1, 64},   {1, 7, 8, 1, 128},
    {2, 63, 2, 2, 64}, {1, 65, 2, 1, 128}, {1, 200, 8, 1, 64},
};

void test_rope(void **state) {
    (void)state;
    for (int s = 0; s < LENGTH(attention_shapes); s++) {
        struct attention_shape a = attention_shapes[s];
        size_t n = (size_t)a.B * a.T * (a.H + 2 * a.K) * a.D;
        if (too_large(n)) continue;
        struct array qkv = array_random(n, 1, TENSOR);
        struct array cosine = array_empty((size_t)a.T * a.D / 2, FLOAT32);
        struct array sine = array_empty(cosine.n, FLOAT32);
        for (size_t i = 0; i < cosine.n; i++) {
            double angle = 3 * random_uniform();
            cosine.reference[i] = cos(angle);
            sine.reference[i] = sin(angle);
        }
        array_write(&cosine), array_write(&sine);
        for (int backward = 0; backward < 2; backward++) { /* there, and back again */
            subject.backend->rope(qkv.value, cosine.value, sine.value, a.B, a.T, a.H, a.K, a.D,
                                  backward);
            reference_rope(qkv.reference, cosine.reference, sine.reference, a.B, a.T, a.H, a.K, a.D,
                           backward);
            assert_close(&qkv, backward ? "rope, there and back" : "rope", 2e-7,
                         backward ? 6e-3 : ROUNDED);
        }
        array_free(&qkv), array_free(&cosine), array_free(&sine);
    }
}

static bool knows_head_size(int D) {
    const int *size = subject.head_sizes;
    while (size && *size && *size != D) size++;
    return !size || *size;
}

static void check_attention(struct attention_shape a, double size, double float32, double bfloat16,
                            bool differences) {
    size_t rows = (size_t)a.B * a.T, n = rows * a.H * a.D;
    if (!knows_head_size(a.D) || too_large(rows * a.H * a.T)) return;
    struct array qkv = array_random(rows * (a.H + 2 * a.K) * a.D, size, TENSOR);
    struct array out = array_empty(n, TENSOR), log_sum_exp = array_empty(rows * a.H, FLOAT32);
    struct array dout = array_random(n, 1, TENSOR), dqkv = array_empty(qkv.n, TENSOR);
    const char *name[] = {"attention_forward: out",
                          "attention_forward: log_sum_exp",
                          "attention_backward",
                          "attention_forward: out, large",
                          "attention_forward: lse, large",
                          "attention_backward, large"};
    int large = size > 2 ? 3 : 0;
    if (large) dqkv.terms = size; /* dP - delta, which are as large as V */
    reference_attention(out.reference, log_sum_exp.reference, qkv.reference, a.B, a.T, a.H, a.K,
                        a.D);
    subject.backend->attention_forward(out.value, log_sum_exp.value, qkv.value, a.B, a.T, a.H, a.K,
                                       a.D);
    assert_close(&out, name[large], float32, bfloat16);
    assert_close(&log_sum_exp, name[large + 1], float32, bfloat16 / 1000);
    reference_attention_backward(dqkv.reference, dout.reference, qkv.reference, a.B, a.T, a.H, a.K,
                                 a.D);
    subject.backend->attention_backward(dqkv.value, dout.value, out.value, qkv.value,
                                        log_sum_exp.value, a.B, a.T, a.H, a.K, a.D);
    assert_close(&dqkv, name[large + 2], 3 * float32, 4 * bfloat16);
    struct problem p = {.B = a.B, .T = a.T, .H = a.H, .K = a.K, .D = a.D, .x = &qkv, .dout = &dout};
    if (differences) assert_gradient(attention_loss, &p, n, &qkv, &dqkv);
    array_free(&qkv), array_free(&out), array_free(&log_sum_exp);
    array_free(&dout), array_free(&dqkv);
}

void test_attention(void **state) {
    (void)state;
    if (!subject.backend->attention_forward) skip();
    for (int s = 0; s < LENGTH(attention_shapes); s++)
        check_attention(attention_shapes[s], 1, 1e-6, 4e-3, true);
}

/* The last rows of a sequence, whose first ones were there before. */
static void check_attention_continue(struct attention_shape a, int first) {
    size_t before = (size_t)first * a.H * a.D, n = (size_t)a.T * a.H * a.D - before;
    struct array qkv = array_random((size_t)a.T * (a.H + 2 * a.K) * a.D, 2, TENSOR);
    struct array out = array_empty(n, TENSOR);
    double *whole = (double *)malloc(sizeof(double) * (before + n));
    assert_non_null(whole);
    reference_attention(whole, NULL, qkv.reference, 1, a.T, a.H, a.K, a.D);
    memcpy(out.reference, whole + before, sizeof(double) * n);
    subject.backend->attention_continue(out.value, qkv.value, first, a.T - first, a.H, a.K, a.D);
    assert_close(&out, "attention_continue", 1e-6, 4e-3);
    array_free(&qkv), array_free(&out);
    free(whole);
}

void test_attention_continue(void **state) {
    (void)state;
    if (!subject.backend->attention_continue) skip();
    for (int s = 0; s < LENGTH(attention_shapes); s++) {
        struct attention_shape a = attention_shapes[s];
        if (a.T == 1 || too_large((size_t)a.T * a.H * a.T)) continue;
        check_attention_continue(a, a.T - 1);
        if (a.T < 100) check_attention_continue(a, a.T / 2);
    }
}

/* Logits in the hundreds: exp overflows unless the maximum is taken off. The error is that of the
 * logits, whose float32 rounding is 1e-5 there. */
void test_attention_large_logits(void **state) {
    (void)state;
    if (!subject.backend->attention_forward) skip();
    check_attention((struct attention_shape){1, 70, 2, 1, 48}, 12, 1e-4, 4e-3, false);
    check_attention((struct attention_shape){1, 70, 2, 1, 64}, 12, 1e-4, 4e-3, false);
}

/* ---- SwiGLU ---------------------------------------------------------------------------------- */

void test_swiglu(void **state) {
    (void)state;
    int shapes[][2] = {{1, 1}, {1, 33}, {7, 97}, {65, 24}, {130, 768}, {2, 1376}};
    for (int s = 0; s < LENGTH(shapes); s++) {
        int N = shapes[s][0], F = shapes[s][1];
        size_t n = (size_t)N * F;
        if (too_large(2 * n)) continue;
        struct array gate_up = array_random(2 * n, s == 2 ? 120 : 4, TENSOR);
        struct array out = array_empty(n, TENSOR), dout = array_random(n, 1, TENSOR);
        struct array dgate_up = array_empty(2 * n, TENSOR);
        reference_swiglu(out.reference, gate_up.reference, N, F);
        subject.backend->swiglu_forward(out.value, gate_up.value, N, F);
        assert_close(&out, "swiglu_forward", 5e-7, ROUNDED);
        reference_swiglu_backward(dgate_up.reference, dout.reference, gate_up.reference, N, F);
        subject.backend->swiglu_backward(dgate_up.value, dout.value, gate_up.value, N, F);
        assert_close(&dgate_up, "swiglu_backward", 5e-7, ROUNDED);
        struct problem p = {.N = N, .C = F, .x = &gate_up, .dout = &dout};
        assert_gradient(swiglu_loss, &p, n, &gate_up, &dgate_up);
        array_free(&gate_up), array_free(&out), array_free(&dout), array_free(&dgate_up);
    }
}

/* ---- classifier ------------------------------------------------------------------------------ */

/* Tolerances are for the type of tensors: logits are rounded to it. */
static void check_classifier(int N, int C, int V, double size, double float32, double bfloat16,
                             bool differences) {
    const float scale = 1.0f / CLASSIFIER_SCALE_INVERSE;
    if (too_large((size_t)N * V)) return;
    struct tokens targets = random_tokens(N, V);
    struct array x = array_random((size_t)N * C, size, TENSOR);
    struct array w = array_random((size_t)V * C, size, WEIGHT), dw0 = array_empty(w.n, FLOAT32);
    struct array losses = array_empty(N, FLOAT32), dx = array_empty(x.n, TENSOR);
    reference_classifier(losses.reference, dx.reference, dw0.reference, x.reference, w.reference,
                         targets.host, N, C, V, scale);
    subject.backend->classifier(losses.value, NULL, NULL, x.value, w.value, targets.value, N, C, V,
                                scale, false);
    bool large = size > 2;
    assert_close(&losses, large ? "classifier: losses, large" : "classifier: losses", float32,
                 bfloat16);
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        struct array dw = array_filled(w.n, accumulate, FLOAT32);
        array_add_reference(&dw, &dw0);
        array_poison(&losses);
        array_poison(&dx);
        subject.backend->classifier(losses.value, dx.value, dw.value, x.value, w.value,
                                    targets.value, N, C, V, scale, accumulate);
        assert_close(&losses, large ? "classifier: losses, large" : "classifier: losses", float32,
                     bfloat16);
        assert_close(&dx, large ? "classifier: dx, large" : "classifier: dx", float32,
                     4 * bfloat16);
        /* Where most rows of dw are small and a target's is not, a sum of float32 in the order of
         * its terms, with exact factors, is off by up to 4.4e-6 of an element (300 x 16 x 9000). */
        assert_close(&dw, large ? "classifier: dw, large" : "classifier: dw", 2 * float32,
                     8 * bfloat16);
        struct problem p = {.N = N, .C = C, .O = V, .targets = targets.host, .x = &x, .w = &w};
        if (differences && !accumulate) {
            assert_gradient(classifier_loss, &p, N, &x, &dx);
            assert_gradient(classifier_loss, &p, N, &w, &dw);
        }
        array_free(&dw);
    }
    array_free(&x), array_free(&w), array_free(&losses), array_free(&dx), array_free(&dw0);
    tokens_free(&targets);
}

/* C = 1 and x = 1 or -1: logits are w's own numbers, exact in every type, so that the losses have
 * no error but the softmax's. `rising`: from -size to size over the vocabulary, and falling where x
 * is -1: a running maximum has to follow. */
static void check_classifier_softmax(int N, int V, double size, bool rising) {
    if (too_large((size_t)N * V)) return;
    struct tokens targets = random_tokens(N, V);
    struct array x = array_empty(N, TENSOR), w = array_random(V, size, WEIGHT);
    struct array losses = array_empty(N, FLOAT32), dx = array_empty(N, TENSOR);
    struct array dw = array_empty(V, FLOAT32);
    for (int n = 0; n < N; n++) x.reference[n] = n % 2 ? -1 : 1;
    for (int v = 0; v < V && rising; v++) w.reference[v] = size * (2.0 * v / V - 1);
    array_write(&x), array_write(&w);
    dx.terms = size;
    reference_classifier(losses.reference, dx.reference, dw.reference, x.reference, w.reference,
                         targets.host, N, 1, V, 1);
    subject.backend->classifier(losses.value, dx.value, dw.value, x.value, w.value, targets.value,
                                N, 1, V, 1, false);
    assert_close(&losses, "classifier: losses, exact logits", 1e-6, 1e-6);
    assert_close(&dx, "classifier: dx, exact logits", 4e-6, 2 * ROUNDED);
    assert_close(&dw, "classifier: dw, exact logits", 1e-6, 2 * ROUNDED);
    array_free(&x), array_free(&w), array_free(&losses), array_free(&dx), array_free(&dw);
    tokens_free(&targets);
}

void test_classifier(void **state) {
    (void)state;
    check_classifier(1, 1, 2, 1, 1e-6, ROUNDED, true);
    check_classifier(1, 64, 97, 1, 1e-6, ROUNDED, true);
    check_classifier(37, 48, 97, 1, 1e-6, ROUNDED, true);
    check_classifier(140, 128, 600, 0.3, 1e-6, ROUNDED, true);
    check_classifier(3, 6, 32003, 1, 1e-6, ROUNDED, true);
    check_classifier(1100, 12, 530, 1, 1e-6, ROUNDED, true);
    check_classifier(300, 16, 9000, 1, 1e-6, ROUNDED, false);
}

void test_classifier_large_logits(void **state) {
    (void)state;
    /* Logits of some 100, whose own rounding decides: another order of their sums is another
     * draw. */
    check_classifier(30, 64, 3000, 5, 3e-5, 3 * ROUNDED, false);
    check_classifier_softmax(4, 203, 8, false);
    check_classifier_softmax(41, 1000, 300, true);
    check_classifier_softmax(2, 20000, 312.5, true);
    check_classifier_softmax(2, 24500, 8, false); /* 48 KiB with a block's static memory alone */
    check_classifier_softmax(3, 60001, 8, false); /* more than a block keeps */
}
