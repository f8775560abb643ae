/* terminal.c — see terminal.h. */
#include "llmc/log/terminal.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Returns the process's parent; 0 if there is none, or if it cannot be found. */
static int parent_of(int process) {
    char path[64], text[512] = "";
    int parent = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    size_t bytes = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[bytes] = 0;
    const char *name_end =
        strrchr(text, ')'); /* PID (NAME) STATE PARENT; NAME may contain any character */
    if (!name_end || sscanf(name_end, ") %*c %d", &parent) != 1) return 0;
    return parent;
}

static bool is_terminal(const char *path, const struct stat *s) {
    if (!S_ISCHR(s->st_mode)) return false;
    int file = open(path, O_RDONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
    bool yes = file >= 0 && isatty(file);
    if (file >= 0) close(file);
    return yes;
}

/* Programs between mpirun and this process, such as shells, have the same stdout. The first
 * ancestor with another stdout is mpirun. */
bool terminal_behind_stdout(void) {
    struct stat ours, theirs;
    if (!isatty(STDOUT_FILENO) || fstat(STDOUT_FILENO, &ours)) return false;
    if (!getenv("OMPI_COMM_WORLD_SIZE")) return true;
    for (int process = getppid(); process > 0; process = parent_of(process)) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/fd/1", process);
        if (stat(path, &theirs)) return false;
        if (theirs.st_dev != ours.st_dev || theirs.st_ino != ours.st_ino)
            return is_terminal(path, &theirs);
    }
    return false;
}
