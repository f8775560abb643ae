/* bare.c — for `make BARE=1`: what stands in for SentencePiece (there is no tokenizer) and
 * cmocka. */
#include "llmc/log/error.h"
#include "llmc/data/tokenizer.h"

#include <setjmp.h>

extern jmp_buf bare_cmocka_jump;
jmp_buf bare_cmocka_jump;

static int none(void) {
    return log_error("this program was built without SentencePiece (BARE=1): it has no tokenizer");
}

int tokenizer_open(const char *path, struct tokenizer **tokenizer) {
    (void)path;
    *tokenizer = NULL;
    return none();
}
void tokenizer_close(struct tokenizer *tokenizer) {
    (void)tokenizer;
}
int tokenizer_vocabulary(const struct tokenizer *tokenizer) {
    return (void)tokenizer, 0;
}
int tokenizer_bos(const struct tokenizer *tokenizer) {
    return (void)tokenizer, -1;
}
int tokenizer_eos(const struct tokenizer *tokenizer) {
    return (void)tokenizer, -1;
}
int tokenizer_encode_prompt(const struct tokenizer *tokenizer, const char *text, size_t room,
                            int32_t **ids, size_t *count) {
    (void)tokenizer, (void)text, (void)room;
    *ids = NULL;
    *count = 0;
    return none();
}
int tokenizer_stream_open(const struct tokenizer *tokenizer, struct tokenizer_stream **stream) {
    (void)tokenizer;
    *stream = NULL;
    return none();
}
int tokenizer_stream_next(struct tokenizer_stream *stream, int32_t id, const char **text) {
    (void)stream, (void)id;
    *text = "";
    return none();
}
const char *tokenizer_stream_finish(struct tokenizer_stream *stream) {
    return (void)stream, "";
}
void tokenizer_stream_close(struct tokenizer_stream *stream) {
    (void)stream;
}
