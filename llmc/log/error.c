/* error.c — writes one line to stderr per error. */
#include "llmc/log/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

const char *log_program = "train_llama2";
int log_rank = -1;
bool log_muted = false;

int(log_error)(const char *format, ...) {
    if (log_muted) return -1;
    int saved = errno;
    char line[1024];
    size_t room = sizeof line - 1; /* room for the newline */
    int length = log_rank >= 0 ? snprintf(line, room, "%s: rank %d: ", log_program, log_rank)
                               : snprintf(line, room, "%s: ", log_program);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line + length, room - (size_t)length, format, arguments);
    va_end(arguments);
    size_t bytes = strlen(line);
    for (size_t i = 0; i < bytes; i++)
        if ((unsigned char)line[i] < ' ' || line[i] == 127) line[i] = '?';
    line[bytes++] = '\n';
    /* If stderr is closed or full, there is no other place to report to. */
    if (write(STDERR_FILENO, line, bytes) < 0) errno = 0;
    errno = saved;
    return -1;
}

const char *log_reason(void) {
    static _Thread_local char text[96];
    struct rlimit limit;
    if (errno != EFBIG || getrlimit(RLIMIT_FSIZE, &limit) || limit.rlim_cur == RLIM_INFINITY)
        return strerror(errno);
    snprintf(text, sizeof text, "File too large for the limit of %llu bytes: raise it (ulimit -f)",
             (unsigned long long)limit.rlim_cur);
    return text;
}

int(log_out_of_memory)(const char *what, double bytes) {
    return log_error("out of memory: %.1f MB for %s", bytes / 1e6, what);
}
