/* tokenize.c — makes llm.c token files from text files (llmc/data/dataloader.h has the format).
 *
 *     build/tokenize --tokenizer tokenizer.model --input text.txt --train train.bin --val val.bin
 *
 *     inputs.h         finds the texts: files, folders, standard input
 *     this file        cuts them into documents and pieces, and has all threads encode the pieces
 *     token_writer.h   writes token files, one or several shards
 *
 * A document begins with <s>. Each input file is one document, or several if the line that
 * --separator names is between them. Documents are cut before newlines into pieces of some 8 KB,
 * where the tokenizer allows that without changing the result. All threads encode pieces, and one
 * writes them in order, so the output does not depend on the number of threads. Output files get
 * their names only when they are complete, and a copy of tokenizer.model is put beside them.
 */
#include <errno.h>
#include <getopt.h>
#include <omp.h>
#include <signal.h>
#include <stdbool.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "data/inputs.h"
#include "data/token_writer.h"
#include "llmc/data/dataloader.h"
#include "llmc/util/file.h"
#include "llmc/log/error.h"
#include "llmc/log/terminal.h"
#include "llmc/data/tokenizer.h"
#include "llmc/util/threads.h"

enum { EXIT_USAGE = 2, PIECE_BYTES = 1 << 13, BATCH_PIECES = 256, OPEN_INPUTS = 256 };

struct settings {
    const char *tokenizer, *train, *val, *separator;
    double val_fraction;    /* < 0: not given */
    long long shard_tokens; /* 0: one file */
    int threads;            /* 0: all */
    const char **inputs;
    int input_count;
};

/* ---- the tokenizer beside the output --------------------------------------------------------- */

static int move_into_place(const char *partial, const char *path) {
    if (rename(partial, path) == 0) return 0;
    return log_error("cannot rename '%s' to '%s': %s", partial, path, strerror(errno));
}

/* Copies the tokenizer beside an output, unless it lies there already. */
static int copy_tokenizer(const char *tokenizer, const char *output) {
    char path[FILE_PATH_BYTES], partial[FILE_PATH_BYTES];
    const char *slash = strrchr(output, '/');
    int length = slash ? (int)(slash - output) : 1;
    if (snprintf(path, sizeof path, "%.*s/tokenizer.model", length, slash ? output : ".") >=
        FILE_PATH_BYTES - 16)
        return log_error("the path '%.100s...' is too long", path);
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
    char line[100] = "";
    if (done < total)
        snprintf(line, sizeof line, "tokenize: %3.0f%%  %.1f MB/s  %.0f s left",
                 100.0 * (double)done / (double)total, 1e-6 * rate, (double)(total - done) / rate);
    terminal_redraw(stderr, line);
}

/* ---- cutting: inputs -> documents -> pieces ------------------------------------------------ */

struct piece {
    const char *text;
    size_t bytes;
    bool begins; /* whether a document begins here */
    int output;  /* 0 train, 1 val */
    int32_t *ids;
    size_t count;
    uint64_t words;
    size_t odd, first; /* bytes that are no text in UTF-8; the place of the first */
    int status;
};

struct oddities {
    uint64_t bytes;         /* that are no text in UTF-8 */
    const char *input;      /* the first of them: in this input, */
    uint64_t at;            /* at this place */
    uint64_t ids, unknowns; /* tokens; of these <unk> */
    uint64_t marks;         /* inputs that begin with a byte order mark */
};

struct job {
    const struct settings *settings;
    struct tokenizer *tokenizer;
    struct inputs inputs;
    struct token_writer outputs[2];
    uint64_t done;          /* bytes of text */
    uint64_t separators;    /* lines that are one */
    uint64_t before, split; /* bytes of inputs before this one; bytes before the validation text */
    double start;
    struct piece pieces[BATCH_PIECES];
    int piece_count;
    struct file_map maps[OPEN_INPUTS]; /* inputs that the pieces point into */
    const char *names[OPEN_INPUTS];    /* their paths */
    int map_count;
    struct oddities odd;
};

/* Counts words as bytes.split() in Python and wc -w in the C locale do. No piece cuts a word. */
static uint64_t count_words(const char *text, size_t bytes) {
    uint64_t words = 0;
    bool space = true;
    for (size_t i = 0; i < bytes; i++) {
        bool is_space = text[i] == ' ' || (text[i] >= '\t' && text[i] <= '\r');
        words += space && !is_space;
        space = is_space;
    }
    return words;
}

/* The length of the character at s, of at most n bytes; 0: it is none in UTF-8 (RFC 3629), or a zero byte. */
static size_t character(const unsigned char *s, size_t n) {
    static const unsigned least[] = {0, 0, 0x80, 0x800, 0x10000};
    const size_t length = s[0] < 0x80 ? 1 : s[0] < 0xc0 ? 0 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
    if (length < 2) return length && s[0];
    unsigned code = s[0] & (0x7f >> length);
    for (size_t i = 1; i < length; i++) {
        if (i == n || (s[i] & 0xc0) != 0x80) return 0;
        code = code << 6 | (s[i] & 0x3f);
    }
    return code >= least[length] && code < 0x110000 && code >> 11 != 0x1b ? length : 0;
}

static void find_odd(struct piece *p) {
    const unsigned char *s = (const unsigned char *)p->text;
    for (size_t i = 0, length; i < p->bytes; i += length ? length : 1) {
        length = character(s + i, p->bytes - i);
        if (!length && p->odd++ == 0) p->first = i;
    }
}

static void note_oddities(struct job *job, const struct piece *p) {
    struct oddities *odd = &job->odd;
    if (p->odd && odd->bytes == 0)
        for (int i = 0; i < job->map_count; i++) {
            const char *start = (const char *)job->maps[i].data;
            if (p->text < start || p->text >= start + job->maps[i].bytes) continue;
            odd->input = job->names[i], odd->at = (uint64_t)(p->text - start) + p->first;
        }
    odd->bytes += p->odd;
    odd->ids += p->count;
    const int unknown = tokenizer_unknown(job->tokenizer);
    for (size_t i = 0; i < p->count; i++) odd->unknowns += p->ids[i] == unknown;
}

/* Refuses input that is no text, and says what the tokenizer cannot express. */
static int judge_oddities(const struct job *job) {
    const struct oddities *odd = &job->odd;
    const double share = (double)odd->bytes / (double)job->inputs.bytes;
    if (odd->marks)
        log_error("%" PRIu64 " of the inputs begin with a byte order mark, which is left out",
                  odd->marks);
    if (share > 0.01)
        return log_error(
            "%.1f%% of the input's bytes are no text in UTF-8, the first is byte %llu of "
            "'%s': expected text (gunzip unpacks, iconv converts it)",
            100 * share, (unsigned long long)odd->at, odd->input);
    if (odd->bytes)
        log_error("%llu bytes are no text in UTF-8, the first is byte %llu of '%s': the model "
                  "learns other characters in their place",
                  (unsigned long long)odd->bytes, (unsigned long long)odd->at, odd->input);
    if (odd->unknowns > odd->ids / 100)
        log_error("%.0f%% of the tokens are <unk>: the tokenizer lacks characters of this text",
                  100 * (double)odd->unknowns / (double)odd->ids);
    return 0;
}

static void encode_piece(const struct tokenizer *tokenizer, struct piece *p) {
    p->words = count_words(p->text, p->bytes);
    find_odd(p);
    p->status = tokenizer_encode(tokenizer, p->text, p->bytes, !p->begins, &p->ids, &p->count);
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
            status = token_writer_write(&job->outputs[p->output], p->begins ? bos : -1, p->ids,
                                        p->count, p->words, p->bytes);
        if (status == 0) note_oddities(job, p);
        free(p->ids);
        job->done += p->bytes;
    }
    job->piece_count = 0;
    show_progress(job->done, job->inputs.bytes, job->start);
    return status;
}

/* Encodes and writes all pieces, and then closes the inputs that they point into. */
static int flush_and_unmap(struct job *job) {
    int status = flush(job);
    for (int i = 0; i < job->map_count; i++)
        if (file_unmap(&job->maps[i])) status = -1;
    job->map_count = 0;
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
        job->pieces[job->piece_count++] =
            (struct piece){.text = text, .bytes = part, .begins = begins, .output = output};
        if (job->piece_count == BATCH_PIECES && flush(job) != 0) return -1;
        text += part;
        bytes -= part;
        begins = false;
    }
    return 0;
}

/* A document that contains the split is cut at the next start of a line. Its rest becomes a
 * document of the validation text. */
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

/* Finds the next line that is the separator, or `end`. *after is where the text continues. */
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
    if (job->map_count == OPEN_INPUTS && flush_and_unmap(job) != 0) return -1;
    struct file_map *map = &job->maps[job->map_count];
    if (file_map(path, map) != 0) return -1;
    job->names[job->map_count++] = path;
    const char *input = (const char *)map->data, *end = input + map->bytes, *text = input;
    if (map->bytes >= 3 && !memcmp(input, "\xef\xbb\xbf", 3))
        text += 3, job->done += 3, job->odd.marks++;
    while (text < end) {
        const char *after;
        const char *stop = find_separator(text, end, job->settings->separator, &after);
        if (split_document(job, input, text, (size_t)(stop - text)) != 0) return -1;
        job->separators += stop < after;
        job->done += (uint64_t)(after - stop);
        text = after;
    }
    job->before += map->bytes;
    return 0;
}

/* A separator within a line divides nothing. If it is no line at all, each input becomes one document, which
 * is right only if it has just one. */
static int check_separator(const struct job *job) {
    const char *separator = job->settings->separator;
    uint64_t found = 0;
    size_t length = separator ? strlen(separator) : 0;
    if (!separator) return 0;
    for (size_t i = 0; length && i < job->inputs.count; i++) {
        struct file_map map;
        if (file_map(job->inputs.list[i].path, &map)) return -1;
        const char *at = (const char *)map.data, *end = at + map.bytes;
        while (at && (at = (const char *)memmem(at, (size_t)(end - at), separator, length)))
            at += length, found++;
        if (file_unmap(&map)) return -1;
    }
    if (!found && !job->separators)
        log_error("--separator '%.200s' is nowhere in the input: each input is one document",
                  separator);
    if (found <= job->separators) return 0;
    log_error("--separator '%.200s' is %" PRIu64 " lines of the input, and %" PRIu64
              " times within a line, where it divides nothing: "
              "expected a line of its own between documents",
              separator, job->separators, found - job->separators);
    return job->separators ? 0 : -1;
}

/* ---- the whole ------------------------------------------------------------------------------ */

static int check_tokenizer(const struct tokenizer *tokenizer, const char *path) {
    int vocabulary = tokenizer_vocabulary(tokenizer);
    if (vocabulary > TOKENS_VOCABULARY_MAX)
        return log_error("'%s' has a vocabulary of %d, token files allow at most %d", path,
                         vocabulary, TOKENS_VOCABULARY_MAX);
    if (tokenizer_bos(tokenizer) < 0)
        return log_error("'%s' has no <s>, with which documents begin; train it with one", path);
    return 0;
}

static void describe(const struct job *job) {
    double took = seconds() - job->start, megabytes = 1e-6 * (double)job->inputs.bytes;
    for (int i = 0; i < 2; i++) {
        const struct token_writer *out = &job->outputs[i];
        if (!out->path) continue;
        printf("%s: %llu tokens, %llu words, vocabulary %d", out->path,
               (unsigned long long)out->tokens, (unsigned long long)out->words, out->vocabulary);
        if (out->shard_tokens) printf(", %d shard%s", out->shards, out->shards > 1 ? "s" : "");
        printf("\n");
    }
    if (job->inputs.skipped) {
        printf("left out: %zu file%s that are no text\n", job->inputs.skipped,
               job->inputs.skipped > 1 ? "s" : "");
    }
    printf("%.1f MB of text in %.1f s, %.1f MB/s, %d thread%s\n", megabytes, took, megabytes / took,
           omp_get_max_threads(), omp_get_max_threads() > 1 ? "s" : "");
}

static int finish(struct job *job) {
    if (token_writer_finish(&job->outputs[1], "after the split; use a larger --val-fraction") ||
        token_writer_finish(&job->outputs[0], "before the split"))
        return -1;
    for (int i = 1; i >= 0; i--) {
        struct token_writer *out = &job->outputs[i];
        if (!out->path) continue;
        if (copy_tokenizer(job->settings->tokenizer, out->path) || token_writer_publish(out))
            return -1;
    }
    describe(job);
    return 0;
}

/* Whether an output would replace a file that is read. */
static int refuse_input(const struct job *job, const char *output) {
    struct stat out, in;
    if (!output || stat(output, &out)) return 0;
    for (size_t i = 0; i <= job->inputs.count; i++) {
        const char *input =
            i < job->inputs.count ? job->inputs.list[i].path : job->settings->tokenizer;
        if (stat(input, &in) == 0 && in.st_dev == out.st_dev && in.st_ino == out.st_ino)
            return log_error("'%s' is read as input: expected another name for the token file",
                             input);
    }
    return 0;
}

/* Decides where the input's bytes are split, and opens both outputs. */
static int open_outputs(struct job *job) {
    const struct settings *s = job->settings;
    const int vocabulary = tokenizer_vocabulary(job->tokenizer);
    double fraction = s->val_fraction < 0 ? 0.05 : s->val_fraction;
    job->split = s->val ? (uint64_t)((1 - fraction) * (double)job->inputs.bytes) : UINT64_MAX;
    const uint64_t shard = (uint64_t)s->shard_tokens;
    if (refuse_input(job, s->train) || refuse_input(job, s->val)) return -1;
    if (token_writer_open(&job->outputs[0], s->train, shard, vocabulary) ||
        token_writer_open(&job->outputs[1], s->val, shard, vocabulary))
        return -1;
    struct stat train, val;
    if (s->val && !fstat(job->outputs[0].descriptor, &train) &&
        !fstat(job->outputs[1].descriptor, &val) && train.st_dev == val.st_dev &&
        train.st_ino == val.st_ino)
        return log_error("--train '%s' and --val '%s' name the same file: expected two", s->train,
                         s->val);
    return 0;
}

/* The directory of a file's name. */
static int directory_of(const char *path, char directory[FILE_PATH_BYTES]) {
    const char *slash = strrchr(path, '/');
    int length = slash ? (int)(slash - path) + 1 : 2;
    if (snprintf(directory, FILE_PATH_BYTES, "%.*s", length, slash ? path : "./") < FILE_PATH_BYTES)
        return 0;
    return log_error("the path '%.100s...' is too long", path);
}

static int tokenize(const struct settings *s) {
    char directory[FILE_PATH_BYTES];
    struct job *job = (struct job *)calloc(1, sizeof *job);
    if (!job) return log_error("out of memory");
    job->settings = s;
    job->inputs.spool = job->outputs[0].descriptor = job->outputs[1].descriptor = -1;
    threads_choose_alone(s->threads, 1);
    int status = directory_of(s->train, directory);
    if (status == 0) status = tokenizer_open(s->tokenizer, &job->tokenizer);
    if (status == 0) status = check_tokenizer(job->tokenizer, s->tokenizer);
    if (status == 0)
        status = inputs_collect(&job->inputs, s->inputs, (size_t)s->input_count, directory);
    job->start = seconds();
    if (status == 0) status = open_outputs(job);
    for (size_t i = 0; i < job->inputs.count && status == 0; i++)
        status = add_input(job, job->inputs.list[i].path);
    if (status == 0) status = flush_and_unmap(job);
    if (status == 0) status = check_separator(job);
    if (status == 0) status = judge_oddities(job);
    if (status == 0) status = finish(job);
    for (int i = 0; i < job->map_count; i++) file_unmap(&job->maps[i]);
    for (int i = 0; i < 2 && status != 0; i++) token_writer_discard(&job->outputs[i]);
    inputs_release(&job->inputs);
    tokenizer_close(job->tokenizer);
    free(job);
    return status;
}

/* ---- command line --------------------------------------------------------------------------- */

static const char help[] =
    "Usage: tokenize --tokenizer FILE --input FILE|FOLDER|-... --train FILE ...\n"
    "Encodes text with a SentencePiece model and writes llm.c token files.\n"
    "\n"
    "  --tokenizer FILE      SentencePiece model, as Llama-2's tokenizer.model\n"
    "  --input FILE          text in UTF-8; a folder stands for all text files in it\n"
    "                        and below, '-' for standard input. Several --input, and\n"
    "                        names without an option, are read one after the other;\n"
    "                        each file begins a document\n"
    "  --separator LINE      a line that lies between documents: '<|endoftext|>'\n"
    "  --train FILE          token file to write\n"
    "  --val FILE            token file for the end of the text, not in --train\n"
    "  --val-fraction F      how much of the text that is (default 0.05)\n"
    "  --shard-tokens N      write NAME_000000.bin, NAME_000001.bin ... of N tokens\n"
    "  --threads N           that encode (default: all); the output is the same\n"
    "  --help                this text\n"
    "\n"
    "Every document begins with <s>. tokenizer.model is copied beside the outputs.\n"
    "Exit codes: 0 success, 1 failure, 2 wrong usage.\n";

static int usage(const char *what, const char *value) {
    log_error("%s%s; see tokenize --help", what, value);
    return EXIT_USAGE;
}

/* Returns 0 if the settings are good, else the exit code. */
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

static int parse_number(const char *name, const char *text, long long least, long long most,
                        long long *number) {
    char *end, what[128];
    errno = 0;
    *number = strtoll(text, &end, 10);
    if (end != text && *end == '\0' && errno == 0 && *number >= least && *number <= most) return 0;
    snprintf(what, sizeof what, "%s must be a whole number from %lld to %lld, not ", name, least,
             most);
    return usage(what, text);
}

/* Returns 0 if the program should continue, the exit code after an error, or -1 after --help. */
static int parse(int argc, char **argv, struct settings *s) {
    static const struct option options[] = {{"tokenizer", required_argument, NULL, 't'},
                                            {"input", required_argument, NULL, 'i'},
                                            {"separator", required_argument, NULL, 's'},
                                            {"train", required_argument, NULL, 'o'},
                                            {"val", required_argument, NULL, 'v'},
                                            {"val-fraction", required_argument, NULL, 'f'},
                                            {"shard-tokens", required_argument, NULL, 'n'},
                                            {"threads", required_argument, NULL, 'j'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    int option, status = 0;
    long long threads = 0;
    opterr = 0;
    while (status == 0 && (option = getopt_long(argc, argv, "-:h", options, NULL)) != -1) {
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
        case 'n':
            status = parse_number("--shard-tokens", optarg, 2, INT32_MAX, &s->shard_tokens);
            break;
        case 'j':
            status = parse_number("--threads", optarg, 1, 4096, &threads);
            s->threads = (int)threads;
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
    log_program = "tokenize";
    file_hold_standard();
    signal(SIGXFSZ, SIG_IGN); /* a limit on the size of files is an error of the write */
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
