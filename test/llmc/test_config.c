/* test_config.c — tests presets and config.json: reading, writing, and refusing bad files. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "llmc/model/config.h"
#include "test/support/llmc_test.h"

static void assert_same_config(const struct llama_config *a, const struct llama_config *b) {
    assert_int_equal(a->width, b->width);
    assert_int_equal(a->layers, b->layers);
    assert_int_equal(a->heads, b->heads);
    assert_int_equal(a->kv_heads, b->kv_heads);
    assert_int_equal(a->head_size, b->head_size);
    assert_int_equal(a->hidden, b->hidden);
    assert_int_equal(a->vocabulary, b->vocabulary);
    assert_int_equal(a->positions, b->positions);
    assert_true(a->norm_eps == b->norm_eps);
    assert_true(a->rope_theta == b->rope_theta);
    assert_memory_equal(&a->rope_scaling, &b->rope_scaling, sizeof a->rope_scaling);
    assert_int_equal(a->tied, b->tied);
}

static void test_presets(void **state) {
    (void)state;
    static const struct {
        const char *name;
        size_t parameters; /* with vocabulary 32000 where the preset leaves it open */
    } expected[] = {
        {"260K", 64 * 32000 + 5 * (64 * 192 + 3 * 64 * 172 + 128) + 64},
        {"1M", 0},
        {"3M", 192 * 32000 + 6 * (4 * 192 * 192 + 3 * 192 * 512 + 2 * 192) + 192},
        {"15M", 15191712}, /* llama2.c's stories15M */
        {"42M", 41689600}, /* stories42M */
        {"110M", 109529856} /* stories110M */,
        {"1.1B", 1100048384}, /* TinyLlama/TinyLlama-1.1B */
        {"7B", 6738415616},   /* meta-llama/Llama-2-7b-hf */
        {"13B", 13015864320}, /* meta-llama/Llama-2-13b-hf */
        {"70B", 68976648192}, /* meta-llama/Llama-2-70b-hf */
    };
    const char *names = config_preset_names();
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        const char *name = expected[i].name;
        struct llama_config config;
        assert_int_equal(config_preset(name, &config), 0);
        assert_int_equal(strncmp(names, name, strlen(name)), 0); /* --help names it, in order */
        names += strlen(name) + (names[strlen(name)] == ' ');
        bool open = config.vocabulary == 0;
        assert_int_equal(open, i < 7);
        if (open) assert_reports(config_check(&config, name), "vocab_size is 0");
        if (open) config.vocabulary = 32000;
        assert_int_equal(config_check(&config, name), 0);
        if (expected[i].parameters) {
            assert_int_equal(config_parameters(&config), expected[i].parameters);
        }
    }
    assert_int_equal(*names, 0);
    struct llama_config config;
    assert_reports(config_preset("8B", &config),
                   "'8B' is no file, no directory and no preset; presets are 260K 1M 3M 15M");
}

static void test_config_round_trip(void **state) {
    (void)state;
    const struct llama_config configs[] = {
        {64, 5, 8, 4, 8, 172, 2048, 512, 1e-5f, 10000, true, {0, 0, 0, 0}},
        {48, 1, 4, 1, 10, 100, 1 << 20, 1, 1e-6f, 500000, false, {8, 1, 4, 8192}},
        {1, 1, 1, 1, 2, 1, 1, 1 << 24, 0.123456789f, 1.2345678e-7f, false, {0, 0, 0, 0}},
    };
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        struct llama_config back;
        assert_int_equal(config_write(scratch, &configs[i], NULL), 0);
        assert_int_equal(config_read(scratch, &back), 0);
        assert_same_config(&configs[i], &back);
        assert_int_equal(config_of_model(in_scratch("config.json"), &back), 0); /* the file alone */
        assert_same_config(&configs[i], &back);
    }
    size_t bytes;
    assert_int_equal(config_write(scratch, &configs[0], NULL), 0);
    char *text = read_bytes(in_scratch("config.json"), &bytes);
    assert_non_null(strstr(text, "\"rms_norm_eps\": 1e-5,"));
    assert_non_null(strstr(text, "\"architectures\": [\n    \"LlamaForCausalLM\""));
    free(text);
    assert_reports(config_write(in_scratch("absent"), &configs[0], NULL), "cannot create");
}

/* Reads a config.json of this text. */
static int read_config(const char *text, struct llama_config *config) {
    write_text(in_scratch("config.json"), text);
    return config_read(scratch, config);
}

#define REQUIRED                                                                                   \
    "\"model_type\": \"llama\", \"hidden_size\": 64, \"num_hidden_layers\": 2, "                   \
    "\"num_attention_heads\": 4, \"intermediate_size\": 128, \"vocab_size\": 1000"

static void test_config_of_transformers(void **state) {
    (void)state;
    struct llama_config config;
    /* defaults for what older files leave out */
    assert_int_equal(read_config("{" REQUIRED "}", &config), 0);
    assert_same_config(&config,
                       &(struct llama_config){
                           64, 2, 4, 4, 16, 128, 1000, 2048, 1e-6f, 10000, false, {0, 0, 0, 0}});
    /* transformers 4, everything set; what does not matter here is passed over */
    assert_int_equal(
        read_config("{" REQUIRED ", \"num_key_value_heads\": 2, \"head_dim\": 24, "
                    "\"max_position_embeddings\": 4096, \"rms_norm_eps\": 1e-5, "
                    "\"rope_theta\": 500000.0, \"rope_scaling\": null, \"hidden_act\": \"silu\", "
                    "\"attention_bias\": false, \"mlp_bias\": false, "
                    "\"tie_word_embeddings\": true, \"torch_dtype\": \"float16\", "
                    "\"eos_token_id\": [1, 2], \"unheard_of\": {\"a\": [1]}}",
                    &config),
        0);
    assert_same_config(&config,
                       &(struct llama_config){
                           64, 2, 4, 2, 24, 128, 1000, 4096, 1e-5f, 500000, true, {0, 0, 0, 0}});
    /* transformers 5 */
    assert_int_equal(read_config("{" REQUIRED ", \"head_dim\": null, \"rope_parameters\": "
                                 "{\"rope_theta\": 1000000, \"rope_type\": \"default\"}}",
                                 &config),
                     0);
    assert_true(config.rope_theta == 1000000);
    assert_int_equal(config.head_size, 16);
    assert_int_equal(
        read_config("{" REQUIRED ", \"rope_scaling\": {\"type\": \"default\"}}", &config), 0);
}

static void test_config_refusals(void **state) {
    (void)state;
    /* what is added to REQUIRED, and what the report names */
    static const char *const extra[][2] = {
        {"\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2.0}", "rope_scaling is {\"type\""},
        {"\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8}",
         "original_max_position_embeddings is missing"},
        {"\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 4, "
         "\"high_freq_factor\": 4, \"original_max_position_embeddings\": 32}",
         "expected factor of 1 or more, and 0 < low_freq_factor < high_freq_factor"},
        {"\"rope_scaling\": {\"factor\": 8}", "no other rope scaling"},
        {"\"rope_scaling\": 2", "rope_scaling is 2"},
        {"\"rope_parameters\": {\"rope_type\": \"yarn\", \"rope_theta\": 1e4}", "yarn"},
        {"\"rope_parameters\": {\"rope_theta\": \"many\"}", "rope_theta is \"many\""},
        {"\"rope_parameters\": {\"partial_rotary_factor\": 0.5}", "partial_rotary_factor is 0.5"},
        {"\"partial_rotary_factor\": 0.25", "partial_rotary_factor is 0.25"},
        {"\"attention_bias\": true", "attention_bias is true"},
        {"\"attention_dropout\": 0.5", "attention_dropout is 0.5, expected 0"},
        {"\"attention_dropout\": \"0\"", "attention_dropout is \"0\", expected 0"},
        {"\"mlp_bias\": true", "mlp_bias is true"},
        {"\"mlp_bias\": 1", "mlp_bias is 1, expected true or false"},
        {"\"hidden_act\": \"gelu\"", "hidden_act is \"gelu\", expected \"silu\""},
        {"\"quantization_config\": {\"bits\": 4}", "quantization_config"},
        {"\"architectures\": [\"MistralForCausalLM\"]",
         "architectures is [\"MistralForCausalLM\"], expected [\"LlamaForCausalLM\"]"},
        {"\"architectures\": [\"LlamaForCausalLM\", \"Other\"]", "architectures is"},
        {"\"logits_scaling\": 8", "logits_scaling is 8, expected none, as in a Llama"},
        {"\"no_rope_layers\": [1]", "no_rope_layers is [1]"},
        {"\"sliding_window\": 100", "sliding_window is 100, expected none"},
        {"\"num_key_value_heads\": 3", "num_attention_heads is 4, expected a multiple of"},
        {"\"num_key_value_heads\": 8", "num_key_value_heads is 8, expected 1 to 4"},
        {"\"num_key_value_heads\": 0", "num_key_value_heads is 0"},
        {"\"head_dim\": 15", "head_dim is 15, expected an even"},
        {"\"head_dim\": -16", "head_dim is -16"},
        {"\"head_dim\": 100000", "head_dim is 100000"},
        {"\"max_position_embeddings\": 99999999", "max_position_embeddings is 99999999"},
        {"\"rms_norm_eps\": 0", "rms_norm_eps is 0"},
        {"\"rms_norm_eps\": -1e-5", "rms_norm_eps is -1e-05"},
        {"\"rms_norm_eps\": \"small\"", "rms_norm_eps is \"small\", expected a number"},
        {"\"rope_theta\": 0", "rope_theta is 0"},
        {"\"rope_theta\": 1e300", "rope_theta is inf"},
        {"\"tie_word_embeddings\": \"no\"", "tie_word_embeddings is \"no\""},
        {"\"vocab_size\": 7", "duplicate"},
    };
    char text[1000];
    struct llama_config config;
    for (size_t i = 0; i < sizeof extra / sizeof *extra; i++) {
        snprintf(text, sizeof text, "{" REQUIRED ", %s}", extra[i][0]);
        assert_reports(read_config(text, &config), extra[i][1]);
    }
    /* whole files */
    static const char *const whole[][2] = {
        {"", "config.json' line 1"},
        {"{", "line 1"},
        {"[]", "holds no JSON object"},
        {"{\"model_type\": \"mistral\"}", "model_type is \"mistral\", expected \"llama\""},
        {"{\"model_type\": 5}", "model_type is 5"},
        {"{}", "model_type is missing"},
        {"{\"model_type\": \"llama\"}", "hidden_size is missing"},
        {"{\"model_type\": \"llama\", \"hidden_size\": 9223372036854775807}", "32-bit"},
        {"{\"model_type\": \"llama\", \"hidden_size\": 9223372036854775808}", "too big integer"},
        {"{\"model_type\": \"llama\", \"hidden_size\": -64}", "hidden_size is -64"},
        {"{\"model_type\": \"llama\", \"hidden_size\": 64.0}", "hidden_size is 64.0"},
        {"{\"model_type\": \"llama\", \"hidden_size\": 64, \"num_hidden_layers\": 0}",
         "num_hidden_layers is 0"},
        {"{\"model_type\": \"llama\", \"hidden_size\": 65, \"num_hidden_layers\": 2, "
         "\"num_attention_heads\": 4}",
         "hidden_size is 65, expected a multiple of num_attention_heads"},
        {"{\"model_type\": \"llama\", \"hidden_size\": 131072, \"num_hidden_layers\": 2, "
         "\"num_attention_heads\": 4, \"head_dim\": 2, \"intermediate_size\": 1048576, "
         "\"vocab_size\": 1000}",
         "the feed-forward layer would have 2097152 x 131072"},
        {"{\"model_type\": \"llama\", \"hidden_size\": 64, \"num_hidden_layers\": 2, "
         "\"num_attention_heads\": 4, \"intermediate_size\": 128, \"vocab_size\": 1048577}",
         "vocab_size is 1048577, expected 1 to 1048576"},
    };
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++)
        assert_reports(read_config(whole[i][0], &config), whole[i][1]);
    assert_reports(config_read(in_scratch("absent"), &config), "absent': No such file");
    char deep[5001];
    memset(deep, '[', 5000); /* nested beyond any stack */
    deep[5000] = '\0';
    assert_reports(read_config(deep, &config), "maximum parsing depth");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_presets),
        cmocka_unit_test(test_config_round_trip),
        cmocka_unit_test(test_config_of_transformers),
        cmocka_unit_test(test_config_refusals),
    };
    return cmocka_run_group_tests_name("config", tests, make_scratch, remove_scratch);
}
