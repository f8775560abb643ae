/* config.h — the shape of a Llama, and its Hugging Face config.json.
 */
#ifndef LLMC_MODEL_CONFIG_H
#define LLMC_MODEL_CONFIG_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

/* Llama 3's scaling of the rotary embedding ("llama3" in rope_scaling), which stretches slow rotations
 * so that a model can be continued with longer sequences. */
struct rope_scaling {
    float factor;    /* slow rotations are this much slower; 0: no scaling */
    float low, high; /* low_freq_factor, high_freq_factor: slow is below `low` turns in `original`
                      * positions, fast above `high`; between them it is interpolated */
    int original;    /* original_max_position_embeddings */
};

struct llama_config {
    int width;      /* C: of the residual stream */
    int layers;     /* L */
    int heads;      /* H: query heads */
    int kv_heads;   /* K: key/value heads, H % K == 0 */
    int head_size;  /* D: even; H*D need not be C */
    int hidden;     /* F: of the feed-forward layer */
    int vocabulary; /* V: 1 ... 2^20; 0 in a preset: taken from the data */
    int positions;  /* longest sequence */
    float norm_eps;
    float rope_theta;
    bool tied; /* the classifier uses the embedding's table */
    struct rope_scaling rope_scaling;
};

/* Fills *config with the preset of exactly that name. Returns 0, or -1 after reporting which
 * names exist. */
int config_preset(const char *name, struct llama_config *config);

/* The names of all presets, from small to large, with a space between: static text for --help. */
const char *config_preset_names(void);

/* Reads a config.json as Hugging Face writes it and checks it with config_check. `path` is the file
 * or the directory that holds it. Features that change the mathematics and that this program does
 * not have (other rope scaling, biases, another activation, another architecture) are refused by
 * name. Returns 0, or -1 after reporting; *config is then untouched. */
int config_read(const char *path, struct llama_config *config);

/* Writes DIR/config.json, synced to disk, such that LlamaForCausalLM.from_pretrained(DIR) builds
 * the same model. other: an object with the fields of the config.json that the model came from, or NULL;
 * those that *config does not decide are kept. Returns 0, or -1 after reporting. */
int config_write(const char *directory, const struct llama_config *config, const json_t *other);

/* Checks every field: ranges, heads % kv_heads, an even head size, a vocabulary of 1 ... 2^20,
 * and that every tensor has fewer than 2^31 elements. `origin` is the file or preset that an
 * error message names. Returns 0, or -1 after reporting. */
int config_check(const struct llama_config *config, const char *origin);

/* The number of parameters of a checked config; a tied table counts once. */
size_t config_parameters(const struct llama_config *config);

/* Reads the shape that --model names: a config.json, the directory that holds one, or a preset.
 * Only a directory has parameters to begin with. Returns 0, or -1 after reporting. */
int config_of_model(const char *model, struct llama_config *config);

/* Completes a preset with the vocabulary that the user asked for (0: none), or otherwise with
 * the data's (0: unknown), and checks the shape. Returns 0, or -1 after reporting. */
int config_complete(const char *model, int vocabulary, int data_vocabulary,
                    struct llama_config *config);

#endif
