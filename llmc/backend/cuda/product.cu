/* product.cu — matrix products on an NVIDIA GPU, by cuBLASLt.
 *
 * cuBLASLt expects column-major arrays, and a row-major (R, S) array is a column-major (S, R) one.
 * So the row-major out = op(a) op(b) is, by columns, out^T = op(b)^T op(a)^T: b becomes the first
 * factor, a the second, M and N change places, and the transposes stay as they are. The calls of
 * the backend:
 *
 *     out (N, O) = x (N, I) w^T          first w, transposed;  second x;                k = I
 *     dx  (N, I) = dout (N, O) w (O, I)  first w;              second dout;             k = O
 *     dw  (O, I) = dout^T x (N, I)       first x;              second dout, transposed; k = N
 *
 * cuBLASLt can fuse other work with a product. Only one kind is used, adding to what is there
 * (beta), for micro-batches and the classifier's chunks. Its epilogues are bias, ReLU, GELU, their
 * gradients, and auxiliary outputs of these; a Llama has no bias, and SwiGLU, RMSNorm and rotary
 * embedding are not among them. A product could read the residual stream as its C and write the sum
 * elsewhere. This would save one of the five passes over (N, C) that product and residual_rmsnorm
 * make together. But the sum would then be rounded once, where every backend rounds the projection
 * first, so it is not done.
 *
 * It takes 10 to 100 us to ask cuBLASLt's heuristic which algorithm suits a shape, so answers are
 * kept. Only algorithms that sum in float32 in a fixed order are taken: none that rounds partial
 * sums to the output's type, or adds them in the order of arrival. The heuristic's first is taken.
 * To time its others would save 2% of a step of 1.1B on an H100, but two runs could then choose
 * differently, and so compute other bits.
 *
 * The library is 500 MB large and takes 0.1 s to load, so it is opened with a device and not at
 * start. */
#include "llmc/backend/cuda/product.h"
#include "llmc/backend/cuda/device.h"
#include "llmc/backend/cuda/streams.h"
#include "llmc/log/error.h"

#include <cublasLt.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ANSWERS = 512, WORKSPACE = 64 << 20 };

struct key { /* compared as bytes: no padding */
    int64_t row_a, row_b, row_out;
    int32_t M, N, K;
    uint8_t transpose_a, transpose_b, in, out_type;
    uint16_t aligned_a, aligned_b, aligned_out; /* largest power of two in it, up to 256 bytes */
    uint16_t accumulate;                        /* 0 or 1 */
};
static_assert(sizeof(struct key) == 48, "struct key has padding");

struct answer {
    struct key key;
    bool used;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t first, second, out;
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace;
};

/* The library's functions, FUNCTIONS(F) with F(our name, cuBLASLt's). */
#define FUNCTIONS(F)                                                                               \
    F(create, Create)                                                                              \
    F(version, GetVersion)                                                                         \
    F(text, GetStatusString)                                                                       \
    F(matmul, Matmul)                                                                              \
    F(desc_create, MatmulDescCreate)                                                               \
    F(desc_set, MatmulDescSetAttribute)                                                            \
    F(desc_destroy, MatmulDescDestroy)                                                             \
    F(layout_create, MatrixLayoutCreate)                                                           \
    F(layout_destroy, MatrixLayoutDestroy)                                                         \
    F(preference_create, MatmulPreferenceCreate)                                                   \
    F(preference_set, MatmulPreferenceSetAttribute)                                                \
    F(preference_destroy, MatmulPreferenceDestroy)                                                 \
    F(heuristic, MatmulAlgoGetHeuristic)

#define MEMBER(name, function) decltype(&cublasLt##function) name;
static struct {
    FUNCTIONS(MEMBER)
    cublasLtHandle_t handle;
    void *workspace[BACKEND_SETS];
    struct answer answer[ANSWERS];
    int next; /* which of 8 answers to forget when all 8 are used, modulo 8 */
} lt;

#define CHECK(call) check(call, #call, __LINE__)

static void check(cublasStatus_t status, const char *call, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    log_error("cuBLASLt: %s (product.cu:%d): %s", call, line, lt.text(status));
    exit(1);
}

/* ---- opening ---- */

#define FIND(name, function)                                                                       \
    if (found) *(void **)&lt.name = dlsym(library, "cublasLt" #function);                          \
    found = found && lt.name;

bool product_open(char *why, size_t why_size) {
    char name[64];
    snprintf(name, sizeof name, "libcublasLt.so.%d", CUBLAS_VER_MAJOR);
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    bool found = library != NULL;
    FUNCTIONS(FIND)
    if (!found) {
        snprintf(why, why_size, "%s of CUDA was not found (LD_LIBRARY_PATH?): %s", name, dlerror());
        return false;
    }
    cublasStatus_t status = lt.create(&lt.handle);
    if (status != CUBLAS_STATUS_SUCCESS) {
        snprintf(why, why_size, "cuBLASLt does not start: %s", lt.text(status));
        return false;
    }
    lt.workspace[0] = device_allocate(WORKSPACE);
    if (!lt.workspace[0]) {
        snprintf(why, why_size, "the device has no %d MB of memory left (%.3f GB are free)",
                 WORKSPACE / 1000000, (double)device_memory_free() / 1e9);
        return false;
    }
    return true;
}

void product_library(char *text, size_t size) {
    const size_t version = lt.version();
    snprintf(text, size, "cuBLASLt %zu.%zu.%zu", version / 10000, version % 10000 / 100,
             version % 100);
}

/* ---- which algorithm ---- */

static uint32_t alignment(const void *p, size_t row_bytes) {
    uintptr_t bits = (uintptr_t)p | row_bytes | 256;
    return (uint32_t)(bits & -bits);
}

static cudaDataType type_of(enum dtype dtype) {
    static const cudaDataType types[] = {CUDA_R_32F, CUDA_R_16BF};
    return types[dtype];
}

static size_t size_of(enum dtype dtype) {
    static const size_t sizes[] = {4, 2};
    return sizes[dtype];
}

static void forget(struct answer *x) {
    if (!x->used) return;
    CHECK(lt.desc_destroy(x->operation));
    CHECK(lt.layout_destroy(x->first));
    CHECK(lt.layout_destroy(x->second));
    CHECK(lt.layout_destroy(x->out));
    x->used = false;
}

/* Fills *x, with the heuristic's first algorithm. */
static void ask(struct answer *x, const struct key *key) {
    const cudaDataType in = type_of((enum dtype)key->in), out = type_of((enum dtype)key->out_type);
    const cublasOperation_t op_first = key->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t op_second = key->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const uint64_t M = (uint64_t)key->M, N = (uint64_t)key->N, K = (uint64_t)key->K;
    forget(x);
    CHECK(lt.desc_create(&x->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CHECK(lt.desc_set(x->operation, CUBLASLT_MATMUL_DESC_TRANSA, &op_first, sizeof op_first));
    CHECK(lt.desc_set(x->operation, CUBLASLT_MATMUL_DESC_TRANSB, &op_second, sizeof op_second));
    CHECK(lt.layout_create(&x->first, in, key->transpose_b ? K : N, key->transpose_b ? N : K,
                           key->row_b));
    CHECK(lt.layout_create(&x->second, in, key->transpose_a ? M : K, key->transpose_a ? K : M,
                           key->row_a));
    CHECK(lt.layout_create(&x->out, out, N, M, key->row_out));

    const size_t workspace = WORKSPACE;
    const uint32_t schemes =
        CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint32_t first = key->aligned_b, second = key->aligned_a, third = key->aligned_out;
    cublasLtMatmulPreference_t wanted;
    CHECK(lt.preference_create(&wanted));
#define WANT(attribute, value)                                                                     \
    CHECK(lt.preference_set(wanted, CUBLASLT_MATMUL_PREF_##attribute, &(value), sizeof(value)))
    WANT(MAX_WORKSPACE_BYTES, workspace);
    WANT(REDUCTION_SCHEME_MASK, schemes);
    WANT(MIN_ALIGNMENT_A_BYTES, first);
    WANT(MIN_ALIGNMENT_B_BYTES, second);
    WANT(MIN_ALIGNMENT_C_BYTES, third);
    WANT(MIN_ALIGNMENT_D_BYTES, third);
#undef WANT
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    cublasStatus_t status = lt.heuristic(lt.handle, x->operation, x->first, x->second, x->out,
                                         x->out, wanted, 1, &result, &found);
    if (status == CUBLAS_STATUS_SUCCESS && found > 0) status = result.state;
    if (status != CUBLAS_STATUS_SUCCESS || found == 0) {
        log_error("cuBLASLt has no algorithm for (%d, %d) x (%d, %d), %s: %s", key->M, key->K,
                  key->K, key->N, key->in == DTYPE_BF16 ? "bf16" : "float32", lt.text(status));
        exit(1);
    }
    CHECK(lt.preference_destroy(wanted));
    x->algorithm = result.algo;
    x->workspace = result.workspaceSize;
    x->key = *key;
    x->used = true;
}

static const struct answer *answer(const struct key *key) {
    const unsigned char *bytes = (const unsigned char *)key;
    uint32_t hash = 2166136261u; /* FNV-1a */
    for (size_t i = 0; i < sizeof *key; i++) hash = (hash ^ bytes[i]) * 16777619u;
    for (int probe = 0; probe < 8; probe++) {
        struct answer *x = &lt.answer[(hash + probe) % ANSWERS];
        if (x->used && memcmp(&x->key, key, sizeof *key) == 0) return x;
        if (x->used) continue;
        ask(x, key);
        return x;
    }
    struct answer *x = &lt.answer[(hash + lt.next++ % 8) % ANSWERS];
    ask(x, key);
    return x;
}

/* ---- the product ---- */

static struct key key_of(const void *out, const void *a, const void *b, const struct product *p) {
    const size_t in = size_of(p->in), result = size_of(p->out_type);
    const struct key key = {(int64_t)p->row_a,
                            (int64_t)p->row_b,
                            (int64_t)p->row_out,
                            p->M,
                            p->N,
                            p->K,
                            p->transpose_a,
                            p->transpose_b,
                            (uint8_t)p->in,
                            (uint8_t)p->out_type,
                            (uint16_t)alignment(a, p->row_a * in),
                            (uint16_t)alignment(b, p->row_b * in),
                            (uint16_t)alignment(out, p->row_out * result),
                            p->accumulate};
    return key;
}

static void *workspace_of_set(void) {
    void **workspace = &lt.workspace[device_set()];
    if (!*workspace) *workspace = device_allocate(WORKSPACE);
    if (!*workspace) {
        log_out_of_memory("products of a set", WORKSPACE);
        exit(1);
    }
    return *workspace;
}

void device_product(void *out, const void *a, const void *b, const struct product *p) {
    const float one = 1, beta = p->accumulate ? 1 : 0;
    char name[64];
    snprintf(name, sizeof name, "a product of %d x %d x %d", p->M, p->N, p->K);
    streams_note(name);
    const struct key key = key_of(out, a, b, p);
    const struct answer *x = answer(&key);
    void *workspace = workspace_of_set();
    CHECK(lt.matmul(lt.handle, x->operation, &one, b, x->first, a, x->second, &beta, out, x->out,
                    out, x->out, &x->algorithm, workspace, x->workspace, device_stream()));
}
