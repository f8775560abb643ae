/* usage.c — see usage.h. */
#include "llmc/usage.h"

#include <stdio.h>

#include "llmc/backend.h"
#include "llmc/backend_cuda.h"
#include "llmc/config.h"
#include "llmc/file.h"
#include "llmc/network.h"
#include "llmc/report.h"

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
    if (!o->dry_run && workers % ranks)
        return report("--workers: expected a multiple of the %d ranks, got %d", ranks, workers);
    if (o->device == DEVICE_CUDA && !o->dry_run && !backend_cuda_built)
        return report("--device cuda: this binary has no CUDA backend; expected auto or cpu");
    if (o->device == DEVICE_CPU && o->dtype == OPTION_DTYPE_BF16)
        return report("--dtype bf16: expected a GPU; the CPU computes in float32");
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
    if (config_of_model(o->model, &c)) return file_is_directory(o->model) ? 1 : 2;
    return check_model(o, &c) ? 2 : 0;
}
