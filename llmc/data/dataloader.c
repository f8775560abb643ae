/* dataloader.c — reads sequences from mapped token files, in an order that is not stored. */
#include "llmc/data/dataloader.h"

#include <glob.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "llmc/util/file.h"
#include "llmc/util/random.h"
#include "llmc/log/error.h"

struct token_file {
    char *path;
    struct file_map map;
    const void *tokens; /* (count) uint16 or, if wide, uint32 */
    bool wide;
    uint64_t count;
    int vocabulary;         /* from the header; 0 if the header has none */
    uint32_t largest;       /* largest token id */
    uint64_t sum;           /* checksum of the tokens */
    struct stat status;     /* when they were read */
    uint64_t words, bytes;  /* of the text; 0: unknown */
    uint64_t train_before;  /* number of training windows in earlier files */
    uint64_t window_before; /* number of validation windows in earlier files */
};

struct dataloader {
    int T;
    int stride; /* of validation windows; 0: they lie side by side */
    uint64_t seed;
    size_t count;
    struct token_file *files;
    uint64_t tokens, targets; /* targets: all tokens except the first of each file */
    uint64_t words, bytes, train_windows, windows;
    int shares; /* parts that the training windows are split into; 0 or 1: shared */
    bool words_known, bytes_known;
    int vocabulary;
    uint32_t ids;    /* ids that the model has */
    char *tokenizer; /* path, or NULL */
    /* Several threads read, and look whether files have changed. */
    pthread_mutex_t looking;
    atomic_llong next_look; /* ms */
    atomic_bool failed;     /* reported */
};

/* ---- opening and checking ---------------------------------------------------------------- */

/* Magic numbers and versions of llm.c: those of GPT-2's data are for 16-bit tokens, those of
 * Llama-3's for 32-bit tokens. */
static int check_kind(const char *path, int magic, int version) {
    const int expected = magic == TOKENS_MAGIC_32 ? TOKENS_VERSION_32 : TOKENS_VERSION;
    if (magic != TOKENS_MAGIC && magic != TOKENS_MAGIC_32)
        return log_error("'%s' begins with the number %d, expected %d or %d: it is no llm.c token "
                         "file; make one with build/tokenize",
                         path, magic, TOKENS_MAGIC, TOKENS_MAGIC_32);
    if (version != expected)
        return log_error("'%s' is a token file of version %d, expected version %d; make one with "
                         "build/tokenize",
                         path, version, expected);
    return 0;
}

static int check_header(struct token_file *file) {
    const char *path = file->path;
    size_t bytes = file->map.bytes;
    if (bytes == 0) return log_error("'%s' is empty, expected a token file", path);
    if (bytes < TOKENS_HEADER_BYTES)
        return log_error("'%s' is truncated: it has %zu bytes, a token file's header alone has %d",
                         path, bytes, TOKENS_HEADER_BYTES);
    int32_t header[8];
    memcpy(header, file->map.data, sizeof header);
    if (check_kind(path, header[0], header[1])) return -1;
    if (header[2] < 0)
        return log_error("'%s' claims %d tokens, a negative number", path, header[2]);
    file->count = (uint64_t)header[2];
    file->wide = header[0] == TOKENS_MAGIC_32;
    uint64_t expected = TOKENS_HEADER_BYTES + (file->wide ? 4 : 2) * file->count;
    int most = file->wide ? TOKENS_VOCABULARY_MAX : TOKENS_VOCABULARY_16;
    if (bytes != expected)
        return log_error(
            "'%s' has %zu bytes, expected %llu for the %d tokens its header claims: it "
            "%s",
            path, bytes, (unsigned long long)expected, header[2],
            bytes < expected ? "is truncated" : "has bytes that do not belong to it");
    if (header[3] < 0 || header[3] > most)
        return log_error("'%s' claims a vocabulary of %d, expected 0 (unknown) to %d", path,
                         header[3], most);
    file->vocabulary = header[3];
    memcpy(&file->words, header + TOKENS_HEADER_WORDS, sizeof file->words);
    memcpy(&file->bytes, header + TOKENS_HEADER_TEXT_BYTES, sizeof file->bytes);
    file->tokens = (const char *)file->map.data + TOKENS_HEADER_BYTES;
    return 0;
}

static uint32_t token_at(const struct token_file *file, uint64_t i) {
    return file->wide ? ((const uint32_t *)file->tokens)[i] : ((const uint16_t *)file->tokens)[i];
}

/* The largest of `count` tokens from `first` on. *sum: a checksum, which any change of a single token
 * changes. */
static uint32_t look_at(const struct token_file *file, uint64_t first, uint32_t count,
                        uint32_t *sum) {
    uint32_t most = 0, added = 0;
    if (file->wide) {
        const uint32_t *tokens = (const uint32_t *)file->tokens + first;
        for (uint32_t i = 0; i < count; i++) {
            most = tokens[i] > most ? tokens[i] : most;
            added += tokens[i] * (2 * i + 1);
        }
    } else {
        const uint16_t *tokens = (const uint16_t *)file->tokens + first;
        for (uint32_t i = 0; i < count; i++) {
            most = tokens[i] > most ? tokens[i] : most;
            added += tokens[i] * (2 * i + 1);
        }
    }
    *sum = added;
    return most;
}

/* Reads all tokens. Sets file->largest and file->sum. */
static void read_tokens(struct token_file *file) {
    enum { CHUNK = 1 << 16 };
    int64_t chunks = (int64_t)((file->count + CHUNK - 1) / CHUNK);
    uint32_t largest = 0;
    uint64_t sum = 0;
#pragma omp parallel for reduction(max : largest) reduction(+ : sum) if (chunks > 16)
    for (int64_t c = 0; c < chunks; c++) {
        const uint64_t first = (uint64_t)c * CHUNK, rest = file->count - first;
        uint32_t part;
        const uint32_t most = look_at(file, first, rest < CHUNK ? (uint32_t)rest : CHUNK, &part);
        if (most > largest) largest = most;
        sum += random_mix((uint64_t)c << 32 | part);
    }
    file->largest = largest;
    file->sum = sum;
}

static int check_ids(const struct token_file *file, int vocabulary, const char *whose) {
    if (file->count == 0 || file->largest < (uint32_t)vocabulary) return 0;
    uint64_t i = 0;
    while (token_at(file, i) < (uint32_t)vocabulary) i++;
    return log_error("'%s': token %llu has id %u, expected less than %s vocabulary size, %d",
                     file->path, (unsigned long long)i, token_at(file, i), whose, vocabulary);
}

static int open_file(struct dataloader *loader, const char *path) {
    struct token_file *file = &loader->files[loader->count++];
    file->path = strdup(path);
    if (!file->path) return log_error("cannot open '%s': out of memory", path);
    if (stat(path, &file->status)) memset(&file->status, 0, sizeof file->status);
    if (file_map(path, &file->map) != 0 || check_header(file) != 0) return -1;
    read_tokens(file);
    if (file_is_lost(&file->map)) return -1;
    if (file->vocabulary && check_ids(file, file->vocabulary, "the file's own") != 0) return -1;
    if (file->vocabulary && loader->vocabulary && file->vocabulary != loader->vocabulary)
        return log_error("'%s' is for a vocabulary of %d, expected %d as in files before it", path,
                         file->vocabulary, loader->vocabulary);
    if (file->vocabulary) loader->vocabulary = file->vocabulary;

    uint64_t T = (uint64_t)loader->T, targets = file->count ? file->count - 1 : 0;
    file->train_before = loader->train_windows;
    file->window_before = loader->windows;
    loader->tokens += file->count;
    loader->targets += targets;
    loader->words += file->words;
    loader->words_known = (loader->count == 1 || loader->words_known) && file->words > 0;
    loader->bytes += file->bytes;
    loader->bytes_known = (loader->count == 1 || loader->bytes_known) && file->bytes > 0;
    loader->train_windows += targets / T;
    loader->windows += (targets + T - 1) / T;
    return 0;
}

/* GLOB_NOCHECK: if nothing matches, the only path is the pattern itself. */
static int any_matches(const char *pattern, const glob_t *matches) {
    if (file_is_directory(matches->gl_pathv[0]))
        return log_error("'%s' is a directory, expected its token files, as in '%s/*_train.bin'",
                         matches->gl_pathv[0], matches->gl_pathv[0]);
    if (matches->gl_pathc > 1 || !access(matches->gl_pathv[0], F_OK)) return 0;
    return log_error("no file matches '%s', expected llm.c token files; make some with "
                     "build/tokenize",
                     pattern);
}

static int open_matches(struct dataloader *loader, const char *pattern, const glob_t *matches) {
    loader->files = calloc(matches->gl_pathc, sizeof *loader->files);
    if (!loader->files) return log_error("cannot open '%s': out of memory", pattern);
    for (size_t i = 0; i < matches->gl_pathc; i++)
        if (open_file(loader, matches->gl_pathv[i]) != 0) return -1;
    return 0;
}

/* Keeps the path of tokenizer.model, or else of tokenizer.json, beside the first file. */
static int find_tokenizer(struct dataloader *loader) {
    const char *first = loader->files[0].path, *slash = strrchr(first, '/');
    int length = slash ? (int)(slash - first) + 1 : 0;
    char path[FILE_PATH_BYTES];
    if (length > FILE_PATH_BYTES - 32) return 0;
    memcpy(path, first, (size_t)length);
    for (int i = 0; i < 2; i++) {
        strcpy(path + length, i ? "tokenizer.json" : "tokenizer.model");
        if (access(path, R_OK)) continue;
        loader->tokenizer = strdup(path);
        return loader->tokenizer ? 0 : log_error("cannot open '%s': out of memory", first);
    }
    return 0;
}

static int check_length(const struct dataloader *loader, const char *pattern,
                        enum dataloader_use use) {
    bool enough = use == DATALOADER_TRAIN ? loader->train_windows > 0 : loader->windows > 0;
    if (enough) return 0;
    return log_error("'%s': no file has the %d tokens that one sequence needs (%llu tokens in %zu "
                     "files); use more text%s",
                     pattern, use == DATALOADER_TRAIN ? loader->T + 1 : 2,
                     (unsigned long long)loader->tokens, loader->count,
                     use == DATALOADER_TRAIN ? " or a smaller --seq" : "");
}

/* The name of a file that exists is no pattern, as in a folder "run[1]". */
static int find_files(const char *pattern, glob_t *matches) {
    char name[2 * FILE_PATH_BYTES] = "", *to = name;
    const bool exists = !access(pattern, F_OK);
    for (const char *from = pattern; exists && *from; from++) *to++ = '\\', *to++ = *from;
    *to = '\0';
    if (glob(exists ? name : pattern, GLOB_NOCHECK, NULL, matches) == 0) return 0;
    return log_error("cannot look for files '%s': out of memory or unreadable directory", pattern);
}

int dataloader_open(const char *pattern, enum dataloader_use use, int T, uint64_t seed,
                    struct dataloader **out) {
    *out = NULL;
    if (T < 1) return log_error("sequences of %d tokens make no sense, expected at least 1", T);
    struct dataloader *loader = calloc(1, sizeof *loader);
    if (!loader) return log_error("cannot open '%s': out of memory", pattern);
    loader->T = T;
    loader->seed = seed;
    loader->ids = UINT32_MAX;
    pthread_mutex_init(&loader->looking, NULL);
    glob_t matches;
    int failed = find_files(pattern, &matches);
    if (!failed) {
        failed = any_matches(pattern, &matches) || open_matches(loader, pattern, &matches) ||
                 find_tokenizer(loader) || check_length(loader, pattern, use);
        globfree(&matches);
    }
    if (failed) {
        dataloader_close(loader);
        return -1;
    }
    *out = loader;
    return 0;
}

void dataloader_close(struct dataloader *loader) {
    if (!loader) return;
    for (size_t i = 0; i < loader->count; i++) {
        file_unmap(&loader->files[i].map);
        free(loader->files[i].path);
    }
    pthread_mutex_destroy(&loader->looking);
    free(loader->files);
    free(loader->tokenizer);
    free(loader);
}

/* Adds the header, and the tokens in the middle and at the end. */
static uint64_t hash_file(uint64_t hash, const struct token_file *file) {
    enum { TOKENS = 2048 };
    const uint64_t part = file->count < TOKENS ? file->count : TOKENS;
    const uint64_t end = file->count - part, middle = end - end / 2;
    const int32_t *header = (const int32_t *)file->map.data;
    for (int i = 0; i < 8; i++) hash = random_mix(hash ^ (uint32_t)header[i]);
    for (uint64_t i = 0; i < part; i++)
        hash = random_mix(hash ^ ((uint64_t)token_at(file, middle + i) << (file->wide ? 32 : 16) |
                                  token_at(file, end + i)));
    return hash;
}

int dataloader_describe(const char *pattern, char text[DATALOADER_DESCRIPTION], int *vocabulary) {
    glob_t matches;
    uint64_t tokens = 0, hash = 0;
    if (find_files(pattern, &matches)) return -1;
    int status = any_matches(pattern, &matches);
    for (size_t i = 0; i < matches.gl_pathc && !status; i++) {
        struct token_file file = {.path = matches.gl_pathv[i]};
        status = file_map(file.path, &file.map) || check_header(&file) ? -1 : 0;
        if (!status) hash = hash_file(hash, &file);
        tokens += file.count;
        if (file.vocabulary) *vocabulary = file.vocabulary;
        file_unmap(&file.map);
    }
    snprintf(text, DATALOADER_DESCRIPTION, "%llu tokens in %zu files, hash %016llx",
             (unsigned long long)tokens, (size_t)matches.gl_pathc, (unsigned long long)hash);
    globfree(&matches);
    return status;
}

int dataloader_vocabulary(const struct dataloader *loader) {
    return loader->vocabulary;
}

double dataloader_targets_per_word(const struct dataloader *loader) {
    return loader->words_known ? (double)loader->targets / (double)loader->words : 0;
}

double dataloader_targets_per_byte(const struct dataloader *loader) {
    return loader->bytes_known ? (double)loader->targets / (double)loader->bytes : 0;
}

int dataloader_check_vocabulary(struct dataloader *loader, int vocabulary) {
    for (size_t i = 0; i < loader->count; i++)
        if (check_ids(&loader->files[i], vocabulary, "the model's") != 0) return -1;
    loader->ids = (uint32_t)vocabulary;
    return 0;
}

const char *dataloader_tokenizer(const struct dataloader *loader) {
    return loader->tokenizer;
}

static bool is_same(const struct token_file *a, const struct token_file *b) {
    const bool one = a->status.st_ino == b->status.st_ino && a->status.st_dev == b->status.st_dev;
    return one || (a->count == b->count && a->sum == b->sum);
}

const char *dataloader_shared(const struct dataloader *loader, const struct dataloader *other) {
    for (size_t i = 0; i < loader->count; i++)
        for (size_t j = 0; j < other->count; j++)
            if (is_same(&loader->files[i], &other->files[j])) return loader->files[i].path;
    return NULL;
}

uint64_t dataloader_tokens(const struct dataloader *loader) {
    return loader->tokens;
}

uint64_t dataloader_sum(const struct dataloader *loader) {
    uint64_t sum = 0;
    for (size_t i = 0; i < loader->count; i++)
        sum = random_mix(sum ^ loader->files[i].count) + loader->files[i].sum;
    return sum;
}

/* ---- training: the permutation is computed, not stored ----------------------------------- */

/* A bijection of 64-bit numbers that mixes all bits. */
static uint64_t mix(uint64_t x) {
    return random_mix(x + 0x9e3779b97f4a7c15u);
}

/* The place of `index`, 0 ... count-1, in a permutation. A Feistel network permutes the numbers
 * of 2h bits, for the smallest h with room for count. It is applied again until its result is
 * below count ("cycle walking", Black & Rogaway 2002), which makes it a permutation of 0 ...
 * count-1. This takes fewer than 4 applications on average. */
static uint64_t permute(uint64_t index, uint64_t count, uint64_t key) {
    int half = 1;
    while (half < 31 && count > (uint64_t)1 << 2 * half) half++;
    uint64_t mask = ((uint64_t)1 << half) - 1;
    do {
        uint64_t left = index >> half, right = index & mask;
        for (uint64_t round = 0; round < 6; round++) {
            uint64_t next = left ^ (mix(key ^ mix(right ^ round << 32)) & mask);
            left = right;
            right = next;
        }
        index = left << half | right;
    } while (index >= count);
    return index;
}

/* Returns the last file whose windows begin at or before `window`. */
static const struct token_file *file_of(const struct dataloader *loader, uint64_t window,
                                        size_t before_offset) {
    size_t low = 0, high = loader->count; /* files[low] qualifies, files[high] does not */
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        uint64_t before;
        memcpy(&before, (const char *)&loader->files[middle] + before_offset, sizeof before);
        if (before <= window)
            low = middle;
        else
            high = middle;
    }
    return &loader->files[low];
}

/* ---- files that change while they are read ---- */

static const char changed[] =
    "the file has changed since the run began, which must not happen: replace a "
    "file by renaming another one to its name";

/* Sees to it that one thread reports. */
static bool fails_first(struct dataloader *loader) {
    return !atomic_exchange(&loader->failed, true);
}

/* Compares a file with what was opened, if its times or its size say that it may be another. A file of
 * that name which is another one (inode) does not matter: the one that is mapped stays. */
static void look_again(struct dataloader *loader, struct token_file *file) {
    const struct stat *old = &file->status;
    struct stat now;
    if (stat(file->path, &now) || now.st_ino != old->st_ino || now.st_dev != old->st_dev) return;
    if (now.st_size == old->st_size && now.st_mtim.tv_sec == old->st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == old->st_mtim.tv_nsec && now.st_ctim.tv_sec == old->st_ctim.tv_sec &&
        now.st_ctim.tv_nsec == old->st_ctim.tv_nsec)
        return;
    struct token_file read = *file;
    read_tokens(&read);
    const bool same = now.st_size == old->st_size && read.sum == file->sum;
    if (!same && !file_is_lost(&file->map) && fails_first(loader))
        log_error("'%s': %s", file->path, changed);
    file->status = now;
}

/* Looks at a file that is being read; about ten times per second at most. */
static void look_sometimes(struct dataloader *loader, const struct token_file *file) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    const long long now = t.tv_sec * 1000LL + t.tv_nsec / 1000000;
    if (now < atomic_load(&loader->next_look) || pthread_mutex_trylock(&loader->looking)) return;
    look_again(loader, &loader->files[file - loader->files]);
    atomic_store(&loader->next_look, now + 100);
    pthread_mutex_unlock(&loader->looking);
}

int dataloader_check(const struct dataloader *loader) {
    return atomic_load(&loader->failed) ? -1 : 0;
}

int dataloader_check_files(struct dataloader *loader) {
    pthread_mutex_lock(&loader->looking);
    for (size_t i = 0; i < loader->count; i++) look_again(loader, &loader->files[i]);
    pthread_mutex_unlock(&loader->looking);
    return dataloader_check(loader);
}

/* Copies `length` tokens from token `start` on, and those that follow each. An id that the model does not have is
 * read as 0, since nothing behind the loader checks ids again. */
static void copy_window(struct dataloader *loader, const struct token_file *file, uint64_t start,
                        int length, int32_t *tokens, int32_t *targets) {
    look_sometimes(loader, file);
    for (int t = 0; t <= length; t++) {
        uint32_t token = token_at(file, start + (uint64_t)t);
        if (token >= loader->ids) {
            if (fails_first(loader))
                log_error("'%s': token %llu has id %u, expected less than the model's vocabulary "
                          "size, %u: %s",
                          file->path, (unsigned long long)start + (unsigned)t, token, loader->ids,
                          changed);
            token = 0;
        }
        if (t < length) tokens[t] = (int32_t)token;
        if (t > 0) targets[t - 1] = (int32_t)token;
    }
    if (file_is_lost(&file->map)) atomic_store(&loader->failed, true);
}

uint64_t dataloader_epoch(const struct dataloader *loader) {
    return loader->train_windows;
}

/* Copies sequence n of part `share` of `shares`. */
static void sequence_of(struct dataloader *loader, int share, int shares, uint64_t n,
                        int32_t *tokens, int32_t *targets) {
    uint64_t T = (uint64_t)loader->T, W = loader->train_windows;
    uint64_t first = W * (uint64_t)share / (uint64_t)shares;
    uint64_t count = W * ((uint64_t)share + 1) / (uint64_t)shares - first;
    uint64_t key = mix(mix(loader->seed ^ (uint64_t)share << 32) ^ n / count);
    uint64_t shift = mix(key) % T, window = first + permute(n % count, count, key);
    const struct token_file *file =
        file_of(loader, window, offsetof(struct token_file, train_before));
    /* If the epoch's shift leaves no room for a file's last window, the window ends at the end
     * of the file. */
    uint64_t start = (window - file->train_before) * T + shift, last = file->count - (T + 1);
    copy_window(loader, file, start < last ? start : last, loader->T, tokens, targets);
}

int dataloader_split(struct dataloader *loader, int workers) {
    if (loader->train_windows < (uint64_t)workers)
        return log_error(
            "--data-split contiguous: the training files have %llu sequences of %d tokens, "
            "expected at least one for each of the %d workers; use more text, fewer "
            "workers or a shorter --seq",
            (unsigned long long)loader->train_windows, loader->T, workers);
    loader->shares = workers;
    return 0;
}

void dataloader_batch(struct dataloader *loader, uint64_t done, int m, int worker, int workers,
                      int B, int32_t *tokens, int32_t *targets) {
    const bool own = loader->shares > 1;
    uint64_t n = own ? done / (uint64_t)workers + (uint64_t)m * (uint64_t)B
                     : done + ((uint64_t)m * (uint64_t)workers + (uint64_t)worker) * (uint64_t)B;
    for (int b = 0; b < B; b++, tokens += loader->T, targets += loader->T)
        sequence_of(loader, own ? worker : 0, own ? loader->shares : 1, n + (uint64_t)b, tokens,
                    targets);
}

/* ---- validation: all windows once, in order ---------------------------------------------- */

/* Number of windows of a file. The last window is the first one that reaches the end of the
 * file. A window of a single token, which only a stride of T can give, has nothing to score and
 * is not counted. */
static uint64_t strided_windows(uint64_t count, uint64_t T, uint64_t stride) {
    if (count < 2) return 0;
    if (count <= T) return 1;
    uint64_t further = (count - T + stride - 1) / stride;
    return count - further * stride < 2 ? further : further + 1;
}

void dataloader_set_stride(struct dataloader *loader, int stride) {
    loader->stride = stride;
    loader->windows = 0;
    for (size_t i = 0; i < loader->count; i++) {
        struct token_file *file = &loader->files[i];
        file->window_before = loader->windows;
        loader->windows += strided_windows(file->count, (uint64_t)loader->T, (uint64_t)stride);
    }
}

uint64_t dataloader_windows(const struct dataloader *loader) {
    return loader->windows;
}

int dataloader_window(struct dataloader *loader, uint64_t i, int32_t *tokens, int32_t *targets) {
    const struct token_file *file = file_of(loader, i, offsetof(struct token_file, window_before));
    const int most = loader->stride ? loader->T - 1 : loader->T;
    uint64_t step = (uint64_t)(loader->stride ? loader->stride : loader->T);
    uint64_t start = (i - file->window_before) * step, rest = file->count - 1 - start;
    int length = rest < (uint64_t)most ? (int)rest : most;
    copy_window(loader, file, start, length, tokens, targets);
    return length;
}

int dataloader_window_skip(const struct dataloader *loader, uint64_t i) {
    const struct token_file *file = file_of(loader, i, offsetof(struct token_file, window_before));
    if (!loader->stride || i == file->window_before) return 0;
    /* the previous window ended T - stride tokens into this one, and the first token is no
     * target */
    int skip = loader->T - loader->stride - 1;
    return skip > 0 ? skip : 0;
}

struct dataloader_batch dataloader_window_batch(struct dataloader *loader, uint64_t *i,
                                                uint64_t every, uint64_t end, int most,
                                                int32_t *tokens, int32_t *targets) {
    struct dataloader_batch b = {0, 0, 0};
    while (b.windows < most && *i < end) {
        const int at = b.windows * b.length, skip = dataloader_window_skip(loader, *i);
        const int length = dataloader_window(loader, *i, tokens + at, targets + at);
        if (b.windows > 0 && (length != b.length || skip != b.skip)) break;
        b.windows++;
        b.length = length;
        b.skip = skip;
        *i += every;
    }
    return b;
}
