/* config.c — presets, config.json, and the checks that both must pass. */
#include "llmc/model/config.h"

#include <jansson.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "llmc/util/file.h"
#include "llmc/log/error.h"

/* ---- presets ---------------------------------------------------------------------------- */

/* 7B, 13B and 70B: Touvron et al. 2023, "Llama 2"; 1.1B: TinyLlama; 260K, 15M, 42M and
 * 110M: llama2.c; 1M and 3M lie between these, for runs of full length (scripts/sweeps/settings/scaling). */
static const struct {
    const char *name;
    struct llama_config config;
} presets[] = {
    /*          C   L   H   K    D      F      V positions   eps     theta  tied */
    {"260K", {64, 5, 8, 4, 8, 172, 0, 512, 1e-5f, 10000, true, {0, 0, 0, 0}}},
    {"1M", {128, 4, 4, 4, 32, 344, 0, 256, 1e-5f, 10000, true, {0, 0, 0, 0}}},
    {"3M", {192, 6, 6, 6, 32, 512, 0, 256, 1e-5f, 10000, true, {0, 0, 0, 0}}},
    {"15M", {288, 6, 6, 6, 48, 768, 0, 1024, 1e-5f, 10000, true, {0, 0, 0, 0}}},
    {"42M", {512, 8, 8, 8, 64, 1376, 0, 1024, 1e-5f, 10000, true, {0, 0, 0, 0}}},
    {"110M", {768, 12, 12, 12, 64, 2048, 0, 1024, 1e-5f, 10000, true, {0, 0, 0, 0}}},
    {"1.1B", {2048, 22, 32, 4, 64, 5632, 0, 2048, 1e-5f, 10000, false, {0, 0, 0, 0}}},
    {"7B", {4096, 32, 32, 32, 128, 11008, 32000, 4096, 1e-5f, 10000, false, {0, 0, 0, 0}}},
    {"13B", {5120, 40, 40, 40, 128, 13824, 32000, 4096, 1e-5f, 10000, false, {0, 0, 0, 0}}},
    {"70B", {8192, 80, 64, 8, 128, 28672, 32000, 4096, 1e-5f, 10000, false, {0, 0, 0, 0}}},
};

const char *config_preset_names(void) {
    return "260K 1M 3M 15M 42M 110M 1.1B 7B 13B 70B";
}

int config_preset(const char *name, struct llama_config *config) {
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++) {
        if (strcmp(name, presets[i].name) != 0) continue;
        *config = presets[i].config;
        return 0;
    }
    return log_error("--model: '%s' is no file, no directory and no preset; presets are %s", name,
                     config_preset_names());
}

/* ---- checks ----------------------------------------------------------------------------- */

static int check_range(const char *origin, const char *field, int value, int least, int most) {
    if (value >= least && value <= most) return 0;
    return log_error("%s: %s is %d, expected %d to %d", origin, field, value, least, most);
}

static int check_elements(const char *origin, const char *tensor, int64_t rows, int64_t columns) {
    if (rows * columns <= INT32_MAX) return 0;
    return log_error("%s: %s would have %lld x %lld elements, expected fewer than 2^31", origin,
                     tensor, (long long)rows, (long long)columns);
}

int config_check(const struct llama_config *c, const char *origin) {
    if (check_range(origin, "hidden_size", c->width, 1, 1 << 17) ||
        check_range(origin, "num_hidden_layers", c->layers, 1, 10000) ||
        check_range(origin, "num_attention_heads", c->heads, 1, 1 << 16) ||
        check_range(origin, "num_key_value_heads", c->kv_heads, 1, c->heads) ||
        check_range(origin, "head_dim", c->head_size, 2, 1 << 12) ||
        check_range(origin, "intermediate_size", c->hidden, 1, 1 << 20) ||
        check_range(origin, "vocab_size", c->vocabulary, 1, 1 << 20) ||
        check_range(origin, "max_position_embeddings", c->positions, 1, 1 << 24))
        return -1;
    if (c->heads % c->kv_heads != 0)
        return log_error(
            "%s: num_attention_heads is %d, expected a multiple of num_key_value_heads, "
            "%d",
            origin, c->heads, c->kv_heads);
    if (c->head_size % 2 != 0)
        return log_error(
            "%s: head_dim is %d, expected an even number (rotary embedding turns pairs)", origin,
            c->head_size);
    if (!(c->norm_eps > 0 && c->norm_eps < 1))
        return log_error("%s: rms_norm_eps is %g, expected a number between 0 and 1", origin,
                         (double)c->norm_eps);
    if (!(c->rope_theta > 0 && isfinite(c->rope_theta)))
        return log_error("%s: rope_theta is %g, expected a positive number", origin,
                         (double)c->rope_theta);
    /* [q | k | v] and [gate | up] are single matrices in backend.h */
    int64_t qkv = ((int64_t)c->heads + 2 * (int64_t)c->kv_heads) * c->head_size;
    if (check_elements(origin, "the embedding", c->vocabulary, c->width) ||
        check_elements(origin, "attention's projection", qkv, c->width) ||
        check_elements(origin, "the feed-forward layer", 2 * (int64_t)c->hidden, c->width))
        return -1;
    return 0;
}

size_t config_parameters(const struct llama_config *c) {
    size_t width = (size_t)c->width, query = (size_t)c->heads * (size_t)c->head_size,
           key = (size_t)c->kv_heads * (size_t)c->head_size;
    size_t attention = 2 * query * width + 2 * key * width;
    size_t feed_forward = 3 * (size_t)c->hidden * width;
    size_t table = (size_t)c->vocabulary * width;
    return (c->tied ? 1 : 2) * table + (size_t)c->layers * (attention + feed_forward + 2 * width) +
           width;
}

/* ---- reading ---------------------------------------------------------------------------- */

/* The file that is read. After the first error, which is reported, `failed` is true and the
 * functions that read fields do nothing. So callers need not check each field. */
struct reader {
    const char *path;
    const json_t *object;
    bool failed;
};

static void refuse(struct reader *r, const char *field, const json_t *value, const char *expected) {
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    log_error("'%s': %s is %.80s, expected %s", r->path, field, text ? text : "?", expected);
    free(text);
    r->failed = true;
}

/* The field's value; NULL if it is absent or null, or after a failure. */
static const json_t *get(const struct reader *r, const char *field) {
    const json_t *value = r->failed ? NULL : json_object_get(r->object, field);
    return json_is_null(value) ? NULL : value;
}

/* fallback < 0: the field is required */
static int get_int(struct reader *r, const char *field, int fallback) {
    const json_t *value = get(r, field);
    if (r->failed) return fallback;
    if (!value && fallback < 0) {
        log_error("'%s': %s is missing, expected an integer", r->path, field);
        r->failed = true;
    }
    if (!value) return fallback;
    if (!json_is_integer(value) || json_integer_value(value) < 1 ||
        json_integer_value(value) > INT32_MAX) {
        refuse(r, field, value, "a positive 32-bit integer");
        return fallback;
    }
    return (int)json_integer_value(value);
}

static float get_float(struct reader *r, const char *field, float fallback) {
    const json_t *value = get(r, field);
    if (!value) return fallback;
    if (!json_is_number(value)) refuse(r, field, value, "a number");
    return (float)json_number_value(value);
}

static bool get_bool(struct reader *r, const char *field, bool fallback) {
    const json_t *value = get(r, field);
    if (!value) return fallback;
    if (!json_is_boolean(value)) refuse(r, field, value, "true or false");
    return json_is_true(value);
}

static void need_string(struct reader *r, const char *field, const char *only) {
    const json_t *value = get(r, field);
    if (!value || (json_is_string(value) && strcmp(json_string_value(value), only) == 0)) return;
    char expected[80];
    snprintf(expected, sizeof expected, "\"%s\", the only one this program has", only);
    refuse(r, field, value, expected);
}

static void need_false(struct reader *r, const char *field) {
    if (get_bool(r, field, false))
        refuse(r, field, json_true(), "false: this program has no biases");
}

static void need_number(struct reader *r, const char *field, double only, const char *expected) {
    const json_t *value = get(r, field);
    if (value && !(json_is_number(value) && json_number_value(value) == only))
        refuse(r, field, value, expected);
}

static void need_absent(struct reader *r, const char *field, const char *expected) {
    const json_t *value = get(r, field);
    if (value) refuse(r, field, value, expected);
}

/* The fields of Llama 3's scaling, which are all required. */
static void get_llama3(struct reader *r, const char *field, struct rope_scaling *s) {
    s->factor = get_float(r, "factor", 0);
    s->low = get_float(r, "low_freq_factor", 0);
    s->high = get_float(r, "high_freq_factor", 0);
    s->original = get_int(r, "original_max_position_embeddings", -1);
    if (!r->failed && !(s->factor >= 1 && s->low > 0 && s->high > s->low && isfinite(s->factor) &&
                        isfinite(s->high)))
        refuse(r, field, r->object,
               "factor of 1 or more, and 0 < low_freq_factor < high_freq_factor");
}

/* rope_scaling (transformers 4) or rope_parameters (transformers 5): an object that may contain
 * theta. It asks for the plain rotary embedding or for Llama 3's. */
static void get_rope(struct reader *r, const char *field, struct llama_config *c) {
    const json_t *object = get(r, field);
    if (!object) return;
    if (!json_is_object(object)) {
        refuse(r, field, object, "null or an object with rope_type");
        return;
    }
    const json_t *type = json_object_get(object, "rope_type");
    if (!type) type = json_object_get(object, "type");
    const char *name = json_string_value(type);
    const bool llama3 = name && !strcmp(name, "llama3");
    const bool plain = type ? name && !strcmp(name, "default") : !json_object_get(object, "factor");
    if (!plain && !llama3) {
        refuse(r, field, object,
               "rope_type \"default\" or \"llama3\": this program has no other rope scaling");
        return;
    }
    struct reader inner = {r->path, object, false};
    c->rope_theta = get_float(&inner, "rope_theta", c->rope_theta);
    need_number(&inner, "partial_rotary_factor", 1, "1");
    if (llama3) get_llama3(&inner, field, &c->rope_scaling);
    r->failed = inner.failed;
}

/* Other classes compute something else from the same tensors. LLaMAForCausalLM is an old name of Llama's. */
static void need_llama(struct reader *r) {
    const json_t *classes = get(r, "architectures");
    const char *name = json_string_value(json_array_get(classes, 0));
    if (json_array_size(classes) > 1 ||
        (classes && (!name || strcasecmp(name, "LlamaForCausalLM"))))
        refuse(r, "architectures", classes,
               "[\"LlamaForCausalLM\"], the only one this program has");
}

/* Settings with which relatives of Llama compute something else from the same tensors. */
static void need_no_relative(struct reader *r) {
    static const char *const fields[] = {"attention_multiplier",
                                         "residual_multiplier",
                                         "embedding_multiplier",
                                         "logits_scaling",
                                         "final_logit_softcapping",
                                         "attn_logit_softcapping",
                                         "clip_qkv",
                                         "no_rope_layers",
                                         "scale_emb"};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        need_absent(r, fields[i], "none, as in a Llama");
}

/* A window that is as long as the model's sequences hides nothing. */
static void need_no_window(struct reader *r, int positions) {
    const json_t *value = get(r, "sliding_window");
    if (value && get_bool(r, "use_sliding_window", true) &&
        !(json_is_integer(value) && json_integer_value(value) >= positions))
        refuse(r, "sliding_window", value,
               "none: this program's attention sees all tokens before it");
}

static int read_fields(struct reader *r, struct llama_config *c) {
    if (!get(r, "model_type"))
        return log_error("'%s': model_type is missing, expected \"llama\"", r->path);
    need_string(r, "model_type", "llama");
    need_llama(r);
    need_no_relative(r);
    need_string(r, "hidden_act", "silu");
    need_false(r, "attention_bias");
    need_false(r, "mlp_bias");
    need_number(r, "attention_dropout", 0, "0: this program has no dropout");
    need_absent(r, "quantization_config", "no quantisation: convert the model to float first");
    need_number(r, "partial_rotary_factor", 1, "1");
    /* Absent fields have the defaults of transformers' LlamaConfig. */
    c->width = get_int(r, "hidden_size", -1);
    c->layers = get_int(r, "num_hidden_layers", -1);
    c->heads = get_int(r, "num_attention_heads", -1);
    c->kv_heads = get_int(r, "num_key_value_heads", c->heads);
    if (!r->failed && !get(r, "head_dim") && c->width % c->heads != 0)
        return log_error("'%s': hidden_size is %d, expected a multiple of num_attention_heads, %d "
                         "(or head_dim)",
                         r->path, c->width, c->heads);
    c->head_size = get_int(r, "head_dim", r->failed ? 0 : c->width / c->heads);
    c->hidden = get_int(r, "intermediate_size", -1);
    c->vocabulary = get_int(r, "vocab_size", -1);
    c->positions = get_int(r, "max_position_embeddings", 2048);
    need_no_window(r, c->positions);
    c->norm_eps = get_float(r, "rms_norm_eps", 1e-6f);
    c->rope_theta = get_float(r, "rope_theta", 10000);
    memset(&c->rope_scaling, 0, sizeof c->rope_scaling);
    get_rope(r, "rope_scaling", c);
    get_rope(r, "rope_parameters", c);
    c->tied = get_bool(r, "tie_word_embeddings", false);
    return r->failed ? -1 : 0;
}

int config_read(const char *path, struct llama_config *config) {
    char in_directory[FILE_PATH_BYTES];
    struct file_map map;
    if (file_is_directory(path)) {
        if (file_join(in_directory, path, "adapter_config.json")) return -1;
        if (!access(in_directory, F_OK))
            return log_error(
                "'%s' has an adapter (adapter_config.json), which this program does not "
                "apply: merge it into the model first (merge_and_unload of peft)",
                path);
        if (file_join(in_directory, path, "config.json")) return -1;
        if (access(in_directory, F_OK))
            return log_error("'%s' has no config.json: expected a Hugging Face Llama directory, or "
                             "checkpoint-N of a run's --out",
                             path);
        path = in_directory;
    }
    if (file_map(path, &map)) return -1;
    json_error_t error;
    json_t *root = json_loadb(map.data ? (const char *)map.data : "", map.bytes,
                              JSON_REJECT_DUPLICATES, &error);
    int status = -1;
    struct llama_config result;
    struct reader reader = {path, root, false};
    if (!root)
        log_error("'%s' line %d: %s; expected a Hugging Face model's JSON", path, error.line,
                  error.text);
    else if (!json_is_object(root))
        log_error("'%s' holds no JSON object, expected a Hugging Face model's settings", path);
    else
        status = read_fields(&reader, &result);
    if (status == 0) status = config_check(&result, path);
    if (status == 0 && !file_is_lost(&map)) *config = result;
    json_decref(root);
    return file_unmap(&map) ? -1 : status;
}

/* ---- writing ---------------------------------------------------------------------------- */

/* The shortest decimal number that is this float: 1e-05, not 9.99999975e-06 */
static double shortest(float value) {
    char text[32];
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)value);
        if (strtof(text, NULL) == value) break;
    }
    return strtod(text, NULL);
}

/* As rope_scaling in config.json: null, or Llama 3's fields. */
static json_t *scaling_to_json(const struct rope_scaling *s) {
    if (!s->factor) return json_null();
    return json_pack("{s:s, s:f, s:f, s:f, s:i}", "rope_type", "llama3", "factor",
                     shortest(s->factor), "low_freq_factor", shortest(s->low), "high_freq_factor",
                     shortest(s->high), "original_max_position_embeddings", s->original);
}

/* Fields whose values *config and this program decide. */
static json_t *decided_to_json(const struct llama_config *c) {
    json_t *size = json_pack("{s:[s], s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i}",
                             "architectures", "LlamaForCausalLM", "model_type", "llama",
                             "torch_dtype", "float32", "hidden_size", c->width, "num_hidden_layers",
                             c->layers, "num_attention_heads", c->heads, "num_key_value_heads",
                             c->kv_heads, "head_dim", c->head_size, "intermediate_size", c->hidden,
                             "vocab_size", c->vocabulary, "max_position_embeddings", c->positions);
    json_t *mathematics =
        json_pack("{s:f, s:f, s:o, s:b, s:s, s:b, s:b, s:f}", "rms_norm_eps", shortest(c->norm_eps),
                  "rope_theta", shortest(c->rope_theta), "rope_scaling",
                  scaling_to_json(&c->rope_scaling), "tie_word_embeddings", c->tied, "hidden_act",
                  "silu", "attention_bias", 0, "mlp_bias", 0, "attention_dropout", 0.0);
    if (!json_object_update_new(size, mathematics)) return size;
    json_decref(size);
    return NULL;
}

/* Fields of `other` that say the same as decided ones do, in the words of transformers 5, or what this
 * program does not write. */
static bool is_replaced(const char *field) {
    static const char *const replaced[] = {"dtype", "rope_parameters", "quantization_config"};
    for (size_t i = 0; i < sizeof replaced / sizeof *replaced; i++)
        if (!strcmp(field, replaced[i])) return true;
    return false;
}

static json_t *to_json(const struct llama_config *c, const json_t *other) {
    json_t *all = decided_to_json(c);
    json_t *rest = json_pack("{s:f, s:i, s:i, s:b}", "initializer_range", 0.02, "bos_token_id", 1,
                             "eos_token_id", 2, "use_cache", 1);
    bool failed = !all || !rest;
    const char *field;
    json_t *value;
    json_object_foreach((json_t *)other, field, value) {
        if (!failed && !json_object_get(all, field) && !is_replaced(field))
            failed = json_object_set(rest, field, value) != 0;
    }
    failed |= json_object_update(all, rest) != 0;
    json_decref(rest);
    if (!failed) return all;
    json_decref(all);
    return NULL;
}

int config_write(const char *directory, const struct llama_config *config, const json_t *other) {
    char path[FILE_PATH_BYTES];
    if (file_join(path, directory, "config.json")) return -1;
    json_t *root = to_json(config, other);
    /* 9 digits identify a float exactly */
    char *text = root ? json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(9)) : NULL;
    json_decref(root);
    if (!text) return log_error("cannot write '%s': out of memory", path);
    const size_t bytes = strlen(text);
    text[bytes] = '\n'; /* replaces the terminating zero */
    const int status = file_write_bytes(path, text, bytes + 1);
    free(text);
    return status;
}

/* ---- a run's model ----------------------------------------------------------------------- */

int config_of_model(const char *model, struct llama_config *c) {
    return access(model, F_OK) ? config_preset(model, c) : config_read(model, c);
}

int config_complete(const char *model, int vocabulary, int data_vocabulary,
                    struct llama_config *c) {
    if (!c->vocabulary) c->vocabulary = vocabulary ? vocabulary : data_vocabulary;
    if (!c->vocabulary)
        return log_error("the data does not name its vocabulary size: give --vocab-size");
    if (data_vocabulary > c->vocabulary)
        return log_error("the data was made with a vocabulary of %d, model %s has %d",
                         data_vocabulary, model, c->vocabulary);
    return config_check(c, model);
}
