/* file.h — operations on files that report their errors (error.h).
 */
#ifndef LLMC_UTIL_FILE_H
#define LLMC_UTIL_FILE_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { FILE_PATH_BYTES = 4096 };

/* Call it first. If the program was started without stdin, stdout or stderr, the next file would get its
 * number, and messages would be printed into it. Writes to what is opened here in its place fail. */
void file_hold_standard(void);

/* path = directory/name. Returns 0, or -1 after reporting a path that is too long. */
int file_join(char path[FILE_PATH_BYTES], const char *directory, const char *name);

/* The first number, a %lf of `format`, in a line of DIRECTORY/FILE (scanf(3)); -1: there is none. */
double file_number(const char *directory, const char *file, const char *format);

bool file_is_directory(const char *path);
bool file_is_regular(const char *path);

/* Creates a directory and its parents; one that exists is fine. Returns 0, or -1 after reporting.
 */
int file_make_directory(const char *path);

/* A whole file mapped for reading. */
struct file_map {
    const void *data; /* NULL for an empty file */
    size_t bytes;
};

/* Maps a regular file. Returns 0, or -1 after reporting; *map is then empty. If somebody cuts the file off
 * while it is mapped, or its disk fails, what is missing reads as zeros (else SIGBUS would end the
 * program), and it is reported at once. Whoever uses the bytes asks file_is_lost or file_unmap then. */
int file_map(const char *path, struct file_map *map);
bool file_is_lost(const struct file_map *map);
/* An empty map is fine; *map is empty afterwards. Returns 0, or -1 if the file was lost. */
int file_unmap(struct file_map *map);

/* Creates or empties a file for writing. Returns the descriptor, or -1 after reporting. */
int file_create(const char *path);

/* Writes all bytes. Returns 0, or -1 after reporting; path is for the report. */
int file_write(int descriptor, const void *data, size_t bytes, const char *path);

/* Syncs the data to disk and closes, also when syncing fails. */
int file_finish(int descriptor, const char *path);

/* Writes a file anew, and syncs it. Returns 0, or -1 after reporting. */
int file_write_bytes(const char *path, const void *data, size_t bytes);
struct json_t; /* NULL: out of memory */
int file_write_json(const char *path, const struct json_t *json, size_t flags);

/* Copies a file's bytes to a new file and syncs it. */
int file_copy(const char *from, const char *to);

/* Syncs a directory, so that names created or renamed in it survive a power failure. */
int file_sync_directory(const char *path);

#ifdef __cplusplus
}
#endif
#endif
