/* token_writer.c — see token_writer.h. */
#include "data/token_writer.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/data/dataloader.h"
#include "llmc/log/error.h"

/* ---- names ---------------------------------------------------------------------------------- */

/* The final name of a shard, followed by `suffix`. */
static int shard_name(const struct token_writer *w, int shard, const char *suffix,
                      char path[FILE_PATH_BYTES]) {
    const char *end = strrchr(w->path, '.');
    if (!end || strcmp(end, ".bin") != 0) end = w->path + strlen(w->path);
    int length = w->shard_tokens ? snprintf(path, FILE_PATH_BYTES, "%.*s_%06d%s%s",
                                            (int)(end - w->path), w->path, shard, end, suffix)
                                 : snprintf(path, FILE_PATH_BYTES, "%s%s", w->path, suffix);
    if (length >= 0 && length < FILE_PATH_BYTES) return 0;
    return log_error("the path '%.100s...' is too long", w->path);
}

static int refuse_earlier_shards(const struct token_writer *w) {
    char path[FILE_PATH_BYTES];
    if (shard_name(w, 0, "", path)) return -1;
    if (access(path, F_OK) != 0) return 0;
    return log_error(
        "'%s' is there already: remove the shards of an earlier run, which would be read "
        "together with the new ones",
        path);
}

/* ---- one shard ------------------------------------------------------------------------------ */

static int begin_shard(struct token_writer *w) {
    if (shard_name(w, w->shards, ".partial", w->partial)) return -1;
    w->shard_count = w->shard_words = w->shard_bytes = 0;
    w->descriptor = file_create(w->partial);
    if (w->descriptor < 0) return -1;
    w->shards++;
    static const char header[TOKENS_HEADER_BYTES]; /* zeros; the real header is written last */
    return file_write(w->descriptor, header, sizeof header, w->partial);
}

static bool is_wide(const struct token_writer *w) {
    return w->vocabulary > TOKENS_VOCABULARY_16;
}

static int end_shard(struct token_writer *w) {
    int32_t header[TOKENS_HEADER_INTS] = {is_wide(w) ? TOKENS_MAGIC_32 : TOKENS_MAGIC,
                                          is_wide(w) ? TOKENS_VERSION_32 : TOKENS_VERSION,
                                          (int32_t)w->shard_count, w->vocabulary};
    memcpy(header + TOKENS_HEADER_WORDS, &w->shard_words, sizeof w->shard_words);
    memcpy(header + TOKENS_HEADER_TEXT_BYTES, &w->shard_bytes, sizeof w->shard_bytes);
    int descriptor = w->descriptor, status = 0;
    w->descriptor = -1;
    if (pwrite(descriptor, header, sizeof header, 0) != (ssize_t)sizeof header)
        status = log_error("cannot write '%s': %s", w->partial, strerror(errno));
    if (file_finish(descriptor, w->partial) != 0) status = -1;
    return status;
}

static uint64_t room(const struct token_writer *w) {
    uint64_t most = w->shard_tokens ? w->shard_tokens : INT32_MAX;
    return most - w->shard_count;
}

/* The new file replaces a regular file of its name, but no device, folder or pipe. */
static int refuse_special(const struct token_writer *w) {
    struct stat there;
    if (stat(w->path, &there) || S_ISREG(there.st_mode)) return 0;
    return log_error("'%s' is no regular file: expected the name of a token file to write",
                     w->path);
}

/* ---- the whole ------------------------------------------------------------------------------ */

int token_writer_open(struct token_writer *w, const char *path, uint64_t shard_tokens,
                      int vocabulary) {
    *w = (struct token_writer){
        .path = path, .shard_tokens = shard_tokens, .descriptor = -1, .vocabulary = vocabulary};
    if (!path) return 0;
    if (refuse_special(w)) return -1;
    if (shard_tokens && refuse_earlier_shards(w)) return -1;
    return begin_shard(w);
}

/* Writes n tokens of uint16 or uint32, shard after shard. */
static int write_tokens(struct token_writer *w, const char *tokens, size_t n) {
    const size_t each = is_wide(w) ? sizeof(uint32_t) : sizeof(uint16_t);
    while (n > 0) {
        if (room(w) == 0 && (end_shard(w) || begin_shard(w))) return -1;
        size_t part = n < room(w) ? n : (size_t)room(w);
        if (file_write(w->descriptor, tokens, part * each, w->partial)) return -1;
        w->shard_count += part;
        w->tokens += part;
        tokens += part * each;
        n -= part;
    }
    return 0;
}

int token_writer_write(struct token_writer *w, int first, const int32_t *ids, size_t count,
                       uint64_t words, uint64_t text_bytes) {
    if (!w->shard_tokens && count + 1 > room(w))
        return log_error("'%s' would have more than %d tokens, the most a token file holds: give "
                         "--shard-tokens, and several files are written",
                         w->path, INT32_MAX);
    int32_t *tokens = (int32_t *)malloc((count + 1) * sizeof *tokens);
    if (!tokens) return log_error("out of memory for tokens");
    size_t n = 0;
    if (first >= 0) tokens[n++] = first;
    for (size_t i = 0; i < count; i++) tokens[n++] = ids[i];
    for (size_t i = 0; i < n && !is_wide(w); i++) { /* in place */
        const uint16_t narrow = (uint16_t)tokens[i];
        memcpy((char *)tokens + i * sizeof narrow, &narrow, sizeof narrow);
    }
    int status = 0;
    if (n > 0 && room(w) == 0) status = end_shard(w) || begin_shard(w) ? -1 : 0;
    w->shard_words += words;
    w->shard_bytes += text_bytes;
    w->words += words;
    if (status == 0) status = write_tokens(w, (const char *)tokens, n);
    free(tokens);
    return status;
}

int token_writer_finish(struct token_writer *w, const char *hint) {
    if (!w->path) return 0;
    if (w->tokens < 2)
        return log_error(
            "'%s' would have %llu tokens, expected at least 2: there is too little text "
            "%s",
            w->path, (unsigned long long)w->tokens, hint);
    return end_shard(w);
}

int token_writer_publish(struct token_writer *w) {
    char from[FILE_PATH_BYTES], to[FILE_PATH_BYTES];
    for (int i = 0; w->path && i < w->shards; i++) {
        if (shard_name(w, i, ".partial", from) || shard_name(w, i, "", to)) return -1;
        if (rename(from, to) != 0)
            return log_error("cannot rename '%s' to '%s': %s", from, to, strerror(errno));
    }
    return 0;
}

void token_writer_discard(struct token_writer *w) {
    char partial[FILE_PATH_BYTES];
    if (w->descriptor >= 0) close(w->descriptor);
    w->descriptor = -1;
    for (int i = 0; w->path && i < w->shards; i++)
        if (shard_name(w, i, ".partial", partial) == 0) unlink(partial);
}
