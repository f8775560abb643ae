/* named.c — settings by name and value, for programs in languages that cannot fill in a C struct.
 *
 * The names and defaults are those of the table of options (options.c). Texts that settings point to
 * live as long as the settings.
 */
#include "lossynet/comm.h"
#include "lossynet/lossynet_trainer.h"

#include <stdlib.h>

enum { OPTIONS_MOST = 64 }; /* the table has no more */
#define LN_NO_TEXT "expected settings of lossynet_named_open, and texts, got NULL"

struct lossynet_named {
    struct lossynet_options options;
    struct lossynet_settings settings; /* what is not among the options stays in them */
    size_t *bucket_elements;
    struct lossynet_tensor *tensor; /* names are own copies */
    char *text[OPTIONS_MOST];       /* the value of each option, as it was given */
};

lossynet_status lossynet_named_set(struct lossynet_named *named, const char *name,
                                   const char *value) {
    LN_EXPECT(NULL, named && name && value, LN_NO_TEXT);
    const struct lossynet_option *option = lossynet_option_named(name);
    char wrong[512];
    if (!option) return ln_refuse("there is no setting '%s'", name);
    char *text = strdup(value);
    if (!text) return ln_fail(LOSSYNET_NO_MEMORY, "no memory for the setting %s", name);
    struct lossynet_options changed = named->options;
    if (option->kind == LOSSYNET_OPTION_TEXT && !*value && !option->initial) {
        *(const char **)((char *)&changed + option->offset) = NULL;
    } else if (!lossynet_option_set(option, &changed, text, wrong, sizeof wrong)) {
        ln_log("%s", wrong);
        free(text);
        return LOSSYNET_INVALID;
    }
    named->options = changed;
    char **kept = &named->text[option - lossynet_option_at(0)];
    free(*kept);
    *kept = text;
    return LOSSYNET_OK;
}

const char *lossynet_named_get(const struct lossynet_named *named, const char *name) {
    LN_DEMAND(NULL, named && name, LN_NO_TEXT);
    const struct lossynet_option *option = lossynet_option_named(name);
    return option ? named->text[option - lossynet_option_at(0)] : NULL;
}

const char *lossynet_named_name(int index) {
    const struct lossynet_option *option = lossynet_option_at(index);
    return option ? option->name : NULL;
}

struct lossynet_named *lossynet_named_open(int buckets, const size_t *bucket_elements) {
    LN_DEMAND(NULL, bucket_elements || buckets <= 0, "expected the sizes of buckets, got NULL");
    struct lossynet_named *named = calloc(1, sizeof *named);
    const size_t bytes = (buckets > 0 ? (size_t)buckets : 1) * sizeof(size_t);
    if (named) named->bucket_elements = malloc(bytes);
    if (!named || !named->bucket_elements) {
        ln_log("no memory for settings of %d buckets", buckets);
        lossynet_named_close(named);
        return NULL;
    }
    if (buckets > 0) memcpy(named->bucket_elements, bucket_elements, bytes);
    named->settings.buckets = buckets;
    named->settings.bucket_elements = named->bucket_elements;
    const struct lossynet_option *option;
    for (int i = 0; (option = lossynet_option_at(i)) != NULL; i++) {
        lossynet_option_reset(option, &named->options);
        named->text[i] = strdup(option->initial ? option->initial : option->argument ? "" : "0");
        if (named->text[i]) continue;
        ln_log("no memory for settings");
        lossynet_named_close(named);
        return NULL;
    }
    return named;
}

lossynet_status lossynet_named_tensor(struct lossynet_named *named, const char *name, size_t first,
                                      size_t count) {
    LN_EXPECT(NULL, named && name, LN_NO_TEXT);
    const size_t bytes = (size_t)(named->settings.tensor_count + 1) * sizeof *named->tensor;
    struct lossynet_tensor *more = realloc(named->tensor, bytes);
    if (more) named->settings.tensors = named->tensor = more;
    char *copy = more ? strdup(name) : NULL;
    if (!copy) return ln_fail(LOSSYNET_NO_MEMORY, "no memory for the name of a tensor");
    named->tensor[named->settings.tensor_count++] = (struct lossynet_tensor){copy, first, count};
    return LOSSYNET_OK;
}

void lossynet_named_rule(struct lossynet_named *named, const struct lossynet_rule *rule) {
    LN_DEMAND(NULL, named, LN_NO_TEXT);
    named->settings.rule = rule;
}

void lossynet_named_shards(struct lossynet_named *named, const size_t *shard_elements) {
    LN_DEMAND(NULL, named, LN_NO_TEXT);
    named->settings.shard_elements = shard_elements;
}

const struct lossynet_settings *lossynet_named_settings(struct lossynet_named *named, int ranks) {
    LN_DEMAND(NULL, named, LN_NO_TEXT);
    lossynet_options_apply(&named->options, ranks, &named->settings);
    return &named->settings;
}

void lossynet_named_close(struct lossynet_named *named) {
    if (!named) return;
    for (int i = 0; i < OPTIONS_MOST; i++) free(named->text[i]);
    for (int t = 0; t < named->settings.tensor_count; t++) free((char *)named->tensor[t].name);
    free(named->tensor);
    free(named->bucket_elements);
    free(named);
}

size_t lossynet_struct_bytes(const char *name) {
    LN_DEMAND(NULL, name, LN_NO_TEXT);
    static const struct {
        const char *name;
        size_t bytes;
    } structs[] = {{"world", sizeof(struct lossynet_world)},
                   {"counters", sizeof(struct lossynet_counters)},
                   {"drift", sizeof(struct lossynet_drift)},
                   {"not_finite", sizeof(struct lossynet_not_finite)}};
    for (size_t i = 0; i < sizeof structs / sizeof *structs; i++)
        if (strcmp(structs[i].name, name) == 0) return structs[i].bytes;
    return 0;
}

void lossynet_messages_to(lossynet_log_function log, void *context) {
    ln_log_to(log, context);
}
