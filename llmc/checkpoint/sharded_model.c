/* sharded_model.c — see sharded_model.h. */
#include "llmc/checkpoint/sharded_model.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/util/file.h"
#include "llmc/log/error.h"

struct shard {
    char *name; /* in the directory */
    char *path;
    struct safetensors *file;
};

struct sharded_model {
    char index_path[FILE_PATH_BYTES];
    json_t *index; /* NULL: one file */
    size_t count;
    struct shard *shard;
};

static int open_one(struct sharded_model *s, const char *directory, const char *name) {
    char path[FILE_PATH_BYTES];
    struct shard *shard = &s->shard[s->count];
    if (file_join(path, directory, name)) return -1;
    shard->name = strdup(name);
    shard->path = strdup(path);
    s->count++;
    if (!shard->name || !shard->path) return log_error("cannot open '%s': out of memory", path);
    if (s->index && access(path, F_OK) != 0)
        return log_error("'%s' names the file '%.100s', which is not beside it: is the download "
                         "complete?",
                         s->index_path, name);
    return safetensors_open(path, &shard->file);
}

/* ---- the index --------------------------------------------------------------------------- */

/* The file of that name if it is open, or NULL. */
static struct shard *find(const struct sharded_model *s, const char *name) {
    for (struct shard *shard = s->shard; shard < s->shard + s->count; shard++)
        if (!strcmp(shard->name, name)) return shard;
    return NULL;
}

/* Returns a name if it is a file in the same directory, since an index is untrusted input. */
static const char *file_name(const json_t *value) {
    const char *name = json_string_value(value);
    return name && *name && *name != '.' && !strchr(name, '/') && strlen(name) < 256 ? name : NULL;
}

/* Opens each file that the map names once. */
static int open_named(struct sharded_model *s, const char *directory, const json_t *map) {
    const char *tensor;
    json_t *value;
    json_object_foreach((json_t *)map, tensor, value) {
        const char *name = file_name(value);
        if (!name)
            return log_error(
                "'%s': tensor '%.100s' is in no file of this directory, expected a name "
                "such as model-00001-of-00002.safetensors",
                s->index_path, tensor);
        if (!find(s, name) && open_one(s, directory, name)) return -1;
    }
    return 0;
}

static const json_t *weight_map(const struct sharded_model *s) {
    return json_object_get(s->index, "weight_map");
}

static int read_index(struct sharded_model *s, const char *directory) {
    struct file_map map;
    json_error_t error;
    if (file_map(s->index_path, &map)) return -1;
    s->index = json_loadb(map.data ? (const char *)map.data : "", map.bytes, JSON_REJECT_DUPLICATES,
                          &error);
    if (file_unmap(&map)) return -1;
    if (!s->index)
        return log_error("'%s' line %d: %s; expected the JSON index of a model's files",
                         s->index_path, error.line, error.text);
    size_t entries = json_object_size(weight_map(s)); /* 0 also if it is no object */
    if (!entries)
        return log_error("'%s' has no weight_map, expected one from tensors to files",
                         s->index_path);
    s->shard = calloc(entries, sizeof *s->shard);
    return s->shard ? open_named(s, directory, weight_map(s))
                    : log_error("cannot read '%s': out of memory", s->index_path);
}

/* ---- public ------------------------------------------------------------------------------ */

/* Reports that there is neither a file nor an index, and names other formats that it finds. */
static int report_absence(const char *directory, const char *single) {
    static const char *const others[] = {"pytorch_model.bin", "pytorch_model.bin.index.json",
                                         "consolidated.00.pth"};
    char path[FILE_PATH_BYTES];
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        if (file_join(path, directory, others[i])) return -1;
        if (access(path, F_OK) == 0)
            return log_error("'%s': No such file, but %s; convert it: from_pretrained and "
                             "save_pretrained of transformers write safetensors",
                             single, others[i]);
    }
    return log_error(
        "'%s': No such file, nor model.safetensors.index.json; expected a Hugging Face model, "
        "or, to train one of this shape from nothing, --model '%s/config.json'",
        single, directory);
}

int sharded_model_open(const char *directory, struct sharded_model **out) {
    char single[FILE_PATH_BYTES];
    int status = -1;
    *out = NULL;
    struct sharded_model *s = calloc(1, sizeof *s);
    if (!s) return log_error("cannot open '%s': out of memory", directory);
    if (file_join(single, directory, "model.safetensors") ||
        file_join(s->index_path, directory, "model.safetensors.index.json"))
        goto close_shards;
    if (access(single, F_OK) == 0) {
        s->shard = calloc(1, sizeof *s->shard);
        status = s->shard ? open_one(s, directory, "model.safetensors")
                          : log_error("cannot open '%s': out of memory", directory);
    } else if (access(s->index_path, F_OK) == 0) {
        status = read_index(s, directory);
    } else {
        report_absence(directory, single);
    }
    if (status) goto close_shards;
    *out = s;
    return 0;

close_shards:
    sharded_model_close(s);
    return -1;
}

void sharded_model_close(struct sharded_model *s) {
    if (!s) return;
    for (size_t i = 0; i < s->count; i++) {
        safetensors_close(s->shard[i].file);
        free(s->shard[i].path);
        free(s->shard[i].name);
    }
    free(s->shard);
    json_decref(s->index);
    free(s);
}

size_t sharded_model_count(const struct sharded_model *s) {
    return s->count;
}

const struct safetensors *sharded_model_file(const struct sharded_model *s, size_t i) {
    return s->shard[i].file;
}

const char *sharded_model_path(const struct sharded_model *s, size_t i) {
    return s->shard[i].path;
}

const struct safetensors *sharded_model_of(const struct sharded_model *s, const char *name) {
    if (!s->index) return s->shard[0].file;
    const char *shard = json_string_value(json_object_get(weight_map(s), name));
    if (shard) return find(s, shard)->file; /* every name was opened */
    log_error("'%s' does not name the tensor '%s', which the model in config.json has",
              s->index_path, name);
    return NULL;
}
