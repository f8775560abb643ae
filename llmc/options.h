/* options.h — the command line: one table of GNU long options, one struct of settings.
 *
 * options.c holds the table; each line names an option, its range, its default and its help text.
 * A setting that is out of range or not understood is a usage error: one line, exit code 2.
 */
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum algorithm { ALGORITHM_LOSSY, ALGORITHM_RELIABLE, ALGORITHM_RPS, ALGORITHM_NAIVE };
extern const char *const algorithm_names[]; /* ends with NULL */

enum { OPTION_DTYPE_AUTO, OPTION_DTYPE_FLOAT32, OPTION_DTYPE_BF16 }; /* of --dtype */

enum data_split { DATA_SHARED, DATA_CONTIGUOUS }; /* of --data-split */
enum { OPTION_WIRE_FLOAT32, OPTION_WIRE_BF16 };   /* of --wire-dtype */

enum device { DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA };

struct options {
    /* model */
    const char *model;                     /* preset name or checkpoint directory */
    int vocabulary;                        /* 0: from the data */
    int device, dtype, recompute, threads; /* recompute: as in activations.h */
    /* data */
    const char *train, *val, *tokenizer;
    int data_split;
    /* optimisation */
    int batch, seq, steps, micro_batches, warmup;
    double lr, lr_final, beta1, beta2, adam_eps, weight_decay, clip;
    int64_t seed;
    /* loss */
    int algorithm;
    double loss_rate, gradient_loss_rate,
        parameter_loss_rate; /* the latter two are the effective */
    const char *loss_model, *loss_at, *estimator;
    int64_t loss_seed;
    double carry;
    int repair, gradient_repair, parameter_repair; /* rounds; the latter two are the effective */
    double repair_budget;
    bool robust; /* said in the other options when parsed */
    /* network */
    int workers; /* 0: one per rank */
    const char *link;
    int packet_bytes; /* 0: the link's default */
    int wire_dtype;
    double link_gbps;
    const char *interface;
    const char *traffic_class;
    double pace_gbps, loss_budget, peer_timeout;
    const char *record_loss;
    bool no_overlap, multicast, encrypt, gpu_direct;
    /* output */
    const char *out, *log;
    const char *resume; /* NULL: start anew; resume_choose replaces "auto" */
    int save_every, keep, eval_every, eval_sequences, drift_samples;
    int stride, sample_every; /* 0: none */
    bool quiet;
    /* modes */
    bool eval, dry_run, preflight, help, version;
    const char *generate;
    int tokens;
    double temperature, top_p;
};

/* Fills `out` with defaults and what the command line says; strings point into argv.
 * 0 on success; 2 after reporting a usage error (the exit code for it). */
int options_parse(int argc, char **argv, struct options *out);

enum { OPTIONS_MOST = 128 };                         /* there are no more */
json_t *options_json(const struct options *options); /* all of them, for the log; NULL: no memory */

void options_help(void); /* to stdout, grouped, with defaults */

#ifdef __cplusplus
}
#endif
#endif
