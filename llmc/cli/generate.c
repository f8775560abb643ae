/* generate.c — see generate.h. */
#include "llmc/cli/generate.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/data/tokenizer_file.h"
#include "llmc/util/file.h"
#include "llmc/util/random.h"
#include "llmc/util/stop_signal.h"
#include "llmc/log/error.h"
#include "llmc/model/sampler.h"
#include "llmc/util/bf16.h"

int generate_logits(const struct backend *be, float *logits, const tensor *x, const tensor *w,
                    int C, int V) {
    const size_t bytes = (size_t)V * be->element_bytes;
    tensor *out = be->allocate(bytes);
    if (!out) return log_out_of_memory("logits", (double)bytes);
    be->matmul_forward(out, x, w, 1, C, V);
    be->download(logits, out, bytes);
    be->release(out);
    if (be->element_bytes == sizeof(float)) return 0;
    for (int v = V - 1; v >= 0; v--) { /* in place */
        uint16_t bits;
        memcpy(&bits, (const char *)logits + 2 * (size_t)v, sizeof bits);
        logits[v] = from_bf16(bits);
    }
    return 0;
}

/* Feeds tokens that follow the `first` tokens that the model's layers hold. */
static int feed_llama(void *context, const int32_t *tokens, int first, int count, float *logits) {
    const struct generate_llama *g = context;
    const struct llama_config *c = &g->layout->config;
    const size_t working = g->be->element_bytes;
    struct activations *e = g->activations;
    memcpy(e->host_tokens, tokens, (size_t)count * sizeof *tokens);
    activations_send(e, g->be, count);
    e->past = first;
    g->forward(g, count);
    e->past = 0;
    const tensor *last = (const char *)e->last_norm + (size_t)(count - 1) * c->width * working;
    const weight *classifier =
        (const char *)g->weights + g->layout->classifier * g->be->weight_bytes;
    return generate_logits(g->be, logits, last, classifier, c->width, c->vocabulary);
}

struct generate_model generate_model_of(struct generate_llama *g) {
    const struct llama_config *c = &g->layout->config;
    const bool remembers = activations_remember(g->activations, c, g->be);
    const struct generate_model model = {.vocabulary = c->vocabulary,
                                         .positions = g->positions,
                                         .remembers = remembers,
                                         .feed = feed_llama,
                                         .context = g};
    return model;
}

struct generation {
    const struct generate_model *model;
    const struct tokenizer *tokenizer;
    const struct generate_settings *settings;
    struct tokenizer_stream *stream;
    int32_t *tokens; /* the prompt, followed by the tokens that were drawn */
    size_t count;    /* number of them */
    size_t start;    /* index of the token at the model's position 0 */
    size_t fed;      /* the model has been fed the tokens before this index */
    float *logits;   /* (vocabulary) */
    struct sampler_choice *scratch;
};

static int show_token(struct generation *g, int32_t token, generate_show show, void *context) {
    const char *text;
    if (tokenizer_stream_next(g->stream, token, &text)) return -1;
    if (*text) show(context, text);
    return 0;
}

/* Feeds the tokens that the model has not been fed yet. */
static int feed(struct generation *g) {
    const size_t positions = (size_t)g->model->positions;
    if (g->count - g->start > positions) {
        g->start = g->fed = g->count - (positions + 1) / 2;
    }
    const size_t first = g->model->remembers ? g->fed : g->start;
    g->fed = g->count;
    return g->model->feed(g->model->context, g->tokens + first, (int)(first - g->start),
                          (int)(g->count - first), g->logits);
}

/* The model's logits for the next token. */
static int check_logits(const struct generation *g) {
    for (int i = 0; i < g->model->vocabulary; i++)
        if (!isfinite(g->logits[i]))
            return log_error("token %zu of the text: the logit of id %d is %g: expected finite "
                             "numbers, so a model that has not diverged",
                             g->count + 1, i, (double)g->logits[i]);
    return 0;
}

static int draw_tokens(struct generation *g, generate_show show, void *context) {
    const struct generate_settings *s = g->settings;
    const uint64_t key = random_bits(s->seed, 0x73616d706c6573u /* "samples" */);
    const int eos = tokenizer_eos(g->tokenizer);
    for (int i = 0; i < s->tokens && !stop_signal_seen(); i++) {
        if (feed(g) || check_logits(g)) return -1;
        int32_t token = sampler_draw(g->logits, g->model->vocabulary, s->temperature, s->top_p,
                                     random_uniform(key, (uint64_t)i), g->scratch);
        if (token == eos) break;
        if (token >= tokenizer_vocabulary(g->tokenizer)) { /* of a padded vocabulary */
            if (*s->prompt)
                log_error("the text ends at id %d: the model has %d ids, the tokenizer %d; if that "
                          "happens often, it is not the model's",
                          token, g->model->vocabulary, tokenizer_vocabulary(g->tokenizer));
            break;
        }
        g->tokens[g->count++] = token;
        if (show_token(g, token, show, context)) return -1;
    }
    return 0;
}

int generate_text(const struct generate_model *model, const struct tokenizer *tokenizer,
                  const struct generate_settings *settings, generate_show show, void *context) {
    const size_t V = (size_t)model->vocabulary;
    struct generation g = {model, tokenizer, settings, NULL, NULL, 0, 0, 0, NULL, NULL};
    int failed = tokenizer_encode_prompt(tokenizer, settings->prompt, (size_t)settings->tokens,
                                         &g.tokens, &g.count);
    if (!failed && g.count > (size_t)model->positions && *settings->prompt)
        log_error("the prompt has %zu tokens, and the model takes %d: it goes on from the last %d",
                  g.count, model->positions, (model->positions + 1) / 2);
    if (!failed) failed = tokenizer_stream_open(tokenizer, &g.stream);
    g.logits = calloc(V, sizeof *g.logits);
    g.scratch = calloc(V, sizeof *g.scratch);
    if (!failed && (!g.logits || !g.scratch))
        failed = log_out_of_memory("logits", 12.0 * (double)V);
    for (size_t i = 0; i < g.count && !failed; i++)
        if (g.tokens[i] != tokenizer_bos(tokenizer))
            failed = show_token(&g, g.tokens[i], show, context);
    if (!failed) failed = draw_tokens(&g, show, context);
    if (!failed) show(context, tokenizer_stream_finish(g.stream));
    tokenizer_stream_close(g.stream);
    free(g.scratch);
    free(g.logits);
    free(g.tokens);
    return failed;
}

void generate_gather(void *context, const char *text) {
    struct generate_line *line = context;
    const size_t room = sizeof line->text - 1;
    size_t bytes = strlen(text);
    if (bytes > room - line->used) {
        bytes = room - line->used;
        while (bytes > 0 && ((unsigned char)text[bytes] & 0xC0) == 0x80) bytes--;
    }
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)text[i];
        line->text[line->used++] = c < ' ' || c == 127 ? ' ' : (char)c;
    }
    line->text[line->used] = '\0';
}

/* ---- the two uses ---------------------------------------------------------------------------- */

int generate_open_tokenizer(const char *path, const char *beside, int vocabulary,
                            struct tokenizer **tokenizer) {
    char own[FILE_PATH_BYTES];
    if (!path && tokenizer_file_in(own, beside)) return -1;
    if (!path) path = own;
    if (tokenizer_open(path, tokenizer)) return -1;
    const int tokens = tokenizer_vocabulary(*tokenizer);
    if (tokens <= vocabulary) return 0;
    tokenizer_close(*tokenizer);
    *tokenizer = NULL;
    return log_error("%s: the tokenizer has %d tokens, the model %d", path, tokens, vocabulary);
}

static void print(void *context, const char *text) {
    (void)context;
    fputs(text, stdout);
    fflush(stdout);
}

int generate_to_terminal(struct generate_llama *g, const struct tokenizer *tokenizer,
                         const struct options *o) {
    const struct generate_model model = generate_model_of(g);
    const struct generate_settings settings = {o->generate, o->tokens, o->temperature, o->top_p,
                                               (uint64_t)o->seed};
    if (generate_text(&model, tokenizer, &settings, print, NULL)) return -1;
    puts("");
    return 0;
}

int generate_check_tokenizer(const char *path) {
    struct tokenizer *tokenizer;
    if (!path)
        return log_error(
            "--sample-every: expected tokenizer.model beside the data, or --tokenizer FILE");
    if (tokenizer_open(path, &tokenizer)) return -1;
    tokenizer_close(tokenizer);
    return 0;
}

int generate_sample(struct generate_llama *g, const char *path, const struct options *o,
                    struct generate_line *line) {
    const struct generate_model model = generate_model_of(g);
    const struct generate_settings settings = {"", 40, o->temperature, o->top_p, (uint64_t)o->seed};
    struct tokenizer *tokenizer;
    line->used = 0;
    line->text[0] = '\0';
    if (generate_open_tokenizer(path, NULL, model.vocabulary, &tokenizer)) return -1;
    int failed = generate_text(&model, tokenizer, &settings, generate_gather, line);
    tokenizer_close(tokenizer);
    return failed;
}
