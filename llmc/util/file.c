/* file.c — maps, writes, copies and syncs files, and reports errors. */
#include "llmc/util/file.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/log/error.h"

void file_hold_standard(void) {
    int file;
    do file = open("/dev/null", O_RDONLY);
    while (file >= 0 && file <= STDERR_FILENO);
    if (file >= 0) close(file);
}

int file_join(char path[FILE_PATH_BYTES], const char *directory, const char *name) {
    int length = snprintf(path, FILE_PATH_BYTES, "%s/%s", directory, name);
    if (length < 0 || length >= FILE_PATH_BYTES)
        return log_error("the path '%.100s...' with '%.100s' is longer than %d bytes", directory,
                         name, FILE_PATH_BYTES - 1);
    return 0;
}

/* Opens a regular file for reading; O_NONBLOCK so that a pipe in its place cannot hang us. */
static int open_regular(const char *path, size_t *bytes) {
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0) return log_error("cannot open '%s': %s", path, strerror(errno));
    struct stat status;
    if (fstat(descriptor, &status) != 0) {
        log_error("cannot examine '%s': %s", path, strerror(errno));
        goto close_descriptor;
    }
    if (!S_ISREG(status.st_mode)) {
        log_error("'%s' is %s, expected a regular file", path,
                  S_ISDIR(status.st_mode) ? "a directory" : "a device or pipe");
        goto close_descriptor;
    }
    *bytes = (size_t)status.st_size;
    return descriptor;

close_descriptor:
    close(descriptor);
    return -1;
}

double file_number(const char *directory, const char *file, const char *format) {
    char path[FILE_PATH_BYTES], line[256];
    double value = -1;
    snprintf(path, sizeof path, "%.3000s/%s", directory, file);
    FILE *stream = fopen(path, "re");
    while (stream && value < 0 && fgets(line, sizeof line, stream)) sscanf(line, format, &value);
    if (stream) fclose(stream);
    return value;
}

bool file_is_directory(const char *path) {
    struct stat s;
    return !stat(path, &s) && S_ISDIR(s.st_mode);
}

bool file_is_regular(const char *path) {
    struct stat s;
    return !stat(path, &s) && S_ISREG(s.st_mode);
}

int file_make_directory(const char *path) {
    char part[FILE_PATH_BYTES];
    size_t length = strlen(path);
    if (length >= sizeof part) return log_error("%.64s...: the path is too long", path);
    for (size_t i = 1; i <= length; i++) {
        if (path[i] && path[i] != '/') continue;
        snprintf(part, sizeof part, "%.*s", (int)i, path);
        if (mkdir(part, 0777) && errno != EEXIST) {
            return log_error("%s: cannot create the directory: %s", part, strerror(errno));
        }
    }
    if (!file_is_directory(path)) return log_error("%s: expected a directory, found a file", path);
    return 0;
}

/* ---- maps -------------------------------------------------------------------------------- */

/* The maps in use, for the handler of SIGBUS. An entry is never freed, since a handler may look at it. */
struct entry {
    struct entry *next;
    const char *_Atomic data; /* NULL: not in use */
    size_t bytes;
    char *path;
    atomic_bool lost;
};

static struct entry *_Atomic entries;
static atomic_int losses; /* since the start */
static pthread_mutex_t adding = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction before; /* what SIGBUS did */

static struct entry *entry_of(const void *address) {
    for (struct entry *e = atomic_load(&entries); e; e = e->next) {
        const char *data = atomic_load(&e->data);
        if (data && (const char *)address >= data && (const char *)address < data + e->bytes)
            return e;
    }
    return NULL;
}

/* Puts zeros in the place of the rest of a file that has become shorter, or whose disk fails. */
static void replace_lost(int number, siginfo_t *info, void *context) {
    const int error = errno;
    struct entry *e = entry_of(info->si_addr);
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    (void)context;
    if (e) {
        const char *from = (const char *)((uintptr_t)info->si_addr / page * page);
        const size_t bytes = (size_t)(atomic_load(&e->data) + e->bytes - from);
        if (!atomic_exchange(&e->lost, true)) {
            atomic_fetch_add(&losses, 1);
            log_error(
                "'%s' has become shorter while it is read, or its disk fails: expected %zu bytes "
                "that nobody changes; replace a file by renaming another one to its name",
                e->path, e->bytes);
        }
        if (mmap((void *)from, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
            MAP_FAILED)
            e = NULL;
    }
    if (!e) sigaction(number, &before, NULL); /* the access is made again */
    errno = error;
}

/* Again with each map, since a library (MPI) may have set its own handler meanwhile. */
static void handle_losses(void) {
    struct sigaction action = {.sa_sigaction = replace_lost, .sa_flags = SA_SIGINFO | SA_RESTART},
                     now;
    if (sigaction(SIGBUS, NULL, &now) || now.sa_sigaction == replace_lost) return;
    before = now;
    sigaction(SIGBUS, &action, NULL);
}

static int add_entry(const char *path, void *data, size_t bytes) {
    pthread_mutex_lock(&adding);
    handle_losses();
    struct entry *e = atomic_load(&entries);
    while (e && atomic_load(&e->data)) e = e->next;
    char *copy = strdup(path);
    struct entry *new = e || !copy ? NULL : (struct entry *)calloc(1, sizeof *new);
    struct entry *taken = e ? e : new;
    if (copy && taken) {
        taken->path = copy, taken->bytes = bytes;
        atomic_store(&taken->lost, false);
        atomic_store(&taken->data, data);
        if (new) new->next = atomic_load(&entries), atomic_store(&entries, new);
    }
    pthread_mutex_unlock(&adding);
    if (copy && taken) return 0;
    free(copy);
    return log_error("cannot map '%s': out of memory", path);
}

int file_map(const char *path, struct file_map *map) {
    *map = (struct file_map){NULL, 0};
    size_t bytes = 0;
    int descriptor = open_regular(path, &bytes);
    if (descriptor < 0) return -1;
    int status = 0;
    if (bytes > 0) {
        void *data = mmap(NULL, bytes, PROT_READ, MAP_SHARED, descriptor, 0);
        if (data == MAP_FAILED)
            status = log_error("cannot map '%s' (%zu bytes): %s", path, bytes, strerror(errno));
        else if (!(status = add_entry(path, data, bytes)))
            *map = (struct file_map){data, bytes};
        else
            munmap(data, bytes);
    }
    close(descriptor);
    return status;
}

bool file_is_lost(const struct file_map *map) {
    if (!atomic_load(&losses) || !map->data) return false;
    const struct entry *e = entry_of(map->data);
    return e && atomic_load(&e->lost);
}

int file_unmap(struct file_map *map) {
    struct entry *e = map->data ? entry_of(map->data) : NULL;
    const bool lost = file_is_lost(map);
    if (e) {
        pthread_mutex_lock(&adding);
        free(e->path);
        atomic_store(&e->data, NULL);
        pthread_mutex_unlock(&adding);
        munmap((void *)map->data, map->bytes);
    }
    *map = (struct file_map){NULL, 0};
    return lost ? -1 : 0;
}

/* ---- writing ------------------------------------------------------------------------------- */

int file_create(const char *path) {
    int descriptor = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (descriptor < 0) return log_error("cannot create '%s': %s", path, strerror(errno));
    return descriptor;
}

int file_write(int descriptor, const void *data, size_t bytes, const char *path) {
    const char *from = data;
    while (bytes > 0) {
        size_t most = 1 << 30; /* Linux writes at most 2 GiB at once */
        ssize_t written = write(descriptor, from, bytes < most ? bytes : most);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return log_error("cannot write '%s': %s", path, log_reason());
        from += written;
        bytes -= (size_t)written;
    }
    return 0;
}

int file_finish(int descriptor, const char *path) {
    int status = 0;
    /* EINVAL: a device or pipe, which cannot be synced */
    if (fsync(descriptor) != 0 && errno != EINVAL)
        status = log_error("cannot write '%s' to disk: %s", path, strerror(errno));
    if (close(descriptor) != 0 && status == 0)
        status = log_error("cannot close '%s': %s", path, strerror(errno));
    return status;
}

int file_write_bytes(const char *path, const void *data, size_t bytes) {
    const int descriptor = file_create(path);
    if (descriptor < 0) return -1;
    const int status = file_write(descriptor, data, bytes, path);
    return file_finish(descriptor, path) ? -1 : status;
}

int file_write_json(const char *path, const json_t *json, size_t flags) {
    char *text = json ? json_dumps(json, flags) : NULL;
    const int status = text ? file_write_bytes(path, text, strlen(text))
                            : log_error("cannot write '%s': out of memory", path);
    free(text);
    return status;
}

int file_copy(const char *from, const char *to) {
    struct file_map map;
    if (file_map(from, &map)) return -1;
    const int status = file_write_bytes(to, map.data, map.bytes);
    return file_unmap(&map) ? -1 : status;
}

int file_sync_directory(const char *path) {
    int descriptor = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0)
        return log_error("cannot open the directory '%s': %s", path, strerror(errno));
    return file_finish(descriptor, path);
}
