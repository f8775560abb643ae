/* log.c — writes one line to the user: to stderr, or to the function that the program has set. */
#include "lossynet/base/base.h"

#include <stdarg.h>
#include <stdio.h>

static struct {
    lossynet_log_function function;
    void *context;
} sink;

void lossynet_log_to(lossynet_log_function function, void *context) {
    sink.function = function;
    sink.context = context;
}

void lossynet_log(const char *format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    if (sink.function)
        sink.function(sink.context, line);
    else
        fprintf(stderr, "lossynet: %s\n", line); /* one call: lines of several ranks stay whole */
}
