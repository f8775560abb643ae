/* common_facts.c — see common_facts.h. */
#include "llmc/comm/common_facts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "llmc/comm/rule.h"
#include "llmc/comm/settings.h"
#include "llmc/data/dataloader.h"
#include "llmc/log/error.h"
#include "llmc/model/config.h"
#include "llmc/options/options_table.h"
#include "llmc/util/processors.h"
#include "llmc/util/threads.h"
#include "lossynet/lossynet_trainer.h"

const char *const common_fact_names[FACTS] = {
    "the model's shape",     "the training data",      "the validation data",
    "the key of --key-file", "the checksum of --rule", "the checksum of --loss-model's trace"};

static int find_shape(const struct options *o, int data_vocabulary, char text[FACT_BYTES]) {
    struct llama_config c;
    const struct rope_scaling *s = &c.rope_scaling;
    if (config_of_model(o->model, &c) ||
        config_complete(o->model, o->vocabulary, data_vocabulary, &c))
        return -1;
    const int n =
        snprintf(text, FACT_BYTES,
                 "%d layers, width %d, hidden %d, %d heads, %d kv heads of %d, %d "
                 "positions, vocabulary %d, %g, %g%s",
                 c.layers, c.width, c.hidden, c.heads, c.kv_heads, c.head_size, c.positions,
                 c.vocabulary, (double)c.norm_eps, (double)c.rope_theta, c.tied ? ", tied" : "");
    if (s->factor)
        snprintf(text + n, FACT_BYTES - (size_t)n, ", rope scaled by %g, %g, %g, %d",
                 (double)s->factor, (double)s->low, (double)s->high, s->original);
    return 0;
}

static int find_key(const char *path, const char *run, char text[FACT_BYTES]) {
    enum { DIGITS = 16 }; /* enough to tell two keys apart */
    char message[FACT_BYTES], proof[65];
    struct stat status;
    snprintf(message, sizeof message, "run %s", run);
    if (lossynet_key_proof(path, message, proof))
        return log_error(
            "--key-file: cannot use '%s': expected a file of 16 to 4096 bytes, such as "
            "head -c 32 /dev/urandom writes, the same on all ranks",
            path);
    snprintf(text, FACT_BYTES, "%.*s", DIGITS, proof);
    if (!stat(path, &status) && status.st_mode & S_IROTH)
        log_error("--key-file: everybody on this host may read '%s': expected chmod 600 '%s'", path,
                  path);
    return 0;
}

int common_facts_find(const struct options *o, const char *run, struct common_facts *out) {
    int vocabulary = 0;
    memset(out, 0, sizeof *out);
    if (o->rule) snprintf(out->text[FACT_RULE], FACT_BYTES, "%s", rule_checksum(o));
    const char *trace = comm_trace_checksum(o);
    if (trace) snprintf(out->text[FACT_TRACE], FACT_BYTES, "%s", trace);
    return (o->val && dataloader_describe(o->val, out->text[FACT_VAL], &vocabulary)) ||
                   (o->train && !o->eval &&
                    dataloader_describe(o->train, out->text[FACT_TRAIN], &vocabulary)) ||
                   find_shape(o, vocabulary, out->text[FACT_MODEL]) ||
                   (o->net.key_file && find_key(o->net.key_file, run, out->text[FACT_KEY]))
               ? -1
               : 0;
}

json_t *common_facts_json(const struct options *o, const char *run) {
    json_t *all = options_json(o, LOSSYNET_EACH_RANK | EACH_START);
    struct common_facts facts;
    if (common_facts_find(o, run, &facts)) {
        json_decref(all);
        return NULL;
    }
    for (int i = 0; i < FACTS; i++)
        json_object_set_new(all, common_fact_names[i], json_string(facts.text[i]));
    return all;
}

int common_answer(const struct lossynet_world *world, void *answer, size_t bytes) {
    char *all = calloc((size_t)world->ranks, bytes);
    if (!all) return log_out_of_memory("the answers of all ranks", (double)world->ranks * bytes);
    memcpy(all + (size_t)world->rank * bytes, answer, bytes);
    const int status = lossynet_bootstrap_gather(world, all, bytes) ? -1 : 0;
    memcpy(answer, all, bytes);
    free(all);
    return status;
}

int common_threads(const struct lossynet_world *world, int wanted) {
    struct processors *all = calloc((size_t)world->ranks, sizeof *all);
    if (!all) return log_out_of_memory("the list of processors", 0);
    processors_find(&all[world->rank]);
    const int status =
        world->ranks > 1 && lossynet_bootstrap_gather(world, all, sizeof *all) ? -1 : 0;
    if (!status) threads_choose(wanted, processors_share(all, world->ranks, world->rank));
    free(all);
    return status;
}
