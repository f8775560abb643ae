/* tokenizer.h — SentencePiece models (Llama's tokenizer.model) for C.
 *
 * A thin wrapper over libsentencepiece, which is C++. No exception leaves it.
 */
#ifndef LLMC_DATA_TOKENIZER_H
#define LLMC_DATA_TOKENIZER_H

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
int tokenizer_unknown(const struct tokenizer *tokenizer);    /* id of <unk> */
int tokenizer_bos(const struct tokenizer *tokenizer);        /* id of <s>, -1 when there is none */
int tokenizer_eos(const struct tokenizer *tokenizer);        /* id of </s>, likewise */

/* Whether a text can be cut before any newline and each part encoded separately, with the same ids as
 * in one piece. This holds if no token spans a newline and normalisation does not change newlines. It
 * holds for Llama's model. */
bool tokenizer_cuts_at_newlines(const struct tokenizer *tokenizer);

/* Encodes `length` bytes of UTF-8, without <s> and </s>. *ids is allocated with malloc and
 * belongs to the caller; it is NULL if *count is 0. Bytes that are not UTF-8 become U+FFFD, as
 * in SentencePiece. continued: the text begins with a newline and continues an earlier part, so the
 * space that SentencePiece puts before a text is left out; needs tokenizer_cuts_at_newlines. Returns 0,
 * or -1 after reporting; *ids is then NULL. */
int tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t length,
                     bool continued, int32_t **ids, size_t *count);

/* Encodes a prompt, which ends with a zero byte. <s> comes first if the tokenizer has one. *ids
 * has room for `room` further ids after the *count encoded ones. Returns 0, or -1 after
 * reporting; a prompt without any token is an error, too. */
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

/* Adds a token. *text is the text that can be shown now, ended by a zero byte; it is often "".
 * It belongs to the stream and is valid until the next call. Returns 0, or -1 after reporting an
 * id that is out of range. */
int tokenizer_stream_next(struct tokenizer_stream *stream, int32_t id, const char **text);

/* Returns the text that was held back, and resets the stream. */
const char *tokenizer_stream_finish(struct tokenizer_stream *stream);

void tokenizer_stream_close(struct tokenizer_stream *stream); /* NULL is fine */

#ifdef __cplusplus
}
#endif
#endif
