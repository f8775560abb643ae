/* options.h — parses the command line: a table of GNU long options, and a struct of settings.
 *
 * options.c holds the table; each line names an option, its range, its default and its help text. Those of
 * the network are in the library's table (lossynet/options.c).
 * A setting that is out of range or cannot be parsed is a usage error: one line, exit code 2.
 */
#ifndef LLMC_OPTIONS_OPTIONS_H
#define LLMC_OPTIONS_OPTIONS_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/model/schedule.h"
#include "lossynet/lossynet_trainer.h"

enum algorithm { ALGORITHM_LOSSY, ALGORITHM_RELIABLE, ALGORITHM_RPS, ALGORITHM_NAIVE };
extern const char *const algorithm_names[]; /* ends with NULL */
extern const char *const schedule_names[], *const schedule_decay_names[];
extern const char *const optimizer_names[];

enum { OPTION_DTYPE_AUTO, OPTION_DTYPE_FLOAT32, OPTION_DTYPE_BF16 }; /* of --dtype */

enum optimizer { OPTIMIZER_ADAMW, OPTIMIZER_MUON };                           /* of --optimizer */
enum data_split { DATA_SHARED, DATA_CONTIGUOUS };                             /* of --data-split */
enum { OPTION_ATTENTION_OWN, OPTION_ATTENTION_CUDNN, OPTION_ATTENTION_AUTO }; /* of --attention */
enum { KEEP_WORKER_BATCH, KEEP_GLOBAL_BATCH };                                /* of --meet-keep */
enum { OPTION_PROGRESS_AUTO, OPTION_PROGRESS_ON, OPTION_PROGRESS_OFF };       /* of --progress */

enum device { DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA };

enum { OPTIONS_MOST = 128 }; /* the table has no more options */

struct options {
    struct lossynet_options net; /* the first member, as the library's table needs it */
    bool given[OPTIONS_MOST];    /* the lines of the table that the command line names */
    /* model */
    const char *model;                     /* preset, directory or config.json */
    const char *model_given;               /* --meet: before --resume auto found a checkpoint */
    int vocabulary;                        /* 0: from the data */
    int device, dtype, recompute, threads; /* recompute: as in activations.h */
    int attention;
    double memory; /* bytes / 1e9; 0: as much as is free */
    /* data */
    const char *train, *val, *tokenizer;
    int data_split;
    /* optimisation */
    int batch, seq, steps, micro_batches, warmup;
    int optimizer, schedule, decay_shape;
    double lr, lr_final, decay, beta1, beta2, adam_eps, weight_decay, clip;
    int64_t seed;
    /* loss */
    int algorithm;
    bool plain; /* the parser sets the next options accordingly */
    /* network */
    const char *group, *rule;
    int group_size; /* the number that `group` means here; set by validate.c */
    double link_gbps;
    const char *meet; /* NULL: the ranks that a launcher started */
    int meet_ranks, meet_keep;
    bool meet_anew;
    int meet_process; /* the number of this process, for its launcher; -1: none */
    bool no_overlap;
    /* output */
    const char *out, *log;
    bool log_buckets;
    const char *resume; /* NULL: a new run; resume_choose replaces "auto" */
    double shard_size;  /* bytes / 1e9 */
    int save_every, keep, eval_every, eval_sequences;
    int stride, sample_every; /* 0: none */
    int progress;
    bool overwrite, quiet;
    /* modes */
    bool eval, dry_run, preflight, help, version;
    const char *help_topic; /* the word after --help; NULL: none */
    const char *generate;
    int tokens;
    double temperature, top_p;
};

/* Fills `out` with defaults and the settings of the command line; strings point into argv. Returns
 * 0, or 2, the exit code, after reporting a usage error. */
int options_parse(int argc, char **argv, struct options *out);

/* The learning rates that the options ask for. */
struct schedule options_schedule(const struct options *o);

/* The number of micro-batches of a step, over all workers. Worker w of N takes numbers w, N + w,
 * ... With --meet-keep global-batch the number stays as at the start, but is at least one per
 * worker. */
int64_t options_micro_batches(const struct options *o, int workers);

/* Why option i of the table has no effect beside these options: "with --device cpu". NULL: it has. */
const char *options_unused(const struct options *o, int i);

/* Writes a line about given options that have no effect beside the others. */
void options_print_unused(const struct options *o, FILE *to);

/* Options by name, but for those that have one of the marks `without` (options_table.h). NULL if out
 * of memory. */
json_t *options_json(const struct options *options, unsigned without);

/* Prints options to stdout, with their defaults. `topic` NULL: those that most runs need, by what a
 * user wants to do; "all": all of them; "table": one line for each, for scripts; or a word that their
 * names or texts have. Returns the exit code: 0, or 2 if no option has the word, after it said so. */
int options_help(const char *topic);

#endif
