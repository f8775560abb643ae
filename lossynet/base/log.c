/* log.c — writes one line to the user: to stderr, or to the function that the program has set for the comm
 * or for the process. */
#include "lossynet/base/base.h"

#include <stdarg.h>
#include <stdio.h>

static struct ln_log_target process;
static _Thread_local const struct ln_log_target *used;

void ln_log_to(lossynet_log_function function, void *context) {
    process = (struct ln_log_target){function, context};
}

const struct ln_log_target *ln_log_use(const struct ln_log_target *target) {
    const struct ln_log_target *before = used;
    used = target;
    return before;
}

static void write_line(const struct ln_log_target *target, const char *format, va_list arguments) {
    char line[512];
    vsnprintf(line, sizeof line, format, arguments);
    if (!target || !target->function) target = &process;
    if (target->function)
        target->function(target->context, line);
    else
        fprintf(stderr, "lossynet: %s\n", line); /* one call: lines of several ranks stay whole */
}

void ln_log(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    write_line(used, format, arguments);
    va_end(arguments);
}

lossynet_status ln_fail(lossynet_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    write_line(used, format, arguments);
    va_end(arguments);
    return status;
}

lossynet_status ln_call_wrong(const struct ln_log_target *target, bool ends, const char *function,
                              const char *format, ...) {
    char text[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    ln_fail_at(target ? target : used, LOSSYNET_INVALID, "%s: %s", function, text);
    if (ends) abort();
    return LOSSYNET_INVALID;
}

lossynet_status ln_fail_at(const struct ln_log_target *target, lossynet_status status,
                           const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    write_line(target, format, arguments);
    va_end(arguments);
    return status;
}
