/* test_generate.c — tests generating text: the tokens that the model gets, the text that is shown,
 * and attention that continues after earlier tokens. The model is a function of this test;
 * test_model.c has the real one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>

#include "llmc/backend/backend.h"
#include "llmc/cli/generate.h"
#include "test/support/llmc_test.h"

/* ---- a tokenizer of bytes: <unk> <s> </s> <0x00> ... <0xFF> ---------------------------------- */

static void put_piece(FILE *file, const char *piece, int type) {
    fprintf(file, "\x0A%c\x0A%c%s\x15%c%c%c%c\x18%c", (int)strlen(piece) + 9, (int)strlen(piece),
            piece, 0, 0, 0, 0, type);
}

static const char *write_tokenizer(void) {
    const char *path = in_scratch("tokenizer.model");
    FILE *file = fopen(path, "wb");
    put_piece(file, "<unk>", 2);
    put_piece(file, "<s>", 3);
    put_piece(file, "</s>", 3);
    for (int i = 0; i < 256; i++) {
        char piece[8];
        snprintf(piece, sizeof piece, "<0x%02X>", (unsigned)i);
        put_piece(file, piece, 6);
    }
    /* BPE with byte fallback; nothing put before a text, nothing removed */
    fwrite("\x12\x05\x18\x02\x98\x02\x01\x1A\x04\x18\x00\x20\x00", 1, 13, file);
    fclose(file);
    return path;
}

enum { FIRST_BYTE = 3, VOCABULARY = 300 };

static struct tokenizer *open_tokenizer(void) {
    struct tokenizer *tokenizer;
    assert_int_equal(tokenizer_open(write_tokenizer(), &tokenizer), 0);
    assert_int_equal(tokenizer_vocabulary(tokenizer), FIRST_BYTE + 256);
    return tokenizer;
}

/* ---- a model that writes what it is told to, and checks what it is fed ----------------------- */

struct script {
    const char *answer; /* its bytes are the tokens that it wants; </s> at the end */
    int positions;
    int32_t seen[1000]; /* by position: what it was fed last */
    int fed, calls;     /* positions that are known; calls of feed */
    int begins[1000];   /* `first` of each call */
    size_t at;
    bool forgets;
};

static int feed(void *context, const int32_t *tokens, int first, int count, float *logits) {
    struct script *s = (struct script *)context;
    assert_true(count >= 1 && first + count <= s->positions);
    assert_true(first == 0 || first == s->fed);
    memcpy(s->seen + first, tokens, (size_t)count * sizeof *tokens);
    s->fed = first + count;
    s->begins[s->calls++] = first;
    for (int i = 0; i < VOCABULARY; i++) logits[i] = 0;
    unsigned char next = (unsigned char)s->answer[s->at++];
    logits[next ? FIRST_BYTE + next : 2] = 50;
    return 0;
}

static int generate(struct script *s, const char *prompt, int tokens, struct generate_line *line) {
    struct tokenizer *tokenizer = open_tokenizer();
    const struct generate_model model = {VOCABULARY, s->positions, !s->forgets, feed, s};
    const struct generate_settings settings = {prompt, tokens, 0, 1, 1};
    line->used = 0;
    line->text[0] = '\0';
    int status = generate_text(&model, tokenizer, &settings, generate_gather, line);
    tokenizer_close(tokenizer);
    return status;
}

static void test_feeds_each_token_once(void **state) {
    (void)state;
    struct generate_line line;
    struct script s = {"defg", 64, {0}, 0, 0, {0}, 0, false};
    assert_int_equal(generate(&s, "abc", 100, &line), 0);
    assert_string_equal(line.text, "abcdefg"); /* ended by </s> */
    assert_int_equal(s.calls, 5);
    for (int i = 1; i < 5; i++) assert_int_equal(s.begins[i], 3 + i);
    const int32_t expected[] = {1, 'a' + 3, 'b' + 3, 'c' + 3, 'd' + 3, 'e' + 3, 'f' + 3, 'g' + 3};
    assert_memory_equal(s.seen, expected, sizeof expected);
}

static void test_stops_after_so_many_tokens(void **state) {
    (void)state;
    struct generate_line line;
    struct script s = {"defg", 64, {0}, 0, 0, {0}, 0, false};
    assert_int_equal(generate(&s, "", 2, &line), 0);
    assert_string_equal(line.text, "de");
    assert_int_equal(s.calls, 2);
}

/* With 8 positions: when a ninth token comes, the last 4 are fed anew. */
static void test_goes_on_from_the_later_half(void **state) {
    (void)state;
    struct generate_line line;
    struct script s = {"abcdefghijklmnop", 8, {0}, 0, 0, {0}, 0, false};
    assert_int_equal(generate(&s, "", 16, &line), 0);
    assert_string_equal(line.text, "abcdefghijklmnop");
    const int expected[] = {0, 1, 2, 3, 4, 5, 6, 7, 0, 4, 5, 6, 7, 0, 4, 5};
    assert_memory_equal(s.begins, expected, sizeof expected);
    assert_int_equal(s.seen[5], 'o' + 3);
    assert_int_equal(s.seen[0], 'j' + 3);

    for (int positions = 1; positions < 20; positions++) { /* prompts longer than the model too */
        struct script t = {"0123456789", positions, {0}, 0, 0, {0}, 0, false};
        assert_int_equal(generate(&t, "a-prompt", 10, &line), 0);
        assert_string_equal(line.text, "a-prompt0123456789");
        assert_int_equal(t.seen[t.fed - 1], '8' + 3);
    }
}

/* A model that remembers nothing is fed everything, and writes the same. */
static void test_models_that_forget(void **state) {
    (void)state;
    struct generate_line line;
    struct script s = {"abcdefghijklmnop", 8, {0}, 0, 0, {0}, 0, true};
    assert_int_equal(generate(&s, "", 16, &line), 0);
    assert_string_equal(line.text, "abcdefghijklmnop");
    for (int i = 0; i < 16; i++) assert_int_equal(s.begins[i], 0);
    assert_int_equal(s.fed, 6); /* the ninth token left 4, the thirteenth again */
}

static int feed_fails(void *context, const int32_t *tokens, int first, int count, float *logits) {
    (void)tokens, (void)first, (void)count, (void)logits;
    ++*(int *)context;
    return -1;
}

static void test_a_model_that_fails(void **state) {
    (void)state;
    int calls = 0;
    struct tokenizer *tokenizer = open_tokenizer();
    struct generate_line line = {0, ""};
    const struct generate_model model = {VOCABULARY, 8, true, feed_fails, &calls};
    const struct generate_settings settings = {"x", 10, 0, 1, 1};
    assert_int_equal(generate_text(&model, tokenizer, &settings, generate_gather, &line), -1);
    assert_int_equal(calls, 1);
    tokenizer_close(tokenizer);
}

static void test_tokens_that_the_tokenizer_lacks_end_the_text(void **state) {
    (void)state;
    struct generate_line line;
    struct script s = {"ab\xFF", 8, {0}, 0, 0, {0}, 0, false};
    struct tokenizer *tokenizer = open_tokenizer();
    const struct generate_model model = {VOCABULARY, 8, true, feed, &s};
    /* every draw is uniform: sooner or later one of the ids 259 ... 299 comes */
    const struct generate_settings settings = {"", 400, 1e6, 1, 1};
    char answer[500];
    memset(answer, 'x', sizeof answer);
    answer[499] = '\0';
    s.answer = answer;
    line.used = 0;
    assert_int_equal(generate_text(&model, tokenizer, &settings, generate_gather, &line), 0);
    assert_true(s.calls < 400);
    tokenizer_close(tokenizer);
}

static void test_seeds_decide(void **state) {
    (void)state;
    struct tokenizer *tokenizer = open_tokenizer();
    struct generate_line line[3];
    char answer[100];
    memset(answer, 'x', sizeof answer);
    for (int i = 0; i < 3; i++) {
        struct script s = {answer, 64, {0}, 0, 0, {0}, 0, false};
        const struct generate_model model = {VOCABULARY, 64, true, feed, &s};
        const struct generate_settings settings = {"", 20, 30, 1, i == 2 ? 8 : 7};
        line[i].used = 0;
        assert_int_equal(generate_text(&model, tokenizer, &settings, generate_gather, &line[i]), 0);
    }
    assert_string_equal(line[0].text, line[1].text);
    assert_string_not_equal(line[0].text, line[2].text);
    tokenizer_close(tokenizer);
}

static void test_gathers_a_line(void **state) {
    (void)state;
    struct generate_line line = {0, ""};
    generate_gather(&line, "a\nb\033[31m");
    assert_string_equal(line.text, "a b [31m");
    char long_text[600];
    memset(long_text, 'x', sizeof long_text);
    memcpy(long_text + 501, "\xE2\x82\xAC\xE2\x82\xAC", 7);
    line.used = 0;
    generate_gather(&line, "12345678");
    generate_gather(&line, long_text);
    assert_int_equal(line.used, 8 + 501); /* the euro sign has 3 bytes, 2 are left */
    generate_gather(&line, "y");
    assert_int_equal(strlen(line.text), 510);
}

static void test_tokenizers(void **state) {
    (void)state;
    struct tokenizer *tokenizer;
    write_tokenizer();
    assert_int_equal(generate_open_tokenizer(NULL, scratch, 259, &tokenizer), 0);
    tokenizer_close(tokenizer);
    assert_reports(generate_open_tokenizer(NULL, scratch, 258, &tokenizer),
                   "the tokenizer has 259 tokens, the model 258");
    assert_null(tokenizer);
    assert_reports(generate_open_tokenizer(in_scratch("absent"), scratch, 259, &tokenizer),
                   "absent");
    assert_reports(generate_check_tokenizer(NULL), "--sample-every: expected tokenizer.model");
    assert_reports(generate_check_tokenizer(in_scratch("absent")), "absent");
    assert_int_equal(generate_check_tokenizer(in_scratch("tokenizer.model")), 0);
    assert_int_equal(rename(in_scratch("tokenizer.model"), in_scratch("away")), 0);
    write_text(in_scratch("tokenizer.json"), "{}");
    assert_reports(
        generate_open_tokenizer(NULL, scratch, 259, &tokenizer),
        "tokenizer.json' is a tokenizer.json, which this program does not read: expected "
        "SentencePiece's tokenizer.model; data/tokenize_json.py makes token files");
    assert_reports(generate_check_tokenizer(in_scratch("tokenizer.json")),
                   "expected SentencePiece");
    unlink(in_scratch("tokenizer.json"));
}

/* ---- attention behind earlier tokens --------------------------------------------------------- */

static void test_attention_goes_on(void **state) {
    (void)state;
    enum { T = 150, H = 6, K = 2, D = 10, WIDTH = (H + 2 * K) * D };
    const struct backend *be = backend_cpu(DTYPE_FLOAT32);
    float *qkv = (float *)be->allocate(T * WIDTH * sizeof(float));
    float *whole = (float *)be->allocate(T * H * D * sizeof(float));
    float *part = (float *)be->allocate(T * H * D * sizeof(float));
    float *log_sum_exp = (float *)be->allocate(T * H * sizeof(float));
    for (int i = 0; i < T * WIDTH; i++) qkv[i] = (float)random_below(2001) / 500 - 2;
    be->attention_forward(whole, log_sum_exp, qkv, 1, T, H, K, D);
    static const int ends[] = {1, 2, 3, 64, 65, 130, 131, T}; /* from each to the next */
    for (size_t e = 0; e + 1 < sizeof ends / sizeof *ends; e++) {
        int first = ends[e], rows = ends[e + 1] - first;
        be->attention_continue(part, qkv, first, rows, H, K, D);
        for (int i = 0; i < rows * H * D; i++) {
            float expected = whole[first * H * D + i];
            if (!(fabsf(part[i] - expected) < 1e-5f))
                fail_msg("row %d: %g, expected %g", first + i / (H * D), (double)part[i],
                         (double)expected);
        }
    }
    be->release(qkv);
    be->release(whole);
    be->release(part);
    be->release(log_sum_exp);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_feeds_each_token_once),
        cmocka_unit_test(test_stops_after_so_many_tokens),
        cmocka_unit_test(test_goes_on_from_the_later_half),
        cmocka_unit_test(test_models_that_forget),
        cmocka_unit_test(test_a_model_that_fails),
        cmocka_unit_test(test_tokens_that_the_tokenizer_lacks_end_the_text),
        cmocka_unit_test(test_seeds_decide),
        cmocka_unit_test(test_gathers_a_line),
        cmocka_unit_test(test_tokenizers),
        cmocka_unit_test(test_attention_goes_on),
    };
    return cmocka_run_group_tests_name("generate", tests, make_scratch, remove_scratch);
}
