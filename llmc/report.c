/* report.c — one line on stderr per error. */
#include "llmc/report.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

const char *report_program = "train_llama2";
int report_rank = -1;
bool report_muted = false;

int report(const char *format, ...) {
    if (report_muted) return -1;
    int saved = errno;
    char line[1024];
    size_t room = sizeof line - 1; /* the newline's place */
    int length = report_rank >= 0
                     ? snprintf(line, room, "%s: rank %d: ", report_program, report_rank)
                     : snprintf(line, room, "%s: ", report_program);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line + length, room - (size_t)length, format, arguments);
    va_end(arguments);

    size_t bytes = strlen(line);
    for (size_t i = 0; i < bytes; i++)
        if ((unsigned char)line[i] < ' ' || line[i] == 127) line[i] = '?';
    line[bytes++] = '\n';
    /* stderr may be closed or full; there is nobody left to tell */
    if (write(STDERR_FILENO, line, bytes) < 0) errno = 0;
    errno = saved;
    return -1;
}

int report_out_of_memory(const char *what, double bytes) {
    return report("out of memory: %.1f MB for %s", bytes / 1e6, what);
}
