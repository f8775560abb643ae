/* test_tokenizer.c — tests the SentencePiece wrapper and build/tokenize.
 *
 * The test writes the models itself, as the protocol buffers that SentencePiece reads
 * (sentencepiece_model.proto), so that it can make unusual models of every kind.
 * TOKENIZE names the program to test. By default it is found relative to this one: build/tokenize.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <sys/wait.h>

#include "llmc/data/dataloader.h"
#include "llmc/data/tokenizer.h"
#include "test/support/llmc_test.h"

/* ---- making models -------------------------------------------------------------------------- */

enum { NORMAL = 1, UNKNOWN = 2, CONTROL = 3, BYTE = 6 }; /* ModelProto.SentencePiece.Type */

struct model_spec {
    bool bytes;         /* byte fallback */
    bool dummy_prefix;  /* a space is put before a text */
    bool remove_spaces; /* extra ones */
    bool no_bos;
    int more;          /* pieces "w0", "w1", ... */
    const char *extra; /* one more piece, or NULL */
};

static const struct model_spec like_llama = {true, true, false, false, 0, NULL};

#define SPACE "\xE2\x96\x81"

static const char *const common_pieces[] = {SPACE "a", SPACE "b", "ab",        "ba",  SPACE "ab",
                                            "aba",     ".",       SPACE SPACE, SPACE, "a",
                                            "b",       "c",       "\xC3\xBC"};

struct buffer {
    unsigned char *data;
    size_t bytes;
};

static void put_byte(struct buffer *b, unsigned value) {
    b->data[b->bytes++] = (unsigned char)value;
}

static void put_number(struct buffer *b, unsigned value) {
    for (; value >= 128; value >>= 7) put_byte(b, (value & 127) | 128);
    put_byte(b, value);
}

/* Field 1 of ModelProto: {1: piece, 2: score, 3: type} */
static void put_piece(struct buffer *b, const char *piece, float score, int type) {
    size_t length = strlen(piece);
    put_byte(b, 1 << 3 | 2);
    put_number(b, (unsigned)(1 + (length < 128 ? 1 : 2) + length + 5 + 2));
    put_byte(b, 1 << 3 | 2);
    put_number(b, (unsigned)length);
    memcpy(b->data + b->bytes, piece, length);
    b->bytes += length;
    put_byte(b, 2 << 3 | 5);
    memcpy(b->data + b->bytes, &score, 4);
    b->bytes += 4;
    put_byte(b, 3 << 3);
    put_number(b, (unsigned)type);
}

/* Fields 2 (trainer: 3 model type BPE, 35 byte fallback) and 3 (normaliser: 3 dummy prefix, 4
 * remove extra spaces) */
static void put_settings(struct buffer *b, const struct model_spec *spec) {
    put_byte(b, 2 << 3 | 2);
    put_number(b, 5);
    put_byte(b, 3 << 3);
    put_number(b, 2);
    put_number(b, 35 << 3);
    put_number(b, spec->bytes);
    put_byte(b, 3 << 3 | 2);
    put_number(b, 4);
    put_byte(b, 3 << 3);
    put_number(b, spec->dummy_prefix);
    put_byte(b, 4 << 3);
    put_number(b, spec->remove_spaces);
}

static const char *write_model(const char *name, const struct model_spec *spec) {
    struct buffer b = {(unsigned char *)malloc(30000 + 40 * (size_t)spec->more), 0};
    char text[32];
    float score = 0;
    put_piece(&b, "<unk>", 0, UNKNOWN);
    put_piece(&b, spec->no_bos ? "<other>" : "<s>", 0, CONTROL);
    put_piece(&b, "</s>", 0, CONTROL);
    for (int i = 0; i < 256 && spec->bytes; i++) {
        snprintf(text, sizeof text, "<0x%02X>", (unsigned)i);
        put_piece(&b, text, 0, BYTE);
    }
    for (size_t i = 0; i < sizeof common_pieces / sizeof *common_pieces; i++)
        put_piece(&b, common_pieces[i], score--, NORMAL);
    if (spec->extra) put_piece(&b, spec->extra, 1, NORMAL);
    for (int i = 0; i < spec->more; i++) {
        snprintf(text, sizeof text, "w%d", i);
        put_piece(&b, text, score--, NORMAL);
    }
    put_settings(&b, spec);
    const char *path = in_scratch(name);
    write_bytes(path, b.data, b.bytes);
    free(b.data);
    return path;
}

static struct tokenizer *open_model(const struct model_spec *spec) {
    struct tokenizer *tokenizer;
    assert_int_equal(tokenizer_open(write_model("test.model", spec), &tokenizer), 0);
    return tokenizer;
}

/* A text of pieces that models know and of what they do not. */
static void random_text(char *text, size_t bytes) {
    static const char *const parts[] = {"a",
                                        "b",
                                        "ab",
                                        "aba",
                                        " ",
                                        " ",
                                        "\n",
                                        ".",
                                        "  ",
                                        "\n\n",
                                        "c",
                                        "\xC3\xBC",
                                        "x",
                                        "\xE6\xBC\xA2",
                                        "\xF0\x9F\x98\x80",
                                        "\t",
                                        "\r\n",
                                        "\xE2\x96\x81",
                                        "\xFF",
                                        "\xE2\x82"};
    *text = '\0';
    for (size_t length = 0; length + 8 < bytes; length = strlen(text))
        strcat(text, parts[random_below(random_below(2) ? 10 : 20)]);
}

/* ---- encoding and decoding ------------------------------------------------------------------- */

static void test_open(void **state) {
    (void)state;
    struct tokenizer *tokenizer = open_model(&like_llama);
    assert_int_equal(tokenizer_vocabulary(tokenizer), 3 + 256 + 13);
    assert_int_equal(tokenizer_bos(tokenizer), 1);
    assert_int_equal(tokenizer_eos(tokenizer), 2);
    assert_true(tokenizer_cuts_at_newlines(tokenizer));
    tokenizer_close(tokenizer);
    tokenizer_close(NULL);

    write_text(in_scratch("bad.model"), "this is no model");
    assert_reports(tokenizer_open(in_scratch("bad.model"), &tokenizer), "no SentencePiece model");
    assert_null(tokenizer);
    write_text(in_scratch("bad.model"), "");
    assert_reports(tokenizer_open(in_scratch("bad.model"), &tokenizer), "no SentencePiece model");
    assert_reports(tokenizer_open(in_scratch("absent.model"), &tokenizer), "No such file");
    assert_reports(tokenizer_open(scratch, &tokenizer), "a directory");
}

static void test_round_trip(void **state) {
    (void)state;
    struct tokenizer *tokenizer = open_model(&like_llama);
    static const char *const texts[] = {
        "",    "ab ab a.",       "a",        " a",
        "a\n", "\n\nab  b \n c", "x\ty\r\n", "\xF0\x9F\x98\x80 \xC3\xBC"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        int32_t *ids;
        size_t count;
        char *text;
        assert_int_equal(
            tokenizer_encode(tokenizer, texts[i], strlen(texts[i]), false, &ids, &count), 0);
        assert_int_equal(count == 0, *texts[i] == '\0');
        assert_int_equal(tokenizer_decode(tokenizer, ids, count, &text), 0);
        assert_string_equal(text, texts[i]);
        free(ids);
        free(text);
    }
    char *text;
    int32_t bad[2] = {1, tokenizer_vocabulary(tokenizer)};
    assert_reports(tokenizer_decode(tokenizer, bad, 2, &text), "token id 272 is not in");
    assert_null(text);
    bad[0] = -1;
    assert_reports(tokenizer_decode(tokenizer, bad, 2, &text), "token id -1 is not in");
    tokenizer_close(tokenizer);
}

/* Where the tokenizer says so, parts cut at newlines give the ids of the whole. */
static void test_cuts_at_newlines(void **state) {
    (void)state;
    struct model_spec spec = like_llama;
    spec.extra = "a\nb";
    struct tokenizer *tokenizer = open_model(&spec);
    assert_false(tokenizer_cuts_at_newlines(tokenizer));
    tokenizer_close(tokenizer);
    spec.extra = NULL;
    spec.remove_spaces = true;
    tokenizer = open_model(&spec);
    assert_false(tokenizer_cuts_at_newlines(tokenizer));
    tokenizer_close(tokenizer);
    spec = like_llama;
    spec.bytes = false; /* newlines are <unk>, which merges with its neighbours */
    tokenizer = open_model(&spec);
    assert_false(tokenizer_cuts_at_newlines(tokenizer));
    tokenizer_close(tokenizer);

    for (int prefix = 0; prefix < 2; prefix++) {
        spec = like_llama;
        spec.dummy_prefix = prefix;
        spec.extra = prefix ? "\n" : NULL;
        tokenizer = open_model(&spec);
        assert_true(tokenizer_cuts_at_newlines(tokenizer));
        for (int round = 0; round < 300; round++) {
            char text[200];
            random_text(text, sizeof text);
            int32_t *whole, *part, *rest;
            size_t whole_count, part_count, rest_count;
            const char *cut = strchr(text + 1, '\n');
            if (!cut) continue;
            tokenizer_encode(tokenizer, text, strlen(text), false, &whole, &whole_count);
            tokenizer_encode(tokenizer, text, (size_t)(cut - text), false, &part, &part_count);
            tokenizer_encode(tokenizer, cut, strlen(cut), true, &rest, &rest_count);
            assert_int_equal(part_count + rest_count, whole_count);
            assert_memory_equal(part, whole, part_count * sizeof *part);
            assert_memory_equal(rest, whole + part_count, rest_count * sizeof *rest);
            free(whole);
            free(part);
            free(rest);
        }
        tokenizer_close(tokenizer);
    }
}

/* Decoding token by token gives what decoding everything gives, for any ids and any model. */
static void test_stream(void **state) {
    (void)state;
    /* with which characters begin, go on and go wrong */
    static const unsigned char hard_bytes[] = {0xE2, 0x82, 0xAC, 0xC3, 0xBC, 0xF0, 0x9F, 0x98,
                                               0x80, 0xED, 0xA0, 0xC0, 0xF8, 0xE0, '\n'};
    for (int kind = 0; kind < 8; kind++) {
        struct model_spec spec = {kind & 1, kind & 2, kind & 4, false, 0, NULL};
        struct tokenizer *tokenizer = open_model(&spec);
        struct tokenizer_stream *stream;
        assert_int_equal(tokenizer_stream_open(tokenizer, &stream), 0);
        uint32_t vocabulary = (uint32_t)tokenizer_vocabulary(tokenizer);
        for (int round = 0; round < 2000; round++) {
            int32_t ids[12];
            size_t count = 1 + random_below(12);
            for (size_t i = 0; i < count; i++) {
                ids[i] = (int32_t)(random_below(3) ? vocabulary - 1 - random_below(13)
                                                   : random_below(vocabulary));
                if (spec.bytes && random_below(3) == 0)
                    ids[i] = 3 + hard_bytes[random_below(sizeof hard_bytes)];
            }
            char streamed[500] = "", *whole;
            const char *text;
            for (size_t i = 0; i < count; i++) {
                assert_int_equal(tokenizer_stream_next(stream, ids[i], &text), 0);
                strcat(streamed, text);
            }
            strcat(streamed, tokenizer_stream_finish(stream));
            assert_int_equal(tokenizer_decode(tokenizer, ids, count, &whole), 0);
            if (strcmp(streamed, whole) != 0)
                for (size_t i = 0; i < count; i++) print_error("id %d\n", ids[i]);
            assert_string_equal(streamed, whole);
            free(whole);
        }
        const char *text;
        assert_reports(tokenizer_stream_next(stream, -1, &text), "token id -1");
        assert_string_equal(text, "");
        tokenizer_stream_close(stream);
        tokenizer_close(tokenizer);
    }
    tokenizer_stream_close(NULL);
}

static void test_stream_shows_whole_characters(void **state) {
    (void)state;
    struct tokenizer *tokenizer = open_model(&like_llama);
    struct tokenizer_stream *stream;
    const char *text;
    assert_int_equal(tokenizer_stream_open(tokenizer, &stream), 0);
    static const unsigned char euro[] = {0xE2, 0x82, 0xAC};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(tokenizer_stream_next(stream, 3 + euro[i], &text), 0);
        assert_string_equal(text, i < 2 ? "" : "\xE2\x82\xAC");
    }
    assert_int_equal(tokenizer_stream_next(stream, 3 + 0xE2, &text), 0);
    assert_string_equal(text, "");
    assert_string_equal(tokenizer_stream_finish(stream), "\xEF\xBF\xBD");
    tokenizer_stream_close(stream);
    tokenizer_close(tokenizer);
}

/* ---- build/tokenize -----------------------------------------------------------------------------
 */

static char program[1024];

/* Runs tokenize in the scratch directory with these arguments; stdout and stderr land in `caught`.
 * Returns the exit code. */
static int run_tokenize(const char *arguments) {
    char command[4096];
    snprintf(command, sizeof command, "cd '%s' && '%s' %s >output 2>&1", scratch, program,
             arguments);
    int status = system(command);
    size_t bytes;
    char *output = read_bytes(in_scratch("output"), &bytes);
    snprintf(caught, sizeof caught, "%s", output);
    free(output);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void assert_fails(const char *arguments, int code, const char *text) {
    int status = run_tokenize(arguments);
    if (status != code || !strstr(caught, text))
        print_error("tokenize %s: exit %d, \"%s\"; expected exit %d, \"%s\"\n", arguments, status,
                    caught, code, text);
    assert_int_equal(status, code);
    assert_caught(text, __FILE__, __LINE__);
}

static void test_usage(void **state) {
    (void)state;
    assert_int_equal(run_tokenize("--help"), 0);
    assert_non_null(strstr(caught, "Usage: tokenize"));
    assert_fails("", 2, "--tokenizer is missing");
    assert_fails("--tokenizer m", 2, "--input is missing");
    assert_fails("--tokenizer m --input i", 2, "--train is missing");
    assert_fails("--tokenizer m --input i --train t --vol v", 2, "unknown option --vol");
    assert_fails("--tokenizer m --input i --train t --val", 2, "argument is missing after --val");
    assert_fails("--tokenizer m --input i --train t --val t", 2, "the same file, t");
    assert_fails("--tokenizer m --input i --train t --val-fraction 0.1", 2, "needs --val");
    static const char *const fractions[] = {"0", "1", "-0.1", "nan", "x", "''", "0.5x"};
    for (size_t i = 0; i < sizeof fractions / sizeof *fractions; i++) {
        char arguments[200];
        snprintf(arguments, sizeof arguments,
                 "--tokenizer m --input i --train t --val v --val-fraction %s", fractions[i]);
        assert_fails(arguments, 2, "--val-fraction must be a number between 0 and 1");
    }
}

static void test_tokenize_errors(void **state) {
    (void)state;
    write_model("m", &like_llama);
    write_text(in_scratch("text"), "a b ab\n");
    write_text(in_scratch("empty"), "");
    assert_fails("--tokenizer absent --input text --train t.bin", 1, "cannot open 'absent'");
    assert_fails("--tokenizer text --input text --train t.bin", 1, "no SentencePiece model");
    assert_fails("--tokenizer m --input absent --train t.bin", 1, "cannot open 'absent'");
    assert_fails("--tokenizer m --input /dev/null --train t.bin", 1, "neither a file nor a folder");
    assert_fails("--tokenizer m --input empty --train t.bin", 1, "the input is empty ('empty')");
    assert_fails("--tokenizer m --input text --train absent/t.bin", 1, "'absent/t.bin.partial'");
    assert_fails("--tokenizer m --input text --train t.bin --val absent/v.bin", 1, "absent/v.bin");
    assert_fails("--tokenizer m --input text --train t.bin --val v.bin", 1,
                 "'v.bin' would have 0 tokens");
    struct model_spec spec = like_llama;
    spec.no_bos = true;
    write_model("no_bos", &spec);
    assert_fails("--tokenizer no_bos --input text --train t.bin", 1, "has no <s>");
    spec = like_llama;
    write_text(in_scratch("json"), "{\"version\": \"1.0\"}");
    assert_fails("--tokenizer json --input text --train t.bin", 1,
                 "tokenize: 'json' is a tokenizer.json, which this program does not read");
    static const char *const absent[] = {"t.bin", "t.bin.partial", "v.bin", "v.bin.partial",
                                         "tokenizer.model"};
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++)
        assert_false(exists(in_scratch(absent[i])));
}

/* The tokens of a file, read with dataloader.h; the caller frees. */
static int32_t *read_tokens(const char *name, int vocabulary, size_t *count) {
    struct dataloader *loader;
    assert_int_equal(dataloader_open(in_scratch(name), DATALOADER_VALIDATE, 1, 0, &loader), 0);
    assert_int_equal(dataloader_vocabulary(loader), vocabulary);
    assert_string_equal(dataloader_tokenizer(loader), in_scratch("tokenizer.model"));
    *count = dataloader_tokens(loader);
    int32_t *tokens = (int32_t *)malloc(*count * sizeof *tokens);
    for (size_t i = 0; i + 1 < *count; i++)
        dataloader_window(loader, i, tokens + i, tokens + i + 1);
    dataloader_close(loader);
    return tokens;
}

/* The file holds these documents, each encoded in one piece with <s> before it. */
static void assert_documents(const char *name, const char *const *documents, int document_count) {
    struct tokenizer *tokenizer;
    assert_int_equal(tokenizer_open(in_scratch("m"), &tokenizer), 0);
    size_t count, at = 0;
    int32_t *tokens = read_tokens(name, 272, &count);
    for (int i = 0; i < document_count; i++) {
        int32_t *ids;
        size_t length;
        tokenizer_encode(tokenizer, documents[i], strlen(documents[i]), false, &ids, &length);
        assert_true(at + 1 + length <= count);
        assert_int_equal(tokens[at], tokenizer_bos(tokenizer));
        assert_memory_equal(tokens + at + 1, ids, length * sizeof *ids);
        at += 1 + length;
        free(ids);
    }
    assert_int_equal(at, count);
    free(tokens);
    tokenizer_close(tokenizer);
}

static void test_tokenize_documents(void **state) {
    (void)state;
    write_model("m", &like_llama);
    write_text(in_scratch("one"), "a b\n");
    write_text(in_scratch("empty"), "");
    write_text(in_scratch("two"), "--\nab.\n--\r\n\n\xC3\xBC b\n---\n--\n--\nb");
    assert_int_equal(run_tokenize("--tokenizer m --input one --train t.bin"), 0);
    assert_documents("t.bin", (const char *[]){"a b\n"}, 1);
    assert_int_equal(run_tokenize("--tokenizer m --separator -- --train t.bin one empty two"), 0);
    assert_documents("t.bin", (const char *[]){"a b\n", "ab.\n", "\n\xC3\xBC b\n---\n", "b"}, 4);
    assert_non_null(strstr(caught, "t.bin: "));
    assert_false(exists(in_scratch("t.bin.partial")));
    assert_false(exists(in_scratch("tokenizer.model.partial")));
    /* the tokenizer may lie where its copy would */
    assert_int_equal(run_tokenize("--tokenizer tokenizer.model --input one --train ./t.bin"), 0);
    assert_documents("t.bin", (const char *[]){"a b\n"}, 1);
}

/* A vocabulary of up to 65535 makes files of 16-bit tokens, a larger one files of 32 bits; in shards,
 * too. */
static void test_tokenize_large_vocabularies(void **state) {
    (void)state;
    struct model_spec spec = like_llama;
    write_text(in_scratch("one"), "a b ab\n");
    for (int vocabulary = 65535; vocabulary <= 65536; vocabulary++) {
        size_t count, bytes;
        int32_t magic;
        spec.more = vocabulary - 272;
        write_model("large", &spec);
        assert_int_equal(run_tokenize("--tokenizer large --input one --train t.bin"), 0);
        int32_t *tokens = read_tokens("t.bin", vocabulary, &count);
        char *data = read_bytes(in_scratch("t.bin"), &bytes);
        memcpy(&magic, data, sizeof magic);
        assert_int_equal(magic, vocabulary == 65535 ? TOKENS_MAGIC : TOKENS_MAGIC_32);
        assert_int_equal(bytes, 1024 + (vocabulary == 65535 ? 2 : 4) * count);
        assert_int_equal(
            run_tokenize("--tokenizer large --input one --train s.bin --shard-tokens 3"), 0);
        struct dataloader *loader;
        assert_int_equal(dataloader_open(in_scratch("s_*.bin"), DATALOADER_VALIDATE, 1, 0, &loader),
                         0);
        assert_int_equal(dataloader_tokens(loader), count);
        for (int i = 0; i < 2; i++) {
            int32_t token, target;
            dataloader_window(loader, (uint64_t)(2 * i), &token, &target);
            assert_int_equal(token, tokens[3 * i]);
            assert_int_equal(target, tokens[3 * i + 1]);
        }
        dataloader_close(loader);
        free(data);
        free(tokens);
        for (int i = 0; i < 3; i++) {
            char name[32];
            snprintf(name, sizeof name, "s_%06d.bin", i);
            unlink(in_scratch(name));
        }
    }
}

static void test_tokenize_split(void **state) {
    (void)state;
    write_model("m", &like_llama);
    write_text(in_scratch("one"), "a b\nb b\nab\n.\n"); /* 13 bytes */
    const char *split = "--tokenizer m --input one --train t.bin --val v.bin --val-fraction ";
    char arguments[200];
    static const struct {
        const char *fraction, *train, *val;
    } cases[] = {
        {"0.5", "a b\nb b\n", "ab\n.\n"},  /* byte 6: the line that it falls in stays whole */
        {"0.69", "a b\n", "b b\nab\n.\n"}, /* byte 4: exactly at the start of a line */
        {"0.7", "a b\n", "b b\nab\n.\n"},
        {"0.2", "a b\nb b\nab\n", ".\n"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(arguments, sizeof arguments, "%s %s", split, cases[i].fraction);
        assert_int_equal(run_tokenize(arguments), 0);
        assert_documents("t.bin", &cases[i].train, 1);
        assert_documents("v.bin", &cases[i].val, 1);
    }
    snprintf(arguments, sizeof arguments, "%s 0.99", split); /* byte 0 */
    assert_fails(arguments, 1, "'t.bin' would have 0 tokens");
    /* whole documents after the split stay documents */
    write_text(in_scratch("two"), "b\n--\na\n--\nab");
    assert_int_equal(run_tokenize("--tokenizer m --separator=-- --input one --input two "
                                  "--train t.bin --val v.bin --val-fraction 0.3"),
                     0);
    assert_documents("t.bin", (const char *[]){"a b\nb b\nab\n.\n", "b\n"}, 2);
    assert_documents("v.bin", (const char *[]){"a\n", "ab"}, 2);
}

/* More text than a piece and a batch of pieces hold, with odd bytes, by any number of threads. */
static void test_tokenize_in_pieces(void **state) {
    (void)state;
    write_model("m", &like_llama);
    enum { BYTES = 5 << 19 };
    char *text = (char *)malloc(BYTES + 1), part[1000];
    size_t bytes = 0;
    while (bytes + 20 * sizeof part < 400000) { /* less than 1% odd bytes; more are refused */
        random_text(part, sizeof part);
        bytes += (size_t)sprintf(text + bytes, "%s", part);
        for (size_t i = 0; i < 19 * sizeof part; i++) text[bytes++] = "ab \nb"[i % 5];
    }
    text[bytes] = '\0';
    write_bytes(in_scratch("long"), text, bytes);
    setenv("OMP_NUM_THREADS", "3", 1);
    assert_int_equal(run_tokenize("--tokenizer m --input long --train t.bin"), 0);
    unsetenv("OMP_NUM_THREADS");
    assert_documents("t.bin", (const char *[]){text}, 1);

    memset(text, '\n', BYTES); /* 320 pieces, in two batches, one token a byte */
    text[BYTES] = '\0';
    write_bytes(in_scratch("long"), text, BYTES);
    assert_int_equal(run_tokenize("--tokenizer m --input long --train t.bin"), 0);
    size_t count;
    int32_t *tokens = read_tokens("t.bin", 272, &count);
    assert_int_equal(count, BYTES + 2); /* <s>, a space, newlines */
    for (size_t i = 2; i < count; i++)
        if (tokens[i] != 3 + '\n') fail_msg("token %zu is %d", i, tokens[i]);
    free(tokens);
    free(text);
}

int main(int argc, char **argv) {
    (void)argc;
    const char *given = getenv("TOKENIZE");
    const char *slash = strrchr(argv[0], '/');
    char relative[900];
    if (given)
        snprintf(relative, sizeof relative, "%s", given);
    else
        snprintf(relative, sizeof relative, "%.*s/../../tokenize",
                 slash ? (int)(slash - argv[0]) : 1, slash ? argv[0] : ".");
    char *real = realpath(relative, NULL);
    if (!real) {
        print_error("test_tokenizer: '%s' is missing; build it with make\n", relative);
        return 1;
    }
    snprintf(program, sizeof program, "%s", real);
    free(real);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_cuts_at_newlines),
        cmocka_unit_test(test_stream),
        cmocka_unit_test(test_stream_shows_whole_characters),
        cmocka_unit_test(test_usage),
        cmocka_unit_test(test_tokenize_errors),
        cmocka_unit_test(test_tokenize_documents),
        cmocka_unit_test(test_tokenize_large_vocabularies),
        cmocka_unit_test(test_tokenize_split),
        cmocka_unit_test(test_tokenize_in_pieces),
    };
    return cmocka_run_group_tests_name("tokenizer", tests, make_scratch, remove_scratch);
}
