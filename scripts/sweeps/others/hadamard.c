/* hadamard.c — a rule for --rule: OptiReduce's transform, with which a lost packet becomes noise in all elements
 * of a block instead of a hole in a few.
 *
 * A block lies within the part of one owner: the largest power of 2 that fits, at its beginning and at its end.
 * Turned once, a packet of a block of four packets would be sums of four elements: blocks of fewer than 32 packets
 * are turned twice. Signs are random, the same for all workers, and new in each step.
 */
#include "lossynet.h"

#include <math.h>

static uint64_t mix(uint64_t x) { /* SplitMix64 */
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static void flip_signs(float *x, size_t n, uint64_t key) {
    static float signs[256][8]; /* of the bits of each byte */
    for (int i = 0; signs[255][7] == 0 && i < 256 * 8; i++)
        signs[i / 8][i % 8] = i / 8 >> i % 8 & 1 ? -1 : 1;
    for (size_t i = 0; i < n; i += 8) {
        const float *these = signs[mix(key + i / 64) >> i % 64 & 255];
        for (size_t j = 0; j < 8 && i + j < n; j++) x[i + j] *= these[j];
    }
}

/* n: a power of 2. Orthogonal and symmetric, so it is its own inverse. A pass takes two bits
 * of the index. */
static void hadamard(float *x, size_t n) {
    size_t q = 1;
    for (; 4 * q <= n; q *= 4)
        for (size_t i = 0; i < n; i += 4 * q) {
            float *restrict y = x + i;
            for (size_t j = 0; j < q; j++) {
                const float a = y[j] + y[j + q], b = y[j] - y[j + q];
                const float c = y[j + 2 * q] + y[j + 3 * q], d = y[j + 2 * q] - y[j + 3 * q];
                y[j] = a + c;
                y[j + q] = b + d;
                y[j + 2 * q] = a - c;
                y[j + 3 * q] = b - d;
            }
        }
    for (size_t j = 0; q < n && j < q; j++) {
        const float a = x[j], b = x[j + q];
        x[j] = a + b;
        x[j + q] = a - b;
    }
    for (size_t i = 0; i < n; i++) x[i] *= (float)(1 / sqrt((double)n));
}

static void rotate(const struct lossynet_rule_part *part, float *x, bool back) {
    const uint64_t key = mix(part->step) ^ mix(part->offset);
    size_t n = 1;
    while (2 * n <= part->count) n *= 2;
    const uint64_t turns = n >= 32 * part->packet ? 2 : 4;
    for (uint64_t i = 0; i < turns; i++) {
        const uint64_t turn = back ? turns - 1 - i : i;
        float *block = turn % 2 ? x + part->count - n : x;
        if (!back) flip_signs(block, n, mix(key + turn));
        hadamard(block, n);
        if (back) flip_signs(block, n, mix(key + turn));
    }
}

static void send(void *context, const struct lossynet_rule_part *part, int worker, float *values) {
    (void)context, (void)worker;
    rotate(part, values, false);
}

/* The mean of what arrived, packet by packet, turned back. */
static void average(void *context, const struct lossynet_rule_part *part,
                    const float *const *gradients, const uint8_t *arrived, const float *carried,
                    float *out) {
    (void)context, (void)carried;
    for (size_t k = 0; k < part->packets; k++) {
        const size_t end =
            (k + 1) * part->packet < part->count ? (k + 1) * part->packet : part->count;
        int came = 0;
        for (int s = 0; s < part->workers; s++) came += arrived[(size_t)s * part->packets + k];
        for (size_t i = k * part->packet; i < end; i++) out[i] = 0;
        for (int s = 0; s < part->workers; s++)
            for (size_t i = k * part->packet; i < end && arrived[(size_t)s * part->packets + k];
                 i++)
                out[i] += (float)(1.0 / came) * gradients[s][i];
    }
    rotate(part, out, true);
}

const struct lossynet_rule lossynet_rule = {
    .size = sizeof lossynet_rule, .send = send, .average = average};
