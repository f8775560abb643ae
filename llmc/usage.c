/* usage.c — see usage.h. */
#include "llmc/usage.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/backend.h"
#include "llmc/backend_cuda.h"
#include "llmc/checksum.h"
#include "llmc/config.h"
#include "llmc/file.h"
#include "llmc/network.h"
#include "llmc/report.h"
#include "llmc/resume.h"

int usage_sequence_length(const struct options *o, int positions) {
    return o->seq ? o->seq : positions < 1024 ? positions : 1024;
}

void usage_version(const char *revision) {
    printf("train_llama2 %s, %s\n", revision, backend_cpu()->details);
}

static int check_modes(const struct options *o, int ranks) {
    const int workers = o->workers ? o->workers : ranks;
    if (o->eval + o->dry_run + o->preflight + (o->generate != NULL) > 1)
        return report(
            "--eval, --generate, --dry-run and --preflight: expected at most one of them");
    if ((o->eval || o->generate) && !file_is_directory(o->model))
        return report("--model: expected a model directory, found none at '%s'", o->model);
    if (o->eval && !o->val)
        return report("--eval: expected --val GLOB with the token files to evaluate on");
    if (o->generate && ranks > 1)
        return report("--generate: expected one process, started as %d ranks", ranks);
    if (!o->eval && !o->generate && !o->dry_run && !o->preflight && !o->train)
        return report("expected --train GLOB, or one of --eval, --generate, --dry-run, --preflight "
                      "(see --help)");
    if (o->train && o->save_every && !o->out && !o->dry_run && !o->preflight)
        return report("--save-every: expected --out DIR, where checkpoints go");
    if (!o->dry_run && workers % ranks)
        return report("--workers: expected a multiple of the %d ranks, got %d", ranks, workers);
    if (o->device == DEVICE_CUDA && !o->dry_run && !backend_cuda_built)
        return report("--device cuda: this binary has no CUDA backend; expected auto or cpu");
    if (o->device == DEVICE_CPU && o->dtype == OPTION_DTYPE_BF16)
        return report("--dtype bf16: expected a GPU; the CPU computes in float32");
    return 0;
}

/* It is copied beside the first checkpoint: too late to find that there is none. */
static int check_tokenizer(const struct options *o) {
    struct file_map map;
    if (!o->tokenizer || o->dry_run) return 0;
    if (file_map(o->tokenizer, &map)) return -1;
    file_unmap(&map);
    return 0;
}

static int check_model(const struct options *o, const struct llama_config *c) {
    const int seq = usage_sequence_length(o, c->positions);
    if (o->vocabulary && c->vocabulary && o->vocabulary != c->vocabulary)
        return report("--vocab-size: model %s insists on %d, got %d", o->model, c->vocabulary,
                      o->vocabulary);
    if (o->seq > c->positions)
        return report("--seq: model %s takes at most %d tokens, got %d", o->model, c->positions,
                      o->seq);
    if (o->stride && (o->stride > seq || seq < 2))
        return report("--stride: expected at most --seq, %d, and that to be 2 or more, got %d", seq,
                      o->stride);
    return 0;
}

int usage_check(const struct options *o, int ranks) {
    struct llama_config c;
    if (check_modes(o, ranks) || network_check(o, o->workers ? o->workers : ranks)) return 2;
    if (check_tokenizer(o)) return 1;
    if (config_of_model(o->model, &c)) return file_is_directory(o->model) ? 1 : 2;
    return check_model(o, &c) ? 2 : 0;
}

/* ---- what ranks agree on ---------------------------------------------------------------- */

struct started { /* how a rank was */
    int32_t status;
    char revision[60];
    char option[OPTIONS_MOST][CHECKSUM_TEXT_BYTES]; /* of values, in the order of options_json */
};

/* What ranks may each have their own of: where a node keeps what is read, its devices, what one of
 * them shows or notes. */
static bool may_differ(const char *name) {
    static const char *const names[] = {"model",     "device",    "recompute", "threads",
                                        "train",     "val",       "tokenizer", "quiet",
                                        "interface", "pace-gbps", "log",       "record-loss"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0) return true;
    return false;
}

static void note_options(const struct options *o, struct started *mine) {
    json_t *all = options_json(o), *value;
    const char *name;
    int i = 0;
    json_object_foreach(all, name, value) {
        char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(17));
        if (text && !may_differ(name)) checksum_bytes(text, strlen(text), mine->option[i]);
        free(text);
        i++;
    }
    json_decref(all);
}

/* The first option of which two ranks have other values. */
static void find_other(const struct options *o, const struct started *a, const struct started *b,
                       char name[64]) {
    json_t *all = options_json(o), *value;
    const char *key;
    int i = 0;
    name[0] = 0;
    json_object_foreach(all, key, value) {
        if (!name[0] && strcmp(a->option[i], b->option[i]) != 0) snprintf(name, 64, "%s", key);
        i++;
    }
    json_decref(all);
}

static int read_line(int argc, char **argv, int ranks, struct options *o) {
    int status = options_parse(argc, argv, o);
    if (!status && !o->help && !o->version) status = resume_choose(o);
    if (!status && !o->help && !o->version) status = usage_check(o, ranks);
    return status;
}

/* *wrong: the first rank whose command line is, -1 if none; else all are compared with rank 0.
 * -1 on memory and network errors. */
static int compare(const struct lossynet_world *world, const struct options *o,
                   const struct started *mine, int *wrong) {
    struct started *all = (struct started *)calloc((size_t)world->ranks, sizeof *all);
    if (!all) return report_out_of_memory("the list of ranks", 0);
    all[world->rank] = *mine;
    int status = lossynet_bootstrap_gather(world, all, sizeof *all) ? -1 : 0;
    *wrong = -1;
    for (int r = 0; r < world->ranks && !status && *wrong < 0; r++)
        if (all[r].status) *wrong = r;
    if (!status && *wrong >= 0) status = all[*wrong].status;
    for (int r = 1; r < world->ranks && !status; r++) {
        if (!strcmp(all[r].revision, all[0].revision)) continue;
        status = 1;
        report("rank %d runs build %s of this program, rank 0 build %s: expected one build, copied "
               "to every node",
               r, all[r].revision, all[0].revision);
    }
    for (int r = 1; r < world->ranks && !status; r++) {
        char name[64];
        if (!memcmp(all[r].option, all[0].option, sizeof all[0].option)) continue;
        find_other(o, &all[r], &all[0], name);
        status = 2;
        report("rank %d was started with another --%s than rank 0: expected the same on all "
               "ranks",
               r, name);
    }
    free(all);
    return status;
}

int usage_read(int argc, char **argv, const struct lossynet_world *world, const char *revision,
               struct options *o) {
    struct started mine = {0};
    int wrong = -1;
    report_muted = world->rank > 0; /* every rank finds the same mistake; one tells */
    mine.status = read_line(argc, argv, world->ranks, o);
    snprintf(mine.revision, sizeof mine.revision, "%s", revision);
    if (!mine.status && world->ranks > 1) note_options(o, &mine);
    int status = compare(world, o, &mine, &wrong);
    if (wrong > 0 && wrong == world->rank) {
        report_muted = false;
        report_rank = wrong;
        read_line(argc, argv, world->ranks, o); /* once more, aloud */
    }
    return status < 0 ? 1 : status;
}
