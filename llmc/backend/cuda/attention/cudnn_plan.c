/* cudnn_plan.c — see cudnn_plan.h. The graphs' shapes and order of operations are those for which
 * cuDNN's developer guide ("Fused Flash Attention fprop", "bprop") promises kernels. */
#include "llmc/backend/cuda/attention/cudnn_plan.h"
#include "llmc/backend/cuda/attention/cudnn_api.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the library ------------------------------------------------------------------------ */

#define TYPE(name, result, parameters) typedef result cudnn_##name parameters;
CUDNN_FUNCTIONS(TYPE)
#define MEMBER(name, result, parameters) cudnn_##name *(name);
static struct {
    CUDNN_FUNCTIONS(MEMBER)
    cudnn_handle handle; /* created with the first plan that can run, for its device */
} cudnn;

#define FIND(name, result, parameters)                                                             \
    *(void **)&cudnn.name = dlsym(library, "cudnn" #name);                                         \
    if (!cudnn.name) {                                                                             \
        snprintf(why, why_size, "libcudnn.so.9 has no cudnn%s", #name);                            \
        return 0;                                                                                  \
    }

int cudnn_attention_open(char *why, size_t why_size) {
    static int version;
    if (version) return version;
    void *library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(why, why_size, "cuDNN is not installed (%s)", dlerror());
        return 0;
    }
    CUDNN_FUNCTIONS(FIND)
    const int found = (int)cudnn.GetVersion();
    if (found < CUDNN_ATTENTION_OLDEST) {
        snprintf(why, why_size, "cuDNN is %d.%d.%d, expected %d.%d or newer", found / 10000,
                 found / 100 % 100, found % 100, CUDNN_ATTENTION_OLDEST / 10000,
                 CUDNN_ATTENTION_OLDEST / 100 % 100);
        return 0;
    }
    return version = found;
}

/* ---- descriptors ------------------------------------------------------------------------ */

enum { DESCRIPTORS = 128, OPERATIONS = 32, CONFIGURATIONS = 8 };

/* A graph that is being built. After the first failure, all calls do nothing. */
struct builder {
    int B, T, H, K, D;
    cudnn_descriptor made[DESCRIPTORS]; /* all of them, to destroy */
    int count;
    cudnn_descriptor operation[OPERATIONS];
    int operations;
    char *why;
    size_t why_size;
    bool failed;
};

/* Returns false, with cuDNN's message in `why`, if status is an error. */
static bool succeeded(int status, const char *what, char *why, size_t why_size) {
    char said[256] = "";
    if (status == CUDNN_STATUS_SUCCESS) return true;
    cudnn.GetLastErrorString(said, sizeof said);
    said[strcspn(said, "\n")] = '\0';
    snprintf(why, why_size, "cuDNN: %s: %s%s%s", what, cudnn.GetErrorString(status),
             *said ? ": " : "", said);
    return false;
}

static bool check(struct builder *b, int status, const char *what) {
    if (!b->failed) b->failed = !succeeded(status, what, b->why, b->why_size);
    return !b->failed;
}

static cudnn_descriptor create(struct builder *b, int type) {
    cudnn_descriptor d = NULL;
    if (b->failed) return NULL;
    if (b->count == DESCRIPTORS) {
        snprintf(b->why, b->why_size, "attention has more than %d descriptors", DESCRIPTORS);
        b->failed = true;
        return NULL;
    }
    if (check(b, cudnn.BackendCreateDescriptor(type, &d), "a descriptor")) b->made[b->count++] = d;
    return d;
}

static void set(struct builder *b, cudnn_descriptor d, int name, int type, int64_t count,
                const void *elements) {
    char what[32];
    if (b->failed) return;
    snprintf(what, sizeof what, "attribute %d", name);
    check(b, cudnn.BackendSetAttribute(d, name, type, count, elements), what);
}

static void set_int64(struct builder *b, cudnn_descriptor d, int name, int64_t value) {
    set(b, d, name, CUDNN_TYPE_INT64, 1, &value);
}

static void set_bool(struct builder *b, cudnn_descriptor d, int name, bool value) {
    set(b, d, name, CUDNN_TYPE_BOOLEAN, 1, &value);
}

static void set_descriptor(struct builder *b, cudnn_descriptor d, int name,
                           cudnn_descriptor value) {
    set(b, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

static bool finalize(struct builder *b, cudnn_descriptor d, const char *what) {
    return !b->failed && check(b, cudnn.BackendFinalize(d), what);
}

/* ---- tensors of four dimensions ---------------------------------------------------------- */

/* Numbers of the tensors that the caller has. All others are virtual, that is, in no memory.
 * Tensors from SCALE on are passed by value. */
enum {
    VIRTUAL,
    Q,
    KEYS,
    V,
    OUT,
    LOG_SUM_EXP,
    DOUT,
    DQ,
    DKEYS,
    DV,
    DELTA,
    SCALE,
    MASKED,
    ONE,
    NAMES
};

static cudnn_descriptor tensor_of(struct builder *b, int name, int type, const int64_t *dims,
                                  const int64_t *strides) {
    cudnn_descriptor d = create(b, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    set(b, d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    set(b, d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dims);
    set(b, d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, strides);
    set_int64(b, d, CUDNN_ATTR_TENSOR_UNIQUE_ID, name != VIRTUAL ? name : NAMES + b->count);
    set_int64(b, d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, 16);
    set_bool(b, d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, name == VIRTUAL);
    set_bool(b, d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, name >= SCALE);
    finalize(b, d, "a tensor");
    return d;
}

/* (B, H, T, T), dense; transposed: stored column by column */
static cudnn_descriptor square(struct builder *b, int type, bool transposed) {
    const int64_t T = b->T, dims[] = {b->B, b->H, T, T};
    const int64_t strides[] = {b->H * T * T, T * T, transposed ? 1 : T, transposed ? T : 1};
    return tensor_of(b, VIRTUAL, type, dims, strides);
}

/* (B, H, T, 1), dense */
static cudnn_descriptor column(struct builder *b, int name) {
    const int64_t T = b->T, dims[] = {b->B, b->H, T, 1}, strides[] = {b->H * T, T, 1, 1};
    return tensor_of(b, name, CUDNN_DATA_FLOAT, dims, strides);
}

static cudnn_descriptor scalar(struct builder *b, int name) {
    const int64_t one[] = {1, 1, 1, 1};
    return tensor_of(b, name, CUDNN_DATA_FLOAT, one, one);
}

/* (B, heads, T, D) of rows of `row` elements; transposed: (B, heads, D, T) of the same memory */
static cudnn_descriptor heads(struct builder *b, int name, int heads, int64_t row,
                              bool transposed) {
    const int64_t T = b->T, D = b->D;
    const int64_t dims[] = {b->B, heads, transposed ? D : T, transposed ? T : D};
    const int64_t strides[] = {T * row, D, transposed ? 1 : row, transposed ? row : 1};
    return tensor_of(b, name, CUDNN_DATA_BFLOAT16, dims, strides);
}

/* (B, H, T, D) of all query heads, dense, virtual */
static cudnn_descriptor every_head(struct builder *b, int type) {
    const int64_t T = b->T, D = b->D, dims[] = {b->B, b->H, T, D};
    const int64_t strides[] = {b->H * T * D, T * D, D, 1};
    return tensor_of(b, VIRTUAL, type, dims, strides);
}

/* ---- operations; each returns its result ------------------------------------------------- */

static cudnn_descriptor operation(struct builder *b, cudnn_descriptor d, cudnn_descriptor result) {
    if (finalize(b, d, "an operation")) b->operation[b->operations++] = d;
    return result;
}

/* y = mode(x, other), or with `where`: where ? x : other. axis: for GEN_INDEX, else -1 */
static cudnn_descriptor pointwise(struct builder *b, int mode, int axis, cudnn_descriptor x,
                                  cudnn_descriptor other, cudnn_descriptor where,
                                  cudnn_descriptor y) {
    const int precision = mode == CUDNN_POINTWISE_CMP_GE ? CUDNN_DATA_BOOLEAN : CUDNN_DATA_FLOAT;
    cudnn_descriptor how = create(b, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    set(b, how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    set(b, how, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &precision);
    if (axis >= 0) set_int64(b, how, CUDNN_ATTR_POINTWISE_AXIS, axis);
    finalize(b, how, "a pointwise operation");
    cudnn_descriptor d = create(b, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    set_descriptor(b, d, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
    set_descriptor(b, d, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    if (other) set_descriptor(b, d, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, other);
    if (where) set_descriptor(b, d, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, where);
    set_descriptor(b, d, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    return operation(b, d, y);
}

/* A virtual float32 square = mode(x, other). */
static cudnn_descriptor each(struct builder *b, int mode, cudnn_descriptor x,
                             cudnn_descriptor other) {
    return pointwise(b, mode, -1, x, other, NULL, square(b, CUDNN_DATA_FLOAT, false));
}

/* y = x, reduced along the dimensions in which y is smaller. */
static cudnn_descriptor reduce(struct builder *b, int mode, cudnn_descriptor x,
                               cudnn_descriptor y) {
    const int precision = CUDNN_DATA_FLOAT;
    cudnn_descriptor how = create(b, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    set(b, how, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &mode);
    set(b, how, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &precision);
    finalize(b, how, "a reduction");
    cudnn_descriptor d = create(b, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    set_descriptor(b, d, CUDNN_ATTR_OPERATION_REDUCTION_DESC, how);
    set_descriptor(b, d, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set_descriptor(b, d, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    return operation(b, d, y);
}

static cudnn_descriptor multiply(struct builder *b, cudnn_descriptor x, cudnn_descriptor y,
                                 cudnn_descriptor product) {
    const int precision = CUDNN_DATA_FLOAT;
    cudnn_descriptor how = create(b, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    set(b, how, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &precision);
    finalize(b, how, "a product");
    cudnn_descriptor d = create(b, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    set_descriptor(b, d, CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
    set_descriptor(b, d, CUDNN_ATTR_OPERATION_MATMUL_ADESC, x);
    set_descriptor(b, d, CUDNN_ATTR_OPERATION_MATMUL_BDESC, y);
    set_descriptor(b, d, CUDNN_ATTR_OPERATION_MATMUL_CDESC, product);
    return operation(b, d, product);
}

/* y is x, transposed. */
static cudnn_descriptor reshape(struct builder *b, cudnn_descriptor x, cudnn_descriptor y) {
    cudnn_descriptor d = create(b, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    set_descriptor(b, d, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    set_descriptor(b, d, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    return operation(b, d, y);
}

/* ---- the two graphs ----------------------------------------------------------------------- */

/* Logits of keys that come after the query become -infinity. */
static cudnn_descriptor causal(struct builder *b, cudnn_descriptor logits) {
    cudnn_descriptor query = pointwise(b, CUDNN_POINTWISE_GEN_INDEX, 2, logits, NULL, NULL,
                                       square(b, CUDNN_DATA_INT32, false));
    cudnn_descriptor key = pointwise(b, CUDNN_POINTWISE_GEN_INDEX, 3, logits, NULL, NULL,
                                     square(b, CUDNN_DATA_INT32, false));
    cudnn_descriptor seen = pointwise(b, CUDNN_POINTWISE_CMP_GE, -1, query, key, NULL,
                                      square(b, CUDNN_DATA_BOOLEAN, false));
    return pointwise(b, CUDNN_POINTWISE_BINARY_SELECT, -1, logits, scalar(b, MASKED), seen,
                     square(b, CUDNN_DATA_FLOAT, false));
}

static void describe_forward(struct builder *b) {
    const int64_t in = (int64_t)(b->H + 2 * b->K) * b->D, of_out = (int64_t)b->H * b->D;
    cudnn_descriptor q = heads(b, Q, b->H, in, false), k = heads(b, KEYS, b->K, in, true);
    cudnn_descriptor s = multiply(b, q, k, square(b, CUDNN_DATA_FLOAT, false));
    s = causal(b, each(b, CUDNN_POINTWISE_MUL, s, scalar(b, SCALE)));
    cudnn_descriptor largest = reduce(b, CUDNN_REDUCE_TENSOR_MAX, s, column(b, VIRTUAL));
    s = each(b, CUDNN_POINTWISE_EXP, each(b, CUDNN_POINTWISE_SUB, s, largest), NULL);
    cudnn_descriptor sum = reduce(b, CUDNN_REDUCE_TENSOR_ADD, s, column(b, VIRTUAL));
    cudnn_descriptor log =
        pointwise(b, CUDNN_POINTWISE_LOG, -1, sum, NULL, NULL, column(b, VIRTUAL));
    pointwise(b, CUDNN_POINTWISE_ADD, -1, largest, log, NULL, column(b, LOG_SUM_EXP));
    cudnn_descriptor p =
        pointwise(b, CUDNN_POINTWISE_DIV, -1, s, sum, NULL, square(b, CUDNN_DATA_BFLOAT16, false));
    multiply(b, p, heads(b, V, b->K, in, false), heads(b, OUT, b->H, of_out, false));
}

/* result = x y, summed over each group's query heads if there are fewer key heads. */
static void multiply_for_group(struct builder *b, cudnn_descriptor x, cudnn_descriptor y,
                               cudnn_descriptor result) {
    if (b->H == b->K) {
        multiply(b, x, y, result);
        return;
    }
    reduce(b, CUDNN_REDUCE_TENSOR_ADD, multiply(b, x, y, every_head(b, CUDNN_DATA_BFLOAT16)),
           result);
}

static void describe_backward(struct builder *b) {
    const int64_t in = (int64_t)(b->H + 2 * b->K) * b->D, of_out = (int64_t)b->H * b->D;
    cudnn_descriptor q = heads(b, Q, b->H, in, false), k = heads(b, KEYS, b->K, in, true);
    cudnn_descriptor dout = heads(b, DOUT, b->H, of_out, false), scale = scalar(b, SCALE);
    /* delta = rowsum(dO * O); cuDNN's pattern multiplies it, here by one */
    cudnn_descriptor delta =
        pointwise(b, CUDNN_POINTWISE_MUL, -1, dout, heads(b, OUT, b->H, of_out, false), NULL,
                  every_head(b, CUDNN_DATA_FLOAT));
    delta = reduce(b, CUDNN_REDUCE_TENSOR_ADD, delta, column(b, VIRTUAL));
    delta = pointwise(b, CUDNN_POINTWISE_MUL, -1, delta, scalar(b, ONE), NULL, column(b, DELTA));
    /* P = exp(S - log_sum_exp), dV = P^T dO */
    cudnn_descriptor s = multiply(b, q, k, square(b, CUDNN_DATA_FLOAT, false));
    s = each(b, CUDNN_POINTWISE_MUL, s, scale);
    s = causal(b, each(b, CUDNN_POINTWISE_SUB, s, column(b, LOG_SUM_EXP)));
    cudnn_descriptor p = each(b, CUDNN_POINTWISE_EXP, s, NULL);
    multiply_for_group(b, reshape(b, p, square(b, CUDNN_DATA_BFLOAT16, true)), dout,
                       heads(b, DV, b->K, in, false));
    /* dS = P * (dO V^T - delta) * scale, dK = dS^T Q, dQ = dS K */
    cudnn_descriptor ds =
        multiply(b, dout, heads(b, V, b->K, in, true), square(b, CUDNN_DATA_FLOAT, false));
    ds = each(b, CUDNN_POINTWISE_MUL, each(b, CUDNN_POINTWISE_SUB, ds, delta), p);
    ds = pointwise(b, CUDNN_POINTWISE_MUL, -1, ds, scale, NULL,
                   square(b, CUDNN_DATA_BFLOAT16, false));
    multiply_for_group(b, reshape(b, ds, square(b, CUDNN_DATA_BFLOAT16, true)), q,
                       heads(b, DKEYS, b->K, in, false));
    multiply(b, ds, reshape(b, k, heads(b, VIRTUAL, b->K, in, false)),
             heads(b, DQ, b->H, in, false));
}

/* ---- plans -------------------------------------------------------------------------------- */

struct plan {
    struct builder graph;
    cudnn_descriptor plan;
    int64_t workspace;
};

struct cudnn_attention {
    struct plan forward, backward;
    float scale, masked, one; /* by value */
};

/* A device's properties: those in JSON, or, if `device` is NULL, those of cuDNN's handle. */
static cudnn_descriptor properties(struct builder *b, const char *device) {
    cudnn_descriptor d = create(b, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
    if (device)
        set(b, d, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
            (int64_t)strlen(device), device);
    else
        set(b, d, CUDNN_ATTR_DEVICEPROP_HANDLE, CUDNN_TYPE_HANDLE, 1, &cudnn.handle);
    finalize(b, d, "the device's properties");
    return d;
}

/* Takes the first of cuDNN's configurations that has a plan. cuDNN puts the one that it estimates
 * to be fastest first. */
static void choose(struct plan *p, cudnn_descriptor graph, cudnn_descriptor device) {
    struct builder *b = &p->graph;
    const int mode = CUDNN_HEUR_MODE_A;
    cudnn_descriptor ask = create(b, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    cudnn_descriptor configuration[CONFIGURATIONS];
    int64_t count = 0, one;
    set_descriptor(b, ask, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    set(b, ask, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    set_descriptor(b, ask, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, device);
    finalize(b, ask, "a kernel for attention");
    for (int i = 0; i < CONFIGURATIONS; i++)
        configuration[i] = create(b, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    if (b->failed) return;
    check(b,
          cudnn.BackendGetAttribute(ask, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                    CUDNN_TYPE_BACKEND_DESCRIPTOR, CONFIGURATIONS, &count,
                                    configuration),
          "kernels for attention");
    if (!b->failed && count == 0) {
        snprintf(b->why, b->why_size, "cuDNN has no kernel for attention of this shape here");
        b->failed = true;
    }
    for (int64_t i = 0; i < count && !p->plan; i++) {
        cudnn_descriptor plan = create(b, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        set_descriptor(b, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration[i]);
        set_descriptor(b, plan, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, device);
        if (finalize(b, plan, "a plan for attention")) p->plan = plan;
        if (i < count - 1) b->failed = false; /* the next may work */
    }
    if (!p->plan || b->failed) return;
    check(b,
          cudnn.BackendGetAttribute(p->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                    CUDNN_TYPE_INT64, 1, &one, &p->workspace),
          "a plan's workspace");
}

static bool make_plan(struct plan *p, void (*describe)(struct builder *b), const char *device) {
    struct builder *b = &p->graph;
    describe(b);
    cudnn_descriptor graph = create(b, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    set(b, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, b->operations,
        b->operation);
    finalize(b, graph, "the graph of attention");
    choose(p, graph, properties(b, device));
    return !b->failed;
}

struct cudnn_attention *cudnn_attention_plan(int B, int T, int H, int K, int D, const char *device,
                                             char *why, size_t why_size) {
    if (!cudnn_attention_open(why, why_size)) return NULL;
    if (!cudnn_attention_takes(D)) {
        snprintf(why, why_size, "head size %d: expected a multiple of 8 up to 128", D);
        return NULL;
    }
    if (!device && !cudnn.handle &&
        !succeeded(cudnn.Create(&cudnn.handle), "opening the device", why, why_size))
        return NULL;
    struct cudnn_attention *a = calloc(1, sizeof *a);
    if (!a) {
        snprintf(why, why_size, "out of memory");
        return NULL;
    }
    a->scale = 1 / sqrtf((float)D), a->masked = -INFINITY, a->one = 1;
    const struct builder empty = {B, T, H, K, D, {0}, 0, {0}, 0, why, why_size, false};
    a->forward.graph = a->backward.graph = empty;
    if (make_plan(&a->forward, describe_forward, device) &&
        make_plan(&a->backward, describe_backward, device))
        return a;
    cudnn_attention_release(a);
    return NULL;
}

static void release_plan(struct plan *p) {
    for (int i = p->graph.count - 1; i >= 0; i--) cudnn.BackendDestroyDescriptor(p->graph.made[i]);
}

void cudnn_attention_release(struct cudnn_attention *a) {
    if (!a) return;
    release_plan(&a->backward);
    release_plan(&a->forward);
    free(a);
}

/* The plan's own workspace begins after these bytes, which are a multiple of 256. */
static size_t delta_bytes(const struct cudnn_attention *a) {
    const struct builder *b = &a->backward.graph;
    return ((size_t)b->B * (size_t)b->H * (size_t)b->T * sizeof(float) + 255) / 256 * 256;
}

size_t cudnn_attention_workspace(const struct cudnn_attention *a) {
    const size_t backward = delta_bytes(a) + (size_t)a->backward.workspace;
    const size_t forward = (size_t)a->forward.workspace;
    return forward > backward ? forward : backward;
}

/* at[name]: a tensor's address, NULL if the graph has no such tensor */
static bool execute(struct plan *p, const void *const *at, const void *workspace, void *stream,
                    char *why, size_t why_size) {
    struct builder b = p->graph; /* a copy, which does not own the plan's descriptors */
    const int before = b.count;
    int64_t ids[NAMES];
    const void *pointers[NAMES];
    int64_t count = 0;
    b.why = why, b.why_size = why_size, b.failed = false;
    for (int name = VIRTUAL + 1; name < NAMES; name++)
        if (at[name]) ids[count] = name, pointers[count++] = at[name];
    cudnn_descriptor pack = create(&b, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    set(&b, pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, ids);
    set(&b, pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, pointers);
    set(&b, pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    finalize(&b, pack, "the addresses");
    if (!b.failed) check(&b, cudnn.SetStream(cudnn.handle, stream), "the stream");
    if (!b.failed) check(&b, cudnn.BackendExecute(cudnn.handle, p->plan, pack), "attention");
    if (b.count > before) cudnn.BackendDestroyDescriptor(pack);
    return !b.failed;
}

/* Where the part of a row of qkv begins that comes after `heads_before` heads. */
static const void *part(const struct cudnn_attention *a, const void *qkv, int heads_before) {
    return (const char *)qkv + (size_t)heads_before * (size_t)a->forward.graph.D * 2;
}

static void place_inputs(const struct cudnn_attention *a, const void **at, const void *qkv) {
    const int H = a->forward.graph.H, K = a->forward.graph.K;
    at[Q] = qkv, at[KEYS] = part(a, qkv, H), at[V] = part(a, qkv, H + K);
    at[SCALE] = &a->scale, at[MASKED] = &a->masked;
}

bool cudnn_attention_forward(struct cudnn_attention *a, void *out, float *log_sum_exp,
                             const void *qkv, void *workspace, void *stream, char *why,
                             size_t why_size) {
    const void *at[NAMES] = {NULL};
    place_inputs(a, at, qkv);
    at[OUT] = out, at[LOG_SUM_EXP] = log_sum_exp;
    return execute(&a->forward, at, workspace, stream, why, why_size);
}

bool cudnn_attention_backward(struct cudnn_attention *a, void *dqkv, const void *dout,
                              const void *out, const void *qkv, const float *log_sum_exp,
                              void *workspace, void *stream, char *why, size_t why_size) {
    const int H = a->forward.graph.H, K = a->forward.graph.K;
    const void *at[NAMES] = {NULL};
    place_inputs(a, at, qkv);
    at[OUT] = out, at[DOUT] = dout, at[LOG_SUM_EXP] = log_sum_exp, at[ONE] = &a->one;
    at[DELTA] = workspace;
    at[DQ] = dqkv, at[DKEYS] = part(a, dqkv, H), at[DV] = part(a, dqkv, H + K);
    return execute(&a->backward, at, (char *)workspace + delta_bytes(a), stream, why, why_size);
}
