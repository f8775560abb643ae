/* inputs.c — see inputs.h. */
#include "data/inputs.h"

#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/util/file.h"
#include "llmc/log/error.h"

static int add(struct inputs *inputs, const char *path, uint64_t bytes) {
    if (inputs->count == inputs->capacity) {
        size_t more = inputs->capacity ? 2 * inputs->capacity : 64;
        struct input *list = (struct input *)realloc(inputs->list, more * sizeof *list);
        if (!list) return log_error("out of memory for the list of inputs");
        inputs->list = list;
        inputs->capacity = more;
    }
    char *copy = strdup(path);
    if (!copy) return log_error("out of memory for the list of inputs");
    inputs->list[inputs->count++] = (struct input){copy, bytes};
    inputs->bytes += bytes;
    return 0;
}

/* ---- standard input ------------------------------------------------------------------------- */

static int open_spool(const char *directory) {
    int spool = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (spool >= 0) return spool;
    /* not every file system knows O_TMPFILE */
    char path[FILE_PATH_BYTES];
    if (file_join(path, directory, "tokenize-stdin-XXXXXX")) return -1;
    spool = mkostemp(path, O_CLOEXEC);
    if (spool < 0)
        return log_error("cannot create a file in '%s' to keep standard input in: %s", directory,
                         strerror(errno));
    unlink(path);
    return spool;
}

static int add_standard_input(struct inputs *inputs, const char *directory) {
    if (inputs->spool >= 0) return log_error("'-' is named twice; standard input can be read once");
    inputs->spool = open_spool(directory);
    if (inputs->spool < 0) return -1;
    const size_t room = 1 << 20;
    char *block = (char *)malloc(room), path[64];
    if (!block) return log_error("out of memory for standard input");
    uint64_t bytes = 0;
    int status = 0;
    while (status == 0) {
        ssize_t got = read(STDIN_FILENO, block, room);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) status = log_error("cannot read standard input: %s", strerror(errno));
        if (got <= 0) break;
        status = file_write(inputs->spool, block, (size_t)got, "the copy of standard input");
        bytes += (uint64_t)got;
    }
    free(block);
    snprintf(path, sizeof path, "/proc/self/fd/%d", inputs->spool);
    return status ? status : add(inputs, path, bytes);
}

/* ---- folders -------------------------------------------------------------------------------- */

/* Returns 1 if there is a zero byte among the first 8,192: git and grep regard such a file as
 * binary. Returns 0 if there is none, and -1 after reporting an error. */
static int is_binary(const char *path) {
    char start[8192];
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = descriptor < 0 ? -1 : read(descriptor, start, sizeof start);
    int error = errno;
    if (descriptor >= 0) close(descriptor);
    if (got < 0) return log_error("cannot read '%s': %s", path, strerror(error));
    return memchr(start, '\0', (size_t)got) != NULL;
}

static int by_name(const FTSENT **a, const FTSENT **b) {
    return strcmp((*a)->fts_name, (*b)->fts_name);
}

static int add_entry(struct inputs *inputs, FTS *tree, FTSENT *entry) {
    switch (entry->fts_info) {
    case FTS_D:
    case FTS_F:
        if (entry->fts_level > 0 && entry->fts_name[0] == '.') {
            fts_set(tree, entry, FTS_SKIP);
        } else if (entry->fts_info == FTS_F) {
            int binary = is_binary(entry->fts_path);
            if (binary == 0)
                return add(inputs, entry->fts_path, (uint64_t)entry->fts_statp->st_size);
            if (binary < 0) return -1;
            inputs->skipped++;
        }
        return 0;
    case FTS_DNR:
    case FTS_ERR:
    case FTS_NS:
        return log_error("cannot read '%s': %s", entry->fts_path, strerror(entry->fts_errno));
    case FTS_DC:
        return log_error("'%s' is a link to a folder around it", entry->fts_path);
    case FTS_DP:
        return 0;
    default: /* a device, a pipe, a broken link */
        inputs->skipped++;
        return 0;
    }
}

static int add_folder(struct inputs *inputs, const char *path) {
    char *roots[] = {(char *)path, NULL};
    size_t before = inputs->count;
    FTS *tree = fts_open(roots, FTS_LOGICAL | FTS_NOCHDIR, by_name);
    if (!tree) return log_error("cannot read '%s': %s", path, strerror(errno));
    int status = 0;
    errno = 0;
    for (FTSENT *entry; status == 0 && (entry = fts_read(tree)) != NULL; errno = 0)
        status = add_entry(inputs, tree, entry);
    if (status == 0 && errno != 0)
        status = log_error("cannot read '%s': %s", path, strerror(errno));
    fts_close(tree);
    if (status == 0 && inputs->count == before)
        status = log_error("the folder '%s' has no text file", path);
    return status;
}

/* ---- all ------------------------------------------------------------------------------------ */

static int add_name(struct inputs *inputs, const char *name, const char *spool_directory) {
    struct stat status;
    if (strcmp(name, "-") == 0) return add_standard_input(inputs, spool_directory);
    if (stat(name, &status) != 0) return log_error("cannot open '%s': %s", name, strerror(errno));
    if (S_ISDIR(status.st_mode)) return add_folder(inputs, name);
    if (!S_ISREG(status.st_mode))
        return log_error("'%s' is neither a file nor a folder; pipe it in and name it '-'", name);
    return add(inputs, name, (uint64_t)status.st_size);
}

int inputs_collect(struct inputs *inputs, const char *const *names, size_t count,
                   const char *spool_directory) {
    *inputs = (struct inputs){.spool = -1};
    for (size_t i = 0; i < count; i++)
        if (add_name(inputs, names[i], spool_directory) != 0) return -1;
    if (inputs->bytes == 0)
        return log_error("the input is empty ('%s'%s), expected text", names[0],
                         inputs->count > 1 ? " and the other files" : "");
    return 0;
}

void inputs_release(struct inputs *inputs) {
    for (size_t i = 0; i < inputs->count; i++) free(inputs->list[i].path);
    free(inputs->list);
    if (inputs->spool >= 0) close(inputs->spool);
    *inputs = (struct inputs){.spool = -1};
}
