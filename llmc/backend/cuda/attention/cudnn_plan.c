/* cudnn_plan.c — see cudnn_plan.h. The graphs' shapes and order of operations are those for which
 * cuDNN's developer guide ("Fused Flash Attention fprop", "bprop") promises kernels. */
#include "llmc/backend/cuda/attention/cudnn_plan.h"
#include "llmc/backend/cuda/attention/cudnn_api.h"

#include <assert.h>
#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* ---- the library ------------------------------------------------------------------------ */

#define MEMBER(name, result, parameters) result(*name) parameters;
static struct {
    CUDNN_FUNCTIONS(MEMBER)
    cudnn_handle handle; /* created with the first plan that can run, for its device */
} cudnn;

char cudnn_why[256];

int cudnn_say_why(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(cudnn_why, sizeof cudnn_why, format, arguments);
    va_end(arguments);
    return 0;
}

#define FIND(name, result, parameters)                                                             \
    *(void **)&cudnn.name = dlsym(library, "cudnn" #name);                                         \
    if (!cudnn.name) return cudnn_say_why("libcudnn.so.9 has no cudnn%s", #name);

int cudnn_attention_open(void) {
    static int version;
    if (version) return version;
    void *library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
    if (!library) return cudnn_say_why("cuDNN is not installed (%s)", dlerror());
    CUDNN_FUNCTIONS(FIND)
    const int found = (int)cudnn.GetVersion();
    if (found >= CUDNN_ATTENTION_OLDEST) return version = found;
    return cudnn_say_why("cuDNN is %d.%d.%d, expected %d.%d or newer", found / 10000,
                         found / 100 % 100, found % 100, CUDNN_ATTENTION_OLDEST / 10000,
                         CUDNN_ATTENTION_OLDEST / 100 % 100);
}

/* Returns whether a call, whose status it is, and all before it have succeeded. If not, cudnn_why
 * has cuDNN's message about the first that has not. */
static bool succeeded(int status, const char *what) {
    char said[256] = "";
    if (*cudnn_why || status == CUDNN_STATUS_SUCCESS) return !*cudnn_why;
    cudnn.GetLastErrorString(said, sizeof said);
    said[strcspn(said, "\n")] = '\0';
    return cudnn_say_why("cuDNN: %s: %s%s%s", what, cudnn.GetErrorString(status), *said ? ": " : "",
                         said);
}

/* ---- descriptors ------------------------------------------------------------------------ */

enum { DESCRIPTORS = 128, OPERATIONS = 32, CONFIGURATIONS = 8, ATTRIBUTES = 7 };

typedef cudnn_descriptor node; /* of a graph: a tensor, an operation, or a part of one */

/* A graph of operations, and cuDNN's plan for it. */
struct plan {
    node made[DESCRIPTORS], operation[OPERATIONS], plan; /* made: all, to destroy */
    int count, operations;
    int64_t workspace;
};

struct attribute {
    int name, type;
    int64_t count; /* 0: it is not set */
    const void *elements;
};

/* The attribute is another descriptor. */
static struct attribute part(int name, const node *d) {
    return (struct attribute){name, CUDNN_TYPE_BACKEND_DESCRIPTOR, *d != NULL, d};
}

/* Returns a new descriptor; `what` names it, or is NULL: cuDNN will fill it. After the first failure,
 * it does nothing and returns NULL. */
static node make(struct plan *p, int type, const char *what,
                 const struct attribute attribute[ATTRIBUTES]) {
    node *d = &p->made[p->count];
    char name[32];
    assert(p->count < DESCRIPTORS);
    if (*cudnn_why || !succeeded(cudnn.BackendCreateDescriptor(type, d), "a descriptor"))
        return NULL;
    p->count++;
    for (const struct attribute *a = attribute; what && a < attribute + ATTRIBUTES; a++) {
        snprintf(name, sizeof name, "attribute %d", a->name);
        if (a->count && !*cudnn_why)
            succeeded(cudnn.BackendSetAttribute(*d, a->name, a->type, a->count, a->elements), name);
    }
    if (what && !*cudnn_why) succeeded(cudnn.BackendFinalize(*d), what);
    return *cudnn_why ? NULL : *d;
}

/* ---- tensors of four dimensions ---------------------------------------------------------- */

/* Numbers of the tensors that the caller has; those from BY_VALUE on are numbers on the host. All
 * others are virtual, that is, in no memory. */
enum { VIRTUAL, Q, KEYS, V, OUT, LOG_SUM_EXP, DOUT, DQ, DKEYS, DV, DELTA, BY_VALUE };
enum { SCALE = BY_VALUE, MASKED, ONE, NAMES };

static struct {
    int64_t B, T, H, K, D;
    int64_t delta;       /* its bytes, a multiple of 256, before the workspace of backward's plan */
    struct plan plan[2]; /* forward, backward */
    float scale, masked, one;
} attention;

/* transposed: the last two dimensions change places, of the same memory */
static node tensor(struct plan *p, int name, int type, const int64_t *dims, const int64_t *strides,
                   bool transposed) {
    const int row = transposed ? 3 : 2, column = transposed ? 2 : 3;
    const int64_t d[] = {dims[0], dims[1], dims[row], dims[column]};
    const int64_t s[] = {strides[0], strides[1], strides[row], strides[column]};
    const int64_t id = name != VIRTUAL ? name : NAMES + p->count, alignment = 16;
    const bool is_virtual = name == VIRTUAL, by_value = name >= BY_VALUE;
    const struct attribute attributes[ATTRIBUTES] = {
        {CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type},
        {CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, d},
        {CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, s},
        {CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &id},
        {CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment},
        {CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual},
        {CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value}};
    return make(p, CUDNN_BACKEND_TENSOR_DESCRIPTOR, "a tensor", attributes);
}

/* (B, H, T, columns), dense */
static node dense(struct plan *p, int name, int type, int64_t columns, bool transposed) {
    const int64_t H = attention.H, T = attention.T, dims[] = {attention.B, H, T, columns};
    const int64_t strides[] = {H * T * columns, T * columns, columns, 1};
    return tensor(p, name, type, dims, strides, transposed);
}

static node square(struct plan *p, int type) {
    return dense(p, VIRTUAL, type, attention.T, false);
}

static node column(struct plan *p, int name) {
    return dense(p, name, CUDNN_DATA_FLOAT, 1, false);
}

static node scalar(struct plan *p, int name) {
    const int64_t one[] = {1, 1, 1, 1};
    return tensor(p, name, CUDNN_DATA_FLOAT, one, one, false);
}

/* (B, heads, T, D), a part of the rows of qkv or of out. A virtual one is like KEYS. */
static node heads(struct plan *p, int name, bool transposed) {
    const int64_t H = attention.H, K = attention.K, T = attention.T, D = attention.D;
    const bool of_out = name == OUT || name == DOUT, of_queries = of_out || name == Q || name == DQ;
    const int64_t row = (of_out ? H : H + 2 * K) * D, strides[] = {T * row, D, row, 1};
    const int64_t dims[] = {attention.B, of_queries ? H : K, T, D};
    return tensor(p, name, CUDNN_DATA_BFLOAT16, dims, strides, transposed);
}

/* ---- operations; each returns its result ------------------------------------------------- */

static const int float32 = CUDNN_DATA_FLOAT;

static node operation(struct plan *p, int type, const struct attribute *attributes, node result) {
    p->operation[p->operations++] = make(p, type, "an operation", attributes);
    return result;
}

/* y = mode(x, other), or with `where`: where ? x : other. axis: for GEN_INDEX */
static node pointwise(struct plan *p, int mode, int64_t axis, node x, node other, node where,
                      node y) {
    const int precision = mode == CUDNN_POINTWISE_CMP_GE ? CUDNN_DATA_BOOLEAN : CUDNN_DATA_FLOAT;
    const struct attribute computes[ATTRIBUTES] = {
        {CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode},
        {CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &precision},
        {CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, mode == CUDNN_POINTWISE_GEN_INDEX, &axis}};
    node how = make(p, CUDNN_BACKEND_POINTWISE_DESCRIPTOR, "a pointwise operation", computes);
    const struct attribute attributes[ATTRIBUTES] = {
        part(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &how),
        part(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, &x),
        part(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, &other),
        part(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, &where),
        part(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, &y)};
    return operation(p, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, attributes, y);
}

/* A virtual float32 square = mode(x, other). */
static node each(struct plan *p, int mode, node x, node other) {
    return pointwise(p, mode, 0, x, other, NULL, square(p, CUDNN_DATA_FLOAT));
}

/* y = x, reduced along the dimensions in which y is smaller. */
static node reduce(struct plan *p, int mode, node x, node y) {
    const struct attribute computes[ATTRIBUTES] = {
        {CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &mode},
        {CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &float32}};
    node how = make(p, CUDNN_BACKEND_REDUCTION_DESCRIPTOR, "a reduction", computes);
    const struct attribute attributes[ATTRIBUTES] = {
        part(CUDNN_ATTR_OPERATION_REDUCTION_DESC, &how),
        part(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, &x),
        part(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, &y)};
    return operation(p, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, attributes, y);
}

static node multiply(struct plan *p, node x, node y, node product) {
    const struct attribute computes[ATTRIBUTES] = {
        {CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &float32}};
    node how = make(p, CUDNN_BACKEND_MATMUL_DESCRIPTOR, "a product", computes);
    const struct attribute attributes[ATTRIBUTES] = {
        part(CUDNN_ATTR_OPERATION_MATMUL_DESC, &how), part(CUDNN_ATTR_OPERATION_MATMUL_ADESC, &x),
        part(CUDNN_ATTR_OPERATION_MATMUL_BDESC, &y),
        part(CUDNN_ATTR_OPERATION_MATMUL_CDESC, &product)};
    return operation(p, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, attributes, product);
}

/* y is x, transposed. */
static node reshape(struct plan *p, node x, node y) {
    const struct attribute attributes[ATTRIBUTES] = {part(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, &x),
                                                     part(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, &y)};
    return operation(p, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, attributes, y);
}

/* ---- the two graphs ----------------------------------------------------------------------- */

/* Logits of keys that come after the query become -infinity. */
static node causal(struct plan *p, node logits) {
    node query =
        pointwise(p, CUDNN_POINTWISE_GEN_INDEX, 2, logits, NULL, NULL, square(p, CUDNN_DATA_INT32));
    node key =
        pointwise(p, CUDNN_POINTWISE_GEN_INDEX, 3, logits, NULL, NULL, square(p, CUDNN_DATA_INT32));
    node seen =
        pointwise(p, CUDNN_POINTWISE_CMP_GE, 0, query, key, NULL, square(p, CUDNN_DATA_BOOLEAN));
    return pointwise(p, CUDNN_POINTWISE_BINARY_SELECT, 0, logits, scalar(p, MASKED), seen,
                     square(p, CUDNN_DATA_FLOAT));
}

static void describe_forward(struct plan *p) {
    node s = multiply(p, heads(p, Q, false), heads(p, KEYS, true), square(p, CUDNN_DATA_FLOAT));
    s = causal(p, each(p, CUDNN_POINTWISE_MUL, s, scalar(p, SCALE)));
    node largest = reduce(p, CUDNN_REDUCE_TENSOR_MAX, s, column(p, VIRTUAL));
    s = each(p, CUDNN_POINTWISE_EXP, each(p, CUDNN_POINTWISE_SUB, s, largest), NULL);
    node sum = reduce(p, CUDNN_REDUCE_TENSOR_ADD, s, column(p, VIRTUAL));
    node log = pointwise(p, CUDNN_POINTWISE_LOG, 0, sum, NULL, NULL, column(p, VIRTUAL));
    pointwise(p, CUDNN_POINTWISE_ADD, 0, largest, log, NULL, column(p, LOG_SUM_EXP));
    s = pointwise(p, CUDNN_POINTWISE_DIV, 0, s, sum, NULL, square(p, CUDNN_DATA_BFLOAT16));
    multiply(p, s, heads(p, V, false), heads(p, OUT, false));
}

/* The tensor `name` = x^T y, summed over each group's query heads if there are fewer key heads. */
static void multiply_for_group(struct plan *p, node x, node y, int name) {
    const bool group = attention.H > attention.K;
    const node sum = heads(p, name, false);
    x = reshape(p, x, dense(p, VIRTUAL, CUDNN_DATA_BFLOAT16, attention.T, true));
    y = multiply(p, x, y, group ? dense(p, VIRTUAL, CUDNN_DATA_BFLOAT16, attention.D, false) : sum);
    if (group) reduce(p, CUDNN_REDUCE_TENSOR_ADD, y, sum);
}

static void describe_backward(struct plan *p) {
    node q = heads(p, Q, false), k = heads(p, KEYS, true);
    node dout = heads(p, DOUT, false), scale = scalar(p, SCALE);
    /* delta = rowsum(dO * O); cuDNN's pattern multiplies it, here by one */
    node delta = pointwise(p, CUDNN_POINTWISE_MUL, 0, dout, heads(p, OUT, false), NULL,
                           dense(p, VIRTUAL, CUDNN_DATA_FLOAT, attention.D, false));
    delta = reduce(p, CUDNN_REDUCE_TENSOR_ADD, delta, column(p, VIRTUAL));
    delta = pointwise(p, CUDNN_POINTWISE_MUL, 0, delta, scalar(p, ONE), NULL, column(p, DELTA));
    /* P = exp(S - log_sum_exp), dV = P^T dO */
    node s = multiply(p, q, k, square(p, CUDNN_DATA_FLOAT));
    s = each(p, CUDNN_POINTWISE_MUL, s, scale);
    s = causal(p, each(p, CUDNN_POINTWISE_SUB, s, column(p, LOG_SUM_EXP)));
    s = each(p, CUDNN_POINTWISE_EXP, s, NULL);
    multiply_for_group(p, s, dout, DV);
    /* dS = P * (dO V^T - delta) * scale, dK = dS^T Q, dQ = dS K */
    node ds = multiply(p, dout, heads(p, V, true), square(p, CUDNN_DATA_FLOAT));
    ds = each(p, CUDNN_POINTWISE_MUL, each(p, CUDNN_POINTWISE_SUB, ds, delta), s);
    ds = pointwise(p, CUDNN_POINTWISE_MUL, 0, ds, scale, NULL, square(p, CUDNN_DATA_BFLOAT16));
    multiply_for_group(p, ds, q, DKEYS);
    multiply(p, ds, reshape(p, k, heads(p, VIRTUAL, false)), heads(p, DQ, false));
}

/* ---- plans -------------------------------------------------------------------------------- */

/* Takes the first of cuDNN's configurations that has a plan. cuDNN puts the one that it estimates
 * to be fastest first. device: see cudnn_attention_plan. */
static void choose(struct plan *p, const char *device) {
    const int mode = CUDNN_HEUR_MODE_A;
    node configuration[CONFIGURATIONS];
    int64_t count = 0, one;
    struct attribute operations[ATTRIBUTES] = {part(CUDNN_ATTR_OPERATIONGRAPH_OPS, p->operation)};
    operations[0].count = p->operations;
    const node graph =
        make(p, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, "the graph of attention", operations);
    const struct attribute properties[ATTRIBUTES] = {
        {CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
         device ? (int64_t)strlen(device) : 0, device},
        {CUDNN_ATTR_DEVICEPROP_HANDLE, CUDNN_TYPE_HANDLE, !device, &cudnn.handle}};
    const node on =
        make(p, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, "the device's properties", properties);
    const struct attribute question[ATTRIBUTES] = {
        part(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &graph),
        {CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode},
        part(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, &on)};
    const node ask =
        make(p, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, "a kernel for attention", question);
    for (int i = 0; i < CONFIGURATIONS; i++)
        configuration[i] = make(p, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, NULL, NULL);
    if (*cudnn_why) return;
    succeeded(cudnn.BackendGetAttribute(ask, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                        CUDNN_TYPE_BACKEND_DESCRIPTOR, CONFIGURATIONS, &count,
                                        configuration),
              "kernels for attention");
    if (!*cudnn_why && count == 0)
        cudnn_say_why("cuDNN has no kernel for attention of this shape here");
    for (int64_t i = 0; i < count && !p->plan; i++) {
        const struct attribute plan[ATTRIBUTES] = {
            part(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &configuration[i]),
            part(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, &on)};
        *cudnn_why = '\0'; /* what the one before said */
        p->plan = make(p, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, "a plan for attention", plan);
    }
    if (p->plan)
        succeeded(cudnn.BackendGetAttribute(p->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                            CUDNN_TYPE_INT64, 1, &one, &p->workspace),
                  "a plan's workspace");
}

size_t cudnn_attention_plan(int B, int T, int H, int K, int D, const char *device) {
    cudnn_attention_release();
    *cudnn_why = '\0';
    if (!cudnn_attention_open()) return 0;
    if (cudnn_attention_bytes(B, T, H, K, D) == 0)
        return (size_t)cudnn_say_why("head size %d: expected a multiple of 8 up to 128", D);
    if (!device && !cudnn.handle) succeeded(cudnn.Create(&cudnn.handle), "opening the device");
    attention.B = B, attention.T = T, attention.H = H, attention.K = K, attention.D = D;
    attention.delta = (attention.B * H * T * 4 + 255) / 256 * 256;
    attention.scale = 1 / sqrtf((float)D), attention.masked = -INFINITY, attention.one = 1;
    describe_forward(&attention.plan[0]);
    choose(&attention.plan[0], device);
    describe_backward(&attention.plan[1]);
    choose(&attention.plan[1], device);
    const int64_t forward = attention.plan[0].workspace;
    const int64_t backward = attention.delta + attention.plan[1].workspace;
    return *cudnn_why ? 0 : (size_t)(forward > backward ? forward : backward);
}

void cudnn_attention_release(void) {
    for (struct plan *p = attention.plan; p < attention.plan + 2; p++)
        while (p->count > 0) cudnn.BackendDestroyDescriptor(p->made[--p->count]);
    memset(&attention, 0, sizeof attention);
}

/* Addresses of the three parts of rows of qkv. */
static void place(const void **at, const void *qkv) {
    const int64_t heads[] = {0, attention.H, attention.H + attention.K};
    for (int i = 0; i < 3; i++) at[i] = (const char *)qkv + heads[i] * attention.D * 2;
}

void cudnn_attention_run(const void *qkv, const void *out, const void *log_sum_exp,
                         const void *dout, const void *dqkv, void *workspace, void *stream) {
    struct plan *p = &attention.plan[dqkv ? 1 : 0];
    const void *at[NAMES] = {NULL}, *pointers[NAMES], *own = workspace;
    int64_t ids[NAMES], count = 0;
    const int before = p->count;
    place(&at[Q], qkv);
    at[OUT] = out, at[LOG_SUM_EXP] = log_sum_exp;
    at[SCALE] = &attention.scale, at[MASKED] = &attention.masked;
    if (dqkv) {
        place(&at[DQ], dqkv);
        at[DOUT] = dout, at[ONE] = &attention.one, at[DELTA] = workspace;
        own = (char *)workspace + attention.delta;
    }
    for (int name = VIRTUAL + 1; name < NAMES; name++)
        if (at[name]) ids[count] = name, pointers[count++] = at[name];
    const struct attribute list[ATTRIBUTES] = {
        {CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, ids},
        {CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, pointers},
        {CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &own}};
    node pack = make(p, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, "the addresses", list);
    if (pack && succeeded(cudnn.SetStream(cudnn.handle, stream), "the stream"))
        succeeded(cudnn.BackendExecute(cudnn.handle, p->plan, pack), "attention");
    if (p->count > before) cudnn.BackendDestroyDescriptor(p->made[--p->count]);
}
