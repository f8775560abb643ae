/* rule.c — see rule.h. The file exports a struct lossynet_rule with the name lossynet_rule. */
#include "llmc/comm/rule.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "llmc/log/error.h"

static const struct lossynet_rule *loaded;

int rule_load(const struct options *o) {
    char path[4096];
    if (!o->rule || loaded) return 0;
    /* Without a slash, dlopen would look among the system's libraries. */
    snprintf(path, sizeof path, "%s%s", strchr(o->rule, '/') ? "" : "./", o->rule);
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
    loaded = rule;
    return 0;
}

const struct lossynet_rule *rule_loaded(const struct options *o) {
    return o->rule ? loaded : NULL;
}
