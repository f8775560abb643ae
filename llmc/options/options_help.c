/* options_help.c — what --help prints. The table of options is in options.c. */
#include "llmc/options/options.h"
#include "llmc/options/options_table.h"
#include "llmc/log/error.h"

#include <stdio.h>
#include <string.h>

/* What most runs need, by what a user wants to do. Each option has one line. */
static const struct {
    const char *name; /* of an option, or a title if there is no text */
    const char *text;
} most_used[] = {
    {"Train a model", NULL},
    {"train", "token files to train on (build/tokenize)"},
    {"val", "token files to evaluate on"},
    {"model", "260K ... 70B, a directory, a config.json"},
    {"steps", "training steps"},
    {"batch", "sequences per worker in a micro-batch"},
    {"seq", "tokens per sequence; 0: the model's length"},
    {"lr", "peak learning rate"},
    {"warmup", "steps of linear warm-up"},
    {"schedule", "learning rate after it: cosine, wsd ..."},
    {"device", "where to compute"},
    {"dtype", "float32 or bf16"},
    {"Lose packets on purpose, and compare", NULL},
    {"workers", "data-parallel replicas; 0: one per process"},
    {"loss-rate", "share of the packets that is dropped"},
    {"algorithm", "lossy, reliable, rps or naive"},
    {"plain", "the first paper's algorithm, nothing else"},
    {"Train over a network", NULL},
    {"link", "mpi, udp, verbs (RDMA) or auto"},
    {"wire-dtype", "bf16 has half the bytes, int8 a quarter"},
    {"group", "workers that share a replica"},
    {"deadline", "how long a step waits for late ranks"},
    {"encrypt", "encrypt and authenticate every datagram"},
    {"meet", "etcd://HOST:PORT/RUN: ranks may die and join"},
    {"Keep, stop and continue", NULL},
    {"out", "directory for checkpoints and log.jsonl"},
    {"save-every", "steps between checkpoints; 0: one at the end"},
    {"resume", "continue from the newest checkpoint in --out"},
    {"Other things to do", NULL},
    {"dry-run", "print memory and traffic, allocate nothing"},
    {"preflight", "check the nodes of a run for a minute"},
    {"eval", "only compute the perplexity of --model on --val"},
    {"generate", "continue the text PROMPT with --model"},
};
enum { MOST_USED = sizeof most_used / sizeof *most_used };

/* Prints `text` in columns [indent, 80), breaking at spaces. */
static void print_wrapped(const char *text, int indent) {
    int width = 79 - indent;
    while ((int)strlen(text) > width) {
        int cut = width;
        while (cut > 0 && text[cut] != ' ') cut--;
        if (!cut) break;
        printf("%.*s\n%*s", cut, text, indent, "");
        text += cut + 1;
    }
    puts(text);
}

/* "" if there is none, or if it follows from other options. */
static const char *shown_default(const struct lossynet_option *e) {
    return e->initial && e->initial[0] != '-' ? e->initial : "";
}

enum { LEFT_COLUMNS = 27 };

/* Prints an option, its text and its default. `brief`: a long list of choices is left out. */
static void print_option(const struct lossynet_option *e, const char *text, bool brief) {
    char left[64], help[1024];
    snprintf(left, sizeof left, "--%s%s%s", e->name, e->argument ? " " : "",
             e->argument ? e->argument : "");
    if (brief && strlen(left) > LEFT_COLUMNS) snprintf(left, sizeof left, "--%s NAME", e->name);
    const char *initial = shown_default(e);
    snprintf(help, sizeof help, "%s%s%s%s", text, *initial ? " [" : "", initial,
             *initial ? "]" : "");
    printf("  %-*s", LEFT_COLUMNS, left);
    if (strlen(left) > LEFT_COLUMNS) printf("\n%29s", "");
    putchar(' ');
    print_wrapped(help, 30);
}

static void print_most_used(void) {
    printf("Usage: train_llama2 --train GLOB [OPTION]...\n"
           "       mpirun -np R train_llama2 --train GLOB [OPTION]...\n"
           "Pretrains Llama-2 over a network that loses packets.\n");
    for (int i = 0; i < MOST_USED; i++) {
        const struct lossynet_option *e =
            most_used[i].text ? options_named(most_used[i].name) : NULL;
        if (e)
            print_option(e, most_used[i].text, true);
        else
            printf("\n%s\n", most_used[i].name);
    }
    printf("\nAll options: --help all. Options about something: --help WORD, as in --help loss\n");
}

/* A line for each option: name, group, argument, default and marks, with tabs between them. */
static void print_table(void) {
    static const char *const marks[] = {"resumed", "neutral", "sweeps", "each-rank", "each-start"};
    const struct lossynet_option *e;
    const char *group = "";
    for (int i = 0; (e = options_entry(i)) != NULL; i++) {
        if (e->kind == LOSSYNET_OPTION_TITLE) {
            group = e->name;
            continue;
        }
        printf("%s\t%s\t%s\t%s\t", e->name, group, e->argument ? e->argument : "",
               shown_default(e));
        for (int m = 0; m < 5; m++)
            if (e->marks & 1u << m) printf("%s ", marks[m]);
        printf("\n");
    }
}

int options_help(const char *topic) {
    if (!topic) return print_most_used(), 0;
    if (!strcmp(topic, "table")) return print_table(), 0;
    const char *word = topic + strspn(topic, "-"), *title = NULL;
    const bool all = !strcmp(topic, "all");
    int found = 0;
    const struct lossynet_option *e;
    for (int i = 0; (e = options_entry(i)) != NULL; i++) {
        if (e->kind == LOSSYNET_OPTION_TITLE) {
            title = e->name;
            continue;
        }
        if (!all && !options_has_word(e->name, word) && !options_has_word(e->help, word)) continue;
        if (title) printf("%s%s\n", found ? "\n" : "", title);
        title = NULL;
        print_option(e, e->help, false);
        found++;
    }
    if (found) return 0;
    return log_wrong_usage("--help %s: no option's name or text has this word (see --help all)",
                           topic);
}
