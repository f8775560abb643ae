/* test_hf_model.c — tests safetensors files and checkpoint directories: round trips, every error
 * message, hostile files, and writes that fail at any byte. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <sys/resource.h>

#include "llmc/checkpoint/hf_model.h"
#include "llmc/model/config.h"
#include "llmc/checkpoint/safetensors.h"
#include "test/support/llmc_test.h"
#include "test/support/write_model.h"

/* ---- safetensors --------------------------------------------------------------------------------
 */

static const float values[6] = {1, -2, 3.5f, 1e-40f, 3.4e38f, 6};

static void test_safetensors_round_trip(void **state) {
    (void)state;
    const struct safetensors_tensor tensors[] = {
        {"matrix", 2, {2, 3}, values, NULL},
        {"scalar", 0, {0}, values + 2, NULL},
        {"empty", 2, {0, 5}, NULL, NULL},
        {"a.vector", 1, {4}, values, "F32"},
        {"\xC3\xBC\"\\\n", 4, {1, 1, 2, 1}, values + 1, NULL},
    };
    const char *path = in_scratch("good.safetensors");
    assert_int_equal(safetensors_write(path, tensors, 5, "pt"), 0);
    struct safetensors *file;
    assert_int_equal(safetensors_open(path, &file), 0);
    assert_int_equal(safetensors_count(file), 5);
    for (size_t i = 0; i < 5; i++) {
        const struct safetensors_view *view = safetensors_find(file, tensors[i].name);
        assert_non_null(view);
        assert_string_equal(view->dtype, "F32");
        assert_int_equal(view->dims, tensors[i].dims);
        float out[6];
        assert_int_equal(
            safetensors_copy_float(file, tensors[i].name, tensors[i].shape, tensors[i].dims, out),
            0);
        if (view->bytes) assert_memory_equal(out, tensors[i].data, view->bytes);
    }
    assert_string_equal(safetensors_at(file, 0)->name, "matrix");
    assert_int_equal((uintptr_t)safetensors_at(file, 0)->data % 8, 0);
    assert_null(safetensors_find(file, "__metadata__"));
    assert_null(safetensors_find(file, "matri"));
    float out[6];
    assert_reports(safetensors_copy_float(file, "matri", tensors[0].shape, 2, out),
                   "has no tensor 'matri' (it has 5 others)");
    assert_reports(safetensors_copy_float(file, "matrix", (int64_t[]){3, 2}, 2, out),
                   "tensor 'matrix' has shape (2, 3), expected (3, 2)");
    assert_reports(safetensors_copy_float(file, "matrix", (int64_t[]){6}, 1, out), "expected (6)");
    safetensors_close(file);

    assert_int_equal(safetensors_write(path, NULL, 0, NULL), 0);
    assert_int_equal(safetensors_open(path, &file), 0);
    assert_int_equal(safetensors_count(file), 0);
    safetensors_close(file);
}

/* Writes a file of this header and data_bytes bytes of data; `length` < 0: the header's own. */
static const char *write_raw(int64_t length, const char *header, const void *data,
                             size_t data_bytes) {
    size_t header_bytes = strlen(header), bytes = 8 + header_bytes + data_bytes;
    char *file = (char *)calloc(1, bytes);
    uint64_t written = length < 0 ? header_bytes : (uint64_t)length;
    memcpy(file, &written, 8);
    memcpy(file + 8, header, header_bytes);
    if (data) memcpy(file + 8 + header_bytes, data, data_bytes);
    const char *path = in_scratch("raw.safetensors");
    write_bytes(path, file, bytes);
    free(file);
    return path;
}

static void test_safetensors_conversions(void **state) {
    (void)state;
    uint16_t all[65536];
    for (int i = 0; i < 65536; i++) all[i] = (uint16_t)i;
    float out[65536];
    int64_t shape[1] = {65536};
    struct safetensors *file;
    for (int half = 0; half < 2; half++) {
        char header[100];
        snprintf(header, sizeof header,
                 "{\"x\":{\"dtype\":\"%s\",\"shape\":[65536],\"data_offsets\":[0,131072]}}",
                 half ? "F16" : "BF16");
        assert_int_equal(safetensors_open(write_raw(-1, header, all, sizeof all), &file), 0);
        /* Infinities and NaN are converted, and refused. */
        assert_reports(safetensors_copy_float(file, "x", shape, 1, out), "expected finite numbers");
        safetensors_close(file);
        for (int i = 0; i < 65536; i++) {
            int fraction_bits = half ? 10 : 7, exponent = (i & 0x7FFF) >> fraction_bits,
                fraction = i & ((1 << fraction_bits) - 1), bias = half ? 15 : 127;
            double expected;
            if (exponent == 2 * bias + 1)
                expected = fraction ? NAN : INFINITY;
            else
                expected = ldexp(fraction + (exponent ? 1 << fraction_bits : 0),
                                 (exponent ? exponent : 1) - bias - fraction_bits);
            if (i & 0x8000) expected = -expected;
            if (isnan(expected))
                assert_true(isnan(out[i]));
            else
                assert_true((double)out[i] == expected && !signbit(out[i]) == !(i & 0x8000));
        }
    }
    assert_int_equal(
        safetensors_open(
            write_raw(-1, "{\"x\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0,4]}}", all,
                      4),
            &file),
        0);
    shape[0] = 1;
    assert_reports(safetensors_copy_float(file, "x", shape, 1, out), "has dtype I32, expected F32");
    safetensors_close(file);
}

static void assert_refused(const char *path, const char *text) {
    struct safetensors *file = (struct safetensors *)1;
    assert_reports(safetensors_open(path, &file), text);
    assert_null(file);
}

/* Like a header of one or two tensors, 8 bytes of data. */
#define ENTRY(name, dtype, shape, offsets)                                                         \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static void test_safetensors_hostile(void **state) {
    (void)state;
    static const char *const headers[][2] = {
        {"", "the header is no JSON"},
        {"{", "the header is no JSON"},
        {"[]", "no JSON object"},
        {"nonsense", "no JSON"},
        {"{\"x\":5}", "'x' is described by no JSON object"},
        {"{\"x\":{}}", "unknown dtype '(none)'"},
        {"{" ENTRY("x", "F31", "[2]", "[0,8]") "}", "unknown dtype 'F31'"},
        {"{" ENTRY("x", "F32", "2", "[0,8]") "}", "the shape of tensor 'x'"},
        {"{" ENTRY("x", "F32", "[-2]", "[0,8]") "}", "dimension 0 of tensor 'x'"},
        {"{" ENTRY("x", "F32", "[2.0]", "[0,8]") "}", "dimension 0 of tensor 'x'"},
        {"{" ENTRY("x", "F32", "[1,1,1,1,1,1,1,1,2]", "[0,8]") "}", "at most 8"},
        {"{" ENTRY("x", "F32", "[4294967296,4294967296]", "[0,8]") "}", "2^64 elements"},
        {"{" ENTRY("x", "F32", "[9223372036854775807]", "[0,8]") "}", "2^64 bytes"},
        {"{" ENTRY("x", "F32", "[4611686018427387906]", "[0,8]") "}", "2^64 bytes"},
        {"{" ENTRY("x", "F32", "[9223372036854775808]", "[0,8]") "}", "too big integer"},
        {"{" ENTRY("x", "F32", "[2]", "8") "}", "data_offsets of tensor 'x'"},
        {"{" ENTRY("x", "F32", "[2]", "[0]") "}", "data_offsets of tensor 'x'"},
        {"{" ENTRY("x", "F32", "[2]", "[-8,0]") "}", "data_offsets of tensor 'x'"},
        {"{" ENTRY("x", "F32", "[2]", "[8,0]") "}", "are 8 to 0"},
        {"{" ENTRY("x", "F32", "[3]", "[0,12]") "}", "are 0 to 12, expected a range within"},
        {"{" ENTRY("x", "F32", "[2]", "[8,16]") "}", "are 8 to 16"},
        {"{" ENTRY("x", "F32", "[2]", "[9223372036854775800,9223372036854775807]") "}", "range"},
        {"{" ENTRY("x", "F32", "[3]", "[0,8]") "}", "has 8 bytes, expected 12"},
        {"{" ENTRY("x", "F32", "[1]", "[4,8]") "}", "begins at byte 4 of the data, expected 0"},
        {"{" ENTRY("x", "F32", "[1]", "[0,4]") "}", "4 bytes follow the last tensor"},
        {"{}", "8 bytes follow the last tensor"},
        {"{" ENTRY("x", "F32", "[2]", "[0,8]") "," ENTRY("y", "F32", "[1]", "[4,8]") "}",
         "'y' begins at byte 4 of the data, expected 8: it overlaps"},
        {"{" ENTRY("x", "F32", "[2]", "[0,8]") "," ENTRY("y", "F32", "[2]", "[0,8]") "}",
         "overlaps"},
        {"{" ENTRY("x", "F32", "[1]", "[0,4]") "," ENTRY("x", "F32", "[1]", "[4,8]") "}",
         "duplicate"},
        {"{" ENTRY("x\\u0000", "F32", "[2]", "[0,8]") "}", "\\u0000"},
    };
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++)
        assert_refused(write_raw(-1, headers[i][0], values, 8), headers[i][1]);
    /* the header's length */
    static const int64_t lengths[] = {INT64_MAX, 100000001, 3 + 8 + 1, 1000};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        assert_refused(write_raw(lengths[i], "{ }", values, 8), "the header's length is");
    uint64_t huge = UINT64_MAX;
    write_bytes(in_scratch("huge"), &huge, 8);
    assert_refused(in_scratch("huge"), "length is 18446744073709551615");
    write_bytes(in_scratch("huge"), &huge, 7);
    assert_refused(in_scratch("huge"), "has 7 bytes, too few");
    write_bytes(in_scratch("huge"), &huge, 0);
    assert_refused(in_scratch("huge"), "has 0 bytes");
    assert_refused(in_scratch("absent"), "No such file");
    assert_refused(scratch, "a directory");
}

/* A good file cut anywhere is refused; with bytes changed it is refused or can be read. */
static void test_safetensors_damaged(void **state) {
    (void)state;
    const struct safetensors_tensor tensors[] = {
        {"model.norm.weight", 1, {4}, values, NULL},
        {"lm_head.weight", 2, {3, 2}, values, NULL},
        {"model.embed_tokens.weight", 2, {2, 2}, values, NULL},
    };
    const char *path = in_scratch("damaged.safetensors");
    assert_int_equal(safetensors_write(path, tensors, 3, "pt"), 0);
    size_t bytes;
    char *good = read_bytes(path, &bytes), *bad = (char *)malloc(bytes);
    struct safetensors *file;
    capture_begin();
    for (size_t n = 0; n < bytes; n++) {
        write_bytes(path, good, n);
        assert_int_equal(safetensors_open(path, &file), -1);
    }
    int opened = 0;
    for (int i = 0; i < 4000; i++) {
        memcpy(bad, good, bytes);
        for (uint32_t changes = 1 + random_below(3); changes > 0; changes--)
            bad[random_below((uint32_t)bytes)] =
                random_below(2) ? (char)random_below(256) : "0123456789[]{},:\"-"[random_below(18)];
        write_bytes(path, bad, bytes);
        if (safetensors_open(path, &file) != 0) continue;
        opened++;
        for (size_t k = 0; k < safetensors_count(file); k++) {
            const struct safetensors_view *view = safetensors_at(file, k);
            float out[16];
            assert_true(view->elements <= 16);
            safetensors_copy_float(file, view->name, view->shape, view->dims, out);
        }
        safetensors_close(file);
    }
    catch_end();
    assert_in_range(opened, 1, 3999);
    free(good);
    free(bad);
}

static void test_safetensors_write_errors(void **state) {
    (void)state;
    const struct safetensors_tensor tensor = {"x", 1, {6}, values, NULL},
                                    bad = {"\xFF", 1, {6}, values, NULL};
    assert_reports(safetensors_write("/dev/full", &tensor, 1, NULL), "No space left");
    assert_reports(safetensors_write(in_scratch("absent/x"), &tensor, 1, NULL), "cannot create");
    assert_reports(safetensors_write(in_scratch("x"), &bad, 1, NULL), "header");
}

/* ---- checkpoints
 * --------------------------------------------------------------------------------- */

static const struct llama_config small = {8,  2,  2,     1,     6,     10,
                                          13, 32, 1e-5f, 10000, false, {0, 0, 0, 0}};

enum { SMALL_TENSORS = 2 * 9 + 3, SMALL_FLOATS = 2000 };

struct model {
    struct named_tensor tensors[SMALL_TENSORS];
    size_t count;
    float memory[SMALL_FLOATS];
};

static double shard_bytes = 1e9; /* of the models that are written */

/* A model whose element i is first + i. */
static struct model *make_model(const struct llama_config *config, float first) {
    struct model *model = (struct model *)calloc(1, sizeof *model);
    model->count = model_tensor_count(config);
    model_tensors(config, model->tensors);
    assert_true(config_parameters(config) <= SMALL_FLOATS);
    float *at = model->memory;
    for (size_t i = 0; i < model->count; i++) {
        model->tensors[i].data = at;
        at += model_tensor_elements(&model->tensors[i]);
    }
    for (int i = 0; i < SMALL_FLOATS; i++) model->memory[i] = first + (float)i;
    return model;
}

static int write_model(const char *directory, const struct llama_config *config, float first,
                       const char *tokenizer) {
    struct model *model = make_model(config, first);
    hf_model_cut(model->tensors, model->count, shard_bytes);
    int status = write_whole_model(directory, config, model->tensors, model->count, tokenizer);
    free(model);
    return status;
}

/* Reads a checkpoint; returns the first element, or -1000 when it cannot be read or the elements
 * are not those of make_model. */
static float read_model(const char *directory) {
    struct llama_config config;
    if (config_read(directory, &config) != 0) return -1000;
    struct model *model = make_model(&config, -1e6f);
    float first = -1000;
    if (hf_model_read(directory, &config, model->tensors, model->count) == 0) {
        first = model->memory[0];
        for (size_t i = 0; i < config_parameters(&config); i++)
            if (model->memory[i] != first + (float)i) first = -1000;
    }
    free(model);
    return first;
}

static void test_parameters_are_the_tensors(void **state) {
    (void)state;
    struct llama_config config = {12, 3, 6, 2, 4, 20, 100, 64, 1e-6f, 5e5f, true, {0, 0, 0, 0}};
    for (int tied = 0; tied < 2; tied++) {
        config.tied = tied;
        struct named_tensor tensors[40];
        size_t count = model_tensor_count(&config), sum = 0;
        assert_int_equal(count, 3 * 9 + 2 + !tied);
        model_tensors(&config, tensors);
        for (size_t i = 0; i < count; i++) sum += model_tensor_elements(&tensors[i]);
        assert_int_equal(sum, config_parameters(&config));
    }
}

static void test_checkpoint_names(void **state) {
    (void)state;
    struct named_tensor t[SMALL_TENSORS];
    model_tensors(&small, t);
    static const struct {
        int i, rows, columns;
        const char *name;
    } expected[] = {
        {0, 13, 8, "model.embed_tokens.weight"},
        {1, 8, 0, "model.layers.0.input_layernorm.weight"},
        {2, 12, 8, "model.layers.0.self_attn.q_proj.weight"},
        {3, 6, 8, "model.layers.0.self_attn.k_proj.weight"},
        {4, 6, 8, "model.layers.0.self_attn.v_proj.weight"},
        {5, 8, 12, "model.layers.0.self_attn.o_proj.weight"},
        {6, 8, 0, "model.layers.0.post_attention_layernorm.weight"},
        {7, 10, 8, "model.layers.0.mlp.gate_proj.weight"},
        {8, 10, 8, "model.layers.0.mlp.up_proj.weight"},
        {9, 8, 10, "model.layers.0.mlp.down_proj.weight"},
        {18, 8, 10, "model.layers.1.mlp.down_proj.weight"},
        {19, 8, 0, "model.norm.weight"},
        {20, 13, 8, "lm_head.weight"},
    };
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        const struct named_tensor *tensor = &t[expected[i].i];
        assert_string_equal(tensor->name, expected[i].name);
        assert_int_equal(tensor->shape[0], expected[i].rows);
        assert_int_equal(tensor->shape[1], expected[i].columns ? expected[i].columns : 1);
        assert_int_equal(tensor->dims, expected[i].columns ? 2 : 1);
    }
}

static int cut(double bytes, struct named_tensor tensors[SMALL_TENSORS]) {
    model_tensors(&small, tensors);
    return hf_model_cut(tensors, SMALL_TENSORS, bytes);
}

/* Every size: consecutive tensors, as many as fit, and never none. */
static void test_cut(void **state) {
    (void)state;
    const double total = 4.0 * (double)config_parameters(&small);
    struct named_tensor t[SMALL_TENSORS];
    assert_int_equal(cut(total, t), 1);
    assert_int_equal(cut(total - 1, t), 2);
    assert_int_equal(cut(1, t), SMALL_TENSORS);
    for (double bytes = 1; bytes <= total; bytes++) {
        const int shards = cut(bytes, t);
        double filled[SMALL_TENSORS] = {0}, written = 0;
        for (int i = 0; i < SMALL_TENSORS; i++) {
            const double more = 4.0 * (double)model_tensor_elements(&t[i]);
            const bool next = i > 0 && t[i].shard != t[i - 1].shard;
            assert_int_equal(t[i].shard, i ? t[i - 1].shard + next : 0);
            if (next) assert_true(filled[t[i - 1].shard] + more > bytes);
            assert_true(filled[t[i].shard] == 0 || filled[t[i].shard] + more <= bytes);
            filled[t[i].shard] += more;
        }
        assert_int_equal(shards, t[SMALL_TENSORS - 1].shard + 1);
        for (int rank = 0; rank < 3; rank++) {
            double mine = 0;
            for (int s = rank; s < shards; s += 3) mine += filled[s];
            assert_true(hf_model_bytes_of_rank(&small, bytes, rank, 3) == mine);
            written += mine;
        }
        assert_true(written == total);
    }
}

/* The same tensors, a valid index, and nothing left of a checkpoint in one file. */
static void test_shards_round_trip(void **state) {
    (void)state;
    const char *directory = in_scratch("shards");
    assert_int_equal(write_model(directory, &small, 5, NULL), 0);
    for (shard_bytes = 1; shard_bytes < 8000; shard_bytes += 397) {
        assert_int_equal(write_model(directory, &small, shard_bytes, NULL), 0);
        assert_true(read_model(directory) == (float)shard_bytes);
        const bool one = shard_bytes >= 4.0 * (double)config_parameters(&small);
        assert_int_equal(exists(in_scratch("shards/model.safetensors")), one);
        assert_int_equal(exists(in_scratch("shards/model.safetensors.index.json")), !one);
    }
    shard_bytes = 400;
    assert_int_equal(write_model(directory, &small, 5, NULL), 0);
    struct named_tensor t[SMALL_TENSORS];
    const int shards = cut(shard_bytes, t);
    json_t *index = json_load_file(in_scratch("shards/model.safetensors.index.json"), 0, NULL);
    json_t *map = json_object_get(index, "weight_map");
    assert_int_equal(json_object_size(map), SMALL_TENSORS);
    for (int i = 0; i < SMALL_TENSORS; i++) {
        char name[HF_MODEL_NAME_BYTES];
        hf_model_shard_name(t[i].shard, shards, name);
        assert_string_equal(json_string_value(json_object_get(map, t[i].name)), name);
    }
    const json_t *metadata = json_object_get(index, "metadata");
    assert_int_equal(json_integer_value(json_object_get(metadata, "total_size")),
                     4 * config_parameters(&small));
    json_decref(index);
    shard_bytes = 1e9;
    assert_int_equal(write_model(directory, &small, 6, NULL), 0);
    assert_true(read_model(directory) == 6);
    assert_false(exists(in_scratch("shards/model.safetensors.index.json")));
}

static void test_checkpoint_round_trip(void **state) {
    (void)state;
    const char *directory = in_scratch("model");
    write_text(in_scratch("tokens"), "a tokenizer");
    assert_int_equal(write_model(directory, &small, 5, in_scratch("tokens")), 0);
    assert_true(read_model(directory) == 5);
    size_t bytes;
    char *text = read_bytes(in_scratch("model/tokenizer.model"), &bytes);
    assert_string_equal(text, "a tokenizer");
    free(text);
    struct stat status;
    mode_t mask = umask(0);
    umask(mask);
    assert_int_equal(stat(directory, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0777 & ~mask);
    write_text(in_scratch("tokens.json"), "{}");
    assert_int_equal(write_model(directory, &small, 5, in_scratch("tokens.json")), 0);
    assert_true(exists(in_scratch("model/tokenizer.json")));
    assert_false(exists(in_scratch("model/tokenizer.model")));
    /* replaced, with a slash at the end, tied, and without the tokenizer */
    struct llama_config tied = small;
    tied.tied = true;
    assert_int_equal(write_model(in_scratch("model///"), &tied, 6, NULL), 0);
    assert_true(read_model(directory) == 6);
    assert_false(exists(in_scratch("model/tokenizer.json")));
    assert_false(exists(in_scratch("model.partial")));
    /* through a symbolic link, which stays one */
    assert_int_equal(symlink("model", in_scratch("link")), 0);
    assert_int_equal(write_model(in_scratch("link"), &small, 7, NULL), 0);
    assert_true(read_model(directory) == 7);
    assert_int_equal(lstat(in_scratch("link"), &status), 0);
    assert_true(S_ISLNK(status.st_mode));
    /* into an empty directory; relative; over what a killed run left */
    assert_int_equal(mkdir(in_scratch("empty"), 0700), 0);
    assert_int_equal(write_model(in_scratch("empty"), &small, 8, NULL), 0);
    assert_true(read_model(in_scratch("empty")) == 8);
    assert_int_equal(mkdir(in_scratch("model.partial"), 0700), 0);
    write_text(in_scratch("model.partial/model.safetensors"), "half");
    assert_int_equal(chdir(scratch), 0);
    assert_int_equal(write_model("model", &small, 9, NULL), 0);
    assert_int_equal(chdir("/"), 0);
    assert_true(read_model(directory) == 9);
    assert_false(exists(in_scratch("model.partial")));
}

static void test_checkpoint_write_errors(void **state) {
    (void)state;
    assert_int_equal(write_model(in_scratch("kept"), &small, 5, NULL), 0);
    /* what is not a checkpoint stays */
    write_text(in_scratch("kept/notes.txt"), "mine");
    assert_reports(write_model(in_scratch("kept"), &small, 6, NULL), "it holds 'notes.txt'");
    assert_true(exists(in_scratch("kept/notes.txt")) && read_model(in_scratch("kept")) == 5);
    unlink(in_scratch("kept/notes.txt"));
    assert_int_equal(mkdir(in_scratch("kept.partial"), 0700), 0);
    write_text(in_scratch("kept.partial/notes.txt"), "mine");
    assert_reports(write_model(in_scratch("kept"), &small, 6, NULL), "it holds 'notes.txt'");
    assert_true(exists(in_scratch("kept.partial/notes.txt")));
    unlink(in_scratch("kept.partial/notes.txt"));
    rmdir(in_scratch("kept.partial"));

    write_text(in_scratch("file"), "x");
    assert_reports(write_model(in_scratch("file"), &small, 6, NULL), "Not a directory");
    assert_reports(write_model(in_scratch("file/model"), &small, 6, NULL), "Not a directory");
    assert_reports(write_model(in_scratch("absent/model"), &small, 6, NULL), "No such file");
    assert_reports(write_model("", &small, 6, NULL), "its name has 0 bytes");
    assert_reports(write_model("/proc/model", &small, 6, NULL), "/proc/model");
    assert_reports(write_model(in_scratch("kept"), &small, 6, in_scratch("absent")), "absent");
    assert_true(read_model(in_scratch("kept")) == 5);
    assert_false(exists(in_scratch("kept.partial")));
}

/* The disk is full after n bytes, for every n: the old checkpoint is still there and whole, and
 * nothing else is. largest: a file of the checkpoint that is larger than the others. */
static void fill_disk(const char *largest) {
    const char *directory = in_scratch("full");
    assert_int_equal(write_model(directory, &small, 5, NULL), 0);
    struct stat status;
    assert_int_equal(stat(in_scratch(largest), &status), 0);
    struct rlimit limit, unlimited;
    getrlimit(RLIMIT_FSIZE, &unlimited);
    limit = unlimited;
    signal(SIGXFSZ, SIG_IGN);
    int failures = 0;
    for (rlim_t n = 0; n < (rlim_t)status.st_size; n += n < 32 ? 1 : 61) {
        limit.rlim_cur = n;
        capture_begin();
        setrlimit(RLIMIT_FSIZE, &limit);
        int result = write_model(directory, &small, 6, NULL);
        setrlimit(RLIMIT_FSIZE, &unlimited);
        catch_end();
        assert_int_equal(result, -1);
        assert_false(exists(in_scratch("full.partial")));
        assert_true(read_model(directory) == 5);
        failures++;
    }
    assert_true(failures > 30);
    signal(SIGXFSZ, SIG_DFL);
    assert_int_equal(write_model(directory, &small, 6, NULL), 0);
    assert_true(read_model(directory) == 6);
}

static void test_checkpoint_on_full_disk(void **state) {
    (void)state;
    fill_disk("full/model.safetensors");
    shard_bytes = 400;
    fill_disk("full/model.safetensors.index.json");
    shard_bytes = 1e9;
}

/* Writes a checkpoint's model.safetensors anew with one tensor changed by `change`. */
static void rewrite(const char *directory,
                    void (*change)(struct safetensors_tensor *list, size_t *count)) {
    struct model *model = make_model(&small, 0);
    struct safetensors_tensor list[SMALL_TENSORS + 2];
    memset(list, 0, sizeof list);
    size_t count = model->count;
    for (size_t i = 0; i < count; i++) {
        struct named_tensor *t = &model->tensors[i];
        list[i] = (struct safetensors_tensor){
            t->name, t->dims, {t->shape[0], t->shape[1]}, t->data, NULL};
    }
    change(list, &count);
    char path[512];
    snprintf(path, sizeof path, "%s/model.safetensors", directory);
    assert_int_equal(safetensors_write(path, list, count, NULL), 0);
    free(model);
}

static void add(struct safetensors_tensor *list, size_t *count, const char *name) {
    list[*count] = (struct safetensors_tensor){name, 1, {3}, values, NULL};
    ++*count;
}

static void drop_one(struct safetensors_tensor *list, size_t *count) {
    list[3] = list[--*count];
}
static void turn_one(struct safetensors_tensor *list, size_t *count) {
    (void)count;
    list[7].shape[0] = 8;
    list[7].shape[1] = 10;
}
static void add_bias(struct safetensors_tensor *list, size_t *count) {
    add(list, count, "model.layers.0.self_attn.q_proj.bias");
}
static void add_layer(struct safetensors_tensor *list, size_t *count) {
    add(list, count, "model.layers.2.input_layernorm.weight");
}
static void add_long(struct safetensors_tensor *list, size_t *count) {
    static char name[300];
    memset(name, 'n', sizeof name - 1);
    add(list, count, name);
}
static void add_redundant(struct safetensors_tensor *list, size_t *count) {
    add(list, count, "model.layers.0.self_attn.rotary_emb.inv_freq");
    add(list, count, "model.layers.1.self_attn.rotary_emb.inv_freq");
}
static void keep(struct safetensors_tensor *list, size_t *count) {
    (void)list, (void)count;
}
static void repeat_table(struct safetensors_tensor *list, size_t *count) {
    list[*count - 1].data = list[0].data;
}
static void drop_embedding(struct safetensors_tensor *list, size_t *count) {
    list[0] = list[--*count];
}

static int try_read(const char *directory, const struct llama_config *config) {
    struct model *model = make_model(config, 0);
    int status = hf_model_read(directory, config, model->tensors, model->count);
    free(model);
    return status;
}

static void test_checkpoint_read_errors(void **state) {
    (void)state;
    const char *directory = in_scratch("wrong");
    assert_int_equal(write_model(directory, &small, 5, NULL), 0);
    rewrite(directory, drop_one);
    assert_reports(try_read(directory, &small),
                   "has no tensor 'model.layers.0.self_attn.k_proj.weight'");
    rewrite(directory, turn_one);
    assert_reports(try_read(directory, &small),
                   "'model.layers.0.mlp.gate_proj.weight' has shape (8, 10), expected (10, 8)");
    rewrite(directory, add_bias);
    assert_reports(try_read(directory, &small), "'model.layers.0.self_attn.q_proj.bias'");
    rewrite(directory, add_layer);
    assert_reports(try_read(directory, &small), "(2 layers, untied)");
    rewrite(directory, add_long);
    assert_reports(try_read(directory, &small), "nnnnn");
    rewrite(directory, add_redundant);
    assert_int_equal(try_read(directory, &small), 0);
    unlink(in_scratch("wrong/model.safetensors"));
    assert_reports(try_read(directory, &small), "model.safetensors': No such file");
}

/* A tied model's file may hold the table twice, or under the classifier's name, as transformers allows. */
static void test_a_tied_table(void **state) {
    (void)state;
    const char *directory = in_scratch("tied");
    struct llama_config tied = small;
    tied.tied = true;
    assert_int_equal(write_model(directory, &small, 5, NULL), 0);
    rewrite(directory, repeat_table);
    assert_int_equal(try_read(directory, &tied), 0);
    rewrite(directory, keep);
    assert_reports(try_read(directory, &tied),
                   "a tensor lm_head.weight that differs from model.embed_tokens.weight");
    rewrite(directory, drop_embedding);
    struct model *model = make_model(&tied, -1e6f), *written = make_model(&small, 0);
    assert_int_equal(hf_model_read(directory, &tied, model->tensors, model->count), 0);
    assert_memory_equal(model->tensors[0].data, written->tensors[written->count - 1].data,
                        13 * 8 * sizeof(float));
    free(written);
    free(model);
    assert_reports(try_read(directory, &small), "has no tensor 'model.embed_tokens.weight'");
}

/* ---- memory runs out
 * ------------------------------------------------------------------------------ */

static int allocations_left;

static void *failing_malloc(size_t bytes) {
    return allocations_left-- > 0 ? malloc(bytes) : NULL;
}

/* Each of jansson's allocations fails in turn, once and for good: an error or a right result. */
static void run_out_of_memory(void) {
    const char *directory = in_scratch("memory");
    assert_int_equal(write_model(directory, &small, 5, NULL), 0);
    bool wrote = false, read = false;
    for (int n = 0; n < 4000 && !(wrote && read); n++) {
        capture_begin();
        json_set_alloc_funcs(failing_malloc, free);
        allocations_left = n;
        float first = read_model(directory);
        allocations_left = n;
        int status = write_model(directory, &small, 5, NULL);
        json_set_alloc_funcs(malloc, free);
        catch_end();
        assert_true(first == 5 || first == -1000);
        read = first == 5;
        wrote = status == 0;
        assert_true(read_model(directory) == 5);
    }
    assert_true(read && wrote);
}

static void test_out_of_memory(void **state) {
    (void)state;
    run_out_of_memory();
    shard_bytes = 4000;
    run_out_of_memory();
    shard_bytes = 1e9;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_safetensors_round_trip),
        cmocka_unit_test(test_safetensors_conversions),
        cmocka_unit_test(test_safetensors_hostile),
        cmocka_unit_test(test_safetensors_damaged),
        cmocka_unit_test(test_safetensors_write_errors),
        cmocka_unit_test(test_parameters_are_the_tensors),
        cmocka_unit_test(test_checkpoint_names),
        cmocka_unit_test(test_cut),
        cmocka_unit_test(test_shards_round_trip),
        cmocka_unit_test(test_checkpoint_round_trip),
        cmocka_unit_test(test_checkpoint_write_errors),
        cmocka_unit_test(test_checkpoint_on_full_disk),
        cmocka_unit_test(test_checkpoint_read_errors),
        cmocka_unit_test(test_a_tied_table),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests_name("checkpoint", tests, make_scratch, remove_scratch);
}
