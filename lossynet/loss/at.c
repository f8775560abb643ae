/* at.c — lists of values for some links or tensors, such as "3=0.5,2-5=1,layers.0-3=0.2:0": loss rates
 * (loss_model.c) and rounds of retransmission (retransmit.c).
 *
 * An entry begins with a worker, with two, or with the name of tensors. A name has parts between dots. It
 * stands for all tensors whose names have these parts in this order, perhaps with others between them:
 * "layers.0-3" for "model.layers.2.mlp.up_proj.weight", and "up_proj" for that of every layer. A part A-B
 * stands for the numbers from A to B.
 */
#include "lossynet/loss/loss.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- what entries name ---- */

/* Whether a part of a name in the list stands for a part of a tensor's name; of a part A-B, all numbers or one end. */
static bool part_fits(const char *part, size_t length, const char *of_tensor, size_t n,
                      enum ln_at_numbers which) {
    if (length == n && !memcmp(part, of_tensor, n)) return true;
    if (!isdigit((unsigned char)*part) || !isdigit((unsigned char)*of_tensor)) return false;
    char *dash, *end, *after;
    const long low = strtol(part, &dash, 10);
    if (*dash != '-' || !isdigit((unsigned char)dash[1])) return false;
    const long high = strtol(dash + 1, &end, 10), number = strtol(of_tensor, &after, 10);
    return end == part + length && after == of_tensor + n && low <= number && number <= high &&
           (which != LN_AT_FIRST || number == low) && (which != LN_AT_LAST || number == high);
}

bool ln_at_fits(const char *name, const char *tensor, enum ln_at_numbers which) {
    while (*name) {
        const size_t length = strcspn(name, ".");
        bool fits = false;
        while (*tensor && !fits) {
            const size_t n = strcspn(tensor, ".");
            fits = part_fits(name, length, tensor, n, which);
            tensor += n + (tensor[n] == '.');
        }
        if (!fits) return false;
        name += length + (name[length] == '.');
    }
    return true;
}

uint32_t ln_at_names(const struct ln_at *at, const char *tensor) {
    uint32_t names = 0;
    for (int i = 0; i < at->count; i++)
        if (at->entry[i].bit && ln_at_fits(at->entry[i].name, tensor, LN_AT_ALL))
            names |= at->entry[i].bit;
    return names;
}

static bool is_link(const struct ln_at_entry *e, int sender, int receiver) {
    return (e->sender < 0 || e->sender == sender) && (e->receiver < 0 || e->receiver == receiver);
}

double ln_at_value(const struct ln_at *at, lossynet_phase phase, int sender, int receiver,
                   uint32_t names, double otherwise) {
    for (int i = 0; i < at->count; i++) {
        const struct ln_at_entry *e = &at->entry[i];
        if (e->bit ? (names & e->bit) != 0
                   : is_link(e, sender, receiver) || (e->both_ways && is_link(e, receiver, sender)))
            otherwise = e->value[phase];
    }
    return otherwise;
}

double ln_at_most(const struct ln_at *at, lossynet_phase phase) {
    double most = 0;
    for (int i = 0; i < at->count; i++) most = fmax(most, at->entry[i].value[phase]);
    return most;
}

uint64_t ln_at_fingerprint(const struct ln_at *at, uint64_t hash) {
    for (int i = 0; i < at->count; i++) {
        const struct ln_at_entry *e = &at->entry[i];
        uint64_t bits[2];
        memcpy(bits, e->value, sizeof bits);
        hash = ln_mix(hash ^ bits[0]);
        hash = ln_mix(hash ^ (uint64_t)(uint32_t)e->sender << 32 ^ (uint32_t)e->receiver);
        if (bits[0] != bits[1] || e->both_ways != (e->receiver < 0))
            hash = ln_mix(hash ^ bits[1] ^ e->both_ways);
        for (const char *c = e->name; *c; c++) hash = ln_mix(hash ^ (uint64_t)*c);
    }
    return hash;
}

/* ---- reading a list ---- */

/* Parses a worker's number, or '*', every worker. Moves *text behind it. */
#define EVERY LONG_MIN
static bool end_parse(const char **text, long *worker) {
    char *end = (char *)*text + 1;
    *worker = **text == '*' ? EVERY : strtol(*text, &end, 10);
    if (*worker == EVERY && **text != '*') ++*worker; /* a number that no worker has */
    const bool ok = end != *text;
    *text = end;
    return ok;
}

/* Parses a name up to '='. Moves *text to it. */
static bool name_parse(const char **text, char *name, size_t size) {
    const size_t length = strspn(*text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                        "0123456789_.-");
    if (length >= size) return false;
    memcpy(name, *text, length);
    name[length] = 0;
    *text += length;
    return true;
}

/* Parses VALUE or GRADIENTS:PARAMETERS. Moves *text behind it. */
static bool values_parse(const char **text, double value[2]) {
    char *end;
    value[0] = value[1] = ln_number(*text, &end);
    bool ok = end != *text;
    if (ok && *end == ':') {
        *text = end + 1;
        value[1] = ln_number(*text, &end);
        ok = end != *text;
    }
    *text = end;
    return ok;
}

static lossynet_status check_workers(const struct ln_at_form *form, const long ends[2], int workers,
                                     int length, const char *start) {
    for (int e = 0; e < 2; e++)
        if (ends[e] != EVERY && (ends[e] < 0 || ends[e] >= workers))
            return ln_refuse("%s: '%.*s': worker %ld: expected 0 to %d", form->setting, length,
                             start, ends[e], workers - 1);
    if (ends[0] != ends[1] || ends[0] == EVERY) return LOSSYNET_OK;
    return ln_refuse("%s: '%.*s': expected two workers, one loses nothing to itself", form->setting,
                     length, start);
}

/* Parses one entry up to a comma. Moves *text to its end. */
static lossynet_status parse_one(struct ln_at *at, const struct ln_at_form *form, int workers,
                                 const char **text) {
    struct ln_at_entry *e = &at->entry[at->count++];
    const char *start = *text, *next = start;
    const int length = (int)strcspn(start, ",");
    const size_t key = strcspn(start, "=,");
    const bool named = isalpha((unsigned char)*start) || memchr(start, '.', key);
    long ends[2] = {EVERY, EVERY};
    errno = 0;
    *e = (struct ln_at_entry){0};
    bool ok = named ? name_parse(&next, e->name, sizeof e->name) : end_parse(&next, &ends[0]);
    const bool pair = !named && ok && *next == '-';
    if (pair) {
        next++;
        ok = end_parse(&next, &ends[1]);
    }
    ok = ok && *next++ == '=' && values_parse(&next, e->value) && !errno && next == start + length;
    *text = start + length;
    if (!ok)
        return ln_refuse(
            "%s: '%.*s': expected WORKER=%s or SENDER-RECEIVER=%s, or NAME=%s with the name of "
            "tensors, several with commas; a %s may be GRADIENTS:PARAMETERS, and '*' is every "
            "worker",
            form->setting, length, start, form->value, form->value, form->value, form->value);
    if (check_workers(form, ends, workers, length, start)) return LOSSYNET_INVALID;
    for (int phase = 0; phase < 2; phase++) {
        const double x = e->value[phase];
        if (x >= 0 && x <= form->most && (!form->whole || x == floor(x))) continue;
        return ln_refuse("%s: '%.*s': %s %g: expected a %snumber from 0 to %g", form->setting,
                         length, start, form->what, x, form->whole ? "whole " : "", form->most);
    }
    e->sender = ends[0] == EVERY ? -1 : (int)ends[0];
    e->receiver = ends[1] == EVERY ? -1 : (int)ends[1];
    e->both_ways = !pair && !named;
    if (!named) return LOSSYNET_OK;
    if (at->names == LOSSYNET_AT_NAMES)
        return ln_refuse("%s: '%.*s': expected at most %d names", form->setting, length, start,
                         LOSSYNET_AT_NAMES);
    e->bit = 1u << at->names++;
    return LOSSYNET_OK;
}

lossynet_status ln_at_parse(struct ln_at *at, const char *text, const struct ln_at_form *form,
                            int workers) {
    *at = (struct ln_at){0};
    if (!text || strcmp(text, "none") == 0) return LOSSYNET_OK;
    size_t count = 1;
    for (const char *c = text; *c; c++) count += *c == ',';
    at->entry = (struct ln_at_entry *)ln_memory_take(count, sizeof *at->entry);
    if (!at->entry)
        return ln_fail(LOSSYNET_NO_MEMORY, "%s: no memory for a list of %zu %ss", form->setting,
                       count, form->what);
    lossynet_status status = parse_one(at, form, workers, &text);
    while (!status && *text++ == ',') status = parse_one(at, form, workers, &text);
    return status;
}

void ln_at_close(struct ln_at *at) {
    free(at->entry);
    *at = (struct ln_at){0};
}
