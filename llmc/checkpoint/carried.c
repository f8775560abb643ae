/* carried.c — see carried.h. */
#include "llmc/checkpoint/carried.h"

#include <dirent.h>
#include <errno.h>
#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/data/tokenizer.h"
#include "llmc/data/tokenizer_file.h"
#include "llmc/log/error.h"
#include "llmc/util/file.h"

struct file {
    char *name;
    void *data;
    size_t bytes;
};

struct carried {
    json_t *fields;
    int count;
    struct file *file;
};

static const char *const of_tokenizer[] = {"tokenizer.model",
                                           "tokenizer.json",
                                           "tokenizer_config.json",
                                           "special_tokens_map.json",
                                           "added_tokens.json",
                                           "chat_template.jinja",
                                           "chat_template.json",
                                           "vocab.json",
                                           "merges.txt",
                                           NULL};
static const char *const of_model[] = {
    "generation_config.json", "LICENSE*", "LICENCE*", "NOTICE*", "COPYING*", "USE_POLICY*", NULL};

static bool is_among(const char *const *patterns, const char *name) {
    for (; *patterns; patterns++)
        if (!fnmatch(*patterns, name, FNM_CASEFOLD)) return true;
    return false;
}

bool carried_is_file(const char *name) {
    return is_among(of_tokenizer, name) || is_among(of_model, name);
}

/* ---- files ------------------------------------------------------------------------------- */

static int add_file(struct carried *c, const char *path, const char *name) {
    struct file_map map;
    struct file *more = (struct file *)realloc(c->file, ((size_t)c->count + 1) * sizeof *more);
    if (more) c->file = more;
    if (file_map(path, &map)) return -1;
    struct file f = {strdup(name), malloc(map.bytes + 1), map.bytes};
    const bool failed = !more || !f.name || !f.data;
    if (!failed && map.bytes) memcpy(f.data, map.data, map.bytes);
    const bool lost = file_unmap(&map);
    if (!failed && !lost) {
        c->file[c->count++] = f;
        return 0;
    }
    free(f.name);
    free(f.data);
    if (lost) return -1;
    return log_out_of_memory("the files of a model", (double)map.bytes);
}

/* Adds the files of a directory that match; those that are not regular files are passed over. */
static int add_matching(struct carried *c, const char *directory, const char *const *patterns) {
    char path[FILE_PATH_BYTES];
    DIR *open = opendir(directory);
    if (!open) return log_error("cannot read '%s': %s", directory, strerror(errno));
    int status = 0;
    for (struct dirent *entry; !status && (entry = readdir(open));) {
        if (!is_among(patterns, entry->d_name)) continue;
        json_t *listed = json_string(entry->d_name);
        if (!listed && json_true()) /* dev/bare/jansson.h has no values */
            status = log_error("'%s/%s': expected a name in UTF-8, since a checkpoint lists the "
                               "file: rename or remove it",
                               directory, entry->d_name);
        json_decref(listed);
        if (!status) status = file_join(path, directory, entry->d_name);
        if (!status && file_is_regular(path)) status = add_file(c, path, entry->d_name);
    }
    closedir(open);
    return status;
}

static bool has_same_bytes(const char *a, const char *b) {
    struct file_map x, y;
    if (!file_is_regular(a) || !file_is_regular(b) || file_map(a, &x)) return false;
    bool same = !file_map(b, &y) && x.bytes == y.bytes && !memcmp(x.data, y.data, x.bytes);
    file_unmap(&x);
    file_unmap(&y);
    return same;
}

/* The directory of a file: what stands before its name, or ".". */
static void directory_of(const char *path, char directory[FILE_PATH_BYTES]) {
    const char *slash = strrchr(path, '/');
    snprintf(directory, FILE_PATH_BYTES, "%.*s", slash ? (int)(slash - path) + 1 : 1,
             slash ? path : ".");
}

/* Of a tokenizer that is not the model's: its other files are beside it. */
static int add_other_tokenizer(struct carried *c, const char *path) {
    char directory[FILE_PATH_BYTES], beside[FILE_PATH_BYTES];
    directory_of(path, directory);
    int status = add_file(c, path, tokenizer_file_name(path));
    for (int i = 2; of_tokenizer[i] && !status; i++) { /* but for the other kind of tokenizer */
        status = file_join(beside, directory, of_tokenizer[i]);
        if (!status && file_is_regular(beside)) status = add_file(c, beside, of_tokenizer[i]);
    }
    return status;
}

/* ---- fields of config.json --------------------------------------------------------------- */

static json_t *load(const char *directory, const char *name) {
    char path[FILE_PATH_BYTES];
    return file_join(path, directory, name) ? NULL : json_load_file(path, 0, NULL);
}

/* The id that tokenizer.json gives the token which tokenizer_config.json calls `role`; null if they do not
 * say. */
static json_t *id_of(const json_t *tokenizer, const json_t *settings, const char *role) {
    const json_t *token = json_object_get(settings, role);
    if (json_is_object(token)) token = json_object_get(token, "content");
    const json_t *added = json_object_get(tokenizer, "added_tokens");
    for (size_t i = 0; json_is_string(token) && i < json_array_size(added); i++) {
        const json_t *entry = json_array_get(added, i);
        const char *content = json_string_value(json_object_get(entry, "content"));
        if (content && !strcmp(content, json_string_value(token)))
            return json_integer(json_integer_value(json_object_get(entry, "id")));
    }
    return json_null();
}

static int ids_of_json(struct carried *c, const char *path) {
    char directory[FILE_PATH_BYTES];
    directory_of(path, directory);
    json_t *tokenizer = json_load_file(path, 0, NULL);
    json_t *settings = load(directory, "tokenizer_config.json");
    c->fields = json_pack("{s:o, s:o}", "bos_token_id", id_of(tokenizer, settings, "bos_token"),
                          "eos_token_id", id_of(tokenizer, settings, "eos_token"));
    json_decref(tokenizer);
    json_decref(settings);
    return c->fields ? 0 : log_out_of_memory("the ids of special tokens", 0);
}

static json_t *id_or_null(int id) {
    return id < 0 ? json_null() : json_integer(id);
}

/* A file that SentencePiece does not read is copied all the same. */
static int ids_of_sentencepiece(struct carried *c, const char *path) {
    const bool muted = log_muted;
    struct tokenizer *tokenizer;
    log_muted = true;
    const int failed = tokenizer_open(path, &tokenizer);
    log_muted = muted;
    if (failed) return 0;
    c->fields = json_pack("{s:o, s:o}", "bos_token_id", id_or_null(tokenizer_bos(tokenizer)),
                          "eos_token_id", id_or_null(tokenizer_eos(tokenizer)));
    tokenizer_close(tokenizer);
    return c->fields ? 0 : log_out_of_memory("the ids of special tokens", 0);
}

/* ---- public ------------------------------------------------------------------------------ */

static int read_source(struct carried *c, const char *source, const char *tokenizer) {
    char own[FILE_PATH_BYTES];
    const bool directory = source && file_is_directory(source);
    if (source)
        c->fields = directory ? load(source, "config.json") : json_load_file(source, 0, NULL);
    if (directory && add_matching(c, source, of_model)) return -1;
    if (directory && tokenizer && file_join(own, source, tokenizer_file_name(tokenizer))) return -1;
    if (directory && (!tokenizer || has_same_bytes(own, tokenizer)))
        return add_matching(c, source, of_tokenizer);
    if (!tokenizer) return 0;
    if (add_other_tokenizer(c, tokenizer)) return -1;
    if (c->fields) return 0;
    return strcmp(tokenizer_file_name(tokenizer), "tokenizer.json")
               ? ids_of_sentencepiece(c, tokenizer)
               : ids_of_json(c, tokenizer);
}

int carried_open(const char *const *sources, const char *tokenizer, struct carried **out) {
    struct carried *c = (struct carried *)calloc(1, sizeof *c);
    *out = NULL;
    if (!c) return log_out_of_memory("the files of a model", 0);
    while (*sources && access(*sources, F_OK)) sources++;
    if (!read_source(c, *sources, tokenizer)) {
        *out = c;
        return 0;
    }
    carried_close(c);
    return -1;
}

void carried_close(struct carried *c) {
    if (!c) return;
    for (int i = 0; i < c->count; i++) {
        free(c->file[i].name);
        free(c->file[i].data);
    }
    free(c->file);
    json_decref(c->fields);
    free(c);
}

json_t *carried_fields(const struct carried *c) {
    return c ? c->fields : NULL;
}

const char *carried_name(const struct carried *c, int i) {
    return c && i < c->count ? c->file[i].name : NULL;
}

int carried_write(const struct carried *c, const char *directory) {
    char path[FILE_PATH_BYTES];
    for (int i = 0; c && i < c->count; i++) {
        const struct file *f = &c->file[i];
        if (file_join(path, directory, f->name) || file_write_bytes(path, f->data, f->bytes))
            return -1;
    }
    return 0;
}
