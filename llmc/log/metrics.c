/* metrics.c — see metrics.h. */
#include "llmc/log/metrics.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "llmc/log/error.h"

/* Independent loss and short outages do not make values as old as this, in steps. */
enum { NOTABLE_AGE = 50 };

/* The share of a phase's packets that did not arrive; 0 if there were none. */
static double loss_rate(const struct step_metrics *r, int phase) {
    return r->expected[phase] > 0 ? 1 - r->arrived[phase] / r->expected[phase] : 0;
}

/* Retransmitted packets, as a share of all packets of a step, counted once each. */
static double extra_traffic(const struct step_metrics *r) {
    double once = r->expected[0] + r->expected[1];
    return once > 0 ? (r->resent[0] + r->resent[1]) / once : 0;
}

void metrics_add(struct run_metrics *run, const struct step_metrics *step) {
    struct step_metrics *sum = &run->sum;
    run->steps++;
    sum->tokens += step->tokens;
    sum->seconds += step->seconds;
    sum->communication_seconds += step->communication_seconds;
    sum->drift += step->drift;
    sum->drift_expected += step->drift_expected;
    sum->drift_paper += step->drift_paper;
    sum->max_age = step->max_age; /* that of the last step */
    for (int phase = 0; phase < 2; phase++) {
        sum->expected[phase] += step->expected[phase];
        sum->arrived[phase] += step->arrived[phase];
        sum->resent[phase] += step->resent[phase];
    }
}

/* Nothing else is known of a step in which a rank died: the others learned its loss from the next
 * view. */
static void leave_out_unmeasured(json_t *event) {
    static const char *const known[] = {"event", "step", "loss", "grad_norm", "lr"};
    const char *name;
    json_t *value;
    json_object_foreach(event, name, value) {
        bool is_known = false;
        for (size_t i = 0; i < sizeof known / sizeof *known; i++)
            is_known |= !strcmp(name, known[i]);
        if (!is_known) json_object_set_new(event, name, json_null());
    }
}

/* Fields that have a new name have the old one beside it in this version, for scripts of the last. */
static void add_new_names(json_t *event) {
    static const char *const names[][2] = {{"gradient_loss_rate", "gradient_lost"},
                                           {"parameter_loss_rate", "parameter_lost"},
                                           {"late", "late_packets"},
                                           {"stragglers", "phases_cut"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        json_t *value = json_object_get(event, names[i][0]);
        if (value) json_object_set(event, names[i][1], value);
    }
}

int metrics_log_step(struct jsonl *log, const struct step_metrics *r) {
    static const char *const network[METRICS_EVENTS] = {
        "late", "duplicate", "rejected", "overruns", "stragglers", "pace_kbps", "relayed"};
    json_t *event = json_pack(
        "{s:s, s:i, s:o, s:o, s:f, s:o, s:f, s:f, s:f, s:f, s:o, s:o, s:o, s:f, s:I, s:f}", "event",
        "step", "step", r->step, "loss", jsonl_number(r->loss), "grad_norm",
        jsonl_number(r->grad_norm), "lr", r->learning_rate, "tokens_per_second",
        jsonl_number(r->tokens / r->seconds), "step_ms", 1e3 * r->seconds, "communication_ms",
        1e3 * r->communication_seconds, "gradient_loss_rate", loss_rate(r, 0),
        "parameter_loss_rate", loss_rate(r, 1), "drift", jsonl_number(r->drift), "drift_expected",
        jsonl_number(r->drift_expected), "drift_paper", jsonl_number(r->drift_paper), "mean_age",
        r->mean_age, "max_age", (json_int_t)r->max_age, "extra_traffic", extra_traffic(r));
    if (event) {
        json_object_set_new(event, "lead", jsonl_number(r->lead));
        json_object_set_new(event, "lag", jsonl_number(r->lag));
    }
    json_t *ages = json_array();
    for (int k = 0; k < METRICS_AGES; k++) {
        json_array_append_new(ages, jsonl_float((float)r->age_share[k]));
    }
    json_object_set_new(event, "ages", ages);
    for (int e = 0; event && e < METRICS_EVENTS; e++) {
        json_object_set_new(event, network[e], json_integer((json_int_t)r->network[e]));
    }
    add_new_names(event);
    if (!(r->seconds > 0)) leave_out_unmeasured(event);
    return jsonl_write(log, event);
}

/* Perplexity per word of the text; NaN if the number of words is not known. */
static double word_perplexity(const struct eval_metrics *r) {
    return r->tokens_per_word > 0 ? exp(r->val_loss * r->tokens_per_word) : NAN;
}

/* Bits that the model needs for a byte of the text, which does not depend on the tokenizer: the loss
 * times tokens per byte, divided by ln 2. NaN if the number of bytes is not known. */
static double bits_per_byte(const struct eval_metrics *r) {
    return r->tokens_per_byte > 0 ? r->val_loss * r->tokens_per_byte / log(2) : NAN;
}

static int log_eval(struct jsonl *log, const struct eval_metrics *r) {
    return jsonl_write(
        log, json_pack("{s:s, s:i, s:o, s:o, s:o, s:o, s:o, s:o, s:I}", "event", "eval", "step",
                       r->step, "val_loss", jsonl_number(r->val_loss), "val_perplexity",
                       jsonl_number(exp(r->val_loss)), "val_word_perplexity",
                       jsonl_number(word_perplexity(r)), "val_bits_per_byte",
                       jsonl_number(bits_per_byte(r)), "replica_val_loss",
                       jsonl_number(r->replica_val_loss), "replica_val_perplexity",
                       jsonl_number(exp(r->replica_val_loss)), "tokens", (json_int_t)r->tokens));
}

/* Bytes that were sent beside those of plain bf16; NaN where nothing was. */
static double bytes_of_bf16(const struct run_metrics *run, const struct metrics_traffic *t) {
    static const double BF16 = 2; /* bytes of an element */
    double sent = 0, plain = 0;
    for (int phase = 0; phase < 2; phase++) {
        sent += t->bytes[phase] * (run->sum.expected[phase] + run->sum.resent[phase]);
        plain += BF16 * run->sum.expected[phase];
    }
    return plain > 0 ? sent / plain : NAN;
}

void metrics_print_traffic(const struct run_metrics *run, const struct metrics_traffic *t) {
    const struct step_metrics *sum = &run->sum;
    const double bytes = bytes_of_bf16(run, t);
    if (isnan(bytes)) return;
    printf("lost in the end: %.1f%% of gradients, %.1f%% of parameters; sent again: %.1f%%\n"
           "rounds at the end: %d of gradients, %d of parameters; %.2f of plain bf16's bytes\n",
           100 * loss_rate(sum, 0), 100 * loss_rate(sum, 1), 100 * extra_traffic(sum), t->rounds[0],
           t->rounds[1], bytes);
    if (sum->max_age >= NOTABLE_AGE)
        printf(
            "note: oldest value of a replica: %lld steps (its owner's packets do not reach it)\n",
            (long long)sum->max_age);
}

int metrics_log_end(struct jsonl *log, const struct run_metrics *run, const char *status,
                    const struct metrics_traffic *traffic, const struct eval_metrics *eval,
                    const char *checkpoint) {
    const struct step_metrics *sum = &run->sum;
    const double steps = run->steps ? run->steps : 1;
    json_t *event = json_pack(
        "{s:s, s:i, s:s, s:f, s:o, s:f, s:f, s:o, s:o, s:o, s:s?, s:f, s:[ii], s:o}", "event",
        "end", "step", run->steps, "status", status, "training_seconds", sum->seconds,
        "tokens_per_second", jsonl_number(sum->tokens / sum->seconds), "gradient_loss_rate",
        loss_rate(sum, 0), "parameter_loss_rate", loss_rate(sum, 1), "drift",
        jsonl_number(sum->drift / steps), "drift_expected",
        jsonl_number(sum->drift_expected / steps), "drift_paper",
        jsonl_number(sum->drift_paper / steps), "checkpoint", *checkpoint ? checkpoint : NULL,
        "extra_traffic", extra_traffic(sum), "rounds", traffic->rounds[0], traffic->rounds[1],
        "bytes_of_bf16", jsonl_number(bytes_of_bf16(run, traffic)));
    add_new_names(event);
    if (event && eval) {
        json_object_set_new(event, "val_perplexity", jsonl_number(exp(eval->val_loss)));
        json_object_set_new(event, "val_bits_per_byte", jsonl_number(bits_per_byte(eval)));
        json_object_set_new(event, "replica_val_perplexity",
                            jsonl_number(exp(eval->replica_val_loss)));
    }
    return jsonl_write(log, event);
}

void metrics_show_step(struct progress *progress, const struct step_metrics *r, bool losses) {
    char line[128];
    int n = snprintf(line, sizeof line, "%6d  loss %.4f  norm %.2f  lr %.1e  %.0f tokens/s",
                     r->step + 1, r->loss, r->grad_norm, r->learning_rate, r->tokens / r->seconds);
    if (losses && n < (int)sizeof line) {
        snprintf(line + n, sizeof line - (size_t)n, "  lost %.1f%% %.1f%%", 100 * loss_rate(r, 0),
                 100 * loss_rate(r, 1));
    }
    progress_step(progress, r->step + 1, line);
}

/* Prints a perplexity with an exponent if it is large, since it has hundreds of digits if the run
 * diverged. */
static const char *perplexity_text(char text[32], double loss) {
    snprintf(text, 32, exp(loss) < 1e9 ? "%.3f" : "%.3e", exp(loss));
    return text;
}

int metrics_eval(struct progress *progress, struct jsonl *log, const struct eval_metrics *r) {
    char line[160], model[32], replica[32];
    int n = snprintf(line, sizeof line, "%6d  validation perplexity %s, of a replica %s", r->step,
                     perplexity_text(model, r->val_loss),
                     perplexity_text(replica, r->replica_val_loss));
    if (r->tokens_per_byte > 0)
        snprintf(line + n, sizeof line - (size_t)n, ", %.4f bits/byte", bits_per_byte(r));
    progress_message(progress, line);
    return log_eval(log, r);
}

void metrics_print_eval(const struct eval_metrics *r) {
    printf("loss %.6f  perplexity %.4f  tokens %lld", r->val_loss, exp(r->val_loss),
           (long long)r->tokens);
    if (r->tokens_per_word > 0) printf("  word perplexity %.4f", word_perplexity(r));
    if (r->tokens_per_byte > 0) printf("  bits per byte %.6f", bits_per_byte(r));
    printf("\n");
}

int metrics_sample(struct progress *progress, struct jsonl *log, int step, const char *text) {
    char line[640];
    snprintf(line, sizeof line, "%6d  writes: %s", step, text);
    progress_message(progress, line);
    return jsonl_write(log,
                       json_pack("{s:s, s:i, s:s}", "event", "sample", "step", step, "text", text));
}
