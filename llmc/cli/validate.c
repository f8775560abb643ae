/* validate.c — see validate.h. */
#include "llmc/cli/validate.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/backend/backend.h"
#include "llmc/backend/cpu/backend_cpu.h"
#include "llmc/backend/cuda/backend_cuda.h"
#include "llmc/cli/generate.h"
#include "llmc/checkpoint/checksum.h"
#include "llmc/comm/common_facts.h"
#include "llmc/data/dataloader.h"
#include "llmc/checkpoint/earlier_run.h"
#include "llmc/options/options_table.h"
#include "llmc/model/config.h"
#include "llmc/util/file.h"
#include "llmc/comm/settings.h"
#include "llmc/comm/views.h"
#include "llmc/log/error.h"
#include "llmc/checkpoint/resume.h"

int validate_sequence_length(const struct options *o, int positions) {
    return o->seq ? o->seq : positions < 1024 ? positions : 1024;
}

int validate_planned_config(const struct options *o, struct llama_config *out) {
    char text[DATALOADER_DESCRIPTION];
    int found = o->vocabulary;
    const bool muted = log_muted;
    log_muted = true;
    if (!found && o->train) dataloader_describe(o->train, text, &found);
    log_muted = muted;
    return config_of_model(o->model, out) ||
                   config_complete(o->model, found ? found : VALIDATE_VOCABULARY, 0, out)
               ? -1
               : 0;
}

int validate_answer(const struct options *o, const char *revision) {
    char names[160];
    if (o->help) return options_help(o->help_topic);
    printf("train_llama2 %s (lossynet %s), %s, %s\n", TRAIN_LLAMA2_VERSION, lossynet_version(),
           revision, backend_cpu(DTYPE_FLOAT32)->details);
    backend_cpu_list(names, sizeof names);
    printf("instruction sets: %s (TRAIN_LLAMA2_ISA=NAME takes another than the first)\n", names);
    return 0;
}

static int check_modes(const struct options *o, int ranks) {
    const int workers = o->net.workers ? o->net.workers : ranks;
    if (o->eval + o->dry_run + o->preflight + (o->generate != NULL) > 1)
        return log_error("--eval, --generate, --dry-run and --preflight: expected at most one of "
                         "them");
    if ((o->eval || o->generate) && !file_is_directory(o->model))
        return log_error("--model: expected a model directory, found none at '%s'", o->model);
    if (o->eval && !o->val)
        return log_error("--eval: expected --val GLOB with the token files to evaluate on");
    if (o->generate && ranks > 1)
        return log_error("--generate: expected one process, started as %d ranks", ranks);
    if (!o->eval && !o->generate && !o->dry_run && !o->preflight && !o->train)
        return log_error("expected --train GLOB, or one of --eval, --generate, --dry-run, "
                         "--preflight (see --help)");
    if (o->train && o->save_every && !o->out && !o->dry_run && !o->preflight)
        return log_error("--save-every: expected --out DIR, where checkpoints go");
    if (!o->dry_run && workers % ranks)
        return log_error("--workers: expected a multiple of the %d ranks, got %d", ranks, workers);
    if (o->device == DEVICE_CUDA && !o->dry_run && !backend_cuda_built)
        return log_error("--device cuda: this binary has no CUDA backend; expected auto or cpu");
    if (o->attention == OPTION_ATTENTION_CUDNN &&
        (o->device == DEVICE_CPU || o->dtype == OPTION_DTYPE_FLOAT32))
        return log_error("--attention cudnn computes in bf16 on a GPU: expected no --device cpu "
                         "and no --dtype float32");
    return 0;
}

/* The tokenizer is copied with the first checkpoint. Then it would be too late to find that it is
 * missing. */
static int check_tokenizer(const struct options *o) {
    struct file_map map;
    if (!o->tokenizer || o->dry_run) return 0;
    if (o->sample_every && generate_check_tokenizer(o->tokenizer)) return -1;
    if (file_map(o->tokenizer, &map)) return -1;
    file_unmap(&map);
    return 0;
}

static int check_model(const struct options *o, const struct llama_config *c) {
    const int seq = validate_sequence_length(o, c->positions);
    if (o->vocabulary && c->vocabulary && o->vocabulary != c->vocabulary)
        return log_error("--vocab-size: model %s insists on %d, got %d", o->model, c->vocabulary,
                         o->vocabulary);
    if (o->seq > c->positions)
        return log_error("--seq: model %s takes at most %d tokens, got %d", o->model, c->positions,
                         o->seq);
    /* Attention has a row for each head and token, and a GPU's has whole tiles of them. */
    if ((int64_t)o->batch * c->heads * ((seq + 127) / 128 * 128) > INT_MAX)
        return log_error("--batch: expected fewer than 2^31 tokens in a micro-batch, times the %d "
                         "heads, got %d sequences of %d",
                         c->heads, o->batch, seq);
    if (o->stride && (o->stride > seq || seq < 2))
        return log_error("--stride: expected at most --seq, %d, and that to be 2 or more, got %d",
                         seq, o->stride);
    return 0;
}

/* Processes that a launcher started together, and that MPI does not know of, would each train alone. */
static int check_launcher(const struct options *o, int ranks) {
    static const char *const names[][2] = {{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
                                           {"PMI_SIZE", "PMI_RANK"},
                                           {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"},
                                           {"WORLD_SIZE", "LOCAL_RANK"}};
    for (size_t i = 0; ranks == 1 && !o->meet && i < sizeof names / sizeof *names; i++) {
        const char *size = getenv(names[i][0]);
        if (size && atoi(size) > 1 && getenv(names[i][1]))
            return log_error(
                "started with %s=%.20s, but this process finds no other rank: expected "
                "the mpirun of the MPI that it was built with, srun --mpi=pmix, or "
                "scripts/elastic.sh to start it",
                names[i][0], size);
    }
    return 0;
}

int validate_options(const struct options *o, int ranks) {
    struct llama_config c;
    if (check_launcher(o, ranks)) return 2;
    if (views_check(o, ranks)) return 2;
    if (o->meet) ranks = o->meet_ranks;
    const int workers = o->net.workers ? o->net.workers : ranks;
    if (check_modes(o, ranks)) return 2;
    if (o->dry_run) ranks = 1;
    if (comm_check(o, workers, ranks)) return 2;
    if (check_tokenizer(o)) return 1;
    if (config_of_model(o->model, &c)) return access(o->model, F_OK) ? 2 : 1;
    return check_model(o, &c) || comm_check_names(o, &c, workers, ranks) ? 2 : 0;
}

/* ---- agreement between ranks ------------------------------------------------------------ */

struct started { /* how a rank was started */
    int32_t status, local_rank, local_ranks;
    char revision[60];
    /* Hashes of the values, in the order of the table; "" where ranks may differ. */
    char option[OPTIONS_MOST][CHECKSUM_TEXT_BYTES];
    struct common_facts facts;
};

static void note_options(const struct options *o, struct started *mine) {
    json_t *all = options_json(o, LOSSYNET_EACH_RANK);
    const struct lossynet_option *e;
    for (int i = 0; (e = options_entry(i)) != NULL; i++) {
        const json_t *value = json_object_get(all, e->name);
        char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(17));
        if (text) checksum_bytes(text, strlen(text), mine->option[i]);
        free(text);
    }
    json_decref(all);
}

/* The first option whose value differs between two ranks. NULL: none. */
static const char *other_option(const struct started *a, const struct started *b) {
    const struct lossynet_option *e;
    for (int i = 0; (e = options_entry(i)) != NULL; i++)
        if (strcmp(a->option[i], b->option[i])) return e->name;
    return NULL;
}

int validate_group(struct options *o, const struct lossynet_world *world) {
    const int workers = o->net.workers ? o->net.workers : world->ranks,
              local = workers / world->ranks;
    char *end;
    const long size = strtol(o->group, &end, 10);
    if (!strcmp(o->group, "host") && !o->dry_run) {
        if (world->local_ranks > 1 && local > 1 && !o->generate)
            return log_error("--group host: expected one worker in each process, or one process on "
                             "each host, got %d workers in each of %d processes of a host",
                             local, world->local_ranks);
        o->group_size = o->generate ? 1 : world->local_ranks * local;
        if (workers % o->group_size)
            return log_error("--group host: expected as many ranks on each host, got %d on this "
                             "one of %d",
                             world->local_ranks, world->ranks);
        return 0;
    }
    if (end == o->group || *end || size < 1 || size > 65534)
        return log_error("--group: expected a number of workers from 1 on, or host%s, got '%s'",
                         o->dry_run ? ", which --dry-run does not know" : "", o->group);
    o->group_size = o->generate ? 1 : (int)size;
    return 0;
}

/* Refuses a --model of another shape than that of the checkpoint from which the run goes on, which would be
 * trained in its place. A model that is no longer there is not compared. */
static int check_resumed(const struct options *o, const char *given) {
    struct options was = {.model = given}, is = {.model = o->model};
    struct llama_config c, before;
    struct common_facts facts[2];
    const bool muted = log_muted;
    log_muted = true;
    const bool known = !config_of_model(given, &before) && !config_of_model(o->model, &c);
    log_muted = muted;
    if (!known || given == options_named("model")->initial) return 0;
    was.vocabulary = is.vocabulary = c.vocabulary;
    if (common_facts_find(&was, "", &facts[0]) || common_facts_find(&is, "", &facts[1])) return 1;
    if (!strcmp(facts[0].text[FACT_MODEL], facts[1].text[FACT_MODEL])) return 0;
    return log_wrong_usage("--model %s has %s, and '%s', from which the run goes on, has %s: "
                           "expected the same, or no --model",
                           given, facts[0].text[FACT_MODEL], o->model, facts[1].text[FACT_MODEL]);
}

/* With --meet, views.c checks for an earlier run, and rank 0 of a view chooses the checkpoint, since
 * the run may have begun elsewhere. The model's shape is needed now. newest: as for resume_choose. */
static int find_start(struct options *o, const char *newest) {
    char here[RESUME_NAME_BYTES];
    const char *given = o->model;
    if (!o->meet) {
        int status = earlier_run_check(o);
        if (!status) status = resume_choose(o, newest);
        return status || o->model == given ? status : check_resumed(o, given);
    }
    struct options chosen = *o;
    const bool muted = log_muted;
    o->model_given = o->model;
    log_muted = true;
    if (!resume_newest(o, here) && !resume_choose(&chosen, here)) o->model = chosen.model;
    log_muted = muted;
    return o->model == given ? 0 : check_resumed(o, given);
}

static int parse(int argc, char **argv, const struct lossynet_world *world, struct options *o) {
    const int status = options_parse(argc, argv, o);
    if (status) return status;
    if (!o->help && !backend_cpu(DTYPE_FLOAT32)) return 2;
    if (!o->help && !o->version && validate_group(o, world)) return 2;
    /* Beside --help, too: ranks compare what they were started with. */
    comm_choose_wire(o, o->net.workers ? o->net.workers : world->ranks);
    return 0;
}

/* Rank 0 finds the newest checkpoint for --resume auto, and tells all ranks: another run may save one
 * meanwhile, or ranks see different folders. All ranks call it, whatever their command lines say.
 * status: of this rank's. Returns it, or the exit code after reporting. */
static int share_newest(const struct lossynet_world *world, const struct options *o, int status,
                        char newest[RESUME_NAME_BYTES]) {
    *newest = 0;
    if (!status && !o->meet && world->rank == 0) status = resume_newest(o, newest);
    return common_answer(world, newest, RESUME_NAME_BYTES) ? 1 : status;
}

/* Checks a command line that is parsed. */
static int check(struct options *o, const struct lossynet_world *world, const char *newest,
                 struct common_facts *facts) {
    if (o->help || o->version) return 0;
    int status = find_start(o, newest);
    if (!status) status = validate_options(o, world->ranks);
    const bool finds = (world->ranks > 1 || o->preflight) && !o->dry_run;
    struct options given = *o;
    if (o->preflight && !o->train && !o->val && !o->vocabulary)
        given.vocabulary = VALIDATE_VOCABULARY;
    return !status && finds && common_facts_find(&given, "", facts) ? 1 : status;
}

/* --group host: whether the ranks of each host follow one another, and are as many as on rank 0's. */
static int check_hosts(const struct lossynet_world *world, const struct started *all) {
    for (int r = 0; r < world->ranks; r++)
        if (all[r].local_ranks != all[0].local_ranks || all[r].local_rank != r % all[0].local_ranks)
            return log_wrong_usage(
                "--group host: expected as many ranks on each host, which follow one another "
                "(mpirun --map-by slot), got %d on the host of rank 0, and rank %d is number %d of "
                "%d on its host",
                all[0].local_ranks, r, all[r].local_rank, all[r].local_ranks);
    return 0;
}

/* *wrong: the first rank whose command line is wrong, or -1. If none is, all are compared with
 * rank 0. Returns -1 on memory and network errors. */
static int compare(const struct lossynet_world *world, const struct options *o,
                   const struct started *mine, int *wrong) {
    struct started *all = calloc((size_t)world->ranks, sizeof *all);
    if (!all) return log_out_of_memory("the list of ranks", 0);
    all[world->rank] = *mine;
    int status = lossynet_bootstrap_gather(world, all, sizeof *all) ? -1 : 0;
    *wrong = -1;
    for (int r = 0; r < world->ranks && !status && *wrong < 0; r++)
        if (all[r].status) *wrong = r;
    if (!status && *wrong >= 0) status = all[*wrong].status;
    for (int r = 1; r < world->ranks && !status; r++) {
        if (!strcmp(all[r].revision, all[0].revision)) continue;
        status = 1;
        log_error(
            "rank %d runs build %s of this program, rank 0 build %s: expected one build, copied "
            "to every node",
            r, all[r].revision, all[0].revision);
    }
    for (int r = 1; r < world->ranks && !status; r++) {
        const char *name = other_option(&all[r], &all[0]);
        if (!name) continue;
        status = 2;
        log_error("rank %d was started with another --%s than rank 0: expected the same on all "
                  "ranks",
                  r, name);
    }
    for (int r = 1; r < world->ranks && !status; r++)
        for (int i = 0; i < FACTS && !status; i++) {
            const char *here = all[r].facts.text[i], *there = all[0].facts.text[i];
            if (!strcmp(here, there)) continue;
            status = 1;
            log_error("%s is '%s' on rank %d, and '%s' on rank 0: expected the same on all ranks",
                      common_fact_names[i], here, r, there);
        }
    if (!status && !strcmp(o->group, "host") && !o->dry_run && !o->generate)
        status = check_hosts(world, all);
    free(all);
    return status;
}

int validate_command_line(int argc, char **argv, const struct lossynet_world *world,
                          const char *revision, struct options *o) {
    struct started mine = {0};
    char newest[RESUME_NAME_BYTES];
    int wrong = -1;
    log_muted = world->rank > 0; /* every rank finds the same mistake, and one reports it */
    mine.status = share_newest(world, o, parse(argc, argv, world, o), newest);
    if (!mine.status) mine.status = check(o, world, newest, &mine.facts);
    mine.local_rank = world->local_rank, mine.local_ranks = world->local_ranks;
    snprintf(mine.revision, sizeof mine.revision, "%s", revision);
    if (!mine.status && world->ranks > 1) note_options(o, &mine);
    int status = compare(world, o, &mine, &wrong);
    if (wrong > 0 && wrong == world->rank) {
        log_muted = false;
        log_rank = wrong;
        if (!parse(argc, argv, world, o)) /* again, this time with a message */
            check(o, world, newest, &mine.facts);
    }
    return status < 0 ? 1 : status;
}
