/* file.c — maps, writes, copies and syncs files, and reports errors. */
#include "llmc/util/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/log/error.h"

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
        else
            *map = (struct file_map){data, bytes};
    }
    close(descriptor);
    return status;
}

void file_unmap(struct file_map *map) {
    if (map->data) munmap((void *)map->data, map->bytes);
    *map = (struct file_map){NULL, 0};
}

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
        if (written < 0) return log_error("cannot write '%s': %s", path, strerror(errno));
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

int file_write_text(const char *path, const char *text) {
    return file_write_bytes(path, text, strlen(text));
}

int file_copy(const char *from, const char *to) {
    struct file_map map;
    if (file_map(from, &map) != 0) return -1;
    const int status = file_write_bytes(to, map.data, map.bytes);
    file_unmap(&map);
    return status;
}

int file_sync_directory(const char *path) {
    int descriptor = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0)
        return log_error("cannot open the directory '%s': %s", path, strerror(errno));
    return file_finish(descriptor, path);
}
