/* terminal.c — see terminal.h. */
#include "llmc/log/terminal.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/util/file.h"

/* Returns the process's parent; 0 or less if there is none, or if it cannot be found. */
static int parent_of(int process) {
    char directory[64];
    snprintf(directory, sizeof directory, "/proc/%d", process);
    return (int)file_number(directory, "status", "PPid: %lf");
}

static int behind =
    STDOUT_FILENO; /* the terminal behind stdout; stays open, to ask for its width */

static bool is_terminal(const char *path, const struct stat *s) {
    if (!S_ISCHR(s->st_mode)) return false;
    if (behind != STDOUT_FILENO) return true;
    int file = open(path, O_RDONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
    bool yes = file >= 0 && isatty(file);
    if (yes) behind = file;
    if (file >= 0 && !yes) close(file);
    return yes;
}

/* Programs between mpirun and this process, such as shells, have the same stdout. The first
 * ancestor with another stdout is mpirun. */
bool terminal_behind_stdout(void) {
    struct stat ours, theirs;
    const char *type = getenv("TERM");
    if (type && !strcmp(type, "dumb")) return false;
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

int terminal_columns(FILE *file) {
    struct winsize size;
    const bool known = !ioctl(file == stdout ? behind : fileno(file), TIOCGWINSZ, &size);
    return known && size.ws_col ? size.ws_col : 80;
}

void terminal_redraw(FILE *file, const char *line) {
    int columns = terminal_columns(file) - 1,
        bytes = 0; /* some terminals begin a new row after the last column */
    for (; line[bytes]; bytes++) {
        const bool begins = ((unsigned char)line[bytes] & 0xC0) != 0x80; /* a character of UTF-8 */
        if (begins && columns-- <= 0) break;
    }
    fprintf(file, "\r\033[K%.*s", bytes, line);
    fflush(file);
}
