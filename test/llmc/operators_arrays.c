/* operators_arrays.c — arrays in a backend's memory, together with their float64 reference; see
 * operators.h. */
#include "test/llmc/operators.h"

struct operators_subject subject;

enum { CANARY = 64 };
static const float canary = 1.2345e30f;

static uint64_t random_state;

void operators_seed(uint64_t seed) {
    random_state = 88172645463325252u ^ seed * 0x9E3779B97F4A7C15u;
}

double random_uniform(void) { /* xorshift64* */
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (double)(int64_t)(random_state * 0x2545F4914F6CDD1D) / 9.3e18;
}

/* ---- numbers ------------------------------------------------------------------------------ */

static size_t element_bytes(enum array_type type) {
    const struct backend *be = subject.backend;
    if (type == FLOAT32) return sizeof(float);
    if (type == BFLOAT16) return sizeof(uint16_t);
    return type == WEIGHT ? be->weight_bytes : be->element_bytes;
}

/* What numbers of this type are rounded to: weights may be stored in more. */
static size_t exact_bytes(enum array_type type) {
    return type == WEIGHT ? subject.backend->element_bytes : element_bytes(type);
}

static float to_type(float x, size_t bytes) { /* bfloat16: to nearest even */
    uint32_t bits;
    if (bytes == 4 || isnan(x)) return x;
    memcpy(&bits, &x, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&x, &bits, 4);
    return x;
}

static void put(void *to, size_t i, float x, size_t bytes) {
    uint32_t bits;
    x = to_type(x, bytes);
    memcpy(&bits, &x, 4);
    if (bytes == 4)
        memcpy((float *)to + i, &x, 4);
    else
        ((uint16_t *)to)[i] = (uint16_t)(bits >> 16);
}

static float get(const void *from, size_t i, size_t bytes) {
    if (bytes == 4) return ((const float *)from)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[i] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* ---- arrays ------------------------------------------------------------------------------- */

size_t bytes_of_array(const struct array *a) {
    return a->n * element_bytes(a->type);
}

void array_write_floats(struct array *a, const float *from) {
    size_t bytes = element_bytes(a->type);
    void *image = malloc(bytes_of_array(a) + 1);
    assert_non_null(image);
    for (size_t i = 0; i < a->n; i++) put(image, i, from[i], bytes);
    subject.backend->upload(a->value, image, bytes_of_array(a));
    free(image);
}

void array_write(struct array *a) {
    float *x = (float *)malloc((a->n + 1) * sizeof(float));
    assert_non_null(x);
    for (size_t i = 0; i < a->n; i++)
        a->reference[i] = x[i] = to_type((float)a->reference[i], exact_bytes(a->type));
    array_write_floats(a, x);
    free(x);
}

void array_poison(struct array *a) {
    float *x = (float *)malloc((a->n + 1) * sizeof(float));
    assert_non_null(x);
    for (size_t i = 0; i < a->n; i++) x[i] = NAN;
    array_write_floats(a, x);
    free(x);
}

struct array array_empty(size_t n, enum array_type type) {
    size_t bytes = element_bytes(type);
    struct array a = {n, (double *)calloc(n + 1, sizeof(double)), NULL, type, 0};
    a.value = subject.backend->allocate((n + CANARY) * bytes);
    assert_non_null(a.reference);
    assert_non_null(a.value);
    assert_int_equal((uintptr_t)a.value % 64, 0);
    array_poison(&a);
    float wall[CANARY];
    for (int i = 0; i < CANARY; i++) put(wall, i, canary, bytes);
    subject.backend->upload((char *)a.value + n * bytes, wall, CANARY * bytes);
    return a;
}

struct array array_random(size_t n, double size, enum array_type type) {
    struct array a = array_empty(n, type);
    for (size_t i = 0; i < n; i++) a.reference[i] = size * random_uniform();
    array_write(&a);
    return a;
}

struct array array_filled(size_t n, bool random, enum array_type type) {
    return random ? array_random(n, 1, type) : array_empty(n, type);
}

float *array_read(const struct array *a) {
    size_t bytes = element_bytes(a->type);
    void *image = malloc(bytes_of_array(a) + 1);
    float *x = (float *)malloc((a->n + 1) * sizeof(float));
    assert_true(image && x);
    subject.backend->download(image, a->value, bytes_of_array(a));
    for (size_t i = 0; i < a->n; i++) x[i] = get(image, i, bytes);
    free(image);
    return x;
}

void array_add_reference(struct array *a, const struct array *b) {
    for (size_t i = 0; i < a->n; i++) a->reference[i] += b->reference[i];
}

void array_free(struct array *a) {
    size_t bytes = element_bytes(a->type);
    float wall[CANARY], expected[CANARY];
    for (int i = 0; i < CANARY; i++) put(expected, i, canary, bytes);
    subject.backend->download(wall, (char *)a->value + a->n * bytes, CANARY * bytes);
    assert_memory_equal(wall, expected, CANARY * bytes);
    subject.backend->release(a->value);
    free(a->reference);
}

void *upload(const void *from, size_t bytes) {
    void *to = subject.backend->allocate(bytes ? bytes : 1);
    assert_non_null(to);
    subject.backend->upload(to, from, bytes);
    return to;
}

struct tokens random_tokens(int N, int V) {
    struct tokens tokens = {(int32_t *)malloc(sizeof(int32_t) * N), NULL};
    assert_non_null(tokens.host);
    for (int n = 0; n < N; n++) tokens.host[n] = (int32_t)(fabs(random_uniform()) * V) % V;
    tokens.host[0] = V - 1;
    tokens.value = (int32_t *)upload(tokens.host, sizeof(int32_t) * N);
    return tokens;
}

void tokens_free(struct tokens *tokens) {
    subject.backend->release(tokens->value);
    free(tokens->host);
}

/* ---- errors ------------------------------------------------------------------------------- */

struct worst {
    const char *name;
    double error, allowed, element;
};
static struct worst worst[64];
static int worst_count;

static void remember(const char *name, double error, double allowed, double element) {
    int i = 0;
    while (i < worst_count && strcmp(worst[i].name, name) != 0) i++;
    assert_true(i < LENGTH(worst));
    if (i == worst_count) worst[worst_count++] = (struct worst){name, 0, allowed, 0};
    if (error > worst[i].error) worst[i].error = error;
    if (element > worst[i].element) worst[i].element = element;
    if (allowed > worst[i].allowed) worst[i].allowed = allowed;
}

void operators_report(const char *title) {
    printf("# %s: worst error of the norm, allowed; worst error of an element\n", title);
    for (int i = 0; i < worst_count; i++)
        printf("#   %-34s %8.1e %8.1e %8.1e\n", worst[i].name, worst[i].error, worst[i].allowed,
               worst[i].element);
    fflush(stdout);
    worst_count = 0;
}

void assert_close(const struct array *a, const char *name, double float32, double bfloat16) {
    double tolerance = subject.backend->element_bytes == 4 ? float32 : bfloat16;
    double sum = 0, square = 0, element = 0;
    float *value = array_read(a);
    for (size_t i = 0; i < a->n; i++) {
        double d = value[i] - a->reference[i];
        sum += d * d; /* NaN stays */
        square += a->reference[i] * a->reference[i] + a->terms * a->terms;
    }
    double rms = sqrt(square / (double)a->n);
    size_t at = 0;
    for (size_t i = 0; i < a->n; i++) {
        double d = fabs(value[i] - a->reference[i]) / (fabs(a->reference[i]) + rms + 1e-300);
        if (d > element) element = d, at = i;
    }
    free(value);
    double error = sum == 0 ? 0 : sqrt(sum / square);
    if (!(error <= tolerance))
        fail_msg("%s, %zu elements: off by %.3g of the norm %.3g, allowed %.3g", name, a->n, error,
                 sqrt(square), tolerance);
    if (!(element <= 4 * tolerance))
        fail_msg("%s: element %zu of %zu is off by %.3g, allowed %.3g", name, at, a->n, element,
                 4 * tolerance);
    remember(name, error, tolerance, element);
}
