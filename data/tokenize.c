/* tokenize.c — text files in, llm.c token files out (the format stands in llmc/dataloader.h).
 *
 *     build/tokenize --tokenizer tokenizer.model --input text.txt --train train.bin --val val.bin
 *
 * A document begins with <s>: each input file is one, or several where a line of its own, named by
 * --separator, lies between them. Documents are cut in pieces of some 8 KB before newlines where
 * the tokenizer allows that without changing the result; all threads encode pieces, one writes
 * them in order. Output files appear under their names only when they are complete, with a copy of
 * tokenizer.model beside.
 */
#include <errno.h>
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "llmc/dataloader.h"
#include "llmc/file.h"
#include "llmc/report.h"
#include "llmc/tokenizer.h"

enum { EXIT_USAGE = 2, PIECE_BYTES = 1 << 13, BATCH_PIECES = 256 };

struct settings {
    const char *tokenizer, *train, *val, *separator;
    double val_fraction; /* < 0: not given */
    const char **inputs;
    int input_count;
};

/* ---- output: written as NAME.partial, then renamed ---------------------------------------- */

struct output {
    const char *path; /* NULL: there is no such output */
    char partial[FILE_PATH_BYTES];
    int descriptor;
    uint64_t count; /* tokens written */
};

static int output_open(struct output *out, const char *path) {
    out->path = path;
    if (!path) return 0;
    if (snprintf(out->partial, sizeof out->partial, "%s.partial", path) >= FILE_PATH_BYTES)
        return report("the path '%.100s...' is too long", path);
    out->descriptor = file_create(out->partial);
    if (out->descriptor < 0) return -1;
    static const char header[TOKENS_HEADER_BYTES]; /* the real one comes last */
    return file_write(out->descriptor, header, sizeof header, out->partial);
}

/* first: an id to put in front, or -1 */
static int output_write(struct output *out, int first, const int32_t *ids, size_t count) {
    if (out->count + count + 1 > INT32_MAX)
        return report("'%s' would have more than %d tokens, the most a token file holds: give "
                      "fewer inputs per call and write several files",
                      out->path, INT32_MAX);
    uint16_t *tokens = (uint16_t *)malloc((count + 1) * sizeof *tokens);
    if (!tokens) return report("out of memory");
    size_t n = 0;
    if (first >= 0) tokens[n++] = (uint16_t)first;
    for (size_t i = 0; i < count; i++) tokens[n++] = (uint16_t)ids[i];
    int status = file_write(out->descriptor, tokens, n * sizeof *tokens, out->partial);
    free(tokens);
    out->count += n;
    return status;
}

static int output_finish(struct output *out, int vocabulary, const char *text) {
    if (!out->path) return 0;
    if (out->count < 2)
        return report("'%s' would have %llu tokens, expected at least 2: there is too little text "
                      "%s",
                      out->path, (unsigned long long)out->count, text);
    int32_t header[TOKENS_HEADER_INTS] = {TOKENS_MAGIC, TOKENS_VERSION, (int32_t)out->count,
                                          vocabulary};
    int descriptor = out->descriptor;
    out->descriptor = -1;
    int status = 0;
    if (pwrite(descriptor, header, sizeof header, 0) != (ssize_t)sizeof header)
        status = report("cannot write '%s': %s", out->partial, strerror(errno));
    if (file_finish(descriptor, out->partial) != 0) status = -1;
    return status;
}

static int move_into_place(const char *partial, const char *path) {
    if (rename(partial, path) == 0) return 0;
    return report("cannot rename '%s' to '%s': %s", partial, path, strerror(errno));
}

static void output_discard(struct output *out) {
    if (!out->path) return;
    if (out->descriptor >= 0) close(out->descriptor);
    unlink(out->partial);
}

/* Copies the tokenizer beside an output, unless it lies there already. */
static int copy_tokenizer(const char *tokenizer, const char *output) {
    char path[FILE_PATH_BYTES], partial[FILE_PATH_BYTES];
    const char *slash = strrchr(output, '/');
    int length = slash ? (int)(slash - output) : 1;
    if (snprintf(path, sizeof path, "%.*s/tokenizer.model", length, slash ? output : ".") >=
        FILE_PATH_BYTES - 16)
        return report("the path '%.100s...' is too long", path);
    struct stat from, to;
    if (stat(tokenizer, &from) == 0 && stat(path, &to) == 0 && from.st_dev == to.st_dev &&
        from.st_ino == to.st_ino)
        return 0;
    snprintf(partial, sizeof partial, "%.*s.partial", FILE_PATH_BYTES - 16, path);
    if (file_copy(tokenizer, partial) != 0) {
        unlink(partial);
        return -1;
    }
    return move_into_place(partial, path);
}

/* ---- progress ------------------------------------------------------------------------------ */

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void show_progress(uint64_t done, uint64_t total, double start) {
    static double last;
    double now = seconds();
    if (!isatty(STDERR_FILENO) || (now - last < 0.1 && done < total)) return;
    last = now;
    double rate = (double)done / (now - start + 1e-9);
    fprintf(stderr, "\rtokenize: %3.0f%%  %.1f MB/s  %.0f s left \033[K%s",
            100.0 * (double)done / (double)total, 1e-6 * rate, (double)(total - done) / rate,
            done >= total ? "\r\033[K" : "");
}

/* ---- cutting: inputs -> documents -> pieces ------------------------------------------------ */

struct piece {
    const char *text;
    size_t bytes;
    bool begins; /* a document */
    int output;  /* 0 train, 1 val */
    int32_t *ids;
    size_t count;
    int status;
};

struct job {
    const struct settings *settings;
    struct tokenizer *tokenizer;
    struct output outputs[2];
    uint64_t total, done;   /* bytes of text */
    uint64_t before, split; /* where this input begins; where validation does, among all inputs */
    double start;
    struct piece pieces[BATCH_PIECES];
    int piece_count;
};

static void encode_piece(const struct tokenizer *tokenizer, struct piece *p) {
    p->status = p->begins
                    ? tokenizer_encode(tokenizer, p->text, p->bytes, &p->ids, &p->count)
                    : tokenizer_encode_continued(tokenizer, p->text, p->bytes, &p->ids, &p->count);
}

/* Encodes and writes the pieces that have gathered. */
static int flush(struct job *job) {
#pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < job->piece_count; i++) encode_piece(job->tokenizer, &job->pieces[i]);
    int status = 0, bos = tokenizer_bos(job->tokenizer);
    for (int i = 0; i < job->piece_count; i++) {
        struct piece *p = &job->pieces[i];
        if (p->status != 0) status = -1;
        if (status == 0)
            status = output_write(&job->outputs[p->output], p->begins ? bos : -1, p->ids, p->count);
        free(p->ids);
        job->done += p->bytes;
    }
    job->piece_count = 0;
    show_progress(job->done, job->total, job->start);
    return status;
}

static int add_document(struct job *job, const char *text, size_t bytes, int output) {
    bool begins = true, cuts = tokenizer_cuts_at_newlines(job->tokenizer);
    while (bytes > 0) {
        size_t part = bytes;
        if (cuts && bytes > PIECE_BYTES) {
            const char *newline =
                (const char *)memchr(text + PIECE_BYTES, '\n', bytes - PIECE_BYTES);
            if (newline) part = (size_t)(newline - text);
        }
        job->pieces[job->piece_count++] = (struct piece){text, part, begins, output, NULL, 0, 0};
        if (job->piece_count == BATCH_PIECES && flush(job) != 0) return -1;
        text += part;
        bytes -= part;
        begins = false;
    }
    return 0;
}

/* A document that reaches over the split is cut at the next start of a line; what follows is
 * validation's, and a document of its own. */
static int split_document(struct job *job, const char *input, const char *text, size_t bytes) {
    uint64_t position = job->before + (uint64_t)(text - input);
    size_t train = bytes;
    if (position >= job->split) {
        train = 0;
    } else if (position + bytes > job->split) {
        const char *from = text + (job->split - position) - 1;
        const char *newline = (const char *)memchr(from, '\n', bytes - (size_t)(from - text));
        if (newline) train = (size_t)(newline + 1 - text);
    }
    if (add_document(job, text, train, 0) != 0) return -1;
    return add_document(job, text + train, bytes - train, 1);
}

/* The next line that is the separator, or `end`; *after is where the text goes on. */
static const char *find_separator(const char *text, const char *end, const char *separator,
                                  const char **after) {
    size_t length = separator ? strlen(separator) : 0;
    for (const char *line = text; separator && line < end;) {
        const char *newline = (const char *)memchr(line, '\n', (size_t)(end - line));
        const char *line_end = newline ? newline : end, *next = newline ? newline + 1 : end;
        size_t bytes = (size_t)(line_end - line);
        if (bytes > 0 && line[bytes - 1] == '\r') bytes--;
        if (bytes == length && memcmp(line, separator, length) == 0) {
            *after = next;
            return line;
        }
        line = next;
    }
    *after = end;
    return end;
}

static int add_input(struct job *job, const char *path) {
    struct file_map map;
    if (file_map(path, &map) != 0) return -1;
    if (map.bytes == 0) return 0;
    const char *input = (const char *)map.data, *end = input + map.bytes, *text = input;
    int status = 0;
    while (text < end && status == 0) {
        const char *after;
        const char *stop = find_separator(text, end, job->settings->separator, &after);
        status = split_document(job, input, text, (size_t)(stop - text));
        job->done += (uint64_t)(after - stop);
        text = after;
    }
    if (status == 0) status = flush(job); /* the pieces point into the map */
    job->before += map.bytes;
    file_unmap(&map);
    return status;
}

/* ---- the whole ------------------------------------------------------------------------------ */

static int total_bytes(const struct settings *s, uint64_t *total) {
    *total = 0;
    for (int i = 0; i < s->input_count; i++) {
        struct stat status;
        if (stat(s->inputs[i], &status) != 0)
            return report("cannot open '%s': %s", s->inputs[i], strerror(errno));
        if (!S_ISREG(status.st_mode))
            return report("'%s' is no regular file, expected text in one", s->inputs[i]);
        *total += (uint64_t)status.st_size;
    }
    if (*total == 0)
        return report("the input is empty ('%s'%s), expected text", s->inputs[0],
                      s->input_count > 1 ? " and the other files" : "");
    return 0;
}

static int check_tokenizer(const struct tokenizer *tokenizer, const char *path) {
    int vocabulary = tokenizer_vocabulary(tokenizer);
    if (vocabulary > TOKENS_VOCABULARY_MAX)
        return report("'%s' has a vocabulary of %d, token files of 16-bit ids allow at most %d",
                      path, vocabulary, TOKENS_VOCABULARY_MAX);
    if (tokenizer_bos(tokenizer) < 0)
        return report("'%s' has no <s>, with which documents begin; train it with one", path);
    return 0;
}

static int finish(struct job *job) {
    const struct settings *s = job->settings;
    int vocabulary = tokenizer_vocabulary(job->tokenizer);
    if (output_finish(&job->outputs[1], vocabulary,
                      "after the split; use a larger --val-fraction") ||
        output_finish(&job->outputs[0], vocabulary, "before the split"))
        return -1;
    for (int i = 1; i >= 0; i--) {
        struct output *out = &job->outputs[i];
        if (!out->path) continue;
        if (copy_tokenizer(s->tokenizer, out->path) || move_into_place(out->partial, out->path))
            return -1;
    }
    for (int i = 0; i < 2; i++)
        if (job->outputs[i].path)
            printf("%s: %llu tokens, vocabulary %d\n", job->outputs[i].path,
                   (unsigned long long)job->outputs[i].count, vocabulary);
    return 0;
}

static int tokenize(const struct settings *s) {
    struct job *job = (struct job *)calloc(1, sizeof *job);
    if (!job) return report("out of memory");
    job->settings = s;
    job->start = seconds();
    job->outputs[0].descriptor = job->outputs[1].descriptor = -1;
    int status = total_bytes(s, &job->total);
    if (status == 0) status = tokenizer_open(s->tokenizer, &job->tokenizer);
    if (status == 0) status = check_tokenizer(job->tokenizer, s->tokenizer);
    if (status != 0) goto close_tokenizer;

    double fraction = !s->val ? 0 : s->val_fraction < 0 ? 0.05 : s->val_fraction;
    job->split = s->val ? (uint64_t)((1 - fraction) * (double)job->total) : UINT64_MAX;
    status = output_open(&job->outputs[0], s->train);
    if (status == 0) status = output_open(&job->outputs[1], s->val);
    for (int i = 0; i < s->input_count && status == 0; i++) status = add_input(job, s->inputs[i]);
    if (status == 0) status = finish(job);
    for (int i = 0; i < 2 && status != 0; i++) output_discard(&job->outputs[i]);
close_tokenizer:
    tokenizer_close(job->tokenizer);
    free(job);
    return status;
}

/* ---- command line --------------------------------------------------------------------------- */

static const char help[] =
    "Usage: tokenize --tokenizer FILE --input FILE... --train FILE [--val FILE]\n"
    "Encodes text with a SentencePiece model and writes llm.c token files.\n"
    "\n"
    "  --tokenizer FILE      SentencePiece model, for example Llama-2's tokenizer.model\n"
    "  --input FILE          text in UTF-8; several --input, and file names without an option, "
    "are\n"
    "                        read one after the other; each begins a document\n"
    "  --separator LINE      a line that lies between documents, such as '<|endoftext|>'\n"
    "  --train FILE          token file to write\n"
    "  --val FILE            token file for the end of the text, held out of --train\n"
    "  --val-fraction F      how much of the text that is (default 0.05)\n"
    "  --help                this text\n"
    "\n"
    "Every document begins with <s>. tokenizer.model is copied beside the outputs.\n"
    "Exit codes: 0 success, 1 failure, 2 wrong usage.\n";

static int usage(const char *what, const char *value) {
    report("%s%s; see tokenize --help", what, value);
    return EXIT_USAGE;
}

/* 0 when the settings are good, else the exit code */
static int check_settings(const struct settings *s) {
    if (!s->tokenizer) return usage("--tokenizer is missing", "");
    if (!s->input_count) return usage("--input is missing", "");
    if (!s->train) return usage("--train is missing", "");
    if (!s->val && s->val_fraction >= 0) return usage("--val-fraction needs --val", "");
    if (s->val && strcmp(s->val, s->train) == 0)
        return usage("--train and --val name the same file, ", s->val);
    return 0;
}

static int parse_fraction(const char *text, double *fraction) {
    char *end;
    *fraction = strtod(text, &end);
    if (end != text && *end == '\0' && *fraction > 0 && *fraction < 1) return 0;
    return usage("--val-fraction must be a number between 0 and 1, not ", text);
}

/* 0 to go on, else the exit code; -1: help was asked for */
static int parse(int argc, char **argv, struct settings *s) {
    static const struct option options[] = {{"tokenizer", required_argument, NULL, 't'},
                                            {"input", required_argument, NULL, 'i'},
                                            {"separator", required_argument, NULL, 's'},
                                            {"train", required_argument, NULL, 'o'},
                                            {"val", required_argument, NULL, 'v'},
                                            {"val-fraction", required_argument, NULL, 'f'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    int option, status = 0;
    opterr = 0;
    while (status == 0 && (option = getopt_long(argc, argv, "-:", options, NULL)) != -1) {
        switch (option) {
        case 't':
            s->tokenizer = optarg;
            break;
        case 1: /* a file name without an option */
        case 'i':
            s->inputs[s->input_count++] = optarg;
            break;
        case 's':
            s->separator = optarg;
            break;
        case 'o':
            s->train = optarg;
            break;
        case 'v':
            s->val = optarg;
            break;
        case 'f':
            status = parse_fraction(optarg, &s->val_fraction);
            break;
        case 'h':
            return -1;
        case ':':
            status = usage("an argument is missing after ", argv[optind - 1]);
            break;
        default:
            status = usage("unknown option ", argv[optind - 1]);
            break;
        }
    }
    while (status == 0 && optind < argc) s->inputs[s->input_count++] = argv[optind++];
    return status ? status : check_settings(s);
}

int main(int argc, char **argv) {
    report_program = "tokenize";
    struct settings settings = {.val_fraction = -1};
    settings.inputs = (const char **)calloc((size_t)argc + 1, sizeof *settings.inputs);
    if (!settings.inputs) return EXIT_FAILURE;
    int status = parse(argc, argv, &settings);
    if (status < 0) {
        fputs(help, stdout);
        status = 0;
    } else if (status == 0) {
        status = tokenize(&settings) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
    }
    free(settings.inputs);
    return status;
}
