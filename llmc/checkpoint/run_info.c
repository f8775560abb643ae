/* run_info.c — see run_info.h. */
#include "llmc/checkpoint/run_info.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "llmc/log/jsonl.h"
#include "llmc/log/terminal.h"

void run_info_attention(const struct backend *be, char name[RUN_INFO_ATTENTION_BYTES]) {
    const int version = be->attention_choice ? be->attention_choice->library : 0;
    if (version)
        snprintf(name, RUN_INFO_ATTENTION_BYTES, "cuDNN %d.%d.%d", version / 10000,
                 version / 100 % 100, version % 100);
    else
        snprintf(name, RUN_INFO_ATTENTION_BYTES, "own kernels");
}

json_t *run_info_event(const struct run_info *run) {
    const struct llama_config *c = &run->layout->config;
    char attention[RUN_INFO_ATTENTION_BYTES];
    run_info_attention(run->be, attention);
    return json_pack(
        "{s:s, s:o, s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:I, s:I, s:s, s:s,"
        " s:b, s:I, s:{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:o, s:o, s:b}}",
        "event", "run", "options", options_json(run->options, 0), "git_revision", run->revision,
        "backend", run->be->details, "attention", attention, "ranks", run->ranks, "workers",
        run->workers, "threads", run->threads, "batch", run->batch, "seq", run->seq, "parameters",
        (json_int_t)run->layout->count, "optimizer_bytes_per_worker",
        (json_int_t)(run->moments * sizeof(float)), "link", run->link, "sends", run->sends, "peers",
        run->mapped, "packet_bytes", (json_int_t)run->packet_bytes, "model", "width", c->width,
        "layers", c->layers, "heads", c->heads, "kv_heads", c->kv_heads, "head_size", c->head_size,
        "hidden", c->hidden, "vocabulary", c->vocabulary, "positions", c->positions, "norm_eps",
        jsonl_float(c->norm_eps), "rope_theta", jsonl_float(c->rope_theta), "tied", c->tied);
}

/* Says how often lost packets are sent again, at the start. */
static void announce_rounds(const struct run_info *run) {
    const int *rounds = run->loss.rounds;
    const double lost = fmax(run->loss.of_late[0], run->loss.of_late[1]);
    if (rounds[0] && rounds[0] == rounds[1])
        printf("lost packets are sent again (%d round%s)", rounds[0], rounds[0] > 1 ? "s" : "");
    else if (rounds[1])
        printf("lost packets are sent again (%d round%s, parameters %d)", rounds[0],
               rounds[0] == 1 ? "" : "s", rounds[1]);
    else if (rounds[0])
        printf("lost gradients are sent again (%d round%s)", rounds[0], rounds[0] > 1 ? "s" : "");
    else if (!run->loss.measured[0] && !run->loss.measured[1])
        printf("nothing is sent again");
    else if (lost > 0)
        printf("nothing is sent again (%.1f%% lost, below 6.7%%)", 100 * lost);
    else
        printf("lost packets are sent again where more than 6.7%% is lost");
}

/* Says what is done about loss, and what `auto` leaves out in this run. */
static void announce_rule(const struct run_info *run) {
    const struct options *o = run->options;
    const bool leads = o->net.lead == LOSSYNET_LEAD_AUTO;
    const bool loses = o->net.loss_rate[0] > 0 || o->net.loss_rate[1] > 0 || run->ranks > 1 ||
                       strcmp(o->net.loss_at, "none") != 0;
    if (o->algorithm != ALGORITHM_LOSSY || run->workers == 1 || !loses) return;
    printf("against loss: owners broadcast %s,\n    ",
           leads ? "values ahead of the model (--lead)" : "the model");
    announce_rounds(run);
    printf("%s\n",
           run->loss.carries ? ",\n    what is missing then comes with the next gradient" : "");
    if (strcmp(o->net.loss_at, "none") != 0 && run->loss.of_late[0] >= 0)
        printf("    (rounds follow the mean of all links: %.1f%% of gradients, %.1f%% of "
               "parameters)\n",
               100 * run->loss.of_late[0], 100 * run->loss.of_late[1]);
    if (o->net.carry == LOSSYNET_AUTO && !run->loss.carries)
        printf("note: %s: what stays lost does not come with the next gradient (--carry)\n",
               run->be->on_device ? "--device cuda" : "this --estimator");
    if (o->net.repair[0] == LOSSYNET_AUTO && strcmp(o->net.deadline, "off") != 0)
        printf("note: --deadline: --repair auto goes by --loss-rate, since ranks do not measure "
               "the same loss\n");
}

void run_info_announce(const struct run_info *run) {
    const struct options *o = run->options;
    const double gradient = o->net.loss_rate[0], parameter = o->net.loss_rate[1];
    const bool lossless = o->algorithm == ALGORITHM_RELIABLE;
    const bool tells_type = o->net.wire_dtype != LOSSYNET_FLOAT32;
    if (run->rank > 0 || o->quiet) return;
    printf("Llama of %.2fM parameters, %d worker%s in %d process%s, %s%s\n",
           (double)run->layout->count / 1e6, run->workers, run->workers > 1 ? "s" : "", run->ranks,
           run->ranks > 1 ? "es" : "", run->be->details,
           run->faster_in_bf16 ? "\n(several times as fast with --dtype bf16)" : "");
    if (o->group_size > 1)
        printf("groups of %d workers share a replica%s\n", o->group_size,
               run->mapped ? "; their GPUs read each other's gradients" : "");
    printf("%s: %.0f tokens a step", algorithm_names[o->algorithm],
           (double)options_micro_batches(o, run->workers) * run->batch * run->seq);
    if (run->workers > 1)
        printf(", %zu packets of %zu bytes%s%s over %s", run->packets, run->packet_bytes,
               tells_type ? " of " : "",
               tells_type ? lossynet_wire_dtype_name(o->net.wire_dtype) : "", run->link);
    if (run->workers > 1 && strcmp(run->sends, "copied") != 0) printf(", sent %s", run->sends);
    printf("\n");
    announce_rule(run);
    options_print_unused(o, stdout);
    if (run->workers == 1 && (gradient > 0 || parameter > 0)) {
        printf("note: one worker sends nothing, so nothing can be lost; give --workers N\n");
    } else if (!lossless && (gradient >= 1 || parameter >= 1)) {
        printf("note: at loss rate 1 no %s ever arrives: %s\n",
               gradient < 1    ? "parameter"
               : parameter < 1 ? "gradient"
                               : "packet",
               gradient < 1 ? "replicas never receive each other's shards"
                            : "every owner trains alone on its own data");
    }
    fflush(stdout);
}

bool run_info_draws_progress(const struct options *o, int rank) {
    if (rank > 0 || o->quiet) return false;
    return o->progress == OPTION_PROGRESS_AUTO ? terminal_behind_stdout()
                                               : o->progress == OPTION_PROGRESS_ON;
}
