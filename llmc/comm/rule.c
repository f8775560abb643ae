/* rule.c — see rule.h. The file exports a struct lossynet_rule with the name lossynet_rule. */
#include "llmc/comm/rule.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "llmc/checkpoint/checksum.h"
#include "llmc/log/error.h"
#include "llmc/util/file.h"

static const struct lossynet_rule *loaded;
static char checksum[CHECKSUM_TEXT_BYTES], line[4608];
static struct sigaction before[NSIG]; /* who handled a crash: nobody, a sanitizer, UCX */

/* After this the instruction crashes again, for the handler that was there before. abort() goes on, and ends the
 * process. */
static void crashed(int number) {
    if (write(STDERR_FILENO, line, strlen(line)) >= 0) sigaction(number, &before[number], NULL);
}

/* A crash names the file, since it may be the rule's. */
static void report_crashes(const char *path) {
    static const int crashes[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    const struct sigaction report = {.sa_handler = crashed, .sa_flags = (int)SA_RESETHAND};
    snprintf(
        line, sizeof line,
        "%s: crashed with --rule %s: expected its functions to write `values` and `average` only, "
        "[count] elements (lossynet.h); gdb shows the place\n",
        log_program, path);
    for (size_t i = 0; i < sizeof crashes / sizeof *crashes; i++)
        sigaction(crashes[i], &report, &before[crashes[i]]);
}

int rule_load(const struct options *o) {
    char path[4096];
    if (!o->rule || loaded) return 0;
    /* Without a slash, dlopen would look among the system's libraries. */
    snprintf(path, sizeof path, "%s%s", strchr(o->rule, '/') ? "" : "./", o->rule);
    if (!access(path, F_OK) &&
        !file_is_regular(path)) /* dlopen would wait for a pipe's other end */
        return log_error("--rule %s: expected a regular file, a shared object", o->rule);
    report_crashes(path);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return log_error("--rule: %s: expected a shared object: cc -shared -fPIC rule.c -o rule.so",
                         dlerror());
    const struct lossynet_rule *rule = dlsym(library, "lossynet_rule");
    if (!rule)
        return log_error("--rule %s: expected it to export `const struct lossynet_rule "
                         "lossynet_rule` (lossynet.h)",
                         o->rule);
    if (rule->size != sizeof *rule)
        return log_error("--rule %s: its struct lossynet_rule has the size %zu, expected %zu: "
                         "compile it again, with this program's lossynet.h, and set .size",
                         o->rule, rule->size, sizeof *rule);
    if (!rule->send && !rule->average && !rule->receive && !rule->reliable)
        return log_error("--rule %s: expected at least one function in its struct lossynet_rule",
                         o->rule);
    if (checksum_file(path, checksum, NULL)) return -1;
    loaded = rule;
    return 0;
}

const struct lossynet_rule *rule_loaded(const struct options *o) {
    return o->rule ? loaded : NULL;
}

const char *rule_checksum(const struct options *o) {
    return o->rule ? checksum : NULL;
}
