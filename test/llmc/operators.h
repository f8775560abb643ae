/* operators.h — the operator tests: every operation of llmc/backend/backend.h on any backend,
 * against float64 (operators_reference.h), finite differences, and itself. test_operators.c runs
 * them on the CPU backends, test_cuda_kernels.c on the CUDA kernels under emulation.
 *
 *   operators_list.h     their names
 *   operators_arrays.c   numbers in a backend's memory beside their reference; errors
 *   operators.c          each operation of a model against its reference
 *   operators_vectors.c  those on flat vectors: optimiser, norm, masked average
 *   operators_device.c   conversion and copies, for a device's memory
 *   operators_exchange.c what workers of a device exchange
 *   operators_bits.c     the same bits every time, at any alignment
 *
 * Inputs are rounded to the backend's type first, so that only the operation's own rounding is
 * measured. Outputs are NaN before. Behind every array stands a canary, checked when it is freed.
 */
#ifndef TEST_OPERATORS_H
#define TEST_OPERATORS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "llmc/backend/backend.h"

#define LENGTH(array) ((int)(sizeof(array) / sizeof(array)[0]))

/* What is tested. */
struct operators_subject {
    const struct backend *backend;
    const int *head_sizes; /* those that attention knows, ended by 0; NULL: any */
    bool in_place;         /* adamw's param may be master, also where tensors are bfloat16 */
    size_t most_work;      /* shapes with more elements (of the largest array) are left out */
};
extern struct operators_subject subject;

/* ---- arrays (operators_arrays.c) ------------------------------------------------------------ */

enum array_type { TENSOR, WEIGHT, FLOAT32, BFLOAT16 }; /* as in backend.h; the last two always */

struct array {
    size_t n;
    double *reference;
    void *value; /* in the backend's memory */
    enum array_type type;
    double terms; /* size of what an element is the sum of, where that may cancel; 0 where not */
};

void operators_seed(uint64_t seed);
double random_uniform(void); /* -1 .. 1 */

/* NaN; the reference is 0. */
struct array array_empty(size_t n, enum array_type type);
/* -size .. size */
struct array array_random(size_t n, double size, enum array_type type);
/* Random or empty. */
struct array array_filled(size_t n, bool random, enum array_type type);
void array_free(struct array *a);

/* The reference into the backend's memory, rounded to its type; the reference is rounded, too. */
void array_write(struct array *a);
void array_write_floats(struct array *a, const float *from);
void array_poison(struct array *a); /* NaN again */
/* What the backend's memory holds, as float32; the caller frees. */
float *array_read(const struct array *a);
size_t bytes_of_array(const struct array *a);
void array_add_reference(struct array *a, const struct array *b);

/* Numbers of other kinds in the backend's memory; release it with subject.backend. */
void *upload(const void *from, size_t bytes);

/* Tokens in [0, V), V - 1 among them. `value` is in the backend's memory. */
struct tokens {
    int32_t *host, *value;
};
struct tokens random_tokens(int N, int V);
void tokens_free(struct tokens *tokens);

/* To bfloat16, worked out in float64: numbers between two of 8 bits go to the nearer, and in the
 * middle to the even one. From 255.5 units of the last place of the largest binade on: infinity. */
float rounded_reference(float x);

/* The norm of the difference over the norm of the reference (with `terms` for each element) is at
 * most the tolerance for the type of the backend's tensors, and no element is off by more than 4
 * times that, relative to its own size plus the root mean square. `name` is what the report of
 * worst errors calls it. */
void assert_close(const struct array *a, const char *name, double float32, double bfloat16);
/* Prints the worst error of each name so far beside what is allowed, and forgets them. */
void operators_report(const char *title);

/* ---- tests ---------------------------------------------------------------------------------- */

/* On every backend. A program makes its array of tests from the same list. */
#define OPERATOR_TEST(name) void name(void **state);
#include "test/llmc/operators_list.h"
#undef OPERATOR_TEST

void test_weights_are_rounded(void **state); /* the CPU's */
void test_weighted_sum_pinned(void **state); /* a device's, and these two */
void test_weighted_sum_pinned_bf16(void **state);
void test_copies_that_round(void **state);

/* ---- every operation once (operators_bits.c) ------------------------------------------------- */

struct inputs;
struct inputs *inputs_new(void);
void inputs_free(struct inputs *in);

enum { OUTPUTS = 34 };
struct outputs {
    int count;
    size_t bytes[OUTPUTS];
    void *memory[OUTPUTS];
    const char *name[OUTPUTS];
};

/* No assertions: this also runs inside a parallel region. */
void run_everything(const struct inputs *in, struct outputs *out);
void assert_same_bits(const struct outputs *a, const struct outputs *b, const char *where,
                      int number);
void outputs_free(struct outputs *out);

#endif
