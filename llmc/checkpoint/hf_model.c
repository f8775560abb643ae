/* hf_model.c — reads a Hugging Face directory, and writes one as a whole or not at all. */
#include "llmc/checkpoint/hf_model.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <jansson.h>
#include <libgen.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/util/file.h"
#include "llmc/log/error.h"
#include "llmc/log/terminal.h"
#include "llmc/checkpoint/safetensors.h"
#include "llmc/checkpoint/sharded_model.h"

/* All files that a checkpoint may contain. A directory with any other file is never replaced or
 * removed. */
static const char *const file_patterns[] = {"config.json",
                                            "model.safetensors",
                                            "trainer.json",
                                            "model.safetensors.index.json",
                                            "model-[0-9]*-of-[0-9]*.safetensors",
                                            "optimizer-[0-9]*-of-[0-9]*.safetensors",
                                            "files-[0-9]*-of-[0-9]*.json"};

static bool is_known(const char *name) {
    for (size_t i = 0; i < sizeof file_patterns / sizeof *file_patterns; i++)
        if (fnmatch(file_patterns[i], name, 0) == 0) return true;
    return carried_is_file(name);
}

/* ---- shards ------------------------------------------------------------------------------ */

int hf_model_cut(struct named_tensor *tensors, size_t count, double bytes) {
    double filled = 0;
    int shard = 0;
    for (size_t i = 0; i < count; i++) {
        const double more = 4.0 * (double)model_tensor_elements(&tensors[i]);
        if (filled > 0 && filled + more > bytes) shard++, filled = 0;
        filled += more;
        tensors[i].shard = shard;
    }
    return shard + 1;
}

double hf_model_bytes_of_rank(const struct llama_config *config, double shard_bytes, int rank,
                              int ranks) {
    const size_t count = model_tensor_count(config);
    struct named_tensor *tensors = calloc(count, sizeof *tensors);
    double bytes = 0;
    if (!tensors) return 4.0 * (double)config_parameters(config); /* at most */
    model_tensors(config, tensors);
    hf_model_cut(tensors, count, shard_bytes);
    for (size_t i = 0; i < count; i++)
        if (tensors[i].shard % ranks == rank)
            bytes += 4.0 * (double)model_tensor_elements(&tensors[i]);
    free(tensors);
    return bytes;
}

void hf_model_shard_name(int shard, int shards, char name[HF_MODEL_NAME_BYTES]) {
    if (shards > 1)
        snprintf(name, HF_MODEL_NAME_BYTES, "model-%05d-of-%05d.safetensors", shard + 1, shards);
    else
        snprintf(name, HF_MODEL_NAME_BYTES, "model.safetensors");
}

/* ---- reading ---------------------------------------------------------------------------- */

/* Tensors that some programs add and that contain no parameter. transformers ignores them as
 * well. */
static bool is_redundant(const char *name, const struct llama_config *config) {
    static const char inverse_frequencies[] = ".rotary_emb.inv_freq"; /* computed from rope_theta */
    size_t length = strlen(name), tail = sizeof inverse_frequencies - 1;
    if (length > tail && strcmp(name + length - tail, inverse_frequencies) == 0) return true;
    return config->tied && strcmp(name, "lm_head.weight") == 0;
}

/* Reports the first tensor of the file that the model does not have. */
static int check_unknown(const struct safetensors *file, const char *path,
                         const struct llama_config *config, const struct named_tensor *tensors,
                         size_t count) {
    json_t *known = json_object();
    int status = 0;
    for (size_t i = 0; i < count && !status; i++)
        if (json_object_set_new(known, tensors[i].name, json_true()))
            status = log_error("cannot read '%s': out of memory", path);
    for (size_t i = 0; i < safetensors_count(file) && !status; i++) {
        const char *name = safetensors_at(file, i)->name;
        if (!json_object_get(known, name) && !is_redundant(name, config))
            status =
                log_error("'%s' has a tensor '%.100s' that the model in config.json (%d layers, "
                          "%s) does not have",
                          path, name, config->layers, config->tied ? "tied" : "untied");
    }
    json_decref(known);
    return status;
}

/* ---- a tied table ---- */

static const char embedding[] = "model.embed_tokens.weight", head[] = "lm_head.weight";

static const struct safetensors_view *find(const struct sharded_model *shards, const char *name) {
    const struct safetensors_view *found = NULL;
    for (size_t i = 0; i < sharded_model_count(shards) && !found; i++)
        found = safetensors_find(sharded_model_file(shards, i), name);
    return found;
}

/* The name under which a tensor is stored. Some programs store a tied table as the classifier's alone. */
static const char *stored_name(const struct sharded_model *shards,
                               const struct llama_config *config, const char *name) {
    const bool other = config->tied && !strcmp(name, embedding) && !find(shards, embedding);
    return other && find(shards, head) ? head : name;
}

/* If both are stored, they must be the same table: with another one the model is not tied. */
static int check_head(const struct sharded_model *shards, const struct llama_config *config,
                      const char *directory) {
    const struct safetensors_view *e = find(shards, embedding), *h = find(shards, head);
    if (!config->tied || !e || !h) return 0;
    if (e->bytes == h->bytes && !strcmp(e->dtype, h->dtype) && !memcmp(e->data, h->data, e->bytes))
        return 0;
    return log_error("'%s' has a tensor %s that differs from %s, but its config.json says "
                     "tie_word_embeddings true; set it to false to use both, or remove %s",
                     directory, head, embedding, head);
}

/* A progress line, which is drawn again while a large model is read. */
enum { LARGE = 1000000000 };

static void show(const char *directory, double done, double total) {
    char line[FILE_PATH_BYTES] = "";
    if (!hf_model_shows_progress || total < LARGE) return;
    if (done < total)
        snprintf(line, sizeof line, "reading %.3000s: %3.0f%% of %.1f GB", directory,
                 100 * done / total, total / 1e9);
    terminal_redraw(stdout, line);
}

bool hf_model_shows_progress = false;

int hf_model_read(const char *directory, const struct llama_config *config,
                  const struct named_tensor *tensors, size_t count) {
    struct sharded_model *shards;
    double done = 0, total = 0;
    for (size_t i = 0; i < count; i++)
        if (tensors[i].data) total += 4.0 * (double)model_tensor_elements(&tensors[i]);
    if (sharded_model_open(directory, &shards)) return -1;
    int status = 0;
    for (size_t i = 0; i < sharded_model_count(shards) && status == 0; i++) {
        status = check_unknown(sharded_model_file(shards, i), sharded_model_path(shards, i), config,
                               tensors, count);
    }
    if (!status) status = check_head(shards, config, directory);
    for (size_t i = 0; i < count && status == 0; i++) {
        const struct named_tensor *t = &tensors[i];
        const int64_t shape[2] = {t->shape[0], t->shape[1]};
        if (!t->data) continue;
        const char *name = stored_name(shards, config, t->name);
        const struct safetensors *file = sharded_model_of(shards, name);
        show(directory, done, total);
        status = file ? safetensors_copy_float(file, name, shape, t->dims, t->data) : -1;
        done += 4.0 * (double)model_tensor_elements(t);
    }
    show(directory, total, total);
    sharded_model_close(shards);
    return status;
}

/* ---- writing ---------------------------------------------------------------------------- */

/* Reports a directory at `path` that contains other files than a checkpoint. It is no error if
 * there is none. */
static int check_replaceable(const char *path) {
    DIR *directory = opendir(path);
    if (!directory && errno == ENOENT) return 0;
    if (!directory)
        return log_error("cannot write a checkpoint to '%s': %s", path, strerror(errno));
    int status = 0;
    for (struct dirent *entry; status == 0 && (entry = readdir(directory));) {
        bool known = strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0 ||
                     is_known(entry->d_name);
        if (!known)
            status =
                log_error("cannot replace '%s' by a checkpoint: it holds '%s', which is no part "
                          "of one; choose another directory or remove it",
                          path, entry->d_name);
    }
    closedir(directory);
    return status;
}

int hf_model_remove(const char *path) {
    char file[FILE_PATH_BYTES];
    DIR *directory = opendir(path);
    if (!directory && errno == ENOENT) return 0;
    if (!directory) return log_error("cannot remove '%s': %s", path, strerror(errno));
    int status = 0;
    for (struct dirent *entry; status == 0 && (entry = readdir(directory));) {
        if (!is_known(entry->d_name)) continue;
        status = file_join(file, path, entry->d_name);
        if (status == 0) unlink(file); /* if this fails, rmdir fails and is reported */
    }
    closedir(directory);
    if (status == 0 && rmdir(path) != 0 && errno != ENOENT)
        status = log_error("cannot remove '%s': %s", path, strerror(errno));
    return status;
}

int hf_model_write_shard(const char *directory, const struct named_tensor *tensors, size_t count,
                         int shard, int shards) {
    char path[FILE_PATH_BYTES], name[HF_MODEL_NAME_BYTES];
    size_t kept = 0;
    hf_model_shard_name(shard, shards, name);
    if (file_join(path, directory, name)) return -1;
    struct safetensors_tensor *list = calloc(count + 1, sizeof *list);
    if (!list) return log_error("cannot write '%s': out of memory", path);
    for (size_t i = 0; i < count; i++) {
        if (tensors[i].shard != shard) continue;
        struct safetensors_tensor *to = &list[kept++];
        to->name = tensors[i].name;
        to->dims = tensors[i].dims;
        to->shape[0] = tensors[i].shape[0];
        to->shape[1] = tensors[i].shape[1];
        to->data = tensors[i].data;
    }
    int status = safetensors_write(path, list, kept, "pt");
    free(list);
    return status;
}

/* Writes the index that says which shard contains which tensor, in the format of transformers. */
static int write_index(const char *directory, const struct named_tensor *tensors, size_t count,
                       int shards) {
    char path[FILE_PATH_BYTES];
    double bytes = 0;
    json_t *map = json_object();
    bool failed = !map;
    for (size_t i = 0; i < count && !failed; i++) {
        char name[HF_MODEL_NAME_BYTES];
        hf_model_shard_name(tensors[i].shard, shards, name);
        failed = json_object_set_new(map, tensors[i].name, json_string(name)) != 0;
        bytes += 4.0 * (double)model_tensor_elements(&tensors[i]);
    }
    json_t *index =
        json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)bytes, "weight_map", map);
    int status = file_join(path, directory, "model.safetensors.index.json");
    if (!status)
        status = file_write_json(path, failed ? NULL : index, JSON_INDENT(2) | JSON_SORT_KEYS);
    json_decref(index);
    return status;
}

/* config.json comes last: without it no program accepts the directory as a model. */
int hf_model_write_rest(const char *directory, const struct llama_config *config,
                        const struct named_tensor *tensors, size_t count, int shards,
                        const struct carried *carried) {
    if (shards > 1 && write_index(directory, tensors, count, shards)) return -1;
    if (carried_write(carried, directory)) return -1;
    return config_write(directory, config, carried_fields(carried));
}

/* Renames `partial` to `directory`, in one system call where the file system supports it, and
 * removes the directory that it replaces. */
static int move_into_place(const char *partial, const char *directory) {
    if (renameat2(AT_FDCWD, partial, AT_FDCWD, directory, RENAME_NOREPLACE) == 0) return 0;
    if (renameat2(AT_FDCWD, partial, AT_FDCWD, directory, RENAME_EXCHANGE) == 0)
        return hf_model_remove(partial);
    /* Some network file systems only have the plain rename, which replaces nothing but an empty
     * directory. DIR is then missing for a moment, but it is never incomplete. */
    char old[FILE_PATH_BYTES];
    if (snprintf(old, sizeof old, "%s.old", directory) >= (int)sizeof old)
        return log_error("the path '%.100s...' is too long", directory);
    if (check_replaceable(old) || hf_model_remove(old)) return -1;
    if (rename(directory, old) != 0 && errno != ENOENT)
        return log_error("cannot rename '%s' to '%s': %s", directory, old, strerror(errno));
    if (rename(partial, directory) != 0) {
        log_error("cannot rename '%s' to '%s': %s", partial, directory, strerror(errno));
        if (rename(old, directory) != 0 && errno != ENOENT)
            log_error("the previous checkpoint is now '%s'", old);
        return -1;
    }
    return hf_model_remove(old);
}

/* target: `directory` with symbolic links resolved and trailing slashes removed; partial: what is written
 * beside it. */
static int resolve(const char *directory, char target[FILE_PATH_BYTES],
                   char partial[FILE_PATH_BYTES]) {
    size_t length = strlen(directory);
    while (length > 1 && directory[length - 1] == '/') length--;
    if (length == 0 || length >= FILE_PATH_BYTES - 16)
        return log_error(
            "cannot write a checkpoint to '%.100s': its name has %zu bytes, expected 1 "
            "to %d",
            directory, length, FILE_PATH_BYTES - 17);
    char *real = realpath(directory, NULL);
    if (real)
        length = (size_t)snprintf(target, FILE_PATH_BYTES, "%s", real);
    else
        snprintf(target, FILE_PATH_BYTES, "%.*s", (int)length, directory);
    free(real);
    if (length >= FILE_PATH_BYTES - 16)
        return log_error("the path '%.100s...' is too long", target);
    snprintf(partial, FILE_PATH_BYTES, "%.*s.partial", FILE_PATH_BYTES - 16, target);
    return 0;
}

int hf_model_partial(const char *directory, char partial[FILE_PATH_BYTES]) {
    char target[FILE_PATH_BYTES];
    return resolve(directory, target, partial);
}

int hf_model_check_place(const char *directory) {
    char target[FILE_PATH_BYTES], partial[FILE_PATH_BYTES];
    return resolve(directory, target, partial) || check_replaceable(target) ||
                   check_replaceable(partial)
               ? -1
               : 0;
}

int hf_model_begin(const char *directory) {
    char partial[FILE_PATH_BYTES];
    if (hf_model_check_place(directory) || hf_model_partial(directory, partial) ||
        hf_model_remove(partial))
        return -1;
    if (mkdir(partial, 0777) != 0)
        return log_error("cannot create '%s': %s", partial, strerror(errno));
    return 0;
}

int hf_model_commit(const char *directory) {
    char target[FILE_PATH_BYTES], partial[FILE_PATH_BYTES];
    if (resolve(directory, target, partial) || file_sync_directory(partial) ||
        move_into_place(partial, target))
        return -1;
    return file_sync_directory(dirname(target));
}

void hf_model_abandon(const char *directory) {
    char partial[FILE_PATH_BYTES];
    if (hf_model_partial(directory, partial) == 0) hf_model_remove(partial);
}
