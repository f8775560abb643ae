/* inputs.h — which texts tokenize reads: files, folders, standard input.
 */
#ifndef DATA_INPUTS_H
#define DATA_INPUTS_H

#include <stddef.h>
#include <stdint.h>

struct input {
    char *path; /* to open */
    uint64_t bytes;
};

struct inputs {
    struct input *list; /* in the order in which they are read */
    size_t count;
    uint64_t bytes;  /* of all */
    size_t skipped;  /* files in folders that are no text */
    int spool;       /* what standard input was copied to, -1 without */
    size_t capacity; /* of list */
};

/* Collects the named texts, in the order of the names. A file is text in UTF-8. A folder stands
 * for the text files in it and in its folders, sorted by name at each level; names that begin with
 * a dot are left out, and so are files with a zero byte among their first 8,192, which are no text.
 * Links are followed. "-" is standard input, copied to a file without a name in spool_directory, so
 * that it can be split and shared among threads like any other.
 * Returns 0, or -1 after reporting. Release in either case. */
int inputs_collect(struct inputs *inputs, const char *const *names, size_t count,
                   const char *spool_directory);

void inputs_release(struct inputs *inputs);

#endif
