/* operators_bits.c — tests that operations give the same bits every time. It runs each operation
 * once; callers compare the bits for other numbers and orders of threads, and for any alignment.
 * See operators.h. */
#include "test/llmc/operators.h"

/* Shapes that make several tiles, blocks, chunks and segments. A head size of 64 is one that every
 * backend knows. Fewer rows and elements where a backend is slow. */
enum { H = 4, K = 2, D = 64, C = H * D, F = 150, WIDTH = (H + 2 * K) * D };
enum { ELEMENTS = 200003, PACKET = 1000 };

struct inputs {
    int B, T, N, V;
    size_t elements;
    struct array x, y, w, norm, big, m, v, table, qkv, out, log_sum_exp, dout, gate_up, cosine,
        sine;
    float *weight; /* the host's */
    struct tokens tokens;
};

struct inputs *inputs_new(void) {
    struct inputs *in = (struct inputs *)malloc(sizeof *in);
    assert_non_null(in);
    bool slow = subject.most_work != 0; /* what it costs goes with N V and N C C */
    int B = slow ? 2 : 5, T = !slow ? 150 : subject.most_work > 20000 ? 33 : 5, N = B * T;
    int V = slow ? 203 : 3000;
    size_t elements = slow ? 5003 : ELEMENTS, packets = elements / PACKET + 1;
    float *weight = (float *)malloc(2 * packets * sizeof(float));
    assert_non_null(weight);
    for (size_t i = 0; i < 2 * packets; i++) weight[i] = (float)random_uniform();
    *in = (struct inputs){
        .B = B,
        .T = T,
        .N = N,
        .V = V,
        .elements = elements,
        .x = array_random((size_t)N * C, 1, TENSOR),
        .y = array_random((size_t)N * C, 1, TENSOR),
        .w = array_random((size_t)F * C, 1, WEIGHT),
        .norm = array_random(C, 1, WEIGHT),
        .big = array_random(2 * elements, 1, FLOAT32),
        .m = array_random(elements, 1, FLOAT32),
        .v = array_random(elements, 0, FLOAT32),
        .table = array_random((size_t)V * C, 1, WEIGHT),
        .qkv = array_random((size_t)N * WIDTH, 1, TENSOR),
        .out = array_empty((size_t)N * C, TENSOR),
        .log_sum_exp = array_empty((size_t)N * H, FLOAT32),
        .dout = array_random((size_t)N * C, 1, TENSOR),
        .gate_up = array_random((size_t)N * 2 * F, 3, TENSOR),
        .cosine = array_random(T * D / 2, 1, FLOAT32),
        .sine = array_random(T * D / 2, 1, FLOAT32),
        .weight = weight,
        .tokens = random_tokens(N, V),
    };
    if (subject.backend->attention_forward)
        subject.backend->attention_forward(in->out.value, in->log_sum_exp.value, in->qkv.value, B,
                                           T, H, K, D);
    return in;
}

void inputs_free(struct inputs *in) {
    struct array *all[] = {&in->x,    &in->y,      &in->w,     &in->norm,        &in->big,
                           &in->m,    &in->v,      &in->table, &in->qkv,         &in->out,
                           &in->dout, &in->cosine, &in->sine,  &in->log_sum_exp, &in->gate_up};
    for (int i = 0; i < LENGTH(all); i++) array_free(all[i]);
    tokens_free(&in->tokens);
    free(in->weight);
    free(in);
}

static void *output(struct outputs *o, const char *name, size_t bytes, const void *start) {
    int i = o->count++;
    o->name[i] = name;
    o->bytes[i] = bytes;
    o->memory[i] = subject.backend->allocate(o->bytes[i]);
    if (start) subject.backend->copy(o->memory[i], start, o->bytes[i]);
    return o->memory[i];
}

static void run_rows(const struct inputs *in, struct outputs *o) {
    const struct backend *b = subject.backend;
    int N = in->N, V = in->V;
    size_t e = b->element_bytes, row = C * e;
    void *x = in->x.value, *y = in->y.value, *norm = in->norm.value;
    float *rstd = (float *)output(o, "rstd", N * sizeof(float), NULL);
    b->embedding_forward(output(o, "embedding_forward", N * row, NULL), in->tokens.value,
                         in->table.value, N, C);
    b->embedding_backward(output(o, "embedding_backward", V * C * sizeof(float), NULL),
                          in->tokens.value, x, N, C, V, false);
    b->rmsnorm_forward(output(o, "rmsnorm_forward", N * row, NULL), rstd, x, norm, N, C, 1e-5f);
    void *dx = output(o, "rmsnorm_backward: dx", N * row, y);
    b->rmsnorm_backward(dx, output(o, "rmsnorm_backward: dw", C * sizeof(float), NULL),
                        in->dout.value, x, norm, rstd, N, C, false);
    void *sum = output(o, "residual_rmsnorm_forward: sum", N * row, NULL);
    b->residual_rmsnorm_forward(sum, output(o, "residual_rmsnorm_forward: out", N * row, NULL),
                                rstd, x, y, norm, N, C, 1e-5f);
    b->matmul_forward(output(o, "matmul_forward", N * F * e, NULL), x, in->w.value, N, C, F);
    b->matmul_backward_input(output(o, "matmul_backward_input", N * F * e, NULL), x,
                             in->table.value, N, F, C, false);
    b->matmul_backward_weight(output(o, "matmul_backward_weight", C * C * sizeof(float), NULL), x,
                              y, N, C, C, false);
    b->swiglu_forward(output(o, "swiglu_forward", N * F * e, NULL), in->gate_up.value, N, F);
    b->swiglu_backward(output(o, "swiglu_backward", N * 2 * F * e, NULL), in->gate_up.value,
                       in->gate_up.value, N, F);
}

static void run_attention_and_classifier(const struct inputs *in, struct outputs *o) {
    const struct backend *b = subject.backend;
    int N = in->N, B = in->B, T = in->T, V = in->V;
    size_t e = b->element_bytes, qkv = (size_t)N * WIDTH * e;
    b->rope(output(o, "rope", qkv, in->qkv.value), in->cosine.value, in->sine.value, B, T, H, K, D,
            false);
    if (b->attention_forward) {
        float *lse =
            (float *)output(o, "attention_forward: log_sum_exp", N * H * sizeof(float), NULL);
        b->attention_forward(output(o, "attention_forward: out", N * C * e, NULL), lse,
                             in->qkv.value, B, T, H, K, D);
        b->attention_backward(output(o, "attention_backward", qkv, NULL), in->dout.value,
                              in->out.value, in->qkv.value, in->log_sum_exp.value, B, T, H, K, D);
    }
    float *losses = (float *)output(o, "classifier: losses", N * sizeof(float), NULL);
    void *dx = output(o, "classifier: dx", N * C * e, NULL);
    b->classifier(losses, dx, output(o, "classifier: dw", V * C * sizeof(float), NULL), in->x.value,
                  in->table.value, in->tokens.value, N, C, V, 0.5f, false);
}

static void run_update(const struct inputs *in, struct outputs *o) {
    const struct backend *b = subject.backend;
    struct adamw_settings settings = {0.9f, 0.95f, 1e-8f, 0.5f};
    size_t n = in->elements, bytes = n * sizeof(float);
    float *big = (float *)in->big.value;
    float *master = (float *)output(o, "adamw: master", bytes, big);
    float *m = (float *)output(o, "adamw: m", bytes, in->m.value);
    float *v = (float *)output(o, "adamw: v", bytes, in->v.value);
    float *ahead = (float *)output(o, "adamw: ahead", bytes, NULL);
    b->adamw(output(o, "adamw: parameters", n * b->weight_bytes, NULL), master, m, v, ahead,
             big + n, n, &settings, 3, 0.01f, 0.1f, 0.7f);
    const struct muon_settings muon = {0.95f, 0.5f};
    float *matrix = (float *)output(o, "muon: master", 40 * 24 * sizeof(float), big);
    b->muon(output(o, "muon: parameters", 40 * 24 * b->weight_bytes, NULL), matrix,
            (float *)output(o, "muon: m", 40 * 24 * sizeof(float), in->m.value),
            (float *)output(o, "muon: ahead", 40 * 24 * sizeof(float), NULL), big + n, 40, 24,
            &muon, 0.01f, 0.1f, 0.7f);
    double squares = b->sum_of_squares(big, 2 * n);
    b->upload(output(o, "sum_of_squares", sizeof squares, NULL), &squares, sizeof squares);
    const float *sender[] = {big, big + n};
    b->weighted_sum((float *)output(o, "weighted_sum", bytes, NULL), sender, in->weight, 2, n,
                    PACKET);
}

void run_everything(const struct inputs *in, struct outputs *o) {
    run_rows(in, o);
    run_attention_and_classifier(in, o);
    run_update(in, o);
}

void assert_same_bits(const struct outputs *a, const struct outputs *b, const char *where,
                      int number) {
    assert_int_equal(a->count, b->count);
    for (int i = 0; i < a->count; i++) {
        char *one = (char *)malloc(a->bytes[i]), *other = (char *)malloc(a->bytes[i]);
        assert_true(one && other);
        subject.backend->download(one, a->memory[i], a->bytes[i]);
        subject.backend->download(other, b->memory[i], a->bytes[i]);
        if (memcmp(one, other, a->bytes[i]) != 0)
            fail_msg("%s: other bits %s %d", a->name[i], where, number);
        free(one);
        free(other);
    }
}

void outputs_free(struct outputs *o) {
    for (int i = 0; i < o->count; i++) subject.backend->release(o->memory[i]);
    o->count = 0;
}

/* ---- shards start anywhere: an element's result must not depend on its place in a vector ----- */

enum { COUNT = 3001, SHIFTS = 17, ALL = COUNT + SHIFTS };

static void assert_part(const void *got, const void *expected, size_t first, size_t bytes,
                        const char *name, int shift) {
    char one[COUNT * sizeof(float)], other[COUNT * sizeof(float)];
    subject.backend->download(one, (const char *)got + first * bytes, COUNT * bytes);
    subject.backend->download(other, (const char *)expected + first * bytes, COUNT * bytes);
    if (memcmp(one, other, COUNT * bytes) != 0)
        fail_msg("%s: other bits %d elements on", name, shift);
}

static void check_weighted_sum_alignment(void) {
    struct array x = array_random(ALL, 1, FLOAT32), y = array_random(ALL, 1, FLOAT32);
    struct array out = array_empty(ALL, FLOAT32), expected = array_empty(ALL, FLOAT32);
    float two[] = {0.3f, 0.7f};
    const float *sender[] = {x.value, y.value};
    subject.backend->weighted_sum(expected.value, sender, two, 2, ALL, ALL);
    for (int shift = 0; shift < SHIFTS; shift++) {
        const float *shifted[] = {sender[0] + shift, sender[1] + shift};
        subject.backend->weighted_sum((float *)out.value + shift % 2 * shift, shifted, two, 2,
                                      COUNT, COUNT);
        assert_part((float *)out.value + shift % 2 * shift, (float *)expected.value + shift, 0,
                    sizeof(float), "weighted_sum", shift);
    }
    array_free(&x), array_free(&y), array_free(&out), array_free(&expected);
}

static void check_adamw_alignment(void) {
    size_t e = subject.backend->weight_bytes;
    struct array start = array_random(ALL, 1, FLOAT32), gradient = array_random(ALL, 1, FLOAT32);
    struct array m0 = array_random(ALL, 1, FLOAT32), v0 = array_random(ALL, 0, FLOAT32);
    struct array m = array_empty(ALL, FLOAT32), v = array_empty(ALL, FLOAT32);
    struct array p = array_empty(ALL, FLOAT32), param = array_empty(ALL, WEIGHT);
    struct array whole = array_empty(ALL, FLOAT32), whole_param = array_empty(ALL, WEIGHT);
    struct array ahead = array_empty(ALL, FLOAT32), whole_ahead = array_empty(ALL, FLOAT32);
    struct adamw_settings settings = {0.9f, 0.95f, 1e-8f, 0.5f};
    for (int shift = -1; shift < SHIFTS; shift++) { /* -1: all at once, to compare with */
        struct array *master = shift < 0 ? &whole : &p,
                     *rounded = shift < 0 ? &whole_param : &param,
                     *leading = shift < 0 ? &whole_ahead : &ahead;
        int first = shift < 0 ? 0 : shift, count = shift < 0 ? ALL : COUNT;
        subject.backend->copy(master->value, start.value, bytes_of_array(&start));
        subject.backend->copy(m.value, m0.value, bytes_of_array(&m0));
        subject.backend->copy(v.value, v0.value, bytes_of_array(&v0));
        subject.backend->adamw((char *)rounded->value + first * e, (float *)master->value + first,
                               (float *)m.value + first, (float *)v.value + first,
                               (float *)leading->value + first, (float *)gradient.value + first,
                               count, &settings, 2, 0.01f, 0.1f, 1);
        assert_part(master->value, whole.value, first, sizeof(float), "adamw: master", shift);
        assert_part(leading->value, whole_ahead.value, first, sizeof(float), "adamw: ahead", shift);
        assert_part(rounded->value, whole_param.value, first, e, "adamw: parameters", shift);
    }
    array_free(&start), array_free(&gradient), array_free(&m0), array_free(&v0), array_free(&m);
    array_free(&v), array_free(&p), array_free(&param), array_free(&whole);
    array_free(&whole_param), array_free(&ahead), array_free(&whole_ahead);
}

/* Parts of other lengths, alignments and weight decays, one of them too long to join others, have the bits
 * that each has alone. */
static void check_adamw_parts(void) {
    enum { LONG = (1 << 20) + 5, PARTS = 6, ELEMENTS = LONG + 3000 };
    static const size_t first[] = {0, 1, 258, 258, 1300, 1304},
                        end[] = {1, 258, 258, 1300, 1304, LONG + 1304};
    const struct backend *b = subject.backend;
    const struct adamw_settings settings = {0.9f, 0.95f, 1e-8f, 0.5f};
    struct array start = array_random(ELEMENTS, 1, FLOAT32), m = array_random(ELEMENTS, 1, FLOAT32);
    struct array gradient = array_random(ELEMENTS, 1, FLOAT32);
    struct array got[2][5]; /* in_use, master, m, v, ahead: together, and each alone */
    for (int alone = 0; alone < 2; alone++) {
        struct adamw_part part[PARTS];
        for (int a = 0; a < 5; a++)
            got[alone][a] = array_empty(ELEMENTS, a == 0 ? WEIGHT : FLOAT32);
        for (int a = 1; a < 4; a++)
            b->copy(got[alone][a].value, a == 1 ? start.value : m.value, ELEMENTS * sizeof(float));
        b->clear(got[alone][3].value, ELEMENTS * sizeof(float));
        for (int i = 0; i < PARTS; i++) {
            const size_t at = first[i];
            part[i] = (struct adamw_part){(char *)got[alone][0].value + at * b->weight_bytes,
                                          (float *)got[alone][1].value + at,
                                          (float *)got[alone][2].value + at,
                                          (float *)got[alone][3].value + at,
                                          i % 2 ? NULL : (float *)got[alone][4].value + at,
                                          (float *)gradient.value + at,
                                          end[i] - at,
                                          0.1f * (float)i};
            const struct adamw_part *p = &part[i];
            if (alone)
                b->adamw(p->param, p->master, p->m, p->v, p->ahead, p->gradient, p->n, &settings, 3,
                         0.01f, p->weight_decay, 0.7f);
        }
        if (!alone) b->adamw_parts(part, PARTS, &settings, 3, 0.01f, 0.7f);
    }
    for (int a = 0; a < 5; a++) {
        float *one = array_read(&got[0][a]), *other = array_read(&got[1][a]);
        for (int i = 0; i < PARTS; i++)
            if (a < 4 || i % 2 == 0)
                assert_memory_equal(one + first[i], other + first[i],
                                    (end[i] - first[i]) * sizeof *one);
        free(one), free(other);
        array_free(&got[0][a]), array_free(&got[1][a]);
    }
    array_free(&start), array_free(&m), array_free(&gradient);
}

void test_same_bits_at_any_alignment(void **state) {
    (void)state;
    check_weighted_sum_alignment();
    check_adamw_alignment();
    if (subject.backend->adamw_parts) check_adamw_parts();
    struct array x = array_random(COUNT, 1, FLOAT32), p = array_empty(ALL, FLOAT32);
    double squares = subject.backend->sum_of_squares(x.value, COUNT);
    for (int shift = 1; shift < SHIFTS; shift++) {
        subject.backend->copy((float *)p.value + shift, x.value, sizeof(float) * COUNT);
        assert_true(subject.backend->sum_of_squares((float *)p.value + shift, COUNT) == squares);
    }
    array_free(&x), array_free(&p);
}
