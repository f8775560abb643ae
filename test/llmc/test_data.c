/* test_data.c — tests token files and the order in which the dataloader reads sequences from them.
 * */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "llmc/data/dataloader.h"
#include "llmc/log/error.h"
#include "test/support/llmc_test.h"

/* ---- making token files -------------------------------------------------------------------- */

struct spec {
    int32_t magic, version, claimed, vocabulary; /* of the header; claimed < 0: the true count */
    int count, first_id;                         /* tokens first_id, first_id + 1, ... */
};

static const char *write_spec(const char *name, struct spec spec) {
    const size_t each = spec.magic == TOKENS_MAGIC_32 ? 4 : 2;
    size_t bytes = TOKENS_HEADER_BYTES + each * (size_t)spec.count;
    char *data = (char *)calloc(1, bytes);
    int32_t header[4] = {spec.magic, spec.version, spec.claimed < 0 ? spec.count : spec.claimed,
                         spec.vocabulary};
    memcpy(data, header, sizeof header);
    for (int i = 0; i < spec.count; i++) {
        int32_t id = spec.first_id + i; /* little-endian: its first half is the uint16 */
        memcpy(data + TOKENS_HEADER_BYTES + each * (size_t)i, &id, each);
    }
    const char *path = in_scratch(name);
    write_bytes(path, data, bytes);
    free(data);
    return path;
}

/* A good file of `count` tokens. */
static const char *write_tokens(const char *name, int count, int first_id, int vocabulary) {
    return write_spec(name,
                      (struct spec){TOKENS_MAGIC, TOKENS_VERSION, -1, vocabulary, count, first_id});
}

static struct dataloader *open_good(const char *pattern, enum dataloader_use use, int T,
                                    uint64_t seed) {
    struct dataloader *loader;
    assert_int_equal(dataloader_open(pattern, use, T, seed, &loader), 0);
    return loader;
}

static void assert_open_reports(const char *pattern, enum dataloader_use use, int T,
                                const char *text) {
    struct dataloader *loader = (struct dataloader *)1;
    assert_reports(dataloader_open(pattern, use, T, 0, &loader), text);
    assert_null(loader);
}

/* ---- bad files ----------------------------------------------------------------------------- */

static void test_bad_files(void **state) {
    (void)state;
    struct spec good = {TOKENS_MAGIC, TOKENS_VERSION, -1, 0, 100, 0}, spec;
    assert_open_reports(in_scratch("absent_*.bin"), DATALOADER_TRAIN, 8, "no file matches");
    assert_open_reports(in_scratch("absent.bin"), DATALOADER_TRAIN, 8, "absent.bin'");
    assert_open_reports(scratch, DATALOADER_TRAIN, 8, "a directory, expected its token files");
    assert_open_reports("/dev/null", DATALOADER_TRAIN, 8, "a device or pipe");

    const char *path = in_scratch("bad.bin");
    write_bytes(path, "", 0);
    assert_open_reports(path, DATALOADER_TRAIN, 8, "is empty");
    write_bytes(path, "not a token file", 16);
    assert_open_reports(path, DATALOADER_TRAIN, 8, "it has 16 bytes");

    spec = good, spec.magic = TOKENS_MAGIC_32;
    assert_open_reports(write_spec("bad.bin", spec), DATALOADER_TRAIN, 8,
                        "of version 1, expected version 7");
    spec.version = TOKENS_VERSION_32, spec.claimed = 99;
    assert_open_reports(write_spec("bad.bin", spec), DATALOADER_TRAIN, 8,
                        "has 1424 bytes, expected 1420");
    spec.claimed = -1, spec.vocabulary = (1 << 20) + 1;
    assert_open_reports(write_spec("bad.bin", spec), DATALOADER_TRAIN, 8,
                        "expected 0 (unknown) to");
    spec.vocabulary = 128256, spec.first_id = 128200;
    assert_open_reports(write_spec("bad.bin", spec), DATALOADER_TRAIN, 8,
                        "token 56 has id 128256, expected less than the file's own");
    spec.first_id = -50; /* as uint32: 4294967246 */
    assert_open_reports(write_spec("bad.bin", spec), DATALOADER_TRAIN, 8,
                        "token 0 has id 4294967246");
    spec = good, spec.magic = 20240326; /* llm.c's model files */
    assert_open_reports(write_spec("bad.bin", spec), DATALOADER_TRAIN, 8, "number 20240326");
    spec = good, spec.version = 2;
    assert_open_reports(write_spec("bad.bin", spec), DATALOADER_TRAIN, 8, "of version 2");
    spec = good, spec.claimed = 101;
    assert_open_reports(write_spec("bad.bin", spec), DATALOADER_TRAIN, 8, "it is truncated");
    spec = good, spec.claimed = 99;
    assert_open_reports(write_spec("bad.bin", spec), DATALOADER_TRAIN, 8, "do not belong to it");
    spec = good, spec.claimed = INT32_MAX;
    assert_open_reports(write_spec("bad.bin", spec), DATALOADER_TRAIN, 8, "it is truncated");
    spec = good, spec.vocabulary = -5;
    assert_open_reports(write_spec("bad.bin", spec), DATALOADER_TRAIN, 8, "vocabulary of -5");
    spec = good, spec.vocabulary = 65536;
    assert_open_reports(write_spec("bad.bin", spec), DATALOADER_TRAIN, 8, "vocabulary of 65536");
    assert_open_reports(write_tokens("bad.bin", 100, 0, 90), DATALOADER_TRAIN, 8,
                        "token 90 has id 90, expected less than the file's own vocabulary size, "
                        "90");
    assert_open_reports(write_tokens("bad.bin", 100, 0, 99), DATALOADER_TRAIN, 8,
                        "token 99 has id 99");
    assert_open_reports(write_tokens("bad.bin", 100, 0, 0), DATALOADER_TRAIN, 0, "0 tokens");
}

static void test_negative_count(void **state) {
    (void)state;
    int32_t header[TOKENS_HEADER_INTS] = {TOKENS_MAGIC, TOKENS_VERSION, -7};
    write_bytes(in_scratch("negative.bin"), header, sizeof header);
    assert_open_reports(in_scratch("negative.bin"), DATALOADER_TRAIN, 8, "claims -7 tokens");
}

static void test_every_truncation(void **state) {
    (void)state;
    size_t bytes;
    char *data = read_bytes(write_tokens("whole.bin", 20, 0, 0), &bytes);
    for (size_t n = 0; n < bytes; n++) {
        write_bytes(in_scratch("cut.bin"), data, n);
        assert_open_reports(in_scratch("cut.bin"), DATALOADER_VALIDATE, 4,
                            n == 0 ? "is empty" : "is truncated");
    }
    free(data);
}

static void test_too_short(void **state) {
    (void)state;
    const char *path = write_tokens("short.bin", 8, 0, 0);
    assert_open_reports(path, DATALOADER_TRAIN, 8, "9 tokens that one sequence needs (8 tokens");
    dataloader_close(open_good(path, DATALOADER_TRAIN, 7, 0));
    dataloader_close(open_good(path, DATALOADER_VALIDATE, 8, 0));
    path = write_tokens("short.bin", 1, 0, 0);
    assert_open_reports(path, DATALOADER_VALIDATE, 8, "2 tokens");
    path = write_tokens("short.bin", 0, 0, 0);
    assert_open_reports(path, DATALOADER_VALIDATE, 8, "2 tokens");
}

static void test_vocabulary(void **state) {
    (void)state;
    struct dataloader *loader =
        open_good(write_tokens("v.bin", 70000, 0, 0), DATALOADER_TRAIN, 8, 0);
    assert_int_equal(dataloader_vocabulary(loader), 0);
    assert_reports(dataloader_check_vocabulary(loader, 32000),
                   "token 32000 has id 32000, expected less than the model's vocabulary size, "
                   "32000");
    assert_int_equal(dataloader_check_vocabulary(loader, 65536), 0);
    dataloader_close(loader);

    write_tokens("w1.bin", 50, 0, 50);
    write_tokens("w2.bin", 50, 0, 0);
    loader = open_good(in_scratch("w?.bin"), DATALOADER_TRAIN, 8, 0);
    assert_int_equal(dataloader_vocabulary(loader), 50);
    assert_int_equal(dataloader_check_vocabulary(loader, 50), 0);
    assert_int_equal(dataloader_tokens(loader), 100);
    dataloader_close(loader);

    write_tokens("w3.bin", 50, 0, 51);
    assert_open_reports(in_scratch("w?.bin"), DATALOADER_TRAIN, 8,
                        "w3.bin' is for a vocabulary of "
                        "51, expected 50");
}

/* Words and bytes are known when every file tells them. */
static void test_words_and_bytes(void **state) {
    (void)state;
    for (int second = 0; second < 2; second++) {
        for (int i = 0; i < 2; i++) {
            int32_t header[TOKENS_HEADER_INTS] = {TOKENS_MAGIC, TOKENS_VERSION, 2};
            uint64_t words = i == 0 ? (uint64_t)5 << 32 : second ? 7 : 0;
            memcpy(header + TOKENS_HEADER_WORDS, &words, sizeof words);
            words *= 4;
            memcpy(header + TOKENS_HEADER_TEXT_BYTES, &words, sizeof words);
            char data[TOKENS_HEADER_BYTES + 4] = {0};
            memcpy(data, header, sizeof header);
            write_bytes(in_scratch(i ? "words2.bin" : "words1.bin"), data, sizeof data);
        }
        struct dataloader *loader = open_good(in_scratch("words?.bin"), DATALOADER_VALIDATE, 8, 0);
        const double known = ((uint64_t)5 << 32) + 7; /* 2 tokens are predicted */
        assert_float_equal(dataloader_targets_per_word(loader), second ? 2 / known : 0, 1e-25);
        assert_float_equal(dataloader_targets_per_byte(loader), second ? 0.5 / known : 0, 1e-25);
        dataloader_close(loader);
    }
}

/* The same tokens as 16 and as 32 bits are the same sequences; large ids are those of the file. */
static void test_32_bit_tokens(void **state) {
    (void)state;
    enum { COUNT = 70000, WINDOW = 7 };
    const struct spec wide = {TOKENS_MAGIC_32, TOKENS_VERSION_32, -1, 0, COUNT, 0};
    struct spec large = wide;
    large.first_id = 1 << 17, large.vocabulary = 1 << 18;
    write_tokens("16.bin", COUNT, 0, 0); /* ids from 65536 on begin at 0 again */
    write_spec("32.bin", wide);
    struct dataloader *loader[] = {
        open_good(in_scratch("16.bin"), DATALOADER_TRAIN, WINDOW, 3),
        open_good(in_scratch("32.bin"), DATALOADER_TRAIN, WINDOW, 3),
        open_good(write_spec("large.bin", large), DATALOADER_TRAIN, WINDOW, 3)};
    assert_int_equal(dataloader_vocabulary(loader[2]), 1 << 18);
    assert_reports(dataloader_check_vocabulary(loader[1], 65536), "token 65536 has id 65536");
    for (uint64_t n = 0; n < COUNT / WINDOW; n++) {
        int32_t tokens[3][WINDOW], targets[3][WINDOW];
        for (int i = 0; i < 3; i++)
            dataloader_batch(loader[i], n, 0, 0, 1, 1, tokens[i], targets[i]);
        for (int t = 0; t < WINDOW; t++) {
            assert_int_equal(tokens[0][t], tokens[1][t] & 65535);
            assert_int_equal(targets[0][t], targets[1][t] & 65535);
            assert_int_equal(tokens[2][t], tokens[1][t] + (1 << 17));
            assert_int_equal(targets[2][t], tokens[2][t] + 1);
        }
    }
    int32_t tokens[WINDOW], targets[WINDOW];
    assert_int_equal(dataloader_window(loader[2], 1, tokens, targets), WINDOW);
    assert_int_equal(tokens[0], (1 << 17) + WINDOW);
    for (int i = 0; i < 3; i++) dataloader_close(loader[i]);
    char text[2][DATALOADER_DESCRIPTION];
    int vocabulary = 7;
    assert_int_equal(dataloader_describe(in_scratch("32.bin"), text[0], &vocabulary), 0);
    assert_int_equal(vocabulary, 7); /* its header has none */
    assert_int_equal(dataloader_describe(in_scratch("large.bin"), text[1], &vocabulary), 0);
    assert_int_equal(vocabulary, 1 << 18);
    assert_string_not_equal(text[0], text[1]);
}

static void test_tokenizer_beside(void **state) {
    (void)state;
    struct dataloader *loader = open_good(write_tokens("t.bin", 50, 0, 0), DATALOADER_TRAIN, 8, 0);
    assert_null(dataloader_tokenizer(loader));
    dataloader_close(loader);
    write_text(in_scratch("tokenizer.json"), "{}");
    loader = open_good(in_scratch("t.bin"), DATALOADER_TRAIN, 8, 0);
    assert_string_equal(dataloader_tokenizer(loader), in_scratch("tokenizer.json"));
    dataloader_close(loader);
    write_text(in_scratch("tokenizer.model"), "x");
    loader = open_good(in_scratch("t.bin"), DATALOADER_TRAIN, 8, 0);
    assert_string_equal(dataloader_tokenizer(loader), in_scratch("tokenizer.model"));
    dataloader_close(loader);
    assert_int_equal(chdir(scratch), 0);
    loader = open_good("t.bin", DATALOADER_TRAIN, 8, 0);
    assert_string_equal(dataloader_tokenizer(loader), "tokenizer.model");
    dataloader_close(loader);
    unlink("tokenizer.model");
    unlink("tokenizer.json");
    assert_int_equal(chdir("/"), 0);
}

/* ---- training sequences: ids are positions, so a window's first id says where it lies ------- */

enum { T = 5 };

/* Sequence n's start, after checking that it is T+1 consecutive tokens. */
static int start_of(struct dataloader *loader, uint64_t n) {
    int32_t tokens[T], targets[T];
    memset(tokens, -1, sizeof tokens);
    dataloader_batch(loader, n, 0, 0, 1, 1, tokens, targets);
    for (int t = 0; t < T; t++) {
        assert_int_equal(tokens[t], tokens[0] + t);
        assert_int_equal(targets[t], tokens[0] + t + 1);
    }
    return tokens[0];
}

/* The window of this start in an epoch with this shift (the last window ends with the file). */
static int window_of(int start, int shift, int count) {
    return start == count - T - 1 && (start - shift) % T != 0 ? (count - 1) / T - 1
                                                              : (start - shift) / T;
}

/* Every epoch of a file of every length visits each window once; together the epochs reach every
 * token. */
static void test_epochs_are_permutations(void **state) {
    (void)state;
    for (int count = T + 1; count < 260; count++) {
        struct dataloader *loader =
            open_good(write_tokens("p.bin", count, 0, 0), DATALOADER_TRAIN, T, 7);
        int windows = (count - 1) / T;
        assert_int_equal(dataloader_epoch(loader), windows);
        bool *reached = (bool *)calloc((size_t)count, 1);
        for (int epoch = 0; epoch < 40; epoch++) {
            int least = count;
            for (int i = 0; i < windows; i++) {
                int start = start_of(loader, (uint64_t)(epoch * windows + i));
                if (start < least) least = start;
            }
            bool seen[64] = {false};
            assert_true(least < T);
            for (int i = 0; i < windows; i++) {
                int start = start_of(loader, (uint64_t)(epoch * windows + i));
                int window = window_of(start, least, count);
                assert_in_range(window, 0, windows - 1);
                assert_false(seen[window]);
                seen[window] = true;
                for (int t = 0; t <= T; t++) reached[start + t] = true;
            }
        }
        for (int i = 0; i < count; i++) assert_true(reached[i]);
        free(reached);
        dataloader_close(loader);
    }
}

/* How many of two epochs' windows are at the same place in the order. */
static int agreements(struct dataloader *a, uint64_t epoch_a, struct dataloader *b,
                      uint64_t epoch_b) {
    uint64_t windows = dataloader_epoch(a);
    int same = 0;
    for (uint64_t i = 0; i < windows; i++)
        same += start_of(a, epoch_a * windows + i) / T == start_of(b, epoch_b * windows + i) / T;
    return same;
}

static void test_epochs_and_seeds_differ(void **state) {
    (void)state;
    const char *path = write_tokens("d.bin", 1000 * T + 1, 0, 0);
    struct dataloader *a = open_good(path, DATALOADER_TRAIN, T, 1),
                      *same = open_good(path, DATALOADER_TRAIN, T, 1),
                      *other = open_good(path, DATALOADER_TRAIN, T, 2);
    assert_int_equal(agreements(a, 0, same, 0), 1000);
    assert_int_equal(agreements(a, 123456789, same, 123456789), 1000);
    for (uint64_t epoch = 1; epoch < 20; epoch++) { /* expected 1, Poisson */
        assert_true(agreements(a, 0, a, epoch) < 10);
        assert_true(agreements(a, epoch, other, epoch) < 10);
    }
    int in_order = 0; /* neighbours that follow each other in the file */
    for (uint64_t i = 0; i + 1 < 1000; i++) in_order += start_of(a, i + 1) == start_of(a, i) + T;
    assert_true(in_order < 10);
    bool shifts[T] = {false};
    for (uint64_t epoch = 0; epoch < 100; epoch++)
        for (uint64_t i = 0; i < 2; i++) shifts[start_of(a, epoch * 1000 + i) % T] = true;
    for (int shift = 0; shift < T; shift++) assert_true(shifts[shift]);
    dataloader_close(a);
    dataloader_close(same);
    dataloader_close(other);
}

/* Over many seeds every window comes first about equally often: chi-square, 9 degrees of freedom,
 * beyond 33.7 with probability 1e-4. */
static void test_order_is_uniform(void **state) {
    (void)state;
    enum { WINDOWS = 10, SEEDS = 2000 };
    const char *path = write_tokens("u.bin", WINDOWS * T + 1, 0, 0);
    int first[WINDOWS] = {0};
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        struct dataloader *loader = open_good(path, DATALOADER_TRAIN, T, seed);
        first[start_of(loader, 0) / T]++; /* a shift moves 0 ... T-1: the same window */
        dataloader_close(loader);
    }
    double chi_square = 0, mean = (double)SEEDS / WINDOWS;
    for (int i = 0; i < WINDOWS; i++) chi_square += (first[i] - mean) * (first[i] - mean) / mean;
    assert_true(chi_square < 33.7);
}

/* Windows never cross from file to file; files too short for a window are passed over. */
static void test_many_files(void **state) {
    (void)state;
    write_tokens("m1.bin", 23, 0, 0);
    write_tokens("m2.bin", 3, 20000, 0);
    write_tokens("m3.bin", 61, 1000, 0);
    write_tokens("m4.bin", 0, 0, 0);
    write_tokens("m5.bin", 6, 3000, 0);
    struct dataloader *loader = open_good(in_scratch("m?.bin"), DATALOADER_TRAIN, T, 3);
    assert_int_equal(dataloader_epoch(loader), 4 + 12 + 1);
    int of_file[4] = {0};
    for (uint64_t n = 0; n < 17; n++) of_file[start_of(loader, n) / 1000]++;
    assert_int_equal(of_file[0], 4);
    assert_int_equal(of_file[1], 12);
    assert_int_equal(of_file[3], 1);
    dataloader_close(loader);
}

/* Windows of one worker's batches in a step: starts, in the order of `starts` [B * M]. */
static void batch_starts(struct dataloader *loader, uint64_t done, int worker, int workers, int B,
                         int M, int *starts) {
    int32_t tokens[8 * T], targets[8 * T];
    assert_true(B <= 8);
    for (int m = 0; m < M; m++) {
        dataloader_batch(loader, done, m, worker, workers, B, tokens, targets);
        for (int b = 0; b < B; b++) {
            for (int t = 0; t < T; t++) {
                assert_int_equal(tokens[b * T + t], tokens[b * T] + t);
                assert_int_equal(targets[b * T + t], tokens[b * T] + t + 1);
            }
            starts[m * B + b] = tokens[b * T];
        }
    }
}

/* Shared: worker w takes w*B ... of each N*B sequences; one worker's split is the same. */
static void test_batches_of_the_shared_order(void **state) {
    (void)state;
    enum { B = 3, M = 2 };
    const char *path = write_tokens("s.bin", 400 * T + 1, 0, 0);
    struct dataloader *loader = open_good(path, DATALOADER_TRAIN, T, 9),
                      *one = open_good(path, DATALOADER_TRAIN, T, 9);
    assert_int_equal(dataloader_split(one, 1), 0);
    int starts[B * M], alone[B * M];
    for (int workers = 1; workers < 6; workers++)
        for (uint64_t step = 0; step < 100; step++)
            for (int w = 0; w < workers; w++) {
                uint64_t done = step * (uint64_t)(workers * B * M);
                batch_starts(loader, done, w, workers, B, M, starts);
                for (int i = 0; i < B * M; i++)
                    assert_int_equal(
                        starts[i],
                        start_of(loader, done + (uint64_t)((i / B * workers + w) * B + i % B)));
                if (workers > 1) continue;
                batch_starts(one, done, 0, 1, B, M, alone);
                assert_memory_equal(alone, starts, sizeof alone);
            }
    dataloader_close(loader);
    dataloader_close(one);
}

/* Contiguous: each worker's epochs visit each window of its own part once, in an order of its own,
 * and no other's. Parts are as equal as can be and go across files. */
static void test_contiguous_split(void **state) {
    (void)state;
    enum {
        WORKERS = 7,
        B = 2,
        M = 3,
        FIRST = 40,
        SECOND = 71,
        WINDOWS = FIRST + SECOND,
        STEPS = 16
    };
    write_tokens("k1.bin", FIRST * T + 1, 0, 0);
    write_tokens("k2.bin", SECOND * T + 1, 1000, 0);
    struct dataloader *loader = open_good(in_scratch("k?.bin"), DATALOADER_TRAIN, T, 3);
    assert_int_equal(dataloader_split(loader, WORKERS), 0);
    int starts[B * M * STEPS], place[WORKERS][B * M * STEPS]; /* of the worker's part */
    for (int w = 0; w < WORKERS; w++) {
        const int first = WINDOWS * w / WORKERS, count = WINDOWS * (w + 1) / WORKERS - first;
        int seen[WINDOWS] = {0};
        for (int step = 0; step < STEPS; step++)
            batch_starts(loader, (uint64_t)(step * WORKERS * B * M), w, WORKERS, B, M,
                         starts + step * B * M);
        for (int i = 0; i < B * M * STEPS; i++) {
            bool second = starts[i] >= 1000;
            int window = (starts[i] - 1000 * second) / T + FIRST * second;
            assert_in_range(window, first, first + count - 1);
            assert_int_equal(seen[window]++, i / count);
            place[w][i] = window - first;
        }
    }
    int same = 0; /* parts of 16 windows, in 6 epochs: expected 6 */
    for (int i = 0; i < B * M * STEPS; i++) same += place[1][i] == place[2][i];
    assert_true(same < 24);
    dataloader_close(loader);
}

static void test_split_needs_a_sequence_for_each(void **state) {
    (void)state;
    struct dataloader *loader =
        open_good(write_tokens("n.bin", 4 * T + 1, 0, 0), DATALOADER_TRAIN, T, 3);
    assert_reports(dataloader_split(loader, 5), "have 4 sequences of 5 tokens, expected at least "
                                                "one for each of the 5 workers");
    assert_int_equal(dataloader_split(loader, 4), 0);
    int start;
    for (int w = 0; w < 4; w++) {
        batch_starts(loader, 4, w, 4, 1, 1, &start);
        assert_int_equal(start / T, w);
    }
    dataloader_close(loader);
}

static void test_huge_sample_index(void **state) {
    (void)state;
    struct dataloader *loader =
        open_good(write_tokens("h.bin", 1000, 0, 0), DATALOADER_TRAIN, T, UINT64_MAX);
    start_of(loader, UINT64_MAX);
    start_of(loader, (uint64_t)1 << 63);
    dataloader_close(loader);
}

/* ---- validation: everything once --------------------------------------------------------------
 */

static void test_validation_covers_all(void **state) {
    (void)state;
    for (int count = 2; count < 40; count++) {
        write_tokens("c1.bin", count, 0, 0);
        write_tokens("c2.bin", 1, 500, 0);
        write_tokens("c3.bin", 12, 1000, 0);
        struct dataloader *loader = open_good(in_scratch("c?.bin"), DATALOADER_VALIDATE, T, 0);
        int next = 1;
        for (uint64_t i = 0; i < dataloader_windows(loader); i++) {
            int32_t tokens[T], targets[T];
            int length = dataloader_window(loader, i, tokens, targets);
            assert_in_range(length, 1, T);
            if (next == count) next = 1001; /* the file of one token predicts nothing */
            for (int t = 0; t < length; t++) {
                assert_int_equal(targets[t], next++);
                assert_int_equal(tokens[t], targets[t] - 1);
            }
        }
        assert_int_equal(next, 1012);
        dataloader_close(loader);
    }
}

/* With a stride, as the loop of Hugging Face's page has it: windows begin every S tokens, end after
 * T or with the file, and score what is behind the end of the window before. */
static void test_strided_windows(void **state) {
    (void)state;
    for (int count = 2; count < 40; count++) {
        write_tokens("s1.bin", count, 0, 0);
        write_tokens("s2.bin", 1, 500, 0);
        write_tokens("s3.bin", 12, 1000, 0);
        for (int stride = 1; stride <= T; stride++) {
            struct dataloader *loader = open_good(in_scratch("s?.bin"), DATALOADER_VALIDATE, T, 0);
            dataloader_set_stride(loader, stride);
            uint64_t window = 0;
            for (int file = 0; file < 2; file++) {
                int tokens_in_file = file ? 12 : count, base = file ? 1000 : 0, seen = 0;
                for (int begin = 0;; begin += stride) {
                    int end = begin + T < tokens_in_file ? begin + T : tokens_in_file;
                    if (end - begin >= 2) {
                        int32_t tokens[T], targets[T];
                        int length = dataloader_window(loader, window, tokens, targets);
                        assert_int_equal(length, end - begin - 1);
                        assert_int_equal(tokens[0], base + begin);
                        assert_int_equal(targets[length - 1], base + end - 1);
                        int scored = length - dataloader_window_skip(loader, window);
                        /* the first token of a window has no target before it */
                        assert_int_equal(scored, seen > begin ? end - seen : length);
                        window++;
                    }
                    seen = end;
                    if (end == tokens_in_file) break;
                }
            }
            assert_int_equal(dataloader_windows(loader), window);
            dataloader_close(loader);
        }
    }
}

/* ---- report ------------------------------------------------------------------------------------
 */

static void test_report(void **state) {
    (void)state;
    assert_reports(log_error("value %d", 5), "train_llama2: value 5\n");
    log_rank = 3;
    assert_reports(log_error("escape \033[31m and\nline"),
                   "train_llama2: rank 3: escape ?[31m and?");
    log_rank = -1;
    char *large = (char *)malloc(5000);
    memset(large, 'x', 4999);
    large[4999] = '\0';
    assert_reports(log_error("%s", large), "xxxx");
    free(large);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_report),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_negative_count),
        cmocka_unit_test(test_every_truncation),
        cmocka_unit_test(test_too_short),
        cmocka_unit_test(test_vocabulary),
        cmocka_unit_test(test_words_and_bytes),
        cmocka_unit_test(test_32_bit_tokens),
        cmocka_unit_test(test_tokenizer_beside),
        cmocka_unit_test(test_epochs_are_permutations),
        cmocka_unit_test(test_epochs_and_seeds_differ),
        cmocka_unit_test(test_order_is_uniform),
        cmocka_unit_test(test_many_files),
        cmocka_unit_test(test_batches_of_the_shared_order),
        cmocka_unit_test(test_contiguous_split),
        cmocka_unit_test(test_split_needs_a_sequence_for_each),
        cmocka_unit_test(test_huge_sample_index),
        cmocka_unit_test(test_validation_covers_all),
        cmocka_unit_test(test_strided_windows),
    };
    return cmocka_run_group_tests_name("data", tests, make_scratch, remove_scratch);
}
