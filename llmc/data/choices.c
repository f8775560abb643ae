/* choices.c — see choices.h. */
#include "llmc/data/choices.h"

#include <ctype.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/data/tokenizer.h"
#include "llmc/log/error.h"
#include "llmc/util/file.h"

enum { MAGIC = 20240522, VERSION = 1, HEADER_BYTES = 1024, START = 65535, MOST_ENDINGS = 64 };

struct row {
    int32_t *tokens;
    int count, scored;
    double characters;
};

struct question {
    int label, endings;
    struct row row[]; /* [endings] */
};

struct choices {
    const char *path;
    int vocabulary, positions;
    struct tokenizer *tokenizer; /* while JSON lines are read */
    size_t count, capacity;
    struct question **question;
};

/* ---- building ----------------------------------------------------------------------------------- */

/* Begins a question. `where` is its line or its number in the file. */
static struct question *add_question(struct choices *c, int label, int endings, size_t where) {
    if (endings < 2 || endings > MOST_ENDINGS || label < 0 || label >= endings) {
        log_error(
            "'%s': question %zu has %d endings and label %d, expected 2 to %d endings and the "
            "index of one of them",
            c->path, where, endings, label, MOST_ENDINGS);
        return NULL;
    }
    if (c->count == c->capacity) {
        c->capacity = c->capacity ? 2 * c->capacity : 64;
        struct question **grown = realloc(c->question, c->capacity * sizeof *grown);
        if (grown) c->question = grown;
        if (!grown) return log_out_of_memory("questions", 0), NULL;
    }
    struct question *q = calloc(1, sizeof *q + (size_t)endings * sizeof *q->row);
    if (!q) return log_out_of_memory("questions", 0), NULL;
    q->label = label;
    q->endings = endings;
    return c->question[c->count++] = q;
}

/* Makes a row of `context` and `ending` tokens, of which the last positions + 1 are kept, because the
 * last token is only a target. */
static int set_row(struct choices *c, struct row *row, const int32_t *tokens, size_t context,
                   size_t ending, size_t where) {
    const size_t most = (size_t)c->positions + 1;
    size_t count = context + ending;
    if (!context || !ending)
        return log_error("'%s': question %zu has no %s: expected a token at least", c->path, where,
                         context ? "ending" : "context");
    if (ending >= most)
        return log_error("'%s': question %zu has an ending of %zu tokens, the model takes %d",
                         c->path, where, ending, c->positions);
    if (count > most) tokens += count - most, count = most;
    for (size_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= c->vocabulary)
            return log_error("'%s': question %zu has token %d, expected less than the model's "
                             "vocabulary size, %d",
                             c->path, where, tokens[i], c->vocabulary);
    row->tokens = malloc(count * sizeof *tokens);
    if (!row->tokens) return log_out_of_memory("a question", (double)count * sizeof *tokens);
    memcpy(row->tokens, tokens, count * sizeof *tokens);
    row->count = (int)count;
    row->scored = (int)ending;
    return 0;
}

/* ---- JSON lines --------------------------------------------------------------------------------- */

/* <s>, if the tokenizer has one, and the tokens of `text`. The caller frees *ids. */
static int encode(const struct choices *c, const char *text, size_t bytes, int32_t **ids,
                  size_t *count) {
    const int bos = tokenizer_bos(c->tokenizer);
    int32_t *found;
    if (tokenizer_encode(c->tokenizer, text, bytes, &found, count)) return -1;
    *ids = malloc((*count + 1) * sizeof **ids);
    if (*ids && *count) memcpy(*ids + (bos >= 0), found, *count * sizeof **ids);
    free(found);
    if (!*ids) return log_out_of_memory("a question", 0);
    if (bos >= 0) (*ids)[0] = bos;
    *count += bos >= 0;
    return 0;
}

static double count_characters(const char *text) {
    double count = 0;
    for (; *text; text++) count += ((unsigned char)*text & 0xC0) != 0x80;
    return count;
}

static int read_ending(struct choices *c, struct row *row, const char *context, const char *ending,
                       size_t line) {
    size_t own = strlen(context), bytes = own + 1 + strlen(ending), before = 0, count = 0;
    char *text = malloc(bytes + 1);
    int32_t *alone = NULL, *ids = NULL;
    if (!text) return log_out_of_memory("a question", (double)bytes);
    snprintf(text, bytes + 1, "%s %s", context, ending);
    while (own > 0 && isspace((unsigned char)context[own - 1])) own--;
    int failed = encode(c, context, own, &alone, &before) || encode(c, text, bytes, &ids, &count);
    failed = failed || set_row(c, row, ids, before < count ? before : count,
                               before < count ? count - before : 0, line);
    row->characters = count_characters(ending);
    free(ids);
    free(alone);
    free(text);
    return failed ? -1 : 0;
}

/* An integer, or its digits as a string, as in some copies of HellaSwag; -1: neither. */
static int label_of(const json_t *value) {
    const char *text = json_string_value(value);
    if (text && isdigit((unsigned char)*text)) return atoi(text);
    return json_is_integer(value) && json_integer_value(value) < MOST_ENDINGS
               ? (int)json_integer_value(value)
               : -1;
}

static int read_object(struct choices *c, const json_t *object, size_t line) {
    const json_t *context = json_object_get(object, "context"), *ending;
    const json_t *endings = json_object_get(object, "endings");
    if (!context) context = json_object_get(object, "ctx");
    if (!json_is_string(context) || !json_is_array(endings) || !json_object_get(object, "label"))
        return log_error("'%s' line %zu: expected {\"context\": \"...\", \"endings\": [...], "
                         "\"label\": N}",
                         c->path, line);
    struct question *q = add_question(c, label_of(json_object_get(object, "label")),
                                      (int)json_array_size(endings), line);
    size_t e;
    if (!q) return -1;
    json_array_foreach(endings, e, ending) {
        if (!json_string_length(ending))
            return log_error("'%s' line %zu: ending %zu is no text", c->path, line, e);
        if (read_ending(c, &q->row[e], json_string_value(context), json_string_value(ending), line))
            return -1;
    }
    return 0;
}

static int read_lines(struct choices *c, const struct file_map *map, const char *tokenizer) {
    const char *text = (const char *)map->data, *end = text + map->bytes;
    if (tokenizer_open(tokenizer, &c->tokenizer)) return -1;
    for (size_t line = 1; text < end; line++) {
        const char *newline = (const char *)memchr(text, '\n', (size_t)(end - text));
        const size_t bytes = (size_t)((newline ? newline : end) - text);
        json_error_t error;
        size_t blank = 0;
        while (blank < bytes && isspace((unsigned char)text[blank])) blank++;
        json_t *object = blank < bytes ? json_loadb(text, bytes, 0, &error) : NULL;
        if (!object && blank < bytes)
            return log_error("'%s' line %zu: %s; expected a JSON object, or llm.c's file of "
                             "questions",
                             c->path, line, error.text);
        const int failed = object ? read_object(c, object, line) : 0;
        json_decref(object);
        if (failed) return -1;
        text += bytes + 1;
    }
    return 0;
}

/* ---- llm.c's file ------------------------------------------------------------------------------- */

struct stream {
    const uint16_t *at, *end;
};

/* The next number; -1 at the end. */
static int next(struct stream *s) {
    return s->at < s->end ? *s->at++ : -1;
}

static int truncated(const struct choices *c, size_t number) {
    return log_error("'%s': question %zu is damaged or truncated, expected llm.c's layout of "
                     "questions",
                     c->path, number);
}

/* Appends the next list of tokens. Returns their number, or -1. */
static int next_tokens(struct stream *s, int32_t *to) {
    const int count = next(s);
    if (count < 0 || s->end - s->at < count) return -1;
    for (int i = 0; i < count; i++) to[i] = *s->at++;
    return count;
}

static int read_question(struct choices *c, struct stream *s, size_t number, int32_t *room) {
    const uint16_t *first = s->at;
    const int start = next(s), bytes = next(s), index = next(s), label = next(s);
    const int endings = next(s), context = next_tokens(s, room);
    (void)index;
    if (start != START || context < 0) return truncated(c, number);
    struct question *q = add_question(c, label, endings, number);
    if (!q) return -1;
    for (int e = 0; e < endings; e++) {
        const int ending = next_tokens(s, room + context);
        if (ending < 0) return truncated(c, number);
        if (set_row(c, &q->row[e], room, (size_t)context, (size_t)ending, number)) return -1;
    }
    return (const char *)s->at - (const char *)first == bytes ? 0 : truncated(c, number);
}

static int read_binary(struct choices *c, const struct file_map *map) {
    int32_t header[3];
    memcpy(header, map->data, sizeof header);
    if (header[1] != VERSION || map->bytes < HEADER_BYTES)
        return log_error("'%s' is llm.c's file of questions of version %d with %zu bytes, expected "
                         "version %d and at least %d bytes",
                         c->path, header[1], map->bytes, VERSION, HEADER_BYTES);
    int32_t *room = malloc(2 * 65536 * sizeof *room);
    if (!room) return log_out_of_memory("a question", 2 * 65536 * sizeof *room);
    const uint16_t *first = (const uint16_t *)((const char *)map->data + HEADER_BYTES);
    struct stream s = {first, first + (map->bytes - HEADER_BYTES) / 2};
    int failed = 0;
    for (size_t i = 1; !failed && s.at < s.end; i++) failed = read_question(c, &s, i, room);
    free(room);
    if (!failed && c->count != (size_t)header[2])
        failed =
            log_error("'%s' has %zu questions, its header claims %d", c->path, c->count, header[2]);
    return failed;
}

/* ---- the whole ---------------------------------------------------------------------------------- */

static int read_all(struct choices *c, const char *tokenizer) {
    struct file_map map;
    int32_t magic = 0;
    if (file_map(c->path, &map)) return -1;
    if (map.bytes >= 3 * sizeof magic) memcpy(&magic, map.data, sizeof magic);
    int failed = magic == MAGIC ? read_binary(c, &map) : read_lines(c, &map, tokenizer);
    if (file_unmap(&map)) return -1;
    if (!failed && !c->count) failed = log_error("'%s' has no question", c->path);
    return failed;
}

int choices_open(const char *path, const char *tokenizer, int vocabulary, int positions,
                 struct choices **out) {
    struct choices *c = calloc(1, sizeof *c);
    *out = NULL;
    if (!c) return log_out_of_memory("questions", 0);
    c->path = path;
    c->vocabulary = vocabulary;
    c->positions = positions;
    if (read_all(c, tokenizer)) return choices_close(c), -1;
    *out = c;
    return 0;
}

void choices_close(struct choices *c) {
    if (!c) return;
    for (size_t i = 0; i < c->count; i++) {
        for (int e = 0; e < c->question[i]->endings; e++) free(c->question[i]->row[e].tokens);
        free(c->question[i]);
    }
    free(c->question);
    tokenizer_close(c->tokenizer);
    free(c);
}

int choices_questions(const struct choices *c) {
    return (int)c->count;
}

int choices_endings(const struct choices *c, int question) {
    return c->question[question]->endings;
}

int choices_most_endings(const struct choices *c) {
    int most = 0;
    for (size_t i = 0; i < c->count; i++)
        if (c->question[i]->endings > most) most = c->question[i]->endings;
    return most;
}

int choices_longest(const struct choices *c) {
    int longest = 0;
    for (size_t i = 0; i < c->count; i++)
        for (int e = 0; e < c->question[i]->endings; e++)
            if (c->question[i]->row[e].count > longest) longest = c->question[i]->row[e].count;
    return longest - 1;
}

int choices_write(const struct choices *c, int question, int first, int B, int32_t *tokens,
                  int32_t *targets) {
    const struct row *row = &c->question[question]->row[first];
    int T = 0;
    for (int b = 0; b < B; b++) T = row[b].count - 1 > T ? row[b].count - 1 : T;
    memset(tokens, 0, (size_t)(B * T) * sizeof *tokens);
    memset(targets, 0, (size_t)(B * T) * sizeof *targets);
    for (int b = 0; b < B; b++) {
        const size_t bytes = (size_t)(row[b].count - 1) * sizeof *tokens;
        memcpy(tokens + b * T, row[b].tokens, bytes);
        memcpy(targets + b * T, row[b].tokens + 1, bytes);
    }
    return T;
}

void choices_read(const struct choices *c, int question, int first, int B, int T,
                  const float *found, double *losses) {
    const struct row *row = &c->question[question]->row[first];
    for (int b = 0; b < B; b++) {
        const int end = b * T + row[b].count - 1;
        losses[first + b] = 0;
        for (int i = end - row[b].scored; i < end; i++) losses[first + b] += found[i];
    }
}

/* ---- judging ------------------------------------------------------------------------------------ */

enum { SUM, PER_CHARACTER, PER_TOKEN };

/* Whether the right ending is the likeliest. */
static bool is_right(const struct question *q, const double *losses, int measure) {
    int best = 0;
    double least = 0;
    for (int e = 0; e < q->endings; e++) {
        const struct row *r = &q->row[e];
        const double loss = losses[e] / (measure == SUM         ? 1
                                         : measure == PER_TOKEN ? r->scored
                                                                : r->characters);
        if (e == 0 || loss < least) best = e, least = loss;
    }
    return best == q->label;
}

void choices_judge(const struct choices *c, int question, const double *losses,
                   struct choices_result *result) {
    const struct question *q = c->question[question];
    result->questions++;
    result->correct += is_right(q, losses, SUM);
    result->correct_per_token += is_right(q, losses, PER_TOKEN);
    if (c->tokenizer)
        result->correct_per_character += is_right(q, losses, PER_CHARACTER);
    else
        result->correct_per_character = -1;
}
