/* tokenizer.h — SentencePiece models (Llama's tokenizer.model) for C.
 *
 * A thin wrapper over libsentencepiece, which is C++. No exception leaves it.
 */
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct tokenizer;

/* Loads a SentencePiece model file. *tokenizer belongs to the caller. Returns 0, or -1 after
 * reporting; *tokenizer is then NULL. An open tokenizer may be used by any number of threads. */
int tokenizer_open(const char *path, struct tokenizer **tokenizer);

void tokenizer_close(struct tokenizer *tokenizer); /* NULL is fine */

int tokenizer_vocabulary(const struct tokenizer *tokenizer); /* number of token ids */
int tokenizer_bos(const struct tokenizer *tokenizer);        /* id of <s>, -1 when there is none */
int tokenizer_eos(const struct tokenizer *tokenizer);        /* id of </s>, likewise */

/* True when a text may be cut before any newline, each part be encoded on its own with
 * tokenizer_encode_continued, and the ids be put together again with the same result as in one
 * piece: no token spans a newline and normalisation leaves it alone. True for Llama's model. */
bool tokenizer_cuts_at_newlines(const struct tokenizer *tokenizer);

/* Encodes length bytes of UTF-8, without <s> and </s>. *ids is allocated with malloc and belongs
 * to the caller (NULL when *count is 0). Bytes that are no UTF-8 become U+FFFD, as SentencePiece
 * has it. Returns 0, or -1 after reporting; *ids is then NULL. */
int tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t length,
                     int32_t **ids, size_t *count);

/* The same for text that begins with a newline and continues an earlier part: the space that
 * SentencePiece puts before a text is left out. Needs tokenizer_cuts_at_newlines. */
int tokenizer_encode_continued(const struct tokenizer *tokenizer, const char *text, size_t length,
                               int32_t **ids, size_t *count);

/* Encodes a text that ends with a zero byte, with <s> before it where there is one, for a model to go
 * on from: *ids has room for `room` more after the *count that were encoded. Returns 0, or -1 after
 * reporting (a prompt of no tokens at all is an error too). */
int tokenizer_encode_prompt(const struct tokenizer *tokenizer, const char *text, size_t room,
                            int32_t **ids, size_t *count);

/* Decodes count ids to UTF-8, ended by a zero byte; zero bytes in the text (the token <0x00>) are
 * left out. *text is allocated with malloc and belongs to the caller. Returns 0, or -1 after
 * reporting (an id out of range); *text is then NULL. */
int tokenizer_decode(const struct tokenizer *tokenizer, const int32_t *ids, size_t count,
                     char **text);

/* ---- decoding while tokens arrive, one at a time ----
 * The parts put together are what tokenizer_decode returns for all ids. Bytes of a character that
 * is not complete yet are held back. A stream is for one thread; close it before its tokenizer. */
struct tokenizer_stream;

int tokenizer_stream_open(const struct tokenizer *tokenizer, struct tokenizer_stream **stream);

/* Adds a token; *text, ended by a zero byte, is what can be shown now ("" is common). It is the
 * stream's, valid until the next call. Returns 0, or -1 after reporting (an id out of range). */
int tokenizer_stream_next(struct tokenizer_stream *stream, int32_t id, const char **text);

/* What was held back; the stream starts anew. */
const char *tokenizer_stream_finish(struct tokenizer_stream *stream);

void tokenizer_stream_close(struct tokenizer_stream *stream); /* NULL is fine */

#ifdef __cplusplus
}
#endif
#endif
