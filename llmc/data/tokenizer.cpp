// tokenizer.cpp — SentencePiece behind C functions. Exceptions (only std::bad_alloc is likely) end
// here: every function that can fail runs inside `guarded`.
#include "llmc/data/tokenizer.h"

#include <sentencepiece_processor.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/util/file.h"
#include "llmc/log/error.h"

using ids_t = std::vector<int>;

struct tokenizer {
    sentencepiece::SentencePieceProcessor processor;
    bool cuts_at_newlines = false;
};

struct tokenizer_stream {
    const tokenizer *owner = nullptr;
    bool started = false; // some text was returned
    ids_t silent;         // tokens before the first text: spaces that the decoder drops
    std::string bytes;    // from byte tokens, not yet a complete character
    std::string out;
};

namespace {

const char space_symbol[] = "\xE2\x96\x81"; // U+2581, which stands for a space in pieces
const char replacement[] = "\xEF\xBF\xBD";  // U+FFFD, for bytes that are not UTF-8

template <typename Function> int guarded(const char *what, Function function) {
    try {
        return function();
    } catch (const std::exception &error) {
        return log_error("cannot %s: %s", what, error.what());
    } catch (...) {
        return log_error("cannot %s: unknown exception", what);
    }
}

// ---- encoding ------------------------------------------------------------------------------

ids_t encode(const tokenizer &t, const std::string_view &text) {
    ids_t ids;
    auto status = t.processor.Encode(text, &ids);
    if (!status.ok()) throw std::runtime_error(status.ToString());
    return ids;
}

// Encodes a text that begins with a newline, without the space that is put before a text.
ids_t encode_continued(const tokenizer &t, const std::string_view &text) {
    ids_t ids = encode(t, text);
    if (!ids.empty() && t.processor.IdToPiece(ids[0]) == space_symbol) ids.erase(ids.begin());
    return ids;
}

// Checks two conditions. No piece contains a newline together with other characters. And cutting
// does not change ids of texts that normalisation may change: several spaces or newlines, spaces
// next to newlines.
bool find_cuts_at_newlines(const tokenizer &t) {
    for (int id = 0; id < t.processor.GetPieceSize(); id++) {
        const std::string &piece = t.processor.IdToPiece(id);
        if (piece.size() > 1 && piece.find('\n') != std::string::npos) return false;
    }
    ids_t newline = encode_continued(t, "\n");
    if (newline.size() != 1 || t.processor.IsUnknown(newline[0])) return false;
    for (std::string text : {"a\nb", " a  \n\n  b \n", "\n\n\na", "a.\n\tb\r\n c\n"}) {
        size_t end = text.find('\n', 1);
        ids_t joined = encode(t, text.substr(0, end));
        while (end != std::string::npos) {
            size_t next = text.find('\n', end + 1);
            ids_t part = encode_continued(t, text.substr(end, next - end));
            joined.insert(joined.end(), part.begin(), part.end());
            end = next;
        }
        if (joined != encode(t, text)) return false;
    }
    return true;
}

int hand_out(const ids_t &from, int32_t **ids, size_t *count) {
    if (!from.empty()) {
        *ids = static_cast<int32_t *>(malloc(from.size() * sizeof(int32_t)));
        if (!*ids) throw std::bad_alloc();
        std::memcpy(*ids, from.data(), from.size() * sizeof(int32_t));
    }
    *count = from.size();
    return 0;
}

// ---- decoding ------------------------------------------------------------------------------

int check_id(const tokenizer &t, int32_t id) {
    if (id >= 0 && id < t.processor.GetPieceSize()) return 0;
    return log_error("token id %d is not in the tokenizer, expected 0 to %d", id,
                     t.processor.GetPieceSize() - 1);
}

// SentencePiece 0.2.2 would rather be given an absl::Span, which older versions do not know.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
std::string decode(const tokenizer &t, const ids_t &ids) {
    std::string text;
    auto status = t.processor.Decode(ids, &text);
#pragma GCC diagnostic pop
    if (!status.ok()) throw std::runtime_error(status.ToString());
    return text;
}

// C strings cannot hold the zero byte, which the token <0x00> stands for.
void drop_zero_bytes(std::string &text) {
    text.erase(std::remove(text.begin(), text.end(), '\0'), text.end());
}

// Number of bytes of the UTF-8 character that begins with this byte; 1 if no character does.
size_t character_bytes(unsigned char first) {
    if (first >= 0xF0 && first < 0xF8) return 4;
    if (first >= 0xE0 && first < 0xF0) return 3;
    if (first >= 0xC0 && first < 0xE0) return 2;
    return 1;
}

// Whether the bytes are one complete UTF-8 character, in the shortest form, and no surrogate.
bool is_character(const std::string &bytes) {
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    unsigned char first = static_cast<unsigned char>(bytes[0]);
    size_t size = bytes.size();
    if (size == 1) return first < 0x80;
    uint32_t code = first & (0x7Fu >> size);
    for (size_t i = 1; i < size; i++) {
        unsigned char next = static_cast<unsigned char>(bytes[i]);
        if ((next & 0xC0) != 0x80) return false;
        code = code << 6 | (next & 0x3F);
    }
    return code >= least[size] && code < 0x110000 && (code < 0xD800 || code > 0xDFFF);
}

// Moves complete characters from bytes to out; with `all`, also bytes that are not complete.
void move_characters(tokenizer_stream &s, bool all) {
    while (!s.bytes.empty()) {
        size_t size = character_bytes(static_cast<unsigned char>(s.bytes[0]));
        if (size > s.bytes.size() && !all) return;
        if (size <= s.bytes.size() && is_character(s.bytes.substr(0, size))) {
            s.out += s.bytes.substr(0, size);
        } else {
            s.out += replacement;
            size = 1;
        }
        s.bytes.erase(0, size);
    }
}

// The text of a token that is not a byte token and not at the start.
std::string token_text(const tokenizer &t, int32_t id) {
    if (t.processor.IsControl(id)) return "";
    if (t.processor.IsUnknown(id)) return decode(t, {id});
    std::string text = t.processor.IdToPiece(id);
    for (size_t at = 0; (at = text.find(space_symbol, at)) != std::string::npos; at++)
        text.replace(at, std::strlen(space_symbol), " ");
    return text;
}

void add_token(tokenizer_stream &s, int32_t id) {
    const tokenizer &t = *s.owner;
    if (t.processor.IsByte(id)) {
        s.bytes += static_cast<char>(strtol(t.processor.IdToPiece(id).c_str() + 3, nullptr, 16));
        move_characters(s, false); // "<0x0A>"
        return;
    }
    move_characters(s, true);
    if (s.started || !s.out.empty()) {
        s.out += token_text(t, id);
    } else { // the library decides which spaces at the start to drop
        s.silent.push_back(id);
        s.out = decode(t, s.silent);
    }
}

} // namespace

// ---- the C functions -----------------------------------------------------------------------

int tokenizer_open(const char *path, struct tokenizer **out) {
    *out = nullptr;
    struct file_map map;
    if (file_map(path, &map) != 0) return -1;
    int status = guarded("open a tokenizer", [&]() {
        if (map.bytes && *static_cast<const char *>(map.data) == '{')
            return log_error("'%s' is a tokenizer.json, which this program does not read: expected "
                             "SentencePiece's tokenizer.model; data/tokenize_json.py makes token "
                             "files, and transformers writes text",
                             path);
        auto t = std::make_unique<tokenizer>();
        auto loaded = t->processor.LoadFromSerializedProto(
            std::string_view(static_cast<const char *>(map.data), map.bytes));
        if (!loaded.ok() || t->processor.GetPieceSize() == 0)
            return log_error("'%s' is no SentencePiece model: expected a tokenizer.model, as "
                             "data/train_tokenizer.sh writes",
                             path);
        t->cuts_at_newlines = find_cuts_at_newlines(*t);
        *out = t.release();
        return 0;
    });
    if (file_unmap(&map) == 0 || status) return status;
    tokenizer_close(*out);
    *out = nullptr;
    return -1;
}

void tokenizer_close(struct tokenizer *t) {
    delete t;
}

int tokenizer_vocabulary(const struct tokenizer *t) {
    return t->processor.GetPieceSize();
}

int tokenizer_unknown(const struct tokenizer *t) {
    return t->processor.unk_id();
}

int tokenizer_bos(const struct tokenizer *t) {
    return t->processor.bos_id();
}

int tokenizer_eos(const struct tokenizer *t) {
    return t->processor.eos_id();
}

bool tokenizer_cuts_at_newlines(const struct tokenizer *t) {
    return t->cuts_at_newlines;
}

int tokenizer_encode(const struct tokenizer *t, const char *text, size_t length, bool continued,
                     int32_t **ids, size_t *count) {
    *ids = nullptr;
    return guarded("encode a text", [&]() {
        const std::string_view view(text, length);
        return hand_out(continued ? encode_continued(*t, view) : encode(*t, view), ids, count);
    });
}

int tokenizer_encode_prompt(const struct tokenizer *t, const char *text, size_t room, int32_t **ids,
                            size_t *count) {
    *ids = nullptr;
    return guarded("encode a prompt", [&]() {
        ids_t all = encode(*t, {text, std::strlen(text)});
        if (tokenizer_bos(t) >= 0) all.insert(all.begin(), tokenizer_bos(t));
        size_t prompt = all.size();
        if (prompt == 0)
            return log_error("this tokenizer has no <s>: expected a prompt, got nothing");
        all.resize(prompt + room);
        if (hand_out(all, ids, count) != 0) return -1;
        *count = prompt;
        return 0;
    });
}

int tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t count, char **text) {
    *text = nullptr;
    for (size_t i = 0; i < count; i++)
        if (check_id(*t, ids[i]) != 0) return -1;
    return guarded("decode tokens", [&]() {
        std::string decoded = decode(*t, ids_t(ids, ids + count));
        drop_zero_bytes(decoded);
        *text = static_cast<char *>(malloc(decoded.size() + 1));
        if (!*text) throw std::bad_alloc();
        std::memcpy(*text, decoded.c_str(), decoded.size() + 1);
        return 0;
    });
}

int tokenizer_stream_open(const struct tokenizer *t, struct tokenizer_stream **out) {
    *out = nullptr;
    return guarded("open a token stream", [&]() {
        *out = new tokenizer_stream;
        (*out)->owner = t;
        return 0;
    });
}

int tokenizer_stream_next(struct tokenizer_stream *s, int32_t id, const char **text) {
    *text = "";
    if (check_id(*s->owner, id) != 0) return -1;
    return guarded("decode a token", [&]() {
        s->out.clear();
        add_token(*s, id);
        s->started |= !s->out.empty();
        drop_zero_bytes(s->out);
        *text = s->out.c_str();
        return 0;
    });
}

const char *tokenizer_stream_finish(struct tokenizer_stream *s) {
    s->out.clear();
    guarded("decode a token", [&]() {
        move_characters(*s, true);
        return 0;
    });
    s->started = false;
    s->silent.clear();
    s->bytes.clear();
    return s->out.c_str();
}

void tokenizer_stream_close(struct tokenizer_stream *s) {
    delete s;
}
