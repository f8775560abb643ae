/* test_sharded_model.c — tests models in several safetensors files: indexes as transformers writes
 * them, and broken or hostile ones. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "llmc/checkpoint/hf_model.h"
#include "llmc/checkpoint/sharded_model.h"
#include "test/support/llmc_test.h"

/* ---- a model in three files --------------------------------------------------------------- */

static const struct llama_config small = {8,  2,  2,     1,     6,     10,
                                          13, 32, 1e-5f, 10000, false, {0, 0, 0, 0}};

enum { TENSORS = 2 * 9 + 3, FLOATS = 2000 };

static const char *const files[] = {"model-00001-of-00003.safetensors",
                                    "model-00002-of-00003.safetensors",
                                    "model-00003-of-00003.safetensors"};

static float memory[FLOATS]; /* element i is i */

/* Tensor i of the model is in file i % 3. */
static void write_shard(int which) {
    struct named_tensor tensors[TENSORS];
    struct safetensors_tensor list[TENSORS];
    size_t count = 0, at = 0;
    char path[512];
    model_tensors(&small, tensors);
    for (int i = 0; i < FLOATS; i++) memory[i] = (float)i;
    for (int i = 0; i < TENSORS; i++) {
        const struct named_tensor *t = &tensors[i];
        const struct safetensors_tensor one = {
            t->name, t->dims, {t->shape[0], t->shape[1]}, memory + at, NULL};
        at += model_tensor_elements(t);
        static char names[TENSORS][96];
        if (i % 3 != which) continue;
        list[count] = one;
        list[count++].name = strcpy(names[i], t->name);
    }
    snprintf(path, sizeof path, "%s/model/%s", scratch, files[which]);
    assert_int_equal(safetensors_write(path, list, count, NULL), 0);
}

static const char *index_path(void) {
    return in_scratch("model/model.safetensors.index.json");
}

/* The index, but `tensor` is said to be in `file`: a JSON value, or NULL for left out. */
static void write_index(int tensor, const char *file) {
    struct named_tensor tensors[TENSORS];
    char text[8192] = "{\"metadata\": {\"total_size\": 1}, \"weight_map\": {";
    const char *comma = "";
    model_tensors(&small, tensors);
    for (int i = 0; i < TENSORS; i++) {
        if (i == tensor && !file) continue;
        size_t used = strlen(text);
        if (i == tensor)
            snprintf(text + used, sizeof text - used, "%s\"%s\": %s", comma, tensors[i].name, file);
        else
            snprintf(text + used, sizeof text - used, "%s\"%s\": \"%s\"", comma, tensors[i].name,
                     files[i % 3]);
        comma = ", ";
    }
    strcat(text, "}}");
    write_text(index_path(), text);
}

static void write_all(void) {
    mkdir(in_scratch("model"), 0700);
    for (int i = 0; i < 3; i++) write_shard(i);
    write_index(-1, NULL);
}

static int read_all(float *out) {
    struct named_tensor tensors[TENSORS];
    model_tensors(&small, tensors);
    for (int i = 0; i < TENSORS; i++) {
        tensors[i].data = out;
        out += model_tensor_elements(&tensors[i]);
    }
    return hf_model_read(in_scratch("model"), &small, tensors, TENSORS);
}

static int try_read(void) {
    float out[FLOATS];
    return read_all(out);
}

/* ---- reading ------------------------------------------------------------------------------ */

static void test_shards_are_read(void **state) {
    (void)state;
    float out[FLOATS];
    write_all();
    assert_int_equal(read_all(out), 0);
    for (size_t i = 0; i < config_parameters(&small); i++) assert_true(out[i] == (float)i);

    struct sharded_model *shards;
    assert_int_equal(sharded_model_open(in_scratch("model"), &shards), 0);
    assert_int_equal(sharded_model_count(shards), 3);
    for (size_t i = 0; i < 3; i++) assert_non_null(strstr(sharded_model_path(shards, i), files[i]));
    assert_ptr_equal(sharded_model_of(shards, "model.embed_tokens.weight"),
                     sharded_model_file(shards, 0));
    assert_ptr_equal(sharded_model_of(shards, "lm_head.weight"), sharded_model_file(shards, 2));
    capture_begin();
    assert_null(sharded_model_of(shards, "lm_head.bias"));
    catch_end();
    assert_caught("does not name the tensor 'lm_head.bias'", __FILE__, __LINE__);
    sharded_model_close(shards);
    sharded_model_close(NULL);
}

static void test_broken_indexes(void **state) {
    (void)state;
    write_all();
    static const struct {
        const char *file, *said;
    } entries[] = {
        {"5", "tensor 'lm_head.weight' is in no file of this directory"},
        {"null", "is in no file of this directory"},
        {"\"\"", "is in no file"},
        {"\"../model/model-00003-of-00003.safetensors\"", "is in no file of this directory"},
        {"\"/etc/passwd\"", "is in no file of this directory"},
        {"\"..\"", "is in no file of this directory"},
        {"\"model-00004-of-00003.safetensors\"",
         "'model-00004-of-00003.safetensors', which is not"},
        {"\"model-00001-of-00003.safetensors\"", "has no tensor 'lm_head.weight'"},
        {NULL, "does not name the tensor 'lm_head.weight'"},
    };
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        write_index(TENSORS - 1, entries[i].file);
        assert_reports(try_read(), entries[i].said);
    }
    static const char *const texts[][2] = {
        {"", "expected the JSON index"},
        {"{", "expected the JSON index"},
        {"[]", "has no weight_map"},
        {"{}", "has no weight_map"},
        {"{\"weight_map\": []}", "has no weight_map"},
        {"{\"weight_map\": {}}", "has no weight_map"},
        {"{\"weight_map\": {\"a\": \"b\", \"a\": \"c\"}}", "duplicate"},
        {"{\"weight_map\": {\"a\\u0000b\": \"c\"}}", "expected the JSON index"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        write_text(index_path(), texts[i][0]);
        assert_reports(try_read(), texts[i][1]);
    }
}

static void test_broken_shards(void **state) {
    (void)state;
    char path[512];
    snprintf(path, sizeof path, "%s/model/%s", scratch, files[1]);
    for (int how = 0; how < 4; how++) {
        write_all();
        if (how == 0) unlink(path);
        if (how == 1) write_text(path, "cut");
        if (how == 2) {
            const struct safetensors_tensor bias = {"model.norm.bias", 1, {3}, memory, NULL};
            assert_int_equal(safetensors_write(path, &bias, 1, NULL), 0);
        }
        if (how == 3) {
            unlink(path);
            mkdir(path, 0700);
        }
        static const char *const said[] = {"is the download complete", "too few for a safetensors",
                                           "a tensor 'model.norm.bias' that the model",
                                           "is a directory"};
        assert_reports(try_read(), said[how]);
        rmdir(path);
    }
}

/* The single file wins, as in transformers; without any it is said what is there instead. */
static void test_which_file(void **state) {
    (void)state;
    float out[FLOATS];
    write_all();
    const struct safetensors_tensor one = {"x", 1, {3}, memory, NULL};
    assert_int_equal(safetensors_write(in_scratch("model/model.safetensors"), &one, 1, NULL), 0);
    assert_reports(read_all(out), "model.safetensors' has a tensor 'x'");
    unlink(in_scratch("model/model.safetensors"));
    assert_int_equal(read_all(out), 0);
    unlink(index_path());
    assert_reports(read_all(out), "No such file, nor model.safetensors.index.json");
    assert_reports(read_all(out), "to train one of this shape from nothing, --model '");
    write_text(in_scratch("model/pytorch_model.bin"), "pickle");
    assert_reports(read_all(out), "but pytorch_model.bin; convert it");
    unlink(in_scratch("model/pytorch_model.bin"));
    write_index(-1, NULL);
    assert_int_equal(read_all(out), 0);
}

/* An index with bytes changed is refused, or the model is read; nothing else. */
static void test_damaged_indexes(void **state) {
    (void)state;
    write_all();
    size_t bytes;
    char *good = read_bytes(index_path(), &bytes), *bad = (char *)malloc(bytes);
    int read = 0;
    capture_begin();
    for (int i = 0; i < 1500; i++) {
        memcpy(bad, good, bytes);
        for (uint32_t changes = 1 + random_below(2); changes > 0; changes--)
            bad[random_below((uint32_t)bytes)] = random_below(2)
                                                     ? (char)random_below(256)
                                                     : "0123456789[]{},:\"-./"[random_below(20)];
        write_bytes(index_path(), bad, i % 3 ? bytes : random_below((uint32_t)bytes));
        read += try_read() == 0;
    }
    catch_end();
    assert_in_range(read, 1, 1499);
    free(good);
    free(bad);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shards_are_read), cmocka_unit_test(test_broken_indexes),
        cmocka_unit_test(test_broken_shards),   cmocka_unit_test(test_which_file),
        cmocka_unit_test(test_damaged_indexes),
    };
    return cmocka_run_group_tests_name("shards", tests, make_scratch, remove_scratch);
}
