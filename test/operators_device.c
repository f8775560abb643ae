/* operators_device.c — what a device's memory needs beside operations: conversion, and the copies
 * of packets and elements that lossynet asks for; see operators.h. */
#include "test/operators.h"

static bool too_large(size_t elements) {
    return subject.most_work && elements > subject.most_work;
}

void test_convert(void **state) {
    (void)state;
    size_t sizes[] = {1, 7, 64, 1000, 100003};
    for (int s = 0; s < LENGTH(sizes); s++) {
        if (too_large(sizes[s])) continue;
        struct array from = array_random(sizes[s], 3, FLOAT32), to = array_empty(from.n, TENSOR);
        struct array expected = array_empty(from.n, TENSOR);
        for (size_t i = 0; i < from.n; i++) expected.reference[i] = from.reference[i];
        array_write(&expected);
        memcpy(to.reference, expected.reference, from.n * sizeof(double));
        subject.backend->convert(to.value, from.value, from.n);
        assert_close(&to, "convert", 0, 0);
        array_free(&from), array_free(&to), array_free(&expected);
    }
}

void test_masked_copy(void **state) {
    (void)state;
    size_t shapes[][2] = {{1, 1}, {10, 3}, {1000, 1024}, {100003, 1024}, {5000, 50}, {4096, 7}};
    for (int s = 0; s < LENGTH(shapes); s++) {
        size_t n = shapes[s][0], packet = shapes[s][1];
        if (too_large(n)) continue;
        struct array to = array_random(n + packet, 1, FLOAT32); /* more than is to be copied */
        struct array from = array_random(n + packet, 1, FLOAT32);
        uint8_t *arrived = (uint8_t *)malloc((n + packet - 1) / packet);
        assert_non_null(arrived);
        for (size_t k = 0; k * packet < n; k++) arrived[k] = random_uniform() > 0;
        for (size_t j = 0; j < n; j++)
            if (arrived[j / packet]) to.reference[j] = from.reference[j];
        subject.backend->masked_copy(to.value, from.value, arrived, n, packet);
        assert_close(&to, "masked_copy", 0, 0);
        array_free(&to), array_free(&from);
        free(arrived);
    }
}

void test_gather(void **state) {
    (void)state;
    enum { MOST = 1000, FROM = 50000 };
    struct array from = array_random(FROM, 1, FLOAT32);
    size_t element[MOST];
    float out[MOST];
    for (size_t n = 1; n <= MOST; n = n * 3 + 7) {
        for (size_t i = 0; i < n; i++) element[i] = (size_t)(fabs(random_uniform()) * (FROM - 1));
        element[0] = FROM - 1;
        subject.backend->gather(out, from.value, element, n);
        for (size_t i = 0; i < n; i++) assert_true(out[i] == (float)from.reference[element[i]]);
    }
    array_free(&from);
}
