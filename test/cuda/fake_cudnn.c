/* fake_cudnn.c — a libcudnn.so.9 that computes on the CPU, for test_attention_choice.py. It
 * executes the operations of a graph one after the other, as cuDNN's developer guide defines them,
 * in float32 and rounded to each tensor's type. So it shows whether our graphs compute attention.
 *
 *     FAKE_CUDNN=KIND       old     a version that is too old
 *                           newer   another version
 *                           none    no kernel for any graph
 *                           fails   runs nothing
 *                           wrong   also uses keys that come after a query
 *                           row     leaves out the last row of the last head
 *                           random  gives other bits in every run
 *     FAKE_CUDNN_RANK=N     only on Open MPI's rank N
 */
#include "llmc/backend/cuda/attention/cudnn_api.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ATTRIBUTES = 16, MOST = 64, REFUSED = 3000, FAILED = 5000 };

struct attribute {
    int name;
    int64_t count;
    void *elements;
};

struct descriptor {
    int type;
    bool final;
    struct attribute attribute[ATTRIBUTES];
    int attributes;
    const struct descriptor *graph; /* of a configuration: what it computes */
    float *value;                   /* of a tensor, dense, while a graph runs */
};

static bool is(const char *kind) {
    const char *wanted = getenv("FAKE_CUDNN"), *only = getenv("FAKE_CUDNN_RANK");
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    return wanted && !strcmp(wanted, kind) && (!only || (rank && !strcmp(rank, only)));
}

static void expect(bool condition, const char *what) {
    if (condition) return;
    fprintf(stderr, "fake cuDNN: expected %s\n", what);
    abort();
}

/* ---- attributes -------------------------------------------------------------------------- */

static const void *attribute_of(const struct descriptor *d, int name, int64_t *count) {
    for (int i = 0; i < d->attributes; i++) {
        if (d->attribute[i].name != name) continue;
        if (count) *count = d->attribute[i].count;
        return d->attribute[i].elements;
    }
    return NULL;
}

static int int_of(const struct descriptor *d, int name) {
    const int *value = attribute_of(d, name, NULL);
    expect(value, "an attribute that was set");
    return *value;
}

static int64_t int64_of(const struct descriptor *d, int name) {
    const int64_t *value = attribute_of(d, name, NULL);
    expect(value, "an attribute that was set");
    return *value;
}

static struct descriptor *part_of(const struct descriptor *d, int name) {
    struct descriptor *const *value = attribute_of(d, name, NULL);
    return value ? *value : NULL;
}

static size_t bytes_of(int type) {
    switch (type) {
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR:
        return 1;
    case CUDNN_TYPE_DATA_TYPE:
    case CUDNN_TYPE_HEUR_MODE:
    case CUDNN_TYPE_POINTWISE_MODE:
    case CUDNN_TYPE_REDUCTION_OPERATOR_TYPE:
        return sizeof(int);
    default:
        return 8;
    }
}

/* ---- tensors ------------------------------------------------------------------------------ */

static const int64_t *dims_of(const struct descriptor *t) {
    return attribute_of(t, CUDNN_ATTR_TENSOR_DIMENSIONS, NULL);
}

static size_t count_of(const struct descriptor *t) {
    const int64_t *d = dims_of(t);
    return (size_t)(d[0] * d[1] * d[2] * d[3]);
}

static bool flag_of(const struct descriptor *t, int name) {
    const bool *value = attribute_of(t, name, NULL);
    return value && *value;
}

static float rounded(float x, int type) {
    uint32_t bits;
    if (type != CUDNN_DATA_BFLOAT16) return x;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    memcpy(&x, &bits, sizeof x);
    return x;
}

struct pack {
    const int64_t *ids;
    void *const *pointers;
    int64_t count;
};

static char *address_of(const struct descriptor *t, const struct pack *p) {
    for (int64_t i = 0; i < p->count; i++)
        if (p->ids[i] == int64_of(t, CUDNN_ATTR_TENSOR_UNIQUE_ID)) return p->pointers[i];
    expect(false, "an address of every tensor that is not virtual");
    return NULL;
}

/* For every element: its place in dense order, `at`, and in memory, `offset`. */
#define EACH_ELEMENT(t)                                                                            \
    const int64_t *d_ = dims_of(t), *s_ = attribute_of(t, CUDNN_ATTR_TENSOR_STRIDES, NULL);        \
    size_t at = 0;                                                                                 \
    for (int64_t a_ = 0; a_ < d_[0]; a_++)                                                         \
        for (int64_t b_ = 0; b_ < d_[1]; b_++)                                                     \
            for (int64_t c_ = 0; c_ < d_[2]; c_++)                                                 \
                for (int64_t e_ = 0, offset = a_ * s_[0] + b_ * s_[1] + c_ * s_[2]; e_ < d_[3];    \
                     e_++, offset += s_[3], at++)

static const float *read_tensor(struct descriptor *t, const struct pack *p) {
    if (t->value) return t->value;
    expect(!flag_of(t, CUDNN_ATTR_TENSOR_IS_VIRTUAL), "a virtual tensor that was written");
    const char *from = address_of(t, p);
    const bool half = int_of(t, CUDNN_ATTR_TENSOR_DATA_TYPE) == CUDNN_DATA_BFLOAT16;
    t->value = malloc(count_of(t) * sizeof(float));
    EACH_ELEMENT(t) {
        uint32_t bits = half ? (uint32_t)((const uint16_t *)from)[offset] << 16 : 0;
        if (half)
            memcpy(&t->value[at], &bits, sizeof bits);
        else
            t->value[at] = ((const float *)from)[offset];
    }
    return t->value;
}

static void write_tensor(struct descriptor *t, float *value, const struct pack *p) {
    static int calls; /* 4 of them are a forward and a backward */
    const int type = int_of(t, CUDNN_ATTR_TENSOR_DATA_TYPE);
    for (size_t i = 0; i < count_of(t); i++) value[i] = rounded(value[i], type);
    t->value = value;
    if (flag_of(t, CUDNN_ATTR_TENSOR_IS_VIRTUAL)) return;
    char *to = address_of(t, p);
    EACH_ELEMENT(t) {
        uint32_t bits;
        memcpy(&bits, &value[at], sizeof bits);
        if (type == CUDNN_DATA_BFLOAT16)
            ((uint16_t *)to)[offset] = (uint16_t)(bits >> 16);
        else
            ((float *)to)[offset] = value[at];
    }
    const int64_t last = (d_[0] - 1) * s_[0] + (d_[1] - 1) * s_[1] + (d_[2] - 1) * s_[2];
    if (type == CUDNN_DATA_BFLOAT16 && is("row"))
        for (int64_t e = 0; e < d_[3]; e++) ((uint16_t *)to)[last + e * s_[3]] = 0;
    if (type == CUDNN_DATA_BFLOAT16 && is("random")) ((uint16_t *)to)[0] ^= calls++ / 4 % 2;
}

/* The place in `small` of (a, b, c, e) of larger dimensions: of size 1, or a part of the heads. */
static size_t place_in(const int64_t *small, const int64_t *large, int64_t a, int64_t b, int64_t c,
                       int64_t e) {
    const int64_t i[] = {a, b, c, e};
    size_t at = 0;
    for (int k = 0; k < 4; k++) at = at * (size_t)small[k] + (size_t)(i[k] * small[k] / large[k]);
    return at;
}

#define EACH_PLACE(d)                                                                              \
    for (int64_t a = 0; a < (d)[0]; a++)                                                           \
        for (int64_t b = 0; b < (d)[1]; b++)                                                       \
            for (int64_t c = 0; c < (d)[2]; c++)                                                   \
                for (int64_t e = 0; e < (d)[3]; e++)

/* ---- operations --------------------------------------------------------------------------- */

static void run_pointwise(const struct descriptor *o, const struct pack *p) {
    const struct descriptor *how = part_of(o, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
    struct descriptor *x = part_of(o, CUDNN_ATTR_OPERATION_POINTWISE_XDESC);
    struct descriptor *other = part_of(o, CUDNN_ATTR_OPERATION_POINTWISE_BDESC);
    struct descriptor *where = part_of(o, CUDNN_ATTR_OPERATION_POINTWISE_TDESC);
    struct descriptor *y = part_of(o, CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
    const int mode = int_of(how, CUDNN_ATTR_POINTWISE_MODE);
    const int64_t *d = dims_of(y);
    const float *of_x = read_tensor(x, p), *of_other = other ? read_tensor(other, p) : NULL;
    const float *of_where = where ? read_tensor(where, p) : NULL;
    float *result = malloc(count_of(y) * sizeof *result);
    size_t at = 0;
    EACH_PLACE(d) {
        const float u = of_x[place_in(dims_of(x), d, a, b, c, e)];
        const float v = other ? of_other[place_in(dims_of(other), d, a, b, c, e)] : 0;
        float r = 0;
        switch (mode) {
        case CUDNN_POINTWISE_ADD:
            r = u + v;
            break;
        case CUDNN_POINTWISE_SUB:
            r = u - v;
            break;
        case CUDNN_POINTWISE_MUL:
            r = u * v;
            break;
        case CUDNN_POINTWISE_DIV:
            r = u / v;
            break;
        case CUDNN_POINTWISE_EXP:
            r = expf(u);
            break;
        case CUDNN_POINTWISE_LOG:
            r = logf(u);
            break;
        case CUDNN_POINTWISE_CMP_GE:
            r = u >= v;
            break;
        case CUDNN_POINTWISE_BINARY_SELECT:
            r = of_where[at] || is("wrong") ? u : v;
            break;
        case CUDNN_POINTWISE_GEN_INDEX:
            r = (float)(int64_of(how, CUDNN_ATTR_POINTWISE_AXIS) == 2 ? c : e);
            break;
        default:
            expect(false, "a pointwise mode of attention");
        }
        result[at++] = r;
    }
    write_tensor(y, result, p);
}

static void run_reduction(const struct descriptor *o, const struct pack *p) {
    const struct descriptor *how = part_of(o, CUDNN_ATTR_OPERATION_REDUCTION_DESC);
    struct descriptor *x = part_of(o, CUDNN_ATTR_OPERATION_REDUCTION_XDESC);
    struct descriptor *y = part_of(o, CUDNN_ATTR_OPERATION_REDUCTION_YDESC);
    const bool largest = int_of(how, CUDNN_ATTR_REDUCTION_OPERATOR) == CUDNN_REDUCE_TENSOR_MAX;
    const float *of_x = read_tensor(x, p);
    float *result = malloc(count_of(y) * sizeof *result);
    size_t at = 0;
    for (size_t i = 0; i < count_of(y); i++) result[i] = largest ? -INFINITY : 0;
    EACH_PLACE(dims_of(x)) {
        float *r = &result[place_in(dims_of(y), dims_of(x), a, b, c, e)];
        const float u = of_x[at++];
        *r = largest ? fmaxf(*r, u) : *r + u;
    }
    write_tensor(y, result, p);
}

static void run_product(const struct descriptor *o, const struct pack *p) {
    struct descriptor *x = part_of(o, CUDNN_ATTR_OPERATION_MATMUL_ADESC);
    struct descriptor *y = part_of(o, CUDNN_ATTR_OPERATION_MATMUL_BDESC);
    struct descriptor *z = part_of(o, CUDNN_ATTR_OPERATION_MATMUL_CDESC);
    const int64_t *dx = dims_of(x), *dy = dims_of(y), *dz = dims_of(z), inner = dx[3];
    const float *of_x = read_tensor(x, p), *of_y = read_tensor(y, p);
    expect(inner == dy[2] && dx[2] == dz[2] && dy[3] == dz[3], "matrices that fit");
    float *result = malloc(count_of(z) * sizeof *result);
    size_t at = 0;
    EACH_PLACE(dz) {
        float sum = 0;
        for (int64_t k = 0; k < inner; k++) {
            const size_t row = (size_t)((a * dx[1] + b * dx[1] / dz[1]) * dx[2] + c);
            const size_t line = (size_t)((a * dy[1] + b * dy[1] / dz[1]) * inner + k);
            sum += of_x[row * (size_t)inner + (size_t)k] * of_y[line * (size_t)dy[3] + (size_t)e];
        }
        result[at++] = sum;
    }
    write_tensor(z, result, p);
}

/* The same memory in another order of its last two dimensions. */
static void run_reshape(const struct descriptor *o, const struct pack *p) {
    struct descriptor *x = part_of(o, CUDNN_ATTR_OPERATION_RESHAPE_XDESC);
    struct descriptor *y = part_of(o, CUDNN_ATTR_OPERATION_RESHAPE_YDESC);
    const int64_t *sx = attribute_of(x, CUDNN_ATTR_TENSOR_STRIDES, NULL);
    const int64_t *sy = attribute_of(y, CUDNN_ATTR_TENSOR_STRIDES, NULL), *dx = dims_of(x);
    expect(sx[2] == sy[3] && sx[3] == sy[2] && sx[1] == sy[1], "a transposed tensor");
    const float *of_x = read_tensor(x, p);
    float *result = malloc(count_of(y) * sizeof *result);
    size_t at = 0;
    EACH_PLACE(dims_of(y)) result[at++] = of_x[((a * dx[1] + b) * dx[2] + e) * dx[3] + c];
    write_tensor(y, result, p);
}

static void forget(const struct descriptor *o) {
    for (int i = 0; i < o->attributes; i++) {
        struct descriptor *t = *(struct descriptor **)o->attribute[i].elements;
        if (t->type != CUDNN_BACKEND_TENSOR_DESCRIPTOR) continue;
        free(t->value);
        t->value = NULL;
    }
}

/* ---- the API ------------------------------------------------------------------------------ */

size_t cudnnGetVersion(void) {
    return is("old") ? 90100 : is("newer") ? 92000 : 91900;
}

const char *cudnnGetErrorString(int status) {
    return status == REFUSED ? "CUDNN_STATUS_NOT_SUPPORTED" : "CUDNN_STATUS_EXECUTION_FAILED";
}

#ifndef FAKE_CUDNN_INCOMPLETE
void cudnnGetLastErrorString(char *message, size_t size) {
    snprintf(message, size, "fake");
}
#endif

int cudnnCreate(cudnn_handle *handle) {
    static int one;
    *handle = &one;
    return CUDNN_STATUS_SUCCESS;
}

int cudnnSetStream(cudnn_handle handle, void *stream) {
    expect(handle && stream, "a stream");
    return CUDNN_STATUS_SUCCESS;
}

int cudnnBackendCreateDescriptor(int type, cudnn_descriptor *out) {
    struct descriptor *d = calloc(1, sizeof *d);
    d->type = type;
    *out = d;
    return CUDNN_STATUS_SUCCESS;
}

int cudnnBackendDestroyDescriptor(cudnn_descriptor which) {
    struct descriptor *d = which;
    for (int i = 0; i < d->attributes; i++) free(d->attribute[i].elements);
    free(d);
    return CUDNN_STATUS_SUCCESS;
}

int cudnnBackendSetAttribute(cudnn_descriptor which, int name, int type, int64_t count,
                             const void *elements) {
    struct descriptor *d = which;
    expect(!d->final && d->attributes < ATTRIBUTES, "a descriptor that is being made");
    if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR)
        for (int64_t i = 0; i < count; i++)
            expect(((struct descriptor *const *)elements)[i]->final, "a finished descriptor");
    struct attribute *a = &d->attribute[d->attributes++];
    a->name = name, a->count = count, a->elements = malloc((size_t)count * bytes_of(type));
    memcpy(a->elements, elements, (size_t)count * bytes_of(type));
    return CUDNN_STATUS_SUCCESS;
}

int cudnnBackendFinalize(cudnn_descriptor which) {
    struct descriptor *d = which;
    if (d->type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR && is("none")) return REFUSED;
    d->final = true;
    return CUDNN_STATUS_SUCCESS;
}

int cudnnBackendGetAttribute(cudnn_descriptor which, int name, int type, int64_t wanted,
                             int64_t *count, void *elements) {
    const struct descriptor *d = which;
    expect(d->final && wanted > 0, "a finished descriptor");
    (void)type;
    *count = 1;
    if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS) {
        struct descriptor *configuration = ((struct descriptor **)elements)[0];
        configuration->graph = part_of(d, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
        configuration->final = true;
    } else if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE) {
        *(int64_t *)elements = 4096;
    }
    return CUDNN_STATUS_SUCCESS;
}

int cudnnBackendExecute(cudnn_handle handle, cudnn_descriptor plan, cudnn_descriptor which) {
    const struct descriptor *graph = part_of(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)->graph;
    struct pack p;
    int64_t count = 0;
    expect(handle != NULL, "a handle");
    if (is("fails")) return FAILED;
    p.ids = attribute_of(which, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &p.count);
    p.pointers = attribute_of(which, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, NULL);
    char *workspace = *(char *const *)attribute_of(which, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, NULL);
    memset(workspace, 0xff, 4096);
    struct descriptor *const *o = attribute_of(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, &count);
    for (int64_t i = 0; i < count; i++) {
        switch (o[i]->type) {
        case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR:
            run_pointwise(o[i], &p);
            break;
        case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR:
            run_reduction(o[i], &p);
            break;
        case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
            run_product(o[i], &p);
            break;
        case CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR:
            run_reshape(o[i], &p);
            break;
        default:
            expect(false, "an operation of attention");
        }
    }
    for (int64_t i = 0; i < count; i++) forget(o[i]);
    return CUDNN_STATUS_SUCCESS;
}
